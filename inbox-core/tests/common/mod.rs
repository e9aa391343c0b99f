//! A store that misbehaves as it is told to, and what the tests share.

#![allow(dead_code, reason = "every test binary uses its own part of it")]
#![allow(clippy::unwrap_used, reason = "tests may stop at the first surprise")]

use std::collections::{HashMap, VecDeque};
use std::error::Error as StdError;
use std::fmt;
use std::future::poll_fn;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::{Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;

use inbox_core::{
    Claim, ConsumerGroup, Delivery, Error, ErrorKind, Health, Inbox, InboxStore, Key, MemoryInbox, MemoryTx, MessageId,
    Purge, Purged, Record, Result, RetryPolicy, Transactions, Upkeep, WaitPolicy, async_trait,
};

/// The state that the tests' handlers work on: the ids of the messages whose effect happened, in order.
pub(crate) type Ledger = Vec<MessageId>;
pub(crate) type Tx = MemoryTx<Ledger>;

/// What is asked of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    Begin,
    Claim,
    ClaimBatch,
    Commit,
    Rollback,
    Purge,
}

/// How one call goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// As it should.
    Well,
    /// Nothing is done, and an error of this kind is the answer.
    Fails(ErrorKind),
    /// It is done, and an error of this kind is the answer all the same.
    DoneBut(ErrorKind),
    /// It is done, and one answer is missing of those to a batch of claims.
    OneShort,
    /// It is done, and there is one answer too many.
    OneTooMany,
}

/// A [`MemoryInbox`] that never waits, behind a script of how its calls go, which keeps a list of them.
#[derive(Debug)]
pub(crate) struct Scripted {
    memory: MemoryInbox<Ledger>,
    script: Mutex<HashMap<Step, VecDeque<Turn>>>,
    always: Mutex<HashMap<Step, Turn>>,
    calls: Mutex<Vec<Step>>,
    yields: bool,
}

impl Scripted {
    pub(crate) fn new() -> Self {
        Self {
            memory: MemoryInbox::with_state(Ledger::new()).with_wait(WaitPolicy::DontWait),
            script: Mutex::default(),
            always: Mutex::default(),
            calls: Mutex::default(),
            yields: false,
        }
    }

    /// One whose every step is pending once before it is done and once after.
    pub(crate) fn yielding() -> Self {
        Self {
            yields: true,
            ..Self::new()
        }
    }

    /// The next calls of `step` go like this, one after the other; later ones go well.
    pub(crate) fn then(self, step: Step, turns: impl IntoIterator<Item = Turn>) -> Self {
        self.tell(step, turns);
        self
    }

    /// Every call of `step` goes like this.
    pub(crate) fn always(self, step: Step, turn: Turn) -> Self {
        lock(&self.always).insert(step, turn);
        self
    }

    /// As [`then`](Self::then), of a store that is in use.
    pub(crate) fn tell(&self, step: Step, turns: impl IntoIterator<Item = Turn>) {
        lock(&self.script).entry(step).or_default().extend(turns);
    }

    /// All steps go well from here on.
    pub(crate) fn recover(&self) {
        lock(&self.script).clear();
        lock(&self.always).clear();
    }

    /// The store below, which is always well.
    pub(crate) fn memory(&self) -> &MemoryInbox<Ledger> {
        &self.memory
    }

    /// What was asked so far.
    pub(crate) fn calls(&self) -> Vec<Step> {
        lock(&self.calls).clone()
    }

    /// How often this was asked.
    pub(crate) fn count(&self, step: Step) -> usize {
        lock(&self.calls).iter().filter(|&&call| call == step).count()
    }

    pub(crate) fn ledger(&self) -> Ledger {
        self.memory.state(Ledger::clone)
    }

    async fn enter(&self, step: Step) -> Result<Turn> {
        lock(&self.calls).push(step);
        self.pause().await;
        let scripted = lock(&self.script).get_mut(&step).and_then(VecDeque::pop_front);
        let turn = scripted.or_else(|| lock(&self.always).get(&step).copied());
        match turn.unwrap_or(Turn::Well) {
            Turn::Fails(kind) => Err(fault(kind)),
            turn => Ok(turn),
        }
    }

    async fn leave<T>(&self, turn: Turn, answer: T) -> Result<T> {
        self.pause().await;
        match turn {
            Turn::DoneBut(kind) => Err(fault(kind)),
            _ => Ok(answer),
        }
    }

