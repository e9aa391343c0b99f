//! Fills a JetStream stream from a capture of deliveries, keeping their ids, so that `billing` can be run on it live.
//!
//! ```text
//! nats-server -js &
//! cargo run --example publish --features nats -- --create                     # the capture, into the stream ORDERS
//! cargo run --example publish --features nats -- --nats nats://localhost --stream ORDERS FILE
//! cargo run --example publish --features nats -- --help
//! ```

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use inbox::nats::async_nats::connection::State;
use inbox::nats::async_nats::header::NATS_MESSAGE_ID;
use inbox::nats::async_nats::jetstream::context::{
    Context, ContextBuilder, GetStreamErrorKind, PublishAckFuture, PublishError, PublishErrorKind,
};
use inbox::nats::async_nats::jetstream::message::PublishMessage;
use inbox::nats::async_nats::jetstream::publish::PublishAck;
use inbox::nats::async_nats::jetstream::{ErrorCode, stream};
use inbox::nats::async_nats::{Client, ConnectOptions, Event, HeaderMap, HeaderName, HeaderValue, ServerAddr};
use inbox::{BoxError, MessageId};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::time::Instant;

type Result<T, E = BoxError> = std::result::Result<T, E>;

/// How long a single answer is waited for, while the connection stands.
const ANSWER: Duration = Duration::from_secs(5);

/// How long nobody may answer for the stream: a cluster that elects a leader is soon done.
const NOBODY: Duration = Duration::from_secs(5);

/// Between two looks whether the connection is back.
const PAUSE: Duration = Duration::from_millis(50);

/// Publishes deliveries of a file to a JetStream stream, each with its id.
#[derive(Parser)]
#[command(after_help = r#"Every line of the input is one delivery, as JSON:
  {"subject": "order.created", "headers": {"Nats-Msg-Id": "..."}, "payload": {...}}
The payload and all headers are published as they stand. A delivery without an id is refused: it could not be told from a
redelivery.

The server's answer to every message is awaited. A message without one, because the server went away, is sent again with
the same id. Within the stream's duplicate window the server keeps one message of an id, so that this, and running the
program again, is safe; later the stream has it twice, and an inbox handles it once all the same. The order of the input is
kept, except among the messages on their way when the server went away (--in-flight 1 keeps even theirs)."#)]
struct Args {
    /// The deliveries, one JSON object a line; - is standard input [default: the capture in examples/data]
    #[arg(value_name = "FILE")]
    input: Option<PathBuf>,

    /// The server, as `nats://[USER:PASSWORD@]HOST[:PORT]`
    #[arg(long, value_name = "URL", default_value = "nats://localhost")]
    nats: String,

    /// The stream
    #[arg(long, value_name = "NAME", default_value = "ORDERS")]
    stream: String,

    /// The subject to publish to; `{subject}` stands for the delivery's own
    #[arg(long, value_name = "TEMPLATE", default_value = "{subject}")]
    subject: String,

    /// Makes the stream where there is none: on files, for all subjects that begin as the first delivery's does (`order.>`
    /// for `order.created`)
    #[arg(long)]
    create: bool,

    /// With --create: how long the server knows a message's id again
    #[arg(long, value_name = "DURATION", default_value = "2m", requires = "create", value_parser = humantime::parse_duration)]
    duplicate_window: Duration,

    /// Has at most this many messages without an answer
    #[arg(long, value_name = "N", default_value = "256", value_parser = clap::value_parser!(u16).range(1..=1_000))]
    in_flight: u16,

    /// Gives up when a message has been without an answer for this long
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = humantime::parse_duration)]
    patience: Duration,
}

