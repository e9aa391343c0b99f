//! [`DeadLetter`]: a message that was given up, kept beside the inbox; and [`DeadLetters`], what a store does with them.

use std::num::NonZeroU32;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;

use crate::{BoxError, ConsumerGroup, Error, ErrorKind, Headers, Inbox, InboxStore, Key, MessageId, Result};

/// A message that was given up: what it was, and why.
///
/// It stands in the inbox's own database, stored in the transaction that also records the message as processed, so that
/// a further delivery of it is a duplicate, and there is never a moment in which it is neither on the broker nor here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetter {
    /// All but headers and payload.
    pub info: DeadLetterInfo,
    /// The message's headers.
    pub headers: Headers,
    /// The message's payload, of whatever size the broker lets through.
    pub payload: Vec<u8>,
}

impl DeadLetter {
    /// A letter for a store to keep.
    pub fn new(info: DeadLetterInfo, headers: Headers, payload: impl Into<Vec<u8>>) -> Self {
        Self {
            info,
            headers,
            payload: payload.into(),
        }
    }
}

/// A [`DeadLetter`] without headers and payload: what a list shows.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetterInfo {
    /// Which message, of which group. At most one letter is kept of each.
    pub key: Key,
    /// How far it has come.
    pub state: DeadLetterState,
    /// The subject, topic or routing key that the message was published to.
    pub subject: String,
    /// Where the broker had it, in the broker's terms: stream and sequence, topic and partition and offset.
    pub origin: String,
    /// Why it was given up: the last error, with what caused it.
    pub error: String,
    /// How often it was delivered, by the broker's count.
    pub attempts: u32,
    /// When it was published, by the broker's clock, if the broker says.
    pub published_at: Option<SystemTime>,
    /// When it was given up, by the store's clock, as precisely as the store keeps times. What is given to
    /// [`add_dead_letter`](DeadLetters::add_dead_letter) here is not looked at.
    pub died_at: SystemTime,
}

impl DeadLetterInfo {
    /// What is known of a message that is given up because of `error`.
    pub fn new(key: Key, error: impl Into<String>) -> Self {
        Self {
            key,
            state: DeadLetterState::Dead,
            subject: String::new(),
            origin: String::new(),
            error: error.into(),
            attempts: 0,
            published_at: None,
            died_at: SystemTime::UNIX_EPOCH,
        }
    }

    /// Where it stands in the list of its group.
    pub const fn place(&self) -> DeadLetterPlace {
        DeadLetterPlace {
            died_at: self.died_at,
            id: self.key.id(),
        }
    }
}

/// How far a [`DeadLetter`] has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadLetterState {
    /// Its last attempt was begun, and nothing was heard of how it ended: it is under way, or ended with its process. Put
    /// down before that attempt, so that a message which kills its consumer every time is not lost.
    OnTrial,
    /// Given up.
    Dead,
    /// It is being put back: its record is forgotten, and it may stand on the broker again. Stays so if the program that put
    /// it back died in the middle; putting it back again is safe.
    PuttingBack,
}

impl DeadLetterState {
    /// As stores keep it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::OnTrial => "on trial",
            Self::Dead => "dead",
            Self::PuttingBack => "putting back",
        }
    }

    /// Reads what [`as_str`](Self::as_str) wrote.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Store`] if it is anything else: a newer version of this library, or somebody's hand.
    pub fn from_text(text: &str) -> Result<Self> {
        [Self::OnTrial, Self::Dead, Self::PuttingBack]
            .into_iter()
            .find(|state| state.as_str() == text)
            .ok_or_else(|| {
                let message = format!("a dead letter is in a state that this version does not know: {text:?}");
                Error::new(ErrorKind::Store, message)
            })
    }
}

/// Where a letter stands in the list of its group: by the time it was given up, and by id within one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeadLetterPlace {
    /// When it was given up.
    pub died_at: SystemTime,
    /// Which message.
    pub id: MessageId,
}

impl DeadLetterPlace {
    /// This place in a store that keeps times as whole ticks since 1970, rounded down: a letter is behind this place exactly
    /// if the pair of its own time and id is greater than this pair.
    ///
    /// A time between two ticks becomes the end of the earlier one, so that no letter is skipped and none comes twice,
    /// however precise the time is. Times that do not fit become the first or last that does.
    #[must_use]
    pub fn in_ticks(&self, tick: Duration) -> (i64, MessageId) {
        let tick = i128::try_from(tick.as_nanos()).unwrap_or(i128::MAX).max(1);
        let distance = |duration: Duration| i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX);
        let nanos = match self.died_at.duration_since(UNIX_EPOCH) {
            Ok(since) => distance(since),
            Err(before) => -distance(before.duration()),
        };
        let id = if nanos.rem_euclid(tick) == 0 {
            self.id
        } else {
            MessageId::MAX
        };
        let ticks = nanos.div_euclid(tick);
        let limit = if ticks < 0 { i64::MIN } else { i64::MAX };
        (i64::try_from(ticks).unwrap_or(limit), id)
    }
}

