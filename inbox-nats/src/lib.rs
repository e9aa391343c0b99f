//! A consumer for NATS JetStream over any store of the inbox pattern, by async-nats: it takes messages from a pull consumer,
//! claims each in the store, runs a handler in the store's transaction, and **acknowledges after the commit**.
//!
//! ```
//! use inbox_core::{BoxError, ConsumerOptions, Inbox, MemoryInbox};
//! use inbox_nats::async_nats::{self, jetstream};
//! use inbox_nats::JetStreamConsumer;
//! # use std::num::NonZeroUsize;
//!
//! # #[tokio::main] async fn main() -> Result<(), BoxError> {
//! # let server = inbox_test_servers::Nats::start();
//! # let url = server.url();
//! let jetstream = jetstream::new(async_nats::connect(url).await?);
//! let stream = jetstream.get_or_create_stream(jetstream::stream::Config {
//!     name: "ORDERS".into(),
//!     subjects: vec!["orders.>".into()],
//!     ..Default::default()
//! }).await?;
//! let consumer = stream.get_or_create_consumer("billing", jetstream::consumer::pull::Config {
//!     durable_name: Some("billing".into()),
//!     ..Default::default()
//! }).await?;
//! # let mut id = async_nats::HeaderMap::new();
//! # id.insert("Nats-Msg-Id", "order-17");
//! # jetstream.publish_with_headers("orders.created", id, "250".into()).await?.await?;
//!
//! // Any store will do; this one is for tests.
//! let inbox = Inbox::new(MemoryInbox::with_state(Vec::new()), "billing")?;
//! # let seen = inbox.clone();
//! # let shutdown = async move { while seen.store().state(Vec::is_empty) { tokio::task::yield_now().await } };
//! # #[cfg(any())]
//! let shutdown = async { tokio::signal::ctrl_c().await.ok(); };
//! let summary = JetStreamConsumer::builder(consumer, inbox)
//!     .with(ConsumerOptions::new().batch(NonZeroUsize::new(100).unwrap()))
//!     .handler(async |tx, message| {
//!         let cents: u64 = std::str::from_utf8(&message.payload)?.parse()?;
//!         tx.apply(move |invoices: &mut Vec<u64>| invoices.push(cents));
//!         Ok::<_, BoxError>(())
//!     })
//!     .run(shutdown)
//!     .await?;
//! assert_eq!(summary.handled, 1);
//! # Ok(()) }
//! ```
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen at
//! least once, and leases make a second one rare and visible.
//!
//! # What is here
//!
//! | | |
//! | --- | --- |
//! | [`JetStreamConsumer`] | the consumer; what happens to a message in which case stands at [`inbox_core::Consumer`] |
//! | [`MessageIds`] | where a message's id comes from: `Nats-Msg-Id`, its place in the stream, a function |
//! | [`JetStreamMessage`] | what a handler gets |
//! | [`put_back`] | a dead letter, published again |
//!
//! # The consumer on the server
//!
//! A durable pull consumer with explicit acknowledgement. Leave `max_deliver` without a bound: the consumer ends a message
//! that fails by [`ConsumerOptions::attempts`](inbox_core::ConsumerOptions::attempts), with a dead letter, while the server
//! merely stops to deliver it. `ack_wait` is how long a message waits when its process died; messages in hand are kept alive,
//! so handlers may take longer. `max_ack_pending` should be a batch for each transaction at the least, for all
//! processes together.
//!
//! A user needs to publish to `$JS.API.CONSUMER.INFO.STREAM.CONSUMER`, `$JS.API.CONSUMER.MSG.NEXT.STREAM.CONSUMER` and
//! `$JS.ACK.STREAM.CONSUMER.>`, and to subscribe to `_INBOX.>`.
//!
//! TLS and credentials are features of async-nats, which this crate asks for JetStream alone: depend on it too, with what you
//! need (`ring` or `aws-lc-rs`; `nkeys`). A user and password in a URL are not looked at by `async_nats::connect`; give
//! them by its `ConnectOptions`.

mod broker;
mod consumer;
mod error;
mod ids;
mod message;
mod put_back;
mod settings;

/// The driver, whose types stand in this crate's signatures.
#[doc(no_inline)]
pub use async_nats;
pub use consumer::{Builder, JetStreamConsumer};
pub use ids::MessageIds;
pub use message::JetStreamMessage;
pub use put_back::put_back;
