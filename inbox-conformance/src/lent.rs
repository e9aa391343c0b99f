//! [`Lent`]: the store under test, as something that an [`Inbox`](inbox_core::Inbox) can hold.

use std::error::Error as StdError;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;

use async_trait::async_trait;
use inbox_core::{
    Claim, ConsumerGroup, DeadLetter, DeadLetterInfo, DeadLetterPlace, DeadLetters, Delivery, Error, ErrorKind,
    InboxStore, Key, Result, Transactions,
};

use crate::Fixture;
use crate::consumer::Consumer;
use crate::stage::TxOf;

/// The store of a handle that the law goes on using.
pub(crate) struct Lent<F: Fixture> {
    store: Arc<F::Store>,
}

impl<F: Fixture> Lent<F> {
    pub(crate) fn of(consumer: &Consumer<F>) -> Self {
        Self {
            store: Arc::clone(&consumer.store),
        }
    }

    fn letters(&self) -> Result<&dyn DeadLetters<Tx = TxOf<F>>> {
        self.store.dead_letters().ok_or_else(|| {
            let text = "the store keeps no dead letters: Transactions::dead_letters answers None";
            Error::new(ErrorKind::Unsupported, text)
        })
    }
}

#[async_trait]
impl<F: Fixture> InboxStore for Lent<F> {
    type Tx = TxOf<F>;

    async fn try_claim(&self, tx: &mut Self::Tx, group: &ConsumerGroup, delivery: Delivery) -> Result<Claim> {
        self.store.try_claim(tx, group, delivery).await
    }

    async fn try_claim_batch(
        &self,
        tx: &mut Self::Tx,
        group: &ConsumerGroup,
        deliveries: &[Delivery],
    ) -> Result<Vec<Claim>> {
        self.store.try_claim_batch(tx, group, deliveries).await
    }
}

#[async_trait]
impl<F: Fixture> Transactions for Lent<F> {
    async fn begin(&self) -> Result<Self::Tx> {
        self.store.begin().await
    }

    async fn commit(&self, tx: Self::Tx) -> Result<()> {
        self.store.commit(tx).await
    }

    async fn rollback(&self, tx: Self::Tx) -> Result<()> {
        self.store.rollback(tx).await
    }

    fn classify(&self, error: &(dyn StdError + 'static)) -> Option<ErrorKind> {
        self.store.classify(error)
    }

    fn max_transactions(&self) -> Option<NonZeroUsize> {
        self.store.max_transactions()
    }

    fn dead_letters(&self) -> Option<&dyn DeadLetters<Tx = Self::Tx>> {
        self.store.dead_letters()
    }
}

#[async_trait]
impl<F: Fixture> DeadLetters for Lent<F> {
    async fn add_dead_letter(&self, tx: &mut Self::Tx, letter: &DeadLetter) -> Result<()> {
        self.letters()?.add_dead_letter(tx, letter).await
    }

    async fn remove_dead_letter(&self, tx: &mut Self::Tx, key: &Key) -> Result<()> {
        self.letters()?.remove_dead_letter(tx, key).await
    }

    async fn find_dead_letter(&self, key: &Key) -> Result<Option<DeadLetter>> {
        self.letters()?.find_dead_letter(key).await
    }

    async fn list_dead_letters(
        &self,
        group: &ConsumerGroup,
        after: Option<DeadLetterPlace>,
        limit: NonZeroU32,
    ) -> Result<Vec<DeadLetterInfo>> {
        self.letters()?.list_dead_letters(group, after, limit).await
    }

    async fn start_put_back(&self, key: &Key) -> Result<Option<DeadLetter>> {
        self.letters()?.start_put_back(key).await
    }

    async fn finish_put_back(&self, info: &DeadLetterInfo) -> Result<bool> {
        self.letters()?.finish_put_back(info).await
    }

    async fn delete_dead_letter(&self, key: &Key) -> Result<bool> {
        self.letters()?.delete_dead_letter(key).await
    }
}
