//! What the driver's errors mean: by result code, never by text.

use inbox_core::{Error, ErrorKind};
use rusqlite::ErrorCode;
use rusqlite::ffi;

/// The kind of a driver's error, from SQLite's (extended) result codes: <https://www.sqlite.org/rescode.html>.
pub(crate) fn kind_of(error: &rusqlite::Error) -> ErrorKind {
    let rusqlite::Error::SqliteFailure(failure, _) = error else {
        return ErrorKind::Store;
    };
    match failure.code {
        // The snapshot that a transaction has read is behind: waiting cannot help it, only a fresh transaction can.
        ErrorCode::DatabaseBusy if failure.extended_code == ffi::SQLITE_BUSY_SNAPSHOT => ErrorKind::Conflict,
        ErrorCode::DatabaseBusy | ErrorCode::FileLockingProtocolFailed => ErrorKind::Busy,
        // Within one connection, a statement of its own that is still open is in the way: that does not pass.
        ErrorCode::DatabaseLocked if failure.extended_code == ffi::SQLITE_LOCKED_SHAREDCACHE => ErrorKind::Busy,
        ErrorCode::SchemaChanged | ErrorCode::OperationInterrupted => ErrorKind::Conflict,
        ErrorCode::PermissionDenied | ErrorCode::ReadOnly | ErrorCode::AuthorizationForStatementDenied => {
            ErrorKind::Denied
        }
        ErrorCode::CannotOpen | ErrorCode::SystemIoFailure | ErrorCode::OutOfMemory | ErrorCode::DiskFull => {
            ErrorKind::Unavailable
        }
        _ => ErrorKind::Store,
    }
}

/// Our error for a driver's error met while `doing` something (said as in "could not ...").
pub(crate) fn driver_error(doing: &str, error: rusqlite::Error) -> Error {
    let kind = kind_of(&error);
    let message = match (kind, &error) {
        (ErrorKind::Conflict, rusqlite::Error::SqliteFailure(failure, _))
            if failure.extended_code != ffi::SQLITE_BUSY_SNAPSHOT =>
        {
            format!("could not {doing}: {error}; roll back and run the transaction again")
        }
        (ErrorKind::Conflict, _) => format!(
            "could not {doing}: the database has changed since this transaction first read it; roll back and run it \
             again, and begin it with BEGIN IMMEDIATE, so that this cannot happen"
        ),
        (ErrorKind::Busy, _) => format!(
            "could not {doing}: another connection holds the database's lock; run the transaction again, or keep \
             transactions shorter than the busy timeout"
        ),
        (ErrorKind::Denied, _) => {
            format!("could not {doing}: SQLite refuses it ({error}); make file and folder writable")
        }
        (_, rusqlite::Error::SqliteFailure(failure, _)) if failure.code == ErrorCode::ConstraintViolation => format!(
            "could not {doing}: a constraint or trigger refuses it ({error}); leave the inbox's table to the inbox"
        ),
        (_, rusqlite::Error::SqliteFailure(failure, _)) if failure.code == ErrorCode::DiskFull => {
            format!("could not {doing}: the disk is full; free some")
        }
        _ => format!("could not {doing}: {error}"),
    };
    Error::new(kind, message).with_source(error)
}

/// As [`driver_error`], for a commit: where the disk failed, the record may be on it or not.
pub(crate) fn commit_error(error: rusqlite::Error) -> Error {
    let disk =
        matches!(&error, rusqlite::Error::SqliteFailure(failure, _) if failure.code == ErrorCode::SystemIoFailure);
    if disk {
        let message = format!(
            "the disk failed during the commit ({error}), so whether it happened is open; do not acknowledge: the \
             next delivery finds out"
        );
        return Error::new(ErrorKind::OutcomeUnknown, message).with_source(error);
    }
    driver_error("commit", error)
}

/// A transaction that was over before the inbox got to use it.
pub(crate) fn ended(doing: &str) -> Error {
    Error::new(
        ErrorKind::TransactionEnded,
        format!(
            "could not {doing}: the transaction is over; it was committed or rolled back by other means, such as a raw \
             COMMIT or ROLLBACK, or by SQLite after an error of the disk; leave its end to the inbox and handle every \
             error of a statement"
        ),
    )
}
