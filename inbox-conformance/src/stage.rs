//! [`Stage`]: where a law is played. It has the fixture, notes every step, and turns surprises into [`Failure`]s.
//!
//! The store on the stage may be of any temper. It may let a claim wait for another one, or answer that one is in
//! flight, or let both go on and refuse one commit; it may have one writer, so that even to open a second transaction
//! waits. Hence two rules for all laws:
//!
//! - with a transaction open, whatever might wait for it is done by a [`Rival`], which gets a while and is then left to
//!   wait; the task that has the transaction open never waits for anybody;
//! - an answer that says "come again" is never a failure by itself, only one that never ends is.

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use inbox_core::{ConsumerGroup, ErrorKind, InboxStore, MessageId, Upkeep};
use tokio::task::JoinHandle;

use crate::consumer::Consumer;
use crate::failure::in_full;
use crate::{Failure, Fixture, Law, Options};

pub(crate) type Verdict<T = ()> = Result<T, Failure>;
pub(crate) type TxOf<F> = <<F as Fixture>::Store as InboxStore>::Tx;

/// The most steps that a failure shows of a longer story: the last ones.
const STEPS_SHOWN: usize = 15;

/// What was done so far, shared with whoever has to report a law that hangs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Diary(Arc<Mutex<Story>>);

#[derive(Debug, Default)]
struct Story {
    about: String,
    last_steps: VecDeque<String>,
    left_out: usize,
}

impl Diary {
    fn story(&self) -> MutexGuard<'_, Story> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, about: String) {
        *self.story() = Story {
            about,
            ..Story::default()
        };
    }

    fn note(&self, step: String) {
        let mut story = self.story();
        if story.last_steps.len() == STEPS_SHOWN {
            story.last_steps.pop_front();
            story.left_out += 1;
        }
        story.last_steps.push_back(step);
    }

    pub(crate) fn steps(&self) -> Vec<String> {
        let story = self.story();
        let left_out = (story.left_out > 0).then(|| format!("({} steps left out)", story.left_out));
        let about = (!story.about.is_empty()).then(|| story.about.clone());
        about
            .into_iter()
            .chain(left_out)
            .chain(story.last_steps.iter().cloned())
            .collect()
    }
}

/// Where one law is played.
pub(crate) struct Stage<F> {
    shared: Arc<Shared<F>>,
    /// Whether steps are noted.
    noted: bool,
}

struct Shared<F> {
    law: Law,
    fixture: F,
    options: Options,
    diary: Diary,
    last_message: AtomicU64,
}

impl<F> Clone for Stage<F> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            noted: self.noted,
        }
    }
}

impl<F: Fixture> Stage<F> {
    pub(crate) fn new(law: Law, fixture: F, options: Options, diary: Diary) -> Self {
        Self {
            shared: Arc::new(Shared {
                law,
                fixture,
                options,
                diary,
                last_message: AtomicU64::new(0),
            }),
            noted: true,
        }
    }

    pub(crate) fn fixture(&self) -> &F {
        &self.shared.fixture
    }

    pub(crate) fn options(&self) -> &Options {
        &self.shared.options
    }

    /// The same stage for what is done on the side: its steps are not noted, for they would stand between those of the
    /// law. The law says in its own words what it has a rival do.
    pub(crate) fn aside(&self) -> Self {
        Self {
            noted: false,
            ..self.clone()
        }
    }

    /// Begins a new story, so that a failure in it shows its own steps only.
    pub(crate) fn scene(&self, about: impl Into<String>) {
        self.shared.diary.begin(about.into());
    }

    /// Notes what is done next.
    pub(crate) fn step(&self, what: impl Into<String>) {
        if self.noted {
            self.shared.diary.note(what.into());
        }
    }

