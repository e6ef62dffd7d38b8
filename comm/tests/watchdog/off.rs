//! Ranks that are watched by other rules: by no watchdog, or beside other ranks of their device.

use std::thread;

use ringsight_comm::{error::ResultCode, observe};
use ringsight_records::{Function, Kind};

use super::{ELEMENTS, has_reported, texts, verdicts};
use crate::common::{
    Call, Rank, alone, host, ok, rank_of_process, start_each, state, unique_id,
    waiting::{Marks, PATIENT_MS, eventually},
};

/// Rank 1's watchdog is off, and it is late.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn unwatched_rank() {
    let Some(rank) = rank_of_process() else { return };
    let marks = Marks::of_process();
    let call = Call::new(Function::AllReduce, ELEMENTS);
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    if rank.rank == 1 {
        marks.wait("reported");
    }
    ok(rank.call(&call, at, at));
    if rank.rank == 0 {
        eventually("a verdict", has_reported);
        marks.set("reported");
    }
    rank.synchronize();
    assert_eq!(state(rank.comm), ResultCode::Success);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_rank_whose_watchdog_is_off_answers() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = start_each("watchdog::off::unwatched_rank", 2, 1, |rank, command| {
        command.env(Marks::FOLDER, folder.path());
        match rank {
            0 => command
                .env("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS)
                .env("RINGSIGHT_WATCHDOG_ACTION", "abort"),
            _ => command.env("NCCL_KERNEL_TIMEOUT_MS", "0"),
        };
    });
    let text = &texts("unwatched_rank", ranks)[0];
    assert!(
        matches!(
            verdicts(text)[..],
            ["NOT_LAUNCHED (late): rank 1 has not launched it"]
        ),
        "{text}"
    );
    assert!(
        text.contains("Rank 1: not launched, its watchdog is off"),
        "{text}"
    );
}

/// Three ranks of one process and one device. The root of a broadcast has completed it and waits in the next operation. Rank 2
/// passes the data on and is late, and rank 0 waits in the broadcast. What keeps the root does not keep rank 2.
#[test]
#[ignore = "helper: reads the environment: run alone, by `ranks_that_share_a_device_are_told_apart`"]
fn share_a_device() {
    host();
    let id = unique_id();
    thread::scope(|scope| {
        for number in 0..3 {
            scope.spawn(move || {
                let rank = Rank::join_on(0, id, number, 3);
                let mut data = vec![1f32; ELEMENTS];
                let at: *mut u8 = data.as_mut_ptr().cast();
                let broadcast = Call {
                    root: 1,
                    ..Call::new(Function::Broadcast, ELEMENTS)
                };
                if number == 2 {
                    eventually("the verdicts of both ranks that wait", || {
                        observe::emitted(Kind::Verdict) == 2
                    });
                }
                for call in [broadcast, Call::new(Function::AllReduce, ELEMENTS)] {
                    ok(rank.call(&call, at, at));
                }
                rank.synchronize();
                assert_eq!(state(rank.comm), ResultCode::Success);
                rank.leave();
            });
        }
    });
}

#[test]
fn ranks_that_share_a_device_are_told_apart() {
    let text = alone("watchdog::off::share_a_device", |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_ALGO", "Ring")
            .env("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS);
    });
    let verdicts = verdicts(&text);
    let expected = "NOT_LAUNCHED (late): rank 2 has not launched it";
    assert!(
        verdicts.len() >= 2 && verdicts.iter().all(|verdict| verdict.starts_with(expected)),
        "{text}"
    );
    assert!(!text.contains("it is in"), "{text}");
}
