//! Bad input is refused with an error that shows it, before anything is written.

use inbox_core::{ConsumerGroup, Error, ErrorKind, MessageId, Upkeep};

use crate::consumer::{Consumer, Job, Path};
use crate::failure::in_full;
use crate::stage::{Stage, Verdict, group_named};
use crate::{Failure, Fixture};

/// As much of a name as an error must show, at least: where it is longer, the error may shorten it.
const SHOWN: usize = 12;

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    refused_by_type(stage)?;
    stage.scene("names for what the store keeps its records in, beside an ordinary one with a record and an effect");
    let ordinary = stage.consumer("bad_input").await?;
    let id = stage.message();
    let job = Job::new(id).with_effect("ordinary");
    ordinary.expect_new(&job, "nobody has claimed it").await?;
    for name in names() {
        if !named(stage, &name).await? {
            break;
        }
        stage.step("looked at the ordinary record and effect again");
        let suspect = "the name was run as a statement, or written to the ordinary place";
        // Whatever fails here did not fail before the name.
        let seen = ordinary.expect_duplicate(&job, suspect).await;
        seen.map_err(|failure| Failure {
            suspect: suspect.into(),
            ..failure
        })?;
        stage.expect_effects("ordinary", 1, suspect).await?;
        let health = stage.sound(ordinary.store.check().await, "check looks")?;
        stage.ensure(health.is_sound(), "an ordinary place without fault", &health, suspect)?;
    }
    Ok(())
}

/// What the types of ids and groups keep out, so that no store gets to see it.
fn refused_by_type<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("ids and groups that cannot be");
    let long = "g".repeat(ConsumerGroup::MAX_BYTES + 1);
    let refusals = ["", " ", "\0", "00000000-0000-0000-0000-000000000000"]
        .map(|text| (text, MessageId::new(text).err()))
        .into_iter()
        .chain(["", "a\0b", "a\nb", &long].map(|name| (name, ConsumerGroup::new(name).err())));
    for (text, refusal) in refusals {
        stage.step(format!("made an id or a group of {text:?}"));
        stage.ensure(
            refusal
                .as_ref()
                .is_some_and(|error| error.kind() == ErrorKind::InvalidInput),
            "an error of the kind \"invalid input\"",
            refusal.as_ref().map_or_else(|| "none".into(), in_full),
            "the version of inbox-core",
        )?;
    }
    Ok(())
}

fn names() -> Vec<String> {
    let mut names: Vec<String> = [
        "",
        " ",
        "a\0b",
        "conformance\"; DROP TABLE inbox_events; --",
        "conformance'; DELETE FROM inbox_events; --",
        "conformance`; DROP TABLE inbox_events; --",
        "conformance (id); DROP TABLE inbox_events; --",
        "conformance\"",
        "\"conformance\"",
        "conformance'",
        "conformance name",
        "conformance-name",
        "conformance.name",
        "no_such_schema_here.conformance",
        "a.b.c",
        ".",
        "Conformance_Capitals",
        "1conformance",
        "select",
        "conform\u{e4}nce",
        "\u{1f4b0}",
        "conformance\nname",
        "conformance{name}",
        "conformance:*",
        "../conformance",
        "conformance\\",
        "conformance$1",
        "conformance%s",
    ]
    .map(String::from)
    .to_vec();
    names.push("n".repeat(300));
    names
}

/// Opens the store under this name: it is refused, or works. `false` if names cannot be set.
async fn named<F: Fixture>(stage: &Stage<F>, name: &str) -> Verdict<bool> {
    stage.scene(format!("the name {name:?}"));
    stage.step("opened the store under it");
    let store = match stage.fixture().connect_named(name).await {
        None => return Ok(false),
        Some(Err(error)) => return refused(stage, name, &error).map(|()| true),
        Some(Ok(store)) => store,
    };
    let consumer = Consumer {
        store: store.into(),
        stage: stage.clone(),
        group: group_named("bad_input"),
    };
    stage.step("set it up");
    if let Err(error) = consumer.store.setup().await {
        return refused(stage, name, &error).map(|()| true);
    }
    let suspect = "a name that is accepted and then not quoted, or cut, so that it names something else";
    for path in Path::BOTH {
        let job = Job::new(stage.message()).by(path);
        consumer.expect_new(&job, suspect).await?;
        consumer.expect_duplicate(&job, suspect).await?;
    }
    Ok(true)
}

fn refused<F: Fixture>(stage: &Stage<F>, name: &str, error: &Error) -> Verdict {
    stage.ensure(
        error.kind() == ErrorKind::InvalidInput,
        "a store that works under this name, or an error of the kind \"invalid input\"",
        in_full(error),
        "a name that is not checked, and that the database stumbles over: with another one, it might not",
    )?;
    let text = error.to_string();
    let head: String = name.chars().take(SHOWN).collect();
    let shown = text.contains(&head) || text.contains(&head.escape_debug().to_string());
    // Of an empty name there is nothing to show but the quotes.
    let shown = shown && (!name.trim().is_empty() || text.contains(&format!("{name:?}")) || text.contains("empty"));
    stage.ensure(
        shown,
        "an error whose text shows the name, so that it can be found in the configuration",
        in_full(error),
        "an error that says what is wrong and not with what",
    )
}
