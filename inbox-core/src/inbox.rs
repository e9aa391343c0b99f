//! [`Inbox`]: what applications hold.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::counts::Counters;
use crate::{
    Claim, ClaimIn, ConsumerGroup, Counts, Delivery, Error, ErrorKind, Health, InboxStore, Key, MessageId, Purge,
    Purged, Record, Result, RetryPolicy, Upkeep,
};

/// A store and a consumer group: what an application holds, and clones into its tasks.
///
/// | the application | calls |
/// | --- | --- |
/// | leaves the transaction to the inbox | [`process`](Self::process), [`process_batch`](Self::process_batch) |
/// | has its own transaction open | [`try_claim`](Self::try_claim), [`is_duplicate`](Self::is_duplicate) |
///
/// (With SQLite, whose driver is synchronous, the application's own transaction is claimed in with `SqliteTable`.)
///
/// Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen at
/// least once.
///
/// ```
/// use inbox_core::{Inbox, MemoryInbox, MessageId, Outcome};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
/// let inbox = Inbox::new(MemoryInbox::with_state(Vec::new()), "billing")?;
/// let id = MessageId::new("order-17")?;
/// for _delivery in 0..2 {
///     inbox.process(id, async |tx| {
///         tx.apply(|invoices| invoices.push("invoice for order-17"));
///         Ok::<_, inbox_core::Error>(())
///     }).await?;
/// }
/// assert_eq!(inbox.store().state(Vec::len), 1);
/// # Ok(()) }
/// ```
pub struct Inbox<S> {
    pub(crate) store: Arc<S>,
    pub(crate) group: ConsumerGroup,
    pub(crate) retry: RetryPolicy,
    pub(crate) counters: Arc<Counters>,
}

impl<S: InboxStore> Inbox<S> {
    /// The inbox of `group` in `store`. The group is a [`ConsumerGroup`] or its name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the name is not a [`ConsumerGroup`]'s.
    pub fn new<G>(store: S, group: G) -> Result<Self>
    where
        G: TryInto<ConsumerGroup>,
        Error: From<G::Error>,
    {
        Ok(Self {
            store: Arc::new(store),
            group: group.try_into()?,
            retry: RetryPolicy::default(),
            counters: Arc::default(),
        })
    }

    /// The inbox of another group in the same store, with counts of its own.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the name is not a [`ConsumerGroup`]'s.
    pub fn for_group<G>(&self, group: G) -> Result<Self>
    where
        G: TryInto<ConsumerGroup>,
        Error: From<G::Error>,
    {
        Ok(Self {
            group: group.try_into()?,
            counters: Arc::default(),
            ..self.clone()
        })
    }

    /// The same inbox with another policy for running transactions again.
    #[must_use]
    pub fn with_retry(mut self, retry: RetryPolicy) -> Self {
        self.retry = retry;
        self
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.store
    }

    /// The consumer group.
    pub const fn group(&self) -> &ConsumerGroup {
        &self.group
    }

    pub(crate) fn key(&self, id: MessageId) -> Key {
        Key::new(self.group.clone(), id)
    }

    /// How claims went so far.
    pub fn counts(&self) -> Counts {
        self.counters.read()
    }

    /// Claims a message in the caller's open transaction.
    ///
    /// On [`Claim::New`], do the work in `tx` and commit it; the record commits with it. On anything else `tx` has no
    /// new record in it and works on.
    ///
    /// Round trips are the store's: one for a new message. Cancel-safe in that nothing is written outside `tx`: after
    /// dropping the future, roll `tx` back.
    ///
    /// # Errors
    ///
    /// Those of [`InboxStore::try_claim`], and [`ErrorKind::PayloadMismatch`] if the message was processed with another
    /// payload. After an error, roll `tx` back; where it [is retryable](Error::is_retryable), run the whole transaction
    /// again.
    pub async fn try_claim<T>(&self, tx: &mut T, delivery: impl Into<Delivery>) -> Result<Claim>
    where
        T: Send,
        S: ClaimIn<T>,
    {
        let delivery = delivery.into();
        let answer = self.store.claim_in(tx, &self.group, delivery).await;
        self.judge(answer, &delivery)
    }

