//! What `MemoryInbox` promises: the laws of a store, its wait policies, and what tests of consumers want of it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "tests may stop at the first surprise"
)]

mod common;

use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use common::{Ledger, Tx, dropped_after, enter, id, ids};
use inbox_core::{
    Claim, ConsumerGroup, Delivery, Error, ErrorKind, InFlight, Inbox, InboxStore, Key, MemoryInbox, MessageId,
    Outcome, Purge, Result, RetryPolicy, Severity, Transactions, Upkeep, WaitPolicy,
};

type Store = MemoryInbox<Ledger>;

fn store() -> Store {
    MemoryInbox::with_state(Ledger::new())
}

fn ledger(store: &Store) -> Ledger {
    store.state(Ledger::clone)
}

fn group(name: &str) -> ConsumerGroup {
    name.parse().unwrap_or_else(|error| panic!("{error}"))
}

fn key(name: &str) -> Key {
    Key::new(group("billing"), id(name))
}

async fn claim(store: &Store, tx: &mut Tx, name: &str) -> Result<Claim> {
    store.try_claim(tx, &group("billing"), id(name).into()).await
}

/// Polls once: the answer, if it is there at once.
async fn once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Waits for what must come without any time passing: with the clock paused, an hour passes only if all are stuck.
async fn unstuck<F: Future>(future: F) -> F::Output {
    let hour = Duration::from_secs(3600);
    tokio::time::timeout(hour, future)
        .await
        .expect("stuck: nobody wakes who waits")
}

// Claims.

#[tokio::test]
async fn the_first_claim_is_new_and_after_its_commit_every_later_one_is_a_duplicate_with_the_time() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    assert_eq!(claim(&store, &mut tx, "m").await.unwrap(), Claim::New);
    store.commit(tx).await.unwrap();
    let record = store.find(&key("m")).await.unwrap().unwrap();
    assert_eq!(record.key, key("m"));
    assert!(record.processed_at.is_some());
    for _ in 0..3 {
        let mut tx = store.begin().await.unwrap();
        let Claim::Duplicate(processed) = claim(&store, &mut tx, "m").await.unwrap() else {
            panic!("not a duplicate");
        };
        assert_eq!(processed.at, record.processed_at);
        store.commit(tx).await.unwrap();
    }
    assert_eq!(
        store.find(&key("m")).await.unwrap().unwrap(),
        record,
        "a duplicate does not touch the record"
    );
}

#[tokio::test]
async fn a_rollback_or_a_drop_undoes_claim_and_effects() {
    let store = store();
    for by_drop in [false, true] {
        let mut tx = store.begin().await.unwrap();
        assert!(claim(&store, &mut tx, "m").await.unwrap().is_new());
        tx.apply(|ledger| ledger.push(id("m")));
        if by_drop {
            drop(tx);
        } else {
            store.rollback(tx).await.unwrap();
        }
        assert!(store.find(&key("m")).await.unwrap().is_none());
        assert!(ledger(&store).is_empty());
    }
    let mut tx = store.begin().await.unwrap();
    assert!(claim(&store, &mut tx, "m").await.unwrap().is_new());
}

#[tokio::test]
async fn nothing_is_seen_before_the_commit() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    assert!(claim(&store, &mut tx, "m").await.unwrap().is_new());
    tx.apply(|ledger| ledger.push(id("m")));
    assert!(store.find(&key("m")).await.unwrap().is_none());
    assert!(ledger(&store).is_empty());
    store.commit(tx).await.unwrap();
    assert!(store.find(&key("m")).await.unwrap().is_some());
    assert_eq!(ledger(&store), [id("m")]);
}

#[tokio::test]
async fn effects_happen_in_the_order_of_commits_and_within_one_in_the_order_of_calls() {
    let store = store();
    let mut first = store.begin().await.unwrap();
    let mut second = store.begin().await.unwrap();
    first.apply(|ledger| ledger.push(id("a1")));
    second.apply(|ledger| ledger.push(id("b1")));
    first.apply(|ledger| ledger.push(id("a2")));
    second.apply(|ledger| ledger.push(id("b2")));
    store.commit(second).await.unwrap();
    store.commit(first).await.unwrap();
    assert_eq!(ledger(&store), ["b1", "b2", "a1", "a2"].map(id));
}

