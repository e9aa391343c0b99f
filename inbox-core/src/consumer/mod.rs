//! [`Consumer`]: what to do with what a broker delivers.

mod broker;
mod handle;
mod keep_alive;
mod options;
mod run;
mod summary;

use std::fmt;
use std::future::Future;
use std::sync::Arc;

pub use broker::{Broker, BrokerLimits, BrokerMessage, GivenUp, Handled};
pub use options::ConsumerOptions;
pub use summary::Summary;

use crate::{BoxError, Inbox, Result, Transactions};

/// Takes messages from a [`Broker`], has a handler handle each in a transaction of the store, and answers the broker after
/// the commit: the half of a consumer that is the same for every broker.
///
/// Applications use a broker's crate, such as `inbox-nats`, which puts its half to this one.
///
/// # What happens to a message
///
/// 1. It is fetched: no more at a time than can be handled at once. From then on until it is answered the broker is told
///    again and again that it is being handled, also while it waits.
/// 2. In a transaction of the store it is claimed, the handler runs, the transaction is committed. With
///    [`ConsumerOptions::batch`], for several messages at once.
/// 3. After the commit the broker is told, and its confirmation awaited. If the process dies in between, the message comes
///    again, is found to be a duplicate and is acknowledged.
///
/// | if | then |
/// | --- | --- |
/// | it was processed before | it is acknowledged at once |
/// | another consumer is at it | it is tried again soon; that is no failure |
/// | the handler fails, panics, or takes longer than its bound | it comes again after a pause that grows; its neighbours do not wait |
/// | the store is away, or busy | it waits here, kept alive, and no delivery of it is used up |
/// | the handler says [poison](crate::Error::poison), its id cannot be read, or its attempts are used up | it goes to the store's dead letters, in a transaction, and only then the broker is told not to deliver it again |
/// | the last attempt kills the process | it stands in the dead letters, where it was put before that attempt |
/// | the store cannot be used as it is (no table, no right) | the consumer ends, and says so |
///
/// A store without dead letters ([`Transactions::dead_letters`]) never gives a message up: it comes again, with the longest
/// pause.
///
/// # In order
///
/// With [`in_order_of`](Self::in_order_of), messages with the same key are handled one after another, in the order that the
/// broker has them, and one that fails holds back those behind it and no others. That holds within one consumer: with
/// several of them at one stream, or after a crash, the broker may deliver a message behind a later one of its key.
pub struct Consumer<B: Broker, S, H> {
    broker: B,
    inbox: Inbox<S>,
    handler: H,
    options: ConsumerOptions,
    lane_of: Option<LaneOf<B::Message>>,
}

type LaneOf<M> = Arc<dyn Fn(&M) -> String + Send + Sync>;

impl<B: Broker, S: Transactions, H> Consumer<B, S, H> {
    /// A consumer of what `broker` delivers.
    ///
    /// The handler is an async closure, `async |tx, message| ...`, as [`Inbox::process`] takes it: cloned for each message,
    /// it writes its effects through `tx`, and does not end that transaction.
    pub fn new<E>(broker: B, inbox: Inbox<S>, handler: H) -> Self
    where
        H: AsyncFnOnce(&mut S::Tx, &B::Message) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        Self {
            broker,
            inbox,
            handler,
            options: ConsumerOptions::new(),
            lane_of: None,
        }
    }

    /// The same consumer with other options.
    #[must_use]
    pub const fn with(mut self, options: ConsumerOptions) -> Self {
        self.options = options;
        self
    }

    /// Handles messages for which `key` gives the same text one after another, in the order of
    /// [`BrokerMessage::sequence`].
    #[must_use]
    pub fn in_order_of(mut self, key: impl Fn(&B::Message) -> String + Send + Sync + 'static) -> Self {
        self.lane_of = Some(Arc::new(key));
        self
    }

    /// Consumes until `shutdown` ends, then finishes what runs, hands back the rest, and says what it did.
    ///
    /// Needs a tokio runtime with its timer. Everything but keeping messages alive runs in the caller's task.
    ///
    /// # Cancel-safety
    ///
    /// Dropped, it leaves no transaction open and nothing acknowledged that is not committed; what it had in hand is
    /// delivered again in the broker's own time. To end it in good order, let `shutdown` end.
    ///
    /// # Errors
    ///
    /// What no waiting would mend: [`ErrorKind::Schema`](crate::ErrorKind::Schema) and
    /// [`ErrorKind::Denied`](crate::ErrorKind::Denied) of the store, those of [`Broker::fetch`] that are not retryable,
    /// and [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the options cannot be right for this store. What ran is
    /// finished and the rest handed back before.
    pub async fn run<E>(self, shutdown: impl Future<Output = ()>) -> Result<Summary>
    where
        H: AsyncFnOnce(&mut S::Tx, &B::Message) -> Result<(), E> + Clone,
        E: Into<BoxError> + 'static,
    {
        // Boxed, or it would be tens of kilobytes of the caller's own future.
        Box::pin(run::run(self, shutdown)).await
    }
}

impl<B: Broker, S, H> fmt::Debug for Consumer<B, S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("inbox", &self.inbox)
            .field("options", &self.options)
            .field("in_order", &self.lane_of.is_some())
            .finish_non_exhaustive()
    }
}
