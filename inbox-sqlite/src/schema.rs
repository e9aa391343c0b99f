//! What is stored, and every statement that touches it; and [`SqliteTable`], the synchronous inbox over it.

use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use inbox_core::{
    Claim, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, Delivery, Error, ErrorKind,
    Fingerprint, Headers, Health, Key, MessageId, Processed, Purge, Purged, Record, Result, check_name, uuid,
};
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OptionalExtension, Row, Transaction, TransactionBehavior, params};

use crate::error::{driver_error, ended};

/// The time by the database's clock, in whole milliseconds since 1970 UTC.
///
/// `julianday` has counted milliseconds since long before `unixepoch('subsec')` (SQLite 3.42) could. SQLite freezes
/// 'now' for one step of one statement only, so this is the time of the claim, not of the transaction's start.
const NOW: &str = "CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER)";

/// The statements on one table, made once.
#[derive(Debug)]
struct Sql {
    create_table: String,
    create_index: String,
    add_fingerprint: String,
    claim: String,
    find: String,
    stamp: String,
    forget: String,
    groups: String,
    purge: String,
    letters: LettersSql,
}

impl Sql {
    fn new(name: &str) -> Self {
        // Always in `main`: a temporary or attached table of the same name would otherwise stand before it.
        let table = format!("main.{}", quoted(name));
        let table_in_main = quoted(name);
        let index = format!("main.{}", quoted(&index_name(name)));
        Self {
            // WITHOUT ROWID: the key is the table, so a claim writes one B-tree instead of two. STRICT: an id is a blob
            // or an error, never a text that compares unequal. NOT NULL: a primary key of SQLite's does not imply it,
            // and NULLs are never duplicates of each other. The default serves other programs' plain inserts.
            create_table: format!(
                "CREATE TABLE {table} (
                     event_id       BLOB    NOT NULL CHECK (length(event_id) = 16),
                     consumer_group TEXT    NOT NULL,
                     processed_at   INTEGER NOT NULL DEFAULT ({NOW}), -- milliseconds since 1970 UTC
                     fingerprint    BLOB    CHECK (length(fingerprint) = 16),
                     PRIMARY KEY (event_id, consumer_group)
                 ) STRICT, WITHOUT ROWID"
            ),
            // By group first, so that purging one group reads none of another's records.
            create_index: format!("CREATE INDEX {index} ON {table_in_main} (consumer_group, processed_at)"),
            add_fingerprint: format!("ALTER TABLE {table} ADD COLUMN fingerprint BLOB"),
            // The conflict clause names its target: without one, and with INSERT OR IGNORE, a violation of any other
            // constraint would pass for a duplicate and lose the message.
            claim: format!(
                "INSERT INTO {table} (event_id, consumer_group, processed_at, fingerprint)
                 VALUES (?1, ?2, {NOW}, ?3)
                 ON CONFLICT (event_id, consumer_group) DO NOTHING"
            ),
            // Byte for byte, whatever collation a table of somebody else's making has for the column.
            find: format!(
                "SELECT processed_at, fingerprint FROM {table} WHERE event_id = ?1 AND consumer_group = ?2 COLLATE BINARY"
            ),
            // Age counts from the work's end: a record of a long transaction is stamped again at its commit.
            stamp: format!(
                "UPDATE {table} SET processed_at = {NOW} WHERE event_id = ?1 AND consumer_group = ?2 COLLATE BINARY"
            ),
            forget: format!("DELETE FROM {table} WHERE event_id = ?1 AND consumer_group = ?2 COLLATE BINARY"),
            // From each group to the next by the index, which DISTINCT would read whole.
            groups: format!(
                "WITH RECURSIVE each(name) AS (
                     SELECT min(consumer_group) FROM {table}
                     UNION ALL
                     SELECT (SELECT min(consumer_group) FROM {table} WHERE consumer_group > each.name COLLATE BINARY)
                     FROM each WHERE each.name IS NOT NULL
                 )
                 SELECT name FROM each WHERE name IS NOT NULL"
            ),
            // The oldest first, straight off the index; the limit bounds how long the write lock is held.
            purge: format!(
                "DELETE FROM {table} WHERE (event_id, consumer_group) IN (
                     SELECT event_id, consumer_group FROM {table}
                     WHERE consumer_group = ?1 COLLATE BINARY AND processed_at < {NOW} - ?2
                     ORDER BY processed_at LIMIT ?3
                 )"
            ),
            letters: LettersSql::new(name),
        }
    }
}

/// The statements on the table of dead letters.
#[derive(Debug)]
struct LettersSql {
    create_table: String,
    create_index: String,
    add: String,
    find: String,
    list: String,
    start_put_back: String,
    finish_put_back: String,
    delete: String,
}

