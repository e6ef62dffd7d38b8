//! The collector attached to a job: the driver's, and PyTorch's on this library and on NCCL.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use super::{
    super::step::{StepResult, Steps, verdict_of},
    driver::driver,
    torch::{self, Library},
};
use crate::{
    demo::{
        collector::Collector,
        summary::{RankPart, Summary},
    },
    process::{self, Guarded},
};
use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;

/// Operations of the driver's `watch` mode: eager ones, and captured ones, each in so many replays.
const WATCH: Job = Job {
    eager: 200,
    captured: 3,
    replays: 1000,
};
/// Those of its `replays` mode with 1,000 replays of 20 operations, more than devices' rings have room for: the reader is to keep up. Before the
/// replays come 5, behind them 50, each alone, and eager ones in five rows.
const REPLAYS: Job = Job {
    eager: 5 * 200,
    captured: 20,
    replays: 5 + 1000 + 50,
};
/// Those of train.py.
const COLLECTIVES: u64 = 100;

/// What a job of the driver's does while the collector is attached.
struct Job {
    eager: u64,
    captured: usize,
    /// Of each that is captured.
    replays: usize,
}

impl Job {
    fn operations(&self) -> u64 {
        self.eager + (self.captured * self.replays) as u64
    }
}

/// Ranks of the driver's jobs here.
const RANKS: usize = 2;

/// Which processes the collector is attached to.
#[derive(Clone, Copy)]
pub(super) enum Attach {
    /// Those of the job.
    Started,
    /// What they have started.
    Children,
    /// Those that the file `ready` names by their numbers.
    Named,
}

/// Why the collector cannot attach here.
pub(super) fn lacks() -> Option<String> {
    // SAFETY: asks for a number.
    (unsafe { libc::geteuid() } != 0).then(|| "the collector attaches as root".to_owned())
}

/// The longest until a job may be watched: that of a training has PyTorch to load in every rank, and models to make.
const READY: Duration = Duration::from_secs(90);

/// Processes that `parent` has started.
fn children(parent: u32) -> Vec<u32> {
    fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    // Ranks of one process share its ring of records, and those on one GPU that of the GPU's events, of which one's may be behind the other's.
    let together = &[("CUDA_VISIBLE_DEVICES", "0"), ("RINGSIGHT_STRAIGHT_BYTES", "1")];
    for (name, mode, (kind, attach), words, job, variables) in [
        (
            "2t",
            "watch",
            ("t", Attach::Started),
            &["1000"][..],
            WATCH,
            &[][..],
        ),
        (
            "2t-one-gpu",
            "watch",
            ("t", Attach::Started),
            &["1000"],
            WATCH,
            together,
        ),
        ("2p", "watch", ("p", Attach::Children), &["1000"], WATCH, &[]),
        (
            "replays-2p",
            "replays",
            ("p", Attach::Children),
            &["1000", "20"],
            REPLAYS,
            &[],
        ),
    ] {
        let folder = prepared(steps, name)?;
        let mut command = driver(steps, &format!("{mode} {RANKS} {kind}"));
        command.arg(&folder).args(words).envs(variables.iter().copied());
        let begun = Instant::now();
        let ended = attached(steps, &folder, vec![command], attach, &[]);
        let verdict = judged(ended, |summary| {
            let all = complete(summary, job.operations())?;
            Ok(format!("{all}; {}", replayed(summary, &job)?))
        });
        steps.enter_after(name, begun.elapsed(), verdict);
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
        let ended = attached(steps, &folder, commands, Attach::Started, &[]);
        let verdict = judged(ended, |summary| match library {
            Library::Ours => complete(summary, COLLECTIVES),
            Library::Nccl => calls(summary, 2 * COLLECTIVES),
        });
        steps.enter_after(name, begun.elapsed(), verdict);
    }
    Ok(())
}

