//! Dead letters: kept and undone with their transaction, listed page by page, put back once.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use common::{Place, handle, id};
use inbox_core::{
    BoxError, Consumer, ConsumerOptions, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters,
    Error, ErrorKind, Headers, Inbox, InboxStore, Key, MemoryBroker, MemoryMessage, MessageId, Outcome, Severity,
    Transactions, Upkeep,
};
use inbox_sqlite::{SqliteInbox, SqliteTx};

const TABLE: &str = "inbox_events_dead_letters";

fn some(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn letter(inbox: &Inbox<SqliteInbox>, id: MessageId) -> DeadLetter {
    let info = DeadLetterInfo::new(Key::new(inbox.group().clone(), id), "it failed");
    DeadLetter::new(info, Headers::new(), "payload")
}

async fn keep(inbox: &Inbox<SqliteInbox>, letter: &DeadLetter) {
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    store.add_dead_letter(&mut tx, letter).await.unwrap();
    store.commit(tx).await.unwrap();
}

/// As a consumer gives a message up: its record and its letter in one transaction.
async fn give_up(inbox: &Inbox<SqliteInbox>, id: MessageId) {
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id).await.unwrap().is_new());
    store.add_dead_letter(&mut tx, &letter(inbox, id)).await.unwrap();
    store.commit(tx).await.unwrap();
}

async fn is_new(inbox: &Inbox<SqliteInbox>, id: MessageId) -> bool {
    let mut tx = inbox.store().begin().await.unwrap();
    inbox.try_claim(&mut tx, id).await.unwrap().is_new()
}

#[tokio::test]
async fn a_letter_comes_back_as_it_was_whatever_stands_in_it() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let hostile = [
        "",
        "a\0b",
        "it's \"quoted\"; DROP TABLE effects; --",
        "\u{fffd}\u{1f4e8} \u{301}",
        "$1 ?1 {table}",
    ];
    for (number, text) in hostile.into_iter().enumerate() {
        let mut letter = letter(&inbox, id(&format!("message {number}")));
        letter.info.subject = text.into();
        letter.info.origin = text.into();
        letter.info.error = text.into();
        letter.info.state = DeadLetterState::OnTrial;
        letter.info.attempts = u32::MAX;
        letter.info.published_at = Some(UNIX_EPOCH + Duration::from_millis(1_796_000_000_123));
        letter.headers = Headers::from_iter([
            ("twice", b"1".to_vec()),
            (text, text.as_bytes().to_vec()),
            ("twice", vec![0, 0xff, 0xfe]),
            ("Twice", Vec::new()),
        ]);
        letter.payload = (0..1 << 20)
            .map(|byte: u32| (byte % 251) as u8)
            .chain([0xff, 0])
            .collect();
        keep(&inbox, &letter).await;
        let found = inbox.dead_letter(letter.info.key.id()).await.unwrap().unwrap();
        assert!(found.info.died_at > letter.info.died_at, "the store's time");
        letter.info.died_at = found.info.died_at;
        assert!(found == letter, "{:?} {:?}", found.info, letter.info);
        let listed = inbox.dead_letters(None, some(100)).await.unwrap();
        assert_eq!(
            listed.iter().find(|info| info.key == letter.info.key),
            Some(&letter.info)
        );
    }
    let mut early = letter(&inbox, id("early"));
    early.info.published_at = Some(UNIX_EPOCH - Duration::from_millis(1));
    keep(&inbox, &early).await;
    let found = inbox.dead_letter(id("early")).await.unwrap().unwrap();
    assert_eq!(found.info.published_at, early.info.published_at);
}

