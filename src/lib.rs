//! The **inbox** (idempotent consumer) for Rust: handle every message's effect exactly once, though brokers deliver at
//! least once.
//!
//! A consumer records every message it has handled in its own database and inside the same transaction as the effect;
//! a redelivery finds the record and is skipped.
//!
#![cfg_attr(feature = "sqlite", doc = "```")]
#![cfg_attr(not(feature = "sqlite"), doc = "```ignore")]
//! use inbox::sqlite::SqliteInbox;
//! use inbox::{Inbox, MessageId};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("billing.db");
//! let inbox = Inbox::new(SqliteInbox::open(path).await?, "billing")?;
//! inbox.setup().await?;
//!
//! let id = MessageId::new("order-17")?;
//! for _delivery in 0..2 {
//!     let outcome = inbox.process(id, async |tx| {
//!         tx.execute_batch("CREATE TABLE IF NOT EXISTS invoices (order_id TEXT)")?;
//!         tx.execute("INSERT INTO invoices VALUES (?1)", ["order-17"])
//!     }).await?;
//!     assert!(outcome.may_acknowledge());
//! }
//! # Ok(()) }
//! ```
//!
//! # The guarantee
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen
//! at least once, and leases make a second one rare and visible.
//!
//! # Features
//!
//! | feature | brings |
//! | --- | --- |
//! | `sqlite` | the module `sqlite`: SQLite, by rusqlite |
//! | `sqlite-bundled` (default) | the same, with SQLite itself compiled in |
//! | `postgres` | the module `postgres`: PostgreSQL, by sqlx (Rust 1.94) |
//! | `redis` | the module `redis`: Redis, by redis-rs (Rust 1.88) |
//! | `redis-tls` | the same, with TLS |
//! | `nats` | the module `nats`: a JetStream consumer over any backend, by async-nats (Rust 1.89) |
//!
//! Everything of [`inbox_core`] stands at the top of this crate; a backend is a module. To run the conformance suite on
//! a store of your own, take the crate `inbox-conformance`.

pub use inbox_core::*;

/// The JetStream consumer: the crate `inbox-nats`.
#[cfg(feature = "nats")]
#[doc(inline)]
pub use inbox_nats as nats;

/// The PostgreSQL backend: the crate `inbox-postgres`.
#[cfg(feature = "postgres")]
#[doc(inline)]
pub use inbox_postgres as postgres;

/// The Redis backend: the crate `inbox-redis`.
#[cfg(feature = "redis")]
#[doc(inline)]
pub use inbox_redis as redis;

/// The SQLite backend: the crate `inbox-sqlite`.
#[cfg(feature = "sqlite")]
#[doc(inline)]
pub use inbox_sqlite as sqlite;

/// The README's programs, compiled and run.
#[cfg(all(doctest, feature = "sqlite"))]
#[doc = include_str!("../README.md")]
pub struct Readme;
