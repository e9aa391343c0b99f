//! A batch is answered in the order asked, takes a repeated id once, may be large, and never deadlocks.

use std::sync::Arc;

use inbox_core::{Claim, Delivery, Error, InboxStore, MessageId, Transactions};
use tokio::sync::Barrier;

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Tries};
use crate::failure::{in_full, links};
use crate::stage::{Rival, Stage, Verdict};

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with two consumers of a group, each with a handle of its own");
    let consumer = stage.consumer("batches").await?;
    let other = stage.consumer("batches").await?;
    empty(stage, &consumer).await?;
    in_order(stage, &consumer).await?;
    repeated(stage, &consumer).await?;
    beside_one_in_flight(stage, &consumer, &other).await?;
    large(stage, &consumer).await?;
    overlapping(stage, &consumer, &other).await
}

fn deliveries(ids: &[MessageId]) -> Vec<Delivery> {
    ids.iter().copied().map(Delivery::new).collect()
}

/// The ids in an order that is neither theirs nor its reverse.
fn shuffled(mut ids: Vec<MessageId>) -> Vec<MessageId> {
    ids.sort_unstable();
    let half = ids.split_off(ids.len() / 2);
    let mut shuffled = Vec::new();
    for (low, high) in ids.iter().rev().zip(&half) {
        shuffled.extend([*high, *low]);
    }
    shuffled
}

async fn empty<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    stage.scene("an empty batch");
    let mut tx = consumer.begin().await?;
    stage.step("claimed nothing at all, as a batch");
    consumer.claim_batch(&mut tx, &[]).await?;
    let id = stage.message();
    consumer.claim_new(&mut tx, id, Path::Batch).await?;
    consumer.commit(tx).await
}

async fn in_order<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let ids = shuffled(stage.messages(20));
    stage.scene("a batch of 20 messages in no order, of which every third is handled already");
    for id in ids.iter().step_by(3) {
        consumer.expect_new(&Job::new(*id), "nobody has claimed it").await?;
    }
    let expected: Vec<bool> = (0..ids.len()).map(|index| index % 3 != 0).collect();
    let mut tx = consumer.begin().await?;
    stage.step("claimed the batch");
    let claims = consumer.claim_batch(&mut tx, &deliveries(&ids)).await?;
    as_expected(stage, &claims, &expected)?;
    consumer.commit(tx).await?;
    for id in &ids {
        let lost = "a message of the batch that was answered New and not stored";
        consumer.expect_duplicate(&Job::new(*id), lost).await?;
    }
    Ok(())
}

fn as_expected<F: Fixture>(stage: &Stage<F>, claims: &[Claim], new: &[bool]) -> Verdict {
    let right = claims
        .iter()
        .zip(new)
        .all(|(claim, new)| if *new { claim.is_new() } else { claim.is_duplicate() });
    let answers = |new: &mut dyn Iterator<Item = &'static str>| new.collect::<Vec<_>>().join(", ");
    stage.ensure(
        right,
        answers(&mut new.iter().map(|new| if *new { "New" } else { "Duplicate" })),
        answers(&mut claims.iter().map(|claim| match claim {
            Claim::New => "New",
            Claim::Duplicate(_) => "Duplicate",
            Claim::InFlight(_) => "InFlight",
        })),
        "answers in the order of the database's rows instead of the batch's; or a repeated id that is New not once, or \
         not the first time: the wrong messages are then done and skipped",
    )
}

async fn repeated<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let ids = shuffled(stage.messages(4));
    let (a, b, done) = (ids[0], ids[1], ids[2]);
    stage.scene("a batch in which messages stand more than once, one of which is handled already");
    consumer.expect_new(&Job::new(done), "nobody has claimed it").await?;
    let mut tx = consumer.begin().await?;
    stage.step(format!(
        "claimed a = {a}, b = {b} and c = {done} (handled) as the batch a, a, c, b, a, c, b"
    ));
    let claims = consumer
        .claim_batch(&mut tx, &deliveries(&[a, a, done, b, a, done, b]))
        .await?;
    as_expected(stage, &claims, &[true, false, false, true, false, false, false])?;
    consumer.commit(tx).await
}

async fn beside_one_in_flight<F: Fixture>(stage: &Stage<F>, first: &Consumer<F>, second: &Consumer<F>) -> Verdict {
    let ids = shuffled(stage.messages(4));
    stage.scene("a batch of four messages, one of which another consumer has claimed and not committed");
    let mut tx = first.begin().await?;
    first.claim_new(&mut tx, ids[1], Path::Single).await?;
    stage.step("had a rival claim all four as a batch, and commit");
    let mut rival = {
        let (second, ids) = (second.aside(), ids.clone());
        Rival::start(async move { settle(&second, ids).await })
    };
    let early = rival.within(stage.options().glimpse()).await;
    first.rollback(tx).await?;
    let committed = match early {
        Some(committed) => committed?,
        None => stage.join(rival, "the rival").await??,
    };
    stage.ensure(
        committed == ids.len(),
        "the rival commits all 4 after New: nobody had three of them, and the first consumer rolled the fourth back",
        format!("it committed {committed}; the others were answered Duplicate"),
        "a message that was in flight, reported as Duplicate: it is lost, for the other consumer rolled back",
    )
}

