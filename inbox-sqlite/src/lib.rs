//! The inbox pattern (idempotent consumer) on **SQLite**, by [`rusqlite`]: a redelivered message is found and skipped,
//! because its record stands in the same transaction as its effect.
//!
//! ```
//! use inbox_core::{Inbox, MessageId, Outcome};
//! use inbox_sqlite::SqliteInbox;
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
//! | the application | takes |
//! | --- | --- |
//! | is async | [`SqliteInbox`] in an [`inbox_core::Inbox`]; handlers get a [`SqliteTx`] |
//! | has its own [`rusqlite::Transaction`] open | [`SqliteTable`], or the same methods of [`SqliteInbox`] |
//!
//! # The guarantee
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen
//! at least once, and leases make a second one rare and visible.
//!
//! # What is stored
//!
//! One table, `inbox_events` unless named otherwise, and an index on it by age; beside it the table of dead letters,
//! `inbox_events_dead_letters`, and its index. [`SqliteTable::create_sql`] prints them. An inbox of an earlier version has no
//! dead letters until `setup` is run again, and claims go on without.
//! Times are milliseconds since 1970 UTC, by the clock of the machine that runs SQLite, which is the consumer's own.
//!
//! # Which rusqlite
//!
//! Any from 0.32 to 0.43: the one that the application has, re-exported here as [`rusqlite`]. The feature `bundled` has
//! SQLite (3.37 or later is needed) compiled in.

mod error;
mod schema;
mod store;
mod tx;

#[doc(no_inline)]
pub use rusqlite;
pub use schema::SqliteTable;
pub use store::{Builder, SqliteInbox};
pub use tx::SqliteTx;
