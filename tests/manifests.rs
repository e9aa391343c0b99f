//! What the manifests promise, held against the lock file.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--locked", "--format-version", "1"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_default()
}

/// `1.85` as (1, 85, 0).
fn version(text: &str) -> (u32, u32, u32) {
    let mut numbers = text.split('.').map(|number| number.parse().unwrap());
    let mut next = || numbers.next().unwrap_or(0);
    (next(), next(), next())
}

/// The `rust-version` of each published crate is what its locked dependencies need, or edition 2024, whichever is later:
/// no lower, or it would not build there, and no higher, or it would turn people away for nothing. Of optional dependencies
/// only those count that are on by default; a feature may need more, and its crate says so.
#[test]
fn the_rust_version_is_the_lowest_that_the_locked_dependencies_allow() {
    let metadata = metadata();
    let by_id = |list: &'static str| -> BTreeMap<&str, &Value> {
        let list = if list == "nodes" {
            &metadata["resolve"]["nodes"]
        } else {
            &metadata[list]
        };
        list.as_array()
            .unwrap()
            .iter()
            .map(|item| (text(item, "id"), item))
            .collect()
    };
    let (packages, nodes) = (by_id("packages"), by_id("nodes"));
    for member in metadata["workspace_members"].as_array().unwrap() {
        let member = member.as_str().unwrap();
        if is_private(packages[member]) {
            continue;
        }
        let mut needed = (version("1.85"), "edition 2024");
        let (mut seen, mut reached) = (BTreeSet::new(), vec![member]);
        while let Some(id) = reached.pop() {
            if !seen.insert(id) {
                continue;
            }
            if !packages[id]["source"].is_null() {
                let needs = packages[id]["rust_version"].as_str().map_or((0, 0, 0), version);
                needed = needed.max((needs, text(packages[id], "name")));
            }
            for dependency in nodes[id]["deps"].as_array().unwrap() {
                // A kind of null is an ordinary dependency; tests and benches may need more.
                let kinds = dependency["dep_kinds"].as_array().unwrap();
                if kinds.iter().any(|kind| kind["kind"].is_null()) {
                    reached.push(text(dependency, "pkg"));
                }
            }
        }
        let (name, given) = (text(packages[member], "name"), text(packages[member], "rust_version"));
        assert_eq!(version(given), needed.0, "{name} against {}", needed.1);
    }
}

/// Not to be published.
fn is_private(package: &Value) -> bool {
    package["publish"].as_array().is_some_and(Vec::is_empty)
}

#[test]
fn every_published_crate_says_what_it_is() {
    for package in metadata()["packages"].as_array().unwrap() {
        if !package["source"].is_null() || is_private(package) {
            continue;
        }
        let name = text(package, "name");
        for field in ["description", "license", "readme", "repository", "rust_version"] {
            assert!(!text(package, field).is_empty(), "{name} has no {field}");
        }
        for field in ["keywords", "categories"] {
            assert!(!package[field].as_array().unwrap().is_empty(), "{name} has no {field}");
        }
    }
}
