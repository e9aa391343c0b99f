//! Dead letters: hashes without a time to live, and a list of each group's.

use std::collections::HashMap;
use std::num::NonZeroU32;

use async_trait::async_trait;
use inbox_core::{
    ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters, Error, ErrorKind,
    Headers, Key, Result,
};
use redis::Pipeline;

use crate::error::command_error;
use crate::keys::{self, INFO_FIELDS, Letter, LetterChange};
use crate::store::RedisInbox;
use crate::tx::RedisTx;

/// How many letters are asked for in one round trip.
const PAGE: usize = 500;

/// What a letter's hash holds.
type Fields = HashMap<String, Vec<u8>>;

impl RedisInbox {
    /// The keys of a letter and of the list that it stands in.
    fn letter_keys(&self, key: &Key) -> Result<(String, String)> {
        let list = self.letters_key(key.group())?;
        Ok((self.shared.keys.letter(key), list))
    }

    fn letters_key(&self, group: &ConsumerGroup) -> Result<String> {
        if self.shared.keeps_letters() {
            return Ok(self.shared.keys.letters(group));
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            "the server is a cluster's, where a dead letter, the list that it stands in and its record must be in one slot, \
             and this store has no tag; set one with Builder::tag",
        ))
    }
}

/// Round trips: keeping or removing a letter in a transaction has none of its own, or one if nothing was claimed before;
/// a list has two for each 500 letters; everything else has one. What is not in a transaction has a new connection.
///
/// Cancel-safe: a future that is dropped has done what it says or nothing.
#[async_trait]
impl DeadLetters for RedisInbox {
    async fn add_dead_letter(&self, tx: &mut RedisTx, letter: &DeadLetter) -> Result<()> {
        let (hash, list) = self.letter_keys(&letter.info.key)?;
        let change = LetterChange::Keep(Box::new(letter.clone()));
        tx.change_letter(Letter { hash, list, change }).await
    }

    async fn remove_dead_letter(&self, tx: &mut RedisTx, key: &Key) -> Result<()> {
        let (hash, list) = self.letter_keys(key)?;
        let change = LetterChange::Remove(key.id());
        tx.change_letter(Letter { hash, list, change }).await
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let (hash, _) = self.letter_keys(key)?;
        let fields = self.command(&keys::letter(&hash), "look up a dead letter").await?;
        read_letter(key, &hash, fields)
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        let (list, limit) = (self.letters_key(group)?, limit.get() as usize);
        let Some(mut start) = keys::page_start(after) else {
            return Ok(Vec::new());
        };
        let doing = "list dead letters";
        let mut connection = self.shared.fresh().await?;
        let mut infos = Vec::new();
        while infos.len() < limit {
            let asked = PAGE.min(limit - infos.len());
            let places: Vec<String> = keys::page(&list, &start, asked)
                .query_async(&mut connection)
                .await
                .map_err(|error| command_error(doing, error))?;
            let mut letters = Vec::with_capacity(places.len());
            let mut pipe = Pipeline::with_capacity(places.len());
            for place in &places {
                let Some((died_at, id)) = keys::read_place(place) else {
                    return Err(unreadable(&list, &format!("its entry {place:?}")));
                };
                let key = Key::new(group.clone(), id);
                let hash = self.shared.keys.letter(&key);
                pipe.add_command(keys::letter_info(&hash));
                letters.push((key, hash, died_at));
            }
            if letters.is_empty() {
                break;
            }
            let answers: Vec<Vec<Option<Vec<u8>>>> = pipe
                .query_async(&mut connection)
                .await
                .map_err(|error| command_error(doing, error))?;
            for ((key, hash, died_at), values) in letters.into_iter().zip(answers) {
                let fields = INFO_FIELDS.iter().zip(values);
                let fields: Fields = fields
                    .filter_map(|(name, value)| Some(((*name).to_owned(), value?)))
                    .collect();
                // Removed or given up again since the list was read: then it stands further behind, if anywhere.
                if fields.get("died_at").is_some_and(|at| at == died_at.as_bytes()) {
                    infos.push(read_info(&key, &hash, &fields)?);
                }
            }
            match places.last() {
                Some(place) if places.len() == asked => start = format!("({place}"),
                _ => break,
            }
        }
        Ok(infos)
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let (hash, _) = self.letter_keys(key)?;
        let start = keys::start_put_back(&hash, &self.key(key.group(), key.id()));
        let fields = self.command(&start, "start putting a dead letter back").await?;
        read_letter(key, &hash, fields)
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        let (hash, list) = self.letter_keys(&info.key)?;
        // No letter here has a time that cannot be written here.
        let Some(died_at) = keys::exact(info.died_at) else {
            return Ok(false);
        };
        let finish = keys::finish_put_back([&hash, &list], info.key.id(), &died_at);
        self.command(&finish, "finish putting a dead letter back").await
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        let (hash, list) = self.letter_keys(key)?;
        let delete = keys::remove_letter([&hash, &list], key.id());
        self.command(&delete, "delete a dead letter").await
    }
}

/// A letter by its hash; one without fields is none.
fn read_letter(key: &Key, hash: &str, mut fields: Fields) -> Result<Option<DeadLetter>> {
    if fields.is_empty() {
        return Ok(None);
    }
    let info = read_info(key, hash, &fields)?;
    let headers = Headers::from_json(text(hash, &fields, "headers")?)?;
    let payload = fields
        .remove("payload")
        .ok_or_else(|| unreadable(hash, "the field payload, which is missing,"))?;
    Ok(Some(DeadLetter::new(info, headers, payload)))
}

fn read_info(key: &Key, hash: &str, fields: &Fields) -> Result<DeadLetterInfo> {
    let time = |name| {
        let time = humantime::parse_rfc3339(text(hash, fields, name)?);
        time.map_err(|_| unreadable(hash, &format!("the field {name}")))
    };
    let mut info = DeadLetterInfo::new(key.clone(), text(hash, fields, "error")?);
    info.state = DeadLetterState::from_text(text(hash, fields, "state")?)?;
    text(hash, fields, "subject")?.clone_into(&mut info.subject);
    text(hash, fields, "origin")?.clone_into(&mut info.origin);
    info.attempts = text(hash, fields, "attempts")?
        .parse()
        .map_err(|_| unreadable(hash, "the field attempts"))?;
    if fields.contains_key("published_at") {
        info.published_at = Some(time("published_at")?);
    }
    info.died_at = time("died_at")?;
    Ok(info)
}

fn text<'f>(hash: &str, fields: &'f Fields, name: &str) -> Result<&'f str> {
    let text = fields.get(name).and_then(|bytes| std::str::from_utf8(bytes).ok());
    text.ok_or_else(|| unreadable(hash, &format!("the field {name}")))
}

fn unreadable(key: &str, what: &str) -> Error {
    Error::new(
        ErrorKind::Store,
        format!(
            "{what} of {key} cannot be read, as somebody changed what the store keeps, or a newer version of this library \
             wrote it; put it right by hand"
        ),
    )
}
