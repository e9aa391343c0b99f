//! The whole program on JetStream: consumers that are killed, brokers and databases that go away.

#![cfg(all(feature = "nats", feature = "sqlite"))]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use inbox::nats::async_nats::jetstream::consumer::PullConsumer;
use inbox::nats::async_nats::jetstream::consumer::pull::Config;
use inbox::nats::async_nats::jetstream::{self, Context, stream};
use inbox::nats::async_nats::{self, HeaderMap};
use inbox_test_servers::Nats;
use serde_json::Value;
use tempfile::TempDir;

const CAPTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/order-deliveries.ndjson");

/// Where the books are kept.
enum Books {
    Sqlite(TempDir),
    #[cfg(feature = "postgres")]
    Postgres(inbox_test_servers::Postgres),
    #[cfg(feature = "redis")]
    Redis(inbox_test_servers::Redis),
}

impl Books {
    fn url(&self) -> String {
        match self {
            Self::Sqlite(folder) => format!("sqlite:{}", folder.path().join("billing.db").display()),
            #[cfg(feature = "postgres")]
            Self::Postgres(server) => server.url(),
            #[cfg(feature = "redis")]
            Self::Redis(server) => server.url(),
        }
    }
}

fn sqlite() -> Books {
    Books::Sqlite(tempfile::tempdir().unwrap())
}

/// The program, built with the features of this test.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.ancestors().nth(2).unwrap();
        let features = [
            ("nats", true),
            ("postgres", cfg!(feature = "postgres")),
            ("redis", cfg!(feature = "redis")),
        ];
        let features: Vec<&str> = features.iter().filter(|(_, on)| *on).map(|(name, _)| *name).collect();
        let mut build = Command::new(env!("CARGO"));
        build
            .args([
                "build",
                "--quiet",
                "--example",
                "billing",
                "--features",
                &features.join(","),
            ])
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().unwrap().success());
        profile.join("examples").join("billing")
    })
}

