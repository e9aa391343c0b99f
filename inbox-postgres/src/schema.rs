//! What is stored, and every statement that touches it.
//!
//! Statements are templates: `{table}` is the quoted name, `$1` and so on are values. They are sent prepared, with the
//! values in binary; or, where a pooler between cannot do with prepared statements, and for the two that are no single
//! statement, as text with the values written into it. A value then is nothing but hexadecimal digits, hyphens, commas
//! and braces, so that there is nothing to quote and nothing to inject.

use std::fmt;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use inbox_core::{Error, ErrorKind, Result, check_name};
use sqlx::encode::IsNull;
use sqlx::error::BoxDynError;
use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgArgumentBuffer, PgRow, PgTypeInfo};
use sqlx::{AssertSqlSafe, Encode, PgConnection, Postgres, Row, Type};

/// The version of the tables that this crate makes.
pub(crate) const VERSION: u32 = 2;

/// The version from which on claims can be made. Later ones add dead letters.
pub(crate) const CLAIMS_SINCE: u32 = 1;

/// The comment on a table of ours, before its version.
const COMMENT: &str = "inbox-pattern schema ";

/// A step from one version to the next, which concerns one table.
enum Migration {
    Records(&'static [&'static str]),
    Letters(&'static [&'static str]),
}

/// What brings tables of version 0 (none) to 1, and so on.
const MIGRATIONS: [Migration; VERSION as usize] = [
    Migration::Records(&[
        // The time stands before the group: 16 bytes, 8 bytes, and then what has a length of its own pads least.
        // "C": groups are compared byte for byte, whatever the database's collation.
        "CREATE TABLE {table} (\n    \
         event_id uuid NOT NULL,\n    \
         processed_at timestamptz NOT NULL DEFAULT clock_timestamp(),\n    \
         consumer_group text COLLATE \"C\" NOT NULL,\n    \
         fingerprint uuid,\n    \
         PRIMARY KEY (event_id, consumer_group)\n)",
        // For the purge: a group's records in the order of age. By the minute, because a B-tree keeps equal entries as one
        // with a list of rows, of some 6 bytes each; by the exact time, each would take 30 and more.
        "CREATE INDEX ON {table} (consumer_group, date_trunc('minute', processed_at AT TIME ZONE 'UTC'))",
    ]),
    Migration::Letters(&[
        // Headers are text and not JSON to the server: its types refuse some of what brokers let through.
        "CREATE TABLE {table} (\n    \
         event_id uuid NOT NULL,\n    \
         died_at timestamptz NOT NULL,\n    \
         published_at timestamptz,\n    \
         attempts bigint NOT NULL,\n    \
         consumer_group text COLLATE \"C\" NOT NULL,\n    \
         state text NOT NULL,\n    \
         subject text NOT NULL,\n    \
         origin text NOT NULL,\n    \
         error text NOT NULL,\n    \
         headers text NOT NULL,\n    \
         payload bytea NOT NULL,\n    \
         PRIMARY KEY (event_id, consumer_group)\n)",
        // For a page of a group's list.
        "CREATE INDEX ON {table} (consumer_group, died_at, event_id)",
    ]),
];

/// The key of the lock under which tables are made: "inbox" and a version, in ASCII. Held by one transaction, so that
/// it ends with it, through a pooler too.
const SETUP_LOCK: i64 = 0x69_6e62_6f78_0001;

/// A claim that waits, as plainly as SQL allows: one statement, one round trip.
///
/// The conflict clause names its target: without one, a violation of any other unique index would pass for a
/// duplicate. The wait is bounded on the server, because a client that goes away does not end its statement: where
/// the transaction has no lock timeout, it gets `{bound}` before the row goes in, and 0 again in RETURNING. Where no
/// row is returned, `FIND` puts it back; where an error ends the transaction, that ends the setting too. `{bound}` is
/// no value that people choose, and so tells that it is ours.
const CLAIM: &str = "\
INSERT INTO {table} (event_id, consumer_group, processed_at{fingerprint column})
VALUES ($1, $2, CASE WHEN current_setting('lock_timeout') <> '0'
                       OR set_config('lock_timeout', '{bound}', true) IS NOT NULL THEN clock_timestamp() END{fingerprint value})
ON CONFLICT (event_id, consumer_group) DO NOTHING
RETURNING CASE WHEN current_setting('lock_timeout') = '{bound}' THEN set_config('lock_timeout', '0', true) END";

/// The record of a key, for a duplicate's time. Always one row, so that the lock timeout is put back in any case.
const FIND: &str = "\
SELECT t.event_id IS NOT NULL, {microseconds}, {fingerprint},
       CASE WHEN current_setting('lock_timeout') = '{bound}' THEN set_config('lock_timeout', '0', true) END
FROM (SELECT) one LEFT JOIN {table} t ON t.event_id = $1 AND t.consumer_group = $2";

/// Many claims that wait, in one statement: `$1` ids in ascending order and without repetition, `$3` their
/// fingerprints, if any has one, `$4` how many.
///
/// Inserted in the array's order, in which `unnest` gives them out, so that two batches wait for each other in one
/// direction only. Answers how many went in; if not all, also which: `FIND_BATCH` then looks for the others. (To join
/// their records here costs 6 % of a batch of 100 that are all new, and to sort them once more, 5 %.)
const CLAIM_BATCH: &str = "\
WITH was AS MATERIALIZED (
    SELECT CASE WHEN current_setting('lock_timeout') = '0' THEN set_config('lock_timeout', '{bound}', true) END AS bound
), claimed AS (
    INSERT INTO {table} (event_id, consumer_group, processed_at{fingerprint column})
    SELECT a.event_id, $2::text, clock_timestamp(){fingerprint column}
    FROM was, unnest($1::uuid[]{fingerprint array}) AS a (event_id{fingerprint column})
    ON CONFLICT (event_id, consumer_group) DO NOTHING
    RETURNING event_id
)
SELECT count(*), CASE WHEN count(*) < $4::bigint THEN array_agg(event_id)::text END,
       CASE WHEN (SELECT bound FROM was) IS NOT NULL THEN set_config('lock_timeout', '0', true) END
FROM claimed";

/// The records of many keys.
const FIND_BATCH: &str = "\
SELECT a.ord, t.event_id IS NOT NULL, {microseconds}, {fingerprint}
FROM unnest($1::uuid[]) WITH ORDINALITY AS a (event_id, ord)
LEFT JOIN {table} t ON t.event_id = a.event_id AND t.consumer_group = $2::text";

