//! The demo's ranks as processes, from outside.
//!
//! A rank is *starting* until it prints `ready`, then waits at the gate for `go`, trains until it prints `done`, and keeps its communicator
//! until `exit`.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::truth::{Configuration, Truth};
use crate::{
    process,
    ranks::{Heard, Pipe, Ranks},
    workspace::Artifacts,
};

/// How long a rank may take to create its communicator.
const START_LIMIT: Duration = Duration::from_secs(60);

/// As much of what a rank writes to standard error is kept, bytes.
const MOST_ERRORS: usize = 64 << 10;

/// A running job. Its processes end with it.
pub struct Job {
    ranks: Ranks,
    /// By rank: the file for what it knows, and what it wrote to standard error.
    truths: Vec<PathBuf>,
    errors: Vec<String>,
}

impl Job {
    /// Starts all ranks and waits until each has its communicator and stands at the gate.
    ///
    /// `folder` gets the configuration and, at the end, the truths.
    ///
    /// # Errors
    /// The standard error of a rank that ended.
    pub fn start(configuration: &Configuration, artifacts: &Artifacts, folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let file = folder.join("job.json");
        fs::write(&file, serde_json::to_string(configuration)?)?;
        let truths: Vec<PathBuf> = (0..configuration.ranks)
            .map(|rank| folder.join(format!("truth-{rank}.json")))
            .collect();
        let command = |(rank, truth): (u32, &PathBuf)| {
            let _ = fs::remove_file(truth);
            let node = configuration.node(rank);
            let mut command = Command::new(&artifacts.xtask);
            command
                .args(["demo-worker", "--rank", &rank.to_string()])
                .arg("--configuration")
                .arg(&file)
                .arg("--truth")
                .arg(truth)
                .env("LD_LIBRARY_PATH", &artifacts.library_folder)
                .env("RINGSIGHT_DEVICE", "host")
                .env("NCCL_HOSTID", format!("node-{node}"))
                .env("NCCL_SOCKET_IFNAME", "lo")
                .env("OTEL_SERVICE_NAME", "ringsight-demo");
            if let Some(wire) = &configuration.wire {
                command
                    .env("NCCL_IB_HCA", &wire.devices[node as usize])
                    .env("NCCL_NET", "IB")
                    // Soft-RoCE takes 7 for "without end".
                    .env("NCCL_IB_RETRY_CNT", "6")
                    .env("NCCL_IB_TIMEOUT", "16")
                    // Emulated processors are slow: that is no path that fails, and no hang.
                    .env("RINGSIGHT_NET_TIMEOUT_MS", "4000")
                    .env("RINGSIGHT_NET_GIVE_UP_MS", "30000")
                    .env("NCCL_KERNEL_TIMEOUT_MS", "0");
            }
            (format!("rank {rank}"), command)
        };
        let mut job = Self {
            ranks: Ranks::start((0..).zip(&truths).map(command))?,
            errors: vec![String::new(); truths.len()],
            truths,
        };
        job.meet()?;
        Ok(job)
    }

    /// Hands rank 0's unique id to the others and waits until all are ready.
    fn meet(&mut self) -> Result<()> {
        let mut ready = 0;
        let end = Instant::now() + START_LIMIT;
        while ready < self.ranks.count() {
            let (rank, line, _) = self.line(end, "to create its communicator")?;
            if !self.ranks.pass_id_on(rank, &line) && line == "ready" {
                ready += 1;
            }
        }
        Ok(())
    }

    /// The next line of any rank, and when it came, nanoseconds.
    fn line(&mut self, end: Instant, what: &str) -> Result<(usize, String, u64)> {
        let line = self.line_until(end)?;
        line.with_context(|| format!("a rank took too long {what}"))
    }

