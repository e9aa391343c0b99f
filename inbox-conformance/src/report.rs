//! [`Report`]: how a store fared.

use std::fmt;
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};

use crate::{Failure, Law};

/// As wide as the table gets, so that it can be read in a terminal and in the log of a build server.
const WIDTH: u16 = 118;

/// How a store fared with each law. Prints as a table, with a [`summary`](Self::summary) and the failures in full below it.
#[derive(Debug, Clone)]
pub struct Report {
    laws: Vec<LawReport>,
}

/// How a store fared with one law.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LawReport {
    /// Which law.
    pub law: Law,
    /// What came of it.
    pub outcome: Outcome,
    /// How long that took.
    pub took: Duration,
}

/// What came of a law.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub enum Outcome {
    /// The store keeps to it.
    Passed,
    /// The store breaks it.
    Failed(Failure),
    /// The fixture says that it does not apply to this store, for this reason.
    DoesNotApply(String),
}

impl Report {
    pub(crate) const fn new(laws: Vec<LawReport>) -> Self {
        Self { laws }
    }

    /// Whether no law is broken. Laws that do not apply are not counted against the store, so look at
    /// [`laws`](Self::laws) or at the table for what was not asked of it.
    pub fn is_conforming(&self) -> bool {
        self.failures().next().is_none()
    }

    /// All laws that were run, in order.
    pub fn laws(&self) -> &[LawReport] {
        &self.laws
    }

    /// What came of `law`; `None` if it was not run.
    pub fn outcome(&self, law: Law) -> Option<&Outcome> {
        self.laws
            .iter()
            .find(|report| report.law == law)
            .map(|report| &report.outcome)
    }

    /// How many laws are broken, and with which to begin: the first, for later laws build on earlier ones, and what
    /// breaks one of these often shows in many.
    ///
    /// Such as ``2 of 15 laws broken; begin with `rollback` ``, or `14 laws kept; 1 does not apply`.
    pub fn summary(&self) -> String {
        let counted = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let Some(first) = self.failures().next() else {
            let away = self
                .laws
                .iter()
                .filter(|report| matches!(report.outcome, Outcome::DoesNotApply(_)));
            let away = away.count();
            let kept = counted(self.laws.len() - away, "law") + " kept";
            return match away {
                0 => kept,
                1 => format!("{kept}; 1 does not apply"),
                more => format!("{kept}; {more} do not apply"),
            };
        };
        let (broken, all) = (self.failures().count(), counted(self.laws.len(), "law"));
        match broken {
            1 => format!("1 of {all} broken: `{}`", first.law),
            _ => format!("{broken} of {all} broken; begin with `{}`", first.law),
        }
    }

    /// The laws that the store breaks.
    pub fn failures(&self) -> impl Iterator<Item = &Failure> {
        self.laws.iter().filter_map(|report| match &report.outcome {
            Outcome::Failed(failure) => Some(failure),
            Outcome::Passed | Outcome::DoesNotApply(_) => None,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table
            .load_preset(presets::UTF8_FULL_CONDENSED)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .set_width(WIDTH)
            .set_header(["law", "what it promises", "outcome", "time"]);
        for report in &self.laws {
            let outcome = match &report.outcome {
                Outcome::Passed => "passed".into(),
                Outcome::Failed(_) => "FAILED".into(),
                Outcome::DoesNotApply(reason) => format!("does not apply: {reason}"),
            };
            table.add_row([
                report.law.name().into(),
                report.law.promise().into(),
                outcome,
                format!("{} ms", report.took.as_millis()),
            ]);
        }
        write!(f, "{table}\n{}", self.summary())?;
        for failure in self.failures() {
            write!(f, "\n\n{failure}")?;
        }
        Ok(())
    }
}
