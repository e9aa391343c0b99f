//! [`SqliteInbox`]: the store, and its [`Builder`].

use std::error::Error as StdError;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use backon::{BackoffBuilder, ExponentialBuilder};
use inbox_core::{
    Claim, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetters, Delivery, Error, ErrorKind, Health,
    InboxStore, Key, Purge, Purged, Record, Result, Transactions, Upkeep,
};
use rusqlite::{Connection, Transaction};
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::spawn_blocking;

use crate::error::{driver_error, kind_of};
use crate::schema::SqliteTable;
use crate::tx::{Held, SqliteTx, refuse_attached};

/// How many claims of a batch are made before other tasks of the thread get a turn.
const CLAIMS_A_TURN: usize = 256;

/// To this size the write-ahead log is cut down once a checkpoint has caught up with it.
const LOG_SIZE_LIMIT: u64 = 16 * 1024 * 1024;

/// A store of records in a SQLite database.
///
/// SQLite has one writer at a time, so this store has one connection for writing, and the tasks of a process **queue**
/// for it, first come, first served. The lock of another process is waited for between tries, asleep, so no thread of
/// the runtime is ever blocked by a lock; only the commit, which flushes to disk, runs on a thread for blocking work. A
/// second connection, for files, reads.
///
/// Clones share all of this. It needs a tokio runtime, of either kind, with its timer enabled.
///
/// ```
/// use inbox_core::{Inbox, MessageId};
/// use inbox_sqlite::SqliteInbox;
///
/// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("billing.db");
/// let inbox = Inbox::new(SqliteInbox::open(path).await?, "billing")?;
/// inbox.setup().await?;
/// let id = MessageId::new("order-17")?;
/// inbox.process(id, async |tx| {
///     tx.execute_batch("CREATE TABLE invoices (order_id TEXT); INSERT INTO invoices VALUES ('order-17')")
/// }).await?;
/// # Ok(()) }
/// ```
///
/// # Settings
///
/// Every connection is put into WAL mode (what SQLite answers is checked), with `synchronous` at least `FULL`: a message
/// is acknowledged after its commit, and a commit that a power loss could undo would lose it. Foreign keys and all else
/// stay as SQLite or the caller has them; see [`Builder::on_connect`].
///
/// Keep the file on a local disk. WAL mode needs shared memory, which network file systems do not have.
#[derive(Clone)]
pub struct SqliteInbox {
    inner: Arc<Inner>,
}

struct Inner {
    table: SqliteTable,
    writer: Arc<Queue>,
    /// The writer again, where the database has no file that a second connection could open.
    reader: Arc<Queue>,
    file: Option<File>,
    busy_timeout: Duration,
}

/// The database's file: where it is, and which it was when it was opened.
struct File {
    path: PathBuf,
    identity: Option<Identity>,
}

/// Device and number of a file.
type Identity = (u64, u64);

impl File {
    /// The file of a connection's main database; `None` for one in memory or in a temporary file.
    fn of(connection: &Connection) -> Option<Self> {
        let path = connection.path().filter(|path| !path.is_empty()).map(PathBuf::from)?;
        let identity = identity(&path);
        Some(Self { path, identity })
    }

    /// Fails if another file stands in the place, or none: what is committed to the one that is open, nobody would find.
    fn ensure_in_place(&self) -> Result<()> {
        if identity(&self.path) == self.identity {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Store,
            format!(
                "the file {} was removed or replaced under the open store; open the store again",
                self.path.display()
            ),
        ))
    }
}

