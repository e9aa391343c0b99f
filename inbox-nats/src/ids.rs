//! [`MessageIds`]: which message a delivery is a delivery of; and the place that JetStream keeps a message in.

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use inbox_core::{Delivery, Error, ErrorKind, Fingerprint, MessageId, Result};

use crate::JetStreamMessage;

/// The header that producers set the id in, and that the server's own duplicate window looks at.
pub(crate) const ID: &str = "Nats-Msg-Id";

/// What a message is put back with: its id in the inbox; for which group; and where it was stored first.
pub(crate) const PUT_BACK_ID: &str = "Inbox-Message-Id";
pub(crate) const PUT_BACK_GROUP: &str = "Inbox-Consumer-Group";
pub(crate) const PUT_BACK_PLACE: &str = "Inbox-Origin";

/// Where a message's id comes from.
///
/// | made by | the id is |
/// | --- | --- |
/// | [`header`](Self::header), the default | the header `Nats-Msg-Id`; a message without one is given up |
/// | [`header_or_place`](Self::header_or_place) | that header; where there is none, the message's place in its stream |
/// | [`from_fn`](Self::from_fn) | what the function says |
///
/// The header's name may be in any case: the server looks at `Nats-Msg-Id` alone, but proxies and other clients write
/// `nats-msg-id`. Two different values are an error for that message, and so is an empty one: it goes to the dead letters.
///
/// The **place** is the stream's name, the sequence, and the time at which the server stored the message, to the nanosecond:
/// one id for every delivery of a stored message, and none that a stream made anew under the same name, which counts from 1
/// again, gives a second time. It is no help against a producer that publishes a message twice.
#[derive(Clone)]
pub struct MessageIds {
    source: Source,
    with_stream: bool,
    fingerprints: bool,
}

type Read = dyn Fn(&JetStreamMessage) -> Result<MessageId> + Send + Sync;

#[derive(Clone)]
enum Source {
    Header,
    HeaderOrPlace,
    Function(Arc<Read>),
}

impl MessageIds {
    /// The header `Nats-Msg-Id`, and nothing else.
    pub const fn header() -> Self {
        Self::of(Source::Header)
    }

    /// The header `Nats-Msg-Id`, or the message's place in its stream where there is none.
    pub const fn header_or_place() -> Self {
        Self::of(Source::HeaderOrPlace)
    }

    /// What `read` says of the message. An error, and a panic, gives that message up.
    pub fn from_fn(read: impl Fn(&JetStreamMessage) -> Result<MessageId> + Send + Sync + 'static) -> Self {
        Self::of(Source::Function(Arc::new(read)))
    }

    /// The same with the stream's name as a part of the id: for one consumer group that reads several streams whose
    /// producers may give one id to different messages. A place has the stream's name in any case.
    #[must_use]
    pub const fn with_stream_name(mut self) -> Self {
        self.with_stream = true;
        self
    }

    /// The same with payloads compared: a message whose id was processed with another payload is not taken for a duplicate,
    /// but given up, because its producer reuses ids. See [`Fingerprint`]; costs a SHA-256 of each payload.
    #[must_use]
    pub const fn with_payloads_compared(mut self) -> Self {
        self.fingerprints = true;
        self
    }

    const fn of(source: Source) -> Self {
        Self {
            source,
            with_stream: false,
            fingerprints: false,
        }
    }

    pub(crate) fn read(&self, message: &JetStreamMessage, group: &str) -> Result<Delivery> {
        let delivery = Delivery::new(self.id(message, group)?);
        Ok(if self.fingerprints {
            delivery.with_fingerprint(Fingerprint::of(&message.payload))
        } else {
            delivery
        })
    }

    fn id(&self, message: &JetStreamMessage, group: &str) -> Result<MessageId> {
        if let Some(id) = put_back_id(message, group)? {
            return Ok(id);
        }
        match (&self.source, self.with_stream) {
            (Source::Function(read), with_stream) => {
                let id = std::panic::catch_unwind(AssertUnwindSafe(|| read(message)))
                    .unwrap_or_else(|_| Err(no_id("the function that reads ids panicked")))?;
                if with_stream {
                    return MessageId::from_parts([message.stream.as_bytes(), id.as_bytes()]);
                }
                Ok(id)
            }
            (source, with_stream) => match header(message, ID)? {
                Some(id) if with_stream => MessageId::from_parts([message.stream.as_str(), id]),
                Some(id) => MessageId::new(id),
                None if matches!(source, Source::HeaderOrPlace) => Ok(Place::of(message).id()),
                None => Err(no_id(
                    "it has no header Nats-Msg-Id; have its producer set one, or take MessageIds::header_or_place or \
                     MessageIds::from_fn",
                )),
            },
        }
    }
}

