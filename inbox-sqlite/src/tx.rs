//! [`SqliteTx`]: an open transaction, owned.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use inbox_core::{Error, ErrorKind, Key, Result};
use rusqlite::{Connection, OptionalExtension};
use tokio::sync::OwnedMutexGuard;

use crate::error::{commit_error, driver_error, ended};
use crate::schema::SqliteTable;

/// A transaction that lasted longer than this has its records stamped again at its commit.
const LONG: Duration = Duration::from_millis(100);

/// A connection that the store has to itself, and whether its transaction was ended behind the store's back.
pub(crate) struct Held {
    connection: Connection,
    /// What SQLite's hooks have said since the transaction began. Raw SQL cannot get around them.
    ends: Arc<Ends>,
}

/// How a transaction has ended, as SQLite's commit and rollback hooks tell.
#[derive(Default)]
struct Ends {
    committed: AtomicBool,
    rolled_back: AtomicBool,
}

impl Held {
    pub(crate) fn new(mut connection: Connection) -> rusqlite::Result<Self> {
        let ends = Arc::new(Ends::default());
        let (commits, rollbacks) = (Arc::clone(&ends), Arc::clone(&ends));
        // `&mut` is what rusqlite 0.43 wants here and 0.32 does not mind.
        let connection_mut = &mut connection;
        connection_mut
            .commit_hook(Some(move || {
                commits.committed.store(true, Ordering::Relaxed);
                false // lets it commit
            }))
            .answer()?;
        connection_mut
            .rollback_hook(Some(move || rollbacks.rolled_back.store(true, Ordering::Relaxed)))
            .answer()?;
        Ok(Self { connection, ends })
    }

    pub(crate) const fn connection(&self) -> &Connection {
        &self.connection
    }

    /// `BEGIN IMMEDIATE`: the write lock is had now or not at all. A deferred transaction that reads first could not be
    /// upgraded after another writer's commit.
    pub(crate) fn begin(&self) -> rusqlite::Result<()> {
        if !self.connection.is_autocommit() {
            // Its last rollback failed.
            self.connection.execute_batch("ROLLBACK")?;
        }
        // A handler may have set another, and this thread must not wait in SQLite.
        self.connection.busy_timeout(Duration::ZERO)?;
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        self.ends.committed.store(false, Ordering::Relaxed);
        self.ends.rolled_back.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn committed(&self) -> bool {
        self.ends.committed.load(Ordering::Relaxed)
    }

    fn rolled_back(&self) -> bool {
        self.ends.rolled_back.load(Ordering::Relaxed)
    }
}

/// What setting a hook answers, in every version of rusqlite that this crate goes with.
trait Answer {
    fn answer(self) -> rusqlite::Result<()>;
}

impl Answer for () {
    fn answer(self) -> rusqlite::Result<()> {
        Ok(())
    }
}

impl Answer for rusqlite::Result<()> {
    fn answer(self) -> rusqlite::Result<()> {
        self
    }
}

/// An open transaction (`BEGIN IMMEDIATE`) of a [`SqliteInbox`](crate::SqliteInbox), on a connection of its own; rolled
/// back when dropped.
///
/// It dereferences to [`rusqlite::Connection`]: that is how handlers write their effects. Do not end it with a raw
/// `COMMIT` or `ROLLBACK`; the store notices, and its commit is then an error. Savepoints are fine, as SQL (`SAVEPOINT s`,
/// `RELEASE s`); rusqlite's own needs a `&mut Connection`, which is not to be had.
///
/// It holds the database's one write lock: fetch what a handler needs from elsewhere before. Pass it to helpers as `&mut
/// SqliteTx`: a `&SqliteTx`, a statement or rows held across an `.await` keep the future from being spawned.
///
/// Statements run on the thread that calls them, and touch memory and the page cache, not the disk's flush; the commit
/// flushes, and runs on a thread for blocking work.
pub struct SqliteTx {
    held: OwnedMutexGuard<Held>,
    claimed: Vec<Key>,
    first_claim: Option<Instant>,
}

impl SqliteTx {
    /// The transaction that `held` has just begun.
    pub(crate) const fn new(held: OwnedMutexGuard<Held>) -> Self {
        Self {
            held,
            claimed: Vec::new(),
            first_claim: None,
        }
    }

    /// Fails if the transaction that was begun is not the one that is open now.
    pub(crate) fn ensure_open(&self, doing: &str) -> Result<()> {
        if self.is_autocommit() || self.held.committed() || self.held.rolled_back() {
            return Err(ended(doing));
        }
        Ok(())
    }

    /// Notes a new claim.
    pub(crate) fn note(&mut self, key: Key) {
        self.claimed.push(key);
        self.first_claim.get_or_insert_with(Instant::now);
    }

    /// Commits, waiting at most `busy_timeout` for readers where the database is not in WAL mode. Blocks.
    pub(crate) fn commit(self, table: &SqliteTable, busy_timeout: Duration) -> Result<()> {
        self.ensure_open("commit")?;
        if self.first_claim.is_some_and(|since| since.elapsed() > LONG) {
            table
                .stamp(&self, &self.claimed)
                .map_err(|error| driver_error("stamp the records", error))?;
        }
        refuse_attached(&self)?;
        let committed = match self
            .busy_timeout(busy_timeout)
            .and_then(|()| self.prepare_cached("COMMIT")?.execute([]))
        {
            // An error after the commit, such as that of a hook or of a checkpoint, undoes nothing.
            Err(_) if self.is_autocommit() && self.held.committed() && !self.held.rolled_back() => Ok(0),
            answer => answer.map_err(commit_error),
        };
        // From here on, threads of the runtime use this connection again, and must not wait in it.
        let reset = self.busy_timeout(Duration::ZERO);
        committed?;
        reset.map_err(|error| driver_error("reset the busy timeout", error))?;
        Ok(())
    }

    /// Rolls back. Where that fails the next transaction on the connection tries again.
    pub(crate) fn roll_back(&self) -> Result<(), Error> {
        if self.is_autocommit() {
            return Ok(());
        }
        self.execute_batch("ROLLBACK")
            .map_err(|error| driver_error("roll back", error))
    }
}

/// In WAL mode SQLite commits each file by itself, so a crash in between would leave the record without its effect.
pub(crate) fn refuse_attached(connection: &Connection) -> Result<()> {
    let attached: Option<String> = connection
        .prepare_cached("SELECT name FROM pragma_database_list WHERE file <> '' AND name <> 'main' LIMIT 1")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)).optional())
        .map_err(|error| driver_error("look for attached databases", error))?;
    match attached {
        None => Ok(()),
        Some(name) => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "the database {name:?} is attached, and SQLite does not commit two files together: a crash could keep the \
                 record and lose the effect; have the effects in the inbox's own file, and attach nothing to its connection"
            ),
        )),
    }
}

impl Deref for SqliteTx {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        self.held.connection()
    }
}

impl Drop for SqliteTx {
    fn drop(&mut self) {
        if let Err(error) = self.roll_back() {
            tracing::warn!(%error, "a dropped transaction could not be rolled back yet");
        }
    }
}

impl fmt::Debug for SqliteTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteTx")
            .field("claimed", &self.claimed)
            .finish_non_exhaustive()
    }
}
