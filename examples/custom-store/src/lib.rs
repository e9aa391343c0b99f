//! An inbox over [redb], in some two hundred lines of code: how to write a store for a database of your own.
//!
//! Read it from top to bottom. Every step says what the contract asks for, what this database gives, and what yours may
//! do instead. The contract is on the page of [`InboxStore`]; the suite that holds a store against it is the crate
//! `inbox-conformance`, and `tests/conformance.rs` runs it here.
//!
//! What to know of redb: it is a library with a file, as SQLite is. It has **one writer** at a time, and
//! [`Database::begin_write`] blocks its thread until that is you. Readers see the last commit and wait for nobody. One
//! process opens the file.

use std::error::Error as StdError;
use std::num::NonZeroUsize;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use inbox_core::{
    Claim, ClaimIn, ConsumerGroup, Delivery, Error, ErrorKind, Fingerprint, Health, InboxStore, Key, Processed, Purge,
    Purged, Record, Result, Transactions, Upkeep, async_trait,
};
use redb::{Database, ReadableTable, TableDefinition, WriteTransaction};
use tokio::sync::{Mutex, OwnedMutexGuard};

// Step 1: what is stored.
//
// One record a message and group. The key is the *pair*, and it is never glued into one text: ("a", "b:c") and
// ("a:b", "c") are two keys. Both are compared byte for byte; beware of columns that ignore case or trailing space. The
// id is 16 bytes, the time is microseconds since 1970, and the fingerprint is there if the delivery had one.

type Row = (&'static str, &'static [u8; 16]);
type Value = (u64, Option<&'static [u8; 16]>);

const RECORDS: TableDefinition<Row, Value> = TableDefinition::new("inbox_records");

/// How long a transaction waits for its turn to write.
const PATIENCE: Duration = Duration::from_secs(5);

/// A store of records in a redb database. Clones share the database and the queue of its writers.
#[derive(Debug, Clone)]
pub struct RedbInbox {
    db: Arc<Database>,
    writer: Arc<Mutex<()>>,
}

impl RedbInbox {
    /// A store in this database, which the application shares: its own tables stand beside the inbox's.
    pub fn new(db: Arc<Database>) -> Self {
        let writer = Arc::default();
        Self { db, writer }
    }
}

// Step 2: the transaction.
//
// `Tx` is owned and has no lifetime. It gives handlers the driver's own transaction (here by `Deref`), because the effect
// belongs into it; that is the whole pattern. What ends it without a commit must undo the claim: redb's transaction
// aborts when it is dropped. With yours, see what the driver does on drop. Fields are dropped in order, so the writer's
// turn is passed on after that.

/// An open transaction: the driver's, and what was claimed in it.
#[allow(
    missing_debug_implementations,
    reason = "the driver's transaction has no Debug either"
)]
pub struct RedbTx {
    tx: WriteTransaction,
    claimed: Vec<(ConsumerGroup, Delivery)>,
    _turn: OwnedMutexGuard<()>,
}

impl Deref for RedbTx {
    type Target = WriteTransaction;

    fn deref(&self) -> &WriteTransaction {
        &self.tx
    }
}

// Step 3: the claim.
//
// Answer `Duplicate` if there is a record, or else write one and answer `New`: in the caller's transaction, and nowhere
// else. To look before writing is right here for one reason: there is one writer, so nobody comes in between, and the
// table of a write transaction shows its own rows, so that a second claim in it is a `Duplicate`. Where writers run side
// by side, a unique key must decide (`INSERT ... ON CONFLICT DO NOTHING`, and see whether a row was written), and a claim
// that meets an open one waits for it or answers `InFlight`: never `Duplicate`, for the other may yet roll back.

/// Claims in the driver's transaction.
fn claim(tx: &WriteTransaction, group: &ConsumerGroup, deliveries: &[Delivery]) -> Result<Vec<Claim>> {
    let mut table = tx.open_table(RECORDS).map_err(failed)?;
    let mut claims = Vec::with_capacity(deliveries.len());
    for delivery in deliveries {
        let (id, fingerprint) = (delivery.id(), delivery.fingerprint());
        let key = (group.as_str(), id.as_bytes());
        let found = table.get(key).map_err(failed)?.map(|row| processed(row.value()));
        if let Some(processed) = found {
            claims.push(Claim::Duplicate(processed));
            continue;
        }
        let value = (now(), fingerprint.as_ref().map(Fingerprint::as_bytes));
        table.insert(key, value).map_err(failed)?;
        claims.push(Claim::New);
    }
    Ok(claims)
}

