//! What the driver's errors mean: by kind and code, never by text.

use deadpool::managed::{PoolError, TimeoutType};
use inbox_core::{Error, ErrorKind};
use redis::{RedisError, ServerErrorKind};

/// The kind of a driver's error.
pub(crate) fn kind_of(error: &RedisError) -> ErrorKind {
    match error.kind() {
        redis::ErrorKind::Server(ServerErrorKind::NoPerm) | redis::ErrorKind::AuthenticationFailed => ErrorKind::Denied,
        redis::ErrorKind::Server(ServerErrorKind::CrossSlot) | redis::ErrorKind::InvalidClientConfig => {
            ErrorKind::InvalidInput
        }
        redis::ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask) => ErrorKind::Unsupported,
        // READONLY comes of a replica, or of a primary that has just become one: the next connection finds the new one.
        redis::ErrorKind::Io
        | redis::ErrorKind::Server(
            ServerErrorKind::ReadOnly
            | ServerErrorKind::BusyLoading
            | ServerErrorKind::MasterDown
            | ServerErrorKind::ClusterDown
            | ServerErrorKind::TryAgain,
        ) => ErrorKind::Unavailable,
        _ => match error.code() {
            // Memory is full, replicas are missing, the disk refuses: each may pass.
            Some("OOM" | "NOREPLICAS" | "MISCONF") => ErrorKind::Unavailable,
            Some("NOAUTH" | "WRONGPASS") => ErrorKind::Denied,
            _ => ErrorKind::Store,
        },
    }
}

/// Our error for a driver's error met in a transaction while `doing` something (said as in "could not ...").
pub(crate) fn driver_error(doing: &str, error: RedisError) -> Error {
    error_of(doing, error, "; nothing was written, run the transaction again")
}

/// The same for a command by itself, whose answer may be what was lost. There is none that cannot be given again.
pub(crate) fn command_error(doing: &str, error: RedisError) -> Error {
    error_of(doing, error, "; do it again, which is harmless if it was done")
}

fn error_of(doing: &str, error: RedisError, unavailable: &str) -> Error {
    let kind = kind_of(&error);
    let remedy = match kind {
        ErrorKind::Unavailable => unavailable,
        ErrorKind::Denied => {
            "; let the user run WATCH, MGET, GET, TIME, MULTI, EXEC, UNWATCH, SET and DEL on the inbox's keys, and EVAL, \
             HGET, HMGET, HGETALL, HSET, ZADD, ZREM and ZRANGE for dead letters"
        }
        ErrorKind::InvalidInput if error.kind() == redis::ErrorKind::Server(ServerErrorKind::CrossSlot) => {
            "; in a cluster all keys of a transaction must be in one slot: set a tag and use it in the business keys too"
        }
        ErrorKind::Unsupported => "; this connection goes to one node of a cluster, and the slot is another's",
        _ => "",
    };
    Error::new(kind, format!("could not {doing}: {error}{remedy}")).with_source(error)
}

pub(crate) fn pool_error(error: PoolError<RedisError>) -> Error {
    match error {
        PoolError::Backend(error) => driver_error("connect to Redis", error),
        PoolError::Timeout(TimeoutType::Wait) => Error::new(
            ErrorKind::Busy,
            "every connection of the pool is in a transaction; keep transactions short, make the pool larger, and open \
             none inside a handler: it has one already",
        ),
        PoolError::Timeout(_) => Error::new(
            ErrorKind::Unavailable,
            "Redis did not answer in time to a new connection; look whether it is there",
        ),
        other => Error::new(ErrorKind::Unavailable, format!("no connection to Redis: {other}")).with_source(other),
    }
}
