//! The program `examples/billing.rs` on the capture, as a person runs it: totals, second runs, crashes, two at once, and
//! bad input.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use tempfile::TempDir;

const DELIVERIES: usize = 554;
const TOTALS: [&str; 4] = [
    "invoices                     296\n",
    "(15954595 cents)",
    "(10860042 cents)",
    "(11232514 cents)",
];
const SIGKILL: i32 = 9;

/// A place for a store of one kind, and the folder of the test.
struct Billing {
    folder: TempDir,
    server: Server,
}

/// Which store a test runs on. Those of a server have one to themselves.
#[derive(Clone, Copy)]
enum Kind {
    Sqlite,
    #[cfg(feature = "postgres")]
    Postgres,
    #[cfg(feature = "redis")]
    Redis,
}

const KINDS: &[Kind] = &[
    Kind::Sqlite,
    #[cfg(feature = "postgres")]
    Kind::Postgres,
    #[cfg(feature = "redis")]
    Kind::Redis,
];

enum Server {
    None,
    #[cfg(feature = "postgres")]
    Postgres(inbox_test_servers::Postgres),
    #[cfg(feature = "redis")]
    Redis(inbox_test_servers::Redis),
}

impl Billing {
    fn new() -> Self {
        Self::on(Kind::Sqlite)
    }

    fn on(kind: Kind) -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            server: match kind {
                Kind::Sqlite => Server::None,
                #[cfg(feature = "postgres")]
                Kind::Postgres => Server::Postgres(inbox_test_servers::Postgres::start()),
                #[cfg(feature = "redis")]
                Kind::Redis => Server::Redis(inbox_test_servers::Redis::start(&inbox_test_servers::Redis::DURABLE)),
            },
        }
    }

    fn store(&self) -> String {
        match &self.server {
            Server::None => format!("sqlite:{}", self.folder.path().join("billing.db").display()),
            #[cfg(feature = "postgres")]
            Server::Postgres(server) => server.url(),
            #[cfg(feature = "redis")]
            Server::Redis(server) => server.url(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.args(["--store", &self.store()]).args(args);
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn run_on(&self, lines: &str, args: &[&str]) -> Output {
        let input = self.folder.path().join("input.ndjson");
        fs::write(&input, lines).unwrap();
        self.run(&[&["--input", input.to_str().unwrap()], args].concat())
    }
}

/// The example, built with the features of this test: `cargo test --test billing` alone would leave it as it was.
fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let test = std::env::current_exe().unwrap();
        let profile = test.ancestors().nth(2).unwrap();
        let features = [
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
        if profile.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success());
        profile.join("examples").join("billing")
    })
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn assert_right(output: &Output) -> String {
    let (stdout, stderr) = text(output);
    assert!(output.status.success(), "{stdout}{stderr}");
    for total in TOTALS {
        assert!(stdout.contains(total), "{total:?} is missing:\n{stdout}");
    }
    let last = stdout.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("check: 296 invoices for 296 distinct events"),
        "{stdout}"
    );
    assert!(!stderr.contains("locked"), "{stderr}");
    stdout
}

#[track_caller]
fn assert_fails(output: &Output, expected: &str) {
    let (stdout, stderr) = text(output);
    assert_eq!(output.status.code(), Some(1), "{stdout}{stderr}");
    assert!(stderr.contains(expected), "{expected:?} is missing: {stderr}");
}

#[test]
fn the_capture_becomes_296_invoices_and_a_second_run_finds_only_duplicates() {
    for kind in KINDS {
        let billing = Billing::on(*kind);
        let first = assert_right(&billing.run(&[]));
        assert!(first.contains("deliveries                   554\n"), "{first}");
        assert!(first.contains("duplicates skipped           154\n"), "{first}");
        assert!(first.contains("new invoices                 296\n"), "{first}");
        let second = assert_right(&billing.run(&[]));
        assert!(second.contains("duplicates skipped           554\n"), "{second}");
        assert!(second.contains("new invoices                   0\n"), "{second}");
    }
}

#[test]
fn in_batches_it_is_the_same() {
    for (size, kind) in ["1", "7", "100", "1000"]
        .iter()
        .flat_map(|size| KINDS.iter().map(move |kind| (size, kind)))
    {
        let billing = Billing::on(*kind);
        let first = assert_right(&billing.run(&["--batch", size]));
        assert!(first.contains("duplicates skipped           154\n"), "{first}");
        let second = assert_right(&billing.run(&["--batch", size]));
        assert!(second.contains("new invoices                   0\n"), "{second}");
    }
}

/// Killed at every delivery in turn, each time on what the crashes before have left.
#[test]
fn killed_at_any_delivery_the_next_run_picks_up() {
    for kind in KINDS {
        let worn = Billing::on(*kind);
        for at in 1..=DELIVERIES {
            let crashed = worn.run(&["--crash-at", &at.to_string()]);
            assert_eq!(crashed.status.signal(), Some(SIGKILL), "at {at}: {:?}", text(&crashed));
        }
        assert_right(&worn.run(&[]));
    }
}

