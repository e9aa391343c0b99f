//! Odd names of tables and schemas, and input that would be SQL.

use inbox_core::{ErrorKind, Inbox, Key, Purge, Upkeep, WaitPolicy};
use inbox_postgres::PostgresInbox;

use crate::place::{Place, group, id, ids};

#[tokio::test]
async fn odd_names_are_taken_as_they_are_and_nothing_can_be_injected() {
    let place = Place::new(2).await;
    let odd = [
        "Capitals",
        "with \"quotes\"",
        "dotted.name",
        "it's",
        "x\"; DROP TABLE effect; --",
        "$inbox0$; DROP TABLE effect; $1 {table} {tag}",
        "\\'; DROP TABLE effect; --",
        "\u{e9}\u{1f4e8} ",
        "select",
    ];
    for (index, name) in odd.into_iter().enumerate() {
        let schema = format!("{}{}", &place.schema[..20], name);
        for (wait, prepared) in [
            (WaitPolicy::Wait, true),
            (WaitPolicy::Wait, false),
            (WaitPolicy::DontWait, true),
        ] {
            let builder = PostgresInbox::builder(place.pool.clone()).schema(&schema).table(name);
            let store = builder.wait(wait).prepared_statements(prepared).build();
            if schema.len() > 63 {
                assert_eq!(store.unwrap_err().kind(), ErrorKind::InvalidInput);
                continue;
            }
            let store = store.unwrap();
            store.setup().await.unwrap();
            assert!(store.check().await.unwrap().is_sound());
            let inbox = Inbox::new(store.clone(), name.trim()).unwrap();
            let mut tx = place.pool.begin().await.unwrap();
            let message = format!("{name}{wait:?}{prepared}");
            assert!(inbox.try_claim(&mut tx, id(&message)).await.unwrap().is_new(), "{name}");
            assert!(
                inbox.try_claim(&mut tx, id(&message)).await.unwrap().is_duplicate(),
                "{name}"
            );
            assert!(
                inbox.try_claim_batch(&mut tx, &ids(&message, 2)).await.unwrap()[1]
                    .as_ref()
                    .unwrap()
                    .is_new()
            );
            tx.commit().await.unwrap();
            let key = Key::new(group(name.trim()), id(&message));
            assert!(store.find(&key).await.unwrap().is_some());
            assert!(store.forget(&key).await.unwrap());
            assert_eq!(
                store
                    .purge(&Purge::older_than(std::time::Duration::ZERO))
                    .await
                    .unwrap()
                    .removed,
                2,
                "{index}"
            );
        }
    }
    assert_eq!(place.effects().await, 0, "the table is still there");
}

#[tokio::test]
async fn names_that_cannot_be_are_refused_before_anything_is_sent() {
    let place = Place::new(1).await;
    for name in ["", "a\0b", &"x".repeat(64)] {
        let error = PostgresInbox::builder(place.pool.clone())
            .table(name)
            .build()
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        let error = PostgresInbox::builder(place.pool.clone())
            .schema(name)
            .build()
            .unwrap_err();
        assert!(error.to_string().contains("schema name"), "{error}");
    }
    // The table of dead letters has a longer name, and PostgreSQL would cut that off in silence.
    for (length, good) in [(50, true), (51, false), (63, false)] {
        let store = PostgresInbox::builder(place.pool.clone())
            .table("x".repeat(length))
            .build();
        assert_eq!(store.is_ok(), good, "{length}");
        if let Err(error) = store {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("50 bytes"), "{error}");
        }
    }
}
