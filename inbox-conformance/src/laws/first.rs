//! The first claim of a message is `New`; after its commit every later one is `Duplicate`, with the time.

use inbox_core::{MessageId, Upkeep};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, found as show_found, moment};
use crate::stage::{Stage, Verdict, id_of};

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with two consumers of a group, each with a handle of its own");
    let here = stage.consumer("first").await?;
    let there = stage.consumer("first").await?;
    for path in Path::BOTH {
        claimed_once(stage, &here, &there, stage.message(), path).await?;
    }
    // Ids whose bytes a text column, a signed number or a terminated string would spoil.
    for bits in [
        1,
        u128::MAX,
        1 << 127,
        0x00ff_00ff << 64,
        0x2700_0000_5c00_0000_2500_0000_0000_000a,
    ] {
        claimed_once(stage, &here, &there, id_of(bits), Path::Single).await?;
    }
    Ok(())
}

async fn claimed_once<F: Fixture>(
    stage: &Stage<F>,
    here: &Consumer<F>,
    there: &Consumer<F>,
    id: MessageId,
    path: Path,
) -> Verdict {
    stage.scene(format!("message {id}, claimed by {path}"));
    stage.step("looked for its record");
    let found = here.find(id).await?;
    stage.ensure(
        found.is_none(),
        "None, for nobody has claimed it",
        show_found(found.as_ref()),
        "records of another test in this place: does every fixture have a fresh one?",
    )?;
    let mut tx = here.begin().await?;
    here.claim_new(&mut tx, id, path).await?;
    here.commit(tx).await?;

    let job = Job::new(id).by(path);
    let lost = "a commit that says Ok and stores nothing, or a handle that does not see another one's commits";
    let mut times = Vec::new();
    for consumer in [here, there, here] {
        let processed = consumer.expect_duplicate(&job, lost).await?;
        stage.ensure(
            processed.at.is_some(),
            "a Duplicate that says when the message was processed",
            "one without a time",
            "a record without a time, or one that is not read with the answer",
        )?;
        times.push(processed.at);
    }
    stage.ensure(
        times.iter().all(|time| *time == times[0]),
        "the same time with every Duplicate",
        times.iter().copied().flatten().map(moment).collect::<Vec<_>>().join(", then "),
        "a duplicate that writes to the record (an upsert): what is redelivered for ever is then never purged; or a time \
         that is the question's instead of the record's",
    )?;
    stage.step("looked for its record");
    match there.find(id).await? {
        Some(record) => stage.ensure(
            record.key == there.key(id) && record.processed_at == times[0],
            format!(
                "a record of {}, {}, as the Duplicate said",
                there.key(id),
                times[0].map_or_else(String::new, moment)
            ),
            show_found(Some(&record)),
            "find reads other columns, or in another precision, than the claim",
        ),
        None => Err(stage.failure("its record", "None", lost)),
    }?;
    stage.step("asked the store to forget another message");
    let other = here.key(stage.message());
    let forgot = stage.sound(here.store.forget(&other).await, "forget answers")?;
    stage.ensure(
        !forgot,
        "false, for that one was never claimed",
        "true",
        "forget does not look at the number of records it removed",
    )?;
    here.expect_duplicate(&job, "forget removed another message's record")
        .await?;
    Ok(())
}
