//! Claims: one and many, at every isolation level, beside whatever else a table may have.

use std::time::{Duration, SystemTime};

use inbox_core::{Claim, Delivery, ErrorKind, Inbox, InboxStore, Outcome, Transactions, WaitPolicy};
use inbox_postgres::{PostgresInbox, sqlx};
use sqlx::{Acquire, AssertSqlSafe, Row, raw_sql};

use crate::place::{Place, group, id, ids, pool_at, proxy};

#[tokio::test]
async fn a_claim_in_the_callers_transaction_commits_and_rolls_back_with_it() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let mut tx = place.pool.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    tx.rollback().await.unwrap();
    let mut tx = place.pool.begin().await.unwrap();
    assert!(!inbox.is_duplicate(&mut tx, id("a")).await.unwrap());
    assert!(
        inbox.is_duplicate(&mut tx, id("a")).await.unwrap(),
        "a second claim in the same transaction"
    );
    tx.commit().await.unwrap();
    let mut tx = place.pool.begin().await.unwrap();
    let Claim::Duplicate(processed) = inbox.try_claim(&mut tx, id("a")).await.unwrap() else {
        panic!()
    };
    let age = SystemTime::now().duration_since(processed.at.unwrap()).unwrap();
    assert!(age < Duration::from_mins(1), "{age:?}");
    sqlx::query("INSERT INTO effect VALUES ('still usable')")
        .execute(&mut *tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(place.effects().await, 1);
}

