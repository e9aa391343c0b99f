//! Copies the store and its fixture, once as they are and once for each breakage, with its one line changed.

use std::error::Error;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

#[allow(dead_code, unreachable_pub, reason = "it is written for the library")]
#[path = "src/table.rs"]
mod table;

fn main() -> Result<(), Box<dyn Error>> {
    let sources = ["../src/lib.rs", "../tests/conformance.rs"];
    for source in sources.into_iter().chain(["build.rs", "src/table.rs"]) {
        println!("cargo::rerun-if-changed={source}");
    }
    let [store, fixture] = sources.map(fs::read_to_string);
    let (store, fixture) = (store?, fixture?);
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    let mut index = String::new();
    let mut copies = vec![("sound", store.clone())];
    for breakage in table::BREAKAGES {
        let (name, line) = (breakage.name, breakage.line);
        let found = store.lines().filter(|found| found.trim() == line).count();
        if found != 1 {
            return Err(format!("the store has the line of {name:?} {found} times, not once: {line}").into());
        }
        copies.push((name, store.replacen(line, breakage.instead, 1)));
    }
    for (name, store) in copies {
        let folder = out.join(name);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("custom_store.rs"), store)?;
        let imported = fixture.replacen("use custom_store::", "use super::custom_store::", 1);
        fs::write(folder.join("conformance.rs"), imported)?;
        let paths = ["custom_store.rs", "conformance.rs"].map(|file| folder.join(file).display().to_string());
        writeln!(index, "copy! {{ {name} {:?} {:?} }}", paths[0], paths[1])?;
    }
    fs::write(out.join("copies.rs"), index)?;
    Ok(())
}
