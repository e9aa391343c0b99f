//! A small store over a small database in memory, which can be wrong in many ways, one at a time.
//!
//! The database has tables of records, effects, transactions with locks and snapshots, and a clock of its own. Every
//! [`Fault`] is a line or two, marked by its name; without one, the store keeps every law.

#![allow(dead_code, reason = "each test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as StdError;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use inbox_conformance::{Fixture, async_trait};
use inbox_core::{
    Claim, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters, Delivery, Error,
    ErrorKind, Fingerprint, Headers, Health, InFlight, InboxStore, Key, MessageId, Processed, Purge, Purged, Record,
    Result, Transactions, Upkeep,
};
use tokio::sync::{Notify, OwnedMutexGuard};
use tokio::task::yield_now;

/// What the store does about a claim that another open transaction has made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Temper {
    /// The later claim waits.
    Waits,
    /// It is answered that the message is in flight.
    SaysInFlight,
    /// Both are new, and the later commit is refused.
    Optimistic,
    /// There is one writer: even to open a second transaction waits, and is refused after a while.
    OneWriter,
}

/// What is wrong with the store. The comments say how people get there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,

    /// An upsert: a duplicate writes to the record.
    DuplicateMovesTime,
    /// COMMIT of a transaction that had failed is answered by ROLLBACK, and the driver does not look.
    CommitStoresNothing,
    /// A column without a default.
    RecordWithoutTime,
    /// `find` on a replica that lags, or in another table.
    FindIsBlind,

    /// The claim is written outside the transaction, and a rollback does not know of it.
    RollbackKeepsClaim,
    /// Drop commits, as in drivers whose default is to.
    DropCommits,
    /// Only commit and rollback free the lock.
    DropKeepsLock,
    /// The lock is taken before the await, and noted for release after it.
    CancelledClaimKeepsLock,
    /// A cancelled begin leaves a transaction open on the connection, which swallows the next one.
    CancelledBeginSwallows,

    /// Autocommit.
    ClaimCommitsAlone,
    /// A connection of its own for the claim, undone by a compensation.
    ClaimBesideTransaction,
    /// Two round trips for one commit.
    CommitInTwoSteps,

    /// SELECT, then INSERT, without a unique key.
    LookThenInsert,
    /// SELECT, then INSERT, with a unique key whose violation is not mapped.
    LostRaceIsFatal,
    /// An EXEC that answers nil, decoded as success.
    LostCommitSaysOk,

    /// READ UNCOMMITTED, or a lock taken for a record.
    DuplicateWhileInFlight,
    /// The waiter does not look again.
    EndTakenForCommit,
    /// Nobody wakes the waiter after a rollback.
    WaiterNotWoken,

    /// Insert, and catch the violation.
    DuplicateBreaksTransaction,
    /// A lock timeout without a savepoint.
    InFlightBreaksTransaction,
    /// The store ends what it has no use for.
    DuplicateEndsTransaction,

    /// Only committed records are looked at.
    SecondClaimIsNew,
    /// The transaction's own lock is somebody's lock.
    SecondClaimIsInFlight,

    /// PRIMARY KEY (id).
    KeyWithoutGroup,
    /// A collation without case.
    GroupsFolded,
    /// A column that pads.
    GroupsTrimmed,
    /// A column of 32 characters, cast.
    GroupsCut,
    /// An id cut to a 64-bit number.
    IdsCut,

    /// The rows of RETURNING, in the order of the database.
    BatchInDatabaseOrder,
    /// Each entry of the batch is looked up in what was there before.
    BatchTakesRepeatedTwice,
    /// No sorting before the statement; the database does not notice.
    BatchDeadlocks,
    /// No sorting before the statement; the database ends one of the two.
    BatchDeadlockIsFound,
    /// More parameters than a statement takes.
    BatchIsSmall,
    /// An answer for each row that was inserted.
    BatchAnswersNewOnly,

    /// A cutoff on the wrong side.
    PurgeTakesFresh,
    /// A purge that reads uncommitted rows.
    PurgeTakesInFlight,
    /// DELETE without LIMIT.
    PurgeIgnoresStep,
    /// DELETE without the group.
    PurgeIgnoresGroup,
    /// LIKE, or MATCH.
    PurgeTakesPattern,
    /// `more` is false.
    PurgeStopsEarly,
    /// `more` is true.
    PurgeNeverEnds,
    /// `now()` is the time at which the transaction began.
    TimeOfTransactionStart,
    /// Answers true and forgets nothing.
    ForgetRemembers,

    /// `SystemTime::now()` in the consumer, for the record.
    TimeByConsumersClock,
    /// `SystemTime::now()` in the consumer, for the cutoff.
    PurgeByConsumersClock,

    /// The look-up reads the snapshot and the write overwrites.
    SnapshotTakesTwice,
    /// 40001 is just any error.
    SerializationFailureIsFatal,

    /// DROP and CREATE.
    SetupWipes,
    /// CREATE without IF NOT EXISTS.
    SetupFailsTwice,
    /// IF NOT EXISTS that races.
    SetupRaces,
    /// No rows affected, for whatever reason.
    MissingTableIsDuplicate,
    /// "no such table", as the driver has it.
    MissingTableIsAnyError,
    /// The remedy is left to the reader.
    MissingTableWithoutRemedy,
    /// An upgrade by DROP and CREATE.
    UpgradeLosesRecords,
    /// A check that connects and no more.
    CheckIsBlind,

    /// `format!("DROP TABLE {name}")`.
    NameIsRun,
    /// "invalid name".
    NameIsNotShown,

    /// Two statements, of which one has no column for it.
    BatchDropsFingerprint,
    /// An upsert.
    DuplicateOverwritesFingerprint,
    /// A column that is not read back.
    FindDropsFingerprint,

    /// A connection of its own for the letter.
    LetterBesideTransaction,
    /// An error of the insert that nobody looks at.
    LetterIsNotStored,
    /// A DELETE on a connection of its own.
    LetterIsRemovedAtOnce,
    /// ON CONFLICT DO NOTHING.
    FirstLetterStays,
    /// A list beside the letters, whose old entry stays when a letter is replaced.
    LetterIsListedTwice,
    /// `HashMap<String, String>`.
    HeadersAreAMap,
    /// A column of text.
    PayloadIsText,
    /// A column of whole seconds.
    PublishedInSeconds,
    /// A column that nobody fills.
    LetterStateIsLost,
    /// WHERE id = $1.
    LettersWithoutGroup,
    /// WHERE `died_at` > $1, though many letters have one time.
    PagesByTime,
    /// ORDER BY the key.
    LettersInOrderOfIds,
    /// No LIMIT.
    PagesWithoutLimit,
    /// The state is not looked at.
    PutBackForgetsAgain,
    /// A SELECT and an UPDATE without a lock.
    PutBackRaces,
    /// The record is somebody else's business.
    PutBackKeepsRecord,
    /// DELETE ... RETURNING.
    PutBackRemovesLetter,
    /// DELETE by the key alone.
    FinishRemovesAnyLetter,
    /// A foreign key with ON DELETE CASCADE.
    DeleteForgetsRecord,
    /// `SystemTime::now()` in the consumer, for the letter.
    LetterTimeByConsumersClock,
    /// The letter's own time.
    LetterTimeAsGiven,

    /// A store without a place for letters.
    KeepsNoLetters,
    /// A claim that panics.
    ClaimPanics,
    /// A setup that waits for ever.
    SetupHangs,
    /// A setup that blocks its thread for longer than anybody waits.
    SetupBlocks,
}

