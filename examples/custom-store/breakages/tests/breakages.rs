//! Each copy with one line broken fails the law that one would expect, and for that reason; the copy as it is does not.

use custom_store_breakages::{BREAKAGES, outcome};
use inbox_conformance::{Law, Outcome};

#[test]
fn there_are_ten() {
    assert_eq!(BREAKAGES.len(), 10);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_breakage_is_found_by_its_law() {
    let mut amiss = Vec::new();
    for breakage in BREAKAGES {
        let law = Law::named(breakage.law).expect("the law of a breakage");
        let sound = outcome("sound", law).await;
        assert_eq!(sound, Some(Outcome::Passed), "the store as it is, by `{law}`");
        match outcome(breakage.name, law).await {
            Some(Outcome::Failed(failure)) if failure.law == law && failure.suspect.contains(breakage.words) => {}
            other => amiss.push(format!("{}: {other:#?}", breakage.name)),
        }
    }
    assert!(
        amiss.is_empty(),
        "not found, or for another reason:\n{}",
        amiss.join("\n")
    );
}