impl LettersSql {
    fn new(inbox: &str) -> Self {
        let name = letters_name(inbox);
        let table = format!("main.{}", quoted(&name));
        let index = format!("main.{}", quoted(&letters_index_name(inbox)));
        Self {
            // With row ids, as a letter is large. The payload stands last, so that a list reads none of it.
            create_table: format!(
                "CREATE TABLE {table} (
                     event_id       BLOB    NOT NULL CHECK (length(event_id) = 16),
                     consumer_group TEXT    NOT NULL,
                     died_at        INTEGER NOT NULL, -- milliseconds since 1970 UTC
                     state          TEXT    NOT NULL, -- 'on trial', 'dead' or 'putting back'
                     attempts       INTEGER NOT NULL,
                     published_at   INTEGER,          -- milliseconds since 1970 UTC
                     subject        TEXT    NOT NULL,
                     origin         TEXT    NOT NULL,
                     error          TEXT    NOT NULL,
                     headers        TEXT    NOT NULL, -- JSON: a list of pairs
                     payload        BLOB    NOT NULL,
                     PRIMARY KEY (event_id, consumer_group)
                 ) STRICT"
            ),
            create_index: format!(
                "CREATE INDEX {index} ON {} (consumer_group, died_at, event_id)",
                quoted(&name)
            ),
            add: format!(
                "INSERT INTO {table} (event_id, consumer_group, died_at, state, attempts, published_at, subject, origin,
                                      error, headers, payload)
                 VALUES (?1, ?2, {NOW}, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
                 ON CONFLICT (event_id, consumer_group) DO UPDATE SET
                     died_at = excluded.died_at, state = excluded.state, attempts = excluded.attempts,
                     published_at = excluded.published_at, subject = excluded.subject, origin = excluded.origin,
                     error = excluded.error, headers = excluded.headers, payload = excluded.payload"
            ),
            find: format!("SELECT {LETTER}, headers, payload FROM {table} WHERE event_id = ?1 AND consumer_group = ?2"),
            list: format!(
                "SELECT {LETTER} FROM {table} WHERE consumer_group = ?1 AND (died_at, event_id) > (?2, ?3)
                 ORDER BY died_at, event_id LIMIT ?4"
            ),
            start_put_back: format!(
                "UPDATE {table} SET state = 'putting back'
                 WHERE event_id = ?1 AND consumer_group = ?2 AND state <> 'putting back'"
            ),
            finish_put_back: format!(
                "DELETE FROM {table}
                 WHERE event_id = ?1 AND consumer_group = ?2 AND state = 'putting back' AND died_at = ?3"
            ),
            delete: format!("DELETE FROM {table} WHERE event_id = ?1 AND consumer_group = ?2"),
        }
    }
}

/// What a list shows of a letter.
const LETTER: &str = "event_id, state, attempts, published_at, died_at, subject, origin, error";

/// The columns of the table of dead letters, and their types.
const LETTER_COLUMNS: [(&str, &str); 11] = [
    ("event_id", "BLOB"),
    ("consumer_group", "TEXT"),
    ("died_at", "INTEGER"),
    ("state", "TEXT"),
    ("attempts", "INTEGER"),
    ("published_at", "INTEGER"),
    ("subject", "TEXT"),
    ("origin", "TEXT"),
    ("error", "TEXT"),
    ("headers", "TEXT"),
    ("payload", "BLOB"),
];

/// As SQLite keeps times.
const MILLISECOND: Duration = Duration::from_millis(1);

/// The inbox's table in a SQLite database, and the inbox itself for **synchronous** code: it claims in the caller's own
/// [`rusqlite::Transaction`], needs no async runtime, and owns no connection.
///
/// Begin the transaction with [`TransactionBehavior::Immediate`]. A deferred one that has read and is then overtaken by
/// another writer cannot be upgraded: the claim gives [`ErrorKind::Conflict`] at once, whatever the busy timeout.
///
/// With plain rusqlite:
///
/// ```
/// use inbox_core::{ConsumerGroup, MessageId};
/// use inbox_sqlite::SqliteTable;
/// use inbox_sqlite::rusqlite::{Connection, TransactionBehavior};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut connection = Connection::open_in_memory()?;
/// connection.execute_batch("CREATE TABLE invoices (order_id TEXT NOT NULL)")?;
/// let inbox = SqliteTable::default();
/// inbox.setup(&mut connection)?;
/// let billing = ConsumerGroup::new("billing")?;
/// let id = MessageId::new("order-17")?;
///
/// for _delivery in 0..2 {
///     let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
///     if inbox.try_claim_in(&tx, &billing, id)?.is_new() {
///         tx.execute("INSERT INTO invoices VALUES ('order-17')", [])?;
///     }
///     tx.commit()?;
/// }
/// let invoices: i64 = connection.query_row("SELECT count(*) FROM invoices", [], |row| row.get(0))?;
/// assert_eq!(invoices, 1);
/// # Ok(()) }
/// ```
///
/// With a connection of the application's inside `spawn_blocking`:
///
/// ```
/// # use inbox_core::{ConsumerGroup, MessageId};
/// # use inbox_sqlite::{SqliteTable, rusqlite::{self, Connection, TransactionBehavior}};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
/// # let mut connection = Connection::open_in_memory()?;
/// # connection.execute_batch("CREATE TABLE invoices (order_id TEXT NOT NULL)")?;
/// # let inbox = SqliteTable::default();
/// # inbox.setup(&mut connection)?;
/// # let billing = ConsumerGroup::new("billing")?;
/// let id = MessageId::new("order-17")?;
/// let invoiced = tokio::task::spawn_blocking(move || -> Result<bool, Box<dyn std::error::Error + Send + Sync>> {
///     let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
///     let claim = inbox.try_claim_in(&tx, &billing, id)?;
///     if claim.is_new() {
///         tx.execute("INSERT INTO invoices VALUES ('order-17')", [])?;
///     }
///     tx.commit()?;
///     Ok(claim.is_new())
/// }).await??;
/// assert!(invoiced);
/// # Ok(()) }
/// ```
///
/// A record's time is that of its claim: keep such transactions short against the retention. The connection is the
/// application's to set up: have `synchronous` at least `FULL`, or a power loss can undo a commit whose message was
/// acknowledged; and have the effects in the inbox's own file, because SQLite commits an attached one apart.
#[derive(Debug)]
pub struct SqliteTable {
    name: String,
    sql: Sql,
}

