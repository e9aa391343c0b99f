//! End to end with JetStream and PostgreSQL: messages a second through the consumer, with one row written for each, against
//! the same loop written by hand with async-nats and sqlx and **no inbox at all**; batches of 100.
//!
//! ```text
//! cargo bench --bench nats --features nats,postgres
//! ```
//!
//! Both take turns on one server, each round from a durable consumer of its own. The last line is the ratio; above 0.8 is
//! what the project asks of itself.

#![allow(
    clippy::unwrap_used,
    missing_docs,
    reason = "a measurement may stop at the first surprise"
)]

use std::convert::Infallible;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use inbox::nats::JetStreamConsumer;
use inbox::nats::async_nats::jetstream::consumer::PullConsumer;
use inbox::nats::async_nats::jetstream::consumer::pull::Config;
use inbox::nats::async_nats::jetstream::{self, Context, stream};
use inbox::nats::async_nats::{self, HeaderMap, Request};
use inbox::postgres::PostgresInbox;
use inbox::postgres::sqlx::{self, PgPool};
use inbox::{ConsumerOptions, Inbox};
use inbox_test_servers::{Nats, Postgres};
use tokio::sync::Notify;

const MESSAGES: u32 = 20_000;
const ROUNDS: usize = 5;
const BATCH: usize = 100;
const EFFECT: &str = "INSERT INTO effects VALUES ($1)";

#[tokio::main]
async fn main() {
    let (nats, postgres) = (Nats::start(), Postgres::start());
    let context = jetstream::new(async_nats::connect(nats.url()).await.unwrap());
    let pool = PgPool::connect(&postgres.url()).await.unwrap();
    sqlx::query("CREATE TABLE effects (n bigint)")
        .execute(&pool)
        .await
        .unwrap();
    let inbox = Inbox::new(PostgresInbox::new(pool.clone()), "billing").unwrap();
    inbox.setup().await.unwrap();
    fill(&context).await;

    println!("{MESSAGES} messages, batches of {BATCH}, messages a second:");
    let (mut by_hand, mut ours) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // In turns, so that neither always comes first.
        for turn in 0..2 {
            let consumer = consumer(&context, &format!("round-{round}-{turn}")).await;
            if (round + turn) % 2 == 0 {
                by_hand.push(measure(loop_by_hand(&consumer, &pool)).await);
            } else {
                ours.push(measure(consume(consumer, &inbox)).await);
                sqlx::query("TRUNCATE inbox_events").execute(&pool).await.unwrap();
            }
            sqlx::query("TRUNCATE effects").execute(&pool).await.unwrap();
        }
    }
    let (by_hand, ours) = (median(by_hand), median(ours));
    println!("by hand, without an inbox  {by_hand:>9.0}");
    println!("JetStreamConsumer          {ours:>9.0}");
    println!("ratio                      {:>9.3}", ours / by_hand);
}

async fn fill(context: &Context) {
    let config = stream::Config {
        name: "ORDERS".into(),
        subjects: vec!["orders".into()],
        ..stream::Config::default()
    };
    context.create_stream(config).await.unwrap();
    let mut sent = Vec::new();
    for n in 0..MESSAGES {
        let mut headers = HeaderMap::new();
        headers.insert("Nats-Msg-Id", format!("order-{n}").as_str());
        let payload = n.to_string().into();
        sent.push(context.publish_with_headers("orders", headers, payload).await.unwrap());
        if sent.len() == 1_000 {
            for sent in sent.drain(..) {
                sent.await.unwrap();
            }
        }
    }
}

async fn consumer(context: &Context, name: &str) -> PullConsumer {
    let config = Config {
        durable_name: Some(name.into()),
        ..Config::default()
    };
    let stream = context.get_stream("ORDERS").await.unwrap();
    stream.create_consumer(config).await.unwrap()
}

async fn measure(consume: impl Future<Output = ()>) -> f64 {
    let start = Instant::now();
    consume.await;
    f64::from(MESSAGES) / start.elapsed().as_secs_f64()
}

fn median(mut rates: Vec<f64>) -> f64 {
    rates.sort_by(f64::total_cmp);
    rates[rates.len() / 2]
}

/// What one would write without an inbox: fetch, handle in one transaction, commit, acknowledge and have that confirmed.
async fn loop_by_hand(consumer: &PullConsumer, pool: &PgPool) {
    let mut handled = 0;
    while handled < MESSAGES {
        let mut messages = consumer.fetch().max_messages(BATCH).messages().await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        let mut batch = Vec::new();
        while let Some(message) = messages.next().await {
            let message = message.unwrap();
            let n: i64 = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
            sqlx::query(EFFECT).bind(n).execute(&mut *tx).await.unwrap();
            batch.push(message);
            handled += 1;
        }
        tx.commit().await.unwrap();
        let acknowledged = batch.iter().map(|message| async {
            let request = Request::new()
                .payload("+ACK".into())
                .timeout(Some(Duration::from_secs(5)));
            let reply = message.reply.clone().unwrap();
            message.context.client().send_request(reply, request).await.unwrap();
        });
        futures_util::future::join_all(acknowledged).await;
    }
}

async fn consume(consumer: PullConsumer, inbox: &Inbox<PostgresInbox>) {
    let (handled, done) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let all = Arc::clone(&done);
    let summary = JetStreamConsumer::builder(consumer, inbox.clone())
        .with(ConsumerOptions::new().batch(NonZeroUsize::new(BATCH).unwrap()))
        .handler(async move |tx, message| {
            let n: i64 = std::str::from_utf8(&message.payload).unwrap().parse().unwrap();
            sqlx::query(EFFECT).bind(n).execute(&mut **tx).await.unwrap();
            if handled.fetch_add(1, Ordering::Relaxed) + 1 == MESSAGES {
                done.notify_one();
            }
            Ok::<_, Infallible>(())
        })
        .run(async move { all.notified().await })
        .await
        .unwrap();
    assert_eq!(
        (summary.handled, summary.unconfirmed),
        (u64::from(MESSAGES), 0),
        "{summary}"
    );
}