impl Fault {
    /// The temper of a store in which the fault shows.
    pub(crate) const fn temper(self) -> Temper {
        match self {
            Self::LostCommitSaysOk => Temper::Optimistic,
            Self::InFlightBreaksTransaction | Self::SecondClaimIsInFlight => Temper::SaysInFlight,
            _ => Temper::Waits,
        }
    }
}

const ORDINARY: &str = "inbox_events";
const VERSION: u32 = 2;

/// The fixture: one database.
pub(crate) struct Toy {
    database: Arc<Database>,
    temper: Temper,
    fault: Fault,
}

impl Toy {
    pub(crate) fn new(temper: Temper, fault: Fault) -> Self {
        Self {
            database: Arc::default(),
            temper,
            fault,
        }
    }

    fn open(&self, table: &str) -> ToyStore {
        ToyStore {
            database: Arc::clone(&self.database),
            temper: self.temper,
            fault: self.fault,
            table: table.into(),
            swallows: Arc::default(),
        }
    }
}

#[async_trait]
impl Fixture for Toy {
    type Store = ToyStore;

    async fn connect(&self) -> Result<ToyStore> {
        Ok(self.open(ORDINARY))
    }

    async fn write_effect(&self, _store: &ToyStore, tx: &mut ToyTx, name: &str) -> Result<()> {
        yield_now().await;
        tx.usable()?;
        tx.effects.push(name.into());
        Ok(())
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        let disk = self.database.disk();
        Ok(disk.effects.iter().filter(|effect| *effect == name).count() as u64)
    }

