//! Through PgBouncer in transaction mode.

use inbox_core::{Inbox, Outcome, Upkeep, WaitPolicy};
use inbox_postgres::{PostgresInbox, sqlx};
use inbox_test_servers::PgBouncer;
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, raw_sql};

use crate::place::{Place, id, ids};

/// A PgBouncer before the shared server, and a pool through it. The search path cannot go with the connection there, so
/// stores and statements name the schema.
async fn through_pgbouncer(place: &Place) -> (PgBouncer, sqlx::PgPool) {
    let options = place.pool.connect_options();
    let bouncer = PgBouncer::before(options.get_host(), options.get_port(), 2, None);
    let pool = PgPoolOptions::new()
        .max_connections(12)
        .connect(&bouncer.url())
        .await
        .unwrap();
    (bouncer, pool)
}

#[tokio::test]
async fn six_workers_with_fifty_claims_each_meet_no_failure_through_pgbouncer() {
    let place = Place::new(2).await;
    let (_bouncer, pool) = through_pgbouncer(&place).await;
    for wait in [WaitPolicy::Wait, WaitPolicy::DontWait] {
        let builder = PostgresInbox::builder(pool.clone())
            .schema(&place.schema)
            .wait(wait)
            .prepared_statements(false);
        let inbox = Inbox::new(builder.build().unwrap(), "billing").unwrap();
        inbox.setup().await.unwrap();
        let workers: Vec<_> = (0..6)
            .map(|worker| {
                let (inbox, schema) = (inbox.clone(), place.schema.clone());
                tokio::spawn(async move {
                    for number in 0..50 {
                        let name = format!("{wait:?}{worker}-{number}");
                        let sql = format!("INSERT INTO {schema}.effect VALUES ('{name}')");
                        for again in [false, true] {
                            let sql = sql.clone();
                            let outcome = inbox
                                .process(id(&name), async move |tx| {
                                    raw_sql(AssertSqlSafe(sql)).execute(&mut **tx).await.map(drop)
                                })
                                .await
                                .unwrap();
                            assert_eq!(matches!(outcome, Outcome::Duplicate(_)), again);
                        }
                        let outcomes = inbox
                            .process_batch(
                                &ids(&format!("{name}/"), 3),
                                |delivery| *delivery,
                                async |_tx, _new| Ok::<_, sqlx::Error>(()),
                            )
                            .await;
                        assert!(
                            outcomes
                                .iter()
                                .all(|outcome| *outcome.as_ref().unwrap() == Outcome::Processed(()))
                        );
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.await.unwrap();
        }
        assert!(inbox.find(id(format!("{wait:?}0-0"))).await.unwrap().is_some());
        assert!(inbox.forget(id(format!("{wait:?}0-0"))).await.unwrap());
        assert_eq!(inbox.purge(std::time::Duration::ZERO).await.unwrap(), 6 * 50 * 4 - 1);
    }
    assert_eq!(place.effects().await, 600);
}

#[tokio::test]
async fn a_set_up_that_failed_through_pgbouncer_strands_no_lock() {
    let place = Place::new(2).await;
    let (_bouncer, pool) = through_pgbouncer(&place).await;
    let builder = PostgresInbox::builder(pool)
        .schema(&place.schema)
        .prepared_statements(false);
    let store = builder.build().unwrap();
    place.sql("CREATE TYPE inbox_events AS (n int)").await; // in the way of the table
    store.setup().await.unwrap_err();
    place.sql("DROP TYPE inbox_events").await;
    tokio::time::timeout(std::time::Duration::from_secs(10), store.setup())
        .await
        .unwrap()
        .unwrap();
    assert!(store.check().await.unwrap().is_sound());
}