#[tokio::test]
async fn a_later_letter_takes_the_earlier_ones_place_and_a_roll_back_undoes_all_of_it() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let store = inbox.store();
    let first = letter(&inbox, id("a"));
    keep(&inbox, &first).await;

    let mut second = first.clone();
    second.info.error = "it failed again".into();
    second.payload = b"other".to_vec();
    for commit in [false, true] {
        let mut tx = store.begin().await.unwrap();
        store.add_dead_letter(&mut tx, &second).await.unwrap();
        store.add_dead_letter(&mut tx, &letter(&inbox, id("b"))).await.unwrap();
        if commit {
            store.commit(tx).await.unwrap();
        } else {
            store.rollback(tx).await.unwrap();
            assert!(inbox.dead_letter(id("b")).await.unwrap().is_none());
            assert_eq!(
                inbox.dead_letter(id("a")).await.unwrap().unwrap().payload,
                first.payload
            );
        }
    }
    let found = inbox.dead_letter(id("a")).await.unwrap().unwrap();
    assert_eq!((found.info.error, found.payload), (second.info.error, second.payload));
    assert_eq!(inbox.dead_letters(None, some(10)).await.unwrap().len(), 2);

    let mut tx = store.begin().await.unwrap();
    store.remove_dead_letter(&mut tx, &first.info.key).await.unwrap();
    store.rollback(tx).await.unwrap();
    assert!(inbox.dead_letter(id("a")).await.unwrap().is_some());
    let mut tx = store.begin().await.unwrap();
    for _ in 0..2 {
        store.remove_dead_letter(&mut tx, &first.info.key).await.unwrap();
    }
    store.commit(tx).await.unwrap();
    assert!(inbox.dead_letter(id("a")).await.unwrap().is_none());

    let mut tx = store.begin().await.unwrap();
    tx.execute_batch("ROLLBACK").unwrap();
    let error = store.add_dead_letter(&mut tx, &first).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransactionEnded, "{error}");
}

#[tokio::test]
async fn letters_of_one_time_are_listed_page_by_page_without_a_gap_and_without_another_groups() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let other = inbox.for_group("other").unwrap();
    let mut tx = inbox.store().begin().await.unwrap();
    for number in 0..250 {
        for inbox in [&inbox, &other] {
            let letter = letter(inbox, id(&format!("message {number}")));
            inbox.store().add_dead_letter(&mut tx, &letter).await.unwrap();
        }
    }
    inbox.store().commit(tx).await.unwrap();
    place
        .connect()
        .execute_batch(&format!("UPDATE {TABLE} SET died_at = 1796000000000 + (rowid % 4)"))
        .unwrap();

    let whole = inbox.dead_letters(None, some(u32::MAX)).await.unwrap();
    assert_eq!(whole.len(), 250);
    assert!(whole.is_sorted_by_key(DeadLetterInfo::place));
    for size in [1, 7, 250] {
        let (mut read, mut after) = (Vec::new(), None);
        loop {
            let page = inbox.dead_letters(after, some(size)).await.unwrap();
            let Some(last) = page.last() else { break };
            after = Some(last.place());
            read.extend(page);
        }
        assert!(read == whole, "in pages of {size}");
    }

    // Of any precision, and beyond what the store knows.
    let nanosecond = Duration::from_nanos(1);
    for info in &whole {
        for died_at in [info.died_at, info.died_at + nanosecond, info.died_at - nanosecond] {
            let place = DeadLetterPlace {
                died_at,
                ..info.place()
            };
            let expected = whole.iter().find(|info| info.place() > place);
            let found = inbox.dead_letters(Some(place), some(1)).await.unwrap();
            assert_eq!(found.first(), expected, "{place:?}");
        }
    }
    for (seconds, expected) in [(u64::from(u32::MAX), 0), (i64::MAX as u64, 0)] {
        let place = DeadLetterPlace {
            died_at: UNIX_EPOCH + Duration::from_secs(seconds),
            id: id("a"),
        };
        assert_eq!(inbox.dead_letters(Some(place), some(1)).await.unwrap().len(), expected);
    }
    let place = DeadLetterPlace {
        died_at: UNIX_EPOCH - Duration::from_secs(i64::MAX as u64),
        id: id("a"),
    };
    assert_eq!(inbox.dead_letters(Some(place), some(1)).await.unwrap(), whole[..1]);
}

