//! The **conformance suite of the inbox pattern**: run it on a store for your own database.
//!
//! Whoever writes an [`InboxStore`](inbox_core::InboxStore) runs this. The suite takes a [`Fixture`], which is one fresh
//! place in the database, does to the store what consumers, crashes and clocks do, and says which [`Law`] the store
//! breaks, how, and what that points to.
//!
//! ```
//! use inbox_conformance::{Fixture, async_trait, run};
//! use inbox_core::{InboxStore, MemoryInbox, Result};
//!
//! /// A fresh place: for this store, the memory that its handles share. For a database, a schema or a file.
//! struct Place(MemoryInbox<Vec<String>>);
//!
//! #[async_trait]
//! impl Fixture for Place {
//!     type Store = MemoryInbox<Vec<String>>;
//!
//!     async fn connect(&self) -> Result<Self::Store> {
//!         Ok(self.0.clone())
//!     }
//!
//!     async fn write_effect(
//!         &self,
//!         _store: &Self::Store,
//!         tx: &mut <Self::Store as InboxStore>::Tx,
//!         name: &str,
//!     ) -> Result<()> {
//!         let name = name.to_owned();
//!         tx.apply(|effects| effects.push(name));
//!         Ok(())
//!     }
//!
//!     async fn count_effects(&self, name: &str) -> Result<u64> {
//!         Ok(self.0.state(|effects| effects.iter().filter(|effect| *effect == name).count() as u64))
//!     }
//! #
//! #    async fn advance_clock(&self, store: &Self::Store, by: std::time::Duration) -> Result<()> {
//! #        store.advance_clock(by);
//! #        Ok(())
//! #    }
//! }
//!
//! # #[tokio::main] async fn main() {
//! let report = run(async || Place(MemoryInbox::with_state(Vec::new()))).await;
//! println!("{report}");
//! assert!(report.is_conforming());
//! # }
//! ```
//!
//! # As tests
//!
//! [`laws!`] makes a test of each law with one line, so that a failure has the law's name and the others still run.
//!
//! # Laws
//!
//! See [`Law`] for what is promised. Stores may wait for each other, answer that a message is in flight, have one writer
//! or let all go on and refuse a commit: the laws hold for each, and ask for no more than the contract in
//! [`inbox_core`]. A law that a store does not promise is declared in [`Fixture::cannot`], with a reason that the report
//! shows.
//!
//! Set the environment variable `INBOX_CONFORMANCE_HEAVY=1` for many more consumers and rounds.
//!
//! # What it proves
//!
//! No suite finds every race, but this one is itself tested: its tests have a small store that can be wrong in over
//! eighty ways, each one that people get wrong, and see the law that is meant for it fail, with the right suspicion.

mod consumer;
mod failure;
mod fixture;
mod law;
mod laws;
mod lent;
mod options;
mod report;
mod run;
mod stage;

pub use failure::Failure;
pub use fixture::Fixture;
/// What [`Fixture`]s are implemented with.
pub use inbox_core::async_trait;
pub use law::Law;
pub use options::Options;
pub use report::{LawReport, Outcome, Report};
#[doc(hidden)]
pub use run::uphold;
pub use run::{run, run_law, run_with};

/// Makes a test of each [`Law`], named as the law, for the fixture that the expression makes.
///
/// The expression is evaluated anew in each test and may contain `.await`. Put it into a module of its own for each
/// configuration of the store:
///
/// ```
/// # use inbox_conformance::{Fixture, async_trait};
/// # use inbox_core::{InboxStore, MemoryInbox, Result, WaitPolicy};
/// # struct Place(MemoryInbox<Vec<String>>);
/// # impl Place {
/// #     async fn fresh(wait: WaitPolicy) -> Self { Self(MemoryInbox::with_state(Vec::new()).with_wait(wait)) }
/// # }
/// # #[async_trait]
/// # impl Fixture for Place {
/// #     type Store = MemoryInbox<Vec<String>>;
/// #     async fn connect(&self) -> Result<Self::Store> { Ok(self.0.clone()) }
/// #     async fn write_effect(
/// #         &self, _: &Self::Store, tx: &mut <Self::Store as InboxStore>::Tx, name: &str,
/// #     ) -> Result<()> {
/// #         let name = name.to_owned();
/// #         tx.apply(|effects| effects.push(name));
/// #         Ok(())
/// #     }
/// #     async fn count_effects(&self, name: &str) -> Result<u64> {
/// #         Ok(self.0.state(|effects| effects.iter().filter(|effect| *effect == name).count() as u64))
/// #     }
/// # }
/// mod waiting {
///     # use inbox_core::WaitPolicy;
///     inbox_conformance::laws!(super::Place::fresh(WaitPolicy::Wait).await);
/// }
/// mod not_waiting {
///     # use inbox_core::WaitPolicy;
///     inbox_conformance::laws!(super::Place::fresh(WaitPolicy::DontWait).await);
/// }
/// # fn main() {}
/// ```
///
/// The tests run on tokio's runtime with two threads, so `tokio` with its features `macros` and `rt-multi-thread` must
/// be a dependency of the tests. On another runtime, call [`run`](crate::run()).
#[macro_export]
macro_rules! laws {
    ($fixture:expr $(,)?) => {
        $crate::__each_law! { __law_tests! { ($fixture) } }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __law_tests {
    (($fixture:expr) $($law:ident $name:ident $promise:literal;)*) => {
        $(
            #[doc = $promise]
            #[::tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                $crate::uphold($crate::Law::$law, async || $fixture).await;
            }
        )*
    };
}
