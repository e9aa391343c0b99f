//! The shell that stands between a test process and its server, and outlives it by a moment.

use std::ffi::OsStr;
use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::programs::User;

/// Reads `start` and signal names from standard input and obeys; at its end kills the server and removes the folder.
///
/// A background command of a non-interactive shell has /dev/null as its input, so only this shell holds the pipe's
/// reading end. It also ignores SIGINT and SIGQUIT unless it handles them itself, so what to end a server with is the
/// server's affair. Arguments: the folder, the last signal, then the server's command line.
const SCRIPT: &str = r#"
folder=$1; last=$2; shift 2; pid=
exec 2>>"$folder/log" # where the shell says whom it killed
stop() { if [ -n "$pid" ]; then kill -s "$1" "$pid" 2>/dev/null; wait "$pid"; pid=; fi; }
while read -r order; do
    case $order in
        start) "$@" >>"$folder/log" 2>&1 & pid=$! ;;
        *) stop "$order" ;;
    esac
    echo done
done
stop "$last"
cd / && rm -rf "$folder"
"#;

/// A server's folder and the shell that runs the server in it.
#[derive(Debug)]
pub(crate) struct Shell {
    folder: PathBuf,
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

/// A folder of its own for a server, owned by the user that the server runs as. It is removed by its drop, until a shell
/// has it.
#[derive(Debug)]
pub(crate) struct Folder {
    own: TempDir,
    user: Option<User>,
}

impl Folder {
    pub(crate) fn new() -> Self {
        let folder = tempfile::Builder::new()
            .prefix("inbox-test-")
            .tempdir()
            .unwrap_or_else(|error| panic!("no temporary folder could be made: {error}"));
        let user = User::unprivileged(folder.path());
        if let Some(user) = user {
            std::os::unix::fs::chown(folder.path(), Some(user.uid), Some(user.gid))
                .unwrap_or_else(|error| panic!("{}: {error}", folder.path().display()));
        }
        Self { own: folder, user }
    }

    pub(crate) fn path(&self) -> &Path {
        self.own.path()
    }

    /// A command that runs in the folder, as the server's user.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(self.path());
        if let Some(user) = self.user {
            command.uid(user.uid).gid(user.gid);
        }
        command
    }

    /// Hands the folder to a shell that runs `server` when told to, and sends it the signal `last` in the end.
    pub(crate) fn into_shell(self, server: &[&OsStr], last: &str) -> Shell {
        let mut child = self
            .command("/bin/sh")
            // A group of its own: Ctrl-C in the terminal of the tests must not kill it before it has tidied up.
            .process_group(0)
            .args(["-c", SCRIPT, "sh"])
            .arg(self.path())
            .arg(last)
            .args(server)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("/bin/sh: {error}"));
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            unreachable!("both were asked to be pipes")
        };
        Shell {
            folder: self.own.keep(),
            child,
            orders: Some(orders),
            answers: BufReader::new(answers),
        }
    }
}

impl Shell {
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// `start`, or the name of a signal to stop the server with; back when the server has ended.
    pub(crate) fn order(&mut self, order: &str) {
        let orders = self
            .orders
            .as_mut()
            .unwrap_or_else(|| unreachable!("it is open until the drop"));
        writeln!(orders, "{order}").unwrap_or_else(|error| panic!("the shell of a test server is gone: {error}"));
        let mut answer = String::new();
        self.answers
            .read_line(&mut answer)
            .unwrap_or_else(|error| panic!("the shell of a test server is gone: {error}"));
    }

    /// Waits until `ready` says so; panics with the server's log if it does not within a minute.
    pub(crate) fn wait_until(&self, what: &str, mut ready: impl FnMut() -> bool) {
        let patience = Instant::now() + Duration::from_secs(60);
        while !ready() {
            assert!(
                Instant::now() < patience,
                "{what} did not come up within a minute; its log:\n{}",
                fs::read_to_string(self.folder.join("log")).unwrap_or_default()
            );
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.orders.take());
        // It ends when the server has ended and the folder is gone.
        let _ = self.child.wait();
    }
}

/// A port that nobody listens on: if it can be, one that the kernel gives to nobody who does not ask for it, so that it is
/// still free when a server that was killed is started again.
pub(crate) fn free_port() -> u16 {
    let listen = |port| {
        TcpListener::bind(("127.0.0.1", port))
            .and_then(|listener| listener.local_addr())
            .map(|address| address.port())
    };
    // A few tries: the others may be taken, and where the kernel's own range is a wide one, there are none.
    let below = first_of_the_kernels_ports();
    (0..20)
        .find_map(|_| {
            let random = RandomState::new().build_hasher().finish();
            let span = below.checked_sub(LOWEST_PORT).filter(|span| *span > 0)?;
            listen(LOWEST_PORT + u16::try_from(random % u64::from(span)).ok()?).ok()
        })
        .unwrap_or_else(|| listen(0).unwrap_or_else(|error| panic!("no free port: {error}")))
}

/// Above the ports that well-known servers have.
const LOWEST_PORT: u16 = 15_000;

/// The lowest port that the kernel gives to those who do not ask for a certain one.
fn first_of_the_kernels_ports() -> u16 {
    fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|range| range.split_whitespace().next()?.parse().ok())
        .unwrap_or(0)
}
