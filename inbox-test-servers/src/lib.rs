//! Private database servers for tests, from the machine's own binaries.

mod programs;
mod redis;
mod shell;

pub use redis::{Redis, redis_url};

/// A name that no other test has, in this process or another: a letter, digits and underscores, at most 40 bytes.
pub fn unique_name() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |since| since.as_nanos());
    format!("t{nanos:x}_{}_{next}", std::process::id())
}
