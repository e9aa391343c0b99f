//! [`PostgresInbox`]: the traits' implementation.

use std::error::Error as StdError;
use std::fmt;
use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use inbox_core::{
    Claim, ClaimIn, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetterState, DeadLetters, Delivery,
    Error, ErrorKind, Fingerprint, Headers, Health, InFlight, InboxStore, Key, MessageId, Processed, Purge, Purged,
    Record, Result, Transactions, Upkeep, WaitPolicy, async_trait, uuid,
};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, PgPool, Postgres, Row, Transaction};
use tokio::sync::OnceCell;

use crate::error;
use crate::schema::{
    self, CLAIMS_SINCE, Inspection, LetterStatements, Letters, Server, Statement, Statements, Table, VERSION, Value,
};
use crate::tx::PostgresTx;

/// How often a claim is tried that neither went in nor found the record in its way, before the table is to blame.
///
/// It happens where that record is removed in the very moment, by a purge or [`Upkeep::forget`].
const ROUNDS: usize = 3;

/// The inbox's records in a PostgreSQL table, through a pool of [`sqlx`](crate::sqlx).
///
/// It is an [`InboxStore`] with [`Transactions`] and [`Upkeep`], and claims in the caller's own
/// [`sqlx::Transaction`](crate::sqlx::Transaction) of any lifetime, savepoints included. Cheap to clone.
///
/// ```no_run
/// # async fn f() -> Result<(), Box<dyn std::error::Error>> {
/// use inbox_core::{Inbox, MessageId};
/// use inbox_postgres::{PostgresInbox, sqlx};
///
/// let pool = sqlx::PgPool::connect("postgres://localhost/shop").await?;
/// let inbox = Inbox::new(PostgresInbox::new(pool.clone()), "billing")?;
/// inbox.setup().await?;
///
/// let mut tx = pool.begin().await?;
/// if !inbox.is_duplicate(&mut tx, MessageId::new("order-17")?).await? {
///     sqlx::query("INSERT INTO invoices (cents) VALUES (250)").execute(&mut *tx).await?;
/// }
/// tx.commit().await?;
/// # Ok(()) }
/// ```
///
/// # A bare connection is refused, by the compiler
///
/// ```compile_fail,E0277
/// # async fn f(inbox: inbox_core::Inbox<inbox_postgres::PostgresInbox>, id: inbox_core::MessageId,
/// #     mut conn: inbox_postgres::sqlx::PgConnection) {
/// let _ = inbox.try_claim(&mut conn, id).await; // would be committed by itself, before the effect
/// # }
/// ```
///
/// ```compile_fail,E0277
/// # async fn f(inbox: inbox_core::Inbox<inbox_postgres::PostgresInbox>, id: inbox_core::MessageId,
/// #     mut pool: inbox_postgres::sqlx::PgPool) {
/// let _ = inbox.try_claim(&mut pool, id).await;
/// # }
/// ```
#[derive(Clone)]
pub struct PostgresInbox {
    pool: PgPool,
    table: Arc<Table>,
    letters: Arc<Table>,
    letter_statements: Arc<LetterStatements>,
    wait: WaitPolicy,
    longest_wait: Duration,
    prepared: bool,
    guard: Statement,
    statements: Arc<OnceCell<Statements>>,
}

impl PostgresInbox {
    /// Records in the table `inbox_events`, in the schema that the connections' `search_path` leads to; claims wait.
    pub fn new(pool: PgPool) -> Self {
        match Self::builder(pool).build() {
            Ok(store) => store,
            Err(_) => unreachable!("the name that the builder begins with is a good one"),
        }
    }

    /// The choices: schema, table, waiting, prepared statements.
    pub fn builder(pool: PgPool) -> Builder {
        Builder {
            pool,
            schema: None,
            table: "inbox_events".into(),
            wait: WaitPolicy::Wait,
            longest_wait: Duration::from_secs(10),
            prepared: true,
        }
    }

    /// The pool.
    pub const fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// The SQL that [`Upkeep::setup`] runs where there is nothing yet, to be run by a role that may, should the
    /// application's role not be allowed to. It grants nothing: the application needs SELECT, INSERT, UPDATE and DELETE
    /// on both tables, and USAGE on their schema. For tables of an earlier version, the error of [`Upkeep::setup`] has the
    /// SQL that is missing.
    pub fn setup_sql(&self) -> String {
        schema::setup_sql(&self.table, &self.letters)
    }

    /// The statements, made for what the table is, which the first use looks up: one round trip, once a store.
    async fn statements(&self, conn: &mut PgConnection) -> Result<&Statements> {
        self.statements
            .get_or_try_init(async || {
                let inspection = Inspection::of(&self.table, conn)
                    .await
                    .map_err(|error| self.error(error))?;
                Ok(Statements::new(
                    &self.table,
                    inspection.shape(&self.table)?,
                    self.longest_wait,
                ))
            })
            .await
    }

    fn error(&self, error: sqlx::Error) -> Error {
        error::of_statement(error, &self.table)
    }

    fn letter_error(&self, error: sqlx::Error) -> Error {
        error::of_statement(error, &self.letters)
    }