    /// As [`Self::line`]; `None` if the time is over.
    fn line_until(&mut self, end: Instant) -> Result<Option<(usize, String, u64)>> {
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let Ok((rank, heard)) = self.ranks.heard().recv_timeout(left) else {
                return Ok(None);
            };
            match heard {
                Heard::Line {
                    pipe: Pipe::Output,
                    line,
                    ns,
                } => return Ok(Some((rank, line, ns))),
                Heard::End(Pipe::Output) => return Err(self.autopsy(rank)),
                heard => self.keep_error(rank, heard),
            }
        }
    }

    fn keep_error(&mut self, rank: usize, heard: Heard) {
        if let Heard::Line {
            pipe: Pipe::Error,
            line,
            ..
        } = heard
            && self.errors[rank].len() < MOST_ERRORS
        {
            self.errors[rank] += &format!("{line}\n");
        }
    }

    /// Why a rank ended before its time.
    fn autopsy(&mut self, rank: usize) -> anyhow::Error {
        // Its output has ended, so it is ending; what it wrote to standard error is read until that ends too.
        let limit = Duration::from_secs(5);
        let ended = match self.ranks.processes()[rank].wait(limit) {
            Ok(status) => process::reason(status),
            Err(error) => error.to_string(),
        };
        while let Ok((other, heard)) = self.ranks.heard().recv_timeout(limit) {
            if other == rank && matches!(heard, Heard::End(Pipe::Error)) {
                break;
            }
            self.keep_error(other, heard);
        }
        let errors = match self.errors[rank].trim() {
            "" => "it wrote nothing to standard error",
            errors => errors,
        };
        anyhow::anyhow!("rank {rank} has ended ({ended}):\n{errors}")
    }

    fn tell(&mut self, rank: usize, line: &str) -> Result<()> {
        self.ranks.tell(rank, line).map_err(|_| self.autopsy(rank))
    }

    /// Process ids in rank order.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.ranks.pids()
    }

    /// Opens the gate: the ranks begin to train.
    ///
    /// # Errors
    /// If a rank has ended.
    pub fn go(&mut self) -> Result<()> {
        (0..self.ranks.count()).try_for_each(|rank| self.tell(rank, "go"))
    }

    /// Waits for the end of all loops; the ranks then still hold their communicators. `each` is given what ranks print.
    ///
    /// # Errors
    /// The standard error of a rank that ended, or that `limit` has passed.
    pub fn wait_done(&mut self, limit: Duration, mut each: impl FnMut(usize, &str)) -> Result<()> {
        let end = Instant::now() + limit;
        let mut done = 0;
        while done < self.ranks.count() {
            let (rank, line, _) = self.line(end, "to finish its steps")?;
            if line == "done" {
                done += 1;
            } else {
                each(rank, &line);
            }
        }
        Ok(())
    }

    /// Waits until rank 0 has printed that step `step` or a later one is done. Rank 0 tells of every tenth step.
    ///
    /// # Errors
    /// As [`Job::wait_done`].
    pub fn wait_step(&mut self, step: u32, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        loop {
            let (_, line, _) = self.line(end, "to get to a step")?;
            if step_of(&line).is_some_and(|n| n >= step) {
                return Ok(());
            }
        }
    }

    /// Milliseconds that a step takes, from now until `end`: one figure for each stretch of steps between two that rank
    /// 0 tells of.
    pub(crate) fn paces_until(&mut self, end: Instant) -> Result<Vec<f64>> {
        // What came before is not of this window.
        while self.line_until(Instant::now())?.is_some() {}
        let mut paces = Vec::new();
        let mut last = None;
        while let Some((_, line, ns)) = self.line_until(end)? {
            let Some(step) = step_of(&line) else { continue };
            if let Some((from, start)) = last.replace((step, ns))
                && step > from
            {
                paces.push((ns - start) as f64 / 1e6 / f64::from(step - from));
            }
        }
        if paces.is_empty() {
            bail!("rank 0 did not get from one step that it tells of to the next");
        }
        Ok(paces)
    }

    /// Lets the ranks destroy their communicators and end; returns what they know.
    ///
    /// # Errors
    /// The standard error of a rank that fails, or a truth that cannot be read.
    pub fn exit(mut self) -> Result<Vec<Truth>> {
        for rank in 0..self.ranks.count() {
            self.tell(rank, "exit")?;
        }
        let mut truths = Vec::new();
        for rank in 0..self.ranks.count() {
            let status = self.ranks.processes()[rank].wait(Duration::from_secs(20))?;
            if !status.success() {
                return Err(self.autopsy(rank));
            }
            let file = &self.truths[rank];
            let text = fs::read_to_string(file)?;
            truths.push(serde_json::from_str(&text).with_context(|| file.display().to_string())?);
        }
        Ok(truths)
    }

    /// Kills a rank, as a machine that fails does.
    pub fn kill(&mut self, rank: usize) {
        self.signal(rank, libc::SIGKILL);
    }

    /// Sends a rank a signal.
    pub fn signal(&mut self, rank: usize, signal: i32) {
        self.ranks.processes()[rank].signal(signal);
    }
}

/// The number in rank 0's line about a step.
fn step_of(line: &str) -> Option<u32> {
    line.strip_prefix("step ")?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}
