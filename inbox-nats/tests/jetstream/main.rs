//! The consumer on a real JetStream, one private server a test.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;
mod dead_letters;
mod faults;
mod handling;
mod ids;
mod settings;
