//! [`RedisInbox`]: the store, and its [`Builder`].

use std::error::Error as StdError;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use deadpool::Runtime;
use deadpool::managed::{Manager, Metrics, Object, Pool, RecycleResult};
use inbox_core::{
    Claim, ConsumerGroup, DeadLetters, Delivery, Error, ErrorKind, Health, InFlight, InboxStore, Key, Processed, Purge,
    Purged, Record, Result, Transactions, Upkeep,
};
use redis::aio::MultiplexedConnection;
use redis::{
    AsyncConnectionConfig, Client, Cmd, InfoDict, IntoConnectionInfo, Pipeline, RedisError, Value as Reply, cmd,
};
use uuid::Uuid;

use crate::error::{command_error, driver_error, kind_of, pool_error};
use crate::keys::{self, Claimed, Keys, Value};
use crate::tx::{RedisTx, token_of};

/// The oldest server that the tests have seen this work on is 7.0; what is used is in 6.2 too.
const OLDEST: (u32, u32) = (6, 2);

/// A store of records in Redis: a record is a key with a time to live, written in the same `MULTI ... EXEC` as the effects.
///
/// ```no_run
/// use inbox_core::{BoxError, Inbox, MessageId};
/// use inbox_redis::RedisInbox;
///
/// # #[tokio::main] async fn main() -> Result<(), BoxError> {
/// let inbox = Inbox::new(RedisInbox::connect("redis://127.0.0.1/").await?, "billing")?;
/// let id = MessageId::new("order-17")?;
/// inbox.process(id, async |tx| {
///     tx.pipe().incr("invoices", 1);
///     Ok::<_, BoxError>(())
/// }).await?;
/// # Ok(()) }
/// ```
///
/// Clones share the pool of connections.
///
/// # What Redis makes of the guarantee
///
/// It holds as long as the server keeps what it has acknowledged. [`check`](Upkeep::check) says what would break it: an
/// eviction policy that drops keys, a disk that is written later than the answer, a replica in the primary's place.
/// Replication is asynchronous, so a failover may forget a record and its effects together, though their message was
/// acknowledged; [`Builder::wait_for`] narrows that and does not close it. For money, take a SQL store.
///
/// # Dead letters
///
/// Kept in the transaction that gives the message up, one hash each, **without a time to live**: nothing but putting back or
/// deleting removes one, so look after them. They are whole payloads in memory. An `allkeys` eviction policy would drop them,
/// and [`check`](Upkeep::check) asks for `noeviction`. The record of the message has its time to live all the same: a
/// delivery after that is handled again, with the letter still there.
///
/// In a cluster a letter, the list that it stands in and its record must be in one slot, so dead letters need a
/// [tag](Builder::tag). Without one, [`dead_letters`](Transactions::dead_letters) is `None` there: a consumer works, never
/// gives a message up, and warns of it; calling [`DeadLetters`] itself is [`ErrorKind::Unsupported`].
#[derive(Clone)]
pub struct RedisInbox {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pool: Pool<Connector>,
    pub(crate) pool_size: usize,
    pub(crate) keys: Keys,
    /// Whether the server was a cluster's when the store connected, as far as it says.
    cluster: bool,
    pub(crate) retention: Duration,
    pub(crate) wait_for: Option<WaitFor>,
    pub(crate) find_out_within: Duration,
    flushed: Flushed,
}

/// Makes connections, one to a transaction.
pub(crate) struct Connector {
    client: Client,
    config: AsyncConnectionConfig,
}

/// A connection that nobody else uses, and whether its server is a cluster's.
///
/// It is of the driver's kind that does **not** reconnect by itself: a connection that came back between `WATCH` and `EXEC`
/// would watch nothing.
pub(crate) struct Connected {
    pub(crate) connection: MultiplexedConnection,
    pub(crate) cluster: bool,
}

impl Connected {
    async fn over(mut connection: MultiplexedConnection) -> Result<Self, RedisError> {
        let info: Result<InfoDict, RedisError> = cmd("INFO").arg("cluster").query_async(&mut connection).await;
        let cluster = match info {
            Ok(info) => info.get::<u8>("cluster_enabled") == Some(1),
            // INFO may be forbidden; a cluster then refuses by itself what we would have refused.
            Err(error) if kind_of(&error) == ErrorKind::Denied => false,
            Err(error) => return Err(error),
        };
        Ok(Self { connection, cluster })
    }
}

impl Manager for Connector {
    type Type = Connected;
    type Error = RedisError;

