//! A billing consumer: reads deliveries of order events and writes one invoice for every `order.created`, exactly once,
//! however often an event is delivered and wherever the process is killed.
//!
//! ```text
//! cargo run --example billing                       # a real capture: 554 deliveries of 400 events
//! cargo run --example billing -- --crash-at 100     # dies in the 100th delivery's transaction; run again to go on
//! cargo run --example billing --features nats -- --nats nats://localhost   # live, from a JetStream stream, until it is drained
//! cargo run --example billing -- --help
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use inbox::{BoxError, Inbox, InboxStore, MessageId, Outcome, Transactions, Upkeep};
use serde::Deserialize;

#[cfg(feature = "nats")]
#[path = "billing/live.rs"]
mod live;
#[cfg(feature = "postgres")]
#[path = "billing/postgres.rs"]
mod postgres;
#[cfg(feature = "redis")]
#[path = "billing/redis.rs"]
mod redis;
#[path = "billing/sqlite.rs"]
mod sqlite;

type Result<T, E = BoxError> = std::result::Result<T, E>;

/// Invoices each created order once, from a file of deliveries.
#[derive(Parser)]
#[command(after_help = r#"Every line of the input is one delivery, as JSON:
  {"subject": "order.created", "headers": {"Nats-Msg-Id": "..."},
   "payload": {"order_id": "...", "customer_id": "...", "amount_cents": 1, "currency": "EUR"}}
A message is claimed and its invoice written in one transaction, so a second delivery, or a second run, finds it done
and skips it. The last line printed checks the invoices against the events recorded."#)]
struct Args {
    /// The deliveries, one JSON object a line; - is standard input [default: the capture in examples/data]
    #[arg(long, value_name = "PATH")]
    input: Option<PathBuf>,

    /// Where records and invoices are kept: `sqlite:PATH`, `postgres://USER@HOST/DATABASE` or `redis://HOST:PORT`
    /// [default: sqlite, billing.db in cargo's target folder]
    #[arg(long, value_name = "STORE")]
    store: Option<String>,

    /// The consumer group; each group handles every event once
    #[arg(long, value_name = "NAME", default_value = "billing")]
    group: String,

    /// Handles this many deliveries in one transaction
    #[arg(long, value_name = "N")]
    batch: Option<NonZeroUsize>,

    /// Kills this process (SIGKILL) in the transaction of the Nth delivery, after claim and effect
    #[arg(long, value_name = "N")]
    crash_at: Option<NonZeroUsize>,

    /// Takes the deliveries from a JetStream stream instead of a file, until it is drained, and acknowledges each after its
    /// commit: `nats://[USER:PASSWORD@]HOST[:PORT]`
    #[arg(long, value_name = "URL", conflicts_with = "input")]
    nats: Option<String>,

    /// With --nats: the stream
    #[arg(long, value_name = "NAME", default_value = "ORDERS", requires = "nats")]
    stream: String,

    /// With --nats: the durable consumer, which is made where there is none
    #[arg(long, value_name = "NAME", default_value = "billing", requires = "nats")]
    durable: String,

    /// With --nats: has this many transactions open at once
    #[arg(long, value_name = "N", default_value = "1", requires = "nats")]
    workers: NonZeroUsize,

    /// With --nats: goes on when the stream is drained, until Ctrl-C
    #[arg(long, requires = "nats")]
    follow: bool,

