//! Ranks that find each other over the port that fails: TCP between them gets nothing over, and operations go on.

use std::{
    fs,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::{DataType, Function, ReduceOp, connection::Connection};

use super::{
    links::{mend, set_link, tcp_as_usual, tcp_over_wire, two_ports},
    nodes::{Ended, check, ends, patient, two_nodes},
};
use crate::common::{Call, Rank, last_error, ok, rank_of_process, state};

/// How often TCP sends again before it takes a connection for dead: by default fifteen times, which is a quarter of an hour; so many are
/// three seconds.
const RETRIES: (&str, &str) = ("/proc/sys/net/ipv4/tcp_retries2", "3");
/// How long the port is down: longer than keep-alive would bear (11 s).
const DOWN: Duration = Duration::from_secs(13);
/// How long a peer that does not answer may be missing: to be noticed, and for a recovery.
const MISSING: Duration = Duration::from_secs(4);
/// How often the port is lost again as soon as it is in use.
const AGAIN: usize = 3;
/// What ending takes: a second, as documented, and what an emulated machine may take that others are at work on.
const END: Duration = Duration::from_secs(4);

/// Ranks whose bootstrap and proxies talk over the interface that the first of their two ports is of.
fn over_the_port(worker: &str, change: impl Fn(&mut Command)) -> Ended {
    let (file, retries) = RETRIES;
    let usual = fs::read_to_string(file).unwrap();
    fs::write(file, retries).unwrap();
    tcp_over_wire();
    let ended = two_nodes(worker, |rank, command| {
        let command = patient(two_ports(rank, command));
        change(command.env("NCCL_SOCKET_IFNAME", ["=nic0", "=pnic0"][rank]));
    });
    fs::write(file, usual).unwrap();
    tcp_as_usual();
    mend();
    ended
}

#[test]
#[ignore = "helper: needs two RDMA links, run in a guest"]
fn operations_go_on_when_the_bootstraps_interface_is_the_port_that_fails() {
    let ended = over_the_port("interface::survive", |_| {});
    check(
        "the bootstrap's interface",
        &ended,
        &["(epoch 1)", "(epoch 2)", "(epoch 9)"],
        &["NET/Socket", "has failed", "is gone"],
    );
}

#[test]
#[ignore = "helper: needs two RDMA links, run in a guest"]
fn a_peer_that_dies_is_missed_when_the_bootstraps_interface_is_down() {
    let ended = over_the_port("interface::miss", |command| {
        let milliseconds = (MISSING / 2).as_millis().to_string();
        command
            .env("RINGSIGHT_NET_TIMEOUT_MS", &milliseconds)
            .env("RINGSIGHT_NET_GIVE_UP_MS", &milliseconds);
    });
    check(
        "a peer that dies",
        &ended[..1].to_vec(),
        &["no path to the peer works"],
        &[],
    );
}

/// All-reduces until both ranks have seen enough.
fn work(rank: &Rank, enough: impl Fn() -> bool) {
    let call = Call {
        data_type: DataType::Uint64,
        op: ReduceOp::Max,
        ..Call::new(Function::AllReduce, 1)
    };
    let mut goes_on = [1_u64];
    while goes_on == [1] {
        Call::new(Function::AllReduce, 5003).check(rank, true);
        goes_on = [u64::from(!enough())];
        let at = goes_on.as_mut_ptr().cast();
        ok(rank.call(&call, at, at));
        rank.synchronize();
    }
}

/// Whether all this rank's ends are on a path.
fn all_on(path: u8) -> bool {
    ends()
        .iter()
        .all(|end| end.active == path && end.phase == Connection::FLOWS)
}

/// Takes the port down, and works until both ranks' steps go over the other one.
fn lose_the_port(rank: &Rank) {
    if rank.rank == 0 {
        set_link(0, false);
    }
    work(rank, || all_on(1));
}

#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn survive() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    work(&rank, || true);
    lose_the_port(&rank);
    let start = Instant::now();
    work(&rank, || start.elapsed() > DOWN);
    assert!(all_on(1), "{:?}", ends());
    if rank.rank == 0 {
        set_link(0, true);
        tcp_over_wire();
    }
    // The ends agree over the path that is left, whether TCP has come back or not; and when they have left it again it is there at once.
    for _ in 0..AGAIN {
        work(&rank, || all_on(0));
        lose_the_port(&rank);
        if rank.rank == 0 {
            set_link(0, true);
            tcp_over_wire();
        }
    }
    work(&rank, || all_on(0));
    lose_the_port(&rank);
    // The peer cannot be told.
    let start = Instant::now();
    rank.leave();
    assert!(start.elapsed() < END, "{:?}", start.elapsed());
    println!("rank done");
}

#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn miss() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    work(&rank, || true);
    lose_the_port(&rank);
    let mut processes = [0_u64; 2];
    let call = Call {
        data_type: DataType::Uint64,
        ..Call::new(Function::AllGather, 1)
    };
    let own = u64::from(std::process::id());
    ok(rank.call(&call, (&raw const own).cast(), processes.as_mut_ptr().cast()));
    rank.synchronize();
    if rank.rank == 1 {
        loop {
            thread::park();
        }
    }
    // SAFETY: a signal to the other rank's process.
    let killed = unsafe { libc::kill(processes[1] as libc::pid_t, libc::SIGKILL) };
    assert_eq!(killed, 0);
    let mut data = vec![1_f32; 5003];
    let at = data.as_mut_ptr().cast();
    let start = Instant::now();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
    // Released when the communicator fails.
    rank.synchronize();
    assert!(start.elapsed() < MISSING + END, "{:?}", start.elapsed());
    assert_eq!(state(rank.comm), ResultCode::RemoteError);
    let start = Instant::now();
    // SAFETY: a live communicator.
    let code = unsafe { abi::ncclCommDestroy(rank.comm) };
    println!("{code:?}: {}", last_error());
    assert_eq!(code, ResultCode::RemoteError);
    assert!(start.elapsed() < END, "{:?}", start.elapsed());
    println!("rank done");
}
