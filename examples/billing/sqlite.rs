//! The books in SQLite.

use std::path::{Path, PathBuf};

use inbox::Transactions;
use inbox::sqlite::rusqlite::{Connection, params};
use inbox::sqlite::{SqliteInbox, SqliteTx};

use crate::{Books, Delivery, Ledger, Result};

pub(crate) struct SqliteLedger {
    store: SqliteInbox,
    path: PathBuf,
}

impl SqliteLedger {
    pub(crate) async fn open(path: &Path) -> Result<Self> {
        let store = SqliteInbox::open(path).await?;
        Ok(Self {
            store,
            path: path.into(),
        })
    }
}

impl Ledger for SqliteLedger {
    type Inbox = SqliteInbox;

    fn inbox(&self) -> SqliteInbox {
        self.store.clone()
    }

    async fn set_up(&self) -> Result<()> {
        let tx = self.store.begin().await?;
        // Without a unique key, on purpose: a second invoice for an event would be seen.
        tx.execute_batch(
            "CREATE TABLE IF NOT EXISTS invoices (
                 consumer_group TEXT NOT NULL,
                 event_id       BLOB NOT NULL,
                 order_id       TEXT NOT NULL,
                 customer_id    TEXT NOT NULL,
                 amount_cents   INTEGER NOT NULL,
                 currency       TEXT NOT NULL
             ) STRICT",
        )?;
        Ok(self.store.commit(tx).await?)
    }

    async fn invoice(tx: &mut SqliteTx, group: &str, Delivery { id, order, .. }: &Delivery) -> Result<()> {
        tx.prepare_cached("INSERT INTO invoices VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
            .execute(params![
                group,
                id.as_bytes(),
                order.order_id,
                order.customer_id,
                order.amount_cents,
                order.currency
            ])?;
        Ok(())
    }

    async fn books(&self) -> Result<Books> {
        let connection = Connection::open(&self.path)?;
        let (invoices, invoiced_events, unrecorded, recorded_events) = connection.query_row(
            "SELECT (SELECT count(*) FROM invoices),
                    (SELECT count(*) FROM (SELECT DISTINCT consumer_group, event_id FROM invoices)),
                    (SELECT count(*) FROM invoices AS i WHERE NOT EXISTS (
                         SELECT 1 FROM inbox_events AS e
                         WHERE e.event_id = i.event_id AND e.consumer_group = i.consumer_group)),
                    (SELECT count(*) FROM inbox_events)",
            [],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
        )?;
        let totals = connection
            .prepare("SELECT currency, sum(amount_cents) FROM invoices GROUP BY currency")?
            .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
            .collect::<Result<_, _>>()?;
        Ok(Books {
            invoices,
            invoiced_events,
            unrecorded,
            recorded_events,
            totals,
        })
    }
}
