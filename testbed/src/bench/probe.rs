//! The cost of a call of a probe function, with and without a probe, in one process.

use std::{
    ffi::c_void,
    io::{BufRead, Write},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use libloading::{Library, Symbol};
use ringsight_records::{Kind, PROBE_SYMBOLS, Record, State};

use super::{Goal, Row};
use crate::{
    demo::collector::Collector,
    nccl::{DeviceKind, Nccl},
    process::Dialogue,
    stats::median,
    workspace::Artifacts,
};

/// Calls in a burst: few enough for the collector's buffer, so that each is recorded and none costs less for being lost.
const BURST: u32 = 500;
/// Bursts.
const BURSTS: usize = 400;
/// The most that a call with a record may cost, nanoseconds: kernels from 6.18 on run the probe without a trap.
const GOALS: (f64, f64) = (350.0, 700.0);

/// None: the process is told over its standard input when to measure.
#[derive(Args, Debug)]
pub struct Arguments {}

/// The measuring process: for each line on standard input it prints the median cost of a call in nanoseconds.
///
/// # Errors
/// If the library cannot be used.
pub fn run(_: &Arguments) -> Result<()> {
    let file = Path::new("libnccl.so.2");
    let nccl = Nccl::open(file, DeviceKind::Host)?;
    // A communicator makes the process one that a collector can attach to.
    let communicator = nccl.communicator(1, nccl.unique_id()?, 0)?;
    // SAFETY: the library is loaded already; its initialisers have run.
    let library = unsafe { Library::new(file) }?;
    let symbol = format!("{}\0", PROBE_SYMBOLS[3]);
    // SAFETY: every probe function takes a record and returns nothing.
    let function: Symbol<'_, unsafe extern "C" fn(*const c_void)> =
        unsafe { library.get(symbol.as_bytes()) }?;
    // A kind that no collector acts upon: a graph that holds nothing.
    let record = Record {
        pid: std::process::id(),
        ..Record::new(Kind::Graph, State::START, 1)
    };
    let argument: *const c_void = (&raw const record).cast();
    println!("ready");
    for _ in std::io::stdin().lock().lines() {
        let mut costs = Vec::with_capacity(BURSTS);
        for _ in 0..BURSTS {
            let start = Instant::now();
            for _ in 0..BURST {
                // SAFETY: the record outlives the call.
                unsafe { function(std::hint::black_box(argument)) };
            }
            costs.push(start.elapsed().as_nanos() as f64 / f64::from(BURST));
            // Not to wait for anything: a pause in which the collector empties its buffer.
            std::thread::sleep(Duration::from_millis(2));
        }
        println!("{}", median(costs).context("no bursts")?);
        std::io::stdout().flush()?;
    }
    communicator.destroy()
}

/// Measures without and with a collector, in turns.
///
/// # Errors
/// If it cannot be built or run.
pub fn measure(artifacts: &Artifacts) -> Result<Vec<Row>> {
    let mut command = Command::new(&artifacts.xtask);
    command
        .arg("bench-probe")
        .env("LD_LIBRARY_PATH", &artifacts.library_folder)
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo");
    let mut process = Dialogue::start("the measuring process", &mut command)?;
    let pid = process.pid();
    ensure!(process.line()? == "ready", "the measuring process is not ready");
    let mut ask = || -> Result<f64> { Ok(process.ask("")?.parse()?) };
    let work = artifacts.target.join("bench");
    let (mut without, mut with, mut lost, mut attach, mut detach) = (vec![], vec![], 0, vec![], vec![]);
    for _ in 0..3 {
        without.push(ask()?);
        let mut collector = Collector::attach(artifacts, &[pid], &[], &work)?;
        with.push(ask()?);
        let summary = collector.stop(Duration::from_secs(30))?;
        let records = summary
            .records
            .get(Kind::Graph.name())
            .copied()
            .unwrap_or_default();
        lost += u64::from(BURST) * BURSTS as u64 - records.received;
        attach.push(summary.attach_ms);
        detach.push(summary.detach_ms);
    }
    let [without, with, attach, detach] =
        [without, with, attach, detach].map(|values| median(values).unwrap_or(f64::NAN));
    let goal = if kernel() >= (6, 18) { GOALS.0 } else { GOALS.1 };
    let row = |name, median, unit, goal| Row::new(name, median, unit).goal(Goal::AtMost(goal));
    Ok(vec![
        row("probe function called, unattached", without, "ns", 3.0),
        row("probe function called, attached", with, "ns", goal).note(format!(
            "{:.0} times; median of 3 runs; {lost} records lost",
            with / without
        )),
        row("attach", attach, "ms", 100.0).note("one process"),
        row("detach", detach, "ms", 600.0).note("one library file"),
    ])
}

/// Version of the running kernel.
pub(super) fn kernel() -> (u32, u32) {
    let release = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map_while(|number| number.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}
