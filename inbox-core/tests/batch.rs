//! What `Inbox::process_batch` promises.

#![allow(clippy::unwrap_used, reason = "tests may stop at the first surprise")]

mod common;

use std::sync::Mutex;

use common::Turn::{DoneBut, Fails, OneShort, OneTooMany, Well};
use common::{
    Declined, DriverError, RETRYABLE, Scripted, Step, Tx, assert_whole, attempts, dropped_after, enter, enter_all, id,
    ids, inbox, long_pauses,
};
use inbox_core::{
    ConsumerGroup, Delivery, Error, ErrorKind, Inbox, InboxStore, MessageId, Outcome, Result, RetryPolicy, Transactions,
};
use proptest::prelude::*;

/// Which messages the handler was run with, run by run.
#[derive(Default)]
struct Runs(Mutex<Vec<Vec<MessageId>>>);

impl Runs {
    fn add(&self, new: &[&MessageId]) {
        self.0.lock().unwrap().push(new.iter().map(|&&id| id).collect());
    }

    fn all(&self) -> Vec<Vec<MessageId>> {
        self.0.lock().unwrap().clone()
    }

    fn count(&self) -> usize {
        self.all().len()
    }
}

/// Enters all, noting the run.
async fn noted(runs: &Runs, tx: &mut Tx, new: &[&MessageId]) -> Result<()> {
    runs.add(new);
    enter_all(tx, new).await
}

/// Enters all, unless `poison` is among them.
async fn unless_poison(runs: &Runs, poison: MessageId, tx: &mut Tx, new: &[&MessageId]) -> Result<(), Declined> {
    runs.add(new);
    for &&id in new {
        if id == poison {
            return Err(Declined(None));
        }
        enter(tx, id).await.map_err(Declined::because)?;
    }
    Ok(())
}

async fn process(inbox: &Inbox<Scripted>, runs: &Runs, batch: &[MessageId]) -> Vec<Result<Outcome<()>>> {
    inbox
        .process_batch(batch, |id| *id, async |tx, new| noted(runs, tx, new).await)
        .await
}

fn is_processed(outcome: &Result<Outcome<()>>) -> bool {
    matches!(outcome, Ok(Outcome::Processed(())))
}

fn is_duplicate(outcome: &Result<Outcome<()>>) -> bool {
    matches!(outcome, Ok(Outcome::Duplicate(_)))
}

// The good case.

#[tokio::test]
async fn a_batch_is_one_transaction_one_claim_one_run_of_the_handler_and_one_commit() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(100), Runs::default());
    let outcomes = process(&inbox, &runs, &batch).await;
    assert_eq!(outcomes.len(), 100);
    assert!(outcomes.iter().all(is_processed), "{outcomes:?}");
    assert_eq!(inbox.store().calls(), [Step::Begin, Step::ClaimBatch, Step::Commit]);
    assert_eq!(runs.all().concat(), batch, "in the order given");
    assert_eq!(runs.count(), 1);
    assert_eq!(inbox.store().ledger(), batch);
    assert_eq!(assert_whole(&inbox, &batch).await, 100);
}

#[tokio::test]
async fn an_empty_batch_does_not_touch_the_store_and_runs_no_handler() {
    let inbox = inbox(Scripted::new().always(Step::Begin, Fails(ErrorKind::Unavailable)));
    let runs = Runs::default();
    assert!(process(&inbox, &runs, &[]).await.is_empty());
    assert!(inbox.store().calls().is_empty());
    assert_eq!(runs.count(), 0);
}

#[tokio::test]
async fn the_handler_gets_only_what_is_new_in_the_order_given() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(9), Runs::default());
    let done: Vec<MessageId> = batch.iter().copied().step_by(2).collect();
    assert!(process(&inbox, &runs, &done).await.iter().all(is_processed));

    let reversed: Vec<MessageId> = batch.iter().rev().copied().collect();
    let outcomes = process(&inbox, &runs, &reversed).await;
    for (id, outcome) in reversed.iter().zip(&outcomes) {
        assert_eq!(is_duplicate(outcome), done.contains(id), "{id}: {outcome:?}");
        assert_eq!(is_processed(outcome), !done.contains(id), "{id}: {outcome:?}");
    }
    let new: Vec<MessageId> = reversed.into_iter().filter(|id| !done.contains(id)).collect();
    assert_eq!(runs.all()[1..], [new]);
    assert_eq!(assert_whole(&inbox, &batch).await, 9);
}

