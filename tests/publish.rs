//! The program `examples/publish.rs` as a person runs it: the capture once and twice, a server that dies, and bad input.

#![cfg(feature = "nats")]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use inbox::nats::async_nats;
use inbox::nats::async_nats::jetstream::message::StreamMessage;
use inbox::nats::async_nats::jetstream::stream::{self, StorageType, Stream};
use inbox::nats::async_nats::jetstream::{self, Context};

use inbox_test_servers::Nats;
use serde_json::Value;

const CAPTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/order-deliveries.ndjson");

/// The example, built with the features of this test: `cargo test --test publish` alone would leave it as it was.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.ancestors().nth(2).unwrap();
        let mut build = Command::new(env!("CARGO"));
        build
            .args(["build", "--quiet", "--example", "publish", "--features", "nats"])
            .arg("--target-dir")
            .arg(profile.parent().unwrap())
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(build.status().unwrap().success());
        profile.join("examples").join("publish")
    })
}

fn publish(nats: &Nats, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command
        .args(["--nats", &nats.url()])
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The program on these lines.
fn publish_lines(nats: &Nats, lines: &str, args: &[&str]) -> Output {
    let mut process = publish(nats, args).arg("-").stdin(Stdio::piped()).spawn().unwrap();
    process.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    process.wait_with_output().unwrap()
}

fn text(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

/// That the program ended well, and the number in a line of what it printed.
fn counted(output: &Output, what: &str) -> usize {
    assert!(output.status.success(), "{}", text(output));
    let text = text(output);
    let line = text.lines().find(|line| line.starts_with(what));
    line.unwrap_or_else(|| panic!("{what:?} is missing: {text}"))[what.len()..]
        .trim()
        .parse()
        .unwrap()
}

/// That the program ended with an error which says this.
fn assert_fails(output: &Output, expected: &str) {
    assert_eq!(output.status.code(), Some(1), "{}", text(output));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains(expected), "{expected:?} is missing: {stderr}");
}

async fn context(nats: &Nats) -> Context {
    jetstream::new(async_nats::connect(nats.url()).await.unwrap())
}

async fn make(context: &Context, duplicate_window: Duration) -> Stream {
    let config = stream::Config {
        name: "ORDERS".into(),
        subjects: vec!["order.>".into()],
        duplicate_window,
        ..stream::Config::default()
    };
    context.create_stream(config).await.unwrap()
}

/// Every message of the stream, in its order.
async fn messages(context: &Context, name: &str) -> Vec<StreamMessage> {
    let stream = context.get_stream(name).await.unwrap();
    let last = stream.cached_info().state.last_sequence;
    let mut messages = Vec::new();
    for sequence in 1..=last {
        messages.push(stream.get_raw_message(sequence).await.unwrap());
    }
    messages
}

fn id(message: &StreamMessage) -> String {
    message.headers.get("Nats-Msg-Id").unwrap().to_string()
}

/// The first delivery of each event in the capture: its id, its line, and what must be in the stream.
fn events() -> Vec<(String, Value)> {
    let mut seen = BTreeSet::new();
    fs::read_to_string(CAPTURE)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|event| (event["headers"]["Nats-Msg-Id"].as_str().unwrap().to_owned(), event))
        .filter(|(id, _)| seen.insert(id.clone()))
        .collect()
}

#[tokio::test]
async fn the_capture_twice_is_in_the_stream_once_with_its_ids_subjects_payloads_and_order() {
    let nats = Nats::start();
    let first = publish(&nats, &["--create", CAPTURE]).output().unwrap();
    let counts = |output: &Output| {
        ["deliveries", "published", "duplicates", "sent again", "in the stream"].map(|what| counted(output, what))
    };
    assert_eq!(counts(&first), [554, 400, 154, 0, 400]);
    // The capture is what is published where no file is named.
    let second = publish(&nats, &[]).output().unwrap();
    assert_eq!(counts(&second), [554, 0, 554, 0, 400]);

    let context = context(&nats).await;
    let stream = context.get_stream("ORDERS").await.unwrap();
    let config = &stream.cached_info().config;
    assert_eq!(
        (config.subjects.as_slice(), config.storage, config.duplicate_window),
        (&["order.>".to_owned()][..], StorageType::File, Duration::from_secs(120))
    );
    let stored = messages(&context, "ORDERS").await;
    let expected = events();
    assert_eq!(stored.len(), expected.len());
    for (message, (expected_id, event)) in stored.iter().zip(&expected) {
        assert_eq!(&id(message), expected_id);
        assert_eq!(message.subject.as_str(), event["subject"].as_str().unwrap());
        let payload: Value = serde_json::from_slice(&message.payload).unwrap();
        assert_eq!(payload, event["payload"]);
        assert_eq!(message.headers.len(), 1, "{:?}", message.headers);
    }
}