/// A store that keeps dead letters in the database that it keeps its records in.
///
/// Applications do not call this trait; they have [`Inbox`]'s methods. A store that implements it says so in
/// [`Transactions::dead_letters`](crate::Transactions::dead_letters).
#[async_trait]
pub trait DeadLetters: InboxStore {
    /// Keeps `letter` in `tx`, in the place of an earlier one of the same key, whatever state that was in. Commits and is
    /// undone with `tx`. Its [`died_at`](DeadLetterInfo::died_at) becomes the store's time.
    ///
    /// # Errors
    ///
    /// As [`InboxStore::try_claim`].
    async fn add_dead_letter(&self, tx: &mut Self::Tx, letter: &DeadLetter) -> Result<()>;

    /// Removes the letter of `key` in `tx`, if there is one.
    ///
    /// # Errors
    ///
    /// As [`InboxStore::try_claim`].
    async fn remove_dead_letter(&self, tx: &mut Self::Tx, key: &Key) -> Result<()>;

    /// The committed letter of `key`.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>>;

    /// At most `limit` of a group's committed letters, oldest first ([`DeadLetterPlace`]'s order): those behind `after`, or
    /// the first ones.
    ///
    /// A letter's time may be that of its transaction's work, not of its commit: one whose transaction commits after a page
    /// was read can stand in that page, and who reads on from there misses it. The next list from the start has it.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>>;

    /// In **one** transaction: forgets the record of `key` and turns the letter's state to
    /// [`PuttingBack`](DeadLetterState::PuttingBack). Where it has that state already, changes nothing: the message may have
    /// been published and handled since, and its record must stand. Answers the letter as it is then; `None` if there is
    /// none.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>>;

    /// Removes the letter of `info`'s key if it is still that one: in the state
    /// [`PuttingBack`](DeadLetterState::PuttingBack) and given up at that time. A letter of the same message that was given up
    /// again since stays. Says whether it was removed.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool>;

    /// Removes the letter of `key`, and leaves the message's record alone. Says whether there was one.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn delete_dead_letter(&self, key: &Key) -> Result<bool>;
}

/// Dead letters of the inbox's group.
impl<S: DeadLetters> Inbox<S> {
    /// A page of this group's dead letters, oldest first: those behind `after`, the [`place`](DeadLetterInfo::place) of the
    /// last one of the page before.
    ///
    /// # Errors
    ///
    /// As [`DeadLetters::list_dead_letters`].
    pub async fn dead_letters(&self, after: Option<DeadLetterPlace>, limit: NonZeroU32) -> Result<Vec<DeadLetterInfo>> {
        self.store.list_dead_letters(&self.group, after, limit).await
    }

    /// This group's dead letter of a message, whole.
    ///
    /// # Errors
    ///
    /// As [`DeadLetters::find_dead_letter`].
    pub async fn dead_letter(&self, id: MessageId) -> Result<Option<DeadLetter>> {
        self.store.find_dead_letter(&self.key(id)).await
    }

    /// Puts a dead letter back: the inbox forgets that the message was processed, `publish` publishes it again, and then the
    /// letter is removed. `false` if there is no such letter.
    ///
    /// `publish` must publish the message with its id ([`DeadLetterInfo::key`]), and return only when the broker has said
    /// that it has it. A program that dies in the middle, or a `publish` that fails, leaves the letter, and to put it back
    /// again is safe: the record is forgotten only the first time, so a message that did come through and was handled is
    /// then a duplicate.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Broker`] with what `publish` returned as its source, or that itself if it is one of ours; and those of
    /// [`DeadLetters::start_put_back`].
    pub async fn put_back<E>(
        &self,
        id: MessageId,
        publish: impl AsyncFnOnce(&DeadLetter) -> Result<(), E>,
    ) -> Result<bool>
    where
        E: Into<BoxError>,
    {
        let Some(letter) = self.store.start_put_back(&self.key(id)).await? else {
            return Ok(false);
        };
        if let Err(error) = publish(&letter).await {
            return Err(match error.into().downcast::<Error>() {
                Ok(own) => *own,
                Err(foreign) => Error::new(
                    ErrorKind::Broker,
                    format!(
                        "message {id} could not be published: {foreign}; its dead letter is kept, put it back again"
                    ),
                )
                .with_source(foreign),
            });
        }
        self.store.finish_put_back(&letter.info).await?;
        Ok(true)
    }

    /// Deletes a dead letter for good; the message stays recorded as processed. Says whether there was one.
    ///
    /// # Errors
    ///
    /// As [`DeadLetters::delete_dead_letter`].
    pub async fn delete_dead_letter(&self, id: MessageId) -> Result<bool> {
        self.store.delete_dead_letter(&self.key(id)).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_between_two_ticks_is_the_end_of_the_earlier_one() {
        let id = MessageId::new("a").unwrap();
        let milli = Duration::from_millis(1);
        let place = |died_at| DeadLetterPlace { died_at, id }.in_ticks(milli);
        let nano = Duration::from_nanos(1);
        assert_eq!(place(UNIX_EPOCH + 5 * milli), (5, id));
        assert_eq!(place(UNIX_EPOCH + 5 * milli + nano), (5, MessageId::MAX));
        assert_eq!(place(UNIX_EPOCH + 6 * milli - nano), (5, MessageId::MAX));
        assert_eq!(place(UNIX_EPOCH - 5 * milli), (-5, id));
        assert_eq!(place(UNIX_EPOCH - 5 * milli + nano), (-5, MessageId::MAX));
        assert_eq!(place(UNIX_EPOCH - nano), (-1, MessageId::MAX));
    }
}
