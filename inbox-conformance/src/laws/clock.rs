//! The store's clock decides what is old, never the consumer's.

use std::time::{Duration, SystemTime};

use inbox_core::{Purge, Upkeep};

use crate::Fixture;
use crate::consumer::{Consumer, Job};
use crate::stage::{Stage, Verdict};

const JUMP: Duration = Duration::from_secs(2 * 60 * 60);
/// Far more than any step here takes, far less than the jump.
const TOLERANCE: Duration = Duration::from_secs(30 * 60);

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    let (before, after) = (stage.message(), stage.message());
    stage.scene(format!(
        "message {before}, handled before the database's clock moves forward by {JUMP:?}, and message {after}, handled \
         after that"
    ));
    let consumer = stage.consumer("clock").await?;
    let early = handled_at(stage, &consumer, &Job::new(before)).await?;
    stage.step(format!("moved the database's clock forward by {JUMP:?}"));
    stage.fixed(
        stage.fixture().advance_clock(&consumer.store, JUMP).await,
        "advance_clock",
    )?;
    let late = handled_at(stage, &consumer, &Job::new(after)).await?;
    // Each is how far the record's time is from the consumer's clock at that moment, so a database on a host whose clock
    // is off does not matter.
    let jumped = late - early;
    let (least, most) = (signed(JUMP) - signed(TOLERANCE), signed(JUMP) + signed(TOLERANCE));
    stage.ensure(
        (least..=most).contains(&jumped),
        format!("a record about {} s ahead of the consumer's clock", signed(JUMP)),
        format!("it is {jumped} s ahead"),
        "the consumer's clock gives the record its time; or the fixture's advance_clock moves the records instead of the \
         clock, and then it should declare that this law does not apply",
    )?;

    let purge = Purge::older_than(JUMP / 2);
    stage.step(format!("purged what is older than {:?}", purge.older_than));
    let purged = consumer
        .patiently("purge answers", || consumer.store.purge(&purge))
        .await?;
    let left = (
        consumer.find(before).await?.is_some(),
        consumer.find(after).await?.is_some(),
    );
    stage.ensure(
        purged.removed == 1 && left == (false, true),
        format!("message {before} purged and message {after} kept"),
        format!(
            "{} removed; {before} is {}, {after} is {}",
            purged.removed,
            if left.0 { "kept" } else { "gone" },
            if left.1 { "kept" } else { "gone" }
        ),
        "the cutoff of the purge, or the times of the records, come from the consumer's clock",
    )
}

/// Handles a message; by how many seconds its time is ahead of this process's clock.
async fn handled_at<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, job: &Job) -> Verdict<i64> {
    consumer.expect_new(job, "nobody has claimed it").await?;
    let now = SystemTime::now();
    let processed = consumer.expect_duplicate(job, "the record is not there").await?;
    let Some(at) = processed.at else {
        return Err(stage.failure("the time of the record", "none", "a record without a time"));
    };
    Ok(match at.duration_since(now) {
        Ok(ahead) => signed(ahead),
        Err(behind) => -signed(behind.duration()),
    })
}

fn signed(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}
