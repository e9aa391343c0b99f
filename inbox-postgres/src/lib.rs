//! The inbox pattern (idempotent consumer) on **PostgreSQL**, by [`sqlx`]: a message is recorded in the same transaction
//! as its effect, so that a redelivery is skipped.
//!
//! ```no_run
//! # async fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use inbox_core::{Inbox, MessageId};
//! use inbox_postgres::{PostgresInbox, sqlx};
//!
//! let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
//! let inbox = Inbox::new(PostgresInbox::new(pool), "billing")?;
//! inbox.setup().await?; // safe at every start, by many at once
//!
//! let id = MessageId::new("order-17")?;
//! let outcome = inbox.process(id, async |tx| {
//!     sqlx::query("INSERT INTO invoices (order_number, cents) VALUES ($1, $2)")
//!         .bind("order-17").bind(250_i64)
//!         .execute(&mut **tx).await?;
//!     Ok::<_, sqlx::Error>(())
//! }).await?;
//! if outcome.may_acknowledge() { /* tell the broker */ }
//! # Ok(()) }
//! ```
//!
//! For a transaction that the application opens itself, see [`PostgresInbox`].
//!
//! # The guarantee
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen
//! at least once, and leases make a second one rare and visible.
//!
//! It is as durable as a commit is: with `synchronous_commit = off`, or a failover to a standby that had not got the
//! commit, a message is lost that was acknowledged. [`Upkeep::check`](inbox_core::Upkeep::check) tells what it can see of
//! that.
//!
//! # What is stored
//!
//! One row a message and group in `inbox_events(event_id uuid, processed_at timestamptz, consumer_group text, fingerprint
//! uuid)`, with the key `(event_id, consumer_group)`, and an index for purging. A table that nats-outbox made is used as
//! it stands, beside that program. Dead letters stand beside it, in `inbox_events_dead_letters`.
//! [`PostgresInbox::setup_sql`] prints the SQL. An inbox of an earlier version has no dead letters until `setup` is run
//! again, by a role that may create tables; claims go on without.
//!
//! # At every isolation level
//!
//! At READ COMMITTED a claim waits for the other transaction and then knows. At REPEATABLE READ and SERIALIZABLE it gets
//! a serialization failure where the other commits after this transaction's snapshot: that is
//! [`ErrorKind::Conflict`](inbox_core::ErrorKind::Conflict), retryable, and the next attempt is a duplicate.
//!
//! # Features and runtime
//!
//! sqlx comes with nothing but its feature `postgres`, so that its version can stand in one lock file with any rusqlite.
//! The application adds what it wants, a runtime and TLS at least:
//! `sqlx = { version = "0.9", features = ["postgres", "runtime-tokio"] }`. It must run in a tokio runtime. The driver is
//! re-exported as [`sqlx`].

mod error;
mod schema;
mod store;
mod tx;

#[doc(no_inline)]
pub use sqlx;
pub use store::{Builder, PostgresInbox};
pub use tx::PostgresTx;
