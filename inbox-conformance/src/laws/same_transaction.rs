//! A second claim of a message in one transaction is `Duplicate`.

use inbox_core::{Claim, Delivery, MessageId};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Shown, answers};
use crate::stage::{Stage, TxOf, Verdict};

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer");
    let consumer = stage.consumer("same_transaction").await?;
    for first in Path::BOTH {
        for second in Path::BOTH {
            let id = stage.message();
            stage.scene(format!("message {id}, claimed twice in one transaction"));
            for commit in [false, true] {
                let mut tx = consumer.begin().await?;
                consumer.claim_new(&mut tx, id, first).await?;
                again(stage, &consumer, &mut tx, id, second).await?;
                again(stage, &consumer, &mut tx, id, second).await?;
                if commit {
                    consumer.commit(tx).await?;
                } else {
                    consumer.rollback(tx).await?;
                }
            }
            consumer
                .expect_duplicate(&Job::new(id).by(second), "the second claim undid the first")
                .await?;
        }
    }
    amid_others(stage, &consumer).await
}

async fn again<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    tx: &mut TxOf<F>,
    id: MessageId,
    path: Path,
) -> Verdict {
    let claim = consumer.claim(tx, id, path).await?;
    let suspect = match claim {
        Claim::New => {
            "the store looks at committed records only: two deliveries of a message in one batch of work are then both \
             done"
        }
        _ => "the transaction's own claim is taken for another consumer's: the message would come again and again",
    };
    stage.ensure(claim.is_duplicate(), "Claim::Duplicate", Shown(&claim), suspect)
}

/// A batch in which one message was claimed before in the transaction.
async fn amid_others<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let ids = stage.messages(3);
    stage.scene(format!(
        "message {}, claimed alone and then in a batch of three",
        ids[1]
    ));
    let mut tx = consumer.begin().await?;
    consumer.claim_new(&mut tx, ids[1], Path::Single).await?;
    stage.step("claimed a batch with it in the middle, in the same transaction");
    let batch: Vec<Delivery> = ids.iter().copied().map(Delivery::new).collect();
    let claims = consumer.claim_batch(&mut tx, &batch).await?;
    stage.ensure(
        claims[0].is_new() && claims[1].is_duplicate() && claims[2].is_new(),
        "New, Duplicate, New",
        answers(&claims),
        "the batch looks at committed records only, or is answered in another order",
    )?;
    consumer.commit(tx).await
}
