//! [`RedisTx`]: an open transaction: a connection to itself, the keys it watches, the commands it has queued.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use deadpool::managed::Object;
use inbox_core::{Error, ErrorKind, Result};
use redis::{Cmd, FromRedisValue, Pipeline, RedisError, ToRedisArgs, Value as Reply, cmd, from_redis_value};
use uuid::Uuid;

use crate::error::{driver_error, kind_of};
use crate::keys::{self, Claimed, Letter, Value};
use crate::store::{Connected, Connector, Shared};

/// An open transaction of a [`RedisInbox`](crate::RedisInbox), on a connection that nobody else uses.
///
/// Redis has no transaction that is open while its client thinks: it has watched keys, and commands that are queued and
/// then run together if no watched key was touched. So in this transaction a claim watches its record's key, effects are
/// **queued** with [`pipe`](Self::pipe), and nothing at all is written before the commit, which sends everything as one
/// `MULTI ... EXEC`. What a handler wants to know first, it reads with [`query`](Self::query), after
/// [`watch`](Self::watch)ing the keys that its decision hangs on.
///
/// # What Redis does not do
///
/// A queued command that the server **refuses** (unknown, wrong number of arguments, no memory, no permission) voids all
/// of them. A queued command that **fails when it is run** (a list command on a string) does not undo the others: they
/// stay, dead letters among them. The commit then reports it and takes the record back, so that the message comes again; effects which can be run
/// twice, or whose types are sure, keep clear of this.
///
/// # Dropped
///
/// Nothing is written. The connection is closed rather than given back with keys still watched.
pub struct RedisTx {
    link: Option<Link>,
    shared: Arc<Shared>,
    /// Tells the records of this transaction from another consumer's, when the answer of the commit is lost.
    token: Uuid,
    claimed: Vec<Claimed>,
    /// Where in `claimed` a key is: of as many as there are in it. Most transactions claim once and never ask.
    places: HashMap<String, usize>,
    letters: Vec<Letter>,
    pipe: Pipeline,
    slot: Option<u16>,
    /// The server's time, and when it was that: a consumer's clock says what passed since, never what time it is.
    clock: Option<(SystemTime, Instant)>,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was sent yet: a connection that turns out to be dead may be exchanged.
    Pristine,
    /// Keys are watched, or may be.
    Watching,
}

enum Link {
    Pooled(Object<Connector>),
    Own(Box<Connected>),
}

impl Link {
    fn connected(&mut self) -> &mut Connected {
        match self {
            Self::Pooled(object) => object,
            Self::Own(connected) => connected,
        }
    }
}

/// What was heard of a commit.
enum Heard {
    /// Every reply.
    Replies(Vec<Reply>),
    /// Nothing, or not all.
    Lost(RedisError),
}

impl RedisTx {
    pub(crate) fn pooled(object: Object<Connector>, shared: Arc<Shared>) -> Self {
        Self::new(Link::Pooled(object), shared)
    }

    pub(crate) fn own(connected: Connected, shared: Arc<Shared>) -> Self {
        Self::new(Link::Own(Box::new(connected)), shared)
    }

    fn new(link: Link, shared: Arc<Shared>) -> Self {
        Self {
            link: Some(link),
            shared,
            token: Uuid::new_v4(),
            claimed: Vec::new(),
            places: HashMap::new(),
            letters: Vec::new(),
            pipe: Pipeline::new(),
            slot: None,
            clock: None,
            state: State::Pristine,
        }
    }

    /// Where to queue effects: `tx.pipe().incr("invoices", 1)`. They run at the commit, behind the records, in the order
    /// queued. Their replies are looked at for errors and not kept.
    pub fn pipe(&mut self) -> &mut Pipeline {
        &mut self.pipe
    }

    /// Runs a command now and answers its reply: to read. What it writes is not part of the transaction.
    ///
    /// One round trip.
    ///
    /// # Errors
    ///
    /// As the driver has them; [`ErrorKind::InvalidInput`] for a command that would end the transaction.
    pub async fn query<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T> {
        leaves_the_end_to_us(command)?;
        self.ask(command).await
    }

