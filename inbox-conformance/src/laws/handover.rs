//! If the consumer that was first rolls back, one that waits or comes again gets the message.

use std::time::Duration;

use inbox_core::Transactions;

use crate::Fixture;
use crate::consumer::{Consumer, Handled, Job, Path};
use crate::stage::{Rival, Stage, Verdict};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    RolledBack,
    Dropped,
    Committed,
}

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with two consumers of a group, each with a handle of its own");
    let first = stage.consumer("handover").await?;
    let second = stage.consumer("handover").await?;
    for path in Path::BOTH {
        for rivals in [1, 3] {
            for ending in [Ending::RolledBack, Ending::Dropped, Ending::Committed] {
                hand_over(stage, &first, &second, path, rivals, ending).await?;
            }
        }
    }
    Ok(())
}

async fn hand_over<F: Fixture>(
    stage: &Stage<F>,
    first: &Consumer<F>,
    second: &Consumer<F>,
    path: Path,
    rivals: usize,
    ending: Ending,
) -> Verdict {
    let id = stage.message();
    let effect = format!("of {id}");
    stage.scene(format!(
        "message {id}, claimed by {path}, with {rivals} rival(s) that wait for it or come again"
    ));
    let mut tx = first.begin().await?;
    first.claim_new(&mut tx, id, path).await?;
    first.write_effect(&mut tx, &effect).await?;
    stage.step("had the rival(s) handle the message meanwhile");
    let job = Job::new(id).by(path).with_effect(&effect);
    let mut tasks = Vec::new();
    for _ in 0..rivals {
        let (second, job) = (second.aside(), job.clone());
        tasks.push(Rival::start(async move { second.handle(&job).await }));
    }
    // Time for the rivals to get to where they wait. One that is through already got an answer while the first was open.
    tokio::time::sleep(stage.options().glimpse()).await;
    let mut through = Vec::new();
    let mut waiting = Vec::new();
    for mut task in tasks {
        match task.within(Duration::ZERO).await {
            Some(handled) => through.push(handled?),
            None => waiting.push(task),
        }
    }
    let early_duplicate = through.iter().any(|handled| matches!(handled, Handled::Duplicate(_)));
    stage.ensure(
        !early_duplicate || through.contains(&Handled::Committed),
        "a rival that waits, or is told to come again, as long as the first has not committed",
        "Claim::Duplicate",
        "Duplicate answered for an uncommitted claim: when that one rolls back, its message is lost, because the rival \
         has acknowledged it",
    )?;
    let first_committed = match ending {
        Ending::RolledBack => {
            first.rollback(tx).await?;
            false
        }
        Ending::Dropped => {
            stage.step("dropped the first transaction");
            drop(tx);
            false
        }
        Ending::Committed => {
            stage.step("committed the first transaction");
            match first.store.commit(tx).await {
                Ok(()) => true,
                // Where all may go on, the one that comes to its commit too late is refused.
                Err(error) if error.is_retryable() => false,
                Err(error) => return stage.sound(Err(error), "the commit succeeds, for the first was first"),
            }
        }
    };
    for task in waiting {
        through.push(stage.join(task, "the rival").await??);
    }
    let committed = through.iter().filter(|handled| **handled == Handled::Committed).count();
    let expected = usize::from(!first_committed);
    stage.ensure(
        committed == expected,
        if first_committed {
            "Claim::Duplicate for every rival, for the first has committed"
        } else {
            "exactly one rival that commits after Claim::New, for the first has not committed"
        },
        format!("{committed} rival(s) committed after New, of {}", through.len()),
        if committed > expected {
            "a waiter that does not look again when its wait ends, or several that get the message at once"
        } else {
            "a waiter that takes the end of the first transaction for its commit: the message is lost"
        },
    )?;
    stage
        .expect_effects(&effect, 1, "an effect that was not rolled back, or that was done twice")
        .await
}
