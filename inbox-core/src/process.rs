//! [`Inbox::process`] and [`Inbox::process_batch`]: begin, claim, run the handler, commit; again where that may help.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use crate::retry::Attempts;
use crate::{
    BoxError, Claim, Delivery, Error, ErrorKind, InFlight, Inbox, Processed, Result, RetryPolicy, Transactions,
};

/// What became of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "`InFlight` must not be acknowledged"]
pub enum Outcome<T> {
    /// The handler ran and what it did is committed; this is what it returned.
    Processed(T),
    /// It was processed before; the handler did not run.
    Duplicate(Processed),
    /// Another consumer is at it; the handler did not run. Do not acknowledge: the message must come again, because the
    /// other consumer may yet fail.
    InFlight(InFlight),
}

impl<T> Outcome<T> {
    /// Whether the message's effect is committed, now or before, so that the broker may be told that it is done with.
    pub const fn may_acknowledge(&self) -> bool {
        matches!(self, Self::Processed(_) | Self::Duplicate(_))
    }

    /// The same outcome with what the handler returned turned into something else.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Outcome<U> {
        match self {
            Self::Processed(value) => Outcome::Processed(f(value)),
            Self::Duplicate(processed) => Outcome::Duplicate(processed),
            Self::InFlight(in_flight) => Outcome::InFlight(in_flight),
        }
    }
}

impl<S: Transactions> Inbox<S> {
    /// Handles one delivery: opens a transaction, claims the message, runs `handler` with the transaction, commits.
    ///
    /// A duplicate and a message in flight elsewhere are answered without running the handler. Where the handler or the
    /// store fails, all is rolled back. Where that failure is retryable (a serialization failure, a deadlock, a lost
    /// connection; in the handler's own statements too), all of it runs again, with a fresh clone of the handler, under
    /// the inbox's [`RetryPolicy`](crate::RetryPolicy), which needs the timer of a tokio runtime;
    /// [`retry_if`](Self::retry_if) adds errors of the handler's own. Where a commit's answer was lost and the next attempt
    /// finds that it happened, the outcome is a duplicate, and what the handler returned is gone.
    ///
    /// What the handler writes through its transaction happens exactly once per (message id, consumer group). What it
    /// does elsewhere happens at least once. The handler must not commit or roll back by itself, and it holds the
    /// transaction's locks as long as it runs: fetch what it needs from elsewhere before.
    ///
    /// The handler is an async closure, `async |tx| ...` (not `|tx| async ...`), or calls an `async fn` that takes
    /// `&mut` the transaction. With `?` in it, its last line names the error: `Ok::<_, MyError>(())`. It is cloned for each
    /// try, so it captures by reference or by clone, and nothing by `&mut`. A boxed error of it is `Send + Sync`.
    ///
    /// # Cancel-safety
    ///
    /// Dropped before the commit is sent, nothing has happened. Dropped during the commit, the outcome is open; the next
    /// delivery finds out.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Handler`] with the handler's error as its source ([`Error::downcast_ref`]); an inbox [`Error`] that
    /// the handler returned, as it is; [`ErrorKind::PayloadMismatch`]; and those of [`Transactions`] and
    /// [`InboxStore`](crate::InboxStore). Do not acknowledge after an error; but where it is not
    /// [retryable](Error::is_retryable), the next delivery will meet it too: set the message aside (a dead letter, a
    /// terminating answer to the broker) rather than have it come for ever.
    ///
    /// # Panics
    ///
    /// A panic of the handler passes through; the transaction is rolled back.
    pub async fn process<T, E, F>(&self, delivery: impl Into<Delivery>, handler: F) -> Result<Outcome<T>>
    where
        F: AsyncFnOnce(&mut S::Tx) -> Result<T, E> + Clone,
        E: Into<BoxError> + 'static,
    {
        self.retry_if(|_: &E| false).process(delivery, handler).await
    }

