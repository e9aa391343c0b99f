//! Claims on SQLite, through this project's API and with the same statements written by hand with rusqlite.
//!
//! `cargo bench --bench sqlite`. Every comparison runs both ways in turn, on files of the same settings (WAL,
//! synchronous=FULL) in one folder, and prints the ratio beside the bar of the design. Criterion's own figures of the
//! same functions follow.

#![allow(clippy::expect_used, reason = "a measurement that fails has nothing to say")]

mod support;

use std::hint::black_box;
use std::time::Duration;

use criterion::Criterion;
use inbox::sqlite::rusqlite::{Connection, TransactionBehavior, params};
use inbox::sqlite::{SqliteInbox, SqliteTable};
use inbox::{BoxError, ConsumerGroup, Delivery, Inbox, MessageId, Upkeep};
use support::{Ids, compare, timed};
use tokio::runtime::Runtime;

const CLAIM: &str = "INSERT INTO inbox_events (event_id, consumer_group, processed_at, fingerprint)
    VALUES (?1, ?2, CAST(round((julianday('now') - 2440587.5) * 86400000.0) AS INTEGER), ?3)
    ON CONFLICT (event_id, consumer_group) DO NOTHING";
const EFFECT: &str = "INSERT INTO invoices (event_id, amount_cents) VALUES (?1, 100)";
const BATCH: usize = 100;

/// A database of its own with both tables, and a second one alike.
struct Database {
    folder: tempfile::TempDir,
}

impl Database {
    fn new() -> Self {
        let database = Self {
            folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary folder"),
        };
        let mut connection = database.connect();
        SqliteTable::default().setup(&mut connection).expect("setup");
        connection
            .execute_batch("CREATE TABLE invoices (event_id BLOB NOT NULL, amount_cents INTEGER NOT NULL) STRICT")
            .expect("the table of effects");
        database
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("bench.db")
    }

    fn connect(&self) -> Connection {
        let connection = Connection::open(self.path()).expect("open");
        connection.pragma_update(None, "journal_mode", "wal").expect("WAL");
        connection.pragma_update(None, "synchronous", "FULL").expect("FULL");
        connection
    }
}

/// One claim in a transaction of the caller's, by hand.
fn claim_by_hand(connection: &mut Connection, id: MessageId) {
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("begin");
    let new = tx
        .prepare_cached(CLAIM)
        .and_then(|mut claim| claim.execute(params![id.as_bytes(), "billing", None::<[u8; 16]>]))
        .expect("claim");
    assert_eq!(black_box(new), 1);
    tx.commit().expect("commit");
}

/// The same through the API.
fn claim_by_us(table: &SqliteTable, group: &ConsumerGroup, connection: &mut Connection, id: MessageId) {
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("begin");
    assert!(black_box(table.try_claim_in(&tx, group, id)).expect("claim").is_new());
    tx.commit().expect("commit");
}

/// A batch by hand: all claims, then an effect for each that is new, one commit.
fn batch_by_hand(connection: &mut Connection, ids: &[MessageId]) {
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .expect("begin");
    let mut new = Vec::with_capacity(ids.len());
    {
        let mut claim = tx.prepare_cached(CLAIM).expect("prepare");
        for id in ids {
            if claim
                .execute(params![id.as_bytes(), "billing", None::<[u8; 16]>])
                .expect("claim")
                == 1
            {
                new.push(id);
            }
        }
        let mut effect = tx.prepare_cached(EFFECT).expect("prepare");
        for id in new {
            effect.execute(params![id.as_bytes()]).expect("effect");
        }
    }
    tx.commit().expect("commit");
}

/// The same through `process_batch`.
async fn batch_by_us(inbox: &Inbox<SqliteInbox>, deliveries: &[Delivery]) {
    let outcomes = inbox
        .process_batch(
            deliveries,
            |delivery| *delivery,
            async |tx, new| {
                let mut effect = tx.prepare_cached(EFFECT)?;
                for delivery in new {
                    effect.execute(params![delivery.id().as_bytes()])?;
                }
                Ok::<_, BoxError>(())
            },
        )
        .await;
    assert!(outcomes.iter().all(Result::is_ok));
}

fn ids_of(batch: &[Delivery]) -> Vec<MessageId> {
    batch.iter().map(Delivery::id).collect()
}

async fn process_by_us(inbox: &Inbox<SqliteInbox>, id: MessageId) {
    let outcome = inbox
        .process(id, async |tx| {
            tx.prepare_cached(EFFECT)?.execute(params![id.as_bytes()]).map(drop)
        })
        .await;
    assert!(outcome.expect("process").may_acknowledge());
}

fn process_by_hand(connection: &mut Connection, id: MessageId) {
    batch_by_hand(connection, &[id]);
}

