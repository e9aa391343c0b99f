//! A nats-server with JetStream.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use crate::programs::find;
use crate::shell::{Folder, Shell, free_port};
use crate::unique_name;

const PACKAGE: &str = "nats-server";

/// The variable that names a server to use instead of a private one.
const URL_VARIABLE: &str = "INBOX_TEST_NATS_URL";

/// The variable that names the program to run instead of the installed one, for tests against another version.
const PROGRAM_VARIABLE: &str = "INBOX_TEST_NATS_SERVER";

/// What the server's log says where another program listens on its port.
const PORT_IS_TAKEN: &str = "address already in use";

/// The URL of the server that all tests of this process share: what `INBOX_TEST_NATS_URL` says, else a private
/// server's, started by the first call.
///
/// Each test takes streams and subjects of its own; see [`unique_name`].
///
/// # Panics
///
/// If nats-server is not installed or does not start.
pub fn nats_url() -> String {
    static SHARED: OnceLock<Nats> = OnceLock::new();
    match std::env::var(URL_VARIABLE) {
        Ok(url) if !url.is_empty() => url,
        _ => SHARED.get_or_init(Nats::start).url(),
    }
}

/// A private nats-server on a loopback port, with JetStream on files.
///
/// The program is the one that `INBOX_TEST_NATS_SERVER` names, else the one that is installed.
#[derive(Debug)]
pub struct Nats {
    shell: Shell,
    port: u16,
    name: String,
}

impl Nats {
    /// A new server whose JetStream answers, and which asks for no password.
    ///
    /// # Panics
    ///
    /// If nats-server is not installed, or does not start within a minute.
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// A new server with these settings, in the language of its configuration file: users and their permissions, say,
    /// or `jetstream { sync_interval: always }` (from server 2.10), without which messages survive the server's end but
    /// not the machine's. Address, port and the store's folder are given on the command line, which has the last word.
    ///
    /// Where the settings ask for a password, the server counts as up when it accepts connections; that is after
    /// JetStream has loaded its streams.
    ///
    /// # Panics
    ///
    /// If nats-server is not installed, does not take the settings, or does not start within a minute.
    pub fn start_with(settings: &str) -> Self {
        let patience = patience();
        loop {
            let mut server = Self::lay_down(settings);
            if server.comes_up() {
                return server;
            }
            assert!(
                Instant::now() < patience,
                "every free port was taken before nats-server had it"
            );
        }
    }

    /// Everything but the start.
    fn lay_down(settings: &str) -> Self {
        let folder = Folder::new();
        let program = program(&folder);
        let file = folder.path().join("nats.conf");
        // A file that sets nothing is refused by newer servers.
        fs::write(&file, format!("host: \"127.0.0.1\"\n{settings}\n"))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let checked = folder
            .command(&program)
            .args(["-t".as_ref(), "-c".as_ref(), file.as_os_str()])
            .output()
            .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
        assert!(
            checked.status.success(),
            "{} does not take these settings: {}{}",
            program.display(),
            String::from_utf8_lossy(&checked.stdout),
            String::from_utf8_lossy(&checked.stderr)
        );
        let port = free_port();
        let port_text = port.to_string();
        let name = unique_name();
        let store = folder.path().join("store");
        let server = [
            program.as_os_str(),
            "-a".as_ref(),
            "127.0.0.1".as_ref(),
            "-p".as_ref(),
            port_text.as_ref(),
            "-n".as_ref(),
            name.as_ref(),
            "-js".as_ref(),
            "-sd".as_ref(),
            store.as_os_str(),
            "-c".as_ref(),
            file.as_os_str(),
        ];
        Self {
            shell: folder.into_shell(&server, "KILL"),
            port,
            name,
        }
    }

