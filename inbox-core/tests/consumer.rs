//! The broker-independent half of a consumer, on the broker and the store in memory, mostly in virtual time.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::HashMap;
use std::error::Error as StdError;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use inbox_core::{
    Broker, BrokerLimits, Claim, ConsumerGroup, ConsumerOptions, DeadLetterState, DeadLetters, Delivery, Error,
    ErrorKind, Headers, Inbox, InboxStore, Key, MemoryBroker, MemoryInbox, MemoryMessage, MemoryTx, MessageId, Outcome,
    Result, Summary, Told, Transactions, WaitPolicy, async_trait,
};
use tokio::sync::Notify;
use tokio::time::Instant;

type Work = Vec<String>;
type Consumer<S, H> = inbox_core::Consumer<MemoryBroker, S, H>;

fn size(n: usize) -> NonZeroUsize {
    NonZeroUsize::new(n).unwrap()
}

fn times(n: u32) -> NonZeroU32 {
    NonZeroU32::new(n).unwrap()
}

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn inbox() -> Inbox<MemoryInbox<Work>> {
    Inbox::new(MemoryInbox::with_state(Work::new()), "billing").unwrap()
}

fn done(inbox: &Inbox<MemoryInbox<Work>>) -> Work {
    inbox.store().state(Clone::clone)
}

fn id(text: &str) -> MessageId {
    MessageId::new(text).unwrap()
}

/// Writes the message's payload into the state.
fn write(tx: &mut MemoryTx<Work>, message: &MemoryMessage) {
    let text = String::from_utf8(message.payload.clone()).unwrap();
    tx.apply(move |done| done.push(text));
}

fn pauses(broker: &MemoryBroker, sequence: u64) -> Vec<Duration> {
    let told = broker.log().into_iter().filter(|(of, _)| *of == sequence);
    told.filter_map(|(_, told)| match told {
        Told::HandedBack(pause) => Some(pause),
        _ => None,
    })
    .collect()
}

fn count(broker: &MemoryBroker, what: Told) -> usize {
    broker.log().iter().filter(|(_, told)| *told == what).count()
}

#[tokio::test(start_paused = true)]
async fn one_poison_message_in_a_batch_of_100_holds_up_nobody_and_ends_as_one_dead_letter() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    for n in 1..=100 {
        broker.publish("orders", &format!("order-{n}"), format!("{n}"));
    }
    let calls = Arc::new(Mutex::new(HashMap::<u64, u32>::new()));
    let bad = Arc::new(AtomicBool::new(true));
    let consumer = |broker: &MemoryBroker| {
        let (calls, bad) = (Arc::clone(&calls), Arc::clone(&bad));
        Consumer::new(broker.clone(), inbox.clone(), async move |tx, message| {
            *calls.lock().unwrap().entry(message.sequence).or_default() += 1;
            if message.sequence == 37 && bad.load(Ordering::Relaxed) {
                return Err("cannot be handled");
            }
            write(tx, message);
            Ok(())
        })
        .with(
            ConsumerOptions::new()
                .batch(size(100))
                .attempts(times(5))
                .pauses(secs(1), secs(60)),
        )
    };
    let summary = consumer(&broker).run(broker.drained()).await.unwrap();
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.failed_attempts),
        (99, 1, 4),
        "{summary}"
    );
    assert_eq!(done(&inbox).len(), 99);
    assert!(!done(&inbox).contains(&"37".to_owned()));
    // The neighbours ran in the first transaction and in the second, which was without the bad one.
    let most = calls
        .lock()
        .unwrap()
        .iter()
        .filter(|(n, _)| **n != 37)
        .map(|(_, calls)| *calls)
        .max();
    assert!(most <= Some(2), "{most:?}");
    let pauses = pauses(&broker, 37);
    assert_eq!(pauses.len(), 4);
    for (pause, least) in pauses.iter().zip([1, 2, 4, 8]) {
        assert!(*pause >= secs(least) && *pause <= secs(3 * least), "{pauses:?}");
    }
    assert_eq!(
        (count(&broker, Told::Terminated), count(&broker, Told::Acknowledged)),
        (1, 99)
    );

    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    let [info] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!(
        (info.state, info.attempts, info.subject.as_str()),
        (DeadLetterState::Dead, 5, "orders")
    );
    assert!(info.error.contains("cannot be handled"), "{}", info.error);
    assert!(info.published_at.is_some());
    let letter = inbox.dead_letter(id("order-37")).await.unwrap().unwrap();
    assert_eq!(
        (letter.headers.get("Message-Id"), &letter.payload[..]),
        (Some("order-37"), &b"37"[..])
    );

    bad.store(false, Ordering::Relaxed);
    let publish = async |letter: &inbox_core::DeadLetter| {
        broker.publish_with_headers(&letter.info.subject, letter.headers.clone(), letter.payload.clone());
        // As if the program died before it could say so: the letter stays, and it is put back once more.
        Err("killed")
    };
    inbox.put_back(id("order-37"), publish).await.unwrap_err();
    consumer(&broker).run(broker.drained()).await.unwrap();
    let again = inbox.dead_letter(id("order-37")).await.unwrap().unwrap();
    assert_eq!(again.info.state, DeadLetterState::PuttingBack);
    let publish = async |letter: &inbox_core::DeadLetter| {
        broker.publish_with_headers(&letter.info.subject, letter.headers.clone(), letter.payload.clone());
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("order-37"), publish).await.unwrap());
    let summary = consumer(&broker).run(broker.drained()).await.unwrap();
    assert_eq!((summary.handled, summary.duplicates), (0, 1));
    assert_eq!(done(&inbox).iter().filter(|text| *text == "37").count(), 1);
    assert!(inbox.dead_letters(None, times(10)).await.unwrap().is_empty());
    assert!(!inbox.put_back(id("order-37"), publish).await.unwrap());
}

