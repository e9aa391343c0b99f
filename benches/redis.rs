//! Claims on Redis, through this project's API and with the same commands written by hand with redis-rs.
//!
//! `cargo bench --features redis --bench redis`. Both run in turn on one private server (append-only file, `always`; or the
//! one that `INBOX_TEST_REDIS_URL` names), each on a connection of its own, and the ratio is printed beside the bar of the
//! design; then the memory that a record takes.

#![allow(clippy::expect_used, reason = "a measurement that fails has nothing to say")]

mod support;

use std::hint::black_box;
use std::time::{Duration, Instant};

use inbox::redis::RedisInbox;
use inbox::redis::redis::aio::MultiplexedConnection;
use inbox::redis::redis::{Client, Value, cmd, pipe};
use inbox::{BoxError, ConsumerGroup, Delivery, Inbox, InboxStore, MessageId, Transactions};
use support::{Ids, compare};
use tokio::runtime::Runtime;

const WEEK: u64 = 7 * 24 * 60 * 60 * 1000;
const BATCH: usize = 100;

/// By hand: watches and looks, then writes record and effects together.
async fn by_hand(connection: &mut MultiplexedConnection, ids: &[MessageId], effects: bool) {
    let keys: Vec<String> = ids.iter().map(|id| format!("hand:{{{id}}}:billing:{id}")).collect();
    let (_, found): (Value, Vec<Option<String>>) = pipe()
        .cmd("WATCH")
        .arg(&keys)
        .cmd("MGET")
        .arg(&keys)
        .query_async(connection)
        .await
        .expect("look");
    let mut commit = pipe();
    commit.atomic();
    for (key, found) in keys.iter().zip(&found) {
        if found.is_none() {
            commit
                .cmd("SET")
                .arg(key)
                .arg("2026-12-01T04:00:00.123Z claim=0123456789abcdef0123456789abcdef")
                .arg("NX")
                .arg("PX")
                .arg(WEEK);
        }
    }
    if effects {
        for found in &found {
            if found.is_none() {
                commit.cmd("RPUSH").arg("hand:invoices").arg("an invoice");
            }
        }
    }
    let replies: Option<Vec<Value>> = commit.query_async(connection).await.expect("commit");
    assert_eq!(
        black_box(replies).map(|replies| replies.len()),
        Some(ids.len() * if effects { 2 } else { 1 })
    );
}

async fn claim_by_us(store: &RedisInbox, group: &ConsumerGroup, id: MessageId) {
    let mut tx = store.begin().await.expect("begin");
    assert!(
        store
            .try_claim(&mut tx, group, id.into())
            .await
            .expect("claim")
            .is_new()
    );
    store.commit(tx).await.expect("commit");
}

async fn batch_by_us(inbox: &Inbox<RedisInbox>, deliveries: &[Delivery]) {
    let outcomes = inbox
        .process_batch(
            deliveries,
            |delivery| *delivery,
            async |tx, new| {
                for _ in new {
                    tx.pipe().rpush("invoices", "an invoice");
                }
                Ok::<_, BoxError>(())
            },
        )
        .await;
    assert!(outcomes.iter().all(Result::is_ok));
}

fn main() {
    let runtime = Runtime::new().expect("a runtime");
    let url = inbox_test_servers::redis_url();
    let group = ConsumerGroup::new("billing").expect("a group");
    let (inbox, mut connection) = runtime.block_on(async {
        let store = RedisInbox::connect(url.as_str()).await.expect("connect");
        let client = Client::open(url.as_str()).expect("a URL");
        let connection = client.get_multiplexed_async_connection().await.expect("connect");
        (Inbox::new(store, group.clone()).expect("a group"), connection)
    });
    let (mut our_ids, mut their_ids) = (Ids::default(), Ids::default());

    println!("one claim, begin to commit (bar: ratio 1.05)");
    compare(
        "  claim",
        41,
        200,
        |times| {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..times {
                    claim_by_us(inbox.store(), &group, our_ids.next()).await;
                }
                start.elapsed()
            })
        },
        |times| {
            runtime.block_on(async {
                let start = Instant::now();
                for _ in 0..times {
                    by_hand(&mut connection, &[their_ids.next()], false).await;
                }
                start.elapsed()
            })
        },
    );

    println!("\na batch of {BATCH} with one effect each, `process_batch` (bar: throughput 0.95)");
    let batch = compare(
        "  process_batch",
        41,
        40,
        |times| {
            let mut total = Duration::ZERO;
            for _ in 0..times {
                let deliveries: Vec<Delivery> = (0..BATCH).map(|_| our_ids.next().into()).collect();
                let start = Instant::now();
                runtime.block_on(batch_by_us(&inbox, &deliveries));
                total += start.elapsed();
            }
            total
        },
        |times| {
            let mut total = Duration::ZERO;
            for _ in 0..times {
                let ids: Vec<MessageId> = (0..BATCH).map(|_| their_ids.next()).collect();
                let start = Instant::now();
                runtime.block_on(by_hand(&mut connection, &ids, true));
                total += start.elapsed();
            }
            total
        },
    );
    println!("  throughput {:.3} of hand-written", 1.0 / batch.median());

    let memory: Vec<u64> = runtime.block_on(async {
        let mut ids = Ids::default();
        let mut memory = Vec::new();
        for _ in 0..1_000 {
            let key = inbox.store().key(&group, ids.next());
            let usage: Option<u64> = cmd("MEMORY")
                .arg("USAGE")
                .arg(key)
                .query_async(&mut connection)
                .await
                .expect("usage");
            memory.extend(usage);
        }
        memory
    });
    let mean = memory.iter().sum::<u64>() / memory.len().max(1) as u64;
    println!(
        "\nmemory of a record: {mean} bytes (MEMORY USAGE, mean of {})",
        memory.len()
    );
}
