//! The suite on the store of `inbox-core`, with each of its wait policies.

use std::time::Duration;

use inbox_conformance::{Fixture, Law, Options, Outcome, async_trait, run_law};
use inbox_core::{InboxStore, MemoryInbox, Result, WaitPolicy};

struct Place {
    store: MemoryInbox<Vec<String>>,
}

fn place(wait: WaitPolicy) -> Place {
    Place {
        store: MemoryInbox::with_state(Vec::new()).with_wait(wait),
    }
}

#[async_trait]
impl Fixture for Place {
    type Store = MemoryInbox<Vec<String>>;

    async fn connect(&self) -> Result<Self::Store> {
        Ok(self.store.clone())
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
        Ok(self.store.state(count) as u64)
    }

    async fn advance_clock(&self, store: &Self::Store, by: Duration) -> Result<()> {
        store.advance_clock(by);
        Ok(())
    }
}

mod waiting {
    use inbox_core::WaitPolicy;

    inbox_conformance::laws!(super::place(WaitPolicy::Wait));
}

mod not_waiting {
    use inbox_core::WaitPolicy;

    inbox_conformance::laws!(super::place(WaitPolicy::DontWait));
}

mod waiting_a_little {
    use std::time::Duration;

    use inbox_core::WaitPolicy;

    inbox_conformance::laws!(super::place(WaitPolicy::AtMost(Duration::from_millis(10))));
}

/// A runtime with one thread is enough for every law.
#[tokio::test]
async fn one_thread_will_do() {
    for &law in Law::ALL {
        let outcome = run_law(law, &Options::new(), async || place(WaitPolicy::Wait)).await;
        assert_eq!(outcome, Outcome::Passed, "{law}");
    }
}