#[tokio::main]
async fn main() -> ExitCode {
    match run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("publish: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<()> {
    let mut deliveries = deliveries(args.input.as_deref(), &args.subject)?;
    let first = deliveries.next().ok_or("the input has no delivery")??;
    let server = Server::connect(&args.nats, args.patience).await?;
    let stream = server.stream(&args, &first.subject).await?;

    let mut tally = Tally {
        first: stream.state.last_sequence + 1,
        ..Tally::default()
    };
    let mut unanswered = FuturesUnordered::new();
    // Deliveries before a bad line are published; that line is then what ends the program.
    let mut bad = None;
    for delivery in std::iter::once(Ok(first)).chain(deliveries) {
        let delivery = delivery.and_then(|delivery| delivery.is_taken_by(&stream.config).map(|()| delivery));
        let delivery = match delivery {
            Ok(delivery) => delivery,
            Err(error) => {
                bad = Some(error);
                break;
            }
        };
        if unanswered.len() >= usize::from(args.in_flight) {
            if let Some(answer) = unanswered.next().await {
                tally.add(answer)?;
            }
        }
        // Sent here, one after the other, and only awaited side by side: that keeps the order.
        let sent = server.send(&delivery).await;
        unanswered.push(server.answer(delivery, sent));
    }
    while let Some(answer) = unanswered.next().await {
        tally.add(answer)?;
    }
    if let Some(error) = bad {
        return Err(format!("{error}; the {} deliveries before it are published", tally.answered).into());
    }

    println!("deliveries          {:>12}", tally.answered);
    println!("published           {:>12}", tally.stored.len());
    println!("duplicates          {:>12}", tally.answered - tally.stored.len());
    println!("sent again          {:>12}", tally.sent_again);
    let stream = server.context.get_stream(&args.stream).await?;
    println!("in the stream       {:>12}", stream.cached_info().state.messages);
    Ok(())
}

/// What the server answered so far.
#[derive(Default)]
struct Tally {
    answered: usize,
    /// The lowest sequence that a message of this run can have.
    first: u64,
    /// The sequences of the messages that this run brought into the stream.
    stored: HashSet<u64>,
    sent_again: usize,
}

impl Tally {
    fn add(&mut self, answer: Result<Answer>) -> Result<()> {
        let Answer { ack, sent_again } = answer.map_err(|error| {
            format!(
                "{error}; {} deliveries were answered before it, and running this again goes on from there",
                self.answered
            )
        })?;
        self.answered += 1;
        self.sent_again += sent_again;
        // Whoever sends again because an answer was lost is told of a duplicate, which is the message of this run itself.
        if !ack.duplicate || (sent_again > 0 && ack.sequence >= self.first) {
            self.stored.insert(ack.sequence);
        }
        if self.answered % 10_000 == 0 {
            eprintln!("{} deliveries", self.answered);
        }
        Ok(())
    }
}

struct Answer {
    ack: PublishAck,
    sent_again: usize,
}

/// A message on its way.
struct Sent {
    ack: Result<PublishAckFuture, PublishError>,
    /// Changes when the connection breaks; no answer comes after that.
    breaks: watch::Receiver<()>,
}

/// What became of a message instead of being stored.
enum Failed {
    /// Nobody said anything.
    NoAnswer,
    /// No server takes messages for the stream, at the moment at least.
    Nobody(PublishError),
    Refused(PublishError),
}

impl Sent {
    async fn outcome(mut self) -> Result<PublishAck, Failed> {
        let answer = match self.ack {
            Ok(ack) => tokio::select! {
                answer = ack.into_future() => answer,
                _ = self.breaks.changed() => return Err(Failed::NoAnswer),
            },
            Err(error) => Err(error),
        };
        answer.map_err(|error| match error.kind() {
            PublishErrorKind::TimedOut | PublishErrorKind::BrokenPipe => Failed::NoAnswer,
            PublishErrorKind::StreamNotFound => Failed::Nobody(error),
            _ => Failed::Refused(error),
        })
    }
}

/// The connection to the server, which is made again whenever it breaks.
struct Server {
    client: Client,
    context: Context,
    breaks: watch::Receiver<()>,
    name: String,
    patience: Duration,
}

impl Server {
    async fn connect(url: &str, patience: Duration) -> Result<Self> {
        let unreachable = |name: &str, error: BoxError| {
            format!("cannot connect to {name}: {error}; is a nats-server running there? --nats says where it is")
        };
        let address: ServerAddr = url
            .parse()
            // Behind a user and a password.
            .map_err(|error| unreachable(url.rsplit('@').next().unwrap_or(url), Box::new(error)))?;
        let name = format!("{}:{}", address.host(), address.port());
        // async-nats does not look at the user in a URL.
        let options = match (address.username(), address.password()) {
            (Some(user), password) => {
                ConnectOptions::with_user_and_password(user.into(), password.unwrap_or_default().into())
            }
            (None, _) => ConnectOptions::new(),
        };
        let (broken, breaks) = watch::channel(());
        let client = options
            .event_callback(move |event| {
                match event {
                    Event::Disconnected => {
                        eprintln!("publish: the connection broke; what is without an answer will be sent again");
                        broken.send_replace(());
                    }
                    Event::ServerError(error) => eprintln!("publish: the server says: {error}"),
                    _ => {}
                }
                std::future::ready(())
            })
            .connect(address)
            .await
            .map_err(|error| unreachable(&name, Box::new(error)))?;
        Ok(Self {
            context: ContextBuilder::new().timeout(ANSWER).build(client.clone()),
            client,
            breaks,
            name,
            patience,
        })
    }

    /// The stream as it is, or a new one that takes subjects like this one.
    async fn stream(&self, args: &Args, subject: &str) -> Result<stream::Info> {
        let name = &args.stream;
        match self.context.get_stream(name).await {
            Ok(found) => {
                let info = found.cached_info().clone();
                if args.create {
                    eprintln!(
                        "publish: stream {name:?} is there already, and stays as it is, with a duplicate window of {}",
                        humantime::format_duration(info.config.duplicate_window)
                    );
                }
                return Ok(info);
            }
            Err(error) => match error.kind() {
                GetStreamErrorKind::JetStream(why) if why.error_code() == ErrorCode::STREAM_NOT_FOUND => {}
                GetStreamErrorKind::EmptyName | GetStreamErrorKind::InvalidStreamName => {
                    return Err(format!("{name:?} cannot be a stream's name").into());
                }
                _ => {
                    return Err(format!(
                        "cannot look up the stream {name:?}: {error}; does the server have JetStream (nats-server -js), and \
                         may this user ask it?"
                    )
                    .into());
                }
            },
        }
        if !args.create {
            return Err(format!(
                "there is no stream {name:?} on {}; --create makes it, and --stream names another",
                self.name
            )
            .into());
        }
        let config = stream::Config {
            name: name.clone(),
            subjects: vec![match subject.split_once('.') {
                Some((beginning, _)) => format!("{beginning}.>"),
                None => subject.into(),
            }],
            storage: stream::StorageType::File,
            duplicate_window: args.duplicate_window,
            ..stream::Config::default()
        };
        let made = self
            .context
            .create_stream(config)
            .await
            .map_err(|error| format!("cannot make the stream {name:?}: {error}"))?;
        Ok(made.cached_info().clone())
    }

    async fn send(&self, delivery: &Delivery) -> Sent {
        // Before sending: a break in between counts.
        let mut breaks = self.breaks.clone();
        breaks.mark_unchanged();
        let message = delivery.message.clone();
        Sent {
            ack: self.context.send_publish(delivery.subject.clone(), message).await,
            breaks,
        }
    }

    /// Waits for the answer to a message; sends it again for as long as there is none.
    async fn answer(&self, delivery: Delivery, mut sent: Sent) -> Result<Answer> {
        let begun = Instant::now();
        let mut nobody_since = None;
        let mut sent_again = 0;
        loop {
            let number = delivery.number;
            match sent.outcome().await {
                Ok(ack) => return Ok(Answer { ack, sent_again }),
                Err(Failed::Nobody(_)) if nobody_since.get_or_insert_with(Instant::now).elapsed() < NOBODY => {}
                Err(Failed::Nobody(error) | Failed::Refused(error)) => {
                    return Err(format!("line {number}: {}: {error}", delivery.subject).into());
                }
                Err(Failed::NoAnswer) => {}
            }
            // What is sent without a connection would only wait in the client.
            loop {
                if begun.elapsed() >= self.patience {
                    let patience = humantime::format_duration(self.patience);
                    return Err(format!("line {number}: no answer from {} for {patience}", self.name).into());
                }
                tokio::time::sleep(PAUSE).await;
                if self.client.connection_state() == State::Connected {
                    break;
                }
            }
            sent_again += 1;
            sent = self.send(&delivery).await;
        }
    }
}

/// One delivery of the capture, as it is to be published.
struct Delivery {
    /// Its line in the input, from 1.
    number: usize,
    subject: String,
    message: PublishMessage,
}

impl Delivery {
    fn parse(number: usize, line: &str, template: &str) -> Result<Self> {
        let raw: RawDelivery = serde_json::from_str(line).map_err(|error| format!("not a delivery: {error}"))?;
        let (ids, others): (Vec<_>, Vec<_>) = raw
            .headers
            .iter()
            .partition(|(name, _)| name.eq_ignore_ascii_case(NATS_MESSAGE_ID.as_ref()));
        let Some((_, id)) = ids.first() else {
            return Err("no Nats-Msg-Id header, and without an id a delivery cannot be told from a redelivery".into());
        };
        if ids.iter().any(|(_, other)| other != id) {
            return Err("two Nats-Msg-Id headers that differ".into());
        }
        // What no inbox would take should not get into the stream.
        MessageId::new(id)?;
        let mut headers = HeaderMap::new();
        for (name, value) in others {
            headers.insert(name.parse::<HeaderName>()?, value.parse::<HeaderValue>()?);
        }
        // The server knows an id again by the header of this very name only.
        headers.insert(NATS_MESSAGE_ID, id.parse::<HeaderValue>()?);
        let subject = template.replace("{subject}", &raw.subject);
        let is_plain = |part: &str| !matches!(part, "" | "*" | ">") && !part.contains(char::is_whitespace);
        if !subject.split('.').all(is_plain) {
            return Err(format!("{subject:?} is no subject to publish to").into());
        }
        Ok(Self {
            number,
            subject,
            message: PublishMessage::build()
                .headers(headers)
                .payload(raw.payload.get().to_owned().into()),
        })
    }

    /// Refuses what would go to another stream, or to none.
    fn is_taken_by(&self, stream: &stream::Config) -> Result<()> {
        if stream.subjects.iter().any(|pattern| matches(pattern, &self.subject)) {
            return Ok(());
        }
        Err(format!(
            "line {}: the stream {:?} does not take the subject {:?}, but {:?}; --subject puts another in its place",
            self.number, stream.name, self.subject, stream.subjects
        )
        .into())
    }
}

/// Whether a subject is one of those that a pattern with `*` and `>` means.
fn matches(pattern: &str, subject: &str) -> bool {
    let mut parts = subject.split('.');
    for wanted in pattern.split('.') {
        match (wanted, parts.next()) {
            (">", Some(_)) => return true,
            ("*", Some(_)) => {}
            (wanted, Some(part)) if wanted == part => {}
            _ => return false,
        }
    }
    parts.next().is_none()
}

#[derive(Deserialize)]
struct RawDelivery {
    subject: String,
    headers: BTreeMap<String, String>,
    payload: Box<RawValue>,
}

/// The deliveries of the input, or what is wrong with one and in which line.
fn deliveries(input: Option<&Path>, template: &str) -> Result<impl Iterator<Item = Result<Delivery>>> {
    let capture = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/examples/data/order-deliveries.ndjson"
    ));
    let path = input.unwrap_or(capture);
    let reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(BufReader::new(io::stdin()))
    } else {
        let file = File::open(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Box::new(BufReader::new(file))
    };
    Ok(reader.lines().enumerate().map(move |(index, line)| {
        let number = index + 1;
        line.map_err(BoxError::from)
            .and_then(|line| Delivery::parse(number, &line, template))
            .map_err(|error| format!("line {number}: {error}").into())
    }))
}
