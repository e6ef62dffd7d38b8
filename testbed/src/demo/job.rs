//! The demo's worker processes.

use std::{
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::truth::{Configuration, Truth};
use crate::{
    process::{self, Guarded},
    workspace::Artifacts,
};

/// How long a rank may take to create its communicator.
const START_LIMIT: Duration = Duration::from_secs(60);

enum Event {
    /// A line, and when it came.
    Line(String, Instant),
    End,
}

struct Worker {
    process: Guarded,
    truth: PathBuf,
    errors: Arc<Mutex<String>>,
    errors_reader: Option<JoinHandle<()>>,
}

/// A running job. Its processes end with it.
pub struct Job {
    workers: Vec<Worker>,
    events: Receiver<(usize, Event)>,
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
        let (sender, events) = mpsc::channel();
        let workers = (0..configuration.ranks)
            .map(|rank| {
                let truth = folder.join(format!("truth-{rank}.json"));
                let _ = fs::remove_file(&truth);
                let mut command = Command::new(&artifacts.xtask);
                command
                    .args(["demo-worker", "--rank", &rank.to_string()])
                    .arg("--configuration")
                    .arg(&file)
                    .arg("--truth")
                    .arg(&truth)
                    .env("LD_LIBRARY_PATH", &artifacts.library_folder)
                    .env("RINGSIGHT_DEVICE", "host")
                    .env("NCCL_HOSTID", format!("node-{}", configuration.node(rank)))
                    .env("NCCL_SOCKET_IFNAME", "lo")
                    .env("OTEL_SERVICE_NAME", "ringsight-demo")
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::piped());
                if let Some(wire) = &configuration.wire {
                    command
                        .env("NCCL_IB_HCA", &wire.devices[configuration.node(rank) as usize])
                        .env("NCCL_NET", "IB")
                        // Soft-RoCE takes 7 for "without end".
                        .env("NCCL_IB_RETRY_CNT", "6")
                        .env("NCCL_IB_TIMEOUT", "16")
                        // Emulated processors are slow: that is no path that fails, and no hang.
                        .env("RINGSIGHT_NET_TIMEOUT_MS", "4000")
                        .env("RINGSIGHT_NET_GIVE_UP_MS", "30000")
                        .env("NCCL_KERNEL_TIMEOUT_MS", "0");
                }
                Worker::start(rank, &mut command, truth, &sender)
            })
            .collect::<Result<Vec<_>>>()?;
        let mut job = Self { workers, events };
        job.meet()?;
        Ok(job)
    }

    /// Hands rank 0's unique id to the others and waits until all are ready.
    fn meet(&mut self) -> Result<()> {
        let mut ready = 0;
        let end = Instant::now() + START_LIMIT;
        while ready < self.workers.len() {
            let (rank, line) = self.line(end, "to create its communicator")?;
            if line.starts_with("id ") && rank == 0 {
                for other in 1..self.workers.len() {
                    self.tell(other, &line)?;
                }
            } else if line == "ready" {
                ready += 1;
            }
        }
        Ok(())
    }

    /// The next line of any worker.
    fn line(&mut self, end: Instant, what: &str) -> Result<(usize, String)> {
        let left = end.saturating_duration_since(Instant::now());
        match self.events.recv_timeout(left) {
            Ok((rank, Event::Line(line, _))) => Ok((rank, line)),
            Ok((rank, Event::End)) => Err(self.autopsy(rank)),
            Err(_) => bail!("a rank took too long {what}"),
        }
    }

    /// Why a worker ended before its time.
    fn autopsy(&mut self, rank: usize) -> anyhow::Error {
        let worker = &mut self.workers[rank];
        // Its output has ended, so it is ending; what it wrote to standard error is read until that ends too.
        let ended = match worker.process.wait(Duration::from_secs(5)) {
            Ok(status) => process::reason(status),
            Err(error) => error.to_string(),
        };
        if let Some(reader) = worker.errors_reader.take() {
            let _ = reader.join();
        }
        let errors = worker
            .errors
            .lock()
            .map(|text| text.trim().to_owned())
            .unwrap_or_default();
        let errors = if errors.is_empty() {
            "it wrote nothing to standard error".to_owned()
        } else {
            errors
        };
        anyhow::anyhow!("rank {rank} has ended ({ended}):\n{errors}")
    }

    fn tell(&mut self, rank: usize, line: &str) -> Result<()> {
        let input = self.workers[rank]
            .process
            .child()
            .stdin
            .as_mut()
            .context("the worker has no standard input")?;
        if writeln!(input, "{line}").and_then(|()| input.flush()).is_err() {
            return Err(self.autopsy(rank));
        }
        Ok(())
    }

    /// Process ids in rank order.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        self.workers.iter().map(|worker| worker.process.pid()).collect()
    }

    /// Opens the gate: the ranks begin to train.
    ///
    /// # Errors
    /// If a rank has ended.
    pub fn go(&mut self) -> Result<()> {
        (0..self.workers.len()).try_for_each(|rank| self.tell(rank, "go"))
    }

    /// Waits for the end of all loops; the ranks then still hold their communicators. `each` is given what ranks print.
    ///
    /// # Errors
    /// The standard error of a rank that ended, or that `limit` has passed.
    pub fn wait_done(&mut self, limit: Duration, mut each: impl FnMut(usize, &str)) -> Result<()> {
        let end = Instant::now() + limit;
        let mut done = 0;
        while done < self.workers.len() {
            let (rank, line) = self.line(end, "to finish its steps")?;
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
            let (_, line) = self.line(end, "to get to a step")?;
            if step_of(&line).is_some_and(|n| n >= step) {
                return Ok(());
            }
        }
    }

    /// Milliseconds that a step takes, from now until `end`: one figure for each stretch of steps between two that rank
    /// 0 tells of.
    ///
    /// # Errors
    /// As [`Job::wait_done`], or if rank 0 told of fewer than two steps.
    pub fn paces_until(&mut self, end: Instant) -> Result<Vec<f64>> {
        // What was told before is not of this window.
        while let Ok(event) = self.events.try_recv() {
            if let (rank, Event::End) = event {
                return Err(self.autopsy(rank));
            }
        }
        let mut paces = Vec::new();
        let mut last = None;
        loop {
            match self
                .events
                .recv_timeout(end.saturating_duration_since(Instant::now()))
            {
                Ok((_, Event::Line(line, at))) => {
                    let Some(step) = step_of(&line) else { continue };
                    if let Some((from, start)) = last.replace((step, at))
                        && step > from
                    {
                        paces.push((at - start).as_secs_f64() * 1e3 / f64::from(step - from));
                    }
                }
                Ok((rank, Event::End)) => return Err(self.autopsy(rank)),
                Err(_) => break,
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
        for rank in 0..self.workers.len() {
            self.tell(rank, "exit")?;
        }
        let mut truths = Vec::new();
        for rank in 0..self.workers.len() {
            let status = self.workers[rank].process.wait(Duration::from_secs(20))?;
            if !status.success() {
                return Err(self.autopsy(rank));
            }
            let file = &self.workers[rank].truth;
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
        self.workers[rank].process.signal(signal);
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

impl Worker {
    fn start(
        rank: u32,
        command: &mut Command,
        truth: PathBuf,
        sender: &Sender<(usize, Event)>,
    ) -> Result<Self> {
        let mut process = Guarded::start(&format!("rank {rank}"), command, libc::SIGKILL)?;
        let output = process
            .child()
            .stdout
            .take()
            .context("standard output is not piped")?;
        let errors_pipe = process
            .child()
            .stderr
            .take()
            .context("standard error is not piped")?;
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if sender
                    .send((rank as usize, Event::Line(line, Instant::now())))
                    .is_err()
                {
                    return;
                }
            }
            let _ = sender.send((rank as usize, Event::End));
        });
        let errors = Arc::new(Mutex::new(String::new()));
        let kept = Arc::clone(&errors);
        let errors_reader = thread::spawn(move || {
            for line in BufReader::new(errors_pipe).lines().map_while(Result::ok) {
                if let Ok(mut kept) = kept.lock()
                    && kept.len() < 64 << 10
                {
                    kept.push_str(&line);
                    kept.push('\n');
                }
            }
        });
        Ok(Self {
            process,
            truth,
            errors,
            errors_reader: Some(errors_reader),
        })
    }
}
