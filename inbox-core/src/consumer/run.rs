//! The consumer's loop: what is fetched when, what runs beside what, and who is answered what.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::future::Future;
use std::num::{NonZeroU32, NonZeroUsize};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use backon::ExponentialBackoff;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use super::broker::{Broker, BrokerLimits, BrokerMessage, GivenUp, Handled};
use super::handle::{Fate, Item, Work};
use super::keep_alive::KeepAlive;
use super::options::{ConsumerOptions, backoff};
use super::summary::Summary;
use super::{Consumer, LaneOf};
use crate::{BoxError, Error, InFlight, Inbox, Result, Transactions};

/// Pauses while the store or the broker is away, from the first to the longest.
const AWAY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// A broker that waits for an answer for less than this is told too late now and then that a message is kept alive.
const SHORT: Duration = Duration::from_secs(1);

/// Pauses while another consumer is at a message.
const IN_FLIGHT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

pub(super) async fn run<B, S, H, E>(consumer: Consumer<B, S, H>, shutdown: impl Future<Output = ()>) -> Result<Summary>
where
    B: Broker,
    S: Transactions,
    H: AsyncFnOnce(&mut S::Tx, &B::Message) -> Result<(), E> + Clone,
    E: Into<BoxError> + 'static,
{
    let Consumer {
        broker,
        inbox,
        handler,
        options,
        lane_of,
    } = consumer;
    let limits = broker.limits();
    examine(&inbox, &options, &limits).await?;
    let last_attempt = limits
        .deliveries
        .map_or(options.attempts, |most| most.min(options.attempts))
        .get();
    let work = Work {
        inbox: &inbox,
        handler: &handler,
        handler_timeout: options.handler_timeout,
        last_attempt,
    };
    let mut desk = Desk::new(options, limits, last_attempt, lane_of);
    let mut source = Source::Idle(broker);
    let mut running = FuturesUnordered::new();
    let mut answers = FuturesUnordered::new();
    let mut shutdown = pin!(shutdown);
    tracing::info!(group = %inbox.group(), ?options, ?limits, "the consumer has started");

    loop {
        if desk.is_ending() {
            // A fetch that is still open would get back what is handed back.
            if source.is_idle() || desk.patience.is_none() {
                let (handed_back, to_the_store) = desk.clear_out();
                answers.extend(handed_back.into_iter().map(give));
                running.extend(to_the_store.into_iter().map(|item| work.handle(vec![item])));
            }
            if desk.is_out_of_patience() {
                // Dropping the futures drops their transactions, which rolls them back.
                running.clear();
                answers.extend(desk.cancel().into_iter().map(give));
            }
            if running.is_empty() && answers.is_empty() && (source.is_idle() || desk.patience.is_none()) {
                break;
            }
        } else {
            while running.len() < options.concurrency.get() {
                let Some(batch) = desk.next_batch() else { break };
                running.push(work.handle(batch));
            }
            if let Some(most) = desk.demand(options.concurrency.get() - running.len()) {
                source = source.fetch(most);
            }
        }
        tokio::select! {
            biased;
            () = &mut shutdown, if !desk.is_ending() => desk.end(Ok(())),
            Some(done) = running.next() => {
                for (item, fate) in done {
                    answers.extend(desk.settle(item, fate).map(give));
                }
            }
            Some(given) = answers.next() => desk.count(given),
            fetched = source.arrival() => desk.take_in(fetched),
            () = sleep_until(desk.wake()) => {}
        }
    }

    if let Source::Idle(mut broker) = source {
        if let Err(error) = broker.flush().await {
            tracing::warn!(%error, "the broker did not confirm the last answers; what they were for comes again");
        }
    }
    tracing::info!(group = %inbox.group(), summary = %desk.summary, "the consumer has ended");
    desk.ending.unwrap_or(Ok(())).map(|()| desk.summary)
}