#[tokio::test]
async fn a_server_that_is_killed_in_mid_stream_has_every_message_once_in_the_end() {
    let mut nats = Nats::start();
    make(&context(&nats).await, Duration::from_secs(3_600)).await;
    let lines = fs::read_to_string(CAPTURE).unwrap();
    let middle = lines.match_indices('\n').nth(299).unwrap().0 + 1;
    let mut process = publish(&nats, &["--in-flight", "32", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = process.stdin.take().unwrap();
    input.write_all(&lines.as_bytes()[..middle]).unwrap();
    input.flush().unwrap();
    let (before, patience) = (context(&nats).await, Instant::now() + Duration::from_secs(60));
    while before.get_stream("ORDERS").await.unwrap().cached_info().state.messages < 100 {
        assert!(Instant::now() < patience, "nothing arrives");
    }
    nats.kill();
    // More than may be without an answer, so that it is still at it when the server comes back.
    let rest = lines[middle..].to_owned();
    let writing = std::thread::spawn(move || input.write_all(rest.as_bytes()).unwrap());
    assert!(process.try_wait().unwrap().is_none());
    nats.start_again();

    let output = process.wait_with_output().unwrap();
    assert_eq!(counted(&output, "deliveries"), 554);
    writing.join().unwrap();
    assert_eq!(counted(&output, "published"), 400);
    assert_every_event_is_there_once(&nats).await;
}

async fn assert_every_event_is_there_once(nats: &Nats) {
    let stored = messages(&context(nats).await, "ORDERS").await;
    let mut times: BTreeMap<String, usize> = BTreeMap::new();
    for message in &stored {
        *times.entry(id(message)).or_default() += 1;
    }
    let expected: BTreeMap<String, usize> = events().into_iter().map(|(id, _)| (id, 1)).collect();
    assert_eq!(times, expected);
}

/// What stands between a client and its server: the client's first connection breaks when so many bytes of the server's
/// answers went through, in the middle of an answer. Returns its URL.
fn breaking_once(server: u16, after: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("nats://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let mut most = after;
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(("127.0.0.1", server)).unwrap());
            let (mut from_client, mut to_server) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            // Ends with an error when the other thread breaks the connection.
            std::thread::spawn(move || std::io::copy(&mut from_client, &mut to_server));
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut (&server).take(most), &mut (&client));
                let _ = (server.shutdown(Shutdown::Both), client.shutdown(Shutdown::Both));
            });
            most = u64::MAX;
        }
    });
    url
}

/// The messages are in the stream, but who sent them does not know.
#[tokio::test]
async fn messages_whose_answers_are_lost_are_sent_again_and_counted_once() {
    let nats = Nats::start();
    make(&context(&nats).await, Duration::from_secs(3_600)).await;
    let mut command = Command::new(program());
    // Half of what is answered, roughly: an answer is some hundred bytes.
    command.args(["--nats", &breaking_once(nats.port(), 30_000)]);
    let output = command.output().unwrap();
    assert_eq!(counted(&output, "deliveries"), 554);
    assert_eq!(counted(&output, "published"), 400);
    assert!(counted(&output, "sent again") > 0, "{}", text(&output));
    assert_every_event_is_there_once(&nats).await;
}

