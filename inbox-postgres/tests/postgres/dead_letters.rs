//! Dead letters: kept and undone with their transaction, listed page by page, put back once.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use inbox_core::{
    BoxError, Consumer, ConsumerOptions, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters,
    Error, ErrorKind, Headers, Inbox, Key, MemoryBroker, MemoryMessage, MessageId, RetryPolicy, Severity, Transactions,
    Upkeep,
};
use inbox_postgres::{PostgresInbox, PostgresTx, sqlx};
use inbox_test_servers::{Postgres, Stop};
use sqlx::{AssertSqlSafe, raw_sql};

use crate::place::{Place, id, pool_at};

const TABLE: &str = "inbox_events_dead_letters";

fn some(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn letter(inbox: &Inbox<PostgresInbox>, id: MessageId) -> DeadLetter {
    let info = DeadLetterInfo::new(Key::new(inbox.group().clone(), id), "it failed");
    DeadLetter::new(info, Headers::new(), "payload")
}

async fn keep(inbox: &Inbox<PostgresInbox>, letter: &DeadLetter) {
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    store.add_dead_letter(&mut tx, letter).await.unwrap();
    store.commit(tx).await.unwrap();
}

/// As a consumer gives a message up: its record and its letter in one transaction.
async fn giving_up(inbox: &Inbox<PostgresInbox>, id: MessageId) -> PostgresTx {
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id).await.unwrap().is_new());
    store.add_dead_letter(&mut tx, &letter(inbox, id)).await.unwrap();
    tx
}

async fn give_up(inbox: &Inbox<PostgresInbox>, id: MessageId) {
    let tx = giving_up(inbox, id).await;
    inbox.store().commit(tx).await.unwrap();
}

async fn is_new(inbox: &Inbox<PostgresInbox>, id: MessageId) -> bool {
    let store = inbox.store();
    let mut tx = store.begin().await.unwrap();
    let claim = inbox.try_claim(&mut tx, id).await.unwrap();
    store.rollback(tx).await.unwrap();
    claim.is_new()
}

async fn process(inbox: &Inbox<PostgresInbox>, id: MessageId) {
    let handler = async |_: &mut PostgresTx| Ok::<_, BoxError>(());
    assert!(inbox.process(id, handler).await.unwrap().may_acknowledge());
}

#[tokio::test]
async fn a_letter_comes_back_as_it_was_whatever_stands_in_it_and_however_it_is_sent() {
    let place = Place::new(2).await;
    let hostile = [
        "",
        "a\0b",
        "it's \"quoted\"; DROP TABLE effect; --",
        "\u{1f4e8} \u{301}",
        "$1 $10 {table} {letter} \\x00",
    ];
    for prepared in [true, false] {
        place.inbox().await;
        // Whatever form bytes are to have as text.
        let options = (*place.pool.connect_options())
            .clone()
            .options([("bytea_output", "escape")]);
        let builder = PostgresInbox::builder(pool_at(options, 2).await).prepared_statements(prepared);
        let inbox = Inbox::new(builder.build().unwrap(), "billing").unwrap();
        for (number, text) in hostile.into_iter().enumerate() {
            let mut letter = letter(&inbox, id(format!("{prepared} {number}")));
            letter.info.subject = text.into();
            letter.info.origin = text.into();
            letter.info.error = text.into();
            letter.info.state = DeadLetterState::OnTrial;
            letter.info.attempts = u32::MAX;
            letter.info.published_at = Some(UNIX_EPOCH + Duration::from_micros(1_796_000_000_123_457));
            letter.headers = Headers::from_iter([
                ("twice", b"1".to_vec()),
                (text, text.as_bytes().to_vec()),
                ("twice", vec![0, 0xff, 0xfe]),
                ("Twice", Vec::new()),
            ]);
            letter.payload = (0..1_u32 << 20)
                .map(|byte| (byte % 251) as u8)
                .chain([0xff, 0])
                .collect();
            keep(&inbox, &letter).await;
            let found = inbox.dead_letter(letter.info.key.id()).await.unwrap().unwrap();
            assert!(found.info.died_at > letter.info.died_at, "the store's time");
            letter.info.died_at = found.info.died_at;
            for text in [
                &mut letter.info.subject,
                &mut letter.info.origin,
                &mut letter.info.error,
            ] {
                *text = text.replace('\0', "\u{fffd}"); // PostgreSQL has no NUL
            }
            assert!(found == letter, "{:?} {:?}", found.info, letter.info);
            let listed = inbox.dead_letters(None, some(100)).await.unwrap();
            assert_eq!(
                listed.iter().find(|info| info.key == letter.info.key),
                Some(&letter.info)
            );
        }
        for (name, time, kept) in [
            ("early", UNIX_EPOCH - Duration::from_micros(1), true),
            (
                "late",
                UNIX_EPOCH + Duration::from_micros(250_000_000_000_000_001),
                true,
            ),
            ("senseless", UNIX_EPOCH + Duration::from_secs(i64::MAX as u64), false),
        ] {
            let mut odd = letter(&inbox, id(format!("{prepared} {name}")));
            odd.info.published_at = Some(time);
            keep(&inbox, &odd).await;
            let found = inbox.dead_letter(odd.info.key.id()).await.unwrap().unwrap();
            assert_eq!(found.info.published_at, kept.then_some(time), "{name}");
        }
    }
    assert_eq!(place.effects().await, 0, "the table is still there");
}

