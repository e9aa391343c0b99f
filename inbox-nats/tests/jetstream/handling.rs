//! Claim, handle, commit, acknowledge: what becomes of messages whose server and store are well.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::pending;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use inbox_core::{ConsumerOptions, Error, MessageId};
use inbox_nats::JetStreamConsumer;
use inbox_nats::async_nats::jetstream::consumer::pull::Config;
use tokio::sync::oneshot;

use crate::common::{Stream, hurried, inbox, lines, millis, size, times, until, write};

type Never = Result<(), Infallible>;

#[tokio::test]
async fn a_message_is_handled_once_and_a_second_publishing_of_its_id_is_skipped_and_acknowledged() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish("order-17", "invoice").await;
    // Beyond the duplicate window the server takes it a second time.
    tokio::time::sleep(millis(300)).await;
    stream.publish("order-17", "invoice").await;
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.duplicates, summary.unconfirmed), (1, 1, 0));
    assert_eq!(lines(&inbox), ["invoice"]);
    assert_eq!(stream.deliveries().await, (2, 0));
}

#[tokio::test]
async fn it_runs_in_a_spawned_task_with_captures_and_without_annotations() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish("order-17", "invoice").await;
    let seen = Arc::new(AtomicU32::new(0));
    let (consumer, drained, mine) = (stream.consumer().await, stream.drained(), inbox.clone());
    let counter = Arc::clone(&seen);
    let task = tokio::spawn(async move {
        JetStreamConsumer::builder(consumer, mine)
            .handler(async move |tx, message| {
                counter.fetch_add(1, Ordering::Relaxed);
                write(tx, message);
                Ok::<_, Error>(())
            })
            .run(drained)
            .await
    });
    assert_eq!(task.await.unwrap().unwrap().handled, 1);
    assert_eq!(seen.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn nothing_is_unanswered_after_a_shutdown_in_the_middle() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..400 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let (enough, shutdown) = oneshot::channel::<()>();
    let enough = Arc::new(Mutex::new(Some(enough)));
    let handled = Arc::new(AtomicU32::new(0));
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(ConsumerOptions::new().batch(size(10)).concurrency(size(4)))
        .handler(async move |tx, message| {
            if handled.fetch_add(1, Ordering::Relaxed) == 50 {
                enough.lock().unwrap().take().unwrap().send(()).unwrap();
            }
            write(tx, message);
            Never::Ok(())
        })
        .run(async move { shutdown.await.unwrap() })
        .await
        .unwrap();
    assert!(summary.handled >= 50 && summary.handled < 400, "{summary}");
    assert_eq!(summary.unconfirmed, 0, "{summary}");
    // What was handed back counts as unanswered until it is delivered again, and is at once.
    let (_, unanswered) = stream.deliveries().await;
    assert!(unanswered as u64 <= summary.handed_back, "{unanswered} after {summary}");
    let rest = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(ConsumerOptions::new().batch(size(100)))
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled + rest.handled, 400);
    assert_eq!(lines(&inbox).len(), 400);
    assert_eq!(stream.deliveries().await.1, 0);
}

#[tokio::test]
async fn a_handler_of_three_times_ack_wait_is_left_in_peace() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let config = || Config {
        ack_wait: millis(1_000),
        ..Config::default()
    };
    stream.publish("order-17", "invoice").await;
    let consume = async || {
        JetStreamConsumer::builder(stream.consumer_with(config()).await, inbox.clone())
            .handler(async |tx, message| {
                tokio::time::sleep(millis(3_000)).await;
                write(tx, message);
                Never::Ok(())
            })
            .run(stream.drained())
            .await
            .unwrap()
    };
    let (one, two) = tokio::join!(consume(), consume());
    assert_eq!((one.handled + two.handled, one.duplicates + two.duplicates), (1, 0));
    assert_eq!(lines(&inbox), ["invoice"]);
    assert_eq!(stream.deliveries().await, (1, 0));
}

