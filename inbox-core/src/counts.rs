//! [`Counts`]: how claims went, in numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Claim, Result};

/// How the claims of an [`Inbox`](crate::Inbox) went since it was made; all its clones count together.
///
/// A duplicate is ordinary: it is the inbox at work, not a failure, and is not counted as one. There is a number for
/// each outcome and nothing an id or payload: read them into whatever metrics the application has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counts {
    /// Claims answered [`Claim::New`](crate::Claim::New). One a try: a transaction that is run again claims again.
    pub claimed: u64,
    /// Claims answered [`Claim::Duplicate`](crate::Claim::Duplicate).
    pub duplicate: u64,
    /// Claims answered [`Claim::InFlight`](crate::Claim::InFlight).
    pub in_flight: u64,
    /// Claims that failed, those with another payload included.
    pub error: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    claimed: AtomicU64,
    duplicate: AtomicU64,
    in_flight: AtomicU64,
    error: AtomicU64,
}

impl Counters {
    pub(crate) fn count(&self, claim: &Result<Claim>) {
        let counter = match claim {
            Ok(Claim::New) => &self.claimed,
            Ok(Claim::Duplicate(_)) => &self.duplicate,
            Ok(Claim::InFlight(_)) => &self.in_flight,
            Err(_) => &self.error,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Counts {
        Counts {
            claimed: self.claimed.load(Ordering::Relaxed),
            duplicate: self.duplicate.load(Ordering::Relaxed),
            in_flight: self.in_flight.load(Ordering::Relaxed),
            error: self.error.load(Ordering::Relaxed),
        }
    }
}