pub(super) fn judged(ended: Result<Summary>, judge: impl FnOnce(&Summary) -> StepResult) -> StepResult {
    ended
        .map_err(|error| format!("{error:#}"))
        .and_then(|summary| judge(&summary))
}

/// An empty folder: what an earlier job has left would start this one too early.
pub(super) fn prepared(steps: &Steps<'_>, name: &str) -> Result<PathBuf> {
    let folder = steps.file(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Runs the processes of a job that waits for the file `go`, the collector attached with these options besides; its summary.
pub(super) fn attached(
    steps: &Steps<'_>,
    folder: &Path,
    commands: Vec<Command>,
    attach: Attach,
    options: &[&str],
) -> Result<Summary> {
    let summary = seen(steps, folder, commands, attach, options);
    // Megabytes that nobody reads.
    let _ = fs::remove_file(folder.join(SPANS));
    summary
}

/// Where the collector writes spans.
pub(super) const SPANS: &str = "spans.jsonl";

/// The same, and leaves the spans there.
pub(super) fn seen(
    steps: &Steps<'_>,
    folder: &Path,
    commands: Vec<Command>,
    attach: Attach,
    options: &[&str],
) -> Result<Summary> {
    // Whoever starts the ranks has to end them.
    let end_signal = match attach {
        Attach::Named => libc::SIGTERM,
        Attach::Started | Attach::Children => libc::SIGKILL,
    };
    let mut job = Vec::new();
    for (number, mut command) in commands.into_iter().enumerate() {
        process::log_to(&mut command, &folder.join(format!("job-{number}.log")))?;
        let name = format!("process {number} of the job");
        job.push(Guarded::start(&name, &mut command, end_signal)?);
    }
    let ready = folder.join("ready");
    let all_live = |job: &mut [Guarded]| {
        job.iter_mut()
            .all(|process| matches!(process.child().try_wait(), Ok(None)))
    };
    let [first, others @ ..] = &mut job[..] else {
        bail!("a job without processes");
    };
    // One of the others that has ended ends the waiting, too.
    first.wait_until(READY, || ready.exists() || !all_live(others))?;
    ensure!(
        ready.exists(),
        "a process of the job has ended before it was ready"
    );
    let pids: Vec<u32> = match attach {
        Attach::Started => job.iter().map(Guarded::pid).collect(),
        Attach::Children => job.iter().flat_map(|process| children(process.pid())).collect(),
        Attach::Named => {
            let text = fs::read_to_string(&ready)?;
            let pids: Result<_, _> = text.split_whitespace().map(str::parse).collect();
            pids.with_context(|| format!("{} names no processes", ready.display()))?
        }
    };
    let spans = format!("--out={}", folder.join(SPANS).display());
    let options: Vec<String> = std::iter::once(spans)
        .chain(options.iter().map(|&option| option.to_owned()))
        .collect();
    let mut collector = Collector::start(&steps.host.program("ringsight"), &pids, &options, folder)?;
    fs::write(folder.join("go"), "")?;
    for process in &mut job {
        let status = process.wait(Duration::from_secs(60))?;
        if !status.success() {
            bail!("{}: {}", process.name(), process::reason(status));
        }
    }
    collector.finish(Duration::from_secs(60))
}

/// Whether every operation was seen, and whole.
fn complete(summary: &Summary, wanted: u64) -> StepResult {
    let (roots, lost, unfinished) = (summary.spans_of("root"), summary.lost, summary.unfinished);
    let overwritten = summary.device_events_overwritten;
    let text = format!(
        "{roots} of {wanted} operations, {lost} events lost, {overwritten} overwritten on devices, {unfinished} not ended"
    );
    verdict_of(
        roots == wanted && lost == 0 && overwritten == 0 && unfinished == 0,
        text,
    )
}

/// Whether each captured operation has an operation of its own for every replay, and these and eager ones have the times of all ranks' devices.
fn replayed(summary: &Summary, job: &Job) -> StepResult {
    let mut replays: BTreeMap<(String, u64), BTreeSet<u32>> = BTreeMap::new();
    let mut untimed = 0;
    for row in &summary.operations {
        if row.replay != 0 {
            let captured = replays.entry((row.communicator.to_string(), row.sequence));
            captured.or_default().insert(row.replay);
        }
        let is_timed = |part: &RankPart| {
            part.device_start_ns != 0
                && part.device_end_ns >= part.device_start_ns
                && part.timing_source == "device"
        };
        let timed = row.by_rank.len() == RANKS && row.complete && row.by_rank.iter().all(is_timed);
        untimed += u64::from(!timed);
    }
    let whole = replays.values().filter(|seen| seen.len() == job.replays).count();
    let text = format!(
        "{whole} of {} captured operations in each of {} replays, {untimed} of all without devices' times",
        job.captured, job.replays
    );
    verdict_of(
        untimed == 0 && replays.len() == job.captured && whole == job.captured,
        text,
    )
}

/// Whether every call on a library without probes was seen.
fn calls(summary: &Summary, wanted: u64) -> StepResult {
    let (seen, lost) = (summary.spans_of("host_call"), summary.lost);
    let text = format!("{seen} of {wanted} calls timed by the host, {lost} events lost");
    verdict_of(seen == wanted && lost == 0, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::summary::Operation;

    #[test]
    fn every_operation_must_be_there() {
        let summary = |count: u64, lost: u64| Summary {
            spans: [("root", count), ("host_call", count)]
                .map(|(kind, count)| (kind.to_owned(), count))
                .into(),
            lost,
            ..Summary::default()
        };
        assert!(complete(&summary(500, 0), 500).is_ok());
        assert!(complete(&summary(499, 0), 500).is_err());
        assert!(complete(&summary(500, 1), 500).is_err());
        let overwritten = Summary {
            device_events_overwritten: 1,
            ..summary(500, 0)
        };
        let text = complete(&overwritten, 500).unwrap_err();
        assert!(text.contains("1 overwritten"), "{text}");
        assert!(calls(&summary(200, 0), 200).is_ok());
        assert!(calls(&summary(201, 0), 200).is_err());
    }

    #[test]
    fn every_replay_of_every_captured_operation_must_be_there() {
        let job = Job {
            eager: 1,
            captured: 2,
            replays: 3,
        };
        let row = |sequence: u64, replay: u32, end: u64| {
            let part = RankPart {
                device_start_ns: 5,
                device_end_ns: end,
                timing_source: "device".to_owned(),
                ..RankPart::default()
            };
            Operation {
                sequence,
                replay,
                complete: true,
                by_rank: vec![part.clone(), part],
                ..Operation::default()
            }
        };
        let mut rows = vec![row(9, 0, 7)];
        for sequence in [1, 2] {
            rows.extend([1, 2, 3].map(|replay| row(sequence, replay, 7)));
        }
        let judge = |change: &dyn Fn(&mut Vec<Operation>)| {
            let mut operations = rows.clone();
            change(&mut operations);
            let summary = Summary {
                operations,
                ..Summary::default()
            };
            replayed(&summary, &job)
        };
        assert!(judge(&|_| {}).unwrap().starts_with("2 of 2 captured"));
        let less = judge(&|rows| rows.truncate(6)).unwrap_err();
        assert!(less.starts_with("1 of 2 captured"), "{less}");
        // Twice the same is not two.
        assert!(judge(&|rows| rows[6] = row(2, 2, 7)).is_err());
        let untimed = judge(&|rows| rows[6] = row(2, 3, 0)).unwrap_err();
        assert!(untimed.ends_with("1 of all without devices' times"), "{untimed}");
        let made_up = judge(&|rows| rows[0].by_rank[1].timing_source = "host".to_owned()).unwrap_err();
        assert!(made_up.ends_with("1 of all without devices' times"), "{made_up}");
        assert!(judge(&|rows| drop(rows[6].by_rank.pop())).is_err());
        assert!(judge(&Vec::clear).is_err());
    }
}