#[tokio::test(start_paused = true)]
async fn a_handler_of_three_times_the_brokers_patience_is_not_delivered_again_meanwhile() {
    let broker = MemoryBroker::with_limits(BrokerLimits::none().answer_within(secs(1)));
    let inbox = inbox();
    broker.publish("orders", "a", "a");
    let slow = async |tx: &mut MemoryTx<Work>, message: &MemoryMessage| {
        tokio::time::sleep(secs(3)).await;
        write(tx, message);
        Ok::<_, Error>(())
    };
    let one = tokio::spawn(Consumer::new(broker.clone(), inbox.clone(), slow).run(drained(&broker)));
    let two = tokio::spawn(Consumer::new(broker.clone(), inbox.clone(), slow).run(drained(&broker)));
    let (one, two) = (one.await.unwrap().unwrap(), two.await.unwrap().unwrap());
    assert_eq!(
        (one.handled + two.handled, broker.deliveries(1), done(&inbox)),
        (1, 1, vec!["a".to_owned()])
    );
    assert!(count(&broker, Told::KeptAlive) >= 3);
    assert_eq!(one.late + two.late, 0);
}

/// Waits for the broker to be drained, and owns it.
fn drained(broker: &MemoryBroker) -> impl Future<Output = ()> + Send + 'static {
    let broker = broker.clone();
    async move { broker.drained().await }
}

#[tokio::test(start_paused = true)]
async fn messages_that_wait_for_their_turn_are_not_delivered_again_before_it() {
    let broker = MemoryBroker::with_limits(BrokerLimits::none().answer_within(secs(1)));
    let inbox = inbox();
    for n in 1..=6 {
        broker.publish("orders", &format!("order-{n}"), format!("{n}"));
    }
    let slow = async |tx: &mut MemoryTx<Work>, message: &MemoryMessage| {
        tokio::time::sleep(Duration::from_millis(600)).await;
        write(tx, message);
        Ok::<_, Error>(())
    };
    // A batch of three waits for most of two seconds.
    let options = ConsumerOptions::new().batch(size(3));
    let one = tokio::spawn(
        Consumer::new(broker.clone(), inbox.clone(), slow)
            .with(options)
            .run(drained(&broker)),
    );
    let two = tokio::spawn(
        Consumer::new(broker.clone(), inbox.clone(), slow)
            .with(options)
            .run(drained(&broker)),
    );
    assert_eq!(
        one.await.unwrap().unwrap().handled + two.await.unwrap().unwrap().handled,
        6
    );
    assert_eq!((1..=6).map(|n| broker.deliveries(n)).sum::<u32>(), 6);
    assert_eq!(done(&inbox).len(), 6);
}

/// A store that can be told to fail.
#[derive(Clone)]
struct Troubled {
    store: MemoryInbox<Work>,
    trouble: Arc<Mutex<Option<ErrorKind>>>,
    dead_letters: bool,
    most: Option<NonZeroUsize>,
    begun: Arc<AtomicUsize>,
    /// The commit of the transaction that is open fails.
    bad_commit: Arc<AtomicBool>,
}

