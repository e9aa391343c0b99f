//! The one error type: what happened, what to do about it, and the driver's error as its source.

use std::borrow::Cow;
use std::convert::Infallible;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

/// What every fallible call of this project returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of any type, boxed: what a handler's own error is turned into.
pub type BoxError = Box<dyn StdError + Send + Sync + 'static>;

/// What kind of thing went wrong. Decide by this, never by the message's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An id, group, name, URL or setting that cannot be right. Nothing was written.
    InvalidInput,
    /// What the store keeps its records in is missing, of an older version, or not of the shape that the
    /// guarantee needs. Nothing was written.
    Schema,
    /// The database refuses this to the role or user that is connected.
    Denied,
    /// A lock could not be had in time. Retryable.
    Busy,
    /// The database ended this transaction in favour of another one: a serialization failure, a deadlock, a
    /// stale snapshot, a lost watch. Retryable, with a fresh transaction.
    Conflict,
    /// Another consumer is handling this very message and has not committed yet. Retryable.
    InFlight,
    /// The database cannot be reached, or the connection broke before a commit was sent. Retryable.
    Unavailable,
    /// The commit was sent and its answer was lost: it may have happened. Retryable, because the claim of the next
    /// attempt finds out: it is a duplicate exactly if this commit happened. Never undo anything on account of it.
    OutcomeUnknown,
    /// The transaction had failed or had been ended before the store got to use it, so what it did is not stored.
    TransactionEnded,
    /// The message id was processed before with another payload: its producer reuses ids.
    PayloadMismatch,
    /// The caller's handler returned an error; it is the [`source`](StdError::source).
    Handler,
    /// The message will fail whenever it is handled; a handler says so with [`Error::poison`].
    Poison,
    /// The broker cannot be reached, refuses, or does not have what was asked for.
    Broker,
    /// The store cannot do what was asked.
    Unsupported,
    /// Any other error of the database or its driver.
    Store,
}

impl ErrorKind {
    /// Whether running the whole transaction again may succeed.
    pub const fn is_retryable(self) -> bool {
        matches!(
            self,
            Self::Busy | Self::Conflict | Self::InFlight | Self::Unavailable | Self::OutcomeUnknown
        )
    }

    /// Whether the error concerns the store rather than the message at hand, so that the next message would meet it
    /// too.
    pub(crate) const fn concerns_the_store(self) -> bool {
        matches!(
            self,
            Self::Schema | Self::Denied | Self::Unavailable | Self::OutcomeUnknown
        )
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::InvalidInput => "invalid input",
            Self::Schema => "schema",
            Self::Denied => "denied",
            Self::Busy => "busy",
            Self::Conflict => "conflict",
            Self::InFlight => "in flight",
            Self::Unavailable => "unavailable",
            Self::OutcomeUnknown => "outcome unknown",
            Self::TransactionEnded => "transaction ended",
            Self::PayloadMismatch => "payload mismatch",
            Self::Handler => "handler",
            Self::Poison => "poison",
            Self::Broker => "broker",
            Self::Unsupported => "unsupported",
            Self::Store => "store",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What went wrong, in a sentence that says what to do.
///
/// Opaque, so that it can grow: [`kind`](Self::kind) tells errors apart, [`is_retryable`](Self::is_retryable) says
/// whether the whole transaction is worth running again, and [`source`](StdError::source) is the driver's own error
/// (or the handler's). Cheap to clone, because a failed commit is the outcome of every message of its batch.
///
/// ```
/// use inbox_core::{ErrorKind, MessageId};
///
/// let error = MessageId::new("").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::InvalidInput);
/// assert!(!error.is_retryable());
/// ```
#[derive(Clone)]
pub struct Error {
    kind: ErrorKind,
    retryable: bool,
    message: Cow<'static, str>,
    source: Option<Arc<dyn StdError + Send + Sync + 'static>>,
}

impl Error {
    /// An error of `kind` whose `message` says what happened and what to do about it.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            retryable: kind.is_retryable(),
            message: message.into(),
            source: None,
        }
    }