    async fn ask<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T> {
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command.clone());
        let reply = self.send(&pipe, "read").await?.pop().unwrap_or_default();
        from_redis_value(reply).map_err(|error| driver_error("read the reply", error.into()))
    }

    /// Watches further keys: if anybody touches one of them from now on, the commit is [`ErrorKind::Conflict`], and
    /// nothing was written. Read what a decision hangs on after this.
    ///
    /// One round trip.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidInput`] if the server is a cluster's and a key is in another slot than the transaction's.
    pub async fn watch<K: ToRedisArgs>(&mut self, watched: K) -> Result<()> {
        for key in watched.to_redis_args() {
            self.stay_in_slot(&key)?;
        }
        let mut watch = cmd("WATCH");
        watch.arg(watched);
        self.ask(&watch).await
    }

    /// In a cluster, refuses a key of another slot before anything is sent of it.
    pub(crate) fn stay_in_slot(&mut self, key: &[u8]) -> Result<()> {
        let cluster = self.link.as_mut().is_some_and(|link| link.connected().cluster);
        if !cluster {
            return Ok(());
        }
        let slot = keys::slot(key);
        if *self.slot.get_or_insert(slot) == slot {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "the key {} is in another slot of the cluster than the transaction's keys before it, and Redis commits \
                 only within a slot; give the store a tag, and use it in the business keys: \"{{tag}}:...\"",
                String::from_utf8_lossy(key)
            ),
        ))
    }

    /// The claim of `key` in this very transaction, and the time by the server's clock.
    pub(crate) fn own_claim(&mut self, key: &str) -> Option<(&Claimed, SystemTime)> {
        for (place, claimed) in self.claimed.iter().enumerate().skip(self.places.len()) {
            self.places.insert(claimed.key.clone(), place);
        }
        let claimed = &self.claimed[*self.places.get(key)?];
        Some((claimed, self.now()?))
    }

    /// Notes claims of keys that the transaction had not claimed yet.
    pub(crate) fn note(&mut self, claimed: impl IntoIterator<Item = Claimed>) {
        self.claimed.extend(claimed);
    }

    /// Notes what becomes of a dead letter at the commit.
    ///
    /// No round trip where a message was claimed before. Otherwise one, which asks for the time and watches a key that is
    /// nobody else's, by whose record a lost commit is found out about.
    pub(crate) async fn change_letter(&mut self, letter: Letter) -> Result<()> {
        self.stay_in_slot(letter.hash.as_bytes())?;
        self.stay_in_slot(letter.list.as_bytes())?;
        if self.claimed.is_empty() {
            let witness = Claimed::witness(&letter.hash, self.token);
            self.look(std::slice::from_ref(&witness.key)).await?;
            self.note([witness]);
        }
        self.letters.push(letter);
        Ok(())
    }

    /// The server's time now.
    fn now(&self) -> Option<SystemTime> {
        let (time, since) = self.clock?;
        Some(time + since.elapsed())
    }

    /// Watches `keys` and looks at what stands under them: one round trip.
    pub(crate) async fn look(&mut self, keys: &[String]) -> Result<Vec<Option<Vec<u8>>>> {
        let mut pipe = Pipeline::with_capacity(3);
        pipe.add_command(keys::watch(keys)).add_command(keys::look(keys));
        if self.clock.is_none() {
            pipe.add_command(cmd("TIME"));
        }
        let doing = "look for the message's record";
        let mut replies = self.send(&pipe, doing).await?;
        let failed = |error: redis::ParsingError| driver_error(doing, error.into());
        if self.clock.is_none() {
            let (seconds, micros): (u64, u32) = from_redis_value(replies.pop().unwrap_or_default()).map_err(failed)?;
            let time = UNIX_EPOCH + Duration::from_secs(seconds) + Duration::from_micros(micros.into());
            self.clock = Some((time, Instant::now()));
        }
        from_redis_value(replies.pop().unwrap_or_default()).map_err(failed)
    }

    /// Sends commands that read or watch. A connection of the pool's that has died idle is exchanged, as long as nothing
    /// hangs on it.
    async fn send(&mut self, pipe: &Pipeline, doing: &str) -> Result<Vec<Reply>> {
        let mut exchanges = self.shared.pool_size;
        loop {
            let pristine = self.state == State::Pristine;
            // Before anything is sent: a future that is dropped meanwhile leaves the watch.
            self.state = State::Watching;
            let Some(link) = self.link.as_mut() else {
                return Err(gone(doing));
            };
            let answer = link
                .connected()
                .connection
                .send_packed_commands(pipe, 0, pipe.len())
                .await;
            match answer {
                Ok(replies) => {
                    for reply in &replies {
                        if let Reply::ServerError(error) = reply {
                            return Err(driver_error(doing, error.clone().into()));
                        }
                    }
                    return Ok(replies);
                }
                Err(error) => {
                    let died_idle = pristine && error.is_connection_dropped() && matches!(link, Link::Pooled(_));
                    self.close();
                    if !died_idle || exchanges == 0 {
                        return Err(driver_error(doing, error));
                    }
                    exchanges -= 1;
                    self.link = Some(Link::Pooled(self.shared.connection().await?));
                    self.state = State::Pristine;
                }
            }
        }
    }

    /// Closes the connection instead of giving it back.
    fn close(&mut self) {
        if let Some(Link::Pooled(object)) = self.link.take() {
            drop(Object::take(object));
        }
    }

    /// `MULTI`, the records, the dead letters, the effects, `EXEC`: one round trip.
    pub(crate) async fn commit(mut self) -> Result<()> {
        if self.claimed.is_empty() && self.letters.is_empty() && self.pipe.is_empty() {
            return self.roll_back().await;
        }
        for effect in self.pipe.cmd_iter() {
            leaves_the_end_to_us(effect)?;
        }
        let commands = self.commands();
        self.state = State::Watching;
        let Some(link) = self.link.as_mut() else {
            return Err(gone("commit"));
        };
        let sent = link
            .connected()
            .connection
            .send_packed_commands(&commands, 0, commands.len())
            .await;
        let heard = match sent {
            Ok(replies) if replies.len() == commands.len() => Heard::Replies(replies),
            Ok(_) => Heard::Lost((redis::ErrorKind::UnexpectedReturnType, "not all replies of a commit").into()),
            Err(error) => Heard::Lost(error),
        };
        match heard {
            Heard::Replies(replies) => {
                self.judge(&commands, replies).await?;
                self.replicated().await
            }
            Heard::Lost(error) => {
                self.close();
                self.find_out(error).await
            }
        }
    }

    fn commands(&self) -> Pipeline {
        // Not the driver's own atomic mode, which takes a lost watch for success and tells no command's error apart.
        let mut commands = Pipeline::with_capacity(self.claimed.len() + self.letters.len() + self.pipe.len() + 2);
        commands.add_command(cmd("MULTI"));
        // Stamped with the time now, so that age counts from the end of the work.
        let now = self.now().unwrap_or(UNIX_EPOCH);
        let head = Value::head(now, self.token);
        for claimed in &self.claimed {
            let value = Value::write(&head, claimed.fingerprint);
            let lives = claimed.lives.unwrap_or(self.shared.retention);
            commands.add_command(keys::record(&claimed.key, &value, lives));
        }
        for letter in &self.letters {
            commands.add_command(letter.command(now));
        }
        for effect in self.pipe.cmd_iter() {
            commands.add_command(effect.clone());
        }
        commands.add_command(cmd("EXEC"));
        commands
    }

    /// What all the replies of a commit come to. After this, `EXEC` has ended every watch.
    async fn judge(&mut self, commands: &Pipeline, mut replies: Vec<Reply>) -> Result<()> {
        let exec = replies.pop().unwrap_or_default();
        if let Some((command, error)) = first_error(commands.cmd_iter(), &replies) {
            self.close();
            let kind = kind_of(&error);
            let message = format!("Redis refused a command of the transaction, so none was run: {command}: {error}");
            return Err(Error::new(kind, message).with_source(error));
        }
        let results = match exec {
            Reply::Array(results) => results,
            Reply::Nil => {
                self.state = State::Pristine;
                return Err(Error::new(
                    ErrorKind::Conflict,
                    "another consumer touched a key that this transaction watches, so nothing was written; run it again",
                ));
            }
            Reply::ServerError(error) => {
                self.close();
                return Err(driver_error("commit", error.into()));
            }
            other => {
                self.close();
                return Err(unexpected(&other));
            }
        };
        self.state = State::Pristine;
        let (records, effects) = results.split_at(self.claimed.len().min(results.len()));
        if let Some(lost) = records
            .iter()
            .zip(&self.claimed)
            .find(|(reply, _)| !matches!(reply, Reply::Okay))
        {
            return Err(broken_watch(lost.0, &lost.1.key));
        }
        // Letters and effects: what is behind MULTI and the records.
        let behind = commands.cmd_iter().skip(1 + self.claimed.len());
        match first_error(behind, effects) {
            None => Ok(()),
            Some((command, error)) => Err(self.take_back(&command, error).await),
        }
    }

    /// A command failed when it was run. Takes the records back, so that the message comes again.
    async fn take_back(&mut self, command: &str, error: RedisError) -> Error {
        let taken = self.delete_own_records().await;
        let (outcome, kind) = match taken {
            Ok(()) => (
                "the record was taken back, so the message will be handled again",
                ErrorKind::Store,
            ),
            Err(_) => ("the record could not be taken back", ErrorKind::OutcomeUnknown),
        };
        Error::new(
            kind,
            format!(
                "a command of the transaction failed when it was run: {command}: {error}; Redis has run the others and \
                 does not undo them; {outcome}; look to the types of the keys"
            ),
        )
        .with_source(error)
    }

    /// Deletes the records that this transaction has just written, and no other's.
    async fn delete_own_records(&mut self) -> Result<()> {
        let claimed = std::mem::take(&mut self.claimed);
        let keys: Vec<String> = claimed.iter().map(|claimed| claimed.key.clone()).collect();
        if keys.is_empty() {
            return Ok(());
        }
        let standing = self.look(&keys).await?;
        let mut delete = Pipeline::with_capacity(3);
        delete.add_command(cmd("MULTI"));
        for (claimed, value) in claimed.iter().zip(standing) {
            if token_of(value.as_deref()) == Some(self.token) {
                delete.add_command(keys::delete(&claimed.key));
            }
        }
        delete.add_command(cmd("EXEC"));
        let replies = self.send(&delete, "take the records back").await?;
        self.state = State::Pristine;
        match replies.last() {
            // Another consumer's record is in the place by now, so ours is not.
            Some(Reply::Array(_) | Reply::Nil) => Ok(()),
            other => Err(unexpected(&other.cloned().unwrap_or_default())),
        }
    }

    /// Nothing was heard of the commit: finds out whether it happened, and sees to it that it does not happen later.
    ///
    /// On a fresh connection, a fence is put under the first record's key where there is nothing. The commit watches that
    /// key: if it has not been run by then, it never will be. If the fence finds something there, the token tells whose.
    async fn find_out(&mut self, lost: RedisError) -> Result<()> {
        let unknown = |lost: RedisError, why: &str| {
            Error::new(
                ErrorKind::OutcomeUnknown,
                format!(
                    "the commit was sent and its answer lost ({lost}), and {why}; it may have happened: do not \
                     acknowledge, the next delivery finds out"
                ),
            )
            .with_source(lost)
        };
        let Some(first) = self.claimed.first().cloned() else {
            return Err(unknown(lost, "there is no record by which to find out"));
        };
        let deadline = Instant::now() + self.shared.find_out_within;
        let mut pause = Duration::from_millis(20);
        loop {
            match self.shared.fence(&first.key).await {
                Ok(Some(token)) if token == self.token => return Ok(()),
                Ok(_) => {
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        format!(
                            "the connection broke ({lost}) and the commit did not happen; run the transaction again"
                        ),
                    )
                    .with_source(lost));
                }
                Err(error) if error.is_retryable() && Instant::now() < deadline => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
                Err(error) => return Err(unknown(lost, &format!("Redis cannot be asked ({error})"))),
            }
        }
    }

    /// Waits for replicas and the disk, if the store was told to.
    async fn replicated(&mut self) -> Result<()> {
        let Some(wait) = self.shared.wait_for else {
            return Ok(());
        };
        let (command, enough) = wait.command();
        let reply: Result<Reply> = self.ask(&command).await;
        self.state = State::Pristine;
        match reply {
            Ok(reply) if enough(&reply) => Ok(()),
            Ok(reply) => Err(Error::new(
                ErrorKind::OutcomeUnknown,
                format!(
                    "the commit happened, but {wait:?} was not reached in time ({reply:?}), so a failover may undo it; do not \
                     acknowledge: the next delivery finds out"
                ),
            )),
            Err(error) => Err(Error::new(
                ErrorKind::OutcomeUnknown,
                format!("the commit happened, but whether {wait:?} was reached is unknown: {error}"),
            )
            .with_source(error)),
        }
    }

    /// Ends the watches, so that the connection can go back.
    pub(crate) async fn roll_back(mut self) -> Result<()> {
        if self.state == State::Pristine || self.link.is_none() {
            return Ok(());
        }
        let mut unwatch = Pipeline::with_capacity(1);
        unwatch.add_command(cmd("UNWATCH"));
        self.send(&unwatch, "roll back").await?;
        self.state = State::Pristine;
        Ok(())
    }
}