    async fn advance_clock(&self, _store: &ToyStore, by: Duration) -> Result<()> {
        self.database.disk().clock_ahead += by;
        Ok(())
    }

    fn isolation_levels(&self) -> Vec<String> {
        vec!["read committed".into(), "snapshot".into()]
    }

    async fn begin_at(&self, store: &ToyStore, level: &str) -> Result<ToyTx> {
        let mut tx = store.begin().await?;
        tx.snapshot = (level == "snapshot").then(|| self.database.disk().commits);
        Ok(tx)
    }

    async fn make_older(&self) -> Result<Option<Key>> {
        let key = Key::new(ConsumerGroup::new("older")?, MessageId::new("of an older version")?);
        let mut table = Table {
            version: 1,
            ..Table::default()
        };
        let row = (key.group().as_str().to_owned(), *key.id().as_bytes());
        table.rows.insert(row, Committed::default());
        self.database.disk().tables.insert(ORDINARY.into(), table);
        Ok(Some(key))
    }

    async fn connect_named(&self, name: &str) -> Option<Result<ToyStore>> {
        let fits = (1..=63).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if fits {
            return Some(Ok(self.open(name)));
        }
        if self.fault == Fault::NameIsRun && !name.contains('\0') {
            if name.contains(';') {
                self.database.disk().tables.clear();
            }
            return Some(Ok(self.open(name)));
        }
        let shown = match self.fault {
            Fault::NameIsNotShown => "the configured name".to_owned(),
            _ => format!("the table name {:?}", name.chars().take(40).collect::<String>()),
        };
        let text = format!("{shown} is not 1 to 63 letters, digits and underscores");
        Some(Err(Error::new(ErrorKind::InvalidInput, text)))
    }
}

#[derive(Debug, Default)]
struct Database {
    disk: Mutex<Disk>,
    /// Some transaction ended.
    ended: Notify,
    writer: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Default)]
struct Disk {
    tables: BTreeMap<String, Table>,
    effects: Vec<String>,
    clock_ahead: Duration,
    transactions: u64,
    commits: u64,
}

#[derive(Debug, Default)]
struct Table {
    version: u32,
    rows: BTreeMap<Row, Committed>,
    letters: BTreeMap<Row, DeadLetter>,
    /// Only with a fault: entries of the list that are no letter's any more.
    stale: Vec<DeadLetterInfo>,
    locks: BTreeMap<Row, Lock>,
    /// Only with a fault: rows that a purge removed before they were committed.
    doomed: BTreeSet<Row>,
}

type Row = (String, [u8; 16]);

#[derive(Debug, Clone, Copy, Default)]
struct Committed {
    at: Option<SystemTime>,
    fingerprint: Option<Fingerprint>,
    /// By which commit it became visible.
    commit: u64,
}

impl Committed {
    fn processed(&self) -> Processed {
        let processed = self.at.map_or_else(Processed::default, Processed::at);
        processed.with_fingerprint(self.fingerprint)
    }
}

#[derive(Debug, Clone, Copy)]
struct Lock {
    holder: u64,
    since: SystemTime,
}

impl Database {
    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.disk.lock().unwrap()
    }
}

impl Disk {
    fn now(&self) -> SystemTime {
        SystemTime::now() + self.clock_ahead
    }
}

pub(crate) struct ToyTx {
    database: Arc<Database>,
    fault: Fault,
    number: u64,
    began: SystemTime,
    /// The last commit that it sees, if not every one.
    snapshot: Option<u64>,
    /// By table and row.
    claims: BTreeMap<(String, Row), Option<Fingerprint>>,
    effects: Vec<String>,
    /// What becomes of dead letters at the commit, by table and row: kept, or removed.
    letters: Vec<(String, Row, Option<DeadLetter>)>,
    broken: bool,
    ended: bool,
    /// Only with a fault: it is inside one that a cancelled begin left open.
    swallowed: bool,
    _writer: Option<OwnedMutexGuard<()>>,
}

impl ToyTx {
    fn usable(&self) -> Result<()> {
        if self.broken {
            return Err(Error::new(ErrorKind::TransactionEnded, "the transaction is aborted"));
        }
        Ok(())
    }