fn billing(nats: &Nats, books: &Books, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(["--nats", &nats.url(), "--store", &books.url()])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

async fn connect(nats: &Nats) -> Context {
    jetstream::new(async_nats::connect(nats.url()).await.unwrap())
}

/// The capture in a stream whose duplicate window is short, so that most of its repetitions come through; and a consumer
/// that soon gives up on a process that died.
async fn fill(context: &Context) -> u64 {
    let config = stream::Config {
        name: "ORDERS".into(),
        subjects: vec!["order.>".into()],
        duplicate_window: Duration::from_millis(100),
        ..stream::Config::default()
    };
    let stream = context.create_stream(config).await.unwrap();
    let config = Config {
        durable_name: Some("billing".into()),
        ack_wait: Duration::from_secs(1),
        ..Config::default()
    };
    stream.create_consumer(config).await.unwrap();
    let mut last = 0;
    for (n, line) in fs::read_to_string(CAPTURE).unwrap().lines().enumerate() {
        let delivery: Value = serde_json::from_str(line).unwrap();
        let mut headers = HeaderMap::new();
        for (name, value) in delivery["headers"].as_object().unwrap() {
            headers.append(name.as_str(), value.as_str().unwrap());
        }
        let subject = delivery["subject"].as_str().unwrap().to_owned();
        let payload = delivery["payload"].to_string().into();
        let sent = context.publish_with_headers(subject, headers, payload).await.unwrap();
        last = sent.await.unwrap().sequence.max(last);
        if n % 100 == 99 {
            tokio::time::sleep(Duration::from_millis(120)).await;
        }
    }
    last
}

/// Deliveries that wait, and such as are unanswered; `None` while the server is away.
async fn left(context: &Context) -> Option<(u64, usize)> {
    let consumer: PullConsumer = context.get_consumer_from_stream("billing", "ORDERS").await.ok()?;
    let info = consumer.cached_info();
    Some((info.num_pending, info.num_ack_pending))
}

fn assert_right(output: &std::process::Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{stdout}{stderr}");
    for total in [
        "invoices                     296\n",
        "(15954595 cents)",
        "(10860042 cents)",
        "(11232514 cents)",
        "check: 296 invoices for 296 distinct events, of 400 events recorded",
    ] {
        assert!(stdout.contains(total), "{total:?} is missing:\n{stdout}{stderr}");
    }
    stdout
}

/// Four processes, one of which is killed every 200 ms and started again.
async fn killed_and_drained(books: Books) {
    let nats = Nats::start();
    let context = connect(&nats).await;
    let stored = fill(&context).await;
    assert!(stored > 400, "only {stored} of the capture came through");
    let spawn = || {
        billing(
            &nats,
            &books,
            &["--batch", "5", "--workers", "2", "--dawdle", "30", "--follow"],
        )
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
    };
    let mut processes: Vec<Child> = (0..4).map(|_| spawn()).collect();
    let mut kills = 0;
    while left(&context).await.unwrap() != (0, 0) {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let process = &mut processes[kills % 4];
        process.kill().unwrap();
        process.wait().unwrap();
        *process = spawn();
        kills += 1;
        assert!(kills < 600, "never drained: {:?}", left(&context).await);
    }
    for mut process in processes {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    assert!(kills >= 5, "{kills}");
    assert_right(&billing(&nats, &books, &[]).output().unwrap());
    assert_eq!(left(&context).await, Some((0, 0)));
}

#[tokio::test]
async fn four_processes_one_killed_every_200_ms_on_sqlite() {
    killed_and_drained(sqlite()).await;
}

#[cfg(feature = "postgres")]
#[tokio::test]
async fn four_processes_one_killed_every_200_ms_on_postgres() {
    killed_and_drained(Books::Postgres(inbox_test_servers::Postgres::start())).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn four_processes_one_killed_every_200_ms_on_redis() {
    let server = inbox_test_servers::Redis::start(&inbox_test_servers::Redis::DURABLE);
    killed_and_drained(Books::Redis(server)).await;
}

#[tokio::test]
async fn drained_it_ends_by_itself_and_a_second_run_finds_nothing_to_do() {
    let (nats, books) = (Nats::start(), sqlite());
    let context = connect(&nats).await;
    fill(&context).await;
    let first = assert_right(&billing(&nats, &books, &["--workers", "4"]).output().unwrap());
    assert!(first.contains("400 handled"), "{first}");
    let second = assert_right(&billing(&nats, &books, &[]).output().unwrap());
    assert!(second.contains("0 handled, 0 duplicates"), "{second}");
    // Another durable consumer gets everything again, and finds duplicates.
    let third = assert_right(&billing(&nats, &books, &["--durable", "again"]).output().unwrap());
    assert!(third.contains("0 handled, "), "{third}");
}

#[tokio::test]
async fn followed_it_ends_cleanly_when_it_is_told_to() {
    let (nats, books) = (Nats::start(), sqlite());
    let context = connect(&nats).await;
    fill(&context).await;
    let mut process = billing(&nats, &books, &["--follow"]).spawn().unwrap();
    wait_for(&mut process, &context, (0, 0)).await;
    assert_right(&interrupt(process));
}

#[tokio::test]
async fn what_is_wrong_with_the_stream_is_said() {
    let (nats, books) = (Nats::start(), sqlite());
    let fails = |command: &mut Command, expected: &str| {
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains(expected), "{stderr}");
    };
    fails(&mut billing(&nats, &books, &["--stream", "NONE"]), "no stream \"NONE\"");
    let mut nowhere = Command::new(program());
    nowhere.args(["--nats", "nats://user:secret@127.0.0.1:1", "--store", &books.url()]);
    fails(&mut nowhere, "cannot connect to 127.0.0.1:1");
}

/// The CPU time that a process has used, in ticks of a hundredth of a second.
#[cfg(target_os = "linux")]
fn cpu(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the name in parentheses, user and system time are the 12th and 13th field: proc(5).
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// What a process uses in four seconds in which it can do nothing, of the 400 ticks that go by.
#[cfg(target_os = "linux")]
async fn assert_idle(pid: u32) {
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = cpu(pid);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let used = cpu(pid) - before;
    assert!(used <= 40, "{used} ticks of processor time while waiting");
}

/// Waits until no more than so many messages are left, while the process lives.
async fn wait_for(process: &mut Child, context: &Context, most: (u64, usize)) {
    while left(context)
        .await
        .is_none_or(|left| left.0 > most.0 || left.1 > most.1)
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
        if process.try_wait().unwrap().is_some() {
            let mut stderr = String::new();
            process.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
            panic!("it has ended: {stderr}");
        }
    }
}

fn interrupt(process: Child) -> std::process::Output {
    let pid = rustix::process::Pid::from_child(&process);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    process.wait_with_output().unwrap()
}

/// Both servers go in mid-stream, and come back; what waits for them does nearly nothing meanwhile.
#[cfg(all(feature = "postgres", target_os = "linux"))]
#[tokio::test]
async fn broker_and_database_are_killed_in_mid_stream_and_waited_for_in_peace() {
    use inbox_test_servers::{Postgres, Stop};

    let mut nats = Nats::start();
    let context = connect(&nats).await;
    let stored = fill(&context).await;
    let mut books = Books::Postgres(Postgres::start());
    let mut process = billing(&nats, &books, &["--batch", "5", "--dawdle", "10", "--follow"])
        .spawn()
        .unwrap();
    let pid = process.id();

    wait_for(&mut process, &context, (stored - 50, 1_000)).await;
    let Books::Postgres(postgres) = &mut books else {
        unreachable!()
    };
    postgres.stop(Stop::Immediate);
    assert_idle(pid).await;
    postgres.start_again();

    wait_for(&mut process, &context, (stored - 150, 1_000)).await;
    nats.kill();
    assert_idle(pid).await;
    nats.start_again();

    wait_for(&mut process, &context, (0, 0)).await;
    assert_right(&interrupt(process));
}

/// The store is away for five seconds, in which the server's patience ends five times.
#[cfg(feature = "postgres")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_away_for_five_seconds_uses_up_no_delivery() {
    use inbox::nats::JetStreamConsumer;
    use inbox::postgres::PostgresInbox;
    use inbox::postgres::sqlx::{self, PgPool};
    use inbox::{ConsumerOptions, Inbox};
    use inbox_test_servers::{Postgres, Stop};

    let nats = Nats::start();
    let context = connect(&nats).await;
    let stored = fill(&context).await;
    let stream = context.get_stream("ORDERS").await.unwrap();
    let consumer: PullConsumer = stream.get_consumer("billing").await.unwrap();

    let mut postgres = Postgres::start();
    let pool = PgPool::connect(&postgres.url()).await.unwrap();
    sqlx::query("CREATE TABLE effects (id text)")
        .execute(&pool)
        .await
        .unwrap();
    let inbox = Inbox::new(PostgresInbox::new(pool.clone()), "billing").unwrap();
    inbox.setup().await.unwrap();
    postgres.stop(Stop::Immediate);
    let (watch, mine) = (context.clone(), inbox.clone());
    let running = tokio::spawn(async move {
        JetStreamConsumer::builder(consumer, mine)
            .with(ConsumerOptions::new().batch(std::num::NonZeroUsize::new(20).unwrap()))
            .handler(async |tx, message| {
                sqlx::query("INSERT INTO effects VALUES ($1)")
                    .bind(message.id().to_string())
                    .execute(&mut **tx)
                    .await
                    .map(drop)
            })
            .run(async move {
                while left(&watch).await != Some((0, 0)) {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            })
            .await
    });
    tokio::time::sleep(Duration::from_secs(5)).await;
    postgres.start_again();
    let summary = running.await.unwrap().unwrap();
    assert_eq!((summary.handled, summary.dead_letters), (400, 0), "{summary}");
    let effects: i64 = sqlx::query_scalar("SELECT count(DISTINCT id) FROM effects")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(effects, 400);
    let consumer: PullConsumer = context.get_consumer_from_stream("billing", "ORDERS").await.unwrap();
    assert_eq!(
        consumer.cached_info().delivered.consumer_sequence,
        stored,
        "one delivery each"
    );
}
