//! How a watch ends whose targets and outputs hold on to the collector.

use std::{
    fs::{self, File},
    net::TcpListener,
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use ringsight_testbed::process::Guarded;

use crate::{
    Target,
    outputs::{option, stuck_pipe},
    target::ringsight,
};

/// How long after a signal, or the end of `--duration`, the report is there.
const END: Duration = Duration::from_millis(200);
/// Runs of which one has to be in time: a busy machine makes one late, a defect all of them.
const RUNS: usize = 3;
/// How long the watch lasts that ends by itself.
const DURATION: Duration = Duration::from_secs(2);

/// How the watch is ended.
#[derive(Clone, Copy, Debug)]
enum End {
    Signal(libc::c_int),
    Duration,
}

/// Watches a target that keeps its memory lock at the end, with a backend that accepts and never answers, a pipe that nobody reads, and a
/// full disk. Returns how long after `end` the report was there.
fn time_to_report(test: &str, end: End, options: &[&str]) -> Result<Option<Duration>> {
    let (Some(mut hostile), Some(honest)) =
        (Target::start(test, "memory-lock")?, Target::start(test, "busy")?)
    else {
        return Ok(None);
    };
    let backend = TcpListener::bind("127.0.0.1:0")?;
    let url = format!("--otlp=http://{}", backend.local_addr()?);
    thread::spawn(move || backend.incoming().collect::<Vec<_>>());
    let (stuck, _reader) = stuck_pipe(&honest, "stuck.jsonl")?;
    let full = honest.folder().join("full.jsonl");
    std::os::unix::fs::symlink("/dev/full", &full)?;
    let (ready, errors) = (honest.folder().join("ready"), honest.folder().join("errors"));
    let mut command = Command::new(ringsight());
    command
        .args(["attach", &hostile.pid().to_string(), &honest.pid().to_string()])
        .args([url, option("out", &stuck), option("out", &full)])
        .arg(option("ready-file", &ready))
        .args(options)
        .stdout(Stdio::null())
        .stderr(File::create(&errors)?);
    if let End::Duration = end {
        command.arg(format!("--duration={}", DURATION.as_secs()));
    }
    let mut collector = Guarded::start("ringsight", &mut command, libc::SIGKILL)?;
    let started = collector.wait_until(Duration::from_secs(20), || ready.exists());
    ensure!(started.is_ok(), "{started:?}: {}", fs::read_to_string(&errors)?);
    let begun = Instant::now();
    if let End::Duration = end {
        thread::sleep(DURATION / 2);
    }
    hostile.ask("")?;
    let asked = match end {
        End::Signal(signal) => {
            collector.signal(signal);
            Instant::now()
        }
        End::Duration => begun + DURATION,
    };
    let mut text = String::new();
    while !text.contains(" operations in ") {
        ensure!(asked.elapsed() < Duration::from_secs(20), "no report: {text}");
        thread::sleep(Duration::from_millis(1));
        text = fs::read_to_string(&errors)?;
    }
    let elapsed = asked.elapsed();
    // The next signals end it at once, whatever waits for outputs.
    let again = Instant::now();
    for _ in 0..2 {
        collector.signal(libc::SIGTERM);
    }
    collector.wait(Duration::from_secs(20))?;
    // The kernel removes a probe from a process only with the lock of its memory, and the collector is not gone before.
    let is_probed = !options.contains(&"--no-ebpf");
    ensure!(
        is_probed || again.elapsed() < Duration::from_secs(1),
        "{:?}",
        again.elapsed()
    );
    Ok(Some(elapsed))
}

fn is_in_time(test: &str, end: End, options: &[&str]) -> Result<()> {
    // `/dev/full` is one file, and one watch at a time may write a file. Times are those of one watch, too.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    ringsight();
    let mut late = Vec::new();
    for _ in 0..RUNS {
        match time_to_report(test, end, options)? {
            Some(elapsed) if elapsed > END => late.push(elapsed),
            _ => return Ok(()),
        }
    }
    anyhow::bail!("{end:?}: the report came after {late:?}")
}

#[test]
fn an_interrupt_ends_a_watch_whatever_it_waits_for() -> Result<()> {
    let name = "an_interrupt_ends_a_watch_whatever_it_waits_for";
    is_in_time(name, End::Signal(libc::SIGINT), &[])
}

#[test]
fn a_termination_ends_a_watch_whatever_it_waits_for() -> Result<()> {
    let name = "a_termination_ends_a_watch_whatever_it_waits_for";
    is_in_time(name, End::Signal(libc::SIGTERM), &["--no-ebpf"])
}

#[test]
fn a_duration_ends_a_watch_whatever_it_waits_for() -> Result<()> {
    let name = "a_duration_ends_a_watch_whatever_it_waits_for";
    is_in_time(name, End::Duration, &[])
}
