//! Lists the breakages, or shows the report of the one that is named.

use custom_store_breakages::{BREAKAGES, report};

#[tokio::main]
async fn main() {
    if let Some(name) = std::env::args().nth(1) {
        match report(&name).await {
            Some(report) => println!("{report}"),
            None => println!("there is no breakage {name:?}; without a name, they are listed"),
        }
        return;
    }
    for breakage in BREAKAGES {
        println!("{}: {}; found by `{}`", breakage.name, breakage.mistake, breakage.law);
        println!("  - {}\n  + {}", breakage.line, breakage.instead);
    }
}