impl SqliteTable {
    /// The table's name unless another is given.
    pub const DEFAULT_NAME: &str = "inbox_events";

    /// The inbox in the table of this name.
    ///
    /// Any name that SQLite can have is fine: it is always quoted.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the name is empty, longer than 63 bytes, begins with `sqlite_` (in any case), or
    /// has a control character in it.
    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        check_name("table name", &name, 63)?;
        if name.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("sqlite_")) {
            let why = "SQLite keeps names that begin with \"sqlite_\" for itself; take another";
            return Err(Error::invalid("table name", &name, why));
        }
        Ok(Self::named(name))
    }

    fn named(name: String) -> Self {
        let sql = Sql::new(&name);
        Self { name, sql }
    }

    /// The table's name, unquoted.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The SQL that creates the table, that of its dead letters, and their indexes, for those who keep their schema
    /// elsewhere.
    pub fn create_sql(&self) -> String {
        format!(
            "{};\n{};\n{}",
            self.sql.create_table,
            self.sql.create_index,
            self.create_letters_sql()
        )
    }

    fn create_letters_sql(&self) -> String {
        let sql = &self.sql.letters;
        format!("{};\n{};\n", sql.create_table, sql.create_index)
    }

    /// Claims a message in the caller's open transaction.
    ///
    /// One `INSERT ... ON CONFLICT DO NOTHING`; for a duplicate, one `SELECT` more. Statements are prepared once a
    /// connection.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if another connection has the write lock and the connection's busy timeout runs out, and
    /// [`ErrorKind::Conflict`] if the transaction began deferred and was overtaken; run the whole transaction again.
    /// [`ErrorKind::Schema`] if [`setup`](Self::setup) is missing. [`ErrorKind::TransactionEnded`] if the transaction was
    /// ended by a raw `COMMIT` or `ROLLBACK`. [`ErrorKind::PayloadMismatch`] if the message was processed with another
    /// payload.
    pub fn try_claim_in(
        &self,
        tx: &Transaction<'_>,
        group: &ConsumerGroup,
        delivery: impl Into<Delivery>,
    ) -> Result<Claim> {
        let delivery = delivery.into();
        self.claim(tx, group, delivery)?.verified(&delivery)
    }

    /// Claims many messages in the caller's open transaction, answering in the order given; an id that stands in it
    /// twice is new the first time only.
    ///
    /// # Errors
    ///
    /// As [`try_claim_in`](Self::try_claim_in), except that another payload is an error in that message's place.
    pub fn try_claim_batch_in(
        &self,
        tx: &Transaction<'_>,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Result<Claim>>> {
        deliveries
            .iter()
            .map(|delivery| Ok(self.claim(tx, group, *delivery)?.verified(delivery)))
            .collect()
    }

    /// Creates the table, that of its dead letters and their indexes, or upgrades them, in a transaction of its own.
    ///
    /// Safe at every start and by many processes at once; looks first, and takes no lock where there is nothing to do.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Schema`] if a table of this name and another shape is in the way; [`ErrorKind::Busy`].
    pub fn setup(&self, connection: &mut Connection) -> Result<()> {
        if self.is_set_up(connection)? {
            return Ok(());
        }
        let tx = connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(|error| driver_error("begin to set up the inbox", error))?;
        self.set_up_in(&tx)?;
        tx.commit()
            .map_err(|error| driver_error("commit the inbox's table", error))
    }

    /// Looks up the committed record of `key`.
    ///
    /// # Errors
    ///
    /// As the driver has them; [`ErrorKind::Schema`] if [`setup`](Self::setup) is missing.
    pub fn find(&self, connection: &Connection, key: &Key) -> Result<Option<Record>> {
        let processed = self
            .look_up(connection, key.group(), key.id())
            .map_err(|error| self.explained(connection, "look up a record", error))?;
        Ok(processed.map(|processed| Record::new(key.clone(), processed)))
    }

    /// The inner claim: what the store keeps, unjudged.
    pub(crate) fn claim(&self, tx: &Connection, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        if tx.is_autocommit() {
            // The claim would commit by itself, before the effect.
            return Err(ended("claim a message"));
        }
        self.insert(tx, group, delivery)
            .map_err(|error| self.explained(tx, "claim a message", error))?
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Schema,
                    format!(
                        "the table {:?} took the record of message {} and did not keep it: a trigger on it diverts \
                         inserts; remove the trigger",
                        self.name,
                        delivery.id()
                    ),
                )
            })
    }

    /// `None` where the record was neither inserted nor there.
    fn insert(&self, tx: &Connection, group: &ConsumerGroup, delivery: Delivery) -> rusqlite::Result<Option<Claim>> {
        let id = delivery.id();
        let fingerprint = delivery.fingerprint();
        let inserted = tx.prepare_cached(&self.sql.claim)?.execute(params![
            id.as_bytes(),
            group.as_str(),
            fingerprint.as_ref().map(Fingerprint::as_bytes)
        ])?;
        if inserted == 1 {
            return Ok(Some(Claim::New));
        }
        Ok(self.look_up(tx, group, id)?.map(Claim::Duplicate))
    }

    fn look_up(
        &self,
        connection: &Connection,
        group: &ConsumerGroup,
        id: MessageId,
    ) -> rusqlite::Result<Option<Processed>> {
        connection
            .prepare_cached(&self.sql.find)?
            .query_row(params![id.as_bytes(), group.as_str()], processed)
            .optional()
    }

    /// Stamps the records of `keys` with the time now.
    pub(crate) fn stamp(&self, tx: &Connection, keys: &[Key]) -> rusqlite::Result<()> {
        let mut statement = tx.prepare_cached(&self.sql.stamp)?;
        for key in keys {
            statement.execute(params![key.id().as_bytes(), key.group().as_str()])?;
        }
        Ok(())
    }

    pub(crate) fn set_up_in(&self, tx: &Connection) -> Result<()> {
        let failed = |error| driver_error("set up the inbox's table", error);
        match self.shape(tx)? {
            Shape::Current => {}
            Shape::Missing => {
                let (table, index) = (&self.sql.create_table, &self.sql.create_index);
                tx.execute_batch(&format!("{table};\n{index}")).map_err(failed)?;
            }
            Shape::Older(missing) => {
                for part in missing {
                    tx.execute_batch(match part {
                        Missing::Fingerprint => &self.sql.add_fingerprint,
                        Missing::Index => &self.sql.create_index,
                    })
                    .map_err(failed)?;
                }
            }
            Shape::Other(why) => return Err(self.wrong_shape(&why)),
        }
        match self.shape_of_letters(tx)? {
            Shape::Current => Ok(()),
            Shape::Missing => tx.execute_batch(&self.create_letters_sql()).map_err(failed),
            Shape::Older(_) => tx.execute_batch(&self.sql.letters.create_index).map_err(failed),
            Shape::Other(why) => Err(self.wrong_letters(&why)),
        }
    }

    pub(crate) fn is_set_up(&self, connection: &Connection) -> Result<bool> {
        Ok(self.shape(connection)?.is_current() && self.shape_of_letters(connection)?.is_current())
    }

    pub(crate) fn add_letter(&self, tx: &Connection, letter: &DeadLetter) -> Result<()> {
        let info = &letter.info;
        tx.prepare_cached(&self.sql.letters.add)
            .and_then(|mut statement| {
                statement.execute(params![
                    info.key.id().as_bytes(),
                    info.key.group().as_str(),
                    info.state.as_str(),
                    info.attempts,
                    info.published_at.and_then(millis),
                    info.subject,
                    info.origin,
                    info.error,
                    letter.headers.to_json(),
                    letter.payload,
                ])
            })
            .map(drop)
            .map_err(|error| self.letter_error(tx, "keep a dead letter", error))
    }

    pub(crate) fn delete_letter(&self, tx: &Connection, key: &Key) -> Result<bool> {
        tx.prepare_cached(&self.sql.letters.delete)
            .and_then(|mut statement| statement.execute(params![key.id().as_bytes(), key.group().as_str()]))
            .map(|removed| removed > 0)
            .map_err(|error| self.letter_error(tx, "remove a dead letter", error))
    }

    pub(crate) fn find_letter(&self, connection: &Connection, key: &Key) -> Result<Option<DeadLetter>> {
        let found = connection
            .prepare_cached(&self.sql.letters.find)
            .and_then(|mut statement| {
                let read = |row: &Row<'_>| Ok((LetterRow::read(row)?, row.get::<_, String>(8)?, row.get(9)?));
                statement
                    .query_row(params![key.id().as_bytes(), key.group().as_str()], read)
                    .optional()
            })
            .map_err(|error| self.letter_error(connection, "look up a dead letter", error))?;
        let Some((row, headers, payload)) = found else {
            return Ok(None);
        };
        let payload: Vec<u8> = payload;
        let info = row.into_info(key.group())?;
        Ok(Some(DeadLetter::new(info, Headers::from_json(&headers)?, payload)))
    }

    pub(crate) fn list_letters(
        &self,
        connection: &Connection,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        // No blob is less than the empty one.
        let (time, id) = after.map_or((i64::MIN, None), |after| {
            let (time, id) = after.in_ticks(MILLISECOND);
            (time, Some(id))
        });
        let id: &[u8] = id.as_ref().map_or(&[], |id| id.as_bytes());
        let rows: Vec<LetterRow> = connection
            .prepare_cached(&self.sql.letters.list)
            .and_then(|mut statement| {
                let rows = statement.query_map(params![group.as_str(), time, id, limit.get()], LetterRow::read)?;
                rows.collect()
            })
            .map_err(|error| self.letter_error(connection, "list dead letters", error))?;
        rows.into_iter().map(|row| row.into_info(group)).collect()
    }

    /// SQLite has one writer, so nothing comes between these statements of one transaction.
    pub(crate) fn start_put_back(&self, tx: &Connection, key: &Key) -> Result<Option<DeadLetter>> {
        let turned = tx
            .prepare_cached(&self.sql.letters.start_put_back)
            .and_then(|mut statement| statement.execute(params![key.id().as_bytes(), key.group().as_str()]))
            .map_err(|error| self.letter_error(tx, "put back a dead letter", error))?;
        if turned > 0 {
            self.forget_in(tx, key)?;
        }
        self.find_letter(tx, key)
    }

    pub(crate) fn finish_put_back(&self, tx: &Connection, info: &DeadLetterInfo) -> Result<bool> {
        let (time, _) = info.place().in_ticks(MILLISECOND);
        let key = &info.key;
        tx.prepare_cached(&self.sql.letters.finish_put_back)
            .and_then(|mut statement| statement.execute(params![key.id().as_bytes(), key.group().as_str(), time]))
            .map(|removed| removed > 0)
            .map_err(|error| self.letter_error(tx, "remove a dead letter that was put back", error))
    }

    /// A driver's error in a statement on dead letters; as [`explained`](Self::explained).
    fn letter_error(&self, connection: &Connection, doing: &str, error: rusqlite::Error) -> Error {
        if error.sqlite_error_code().is_some_and(|code| code != ErrorCode::Unknown) {
            return driver_error(doing, error);
        }
        match self.shape_of_letters(connection) {
            Ok(Shape::Missing) => Error::new(
                ErrorKind::Schema,
                format!(
                    "could not {doing}: there is no table {:?}; run setup(), which makes it beside an older inbox too",
                    letters_name(&self.name)
                ),
            ),
            Ok(Shape::Other(why)) => self.wrong_letters(&why),
            Ok(Shape::Current | Shape::Older(_)) | Err(_) => return driver_error(doing, error),
        }
        .with_source(error)
    }

    fn wrong_letters(&self, why: &str) -> Error {
        Error::new(
            ErrorKind::Schema,
            format!(
                "the table {:?} is not that of the inbox's dead letters: {why}; mend it, or rename it and run setup()",
                letters_name(&self.name)
            ),
        )
    }

    /// What stands where dead letters are to be kept. `Older` is a table without its index.
    fn shape_of_letters(&self, connection: &Connection) -> Result<Shape> {
        let inspect = || {
            let name = letters_name(&self.name);
            let columns = columns(connection, &name)?;
            if columns.is_empty() {
                return Ok(Shape::Missing);
            }
            for (name, type_name) in LETTER_COLUMNS {
                match columns.iter().find(|column| column.is(name)) {
                    None => return Ok(Shape::Other(format!("it has no column {name}"))),
                    Some(column) if !column.type_name.eq_ignore_ascii_case(type_name) => {
                        let found = &column.type_name;
                        return Ok(Shape::Other(format!(
                            "its column {name} is {found:?} and must be {type_name}"
                        )));
                    }
                    Some(_) => {}
                }
            }
            let ours = |column: &Column| LETTER_COLUMNS.iter().any(|(name, _)| column.is(name));
            if let Some(column) = columns.iter().find(|column| column.must_be_given && !ours(column)) {
                let name = &column.name;
                return Ok(Shape::Other(format!(
                    "its column {name} must be given a value, and gets none"
                )));
            }
            if !constraints(connection, &name)?.0 {
                let why = "it has no unique key of exactly (event_id, consumer_group), compared byte for byte";
                return Ok(Shape::Other(why.into()));
            }
            Ok(if has_index(connection, &name, &letters_index_name(&self.name))? {
                Shape::Current
            } else {
                Shape::Older(vec![Missing::Index])
            })
        };
        inspect().map_err(|error: rusqlite::Error| driver_error("look at the table of dead letters", error))
    }

    pub(crate) fn forget_in(&self, tx: &Connection, key: &Key) -> Result<bool> {
        tx.prepare_cached(&self.sql.forget)
            .and_then(|mut statement| statement.execute(params![key.id().as_bytes(), key.group().as_str()]))
            .map(|removed| removed > 0)
            .map_err(|error| self.explained(tx, "forget a message", error))
    }

    pub(crate) fn purge_in(&self, tx: &Connection, purge: &Purge) -> Result<Purged> {
        // Older than SQLite's numbers reach: nothing is.
        let Ok(age) = i64::try_from(purge.older_than.as_millis()) else {
            return Ok(Purged::new(0, false));
        };
        self.delete_older(tx, age, purge)
            .map_err(|error| self.explained(tx, "purge", error))
    }

    fn delete_older(&self, tx: &Connection, age: i64, purge: &Purge) -> rusqlite::Result<Purged> {
        let groups: Vec<String> = if let Some(group) = &purge.group {
            vec![group.as_str().to_owned()]
        } else {
            let mut statement = tx.prepare_cached(&self.sql.groups)?;
            let names = statement.query_map([], |row| row.get(0))?;
            names.collect::<rusqlite::Result<_>>()?
        };
        let mut statement = tx.prepare_cached(&self.sql.purge)?;
        let step = purge.step.get() as usize;
        let mut removed = 0;
        for group in groups {
            if removed < step {
                removed += statement.execute(params![group, age, i64::try_from(step - removed).unwrap_or(i64::MAX)])?;
            }
        }
        Ok(Purged::new(removed as u64, removed == step))
    }

    /// What is wrong with the table, for a check.
    pub(crate) fn examine(&self, connection: &Connection, health: &mut Health) -> Result<()> {
        match self.shape(connection)? {
            Shape::Current => {}
            Shape::Missing => health.fault(format!("there is no table {:?}", self.name), "run setup()"),
            Shape::Older(_) => health.fault(
                format!("the table {:?} is of an older version", self.name),
                "run setup()",
            ),
            Shape::Other(why) => health.fault(
                format!("the table {:?} is not the inbox's: {why}", self.name),
                "give the inbox a table of its own, or mend this one",
            ),
        }
        let letters = letters_name(&self.name);
        match self.shape_of_letters(connection)? {
            Shape::Current => {}
            Shape::Missing => health.warning(
                format!("there is no table {letters:?}, so messages cannot be given up, though claims work"),
                "run setup()",
            ),
            Shape::Older(_) => health.warning(
                format!("the table {letters:?} has lost its index, so a list of dead letters reads the whole table"),
                "run setup()",
            ),
            Shape::Other(why) => health.fault(
                format!("the table {letters:?} is not that of the inbox's dead letters: {why}"),
                "mend it, or rename it and run setup()",
            ),
        }
        let triggers: Vec<String> = connection
            .prepare(
                "SELECT name FROM (SELECT * FROM main.sqlite_master UNION ALL SELECT * FROM temp.sqlite_master)
                 WHERE type = 'trigger' AND tbl_name = ?1 COLLATE NOCASE",
            )
            .and_then(|mut statement| {
                let names = statement.query_map([&self.name], |row| row.get(0))?;
                names.collect()
            })
            .map_err(|error| driver_error("look for triggers", error))?;
        for trigger in triggers {
            health.warning(
                format!("the trigger {trigger:?} runs on every claim, and could divert or refuse it"),
                "remove it, or be sure of what it does",
            );
        }
        Ok(())
    }

    /// A driver's error in one of our statements. `SQLITE_ERROR` is all that SQLite says where a table or column is
    /// missing, so the table itself is asked.
    fn explained(&self, connection: &Connection, doing: &str, error: rusqlite::Error) -> Error {
        // Some builds of rusqlite have another variant for it, which has no code to ask.
        let code = error.sqlite_error_code();
        if code.is_some_and(|code| code != ErrorCode::Unknown) {
            return driver_error(doing, error);
        }
        match self.shape(connection) {
            Ok(Shape::Missing) => Error::new(
                ErrorKind::Schema,
                format!(
                    "could not {doing}: there is no table {:?}; run setup() once before",
                    self.name
                ),
            ),
            Ok(Shape::Older(_)) => Error::new(
                ErrorKind::Schema,
                format!(
                    "could not {doing}: the table {:?} is of an older version; run setup() to upgrade it",
                    self.name
                ),
            ),
            Ok(Shape::Other(why)) => self.wrong_shape(&why),
            Ok(Shape::Current) | Err(_) => return driver_error(doing, error),
        }
        .with_source(error)
    }

    fn wrong_shape(&self, why: &str) -> Error {
        Error::new(
            ErrorKind::Schema,
            format!(
                "the table {:?} is not the inbox's: {why}; give the inbox a table of its own, or mend this one",
                self.name
            ),
        )
    }

    pub(crate) fn shape(&self, connection: &Connection) -> Result<Shape> {
        self.inspect(connection)
            .map_err(|error| driver_error("look at the inbox's table", error))
    }

    fn inspect(&self, connection: &Connection) -> rusqlite::Result<Shape> {
        let columns = columns(connection, &self.name)?;
        if columns.is_empty() {
            return Ok(Shape::Missing);
        }
        if let Some(why) = wrong_columns(&columns) {
            return Ok(Shape::Other(why));
        }
        let (has_key, other_keys, foreign_keys) = constraints(connection, &self.name)?;
        if !has_key {
            return Ok(Shape::Other(
                "it has no unique key of exactly (event_id, consumer_group), compared byte for byte".into(),
            ));
        }
        if other_keys {
            return Ok(Shape::Other(
                "it has a further unique key, which would refuse messages that are new".into(),
            ));
        }
        if foreign_keys {
            return Ok(Shape::Other(
                "it has a foreign key, which would refuse messages that are new".into(),
            ));
        }
        let mut missing = Vec::new();
        if !columns.iter().any(|column| column.is("fingerprint")) {
            missing.push(Missing::Fingerprint);
        }
        if !has_index(connection, &self.name, &index_name(&self.name))? {
            missing.push(Missing::Index);
        }
        Ok(if missing.is_empty() {
            Shape::Current
        } else {
            Shape::Older(missing)
        })
    }
}

