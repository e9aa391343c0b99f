//! [`RetryPolicy`]: how often a transaction is run again, and after what pauses.

use std::num::NonZeroU32;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};

use crate::{Error, ErrorKind, Result};

/// How often a transaction that failed in a retryable way is run again, and after what pauses.
///
/// Pauses double from the first to the longest, and each is lengthened by up to its own length at random, so that
/// consumers which collided do not collide again. Ten attempts with pauses from 10 ms to 1 s unless set: some seconds in
/// all, which covers deadlocks, busy locks and a connection pool that reconnects. A database that stays away longer is
/// the message loop's affair: do not acknowledge, and the broker delivers again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    attempts: NonZeroU32,
    first_pause: Duration,
    longest_pause: Duration,
}

impl RetryPolicy {
    /// One attempt, none again.
    pub const fn never() -> Self {
        Self {
            attempts: NonZeroU32::MIN,
            first_pause: Duration::ZERO,
            longest_pause: Duration::ZERO,
        }
    }

    /// This many attempts in all, the first included.
    #[must_use]
    pub const fn with_attempts(mut self, attempts: NonZeroU32) -> Self {
        self.attempts = attempts;
        self
    }

    /// Pauses that double from `first` up to `longest`, before jitter, which at most doubles each.
    #[must_use]
    pub const fn with_pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.first_pause = first;
        self.longest_pause = longest;
        self
    }

    pub(crate) fn start(&self) -> Attempts {
        let pauses = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(self.first_pause.min(self.longest_pause))
            .with_max_delay(self.longest_pause)
            .with_max_times(self.attempts.get() as usize - 1)
            .build();
        Attempts {
            pauses,
            made: 1,
            unknown: None,
        }
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            attempts: const { NonZeroU32::new(10).unwrap() },
            first_pause: Duration::from_millis(10),
            longest_pause: Duration::from_secs(1),
        }
    }
}

/// The attempts at one transaction.
pub(crate) struct Attempts {
    pauses: ExponentialBackoff,
    made: u32,
    /// A commit whose outcome is unknown, until a later attempt's claim tells.
    unknown: Option<Error>,
}

impl Attempts {
    /// A claim was answered, so every commit before it is known to have happened or not.
    pub(crate) fn found_out(&mut self) {
        self.unknown = None;
    }

    /// Pauses before the next attempt, or gives `error` back if there is to be none.
    ///
    /// If a commit's outcome is still unknown then, that is the error, whatever came after it: the later error may say
    /// that nothing was written, and something may have been.
    pub(crate) async fn pause_or_give_up(&mut self, error: Error) -> Result<()> {
        if !error.is_retryable() {
            return Err(self.last(error));
        }
        let Some(pause) = self.pauses.next() else {
            return Err(self.last(error).after_attempts(self.made));
        };
        tracing::debug!(attempt = self.made, ?pause, kind = %error.kind(), %error, "running the transaction again");
        if error.kind() == ErrorKind::OutcomeUnknown {
            self.unknown = Some(error);
        }
        tokio::time::sleep(pause).await;
        self.made += 1;
        Ok(())
    }

    fn last(&mut self, error: Error) -> Error {
        match self.unknown.take() {
            Some(unknown) if error.kind() != ErrorKind::OutcomeUnknown => {
                let message = format!("{unknown}; then: {error}");
                Error::new(ErrorKind::OutcomeUnknown, message).with_source(error)
            }
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn attempts_are_bounded_and_pauses_grow_to_the_longest() {
        let policy = RetryPolicy::default();
        let mut attempts = policy.start();
        let mut pauses = Vec::new();
        let error = loop {
            let before = tokio::time::Instant::now();
            match attempts.pause_or_give_up(Error::new(ErrorKind::Busy, "busy")).await {
                Ok(()) => pauses.push(before.elapsed()),
                Err(error) => break error,
            }
        };
        assert_eq!(pauses.len(), 9);
        assert!(
            pauses[0] >= policy.first_pause && pauses[0] <= 3 * policy.first_pause,
            "{pauses:?}"
        );
        assert!(
            pauses[8] >= policy.longest_pause && pauses[8] <= 3 * policy.longest_pause,
            "{pauses:?}"
        );
        assert!(error.to_string().contains("10 attempts"), "{error}");
    }

    #[tokio::test]
    async fn what_is_not_retryable_is_given_back_at_once() {
        let mut attempts = RetryPolicy::default().start();
        let error = attempts
            .pause_or_give_up(Error::new(ErrorKind::Schema, "no table"))
            .await
            .unwrap_err();
        assert_eq!(error.to_string(), "no table");
    }
}
