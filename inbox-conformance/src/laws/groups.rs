//! Groups are independent, and neither groups nor ids that differ in anything at all are confused.

use std::collections::BTreeSet;

use inbox_core::{Delivery, MessageId};

use crate::Fixture;
use crate::consumer::{Consumer, Job, Path, Shown, found};
use crate::stage::{Rival, Stage, Verdict, id_of};

const CONFUSED: &str = "two keys that differ are one to the store, so the second message is lost: a key without the group, \
                        a column that compares without case or trailing space, one that cuts or pads, or texts glued \
                        together";

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer");
    let consumer = stage.consumer("groups").await?;
    for path in Path::BOTH {
        distinct_groups(stage, &consumer, path).await?;
    }
    glued(stage, &consumer).await?;
    distinct_ids(stage, &consumer).await?;
    independent_while_open(stage, &consumer).await
}

/// Names that some database or some escaping takes for one another.
fn names() -> Vec<String> {
    let mut names: Vec<String> = [
        "billing",
        "Billing",
        "BILLING",
        "billing ",
        " billing",
        "billing  ",
        "bil ling",
        "caf\u{e9}",
        "cafe\u{301}",
        "cafe",
        "stra\u{df}e",
        "strasse",
        "\u{130}",
        "i",
        "I",
        "\u{131}",
        "\u{ff42}illing",
        "bill\u{200b}ing",
        "\u{1f4b0}",
        "\u{1f4b6}",
        "0",
        "00",
        "0.0",
        "null",
        "NULL",
        "%",
        "_",
        "*",
        "?",
        "b*",
        "b%",
        "[b]illing",
        "'",
        "''",
        "\"",
        "\"\"",
        "`",
        "\\",
        "\\\\",
        ";",
        "--",
        "$1",
        "?1",
        ":group",
        ":",
        "::",
        "a:b",
        "a::b",
        "{",
        "}",
        "{}",
        "{billing}",
        "{billing}:x",
        "a/b",
        "a.b",
        "a,b",
        "a|b",
    ]
    .map(String::from)
    .to_vec();
    for length in [16, 32, 64, 100, 128, 200, 255] {
        // The same up to the last byte.
        names.push(format!("{}a", "n".repeat(length - 1)));
        names.push(format!("{}b", "n".repeat(length - 1)));
    }
    // 255 bytes that are fewer characters.
    names.push("\u{20ac}".repeat(85));
    names
}

async fn distinct_groups<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>, path: Path) -> Verdict {
    let id = stage.message();
    let names = names();
    stage.scene(format!(
        "message {id}, for {} groups that differ, in one transaction",
        names.len()
    ));
    let mut tx = consumer.begin().await?;
    for name in &names {
        stage.step(format!("claimed it for group {name:?}"));
        let claim = consumer.of_group(name).quiet_claim(&mut tx, id, path).await?;
        stage.ensure(claim.is_new(), "Claim::New", Shown(&claim), CONFUSED)?;
    }
    consumer.commit(tx).await?;
    let mut tx = consumer.begin().await?;
    for name in &names {
        stage.step(format!("claimed it for group {name:?}, after the commit"));
        let claim = consumer.of_group(name).quiet_claim(&mut tx, id, path).await?;
        stage.ensure(
            claim.is_duplicate(),
            "Claim::Duplicate",
            Shown(&claim),
            "a group that is stored under another name than it is looked up by",
        )?;
    }
    consumer.rollback(tx).await?;
    for name in &names {
        stage.step(format!("looked for the record of group {name:?}"));
        let group = consumer.of_group(name);
        let record = group.find(id).await?;
        stage.ensure(
            record.as_ref().is_some_and(|record| record.key == group.key(id)),
            format!("the record of {}", group.key(id)),
            found(record.as_ref()),
            "a group that is not read as it was written",
        )?;
    }
    Ok(())
}

