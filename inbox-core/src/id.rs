//! [`MessageId`]: which message a delivery is a delivery of.

use std::fmt;
use std::str::FromStr;

use uuid::Uuid;

use crate::error::Shown;
use crate::{Delivery, Error, ErrorKind, Fingerprint, Result};

/// The identity of a message: 16 bytes, the same for every delivery of it and different for every other message.
///
/// | made by | from | is |
/// | --- | --- | --- |
/// | [`from_uuid`](Self::from_uuid) | a UUID | that UUID |
/// | [`new`](Self::new), `parse` | a hyphenated UUID text, in either case | that UUID |
/// | [`new`](Self::new), `parse` | any other text | the UUIDv5 (RFC 9562, section 5.5) of its UTF-8 bytes in [`NAMESPACE`](Self::NAMESPACE) |
/// | [`from_bytes`](Self::from_bytes) | bytes | as the text of the same bytes |
/// | [`from_parts`](Self::from_parts) | several texts or byte strings | the UUIDv5 of all parts, each behind its length, in [`PARTS_NAMESPACE`](Self::PARTS_NAMESPACE) |
///
/// Nothing is trimmed, folded or normalised: `"A"` and `"a"`, `"x"` and `"x "`, and the composed and the decomposed
/// form of `é` are different messages. Text of any length is accepted; all of it counts.
///
/// **Ids that stand for a missing one are refused**: empty, nothing but white space and NUL bytes, and the nil UUID in any spelling. A
/// producer that forgets to set ids would otherwise have all but one of its messages dropped in silence, as
/// duplicates.
///
/// ```
/// use inbox_core::MessageId;
///
/// let uuid = MessageId::new("e519b160-7c2d-400e-b105-586b05b70328")?;
/// assert_eq!(uuid.to_string(), "e519b160-7c2d-400e-b105-586b05b70328");
///
/// let kafka = MessageId::from_parts(["orders", "3", "1042"])?; // topic, partition, offset
/// assert_ne!(kafka, MessageId::new("orders31042")?);
///
/// assert!(MessageId::new("").is_err());
/// assert!(MessageId::new("00000000-0000-0000-0000-000000000000").is_err());
/// # Ok::<_, inbox_core::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MessageId(Uuid);

impl MessageId {
    /// The UUIDv5 namespace of a single text or byte string.
    ///
    /// It is itself the UUIDv5 of `urn:inbox-pattern:message-id` in the URL namespace of RFC 9562, so a program in
    /// another language computes an id as `uuid5(NAMESPACE, text)`.
    pub const NAMESPACE: Uuid = Uuid::from_u128(0x8790_4c99_a651_5c30_9eef_3313_5db3_2528);

    /// The UUIDv5 namespace of several parts: the UUIDv5 of `urn:inbox-pattern:message-id:parts` in the URL namespace.
    ///
    /// The name is every part in turn, each behind its length in bytes as an unsigned 64-bit big-endian number.
    pub const PARTS_NAMESPACE: Uuid = Uuid::from_u128(0x7d49_bede_15d7_5495_99fd_e508_23e2_0364);

    /// The id that no other is greater than.
    pub(crate) const MAX: Self = Self(Uuid::max());

    /// The id that `text` names: itself if it is a hyphenated UUID, else its UUIDv5.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if it is blank or the nil UUID.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        if text.chars().all(|c| c.is_whitespace() || c == '\0') {
            return Err(missing(format_args!("the text {}", Shown(text))));
        }
        Self::from_name(text.as_bytes())
    }

    /// The id that `bytes` name: what [`new`](Self::new) gives for the text of the same bytes.
    ///
    /// For the 16 bytes of a UUID, use [`from_uuid`](Self::from_uuid) with [`Uuid::from_bytes`]: here they would be a
    /// name like any other, and get another id.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if they are blank or the text of the nil UUID.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<Self> {
        let bytes = bytes.as_ref();
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::new(text),
            Err(_) => Self::from_name(bytes),
        }
    }

    /// The id that `uuid` is.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if it is the nil UUID.
    pub fn from_uuid(uuid: Uuid) -> Result<Self> {
        if uuid.is_nil() {
            return Err(missing(format_args!("the nil UUID")));
        }
        Ok(Self(uuid))
    }

    /// The id that several parts name together, such as topic, partition and offset, or the source and id of a
    /// CloudEvent.
    ///
    /// Unambiguous: `["a", "bc"]`, `["ab", "c"]` and `["abc"]` are three ids, and none of them is an id that
    /// [`new`](Self::new) gives for a text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if there are no parts, or if one of them is blank: a blank part is one that the
    /// producer forgot, and all messages that lack it would be one message.
    pub fn from_parts<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Result<Self> {
        let mut name = Vec::new();
        for (index, part) in parts.into_iter().enumerate() {
            let part = part.as_ref();
            // NUL bytes count here: a part may be a number in binary.
            let blank = std::str::from_utf8(part).is_ok_and(|text| text.chars().all(char::is_whitespace));
            if blank {
                return Err(missing(format_args!("part {} of it", index + 1)));
            }
            name.extend_from_slice(&(part.len() as u64).to_be_bytes());
            name.extend_from_slice(part);
        }
        if name.is_empty() {
            return Err(missing(format_args!("the list of its parts")));
        }
        Ok(Self(Uuid::new_v5(&Self::PARTS_NAMESPACE, &name)))
    }

    fn from_name(name: &[u8]) -> Result<Self> {
        // `Uuid::try_parse_ascii` reads four spellings, of which only the hyphenated one is 36 bytes long. The nil UUID
        // stands for a missing id in every one of them.
        if let Ok(uuid) = Uuid::try_parse_ascii(name) {
            if name.len() == 36 || uuid.is_nil() {
                return Self::from_uuid(uuid);
            }
        }
        Ok(Self(Uuid::new_v5(&Self::NAMESPACE, name)))
    }

    /// The 16 bytes, as a store keeps them, in network order.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        self.0.as_bytes()
    }

    /// The id as a UUID.
    pub const fn as_uuid(&self) -> Uuid {
        self.0
    }

    /// A delivery of this message whose payload is `payload`, so that a producer's reuse of an id for another message
    /// is found out instead of hiding that message. See [`Fingerprint`].
    pub fn with_payload(self, payload: impl AsRef<[u8]>) -> Delivery {
        Delivery::new(self).with_fingerprint(Fingerprint::of(payload))
    }
}

fn missing(what: fmt::Arguments<'_>) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!(
            "missing message id: {what} stands for no id, and all messages without one would count as one message; \
             have the producer set an id, or derive one from what makes the message unique"
        ),
    )
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self.0.as_hyphenated(), f)
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MessageId({self})")
    }
}

impl FromStr for MessageId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<&str> for MessageId {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        Self::new(text)
    }
}

impl TryFrom<Uuid> for MessageId {
    type Error = Error;

    fn try_from(uuid: Uuid) -> Result<Self> {
        Self::from_uuid(uuid)
    }
}

impl From<MessageId> for Uuid {
    fn from(id: MessageId) -> Self {
        id.0
    }
}