/// What would only come out later: refuses options that cannot be right for this store and this broker, and a store without
/// a place for dead letters that says it has one; warns of what makes a consumer slow or brittle.
async fn examine<S: Transactions>(inbox: &Inbox<S>, options: &ConsumerOptions, limits: &BrokerLimits) -> Result<()> {
    let store = inbox.store();
    if let Some(most) = store.max_transactions() {
        if options.concurrency > most {
            return Err(Error::invalid(
                "concurrency",
                &options.concurrency.to_string(),
                format_args!(
                    "the store can have {most} transactions open at once; lower the concurrency, or enlarge the store's pool \
                     if it has one"
                ),
            ));
        }
        // One at a time is what SQLite has: there is nothing to enlarge.
        if options.concurrency == most && most > NonZeroUsize::MIN {
            tracing::warn!(
                connections = most,
                "the consumer may use every connection of the store's pool, and leave none for the rest of the \
                 application; enlarge the pool, or lower the concurrency"
            );
        }
    }
    if let Some(most) = limits.deliveries {
        if store.dead_letters().is_none() {
            return Err(Error::invalid(
                "number of deliveries",
                &most.to_string(),
                "after so many the broker gives a message up and drops it, and this store keeps no dead letters, so it would \
                 be lost; have the broker deliver without end, or take a store that keeps dead letters",
            ));
        }
        tracing::warn!(
            deliveries = most,
            attempts = options.attempts,
            "the broker stops delivering a message after so many deliveries, even if they all went to processes that died \
             before they could look at it; have it deliver without end, as the attempts end it, with a dead letter"
        );
    }
    let together = options.concurrency.saturating_mul(options.batch);
    if let Some(most) = limits.unanswered.filter(|most| *most < together) {
        tracing::warn!(
            unanswered = most,
            together,
            "the broker delivers no more than so many messages before they are answered, so that not all transactions can \
             be open, or none can be full; raise that limit, or lower the concurrency or the batch"
        );
    }
    if let Some(within) = limits.answer_within.filter(|within| *within < SHORT) {
        if options.handler_timeout > within {
            tracing::warn!(
                answer_within = ?within,
                handler_timeout = ?options.handler_timeout,
                "the broker delivers again after less time than a handler may take, and less than the network may need to \
                 tell it in time that the handler is at it; have it wait for longer"
            );
        }
    }
    match store.dead_letters() {
        None => tracing::warn!("the store keeps no dead letters: a message that fails every time comes again for ever"),
        Some(letters) => match letters.list_dead_letters(inbox.group(), None, NonZeroU32::MIN).await {
            Err(error) if !error.is_retryable() => return Err(error),
            _ => {}
        },
    }
    Ok(())
}

/// The broker, or what it is about.
enum Source<B: Broker> {
    Idle(B),
    Fetching(Fetch<B>),
}

type Fetch<B> = Pin<Box<dyn Future<Output = (B, Result<Vec<<B as Broker>::Message>>)> + Send>>;

impl<B: Broker> Source<B> {
    const fn is_idle(&self) -> bool {
        matches!(self, Self::Idle(_))
    }

    fn fetch(self, most: NonZeroUsize) -> Self {
        match self {
            Self::Idle(mut broker) => Self::Fetching(Box::pin(async move {
                let fetched = broker.fetch(most).await;
                (broker, fetched)
            })),
            fetching @ Self::Fetching(_) => fetching,
        }
    }

    /// What was fetched, when it is. Cancel-safe.
    async fn arrival(&mut self) -> Result<Vec<B::Message>> {
        let Self::Fetching(fetch) = self else {
            return std::future::pending().await;
        };
        let (broker, fetched) = fetch.await;
        *self = Self::Idle(broker);
        fetched
    }
}

/// Everything that the loop knows of messages, and decides about them.
struct Desk<M> {
    options: ConsumerOptions,
    limits: BrokerLimits,
    last_attempt: u32,
    lane_of: Option<LaneOf<M>>,
    keep_alive: KeepAlive<M>,
    /// Those that wait: for a turn, for another attempt. By the broker's order.
    in_hand: BTreeMap<(u64, u64), Item<M>>,
    /// Those that are being handled.
    running: HashMap<u64, (Arc<M>, Option<Arc<str>>)>,
    /// How many of each lane are being handled.
    busy: HashMap<Arc<str>, usize>,
    taken_in: u64,
    store: Outage,
    broker: Outage,
    /// Why the consumer ends, if it does.
    ending: Option<Result<()>>,
    /// When what runs is cancelled.
    patience: Option<Instant>,
    /// Those that the store was asked about since the end began.
    asked: HashSet<u64>,
    summary: Summary,
}