#[cfg(unix)]
fn identity(path: &Path) -> Option<Identity> {
    use std::os::unix::fs::MetadataExt;
    let file = std::fs::metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
fn identity(_path: &Path) -> Option<Identity> {
    None
}

/// A connection, and the tasks that wait for it: first come, first served.
struct Queue {
    connection: Arc<Mutex<Held>>,
    /// How often somebody's turn came: while it grows, the queue moves.
    turns: AtomicU64,
}

impl Queue {
    fn new(connection: Connection) -> Result<Arc<Self>> {
        let held = Held::new(connection).map_err(|error| driver_error("watch the connection's transactions", error))?;
        Ok(Arc::new(Self {
            connection: Arc::new(Mutex::new(held)),
            turns: AtomicU64::new(0),
        }))
    }

    /// Waits for a turn, for as long as the queue moves: a long queue is no fault, a stuck one is.
    async fn turn(&self, busy_timeout: Duration) -> Result<OwnedMutexGuard<Held>> {
        let mut queued = std::pin::pin!(Arc::clone(&self.connection).lock_owned());
        loop {
            let seen = self.turns.load(Ordering::Relaxed);
            match tokio::time::timeout(busy_timeout, &mut queued).await {
                Ok(held) => {
                    self.turns.fetch_add(1, Ordering::Relaxed);
                    return Ok(held);
                }
                Err(_elapsed) if self.turns.load(Ordering::Relaxed) != seen => {}
                Err(_elapsed) => {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        format!(
                            "one transaction of this process has been open for over {busy_timeout:?} and SQLite has one \
                             writer at a time; keep transactions short, and open none inside a handler: it has one \
                             already"
                        ),
                    ));
                }
            }
        }
    }
}

impl SqliteInbox {
    /// Opens a database file, creating it where it is missing; `:memory:` is a database in memory.
    ///
    /// [`builder`](Self::builder) has more to set. Call [`setup`](Upkeep::setup) before the first claim.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the file cannot be opened, [`ErrorKind::Busy`] if another process keeps it locked
    /// for longer than the busy timeout, [`ErrorKind::Unsupported`] if it cannot be put into WAL mode.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::builder().open(path).await
    }

    /// Takes a connection of the caller's, which is used for all there is to do.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), and [`ErrorKind::InvalidInput`] if a transaction is open on it.
    pub async fn from_connection(connection: Connection) -> Result<Self> {
        Self::builder().from_connection(connection).await
    }

    /// Sets table, busy timeout and more.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The table, with the synchronous operations on it.
    pub fn table(&self) -> &SqliteTable {
        &self.inner.table
    }

    /// Claims a message in a transaction that the caller opened with rusqlite, on a connection of the caller's own.
    /// Synchronous, because rusqlite's transaction cannot be held across an `.await` of a spawned task.
    ///
    /// This is [`SqliteTable::try_claim_in`]; its page has examples.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_claim_in(
        &self,
        tx: &Transaction<'_>,
        group: &ConsumerGroup,
        delivery: impl Into<Delivery>,
    ) -> Result<Claim> {
        self.inner.table.try_claim_in(tx, group, delivery)
    }

    /// Claims many messages in a transaction that the caller opened with rusqlite; [`SqliteTable::try_claim_batch_in`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn try_claim_batch_in(
        &self,
        tx: &Transaction<'_>,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Result<Claim>>> {
        self.inner.table.try_claim_batch_in(tx, group, deliveries)
    }

    /// Runs `work` in a transaction of its own, on a thread for blocking work.
    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&SqliteTable, &Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let tx = self.begin().await?;
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            let value = work(&inner.table, &tx)?;
            tx.commit(&inner.table, inner.busy_timeout)?;
            Ok(value)
        })
        .await
    }

    /// Runs `look` on the connection for reading, on a thread for blocking work.
    async fn read<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Inner, &Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let inner = Arc::clone(&self.inner);
        let reader = inner.reader.turn(inner.busy_timeout).await?;
        blocking(move || look(&inner, reader.connection())).await
    }
}

/// Runs `work` on a thread for blocking work. Dropping the future does not stop it; what it has to say is then lost.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match spawn_blocking(work).await {
        Ok(result) => result,
        Err(failed) => match failed.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_cancelled) => Err(Error::new(
                ErrorKind::Unavailable,
                "the runtime is shutting down and no longer takes blocking work; nothing was written",
            )),
        },
    }
}

#[async_trait]
impl InboxStore for SqliteInbox {
    type Tx = SqliteTx;

    async fn try_claim(&self, tx: &mut SqliteTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        tx.ensure_open("claim a message")?;
        let claim = self.inner.table.claim(tx, group, delivery)?;
        if claim.is_new() {
            tx.note(Key::new(group.clone(), delivery.id()));
        }
        Ok(claim)
    }