#[tokio::test]
async fn a_batch_of_duplicates_runs_no_handler_and_commits_nothing() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(5), Runs::default());
    process(&inbox, &runs, &batch).await;
    let outcomes = process(&inbox, &runs, &batch).await;
    assert!(outcomes.iter().all(is_duplicate), "{outcomes:?}");
    assert_eq!(runs.count(), 1);
    assert_eq!(
        inbox.store().calls()[3..],
        [Step::Begin, Step::ClaimBatch, Step::Rollback]
    );
}

#[tokio::test]
async fn an_id_that_is_repeated_in_a_batch_is_processed_once_and_then_a_duplicate() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let batch = ["b", "a", "b", "a", "b"].map(id);
    let outcomes = process(&inbox, &runs, &batch).await;
    let processed: Vec<bool> = outcomes.iter().map(is_processed).collect();
    assert_eq!(processed, [true, true, false, false, false], "{outcomes:?}");
    assert!(outcomes[2..].iter().all(is_duplicate), "{outcomes:?}");
    assert_eq!(runs.all(), [vec![id("b"), id("a")]]);
    assert_eq!(assert_whole(&inbox, &[id("a"), id("b")]).await, 2);
}

#[tokio::test]
async fn a_message_in_flight_elsewhere_is_left_alone_and_its_neighbours_are_processed() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(3), Runs::default());
    let mut other = inbox.store().memory().begin().await.unwrap();
    assert!(inbox.try_claim(&mut other, batch[1]).await.unwrap().is_new());
    let outcomes = process(&inbox, &runs, &batch).await;
    assert!(is_processed(&outcomes[0]) && is_processed(&outcomes[2]), "{outcomes:?}");
    let Ok(in_flight) = &outcomes[1] else {
        panic!("{outcomes:?}");
    };
    assert!(matches!(in_flight, Outcome::InFlight(_)) && !in_flight.may_acknowledge());
    assert_eq!(runs.all(), [vec![batch[0], batch[2]]]);
    assert_eq!(assert_whole(&inbox, &batch).await, 2);

    drop(other);
    let outcomes = process(&inbox, &runs, &batch).await;
    assert!(
        is_processed(&outcomes[1]) && is_duplicate(&outcomes[0]) && is_duplicate(&outcomes[2]),
        "{outcomes:?}"
    );
    assert_eq!(assert_whole(&inbox, &batch).await, 3);
}

#[tokio::test]
async fn outcomes_of_every_sort_stand_in_the_order_given() {
    let inbox = inbox(Scripted::new());
    let done = Delivery::from(id("done"));
    let original = id("reused").with_payload("a");
    let _ = inbox
        .process(done, async |tx| enter(tx, id("done")).await)
        .await
        .unwrap();
    let _ = inbox
        .process(original, async |tx| enter(tx, id("reused")).await)
        .await
        .unwrap();
    let mut other = inbox.store().memory().begin().await.unwrap();
    assert!(inbox.try_claim(&mut other, id("elsewhere")).await.unwrap().is_new());

    let batch = [
        id("reused").with_payload("b"),
        id("new").into(),
        id("elsewhere").into(),
        done,
        id("new").into(),
        id("other").into(),
    ];
    let outcomes = inbox
        .process_batch(
            &batch,
            |delivery| *delivery,
            async |tx, new| {
                for delivery in new {
                    enter(tx, delivery.id()).await?;
                }
                Ok::<_, Error>(())
            },
        )
        .await;
    assert_eq!(outcomes.len(), 6);
    assert_eq!(outcomes[0].as_ref().unwrap_err().kind(), ErrorKind::PayloadMismatch);
    assert!(is_processed(&outcomes[1]) && is_processed(&outcomes[5]), "{outcomes:?}");
    assert!(matches!(outcomes[2], Ok(Outcome::InFlight(_))), "{outcomes:?}");
    assert!(is_duplicate(&outcomes[3]) && is_duplicate(&outcomes[4]), "{outcomes:?}");
    let all = ["done", "reused", "new", "other", "elsewhere"].map(id);
    assert_eq!(assert_whole(&inbox, &all).await, 4);
    assert_eq!(
        inbox.store().count(Step::ClaimBatch),
        1,
        "a mismatch does not break the batch up"
    );
}

