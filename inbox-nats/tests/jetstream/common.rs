//! A server with a stream and a consumer on it; an inbox in memory that counts invoices.

use std::future::Future;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use inbox_core::{ConsumerOptions, Inbox, MemoryInbox, MemoryTx};
use inbox_nats::JetStreamMessage;
use inbox_nats::async_nats::jetstream::consumer::PullConsumer;
use inbox_nats::async_nats::jetstream::consumer::pull::Config;
use inbox_nats::async_nats::jetstream::{Context, stream};
use inbox_nats::async_nats::{self, HeaderMap};
use inbox_test_servers::Nats;

/// What handlers of these tests write: one line a message handled.
pub(crate) type Lines = Vec<String>;

pub(crate) struct Stream {
    pub(crate) server: Nats,
    pub(crate) context: Context,
}

pub(crate) const NAME: &str = "ORDERS";
pub(crate) const DURABLE: &str = "billing";

impl Stream {
    pub(crate) async fn new() -> Self {
        Self::on(Nats::start()).await
    }

    pub(crate) async fn on(server: Nats) -> Self {
        let stream = Self {
            context: connect(&server.url()).await,
            server,
        };
        stream.create().await;
        stream
    }

    pub(crate) async fn create(&self) {
        let config = stream::Config {
            name: NAME.into(),
            subjects: vec!["orders.>".into()],
            duplicate_window: Duration::from_millis(200),
            ..stream::Config::default()
        };
        self.context.create_stream(config).await.unwrap();
    }

    pub(crate) async fn publish(&self, id: &str, payload: &str) -> u64 {
        self.publish_to("orders.created", [("Nats-Msg-Id", id)], payload).await
    }

    pub(crate) async fn publish_to<'h>(
        &self,
        subject: &str,
        headers: impl IntoIterator<Item = (&'h str, &'h str)>,
        payload: &str,
    ) -> u64 {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(name, value);
        }
        let sent = self
            .context
            .publish_with_headers(subject.to_owned(), map, payload.to_owned().into())
            .await
            .unwrap();
        sent.await.unwrap().sequence
    }

    pub(crate) async fn consumer(&self) -> PullConsumer {
        self.consumer_with(Config::default()).await
    }

    /// The durable consumer, made with these settings if there is none.
    pub(crate) async fn consumer_with(&self, config: Config) -> PullConsumer {
        let config = Config {
            durable_name: Some(DURABLE.into()),
            ..config
        };
        let stream = self.context.get_stream(NAME).await.unwrap();
        stream.get_or_create_consumer(DURABLE, config).await.unwrap()
    }

    /// Ends when nothing is left to deliver and nothing unanswered, so that a consumer stops when it has done its work.
    pub(crate) fn drained(&self) -> impl Future<Output = ()> + use<> {
        let context = self.context.clone();
        async move {
            loop {
                let consumer: Result<PullConsumer, _> = context.get_consumer_from_stream(DURABLE, NAME).await;
                let info = consumer.as_ref().map(PullConsumer::cached_info);
                if info.is_ok_and(|info| info.num_pending == 0 && info.num_ack_pending == 0) {
                    return;
                }
                tokio::time::sleep(millis(50)).await;
            }
        }
    }

    /// How many deliveries were made, redeliveries included; and how many are unanswered.
    pub(crate) async fn deliveries(&self) -> (u64, usize) {
        let consumer: PullConsumer = self.context.get_consumer_from_stream(DURABLE, NAME).await.unwrap();
        let info = consumer.cached_info();
        (info.delivered.consumer_sequence, info.num_ack_pending)
    }
}

pub(crate) async fn connect(url: &str) -> Context {
    async_nats::jetstream::new(async_nats::connect(url).await.unwrap())
}

/// Waits for a condition: as long as it takes, but not for ever.
pub(crate) async fn until(mut condition: impl AsyncFnMut() -> bool) {
    for _ in 0..1_200 {
        if condition().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("what the test waits for does not come");
}

pub(crate) fn inbox() -> Inbox<MemoryInbox<Lines>> {
    Inbox::new(MemoryInbox::with_state(Lines::new()), "billing").unwrap()
}

pub(crate) fn lines(inbox: &Inbox<MemoryInbox<Lines>>) -> Lines {
    inbox.store().state(Clone::clone)
}

pub(crate) fn write(tx: &mut MemoryTx<Lines>, message: &JetStreamMessage) {
    let line = String::from_utf8_lossy(&message.payload).into_owned();
    tx.apply(move |lines| lines.push(line));
}

pub(crate) fn size(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

pub(crate) fn times(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

pub(crate) fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Pauses short enough for a test.
pub(crate) fn hurried() -> ConsumerOptions {
    ConsumerOptions::new().pauses(millis(50), millis(400))
}