fn store(runtime: &Runtime, database: &Database) -> Inbox<SqliteInbox> {
    runtime.block_on(async {
        let inbox = Inbox::new(SqliteInbox::open(database.path()).await.expect("open"), "billing").expect("a group");
        inbox.store().setup().await.expect("setup");
        inbox
    })
}

fn compare_batches(runtime: &Runtime) {
    println!("\na batch of {BATCH} with one effect each, `process_batch` (bar: throughput 0.95)");
    // A file can be faster than its twin by several percent, whoever works on it: each way has its turn on both, and the
    // third line, by hand on both, shows what is left of that.
    let twins = [Database::new(), Database::new()];
    let stores = [store(runtime, &twins[0]), store(runtime, &twins[1])];
    let mut connections = [twins[0].connect(), twins[1].connect()];
    let mut ids = Ids::default();
    let mut ratios = Vec::new();
    for (name, ours) in [
        ("  process_batch, on one file", 0),
        ("  process_batch, files exchanged", 1),
    ] {
        let next = std::cell::RefCell::new(&mut ids);
        let batch = || -> Vec<Delivery> { (0..BATCH).map(|_| next.borrow_mut().next().into()).collect() };
        let by_hand = &mut connections[1 - ours];
        let ratio = compare(
            name,
            41,
            30,
            |times| {
                (0..times)
                    .map(|_| batch())
                    .map(|batch| timed(1, || runtime.block_on(batch_by_us(&stores[ours], &batch))))
                    .sum()
            },
            |times| {
                (0..times)
                    .map(|_| batch())
                    .map(|batch| timed(1, || batch_by_hand(by_hand, &ids_of(&batch))))
                    .sum()
            },
        );
        ratios.push(ratio.median());
    }
    let [one, other] = &mut connections;
    let next = std::cell::RefCell::new(&mut ids);
    let batch = || -> Vec<Delivery> { (0..BATCH).map(|_| next.borrow_mut().next().into()).collect() };
    compare(
        "  by hand on both",
        41,
        30,
        |times| {
            (0..times)
                .map(|_| batch())
                .map(|batch| timed(1, || batch_by_hand(one, &ids_of(&batch))))
                .sum()
        },
        |times| {
            (0..times)
                .map(|_| batch())
                .map(|batch| timed(1, || batch_by_hand(other, &ids_of(&batch))))
                .sum()
        },
    );
    let ratio = (ratios[0] * ratios[1]).sqrt();
    println!("  throughput {:.3} of hand-written", 1.0 / ratio);
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let group = ConsumerGroup::new("billing").expect("a group");
    let table = SqliteTable::default();
    let (our_database, their_database) = (Database::new(), Database::new());
    let (mut ours, mut theirs) = (our_database.connect(), their_database.connect());
    let inbox = store(&runtime, &our_database);
    let (mut our_ids, mut their_ids) = (Ids::default(), Ids::default());

    println!("one claim (bar: ratio 1.05)");
    compare(
        "  in the caller's transaction, begin to commit",
        41,
        300,
        |times| timed(times, || claim_by_us(&table, &group, &mut ours, our_ids.next())),
        |times| timed(times, || claim_by_hand(&mut theirs, their_ids.next())),
    );
    compare(
        "  the claim alone, in an open transaction",
        41,
        5_000,
        |times| {
            let tx = ours
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .expect("begin");
            let time = timed(times, || {
                assert!(table.try_claim_in(&tx, &group, our_ids.next()).expect("claim").is_new());
            });
            tx.rollback().expect("rollback");
            time
        },
        |times| {
            let tx = theirs
                .transaction_with_behavior(TransactionBehavior::Immediate)
                .expect("begin");
            let time = timed(times, || {
                let mut claim = tx.prepare_cached(CLAIM).expect("prepare");
                let id = their_ids.next();
                assert_eq!(
                    claim
                        .execute(params![id.as_bytes(), "billing", None::<[u8; 16]>])
                        .expect("claim"),
                    1
                );
            });
            tx.rollback().expect("rollback");
            time
        },
    );
    println!("\none message with one effect, `process` (by hand: blocking, without a runtime)");
    compare(
        "  process",
        41,
        300,
        |times| {
            runtime.block_on(async {
                let start = std::time::Instant::now();
                for _ in 0..times {
                    process_by_us(&inbox, our_ids.next()).await;
                }
                start.elapsed()
            })
        },
        |times| timed(times, || process_by_hand(&mut theirs, their_ids.next())),
    );
    compare_batches(&runtime);

    let mut criterion = Criterion::default()
        .sample_size(20)
        .measurement_time(Duration::from_secs(2));
    criterion.bench_function("claim/ours", |b| {
        b.iter(|| claim_by_us(&table, &group, &mut ours, our_ids.next()));
    });
    criterion.bench_function("claim/by hand", |b| {
        b.iter(|| claim_by_hand(&mut theirs, their_ids.next()));
    });
    criterion.final_summary();
}