/// Whether a unique index covers just the key, whole (not partial) and byte for byte; whether there is another unique
/// index; whether there is a foreign key. A primary key is in the list of indexes as well.
fn constraints(connection: &Connection, table: &str) -> rusqlite::Result<(bool, bool, bool)> {
    connection.query_row(
        r#"WITH uniques AS (
               SELECT NOT list.partial AND (
                   SELECT count(*) = 2 AND count(*) FILTER (
                              WHERE part.coll = 'BINARY' AND lower(part.name) IN ('event_id', 'consumer_group')) = 2
                   FROM pragma_index_xinfo(list.name, 'main') AS part WHERE part.key
               ) AS is_key
               FROM pragma_index_list(?1, 'main') AS list WHERE list."unique"
           )
           SELECT EXISTS (SELECT 1 FROM uniques WHERE is_key), EXISTS (SELECT 1 FROM uniques WHERE NOT is_key),
                  EXISTS (SELECT 1 FROM pragma_foreign_key_list(?1, 'main'))"#,
        [table],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
    )
}

/// A column as SQLite describes it.
struct Column {
    name: String,
    type_name: String,
    must_be_given: bool,
    not_null: bool,
}

impl Column {
    fn is(&self, name: &str) -> bool {
        self.name.eq_ignore_ascii_case(name)
    }
}