    /// Starts a server that was [killed](Self::kill), on the same store and port; back when JetStream answers.
    ///
    /// # Panics
    ///
    /// If it does not within a minute.
    pub fn start_again(&mut self) {
        let patience = patience();
        while !self.comes_up() {
            assert!(
                Instant::now() < patience,
                "another program holds port {} of a nats-server that was to be started again",
                self.port
            );
            // It has ended by itself; the shell forgets it.
            self.shell.order("KILL");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Starts it and waits until it answers; false where another program has its port.
    fn comes_up(&mut self) -> bool {
        let said_before = self.log().len();
        self.shell.order("start");
        let mut taken = false;
        self.shell.wait_until("nats-server", || {
            taken = self
                .log()
                .get(said_before..)
                .is_some_and(|log| log.contains(PORT_IS_TAKEN));
            taken || answers(self.port, &self.name).unwrap_or(false)
        });
        !taken
    }

    /// Kills the server (SIGKILL), as a crash would; back when it is gone.
    ///
    /// # Panics
    ///
    /// If the shell that runs it is gone.
    pub fn kill(&mut self) {
        self.shell.order("KILL");
    }

    /// The URL of the server.
    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// The URL with a user of the settings that the server was started with.
    pub fn url_as(&self, user: &str, password: &str) -> String {
        format!("nats://{user}:{password}@127.0.0.1:{}", self.port)
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// The folder of its log and store.
    pub fn folder(&self) -> &Path {
        self.shell.folder()
    }

    /// What the server wrote to its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.shell.folder().join("log")).unwrap_or_default()
    }
}

/// How long to try.
fn patience() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// The program, where the folder's user can run it.
fn program(folder: &Folder) -> PathBuf {
    let program = match std::env::var_os(PROGRAM_VARIABLE) {
        Some(named) if !named.is_empty() => PathBuf::from(named),
        _ => return find("nats-server", PACKAGE),
    };
    assert!(
        program.is_file(),
        "{PROGRAM_VARIABLE} names {}, which is no file; give the path of a nats-server program, or unset it to use the \
         installed one",
        program.display()
    );
    // The folders change before it runs.
    let program = program
        .canonicalize()
        .unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    match folder.command(&program).arg("--version").output() {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        _ => return program,
    }
    // Root's own folders are closed to the user that servers run as. A program of its own does the copying: while a file
    // is open for writing here, a child of another thread could inherit that, and the file could not be run.
    let copy = folder.path().join("nats-server");
    let copied = Command::new("install")
        .args(["-m", "755"])
        .arg(&program)
        .arg(&copy)
        .output()
        .unwrap_or_else(|error| panic!("install: {error}"));
    assert!(
        copied.status.success(),
        "install: {}",
        String::from_utf8_lossy(&copied.stderr)
    );
    copy
}

/// Whether the server of this name is up on this port and its JetStream answers a request.
///
/// The name tells it from another server that was given the same port meanwhile.
fn answers(port: u16, name: &str) -> io::Result<bool> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    // An account without JetStream would leave the request without an answer.
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let mut next = || lines.next().unwrap_or(Ok(String::new()));

    let info = next()?;
    if !info.contains(&format!(r#""server_name":"{name}""#)) || !info.contains(r#""jetstream":true"#) {
        return Ok(false);
    }
    if info.contains(r#""auth_required":true"#) || info.contains(r#""tls_required":true"#) {
        // Nothing can be asked without a password or a handshake, but streams are loaded before anybody is let in.
        return Ok(true);
    }
    let mut request = String::from("CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\n");
    let _ = write!(request, "SUB {name} 1\r\nPUB $JS.API.INFO {name} 0\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    loop {
        let line = next()?;
        // A user without a password who may not ask is let in by a server that is up.
        if line.starts_with("MSG ") || line.starts_with("-ERR 'Permissions Violation") {
            return Ok(true);
        }
        // Among them a message with headers, which says that nobody listens for the request yet.
        if line.is_empty() || line.starts_with("HMSG ") || line.starts_with("-ERR") {
            return Ok(false);
        }
    }
}
