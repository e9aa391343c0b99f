//! JetStream's half of a consumer: how messages are asked for, and what it means where none come.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use async_nats::Client;
use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::pull::Batch;
use async_nats::jetstream::consumer::{Info, PullConsumer};
use async_trait::async_trait;
use futures_util::StreamExt;
use inbox_core::{Broker, BrokerLimits, ConsumerGroup, Result};

use crate::error::{broker, no_info, not_flushed, not_sent, unavailable};
use crate::message::{AnswerHealth, JetStreamMessage};
use crate::{MessageIds, settings};

/// How long the server keeps a request open where there are no messages.
const WAITS: Duration = Duration::from_millis(500);

/// How long after the end of a request the server's word of it may take.
const SILENCE: Duration = Duration::from_secs(2);

/// How often in a row a request may go unanswered, though the server answers others, before that is taken for a refusal:
/// the server does not tell a client in an answer what it may not do.
const UNANSWERED: u32 = 3;

/// How messages are fetched.
#[derive(Debug, Clone)]
pub(crate) struct Fetching {
    pub(crate) ids: MessageIds,
    pub(crate) bytes: Option<NonZeroUsize>,
    pub(crate) linger: Duration,
    pub(crate) confirmed: bool,
    /// How long records are kept at least.
    pub(crate) retention: Option<Duration>,
}

/// A pull consumer as a [`Broker`].
pub(crate) struct JetStream {
    consumer: PullConsumer,
    /// As it was at the start.
    info: Info,
    group: ConsumerGroup,
    fetching: Fetching,
    limits: BrokerLimits,
    answers: Arc<AnswerHealth>,
    /// Known from the first message on: async-nats does not tell it of a consumer.
    client: Option<Client>,
    /// How many requests in a row were not answered.
    unanswered: u32,
    /// The next message may be larger than the bytes of a whole fetch.
    oversize: bool,
}

impl JetStream {
    /// Looks at the consumer as the server has it, and refuses settings that would lose or double messages.
    pub(crate) async fn connect(consumer: PullConsumer, group: ConsumerGroup, fetching: Fetching) -> Result<Self> {
        let info = ask_for_info(&consumer).await?;
        settings::examine(&info)?;
        let limits = settings::limits(&info);
        Ok(Self {
            consumer,
            info,
            group,
            fetching,
            limits,
            answers: Arc::default(),
            client: None,
            unanswered: 0,
            oversize: false,
        })
    }

    /// Reads one request's messages to its end.
    async fn read(&mut self, mut batch: Batch, within: Duration) -> Pulled {
        let mut pulled = Pulled::default();
        loop {
            match tokio::time::timeout(within + SILENCE, batch.next()).await {
                Ok(Some(Ok(message))) => {
                    pulled.bytes += message.length;
                    if self.client.is_none() {
                        self.meet(&message.context).await;
                    }
                    let Fetching { ids, confirmed, .. } = &self.fetching;
                    let message = JetStreamMessage::new(message, ids, self.group.as_str(), *confirmed, &self.answers);
                    if message.is_none() {
                        tracing::error!("a message came that is none of JetStream's; it is left alone");
                    }
                    pulled.messages.extend(message);
                }
                Ok(Some(Err(error))) => {
                    pulled.end = End::Refused(error);
                    return pulled;
                }
                Ok(None) => return pulled,
                Err(_elapsed) => {
                    pulled.end = End::Silence;
                    return pulled;
                }
            }
        }
    }

    /// The first message is there: with it comes the way to ask for more than messages.
    async fn meet(&mut self, context: &Context) {
        self.client = Some(context.client());
        if let Some(retention) = self.fetching.retention {
            settings::compare_retention(context, &self.info.stream_name, retention).await;
        }
    }

    /// What is there already, without waiting.
    async fn pull_at_once(&mut self, most: usize, bytes: Option<usize>) -> Result<Pulled> {
        let mut request = self.consumer.fetch().max_messages(most);
        if let Some(bytes) = bytes {
            request = request.max_bytes(bytes);
        }
        let batch = request.messages().await.map_err(not_sent)?;
        Ok(self.read(batch, Duration::ZERO).await)
    }

    /// What comes within a time.
    async fn pull_within(&mut self, most: usize, bytes: Option<usize>, within: Duration) -> Result<Pulled> {
        let mut request = self.consumer.batch().max_messages(most).expires(within);
        if let Some(bytes) = bytes {
            request = request.max_bytes(bytes);
        }
        // No heartbeats: async-nats stops listening at the first one.
        let batch = request.messages().await.map_err(not_sent)?;
        Ok(self.read(batch, within).await)
    }

