//! [`MemoryInbox`]: a real store in memory, for unit tests.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::error::Error as StdError;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::{
    Claim, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters, Delivery, Error,
    ErrorKind, Fingerprint, Health, InFlight, InboxStore, Key, Processed, Purge, Purged, Record, Result, Transactions,
    Upkeep, WaitPolicy,
};

/// A store in memory, with transactions, rollback and claims that wait for each other, for unit tests of consumers.
///
/// It passes the same conformance suite as the databases. Records live as long as the last clone of the store; nothing
/// is kept on disk, so it is no store for production.
///
/// `W` is the state that handlers work on. Effects are queued in the transaction with [`MemoryTx::apply`] and happen
/// together with the records, at its commit or not at all.
///
/// ```
/// use inbox_core::{Inbox, MemoryInbox, MessageId, Outcome};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
/// let inbox = Inbox::new(MemoryInbox::with_state(0), "counting")?;
/// let id = MessageId::new("tick-1")?;
/// let outcome = inbox.process(id, async |tx| {
///     tx.apply(|ticks| *ticks += 1);
///     Ok::<_, inbox_core::Error>("counted")
/// }).await?;
/// assert_eq!(outcome, Outcome::Processed("counted"));
/// assert_eq!(inbox.store().state(|ticks| *ticks), 1);
/// # Ok(()) }
/// ```
pub struct MemoryInbox<W = ()> {
    shared: Arc<Shared<W>>,
    wait: WaitPolicy,
}

struct Shared<W> {
    state: Mutex<State<W>>,
    /// Some transaction ended: whoever waits for a key looks again.
    ended: Notify,
}

struct State<W> {
    records: HashMap<Key, Processed>,
    letters: BTreeMap<Key, DeadLetter>,
    in_flight: HashMap<Key, TxNumber>,
    /// Which transaction waits for which: a ring in it is a deadlock.
    waiting: HashMap<TxNumber, TxNumber>,
    last_tx: TxNumber,
    clock_ahead: Duration,
    world: W,
}

type TxNumber = u64;
type Effect<W> = Box<dyn FnOnce(&mut W) + Send>;

impl MemoryInbox {
    /// An empty store without state.
    pub fn new() -> Self {
        Self::with_state(())
    }
}

impl Default for MemoryInbox {
    fn default() -> Self {
        Self::new()
    }
}

impl<W: Send + 'static> MemoryInbox<W> {
    /// An empty store, with a state for handlers to work on.
    pub fn with_state(world: W) -> Self {
        Self {
            shared: Arc::new(Shared {
                state: Mutex::new(State {
                    records: HashMap::new(),
                    letters: BTreeMap::new(),
                    in_flight: HashMap::new(),
                    waiting: HashMap::new(),
                    last_tx: 0,
                    clock_ahead: Duration::ZERO,
                    world,
                }),
                ended: Notify::new(),
            }),
            wait: WaitPolicy::Wait,
        }
    }

    /// The same store (not a copy) through a handle with another wait policy. A batch waits so for each message that is in
    /// flight.
    #[must_use]
    pub fn with_wait(mut self, wait: WaitPolicy) -> Self {
        self.wait = wait;
        self
    }

    /// Looks at the state as the last commit left it.
    pub fn state<T>(&self, look: impl FnOnce(&W) -> T) -> T {
        look(&self.shared.lock().world)
    }

    /// Moves this store's clock forward, to test retention without waiting for it.
    pub fn advance_clock(&self, by: Duration) {
        let mut state = self.shared.lock();
        state.clock_ahead = state.clock_ahead.saturating_add(by);
    }

    /// Claims `key`, waiting for the transaction that has it claimed, if any.
    async fn claim_waiting(&self, tx: &mut MemoryTx<W>, key: &Key, fingerprint: Option<Fingerprint>) -> Result<Claim> {
        loop {
            // Listening begins before looking, or an end in between would be missed.
            let mut ended = std::pin::pin!(self.shared.ended.notified());
            ended.as_mut().enable();
            let _waiting = {
                let mut state = self.shared.lock();
                let Some(holder) = state.claim(tx, key, fingerprint) else {
                    return Ok(Claim::New);
                };
                match holder {
                    Holder::Record(processed) => return Ok(Claim::Duplicate(processed)),
                    Holder::Tx(_) if self.wait == WaitPolicy::DontWait => return Ok(Claim::InFlight(InFlight::new())),
                    Holder::Tx(holder) => state.wait(&self.shared, tx.number, holder)?,
                }
            };
            ended.await;
        }
    }

    /// Refuses a transaction of another store, whose keys would stay in flight there for ever.
    fn own(&self, tx: &MemoryTx<W>) -> Result<()> {
        if Arc::ptr_eq(&self.shared, &tx.shared) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidInput,
            "the transaction is another MemoryInbox's; give it to the store that began it, or to a clone of that",
        ))
    }

    async fn claim(&self, tx: &mut MemoryTx<W>, key: &Key, fingerprint: Option<Fingerprint>) -> Result<Claim> {
        self.own(tx)?;
        match self.wait {
            WaitPolicy::Wait | WaitPolicy::DontWait => self.claim_waiting(tx, key, fingerprint).await,
            WaitPolicy::AtMost(longest) => {
                match tokio::time::timeout(longest, self.claim_waiting(tx, key, fingerprint)).await {
                    Ok(answer) => answer,
                    Err(_elapsed) => Ok(Claim::InFlight(InFlight::new())),
                }
            }
        }
    }
}

