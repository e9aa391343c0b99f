//! What to do with the deliveries of one transaction: claim, handle, commit; and what to do with one that is given up.

use std::any::Any;
use std::error::Error as StdError;
use std::fmt;
use std::num::NonZeroU32;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tracing::Instrument;

use super::broker::{BrokerMessage, GivenUp, Handled};
use crate::process::boxed;
use crate::{
    BoxError, Claim, DeadLetter, DeadLetterInfo, DeadLetterState, DeadLetters, Delivery, Error, ErrorKind, InFlight,
    Inbox, Key, MessageId, Outcome, Result, Transactions,
};

/// How often a batch is handled again without the message that failed, before its messages are handled one by one.
const ROUNDS: usize = 3;

/// A delivery that the consumer has in hand.
pub(super) struct Item<M> {
    pub(super) message: Arc<M>,
    /// Which of the deliveries of this consumer it is.
    pub(super) number: u64,
    /// What it must not overtake another of.
    pub(super) lane: Option<Arc<str>>,
    /// Failed attempts at this very delivery.
    pub(super) failures: u32,
    /// How often it was put off without having failed.
    pub(super) put_off: u32,
    /// When it may be tried again.
    pub(super) not_before: Option<tokio::time::Instant>,
    /// Its dead letter stands there, on trial.
    on_trial: bool,
    /// It is not to be tried any more, only its letter is to be taken back.
    release: bool,
    /// Why it is to be given up, where that is decided and not done yet.
    condemned: Option<Error>,
}

impl<M: BrokerMessage> Item<M> {
    pub(super) fn new(message: M, number: u64, lane: Option<Arc<str>>) -> Self {
        Self {
            message: Arc::new(message),
            number,
            lane,
            failures: 0,
            put_off: 0,
            not_before: None,
            on_trial: false,
            release: false,
            condemned: None,
        }
    }

    /// The same with a newer delivery of the message.
    pub(super) fn delivered_again(self, newer: Self) -> Self {
        Self {
            message: newer.message,
            number: newer.number,
            ..self
        }
    }

    /// Which attempt at the message the next one is.
    pub(super) fn attempt(&self) -> u32 {
        self.message.attempt().saturating_add(self.failures)
    }

    /// Decides that it is given up, if nothing else was the reason before.
    pub(super) fn condemn(&mut self, error: Error) {
        self.condemned.get_or_insert(error);
    }

    /// Whether more is to be done with it than to handle it, so that it is not one of a batch.
    pub(super) fn is_special(&self, last_attempt: u32) -> bool {
        self.condemned.is_some() || self.attempt() >= last_attempt
    }

    /// Prepares it for being handed back to the broker. `false` if something is to be done in the store before: to give it
    /// up, where the broker does not deliver it again; to take its letter back, where it stands on trial.
    pub(super) fn may_go_back(&mut self, deliveries: Option<NonZeroU32>) -> bool {
        if deliveries.is_some_and(|most| self.message.attempt() >= most.get()) {
            self.condemn(Error::new(
                ErrorKind::Handler,
                "the consumer was shut down before the last delivery of this message was handled; put it back",
            ));
            return false;
        }
        self.release = self.on_trial && self.condemned.is_none();
        !self.release
    }
}

/// What became of a delivery.
#[derive(Debug)]
pub(super) enum Fate {
    /// Its effect is committed: now, or (a duplicate) before.
    Handled { proof: Handled, duplicate: bool },
    /// Its dead letter is committed.
    GivenUp { proof: GivenUp, error: Error },
    /// Another consumer is at it.
    InFlight(InFlight),
    /// It failed, and may be tried again.
    Failed(Error),
    /// It was not its fault: the store is out of reach, or too busy.
    Away(Error),
    /// It was not tried, because one that it must not overtake failed.
    Held,
    /// It failed for the last time, and the store keeps no dead letters.
    Stuck(Error),
    /// The store cannot be used as it is, by any message.
    Broken(Error),
}