    async fn try_claim_batch(
        &self,
        tx: &mut SqliteTx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        // One prepared statement, run for each: SQLite runs in this process, so there is no round trip to save. It has
        // one writer, so the order cannot deadlock.
        let mut claims = Vec::with_capacity(deliveries.len());
        for (index, delivery) in deliveries.iter().enumerate() {
            if index > 0 && index % CLAIMS_A_TURN == 0 {
                tokio::task::yield_now().await;
            }
            claims.push(self.try_claim(tx, group, *delivery).await?);
        }
        Ok(claims)
    }
}

#[async_trait]
impl Transactions for SqliteInbox {
    async fn begin(&self) -> Result<SqliteTx> {
        if let Some(file) = &self.inner.file {
            file.ensure_in_place()?;
        }
        let held = self.inner.writer.turn(self.inner.busy_timeout).await?;
        let mut pauses = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(Duration::from_millis(1))
            .with_max_delay(Duration::from_millis(10))
            .without_max_times()
            .build();
        let since = Instant::now();
        loop {
            // The connection's own busy timeout is zero: this answers at once, and the waiting is asleep.
            let error = match held.begin() {
                Ok(()) => return Ok(SqliteTx::new(held)),
                Err(error) => error,
            };
            match pauses.next() {
                Some(pause) if kind_of(&error) == ErrorKind::Busy && since.elapsed() < self.inner.busy_timeout => {
                    tokio::time::sleep(pause).await;
                }
                _ => return Err(driver_error("begin a transaction", error)),
            }
        }
    }

    async fn commit(&self, tx: SqliteTx) -> Result<()> {
        tx.ensure_open("commit")?;
        let inner = Arc::clone(&self.inner);
        blocking(move || tx.commit(&inner.table, inner.busy_timeout)).await
    }

    async fn rollback(&self, tx: SqliteTx) -> Result<()> {
        tx.roll_back()
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error.downcast_ref().map(kind_of)
    }

    /// SQLite has one writer, and a transaction of this store's is one from its begin.
    fn max_transactions(&self) -> Option<NonZeroUsize> {
        Some(NonZeroUsize::MIN)
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = SqliteTx>> {
        Some(self)
    }
}

/// Letters stand in a table beside the inbox's, named as it is with `_dead_letters` behind. Times are milliseconds.
#[async_trait]
impl DeadLetters for SqliteInbox {
    async fn add_dead_letter(&self, tx: &mut SqliteTx, letter: &DeadLetter) -> Result<()> {
        tx.ensure_open("keep a dead letter")?;
        self.inner.table.add_letter(tx, letter)
    }

    async fn remove_dead_letter(&self, tx: &mut SqliteTx, key: &Key) -> Result<()> {
        tx.ensure_open("remove a dead letter")?;
        self.inner.table.delete_letter(tx, key).map(drop)
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let key = key.clone();
        self.read(move |inner, connection| inner.table.find_letter(connection, &key))
            .await
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        let group = group.clone();
        self.read(move |inner, connection| inner.table.list_letters(connection, &group, after, limit))
            .await
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let key = key.clone();
        self.write(move |table, tx| table.start_put_back(tx, &key)).await
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        let info = info.clone();
        self.write(move |table, tx| table.finish_put_back(tx, &info)).await
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        let key = key.clone();
        self.write(move |table, tx| table.delete_letter(tx, &key)).await
    }
}

#[async_trait]
impl Upkeep for SqliteInbox {
    async fn setup(&self) -> Result<()> {
        if self.read(|inner, connection| inner.table.is_set_up(connection)).await? {
            return Ok(());
        }
        self.write(SqliteTable::set_up_in).await
    }

    async fn check(&self) -> Result<Health> {
        self.read(|inner, connection| {
            let mut health = Health::new();
            inner.table.examine(connection, &mut health)?;
            settings(connection, inner.file.is_some(), &mut health)?;
            if let Some(file) = &inner.file {
                if let Err(error) = file.ensure_in_place() {
                    health.fault(error.to_string(), "nothing is stored where it is looked for");
                }
                log_size(&file.path, &mut health);
            }
            Ok(health)
        })
        .await
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let key = key.clone();
        self.read(move |inner, connection| inner.table.find(connection, &key))
            .await
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        let key = key.clone();
        self.write(move |table, tx| table.forget_in(tx, &key)).await
    }

    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        let purge = purge.clone();
        self.write(move |table, tx| table.purge_in(tx, &purge)).await
    }
}

