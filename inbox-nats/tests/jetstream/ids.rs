//! Which message is which.

use std::convert::Infallible;

use inbox_core::{DeadLetterState, MessageId};
use inbox_nats::{JetStreamConsumer, MessageIds};

use crate::common::{Stream, hurried, inbox, lines, size, times, write};

async fn consume(
    stream: &Stream,
    inbox: &inbox_core::Inbox<inbox_core::MemoryInbox<crate::common::Lines>>,
    ids: MessageIds,
) -> inbox_core::Summary {
    JetStreamConsumer::builder(stream.consumer().await, inbox.clone())
        .with(hurried().batch(size(10)))
        .ids(ids)
        .handler(async |tx, message| {
            write(tx, message);
            Ok::<_, Infallible>(())
        })
        .run(stream.drained())
        .await
        .unwrap()
}

#[tokio::test]
async fn the_header_is_read_in_any_case_and_what_cannot_be_read_is_a_dead_letter_that_can_be_put_back() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish_to("orders.a", [("Nats-Msg-Id", "1")], "exact").await;
    stream.publish_to("orders.a", [("nats-msg-id", "2")], "lower").await;
    stream
        .publish_to("orders.a", [("NATS-MSG-ID", "1")], "a redelivery by a proxy")
        .await;
    stream
        .publish_to(
            "orders.a",
            [("NATS-MSG-ID", "3"), ("nats-msg-id", "3")],
            "twice the same",
        )
        .await;
    stream
        .publish_to("orders.a", [("NATS-MSG-ID", "4"), ("nats-msg-id", "5")], "two ids")
        .await;
    stream
        .publish_to("orders.a", [("nats-msg-id", "")], "an empty id")
        .await;
    stream.publish_to("orders.a", [], "no id").await;
    let summary = consume(&stream, &inbox, MessageIds::header()).await;
    assert_eq!(
        (summary.handled, summary.duplicates, summary.dead_letters),
        (3, 1, 3),
        "{summary}"
    );
    assert_eq!(lines(&inbox), ["exact", "lower", "twice the same"]);

    let letters = inbox.dead_letters(None, times(10)).await.unwrap();
    let errors: Vec<&str> = letters.iter().map(|letter| letter.error.as_str()).collect();
    for (part, error) in ["two values", "missing message id", "no header Nats-Msg-Id"]
        .iter()
        .zip(&errors)
    {
        assert!(error.contains(part), "{errors:?}");
    }
    // Put back, it is handled under the id that it was given.
    for letter in &letters {
        assert_eq!(letter.state, DeadLetterState::Dead);
        assert!(
            inbox_nats::put_back(&stream.context, &inbox, letter.key.id())
                .await
                .unwrap()
        );
    }
    let summary = consume(&stream, &inbox, MessageIds::header()).await;
    assert_eq!((summary.handled, summary.duplicates), (3, 0), "{summary}");
    assert!(inbox.dead_letters(None, times(10)).await.unwrap().is_empty());
}

#[tokio::test]
async fn the_place_is_the_id_where_that_was_chosen_and_a_stream_made_anew_gives_others() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish_to("orders.a", [], "without an id").await;
    stream.publish_to("orders.a", [], "without an id").await;
    stream
        .publish_to("orders.a", [("Nats-Msg-Id", "order-17")], "with one")
        .await;
    let summary = consume(&stream, &inbox, MessageIds::header_or_place()).await;
    assert_eq!((summary.handled, summary.duplicates), (3, 0), "{summary}");
    assert!(inbox.find(MessageId::new("order-17").unwrap()).await.unwrap().is_some());

    // The same messages, delivered again by a new consumer: duplicates.
    stream
        .context
        .delete_consumer_from_stream("billing", "ORDERS")
        .await
        .unwrap();
    let summary = consume(&stream, &inbox, MessageIds::header_or_place()).await;
    assert_eq!((summary.handled, summary.duplicates), (0, 3), "{summary}");

    // Another message with the sequence 1.
    stream.context.delete_stream("ORDERS").await.unwrap();
    stream.create().await;
    assert_eq!(stream.publish_to("orders.a", [], "another").await, 1);
    let summary = consume(&stream, &inbox, MessageIds::header_or_place()).await;
    assert_eq!((summary.handled, summary.duplicates), (1, 0), "{summary}");
}

#[tokio::test]
async fn a_function_may_read_the_id_and_its_errors_and_panics_are_the_messages_own() {
    let (stream, inbox) = (Stream::new().await, inbox());
    for payload in ["one", "two", "one", "", "panic"] {
        stream.publish_to("orders.a", [], payload).await;
    }
    let ids = MessageIds::from_fn(|message| {
        assert_ne!(&message.payload[..], b"panic", "on purpose");
        MessageId::from_bytes(&message.payload)
    });
    let summary = consume(&stream, &inbox, ids).await;
    assert_eq!(
        (summary.handled, summary.duplicates, summary.dead_letters),
        (2, 1, 2),
        "{summary}"
    );
    assert_eq!(lines(&inbox), ["one", "two"]);
}

#[tokio::test]
async fn the_streams_name_may_be_part_of_the_id_and_payloads_may_be_compared() {
    let (stream, inbox) = (Stream::new().await, inbox());
    stream.publish("order-17", "invoice").await;
    consume(&stream, &inbox, MessageIds::header().with_stream_name()).await;
    assert!(inbox.find(MessageId::new("order-17").unwrap()).await.unwrap().is_none());
    let id = MessageId::from_parts(["ORDERS", "order-17"]).unwrap();
    assert!(inbox.find(id).await.unwrap().is_some());

    // In lower case, so that the server's own duplicate window does not stand in the way.
    stream.publish_to("orders.a", [("nats-msg-id", "18")], "one").await;
    stream.publish_to("orders.a", [("nats-msg-id", "18")], "another").await;
    let summary = consume(&stream, &inbox, MessageIds::header().with_payloads_compared()).await;
    assert_eq!((summary.handled, summary.dead_letters), (1, 1), "{summary}");
}