async fn large<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let count = stage.options().scale(5_000, 50_000);
    let ids = stage.messages(count);
    let batch = deliveries(&ids);
    stage.scene(format!("a batch of {count} messages"));
    for new in [true, false] {
        let mut tx = consumer.begin().await?;
        stage.step("claimed the batch");
        let claims = consumer.claim_batch(&mut tx, &batch).await?;
        let wrong = claims.iter().filter(|claim| claim.is_new() != new).count();
        stage.ensure(
            wrong == 0,
            if new { "New for each" } else { "Duplicate for each" },
            format!("another answer for {wrong} of them"),
            "a batch that is cut into parts of which one is dropped",
        )?;
        consumer.commit(tx).await?;
    }
    Ok(())
}

/// Two consumers claim the same messages in opposite orders, at once.
async fn overlapping<F: Fixture>(stage: &Stage<F>, one: &Consumer<F>, other: &Consumer<F>) -> Verdict {
    let rounds = stage.options().scale(25, 300);
    for round in 1..=rounds {
        let ids = shuffled(stage.messages(30));
        stage.scene(format!("two consumers at once (round {round} of {rounds})"));
        stage.step(
            "one claimed a batch of 30 messages, the other the same in the opposite order; both committed, and tried \
             again what was in flight",
        );
        let start = Arc::new(Barrier::new(2));
        let tasks = [(one, ids.clone()), (other, ids.iter().rev().copied().collect())].map(|(consumer, ids)| {
            let (consumer, start) = (consumer.aside(), Arc::clone(&start));
            Rival::start(async move {
                start.wait().await;
                settle(&consumer, ids).await
            })
        });
        let mut committed = 0;
        for task in tasks {
            committed += stage.join(task, "each consumer").await??;
        }
        stage.ensure(
            committed == ids.len(),
            format!("each of {} messages committed by exactly one of the two", ids.len()),
            format!("{committed} commits"),
            "a batch that looks before it inserts",
        )?;
    }
    Ok(())
}

/// Claims a batch and commits it, again and again until no message of it is in flight; says how many were new.
async fn settle<F: Fixture>(consumer: &Consumer<F>, mut ids: Vec<MessageId>) -> Verdict<usize> {
    let stage = &consumer.stage;
    let mut tries = Tries::new(stage.options().patience());
    let mut committed = 0;
    loop {
        let last = match try_batch(consumer, &ids).await? {
            Ok(claims) => {
                committed += claims.iter().filter(|claim| claim.is_new()).count();
                let mut claims = claims.iter();
                ids.retain(|_| claims.next().is_some_and(Claim::is_in_flight));
                if ids.is_empty() {
                    return Ok(committed);
                }
                format!("{} in flight", ids.len())
            }
            Err(error) => in_full(&error),
        };
        if !tries.again().await {
            return Err(stage.failure(
                "New or Duplicate for each message of the batch in the end",
                format!("still: {last}"),
                "a claim that was undone but whose lock or entry stayed",
            ));
        }
    }
}

/// One transaction with the batch; the inner error is retryable.
async fn try_batch<F: Fixture>(consumer: &Consumer<F>, ids: &[MessageId]) -> Verdict<Result<Vec<Claim>, Error>> {
    let stage = &consumer.stage;
    let mut tx = match consumer.store.begin().await {
        Ok(tx) => tx,
        Err(error) => return retryable(consumer, error),
    };
    let batch = deliveries(ids);
    let claims = match consumer.store.try_claim_batch(&mut tx, &consumer.group, &batch).await {
        Ok(claims) if claims.len() == ids.len() => claims,
        Ok(claims) => {
            return Err(stage.failure(
                format!("{} answers, one for each message", ids.len()),
                format!("{} answers", claims.len()),
                "answers for the rows that were written only",
            ));
        }
        Err(error) => {
            let _ = consumer.store.rollback(tx).await;
            return retryable(consumer, error);
        }
    };
    // Others have time to come in between; more of it would only make the rounds longer.
    tokio::task::yield_now().await;
    match consumer.store.commit(tx).await {
        Ok(()) => Ok(Ok(claims)),
        Err(error) => retryable(consumer, error),
    }
}

fn retryable<F: Fixture, T>(consumer: &Consumer<F>, error: Error) -> Verdict<Result<T, Error>> {
    let stage = &consumer.stage;
    // A database that finds a deadlock ends one of the two with an error that is retryable, after a second or so: it
    // would settle, and be slow for ever. All of them call it by its name.
    let deadlock = links(&error).any(|link| link.to_string().to_lowercase().contains("deadlock"));
    stage.ensure(
        !deadlock,
        "no deadlock",
        in_full(&error),
        "locks taken in the batch's order instead of one order for all: sort the ids before the statement",
    )?;
    stage.ensure(
        error.is_retryable(),
        "answers, or an error that is retryable",
        in_full(&error),
        "a lost race that is reported as a fault",
    )?;
    Ok(Err(error))
}