    fn require_fingerprints(&self, statements: &Statements, deliveries: &[Delivery]) -> Result<()> {
        if statements.shape.fingerprint || deliveries.iter().all(|delivery| delivery.fingerprint().is_none()) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "payloads cannot be compared, because the table {} has no column for their fingerprints; have ALTER TABLE \
                 {} ADD COLUMN fingerprint uuid run, then start again, or claim without a payload",
                self.table, self.table
            ),
        ))
    }

    /// A claim that went neither way, again and again.
    fn diverted(&self, id: MessageId) -> Error {
        Error::new(
            ErrorKind::Schema,
            format!(
                "the record of message {id} did not go into {} and none was found there, so the message is neither new \
                 nor a duplicate; a trigger, rule or row security policy on the table diverts or hides rows: remove it",
                self.table
            ),
        )
    }

    async fn claim(&self, conn: &mut PgConnection, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let statements = self.statements(conn).await?;
        self.require_fingerprints(statements, &[delivery])?;
        let values = [
            Value::Id(*delivery.id().as_bytes()),
            Value::Text(Some(group.as_str())),
            Value::Fingerprint(delivery.fingerprint().map(|print| *print.as_bytes())),
        ];
        for _ in 0..ROUNDS {
            let record = match self.wait {
                WaitPolicy::Wait => {
                    let claimed = if delivery.fingerprint().is_none() {
                        statements.claim.run(conn, self.prepared, &values[..2]).await
                    } else {
                        statements
                            .claim_with_fingerprint
                            .run(conn, self.prepared, &values)
                            .await
                    };
                    if !claimed.map_err(|error| self.error(error))?.is_empty() {
                        return Ok(Claim::New);
                    }
                    let found = statements.find.run(conn, self.prepared, &values[..2]).await;
                    let found = found.map_err(|error| self.error(error))?;
                    found.first().map(|row| Found::read(row, 0)).transpose()
                }
                WaitPolicy::DontWait | WaitPolicy::AtMost(_) => {
                    let rows = statements
                        .claim_bounded
                        .run_bounded(conn, self.patience(), &values)
                        .await;
                    let rows = rows.map_err(|error| self.error(error))?;
                    let letter = rows.first().map(|row| row.try_get::<String, _>(0)).transpose();
                    match letter.map_err(|error| self.error(error))?.as_deref() {
                        Some("n") => return Ok(Claim::New),
                        Some("f") => return Ok(Claim::InFlight(InFlight::new())),
                        _ => rows.first().map(|row| Found::read(row, 1)).transpose(),
                    }
                }
            };
            if let Some(Found { seen: true, processed }) = record.map_err(|error| self.error(error))? {
                return Ok(Claim::Duplicate(processed));
            }
        }
        Err(self.diverted(delivery.id()))
    }

    /// How long a claim under a policy with a bound waits.
    const fn patience(&self) -> Duration {
        match self.wait {
            WaitPolicy::AtMost(longest) => longest,
            WaitPolicy::Wait | WaitPolicy::DontWait => Duration::ZERO,
        }
    }

    async fn claim_batch(
        &self,
        conn: &mut PgConnection,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        if deliveries.is_empty() {
            return Ok(Vec::new());
        }
        let statements = self.statements(conn).await?;
        self.require_fingerprints(statements, deliveries)?;
        // By id, and stable, so that of equal ids the first one is claimed.
        let mut order: Vec<usize> = (0..deliveries.len()).collect();
        order.sort_by_key(|&index| deliveries[index].id());
        let same = |a: &usize, b: &usize| deliveries[*a].id() == deliveries[*b].id();
        let firsts: Vec<usize> = order.chunk_by(same).map(|equal| equal[0]).collect();

        let mut claims: Vec<Option<Claim>> = vec![None; deliveries.len()];
        let mut pending = firsts;
        for _ in 0..ROUNDS {
            if pending.is_empty() {
                break;
            }
            let answers = self.claim_sorted(conn, statements, group, deliveries, &pending).await?;
            let mut unresolved = Vec::new();
            for (index, answer) in pending.into_iter().zip(answers) {
                match answer {
                    Some(claim) => claims[index] = Some(claim),
                    None => unresolved.push(index),
                }
            }
            pending = unresolved;
        }
        if let Some(&index) = pending.first() {
            return Err(self.diverted(deliveries[index].id()));
        }
        self.claim_repeated(conn, statements, group, deliveries, &order, claims)
            .await
    }

    /// Claims messages whose ids ascend, once. `None` for one that went neither way this time.
    async fn claim_sorted(
        &self,
        conn: &mut PgConnection,
        statements: &Statements,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
        indexes: &[usize],
    ) -> Result<Vec<Option<Claim>>> {
        let ids: Vec<[u8; 16]> = indexes
            .iter()
            .map(|&index| *deliveries[index].id().as_bytes())
            .collect();
        let print = |&index: &usize| deliveries[index].fingerprint().map(|print| *print.as_bytes());
        let mut prints: Vec<Option<[u8; 16]>> = indexes.iter().map(print).collect();
        if prints.iter().all(Option::is_none) {
            // `unnest` gives nulls for what a shorter array lacks.
            prints.clear();
        }
        let values = [
            Value::Ids(&ids),
            Value::Text(Some(group.as_str())),
            Value::Fingerprints(&prints),
            Value::Number(i64::try_from(ids.len()).unwrap_or(i64::MAX)),
        ];
        let answered = async {
            if self.wait == WaitPolicy::Wait {
                Self::claim_sorted_waiting(conn, statements, self.prepared, &ids, &values).await
            } else {
                Self::claim_sorted_bounded(conn, statements, self.patience(), &ids, &values).await
            }
        };
        answered.await.map_err(|error| self.error(error))
    }

    async fn claim_sorted_waiting(
        conn: &mut PgConnection,
        statements: &Statements,
        prepared: bool,
        ids: &[[u8; 16]],
        values: &[Value<'_>],
    ) -> sqlx::Result<Vec<Option<Claim>>> {
        let claim = match values {
            [_, _, Value::Fingerprints([]), _] => &statements.claim_batch,
            _ => &statements.claim_batch_with_fingerprints,
        };
        let rows = claim.run(conn, prepared, values).await?;
        let claimed = rows
            .first()
            .map(|row| row.try_get::<Option<String>, _>(1))
            .transpose()?
            .flatten();
        let count = rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0))?;
        if usize::try_from(count) == Ok(ids.len()) {
            return Ok(vec![Some(Claim::New); ids.len()]);
        }
        let mut answers = vec![None; ids.len()];
        for id in claimed.unwrap_or_default().trim_matches(['{', '}']).split(',') {
            let place = uuid::Uuid::try_parse(id)
                .ok()
                .and_then(|id| ids.binary_search(id.as_bytes()).ok());
            if let Some(place) = place {
                answers[place] = Some(Claim::New);
            }
        }
        // In a statement of its own, which sees what was committed while the claim waited.
        let others: Vec<usize> = (0..ids.len()).filter(|&place| answers[place].is_none()).collect();
        let other_ids: Vec<[u8; 16]> = others.iter().map(|&place| ids[place]).collect();
        for row in statements
            .find_batch
            .run(conn, prepared, &[Value::Ids(&other_ids), values[1]])
            .await?
        {
            if let Some(found_at) = place(&row, 0)? {
                answers[others[found_at]] = Found::read(&row, 1)?.claim();
            }
        }
        Ok(answers)
    }

    async fn claim_sorted_bounded(
        conn: &mut PgConnection,
        statements: &Statements,
        patience: Duration,
        ids: &[[u8; 16]],
        values: &[Value<'_>],
    ) -> sqlx::Result<Vec<Option<Claim>>> {
        let rows = statements
            .claim_batch_bounded
            .run_bounded(conn, patience, values)
            .await?;
        let mut answers = vec![None; ids.len()];
        let mut rows = rows.iter();
        if let Some(row) = rows.next() {
            for (answer, letter) in answers.iter_mut().zip(row.try_get::<String, _>(0)?.chars()) {
                *answer = match letter {
                    'n' => Some(Claim::New),
                    'f' => Some(Claim::InFlight(InFlight::new())),
                    _ => None,
                };
            }
        }
        for row in rows {
            if let Some(place) = place(row, 0)? {
                answers[place] = Found::read(row, 1)?.claim();
            }
        }
        Ok(answers)
    }

    /// Gives repeated ids their answers. Where the first is new, the others are duplicates of what this transaction has
    /// just claimed, and its time is looked up.
    async fn claim_repeated(
        &self,
        conn: &mut PgConnection,
        statements: &Statements,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
        order: &[usize],
        mut claims: Vec<Option<Claim>>,
    ) -> Result<Vec<Claim>> {
        let same = |a: &usize, b: &usize| deliveries[*a].id() == deliveries[*b].id();
        let repeated: Vec<&[usize]> = order.chunk_by(same).filter(|equal| equal.len() > 1).collect();
        let own: Vec<&[usize]> = repeated
            .iter()
            .copied()
            .filter(|equal| claims[equal[0]] == Some(Claim::New))
            .collect();
        for equal in repeated {
            for &index in &equal[1..] {
                claims[index] = claims[equal[0]].clone();
            }
        }
        if !own.is_empty() {
            let ids: Vec<[u8; 16]> = own.iter().map(|equal| *deliveries[equal[0]].id().as_bytes()).collect();
            let values = [Value::Ids(&ids), Value::Text(Some(group.as_str()))];
            let rows = statements.find_batch.run(conn, self.prepared, &values).await;
            for row in rows.map_err(|error| self.error(error))? {
                let read = || Ok::<_, sqlx::Error>((place(&row, 0)?, Found::read(&row, 1)?));
                let (Some(place), found) = read().map_err(|error| self.error(error))? else {
                    continue;
                };
                for &index in &own[place][1..] {
                    claims[index] = found.clone().claim();
                }
            }
        }
        let diverted = |index: usize| self.diverted(deliveries[index].id());
        let settled = claims.into_iter().enumerate();
        settled
            .map(|(index, claim)| claim.ok_or_else(|| diverted(index)))
            .collect()
    }

    /// Opens a transaction with `statement`.
    ///
    /// A `begin` that is dropped halfway may leave an open transaction on a connection that the driver takes for free,
    /// and whatever its next borrower does is then lost (sqlx 0.9.0). So it is never dropped halfway: it goes on without
    /// us, and rolls back.
    async fn open(&self, statement: String) -> Result<Transaction<'static, Postgres>> {
        let pool = self.pool.clone();
        let opening = ToTheEnd(Some(Box::pin(async move {
            pool.begin_with(AssertSqlSafe(statement)).await
        })));
        opening.await.map_err(|error| match error::kind_of(&error) {
            // Nothing of ours is in it yet: somebody's cancelled `begin` has left the connection so.
            ErrorKind::TransactionEnded => Error::new(
                ErrorKind::Unavailable,
                "a connection of the pool came with a failed transaction on it, left by a `begin` that was dropped; run \
                 the transaction again, and do not drop `PgPool::begin` half-way",
            )
            .with_source(error),
            _ => self.error(error),
        })
    }

    async fn commit_upkeep(&self, tx: Transaction<'static, Postgres>) -> Result<()> {
        tx.commit().await.map_err(|error| error::of_commit(error, &self.table))
    }

    async fn inspect(&self, conn: &mut PgConnection) -> Result<(Inspection, Letters)> {
        let looked = async {
            let records = Inspection::of(&self.table, conn).await?;
            Ok((records, Letters::of(&self.letters, conn).await?))
        };
        looked.await.map_err(|error| self.error(error))
    }

    async fn set_up(&self, conn: &mut PgConnection) -> Result<()> {
        let (records, letters) = self.inspect(conn).await?;
        if self.is_set_up(&records, &letters)? {
            return Ok(());
        }
        // Whoever comes second finds it done.
        schema::lock_setup(conn).await.map_err(|error| self.error(error))?;
        let (records, letters) = self.inspect(conn).await?;
        if self.is_set_up(&records, &letters)? {
            return Ok(());
        }
        let sql = schema::upgrade_sql(&self.table, &self.letters, &records, &letters);
        let made = async {
            schema::ensure_schema(&self.table, conn).await?;
            sqlx::raw_sql(AssertSqlSafe(sql.clone())).execute(&mut *conn).await
        };
        match made.await {
            Ok(_) => Ok(()),
            Err(error) if error::kind_of(&error) == ErrorKind::Denied => Err(Error::new(
                ErrorKind::Denied,
                format!(
                    "the role that is connected may not set up the inbox's tables: {error}; have this run by a role that \
                     may, and SELECT, INSERT, UPDATE and DELETE on {} and {} granted to the application's:\n{}",
                    self.table,
                    self.letters,
                    if records.exists || letters.exists { sql } else { self.setup_sql() }
                ),
            )
            .with_source(error)),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Whether there is nothing to do: ours and of this version, or somebody else's that serves as it stands, and the table
    /// of dead letters beside it.
    fn is_set_up(&self, records: &Inspection, letters: &Letters) -> Result<bool> {
        let records_are = match records.version {
            _ if !records.exists => false,
            Some(version) if version > VERSION => return Err(self.newer(version)),
            Some(version) if version < VERSION => false,
            _ => records.shape(&self.table).map(|_| true)?,
        };
        let letters_are = match letters.version {
            _ if !letters.exists => false,
            Some(version) if version > VERSION => return Err(self.newer(version)),
            Some(version) if version < VERSION => false,
            _ => letters.ensure_ours(&self.letters).map(|()| true)?,
        };
        Ok(records_are && letters_are)
    }

    fn newer(&self, version: u32) -> Error {
        Error::new(
            ErrorKind::Schema,
            format!(
                "the table {} is of version {version}, and this program knows {VERSION} at the most; upgrade the program",
                self.table
            ),
        )
    }

    fn judge(&self, found: &Inspection, letters: &Letters, server: &Server) -> Health {
        let mut health = Health::new();
        let table = &self.table;
        if found.exists {
            self.judge_table(found, &mut health);
        } else {
            health.fault(
                format!("the table {table} does not exist"),
                "call `setup`, or have the statements of `setup_sql` run",
            );
        }
        if found.exists && server.may_claim == Some(false) {
            health.fault(
                format!(
                    "the role {} may not read and insert in {table}, so it cannot claim",
                    server.role
                ),
                format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO it"),
            );
        } else if found.exists && server.may_purge == Some(false) {
            health.warning(
                format!(
                    "the role {} may not update and delete in {table}: purging fails, and so do commits of handlers that \
                     take long, which set the record's time anew",
                    server.role
                ),
                format!("GRANT UPDATE, DELETE ON {table} TO it"),
            );
        }
        self.judge_letters(letters, &mut health);
        if server.standby || server.read_only == "on" {
            health.fault(
                "the server is a standby, or the session is read-only: nothing can be claimed",
                "connect to the primary, read-write",
            );
        }
        match server.synchronous_commit.as_str() {
            "off" => health.fault(
                "synchronous_commit is off: a crash of the server loses commits of the last moment, whose messages have \
                 been acknowledged and do not come again",
                "set synchronous_commit = on for this role or database",
            ),
            "local" => health.warning(
                "synchronous_commit is local: a failover to a standby may lose commits whose messages have been \
                 acknowledged",
                "set synchronous_commit = on, and name synchronous standbys, where standbys take over",
            ),
            _ => {}
        }
        if server.fsync == "off" {
            health.fault(
                "fsync is off: a crash of the machine loses or corrupts what was committed",
                "set fsync = on",
            );
        }
        if server.full_page_writes == "off" {
            health.warning(
                "full_page_writes is off: a crash of the machine may leave half-written pages",
                "set full_page_writes = on, unless the file system writes pages whole",
            );
        }
        health
    }

    /// Claims do without, so a table that is not there yet is no fault.
    fn judge_letters(&self, found: &Letters, health: &mut Health) {
        let letters = &self.letters;
        if !found.exists {
            health.warning(
                format!("the table {letters} does not exist, so messages cannot be given up, though claims work"),
                "call `setup`, whose error has the SQL where the role may not",
            );
            return;
        }
        if let Some(fault) = &found.fault {
            health.fault(
                format!("{letters} is not the table of the inbox's dead letters: {fault}"),
                schema::LETTERS_REMEDY,
            );
            return;
        }
        if found.unlogged {
            health.fault(
                format!("{letters} is unlogged: a crash of the server empties it, and what was given up is lost"),
                format!("ALTER TABLE {letters} SET LOGGED"),
            );
        }
        if !found.indexed {
            health.warning(
                format!("{letters} has no index for its list, which so reads the whole table"),
                format!("CREATE INDEX ON {letters} (consumer_group, died_at, event_id)"),
            );
        }
        if let Some(role) = &found.refused {
            health.warning(
                format!(
                    "the role {role} may not read, insert, update and delete in {letters}, so messages cannot be given up, \
                     though claims work"
                ),
                format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {letters} TO it"),
            );
        }
    }

    fn judge_table(&self, found: &Inspection, health: &mut Health) {
        let table = &self.table;
        for (what, remedy) in &found.faults {
            health.fault(what, remedy);
        }
        match found.version {
            Some(version) if version < CLAIMS_SINCE => health.fault(
                format!("the table {table} is of version {version}, and this program's is {VERSION}"),
                "call `setup`",
            ),
            Some(version) if version < VERSION => health.warning(
                format!(
                    "the table {table} is of version {version}, in which claims work, and this program's is {VERSION}"
                ),
                "call `setup`",
            ),
            Some(version) if version > VERSION => health.fault(
                format!("the table {table} is of version {version}, and this program knows {VERSION} at the most"),
                "upgrade the program",
            ),
            _ => {}
        }
        if found.unlogged {
            health.fault(
                format!("{table} is unlogged: a crash of the server empties it, and everything is handled again"),
                format!("ALTER TABLE {table} SET LOGGED"),
            );
        }
        if found.row_security {
            health.warning(
                format!("{table} has row level security: a policy that hides rows makes claims of their messages fail"),
                "exempt the application's role, or disable it",
            );
        }
        if let Some(triggers) = &found.triggers {
            health.warning(
                format!(
                    "{table} has triggers before INSERT: {triggers}; one that diverts a row makes its claim fail, \
                     because a row that is not there is neither new nor a duplicate"
                ),
                "drop them, or make sure that they return the row",
            );
        }
        if let Some(keys) = &found.other_keys {
            health.warning(
                format!("{table} has further unique indexes: {keys}; a message that violates one cannot be claimed"),
                "drop them",
            );
        }
        if !found.shape.fingerprint && found.faults.is_empty() {
            health.warning(
                format!("{table} has no column for fingerprints, so claims with a payload are refused"),
                format!("ALTER TABLE {table} ADD COLUMN fingerprint uuid, if payloads are to be compared"),
            );
        }
        if !found.shape.purge_index && found.faults.is_empty() {
            health.warning(
                format!("{table} has no index for purging, so a purge reads the table from its beginning"),
                format!(
                    "CREATE INDEX CONCURRENTLY ON {table} (consumer_group, date_trunc('minute', processed_at AT TIME \
                     ZONE 'UTC')), if it is large"
                ),
            );
        }
    }
}

impl fmt::Debug for PostgresInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresInbox")
            .field("table", &self.table.to_string())
            .field("wait", &self.wait)
            .field("longest_wait", &self.longest_wait)
            .field("prepared", &self.prepared)
            .finish_non_exhaustive()
    }
}

