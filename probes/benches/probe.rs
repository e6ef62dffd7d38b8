//! What a probe function costs in the target: unattached, and attached with its record, at the 5-byte and the 1-byte nop; and
//! what reading the shared ring costs. Prints a line a figure; with `--json`, one JSON object.
//!
//! Each figure is that of the fastest of 15 runs: what other load on the machine adds is not the probe's. Not Criterion: the time is taken in the target, around a million calls, and half of the figures need the kernel.

use std::time::Duration;

#[path = "../tests/common/mod.rs"]
mod common;

use common::Target;
use ringsight_probes::{Options, Session, Source as _, UseEbpf};
use ringsight_records::Kind;

const CALLS: u64 = 50_000;
const RUNS: usize = 15;

/// Nanoseconds of a call, in the fastest run, while `session` polls on its tick.
fn per_call(target: &mut Target, calls: u64, mut tick: impl FnMut()) -> f64 {
    let runs = (0..RUNS).map(|_| {
        target.send(&format!("fixture_probe {calls}"));
        while !target.answered() {
            tick();
            std::thread::sleep(Duration::from_millis(1));
        }
        target.answer() as f64 / calls as f64
    });
    runs.fold(f64::INFINITY, f64::min)
}

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let mut figures: Vec<(&str, f64, &str)> = Vec::new();
    let mut target = Target::instrumented();
    figures.push(("probe_unattached", per_call(&mut target, 5_000_000, || ()), "ns"));

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
        let cost = per_call(&mut target, CALLS, || {
            session.poll(&mut samples).expect("no problem");
            samples.clear();
        });
        figures.push((name, cost, "ns"));
        let stats = session.probe_stats();
        assert_eq!(stats.lost, [0; Kind::LIMIT]);
        assert_eq!(stats.hits[Kind::OpCompleted as usize], CALLS * RUNS as u64);
        if !force_nop1 {
            figures.push(("attach", attached.elapsed.as_secs_f64() * 1e3, "ms"));
            figures.push(("detach", session.detach_all().as_secs_f64() * 1e3, "ms"));
        }
    }

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
    figures.push(("ring_read", runs.fold(f64::INFINITY, f64::min), "ns"));

    if json {
        let fields: Vec<String> = figures
            .iter()
            .map(|(name, value, unit)| format!("\"{name}_{unit}\":{value:.2}"))
            .collect();
        println!("{{{}}}", fields.join(","));
    } else {
        for (name, value, unit) in figures {
            println!("{name:<24} {value:>10.2} {unit}");
        }
    }
}
