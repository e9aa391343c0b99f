//! A claim's fingerprint is stored with it and reported with every `Duplicate`.

use inbox_core::{Claim, Delivery, ErrorKind, Fingerprint, MessageId};

use crate::Fixture;
use crate::consumer::{Consumer, Path, Shown, answers, found};
use crate::stage::{Stage, Verdict};

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer");
    let consumer = stage.consumer("fingerprint").await?;
    for claimed_by in Path::BOTH {
        for stored in [Some(Fingerprint::of("one")), None] {
            kept(stage, &consumer, stage.message(), stored, claimed_by).await?;
        }
    }
    in_a_batch(stage, &consumer).await?;
    after_rollback(stage, &consumer).await
}

fn delivery(id: MessageId, fingerprint: Option<Fingerprint>) -> Delivery {
    let delivery = Delivery::new(id);
    match fingerprint {
        Some(fingerprint) => delivery.with_fingerprint(fingerprint),
        None => delivery,
    }
}

/// The claim is a `Duplicate` that reports this fingerprint.
fn reports<F: Fixture>(stage: &Stage<F>, claim: &Claim, stored: Option<Fingerprint>, suspect: &str) -> Verdict {
    let reported = match claim {
        Claim::Duplicate(processed) => Some(processed.fingerprint),
        Claim::New | Claim::InFlight(_) => None,
    };
    let shown = |fingerprint: Option<Fingerprint>| {
        fingerprint.map_or_else(|| "none".to_owned(), |fingerprint| fingerprint.to_string())
    };
    stage.ensure(
        reported == Some(stored),
        format!(
            "Claim::Duplicate with the fingerprint that was stored: {}",
            shown(stored)
        ),
        match reported {
            Some(reported) => format!("Claim::Duplicate with the fingerprint: {}", shown(reported)),
            None => Shown(claim).to_string(),
        },
        suspect,
    )
}

const SUSPECT: &str = "a fingerprint that one of the two paths does not write, or does not read; or one that a later \
                       delivery overwrites: a producer's reuse of an id then hides a message";

async fn kept<F: Fixture>(
    stage: &Stage<F>,
    consumer: &Consumer<F>,
    id: MessageId,
    stored: Option<Fingerprint>,
    claimed_by: Path,
) -> Verdict {
    stage.scene(format!("message {id}, claimed by {claimed_by}"));
    let given = [Some(Fingerprint::of("one")), Some(Fingerprint::of("another")), None];
    let mut tx = consumer.begin().await?;
    consumer.claim_new(&mut tx, delivery(id, stored), claimed_by).await?;
    for path in Path::BOTH {
        for given in given {
            // The claim of this very transaction reports what it will store.
            let claim = consumer.claim(&mut tx, delivery(id, given), path).await?;
            reports(stage, &claim, stored, SUSPECT)?;
        }
    }
    consumer.commit(tx).await?;
    for path in Path::BOTH {
        for given in given {
            let mut tx = consumer.begin().await?;
            let delivery = delivery(id, given);
            let claim = consumer.claim(&mut tx, delivery, path).await?;
            reports(stage, &claim, stored, SUSPECT)?;
            consumer.commit(tx).await?;
            let differs = stored.is_some() && given.is_some() && stored != given;
            let mismatch = claim.verified(&delivery).err().map(|error| error.kind());
            stage.ensure(
                mismatch == differs.then_some(ErrorKind::PayloadMismatch),
                if differs { "a payload mismatch" } else { "no error" },
                mismatch.map_or_else(|| "no error".into(), |kind| format!("an error of the kind \"{kind}\"")),
                "the version of inbox-core, which compares",
            )?;
        }
    }
    stage.step("looked for the record");
    let record = consumer.find(id).await?;
    stage.ensure(
        record.as_ref().is_some_and(|record| record.fingerprint == stored),
        match stored {
            Some(stored) => format!("a record with the fingerprint {stored}"),
            None => "a record without a fingerprint".into(),
        },
        found(record.as_ref()),
        "find does not read the fingerprint",
    )
}

async fn in_a_batch<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let mut ids = stage.messages(3);
    // Against the order in which a database may look at them, so that a mix-up shows.
    ids.sort_unstable_by(|one, other| other.cmp(one));
    let fingerprints = [Some(Fingerprint::of("a")), None, Some(Fingerprint::of("c"))];
    stage
        .scene("a batch of three messages, the second without a fingerprint, and the first a second time with another");
    let mut batch: Vec<Delivery> = ids
        .iter()
        .zip(fingerprints)
        .map(|(id, given)| delivery(*id, given))
        .collect();
    batch.push(delivery(ids[0], Some(Fingerprint::of("not a"))));
    let mut tx = consumer.begin().await?;
    stage.step("claimed the batch");
    let claims = consumer.claim_batch(&mut tx, &batch).await?;
    stage.ensure(
        claims[..3].iter().all(Claim::is_new),
        "New for the first three",
        answers(&claims),
        "a fingerprint that counts as part of the key",
    )?;
    reports(stage, &claims[3], fingerprints[0], SUSPECT)?;
    consumer.commit(tx).await?;
    let mut tx = consumer.begin().await?;
    stage.step("claimed the batch again");
    let claims = consumer.claim_batch(&mut tx, &batch).await?;
    for (claim, stored) in claims
        .iter()
        .zip([fingerprints[0], fingerprints[1], fingerprints[2], fingerprints[0]])
    {
        reports(stage, claim, stored, SUSPECT)?;
    }
    consumer.rollback(tx).await
}

/// What is rolled back leaves no fingerprint either.
async fn after_rollback<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let id = stage.message();
    let stored = Fingerprint::of("the second");
    stage.scene(format!(
        "message {id}, rolled back with one fingerprint and committed with another"
    ));
    for (text, commit) in [("the first", false), ("the second", true)] {
        let mut tx = consumer.begin().await?;
        let delivery = id.with_payload(text);
        consumer.claim_new(&mut tx, delivery, Path::Single).await?;
        if commit {
            consumer.commit(tx).await?;
        } else {
            consumer.rollback(tx).await?;
        }
    }
    let mut tx = consumer.begin().await?;
    let claim = consumer.claim(&mut tx, id, Path::Batch).await?;
    reports(stage, &claim, Some(stored), "a fingerprint that survived its rollback")?;
    consumer.rollback(tx).await
}
