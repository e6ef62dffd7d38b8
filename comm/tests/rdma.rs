//! Ranks on two nodes over RDMA, where there are two devices that reach each other: in a guest (`cargo xtask vm test rdma`), `hca0`
//! and `peer0` at the ends of a virtual wire. And what is said where there is no RDMA, or where it cannot be.

mod common;

use std::{env, os::unix::process::CommandExt as _, path::Path, process::Command};

use common::{Call, Rank, host, ok, place_of_process, start_each, watch::Watch};
use ringsight_comm::{abi, communicator::Handle, device::Stream, observe};
use ringsight_records::{
    Flags, Function, Kind, PathChange, Record, State,
    connection::{Connection, ConnectionSlot, LinkStage, PathCondition},
};

/// Tells a rank to do no more than show that it can.
const LITTLE: &str = "RDMA_TEST_LITTLE";

/// What the ranks of one run came to: whether each ended well, and what it printed.
type Ended = Vec<(bool, String)>;

/// Two ranks, each a node, with the devices of a guest or those that `RINGSIGHT_TEST_HCAS` names.
fn two_nodes(change: impl Fn(usize, &mut Command)) -> Ended {
    let names = env::var("RINGSIGHT_TEST_HCAS").unwrap_or_else(|_| "hca0,peer0".into());
    let devices: Vec<String> = names.split(',').map(|name| format!("={name}")).collect();
    let children = start_each("worker", 2, 2, |rank, command| {
        command
            .env("NCCL_IB_HCA", &devices[rank])
            .env("NCCL_DEBUG", "INFO")
            .env("NCCL_DEBUG_SUBSYS", "ALL")
            // Emulated processors are slow: that is no hang.
            .env("NCCL_KERNEL_TIMEOUT_MS", "0")
            // Soft-RoCE takes 7 for "without end".
            .env("NCCL_IB_RETRY_CNT", "6")
            .env("NCCL_IB_TIMEOUT", "16");
        change(rank, command);
    });
    children
        .into_iter()
        .map(|child| {
            let output = child.wait_with_output().unwrap();
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text).into_owned();
            (output.status.success() && text.contains("rank done"), text)
        })
        .collect()
}

/// A guest's first two links: each rank has two ports.
fn two_ports(rank: usize, command: &mut Command) -> &mut Command {
    command.env("NCCL_IB_HCA", ["=hca0,hca1", "=peer0,peer1"][rank])
}

