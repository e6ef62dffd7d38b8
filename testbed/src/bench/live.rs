//! Whether a collector keeps up with a process that emits more than a record a microsecond.

use std::{process::Command, time::Duration};

use anyhow::{Result, ensure};
use ringsight_records::VERSION;

use super::{Goal, Row};
use crate::{
    demo::{collector::Collector, summary::Summary},
    process::{self, Dialogue},
    workspace::{Artifacts, cargo},
};

/// Dense records that the process emits each millisecond: a quarter more than the goal, so that a pause of the machine does not
/// miss it. Its ring then holds 52 ms of them.
const EACH_MS: u32 = 1_250;
/// Records a second that have to arrive, all of them.
const RECORDS_PER_S: f64 = 1e6;

/// Has a process of its own emit into its ring for `seconds`, a collector attached to it as to any other.
///
/// # Errors
/// If it cannot be built or run.
pub fn measure(artifacts: &Artifacts, seconds: u32) -> Result<Vec<Row>> {
    process::run(cargo().args([
        "build",
        "--release",
        "--locked",
        "-p",
        "ringsight-probes",
        "--examples",
    ]))?;
    let examples = artifacts.target.join("release/examples");
    let mut command = Command::new(examples.join("fixture_target"));
    command.arg(examples.join("libfixture_library.so"));
    let mut process = Dialogue::start("the emitting process", &mut command)?;
    let pid = process.pid();
    ensure!(process.line()? == "ready", "the emitting process is not ready");
    let mut call = |line: &str| -> Result<u64> { Ok(process.ask(line)?.parse()?) };
    let opened = call(&format!("fixture_open {VERSION}"))?;
    ensure!(opened == 0, "the emitting process has no pages: errno {opened}");
    call("fixture_communicator 7")?;
    let mut collector = Collector::attach(artifacts, &[pid], &[], &artifacts.target.join("bench"))?;
    let ns = call(&format!("fixture_stream 7 {EACH_MS} {}", seconds * 1000))?;
    let summary = collector.stop(Duration::from_secs(60))?;
    Ok(rows(&summary, ns))
}

/// What came of records that were emitted for `ns` nanoseconds.
fn rows(summary: &Summary, ns: u64) -> Vec<Row> {
    let (received, emitted) = summary
        .records
        .values()
        .fold((0, 0), |sum, kind| (sum.0 + kind.received, sum.1 + kind.emitted));
    vec![
        Row::new(
            "live collector, records received",
            received as f64 / (ns as f64 / 1e9),
            "/s",
        )
        .goal(Goal::AtLeast(RECORDS_PER_S))
        .note(format!("{received} in {:.1} s, one run", ns as f64 / 1e9)),
        Row::new(
            "live collector, records not received or lost",
            emitted.abs_diff(received).max(summary.lost) as f64,
            "",
        )
        .goal(Goal::AtMost(0.0))
        .note(format!(
            "of {emitted} that the process counted; {} told as lost",
            summary.lost
        )),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::summary::Events;

    #[test]
    fn a_record_that_is_missing_misses_the_goal() {
        let verdicts = |received, lost| {
            let events = Events {
                received,
                emitted: 2_000_000,
                lost,
                missed: 0,
            };
            let summary = Summary {
                records: [("proxy_step".to_owned(), events)].into(),
                lost,
                ..Summary::default()
            };
            rows(&summary, 1_000_000_000)
                .iter()
                .map(Row::meets)
                .collect::<Vec<_>>()
        };
        assert_eq!(verdicts(2_000_000, 0), [Some(true); 2]);
        assert_eq!(verdicts(1_999_999, 1), [Some(true), Some(false)]);
        // More than there were is no better.
        assert_eq!(verdicts(2_000_001, 0), [Some(true), Some(false)]);
        assert_eq!(verdicts(900_000, 0), [Some(false); 2]);
    }
}
