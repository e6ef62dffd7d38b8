//! Connections that are made while a port is down or a path cannot be made.

use std::{thread, time::Instant};

use ringsight_comm::abi;
use ringsight_records::{
    Function,
    connection::{Connection, LinkStage},
};

use super::{
    connections::{ends, until_none},
    control::Control,
    failover::{rank_and_port, split},
    links::{hide_port, set_link},
    shared::{BEGIN_GIVE_UP, DOWN, HIDDEN},
};
use crate::{
    common::{Call, ok, processes::variable, waiting::PATIENCE},
    fabric::{Fabric, Port},
};

/// A communicator whose connections are made while a link is down, and go back to it when it is up.
pub(crate) fn on_the_backup() {
    let (rank, port) = rank_and_port();
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
}

/// A port is down from before the first call; later it is up, and the other one goes down.
pub(crate) fn without_a_port() {
    let (control, down) = (Control::of_process(), variable(DOWN));
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
}

/// A communicator whose backups cannot be made at first.
pub(crate) fn join_later() {
    let control = Control::of_process();
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
}

/// A communicator whose first operation comes when a path has been down for longer than a recovery may take.
pub(crate) fn late() {
    let (control, down) = (Control::of_process(), variable(DOWN));
    let port = Port {
        rank: down.parse().unwrap(),
        link: 0,
    };
    let comm = control.make();
    control.meet();
    if control.rank.rank == 0 {
        Fabric::here().set_up(port, false);
    }
    thread::sleep(2 * BEGIN_GIVE_UP);
    control.meet();
    Call::new(Function::AllReduce, 5003).check(&comm, true);
    let shown = ends();
    assert!(
        !shown.is_empty() && shown.iter().all(|end| end.active == 1),
        "{shown:?}"
    );
    comm.leave();
    control.rank.leave();
}