    /// Stores what the transaction did. `false`: another one has committed a row of its own first, so nothing is stored.
    fn store(&mut self) -> bool {
        let database = Arc::clone(&self.database);
        let mut disk = database.disk();
        let disk = &mut *disk;
        if self.lost(disk) {
            return false;
        }
        disk.commits += 1;
        let now = match self.fault {
            Fault::TimeByConsumersClock => SystemTime::now(),
            Fault::TimeOfTransactionStart => self.began,
            _ => disk.now(),
        };
        disk.effects.append(&mut self.effects);
        for (table, row, letter) in std::mem::take(&mut self.letters) {
            if let Some(table) = disk.tables.get_mut(&table) {
                table.keep(self.fault, row, letter, now);
            }
        }
        for ((table, row), fingerprint) in std::mem::take(&mut self.claims) {
            let Some(table) = disk.tables.get_mut(&table) else {
                continue;
            };
            table.locks.remove(&row);
            if table.doomed.remove(&row) {
                continue;
            }
            let at = (self.fault != Fault::RecordWithoutTime).then_some(now);
            let commit = disk.commits;
            table.rows.insert(
                row,
                Committed {
                    at,
                    fingerprint,
                    commit,
                },
            );
        }
        true
    }

    /// The unique key, at the commit.
    fn lost(&self, disk: &Disk) -> bool {
        let without_key = matches!(
            self.fault,
            Fault::ClaimCommitsAlone
                | Fault::ClaimBesideTransaction
                | Fault::LookThenInsert
                | Fault::SnapshotTakesTwice
                | Fault::SecondClaimIsNew
        );
        let taken = |(table, row): &(String, Row)| {
            let table = disk.tables.get(table);
            table.is_some_and(|table| table.rows.contains_key(row))
        };
        !without_key && self.claims.keys().any(taken)
    }

    fn release(&mut self) {
        let mut disk = self.database.disk();
        for (table, row) in std::mem::take(&mut self.claims).into_keys() {
            if let Some(table) = disk.tables.get_mut(&table) {
                if table.locks.get(&row).is_some_and(|lock| lock.holder == self.number) {
                    table.locks.remove(&row);
                }
                table.doomed.remove(&row);
                if self.fault == Fault::ClaimBesideTransaction {
                    table.rows.remove(&row);
                }
            }
        }
        drop(disk);
        if self.fault != Fault::WaiterNotWoken {
            self.database.ended.notify_waiters();
        }
    }
}

impl Drop for ToyTx {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        match self.fault {
            Fault::DropCommits => {
                self.store();
            }
            Fault::DropKeepsLock => {}
            _ => self.release(),
        }
    }
}

/// The store: a handle on the database.
pub(crate) struct ToyStore {
    database: Arc<Database>,
    temper: Temper,
    fault: Fault,
    table: String,
    /// Only with a fault: a transaction was left open on this handle's connection.
    swallows: Arc<Mutex<bool>>,
}

/// Which method claims.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Path {
    Single,
    Batch,
}

impl ToyStore {
    fn row(&self, group: &ConsumerGroup, id: MessageId) -> Row {
        let group = match self.fault {
            Fault::KeyWithoutGroup => String::new(),
            Fault::GroupsFolded => group.as_str().to_lowercase(),
            Fault::GroupsTrimmed => group.as_str().trim_end().to_owned(),
            Fault::GroupsCut => group.as_str().chars().take(32).collect(),
            _ => group.as_str().to_owned(),
        };
        let mut id = *id.as_bytes();
        if self.fault == Fault::IdsCut {
            id[8..].fill(0);
        }
        (group, id)
    }