/// A claim that does not wait, or not for long: two statements in one text, one round trip.
///
/// PostgreSQL has no conflict clause that does not wait, and a lock timeout is an error, which would end the caller's
/// transaction; so the insert stands in a block with an exception clause, which is a savepoint on the server. Undoing
/// the block undoes its settings too. No advisory locks instead: they see no insert of other programs', claims that
/// wait would have to take them too, and a batch of 50,000 would exhaust the server's lock table.
const CLAIM_BOUNDED: &str = "\
DO {tag} DECLARE timeout_before constant text := current_setting('lock_timeout'); BEGIN
    PERFORM set_config('inbox_pattern.answer', 'f', true);
    BEGIN
        PERFORM set_config('lock_timeout', '{milliseconds}', true);
        INSERT INTO {table} (event_id, consumer_group, processed_at{fingerprint column})
        VALUES ($1, $2, clock_timestamp(){fingerprint value})
        ON CONFLICT (event_id, consumer_group) DO NOTHING;
        PERFORM set_config('inbox_pattern.answer', CASE WHEN FOUND THEN 'n' ELSE 'd' END, true),
                set_config('lock_timeout', timeout_before, true);
    EXCEPTION WHEN lock_not_available THEN NULL;
    END;
END {tag};
SELECT current_setting('inbox_pattern.answer'), t.event_id IS NOT NULL, {microseconds}, {fingerprint}
FROM (SELECT) one LEFT JOIN {table} t
ON current_setting('inbox_pattern.answer') = 'd' AND t.event_id = $1 AND t.consumer_group = $2";

/// Many claims that do not wait, or not for long. Values as in `CLAIM_BATCH`. Answers a letter for each id (`n`ew, a
/// `d`uplicate, in `f`light), then the records of the `d`s.
///
/// First all at once, waiting for nothing. If one of them is in flight, that is undone, and they are gone through one
/// by one until no time is left, to find all that are; which is undone as well, by an exception, and all others are
/// claimed at once. So savepoints are as many as messages in flight, not as messages. Should others take the place of
/// those found, three times over, all of them are called in flight: none is claimed, and they come again.
const CLAIM_BATCH_BOUNDED: &str = "\
DO {tag} DECLARE
    ids constant uuid[] := $1;
    fingerprints constant uuid[] := $3;
    letters text[] := array_fill('?'::text, ARRAY[$4::int]);
    timeout_before constant text := current_setting('lock_timeout');
    give_up constant timestamptz := clock_timestamp() + {milliseconds} * interval '1 millisecond';
    answer text;
    i int;
BEGIN
    FOR attempt IN 1..3 LOOP
        BEGIN
            PERFORM set_config('lock_timeout', '1', true);
            WITH asked AS MATERIALIZED (
                SELECT * FROM unnest(ids, fingerprints, letters) WITH ORDINALITY AS a (event_id, fingerprint, letter, ord)
            ), claimed AS (
                INSERT INTO {table} (event_id, consumer_group, processed_at{fingerprint column})
                SELECT event_id, $2, clock_timestamp(){fingerprint column} FROM asked WHERE letter <> 'f' ORDER BY ord
                ON CONFLICT (event_id, consumer_group) DO NOTHING
                RETURNING event_id
            )
            SELECT string_agg(CASE WHEN a.letter = 'f' THEN 'f' WHEN c.event_id IS NULL THEN 'd' ELSE 'n' END, ''
                              ORDER BY a.ord)
            INTO answer FROM asked a LEFT JOIN claimed c ON c.event_id = a.event_id;
            PERFORM set_config('lock_timeout', timeout_before, true);
            EXIT;
        EXCEPTION WHEN lock_not_available THEN answer := NULL;
        END;
        i := 1;
        WHILE i <= $4 LOOP
            BEGIN
                WHILE i <= $4 LOOP
                    IF letters[i] <> 'f' THEN
                        PERFORM set_config('lock_timeout', greatest(1,
                            ceil(extract(epoch FROM give_up - clock_timestamp()) * 1000))::bigint::text, true);
                        INSERT INTO {table} (event_id, consumer_group, processed_at)
                        VALUES (ids[i], $2, clock_timestamp())
                        ON CONFLICT (event_id, consumer_group) DO NOTHING;
                    END IF;
                    i := i + 1;
                END LOOP;
                RAISE SQLSTATE 'IBX01';
            EXCEPTION
                WHEN lock_not_available THEN letters[i] := 'f'; i := i + 1;
                WHEN SQLSTATE 'IBX01' THEN NULL;
            END;
        END LOOP;
    END LOOP;
    PERFORM set_config('inbox_pattern.answer', coalesce(answer, repeat('f', $4)), true);
END {tag};
SELECT current_setting('inbox_pattern.answer');
SELECT a.ord, t.event_id IS NOT NULL, {microseconds}, {fingerprint}
FROM unnest($1, string_to_array(current_setting('inbox_pattern.answer'), NULL)) WITH ORDINALITY AS a (event_id, letter, ord)
LEFT JOIN {table} t ON t.event_id = a.event_id AND t.consumer_group = $2
WHERE a.letter = 'd'";

/// Whether this still is the transaction that `BEGIN` and a local setting opened, asked before its commit. A
/// transaction that failed refuses it, with 25P02; one that was ended and replaced has lost the setting.
const GUARD: &str = "SELECT coalesce(current_setting('inbox_pattern.tx', true), '')";

/// The same, and the time of the records set anew: `$1` ids, `$2` groups, `$3` the setting.
const GUARD_AND_STAMP: &str = "\
WITH stamped AS (
    UPDATE {table} t SET processed_at = clock_timestamp()
    FROM unnest($1::uuid[], $2::text[]) AS a (event_id, consumer_group)
    WHERE t.event_id = a.event_id AND t.consumer_group = a.consumer_group
      AND current_setting('inbox_pattern.tx', true) = $3::text
)
SELECT coalesce(current_setting('inbox_pattern.tx', true), '')";

/// Removes a record.
const FORGET: &str = "DELETE FROM {table} WHERE event_id = $1 AND consumer_group = $2 RETURNING true";

