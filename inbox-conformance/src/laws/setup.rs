//! Setup twice, or by ten at once, is the same as once; without it, errors name it.

use std::sync::Arc;

use inbox_core::{Claim, Delivery, Error, ErrorKind, Key, Result, Transactions, Upkeep};
use tokio::sync::Barrier;

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Shown, found};
use crate::failure::in_full;
use crate::stage::{Rival, Stage, Verdict, group_named};

const AT_ONCE: usize = 10;

/// On an empty place.
pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    without(stage).await?;
    at_once(stage).await?;
    let consumer = Consumer {
        store: stage.connect().await?,
        stage: stage.clone(),
        group: group_named("setup"),
    };
    let id = stage.message();
    stage.scene(format!("message {id}, handled before a further setup"));
    let suspect = "a setup that drops or empties what is there, or that does not see it";
    consumer.expect_new(&Job::new(id), suspect).await?;
    for _ in 0..2 {
        stage.step("set the store up again");
        stage.sound(consumer.store.setup().await, "setup finds nothing to do")?;
        consumer.expect_duplicate(&Job::new(id), suspect).await?;
    }
    stage.step("checked the store");
    let health = stage.sound(consumer.store.check().await, "check looks")?;
    stage.ensure(
        health.is_sound(),
        "no fault in a store that was just set up (warnings are fine)",
        &health,
        "a check that looks for something that setup does not make",
    )
}

/// The error of something done to a place that is not set up, or is older: one of the right kind that names the remedy.
fn names_setup<F: Fixture>(stage: &Stage<F>, error: &Error) -> Verdict {
    stage.ensure(
        matches!(error.kind(), ErrorKind::Schema | ErrorKind::Denied),
        "success, or an error of the kind \"schema\"",
        in_full(error),
        "a missing table, or a missing column, that is not told from other errors of the database",
    )?;
    stage.ensure(
        error.to_string().to_lowercase().contains("setup"),
        "an error whose text names `setup`, the remedy",
        in_full(error),
        "an error that says what is wrong and not what to do",
    )
}

/// What a claim in this place answers, from begin to commit.
async fn claim<F: Fixture>(consumer: &Consumer<F>, key: &Key, path: Path) -> Verdict<Result<Claim>> {
    let mut tx = match consumer.store.begin().await {
        Ok(tx) => tx,
        Err(error) => return Ok(Err(error)),
    };
    let answer = consumer.answer(&mut tx, Delivery::new(key.id()), path).await?;
    match answer {
        Ok(claim) => Ok(consumer.store.commit(tx).await.map(|()| claim)),
        Err(error) => {
            let _ = consumer.store.rollback(tx).await;
            Ok(Err(error))
        }
    }
}

/// What a store does that nobody set up: work, or say so.
async fn without<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("a store that is not set up, in an empty place");
    let consumer = Consumer {
        store: stage.connect().await?,
        stage: stage.clone(),
        group: group_named("setup"),
    };
    let mut works = true;
    for path in Path::BOTH {
        stage.step(format!("claimed a message by {path}, and committed"));
        match claim(&consumer, &consumer.key(stage.message()), path).await? {
            Ok(claim) => stage.ensure(
                claim.is_new(),
                "an error that names `setup`; or Claim::New, if the store needs none",
                Shown(&claim),
                "a missing table that passes for a record: all messages are lost until somebody notices",
            )?,
            Err(error) => {
                works = false;
                names_setup(stage, &error)?;
            }
        }
    }
    let key = consumer.key(stage.message());
    stage.step("looked for a record");
    match consumer.store.find(&key).await {
        Ok(record) => stage.ensure(
            record.is_none(),
            "None",
            found(record.as_ref()),
            "a record that nobody wrote: a place that is not fresh, or a find that reads another",
        )?,
        Err(error) => names_setup(stage, &error)?,
    }
    stage.step("checked the store");
    match consumer.store.check().await {
        Ok(health) => stage.ensure(
            works || !health.is_sound(),
            "a fault in the health of a store whose claims fail",
            &health,
            "a check that does not look at what claims need",
        ),
        Err(error) => names_setup(stage, &error),
    }
}

async fn at_once<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene(format!("{AT_ONCE} handles on a place that is not set up"));
    let mut stores = Vec::new();
    for _ in 0..AT_ONCE {
        stores.push(stage.connect().await?);
    }
    stage.step("set all of them up at once");
    let start = Arc::new(Barrier::new(AT_ONCE));
    let tasks: Vec<_> = stores
        .into_iter()
        .map(|store| {
            let start = Arc::clone(&start);
            Rival::start(async move {
                start.wait().await;
                store.setup().await
            })
        })
        .collect();
    for task in tasks {
        let result = stage.join(task, "each setup").await?;
        result.map_err(|error| {
            stage.failure(
                "every setup succeeds",
                in_full(&error),
                "create-if-missing is not safe against itself in most databases: take a lock for the time of the setup, \
                 or look again after the error",
            )
        })?;
    }
    Ok(())
}

/// On a place that an older version of the store made.
pub(crate) async fn law_on_older<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("a place that an older version of the store made, with a record in it");
    let Some(key) = stage.fixed(stage.fixture().make_older().await, "make_older")? else {
        return Ok(());
    };
    let consumer = Consumer {
        store: stage.connect().await?,
        stage: stage.clone(),
        group: key.group().clone(),
    };
    stage.step("checked the store");
    let sound = match consumer.store.check().await {
        Ok(health) => health.is_sound(),
        Err(error) => {
            names_setup(stage, &error)?;
            false
        }
    };
    for path in Path::BOTH {
        stage.step(format!("claimed the recorded message by {path}"));
        match claim(&consumer, &key, path).await? {
            Ok(claim) => stage.ensure(
                claim.is_duplicate() && sound,
                "an error that names `setup`; or Claim::Duplicate, if the store works on the older version, and is sound \
                 by its check then",
                format!("{}; its check {}", Shown(&claim), if sound { "is sound" } else { "finds a fault" }),
                "an older version that is not recognised, or whose records are not read",
            )?,
            Err(error) => {
                names_setup(stage, &error)?;
                stage.ensure(
                    !sound,
                    "a fault in the health of a store whose claims fail",
                    "it is sound",
                    "a check that does not look at what claims need",
                )?;
            }
        }
    }
    stage.step("set the store up");
    stage.sound(consumer.store.setup().await, "setup upgrades what is there")?;
    for path in Path::BOTH {
        let suspect = "an upgrade that loses the records: all that is redelivered after it is done twice";
        consumer.expect_duplicate(&Job::new(key.id()).by(path), suspect).await?;
        let suspect = "an upgrade after which claims do not work";
        consumer
            .expect_new(&Job::new(stage.message()).by(path), suspect)
            .await?;
    }
    let health = stage.sound(consumer.store.check().await, "check looks")?;
    stage.ensure(
        health.is_sound(),
        "no fault after the upgrade",
        &health,
        "an upgrade that leaves something out",
    )
}
