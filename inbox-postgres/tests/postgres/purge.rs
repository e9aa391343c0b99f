//! Purging: what is old and nothing else, beside everything else that goes on.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use inbox_core::{Claim, Inbox, Outcome, Purge, Transactions, Upkeep, WaitPolicy};
use inbox_postgres::{PostgresInbox, sqlx};
use sqlx::{AssertSqlSafe, Row, raw_sql};

use crate::place::{Place, eventually, group, id, ids};

const DAY: Duration = Duration::from_hours(24);

/// Fills in so many records of a group, from `newest` days ago back, one a second.
async fn fill(place: &Place, group: &str, count: u32, newest: u32) {
    place
        .sql(&format!(
            "INSERT INTO inbox_events (event_id, consumer_group, processed_at) SELECT gen_random_uuid(), '{group}', \
             now() - interval '{newest} days' - n * interval '1 second' FROM generate_series(1, {count}) n"
        ))
        .await;
}

fn step(step: u32) -> NonZeroU32 {
    NonZeroU32::new(step).unwrap()
}

/// What an `Inbox` leaves to the store: it purges its own group only.
async fn purge_every_group(inbox: &Inbox<PostgresInbox>, purge: Purge) -> u64 {
    let mut removed = 0;
    loop {
        let step = inbox.store().purge(&purge).await.unwrap();
        removed += step.removed;
        if !step.more {
            return removed;
        }
    }
}

#[tokio::test]
async fn a_purge_removes_what_is_old_step_by_step_and_nothing_else() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    fill(&place, "billing", 2_500, 8).await;
    fill(&place, "billing", 100, 6).await;
    fill(&place, "other", 300, 8).await;
    let mut steps = Vec::new();
    let purge = Purge::older_than(7 * DAY)
        .of_group(group("billing"))
        .in_steps_of(step(1_000));
    let removed = inbox
        .purge_with(purge, |so_far| steps.push(so_far.removed))
        .await
        .unwrap();
    assert_eq!((removed, steps), (2_500, vec![1_000, 2_000, 2_500]));
    assert_eq!(place.records().await, 400);
    let removed = purge_every_group(&inbox, Purge::older_than(7 * DAY).in_steps_of(step(7))).await;
    assert_eq!(removed, 300, "every group's");
    for endless in [Duration::MAX, 7_000 * 365 * DAY] {
        assert_eq!(inbox.purge(endless).await.unwrap(), 0);
    }
    assert_eq!(inbox.purge(Duration::ZERO).await.unwrap(), 100);
}

#[tokio::test]
async fn a_purge_goes_by_the_index_whatever_the_statistics_say() {
    let place = Place::new(1).await;
    let inbox = place.inbox().await;
    fill(&place, "kept", 20_000, 30).await;
    fill(&place, "billing", 20_000, 8).await;
    // Blocks of the table that a step reads: its own records', not those of a group that keeps longer.
    let reads = "SELECT (heap_blks_hit + heap_blks_read)::bigint FROM pg_statio_user_tables WHERE relid = \
                 'inbox_events'::regclass";
    place.sql("SELECT pg_stat_force_next_flush()").await;
    let before = place.number(reads).await;
    let purge = Purge::older_than(7 * DAY)
        .of_group(group("billing"))
        .in_steps_of(step(100));
    assert_eq!(inbox.store().purge(&purge).await.unwrap().removed, 100);
    place.sql("SELECT pg_stat_force_next_flush()").await;
    let read = place.number(reads).await - before;
    assert!(read < 2_000, "{read} block reads for 100 records");
    let whole = place.number("SELECT pg_relation_size('inbox_events') / 8192").await;
    assert!(whole > 200, "{whole} blocks");
}

#[tokio::test]
async fn the_age_counts_from_completion_not_from_the_beginning_of_the_transaction() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let slow = async || tokio::time::sleep(Duration::from_millis(1_500)).await;
    let outcome = inbox
        .process(id("slow"), async |_tx| {
            slow().await;
            Ok::<_, sqlx::Error>(())
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(inbox.purge(Duration::from_secs(1)).await.unwrap(), 0);
    let mut tx = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("slow")).await.unwrap().is_duplicate());
    // In the caller's own transaction it counts from the claim, not from the transaction's beginning.
    let mut tx = place.pool.begin().await.unwrap();
    slow().await;
    assert!(inbox.try_claim(&mut tx, id("late")).await.unwrap().is_new());
    tx.commit().await.unwrap();
    inbox.purge(Duration::from_secs(1)).await.unwrap();
    assert!(inbox.find(id("late")).await.unwrap().is_some());
}

