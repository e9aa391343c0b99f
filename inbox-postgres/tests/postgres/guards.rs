//! Begin and commit: what is said to be stored is stored.

use std::time::Duration;

use inbox_core::{ErrorKind, Outcome, Transactions};
use inbox_postgres::sqlx;
use sqlx::{Executor, raw_sql};

use crate::place::{Place, eventually, id, pool_at, proxy};

#[tokio::test]
async fn a_handler_that_swallows_an_sql_error_is_not_acknowledged_and_nothing_is_stored() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let error = inbox
        .process(id("a"), async |tx| {
            sqlx::query("INSERT INTO effect VALUES ('lost')")
                .execute(&mut **tx)
                .await?;
            let _ = sqlx::query("SELECT 1 / 0").execute(&mut **tx).await;
            Ok::<_, sqlx::Error>(())
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransactionEnded, "{error}");
    assert_eq!((place.effects().await, place.records().await), (0, 0));
    let outcome = inbox
        .process(id("a"), async |_tx| Ok::<_, sqlx::Error>(()))
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()), "the redelivery claims again");
}

#[tokio::test]
async fn a_handler_that_ends_the_transaction_by_itself_is_found_out() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    for (name, sql) in [
        ("commit", "COMMIT"),
        ("rollback", "ROLLBACK"),
        ("commit and begin", "COMMIT; BEGIN"),
        ("rollback and begin", "ROLLBACK; BEGIN"),
        (
            "rollback, begin and an effect",
            "ROLLBACK; BEGIN; INSERT INTO effect VALUES ('lost')",
        ),
        ("chain", "ROLLBACK AND CHAIN"),
    ] {
        let error = inbox
            .process(id(name), async |tx| {
                // Long enough for the record's time to be set anew, which must not happen outside the transaction.
                tokio::time::sleep(Duration::from_millis(110)).await;
                tx.execute(raw_sql(sql)).await?;
                Ok::<_, sqlx::Error>(())
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransactionEnded, "{name}: {error}");
    }
    assert_eq!(place.effects().await, 0);
    // The connections are sound.
    for number in 0..4 {
        let outcome = inbox
            .process(id(format!("after {number}")), async |_tx| Ok::<_, sqlx::Error>(()))
            .await
            .unwrap();
        assert_eq!(outcome, Outcome::Processed(()));
    }
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_unknown_and_the_redelivery_a_duplicate() {
    let place = Place::new(2).await;
    place.inbox().await;
    let (proxy, options) = proxy(&place).await;
    let far = inbox_postgres::PostgresInbox::new(pool_at(options, 1).await);
    let far = inbox_core::Inbox::new(far, "billing")
        .unwrap()
        .with_retry(inbox_core::RetryPolicy::never());
    let once = || {
        far.process(id("a"), async |tx| {
            sqlx::query("INSERT INTO effect VALUES ('a')")
                .execute(&mut **tx)
                .await?;
            Ok::<_, sqlx::Error>(())
        })
    };
    proxy.cut_after_commit(true);
    let error = once().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    assert!(error.is_retryable());
    proxy.cut_after_commit(false);
    assert!(matches!(once().await.unwrap(), Outcome::Duplicate(_)));
    assert_eq!(place.effects().await, 1);
}

#[tokio::test]
async fn a_commit_that_a_deferred_constraint_refuses_is_an_error_and_rolled_back() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    place
        .sql("CREATE TABLE p (n int PRIMARY KEY); CREATE TABLE c (n int REFERENCES p DEFERRABLE INITIALLY DEFERRED)")
        .await;
    let error = inbox
        .process(id("a"), async |tx| {
            sqlx::query("INSERT INTO c VALUES (1)").execute(&mut **tx).await?;
            Ok::<_, sqlx::Error>(())
        })
        .await
        .unwrap_err();
    assert!(
        !error.is_retryable() && error.kind() != ErrorKind::OutcomeUnknown,
        "{error:?}"
    );
    assert_eq!(place.records().await, 0);
}

#[tokio::test]
async fn a_begin_that_is_dropped_at_any_poll_does_not_poison_the_next_borrower() {
    let place = Place::new(1).await;
    let watch = place.further(1).await;
    let inbox = place.inbox().await;
    for polls in 1..=8 {
        for pause in [0, 1] {
            let mut begin = Box::pin(inbox.store().begin());
            for _ in 0..polls {
                if poll_once(begin.as_mut()).await {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            drop(begin);
            let name = format!("{polls} {pause}");
            let mut tx = inbox.store().begin().await.unwrap();
            assert!(inbox.try_claim(&mut tx, id(&name)).await.unwrap().is_new());
            inbox.store().commit(tx).await.unwrap();
            // A statement by itself on the same connection is seen by others too.
            sqlx::query("INSERT INTO effect VALUES ($1)")
                .bind(&name)
                .execute(&place.pool)
                .await
                .unwrap();
            let row: (i64, i64) =
                sqlx::query_as("SELECT (SELECT count(*) FROM inbox_events), (SELECT count(*) FROM effect)")
                    .fetch_one(&watch)
                    .await
                    .unwrap();
            let done = i64::from((polls - 1) * 2) + i64::try_from(pause).unwrap() + 1;
            assert_eq!(row, (done, done), "{name}");
        }
    }
}

/// Polls once; whether it was ready.
async fn poll_once<F: Future + ?Sized>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|cx| std::task::Poll::Ready(future.as_mut().poll(cx).is_ready())).await
}

#[tokio::test]
async fn a_commit_dropped_at_any_poll_leaves_claim_and_effect_together() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    for polls in 1..=6 {
        let name = format!("{polls}");
        let mut tx = inbox.store().begin().await.unwrap();
        assert!(inbox.try_claim(&mut tx, id(&name)).await.unwrap().is_new());
        sqlx::query("INSERT INTO effect VALUES ($1)")
            .bind(&name)
            .execute(&mut *tx)
            .await
            .unwrap();
        let mut commit = inbox.store().commit(tx);
        for _ in 0..polls {
            if poll_once(commit.as_mut()).await {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(commit);
        let outcome = inbox
            .process(id(&name), async |tx| {
                sqlx::query("INSERT INTO effect VALUES ('again')")
                    .execute(&mut **tx)
                    .await?;
                Ok::<_, sqlx::Error>(())
            })
            .await
            .unwrap();
        assert!(outcome.may_acknowledge());
        eventually("one effect a claim", async || place.effects().await == i64::from(polls)).await;
        assert_eq!(place.records().await, i64::from(polls));
    }
}
