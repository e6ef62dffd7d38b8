//! The processes of a round, and what they are heard to say.

use std::{
    io::{BufRead, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use fs_err as fs;
use serde::Serialize;

use super::{
    Place,
    cases::{ARRIVAL, Fault, Ranks, Round, Source, THRESHOLD},
    debugger::Debugger,
    truth::{self, Account, Event, What},
};
use crate::{
    nccl::DeviceKind,
    process::{self, Guarded},
};

/// How long the ranks may take to come to the fault, and to end after it.
const LIMIT: Duration = Duration::from_secs(30);
/// How long it is listened after the last thing that was expected: for what was not.
const GRACE: Duration = Duration::from_millis(200);
/// How long a turn of listening takes at most.
const TURN: Duration = Duration::from_millis(20);

/// A verdict that a rank gave.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Said {
    /// Ranks are those of the communicator, which has so many.
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// `CLOCK_MONOTONIC` of its arrival.
    pub(super) ns: u64,
    /// The line that names the operation.
    pub(super) operation: String,
    /// From the cause on.
    pub(super) verdict: String,
}

/// What came of a round.
#[derive(Debug)]
pub(super) struct Observed {
    pub(super) said: Vec<Said>,
    pub(super) truth: Vec<Event>,
    /// When the fault was told to end.
    pub(super) ended_ns: u64,
    /// What the processes wrote.
    pub(super) text: String,
    /// For how long this program did not run when it was to: the machine did something else.
    pub(super) stalled: Duration,
    /// Why the round says nothing of the watchdog: a rank failed where nothing was to fail.
    pub(super) broken: Option<String>,
}

impl Observed {
    /// When something happened on a rank.
    pub(super) fn at(&self, rank: u32, what: &What) -> Option<u64> {
        let kind = std::mem::discriminant(what);
        self.truth
            .iter()
            .find(|event| event.rank == rank && std::mem::discriminant(&event.what) == kind)
            .map(|event| event.ns)
    }
}

pub(super) enum Heard {
    /// A line of standard output, which the library's log goes to as well, or standard error.
    Line { line: String, ns: u64 },
    /// A pipe has ended.
    End,
}

/// Processes with the threads that listen to them.
pub(super) struct Job {
    /// Before the processes, so that it goes first: one that is held is nobody's to wait for.
    debugger: Option<Debugger>,
    processes: Vec<Guarded>,
    pub(super) heard: Receiver<(usize, Heard)>,
}

/// What all jobs have in common.
#[derive(Clone, Copy)]
pub(super) struct Started<'a> {
    /// The program with the ranks, and the folder of `libnccl.so.2`.
    pub(super) xtask: &'a Path,
    pub(super) library: &'a Path,
    pub(super) ranks: u32,
    pub(super) nodes: u32,
    pub(super) kind: Ranks,
    pub(super) device: DeviceKind,
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
            Ranks::Process => (0..ranks).map(|rank| vec![rank]).collect(),
            Ranks::Thread => vec![(0..ranks).collect()],
        };
        let (sender, heard) = mpsc::channel();
        let processes = groups
            .iter()
            .enumerate()
            .map(|(index, members)| {
                let node = members[0] * started.nodes / ranks;
                let members: Vec<String> = members.iter().map(u32::to_string).collect();
                let mut command = Command::new(started.xtask);
                arguments(&mut command);
                command
                    .arg("--members")
                    .arg(members.join(","))
                    .args(["--device", started.device.name()])
                    .env("LD_LIBRARY_PATH", started.library)
                    .env("RINGSIGHT_DEVICE", started.device.name())
                    // Streams that share a queue of the GPU wait for each other: those of ranks that share the GPU must not.
                    .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
                    .env("NCCL_SOCKET_IFNAME", "lo")
                    .env("NCCL_HOSTID", format!("node-{node}"))
                    .env("NCCL_KERNEL_TIMEOUT_MS", THRESHOLD.as_millis().to_string())
                    .env("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100")
                    .env("RINGSIGHT_WATCHDOG_SOURCE", started.source.name())
                    .envs(variables.iter().map(|(name, value)| (name, value)))
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                let name = format!("rank {}", members.join(","));
                let mut process = Guarded::start(&name, &mut command, libc::SIGKILL)?;
                listen(&mut process, index, &sender)?;
                Ok(process)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            debugger: None,
            processes,
            heard,
        })
    }

    /// Processes.
    pub(super) fn count(&self) -> usize {
        self.processes.len()
    }

    pub(super) fn tell(&mut self, index: usize, line: &str) {
        if let Some(input) = self.processes[index].child().stdin.as_mut() {
            // One that is gone is told nothing.
            let _ = writeln!(input, "{line}").and_then(|()| input.flush());
        }
    }

    pub(super) fn tell_all(&mut self, line: &str) {
        (0..self.processes.len()).for_each(|index| self.tell(index, line));
    }

    /// Lets processes that are stopped go on.
    fn resume(&mut self) -> Result<()> {
        self.debugger.take().map_or(Ok(()), Debugger::let_go)?;
        for process in &mut self.processes {
            process.signal(libc::SIGCONT);
        }
        Ok(())
    }

    /// Waits for all; what went wrong with any but those that `killed` names.
    pub(super) fn wait(mut self, limit: Duration, killed: Option<usize>) -> Option<String> {
        let end = Instant::now() + limit;
        let mut wrong = None;
        for (index, process) in self.processes.iter_mut().enumerate() {
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

fn listen(process: &mut Guarded, index: usize, sender: &Sender<(usize, Heard)>) -> Result<()> {
    let output = process.child().stdout.take().context("no standard output")?;
    let errors = process.child().stderr.take().context("no standard error")?;
    let lines = |pipe: Box<dyn std::io::Read + Send>| {
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let ns = truth::now_ns();
                if sender.send((index, Heard::Line { line, ns })).is_err() {
                    return;
                }
            }
            let _ = sender.send((index, Heard::End));
        });
    };
    lines(Box::new(output));
    lines(Box::new(errors));
    Ok(())
}

