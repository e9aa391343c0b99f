//! Running the suite: [`run`], [`run_with`], [`run_law`], and what the macro [`laws!`](crate::laws) calls.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::laws;
use crate::report::LawReport;
use crate::stage::{Diary, Stage};
use crate::{Failure, Fixture, Law, Options, Outcome, Report};

/// How long a law that was stopped gets to let go of its fixture.
const STOPPING: Duration = Duration::from_secs(1);

/// Runs all laws one after another, each on a fixture of its own from `fixture`, as the
/// [environment](Options::from_environment) asks.
///
/// Never panics and never hangs: a panic of the store or of the fixture and a step that does not end are failures of the
/// law that was at it. The one thing it cannot stop is a thread that never yields: give it a runtime with two threads,
/// and a law that blocks one is still reported.
///
/// # Panics
///
/// Only outside of a tokio runtime with time enabled.
pub async fn run<F: Fixture>(fixture: impl AsyncFn() -> F) -> Report {
    run_with(&Options::from_environment(), fixture).await
}

/// As [`run`], as `options` ask: those laws, so hard.
///
/// # Panics
///
/// As there.
pub async fn run_with<F: Fixture>(options: &Options, fixture: impl AsyncFn() -> F) -> Report {
    let mut reports = Vec::with_capacity(Law::ALL.len());
    for law in Law::ALL.iter().copied().filter(|law| options.asks_for(*law)) {
        let began = Instant::now();
        let outcome = run_law(law, options, &fixture).await;
        reports.push(LawReport {
            law,
            outcome,
            took: began.elapsed(),
        });
    }
    Report::new(reports)
}

/// Runs one law, as `options` ask.
///
/// # Panics
///
/// As [`run`].
pub async fn run_law<F: Fixture>(law: Law, options: &Options, fixture: impl AsyncFn() -> F) -> Outcome {
    for act in laws::acts(law) {
        match play(law, act, options, &fixture).await {
            Outcome::Passed => {}
            other => return other,
        }
    }
    Outcome::Passed
}

/// Plays one act of a law on a fixture of its own.
async fn play<F: Fixture>(law: Law, act: usize, options: &Options, fixture: impl AsyncFn() -> F) -> Outcome {
    let diary = Diary::default();
    let fail = |expected: &str, saw: String, suspect: &str| {
        Outcome::Failed(Failure {
            law,
            did: diary.steps(),
            expected: expected.into(),
            saw,
            suspect: suspect.into(),
        })
    };
    let making = catching(async {
        let fixture = fixture().await;
        let cannot = match fixture.cannot(law) {
            None => laws::not_offered(law, &fixture).await,
            declared => declared,
        };
        (fixture, cannot)
    });
    let (fixture, cannot) = match tokio::time::timeout(options.limit(), making).await {
        Ok(Ok(made)) => made,
        Ok(Err(panic)) => {
            return fail(
                "a fixture is made",
                said(panic.as_ref()),
                "the expression that makes it",
            );
        }
        Err(_elapsed) => {
            return fail(
                "a fixture is made",
                format!("it is not ready after {:?}", options.limit()),
                "the expression that makes it, or a database that cannot be reached",
            );
        }
    };
    if let Some(reason) = cannot {
        return Outcome::DoesNotApply(reason);
    }
    let stage = Stage::new(law, fixture, options.clone(), diary.clone());
    // A task of its own, so that one that blocks its thread does not block the clock that stops it.
    let mut playing = tokio::spawn(async move { laws::play(law, act, &stage).await });
    match tokio::time::timeout(options.limit(), &mut playing).await {
        Ok(Ok(Ok(()))) => Outcome::Passed,
        Ok(Ok(Err(failure))) => Outcome::Failed(failure),
        Ok(Err(failed)) => match failed.try_into_panic() {
            Ok(panic) => fail(
                "no panic: a store returns errors",
                said(panic.as_ref()),
                "the store or the fixture; the panic's own message on standard error says where",
            ),
            Err(cancelled) => fail(
                "the law runs to its end",
                format!("its task was stopped: {cancelled}"),
                "a runtime that shuts down",
            ),
        },
        Err(_elapsed) => {
            playing.abort();
            let _ = tokio::time::timeout(STOPPING, playing).await;
            fail(
                "the last step comes to an end",
                format!("it had not after {:?}, the time limit of the law", options.limit()),
                "two transactions that wait for each other, a lock that nobody frees, a waiter that nobody wakes, or a \
                 call that blocks its thread",
            )
        }
    }
}

/// Runs one law as a test: panics with the failure.
///
/// # Panics
///
/// If the law is broken.
#[doc(hidden)]
pub async fn uphold<F: Fixture>(law: Law, fixture: impl AsyncFn() -> F) {
    match run_law(law, &Options::from_environment(), fixture).await {
        Outcome::Passed => {}
        Outcome::DoesNotApply(reason) => println!("the law `{law}` does not apply: {reason}"),
        Outcome::Failed(failure) => panic!("{failure}"),
    }
}

/// The future's value, or what it panicked with.
async fn catching<T>(future: impl Future<Output = T>) -> Result<T, Box<dyn Any + Send>> {
    let mut future = pin!(future);
    poll_fn(move |context| {
        // Nothing of the future is used after a panic but its drop.
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(value)) => Poll::Ready(Ok(value)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    })
    .await
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    match text {
        Some(text) => format!("a panic: {text}"),
        None => "a panic without a text".into(),
    }
}
