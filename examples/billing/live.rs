//! Deliveries from a JetStream stream, live.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use inbox::nats::async_nats::jetstream::consumer::PullConsumer;
use inbox::nats::async_nats::jetstream::consumer::pull::Config;
use inbox::nats::async_nats::jetstream::{self, Context};
use inbox::nats::async_nats::{ConnectOptions, ServerAddr};
use inbox::nats::{JetStreamConsumer, JetStreamMessage};
use inbox::{BoxError, ConsumerOptions, Error, Inbox, Transactions};

use crate::{Args, Delivery, Ledger, Result, Tx, crash_if};

const BATCH: NonZeroUsize = NonZeroUsize::new(100).unwrap();

pub(crate) async fn bill<L: Ledger>(inbox: &Inbox<L::Inbox>, url: &str, args: &Args) -> Result<()> {
    let context = jetstream::new(connect(url).await?);
    let consumer = consumer(&context, &args.stream, &args.durable).await?;
    let crash_at = args.crash_at.map(NonZeroUsize::get);
    // SQLite has one writer; a pool has so many connections.
    let workers = match inbox.store().max_transactions() {
        Some(most) if most < args.workers => {
            eprintln!("this store has {most} transactions at once at the most, so that is how many workers there are");
            most
        }
        _ => args.workers,
    };
    let (handled, group) = (&AtomicUsize::new(0), inbox.group().as_str());

    let summary = JetStreamConsumer::builder(consumer.clone(), inbox.clone())
        .with(
            ConsumerOptions::new()
                .batch(args.batch.unwrap_or(BATCH))
                .concurrency(workers),
        )
        .handler(async |tx: &mut Tx<L>, message: &JetStreamMessage| {
            let number = handled.fetch_add(1, Ordering::Relaxed) + 1;
            let delivery = Delivery {
                number,
                id: message.id(),
                subject: message.subject.to_string(),
                order: serde_json::from_slice(&message.payload)
                    .map_err(|error| Error::poison(format!("not an order: {error}")))?,
            };
            if delivery.is_order() {
                L::invoice(tx, group, &delivery).await?;
            }
            tokio::time::sleep(Duration::from_millis(args.dawdle)).await;
            crash_if(crash_at == Some(number));
            if number % 10_000 == 0 {
                eprintln!("{number} messages");
            }
            Ok::<_, BoxError>(())
        })
        .run(async {
            if args.follow {
                interrupted().await;
            } else {
                tokio::select! {
                    () = drained(&consumer) => {}
                    () = interrupted() => {}
                }
            }
        })
        .await?;
    println!("{summary}");
    Ok(())
}

/// async-nats does not look at the user in a URL.
async fn connect(url: &str) -> Result<inbox::nats::async_nats::Client> {
    let unreachable = |error: BoxError| format!("cannot connect to {}: {error}", redacted(url));
    let address: ServerAddr = url.parse().map_err(|error| unreachable(Box::new(error)))?;
    let options = match (address.username(), address.password()) {
        (Some(user), password) => {
            ConnectOptions::with_user_and_password(user.into(), password.unwrap_or_default().into())
        }
        (None, _) => ConnectOptions::new(),
    };
    Ok(options
        .connect(address)
        .await
        .map_err(|error| unreachable(Box::new(error)))?)
}

fn redacted(url: &str) -> &str {
    url.rsplit('@').next().unwrap_or(url)
}

async fn consumer(context: &Context, stream: &str, durable: &str) -> Result<PullConsumer> {
    let found = context
        .get_stream(stream)
        .await
        .map_err(|error| format!("no stream {stream:?}: {error}; fill one with the example `publish`"))?;
    let config = Config {
        durable_name: Some(durable.into()),
        ..Config::default()
    };
    Ok(found
        .get_or_create_consumer(durable, config)
        .await
        .map_err(|error| format!("no consumer {durable:?} on stream {stream:?}: {error}"))?)
}

/// Ends when nothing waits to be delivered and nothing delivered is unanswered, by this process or another.
async fn drained(consumer: &PullConsumer) {
    loop {
        // A server that is away is not drained.
        if let Ok(info) = consumer.get_info().await {
            if info.num_pending == 0 && info.num_ack_pending == 0 {
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Ends with Ctrl-C, or when a service manager wants this process to end.
async fn interrupted() {
    use tokio::signal::unix::{SignalKind, signal};
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
}
