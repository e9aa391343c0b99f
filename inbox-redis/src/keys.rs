//! What is stored: the key of a record, its value, and every command that touches it.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crc::{CRC_16_XMODEM, Crc};
use inbox_core::{
    ConsumerGroup, DeadLetter, DeadLetterPlace, DeadLetterState, Delivery, Error, Fingerprint, Key, MessageId,
    Processed, Result, check_name,
};
use redis::{Cmd, cmd};
use uuid::Uuid;

/// How the keys of one store are made: `PREFIX:{TAG}:GROUP:ID`.
#[derive(Debug, Clone)]
pub(crate) struct Keys {
    prefix: String,
    tag: Option<String>,
}

impl Keys {
    pub(crate) const DEFAULT_PREFIX: &str = "inbox";

    pub(crate) fn new(prefix: String, tag: Option<String>) -> Result<Self> {
        checked("prefix", &prefix)?;
        if let Some(tag) = &tag {
            checked("tag", tag)?;
        }
        Ok(Self { prefix, tag })
    }

    pub(crate) const fn has_tag(&self) -> bool {
        self.tag.is_some()
    }

    /// The key of a record. It cannot be mistaken for another's: an id is 36 characters without a colon, and a group's
    /// colons, braces and percent signs are escaped, so that the one pair of braces is the tag's, which decides the slot.
    pub(crate) fn of(&self, group: &ConsumerGroup, id: MessageId) -> String {
        let mut key = self.of_group(group, Some(id));
        _ = write!(key, ":{id}");
        key
    }

    /// The key of a dead letter: its record's, and a word behind it.
    pub(crate) fn letter(&self, key: &Key) -> String {
        let mut letter = self.of(key.group(), key.id());
        letter.push_str(":letter");
        letter
    }

    /// The key of the list of a group's dead letters. Without a tag it has an empty one, which no store can have.
    pub(crate) fn letters(&self, group: &ConsumerGroup) -> String {
        let mut key = self.of_group(group, None);
        key.push_str(":letters");
        key
    }

    /// What the keys of a group, or of one of its messages, begin with.
    fn of_group(&self, group: &ConsumerGroup, id: Option<MessageId>) -> String {
        let mut key = format!("{}:{{", self.prefix);
        match (&self.tag, id) {
            (Some(tag), _) => key.push_str(tag),
            // A tag of its own spreads the records over the slots of a cluster.
            (None, Some(id)) => _ = write!(key, "{id}"),
            (None, None) => {}
        }
        key.push_str("}:");
        for character in group.as_str().chars() {
            match character {
                '%' => key.push_str("%25"),
                ':' => key.push_str("%3A"),
                '{' => key.push_str("%7B"),
                '}' => key.push_str("%7D"),
                other => key.push(other),
            }
        }
        key
    }
}

fn checked(what: &str, name: &str) -> Result<()> {
    check_name(what, name, 255)?;
    if name.contains(['{', '}']) {
        let why = "it has a brace in it, which would change the slot of every key; leave it out";
        return Err(Error::invalid(what, name, why));
    }
    Ok(())
}

/// The slot of a key in a cluster: the CRC-16 (XMODEM) of its tag, or of all of it, modulo 16384.
/// <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>
pub(crate) fn slot(key: &[u8]) -> u16 {
    const XMODEM: Crc<u16> = Crc::<u16>::new(&CRC_16_XMODEM);
    let tag = key.iter().position(|byte| *byte == b'{').and_then(|open| {
        let inside = &key[open + 1..];
        let close = inside.iter().position(|byte| *byte == b'}')?;
        (close > 0).then(|| &inside[..close])
    });
    XMODEM.checksum(tag.unwrap_or(key)) % 16_384
}

/// What stands under a record's key, as a person reads it: `2026-12-01T04:00:00.123Z claim=TOKEN`, and
/// ` payload=FINGERPRINT` behind it where there is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Value {
    Record {
        token: Uuid,
        processed: Processed,
    },
    /// A store is finding out what became of a lost commit: nobody else's business, and gone in a moment.
    Fence,
}

