//! What the watchdog says while the network carries nothing: who waits for it, and no hang, though hangs abort here.

use std::{
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::observe;
use ringsight_records::{Cause, Function, verdicts::GivenVerdict};

use super::{
    control::Control,
    data::replays,
    links::{devices, lose_packets, mend, packets, set_link, until},
    nodes::{check, two_nodes},
};
use crate::common::Call;

/// Threshold: an emulated machine may take long for what it does.
const THRESHOLD: Duration = Duration::from_secs(1);
/// The network is away for so long: a verdict takes the threshold, and what a rank may take to answer.
const AWAY: Duration = Duration::from_secs(5);

#[test]
#[ignore = "helper: needs two RDMA links, run in a guest"]
fn a_network_that_carries_nothing_is_named_and_ends_no_job() {
    let ended = two_nodes("stalls::worker", |_, command| {
        command
            .env("NCCL_KERNEL_TIMEOUT_MS", THRESHOLD.as_millis().to_string())
            .env("RINGSIGHT_WATCHDOG_ACTION", "abort")
            // One path each, which is not left before the network is there again.
            .env("NCCL_IB_RETRY_CNT", "7")
            .env("RINGSIGHT_NET_TIMEOUT_MS", "60000")
            .env("RINGSIGHT_NET_GIVE_UP_MS", "60000");
    });
    mend();
    let late = "Verdict: STUCK_NIC (late): the network of rank ";
    check(
        "stalls",
        &ended,
        &[
            late,
            "of which nothing is acknowledged, for ",
            "whose port is down, for ",
            "of graph 1, replay 1",
        ],
        &["(hang)", "use a socket"],
    );
    for (rank, (_, text)) in ended.iter().enumerate() {
        for (begin, end) in PHASES.iter().zip(PHASES.iter().skip(1).chain([&"rank done"])) {
            let phase = text.split(begin).nth(1).and_then(|rest| rest.split(end).next());
            assert!(
                phase.is_some_and(|text| text.contains(late)),
                "rank {rank}: no {late:?} in {begin:?} of\n{text}"
            );
        }
    }
}

/// Elements of an operation of one step.
const LITTLE: usize = 5003;
/// What the workers print before each.
const PHASES: [&str; 3] = [
    "phase: before it",
    "phase: in the middle",
    "phase: port down, replays",
];

#[test]
#[ignore = "helper: the body of one rank; started by the test above"]
fn worker() {
    let Some(control) = Control::of_process() else {
        return;
    };
    let comm = control.make();
    let all_reduce = |count| Call::new(Function::AllReduce, count).check(&comm, true);
    all_reduce(LITTLE);
    // What is lost first are credits: the next operation has not begun.
    let lose = |lost: bool| lose_packets(0, lost);
    phase(PHASES[0], &control, lose, None, || all_reduce(LITTLE));
    // And here it is steps.
    let device = &devices(comm.rank)[0];
    let sent = packets(device, "sent_pkts");
    let in_the_middle = || until("steps are posted", || packets(device, "sent_pkts") > sent + 50);
    phase(PHASES[1], &control, lose, Some(&in_the_middle), || {
        all_reduce(1 << 20);
    });
    let down = |down: bool| set_link(0, !down);
    phase(PHASES[2], &control, down, None, || replays(&comm));
    all_reduce(LITTLE);
    let pages = observe::pages().unwrap();
    let kept = pages.verdicts();
    let kept: Vec<_> = kept
        .filter(|given| given.cause() == Some(Cause::StuckNic))
        .collect();
    let names_its_end = |given: &GivenVerdict| {
        let known = devices(given.culprit as usize);
        given
            .nic()
            .is_some_and(|nic| nic.port == 1 && known.iter().any(|device| device == nic.device()))
    };
    assert!(!kept.is_empty() && kept.iter().all(names_its_end), "{kept:?}");
    comm.leave();
    control.rank.leave();
    println!("rank done");
}

/// Runs `work`, which cannot end before the network is back that rank 0 takes away by `set_away`: before it, or `when` so far.
fn phase(
    name: &str,
    control: &Control,
    set_away: impl Fn(bool) + Sync,
    when: Option<&(dyn Fn() + Sync)>,
    work: impl FnOnce(),
) {
    let is_first = control.rank.rank == 0;
    control.meet();
    if is_first && when.is_none() {
        set_away(true);
    }
    control.meet();
    println!("{name}");
    let start = Instant::now();
    thread::scope(|scope| {
        if is_first {
            scope.spawn(|| {
                if let Some(when) = when {
                    when();
                    set_away(true);
                }
                thread::sleep(AWAY);
                set_away(false);
            });
        }
        work();
    });
    let took = start.elapsed();
    assert!(took >= AWAY, "{name}: the network was there, it took {took:?}");
}
