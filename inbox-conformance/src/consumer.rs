//! [`Consumer`]: what a law has do the claiming, and the [`Job`]s that it does.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use inbox_core::{
    Claim, ConsumerGroup, Delivery, Error, ErrorKind, InboxStore, Key, MessageId, Processed, Record, Transactions,
    Upkeep,
};

use crate::Fixture;
use crate::failure::{in_full, links};
use crate::stage::{Stage, TxOf, Verdict, group_named};

/// By which of the two methods a message is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// `try_claim`.
    Single,
    /// `try_claim_batch`, as a batch of one.
    Batch,
}

impl Path {
    pub(crate) const BOTH: [Self; 2] = [Self::Single, Self::Batch];
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Single => "try_claim",
            Self::Batch => "try_claim_batch",
        })
    }
}

/// What a consumer does with a message.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) delivery: Delivery,
    path: Path,
    effect: Option<String>,
    level: Option<String>,
    pause: Duration,
}

impl Job {
    pub(crate) fn new(delivery: impl Into<Delivery>) -> Self {
        Self {
            delivery: delivery.into(),
            path: Path::Single,
            effect: None,
            level: None,
            pause: Duration::ZERO,
        }
    }

    /// Claims by this method.
    pub(crate) fn by(mut self, path: Path) -> Self {
        self.path = path;
        self
    }

    /// Writes this effect if the claim is new.
    pub(crate) fn with_effect(mut self, name: impl Into<String>) -> Self {
        self.effect = Some(name.into());
        self
    }

    /// Works at this isolation level.
    pub(crate) fn at(mut self, level: impl Into<String>) -> Self {
        self.level = Some(level.into());
        self
    }

    /// Takes this long between claim and commit, so that others have time to come in between.
    pub(crate) fn taking(mut self, pause: Duration) -> Self {
        self.pause = pause;
        self
    }
}

/// What one try at a message came to.
#[derive(Debug)]
pub(crate) enum Attempt {
    /// `New`, and the commit succeeded.
    Committed,
    /// Done before.
    Duplicate(Processed),
    /// In flight, or an error after which it is to be tried again.
    ComeAgain(String),
}

/// What came of a message in the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Handled {
    /// `New`, and the commit succeeded.
    Committed,
    /// Done before.
    Duplicate(Processed),
}

/// One consumer process: a group and a handle on the store.
pub(crate) struct Consumer<F: Fixture> {
    pub(crate) stage: Stage<F>,
    pub(crate) store: Arc<F::Store>,
    pub(crate) group: ConsumerGroup,
}

impl<F: Fixture> Clone for Consumer<F> {
    fn clone(&self) -> Self {
        Self {
            stage: self.stage.clone(),
            store: Arc::clone(&self.store),
            group: self.group.clone(),
        }
    }
}

impl<F: Fixture> Consumer<F> {
    /// The same handle in the hands of a rival, or for what a law repeats; see [`Stage::aside`].
    pub(crate) fn aside(&self) -> Self {
        Self {
            stage: self.stage.aside(),
            ..self.clone()
        }
    }

    /// The same handle, working for another group.
    pub(crate) fn of_group(&self, group: &str) -> Self {
        Self {
            group: group_named(group),
            ..self.clone()
        }
    }

    pub(crate) fn key(&self, id: MessageId) -> Key {
        Key::new(self.group.clone(), id)
    }

    /// Opens a transaction. To be called where nobody else has one open for long.
    pub(crate) async fn begin(&self) -> Verdict<TxOf<F>> {
        self.stage.step("opened a transaction");
        self.patiently("a transaction opens", || self.store.begin()).await
    }

    /// Does what may be refused for a while, such as right after a transaction was dropped.
    pub(crate) async fn patiently<T, A>(&self, expected: &str, mut act: impl FnMut() -> A) -> Verdict<T>
    where
        A: Future<Output = inbox_core::Result<T>>,
    {
        let mut tries = Tries::new(self.stage.options().patience());
        loop {
            match self.in_time(expected, act()).await? {
                Err(error) if error.is_retryable() && tries.again().await => {}
                result => return self.stage.sound(result, expected),
            }
        }
    }

    /// Claims in an open transaction, where nobody else has the message claimed.
    pub(crate) async fn claim(&self, tx: &mut TxOf<F>, delivery: impl Into<Delivery>, path: Path) -> Verdict<Claim> {
        let delivery = delivery.into();
        self.stage.step(format!("claimed {} by {path}", named(&delivery)));
        self.quiet_claim(tx, delivery, path).await
    }

