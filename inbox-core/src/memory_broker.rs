//! [`MemoryBroker`]: a broker in memory, for unit tests of consumers.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::{Broker, BrokerLimits, BrokerMessage, Delivery, GivenUp, Handled, Headers, MessageId, Result};

/// How long a fetch waits where nothing comes.
const FETCH_WAITS: Duration = Duration::from_millis(500);

/// A broker in memory that delivers at least once, as real ones do: for unit tests of a handler with the
/// [`Consumer`](crate::Consumer) around it.
///
/// Clones are clients of the same broker; give each consumer one. What is not answered within
/// [`BrokerLimits::answer_within`] is delivered again, to whoever asks. [`log`](Self::log) tells what went to and fro.
///
/// ```
/// use std::future;
/// use inbox_core::{BoxError, Consumer, Inbox, MemoryBroker, MemoryInbox, MemoryMessage};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), BoxError> {
/// let broker = MemoryBroker::new();
/// broker.publish("orders", "order-17", "250");
/// broker.publish("orders", "order-17", "250"); // its producer did so twice
///
/// let inbox = Inbox::new(MemoryInbox::with_state(0), "billing")?;
/// let handler = async |tx: &mut inbox_core::MemoryTx<u64>, message: &MemoryMessage| {
///     let cents: u64 = std::str::from_utf8(&message.payload)?.parse()?;
///     tx.apply(move |total| *total += cents);
///     Ok::<_, BoxError>(())
/// };
/// let summary = Consumer::new(broker.clone(), inbox.clone(), handler).run(broker.drained()).await?;
/// assert_eq!((summary.handled, summary.duplicates), (1, 1));
/// assert_eq!(inbox.store().state(|total| *total), 250);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct MemoryBroker {
    shared: Arc<Shared>,
}

struct Shared {
    limits: BrokerLimits,
    stream: Mutex<Stream>,
    changed: Notify,
}

#[derive(Default)]
struct Stream {
    messages: Vec<Stored>,
    log: Vec<(u64, Told)>,
}

struct Stored {
    message: Arc<MemoryMessage>,
    deliveries: u32,
    /// When it may be delivered (again); `None` once it is done with.
    due: Option<Instant>,
}

/// What went to and fro about a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Told {
    /// The broker delivered it: for the how-manieth time.
    Delivered(u32),
    /// The consumer acknowledged it.
    Acknowledged,
    /// The consumer said not to deliver it again.
    Terminated,
    /// The consumer had it delivered again after this pause.
    HandedBack(Duration),
    /// The consumer said that it is still at it.
    KeptAlive,
}

/// A message of a [`MemoryBroker`].
#[derive(Clone)]
pub struct MemoryMessage {
    /// Its place among the messages of the broker, from 1.
    pub sequence: u64,
    /// What it was published to.
    pub subject: String,
    /// Its headers; `Message-Id` has its id.
    pub headers: Headers,
    /// Its payload.
    pub payload: Vec<u8>,
    /// The how-manieth delivery this is.
    pub attempt: u32,
    published_at: SystemTime,
    shared: std::sync::Weak<Shared>,
}

impl MemoryBroker {
    /// An empty broker that waits for answers as long as it takes.
    pub fn new() -> Self {
        Self::with_limits(BrokerLimits::none())
    }

    /// An empty broker with limits.
    pub fn with_limits(limits: BrokerLimits) -> Self {
        Self {
            shared: Arc::new(Shared {
                limits,
                stream: Mutex::default(),
                changed: Notify::new(),
            }),
        }
    }

    /// Publishes a message under an id, which goes into the header `Message-Id`.
    pub fn publish(&self, subject: &str, id: &str, payload: impl Into<Vec<u8>>) -> u64 {
        self.publish_with_headers(subject, Headers::from_iter([("Message-Id", id)]), payload)
    }

    /// Publishes a message and says its sequence.
    pub fn publish_with_headers(&self, subject: &str, headers: Headers, payload: impl Into<Vec<u8>>) -> u64 {
        let mut stream = self.shared.lock();
        let sequence = stream.messages.len() as u64 + 1;
        let message = MemoryMessage {
            sequence,
            subject: subject.to_owned(),
            headers,
            payload: payload.into(),
            attempt: 0,
            published_at: SystemTime::now(),
            shared: Arc::downgrade(&self.shared),
        };
        stream.messages.push(Stored {
            message: Arc::new(message),
            deliveries: 0,
            due: Some(Instant::now()),
        });
        drop(stream);
        self.shared.changed.notify_waiters();
        sequence
    }

    /// What went to and fro so far, by sequence, in order.
    pub fn log(&self) -> Vec<(u64, Told)> {
        self.shared.lock().log.clone()
    }

    /// How often the message of this sequence was delivered.
    pub fn deliveries(&self, sequence: u64) -> u32 {
        let stream = self.shared.lock();
        stream.at(sequence).map_or(0, |stored| stored.deliveries)
    }

    /// How many messages are neither acknowledged nor terminated.
    pub fn pending(&self) -> usize {
        let stream = self.shared.lock();
        stream.messages.iter().filter(|stored| stored.due.is_some()).count()
    }

