//! Ports that fail at each command that the set-up of connections gives their device.

use ringsight_comm::error::ResultCode;
use ringsight_records::{Function, connection::Connection};

use super::{
    connections::ends,
    control::Control,
    ends::{How, end},
    links::{Held, devices, mend},
    shared::BACKUP,
};
use crate::{
    common::Call,
    fabric::{Fabric, Port, fall_at, refuse_commands},
};

/// The first port of rank 0.
const PORT: Port = Port { rank: 0, link: 0 };

/// Registration, a completion queue, a queue pair, and its way from RESET to RTS.
const COMMANDS: [(&str, u16); 6] = [
    ("CREATE_MKEY", 0x200),
    ("CREATE_CQ", 0x400),
    ("CREATE_QP", 0x500),
    ("RST2INIT_QP", 0x502),
    ("INIT2RTR_QP", 0x503),
    ("RTR2RTS_QP", 0x504),
];

/// The port goes down at each command.
pub(crate) fn ports_fall() {
    let control = Control::of_process();
    for (name, number) in COMMANDS {
        // Of the first connection, and of one after it.
        for nth in [1, 2] {
            run(&control, &format!("down at {name} {nth}"), || {
                fall_at(PORT, number, nth);
            });
            assert!(control.rank.rank > 0 || is_down(), "{name} {nth}: it never came");
            restore(&control);
        }
    }
    control.rank.leave();
}

/// The device refuses each kind of command.
pub(crate) fn refused() {
    let control = Control::of_process();
    // Registration, a completion queue, a queue pair.
    for (name, number) in &COMMANDS[..3] {
        run(&control, &format!("without {name}"), || {
            refuse_commands(BACKUP, *number);
        });
        restore(&control);
    }
    control.rank.leave();
}

/// Whether the port is down.
fn is_down() -> bool {
    let (fabric, device) = (Fabric::here(), Fabric::here().device(PORT));
    let file = format!(
        "/sys/class/infiniband/{device}/ports/{}/state",
        fabric.number(PORT)
    );
    !std::fs::read_to_string(file).unwrap().contains("ACTIVE")
}

fn restore(control: &Control) {
    control.meet();
    if control.rank.rank == 0 {
        mend();
    }
    control.meet();
}

/// A communicator that sets up its connections while something fails, and works all the same.
fn run(control: &Control, what: &str, fail: impl Fn()) {
    let rank = control.rank.rank;
    let before = Held::of(&devices(rank));
    if rank == 0 {
        fail();
    }
    control.meet();
    let comm = control.make();
    // The last one needs the second channel, too.
    for count in [5003, 5003, 300_001] {
        Call::new(Function::AllReduce, count).check(&comm, true);
    }
    assert!(ends().iter().any(|end| end.channel == 1), "{what}: {:?}", ends());
    if what.starts_with("without") {
        // The other one's port cannot be used: it is the primary one of some, and of others the backup.
        for alone in [true, false] {
            let has_flag = |end: &Connection| (end.flags & Connection::BACKUP_ALONE != 0) == alone;
            assert!(
                ends().iter().any(|end| end.paths == 1 && has_flag(end)),
                "{what}: {:?}",
                ends()
            );
        }
    }
    control.meet();
    let (code, text, _) = end(&comm, How::Destroy);
    assert_eq!(code, ResultCode::Success, "{what}, rank {rank}: {text}");
    assert_eq!(
        Held::of(&devices(rank)),
        before,
        "{what}, rank {rank} leaves something"
    );
    println!("set up {what}");
}