/// Stands for a moment where a record would, while a store finds out what became of a lost commit.
const FENCE: &str = "fence";

/// For how long a fence stands: the shortest that there is.
pub(crate) const FENCE_STANDS: Duration = Duration::from_millis(1);

impl Value {
    /// What the values of one transaction begin with.
    pub(crate) fn head(at: SystemTime, token: Uuid) -> String {
        format!("{} claim={}", humantime::format_rfc3339_millis(at), token.simple())
    }

    pub(crate) fn write(head: &str, fingerprint: Option<Fingerprint>) -> Cow<'_, str> {
        match fingerprint {
            None => Cow::Borrowed(head),
            Some(fingerprint) => Cow::Owned(format!("{head} payload={fingerprint}")),
        }
    }

    /// `None` if it is none of ours.
    pub(crate) fn read(text: &str) -> Option<Self> {
        if text == FENCE {
            return Some(Self::Fence);
        }
        let mut words = text.split(' ');
        let at = humantime::parse_rfc3339(words.next()?).ok()?;
        let token = Uuid::try_parse(words.next()?.strip_prefix("claim=")?).ok()?;
        let fingerprint = match words.next() {
            None => None,
            Some(word) => {
                let bytes = Uuid::try_parse(word.strip_prefix("payload=")?).ok()?;
                Some(Fingerprint::from_bytes(bytes.into_bytes()))
            }
        };
        let processed = Processed::at(at).with_fingerprint(fingerprint);
        words.next().is_none().then_some(Self::Record { token, processed })
    }
}

/// What a claim sends: the watch first, so that whatever happens to the key after the look makes EXEC fail.
pub(crate) fn watch(keys: &[String]) -> Cmd {
    of_all("WATCH", keys)
}

/// One look for all keys.
pub(crate) fn look(keys: &[String]) -> Cmd {
    of_all("MGET", keys)
}

/// A command about many keys, which are thousands in a large batch.
fn of_all(name: &str, keys: &[String]) -> Cmd {
    let bytes = name.len() + keys.iter().map(String::len).sum::<usize>();
    let mut command = Cmd::with_capacity(keys.len() + 1, bytes);
    command.arg(name).arg(keys);
    command
}

/// Writes a record: in one command, so that it can never be left without its time to live; and only where there is
/// none, so that its reply tells whether the watch has held.
pub(crate) fn record(key: &str, value: &str, retention: Duration) -> Cmd {
    // The longest number has 20 digits. A batch makes hundreds of these: none of them is to grow piece by piece.
    let mut set = Cmd::with_capacity(6, key.len() + value.len() + "SETNXPX".len() + 20);
    set.arg("SET")
        .arg(key)
        .arg(value)
        .arg("NX")
        .arg("PX")
        .arg(millis(retention));
    set
}

/// Touches a watched key where there is nothing under it, so that a commit of which nothing was heard can no longer
/// happen. It is gone again in a millisecond, by itself: deleting it could hit a record that came after it.
pub(crate) fn fence(key: &str) -> Cmd {
    let mut set = cmd("SET");
    set.arg(key).arg(FENCE).arg("NX").arg("PX").arg(millis(FENCE_STANDS));
    set
}

pub(crate) fn get(key: &str) -> Cmd {
    let mut get = cmd("GET");
    get.arg(key);
    get
}

pub(crate) fn delete(key: &str) -> Cmd {
    let mut delete = cmd("DEL");
    delete.arg(key);
    delete
}

/// What a dead letter's hash is made of, but for headers and payload: what a list shows.
pub(crate) const INFO_FIELDS: [&str; 7] = [
    "state",
    "subject",
    "origin",
    "error",
    "attempts",
    "published_at",
    "died_at",
];

/// Writes the letter ARGV[1] of the time ARGV[2], whose other fields are behind that, to the hash KEYS[1] and to the list
/// KEYS[2]; takes the place of an earlier one out of both. What can fail stands first, where nothing is written yet.
const KEEP_LETTER: &str = "-- inbox: keep a dead letter
local old = redis.call('HGET', KEYS[1], 'died_at')
redis.call('ZADD', KEYS[2], 0, ARGV[2] .. ' ' .. ARGV[1])
if old and old ~= ARGV[2] then redis.call('ZREM', KEYS[2], old .. ' ' .. ARGV[1]) end
redis.call('DEL', KEYS[1])
redis.call('HSET', KEYS[1], 'died_at', ARGV[2], unpack(ARGV, 3))
return 1";