fn settings(connection: &Connection, in_file: bool, health: &mut Health) -> Result<()> {
    let failed = |error| driver_error("read the database's settings", error);
    let journal_mode: String = connection
        .query_row("PRAGMA main.journal_mode", [], |row| row.get(0))
        .map_err(failed)?;
    if in_file && !journal_mode.eq_ignore_ascii_case("wal") {
        health.warning(
            format!("the journal mode is {journal_mode}: readers and the writer block each other"),
            "somebody changed it; open the store again to set WAL",
        );
    }
    if !in_file {
        health.warning(
            "the database is in memory and ends with its connection",
            "open a file for anything but tests",
        );
    }
    let synchronous: i64 = connection
        .query_row("PRAGMA main.synchronous", [], |row| row.get(0))
        .map_err(failed)?;
    if synchronous < FULL {
        health.fault(
            "synchronous is below FULL: a power loss can undo a commit whose message was acknowledged",
            "somebody changed it on the store's connection; leave it alone",
        );
    }
    Ok(())
}

/// A log much larger than what it is cut down to shows a reader that never ends: checkpoints cannot pass it.
fn log_size(file: &Path, health: &mut Health) {
    let mut log = file.as_os_str().to_owned();
    log.push("-wal");
    let Ok(size) = std::fs::metadata(&log).map(|log| log.len()) else {
        return; // no log, nothing to say of it
    };
    if size > 4 * LOG_SIZE_LIMIT {
        health.warning(
            format!(
                "the write-ahead log has {} MiB: some connection has kept a read transaction open for long, and the log \
                 cannot be cut down before it ends",
                size / (1024 * 1024)
            ),
            "find and end it",
        );
    }
}

impl fmt::Debug for SqliteInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteInbox")
            .field("table", &self.inner.table.name())
            .field("file", &self.inner.file.as_ref().map(|file| &file.path))
            .field("busy_timeout", &self.inner.busy_timeout)
            .finish()
    }
}

/// What is run on every connection that is opened.
type OnConnect = Arc<dyn Fn(&Connection) -> rusqlite::Result<()> + Send + Sync>;

/// How to open a [`SqliteInbox`].
///
/// ```
/// use std::time::Duration;
/// use inbox_sqlite::SqliteInbox;
///
/// # #[tokio::main] async fn main() -> inbox_core::Result<()> {
/// let store = SqliteInbox::builder()
///     .table("billing_inbox")
///     .busy_timeout(Duration::from_secs(10))
///     .on_connect(|connection| connection.pragma_update(None, "foreign_keys", true))
///     .open(":memory:")
///     .await?;
/// # let _ = store; Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "a builder opens nothing until `open` or `from_connection`"]
pub struct Builder {
    table: String,
    busy_timeout: Duration,
    on_connect: Option<OnConnect>,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            table: SqliteTable::DEFAULT_NAME.into(),
            busy_timeout: Duration::from_secs(5),
            on_connect: None,
        }
    }
}

impl Builder {
    /// The table's name; `inbox_events` unless set. See [`SqliteTable::new`] for what it may be.
    pub fn table(mut self, name: impl Into<String>) -> Self {
        self.table = name.into();
        self
    }

    /// How long to wait for the write lock, of another process or of one transaction of this one, before
    /// [`ErrorKind::Busy`]; 5 seconds unless set. Waiting in a queue that moves does not count.
    pub fn busy_timeout(mut self, timeout: Duration) -> Self {
        // SQLite counts milliseconds in 31 bits: three weeks and a half.
        self.busy_timeout = timeout.min(Duration::from_millis(i32::MAX as u64));
        self
    }

    /// Runs this on every connection right after it is opened, before anything else: the place for `foreign_keys`, an
    /// encryption key and functions. It must leave commit hook, rollback hook and busy timeout to the store, end what it
    /// begins, and attach no database file: SQLite does not commit two files together.
    pub fn on_connect(mut self, run: impl Fn(&Connection) -> rusqlite::Result<()> + Send + Sync + 'static) -> Self {
        self.on_connect = Some(Arc::new(run));
        self
    }

