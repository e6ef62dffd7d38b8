//! Connections whose ports fail, in a guest: two processes move numbered steps over two soft-RoCE links, or between two mlx5 devices of
//! each, and a link goes down.
//!
//! Which cases are run is in `RINGSIGHT_FAILOVER_CASES`, one in each line ([`case::Case::parse`]); `cargo xtask vm failover` makes
//! them. A case is two lines of output: that it begins; and what it is, and what came of it.

mod calls;
mod case;
mod ends;
#[path = "../../../tests/src/fabric.rs"]
#[allow(dead_code, reason = "each test uses a part of it")]
mod fabric;
mod failing;
mod kernel;
mod links;
mod outside;
mod rank;
mod run;
mod seen;

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    time::{Duration, Instant},
};

use case::{Case, Verdict};
use fabric::Fabric;
use kernel::Messages;
use outside::GO;
use rank::Rank;
use run::run;
use seen::{CALLS, LONGEST, OWN_CALLS, TORN, WATCHED};

/// No case takes so long.
const PATIENCE: Duration = Duration::from_secs(100);

const PEER: &str = "RINGSIGHT_FAILOVER_PEER";
const CASES: &str = "RINGSIGHT_FAILOVER_CASES";

/// One of each kind, where nothing else is asked for.
const USUAL: [&str; 22] = [
    // Who comes back after the time-out finds the completion, not a path that failed.
    "sendrecv none sender 41 away-ms=4000 TIMEOUT_MS=3000 PROBE_MS=60000",
    "sendrecv primary sender 1",
    "sendrecv primary receiver 63",
    "sendrecv backup sender 35",
    "sendrecv primary-backup both 19",
    "sendrecv flap sender 127",
    // The bytes of a step arrive, and what tells of them does not.
    "sendrecv primary receiver 42",
    "allreduce primary-backup both 26",
    // Several queue pairs: by turns, and each step over all of them.
    "sendrecv primary sender 77 qps=2",
    "allreduce primary-backup both 30 qps=4",
    "sendrecv primary-backup receiver 87 qps=4 split=1",
    "allreduce primary receiver 44 qps=2 split=1",
    "sendrecv flap both 53 qps=4 split=1 flaps=5 steps=800 pace-us=5000 down-ms=40 BACKOFF_MS=20 PROBATION_MS=5",
    // One path, whose link is away for longer than a recovery may take with two, and not for as long as its device would try: 30 s.
    // A packet that is lost while the link comes up is sent again after four.
    "sendrecv flap receiver 41 alone=1 down-ms=12000 ib-timeout=20",
    // Again and again: it would soon be left alone for longer than a recovery may take.
    "sendrecv flap receiver 43 alone=1 flaps=3 down-ms=4000 steps=100 pace-us=150000 BACKOFF_MS=3000 RECOVERY_WINDOW_MS=60000 GIVE_UP_MS=9000",
    "sendrecv silent sender 51 TIMEOUT_MS=1500",
    // The device has tried often enough long before anybody else notices.
    "sendrecv silent sender 51 ib-timeout=14 TIMEOUT_MS=60000 PROBE_MS=60000",
    "allreduce primary both 65",
    "allreduce primary-backup sender 25",
    "allreduce flap receiver 81",
    "allreduce all both 11",
    // Time-outs at the edge of what a busy machine takes: it ends, rightly or with an error.
    "allreduce chaos sender 7 flaps=1 loose=1 steps=100 load=3 TIMEOUT_MS=200 PROBE_MS=3 GIVE_UP_MS=1500",
];

/// What only soft-RoCE's links can do: what comes to one queue pair of a path is lost. The path is not gone back to.
const OF_SOFT_ROCE: [&str; 1] = [
    "sendrecv silent-queue receiver 41 qps=2 steps=160 pace-us=50000 TIMEOUT_MS=1500 BACKOFF_MS=20 PROBATION_MS=5",
];

