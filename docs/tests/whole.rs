//! The guide is whole: every chapter is listed and tested, every link and picture is there, every program runs.

#![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use inbox_conformance::Law;

/// What a block of code may be of, beside Rust: nothing that somebody could take for Rust that nobody runs.
const OTHER_LANGUAGES: [&str; 6] = ["python", "sh", "sql", "text", "toml", "console"];

fn docs() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The chapters' files, by name.
fn chapters() -> BTreeMap<String, String> {
    let files = fs::read_dir(docs().join("src"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let pages = files.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    let name = |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
    pages
        .map(|path| (name(&path), fs::read_to_string(&path).unwrap()))
        .collect()
}

/// A line of a page, and whether it is part of a block of code.
fn lines(page: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut fenced = false;
    page.lines().map(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        (fenced || fence, line)
    })
}

/// The languages of a page's blocks of code.
fn languages(page: &str) -> Vec<&str> {
    let mut open = false;
    let mut languages = Vec::new();
    for line in page.lines() {
        if let Some(language) = line.trim_start().strip_prefix("```") {
            open = !open;
            if open {
                languages.push(language);
            }
        }
    }
    assert!(!open, "a block of code does not end");
    languages
}

/// Where the links and pictures of a page lead.
fn targets(page: &str) -> Vec<String> {
    let prose: Vec<&str> = lines(page).filter(|(code, _)| !code).map(|(_, line)| line).collect();
    let prose = prose.join("\n");
    prose
        .split("](")
        .skip(1)
        .map(|rest| rest.split(')').next().unwrap().to_owned())
        .collect()
}

/// The anchors of a page's headings, as mdBook makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = lines(page).filter(|(code, line)| !code && line.starts_with('#'));
    let anchor = |line: &str| -> String {
        let text = line.trim_start_matches('#').trim().to_lowercase();
        let kept = text
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(|(_, line)| anchor(line)).collect()
}

#[test]
fn every_chapter_is_listed_once_and_tested() {
    let mut pages = chapters();
    let summary = pages.remove("SUMMARY.md").unwrap();
    let listed = targets(&summary);
    let names: Vec<&str> = pages.keys().map(String::as_str).collect();
    let mut sorted: Vec<&str> = listed.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    assert_eq!(sorted, names, "SUMMARY.md against the files");

    let crate_root = fs::read_to_string(docs().join("guide.rs")).unwrap();
    for name in names {
        assert!(
            crate_root.contains(&format!("\"{name}\",")),
            "{name} is not in guide.rs, so its code is not run"
        );
    }
}

#[test]
fn every_link_and_picture_is_there() {
    let pages = chapters();
    let mut used = BTreeSet::new();
    let mut of_chapters = 0;
    for (name, page) in &pages {
        for target in targets(page) {
            if target.starts_with("https://") {
                continue;
            }
            let (file, anchor) = target.split_once('#').unwrap_or((&target, ""));
            let file = if file.is_empty() { name } else { file };
            assert!(
                docs().join("src").join(file).is_file(),
                "{name} has a link to {target}, which is not there"
            );
            if !anchor.is_empty() {
                assert!(
                    anchors(&pages[file]).contains(anchor),
                    "{name} has a link to {target}, a heading that is not there"
                );
            }
            used.insert(file.to_owned());
            of_chapters += usize::from(name != "SUMMARY.md");
        }
    }
    assert!(
        of_chapters > 20,
        "so few links that they cannot have been read rightly: {of_chapters}"
    );
    for entry in fs::read_dir(docs().join("src/images")).unwrap() {
        let image = format!("images/{}", entry.unwrap().file_name().to_str().unwrap());
        assert!(used.contains(&image), "{image} is in no chapter");
    }
}

/// Pictures are shown by mdBook, by GitHub and by docs.rs, light and dark: each brings its own ground, and says what it shows.
#[test]
fn every_picture_has_a_title_and_a_ground_of_its_own() {
    for entry in fs::read_dir(docs().join("src/images")).unwrap() {
        let path = entry.unwrap().path();
        let picture = fs::read_to_string(&path).unwrap();
        for part in [
            "<title",
            "role=\"img\"",
            "class=\"panel\"",
            "prefers-color-scheme: dark",
        ] {
            assert!(picture.contains(part), "{} has no {part}", path.display());
        }
    }
}

#[test]
fn every_rust_block_is_run() {
    let mut programs = 0;
    for (name, page) in chapters() {
        for language in languages(&page) {
            if OTHER_LANGUAGES.contains(&language) {
                continue;
            }
            // To be refused by the compiler is a claim as well, of one error.
            let refused = language
                .strip_prefix("rust,compile_fail,")
                .is_some_and(|code| code.starts_with('E'));
            assert!(
                language == "rust" || refused,
                "{name} has a block of \"{language}\", which is not run"
            );
            programs += 1;
        }
    }
    assert!(
        programs > 20,
        "so few programs that they cannot have been read rightly: {programs}"
    );
}

/// The guide goes through the laws one by one, in their order and words.
#[test]
fn every_law_has_its_section() {
    let page = &chapters()["writing-a-store.md"];
    let plain = |text: &str| text.replace('`', "").split_whitespace().collect::<Vec<_>>().join(" ");
    let headings = page
        .lines()
        .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'));
    let laws: Vec<&str> = Law::ALL.iter().map(|law| law.name()).collect();
    assert_eq!(headings.collect::<Vec<_>>(), laws);
    for law in Law::ALL {
        assert!(
            plain(page).contains(&plain(law.promise())),
            "the guide says otherwise of {law}: {}",
            law.promise()
        );
    }
}