    async fn create(&self) -> Result<Connected, RedisError> {
        let connection = self
            .client
            .get_multiplexed_async_connection_with_config(&self.config)
            .await?;
        Connected::over(connection).await
    }

    /// Nothing to do, and no round trip: only connections without watches come back, and one that dies idle is exchanged
    /// by the transaction that finds it so.
    async fn recycle(&self, _: &mut Connected, _: &Metrics) -> RecycleResult<RedisError> {
        Ok(())
    }
}

impl Shared {
    pub(crate) async fn connection(&self) -> Result<Object<Connector>> {
        self.pool.get().await.map_err(pool_error)
    }

    /// Whether dead letters can be kept: not where a letter, the list that it stands in and its record are in different
    /// slots.
    pub(crate) const fn keeps_letters(&self) -> bool {
        !self.cluster || self.keys.has_tag()
    }

    /// A connection that was not there before.
    pub(crate) async fn fresh(&self) -> Result<MultiplexedConnection> {
        let connected = self.pool.manager().create().await;
        Ok(connected
            .map_err(|error| driver_error("connect to Redis", error))?
            .connection)
    }

    /// Puts a fence where there is nothing, or answers whose record stands there.
    pub(crate) async fn fence(&self, key: &str) -> Result<Option<Uuid>> {
        let mut connection = self.fresh().await?;
        let mut pipe = Pipeline::with_capacity(2);
        pipe.atomic().add_command(keys::fence(key)).add_command(keys::get(key));
        let (_, standing): (Reply, Option<Vec<u8>>) = pipe
            .query_async(&mut connection)
            .await
            .map_err(|error| driver_error("find out what became of a commit", error))?;
        Ok(token_of(standing.as_deref()))
    }
}

impl RedisInbox {
    /// Connects to the server of a URL, as the redis crate reads it: `redis://[user:password@]host[:port][/database]`, with
    /// `rediss` for TLS (feature `tls`). [`builder`](Self::builder) has more to set.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] for a URL that is none, [`ErrorKind::Unavailable`] if the server cannot be reached,
    /// [`ErrorKind::Denied`] if it refuses the user.
    pub async fn connect(url: impl IntoConnectionInfo) -> Result<Self> {
        Self::builder().connect(url).await
    }

    /// Sets prefix, tag, retention, pool and more.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The key under which a record is kept.
    pub fn key(&self, group: &ConsumerGroup, id: inbox_core::MessageId) -> String {
        self.shared.keys.of(group, id)
    }

    /// Opens a transaction on a connection of the caller's own.
    ///
    /// The connection must be the transaction's alone until its end: no other task may use it or a clone of it, because
    /// anybody's `EXEC` ends every watch of the connection. It must not be one that reconnects by itself. Dropping the
    /// transaction leaves it with keys watched; [`rollback`](Transactions::rollback) does not.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    pub async fn begin_on(&self, connection: MultiplexedConnection) -> Result<RedisTx> {
        let connected = Connected::over(connection).await;
        let connected = connected.map_err(|error| driver_error("use the connection", error))?;
        Ok(RedisTx::own(connected, Arc::clone(&self.shared)))
    }

    /// Claims a message **by itself**, at once, for callers who only filter and have no effect in Redis.
    ///
    /// **At most once**: the record is there before the work is done, so a consumer that dies in between loses the
    /// message. One `SET NX PX` round trip; one more for a duplicate. An answer that was lost is asked for again on another
    /// connection, with the same token, so that one's own record is not taken for another's. A future that is dropped may
    /// have claimed.
    ///
    /// # Errors
    ///
    /// As the driver has them; [`ErrorKind::OutcomeUnknown`] if nothing could be found out;
    /// [`ErrorKind::PayloadMismatch`].
    pub async fn claim_now(&self, group: &ConsumerGroup, delivery: impl Into<Delivery>) -> Result<Claim> {
        let delivery = delivery.into();
        let claimed = Claimed::new(self.key(group, delivery.id()), &delivery);
        let token = Uuid::new_v4();
        let mut pooled = self.shared.connection().await?;
        let mut answer = self.set_now(&mut pooled.connection, token, &claimed).await;
        if answer.is_err() {
            // What it still has to say belongs to nobody.
            drop(Object::take(pooled));
        }
        for _again in 0..3 {
            match answer {
                Err(lost) if kind_of(&lost) == ErrorKind::Unavailable => {
                    answer = self.set_now(&mut self.shared.fresh().await?, token, &claimed).await;
                }
                _ => break,
            }
        }
        let standing = answer.map_err(|error| match kind_of(&error) {
            ErrorKind::Unavailable => Error::new(
                ErrorKind::OutcomeUnknown,
                format!("the claim was sent, and neither its answer came nor that of asking again ({error})"),
            )
            .with_source(error),
            _ => driver_error("claim a message", error),
        })?;
        let claim = match standing {
            Some(value) if token_of(Some(&value)) == Some(token) => Claim::New,
            Some(value) => judge(&claimed.key, &value)?,
            // It expired between the two commands: the next delivery will be new.
            None => Claim::InFlight(InFlight::new()),
        };
        claim.verified(&delivery)
    }

    /// Writes a record where there is none; answers what stands there then.
    async fn set_now(
        &self,
        connection: &mut MultiplexedConnection,
        token: Uuid,
        Claimed { key, fingerprint, .. }: &Claimed,
    ) -> Result<Option<Vec<u8>>, RedisError> {
        // The server's clock would take a round trip of its own; this time is for people to read, the time to live is
        // the server's.
        let head = Value::head(SystemTime::now(), token);
        let value = Value::write(&head, *fingerprint);
        let set: Reply = keys::record(key, &value, self.shared.retention)
            .query_async(connection)
            .await?;
        if set == Reply::Okay {
            return Ok(Some(value.into_owned().into_bytes()));
        }
        keys::get(key).query_async(connection).await
    }

    pub(crate) async fn command<T: redis::FromRedisValue>(&self, command: &Cmd, doing: &str) -> Result<T> {
        let mut connection = self.shared.fresh().await?;
        command
            .query_async(&mut connection)
            .await
            .map_err(|error| command_error(doing, error))
    }
}

