//! [`ConsumerOptions`]: how a [`Consumer`](crate::Consumer) goes about it.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBuilder};

/// How a [`Consumer`](crate::Consumer) goes about it. What stands here is the default:
///
/// ```
/// # use std::num::{NonZeroU32, NonZeroUsize};
/// # use std::time::Duration;
/// # use inbox_core::ConsumerOptions;
/// # const fn n(n: usize) -> NonZeroUsize { NonZeroUsize::new(n).unwrap() }
/// let options = ConsumerOptions::new()
///     .batch(n(1))
///     .concurrency(n(1))
///     .most_in_hand(n(1_000))
///     .attempts(NonZeroU32::new(10).unwrap())
///     .pauses(Duration::from_millis(500), Duration::from_secs(60))
///     .handler_timeout(Duration::from_secs(60))
///     .shutdown_timeout(Duration::from_secs(30));
/// assert_eq!(options, ConsumerOptions::new());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConsumerOptions {
    pub(super) batch: NonZeroUsize,
    pub(super) concurrency: NonZeroUsize,
    pub(super) most_in_hand: NonZeroUsize,
    pub(super) attempts: NonZeroU32,
    pub(super) first_pause: Duration,
    pub(super) longest_pause: Duration,
    pub(super) handler_timeout: Duration,
    pub(super) shutdown_timeout: Duration,
}

impl ConsumerOptions {
    /// The defaults.
    pub const fn new() -> Self {
        Self {
            batch: NonZeroUsize::MIN,
            concurrency: NonZeroUsize::MIN,
            most_in_hand: const { NonZeroUsize::new(1_000).unwrap() },
            attempts: const { NonZeroU32::new(10).unwrap() },
            first_pause: Duration::from_millis(500),
            longest_pause: Duration::from_secs(60),
            handler_timeout: Duration::from_secs(60),
            shutdown_timeout: Duration::from_secs(30),
        }
    }

    /// Handles up to this many messages in one transaction. The handler still gets them one by one; where it fails, the
    /// transaction is rolled back and the others are handled again without the one that failed.
    #[must_use]
    pub const fn batch(mut self, most: NonZeroUsize) -> Self {
        self.batch = most;
        self
    }

    /// Has up to this many transactions open at once. They run side by side in one task: for more processor cores than one,
    /// run several consumers.
    #[must_use]
    pub const fn concurrency(mut self, most: NonZeroUsize) -> Self {
        self.concurrency = most;
        self
    }

    /// Keeps at most this many messages, those that wait for their turn or for another attempt included. Below a
    /// [batch](Self::batch) for each [transaction](Self::concurrency), those do not fill up.
    #[must_use]
    pub const fn most_in_hand(mut self, most: NonZeroUsize) -> Self {
        self.most_in_hand = most;
        self
    }

    /// Gives a message up after this many attempts: deliveries by the broker's count, so that those which ended with
    /// their process count too.
    #[must_use]
    pub const fn attempts(mut self, most: NonZeroU32) -> Self {
        self.attempts = most;
        self
    }

    /// Pauses between attempts at a message: they double from the first to the longest, and each is lengthened by up to its
    /// own length at random.
    #[must_use]
    pub const fn pauses(mut self, first: Duration, longest: Duration) -> Self {
        self.first_pause = first;
        self.longest_pause = longest;
        self
    }

    /// Cancels a handler that takes longer than this for one message; that is a failed attempt.
    #[must_use]
    pub const fn handler_timeout(mut self, longest: Duration) -> Self {
        self.handler_timeout = longest;
        self
    }

    /// Lets what runs at a shutdown go on for this long, then cancels it and hands its messages back.
    #[must_use]
    pub const fn shutdown_timeout(mut self, longest: Duration) -> Self {
        self.shutdown_timeout = longest;
        self
    }

    /// The pause before the attempt after the `failures`th.
    pub(super) fn pause_after(&self, failures: u32) -> Duration {
        backoff(self.first_pause, self.longest_pause)
            .nth(failures.saturating_sub(1).min(64) as usize)
            .unwrap_or(self.longest_pause)
    }
}

impl Default for ConsumerOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Pauses without end, from the first to the longest, with jitter.
pub(super) fn backoff(first: Duration, longest: Duration) -> backon::ExponentialBackoff {
    ExponentialBuilder::default()
        .with_jitter()
        .with_min_delay(first.min(longest))
        .with_max_delay(longest)
        .without_max_times()
        .build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_longest_and_no_number_of_failures_is_too_large() {
        let options = ConsumerOptions::new().pauses(Duration::from_millis(100), Duration::from_secs(1));
        let least = [100, 200, 400, 800, 1_000, 1_000];
        for (failures, least) in (1..).zip(least) {
            let pause = options.pause_after(failures);
            assert!(pause >= Duration::from_millis(least), "{failures}: {pause:?}");
            assert!(pause <= Duration::from_millis(3 * least), "{failures}: {pause:?}");
        }
        assert!(options.pause_after(u32::MAX) >= Duration::from_secs(1));
        assert!(options.pause_after(0) >= Duration::from_millis(100));
    }
}
