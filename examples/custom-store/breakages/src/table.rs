// The ten breakages. The build script makes a copy of the store for each; it and the library both include this file.

/// One line of the store, and what it is changed to.
#[derive(Debug)]
pub struct Breakage {
    /// The name of the copy.
    pub name: &'static str,
    /// The law that finds it.
    pub law: &'static str,
    /// Words of the failure that point to it.
    pub words: &'static str,
    /// How an author gets there.
    pub mistake: &'static str,
    /// The line, without its indentation. It is in the store once.
    pub line: &'static str,
    /// What stands there instead.
    pub instead: &'static str,
}

/// All of them.
pub const BREAKAGES: &[Breakage] = &[
    Breakage {
        name: "commit_stores_nothing",
        law: "first",
        words: "says Ok and stores nothing",
        mistake: "the wrong one of two calls that look alike",
        line: "let committed = tx.tx.commit();",
        instead: "let committed = tx.tx.abort();",
    },
    Breakage {
        name: "record_without_time",
        law: "first",
        words: "without a time",
        mistake: "a time that is stored and not read back",
        line: "let processed = at.map_or_else(Processed::default, Processed::at);",
        instead: "let processed = at.map_or_else(Processed::default, |_| Processed::default());",
    },
    Breakage {
        name: "rollback_commits",
        law: "rollback",
        words: "outlives its transaction",
        mistake: "one way to end a transaction, for both",
        line: "blocking(move || tx.tx.abort().map_err(failed)).await",
        instead: "self.commit(tx).await",
    },
    Breakage {
        name: "remembers_in_memory",
        law: "handover",
        words: "takes the end of the first transaction for its commit",
        mistake: "a cache of what was seen, which a rollback does not know of",
        line: "let found = table.get(key).map_err(failed)?.map(|row| processed(row.value()));",
        instead: "static SEEN: std::sync::Mutex<std::collections::BTreeSet<(ConsumerGroup, inbox_core::MessageId)>> = \
                  std::sync::Mutex::new(std::collections::BTreeSet::new()); let found = (!SEEN.lock().unwrap()\
                  .insert((group.clone(), id))).then(|| Processed::at(SystemTime::now()));",
    },
    Breakage {
        name: "key_without_group",
        law: "groups",
        words: "a key without the group",
        mistake: "the id alone as the key",
        line: "let key = (group.as_str(), id.as_bytes());",
        instead: "let key = (\"\", id.as_bytes());",
    },
    Breakage {
        name: "answers_in_another_order",
        law: "batches",
        words: "answers in the order of the database's rows",
        mistake: "an order that suits the database, not put back",
        line: "for delivery in deliveries {",
        instead: "for delivery in deliveries.iter().rev() {",
    },
    Breakage {
        name: "fingerprint_not_read",
        law: "fingerprint",
        words: "does not read",
        mistake: "a column that is written and not read",
        line: "processed.with_fingerprint(fingerprint.copied().map(Fingerprint::from_bytes))",
        instead: "processed.with_fingerprint(None)",
    },
    Breakage {
        name: "setup_empties",
        law: "setup",
        words: "drops or empties",
        mistake: "DROP and CREATE, for a clean start",
        line: "self.write(|tx| tx.open_table(RECORDS).map(drop).map_err(failed)).await",
        instead: "self.write(|tx| tx.delete_table(RECORDS).and_then(|_| tx.open_table(RECORDS)).map(drop).map_err(failed)).await",
    },
    Breakage {
        name: "purge_on_the_wrong_side",
        law: "purge",
        words: "a cutoff on the wrong side",
        mistake: "greater for less",
        line: "let old = table.extract_if(|(group, _), (at, _)| of_group(group) && at < cutoff);",
        instead: "let old = table.extract_if(|(group, _), (at, _)| of_group(group) && at > cutoff);",
    },
    Breakage {
        name: "time_of_the_claim",
        law: "purge",
        words: "an age that counts from the claim",
        mistake: "the time that the claim wrote left as it is",
        line: "table.insert((group.as_str(), id.as_bytes()), value).map_err(failed)?;",
        instead: "let _ = (&mut table, group, id, value);",
    },
];
