//! The conformance suite on the store. This is all that the author of a store has to write to be tested.

use std::sync::Arc;

use custom_store::{RedbInbox, RedbTx};
use inbox_conformance::{Fixture, Law, async_trait};
use inbox_core::{Error, ErrorKind, Result};
use redb::{Database, ReadableTable, TableDefinition};
use tempfile::TempDir;

/// How often each effect was done. A handler would insert a row; so does this, in effect.
const EFFECTS: TableDefinition<&str, u64> = TableDefinition::new("effects");

/// One fresh place: a database in a folder of its own, which goes with this value.
pub(crate) struct Place {
    store: RedbInbox,
    db: Arc<Database>,
    _folder: TempDir,
}

impl Place {
    pub(crate) fn fresh() -> Result<Self> {
        let folder = tempfile::tempdir().map_err(broken)?;
        let db = Arc::new(Database::create(folder.path().join("inbox.redb")).map_err(broken)?);
        // The effects' table is there before the store is set up.
        let tx = db.begin_write().map_err(broken)?;
        tx.open_table(EFFECTS).map_err(broken)?;
        tx.commit().map_err(broken)?;
        let store = RedbInbox::new(Arc::clone(&db));
        Ok(Self {
            store,
            db,
            _folder: folder,
        })
    }
}

fn broken(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Store, "the fixture failed").with_source(error)
}

#[async_trait]
impl Fixture for Place {
    type Store = RedbInbox;

    /// One process opens a redb file, so another consumer's handle is a clone.
    async fn connect(&self) -> Result<RedbInbox> {
        Ok(self.store.clone())
    }

    async fn write_effect(&self, _store: &RedbInbox, tx: &mut RedbTx, name: &str) -> Result<()> {
        let mut effects = tx.open_table(EFFECTS).map_err(broken)?;
        let done = effects.get(name).map_err(broken)?.map_or(0, |count| count.value());
        effects.insert(name, done + 1).map_err(broken)?;
        Ok(())
    }

    /// As an outsider sees them: in a transaction for reading.
    async fn count_effects(&self, name: &str) -> Result<u64> {
        let effects = self
            .db
            .begin_read()
            .map_err(broken)?
            .open_table(EFFECTS)
            .map_err(broken)?;
        Ok(effects.get(name).map_err(broken)?.map_or(0, |count| count.value()))
    }

    /// What this database does not have is declared, with the reason, and the report shows it.
    fn cannot(&self, law: Law) -> Option<String> {
        (law == Law::Clock).then(|| "redb runs in the consumer's process and has no clock but that one's".into())
    }
}

mod laws {
    inbox_conformance::laws!(super::Place::fresh().unwrap_or_else(|error| panic!("{error:#}")));
}
