//! Operations whose ports go down.

use std::{
    env, thread,
    time::{Duration, Instant},
};

use ringsight_comm::{abi, communicator::Handle};
use ringsight_records::{
    Function, Kind, PathChange, State,
    connection::{Connection, LinkStage, PathCondition},
};

use super::{
    control::Control,
    data::{LITTLE, add_up, messages, replays},
    links::{PATIENCE, hide_port, lose_packets, mend, move_gid, two_ports},
    nodes::{check, ends, patient, ranks_of_nodes, two_nodes},
};
use crate::{
    common::{Call, Rank, ok, rank_of_process, watch::Watch},
    fabric::{Fabric, Port},
};

/// The rank whose first port rank 0 takes down.
const DOWN: &str = "RDMA_TEST_DOWN";

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn operations_go_on_over_the_backup_when_a_port_goes_down() {
    let fabric = Fabric::here();
    for down in [1, 0] {
        let ended = two_nodes("failover::survive", |rank, command| {
            two_ports(rank, command).env(DOWN, down.to_string());
        });
        fabric.set_up(Port { rank: down, link: 0 }, true);
        for (rank, (well, text)) in ended.iter().enumerate() {
            let what = format!("port of rank {down} down, rank {rank}");
            assert!(well, "{what}:\n{text}");
            let [from, to] = [0, 1].map(|link| fabric.name(Port { rank, link }));
            let why = match fabric {
                Fabric::DualPort => "other port of the card",
                Fabric::SoftRoce | Fabric::Mlx5 => "neighbour",
            };
            let backup = format!("NET/IB : backup of {from} : {to}, {why}");
            assert!(text.contains(&backup), "{what}: no {backup:?} in\n{text}");
            let switch = format!("from {from} to {to} (epoch 1)");
            assert!(text.contains(&switch), "{what}: no {switch:?} in\n{text}");
            assert!(!text.contains("NET/Socket"), "{what}:\n{text}");
        }
    }
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn operations_go_on_while_ports_fail_in_turn_and_connections_are_made() {
    let ended = two_nodes("failover::go_on", |rank, command| {
        patient(two_ports(rank, command));
    });
    check(
        "ports fail in turn",
        &ended,
        &["[send] via NET/IB/0", "(epoch 1)"],
        &["via NET/Socket", "use a socket"],
    );
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_connection_whose_port_is_down_begins_on_the_backup() {
    for down in [1, 0] {
        let ended = two_nodes("failover::begin_on_the_backup", |rank, command| {
            // What shares its parent's proxy has its ports, which were up when these were looked at.
            two_ports(rank, command)
                .env(DOWN, down.to_string())
                .env("NCCL_COMM_SPLIT_SHARE_RESOURCES", "1");
        });
        Fabric::here().set_up(Port { rank: down, link: 0 }, true);
        check(
            &format!("port of rank {down} down before"),
            &ended,
            &[
                "NET/IB : a connection begins on its backup: ",
                "is ready again (path 0 ",
            ],
            &["via NET/Socket", "use a socket"],
        );
    }
}

/// The ends that see the port down begin with the other one as their first, and go on over it when both are up.
#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_port_may_be_down_before_the_processes_begin() {
    for down in [1, 0] {
        let port = Port { rank: down, link: 0 };
        Fabric::here().set_up(port, false);
        let ended = two_nodes("failover::begin_without_a_port", |rank, command| {
            patient(two_ports(rank, command)).env(DOWN, down.to_string());
        });
        Fabric::here().set_up(port, true);
        check(
            &format!("port of rank {down} down at first"),
            &ended,
            &["via NET/IB/"],
            &["use a socket", "has failed"],
        );
    }
}

/// Connections are made when a communicator is; there may be no operation for long.
#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_port_may_go_down_long_before_the_first_operation() {
    for down in [1, 0] {
        let ended = two_nodes("failover::begin_late", |rank, command| {
            patient(two_ports(rank, command))
                .env(DOWN, down.to_string())
                .env("RINGSIGHT_NET_GIVE_UP_MS", GIVE_UP.as_millis().to_string());
        });
        Fabric::here().set_up(Port { rank: down, link: 0 }, true);
        check(
            &format!("port of rank {down} down before the first operation"),
            &ended,
            &["(epoch 1)"],
            &["use a socket", "has failed"],
        );
    }
}

