//! At every isolation level the answer is right or a retryable error.

use std::sync::Arc;
use std::time::Duration;

use inbox_core::{Claim, Delivery, Transactions};
use tokio::sync::Barrier;

use crate::Fixture;
use crate::consumer::{Consumer, Handled, Job, Path};
use crate::failure::in_full;
use crate::stage::{Rival, Stage, Verdict};

const SUSPECT: &str = "a look-up in a snapshot that is older than the other's commit, without a unique key that decides: \
                       the message is done twice";

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    let levels = stage.fixture().isolation_levels();
    stage.scene(format!("at the isolation levels {levels:?}"));
    stage.ensure(
        !levels.is_empty(),
        "at least one isolation level",
        "none",
        "the fixture's isolation_levels; where there is only one, leave its default",
    )?;
    let one = stage.consumer("isolation").await?;
    let other = stage.consumer("isolation").await?;
    for level in levels {
        for path in Path::BOTH {
            race(stage, &one, &other, &level, path).await?;
            behind_a_commit(stage, &one, &other, &level, path).await?;
            rolled_back(stage, &one, &level, path).await?;
        }
    }
    Ok(())
}

async fn race<F: Fixture>(
    stage: &Stage<F>,
    one: &Consumer<F>,
    other: &Consumer<F>,
    level: &str,
    path: Path,
) -> Verdict {
    for _ in 0..stage.options().scale(5, 100) {
        let id = stage.message();
        let effect = format!("of {id}");
        stage.scene(format!("four consumers at once, at the isolation level {level:?}"));
        stage.step(format!(
            "each claimed message {id} by {path}, wrote an effect if that was New, committed a moment later, and tried \
             again until it was done"
        ));
        let job = Job::new(id)
            .by(path)
            .with_effect(&effect)
            .at(level)
            .taking(Duration::from_millis(2));
        let start = Arc::new(Barrier::new(4));
        let tasks = [one, other, one, other].map(|consumer| {
            let (consumer, job, start) = (consumer.aside(), job.clone(), Arc::clone(&start));
            Rival::start(async move {
                start.wait().await;
                consumer.handle(&job).await
            })
        });
        let mut committed = 0;
        for task in tasks {
            committed += usize::from(stage.join(task, "each consumer").await?? == Handled::Committed);
        }
        stage.ensure(
            committed == 1,
            "exactly one commits after New",
            format!("{committed} did"),
            SUSPECT,
        )?;
        stage.expect_effects(&effect, 1, SUSPECT).await?;
    }
    Ok(())
}

/// A transaction that has looked at the database already when another consumer commits the message that it claims next.
async fn behind_a_commit<F: Fixture>(
    stage: &Stage<F>,
    one: &Consumer<F>,
    other: &Consumer<F>,
    level: &str,
    path: Path,
) -> Verdict {
    let (seen, id) = (stage.message(), stage.message());
    let effect = format!("of {id}");
    stage.scene(format!(
        "message {id}, which another consumer commits while a transaction at the isolation level {level:?} is open"
    ));
    stage.step(format!(
        "opened that transaction, and claimed message {seen} in it, so that it has its snapshot"
    ));
    let begun = stage.fixture().begin_at(&one.store, level).await;
    let mut tx = stage.fixed(begun, "begin_at")?;
    one.claim_new(&mut tx, seen, path).await?;
    stage.step("had another consumer handle the message meanwhile");
    let mut rival = {
        let (other, job) = (other.aside(), Job::new(id).by(path).with_effect(&effect));
        Rival::start(async move { other.handle(&job).await })
    };
    // Where there is one writer, the other consumer waits, and comes second.
    let early = rival.within(3 * stage.options().glimpse()).await;
    stage.step(format!(
        "claimed the message in the open transaction, by {path}, and committed if it was New"
    ));
    let answer = one.answer(&mut tx, Delivery::new(id), path).await?;
    let committed = match answer {
        Ok(Claim::New) => {
            let written = stage.fixture().write_effect(&one.store, &mut tx, &effect).await;
            match written {
                Ok(()) => one.store.commit(tx).await.map(|()| true),
                Err(error) => {
                    let lost = one.effect_is_retryable(&error);
                    let _ = one.store.rollback(tx).await;
                    if lost { Ok(false) } else { Err(error) }
                }
            }
        }
        Ok(Claim::Duplicate(_) | Claim::InFlight(_)) => one.store.rollback(tx).await.map(|()| false),
        Err(error) => {
            let _ = one.store.rollback(tx).await;
            Err(error)
        }
    };
    let first = match committed {
        Ok(committed) => committed,
        Err(error) if error.is_retryable() => false,
        Err(error) => {
            return Err(stage.failure(
                "Duplicate, or an error that is retryable",
                in_full(&error),
                "a serialization failure whose code is not mapped to a retryable kind",
            ));
        }
    };
    let second = match early {
        Some(handled) => handled?,
        None => stage.join(rival, "the other consumer").await??,
    } == Handled::Committed;
    stage.ensure(
        first != second,
        "exactly one of the two commits after New",
        if first { "both did" } else { "neither did" },
        SUSPECT,
    )?;
    stage.expect_effects(&effect, 1, SUSPECT).await
}

async fn rolled_back<F: Fixture>(stage: &Stage<F>, one: &Consumer<F>, level: &str, path: Path) -> Verdict {
    let id = stage.message();
    stage.scene(format!("message {id}, rolled back at the isolation level {level:?}"));
    let begun = stage.fixture().begin_at(&one.store, level).await;
    let mut tx = stage.fixed(begun, "begin_at")?;
    one.claim_new(&mut tx, id, path).await?;
    one.rollback(tx).await?;
    let job = Job::new(id).by(path).at(level);
    one.expect_new(&job, "the claim survived the rollback").await?;
    one.expect_duplicate(&job, "the commit at this level says Ok and stores nothing")
        .await?;
    Ok(())
}
