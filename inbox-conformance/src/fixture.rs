//! [`Fixture`]: what the suite must be told of a store.

use std::time::Duration;

use async_trait::async_trait;
use inbox_core::{Error, ErrorKind, InboxStore, Key, Result, Transactions, Upkeep};

use crate::Law;

/// The longest that the default [`Fixture::advance_clock`] waits.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// **One fresh, empty place in the database**, such as a schema, a file or a key prefix of its own, which is removed
/// when the fixture is dropped.
///
/// Three methods are required; the others say what a store cannot do, or can do besides. See the
/// [crate's page](crate) for a whole one.
///
/// Whatever the suite calls here may fail: then the law that called it fails, and shows the error.
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// The store under test.
    type Store: Transactions + Upkeep;

    /// Opens the store in this place, as another consumer process would: every call is a handle of its own, and all of
    /// them see the same records. **Not set up**: the suite calls [`Upkeep::setup`], or looks at what happens without.
    ///
    /// A pool of four connections a handle is enough.
    async fn connect(&self) -> Result<Self::Store>;

    /// Writes an effect called `name` in the open transaction `tx` of `store`, as a handler would: inserts a row into a
    /// table of the test's own, say. Each call adds one, and the table is there before the store is set up.
    ///
    /// An error of the driver's goes in as the [source](Error::with_source), so that the suite can ask the store
    /// whether it is [retryable](Transactions::classify).
    async fn write_effect(
        &self,
        store: &Self::Store,
        tx: &mut <Self::Store as InboxStore>::Tx,
        name: &str,
    ) -> Result<()>;

    /// How many effects called `name` are committed, as an outsider sees them, on a connection of its own.
    async fn count_effects(&self, name: &str) -> Result<u64>;

    /// Why `law` does not apply to this store; `None`, the default, where it does. The reason is shown in the report.
    ///
    /// A law that does not apply is a promise that the store does not make, so its documentation should say so too.
    fn cannot(&self, law: Law) -> Option<String> {
        let _ = law;
        None
    }

    /// Ends `tx` the hard way: kills its connection, as a crash or a lost network would. By default it is dropped.
    async fn sever(&self, store: &Self::Store, tx: <Self::Store as InboxStore>::Tx) -> Result<()> {
        let _ = store;
        drop(tx);
        Ok(())
    }

    /// Moves the **database's** clock forward by this much for the store's place, and leaves the consumers' clock alone.
    ///
    /// By default it waits for real, up to 30 seconds, and fails with [`ErrorKind::Unsupported`] if asked for more. The
    /// law [`Purge`](Law::Purge) makes do with waiting; [`Clock`](Law::Clock) cannot, so override this or declare that
    /// law not to apply.
    async fn advance_clock(&self, store: &Self::Store, by: Duration) -> Result<()> {
        let _ = store;
        if by > LONGEST_WAIT {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "this fixture cannot move its database's clock, and {by:?} are too long to wait: override \
                     Fixture::advance_clock, or return the reason from Fixture::cannot for Law::Clock"
                ),
            ));
        }
        tokio::time::sleep(by).await;
        Ok(())
    }

    /// The isolation levels that a transaction of this database can have, by names that
    /// [`begin_at`](Self::begin_at) takes. By default, one: whatever [`Transactions::begin`] opens.
    fn isolation_levels(&self) -> Vec<String> {
        vec!["the only one".into()]
    }

    /// Opens a transaction at one of the [isolation levels](Self::isolation_levels). By default it is
    /// [`Transactions::begin`].
    async fn begin_at(&self, store: &Self::Store, level: &str) -> Result<<Self::Store as InboxStore>::Tx> {
        let _ = level;
        store.begin().await
    }

    /// Lays down, in this empty place, what an older version of the store kept there, with the record of one message in
    /// it, and says which. `None`, the default: there is no older version that the store upgrades.
    async fn make_older(&self) -> Result<Option<Key>> {
        Ok(None)
    }

    /// Opens the store in this place under another name: of its table, key prefix or whatever users can set. `None`,
    /// the default: there is no such setting.
    ///
    /// The suite gives names that are hostile, and expects an error or a store that works.
    async fn connect_named(&self, name: &str) -> Option<Result<Self::Store>> {
        let _ = name;
        None
    }
}