impl Troubled {
    fn inbox(trouble: Option<ErrorKind>) -> Inbox<Self> {
        let store = Self {
            store: MemoryInbox::with_state(Work::new()).with_wait(WaitPolicy::DontWait),
            trouble: Arc::new(Mutex::new(trouble)),
            dead_letters: true,
            most: None,
            begun: Arc::default(),
            bad_commit: Arc::default(),
        };
        Inbox::new(store, "billing").unwrap()
    }

    fn set(&self, trouble: Option<ErrorKind>) {
        *self.trouble.lock().unwrap() = trouble;
    }

    fn ok(&self) -> Result<()> {
        match *self.trouble.lock().unwrap() {
            None => Ok(()),
            Some(kind) => Err(Error::new(kind, "the store is in trouble, as the test wants")),
        }
    }
}

#[async_trait]
impl InboxStore for Troubled {
    type Tx = MemoryTx<Work>;

    async fn try_claim(&self, tx: &mut Self::Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        self.ok()?;
        self.store.try_claim(tx, group, delivery).await
    }

    async fn try_claim_batch(&self, tx: &mut Self::Tx, group: &ConsumerGroup, all: &[Delivery]) -> Result<Vec<Claim>> {
        self.ok()?;
        self.store.try_claim_batch(tx, group, all).await
    }
}

#[async_trait]
impl Transactions for Troubled {
    async fn begin(&self) -> Result<Self::Tx> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.bad_commit.store(false, Ordering::Relaxed);
        self.ok()?;
        self.store.begin().await
    }

    async fn commit(&self, tx: Self::Tx) -> Result<()> {
        self.ok()?;
        if self.bad_commit.load(Ordering::Relaxed) {
            return Err(Error::new(ErrorKind::Store, "a deferred constraint, as the test wants"));
        }
        self.store.commit(tx).await
    }

    async fn rollback(&self, tx: Self::Tx) -> Result<()> {
        self.store.rollback(tx).await
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        self.store.classify(error)
    }

    fn max_transactions(&self) -> Option<NonZeroUsize> {
        self.most
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = Self::Tx>> {
        self.dead_letters.then_some(&self.store)
    }
}

fn troubled_done(inbox: &Inbox<Troubled>) -> Work {
    inbox.store().store.state(Clone::clone)
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_for_seconds_uses_up_no_delivery_and_is_not_asked_in_a_hot_loop() {
    let limits = BrokerLimits::none().answer_within(secs(1)).deliveries(times(5));
    let (broker, inbox) = (
        MemoryBroker::with_limits(limits),
        Troubled::inbox(Some(ErrorKind::Unavailable)),
    );
    for n in 1..=20 {
        broker.publish("orders", &format!("order-{n}"), format!("{n}"));
    }
    let store = inbox.store().clone();
    tokio::spawn(async move {
        tokio::time::sleep(secs(30)).await;
        store.set(None);
    });
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    let summary = consumer
        .with(ConsumerOptions::new().concurrency(size(4)))
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.failed_attempts),
        (20, 0, 0),
        "{summary}"
    );
    assert_eq!(troubled_done(&inbox).len(), 20);
    assert!((1..=20).all(|n| broker.deliveries(n) == 1));
    let begun = inbox.store().begun.load(Ordering::Relaxed);
    assert!(begun < 20 + 4 * 40, "{begun} transactions were begun");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_cannot_be_used_ends_the_consumer_and_says_so() {
    for kind in [ErrorKind::Schema, ErrorKind::Denied] {
        let (broker, inbox) = (MemoryBroker::new(), Troubled::inbox(Some(kind)));
        broker.publish("orders", "a", "a");
        let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, _message| Ok::<_, Error>(()));
        let error = consumer.run(std::future::pending()).await.unwrap_err();
        assert_eq!(error.kind(), kind);
        assert_eq!(pauses(&broker, 1), [Duration::ZERO], "it is handed back at once");
    }
}

#[tokio::test(start_paused = true)]
async fn panics_and_timeouts_are_failures_of_their_message_and_the_consumer_goes_on() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    for name in ["panics", "hangs", "fine"] {
        broker.publish("orders", name, name);
    }
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        match &message.payload[..] {
            b"panics" => panic!("as the test wants, {}", message.attempt),
            b"hangs" => std::future::pending().await,
            _ => Ok::<_, Error>(()),
        }
    })
    .with(
        ConsumerOptions::new()
            .batch(size(3))
            .attempts(times(3))
            .handler_timeout(secs(2)),
    );
    let summary = consumer.run(broker.drained()).await.unwrap();
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.failed_attempts),
        (1, 2, 4),
        "{summary}"
    );
    assert_eq!(done(&inbox), ["fine"]);
    let panics = inbox.dead_letter(id("panics")).await.unwrap().unwrap();
    assert!(
        panics.info.error.contains("panicked: as the test wants, 3"),
        "{}",
        panics.info.error
    );
    let hangs = inbox.dead_letter(id("hangs")).await.unwrap().unwrap();
    assert!(hangs.info.error.contains("longer than 2s"), "{}", hangs.info.error);
}

