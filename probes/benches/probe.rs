//! What a probe function costs in the target: unattached, and attached with its record, at the 5-byte and the 1-byte nop; and
//! what reading the shared ring costs. Prints a line a figure; with `--json`, one JSON object.
//!
//! Each figure is measured in 15 runs, and given as their median and as the fastest, to which other load on the machine added
//! least. Not Criterion: the time is taken in the target, and half of the figures need the kernel.

use std::time::Duration;

#[path = "../tests/common/mod.rs"]
mod common;

use common::Target;
use ringsight_probes::{Options, Session, Source as _, UseEbpf};
use ringsight_records::Kind;

const CALLS: u64 = 50_000;
const RUNS: usize = 15;

/// What a number of runs came to.
#[derive(Clone, Copy)]
struct Figure {
    median: f64,
    min: f64,
}

impl Figure {
    fn of(runs: impl Iterator<Item = f64>) -> Self {
        let mut runs: Vec<f64> = runs.collect();
        runs.sort_by(f64::total_cmp);
        Self {
            median: runs[runs.len() / 2],
            min: runs[0],
        }
    }
}

/// Nanoseconds of a call of `function` in the target, while `tick` polls the session.
fn per_call(target: &mut Target, function: &str, calls: u64, mut tick: impl FnMut()) -> Figure {
    Figure::of((0..RUNS).map(|_| {
        target.send(&format!("{function} {calls}"));
        while !target.answered() {
            tick();
            std::thread::sleep(Duration::from_millis(1));
        }
        target.answer() as f64 / calls as f64
    }))
}

/// What calls of a library without probe functions cost, at sites of either kind: each is probed at its entry and its return.
fn stock_calls(figures: &mut Vec<(String, Figure, &str)>) {
    let directory = tempfile::tempdir().expect("a temporary folder");
    let library = directory.path().join("libnccl.so.2");
    let options = Options {
        use_ebpf: UseEbpf::Require,
        ..Options::default()
    };
    let Some(mut session) = common::session_with("stock_calls", options) else {
        return;
    };
    if common::compile("stock_calls", "libnccl_timed.c", &library, &[]).is_none() {
        return;
    }
    let mut target = Target::start(&library);
    let before =
        ["timed_push", "timed_lea"].map(|function| per_call(&mut target, function, 5_000_000, || ()));
    let attached = session.attach(target.pid()).expect("a library");
    for (function, symbol, before) in [
        ("timed_push", "ncclGather", before[0]),
        ("timed_lea", "ncclScatter", before[1]),
    ] {
        let site = attached.sites.iter().find(|site| site.symbol == symbol);
        let kind = site.expect("it is exported").kind.name().replace('-', "_");
        let mut samples = Vec::new();
        let cost = per_call(&mut target, function, CALLS / 10, || {
            session.poll(&mut samples).expect("no problem");
            samples.clear();
        });
        figures.push((format!("stock_call_unattached_{kind}"), before, "ns"));
        figures.push((format!("stock_call_attached_{kind}"), cost, "ns"));
    }
}

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let mut figures: Vec<(String, Figure, &str)> = Vec::new();
    let once = |value| Figure {
        median: value,
        min: value,
    };
    let mut target = Target::instrumented();
    let unattached = per_call(&mut target, "fixture_probe", 5_000_000, || ());
    figures.push(("probe_unattached".into(), unattached, "ns"));

    for (name, force_nop1) in [("probe_attached_nop5", false), ("probe_attached_nop1", true)] {
        let options = Options {
            use_ebpf: UseEbpf::Require,
            dense: 0,
            force_nop1,
            ..Options::default()
        };
        let mut session = match Session::new(options) {
            Ok(session) => session,
            Err(unavailable) => {
                println!("SKIPPED {name}: {unavailable}");
                continue;
            }
        };
        let attached = session.attach(target.pid()).expect("a fixture");
        let mut samples = Vec::new();
        let cost = per_call(&mut target, "fixture_probe", CALLS, || {
            session.poll(&mut samples).expect("no problem");
            samples.clear();
        });
        figures.push((name.into(), cost, "ns"));
        let stats = session.probe_stats();
        assert_eq!(stats.lost, [0; Kind::LIMIT]);
        assert_eq!(stats.hits[Kind::OpCompleted as usize], CALLS * RUNS as u64);
        if !force_nop1 {
            figures.push(("attach".into(), once(attached.elapsed.as_secs_f64() * 1e3), "ms"));
            figures.push((
                "detach".into(),
                once(session.detach_all().as_secs_f64() * 1e3),
                "ms",
            ));
        }
    }
    stock_calls(&mut figures);

    // A full ring, drained in one poll: what a dense record costs its reader.
    let mut session = Session::new(Options {
        use_ebpf: UseEbpf::Never,
        ..Options::default()
    })
    .expect("no eBPF asked for");
    session.attach(target.pid()).expect("a fixture");
    let mut samples = Vec::with_capacity(1 << 17);
    let runs = (0..RUNS).map(|_| {
        samples.clear();
        target.call("fixture_operations 7 1 60000");
        let begun = std::time::Instant::now();
        session.poll(&mut samples).expect("no problem");
        begun.elapsed().as_nanos() as f64 / 60_000.0
    });
    figures.push(("ring_read".into(), Figure::of(runs), "ns"));

    if json {
        let fields: Vec<String> = figures
            .iter()
            .map(|(name, Figure { median, min }, unit)| {
                format!("\"{name}_{unit}\":{{\"median\":{median:.2},\"min\":{min:.2}}}")
            })
            .collect();
        println!("{{{}}}", fields.join(","));
    } else {
        for (name, Figure { median, min }, unit) in figures {
            println!("{name:<40} median {median:>10.2} min {min:>10.2} {unit}");
        }
    }
}