/// What there is to know for handling deliveries.
pub(super) struct Work<'a, S, H> {
    pub(super) inbox: &'a Inbox<S>,
    pub(super) handler: &'a H,
    pub(super) handler_timeout: Duration,
    /// The attempt after which a message is given up.
    pub(super) last_attempt: u32,
}

impl<S: Transactions, H> Work<'_, S, H> {
    /// Handles some deliveries in one transaction if that goes well, and in as few as may be if it does not.
    pub(super) async fn handle<M, E>(&self, items: Vec<Item<M>>) -> Vec<(Item<M>, Fate)>
    where
        M: BrokerMessage,
        H: AsyncFnOnce(&mut S::Tx, &M) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let mut done = Vec::with_capacity(items.len());
        let (mut left, mut deliveries) = (Vec::with_capacity(items.len()), Vec::with_capacity(items.len()));
        for mut item in items {
            match item.message.delivery() {
                Ok(delivery) if !item.is_special(self.last_attempt) => {
                    left.push(item);
                    deliveries.push(delivery);
                }
                Ok(delivery) => {
                    let fate = self.handle_special(&mut item, delivery).await;
                    done.push((item, fate));
                }
                Err(error) => {
                    item.condemn(error);
                    let fate = self.give_up(&mut item, None).await;
                    done.push((item, fate));
                }
            }
        }
        let mut together = true;
        for round in 0.. {
            if left.is_empty() {
                break;
            }
            let size = if together && round < ROUNDS { left.len() } else { 1 };
            let rest = (left.split_off(size), deliveries.split_off(size));
            match self.transact(&left, &deliveries, false).await {
                Ok(fates) => {
                    for ((mut item, delivery), fate) in left.into_iter().zip(deliveries).zip(fates) {
                        let fate = match fate {
                            Fate::Failed(error) => self.fate_of_failed(&mut item, delivery, error).await,
                            fate => fate,
                        };
                        done.push((item, fate));
                    }
                    (left, deliveries) = rest;
                }
                Err(Trouble::OfTheStore(fate)) => {
                    // The others would meet the same.
                    left.extend(rest.0);
                    done.extend(left.into_iter().map(|item| (item, fate.again())));
                    break;
                }
                Err(Trouble::Of(culprit, error)) => {
                    let mut failed = left.remove(culprit);
                    let delivery = deliveries.remove(culprit);
                    left.extend(rest.0);
                    deliveries.extend(rest.1);
                    let fate = self.fate_of_failed(&mut failed, delivery, error).await;
                    if !matches!(fate, Fate::GivenUp { .. } | Fate::Handled { .. }) {
                        hold_lane(&failed, &mut left, &mut deliveries, &mut done);
                    }
                    done.push((failed, fate));
                }
                Err(Trouble::OfNobody(error)) if left.len() == 1 => {
                    let mut failed = left.remove(0);
                    let delivery = deliveries.remove(0);
                    (left, deliveries) = rest;
                    let fate = self.fate_of_failed(&mut failed, delivery, error).await;
                    if !matches!(fate, Fate::GivenUp { .. } | Fate::Handled { .. }) {
                        hold_lane(&failed, &mut left, &mut deliveries, &mut done);
                    }
                    done.push((failed, fate));
                }
                Err(Trouble::OfNobody(_)) => {
                    left.extend(rest.0);
                    deliveries.extend(rest.1);
                    together = false;
                }
            }
        }
        done
    }

    /// One transaction, which is run again where that may help at once.
    async fn transact<M, E>(
        &self,
        items: &[Item<M>],
        deliveries: &[Delivery],
        on_trial: bool,
    ) -> Result<Vec<Fate>, Trouble>
    where
        M: BrokerMessage,
        H: AsyncFnOnce(&mut S::Tx, &M) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let refs: Vec<&Item<M>> = items.iter().collect();
        let culprit = Mutex::new(None);
        let run = async |tx: &mut S::Tx, new: &[&Item<M>]| {
            for item in new {
                let handled = self.call_handler(tx, item).await;
                handled.inspect_err(|_| *culprit.lock().unwrap_or_else(PoisonError::into_inner) = Some(item.number))?;
            }
            if on_trial {
                if let (Some(letters), Some(delivery)) = (self.inbox.store().dead_letters(), deliveries.first()) {
                    letters.remove_dead_letter(tx, &self.inbox.key(delivery.id())).await?;
                }
            }
            Ok::<_, BoxError>(())
        };
        let mut attempts = self.inbox.retry.start();
        loop {
            *culprit.lock().unwrap_or_else(PoisonError::into_inner) = None;
            let passing = |_: &BoxError| false;
            let attempt = self.inbox.retry_if(passing).attempt_batch(&refs, deliveries, run).await;
            let failure = match attempt {
                Ok(outcomes) => return Ok(outcomes.into_iter().map(Fate::of).collect()),
                Err(failure) => failure,
            };
            if failure.of_the_store {
                return Err(Trouble::OfTheStore(Fate::of_the_store(failure.error)));
            }
            let by = *culprit.lock().unwrap_or_else(PoisonError::into_inner);
            let by = by.and_then(|number| items.iter().position(|item| item.number == number));
            if let Err(failure) = failure.pause_or_give_up(&mut attempts).await {
                return Err(match by {
                    Some(culprit) => Trouble::Of(culprit, failure.error),
                    // A conflict that did not pass is nobody's fault.
                    None if failure.error.is_retryable() => Trouble::OfTheStore(Fate::Away(failure.error)),
                    None => Trouble::OfNobody(failure.error),
                });
            }
        }
    }

    /// Runs the handler, within its time, and catches what it throws.
    async fn call_handler<M, E>(&self, tx: &mut S::Tx, item: &Item<M>) -> Result<(), BoxError>
    where
        M: BrokerMessage,
        H: AsyncFnOnce(&mut S::Tx, &M) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let message = &*item.message;
        let span = tracing::info_span!(
            "handle",
            group = %self.inbox.group(),
            message = message.delivery().map_or_else(|_| String::new(), |delivery| delivery.id().to_string()),
            subject = message.subject(),
            origin = message.origin(),
            attempt = item.attempt(),
        );
        let handled = AssertUnwindSafe(async { (self.handler.clone())(tx, message).await }).catch_unwind();
        match tokio::time::timeout(self.handler_timeout, handled.instrument(span)).await {
            Ok(Ok(result)) => result.map_err(boxed),
            Ok(Err(panic)) => Err(HandlerPanicked(text_of(&*panic)).into()),
            Err(_elapsed) => Err(HandlerTimedOut(self.handler_timeout).into()),
        }
    }

    /// A message that failed: whether it is given up at once.
    async fn fate_of_failed<M: BrokerMessage>(&self, item: &mut Item<M>, delivery: Delivery, error: Error) -> Fate {
        if is_poison(&error) || item.attempt() >= self.last_attempt {
            item.condemn(error);
            return self.give_up(item, Some(delivery.id())).await;
        }
        Fate::Failed(error)
    }

    /// A message at its last attempt, or one whose giving up was decided before.
    async fn handle_special<M, E>(&self, item: &mut Item<M>, delivery: Delivery) -> Fate
    where
        M: BrokerMessage,
        H: AsyncFnOnce(&mut S::Tx, &M) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let key = self.inbox.key(delivery.id());
        if item.release {
            return match self.acquit(item, &key).await {
                Ok(()) => Fate::Held,
                Err(error) => Fate::of_the_store(error),
            };
        }
        if item.condemned.is_none() {
            if let Some(letters) = self.inbox.store().dead_letters() {
                match self.put_on_trial(item, delivery, letters).await {
                    Ok(()) => {}
                    Err(error) => return Fate::of_the_store(error),
                }
            }
        }
        if item.condemned.is_some() {
            return self.give_up(item, Some(delivery.id())).await;
        }
        match self
            .transact(std::slice::from_ref(item), &[delivery], item.on_trial)
            .await
        {
            Ok(mut fates) => match fates.pop() {
                Some(Fate::Failed(error)) => self.fate_of_failed(item, delivery, error).await,
                Some(Fate::Handled { proof, duplicate: true }) => match self.acquit(item, &key).await {
                    Ok(()) => Fate::Handled { proof, duplicate: true },
                    Err(error) => Fate::of_the_store(error),
                },
                Some(fate) => fate,
                None => Fate::Held,
            },
            Err(Trouble::OfTheStore(fate)) => fate,
            Err(Trouble::Of(_, error) | Trouble::OfNobody(error)) => self.fate_of_failed(item, delivery, error).await,
        }
    }

    /// Puts a dead letter down before the last attempt, so that the message is not lost with this process. Condemns it where
    /// an earlier last attempt left one and never ended.
    async fn put_on_trial<M: BrokerMessage>(
        &self,
        item: &mut Item<M>,
        delivery: Delivery,
        letters: &dyn DeadLetters<Tx = S::Tx>,
    ) -> Result<()> {
        if item.on_trial {
            return Ok(());
        }
        let key = self.inbox.key(delivery.id());
        if let Some(letter) = letters.find_dead_letter(&key).await? {
            if letter.info.state == DeadLetterState::OnTrial {
                item.condemn(Error::new(
                    ErrorKind::Handler,
                    "the last attempt never ended: the consumer's process died in it, or lost the database",
                ));
                return Ok(());
            }
        }
        let letter = letter_of(
            item,
            key,
            DeadLetterState::OnTrial,
            "the last attempt is under way, or ended with its process",
        );
        let store = self.inbox.store();
        let mut tx = store.begin().await?;
        if let Err(error) = letters.add_dead_letter(&mut tx, &letter).await {
            self.inbox.roll_back(tx).await;
            return Err(error);
        }
        store.commit(tx).await?;
        item.on_trial = true;
        Ok(())
    }

    /// Takes back the letter of a message that was done after all.
    async fn acquit<M: BrokerMessage>(&self, item: &mut Item<M>, key: &Key) -> Result<()> {
        if item.on_trial {
            if let Some(letters) = self.inbox.store().dead_letters() {
                letters.delete_dead_letter(key).await?;
            }
            item.on_trial = false;
        }
        Ok(())
    }

    /// Gives a condemned message up: claims it and keeps its dead letter, in one transaction.
    ///
    /// Under its own id, unless that cannot be read or is another message's; then under the broker's place for it.
    async fn give_up<M: BrokerMessage>(&self, item: &mut Item<M>, id: Option<MessageId>) -> Fate {
        let Some(error) = item.condemned.clone() else {
            return Fate::Held;
        };
        let store = self.inbox.store();
        let Some(letters) = store.dead_letters() else {
            return Fate::Stuck(error);
        };
        let own_id = id.filter(|_| error.kind() != ErrorKind::PayloadMismatch);
        let key = self.inbox.key(own_id.unwrap_or_else(|| item.message.place()));
        let letter = letter_of(item, key.clone(), DeadLetterState::Dead, format!("{error:#}"));
        let given_up = async {
            let mut tx = store.begin().await?;
            match store.try_claim(&mut tx, key.group(), Delivery::new(key.id())).await {
                Ok(Claim::InFlight(in_flight)) => {
                    self.inbox.roll_back(tx).await;
                    return Ok(Fate::InFlight(in_flight));
                }
                // Another consumer was better at it.
                Ok(Claim::Duplicate(_)) if own_id.is_some() => {
                    self.inbox.roll_back(tx).await;
                    self.acquit(item, &key).await?;
                    let proof = Handled::proven();
                    return Ok(Fate::Handled { proof, duplicate: true });
                }
                Ok(Claim::New | Claim::Duplicate(_)) => {}
                Err(error) => {
                    self.inbox.roll_back(tx).await;
                    return Err(error);
                }
            }
            if let Err(error) = letters.add_dead_letter(&mut tx, &letter).await {
                self.inbox.roll_back(tx).await;
                return Err(error);
            }
            store.commit(tx).await?;
            let proof = GivenUp::proven();
            Ok(Fate::GivenUp { proof, error })
        };
        given_up.await.unwrap_or_else(Fate::of_the_store)
    }
}