/// One step of a purge of the group `$1`: at most `$3` records that are older than `$2` microseconds.
///
/// The index has a group's records by the minute, so a step reads its own records and no more, beginning with the
/// oldest. Rows that another purge or a transaction holds are skipped. By the key, not by the row's place, which is
/// not unique where the table is partitioned.
const PURGE_GROUP: &str = "\
WITH old AS MATERIALIZED (
    SELECT event_id, consumer_group FROM {table}
    WHERE consumer_group = $1 AND {old}
    ORDER BY date_trunc('minute', processed_at AT TIME ZONE 'UTC') LIMIT $3::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {table} t USING old WHERE t.event_id = old.event_id AND t.consumer_group = old.consumer_group
    RETURNING 1
)
SELECT count(*) FROM gone";

/// The same for every group: the groups are found by jumps through the index, one for each.
const PURGE_ALL: &str = "\
WITH RECURSIVE groups AS (
    (SELECT consumer_group FROM {table} ORDER BY consumer_group LIMIT 1)
    UNION ALL
    SELECT (SELECT t.consumer_group FROM {table} t WHERE t.consumer_group > g.consumer_group
            ORDER BY t.consumer_group LIMIT 1)
    FROM groups g WHERE g.consumer_group IS NOT NULL
), old AS MATERIALIZED (
    SELECT o.* FROM groups g CROSS JOIN LATERAL (
        SELECT event_id, consumer_group FROM {table}
        WHERE consumer_group = g.consumer_group AND {old}
        ORDER BY date_trunc('minute', processed_at AT TIME ZONE 'UTC') LIMIT $3::bigint FOR UPDATE SKIP LOCKED
    ) o LIMIT $3::bigint
), gone AS (
    DELETE FROM {table} t USING old WHERE t.event_id = old.event_id AND t.consumer_group = old.consumer_group
    RETURNING 1
)
SELECT count(*) FROM gone, (SELECT $1::text) unused";

/// The same in a table without the index, such as nats-outbox's: reads the table from its beginning, where the oldest
/// rows are, until it has enough.
const PURGE_UNINDEXED: &str = "\
WITH old AS MATERIALIZED (
    SELECT event_id, consumer_group FROM {table}
    WHERE ($1::text IS NULL OR consumer_group = $1::text)
      AND processed_at < statement_timestamp() - $2::bigint * interval '1 microsecond'
    LIMIT $3::bigint FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {table} t USING old WHERE t.event_id = old.event_id AND t.consumer_group = old.consumer_group
    RETURNING 1
)
SELECT count(*) FROM gone";

/// What is old. The first half finds it by the index, and the second is exact. `statement_timestamp()` is the server's
/// clock, and constant in a statement, without which an index cannot be used.
const OLD: &str = "\
date_trunc('minute', processed_at AT TIME ZONE 'UTC')
        <= date_trunc('minute', (statement_timestamp() - $2::bigint * interval '1 microsecond') AT TIME ZONE 'UTC')
      AND processed_at < statement_timestamp() - $2::bigint * interval '1 microsecond'";

/// Keeps a dead letter, in the place of an earlier one of the message.
const ADD_LETTER: &str = "\
INSERT INTO {table} (event_id, consumer_group, state, attempts, published_at, subject, origin, error, headers, payload,
                     died_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, clock_timestamp())
ON CONFLICT (event_id, consumer_group) DO UPDATE SET
    state = excluded.state, attempts = excluded.attempts, published_at = excluded.published_at,
    subject = excluded.subject, origin = excluded.origin, error = excluded.error, headers = excluded.headers,
    payload = excluded.payload, died_at = excluded.died_at";

/// A whole letter.
const FIND_LETTER: &str =
    "SELECT {letter}, t.headers, t.payload FROM {table} t WHERE t.event_id = $1 AND t.consumer_group = $2";

/// A page of a group's letters behind the time `$2` and the id `$3`.
const LIST_LETTERS: &str = "\
SELECT {letter} FROM {table} t WHERE t.consumer_group = $1 AND (t.died_at, t.event_id) > ($2, $3)
ORDER BY t.died_at, t.event_id LIMIT $4::bigint";

/// Turns a letter's state, and answers it whole, after whether that had another state before.
///
/// The lock is taken first, so that of two at once the second sees what the first did. The record is forgotten by a
/// statement of its own behind this one: the snapshot of this one may be older than the record, where it waited for the
/// transaction that gave the message up.
const START_PUT_BACK: &str = "\
WITH was AS MATERIALIZED (
    SELECT event_id, consumer_group, state FROM {table} WHERE event_id = $1 AND consumer_group = $2 FOR UPDATE
)
UPDATE {table} t SET state = 'putting back' FROM was
WHERE t.event_id = was.event_id AND t.consumer_group = was.consumer_group
RETURNING {letter}, t.headers, t.payload, was.state <> 'putting back'";

/// Removes a letter that was put back, if it is still the one of the time `$3`.
const FINISH_PUT_BACK: &str = "\
DELETE FROM {table} WHERE event_id = $1 AND consumer_group = $2 AND state = 'putting back' AND died_at = $3
RETURNING true";

/// What a list shows of a letter. Times in microseconds since 1970.
const LETTER: &str = "\
t.event_id::text, t.state, t.attempts,
CASE WHEN isfinite(t.published_at) THEN (extract(epoch FROM t.published_at) * 1000000)::bigint END,
CASE WHEN isfinite(t.died_at) THEN (extract(epoch FROM t.died_at) * 1000000)::bigint END,
t.subject, t.origin, t.error";

/// How a purge's transaction begins: with its plan settled. Without statistics, as after a load, the planner may
/// else take the whole table for the quicker way.
pub(crate) const BEGIN_PURGE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL enable_seqscan = off; \
     SET LOCAL enable_bitmapscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

/// How other transactions of upkeep begin. (Bytes come as text where statements are not prepared, and in one form of two.)
pub(crate) const BEGIN_UPKEEP: &str =
    "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '60s'; SET LOCAL bytea_output = 'hex'";