#[tokio::test]
async fn two_payloads_under_one_id_in_one_batch_are_a_mismatch_of_the_second() {
    let inbox = inbox(Scripted::new());
    let batch = [
        id("m").with_payload("a"),
        id("m").with_payload("b"),
        id("m").with_payload("a"),
    ];
    let outcomes = inbox
        .process_batch(&batch, |delivery| *delivery, async |_, _| Ok::<_, Error>(()))
        .await;
    assert!(is_processed(&outcomes[0]) && is_duplicate(&outcomes[2]), "{outcomes:?}");
    assert_eq!(outcomes[1].as_ref().unwrap_err().kind(), ErrorKind::PayloadMismatch);
}

#[tokio::test]
async fn a_message_is_asked_for_its_delivery_once_whatever_fails() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [Fails(ErrorKind::Conflict)]));
    let asked = Mutex::new(Vec::new());
    let (batch, runs) = (ids(4), Runs::default());
    let delivery_of = |id: &MessageId| {
        asked.lock().unwrap().push(*id);
        *id
    };
    let handler = async |tx: &mut Tx, new: &[&MessageId]| unless_poison(&runs, batch[2], tx, new).await;
    inbox.process_batch(&batch, delivery_of, handler).await;
    assert_eq!(*asked.lock().unwrap(), batch);
}

// A bad message.

#[tokio::test]
async fn one_poison_message_in_a_hundred_fails_alone() {
    for position in [0, 41, 99] {
        let inbox = inbox(Scripted::new());
        let (batch, runs) = (ids(100), Runs::default());
        let poison = batch[position];
        let outcomes = inbox
            .process_batch(
                &batch,
                |id| *id,
                async |tx, new| unless_poison(&runs, poison, tx, new).await,
            )
            .await;
        for (index, outcome) in outcomes.iter().enumerate() {
            assert_eq!(is_processed(outcome), index != position, "{index}: {outcome:?}");
        }
        let error = outcomes[position].as_ref().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Handler);
        assert!(error.downcast_ref::<Declined>().is_some(), "{error:?}");
        assert_eq!(assert_whole(&inbox, &batch).await, 99);
        assert!(inbox.find(poison).await.unwrap().is_none());
        let one_by_one: Vec<Vec<MessageId>> = batch.iter().map(|id| vec![*id]).collect();
        assert_eq!(runs.all()[1..], one_by_one, "after the batch, one at a time, in order");

        let outcomes = process(&inbox, &runs, &batch).await;
        assert!(is_processed(&outcomes[position]), "healed: {:?}", outcomes[position]);
        assert_eq!(outcomes.iter().filter(|outcome| is_duplicate(outcome)).count(), 99);
        assert_eq!(assert_whole(&inbox, &batch).await, 100);
    }
}

#[tokio::test]
async fn an_id_repeated_in_a_batch_with_poison_is_still_processed_once() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let batch = ["a", "poison", "a", "poison", "b"].map(id);
    let outcomes = inbox
        .process_batch(
            &batch,
            |id| *id,
            async |tx, new| unless_poison(&runs, id("poison"), tx, new).await,
        )
        .await;
    assert!(
        is_processed(&outcomes[0]) && is_duplicate(&outcomes[2]) && is_processed(&outcomes[4]),
        "{outcomes:?}"
    );
    assert!(
        outcomes[1].is_err() && outcomes[3].is_err(),
        "a failed first is no reason to skip the second"
    );
    assert_eq!(assert_whole(&inbox, &["a", "b", "poison"].map(id)).await, 2);
}