#[tokio::test]
async fn a_later_letter_takes_the_earlier_ones_place_and_a_roll_back_undoes_all_of_it() {
    let place = Place::new(2).await;
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

    for commit in [false, true] {
        let mut tx = store.begin().await.unwrap();
        for _ in 0..2 {
            store.remove_dead_letter(&mut tx, &first.info.key).await.unwrap();
        }
        if commit {
            store.commit(tx).await.unwrap();
        } else {
            store.rollback(tx).await.unwrap();
        }
        assert_eq!(inbox.dead_letter(id("a")).await.unwrap().is_none(), commit);
    }
}

#[tokio::test]
async fn letters_of_one_time_are_listed_page_by_page_without_a_gap_and_without_another_groups() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    let as_text = place.inbox_with(|builder| builder.prepared_statements(false)).await;
    let other = inbox.for_group("other").unwrap();
    let mut tx = inbox.store().begin().await.unwrap();
    for number in 0..250 {
        for inbox in [&inbox, &other] {
            let letter = letter(inbox, id(format!("message {number}")));
            inbox.store().add_dead_letter(&mut tx, &letter).await.unwrap();
        }
    }
    inbox.store().commit(tx).await.unwrap();
    place
        .sql(&format!(
            "UPDATE {TABLE} SET died_at = timestamptz '2026-12-07 08:00:00.123456+00' + \
             get_byte(uuid_send(event_id), 0) % 4 * interval '1 microsecond'"
        ))
        .await;

    let whole = inbox.dead_letters(None, some(u32::MAX)).await.unwrap();
    assert_eq!(whole.len(), 250);
    assert!(whole.is_sorted_by_key(DeadLetterInfo::place));
    for (inbox, size) in [(&inbox, 3), (&inbox, 250), (&as_text, 7)] {
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
    let farthest = Duration::from_secs(i64::MAX as u64);
    for inbox in [&inbox, &as_text] {
        for (died_at, expected) in [(UNIX_EPOCH + farthest, &[][..]), (UNIX_EPOCH - farthest, &whole[..1])] {
            let place = DeadLetterPlace { died_at, id: id("a") };
            assert_eq!(inbox.dead_letters(Some(place), some(1)).await.unwrap(), expected);
        }
    }
}

#[tokio::test]
async fn a_page_is_read_off_the_index() {
    let place = Place::new(1).await;
    place.inbox().await;
    let plan = format!(
        "SET enable_seqscan = off; SET enable_bitmapscan = off; EXPLAIN (FORMAT JSON, COSTS off) SELECT event_id FROM {TABLE} \
         WHERE consumer_group = 'g' AND (died_at, event_id) > (now(), '00000000-0000-0000-0000-000000000001') ORDER BY \
         died_at, event_id LIMIT 10"
    );
    let rows = raw_sql(AssertSqlSafe(plan)).fetch_all(&place.pool).await.unwrap();
    let plan: String = sqlx::Row::try_get_unchecked(&rows[0], 0).unwrap();
    assert!(plan.contains("Index") && !plan.contains("Sort"), "{plan}");
    assert!(plan.contains("ROW(died_at, event_id) > ROW"), "{plan}");
}

