//! [`PostgresTx`]: the store's own open transaction.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use inbox_core::{ConsumerGroup, MessageId};
use sqlx::{PgConnection, Postgres, Transaction};

/// How long after its claim a record's time is set anew at the commit.
///
/// A record's age counts from completion, to within this much; for quicker handlers the write is saved.
const STALE_AFTER: Duration = Duration::from_millis(100);

/// An open transaction on a connection of the store's pool. Handlers write their effects in it:
///
/// ```no_run
/// # async fn f(inbox: inbox_core::Inbox<inbox_postgres::PostgresInbox>, id: inbox_core::MessageId)
/// # -> inbox_core::Result<()> {
/// use inbox_postgres::sqlx;
///
/// inbox.process(id, async |tx| {
///     sqlx::query("INSERT INTO invoices (cents) VALUES ($1)").bind(250_i64).execute(&mut **tx).await?;
///     Ok::<_, sqlx::Error>(())
/// }).await?;
/// # Ok(()) }
/// ```
///
/// It dereferences to [`PgConnection`], whose own `begin` gives a savepoint. **Commit and rollback are the store's**: a
/// handler that sends `COMMIT` or `ROLLBACK` by itself makes [`Transactions::commit`](inbox_core::Transactions::commit)
/// fail with [`ErrorKind::TransactionEnded`](inbox_core::ErrorKind::TransactionEnded).
///
/// Dropped, it is rolled back in the background before anybody else gets its connection; that needs a running tokio
/// runtime, as everything of a pool does.
pub struct PostgresTx {
    pub(crate) inner: Transaction<'static, Postgres>,
    /// The value of a setting that is local to the transaction, and so tells whether it is still the same one.
    pub(crate) token: String,
    claimed: Vec<(ConsumerGroup, MessageId)>,
    first_claim: Option<Instant>,
}

impl PostgresTx {
    pub(crate) fn new(inner: Transaction<'static, Postgres>, token: String) -> Self {
        Self {
            inner,
            token,
            claimed: Vec::new(),
            first_claim: None,
        }
    }

    /// Notes the messages that were claimed as new by a claim that began at `began`.
    pub(crate) fn note(&mut self, group: &ConsumerGroup, ids: impl IntoIterator<Item = MessageId>, began: Instant) {
        let before = self.claimed.len();
        self.claimed.extend(ids.into_iter().map(|id| (group.clone(), id)));
        if self.claimed.len() > before {
            self.first_claim.get_or_insert(began);
        }
    }

    /// The records whose time is to be set anew at the commit.
    pub(crate) fn stale(&self) -> &[(ConsumerGroup, MessageId)] {
        match self.first_claim {
            Some(first) if first.elapsed() >= STALE_AFTER => &self.claimed,
            _ => &[],
        }
    }
}

impl Deref for PostgresTx {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.inner
    }
}

impl DerefMut for PostgresTx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.inner
    }
}

impl fmt::Debug for PostgresTx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresTx")
            .field("claimed", &self.claimed.len())
            .finish_non_exhaustive()
    }
}
