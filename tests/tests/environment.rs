//! The documented table of environment variables against the code.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

const TABLE: &str = include_str!("../../docs/src/environment.md");
const PREFIXES: [&str; 2] = ["NCCL_", "RINGSIGHT_"];

/// Names of variables in `text` that stand between two `quote`s.
fn quoted(text: &str, quote: char) -> BTreeSet<&str> {
    text.split(quote)
        .filter(|word| {
            PREFIXES
                .iter()
                .any(|prefix| word.len() > prefix.len() && word.starts_with(prefix))
                && word
                    .bytes()
                    .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
                && !word.ends_with('_')
        })
        .collect()
}

/// Rust sources that are not tests, below `folder`.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the workspace").flatten() {
        let path = entry.path();
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if path.is_dir() {
            if !["tests", "benches", "examples", "target"].contains(&&*name) {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            found.push(path);
        }
    }
}

#[test]
fn every_variable_that_is_read_is_documented_and_the_other_way_round() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace");
    let mut files = Vec::new();
    for room in [
        "comm",
        "kernels",
        "probes",
        "collector",
        "exporters",
        "xtask",
        "tests/src",
    ] {
        sources(&root.join(room), &mut files);
    }
    // The read-back tests are where the backends' variables are read.
    files.push(root.join("tests/tests/backends.rs"));
    files.push(root.join("exporters/tests/html_chromium.rs"));
    assert!(files.len() > 50, "only {} sources found", files.len());
    let texts: Vec<String> = files
        .iter()
        .map(|file| fs::read_to_string(file).expect("a source file"))
        .collect();
    let code: BTreeSet<&str> = texts
        .iter()
        // What follows the first test module is tests.
        .map(|text| text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(text))
        .flat_map(|text| quoted(text, '"'))
        // Values with such a name are not variables: result codes, macros of the header.
        .filter(|name| !["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"].contains(name))
        .collect();
    let table = quoted(TABLE, '`');
    let undocumented: Vec<_> = code.difference(&table).collect();
    let unread: Vec<_> = table.difference(&code).collect();
    assert!(
        undocumented.is_empty(),
        "read by the code, not in docs/src/environment.md: {undocumented:?}"
    );
    assert!(
        unread.is_empty(),
        "in docs/src/environment.md, not read by the code: {unread:?}"
    );
}
