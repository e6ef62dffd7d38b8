//! What one communicator of a process finds out of a path, and another goes by.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use ringsight_records::{Function, PathCause};

use super::{
    control::Control,
    ends::work_until_on,
    links::{lose_packets, mend, two_ports},
    nodes::{check, ends, two_nodes},
};
use crate::common::Call;

/// How long requests may neither end nor fail.
const TIMEOUT: Duration = Duration::from_secs(10);
/// What a rank prints of which ends left the path by what the process knew.
const BY_PROCESS: &str = "left by what the process knew";
/// The same of a communicator that was made when it knew.
const LATER: &str = "left by what the process had known before";

#[test]
#[ignore = "helper: needs two RDMA links, run in a guest"]
fn a_communicator_leaves_a_path_that_another_one_found_dead() {
    let ended = two_nodes("verdicts::worker", |rank, command| {
        two_ports(rank, command)
            // Nothing else finds out that packets are lost.
            .env("NCCL_IB_RETRY_CNT", "7")
            .env("RINGSIGHT_NET_TIMEOUT_MS", TIMEOUT.as_millis().to_string())
            .env("RINGSIGHT_NET_GIVE_UP_MS", "60000");
    });
    mend();
    check("verdicts", &ended, &["(epoch 1)"], &["use a socket"]);
    // Not on every rank: where the other one's time is over first, its ends may be heard before this process finds out by itself.
    for said in [BY_PROCESS, LATER] {
        let is_said = ended.iter().any(|(_, text)| text.contains(said));
        assert!(is_said, "no end {said}: {ended:?}");
    }
}

#[test]
#[ignore = "helper: the body of one rank; started by the test above"]
fn worker() {
    let Some(control) = Control::of_process() else {
        return;
    };
    let rank = control.rank.rank;
    let (first, second) = (control.make(), control.make());
    let comms = || -> BTreeSet<u64> { ends().iter().map(|end| end.comm).collect() };
    work_until_on(&control, &first, 0);
    let firsts = comms();
    work_until_on(&control, &second, 0);
    let seconds = comms();
    control.meet();
    if rank == 0 {
        lose_packets(0, true);
    }
    control.meet();
    let all_reduce = |comm| {
        let start = Instant::now();
        Call::new(Function::AllReduce, 5003).check(comm, true);
        start.elapsed()
    };
    let took = all_reduce(&first);
    let by_others = [PathCause::Shared as u8, PathCause::Peer as u8];
    // A rank that called later hears of the other one's time-out before its own.
    let was_told = || {
        let mut left = ends();
        left.retain(|end| firsts.contains(&end.comm) && end.switches > 0);
        !left.is_empty() && left.iter().all(|end| by_others.contains(&end.cause))
    };
    assert!(
        took >= TIMEOUT || was_told(),
        "the path was left after {took:?}, not by time-out"
    );
    // Ends that are not `known` left the path by what others had found, or by the word of a peer that did.
    let leaves_unasked = |comm, known: &BTreeSet<u64>, said: &str| {
        let took = all_reduce(comm);
        assert!(took < TIMEOUT / 2, "{said}: {took:?}");
        let ends: Vec<_> = ends()
            .into_iter()
            .filter(|end| !known.contains(&end.comm))
            .collect();
        assert!(!ends.is_empty());
        for end in &ends {
            let dead = end.paths().position(|path| path.index == 0);
            assert_ne!(Some(usize::from(end.active)), dead, "{end:?}");
            assert!(end.switches == 0 || by_others.contains(&end.cause), "{end:?}");
        }
        if ends.iter().any(|end| end.cause == PathCause::Shared as u8) {
            println!("{said}");
        }
    };
    leaves_unasked(&second, &firsts, BY_PROCESS);
    // One that is made now begins on the path, for nothing says that a port is down.
    let third = control.make();
    leaves_unasked(&third, &firsts.union(&seconds).copied().collect(), LATER);
    control.meet();
    if rank == 0 {
        lose_packets(0, false);
    }
    control.meet();
    first.leave();
    second.leave();
    third.leave();
    control.rank.leave();
    println!("rank done");
}
