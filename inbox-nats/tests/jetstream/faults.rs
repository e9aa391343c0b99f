//! Servers that die and come back, consumers that are deleted, users who may not.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use inbox_core::{ConsumerOptions, ErrorKind};
use inbox_nats::JetStreamConsumer;
use inbox_nats::async_nats::ConnectOptions;
use inbox_nats::async_nats::jetstream::{self, consumer::pull::Config};
use inbox_test_servers::Nats;
use tokio::sync::oneshot;

use crate::common::{DURABLE, NAME, Stream, connect, inbox, lines, millis, size, until, write};

type Never = Result<(), Infallible>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_server_is_killed_and_started_again_in_mid_stream() {
    let (mut stream, inbox) = (Stream::new().await, inbox());
    for n in 0..500 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let config = Config {
        ack_wait: millis(1_000),
        ..Config::default()
    };
    let consumer = stream.consumer_with(config).await;
    let (done, shutdown) = oneshot::channel::<()>();
    let (consumer_inbox, handled) = (inbox.clone(), Arc::new(AtomicU32::new(0)));
    let counter = Arc::clone(&handled);
    let task = tokio::spawn(async move {
        JetStreamConsumer::builder(consumer, consumer_inbox)
            .with(ConsumerOptions::new().batch(size(5)))
            .handler(async move |tx, message| {
                tokio::time::sleep(millis(2)).await;
                counter.fetch_add(1, Ordering::Relaxed);
                write(tx, message);
                Never::Ok(())
            })
            .run(async move { shutdown.await.unwrap() })
            .await
    });
    for kill in 1..=3 {
        until(async || handled.load(Ordering::Relaxed) >= kill * 100).await;
        stream.server.kill();
        tokio::time::sleep(millis(300)).await;
        stream.server.start_again();
    }
    stream.drained().await;
    done.send(()).unwrap();
    let summary = task.await.unwrap().unwrap();
    let mut all: Vec<u32> = lines(&inbox).iter().map(|line| line.parse().unwrap()).collect();
    all.sort_unstable();
    assert_eq!(all, (0..500).collect::<Vec<_>>(), "{summary}");
    assert_eq!(stream.deliveries().await.1, 0);
}

#[tokio::test]
async fn a_server_killed_after_acknowledgements_redelivers_nothing_that_is_handled_again() {
    let (mut stream, inbox) = (Stream::new().await, inbox());
    for n in 0..20 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let consume = async |stream: &Stream| {
        JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
            .handler(async |tx, message| {
                write(tx, message);
                Never::Ok(())
            })
            .run(stream.drained())
            .await
            .unwrap()
    };
    assert_eq!(consume(&stream).await.handled, 20);
    stream.server.kill();
    stream.server.start_again();
    stream.context = connect(&stream.server.url()).await;
    let again = consume(&stream).await;
    assert_eq!(again.handled, 0, "{again}");
    assert_eq!(lines(&inbox).len(), 20);
}

#[tokio::test]
async fn a_consumer_deleted_meanwhile_ends_the_run_with_a_word() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish("order-17", "invoice").await;
    let consumer = stream.consumer().await;
    let run = JetStreamConsumer::builder(consumer, inbox.clone())
        .handler(async |tx, message| {
            write(tx, message);
            Never::Ok(())
        })
        .run(std::future::pending());
    let delete = async {
        until(async || lines(&inbox).len() == 1).await;
        stream.context.delete_consumer_from_stream(DURABLE, NAME).await.unwrap();
    };
    let (ended, ()) = tokio::join!(run, delete);
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    assert!(error.to_string().contains("has no consumer billing"), "{error}");
}

#[tokio::test]
async fn a_stream_deleted_meanwhile_ends_the_run_with_a_word() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let consumer = stream.consumer().await;
    let run = JetStreamConsumer::builder(consumer, inbox)
        .handler(async |_tx, _message| Never::Ok(()))
        .run(std::future::pending());
    let (ended, ()) = tokio::join!(run, async {
        tokio::time::sleep(millis(200)).await;
        stream.context.delete_stream(NAME).await.unwrap();
    });
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
}

#[tokio::test]
async fn a_consumer_made_anew_meanwhile_is_consumed_on_unless_its_settings_are_others() {
    for (ack_wait, same) in [(30_000, true), (5_000, false)] {
        let (stream, inbox) = (Stream::new().await, inbox());
        let consumer = stream.consumer().await;
        let (done, shutdown) = oneshot::channel::<()>();
        let run = JetStreamConsumer::builder(consumer, inbox.clone())
            .handler(async |tx, message| {
                write(tx, message);
                Never::Ok(())
            })
            .run(async move { shutdown.await.unwrap() });
        let change = async {
            tokio::time::sleep(millis(200)).await;
            stream.context.delete_consumer_from_stream(DURABLE, NAME).await.unwrap();
            let config = Config {
                ack_wait: millis(ack_wait),
                ..Config::default()
            };
            stream.consumer_with(config).await;
            if same {
                stream.publish("order-17", "invoice").await;
                until(async || lines(&inbox).len() == 1).await;
                done.send(()).unwrap();
                None
            } else {
                // Kept, or its end would be a shutdown.
                Some(done)
            }
        };
        let (ended, _kept) = tokio::join!(run, change);
        match ended {
            Ok(summary) => assert!(same && summary.handled == 1, "{summary}"),
            Err(error) => assert!(
                !same && error.to_string().contains("others than at the start"),
                "{error}"
            ),
        }
    }
}

/// A server where the user `limited` may not publish to some subjects, and anybody else may do anything.
fn server_that_denies(subjects: &str) -> Nats {
    Nats::start_with(&format!(
        r"authorization {{
            users = [
                {{ user: all, password: secret }}
                {{ user: limited, password: secret, permissions: {{ publish: {{ deny: [{subjects}] }} }} }}
            ]
        }}
        no_auth_user: all"
    ))
}

async fn run_limited(stream: &Stream) -> inbox_core::Error {
    stream.consumer().await;
    for n in 0..5 {
        stream.publish(&format!("order-{n}"), "invoice").await;
    }
    let options = ConnectOptions::with_user_and_password("limited".into(), "secret".into());
    let context = jetstream::new(options.connect(stream.server.url()).await.unwrap());
    let consumer = context.get_consumer_from_stream(DURABLE, NAME).await.unwrap();
    JetStreamConsumer::builder(consumer, inbox())
        .handler(async |_tx, _message| Never::Ok(()))
        .run(std::future::pending())
        .await
        .unwrap_err()
}

#[tokio::test]
async fn one_who_may_not_fetch_is_told_so() {
    let stream = Stream::on(server_that_denies(r#""$JS.API.CONSUMER.MSG.NEXT.>""#)).await;
    let error = run_limited(&stream).await;
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    assert!(
        error
            .to_string()
            .contains("allowed to publish to $JS.API.CONSUMER.MSG.NEXT.ORDERS.billing"),
        "{error}"
    );
}

#[tokio::test]
async fn one_who_may_not_acknowledge_is_told_so() {
    let stream = Stream::on(server_that_denies(r#""$JS.ACK.>""#)).await;
    let error = run_limited(&stream).await;
    assert_eq!(error.kind(), ErrorKind::Broker, "{error}");
    assert!(
        error
            .to_string()
            .contains("allowed to publish to $JS.ACK.ORDERS.billing.>"),
        "{error}"
    );
}
