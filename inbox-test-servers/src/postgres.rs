//! A PostgreSQL server.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use crate::programs::find;
use crate::shell::{Folder, Shell, free_port};

const PACKAGE: &str = "postgresql";

/// The variable that names a server to use instead of a private one.
const URL_VARIABLE: &str = "INBOX_TEST_POSTGRES_URL";

/// The URL of the server that all tests of this process share: what `INBOX_TEST_POSTGRES_URL` says, else a private
/// server's, started by the first call.
///
/// Its role may create schemas; each test makes itself one, of a [`unique_name`](crate::unique_name).
///
/// # Panics
///
/// If PostgreSQL is not installed or does not start.
pub fn postgres_url() -> String {
    static SHARED: OnceLock<Postgres> = OnceLock::new();
    match std::env::var(URL_VARIABLE) {
        Ok(url) if !url.is_empty() => url,
        _ => SHARED.get_or_init(Postgres::start).url(),
    }
}

/// How to stop a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Disconnects everybody and shuts down in order.
    Fast,
    /// As a crash would: the next start recovers from the log.
    Immediate,
}

/// A private PostgreSQL server: role and database `postgres`, no password, on a loopback port and on a socket.
///
/// Its settings are the installation's own (`fsync` and `synchronous_commit` on), but for 200 connections.
#[derive(Debug)]
pub struct Postgres {
    shell: Shell,
    port: u16,
}

impl Postgres {
    /// A new server that accepts connections.
    ///
    /// # Panics
    ///
    /// If PostgreSQL is not installed, or does not start within a minute.
    pub fn start() -> Self {
        let folder = Folder::new();
        let data = folder.path().join("data");
        let initdb = folder
            .command(find("initdb", PACKAGE))
            .args([
                "--no-sync",
                "--auth=trust",
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
                "-D",
            ])
            .arg(&data)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("initdb: {error}"));
        assert!(
            initdb.status.success(),
            "initdb: {}",
            String::from_utf8_lossy(&initdb.stderr)
        );
        let port = free_port();
        let port_text = port.to_string();
        let program = find("postgres", PACKAGE);
        let socket_folder = folder.path().to_owned();
        let arguments: [&OsStr; 13] = [
            program.as_os_str(),
            "-D".as_ref(),
            data.as_os_str(),
            "-p".as_ref(),
            port_text.as_ref(),
            "-k".as_ref(),
            socket_folder.as_os_str(),
            "-c".as_ref(),
            "listen_addresses=127.0.0.1".as_ref(),
            "-c".as_ref(),
            "max_connections=200".as_ref(),
            "-c".as_ref(),
            "log_min_messages=warning".as_ref(),
        ];
        let mut server = Self {
            shell: folder.into_shell(&arguments, "QUIT"),
            port,
        };
        server.start_again();
        server
    }

    /// Starts a server that was [stopped](Self::stop), on the same data and port; back when it accepts connections.
    ///
    /// # Panics
    ///
    /// If it does not within a minute.
    pub fn start_again(&mut self) {
        self.shell.order("start");
        let program = find("pg_isready", PACKAGE);
        self.shell.wait_until("PostgreSQL", || is_ready(&program, self.port));
    }

    /// Stops the server; back when it has ended.
    ///
    /// # Panics
    ///
    /// If the shell that runs it is gone.
    pub fn stop(&mut self, how: Stop) {
        self.shell.order(match how {
            Stop::Fast => "INT",
            Stop::Immediate => "QUIT",
        });
    }

    /// The URL over TCP.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// The folder of the server's socket, which is faster than TCP.
    pub fn socket_folder(&self) -> &Path {
        self.shell.folder()
    }

    /// The port, of TCP and socket alike.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// What the server wrote to its log so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.shell.folder().join("log")).unwrap_or_default()
    }
}

/// Whether a server (or a PgBouncer) on this port accepts connections.
pub(crate) fn is_ready(pg_isready: &PathBuf, port: u16) -> bool {
    Command::new(pg_isready)
        .args([
            "-q",
            "-h",
            "127.0.0.1",
            "-U",
            "postgres",
            "-d",
            "postgres",
            "-p",
            &port.to_string(),
        ])
        .status()
        .is_ok_and(|status| status.success())
}