/// Verdicts, put together from the lines of a process' log.
#[derive(Default)]
pub(super) struct Reports {
    place: Option<(u32, u32)>,
    operation: String,
}

impl Reports {
    /// A line; the verdict that it completes.
    pub(super) fn line(&mut self, line: &str, ns: u64) -> Option<Said> {
        let after = |mark: &str| line.find(mark).map(|at| &line[at + mark.len()..]);
        if let Some(place) = line
            .find("Comm: ")
            .and_then(|_| after(", Rank: "))
            .and_then(|rest| rest.split_once('/'))
        {
            self.place = place.0.parse().ok().zip(place.1.parse().ok());
        }
        if let Some(kernel) = after(" Kernel: ") {
            kernel.clone_into(&mut self.operation);
        }
        let verdict = after(" Verdict: ")?.to_owned();
        let (rank, ranks) = self.place.take()?;
        Some(Said {
            rank,
            ranks,
            ns,
            operation: std::mem::take(&mut self.operation),
            verdict,
        })
    }
}

/// Runs a round.
///
/// # Errors
/// If it cannot be begun, or a rank does not even come to the fault.
pub(super) fn run(round: &Round, kind: Ranks, folder: &Path, place: &Place) -> Result<Observed> {
    fs::create_dir_all(folder)?;
    let file: PathBuf = folder.join("round.json");
    fs::write(&file, serde_json::to_string(round)?)?;
    let account = folder.join("truth.jsonl");
    let _ = fs::remove_file(&account);
    let mut variables = vec![("RINGSIGHT_WATCHDOG_ACTION", round.action.name().to_owned())];
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
        xtask: &place.xtask,
        library: &place.library,
        ranks: round.ranks,
        nodes: round.nodes,
        kind,
        device: place.device,
        source: round.source,
    };
    let mut job = Job::start(
        &started,
        |command| {
            command
                .arg("fault-worker")
                .arg("--round")
                .arg(&file)
                .arg("--truth")
                .arg(&account);
        },
        &variables,
    )?;
    if round.fault == Fault::Traced {
        job.debugger = Some(Debugger::start(&place.xtask)?);
    }
    let killed = (round.fault == Fault::Killed).then_some(round.victim as usize);
    let mut listening = Listening {
        round,
        account: &account,
        reports: (0..job.processes.len()).map(|_| Reports::default()).collect(),
        said: Vec::new(),
        text: String::new(),
        stalled: Duration::ZERO,
        open: 2 * job.processes.len(),
        faulty: None,
        failed: 0,
        completed: 0,
        ended_ns: None,
        exited: false,
        satisfied: None,
    };
    listening.listen(&mut job)?;
    let broken = job.wait(LIMIT, killed);
    let Listening {
        said,
        text,
        stalled,
        ended_ns,
        ..
    } = listening;
    Ok(Observed {
        said,
        truth: truth::read(&account)?,
        ended_ns: ended_ns.unwrap_or(u64::MAX),
        text,
        stalled,
        broken,
    })
}

