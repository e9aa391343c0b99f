//! The **inbox pattern** (idempotent consumer): handle every message's effect exactly once, though brokers deliver at
//! least once.
//!
//! A consumer records every message it has handled in **its own database and inside the same transaction as the
//! effect**; a second delivery finds the record and is skipped. This crate has the vocabulary, the traits that stores
//! implement and [`Inbox`], which applications hold. It knows no database: those are in crates of their own, such as
//! `inbox-sqlite`; the package `inbox-pattern` puts them together.
//!
//! ```
//! use inbox_core::{Inbox, MemoryInbox, MessageId, Outcome};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> inbox_core::Result<()> {
//! let inbox = Inbox::new(MemoryInbox::with_state(Vec::new()), "billing")?;
//! let id = MessageId::new("order-17")?;
//!
//! // The first delivery is handled; the redelivery is skipped.
//! for expected in ["handled", "skipped"] {
//!     let outcome = inbox.process(id, async |tx| {
//!         tx.apply(|invoices| invoices.push("an invoice"));
//!         Ok::<_, inbox_core::Error>(())
//!     }).await?;
//!     match outcome {
//!         Outcome::Processed(()) => assert_eq!(expected, "handled"),
//!         Outcome::Duplicate(_) => assert_eq!(expected, "skipped"),
//!         Outcome::InFlight(_) => unreachable!("nobody else is here"),
//!     }
//! }
//! assert_eq!(inbox.store().state(Vec::len), 1);
//! # Ok(()) }
//! ```
//!
//! # The guarantee
//!
//! Effects in the store's transaction happen exactly once per (message id, consumer group); effects outside it happen
//! at least once, and leases make a second one rare and visible.
//!
//! It holds as long as the record is there: see [`Purge::older_than`] on how long to keep records.
//!
//! # What is here
//!
//! | for | see |
//! | --- | --- |
//! | applications | [`Inbox`], [`MessageId`], [`ConsumerGroup`], [`Claim`], [`Outcome`], [`RetryPolicy`], [`Counts`] |
//! | consumers of a broker | [`Consumer`], [`ConsumerOptions`], [`Summary`] |
//! | comparing payloads | [`Delivery`], [`Fingerprint`] |
//! | what was given up | [`DeadLetter`], [`DeadLetterInfo`], [`Headers`] |
//! | unit tests | [`MemoryInbox`], [`MemoryBroker`] |
//! | those who write stores | [`InboxStore`], [`Transactions`], [`ClaimIn`], [`Upkeep`], [`DeadLetters`]; [`check_name`] |
//! | those who connect brokers | [`Broker`], [`BrokerMessage`], [`Handled`], [`GivenUp`] |
//! | errors | [`Error`], [`ErrorKind`] |

mod claim;
mod consumer;
mod counts;
mod dead_letter;
mod delivery;
mod error;
mod headers;
mod id;
mod inbox;
mod key;
mod memory;
mod memory_broker;
mod name;
mod process;
mod retry;
mod store;
mod upkeep;

pub use async_trait::async_trait;
pub use claim::{Claim, InFlight, Processed};
pub use consumer::{Broker, BrokerLimits, BrokerMessage, Consumer, ConsumerOptions, GivenUp, Handled, Summary};
pub use counts::Counts;
pub use dead_letter::{DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters};
pub use delivery::{Delivery, Fingerprint};
pub use error::{BoxError, Error, ErrorKind, Result};
pub use headers::Headers;
pub use id::MessageId;
pub use inbox::Inbox;
pub use key::{ConsumerGroup, Key};
pub use memory::{MemoryInbox, MemoryTx};
pub use memory_broker::{MemoryBroker, MemoryMessage, Told};
pub use name::check_name;
pub use process::{Outcome, RetryIf};
pub use retry::RetryPolicy;
pub use store::{ClaimIn, InboxStore, Transactions, Upkeep};
pub use upkeep::{Finding, Health, Purge, Purged, Record, Severity, WaitPolicy};
/// The crate whose `Uuid` stands in [`MessageId`]'s signatures.
#[doc(no_inline)]
pub use uuid;
