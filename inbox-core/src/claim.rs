//! [`Claim`]: what a store answers.

use std::time::{Duration, SystemTime};

use crate::{Delivery, Error, ErrorKind, Fingerprint, Result};

/// What became of a claim.
///
/// Only [`New`](Self::New) entitles to do the work, and only in the transaction that the claim was made in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "only `Claim::New` entitles to do the work; acknowledging without looking loses or doubles messages"]
pub enum Claim {
    /// Nobody has processed this message: do the work in this transaction. The record becomes visible with its commit,
    /// and is gone with its rollback.
    New,
    /// A committed record (or one that this very transaction made) was seen: acknowledge and do nothing.
    Duplicate(Processed),
    /// Another consumer's open transaction claims this message. It may commit or roll back: **do not acknowledge**, let
    /// the message come again.
    InFlight(InFlight),
}

impl Claim {
    /// Whether the work is to be done, in this transaction.
    pub const fn is_new(&self) -> bool {
        matches!(self, Self::New)
    }

    /// Whether the message was processed before.
    pub const fn is_duplicate(&self) -> bool {
        matches!(self, Self::Duplicate(_))
    }

    /// Whether another consumer is at it.
    pub const fn is_in_flight(&self) -> bool {
        matches!(self, Self::InFlight(_))
    }

    /// This claim, unless it is a duplicate of a message with another payload than `delivery`'s.
    ///
    /// [`Inbox`](crate::Inbox) asks this of every claim, so stores answer with what they keep and compare nothing.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::PayloadMismatch`] if both the record and `delivery` have a fingerprint, and not the same.
    pub fn verified(self, delivery: &Delivery) -> Result<Self> {
        if let Self::Duplicate(processed) = &self {
            if let (Some(stored), Some(given)) = (processed.fingerprint, delivery.fingerprint()) {
                if stored != given {
                    return Err(Error::new(
                        ErrorKind::PayloadMismatch,
                        format!(
                            "message {} was processed with another payload (fingerprint {stored}, now {given}): its \
                             producer gave one id to two messages; it was neither handled nor skipped, so look at both",
                            delivery.id()
                        ),
                    ));
                }
            }
        }
        Ok(self)
    }
}

/// What a record says of a message that was processed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Processed {
    /// When, by the store's clock. `None` only where another program wrote the record without a time.
    pub at: Option<SystemTime>,
    /// The fingerprint that it was processed with, if any.
    pub fingerprint: Option<Fingerprint>,
}

impl Processed {
    /// Processed at this time, by the store's clock.
    pub const fn at(time: SystemTime) -> Self {
        Self {
            at: Some(time),
            fingerprint: None,
        }
    }

    /// The same with the stored fingerprint, if there is one.
    #[must_use]
    pub const fn with_fingerprint(mut self, fingerprint: Option<Fingerprint>) -> Self {
        self.fingerprint = fingerprint;
        self
    }
}

/// What is known of the consumer that is at the message now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct InFlight {
    /// When a further attempt is worth while, if the store can tell.
    pub retry_after: Option<Duration>,
}

impl InFlight {
    /// In flight, for nobody knows how long.
    pub const fn new() -> Self {
        Self { retry_after: None }
    }

    /// In flight, and worth a further attempt after this long.
    #[must_use]
    pub const fn retry_after(mut self, pause: Duration) -> Self {
        self.retry_after = Some(pause);
        self
    }
}