#[tokio::test]
async fn what_is_put_back_is_new_again_and_one_that_stayed_half_way_can_be_put_back_again() {
    let place = Place::new();
    let inbox = place.inbox().await;
    give_up(&inbox, id("a")).await;
    give_up(&inbox.for_group("other").unwrap(), id("a")).await;
    assert!(!is_new(&inbox, id("a")).await);

    // The program dies while it publishes.
    let error = inbox
        .put_back(id("a"), async |_letter| Err("killed"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    let found = inbox.dead_letter(id("a")).await.unwrap().unwrap();
    assert_eq!(found.info.state, DeadLetterState::PuttingBack);
    // It had come through, and was handled.
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));

    let publish = async |letter: &DeadLetter| {
        assert_eq!(letter.info.state, DeadLetterState::PuttingBack);
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("a"), publish).await.unwrap());
    assert!(!is_new(&inbox, id("a")).await, "its record must stand");
    assert!(!inbox.put_back(id("a"), publish).await.unwrap());
    let other = inbox.for_group("other").unwrap();
    assert_eq!(
        other.dead_letter(id("a")).await.unwrap().unwrap().info.state,
        DeadLetterState::Dead
    );
    assert!(!is_new(&other, id("a")).await);
}

#[tokio::test]
async fn a_letter_that_was_given_up_again_meanwhile_stays() {
    let place = Place::new();
    let inbox = place.inbox().await;
    give_up(&inbox, id("a")).await;
    let publish = async |old: &DeadLetter| {
        // So that the clock has moved on.
        while letter_time(&place) == old.info.died_at {
            let again = letter(&inbox, id("a"));
            keep(&inbox, &again).await;
        }
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("a"), publish).await.unwrap());
    let found = inbox.dead_letter(id("a")).await.unwrap().unwrap();
    assert_eq!(found.info.state, DeadLetterState::Dead);
    // Also if it is being put back by then.
    let store = inbox.store();
    let started = store.start_put_back(&found.info.key).await.unwrap().unwrap();
    let mut older = started.info.clone();
    older.died_at -= Duration::from_millis(1);
    assert!(!store.finish_put_back(&older).await.unwrap());
    assert!(store.finish_put_back(&started.info).await.unwrap());
    assert!(!store.finish_put_back(&started.info).await.unwrap());
}