/// What only the stand-in for mlx5 devices can do. After a queue's failure the transfer goes on until the path is in use again; a device
/// that died is gone, so that comes last.
const OF_MLX5: [&str; 7] = [
    "sendrecv queue-pair sender 41 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "allreduce queue-pair receiver 81 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "sendrecv completion-queue receiver 23 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "allreduce completion-queue both 61 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "sendrecv queue-pair both 47 qps=4 split=1 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "sendrecv refusal receiver 43 steps=300 pace-us=5000 BACKOFF_MS=20 PROBATION_MS=5",
    "allreduce device both 41",
];

fn cases() -> Vec<Case> {
    let usual = || {
        let of_queues = || OF_MLX5.iter().filter(|case| !case.contains(" device "));
        let more: Vec<&str> = match Fabric::here() {
            Fabric::SoftRoce => OF_SOFT_ROCE.to_vec(),
            Fabric::Mlx5 => OF_MLX5.to_vec(),
            // With their device all ports are gone.
            Fabric::DualPort => of_queues().copied().collect(),
        };
        [&USUAL[..], &more].concat().join("\n")
    };
    let text = std::env::var(CASES).unwrap_or_else(|_| usual());
    text.lines()
        .map(|line| Case::parse(line).unwrap_or_else(|| panic!("no case: {line}")))
        .collect()
}

/// A line of its own, in one piece: the other rank's harness writes to the same output, and ends no line.
fn say(outcome: &serde_json::Value) {
    let line = format!("\n{outcome}\n");
    std::io::stdout().lock().write_all(line.as_bytes()).unwrap();
}

fn peer(listener: &TcpListener) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "links_fail", "--ignored", "--nocapture"])
        .env(PEER, listener.local_addr().unwrap().port().to_string())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "guest: needs two links"]
fn links_fail() {
    if let Ok(port) = std::env::var(PEER) {
        let stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
        let mut rank = Rank::new(1, stream);
        for (number, case) in (0..).zip(cases()) {
            rank.outside.wait(GO);
            run(&mut rank, case, number);
        }
        return;
    }
    let fabric = Fabric::here();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut child = peer(&listener);
    let mut rank = Rank::new(0, listener.accept().unwrap().0);
    let mut wrong = 0;
    let mut kernel = Messages::new();
    for (number, case) in (0..).zip(cases()) {
        say(&serde_json::json!({ "begins": case.line }));
        fabric.mend();
        rank.outside.put(GO, &[]);
        let start = Instant::now();
        let seen = run(&mut rank, case.clone(), number);
        let (is_right, counts, text) = match case.verdict(&seen) {
            Verdict::Right => (true, true, None),
            Verdict::Missed(text) => (true, false, Some(text)),
            Verdict::Wrong(text) => (false, true, Some(text)),
        };
        wrong += u32::from(!is_right);
        let milliseconds =
            |time: Option<Duration>| time.map(|time| (time.as_secs_f64() * 1e4).round() / 10.0);
        let both = |which: usize| seen.costs[0][which] + seen.costs[1][which];
        let outcome = serde_json::json!({
            "case": case.line,
            "ok": is_right,
            "counts": counts,
            "text": text,
            "outstanding": seen.outstanding,
            "cut_off": seen.cut_off,
            "replayed": seen.replayed,
            "watched_ends": both(WATCHED),
            "torn": both(TORN),
            "switches": seen.switches,
            "broken": seen.broken,
            "switch_ms": milliseconds(seen.switch),
            "recovered_ms": milliseconds(seen.recovered),
            "back_ms": milliseconds(seen.back),
            "took_ms": milliseconds(Some(start.elapsed())),
            "ran_ms": milliseconds(Some(seen.ran)),
            "longest_look_ms": seen.costs.map(|costs| costs[LONGEST] / 1000),
            "mib_per_s": seen.rate(),
            "step_requests": both(0),
            "credits": both(1),
            "other_requests": both(2),
            "completions": both(3),
            "calls": both(CALLS),
            "own_calls": both(OWN_CALLS),
            "wire_bytes": seen.wire,
            "error": seen.error.or(seen.peer),
            "kernel_warnings": kernel.warnings(),
        });
        say(&outcome);
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(wrong, 0, "cases that went wrong");
}