    /// The table, if it is there and of this version.
    fn table<'d>(&self, disk: &'d mut Disk) -> Result<&'d mut Table> {
        let what = match disk.tables.get(&self.table) {
            Some(table) if table.version == VERSION => return Ok(disk.tables.get_mut(&self.table).unwrap()),
            Some(_) => "is of an older version",
            None => "is missing",
        };
        let kind = match self.fault {
            Fault::MissingTableIsAnyError => ErrorKind::Store,
            _ => ErrorKind::Schema,
        };
        let remedy = match self.fault {
            Fault::MissingTableWithoutRemedy => "",
            _ => "; call `setup`",
        };
        Err(Error::new(kind, format!("the table {} {what}{remedy}", self.table)))
    }

    async fn claim(&self, tx: &mut ToyTx, group: &ConsumerGroup, delivery: Delivery, path: Path) -> Result<Claim> {
        assert!(self.fault != Fault::ClaimPanics, "index out of bounds in the driver");
        let row = self.row(group, delivery.id());
        let fingerprint = match path {
            Path::Batch if self.fault == Fault::BatchDropsFingerprint => None,
            _ => delivery.fingerprint(),
        };
        let mut waited = false;
        loop {
            // The round trip.
            if self.fault != Fault::CancelledClaimKeepsLock {
                yield_now().await;
            }
            tx.usable()?;
            let mut ended = pin!(self.database.ended.notified());
            ended.as_mut().enable();
            match self.look(tx, &row, fingerprint, waited)? {
                Looked::Claim(claim) => {
                    if self.fault == Fault::CancelledClaimKeepsLock {
                        yield_now().await;
                    }
                    if claim.is_new() {
                        tx.claims.insert((self.table.clone(), row), fingerprint);
                    }
                    tx.broken |= claim.is_duplicate() && self.fault == Fault::DuplicateBreaksTransaction;
                    tx.broken |= claim.is_in_flight() && self.fault == Fault::InFlightBreaksTransaction;
                    if claim.is_duplicate() && self.fault == Fault::DuplicateEndsTransaction {
                        tx.effects.clear();
                    }
                    return Ok(claim);
                }
                Looked::Wait if self.fault == Fault::BatchDeadlockIsFound && path == Path::Batch => {
                    let longest = Duration::from_millis(100);
                    if tokio::time::timeout(longest, ended).await.is_err() {
                        return Err(Error::new(ErrorKind::Conflict, "deadlock detected"));
                    }
                }
                Looked::Wait => ended.await,
            }
            waited = true;
        }
    }

    /// One look at the table, and the lock if the row is free.
    fn look(&self, tx: &ToyTx, row: &Row, fingerprint: Option<Fingerprint>, waited: bool) -> Result<Looked> {
        let mut disk = self.database.disk();
        let now = disk.now();
        let commits = disk.commits;
        let table = match self.table(&mut disk) {
            Err(_) if self.fault == Fault::MissingTableIsDuplicate => return Ok(Looked::duplicate(now, None)),
            result => result?,
        };
        if let Some(fingerprint) = tx.claims.get(&(self.table.clone(), row.clone())) {
            return Ok(match self.fault {
                Fault::SecondClaimIsNew => Looked::Claim(Claim::New),
                Fault::SecondClaimIsInFlight => Looked::Claim(Claim::InFlight(InFlight::new())),
                _ => Looked::duplicate(now, *fingerprint),
            });
        }
        if let Some(record) = table.rows.get_mut(row) {
            let unseen = tx.snapshot.is_some_and(|snapshot| record.commit > snapshot);
            if unseen && self.fault == Fault::SnapshotTakesTwice {
                return Ok(Looked::Claim(Claim::New));
            }
            if unseen {
                let kind = match self.fault {
                    Fault::SerializationFailureIsFatal => ErrorKind::Store,
                    _ => ErrorKind::Conflict,
                };
                return Err(Error::new(kind, "could not serialize access due to concurrent update"));
            }
            let claim = Claim::Duplicate(record.processed());
            match self.fault {
                Fault::DuplicateMovesTime => record.at = Some(now),
                Fault::DuplicateOverwritesFingerprint => record.fingerprint = fingerprint,
                _ => {}
            }
            return Ok(Looked::Claim(claim));
        }
        if waited && self.fault == Fault::EndTakenForCommit {
            return Ok(Looked::duplicate(now, None));
        }
        let free = match self.fault {
            Fault::LookThenInsert | Fault::LostRaceIsFatal => true,
            _ => self.temper == Temper::Optimistic,
        };
        match table.locks.get(row) {
            Some(_) if free => {}
            Some(_) if self.fault == Fault::DuplicateWhileInFlight => return Ok(Looked::duplicate(now, None)),
            Some(_) if self.temper == Temper::SaysInFlight => {
                return Ok(Looked::Claim(Claim::InFlight(InFlight::new())));
            }
            Some(_) => return Ok(Looked::Wait),
            None => {}
        }
        let (holder, since) = (tx.number, now);
        table.locks.insert(row.clone(), Lock { holder, since });
        if matches!(self.fault, Fault::ClaimCommitsAlone | Fault::ClaimBesideTransaction) {
            let (at, commit) = (Some(now), commits);
            table.rows.insert(
                row.clone(),
                Committed {
                    at,
                    fingerprint,
                    commit,
                },
            );
        }
        Ok(Looked::Claim(Claim::New))
    }

    /// The one writer's turn, in a database that has one.
    async fn turn(&self) -> Result<Option<OwnedMutexGuard<()>>> {
        if self.temper != Temper::OneWriter {
            return Ok(None);
        }
        let queued = Arc::clone(&self.database.writer).lock_owned();
        match tokio::time::timeout(Duration::from_millis(100), queued).await {
            Ok(writer) => Ok(Some(writer)),
            Err(_elapsed) => Err(Error::new(ErrorKind::Busy, "the database is locked")),
        }
    }
}