#[tokio::test]
async fn a_passing_error_that_one_message_always_meets_is_retried_and_its_neighbours_are_processed() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(4), Runs::default());
    let outcomes = inbox
        .process_batch(
            &batch,
            |id| *id,
            async |tx, new| {
                runs.add(new);
                for &&id in new {
                    if id == batch[1] {
                        return Err(Declined::because(DriverError(ErrorKind::Conflict)));
                    }
                    enter(tx, id).await.map_err(Declined::because)?;
                }
                Ok(())
            },
        )
        .await;
    assert_eq!(
        outcomes.iter().filter(|outcome| is_processed(outcome)).count(),
        3,
        "{outcomes:?}"
    );
    assert!(outcomes[1].as_ref().unwrap_err().is_retryable());
    assert_eq!(assert_whole(&inbox, &batch).await, 3);
    let alone = runs.all().iter().filter(|run| **run == [batch[1]]).count();
    assert!((1..=3).contains(&alone), "{alone} runs of three attempts");
}

#[tokio::test]
async fn retry_if_holds_for_batches() {
    let inbox = inbox(Scripted::new());
    let (batch, runs) = (ids(4), Runs::default());
    let outcomes = inbox
        .retry_if(|_: &Declined| true)
        .process_batch(
            &batch,
            |id| *id,
            async |tx, new| {
                runs.add(new);
                if runs.count() < 3 {
                    return Err(Declined(None));
                }
                enter_all(tx, new).await.map_err(Declined::because)
            },
        )
        .await;
    assert!(outcomes.iter().all(is_processed), "{outcomes:?}");
    assert_eq!(runs.all(), vec![batch.clone(); 3], "as a whole batch each time");
    assert_eq!(assert_whole(&inbox, &batch).await, 4);
}

#[tokio::test]
async fn a_panic_on_one_message_passes_through_and_nothing_is_committed() {
    let inbox = inbox(Scripted::new());
    let spawned = inbox.clone();
    let joined = tokio::spawn(async move {
        let batch = ids(3);
        spawned
            .process_batch(
                &batch,
                |id| *id,
                async |tx, new| {
                    enter_all(tx, new).await?;
                    assert!(!new.contains(&&id("m2")), "a bug in the handler");
                    Ok::<_, Error>(())
                },
            )
            .await
    });
    assert!(joined.await.unwrap_err().is_panic());
    assert_eq!(assert_whole(&inbox, &ids(3)).await, 0);
    assert!(
        process(&inbox, &Runs::default(), &ids(3))
            .await
            .iter()
            .all(is_processed)
    );
}

// A store that fails.

#[tokio::test]
async fn a_passing_failure_of_any_step_is_run_again_as_a_whole_batch() {
    for step in [Step::Begin, Step::ClaimBatch, Step::Commit] {
        for kind in RETRYABLE {
            let inbox = inbox(Scripted::new().then(step, [Fails(kind), Fails(kind)]));
            let (batch, runs) = (ids(10), Runs::default());
            let outcomes = process(&inbox, &runs, &batch).await;
            assert!(outcomes.iter().all(is_processed), "{step:?} {kind}: {outcomes:?}");
            assert_eq!(inbox.store().count(Step::Claim), 0, "{step:?} {kind}: never one by one");
            assert_eq!(inbox.store().count(Step::Begin), 3, "{step:?} {kind}");
            assert_eq!(assert_whole(&inbox, &batch).await, 10);
        }
    }
}

#[tokio::test]
async fn a_batch_whose_commit_is_found_to_have_happened_is_duplicates_and_each_effect_once() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [DoneBut(ErrorKind::OutcomeUnknown)]));
    let (batch, runs) = (ids(10), Runs::default());
    let outcomes = process(&inbox, &runs, &batch).await;
    assert!(outcomes.iter().all(is_duplicate), "{outcomes:?}");
    assert_eq!(runs.count(), 1);
    assert_eq!(assert_whole(&inbox, &batch).await, 10);
}