#[tokio::test]
async fn the_shortest_back_off_counts_and_not_ack_wait() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let config = Config {
        ack_wait: millis(30_000),
        backoff: vec![millis(1_000), millis(5_000)],
        max_deliver: 5,
        ..Config::default()
    };
    stream.publish("order-17", "invoice").await;
    JetStreamConsumer::builder(stream.consumer_with(config).await, inbox.clone())
        .handler(async |tx, message| {
            tokio::time::sleep(millis(3_000)).await;
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(lines(&inbox), ["invoice"]);
    assert_eq!(stream.deliveries().await, (1, 0));
}

#[tokio::test]
async fn six_messages_and_two_consumers_are_six_deliveries() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..6 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let config = || Config {
        ack_wait: millis(1_000),
        ..Config::default()
    };
    let consume = async || {
        JetStreamConsumer::builder(stream.consumer_with(config()).await, inbox.clone())
            .with(ConsumerOptions::new().batch(size(3)))
            .handler(async |tx, message| {
                tokio::time::sleep(millis(600)).await;
                write(tx, message);
                Never::Ok(())
            })
            .run(stream.drained())
            .await
            .unwrap()
    };
    let (one, two) = tokio::join!(consume(), consume());
    assert_eq!(one.handled + two.handled, 6);
    assert_eq!(lines(&inbox).len(), 6);
    assert_eq!(stream.deliveries().await, (6, 0));
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_counted_and_the_effect_is_there_once() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let config = Config {
        ack_wait: millis(500),
        ..Config::default()
    };
    stream.publish("order-17", "invoice").await;
    let consumer = stream.consumer_with(config).await;
    let first = Arc::new(AtomicU32::new(0));
    // On the test's only thread, so that nothing else runs meanwhile.
    let summary = JetStreamConsumer::builder(consumer, inbox.clone())
        .handler(async move |tx, message| {
            if first.fetch_add(1, Ordering::Relaxed) == 0 {
                std::thread::sleep(millis(1_500));
            }
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(lines(&inbox), ["invoice"]);
    assert!(summary.late >= 1, "{summary}");
}

#[tokio::test]
async fn stuck_handlers_fill_max_ack_pending_only_until_their_bound() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..6 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let config = Config {
        max_ack_pending: 2,
        ..Config::default()
    };
    let calls = Arc::new(Mutex::new(HashMap::<u64, u32>::new()));
    let summary = JetStreamConsumer::builder(stream.consumer_with(config).await, inbox.clone())
        .with(hurried().concurrency(size(2)).handler_timeout(millis(500)))
        .handler(async move |tx, message| {
            let call = {
                let mut calls = calls.lock().unwrap();
                let call = calls.entry(message.sequence).or_default();
                *call += 1;
                *call
            };
            if message.sequence <= 2 && call == 1 {
                pending::<()>().await;
            }
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.failed_attempts), (6, 2), "{summary}");
    assert_eq!(lines(&inbox).len(), 6);
}

#[tokio::test]
async fn a_panic_is_a_failure_of_its_message_and_ends_nothing() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..5 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let calls = Arc::new(AtomicU32::new(0));
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(hurried().batch(size(5)))
        .handler(async move |tx, message| {
            write(tx, message);
            assert!(
                message.sequence != 3 || calls.fetch_add(1, Ordering::Relaxed) > 1,
                "on purpose"
            );
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.failed_attempts), (5, 2), "{summary}");
    let mut lines = lines(&inbox);
    lines.sort();
    assert_eq!(lines, ["0", "1", "2", "3", "4"]);
}

