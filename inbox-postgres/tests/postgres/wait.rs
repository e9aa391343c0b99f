//! Wait policies: what each answers while another transaction is at the message, and what it leaves behind.

use std::time::{Duration, Instant};

use inbox_core::{Claim, Delivery, ErrorKind, Inbox, Transactions, WaitPolicy};
use inbox_postgres::{PostgresInbox, sqlx};
use sqlx::{AssertSqlSafe, PgConnection, Row, raw_sql};

use crate::place::{Place, id, ids};

async fn lock_timeout(conn: &mut PgConnection) -> String {
    raw_sql("SHOW lock_timeout").fetch_one(conn).await.unwrap().get(0)
}

const POLICIES: [WaitPolicy; 3] = [
    WaitPolicy::Wait,
    WaitPolicy::DontWait,
    WaitPolicy::AtMost(Duration::from_millis(30)),
];

#[tokio::test]
async fn waiting_ends_in_a_duplicate_after_a_commit_and_in_a_new_claim_after_a_rollback() {
    for wait in [WaitPolicy::Wait, WaitPolicy::AtMost(Duration::from_secs(30))] {
        for commits in [true, false] {
            let place = Place::new(4).await;
            let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
            for batch in [false, true] {
                let batch_ids = ids(if batch { "batch" } else { "single" }, 3);
                let mut holder = place.pool.begin().await.unwrap();
                assert!(inbox.try_claim(&mut holder, batch_ids[1]).await.unwrap().is_new());
                let (waiter, pool, deliveries) = (inbox.clone(), place.pool.clone(), batch_ids.clone());
                let waiter = tokio::spawn(async move {
                    let mut tx = pool.begin().await.unwrap();
                    let claim = if batch {
                        waiter
                            .try_claim_batch(&mut tx, &deliveries)
                            .await
                            .unwrap()
                            .swap_remove(1)
                            .unwrap()
                    } else {
                        waiter.try_claim(&mut tx, deliveries[1]).await.unwrap()
                    };
                    assert_eq!(lock_timeout(&mut tx).await, "0");
                    claim
                });
                place.until_waiting(1).await;
                if commits {
                    holder.commit().await.unwrap();
                } else {
                    holder.rollback().await.unwrap();
                }
                let claim = waiter.await.unwrap();
                assert_eq!(claim.is_duplicate(), commits, "{wait:?}, batch {batch}: {claim:?}");
                assert_eq!(claim.is_new(), !commits);
            }
        }
    }
}

