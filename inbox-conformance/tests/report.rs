//! What the suite says: the text of a failure, the report, and that neither a panic nor a hang keeps it from saying it.

mod toy;

use std::time::Duration;

use inbox_conformance::{Failure, Fixture, Law, Options, Outcome, async_trait, run, run_law, run_with};
use inbox_core::{InboxStore, Result};
use toy::{Fault, Temper, Toy, ToyStore};

async fn failure_of(law: Law, options: Options, fault: Fault) -> Failure {
    match run_law(law, &options, async || Toy::new(Temper::Waits, fault)).await {
        Outcome::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_failure_tells_a_stranger_what_happened() {
    let failure = failure_of(Law::SameTransaction, Options::new(), Fault::SecondClaimIsNew).await;
    let expected = "\
the store breaks the law `same_transaction`: A second claim of a message in one transaction is Duplicate.
  did       1. message 9e3779b9-7f4a-7c15-f39c-c0605cedc835, claimed twice in one transaction
            2. opened a transaction
            3. claimed message 9e3779b9-7f4a-7c15-f39c-c0605cedc835 by try_claim
            4. claimed message 9e3779b9-7f4a-7c15-f39c-c0605cedc835 by try_claim
  expected Claim::Duplicate
  saw      Claim::New
  suspect  the store looks at committed records only: two deliveries of a message in one batch of work are then both done
  usual mistakes: looking at committed records only; taking the transaction's own lock for another consumer's";
    assert_eq!(failure.to_string(), expected);
}

#[tokio::test]
async fn a_failure_shows_an_error_with_its_kind() {
    let failure = failure_of(Law::Setup, Options::new(), Fault::MissingTableWithoutRemedy).await;
    assert_eq!(
        failure.saw,
        "the error \"the table inbox_events is missing\" (kind: schema, not retryable)"
    );
}

/// A fixture that does what it must, and no more than to say why it cannot move its clock.
struct Bare {
    toy: Toy,
    cannot_move_clock: Option<&'static str>,
}

fn bare(fault: Fault, cannot_move_clock: Option<&'static str>) -> Bare {
    let toy = Toy::new(Temper::Waits, fault);
    Bare { toy, cannot_move_clock }
}

#[async_trait]
impl Fixture for Bare {
    type Store = ToyStore;

    async fn connect(&self) -> Result<ToyStore> {
        self.toy.connect().await
    }

    async fn write_effect(&self, store: &ToyStore, tx: &mut <ToyStore as InboxStore>::Tx, name: &str) -> Result<()> {
        self.toy.write_effect(store, tx, name).await
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        self.toy.count_effects(name).await
    }

    fn cannot(&self, law: Law) -> Option<String> {
        self.cannot_move_clock.filter(|_| law == Law::Clock).map(String::from)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_has_a_line_for_each_law_and_the_failures_in_full() {
    let reason = "its clock is nobody's to move";
    let report = run(async || bare(Fault::BatchTakesRepeatedTwice, Some(reason))).await;
    assert!(!report.is_conforming());
    let laws: Vec<Law> = report.laws().iter().map(|report| report.law).collect();
    assert_eq!(laws, Law::ALL);
    assert_eq!(report.outcome(Law::Once), Some(&Outcome::Passed));
    assert_eq!(report.outcome(Law::Clock), Some(&Outcome::DoesNotApply(reason.into())));
    assert!(matches!(report.outcome(Law::Batches), Some(Outcome::Failed(_))));

    let text = report.to_string();
    let row = |law: Law| {
        let start = format!("│ {} ", law.name());
        text.lines().find(|line| line.starts_with(&start)).unwrap()
    };
    assert!(row(Law::Clock).contains("does not apply: its clock"), "{text}");
    assert!(row(Law::Batches).contains("FAILED"), "{text}");
    assert!(row(Law::Purge).contains("passed"), "{text}");
    assert!(text.contains("the store breaks the law `batches`"), "{text}");
    let all = Law::ALL.len();
    assert!(
        text.contains(&format!("\n2 of {all} laws broken; begin with `batches`\n")),
        "{text}"
    );
    let widest = text
        .lines()
        .filter(|line| line.starts_with('│'))
        .map(|line| line.chars().count());
    assert_eq!(widest.max(), Some(118), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_panics_gets_its_report() {
    let report = run(async || Toy::new(Temper::Waits, Fault::ClaimPanics)).await;
    let Some(Outcome::Failed(failure)) = report.outcome(Law::First) else {
        panic!("{report}");
    };
    assert_eq!(failure.saw, "a panic: index out of bounds in the driver");
    assert!(
        failure
            .did
            .last()
            .is_some_and(|step| step.starts_with("claimed message"))
    );
    assert_eq!(report.laws().len(), Law::ALL.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_hangs_gets_its_report_with_the_step() {
    let options = Options::new().time_limit(Duration::from_millis(50));
    let report = run_with(&options, async || Toy::new(Temper::Waits, Fault::SetupHangs)).await;
    assert_eq!(report.failures().count(), Law::ALL.len());
    let Some(Outcome::Failed(failure)) = report.outcome(Law::First) else {
        panic!("{report}");
    };
    assert_eq!(failure.did.last().unwrap(), "set it up");
    assert_eq!(failure.saw, "it had not after 50ms, the time limit of the law");
}

/// The suite's own task is on another thread, so its clock goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_blocks_its_thread_is_reported_too() {
    let options = Options::new().time_limit(Duration::from_millis(50));
    let failure = failure_of(Law::First, options, Fault::SetupBlocks).await;
    assert_eq!(failure.did.last().unwrap(), "set it up");
}

#[tokio::test]
async fn a_fixture_that_panics_or_hangs_is_reported_as_such() {
    let options = Options::new().time_limit(Duration::from_millis(50));
    let outcome = run_law(Law::First, &options, async || -> Toy { panic!("no database") }).await;
    let Outcome::Failed(failure) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(failure.expected, "a fixture is made");
    assert_eq!(failure.saw, "a panic: no database");

    let outcome = run_law(Law::First, &options, async || std::future::pending::<Toy>().await).await;
    let Outcome::Failed(failure) = outcome else {
        panic!("{outcome:?}");
    };
    assert_eq!(failure.saw, "it is not ready after 50ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_methods_do_but_for_the_clock() {
    let report = run(async || bare(Fault::None, None)).await;
    let failures: Vec<&Failure> = report.failures().collect();
    assert_eq!(failures.len(), 1, "{report}");
    assert_eq!(failures[0].law, Law::Clock);
    assert!(failures[0].saw.contains("override Fixture::advance_clock"), "{report}");
}

/// A long story shows its beginning, what it is about, and its end, where it went wrong.
#[tokio::test]
async fn a_failure_leaves_out_the_middle_of_a_long_story() {
    let failure = failure_of(Law::Groups, Options::new(), Fault::GroupsCut).await;
    assert!(failure.did[0].starts_with("message "), "{failure}");
    assert!(failure.did[1].ends_with("steps left out)"), "{failure}");
    assert!(
        failure.did.last().is_some_and(|step| step.contains("nnnnnb")),
        "{failure}"
    );
    assert!(failure.did.len() < 25, "{failure}");
}

#[test]
fn the_readme_lists_every_law() {
    let readme = include_str!("../README.md");
    for &law in Law::ALL {
        let row = format!("| `{law}` | {} |", law.promise());
        assert!(readme.contains(&row), "{row}");
    }
}

#[test]
fn a_law_is_found_by_its_name() {
    for &law in Law::ALL {
        assert_eq!(Law::named(law.name()), Some(law));
        assert!(law.promise().ends_with('.'), "{law}");
        assert!(!law.usual_mistakes().is_empty(), "{law}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_summary_says_with_which_law_to_begin() {
    let options = Options::new().only([Law::Handover, Law::Rollback, Law::First]);
    let summary = async |fault| {
        run_with(&options, async || Toy::new(Temper::Waits, fault))
            .await
            .summary()
    };
    assert_eq!(summary(Fault::None).await, "3 laws kept");
    assert_eq!(
        summary(Fault::RollbackKeepsClaim).await,
        "2 of 3 laws broken; begin with `rollback`"
    );
    let options = Options::new().only([Law::First, Law::Clock]);
    let report = run_with(&options, async || bare(Fault::None, Some("nobody moves it"))).await;
    assert_eq!(report.summary(), "1 law kept; 1 does not apply");
    let ran: Vec<Law> = report.laws().iter().map(|report| report.law).collect();
    assert_eq!(ran, [Law::First, Law::Clock]);
}

/// What a failure shows is for people to read: no dump of a value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_are_sentences() {
    for (law, fault, saw) in [
        (
            Law::First,
            Fault::DuplicateMovesTime,
            " s since 1970, then processed at ",
        ),
        (Law::Fingerprint, Fault::FindDropsFingerprint, "without a fingerprint"),
        (Law::Together, Fault::ClaimCommitsAlone, "a record of message "),
    ] {
        let failure = failure_of(law, Options::new(), fault).await;
        assert!(failure.saw.contains(saw), "{failure}");
        for dump in ["Some(", "tv_sec", "Record {", "Processed {"] {
            assert!(!failure.to_string().contains(dump), "{failure}");
        }
    }
}
