//! Copies of the custom store, each with one line changed, and what the conformance suite says of them.
//!
//! A copy is the real file: the build script changes the line that [`BREAKAGES`] names and nothing else.

use inbox_conformance::{Law, Options, Outcome, Report, run_law, run_with};

include!("table.rs");

macro_rules! copy {
    ($name:ident $store:literal $fixture:literal) => {
        #[allow(warnings, clippy::all, clippy::pedantic, reason = "wrong on purpose")]
        mod $name {
            #[path = $fixture]
            pub(crate) mod conformance;
            #[path = $store]
            pub(crate) mod custom_store;
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/copies.rs"));

macro_rules! on_copy {
    ($given:expr, $place:ident => $run:expr; $($name:ident)*) => {
        match $given {
            $(stringify!($name) => {
                let $place = async || {
                    $name::conformance::Place::fresh().unwrap_or_else(|error| panic!("no place for a database: {error:#}"))
                };
                Some($run)
            })*
            _ => None,
        }
    };
}

macro_rules! on_any_copy {
    ($given:expr, $place:ident => $run:expr) => {
        on_copy! { $given, $place => $run;
            sound commit_stores_nothing record_without_time rollback_commits remembers_in_memory key_without_group
            answers_in_another_order fingerprint_not_read setup_empties purge_on_the_wrong_side time_of_the_claim
        }
    };
}

/// What one law says of the copy of this name; `None` if there is no such copy. `sound` is the store as it is.
pub async fn outcome(copy: &str, law: Law) -> Option<Outcome> {
    on_any_copy! { copy, place => run_law(law, &Options::new(), place).await }
}

/// What all laws say of the copy of this name; `None` if there is no such copy.
pub async fn report(copy: &str) -> Option<Report> {
    on_any_copy! { copy, place => run_with(&Options::new(), place).await }
}