#[async_trait]
impl InboxStore for RedisInbox {
    type Tx = RedisTx;

    async fn try_claim(&self, tx: &mut RedisTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        let mut claims = self.try_claim_batch(tx, group, &[delivery]).await?;
        claims
            .pop()
            .ok_or_else(|| Error::new(ErrorKind::Store, "a claim was not answered"))
    }

    async fn try_claim_batch(
        &self,
        tx: &mut RedisTx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        let mut keys: Vec<String> = deliveries
            .iter()
            .map(|delivery| self.key(group, delivery.id()))
            .collect();
        // Equal ids side by side, the first of them first; ids, because they compare faster than keys do.
        let mut order: Vec<usize> = (0..deliveries.len()).collect();
        order.sort_by_key(|&index| deliveries[index].id());
        let same = |a: &usize, b: &usize| deliveries[*a].id() == deliveries[*b].id();
        let (mut unknown, mut looked_for) = (Vec::with_capacity(keys.len()), Vec::with_capacity(keys.len()));
        for equal in order.chunk_by(same) {
            if tx.own_claim(&keys[equal[0]]).is_none() {
                unknown.push(equal[0]);
                looked_for.push(std::mem::take(&mut keys[equal[0]]));
            }
        }
        for key in &looked_for {
            tx.stay_in_slot(key.as_bytes())?;
        }
        let values = if looked_for.is_empty() {
            Vec::new()
        } else {
            tx.look(&looked_for).await?
        };
        if values.len() != looked_for.len() {
            return Err(Error::new(ErrorKind::Store, "Redis answered MGET with too few values"));
        }
        let mut claims: Vec<Option<Claim>> = vec![None; deliveries.len()];
        let mut new = Vec::with_capacity(unknown.len());
        for ((index, key), value) in unknown.into_iter().zip(looked_for).zip(values) {
            claims[index] = Some(if let Some(value) = value {
                judge(&key, &value)?
            } else {
                new.push(Claimed::new(key, &deliveries[index]));
                Claim::New
            });
        }
        let repeated = claims.iter().any(Option::is_none);
        tx.note(new);
        if !repeated {
            return Ok(claims.into_iter().flatten().collect());
        }
        for equal in order.chunk_by(same) {
            for &index in equal {
                if claims[index].is_none() {
                    claims[index] = match tx.own_claim(&keys[index]) {
                        Some((own, now)) => {
                            Some(Claim::Duplicate(Processed::at(now).with_fingerprint(own.fingerprint)))
                        }
                        None => claims[equal[0]].clone(),
                    };
                }
            }
        }
        Ok(claims.into_iter().flatten().collect())
    }
}

