//! What the tests of this crate share: a place on a server, and a proxy that cuts links.

#![allow(dead_code, reason = "every test file uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use inbox_core::{BoxError, Inbox, MessageId, Outcome, Result};
use inbox_redis::redis::aio::MultiplexedConnection;
use inbox_redis::redis::{Client, Cmd, FromRedisValue, cmd};
use inbox_redis::{Builder, Flushed, RedisInbox};
use inbox_test_servers::{Redis, redis_url, unique_name};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

/// A prefix of its own on a server, and an inbox there.
pub(crate) struct Site {
    pub(crate) url: String,
    pub(crate) prefix: String,
    pub(crate) inbox: Inbox<RedisInbox>,
    beside: MultiplexedConnection,
}

impl Site {
    /// On the server that all tests share.
    pub(crate) async fn new() -> Self {
        Self::on(&redis_url()).await
    }

    pub(crate) async fn on(url: &str) -> Self {
        let prefix = unique_name();
        let store = RedisInbox::builder().prefix(&prefix).connect(url).await.unwrap();
        let beside = Client::open(url)
            .unwrap()
            .get_multiplexed_async_connection()
            .await
            .unwrap();
        Self {
            url: url.into(),
            prefix,
            inbox: Inbox::new(store, "group").unwrap(),
            beside,
        }
    }

    /// On a cluster of one node, which is given all slots.
    pub(crate) async fn cluster(server: &Redis) -> Self {
        let site = Self::on(&server.url()).await;
        site.run(cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383)).await;
        loop {
            let info: String = site.ask(cmd("CLUSTER").arg("INFO")).await;
            if info.contains("cluster_state:ok") {
                return site;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Another store in the same place.
    pub(crate) async fn with(&self, builder: Builder) -> RedisInbox {
        builder.prefix(&self.prefix).connect(self.url.as_str()).await.unwrap()
    }

    /// Another store in the same place, reached through a proxy.
    pub(crate) async fn through(&self, proxy: &Proxy) -> RedisInbox {
        let builder = RedisInbox::builder().prefix(&self.prefix).flushed(Flushed::Always);
        builder
            .connect(format!("redis://127.0.0.1:{}/", proxy.port))
            .await
            .unwrap()
    }

    /// The key that counts an effect.
    pub(crate) fn effect(&self, name: &str) -> String {
        format!("{}:effect:{name}", self.prefix)
    }

    pub(crate) async fn effects(&self, name: &str) -> i64 {
        let count: Option<i64> = self.ask(cmd("GET").arg(self.effect(name))).await;
        count.unwrap_or(0)
    }

    pub(crate) async fn run(&self, command: &Cmd) {
        let _: inbox_redis::redis::Value = self.ask(command).await;
    }

    /// Asks on a connection that has nothing to do with the store's; on a new one where that one was cut.
    pub(crate) async fn ask<T: FromRedisValue>(&self, command: &Cmd) -> T {
        if let Ok(answer) = command.query_async(&mut self.beside.clone()).await {
            return answer;
        }
        let client = Client::open(self.url.as_str()).unwrap();
        let mut fresh = client.get_multiplexed_async_connection().await.unwrap();
        command.query_async(&mut fresh).await.unwrap()
    }

    /// Handles one message, counting it; again where another is at it, as a broker's redelivery would.
    pub(crate) async fn handle(&self, name: &str) -> Result<Outcome<()>> {
        loop {
            let outcome = self
                .inbox
                .process(id(name), async |tx| {
                    tx.pipe().incr(self.effect(name), 1);
                    Ok::<_, BoxError>(())
                })
                .await?;
            let Outcome::InFlight(in_flight) = outcome else {
                return Ok(outcome);
            };
            tokio::time::sleep(in_flight.retry_after.unwrap_or_default()).await;
        }
    }
}

pub(crate) fn id(text: &str) -> MessageId {
    MessageId::new(text).unwrap()
}

/// Passes bytes on, until told to cut: then, after so many more bytes, it cuts the connections it has, once, and passes
/// on those that come later.
pub(crate) struct Proxy {
    pub(crate) port: u16,
    link: Arc<Link>,
}

struct Link {
    armed: AtomicBool,
    left: AtomicU64,
    cut: Notify,
}

impl Proxy {
    pub(crate) async fn start(server: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let link = Arc::new(Link {
            armed: AtomicBool::new(false),
            left: AtomicU64::new(u64::MAX),
            cut: Notify::new(),
        });
        let passing = Arc::clone(&link);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let link = Arc::clone(&passing);
                tokio::spawn(async move {
                    let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
                    let (client_in, client_out) = client.into_split();
                    let (server_in, server_out) = server.into_split();
                    tokio::select! {
                        () = pass(client_in, server_out, &link) => {}
                        () = pass(server_in, client_out, &link) => {}
                        () = link.cut.notified() => {}
                    }
                });
            }
        });
        Self { port, link }
    }

    pub(crate) fn cut_after(&self, bytes: u64) {
        self.link.left.store(bytes, Ordering::SeqCst);
        self.link.armed.store(true, Ordering::SeqCst);
    }
}

async fn pass(mut from: tokio::net::tcp::OwnedReadHalf, mut to: tokio::net::tcp::OwnedWriteHalf, link: &Link) {
    let mut buffer = [0; 4096];
    loop {
        let Ok(count @ 1..) = from.read(&mut buffer).await else {
            return;
        };
        let mut passed = count;
        if link.armed.load(Ordering::SeqCst) {
            let left = link.left.load(Ordering::SeqCst);
            passed = count.min(usize::try_from(left).unwrap_or(usize::MAX));
            link.left.store(left - passed as u64, Ordering::SeqCst);
        }
        if to.write_all(&buffer[..passed]).await.is_err() {
            return;
        }
        if passed < count {
            link.armed.store(false, Ordering::SeqCst);
            link.cut.notify_waiters();
            return;
        }
    }
}
