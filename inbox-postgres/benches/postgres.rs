//! Measurements on a private server, beside the same work written by hand with sqlx, in one run and in turns.
//!
//! `cargo bench -p inbox-postgres -- claim batch rows purge large`: any of the words, all without one. `large` fills a
//! table with 10 million records, which takes minutes and 1.3 GB.

#![allow(clippy::unwrap_used, reason = "a benchmark stops at the first surprise")]
#![allow(clippy::cast_precision_loss, reason = "figures for people")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use inbox_core::uuid::Uuid;
use inbox_core::{Delivery, Inbox, MessageId, Purge};
use inbox_postgres::{PostgresInbox, sqlx};
use inbox_test_servers::Postgres;
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgConnectOptions, PgPoolOptions, PgTypeInfo};
use sqlx::{AssertSqlSafe, Encode, PgPool, Row, Type, raw_sql};

/// What sqlx's feature `uuid` gives those who write by hand.
struct ByHand(Uuid);
struct AllByHand(Vec<Uuid>);

impl Type<sqlx::Postgres> for ByHand {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(2950))
    }
}

impl Encode<'_, sqlx::Postgres> for ByHand {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        buf.extend_from_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }
}

impl Type<sqlx::Postgres> for AllByHand {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(2951))
    }
}

impl Encode<'_, sqlx::Postgres> for AllByHand {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        for number in [1, 0, 2950, i32::try_from(self.0.len())?, 1] {
            buf.extend_from_slice(&number.to_be_bytes());
        }
        for id in &self.0 {
            buf.extend_from_slice(&16_i32.to_be_bytes());
            buf.extend_from_slice(id.as_bytes());
        }
        Ok(IsNull::No)
    }
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    let wanted = |word: &str| words.is_empty() || words.iter().any(|given| given == word);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let server = Postgres::start();
        if wanted("claim") {
            claim(&server).await;
        }
        if wanted("batch") {
            batch(&server).await;
        }
        if wanted("rows") {
            rows(&server).await;
        }
        if wanted("purge") {
            purge(&server).await;
        }
        if wanted("large") {
            large(&server).await;
        }
    });
}

async fn pool(server: &Postgres, connections: u32) -> PgPool {
    let options = PgConnectOptions::new_without_pgpass()
        .host(server.socket_folder().to_str().unwrap())
        .port(server.port())
        .username("postgres")
        .database("postgres");
    PgPoolOptions::new()
        .max_connections(connections)
        .min_connections(connections)
        .connect_with(options)
        .await
        .unwrap()
}

async fn inbox(pool: &PgPool, table: &str) -> Inbox<PostgresInbox> {
    let inbox = Inbox::new(
        PostgresInbox::builder(pool.clone()).table(table).build().unwrap(),
        "billing",
    )
    .unwrap();
    inbox.setup().await.unwrap();
    inbox
}

/// Ids that scatter over the whole key, as random ones do, without a generator: UUIDv5 of a number.
fn id(number: u64) -> MessageId {
    MessageId::new(number.to_string()).unwrap()
}

fn percentile(times: &mut [Duration], percent: usize) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) * percent / 100]
}

async fn number(pool: &PgPool, sql: impl Into<String>) -> i64 {
    raw_sql(AssertSqlSafe(sql.into())).fetch_one(pool).await.unwrap().get(0)
}

/// One claim in the caller's transaction: the claim alone, and with begin and commit; beside the plainest SQL that claims,
/// and beside the very SQL that the store sends, which bounds the wait of a claim that nobody waits for any more.
async fn claim(server: &Postgres) {
    let pool = pool(server, 1).await;
    let ours = inbox(&pool, "ours").await;
    inbox(&pool, "plain").await;
    inbox(&pool, "same").await;
    let plain = "INSERT INTO plain (event_id, consumer_group) VALUES ($1, $2) ON CONFLICT (event_id, consumer_group) DO NOTHING \
                 RETURNING 1";
    let mut tx = pool.begin().await.unwrap();
    assert!(ours.try_claim(&mut tx, id(u64::MAX)).await.unwrap().is_new());
    let sent = "SELECT statement FROM pg_prepared_statements WHERE statement LIKE 'INSERT%'";
    let sent: String = raw_sql(sent).fetch_one(&mut *tx).await.unwrap().get(0);
    tx.commit().await.unwrap();
    let same = sent.replace("\"ours\"", "\"same\"");
    assert_ne!(same, sent);

    let mut alone = [Vec::new(), Vec::new(), Vec::new()];
    let mut whole = [Vec::new(), Vec::new(), Vec::new()];
    for number in 0..6_000_u64 {
        for turn in 0..3_u64 {
            let way = usize::try_from((number + turn) % 3).unwrap();
            let began = Instant::now();
            let mut tx = pool.begin().await.unwrap();
            let claiming = Instant::now();
            let new = if way == 2 {
                ours.try_claim(&mut tx, id(number)).await.unwrap().is_new()
            } else {
                let sql = [plain, &same][way];
                let query = sqlx::query(AssertSqlSafe(sql)).bind(ByHand(id(number).as_uuid()));
                query.bind("billing").fetch_optional(&mut *tx).await.unwrap().is_some()
            };
            let claimed = claiming.elapsed();
            assert!(new);
            tx.commit().await.unwrap();
            if number >= 500 {
                alone[way].push(claimed);
                whole[way].push(began.elapsed());
            }
        }
    }
    for (what, [plain, same, mine]) in [("claim alone", &mut alone), ("begin, claim, commit", &mut whole)] {
        let [plain, same, mine] = [plain, same, mine].map(|times| percentile(times, 50));
        let times = |other: Duration| mine.as_secs_f64() / other.as_secs_f64();
        println!(
            "{what}: ours {mine:?} (medians); the same SQL by hand {same:?}: {:.3} times; the plainest SQL {plain:?}: {:.3} times \
             (bar: 1.05)",
            times(same),
            times(plain)
        );
    }
}

