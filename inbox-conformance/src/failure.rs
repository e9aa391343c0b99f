//! [`Failure`]: what a broken law says.

use std::error::Error as StdError;
use std::fmt;

use inbox_core::Error;

use crate::Law;

/// A law that a store broke: what was done, what should have come of it, what came, and what that points to.
///
/// Prints as several lines, for somebody who has never read the suite's code.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// Which law.
    pub law: Law,
    /// What the suite did, step by step; the last step is the one that went wrong.
    pub did: Vec<String>,
    /// What a correct store does then.
    pub expected: String,
    /// What this store did.
    pub saw: String,
    /// The mistake or race that this points to.
    pub suspect: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the store breaks the law `{}`: {}", self.law, self.law.promise())?;
        for (index, step) in self.did.iter().enumerate() {
            let label = if index == 0 { "did" } else { "" };
            writeln!(f, "  {label:<9}{:>2}. {step}", index + 1)?;
        }
        writeln!(f, "  {:<9}{}", "expected", Indented(&self.expected))?;
        writeln!(f, "  {:<9}{}", "saw", Indented(&self.saw))?;
        writeln!(f, "  {:<9}{}", "suspect", Indented(&self.suspect))?;
        write!(f, "  usual mistakes: {}", self.law.usual_mistakes())
    }
}

impl StdError for Failure {}

/// Text whose further lines stand below its first one.
struct Indented<'a>(&'a str);

impl fmt::Display for Indented<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, line) in self.0.lines().enumerate() {
            if index > 0 {
                f.write_str("\n           ")?;
            }
            f.write_str(line)?;
        }
        Ok(())
    }
}

/// An error with its kind and all its causes, which is what one wants to see of an error that should not be.
pub(crate) fn in_full(error: &Error) -> String {
    let retryable = if error.is_retryable() {
        "retryable"
    } else {
        "not retryable"
    };
    let mut text = format!("the error \"{error}\" (kind: {}, {retryable})", error.kind());
    for cause in links(error).skip(1) {
        text.push_str("\ncaused by: ");
        text.push_str(&cause.to_string());
    }
    text
}

/// An error and its causes, down to the first one.
pub(crate) fn links(error: &Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    let mut next: Option<&(dyn StdError + 'static)> = Some(error);
    std::iter::from_fn(move || {
        let link = next?;
        next = link.source();
        Some(link)
    })
}