#[tokio::test]
async fn what_is_handed_back_at_a_shutdown_is_had_by_another_long_before_ack_wait() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..3 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    // An hour: what is not handed back would not come within the test.
    let config = || Config {
        ack_wait: millis(3_600_000),
        ..Config::default()
    };
    let consumer = stream.consumer_with(config()).await;
    let (begun, shutdown) = oneshot::channel::<()>();
    let begun = Arc::new(Mutex::new(Some(begun)));
    let summary = JetStreamConsumer::builder(consumer, inbox.clone())
        .with(ConsumerOptions::new().batch(size(3)).shutdown_timeout(millis(100)))
        .handler(async move |tx, message| {
            write(tx, message);
            if let Some(begun) = begun.lock().unwrap().take() {
                begun.send(()).unwrap();
            }
            pending::<Never>().await
        })
        .run(async move { shutdown.await.unwrap() })
        .await
        .unwrap();
    assert_eq!(
        (summary.handled, summary.handed_back, summary.cancelled),
        (0, 3, 3),
        "{summary}"
    );
    assert!(lines(&inbox).is_empty());
    let summary = JetStreamConsumer::builder(stream.consumer_with(config()).await, inbox.clone())
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled, 3);
}

#[tokio::test]
async fn order_is_kept_by_subject_at_concurrency_16_though_handlers_fail_at_random() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let mut sent = Vec::new();
    for n in 0..10_000_u32 {
        let subject = format!("orders.{}", n % 50);
        let mut headers = inbox_nats::async_nats::HeaderMap::new();
        headers.insert("Nats-Msg-Id", n.to_string().as_str());
        let message = stream
            .context
            .publish_with_headers(subject, headers, format!("{}:{n}", n % 50).into());
        sent.push(message.await.unwrap());
        if sent.len() == 500 {
            for sent in sent.drain(..) {
                sent.await.unwrap();
            }
        }
    }
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(
            ConsumerOptions::new()
                .concurrency(size(16))
                .batch(size(10))
                .attempts(times(1_000))
                .pauses(millis(1), millis(5)),
        )
        .in_order_of_subject()
        .handler(async |tx, message| {
            tokio::task::yield_now().await;
            // One in fifty, by a coin that falls another way each time.
            if rand::random_ratio(1, 50) {
                return Err(Error::new(inbox_core::ErrorKind::Handler, "at random"));
            }
            write(tx, message);
            Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled, 10_000, "{summary}");
    assert!(summary.failed_attempts > 0, "{summary}");
    let mut last = HashMap::new();
    for line in lines(&inbox) {
        let (key, n) = line.split_once(':').unwrap();
        let n: u32 = n.parse().unwrap();
        assert!(last.insert(key.to_owned(), n) < Some(n), "{line}");
    }
    assert_eq!(last.len(), 50);
}

#[tokio::test]
async fn batches_are_bounded_by_bytes_and_a_message_beyond_them_comes_alone() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..20 {
        stream
            .publish(&format!("order-{n}"), &format!("{n}:{}", "x".repeat(1_000)))
            .await;
    }
    stream.publish("large", &"y".repeat(20_000)).await;
    stream.publish("last", "z").await;
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(ConsumerOptions::new().batch(size(100)))
        .fetch_bytes(size(5_000))
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled, 22, "{summary}");
    assert_eq!(stream.deliveries().await, (22, 0));
}

#[tokio::test]
async fn a_batch_lingers_for_what_comes_a_little_later() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let consumer = stream.consumer().await;
    let (done, shutdown) = oneshot::channel::<()>();
    let consume = JetStreamConsumer::builder(consumer, inbox.clone())
        .with(ConsumerOptions::new().batch(size(3)))
        .linger(millis(500))
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(async move { shutdown.await.unwrap() });
    let publish = async {
        for n in 0..3 {
            stream.publish(&format!("order-{n}"), &n.to_string()).await;
        }
        until(async || lines(&inbox).len() == 3).await;
        done.send(()).unwrap();
    };
    let (summary, ()) = tokio::join!(consume, publish);
    assert_eq!(summary.unwrap().handled, 3);
    let id = |n: u32| MessageId::new(format!("order-{n}")).unwrap();
    let (first, last) = (inbox.find(id(0)).await.unwrap(), inbox.find(id(2)).await.unwrap());
    assert_eq!(first.unwrap().processed_at, last.unwrap().processed_at, "of one commit");
}