/// In a ring of three nodes a process sends to one peer and receives from another: what it knows of a path it has found out at the end
/// that it has there.
#[test]
#[ignore = "helper: needs two RDMA links, run in a guest"]
fn a_ring_of_three_nodes_leaves_a_path_and_goes_back_and_all_know_that_it_is_good() {
    // The third node has the first one's ports, which are not reached from themselves: between these two is a socket.
    let ended = ranks_of_nodes("failover::lose_and_find", 3, 3, |rank, command| {
        // With a second channel, whose ring goes the other way, processes would hear of the path from both ends.
        patient(two_ports(rank % 2, command)).env("NCCL_MAX_NCHANNELS", "1");
    });
    mend();
    check(
        "three nodes",
        &ended,
        &[
            "via NET/IB/0",
            "(epoch 1)",
            "(epoch 2)",
            "is ready again (path 0 ",
        ],
        &["has failed"],
    );
}

/// How long a recovery may take there.
const GIVE_UP: Duration = Duration::from_secs(5);

/// While its port has no carrier.
#[test]
#[ignore = "helper: needs soft-RoCE devices, run in a guest"]
fn a_connection_goes_back_to_a_port_whose_gid_has_moved() {
    let ended = two_nodes("failover::move_it", |rank, command| {
        patient(two_ports(rank, command));
    });
    Fabric::here().mend();
    check(
        "a GID moves",
        &ended,
        &["is ready again (path 0 ", "(epoch 2)"],
        &[
            "via NET/Socket",
            "use a socket",
            "begins on its backup",
            "has no backup yet",
        ],
    );
}

/// Both ports are up, and one of them is not reached from the other.
#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_connection_whose_first_path_cannot_be_made_begins_on_the_backup() {
    // One connection goes each way: of one the sender cannot connect its end, of the other the receiver.
    for hidden in [1, 0] {
        hide_port(hidden, true);
        let ended = two_nodes("data::worker", |rank, command| {
            patient(two_ports(rank, command)).env(LITTLE, "1");
        });
        hide_port(hidden, false);
        check(
            &format!("the port of rank {hidden} is not found"),
            &ended,
            &["via NET/IB/0"],
            &["via NET/Socket", "use a socket"],
        );
        let text = &ended[1 - hidden].1;
        let why = "NET/IB : a connection begins on its backup: ";
        let ends = text.matches(why).count();
        assert!(ends >= 2, "{ends} ends:\n{text}");
    }
}

/// The rank that this process was started as, and the port that is taken down.
fn rank_and_port() -> Option<(Rank, Port)> {
    let rank = env::var(DOWN).ok()?.parse().unwrap();
    Some((rank_of_process()?, Port { rank, link: 0 }))
}

/// Works with the peer until neither rank counts anything any more, by a communicator that both have: both leave at the same time.
pub(crate) fn until_none(rank: &Rank, mut work: impl FnMut(), count: impl Fn() -> u64) {
    loop {
        work();
        let mut left = [count()];
        let sum = ringsight_records::ReduceOp::Sum.code().into();
        let (place, kind) = (
            (&raw mut left).cast(),
            ringsight_records::DataType::Uint64.code().into(),
        );
        // SAFETY: one number, which lives until the stream is synchronized.
        ok(unsafe { abi::ncclAllReduce(place, place, 1, kind, sum, rank.comm, rank.stream) });
        rank.synchronize();
        if left == [0] {
            return;
        }
    }
}

/// A communicator whose connections are made while a link is down, and go back to it when it is up.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn begin_on_the_backup() {
    let Some((rank, port)) = rank_and_port() else {
        return;
    };
    let rank = &rank;
    Call::new(Function::AllReduce, 1).check(rank, true);
    if rank.rank == 0 {
        Fabric::here().set_up(port, false);
    }
    // The peer goes on when the link is down.
    Call::new(Function::AllReduce, 1).check(rank, true);
    let child = split(rank);
    Call::new(Function::AllReduce, 70_001).check(&child, true);
    let on_backup = || ends().iter().filter(|end| end.active == 1).count() as u64;
    assert!(on_backup() > 0);
    // Both have seen that before the link is up again.
    Call::new(Function::AllReduce, 1).check(rank, true);
    if rank.rank == 0 {
        Fabric::here().set_up(port, true);
    }
    // Ends tell of themselves while they work.
    let work = || Call::new(Function::AllReduce, 70_001).check(rank, true);
    until_none(&child, work, on_backup);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommDestroy(child.comm) });
    rank.leave();
    println!("rank done");
}

