//! The processes of a round, and what they are heard to say.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::mpsc::RecvTimeoutError,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;

use super::{
    cases::{ARRIVAL, Fault, RankKind, Round, Source, THRESHOLD},
    debugger::Debugger,
    expectation::{By, Expectation},
    journal::{self, Journal, What},
    observed::{LogParser, Observed, Verdict},
};
use crate::{
    nccl::DeviceKind,
    process,
    ranks::{Heard, Ranks, monotonic_ns},
};

/// How long the ranks may take to come to the fault, and to end after it.
const LIMIT: Duration = Duration::from_secs(30);
/// How long it is listened after the last thing that was expected: for what was not.
const GRACE: Duration = Duration::from_millis(200);
/// How long a turn of listening takes at most.
const TURN: Duration = Duration::from_millis(20);

/// The processes of a round, and what holds one of them.
pub(super) struct Job {
    /// Before the processes, so that it goes first: one that is held is nobody's to wait for.
    debugger: Option<Debugger>,
    pub(super) ranks: Ranks,
}

/// The program with the ranks, the library, and where rounds write.
pub(super) struct Setup {
    /// The program.
    pub(super) xtask: PathBuf,
    /// Folder of `libnccl.so.2`.
    pub(super) library: PathBuf,
    pub(super) device: DeviceKind,
    /// Removed at the end, unless something is wrong.
    pub(super) folder: PathBuf,
}

/// What all jobs have in common.
#[derive(Clone, Copy)]
pub(super) struct Started<'a> {
    pub(super) setup: &'a Setup,
    pub(super) ranks: u32,
    pub(super) nodes: u32,
    pub(super) kind: RankKind,
    pub(super) source: Source,
}

impl Job {
    /// Starts the ranks; `command` says with which arguments.
    pub(super) fn start(
        started: &Started<'_>,
        arguments: impl Fn(&mut Command),
        variables: &[(&str, String)],
    ) -> Result<Self> {
        let ranks = started.ranks;
        let groups: Vec<Vec<u32>> = match started.kind {
            RankKind::Process => (0..ranks).map(|rank| vec![rank]).collect(),
            RankKind::Thread => vec![(0..ranks).collect()],
        };
        let command = |members: Vec<u32>| {
            let node = members[0] * started.nodes / ranks;
            let members: Vec<String> = members.iter().map(u32::to_string).collect();
            let members = members.join(",");
            let mut command = Command::new(&started.setup.xtask);
            arguments(&mut command);
            command
                .args(["--members", &members])
                .args(["--device", &started.setup.device.to_string()])
                .env("LD_LIBRARY_PATH", &started.setup.library)
                .env("RINGSIGHT_DEVICE", started.setup.device.to_string())
                // Streams that share a queue of the GPU wait for each other: those of ranks that share the GPU must not.
                .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
                .env("NCCL_SOCKET_IFNAME", "lo")
                .env("NCCL_HOSTID", format!("node-{node}"))
                .env("NCCL_KERNEL_TIMEOUT_MS", THRESHOLD.as_millis().to_string())
                .env("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100")
                .env("RINGSIGHT_WATCHDOG_SOURCE", started.source.to_string())
                .envs(variables.iter().map(|(name, value)| (name, value)));
            (format!("rank {members}"), command)
        };
        Ok(Self {
            debugger: None,
            ranks: Ranks::start(groups.into_iter().map(command))?,
        })
    }

    /// Lets processes that are stopped go on.
    fn resume(&mut self) -> Result<()> {
        self.debugger.take().map_or(Ok(()), Debugger::let_go)?;
        for process in self.ranks.processes() {
            process.signal(libc::SIGCONT);
        }
        Ok(())
    }

    /// Waits for all; what went wrong with any but those that `killed` names.
    pub(super) fn wait(mut self, limit: Duration, killed: Option<usize>) -> Option<String> {
        let end = Instant::now() + limit;
        let mut wrong = None;
        for (index, process) in self.ranks.processes().iter_mut().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            match process.wait(left) {
                Ok(status) if status.success() || killed == Some(index) => {}
                Ok(status) => {
                    wrong.get_or_insert(format!("{} {}", process.name(), process::reason(status)));
                }
                Err(error) => {
                    wrong.get_or_insert(error.to_string());
                }
            }
        }
        wrong
    }
}

