//! [`JetStreamMessage`]: one delivery, and how it is answered.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use async_nats::client::RequestErrorKind;
use async_nats::jetstream::{AckKind, Message};
use async_nats::{Client, HeaderMap, HeaderValue, Request, Subject};
use async_trait::async_trait;
use bytes::Bytes;
use inbox_core::{BrokerMessage, Delivery, Error, ErrorKind, GivenUp, Handled, Headers, MessageId, Result};

use crate::error::{unavailable, unconfirmed};
use crate::ids::{MessageIds, Place};

/// How long the server has for confirming an answer, and for taking one that it does not confirm.
const ANSWER_TAKES: Duration = Duration::from_secs(5);

/// Pauses before an answer that was not confirmed is sent again. A server that has just started has its streams in a second.
const SEND_AGAIN_AFTER: [Duration; 3] = [
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_millis(1_500),
];

/// A message as JetStream delivered it: what a handler gets.
///
/// It cannot be acknowledged by the handler: the consumer does that, after the commit.
#[non_exhaustive]
pub struct JetStreamMessage {
    /// The name of the stream that has it.
    pub stream: String,
    /// Its sequence in the stream, from 1.
    pub sequence: u64,
    /// What it was published to.
    pub subject: Subject,
    /// Its headers, as the server has them; empty where it has none.
    pub headers: HeaderMap,
    /// Its payload.
    pub payload: Bytes,
    /// The how-manieth delivery this is, by the server's count, from 1.
    pub attempt: u32,
    /// When the server stored it, by the server's clock.
    pub published_at: SystemTime,
    delivery: Result<Delivery>,
    answers: Answers,
}

/// Where a delivery is answered.
#[derive(Clone)]
struct Answers {
    client: Client,
    reply: Subject,
    confirmed: bool,
    health: Arc<AnswerHealth>,
}

/// How many answers in a row the server took no notice of, though the connection stood.
#[derive(Debug, Default)]
pub(crate) struct AnswerHealth(AtomicU32);

impl AnswerHealth {
    pub(crate) fn unnoticed(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn reset(&self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

impl JetStreamMessage {
    /// `None` if it is none of JetStream's: it then has no place in a stream, and nothing would answer to an answer.
    pub(crate) fn new(
        message: Message,
        ids: &MessageIds,
        group: &str,
        confirmed: bool,
        health: &Arc<AnswerHealth>,
    ) -> Option<Self> {
        let info = message.info().ok()?;
        let (stream, sequence) = (info.stream.to_owned(), info.stream_sequence);
        let attempt = u32::try_from(info.delivered).unwrap_or(u32::MAX);
        let published_at = SystemTime::from(info.published);
        let reply = message.reply.clone()?;
        let client = message.context.client();
        let message = message.message;
        let mut this = Self {
            stream,
            sequence,
            subject: message.subject,
            headers: message.headers.unwrap_or_default(),
            payload: message.payload,
            attempt,
            published_at,
            delivery: Err(Error::new(ErrorKind::InvalidInput, "the id was not read yet")),
            answers: Answers {
                client,
                reply,
                confirmed,
                health: Arc::clone(health),
            },
        };
        this.delivery = ids.read(&this, group);
        Some(this)
    }

    /// The message's id as the inbox has it.
    pub fn id(&self) -> MessageId {
        self.delivery.as_ref().map_or_else(|_| self.place(), Delivery::id)
    }

    /// The first value of the header `name`; where there is none of exactly that name, of the name in another case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let named = |is: fn(&str, &str) -> bool| {
            let found = self.headers.iter().find(|(own, _)| is((*own).as_ref(), name))?;
            found.1.first().map(HeaderValue::as_str)
        };
        named(|own, name| own == name).or_else(|| named(str::eq_ignore_ascii_case))
    }

    /// Where the server has it stored.
    pub(crate) fn stored(&self) -> Place {
        Place {
            stream: self.stream.clone(),
            sequence: self.sequence,
            published_at: self.published_at,
        }
    }
}

impl Answers {
    async fn tell(&self, kind: AckKind) -> Result<()> {
        let told = self.client.publish(self.reply.clone(), kind.into());
        // Without a connection it would wait for room in the client's queue.
        match tokio::time::timeout(ANSWER_TAKES, told).await {
            Ok(told) => told.map_err(|error| unavailable("the answer could not be sent", error)),
            Err(elapsed) => Err(unavailable("there is no connection to the server", elapsed)),
        }
    }

    async fn tell_for_sure(&self, kind: AckKind) -> Result<()> {
        if !self.confirmed {
            return self.tell(kind).await;
        }
        let payload = Bytes::from(kind);
        let mut pauses = SEND_AGAIN_AFTER.iter();
        loop {
            let request = Request::new().payload(payload.clone()).timeout(Some(ANSWER_TAKES));
            // Not the message's own double_ack: that takes the server's "nobody listens" for a confirmation.
            let Err(error) = self.client.send_request(self.reply.clone(), request).await else {
                self.health.reset();
                return Ok(());
            };
            let Some(pause) = pauses.next() else {
                if error.kind() == RequestErrorKind::TimedOut && self.is_connected().await {
                    self.health.0.fetch_add(1, Ordering::Relaxed);
                }
                return Err(unconfirmed(error));
            };
            tokio::time::sleep(*pause).await;
        }
    }

    async fn is_connected(&self) -> bool {
        matches!(
            tokio::time::timeout(ANSWER_TAKES, self.client.flush()).await,
            Ok(Ok(()))
        )
    }
}

#[async_trait]
impl BrokerMessage for JetStreamMessage {
    fn delivery(&self) -> Result<Delivery> {
        self.delivery.clone()
    }

    fn place(&self) -> MessageId {
        Place::of(self).id()
    }

    fn origin(&self) -> String {
        self.stored().to_string()
    }

    fn sequence(&self) -> u64 {
        self.sequence
    }

    fn subject(&self) -> &str {
        &self.subject
    }

    fn headers(&self) -> Headers {
        let mut pairs: Vec<_> = self
            .headers
            .iter()
            .flat_map(|(name, values)| values.iter().map(move |value| (name.to_string(), value.as_str())))
            .collect();
        // async-nats keeps the order of one name's values, and none among names.
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        Headers::from_iter(pairs)
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
        self.answers.tell_for_sure(AckKind::Ack).await
    }

    async fn terminate(&self, _proof: GivenUp) -> Result<()> {
        self.answers.tell_for_sure(AckKind::Term).await
    }

    async fn hand_back(&self, pause: Duration) -> Result<()> {
        self.answers
            .tell(AckKind::Nak((!pause.is_zero()).then_some(pause)))
            .await
    }

    async fn keep_alive(&self) -> Result<()> {
        self.answers.tell(AckKind::Progress).await
    }
}

/// Without headers and payload, which may be secret.
impl fmt::Debug for JetStreamMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JetStreamMessage")
            .field("stream", &self.stream)
            .field("sequence", &self.sequence)
            .field("subject", &self.subject)
            .field("attempt", &self.attempt)
            .finish_non_exhaustive()
    }
}