    /// An [`ErrorKind::InvalidInput`] that shows what was given, quoted and no longer than a line, and says why it cannot be
    /// right: `invalid table name "": it is empty`.
    pub fn invalid(what: &str, given: &str, why: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::InvalidInput,
            format!("invalid {what} {}: {why}", Shown(given)),
        )
    }

    /// A message that will fail whenever it is handled, because of `cause`: one that cannot be read, or makes no sense. A
    /// handler that returns it, as it is or as the source of an error of its own, has the message set aside at once
    /// instead of coming again.
    pub fn poison(cause: impl Into<BoxError>) -> Self {
        let cause = cause.into();
        Self::new(ErrorKind::Poison, format!("the message is poison: {cause}")).with_source(cause)
    }

    /// The same error, caused by `source`: the driver's error, whole, so that callers can look into it.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<BoxError>) -> Self {
        self.source = Some(Arc::from(source.into()));
        self
    }

    /// A handler's error. One of ours inside it, alone, is passed through as it is.
    pub(crate) fn from_handler(error: impl Into<BoxError>, retryable: bool) -> Self {
        match error.into().downcast::<Self>() {
            Ok(own) => Self {
                retryable: own.retryable || retryable,
                ..*own
            },
            Err(foreign) => Self {
                kind: ErrorKind::Handler,
                retryable,
                message: "the handler failed".into(),
                source: Some(Arc::from(foreign)),
            },
        }
    }

    /// The same error after the last of several attempts.
    pub(crate) fn after_attempts(mut self, attempts: u32) -> Self {
        if attempts > 1 {
            self.message = format!("{} (gave up after {attempts} attempts)", self.message).into();
        }
        self
    }

    /// What kind of error this is.
    pub const fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Whether running the whole transaction again may succeed.
    ///
    /// True exactly for the kinds that say so, and for a handler's error that the store or the caller
    /// ([`Inbox::retry_if`](crate::Inbox::retry_if)) recognised as passing.
    pub const fn is_retryable(&self) -> bool {
        self.retryable
    }

    /// The first error that is an `E` among those that caused this one: the driver's, or the handler's own, whatever it was
    /// wrapped in.
    pub fn downcast_ref<E: StdError + 'static>(&self) -> Option<&E> {
        std::iter::successors(self.source(), |&link| link.source()).find_map(|link| link.downcast_ref())
    }
}

/// A text as an error shows it: quoted, escaped, and no longer than a line.
pub(crate) struct Shown<'a>(pub(crate) &'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.char_indices().nth(64) {
            Some((cut, _)) => write!(f, "{:?}...", &self.0[..cut]),
            None => write!(f, "{:?}", self.0),
        }
    }
}

/// `{}` is the sentence; `{:#}` has behind it what caused it, each cause behind a colon.
impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if f.alternate() {
            std::iter::successors(self.source(), |&link| link.source()).try_for_each(|link| write!(f, ": {link}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &self.kind).field("message", &self.message);
        if self.retryable != self.kind.is_retryable() {
            debug.field("retryable", &self.retryable);
        }
        if let Some(source) = &self.source {
            debug.field("source", source);
        }
        debug.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

/// So that an argument may be given ready-made where a conversion that can fail is accepted too.
impl From<Infallible> for Error {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retryable_kinds_are_the_documented_ones() {
        let retryable = [
            ErrorKind::Busy,
            ErrorKind::Conflict,
            ErrorKind::InFlight,
            ErrorKind::Unavailable,
            ErrorKind::OutcomeUnknown,
        ];
        for kind in retryable {
            assert!(Error::new(kind, "x").is_retryable(), "{kind}");
        }
        for kind in [
            ErrorKind::InvalidInput,
            ErrorKind::Schema,
            ErrorKind::Denied,
            ErrorKind::TransactionEnded,
            ErrorKind::PayloadMismatch,
            ErrorKind::Handler,
            ErrorKind::Poison,
            ErrorKind::Broker,
            ErrorKind::Unsupported,
            ErrorKind::Store,
        ] {
            assert!(!Error::new(kind, "x").is_retryable(), "{kind}");
        }
    }

    #[test]
    fn the_source_can_be_reached() {
        let error = Error::new(ErrorKind::Store, "the disk is full; free some").with_source(std::io::Error::other("x"));
        assert_eq!(error.to_string(), "the disk is full; free some");
        assert!(error.downcast_ref::<std::io::Error>().is_some());
        assert!(StdError::source(&error).is_some());
    }

    #[test]
    fn a_handler_that_returns_one_of_our_errors_keeps_its_kind() {
        let error = Error::from_handler(Error::new(ErrorKind::Conflict, "again"), false);
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.is_retryable());
    }
}