impl Default for MessageIds {
    fn default() -> Self {
        Self::header()
    }
}

impl fmt::Debug for MessageIds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match self.source {
            Source::Header => "header",
            Source::HeaderOrPlace => "header or place",
            Source::Function(_) => "function",
        };
        f.debug_struct("MessageIds")
            .field("source", &source)
            .field("with_stream", &self.with_stream)
            .field("fingerprints", &self.fingerprints)
            .finish()
    }
}

fn no_id(why: &str) -> Error {
    Error::new(
        ErrorKind::InvalidInput,
        format!("the message's id cannot be read: {why}"),
    )
}

/// The value of a header whose name may be in any case.
fn header<'m>(message: &'m JetStreamMessage, name: &str) -> Result<Option<&'m str>> {
    let mut values = message
        .headers
        .iter()
        .filter(|(own, _)| AsRef::<str>::as_ref(own).eq_ignore_ascii_case(name))
        .flat_map(|(_, values)| values)
        .map(async_nats::HeaderValue::as_str);
    let Some(value) = values.next() else {
        return Ok(None);
    };
    if let Some(other) = values.find(|other| *other != value) {
        return Err(no_id(&format!(
            "the header {name} has two values, {value:?} and {other:?}"
        )));
    }
    Ok(Some(value))
}

/// The id that a message was put back under, if it was put back for this group.
fn put_back_id(message: &JetStreamMessage, group: &str) -> Result<Option<MessageId>> {
    if header(message, PUT_BACK_GROUP)? != Some(group) {
        return Ok(None);
    }
    header(message, PUT_BACK_ID)?.map(MessageId::new).transpose()
}

/// Where JetStream keeps a message. As text, `STREAM/SEQUENCE/NANOSECONDS`: a stream's name has no slash in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) stream: String,
    pub(crate) sequence: u64,
    pub(crate) published_at: SystemTime,
}

impl Place {
    /// Where `message` was stored first: a message that was put back keeps that, so that it is the same message to every
    /// consumer group.
    pub(crate) fn of(message: &JetStreamMessage) -> Self {
        let first = header(message, PUT_BACK_PLACE).ok().flatten();
        first.and_then(Self::parse).unwrap_or_else(|| message.stored())
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let stream = parts.next().filter(|stream| !stream.trim().is_empty())?.to_owned();
        let sequence = parts.next()?.parse().ok()?;
        let nanos: u64 = parts.next()?.parse().ok()?;
        if parts.next().is_some() {
            return None;
        }
        let published_at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_nanos(nanos))?;
        Some(Self {
            stream,
            sequence,
            published_at,
        })
    }

    pub(crate) fn id(&self) -> MessageId {
        let text = self.to_string();
        MessageId::from_parts(["jetstream", &text]).unwrap_or_else(|_| unreachable!("neither part is blank"))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self
            .published_at
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        write!(f, "{}/{}/{}", self.stream, self.sequence, since.as_nanos())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_read_as_it_was_written() {
        let place = Place {
            stream: "ORDERS".to_owned(),
            sequence: 17,
            published_at: SystemTime::UNIX_EPOCH + Duration::from_nanos(1_765_095_600_123_456_789),
        };
        assert_eq!(place.to_string(), "ORDERS/17/1765095600123456789");
        assert_eq!(Place::parse(&place.to_string()), Some(place.clone()));
        for foreign in [
            "",
            "ORDERS",
            "ORDERS/17",
            "ORDERS/x/1",
            "/1/1",
            "ORDERS/17/1/2",
            "ORDERS/17/-1",
        ] {
            assert_eq!(Place::parse(foreign), None, "{foreign}");
        }
        let later = Place {
            published_at: place.published_at + Duration::from_nanos(1),
            ..place.clone()
        };
        assert_ne!(place.id(), later.id());
    }
}
