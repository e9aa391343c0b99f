//! The broker's half: [`Broker`], [`BrokerMessage`], and the proofs that answering takes.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::{Delivery, Headers, MessageId, Result};

/// Where messages come from: what a [`Consumer`](crate::Consumer) needs of a broker's client.
///
/// Written by those who connect a broker; `inbox-nats` does it for JetStream.
#[async_trait]
pub trait Broker: Send + 'static {
    /// One delivery of a message.
    type Message: BrokerMessage;

    /// Waits for messages, for half a second or so, and gives at most `most` of them; none if none came.
    ///
    /// Whatever was delivered to this client is given out, here or by the next call: the consumer always awaits this to its
    /// end, except where its own future is dropped. When it shuts down, it lets the last call end and hands back what that
    /// brought.
    ///
    /// # Errors
    ///
    /// A [retryable](crate::Error::is_retryable) one if the broker is away for a while: the consumer backs off and asks
    /// again. Any other ends the consumer, which reports it: what it consumes is gone, or it may not.
    async fn fetch(&mut self, most: NonZeroUsize) -> Result<Vec<Self::Message>>;

    /// What the broker does by itself with messages that are not answered.
    fn limits(&self) -> BrokerLimits;

    /// Returns when everything that was sent so far has reached the broker.
    ///
    /// # Errors
    ///
    /// If the broker is away.
    async fn flush(&mut self) -> Result<()>;
}

/// What a broker does by itself with messages that are not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct BrokerLimits {
    /// How long after a delivery, or after the last [`BrokerMessage::keep_alive`], the broker delivers again. `None`: not
    /// while this client is connected.
    pub answer_within: Option<Duration>,
    /// How often the broker delivers a message at the most. `None`: for ever.
    pub deliveries: Option<NonZeroU32>,
    /// How many messages the broker lets be unanswered before it delivers no more. `None`: any number.
    pub unanswered: Option<NonZeroUsize>,
}

impl BrokerLimits {
    /// A broker that waits for an answer as long as it takes, and delivers as often as it takes and as many as are asked for.
    pub const fn none() -> Self {
        Self {
            answer_within: None,
            deliveries: None,
            unanswered: None,
        }
    }

    /// The same with a time within which an answer must come.
    #[must_use]
    pub const fn answer_within(mut self, time: Duration) -> Self {
        self.answer_within = Some(time);
        self
    }

    /// The same with a largest number of deliveries.
    #[must_use]
    pub const fn deliveries(mut self, most: NonZeroU32) -> Self {
        self.deliveries = Some(most);
        self
    }

    /// The same with a largest number of unanswered messages.
    #[must_use]
    pub const fn unanswered(mut self, most: NonZeroUsize) -> Self {
        self.unanswered = Some(most);
        self
    }
}

/// One delivery of a message as a broker handed it over: what a consumer reads of it, and the four ways of answering.
///
/// Acknowledging takes a [`Handled`] and terminating a [`GivenUp`]. Nobody but the [`Consumer`](crate::Consumer) can make
/// one, and it makes them after the commit, so that **an acknowledgement before the commit does not compile**:
///
/// ```compile_fail,E0423
/// use inbox_core::{BrokerMessage, Handled};
///
/// async fn too_early(message: &impl BrokerMessage) {
///     let _ = message.acknowledge(Handled(())).await;
/// }
/// ```
#[async_trait]
pub trait BrokerMessage: Send + Sync + 'static {
    /// Which message it is, with a fingerprint of its payload if payloads are to be compared.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if that cannot be read: the message is given up at once,
    /// because it would be no better the next time.
    fn delivery(&self) -> Result<Delivery>;

    /// An id for the message as the broker has it stored, whatever its headers say: the same for every delivery, another
    /// one for every other message. A message without an id of its own is given up under this one.
    fn place(&self) -> MessageId;

    /// The same for people: stream and sequence; topic, partition and offset.
    fn origin(&self) -> String;

    /// Where it stands among the messages of the broker: of two, the one with the lower number was published first.
    fn sequence(&self) -> u64;

    /// The subject, topic or routing key that it was published to.
    fn subject(&self) -> &str;

    /// Its headers.
    fn headers(&self) -> Headers;

    /// Its payload.
    fn payload(&self) -> &[u8];

    /// The how-manieth delivery of the message this is, by the broker's count, from 1.
    fn attempt(&self) -> u32;

    /// When it was published, by the broker's clock, if the broker says.
    fn published_at(&self) -> Option<SystemTime> {
        None
    }

    /// Tells the broker that the message is done with, and returns when the broker has confirmed it, trying again for a
    /// while if it does not.
    ///
    /// # Errors
    ///
    /// If it could not be had. The message then comes again, and is a duplicate.
    async fn acknowledge(&self, proof: Handled) -> Result<()>;

    /// Tells the broker not to deliver the message again though it was not handled, as
    /// [`acknowledge`](Self::acknowledge) does.
    ///
    /// # Errors
    ///
    /// As there.
    async fn terminate(&self, proof: GivenUp) -> Result<()>;

    /// Has the broker deliver the message again after `pause`, to this consumer or another.
    ///
    /// # Errors
    ///
    /// If the broker cannot be told; it then delivers again by itself, in its own time.
    async fn hand_back(&self, pause: Duration) -> Result<()>;

    /// Tells the broker that the message is still being handled, so that it waits for the answer anew.
    ///
    /// # Errors
    ///
    /// If the broker cannot be told.
    async fn keep_alive(&self) -> Result<()>;
}

/// Proof that a message's effect is committed, by this delivery or an earlier one.
#[derive(Debug)]
#[must_use = "the broker is still to be told"]
pub struct Handled(());

/// Proof that a message's dead letter is committed.
#[derive(Debug)]
#[must_use = "the broker is still to be told"]
pub struct GivenUp(());

impl Handled {
    /// To be called where a commit succeeded or a committed record was seen, and nowhere else.
    pub(super) const fn proven() -> Self {
        Self(())
    }
}

impl GivenUp {
    /// To be called where the commit of a dead letter succeeded, and nowhere else.
    pub(super) const fn proven() -> Self {
        Self(())
    }
}
