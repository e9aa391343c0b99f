//! The servers come up, can be crashed and started again, and are gone when their process is.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use inbox_test_servers::{Nats, PgBouncer, Postgres, Stop};

fn listens(port: u16) -> bool {
    TcpStream::connect(("127.0.0.1", port)).is_ok()
}

#[test]
fn a_server_starts_crashes_starts_again_and_is_gone_after_the_drop() {
    let mut server = Postgres::start();
    let folder = server.socket_folder().to_owned();
    let port = server.port();
    assert!(listens(port));
    server.stop(Stop::Immediate);
    assert!(!listens(port));
    server.start_again();
    assert!(server.log().contains("recovery"), "{}", server.log());
    let bouncer = PgBouncer::before("127.0.0.1", port, 2, None);
    assert!(bouncer.url().starts_with("postgres://"));
    drop(bouncer);
    drop(server);
    assert!(!folder.exists());
    assert!(!listens(port));
}

/// What the NATS server on this port answers to a request, as one line of JSON.
fn ask(port: u16, subject: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    write!(
        stream,
        "CONNECT {{\"verbose\":false}}\r\nSUB answer 1\r\nPUB {subject} answer {}\r\n{body}\r\n",
        body.len()
    )
    .unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    let first = lines
        .find(|line| line.starts_with("MSG ") || line.starts_with("-ERR"))
        .unwrap();
    assert!(first.starts_with("MSG "), "{first}");
    lines.next().unwrap()
}

#[test]
fn a_nats_server_keeps_its_stream_when_killed_and_is_gone_after_the_drop() {
    let mut server = Nats::start();
    let (folder, port) = (server.folder().to_owned(), server.port());
    let stream = r#"{"name":"S","subjects":["s"],"storage":"file","num_replicas":1,"retention":"limits","max_age":0,
        "max_msgs":-1,"max_bytes":-1,"max_consumers":-1,"discard":"old"}"#;
    let created = ask(port, "$JS.API.STREAM.CREATE.S", stream);
    assert!(created.contains(r#""name":"S""#), "{created}");
    for sequence in 1..=20 {
        let stored = ask(port, "s", "body");
        assert!(stored.contains(&format!(r#""seq":{sequence}"#)), "{stored}");
    }
    server.kill();
    assert!(!listens(port));
    server.start_again();
    let info = ask(port, "$JS.API.STREAM.INFO.S", "");
    assert!(info.contains(r#""messages":20"#), "{info}");
    assert_eq!(server.url(), format!("nats://127.0.0.1:{port}"));
    drop(server);
    assert!(!folder.exists());
    assert!(!listens(port));
}

#[test]
fn a_nats_server_waits_until_another_program_has_left_its_port() {
    let mut server = Nats::start();
    server.kill();
    let other = TcpListener::bind(("127.0.0.1", server.port())).unwrap();
    let log = server.folder().join("log");
    std::thread::scope(|scope| {
        let again = scope.spawn(|| server.start_again());
        wait_for(|| {
            std::fs::read_to_string(&log)
                .unwrap()
                .contains("already in use")
                .then_some(())
        });
        assert!(!again.is_finished());
        drop(other);
    });
    let info = ask(server.port(), "$JS.API.INFO", "");
    assert!(info.contains("account_info_response"), "{info}");
}

#[test]
fn a_nats_server_takes_settings_and_says_which_it_does_not_know() {
    let server = Nats::start_with(r#"authorization { users: [{ user: "u", password: "p" }] }"#);
    let refused = what_a_client_without_a_password_is_told(server.port());
    assert!(refused.contains("Authorization"), "{refused}");
    assert_eq!(
        server.url_as("u", "p"),
        format!("nats://u:p@127.0.0.1:{}", server.port())
    );

    let panic = std::panic::catch_unwind(|| Nats::start_with("no_such_setting: 1")).unwrap_err();
    let words = panic.downcast_ref::<String>().unwrap();
    assert!(
        words.contains("does not take") && words.contains("no_such_setting"),
        "{words}"
    );
}

/// The error that the server answers a client without a password with.
fn what_a_client_without_a_password_is_told(port: u16) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"CONNECT {\"verbose\":false}\r\nPING\r\n").unwrap();
    let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
    lines
        .find(|line| line.starts_with("-ERR") || line.starts_with("PONG"))
        .unwrap()
}

/// Not a test by itself: the next one runs this binary again with it, and kills that process.
#[test]
fn child_that_is_killed() {
    let Ok(tell) = std::env::var("INBOX_TEST_CHILD") else {
        return;
    };
    let server = Postgres::start();
    std::fs::write(
        &tell,
        format!("{}\n{}", server.port(), server.socket_folder().display()),
    )
    .unwrap();
    std::thread::sleep(Duration::from_secs(60));
}

#[test]
fn a_server_is_gone_after_its_test_process_was_killed() {
    let folder = tempfile::tempdir().unwrap();
    let tell = folder.path().join("told");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child_that_is_killed"])
        .env("INBOX_TEST_CHILD", &tell)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let told = wait_for(|| std::fs::read_to_string(&tell).ok().filter(|told| told.contains('\n')));
    let (port, server_folder) = told.split_once('\n').unwrap();
    let port: u16 = port.parse().unwrap();
    assert!(listens(port));
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    wait_for(|| (!Path::new(server_folder).exists() && !listens(port)).then_some(()));
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let patience = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < patience, "waited for a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
}
