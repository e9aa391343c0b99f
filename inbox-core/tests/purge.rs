//! What `Inbox::purge` and `Inbox::purge_with` promise.

#![allow(clippy::unwrap_used, reason = "tests may stop at the first surprise")]

mod common;

use std::num::NonZeroU32;
use std::time::Duration;

use common::Turn::{Fails, Well};
use common::{Scripted, Step, dropped_after, enter, id, ids, inbox};
use inbox_core::{ErrorKind, Inbox, MessageId, Outcome, Purge, Transactions, Upkeep as _};

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

async fn process_all(inbox: &Inbox<Scripted>, ids: &[MessageId]) {
    for id in ids {
        let outcome = inbox.process(*id, async |tx| enter(tx, *id).await).await.unwrap();
        assert_eq!(outcome, Outcome::Processed(()));
    }
}

async fn found(inbox: &Inbox<Scripted>, ids: &[MessageId]) -> usize {
    let mut found = 0;
    for id in ids {
        found += usize::from(inbox.find(*id).await.unwrap().is_some());
    }
    found
}

fn in_steps_of(step: u32) -> Purge {
    Purge::older_than(DAY).in_steps_of(NonZeroU32::new(step).unwrap())
}

#[tokio::test]
async fn a_purge_removes_what_is_older_than_asked_and_nothing_else_and_says_how_many() {
    let inbox = inbox(Scripted::new());
    let (old, young) = (ids(7), [id("young"), id("younger")]);
    process_all(&inbox, &old).await;
    inbox.store().memory().advance_clock(DAY + Duration::from_secs(1));
    process_all(&inbox, &young).await;
    assert_eq!(inbox.purge(DAY).await.unwrap(), 7);
    assert_eq!(found(&inbox, &old).await, 0);
    assert_eq!(found(&inbox, &young).await, 2);
    assert_eq!(inbox.purge(DAY).await.unwrap(), 0, "a second one finds nothing");
    assert_eq!(inbox.store().ledger().len(), 9, "effects stay");
}

#[tokio::test]
async fn a_purged_message_is_new_again() {
    let inbox = inbox(Scripted::new());
    process_all(&inbox, &[id("m")]).await;
    inbox.store().memory().advance_clock(2 * DAY);
    assert_eq!(inbox.purge(DAY).await.unwrap(), 1);
    process_all(&inbox, &[id("m")]).await;
}

#[tokio::test]
async fn a_purge_leaves_other_groups_alone_and_the_stores_own_of_every_group_does_not() {
    let billing = inbox(Scripted::new());
    let shipping = billing.for_group("shipping").unwrap();
    process_all(&billing, &ids(3)).await;
    process_all(&shipping, &ids(4)).await;
    billing.store().memory().advance_clock(2 * DAY);
    assert_eq!(billing.purge(DAY).await.unwrap(), 3);
    assert_eq!(found(&shipping, &ids(4)).await, 4);
    process_all(&billing, &ids(3)).await;
    billing.store().memory().advance_clock(2 * DAY);
    assert_eq!(billing.purge_with(Purge::older_than(DAY), |_| ()).await.unwrap(), 3);
    assert_eq!(found(&shipping, &ids(4)).await, 4);
    process_all(&billing, &ids(3)).await;
    billing.store().memory().advance_clock(2 * DAY);
    assert_eq!(billing.store().purge(&Purge::older_than(DAY)).await.unwrap().removed, 7);
    assert_eq!(found(&billing, &ids(3)).await + found(&shipping, &ids(4)).await, 0);
}

#[tokio::test]
async fn progress_is_reported_after_every_step_with_the_total_so_far_and_ends_with_no_more() {
    for (records, step) in [(0, 3), (1, 3), (3, 3), (10, 3), (12, 3), (5, 1), (5, 1_000)] {
        let inbox = inbox(Scripted::new());
        process_all(&inbox, &ids(records)).await;
        inbox.store().memory().advance_clock(2 * DAY);
        let mut reports = Vec::new();
        let removed = inbox
            .purge_with(in_steps_of(step), |purged| reports.push(purged))
            .await
            .unwrap();
        assert_eq!(removed, records as u64, "{records} records in steps of {step}");
        assert_eq!(reports.len(), inbox.store().count(Step::Purge), "one report a step");
        let mut before = 0;
        for report in &reports {
            assert!(
                (before..=before + u64::from(step)).contains(&report.removed),
                "{reports:?}"
            );
            before = report.removed;
        }
        assert_eq!(before, removed, "the last report is the total");
        assert!(!reports.last().unwrap().more, "{reports:?}");
        assert!(
            reports[..reports.len() - 1].iter().all(|report| report.more),
            "{reports:?}"
        );
        assert!(
            reports.len() <= records / step as usize + 1,
            "no step for nothing but the last: {reports:?}"
        );
    }
}

#[tokio::test]
async fn a_purge_whose_store_fails_ends_with_that_error_and_keeps_what_was_removed() {
    let inbox = inbox(Scripted::new().then(Step::Purge, [Well, Well, Fails(ErrorKind::Denied)]));
    process_all(&inbox, &ids(10)).await;
    inbox.store().memory().advance_clock(2 * DAY);
    let mut last = None;
    let error = inbox
        .purge_with(in_steps_of(2), |purged| last = Some(purged.removed))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(last, Some(4));
    assert_eq!(found(&inbox, &ids(10)).await, 6);
    assert_eq!(
        inbox.purge_with(in_steps_of(2), |_| ()).await.unwrap(),
        6,
        "the next one goes on"
    );
}

#[tokio::test]
async fn a_purge_that_is_dropped_keeps_what_was_removed_and_the_next_one_goes_on() {
    let mut polls = 0;
    loop {
        let inbox = inbox(Scripted::yielding());
        process_all(&inbox, &ids(5)).await;
        inbox.store().memory().advance_clock(2 * DAY);
        let mut reported = 0;
        let finished = dropped_after(
            polls,
            inbox.purge_with(in_steps_of(2), |purged| reported = purged.removed),
        )
        .await;
        let left = found(&inbox, &ids(5)).await as u64;
        assert!(
            left + reported <= 5,
            "reported {reported} as removed, and {left} of 5 are there"
        );
        assert_eq!(inbox.purge(DAY).await.unwrap(), left);
        if finished.is_some() {
            assert_eq!(left, 0);
            break;
        }
        polls += 1;
    }
    assert!(polls >= 6, "only {polls} polls");
}

#[tokio::test]
async fn a_purge_never_touches_what_is_in_flight() {
    let inbox = inbox(Scripted::new());
    let store = inbox.store().memory();
    let mut tx = store.begin().await.unwrap();
    assert!(inbox.try_claim(&mut tx, id("m")).await.unwrap().is_new());
    store.advance_clock(365 * DAY);
    assert_eq!(inbox.purge(Duration::ZERO).await.unwrap(), 0);
    store.commit(tx).await.unwrap();
    assert!(inbox.find(id("m")).await.unwrap().is_some());
    assert_eq!(inbox.purge(DAY).await.unwrap(), 0, "its age counts from the commit");
}

#[tokio::test]
async fn an_age_beyond_all_time_removes_nothing() {
    let inbox = inbox(Scripted::new());
    process_all(&inbox, &ids(2)).await;
    inbox.store().memory().advance_clock(2 * DAY);
    assert_eq!(inbox.purge(Duration::MAX).await.unwrap(), 0);
    assert_eq!(found(&inbox, &ids(2)).await, 2);
}
