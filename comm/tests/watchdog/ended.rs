//! Ranks that end the communicator, or whose communicator has failed, while others are late.

use std::{
    env,
    path::{Path, PathBuf},
};

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

use super::{FOLDER, texts, until};
use crate::common::{Call, Rank, ok, rank_of_process, start_processes, state, waiting::PATIENT_MS};

/// Few enough that a broadcast's root is done before the others come.
const ELEMENTS: usize = 1000;
/// So many that nobody is done with what the others had sent when they gave up.
const MANY: usize = 1 << 20;

fn mark(name: &str) -> PathBuf {
    Path::new(&env::var(FOLDER).unwrap()).join(name)
}

fn abort(rank: Rank) {
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    println!("\nrank done");
}

/// What the ranks of a test said of each other, hangs of which abort.
fn verdicts(worker: &str, source: &str, arrival: &str) -> Vec<Vec<String>> {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        (FOLDER, folder.path().to_str().unwrap()),
        ("NCCL_ALGO", "Ring"),
        ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", arrival),
        ("RINGSIGHT_WATCHDOG_ACTION", "abort"),
        ("RINGSIGHT_WATCHDOG_SOURCE", source),
    ];
    let ranks = start_processes(worker, 3, 1, &variables);
    let texts = texts(&format!("{worker}, {source}"), ranks);
    let of_rank = |text: &String| {
        let verdicts = text.lines().filter_map(|line| line.split_once("Verdict: "));
        verdicts.map(|(_, verdict)| verdict.to_owned()).collect()
    };
    texts.iter().map(of_rank).collect()
}

/// Of a broadcast from rank to rank the root is done, and aborts; rank 1 comes when rank 2 has said something.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn leaving_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, ELEMENTS), at, at));
    rank.synchronize();
    if rank.rank == 1 {
        until(&|| mark("told").exists());
    }
    ok(rank.call(&Call::peer(Function::Broadcast, ELEMENTS, 0), at, at));
    match rank.rank {
        0 => {
            rank.synchronize();
            until(&|| mark("waits").exists());
            abort(rank);
            return;
        }
        2 => {
            std::fs::write(mark("waits"), "").unwrap();
            until(&|| observe::emitted(Kind::Verdict) > 0);
            std::fs::write(mark("told"), "").unwrap();
        }
        _ => {}
    }
    rank.synchronize();
    assert_eq!(data, vec![3f32; ELEMENTS]);
    assert_eq!(state(rank.comm), ResultCode::Success);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_rank_that_aborts_when_it_is_done_is_not_what_the_others_wait_for() {
    for source in ["pages", "events"] {
        let said = verdicts("watchdog::ended::leaving_rank", source, "600000");
        assert!(
            matches!(&said[2][..], [verdict] if verdict.starts_with("NOT_LAUNCHED (late): rank 1 ")),
            "{source}: {said:?}"
        );
        assert!(said[0].is_empty() && said[1].is_empty(), "{source}: {said:?}");
    }
}

/// Each rank comes when the communicator of the one before has failed.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn failing_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = vec![1f32; MANY];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let call = Call::new(Function::AllReduce, MANY);
    ok(rank.call(&call, at, at));
    rank.synchronize();
    let failed = |rank: usize| mark(&format!("{rank} has failed"));
    if rank.rank > 0 {
        until(&|| failed(rank.rank - 1).exists());
    }
    ok(rank.call(&call, at, at));
    until(&|| state(rank.comm) != ResultCode::Success);
    assert_eq!(state(rank.comm), ResultCode::SystemError);
    std::fs::write(failed(rank.rank), "").unwrap();
    // Until then it answers.
    until(&|| failed(rank.ranks - 1).exists());
    abort(rank);
}

/// What it had in progress was given up, and is not done.
#[test]
fn a_rank_whose_communicator_has_failed_is_what_the_others_wait_for() {
    for source in ["pages", "events"] {
        let said = verdicts("watchdog::ended::failing_rank", source, "2000");
        let last = |rank: usize| said[rank].last().cloned().unwrap_or_default();
        assert!(
            last(0).starts_with("NOT_LAUNCHED (hang): rank 1 "),
            "{source}: {said:?}"
        );
        for rank in [1, 2] {
            assert!(
                matches!(&said[rank][..], [verdict] if verdict.starts_with("PEER_ABORTED (hang): rank 0 ")),
                "{source}: {said:?}"
            );
        }
    }
}