    /// Takes this much longer over each new message, so that there is time to kill something
    #[arg(long, value_name = "MILLISECONDS", default_value = "0")]
    dawdle: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("billing: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let store = args.store.clone().map_or_else(default_store, Ok)?;
    match store.split_once(':') {
        Some(("sqlite", ":memory:")) => {
            Err("a store in memory would be gone before its books are read; name a file".into())
        }
        Some(("sqlite", path)) if !path.is_empty() => {
            bill(sqlite::SqliteLedger::open(Path::new(path)).await?, &args).await
        }
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => bill(postgres::PostgresLedger::connect(&store).await?, &args).await,
        #[cfg(feature = "redis")]
        Some(("redis" | "rediss", _)) => bill(redis::RedisLedger::connect(&store).await?, &args).await,
        _ => Err(format!(
            "unknown store {store:?}; this program knows sqlite:PATH, and, built with --features postgres,redis, \
             postgres://USER@HOST/DATABASE and redis://HOST:PORT"
        )
        .into()),
    }
}

fn default_store() -> Result<String> {
    // cargo puts an example into TARGET/PROFILE/examples.
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(3).unwrap_or(Path::new("."));
    Ok(format!("sqlite:{}", target.join("billing.db").display()))
}

/// The program, over any database.
async fn bill<L: Ledger>(ledger: L, args: &Args) -> Result<()> {
    let inbox = Inbox::new(ledger.inbox(), args.group.as_str())?;
    inbox.setup().await?;
    ledger.set_up().await?;
    match &args.nats {
        None => bill_from_file::<L>(&inbox, args).await?,
        #[cfg(feature = "nats")]
        Some(url) => live::bill::<L>(&inbox, url, args).await?,
        #[cfg(not(feature = "nats"))]
        Some(_) => return Err("this program was built without JetStream; build it with --features nats".into()),
    }
    let books = ledger.books().await?;
    println!("invoices            {:>12}", books.invoices);
    for (currency, cents) in &books.totals {
        println!("total {currency}           {:>12} ({cents} cents)", Money(*cents));
    }
    books.check()
}

async fn bill_from_file<L: Ledger>(inbox: &Inbox<L::Inbox>, args: &Args) -> Result<()> {
    let mut tally = Tally::default();
    // Deliveries before an unreadable line are handled; that line is then what ends the program.
    let mut unreadable = None;
    let mut batch = Vec::new();
    for delivery in deliveries(args.input.as_deref())? {
        match delivery {
            Ok(delivery) => batch.push(delivery),
            Err(error) => {
                unreadable = Some(error);
                break;
            }
        }
        if batch.len() == args.batch.map_or(1, NonZeroUsize::get) {
            handle::<L>(inbox, &batch, args, &mut tally).await?;
            batch.clear();
        }
    }
    handle::<L>(inbox, &batch, args, &mut tally).await?;
    if let Some(at) = args.crash_at.filter(|at| at.get() > tally.deliveries) {
        eprintln!(
            "billing: did not crash: there are {} deliveries, and {at} was asked for",
            tally.deliveries
        );
    }
    if let Some(error) = unreadable {
        return Err(format!("{error}; the {} deliveries before it are handled", tally.deliveries).into());
    }

    println!("deliveries          {:>12}", tally.deliveries);
    println!("duplicates skipped  {:>12}", tally.duplicates);
    println!("new invoices        {:>12}", tally.invoices);
    Ok(())
}

/// Handles deliveries, one by one or as a batch, until every one of them is done with.
async fn handle<L: Ledger>(inbox: &Inbox<L::Inbox>, batch: &[Delivery], args: &Args, tally: &mut Tally) -> Result<()> {
    let crash_at = args.crash_at.map(NonZeroUsize::get);
    let effect = async |tx: &mut Tx<L>, delivery: &Delivery| {
        // Other subjects only count as handled.
        if delivery.is_order() {
            L::invoice(tx, inbox.group().as_str(), delivery).await?;
        }
        tokio::time::sleep(Duration::from_millis(args.dawdle)).await;
        crash_if(crash_at == Some(delivery.number));
        Ok::<_, BoxError>(())
    };
    let mut waiting: Vec<&Delivery> = batch.iter().collect();
    while !waiting.is_empty() {
        let outcomes = if args.batch.is_some() {
            inbox
                .process_batch(
                    &waiting,
                    |delivery| delivery.id,
                    async |tx, new| {
                        for delivery in new {
                            effect(tx, delivery).await?;
                        }
                        Ok::<_, BoxError>(())
                    },
                )
                .await
        } else {
            let delivery = waiting[0];
            vec![inbox.process(delivery.id, async |tx| effect(tx, delivery).await).await]
        };
        let mut again = Vec::new();
        for (delivery, outcome) in waiting.into_iter().zip(outcomes) {
            match outcome.map_err(|error| format!("delivery {}: {error:#}", delivery.number))? {
                Outcome::Processed(()) => tally.invoices += usize::from(delivery.is_order()),
                Outcome::Duplicate(_) => {
                    crash_if(crash_at == Some(delivery.number));
                    tally.duplicates += 1;
                }
                // A broker would deliver it again, because it is not acknowledged.
                Outcome::InFlight(_) => {
                    again.push(delivery);
                    continue;
                }
            }
            tally.deliveries += 1;
            if tally.deliveries % 10_000 == 0 {
                eprintln!("{} deliveries", tally.deliveries);
            }
        }
        waiting = again;
        if !waiting.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    Ok(())
}

/// Dies as by a power cut: nothing is unwound and no destructor runs.
fn crash_if(now: bool) {
    if now {
        eprintln!("billing: crashing, as asked");
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}

#[derive(Default)]
struct Tally {
    deliveries: usize,
    duplicates: usize,
    invoices: usize,
}

/// One delivery of an order event.
struct Delivery {
    /// Its place in the input, from 1.
    number: usize,
    id: MessageId,
    subject: String,
    order: Payload,
}

impl Delivery {
    fn is_order(&self) -> bool {
        self.subject == "order.created"
    }

    fn parse(number: usize, line: &str) -> Result<Self> {
        let raw: RawDelivery = serde_json::from_str(line).map_err(|error| format!("not a delivery: {error}"))?;
        let mut ids = raw
            .headers
            .iter()
            .filter(|(name, _)| name.eq_ignore_ascii_case("Nats-Msg-Id"));
        let Some((_, id)) = ids.next() else {
            return Err("no Nats-Msg-Id header, and without an id a delivery cannot be told from a redelivery".into());
        };
        if ids.any(|(_, other)| other != id) {
            return Err("two Nats-Msg-Id headers that differ".into());
        }
        Ok(Self {
            number,
            id: MessageId::new(id)?,
            subject: raw.subject,
            order: raw.payload,
        })
    }
}

#[derive(Deserialize)]
struct RawDelivery {
    subject: String,
    headers: BTreeMap<String, String>,
    payload: Payload,
}

#[derive(Deserialize)]
struct Payload {
    order_id: String,
    customer_id: String,
    amount_cents: i64,
    currency: String,
}

/// The deliveries of the input, or what is wrong with one and in which line.
fn deliveries(input: Option<&Path>) -> Result<impl Iterator<Item = Result<Delivery>>> {
    let capture = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/examples/data/order-deliveries.ndjson"
    ));
    let path = input.unwrap_or(capture);
    let reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Box::new(BufReader::new(file))
    };
    Ok(reader.lines().enumerate().map(|(index, line)| {
        let number = index + 1;
        line.map_err(BoxError::from)
            .and_then(|line| Delivery::parse(number, &line))
            .map_err(|error| format!("line {number}: {error}").into())
    }))
}

