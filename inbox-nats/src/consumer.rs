//! [`JetStreamConsumer`] and its builder.

use std::fmt;
use std::future::Future;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use async_nats::jetstream::consumer::PullConsumer;
use inbox_core::{BoxError, Consumer, ConsumerOptions, Inbox, Result, Summary, Transactions};

use crate::broker::{Fetching, JetStream};
use crate::{JetStreamMessage, MessageIds};

type KeyOf = Arc<dyn Fn(&JetStreamMessage) -> String + Send + Sync>;

/// How a [`JetStreamConsumer`] is set up; made by [`JetStreamConsumer::builder`], ended by [`handler`](Self::handler).
pub struct Builder<S> {
    consumer: PullConsumer,
    inbox: Inbox<S>,
    options: ConsumerOptions,
    fetching: Fetching,
    key_of: Option<KeyOf>,
}

impl<S: Transactions> Builder<S> {
    /// Batches, concurrency, attempts, pauses and bounds of time.
    #[must_use]
    pub const fn with(mut self, options: ConsumerOptions) -> Self {
        self.options = options;
        self
    }

    /// Where a message's id comes from. Default: the header `Nats-Msg-Id`.
    #[must_use]
    pub fn ids(mut self, ids: MessageIds) -> Self {
        self.fetching.ids = ids;
        self
    }

    /// Fetches at most this many bytes at once, headers and subjects included; a message that is larger is fetched alone.
    /// Default: as many as the messages have.
    #[must_use]
    pub const fn fetch_bytes(mut self, most: NonZeroUsize) -> Self {
        self.fetching.bytes = Some(most);
        self
    }

    /// Once a message is there, waits this long, half a second at the most, for others to fill its batch up. Default: not at all, which makes batches
    /// as large as what came while the last one was handled.
    #[must_use]
    pub const fn linger(mut self, time: Duration) -> Self {
        self.fetching.linger = time;
        self
    }

    /// Does not wait for the server's confirmation of acknowledgements. Those that are lost on the way are redeliveries,
    /// found to be duplicates; only, [`Summary::unconfirmed`] cannot count them.
    #[must_use]
    pub const fn without_confirmation(mut self) -> Self {
        self.fetching.confirmed = false;
        self
    }

    /// How long the inbox keeps its records, where something purges them: compared with how long the stream keeps messages.
    /// Default: what the store says ([`Transactions::retention`]).
    #[must_use]
    pub const fn retention(mut self, time: Duration) -> Self {
        self.fetching.retention = Some(time);
        self
    }

    /// Handles messages of one subject one after another, in the stream's order: a message that fails holds back those
    /// behind it, and no other subject's. See [`Consumer`] on how far that reaches.
    #[must_use]
    pub fn in_order_of_subject(self) -> Self {
        self.in_order_of(|message| message.subject.to_string())
    }

    /// As [`in_order_of_subject`](Self::in_order_of_subject), for messages for which `key` gives the same text.
    #[must_use]
    pub fn in_order_of(mut self, key: impl Fn(&JetStreamMessage) -> String + Send + Sync + 'static) -> Self {
        self.key_of = Some(Arc::new(key));
        self
    }

    /// What to do with a message: an async closure `async |tx, message| ...` that writes its effects through `tx`, the
    /// store's open transaction, and does not end it.
    ///
    /// It is cloned for each message, and may run more than once for one of them; only what it did in a transaction that was
    /// committed counts. Return [`Error::poison`](inbox_core::Error::poison) for a message that no further attempt can mend.
    pub fn handler<H, E>(self, handler: H) -> JetStreamConsumer<S, H>
    where
        H: AsyncFnOnce(&mut S::Tx, &JetStreamMessage) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        JetStreamConsumer { setup: self, handler }
    }
}

impl<S> fmt::Debug for Builder<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("inbox", &self.inbox)
            .field("options", &self.options)
            .field("fetching", &self.fetching)
            .field("in_order", &self.key_of.is_some())
            .finish_non_exhaustive()
    }
}

/// Takes messages from a JetStream pull consumer, has a handler handle each in the store's transaction, and acknowledges
/// after the commit. The [crate's page](crate) has an example; [`Consumer`] says what happens to a message in which case.
#[must_use = "nothing is consumed until it runs"]
pub struct JetStreamConsumer<S, H> {
    setup: Builder<S>,
    handler: H,
}

impl<S: Transactions> JetStreamConsumer<S, ()> {
    /// Begins with a pull consumer, which must acknowledge explicitly, and the inbox of its group.
    pub fn builder(consumer: PullConsumer, inbox: Inbox<S>) -> Builder<S> {
        let retention = inbox.store().retention();
        Builder {
            consumer,
            inbox,
            options: ConsumerOptions::new(),
            fetching: Fetching {
                ids: MessageIds::header(),
                bytes: None,
                linger: Duration::ZERO,
                confirmed: true,
                retention,
            },
            key_of: None,
        }
    }
}

impl<S: Transactions, H> JetStreamConsumer<S, H> {
    /// Consumes until `shutdown` ends, then finishes what runs, hands back the rest at once, and says what it did.
    ///
    /// At the start it asks the server for the consumer's settings, refuses those that would lose messages and warns of
    /// others. A server or a database that is away is waited for. Sends requests for messages
    /// (`$JS.API.CONSUMER.MSG.NEXT`), one about every half second while nothing comes; for each message an acknowledgement, a request that the
    /// server confirms; `+WPI` for a message that is in hand, three times in the server's `ack_wait`, or in the shortest of its
    /// back-off.
    ///
    /// # Cancel-safety
    ///
    /// Dropped, it leaves no transaction open and nothing acknowledged that is not committed; what it had in hand is
    /// delivered again after `ack_wait`. To end it in good order, let `shutdown` end.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Broker`](inbox_core::ErrorKind::Broker) if the consumer or its stream is gone, or the user may not fetch
    /// or acknowledge; [`ErrorKind::InvalidInput`](inbox_core::ErrorKind::InvalidInput) for settings that would lose messages; and
    /// those of [`Consumer::run`].
    pub async fn run<E>(self, shutdown: impl Future<Output = ()>) -> Result<Summary>
    where
        H: AsyncFnOnce(&mut S::Tx, &JetStreamMessage) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        let Builder {
            consumer,
            inbox,
            options,
            fetching,
            key_of,
        } = self.setup;
        let broker = Box::pin(JetStream::connect(consumer, inbox.group().clone(), fetching)).await?;
        let mut consumer = Consumer::new(broker, inbox, self.handler).with(options);
        if let Some(key_of) = key_of {
            consumer = consumer.in_order_of(move |message| key_of(message));
        }
        consumer.run(shutdown).await
    }
}

impl<S, H> fmt::Debug for JetStreamConsumer<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JetStreamConsumer")
            .field("setup", &self.setup)
            .finish_non_exhaustive()
    }
}
