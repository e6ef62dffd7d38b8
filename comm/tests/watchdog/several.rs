//! Several operations that wait at once, ranks that share a device, and ranks that are watched by other rules.

use std::{
    env,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::Duration,
};

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

use super::{ELEMENTS, FOLDER, texts, until};
use crate::common::{
    Call, Rank, alone, host, ok, rank_of_process, start_each, state, unique_id, waiting::PATIENT_MS,
};

/// What this process has said.
fn verdicts() -> u64 {
    observe::emitted(Kind::Verdict)
}

fn folder() -> PathBuf {
    PathBuf::from(env::var(FOLDER).unwrap())
}

/// What the ranks wrote, whose first one says when the others may go on. `change` is given the rank's environment.
fn ranks<'a>(
    worker: &str,
    number: usize,
    change: impl Fn(usize) -> Vec<(&'static str, &'a str)>,
    when_told: impl FnOnce(&[Child]),
) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let processes = start_each(worker, number, 1, |rank, command| {
        command
            .env(FOLDER, folder.path())
            .env("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS)
            .envs(change(rank));
    });
    until(&|| folder.path().join("told").exists());
    when_told(&processes);
    texts(worker, processes)
}

/// The verdicts in a text, each up to what is found out about the ranks.
fn said(text: &str) -> Vec<&str> {
    let verdicts = text.lines().filter_map(|line| line.split_once("Verdict: "));
    let mut verdicts: Vec<&str> = verdicts
        .map(|(_, verdict)| verdict.split([';', ',']).next().unwrap())
        .collect();
    verdicts.sort_unstable();
    verdicts
}

/// Rank 0 receives from two at once, of whom the first is late and the second is stopped.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn receiving_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = vec![1f32; 2 * ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let told = folder().join("told");
    match rank.rank {
        0 => {
            // SAFETY: nothing is asked of the caller.
            ok(unsafe { abi::ncclGroupStart() });
            for peer in [1, 2] {
                // SAFETY: within the data.
                let place = unsafe { at.add((peer - 1) * ELEMENTS * 4) };
                ok(rank.call(&Call::peer(Function::Recv, ELEMENTS, peer), place, place));
            }
            // SAFETY: as above.
            ok(unsafe { abi::ncclGroupEnd() });
            until(&|| verdicts() == 2);
            std::fs::write(told, "").unwrap();
        }
        number => {
            if number == 2 {
                // SAFETY: the process that started this one lets it go on.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            until(&|| Path::new(&told).exists());
            ok(rank.call(&Call::peer(Function::Send, ELEMENTS, 0), at, at));
        }
    }
    rank.synchronize();
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_rank_that_is_late_hides_no_hang_of_another_message() {
    for source in ["pages", "events"] {
        let texts = ranks(
            "watchdog::several::receiving_rank",
            3,
            |_| vec![("RINGSIGHT_WATCHDOG_SOURCE", source)],
            |processes| {
                // SAFETY: a child that has not been waited for.
                unsafe { libc::kill(processes[2].id().cast_signed(), libc::SIGCONT) };
            },
        );
        assert_eq!(
            said(&texts[0]),
            [
                "NOT_LAUNCHED (late): rank 1 has not launched it",
                "RANK_STOPPED (hang): the process of rank 2 is stopped"
            ],
            "{source}: {}",
            texts[0]
        );
    }
}

/// All send to all, themselves included, and rank 2 is late.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn exchanging_rank() {
    let Some(rank) = rank_of_process() else { return };
    let mut data = [0; 2].map(|_| vec![1f32; rank.ranks * ELEMENTS]);
    let [from, to] = data.each_mut().map(|data| data.as_mut_ptr().cast::<u8>());
    let told = folder().join("told");
    if rank.rank == 2 {
        until(&|| told.exists());
    }
    // SAFETY: nothing is asked of the caller.
    ok(unsafe { abi::ncclGroupStart() });
    for peer in 0..rank.ranks {
        // SAFETY: within the data.
        let [from, to] = [from, to].map(|at| unsafe { at.add(peer * ELEMENTS * 4) });
        ok(rank.call(&Call::peer(Function::Send, ELEMENTS, peer), from, from));
        ok(rank.call(&Call::peer(Function::Recv, ELEMENTS, peer), to, to));
    }
    // SAFETY: as above.
    ok(unsafe { abi::ncclGroupEnd() });
    if rank.rank == 0 {
        until(&|| verdicts() > 0);
        // By then what does not move for all that is known would count as stuck.
        thread::sleep(3 * STUCK);
        std::fs::write(told, "").unwrap();
    }
    rank.synchronize();
    rank.leave();
    println!("\nrank done");
}

/// How long what events tell of may not end before it counts as stuck.
const STUCK: Duration = Duration::from_millis(500);

/// Events tell of a plan as a whole: of messages that are done, and to oneself, as of those that wait.
#[test]
fn one_rank_is_late_and_no_message_of_the_same_group_is_stuck() {
    let stuck = STUCK.as_millis().to_string();
    for source in ["pages", "events"] {
        let variables = |_| {
            vec![
                ("RINGSIGHT_WATCHDOG_SOURCE", source),
                ("RINGSIGHT_STUCK_TIMEOUT_MS", &*stuck),
            ]
        };
        let texts = ranks("watchdog::several::exchanging_rank", 4, variables, |_| {});
        for (rank, text) in texts.iter().enumerate().filter(|(rank, _)| *rank != 2) {
            let expected = ["NOT_LAUNCHED (late): rank 2 has not launched it"];
            assert_eq!(said(text), expected, "{source}, rank {rank}: {text}");
        }
    }
}

/// Rank 1's watchdog is off, and it is late.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn unwatched_rank() {
    let Some(rank) = rank_of_process() else { return };
    let told = folder().join("told");
    let call = Call::new(Function::AllReduce, ELEMENTS);
    let mut data = vec![1f32; ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    if rank.rank == 1 {
        until(&|| told.exists());
    }
    ok(rank.call(&call, at, at));
    if rank.rank == 0 {
        until(&|| verdicts() == 1);
        std::fs::write(told, "").unwrap();
    }
    rank.synchronize();
    assert_eq!(state(rank.comm), ResultCode::Success);
    rank.leave();
    println!("\nrank done");
}

#[test]
fn a_rank_whose_watchdog_is_off_says_so() {
    let texts = ranks(
        "watchdog::several::unwatched_rank",
        2,
        |rank| match rank {
            0 => vec![("RINGSIGHT_WATCHDOG_ACTION", "abort")],
            _ => vec![("NCCL_KERNEL_TIMEOUT_MS", "0")],
        },
        |_| {},
    );
    assert_eq!(
        said(&texts[0]),
        ["NOT_LAUNCHED (late): rank 1 has not launched it"],
        "{}",
        texts[0]
    );
    assert!(
        texts[0].contains("Rank 1: not launched, its watchdog is off"),
        "{}",
        texts[0]
    );
}

/// Three ranks of one process and one device. Of a broadcast the root is done, and waits in the operation behind it; the rank that passes it
/// on is late, and the last one waits in the broadcast. What keeps the root does not keep the rank that is late.
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
                    // Of the two that wait.
                    until(&|| verdicts() == 2);
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
    let text = alone("watchdog::several::share_a_device", |command| {
        command
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_ALGO", "Ring")
            .env("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS);
    });
    let expected = "NOT_LAUNCHED (late): rank 2 has not launched it";
    let said = said(&text);
    assert!(
        said.len() >= 2 && said.iter().all(|verdict| *verdict == expected),
        "{text}"
    );
    assert!(!text.contains("it is in"), "{text}");
}
