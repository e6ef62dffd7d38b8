//! A rank that is late, on a node of its own.

use std::{thread, time::Duration};

use ringsight_comm::observe;
use ringsight_records::{Arrival, Function, Kind, State};

use crate::common::{
    Call, Rank,
    processes::{rank_of_process, variable},
    variables::LATE_RANK,
    waiting::eventually,
    watch::{Watch, of},
};

/// How late that rank is, milliseconds.
const LATE_MS: [u64; 3] = [3, 10, 30];

/// Each rank waits for one that is late and writes what it knows of each operation of that kind: `operation SEQ ARRIVED`, by the
/// clock that all processes of a host share, and `arrival SEQ RANK LAG WAIT UNCERTAINTY UNKNOWN`.
pub(crate) fn late() {
    let rank = rank_of_process();
    let late: usize = variable(LATE_RANK).parse().unwrap();
    let watch = Watch::begin_for(Kind::OpCompleted.bit() | Kind::Arrival.bit());
    for function in [
        Function::AllReduce,
        Function::AllGather,
        Function::ReduceScatter,
        Function::AlltoAll,
    ] {
        for ms in LATE_MS {
            together(&rank);
            if rank.rank == late {
                thread::sleep(Duration::from_millis(ms));
            }
            Call::new(function, 1000).check(&rank, false);
        }
    }
    // Every second operation is one that all wait in. In some of them nobody does: a busy machine makes the others as late.
    let late_ones: Vec<u64> = (0..12).map(|at| 2 * at + 1).collect();
    eventually("arrivals of most that were late", || {
        let records = watch.so_far();
        let known: Vec<u64> = of(&records, Kind::Arrival).map(|record| record.seq).collect();
        late_ones.iter().filter(|seq| known.contains(seq)).count() >= 8
    });
    // Whoever leaves answers nobody.
    together(&rank);
    let records = watch.end();
    for record in of(&records, Kind::OpCompleted) {
        println!("operation {} {}", record.seq, record.value);
    }
    for record in of(&records, Kind::Arrival) {
        assert_eq!(record.state, State::STOP, "{record:?}");
        let Arrival {
            rank,
            lag_ns,
            wait_ns,
            uncertainty_ns,
            unknown_ranks,
        } = Arrival::of(record).expect("it is known");
        println!(
            "arrival {} {rank} {lag_ns} {wait_ns} {uncertainty_ns} {unknown_ranks}",
            record.seq
        );
    }
    rank.leave();
}

fn together(rank: &Rank) {
    Call::new(Function::AllReduce, 1).check(rank, false);
}

/// A rank that is late while nobody reads records asks nobody.
pub(crate) fn unread() {
    let rank = rank_of_process();
    for _ in 0..5 {
        together(&rank);
        if rank.rank == 0 {
            thread::sleep(Duration::from_millis(30));
        }
    }
    together(&rank);
    assert_eq!(observe::emitted(Kind::Arrival), 0);
    rank.leave();
}
