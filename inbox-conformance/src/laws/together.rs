//! Claim and effects commit together or not at all.

use inbox_core::{Delivery, Transactions, Upkeep};

use crate::Fixture;
use crate::consumer::{Consumer, Handled, Job, Path, answers, found};
use crate::stage::{Rival, Stage, Verdict, poll_at_most};

/// More than any store's commit is polled.
const MOST_POLLS: usize = 40;

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer and an outsider, each with a handle of its own");
    let consumer = stage.consumer("together").await?;
    let outsider = stage.consumer("together").await?;
    for path in Path::BOTH {
        committed(stage, &consumer, &outsider, path).await?;
        rolled_back(stage, &consumer, path).await?;
    }
    batch(stage, &consumer).await?;
    cancelled_commit(stage, &consumer).await
}

async fn committed<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    outsider: &Consumer<F>,
    path: Path,
) -> Verdict {
    let id = stage.message();
    let effect = format!("committed by {path}");
    stage.scene(format!("message {id}, claimed by {path}, with an effect"));
    let mut tx = consumer.begin().await?;
    consumer.claim_new(&mut tx, id, path).await?;
    nothing_outside(stage, outsider, id, &effect).await?;
    consumer.write_effect(&mut tx, &effect).await?;
    nothing_outside(stage, outsider, id, &effect).await?;
    consumer.commit(tx).await?;
    stage.step("looked for record and effect from outside");
    let suspect = "a commit that says Ok and stores nothing, or only one of the two";
    stage.expect_effects(&effect, 1, suspect).await?;
    let record = outsider.find(id).await?;
    stage.ensure(record.is_some(), "the record of the message", "None", suspect)
}

/// An outsider sees neither record nor effect of the open transaction.
async fn nothing_outside<F: Fixture>(
    stage: &Stage<F>,
    outsider: &Consumer<F>,
    id: inbox_core::MessageId,
    effect: &str,
) -> Verdict {
    stage.step("looked for record and effect from outside, before the commit");
    // A database may let readers wait for the writer, or turn them away: then there is nothing to see.
    let look = {
        let (outsider, effect) = (outsider.aside(), effect.to_owned());
        async move {
            let record = outsider.store.find(&outsider.key(id)).await;
            let effects = outsider.stage.fixture().count_effects(&effect).await;
            (record, effects)
        }
    };
    let time = 5 * stage.options().glimpse();
    let Some((record, effects)) = Rival::start(look).within(time).await else {
        return Ok(());
    };
    match record {
        Ok(record) => stage.ensure(
            record.is_none(),
            "no record yet",
            found(record.as_ref()),
            "the claim is written beside the caller's transaction, or commits by itself: if the effect then fails, the \
             message is lost",
        )?,
        Err(error) if error.is_retryable() => {}
        Err(error) => {
            stage.sound(Err(error), "find answers, or says that it is to be asked again")?;
        }
    }
    match effects {
        Ok(count) => stage.ensure(
            count == 0,
            "no effect yet",
            format!("{count}"),
            "the claim commits the transaction, or the fixture's write_effect does not write in it",
        ),
        // A reader that the database turns away sees nothing either.
        Err(_) => Ok(()),
    }
}

async fn rolled_back<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path) -> Verdict {
    let id = stage.message();
    let effect = format!("rolled back by {path}");
    stage.scene(format!(
        "message {id}, claimed by {path}, with an effect that is rolled back"
    ));
    for effect_first in [false, true] {
        let mut tx = consumer.begin().await?;
        if effect_first {
            consumer.write_effect(&mut tx, &effect).await?;
        }
        consumer.claim_new(&mut tx, id, path).await?;
        if !effect_first {
            consumer.write_effect(&mut tx, &effect).await?;
        }
        consumer.rollback(tx).await?;
        stage.step("looked for record and effect from outside");
        stage
            .expect_effects(
                &effect,
                0,
                "the claim commits what was written before it, or an effect is not rolled back",
            )
            .await?;
        let record = consumer.find(id).await?;
        stage.ensure(
            record.is_none(),
            "no record",
            found(record.as_ref()),
            "the record is not written in the caller's transaction",
        )?;
    }
    let job = Job::new(id).by(path).with_effect(&effect);
    consumer.expect_new(&job, "the claim survived the rollback").await?;
    stage.expect_effects(&effect, 1, "only one of the two was stored").await
}

async fn batch<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let ids = stage.messages(3);
    let deliveries: Vec<Delivery> = ids.iter().copied().map(Delivery::new).collect();
    stage.scene("a batch of three messages, with an effect each, rolled back and then committed");
    for commit in [false, true] {
        let mut tx = consumer.begin().await?;
        stage.step("claimed the batch");
        let claims = consumer.claim_batch(&mut tx, &deliveries).await?;
        stage.ensure(
            claims.iter().all(inbox_core::Claim::is_new),
            "three times Claim::New",
            answers(&claims),
            "claims that survived the rollback of their transaction, in a store that remembers outside of it",
        )?;
        for id in &ids {
            consumer.write_effect(&mut tx, &format!("of {id}")).await?;
        }
        if commit {
            consumer.commit(tx).await?;
        } else {
            consumer.rollback(tx).await?;
        }
        stage.step("looked for records and effects from outside");
        for id in &ids {
            let suspect = "some of the batch is stored and some is not";
            stage
                .expect_effects(&format!("of {id}"), u64::from(commit), suspect)
                .await?;
            let record = consumer.find(*id).await?;
            stage.ensure(
                record.is_some() == commit,
                if commit { "a record of each" } else { "no record of any" },
                format!("{} for message {id}", found(record.as_ref())),
                suspect,
            )?;
        }
    }
    Ok(())
}

/// A commit whose future is dropped leaves the outcome open, but not half of it.
async fn cancelled_commit<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    for polls in 1..=MOST_POLLS {
        let id = stage.message();
        let effect = format!("cancelled at {polls}");
        stage.scene(format!("message {id}, with an effect, whose commit is cancelled"));
        let mut tx = consumer.begin().await?;
        consumer.claim_new(&mut tx, id, Path::Single).await?;
        consumer.write_effect(&mut tx, &effect).await?;
        stage.step(format!(
            "polled the future of commit at most {polls} time(s) and dropped it"
        ));
        let ended = poll_at_most(polls, consumer.store.commit(tx)).await.is_some();
        stage.step("handled the message again, with the same effect");
        let handled = consumer.handle(&Job::new(id).with_effect(&effect)).await?;
        stage
            .expect_effects(
                &effect,
                1,
                match handled {
                    Handled::Committed => "the cancelled commit stored the effect without the record",
                    Handled::Duplicate(_) => "the cancelled commit stored the record without the effect",
                },
            )
            .await?;
        if ended {
            break;
        }
    }
    Ok(())
}