    /// Handles a whole batch in one transaction: claims all its messages in one go, runs `handler` once with those that
    /// are new, commits once.
    ///
    /// `delivery_of` gives each message's id, as a [`MessageId`](crate::MessageId), a [`Delivery`], or the `Result` of
    /// reading one; a message whose id cannot be read gets that error for its outcome. The handler gets the new messages in the order given; it is not run where
    /// there are none. Where it fails, everything is rolled back and the messages are run **one by one**, so that one bad
    /// message does not hold up its neighbours: the handler is then called with one message at a time.
    ///
    /// In a task that is spawned, `M` must be an owned type: the compiler cannot see through references in it.
    ///
    /// Returns an outcome for each message, in the order given: acknowledge those that
    /// [may be](Outcome::may_acknowledge), and no other. Once the store itself is out of reach, the messages that were
    /// not tried yet get that error without being tried.
    ///
    /// ```
    /// # use inbox_core::{Inbox, MemoryInbox, MessageId, Outcome};
    /// # struct Order { id: MessageId, cents: u64 }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
    /// # let inbox = Inbox::new(MemoryInbox::with_state(0), "billing")?;
    /// # let orders = [Order { id: MessageId::new("a")?, cents: 100 }, Order { id: MessageId::new("b")?, cents: 50 }];
    /// let outcomes = inbox.process_batch(&orders, |order| order.id, async |tx, new| {
    ///     for order in new {
    ///         let cents = order.cents;
    ///         tx.apply(move |total| *total += cents);
    ///     }
    ///     Ok::<_, inbox_core::Error>(())
    /// }).await;
    /// for (_order, outcome) in orders.iter().zip(outcomes) {
    ///     if outcome?.may_acknowledge() { /* acknowledge the order's message */ }
    /// }
    /// # assert_eq!(inbox.store().state(|total| *total), 150);
    /// # Ok(()) }
    /// ```
    ///
    /// # Cancel-safety
    ///
    /// As [`process`](Self::process), for the transaction at hand; what was committed one by one stays committed.
    pub async fn process_batch<M, D, E, F>(
        &self,
        messages: &[M],
        delivery_of: impl Fn(&M) -> D,
        handler: F,
    ) -> Vec<Result<Outcome<()>>>
    where
        D: TryInto<Delivery>,
        Error: From<D::Error>,
        F: AsyncFnOnce(&mut S::Tx, &[&M]) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        self.retry_if(|_: &E| false)
            .process_batch(messages, delivery_of, handler)
            .await
    }

    /// The same inbox, which also runs a transaction again where `passing` says so of the handler's error.
    ///
    /// ```
    /// # use inbox_core::{Inbox, MemoryInbox, MessageId};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
    /// # let inbox = Inbox::new(MemoryInbox::new(), "billing")?;
    /// # let id = MessageId::new("order-17")?;
    /// inbox
    ///     .retry_if(|error: &std::io::Error| error.kind() == std::io::ErrorKind::TimedOut)
    ///     .process(id, async |_tx| Ok(()))
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn retry_if<E, P: Fn(&E) -> bool>(&self, passing: P) -> RetryIf<'_, S, P> {
        RetryIf { inbox: self, passing }
    }
}

impl<S: Transactions> Inbox<S> {
    /// The transaction is void either way; that its rollback failed is worth a word and no more.
    ///
    /// A connection that is cut off, or busy with a statement whose future was dropped, is not waited for: what is left of
    /// the transaction is dropped, and the store sees to it in the background.
    pub(crate) async fn roll_back(&self, tx: S::Tx) {
        match tokio::time::timeout(ROLLBACK_PATIENCE, self.store.rollback(tx)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::debug!(%error, "the rollback failed; the database rolls back when it sees the connection gone");
            }
            Err(_elapsed) => tracing::debug!("the rollback is not answered; it goes on in the background"),
        }
    }
}

/// How long a rollback is waited for.
const ROLLBACK_PATIENCE: Duration = Duration::from_secs(5);

/// An [`Inbox`] that knows which of the handler's errors are passing; made by [`Inbox::retry_if`].
pub struct RetryIf<'a, S, P> {
    inbox: &'a Inbox<S>,
    passing: P,
}