#[tokio::test]
async fn a_store_out_of_reach_is_tried_as_often_for_a_batch_as_for_one_message() {
    for (step, kind, expected) in [
        (Step::Begin, ErrorKind::Unavailable, 3),
        (Step::Begin, ErrorKind::Denied, 1),
        (Step::ClaimBatch, ErrorKind::Schema, 1),
        (Step::ClaimBatch, ErrorKind::Denied, 1),
        (Step::ClaimBatch, ErrorKind::Unavailable, 3),
        (Step::Commit, ErrorKind::OutcomeUnknown, 3),
        (Step::Commit, ErrorKind::Unavailable, 3),
    ] {
        let inbox = inbox(Scripted::new().always(step, Fails(kind)));
        let (batch, runs) = (ids(100), Runs::default());
        let outcomes = process(&inbox, &runs, &batch).await;
        assert_eq!(outcomes.len(), 100);
        for outcome in outcomes {
            assert_eq!(outcome.unwrap_err().kind(), kind, "{step:?}");
        }
        assert_eq!(inbox.store().count(Step::Begin), expected, "{step:?} {kind}");
        assert_eq!(assert_whole(&inbox, &batch).await, 0);
    }
}

/// No connection or lock to be had is no fault of any message: SQLite with another writer, or a pool that is drained.
#[tokio::test]
async fn a_store_too_busy_to_begin_is_tried_as_often_for_a_batch_as_for_one_message() {
    let inbox = inbox(Scripted::new().always(Step::Begin, Fails(ErrorKind::Busy)));
    let outcomes = process(&inbox, &Runs::default(), &ids(100)).await;
    assert_eq!(outcomes.len(), 100);
    for outcome in outcomes {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Busy);
    }
    assert_eq!(inbox.store().count(Step::Begin), 3);
}

#[tokio::test]
async fn a_store_that_goes_out_of_reach_amid_single_messages_is_not_tried_for_the_rest() {
    for kind in [
        ErrorKind::Unavailable,
        ErrorKind::Denied,
        ErrorKind::Schema,
        ErrorKind::OutcomeUnknown,
    ] {
        // The batch fails for its poison, two messages are handled alone, and then the store is gone.
        let store = Scripted::new().then(Step::Begin, [Well, Well, Well]);
        let inbox = inbox(store.always(Step::Begin, Fails(kind)));
        let (batch, runs) = (ids(50), Runs::default());
        let outcomes = inbox
            .process_batch(
                &batch,
                |id| *id,
                async |tx, new| unless_poison(&runs, batch[40], tx, new).await,
            )
            .await;
        assert!(outcomes[..2].iter().all(is_processed), "{outcomes:?}");
        assert_eq!(outcomes.len(), 50);
        for outcome in &outcomes[2..] {
            assert_eq!(outcome.as_ref().unwrap_err().kind(), kind);
        }
        let attempts = if kind.is_retryable() { 3 } else { 1 };
        assert_eq!(inbox.store().count(Step::Begin), 3 + attempts, "{kind}");
        assert_eq!(assert_whole(&inbox, &batch).await, 2);
    }
}

#[tokio::test]
async fn a_failure_of_the_message_at_hand_does_not_keep_the_rest_from_being_tried() {
    let store = Scripted::new().then(Step::ClaimBatch, [Fails(ErrorKind::Store)]);
    let inbox = inbox(store.then(Step::Claim, [Well, Fails(ErrorKind::Store)]));
    let (batch, runs) = (ids(5), Runs::default());
    let outcomes = process(&inbox, &runs, &batch).await;
    let processed: Vec<bool> = outcomes.iter().map(is_processed).collect();
    assert_eq!(processed, [true, false, true, true, true], "{outcomes:?}");
    assert_eq!(assert_whole(&inbox, &batch).await, 4);
}

#[tokio::test]
async fn a_policy_of_never_holds_for_the_batch_and_for_each_message() {
    let store = Scripted::new().then(Step::ClaimBatch, [Fails(ErrorKind::Conflict)]);
    let inbox = inbox(store.then(Step::Claim, [Fails(ErrorKind::Conflict)])).with_retry(RetryPolicy::never());
    let (batch, runs) = (ids(3), Runs::default());
    let outcomes = process(&inbox, &runs, &batch).await;
    assert_eq!(outcomes[0].as_ref().unwrap_err().kind(), ErrorKind::Conflict);
    assert!(is_processed(&outcomes[1]) && is_processed(&outcomes[2]), "{outcomes:?}");
    assert_eq!(inbox.store().count(Step::Begin), 4);
}

