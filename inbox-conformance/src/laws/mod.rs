//! The laws, one file each. A law is a function that does something to the store on its stage and returns the first
//! thing that is not as it should be.

use inbox_core::Transactions;

use crate::stage::{Stage, Verdict};
use crate::{Fixture, Law};

mod bad_input;
mod batches;
mod clock;
mod dead_letters;
mod fingerprint;
mod first;
mod groups;
mod handover;
mod isolation;
mod once;
mod purge;
mod rollback;
mod same_transaction;
mod setup;
mod together;
mod usable;

/// The acts of a law: each is played on a fixture of its own.
pub(crate) fn acts(law: Law) -> std::ops::Range<usize> {
    match law {
        // An empty place, and one of an older version.
        Law::Setup => 0..2,
        _ => 0..1,
    }
}

/// Why a law does not apply to a store that says by itself that it does not offer what the law is about.
pub(crate) async fn not_offered<F: Fixture>(law: Law, fixture: &F) -> Option<String> {
    if law != Law::DeadLetters {
        return None;
    }
    // A store that cannot be opened is the law's own to report.
    let store = fixture.connect().await.ok()?;
    store
        .dead_letters()
        .is_none()
        .then(|| "the store keeps no dead letters (Transactions::dead_letters answers None)".into())
}

pub(crate) async fn play<F: Fixture>(law: Law, act: usize, stage: &Stage<F>) -> Verdict {
    match law {
        Law::First => first::law(stage).await,
        Law::Rollback => rollback::law(stage).await,
        Law::Together => together::law(stage).await,
        Law::Once => once::law(stage).await,
        Law::Handover => handover::law(stage).await,
        Law::Usable => usable::law(stage).await,
        Law::SameTransaction => same_transaction::law(stage).await,
        Law::Groups => groups::law(stage).await,
        Law::Batches => batches::law(stage).await,
        Law::Purge => purge::law(stage).await,
        Law::Clock => clock::law(stage).await,
        Law::Isolation => isolation::law(stage).await,
        Law::Setup if act == 0 => setup::law(stage).await,
        Law::Setup => setup::law_on_older(stage).await,
        Law::BadInput => bad_input::law(stage).await,
        Law::Fingerprint => fingerprint::law(stage).await,
        Law::DeadLetters => dead_letters::law(stage).await,
    }
}