#[tokio::test(start_paused = true)]
async fn order_is_kept_by_key_at_concurrency_16_though_handlers_fail_at_random() {
    const MESSAGES: u32 = 10_000;
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    for n in 0..MESSAGES {
        broker.publish(&format!("key.{}", n % 50), &format!("m-{n}"), format!("{n}"));
    }
    let seed = Arc::new(AtomicU32::new(0));
    let side_by_side = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
    let (seed_of, running) = (Arc::clone(&seed), Arc::clone(&side_by_side));
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |tx, message| {
        let (now, most) = &*running;
        most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
        let random = seed_of
            .fetch_add(0x9e37_79b9, Ordering::Relaxed)
            .wrapping_mul(0x85eb_ca6b)
            >> 16;
        tokio::time::sleep(Duration::from_millis(u64::from(random % 7))).await;
        now.fetch_sub(1, Ordering::Relaxed);
        if random % 10 == 0 {
            return Err("at random");
        }
        write(tx, message);
        Ok(())
    });
    let summary = consumer
        .with(
            ConsumerOptions::new()
                .concurrency(size(16))
                .attempts(times(100))
                .pauses(Duration::from_millis(20), Duration::from_millis(200)),
        )
        .in_order_of(|message| message.subject.clone())
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled, u64::from(MESSAGES), "{summary}");
    assert!(summary.failed_attempts > 500, "{summary}");
    let mut last = HashMap::new();
    for text in done(&inbox) {
        let n: u32 = text.parse().unwrap();
        let before = last.insert(n % 50, n);
        assert!(before < Some(n), "{n} came after {before:?}");
    }
    assert!(
        side_by_side.1.load(Ordering::Relaxed) >= 12,
        "keys are handled side by side"
    );
}

#[tokio::test(start_paused = true)]
async fn in_a_batch_too_a_failing_message_holds_back_its_key_and_no_other() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    for (n, key) in ["a", "b", "a", "b", "a"].into_iter().enumerate() {
        broker.publish(key, &format!("m-{n}"), format!("{key}{n}"));
    }
    let failures = Arc::new(AtomicUsize::new(0));
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |tx, message| {
        if message.payload == b"a0" && failures.fetch_add(1, Ordering::Relaxed) < 2 {
            return Err("not yet");
        }
        write(tx, message);
        Ok(())
    });
    let summary = consumer
        .with(ConsumerOptions::new().batch(size(10)))
        .in_order_of(|message| message.subject.clone())
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.failed_attempts), (5, 2), "{summary}");
    assert_eq!(done(&inbox), ["b1", "b3", "a0", "a2", "a4"]);
    assert!(
        (1..=5).all(|n| broker.deliveries(n) == 1),
        "what waits for another attempt is kept"
    );
}

#[tokio::test(start_paused = true)]
async fn a_function_for_keys_that_panics_costs_no_message() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish("orders", "a", "a");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    consumer
        .in_order_of(|_| panic!("as the test wants"))
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!(done(&inbox), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_elsewhere_is_neither_acknowledged_nor_counted_as_a_failure() {
    let limits = BrokerLimits::none().answer_within(secs(1)).deliveries(times(2));
    let (broker, inbox) = (MemoryBroker::with_limits(limits), Troubled::inbox(None));
    broker.publish("orders", "a", "a");
    let mut elsewhere = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut elsewhere, id("a")).await.unwrap().is_new());
    let log = broker.clone();
    tokio::spawn(async move {
        tokio::time::sleep(secs(20)).await;
        assert_eq!(count(&log, Told::Acknowledged), 0);
        drop(elsewhere);
    });
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    let summary = consumer.run(broker.drained()).await.unwrap();
    assert_eq!(
        (summary.handled, summary.failed_attempts, broker.deliveries(1)),
        (1, 0, 1),
        "{summary}"
    );
    assert!(summary.in_flight >= 10 && summary.in_flight < 60, "{summary}");
    assert_eq!(troubled_done(&inbox), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_finishes_what_runs_and_hands_the_rest_back_at_once() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    for n in 1..=10 {
        broker.publish(
            if n == 1 { "slow" } else { "held" },
            &format!("order-{n}"),
            format!("{n}"),
        );
    }
    let (started, stop) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler_started = Arc::clone(&started);
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |tx, message| {
        handler_started.notify_one();
        tokio::time::sleep(secs(5)).await;
        write(tx, message);
        Ok::<_, Error>(())
    });
    // All of one key, so that nine wait.
    let consumer = consumer
        .with(ConsumerOptions::new().concurrency(size(10)))
        .in_order_of(|_| "one".into());
    let shutdown = Arc::clone(&stop);
    let running = tokio::spawn(consumer.run(async move { shutdown.notified().await }));
    started.notified().await;
    let at = Instant::now();
    stop.notify_one();
    let other = {
        let mut broker = broker.clone();
        tokio::spawn(async move { (broker.fetch(size(10)).await.unwrap().len(), at.elapsed()) })
    };
    let summary = running.await.unwrap().unwrap();
    assert_eq!(
        (summary.handled, summary.handed_back, summary.cancelled),
        (1, 9, 0),
        "{summary}"
    );
    let (others, after) = other.await.unwrap();
    assert!(
        others == 9 && after < secs(1),
        "another consumer has {others} of them after {after:?}"
    );
    assert_eq!(done(&inbox), ["1"]);
}