/// What the catalogue says of the table `$1`. One row, whether there is one or not.
const INSPECT: &str = "\
SELECT c.oid IS NOT NULL, c.relkind::text, c.relpersistence::text, c.relrowsecurity, obj_description(c.oid, 'pg_class'),
    (SELECT format_type(atttypid, atttypmod) FROM columns WHERE attrelid = c.oid AND attname = 'event_id'),
    (SELECT format_type(atttypid, NULL) FROM columns WHERE attrelid = c.oid AND attname = 'consumer_group'),
    (SELECT format_type(atttypid, NULL) FROM columns WHERE attrelid = c.oid AND attname = 'processed_at'),
    (SELECT format_type(atttypid, atttypmod) FROM columns WHERE attrelid = c.oid AND attname = 'fingerprint'),
    (SELECT l.collisdeterministic FROM columns a JOIN pg_collation l ON l.oid = a.attcollation
     WHERE a.attrelid = c.oid AND a.attname = 'consumer_group'),
    (SELECT string_agg(quote_ident(attname), ', ') FROM columns WHERE attrelid = c.oid AND attnotnull
        AND NOT atthasdef AND attidentity = '' AND attgenerated = ''
        AND attname NOT IN ('event_id', 'consumer_group', 'processed_at')),
    EXISTS (SELECT FROM keys WHERE indrelid = c.oid AND is_the_key),
    EXISTS (SELECT FROM pg_index i JOIN columns a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
            WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 2
              AND a.attname = 'consumer_group' AND i.indkey[1] = 0),
    (SELECT string_agg(quote_ident(k.relname), ', ') FROM keys k WHERE k.indrelid = c.oid AND NOT k.is_the_key
        AND NOT (k.indisprimary AND k.indnkeyatts = 1 AND EXISTS (
            SELECT FROM columns a WHERE a.attnum = k.first AND (a.atthasdef OR a.attidentity <> '')))),
    (SELECT string_agg(quote_ident(tgname), ', ') FROM pg_trigger
     WHERE tgrelid = c.oid AND NOT tgisinternal AND tgenabled <> 'D' AND tgtype & 7 = 7),
    (SELECT string_agg(quote_ident(rulename), ', ') FROM pg_rewrite WHERE ev_class = c.oid AND ev_type = '3'),
    (SELECT quote_ident(nspname) FROM pg_namespace n WHERE n.oid = c.relnamespace)
FROM (SELECT to_regclass($1) AS oid) named LEFT JOIN pg_class c ON c.oid = named.oid";

/// Before `INSPECT`: what it looks things up in.
const INSPECT_WITH: &str = "\
WITH columns AS (
    SELECT * FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped
), keys AS (
    SELECT i.indrelid, r.relname, i.indisprimary, i.indnkeyatts, i.indkey[0] AS first,
        i.indisvalid AND i.indisready AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
        AND i.indnkeyatts = 2 AND (
            SELECT array_agg(a.attname::text ORDER BY a.attname) FROM columns a
            WHERE a.attnum IN (i.indkey[0], i.indkey[1])
        ) = ARRAY['consumer_group', 'event_id'] AS is_the_key
    FROM pg_index i JOIN pg_class r ON r.oid = i.indexrelid
    WHERE i.indrelid = to_regclass($1) AND i.indisunique
)
";

/// What the catalogue says of the table of dead letters `$1`. One row, whether there is one or not.
const INSPECT_LETTERS: &str = "\
SELECT c.oid IS NOT NULL, c.relpersistence::text, obj_description(c.oid, 'pg_class'),
    (SELECT string_agg(w.name || ' ' || w.type, ', ' ORDER BY w.ord)
     FROM unnest(ARRAY['event_id', 'died_at', 'published_at', 'attempts', 'consumer_group', 'state', 'subject', 'origin',
                       'error', 'headers', 'payload'],
                 ARRAY['uuid', 'timestamp with time zone', 'timestamp with time zone', 'bigint', 'text', 'text', 'text',
                       'text', 'text', 'text', 'bytea']) WITH ORDINALITY w (name, type, ord)
     WHERE NOT EXISTS (SELECT FROM columns a WHERE a.attname = w.name AND format_type(a.atttypid, a.atttypmod) = w.type)),
    (SELECT string_agg(quote_ident(attname), ', ') FROM columns WHERE attnotnull
        AND NOT atthasdef AND attidentity = '' AND attgenerated = ''
        AND attname NOT IN ('event_id', 'died_at', 'published_at', 'attempts', 'consumer_group', 'state', 'subject',
                            'origin', 'error', 'headers', 'payload')),
    EXISTS (SELECT FROM keys WHERE is_the_key),
    EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts >= 2
            AND (SELECT a.attname FROM columns a WHERE a.attnum = i.indkey[0]) = 'consumer_group'
            AND (SELECT a.attname FROM columns a WHERE a.attnum = i.indkey[1]) = 'died_at'),
    has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
        AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'),
    current_user::text, c.relkind::text
FROM (SELECT to_regclass($1) AS oid) named LEFT JOIN pg_class c ON c.oid = named.oid";

/// What of the server's settings and the role's rights concerns the guarantee.
const INSPECT_SERVER: &str = "\
SELECT current_setting('synchronous_commit'), current_setting('fsync'), current_setting('full_page_writes'),
    pg_is_in_recovery(), current_setting('default_transaction_read_only'),
    has_table_privilege(to_regclass($1), 'SELECT') AND has_table_privilege(to_regclass($1), 'INSERT'),
    has_table_privilege(to_regclass($1), 'UPDATE') AND has_table_privilege(to_regclass($1), 'DELETE'),
    current_user::text";

/// The table's name, checked and quoted. Prints as it stands in SQL.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    schema: Option<String>,
    quoted: String,
}

impl Table {
    pub(crate) fn new(schema: Option<&str>, table: &str) -> Result<Self> {
        let schema = schema.map(|schema| quote("schema name", schema)).transpose()?;
        let table = quote("table name", table)?;
        Ok(Self {
            quoted: schema
                .as_ref()
                .map_or_else(|| table.clone(), |schema| format!("{schema}.{table}")),
            schema,
        })
    }

    /// The table of the dead letters of an inbox's table, beside that.
    pub(crate) fn of_letters(schema: Option<&str>, inbox: &str) -> Result<Self> {
        let name = format!("{inbox}_dead_letters");
        if name.len() > 63 {
            return Err(Error::invalid(
                "table name",
                inbox,
                format_args!(
                    "the table of its dead letters has \"_dead_letters\" behind it, {} bytes, and PostgreSQL keeps 63 of a \
                     name; take one of at most 50 bytes",
                    name.len()
                ),
            ));
        }
        Self::new(schema, &name)
    }

