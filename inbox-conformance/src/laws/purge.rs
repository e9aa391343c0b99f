//! A purge removes what is older than asked and nothing else, in bounded steps, while claims go on.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use inbox_core::{ErrorKind, MessageId, Purge, Purged, Upkeep};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Tries};
use crate::stage::{Rival, Stage, Verdict};

/// How far the clock is moved if it can be, and the age that then tells old from fresh.
const FAR: Duration = Duration::from_secs(2 * 60 * 60);
const OLD: Duration = Duration::from_secs(60 * 60);
/// How many old messages each group has.
const OLD_ONES: usize = 7;
/// Many more than any purge here needs.
const MOST_STEPS: u32 = 200;

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with two consumers of a group, each with a handle of its own");
    let consumer = stage.consumer("purge").await?;
    let other = stage.consumer("purge").await?;
    forgotten(stage, &consumer.of_group("forgotten")).await?;
    old_and_fresh(stage, &consumer, &other).await?;
    in_flight(stage, &consumer, &other).await
}

async fn forgotten<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let id = stage.message();
    stage.scene(format!("message {id}, handled and then forgotten"));
    consumer.expect_new(&Job::new(id), "nobody has claimed it").await?;
    let key = consumer.key(id);
    for expected in [true, false] {
        stage.step("asked the store to forget it");
        let forgot = consumer
            .patiently("forget answers", || consumer.store.forget(&key))
            .await?;
        stage.ensure(
            forgot == expected,
            format!("{expected}"),
            format!("{forgot}"),
            "forget does not look at the number of records it removed",
        )?;
    }
    consumer
        .expect_new(&Job::new(id), "forget did not remove the record")
        .await
}

/// One step of a purge.
async fn step<F: Fixture>(consumer: &Consumer<F>, purge: &Purge) -> Verdict<Purged> {
    let purged = consumer
        .patiently("purge answers", || consumer.store.purge(purge))
        .await?;
    consumer.stage.ensure(
        purged.removed <= u64::from(purge.step.get()),
        format!("at most {} records removed in one step", purge.step),
        format!("{}", purged.removed),
        "a purge that is not bounded: it holds its locks for as long as the table is large",
    )?;
    Ok(purged)
}

/// All steps of a purge; how many records they removed, of at most so many that there are to remove.
async fn purge_all<F: Fixture>(consumer: &Consumer<F>, purge: &Purge, there_are: u64) -> Verdict<u64> {
    let mut removed = 0;
    for _ in 0..MOST_STEPS {
        let purged = step(consumer, purge).await?;
        removed += purged.removed;
        consumer.stage.ensure(
            removed <= there_are,
            format!("at most {there_are} records removed"),
            format!("{removed} so far"),
            "a purge that ignores its group or its age, takes its group for a pattern, or counts wrongly",
        )?;
        if !purged.more {
            return Ok(removed);
        }
    }
    Err(consumer.stage.failure(
        "a step that says that there is no more to remove",
        format!("after {MOST_STEPS} steps, which removed {removed}, there is still more"),
        "`more` is always true, or steps that remove nothing of what they count",
    ))
}

fn steps_of(size: u32) -> NonZeroU32 {
    NonZeroU32::new(size).unwrap_or(NonZeroU32::MIN)
}

async fn all_handled<F: Fixture>(consumer: &Consumer<F>, ids: &[MessageId]) -> Verdict {
    consumer
        .stage
        .step(format!("handled {} messages of {:?}", ids.len(), consumer.group));
    let quiet = consumer.aside();
    for id in ids {
        quiet.expect_new(&Job::new(*id), "nobody has claimed it").await?;
    }
    Ok(())
}

/// How many of these messages have a record.
async fn count<F: Fixture>(consumer: &Consumer<F>, ids: &[MessageId]) -> Verdict<usize> {
    let mut count = 0;
    for id in ids {
        count += usize::from(consumer.find(*id).await?.is_some());
    }
    Ok(count)
}