#[tokio::test]
async fn a_store_that_answers_too_few_or_too_many_claims_is_an_error_and_nothing_of_it_is_used() {
    for turn in [OneShort, OneTooMany] {
        let inbox = inbox(Scripted::new().always(Step::ClaimBatch, turn));
        let batch = ids(4);
        let mut tx = inbox.store().memory().begin().await.unwrap();
        let deliveries: Vec<Delivery> = batch.iter().map(|&id| id.into()).collect();
        let error = inbox.try_claim_batch(&mut tx, &deliveries).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Store, "{turn:?}");
        assert!(!error.is_retryable());
        let text = error.to_string();
        assert!(text.contains("of 4 claims") && text.contains("conformance"), "{text}");
        assert_eq!(inbox.counts().error, 4);
        drop(tx);

        // A batch falls back on single claims, whose answers cannot be mixed up.
        let runs = Runs::default();
        let outcomes = process(&inbox, &runs, &batch).await;
        assert!(outcomes.iter().all(is_processed), "{turn:?}: {outcomes:?}");
        assert!(
            runs.all().iter().all(|run| run.len() == 1),
            "{turn:?}: {:?}",
            runs.all()
        );
        assert_eq!(assert_whole(&inbox, &batch).await, 4);
    }
}

#[tokio::test]
async fn an_answer_to_nothing_asked_is_an_error_too() {
    let inbox = inbox(Scripted::new().always(Step::ClaimBatch, OneTooMany));
    let mut tx = inbox.store().memory().begin().await.unwrap();
    let error = inbox.try_claim_batch(&mut tx, &[]).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Store);
}

// Dropped futures.

/// Drops a batch at each of its awaits in turn; `poison` is one of its messages or none.
async fn drop_at_each_await(poison: MessageId, script: &[(Step, common::Turn)]) {
    let batch = ids(4);
    let healthy = batch.iter().filter(|&&id| id != poison).count();
    let mut polls = 0;
    loop {
        let store = Scripted::yielding();
        for &(step, turn) in script {
            store.tell(step, [turn]);
        }
        let inbox = Inbox::new(store, "billing")
            .unwrap()
            .with_retry(long_pauses(attempts(4)));
        let runs = Runs::default();
        let handler = async |tx: &mut Tx, new: &[&MessageId]| unless_poison(&runs, poison, tx, new).await;
        let first = dropped_after(polls, inbox.process_batch(&batch, |id| *id, handler)).await;
        assert_whole(&inbox, &batch).await;

        inbox.store().recover();
        let redelivery = inbox.process_batch(&batch, |id| *id, handler).await;
        for (id, outcome) in batch.iter().zip(&redelivery) {
            let may_acknowledge = outcome.as_ref().is_ok_and(Outcome::may_acknowledge);
            assert_eq!(
                may_acknowledge,
                *id != poison,
                "dropped after {polls} polls: {outcome:?}"
            );
        }
        assert_eq!(assert_whole(&inbox, &batch).await, healthy);
        if let Some(outcomes) = first {
            for (first, second) in outcomes.iter().zip(&redelivery) {
                assert_eq!(first.is_ok(), is_duplicate(second), "{first:?} {second:?}");
            }
            break;
        }
        polls += 1;
    }
    // Begin, claim and commit are pending twice each, and so is the handler for each message.
    assert!(polls >= 6 + 2 * healthy, "only {polls} polls");
}

