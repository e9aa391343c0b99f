//! The guide's programs, compiled and run: every Rust block of a chapter is a doctest of this crate, with its feature
//! `programs` (`cargo test -p guide --all-features`).
//!
//! Blocks that need a server start a private one in hidden lines, so that they run as they stand. What the guide itself
//! must be (every chapter listed, every link good) is in `tests/whole.rs`.

/// A chapter for each file.
macro_rules! chapters {
    ($($name:ident: $file:literal,)*) => {$(
        #[cfg(all(doctest, feature = "programs"))]
        #[doc = include_str!(concat!("src/", $file))]
        pub struct $name;
    )*};
}

chapters! {
    Introduction: "introduction.md",
    Problem: "problem.md",
    FirstConsumer: "first-consumer.md",
    Backends: "backends.md",
    OwnTransaction: "own-transaction.md",
    Isolation: "isolation.md",
    Batches: "batches.md",
    Ids: "ids.md",
    Retention: "retention.md",
    Jetstream: "jetstream.md",
    NatsOutbox: "nats-outbox.md",
    WritingAStore: "writing-a-store.md",
    MustNot: "must-not.md",
    Limits: "limits.md",
    Figures: "figures.md",
}