    /// Opens a database file, or `:memory:`; see [`SqliteInbox::open`].
    ///
    /// # Errors
    ///
    /// As there, and [`ErrorKind::InvalidInput`] for an impossible table name.
    pub async fn open(self, path: impl AsRef<Path>) -> Result<SqliteInbox> {
        let path = path.as_ref().to_owned();
        blocking(move || {
            let table = SqliteTable::new(self.table.clone())?;
            let writer = self.connect(&path)?;
            let file = File::of(&writer);
            let reader = match &file {
                Some(_) => Some(self.connect(&path)?),
                None => None,
            };
            self.assemble(table, writer, reader, file)
        })
        .await
    }

    /// Takes a connection of the caller's; see [`SqliteInbox::from_connection`]. [`on_connect`](Self::on_connect) is not
    /// run on it; its commit hook, rollback hook and busy timeout are replaced.
    ///
    /// # Errors
    ///
    /// As there, and [`ErrorKind::InvalidInput`] for an impossible table name.
    pub async fn from_connection(self, connection: Connection) -> Result<SqliteInbox> {
        blocking(move || {
            let table = SqliteTable::new(self.table.clone())?;
            self.prepare(&connection)?;
            let file = File::of(&connection);
            self.assemble(table, connection, None, file)
        })
        .await
    }

    fn connect(&self, path: &Path) -> Result<Connection> {
        let connection = Connection::open(path).map_err(|error| {
            let doing = format!(
                "open the database {} (is its folder there, and may this user write in it?)",
                path.display()
            );
            driver_error(&doing, error)
        })?;
        // Room for the application's statements beside the store's.
        connection.set_prepared_statement_cache_capacity(64);
        if let Some(run) = &self.on_connect {
            run(&connection).map_err(|error| driver_error("run on_connect", error))?;
        }
        self.prepare(&connection)?;
        Ok(connection)
    }

    /// Sets what the guarantee needs. Blocks, for at most the busy timeout.
    fn prepare(&self, connection: &Connection) -> Result<()> {
        if !connection.is_autocommit() {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                "a transaction is open on the connection; end it first, or claim in it with SqliteTable",
            ));
        }
        refuse_attached(connection)?;
        let journal_mode = self.enter_wal(connection)?;
        let in_file = File::of(connection).is_some();
        if in_file && !journal_mode.eq_ignore_ascii_case("wal") {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the database stays in journal mode {journal_mode} though WAL was asked for; put it on a local disk: \
                     network file systems cannot have WAL"
                ),
            ));
        }
        let set = || {
            let synchronous: i64 = connection.query_row("PRAGMA main.synchronous", [], |row| row.get(0))?;
            if synchronous < FULL {
                connection.execute_batch(&format!("PRAGMA main.synchronous = {FULL}"))?;
            }
            connection.query_row(
                &format!("PRAGMA main.journal_size_limit = {LOG_SIZE_LIMIT}"),
                [],
                |_| Ok(()),
            )?;
            connection.busy_timeout(Duration::ZERO)
        };
        set().map_err(|error| driver_error("set up the connection", error))
    }

    /// SQLite does not call its busy handler for the change to WAL, so several processes that start at once would fail.
    fn enter_wal(&self, connection: &Connection) -> Result<String> {
        let since = Instant::now();
        loop {
            let answer = connection
                .busy_timeout(self.busy_timeout)
                .and_then(|()| connection.query_row("PRAGMA main.journal_mode = wal", [], |row| row.get(0)));
            match answer {
                Err(error) if kind_of(&error) == ErrorKind::Busy && since.elapsed() < self.busy_timeout => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                answer => return answer.map_err(|error| driver_error("put the database into WAL mode", error)),
            }
        }
    }

    fn assemble(
        &self,
        table: SqliteTable,
        writer: Connection,
        reader: Option<Connection>,
        file: Option<File>,
    ) -> Result<SqliteInbox> {
        let writer = Queue::new(writer)?;
        let reader = match reader {
            Some(reader) => Queue::new(reader)?,
            None => Arc::clone(&writer),
        };
        Ok(SqliteInbox {
            inner: Arc::new(Inner {
                table,
                writer,
                reader,
                file,
                busy_timeout: self.busy_timeout,
            }),
        })
    }
}

/// `PRAGMA synchronous`: 0 is OFF, 1 NORMAL, 2 FULL, 3 EXTRA.
const FULL: i64 = 2;

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("table", &self.table)
            .field("busy_timeout", &self.busy_timeout)
            .finish_non_exhaustive()
    }
}