#[tokio::test]
async fn a_second_claim_in_one_transaction_is_a_duplicate_with_the_first_ones_fingerprint() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    let first = id("m").with_payload("a");
    assert!(
        store
            .try_claim(&mut tx, &group("billing"), first)
            .await
            .unwrap()
            .is_new()
    );
    for second in [first, id("m").with_payload("b"), id("m").into()] {
        let Claim::Duplicate(processed) = store.try_claim(&mut tx, &group("billing"), second).await.unwrap() else {
            panic!("not a duplicate");
        };
        assert_eq!(processed.fingerprint, first.fingerprint());
    }
    store.commit(tx).await.unwrap();
    let record = store.find(&key("m")).await.unwrap().unwrap();
    assert_eq!(record.fingerprint, first.fingerprint());
}

#[tokio::test]
async fn groups_and_ids_are_independent() {
    let store = store().with_wait(WaitPolicy::DontWait);
    let mut open = Vec::new();
    for group_name in ["billing", "Billing", "billing ", "shipping"] {
        for name in ["x", "x ", "X", "\u{e9}", "e\u{301}"] {
            let mut tx = store.begin().await.unwrap();
            let claim = store
                .try_claim(&mut tx, &group(group_name), id(name).into())
                .await
                .unwrap();
            assert!(claim.is_new(), "{name:?} in {group_name:?}");
            open.push(tx);
        }
    }
}

#[tokio::test]
async fn a_batch_is_answered_in_the_order_asked_and_an_id_twice_is_new_the_first_time() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    assert!(claim(&store, &mut tx, "done").await.unwrap().is_new());
    store.commit(tx).await.unwrap();
    let mut tx = store.begin().await.unwrap();
    let names = ["z", "done", "a", "z", "m", "a"];
    let batch = names.map(|name| Delivery::new(id(name)));
    let claims = store.try_claim_batch(&mut tx, &group("billing"), &batch).await.unwrap();
    let new: Vec<bool> = claims.iter().map(Claim::is_new).collect();
    assert_eq!(new, [true, false, true, false, true, false], "{claims:?}");
    assert!(
        claims.iter().all(|claim| claim.is_new() || claim.is_duplicate()),
        "{claims:?}"
    );
    assert!(
        store
            .try_claim_batch(&mut tx, &group("billing"), &[])
            .await
            .unwrap()
            .is_empty()
    );
}

#[tokio::test]
async fn a_batch_of_thousands_works() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    let batch: Vec<Delivery> = ids(20_000).into_iter().map(Delivery::new).collect();
    let claims = store.try_claim_batch(&mut tx, &group("billing"), &batch).await.unwrap();
    assert_eq!(claims.iter().filter(|claim| claim.is_new()).count(), 20_000);
    store.commit(tx).await.unwrap();
    let mut tx = store.begin().await.unwrap();
    let claims = store.try_claim_batch(&mut tx, &group("billing"), &batch).await.unwrap();
    assert_eq!(claims.iter().filter(|claim| claim.is_duplicate()).count(), 20_000);
}

// Waiting.

#[tokio::test(start_paused = true)]
async fn a_waiting_claim_is_a_duplicate_once_the_other_has_committed() {
    let store = store();
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
    let mut waiting = pin!(claim(&store, &mut second, "m"));
    assert!(once(waiting.as_mut()).await.is_none());
    store.commit(first).await.unwrap();
    assert!(unstuck(waiting).await.unwrap().is_duplicate());
}

#[tokio::test(start_paused = true)]
async fn a_waiting_claim_is_new_once_the_other_has_rolled_back_or_is_dropped() {
    let store = store();
    for by_drop in [false, true] {
        let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
        assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
        let mut waiting = pin!(claim(&store, &mut second, "m"));
        assert!(once(waiting.as_mut()).await.is_none());
        if by_drop {
            drop(first);
        } else {
            store.rollback(first).await.unwrap();
        }
        assert!(unstuck(waiting).await.unwrap().is_new(), "handed over");
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_another_transaction_does_not_end_the_waiting() {
    let store = store();
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    let mut bystander = store.begin().await.unwrap();
    assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
    assert!(claim(&store, &mut bystander, "n").await.unwrap().is_new());
    let mut waiting = pin!(claim(&store, &mut second, "m"));
    assert!(once(waiting.as_mut()).await.is_none());
    store.commit(bystander).await.unwrap();
    assert!(once(waiting.as_mut()).await.is_none());
    drop(first);
    assert!(unstuck(waiting).await.unwrap().is_new());
}

#[tokio::test(start_paused = true)]
async fn of_many_that_wait_one_gets_the_message_and_the_rest_its_duplicate() {
    let store = store();
    let mut first = store.begin().await.unwrap();
    assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
    let waiters: Vec<_> = (0..20)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut tx = store.begin().await.unwrap();
                let answer = claim(&store, &mut tx, "m").await.unwrap();
                store.commit(tx).await.unwrap();
                answer
            })
        })
        .collect();
    tokio::task::yield_now().await;
    drop(first);
    let mut new = 0;
    for waiter in waiters {
        let answer = unstuck(waiter).await.unwrap();
        assert!(!answer.is_in_flight());
        new += usize::from(answer.is_new());
    }
    assert_eq!(new, 1);
}