/// Removes the letter ARGV[1] from the hash KEYS[1] and the list KEYS[2]; says whether there was one.
const REMOVE_LETTER: &str = "-- inbox: remove a dead letter
local at = redis.call('HGET', KEYS[1], 'died_at')
if at then redis.call('ZREM', KEYS[2], at .. ' ' .. ARGV[1]) end
return redis.call('DEL', KEYS[1])";

/// Turns the letter KEYS[1] to the state ARGV[1] and forgets the record KEYS[2], unless it has that state; answers it.
const START_PUT_BACK: &str = "-- inbox: put a dead letter back
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {} end
if state ~= ARGV[1] then
  redis.call('HSET', KEYS[1], 'state', ARGV[1])
  redis.call('DEL', KEYS[2])
end
return redis.call('HGETALL', KEYS[1])";

/// Removes the letter ARGV[1] from the hash KEYS[1] and the list KEYS[2], if it is in the state ARGV[2] and of the time
/// ARGV[3]; says whether it was.
const FINISH_PUT_BACK: &str = "-- inbox: remove a dead letter that was put back
local now = redis.call('HMGET', KEYS[1], 'state', 'died_at')
if now[1] ~= ARGV[2] or now[2] ~= ARGV[3] then return 0 end
redis.call('ZREM', KEYS[2], ARGV[3] .. ' ' .. ARGV[1])
return redis.call('DEL', KEYS[1])";

/// A script that goes with its text, so that a server which has forgotten its scripts needs no care.
fn script(text: &str, keys: [&str; 2]) -> Cmd {
    let mut eval = cmd("EVAL");
    eval.arg(text).arg(2).arg(&keys);
    eval
}

/// What happens to a dead letter at the commit.
#[derive(Debug, Clone)]
pub(crate) enum LetterChange {
    Keep(Box<DeadLetter>),
    Remove(MessageId),
}

/// A dead letter's change in an open transaction.
#[derive(Debug, Clone)]
pub(crate) struct Letter {
    pub(crate) hash: String,
    pub(crate) list: String,
    pub(crate) change: LetterChange,
}

impl Letter {
    /// The command, given the time of the commit.
    pub(crate) fn command(&self, at: SystemTime) -> Cmd {
        let keys = [self.hash.as_str(), &self.list];
        let letter = match &self.change {
            LetterChange::Remove(id) => return remove_letter(keys, *id),
            LetterChange::Keep(letter) => letter,
        };
        let info = &letter.info;
        let mut keep = script(KEEP_LETTER, keys);
        keep.arg(info.key.id().to_string())
            .arg(humantime::format_rfc3339_micros(at).to_string())
            .arg("state")
            .arg(info.state.as_str())
            .arg("subject")
            .arg(&info.subject)
            .arg("origin")
            .arg(&info.origin)
            .arg("error")
            .arg(&info.error)
            .arg("attempts")
            .arg(info.attempts)
            .arg("headers")
            .arg(letter.headers.to_json())
            .arg("payload")
            .arg(letter.payload.as_slice());
        // A time before 1970 or after 9999 is what a broker says that knows none.
        if let Some(published_at) = info.published_at.filter(|at| writable(*at)) {
            keep.arg("published_at")
                .arg(humantime::format_rfc3339_nanos(published_at).to_string());
        }
        keep
    }
}

pub(crate) fn remove_letter(keys: [&str; 2], id: MessageId) -> Cmd {
    let mut remove = script(REMOVE_LETTER, keys);
    remove.arg(id.to_string());
    remove
}

pub(crate) fn start_put_back(letter: &str, record: &str) -> Cmd {
    let mut start = script(START_PUT_BACK, [letter, record]);
    start.arg(DeadLetterState::PuttingBack.as_str());
    start
}

