//! The inbox pattern (idempotent consumer) on **Redis**, by the [`redis`] crate: a redelivered message is found and
//! skipped, because its record was written in the same `MULTI ... EXEC` as its effect.
//!
//! ```no_run
//! use inbox_core::{BoxError, Inbox, MessageId};
//! use inbox_redis::RedisInbox;
//!
//! # #[tokio::main] async fn main() -> Result<(), BoxError> {
//! let inbox = Inbox::new(RedisInbox::connect("redis://127.0.0.1/").await?, "billing")?;
//! let id = MessageId::new("order-17")?;
//! for _delivery in 0..2 {
//!     let outcome = inbox.process(id, async |tx| {
//!         tx.pipe().rpush("invoices", "order-17");
//!         Ok::<_, BoxError>(())
//!     }).await?;
//!     assert!(outcome.may_acknowledge());
//! }
//! # Ok(()) }
//! ```
//!
//! # How a claim works
//!
//! `WATCH`, `MGET` and, once a transaction, `TIME` go out together: one round trip for any number of messages. The commit
//! sends `MULTI`, a `SET NX PX` for each record, the caller's queued commands, and `EXEC`: one more. Where another consumer
//! was faster, its record has touched the watched key, and `EXEC` does nothing: that is
//! [`Conflict`](inbox_core::ErrorKind::Conflict), and on the next try the message is a duplicate. So there is no waiting
//! here, and two consumers may both work on a message; one of them commits.
//!
//! # The guarantee
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen
//! at least once, and leases make a second one rare and visible.
//!
//! [`RedisInbox`] says what Redis makes of it, and [`RedisTx`] what it does not do.
//!
//! # What is stored
//!
//! A string a record: key `inbox:{TAG}:GROUP:ID`, value `2026-12-01T04:00:00.123Z claim=TOKEN` with ` payload=FINGERPRINT`
//! where there is one, and a time to live, the retention.
//!
//! A hash a dead letter, without a time to live: key `inbox:{TAG}:GROUP:ID:letter`, fields `state`, `subject`, `origin`,
//! `error`, `attempts`, `published_at`, `died_at`, `headers` (JSON) and `payload`. And a sorted set a group that has any, key
//! `inbox:{TAG}:GROUP:letters`, every score 0, members `2026-12-01T04:00:00.123456Z ID`, so that they stand in the order of
//! time and id. Both change in one script or `EXEC`. A transaction that keeps or removes a letter before it claims anything
//! leaves a string behind for an hour, key `inbox:{TAG}:GROUP:ID:letter:TOKEN`, by which a lost commit is found out about.

mod dead_letters;
mod error;
mod keys;
mod store;
mod tx;

#[doc(no_inline)]
pub use redis;
pub use store::{Builder, Flushed, RedisInbox, WaitFor};
pub use tx::RedisTx;