/// Batches of 100 messages, each with one effect; all in one statement where the hand writes so too.
async fn batch(server: &Postgres) {
    let pool = pool(server, 1).await;
    let ours = inbox(&pool, "batch_ours").await;
    inbox(&pool, "batch_by_hand").await;
    raw_sql("CREATE TABLE effect_ours (id uuid); CREATE TABLE effect_by_hand (id uuid)")
        .execute(&pool)
        .await
        .unwrap();
    let (batches, size) = (600_u64, 100_u64);
    let mut times = [Vec::new(), Vec::new()];
    for round in 0..batches {
        let batch: Vec<Delivery> = (round * size..(round + 1) * size)
            .map(|number| id(number).into())
            .collect();
        for mine in if round % 2 == 0 { [true, false] } else { [false, true] } {
            let began = Instant::now();
            if mine {
                let outcomes = ours
                    .process_batch(
                        &batch,
                        |delivery| *delivery,
                        async |tx, new| {
                            let ids = AllByHand(new.iter().map(|delivery| delivery.id().as_uuid()).collect());
                            let effects = sqlx::query("INSERT INTO effect_ours SELECT unnest($1::uuid[])").bind(ids);
                            effects.execute(&mut **tx).await.map(drop)
                        },
                    )
                    .await;
                assert!(outcomes.into_iter().all(|outcome| outcome.unwrap().may_acknowledge()));
            } else {
                let mut tx = pool.begin().await.unwrap();
                let ids: Vec<Uuid> = batch.iter().map(|delivery| delivery.id().as_uuid()).collect();
                let claimed = sqlx::query(
                    "INSERT INTO batch_by_hand (event_id, consumer_group) SELECT unnest($1::uuid[]), $2 ON CONFLICT \
                     (event_id, consumer_group) DO NOTHING RETURNING event_id",
                )
                .bind(AllByHand(ids))
                .bind("billing")
                .fetch_all(&mut *tx)
                .await
                .unwrap();
                let new: Vec<Uuid> = claimed
                    .iter()
                    .map(|row| Uuid::from_slice(row.try_get_raw(0).unwrap().as_bytes().unwrap()).unwrap())
                    .collect();
                let effects = sqlx::query("INSERT INTO effect_by_hand SELECT unnest($1::uuid[])").bind(AllByHand(new));
                effects.execute(&mut *tx).await.unwrap();
                tx.commit().await.unwrap();
            }
            if round >= 50 {
                times[usize::from(mine)].push(began.elapsed());
            }
        }
    }
    let [hand, mine] = &mut times;
    let rate = |times: &[Duration]| times.len() as f64 * size as f64 / times.iter().sum::<Duration>().as_secs_f64();
    let (rate_hand, rate_mine) = (rate(hand), rate(mine));
    println!(
        "batches of 100, an effect each: ours {rate_mine:.0} messages/s, by hand {rate_hand:.0}: {:.3} times; by medians \
         {:.3} times (bar: 0.95)",
        rate_mine / rate_hand,
        percentile(hand, 50).as_secs_f64() / percentile(mine, 50).as_secs_f64()
    );
}

/// Bytes a record, with all indexes, after a million claims in batches, in the order of arrival.
async fn rows(server: &Postgres) {
    let pool = pool(server, 1).await;
    let ours = inbox(&pool, "rows").await;
    for round in 0..1_000_u64 {
        let batch: Vec<Delivery> = (round * 1_000..(round + 1) * 1_000)
            .map(|number| id(number).into())
            .collect();
        let mut tx = pool.begin().await.unwrap();
        ours.try_claim_batch(&mut tx, &batch).await.unwrap();
        tx.commit().await.unwrap();
    }
    let bytes = |what: &str| number(&pool, format!("SELECT {what}::bigint"));
    let count = number(&pool, "SELECT count(*) FROM rows").await as f64;
    println!(
        "bytes a record, {count} records of the group \"billing\": {:.1} (table {:.1}, key {:.1}, purge index {:.1}) (bar: 135)",
        bytes("pg_total_relation_size('rows')").await as f64 / count,
        bytes("pg_relation_size('rows')").await as f64 / count,
        bytes("pg_relation_size('rows_pkey')").await as f64 / count,
        bytes("pg_relation_size('rows_consumer_group_date_trunc_idx')").await as f64 / count,
    );
}

