//! The contract with those who write stores: [`InboxStore`], [`Transactions`], [`ClaimIn`], [`Upkeep`].

use std::error::Error as StdError;
use std::num::NonZeroUsize;
use std::time::Duration;

use async_trait::async_trait;

use crate::{Claim, ConsumerGroup, DeadLetters, Delivery, ErrorKind, Health, Key, Purge, Purged, Record, Result};

/// A store of records of processed messages, as far as claims go: what every backend implements.
///
/// Applications do not call this trait; they hold an [`Inbox`](crate::Inbox). It is written for implementors, and the
/// crate `inbox-conformance` tests every sentence of it.
///
/// # To be correct
///
/// 1. **New once.** Of all transactions that claim a key, at any concurrency, at most one commits after a
///    [`Claim::New`]. A unique key in the database decides, not a look-up before an insert.
/// 2. **Duplicate is certain.** Answer [`Claim::Duplicate`] only if a committed record was seen, or one that this very
///    transaction made. Another transaction that is open may still roll back: for it wait, or answer
///    [`Claim::InFlight`]. A false duplicate loses the message.
/// 3. **Together.** The record is written in `tx`, with whatever else the caller writes there. It never commits alone.
/// 4. **Undone with it.** Whatever ends `tx` without a commit (a rollback, a drop, a lost connection) undoes the claim,
///    and the next one is `New`.
/// 5. **Harmless.** After any answer but an error, `tx` works on. Do not insert and catch the violation where that
///    aborts a transaction.
/// 6. **Whose, what, when.** Ids and groups are compared byte for byte. The record keeps the time by the store's clock,
///    never the consumer's, and the delivery's fingerprint if it has one; a `Duplicate` reports both (of a record that this
///    very transaction made, the time may be missing). The time is that of the **commit**, as nearly as can be had: a record
///    of long work must not look old, or it is purged early.
/// 7. **Cancel-safe.** A future that is dropped at any await leaves the key claimed in `tx` or not, and nothing
///    outside `tx`; whoever drops it drops or rolls back `tx` too.
///
/// # To begin with
///
/// The whole of what there is to write. A tutorial that fills it in, over a database in a file, is `examples/custom-store` in
/// the repository.
///
/// ```no_run
/// use std::error::Error as StdError;
///
/// use inbox_core::{
///     Claim, ConsumerGroup, Delivery, ErrorKind, Health, InboxStore, Key, Purge, Purged, Record, Result, Transactions,
///     Upkeep, async_trait,
/// };
///
/// struct MyInbox { /* a pool */ }
/// struct MyTx { /* the driver's open transaction, rolled back on drop */ }
///
/// #[async_trait]
/// impl InboxStore for MyInbox {
///     type Tx = MyTx;
///
///     async fn try_claim(&self, tx: &mut MyTx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
///         todo!("insert the record in `tx`, unless there is one; New if that wrote a row, Duplicate if it is committed")
///     }
///
///     async fn try_claim_batch(&self, tx: &mut MyTx, group: &ConsumerGroup, deliveries: &[Delivery]) -> Result<Vec<Claim>> {
///         todo!("the same for many: locks in the order of ids, answers in the order of `deliveries`")
///     }
/// }
///
/// #[async_trait]
/// impl Transactions for MyInbox {
///     async fn begin(&self) -> Result<MyTx> { todo!("nothing is left open if this future is dropped") }
///     async fn commit(&self, tx: MyTx) -> Result<()> { todo!("Ok only if it is stored") }
///     async fn rollback(&self, tx: MyTx) -> Result<()> { todo!("claim and effects are gone") }
///     fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> { todo!("the driver's passing errors") }
/// }
///
/// #[async_trait]
/// impl Upkeep for MyInbox {
///     async fn setup(&self) -> Result<()> { todo!("create or upgrade; by many at once") }
///     async fn check(&self) -> Result<Health> { todo!("usable, and set up so that the guarantee holds?") }
///     async fn find(&self, key: &Key) -> Result<Option<Record>> { todo!("the committed record") }
///     async fn forget(&self, key: &Key) -> Result<bool> { todo!("remove it; was there one?") }
///     async fn purge(&self, purge: &Purge) -> Result<Purged> { todo!("at most one step of what is older") }
/// }
/// ```
#[async_trait]
pub trait InboxStore: Send + Sync + 'static {
    /// The store's own open transaction: owned, and without a lifetime, so that handlers that take it can be spawned.
    ///
    /// Dropping it rolls it back, at once or as soon as anybody could notice.
    type Tx: Send + 'static;

    /// Claims one message in `tx`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`], [`ErrorKind::Conflict`] and [`ErrorKind::Unavailable`] where running the whole transaction
    /// again may succeed; [`ErrorKind::Schema`], with a text that names `setup`, where [`Upkeep::setup`] is what is missing,
    /// as with every claim before the first one (a store that needs no setup just works);
    /// [`ErrorKind::TransactionEnded`] where `tx` cannot be used any more.
    async fn try_claim(&self, tx: &mut Self::Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim>;

    /// Claims many messages in `tx`, answering in the order of `deliveries`.
    ///
    /// An id that stands in it twice is `New` at most once, the first time. Locks are taken in one order whatever the
    /// order of `deliveries`, so that batches which overlap never deadlock. Empty is fine, and so are tens of thousands.
    ///
    /// # Errors
    ///
    /// As [`try_claim`](Self::try_claim). After an error, some of the messages may stand claimed in `tx`: roll it back.
    async fn try_claim_batch(
        &self,
        tx: &mut Self::Tx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>>;
}

/// A store that opens and ends transactions by itself. [`Inbox::process`](crate::Inbox::process) needs it.
#[async_trait]
pub trait Transactions: InboxStore {
    /// Opens a transaction.
    ///
    /// Cancel-safe: a future that is dropped leaves no open transaction behind on a connection that others will use.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if a connection or lock could not be had in time, [`ErrorKind::Unavailable`] if the database
    /// cannot be reached; both retryable.
    async fn begin(&self) -> Result<Self::Tx>;

    /// Commits. `Ok` means stored: whatever the caller does now (acknowledge, above all) it may do for good.
    ///
    /// A future that is dropped leaves the outcome open: committed or rolled back, but not half of it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::TransactionEnded`] if the transaction had failed or was ended by other means, such as a raw
    /// `ROLLBACK` or `COMMIT` of the handler's; [`ErrorKind::OutcomeUnknown`] if the commit was sent and its answer
    /// lost; otherwise it is rolled back.
    async fn commit(&self, tx: Self::Tx) -> Result<()>;

    /// Rolls back; what a dropped `tx` amounts to, but done when this returns.
    ///
    /// # Errors
    ///
    /// As the driver has them. The transaction is gone in any case.
    async fn rollback(&self, tx: Self::Tx) -> Result<()>;

    /// What this store says of an error of its **driver's**, which a handler met in its own statements and returned.
    ///
    /// It lets a serialization failure in the handler be run again as one in a claim is. `None`: not an error of the
    /// driver's. `error` is one link of the chain of sources; the caller walks it.
    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind>;

    /// How many transactions can be open at once, where that is bounded: by a pool of connections, above all.
    fn max_transactions(&self) -> Option<NonZeroUsize> {
        None
    }

    /// How long a record is kept at the least, where the store forgets it by itself: by a time to live. `None`: until it is
    /// purged.
    fn retention(&self) -> Option<Duration> {
        None
    }

    /// This store as one that keeps dead letters, if it does. Without, a consumer never gives a message up: it stays on
    /// the broker.
    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = Self::Tx>> {
        None
    }
}

/// Claims in an open transaction of type `T`, which the caller opened, with the driver itself if it likes.
///
/// A store claims in its own [`InboxStore::Tx`] without writing this trait. It implements it for its driver's
/// transaction types, and **for no bare connection or pool**: a claim that commits by itself, before the effect, loses
/// the message if the effect then fails, so that call must not compile.
#[async_trait]
pub trait ClaimIn<T: Send>: InboxStore {
    /// [`InboxStore::try_claim`], in the caller's transaction.
    ///
    /// # Errors
    ///
    /// As there.
    async fn claim_in(&self, tx: &mut T, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim>;

    /// [`InboxStore::try_claim_batch`], in the caller's transaction.
    ///
    /// # Errors
    ///
    /// As there.
    async fn claim_batch_in(&self, tx: &mut T, group: &ConsumerGroup, deliveries: &[Delivery]) -> Result<Vec<Claim>>;
}

#[async_trait]
impl<S: InboxStore> ClaimIn<S::Tx> for S {
    async fn claim_in(&self, tx: &mut S::Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        self.try_claim(tx, group, delivery).await
    }

    async fn claim_batch_in(
        &self,
        tx: &mut S::Tx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        self.try_claim_batch(tx, group, deliveries).await
    }
}

/// What a store is kept in order with.
#[async_trait]
pub trait Upkeep: InboxStore {
    /// Creates what the store keeps its records in, or upgrades it. Safe at every start, and by many at once; a later
    /// one finds nothing to do.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Denied`] if the role may not, with what to have done by one that may; [`ErrorKind::Schema`] if
    /// something else stands in the place.
    async fn setup(&self) -> Result<()>;

    /// Whether the store is usable and the database is set up so that the guarantee holds. Changes nothing.
    ///
    /// # Errors
    ///
    /// Only if it could not look: [`ErrorKind::Unavailable`] and the like. What it found amiss is in the [`Health`].
    async fn check(&self) -> Result<Health>;

    /// The committed record of `key`, if there is one.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn find(&self, key: &Key) -> Result<Option<Record>>;

    /// Removes the record of `key`, so that the next delivery of the message is handled again. Says whether there was
    /// one.
    ///
    /// # Errors
    ///
    /// As the driver has them.
    async fn forget(&self, key: &Key) -> Result<bool>;

    /// **One bounded step** of a purge: removes at most [`Purge::step`] of the records that are older than
    /// [`Purge::older_than`] by the store's clock, and says whether there may be more. Never touches a record whose
    /// transaction is open. An age that reaches back beyond all time removes nothing.
    /// [`Inbox::purge`](crate::Inbox::purge) calls it until nothing is left.
    ///
    /// # Errors
    ///
    /// As the driver has them. Steps that were done stay done.
    async fn purge(&self, purge: &Purge) -> Result<Purged>;
}