/// What is in the books.
struct Books {
    invoices: i64,
    /// How many different events the invoices are for.
    invoiced_events: i64,
    /// How many invoices are for an event that the inbox has no record of.
    unrecorded: i64,
    /// How many events the inbox has a record of.
    recorded_events: i64,
    /// In cents, by currency.
    totals: BTreeMap<String, i64>,
}

impl Books {
    /// The last line: every invoice is for an event of its own, and that event is recorded.
    fn check(&self) -> Result<()> {
        let line = format!(
            "{} invoices for {} distinct events, of {} events recorded",
            self.invoices, self.invoiced_events, self.recorded_events
        );
        if self.invoices == self.invoiced_events && self.unrecorded == 0 {
            println!("check: {line}: exactly one each");
            return Ok(());
        }
        Err(format!("check FAILED: {line}, {} invoices without a record", self.unrecorded).into())
    }
}

struct Money(i64);

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}.{:02}", self.0 / 100, self.0 % 100))
    }
}

/// The open transaction of a ledger's inbox.
type Tx<L> = <<L as Ledger>::Inbox as InboxStore>::Tx;

/// What this program needs of a database beside its inbox: a place for invoices.
trait Ledger {
    type Inbox: Transactions + Upkeep;

    /// The inbox in the same database.
    fn inbox(&self) -> Self::Inbox;

    /// Makes a place for invoices.
    async fn set_up(&self) -> Result<()>;

    /// Writes the invoice for an order, in the open transaction.
    async fn invoice(tx: &mut Tx<Self>, group: &str, order: &Delivery) -> Result<()>;

    /// Reads the books: all invoices and all records, of every group.
    async fn books(&self) -> Result<Books>;
}
