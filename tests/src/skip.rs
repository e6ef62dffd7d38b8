//! How a test says that it cannot run here. Shared by the test crates of the workspace through `#[path]`.
#![allow(unreachable_pub, reason = "public in one of the crates that include it")]

/// Environment variable that names the file to which skips are appended, one `name: reason` a line; `cargo xtask test`
/// sets it and prints them at its end.
const SKIP_LOG: &str = "RINGSIGHT_SKIP_LOG";

/// Says aloud that `test` does not run here, and why.
pub fn skip(test: &str, reason: &str) {
    use std::io::Write as _;

    // Not by `println!`, of which the test harness shows nothing when the test passes.
    let _ = writeln!(std::io::stderr(), "SKIPPED {test}: {reason}");
    if let Some(log) = std::env::var_os(SKIP_LOG) {
        let written = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .and_then(|mut file| writeln!(file, "{test}: {}", reason.replace('\n', " ")));
        written
            .unwrap_or_else(|error| panic!("cannot note the skip of {test} in {}: {error}", log.display()));
    }
}