/// Makes a [`PostgresInbox`]; from [`PostgresInbox::builder`].
#[derive(Debug, Clone)]
#[must_use]
pub struct Builder {
    pool: PgPool,
    schema: Option<String>,
    table: String,
    wait: WaitPolicy,
    longest_wait: Duration,
    prepared: bool,
}

impl Builder {
    /// The schema of the table; [`Upkeep::setup`] makes it if it is missing. Unless set, the connections' `search_path`
    /// decides.
    ///
    /// Any name of 1 to 63 bytes, taken as it is: it is quoted, so capitals, dots and quotes are part of it.
    pub fn schema(mut self, schema: impl Into<String>) -> Self {
        self.schema = Some(schema.into());
        self
    }

    /// The table, `inbox_events` unless set. A name as in [`schema`](Self::schema), but of at most 50 bytes: dead letters are
    /// kept in a table of this name with `_dead_letters` behind.
    pub fn table(mut self, table: impl Into<String>) -> Self {
        self.table = table.into();
        self
    }

    /// What a claim does about a message that another open transaction claims. [`WaitPolicy::Wait`] unless set.
    ///
    /// | policy | answers | costs |
    /// | --- | --- | --- |
    /// | [`Wait`](WaitPolicy::Wait) | after the other's commit or rollback, for certain; after [`longest_wait`](Self::longest_wait), the error [`ErrorKind::Busy`] | one statement, prepared: one round trip if new, two if a duplicate |
    /// | [`DontWait`](WaitPolicy::DontWait) | after a millisecond, [`Claim::InFlight`] | one round trip in any case; a savepoint on the server, and statements that are parsed each time |
    /// | [`AtMost`](WaitPolicy::AtMost) | after that time, [`Claim::InFlight`]; in a batch, after that time for all and a millisecond for each message in flight | the same |
    ///
    /// The policies work beside one another, and beside other programs' plain inserts: the key in the database decides.
    /// They need the language `plpgsql`, which every database has unless it was dropped, but for `Wait`.
    pub const fn wait(mut self, wait: WaitPolicy) -> Self {
        self.wait = wait;
        self
    }