    /// As [`claim`](Self::claim), where the law has noted the step in its own words.
    pub(crate) async fn quiet_claim(
        &self,
        tx: &mut TxOf<F>,
        delivery: impl Into<Delivery>,
        path: Path,
    ) -> Verdict<Claim> {
        let answer = self.answer(tx, delivery.into(), path).await?;
        self.stage.sound(answer, "an answer")
    }

    /// Claims by either method. The outer result is the verdict on a batch of one that is not answered by one.
    pub(crate) async fn answer(
        &self,
        tx: &mut TxOf<F>,
        delivery: Delivery,
        path: Path,
    ) -> Verdict<inbox_core::Result<Claim>> {
        let answer = async {
            match path {
                Path::Single => self
                    .store
                    .try_claim(tx, &self.group, delivery)
                    .await
                    .map(|claim| vec![claim]),
                Path::Batch => self.store.try_claim_batch(tx, &self.group, &[delivery]).await,
            }
        };
        match self.in_time("an answer to the claim", answer).await? {
            Ok(mut claims) if claims.len() == 1 => Ok(Ok(claims.remove(0))),
            Ok(claims) => Err(self.stage.failure(
                "one answer to a batch of one",
                format!("{} answers: {}", claims.len(), answers(&claims)),
                "answers that are left out, or not put into the order of the batch",
            )),
            Err(error) => Ok(Err(error)),
        }
    }

    /// What a call comes to, which nobody but the store itself can keep from coming.
    async fn in_time<T>(&self, expected: &str, call: impl Future<Output = T>) -> Verdict<T> {
        let patience = self.stage.options().patience();
        tokio::time::timeout(patience, call).await.map_err(|_elapsed| {
            self.stage.failure(
                expected,
                format!("it still waits after {patience:?}"),
                "a wait that nobody ends: the lock of a claim that was undone but not freed, a waiter that was not \
                 woken, a connection that was not given back",
            )
        })
    }

    /// Opens a transaction and claims a message in it; `None` where that is a duplicate. What was dropped before may
    /// take a moment to be undone, so this bears with "come again".
    pub(crate) async fn begin_with(&self, id: MessageId, path: Path) -> Verdict<Option<TxOf<F>>> {
        self.stage
            .step(format!("opened a transaction and claimed message {id} by {path}"));
        let mut tries = Tries::new(self.stage.options().patience());
        loop {
            let mut tx = self.patiently("a transaction opens", || self.store.begin()).await?;
            let last = match self.answer(&mut tx, Delivery::new(id), path).await? {
                Ok(Claim::New) => return Ok(Some(tx)),
                Ok(Claim::Duplicate(_)) => return Ok(None),
                Ok(Claim::InFlight(_)) => "Claim::InFlight".to_owned(),
                Err(error) if error.is_retryable() => in_full(&error),
                Err(error) => return self.stage.sound(Err(error), "an answer"),
            };
            // After an error the transaction may be gone already, so its rollback may fail.
            let _ = self.store.rollback(tx).await;
            if !tries.again().await {
                return Err(self.stage.failure(
                    "Claim::New in the end, for nobody has the message claimed any more",
                    format!("after {} tries, still: {last}", tries.made),
                    "a claim that was undone but whose lock or entry stayed",
                ));
            }
        }
    }

    /// Claims in an open transaction and must get `New`.
    pub(crate) async fn claim_new(&self, tx: &mut TxOf<F>, id: impl Into<Delivery>, path: Path) -> Verdict {
        let claim = self.claim(tx, id, path).await?;
        self.stage.ensure(
            claim.is_new(),
            "Claim::New, for nobody has claimed it",
            Shown(&claim),
            "the claim collides with another message's or another group's, or with something that was undone",
        )
    }

    /// Claims many in an open transaction, where nobody else has them claimed.
    pub(crate) async fn claim_batch(&self, tx: &mut TxOf<F>, deliveries: &[Delivery]) -> Verdict<Vec<Claim>> {
        let answer = self.store.try_claim_batch(tx, &self.group, deliveries).await;
        let claims = self.stage.sound(answer, "answers")?;
        self.stage.ensure(
            claims.len() == deliveries.len(),
            format!("{} answers, one for each", deliveries.len()),
            format!("{} answers", claims.len()),
            "answers for the rows that were written only, or for each id once",
        )?;
        Ok(claims)
    }

