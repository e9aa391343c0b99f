//! Messages that are given up, and put back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use inbox_core::{DeadLetterState, Error, ErrorKind, MessageId};
use inbox_nats::JetStreamConsumer;
use inbox_nats::async_nats::jetstream::consumer::pull::Config;

use crate::common::{Stream, hurried, inbox, lines, millis, size, times, until, write};

#[tokio::test]
async fn one_poison_message_in_a_batch_of_100_is_retried_given_up_put_back_and_handled_once() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for n in 0..100 {
        stream.publish(&format!("order-{n}"), &n.to_string()).await;
    }
    let poison = Arc::new(AtomicBool::new(true));
    let consume = async || {
        let poison = Arc::clone(&poison);
        JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
            .with(hurried().batch(size(100)).attempts(times(4)))
            .handler(async move |tx, message| {
                if &message.payload[..] == b"37" && poison.load(Ordering::Relaxed) {
                    return Err("cannot be handled");
                }
                write(tx, message);
                Ok(())
            })
            .run(stream.drained())
            .await
            .unwrap()
    };
    let summary = consume().await;
    assert_eq!(
        (summary.handled, summary.dead_letters, summary.failed_attempts),
        (99, 1, 3),
        "{summary}"
    );
    assert_eq!(lines(&inbox).len(), 99);
    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    let [letter] = &letters[..] else { panic!("{letters:?}") };
    assert_eq!((letter.state, letter.attempts), (DeadLetterState::Dead, 4));
    assert!(letter.origin.starts_with("ORDERS/38/"), "{}", letter.origin);
    assert!(letter.error.contains("cannot be handled"), "{}", letter.error);

    poison.store(false, Ordering::Relaxed);
    assert!(
        inbox_nats::put_back(&stream.context, &inbox, letter.key.id())
            .await
            .unwrap()
    );
    let summary = consume().await;
    assert_eq!((summary.handled, summary.duplicates), (1, 0), "{summary}");
    let mut lines = lines(&inbox);
    lines.sort();
    assert_eq!(
        (lines.len(), lines.iter().filter(|line| *line == "37").count()),
        (100, 1)
    );
    assert!(inbox.dead_letters(None, times(10)).await.unwrap().is_empty());
    // There is none any more.
    assert!(
        !inbox_nats::put_back(&stream.context, &inbox, letter.key.id())
            .await
            .unwrap()
    );
}

#[tokio::test]
async fn poison_is_given_up_at_once_and_the_last_delivery_of_the_server_is_the_last_attempt() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish("poison", "poison").await;
    stream.publish("slow", "slow").await;
    let config = Config {
        max_deliver: 3,
        ..Config::default()
    };
    let summary = JetStreamConsumer::builder(stream.consumer_with(config).await, inbox.clone())
        .with(hurried().handler_timeout(millis(100)))
        .handler(async |_tx, message| {
            if &message.payload[..] == b"poison" {
                return Err(Error::poison("of no known version"));
            }
            std::future::pending::<()>().await;
            Ok(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!((summary.dead_letters, summary.failed_attempts), (2, 2), "{summary}");
    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    let attempts: Vec<u32> = letters.iter().map(|letter| letter.attempts).collect();
    assert_eq!(attempts, [1, 3]);
}

#[tokio::test]
async fn in_the_duplicate_window_the_letter_is_kept_and_after_it_put_back() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let id = MessageId::new("order-17").unwrap();
    let mut stream_config = stream
        .context
        .get_stream("ORDERS")
        .await
        .unwrap()
        .cached_info()
        .config
        .clone();
    stream_config.duplicate_window = millis(60_000);
    stream.context.update_stream(stream_config.clone()).await.unwrap();
    stream.publish("order-17", "invoice").await;
    JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .handler(async |_tx, _message| Err::<(), _>(Error::poison("not now")))
        .run(stream.drained())
        .await
        .unwrap();
    let error = inbox_nats::put_back(&stream.context, &inbox, id).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let letter = inbox.dead_letter(id).await.unwrap().unwrap();
    assert_eq!(letter.info.state, DeadLetterState::PuttingBack);

    stream_config.duplicate_window = millis(100);
    stream.context.update_stream(stream_config).await.unwrap();
    until(async || inbox_nats::put_back(&stream.context, &inbox, id).await.is_ok()).await;
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .handler(async |tx, message| {
            assert_eq!(message.header("Inbox-Consumer-Group"), Some("billing"));
            write(tx, message);
            Ok::<_, Error>(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!((summary.handled, summary.duplicates), (1, 0), "{summary}");
}

#[tokio::test]
async fn what_nats_reads_in_headers_is_not_published_again() {
    let (stream, inbox) = (Stream::new().await, inbox());
    // An expectation that was true then, and would refuse the message now.
    let headers = [
        ("Nats-Msg-Id", "order-17"),
        ("Nats-Expected-Last-Sequence", "0"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ];
    stream.publish_to("orders.a", headers, "invoice").await;
    JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .handler(async |_tx, _message| Err::<(), _>(Error::poison("not now")))
        .run(stream.drained())
        .await
        .unwrap();
    let id = MessageId::new("order-17").unwrap();
    tokio::time::sleep(millis(300)).await;
    assert!(inbox_nats::put_back(&stream.context, &inbox, id).await.unwrap());
    let summary = JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .handler(async |tx, message| {
            assert_eq!(message.header("Nats-Expected-Last-Sequence"), None);
            assert!(
                message
                    .header("traceparent")
                    .is_some_and(|parent| parent.starts_with("00-0af7"))
            );
            write(tx, message);
            Ok::<_, Error>(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(summary.handled, 1, "{summary}");
}
