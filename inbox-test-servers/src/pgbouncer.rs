//! A PgBouncer before a PostgreSQL server.

use std::fs;

use crate::postgres::is_ready;
use crate::programs::find;
use crate::shell::{Folder, Shell, free_port};

/// A private PgBouncer in transaction mode before a PostgreSQL server.
#[derive(Debug)]
pub struct PgBouncer {
    // Held for its drop, which stops the program.
    _shell: Shell,
    port: u16,
}

impl PgBouncer {
    /// A PgBouncer in transaction mode with this many server connections, before the server on `host` and `port`, which
    /// asks the role `postgres` for no password. Each server connection begins with the statement `first`, if there is
    /// one, which must have no quotes in it.
    ///
    /// # Panics
    ///
    /// If PgBouncer is not installed, or does not start within a minute.
    pub fn before(host: &str, port: u16, server_connections: u32, first: Option<&str>) -> Self {
        let folder = Folder::new();
        let own_port = free_port();
        let ini = folder.path().join("pgbouncer.ini");
        let first = first.map(|sql| format!(" connect_query='{sql}'")).unwrap_or_default();
        fs::write(
            &ini,
            format!(
                "[databases]\n* = host={host} port={port} user=postgres{first}\n[pgbouncer]\nlisten_addr = 127.0.0.1\n\
                 listen_port = {own_port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\n\
                 default_pool_size = {server_connections}\nmax_client_conn = 500\nignore_startup_parameters = \
                 extra_float_digits\n"
            ),
        )
        .unwrap_or_else(|error| panic!("{}: {error}", ini.display()));
        let program = find("pgbouncer", "pgbouncer");
        let mut shell = folder.into_shell(&[program.as_os_str(), ini.as_os_str()], "TERM");
        shell.order("start");
        let pg_isready = find("pg_isready", "postgresql");
        shell.wait_until("PgBouncer", || is_ready(&pg_isready, own_port));
        Self {
            _shell: shell,
            port: own_port,
        }
    }

    /// The URL of the database `postgres` through it.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}
