//! A file, a database in memory and a connection of the caller's all serve, each with the settings that it needs and no
//! other; and the synchronous inbox in the caller's own transaction.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use common::{Place, handle, id};
use inbox_core::{BoxError, ConsumerGroup, Delivery, ErrorKind, Inbox, Outcome, Transactions};
use inbox_sqlite::rusqlite::{Connection, TransactionBehavior};
use inbox_sqlite::{SqliteInbox, SqliteTable};

fn pragma(connection: &Connection, name: &str) -> String {
    connection
        .query_row(&format!("PRAGMA {name}"), [], |row| {
            row.get::<_, i64>(0)
                .map(|number| number.to_string())
                .or_else(|_| row.get(0))
        })
        .unwrap()
}

#[tokio::test]
async fn a_file_is_in_wal_mode_and_flushed_at_each_commit() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let tx = inbox.store().begin().await.unwrap();
    assert_eq!(pragma(&tx, "journal_mode"), "wal");
    assert_eq!(pragma(&tx, "synchronous"), "2");
}

#[tokio::test]
async fn what_the_caller_set_stays_and_what_is_too_weak_is_raised() {
    let place = Place::new();
    for (set, expected) in [("OFF", "2"), ("NORMAL", "2"), ("FULL", "2"), ("EXTRA", "3")] {
        for foreign_keys in [false, true] {
            let connection = place.connect();
            connection.pragma_update(None, "synchronous", set).unwrap();
            connection.pragma_update(None, "foreign_keys", foreign_keys).unwrap();
            let store = SqliteInbox::from_connection(connection).await.unwrap();
            let tx = store.begin().await.unwrap();
            assert_eq!(pragma(&tx, "synchronous"), expected, "{set}");
            assert_eq!(pragma(&tx, "foreign_keys"), u8::from(foreign_keys).to_string());
        }
    }
}

#[tokio::test]
async fn a_database_in_memory_serves_and_says_what_it_is() {
    let inbox = Inbox::new(SqliteInbox::open(":memory:").await.unwrap(), "group").unwrap();
    inbox.setup().await.unwrap();
    let handler = async |_tx: &mut inbox_sqlite::SqliteTx| Ok::<_, BoxError>(());
    assert!(matches!(
        inbox.process(id("a"), handler).await,
        Ok(Outcome::Processed(()))
    ));
    assert!(matches!(
        inbox.process(id("a"), handler).await,
        Ok(Outcome::Duplicate(_))
    ));
    assert!(inbox.find(id("a")).await.unwrap().is_some());
    let health = inbox.check().await.unwrap();
    assert!(
        health.is_sound() && health.to_string().contains("in memory"),
        "{health}"
    );
}

#[tokio::test]
async fn a_connection_of_the_callers_serves() {
    let place = Place::new();
    let connection = place.connect();
    connection.execute_batch("CREATE TEMP TABLE mine (x)").unwrap();
    let inbox = Inbox::new(SqliteInbox::from_connection(connection).await.unwrap(), "group").unwrap();
    inbox.setup().await.unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
    // It is the caller's very connection: its temporary table is there.
    let tx = inbox.store().begin().await.unwrap();
    tx.execute_batch("INSERT INTO mine VALUES (1)").unwrap();
}

#[tokio::test]
async fn a_connection_with_an_open_transaction_is_refused() {
    let connection = Connection::open_in_memory().unwrap();
    connection.execute_batch("BEGIN").unwrap();
    let error = SqliteInbox::from_connection(connection).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[test]
fn the_synchronous_inbox_needs_no_runtime() {
    let place = Place::new();
    let mut connection = place.connect();
    let table = SqliteTable::default();
    let group = ConsumerGroup::new("group").unwrap();
    table.setup(&mut connection).unwrap();
    table.setup(&mut connection).unwrap();

    // Rolled back: undone.
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    assert!(table.try_claim_in(&tx, &group, id("a")).unwrap().is_new());
    assert!(table.try_claim_in(&tx, &group, id("a")).unwrap().is_duplicate());
    drop(tx);
    assert_eq!(place.records(), 0);

    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    assert!(table.try_claim_in(&tx, &group, id("a")).unwrap().is_new());
    tx.execute("INSERT INTO effects VALUES ('a')", []).unwrap();
    tx.commit().unwrap();

    let deliveries: Vec<Delivery> = ["b", "a", "b"].map(|text| id(text).into()).to_vec();
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    let claims = table.try_claim_batch_in(&tx, &group, &deliveries).unwrap();
    let new: Vec<bool> = claims.iter().map(|claim| claim.as_ref().unwrap().is_new()).collect();
    assert_eq!(new, [true, false, false]);
    tx.commit().unwrap();
    assert_eq!((place.records(), place.effects("a")), (2, 1));
}

#[tokio::test]
async fn another_payload_under_the_same_id_is_found_out_on_every_path() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let (first, other) = (id("a").with_payload("first"), id("a").with_payload("other"));
    let handler = async |_tx: &mut inbox_sqlite::SqliteTx| Ok::<_, BoxError>(());
    assert!(matches!(
        inbox.process(first, handler).await,
        Ok(Outcome::Processed(()))
    ));
    assert!(matches!(inbox.process(first, handler).await, Ok(Outcome::Duplicate(_))));
    // Off by default: without a fingerprint nothing is compared.
    assert!(matches!(
        inbox.process(id("a"), handler).await,
        Ok(Outcome::Duplicate(_))
    ));
    assert_eq!(
        inbox.process(other, handler).await.unwrap_err().kind(),
        ErrorKind::PayloadMismatch
    );

    let batch = [other, id("b").into()];
    let outcomes = inbox
        .process_batch(&batch, |delivery| *delivery, async |_tx, _new| Ok::<_, BoxError>(()))
        .await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().kind(), ErrorKind::PayloadMismatch);
    assert!(matches!(outcomes[1], Ok(Outcome::Processed(()))));

    let mut connection = place.connect();
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    let error = inbox.store().try_claim_in(&tx, inbox.group(), other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
    let claims = inbox.store().try_claim_batch_in(&tx, inbox.group(), &batch).unwrap();
    assert_eq!(claims[0].as_ref().unwrap_err().kind(), ErrorKind::PayloadMismatch);
    assert!(claims[1].as_ref().unwrap().is_duplicate());
    drop(tx);

    let record = inbox.find(id("a")).await.unwrap().unwrap();
    assert_eq!(record.fingerprint, first.fingerprint());
}
