//! Futures dropped at random moments: the pool does not run dry, no connection comes back in a transaction, effects and
//! claims stay together.

use std::time::Duration;

use inbox_core::{Delivery, Inbox};
use inbox_postgres::{PostgresInbox, sqlx};
use sqlx::Row;

use crate::place::{Place, eventually, id};

async fn process(inbox: &Inbox<PostgresInbox>, number: u64) {
    let _ = inbox
        .process(id(format!("p{number}")), async |tx| {
            sqlx::query("INSERT INTO effect VALUES ($1)")
                .bind(format!("p{number}"))
                .execute(&mut **tx)
                .await?;
            Ok::<_, sqlx::Error>(())
        })
        .await;
}

async fn process_batch(inbox: &Inbox<PostgresInbox>, number: u64) {
    let names: Vec<String> = (0..3).map(|part| format!("b{number}-{part}")).collect();
    let _ = inbox
        .process_batch(
            &names,
            |name| Delivery::from(id(name)),
            async |tx, new| {
                for name in new {
                    sqlx::query("INSERT INTO effect VALUES ($1)")
                        .bind(name.as_str())
                        .execute(&mut **tx)
                        .await?;
                }
                Ok::<_, sqlx::Error>(())
            },
        )
        .await;
}

async fn try_claim(inbox: &Inbox<PostgresInbox>, number: u64) {
    let Ok(mut tx) = inbox.store().pool().begin().await else {
        return;
    };
    if inbox
        .try_claim(&mut tx, id(format!("c{number}")))
        .await
        .is_ok_and(|claim| claim.is_new())
    {
        let effect = sqlx::query("INSERT INTO effect VALUES ($1)")
            .bind(format!("c{number}"))
            .execute(&mut *tx)
            .await;
        if effect.is_ok() {
            let _ = tx.commit().await;
        }
    }
}

#[tokio::test]
async fn a_thousand_futures_dropped_at_random_moments_leave_nothing_half_done() {
    let place = Place::new(4).await;
    let watch = place.further(1).await;
    let inbox = place.inbox().await;
    for number in 0..1_000_u64 {
        // A mixed bag of moments from 0 to 3 ms, by a multiplication that scatters; some go through.
        let moment = Duration::from_micros(number.wrapping_mul(2_654_435_761) % 3_000);
        // Only ours are under test for `begin`: a claim in the caller's transaction begins undisturbed.
        let _ = match number % 3 {
            0 => tokio::time::timeout(moment, process(&inbox, number)).await,
            1 => tokio::time::timeout(moment, process_batch(&inbox, number)).await,
            _ => {
                let mut tx = inbox.store().pool().begin().await.unwrap();
                let claim = tokio::time::timeout(moment, inbox.try_claim(&mut tx, id(format!("c{number}")))).await;
                drop(tx);
                claim.map(drop)
            }
        };
        if number % 100 == 99 {
            // The pool serves all its connections at once, and none of them is in a transaction.
            let mut connections = Vec::new();
            for _ in 0..4 {
                connections.push(place.pool.acquire().await.unwrap());
            }
            for conn in &mut connections {
                // As one message of the simple protocol, so that by itself it is a transaction of the same moment.
                let row = sqlx::raw_sql("SELECT now() = statement_timestamp()")
                    .fetch_one(&mut **conn)
                    .await
                    .unwrap();
                let alone: bool = row.get(0);
                assert!(alone, "a connection came back in a transaction");
            }
        }
    }
    eventually("all transactions have ended", async || {
        let (open,): (i64,) = sqlx::query_as(
            "SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation WHERE c.relname = 'inbox_events' AND \
             c.relnamespace = current_schema()::regnamespace AND l.mode = 'RowExclusiveLock'",
        )
        .fetch_one(&watch)
        .await
        .unwrap();
        open == 0
    })
    .await;
    try_claim(&inbox, 1).await;
    let counts: (i64, i64, i64) = sqlx::query_as(
        "SELECT (SELECT count(*) FROM inbox_events), (SELECT count(*) FROM effect), (SELECT count(DISTINCT id) FROM effect)",
    )
    .fetch_one(&watch)
    .await
    .unwrap();
    assert_eq!(counts.0, counts.1, "claims and effects");
    assert_eq!(counts.1, counts.2, "effects are there once");
    assert!(counts.0 > 50, "some went through: {counts:?}");
}
