//! x

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
