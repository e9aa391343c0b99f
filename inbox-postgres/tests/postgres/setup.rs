//! Set-up and check.

use inbox_core::{ErrorKind, Health, Inbox, InboxStore, Severity, Transactions, Upkeep};
use inbox_postgres::{PostgresInbox, sqlx};
use sqlx::{AssertSqlSafe, raw_sql};

use crate::place::{Place, group, id, pool_at};

const NATS_OUTBOX: &str = "CREATE TABLE inbox_events (id bigserial PRIMARY KEY, event_id uuid NOT NULL, consumer_group text \
                           NOT NULL, processed_at timestamptz NOT NULL DEFAULT now(), UNIQUE (event_id, consumer_group))";

fn faults(health: &Health) -> Vec<&str> {
    health
        .findings()
        .iter()
        .filter(|finding| finding.severity == Severity::Fault)
        .map(|finding| finding.what.as_str())
        .collect()
}

#[tokio::test]
async fn twelve_set_ups_at_once_on_an_empty_database_all_succeed_five_times_over() {
    for _ in 0..5 {
        let place = Place::new(12).await;
        let schema = format!("{}_made", place.schema);
        let tasks: Vec<_> = (0..12)
            .map(|_| {
                let store = PostgresInbox::builder(place.pool.clone())
                    .schema(&schema)
                    .build()
                    .unwrap();
                tokio::spawn(async move { store.setup().await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let made = format!("SELECT count(*) FROM pg_class WHERE relnamespace = '{schema}'::regnamespace");
        assert_eq!(
            place.number(&made).await,
            6,
            "two tables, each with its key and an index; no sequence"
        );
        place.sql(&format!("DROP SCHEMA {schema} CASCADE")).await;
    }
}

#[tokio::test]
async fn the_printed_sql_makes_what_set_up_makes() {
    let place = Place::new(2).await;
    let store = PostgresInbox::builder(place.pool.clone())
        .schema(&place.schema)
        .build()
        .unwrap();
    place.sql(&store.setup_sql()).await;
    let health = store.check().await.unwrap();
    assert!(health.findings().is_empty(), "{health}");
    store.setup().await.unwrap();
}

#[tokio::test]
async fn a_role_that_may_not_create_is_told_the_sql_and_needs_no_right_where_all_is_there() {
    let place = Place::new(2).await;
    let role = format!("r_{}", place.schema);
    place
        .sql(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA {} TO {role}",
            place.schema
        ))
        .await;
    let options = (*place.pool.connect_options()).clone().username(&role).password("x");
    let store = PostgresInbox::new(pool_at(options, 2).await);
    let error = store.setup().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains(&store.setup_sql()), "{error}");
    place.inbox().await;
    store.setup().await.unwrap();
    let health = store.check().await.unwrap();
    assert!(faults(&health)[0].contains(&role), "{health}");
    let inbox = Inbox::new(store, "billing").unwrap();
    let mut tx = inbox.store().begin().await.unwrap();
    assert_eq!(
        inbox.try_claim(&mut tx, id("a")).await.unwrap_err().kind(),
        ErrorKind::Denied
    );
    drop(tx);
    place
        .sql(&format!("GRANT SELECT, INSERT ON inbox_events TO {role}"))
        .await;
    let health = inbox.check().await.unwrap();
    assert!(health.is_sound() && health.findings().len() == 2, "{health}");
    assert!(health.to_string().contains("inbox_events_dead_letters"), "{health}");
    let mut tx = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new());
    drop(tx);
    place.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn a_missing_table_is_named_with_its_remedy_and_the_transaction_works_on() {
    let place = Place::new(2).await;
    let inbox = Inbox::new(PostgresInbox::new(place.pool.clone()), "billing").unwrap();
    let mut tx = place.pool.begin().await.unwrap();
    let error = inbox.try_claim(&mut tx, id("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(
        error.to_string().contains("inbox_events") && error.to_string().contains("setup"),
        "{error}"
    );
    assert_eq!(faults(&inbox.check().await.unwrap()).len(), 1);
    inbox.setup().await.unwrap();
    assert!(
        inbox.try_claim(&mut tx, id("a")).await.unwrap().is_new(),
        "the same store, after set-up"
    );
}

#[tokio::test]
async fn check_finds_what_breaks_the_guarantee_and_says_what_it_means() {
    for (alter, word) in [
        (
            "ALTER TABLE inbox_events DROP CONSTRAINT inbox_events_pkey",
            "unique key",
        ),
        (
            "ALTER TABLE inbox_events DROP CONSTRAINT inbox_events_pkey; CREATE UNIQUE INDEX ON inbox_events (event_id)",
            "unique key",
        ),
        (
            "ALTER TABLE inbox_events DROP CONSTRAINT inbox_events_pkey; CREATE UNIQUE INDEX ON inbox_events (event_id, \
             consumer_group) WHERE consumer_group <> 'x'",
            "unique key",
        ),
        (
            "ALTER TABLE inbox_events DROP CONSTRAINT inbox_events_pkey; ALTER TABLE inbox_events ADD UNIQUE (event_id, \
             consumer_group) DEFERRABLE",
            "unique key",
        ),
        ("COMMENT ON TABLE inbox_events IS 'inbox-pattern schema 0'", "version 0"),
        (
            "COMMENT ON TABLE inbox_events IS 'inbox-pattern schema 99'",
            "version 99",
        ),
        ("ALTER TABLE inbox_events SET UNLOGGED", "unlogged"),
        (
            "ALTER TABLE inbox_events ALTER consumer_group TYPE char(300)",
            "character",
        ),
        ("ALTER TABLE inbox_events ADD more int NOT NULL", "more"),
        ("ALTER TABLE inbox_events DROP COLUMN processed_at", "processed_at"),
        (
            "CREATE RULE away AS ON INSERT TO inbox_events DO INSTEAD NOTHING",
            "away",
        ),
    ] {
        let place = Place::new(1).await;
        let inbox = place.inbox().await;
        place.sql(alter).await;
        let health = inbox.check().await.unwrap();
        assert!(
            faults(&health).iter().any(|what| what.contains(word)),
            "{alter}: {health}"
        );
    }
    for (alter, word) in [
        ("DROP INDEX inbox_events_consumer_group_date_trunc_idx", "purging"),
        ("ALTER TABLE inbox_events DROP COLUMN fingerprint", "fingerprints"),
        ("CREATE UNIQUE INDEX more ON inbox_events (processed_at)", "more"),
        ("ALTER TABLE inbox_events ENABLE ROW LEVEL SECURITY", "row level"),
        (
            "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER diverts BEFORE \
             INSERT ON inbox_events FOR EACH ROW EXECUTE FUNCTION f()",
            "diverts",
        ),
    ] {
        let place = Place::new(1).await;
        let inbox = place.inbox().await;
        place.sql(alter).await;
        let health = inbox.check().await.unwrap();
        assert!(health.is_sound(), "{alter}: {health}");
        assert!(
            health.findings().iter().any(|found| found.what.contains(word)),
            "{alter}: {health}"
        );
    }
}

#[tokio::test]
async fn check_finds_settings_of_the_server_that_lose_commits() {
    let place = Place::new(1).await;
    place.inbox().await;
    for (setting, value, fault) in [
        ("synchronous_commit", "off", true),
        ("synchronous_commit", "local", false),
        ("default_transaction_read_only", "on", true),
    ] {
        let options = (*place.pool.connect_options()).clone().options([(setting, value)]);
        let store = PostgresInbox::new(pool_at(options, 1).await);
        let health = store.check().await.unwrap();
        assert_eq!(health.is_sound(), !fault, "{health}");
        assert!(!health.findings().is_empty());
    }
}

#[tokio::test]
async fn a_table_of_a_newer_program_or_of_another_kind_is_refused() {
    let place = Place::new(1).await;
    let inbox = place.inbox().await;
    place
        .sql("COMMENT ON TABLE inbox_events IS 'inbox-pattern schema 99'")
        .await;
    assert_eq!(inbox.setup().await.unwrap_err().kind(), ErrorKind::Schema);
    let store = PostgresInbox::builder(place.pool.clone())
        .table("effect")
        .build()
        .unwrap();
    let error = store.setup().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("event_id"), "{error}");
}

#[tokio::test]
async fn a_nats_outbox_table_is_used_as_it_stands_beside_nats_outbox() {
    let place = Place::new(2).await;
    place.sql(NATS_OUTBOX).await;
    let columns = "SELECT string_agg(attname, ' ' ORDER BY attnum) FROM pg_attribute WHERE attrelid = \
                   'inbox_events'::regclass AND attnum > 0";
    let before = place.text(columns).await;
    let inbox = place.inbox().await;
    assert_eq!(place.text(columns).await, before);
    let health = inbox.check().await.unwrap();
    assert!(health.is_sound() && health.findings().len() == 2, "{health}");
    let theirs = async |name: &str| {
        let sql = format!(
            "INSERT INTO inbox_events (event_id, consumer_group) VALUES ('{}', 'billing') ON CONFLICT (event_id, \
             consumer_group) DO NOTHING RETURNING id",
            id(name)
        );
        raw_sql(AssertSqlSafe(sql))
            .fetch_optional(&place.pool)
            .await
            .unwrap()
            .is_some()
    };
    assert!(theirs("first theirs").await);
    let mut tx = inbox.store().begin().await.unwrap();
    let claim = inbox.try_claim(&mut tx, id("first theirs")).await.unwrap();
    let inbox_core::Claim::Duplicate(processed) = claim else {
        panic!("{claim:?}")
    };
    assert!(processed.at.is_some());
    assert!(inbox.try_claim(&mut tx, id("first ours")).await.unwrap().is_new());
    let error = inbox.try_claim(&mut tx, id("x").with_payload("p")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    inbox.store().commit(tx).await.unwrap();
    assert!(!theirs("first ours").await);
    assert!(inbox.find(id("first ours")).await.unwrap().is_some());
    assert!(inbox.forget(id("first ours")).await.unwrap());
    assert!(theirs("first ours").await);
}

#[tokio::test]
async fn what_brings_a_missing_column_is_the_remedy_that_check_prints() {
    let place = Place::new(2).await;
    place.sql(NATS_OUTBOX).await;
    let store = PostgresInbox::new(place.pool.clone());
    store.setup().await.unwrap(); // makes the table of dead letters and leaves this one alone
    for finding in store.check().await.unwrap().findings() {
        let sql = finding.remedy.split(", if").next().unwrap();
        place.sql(sql).await;
    }
    let health = store.check().await.unwrap();
    assert!(health.findings().is_empty(), "{health}");
    let mut tx = store.begin().await.unwrap();
    assert!(
        store
            .try_claim(&mut tx, &group("g"), id("x").with_payload("p"))
            .await
            .unwrap()
            .is_new()
    );
}
