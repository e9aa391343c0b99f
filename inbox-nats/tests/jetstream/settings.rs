//! The server's settings against ours, at the start.

use std::convert::Infallible;
use std::future::{pending, ready};

use inbox_core::{ErrorKind, Inbox, MemoryInbox, Result, Summary};
use inbox_nats::JetStreamConsumer;
use inbox_nats::async_nats::jetstream::consumer::AckPolicy;
use inbox_nats::async_nats::jetstream::consumer::pull::Config;

use crate::common::{Stream, inbox, lines, millis, write};

async fn run(stream: &Stream, config: Config) -> Result<Summary> {
    JetStreamConsumer::builder(stream.consumer_with(config).await, inbox())
        .handler(async |_tx, _message| Ok::<_, Infallible>(()))
        .run(ready(()))
        .await
}

#[tokio::test]
async fn a_policy_other_than_explicit_is_refused_with_what_to_do() {
    for ack_policy in [AckPolicy::None, AckPolicy::All] {
        let stream = Stream::new().await;
        let config = Config {
            ack_policy,
            ..Config::default()
        };
        let error = run(&stream, config).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("`explicit`"), "{error}");
    }
}

#[tokio::test]
async fn deliveries_that_end_by_themselves_need_a_store_with_dead_letters() {
    let stream = Stream::new().await;
    let config = Config {
        max_deliver: 3,
        ..Config::default()
    };
    run(&stream, config.clone()).await.unwrap();
}

#[tokio::test]
async fn the_servers_own_settings_count_and_not_those_that_were_asked_for() {
    let (stream, inbox) = (Stream::new().await, inbox());
    let config = |wait| Config {
        ack_wait: millis(wait),
        ..Config::default()
    };
    stream.consumer_with(config(1_000)).await;
    stream.publish("order-17", "invoice").await;
    // Asked for 60 s, and got what was there.
    JetStreamConsumer::builder(stream.consumer_with(config(60_000)).await, inbox.clone())
        .handler(async |tx, message| {
            tokio::time::sleep(millis(2_500)).await;
            write(tx, message);
            Ok::<_, Infallible>(())
        })
        .run(stream.drained())
        .await
        .unwrap();
    assert_eq!(lines(&inbox), ["invoice"]);
    assert_eq!(stream.deliveries().await, (1, 0));
}

#[tokio::test]
async fn a_consumer_that_is_not_there_is_an_error_at_once() {
    let stream = Stream::new().await;
    let consumer = stream.consumer().await;
    stream
        .context
        .delete_consumer_from_stream("billing", "ORDERS")
        .await
        .unwrap();
    let inbox: Inbox<MemoryInbox<()>> = Inbox::new(MemoryInbox::with_state(()), "billing").unwrap();
    let error = JetStreamConsumer::builder(consumer, inbox)
        .handler(async |_tx, _message| Ok::<_, Infallible>(()))
        .run(pending())
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Broker);
    assert!(error.to_string().contains("no consumer billing"), "{error}");
}