#[async_trait]
impl Transactions for RedisInbox {
    async fn begin(&self) -> Result<RedisTx> {
        Ok(RedisTx::pooled(
            self.shared.connection().await?,
            Arc::clone(&self.shared),
        ))
    }

    async fn commit(&self, tx: RedisTx) -> Result<()> {
        tx.commit().await
    }

    async fn rollback(&self, tx: RedisTx) -> Result<()> {
        tx.roll_back().await
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        error.downcast_ref().map(kind_of)
    }

    fn max_transactions(&self) -> Option<NonZeroUsize> {
        NonZeroUsize::new(self.shared.pool_size)
    }

    fn retention(&self) -> Option<Duration> {
        Some(self.shared.retention)
    }

    /// `None` in a cluster where the store has no [tag](Builder::tag), and a warning that says so.
    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = RedisTx>> {
        if self.shared.keeps_letters() {
            return Some(self);
        }
        tracing::warn!("in a cluster, dead letters are kept only by a store with a tag; set one with Builder::tag");
        None
    }
}

#[async_trait]
impl Upkeep for RedisInbox {
    /// Nothing to create; says whether the server can be reached.
    async fn setup(&self) -> Result<()> {
        self.command(&cmd("PING"), "reach Redis").await
    }

    async fn check(&self) -> Result<Health> {
        let mut connection = self.shared.fresh().await?;
        let mut health = Health::new();
        examine(&mut connection, self.shared.flushed, &mut health).await?;
        if !self.shared.keeps_letters() {
            health.warning(
                "the server is a cluster's and the store has no tag: a transaction can have one claim only, and no dead \
                 letters can be kept",
                "set a tag with Builder::tag",
            );
        }
        Ok(health)
    }

    async fn find(&self, key: &Key) -> Result<Option<Record>> {
        let name = self.key(key.group(), key.id());
        let value: Option<Vec<u8>> = self.command(&keys::get(&name), "look up a record").await?;
        let Some(value) = value else { return Ok(None) };
        Ok(match judge(&name, &value)? {
            Claim::Duplicate(processed) => Some(Record::new(key.clone(), processed)),
            Claim::New | Claim::InFlight(_) => None,
        })
    }

    async fn forget(&self, key: &Key) -> Result<bool> {
        let name = self.key(key.group(), key.id());
        self.command(&keys::delete(&name), "forget a message").await
    }

    /// Nothing to do: each record has a time to live, the retention, after which Redis forgets it by itself.
    async fn purge(&self, _purge: &Purge) -> Result<Purged> {
        tracing::debug!("Redis forgets records by itself, after the retention; nothing to purge");
        Ok(Purged::new(0, false))
    }
}

/// What the value under a record's key means to a claim.
fn judge(key: &str, value: &[u8]) -> Result<Claim> {
    match std::str::from_utf8(value).ok().and_then(Value::read) {
        Some(Value::Record { processed, .. }) => Ok(Claim::Duplicate(processed)),
        Some(Value::Fence) => Ok(Claim::InFlight(InFlight::new().retry_after(keys::FENCE_STANDS))),
        None => Err(Error::new(
            ErrorKind::Schema,
            format!(
                "the key {key} holds something that is no record of the inbox's; give the inbox a prefix of its own"
            ),
        )),
    }
}