/// Why a key cannot be claimed.
enum Holder {
    Record(Processed),
    Tx(TxNumber),
}

impl<W> Shared<W> {
    fn lock(&self) -> MutexGuard<'_, State<W>> {
        // Only an effect of the user's can panic under the lock, and a test that sees it panic fails anyway.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<W> State<W> {
    fn now(&self) -> SystemTime {
        let now = SystemTime::now();
        now.checked_add(self.clock_ahead).unwrap_or(now)
    }

    fn claim(&mut self, tx: &mut MemoryTx<W>, key: &Key, fingerprint: Option<Fingerprint>) -> Option<Holder> {
        if let Some(processed) = self.records.get(key) {
            return Some(Holder::Record(*processed));
        }
        let now = self.now();
        match self.in_flight.entry(key.clone()) {
            Entry::Vacant(free) => {
                free.insert(tx.number);
                tx.claimed.insert(key.clone(), fingerprint);
                None
            }
            Entry::Occupied(taken) if *taken.get() == tx.number => {
                let own = tx.claimed.get(key).copied().flatten();
                Some(Holder::Record(Processed::at(now).with_fingerprint(own)))
            }
            Entry::Occupied(taken) => Some(Holder::Tx(*taken.get())),
        }
    }

    /// Notes that `waiter` waits for `holder`, unless `holder` waits for `waiter`, however far around.
    fn wait<'s>(&mut self, shared: &'s Shared<W>, waiter: TxNumber, holder: TxNumber) -> Result<Waiting<'s, W>> {
        let mut next = Some(holder);
        while let Some(number) = next {
            if number == waiter {
                return Err(Error::new(
                    ErrorKind::Conflict,
                    "deadlock: two transactions claim each other's messages; roll back and run again, \
                     or claim them as a batch, which takes them in one order",
                ));
            }
            next = self.waiting.get(&number).copied();
        }
        self.waiting.insert(waiter, holder);
        Ok(Waiting { shared, waiter })
    }
}

/// A transaction's place in the list of those that wait; left on drop, so that a dropped future leaves it too.
struct Waiting<'s, W> {
    shared: &'s Shared<W>,
    waiter: TxNumber,
}

impl<W> Drop for Waiting<'_, W> {
    fn drop(&mut self) {
        self.shared.lock().waiting.remove(&self.waiter);
    }
}

/// An open transaction of a [`MemoryInbox`]; rolled back when dropped.
pub struct MemoryTx<W = ()> {
    shared: Arc<Shared<W>>,
    number: TxNumber,
    claimed: HashMap<Key, Option<Fingerprint>>,
    /// What becomes of dead letters at the commit: kept, or removed.
    letters: Vec<(Key, Option<DeadLetter>)>,
    effects: Vec<Effect<W>>,
}

impl<W> MemoryTx<W> {
    /// Queues an effect on the state, to happen at the commit. It must not panic, or later effects do not happen.
    pub fn apply(&mut self, effect: impl FnOnce(&mut W) + Send + 'static) {
        self.effects.push(Box::new(effect));
    }
}

impl<W> Drop for MemoryTx<W> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        for key in self.claimed.keys() {
            state.in_flight.remove(key);
        }
        drop(state);
        self.shared.ended.notify_waiters();
    }
}

#[async_trait]
impl<W: Send + 'static> InboxStore for MemoryInbox<W> {
    type Tx = MemoryTx<W>;

    async fn try_claim(&self, tx: &mut Self::Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let key = Key::new(group.clone(), delivery.id());
        self.claim(tx, &key, delivery.fingerprint()).await
    }

    async fn try_claim_batch(
        &self,
        tx: &mut Self::Tx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        // In the order of ids, whatever the batch's own, so that two batches wait for each other in one direction only;
        // stable, so that the first of two equal ids is the one that is new.
        let mut order: Vec<usize> = (0..deliveries.len()).collect();
        order.sort_by_key(|&index| deliveries[index].id());
        let mut claims = vec![Claim::New; deliveries.len()];
        for index in order {
            claims[index] = self.try_claim(tx, group, deliveries[index]).await?;
        }
        Ok(claims)
    }
}