/// Keys whose parts give the same text if they are put together without a boundary.
async fn glued<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let (id, other) = (stage.message(), stage.message());
    stage.scene(format!(
        "messages {id} and {other}, for groups that have an id in their name"
    ));
    let mut groups = BTreeSet::new();
    for separator in ["", ":", "/", "|", ",", " ", "-", "_"] {
        groups.insert(format!("glued{separator}{id}"));
        groups.insert(format!("glued{separator}{other}"));
        groups.insert(format!("{id}{separator}glued"));
        groups.insert(format!("glued{separator}"));
        groups.insert(format!("glued{separator}{id}{separator}{other}"));
    }
    let mut tx = consumer.begin().await?;
    for group in &groups {
        let consumer = consumer.of_group(group);
        for id in [id, other] {
            stage.step(format!("claimed message {id} for group {group:?}"));
            let claim = consumer.quiet_claim(&mut tx, id, Path::Single).await?;
            stage.ensure(claim.is_new(), "Claim::New", Shown(&claim), CONFUSED)?;
        }
    }
    consumer.commit(tx).await
}

async fn distinct_ids<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let base = 0x6ba7_b810_9dad_11d1_80b4_00c0_4fd4_30c8_u128;
    let mut ids: Vec<MessageId> = vec![id_of(base)];
    ids.extend((0..128).map(|bit| id_of(base ^ (1 << bit))));
    let long = "x".repeat(300);
    for text in [
        "A",
        "a",
        "x",
        "x ",
        " x",
        "caf\u{e9}",
        "cafe\u{301}",
        &format!("{long}1"),
        &format!("{long}2"),
        "{evil}",
        "'; DROP TABLE inbox_events; --",
    ] {
        ids.push(stage.sound(MessageId::new(text), "an id of any text")?);
    }
    for path in Path::BOTH {
        let consumer = consumer.of_group(&format!("distinct ids by {path}"));
        stage.scene(format!(
            "{} messages whose ids differ in one bit, or in their text's case and form",
            ids.len()
        ));
        let mut tx = consumer.begin().await?;
        let deliveries: Vec<Delivery> = ids.iter().copied().map(Delivery::new).collect();
        stage.step(format!("claimed them in one transaction, by {path}"));
        let claims = match path {
            Path::Batch => consumer.claim_batch(&mut tx, &deliveries).await?,
            Path::Single => {
                let mut claims = Vec::new();
                for id in &ids {
                    claims.push(consumer.quiet_claim(&mut tx, *id, path).await?);
                }
                claims
            }
        };
        consumer.commit(tx).await?;
        if let Some(wrong) = claims.iter().position(|claim| !claim.is_new()) {
            let saw = format!("{} for message {}", Shown(&claims[wrong]), ids[wrong]);
            return Err(stage.failure("Claim::New for each", saw, CONFUSED));
        }
    }
    Ok(())
}

/// Another group does not have to do with an open transaction: it gets the message.
async fn independent_while_open<F: Fixture>(stage: &Stage<F>, consumer: &Consumer<F>) -> Verdict {
    let (one, other) = (consumer.of_group("one"), consumer.of_group("other"));
    for path in Path::BOTH {
        let id = stage.message();
        stage.scene(format!(
            "message {id}, claimed by {path} for group \"one\" and not committed"
        ));
        let mut tx = one.begin().await?;
        one.claim_new(&mut tx, id, path).await?;
        stage.step("had another task handle it for group \"other\"");
        let mut rival = {
            let other = other.aside();
            Rival::start(async move { other.expect_new(&Job::new(id).by(path), CONFUSED).await })
        };
        // It may have to wait all the same, where the database has one writer.
        let early = rival.within(stage.options().glimpse()).await;
        one.commit(tx).await?;
        match early {
            Some(verdict) => verdict?,
            None => stage.join(rival, "the other group's consumer").await??,
        }
        for consumer in [&one, &other] {
            consumer.expect_duplicate(&Job::new(id).by(path), CONFUSED).await?;
        }
    }
    Ok(())
}