async fn examine(connection: &mut MultiplexedConnection, asked: Flushed, health: &mut Health) -> Result<()> {
    let failed = |error| driver_error("look at the server's settings", error);
    let info: InfoDict = match cmd("INFO").query_async(connection).await {
        Ok(info) => info,
        Err(error) if kind_of(&error) == ErrorKind::Denied => {
            health.warning(
                "INFO is forbidden here, so nothing could be looked at",
                "let the user run INFO and CONFIG GET",
            );
            return Ok(());
        }
        Err(error) => return Err(failed(error)),
    };
    let version: String = info.get("redis_version").unwrap_or_default();
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    if (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) < OLDEST {
        health.fault(
            format!("the server is Redis {version}"),
            format!("take {}.{} or later", OLDEST.0, OLDEST.1),
        );
    }
    if info.get::<String>("role").is_some_and(|role| role != "master") {
        health.fault(
            "the server is a replica: it cannot be written, and what it knows may be old",
            "connect to the primary",
        );
    }
    let Some(memory) = setting(connection, "maxmemory").await? else {
        health.warning(
            "CONFIG is forbidden here, so whether keys are evicted and when the disk is written could not be looked at",
            "let the user run CONFIG GET, or be sure of maxmemory-policy noeviction and appendfsync always",
        );
        return Ok(());
    };
    let policy = setting(connection, "maxmemory-policy").await?.unwrap_or_default();
    if policy != "noeviction" {
        let mut what = format!(
            "maxmemory-policy is {policy}: with memory short, Redis drops records, and their messages are new again"
        );
        if policy.starts_with("allkeys") {
            what.push_str("; it drops dead letters too, and their messages are lost");
        }
        let remedy = "set maxmemory-policy to noeviction";
        if memory == "0" {
            health.warning(format!("{what}; there is no limit (maxmemory) now"), remedy);
        } else {
            health.fault(what, remedy);
        }
    }
    let append_only = setting(connection, "appendonly").await?.unwrap_or_default();
    let fsync = setting(connection, "appendfsync").await?.unwrap_or_default();
    let has = match (append_only.as_str(), fsync.as_str()) {
        ("yes", "always") => Flushed::Always,
        ("yes", "everysec") => Flushed::EverySecond,
        _ => Flushed::Never,
    };
    if has < asked {
        health.fault(
            format!(
                "the disk is written less often ({has:?}: appendonly {append_only}, appendfsync {fsync}) than was asked \
                 ({asked:?}): a crash forgets records whose messages were acknowledged"
            ),
            "set appendonly to yes and appendfsync to always, or ask for less with Builder::flushed",
        );
    }
    Ok(())
}

/// A setting of the server's; `None` where asking is forbidden.
async fn setting(connection: &mut MultiplexedConnection, name: &str) -> Result<Option<String>> {
    let answer: Result<Vec<String>, RedisError> = cmd("CONFIG").arg("GET").arg(name).query_async(connection).await;
    match answer {
        Ok(pair) => Ok(Some(pair.into_iter().nth(1).unwrap_or_default())),
        // A managed service renames or removes the command: unknown, which has no code of its own.
        Err(error) if matches!(kind_of(&error), ErrorKind::Denied | ErrorKind::Store) => Ok(None),
        Err(error) => Err(driver_error("read a setting", error)),
    }
}

/// How soon the server must have written to disk what it acknowledges; what [`check`](Upkeep::check) asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flushed {
    /// Whenever: a restart may forget everything.
    Never,
    /// Within a second (`appendfsync everysec`): a crash may forget the last second.
    EverySecond,
    /// Before the answer (`appendfsync always`).
    Always,
}

/// What a commit waits for after it has happened, before it is Ok.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WaitFor {
    /// `WAIT`: this many replicas have it in memory.
    Replicas {
        /// How many.
        count: u32,
        /// For how long; at least a millisecond.
        within: Duration,
    },
    /// `WAITAOF` (Redis 7.2): this server and this many replicas have it on disk.
    Disk {
        /// How many replicas; 0 for this server alone.
        replicas: u32,
        /// For how long; at least a millisecond.
        within: Duration,
    },
}

impl WaitFor {
    const fn within(self) -> Duration {
        match self {
            Self::Replicas { within, .. } | Self::Disk { within, .. } => within,
        }
    }

    /// The command, and whether its reply is enough.
    pub(crate) fn command(self) -> (Cmd, impl Fn(&Reply) -> bool) {
        // 0 would mean for ever.
        let timeout = keys::millis(self.within()).max(1);
        let (command, least): (Cmd, Vec<u32>) = match self {
            Self::Replicas { count, .. } => {
                let mut wait = cmd("WAIT");
                wait.arg(count).arg(timeout);
                (wait, vec![count])
            }
            Self::Disk { replicas, .. } => {
                let mut wait = cmd("WAITAOF");
                wait.arg(1).arg(replicas).arg(timeout);
                (wait, vec![1, replicas])
            }
        };
        (command, move |reply: &Reply| {
            let reached = match reply {
                Reply::Array(numbers) => numbers.as_slice(),
                number => std::slice::from_ref(number),
            };
            reached.len() == least.len()
                && reached
                    .iter()
                    .zip(&least)
                    .all(|(reached, least)| matches!(reached, Reply::Int(number) if *number >= i64::from(*least)))
        })
    }
}