    pub(crate) async fn write_effect(&self, tx: &mut TxOf<F>, name: &str) -> Verdict {
        self.stage.step(format!("wrote the effect {name:?} in the transaction"));
        let written = self.stage.fixture().write_effect(&self.store, tx, name).await;
        written.map_err(|error| {
            self.stage.failure(
                "the effect can be written in the transaction",
                in_full(&error),
                "the claim before it spoilt the transaction (an insert whose violation was caught, a lock that timed \
                 out); if it did not, the fixture's write_effect",
            )
        })
    }

    pub(crate) async fn commit(&self, tx: TxOf<F>) -> Verdict {
        self.stage.step("committed");
        self.stage.sound(
            self.store.commit(tx).await,
            "the commit succeeds, for nobody is in its way",
        )
    }

    pub(crate) async fn rollback(&self, tx: TxOf<F>) -> Verdict {
        self.stage.step("rolled back");
        self.stage.sound(self.store.rollback(tx).await, "the rollback succeeds")
    }

    /// Whether it is worth running the whole transaction again after an effect failed. That error is the driver's, so
    /// the store is shown it, as `Inbox::process` shows it a handler's.
    pub(crate) fn effect_is_retryable(&self, error: &Error) -> bool {
        let known = |link| self.store.classify(link).is_some_and(ErrorKind::is_retryable);
        error.is_retryable() || links(error).any(known)
    }

    /// One try at a message, from begin to commit, whoever else is at it.
    pub(crate) async fn attempt(&self, job: &Job) -> Verdict<Attempt> {
        let begun = match &job.level {
            Some(level) => self.stage.fixture().begin_at(&self.store, level).await,
            None => self.store.begin().await,
        };
        let mut tx = match begun {
            Ok(tx) => tx,
            Err(error) => return self.come_again(&error, "to open a transaction"),
        };
        let claim = match self.answer(&mut tx, job.delivery, job.path).await? {
            Ok(claim) => claim,
            Err(error) => {
                let verdict = self.come_again(&error, "to claim");
                // The transaction may be gone already, so its rollback may fail.
                let _ = self.store.rollback(tx).await;
                return verdict;
            }
        };
        match claim {
            Claim::New => {}
            Claim::Duplicate(processed) => {
                self.end_unused(tx).await?;
                return Ok(Attempt::Duplicate(processed));
            }
            Claim::InFlight(_) => {
                self.end_unused(tx).await?;
                return Ok(Attempt::ComeAgain("Claim::InFlight".into()));
            }
        }
        if let Some(effect) = &job.effect {
            if let Err(error) = self.stage.fixture().write_effect(&self.store, &mut tx, effect).await {
                let verdict = if self.effect_is_retryable(&error) {
                    Ok(Attempt::ComeAgain(in_full(&error)))
                } else {
                    self.come_again(&error, "to write an effect after Claim::New")
                };
                let _ = self.store.rollback(tx).await;
                return verdict;
            }
        }
        if !job.pause.is_zero() {
            tokio::time::sleep(job.pause).await;
        }
        match self.store.commit(tx).await {
            Ok(()) => Ok(Attempt::Committed),
            Err(error) => self.come_again(&error, "to commit after Claim::New"),
        }
    }

    /// Rolls back a transaction in which there was nothing to do.
    async fn end_unused(&self, tx: TxOf<F>) -> Verdict {
        self.stage.sound(
            self.store.rollback(tx).await,
            "a transaction can be rolled back after an answer that is no error",
        )
    }

    fn come_again(&self, error: &Error, doing: &str) -> Verdict<Attempt> {
        if error.is_retryable() {
            return Ok(Attempt::ComeAgain(in_full(error)));
        }
        Err(self.stage.failure(
            format!("a consumer that tries {doing} gets an answer, or an error that is retryable"),
            in_full(error),
            "a lost race that is reported as a fault: a unique violation, a deadlock or a serialization failure whose \
             code is not mapped to a retryable kind",
        ))
    }

    /// Tries a message as a consumer's loop does, until it is done by this consumer or was done before.
    pub(crate) async fn handle(&self, job: &Job) -> Verdict<Handled> {
        let mut tries = Tries::new(self.stage.options().patience());
        loop {
            let last = match self.attempt(job).await? {
                Attempt::Committed => return Ok(Handled::Committed),
                Attempt::Duplicate(processed) => return Ok(Handled::Duplicate(processed)),
                Attempt::ComeAgain(last) => last,
            };
            if !tries.again().await {
                return Err(self.stage.failure(
                    format!(
                        "a consumer of {} gets New or Duplicate in the end",
                        named(&job.delivery)
                    ),
                    format!(
                        "after {} tries in {:?}, still: {last}",
                        tries.made,
                        tries.since.elapsed()
                    ),
                    "a claim that was undone but whose lock or entry stayed; or consumers that keep each other from \
                     ever committing",
                ));
            }
        }
    }