#[async_trait]
impl<W: Send + 'static> Transactions for MemoryInbox<W> {
    async fn begin(&self) -> Result<Self::Tx> {
        let mut state = self.shared.lock();
        state.last_tx += 1;
        Ok(MemoryTx {
            shared: Arc::clone(&self.shared),
            number: state.last_tx,
            claimed: HashMap::new(),
            letters: Vec::new(),
            effects: Vec::new(),
        })
    }

    async fn commit(&self, mut tx: Self::Tx) -> Result<()> {
        self.own(&tx)?;
        let mut state = self.shared.lock();
        for effect in std::mem::take(&mut tx.effects) {
            effect(&mut state.world);
        }
        let now = state.now();
        for (key, fingerprint) in std::mem::take(&mut tx.claimed) {
            state.in_flight.remove(&key);
            state
                .records
                .insert(key, Processed::at(now).with_fingerprint(fingerprint));
        }
        for (key, letter) in std::mem::take(&mut tx.letters) {
            match letter {
                Some(mut letter) => {
                    letter.info.died_at = now;
                    state.letters.insert(key, letter);
                }
                None => drop(state.letters.remove(&key)),
            }
        }
        Ok(())
    }

    async fn rollback(&self, tx: Self::Tx) -> Result<()> {
        drop(tx);
        Ok(())
    }

    fn classify(&self, _error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = MemoryTx<W>>> {
        Some(self)
    }
}

#[async_trait]
impl<W: Send + 'static> DeadLetters for MemoryInbox<W> {
    async fn add_dead_letter(&self, tx: &mut Self::Tx, letter: &DeadLetter) -> Result<()> {
        self.own(tx)?;
        tx.letters.push((letter.info.key.clone(), Some(letter.clone())));
        Ok(())
    }

    async fn remove_dead_letter(&self, tx: &mut Self::Tx, key: &Key) -> Result<()> {
        self.own(tx)?;
        tx.letters.push((key.clone(), None));
        Ok(())
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        Ok(self.shared.lock().letters.get(key).cloned())
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        let state = self.shared.lock();
        let mut letters: Vec<DeadLetterInfo> = state
            .letters
            .values()
            .map(|letter| &letter.info)
            .filter(|info| info.key.group() == group && after.is_none_or(|after| info.place() > after))
            .cloned()
            .collect();
        letters.sort_by_key(DeadLetterInfo::place);
        letters.truncate(limit.get() as usize);
        Ok(letters)
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let mut state = self.shared.lock();
        let state = &mut *state;
        let Some(letter) = state.letters.get_mut(key) else {
            return Ok(None);
        };
        if letter.info.state != DeadLetterState::PuttingBack {
            letter.info.state = DeadLetterState::PuttingBack;
            state.records.remove(key);
        }
        Ok(Some(letter.clone()))
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        let mut state = self.shared.lock();
        let same = state.letters.get(&info.key).is_some_and(|letter| {
            letter.info.state == DeadLetterState::PuttingBack && letter.info.died_at == info.died_at
        });
        if same {
            state.letters.remove(&info.key);
        }
        Ok(same)
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        Ok(self.shared.lock().letters.remove(key).is_some())
    }
}

#[async_trait]
impl<W: Send + 'static> Upkeep for MemoryInbox<W> {
    async fn setup(&self) -> Result<()> {
        Ok(())
    }

    async fn check(&self) -> Result<Health> {
        let mut health = Health::new();
        health.warning(
            "the records are in memory and end with the process",
            "take a database for anything but tests",
        );
        Ok(health)
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let state = self.shared.lock();
        Ok(state
            .records
            .get(key)
            .map(|processed| Record::new(key.clone(), *processed)))
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        Ok(self.shared.lock().records.remove(key).is_some())
    }

    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        let mut state = self.shared.lock();
        let Some(cutoff) = state.now().checked_sub(purge.older_than) else {
            return Ok(Purged::new(0, false));
        };
        let step = purge.step.get() as usize;
        let old: Vec<Key> = state
            .records
            .iter()
            .filter(|(key, _)| purge.group.as_ref().is_none_or(|group| key.group() == group))
            .filter(|(_, processed)| processed.at.is_some_and(|at| at < cutoff))
            .map(|(key, _)| key.clone())
            .take(step)
            .collect();
        for key in &old {
            state.records.remove(key);
        }
        Ok(Purged::new(old.len() as u64, old.len() == step))
    }
}

impl<W> Clone for MemoryInbox<W> {
    fn clone(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            wait: self.wait,
        }
    }
}

impl<W> fmt::Debug for MemoryInbox<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryInbox")
            .field("wait", &self.wait)
            .finish_non_exhaustive()
    }
}

impl<W> fmt::Debug for MemoryTx<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryTx")
            .field("number", &self.number)
            .field("claimed", &self.claimed)
            .finish_non_exhaustive()
    }
}
