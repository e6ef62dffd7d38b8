//! What the probes cost where they are passed.

use std::{process::Command, time::Instant};

use ringsight_probes::{NetworkSample, network::NetworkEvent};

use super::{LIMIT, Watch, run, writer};

/// The programs' runs and their time, by the kernel's count: (runs, nanoseconds).
fn program_time(name: &str) -> (u64, u64) {
    let output = Command::new("bpftool").args(["prog", "show"]).output().unwrap();
    let output = String::from_utf8_lossy(&output.stdout);
    // `12: kprobe  name network_entry  tag … gpl run_time_ns 1234 run_cnt 12`
    let line = output
        .lines()
        .find(|line| line.contains(&format!("name {name} ")))
        .unwrap();
    let number = |name: &str| -> u64 {
        let mut words = line.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).map_or(0, |word| word.parse().unwrap())
    };
    (number("run_cnt"), number("run_time_ns"))
}

/// 64 queue pairs at each end, made, connected and destroyed.
fn many_queue_pairs() {
    let base = ["-q", "64", "-n", "5", "-s", "64"];
    let start = |device: &str, more: &[&str]| writer(device, &[&base, more].concat());
    let mut server = start("peer0", &[]);
    let begun = Instant::now();
    // The client is refused as long as nobody listens.
    while !start("hca0", &["127.0.0.1"]).wait().unwrap().success() {
        assert!(begun.elapsed() < LIMIT, "ib_write_bw does not run");
    }
    assert!(server.wait().unwrap().success());
}

/// What the probes cost where they are passed: the programs' own time, beside that of the calls that they are on. Each event is a run of
/// one program, or of two: none runs for nothing, and none is missing.
#[test]
#[ignore = "guest: needs a soft-RoCE link and its kernel's functions"]
fn overhead() {
    run("echo 1 > /proc/sys/kernel/bpf_stats_enabled");
    let mut watch = Watch::begin();
    // Once before it counts: the emulator translates the programs at their first runs.
    many_queue_pairs();
    watch.poll();
    watch.seen.clear();
    let programs = ["network_event", "network_entry", "network_return"];
    let before = programs.map(program_time);
    many_queue_pairs();
    let after = programs.map(program_time);
    watch.poll();
    let is_call = |sample: &&NetworkSample| {
        matches!(
            sample.event,
            NetworkEvent::QpCreated { .. }
                | NetworkEvent::QpModified { .. }
                | NetworkEvent::MrRegistered { .. }
        )
    };
    let calls = watch.seen.iter().filter(is_call).count() as u64;
    // Two ends, each of 64 queue pairs: one is created, and goes to INIT and RTR; those that write also to RTS.
    assert!(calls >= 2 * 64 * 3 + 64, "{calls} calls");
    let runs = [watch.seen.len() as u64 - calls, calls, calls];
    let mut means = [0.0; 3];
    for (index, name) in programs.iter().enumerate() {
        let (count, ns) = (after[index].0 - before[index].0, after[index].1 - before[index].1);
        assert_eq!(count, runs[index], "{name}");
        means[index] = ns as f64 / count as f64;
    }
    let mut times: Vec<u64> = watch
        .seen
        .iter()
        .filter(|sample| matches!(sample.event, NetworkEvent::QpModified { .. }))
        .map(|sample| sample.duration_ns)
        .collect();
    times.sort_unstable();
    println!(
        "{} events, {calls} of them calls; a run of the programs takes {:.0} ns (event), {:.0} ns (entry), {:.0} ns (return); a \
         modification of a queue pair with its probes {} ns",
        watch.seen.len(),
        means[0],
        means[1],
        means[2],
        times[times.len() / 2]
    );
}