impl<S: Transactions, P> RetryIf<'_, S, P> {
    /// [`Inbox::process`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn process<T, E, F>(&self, delivery: impl Into<Delivery>, handler: F) -> Result<Outcome<T>>
    where
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx) -> Result<T, E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let attempts = self.inbox.retry.start();
        Ok(self.run(delivery.into(), handler, attempts).await?)
    }

    async fn run<T, E, F>(&self, delivery: Delivery, handler: F, mut attempts: Attempts) -> Result<Outcome<T>, Failure>
    where
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx) -> Result<T, E> + Clone,
        E: Into<BoxError> + 'static,
    {
        loop {
            match self.attempt(delivery, handler.clone()).await {
                Ok(outcome) => return Ok(outcome),
                Err(failure) => failure.pause_or_give_up(&mut attempts).await?,
            }
        }
    }

    /// [`Inbox::process_batch`].
    pub async fn process_batch<M, D, E, F>(
        &self,
        messages: &[M],
        delivery_of: impl Fn(&M) -> D,
        handler: F,
    ) -> Vec<Result<Outcome<()>>>
    where
        D: TryInto<Delivery>,
        Error: From<D::Error>,
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx, &[&M]) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let mut outcomes: Vec<Option<Result<Outcome<()>>>> = Vec::with_capacity(messages.len());
        let (mut readable, mut deliveries) = (Vec::new(), Vec::new());
        for message in messages {
            match delivery_of(message).try_into().map_err(Error::from) {
                Ok(delivery) => {
                    readable.push(message);
                    deliveries.push(delivery);
                    outcomes.push(None);
                }
                Err(error) => outcomes.push(Some(Err(error))),
            }
        }
        let mut of_readable = self.run_batch(&readable, &deliveries, handler).await.into_iter();
        outcomes
            .into_iter()
            .filter_map(|outcome| outcome.or_else(|| of_readable.next()))
            .collect()
    }

    async fn run_batch<M, E, F>(&self, messages: &[&M], deliveries: &[Delivery], handler: F) -> Vec<Result<Outcome<()>>>
    where
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx, &[&M]) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let mut attempts = self.inbox.retry.start();
        let failure = loop {
            match self.attempt_batch(messages, deliveries, handler.clone()).await {
                Ok(outcomes) => return outcomes,
                Err(failure) => match failure.pause_or_give_up(&mut attempts).await {
                    Ok(()) => {}
                    Err(failure) => break failure,
                },
            }
        };
        tracing::debug!(error = %failure.error, messages = messages.len(), "the batch failed");
        // What passes has had its time to pass; to give each message that time again would be as long for each.
        let singly = if failure.error.is_retryable() {
            RetryPolicy::never()
        } else {
            self.inbox.retry
        };
        let mut out_of_reach = failure.of_the_store.then_some(failure.error);
        let mut outcomes = Vec::with_capacity(messages.len());
        for (&message, delivery) in messages.iter().zip(deliveries) {
            if let Some(error) = &out_of_reach {
                outcomes.push(Err(error.clone()));
                continue;
            }
            let handler = handler.clone();
            let one_by_one = async move |tx: &mut S::Tx| handler(tx, &[message]).await;
            let outcome = self.run(*delivery, one_by_one, singly.start()).await;
            outcomes.push(outcome.map_err(|failure| {
                out_of_reach = failure.of_the_store.then(|| failure.error.clone());
                failure.error
            }));
        }
        outcomes
    }

    async fn attempt<T, E, F>(&self, delivery: Delivery, handler: F) -> Result<Outcome<T>, Failure>
    where
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx) -> Result<T, E>,
        E: Into<BoxError> + 'static,
    {
        let Inbox { store, group, .. } = self.inbox;
        let mut tx = store.begin().await.map_err(Failure::to_begin)?;
        let answer = store.try_claim(&mut tx, group, delivery).await;
        let outcome = match self.inbox.judge(answer, &delivery) {
            Ok(Claim::New) => match handler(&mut tx).await {
                Ok(value) => Ok(Outcome::Processed(value)),
                Err(error) => Err(self.handler_failure(error)),
            },
            Ok(Claim::Duplicate(processed)) => Ok(Outcome::Duplicate(processed)),
            Ok(Claim::InFlight(in_flight)) => Ok(Outcome::InFlight(in_flight)),
            Err(error) if error.kind() == ErrorKind::PayloadMismatch => Err(Failure::past_the_claim(error)),
            Err(error) => Err(error.into()),
        };
        if matches!(outcome, Ok(Outcome::Processed(_))) {
            store.commit(tx).await.map_err(Failure::past_the_claim)?;
        } else {
            self.roll_back(tx).await;
        }
        outcome
    }

    /// One transaction over a batch, to be run again by the caller if it likes.
    pub(crate) async fn attempt_batch<M, E, F>(
        &self,
        messages: &[&M],
        deliveries: &[Delivery],
        handler: F,
    ) -> Result<Vec<Result<Outcome<()>>>, Failure>
    where
        P: Fn(&E) -> bool,
        F: AsyncFnOnce(&mut S::Tx, &[&M]) -> Result<(), E>,
        E: Into<BoxError> + 'static,
    {
        if messages.is_empty() {
            return Ok(Vec::new());
        }
        let Inbox { store, group, .. } = self.inbox;
        let mut tx = store.begin().await.map_err(Failure::to_begin)?;
        let answers = store.try_claim_batch(&mut tx, group, deliveries).await;
        let claims = match self.inbox.judge_batch(answers, deliveries) {
            Ok(claims) => claims,
            Err(error) => {
                self.roll_back(tx).await;
                return Err(error.into());
            }
        };
        let new: Vec<&M> = messages
            .iter()
            .zip(&claims)
            .filter(|(_, claim)| matches!(claim, Ok(Claim::New)))
            .map(|(message, _)| *message)
            .collect();
        if new.is_empty() {
            self.roll_back(tx).await;
        } else if let Err(error) = handler(&mut tx, &new).await {
            self.roll_back(tx).await;
            return Err(self.handler_failure(error));
        } else {
            store.commit(tx).await.map_err(Failure::past_the_claim)?;
        }
        Ok(claims
            .into_iter()
            .map(|claim| {
                claim.map(|claim| match claim {
                    Claim::New => Outcome::Processed(()),
                    Claim::Duplicate(processed) => Outcome::Duplicate(processed),
                    Claim::InFlight(in_flight) => Outcome::InFlight(in_flight),
                })
            })
            .collect())
    }

    async fn roll_back(&self, tx: S::Tx) {
        self.inbox.roll_back(tx).await;
    }

    fn handler_failure<E>(&self, error: E) -> Failure
    where
        P: Fn(&E) -> bool,
        E: Into<BoxError> + 'static,
    {
        let passing = (self.passing)(&error);
        let error = boxed(error);
        let (kind, retryable) = self.classify(&*error).unzip();
        Failure {
            of_the_store: kind == Some(ErrorKind::Unavailable),
            ..Failure::past_the_claim(Error::from_handler(error, passing || retryable == Some(true)))
        }
    }

    /// What the first link in a handler error's chain of sources that we or the store's driver made is: of which kind, and
    /// whether it is retryable.
    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<(ErrorKind, bool)> {
        std::iter::successors(Some(error), |&link| link.source()).find_map(|link| {
            let own = link
                .downcast_ref::<Error>()
                .map(|error| (error.kind(), error.is_retryable()));
            let driver = || self.inbox.store.classify(link).map(|kind| (kind, kind.is_retryable()));
            own.or_else(driver)
        })
    }
}

