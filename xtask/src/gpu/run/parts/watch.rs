//! The collector attached to the driver's job.

use std::{
    fs,
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{
    super::step::{Steps, Verdict},
    driver::driver,
};
use crate::process::{self, Guarded};

/// Operations of the driver's `watch` mode: eager, and in replays.
const OPERATIONS: u64 = 500;

/// Why the collector cannot attach here.
pub(super) fn lacks() -> Option<String> {
    // SAFETY: asks for a number.
    (unsafe { libc::geteuid() } != 0).then(|| "the collector attaches as root".to_owned())
}

/// Waits until a file is there, or the process that is to make it has ended.
fn appears(file: &Path, maker: &mut Guarded, limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    while !file.exists() {
        if let Some(status) = maker.child().try_wait()? {
            bail!("{} has ended: {}", maker.name(), process::reason(status));
        }
        if Instant::now() >= end {
            bail!("{} was not ready after {limit:?}", maker.name());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Processes that `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    for kind in ["t", "p"] {
        let name = format!("2{kind}");
        // Each kind on its own: what one leaves behind would start the other too early.
        let verdict = attached(steps, kind).unwrap_or_else(|error| Err(format!("{error:#}")));
        steps.enter(&name, verdict);
    }
    Ok(())
}

fn attached(steps: &Steps<'_>, kind: &str) -> Result<Verdict> {
    let folder = steps.file(kind);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    let log = |name: &str| fs::File::create(folder.join(name));
    let mut command = driver(steps, &format!("watch 2 {kind}"));
    command
        .arg(&folder)
        .stdout(log("job.log")?)
        .stderr(log("job.err")?);
    let mut job = Guarded::start("the job", &mut command, libc::SIGKILL)?;
    appears(&folder.join("ready"), &mut job, Duration::from_secs(40))?;
    let pids = match kind {
        "p" => children(job.pid()),
        _ => vec![job.pid()],
    };
    let (summary, attached) = (folder.join("summary.json"), folder.join("attached"));
    let mut command = Command::new(steps.host.program("ringsight"));
    command
        .arg("attach")
        .args(pids.iter().map(u32::to_string))
        .arg("--out")
        .arg(folder.join("spans.jsonl"))
        .arg("--summary")
        .arg(&summary)
        .arg("--ready-file")
        .arg(&attached)
        .stdout(log("collector.log")?)
        .stderr(log("collector.err")?);
    let mut collector = Guarded::start("the collector", &mut command, libc::SIGTERM)?;
    appears(&attached, &mut collector, Duration::from_secs(20))?;
    fs::write(folder.join("go"), "")?;
    let status = job.wait(Duration::from_secs(60))?;
    if !status.success() {
        bail!("the job: {}", process::reason(status));
    }
    let status = collector.wait(Duration::from_secs(20))?;
    if !status.success() {
        bail!("the collector: {}", process::reason(status));
    }
    let text = fs::read_to_string(&summary).with_context(|| format!("reading {}", summary.display()))?;
    let summary: Value = serde_json::from_str(&text).context("the collector's summary")?;
    // Megabytes that nobody reads.
    let _ = fs::remove_file(folder.join("spans.jsonl"));
    Ok(complete(&summary))
}

/// Whether every operation was seen, and whole.
fn complete(summary: &Value) -> Verdict {
    let number = |value: &Value| value.as_u64().ok_or("the summary cannot be read");
    let (roots, lost) = (number(&summary["spans"]["root"])?, number(&summary["lost"])?);
    let unfinished = number(&summary["unfinished"])?;
    let text = format!("{roots} of {OPERATIONS} operations, {lost} events lost, {unfinished} not ended");
    if roots == OPERATIONS && lost == 0 && unfinished == 0 {
        Ok(text)
    } else {
        Err(text)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_operation_must_be_there() {
        let summary =
            |roots: u64, lost: u64| json!({"spans": {"root": roots}, "lost": lost, "unfinished": 0});
        assert!(complete(&summary(OPERATIONS, 0)).is_ok());
        assert!(complete(&summary(OPERATIONS - 1, 0)).is_err());
        assert!(complete(&summary(OPERATIONS, 1)).is_err());
        assert!(complete(&json!({})).is_err());
    }
}
