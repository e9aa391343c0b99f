//! What the tests share: a schema of their own on the shared server, stores in it, and a proxy that watches the wire.

use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use inbox_core::{ConsumerGroup, Delivery, Inbox, MessageId};
use inbox_postgres::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use inbox_postgres::sqlx::{AssertSqlSafe, PgPool, Row, raw_sql};
use inbox_postgres::{Builder, PostgresInbox};
use inbox_test_servers::{postgres_url, unique_name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// A schema of a test's own, on a pool whose search path leads there.
pub(crate) struct Place {
    pub(crate) schema: String,
    pub(crate) pool: PgPool,
}

pub(crate) fn options(url: &str, schema: &str) -> PgConnectOptions {
    PgConnectOptions::from_str(url)
        .unwrap()
        .options([("search_path", schema)])
}

pub(crate) async fn pool_at(options: PgConnectOptions, connections: u32) -> PgPool {
    PgPoolOptions::new()
        .max_connections(connections)
        .connect_with(options)
        .await
        .unwrap()
}

impl Place {
    /// With a pool of so many connections and a table `effect(id text)`.
    pub(crate) async fn new(connections: u32) -> Self {
        Self::at(&postgres_url(), connections).await
    }

    pub(crate) async fn at(url: &str, connections: u32) -> Self {
        let schema = unique_name();
        let pool = pool_at(options(url, &schema), connections).await;
        let place = Self { schema, pool };
        place
            .sql(&format!(
                "CREATE SCHEMA {}; CREATE TABLE effect (id text)",
                place.schema
            ))
            .await;
        place
    }

    /// A further pool on the same schema.
    pub(crate) async fn further(&self, connections: u32) -> PgPool {
        pool_at((*self.pool.connect_options()).clone(), connections).await
    }

    /// An inbox with the table set up.
    pub(crate) async fn inbox(&self) -> Inbox<PostgresInbox> {
        self.inbox_with(|builder| builder).await
    }

    pub(crate) async fn inbox_with(&self, f: impl FnOnce(Builder) -> Builder) -> Inbox<PostgresInbox> {
        let inbox = Inbox::new(f(PostgresInbox::builder(self.pool.clone())).build().unwrap(), "billing").unwrap();
        inbox.setup().await.unwrap();
        inbox
    }

    pub(crate) async fn sql(&self, sql: &str) {
        if let Err(error) = raw_sql(AssertSqlSafe(sql)).execute(&self.pool).await {
            panic!("{sql}: {error}");
        }
    }

    pub(crate) async fn number(&self, sql: &str) -> i64 {
        raw_sql(AssertSqlSafe(sql)).fetch_one(&self.pool).await.unwrap().get(0)
    }

    pub(crate) async fn text(&self, sql: &str) -> String {
        raw_sql(AssertSqlSafe(sql)).fetch_one(&self.pool).await.unwrap().get(0)
    }

    pub(crate) async fn effects(&self) -> i64 {
        self.number("SELECT count(*) FROM effect").await
    }

    pub(crate) async fn records(&self) -> i64 {
        self.number("SELECT count(*) FROM inbox_events").await
    }

    /// Waits until so many of this schema's sessions wait for a lock.
    pub(crate) async fn until_waiting(&self, sessions: i64) {
        // A session of ours is one whose statement names a table that this schema has; tests run side by side, so look
        // at who waits for whom on relations of this schema.
        let sql = format!(
            "SELECT count(DISTINCT w.pid) FROM pg_locks w WHERE NOT w.granted AND EXISTS (SELECT FROM pg_locks r JOIN \
             pg_class c ON c.oid = r.relation JOIN pg_namespace n ON n.oid = c.relnamespace WHERE r.pid = w.pid AND \
             n.nspname = '{}')",
            self.schema
        );
        let pool = pool_at((*self.pool.connect_options()).clone(), 1).await;
        eventually("sessions wait", async || {
            let row = raw_sql(AssertSqlSafe(sql.clone())).fetch_one(&pool).await.unwrap();
            row.get::<i64, _>(0) >= sessions
        })
        .await;
    }
}

pub(crate) async fn eventually(what: &str, mut look: impl AsyncFnMut() -> bool) {
    let patience = Instant::now() + Duration::from_mins(1);
    while !look().await {
        assert!(Instant::now() < patience, "{what}: not within a minute");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn id(name: impl AsRef<str>) -> MessageId {
    MessageId::new(name).unwrap()
}

pub(crate) fn ids(prefix: &str, count: usize) -> Vec<Delivery> {
    (0..count)
        .map(|number| id(format!("{prefix}{number}")).into())
        .collect()
}

pub(crate) fn group(name: &str) -> ConsumerGroup {
    ConsumerGroup::new(name).unwrap()
}

/// Stands between client and server: counts round trips, and can cut the line behind a word.
#[derive(Clone, Default)]
pub(crate) struct Proxy {
    round_trips: Arc<AtomicUsize>,
    cut_after_commit: Arc<AtomicBool>,
    port: u16,
}

impl Proxy {
    pub(crate) async fn before(host: String, port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Self {
            port: listener.local_addr().unwrap().port(),
            ..Self::default()
        };
        let handle = proxy.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect((host.as_str(), port)).await.unwrap();
                tokio::spawn(handle.clone().carry(client, server));
            }
        });
        proxy
    }

    /// As the shared server's URL, but through the proxy.
    pub(crate) fn options(&self, direct: &PgConnectOptions) -> PgConnectOptions {
        direct.clone().host("127.0.0.1").port(self.port)
    }

    async fn carry(self, client: TcpStream, server: TcpStream) {
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_server, mut to_server) = server.into_split();
        let asked = Arc::new(AtomicBool::new(false));
        let cut = Arc::new(AtomicBool::new(false));
        let (asking, cutting) = (Arc::clone(&asked), Arc::clone(&cut));
        let commits = Arc::clone(&self.cut_after_commit);
        tokio::spawn(async move {
            let mut buffer = vec![0; 1 << 16];
            while let Ok(read @ 1..) = from_client.read(&mut buffer).await {
                asking.store(true, Ordering::SeqCst);
                if commits.load(Ordering::SeqCst) && buffer[..read].windows(6).any(|word| word == b"COMMIT") {
                    cutting.store(true, Ordering::SeqCst);
                }
                if to_server.write_all(&buffer[..read]).await.is_err() {
                    break;
                }
            }
        });
        let mut buffer = vec![0; 1 << 16];
        while let Ok(read @ 1..) = from_server.read(&mut buffer).await {
            if cut.load(Ordering::SeqCst) {
                break; // the answer to the COMMIT, which therefore has happened
            }
            if asked.swap(false, Ordering::SeqCst) {
                self.round_trips.fetch_add(1, Ordering::SeqCst);
            }
            if to_client.write_all(&buffer[..read]).await.is_err() {
                break;
            }
        }
    }

    pub(crate) fn cut_after_commit(&self, cut: bool) {
        self.cut_after_commit.store(cut, Ordering::SeqCst);
    }

    /// How often the client asked and got an answer, since the last call.
    pub(crate) fn round_trips(&self) -> usize {
        self.round_trips.swap(0, Ordering::SeqCst)
    }
}

/// A proxy before the shared server.
pub(crate) async fn proxy(place: &Place) -> (Proxy, PgConnectOptions) {
    let direct = (*place.pool.connect_options()).clone();
    let proxy = Proxy::before(direct.get_host().to_owned(), direct.get_port()).await;
    let options = proxy.options(&direct);
    (proxy, options)
}
