//! The conformance suite on PostgreSQL: on each wait policy, with statements as text, at each default isolation level,
//! and through PgBouncer.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::str::FromStr;
use std::time::Duration;

use inbox_conformance::Fixture;
use inbox_core::{Error, ErrorKind, InboxStore, Result, Transactions, WaitPolicy, async_trait};
use inbox_postgres::{PostgresInbox, PostgresTx, sqlx};
use inbox_test_servers::{PgBouncer, postgres_url, unique_name};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool, Row, raw_sql};

/// What a run of the suite sets up differently.
#[derive(Default)]
struct Setting {
    wait: WaitPolicy,
    as_text: bool,
    isolation: Option<&'static str>,
    pooler: bool,
    before: Option<&'static str>,
}

struct Place {
    schema: String,
    setting: Setting,
    /// Straight to the server, for what an outsider sees.
    outside: PgPool,
    pooler: Option<PgBouncer>,
}

fn failed(error: sqlx::Error) -> Error {
    Error::new(ErrorKind::Store, "the fixture's statement failed").with_source(error)
}

impl Place {
    async fn new(setting: Setting) -> Self {
        let schema = unique_name();
        let options = PgConnectOptions::from_str(&postgres_url())
            .unwrap()
            .options([("search_path", &schema)]);
        let search = format!("SET search_path = {schema}, pg_catalog");
        let pooler = setting
            .pooler
            .then(|| PgBouncer::before(options.get_host(), options.get_port(), 20, Some(&search)));
        let outside = PgPoolOptions::new()
            .max_connections(2)
            .connect_with(options)
            .await
            .unwrap();
        // A clock that the suite can move: names of functions are looked for in the place's schema first.
        let sql = format!(
            "CREATE SCHEMA {schema}; CREATE TABLE {schema}.effects (name text); CREATE TABLE {schema}.clock (ahead interval); \
             INSERT INTO {schema}.clock VALUES ('0'); CREATE FUNCTION {schema}.clock_timestamp() RETURNS timestamptz LANGUAGE \
             sql VOLATILE AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM {schema}.clock'; CREATE FUNCTION \
             {schema}.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS 'SELECT \
             pg_catalog.statement_timestamp() + ahead FROM {schema}.clock'; {}",
            setting.before.unwrap_or_default()
        );
        raw_sql(AssertSqlSafe(sql)).execute(&outside).await.unwrap();
        Self {
            schema,
            setting,
            outside,
            pooler,
        }
    }

    async fn open(&self, table: Option<&str>) -> Result<PostgresInbox> {
        let url = self.pooler.as_ref().map_or_else(postgres_url, PgBouncer::url);
        let mut options = PgConnectOptions::from_str(&url).map_err(failed)?;
        if self.pooler.is_none() {
            options = options.options([("search_path", format!("{},pg_catalog", self.schema))]);
            if let Some(level) = self.setting.isolation {
                options = options.options([("default_transaction_isolation", level)]);
            }
        }
        let pool = PgPoolOptions::new()
            .max_connections(4)
            .connect_with(options)
            .await
            .map_err(failed)?;
        let mut builder = PostgresInbox::builder(pool)
            .schema(&self.schema)
            .wait(self.setting.wait)
            .prepared_statements(!self.setting.as_text);
        if let Some(table) = table {
            builder = builder.table(table);
        }
        builder.build()
    }
}

#[async_trait]
impl Fixture for Place {
    type Store = PostgresInbox;

    async fn connect(&self) -> Result<PostgresInbox> {
        self.open(None).await
    }

    async fn write_effect(&self, _store: &PostgresInbox, tx: &mut PostgresTx, name: &str) -> Result<()> {
        // Names have nothing in them that a text of SQL would need escaped, but quotes.
        let name = name.replace('\'', "''");
        let sql = format!("INSERT INTO {}.effects VALUES ('{name}')", self.schema);
        raw_sql(AssertSqlSafe(sql))
            .execute(&mut **tx)
            .await
            .map(drop)
            .map_err(failed)
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        let query = sqlx::query("SELECT count(*) FROM effects WHERE name = $1").bind(name);
        let row = query.fetch_one(&self.outside).await.map_err(failed)?;
        Ok(row.get::<i64, _>(0).unsigned_abs())
    }

    async fn sever(&self, _store: &PostgresInbox, mut tx: PostgresTx) -> Result<()> {
        let row = raw_sql("SELECT pg_backend_pid()")
            .fetch_one(&mut *tx)
            .await
            .map_err(failed)?;
        let query = sqlx::query("SELECT pg_terminate_backend($1, 10000)").bind(row.get::<i32, _>(0));
        query.execute(&self.outside).await.map(drop).map_err(failed)
    }

    async fn advance_clock(&self, _store: &PostgresInbox, by: Duration) -> Result<()> {
        let query = sqlx::query("UPDATE clock SET ahead = ahead + $1 * interval '1 microsecond'");
        let query = query.bind(i64::try_from(by.as_micros()).unwrap());
        query.execute(&self.outside).await.map(drop).map_err(failed)
    }

    fn isolation_levels(&self) -> Vec<String> {
        ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
            .map(String::from)
            .to_vec()
    }

    async fn begin_at(&self, store: &PostgresInbox, level: &str) -> Result<<PostgresInbox as InboxStore>::Tx> {
        let mut tx = store.begin().await?;
        let sql = format!("SET TRANSACTION ISOLATION LEVEL {level}");
        raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await.map_err(failed)?;
        Ok(tx)
    }

    async fn connect_named(&self, name: &str) -> Option<Result<PostgresInbox>> {
        Some(self.open(Some(name)).await)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (outside, schema) = (self.outside.clone(), self.schema.clone());
        // Where there is no runtime any more, the server goes with the process, schema and all.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let sql = format!("DROP SCHEMA {schema} CASCADE");
                let _ = raw_sql(AssertSqlSafe(sql)).execute(&outside).await;
            });
        }
    }
}

macro_rules! laws_with {
    ($($module:ident: $setting:expr;)*) => {
        $(mod $module {
            #[allow(unused_imports, reason = "which of them a setting names differs")]
            use super::*;

            inbox_conformance::laws!(Place::new($setting).await);
        })*
    };
}

laws_with! {
    waiting: Setting::default();
    not_waiting: Setting { wait: WaitPolicy::DontWait, ..Setting::default() };
    waiting_at_most: Setting { wait: WaitPolicy::AtMost(Duration::from_millis(50)), ..Setting::default() };
    as_text: Setting { as_text: true, ..Setting::default() };
    at_repeatable_read: Setting { isolation: Some("repeatable read"), ..Setting::default() };
    at_serializable: Setting { isolation: Some("serializable"), ..Setting::default() };
    not_waiting_at_serializable: Setting {
        wait: WaitPolicy::DontWait, isolation: Some("serializable"), ..Setting::default()
    };
    through_pgbouncer: Setting { as_text: true, pooler: true, ..Setting::default() };
}