async fn old_and_fresh<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, other: &Consumer<F>) -> Verdict {
    // Without a clock that can be moved, old and fresh are seconds apart, and a slow machine may need more of them.
    for (round, real) in [1, 4, 12].map(Duration::from_secs).into_iter().enumerate() {
        // Groups of its own, for a round that told nothing leaves records behind.
        let name = format!("purge-{round}");
        let (consumer, other) = (consumer.of_group(&name), other.of_group(&name));
        if try_old_and_fresh(stage, &consumer, &other, real).await? {
            return Ok(());
        }
    }
    Err(stage.failure(
        "a handful of claims and a purge within 12 s",
        "they took longer",
        "a machine or a database too slow to tell, or a purge that waits for something",
    ))
}

/// Old messages of several groups, and fresh ones of the first of them.
struct Ages<F: Fixture> {
    groups: Vec<Consumer<F>>,
    old: Vec<Vec<MessageId>>,
    fresh: Vec<MessageId>,
    /// What tells old from fresh.
    age: Duration,
    /// When the fresh ones may no longer be, if it is real time that makes them old.
    fresh_until: Option<Instant>,
}

impl<F: Fixture> Ages<F> {
    /// Whether too much time has passed to tell.
    fn are_blurred(&self) -> bool {
        self.fresh_until.is_some_and(|until| Instant::now() >= until)
    }

    /// How many records there are to remove, as far as that is certain.
    fn at_most(&self, old: u64) -> u64 {
        if self.fresh_until.is_some() { u64::MAX } else { old }
    }
}

/// `false`: the machine was too slow to tell.
async fn try_old_and_fresh<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    other: &Consumer<F>,
    real: Duration,
) -> Verdict<bool> {
    let name = consumer.group.as_str();
    // The names that a purge of one of them would sweep along, if the group were a pattern.
    let groups = [
        name.into(),
        format!("{name}*"),
        format!("{name}%"),
        format!("{name}_"),
        name.to_uppercase(),
    ]
    .map(|name| consumer.of_group(&name));
    stage.scene("old messages and fresh ones, of several groups");
    let old: Vec<Vec<MessageId>> = groups.iter().map(|_| stage.messages(OLD_ONES)).collect();
    for (group, ids) in groups.iter().zip(&old) {
        all_handled(group, ids).await?;
    }
    nothing_is_that_old(stage, consumer).await?;

    stage.step(format!("moved the clock forward by {FAR:?}"));
    let (age, moved) = match stage.fixture().advance_clock(&consumer.store, FAR).await {
        Ok(()) => (OLD, true),
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            stage.step(format!("as it cannot be moved, waited for {:?}", real * 3 / 2));
            let waited = stage.fixture().advance_clock(&consumer.store, real * 3 / 2).await;
            stage.fixed(waited, "advance_clock")?;
            (real, false)
        }
        Err(error) => return stage.fixed(Err(error), "advance_clock"),
    };
    let ages = Ages {
        groups: groups.into(),
        old,
        fresh: stage.messages(5),
        age,
        fresh_until: (!moved).then(|| Instant::now() + real),
    };
    all_handled(consumer, &ages.fresh).await?;
    Ok(purge_one_group(stage, other, &ages).await? && purge_the_others(stage, &ages).await?)
}

/// A purge of what is older than anything.
async fn nothing_is_that_old<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    for too_long in [Duration::from_secs(24 * 60 * 60), Duration::MAX] {
        stage.step(format!("purged what is older than {too_long:?}"));
        let removed = match consumer.store.purge(&Purge::older_than(too_long)).await {
            Ok(purged) => purged.removed,
            // Such an age may be refused.
            Err(error) if error.kind() == ErrorKind::InvalidInput || error.is_retryable() => 0,
            Err(error) => return stage.sound(Err(error), "nothing removed, or an error of the kind \"invalid input\""),
        };
        stage.ensure(
            removed == 0,
            "nothing removed, for nothing is that old",
            format!("{removed} removed"),
            "a cutoff on the wrong side, or one that overflows",
        )?;
    }
    Ok(())
}

