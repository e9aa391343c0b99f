//! What the tests of this crate share: a database file with a table of effects.

#![allow(dead_code, reason = "every test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::path::PathBuf;

use inbox_core::{BoxError, Inbox, MessageId, Outcome, Result, Upkeep};
use inbox_sqlite::rusqlite::Connection;
use inbox_sqlite::{Builder, SqliteInbox};

pub(crate) struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let place = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        place
            .connect()
            .execute_batch("PRAGMA journal_mode = wal; CREATE TABLE effects (name TEXT NOT NULL) STRICT")
            .unwrap();
        place
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.folder.path().join("test.db")
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.folder.path().join("test.db-wal")
    }

    /// A connection of somebody else's.
    pub(crate) fn connect(&self) -> Connection {
        Connection::open(self.path()).unwrap()
    }

    pub(crate) async fn inbox(&self) -> Inbox<SqliteInbox> {
        self.inbox_with(SqliteInbox::builder()).await
    }

    pub(crate) async fn inbox_with(&self, builder: Builder) -> Inbox<SqliteInbox> {
        let store = builder.open(self.path()).await.unwrap();
        store.setup().await.unwrap();
        Inbox::new(store, "group").unwrap()
    }

    /// How many committed effects of this name there are.
    pub(crate) fn effects(&self, name: &str) -> i64 {
        self.count("SELECT count(*) FROM effects WHERE name = ?1", [name])
    }

    pub(crate) fn records(&self) -> i64 {
        self.count("SELECT count(*) FROM inbox_events", [])
    }

    pub(crate) fn count(&self, sql: &str, params: impl inbox_sqlite::rusqlite::Params) -> i64 {
        self.connect().query_row(sql, params, |row| row.get(0)).unwrap()
    }
}

pub(crate) fn id(text: &str) -> MessageId {
    MessageId::new(text).unwrap()
}

/// Handles one message, with its name for an effect.
pub(crate) async fn handle(inbox: &Inbox<SqliteInbox>, name: &str) -> Result<Outcome<()>> {
    inbox
        .process(id(name), async |tx| {
            tx.execute("INSERT INTO effects VALUES (?1)", [name])?;
            Ok::<_, BoxError>(())
        })
        .await
}