#[tokio::test(start_paused = true)]
async fn what_runs_on_after_a_shutdown_is_cancelled_and_handed_back() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish("orders", "a", "a");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        std::future::pending::<Result<()>>().await
    });
    let consumer = consumer.with(
        ConsumerOptions::new()
            .handler_timeout(secs(3_600))
            .shutdown_timeout(secs(5)),
    );
    let summary = consumer.run(tokio::time::sleep(secs(1))).await.unwrap();
    assert_eq!(
        (summary.handled, summary.handed_back, summary.cancelled),
        (0, 1, 1),
        "{summary}"
    );
    assert_eq!((done(&inbox).len(), pauses(&broker, 1)), (0, vec![Duration::ZERO]));
    assert!(matches!(
        inbox.process(id("a"), async |_| Ok::<_, Error>(())).await.unwrap(),
        Outcome::Processed(())
    ));
}

#[tokio::test(start_paused = true)]
async fn a_last_attempt_that_ends_with_its_process_leaves_a_dead_letter() {
    let limits = BrokerLimits::none().answer_within(secs(1)).deliveries(times(3));
    let (broker, inbox) = (MemoryBroker::with_limits(limits), inbox());
    broker.publish("orders", "deadly", "deadly");
    for attempt in 1..=3 {
        let started = Arc::new(Notify::new());
        let handler_started = Arc::clone(&started);
        let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |_tx, _message| {
            handler_started.notify_one();
            std::future::pending::<Result<()>>().await
        });
        tokio::select! {
            ended = consumer.run(std::future::pending()) => panic!("{ended:?}"),
            () = started.notified() => {} // and the process dies
        }
        assert_eq!(broker.deliveries(1), attempt);
        assert_eq!(inbox.dead_letter(id("deadly")).await.unwrap().is_some(), attempt == 3);
        tokio::time::sleep(secs(2)).await;
    }
    let letter = inbox.dead_letter(id("deadly")).await.unwrap().unwrap();
    assert_eq!((letter.info.state, letter.info.attempts), (DeadLetterState::OnTrial, 3));
    // The broker delivers it no more; put back, it is handled once.
    let put_back = async |letter: &inbox_core::DeadLetter| {
        broker.publish_with_headers("orders", letter.headers.clone(), letter.payload.clone());
        Ok::<_, Error>(())
    };
    assert!(inbox.put_back(id("deadly"), put_back).await.unwrap());
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    let handled = async {
        while done(&inbox).is_empty() {
            tokio::time::sleep(secs(1)).await;
        }
    };
    consumer.run(handled).await.unwrap();
    assert_eq!(done(&inbox), ["deadly"]);
}