/// The watch did not hold: that is no conflict but a connection which somebody else uses too.
fn broken_watch(reply: &Reply, key: &str) -> Error {
    Error::new(
        ErrorKind::Store,
        format!(
            "the record {key} was not written ({reply:?}) though its key was watched, and the other commands were run: \
             somebody else uses this transaction's connection, whose EXEC ends every watch; give each transaction a \
             connection to itself, never a clone"
        ),
    )
}

/// Refuses commands that would end the transaction, or its watches, before the commit does.
fn leaves_the_end_to_us(command: &Cmd) -> Result<()> {
    let Some(redis::Arg::Simple(name)) = command.args_iter().next() else {
        return Ok(());
    };
    let ends = [
        "MULTI", "EXEC", "DISCARD", "WATCH", "UNWATCH", "RESET", "SELECT", "QUIT",
    ];
    if ends.iter().any(|end| name.eq_ignore_ascii_case(end.as_bytes())) {
        return Err(Error::new(
            ErrorKind::InvalidInput,
            format!(
                "{} inside the inbox's transaction would end it or its watches; leave that to the commit, and watch with \
                 RedisTx::watch",
                String::from_utf8_lossy(name)
            ),
        ));
    }
    Ok(())
}

/// Whose record a value is.
pub(crate) fn token_of(value: Option<&[u8]>) -> Option<Uuid> {
    match Value::read(std::str::from_utf8(value?).ok()?)? {
        Value::Record { token, .. } => Some(token),
        Value::Fence => None,
    }
}