/// Every rank ended well, and printed each of `expected` and none of `unexpected`.
fn check(what: &str, ended: &Ended, expected: &[&str], unexpected: &[&str]) {
    let all = || {
        let texts: Vec<&str> = ended.iter().map(|(_, text)| text.as_str()).collect();
        texts.join("\n==\n")
    };
    for (rank, (well, text)) in ended.iter().enumerate() {
        assert!(well, "{what}, rank {rank}:\n{}", all());
        for part in expected {
            assert!(
                text.contains(part),
                "{what}, rank {rank}: no {part:?} in\n{}",
                all()
            );
        }
        for part in unexpected {
            assert!(
                !text.contains(part),
                "{what}, rank {rank}: {part:?} in\n{}",
                all()
            );
        }
    }
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn data_goes_over_rdma() {
    let over_rdma = |what, change: &dyn Fn(&mut Command)| {
        let ended = two_nodes(|_, command| change(command));
        check(
            what,
            &ended,
            &["[send] via NET/IB/0", "[receive] via NET/IB/0"],
            &["via NET/Socket", "NCCL WARN NET/IB"],
        );
    };
    over_rdma("one queue pair", &|_| {});
    over_rdma("four queue pairs, in turn", &|command| {
        command.env("NCCL_IB_QPS_PER_CONNECTION", "4");
    });
    over_rdma("four queue pairs, in parts", &|command| {
        command
            .env("NCCL_IB_QPS_PER_CONNECTION", "4")
            .env("NCCL_IB_SPLIT_DATA_ON_QPS", "1");
    });
    over_rdma("nothing else allowed, link-local GID, in order", &|command| {
        command
            .env("NCCL_NET", "IB")
            .env("NCCL_IB_GID_INDEX", "0")
            .env("NCCL_IB_PCI_RELAXED_ORDERING", "0");
    });
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn what_cannot_go_over_rdma_goes_over_sockets_and_says_why() {
    let falls_back = |what, reasons: [&str; 2], change: &dyn Fn(usize, &mut Command)| {
        let ended = two_nodes(|rank, command| {
            command.env(LITTLE, "1");
            change(rank, command);
        });
        check(what, &ended, &["[send] via NET/Socket"], &[]);
        for (reason, (_, text)) in reasons.iter().zip(&ended) {
            assert!(text.contains(reason), "{what}: no {reason:?} in\n{text}");
        }
    };
    falls_back(
        "no RDMA on one side",
        ["rank 0 and rank 1 use a socket", "NCCL_IB_DISABLE is set"],
        &|rank, command| {
            if rank == 1 {
                command.env("NCCL_IB_DISABLE", "1");
            }
        },
    );
    falls_back(
        "no such GID",
        [
            "index 9 (NCCL_IB_GID_INDEX) was looked for",
            "index 9 (NCCL_IB_GID_INDEX) was looked for",
        ],
        &|_, command| {
            command.env("NCCL_IB_GID_INDEX", "9");
        },
    );
    falls_back(
        "another number of queue pairs",
        [
            "NCCL_IB_QPS_PER_CONNECTION differs",
            "NCCL_IB_QPS_PER_CONNECTION differs",
        ],
        &|rank, command| {
            command.env("NCCL_IB_QPS_PER_CONNECTION", (rank + 1).to_string());
        },
    );
    falls_back(
        "no such device",
        [
            "no RDMA, sockets are used: NCCL_IB_HCA allows none",
            "no RDMA, sockets are used",
        ],
        &|_, command| {
            command.env("NCCL_IB_HCA", "=mlx5_77");
        },
    );
    falls_back(
        "no such P_Key",
        ["no P_Key at index 77", "no P_Key at index 77"],
        &|_, command| {
            command.env("NCCL_IB_PKEY", "77");
        },
    );
    falls_back(
        "no memory to lock",
        ["see ulimit -l", "see ulimit -l"],
        &|_, command| {
            // SAFETY: two system calls between fork and exec.
            unsafe { command.pre_exec(lock_little) };
        },
    );
}

/// Lets the process that is about to begin lock 64 KiB, as a user may.
fn lock_little() -> std::io::Result<()> {
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    let limit = libc::rlimit {
        rlim_cur: 64 << 10,
        rlim_max: 64 << 10,
    };
    // SAFETY: no pointers, and a limit that is read.
    let failed = unsafe {
        libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK) < 0
            || libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) < 0
    };
    if failed {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn where_only_rdma_is_allowed_its_absence_is_an_error() {
    let ended = two_nodes(|rank, command| {
        command.env("NCCL_NET", "IB");
        if rank == 1 {
            command.env("NCCL_IB_GID_INDEX", "9");
        }
    });
    // Rank 0 sees the other one give up.
    for (rank, (well, _)) in ended.iter().enumerate() {
        assert!(!well, "rank {rank} got its communicator");
    }
    let text = &ended[1].1;
    assert!(
        text.contains("NCCL_IB_GID_INDEX") && text.contains("NCCL_NET=IB"),
        "{text}"
    );
}

/// What a graph does with `data` when it is launched.
fn add_up(rank: &Rank, stream: Stream, data: &mut [f32]) {
    let at = data.as_mut_ptr().cast();
    let on = Rank { stream, ..*rank };
    ok(on.call(&Call::new(Function::AllReduce, data.len()), at, at));
}

/// The network device that rank 0 takes down while its operation is under way.
const DOWN: &str = "RDMA_TEST_DOWN";

fn set_link(device: &str, state: &str) {
    let status = Command::new("ip")
        .args(["link", "set", device, state])
        .status()
        .unwrap();
    assert!(status.success(), "ip link set {device} {state}");
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn operations_go_on_over_the_backup_when_a_port_goes_down() {
    for device in ["pnic0", "nic0"] {
        let ended = two_nodes(|rank, command| {
            two_ports(rank, command).env(DOWN, device);
        });
        set_link(device, "up");
        let names = [["hca0:1", "hca1:1"], ["peer0:1", "peer1:1"]];
        for ((rank, (well, text)), [from, to]) in ended.iter().enumerate().zip(names) {
            assert!(well, "{device} down, rank {rank}:\n{text}");
            let backup = format!("NET/IB : backup of {from} : {to}, neighbour");
            assert!(
                text.contains(&backup),
                "{device} down, rank {rank}: no {backup:?} in\n{text}"
            );
            let switch = format!("from {from} to {to} (epoch 1)");
            assert!(
                text.contains(&switch),
                "{device} down, rank {rank}: no {switch:?} in\n{text}"
            );
            assert!(
                !text.contains("NET/Socket"),
                "{device} down, rank {rank}:\n{text}"
            );
        }
    }
}

/// Tells rank 0 to take links down in turn while it works, and up again.
const IN_TURN: &str = "RDMA_TEST_IN_TURN";

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn operations_go_on_while_ports_fail_in_turn_and_connections_are_made() {
    let ended = two_nodes(|rank, command| {
        two_ports(rank, command)
            // An emulated machine may have other things to do for longer than the defaults allow.
            .env("RINGSIGHT_NET_TIMEOUT_MS", "4000")
            .env("RINGSIGHT_NET_GIVE_UP_MS", "30000")
            .env(IN_TURN, "1");
    });
    check(
        "ports fail in turn",
        &ended,
        &["[send] via NET/IB/0", "(epoch 1)"],
        &["via NET/Socket", "use a socket"],
    );
}

/// Tells rank 0 to take this link down before the communicator's child is made.
const DOWN_BEFORE: &str = "RDMA_TEST_DOWN_BEFORE";

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_connection_whose_port_is_down_begins_on_the_backup() {
    for device in ["pnic0", "nic0"] {
        let ended = two_nodes(|rank, command| {
            two_ports(rank, command).env(DOWN_BEFORE, device);
        });
        set_link(device, "up");
        check(
            &format!("{device} down before"),
            &ended,
            &[
                "NET/IB : a connection begins on its backup: ",
                "is ready again (path 0 ",
            ],
            &["via NET/Socket", "use a socket"],
        );
    }
}

/// A communicator whose connections are made while a link is down, and go back to it when it is up.
fn begin_on_the_backup(rank: &Rank, device: &str) {
    Call::new(Function::AllReduce, 1).check(rank, true);
    if rank.rank == 0 {
        set_link(device, "down");
    }
    // The peer goes on when the link is down.
    Call::new(Function::AllReduce, 1).check(rank, true);
    let mut child = Rank {
        comm: Handle(0),
        ..*rank
    };
    // SAFETY: a live communicator, a valid place, and no settings.
    ok(unsafe {
        abi::ncclCommSplit(
            rank.comm,
            0,
            rank.rank as i32,
            &raw mut child.comm,
            std::ptr::null_mut(),
        )
    });
    Call::new(Function::AllReduce, 70_001).check(&child, true);
    let on_backup = || {
        let slots = observe::pages().unwrap().connections().iter();
        let ends: Vec<Connection> = slots.filter_map(ConnectionSlot::read).collect();
        ends.iter().filter(|end| end.active == 1).count() as u64
    };
    assert!(on_backup() > 0);
    if rank.rank == 0 {
        set_link(device, "up");
    }
    // Until neither rank has a connection that is on its backup: both count the same. Ends tell of themselves while they work.
    loop {
        Call::new(Function::AllReduce, 70_001).check(rank, true);
        let mut left = [on_backup()];
        let sum = ringsight_records::ReduceOp::Sum.code().into();
        let (place, kind) = (
            (&raw mut left).cast(),
            ringsight_records::DataType::Uint64.code().into(),
        );
        // SAFETY: one number, which lives until the stream is synchronized.
        ok(unsafe { abi::ncclAllReduce(place, place, 1, kind, sum, child.comm, child.stream) });
        child.synchronize();
        if left == [0] {
            break;
        }
    }
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommDestroy(child.comm) });
}

/// Collectives, messages and replays, each kind with connections of its own, while one link is down, then the other.
fn go_on(rank: &Rank) {
    for round in 0..6 {
        let link = format!("nic{}", round % 2);
        if rank.rank == 0 && round % 3 != 2 {
            set_link(&link, "down");
        }
        Call::new(Function::AllReduce, 70_001).check(rank, true);
        messages(rank);
        replays(rank);
        if rank.rank == 0 {
            set_link(&link, "up");
        }
        Call::new(Function::AllGather, 5003).check(rank, false);
    }
}

/// All-reduces, during one of which a port goes down.
fn survive(rank: Rank, device: &str) {
    const ROUNDS: i32 = 10;
    let watch = Watch::begin_for(Kind::Failover.bit());
    let mut data = vec![1_f32; 30_001];
    for round in 0..ROUNDS {
        add_up(&rank, rank.stream, &mut data);
        if round == 3 && rank.rank == 0 {
            set_link(device, "down");
        }
        rank.synchronize();
        let expected = 2_f32.powi(round + 1);
        assert!(
            data.iter().all(|value| *value == expected),
            "round {round}: {}",
            data[0]
        );
    }
    // What `ringsight snapshot` shows, with the link still down.
    let slots = observe::pages().unwrap().connections().iter();
    let shown: Vec<Connection> = slots.filter_map(ConnectionSlot::read).collect();
    let left = shown
        .iter()
        .find(|end| end.active == 1)
        .expect("an end that left its path");
    assert_eq!(
        (left.paths, left.phase, left.peer),
        (2, Connection::FLOWS, 1 - rank.rank as u32)
    );
    assert!(
        left.epoch > 0 && left.switches > 0 && left.last_switch_ns > 0 && left.cause > 0,
        "{left:?}"
    );
    let [primary, backup] = [left.path[0], left.path[1]];
    assert!(
        primary.device().ends_with('0') && backup.device().ends_with('1'),
        "{left:?}"
    );
    assert_eq!((primary.port_up, backup.port_up), (0, 1), "{left:?}");
    assert_ne!(primary.condition, PathCondition::Good as u8, "{left:?}");
    assert_eq!(backup.stage, LinkStage::Ready as u8, "{left:?}");
    assert!(
        primary.consecutive_failures > 0 && primary.last_switch_ns > 0 && primary.cause > 0,
        "{left:?}"
    );
    // With the communicator its threads are gone: nothing more comes, and its connections are nobody's.
    rank.leave();
    let slots = observe::pages().unwrap().connections().iter();
    assert_eq!(slots.filter_map(ConnectionSlot::read).count(), 0);
    let records = watch.end();
    let changes = |state| {
        records
            .iter()
            .filter(move |record| record.kind() == Some(Kind::Failover) && record.state == state)
    };
    // Of either direction: an end that has nothing under way may notice later.
    assert!(changes(State::START).count() > 0);
    let switch = changes(State::PATH_SWITCHED).next().expect("a switch on record");
    let change = PathChange::from_value(switch.value);
    assert_eq!((change.from, change.to, change.port), (0, 1, Some(1)));
    assert!(change.cause.is_some() && change.number > 0, "{change:?}");
    assert!(changes(State::PATH_RECOVERED).count() > 0);
}

#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn worker() {
    let Some((id, rank, ranks)) = place_of_process() else {
        return;
    };
    let rank = Rank::join(id, rank, ranks);
    if let Ok(device) = env::var(DOWN) {
        survive(rank, &device);
        println!("rank done");
        return;
    }
    if let Ok(device) = env::var(DOWN_BEFORE) {
        begin_on_the_backup(&rank, &device);
        rank.leave();
        println!("rank done");
        return;
    }
    if env::var_os(IN_TURN).is_some() {
        Call::new(Function::AllReduce, 1).check(&rank, true);
        go_on(&rank);
        rank.leave();
        println!("rank done");
        return;
    }
    // Less than a slot, more than one, and what goes with a notice.
    for count in [1, 17, 5003] {
        Call::new(Function::AllReduce, count).check(&rank, count == 17);
    }
    if env::var_os(LITTLE).is_none() {
        for function in [Function::AllGather, Function::ReduceScatter, Function::Broadcast] {
            Call::new(function, 5003).check(&rank, false);
        }
        messages(&rank);
        replays(&rank);
        watched(rank, &Call::new(Function::AllReduce, 70_001));
    } else {
        rank.leave();
    }
    println!("rank done");
}