    /// The longest that [`WaitPolicy::Wait`] waits on one other transaction, 10 seconds unless set; rounded down to 10
    /// milliseconds, and 7 more. Then the claim is [`ErrorKind::Busy`], which is retryable.
    ///
    /// The server bounds the wait, so that a claim whose future was dropped, or whose process died, keeps its connection
    /// no longer than this. A transaction that has a `lock_timeout` of its own set is bounded by that instead, and no
    /// setting is different after the claim from what it was before.
    pub const fn longest_wait(mut self, longest: Duration) -> Self {
        self.longest_wait = longest;
        self
    }

    /// Whether statements are prepared, `true` unless set.
    ///
    /// Set `false` behind a pooler in transaction mode, such as PgBouncer before 1.21 or without its
    /// `max_prepared_statements`: a prepared statement's name is lost or another client's there. Statements then go as
    /// text with the values in it, in one round trip each, and are parsed and planned each time. (sqlx's
    /// `statement_cache_capacity(0)` is no remedy: names are still used, and collide the more.) PgBouncer also wants
    /// `ignore_startup_parameters = extra_float_digits`, or the pool's options `extra_float_digits(None)`; and the schema
    /// is better named than left to the `search_path`.
    pub const fn prepared_statements(mut self, prepared: bool) -> Self {
        self.prepared = prepared;
        self
    }

