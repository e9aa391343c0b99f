//! After `Duplicate` or `InFlight` the caller's transaction works on.

use inbox_core::{Claim, Delivery, InboxStore, MessageId, Transactions};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Shown};
use crate::stage::{Rival, Stage, Verdict};

const SUSPECT: &str = "the answer left the transaction broken or ended it: an insert whose unique violation was caught, a \
                       rollback of the whole instead of a savepoint";

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with two consumers of a group, each with a handle of its own");
    let consumer = stage.consumer("usable").await?;
    let other = stage.consumer("usable").await?;
    for path in Path::BOTH {
        after_duplicate(stage, &consumer, path).await?;
        while_in_flight(stage, &consumer, &other, path).await?;
    }
    Ok(())
}

async fn after_duplicate<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path) -> Verdict {
    let (done, fresh) = (stage.message(), stage.message());
    stage.scene(format!(
        "message {done}, which is handled, and message {fresh}, which is not"
    ));
    consumer
        .expect_new(&Job::new(done).by(path), "nobody has claimed it")
        .await?;
    let effects = [format!("before {done}"), format!("after {done}")];
    let mut tx = consumer.begin().await?;
    consumer.write_effect(&mut tx, &effects[0]).await?;
    let claim = consumer.claim(&mut tx, done, path).await?;
    stage.ensure(
        claim.is_duplicate(),
        "Claim::Duplicate",
        Shown(&claim),
        "a record that is not seen",
    )?;
    works_on(stage, consumer, &mut tx, fresh, &effects[1], path).await?;
    consumer.commit(tx).await?;
    for effect in &effects {
        stage.expect_effects(effect, 1, SUSPECT).await?;
    }
    consumer.expect_duplicate(&Job::new(fresh).by(path), SUSPECT).await?;
    Ok(())
}

async fn works_on<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    tx: &mut <F::Store as InboxStore>::Tx,
    fresh: MessageId,
    effect: &str,
    path: Path,
) -> Verdict {
    consumer.write_effect(tx, effect).await?;
    stage.step(format!("claimed message {fresh} in the same transaction, by {path}"));
    let claim = consumer.answer(tx, Delivery::new(fresh), path).await?;
    match claim {
        Ok(Claim::New) => Ok(()),
        Ok(claim) => Err(stage.failure("Claim::New", Shown(&claim), SUSPECT)),
        Err(error) => Err(stage.failure("Claim::New", crate::failure::in_full(&error), SUSPECT)),
    }
}

/// Where the store answers `InFlight`, or any other thing that is no error, its transaction works on.
async fn while_in_flight<F: Fixture>(
    stage: &Stage<F>,
    first: &Consumer<F>,
    second: &Consumer<F>,
    path: Path,
) -> Verdict {
    let (held, fresh) = (stage.message(), stage.message());
    let effect = format!("beside {held}");
    stage.scene(format!(
        "message {held}, claimed and not committed, with a rival that claims it too, and then message {fresh}"
    ));
    let mut tx = first.begin().await?;
    first.claim_new(&mut tx, held, path).await?;
    stage.step("had a rival claim both");
    let mut rival = {
        let (second, effect) = (second.aside(), effect.clone());
        Rival::start(async move {
            let mut tx = match second.store.begin().await {
                Ok(tx) => tx,
                Err(error) if error.is_retryable() => return Ok(false),
                Err(error) => return second.stage.sound(Err(error), "a transaction opens"),
            };
            let claim = match second.answer(&mut tx, Delivery::new(held), path).await? {
                Ok(claim) => claim,
                Err(error) if error.is_retryable() => return Ok(false),
                Err(error) => {
                    return second
                        .stage
                        .sound(Err(error), "an answer, or an error that is retryable");
                }
            };
            if !claim.is_in_flight() {
                second.rollback(tx).await?;
                return Ok(false);
            }
            works_on(&second.stage, &second, &mut tx, fresh, &effect, path).await?;
            second.commit(tx).await?;
            Ok(true)
        })
    };
    let early = rival.within(stage.options().glimpse()).await;
    first.rollback(tx).await?;
    let in_flight = match early {
        Some(in_flight) => in_flight?,
        None => stage.join(rival, "the rival").await??,
    };
    if in_flight {
        stage.expect_effects(&effect, 1, SUSPECT).await?;
        second.expect_duplicate(&Job::new(fresh).by(path), SUSPECT).await?;
    }
    second
        .expect_new(
            &Job::new(held).by(path),
            "InFlight left something behind in the rival's transaction",
        )
        .await
}