/// Runs a round.
pub(super) fn run(round: &Round, kind: RankKind, folder: &Path, setup: &Setup) -> Result<Observed> {
    fs::create_dir_all(folder)?;
    let file = folder.join("round.json");
    fs::write(&file, serde_json::to_string(round)?)?;
    let account = folder.join("truth.jsonl");
    let _ = fs::remove_file(&account);
    let mut variables = vec![("RINGSIGHT_WATCHDOG_ACTION", round.action.to_string())];
    if round.fault == Fault::Withheld {
        variables.push(("RINGSIGHT_ARRIVAL_TIMEOUT_MS", ARRIVAL.as_millis().to_string()));
    }
    if round.fault == Fault::Unusual {
        variables.push(("NCCL_KERNEL_TIMEOUT_MS", "20000".to_owned()));
        variables.push(("RINGSIGHT_ADAPTIVE_FLOOR_MS", THRESHOLD.as_millis().to_string()));
        // Small: on a busy machine what is usual takes its time, too.
        variables.push(("RINGSIGHT_ADAPTIVE_TIMEOUT", "2".to_owned()));
    }
    let started = Started {
        setup,
        ranks: round.ranks,
        nodes: round.nodes,
        kind,
        source: round.source,
    };
    let mut job = Job::start(
        &started,
        |command| {
            command.args(["fault-worker", "--round"]).arg(&file);
            command.arg("--truth").arg(&account);
        },
        &variables,
    )?;
    if round.fault == Fault::Traced {
        job.debugger = Some(Debugger::start(&setup.xtask)?);
    }
    let killed = (round.fault == Fault::Killed).then_some(round.victim as usize);
    let mut listening = Listening::default();
    listening.listen(round, &account, &mut job)?;
    let broken = job.wait(LIMIT, killed);
    Ok(Observed {
        verdicts: listening.verdicts,
        truth: journal::read(&account)?,
        ended_ns: listening.ended_ns.unwrap_or(u64::MAX),
        text: listening.text,
        stalled: listening.stalled,
        broken,
    })
}

#[derive(Default)]
struct Listening {
    /// By process.
    logs: BTreeMap<usize, LogParser>,
    verdicts: Vec<Verdict>,
    text: String,
    stalled: Duration,
    /// Pipes that have ended.
    closed: usize,
    faulty: Option<Instant>,
    /// Ranks that have called the operation.
    launched: u32,
    /// Ranks whose communicators have failed, and whose operations are done.
    failed: u32,
    completed: u32,
    ended_ns: Option<u64>,
    exited: bool,
    /// Since when everything has been said.
    satisfied: Option<Instant>,
}

impl Listening {
    /// Until all have ended; `account` is the file with the truth.
    fn listen(&mut self, round: &Round, account: &Path, job: &mut Job) -> Result<()> {
        let expectation = round.expectation();
        let begin = Instant::now();
        while self.closed < 2 * job.ranks.count() {
            let waiting = Instant::now();
            let heard = job.ranks.heard().recv_timeout(TURN);
            self.stalled = self.stalled.max(waiting.elapsed().saturating_sub(TURN));
            match heard {
                Ok((index, heard)) => self.heard(round, account, job, (index, heard))?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if begin.elapsed() > LIMIT {
                let known = fs::read_to_string(account).unwrap_or_default();
                bail!(
                    "the ranks have not ended after {LIMIT:?}; they know:\n{known}they said:\n{}",
                    self.text
                );
            }
            let Some(faulty) = self.faulty else { continue };
            if self.ended_ns.is_none() {
                if self.has_all(round, &expectation) {
                    self.satisfied.get_or_insert_with(Instant::now);
                }
                let satisfied = self.satisfied.is_some_and(|since| since.elapsed() >= GRACE);
                let in_vain = faulty.elapsed() > expectation.within() + Duration::from_secs(1);
                if satisfied || in_vain {
                    self.ended_ns = Some(monotonic_ns());
                    job.ranks.tell_all("end");
                    job.resume()?;
                }
            }
            if self.completed == round.ranks && !self.exited {
                self.exited = true;
                job.ranks.tell_all("exit");
            }
        }
        Ok(())
    }

    fn heard(&mut self, round: &Round, account: &Path, job: &mut Job, heard: (usize, Heard)) -> Result<()> {
        let (index, Heard::Line { line, ns, .. }) = heard else {
            self.closed += 1;
            return Ok(());
        };
        let log = self.logs.entry(index).or_default();
        self.verdicts.extend(log.line(&line, ns));
        match line.as_str() {
            "fault" => {
                self.faulty = Some(Instant::now());
                // The kernel is stopped: the rank that it waits for may come.
                if round.comes_last().is_some() {
                    job.ranks.tell_all("turn");
                }
            }
            "hold" => {
                let process = job.ranks.processes()[index].pid();
                let debugger = job.debugger.as_mut().context("nothing to hold it")?;
                debugger.hold(process)?;
                Journal::open(account)?.note(round.victim, What::Fault)?;
                self.faulty = Some(Instant::now());
            }
            "launched" => {
                self.launched += 1;
                if round.victim_calls_last() && self.launched + 1 == round.ranks {
                    job.ranks.tell_all("turn");
                }
            }
            "failed" => self.failed += 1,
            "completed" => self.completed += 1,
            _ => drop(job.ranks.pass_id_on(index, &line)),
        }
        self.text += &format!("{index}: {line}\n");
        Ok(())
    }

    /// Whether everything that is expected has been said.
    fn has_all(&self, round: &Round, expectation: &Expectation) -> bool {
        let of = |by: By| (0..round.ranks).filter(move |rank| round.expects_of(by, *rank));
        let said = |rank| self.verdicts.iter().filter(move |verdict| verdict.rank == rank);
        let failure = expectation.failure.as_ref();
        let failures = failure.map_or(0, |failure| of(failure.by).count());
        of(expectation.by).all(|rank| said(rank).count() >= expectation.promises.len())
            && self.failed as usize >= failures
    }
}
