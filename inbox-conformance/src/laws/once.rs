//! Of any number of concurrent consumers of a message exactly one commits; the others learn that it is done.

use std::sync::Arc;
use std::time::Duration;

use inbox_core::MessageId;
use tokio::sync::Barrier;

use crate::Fixture;
use crate::consumer::{Consumer, Handled, Job, Path};
use crate::stage::{Rival, Stage, Verdict};

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    let rivals = stage.options().scale(8, 64);
    let rounds = stage.options().scale(8, 100);
    stage.scene(format!("with {rivals} consumers of a group, over three handles"));
    let mut handles = Vec::new();
    for _ in 0..3 {
        handles.push(stage.consumer("once").await?);
    }
    for path in Path::BOTH {
        for _ in 0..rounds {
            race(stage, &handles, rivals, stage.message(), path).await?;
        }
    }
    Ok(())
}

async fn race<F: Fixture>(
    stage: &Stage<F>,
    handles: &[Consumer<F>],
    rivals: usize,
    id: MessageId,
    path: Path,
) -> Verdict {
    let effect = format!("of {id}");
    stage.scene(format!("{rivals} consumers at once"));
    stage.step(format!(
        "each claimed message {id} by {path}, wrote an effect if that was New, committed a moment later, and tried again \
         until it was done"
    ));
    // The moment between claim and commit is where a look-up before an insert goes wrong.
    let job = Job::new(id)
        .by(path)
        .with_effect(&effect)
        .taking(Duration::from_millis(2));
    let start = Arc::new(Barrier::new(rivals));
    let tasks: Vec<_> = handles
        .iter()
        .cycle()
        .take(rivals)
        .map(|handle| {
            let (handle, job, start) = (handle.aside(), job.clone(), Arc::clone(&start));
            Rival::start(async move {
                start.wait().await;
                handle.handle(&job).await
            })
        })
        .collect();
    let mut committed = 0;
    for task in tasks {
        if stage.join(task, "each consumer").await?? == Handled::Committed {
            committed += 1;
        }
    }
    let suspect = "a look-up before an insert, without a unique key that decides; or a commit that lost its race and says \
                   Ok";
    stage.ensure(
        committed == 1,
        "exactly one commits after New",
        format!("{committed} did"),
        suspect,
    )?;
    stage.expect_effects(&effect, 1, suspect).await
}
