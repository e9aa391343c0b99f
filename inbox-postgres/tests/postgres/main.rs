//! The PostgreSQL backend against real servers: each trap that such inboxes have met in the field, as a test.

#![allow(clippy::unwrap_used, reason = "tests stop at the first surprise, in helpers too")]

mod cancel;
mod claims;
mod crash;
mod dead_letters;
mod guards;
mod names;
mod place;
mod pooler;
mod purge;
mod setup;
mod wait;