/// The columns of a table; none if there is no such table.
fn columns(connection: &Connection, table: &str) -> rusqlite::Result<Vec<Column>> {
    let mut statement = connection.prepare(
        r#"SELECT name, type, "notnull" AND dflt_value IS NULL, "notnull" FROM pragma_table_info(?1, 'main')"#,
    )?;
    let columns = statement.query_map([table], |row| {
        Ok(Column {
            name: row.get(0)?,
            type_name: row.get(1)?,
            must_be_given: row.get(2)?,
            not_null: row.get(3)?,
        })
    })?;
    columns.collect()
}

fn has_index(connection: &Connection, table: &str, index: &str) -> rusqlite::Result<bool> {
    connection.query_row(
        "SELECT EXISTS (SELECT 1 FROM pragma_index_list(?1, 'main') WHERE name = ?2 COLLATE NOCASE)",
        [table, index],
        |row| row.get(0),
    )
}

/// A letter as SQLite has it, in the order of [`LETTER`].
struct LetterRow {
    id: [u8; 16],
    state: String,
    attempts: i64,
    published_at: Option<i64>,
    died_at: i64,
    subject: String,
    origin: String,
    error: String,
}

impl LetterRow {
    fn read(row: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            id: row.get(0)?,
            state: row.get(1)?,
            attempts: row.get(2)?,
            published_at: row.get(3)?,
            died_at: row.get(4)?,
            subject: row.get(5)?,
            origin: row.get(6)?,
            error: row.get(7)?,
        })
    }

    fn into_info(self, group: &ConsumerGroup) -> Result<DeadLetterInfo> {
        let id = MessageId::from_uuid(uuid::Uuid::from_bytes(self.id))
            .map_err(|error| Error::new(ErrorKind::Store, "a dead letter has no id").with_source(error))?;
        let mut info = DeadLetterInfo::new(Key::new(group.clone(), id), self.error);
        info.state = DeadLetterState::from_text(&self.state)?;
        info.subject = self.subject;
        info.origin = self.origin;
        info.attempts = u32::try_from(self.attempts.max(0)).unwrap_or(u32::MAX);
        info.published_at = self.published_at.and_then(time);
        info.died_at = time(self.died_at).unwrap_or(UNIX_EPOCH);
        Ok(info)
    }
}

