//! Private database servers for tests, from the machine's own binaries.
//!
//! ```no_run
//! // One server for all tests of this process, or the one that INBOX_TEST_POSTGRES_URL names.
//! let url = inbox_test_servers::postgres_url();
//! // A server of one's own, to be restarted.
//! let mut server = inbox_test_servers::Postgres::start();
//! server.stop(inbox_test_servers::Stop::Immediate);
//! server.start_again();
//! # let _ = url;
//! ```
//!
//! A server runs in a temporary folder on a free port, as an unprivileged user where the run is root, and is gone with
//! its folder when the test process ends, **whatever ends it**: a small shell stands between, reads orders from a pipe,
//! and on the pipe's end (which even SIGKILL of the test process brings about) stops the server and removes the folder.
//!
//! Where a server is not installed, these functions panic with the name of the package: a test never passes by being
//! skipped.

mod nats;
mod pgbouncer;
mod postgres;
mod programs;
mod redis;
mod shell;

pub use nats::{Nats, nats_url};
pub use pgbouncer::PgBouncer;
pub use postgres::{Postgres, Stop, postgres_url};
pub use redis::{Redis, redis_url};

/// A name that no other test has, in this process or another: a letter, digits and underscores, at most 40 bytes.
pub fn unique_name() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    format!("t{nanos:x}_{}_{next}", std::process::id())
}
