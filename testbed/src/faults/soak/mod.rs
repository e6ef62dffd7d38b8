//! A soak: for minutes ranks are slow and pause, and no verdict may be false (`cargo xtask faults --soak`).
//!
//! Two jobs run beside each other: the ranks of one are processes on two nodes, those of the other are threads. Step by step they call and
//! replay operations of three communicators. In a step a rank may be late, mostly by less than the threshold, now and then by much more, on
//! its host or on its stream. All ranks may pause as for a checkpoint. The operation itself may take longer than the threshold. No fault is
//! injected, and hangs abort: a single one ends the job.

use std::{
    collections::BTreeMap,
    sync::mpsc::RecvTimeoutError,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use fs_err as fs;
use serde::Serialize;

mod judge;
mod rank;
mod steps;

pub(super) use rank::Member;

use super::{
    cases::{RankKind, Source},
    job::{Job, Setup, Started},
    journal::{self, What},
    observed::{LogParser, Verdict},
};
use crate::{
    nccl::DeviceKind,
    process::on_threads,
    random::Random,
    ranks::{Heard, monotonic_ns},
};
use judge::Course;
use steps::{RANKS, Slot, Step};

const NODES: u32 = 2;
/// Lines of a job that has failed which are shown.
const LAST_LINES: usize = 40;
/// How long the job may take to end once told to.
const LIMIT: Duration = Duration::from_secs(30);

/// Whether there is an operation that takes longer than the threshold: on GPUs none does that fits into what ranks have there.
pub(super) fn has_long(device: DeviceKind) -> bool {
    device == DeviceKind::Host
}

/// What came of it, as the last line says.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) ok: bool,
    pub(super) seed: u64,
    pub(super) minutes: f64,
    pub(super) source: String,
    pub(super) device: String,
    pub(super) steps: usize,
    pub(super) operations: usize,
    /// Operations that went on for longer than the threshold when all ranks had come.
    pub(super) long_operations: usize,
    /// Times that a rank waited for another for so long that a verdict is promised, and those that it was given.
    pub(super) late: usize,
    pub(super) named: usize,
    /// The longest from when such a rank waited to what it said.
    pub(super) worst_ms: u64,
    pub(super) verdicts: usize,
    pub(super) false_verdicts: usize,
    /// Jobs that failed, as none may.
    pub(super) failed: usize,
}

impl Report {
    fn add(&mut self, other: &Self) {
        self.steps += other.steps;
        self.operations += other.operations;
        self.long_operations += other.long_operations;
        self.late += other.late;
        self.named += other.named;
        self.worst_ms = self.worst_ms.max(other.worst_ms);
        self.verdicts += other.verdicts;
        self.false_verdicts += other.false_verdicts;
        self.failed += other.failed;
    }
}

/// Soaks.
///
/// # Errors
/// If a job cannot be run. What is wrong with the verdicts makes the report, as does a job that fails.
pub(super) fn run(setup: &Setup, minutes: f64, seed: u64, source: Source) -> Result<Report> {
    let folder = &setup.folder;
    fs::create_dir_all(folder)?;
    let time = Duration::from_secs_f64(minutes * 60.0);
    let kinds = [RankKind::Process, RankKind::Thread];
    let reports = on_threads(kinds, |kind| soak(setup, time, (kind, source), seed))?;
    let mut total = Report {
        seed,
        minutes,
        source: source.to_string(),
        device: setup.device.to_string(),
        ..Report::default()
    };
    for report in reports {
        total.add(&report);
    }
    let right = total.false_verdicts == 0 && total.failed == 0 && total.named == total.late;
    let tested = total.late > 0 && (total.long_operations > 0 || !has_long(setup.device));
    if right && !tested {
        println!(
            "Nobody was late for long, or no operation took long by itself: there was nothing to be right about. Run it for longer, \
             or with another --seed."
        );
    }
    total.ok = right && tested;
    Ok(total)
}

