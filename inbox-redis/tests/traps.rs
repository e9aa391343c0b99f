//! Faults that inboxes on Redis have met in the field, each as a test, on a real server.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Proxy, Site, id};
use inbox_core::{BoxError, Claim, ErrorKind, InboxStore, Key, Outcome, RetryPolicy, Transactions, Upkeep};
use inbox_redis::redis::{Client, cmd, pipe};
use inbox_redis::{Flushed, RedisInbox, WaitFor};
use inbox_test_servers::Redis;

#[tokio::test]
async fn effects_run_only_if_the_claim_won() {
    let site = Site::new().await;
    let store = site.inbox.store();
    let group = site.inbox.group();
    // Both look while there is nothing: both are told New, and one of them commits.
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    for tx in [&mut first, &mut second] {
        assert_eq!(store.try_claim(tx, group, id("a").into()).await.unwrap(), Claim::New);
        tx.pipe().incr(site.effect("a"), 1);
    }
    store.commit(second).await.unwrap();
    let error = store.commit(first).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict, "{error}");
    assert!(error.is_retryable());
    assert_eq!(site.effects("a").await, 1);
    assert!(site.handle("a").await.unwrap().may_acknowledge());
    assert_eq!(site.effects("a").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_64_tasks_on_200_keys_one_commits_each() {
    let site = Arc::new(Site::new().await);
    let conflicts = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for task in 0..64 {
        let (site, conflicts) = (Arc::clone(&site), Arc::clone(&conflicts));
        tasks.push(tokio::spawn(async move {
            let once = site.inbox.clone().with_retry(RetryPolicy::never());
            for key in 0..25 {
                let name = format!("k{}", (key * 8 + task) % 200);
                loop {
                    let handled = once.process(id(&name), async |tx| {
                        tx.pipe().incr(site.effect(&name), 1);
                        tokio::task::yield_now().await;
                        Ok::<_, BoxError>(())
                    });
                    match handled.await {
                        Ok(outcome) if outcome.may_acknowledge() => break,
                        Ok(_) => {}
                        Err(error) if error.kind() == ErrorKind::Conflict => {
                            conflicts.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    for key in 0..200 {
        assert_eq!(site.effects(&format!("k{key}")).await, 1, "k{key}");
    }
    println!("{} conflicts were retried", conflicts.load(Ordering::Relaxed));
}

#[tokio::test]
async fn a_connection_that_somebody_else_uses_too_is_a_loud_error() {
    let site = Site::new().await;
    let client = Client::open(site.url.as_str()).unwrap();
    let shared = client.get_multiplexed_async_connection().await.unwrap();
    let store = site.inbox.store();
    let mut tx = store.begin_on(shared.clone()).await.unwrap();
    assert!(
        store
            .try_claim(&mut tx, site.inbox.group(), id("a").into())
            .await
            .unwrap()
            .is_new()
    );
    // The trap: a clone's EXEC ends our watch, and another client takes the key.
    let mut clone = shared;
    pipe()
        .atomic()
        .set(site.effect("other"), 1)
        .exec_async(&mut clone)
        .await
        .unwrap();
    assert!(site.handle("a").await.unwrap().may_acknowledge());
    let error = store.commit(tx).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Store, "{error}");
    assert!(error.to_string().contains("connection"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_the_pool_are_nobody_elses() {
    let site = Site::new().await;
    let store = site.inbox.store();
    for round in 0..200 {
        let name = format!("r{round}");
        let mut tx = store.begin().await.unwrap();
        assert!(
            store
                .try_claim(&mut tx, site.inbox.group(), id(&name).into())
                .await
                .unwrap()
                .is_new()
        );
        tx.pipe().incr(site.effect(&name), 1);
        // Other transactions of the same pool commit meanwhile, one of them the same message.
        assert!(site.handle(&format!("other-{round}")).await.unwrap().may_acknowledge());
        assert!(site.handle(&name).await.unwrap().may_acknowledge());
        assert_eq!(store.commit(tx).await.unwrap_err().kind(), ErrorKind::Conflict);
        assert_eq!(site.effects(&name).await, 1);
    }
}

#[tokio::test]
async fn a_command_that_the_server_refuses_voids_all_and_is_named() {
    let site = Site::new().await;
    let refused = site
        .inbox
        .process(id("a"), async |tx| {
            let counter = site.effect("a");
            tx.pipe().incr(&counter, 1).cmd("SET").arg("only-one-argument");
            Ok::<_, BoxError>(())
        })
        .await
        .unwrap_err();
    assert!(refused.to_string().contains("SET only-one-argument"), "{refused}");
    assert!(!refused.is_retryable());
    assert_eq!(site.effects("a").await, 0);
    assert!(site.inbox.find(id("a")).await.unwrap().is_none());
    assert!(matches!(site.handle("a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn a_command_that_fails_when_run_is_reported_and_the_record_taken_back() {
    let site = Site::new().await;
    let text = site.effect("text");
    site.run(cmd("SET").arg(&text).arg("a string")).await;
    let failed = site
        .inbox
        .process(id("a"), async |tx| {
            tx.pipe().incr(site.effect("a"), 1).lpush(&text, 1);
            Ok::<_, BoxError>(())
        })
        .await
        .unwrap_err();
    assert!(failed.to_string().contains("LPUSH"), "{failed}");
    assert!(failed.to_string().contains("does not undo"), "{failed}");
    assert_eq!(failed.kind(), ErrorKind::Store);
    // What ran before it stays, as the documentation says; the message comes again.
    assert_eq!(site.effects("a").await, 1);
    assert!(site.inbox.find(id("a")).await.unwrap().is_none());
    assert!(matches!(site.handle("a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn commands_that_would_end_the_transaction_are_refused_before_anything_is_sent() {
    let site = Site::new().await;
    for name in ["EXEC", "multi", "DISCARD", "UNWATCH"] {
        let error = site
            .inbox
            .process(id("a"), async |tx| {
                tx.pipe().cmd(name);
                Ok::<_, BoxError>(())
            })
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        let error = site
            .inbox
            .process(id("a"), async |tx| tx.query::<()>(&cmd(name)).await)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    assert!(site.inbox.find(id("a")).await.unwrap().is_none());
}

#[tokio::test]
async fn a_watched_business_key_that_somebody_touches_is_a_conflict() {
    let site = Site::new().await;
    let stock = site.effect("stock");
    site.run(cmd("SET").arg(&stock).arg(1)).await;
    let tries = AtomicU32::new(0);
    let outcome = site
        .inbox
        .process(id("a"), async |tx| {
            tx.watch(&stock).await?;
            let left: i64 = tx.query(cmd("GET").arg(&stock)).await?;
            if tries.fetch_add(1, Ordering::Relaxed) == 0 {
                site.run(cmd("SET").arg(&stock).arg(5)).await;
            }
            tx.pipe().set(&stock, left - 1);
            Ok::<_, inbox_core::Error>(left)
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(5));
    assert_eq!(tries.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_claim_is_one_command_with_a_time_to_live() {
    let site = Site::new().await;
    let _ = site.handle("a").await.unwrap();
    let _ = site.inbox.store().claim_now(site.inbox.group(), id("b")).await.unwrap();
    for name in ["a", "b"] {
        let key = site.inbox.store().key(site.inbox.group(), id(name));
        let left: i64 = site.ask(cmd("PTTL").arg(&key)).await;
        let week = 7 * 24 * 60 * 60 * 1000;
        assert!(left > week - 60_000 && left <= week, "{left}");
        let value: String = site.ask(cmd("GET").arg(&key)).await;
        assert!(value.starts_with("20") && value.contains("Z claim="), "{value}");
    }
}

#[tokio::test]
async fn a_connection_killed_between_claim_and_commit_writes_nothing() {
    let site = Site::new().await;
    let store = site.inbox.store();
    for round in 0..20 {
        let name = format!("r{round}");
        let mut tx = store.begin().await.unwrap();
        let number: i64 = tx.query(cmd("CLIENT").arg("ID")).await.unwrap();
        assert!(
            store
                .try_claim(&mut tx, site.inbox.group(), id(&name).into())
                .await
                .unwrap()
                .is_new()
        );
        tx.pipe().incr(site.effect(&name), 1);
        site.run(cmd("CLIENT").arg("KILL").arg("ID").arg(number)).await;
        let error = store.commit(tx).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(site.effects(&name).await, 0);
        assert!(matches!(site.handle(&name).await, Ok(Outcome::Processed(()))));
        assert_eq!(site.effects(&name).await, 1);
    }
}

#[tokio::test]
async fn connections_that_died_idle_are_exchanged_and_nothing_is_noticed() {
    // On a server of its own: it kills everybody's connections.
    let server = Redis::start(&Redis::DURABLE);
    let site = Site::on(&server.url()).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(site.inbox.store().begin().await.unwrap());
    }
    drop(open);
    let once = site.inbox.clone().with_retry(RetryPolicy::never());
    for round in 0..10 {
        site.run(
            cmd("CLIENT")
                .arg("KILL")
                .arg("TYPE")
                .arg("normal")
                .arg("SKIPME")
                .arg("yes"),
        )
        .await;
        let outcome = once
            .process(id(&format!("r{round}")), async |_tx| Ok::<_, BoxError>(()))
            .await;
        assert!(matches!(outcome, Ok(Outcome::Processed(()))), "{outcome:?}");
    }
}

/// The link is cut at some moment of the commit's exchange: before, in or after it. What the caller was told is what the
/// server holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_cut_at_a_random_moment_of_the_commit_leaves_the_caller_with_the_truth() {
    let server = Redis::start(&Redis::DURABLE);
    let site = Site::on(&server.url()).await;
    let (mut committed, mut failed) = (0, 0);
    for round in 0..200_u64 {
        let proxy = Proxy::start(server.port()).await;
        let through = site.through(&proxy).await;
        let name = format!("r{round}");
        let mut tx = through.begin().await.unwrap();
        assert!(
            through
                .try_claim(&mut tx, site.inbox.group(), id(&name).into())
                .await
                .unwrap()
                .is_new()
        );
        tx.pipe().incr(site.effect(&name), 1);
        // After so many further bytes, of either direction, the proxy cuts this connection and takes new ones.
        proxy.cut_after(round * 7 % 420);
        match through.commit(tx).await {
            Ok(()) => {
                committed += 1;
                assert_eq!(site.effects(&name).await, 1, "round {round}");
            }
            Err(error) => {
                failed += 1;
                assert_eq!(error.kind(), ErrorKind::Unavailable, "round {round}: {error}");
                assert_eq!(site.effects(&name).await, 0, "round {round}: {error}");
            }
        }
        let record = site.inbox.find(id(&name)).await.unwrap();
        assert_eq!(i64::from(record.is_some()), site.effects(&name).await, "round {round}");
        assert!(site.handle(&name).await.unwrap().may_acknowledge());
        assert_eq!(site.effects(&name).await, 1, "round {round}");
    }
    assert!(committed > 0 && failed > 0, "{committed} committed, {failed} failed");
}

#[tokio::test]
async fn a_commit_that_the_server_holds_up_is_found_out_and_cannot_happen_later() {
    let server = Redis::start(&Redis::DURABLE);
    let site = Site::on(&server.url()).await;
    let store = site
        .with(RedisInbox::builder().response_timeout(Duration::from_millis(200)))
        .await;
    for round in 0..5 {
        let name = format!("r{round}");
        let mut tx = store.begin().await.unwrap();
        assert!(
            store
                .try_claim(&mut tx, site.inbox.group(), id(&name).into())
                .await
                .unwrap()
                .is_new()
        );
        tx.pipe().incr(site.effect(&name), 1);
        site.run(cmd("CLIENT").arg("PAUSE").arg(350).arg("WRITE")).await;
        let told = store.commit(tx).await;
        let happened = site.effects(&name).await;
        match &told {
            Ok(()) => assert_eq!(happened, 1, "round {round}"),
            Err(error) if error.kind() == ErrorKind::Unavailable => assert_eq!(happened, 0, "round {round}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "round {round}: {error}"),
        }
        site.run(cmd("CLIENT").arg("UNPAUSE")).await;
        assert!(site.handle(&name).await.unwrap().may_acknowledge());
        assert_eq!(site.effects(&name).await, 1, "round {round}: told {told:?}");
    }
}

#[tokio::test]
async fn a_claim_by_itself_whose_answer_was_lost_recognises_its_own_record() {
    let server = Redis::start(&Redis::DURABLE);
    let site = Site::on(&server.url()).await;
    let store = site
        .with(RedisInbox::builder().response_timeout(Duration::from_millis(200)))
        .await;
    site.run(cmd("CLIENT").arg("PAUSE").arg(300).arg("WRITE")).await;
    let claim = store.claim_now(site.inbox.group(), id("a")).await.unwrap();
    assert_eq!(claim, Claim::New);
    assert!(
        store
            .claim_now(site.inbox.group(), id("a"))
            .await
            .unwrap()
            .is_duplicate()
    );
}

#[tokio::test]
async fn futures_dropped_at_any_moment_leave_neither_halves_nor_watches() {
    let site = Site::new().await;
    for round in 0..300_u64 {
        let name = format!("m{}", round % 50);
        let handled = site.inbox.process(id(&name), async |tx| {
            tx.pipe().incr(site.effect(&name), 1);
            tokio::task::yield_now().await;
            Ok::<_, BoxError>(())
        });
        let _ = tokio::time::timeout(Duration::from_micros(round * 13 % 900), handled).await;
    }
    for message in 0..50 {
        let name = format!("m{message}");
        assert!(site.handle(&name).await.unwrap().may_acknowledge());
        assert_eq!(site.effects(&name).await, 1, "{name}");
    }
}

#[tokio::test]
async fn a_dropped_transaction_leaves_no_watch_on_a_connection_that_goes_back() {
    let site = Site::new().await;
    let store = site
        .with(RedisInbox::builder().pool_size(const { std::num::NonZeroUsize::new(1).unwrap() }))
        .await;
    for end in ["drop", "rollback", "duplicate"] {
        let name = format!("a-{end}");
        let mut tx = store.begin().await.unwrap();
        assert!(
            store
                .try_claim(&mut tx, site.inbox.group(), id(&name).into())
                .await
                .unwrap()
                .is_new()
        );
        if end == "drop" {
            drop(tx);
        } else {
            store.rollback(tx).await.unwrap();
        }
        // Had the next transaction that watch, it would conflict.
        let mut tx = store.begin().await.unwrap();
        assert!(site.handle(&name).await.unwrap().may_acknowledge());
        assert!(
            store
                .try_claim(&mut tx, site.inbox.group(), id(&format!("b-{end}")).into())
                .await
                .unwrap()
                .is_new()
        );
        store.commit(tx).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_killed_and_restarted_forgets_and_doubles_nothing_it_acknowledged() {
    let mut server = Redis::start(&Redis::DURABLE);
    let site = Arc::new(Site::on(&server.url()).await);
    let done = Arc::new(AtomicU32::new(0));
    let mut tasks = Vec::new();
    for task in 0..4 {
        let (site, done) = (Arc::clone(&site), Arc::clone(&done));
        tasks.push(tokio::spawn(async move {
            for message in 0..150 {
                let name = format!("{task}-{message}");
                loop {
                    match site.handle(&name).await {
                        Ok(outcome) if outcome.may_acknowledge() => break,
                        Ok(_) => {}
                        Err(error) => assert!(error.is_retryable(), "{error:?}"),
                    }
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    for stage in [100, 250, 400] {
        while done.load(Ordering::Relaxed) < stage {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        server.kill();
        server.start_again();
    }
    for task in tasks {
        task.await.unwrap();
    }
    for task in 0..4 {
        for message in 0..150 {
            let name = format!("{task}-{message}");
            assert_eq!(site.effects(&name).await, 1, "{name}");
            assert!(site.inbox.find(id(&name)).await.unwrap().is_some(), "{name}");
        }
    }
}

#[tokio::test]
async fn a_record_that_expires_between_look_and_commit_gives_no_wrong_answer() {
    let site = Site::new().await;
    let brief = site
        .with(RedisInbox::builder().retention(Duration::from_millis(30)))
        .await;
    let store = site.inbox.store();
    // Another consumer's record comes and goes after our look: the watch has seen it.
    let mut tx = store.begin().await.unwrap();
    assert!(
        store
            .try_claim(&mut tx, site.inbox.group(), id("a").into())
            .await
            .unwrap()
            .is_new()
    );
    tx.pipe().incr(site.effect("a"), 1);
    let mut other = brief.begin().await.unwrap();
    assert!(
        brief
            .try_claim(&mut other, site.inbox.group(), id("a").into())
            .await
            .unwrap()
            .is_new()
    );
    brief.commit(other).await.unwrap();
    let key = Key::new(site.inbox.group().clone(), id("a"));
    while brief.find(&key).await.unwrap().is_some() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(store.commit(tx).await.unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(site.effects("a").await, 0);

    // A duplicate that expires after it was seen stays a duplicate to this transaction.
    let mut other = brief.begin().await.unwrap();
    assert!(
        brief
            .try_claim(&mut other, site.inbox.group(), id("b").into())
            .await
            .unwrap()
            .is_new()
    );
    brief.commit(other).await.unwrap();
    let mut tx = store.begin().await.unwrap();
    let claim = store
        .try_claim(&mut tx, site.inbox.group(), id("b").into())
        .await
        .unwrap();
    assert!(!claim.is_in_flight());
    store.rollback(tx).await.unwrap();
}

#[tokio::test]
async fn in_a_cluster_the_tag_keeps_a_transaction_in_one_slot() {
    let server = Redis::start(&["--cluster-enabled", "yes"]);
    let site = Site::cluster(&server).await;
    let tagged = site.with(RedisInbox::builder().tag("billing")).await;
    let plain = site.with(RedisInbox::builder()).await;
    let deliveries = [id("a").into(), id("b").into()];

    let mut tx = tagged.begin().await.unwrap();
    let claims = tagged
        .try_claim_batch(&mut tx, site.inbox.group(), &deliveries)
        .await
        .unwrap();
    assert!(claims.iter().all(Claim::is_new));
    tx.watch("{billing}:watched").await.unwrap();
    let error = tx.watch("{other}:watched").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    tx.pipe().incr("{billing}:invoices", 2);
    tagged.commit(tx).await.unwrap();
    assert_eq!(site.ask::<i64>(cmd("GET").arg("{billing}:invoices")).await, 2);

    let mut tx = plain.begin().await.unwrap();
    let error = plain
        .try_claim_batch(&mut tx, site.inbox.group(), &deliveries)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.to_string().contains("tag"), "{error}");
    drop(tx);

    // An effect in another slot: the server refuses it, and with it all.
    let mut tx = tagged.begin().await.unwrap();
    assert!(
        tagged
            .try_claim(&mut tx, site.inbox.group(), id("c").into())
            .await
            .unwrap()
            .is_new()
    );
    tx.pipe().incr("elsewhere", 1);
    let error = tagged.commit(tx).await.unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unsupported),
        "{error:?}"
    );
    let key = Key::new(site.inbox.group().clone(), id("c"));
    assert!(tagged.find(&key).await.unwrap().is_none());
}

#[tokio::test]
async fn check_says_what_would_break_the_guarantee() {
    let durable = Redis::start(&Redis::DURABLE);
    let site = Site::on(&durable.url()).await;
    assert_eq!(site.inbox.check().await.unwrap().findings(), []);

    site.run(cmd("CONFIG").arg("SET").arg("maxmemory-policy").arg("volatile-lru"))
        .await;
    let health = site.inbox.check().await.unwrap();
    assert!(
        health.is_sound() && health.to_string().contains("volatile-lru"),
        "{health}"
    );
    site.run(cmd("CONFIG").arg("SET").arg("maxmemory").arg("100mb")).await;
    let health = site.inbox.check().await.unwrap();
    assert!(
        !health.is_sound() && health.to_string().contains("volatile-lru"),
        "{health}"
    );
    site.run(cmd("CONFIG").arg("SET").arg("maxmemory").arg(0)).await;
    site.run(cmd("CONFIG").arg("SET").arg("maxmemory-policy").arg("noeviction"))
        .await;

    site.run(cmd("CONFIG").arg("SET").arg("appendfsync").arg("everysec"))
        .await;
    assert!(!site.inbox.check().await.unwrap().is_sound());
    let content = site.with(RedisInbox::builder().flushed(Flushed::EverySecond)).await;
    assert!(content.check().await.unwrap().is_sound());

    // As a user who may run what claims need, and may not look.
    site.run(cmd("ACL").arg(&[
        "SETUSER", "worker", "on", ">secret", "~*", "+@all", "-config", "-info", "-client",
    ]))
    .await;
    let url = durable.url().replace("redis://", "redis://worker:secret@");
    let worker = RedisInbox::connect(url.as_str()).await.unwrap();
    let health = worker.check().await.unwrap();
    assert!(
        health.is_sound() && health.to_string().contains("forbidden"),
        "{health}"
    );
    let wrong = durable.url().replace("redis://", "redis://worker:wrong@");
    let error = RedisInbox::connect(wrong.as_str()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[tokio::test]
async fn a_replica_is_found_out_and_what_it_refuses_is_retryable() {
    let primary = Redis::start(&Redis::DURABLE);
    let port = primary.port().to_string();
    let replica = Redis::start(&["--replicaof", "127.0.0.1", &port]);
    let site = Site::on(&replica.url()).await;
    let health = site.inbox.check().await.unwrap();
    assert!(!health.is_sound() && health.to_string().contains("replica"), "{health}");
    let once = site.inbox.clone().with_retry(RetryPolicy::never());
    let error = once
        .process(id("a"), async |_tx| Ok::<_, BoxError>(()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");

    // And the primary can be told to wait for it.
    let site = Site::on(&primary.url()).await;
    let within = Duration::from_secs(30);
    let patient = site
        .with(RedisInbox::builder().wait_for(WaitFor::Replicas { count: 1, within }))
        .await;
    let mut tx = patient.begin().await.unwrap();
    assert!(
        patient
            .try_claim(&mut tx, site.inbox.group(), id("b").into())
            .await
            .unwrap()
            .is_new()
    );
    patient.commit(tx).await.unwrap();
    let within = Duration::from_millis(50);
    let greedy = site
        .with(RedisInbox::builder().wait_for(WaitFor::Replicas { count: 2, within }))
        .await;
    let mut tx = greedy.begin().await.unwrap();
    assert!(
        greedy
            .try_claim(&mut tx, site.inbox.group(), id("c").into())
            .await
            .unwrap()
            .is_new()
    );
    let error = greedy.commit(tx).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{error}");
    // It did happen, and the next delivery finds it.
    assert!(matches!(site.handle("c").await, Ok(Outcome::Duplicate(_))));
}

#[tokio::test]
async fn no_memory_left_voids_all_and_is_retryable() {
    let server = Redis::start(&Redis::DURABLE);
    let site = Site::on(&server.url()).await;
    let once = site.inbox.clone().with_retry(RetryPolicy::never());
    site.run(cmd("CONFIG").arg("SET").arg("maxmemory").arg("1mb")).await;
    let error = once
        .process(id("a"), async |tx| {
            tx.pipe().incr(site.effect("a"), 1);
            Ok::<_, BoxError>(())
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    site.run(cmd("CONFIG").arg("SET").arg("maxmemory").arg(0)).await;
    assert_eq!(site.effects("a").await, 0);
    assert!(matches!(site.handle("a").await, Ok(Outcome::Processed(()))));
}

#[tokio::test]
async fn a_foreign_value_in_a_records_place_is_an_error_and_never_a_duplicate() {
    let site = Site::new().await;
    let key = site.inbox.store().key(site.inbox.group(), id("a"));
    site.run(cmd("SET").arg(&key).arg("1")).await;
    let error = site.handle("a").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Schema, "{error}");
    assert_eq!(site.effects("a").await, 0);
}

#[tokio::test]
async fn a_transaction_inside_a_handler_is_an_error_and_not_a_deadlock() {
    let site = Site::new().await;
    let builder = RedisInbox::builder()
        .pool_size(const { std::num::NonZeroUsize::new(1).unwrap() })
        .pool_timeout(Duration::from_millis(50));
    let store = site.with(builder).await;
    let outer = store.begin().await.unwrap();
    let error = store.begin().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("inside a handler"), "{error}");
    drop(outer);
    drop(store.begin().await.unwrap());
}

#[tokio::test]
async fn wrong_urls_and_settings_are_refused() {
    for url in ["", "nonsense", "http://localhost/", "redis://127.0.0.1:notaport/"] {
        let error = RedisInbox::connect(url).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}: {error}");
    }
    let error = RedisInbox::connect("redis://127.0.0.1:1/").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let url = inbox_test_servers::redis_url();
    for builder in [
        RedisInbox::builder().prefix(""),
        RedisInbox::builder().prefix("a{b}"),
        RedisInbox::builder().tag("}"),
        RedisInbox::builder().retention(Duration::ZERO),
        RedisInbox::builder().retention(Duration::MAX),
    ] {
        let error = builder.connect(url.as_str()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
}

#[tokio::test]
async fn another_payload_under_the_same_id_is_found_out() {
    let site = Site::new().await;
    let handler = async |_tx: &mut inbox_redis::RedisTx| Ok::<_, BoxError>(());
    assert!(matches!(
        site.inbox.process(id("a").with_payload("x"), handler).await,
        Ok(Outcome::Processed(()))
    ));
    assert!(matches!(
        site.inbox.process(id("a").with_payload("x"), handler).await,
        Ok(Outcome::Duplicate(_))
    ));
    let error = site
        .inbox
        .process(id("a").with_payload("y"), handler)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
    let store = site.inbox.store();
    let error = store
        .claim_now(site.inbox.group(), id("a").with_payload("y"))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
}

#[tokio::test]
async fn a_batch_of_5_000_ids_works() {
    let site = Site::new().await;
    let messages: Vec<_> = (0..5_000).map(|number| id(&number.to_string())).collect();
    let outcomes = site
        .inbox
        .process_batch(
            &messages,
            |id| *id,
            async |tx, new| {
                tx.pipe().incr(site.effect("all"), new.len());
                Ok::<_, BoxError>(())
            },
        )
        .await;
    assert!(
        outcomes
            .iter()
            .all(|outcome| matches!(outcome, Ok(Outcome::Processed(()))))
    );
    assert_eq!(site.effects("all").await, 5_000);
}