    /// The same table in a schema (quoted) where another table was found, unless a schema was named.
    fn beside(&self, schema: Option<&str>) -> String {
        match schema.filter(|_| self.schema.is_none()) {
            Some(schema) => format!("{schema}.{}", self.quoted),
            None => self.quoted.clone(),
        }
    }

    /// The schema, quoted, if one was named.
    pub(crate) fn schema(&self) -> Option<&str> {
        self.schema.as_deref()
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.quoted)
    }
}

/// A name as PostgreSQL reads it whatever stands in it: in double quotes, each one inside doubled. 63 bytes are the most
/// that it keeps of a name.
fn quote(what: &str, name: &str) -> Result<String> {
    check_name(what, name, 63)?;
    Ok(format!("\"{}\"", name.replace('"', "\"\"")))
}

/// What stands in a table that claims are made in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Shape {
    pub(crate) fingerprint: bool,
    pub(crate) purge_index: bool,
}

/// A statement's template with all but its values in place; the table's name comes last, as it may contain anything.
#[derive(Debug, Clone)]
pub(crate) struct Statement {
    template: Arc<str>,
    prepared: Arc<str>,
    table: Arc<str>,
}

impl Statement {
    /// The guard before a commit, which concerns no table.
    pub(crate) fn guard() -> Self {
        Self {
            template: GUARD.into(),
            prepared: GUARD.into(),
            table: "".into(),
        }
    }

    fn new(template: &str, table: &Table, shape: Shape, bound: &str) -> Self {
        let (column, value, array, read) = if shape.fingerprint {
            (", fingerprint", ", $3", ", $3::uuid[]", "t.fingerprint::text")
        } else {
            ("", "", "", "NULL::text")
        };
        let template = template
            .replace("{fingerprint column}", column)
            .replace("{fingerprint value}", value)
            .replace("{fingerprint array}", array)
            .replace("{fingerprint}", read)
            .replace(
                "{microseconds}",
                "CASE WHEN isfinite(t.processed_at) THEN (extract(epoch FROM t.processed_at) * 1000000)::bigint END",
            )
            .replace("{bound}", bound)
            .replace("{letter}", LETTER)
            .replace("{old}", OLD);
        Self {
            prepared: template.replace("{table}", &table.quoted).into(),
            table: table.quoted.as_str().into(),
            template: template.into(),
        }
    }

