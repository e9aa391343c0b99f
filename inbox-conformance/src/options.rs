//! [`Options`]: how hard to try, and how long to wait.

use std::time::Duration;

use crate::Law;

/// How hard the suite tries, and how long it waits.
///
/// ```
/// use std::time::Duration;
/// use inbox_conformance::Options;
///
/// let nightly = Options::new().heavy().time_limit(Duration::from_secs(600));
/// # let _ = nightly;
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Options {
    time_limit: Duration,
    heavy: bool,
    /// None: all.
    only: Vec<Law>,
}

impl Options {
    /// The environment variable that asks for the heavy suite, if it is set to anything but `0` or nothing.
    pub const HEAVY: &'static str = "INBOX_CONFORMANCE_HEAVY";

    /// The ordinary suite, at most a minute a law. On a fast store a law takes up to a second; one that has to wait for real, two.
    pub const fn new() -> Self {
        Self {
            time_limit: Duration::from_secs(60),
            heavy: false,
            only: Vec::new(),
        }
    }

    /// As the environment asks: [heavy](Self::heavy) if [`HEAVY`](Self::HEAVY) says so.
    pub fn from_environment() -> Self {
        match std::env::var(Self::HEAVY) {
            Ok(value) if !value.is_empty() && value != "0" => Self::new().heavy(),
            _ => Self::new(),
        }
    }

    /// The heavy suite: many more consumers, messages and rounds, and ten minutes a law. It finds the rarer races.
    pub const fn heavy(mut self) -> Self {
        self.heavy = true;
        self.time_limit = Duration::from_secs(600);
        self
    }

    /// How long a law may take before it has failed, with the step that it hung in.
    ///
    /// A quarter of it is how long the suite bears with a store that answers "come again", so a store that waits five
    /// seconds for a lock wants more than twenty here.
    pub const fn time_limit(mut self, limit: Duration) -> Self {
        self.time_limit = limit;
        self
    }

    /// Only these laws, in the order of [`Law::ALL`]; none at all means all of them, as without this.
    ///
    /// ```
    /// use inbox_conformance::{Law, Options};
    ///
    /// let options = Options::new().only([Law::Rollback, Law::Once]);
    /// # let _ = options;
    /// ```
    pub fn only(mut self, laws: impl IntoIterator<Item = Law>) -> Self {
        self.only = laws.into_iter().collect();
        self
    }

    pub(crate) fn asks_for(&self, law: Law) -> bool {
        self.only.is_empty() || self.only.contains(&law)
    }

    pub(crate) const fn limit(&self) -> Duration {
        self.time_limit
    }

    /// How long a condition is waited for before it counts as never coming.
    pub(crate) fn patience(&self) -> Duration {
        self.time_limit / 4
    }

    /// How long a rival is given to get to where it waits. Too short a time makes a law weaker, never wrong.
    pub(crate) const fn glimpse(&self) -> Duration {
        Duration::from_millis(if self.heavy { 200 } else { 40 })
    }

    /// One number for the ordinary suite, another for the heavy one.
    pub(crate) const fn scale(&self, ordinary: usize, heavy: usize) -> usize {
        if self.heavy { heavy } else { ordinary }
    }
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}