#[tokio::test]
async fn a_claim_in_a_savepoint_is_undone_with_it_and_a_handlers_savepoint_keeps_the_claim() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let mut tx = place.pool.begin().await.unwrap();
    let mut inner = tx.begin().await.unwrap();
    assert!(inbox.try_claim(&mut inner, id("a")).await.unwrap().is_new());
    inner.rollback().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    tx.rollback().await.unwrap();

    let outcome = inbox
        .process(id("b"), async |tx| {
            let mut inner = tx.begin().await?;
            sqlx::query("SELECT 1 / 0").execute(&mut *inner).await.unwrap_err();
            inner.rollback().await?;
            sqlx::query("INSERT INTO effect VALUES ('b')")
                .execute(&mut **tx)
                .await?;
            Ok::<_, sqlx::Error>(())
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!((place.effects().await, place.records().await), (1, 1));
}

#[tokio::test]
async fn a_new_claim_and_one_in_flight_take_one_round_trip() {
    let place = Place::new(2).await;
    let holder = place.inbox().await;
    let (proxy, options) = proxy(&place).await;
    let pool = pool_at(options, 1).await;
    let mut held = holder.store().begin().await.unwrap();
    assert!(holder.try_claim(&mut held, id("held")).await.unwrap().is_new());
    for (wait, prepared) in [
        (WaitPolicy::Wait, true),
        (WaitPolicy::Wait, false),
        (WaitPolicy::DontWait, true),
        (WaitPolicy::AtMost(Duration::from_millis(20)), true),
    ] {
        let store = PostgresInbox::builder(pool.clone())
            .wait(wait)
            .prepared_statements(prepared)
            .build()
            .unwrap();
        let inbox = Inbox::new(store, "billing").unwrap();
        let mut tx = pool.begin().await.unwrap();
        let name = format!("{wait:?}{prepared}");
        for warm_up in ["1", "1"] {
            let _ = inbox.try_claim(&mut tx, id(format!("{name}{warm_up}"))).await.unwrap();
        }
        proxy.round_trips();
        assert!(inbox.try_claim(&mut tx, id(format!("{name}2"))).await.unwrap().is_new());
        assert_eq!(proxy.round_trips(), 1, "{name}, new");
        assert!(
            inbox
                .try_claim(&mut tx, id(format!("{name}2")))
                .await
                .unwrap()
                .is_duplicate()
        );
        assert_eq!(
            proxy.round_trips(),
            if wait == WaitPolicy::Wait { 2 } else { 1 },
            "{name}, duplicate"
        );
        if wait != WaitPolicy::Wait {
            assert!(inbox.try_claim(&mut tx, id("held")).await.unwrap().is_in_flight());
            assert_eq!(proxy.round_trips(), 1, "{name}, in flight");
        }
        let batch = ids(&name, 110);
        assert!(
            inbox
                .try_claim_batch(&mut tx, &batch[..50])
                .await
                .unwrap()
                .iter()
                .all(Result::is_ok)
        );
        proxy.round_trips();
        let claims = inbox.try_claim_batch(&mut tx, &batch[40..90]).await.unwrap();
        assert_eq!(
            claims.iter().filter(|claim| claim.as_ref().unwrap().is_new()).count(),
            40,
            "{name}"
        );
        assert_eq!(
            proxy.round_trips(),
            if wait == WaitPolicy::Wait { 2 } else { 1 },
            "{name}, mixed batch"
        );
        let claims = inbox.try_claim_batch(&mut tx, &batch[90..]).await.unwrap();
        assert!(claims.iter().all(|claim| claim.as_ref().unwrap().is_new()));
        assert_eq!(proxy.round_trips(), 1, "{name}, new batch");
        tx.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn a_unique_violation_elsewhere_in_the_table_is_an_error_that_names_it_and_no_duplicate() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    place
        .sql("ALTER TABLE inbox_events ADD extra text DEFAULT 'same'; CREATE UNIQUE INDEX one_extra ON inbox_events (extra)")
        .await;
    let mut tx = place.pool.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    let error = inbox.try_claim(&mut tx, id("b")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("one_extra"), "{error}");
}

#[tokio::test]
async fn a_row_that_a_trigger_diverts_is_an_error_and_no_duplicate() {
    for wait in [WaitPolicy::Wait, WaitPolicy::DontWait] {
        let place = Place::new(2).await;
        let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
        place
            .sql(
                "CREATE FUNCTION divert() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER \
                 divert BEFORE INSERT ON inbox_events FOR EACH ROW EXECUTE FUNCTION divert()",
            )
            .await;
        let mut tx = place.pool.begin().await.unwrap();
        let error = inbox.try_claim(&mut tx, id("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
        let error = inbox.try_claim_batch(&mut tx, &ids("b", 3)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
        assert!(error.to_string().contains("trigger"), "{error}");
    }
}

#[tokio::test]
async fn groups_and_ids_that_differ_little_are_different_and_a_padding_column_is_refused() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let mut tx = place.pool.begin().await.unwrap();
    let long = "x".repeat(79);
    for name in [
        "x",
        "x ",
        " x",
        "X",
        &format!("{long}a"),
        &format!("{long}b"),
        "\u{e9}",
        "e\u{301}",
    ] {
        assert!(inbox.try_claim(&mut tx, id(name)).await.unwrap().is_new(), "{name:?}");
        let other = inbox.for_group(name).unwrap();
        assert!(other.try_claim(&mut tx, id("x")).await.unwrap().is_new(), "{name:?}");
    }
    place
        .sql(
            "CREATE TABLE padded (event_id uuid, consumer_group char(20), processed_at timestamptz, PRIMARY KEY \
             (event_id, consumer_group))",
        )
        .await;
    let padded = PostgresInbox::builder(place.pool.clone())
        .table("padded")
        .build()
        .unwrap();
    let padded = Inbox::new(padded, "x").unwrap();
    let error = padded.try_claim(&mut tx, id("x")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
    assert!(error.to_string().contains("character"), "{error}");
    assert!(
        inbox.try_claim(&mut tx, id("after")).await.unwrap().is_new(),
        "the transaction works on"
    );
}

#[tokio::test]
async fn another_payload_is_found_out_singly_and_in_batches() {
    for (wait, prepared) in [
        (WaitPolicy::Wait, true),
        (WaitPolicy::Wait, false),
        (WaitPolicy::DontWait, true),
    ] {
        let place = Place::new(2).await;
        let inbox = place
            .inbox_with(|builder| builder.wait(wait).prepared_statements(prepared))
            .await;
        let mut tx = place.pool.begin().await.unwrap();
        assert!(
            inbox
                .try_claim(&mut tx, id("a").with_payload("A"))
                .await
                .unwrap()
                .is_new()
        );
        let batch: Vec<Delivery> = vec![id("b").with_payload("B"), id("c").into(), id("a").into()];
        let claims = inbox.try_claim_batch(&mut tx, &batch).await.unwrap();
        assert!(claims[0].as_ref().unwrap().is_new() && claims[1].as_ref().unwrap().is_new());
        assert!(claims[2].as_ref().unwrap().is_duplicate());
        let again: Vec<Delivery> = ["a", "b", "c"].map(|name| id(name).with_payload("else")).to_vec();
        let claims = inbox.try_claim_batch(&mut tx, &again).await.unwrap();
        for claim in &claims[..2] {
            assert_eq!(claim.as_ref().unwrap_err().kind(), ErrorKind::PayloadMismatch);
        }
        assert!(claims[2].as_ref().unwrap().is_duplicate());
        let error = inbox.try_claim(&mut tx, again[0]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
    }
}

#[tokio::test]
async fn batches_of_50_000_answer_in_the_order_asked_and_take_a_repeated_id_once() {
    for (wait, prepared) in [
        (WaitPolicy::Wait, true),
        (WaitPolicy::Wait, false),
        (WaitPolicy::DontWait, true),
    ] {
        let place = Place::new(2).await;
        let inbox = place
            .inbox_with(|builder| builder.wait(wait).prepared_statements(prepared))
            .await;
        let mut batch = ids("m", 50_000);
        let mut tx = place.pool.begin().await.unwrap();
        // Every third is there before.
        let before: Vec<Delivery> = batch.iter().copied().step_by(3).collect();
        assert_eq!(
            inbox.try_claim_batch(&mut tx, &before).await.unwrap().len(),
            before.len()
        );
        batch.extend_from_within(..100);
        let claims = inbox.try_claim_batch(&mut tx, &batch).await.unwrap();
        assert_eq!(claims.len(), batch.len());
        for (index, claim) in claims.iter().enumerate() {
            let new = claim.as_ref().unwrap().is_new();
            assert_eq!(new, index < 50_000 && index % 3 != 0, "{index}");
        }
        tx.commit().await.unwrap();
        assert_eq!(place.records().await, 50_000);
        assert!(
            inbox
                .try_claim_batch(&mut place.pool.begin().await.unwrap(), &[])
                .await
                .unwrap()
                .is_empty()
        );
    }
}

#[tokio::test]
async fn batches_in_opposite_orders_do_not_deadlock_fifty_times_over() {
    let place = Place::new(4).await;
    let inbox = place.inbox().await;
    for round in 0..50 {
        let forward = ids(&format!("r{round}-"), 1_000);
        let backward: Vec<Delivery> = forward.iter().rev().copied().collect();
        let claim = |batch: Vec<Delivery>| {
            let (inbox, pool) = (inbox.clone(), place.pool.clone());
            tokio::spawn(async move {
                let mut tx = pool.begin().await.unwrap();
                let claims = inbox.try_claim_batch(&mut tx, &batch).await.unwrap();
                tx.commit().await.unwrap();
                claims
                    .into_iter()
                    .filter(|claim| claim.as_ref().unwrap().is_new())
                    .count()
            })
        };
        let (one, other) = (claim(forward), claim(backward));
        assert_eq!(one.await.unwrap() + other.await.unwrap(), 1_000, "round {round}");
    }
}

#[tokio::test]
async fn each_of_200_keys_that_64_tasks_claim_on_8_connections_takes_effect_once() {
    for wait in [
        WaitPolicy::Wait,
        WaitPolicy::DontWait,
        WaitPolicy::AtMost(Duration::from_millis(5)),
    ] {
        let place = Place::new(8).await;
        let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
        let tasks: Vec<_> = (0..64)
            .map(|task| {
                let inbox = inbox.clone();
                tokio::spawn(async move {
                    for step in 0..50 {
                        let name = format!("k{}", (task * 37 + step * 11) % 200);
                        loop {
                            let name = &name;
                            let outcome = inbox
                                .process(id(name), async move |tx| {
                                    sqlx::query("INSERT INTO effect VALUES ($1)")
                                        .bind(name)
                                        .execute(&mut **tx)
                                        .await?;
                                    Ok::<_, sqlx::Error>(())
                                })
                                .await
                                .unwrap();
                            if outcome.may_acknowledge() {
                                break;
                            }
                            tokio::task::yield_now().await;
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(place.effects().await, 200, "{wait:?}");
        assert_eq!(place.number("SELECT count(DISTINCT id) FROM effect").await, 200);
    }
}

#[tokio::test]
async fn at_every_isolation_level_the_answer_is_right_or_a_retryable_error() {
    for level in ["read committed", "repeatable read", "serializable"] {
        for wait in [
            WaitPolicy::Wait,
            WaitPolicy::DontWait,
            WaitPolicy::AtMost(Duration::from_secs(5)),
        ] {
            let place = Place::new(4).await;
            let inbox = place.inbox_with(|builder| builder.wait(wait)).await;
            let begin = || {
                place
                    .pool
                    .begin_with(AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {level}")))
            };
            let mut old = begin().await.unwrap();
            raw_sql("SELECT 1 FROM effect").execute(&mut *old).await.unwrap(); // takes its snapshot
            let mut winner = begin().await.unwrap();
            assert!(inbox.try_claim(&mut winner, id("a")).await.unwrap().is_new());
            winner.commit().await.unwrap();
            match inbox.try_claim(&mut old, id("a")).await {
                Ok(claim) => assert!(
                    level == "read committed" && claim.is_duplicate(),
                    "{level} {wait:?}: {claim:?}"
                ),
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Conflict, "{level} {wait:?}: {error}");
                    assert!(level != "read committed" && error.is_retryable());
                }
            }
            drop(old);
            let mut again = begin().await.unwrap();
            assert!(inbox.try_claim(&mut again, id("a")).await.unwrap().is_duplicate());
        }
    }
}

#[tokio::test]
async fn a_claim_in_a_transaction_that_had_failed_says_so() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let fresh = Inbox::new(PostgresInbox::new(place.pool.clone()), "billing").unwrap();
    for inbox in [&inbox, &fresh] {
        let mut tx = place.pool.begin().await.unwrap();
        raw_sql("SELECT 1 / 0").execute(&mut *tx).await.unwrap_err();
        let error = inbox.try_claim(&mut tx, id("a")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransactionEnded, "{error}");
        assert!(!error.is_retryable() && error.to_string().contains("25P02"), "{error}");
    }
}

#[tokio::test]
async fn a_deadlock_in_the_handler_is_run_again() {
    let place = Place::new(4).await;
    let inbox = place.inbox().await;
    place
        .sql("CREATE TABLE account (n int PRIMARY KEY, v int); INSERT INTO account VALUES (1, 0), (2, 0)")
        .await;
    let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(2));
    let tasks = [(1, 2), (2, 1)].map(|(first, second)| {
        let (inbox, barrier) = (inbox.clone(), std::sync::Arc::clone(&barrier));
        tokio::spawn(async move {
            let met = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
            inbox
                .process(id(format!("from {first}")), async move |tx| {
                    for n in [first, second] {
                        sqlx::query("UPDATE account SET v = v + 1 WHERE n = $1")
                            .bind(n)
                            .execute(&mut **tx)
                            .await?;
                        if !met.swap(true, std::sync::atomic::Ordering::SeqCst) {
                            barrier.wait().await;
                        }
                    }
                    Ok::<_, sqlx::Error>(())
                })
                .await
                .unwrap()
        })
    });
    for task in tasks {
        assert_eq!(task.await.unwrap(), Outcome::Processed(()));
    }
    assert_eq!(place.number("SELECT sum(v) FROM account").await, 4);
}

#[tokio::test]
async fn the_store_s_own_transaction_claims_for_several_groups() {
    let place = Place::new(2).await;
    let store = place.inbox().await.store().clone();
    let mut tx = store.begin().await.unwrap();
    for name in ["one", "two"] {
        assert!(
            store
                .try_claim(&mut tx, &group(name), id("a").into())
                .await
                .unwrap()
                .is_new()
        );
    }
    store.commit(tx).await.unwrap();
    let rows = raw_sql("SELECT consumer_group FROM inbox_events ORDER BY 1")
        .fetch_all(&place.pool)
        .await
        .unwrap();
    assert_eq!(
        rows.iter().map(|row| row.get::<String, _>(0)).collect::<Vec<_>>(),
        ["one", "two"]
    );
}