fn gone(doing: &str) -> Error {
    Error::new(
        ErrorKind::TransactionEnded,
        format!("could not {doing}: the transaction's connection broke before; run the transaction again"),
    )
}

fn unexpected(reply: &Reply) -> Error {
    Error::new(
        ErrorKind::Store,
        format!("Redis answered EXEC with {reply:?}, which it never should"),
    )
}

/// The first command that the server answered with an error, for an error's text, and that error.
fn first_error<'c>(commands: impl Iterator<Item = &'c Cmd>, replies: &[Reply]) -> Option<(String, RedisError)> {
    commands.zip(replies).find_map(|(command, reply)| match reply {
        Reply::ServerError(error) => Some((shown(command), error.clone().into())),
        _ => None,
    })
}

/// A command for an error's text, no longer than a line.
fn shown(command: &Cmd) -> String {
    let mut text = String::new();
    for arg in command.args_iter() {
        if let redis::Arg::Simple(bytes) = arg {
            if !text.is_empty() {
                text.push(' ');
            }
            // Of a script, the first line.
            let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
            text.push_str(&String::from_utf8_lossy(line));
        }
        if text.chars().count() > 100 {
            return text.chars().take(100).chain("...".chars()).collect();
        }
    }
    text
}

impl Drop for RedisTx {
    fn drop(&mut self) {
        if self.state == State::Watching {
            self.close();
        }
    }
}

impl fmt::Debug for RedisTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisTx")
            .field("claimed", &self.claimed)
            .field("letters", &self.letters.len())
            .field("queued", &self.pipe.len())
            .finish_non_exhaustive()
    }
}
