//! The servers come up, can be crashed and started again, and are gone when their process is.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use inbox_test_servers::{PgBouncer, Postgres, Stop};

fn listens(port: u16) -> bool {
    std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
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
