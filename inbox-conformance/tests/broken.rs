//! The suite itself under test: a store that is wrong in exactly one way, for each of many ways, and the law that finds
//! it.

mod toy;

use std::time::Duration;

use inbox_conformance::{Law, Options, Outcome, run_law, run_with};
use toy::{Fault, Temper, Toy};

/// Short, for the stores that hang.
fn options() -> Options {
    Options::new().time_limit(Duration::from_secs(6))
}

/// The store with this fault breaks this law, and the failure says so in these words.
async fn breaks(fault: Fault, law: Law, words: &str) {
    let outcome = run_law(law, &options(), async || Toy::new(fault.temper(), fault)).await;
    let Outcome::Failed(failure) = outcome else {
        panic!("{fault:?} goes unnoticed by the law `{law}`: {outcome:?}");
    };
    assert_eq!(failure.law, law);
    let text = failure.to_string();
    let told = [&failure.expected, &failure.saw, &failure.suspect]
        .into_iter()
        .any(|told| told.contains(words));
    assert!(told, "{fault:?} is found, but not for what it is ({words:?}):\n{text}");
}

macro_rules! broken {
    ($($name:ident: $fault:ident breaks $law:ident, $words:literal;)*) => {
        /// Which law is meant for which fault.
        const PAIRS: &[(Fault, Law)] = &[$((Fault::$fault, Law::$law)),*];

        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                breaks(Fault::$fault, Law::$law, $words).await;
            }
        )*
    };
}

broken! {
    duplicate_moves_time: DuplicateMovesTime breaks First, "an upsert";
    commit_stores_nothing: CommitStoresNothing breaks First, "says Ok and stores nothing";
    record_without_time: RecordWithoutTime breaks First, "without a time";
    find_is_blind: FindIsBlind breaks First, "None";

    rollback_keeps_claim: RollbackKeepsClaim breaks Rollback, "outlives its transaction";
    drop_commits: DropCommits breaks Rollback, "outlives its transaction";
    drop_keeps_lock: DropKeepsLock breaks Rollback, "not freed";
    cancelled_claim_keeps_lock: CancelledClaimKeepsLock breaks Rollback, "not freed";
    cancelled_begin_swallows: CancelledBeginSwallows breaks Rollback, "cancelled begin";

    claim_commits_alone: ClaimCommitsAlone breaks Together, "commits by itself";
    claim_beside_transaction: ClaimBesideTransaction breaks Together, "beside the caller's transaction";
    commit_in_two_steps: CommitInTwoSteps breaks Together, "without the record";

    look_then_insert: LookThenInsert breaks Once, "look-up before an insert";
    lost_race_is_fatal: LostRaceIsFatal breaks Once, "reported as a fault";
    lost_commit_says_ok: LostCommitSaysOk breaks Once, "lost its race and says Ok";

    duplicate_while_in_flight: DuplicateWhileInFlight breaks Handover, "uncommitted claim";
    end_taken_for_commit: EndTakenForCommit breaks Handover, "takes the end of the first transaction for its commit";
    waiter_not_woken: WaiterNotWoken breaks Handover, "was not woken";

    duplicate_breaks_transaction: DuplicateBreaksTransaction breaks Usable, "caught";
    in_flight_breaks_transaction: InFlightBreaksTransaction breaks Usable, "timed out";
    duplicate_ends_transaction: DuplicateEndsTransaction breaks Usable, "ended it";

    second_claim_is_new: SecondClaimIsNew breaks SameTransaction, "committed records only";
    second_claim_is_in_flight: SecondClaimIsInFlight breaks SameTransaction, "another consumer's";

    key_without_group: KeyWithoutGroup breaks Groups, "without the group";
    groups_folded: GroupsFolded breaks Groups, "without case";
    groups_trimmed: GroupsTrimmed breaks Groups, "trailing space";
    groups_cut: GroupsCut breaks Groups, "cuts";
    ids_cut: IdsCut breaks Groups, "cuts";

    batch_in_database_order: BatchInDatabaseOrder breaks Batches, "order of the database's rows";
    batch_takes_repeated_twice: BatchTakesRepeatedTwice breaks Batches, "repeated id that is New not once";
    batch_deadlocks: BatchDeadlocks breaks Batches, "not freed";
    batch_deadlock_is_found: BatchDeadlockIsFound breaks Batches, "sort the ids";
    batch_is_small: BatchIsSmall breaks Batches, "too many parameters";
    batch_answers_new_only: BatchAnswersNewOnly breaks Batches, "rows that were written only";

    purge_takes_fresh: PurgeTakesFresh breaks Purge, "wrong side";
    purge_takes_in_flight: PurgeTakesInFlight breaks Purge, "whose transaction is open";
    purge_ignores_step: PurgeIgnoresStep breaks Purge, "not bounded";
    purge_ignores_group: PurgeIgnoresGroup breaks Purge, "ignores its group";
    purge_takes_pattern: PurgeTakesPattern breaks Purge, "pattern";
    purge_stops_early: PurgeStopsEarly breaks Purge, "stops at its first step";
    purge_never_ends: PurgeNeverEnds breaks Purge, "always true";
    time_of_transaction_start: TimeOfTransactionStart breaks Purge, "start of the transaction";
    forget_remembers: ForgetRemembers breaks Purge, "true";

    time_by_consumers_clock: TimeByConsumersClock breaks Clock, "consumer's clock gives the record its time";
    purge_by_consumers_clock: PurgeByConsumersClock breaks Clock, "cutoff of the purge";

    snapshot_takes_twice: SnapshotTakesTwice breaks Isolation, "snapshot that is older";
    serialization_failure_is_fatal: SerializationFailureIsFatal breaks Isolation, "not mapped to a retryable kind";

    setup_wipes: SetupWipes breaks Setup, "drops or empties";
    setup_fails_twice: SetupFailsTwice breaks Setup, "exists already";
    setup_races: SetupRaces breaks Setup, "exists already";
    missing_table_is_duplicate: MissingTableIsDuplicate breaks Setup, "passes for a record";
    missing_table_is_any_error: MissingTableIsAnyError breaks Setup, "not told from other errors";
    missing_table_without_remedy: MissingTableWithoutRemedy breaks Setup, "not what to do";
    upgrade_loses_records: UpgradeLosesRecords breaks Setup, "upgrade that loses the records";
    check_is_blind: CheckIsBlind breaks Setup, "does not look at what claims need";

    name_is_run: NameIsRun breaks BadInput, "run as a statement";
    name_is_not_shown: NameIsNotShown breaks BadInput, "not with what";

    batch_drops_fingerprint: BatchDropsFingerprint breaks Fingerprint, "one of the two paths";
    duplicate_overwrites_fingerprint: DuplicateOverwritesFingerprint breaks Fingerprint, "overwrites";
    find_drops_fingerprint: FindDropsFingerprint breaks Fingerprint, "find does not read";

    letter_beside_transaction: LetterBesideTransaction breaks DeadLetters, "beside the transaction";
    letter_is_not_stored: LetterIsNotStored breaks DeadLetters, "the commit does not store";
    letter_is_removed_at_once: LetterIsRemovedAtOnce breaks DeadLetters, "does not wait for the commit";
    first_letter_stays: FirstLetterStays breaks DeadLetters, "insert-if-missing";
    letter_is_listed_twice: LetterIsListedTwice breaks DeadLetters, "kept beside the letters";
    headers_are_a_map: HeadersAreAMap breaks DeadLetters, "kept as a map";
    payload_is_text: PayloadIsText breaks DeadLetters, "taken for text, or cut";
    published_in_seconds: PublishedInSeconds breaks DeadLetters, "cut to whole seconds";
    letter_state_is_lost: LetterStateIsLost breaks DeadLetters, "state that is not stored";
    letters_without_group: LettersWithoutGroup breaks DeadLetters, "without their group";
    pages_by_time: PagesByTime breaks DeadLetters, "by the time alone";
    letters_in_order_of_ids: LettersInOrderOfIds breaks DeadLetters, "by id alone";
    pages_without_limit: PagesWithoutLimit breaks DeadLetters, "limit that is not looked at";
    put_back_forgets_again: PutBackForgetsAgain breaks DeadLetters, "forgotten again";
    put_back_races: PutBackRaces breaks DeadLetters, "in two steps";
    put_back_keeps_record: PutBackKeepsRecord breaks DeadLetters, "not forgotten";
    put_back_removes_letter: PutBackRemovesLetter breaks DeadLetters, "removed when putting back begins";
    finish_removes_any_letter: FinishRemovesAnyLetter breaks DeadLetters, "though nobody has put it back";
    delete_forgets_record: DeleteForgetsRecord breaks DeadLetters, "deleted with the letter";
    letter_time_by_consumers_clock: LetterTimeByConsumersClock breaks DeadLetters, "consumer's clock says when";
    letter_time_as_given: LetterTimeAsGiven breaks DeadLetters, "the time that the letter came with";
}

