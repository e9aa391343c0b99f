//! The books in Redis: a list with a line for each invoice.

use std::collections::{BTreeMap, BTreeSet};

use inbox::redis::redis::{AsyncCommands, AsyncIter, Client};
use inbox::redis::{RedisInbox, RedisTx};
use inbox::{ConsumerGroup, MessageId};

use crate::{Books, Delivery, Ledger, Result};

/// With the inbox's tag, so that in a cluster they stand in the slot of the records.
const INVOICES: &str = "{billing}:invoices";

pub(crate) struct RedisLedger {
    store: RedisInbox,
    client: Client,
}

impl RedisLedger {
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let store = RedisInbox::builder().tag("billing").connect(url).await?;
        let client = Client::open(url)?;
        Ok(Self { store, client })
    }
}

impl Ledger for RedisLedger {
    type Inbox = RedisInbox;

    fn inbox(&self) -> RedisInbox {
        self.store.clone()
    }

    async fn set_up(&self) -> Result<()> {
        Ok(())
    }

    async fn invoice(tx: &mut RedisTx, group: &str, Delivery { id, order, .. }: &Delivery) -> Result<()> {
        let invoice = (
            id.to_string(),
            group,
            &order.currency,
            order.amount_cents,
            &order.order_id,
            &order.customer_id,
        );
        tx.pipe().rpush(INVOICES, serde_json::to_string(&invoice)?);
        Ok(())
    }

    async fn books(&self) -> Result<Books> {
        let mut connection = self.client.get_multiplexed_async_connection().await?;
        let lines: Vec<String> = connection.lrange(INVOICES, 0, -1).await?;
        let mut totals = BTreeMap::new();
        let mut events = BTreeSet::new();
        let mut unrecorded = 0;
        for line in &lines {
            let (id, group, currency, cents, _, _): (String, String, String, i64, String, String) =
                serde_json::from_str(line)?;
            let record = self.store.key(&ConsumerGroup::new(&group)?, MessageId::new(&id)?);
            let recorded: bool = connection.exists(record).await?;
            unrecorded += i64::from(!recorded);
            *totals.entry(currency).or_default() += cents;
            events.insert((group, id));
        }
        let mut records: AsyncIter<'_, String> = connection.scan_match("inbox:{billing}:*").await?;
        let mut recorded = BTreeSet::new();
        while let Some(record) = records.next_item().await {
            recorded.insert(record?);
        }
        Ok(Books {
            invoices: i64::try_from(lines.len())?,
            invoiced_events: i64::try_from(events.len())?,
            unrecorded,
            recorded_events: i64::try_from(recorded.len())?,
            totals,
        })
    }
}