    /// The store. Nothing is sent yet.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if a name is empty, has a NUL character in it, or is too long: 63 bytes for a schema, 50
    /// for a table, whose dead letters stand in one with 13 bytes more.
    pub fn build(self) -> Result<PostgresInbox> {
        let table = Table::new(self.schema.as_deref(), &self.table)?;
        let letters = Table::of_letters(self.schema.as_deref(), &self.table)?;
        Ok(PostgresInbox {
            table: Arc::new(table),
            letter_statements: Arc::new(LetterStatements::new(&letters)),
            letters: Arc::new(letters),
            pool: self.pool,
            wait: self.wait,
            longest_wait: self.longest_wait,
            prepared: self.prepared,
            guard: Statement::guard(),
            statements: Arc::default(),
        })
    }
}

/// A future that is run to its end by a task of its own if it is dropped before.
///
/// To spawn it from the start would do as well, and cost every transaction a change of threads.
struct ToTheEnd<T: Send + 'static>(Option<Pin<Box<dyn Future<Output = T> + Send>>>);

impl<T: Send + 'static> Future for ToTheEnd<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let Some(future) = &mut self.0 else {
            // Polled after its end, which `await` does not do.
            return Poll::Pending;
        };
        let polled = future.as_mut().poll(cx);
        if polled.is_ready() {
            self.0 = None;
        }
        polled
    }
}

