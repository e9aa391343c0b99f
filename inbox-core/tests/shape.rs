//! The shapes that the traits were chosen for compile: a driver's transaction with a lifetime beside the store's own,
//! and handlers that are spawned, with captures and without annotations.

use std::error::Error as StdError;
use std::marker::PhantomData;

use inbox_core::{
    Claim, ClaimIn, ConsumerGroup, Delivery, ErrorKind, Inbox, InboxStore, MemoryInbox, MessageId, Outcome, Result,
    Transactions, async_trait,
};

/// A driver's transaction: it borrows its connection.
struct DriverTx<'c>(PhantomData<&'c mut ()>);

struct OwnTx;

struct Store;

#[async_trait]
impl InboxStore for Store {
    type Tx = OwnTx;

    async fn try_claim(&self, _: &mut OwnTx, _: &ConsumerGroup, _: Delivery) -> Result<Claim> {
        Ok(Claim::New)
    }

    async fn try_claim_batch(&self, _: &mut OwnTx, _: &ConsumerGroup, all: &[Delivery]) -> Result<Vec<Claim>> {
        Ok(vec![Claim::New; all.len()])
    }
}

#[async_trait]
impl<'c> ClaimIn<DriverTx<'c>> for Store {
    async fn claim_in(&self, _: &mut DriverTx<'c>, _: &ConsumerGroup, _: Delivery) -> Result<Claim> {
        Ok(Claim::New)
    }

    async fn claim_batch_in(&self, _: &mut DriverTx<'c>, _: &ConsumerGroup, all: &[Delivery]) -> Result<Vec<Claim>> {
        Ok(vec![Claim::New; all.len()])
    }
}

#[async_trait]
impl Transactions for Store {
    async fn begin(&self) -> Result<OwnTx> {
        Ok(OwnTx)
    }

    async fn commit(&self, _: OwnTx) -> Result<()> {
        Ok(())
    }

    async fn rollback(&self, _: OwnTx) -> Result<()> {
        Ok(())
    }

    fn classify(&self, _: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        None
    }
}

#[tokio::test]
async fn a_drivers_transaction_of_any_lifetime_and_the_stores_own_are_claimed_in_alike() {
    let inbox = Inbox::new(Store, "group").unwrap();
    let id = MessageId::new("m").unwrap();
    let connection = &mut ();
    let mut driver_tx = DriverTx(PhantomData);
    let _: &PhantomData<&mut ()> = &driver_tx.0;
    assert!(!inbox.is_duplicate(&mut driver_tx, id).await.unwrap());
    assert!(!inbox.is_duplicate(&mut OwnTx, id).await.unwrap());
    let () = *connection;
    tokio::spawn(async move {
        let mut own = OwnTx;
        inbox.is_duplicate(&mut own, id).await.unwrap();
        let mut driver_tx = DriverTx(PhantomData);
        inbox.is_duplicate(&mut driver_tx, id).await.unwrap();
    })
    .await
    .unwrap();
}

/// A real-life error: made from the inbox's and from others by `?`.
#[derive(Debug)]
enum BillingError {
    Inbox(inbox_core::Error),
    Declined,
}

impl From<inbox_core::Error> for BillingError {
    fn from(error: inbox_core::Error) -> Self {
        Self::Inbox(error)
    }
}

impl std::fmt::Display for BillingError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Inbox(_) => f.write_str("the inbox failed"),
            Self::Declined => f.write_str("declined"),
        }
    }
}

impl std::error::Error for BillingError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Inbox(error) => Some(error),
            Self::Declined => None,
        }
    }
}

async fn bill(tx: &mut <MemoryInbox<u64> as InboxStore>::Tx, cents: u64) -> Result<u64, BillingError> {
    if cents == 0 {
        return Err(BillingError::Declined);
    }
    tx.apply(move |total| *total += cents);
    tokio::task::yield_now().await;
    Ok(cents)
}

#[tokio::test]
async fn handlers_with_captures_are_spawned_without_annotations() {
    let inbox = Inbox::new(MemoryInbox::with_state(0_u64), "billing").unwrap();
    let id = MessageId::new("order-1").unwrap();
    let spawned = inbox.clone();
    let order = String::from("order-1");
    let outcome = tokio::spawn(async move { spawned.process(id, async |tx| bill(tx, order.len() as u64).await).await });
    assert_eq!(outcome.await.unwrap().unwrap(), Outcome::Processed(7));

    let spawned = inbox.clone();
    let batch = tokio::spawn(async move {
        let messages = vec![(id, 1), (MessageId::new("order-2").unwrap(), 2)];
        spawned
            .process_batch(
                &messages,
                |message| message.0,
                async |tx, new| {
                    for (_, cents) in new {
                        bill(tx, *cents).await?;
                    }
                    Ok::<_, BillingError>(())
                },
            )
            .await
    });
    let outcomes = batch.await.unwrap();
    assert!(matches!(outcomes[0], Ok(Outcome::Duplicate(_))), "{outcomes:?}");
    assert!(matches!(outcomes[1], Ok(Outcome::Processed(()))), "{outcomes:?}");
    assert_eq!(inbox.store().state(|total| *total), 9);

    let spawned = inbox.clone();
    let declined = tokio::spawn(async move {
        let id = MessageId::new("order-3").unwrap();
        spawned
            .retry_if(|error: &BillingError| matches!(error, BillingError::Inbox(_)))
            .process(id, async |tx| bill(tx, 0).await)
            .await
    });
    let error = declined.await.unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Handler);
    assert!(matches!(error.downcast_ref(), Some(BillingError::Declined)));
}