#[tokio::test(start_paused = true)]
async fn where_the_broker_delivers_for_ever_a_deadly_message_is_given_up_at_the_next_delivery() {
    let broker = MemoryBroker::with_limits(BrokerLimits::none().answer_within(secs(1)));
    let inbox = inbox();
    broker.publish("orders", "deadly", "deadly");
    let options = ConsumerOptions::new().attempts(times(2));
    for _ in 0..2 {
        let started = Arc::new(Notify::new());
        let handler_started = Arc::clone(&started);
        let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |_tx, _message| {
            handler_started.notify_one();
            std::future::pending::<Result<()>>().await
        });
        tokio::select! {
            ended = consumer.with(options).run(std::future::pending()) => panic!("{ended:?}"),
            () = started.notified() => {}
        }
        tokio::time::sleep(secs(2)).await;
    }
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, _message| -> Result<()> {
        panic!("it is not tried again")
    });
    let summary = consumer.with(options).run(broker.drained()).await.unwrap();
    assert_eq!((summary.dead_letters, broker.deliveries(1)), (1, 3), "{summary}");
    let letter = inbox.dead_letter(id("deadly")).await.unwrap().unwrap();
    assert_eq!(letter.info.state, DeadLetterState::Dead);
    assert!(letter.info.error.contains("never ended"), "{}", letter.info.error);
}

#[tokio::test(start_paused = true)]
async fn a_message_whose_last_attempt_succeeds_leaves_no_dead_letter() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish("orders", "a", "a");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        if message.attempt < 3 {
            return Err("not yet");
        }
        write(tx, message);
        Ok(())
    });
    let summary = consumer
        .with(ConsumerOptions::new().attempts(times(3)))
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.failed_attempts), (1, 2), "{summary}");
    assert!(inbox.dead_letters(None, times(10)).await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn at_a_shutdown_a_message_that_the_broker_will_not_deliver_again_becomes_a_dead_letter() {
    let limits = BrokerLimits::none().answer_within(secs(60)).deliveries(times(1));
    let (broker, inbox) = (MemoryBroker::with_limits(limits), inbox());
    broker.publish("orders", "a", "a");
    broker.publish("orders", "b", "b");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        tokio::time::sleep(secs(2)).await;
        write(tx, message);
        Ok::<_, Error>(())
    });
    let consumer = consumer
        .with(ConsumerOptions::new().concurrency(size(2)))
        .in_order_of(|_| "one".into());
    let summary = consumer.run(tokio::time::sleep(secs(1))).await.unwrap();
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.handed_back),
        (1, 1, 0),
        "{summary}"
    );
    let letter = inbox.dead_letter(id("b")).await.unwrap().unwrap();
    assert!(letter.info.error.contains("shut down"), "{}", letter.info.error);
    assert_eq!(broker.pending(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_message_without_an_id_and_one_with_anothers_id_are_given_up_under_the_brokers_place() {
    struct Fingerprinted(MemoryMessage);
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish_with_headers("orders", Headers::new(), "no id");
    broker.publish("orders", "a", "a");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    let summary = consumer.run(broker.drained()).await.unwrap();
    assert_eq!((summary.handled, summary.dead_letters), (1, 1), "{summary}");
    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    assert!(letters[0].error.contains("missing message id"), "{}", letters[0].error);
    let letter = inbox.dead_letter(letters[0].key.id()).await.unwrap().unwrap();
    assert_eq!(letter.payload, b"no id");

    // Another payload under an id that was processed.
    let first = inbox
        .process(id("b").with_payload("one"), async |_| Ok::<_, Error>(()))
        .await;
    assert!(matches!(first.unwrap(), Outcome::Processed(())));
    broker.publish("orders", "b", "another");
    let mut fetched = broker.clone().fetch(size(1)).await.unwrap();
    let message = Fingerprinted(fetched.remove(0));
    let other = OneMessage(Some(message.0.clone()));
    let consumer = inbox_core::Consumer::new(other, inbox.clone(), async |_tx, _message| Ok::<_, Error>(()));
    let summary = consumer.run(broker.drained()).await.unwrap();
    assert_eq!(summary.dead_letters, 1, "{summary}");
    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    assert!(
        letters.iter().any(|letter| letter.error.contains("another payload")),
        "{letters:?}"
    );
    assert!(inbox.find(id("b")).await.unwrap().is_some());
    assert!(inbox.dead_letter(id("b")).await.unwrap().is_none());
}

/// A broker that has one message, whose payload is compared.
struct OneMessage(Option<MemoryMessage>);

struct Compared(MemoryMessage);

#[async_trait]
impl Broker for OneMessage {
    type Message = Compared;

    async fn fetch(&mut self, _most: NonZeroUsize) -> Result<Vec<Compared>> {
        match self.0.take() {
            Some(message) => Ok(vec![Compared(message)]),
            None => std::future::pending().await,
        }
    }

    fn limits(&self) -> BrokerLimits {
        BrokerLimits::none()
    }

    async fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl inbox_core::BrokerMessage for Compared {
    fn delivery(&self) -> Result<Delivery> {
        Ok(self.0.delivery()?.id().with_payload(&self.0.payload))
    }
    fn place(&self) -> MessageId {
        self.0.place()
    }
    fn origin(&self) -> String {
        self.0.origin()
    }
    fn sequence(&self) -> u64 {
        self.0.sequence
    }
    fn subject(&self) -> &str {
        &self.0.subject
    }
    fn headers(&self) -> Headers {
        self.0.headers.clone()
    }
    fn payload(&self) -> &[u8] {
        &self.0.payload
    }
    fn attempt(&self) -> u32 {
        self.0.attempt
    }
    async fn acknowledge(&self, proof: inbox_core::Handled) -> Result<()> {
        self.0.acknowledge(proof).await
    }
    async fn terminate(&self, proof: inbox_core::GivenUp) -> Result<()> {
        self.0.terminate(proof).await
    }
    async fn hand_back(&self, pause: Duration) -> Result<()> {
        self.0.hand_back(pause).await
    }
    async fn keep_alive(&self) -> Result<()> {
        self.0.keep_alive().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_handler_that_says_poison_is_believed_at_once_however_deep_it_says_so() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish("orders", "a", "a");
    broker.publish("orders", "b", "b");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, message| {
        let poison = Error::poison(std::io::Error::other("no such currency"));
        if message.payload == b"a" {
            return Err(anyhow::Error::from(poison).context("reading the order"));
        }
        Err(poison.into())
    });
    let summary = consumer.run(broker.drained()).await.unwrap();
    assert_eq!((summary.dead_letters, summary.failed_attempts), (2, 0), "{summary}");
    let letter = inbox.dead_letter(id("a")).await.unwrap().unwrap();
    assert!(letter.info.error.contains("no such currency"), "{}", letter.info.error);
}

#[tokio::test(start_paused = true)]
async fn a_store_without_dead_letters_gives_nothing_up() {
    let broker = MemoryBroker::new();
    let mut store = Troubled::inbox(None).store().clone();
    store.dead_letters = false;
    let inbox = Inbox::new(store, "billing").unwrap();
    broker.publish("orders", "a", "a");
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, _message| {
        Err::<(), _>(Error::poison("nothing to be done"))
    });
    let summary = consumer.run(tokio::time::sleep(secs(300))).await.unwrap();
    assert_eq!((summary.dead_letters, broker.pending()), (0, 1), "{summary}");
    assert!(
        broker.deliveries(1) >= 2 && broker.deliveries(1) <= 6,
        "{}",
        broker.deliveries(1)
    );
    assert!(pauses(&broker, 1)[0] >= secs(60));
}

#[tokio::test(start_paused = true)]
async fn a_dead_letter_that_cannot_be_stored_leaves_its_message_on_the_broker() {
    let (broker, inbox) = (MemoryBroker::new(), Troubled::inbox(None));
    broker.publish("orders", "a", "a");
    let store = inbox.store().clone();
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |_tx, _message| {
        store.set(Some(ErrorKind::Unavailable));
        Err::<(), _>(Error::poison("nothing to be done"))
    });
    let summary = consumer.run(tokio::time::sleep(secs(60))).await.unwrap();
    assert_eq!((summary.dead_letters, summary.handed_back), (0, 1), "{summary}");
    assert_eq!((count(&broker, Told::Terminated), broker.pending()), (0, 1));
    // The store is back: the next consumer gives it up.
    inbox.store().set(None);
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, _message| {
        Err::<(), _>(Error::poison("nothing to be done"))
    });
    assert_eq!(consumer.run(broker.drained()).await.unwrap().dead_letters, 1);
}