impl<T: Send + 'static> Drop for ToTheEnd<T> {
    fn drop(&mut self) {
        // Without a runtime, its connections are of no more use either.
        if let (Some(future), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(future);
        }
    }
}

/// A record that was looked for.
#[derive(Debug, Clone)]
struct Found {
    seen: bool,
    processed: Processed,
}

impl Found {
    /// From a row's columns: whether there is one, its time in microseconds since 1970, its fingerprint.
    fn read(row: &PgRow, first: usize) -> sqlx::Result<Self> {
        let microseconds: Option<i64> = row.try_get(first + 1)?;
        let fingerprint: Option<String> = row.try_get(first + 2)?;
        let mut processed = Processed::default();
        processed.at = microseconds.and_then(time);
        processed.fingerprint = fingerprint
            .and_then(|text| uuid::Uuid::try_parse(&text).ok())
            .map(|bytes| Fingerprint::from_bytes(bytes.into_bytes()));
        Ok(Self {
            seen: row.try_get(first)?,
            processed,
        })
    }

    fn claim(self) -> Option<Claim> {
        self.seen.then_some(Claim::Duplicate(self.processed))
    }
}

/// The place in an array that a row is about, which SQL counts from 1.
fn place(row: &PgRow, column: usize) -> sqlx::Result<Option<usize>> {
    let ordinal: Option<i64> = row.try_get(column)?;
    Ok(ordinal.and_then(|ordinal| usize::try_from(ordinal - 1).ok()))
}

#[async_trait]
impl InboxStore for PostgresInbox {
    type Tx = PostgresTx;

    async fn try_claim(&self, tx: &mut PostgresTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let began = Instant::now();
        let claim = self.claim(&mut tx.inner, group, delivery).await?;
        if claim.is_new() {
            tx.note(group, [delivery.id()], began);
        }
        Ok(claim)
    }

    async fn try_claim_batch(
        &self,
        tx: &mut PostgresTx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        let began = Instant::now();
        let claims = self.claim_batch(&mut tx.inner, group, deliveries).await?;
        let new = deliveries.iter().zip(&claims).filter(|(_, claim)| claim.is_new());
        tx.note(group, new.map(|(delivery, _)| delivery.id()), began);
        Ok(claims)
    }
}

/// Claims in a transaction that the caller opened with sqlx, of any lifetime. In a savepoint too: it is a
/// `Transaction` as well, and rolling back to it undoes the claim. **Effects then belong in the same savepoint**, or one
/// that is rolled back leaves the effect without the claim.
///
/// Committing is the caller's, and so is looking at errors before it: `sqlx::Transaction::commit` says `Ok` of a
/// transaction that had failed, and PostgreSQL has then rolled it back. The store's own transactions are guarded against
/// that. A record's age counts from its claim here, so purge nothing younger than the longest transaction takes.
#[async_trait]
impl<'c> ClaimIn<Transaction<'c, Postgres>> for PostgresInbox {
    async fn claim_in(
        &self,
        tx: &mut Transaction<'c, Postgres>,
        group: &ConsumerGroup,
        delivery: Delivery,
    ) -> Result<Claim> {
        self.claim(tx, group, delivery).await
    }

    async fn claim_batch_in(
        &self,
        tx: &mut Transaction<'c, Postgres>,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        self.claim_batch(tx, group, deliveries).await
    }
}

/// `begin` is one round trip (and the pool's own test of the connection, if it makes one), `commit` two: the guard and
/// the `COMMIT`.
#[async_trait]
impl Transactions for PostgresInbox {
    async fn begin(&self) -> Result<PostgresTx> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let token = NEXT.fetch_add(1, Ordering::Relaxed).to_string();
        // The setting ends with the transaction, and with nothing else.
        let tx = self
            .open(format!("BEGIN; SET LOCAL inbox_pattern.tx = '{token}'"))
            .await?;
        Ok(PostgresTx::new(tx, token))
    }

    async fn commit(&self, mut tx: PostgresTx) -> Result<()> {
        let stale = tx.stale();
        // Where something was claimed, the statements are known.
        let guard = match self.statements.get() {
            Some(statements) if !stale.is_empty() => {
                let ids: Vec<[u8; 16]> = stale.iter().map(|(_, id)| *id.as_bytes()).collect();
                let groups: Vec<String> = stale.iter().map(|(group, _)| group.as_str().to_owned()).collect();
                let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
                let token = tx.token.clone();
                let values = [Value::Ids(&ids), Value::Texts(&groups), Value::Text(Some(&token))];
                statements
                    .guard_and_stamp
                    .run(&mut tx.inner, self.prepared, &values)
                    .await
            }
            _ => self.guard.run(&mut tx.inner, self.prepared, &[]).await,
        };
        let token = guard.and_then(|rows| rows.first().map(|row| row.try_get::<String, _>(0)).transpose());
        let error = match token {
            Ok(Some(token)) if token == tx.token => {
                return tx.inner.commit().await.map_err(|error| error::of_commit(error, &self.table));
            }
            Ok(_) => Error::new(
                ErrorKind::TransactionEnded,
                "the transaction had been ended by a COMMIT or ROLLBACK of the handler's own, so claim and effects did \
                 not commit together; leave both to the inbox, and look at what the handler has stored",
            ),
            Err(error) if error::kind_of(&error) == ErrorKind::TransactionEnded => Error::new(
                ErrorKind::TransactionEnded,
                "a statement of the handler's failed and the handler went on, so PostgreSQL has given up the transaction \
                 (25P02) and nothing is stored; have the handler return the error, or try such statements in a savepoint",
            )
            .with_source(error),
            Err(error) => self.error(error),
        };
        if let Err(error) = tx.inner.rollback().await {
            tracing::debug!(%error, "the rollback failed; the server rolls back when it sees the connection gone");
        }
        Err(error)
    }

    async fn rollback(&self, tx: PostgresTx) -> Result<()> {
        tx.inner.rollback().await.map_err(|error| self.error(error))
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error.downcast_ref::<sqlx::Error>().map(error::kind_of)
    }

    /// As many as the pool may have connections.
    fn max_transactions(&self) -> Option<NonZeroUsize> {
        usize::try_from(self.pool.options().get_max_connections())
            .ok()
            .and_then(NonZeroUsize::new)
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = PostgresTx>> {
        Some(self)
    }
}