    /// Handles a message that must be new.
    pub(crate) async fn expect_new(&self, job: &Job, suspect: &str) -> Verdict {
        self.stage.step(format!(
            "handled {} in a new transaction, as a consumer does",
            named(&job.delivery)
        ));
        match self.handle(job).await? {
            Handled::Committed => Ok(()),
            Handled::Duplicate(processed) => Err(self.stage.failure(
                "Claim::New, then a commit",
                Shown(&Claim::Duplicate(processed)),
                suspect,
            )),
        }
    }

    /// Handles a message that must have been done before.
    pub(crate) async fn expect_duplicate(&self, job: &Job, suspect: &str) -> Verdict<Processed> {
        self.stage
            .step(format!("claimed {} in a new transaction", named(&job.delivery)));
        match self.handle(job).await? {
            Handled::Duplicate(processed) => Ok(processed),
            Handled::Committed => Err(self.stage.failure("Claim::Duplicate", "Claim::New", suspect)),
        }
    }

    /// The committed record of a message.
    pub(crate) async fn find(&self, id: MessageId) -> Verdict<Option<Record>> {
        let key = self.key(id);
        self.patiently("find answers", || self.store.find(&key)).await
    }
}

/// Tries at something that may take several.
pub(crate) struct Tries {
    since: Instant,
    patience: Duration,
    pause: Duration,
    made: u32,
}

impl Tries {
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            since: Instant::now(),
            patience,
            pause: Duration::from_millis(1),
            made: 1,
        }
    }

    /// Pauses before the next try; `false` if there was time enough.
    pub(crate) async fn again(&mut self) -> bool {
        if self.since.elapsed() >= self.patience {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (2 * self.pause).min(Duration::from_millis(20));
        self.made += 1;
        true
    }
}

/// A delivery, in a step of the diary.
pub(crate) fn named(delivery: &Delivery) -> String {
    match delivery.fingerprint() {
        None => format!("message {}", delivery.id()),
        Some(fingerprint) => format!("message {} with the fingerprint {fingerprint}", delivery.id()),
    }
}

/// A claim, as a failure shows it.
pub(crate) struct Shown<'a>(pub(crate) &'a Claim);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Claim::New => f.write_str("Claim::New"),
            Claim::InFlight(_) => f.write_str("Claim::InFlight"),
            Claim::Duplicate(processed) => {
                f.write_str("Claim::Duplicate")?;
                match processed.at {
                    None => f.write_str(", without a time")?,
                    Some(at) => match at.elapsed() {
                        Ok(age) => write!(f, ", processed {age:?} ago by the suite's clock")?,
                        Err(ahead) => write!(f, ", processed {:?} ahead of the suite's clock", ahead.duration())?,
                    },
                }
                match processed.fingerprint {
                    None => Ok(()),
                    Some(fingerprint) => write!(f, ", with the fingerprint {fingerprint}"),
                }
            }
        }
    }
}

/// The answers to a batch, as a failure shows them.
pub(crate) fn answers(claims: &[Claim]) -> String {
    if claims.is_empty() {
        return "no answer at all".into();
    }
    let short = claims.iter().map(|claim| match claim {
        Claim::New => "New",
        Claim::Duplicate(_) => "Duplicate",
        Claim::InFlight(_) => "InFlight",
    });
    short.collect::<Vec<_>>().join(", ")
}

/// What was found of a record, as a failure shows it.
pub(crate) fn found(record: Option<&Record>) -> String {
    match record {
        None => "None".into(),
        Some(record) => {
            let time = record.processed_at.map_or_else(|| "without a time".into(), moment);
            let fingerprint = match record.fingerprint {
                None => "without a fingerprint".into(),
                Some(fingerprint) => format!("with the fingerprint {fingerprint}"),
            };
            format!("a record of {}, {time}, {fingerprint}", record.key)
        }
    }
}

/// A time that two answers may differ in by little.
pub(crate) fn moment(time: SystemTime) -> String {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => format!(
            "processed at {}.{:06} s since 1970",
            since.as_secs(),
            since.subsec_micros()
        ),
        Err(before) => format!("processed {:?} before 1970", before.duration()),
    }
}