/// Why claims could not be kept in these columns.
fn wrong_columns(columns: &[Column]) -> Option<String> {
    const OURS: [(&str, &str); 4] = [
        ("event_id", "BLOB"),
        ("consumer_group", "TEXT"),
        ("processed_at", "INTEGER"),
        ("fingerprint", "BLOB"),
    ];
    for (name, type_name) in OURS {
        let Some(column) = columns.iter().find(|column| column.is(name)) else {
            if name == "fingerprint" {
                continue; // an older version's
            }
            return Some(format!("it has no column {name}"));
        };
        if !column.type_name.eq_ignore_ascii_case(type_name) {
            return Some(format!(
                "its column {name} is {:?} and must be {type_name}",
                column.type_name
            ));
        }
        if !column.not_null && matches!(name, "event_id" | "consumer_group") {
            return Some(format!(
                "its column {name} may be NULL, and NULLs are never duplicates of each other"
            ));
        }
    }
    let foreign = columns
        .iter()
        .find(|column| column.must_be_given && !OURS.iter().any(|(name, _)| column.is(name)));
    foreign.map(|column| {
        format!(
            "its column {} must be given a value, and claims give it none",
            column.name
        )
    })
}

/// What stands under the table's name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    Current,
    Missing,
    Older(Vec<Missing>),
    Other(String),
}

