//! What NATS's errors mean, decided by their kinds and codes.

use std::error::Error as StdError;

use async_nats::client::{FlushError, RequestError, RequestErrorKind};
use async_nats::jetstream::consumer::pull::BatchError;
use async_nats::jetstream::context::{ConsumerInfoError, ConsumerInfoErrorKind, PublishError, PublishErrorKind};
use inbox_core::{Error, ErrorKind};

/// An error that passes: the server is asked again.
pub(crate) fn unavailable(what: &str, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Error {
    let source = source.into();
    Error::new(ErrorKind::Unavailable, format!("{what}: {source}")).with_source(source)
}

/// An error that does not pass.
pub(crate) fn broker(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Broker, what.into())
}

/// That a pull could not even be sent.
pub(crate) fn not_sent(error: BatchError) -> Error {
    unavailable("messages could not be asked for", error)
}

/// Why the server gives no information on the consumer.
pub(crate) fn no_info(error: ConsumerInfoError, stream: &str, consumer: &str) -> Error {
    let gone = |what: &str| {
        format!(
            "{what}; nothing is acknowledged that was not handled; create it (again), then start this program again"
        )
    };
    match error.kind() {
        ConsumerInfoErrorKind::NotFound => broker(gone(&format!(
            "the stream {stream} has no consumer {consumer} (any more)"
        )))
        .with_source(error),
        ConsumerInfoErrorKind::StreamNotFound => {
            broker(gone(&format!("there is no stream {stream} (any more)"))).with_source(error)
        }
        ConsumerInfoErrorKind::InvalidName => broker(format!(
            "{consumer:?} on {stream:?} is no name that a consumer can have"
        ))
        .with_source(error),
        _ => unavailable(
            &format!("the server does not tell of consumer {consumer} of stream {stream}"),
            error,
        ),
    }
}

/// That an answer to a message was not confirmed.
pub(crate) fn unconfirmed(error: RequestError) -> Error {
    match error.kind() {
        RequestErrorKind::TimedOut => unavailable("the server did not confirm the answer in time", error),
        RequestErrorKind::NoResponders => unavailable(
            "nobody takes the answer: the server has only just started, or the consumer was deleted",
            error,
        ),
        _ => unavailable("the answer could not be sent", error),
    }
}

pub(crate) fn not_flushed(error: FlushError) -> Error {
    unavailable("what was sent may not have reached the server", error)
}

/// Why a message that is put back was not published.
pub(crate) fn not_published(error: PublishError, subject: &str) -> Error {
    match error.kind() {
        PublishErrorKind::StreamNotFound => broker(format!(
            "no stream takes messages of subject {subject}, so the message cannot be put back; its dead letter is kept: \
             have the stream take that subject, and put it back again"
        ))
        .with_source(error),
        PublishErrorKind::MaxPayloadExceeded => broker(format!(
            "the message is larger than the server's max_payload, so it cannot be put back to {subject}; its dead letter is \
             kept: raise max_payload, and put it back again"
        ))
        .with_source(error),
        PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => unavailable(
            "the server did not confirm that it has the message; its dead letter is kept, and putting it back again is safe",
            error,
        ),
        _ => broker(format!(
            "the message could not be put back to {subject}: {error}; its dead letter is kept: put it back again"
        ))
        .with_source(error),
    }
}
