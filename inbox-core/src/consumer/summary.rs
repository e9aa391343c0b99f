//! [`Summary`]: what a consumer did.

use std::fmt;

/// What a [`Consumer`](crate::Consumer) did from its start to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Summary {
    /// Messages whose effect was committed, and which the broker was told are done with.
    pub handled: u64,
    /// Deliveries that were found to be duplicates, and acknowledged.
    pub duplicates: u64,
    /// Messages that were given up, and stand in the dead letters.
    pub dead_letters: u64,
    /// Attempts that failed and were to be made again.
    pub failed_attempts: u64,
    /// Times that a message was put off because another consumer was at it.
    pub in_flight: u64,
    /// Messages that were handed back to the broker at the end, to be delivered again at once; those whose handler was
    /// cancelled among them.
    pub handed_back: u64,
    /// Of those, the ones whose handler was under way and was cancelled.
    pub cancelled: u64,
    /// Answers that the broker did not confirm: those messages come again, and are duplicates.
    pub unconfirmed: u64,
    /// Answers that were given later than the broker waits: those messages may have come again meanwhile. Something keeps
    /// the runtime from its work, or the machine was stopped.
    pub late: u64,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} handled, {} duplicates, {} dead letters, {} handed back",
            self.handled, self.duplicates, self.dead_letters, self.handed_back
        )?;
        for (count, what) in [
            (self.failed_attempts, "failed attempts"),
            (self.in_flight, "put off while in flight elsewhere"),
            (self.cancelled, "cancelled"),
            (self.unconfirmed, "answers unconfirmed"),
            (self.late, "answers late"),
        ] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        Ok(())
    }
}
