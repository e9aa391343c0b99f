//! A nats-server with JetStream.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::programs::find;
use crate::shell::{Folder, Shell, free_port};

const PACKAGE: &str = "nats-server";

/// The variable that names a server to use instead of a private one.
const URL_VARIABLE: &str = "INBOX_TEST_NATS_URL";

/// The variable that names the program to start, so that tests can be run against several versions of it.
const PROGRAM_VARIABLE: &str = "INBOX_TEST_NATS_SERVER";

/// The URL of the server that all tests of this process share: what `INBOX_TEST_NATS_URL` says, else a private server's,
/// started by the first call.
///
/// Each test takes streams and subjects of its own; see [`unique_name`](crate::unique_name).
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

/// A private nats-server on a loopback port, with JetStream on files, without a password.
///
/// The program is the one that `INBOX_TEST_NATS_SERVER` names, or the machine's own.
#[derive(Debug)]
pub struct Nats {
    shell: Shell,
    port: u16,
}

impl Nats {
    /// A new server whose JetStream answers.
    ///
    /// # Panics
    ///
    /// If nats-server is not installed, or does not start within a minute.
    pub fn start() -> Self {
        Self::start_with("")
    }

    /// The same with more in its configuration file: users and what they may do, for instance. Without a user's name a
    /// connection must still be able to ask JetStream for its state, by which the start is found to be over.
    ///
    /// # Panics
    ///
    /// As [`start`](Self::start).
    pub fn start_with(configuration: &str) -> Self {
        let folder = Folder::new();
        let port = free_port();
        let program = match std::env::var_os(PROGRAM_VARIABLE) {
            Some(program) if !program.is_empty() => PathBuf::from(program),
            _ => find("nats-server", PACKAGE),
        };
        let file = folder.path().join("nats.conf");
        let data = folder.path().join("jetstream");
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\njetstream {{ store_dir: \"{}\" }}\n{configuration}\n",
            data.display()
        );
        fs::write(&file, text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let server: [OsString; 3] = [program.into(), "-c".into(), file.into()];
        let server: Vec<&OsStr> = server.iter().map(AsRef::as_ref).collect();
        let mut nats = Self {
            shell: folder.into_shell(&server, "KILL"),
            port,
        };
        nats.start_again();
        nats
    }

    /// Starts a server that was [killed](Self::kill), on the same data and port; back when JetStream answers.
    ///
    /// # Panics
    ///
    /// If it does not within a minute.
    pub fn start_again(&mut self) {
        self.shell.order("start");
        self.shell.wait_until("nats-server", || answers(self.port));
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
}

/// Whether JetStream of the server on this port answers: what it takes to ask it in NATS's own text protocol.
fn answers(port: u16) -> bool {
    let ask = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_read_timeout(Some(Duration::from_secs(1)))?;
        stream.write_all(
            b"CONNECT {\"verbose\":false,\"headers\":true,\"no_responders\":true}\r\n\
              SUB up 1\r\nPUB $JS.API.INFO up 0\r\n\r\n",
        )?;
        for line in BufReader::new(stream).lines() {
            let line = line?;
            // Without JetStream, the answer is a header that says that nobody is there: HMSG.
            if line.starts_with("MSG ") {
                return Ok(true);
            }
            if line.starts_with("HMSG ") || line.starts_with("-ERR") {
                return Ok(false);
            }
        }
        Ok(false)
    };
    ask().unwrap_or(false)
}
