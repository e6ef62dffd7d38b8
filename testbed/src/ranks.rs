//! Ranks as child processes: how a job starts them, speaks with them line by line, and how a rank answers.
//!
//! A job writes lines to a rank's standard input. It hears the lines of the rank's standard output and standard error, each with the
//! time of its arrival, in one channel for all ranks. Every rank needs the unique id that rank 0 makes: rank 0 prints `id <hex>`, and the
//! job passes that line on.

use std::{
    io::{self, BufRead as _, BufReader, Read, Write as _},
    process::{Command, Stdio},
    sync::mpsc::{self, Receiver, Sender},
    thread,
};

use anyhow::{Context as _, Result, bail};

use crate::{
    nccl::{Nccl, UniqueId},
    process::Guarded,
};

/// Begins the line with the unique id.
const ID: &str = "id ";

/// Where a rank writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pipe {
    /// Standard output; the library's log goes there, too.
    Output,
    /// Standard error.
    Error,
}

/// What a job hears of a rank.
#[derive(Debug)]
pub(crate) enum Heard {
    /// The rank wrote a line.
    Line {
        /// Where.
        pipe: Pipe,
        /// Without its end.
        line: String,
        /// When it arrived: `CLOCK_MONOTONIC`, nanoseconds.
        ns: u64,
    },
    /// The rank closed a pipe: it has ended, or is about to.
    End(Pipe),
}

/// The processes of a job. They end with it.
pub(crate) struct Ranks {
    processes: Vec<Guarded>,
    heard: Receiver<(usize, Heard)>,
}

impl Ranks {
    /// Starts a process for each command; the name stands in messages.
    pub(crate) fn start(commands: impl IntoIterator<Item = (String, Command)>) -> Result<Self> {
        let (sender, heard) = mpsc::channel();
        let start = |(index, (name, mut command)): (usize, (String, Command))| {
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            let mut process = Guarded::start(&name, &mut command, libc::SIGKILL)?;
            let child = process.child();
            let output = child.stdout.take().context("standard output is not piped")?;
            let error = child.stderr.take().context("standard error is not piped")?;
            listen(output, (index, Pipe::Output), sender.clone());
            listen(error, (index, Pipe::Error), sender.clone());
            Ok(process)
        };
        let processes = commands
            .into_iter()
            .enumerate()
            .map(start)
            .collect::<Result<_>>()?;
        Ok(Self { processes, heard })
    }

    /// Processes, in the order of their commands.
    pub(crate) fn processes(&mut self) -> &mut [Guarded] {
        &mut self.processes
    }

    /// How many processes there are.
    pub(crate) fn count(&self) -> usize {
        self.processes.len()
    }

    /// Process ids, in the order of the commands.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(Guarded::pid).collect()
    }

    /// What processes are heard to say, with their places among the commands.
    pub(crate) fn heard(&self) -> &Receiver<(usize, Heard)> {
        &self.heard
    }

    /// Sends a line to a process.
    pub(crate) fn tell(&mut self, index: usize, line: &str) -> io::Result<()> {
        match self.processes[index].child().stdin.as_mut() {
            Some(input) => writeln!(input, "{line}").and_then(|()| input.flush()),
            None => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    /// Sends a line to all processes; one that has ended misses it.
    pub(crate) fn tell_all(&mut self, line: &str) {
        for index in 0..self.count() {
            let _ = self.tell(index, line);
        }
    }

    /// Passes the unique id on to the other processes, if it is in this line of the first one; whether it is.
    pub(crate) fn pass_id_on(&mut self, index: usize, line: &str) -> bool {
        let is_id = index == 0 && line.starts_with(ID);
        if is_id {
            for other in 1..self.count() {
                let _ = self.tell(other, line);
            }
        }
        is_id
    }
}

fn listen(from: impl Read + Send + 'static, (index, pipe): (usize, Pipe), sender: Sender<(usize, Heard)>) {
    thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            let ns = monotonic_ns();
            if sender.send((index, Heard::Line { pipe, line, ns })).is_err() {
                return;
            }
        }
        let _ = sender.send((index, Heard::End(pipe)));
    });
}

/// `CLOCK_MONOTONIC`, nanoseconds: processes of a machine share it.
pub(crate) fn monotonic_ns() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// In a rank: prints a line for the job.
pub(crate) fn say(line: &str) -> Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{line}")?;
    Ok(output.flush()?)
}

/// In a rank: waits for a line of the job that begins with `expected`; returns the rest of it.
pub(crate) fn read_line(expected: &str) -> Result<String> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line)?;
    match line.trim_end().strip_prefix(expected) {
        Some(rest) => Ok(rest.trim().to_owned()),
        None if line.is_empty() => bail!("the job has ended while this rank waited for `{expected}`"),
        None => bail!("this rank expected `{expected}` and read `{}`", line.trim_end()),
    }
}

/// In a rank: the unique id of the job, which rank 0 (`is_root`) makes and the others read.
pub(crate) fn unique_id(nccl: &Nccl, is_root: bool) -> Result<UniqueId> {
    if is_root {
        let id = nccl.unique_id()?;
        say(&format!("{ID}{}", hex::encode(id.0)))?;
        return Ok(id);
    }
    let mut id = UniqueId([0; 128]);
    hex::decode_to_slice(read_line(ID)?, &mut id.0).context("reading the unique id")?;
    Ok(id)
}