fn soak(setup: &Setup, time: Duration, (kind, source): (RankKind, Source), seed: u64) -> Result<Report> {
    let file = |ending: &str| setup.folder.join(format!("soak-{kind:?}.{ending}"));
    let account = file("jsonl");
    let _ = fs::remove_file(&account);
    let started = Started {
        setup,
        ranks: RANKS,
        nodes: if kind == RankKind::Process { NODES } else { 1 },
        kind,
        source,
    };
    let mut job = Job::start(
        &started,
        |command| {
            command
                .args(["fault-worker", "--soak", &seed.to_string(), "--truth"])
                .arg(&account);
        },
        &[("RINGSIGHT_WATCHDOG_ACTION", "abort".to_owned())],
    )?;
    let Listened { verdicts, text, lags } = listen(&mut job, time)?;
    fs::write(file("log"), &text)?;
    let failed = job.wait(LIMIT, None);
    if let Some(wrong) = &failed {
        let lines: Vec<&str> = text.lines().collect();
        let last = lines.len().saturating_sub(LAST_LINES);
        println!("{kind:?}: {wrong}:\n{}", lines[last..].join("\n"));
    }
    let truth = journal::read(&account)?;
    let last = truth.iter().filter_map(|event| match event.what {
        What::Soaked { operation, .. } => Some(operation),
        _ => None,
    });
    let count = last.max().map_or(0, |last| last / Slot::ALL.len() as u32 + 1);
    let mut random = Random::new(seed);
    let steps: Vec<Step> = (0..count)
        .map(|_| Step::draw(&mut random, has_long(setup.device)))
        .collect();
    // Ranks that are threads of a process share its GPUs.
    let apart = setup.device == DeviceKind::Host || kind == RankKind::Process;
    let report = Course::new(&steps, &truth, source, apart).judge(&verdicts, &lags);
    Ok(Report {
        failed: usize::from(failed.is_some()),
        ..report
    })
}

/// What came of listening to a job.
struct Listened {
    verdicts: Vec<Verdict>,
    /// Everything that was written.
    text: String,
    lags: Lags,
}

/// When this program was run later than it was to, and by how much, nanoseconds: as late may be what the ranks do and say.
#[derive(Default)]
struct Lags(Vec<(u64, u64)>);

/// How long a turn of listening takes at most, and from how much on it is late.
const TURN: Duration = Duration::from_millis(20);
const LATE: u64 = 5_000_000;

impl Lags {
    /// A turn has begun then.
    fn turn(&mut self, begun_ns: u64) {
        let now = monotonic_ns();
        let late = now.saturating_sub(begun_ns + TURN.as_nanos() as u64);
        if late > LATE {
            self.0.push((now, late));
        }
    }

    /// The longest in the two seconds before and the one after a time.
    fn around(&self, ns: u64) -> u64 {
        let near = ns.saturating_sub(2_000_000_000)..ns.saturating_add(1_000_000_000);
        let lags = self.0.iter().filter(|(at, _)| near.contains(at));
        lags.map(|(_, late)| *late).max().unwrap_or(0)
    }
}

/// Until all have ended, told to after a time.
fn listen(job: &mut Job, time: Duration) -> Result<Listened> {
    let (mut closed, mut text) = (0, String::new());
    let mut logs: BTreeMap<usize, LogParser> = BTreeMap::new();
    let (mut verdicts, mut lags) = (Vec::new(), Lags::default());
    let (mut begin, mut told) = (Instant::now(), false);
    while closed < 2 * job.ranks.count() {
        let turn = monotonic_ns();
        let heard = job.ranks.heard().recv_timeout(TURN);
        lags.turn(turn);
        match heard {
            Ok((index, Heard::Line { line, ns, .. })) => {
                verdicts.extend(logs.entry(index).or_default().line(&line, ns));
                if !job.ranks.pass_id_on(index, &line) && line == "fault" {
                    begin = Instant::now();
                }
                text = text + &line + "\n";
            }
            Ok((_, Heard::End(_))) => closed += 1,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if begin.elapsed() >= time && !told {
            told = true;
            job.ranks.tell_all("end");
        }
        if begin.elapsed() > time + LIMIT {
            bail!("the ranks have not ended:\n{text}");
        }
    }
    Ok(Listened { verdicts, text, lags })
}
