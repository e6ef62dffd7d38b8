//! Communicators of one process, of which the first finds a path dead.

use std::{collections::BTreeSet, time::Instant};

use ringsight_records::{Function, PathCause};

use super::{
    connections::{ends, work_until_on},
    control::Control,
    links::lose_packets,
    shared::{BY_PROCESS, FOUND_DEAD_AFTER, LATER},
};
use crate::common::Call;

/// Three communicators, of which the first waits for the time-out.
pub(crate) fn path_found_dead() {
    let control = Control::of_process();
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
        took >= FOUND_DEAD_AFTER || was_told(),
        "the path was left after {took:?}, not by time-out"
    );
    // Ends that are not `known` left the path by what others had found, or by the word of a peer that did.
    let leaves_unasked = |comm, known: &BTreeSet<u64>, said: &str| {
        let took = all_reduce(comm);
        assert!(took < FOUND_DEAD_AFTER / 2, "{said}: {took:?}");
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
}