#[async_trait]
impl InboxStore for RedbInbox {
    type Tx = RedbTx;

    async fn try_claim(&self, tx: &mut RedbTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let claims = self.try_claim_batch(tx, group, &[delivery]).await?;
        claims.into_iter().next().ok_or_else(no_answer)
    }

    // The answers are in the order asked. The second of two equal ids finds the first one's record, so it is `Duplicate`.
    // A database with locks claims in the order of ids instead, lest two batches wait for each other.
    async fn try_claim_batch(
        &self,
        tx: &mut RedbTx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        let claims = claim(&tx.tx, group, deliveries)?;
        let new = deliveries.iter().zip(&claims).filter(|(_, claim)| claim.is_new());
        tx.claimed.extend(new.map(|(delivery, _)| (group.clone(), *delivery)));
        Ok(claims)
    }
}

// Step 4: begin, commit, rollback.

/// Runs what blocks its thread on a thread for that, so that the runtime's own go on.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|stopped| Err(Error::new(ErrorKind::Store, "redb panicked").with_source(stopped)))
}

#[async_trait]
impl Transactions for RedbInbox {
    // Waiting for the writer's turn is asynchronous, bounded, and ends in an error that is retryable. If every waiter sat
    // in `begin_write`, each would hold a thread, until none was left for the commit that they wait for. A future that is
    // dropped here leaves nothing open: its turn passes on, and a transaction that opens too late is dropped.
    async fn begin(&self) -> Result<RedbTx> {
        let queued = Arc::clone(&self.writer).lock_owned();
        let turn = tokio::time::timeout(PATIENCE, queued).await.map_err(|_elapsed| {
            let why = "another transaction is open and redb has one writer; try again, and keep transactions short";
            Error::new(ErrorKind::Busy, why)
        })?;
        let db = Arc::clone(&self.db);
        blocking(move || {
            let (tx, claimed) = (db.begin_write().map_err(failed)?, Vec::new());
            Ok(RedbTx {
                tx,
                claimed,
                _turn: turn,
            })
        })
        .await
    }

    // `Ok` means on disk, for the caller acknowledges the message now. The record's time is that of the commit: counted
    // from the claim, the record of an hour's work would be an hour old at once, and could be purged too early. Where
    // the commit's own answer is an error, nobody knows what is on disk: that is a kind of its own.
    async fn commit(&self, tx: RedbTx) -> Result<()> {
        blocking(move || {
            let mut table = tx.tx.open_table(RECORDS).map_err(failed)?;
            for (group, delivery) in &tx.claimed {
                let (id, fingerprint) = (delivery.id(), delivery.fingerprint());
                let value = (now(), fingerprint.as_ref().map(Fingerprint::as_bytes));
                table.insert((group.as_str(), id.as_bytes()), value).map_err(failed)?;
            }
            drop(table);
            let committed = tx.tx.commit();
            committed.map_err(|error| Error::new(ErrorKind::OutcomeUnknown, "the commit failed").with_source(error))
        })
        .await
    }

    async fn rollback(&self, tx: RedbTx) -> Result<()> {
        blocking(move || tx.tx.abort().map_err(failed)).await
    }

    // Which of the driver's errors, met in a handler's own statements, are worth another try: serialization failures,
    // deadlocks, lock timeouts. redb has none of them, because its writers never meet.
    fn classify(&self, _error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }

    // With one writer it is no use to handle several messages at once.
    fn max_transactions(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(1)
    }

    // `dead_letters` is left out. That says that this store keeps none: a message that always fails stays on the broker.
}

// Step 5: the caller's own transaction.
//
// `Inbox::try_claim` takes every type that the store implements `ClaimIn` for. Only transactions: a claim on a bare
// connection would commit by itself, before the effect. The caller commits by itself too, so the time is the claim's.

#[async_trait]
impl ClaimIn<WriteTransaction> for RedbInbox {
    async fn claim_in(&self, tx: &mut WriteTransaction, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let claims = claim(tx, group, &[delivery])?;
        claims.into_iter().next().ok_or_else(no_answer)
    }