fn letter_time(place: &Place) -> std::time::SystemTime {
    let millis = place.count(&format!("SELECT died_at FROM {TABLE}"), []);
    UNIX_EPOCH + Duration::from_millis(millis.unsigned_abs())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_put_back_at_once_one_forgets_the_record() {
    let place = Place::new();
    let inbox = place.inbox().await;
    for round in 0..10 {
        let id = id(&format!("message {round}"));
        give_up(&inbox, id).await;
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let inbox = place.inbox().await;
            tasks.push(tokio::spawn(async move {
                let publish = async |_: &DeadLetter| {
                    let handler = async |_: &mut SqliteTx| Ok::<_, BoxError>(());
                    let outcome = inbox.process(id, handler).await?;
                    assert!(outcome.may_acknowledge());
                    Ok::<_, Error>(())
                };
                inbox.put_back(id, publish).await.unwrap();
                inbox.counts().claimed
            }));
        }
        let mut processed = 0;
        for task in tasks {
            processed += task.await.unwrap();
        }
        assert_eq!(processed, 1, "round {round}");
        assert!(inbox.dead_letter(id).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_deleted_letter_is_gone_and_its_message_stays_processed() {
    let place = Place::new();
    let inbox = place.inbox().await;
    give_up(&inbox, id("a")).await;
    give_up(&inbox, id("b")).await;
    assert!(inbox.delete_dead_letter(id("a")).await.unwrap());
    assert!(!inbox.delete_dead_letter(id("a")).await.unwrap());
    assert!(!is_new(&inbox, id("a")).await);
    assert!(inbox.dead_letter(id("b")).await.unwrap().is_some());
}

/// The inbox's table as the version before dead letters made it.
const FORMER: &str = "CREATE TABLE inbox_events (
        event_id BLOB NOT NULL CHECK (length(event_id) = 16), consumer_group TEXT NOT NULL, processed_at INTEGER NOT NULL,
        fingerprint BLOB CHECK (length(fingerprint) = 16), PRIMARY KEY (event_id, consumer_group)) STRICT, WITHOUT ROWID;
    CREATE INDEX inbox_events_by_age ON inbox_events (consumer_group, processed_at)";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_inbox_of_the_former_version_works_without_dead_letters_until_set_up_makes_their_table() {
    let place = Place::new();
    place.connect().execute_batch(FORMER).unwrap();
    let inbox = Inbox::new(SqliteInbox::open(place.path()).await.unwrap(), "group").unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
    let health = inbox.check().await.unwrap();
    assert!(health.is_sound(), "{health}");
    let [finding] = health.findings() else {
        panic!("{health}")
    };
    assert_eq!(finding.severity, Severity::Warning);
    assert!(
        finding.what.contains(TABLE) && finding.remedy.contains("setup()"),
        "{health}"
    );

    let store = inbox.store();
    let key = Key::new(inbox.group().clone(), id("a"));
    let mut tx = store.begin().await.unwrap();
    for error in [
        store
            .add_dead_letter(&mut tx, &letter(&inbox, id("a")))
            .await
            .unwrap_err(),
        store.remove_dead_letter(&mut tx, &key).await.unwrap_err(),
        store.find_dead_letter(&key).await.unwrap_err(),
        inbox.dead_letters(None, some(1)).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
        assert!(
            error.to_string().contains(TABLE) && error.to_string().contains("setup()"),
            "{error}"
        );
    }
    drop(tx);
    assert_eq!(store.start_put_back(&key).await.unwrap_err().kind(), ErrorKind::Schema);
    assert_eq!(
        store.delete_dead_letter(&key).await.unwrap_err().kind(),
        ErrorKind::Schema
    );

    let mut tasks = Vec::new();
    for _ in 0..10 {
        let store = SqliteInbox::open(place.path()).await.unwrap();
        tasks.push(tokio::spawn(async move { store.setup().await }));
    }
    for task in tasks {
        task.await.unwrap().unwrap();
    }
    assert!(inbox.check().await.unwrap().findings().is_empty());
    assert!(!is_new(&inbox, id("a")).await, "the records are kept");
    give_up(&inbox, id("b")).await;
    assert!(inbox.dead_letter(id("b")).await.unwrap().is_some());
}

#[tokio::test]
async fn check_and_set_up_say_what_is_wrong_with_the_table() {
    for (alter, word) in [
        (format!("ALTER TABLE {TABLE} DROP COLUMN origin"), "origin"),
        (
            format!("ALTER TABLE {TABLE} ADD COLUMN more TEXT NOT NULL DEFAULT 'x'"),
            "",
        ),
        (
            format!("DROP TABLE {TABLE}; CREATE TABLE {TABLE} (event_id TEXT)"),
            "event_id",
        ),
        (
            format!(
                "DROP TABLE {TABLE}; CREATE TABLE {TABLE} (event_id BLOB, consumer_group TEXT, died_at INTEGER, state TEXT, \
                 attempts INTEGER, published_at INTEGER, subject TEXT, origin TEXT, error TEXT, headers TEXT, payload BLOB)"
            ),
            "unique key",
        ),
    ] {
        let place = Place::new();
        let inbox = place.inbox().await;
        place.connect().execute_batch(&alter).unwrap();
        let health = inbox.check().await.unwrap();
        assert_eq!(health.is_sound(), word.is_empty(), "{alter}: {health}");
        assert!(word.is_empty() || health.to_string().contains(TABLE), "{health}");
        assert!(health.to_string().contains(word), "{alter}: {health}");
        match inbox.setup().await {
            Ok(()) => assert!(word.is_empty(), "{alter}"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
                assert!(error.to_string().contains(word), "{alter}: {error}");
            }
        }
        assert!(
            matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))),
            "claims go on"
        );
    }
    // A table that was dropped, and an index, are made again.
    for drop in [format!("DROP TABLE {TABLE}"), format!("DROP INDEX {TABLE}_by_age")] {
        let place = Place::new();
        let inbox = place.inbox().await;
        place.connect().execute_batch(&drop).unwrap();
        assert_eq!(inbox.check().await.unwrap().findings().len(), 1, "{drop}");
        inbox.setup().await.unwrap();
        assert!(inbox.check().await.unwrap().findings().is_empty(), "{drop}");
    }
}

