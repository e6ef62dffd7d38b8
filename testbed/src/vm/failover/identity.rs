//! The identity of the code that an outcome belongs to.

use std::process::Command;

use anyhow::Result;

use crate::{process, random::fnv1a, workspace};

/// What decides what comes of a case: the protocol, what carries it out, the program that runs and judges it, and the links and the
/// stand-in that it runs on; without what only other tests run.
const SOURCES: [&str; 10] = [
    "failover/src",
    "verbs/src",
    "verbs/tests/failover",
    "tests/src/fabric.rs",
    "tests/src/notices.rs",
    "vm/rdma-setup",
    "vm/fakehca",
    ":!*/model/*",
    ":!*/tests.rs",
    ":!*/fuzzing.rs",
];

/// A word of the sources as they are: other ones have another one.
pub(super) fn identity() -> Result<String> {
    let files = files()?;
    let hashes = process::output(git().args(["hash-object", "--"]).args(files.lines()))?;
    Ok(format!("{:016x}", fnv1a((files + &hashes).into_bytes())))
}

/// The sources, committed or not, one a line.
fn files() -> Result<String> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard", "--"];
    process::output(git().args(list).args(SOURCES))
}

fn git() -> Command {
    let mut git = Command::new("git");
    git.current_dir(workspace::root());
    git
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_are_those_of_what_runs() {
        let files = files().unwrap();
        let has = |end: &str| files.lines().any(|file| file == end);
        assert!(has("failover/src/receiver.rs") && has("verbs/src/endpoint/driver.rs"));
        assert!(has("verbs/tests/failover/case.rs") && has("vm/rdma-setup"));
        assert!(!has("failover/src/model/world.rs"));
        assert_eq!(identity().unwrap(), identity().unwrap());
    }
}