    /// A message that nobody has seen in this place.
    pub(crate) fn message(&self) -> MessageId {
        // Bits from all over, as in real ids, and the same ones at every run.
        let number = self.shared.last_message.fetch_add(1, Ordering::Relaxed) + 1;
        let bits = u128::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835) | 1;
        id_of(bits)
    }

    pub(crate) fn messages(&self, count: usize) -> Vec<MessageId> {
        (0..count).map(|_| self.message()).collect()
    }

    pub(crate) fn failure(
        &self,
        expected: impl Into<String>,
        saw: impl fmt::Display,
        suspect: impl Into<String>,
    ) -> Failure {
        Failure {
            law: self.shared.law,
            did: self.shared.diary.steps(),
            expected: expected.into(),
            saw: saw.to_string(),
            suspect: suspect.into(),
        }
    }

    /// The law is broken unless `holds`.
    pub(crate) fn ensure(
        &self,
        holds: bool,
        expected: impl Into<String>,
        saw: impl fmt::Display,
        suspect: impl Into<String>,
    ) -> Verdict {
        if holds {
            Ok(())
        } else {
            Err(self.failure(expected, saw, suspect))
        }
    }

    /// The value, where the store may not fail.
    pub(crate) fn sound<T>(&self, result: inbox_core::Result<T>, expected: &str) -> Verdict<T> {
        result.map_err(|error| {
            let suspect = match error.kind() {
                ErrorKind::Schema => {
                    "the suite has set this store up before: `setup` reported success and its work is not there (a commit \
                     that says Ok and stores nothing), or this call looks in another place"
                }
                _ => "the call itself failed, so its error is the clue",
            };
            self.failure(expected, in_full(&error), suspect)
        })
    }

    /// The value, where an error is the fixture's fault.
    pub(crate) fn fixed<T>(&self, result: inbox_core::Result<T>, method: &str) -> Verdict<T> {
        result.map_err(|error| {
            self.failure(
                format!("Fixture::{method} succeeds"),
                in_full(&error),
                "the fixture or its database, rather than the store",
            )
        })
    }

    /// A handle on the fixture's place, not set up.
    pub(crate) async fn connect(&self) -> Verdict<Arc<F::Store>> {
        self.step("opened a handle on the store");
        let store = self.fixed(self.fixture().connect().await, "connect")?;
        Ok(Arc::new(store))
    }

    /// A consumer of `group` with a handle of its own, set up.
    pub(crate) async fn consumer(&self, group: &str) -> Verdict<Consumer<F>> {
        let store = self.connect().await?;
        self.step("set it up");
        self.sound(store.setup().await, "setup succeeds")?;
        Ok(Consumer {
            stage: self.clone(),
            store,
            group: group_named(group),
        })
    }

    /// What the rival came to, which must be within bounds now.
    pub(crate) async fn join<T>(&self, mut rival: Rival<T>, waited_for: &str) -> Verdict<T> {
        match rival.within(self.options().patience()).await {
            Some(result) => Ok(result),
            None => Err(self.failure(
                format!("{waited_for} comes to an end"),
                format!("it still waits after {:?}", self.options().patience()),
                "a wait that nobody ends: a lock that was not freed, or a waiter that was not woken",
            )),
        }
    }

    /// How many effects of this name an outsider sees.
    pub(crate) async fn effects(&self, name: &str) -> Verdict<u64> {
        self.fixed(self.fixture().count_effects(name).await, "count_effects")
    }

    /// An outsider sees `count` effects of this name.
    pub(crate) async fn expect_effects(&self, name: &str, count: u64, suspect: &str) -> Verdict {
        let seen = self.effects(name).await?;
        self.ensure(
            seen == count,
            format!("{count} committed effect(s) called {name:?}"),
            format!("{seen}"),
            suspect,
        )
    }
}

/// The group of this name, which the suite itself chose.
pub(crate) fn group_named(name: &str) -> ConsumerGroup {
    ConsumerGroup::new(name).unwrap_or_else(|error| panic!("the suite has a group that cannot be: {error}"))
}

/// The message whose id is these bits.
pub(crate) fn id_of(bits: u128) -> MessageId {
    MessageId::from_uuid(inbox_core::uuid::Uuid::from_u128(bits))
        .unwrap_or_else(|error| panic!("the suite has an id that cannot be: {error}"))
}

/// A task that may have to wait for a transaction of the law's own. Ended with the law.
pub(crate) struct Rival<T>(JoinHandle<T>);

impl<T: Send + 'static> Rival<T> {
    /// Has a task of its own do something that may have to wait for a transaction of the law's.
    pub(crate) fn start(what: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(what))
    }
}

impl<T> Rival<T> {
    /// What it came to, if it comes to it within this time. Not to be asked again after an answer.
    pub(crate) async fn within(&mut self, time: Duration) -> Option<T> {
        match tokio::time::timeout(time, &mut self.0).await {
            Ok(Ok(result)) => Some(result),
            // The law's own task is where panics are made into failures.
            Ok(Err(failed)) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_cancelled) => None,
            },
            Err(_elapsed) => None,
        }
    }
}

impl<T> Drop for Rival<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Polls `future` at most `polls` times, each time when it asked for it, and drops it. `None`: it had not ended.
pub(crate) async fn poll_at_most<T>(polls: usize, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |context| {
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(Some(value));
        }
        left = left.saturating_sub(1);
        if left == 0 { Poll::Ready(None) } else { Poll::Pending }
    })
    .await
}
