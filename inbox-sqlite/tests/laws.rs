//! The conformance suite on SQLite: on a file that the store opens, and on connections that the caller opened.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::{Place, id};
use inbox_conformance::Fixture;
use inbox_core::{ConsumerGroup, Error, ErrorKind, Key, Result, async_trait};
use inbox_sqlite::rusqlite::functions::FunctionFlags;
use inbox_sqlite::rusqlite::{self, Connection};
use inbox_sqlite::{Builder, SqliteInbox, SqliteTx};

/// Who opens the store's connections.
#[derive(Clone, Copy)]
enum Opened {
    ByTheStore,
    ByTheCaller,
}

struct SqliteFixture {
    place: Place,
    opened: Opened,
    /// How far the database's clock is ahead, in milliseconds.
    ahead: Arc<AtomicU64>,
}

impl SqliteFixture {
    fn new(opened: Opened) -> Self {
        Self {
            place: Place::new(),
            opened,
            ahead: Arc::default(),
        }
    }

    async fn open(&self, builder: Builder) -> Result<SqliteInbox> {
        let ahead = Arc::clone(&self.ahead);
        match self.opened {
            Opened::ByTheStore => {
                let clock = move |connection: &Connection| set_clock(connection, Arc::clone(&ahead));
                builder.on_connect(clock).open(self.place.path()).await
            }
            Opened::ByTheCaller => {
                let connection = self.place.connect();
                set_clock(&connection, ahead).unwrap();
                builder.from_connection(connection).await
            }
        }
    }
}

/// SQLite runs in the consumer's process and asks its clock, so the two can only be told apart by putting another
/// function in the place of the one that the statements ask.
fn set_clock(connection: &Connection, ahead: Arc<AtomicU64>) -> rusqlite::Result<()> {
    connection.create_scalar_function("julianday", 1, FunctionFlags::SQLITE_UTF8, move |_| {
        let ahead = Duration::from_millis(ahead.load(Ordering::Relaxed));
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + ahead;
        Ok(since.as_secs_f64() / 86_400.0 + 2_440_587.5)
    })
}

fn failed(error: rusqlite::Error) -> Error {
    Error::new(ErrorKind::Store, "the fixture's statement failed").with_source(error)
}

#[async_trait]
impl Fixture for SqliteFixture {
    type Store = SqliteInbox;

    async fn connect(&self) -> Result<SqliteInbox> {
        self.open(SqliteInbox::builder()).await
    }

    async fn write_effect(&self, _store: &SqliteInbox, tx: &mut SqliteTx, name: &str) -> Result<()> {
        tx.execute("INSERT INTO effects VALUES (?1)", [name])
            .map(drop)
            .map_err(failed)
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        Ok(self.place.effects(name).unsigned_abs())
    }

    async fn advance_clock(&self, _store: &SqliteInbox, by: Duration) -> Result<()> {
        let by = u64::try_from(by.as_millis()).unwrap();
        self.ahead.fetch_add(by, Ordering::Relaxed);
        Ok(())
    }

    fn isolation_levels(&self) -> Vec<String> {
        vec!["serializable, the only one that SQLite has".into()]
    }

    async fn make_older(&self) -> Result<Option<Key>> {
        let key = Key::new(ConsumerGroup::new("older")?, id("older"));
        let sql = format!(
            "CREATE TABLE inbox_events (
                 event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER,
                 PRIMARY KEY (event_id, consumer_group)) WITHOUT ROWID;
             INSERT INTO inbox_events VALUES (x'{}', 'older', 1796000000000)",
            key.id().as_uuid().simple()
        );
        self.place.connect().execute_batch(&sql).map_err(failed)?;
        Ok(Some(key))
    }

    async fn connect_named(&self, name: &str) -> Option<Result<SqliteInbox>> {
        Some(self.open(SqliteInbox::builder().table(name)).await)
    }
}

mod on_a_file {
    use super::{Opened, SqliteFixture};

    inbox_conformance::laws!(SqliteFixture::new(Opened::ByTheStore));
}

mod on_a_connection_of_the_callers {
    use super::{Opened, SqliteFixture};

    inbox_conformance::laws!(SqliteFixture::new(Opened::ByTheCaller));
}