/// Takes those out of what is left that must not overtake `failed`.
fn hold_lane<M>(
    failed: &Item<M>,
    left: &mut Vec<Item<M>>,
    deliveries: &mut Vec<Delivery>,
    done: &mut Vec<(Item<M>, Fate)>,
) {
    if failed.lane.is_none() {
        return;
    }
    let (mut kept, mut kept_deliveries) = (Vec::with_capacity(left.len()), Vec::with_capacity(left.len()));
    for (item, delivery) in left.drain(..).zip(deliveries.drain(..)) {
        if item.lane == failed.lane {
            done.push((item, Fate::Held));
        } else {
            kept.push(item);
            kept_deliveries.push(delivery);
        }
    }
    (*left, *deliveries) = (kept, kept_deliveries);
}

fn letter_of<M: BrokerMessage>(
    item: &Item<M>,
    key: Key,
    state: DeadLetterState,
    error: impl Into<String>,
) -> DeadLetter {
    let message = &*item.message;
    let mut info = DeadLetterInfo::new(key, error);
    info.state = state;
    message.subject().clone_into(&mut info.subject);
    info.origin = message.origin();
    info.attempts = item.attempt();
    info.published_at = message.published_at();
    DeadLetter::new(info, message.headers(), message.payload())
}

impl Fate {
    fn of(outcome: Result<Outcome<()>>) -> Self {
        match outcome {
            Ok(Outcome::Processed(())) => Self::Handled {
                proof: Handled::proven(),
                duplicate: false,
            },
            Ok(Outcome::Duplicate(_)) => Self::Handled {
                proof: Handled::proven(),
                duplicate: true,
            },
            Ok(Outcome::InFlight(in_flight)) => Self::InFlight(in_flight),
            Err(error) => Self::Failed(error),
        }
    }