/// What the broker is to be told.
enum Answer<M> {
    Acknowledge(Arc<M>, Handled, bool),
    Terminate(Arc<M>, GivenUp),
    HandBack(Arc<M>, Duration),
}

/// That it was told.
#[derive(Clone, Copy)]
struct Given {
    what: What,
    confirmed: bool,
}

#[derive(Clone, Copy)]
enum What {
    Handled,
    Duplicate,
    DeadLetter,
    HandedBack,
}

async fn give<M: BrokerMessage>(answer: Answer<M>) -> Given {
    let (message, what, told) = match answer {
        Answer::Acknowledge(message, proof, duplicate) => {
            let told = message.acknowledge(proof).await;
            (message, if duplicate { What::Duplicate } else { What::Handled }, told)
        }
        Answer::Terminate(message, proof) => {
            let told = message.terminate(proof).await;
            (message, What::DeadLetter, told)
        }
        Answer::HandBack(message, pause) => {
            let told = message.hand_back(pause).await;
            (message, What::HandedBack, told)
        }
    };
    if let Err(error) = &told {
        let origin = message.origin();
        tracing::warn!(%error, origin, "the broker did not confirm an answer; the message comes again");
    }
    let confirmed = told.is_ok();
    Given { what, confirmed }
}

/// Something that is away now and then: since when it is not to be asked, and until when.
struct Outage {
    pauses: ExponentialBackoff,
    until: Option<Instant>,
}

impl Outage {
    fn none() -> Self {
        Self {
            pauses: backoff(AWAY.0, AWAY.1),
            until: None,
        }
    }

    fn over(&mut self) {
        if self.until.is_some() {
            *self = Self::none();
        }
    }

    /// Notes another failure, unless a pause because of it has begun already.
    fn on(&mut self, what: &str, error: &Error) {
        let now = Instant::now();
        if self.until.is_some_and(|until| until > now) {
            return;
        }
        let pause = self.pauses.next().unwrap_or(AWAY.1);
        if self.until.is_none() {
            tracing::warn!(
                error = format!("{error:#}"),
                "the {what} is away; everything waits for it"
            );
        } else {
            tracing::debug!(error = format!("{error:#}"), ?pause, "the {what} is still away");
        }
        self.until = Some(now + pause);
    }

    fn is_on(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until > now)
    }
}

impl<M: BrokerMessage> Desk<M> {
    fn new(options: ConsumerOptions, limits: BrokerLimits, last_attempt: u32, lane_of: Option<LaneOf<M>>) -> Self {
        Self {
            options,
            limits,
            last_attempt,
            lane_of,
            keep_alive: KeepAlive::start(limits.answer_within),
            in_hand: BTreeMap::new(),
            running: HashMap::new(),
            busy: HashMap::new(),
            taken_in: 0,
            store: Outage::none(),
            broker: Outage::none(),
            ending: None,
            patience: None,
            asked: HashSet::new(),
            summary: Summary::default(),
        }
    }

    const fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    fn end(&mut self, how: Result<()>) {
        if self.ending.is_none() {
            tracing::info!(
                running = self.running.len(),
                waiting = self.in_hand.len(),
                "the consumer finishes what runs and hands back what waits"
            );
            self.patience = Some(Instant::now() + self.options.shutdown_timeout);
            self.ending = Some(how);
        }
    }

    /// What fits into one transaction and may be tried now: in the broker's order, nothing that would overtake another of
    /// its lane.
    fn next_batch(&mut self) -> Option<Vec<Item<M>>> {
        let now = Instant::now();
        if self.store.is_on(now) {
            return None;
        }
        let mut held: HashSet<&Arc<str>> = HashSet::new();
        let mut chosen = Vec::new();
        for (place, item) in &self.in_hand {
            let lane = item.lane.as_ref();
            if lane.is_some_and(|lane| self.busy.contains_key(lane) || held.contains(lane)) {
                continue;
            }
            let special = item.is_special(self.last_attempt);
            if item.not_before.is_some_and(|at| at > now) || special && !chosen.is_empty() {
                held.extend(lane);
                continue;
            }
            chosen.push(*place);
            if special || chosen.len() == self.options.batch.get() {
                break;
            }
        }
        let mut batch = Vec::with_capacity(chosen.len());
        for place in chosen {
            let Some(mut item) = self.in_hand.remove(&place) else {
                continue;
            };
            item.not_before = None;
            self.start(&item);
            batch.push(item);
        }
        (!batch.is_empty()).then_some(batch)
    }