/// A handler's error as one of the standard library's, of its own type. An `anyhow::Error` is unwrapped: its own conversion
/// keeps its backtrace and hides its type.
pub(crate) fn boxed<E: Into<BoxError> + 'static>(error: E) -> BoxError {
    #[cfg(feature = "anyhow")]
    {
        let mut error = Some(error);
        if let Some(anyhow) = (&mut error as &mut dyn std::any::Any).downcast_mut::<Option<anyhow::Error>>() {
            if let Some(anyhow) = anyhow.take() {
                return anyhow.reallocate_into_boxed_dyn_error_without_backtrace();
            }
        }
        match error {
            Some(error) => error.into(),
            None => unreachable!("it was put there above, and only an anyhow::Error is taken out"),
        }
    }
    #[cfg(not(feature = "anyhow"))]
    error.into()
}

/// A transaction that came to nothing.
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// Whether the next message would meet the same: then it need not be tried.
    pub(crate) of_the_store: bool,
    /// Whether the claim was answered: then what became of an earlier commit is known.
    claim_answered: bool,
}

impl Failure {
    /// A transaction that could not even begin, whatever message it was for.
    fn to_begin(error: Error) -> Self {
        Self {
            error,
            of_the_store: true,
            claim_answered: false,
        }
    }

    /// A transaction that failed after its claim was answered.
    fn past_the_claim(error: Error) -> Self {
        Self {
            claim_answered: true,
            ..error.into()
        }
    }

    pub(crate) async fn pause_or_give_up(self, attempts: &mut Attempts) -> Result<(), Self> {
        if self.claim_answered {
            attempts.found_out();
        }
        let paused = attempts.pause_or_give_up(self.error).await;
        paused.map_err(|error| Self { error, ..self })
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            of_the_store: error.kind().concerns_the_store(),
            claim_answered: false,
            error,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

impl<S, P> fmt::Debug for RetryIf<'_, S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetryIf")
            .field("inbox", self.inbox)
            .finish_non_exhaustive()
    }
}