#[tokio::test(start_paused = true)]
async fn a_batch_dropped_at_any_await_leaves_each_message_done_or_undone() {
    drop_at_each_await(id("none"), &[]).await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_with_poison_dropped_at_any_await_leaves_each_message_done_or_undone() {
    drop_at_each_await(id("m0"), &[]).await;
    drop_at_each_await(id("m2"), &[]).await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_dropped_at_any_await_of_its_retries_leaves_each_message_done_or_undone() {
    drop_at_each_await(
        id("m1"),
        &[
            (Step::Begin, Fails(ErrorKind::Unavailable)),
            (Step::ClaimBatch, DoneBut(ErrorKind::Conflict)),
            (Step::Claim, DoneBut(ErrorKind::Busy)),
            (Step::Commit, DoneBut(ErrorKind::OutcomeUnknown)),
        ],
    )
    .await;
}

// Anything at all.

#[derive(Debug, Clone, Copy)]
enum Event {
    Turn(Step, common::Turn),
    /// Messages from here on, this many, wherever they end.
    Batch(usize, usize),
    Single(usize),
    Dropped(usize, usize),
}

fn event() -> impl Strategy<Value = Event> {
    let kind = prop::sample::select(RETRYABLE.into_iter().chain(common::FINAL).collect::<Vec<_>>());
    let step = prop::sample::select(vec![Step::Begin, Step::Claim, Step::ClaimBatch, Step::Rollback]);
    prop_oneof![
        (step, kind.clone()).prop_map(|(step, kind)| Event::Turn(step, Fails(kind))),
        kind.prop_map(|kind| Event::Turn(Step::Commit, Fails(kind))),
        Just(Event::Turn(Step::Commit, DoneBut(ErrorKind::OutcomeUnknown))),
        (0..12_usize, 0..8_usize).prop_map(|(from, count)| Event::Batch(from, count)),
        (0..12_usize).prop_map(Event::Single),
        (0..12_usize, 0..40_usize).prop_map(|(from, polls)| Event::Dropped(from, polls)),
    ]
}

/// One consumer's life: the events, then deliveries until all is acknowledged.
async fn live(events: Vec<Event>) -> Result<(), TestCaseError> {
    let all = ids(12);
    let poison = all[7];
    let inbox = inbox(Scripted::yielding());
    let runs = Runs::default();
    let handler = async |tx: &mut Tx, new: &[&MessageId]| unless_poison(&runs, poison, tx, new).await;
    for event in events {
        match event {
            Event::Turn(step, turn) => inbox.store().tell(step, [turn]),
            Event::Batch(from, count) => {
                let batch: Vec<MessageId> = all.iter().cycle().skip(from).take(count).copied().collect();
                for (id, outcome) in batch.iter().zip(inbox.process_batch(&batch, |id| *id, handler).await) {
                    let acknowledged = outcome.is_ok_and(|outcome| outcome.may_acknowledge());
                    prop_assert!(!acknowledged || inbox.find(*id).await.unwrap().is_some(), "lost {id}");
                }
            }
            Event::Single(from) => {
                let outcome = inbox.process(all[from], async |tx| enter(tx, all[from]).await).await;
                let acknowledged = outcome.is_ok_and(|outcome| outcome.may_acknowledge());
                prop_assert!(
                    !acknowledged || inbox.find(all[from]).await.unwrap().is_some(),
                    "lost {from}"
                );
            }
            Event::Dropped(from, polls) => {
                dropped_after(polls, inbox.process_batch(&all[from..], |id| *id, handler)).await;
            }
        }
        assert_whole(&inbox, &all).await;
    }
    inbox.store().recover();
    let outcomes = inbox
        .process_batch(&all, |id| *id, async |tx, new| enter_all(tx, new).await)
        .await;
    prop_assert!(
        outcomes
            .iter()
            .all(|outcome| outcome.as_ref().is_ok_and(Outcome::may_acknowledge)),
        "{outcomes:?}"
    );
    prop_assert_eq!(assert_whole(&inbox, &all).await, all.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn whatever_fails_and_whenever_it_is_dropped_each_effect_happens_once(
        events in prop::collection::vec(event(), 0..30),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        runtime.block_on(live(events))?;
    }
}

// The shape of the claims below a batch.

#[tokio::test]
async fn a_batch_is_claimed_by_the_group_of_its_inbox() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    assert!(process(&inbox, &runs, &ids(2)).await.iter().all(is_processed));
    let shipping = ConsumerGroup::new("shipping").unwrap();
    let mut tx = inbox.store().memory().begin().await.unwrap();
    for (group, new) in [(&shipping, true), (inbox.group(), false)] {
        let claim = inbox.store().try_claim(&mut tx, group, ids(2)[0].into()).await.unwrap();
        assert_eq!(claim.is_new(), new, "{group}");
    }
}