/// What an older version of the table lacks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    Fingerprint,
    Index,
}

impl Shape {
    pub(crate) fn is_current(&self) -> bool {
        *self == Self::Current
    }
}

impl Default for SqliteTable {
    fn default() -> Self {
        Self::named(Self::DEFAULT_NAME.into())
    }
}

impl fmt::Display for SqliteTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// What a record says. The key alone makes a duplicate: a time or fingerprint of another program's making, which we cannot
/// read, is as good as none.
fn processed(row: &Row<'_>) -> rusqlite::Result<Processed> {
    let fingerprint = match row.get_ref(1)? {
        ValueRef::Blob(bytes) => bytes.try_into().ok().map(Fingerprint::from_bytes),
        _ => None,
    };
    let at = match row.get_ref(0)? {
        ValueRef::Integer(millis) => time(millis),
        _ => None,
    };
    Ok(at
        .map_or_else(Processed::default, Processed::at)
        .with_fingerprint(fingerprint))
}

/// The time so many milliseconds after 1970, if there is one.
fn time(millis: i64) -> Option<SystemTime> {
    let since = Duration::from_millis(millis.unsigned_abs());
    if millis < 0 {
        UNIX_EPOCH.checked_sub(since)
    } else {
        UNIX_EPOCH.checked_add(since)
    }
}

