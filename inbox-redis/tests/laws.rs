//! The conformance suite on Redis.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

mod common;

use common::Site;
use inbox_conformance::{Fixture, Law, Outcome};
use inbox_core::{Result, async_trait};
use inbox_redis::redis::cmd;
use inbox_redis::{RedisInbox, RedisTx};

struct RedisFixture {
    site: Site,
    tag: Option<&'static str>,
}

impl RedisFixture {
    async fn new(tag: Option<&'static str>) -> Self {
        Self {
            site: Site::new().await,
            tag,
        }
    }
}

#[async_trait]
impl Fixture for RedisFixture {
    type Store = RedisInbox;

    async fn connect(&self) -> Result<RedisInbox> {
        let builder = RedisInbox::builder().prefix(&self.site.prefix);
        let builder = match self.tag {
            Some(tag) => builder.tag(tag),
            None => builder,
        };
        builder.connect(self.site.url.as_str()).await
    }

    async fn write_effect(&self, _store: &RedisInbox, tx: &mut RedisTx, name: &str) -> Result<()> {
        tx.pipe().incr(self.site.effect(name), 1);
        Ok(())
    }

    async fn count_effects(&self, name: &str) -> Result<u64> {
        Ok(self.site.effects(name).await.unsigned_abs())
    }

    fn cannot(&self, law: Law) -> Option<String> {
        let reason = match law {
            Law::Purge => {
                "Redis forgets a record by itself, when its time to live, the retention, is over: purge has nothing to do"
            }
            Law::Clock => "records have a time to live, which the server counts; nothing is compared with a clock",
            _ => return None,
        };
        Some(reason.into())
    }

    async fn sever(&self, _store: &RedisInbox, mut tx: RedisTx) -> Result<()> {
        let number: i64 = tx.query(cmd("CLIENT").arg("ID")).await?;
        self.site.run(cmd("CLIENT").arg("KILL").arg("ID").arg(number)).await;
        Ok(())
    }

    fn isolation_levels(&self) -> Vec<String> {
        vec!["EXEC runs all commands with nothing between them, the only level that there is".into()]
    }

    async fn connect_named(&self, name: &str) -> Option<Result<RedisInbox>> {
        // Behind the fixture's own, because all tests share the server.
        let prefix = format!("{}:{name}", self.site.prefix);
        Some(
            RedisInbox::builder()
                .prefix(prefix)
                .connect(self.site.url.as_str())
                .await,
        )
    }
}

mod spread_over_slots {
    use super::RedisFixture;

    inbox_conformance::laws!(RedisFixture::new(None).await);
}

mod in_one_slot {
    use super::RedisFixture;

    inbox_conformance::laws!(RedisFixture::new(Some("billing")).await);
}

/// What the store cannot do stands in the report, with the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_says_what_does_not_apply() {
    let report = inbox_conformance::run(async || RedisFixture::new(None).await).await;
    assert!(report.is_conforming(), "{report}");
    assert!(
        matches!(report.outcome(Law::DeadLetters), Some(Outcome::Passed)),
        "{report}"
    );
    for (law, reason) in [
        (Law::Purge, "time to live"),
        (Law::Clock, "nothing is compared with a clock"),
    ] {
        let Some(Outcome::DoesNotApply(why)) = report.outcome(law) else {
            panic!("{report}");
        };
        assert!(why.contains(reason), "{why}");
    }
}