/// A port is down from before the first call; later it is up, and the other one goes down.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn begin_without_a_port() {
    let (Some(control), Ok(down)) = (Control::of_process(), env::var(DOWN)) else {
        return;
    };
    let down = down.parse().unwrap();
    let set_up = |link, up| {
        control.meet();
        if control.rank.rank == 0 {
            Fabric::here().set_up(Port { rank: down, link }, up);
        }
        control.meet();
    };
    let comm = control.make();
    let work = || {
        for count in [1, 5003, 70_001] {
            Call::new(Function::AllReduce, count).check(&comm, true);
        }
    };
    work();
    let shown = ends();
    let port_in_use = |end: &Connection| end.paths().nth(usize::from(end.active)).map(|path| path.port_up);
    assert!(
        !shown.is_empty() && shown.iter().all(|end| port_in_use(end) == Some(1)),
        "{shown:?}"
    );
    set_up(0, true);
    work();
    // What has become ready since is made anew for this.
    let is_ready = |end: &Connection| {
        end.paths()
            .filter(|path| path.stage == LinkStage::Ready as u8)
            .count()
            == 2
    };
    let left = || ends().iter().filter(|end| !is_ready(end)).count() as u64;
    until_none(&comm, work, left);
    set_up(1, false);
    work();
    set_up(1, true);
    work();
    comm.leave();
    // One that is made now begins with the port that was down as any other.
    let late = control.make();
    for count in [1, 5003, 300_001] {
        Call::new(Function::AllReduce, count).check(&late, true);
    }
    let first = Fabric::here().device(Port {
        rank: comm.rank,
        link: 0,
    });
    let begins = |end: &Connection| {
        end.path[0].device() == first && end.path[0].port == Fabric::here().number(Port { rank: 0, link: 0 })
    };
    assert!(ends().iter().any(begins), "{:?}", ends());
    late.leave();
    control.rank.leave();
    println!("rank done");
}

/// A communicator whose first operation comes when a path has been down for longer than a recovery may take.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn begin_late() {
    let (Some(control), Ok(down)) = (Control::of_process(), env::var(DOWN)) else {
        return;
    };
    let port = Port {
        rank: down.parse().unwrap(),
        link: 0,
    };
    let comm = control.make();
    control.meet();
    if control.rank.rank == 0 {
        Fabric::here().set_up(port, false);
    }
    thread::sleep(2 * GIVE_UP);
    control.meet();
    Call::new(Function::AllReduce, 5003).check(&comm, true);
    let shown = ends();
    assert!(
        !shown.is_empty() && shown.iter().all(|end| end.active == 1),
        "{shown:?}"
    );
    comm.leave();
    control.rank.leave();
    println!("rank done");
}

/// All-reduces of a ring, one of whose links loses its packets for a while.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn lose_and_find() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    let rank = &rank;
    let start = Instant::now();
    let work = || {
        assert!(start.elapsed() < 2 * PATIENCE, "{:?}", ends());
        Call::new(Function::AllReduce, 5003).check(rank, true);
    };
    // Over the link's wire.
    let crossing = || {
        let own = rank.rank as u32;
        let ends = ends();
        let crossing = ends.into_iter().filter(move |end| own == 1 || end.peer == 1);
        crossing.collect::<Vec<_>>()
    };
    let count = |is_so: fn(&Connection) -> bool| crossing().iter().filter(|end| is_so(end)).count() as u64;
    work();
    assert!(!crossing().is_empty());
    if rank.rank == 0 {
        lose_packets(0, true);
    }
    until_none(rank, work, || count(|end| end.active != 1));
    let bad = [PathCondition::Suspect as u8, PathCondition::Down as u8];
    for end in crossing() {
        assert!(bad.contains(&end.path[0].condition), "{end:?}");
    }
    Call::new(Function::AllReduce, 1).check(rank, true);
    if rank.rank == 0 {
        lose_packets(0, false);
    }
    until_none(rank, work, || {
        count(|end| {
            let known = end.path[0].condition;
            end.active != 0 || known == PathCondition::Suspect as u8 || known == PathCondition::Down as u8
        })
    });
    rank.leave();
    println!("rank done");
}

