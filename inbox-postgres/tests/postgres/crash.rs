//! Consumers and servers that die.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use inbox_core::{Claim, Inbox, RetryPolicy, Transactions};
use inbox_postgres::{PostgresInbox, sqlx};
use inbox_test_servers::{Postgres, Stop};

use crate::place::{Place, eventually, id, options, pool_at};

#[tokio::test]
async fn after_a_terminated_backend_the_next_claim_is_new_at_once() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let mut tx = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    let (pid,): (i32,) = sqlx::query_as("SELECT pg_backend_pid()")
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    sqlx::query("SELECT pg_terminate_backend($1, 10000)")
        .bind(pid)
        .execute(&place.pool)
        .await
        .unwrap();
    let began = Instant::now();
    let mut other = place.pool.begin().await.unwrap();
    assert_eq!(inbox.try_claim(&mut other, id("a")).await.unwrap(), Claim::New);
    assert!(began.elapsed() < Duration::from_secs(5));
    let error = inbox.store().commit(tx).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    assert_eq!(error.kind(), inbox_core::ErrorKind::Unavailable, "no commit was sent");
}

/// Not a test by itself: the next one runs this binary again with it, and kills that process.
#[tokio::test]
async fn child_that_is_killed_between_claim_and_commit() {
    let Ok(told) = std::env::var("INBOX_TEST_CHILD") else {
        return;
    };
    let (url, schema) = told.split_once(' ').unwrap();
    let inbox = Inbox::new(PostgresInbox::new(pool_at(options(url, schema), 1).await), "billing").unwrap();
    let mut tx = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    sqlx::query("INSERT INTO effect VALUES ('of the dead')")
        .execute(&mut *tx)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
}

#[tokio::test]
async fn after_a_killed_process_the_next_claim_is_new_at_once() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash::child_that_is_killed_between_claim_and_commit"])
        .env(
            "INBOX_TEST_CHILD",
            format!("{} {}", inbox_test_servers::postgres_url(), place.schema),
        )
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let doubtful = place
        .inbox_with(|builder| builder.wait(inbox_core::WaitPolicy::DontWait))
        .await;
    eventually("the child has claimed", async || {
        let mut tx = place.pool.begin().await.unwrap();
        let claim = doubtful.try_claim(&mut tx, id("a")).await.unwrap();
        tx.rollback().await.unwrap();
        claim.is_in_flight()
    })
    .await;
    child.kill().unwrap(); // SIGKILL
    child.wait().unwrap();
    let began = Instant::now();
    let mut tx = place.pool.begin().await.unwrap();
    assert_eq!(inbox.try_claim(&mut tx, id("a")).await.unwrap(), Claim::New);
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_eq!(place.effects().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_crashes_under_load_gives_retryable_errors_and_keeps_every_acknowledged_effect_once() {
    let mut server = Postgres::start();
    let place = Place::at(&server.url(), 8).await;
    let inbox = place.inbox().await.with_retry(RetryPolicy::never());
    let stop = Arc::new(AtomicBool::new(false));
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let (inbox, stop) = (inbox.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let (mut acknowledged, mut errors) = (Vec::new(), 0);
                for number in 0.. {
                    if stop.load(Ordering::SeqCst) {
                        break;
                    }
                    let name = format!("{task}-{number}");
                    let name = &name;
                    // As a broker does: delivered again until it is acknowledged.
                    loop {
                        let outcome = inbox
                            .process(id(name), async move |tx| {
                                sqlx::query("INSERT INTO effect VALUES ($1)")
                                    .bind(name)
                                    .execute(&mut **tx)
                                    .await?;
                                Ok::<_, sqlx::Error>(())
                            })
                            .await;
                        match outcome {
                            Ok(outcome) if outcome.may_acknowledge() => break,
                            Ok(outcome) => panic!("{outcome:?}"),
                            Err(error) => {
                                assert!(error.is_retryable(), "{error:?}");
                                errors += 1;
                                tokio::time::sleep(Duration::from_millis(10)).await;
                            }
                        }
                    }
                    acknowledged.push(name.clone());
                }
                (acknowledged, errors)
            })
        })
        .collect();
    for _ in 0..2 {
        let before = place_effects(&server, &place).await;
        eventually("there is load", async || {
            place_effects(&server, &place).await > before + 100
        })
        .await;
        tokio::task::block_in_place(|| {
            server.stop(Stop::Immediate);
            server.start_again();
        });
    }
    let before = place_effects(&server, &place).await;
    eventually("load goes on", async || {
        place_effects(&server, &place).await > before + 100
    })
    .await;
    stop.store(true, Ordering::SeqCst);
    let (mut acknowledged, mut errors) = (0, 0);
    for task in tasks {
        let (names, failed) = task.await.unwrap();
        errors += failed;
        for name in names {
            let (times,): (i64,) = sqlx::query_as("SELECT count(*) FROM effect WHERE id = $1")
                .bind(&name)
                .fetch_one(&place.pool)
                .await
                .unwrap();
            assert_eq!(times, 1, "{name}");
            acknowledged += 1;
        }
    }
    assert!(errors > 0, "the crashes were felt");
    assert_eq!(place.effects().await, acknowledged);
    assert_eq!(place.records().await, acknowledged);
}

/// On a connection of its own: those of the pool may be dead.
async fn place_effects(server: &Postgres, place: &Place) -> i64 {
    let pool = pool_at(options(&server.url(), &place.schema), 1).await;
    let (count,): (i64,) = sqlx::query_as("SELECT count(*) FROM effect")
        .fetch_one(&pool)
        .await
        .unwrap();
    pool.close().await;
    count
}