    /// Claims many messages in the caller's open transaction, answering in the order given.
    ///
    /// The answer of one message whose payload differs is an error in its place; the others stand.
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Self::try_claim).
    pub async fn try_claim_batch<T>(&self, tx: &mut T, deliveries: &[Delivery]) -> Result<Vec<Result<Claim>>>
    where
        T: Send,
        S: ClaimIn<T>,
    {
        let answers = self.store.claim_batch_in(tx, &self.group, deliveries).await;
        self.judge_batch(answers, deliveries)
    }

    /// Whether a message was processed before; if not, it is claimed in `tx`, and the work is to be done there.
    ///
    /// [`try_claim`](Self::try_claim) for callers who want no third answer: a message that another consumer is handling
    /// just now is an error, because it may yet come to nothing.
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Self::try_claim), and [`ErrorKind::InFlight`], which is retryable.
    pub async fn is_duplicate<T>(&self, tx: &mut T, delivery: impl Into<Delivery>) -> Result<bool>
    where
        T: Send,
        S: ClaimIn<T>,
    {
        let delivery = delivery.into();
        match self.try_claim(tx, delivery).await? {
            Claim::New => Ok(false),
            Claim::Duplicate(_) => Ok(true),
            Claim::InFlight(_) => Err(Error::new(
                ErrorKind::InFlight,
                format!(
                    "message {} is being handled by another consumer of group {} that has not committed; do not \
                     acknowledge it, let it come again",
                    delivery.id(),
                    self.group
                ),
            )),
        }
    }

    /// The store's answer as the application gets it: compared with the delivery's payload, and counted.
    pub(crate) fn judge(&self, answer: Result<Claim>, delivery: &Delivery) -> Result<Claim> {
        let claim = answer.and_then(|claim| claim.verified(delivery));
        self.counters.count(&claim);
        claim
    }

    pub(crate) fn judge_batch(
        &self,
        answers: Result<Vec<Claim>>,
        deliveries: &[Delivery],
    ) -> Result<Vec<Result<Claim>>> {
        let answers = answers.and_then(|answers| {
            if answers.len() == deliveries.len() {
                return Ok(answers);
            }
            Err(Error::new(
                ErrorKind::Store,
                format!(
                    "the store answered {} of {} claims, so none of them can be told apart; that is a fault of the \
                     store, which inbox-conformance would show",
                    answers.len(),
                    deliveries.len()
                ),
            ))
        });
        match answers {
            Ok(answers) => Ok(answers
                .into_iter()
                .zip(deliveries)
                .map(|(answer, delivery)| self.judge(Ok(answer), delivery))
                .collect()),
            Err(error) => {
                for _ in deliveries {
                    self.counters.count(&Err(error.clone()));
                }
                Err(error)
            }
        }
    }
}

impl<S: Upkeep> Inbox<S> {
    /// Creates or upgrades what the store keeps its records in; see [`Upkeep::setup`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn setup(&self) -> Result<()> {
        self.store.setup().await
    }

    /// Whether the store is usable and the guarantee holds; see [`Upkeep::check`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn check(&self) -> Result<Health> {
        self.store.check().await
    }

    /// This group's committed record of a message, if there is one.
    ///
    /// # Errors
    ///
    /// As [`Upkeep::find`].
    pub async fn find(&self, id: MessageId) -> Result<Option<Record>> {
        self.store.find(&self.key(id)).await
    }

    /// Forgets that this group processed a message, so that its next delivery is handled again.
    ///
    /// # Errors
    ///
    /// As [`Upkeep::forget`].
    pub async fn forget(&self, id: MessageId) -> Result<bool> {
        self.store.forget(&self.key(id)).await
    }

    /// Removes all of this group's records that are older than `older_than`, by the store's clock, step by step, and
    /// says how many.
    ///
    /// See [`Purge::older_than`] for how long that must be. Other tasks claim on meanwhile. Cancel-safe: steps that were
    /// done stay done.
    ///
    /// # Errors
    ///
    /// As [`Upkeep::purge`]; what was removed before the error stays removed.
    pub async fn purge(&self, older_than: Duration) -> Result<u64> {
        self.purge_with(Purge::older_than(older_than), |_| ()).await
    }

    /// As [`purge`](Self::purge), with the choice of the size of a step, calling `progress` after every step with what was
    /// removed so far.
    ///
    /// A [`Purge`] without a group is one of this inbox's own group. To purge every group's records in one go, ask the
    /// [`store`](Self::store) itself ([`Upkeep::purge`]), step by step.
    ///
    /// # Errors
    ///
    /// As [`Upkeep::purge`].
    pub async fn purge_with(&self, mut purge: Purge, mut progress: impl FnMut(Purged)) -> Result<u64> {
        purge.group.get_or_insert_with(|| self.group.clone());
        let mut removed = 0;
        loop {
            let step = self.store.purge(&purge).await?;
            removed += step.removed;
            progress(Purged::new(removed, step.more));
            // A step that removed nothing met only what others hold; it is the next purge's.
            if !step.more || step.removed == 0 {
                return Ok(removed);
            }
        }
    }
}

impl<S> Clone for Inbox<S> {
    fn clone(&self) -> Self {
        Self {
            store: Arc::clone(&self.store),
            group: self.group.clone(),
            retry: self.retry,
            counters: Arc::clone(&self.counters),
        }
    }
}

impl<S> fmt::Debug for Inbox<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox")
            .field("store", &std::any::type_name::<S>())
            .field("group", &self.group)
            .field("retry", &self.retry)
            .finish_non_exhaustive()
    }
}
