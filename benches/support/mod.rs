//! Comparing two ways of doing a thing, side by side in one run.

use std::time::{Duration, Instant};

/// How a comparison came out: our time as a multiple of theirs.
pub(crate) struct Ratio {
    rounds: Vec<f64>,
}

impl Ratio {
    /// The middle of all rounds.
    pub(crate) fn median(&self) -> f64 {
        self.rounds[self.rounds.len() / 2]
    }
}

/// Times `ours` and `theirs` in turn, `rounds` times, so that whatever the machine does besides befalls both; who goes
/// first alternates. Prints both times and the ratio, with the quartiles of the rounds.
///
/// Both are given how often to do the thing, and answer how long it took.
pub(crate) fn compare(
    name: &str,
    rounds: u32,
    times: u32,
    mut ours: impl FnMut(u32) -> Duration,
    mut theirs: impl FnMut(u32) -> Duration,
) -> Ratio {
    ours(times);
    theirs(times);
    let (mut our_times, mut their_times, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let (our_time, their_time) = if round % 2 == 0 {
            let our_time = ours(times);
            (our_time, theirs(times))
        } else {
            let their_time = theirs(times);
            (ours(times), their_time)
        };
        our_times.push(our_time);
        their_times.push(their_time);
        ratios.push(our_time.as_secs_f64() / their_time.as_secs_f64());
    }
    our_times.sort();
    their_times.sort();
    ratios.sort_by(f64::total_cmp);
    let each = |all: &[Duration]| all[all.len() / 2].as_secs_f64() * 1e6 / f64::from(times);
    let quartile = |part: usize| ratios[ratios.len() * part / 4];
    println!(
        "{name:<52} ours {:>9.2} us   by hand {:>9.2} us   ratio {:.3} (quartiles {:.3} to {:.3})",
        each(&our_times),
        each(&their_times),
        quartile(2),
        quartile(1),
        quartile(3),
    );
    Ratio { rounds: ratios }
}

/// How long `times` runs of `f` take.
pub(crate) fn timed(times: u32, mut f: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..times {
        f();
    }
    start.elapsed()
}
