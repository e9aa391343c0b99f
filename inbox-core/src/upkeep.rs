//! What upkeep asks and answers: [`Record`], [`Health`], [`Purge`], [`Purged`], and the [`WaitPolicy`] of stores.

use std::fmt;
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime};

use crate::{ConsumerGroup, Fingerprint, Key, Processed};

/// A committed record: which message, by which group, when.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// Message and group.
    pub key: Key,
    /// When it was processed, by the store's clock. `None` only where another program wrote no time.
    pub processed_at: Option<SystemTime>,
    /// The fingerprint of its payload, if it was claimed with one.
    pub fingerprint: Option<Fingerprint>,
}

impl Record {
    /// The record of `key`.
    pub const fn new(key: Key, processed: Processed) -> Self {
        Self {
            key,
            processed_at: processed.at,
            fingerprint: processed.fingerprint,
        }
    }
}

/// What [`Upkeep::check`](crate::Upkeep::check) found. Prints as one line a finding.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Health {
    findings: Vec<Finding>,
}

impl Health {
    /// Nothing found amiss, so far.
    pub const fn new() -> Self {
        Self { findings: Vec::new() }
    }

    /// Adds something that breaks the guarantee or keeps claims from working: `what`, and its `remedy`.
    pub fn fault(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Fault, what.into(), remedy.into());
    }

    /// Adds something that works but should be known: `what`, and its `remedy`.
    pub fn warning(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Warning, what.into(), remedy.into());
    }

    fn add(&mut self, severity: Severity, what: String, remedy: String) {
        self.findings.push(Finding { severity, what, remedy });
    }

    /// Whether claims work and the guarantee holds: no finding is a [`Severity::Fault`].
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|finding| finding.severity != Severity::Fault)
    }

    /// All that was found, faults and warnings, in the order of looking.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }
}

impl fmt::Display for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.findings.is_empty() {
            return f.write_str("sound: nothing amiss");
        }
        for (index, finding) in self.findings.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{finding}")?;
        }
        Ok(())
    }
}

/// One thing that a check found, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// How bad it is.
    pub severity: Severity,
    /// What was found and what it means.
    pub what: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Fault => "fault",
            Severity::Warning => "warning",
        };
        write!(f, "{severity}: {}; {}", self.what, self.remedy)
    }
}

/// How bad a [`Finding`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// It works, but should be known.
    Warning,
    /// Claims do not work, or the guarantee does not hold.
    Fault,
}

/// What to purge.
///
/// ```
/// use std::time::Duration;
/// use inbox_core::Purge;
///
/// let week = Purge::older_than(Duration::from_secs(7 * 24 * 60 * 60));
/// # let _ = week;
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Purge {
    /// What is older than this, by the store's clock, is removed. **It must be longer than the broker can still redeliver
    /// a message**, replays from dead letters and mirrors included: a message whose record is gone is new again.
    pub older_than: Duration,
    /// Whose records; `None` means every group's to a store, and its own group's to an [`Inbox`](crate::Inbox).
    pub group: Option<ConsumerGroup>,
    /// How many records one step removes at the most. 1,000 unless set.
    pub step: NonZeroU32,
}

impl Purge {
    /// Records that are older than this: every group's where a store is asked, an [`Inbox`](crate::Inbox)'s own where that
    /// is.
    pub const fn older_than(older_than: Duration) -> Self {
        Self {
            older_than,
            group: None,
            step: match NonZeroU32::new(1_000) {
                Some(step) => step,
                None => NonZeroU32::MIN,
            },
        }
    }

    /// Only this group's.
    #[must_use]
    pub fn of_group(mut self, group: ConsumerGroup) -> Self {
        self.group = Some(group);
        self
    }

    /// With steps of at most this many records.
    #[must_use]
    pub const fn in_steps_of(mut self, step: NonZeroU32) -> Self {
        self.step = step;
        self
    }
}

/// What a purge, or a step of one, did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Purged {
    /// How many records were removed.
    pub removed: u64,
    /// Whether there may be more to remove.
    pub more: bool,
}

impl Purged {
    /// This many were removed, and there may be `more`.
    pub const fn new(removed: u64, more: bool) -> Self {
        Self { removed, more }
    }
}

/// What a claim does about a message that another open transaction claims, in stores that leave the choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WaitPolicy {
    /// Waits until that transaction ends; the answer is then certain: [`Claim::New`](crate::Claim::New) after its
    /// rollback, [`Claim::Duplicate`](crate::Claim::Duplicate) after its commit.
    #[default]
    Wait,
    /// Answers [`Claim::InFlight`](crate::Claim::InFlight) at once.
    DontWait,
    /// Waits at most this long, then answers [`Claim::InFlight`](crate::Claim::InFlight).
    AtMost(Duration),
}
