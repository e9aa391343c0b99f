//! What `Inbox::process` and the claims in a caller's transaction promise.

#![allow(clippy::unwrap_used, reason = "tests may stop at the first surprise")]

mod common;

use std::error::Error as StdError;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Turn::{DoneBut, Fails, Well};
use common::{
    Declined, DriverError, FINAL, RETRYABLE, Scripted, Step, Tx, assert_whole, attempts, dropped_after, enter, id,
    inbox, long_pauses,
};
use inbox_core::{
    BoxError, Claim, Delivery, Error, ErrorKind, InFlight, Inbox, InboxStore, MemoryInbox, Outcome, Processed, Result,
    RetryPolicy, Transactions, WaitPolicy,
};

/// How often a handler ran.
#[derive(Default)]
struct Runs(AtomicUsize);

impl Runs {
    fn add(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

// What becomes of a message.

#[tokio::test]
async fn a_new_message_is_processed_and_effect_and_record_are_committed() {
    let inbox = inbox(Scripted::new());
    let outcome = inbox
        .process(id("m"), async |tx| {
            enter(tx, id("m")).await?;
            Ok::<_, Error>("invoice 7")
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed("invoice 7"));
    assert!(outcome.may_acknowledge());
    assert_eq!(inbox.store().calls(), [Step::Begin, Step::Claim, Step::Commit]);
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn a_redelivery_is_a_duplicate_with_the_time_of_the_first_and_its_handler_does_not_run() {
    let inbox = inbox(Scripted::new());
    let _processed = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    let record = inbox.find(id("m")).await.unwrap().unwrap();
    inbox.store().memory().advance_clock(Duration::from_secs(60));
    let outcome = inbox
        .process(id("m"), async |_| -> Result<()> { panic!("run for a duplicate") })
        .await
        .unwrap();
    let Outcome::Duplicate(processed) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(processed.at.is_some());
    assert_eq!(processed.at, record.processed_at);
    assert!(outcome.may_acknowledge());
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
    assert_eq!(inbox.store().count(Step::Commit), 1, "a duplicate commits nothing");
}

#[tokio::test]
async fn a_message_in_flight_elsewhere_is_not_run_and_not_to_be_acknowledged_and_later_is_a_duplicate() {
    let inbox = inbox(Scripted::new());
    let other = inbox.store().memory();
    let mut other_tx = other.begin().await.unwrap();
    assert!(
        inbox
            .store()
            .try_claim(&mut other_tx, inbox.group(), id("m").into())
            .await
            .unwrap()
            .is_new()
    );

    let handler = async |_: &mut Tx| -> Result<()> { panic!("run for a message in flight") };
    let outcome = inbox.process(id("m"), handler).await.unwrap();
    assert_eq!(outcome, Outcome::InFlight(InFlight::new()));
    assert!(!outcome.may_acknowledge());

    other_tx.apply(|ledger| ledger.push(id("m")));
    other.commit(other_tx).await.unwrap();
    let outcome = inbox.process(id("m"), handler).await.unwrap();
    assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn a_message_in_flight_elsewhere_is_processed_once_that_consumer_has_failed() {
    let inbox = inbox(Scripted::new());
    let mut other_tx = inbox.store().memory().begin().await.unwrap();
    assert!(inbox.try_claim(&mut other_tx, id("m")).await.unwrap().is_new());
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert!(!outcome.may_acknowledge());
    drop(other_tx);
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn each_group_processes_a_message_once() {
    let billing = inbox(Scripted::new());
    let shipping = billing.for_group("shipping").unwrap();
    for inbox in [&billing, &shipping] {
        let outcome = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap();
        assert_eq!(outcome, Outcome::Processed(()));
        let outcome = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap();
        assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    }
    assert_eq!(billing.store().ledger().len(), 2);
}

#[test]
fn only_what_is_committed_may_be_acknowledged() {
    assert!(Outcome::Processed(()).may_acknowledge());
    assert!(Outcome::<()>::Duplicate(Processed::default()).may_acknowledge());
    assert!(!Outcome::<()>::InFlight(InFlight::new()).may_acknowledge());
}

#[test]
fn mapping_an_outcome_changes_only_what_the_handler_returned() {
    let processed = Processed::at(std::time::SystemTime::UNIX_EPOCH);
    let in_flight = InFlight::new();
    assert_eq!(Outcome::Processed(2).map(|n| n * 3), Outcome::Processed(6));
    assert_eq!(
        Outcome::<u8>::Duplicate(processed).map(u64::from),
        Outcome::Duplicate(processed)
    );
    assert_eq!(
        Outcome::<u8>::InFlight(in_flight).map(u64::from),
        Outcome::InFlight(in_flight)
    );
}

// Errors of the handler.

#[tokio::test]
async fn a_failed_handler_leaves_neither_effect_nor_record_and_the_redelivery_is_new() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let error = inbox
        .process(id("m"), async |tx| {
            runs.add();
            enter(tx, id("m")).await.unwrap();
            Err::<(), _>(Declined(None))
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handler);
    assert!(!error.is_retryable());
    assert_eq!(runs.count(), 1, "an error that nobody called passing is not retried");
    assert_eq!(inbox.store().calls(), [Step::Begin, Step::Claim, Step::Rollback]);
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);

    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn a_handlers_error_can_be_had_back_whole() {
    let inbox = inbox(Scripted::new());
    let error = inbox
        .process(id("m"), async |_| {
            Err::<(), _>(Declined::because(std::io::Error::other("no limit left")))
        })
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "the handler failed");
    let whole = format!("{error:#}");
    assert_eq!(whole, "the handler failed: the card was declined: no limit left");
    let declined: &Declined = error.downcast_ref().unwrap();
    assert_eq!(declined.source().unwrap().to_string(), "no limit left");
    assert!(error.source().unwrap().is::<Declined>());
    assert!(error.downcast_ref::<std::io::Error>().is_some(), "its cause as well");
    assert!(error.clone().downcast_ref::<Declined>().is_some(), "of a clone, too");
}

#[tokio::test]
async fn an_inbox_error_that_a_handler_returns_passes_through_as_it_is() {
    for kind in RETRYABLE.into_iter().chain(FINAL) {
        let inbox = inbox(Scripted::new()).with_retry(RetryPolicy::never());
        let own = Error::new(kind, "from within").with_source(Declined(None));
        let error = inbox
            .process(id("m"), async |_| Err::<(), _>(own.clone()))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(error.to_string(), "from within");
        assert_eq!(error.is_retryable(), kind.is_retryable());
        assert!(error.downcast_ref::<Declined>().is_some(), "{error:?}");

        let boxed = async |_: &mut Tx| Err::<(), BoxError>(Box::new(own.clone()));
        assert_eq!(inbox.process(id("m"), boxed).await.unwrap_err().kind(), kind, "boxed");
        assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);
    }
}

#[tokio::test]
async fn handlers_may_fail_with_any_common_error_type() {
    let inbox = inbox(Scripted::new());
    let texts = [
        inbox.process(id("m"), async |_| Err::<(), &str>("no stock")).await,
        inbox
            .process(id("m"), async |_| Err::<(), String>("no stock".into()))
            .await,
        inbox
            .process(id("m"), async |_| Err::<(), BoxError>("no stock".into()))
            .await,
        inbox
            .process(id("m"), async |_| Err::<(), _>(std::io::Error::other("no stock")))
            .await,
        inbox
            .process(id("m"), async |_| Err::<(), _>(anyhow::anyhow!("no stock")))
            .await,
    ];
    for result in texts {
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Handler);
        assert!(format!("{error:#}").contains("no stock"), "{error:#}");
        assert!(error.source().unwrap().to_string().contains("no stock"));
    }
    let never = inbox
        .process(id("m"), async |_| Ok::<_, std::convert::Infallible>(1))
        .await;
    assert_eq!(never.unwrap(), Outcome::Processed(1));
}

/// What every handler with `?` over anyhow relies on: the wrapping changes nothing.
#[cfg(feature = "anyhow")]
#[tokio::test]
async fn an_error_inside_anyhow_can_be_had_back() {
    let inbox = inbox(Scripted::new());
    let error = inbox
        .process(id("m"), async |_| Err::<(), anyhow::Error>(Declined(None).into()))
        .await
        .unwrap_err();
    assert!(error.downcast_ref::<Declined>().is_some(), "{error:?}");
}

#[cfg(feature = "anyhow")]
#[tokio::test]
async fn an_inbox_error_inside_anyhow_keeps_its_kind() {
    let inbox = inbox(Scripted::new()).with_retry(RetryPolicy::never());
    let error = inbox
        .process(id("m"), async |_| {
            Err::<(), anyhow::Error>(Error::new(ErrorKind::Denied, "not for you").into())
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
}

#[cfg(feature = "anyhow")]
#[tokio::test]
async fn a_drivers_passing_error_inside_anyhow_is_run_again_with_or_without_context() {
    for with_context in [true, false] {
        let inbox = inbox(Scripted::new());
        let runs = Runs::default();
        let outcome = inbox
            .process(id("m"), async |tx| {
                if runs.add() == 1 {
                    let error = anyhow::Error::from(DriverError(ErrorKind::Conflict));
                    return Err(if with_context {
                        error.context("writing the invoice")
                    } else {
                        error
                    });
                }
                Ok(enter(tx, id("m")).await?)
            })
            .await;
        assert!(
            matches!(outcome, Ok(Outcome::Processed(()))),
            "context {with_context}: {outcome:?}"
        );
        assert_eq!(runs.count(), 2);
    }
}

#[tokio::test]
async fn a_failed_rollback_hides_neither_the_handlers_error_nor_the_answer() {
    let inbox = inbox(Scripted::new().always(Step::Rollback, Fails(ErrorKind::Unavailable)));
    let error = inbox
        .process(id("m"), async |_| Err::<(), _>(Declined(None)))
        .await
        .unwrap_err();
    assert!(error.downcast_ref::<Declined>().is_some(), "{error:?}");
    let _processed = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
}

// Running again.

#[tokio::test]
async fn a_passing_failure_of_any_step_is_run_again_from_the_start() {
    for step in [Step::Begin, Step::Claim, Step::Commit] {
        for kind in RETRYABLE {
            let inbox = inbox(Scripted::new().then(step, [Fails(kind), Fails(kind)]));
            let outcome = inbox.process(id("m"), async |tx| enter(tx, id("m")).await).await;
            assert_eq!(outcome.unwrap(), Outcome::Processed(()), "{step:?} {kind}");
            assert_eq!(
                inbox.store().count(Step::Begin),
                3,
                "{step:?} {kind}: a transaction for each attempt"
            );
            assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
        }
    }
}

#[tokio::test]
async fn a_lasting_failure_of_any_step_is_given_back_at_once() {
    for step in [Step::Begin, Step::Claim, Step::Commit] {
        for kind in FINAL {
            let inbox = inbox(Scripted::new().always(step, Fails(kind)));
            let error = inbox
                .process(id("m"), async |tx| enter(tx, id("m")).await)
                .await
                .unwrap_err();
            assert_eq!(error.kind(), kind, "{step:?}");
            assert_eq!(error.to_string(), format!("scripted: {kind}"));
            assert_eq!(inbox.store().count(Step::Begin), 1, "{step:?} {kind}");
            assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);
            inbox.store().recover();
            let outcome = inbox
                .process(id("m"), async |tx| enter(tx, id("m")).await)
                .await
                .unwrap();
            assert_eq!(outcome, Outcome::Processed(()), "the redelivery after {step:?} {kind}");
        }
    }
}

#[tokio::test]
async fn every_attempt_whose_claim_or_handler_failed_is_rolled_back_before_the_next() {
    let inbox = inbox(Scripted::new().then(Step::Claim, [Fails(ErrorKind::Busy)]));
    let runs = Runs::default();
    let outcome = inbox
        .process(id("m"), async |tx| {
            if runs.add() == 1 {
                return Err(Declined::because(DriverError(ErrorKind::Conflict)));
            }
            enter(tx, id("m")).await.map_err(Declined::because)
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    let failed = [Step::Begin, Step::Claim, Step::Rollback];
    let good = [Step::Begin, Step::Claim, Step::Commit];
    assert_eq!(inbox.store().calls(), [failed, failed, good].concat());
}

#[tokio::test]
async fn a_drivers_passing_error_however_deep_in_the_handlers_is_run_again() {
    for kind in RETRYABLE {
        for depth in 0..4 {
            let inbox = inbox(Scripted::new());
            let runs = Runs::default();
            let outcome = inbox
                .process(id("m"), async |tx| {
                    if runs.add() > 2 {
                        return Ok(enter(tx, id("m")).await?);
                    }
                    tx.apply(|_| panic!("an effect of an attempt that failed"));
                    let mut error: BoxError = DriverError(kind).into();
                    for _ in 0..depth {
                        error = Declined(Some(error)).into();
                    }
                    Err(error)
                })
                .await;
            assert_eq!(outcome.unwrap(), Outcome::Processed(()), "{kind} at depth {depth}");
            assert_eq!(runs.count(), 3);
            assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
        }
    }
}

#[tokio::test]
async fn a_drivers_lasting_error_in_the_handlers_is_not_run_again() {
    for kind in FINAL {
        let inbox = inbox(Scripted::new());
        let runs = Runs::default();
        let error = inbox
            .process(id("m"), async |_| {
                runs.add();
                Err::<(), _>(Declined::because(DriverError(kind)))
            })
            .await
            .unwrap_err();
        assert_eq!(
            (error.kind(), error.is_retryable(), runs.count()),
            (ErrorKind::Handler, false, 1),
            "{kind}"
        );
    }
}

/// The outermost link knows best: what the driver said below it was judged by whoever wrapped it.
#[tokio::test]
async fn an_inbox_error_in_the_handlers_own_decides_before_what_lies_below_it() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let error = inbox
        .process(id("m"), async |_| {
            runs.add();
            let own = Error::new(ErrorKind::Store, "the disk is full").with_source(DriverError(ErrorKind::Conflict));
            Err::<(), _>(Declined::because(own))
        })
        .await
        .unwrap_err();
    assert_eq!((error.is_retryable(), runs.count()), (false, 1));
}

/// A handler that processes in a second inbox gets errors of kind `Handler` that are retryable all the same.
#[tokio::test]
async fn an_inbox_error_in_the_handlers_own_is_run_again_exactly_if_it_is_retryable() {
    let inner = inbox(Scripted::new()).with_retry(RetryPolicy::never());
    let passing = inner
        .process(id("m"), async |_| Err::<(), _>(DriverError(ErrorKind::Busy)))
        .await
        .unwrap_err();
    assert_eq!((passing.kind(), passing.is_retryable()), (ErrorKind::Handler, true));

    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let outcome = inbox
        .process(id("m"), async |tx| {
            if runs.add() == 1 {
                return Err(Declined::because(passing.clone()));
            }
            enter(tx, id("m")).await.map_err(Declined::because)
        })
        .await;
    assert!(matches!(outcome, Ok(Outcome::Processed(()))), "{outcome:?}");
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_found_out_by_the_next_attempt_to_have_happened() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [DoneBut(ErrorKind::OutcomeUnknown)]));
    let runs = Runs::default();
    let outcome = inbox
        .process(id("m"), async |tx| {
            runs.add();
            enter(tx, id("m")).await
        })
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    assert!(outcome.may_acknowledge());
    assert_eq!(runs.count(), 1);
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_found_out_by_the_next_attempt_not_to_have_happened() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [Fails(ErrorKind::OutcomeUnknown)]));
    let runs = Runs::default();
    let outcome = inbox
        .process(id("m"), async |tx| {
            runs.add();
            enter(tx, id("m")).await
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(runs.count(), 2);
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

/// `Unavailable` says that no commit was sent, and one was: whoever compensates on it would undo what is stored.
#[tokio::test]
async fn a_commit_of_unknown_outcome_is_still_unknown_if_the_store_is_gone_after_it() {
    for (step, kind) in [
        (Step::Begin, ErrorKind::Unavailable),
        (Step::Begin, ErrorKind::Denied),
        (Step::Claim, ErrorKind::Unavailable),
    ] {
        let store = Scripted::new().then(Step::Commit, [DoneBut(ErrorKind::OutcomeUnknown)]);
        let inbox = inbox(store.then(step, [Well, Fails(kind), Fails(kind)]));
        let error = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutcomeUnknown, "{step:?}: {error:?}");
        assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
    }
}

#[tokio::test]
async fn a_commit_that_a_claim_found_not_to_have_happened_is_unknown_no_more() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [Fails(ErrorKind::OutcomeUnknown)]));
    let runs = Runs::default();
    let error = inbox
        .process(id("m"), async |tx| {
            if runs.add() > 1 {
                return Err(Declined(None));
            }
            enter(tx, id("m")).await.map_err(Declined::because)
        })
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handler, "{error:?}");
    assert!(error.downcast_ref::<Declined>().is_some(), "{error:?}");
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);
}

