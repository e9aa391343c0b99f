//! What is stored: the key of a record, its value, and every command that touches it.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use crc::{CRC_16_XMODEM, Crc};
use inbox_core::{ConsumerGroup, Delivery, Error, Fingerprint, MessageId, Processed, Result, check_name};
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

    /// The key of a record. It cannot be mistaken for another's: an id is 36 characters without a colon, and a group's
    /// colons, braces and percent signs are escaped, so that the one pair of braces is the tag's, which decides the slot.
    pub(crate) fn of(&self, group: &ConsumerGroup, id: MessageId) -> String {
        let mut key = format!("{}:{{", self.prefix);
        match &self.tag {
            Some(tag) => key.push_str(tag),
            // A tag of its own spreads the records over the slots of a cluster.
            None => _ = write!(key, "{id}"),
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
        _ = write!(key, ":{id}");
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

/// A duration as Redis takes it; `Builder` has bounded it.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// A claim of an open transaction: what its record will be.
#[derive(Debug, Clone)]
pub(crate) struct Claimed {
    pub(crate) key: String,
    pub(crate) fingerprint: Option<Fingerprint>,
}

impl Claimed {
    pub(crate) fn new(key: String, delivery: &Delivery) -> Self {
        Self {
            key,
            fingerprint: delivery.fingerprint(),
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
    fn names_that_would_break_a_key_are_refused() {
        for bad in ["", "a{b", "a}b", "a\nb", &"x".repeat(256)] {
            let error = Keys::new(bad.into(), None).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{bad:?}");
            assert!(Keys::new("inbox".into(), Some(bad.into())).is_err());
        }
    }
}