/// All-reduces that leave the first path, and come back to it when its GID stands at another index.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn move_it() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    let rank = &rank;
    let link = Port { rank: 1, link: 0 };
    let start = Instant::now();
    let work = || {
        assert!(start.elapsed() < PATIENCE, "the path does not come back");
        Call::new(Function::AllReduce, 5003).check(rank, true);
    };
    let not_on = |path: u8| ends().iter().filter(|end| end.active != path).count() as u64;
    work();
    if rank.rank == 0 {
        Fabric::here().set_up(link, false);
    }
    until_none(rank, work, || u64::from(ends().iter().all(|end| end.epoch == 0)));
    if rank.rank == 0 {
        let [before, now] = move_gid();
        assert_ne!(before, now);
        Fabric::here().set_up(link, true);
    }
    until_none(rank, work, || not_on(0));
    // Connections that are made from here on find it there, too.
    let child = split(rank);
    Call::new(Function::AllReduce, 5003).check(&child, true);
    assert_eq!(not_on(0), 0, "{:?}", ends());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommDestroy(child.comm) });
    rank.leave();
    println!("rank done");
}

/// A communicator of the same ranks, with connections of its own.
fn split(rank: &Rank) -> Rank {
    let (mut comm, key) = (Handle(0), rank.rank as i32);
    // SAFETY: a live communicator, a valid place, and no settings.
    ok(unsafe { abi::ncclCommSplit(rank.comm, 0, key, &raw mut comm, std::ptr::null_mut()) });
    Rank { comm, ..*rank }
}

/// Collectives, messages and replays, each kind with connections of its own, while one link is down, then the other.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn go_on() {
    let Some(rank) = rank_of_process() else {
        return;
    };
    let rank = &rank;
    Call::new(Function::AllReduce, 1).check(rank, true);
    for round in 0..6 {
        let port = Port {
            rank: 0,
            link: round % 2,
        };
        if rank.rank == 0 && round % 3 != 2 {
            Fabric::here().set_up(port, false);
        }
        Call::new(Function::AllReduce, 70_001).check(rank, true);
        messages(rank);
        replays(rank);
        if rank.rank == 0 {
            Fabric::here().set_up(port, true);
        }
        Call::new(Function::AllGather, 5003).check(rank, false);
    }
    rank.leave();
    println!("rank done");
}

/// All-reduces, during one of which a port goes down.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn survive() {
    const ROUNDS: i32 = 10;
    let fabric = Fabric::here();
    let Some((rank, port)) = rank_and_port() else {
        return;
    };
    let watch = Watch::begin_for(Kind::Failover.bit());
    let mut data = vec![1_f32; 30_001];
    for round in 0..ROUNDS {
        add_up(&rank, rank.stream, &mut data);
        if round == 3 && rank.rank == 0 {
            Fabric::here().set_up(port, false);
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
    let shown = ends();
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
    let own = [0, 1].map(|link| Port {
        rank: rank.rank,
        link,
    });
    let names = own.map(|port| fabric.device(port));
    assert_eq!([primary.device(), backup.device()], names, "{left:?}");
    let is_up = u8::from(!fabric.tells(own[0], port));
    assert_eq!((primary.port_up, backup.port_up), (is_up, 1), "{left:?}");
    assert_ne!(primary.condition, PathCondition::Good as u8, "{left:?}");
    assert_eq!(backup.stage, LinkStage::Ready as u8, "{left:?}");
    assert!(
        primary.consecutive_failures > 0 && primary.last_switch_ns > 0 && primary.cause > 0,
        "{left:?}"
    );
    // With the communicator its threads are gone: nothing more comes, and its connections are nobody's.
    rank.leave();
    assert_eq!(ends(), []);
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
    println!("rank done");
}
