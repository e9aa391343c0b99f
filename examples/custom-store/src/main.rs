//! A consumer on the store of this crate: five deliveries of three messages, one invoice each. Run it twice.
//!
//! ```sh
//! cargo run -p custom-store            # keeps its file in the folder for temporary files
//! cargo run -p custom-store -- my.redb
//! ```

use std::error::Error;
use std::path::PathBuf;
use std::sync::Arc;

use custom_store::RedbInbox;
use inbox_core::{Inbox, MessageId, Outcome};
use redb::{Database, ReadableTable, ReadableTableMetadata, TableDefinition};

const INVOICES: TableDefinition<&str, &str> = TableDefinition::new("invoices");

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args_os().nth(1).map(PathBuf::from);
    let path = path.unwrap_or_else(|| std::env::temp_dir().join("custom-store.redb"));
    let db = Arc::new(Database::create(&path)?);
    let inbox = Inbox::new(RedbInbox::new(Arc::clone(&db)), "billing")?;
    inbox.setup().await?;

    for order in ["order-1", "order-2", "order-1", "order-3", "order-2"] {
        let id = MessageId::new(order)?;
        let outcome = inbox
            .process(id, async |tx| {
                // The effect, in the transaction of the claim.
                let mut invoices = tx.open_table(INVOICES)?;
                invoices.insert(order, "to be paid")?;
                Ok::<_, redb::Error>(())
            })
            .await?;
        match outcome {
            Outcome::Processed(()) => println!("{order}: invoiced"),
            Outcome::Duplicate(_) => println!("{order}: a duplicate, skipped"),
            Outcome::InFlight(_) => println!("{order}: another consumer is at it; do not acknowledge"),
        }
    }

    let invoices = db.begin_read()?.open_table(INVOICES)?;
    println!("{} invoices in {}:", invoices.len()?, path.display());
    for invoice in invoices.iter()? {
        println!("  {}", invoice?.0.value());
    }
    println!("Run it again: every delivery is a duplicate then.");
    Ok(())
}