/// In a table beside the inbox's, named as it is with `_dead_letters` behind. Times are microseconds. PostgreSQL has no NUL
/// in a text: in subject, origin and error it becomes U+FFFD, so that the letter is kept; headers and payload stay as they
/// are.
///
/// In the caller's transaction an operation is one statement; the others are a transaction of their own, of one statement
/// and, for [`start_put_back`](DeadLetters::start_put_back), two.
#[async_trait]
impl DeadLetters for PostgresInbox {
    async fn add_dead_letter(&self, tx: &mut PostgresTx, letter: &DeadLetter) -> Result<()> {
        let info = &letter.info;
        let [id, group] = key_values(&info.key);
        let [subject, origin, error] =
            [&info.subject, &info.origin, &info.error].map(|text| text.replace('\0', "\u{fffd}"));
        // JSON has no NUL in it but escaped.
        let headers = letter.headers.to_json();
        let values = [
            id,
            group,
            Value::Text(Some(info.state.as_str())),
            Value::Number(info.attempts.into()),
            Value::Time(info.published_at.and_then(microseconds)),
            Value::Text(Some(&subject)),
            Value::Text(Some(&origin)),
            Value::Text(Some(&error)),
            Value::Text(Some(&headers)),
            Value::Bytes(&letter.payload),
        ];
        let added = self.letter_statements.add.run(&mut tx.inner, self.prepared, &values);
        added.await.map(drop).map_err(|error| self.letter_error(error))
    }

    async fn remove_dead_letter(&self, tx: &mut PostgresTx, key: &Key) -> Result<()> {
        let values = key_values(key);
        let removed = self.letter_statements.delete.run(&mut tx.inner, self.prepared, &values);
        removed.await.map(drop).map_err(|error| self.letter_error(error))
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let rows = self.look(&self.letter_statements.find, &key_values(key)).await?;
        rows.first().map(|row| self.read_letter(row, key)).transpose()
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        let (time, id) = after.map_or((TIMES.start, [0; 16]), |after| {
            let (time, id) = after.in_ticks(MICROSECOND);
            (time.clamp(TIMES.start, TIMES.end), *id.as_bytes())
        });
        let values = [
            Value::Text(Some(group.as_str())),
            Value::Time(Some(time)),
            Value::Id(id),
            Value::Number(limit.get().into()),
        ];
        let rows = self.look(&self.letter_statements.list, &values).await?;
        rows.iter().map(|row| self.read_info(row, group)).collect()
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let values = key_values(key);
        let turned = self
            .letter_statements
            .start_put_back
            .run(&mut tx, self.prepared, &values);
        let turned = turned.await.map_err(|error| self.letter_error(error))?;
        let Some(row) = turned.first() else {
            tx.rollback().await.map_err(|error| self.letter_error(error))?;
            return Ok(None);
        };
        let letter = self.read_letter(row, key)?;
        if row.try_get(10).map_err(|error| self.letter_error(error))? {
            let forget = &self.statements(&mut tx).await?.forget;
            let forgotten = forget.run(&mut tx, self.prepared, &values).await;
            forgotten.map_err(|error| self.error(error))?;
        }
        self.commit_upkeep(tx).await?;
        Ok(Some(letter))
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        let [id, group] = key_values(&info.key);
        let (time, _) = info.place().in_ticks(MICROSECOND);
        let values = [id, group, Value::Time(Some(time.clamp(TIMES.start, TIMES.end)))];
        self.remove(&self.letter_statements.finish_put_back, &values).await
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        self.remove(&self.letter_statements.delete, &key_values(key)).await
    }
}

impl PostgresInbox {
    /// Runs a statement on dead letters that changes nothing.
    async fn look(&self, statement: &Statement, values: &[Value<'_>]) -> Result<Vec<PgRow>> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let rows = statement.run(&mut tx, self.prepared, values).await;
        let rows = rows.map_err(|error| self.letter_error(error))?;
        tx.rollback().await.map_err(|error| self.letter_error(error))?;
        Ok(rows)
    }

    /// Runs a statement that removes a dead letter. Says whether it did.
    async fn remove(&self, statement: &Statement, values: &[Value<'_>]) -> Result<bool> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let removed = statement.run(&mut tx, self.prepared, values).await;
        let removed = !removed.map_err(|error| self.letter_error(error))?.is_empty();
        self.commit_upkeep(tx).await?;
        Ok(removed)
    }

    fn read_info(&self, row: &PgRow, group: &ConsumerGroup) -> Result<DeadLetterInfo> {
        let id: String = row.try_get(0).map_err(|error| self.letter_error(error))?;
        let id = MessageId::new(&id)
            .map_err(|error| Error::new(ErrorKind::Store, "a dead letter has no id").with_source(error))?;
        let mut info = DeadLetterInfo::new(Key::new(group.clone(), id), "");
        let state: String = row.try_get(1).map_err(|error| self.letter_error(error))?;
        info.state = DeadLetterState::from_text(&state)?;
        let mut read = || {
            let attempts: i64 = row.try_get(2)?;
            info.attempts = u32::try_from(attempts.max(0)).unwrap_or(u32::MAX);
            info.published_at = row.try_get::<Option<i64>, _>(3)?.and_then(time);
            info.died_at = row
                .try_get::<Option<i64>, _>(4)?
                .and_then(time)
                .unwrap_or(SystemTime::UNIX_EPOCH);
            info.subject = row.try_get(5)?;
            info.origin = row.try_get(6)?;
            info.error = row.try_get(7)?;
            Ok(())
        };
        read().map_err(|error| self.letter_error(error))?;
        Ok(info)
    }

    fn read_letter(&self, row: &PgRow, key: &Key) -> Result<DeadLetter> {
        let info = self.read_info(row, key.group())?;
        let headers: String = row.try_get(8).map_err(|error| self.letter_error(error))?;
        let payload: Vec<u8> = row.try_get(9).map_err(|error| self.letter_error(error))?;
        Ok(DeadLetter::new(info, Headers::from_json(&headers)?, payload))
    }
}

/// As PostgreSQL keeps times.
const MICROSECOND: Duration = Duration::from_micros(1);

/// The times that are written: from the year 1 to the year 9999, in microseconds since 1970.
const TIMES: Range<i64> = -62_135_596_800_000_000..253_402_300_799_999_999;

/// `None` for a time that makes no sense.
fn microseconds(time: SystemTime) -> Option<i64> {
    let micros = match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_micros()).ok(),
        Err(before) => i64::try_from(before.duration().as_micros()).ok().map(|micros| -micros),
    };
    micros.filter(|micros| TIMES.contains(micros))
}