#[tokio::test]
async fn a_claim_with_a_bound_says_in_flight_in_time_and_the_transaction_works_on() {
    let place = Place::new(3).await;
    let holder_inbox = place.inbox().await;
    for wait in [WaitPolicy::DontWait, WaitPolicy::AtMost(Duration::from_millis(200))] {
        let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
        let mut holder = place.pool.begin().await.unwrap();
        assert!(holder_inbox.try_claim(&mut holder, id("a")).await.unwrap().is_new());
        // A plain insert of another program's is seen as well.
        sqlx::query("INSERT INTO inbox_events (event_id, consumer_group) VALUES ($1::text::uuid, 'billing')")
            .bind(id("b").to_string())
            .execute(&mut *holder)
            .await
            .unwrap();
        let mut tx = place.pool.begin().await.unwrap();
        for name in ["a", "b"] {
            let began = Instant::now();
            assert!(
                inbox.try_claim(&mut tx, id(name)).await.unwrap().is_in_flight(),
                "{wait:?} {name}"
            );
            let took = began.elapsed();
            let least = if let WaitPolicy::AtMost(longest) = wait {
                longest
            } else {
                Duration::ZERO
            };
            assert!(
                took >= least && took < least + Duration::from_secs(2),
                "{wait:?}: {took:?}"
            );
        }
        assert_eq!(lock_timeout(&mut tx).await, "0");
        assert!(inbox.try_claim(&mut tx, id("c")).await.unwrap().is_new());
        holder.rollback().await.unwrap();
        assert!(
            inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new(),
            "the hand-over"
        );
        tx.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn no_claim_leaves_another_lock_timeout_behind() {
    let place = Place::new(2).await;
    place.inbox().await;
    for wait in POLICIES {
        for prepared in [true, false] {
            for own in ["0", "3s", "10007ms"] {
                let builder = PostgresInbox::builder(place.pool.clone())
                    .wait(wait)
                    .prepared_statements(prepared);
                let inbox =
                    Inbox::new(builder.longest_wait(Duration::from_secs(5)).build().unwrap(), "billing").unwrap();
                let mut tx = place.pool.begin().await.unwrap();
                raw_sql(AssertSqlSafe(format!("SET LOCAL lock_timeout = '{own}'")))
                    .execute(&mut *tx)
                    .await
                    .unwrap();
                for claim in ["new", "new"] {
                    let _ = inbox.try_claim(&mut tx, id(claim)).await.unwrap();
                    assert_eq!(lock_timeout(&mut tx).await, own, "{wait:?} {prepared}");
                    let _ = inbox.try_claim_batch(&mut tx, &ids(claim, 3)).await.unwrap();
                    assert_eq!(lock_timeout(&mut tx).await, own, "{wait:?} {prepared}, batch");
                }
                tx.rollback().await.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn a_batch_with_a_bound_calls_those_in_flight_so_and_claims_the_others() {
    for wait in [WaitPolicy::DontWait, WaitPolicy::AtMost(Duration::from_millis(50))] {
        let place = Place::new(3).await;
        let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
        let batch = ids("m", 1_000);
        let mut before = place.pool.begin().await.unwrap();
        let done: Vec<Delivery> = batch.iter().copied().step_by(10).collect();
        inbox.try_claim_batch(&mut before, &done).await.unwrap();
        before.commit().await.unwrap();
        let mut holder = place.pool.begin().await.unwrap();
        for index in [5, 501, 999] {
            assert!(inbox.try_claim(&mut holder, batch[index]).await.unwrap().is_new());
        }
        let mut tx = place.pool.begin().await.unwrap();
        let claims = inbox.try_claim_batch(&mut tx, &batch).await.unwrap();
        for (index, claim) in claims.iter().enumerate() {
            let claim = claim.as_ref().unwrap();
            match index {
                5 | 501 | 999 => assert!(claim.is_in_flight(), "{wait:?} {index}: {claim:?}"),
                _ if index % 10 == 0 => assert!(claim.is_duplicate(), "{wait:?} {index}: {claim:?}"),
                _ => assert!(claim.is_new(), "{wait:?} {index}: {claim:?}"),
            }
        }
        tx.commit().await.unwrap();
        holder.rollback().await.unwrap();
        assert_eq!(place.records().await, 997);
    }
}

#[tokio::test]
async fn the_longest_wait_of_a_waiting_claim_is_bounded_by_the_server() {
    let place = Place::new(3).await;
    let inbox = place
        .inbox_with(|builder| builder.longest_wait(Duration::from_millis(100)))
        .await;
    let mut holder = place.pool.begin().await.unwrap();
    assert!(inbox.try_claim(&mut holder, id("a")).await.unwrap().is_new());
    for batch in [false, true] {
        let mut tx = place.pool.begin().await.unwrap();
        let error = if batch {
            inbox.try_claim_batch(&mut tx, &[id("a").into()]).await.unwrap_err()
        } else {
            inbox.try_claim(&mut tx, id("a")).await.unwrap_err()
        };
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        tx.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn claims_dropped_while_they_wait_give_their_connections_back_within_the_longest_wait() {
    let place = Place::new(5).await;
    let holder_pool = place.further(1).await;
    let inbox = place
        .inbox_with(|builder| builder.longest_wait(Duration::from_millis(500)))
        .await;
    let mut holder = holder_pool.begin().await.unwrap();
    assert!(inbox.try_claim(&mut holder, id("held")).await.unwrap().is_new());
    for _ in 0..5 {
        let mut tx = inbox.store().begin().await.unwrap();
        let claim = tokio::time::timeout(Duration::from_millis(20), inbox.try_claim(&mut tx, id("held"))).await;
        assert!(claim.is_err(), "it waits: {claim:?}");
    }
    let began = Instant::now();
    let mut tx = inbox.store().begin().await.unwrap();
    assert_eq!(inbox.try_claim(&mut tx, id("unrelated")).await.unwrap(), Claim::New);
    inbox.store().commit(tx).await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
}

#[tokio::test]
async fn the_policies_work_beside_one_another() {
    let place = Place::new(4).await;
    for first in POLICIES {
        for second in POLICIES {
            let one = place.inbox_with(|builder| builder.wait(first)).await;
            let other = place
                .inbox_with(|builder| builder.wait(second).longest_wait(Duration::from_millis(100)))
                .await;
            let name = format!("{first:?} {second:?}");
            let mut holder = place.pool.begin().await.unwrap();
            assert!(one.try_claim(&mut holder, id(&name)).await.unwrap().is_new());
            let mut tx = place.pool.begin().await.unwrap();
            match other.try_claim(&mut tx, id(&name)).await {
                Ok(claim) => assert!(second != WaitPolicy::Wait && claim.is_in_flight(), "{name}: {claim:?}"),
                Err(error) => assert!(
                    second == WaitPolicy::Wait && error.kind() == ErrorKind::Busy,
                    "{name}: {error}"
                ),
            }
            tx.rollback().await.unwrap();
            holder.commit().await.unwrap();
            let mut tx = place.pool.begin().await.unwrap();
            assert!(
                other.try_claim(&mut tx, id(&name)).await.unwrap().is_duplicate(),
                "{name}"
            );
            tx.rollback().await.unwrap();
        }
    }
}