#[test]
fn killed_at_any_delivery_of_a_fresh_store_the_next_run_picks_up() {
    for at in 1..=DELIVERIES {
        let billing = Billing::new();
        let batch: &[&str] = if at % 2 == 0 { &["--batch", "50"] } else { &[] };
        let crashed = billing.run(&[&["--crash-at", &at.to_string()], batch].concat());
        assert_eq!(crashed.status.signal(), Some(SIGKILL), "at {at}: {:?}", text(&crashed));
        assert_right(&billing.run(batch));
    }
}

#[test]
fn two_at_once_on_one_store_share_the_work() {
    let ways: [&[&str]; 2] = [&[], &["--batch", "20"]];
    for (args, kind) in ways.iter().flat_map(|args| KINDS.iter().map(move |kind| (args, kind))) {
        let billing = Billing::on(*kind);
        let spawn = || {
            billing
                .command(args)
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let both = [spawn(), spawn()].map(|process| process.wait_with_output().unwrap());
        for output in &both {
            let (stdout, stderr) = text(output);
            assert!(output.status.success(), "{stdout}{stderr}");
            assert!(!stderr.contains("locked"), "{stderr}");
        }
        let after = assert_right(&billing.run(args));
        assert!(after.contains("new invoices                   0\n"), "{after}");
    }
}

#[test]
fn each_group_handles_every_event() {
    let billing = Billing::new();
    assert_right(&billing.run(&[]));
    let (stdout, stderr) = text(&billing.run(&["--group", "audit"]));
    assert!(
        stdout.contains("new invoices                 296\n"),
        "{stdout}{stderr}"
    );
    assert!(
        stdout.contains("check: 592 invoices for 592 distinct events"),
        "{stdout}"
    );
}

#[test]
fn standard_input_serves_as_well() {
    let billing = Billing::new();
    let capture = fs::File::open(Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/data/order-deliveries.ndjson"));
    let output = billing
        .command(&["--input", "-"])
        .stdin(capture.unwrap())
        .output()
        .unwrap();
    assert_right(&output);
}

const GOOD: &str = r#"{"subject":"order.created","headers":{"Nats-Msg-Id":"a"},"payload":{"order_id":"o","customer_id":"c","amount_cents":5,"currency":"EUR"}}"#;

#[test]
fn an_unreadable_line_is_an_error_with_its_number_and_what_came_before_it_is_kept() {
    let no_id = GOOD.replace("Nats-Msg-Id", "Other");
    let empty_id = GOOD.replace(r#":"a"}"#, r#":""}"#);
    let nil_id = GOOD.replace(r#":"a"}"#, r#":"00000000-0000-0000-0000-000000000000"}"#);
    let two_ids = GOOD.replace(r#":"a"}"#, r#":"a","NATS-MSG-ID":"b"}"#);
    for (line, expected) in [
        ("not json", "not a delivery"),
        ("", "not a delivery"),
        (r#"{"subject":"order.created"}"#, "headers"),
        (&no_id, "no Nats-Msg-Id"),
        (&empty_id, "missing message id"),
        (&nil_id, "missing message id"),
        (&two_ids, "two Nats-Msg-Id"),
    ] {
        for batch in [&[][..], &["--batch", "10"]] {
            let billing = Billing::new();
            let output = billing.run_on(&format!("{GOOD}\n{line}\n{GOOD}\n"), batch);
            assert_fails(&output, expected);
            assert_fails(&output, "line 2: ");
            let (after, _) = text(&billing.run_on(&format!("{GOOD}\n"), batch));
            assert!(after.contains("duplicates skipped             1\n"), "{after}");
        }
    }
}

#[test]
fn wrong_arguments_are_clear_errors() {
    let billing = Billing::new();
    assert_fails(&billing.run(&["--input", "/no/such/file"]), "/no/such/file");
    assert_fails(&billing.run(&["--group", ""]), "consumer group");
    assert_fails(&billing.run(&["--group", &"g".repeat(300)]), "consumer group");
    for store in ["oracle:scott", "sqlite:", "billing.db", ""] {
        let output = Command::new(program()).args(["--store", store]).output().unwrap();
        assert_fails(&output, "sqlite:PATH");
    }
    let output = Command::new(program())
        .args(["--store", "sqlite:/no/such/folder/x.db"])
        .output()
        .unwrap();
    assert_fails(&output, "/no/such/folder/x.db");
    for (option, value) in [("--batch", "0"), ("--batch", "x"), ("--crash-at", "0")] {
        let output = billing.run(&[option, value]);
        assert_eq!(output.status.code(), Some(2), "{option} {value}");
    }
    let (help, _) = text(&billing.run(&["--help"]));
    for option in ["--input", "--store", "--group", "--batch", "--crash-at", "Nats-Msg-Id"] {
        assert!(help.contains(option), "{option}: {help}");
    }
}