    /// Sends the statement and collects its rows: one round trip prepared (two where it was not yet, on this
    /// connection), one as text.
    pub(crate) async fn run(
        &self,
        conn: &mut PgConnection,
        prepared: bool,
        values: &[Value<'_>],
    ) -> sqlx::Result<Vec<PgRow>> {
        if !prepared {
            return self.run_as_text(conn, values).await;
        }
        let mut query = sqlx::query(AssertSqlSafe(Arc::clone(&self.prepared)));
        for value in values {
            query = match *value {
                Value::Id(id) => query.bind(Uuid(Some(id))),
                Value::Fingerprint(id) => query.bind(Uuid(id)),
                Value::Ids(ids) => query.bind(Uuids(ids)),
                Value::Fingerprints(ids) => query.bind(MaybeUuids(ids)),
                Value::Text(text) => query.bind(text),
                Value::Texts(texts) => query.bind(texts),
                Value::Number(number) => query.bind(number),
                Value::Time(micros) => query.bind(Timestamp(micros)),
                Value::Bytes(bytes) => query.bind(bytes),
            };
        }
        query.fetch_all(conn).await
    }

    /// Sends the statement, or several, as text.
    pub(crate) async fn run_as_text(&self, conn: &mut PgConnection, values: &[Value<'_>]) -> sqlx::Result<Vec<PgRow>> {
        sqlx::raw_sql(AssertSqlSafe(self.as_text(&[], values)))
            .fetch_all(conn)
            .await
    }

    /// [`run_as_text`](Self::run_as_text), with `{milliseconds}` given.
    pub(crate) async fn run_bounded(
        &self,
        conn: &mut PgConnection,
        wait: Duration,
        values: &[Value<'_>],
    ) -> sqlx::Result<Vec<PgRow>> {
        // The least that a lock timeout can be; 0 would be none. The most is what fits a signed 32-bit number.
        let milliseconds = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX).max(1).to_string();
        let text = self.as_text(&[("{milliseconds}", &milliseconds)], values);
        sqlx::raw_sql(AssertSqlSafe(text)).fetch_all(conn).await
    }

    fn as_text(&self, settings: &[(&str, &str)], values: &[Value<'_>]) -> String {
        let mut text = self.template.to_string();
        for (name, value) in settings {
            text = text.replace(name, value);
        }
        for (index, value) in values.iter().enumerate().rev() {
            text = text.replace(&format!("${}", index + 1), &value.to_string());
        }
        // A dollar quote that the name does not end: it is too short to have all of these in it.
        let tag = (0..100)
            .map(|number| format!("$inbox{number}$"))
            .find(|tag| !self.table.contains(tag.as_str()))
            .unwrap_or_default();
        text.replace("{tag}", &tag).replace("{table}", &self.table)
    }
}

/// All statements on one table.
#[derive(Debug)]
pub(crate) struct Statements {
    pub(crate) shape: Shape,
    pub(crate) claim: Statement,
    pub(crate) claim_with_fingerprint: Statement,
    pub(crate) find: Statement,
    pub(crate) claim_batch: Statement,
    pub(crate) claim_batch_with_fingerprints: Statement,
    pub(crate) find_batch: Statement,
    pub(crate) claim_bounded: Statement,
    pub(crate) claim_batch_bounded: Statement,
    pub(crate) guard_and_stamp: Statement,
    pub(crate) forget: Statement,
    pub(crate) purge_group: Statement,
    pub(crate) purge_all: Statement,
}

impl Statements {
    pub(crate) fn new(table: &Table, shape: Shape, longest_wait: Duration) -> Self {
        // Of a whole number of tens of milliseconds, and 7: never what somebody chose, never written in seconds.
        let tens = i32::try_from(longest_wait.as_millis() / 10)
            .unwrap_or(i32::MAX)
            .min(i32::MAX / 10 - 1);
        let bound = format!("{}ms", tens * 10 + 7);
        let new = |template| Statement::new(template, table, shape, &bound);
        // What most claims are: the column then stays null.
        let without = Shape {
            fingerprint: false,
            ..shape
        };
        let without_fingerprint = |template| Statement::new(template, table, without, &bound);
        let purge = |indexed| new(if shape.purge_index { indexed } else { PURGE_UNINDEXED });
        Self {
            shape,
            claim: without_fingerprint(CLAIM),
            claim_with_fingerprint: new(CLAIM),
            find: new(FIND),
            claim_batch: without_fingerprint(CLAIM_BATCH),
            claim_batch_with_fingerprints: new(CLAIM_BATCH),
            find_batch: new(FIND_BATCH),
            claim_bounded: new(CLAIM_BOUNDED),
            claim_batch_bounded: new(CLAIM_BATCH_BOUNDED),
            guard_and_stamp: new(GUARD_AND_STAMP),
            forget: new(FORGET),
            purge_group: purge(PURGE_GROUP),
            purge_all: purge(PURGE_ALL),
        }
    }
}

/// All statements on the table of dead letters.
#[derive(Debug, Clone)]
pub(crate) struct LetterStatements {
    pub(crate) add: Statement,
    pub(crate) find: Statement,
    pub(crate) list: Statement,
    pub(crate) start_put_back: Statement,
    pub(crate) finish_put_back: Statement,
    pub(crate) delete: Statement,
}

impl LetterStatements {
    pub(crate) fn new(letters: &Table) -> Self {
        let new = |template| Statement::new(template, letters, Shape::default(), "");
        Self {
            add: new(ADD_LETTER),
            find: new(FIND_LETTER),
            list: new(LIST_LETTERS),
            start_put_back: new(START_PUT_BACK),
            finish_put_back: new(FINISH_PUT_BACK),
            delete: new(FORGET),
        }
    }
}

/// A value of a statement. Prints as SQL of nothing but digits, letters, and the commas, quotes and brackets around
/// them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Value<'a> {
    Id([u8; 16]),
    Fingerprint(Option<[u8; 16]>),
    Ids(&'a [[u8; 16]]),
    Fingerprints(&'a [Option<[u8; 16]>]),
    Text(Option<&'a str>),
    Texts(&'a [&'a str]),
    Number(i64),
    /// Microseconds since 1970.
    Time(Option<i64>),
    Bytes(&'a [u8]),
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Id(id) | Self::Fingerprint(Some(id)) => write!(f, "'{}'::uuid", Hex(&id)),
            Self::Fingerprint(None) => f.write_str("NULL::uuid"),
            Self::Ids(ids) => {
                f.write_str("'{")?;
                for (index, id) in ids.iter().enumerate() {
                    write!(f, "{}{}", if index > 0 { "," } else { "" }, Hex(id))?;
                }
                f.write_str("}'::uuid[]")
            }
            Self::Fingerprints(ids) => {
                f.write_str("'{")?;
                for (index, id) in ids.iter().enumerate() {
                    f.write_str(if index > 0 { "," } else { "" })?;
                    match id {
                        Some(id) => write!(f, "{}", Hex(id))?,
                        None => f.write_str("NULL")?,
                    }
                }
                f.write_str("}'::uuid[]")
            }
            Self::Text(Some(text)) => write!(f, "convert_from(decode('{}', 'hex'), 'UTF8')", Hex(text.as_bytes())),
            Self::Text(None) => f.write_str("NULL::text"),
            Self::Texts(texts) => {
                f.write_str("ARRAY[")?;
                for (index, text) in texts.iter().enumerate() {
                    write!(f, "{}{}", if index > 0 { ", " } else { "" }, Value::Text(Some(text)))?;
                }
                f.write_str("]::text[]")
            }
            Self::Number(number) => write!(f, "{number}"),
            // Exact, as intervals are multiplied in floating point, where whole seconds keep their digits.
            Self::Time(Some(micros)) => write!(
                f,
                "(timestamptz '1970-01-01 00:00:00+00' + interval '1 second' * ({}) + interval '1 microsecond' * {})",
                micros.div_euclid(1_000_000),
                micros.rem_euclid(1_000_000)
            ),
            Self::Time(None) => f.write_str("NULL::timestamptz"),
            Self::Bytes(bytes) => write!(f, "decode('{}', 'hex')", Hex(bytes)),
        }
    }
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// `uuid` in PostgreSQL's binary format. sqlx's own needs its feature `uuid`, which keeps newer versions of rusqlite
/// out of the lock file.
struct Uuid(Option<[u8; 16]>);
struct Uuids<'a>(&'a [[u8; 16]]);
struct MaybeUuids<'a>(&'a [Option<[u8; 16]>]);

/// `timestamptz` in PostgreSQL's binary format, from microseconds since 1970; it counts from 2000.
struct Timestamp(Option<i64>);

const TIMESTAMPTZ: Oid = Oid(1184);
const FROM_1970_TO_2000: i64 = 946_684_800_000_000;

impl Type<Postgres> for Timestamp {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(TIMESTAMPTZ)
    }
}

impl Encode<'_, Postgres> for Timestamp {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Ok(match self.0 {
            Some(micros) => {
                buf.extend_from_slice(&micros.saturating_sub(FROM_1970_TO_2000).to_be_bytes());
                IsNull::No
            }
            None => IsNull::Yes,
        })
    }
}

const UUID: Oid = Oid(2950);
const UUID_ARRAY: Oid = Oid(2951);

impl Type<Postgres> for Uuid {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(UUID)
    }
}

impl Type<Postgres> for Uuids<'_> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(UUID_ARRAY)
    }
}

impl Type<Postgres> for MaybeUuids<'_> {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(UUID_ARRAY)
    }
}

impl Encode<'_, Postgres> for Uuid {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        Ok(match self.0 {
            Some(bytes) => {
                buf.extend_from_slice(&bytes);
                IsNull::No
            }
            None => IsNull::Yes,
        })
    }
}

impl Encode<'_, Postgres> for Uuids<'_> {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        encode_array(buf, self.0.len(), self.0.iter().map(Some))
    }
}

impl Encode<'_, Postgres> for MaybeUuids<'_> {
    fn encode_by_ref(&self, buf: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        encode_array(buf, self.0.len(), self.0.iter().map(Option::as_ref))
    }
}

