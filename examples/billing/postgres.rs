//! The books in PostgreSQL.

use inbox::Transactions;
use inbox::postgres::sqlx::{self, PgPool, Row};
use inbox::postgres::{PostgresInbox, PostgresTx};

use crate::{Books, Delivery, Ledger, Result};

pub(crate) struct PostgresLedger {
    store: PostgresInbox,
}

impl PostgresLedger {
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let store = PostgresInbox::new(PgPool::connect(url).await?);
        Ok(Self { store })
    }
}

impl Ledger for PostgresLedger {
    type Inbox = PostgresInbox;

    fn inbox(&self) -> PostgresInbox {
        self.store.clone()
    }

    async fn set_up(&self) -> Result<()> {
        let mut tx = self.store.begin().await?;
        // One at a time: IF NOT EXISTS does not help two programs that start at once.
        sqlx::query("SELECT pg_advisory_xact_lock(20261201)")
            .execute(&mut *tx)
            .await?;
        // Without a unique key, on purpose: a second invoice for an event would be seen.
        sqlx::query(
            "CREATE TABLE IF NOT EXISTS invoices (
                 consumer_group text   NOT NULL,
                 event_id       uuid   NOT NULL,
                 order_id       text   NOT NULL,
                 customer_id    text   NOT NULL,
                 amount_cents   bigint NOT NULL,
                 currency       text   NOT NULL
             )",
        )
        .execute(&mut *tx)
        .await?;
        Ok(self.store.commit(tx).await?)
    }

    async fn invoice(tx: &mut PostgresTx, group: &str, Delivery { id, order, .. }: &Delivery) -> Result<()> {
        sqlx::query("INSERT INTO invoices VALUES ($1, $2::uuid, $3, $4, $5, $6)")
            .bind(group)
            .bind(id.to_string())
            .bind(&order.order_id)
            .bind(&order.customer_id)
            .bind(order.amount_cents)
            .bind(&order.currency)
            .execute(&mut **tx)
            .await?;
        Ok(())
    }

    async fn books(&self) -> Result<Books> {
        let counts = sqlx::query(
            "SELECT (SELECT count(*) FROM invoices),
                    (SELECT count(*) FROM (SELECT DISTINCT consumer_group, event_id FROM invoices) each),
                    (SELECT count(*) FROM invoices i WHERE NOT EXISTS (
                         SELECT 1 FROM inbox_events e
                         WHERE e.event_id = i.event_id AND e.consumer_group = i.consumer_group)),
                    (SELECT count(*) FROM inbox_events)",
        )
        .fetch_one(self.store.pool())
        .await?;
        let totals = sqlx::query("SELECT currency, sum(amount_cents)::bigint FROM invoices GROUP BY currency")
            .fetch_all(self.store.pool())
            .await?
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect::<Result<_>>()?;
        Ok(Books {
            invoices: counts.try_get(0)?,
            invoiced_events: counts.try_get(1)?,
            unrecorded: counts.try_get(2)?,
            recorded_events: counts.try_get(3)?,
            totals,
        })
    }
}
