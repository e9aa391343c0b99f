//! The conformance suite of the inbox pattern: run it on a store for your own database.