enum Looked {
    Claim(Claim),
    Wait,
}

impl Looked {
    fn duplicate(at: SystemTime, fingerprint: Option<Fingerprint>) -> Self {
        Self::Claim(Claim::Duplicate(Processed::at(at).with_fingerprint(fingerprint)))
    }
}

#[async_trait]
impl InboxStore for ToyStore {
    type Tx = ToyTx;

    async fn try_claim(&self, tx: &mut ToyTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        self.claim(tx, group, delivery, Path::Single).await
    }

    async fn try_claim_batch(
        &self,
        tx: &mut ToyTx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        if self.fault == Fault::BatchIsSmall && deliveries.len() > 999 {
            return Err(Error::new(ErrorKind::Store, "too many parameters"));
        }
        // In the order of ids, so that no two batches wait for each other.
        let mut order: Vec<usize> = (0..deliveries.len()).collect();
        if !matches!(self.fault, Fault::BatchDeadlocks | Fault::BatchDeadlockIsFound) {
            order.sort_by_key(|&index| deliveries[index].id());
        }
        let mut claims = vec![Claim::New; deliveries.len()];
        let mut seen = BTreeMap::new();
        for (place, index) in order.into_iter().enumerate() {
            let delivery = deliveries[index];
            let mut claim = self.claim(tx, group, delivery, Path::Batch).await?;
            let first = seen.entry(delivery.id()).or_insert_with(|| claim.clone());
            if self.fault == Fault::BatchTakesRepeatedTwice {
                claim = first.clone();
            }
            let place = match self.fault {
                Fault::BatchInDatabaseOrder => place,
                _ => index,
            };
            claims[place] = claim;
        }
        if self.fault == Fault::BatchAnswersNewOnly {
            claims.retain(Claim::is_new);
        }
        Ok(claims)
    }
}

#[async_trait]
impl Transactions for ToyStore {
    async fn begin(&self) -> Result<ToyTx> {
        let writer = self.turn().await?;
        // With a fault, the flag stays where this future is dropped at the round trip.
        let swallowed = std::mem::replace(
            &mut *self.swallows.lock().unwrap(),
            self.fault == Fault::CancelledBeginSwallows,
        );
        // The round trip.
        yield_now().await;
        *self.swallows.lock().unwrap() = false;
        let mut disk = self.database.disk();
        disk.transactions += 1;
        Ok(ToyTx {
            database: Arc::clone(&self.database),
            fault: self.fault,
            number: disk.transactions,
            began: disk.now(),
            snapshot: None,
            claims: BTreeMap::new(),
            effects: Vec::new(),
            letters: Vec::new(),
            broken: false,
            ended: false,
            swallowed,
            _writer: writer,
        })
    }

    async fn commit(&self, mut tx: ToyTx) -> Result<()> {
        // The round trip.
        yield_now().await;
        tx.usable()?;
        if self.fault == Fault::CommitStoresNothing || tx.swallowed {
            return Ok(());
        }
        if self.fault == Fault::CommitInTwoSteps {
            let effects = std::mem::take(&mut tx.effects);
            self.database.disk().effects.extend(effects);
            yield_now().await;
        }
        if !tx.store() {
            return match self.fault {
                Fault::LostCommitSaysOk => Ok(()),
                Fault::LostRaceIsFatal => Err(Error::new(ErrorKind::Store, "unique violation")),
                _ => Err(Error::new(
                    ErrorKind::Conflict,
                    "another consumer committed the message first",
                )),
            };
        }
        tx.ended = true;
        self.database.ended.notify_waiters();
        Ok(())
    }

    async fn rollback(&self, mut tx: ToyTx) -> Result<()> {
        yield_now().await;
        match self.fault {
            Fault::RollbackKeepsClaim => {
                tx.effects.clear();
                tx.store();
                self.database.ended.notify_waiters();
            }
            _ => tx.release(),
        }
        tx.ended = true;
        Ok(())
    }