struct Listening<'a> {
    round: &'a Round,
    /// The file with the truth.
    account: &'a Path,
    reports: Vec<Reports>,
    said: Vec<Said>,
    text: String,
    stalled: Duration,
    /// Pipes that have not ended.
    open: usize,
    faulty: Option<Instant>,
    /// Ranks whose communicators have failed, and whose operations are done.
    failed: u32,
    completed: u32,
    ended_ns: Option<u64>,
    exited: bool,
    /// Since when everything has been said.
    satisfied: Option<Instant>,
}

impl Listening<'_> {
    /// Until all have ended.
    fn listen(&mut self, job: &mut Job) -> Result<()> {
        let expectation = self.round.expectation();
        let begin = Instant::now();
        while self.open > 0 {
            let waiting = Instant::now();
            let heard = job.heard.recv_timeout(TURN);
            self.stalled = self.stalled.max(waiting.elapsed().saturating_sub(TURN));
            match heard {
                Ok((index, heard)) => self.heard(job, index, heard)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            if begin.elapsed() > LIMIT {
                let known = fs::read_to_string(self.account).unwrap_or_default();
                bail!(
                    "the ranks have not ended after {LIMIT:?}; they know:\n{known}they said:\n{}",
                    self.text
                );
            }
            let Some(faulty) = self.faulty else { continue };
            if self.ended_ns.is_none() {
                if self.has_all(&expectation) {
                    self.satisfied.get_or_insert_with(Instant::now);
                }
                let satisfied = self.satisfied.is_some_and(|since| since.elapsed() >= GRACE);
                let in_vain = faulty.elapsed() > expectation.within() + Duration::from_secs(1);
                if satisfied || in_vain {
                    self.ended_ns = Some(truth::now_ns());
                    job.tell_all("end");
                    job.resume()?;
                }
            }
            if self.completed == self.round.ranks && !self.exited {
                self.exited = true;
                job.tell_all("exit");
            }
        }
        Ok(())
    }

    fn heard(&mut self, job: &mut Job, index: usize, heard: Heard) -> Result<()> {
        let Heard::Line { line, ns } = heard else {
            self.open -= 1;
            return Ok(());
        };
        self.said.extend(self.reports[index].line(&line, ns));
        match line.as_str() {
            "fault" => self.faulty = Some(Instant::now()),
            "hold" => {
                let process = job.processes[index].pid();
                job.debugger
                    .as_mut()
                    .context("nothing to hold it")?
                    .hold(process)?;
                Account::open(self.account)?.note(self.round.victim, What::Fault)?;
                self.faulty = Some(Instant::now());
            }
            "failed" => self.failed += 1,
            "completed" => self.completed += 1,
            id if id.starts_with("id ") => {
                (1..job.processes.len()).for_each(|other| job.tell(other, id));
            }
            _ => {}
        }
        self.text += &format!("{index}: {line}\n");
        Ok(())
    }

    /// Whether everything that is expected has been said.
    fn has_all(&self, expectation: &super::expectation::Expectation) -> bool {
        let round = self.round;
        let of =
            |by: super::expectation::By| (0..round.ranks).filter(move |rank| round.expects_of(by, *rank));
        let said = |rank| self.said.iter().filter(|said| said.rank == rank).count();
        let failures = expectation
            .failure
            .as_ref()
            .map_or(0, |failure| of(failure.by).count());
        of(expectation.by).all(|rank| said(rank) >= expectation.verdicts.len())
            && self.failed as usize >= failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_of_the_rank_that_the_report_names() {
        let mut reports = Reports::default();
        let lines = [
            "h:1:2 [3] NCCL WARN Comm: 0x12 (x), Rank: 3/4",
            "h:1:2 [3] NCCL WARN Kernel: AllReduce(count 1), collective 3",
            "h:1:2 [3] NCCL WARN Verdict: RANK_DEAD (hang): the process of rank 1 is gone",
            "h:1:2 [3] NCCL WARN Verdict: of nobody",
        ];
        let said: Vec<Said> = lines.iter().filter_map(|line| reports.line(line, 5)).collect();
        assert_eq!(said.len(), 1);
        assert_eq!((said[0].rank, said[0].ranks, said[0].ns), (3, 4, 5));
        assert_eq!(said[0].operation, "AllReduce(count 1), collective 3");
        assert!(said[0].verdict.starts_with("RANK_DEAD (hang): "));
    }
}