    /// An error of the store's: whether it passes.
    fn of_the_store(error: Error) -> Self {
        match error.kind() {
            ErrorKind::Schema | ErrorKind::Denied | ErrorKind::Unsupported => Self::Broken(error),
            _ => Self::Away(error),
        }
    }

    /// The same for another message; only for what the store said.
    fn again(&self) -> Self {
        match self {
            Self::Away(error) => Self::Away(error.clone()),
            Self::Broken(error) => Self::Broken(error.clone()),
            _ => Self::Held,
        }
    }
}

/// Why a transaction came to nothing.
enum Trouble {
    /// The next message would meet it too.
    OfTheStore(Fate),
    /// The handler failed with the item at this place.
    Of(usize, Error),
    /// It cannot be told with which: at the commit.
    OfNobody(Error),
}

/// Whether a message that failed so will fail whenever it is handled.
fn is_poison(error: &Error) -> bool {
    let poison = |link: &(dyn StdError + 'static)| {
        link.downcast_ref::<Error>()
            .is_some_and(|error| matches!(error.kind(), ErrorKind::Poison))
    };
    error.kind() == ErrorKind::PayloadMismatch
        || std::iter::successors(Some(error as &(dyn StdError + 'static)), |&link| link.source()).any(poison)
}

/// The handler took too long.
#[derive(Debug)]
struct HandlerTimedOut(Duration);

impl fmt::Display for HandlerTimedOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the handler took longer than {:?} and was cancelled; have it do less, or give it a longer bound",
            self.0
        )
    }
}

impl StdError for HandlerTimedOut {}

/// The handler panicked.
#[derive(Debug)]
struct HandlerPanicked(String);

impl fmt::Display for HandlerPanicked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the handler panicked: {}", self.0)
    }
}

impl StdError for HandlerPanicked {}

/// What a panic says.
fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "with a value that is no text".into())
}