/// An operation whose work requests are on record: every step that is sent, and all its bytes.
fn watched(rank: Rank, call: &Call) {
    let watch = Watch::begin_for(Kind::ProxyStep.bit() | Kind::NetPlugin.bit());
    call.check(&rank, true);
    // With the communicator its threads are gone: nothing more comes.
    rank.leave();
    let records = watch.end();
    let ends = |kind| {
        records
            .iter()
            .filter(move |record| record.kind() == Some(kind) && record.state == State::STOP)
    };
    let sent = |record: &&Record| record.flags().contains(Flags::SEND);
    let bytes = |records: Vec<&Record>| -> u64 { records.iter().map(|record| record.bytes).sum() };
    let steps: Vec<&Record> = ends(Kind::ProxyStep).filter(sent).collect();
    let carried: Vec<&Record> = ends(Kind::NetPlugin).filter(sent).collect();
    assert!(!steps.is_empty());
    assert_eq!(carried.len(), steps.len());
    assert!(
        carried
            .iter()
            .all(|record| record.carrier().port == Some(0) && record.carrier().number > 0)
    );
    assert_eq!(bytes(carried), bytes(steps));
}

/// Sends and receives of all sizes in one group, both ways.
fn messages(rank: &Rank) {
    let peer = 1 - rank.rank;
    let sizes = [0_usize, 1, 48, 49, 4096, 70_000];
    let content = |from: usize, size: usize| -> Vec<u8> {
        (0..size).map(|at| (at * 31 + from * 7 + size) as u8).collect()
    };
    let sent: Vec<Vec<u8>> = sizes.iter().map(|size| content(rank.rank, *size)).collect();
    let mut got: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for (sent, got) in sent.iter().zip(&mut got) {
        let call = |function| Call {
            data_type: ringsight_records::DataType::Uint8,
            ..Call::peer(function, sent.len(), peer)
        };
        ok(rank.call(&call(Function::Send), sent.as_ptr(), std::ptr::null_mut()));
        ok(rank.call(&call(Function::Recv), std::ptr::null(), got.as_mut_ptr()));
    }
    // SAFETY: no arguments; the buffers of the calls live until the stream is synchronized.
    ok(unsafe { abi::ncclGroupEnd() });
    rank.synchronize();
    for (size, got) in sizes.iter().zip(&got) {
        assert!(*got == content(peer, *size), "{size} bytes");
    }
}