/// The other way round.
fn millis(time: SystemTime) -> Option<i64> {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_millis()).ok(),
        Err(before) => i64::try_from(before.duration().as_millis()).ok().map(|millis| -millis),
    }
}

/// A name as SQLite reads it whatever stands in it: in double quotes, each one inside doubled.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

fn index_name(table: &str) -> String {
    format!("{table}_by_age")
}

/// The table of an inbox's dead letters.
fn letters_name(table: &str) -> String {
    format!("{table}_dead_letters")
}

fn letters_index_name(table: &str) -> String {
    format!("{table}_dead_letters_by_age")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How SQLite would run `sql` on a table that setup made.
    fn plan(sql: &str) -> Vec<String> {
        let mut connection = Connection::open_in_memory().unwrap();
        let table = SqliteTable::default();
        table.setup(&mut connection).unwrap();
        let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).unwrap();
        let parameters = vec![1_i64; statement.parameter_count()];
        statement
            .query_map(rusqlite::params_from_iter(parameters), |row| row.get("detail"))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap()
    }

    #[test]
    fn purging_and_listing_groups_read_the_index_by_age_and_never_the_whole_table() {
        let sql = Sql::new(SqliteTable::DEFAULT_NAME);
        for statement in [&sql.purge, &sql.groups] {
            let plan = plan(statement);
            assert!(
                plan.iter()
                    .any(|step| step.contains("COVERING INDEX inbox_events_by_age")),
                "{plan:?}"
            );
            assert!(!plan.iter().any(|step| step.contains("SCAN inbox_events")), "{plan:?}");
            assert!(!plan.iter().any(|step| step.contains("TEMP B-TREE")), "{plan:?}");
        }
    }

    #[test]
    fn a_page_of_dead_letters_is_read_off_its_index_and_the_others_by_their_key() {
        let sql = LettersSql::new(SqliteTable::DEFAULT_NAME);
        let listed = plan(&sql.list);
        assert_eq!(listed.len(), 1, "{listed:?}");
        assert!(
            listed[0].contains("inbox_events_dead_letters_by_age (consumer_group=? AND (died_at,event_id)>(?,?))"),
            "{listed:?}"
        );
        for statement in [&sql.find, &sql.start_put_back, &sql.finish_put_back, &sql.delete] {
            let plan = plan(statement);
            assert!(plan[0].contains("(event_id=? AND consumer_group=?)"), "{plan:?}");
        }
    }

    #[test]
    fn claims_and_look_ups_go_by_the_key() {
        let sql = Sql::new(SqliteTable::DEFAULT_NAME);
        for statement in [&sql.find, &sql.stamp, &sql.forget] {
            let plan = plan(statement);
            assert_eq!(plan.len(), 1, "{plan:?}");
            assert!(
                plan[0].contains("USING PRIMARY KEY (event_id=? AND consumer_group=?)"),
                "{plan:?}"
            );
        }
    }
}