#[tokio::test(start_paused = true)]
async fn who_does_not_wait_is_told_at_once_and_its_transaction_works_on() {
    let store = store();
    let impatient = store.clone().with_wait(WaitPolicy::DontWait);
    let (mut first, mut second) = (store.begin().await.unwrap(), impatient.begin().await.unwrap());
    assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
    let answer = once(pin!(claim(&impatient, &mut second, "m"))).await;
    assert_eq!(answer.expect("at once").unwrap(), Claim::InFlight(InFlight::new()));
    assert!(claim(&impatient, &mut second, "n").await.unwrap().is_new());
    second.apply(|ledger| ledger.push(id("n")));
    impatient.commit(second).await.unwrap();
    assert_eq!(ledger(&store), [id("n")]);
    assert!(store.find(&key("m")).await.unwrap().is_none());
}

#[tokio::test(start_paused = true)]
async fn who_waits_at_most_so_long_is_told_in_flight_then_and_no_sooner() {
    let longest = Duration::from_secs(5);
    let store = store();
    let patient = store.clone().with_wait(WaitPolicy::AtMost(longest));
    let (mut first, mut second) = (store.begin().await.unwrap(), patient.begin().await.unwrap());
    assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
    let before = tokio::time::Instant::now();
    assert!(claim(&patient, &mut second, "m").await.unwrap().is_in_flight());
    assert!(before.elapsed() >= longest, "{:?}", before.elapsed());

    // The transaction works on, and what it was refused is not its own.
    assert!(claim(&patient, &mut second, "n").await.unwrap().is_new());
    store.commit(first).await.unwrap();
    assert!(claim(&patient, &mut second, "m").await.unwrap().is_duplicate());
}

#[tokio::test(start_paused = true)]
async fn who_waits_at_most_so_long_gets_the_answer_that_comes_sooner() {
    let store = store();
    let patient = store.clone().with_wait(WaitPolicy::AtMost(Duration::from_secs(3600)));
    for commit in [false, true] {
        let (mut first, mut second) = (store.begin().await.unwrap(), patient.begin().await.unwrap());
        assert!(claim(&store, &mut first, "m").await.unwrap().is_new());
        let mut waiting = pin!(claim(&patient, &mut second, "m"));
        assert!(once(waiting.as_mut()).await.is_none());
        let before = tokio::time::Instant::now();
        if commit {
            store.commit(first).await.unwrap();
        } else {
            drop(first);
        }
        let answer = unstuck(waiting).await.unwrap();
        assert_eq!((answer.is_duplicate(), answer.is_new()), (commit, !commit));
        assert!(before.elapsed() < Duration::from_secs(3600));
    }
}

#[tokio::test(start_paused = true)]
async fn handles_with_different_policies_share_one_store() {
    let waits = store();
    let impatient = waits.clone().with_wait(WaitPolicy::DontWait);
    let inbox = Inbox::new(impatient.clone(), "billing").unwrap();
    let mut tx = waits.begin().await.unwrap();
    assert!(claim(&waits, &mut tx, "m").await.unwrap().is_new());
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::InFlight(_)), "{outcome:?}");
    tx.apply(|ledger| ledger.push(id("m")));
    impatient.commit(tx).await.unwrap();
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    assert_eq!(ledger(&waits), [id("m")]);

    waits.advance_clock(Duration::from_secs(60));
    assert_eq!(inbox.purge(Duration::from_secs(30)).await.unwrap(), 1, "one clock, too");
    assert!(waits.find(&key("m")).await.unwrap().is_none());
}

// Deadlocks.

