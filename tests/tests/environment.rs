//! The documented table of environment variables against the code.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

const TABLE: &str = include_str!("../../docs/src/environment.md");
const PREFIXES: [&str; 4] = ["NCCL_", "RINGSIGHT_", "OTEL_", "NVTX_"];
/// The system's, cargo's, CUDA's and CI's own variables, which nobody sets for us.
const FOREIGN: [&str; 10] = [
    "CARGO",
    "CARGO_CFG_TARGET_ARCH",
    "CARGO_MANIFEST_DIR",
    "CARGO_TARGET_DIR",
    "CI",
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LD_LIBRARY_PATH",
    "PATH",
    "XDG_CACHE_HOME",
];

fn is_name(word: &str) -> bool {
    word.bytes()
        .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
        && !word.ends_with('_')
}

fn is_ours(word: &str) -> bool {
    let prefixed = |prefix: &str| word.len() > prefix.len() && word.starts_with(prefix);
    PREFIXES.iter().any(|prefix| prefixed(prefix)) && is_name(word)
}

/// Names of variables that stand in back quotes; those that end in `_*` stand for all that begin so.
fn documented() -> (BTreeSet<&'static str>, Vec<&'static str>) {
    let words = TABLE.split('`');
    let families = words
        .clone()
        .filter_map(|word| word.strip_suffix('*'))
        .filter(|word| word.ends_with('_'));
    (words.filter(|word| is_ours(word)).collect(), families.collect())
}

/// Names of variables between double quotes, but for those that are only given to a child process.
fn mentioned(text: &str) -> BTreeSet<&str> {
    let pieces: Vec<&str> = text.split('"').collect();
    pieces
        .windows(2)
        .filter(|pair| {
            !pair[0].trim_end().ends_with(".env(") && !pair[0].trim_end().ends_with(".env_remove(")
        })
        .map(|pair| pair[1])
        .filter(|word| is_ours(word))
        .collect()
}

/// Names that are given to a function which reads the environment, whatever they begin with.
fn read(text: &str) -> BTreeSet<&str> {
    ["env::var(", "env::var_os(", "env::text(", "env::switch("]
        .iter()
        .flat_map(|call| text.split(call).skip(1))
        .filter_map(|after| after.trim_start().strip_prefix('"')?.split('"').next())
        .filter(|word| is_name(word))
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
        "testbed",
        "xtask",
        "tests/src",
        "verbs",
        "failover",
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
    let texts: Vec<&str> = texts
        .iter()
        // What follows the first test module is tests.
        .map(|text| text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(text))
        .collect();
    // Values with such a name are not variables: macros of the header, options of windows.
    let values = ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"];
    let code: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| mentioned(text))
        .filter(|name| !values.contains(name))
        .collect();
    let (table, families) = documented();
    let of_a_family = |name: &str| families.iter().any(|family| name.starts_with(family));
    let undocumented: Vec<_> = code
        .iter()
        .copied()
        .chain(texts.iter().flat_map(|text| read(text)))
        .filter(|name| !table.contains(name) && !of_a_family(name) && !FOREIGN.contains(name))
        .collect();
    let unread: Vec<_> = table.difference(&code).collect();
    assert!(
        undocumented.is_empty(),
        "read by the code, not in docs/src/environment.md: {undocumented:?}"
    );
    assert!(
        unread.is_empty(),
        "in docs/src/environment.md, not read by the code: {unread:?}"
    );
    for family in families {
        assert!(
            code.iter().any(|name| name.starts_with(family)),
            "nothing reads a {family}*"
        );
    }
}

#[test]
fn the_library_reads_variables_in_one_place() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    for room in ["comm/src", "comm/base/src", "verbs/src", "failover/src"] {
        sources(&root.join(room), &mut files);
    }
    assert!(files.len() > 30, "only {} sources found", files.len());
    // The environment, and the configuration files that say the rest.
    let places = ["comm/base/src/variables.rs", "comm/base/src/variables/conf.rs"];
    let is_place = |file: &PathBuf| places.iter().any(|place| file.ends_with(place));
    assert_eq!(files.iter().filter(|file| is_place(file)).count(), places.len());
    files.retain(|file| !is_place(file));
    for file in files {
        let text = fs::read_to_string(&file).expect("a source file");
        let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or(&text);
        assert!(
            !text.contains("std::env::var") && !text.contains(" env::var"),
            "{}",
            file.display()
        );
    }
}
