//! Faults that inboxes on SQLite have met in the field, each as a test.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::{Place, handle, id};
use inbox_core::{
    BoxError, Claim, ConsumerGroup, ErrorKind, Inbox, InboxStore, Key, Outcome, RetryPolicy, Severity, Transactions,
    Upkeep,
};
use inbox_sqlite::rusqlite::{self, TransactionBehavior};
use inbox_sqlite::{SqliteInbox, SqliteTable};

#[tokio::test]
async fn an_overtaken_deferred_transaction_is_a_conflict_at_once_whatever_the_busy_timeout() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let mut connection = place.connect();
    // Would SQLite wait here at all, this test would not end.
    connection.busy_timeout(Duration::from_secs(3600)).unwrap();
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Deferred)
        .unwrap();
    let _: i64 = tx
        .query_row("SELECT count(*) FROM effects", [], |row| row.get(0))
        .unwrap();
    let _ = handle(&inbox, "overtaking").await.unwrap();

    let error = inbox.store().try_claim_in(&tx, inbox.group(), id("late")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.is_retryable());
    assert!(error.to_string().contains("BEGIN IMMEDIATE"), "{error}");
    tx.rollback().unwrap();

    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    assert!(
        inbox
            .store()
            .try_claim_in(&tx, inbox.group(), id("late"))
            .unwrap()
            .is_new()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_tasks_and_several_handles_meet_no_busy_database() {
    let place = Place::new();
    let mut tasks = Vec::new();
    for handle_number in 0..2 {
        // A handle of its own is to SQLite what another process is.
        let inbox = place.inbox().await.with_retry(RetryPolicy::never());
        for task in 0..4 {
            let inbox = inbox.clone();
            tasks.push(tokio::spawn(async move {
                for message in 0..100 {
                    let _ = handle(&inbox, &format!("{handle_number}-{task}-{message}"))
                        .await
                        .unwrap();
                }
            }));
        }
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(place.records(), 800);
    assert_eq!(place.count("SELECT count(*) FROM effects", []), 800);
}

#[tokio::test]
async fn a_record_that_a_constraint_refuses_is_an_error_and_never_a_duplicate() {
    let place = Place::new();
    place
        .connect()
        .execute_batch(
            "CREATE TABLE inbox_events (
                 event_id BLOB NOT NULL, consumer_group TEXT NOT NULL CHECK (consumer_group <> 'group'),
                 processed_at INTEGER NOT NULL, fingerprint BLOB, PRIMARY KEY (event_id, consumer_group))",
        )
        .unwrap();
    let inbox = place.inbox().await;
    let error = handle(&inbox, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
    assert!(error.downcast_ref::<rusqlite::Error>().is_some());
    assert_eq!(place.records(), 0);
}

#[tokio::test]
async fn a_second_unique_key_is_an_error_and_never_a_duplicate() {
    let place = Place::new();
    let inbox = place.inbox().await;
    place
        .connect()
        .execute_batch("CREATE UNIQUE INDEX odd ON inbox_events (consumer_group)")
        .unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
    let error = handle(&inbox, "b").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
    assert_eq!(place.effects("b"), 0);
}

#[tokio::test]
async fn a_trigger_that_diverts_the_record_is_an_error_and_never_a_duplicate() {
    let place = Place::new();
    let inbox = place.inbox().await;
    place
        .connect()
        .execute_batch("CREATE TRIGGER divert BEFORE INSERT ON inbox_events BEGIN SELECT RAISE(IGNORE); END")
        .unwrap();
    let error = handle(&inbox, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
    assert!(error.to_string().contains("trigger"), "{error}");
    assert_eq!(place.effects("a"), 0);

    let health = inbox.check().await.unwrap();
    let finding = health.findings().iter().find(|finding| finding.what.contains("divert"));
    assert_eq!(
        finding.map(|finding| finding.severity),
        Some(Severity::Warning),
        "{health}"
    );
}

#[tokio::test]
async fn a_table_whose_key_may_be_null_or_is_compared_otherwise_is_found_out() {
    for (table, found) in [
        (
            "event_id BLOB, consumer_group TEXT, processed_at INTEGER, PRIMARY KEY (event_id, consumer_group)",
            "NULL",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER",
            "unique key",
        ),
        (
            "event_id BLOB NOT NULL PRIMARY KEY, consumer_group TEXT NOT NULL, processed_at INTEGER",
            "unique key",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL COLLATE NOCASE, processed_at INTEGER,
             PRIMARY KEY (event_id, consumer_group)",
            "byte for byte",
        ),
        (
            "event_id TEXT NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER,
             PRIMARY KEY (event_id, consumer_group)",
            "BLOB",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, PRIMARY KEY (event_id, consumer_group)",
            "processed_at",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL UNIQUE ON CONFLICT REPLACE, processed_at INTEGER,
             PRIMARY KEY (event_id, consumer_group)",
            "further unique key",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER, extra TEXT NOT NULL,
             PRIMARY KEY (event_id, consumer_group)",
            "extra",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL REFERENCES effects, processed_at INTEGER,
             PRIMARY KEY (event_id, consumer_group)",
            "foreign key",
        ),
        (
            "event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER, fingerprint TEXT,
             PRIMARY KEY (event_id, consumer_group)",
            "fingerprint",
        ),
    ] {
        let place = Place::new();
        place
            .connect()
            .execute_batch(&format!("CREATE TABLE inbox_events ({table})"))
            .unwrap();
        let store = SqliteInbox::open(place.path()).await.unwrap();
        let health = store.check().await.unwrap();
        assert!(!health.is_sound(), "{table}");
        assert!(health.to_string().contains(found), "{table}: {health}");
        let error = store.setup().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Schema, "{table}");
        assert!(error.to_string().contains(found), "{table}: {error}");
    }
}

#[tokio::test]
async fn a_foreign_key_that_fails_at_the_commit_rolls_back_and_leaves_the_connection_usable() {
    let place = Place::new();
    let inbox = place
        .inbox_with(
            SqliteInbox::builder().on_connect(|connection| connection.pragma_update(None, "foreign_keys", true)),
        )
        .await;
    place
        .connect()
        .execute_batch(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY);
             CREATE TABLE lines (order_id INTEGER REFERENCES orders DEFERRABLE INITIALLY DEFERRED)",
        )
        .unwrap();
    let orphan = inbox
        .process(id("a"), async |tx| tx.execute("INSERT INTO lines VALUES (1)", []))
        .await
        .unwrap_err();
    assert_eq!(orphan.kind(), ErrorKind::Store, "{orphan}");
    let code = match orphan.downcast_ref::<rusqlite::Error>() {
        Some(rusqlite::Error::SqliteFailure(failure, _)) => failure.extended_code,
        other => panic!("{other:?}"),
    };
    assert_eq!(code, rusqlite::ffi::SQLITE_CONSTRAINT_FOREIGNKEY);
    assert_eq!(place.records(), 0);
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn the_log_is_reported_while_a_reader_pins_it_and_cut_down_afterwards() {
    const MIB: u64 = 1024 * 1024;
    let place = Place::new();
    let inbox = place.inbox().await;
    let reader = place.connect();
    reader.execute_batch("BEGIN").unwrap();
    let _: i64 = reader
        .query_row("SELECT count(*) FROM effects", [], |row| row.get(0))
        .unwrap();

    for message in 0..5 {
        inbox
            .process(id(&format!("large-{message}")), async |tx| {
                tx.execute("INSERT INTO effects VALUES (hex(zeroblob(8 * 1024 * 1024)))", [])
            })
            .await
            .map(|outcome| assert!(outcome.may_acknowledge()))
            .unwrap();
    }
    let pinned = std::fs::metadata(place.log()).unwrap().len();
    assert!(pinned > 64 * MIB, "{pinned}");
    let health = inbox.check().await.unwrap();
    assert!(health.is_sound(), "{health}");
    assert!(health.to_string().contains("write-ahead log"), "{health}");

    reader.execute_batch("COMMIT").unwrap();
    // The first commit's checkpoint reaches the end of the log; the second begins it anew, and cuts it.
    for name in ["after", "once more"] {
        let _ = handle(&inbox, name).await.unwrap();
    }
    let cut = std::fs::metadata(place.log()).unwrap().len();
    assert!(cut <= 16 * MIB, "{cut}");
    assert_eq!(inbox.check().await.unwrap().findings(), []);
}

/// On one thread, so that a claim which blocked it would stop the ticks that the lock's holder waits for.
#[tokio::test(flavor = "current_thread")]
async fn waiting_for_another_connections_lock_does_not_block_the_runtime() {
    let place = Place::new();
    let inbox = place
        .inbox_with(SqliteInbox::builder().busy_timeout(Duration::from_secs(600)))
        .await;
    // Not even after a handler has told the connection to wait in SQLite.
    let set = inbox.process(id("set"), async |tx| {
        tx.busy_timeout(Duration::from_secs(600))?;
        Err::<(), BoxError>("and fails".into())
    });
    assert!(set.await.is_err());
    let (locked, is_locked) = tokio::sync::oneshot::channel();
    let (tick, ticks) = mpsc::channel::<()>();
    let other = place.connect();
    let holder = std::thread::spawn(move || {
        other.execute_batch("BEGIN IMMEDIATE").unwrap();
        locked.send(()).unwrap();
        let seen = ticks.iter().take(20).count();
        other.execute_batch("COMMIT").unwrap();
        seen
    });
    is_locked.await.unwrap();
    let ticker = async {
        // Until the holder has seen enough and hangs up.
        while tick.send(()).is_ok() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let (outcome, ()) = tokio::join!(handle(&inbox, "a"), ticker);
    assert!(matches!(outcome, Ok(Outcome::Processed(()))));
    assert_eq!(holder.join().unwrap(), 20);
}

#[tokio::test]
async fn a_lock_that_is_not_given_up_is_a_retryable_error_after_the_timeout() {
    let place = Place::new();
    let inbox = place
        .inbox_with(SqliteInbox::builder().busy_timeout(Duration::from_millis(50)))
        .await
        .with_retry(RetryPolicy::never());
    let other = place.connect();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = handle(&inbox, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.is_retryable());
    other.execute_batch("COMMIT").unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn a_transaction_inside_a_handler_is_an_error_that_says_so_and_not_a_deadlock() {
    for place in [Some(Place::new()), None] {
        let builder = SqliteInbox::builder().busy_timeout(Duration::from_millis(50));
        let store = match &place {
            Some(place) => builder.open(place.path()).await.unwrap(),
            None => builder.open(":memory:").await.unwrap(),
        };
        let inbox = Inbox::new(store, "group").unwrap().with_retry(RetryPolicy::never());
        inbox.setup().await.unwrap();
        let nested = inbox.clone();
        let error = inbox
            .process(id("outer"), async |_tx| {
                nested.process(id("inner"), async |_tx| Ok::<_, BoxError>(())).await
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.to_string().contains("inside a handler"), "{error}");
        let outcome = inbox.process(id("outer"), async |_tx| Ok::<_, BoxError>(())).await;
        assert!(matches!(outcome, Ok(Outcome::Processed(()))));
    }
}

#[tokio::test(flavor = "current_thread")]
async fn tasks_have_their_turn_in_the_order_they_came() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let store = inbox.store().clone();
    let first = store.begin().await.unwrap();
    let turns = Arc::new(std::sync::Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for number in 0..20 {
        let (store, turns) = (store.clone(), Arc::clone(&turns));
        tasks.push(tokio::spawn(async move {
            let tx = store.begin().await.unwrap();
            turns.lock().unwrap().push(number);
            store.commit(tx).await.unwrap();
        }));
        // On one thread, a turn of the executor has the new task queued.
        tokio::task::yield_now().await;
    }
    store.rollback(first).await.unwrap();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*turns.lock().unwrap(), (0..20).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_long_queue_that_moves_is_no_fault() {
    let place = Place::new();
    // Each holds the lock for a part of the timeout; all of them together for more than it.
    let inbox = place
        .inbox_with(SqliteInbox::builder().busy_timeout(Duration::from_millis(900)))
        .await
        .with_retry(RetryPolicy::never());
    let mut tasks = Vec::new();
    for number in 0..8 {
        let inbox = inbox.clone();
        tasks.push(tokio::spawn(async move {
            let message = id(&format!("{number}"));
            inbox
                .process(message, async |_tx| {
                    tokio::time::sleep(Duration::from_millis(200)).await;
                    Ok::<_, BoxError>(())
                })
                .await
        }));
    }
    for task in tasks {
        assert!(matches!(task.await.unwrap(), Ok(Outcome::Processed(()))));
    }
}

#[tokio::test]
async fn a_transaction_that_the_handler_ended_itself_is_never_committed_with_ok() {
    for raw in [
        "COMMIT",
        "ROLLBACK",
        "COMMIT; BEGIN",
        "ROLLBACK; BEGIN",
        "ROLLBACK; BEGIN IMMEDIATE",
    ] {
        let place = Place::new();
        let inbox = place.inbox().await;
        let error = inbox
            .process(id("a"), async |tx| {
                tx.execute_batch(raw)?;
                tx.execute_batch("INSERT INTO effects VALUES ('after')")
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TransactionEnded, "{raw}: {error}");
        assert!(!error.is_retryable());
        // The connection serves the next one.
        assert!(handle(&inbox, "b").await.unwrap().may_acknowledge(), "{raw}");
        assert_eq!(place.effects("b"), 1, "{raw}");
    }
}

#[tokio::test]
async fn a_claim_in_a_transaction_that_was_ended_does_not_commit_by_itself() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let mut connection = place.connect();
    let tx = connection.transaction().unwrap();
    tx.execute_batch("COMMIT").unwrap();
    let error = inbox.store().try_claim_in(&tx, inbox.group(), id("a")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransactionEnded);
    drop(tx);

    let mut tx = inbox.store().begin().await.unwrap();
    tx.execute_batch("ROLLBACK; BEGIN").unwrap();
    let error = inbox.try_claim(&mut tx, id("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TransactionEnded);
    drop(tx);
    assert_eq!(place.records(), 0);
}

#[tokio::test]
async fn savepoints_of_the_handlers_own_keep_working() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let outcome = inbox
        .process(id("a"), async |tx| {
            tx.execute_batch(
                "INSERT INTO effects VALUES ('kept');
                 SAVEPOINT own; INSERT INTO effects VALUES ('undone'); ROLLBACK TO own; RELEASE own",
            )
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(
        (place.effects("kept"), place.effects("undone"), place.records()),
        (1, 0, 1)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn futures_dropped_at_any_moment_leave_nothing_half_done() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let polls = AtomicU32::new(0);
    let mut cut = 0_u32;
    for round in 0..300_u64 {
        let name = format!("m{}", round % 100);
        let handled = inbox.process(id(&name), async |tx| {
            tx.execute("INSERT INTO effects VALUES (?1)", [&name])?;
            tokio::task::yield_now().await;
            Ok::<_, BoxError>(())
        });
        // From at once to later than it takes.
        let moment = Duration::from_micros(round * 37 % 700);
        if tokio::time::timeout(moment, handled).await.is_err() {
            cut += 1;
        }
        polls.fetch_add(1, Ordering::Relaxed);
    }
    assert!(cut > 0);
    for message in 0..100 {
        assert!(handle(&inbox, &format!("m{message}")).await.unwrap().may_acknowledge());
    }
    let doubled = "SELECT count(*) FROM (SELECT name FROM effects GROUP BY name HAVING count(*) <> 1)";
    assert_eq!(place.count(doubled, []), 0);
    assert_eq!(place.count("SELECT count(*) FROM effects", []), 100);
    assert_eq!(place.records(), 100);
}

#[tokio::test]
async fn a_begin_that_is_dropped_while_it_waits_leaves_no_lock_behind() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let other = place.connect();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    for _ in 0..5 {
        assert!(
            tokio::time::timeout(Duration::from_millis(5), inbox.store().begin())
                .await
                .is_err()
        );
    }
    other.execute_batch("COMMIT; BEGIN IMMEDIATE; COMMIT").unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn purgers_and_claimers_at_once_do_each_other_no_harm() {
    let place = Place::new();
    let mut tasks = Vec::new();
    for purger in 0..2 {
        let inbox = place.inbox().await;
        tasks.push(tokio::spawn(async move {
            for _ in 0..50 {
                inbox.purge(Duration::ZERO).await.unwrap();
            }
            let _ = purger;
        }));
    }
    let claimers = place.inbox().await;
    for task in 0..4 {
        let inbox = claimers.clone();
        tasks.push(tokio::spawn(async move {
            for message in 0..100 {
                let _ = handle(&inbox, &format!("{task}-{message}")).await.unwrap();
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(place.count("SELECT count(*) FROM effects", []), 400);
}

#[tokio::test]
async fn age_counts_from_the_end_of_long_work() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("slow")).await.unwrap().is_new());
    let claimed: i64 = tx
        .query_row("SELECT processed_at FROM inbox_events", [], |row| row.get(0))
        .unwrap();
    tokio::time::sleep(Duration::from_millis(150)).await;
    store.commit(tx).await.unwrap();
    let stamped = place.count("SELECT processed_at FROM inbox_events", []);
    assert!(stamped >= claimed + 150, "{claimed} {stamped}");
}

#[tokio::test]
async fn the_database_is_closed_with_the_last_clone() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let _ = handle(&inbox, "a").await.unwrap();
    assert!(place.log().exists());
    drop(inbox);
    // SQLite removes the log with the last connection.
    assert!(!place.log().exists());
}

#[tokio::test]
async fn a_missing_table_is_an_error_that_names_the_remedy() {
    let place = Place::new();
    let store = SqliteInbox::open(place.path()).await.unwrap();
    let group = ConsumerGroup::new("group").unwrap();
    let mut tx = store.begin().await.unwrap();
    let error = store.try_claim(&mut tx, &group, id("a").into()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("setup()"), "{error}");
    drop(tx);
    let error = store.find(&Key::new(group, id("a"))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    let health = store.check().await.unwrap();
    assert!(!health.is_sound() && health.to_string().contains("setup()"), "{health}");
}

#[tokio::test]
async fn an_older_table_is_upgraded_and_keeps_its_records() {
    let place = Place::new();
    place
        .connect()
        .execute_batch(&format!(
            "CREATE TABLE inbox_events (
                 event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER,
                 UNIQUE (event_id, consumer_group));
             INSERT INTO inbox_events VALUES (x'{}', 'group', NULL)",
            id("old").as_uuid().simple()
        ))
        .unwrap();
    let store = SqliteInbox::open(place.path()).await.unwrap();
    let inbox = Inbox::new(store, "group").unwrap();
    let error = handle(&inbox, "old").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema);
    assert!(error.to_string().contains("older"), "{error}");
    assert!(!inbox.check().await.unwrap().is_sound());

    inbox.setup().await.unwrap();
    assert!(inbox.check().await.unwrap().is_sound());
    let outcome = handle(&inbox, "old").await.unwrap();
    assert!(
        matches!(outcome, Outcome::Duplicate(processed) if processed.at.is_none()),
        "{outcome:?}"
    );
    assert!(matches!(handle(&inbox, "new").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn another_programs_plain_insert_is_a_duplicate_to_us() {
    let place = Place::new();
    let inbox = place.inbox().await;
    place
        .connect()
        .execute(
            "INSERT INTO inbox_events (event_id, consumer_group) VALUES (?1, 'group')
             ON CONFLICT (event_id, consumer_group) DO NOTHING",
            [id("a").as_bytes()],
        )
        .unwrap();
    let outcome = handle(&inbox, "a").await.unwrap();
    let Outcome::Duplicate(processed) = outcome else {
        panic!("{outcome:?}")
    };
    let age = processed.at.unwrap().elapsed().unwrap_or_default();
    assert!(age < Duration::from_secs(3600), "{age:?}");
}

#[tokio::test]
async fn a_database_that_cannot_be_written_or_opened_says_so() {
    let place = Place::new();
    drop(place.inbox().await);
    let read_only = format!("file:{}?mode=ro", place.path().display());
    let inbox = Inbox::new(SqliteInbox::open(&read_only).await.unwrap(), "group").unwrap();
    let error = handle(&inbox, "a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");

    let nowhere = place.path().with_file_name("no such folder").join("x.db");
    let error = SqliteInbox::open(&nowhere).await.unwrap_err();
    assert!(error.to_string().contains("no such folder"), "{error}");

    let text = place.path().with_file_name("text");
    std::fs::write(
        &text,
        "this is no database, but it is long enough to be looked at as one".repeat(100),
    )
    .unwrap();
    let error = SqliteInbox::open(&text).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
}

#[tokio::test]
async fn names_of_tables_are_quoted_or_refused() {
    for name in [
        "Inbox Events",
        "a.b",
        "se\"lect",
        "x\"; DROP TABLE effects; --",
        "Ünïcode",
        "select",
    ] {
        let place = Place::new();
        let inbox = place.inbox_with(SqliteInbox::builder().table(name)).await;
        assert!(
            matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))),
            "{name}"
        );
        assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Duplicate(_))), "{name}");
        inbox.setup().await.unwrap();
        assert!(inbox.check().await.unwrap().is_sound(), "{name}");
        assert_eq!(inbox.purge(Duration::from_secs(3600)).await.unwrap(), 0);
        assert!(inbox.forget(id("a")).await.unwrap());
        assert_eq!(place.effects("a"), 1);
    }
    for name in ["", "a\0b", "sqlite_inbox", "SQLITE_x", &"n".repeat(64), "line\nbreak"] {
        let error = SqliteTable::new(name).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name:?}");
        assert!(error.to_string().contains("table name"), "{error}");
        let error = SqliteInbox::builder().table(name).open(":memory:").await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name:?}");
    }
}

#[tokio::test]
async fn an_empty_batch_and_one_of_50_000_ids_work() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let messages: Vec<_> = (0..50_000).map(|number| id(&number.to_string())).collect();
    let store = inbox.store();
    let deliveries: Vec<_> = messages.iter().map(|id| (*id).into()).collect();
    let mut tx = store.begin().await.unwrap();
    assert!(
        store
            .try_claim_batch(&mut tx, inbox.group(), &[])
            .await
            .unwrap()
            .is_empty()
    );
    let claims = store
        .try_claim_batch(&mut tx, inbox.group(), &deliveries)
        .await
        .unwrap();
    assert!(claims.iter().all(Claim::is_new));
    store.commit(tx).await.unwrap();
    assert_eq!(place.records(), 50_000);
    assert_eq!(
        inbox.purge(Duration::ZERO).await.unwrap() + u64::try_from(place.records()).unwrap(),
        50_000
    );
}

#[tokio::test]
async fn an_attached_file_is_refused_because_sqlite_does_not_commit_two_files_together() {
    let place = Place::new();
    let other = place.path().with_file_name("other.db");
    rusqlite::Connection::open(&other)
        .unwrap()
        .execute_batch("CREATE TABLE invoices (x)")
        .unwrap();
    let attach = format!("ATTACH '{}' AS other", other.display());

    let on_connect = attach.clone();
    let builder = SqliteInbox::builder().on_connect(move |connection| connection.execute_batch(&on_connect));
    let error = builder.open(place.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let mode: String = rusqlite::Connection::open(&other)
        .unwrap()
        .query_row("PRAGMA journal_mode", [], |row| row.get(0))
        .unwrap();
    assert_eq!(mode, "delete", "other people's files are left as they are");

    let inbox = place.inbox().await;
    let handled = inbox.process(id("a"), async |tx| {
        tx.execute_batch(&attach)?;
        tx.execute("INSERT INTO other.invoices VALUES (1)", []).map(drop)
    });
    let error = handled.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(place.records(), 0);
    let invoices: i64 = rusqlite::Connection::open(&other)
        .unwrap()
        .query_row("SELECT count(*) FROM invoices", [], |row| row.get(0))
        .unwrap();
    assert_eq!(invoices, 0);
}

#[tokio::test]
async fn a_table_of_the_same_name_elsewhere_does_not_stand_before_ours() {
    let place = Place::new();
    let inbox = place.inbox().await;
    let shadowed = inbox.process(id("a"), async |tx| {
        tx.execute_batch("CREATE TEMP TABLE inbox_events AS SELECT * FROM main.inbox_events")
    });
    assert!(matches!(shadowed.await, Ok(Outcome::Processed(()))));
    assert!(matches!(handle(&inbox, "b").await, Ok(Outcome::Processed(()))));
    assert_eq!(place.records(), 2);
    assert!(inbox.find(id("b")).await.unwrap().is_some());

    // The synchronous inbox, beside another program's inbox that is attached.
    let mut connection = rusqlite::Connection::open_in_memory().unwrap();
    connection
        .execute_batch(&format!("ATTACH '{}' AS other", place.path().display()))
        .unwrap();
    let table = SqliteTable::default();
    table.setup(&mut connection).unwrap();
    let tx = connection
        .transaction_with_behavior(TransactionBehavior::Immediate)
        .unwrap();
    assert!(table.try_claim_in(&tx, inbox.group(), id("a")).unwrap().is_new());
    tx.commit().unwrap();
    assert_eq!(place.records(), 2);
}

#[tokio::test]
async fn a_commit_that_happened_is_no_error_though_sqlite_reports_one_after_it() {
    let place = Place::new();
    let mut connection = place.connect();
    connection.execute_batch("PRAGMA journal_mode = wal").unwrap();
    let connection_mut = &mut connection;
    connection_mut.wal_hook(Some(|_, _| Err(rusqlite::Error::InvalidQuery)));
    let inbox = Inbox::new(SqliteInbox::from_connection(connection).await.unwrap(), "group").unwrap();
    inbox.setup().await.unwrap();
    assert!(matches!(handle(&inbox, "a").await, Ok(Outcome::Processed(()))));
    assert_eq!((place.records(), place.effects("a")), (1, 1));
}

#[tokio::test]
async fn a_file_that_was_replaced_under_the_store_is_found_out() {
    let place = Place::new();
    let inbox = place.inbox().await;
    assert!(handle(&inbox, "a").await.unwrap().may_acknowledge());
    for file in [place.path(), place.log(), place.path().with_file_name("test.db-shm")] {
        std::fs::remove_file(file).unwrap();
    }
    for replaced in [false, true] {
        if replaced {
            drop(place.connect());
        }
        let error = handle(&inbox, "b").await.unwrap_err();
        assert!(error.to_string().contains("replaced"), "{error}");
        let health = inbox.check().await.unwrap();
        assert!(
            !health.is_sound() && health.to_string().contains("replaced"),
            "{health}"
        );
    }
}

#[tokio::test]
async fn settings_beyond_what_sqlite_can_count_and_hooks_that_leave_a_transaction_are_met() {
    let place = Place::new();
    let patient = SqliteInbox::builder().busy_timeout(Duration::MAX);
    let inbox = place.inbox_with(patient).await;
    assert!(handle(&inbox, "a").await.unwrap().may_acknowledge());

    let leaving = SqliteInbox::builder().on_connect(|connection| connection.execute_batch("BEGIN"));
    let error = leaving.open(place.path()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
}

#[tokio::test]
async fn a_record_whose_time_or_fingerprint_cannot_be_read_is_a_duplicate_all_the_same() {
    let place = Place::new();
    place
        .connect()
        .execute_batch(&format!(
            "CREATE TABLE inbox_events (event_id BLOB NOT NULL, consumer_group TEXT NOT NULL, processed_at INTEGER,
                 fingerprint BLOB, PRIMARY KEY (event_id, consumer_group));
             INSERT INTO inbox_events VALUES (x'{}', 'group', '2024-01-01', x'00')",
            id("a").as_uuid().simple()
        ))
        .unwrap();
    let inbox = place.inbox().await;
    let outcome = inbox
        .process(id("a").with_payload("x"), async |_tx| Ok::<_, BoxError>(()))
        .await;
    assert!(matches!(outcome, Ok(Outcome::Duplicate(_))), "{outcome:?}");
}

#[tokio::test]
async fn an_index_of_somebody_elses_under_our_name_is_a_clear_error_of_the_setup() {
    let place = Place::new();
    place
        .connect()
        .execute_batch("CREATE INDEX inbox_events_by_age ON effects (name)")
        .unwrap();
    let store = SqliteInbox::open(place.path()).await.unwrap();
    let error = store.setup().await.unwrap_err();
    assert!(error.to_string().contains("inbox_events_by_age"), "{error}");
}