pub(crate) fn finish_put_back(keys: [&str; 2], id: MessageId, died_at: &str) -> Cmd {
    let mut finish = script(FINISH_PUT_BACK, keys);
    finish
        .arg(id.to_string())
        .arg(DeadLetterState::PuttingBack.as_str())
        .arg(died_at);
    finish
}

/// A whole letter.
pub(crate) fn letter(hash: &str) -> Cmd {
    let mut get = cmd("HGETALL");
    get.arg(hash);
    get
}

/// A letter's [`INFO_FIELDS`].
pub(crate) fn letter_info(hash: &str) -> Cmd {
    let mut get = cmd("HMGET");
    get.arg(hash).arg(&INFO_FIELDS);
    get
}

/// The places of the next letters of a list.
pub(crate) fn page(list: &str, start: &str, limit: usize) -> Cmd {
    let mut range = cmd("ZRANGE");
    range
        .arg(list)
        .arg(start)
        .arg("+")
        .arg("BYLEX")
        .arg("LIMIT")
        .arg(0)
        .arg(limit);
    range
}

/// Where [`page`] begins: behind `after`, or at the first letter. `None`: behind the end of all time.
pub(crate) fn page_start(after: Option<DeadLetterPlace>) -> Option<String> {
    let Some(DeadLetterPlace { died_at, id }) = after else {
        return Some("-".into());
    };
    if died_at < UNIX_EPOCH {
        return Some("-".into());
    }
    if !writable(died_at) {
        return None;
    }
    let time = humantime::format_rfc3339_micros(died_at);
    Some(match exact(died_at) {
        Some(time) => format!("({time} {id}"),
        // Between two microseconds: behind every letter of the first of them.
        None => format!("({time}~"),
    })
}

/// The message that a place in a list is of, and its time as it is written.
pub(crate) fn read_place(place: &str) -> Option<(&str, MessageId)> {
    let (died_at, id) = place.split_once(' ')?;
    let id = MessageId::from_uuid(Uuid::try_parse(id).ok()?).ok()?;
    Some((died_at, id))
}

/// A time as letters have it, if it is one that they can have: to the microsecond.
pub(crate) fn exact(at: SystemTime) -> Option<String> {
    let text = writable(at).then(|| humantime::format_rfc3339_micros(at).to_string())?;
    (humantime::parse_rfc3339(&text).ok()? == at).then_some(text)
}

/// Whether a time has a year of four digits, from 1970 on.
fn writable(at: SystemTime) -> bool {
    const YEAR_10_000: Duration = Duration::from_secs(253_402_300_800);
    at.duration_since(UNIX_EPOCH).is_ok_and(|since| since < YEAR_10_000)
}

/// A duration as Redis takes it; `Builder` has bounded it.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Far longer than a lost commit is asked about.
const WITNESS_LIVES: Duration = Duration::from_secs(60 * 60);

/// A claim of an open transaction: what its record will be.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    pub(crate) key: String,
    pub(crate) fingerprint: Option<Fingerprint>,
    /// Where it is not the retention: how long the record lives.
    pub(crate) lives: Option<Duration>,
}

impl Claimed {
    /// What a transaction without a claim is found out by, if nothing is heard of its commit: a record of no message.
    pub(crate) fn witness(letter: &str, token: Uuid) -> Self {
        Self {
            key: format!("{letter}:{}", token.simple()),
            fingerprint: None,
            lives: Some(WITNESS_LIVES),
        }
    }