    async fn claim_batch_in(
        &self,
        tx: &mut WriteTransaction,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        claim(tx, group, deliveries)
    }
}

// Step 6: upkeep.

impl RedbInbox {
    /// A transaction of its own for one thing; an error drops it, and so undoes it.
    async fn write<T>(&self, work: impl FnOnce(&WriteTransaction) -> Result<T>) -> Result<T> {
        let tx = self.begin().await?;
        let done = work(&tx)?;
        self.commit(tx).await?;
        Ok(done)
    }
}

#[async_trait]
impl Upkeep for RedbInbox {
    // Safe at every start and by many at once: to open a table makes it where it is missing, and writers take turns. Most
    // databases have a race in `CREATE TABLE IF NOT EXISTS`; take a lock there.
    async fn setup(&self) -> Result<()> {
        self.write(|tx| tx.open_table(RECORDS).map(drop).map_err(failed)).await
    }

    // Changes nothing. Also look here at the settings that the guarantee needs, where the server has such.
    async fn check(&self) -> Result<Health> {
        let mut health = Health::new();
        let opened = self.db.begin_read().map_err(failed)?.open_table(RECORDS);
        if let Err(error) = opened.map_err(failed) {
            health.fault(error.to_string(), "without its table, no record can be read");
        }
        Ok(health)
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let table = self
            .db
            .begin_read()
            .map_err(failed)?
            .open_table(RECORDS)
            .map_err(failed)?;
        let (group, id) = (key.group().as_str(), key.id());
        let found = table.get((group, id.as_bytes())).map_err(failed)?;
        Ok(found.map(|row| Record::new(key.clone(), processed(row.value()))))
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        let (group, id) = (key.group().as_str(), key.id());
        self.write(|tx| {
            let mut table = tx.open_table(RECORDS).map_err(failed)?;
            let removed = table.remove((group, id.as_bytes())).map_err(failed)?;
            Ok(removed.is_some())
        })
        .await
    }

    // One bounded step, so that claims come in between: at most `step` records, of one group or of all, that are older
    // than asked by the store's clock. There may be more where the step was full. This walks the whole table; a second
    // one by time would spare that.
    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        let Some(cutoff) = SystemTime::now().checked_sub(purge.older_than).map(micros) else {
            return Ok(Purged::new(0, false)); // Older than all time: nothing is.
        };
        let at_most = purge.step.get() as usize;
        let of_group = |group: &str| purge.group.as_ref().is_none_or(|asked| asked.as_str() == group);
        self.write(|tx| {
            let mut table = tx.open_table(RECORDS).map_err(failed)?;
            let old = table.extract_if(|(group, _), (at, _)| of_group(group) && at < cutoff);
            let removed = old.map_err(failed)?.take(at_most).collect::<Result<Vec<_>, _>>();
            let removed = removed.map_err(failed)?.len();
            Ok(Purged::new(removed as u64, removed == at_most))
        })
        .await
    }
}

// Step 7: the time, and errors.
//
// The time is the store's, never the consumer's. redb runs in the consumer's process, so here they are one; a server has
// `now()`, and records and cutoffs must both come from there.

fn now() -> u64 {
    micros(SystemTime::now())
}

fn micros(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

fn processed((at, fingerprint): (u64, Option<&[u8; 16]>)) -> Processed {
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_micros(at));
    let processed = at.map_or_else(Processed::default, Processed::at);
    processed.with_fingerprint(fingerprint.copied().map(Fingerprint::from_bytes))
}

/// What an error of redb's means. The kind is what callers decide by: is the whole transaction worth another try, is
/// setup missing? The sentence says what to do, and the driver's error is the source.
fn failed(error: impl Into<redb::Error>) -> Error {
    let error = error.into();
    let (kind, what) = match error {
        redb::Error::TableDoesNotExist(_) => (ErrorKind::Schema, "the inbox's table is missing; call `setup`"),
        redb::Error::TableTypeMismatch { .. } | redb::Error::TypeDefinitionChanged { .. } => (
            ErrorKind::Schema,
            "the inbox's table is another program's; move that one, then call `setup`",
        ),
        redb::Error::PreviousIo => (ErrorKind::Store, "the file failed before; open the database again"),
        _ => (ErrorKind::Store, "redb failed; its own error, the source, says why"),
    };
    Error::new(kind, what).with_source(error)
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Store, "a batch of one had no answer")
}
