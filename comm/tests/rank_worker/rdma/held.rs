//! How communicators end while a device does not answer.

use std::{thread, time::Duration};

use ringsight_comm::error::ResultCode;
use ringsight_records::connection::{Connection, LinkStage};

use super::{
    connections::{until_all, work_until_on},
    control::Control,
    ends::{END, How, end, leave_first_path},
    links::{Held, devices, mend, set_link},
};
use crate::fabric::{Port, hold_commands};

/// What a device is asked for and does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// To take a queue pair to the error state: its path has failed.
    Fence,
    /// To take one from RESET to INIT: its path is made anew.
    Build,
}

impl Asked {
    /// Number of the command: `2ERR_QP`, `RST2INIT_QP`.
    fn command(self) -> u16 {
        match self {
            Self::Fence => 0x507,
            Self::Build => 0x502,
        }
    }
}

/// How long the device does not answer once the communicator is being ended.
const HELD: Duration = Duration::from_millis(700);

/// Ends communicators while the device does not answer.
pub(crate) fn unanswered() {
    let control = Control::of_process();
    for asked in [Asked::Fence, Asked::Build] {
        for how in [How::Destroy, How::Finalize, How::Abort] {
            run(&control, asked, how);
        }
    }
    control.rank.leave();
}

/// One communicator from its beginning to its end, while the device of rank 0's first port does not answer.
fn run(control: &Control, asked: Asked, how: How) {
    let rank = control.rank.rank;
    let port = Port { rank: 0, link: 0 };
    let before = Held::of(&devices(rank));
    control.meet();
    let comm = control.make();
    work_until_on(control, &comm, 0);
    if asked == Asked::Build {
        leave_first_path(control, &comm);
    }
    control.meet();
    let held = Held::of(&devices(rank));
    assert!(
        held.exceeds(before),
        "{asked:?} {how:?}: {held:?} after {before:?}"
    );
    if rank == 0 {
        hold_commands(port, asked.command());
        set_link(0, asked == Asked::Build);
        let (text, stage) = match asked {
            Asked::Fence => ("its ends are being fenced", LinkStage::Fencing),
            Asked::Build => ("its receivers' paths are being built", LinkStage::Building),
        };
        until_all(text, |end| {
            let is_sender = end.flags & Connection::SENDS != 0;
            // A sender makes its path anew when it is offered the receiver's.
            let other = asked == Asked::Build && is_sender;
            other || end.paths().any(|path| path.stage == stage as u8)
        });
    }
    control.meet();
    let answer = (rank == 0).then(|| {
        thread::spawn(move || {
            thread::sleep(HELD);
            hold_commands(port, 0);
        })
    });
    let (code, text, took) = end(&comm, how);
    println!(
        "ended {asked:?} {how:?} rank {rank}: {} ms {code:?} {text}",
        took.as_millis()
    );
    assert_eq!(
        Held::of(&devices(rank)),
        before,
        "{asked:?} {how:?} rank {rank} leaves something"
    );
    assert_eq!(code, ResultCode::Success, "{asked:?} {how:?} rank {rank}: {text}");
    assert!(took < HELD + END, "{asked:?} {how:?} rank {rank} took {took:?}");
    if let Some(answer) = answer {
        // A queue pair is not destroyed before its device has answered.
        assert!(took >= HELD / 2, "{asked:?} {how:?} did not wait: {took:?}");
        answer.join().unwrap();
    }
    control.meet();
    if rank == 0 {
        mend();
    }
    control.meet();
}