/// An array of one dimension: dimensions, whether there are nulls, element type, length, first index, then each
/// element behind its length, -1 for a null.
fn encode_array<'a>(
    buf: &mut PgArgumentBuffer,
    length: usize,
    elements: impl Iterator<Item = Option<&'a [u8; 16]>>,
) -> Result<IsNull, BoxDynError> {
    buf.reserve(20 * (length + 1));
    buf.extend_from_slice(&1_i32.to_be_bytes());
    buf.extend_from_slice(&1_i32.to_be_bytes());
    buf.extend_from_slice(&UUID.0.to_be_bytes());
    buf.extend_from_slice(&i32::try_from(length)?.to_be_bytes());
    buf.extend_from_slice(&1_i32.to_be_bytes());
    for element in elements {
        match element {
            Some(bytes) => {
                buf.extend_from_slice(&16_i32.to_be_bytes());
                buf.extend_from_slice(bytes);
            }
            None => buf.extend_from_slice(&(-1_i32).to_be_bytes()),
        }
    }
    Ok(IsNull::No)
}

/// What a table was found to be.
#[derive(Debug, Default)]
pub(crate) struct Inspection {
    pub(crate) exists: bool,
    pub(crate) version: Option<u32>,
    pub(crate) unlogged: bool,
    pub(crate) row_security: bool,
    pub(crate) shape: Shape,
    pub(crate) other_keys: Option<String>,
    pub(crate) triggers: Option<String>,
    /// Why claims cannot be made in it, each with a remedy.
    pub(crate) faults: Vec<(String, String)>,
    /// Where it was found, quoted.
    schema: Option<String>,
}

impl Inspection {
    /// Looks at the table. One round trip, by reading the catalogue only.
    pub(crate) async fn of(table: &Table, conn: &mut PgConnection) -> sqlx::Result<Self> {
        let inspect = format!("{INSPECT_WITH}{INSPECT}").replace("$1", &Value::Text(Some(&table.quoted)).to_string());
        let row = sqlx::raw_sql(AssertSqlSafe(inspect)).fetch_one(conn).await?;
        let text = |index: usize| row.try_get::<Option<String>, _>(index);
        let flag = |index: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<bool>, _>(index)?.unwrap_or(false));
        let mut found = Self {
            exists: flag(0)?,
            ..Self::default()
        };
        if !found.exists {
            return Ok(found);
        }
        let kind = text(1)?;
        found.unlogged = text(2)?.as_deref() == Some("u");
        found.row_security = flag(3)?;
        found.version = text(4)?.and_then(|comment| comment.strip_prefix(COMMENT)?.trim().parse().ok());
        found.shape = Shape {
            fingerprint: text(8)?.as_deref() == Some("uuid"),
            purge_index: flag(12)?,
        };
        found.schema = text(16)?;
        found.other_keys = text(13)?;
        found.triggers = text(14)?;
        let mut fault = |what: String, remedy: &str| found.faults.push((what, remedy.to_owned()));
        if !matches!(kind.as_deref(), Some("r" | "p")) {
            fault(
                format!("{table} is no table"),
                "name the table that the records are to stand in",
            );
            return Ok(found);
        }
        for (index, column, types) in [
            (5, "event_id", ["uuid", "uuid"]),
            (6, "consumer_group", ["text", "character varying"]),
            (
                7,
                "processed_at",
                ["timestamp with time zone", "timestamp with time zone"],
            ),
        ] {
            match text(index)? {
                None => fault(
                    format!("{table} has no column {column}"),
                    "name an inbox's table, or have `setup` make one under another name",
                ),
                Some(kind) if types.contains(&kind.as_str()) => {}
                Some(kind) => fault(
                    format!(
                        "the column {column} of {table} is of the type {kind}, in which different messages may be the same"
                    ),
                    "make it uuid (event_id), text (consumer_group), timestamptz (processed_at)",
                ),
            }
        }
        if row.try_get::<Option<bool>, _>(9)? == Some(false) {
            fault(
                format!("the column consumer_group of {table} has a collation by which different groups are equal"),
                "give it the collation \"C\"",
            );
        }
        if let Some(columns) = text(10)? {
            fault(
                format!("{table} has further columns that must have a value and have no default: {columns}"),
                "let them be null, or give them a default",
            );
        }
        if !flag(11)? {
            fault(
                format!("{table} has no unique key (event_id, consumer_group), so a message could be claimed twice"),
                "remove double rows, then add it: a valid one, not deferrable, over the whole table",
            );
        }
        if let Some(rules) = text(15)? {
            fault(format!("{table} has rules on INSERT: {rules}"), "drop them");
        }
        Ok(found)
    }

    /// The table's shape, if claims can be made in it.
    pub(crate) fn shape(&self, table: &Table) -> Result<Shape> {
        if !self.exists {
            return Err(Error::new(
                ErrorKind::Schema,
                format!(
                    "the inbox's table {table} does not exist; call `setup`, or have the statements of `setup_sql` run"
                ),
            ));
        }
        if let Some((what, remedy)) = self.faults.first() {
            return Err(Error::new(ErrorKind::Schema, format!("{what}; {remedy}")));
        }
        Ok(self.shape)
    }
}

/// What the table of dead letters was found to be.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    pub(crate) exists: bool,
    pub(crate) version: Option<u32>,
    pub(crate) unlogged: bool,
    pub(crate) indexed: bool,
    /// The role that is connected, if it may not do all that there is to do.
    pub(crate) refused: Option<String>,
    /// Why no letter can be kept in it.
    pub(crate) fault: Option<String>,
}

impl Letters {
    /// Looks at the table. One round trip, by reading the catalogue only.
    pub(crate) async fn of(table: &Table, conn: &mut PgConnection) -> sqlx::Result<Self> {
        let name = Value::Text(Some(&table.quoted)).to_string();
        let inspect = format!("{INSPECT_WITH}{INSPECT_LETTERS}").replace("$1", &name);
        let row = sqlx::raw_sql(AssertSqlSafe(inspect)).fetch_one(conn).await?;
        let text = |index: usize| row.try_get::<Option<String>, _>(index);
        let flag = |index: usize| Ok::<_, sqlx::Error>(row.try_get::<Option<bool>, _>(index)?.unwrap_or(false));
        let may_use: Option<bool> = row.try_get(7)?;
        let mut found = Self {
            exists: flag(0)?,
            unlogged: text(1)?.as_deref() == Some("u"),
            version: text(2)?.and_then(|comment| comment.strip_prefix(COMMENT)?.trim().parse().ok()),
            indexed: flag(6)?,
            refused: text(8)?.filter(|_| may_use == Some(false)),
            fault: None,
        };
        if found.exists {
            let lacks = |what: &str, columns: Option<String>| columns.map(|columns| format!("{what}: {columns}"));
            found.fault = if matches!(text(9)?.as_deref(), Some("r" | "p")) {
                lacks("it lacks columns, or has them of another type", text(3)?)
                    .or(lacks("it has further columns that must have a value", text(4)?))
                    .or((!flag(5)?).then(|| "it has no unique key (event_id, consumer_group)".into()))
            } else {
                Some("it is no table".into())
            };
        }
        Ok(found)
    }

