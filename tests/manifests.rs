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
/// no lower, or it would not build there, and no higher, or it would turn people away for nothing.
#[test]
fn the_rust_version_is_the_lowest_that_the_locked_dependencies_allow() {
    let metadata = metadata();
    let packages: BTreeMap<&str, &Value> = metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| (text(package, "id"), package))
        .collect();
    let nodes: BTreeMap<&str, &Value> = metadata["resolve"]["nodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| (text(node, "id"), node))
        .collect();
    let mut needed = (version("1.85"), "edition 2024");
    let mut seen = BTreeSet::new();
    let members = metadata["workspace_members"].as_array().unwrap();
    let mut reached: Vec<&str> = members.iter().map(|id| id.as_str().unwrap()).collect();
    while let Some(id) = reached.pop() {
        if !seen.insert(id) {
            continue;
        }
        let package = packages[id];
        if !package["source"].is_null() {
            let needs = package["rust_version"].as_str().map_or((0, 0, 0), version);
            needed = needed.max((needs, text(package, "name")));
        }
        for dependency in nodes[id]["deps"].as_array().unwrap() {
            // A kind of null is an ordinary dependency; tests and benches may need more.
            if dependency["dep_kinds"]
                .as_array()
                .unwrap()
                .iter()
                .any(|kind| kind["kind"].is_null())
            {
                reached.push(text(dependency, "pkg"));
            }
        }
    }
    for member in members {
        let package = packages[member.as_str().unwrap()];
        assert_eq!(
            version(text(package, "rust_version")),
            needed.0,
            "{} against {}",
            text(package, "name"),
            needed.1
        );
    }
}

#[test]
fn every_published_crate_says_what_it_is() {
    for package in metadata()["packages"].as_array().unwrap() {
        if !package["source"].is_null() || package["publish"].as_array().is_some_and(Vec::is_empty) {
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