    /// Messages, where there are any: those that wait for nobody, then the first that comes.
    async fn pull(&mut self, most: usize) -> Result<Pulled> {
        if std::mem::take(&mut self.oversize) {
            return self.pull_at_once(1, None).await;
        }
        let bytes = self.fetching.bytes.map(NonZeroUsize::get);
        let mut pulled = self.pull_at_once(most, bytes).await?;
        if pulled.messages.is_empty() && matches!(pulled.end, End::Done) {
            // One and no more: a request for many would stay open once the first is here, and what it brought after that
            // would lie in the client, unseen.
            pulled = self.pull_within(1, bytes, self.longest_wait()).await?;
        }
        let room = most.saturating_sub(pulled.messages.len());
        let linger = self.fetching.linger.min(self.longest_wait());
        let bytes_left = bytes.map(|bytes| bytes.saturating_sub(pulled.bytes));
        if pulled.messages.is_empty() || room == 0 || linger.is_zero() || bytes_left == Some(0) {
            return Ok(pulled);
        }
        match self.pull_within(room, bytes_left, linger).await {
            Ok(more) => pulled.messages.extend(more.messages),
            Err(error) => tracing::debug!(%error, "a batch is not filled up"),
        }
        Ok(pulled)
    }

    fn longest_wait(&self) -> Duration {
        match self.info.config.max_expires {
            Duration::ZERO => WAITS,
            longest => longest.min(WAITS),
        }
    }

    /// What is the matter, where a request brought nothing but trouble.
    async fn diagnose(&mut self, end: End) -> Result<()> {
        let (stream, name) = (&self.info.stream_name, &self.info.name);
        let info = ask_for_info(&self.consumer).await;
        self.answers.reset();
        let info = info?;
        // Not by the time of its creation: a server that was killed gives another one afterwards (seen with 2.9).
        settings::examine(&info)?;
        if settings::limits(&info) != self.limits {
            return Err(broker(format!(
                "the settings of consumer {name} of stream {stream} are others than at the start, or it was made anew with \
                 others; start again, so that they count"
            )));
        }
        match end {
            End::Done => Ok(()),
            // Too large for the bytes of a fetch, perhaps: the server's answer has one code for that and for much else.
            End::Refused(error) if self.fetching.bytes.is_some() => {
                tracing::debug!(%error, "a request for messages was refused; the next is for one of any size");
                self.oversize = true;
                Ok(())
            }
            End::Refused(error) => Err(unavailable("the server refused a request for messages", error)),
            End::Silence => {
                self.unanswered += 1;
                if self.unanswered < UNANSWERED {
                    return Ok(());
                }
                Err(broker(format!(
                    "the server answers other requests, but none for messages; is this user allowed to publish to \
                     $JS.API.CONSUMER.MSG.NEXT.{stream}.{name} and to subscribe to its own inboxes (_INBOX.> by default)? \
                     The server's log says what it refused"
                )))
            }
        }
    }
}

#[async_trait]
impl Broker for JetStream {
    type Message = JetStreamMessage;

    async fn fetch(&mut self, most: NonZeroUsize) -> Result<Vec<JetStreamMessage>> {
        let most = match usize::try_from(self.info.config.max_batch) {
            Ok(largest @ 1..) => most.get().min(largest),
            _ => most.get(),
        };
        let pulled = self.pull(most).await?;
        if pulled.messages.is_empty() && !matches!(pulled.end, End::Done) {
            self.diagnose(pulled.end).await?;
            return Ok(Vec::new());
        }
        self.unanswered = 0;
        if self.answers.unnoticed() >= UNANSWERED {
            return Err(broker(format!(
                "messages come, but the server takes no notice of acknowledgements, so every message would come again and \
                 again; is this user allowed to publish to $JS.ACK.{}.{}.>? The server's log says what it refused",
                self.info.stream_name, self.info.name
            )));
        }
        if !pulled.messages.is_empty() {
            tracing::debug!(
                stream = self.info.stream_name,
                consumer = self.info.name,
                group = %self.group,
                messages = pulled.messages.len(),
                bytes = pulled.bytes,
                "fetched"
            );
        }
        Ok(pulled.messages)
    }

    fn limits(&self) -> BrokerLimits {
        self.limits
    }

    async fn flush(&mut self) -> Result<()> {
        let Some(client) = &self.client else {
            return Ok(());
        };
        match tokio::time::timeout(SILENCE + SILENCE, client.flush()).await {
            Ok(flushed) => flushed.map_err(not_flushed),
            Err(elapsed) => Err(unavailable("there is no connection to the server", elapsed)),
        }
    }
}

/// What one request brought.
#[derive(Default)]
struct Pulled {
    messages: Vec<JetStreamMessage>,
    bytes: usize,
    end: End,
}

#[derive(Default)]
enum End {
    /// As a request ends: it is full, or there are no more.
    #[default]
    Done,
    /// With a word of the server.
    Refused(async_nats::Error),
    /// Without one.
    Silence,
}

/// The consumer as the server has it. A server that has only just started may not have its streams yet, so that a consumer
/// is gone only if the server says so twice.
async fn ask_for_info(consumer: &PullConsumer) -> Result<Info> {
    let known = consumer.cached_info();
    for pause in [Some(Duration::from_secs(1)), None] {
        match consumer.get_info().await {
            Ok(info) => return Ok(info),
            Err(error) => {
                let error = no_info(error, &known.stream_name, &known.name);
                match pause {
                    Some(pause) if !error.is_retryable() => tokio::time::sleep(pause).await,
                    _ => return Err(error),
                }
            }
        }
    }
    Err(broker("the server did not tell of the consumer"))
}