#[tokio::test(start_paused = true)]
async fn of_two_that_claim_in_opposite_order_one_gets_a_retryable_conflict_and_the_other_goes_on() {
    let store = store();
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    assert!(claim(&store, &mut first, "a").await.unwrap().is_new());
    assert!(claim(&store, &mut second, "b").await.unwrap().is_new());
    let mut waiting = pin!(claim(&store, &mut first, "b"));
    assert!(once(waiting.as_mut()).await.is_none());
    let error = unstuck(claim(&store, &mut second, "a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(error.is_retryable());
    assert!(error.to_string().contains("run again"), "{error}");
    store.rollback(second).await.unwrap();
    assert!(unstuck(waiting).await.unwrap().is_new());
}

#[tokio::test(start_paused = true)]
async fn a_ring_of_many_is_a_deadlock_too() {
    let store = store();
    let names = ["a", "b", "c", "d"];
    let mut txs = Vec::new();
    for name in names {
        let mut tx = store.begin().await.unwrap();
        assert!(claim(&store, &mut tx, name).await.unwrap().is_new());
        txs.push(tx);
    }
    let mut last = txs.pop().unwrap();
    let mut waiting: Vec<_> = txs
        .iter_mut()
        .zip(&names[1..])
        .map(|(tx, next)| Box::pin(claim(&store, tx, next)))
        .collect();
    for future in &mut waiting {
        assert!(once(future.as_mut()).await.is_none());
    }
    assert_eq!(
        unstuck(claim(&store, &mut last, "a")).await.unwrap_err().kind(),
        ErrorKind::Conflict
    );
    drop(last);
    assert!(
        unstuck(waiting.pop().unwrap()).await.unwrap().is_new(),
        "the one that waited for it goes on"
    );
}

#[tokio::test(start_paused = true)]
async fn a_chain_is_no_deadlock() {
    let store = store();
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    let mut third = store.begin().await.unwrap();
    assert!(claim(&store, &mut first, "a").await.unwrap().is_new());
    assert!(claim(&store, &mut second, "b").await.unwrap().is_new());
    let mut second_waits = Box::pin(claim(&store, &mut second, "a"));
    assert!(once(second_waits.as_mut()).await.is_none());
    let mut third_waits = Box::pin(claim(&store, &mut third, "b"));
    assert!(once(third_waits.as_mut()).await.is_none());
    store.commit(first).await.unwrap();
    assert!(unstuck(second_waits).await.unwrap().is_duplicate());
    store.commit(second).await.unwrap();
    assert!(unstuck(third_waits).await.unwrap().is_duplicate());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_was_waiting_and_is_dropped_leaves_no_trace() {
    let store = store();
    let impatient = store.clone().with_wait(WaitPolicy::DontWait);
    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    assert!(claim(&store, &mut first, "a").await.unwrap().is_new());
    assert!(claim(&store, &mut second, "b").await.unwrap().is_new());
    assert!(dropped_after(1, claim(&store, &mut second, "a")).await.is_none());

    // It waits no more, so that this is no deadlock.
    let mut waiting = Box::pin(claim(&store, &mut first, "b"));
    assert!(once(waiting.as_mut()).await.is_none());
    drop(waiting);
    drop(first);

    // It did not get what it gave up, and both its own claim and the transaction stand.
    let mut third = impatient.begin().await.unwrap();
    assert!(claim(&impatient, &mut third, "a").await.unwrap().is_new());
    assert!(claim(&impatient, &mut third, "b").await.unwrap().is_in_flight());
    store.commit(second).await.unwrap();
    assert!(store.find(&key("a")).await.unwrap().is_none());
    assert!(store.find(&key("b")).await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_gave_up_waiting_is_no_part_of_a_deadlock() {
    let store = store();
    let patient = store.clone().with_wait(WaitPolicy::AtMost(Duration::from_secs(1)));
    let (mut first, mut second) = (store.begin().await.unwrap(), patient.begin().await.unwrap());
    assert!(claim(&store, &mut first, "a").await.unwrap().is_new());
    assert!(claim(&patient, &mut second, "b").await.unwrap().is_new());
    assert!(claim(&patient, &mut second, "a").await.unwrap().is_in_flight());
    let mut waiting = pin!(claim(&store, &mut first, "b"));
    assert!(once(waiting.as_mut()).await.is_none());
    patient.commit(second).await.unwrap();
    assert!(unstuck(waiting).await.unwrap().is_duplicate());
}

/// Processes messages one by one in one transaction, as only a handler with claims of its own does.
#[tokio::test(start_paused = true)]
async fn two_consumers_in_a_deadlock_both_get_through_by_running_again() {
    let inbox = Inbox::new(store(), "billing").unwrap();
    let spawn = |outer: &'static str, nested: &'static str| {
        let inbox = inbox.clone();
        tokio::spawn(async move {
            let claims = inbox.clone();
            inbox
                .process(id(outer), async |tx| {
                    enter(tx, id(outer)).await?;
                    if !claims.is_duplicate(tx, id(nested)).await? {
                        enter(tx, id(nested)).await?;
                    }
                    Ok::<_, Error>(())
                })
                .await
        })
    };
    let (one, other) = (spawn("a", "b"), spawn("b", "a"));
    assert!(unstuck(one).await.unwrap().unwrap().may_acknowledge());
    assert!(unstuck(other).await.unwrap().unwrap().may_acknowledge());
    let mut entries = ledger(inbox.store());
    entries.sort();
    let mut expected = vec![id("a"), id("b")];
    expected.sort();
    assert_eq!(entries, expected, "each once");
}

#[tokio::test(start_paused = true)]
async fn batches_that_overlap_in_opposite_orders_wait_for_each_other_in_one_direction() {
    let store = store();
    let mut sorted = ids(3);
    sorted.sort();
    let batch: Vec<Delivery> = sorted.iter().copied().map(Delivery::new).collect();
    let reversed: Vec<Delivery> = batch.iter().rev().copied().collect();
    let billing = group("billing");
    let mut holder = store.begin().await.unwrap();
    assert!(store.try_claim(&mut holder, &billing, batch[1]).await.unwrap().is_new());

    let (mut first, mut second) = (store.begin().await.unwrap(), store.begin().await.unwrap());
    let mut first_waits = Box::pin(store.try_claim_batch(&mut first, &billing, &batch));
    assert!(once(first_waits.as_mut()).await.is_none());
    let mut second_waits = Box::pin(store.try_claim_batch(&mut second, &billing, &reversed));
    assert!(once(second_waits.as_mut()).await.is_none());
    drop(holder);
    assert!(unstuck(first_waits).await.unwrap().iter().all(Claim::is_new));
    assert!(once(second_waits.as_mut()).await.is_none());
    store.commit(first).await.unwrap();
    assert!(unstuck(second_waits).await.unwrap().iter().all(Claim::is_duplicate));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn batches_that_overlap_in_opposite_orders_never_conflict() {
    let inbox = Inbox::new(store(), "billing").unwrap().with_retry(RetryPolicy::never());
    let all = ids(50);
    let consumers: Vec<_> = (0..8)
        .map(|number| {
            let inbox = inbox.clone();
            let mut batch = all.clone();
            if number % 2 == 1 {
                batch.reverse();
            }
            tokio::spawn(async move {
                let handler = async |tx: &mut Tx, new: &[&MessageId]| common::enter_all(tx, new).await;
                inbox.process_batch(&batch, |id| *id, handler).await
            })
        })
        .collect();
    let mut processed = 0;
    for consumer in consumers {
        for outcome in unstuck(consumer).await.unwrap() {
            processed += usize::from(outcome.unwrap() == Outcome::Processed(()));
        }
    }
    assert_eq!(processed, 50);
    assert_eq!(ledger(inbox.store()).len(), 50);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_any_number_of_consumers_of_a_message_exactly_one_commits_it() {
    for wait in [WaitPolicy::Wait, WaitPolicy::DontWait] {
        let inbox = Inbox::new(store().with_wait(wait), "billing").unwrap();
        for round in 0..20 {
            let name = format!("m{round}");
            let consumers: Vec<_> = (0..16)
                .map(|number| {
                    let (inbox, id) = (inbox.clone(), id(&name));
                    tokio::spawn(async move {
                        let failing = number % 4 == 0;
                        loop {
                            let handler = async |tx: &mut Tx| {
                                enter(tx, id).await?;
                                if failing {
                                    return Err(Error::new(ErrorKind::Store, "this consumer never succeeds"));
                                }
                                Ok(())
                            };
                            match inbox.process(id, handler).await {
                                Ok(outcome) if outcome.may_acknowledge() => return Some(outcome),
                                Ok(_in_flight) => tokio::task::yield_now().await,
                                Err(_) => return None,
                            }
                        }
                    })
                })
                .collect();
            let mut processed = 0;
            for consumer in consumers {
                processed += usize::from(unstuck(consumer).await.unwrap() == Some(Outcome::Processed(())));
            }
            assert_eq!(processed, 1, "{wait:?}");
            assert_eq!(ledger(inbox.store()).len(), round + 1, "{wait:?}");
        }
    }
}

// Upkeep.

#[tokio::test]
async fn forgetting_a_record_makes_its_message_new_again_and_says_whether_there_was_one() {
    let store = store();
    let inbox = Inbox::new(store.clone(), "billing").unwrap();
    let shipping = inbox.for_group("shipping").unwrap();
    for inbox in [&inbox, &shipping] {
        let _processed = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap();
    }
    assert!(inbox.forget(id("m")).await.unwrap());
    assert!(!inbox.forget(id("m")).await.unwrap());
    assert!(!inbox.forget(id("never seen")).await.unwrap());
    assert!(
        shipping.find(id("m")).await.unwrap().is_some(),
        "another group's stands"
    );
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
}

#[tokio::test]
async fn forgetting_does_not_touch_what_is_in_flight() {
    let store = store();
    let mut tx = store.begin().await.unwrap();
    assert!(claim(&store, &mut tx, "m").await.unwrap().is_new());
    assert!(!store.forget(&key("m")).await.unwrap());
    store.commit(tx).await.unwrap();
    assert!(store.find(&key("m")).await.unwrap().is_some());
}

#[tokio::test]
async fn a_found_record_tells_who_when_and_of_which_payload() {
    let inbox = Inbox::new(store(), "billing").unwrap();
    assert!(inbox.find(id("m")).await.unwrap().is_none());
    let delivery = id("m").with_payload("10 EUR");
    let _processed = inbox
        .process(delivery, async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    let record = inbox.find(id("m")).await.unwrap().unwrap();
    assert_eq!(record.key, key("m"));
    assert_eq!(record.fingerprint, delivery.fingerprint());
    inbox.store().advance_clock(Duration::from_secs(3600));
    let _processed = inbox
        .process(id("n"), async |tx| enter(tx, id("n")).await)
        .await
        .unwrap();
    let later = inbox.find(id("n")).await.unwrap().unwrap();
    let apart = later
        .processed_at
        .unwrap()
        .duration_since(record.processed_at.unwrap())
        .unwrap();
    assert!(
        apart >= Duration::from_secs(3599),
        "the store's clock went forward: {apart:?}"
    );
    assert_eq!(later.fingerprint, None);
}

#[tokio::test]
async fn a_purge_takes_one_bounded_step_of_what_is_older() {
    let store = store();
    let inbox = Inbox::new(store.clone(), "billing").unwrap();
    for id in ids(5) {
        let _processed = inbox.process(id, async |tx| enter(tx, id).await).await.unwrap();
    }
    let hour = Duration::from_secs(3600);
    let purge = Purge::older_than(hour).in_steps_of(NonZeroU32::new(2).unwrap());
    let step = store.purge(&purge).await.unwrap();
    assert_eq!((step.removed, step.more), (0, false), "nothing is old yet");
    store.advance_clock(hour + Duration::from_secs(1));
    let mut removed = Vec::new();
    loop {
        let step = store.purge(&purge).await.unwrap();
        removed.push(step.removed);
        if !step.more {
            break;
        }
    }
    assert_eq!(removed, [2, 2, 1]);
}

#[tokio::test]
async fn a_check_finds_the_store_sound_and_warns_that_it_is_for_tests() {
    let inbox = Inbox::new(store(), "billing").unwrap();
    inbox.setup().await.unwrap();
    inbox.setup().await.unwrap();
    let health = inbox.check().await.unwrap();
    assert!(health.is_sound());
    let [finding] = health.findings() else {
        panic!("{health}");
    };
    assert_eq!(finding.severity, Severity::Warning);
    assert!(health.to_string().contains("in memory"), "{health}");
}

#[tokio::test]
async fn clones_are_the_same_store_and_new_ones_are_not() {
    let one = Inbox::new(store(), "billing").unwrap();
    let same = Inbox::new(one.store().clone(), "billing").unwrap();
    let other = Inbox::new(store(), "billing").unwrap();
    let _processed = one.process(id("m"), async |tx| enter(tx, id("m")).await).await.unwrap();
    assert!(same.find(id("m")).await.unwrap().is_some());
    assert!(other.find(id("m")).await.unwrap().is_none());
}