    fn start(&mut self, item: &Item<M>) {
        self.running
            .insert(item.number, (Arc::clone(&item.message), item.lane.clone()));
        if let Some(lane) = &item.lane {
            *self.busy.entry(Arc::clone(lane)).or_default() += 1;
        }
    }

    fn stop(&mut self, number: u64) {
        let Some((_, Some(lane))) = self.running.remove(&number) else {
            return;
        };
        if let Some(count) = self.busy.get_mut(&lane) {
            *count -= 1;
            if *count == 0 {
                self.busy.remove(&lane);
            }
        }
    }

    /// How many messages to fetch, where so many transactions are free and nothing in hand can start.
    fn demand(&self, free: usize) -> Option<NonZeroUsize> {
        let now = Instant::now();
        if self.store.is_on(now) || self.broker.is_on(now) {
            return None;
        }
        let room = self
            .options
            .most_in_hand
            .get()
            .saturating_sub(self.in_hand.len() + self.running.len());
        NonZeroUsize::new(free.saturating_mul(self.options.batch.get()).min(room))
    }

    /// When something is to be done even if nothing happens.
    fn wake(&self) -> Option<Instant> {
        if self.is_ending() {
            return self.patience;
        }
        let now = Instant::now();
        let items = self.in_hand.values().filter_map(|item| item.not_before);
        // A time that has passed is of an item that waits for a free transaction, or for one before it.
        let next = items.filter(|at| *at > now).min();
        let outages = [self.store.until, self.broker.until]
            .into_iter()
            .flatten()
            .filter(|until| *until > now);
        outages.chain(next).min()
    }

    fn take_in(&mut self, fetched: Result<Vec<M>>) {
        let messages = match fetched {
            Ok(messages) => messages,
            Err(error) if error.is_retryable() => return self.broker.on("broker", &error),
            Err(error) => return self.end(Err(error)),
        };
        self.broker.over();
        for message in messages {
            let lane = self.lane_of.as_ref().map(|lane_of| lane(&**lane_of, &message));
            self.taken_in += 1;
            let mut item = Item::new(message, self.taken_in, lane);
            let sequence = item.message.sequence();
            // Delivered again while it waits here: the broker listens to the newest delivery.
            let older = self
                .in_hand
                .range((sequence, 0)..=(sequence, u64::MAX))
                .next()
                .map(|(place, _)| *place);
            if let Some(older) = older.and_then(|place| self.in_hand.remove(&place)) {
                self.keep_alive.remove(older.number);
                item = older.delivered_again(item);
            }
            self.keep_alive.add(item.number, &item.message);
            self.in_hand.insert((sequence, item.number), item);
        }
    }

    /// What became of a delivery, and what the broker is to be told.
    fn settle(&mut self, mut item: Item<M>, fate: Fate) -> Option<Answer<M>> {
        self.stop(item.number);
        let now = Instant::now();
        if !matches!(fate, Fate::Away(_) | Fate::Held | Fate::Broken(_)) {
            self.store.over();
        }
        let origin = item.message.origin();
        match fate {
            Fate::Handled { proof, duplicate } => {
                tracing::debug!(origin, duplicate, "handled");
                self.let_go(&item);
                return Some(Answer::Acknowledge(item.message, proof, duplicate));
            }
            Fate::GivenUp { proof, error } => {
                let error = format!("{error:#}");
                tracing::error!(
                    origin,
                    attempt = item.attempt(),
                    error,
                    "given up; the message is a dead letter now"
                );
                self.let_go(&item);
                return Some(Answer::Terminate(item.message, proof));
            }
            Fate::Failed(error) => {
                self.summary.failed_attempts += 1;
                let pause = self.options.pause_after(item.attempt());
                let (attempt, error) = (item.attempt(), format!("{error:#}"));
                tracing::warn!(origin, attempt, error, ?pause, "the message failed and is tried again");
                if item.lane.is_none() {
                    self.let_go(&item);
                    return Some(Answer::HandBack(item.message, pause));
                }
                item.failures += 1;
                item.not_before = Some(now + pause);
            }
            Fate::Stuck(error) => {
                self.summary.failed_attempts += 1;
                let pause = self.options.pause_after(u32::MAX);
                let error = format!("{error:#}");
                tracing::error!(
                    origin,
                    error,
                    ?pause,
                    "the message fails again and again, and the store keeps no dead letters"
                );
                if item.lane.is_none() && self.limits.deliveries.is_none() {
                    self.let_go(&item);
                    return Some(Answer::HandBack(item.message, pause));
                }
                item.not_before = Some(now + pause);
            }
            Fate::InFlight(InFlight { retry_after, .. }) => {
                self.summary.in_flight += 1;
                let pause = backoff(IN_FLIGHT.0, IN_FLIGHT.1).nth(item.put_off.min(16) as usize);
                let pause = retry_after.or(pause).unwrap_or(IN_FLIGHT.1);
                tracing::debug!(origin, ?pause, "in flight elsewhere");
                item.put_off += 1;
                item.not_before = Some(now + pause);
            }
            Fate::Away(error) => self.store.on("store", &error),
            Fate::Broken(error) => self.end(Err(error)),
            Fate::Held => {}
        }
        self.in_hand.insert((item.message.sequence(), item.number), item);
        None
    }