    /// Fails if something else stands in the place.
    pub(crate) fn ensure_ours(&self, table: &Table) -> Result<()> {
        self.fault.as_ref().map_or(Ok(()), |fault| {
            Err(Error::new(
                ErrorKind::Schema,
                format!("{table} is not the table of the inbox's dead letters: {fault}; {LETTERS_REMEDY}"),
            ))
        })
    }
}

/// What to do about a table that is not that of dead letters.
pub(crate) const LETTERS_REMEDY: &str = "mend it, or rename it and call `setup`";

/// What [`INSPECT_SERVER`] answers.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) synchronous_commit: String,
    pub(crate) fsync: String,
    pub(crate) full_page_writes: String,
    pub(crate) standby: bool,
    pub(crate) read_only: String,
    pub(crate) may_claim: Option<bool>,
    pub(crate) may_purge: Option<bool>,
    pub(crate) role: String,
}

impl Server {
    pub(crate) async fn of(table: &Table, conn: &mut PgConnection) -> sqlx::Result<Self> {
        let inspect = INSPECT_SERVER.replace("$1", &Value::Text(Some(&table.quoted)).to_string());
        let row = sqlx::raw_sql(AssertSqlSafe(inspect)).fetch_one(conn).await?;
        Ok(Self {
            synchronous_commit: row.try_get(0)?,
            fsync: row.try_get(1)?,
            full_page_writes: row.try_get(2)?,
            standby: row.try_get(3)?,
            read_only: row.try_get(4)?,
            may_claim: row.try_get(5)?,
            may_purge: row.try_get(6)?,
            role: row.try_get(7)?,
        })
    }
}

/// The statements that bring the tables from what was found to this version, their comments included. A table of records
/// that is somebody else's is left alone.
pub(crate) fn upgrade_sql(table: &Table, letters: &Table, records: &Inspection, found: &Letters) -> String {
    let records_from = if records.exists { records.version } else { Some(0) };
    let letters_from = if found.exists {
        found.version.unwrap_or(VERSION)
    } else {
        0
    };
    let letters = letters.beside(records.schema.as_deref());
    let mut sql = String::new();
    for (version, migration) in (0..).zip(&MIGRATIONS) {
        let (statements, name) = match migration {
            Migration::Records(statements) if records_from.is_some_and(|from| version >= from) => {
                (statements, &table.quoted)
            }
            Migration::Letters(statements) if version >= letters_from => (statements, &letters),
            _ => continue,
        };
        for statement in *statements {
            sql.push_str(&statement.replace("{table}", name));
            sql.push_str(";\n");
        }
    }
    if records_from.is_some_and(|from| from < VERSION) {
        let _ = writeln!(sql, "COMMENT ON TABLE {table} IS '{COMMENT}{VERSION}';");
    }
    if letters_from < VERSION {
        let _ = writeln!(sql, "COMMENT ON TABLE {letters} IS '{COMMENT}{VERSION}';");
    }
    sql
}

/// What makes everything from nothing.
pub(crate) fn setup_sql(table: &Table, letters: &Table) -> String {
    let schema = table
        .schema()
        .map(|schema| format!("CREATE SCHEMA IF NOT EXISTS {schema};\n"));
    schema.unwrap_or_default() + &upgrade_sql(table, letters, &Inspection::default(), &Letters::default())
}

/// Makes the schema if it is missing. `IF NOT EXISTS` alone would ask for the right to make one even where it is there.
pub(crate) async fn ensure_schema(table: &Table, conn: &mut PgConnection) -> sqlx::Result<()> {
    let Some(schema) = table.schema() else { return Ok(()) };
    let text = Value::Text(Some(schema));
    let sql = format!("SELECT to_regnamespace({text}) IS NOT NULL");
    let there: bool = sqlx::raw_sql(AssertSqlSafe(sql))
        .fetch_one(&mut *conn)
        .await?
        .try_get(0)?;
    if !there {
        sqlx::raw_sql(AssertSqlSafe(format!("CREATE SCHEMA IF NOT EXISTS {schema}")))
            .execute(conn)
            .await?;
    }
    Ok(())
}

/// Waits until no other set-up goes on in this database, until the end of the transaction.
pub(crate) async fn lock_setup(conn: &mut PgConnection) -> sqlx::Result<()> {
    let sql = format!("SELECT pg_advisory_xact_lock({SETUP_LOCK})");
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(conn).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_what_cannot_be_a_name_is_refused() {
        let table = Table::new(Some("Odd \"schema\".x"), "a;b' $inbox0$").unwrap();
        assert_eq!(table.to_string(), "\"Odd \"\"schema\"\".x\".\"a;b' $inbox0$\"");
        for (schema, name) in [
            (None, ""),
            (None, "a\0b"),
            (Some(""), "t"),
            (None, "x".repeat(64).as_str()),
        ] {
            assert_eq!(Table::new(schema, name).unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn values_as_text_have_nothing_to_inject() {
        let text = Value::Texts(&["a'; DROP TABLE x; --", "$1 {table}"]).to_string();
        assert!(!text.contains("DROP") && !text.contains("{table}"), "{text}");
    }

    #[test]
    fn a_name_cannot_end_the_quote_of_a_block_nor_take_in_a_value() {
        let table = Table::new(None, "$inbox0$ $1 {milliseconds}").unwrap();
        let shape = Shape {
            fingerprint: true,
            purge_index: true,
        };
        let statement = Statement::new(CLAIM_BOUNDED, &table, shape, "1ms");
        let text = statement.as_text(
            &[("{milliseconds}", "1")],
            &[Value::Id([1; 16]), Value::Text(Some("g")), Value::Fingerprint(None)],
        );
        assert!(text.contains("INTO \"$inbox0$ $1 {milliseconds}\" ("), "{text}");
        assert!(text.starts_with("DO $inbox1$"), "{text}");
    }
}
