//! What the driver's errors mean here: by SQLSTATE, never by a message's text.

use std::borrow::Cow;

use inbox_core::{Error, ErrorKind};

use crate::schema::Table;

/// The kind of an error of the driver's, wherever it came up.
pub(crate) fn kind_of(error: &sqlx::Error) -> ErrorKind {
    match error {
        sqlx::Error::Database(error) => error.code().map_or(ErrorKind::Store, |code| kind_of_code(&code)),
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::WorkerCrashed | sqlx::Error::BeginFailed => {
            ErrorKind::Unavailable
        }
        sqlx::Error::PoolTimedOut => ErrorKind::Busy,
        sqlx::Error::Configuration(_) => ErrorKind::InvalidInput,
        // A closed pool among them: the application closed it, and to try again changes nothing.
        _ => ErrorKind::Store,
    }
}

fn kind_of_code(code: &str) -> ErrorKind {
    match code {
        // serialization_failure, deadlock_detected.
        "40001" | "40P01" => ErrorKind::Conflict,
        // lock_not_available: a lock timeout or NOWAIT; query_canceled: a statement timeout or an administrator.
        "55P03" | "57014" => ErrorKind::Busy,
        // in_failed_sql_transaction.
        "25P02" => ErrorKind::TransactionEnded,
        // insufficient_privilege, and the class of invalid authorization.
        "42501" | "28000" | "28P01" => ErrorKind::Denied,
        // read_only_sql_transaction: this is a standby, as after a failover, until the pool connects elsewhere;
        // idle_in_transaction_session_timeout, transaction_timeout and idle_session_timeout, which end the session;
        // admin_shutdown, crash_shutdown, cannot_connect_now.
        "25006" | "25P03" | "25P04" | "57P05" | "57P01" | "57P02" | "57P03" => ErrorKind::Unavailable,
        // The classes of connection exceptions and of insufficient resources: disk, memory, connections.
        _ if code.starts_with("08") || code.starts_with("53") => ErrorKind::Unavailable,
        _ => ErrorKind::Store,
    }
}

/// Errors by which the table shows that it is not as a claim needs it.
fn concerns_the_table(code: &str) -> bool {
    matches!(
        code,
        // undefined_table, invalid_schema_name, undefined_column, no unique key for the conflict target,
        // datatype_mismatch, a rule in the way.
        "42P01" | "3F000" | "42703" | "42P10" | "42804" | "0A000"
        // What no row of a claim violates in a table of our making: not null, foreign key, unique, check, exclusion.
        | "23502" | "23503" | "23505" | "23514" | "23P01"
        // string_data_right_truncation: a column too short for the group.
        | "22001"
    )
}

/// The error of a statement of ours on `table`.
pub(crate) fn of_statement(error: sqlx::Error, table: &Table) -> Error {
    let database = error.as_database_error();
    let code = database.and_then(|database| database.code().map(Cow::into_owned));
    let constraint = database.and_then(|database| database.constraint().map(str::to_owned));
    let kind = match code.as_deref() {
        Some(code) if concerns_the_table(code) => ErrorKind::Schema,
        _ => kind_of(&error),
    };
    let message = match (kind, code.as_deref(), constraint) {
        (ErrorKind::Schema, Some("42P01" | "3F000"), _) => format!(
            "the inbox's table {table} does not exist: {error}; call `setup`, whose error has the SQL where the role may not"
        ),
        (ErrorKind::Schema, _, Some(constraint)) => format!(
            "the table {table} has a constraint {constraint} that this message's record violates: {error}; the message \
             is neither claimed nor a duplicate; drop the constraint, an inbox's table has no other than its key"
        ),
        (ErrorKind::Schema, _, None) => format!(
            "the table {table} is not as the inbox needs it: {error}; `check` says what is amiss and what to do"
        ),
        (ErrorKind::Denied, _, _) => format!(
            "the role that is connected may not do this to {table}: {error}; have SELECT, INSERT, UPDATE and DELETE on \
             the table granted to it"
        ),
        (ErrorKind::TransactionEnded, _, _) => {
            "the transaction had failed before the claim: a statement in it returned an error, which was not heeded, \
             and PostgreSQL refuses all further ones (25P02); roll back, and see to the first error"
                .into()
        }
        (ErrorKind::Busy, Some("55P03"), _) => format!(
            "another transaction holds on to what this claim waits for, for longer than the lock timeout: {error}; roll \
             back and run the transaction again"
        ),
        (ErrorKind::Busy, None, _) => format!(
            "no connection of the pool came free in time: {error}; run the transaction again, or give the pool more \
             connections than there are transactions at once"
        ),
        (ErrorKind::Conflict, _, _) => {
            format!("PostgreSQL ended the transaction in favour of another: {error}; roll back and run it again")
        }
        (ErrorKind::Unavailable, Some(code), _) if code.starts_with("53") => format!(
            "the server has run out of a resource, such as disk, memory or connections: {error}; free some, and run the \
             transaction again"
        ),
        (ErrorKind::Unavailable, _, _) => format!("the database is out of reach: {error}; run the transaction again"),
        _ => format!("the database refused: {error}"),
    };
    Error::new(kind, message).with_source(error)
}

/// The error of a `COMMIT` that was sent.
pub(crate) fn of_commit(error: sqlx::Error, table: &Table) -> Error {
    let unknown = match &error {
        // The server says so itself: the transaction is rolled back. Not so where it says good-bye, as the commit may
        // stand by then (57P01 ends the wait for a synchronous standby after the commit on this server); only the
        // timeouts of an idle transaction came before the commit.
        sqlx::Error::Database(database) => database
            .code()
            .is_some_and(|code| code.starts_with("57P0") && code != "57P05" || code.starts_with("08")),
        // Whatever broke, the COMMIT was on its way.
        _ => true,
    };
    if !unknown {
        return of_statement(error, table);
    }
    Error::new(
        ErrorKind::OutcomeUnknown,
        format!(
            "the commit was sent and its answer lost, so it may stand: {error}; do not acknowledge and undo nothing, the \
             next delivery is a duplicate exactly if it does"
        ),
    )
    .with_source(error)
}