    /// A message that is about to be answered.
    fn let_go(&mut self, item: &Item<M>) {
        if !self.keep_alive.remove(item.number) {
            self.summary.late += 1;
            tracing::warn!(
                origin = item.message.origin(),
                "the answer is later than the broker waits, so the message may have been delivered again; is the runtime \
                 kept from its work?"
            );
        }
    }

    fn count(&mut self, given: Given) {
        match given.what {
            What::Handled => self.summary.handled += 1,
            What::Duplicate => self.summary.duplicates += 1,
            What::DeadLetter => self.summary.dead_letters += 1,
            What::HandedBack => {}
        }
        self.summary.unconfirmed += u64::from(!given.confirmed);
    }

    /// At the end: what waits is handed back, at once; or, where the store is to be asked before, is given out for that.
    fn clear_out(&mut self) -> (Vec<Answer<M>>, Vec<Item<M>>) {
        let (mut handed_back, mut to_the_store) = (Vec::new(), Vec::new());
        for (_, mut item) in std::mem::take(&mut self.in_hand) {
            if item.may_go_back(self.limits.deliveries) {
                self.summary.handed_back += 1;
                self.let_go(&item);
                handed_back.push(Answer::HandBack(item.message, Duration::ZERO));
            } else if self.patience.is_some() && self.asked.insert(item.number) {
                self.start(&item);
                to_the_store.push(item);
            } else {
                self.let_go(&item);
                tracing::error!(
                    origin = item.message.origin(),
                    "the message was to be given up and the store could not be told; it stays on the broker"
                );
            }
        }
        (handed_back, to_the_store)
    }

    /// Whether what runs has had its time; says so once.
    fn is_out_of_patience(&mut self) -> bool {
        let over = self.patience.is_some_and(|patience| patience <= Instant::now());
        if over {
            self.patience = None;
        }
        over
    }

    /// What was running and does no more.
    fn cancel(&mut self) -> Vec<Answer<M>> {
        self.busy.clear();
        let cancelled = std::mem::take(&mut self.running);
        let mut answers = Vec::with_capacity(cancelled.len());
        for (number, (message, _)) in cancelled {
            self.keep_alive.remove(number);
            self.summary.cancelled += 1;
            self.summary.handed_back += 1;
            tracing::warn!(
                origin = message.origin(),
                "cancelled, as it ran on after the shutdown; handed back"
            );
            answers.push(Answer::HandBack(message, Duration::ZERO));
        }
        answers
    }
}

/// The key of a message, whatever the caller's function does.
fn lane<M: BrokerMessage>(lane_of: &(dyn Fn(&M) -> String + Send + Sync), message: &M) -> Arc<str> {
    let key = std::panic::catch_unwind(AssertUnwindSafe(|| lane_of(message)));
    key.map_or_else(
        |_| {
            tracing::error!(
                origin = message.origin(),
                "the function for keys panicked; the subject is the key"
            );
            message.subject().into()
        },
        Into::into,
    )
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