/// The time so many microseconds after 1970, if there is one.
fn time(micros: i64) -> Option<SystemTime> {
    let distance = Duration::from_micros(micros.unsigned_abs());
    if micros < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    }
}

fn key_values(key: &Key) -> [Value<'_>; 2] {
    [Value::Id(*key.id().as_bytes()), Value::Text(Some(key.group().as_str()))]
}

#[async_trait]
impl Upkeep for PostgresInbox {
    /// Makes the tables (and their schema, if one was named), or upgrades ours. One transaction, under an advisory
    /// lock that ends with it, so that any number at once do it once; where there is nothing to do, it only looks.
    ///
    /// An inbox of an earlier version, or of another program's making, gets the table of dead letters too, beside its own: the
    /// role must be allowed to make one, or the error ([`ErrorKind::Denied`]) has the SQL for one that may. Claims go on
    /// without.
    ///
    /// A table that another program made is left as it is if claims can be made in it: with the columns `event_id`
    /// (uuid), `consumer_group` (text), `processed_at` (timestamptz) and a unique key over the first two. nats-outbox's
    /// is one.
    async fn setup(&self) -> Result<()> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        match self.set_up(&mut tx).await {
            Ok(()) => self.commit_upkeep(tx).await,
            Err(error) => {
                if let Err(error) = tx.rollback().await {
                    tracing::debug!(%error, "the rollback of a set-up failed");
                }
                Err(error)
            }
        }
    }

    /// Looks at the tables, the role's rights and the server's settings: three round trips, reading the catalogue only.
    async fn check(&self) -> Result<Health> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let looked = async {
            let found = Inspection::of(&self.table, &mut tx).await?;
            let letters = Letters::of(&self.letters, &mut tx).await?;
            let server = Server::of(&self.table, &mut tx).await?;
            tx.rollback().await?;
            Ok((found, letters, server))
        };
        let (found, letters, server) = looked.await.map_err(|error| self.error(error))?;
        Ok(self.judge(&found, &letters, &server))
    }

    /// One look-up by the key.
    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let values = [Value::Id(*key.id().as_bytes()), Value::Text(Some(key.group().as_str()))];
        let rows = self
            .statements(&mut tx)
            .await?
            .find
            .run(&mut tx, self.prepared, &values)
            .await;
        let found = rows.and_then(|rows| rows.first().map(|row| Found::read(row, 0)).transpose());
        let found = found.map_err(|error| self.error(error))?;
        tx.rollback().await.map_err(|error| self.error(error))?;
        Ok(found
            .filter(|found| found.seen)
            .map(|found| Record::new(key.clone(), found.processed)))
    }

    /// Waits for a transaction that holds the record, for at most a minute.
    async fn forget(&self, key: &Key) -> Result<bool> {
        let mut tx = self.open(schema::BEGIN_UPKEEP.into()).await?;
        let values = [Value::Id(*key.id().as_bytes()), Value::Text(Some(key.group().as_str()))];
        let gone = self
            .statements(&mut tx)
            .await?
            .forget
            .run(&mut tx, self.prepared, &values)
            .await;
        let gone = !gone.map_err(|error| self.error(error))?.is_empty();
        self.commit_upkeep(tx).await?;
        Ok(gone)
    }

    /// One transaction that deletes at most a step's records, oldest first, and skips what other transactions hold.
    ///
    /// The index `(consumer_group, minute of processed_at)` leads straight to the group's oldest records: a step reads
    /// what it deletes and, in the last minute before the cut, what is not old enough yet. Records without a time, which
    /// only another program writes, stay. A claim of a message whose record is being deleted waits for the step.
    async fn purge(&self, purge: &Purge) -> Result<Purged> {
        // Older than any time that PostgreSQL knows (4713 BC): nothing is.
        let Some(age) = i64::try_from(purge.older_than.as_micros())
            .ok()
            .filter(|&age| age < 200_000_000_000_000_000)
        else {
            return Ok(Purged::new(0, false));
        };
        let mut tx = self.open(schema::BEGIN_PURGE.into()).await?;
        let statements = self.statements(&mut tx).await?;
        let step = i64::from(purge.step.get());
        let group = purge.group.as_ref().map(ConsumerGroup::as_str);
        let statement = if group.is_some() {
            &statements.purge_group
        } else {
            &statements.purge_all
        };
        let values = [Value::Text(group), Value::Number(age), Value::Number(step)];
        let rows = statement.run(&mut tx, self.prepared, &values).await;
        let removed = rows.and_then(|rows| rows.first().map_or(Ok(0), |row| row.try_get::<i64, _>(0)));
        let removed = removed.map_err(|error| self.error(error))?;
        self.commit_upkeep(tx).await?;
        Ok(Purged::new(removed.unsigned_abs(), removed >= step))
    }
}
