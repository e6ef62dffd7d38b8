//! Ranks that end the communicator, or whose communicator has failed, while others are late.

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::Function;

use super::{has_reported, texts, verdicts};
use crate::common::{
    Call, Rank, ok, rank_of_process, start_processes, state,
    waiting::{Marks, PATIENT_MS, eventually},
};

/// Few enough that a broadcast's root completes it before the others come.
const FEW: usize = 1000;
/// So many that no rank has completed what the others had sent when they gave up.
const MANY: usize = 1 << 20;

fn abort(rank: Rank) {
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    println!("\nrank done");
}

/// The verdicts of each of three ranks, where hangs abort.
fn reported(worker: &str, source: &str, arrival: &str) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        (Marks::FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", arrival),
        ("RINGSIGHT_WATCHDOG_ACTION", "abort"),
        ("RINGSIGHT_WATCHDOG_SOURCE", source),
    ];
    let ranks = start_processes(worker, 3, 1, &variables);
    texts(&format!("{worker}, {source}"), ranks)
        .iter()
        .map(|text| verdicts(text).into_iter().map(str::to_owned).collect())
        .collect()
}

/// The root of a broadcast completes it, and aborts. Rank 1 passes the data on to rank 2, and comes when rank 2 has reported.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn leaving_rank() {
    let Some(rank) = rank_of_process() else { return };
    let marks = Marks::of_process();
    let mut data = vec![1f32; FEW];
    let at: *mut u8 = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, FEW), at, at));
    rank.synchronize();
    if rank.rank == 1 {
        marks.wait("reported");
    }
    ok(rank.call(&Call::peer(Function::Broadcast, FEW, 0), at, at));
    match rank.rank {
        0 => {
            rank.synchronize();
            marks.wait("rank 2 waits");
            abort(rank);
            return;
        }
        2 => {
            marks.set("rank 2 waits");
            eventually("a verdict", has_reported);
            marks.set("reported");
        }
        _ => {}
    }
    rank.synchronize();
    assert_eq!(data, vec![3f32; FEW]);
    assert_eq!(state(rank.comm), ResultCode::Success);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_rank_that_aborts_after_it_completed_is_not_the_culprit() {
    for source in ["pages", "events"] {
        let reported = reported("watchdog::ended::leaving_rank", source, "600000");
        assert!(
            matches!(&reported[2][..], [verdict] if verdict.starts_with("NOT_LAUNCHED (late): rank 1 ")),
            "{source}: {reported:?}"
        );
        assert!(
            reported[0].is_empty() && reported[1].is_empty(),
            "{source}: {reported:?}"
        );
    }
}

/// Each rank comes when the communicator of the one before has failed.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn failing_rank() {
    let Some(rank) = rank_of_process() else { return };
    let marks = Marks::of_process();
    let mut data = vec![1f32; MANY];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, MANY);
    ok(rank.call(&call, at, at));
    rank.synchronize();
    let failed = |rank: usize| format!("rank {rank} has failed");
    if rank.rank > 0 {
        marks.wait(&failed(rank.rank - 1));
    }
    ok(rank.call(&call, at, at));
    eventually("the communicator fails", || {
        state(rank.comm) != ResultCode::Success
    });
    assert_eq!(state(rank.comm), ResultCode::SystemError);
    marks.set(&failed(rank.rank));
    // Until then it answers.
    marks.wait(&failed(rank.ranks - 1));
    abort(rank);
}

/// The operation that rank 0 had in progress was given up, and is not completed.
#[test]
fn a_rank_whose_communicator_failed_is_the_culprit() {
    for source in ["pages", "events"] {
        let reported = reported("watchdog::ended::failing_rank", source, "2000");
        let last = reported[0].last().cloned().unwrap_or_default();
        assert!(
            last.starts_with("NOT_LAUNCHED (hang): rank 1 "),
            "{source}: {reported:?}"
        );
        for rank in [1, 2] {
            assert!(
                matches!(&reported[rank][..], [verdict] if verdict.starts_with("PEER_ABORTED (hang): rank 0 ")),
                "{source}: {reported:?}"
            );
        }
    }
}