    /// Waits until no message is pending: a shutdown for consumers that are to end then.
    pub async fn drained(&self) {
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            if self.pending() == 0 {
                return;
            }
            changed.await;
        }
    }
}

impl Default for MemoryBroker {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn may_deliver(&self, stored: &Stored) -> bool {
        self.limits.deliveries.is_none_or(|most| stored.deliveries < most.get())
    }

    /// Delivers what is due.
    fn deliver(&self, most: usize) -> Vec<MemoryMessage> {
        let now = Instant::now();
        let mut stream = self.lock();
        let stream = &mut *stream;
        let due = |stored: &&mut Stored| stored.due.is_some_and(|due| due <= now) && self.may_deliver(stored);
        let mut delivered = Vec::new();
        for stored in stream.messages.iter_mut().filter(due).take(most) {
            stored.deliveries += 1;
            stored.due = Some(self.due_again(now));
            stream
                .log
                .push((stored.message.sequence, Told::Delivered(stored.deliveries)));
            delivered.push(MemoryMessage {
                attempt: stored.deliveries,
                ..(*stored.message).clone()
            });
        }
        delivered
    }

    /// When a message that was delivered or kept alive just now is delivered again by itself.
    fn due_again(&self, now: Instant) -> Instant {
        let century = Duration::from_secs(100 * 365 * 24 * 60 * 60);
        now + self.limits.answer_within.unwrap_or(century)
    }

    fn next_due(&self) -> Option<Instant> {
        let stream = self.lock();
        let deliverable = stream.messages.iter().filter(|stored| self.may_deliver(stored));
        deliverable.filter_map(|stored| stored.due).min()
    }
}

impl Stream {
    fn at(&self, sequence: u64) -> Option<&Stored> {
        self.messages.get(usize::try_from(sequence).ok()?.checked_sub(1)?)
    }
}

impl MemoryMessage {
    fn tell(&self, told: Told, due: impl FnOnce(&Shared) -> Option<Instant>) {
        let Some(shared) = self.shared.upgrade() else { return };
        let mut stream = shared.lock();
        stream.log.push((self.sequence, told));
        let index = usize::try_from(self.sequence).unwrap_or_default();
        if let Some(stored) = index.checked_sub(1).and_then(|index| stream.messages.get_mut(index)) {
            // What is done stays done, whoever answers late.
            if stored.due.is_some() {
                stored.due = due(&shared);
            }
        }
        drop(stream);
        shared.changed.notify_waiters();
    }
}

#[async_trait]
impl Broker for MemoryBroker {
    type Message = MemoryMessage;

    async fn fetch(&mut self, most: NonZeroUsize) -> Result<Vec<MemoryMessage>> {
        let patience = Instant::now() + FETCH_WAITS;
        loop {
            let mut changed = std::pin::pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            let delivered = self.shared.deliver(most.get());
            if !delivered.is_empty() || Instant::now() >= patience {
                return Ok(delivered);
            }
            let wake = self.shared.next_due().map_or(patience, |due| due.min(patience));
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(wake) => {}
            }
        }
    }

    fn limits(&self) -> BrokerLimits {
        self.shared.limits
    }

    async fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl BrokerMessage for MemoryMessage {
    fn delivery(&self) -> Result<Delivery> {
        MessageId::new(self.headers.get("Message-Id").unwrap_or_default()).map(Delivery::new)
    }

    fn place(&self) -> MessageId {
        let broker = self.shared.as_ptr() as usize as u64;
        let name = [broker.to_be_bytes(), self.sequence.to_be_bytes()].concat();
        MessageId::from_uuid(uuid::Uuid::new_v5(&MessageId::PARTS_NAMESPACE, &name))
            .unwrap_or_else(|_| unreachable!("no UUIDv5 is the nil UUID"))
    }

    fn origin(&self) -> String {
        format!("message {}", self.sequence)
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn subject(&self) -> &str {
        &self.subject
    }

    fn headers(&self) -> Headers {
        self.headers.clone()
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    fn attempt(&self) -> u32 {
        self.attempt
    }

    fn published_at(&self) -> Option<SystemTime> {
        Some(self.published_at)
    }

    async fn acknowledge(&self, _proof: Handled) -> Result<()> {
        self.tell(Told::Acknowledged, |_| None);
        Ok(())
    }

    async fn terminate(&self, _proof: GivenUp) -> Result<()> {
        self.tell(Told::Terminated, |_| None);
        Ok(())
    }

    async fn hand_back(&self, pause: Duration) -> Result<()> {
        self.tell(Told::HandedBack(pause), |_| Some(Instant::now() + pause));
        Ok(())
    }

    async fn keep_alive(&self) -> Result<()> {
        self.tell(Told::KeptAlive, |shared| Some(shared.due_again(Instant::now())));
        Ok(())
    }
}

impl fmt::Debug for MemoryBroker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBroker")
            .field("limits", &self.shared.limits)
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for MemoryMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMessage")
            .field("sequence", &self.sequence)
            .field("subject", &self.subject)
            .field("headers", &self.headers)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