#[tokio::test]
async fn what_somebody_wrote_into_the_table_is_an_error_that_says_so() {
    let place = Place::new();
    let inbox = place.inbox().await;
    for (column, value) in [("state", "'odd'"), ("headers", "'{}'")] {
        give_up(&inbox, id(column)).await;
        place
            .connect()
            .execute_batch(&format!("UPDATE {TABLE} SET {column} = {value}"))
            .unwrap();
        let error = inbox.dead_letter(id(column)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
        assert!(inbox.delete_dead_letter(id(column)).await.unwrap());
    }
}

#[tokio::test]
async fn a_poison_message_in_a_batch_is_one_letter_and_put_back_it_is_handled_once() {
    let place = Place::new();
    let broker = MemoryBroker::new();
    for n in 1..=100 {
        broker.publish("orders", &format!("order-{n}"), format!("{n}"));
    }
    let bad = Arc::new(AtomicBool::new(true));
    let run = async |broker: &MemoryBroker| {
        let (inbox, bad) = (place.inbox().await, Arc::clone(&bad));
        let handler = async move |tx: &mut SqliteTx, message: &MemoryMessage| {
            if message.sequence == 37 && bad.load(Ordering::Relaxed) {
                return Err(Error::poison("cannot be read").into());
            }
            let name = std::str::from_utf8(&message.payload)?;
            tx.execute("INSERT INTO effects VALUES (?1)", [name])?;
            Ok::<_, BoxError>(())
        };
        let options = ConsumerOptions::new().batch(NonZeroUsize::new(100).unwrap());
        let consumer = Consumer::new(broker.clone(), inbox, handler).with(options);
        consumer.run(broker.drained()).await.unwrap()
    };
    let summary = run(&broker).await;
    assert_eq!((summary.handled, summary.dead_letters), (99, 1), "{summary}");
    assert_eq!(place.count("SELECT count(DISTINCT name) FROM effects", []), 99);

    // In another process, so to speak: with another handle.
    let inbox = place.inbox().await;
    let letters = inbox.dead_letters(None, some(10)).await.unwrap();
    let [info] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((info.state, info.subject.as_str()), (DeadLetterState::Dead, "orders"));
    assert!(info.error.contains("cannot be read"), "{}", info.error);

    bad.store(false, Ordering::Relaxed);
    let publish = async |letter: &DeadLetter| {
        broker.publish_with_headers(&letter.info.subject, letter.headers.clone(), letter.payload.clone());
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("order-37"), publish).await.unwrap());
    let summary = run(&broker).await;
    assert_eq!((summary.handled, summary.duplicates), (1, 0), "{summary}");
    assert_eq!(place.effects("37"), 1);
    assert!(inbox.dead_letters(None, some(10)).await.unwrap().is_empty());
}

#[tokio::test]
async fn more_concurrency_than_sqlite_has_writers_is_refused() {
    let place = Place::new();
    let broker = MemoryBroker::new();
    let handler = async |_: &mut SqliteTx, _: &MemoryMessage| Ok::<_, BoxError>(());
    let options = ConsumerOptions::new().concurrency(NonZeroUsize::new(2).unwrap());
    let consumer = Consumer::new(broker.clone(), place.inbox().await, handler).with(options);
    let error = consumer.run(broker.drained()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    let store = place.inbox().await.store().clone();
    assert_eq!(store.max_transactions(), Some(NonZeroUsize::MIN));
    let _: Option<&dyn DeadLetters<Tx = <SqliteInbox as InboxStore>::Tx>> = store.dead_letters();
}
