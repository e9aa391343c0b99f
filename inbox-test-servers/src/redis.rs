//! A Redis server.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::OnceLock;

use crate::programs::find;
use crate::shell::{Folder, Shell, free_port};

const PACKAGE: &str = "redis-server";

/// The variable that names a server to use instead of a private one.
const URL_VARIABLE: &str = "INBOX_TEST_REDIS_URL";

/// The URL of the server that all tests of this process share: what `INBOX_TEST_REDIS_URL` says, else a private server's,
/// started by the first call, with its append-only file written before every answer.
///
/// Each test takes a prefix of its own for its keys; see [`unique_name`](crate::unique_name).
///
/// # Panics
///
/// If Redis is not installed or does not start.
pub fn redis_url() -> String {
    static SHARED: OnceLock<Redis> = OnceLock::new();
    match std::env::var(URL_VARIABLE) {
        Ok(url) if !url.is_empty() => url,
        _ => SHARED.get_or_init(|| Redis::start(&Redis::DURABLE)).url(),
    }
}

/// A private Redis server on a loopback port, without a password.
#[derive(Debug)]
pub struct Redis {
    shell: Shell,
    port: u16,
}

impl Redis {
    /// Settings with which nothing is forgotten that was acknowledged.
    pub const DURABLE: [&'static str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

    /// A new server that accepts connections, with these command-line settings beside the port's and folder's.
    ///
    /// # Panics
    ///
    /// If Redis is not installed, or does not start within a minute.
    pub fn start(settings: &[&str]) -> Self {
        let folder = Folder::new();
        let port = free_port();
        let mut server: Vec<OsString> = vec![find("redis-server", PACKAGE).into()];
        let port_text = port.to_string();
        for setting in [
            "--port",
            &port_text,
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--enable-debug-command",
            "yes",
            "--dir",
        ] {
            server.push(setting.into());
        }
        server.push(folder.path().into());
        server.extend(settings.iter().map(OsString::from));
        let server: Vec<&OsStr> = server.iter().map(AsRef::as_ref).collect();
        let mut redis = Self {
            shell: folder.into_shell(&server, "KILL"),
            port,
        };
        redis.start_again();
        redis
    }

    /// Starts a server that was [killed](Self::kill), on the same data and port; back when it answers.
    ///
    /// # Panics
    ///
    /// If it does not within a minute.
    pub fn start_again(&mut self) {
        self.shell.order("start");
        self.shell.wait_until("Redis", || answers(self.port));
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
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// The port.
    pub const fn port(&self) -> u16 {
        self.port
    }
}

/// Whether a server on this port has loaded its data and answers.
fn answers(port: u16) -> bool {
    let ping = || -> std::io::Result<bool> {
        let mut stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.write_all(b"PING\r\n")?;
        let mut answer = [0; 7];
        stream.read_exact(&mut answer)?;
        Ok(&answer == b"+PONG\r\n")
    };
    ping().unwrap_or(false)
}
