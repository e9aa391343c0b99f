//! The inbox pattern (idempotent consumer) on SQLite, by rusqlite.