/// Purges the first group in small steps, while claims of it go on. `false`: too slow to tell.
async fn purge_one_group<F: Fixture>(stage: &Stage<F>, other: &Consumer<F>, ages: &Ages<F>) -> Verdict<bool> {
    let (consumer, age) = (&ages.groups[0], ages.age);
    let group = &consumer.group;
    let purge = Purge::older_than(age).in_steps_of(steps_of(2)).of_group(group.clone());
    let meanwhile = stage.messages(20);
    let claims = {
        let (other, meanwhile) = (other.aside(), meanwhile.clone());
        Rival::start(async move { all_handled(&other, &meanwhile).await })
    };
    stage.step(format!(
        "purged what is older than {age:?} of {group:?}, in steps of 2, while another consumer claims"
    ));
    let removed = purge_all(consumer, &purge, ages.at_most(OLD_ONES as u64)).await?;
    stage.join(claims, "the consumer that claims meanwhile").await??;
    let kept = count(consumer, &ages.fresh).await? + count(consumer, &meanwhile).await?;
    if ages.are_blurred() {
        return Ok(false);
    }
    stage.ensure(
        kept == ages.fresh.len() + meanwhile.len(),
        "every fresh record kept",
        format!("{kept} of {} kept", ages.fresh.len() + meanwhile.len()),
        "a cutoff on the wrong side, or a purge by number instead of by age: what is redelivered is then done twice",
    )?;
    let left = count(consumer, &ages.old[0]).await?;
    stage.ensure(
        removed == OLD_ONES as u64 && left == 0,
        format!("the {OLD_ONES} old records of the group removed"),
        format!("{removed} counted as removed, {left} of them still there"),
        "a purge that stops at its first step, that does not see what is old, or that counts wrongly",
    )?;
    for (group, ids) in ages.groups.iter().zip(&ages.old).skip(1) {
        let kept = count(group, ids).await?;
        stage.ensure(
            kept == ids.len(),
            format!(
                "every record of {:?} kept, for only {:?} was asked for",
                group.group, consumer.group
            ),
            format!("{kept} of {} kept", ids.len()),
            "a purge that ignores its group, folds its case or takes it for a pattern",
        )?;
    }
    Ok(true)
}

/// Purges the group that looks like a pattern, and then all of them. `false`: too slow to tell.
async fn purge_the_others<F: Fixture>(stage: &Stage<F>, ages: &Ages<F>) -> Verdict<bool> {
    let (consumer, age) = (&ages.groups[0], ages.age);
    let (starred, alike) = (&ages.groups[1].group, &ages.groups[2]);
    stage.step(format!("purged what is older than {age:?} of {starred:?}"));
    let purge = Purge::older_than(age).of_group(starred.clone());
    let removed = purge_all(consumer, &purge, ages.at_most(OLD_ONES as u64)).await?;
    let kept = count(alike, &ages.old[2]).await?;
    stage.ensure(
        removed == OLD_ONES as u64 && kept == OLD_ONES,
        format!("the {OLD_ONES} old records of that group removed, and no other group's"),
        format!("{removed} removed, and {kept} of {OLD_ONES} kept in {:?}", alike.group),
        "a group that is taken for a pattern",
    )?;

    stage.step(format!("purged what is older than {age:?} of every group"));
    purge_all(consumer, &Purge::older_than(age), u64::MAX).await?;
    let kept = count(consumer, &ages.fresh).await?;
    let mut left = 0;
    for (group, ids) in ages.groups.iter().zip(&ages.old) {
        left += count(group, ids).await?;
    }
    if ages.are_blurred() {
        return Ok(false);
    }
    stage.ensure(
        left == 0 && kept == ages.fresh.len(),
        "the old records of all groups removed, and no fresh one",
        format!("{left} of them left, {kept} of {} fresh ones kept", ages.fresh.len()),
        "a purge of every group that is one of no group",
    )?;
    let suspect = "the record was counted as purged and is still there";
    consumer.expect_new(&Job::new(ages.old[0][0]), suspect).await?;
    Ok(true)
}