#[tokio::test]
async fn what_is_put_back_is_new_again_and_one_that_stayed_half_way_can_be_put_back_again() {
    let place = Place::new(2).await;
    for prepared in [true, false] {
        let inbox = place.inbox_with(|builder| builder.prepared_statements(prepared)).await;
        let id = id(format!("{prepared}"));
        let other = inbox.for_group("other").unwrap();
        give_up(&inbox, id).await;
        give_up(&other, id).await;
        assert!(!is_new(&inbox, id).await);

        // The program dies while it publishes.
        let error = inbox.put_back(id, async |_letter| Err("killed")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
        let found = inbox.dead_letter(id).await.unwrap().unwrap();
        assert_eq!(found.info.state, DeadLetterState::PuttingBack);
        // It had come through, and is handled.
        assert!(is_new(&inbox, id).await);
        process(&inbox, id).await;

        let publish = async |letter: &DeadLetter| {
            assert_eq!(letter.info.state, DeadLetterState::PuttingBack);
            Ok::<_, Error>(())
        };
        assert!(inbox.put_back(id, publish).await.unwrap());
        assert!(!is_new(&inbox, id).await, "its record must stand");
        assert!(!inbox.put_back(id, publish).await.unwrap());
        assert_eq!(
            other.dead_letter(id).await.unwrap().unwrap().info.state,
            DeadLetterState::Dead
        );
        assert!(!is_new(&other, id).await);
    }
}

#[tokio::test]
async fn a_letter_that_was_given_up_again_meanwhile_stays() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    give_up(&inbox, id("a")).await;
    let publish = async |_: &DeadLetter| {
        keep(&inbox, &letter(&inbox, id("a"))).await;
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("a"), publish).await.unwrap());
    let found = inbox.dead_letter(id("a")).await.unwrap().unwrap();
    assert_eq!(found.info.state, DeadLetterState::Dead);
    // Also if it is being put back by then.
    let store = inbox.store();
    let started = store.start_put_back(&found.info.key).await.unwrap().unwrap();
    let mut older = started.info.clone();
    older.died_at -= Duration::from_micros(1);
    assert!(!store.finish_put_back(&older).await.unwrap());
    assert!(store.finish_put_back(&started.info).await.unwrap());
    assert!(!store.finish_put_back(&started.info).await.unwrap());
}

