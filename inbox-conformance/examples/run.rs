//! The suite as a program, without the macro and without a test runner: copy it, and put your fixture in.
//!
//! ```sh
//! cargo run -p inbox-conformance --example run                       # every law
//! cargo run -p inbox-conformance --example run -- rollback once      # those two
//! cargo run -p inbox-conformance --example run -- --heavy
//! ```
//!
//! Ends with the exit code 1 if a law is broken.

use std::process::ExitCode;
use std::time::Duration;

use inbox_conformance::{Fixture, Law, Options, async_trait, run_with};
use inbox_core::{InboxStore, MemoryInbox, Result};

/// A fresh place in your database; here, the memory that the store's handles share.
struct Place(MemoryInbox<Vec<String>>);

#[async_trait]
impl Fixture for Place {
    type Store = MemoryInbox<Vec<String>>;

    async fn connect(&self) -> Result<Self::Store> {
        Ok(self.0.clone())
    }

    async fn write_effect(
        &self,
        _store: &Self::Store,
        tx: &mut <Self::Store as InboxStore>::Tx,
        name: &str,
    ) -> Result<()> {
        let name = name.to_owned();
        tx.apply(|effects| effects.push(name));
        Ok(())
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        let count = |effects: &Vec<String>| effects.iter().filter(|effect| *effect == name).count();
        Ok(self.0.state(count) as u64)
    }

    async fn advance_clock(&self, store: &Self::Store, by: Duration) -> Result<()> {
        store.advance_clock(by);
        Ok(())
    }
}

fn main() -> ExitCode {
    let (mut options, mut laws) = (Options::from_environment(), Vec::new());
    for argument in std::env::args().skip(1) {
        match Law::named(&argument) {
            Some(law) => laws.push(law),
            None if argument == "--heavy" => options = options.heavy(),
            None => {
                let names: Vec<&str> = Law::ALL.iter().map(|law| law.name()).collect();
                eprintln!(
                    "{argument:?} is neither --heavy nor a law; the laws are {}",
                    names.join(", ")
                );
                return ExitCode::from(2);
            }
        }
    }
    // Two threads, so that a store that blocks one is still reported.
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("no runtime: {error}");
            return ExitCode::from(2);
        }
    };
    let options = options.only(laws);
    let report = runtime.block_on(run_with(&options, async || Place(MemoryInbox::with_state(Vec::new()))));
    println!("{report}");
    if report.is_conforming() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
