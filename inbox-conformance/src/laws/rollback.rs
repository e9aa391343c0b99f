//! A rollback undoes the claim, however it comes: asked for, by drop, by a dead connection, by a dropped future.

use inbox_core::{Delivery, InboxStore, Transactions};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path};
use crate::stage::{Rival, Stage, Verdict, poll_at_most};

/// More than any store's claim is polled; where a future ends sooner, its last poll was covered.
const MOST_POLLS: usize = 40;

const SUSPECT: &str = "a claim that outlives its transaction: it was committed all the same, or written beside the \
                       transaction, or is remembered in memory (a cache, a lock); the message's next delivery is skipped, \
                       though its effect never happened";

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer");
    let consumer = stage.consumer("rollback").await?;
    for path in Path::BOTH {
        for ending in [Ending::RolledBack, Ending::Dropped, Ending::Severed] {
            ended(stage, &consumer, path, ending).await?;
        }
        dropped_claim(stage, &consumer, path).await?;
        dropped_wait(stage, &consumer, path).await?;
    }
    dropped_begin(stage, &consumer).await
}

#[derive(Clone, Copy)]
enum Ending {
    RolledBack,
    Dropped,
    Severed,
}

/// A transaction with a claim in it that ends without a commit; twice, for what the first one left may only show then.
async fn ended<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path, ending: Ending) -> Verdict {
    let id = stage.message();
    stage.scene(format!("message {id}, claimed by {path} and not committed"));
    for _ in 0..2 {
        let Some(tx) = consumer.begin_with(id, path).await? else {
            return Err(stage.failure(
                "Claim::New, for no transaction that claimed it has committed",
                "Claim::Duplicate",
                SUSPECT,
            ));
        };
        match ending {
            Ending::RolledBack => consumer.rollback(tx).await?,
            Ending::Dropped => {
                stage.step("dropped the transaction");
                drop(tx);
            }
            Ending::Severed => {
                stage.step("severed the transaction's connection");
                stage.fixed(stage.fixture().sever(&consumer.store, tx).await, "sever")?;
            }
        }
    }
    consumer.expect_new(&Job::new(id).by(path), SUSPECT).await
}

/// A claim whose future is dropped after its first poll, its second, and so on.
async fn dropped_claim<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path) -> Verdict {
    for polls in 1..=MOST_POLLS {
        let id = stage.message();
        stage.scene(format!("message {id}, whose claim by {path} is cancelled"));
        let mut tx = consumer.begin().await?;
        stage.step(format!(
            "polled the claim's future at most {polls} time(s) and dropped it"
        ));
        let deliveries = [Delivery::new(id)];
        let ended = match path {
            Path::Single => {
                let claim = consumer.store.try_claim(&mut tx, &consumer.group, deliveries[0]);
                poll_at_most(polls, claim).await.is_some()
            }
            Path::Batch => {
                let claims = consumer.store.try_claim_batch(&mut tx, &consumer.group, &deliveries);
                poll_at_most(polls, claims).await.is_some()
            }
        };
        stage.step("dropped the transaction");
        drop(tx);
        consumer.expect_new(&Job::new(id).by(path), SUSPECT).await?;
        if ended {
            break;
        }
    }
    Ok(())
}

/// A claim that is dropped while it waits for another transaction, if this store lets it wait.
async fn dropped_wait<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path) -> Verdict {
    let id = stage.message();
    stage.scene(format!(
        "message {id}, claimed by {path}, with a rival that gives up waiting for it"
    ));
    let mut tx = consumer.begin().await?;
    consumer.claim_new(&mut tx, id, path).await?;
    stage.step("had a rival try the message, and drop everything after a while");
    let rival = {
        let consumer = consumer.aside();
        let patience = stage.options().glimpse();
        Rival::start(async move {
            // The pause keeps a rival that got New from committing: it gives up in every case.
            let job = Job::new(id).by(path).taking(4 * patience);
            tokio::time::timeout(patience, consumer.attempt(&job)).await.ok()
        })
    };
    stage
        .join(rival, "the rival, which gives up by itself,")
        .await?
        .transpose()?;
    consumer.rollback(tx).await?;
    consumer.expect_new(&Job::new(id).by(path), SUSPECT).await
}

/// `begin` whose future is dropped: what it left on a connection must not swallow the next transaction.
async fn dropped_begin<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    for polls in 1..=MOST_POLLS {
        let id = stage.message();
        stage.scene(format!("message {id}, claimed after a begin that was cancelled"));
        stage.step(format!(
            "polled the future of begin at most {polls} time(s) and dropped it"
        ));
        let ended = poll_at_most(polls, consumer.store.begin()).await.is_some();
        let suspect = "a transaction that a cancelled begin left open on a pooled connection, and that swallows the next \
                       one: its commit says Ok and stores nothing";
        consumer.expect_new(&Job::new(id), suspect).await?;
        consumer.expect_duplicate(&Job::new(id), suspect).await?;
        if ended {
            break;
        }
    }
    Ok(())
}
