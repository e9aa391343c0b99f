//! A dead letter commits with its claim, comes back whole, is listed in order, and is put back or deleted without harm.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use inbox_core::{
    DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters, Error, ErrorKind, Headers, Inbox,
    MessageId, Transactions,
};
use tokio::sync::Barrier;

use crate::consumer::{Consumer, Job, Path};
use crate::failure::in_full;
use crate::lent::Lent;
use crate::stage::{Rival, Stage, TxOf, Verdict};
use crate::{Fixture, Law};

/// How far the database's clock is moved, and how far off a time may be and still be of one side of that.
const JUMP: Duration = Duration::from_secs(2 * 60 * 60);
const TOLERANCE: Duration = Duration::from_secs(30 * 60);

/// More than any page of this law.
const ALL: NonZeroU32 = NonZeroU32::MAX;

pub(crate) async fn law<F: Fixture>(stage: &Stage<F>) -> Verdict {
    stage.scene("with a consumer and an outsider");
    let desk = Desk {
        consumer: stage.consumer("letters").await?,
        outsider: stage.consumer("letters").await?,
    };
    desk.keeps_with_the_transaction(stage).await?;
    desk.is_undone_with_the_transaction(stage).await?;
    desk.removes_with_the_transaction(stage).await?;
    desk.comes_back_whole(stage).await?;
    desk.is_replaced(stage).await?;
    desk.is_put_back(stage).await?;
    desk.of_groups(stage).await?;
    desk.is_listed(stage).await?;
    desk.is_put_back_by_two(stage).await?;
    desk.given_up_again(stage).await?;
    desk.is_put_back_through_an_inbox(stage).await?;
    desk.is_deleted(stage).await?;
    desk.has_the_stores_time(stage).await
}

/// A consumer that gives messages up, and somebody who looks at the letters on another handle.
struct Desk<F: Fixture> {
    consumer: Consumer<F>,
    outsider: Consumer<F>,
}

/// The store as one that keeps dead letters, which the suite has seen that it is.
pub(crate) fn letters<F: Fixture>(consumer: &Consumer<F>) -> Verdict<&dyn DeadLetters<Tx = TxOf<F>>> {
    consumer.store.dead_letters().ok_or_else(|| {
        consumer.stage.failure(
            "Transactions::dead_letters answers Some, as it did before",
            "None",
            "an answer that depends on the handle",
        )
    })
}