#[tokio::test]
async fn attempts_are_as_many_as_the_policy_says_and_the_error_says_so() {
    for count in [1, 2, 5] {
        for step in [Step::Begin, Step::Claim, Step::Commit] {
            let inbox = inbox(Scripted::new().always(step, Fails(ErrorKind::Conflict))).with_retry(attempts(count));
            let error = inbox
                .process(id("m"), async |tx| enter(tx, id("m")).await)
                .await
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Conflict);
            assert!(error.is_retryable(), "the next delivery may fare better");
            assert_eq!(inbox.store().count(Step::Begin), count as usize, "{step:?}");
            let text = error.to_string();
            assert_eq!(text.contains(&format!("after {count} attempts")), count > 1, "{text}");
            assert!(text.contains("scripted: conflict"), "{text}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn unless_told_otherwise_there_are_ten_attempts_with_pauses_between_them() {
    let store = Scripted::new().always(Step::Begin, Fails(ErrorKind::Unavailable));
    let inbox = Inbox::new(store, "billing").unwrap();
    let before = tokio::time::Instant::now();
    let error = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(inbox.store().count(Step::Begin), 10);
    assert!(before.elapsed() > Duration::from_secs(1), "{:?}", before.elapsed());
}

#[tokio::test(start_paused = true)]
async fn pauses_are_never_longer_than_twice_the_longest() {
    let (first, longest) = (Duration::from_secs(3600), Duration::from_secs(1));
    for policy in [
        attempts(4).with_pauses(first, longest),
        attempts(4).with_pauses(longest, longest),
        attempts(4).with_pauses(Duration::from_millis(1), longest),
    ] {
        let store = Scripted::new().always(Step::Begin, Fails(ErrorKind::Unavailable));
        let inbox = Inbox::new(store, "billing").unwrap().with_retry(policy);
        let before = tokio::time::Instant::now();
        inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap_err();
        assert!(
            before.elapsed() <= 3 * 2 * longest + Duration::from_millis(10),
            "{:?}",
            before.elapsed()
        );
    }
}

#[tokio::test]
async fn the_policy_never_makes_one_attempt_whatever_fails() {
    for step in [Step::Begin, Step::Claim, Step::Commit] {
        for kind in RETRYABLE {
            let inbox = inbox(Scripted::new().always(step, Fails(kind))).with_retry(RetryPolicy::never());
            let error = inbox
                .process(id("m"), async |tx| enter(tx, id("m")).await)
                .await
                .unwrap_err();
            assert_eq!(error.kind(), kind);
            assert_eq!(error.to_string(), format!("scripted: {kind}"));
            assert_eq!(inbox.store().count(Step::Begin), 1);
        }
    }
}

#[tokio::test]
async fn retry_if_adds_the_handlers_errors_that_it_names_and_no_others() {
    let is_timeout = |error: &std::io::Error| error.kind() == std::io::ErrorKind::TimedOut;
    for (kind, expected) in [(std::io::ErrorKind::TimedOut, 3), (std::io::ErrorKind::NotFound, 1)] {
        let inbox = inbox(Scripted::new());
        let runs = Runs::default();
        let error = inbox
            .retry_if(is_timeout)
            .process(id("m"), async |_| {
                runs.add();
                Err::<(), _>(std::io::Error::from(kind))
            })
            .await
            .unwrap_err();
        assert_eq!(runs.count(), expected);
        assert_eq!(error.kind(), ErrorKind::Handler);
        assert_eq!(error.is_retryable(), expected > 1);
        assert_eq!(error.downcast_ref::<std::io::Error>().unwrap().kind(), kind);
    }
}

#[tokio::test]
async fn retry_if_leaves_the_retries_of_the_store_in_force() {
    let store = Scripted::new().then(Step::Claim, [Fails(ErrorKind::Conflict)]);
    let inbox = inbox(store.then(Step::Commit, [Fails(ErrorKind::Busy)]));
    let outcome = inbox
        .retry_if(|_: &Error| false)
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
}

#[tokio::test]
async fn retry_if_makes_an_inbox_error_of_the_handlers_passing_that_was_not() {
    let inbox = inbox(Scripted::new());
    let runs = Runs::default();
    let error = inbox
        .retry_if(|error: &Error| error.kind() == ErrorKind::Store)
        .process(id("m"), async |_| {
            runs.add();
            Err::<(), _>(Error::new(ErrorKind::Store, "hiccup"))
        })
        .await
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.is_retryable(), runs.count()),
        (ErrorKind::Store, true, 3)
    );
}