#[tokio::test]
async fn a_purge_skips_what_an_open_transaction_holds_and_a_claim_waits_for_a_purge() {
    let place = Place::new(4).await;
    let inbox = place.inbox().await;
    fill(&place, "billing", 10, 8).await;
    let mut holder = place.pool.begin().await.unwrap();
    raw_sql("SELECT FROM inbox_events ORDER BY processed_at LIMIT 3 FOR UPDATE")
        .execute(&mut *holder)
        .await
        .unwrap();
    assert!(inbox.try_claim(&mut holder, id("in flight")).await.unwrap().is_new());
    assert_eq!(inbox.purge(Duration::ZERO).await.unwrap(), 7);
    holder.commit().await.unwrap();
    assert_eq!(place.records().await, 4);

    for commits in [true, false] {
        let outcome = inbox
            .process(id("x"), async |_tx| Ok::<_, sqlx::Error>(()))
            .await
            .unwrap();
        assert!(outcome.may_acknowledge());
        let mut purging = place.pool.begin().await.unwrap();
        sqlx::query("DELETE FROM inbox_events WHERE event_id = $1::text::uuid")
            .bind(id("x").to_string())
            .execute(&mut *purging)
            .await
            .unwrap();
        // Whoever does not wait is told so, and not that it is a duplicate.
        let impatient = place.inbox_with(|builder| builder.wait(WaitPolicy::DontWait)).await;
        let mut tx = place.pool.begin().await.unwrap();
        assert!(impatient.try_claim(&mut tx, id("x")).await.unwrap().is_in_flight());
        tx.rollback().await.unwrap();
        let (claiming, pool) = (inbox.clone(), place.pool.clone());
        let claiming = tokio::spawn(async move {
            let mut tx = pool.begin().await.unwrap();
            let claim = claiming.try_claim(&mut tx, id("x")).await.unwrap();
            tx.commit().await.unwrap();
            claim
        });
        place.until_waiting(1).await;
        if commits {
            purging.commit().await.unwrap();
        } else {
            purging.rollback().await.unwrap();
        }
        let claim = claiming.await.unwrap();
        assert_eq!(claim.is_new(), commits, "{claim:?}");
        assert_eq!(claim.is_duplicate(), !commits, "{claim:?}");
    }
}

#[tokio::test]
async fn four_purgers_beside_four_claimers_meet_no_error_and_make_progress() {
    let place = Place::new(9).await;
    let inbox = place.inbox().await;
    let stop = Arc::new(AtomicBool::new(false));
    fill(&place, "billing", 30_000, 1).await;
    let claimers: Vec<_> = (0..4)
        .map(|task| {
            let (inbox, stop) = (inbox.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut batches = 0;
                while !stop.load(Ordering::SeqCst) {
                    let outcomes = inbox
                        .process_batch(
                            &ids(&format!("{task}-{batches}-"), 20),
                            |delivery| *delivery,
                            async |_tx, _new| Ok::<_, sqlx::Error>(()),
                        )
                        .await;
                    assert!(
                        outcomes
                            .iter()
                            .all(|outcome| outcome.as_ref().unwrap().may_acknowledge())
                    );
                    batches += 1;
                }
                batches
            })
        })
        .collect();
    let purgers: Vec<_> = (0..4)
        .map(|_| {
            let (inbox, stop) = (inbox.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut removed = 0;
                while !stop.load(Ordering::SeqCst) {
                    let purge = Purge::older_than(Duration::from_millis(300)).of_group(group("billing"));
                    removed += inbox
                        .store()
                        .purge(&purge.in_steps_of(step(200)))
                        .await
                        .unwrap()
                        .removed;
                }
                removed
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_secs(5)).await;
    stop.store(true, Ordering::SeqCst);
    let (mut claimed, mut removed) = (0, 0);
    for task in claimers {
        claimed += task.await.unwrap() * 20;
    }
    for task in purgers {
        removed += task.await.unwrap();
    }
    assert!(removed >= 30_000, "{removed}");
    let left = u64::try_from(place.records().await).unwrap();
    assert_eq!(claimed + 30_000, removed + left);
}

#[tokio::test]
async fn a_purged_message_is_new_again_and_a_table_without_the_index_is_purged_too() {
    let place = Place::new(2).await;
    place.sql("CREATE TABLE inbox_events (id bigserial PRIMARY KEY, event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at timestamptz DEFAULT now(), UNIQUE (event_id, consumer_group))").await;
    let inbox = place.inbox().await;
    fill(&place, "billing", 250, 8).await;
    fill(&place, "other", 50, 8).await;
    let mut tx = inbox.store().begin().await.unwrap();
    assert_eq!(inbox.try_claim(&mut tx, id("a")).await.unwrap(), Claim::New);
    inbox.store().commit(tx).await.unwrap();
    let purge = Purge::older_than(7 * DAY)
        .of_group(group("billing"))
        .in_steps_of(step(100));
    assert_eq!(inbox.purge_with(purge, |_| ()).await.unwrap(), 250);
    assert_eq!(purge_every_group(&inbox, Purge::older_than(Duration::ZERO)).await, 51);
    let mut tx = inbox.store().begin().await.unwrap();
    assert_eq!(inbox.try_claim(&mut tx, id("a")).await.unwrap(), Claim::New);
}

/// What a long report does to the table: dead rows stay. Claims go on at their pace; the figures are in the benchmarks.
#[tokio::test]
async fn claims_and_purges_go_on_beside_one_old_snapshot() {
    let place = Place::new(4).await;
    let inbox = place.inbox().await;
    let mut report = place
        .pool
        .begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ")
        .await
        .unwrap();
    raw_sql("SELECT count(*) FROM effect")
        .execute(&mut *report)
        .await
        .unwrap();
    for round in 0..5 {
        let outcomes = inbox
            .process_batch(
                &ids(&format!("{round}-"), 4_000),
                |delivery| *delivery,
                async |_tx, _new| Ok::<_, sqlx::Error>(()),
            )
            .await;
        assert!(outcomes.iter().all(Result::is_ok));
        let began = Instant::now();
        eventually("the purge takes them", async || {
            inbox.purge(Duration::ZERO).await.unwrap();
            place.records().await == 0
        })
        .await;
        assert!(began.elapsed() < Duration::from_secs(20));
    }
    let rows = raw_sql(AssertSqlSafe("SELECT count(*) FROM inbox_events"))
        .fetch_one(&mut *report)
        .await
        .unwrap();
    assert_eq!(rows.get::<i64, _>(0), 0);
}