    async fn pause(&self) {
        if self.yields {
            tokio::task::yield_now().await;
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fault(kind: ErrorKind) -> Error {
    Error::new(kind, format!("scripted: {kind}"))
}

#[async_trait]
impl InboxStore for Scripted {
    type Tx = Tx;

    async fn try_claim(&self, tx: &mut Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let turn = self.enter(Step::Claim).await?;
        let claim = self.memory.try_claim(tx, group, delivery).await?;
        self.leave(turn, claim).await
    }

    async fn try_claim_batch(&self, tx: &mut Tx, group: &ConsumerGroup, deliveries: &[Delivery]) -> Result<Vec<Claim>> {
        let turn = self.enter(Step::ClaimBatch).await?;
        let mut claims = self.memory.try_claim_batch(tx, group, deliveries).await?;
        match turn {
            Turn::OneShort => drop(claims.pop()),
            Turn::OneTooMany => claims.push(Claim::New),
            _ => {}
        }
        self.leave(turn, claims).await
    }
}

#[async_trait]
impl Transactions for Scripted {
    async fn begin(&self) -> Result<Tx> {
        let turn = self.enter(Step::Begin).await?;
        let tx = self.memory.begin().await?;
        self.leave(turn, tx).await
    }

    async fn commit(&self, tx: Tx) -> Result<()> {
        let turn = self.enter(Step::Commit).await?;
        self.memory.commit(tx).await?;
        self.leave(turn, ()).await
    }

    async fn rollback(&self, tx: Tx) -> Result<()> {
        let turn = self.enter(Step::Rollback).await?;
        self.memory.rollback(tx).await?;
        self.leave(turn, ()).await
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error.downcast_ref::<DriverError>().map(|driver| driver.0)
    }
}

#[async_trait]
impl Upkeep for Scripted {
    async fn setup(&self) -> Result<()> {
        self.memory.setup().await
    }

    async fn check(&self) -> Result<Health> {
        self.memory.check().await
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        self.memory.find(key).await
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        self.memory.forget(key).await
    }

    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        let turn = self.enter(Step::Purge).await?;
        let purged = self.memory.purge(purge).await?;
        self.leave(turn, purged).await
    }
}

/// An error of the scripted store's driver, as a handler meets it in its own statements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DriverError(pub(crate) ErrorKind);

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the driver says: {}", self.0)
    }
}

impl StdError for DriverError {}

/// A handler's own error, with or without a cause.
#[derive(Debug)]
pub(crate) struct Declined(pub(crate) Option<Box<dyn StdError + Send + Sync>>);

impl Declined {
    pub(crate) fn because(cause: impl StdError + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(cause)))
    }
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the card was declined")
    }
}

impl StdError for Declined {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.as_deref().map(|cause| cause as &(dyn StdError + 'static))
    }
}

pub(crate) const RETRYABLE: [ErrorKind; 5] = [
    ErrorKind::Busy,
    ErrorKind::Conflict,
    ErrorKind::InFlight,
    ErrorKind::Unavailable,
    ErrorKind::OutcomeUnknown,
];

pub(crate) const FINAL: [ErrorKind; 8] = [
    ErrorKind::InvalidInput,
    ErrorKind::Schema,
    ErrorKind::Denied,
    ErrorKind::TransactionEnded,
    ErrorKind::PayloadMismatch,
    ErrorKind::Handler,
    ErrorKind::Unsupported,
    ErrorKind::Store,
];

pub(crate) fn id(name: &str) -> MessageId {
    MessageId::new(name).unwrap()
}

/// `m0`, `m1` and so on.
pub(crate) fn ids(count: usize) -> Vec<MessageId> {
    (0..count).map(|number| id(&format!("m{number}"))).collect()
}

/// This many attempts, without pauses.
pub(crate) fn attempts(count: u32) -> RetryPolicy {
    RetryPolicy::never().with_attempts(NonZeroU32::new(count).unwrap())
}

/// The inbox of a scripted store, with three attempts.
pub(crate) fn inbox(store: Scripted) -> Inbox<Scripted> {
    Inbox::new(store, "billing").unwrap().with_retry(attempts(3))
}

/// The ordinary handler: its effect is to enter the id into the ledger, between two awaits.
pub(crate) async fn enter(tx: &mut Tx, id: MessageId) -> Result<()> {
    tokio::task::yield_now().await;
    tx.apply(move |ledger| ledger.push(id));
    tokio::task::yield_now().await;
    Ok(())
}

/// The ordinary handler of a batch.
pub(crate) async fn enter_all(tx: &mut Tx, new: &[&MessageId]) -> Result<()> {
    for &&id in new {
        enter(tx, id).await?;
    }
    Ok(())
}

/// That every message's effect happened exactly as often as it is on record: once, or not at all.
#[track_caller]
pub(crate) fn assert_whole(inbox: &Inbox<Scripted>, ids: &[MessageId]) -> impl Future<Output = usize> {
    let caller = std::panic::Location::caller();
    async move {
        let ledger = inbox.store().ledger();
        let mut recorded = 0;
        for id in ids {
            let effects = ledger.iter().filter(|entry| *entry == id).count();
            let records = usize::from(inbox.find(*id).await.unwrap().is_some());
            assert_eq!(effects, records, "effects and records of {id}, at {caller}: {ledger:?}");
            recorded += records;
        }
        assert_eq!(ledger.len(), recorded, "effects of no message of these, at {caller}");
        recorded
    }
}

/// Drops `future` as soon as it has been polled `polls` times without being done.
pub(crate) async fn dropped_after<F: Future>(polls: usize, future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut left = polls;
    poll_fn(move |context| {
        if left > 0 {
            left -= 1;
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Some(output));
            }
        }
        if left > 0 { Poll::Pending } else { Poll::Ready(None) }
    })
    .await
}

/// Pauses of the length that applications have.
pub(crate) fn long_pauses(policy: RetryPolicy) -> RetryPolicy {
    policy.with_pauses(Duration::from_secs(1), Duration::from_secs(60))
}