#[tokio::test]
async fn every_attempt_runs_the_handler_as_it_was_given() {
    let inbox = inbox(Scripted::new().then(Step::Commit, [Fails(ErrorKind::Conflict), Fails(ErrorKind::Conflict)]));
    let seen = Mutex::new(Vec::new());
    let seen = &seen;
    let mut counter = 0;
    let outcome = inbox
        .process(id("m"), async move |tx| {
            counter += 1;
            seen.lock().unwrap().push(counter);
            enter(tx, id("m")).await
        })
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(*seen.lock().unwrap(), [1, 1, 1]);
}

// Panics and dropped futures.

#[tokio::test]
async fn a_handlers_panic_passes_through_and_all_is_rolled_back() {
    let inbox = inbox(Scripted::new());
    let spawned = inbox.clone();
    let joined = tokio::spawn(async move {
        spawned
            .process(id("m"), async |tx| -> Result<()> {
                enter(tx, id("m")).await?;
                panic!("a bug in the handler");
            })
            .await
    });
    let panic = joined.await.unwrap_err().into_panic();
    assert_eq!(panic.downcast_ref(), Some(&"a bug in the handler"));
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);
    let outcome = inbox
        .process(id("m"), async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    assert_eq!(outcome, Outcome::Processed(()), "not in flight for ever");
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

/// Drops a `process` at each of its awaits in turn, in a store that fails as scripted.
async fn drop_at_each_await(script: &[(Step, common::Turn)]) {
    let mut polls = 0;
    loop {
        let store = Scripted::yielding();
        for &(step, turn) in script {
            store.tell(step, [turn]);
        }
        let inbox = Inbox::new(store, "billing")
            .unwrap()
            .with_retry(long_pauses(attempts(5)));
        let first = dropped_after(polls, inbox.process(id("m"), async |tx| enter(tx, id("m")).await)).await;
        assert_whole(&inbox, &[id("m")]).await;

        inbox.store().recover();
        let redelivery = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap();
        assert!(
            redelivery.may_acknowledge(),
            "dropped after {polls} polls: {redelivery:?}"
        );
        assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
        if let Some(outcome) = first {
            assert!(outcome.unwrap().may_acknowledge());
            assert!(matches!(redelivery, Outcome::Duplicate(_)));
            break;
        }
        polls += 1;
    }
    // Begin, claim, handler and commit are pending twice each.
    assert!(polls >= 8 + script.len(), "only {polls} polls");
}

#[tokio::test(start_paused = true)]
async fn a_process_dropped_at_any_await_leaves_nothing_half_done() {
    drop_at_each_await(&[]).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_dropped_at_any_await_of_its_retries_leaves_nothing_half_done() {
    drop_at_each_await(&[
        (Step::Begin, Fails(ErrorKind::Unavailable)),
        (Step::Claim, DoneBut(ErrorKind::Busy)),
        (Step::Commit, Fails(ErrorKind::Conflict)),
    ])
    .await;
    drop_at_each_await(&[(Step::Commit, DoneBut(ErrorKind::OutcomeUnknown))]).await;
    drop_at_each_await(&[
        (Step::Rollback, Fails(ErrorKind::Unavailable)),
        (Step::Claim, Fails(ErrorKind::Conflict)),
    ])
    .await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_process_dropped_at_any_await_leaves_nothing_at_all() {
    let mut polls = 0;
    loop {
        let inbox = inbox(Scripted::yielding());
        let handler = async |tx: &mut Tx| {
            enter(tx, id("m")).await.unwrap();
            Err::<(), _>(Declined(None))
        };
        let finished = dropped_after(polls, inbox.process(id("m"), handler)).await;
        assert_eq!(assert_whole(&inbox, &[id("m")]).await, 0);
        let outcome = inbox
            .process(id("m"), async |tx| enter(tx, id("m")).await)
            .await
            .unwrap();
        assert_eq!(outcome, Outcome::Processed(()), "dropped after {polls} polls");
        if finished.is_some() {
            break;
        }
        polls += 1;
    }
    assert!(polls >= 8, "only {polls} polls");
}

// Claims in the caller's transaction.

#[tokio::test]
async fn a_claim_commits_with_the_callers_transaction_and_not_before() {
    let inbox = inbox(Scripted::new());
    let store = inbox.store().memory();
    let mut tx = store.begin().await.unwrap();
    assert!(!inbox.is_duplicate(&mut tx, id("m")).await.unwrap());
    assert!(inbox.find(id("m")).await.unwrap().is_none());
    assert!(
        inbox.is_duplicate(&mut tx, id("m")).await.unwrap(),
        "the second time in one transaction"
    );
    tx.apply(|ledger| ledger.push(id("m")));
    store.commit(tx).await.unwrap();
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
    let mut tx = store.begin().await.unwrap();
    assert!(inbox.is_duplicate(&mut tx, id("m")).await.unwrap());
}

#[tokio::test]
async fn is_duplicate_calls_a_message_in_flight_neither_new_nor_duplicate() {
    let inbox = inbox(Scripted::new());
    let store = inbox.store().memory();
    let mut other = store.begin().await.unwrap();
    let mut tx = store.begin().await.unwrap();
    assert!(!inbox.is_duplicate(&mut other, id("m")).await.unwrap());
    let error = inbox.is_duplicate(&mut tx, id("m")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InFlight);
    assert!(error.is_retryable());
    let text = error.to_string();
    assert!(
        text.contains(&id("m").to_string()) && text.contains("billing"),
        "{text}"
    );
    assert!(
        !inbox.is_duplicate(&mut tx, id("n")).await.unwrap(),
        "the transaction works on"
    );
}

#[tokio::test]
async fn a_batch_of_claims_is_answered_in_the_order_asked() {
    let inbox = inbox(Scripted::new());
    let store = inbox.store().memory();
    let _processed = inbox
        .process(id("done"), async |tx| enter(tx, id("done")).await)
        .await
        .unwrap();
    let mut other = store.begin().await.unwrap();
    assert!(inbox.try_claim(&mut other, id("elsewhere")).await.unwrap().is_new());

    let mut tx = store.begin().await.unwrap();
    let deliveries = ["new", "elsewhere", "done", "new", "other"].map(|name| Delivery::new(id(name)));
    let claims = inbox.try_claim_batch(&mut tx, &deliveries).await.unwrap();
    let claims: Vec<Claim> = claims.into_iter().map(Result::unwrap).collect();
    assert_eq!(claims.len(), 5);
    assert!(claims[0].is_new() && claims[4].is_new(), "{claims:?}");
    assert!(claims[1].is_in_flight(), "{claims:?}");
    assert!(claims[2].is_duplicate() && claims[3].is_duplicate(), "{claims:?}");
    assert!(inbox.try_claim_batch(&mut tx, &[]).await.unwrap().is_empty());
}

// Payloads.

#[tokio::test]
async fn another_payload_under_the_same_id_is_a_mismatch_on_every_path() {
    let inbox = inbox(Scripted::new());
    let (original, reused) = (id("m").with_payload("10 EUR"), id("m").with_payload("99 EUR"));
    let _processed = inbox
        .process(original, async |tx| enter(tx, id("m")).await)
        .await
        .unwrap();
    let unreachable = async |_: &mut Tx| -> Result<()> { panic!("run for a duplicate") };

    let mut errors = vec![inbox.process(reused, unreachable).await.unwrap_err()];
    let outcomes = inbox
        .process_batch(&[reused], |delivery| *delivery, async |tx, _| unreachable(tx).await)
        .await;
    errors.extend(outcomes.into_iter().map(Result::unwrap_err));
    let mut tx = inbox.store().memory().begin().await.unwrap();
    errors.push(inbox.try_claim(&mut tx, reused).await.unwrap_err());
    errors.push(inbox.is_duplicate(&mut tx, reused).await.unwrap_err());
    let claims = inbox.try_claim_batch(&mut tx, &[reused]).await.unwrap();
    errors.extend(claims.into_iter().map(Result::unwrap_err));
    assert_eq!(errors.len(), 5);
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
        assert!(!error.is_retryable());
        let text = error.to_string();
        let (stored, given) = (original.fingerprint().unwrap(), reused.fingerprint().unwrap());
        for part in [id("m").to_string(), stored.to_string(), given.to_string()] {
            assert!(text.contains(&part), "{text}");
        }
    }

    // The same payload is an ordinary duplicate on each of them.
    assert!(inbox.process(original, unreachable).await.unwrap().may_acknowledge());
    let outcomes = inbox
        .process_batch(&[original], |delivery| *delivery, async |tx, _| unreachable(tx).await)
        .await;
    assert!(matches!(outcomes[..], [Ok(Outcome::Duplicate(_))]), "{outcomes:?}");
    assert!(inbox.try_claim(&mut tx, original).await.unwrap().is_duplicate());
    assert!(inbox.is_duplicate(&mut tx, original).await.unwrap());
    let claims = inbox.try_claim_batch(&mut tx, &[original]).await.unwrap();
    assert!(matches!(claims[..], [Ok(Claim::Duplicate(_))]), "{claims:?}");
    assert_eq!(assert_whole(&inbox, &[id("m")]).await, 1);
}

#[tokio::test]
async fn payloads_are_not_compared_where_either_side_has_no_fingerprint() {
    let inbox = inbox(Scripted::new());
    let payload = |name: &str| id(name).with_payload("10 EUR");
    for (first, second) in [
        (payload("stored only"), Delivery::new(id("stored only"))),
        (Delivery::new(id("given only")), payload("given only")),
        (Delivery::new(id("neither")), Delivery::new(id("neither"))),
    ] {
        let _processed = inbox
            .process(first, async |tx| enter(tx, first.id()).await)
            .await
            .unwrap();
        let outcome = inbox
            .process(second, async |tx| enter(tx, second.id()).await)
            .await
            .unwrap();
        assert!(matches!(outcome, Outcome::Duplicate(_)), "{outcome:?}");
    }
}

#[tokio::test]
async fn another_payload_in_the_same_transaction_is_a_mismatch_too() {
    let inbox = inbox(Scripted::new());
    let mut tx = inbox.store().memory().begin().await.unwrap();
    assert!(
        inbox
            .try_claim(&mut tx, id("m").with_payload("a"))
            .await
            .unwrap()
            .is_new()
    );
    let error = inbox.try_claim(&mut tx, id("m").with_payload("b")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PayloadMismatch);
    assert!(
        inbox
            .try_claim(&mut tx, id("m").with_payload("a"))
            .await
            .unwrap()
            .is_duplicate()
    );
}

#[tokio::test]
async fn a_handler_that_failed_leaves_no_fingerprint_behind() {
    let inbox = inbox(Scripted::new());
    inbox
        .process(id("m").with_payload("wrong"), async |_| Err::<(), _>(Declined(None)))
        .await
        .unwrap_err();
    let right = id("m").with_payload("right");
    let outcome = inbox.process(right, async |tx| enter(tx, id("m")).await).await.unwrap();
    assert_eq!(outcome, Outcome::Processed(()));
    assert_eq!(
        inbox.find(id("m")).await.unwrap().unwrap().fingerprint,
        right.fingerprint()
    );
}

// Counts.

#[tokio::test]
async fn counts_are_of_claims_by_their_answers_and_a_duplicate_is_no_error() {
    let inbox = Inbox::new(MemoryInbox::new().with_wait(WaitPolicy::DontWait), "billing").unwrap();
    let clone = inbox.clone();
    for number in 0..10 {
        let _outcome = clone
            .process(id(&format!("{number}")), async |_| Ok::<_, Error>(()))
            .await
            .unwrap();
    }
    for number in 0..3 {
        let _outcome = inbox
            .process(id(&format!("{number}")), async |_| Ok::<_, Error>(()))
            .await
            .unwrap();
    }
    let mut other = inbox.store().begin().await.unwrap();
    let group = inbox.group().clone();
    assert!(
        inbox
            .store()
            .try_claim(&mut other, &group, id("elsewhere").into())
            .await
            .unwrap()
            .is_new()
    );
    let _outcome = inbox
        .process(id("elsewhere"), async |_| Ok::<_, Error>(()))
        .await
        .unwrap();
    let counts = inbox.counts();
    assert_eq!(
        (counts.claimed, counts.duplicate, counts.in_flight, counts.error),
        (10, 3, 1, 0)
    );
    assert_eq!(clone.counts(), counts, "clones count together");
    assert_eq!(
        inbox.for_group("shipping").unwrap().counts(),
        inbox_core::Counts::default()
    );
}

#[tokio::test]
async fn counts_have_an_error_for_each_claim_that_failed_or_had_another_payload() {
    let inbox = inbox(Scripted::new().then(Step::Claim, [Fails(ErrorKind::Conflict), Fails(ErrorKind::Conflict)]));
    let original = id("m").with_payload("a");
    let _processed = inbox.process(original, async |_| Ok::<_, Error>(())).await.unwrap();
    inbox
        .process(id("m").with_payload("b"), async |_| Ok::<_, Error>(()))
        .await
        .unwrap_err();
    let counts = inbox.counts();
    assert_eq!(
        (counts.claimed, counts.duplicate, counts.in_flight, counts.error),
        (1, 0, 0, 3)
    );
}

#[tokio::test]
async fn a_batch_counts_each_of_its_messages() {
    let inbox = inbox(Scripted::new());
    let batch = ["a", "b", "a"].map(|name| Delivery::new(id(name)));
    let outcomes = inbox
        .process_batch(&batch, |delivery| *delivery, async |_, _| Ok::<_, Error>(()))
        .await;
    assert_eq!(outcomes.len(), 3);
    let counts = inbox.counts();
    assert_eq!(
        (counts.claimed, counts.duplicate, counts.in_flight, counts.error),
        (2, 1, 0, 0)
    );
}

#[tokio::test]
async fn a_handlers_error_is_not_a_claims() {
    let inbox = inbox(Scripted::new());
    inbox
        .process(id("m"), async |_| Err::<(), _>(Declined(None)))
        .await
        .unwrap_err();
    let counts = inbox.counts();
    assert_eq!((counts.claimed, counts.error), (1, 0));
}

#[test]
fn a_policy_says_what_it_is_in_a_const() {
    const POLICY: RetryPolicy = RetryPolicy::never()
        .with_attempts(NonZeroU32::MAX)
        .with_pauses(Duration::MAX, Duration::MAX);
    assert_ne!(POLICY, RetryPolicy::never());
    assert_ne!(RetryPolicy::default(), RetryPolicy::never());
}