    fn classify(&self, _error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = ToyTx>> {
        (self.fault != Fault::KeepsNoLetters).then_some(self)
    }
}

impl Table {
    fn keep(&mut self, fault: Fault, row: Row, letter: Option<DeadLetter>, now: SystemTime) {
        let Some(mut letter) = letter else {
            self.letters.remove(&row);
            return;
        };
        match fault {
            Fault::LetterIsNotStored => return,
            Fault::FirstLetterStays if self.letters.contains_key(&row) => return,
            Fault::LetterIsListedTwice => self.stale.extend(self.letters.get(&row).map(|old| old.info.clone())),
            Fault::HeadersAreAMap => {
                let map: BTreeMap<&str, &[u8]> = letter.headers.iter().collect();
                letter.headers = Headers::from_iter(map);
            }
            Fault::PayloadIsText => letter.payload = String::from_utf8_lossy(&letter.payload).into_owned().into(),
            Fault::PublishedInSeconds => {
                let seconds =
                    |at: SystemTime| Duration::from_secs(at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs());
                let published_at = letter.info.published_at;
                letter.info.published_at = published_at.map(|at| SystemTime::UNIX_EPOCH + seconds(at));
            }
            Fault::LetterStateIsLost => letter.info.state = DeadLetterState::Dead,
            _ => {}
        }
        letter.info.died_at = match fault {
            Fault::LetterTimeByConsumersClock => SystemTime::now(),
            Fault::LetterTimeAsGiven => letter.info.died_at,
            _ => now,
        };
        self.letters.insert(row, letter);
    }
}

#[async_trait]
impl DeadLetters for ToyStore {
    async fn add_dead_letter(&self, tx: &mut ToyTx, letter: &DeadLetter) -> Result<()> {
        yield_now().await;
        tx.usable()?;
        let row = self.row(letter.info.key.group(), letter.info.key.id());
        if self.fault == Fault::LetterBesideTransaction {
            let mut disk = self.database.disk();
            let now = disk.now();
            self.table(&mut disk)?.keep(self.fault, row, Some(letter.clone()), now);
            return Ok(());
        }
        tx.letters.push((self.table.clone(), row, Some(letter.clone())));
        Ok(())
    }

    async fn remove_dead_letter(&self, tx: &mut ToyTx, key: &Key) -> Result<()> {
        yield_now().await;
        tx.usable()?;
        let row = self.row(key.group(), key.id());
        if self.fault == Fault::LetterIsRemovedAtOnce {
            self.table(&mut self.database.disk())?.letters.remove(&row);
            return Ok(());
        }
        tx.letters.push((self.table.clone(), row, None));
        Ok(())
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let mut disk = self.database.disk();
        let row = self.row(key.group(), key.id());
        Ok(self.table(&mut disk)?.letters.get(&row).cloned())
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        let mut disk = self.database.disk();
        let table = self.table(&mut disk)?;
        let behind = |info: &DeadLetterInfo| match self.fault {
            Fault::PagesByTime => after.is_none_or(|after| info.died_at > after.died_at),
            _ => after.is_none_or(|after| info.place() > after),
        };
        let mut infos: Vec<DeadLetterInfo> = table
            .letters
            .values()
            .map(|letter| &letter.info)
            .chain(&table.stale)
            .filter(|info| info.key.group() == group || self.fault == Fault::LettersWithoutGroup)
            .filter(|info| behind(info))
            .cloned()
            .collect();
        if self.fault != Fault::LettersInOrderOfIds {
            infos.sort_by_key(DeadLetterInfo::place);
        }
        if self.fault != Fault::PagesWithoutLimit {
            infos.truncate(limit.get() as usize);
        }
        Ok(infos)
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let _writer = self.turn().await?;
        yield_now().await;
        let row = self.row(key.group(), key.id());
        let Some(mut letter) = self.find_dead_letter(key).await? else {
            return Ok(None);
        };
        if self.fault == Fault::PutBackRaces {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let mut disk = self.database.disk();
        let table = self.table(&mut disk)?;
        // What was seen before the pause counts with the fault only.
        let seen = match self.fault {
            Fault::PutBackRaces => letter.info.state,
            _ => match table.letters.get(&row) {
                Some(now) => now.info.state,
                None => return Ok(None),
            },
        };
        let forgets = seen != DeadLetterState::PuttingBack || self.fault == Fault::PutBackForgetsAgain;
        if forgets && self.fault != Fault::PutBackKeepsRecord {
            table.rows.remove(&row);
        }
        letter.info.state = DeadLetterState::PuttingBack;
        match self.fault {
            Fault::PutBackRemovesLetter => drop(table.letters.remove(&row)),
            _ => drop(table.letters.insert(row, letter.clone())),
        }
        Ok(Some(letter))
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        let _writer = self.turn().await?;
        let mut disk = self.database.disk();
        let row = self.row(info.key.group(), info.key.id());
        let letters = &mut self.table(&mut disk)?.letters;
        let same = letters.get(&row).is_some_and(|letter| {
            let state = letter.info.state == DeadLetterState::PuttingBack;
            (state && letter.info.died_at == info.died_at) || self.fault == Fault::FinishRemovesAnyLetter
        });
        if same {
            letters.remove(&row);
        }
        Ok(same)
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        let _writer = self.turn().await?;
        let mut disk = self.database.disk();
        let row = self.row(key.group(), key.id());
        let table = self.table(&mut disk)?;
        if self.fault == Fault::DeleteForgetsRecord {
            table.rows.remove(&row);
        }
        Ok(table.letters.remove(&row).is_some())
    }
}

#[async_trait]
impl Upkeep for ToyStore {
    async fn setup(&self) -> Result<()> {
        match self.fault {
            Fault::SetupHangs => std::future::pending().await,
            Fault::SetupBlocks => std::thread::sleep(Duration::from_secs(2)),
            _ => {}
        }
        let missing = !self.database.disk().tables.contains_key(&self.table);
        if self.fault == Fault::SetupRaces {
            yield_now().await;
            if missing && self.database.disk().tables.contains_key(&self.table) {
                return Err(Error::new(ErrorKind::Store, "the table exists already"));
            }
        }
        if self.fault == Fault::SetupFailsTwice && !missing {
            return Err(Error::new(ErrorKind::Store, "the table exists already"));
        }
        let mut disk = self.database.disk();
        let table = disk.tables.entry(self.table.clone()).or_default();
        let wipes =
            self.fault == Fault::SetupWipes || (self.fault == Fault::UpgradeLosesRecords && table.version != VERSION);
        if wipes {
            table.rows.clear();
        }
        table.version = VERSION;
        Ok(())
    }

