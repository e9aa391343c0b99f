//! A claim in a transaction that the caller opened with redb itself, and commits so.

use std::sync::Arc;

use custom_store::RedbInbox;
use inbox_core::{Inbox, InboxStore, MessageId, Transactions};
use redb::{Database, WriteTransaction};

type Tested = Result<(), Box<dyn std::error::Error>>;

#[tokio::test]
async fn claims_commit_and_roll_back_with_the_callers_transaction() -> Tested {
    let folder = tempfile::tempdir()?;
    let db = Arc::new(Database::create(folder.path().join("inbox.redb"))?);
    let inbox = Inbox::new(RedbInbox::new(Arc::clone(&db)), "billing")?;
    inbox.setup().await?;
    let id = MessageId::new("order-17")?;
    for (commit, expected) in [(false, false), (true, false), (false, true)] {
        let mut tx = db.begin_write()?;
        assert_eq!(inbox.is_duplicate(&mut tx, id).await?, expected);
        if commit {
            tx.commit()?;
        } else {
            tx.abort()?;
        }
    }
    let mut tx: WriteTransaction = db.begin_write()?;
    let claims = inbox
        .try_claim_batch(&mut tx, &[id.into(), MessageId::new("order-18")?.into()])
        .await?;
    let answers: Vec<bool> = claims
        .into_iter()
        .map(|claim| claim.map(|claim| claim.is_new()))
        .collect::<Result<_, _>>()?;
    assert_eq!(answers, [false, true]);
    Ok(())
}

#[tokio::test]
async fn the_store_says_what_it_does_not_have() -> Tested {
    let folder = tempfile::tempdir()?;
    let store = RedbInbox::new(Arc::new(Database::create(folder.path().join("inbox.redb"))?));
    assert!(store.dead_letters().is_none());
    assert_eq!(store.max_transactions().map(usize::from), Some(1));
    // A second transaction waits for the first one's end, and gets its turn then.
    let first = store.begin().await?;
    let second = tokio::spawn({
        let store = store.clone();
        async move { store.begin().await }
    });
    store.rollback(first).await?;
    let mut tx = second.await??;
    let claim = store
        .try_claim(&mut tx, &"billing".try_into()?, MessageId::new("order-17")?.into())
        .await?;
    assert!(claim.is_new());
    Ok(())
}
