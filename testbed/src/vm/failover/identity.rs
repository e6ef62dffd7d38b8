//! Which code an outcome is of.

use std::path::{Path, PathBuf};

use anyhow::Result;
use fs_err as fs;

use crate::{random::fnv1a, workspace};

/// What decides what comes of a case: the protocol, what carries it out, the program that runs and judges it, and the links and the
/// stand-in that it runs on.
const SOURCES: [&str; 7] = [
    "failover/src",
    "verbs/src",
    "verbs/tests/failover",
    "tests/src/fabric.rs",
    "tests/src/notices.rs",
    "vm/rdma-setup",
    "vm/fakehca",
];
/// Of these, what no program has that a guest runs.
const OF_TESTS: [&str; 3] = ["model", "tests.rs", "fuzzing.rs"];

/// A word of the sources as they are: other ones have another one.
///
/// # Errors
/// If a source cannot be read.
pub(super) fn identity() -> Result<String> {
    let root = workspace::root();
    let mut files = Vec::new();
    for source in SOURCES {
        collect(&root.join(source), &mut files)?;
    }
    let read = |file: PathBuf| {
        let text = fs::read(&file)?;
        let name = file.strip_prefix(&root).unwrap_or(&file);
        Ok((name.to_string_lossy().into_owned(), text))
    };
    Ok(of(files.into_iter().map(read).collect::<Result<_>>()?))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if path
        .file_name()
        .is_some_and(|name| OF_TESTS.iter().any(|test| name == *test))
    {
        return Ok(());
    }
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}

/// FNV-1a of names and contents, by name.
fn of(mut files: Vec<(String, Vec<u8>)>) -> String {
    files.sort();
    let parts = files.iter().flat_map(|(name, text)| [name.as_bytes(), text]);
    let bytes = parts.flat_map(|part| {
        let length = (part.len() as u64).to_le_bytes();
        length.into_iter().chain(part.iter().copied())
    });
    format!("{:016x}", fnv1a(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_sources_have_another_identity() {
        let file = |name: &str, text: &str| (name.to_owned(), text.as_bytes().to_vec());
        let both = of(vec![file("a", "x"), file("b", "y")]);
        assert_eq!(both, of(vec![file("b", "y"), file("a", "x")]));
        for other in [
            vec![file("a", "x")],
            vec![file("a", "x"), file("b", "z")],
            vec![file("a", "x"), file("c", "y")],
            vec![file("a", "xb"), file("", "y")],
        ] {
            assert_ne!(both, of(other));
        }
    }

    #[test]
    fn the_sources_are_those_of_what_runs() {
        let mut files = Vec::new();
        for source in SOURCES {
            collect(&workspace::root().join(source), &mut files).unwrap();
        }
        let has = |end: &str| files.iter().any(|file| file.ends_with(end));
        assert!(has("failover/src/receiver.rs") && has("verbs/src/endpoint/driver.rs"));
        assert!(has("verbs/tests/failover/case.rs") && !has("failover/src/model/world.rs"));
        assert_eq!(identity().unwrap(), identity().unwrap());
    }
}