/// A broker that fails as it is told to.
struct Failing {
    broker: MemoryBroker,
    errors: Vec<ErrorKind>,
}

#[async_trait]
impl Broker for Failing {
    type Message = MemoryMessage;

    async fn fetch(&mut self, most: NonZeroUsize) -> Result<Vec<MemoryMessage>> {
        match self.errors.pop() {
            Some(kind) => Err(Error::new(kind, "the broker is in trouble, as the test wants")),
            None => self.broker.fetch(most).await,
        }
    }

    fn limits(&self) -> BrokerLimits {
        self.broker.limits()
    }

    async fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_broker_that_is_away_is_waited_for_and_one_that_refuses_ends_the_consumer() {
    let (broker, inbox) = (MemoryBroker::new(), inbox());
    broker.publish("orders", "a", "a");
    let failing = Failing {
        broker: broker.clone(),
        errors: vec![ErrorKind::Unavailable; 10],
    };
    let since = Instant::now();
    let consumer = inbox_core::Consumer::new(failing, inbox.clone(), async |tx, message| {
        write(tx, message);
        Ok::<_, Error>(())
    });
    consumer.run(broker.drained()).await.unwrap();
    assert!(
        since.elapsed() > secs(10),
        "it does not ask all the time: {:?}",
        since.elapsed()
    );
    assert_eq!(done(&inbox), ["a"]);

    let failing = Failing {
        broker: broker.clone(),
        errors: vec![ErrorKind::Broker, ErrorKind::Unavailable],
    };
    let consumer = inbox_core::Consumer::new(failing, inbox, async |_tx, _message| Ok::<_, Error>(()));
    let error = consumer.run(std::future::pending()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker);
}

#[tokio::test]
async fn a_concurrency_beyond_the_stores_connections_is_refused() {
    let mut store = Troubled::inbox(None).store().clone();
    store.most = Some(size(4));
    let inbox = Inbox::new(store, "billing").unwrap();
    let consumer = Consumer::new(MemoryBroker::new(), inbox, async |_tx, _message| Ok::<_, Error>(()));
    let error = consumer
        .with(ConsumerOptions::new().concurrency(size(5)))
        .run(std::future::ready(()))
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("4 transactions"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn an_error_at_the_commit_that_cannot_be_told_whose_it_is_costs_the_others_nothing() {
    let (broker, inbox) = (MemoryBroker::new(), Troubled::inbox(None));
    for name in ["one", "bad", "two"] {
        broker.publish("orders", name, name);
    }
    let store = inbox.store().clone();
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async move |tx, message| {
        store.bad_commit.fetch_or(message.payload == b"bad", Ordering::Relaxed);
        write(tx, message);
        Ok::<_, Error>(())
    });
    let options = ConsumerOptions::new().batch(size(3)).attempts(times(2));
    let summary = consumer.with(options).run(broker.drained()).await.unwrap();
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.failed_attempts),
        (2, 1, 1),
        "{summary}"
    );
    assert_eq!(troubled_done(&inbox), ["one", "two"]);
}

