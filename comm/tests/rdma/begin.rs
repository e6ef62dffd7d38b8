//! Connections that are made while a port is down or a path cannot be made.

use std::{
    env, thread,
    time::{Duration, Instant},
};

use ringsight_comm::abi;
use ringsight_records::{
    Function,
    connection::{Connection, LinkStage},
};

use super::{
    control::Control,
    data::LITTLE,
    failover::{DOWN, rank_and_port, split, until_none},
    links::{PATIENCE, hide_port, mend, set_link, two_ports},
    nodes::{check, ends, patient, two_nodes},
};
use crate::{
    common::{Call, ok},
    fabric::{Fabric, Port},
};

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_connection_whose_port_is_down_begins_on_the_backup() {
    for down in [1, 0] {
        let ended = two_nodes("begin::on_the_backup", |rank, command| {
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
        let ended = two_nodes("begin::without_a_port", |rank, command| {
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
        let ended = two_nodes("begin::late", |rank, command| {
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

/// How long a recovery may take there.
const GIVE_UP: Duration = Duration::from_secs(5);

/// Both ports are up, and one of them is not reached from the other.
#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn a_connection_whose_first_path_cannot_be_made_begins_on_the_backup() {
    // One connection goes each way: of one the sender cannot connect its end, of the other the receiver.
    for hidden in [1, 0] {
        let port = Port {
            rank: hidden,
            link: 0,
        };
        hide_port(port, true);
        let ended = two_nodes("data::worker", |rank, command| {
            patient(two_ports(rank, command)).env(LITTLE, "1");
        });
        hide_port(port, false);
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

/// Of one connection the sender cannot make its end of the backup, of the other one the receiver. Later it is there, and the first path fails.
#[test]
#[ignore = "helper: needs soft-RoCE devices, run in a guest"]
fn a_backup_that_cannot_be_made_joins_later() {
    hide_port(HIDDEN, true);
    let ended = two_nodes("begin::join_later", |rank, command| {
        // A second channel would begin on the second link.
        patient(two_ports(rank, command)).env("NCCL_MAX_NCHANNELS", "1");
    });
    hide_port(HIDDEN, false);
    mend();
    check(
        "no backup at first",
        &ended,
        &["via NET/IB/0", "is ready again (path 1 ", "(epoch 1)"],
        &["use a socket", "begins on its backup", "has failed"],
    );
    let text = &ended[1 - HIDDEN.rank].1;
    let ends = text.matches("NET/IB : a connection has no backup yet: ").count();
    assert!(ends >= 2, "{ends} ends:\n{text}");
}

/// What is not found in that test.
const HIDDEN: Port = Port { rank: 1, link: 1 };

/// A communicator whose connections are made while a link is down, and go back to it when it is up.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn on_the_backup() {
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
fn without_a_port() {
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

/// A communicator whose backups cannot be made at first.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn join_later() {
    let Some(control) = Control::of_process() else {
        return;
    };
    let comm = control.make();
    let start = Instant::now();
    let work = || {
        assert!(start.elapsed() < 2 * PATIENCE, "{:?}", ends());
        Call::new(Function::AllReduce, 70_001).check(&comm, true);
    };
    work();
    let count = |of: &dyn Fn(&Connection) -> bool| ends().iter().filter(|end| of(end)).count() as u64;
    assert_eq!(count(&|end| end.active == 0), 2, "{:?}", ends());
    control.meet();
    if control.rank.rank == 0 {
        hide_port(HIDDEN, false);
    }
    until_none(&control.rank, work, || {
        count(&|end| end.paths().any(|path| path.stage != LinkStage::Ready as u8))
    });
    if control.rank.rank == 0 {
        set_link(0, false);
    }
    until_none(&control.rank, work, || count(&|end| end.active == 0));
    control.meet();
    comm.leave();
    control.rank.leave();
    println!("rank done");
}

/// A communicator whose first operation comes when a path has been down for longer than a recovery may take.
#[test]
#[ignore = "helper: the body of one rank; started by a test above"]
fn late() {
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