    pub(crate) fn new(key: String, delivery: &Delivery) -> Self {
        Self {
            key,
            fingerprint: delivery.fingerprint(),
            lives: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use inbox_core::ErrorKind;

    use super::*;

    fn keys(tag: Option<&str>) -> Keys {
        Keys::new("inbox".into(), tag.map(Into::into)).unwrap()
    }

    #[test]
    fn slots_are_those_of_the_cluster_specification() {
        // CRC-16 of "123456789" is 0x31C3, as the specification's reference implementation says.
        assert_eq!(slot(b"123456789"), 0x31c3);
        assert_eq!(slot(b"{123456789}:x"), 0x31c3);
        assert_ne!(slot(b"foo{}{bar}"), slot(b"bar"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot(b"{bar"));
        assert_eq!(slot(b"foo{bar}{zap}"), slot(b"bar"));
    }

    #[test]
    fn a_groups_braces_and_colons_change_neither_the_slot_nor_anothers_key() {
        let id = MessageId::new("m").unwrap();
        let group = |name: &str| ConsumerGroup::new(name).unwrap();
        let plain = keys(Some("t")).of(&group("g"), id);
        assert_eq!(plain, format!("inbox:{{t}}:g:{id}"));
        for name in ["{evil}", "a:b", "}{", "{}", "100%"] {
            let key = keys(Some("t")).of(&group(name), id);
            assert_eq!(slot(key.as_bytes()), slot(b"t"), "{key}");
            assert_ne!(key, plain);
        }
        assert_ne!(keys(None).of(&group("a:b"), id), keys(None).of(&group("a%3Ab"), id));
        assert_eq!(
            slot(keys(None).of(&group("g"), id).as_bytes()),
            slot(id.to_string().as_bytes())
        );
    }

    #[test]
    fn values_are_read_as_they_were_written() {
        let (token, at) = (Uuid::new_v4(), UNIX_EPOCH + Duration::from_millis(1_796_000_000_123));
        for fingerprint in [None, Some(Fingerprint::of("x"))] {
            let head = Value::head(at, token);
            let text = Value::write(&head, fingerprint);
            let processed = Processed::at(at).with_fingerprint(fingerprint);
            assert_eq!(Value::read(&text), Some(Value::Record { token, processed }));
        }
        for foreign in [
            "",
            "1",
            "done",
            "2026-12-01T04:00:00.123Z",
            "2026-12-01T04:00:00.123Z claim=x",
        ] {
            assert_eq!(Value::read(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn letters_and_lists_of_any_group_have_keys_of_their_own_in_the_tags_slot() {
        let id = MessageId::new("m").unwrap();
        let mut seen = std::collections::HashSet::new();
        for name in ["g", "g:letters", "{g}", "{}", "g%3Aletters", "letters", "g *"] {
            let key = Key::new(ConsumerGroup::new(name).unwrap(), id);
            for tag in [None, Some("t")] {
                let keys = keys(tag);
                let (record, letter) = (keys.of(key.group(), id), keys.letter(&key));
                let list = keys.letters(key.group());
                if tag.is_some() {
                    assert_eq!(slot(letter.as_bytes()), slot(b"t"), "{letter}");
                    assert_eq!(slot(list.as_bytes()), slot(b"t"), "{list}");
                }
                for key in [record, letter, list] {
                    assert!(seen.insert(key.clone()), "{key}");
                }
            }
        }
    }

    #[test]
    fn pages_begin_behind_any_time() {
        let id = MessageId::new("m").unwrap();
        let start = |died_at| page_start(Some(DeadLetterPlace { died_at, id }));
        assert_eq!(page_start(None).as_deref(), Some("-"));
        assert_eq!(start(UNIX_EPOCH - Duration::from_secs(1)).as_deref(), Some("-"));
        assert_eq!(start(UNIX_EPOCH + Duration::from_secs(1 << 40)), None);
        let at = UNIX_EPOCH + Duration::from_micros(1_796_000_000_000_001);
        let exactly = start(at).unwrap();
        let time = exact(at).unwrap();
        assert_eq!(exactly, format!("({time} {id}"));
        assert_eq!(read_place(&exactly[1..]), Some((time.as_str(), id)));
        let between = start(at + Duration::from_nanos(1)).unwrap();
        let next = exact(at + Duration::from_micros(1)).unwrap();
        assert!(exactly < between && between < format!("({next}"));
        assert_eq!(exact(at + Duration::from_nanos(1)), None);
    }

    #[test]
    fn names_that_would_break_a_key_are_refused() {
        for bad in ["", "a{b", "a}b", "a\nb", &"x".repeat(256)] {
            let error = Keys::new(bad.into(), None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
            assert!(Keys::new("inbox".into(), Some(bad.into())).is_err());
        }
    }
}