async fn fill(pool: &PgPool, table: &str, count: u64, age: &str) {
    raw_sql(AssertSqlSafe(format!(
        "INSERT INTO {table} (event_id, consumer_group, processed_at) SELECT gen_random_uuid(), 'billing', now() - interval \
         '{age}' + n * interval '10 milliseconds' FROM generate_series(1, {count}) n"
    )))
    .execute(pool)
    .await
    .unwrap();
}

/// Claims' times, one by one with their commits, while a million old records are purged, and without.
async fn purge(server: &Postgres) {
    let pool = pool(server, 3).await;
    let ours = inbox(&pool, "purged").await;
    fill(&pool, "purged", 1_000_000, "30 days").await;
    raw_sql("CHECKPOINT").execute(&pool).await.unwrap();
    let claims = async |first: u64, stop: Arc<AtomicBool>, at_most: u64| {
        let mut times = Vec::new();
        for number in first..first + at_most {
            if stop.load(Ordering::SeqCst) {
                break;
            }
            let began = Instant::now();
            let mut tx = pool.begin().await.unwrap();
            assert!(ours.try_claim(&mut tx, id(number)).await.unwrap().is_new());
            tx.commit().await.unwrap();
            times.push(began.elapsed());
        }
        times
    };
    let mut without = claims(1 << 40, Arc::default(), 8_000).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (purging, stopping) = (ours.clone(), Arc::clone(&stop));
    let purger = tokio::spawn(async move {
        let began = Instant::now();
        let day = Duration::from_hours(24);
        let mut steps = Vec::new();
        let mut last = Instant::now();
        let purge = Purge::older_than(7 * day).of_group(purging.group().clone());
        let removed = purging
            .purge_with(purge, |_| {
                steps.push(last.elapsed());
                last = Instant::now();
            })
            .await
            .unwrap();
        stopping.store(true, Ordering::SeqCst);
        (removed, began.elapsed(), steps)
    });
    let mut beside = claims(1 << 41, stop, u64::MAX >> 1).await;
    let (removed, took, mut steps) = purger.await.unwrap();
    println!(
        "purge of {removed} in {took:?} ({} steps, median {:?}, longest {:?}); claims with commit beside it: p50 {:?}, p99 {:?}; \
         without: p50 {:?}, p99 {:?}",
        steps.len(),
        percentile(&mut steps, 50),
        percentile(&mut steps, 100),
        percentile(&mut beside, 50),
        percentile(&mut beside, 99),
        percentile(&mut without, 50),
        percentile(&mut without, 99),
    );
}

/// A claim in a table of 10 million records against one in an empty one, in turns.
async fn large(server: &Postgres) {
    let pool = pool(server, 1).await;
    let small = inbox(&pool, "small").await;
    let large = inbox(&pool, "large").await;
    for _ in 0..10 {
        fill(&pool, "large", 1_000_000, "3 days").await;
    }
    raw_sql("CHECKPOINT").execute(&pool).await.unwrap();
    raw_sql("VACUUM ANALYZE large").execute(&pool).await.unwrap();
    let mut alone = [Vec::new(), Vec::new()];
    let mut whole = [Vec::new(), Vec::new()];
    for number in 0..8_000 {
        for big in if number % 2 == 0 { [true, false] } else { [false, true] } {
            let began = Instant::now();
            let mut tx = pool.begin().await.unwrap();
            let claiming = Instant::now();
            let inbox = if big { &large } else { &small };
            assert!(inbox.try_claim(&mut tx, id(number)).await.unwrap().is_new());
            let claimed = claiming.elapsed();
            tx.commit().await.unwrap();
            if number >= 2_000 {
                alone[usize::from(big)].push(claimed);
                whole[usize::from(big)].push(began.elapsed());
            }
        }
    }
    for (what, [empty, full]) in [("claim alone", &mut alone), ("begin, claim, commit", &mut whole)] {
        let (empty_50, full_50) = (percentile(empty, 50), percentile(full, 50));
        let mean = |times: &[Duration]| times.iter().sum::<Duration>() / u32::try_from(times.len()).unwrap();
        println!(
            "{what}, among 10 million {full_50:?}, in an empty table {empty_50:?} (medians): {:.3} times; means {:?}, {:?}: {:.3} \
             times (bar: 1.3)",
            full_50.as_secs_f64() / empty_50.as_secs_f64(),
            mean(full),
            mean(empty),
            mean(full).as_secs_f64() / mean(empty).as_secs_f64()
        );
    }
}