/// A captured all-reduce, replayed: each replay's network steps are posted without the host's doing.
fn replays(rank: &Rank) {
    const REPLAYS: i32 = 8;
    let device = host();
    let stream = device.stream_create().unwrap();
    let mut data = vec![1_f32; 3000];
    device.capture_begin(stream).unwrap();
    add_up(rank, stream, &mut data);
    let graph = device.capture_end(stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for _ in 0..REPLAYS {
        device.graph_launch(exec, stream).unwrap();
    }
    device.stream_synchronize(stream).unwrap();
    assert!(
        data.iter().all(|value| *value == 2_f32.powi(REPLAYS)),
        "{}",
        data[0]
    );
    device.graph_exec_destroy(exec).unwrap();
    device.stream_destroy(stream).unwrap();
}

/// On a machine that has no RDMA.
#[test]
fn without_rdma_sockets_are_used_and_the_log_says_what_is_missing() {
    if Path::new("/sys/class/infiniband").exists() {
        return;
    }
    let ended = two_nodes(|_, command| {
        command.env_remove("NCCL_IB_HCA").env(LITTLE, "1");
    });
    check(
        "no RDMA",
        &ended,
        &["NET/IB : no RDMA, sockets are used: ", "via NET/Socket"],
        &["NCCL WARN NET/IB"],
    );
    // Who asks for a device by its name is warned.
    let ended = two_nodes(|_, command| {
        command.env(LITTLE, "1");
    });
    check("a device by name", &ended, &["NCCL WARN NET/IB : no RDMA"], &[]);
    let ended = two_nodes(|_, command| {
        command.env("NCCL_NET", "IB");
    });
    assert!(
        ended
            .iter()
            .all(|(well, text)| !well && text.contains("network IB")),
        "{ended:?}"
    );
    let ended = two_nodes(|_, command| {
        command.env("NCCL_IB_TIMEOUT", "40");
    });
    assert!(
        ended
            .iter()
            .all(|(well, text)| !well && text.contains("NCCL_IB_TIMEOUT=40: ")),
        "{ended:?}"
    );
}