#[tokio::test]
async fn a_server_that_stays_away_ends_the_program_with_an_error() {
    let mut nats = Nats::start();
    make(&context(&nats).await, Duration::from_secs(120)).await;
    let lines = fs::read_to_string(CAPTURE).unwrap();
    let mut process = publish(&nats, &["--in-flight", "1", "--patience", "500ms", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = process.stdin.take().unwrap();
    let mut lines = lines.split_inclusive('\n');
    let mut write = |count| {
        for line in lines.by_ref().take(count) {
            input.write_all(line.as_bytes()).unwrap();
        }
    };
    write(2);
    let before = context(&nats).await;
    while before.get_stream("ORDERS").await.unwrap().cached_info().state.messages < 2 {
        tokio::task::yield_now().await;
    }
    nats.kill();
    write(2);
    drop(input);
    let output = process.wait_with_output().unwrap();
    assert_fails(&output, "no answer from 127.0.0.1");
    assert_fails(&output, "running this again goes on from there");
}

#[tokio::test]
async fn what_is_wrong_with_server_or_stream_is_said() {
    let nats = Nats::start();
    let mut nowhere = Command::new(program());
    let nowhere = nowhere
        .args(["--nats", "nats://user:secret@127.0.0.1:1"])
        .output()
        .unwrap();
    assert_fails(&nowhere, "cannot connect to 127.0.0.1:1: ");
    assert!(!text(&nowhere).contains("secret"), "{}", text(&nowhere));
    let mut nonsense = Command::new(program());
    assert_fails(
        &nonsense.args(["--nats", "http://127.0.0.1"]).output().unwrap(),
        "invalid scheme",
    );

    let none = publish(&nats, &[]).output().unwrap();
    assert_fails(&none, "there is no stream \"ORDERS\" on 127.0.0.1:");
    assert_fails(&none, "--create makes it");
    let unnamed = publish(&nats, &["--stream", "a.b", "--create"]).output().unwrap();
    assert_fails(&unnamed, "\"a.b\" cannot be a stream's name");

    let context = context(&nats).await;
    make(&context, Duration::from_secs(7)).await;
    let elsewhere = publish(&nats, &["--subject", "shop.{subject}"]).output().unwrap();
    assert_fails(
        &elsewhere,
        "line 1: the stream \"ORDERS\" does not take the subject \"shop.order.created\"",
    );
    // Another stream takes them, but it was not asked for.
    let made = publish(&nats, &["--subject", "shop.{subject}", "--stream", "SHOP", "--create"])
        .output()
        .unwrap();
    assert_eq!(counted(&made, "published"), 400);
    let elsewhere = publish(&nats, &["--subject", "shop.{subject}"]).output().unwrap();
    assert_fails(&elsewhere, "does not take the subject");
    let first = messages(&context, "SHOP").await.swap_remove(0);
    assert_eq!(first.subject.as_str(), "shop.order.created");

    let kept = publish(&nats, &["--create", "--duplicate-window", "1h"])
        .output()
        .unwrap();
    assert_eq!(counted(&kept, "published"), 400);
    assert!(
        text(&kept).contains("stays as it is, with a duplicate window of 7s"),
        "{}",
        text(&kept)
    );
}

#[tokio::test]
async fn a_user_with_a_password_publishes_and_a_wrong_one_is_told_so() {
    let nats = Nats::start_with(r#"authorization { users: [{ user: "shop", password: "secret" }] }"#);
    let as_user = |password: &str| {
        let mut command = Command::new(program());
        command.args(["--nats", &nats.url_as("shop", password), "--create"]);
        command.output().unwrap()
    };
    assert_fails(&as_user("guessed"), "authorization violation");
    assert_eq!(counted(&as_user("secret"), "published"), 400);
}

#[tokio::test]
async fn a_bad_line_ends_it_after_what_stands_before_it_and_headers_go_along() {
    let nats = Nats::start();
    let context = context(&nats).await;
    make(&context, Duration::from_secs(120)).await;
    let good =
        r#"{"subject": "order.created", "headers": {"nats-msg-id": "a", "Trace": "t"}, "payload": {"b":1,  "a":2}}"#;
    for (bad, why) in [
        ("nonsense", "not a delivery"),
        (
            r#"{"subject": "order.x", "headers": {}, "payload": 1}"#,
            "no Nats-Msg-Id header",
        ),
        (
            r#"{"subject": "order.x", "headers": {"Nats-Msg-Id": ""}, "payload": 1}"#,
            "id",
        ),
        (
            r#"{"subject": "order.x", "headers": {"Nats-Msg-Id": "a", "nats-msg-id": "b"}, "payload": 1}"#,
            "two Nats-Msg-Id headers that differ",
        ),
        (
            r#"{"subject": "order.x", "headers": {"Nats-Msg-Id": "a\nb"}, "payload": 1}"#,
            "invalid",
        ),
        (
            r#"{"subject": "order.*", "headers": {"Nats-Msg-Id": "a"}, "payload": 1}"#,
            "\"order.*\" is no subject",
        ),
        (
            r#"{"subject": "order. x", "headers": {"Nats-Msg-Id": "a"}, "payload": 1}"#,
            "\"order. x\" is no subject",
        ),
        (
            r#"{"subject": "refund.x", "headers": {"Nats-Msg-Id": "a"}, "payload": 1}"#,
            "does not take the subject \"refund.x\"",
        ),
    ] {
        let output = publish_lines(&nats, &format!("{good}\n{bad}\n{good}\n"), &[]);
        assert_fails(&output, "publish: line 2: ");
        assert_fails(&output, why);
        assert_fails(&output, "the 1 deliveries before it are published");
    }
    assert_fails(&publish_lines(&nats, "", &[]), "the input has no delivery");
    assert_fails(
        &publish(&nats, &["/nowhere.ndjson"]).output().unwrap(),
        "cannot read /nowhere.ndjson",
    );

    let stored = messages(&context, "ORDERS").await;
    assert_eq!(stored.len(), 1);
    // The server knows the id again by this spelling only; the payload is what the capture has, to the byte.
    assert_eq!(id(&stored[0]), "a");
    let headers = &stored[0].headers;
    assert_eq!(headers.get("Trace").unwrap().as_str(), "t");
    assert_eq!(&stored[0].payload[..], br#"{"b":1,  "a":2}"#);
}