impl<F: Fixture> Desk<F> {
    /// A letter with something in every field.
    fn letter(consumer: &Consumer<F>, id: MessageId, error: &str) -> DeadLetter {
        let mut info = DeadLetterInfo::new(consumer.key(id), error);
        info.subject = "orders.\"eu\".Zürich".into();
        info.origin = "stream ORDERS, sequence 17; o'clock".into();
        info.attempts = 5;
        info.published_at = Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_796_000_000_123));
        DeadLetter::new(info, Headers::from_iter([("Nats-Msg-Id", "order-17")]), "a payload")
    }

    async fn add(&self, tx: &mut TxOf<F>, letter: &DeadLetter) -> Verdict {
        let stage = &self.consumer.stage;
        stage.step(format!(
            "added a dead letter of message {} in the transaction, in the state {:?}",
            letter.info.key.id(),
            letter.info.state.as_str()
        ));
        let added = letters(&self.consumer)?.add_dead_letter(tx, letter).await;
        stage.sound(added, "a letter can be added")
    }

    /// Claims the messages and gives them up, in one transaction.
    async fn give_up(&self, consumer: &Consumer<F>, given_up: &[DeadLetter]) -> Verdict {
        let mut tx = consumer.begin().await?;
        for letter in given_up {
            let claim = consumer.claim(&mut tx, letter.info.key.id(), Path::Single).await?;
            self.consumer.stage.ensure(
                !claim.is_in_flight(),
                "New or Duplicate, for nobody else is at the message",
                "Claim::InFlight",
                "a claim that was committed, and whose lock stayed",
            )?;
            self.add(&mut tx, letter).await?;
        }
        consumer.commit(tx).await
    }

    async fn find(&self, consumer: &Consumer<F>, id: MessageId) -> Verdict<Option<DeadLetter>> {
        let (key, desk) = (consumer.key(id), letters(consumer)?);
        let expected = "the look-up of a dead letter answers";
        consumer.patiently(expected, || desk.find_dead_letter(&key)).await
    }

    /// The letter as an outsider finds it, which must be there.
    async fn found(&self, id: MessageId, suspect: &str) -> Verdict<DeadLetter> {
        let stage = &self.outsider.stage;
        stage.step(format!(
            "looked up the dead letter of message {id} through another handle"
        ));
        let found = self.find(&self.outsider, id).await?;
        found.ok_or_else(|| stage.failure("the letter", "none", suspect))
    }

    async fn expect_none(&self, id: MessageId, suspect: &str) -> Verdict {
        let stage = &self.outsider.stage;
        stage.step(format!(
            "looked up the dead letter of message {id} through another handle"
        ));
        let found = self.find(&self.outsider, id).await?;
        stage.ensure(
            found.is_none(),
            "no letter",
            found.map_or_else(String::new, |letter| shown(&letter.info)),
            suspect,
        )?;
        let listed = self.list(&self.outsider, None, ALL).await?;
        stage.ensure(
            listed.iter().all(|info| info.key.id() != id),
            "no letter of the message in the group's list",
            "one",
            "a list that is kept beside the letters, and is not kept with them",
        )
    }

    async fn list(
        &self,
        consumer: &Consumer<F>,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Verdict<Vec<DeadLetterInfo>> {
        let (group, desk) = (consumer.group.clone(), letters(consumer)?);
        let expected = "the list of dead letters answers";
        consumer
            .patiently(expected, || desk.list_dead_letters(&group, after, limit))
            .await
    }

    /// The letter of a message in the group's list, which must have it once.
    async fn listed(&self, id: MessageId) -> Verdict<DeadLetterInfo> {
        let stage = &self.outsider.stage;
        stage.step("listed the group's dead letters");
        let mut infos = self.list(&self.outsider, None, ALL).await?;
        infos.retain(|info| info.key.id() == id);
        stage.ensure(
            infos.len() == 1,
            format!("the letter of message {id} once in the list"),
            format!("{} times", infos.len()),
            "a list that is kept beside the letters and not with them: an entry that is missing, or that an earlier letter \
             of the message left",
        )?;
        Ok(infos.remove(0))
    }

    async fn start(&self, consumer: &Consumer<F>, id: MessageId) -> Verdict<Option<DeadLetter>> {
        consumer.stage.step(format!("started to put message {id} back"));
        let (key, desk) = (consumer.key(id), letters(consumer)?);
        let expected = "putting back can be started";
        consumer.patiently(expected, || desk.start_put_back(&key)).await
    }

    async fn finish(&self, info: &DeadLetterInfo) -> Verdict<bool> {
        let stage = &self.consumer.stage;
        stage.step(format!("finished putting message {} back", info.key.id()));
        let desk = letters(&self.consumer)?;
        let expected = "putting back can be finished";
        self.consumer.patiently(expected, || desk.finish_put_back(info)).await
    }

    async fn expect_finish(&self, info: &DeadLetterInfo, removed: bool, suspect: &str) -> Verdict {
        let answer = self.finish(info).await?;
        self.consumer
            .stage
            .ensure(answer == removed, removed.to_string(), answer, suspect)
    }

    async fn delete(&self, id: MessageId) -> Verdict<bool> {
        let stage = &self.consumer.stage;
        stage.step(format!("deleted the dead letter of message {id}"));
        let (key, desk) = (self.consumer.key(id), letters(&self.consumer)?);
        let expected = "a letter can be deleted";
        self.consumer
            .patiently(expected, || desk.delete_dead_letter(&key))
            .await
    }

    async fn expect_record(&self, id: MessageId, suspect: &str) -> Verdict {
        self.consumer.expect_duplicate(&Job::new(id), suspect).await.map(drop)
    }

    /// Claim and letter become visible together, at the commit.
    async fn keeps_with_the_transaction(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        let suspect = "a letter that is written beside the transaction: it is there though the message is not given up";
        stage.scene(format!("message {id}, given up"));
        let letter = Self::letter(&self.consumer, id, "it failed");
        let mut tx = self.consumer.begin().await?;
        self.consumer.claim_new(&mut tx, id, Path::Single).await?;
        self.add(&mut tx, &letter).await?;
        stage.step("had an outsider look up the letter before the commit");
        let mut early = {
            let (outsider, key) = (self.outsider.aside(), self.outsider.key(id));
            Rival::start(async move {
                let found = letters(&outsider)?.find_dead_letter(&key).await;
                Ok(found.is_ok_and(|letter| letter.is_some()))
            })
        };
        // Where the look-up waits for the transaction, it sees what was committed.
        if let Some(seen) = early.within(stage.options().glimpse()).await {
            stage.ensure(!seen?, "none yet", "the letter", suspect)?;
        }
        self.consumer.commit(tx).await?;
        let suspect = "a letter that the commit does not store: the message is recorded as processed and is nowhere";
        self.found(id, suspect).await?;
        self.listed(id).await?;
        self.expect_record(id, "a letter that commits without the claim").await
    }

    /// However the transaction ends, the letter is undone with the claim.
    async fn is_undone_with_the_transaction(&self, stage: &Stage<F>) -> Verdict {
        let suspect =
            "a letter that outlives its transaction: it says of a message that comes again that it was given up";
        for ending in ["rolled back", "dropped", "severed"] {
            let id = stage.message();
            stage.scene(format!("message {id}, given up in a transaction that is {ending}"));
            let mut tx = self.consumer.begin().await?;
            self.consumer.claim_new(&mut tx, id, Path::Single).await?;
            self.add(&mut tx, &Self::letter(&self.consumer, id, "it failed"))
                .await?;
            match ending {
                "rolled back" => self.consumer.rollback(tx).await?,
                "dropped" => {
                    stage.step("dropped the transaction");
                    drop(tx);
                }
                _ => {
                    stage.step("severed the transaction's connection");
                    stage.fixed(stage.fixture().sever(&self.consumer.store, tx).await, "sever")?;
                }
            }
            self.expect_none(id, suspect).await?;
            let claim = "the claim survived, though its letter did not";
            self.consumer.expect_new(&Job::new(id), claim).await?;
        }
        Ok(())
    }

    /// A letter is removed with the transaction, and what is said last about it counts.
    async fn removes_with_the_transaction(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        stage.scene(format!("message {id}, whose letter is removed in a transaction"));
        let mut letter = Self::letter(&self.consumer, id, "under way");
        letter.info.state = DeadLetterState::OnTrial;
        self.give_up(&self.consumer, std::slice::from_ref(&letter)).await?;
        let on_trial = self.found(id, "a letter that the commit does not store").await?;
        stage.ensure(
            on_trial.info.state == DeadLetterState::OnTrial,
            "the state that it was added with, OnTrial",
            format!("{:?}", on_trial.info.state),
            "a state that is not stored: a message whose last attempt killed its consumer looks like one given up",
        )?;
        let mut tx = self.consumer.begin().await?;
        self.remove(&mut tx, id).await?;
        self.consumer.rollback(tx).await?;
        self.found(id, "a removal that does not wait for the commit").await?;

        let mut tx = self.consumer.begin().await?;
        self.remove(&mut tx, id).await?;
        self.add(&mut tx, &Self::letter(&self.consumer, id, "given up after all"))
            .await?;
        self.consumer.commit(tx).await?;
        self.found(id, "a removal that outruns a letter added after it").await?;

        let mut tx = self.consumer.begin().await?;
        self.add(&mut tx, &letter).await?;
        self.remove(&mut tx, id).await?;
        self.consumer.commit(tx).await?;
        self.expect_none(
            id,
            "a letter that is removed in the transaction that added it, and stays",
        )
        .await?;
        let mut tx = self.consumer.begin().await?;
        stage.step("removed it once more, though it is not there");
        self.remove(&mut tx, id).await?;
        self.consumer.commit(tx).await
    }

    async fn remove(&self, tx: &mut TxOf<F>, id: MessageId) -> Verdict {
        let stage = &self.consumer.stage;
        stage.step(format!("removed the letter of message {id} in the transaction"));
        let key = self.consumer.key(id);
        let removed = letters(&self.consumer)?.remove_dead_letter(tx, &key).await;
        stage.sound(removed, "a letter can be removed")
    }

    /// Every field of a letter comes back as it was given, but for its time.
    async fn comes_back_whole(&self, stage: &Stage<F>) -> Verdict {
        let mut headers = Headers::from_iter([
            ("zeta", "first"),
            ("Alpha", "with \"quotes\", a\ttab and é"),
            ("zeta", "second"),
            ("ZETA", ""),
            ("", "of no name"),
        ]);
        headers.push("binary", [0_u8, 255, 10, 13, 128]);
        headers.push("zeta", "second");
        let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
        let mut full = Self::letter(
            &self.consumer,
            stage.message(),
            "could not: 'quoted' \"twice\"; DROP TABLE letters; --\n  caused by: 100 % of \\ and\r\n\t{braces} 你好 🦀",
        );
        full.headers = headers;
        full.payload = every_byte;
        full.info.attempts = 70_000;
        full.info.origin = "x".repeat(3_000);
        let mut empty = DeadLetter::new(
            DeadLetterInfo::new(self.consumer.key(stage.message()), ""),
            Headers::new(),
            "",
        );
        empty.info.died_at = SystemTime::now() + Duration::from_secs(365 * 24 * 60 * 60);
        for (what, letter) in [("everything in it", full), ("nothing in it", empty)] {
            let id = letter.info.key.id();
            stage.scene(format!("message {id}, given up, with a letter that has {what}"));
            self.give_up(&self.consumer, std::slice::from_ref(&letter)).await?;
            let found = self.found(id, "a letter that the commit does not store").await?;
            self.same(&letter, &found)?;
            let listed = self.listed(id).await?;
            stage.ensure(
                listed == found.info,
                "the same in the list as in the look-up",
                format!("{} in the list, {} in the look-up", shown(&listed), shown(&found.info)),
                "two places that keep the same, of which one was forgotten; or two ways of reading a time",
            )?;
        }
        Ok(())
    }

    /// What was found is what was given, but for the time.
    fn same(&self, given: &DeadLetter, found: &DeadLetter) -> Verdict {
        let stage = &self.consumer.stage;
        let ensure = |same: bool, field: &str, expected: String, saw: String, suspect: &str| {
            let (expected, saw) = (format!("{field} {expected}"), format!("{field} {saw}"));
            stage.ensure(same, expected, saw, suspect)
        };
        let (a, b) = (&given.info, &found.info);
        let text = "text that is cut, trimmed or put together with other text";
        ensure(
            a.key == b.key,
            "key",
            format!("{:?}", a.key),
            format!("{:?}", b.key),
            text,
        )?;
        ensure(
            a.state == b.state,
            "state",
            format!("{:?}", a.state),
            format!("{:?}", b.state),
            "a state that is not stored",
        )?;
        for (field, a, b) in [
            ("subject", &a.subject, &b.subject),
            ("origin", &a.origin, &b.origin),
            ("error", &a.error, &b.error),
        ] {
            ensure(a == b, field, format!("{a:?}"), format!("{b:?}"), text)?;
        }
        ensure(
            a.attempts == b.attempts,
            "attempts",
            a.attempts.to_string(),
            b.attempts.to_string(),
            "a number that is not stored, or in too small a type",
        )?;
        ensure(
            a.published_at == b.published_at,
            "published_at",
            format!("{:?}", a.published_at),
            format!("{:?}", b.published_at),
            "a time that is cut to whole seconds, moved by a time zone, or made up where there is none",
        )?;
        ensure(
            given.headers == found.headers,
            "headers",
            format!("{:?}", given.headers),
            format!("{:?}", found.headers),
            "headers that are kept as a map, which has each name once and in its own order; or values taken for text",
        )?;
        ensure(
            given.payload == found.payload,
            "payload",
            differing(&given.payload, &found.payload),
            differing(&found.payload, &given.payload),
            "a payload that is taken for text, or cut",
        )
    }

    /// A later letter of the same message takes the place of an earlier one, whatever state that was in.
    async fn is_replaced(&self, stage: &Stage<F>) -> Verdict {
        let suspect = "the first letter of a message that stays when a later one comes (insert-if-missing), or of which \
                       something stays";
        for putting_back in [false, true] {
            let id = stage.message();
            stage.scene(format!("message {id}, given up twice"));
            let mut first = Self::letter(&self.consumer, id, "the first reason, which is a long one");
            first.headers.push("only", "in the first");
            first.payload = vec![7; 300];
            self.give_up(&self.consumer, std::slice::from_ref(&first)).await?;
            let before = self.found(id, "a letter that the commit does not store").await?;
            if putting_back {
                self.start(&self.consumer, id).await?;
            }
            stage.step("waited a moment, so that the two have different times");
            tokio::time::sleep(Duration::from_millis(20)).await;
            let mut second = Self::letter(&self.consumer, id, "the second");
            second.info.attempts = 9;
            second.info.published_at = None;
            second.payload = b"less".to_vec();
            self.give_up(&self.consumer, std::slice::from_ref(&second)).await?;
            let after = self.found(id, suspect).await?;
            stage.ensure(
                after.info.error == second.info.error,
                "the second letter",
                shown(&after.info),
                suspect,
            )?;
            self.same(&second, &after)?;
            let at = |letter: &DeadLetter| letter.info.died_at;
            stage.ensure(
                at(&after) >= at(&before),
                "the second letter's time, no earlier than the first's",
                format!("{:?}, after {:?}", at(&after), at(&before)),
                suspect,
            )?;
            stage.ensure(
                self.listed(id).await? == after.info,
                "the second letter in the list",
                "another",
                suspect,
            )?;
        }
        Ok(())
    }

    /// Letters of one group are nobody else's, whatever the groups are called.
    async fn of_groups(&self, stage: &Stage<F>) -> Verdict {
        let (id, suspect) = (
            stage.message(),
            "letters without their group, or with a group that is folded, trimmed or taken for a pattern",
        );
        let names = ["mail", "Mail", "mail ", "mai*", "mai%", "mail:x", "{mail}"];
        stage.scene(format!("message {id}, given up by the groups {names:?}"));
        let groups: Vec<_> = names.iter().map(|name| self.consumer.of_group(name)).collect();
        for (index, group) in groups.iter().enumerate() {
            let letter = Self::letter(group, id, names[index]);
            self.give_up(group, std::slice::from_ref(&letter)).await?;
        }
        for (group, name) in groups.iter().zip(names) {
            stage.step(format!("listed the letters of {name:?}"));
            let listed = self.list(group, None, ALL).await?;
            let errors: Vec<&str> = listed.iter().map(|info| info.error.as_str()).collect();
            stage.ensure(
                errors == [name] && listed[0].key == group.key(id),
                format!("the one letter of {name:?}"),
                format!("{errors:?}"),
                suspect,
            )?;
            let found = self.find(group, id).await?;
            stage.ensure(
                found.as_ref().is_some_and(|letter| letter.info.error == name),
                format!("the letter of {name:?}"),
                found.map_or("none".into(), |letter| shown(&letter.info)),
                suspect,
            )?;
        }
        let (first, others) = (&groups[0], &groups[1..]);
        if let Some(letter) = self.start(first, id).await? {
            self.expect_finish(&letter.info, true, suspect).await?;
        }
        for (group, name) in others.iter().zip(&names[1..]) {
            stage.step(format!("looked at what {name:?} has of the message"));
            let (letter, record) = (self.find(group, id).await?, group.find(id).await?);
            stage.ensure(
                letter.is_some_and(|letter| letter.info.state == DeadLetterState::Dead) && record.is_some(),
                format!(
                    "the letter and the record of {name:?}, for only {:?} was put back",
                    names[0]
                ),
                "one of them is changed or gone",
                suspect,
            )?;
        }
        Ok(())
    }

    /// The list is complete and in order, in pages of any size, also where many letters have one time.
    async fn is_listed(&self, stage: &Stage<F>) -> Verdict {
        let desk = Self {
            consumer: self.consumer.of_group("pages"),
            outsider: self.outsider.of_group("pages"),
        };
        let (transactions, in_one) = (3, stage.options().scale(12, 120));
        let count = transactions * in_one;
        stage.scene(format!(
            "{count} messages of a group, given up in {transactions} transactions, so that many letters have one time"
        ));
        let mut ids = Vec::new();
        for number in 0..transactions {
            let given_up: Vec<DeadLetter> = stage
                .messages(in_one)
                .into_iter()
                .map(|id| Self::letter(&desk.consumer, id, &format!("in transaction {number}")))
                .collect();
            ids.extend(given_up.iter().map(|letter| letter.info.key.id()));
            desk.give_up(&desk.consumer, &given_up).await?;
        }
        stage.scene(format!("{count} dead letters of a group, many of them with one time"));
        stage.step("listed them all at once");
        let whole = desk.list(&desk.outsider, None, ALL).await?;
        let mut listed: Vec<MessageId> = whole.iter().map(|info| info.key.id()).collect();
        listed.sort_unstable();
        ids.sort_unstable();
        stage.ensure(
            listed == ids,
            format!("the {count} letters of the group"),
            format!("{} letters, not each of them once", listed.len()),
            "a list that loses letters, or has them twice",
        )?;
        let in_order = whole.windows(2).all(|pair| pair[0].place() < pair[1].place());
        stage.ensure(
            in_order,
            "the oldest first, and by id among those of one time",
            "another order",
            "an order by time alone, by id alone or by the letters' own keys; or a time that is reported less precisely \
             than it is sorted by",
        )?;
        for size in [1, 5, 7] {
            let size = NonZeroU32::MIN.saturating_add(size - 1);
            stage.step(format!(
                "listed them in pages of {size}, each behind the last one of the page before"
            ));
            let mut pages: Vec<DeadLetterInfo> = Vec::new();
            loop {
                let after = pages.last().map(DeadLetterInfo::place);
                let page = desk.list(&desk.outsider, after, size).await?;
                stage.ensure(
                    page.len() <= size.get() as usize,
                    format!("a page of at most {size}"),
                    format!("{}", page.len()),
                    "a limit that is not looked at",
                )?;
                let past_the_end = pages.len() + page.len() > count;
                if page.is_empty() || past_the_end {
                    pages.extend(page);
                    break;
                }
                pages.extend(page);
            }
            let places: Vec<DeadLetterPlace> = pages.iter().map(DeadLetterInfo::place).collect();
            let wanted: Vec<DeadLetterPlace> = whole.iter().map(DeadLetterInfo::place).collect();
            stage.ensure(
                places == wanted,
                "the same letters in the same order as all at once",
                format!("{} letters of {count} in pages, or in another order", places.len()),
                "pages that go by the time alone, so that letters with the time of the page's last one are left out or \
                 come twice",
            )?;
        }
        stage.step("deleted the last one of a page, and asked for the page behind it");
        let (gone, next) = (&whole[4], &whole[5]);
        desk.delete(gone.key.id()).await?;
        let page = desk.list(&desk.outsider, Some(gone.place()), NonZeroU32::MIN).await?;
        stage.ensure(
            page.first() == Some(next),
            "the letter that stood behind it",
            page.first().map_or("none".into(), shown),
            "pages that need the letter which the page before ended with",
        )
    }

    /// Putting back: the record is forgotten once, the letter stays until the end, and everything may be done again.
    async fn is_put_back(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        stage.scene(format!("message {id}, given up and put back"));
        stage.step("started to put it back, though it was never given up");
        let none = self.start(&self.consumer, id).await?;
        stage.ensure(none.is_none(), "no letter", "a letter", "a letter out of nothing")?;
        let given = Self::letter(&self.consumer, id, "it failed");
        self.give_up(&self.consumer, std::slice::from_ref(&given)).await?;
        let dead = self.found(id, "a letter that the commit does not store").await?;
        self.expect_finish(
            &dead.info,
            false,
            "a letter that is removed though nobody has put it back",
        )
        .await?;
        self.found(id, "a letter that is removed though nobody has put it back")
            .await?;

        let mut expected = dead;
        expected.info.state = DeadLetterState::PuttingBack;
        let started = self.start(&self.consumer, id).await?;
        stage.ensure(
            started.as_ref() == Some(&expected),
            "the whole letter, in the state PuttingBack",
            started.map_or("none".into(), |letter| shown(&letter.info)),
            "an answer from before the change, or without headers and payload",
        )?;
        let suspect = "a letter that is removed when putting back begins, or whose state is not stored: a program that dies \
                       before it has published loses the message";
        let kept = self.found(id, suspect).await?;
        stage.ensure(kept == expected, "that letter", shown(&kept.info), suspect)?;
        stage.ensure(
            self.listed(id).await? == expected.info,
            "the state PuttingBack in the list too",
            "another",
            suspect,
        )?;
        let suspect = "a record that is not forgotten: the message that is put back is skipped as a duplicate";
        self.consumer.expect_new(&Job::new(id), suspect).await?;

        stage.step("the program that put it back died; another one begins anew");
        let again = self.start(&self.outsider, id).await?;
        stage.ensure(
            again.as_ref() == Some(&expected),
            "the same letter once more",
            again.map_or("none".into(), |letter| shown(&letter.info)),
            "a letter that can be put back once only",
        )?;
        let suspect =
            "a record that is forgotten again, after the message was published and handled: it is handled twice";
        self.expect_record(id, suspect).await?;
        let suspect = "a letter that is not removed at the end";
        self.expect_finish(&expected.info, true, suspect).await?;
        self.expect_none(id, suspect).await?;
        self.expect_finish(
            &expected.info,
            false,
            "an answer that does not look at what was removed",
        )
        .await?;
        self.expect_record(id, "a record that is forgotten when the letter is removed")
            .await
    }

    /// Two programs that put one message back: whoever is first forgets the record, and nobody does so again.
    async fn is_put_back_by_two(&self, stage: &Stage<F>) -> Verdict {
        let suspect = "a look at the state and a change of it in two steps: the second one forgets the record of a message \
                       that the first one has put back, and that was handled";
        for _ in 0..stage.options().scale(6, 60) {
            let id = stage.message();
            let effect = format!("of {id}");
            stage.scene(format!(
                "message {id}, put back by four programs at once, each of which handles it then"
            ));
            self.give_up(&self.consumer, &[Self::letter(&self.consumer, id, "it failed")])
                .await?;
            let (start, job) = (Arc::new(Barrier::new(4)), Job::new(id).with_effect(&effect));
            let rivals = [&self.consumer, &self.outsider, &self.consumer, &self.outsider].map(|consumer| {
                let (consumer, job, start) = (consumer.aside(), job.clone(), Arc::clone(&start));
                Rival::start(async move {
                    start.wait().await;
                    let (key, desk) = (consumer.key(id), letters(&consumer)?);
                    let expected = "putting back can be started";
                    let letter = consumer.patiently(expected, || desk.start_put_back(&key)).await?;
                    consumer.handle(&job).await?;
                    Ok(letter)
                })
            });
            let mut found = 0;
            for rival in rivals {
                found += usize::from(stage.join(rival, "each of them").await??.is_some());
            }
            stage.ensure(found == 4, "the letter for each", format!("for {found}"), suspect)?;
            stage.expect_effects(&effect, 1, suspect).await?;
            self.expect_record(id, suspect).await?;
        }
        Ok(())
    }

    /// A message that was put back and given up again, before whoever put it back has finished.
    async fn given_up_again(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        let suspect = "a letter that is removed by its message alone: what was given up again since is lost";
        stage.scene(format!("message {id}, put back and given up again meanwhile"));
        self.give_up(&self.consumer, &[Self::letter(&self.consumer, id, "the first time")])
            .await?;
        let Some(first) = self.start(&self.consumer, id).await? else {
            return Err(stage.failure("the letter", "none", "a letter that the commit does not store"));
        };
        stage.step("waited a moment, so that the two have different times");
        tokio::time::sleep(Duration::from_millis(20)).await;
        self.give_up(&self.outsider, &[Self::letter(&self.outsider, id, "the second time")])
            .await?;
        self.expect_finish(&first.info, false, suspect).await?;
        let second = self.found(id, suspect).await?;
        self.start(&self.outsider, id).await?;
        if second.info.died_at != first.info.died_at {
            self.expect_finish(&first.info, false, suspect).await?;
            self.found(id, suspect).await?;
        }
        let mut now = second.info;
        now.state = DeadLetterState::PuttingBack;
        self.expect_finish(&now, true, "a letter that is not removed at the end")
            .await
    }

    /// What applications call, with a broker that refuses the first time.
    async fn is_put_back_through_an_inbox(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        stage.scene(format!("message {id}, put back through Inbox::put_back"));
        self.give_up(&self.consumer, &[Self::letter(&self.consumer, id, "it failed")])
            .await?;
        let inbox = Inbox::new(Lent::of(&self.consumer), self.consumer.group.clone());
        let inbox = stage.sound(inbox, "an inbox over the store")?;
        stage.step("put it back, with a broker that refuses it");
        let refused = inbox
            .put_back(id, async |_: &DeadLetter| Err::<(), _>("no route"))
            .await;
        let told = match &refused {
            Ok(found) => format!("Ok({found})"),
            Err(error) => in_full(error),
        };
        stage.ensure(
            refused.is_err_and(|error| error.kind() == ErrorKind::Broker),
            "the broker's error",
            told,
            "the call itself failed, so its error is the clue",
        )?;
        let kept = self
            .found(id, "a letter that is removed though it was not published")
            .await?;
        stage.ensure(
            kept.info.state == DeadLetterState::PuttingBack,
            "the state PuttingBack",
            format!("{:?}", kept.info.state),
            "a state that is not stored",
        )?;
        stage.step("put it back again, with a broker that takes it");
        let published = Arc::new(std::sync::Mutex::new(None));
        let broker = Arc::clone(&published);
        let put_back = inbox
            .put_back(id, async move |letter: &DeadLetter| {
                *broker.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(letter.clone());
                Ok::<_, Error>(())
            })
            .await;
        let put_back = stage.sound(put_back, "true, for it was put back")?;
        let published = published
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        stage.ensure(
            put_back && published.as_ref() == Some(&kept),
            "true, and the letter given to the broker",
            format!(
                "{put_back}, and {}",
                if published.is_some() { "a letter" } else { "none" }
            ),
            "a letter that can be put back once only",
        )?;
        self.expect_none(id, "a letter that is not removed at the end").await?;
        let suspect = "a record that is not forgotten: the message that is put back is skipped as a duplicate";
        self.consumer.expect_new(&Job::new(id), suspect).await?;
        stage.step("put it back once more");
        let answer = inbox.put_back(id, async |_: &DeadLetter| Ok::<_, Error>(())).await;
        let found = stage.sound(answer, "false, for there is no letter any more")?;
        stage.ensure(!found, "false", "true", "an answer that does not look for the letter")
    }

    /// A deleted letter is gone, and its message stays processed.
    async fn is_deleted(&self, stage: &Stage<F>) -> Verdict {
        let id = stage.message();
        stage.scene(format!("message {id}, given up, whose letter is deleted"));
        self.give_up(&self.consumer, &[Self::letter(&self.consumer, id, "it failed")])
            .await?;
        let suspect = "an answer that does not look at what was deleted";
        let deleted = self.delete(id).await?;
        stage.ensure(deleted, "true", "false", suspect)?;
        self.expect_none(id, "a letter that was deleted and is still there")
            .await?;
        let deleted = self.delete(id).await?;
        stage.ensure(!deleted, "false, for it is gone", "true", suspect)?;
        let suspect = "a record that is deleted with the letter: the message's next delivery is handled";
        self.expect_record(id, suspect).await
    }

    /// The store says when a message was given up, and looks neither at the letter nor at the consumer's clock.
    async fn has_the_stores_time(&self, stage: &Stage<F>) -> Verdict {
        let (given, after) = (stage.message(), stage.message());
        stage.scene(format!(
            "message {given}, given up with a letter that has a time already, and message {after}, given up after the \
             database's clock has moved"
        ));
        let mut letter = Self::letter(&self.consumer, given, "it failed");
        letter.info.died_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let early = self.died_ahead(&letter).await?;
        let record = self.consumer.find(given).await?.and_then(|record| record.processed_at);
        let found = self.found(given, "a letter that the commit does not store").await?;
        if let Some(processed_at) = record {
            let apart = apart(processed_at, found.info.died_at);
            stage.ensure(
                apart < TOLERANCE,
                "about the time of the record that was committed with it",
                format!("{apart:?} away from it"),
                "the time that the letter came with, or one that is moved by a time zone",
            )?;
        }
        if stage.fixture().cannot(Law::Clock).is_some() {
            return Ok(());
        }
        stage.step(format!("moved the database's clock forward by {JUMP:?}"));
        match stage.fixture().advance_clock(&self.consumer.store, JUMP).await {
            Ok(()) => {}
            // The law about the clock says so.
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(()),
            Err(error) => return stage.fixed(Err(error), "advance_clock"),
        }
        let late = self
            .died_ahead(&Self::letter(&self.consumer, after, "it failed"))
            .await?;
        let (jumped, tolerance) = (late - early - signed(JUMP), signed(TOLERANCE));
        stage.ensure(
            (-tolerance..=tolerance).contains(&jumped),
            format!("a letter about {} s ahead of the consumer's clock", signed(JUMP)),
            format!("it is {} s ahead", late - early),
            "the consumer's clock says when the message was given up; or the time that the letter came with does",
        )
    }

    /// Gives a message up; by how many seconds the letter's time is ahead of this process's clock.
    async fn died_ahead(&self, letter: &DeadLetter) -> Verdict<i64> {
        self.give_up(&self.consumer, std::slice::from_ref(letter)).await?;
        let now = SystemTime::now();
        let suspect = "a letter that the commit does not store";
        let at = self.found(letter.info.key.id(), suspect).await?.info.died_at;
        Ok(match at.duration_since(now) {
            Ok(ahead) => signed(ahead),
            Err(behind) => -signed(behind.duration()),
        })
    }
}

fn signed(duration: Duration) -> i64 {
    i64::try_from(duration.as_secs()).unwrap_or(i64::MAX)
}

fn apart(a: SystemTime, b: SystemTime) -> Duration {
    a.duration_since(b).unwrap_or_else(|behind| behind.duration())
}

/// A letter, as a failure shows it.
fn shown(info: &DeadLetterInfo) -> String {
    let error: String = info.error.chars().take(60).collect();
    format!(
        "a letter in the state {:?} that died at {:?} of {error:?}",
        info.state.as_str(),
        info.died_at
    )
}

/// A payload, as a failure shows it beside another.
fn differing(payload: &[u8], other: &[u8]) -> String {
    let at = payload.iter().zip(other).take_while(|(a, b)| a == b).count();
    let shown = &payload[at..payload.len().min(at + 8)];
    format!("of {} bytes, with {shown:?} from byte {at} on", payload.len())
}