#[tokio::test(start_paused = true)]
async fn a_message_delivered_again_while_it_waits_here_is_handled_once_and_the_newest_delivery_is_answered() {
    // The broker's patience runs out, as it does not hear that the message is kept alive.
    struct Deaf(MemoryBroker);
    #[async_trait]
    impl Broker for Deaf {
        type Message = MemoryMessage;
        async fn fetch(&mut self, most: NonZeroUsize) -> Result<Vec<MemoryMessage>> {
            self.0.fetch(most).await
        }
        fn limits(&self) -> BrokerLimits {
            BrokerLimits::none()
        }
        async fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }
    let broker = MemoryBroker::with_limits(BrokerLimits::none().answer_within(secs(1)));
    let inbox = inbox();
    broker.publish("orders", "a", "a");
    let first = Arc::new(AtomicBool::new(true));
    let consumer = inbox_core::Consumer::new(
        Deaf(broker.clone()),
        inbox.clone(),
        async move |tx, message: &MemoryMessage| {
            if first.swap(false, Ordering::Relaxed) {
                return Err("not yet");
            }
            write(tx, message);
            Ok(())
        },
    );
    let summary: Summary = consumer
        .with(ConsumerOptions::new().concurrency(size(4)).pauses(secs(5), secs(5)))
        .in_order_of(|message| message.subject.clone())
        .run(broker.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.duplicates), (1, 0), "{summary}");
    assert!(broker.deliveries(1) >= 5);
    assert_eq!(done(&inbox), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn letters_on_trial_are_taken_back_at_a_shutdown() {
    let (broker, inbox) = (MemoryBroker::new(), Troubled::inbox(None));
    broker.publish("orders", "a", "a");
    // In flight elsewhere, at its last attempt.
    let mut elsewhere = inbox.store().begin().await.unwrap();
    assert!(inbox.try_claim(&mut elsewhere, id("a")).await.unwrap().is_new());
    let consumer = Consumer::new(broker.clone(), inbox.clone(), async |_tx, _message| Ok::<_, Error>(()));
    let options = ConsumerOptions::new().attempts(times(1));
    let summary = consumer.with(options).run(tokio::time::sleep(secs(3))).await.unwrap();
    assert_eq!((summary.handed_back, summary.dead_letters), (1, 0), "{summary}");
    let key = Key::new(inbox.group().clone(), id("a"));
    assert_eq!(inbox.store().store.find_dead_letter(&key).await.unwrap(), None);
    drop(elsewhere);
}