    async fn check(&self) -> Result<Health> {
        let mut health = Health::new();
        if let Err(error) = self.table(&mut self.database.disk()) {
            if self.fault != Fault::CheckIsBlind {
                health.fault(error.to_string(), "call `setup`");
            }
        }
        Ok(health)
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let mut disk = self.database.disk();
        let found = self.table(&mut disk)?.rows.get(&self.row(key.group(), key.id()));
        let record = found.map(|record| Record::new(key.clone(), record.processed()));
        Ok(match self.fault {
            Fault::FindIsBlind => None,
            Fault::FindDropsFingerprint => record.map(|mut record| {
                record.fingerprint = None;
                record
            }),
            _ => record,
        })
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        let _writer = self.turn().await?;
        let mut disk = self.database.disk();
        let rows = &mut self.table(&mut disk)?.rows;
        let row = self.row(key.group(), key.id());
        Ok(match self.fault {
            Fault::ForgetRemembers => rows.contains_key(&row),
            _ => rows.remove(&row).is_some(),
        })
    }

    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        let _writer = self.turn().await?;
        yield_now().await;
        let mut disk = self.database.disk();
        let now = match self.fault {
            Fault::PurgeByConsumersClock => SystemTime::now(),
            _ => disk.now(),
        };
        let Some(cutoff) = now.checked_sub(purge.older_than) else {
            return Ok(Purged::new(0, false));
        };
        let step = match self.fault {
            Fault::PurgeIgnoresStep => usize::MAX,
            _ => purge.step.get() as usize,
        };
        let meant = |row: &Row| match (&purge.group, self.fault) {
            (None, _) | (_, Fault::PurgeIgnoresGroup) => true,
            (Some(group), Fault::PurgeTakesPattern) => match group.as_str().strip_suffix('*') {
                Some(head) => row.0.starts_with(head),
                None => row.0 == group.as_str(),
            },
            (Some(group), _) => row.0 == self.row(group, MessageId::new("any").unwrap()).0,
        };
        let table = self.table(&mut disk)?;
        let old: Vec<Row> = table
            .rows
            .iter()
            .filter(|(row, record)| {
                let old = record.at.is_some_and(|at| at < cutoff) || self.fault == Fault::PurgeTakesFresh;
                old && meant(row)
            })
            .map(|(row, _)| row.clone())
            .take(step)
            .collect();
        for row in &old {
            table.rows.remove(row);
        }
        if self.fault == Fault::PurgeTakesInFlight {
            let doomed = table.locks.iter().filter(|(_, lock)| lock.since < cutoff);
            table.doomed.extend(doomed.map(|(row, _)| row.clone()));
        }
        let more = match self.fault {
            Fault::PurgeStopsEarly => false,
            Fault::PurgeNeverEnds => true,
            _ => old.len() == step,
        };
        Ok(Purged::new(old.len() as u64, more))
    }
}