#[test]
fn a_law_that_nothing_breaks_is_no_law() {
    for &law in Law::ALL {
        assert!(
            PAIRS.iter().any(|(_, broken)| *broken == law),
            "no broken store is meant for the law `{law}`"
        );
    }
}

/// What a store does not offer is no fault of its, and the report says so.
#[tokio::test]
async fn a_store_without_dead_letters_is_not_asked_about_them() {
    let toy = async || Toy::new(Temper::Waits, Fault::KeepsNoLetters);
    let outcome = run_law(Law::DeadLetters, &options(), toy).await;
    let Outcome::DoesNotApply(why) = outcome else {
        panic!("{outcome:?}");
    };
    assert!(why.contains("Transactions::dead_letters"), "{why}");
}

/// The control once more, where everything has to share one thread.
#[tokio::test]
async fn a_sound_store_needs_no_second_thread() {
    for temper in [Temper::Waits, Temper::OneWriter] {
        let report = run_with(&options(), async || Toy::new(temper, Fault::None)).await;
        assert!(report.is_conforming(), "{temper:?}\n{report}");
    }
}

/// The control: without a fault the store keeps every law, whatever its temper.
mod sound {
    mod waits {
        inbox_conformance::laws!(crate::Toy::new(crate::Temper::Waits, crate::Fault::None));
    }
    mod says_in_flight {
        inbox_conformance::laws!(crate::Toy::new(crate::Temper::SaysInFlight, crate::Fault::None));
    }
    mod optimistic {
        inbox_conformance::laws!(crate::Toy::new(crate::Temper::Optimistic, crate::Fault::None));
    }
    mod one_writer {
        inbox_conformance::laws!(crate::Toy::new(crate::Temper::OneWriter, crate::Fault::None));
    }
}
