//! The collector attached to a job: the driver's, and PyTorch's on our library and on NCCL.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{
    super::step::{Steps, Verdict},
    driver::driver,
    torch::{self, Library},
};
use crate::process::{self, Guarded};

/// Operations of the driver's `watch` mode: eager, and in replays.
const OPERATIONS: u64 = 500;
/// Those of train.py.
const COLLECTIVES: u64 = 100;

/// Why the collector cannot attach here.
pub(super) fn lacks() -> Option<String> {
    // SAFETY: asks for a number.
    (unsafe { libc::geteuid() } != 0).then(|| "the collector attaches as root".to_owned())
}

/// Waits until a file is there, or a process that is to make it has ended.
fn appears(file: &Path, makers: &mut [Guarded], limit: Duration) -> Result<()> {
    let end = Instant::now() + limit;
    while !file.exists() {
        for maker in &mut *makers {
            if let Some(status) = maker.child().try_wait()? {
                bail!("{} has ended: {}", maker.name(), process::reason(status));
            }
        }
        if Instant::now() >= end {
            bail!("{} was not there after {limit:?}", file.display());
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
        let folder = prepared(steps, kind)?;
        let mut command = driver(steps, &format!("watch 2 {kind}"));
        command.arg(&folder);
        let begun = Instant::now();
        let ended = attached(steps, &folder, vec![command], kind == "p", &[]);
        let verdict = judged(ended, |summary| complete(summary, OPERATIONS));
        steps.enter_after(&format!("2{kind}"), begun.elapsed(), verdict);
    }
    let torch = steps
        .host
        .lacks_gpus(2)
        .or_else(|| steps.host.python_with_torch().err());
    for (name, library) in [("torch-ours", Library::Ours), ("torch-nccl", Library::Nccl)] {
        if let Some(reason) = &torch {
            steps.skip(name, reason);
            continue;
        }
        let folder = prepared(steps, name)?;
        let watched = ["--watched", torch::text(&folder)?];
        let commands = torch::ranks(steps, 2, library, "train.py", &watched)?;
        let begun = Instant::now();
        let ended = attached(steps, &folder, commands, false, &[]);
        let verdict = judged(ended, |summary| match library {
            Library::Ours => complete(summary, COLLECTIVES),
            Library::Nccl => calls(summary, 2 * COLLECTIVES),
        });
        steps.enter_after(name, begun.elapsed(), verdict);
    }
    Ok(())
}

fn judged(ended: Result<Value>, judge: impl FnOnce(&Value) -> Verdict) -> Verdict {
    ended
        .map_err(|error| format!("{error:#}"))
        .and_then(|summary| judge(&summary))
}

/// An empty folder: what an earlier job has left would start this one too early.
pub(super) fn prepared(steps: &Steps<'_>, name: &str) -> Result<PathBuf> {
    let folder = steps.file(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).with_context(|| format!("creating {}", folder.display()))?;
    Ok(folder)
}

/// Runs the processes of a job that waits for the file `go`, the collector attached to them or to what they have started, with
/// these options besides; its summary.
pub(super) fn attached(
    steps: &Steps<'_>,
    folder: &Path,
    commands: Vec<Command>,
    to_children: bool,
    options: &[&str],
) -> Result<Value> {
    let log = |name: &str| fs::File::create(folder.join(name));
    let mut job = Vec::new();
    for (number, mut command) in commands.into_iter().enumerate() {
        let out = log(&format!("job-{number}.log"))?;
        command.stdout(out.try_clone()?).stderr(out);
        let name = format!("process {number} of the job");
        job.push(Guarded::start(&name, &mut command, libc::SIGKILL)?);
    }
    appears(&folder.join("ready"), &mut job, Duration::from_secs(60))?;
    let pids: Vec<u32> = if to_children {
        job.iter().flat_map(|process| children(process.pid())).collect()
    } else {
        job.iter().map(Guarded::pid).collect()
    };
    let (summary, attached) = (folder.join("summary.json"), folder.join("attached"));
    let out = log("collector.log")?;
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
        .args(options)
        .stdout(out.try_clone()?)
        .stderr(out);
    let mut collector = [Guarded::start("the collector", &mut command, libc::SIGTERM)?];
    appears(&attached, &mut collector, Duration::from_secs(20))?;
    fs::write(folder.join("go"), "")?;
    let [collector] = &mut collector;
    for process in job.iter_mut().chain([collector]) {
        let status = process.wait(Duration::from_secs(60))?;
        if !status.success() {
            bail!("{}: {}", process.name(), process::reason(status));
        }
    }
    let text = fs::read_to_string(&summary).with_context(|| format!("reading {}", summary.display()))?;
    // Megabytes that nobody reads.
    let _ = fs::remove_file(folder.join("spans.jsonl"));
    serde_json::from_str(&text).context("the collector's summary")
}

fn number(value: &Value) -> Result<u64, String> {
    value
        .as_u64()
        .ok_or_else(|| "the summary cannot be read".to_owned())
}

/// Whether every operation was seen, and whole.
fn complete(summary: &Value, wanted: u64) -> Verdict {
    let (roots, lost) = (number(&summary["spans"]["root"])?, number(&summary["lost"])?);
    let unfinished = number(&summary["unfinished"])?;
    let text = format!("{roots} of {wanted} operations, {lost} events lost, {unfinished} not ended");
    if roots == wanted && lost == 0 && unfinished == 0 {
        Ok(text)
    } else {
        Err(text)
    }
}

/// Whether every call on a library without probes was seen.
fn calls(summary: &Value, wanted: u64) -> Verdict {
    let (seen, lost) = (number(&summary["spans"]["host_call"])?, number(&summary["lost"])?);
    let text = format!("{seen} of {wanted} calls timed by the host, {lost} events lost");
    if seen == wanted && lost == 0 {
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
        let summary = |roots: u64, lost: u64| json!({"spans": {"root": roots, "host_call": roots}, "lost": lost, "unfinished": 0});
        assert!(complete(&summary(500, 0), 500).is_ok());
        assert!(complete(&summary(499, 0), 500).is_err());
        assert!(complete(&summary(500, 1), 500).is_err());
        assert!(complete(&json!({}), 500).is_err());
        assert!(calls(&summary(200, 0), 200).is_ok());
        assert!(calls(&summary(201, 0), 200).is_err());
        assert!(calls(&json!({"spans": {"root": 1}, "lost": 0}), 0).is_err());
    }
}