/// A message whose transaction is open during the purge, for so long that its claim is older than asked; then it
/// commits. Its age counts from there: it was processed then.
async fn in_flight<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, other: &Consumer<F>) -> Verdict {
    for hold in [400, 2_400, 10_000].map(Duration::from_millis) {
        if try_in_flight(stage, consumer, other, hold).await? {
            return Ok(());
        }
    }
    Err(stage.failure(
        "a commit and a purge within 5 s",
        "they took longer",
        "a machine or a database too slow to tell, or a purge that waits for something",
    ))
}

/// `false`: the machine was too slow to tell, or the store's times may be too coarse to.
async fn try_in_flight<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    other: &Consumer<F>,
    hold: Duration,
) -> Verdict<bool> {
    // Times of whole seconds may be off by one, so a short hold acquits a store and does not convict it.
    let convicts = hold > Duration::from_secs(2);
    let (slow, comparison) = (stage.message(), stage.message());
    let age = hold / 2;
    stage.scene(format!(
        "message {slow}, handled in a transaction that is open for {hold:?}"
    ));
    let mut tx = consumer.begin().await?;
    consumer.claim_new(&mut tx, slow, Path::Single).await?;
    stage.step(format!("waited for {hold:?}, as a slow handler does"));
    tokio::time::sleep(hold).await;
    stage.step(format!("had another task purge what is older than {age:?}"));
    let mut purging = {
        let other = other.aside();
        Rival::start(async move {
            let mut tries = Tries::new(other.stage.options().patience());
            // Where the open transaction keeps a purge out, it comes again, and is through after the commit.
            loop {
                match other.store.purge(&Purge::older_than(age)).await {
                    Err(error) if error.is_retryable() && tries.again().await => {}
                    result => return other.stage.sound(result, "purge answers"),
                }
            }
        })
    };
    let early = purging.within(stage.options().glimpse()).await;
    let ended = Instant::now();
    consumer.commit(tx).await?;
    match early {
        Some(purged) => purged?,
        None => stage.join(purging, "the purge").await??,
    };
    stage.step(format!("purged what is older than {age:?} once more"));
    step(consumer, &Purge::older_than(age)).await?;
    let record = consumer.find(slow).await?;
    let too_slow = ended.elapsed() >= age;
    stage.step(format!("handled message {comparison} for comparison"));
    consumer.handle(&Job::new(comparison)).await?;
    let later = consumer.find(comparison).await?;
    let apart = ended.elapsed();
    if too_slow {
        return Ok(false);
    }
    let suspect = "a purge that takes records whose transaction is open; or an age that counts from the claim, or from \
                   the start of the transaction, instead of its commit: a slow handler's record is then old as soon as \
                   it is there, and the message is done twice";
    let (Some(record), Some(later)) = (record, later) else {
        return if convicts {
            Err(stage.failure(
                "the record of a message that has only just been processed",
                "none",
                suspect,
            ))
        } else {
            Ok(false)
        };
    };
    let behind = match (record.processed_at, later.processed_at) {
        (Some(record), Some(later)) => later.duration_since(record).unwrap_or_default(),
        _ => Duration::ZERO,
    };
    if behind > apart + age && !convicts {
        return Ok(false);
    }
    stage.ensure(
        behind <= apart + age,
        format!("a record at most {apart:?} older than one that was made that much later"),
        format!("{behind:?} older"),
        suspect,
    )?;
    Ok(true)
}