#[tokio::test]
async fn a_record_that_was_made_while_putting_back_waited_is_forgotten_too() {
    let place = Place::new(4).await;
    let inbox = place.inbox().await;
    // Put back once, not finished, and now being given up again by a transaction that is open.
    give_up(&inbox, id("a")).await;
    inbox.put_back(id("a"), async |_| Err("killed")).await.unwrap_err();
    let tx = giving_up(&inbox, id("a")).await;
    let putting_back = tokio::spawn({
        let inbox = inbox.clone();
        async move {
            inbox
                .store()
                .start_put_back(&Key::new(inbox.group().clone(), id("a")))
                .await
        }
    });
    place.until_waiting(1).await;
    inbox.store().commit(tx).await.unwrap();
    let started = putting_back.await.unwrap().unwrap().unwrap();
    assert_eq!(started.info.state, DeadLetterState::PuttingBack);
    assert!(is_new(&inbox, id("a")).await, "what is put back must be handled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_who_put_back_at_once_one_forgets_the_record() {
    let place = Place::new(10).await;
    let inbox = place.inbox().await;
    for round in 0..20 {
        let id = id(format!("message {round}"));
        give_up(&inbox, id).await;
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let inbox = inbox.for_group("billing").unwrap();
            tasks.push(tokio::spawn(async move {
                let publish = async |_: &DeadLetter| {
                    process(&inbox, id).await;
                    Ok::<_, Error>(())
                };
                inbox.put_back(id, publish).await.unwrap();
                inbox.counts().claimed
            }));
        }
        let mut claimed = 0;
        for task in tasks {
            claimed += task.await.unwrap();
        }
        assert_eq!(claimed, 1, "round {round}");
        assert!(inbox.dead_letter(id).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_deleted_letter_is_gone_and_its_message_stays_processed() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    give_up(&inbox, id("a")).await;
    give_up(&inbox, id("b")).await;
    assert!(inbox.delete_dead_letter(id("a")).await.unwrap());
    assert!(!inbox.delete_dead_letter(id("a")).await.unwrap());
    assert!(!is_new(&inbox, id("a")).await);
    assert!(inbox.dead_letter(id("b")).await.unwrap().is_some());
}

/// The inbox's table as the version before dead letters made it, and as nats-outbox makes it.
const FORMER: [&str; 2] = [
    "CREATE TABLE inbox_events (event_id uuid NOT NULL, processed_at timestamptz NOT NULL DEFAULT clock_timestamp(), \
     consumer_group text COLLATE \"C\" NOT NULL, fingerprint uuid, PRIMARY KEY (event_id, consumer_group)); CREATE INDEX ON \
     inbox_events (consumer_group, date_trunc('minute', processed_at AT TIME ZONE 'UTC')); COMMENT ON TABLE inbox_events IS \
     'inbox-pattern schema 1'",
    "CREATE TABLE inbox_events (id bigserial PRIMARY KEY, event_id uuid NOT NULL, consumer_group text NOT NULL, processed_at \
     timestamptz NOT NULL DEFAULT now(), fingerprint uuid, UNIQUE (event_id, consumer_group)); CREATE INDEX ON inbox_events \
     (consumer_group, date_trunc('minute', processed_at AT TIME ZONE 'UTC'))",
];

#[tokio::test]
async fn an_inbox_without_dead_letters_works_until_set_up_makes_their_table() {
    for former in FORMER {
        let place = Place::new(12).await;
        place.sql(former).await;
        let inbox = Inbox::new(PostgresInbox::new(place.pool.clone()), "billing").unwrap();
        process(&inbox, id("a")).await;
        let health = inbox.check().await.unwrap();
        assert!(health.is_sound(), "{health}");
        let warned =
            |finding: &&inbox_core::Finding| finding.what.contains(TABLE) && finding.severity == Severity::Warning;
        assert_eq!(health.findings().iter().filter(warned).count(), 1, "{health}");

        let store = inbox.store();
        let key = Key::new(inbox.group().clone(), id("a"));
        let mut tx = store.begin().await.unwrap();
        let adding = store.add_dead_letter(&mut tx, &letter(&inbox, id("a"))).await;
        store.rollback(tx).await.unwrap();
        for error in [
            adding.unwrap_err(),
            store.find_dead_letter(&key).await.unwrap_err(),
            inbox.dead_letters(None, some(1)).await.unwrap_err(),
            store.start_put_back(&key).await.unwrap_err(),
            store.delete_dead_letter(&key).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
            assert!(
                error.to_string().contains(TABLE) && error.to_string().contains("`setup`"),
                "{error}"
            );
        }

        let tasks: Vec<_> = (0..10)
            .map(|_| {
                let store = PostgresInbox::new(place.pool.clone());
                tokio::spawn(async move { store.setup().await })
            })
            .collect();
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        let health = inbox.check().await.unwrap();
        assert!(health.findings().is_empty(), "{health}");
        assert!(!is_new(&inbox, id("a")).await, "the records are kept");
        give_up(&inbox, id("b")).await;
        assert!(inbox.dead_letter(id("b")).await.unwrap().is_some());
    }
}

#[tokio::test]
async fn a_role_that_may_not_make_the_table_is_told_the_sql_that_is_missing() {
    let place = Place::new(2).await;
    place.sql(FORMER[0]).await;
    let role = format!("r_{}", place.schema);
    place
        .sql(&format!(
            "CREATE ROLE {role} LOGIN PASSWORD 'x'; GRANT USAGE ON SCHEMA {} TO {role}; GRANT SELECT, INSERT, UPDATE, DELETE ON \
             inbox_events TO {role}",
            place.schema
        ))
        .await;
    let options = (*place.pool.connect_options()).clone().username(&role).password("x");
    let inbox = Inbox::new(PostgresInbox::new(pool_at(options, 2).await), "billing").unwrap();
    let error = inbox.setup().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    process(&inbox, id("a")).await; // goes on meanwhile
    let text = error.to_string();
    let (_, sql) = text.split_once(":\n").unwrap();
    assert!(!sql.contains("CREATE TABLE \"inbox_events\" "), "{sql}");
    place.sql(sql).await;
    place
        .sql(&format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {TABLE} TO {role}"))
        .await;
    inbox.setup().await.unwrap();
    let health = inbox.check().await.unwrap();
    assert!(health.findings().is_empty(), "{health}");
    give_up(&inbox, id("b")).await;
    place.sql(&format!("DROP OWNED BY {role}; DROP ROLE {role}")).await;
}

#[tokio::test]
async fn the_table_stands_in_the_schema_of_the_inbox_that_the_search_path_leads_to() {
    let place = Place::new(2).await;
    place.sql(FORMER[0]).await;
    let first = format!("{}_first", place.schema);
    place.sql(&format!("CREATE SCHEMA {first}")).await;
    let path = format!("{first},{}", place.schema);
    let options = (*place.pool.connect_options())
        .clone()
        .options([("search_path", &path)]);
    let inbox = Inbox::new(PostgresInbox::new(pool_at(options, 2).await), "billing").unwrap();
    inbox.setup().await.unwrap();
    give_up(&inbox, id("a")).await;
    assert_eq!(place.number(&format!("SELECT count(*) FROM {TABLE}")).await, 1);
    place.sql(&format!("DROP SCHEMA {first}")).await; // nothing is in it
}

#[tokio::test]
async fn check_and_set_up_say_what_is_wrong_with_the_table() {
    for (alter, word, mended) in [
        (format!("ALTER TABLE {TABLE} DROP COLUMN origin"), "origin", false),
        (
            format!("ALTER TABLE {TABLE} ALTER attempts TYPE int"),
            "attempts",
            false,
        ),
        (format!("ALTER TABLE {TABLE} ADD more int NOT NULL"), "more", false),
        (
            format!("ALTER TABLE {TABLE} DROP CONSTRAINT {TABLE}_pkey"),
            "unique key",
            false,
        ),
        (
            format!("DROP TABLE {TABLE}; CREATE VIEW {TABLE} AS SELECT 1"),
            "no table",
            false,
        ),
        (format!("DROP TABLE {TABLE}"), "does not exist", true),
    ] {
        let place = Place::new(1).await;
        let inbox = place.inbox().await;
        place.sql(&alter).await;
        let health = inbox.check().await.unwrap();
        assert_eq!(health.is_sound(), mended, "{alter}: {health}");
        let [finding] = health.findings() else {
            panic!("{alter}: {health}")
        };
        assert!(
            finding.what.contains(TABLE) && finding.what.contains(word),
            "{alter}: {health}"
        );
        match inbox.setup().await {
            Ok(()) => assert!(mended && inbox.check().await.unwrap().findings().is_empty(), "{alter}"),
            Err(error) => {
                assert!(!mended, "{alter}: {error}");
                assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
                assert!(error.to_string().contains(word), "{alter}: {error}");
            }
        }
        process(&inbox, id("a")).await; // claims go on
    }
    for (alter, word, sound) in [
        (format!("ALTER TABLE {TABLE} SET UNLOGGED"), "unlogged", false),
        (
            format!("DROP INDEX {TABLE}_consumer_group_died_at_event_id_idx"),
            "index",
            true,
        ),
    ] {
        let place = Place::new(1).await;
        let inbox = place.inbox().await;
        place.sql(&alter).await;
        let health = inbox.check().await.unwrap();
        let [finding] = health.findings() else {
            panic!("{alter}: {health}")
        };
        assert!(
            finding.what.contains(word) && health.is_sound() == sound,
            "{alter}: {health}"
        );
        place.sql(&finding.remedy).await;
        assert!(inbox.check().await.unwrap().findings().is_empty(), "{alter}");
    }
}

#[tokio::test]
async fn what_somebody_wrote_into_the_table_is_an_error_that_says_so() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    for (column, value) in [("state", "'odd'"), ("headers", "'{}'")] {
        give_up(&inbox, id(column)).await;
        place.sql(&format!("UPDATE {TABLE} SET {column} = {value}")).await;
        let error = inbox.dead_letter(id(column)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Store, "{error}");
        assert!(inbox.delete_dead_letter(id(column)).await.unwrap());
    }
    give_up(&inbox, id("time")).await;
    place
        .sql(&format!(
            "UPDATE {TABLE} SET died_at = 'infinity', published_at = '-infinity', attempts = -1"
        ))
        .await;
    let found = inbox.dead_letter(id("time")).await.unwrap().unwrap().info;
    assert_eq!(
        (found.died_at, found.published_at, found.attempts),
        (UNIX_EPOCH, None::<SystemTime>, 0)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poison_message_in_a_batch_is_one_letter_which_outlives_a_crash_and_put_back_is_handled_once() {
    let mut server = Postgres::start();
    let place = Place::at(&server.url(), 4).await;
    let inbox = place.inbox().await.with_retry(RetryPolicy::never());
    assert_eq!(inbox.store().max_transactions(), NonZeroUsize::new(4));
    let broker = MemoryBroker::new();
    for n in 1..=100 {
        broker.publish("orders", &format!("order-{n}"), format!("{n}"));
    }
    let bad = Arc::new(AtomicBool::new(true));
    let run = async || {
        let bad = Arc::clone(&bad);
        let handler = async move |tx: &mut PostgresTx, message: &MemoryMessage| {
            if message.sequence == 37 && bad.load(Ordering::Relaxed) {
                return Err(Error::poison("cannot be read").into());
            }
            let name = std::str::from_utf8(&message.payload)?;
            let insert = sqlx::query("INSERT INTO effect VALUES ($1)").bind(name);
            insert.execute(&mut **tx).await?;
            Ok::<_, BoxError>(())
        };
        let options = ConsumerOptions::new().batch(NonZeroUsize::new(100).unwrap());
        let consumer = Consumer::new(broker.clone(), inbox.clone(), handler).with(options);
        consumer.run(broker.drained()).await.unwrap()
    };
    let summary = run().await;
    assert_eq!((summary.handled, summary.dead_letters), (99, 1), "{summary}");
    assert_eq!(place.effects().await, 99);

    let crash = |server: &mut Postgres| {
        tokio::task::block_in_place(|| {
            server.stop(Stop::Immediate);
            server.start_again();
        });
    };
    crash(&mut server);
    let inbox = place_after(&server, &place).await;
    let letters = inbox.dead_letters(None, some(10)).await.unwrap();
    let [info] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((info.state, info.subject.as_str()), (DeadLetterState::Dead, "orders"));
    assert!(info.error.contains("cannot be read"), "{}", info.error);

    // The server dies between the two steps, after the message was published.
    bad.store(false, Ordering::Relaxed);
    let publish = async |letter: &DeadLetter| {
        broker.publish_with_headers(&letter.info.subject, letter.headers.clone(), letter.payload.clone());
        Ok::<_, Error>(())
    };
    let error = inbox
        .put_back(id("order-37"), async |letter| {
            publish(letter).await?;
            tokio::task::block_in_place(|| server.stop(Stop::Immediate));
            Ok::<_, Error>(())
        })
        .await
        .unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
    tokio::task::block_in_place(|| server.start_again());
    let inbox = place_after(&server, &place).await;
    let found = inbox.dead_letter(id("order-37")).await.unwrap().unwrap();
    assert_eq!(found.info.state, DeadLetterState::PuttingBack);
    assert!(inbox.put_back(id("order-37"), publish).await.unwrap());
    let summary = run().await;
    assert_eq!((summary.handled, summary.duplicates), (1, 1), "{summary}");
    let handled = "SELECT count(*) FROM effect WHERE id = '37'";
    assert_eq!(place.number(handled).await, 1);
    assert!(inbox.dead_letters(None, some(10)).await.unwrap().is_empty());
}

/// On connections of its own: those of the pool may be dead.
async fn place_after(server: &Postgres, place: &Place) -> Inbox<PostgresInbox> {
    let pool = pool_at(crate::place::options(&server.url(), &place.schema), 2).await;
    Inbox::new(PostgresInbox::new(pool), "billing").unwrap()
}

#[tokio::test]
async fn a_server_short_of_a_resource_is_a_passing_error() {
    let place = Place::new(2).await;
    let inbox = place.inbox().await;
    // A real one: a sort that outgrows the temporary files that it may have.
    let mut tx = inbox.store().begin().await.unwrap();
    let sort = "SET LOCAL work_mem = '64kB'; SET LOCAL temp_file_limit = '64kB'; SELECT count(*) FROM (SELECT n FROM \
                generate_series(1, 100000) n ORDER BY md5(n::text)) sorted";
    let error = raw_sql(sort).execute(&mut *tx).await.unwrap_err();
    assert_eq!(inbox.store().classify(&error), Some(ErrorKind::Unavailable), "{error}");
    drop(tx);
    // A full disk, as a claim would meet it.
    place
        .sql(
            "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no space left on \
             device' USING ERRCODE = 'disk_full'; END $$; CREATE TRIGGER full_disk BEFORE INSERT ON inbox_events FOR EACH ROW \
             EXECUTE FUNCTION full_disk()",
        )
        .await;
    let mut tx = inbox.store().begin().await.unwrap();
    let error = inbox.try_claim(&mut tx, id("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.is_retryable() && error.to_string().contains("disk"), "{error}");
}