/// How to connect a [`RedisInbox`].
#[derive(Debug, Clone)]
#[must_use = "a builder connects to nothing until `connect`"]
pub struct Builder {
    prefix: String,
    tag: Option<String>,
    retention: Duration,
    pool_size: NonZeroUsize,
    response_timeout: Duration,
    pool_timeout: Duration,
    wait_for: Option<WaitFor>,
    flushed: Flushed,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            prefix: Keys::DEFAULT_PREFIX.into(),
            tag: None,
            retention: Duration::from_secs(7 * 24 * 60 * 60),
            pool_size: const { NonZeroUsize::new(16).unwrap() },
            response_timeout: Duration::from_secs(5),
            pool_timeout: Duration::from_secs(5),
            wait_for: None,
            flushed: Flushed::Always,
        }
    }
}

impl Builder {
    /// What every key begins with; `inbox` unless set. 1 to 255 bytes without braces and control characters.
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The tag of every key, which puts them all in one slot of a cluster, and business keys that have the same tag with
    /// them: `{billing}:invoices`. Unless set, every record has its id for a tag, so that records spread over the slots; a
    /// transaction in a cluster can then have one claim only, and effects only under keys with that id for a tag, and the
    /// store keeps no dead letters there, as a letter and its group's list would be in different slots.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.tag = Some(tag.into());
        self
    }

    /// How long a record lives; 7 days unless set. **It must be longer than the broker can still redeliver a message**,
    /// replays from dead letters and mirrors included: a message whose record is gone is new again.
    pub const fn retention(mut self, retention: Duration) -> Self {
        self.retention = retention;
        self
    }

    /// How many transactions can be open at a time, each on a connection of its own; 16 unless set.
    pub const fn pool_size(mut self, connections: NonZeroUsize) -> Self {
        self.pool_size = connections;
        self
    }

    /// How long to wait for a connection of the pool's before [`ErrorKind::Busy`]; 5 seconds unless set.
    pub const fn pool_timeout(mut self, timeout: Duration) -> Self {
        self.pool_timeout = timeout;
        self
    }

    /// How long to wait for an answer of the server's before it counts as lost; 5 seconds unless set. A commit whose answer
    /// is lost is found out about for as long again.
    pub const fn response_timeout(mut self, timeout: Duration) -> Self {
        self.response_timeout = timeout;
        self
    }

    /// What a commit waits for after it has happened; nothing unless set. Where it is not reached the commit is
    /// [`ErrorKind::OutcomeUnknown`]. Costs a round trip.
    pub const fn wait_for(mut self, wait_for: WaitFor) -> Self {
        self.wait_for = Some(wait_for);
        self
    }

    /// What [`check`](Upkeep::check) asks of the server's disk; [`Flushed::Always`] unless set.
    pub const fn flushed(mut self, flushed: Flushed) -> Self {
        self.flushed = flushed;
        self
    }

    /// Connects; see [`RedisInbox::connect`].
    ///
    /// # Errors
    ///
    /// As there, and [`ErrorKind::InvalidInput`] for a prefix, tag or retention that cannot be.
    pub async fn connect(self, url: impl IntoConnectionInfo) -> Result<RedisInbox> {
        let keys = Keys::new(self.prefix, self.tag)?;
        if self.retention < Duration::from_millis(1) || self.retention > Duration::from_secs(100 * 366 * 24 * 60 * 60) {
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "invalid retention {:?}: give it from 1 millisecond to 100 years",
                    self.retention
                ),
            ));
        }
        let client = Client::open(url).map_err(|error| driver_error("read the URL", error))?;
        let longest = self
            .wait_for
            .map_or(Duration::ZERO, |wait| wait.within() + Duration::from_secs(1));
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(self.response_timeout))
            .set_response_timeout(Some(self.response_timeout.max(longest)));
        let pool: Pool<Connector> = Pool::builder(Connector { client, config })
            .max_size(self.pool_size.get())
            .runtime(Runtime::Tokio1)
            .wait_timeout(Some(self.pool_timeout))
            .build()
            .map_err(|error| Error::new(ErrorKind::Store, "could not make a pool").with_source(error))?;
        let cluster = pool.get().await.map_err(pool_error)?.cluster;
        Ok(RedisInbox {
            shared: Arc::new(Shared {
                pool,
                pool_size: self.pool_size.get(),
                keys,
                cluster,
                retention: self.retention,
                wait_for: self.wait_for,
                find_out_within: self.response_timeout,
                flushed: self.flushed,
            }),
        })
    }
}

impl fmt::Debug for RedisInbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisInbox")
            .field("keys", &self.shared.keys)
            .field("retention", &self.shared.retention)
            .field("pool_size", &self.shared.pool_size)
            .finish_non_exhaustive()
    }
}
