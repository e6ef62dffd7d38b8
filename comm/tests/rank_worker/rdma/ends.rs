//! How communicators end, whatever their connections are in just then.

use std::{
    ffi::CStr,
    ptr, thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi,
    communicator::Handle,
    device::{Progress, Stream},
    error::ResultCode,
};
use ringsight_records::{
    Function, Kind, State,
    connection::{Connection, LinkStage},
};

use super::{
    connections::{ends, until_all, work_until_on},
    control::{Control, Stopped},
    links::{Held, devices, hide_addresses, lose_packets, mend, packets, set_link},
    shared::END_GIVE_UP,
};
use crate::common::{
    Call, Rank, config, host, ok,
    processes::variable,
    variables::WHAT,
    waiting::{PATIENCE, eventually},
    watch::Watch,
};

use Situation::{
    Agreeing, Backup, Connecting, Failed, Holding, Leaving, NoPath, Normal, Offered, Probing, Replaying,
    Returning,
};

/// What ending takes beside what it waits for: by the documentation (`docs/src/failover.md`) a second, and another one where an address is
/// looked for. Twice that, on an emulated machine that others are at work on.
pub(crate) const END: Duration = Duration::from_secs(4);

/// How long packets are lost while a rank destroys its communicator.
const SILENCE: Duration = Duration::from_millis(300);

/// What connections are in when their communicator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Situation {
    /// Nothing has failed.
    Normal,
    /// The path in use has failed, and the peer, which is stopped, does not say how to go on. An operation is under way.
    Agreeing,
    /// The port of the path in use has just gone down: whatever that has brought them to by now. An operation is under way.
    Leaving,
    /// Steps have been posted again on the backup, which loses them. An operation is under way.
    Replaying,
    /// Steps go over the backup; the port of the first path is down.
    Backup,
    /// The port of the first path has just come up again: whatever that has brought them to by now.
    Returning,
    /// The first path has been made anew at the receiver; the peer, which is stopped, does not connect to it.
    Offered,
    /// The first path is being connected anew: the kernel looks for the peer's address, which nobody answers for.
    Connecting,
    /// The first path is there anew, and is being probed.
    Probing,
    /// The first path has been proven, and the sender has been asked to stop; it has not, for the backup loses its steps. An operation is
    /// under way.
    Holding,
    /// All ports are down; there is time left. An operation is under way.
    NoPath,
    /// All ports are down, and the communicator has failed over it.
    Failed,
}

impl Situation {
    const ALL: [Self; 12] = [
        Normal, Leaving, Agreeing, Replaying, Backup, Returning, Offered, Connecting, Probing, Holding,
        NoPath, Failed,
    ];

    /// The other rank's process is stopped.
    fn stops_peer(self) -> bool {
        matches!(self, Agreeing | Offered)
    }

    /// Nothing that goes on can end well.
    fn is_lost(self) -> bool {
        matches!(self, Agreeing | NoPath | Failed)
    }

    /// Steps of the operation that is under way are lost, until they are no longer.
    fn loses_steps(self) -> bool {
        matches!(self, Replaying | Holding)
    }

    /// The run whose settings hold connections there.
    fn run(self) -> usize {
        match self {
            _ if self.is_lost() => 1,
            Holding => 2,
            _ => 0,
        }
    }
}

/// How a communicator is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum How {
    Destroy,
    Finalize,
    Abort,
}

/// Children that use their parent's proxy.
pub(crate) fn sharer() {
    let control = Control::of_process();
    let rank = control.rank.rank;
    let mut settings = config();
    settings.split_share = 1;
    let parent = control.make_with(&mut settings);
    work_until_on(&control, &parent, 0);
    for (how, path) in [(How::Destroy, 0), (How::Destroy, 1), (How::Abort, 1)] {
        let before = Held::of(&devices(rank));
        control.meet();
        let mut comm = Handle(0);
        // SAFETY: a live communicator, a valid place, and no settings.
        ok(unsafe { abi::ncclCommSplit(parent.comm, 0, rank as i32, &raw mut comm, ptr::null_mut()) });
        let child = Rank { comm, ..parent };
        Call::new(Function::AllReduce, 17).check(&child, true);
        if path == 1 && rank == 0 {
            set_link(0, false);
        }
        work_until_on(&control, &child, path);
        let held = Held::of(&devices(rank));
        assert!(held.exceeds(before), "{how:?} {path}: {held:?} after {before:?}");
        control.meet();
        let (code, text, took) = end(&child, how);
        assert_eq!(code, ResultCode::Success, "{text}");
        assert_eq!(
            Held::of(&devices(rank)),
            before,
            "{how:?} {path} leaves something"
        );
        assert!(took < END, "{how:?} {path} took {took:?}");
        // The parent's are whole.
        Call::new(Function::AllReduce, 5003).check(&parent, true);
    }
    parent.leave();
    control.rank.leave();
}

/// Ends a communicator in each situation of a run.
pub(crate) fn situations() {
    let control = Control::of_process();
    let number: usize = variable(WHAT).parse().unwrap();
    for situation in Situation::ALL {
        if situation.run() == number {
            for how in [How::Destroy, How::Finalize, How::Abort] {
                run(&control, situation, how);
            }
        }
    }
    control.rank.leave();
}

/// An all-reduce that is under way.
pub(crate) struct Work {
    data: Vec<f32>,
    stream: Stream,
}

impl Work {
    pub(crate) fn begin(comm: &Rank) -> Self {
        let mut data = vec![1_f32; 30_001];
        let at = data.as_mut_ptr().cast();
        ok(comm.call(&Call::new(Function::AllReduce, data.len()), at, at));
        Self {
            data,
            stream: comm.stream,
        }
    }

    pub(crate) fn is_under_way(&self) -> bool {
        host().stream_query(self.stream).unwrap() == Progress::Pending
    }

    /// It is over with its communicator, which releases the stream; whether it came to its end.
    pub(crate) fn came_to_its_end(self) -> bool {
        host().stream_synchronize(self.stream).unwrap();
        self.data.iter().all(|value| *value == 2.0)
    }
}

/// One communicator from its beginning to its end.
fn run(control: &Control, situation: Situation, how: How) {
    let rank = control.rank.rank;
    let before = Held::of(&devices(rank));
    // Both have counted.
    control.meet();
    let watch = Watch::begin_for(Kind::Failover.bit());
    let comm = control.make();
    Call::new(Function::AllReduce, 17).check(&comm, true);
    work_until_on(control, &comm, 0);
    let held = Held::of(&devices(rank));
    assert!(
        held.exceeds(before),
        "{situation:?} {how:?}: {held:?} after {before:?}"
    );
    let (work, stopped) = bring_to(control, &comm, situation);
    // A peer that is stopped comes here when this rank's communicator is gone.
    if !situation.stops_peer() || rank == 1 {
        control.meet();
    }
    let mender = (situation.loses_steps() && rank == 0 && how != How::Abort).then(|| {
        thread::spawn(|| {
            thread::sleep(SILENCE);
            lose_packets(1, false);
        })
    });
    let how = if situation.stops_peer() && rank == 1 {
        How::Abort
    } else {
        how
    };
    let (code, text, took) = end(&comm, how);
    println!(
        "ended {situation:?} {how:?} rank {rank}: {} ms {code:?} {text}",
        took.as_millis()
    );
    let held = Held::of(&devices(rank));
    assert_eq!(held, before, "{situation:?} {how:?} rank {rank} leaves something");
    if let Some(stopped) = stopped {
        drop(stopped);
        control.meet();
    }
    if let Some(mender) = mender {
        mender.join().unwrap();
    }
    let most = match (how, situation) {
        (How::Abort, _) => END,
        (_, Agreeing | NoPath) => END_GIVE_UP + END,
        // Devices send again when they like.
        _ if situation.loses_steps() => PATIENCE,
        _ => END,
    };
    assert!(took <= most, "{situation:?} {how:?} rank {rank} took {took:?}");
    let is_well = how == How::Abort || !situation.is_lost();
    assert_eq!(
        code == ResultCode::Success,
        is_well,
        "{situation:?} {how:?} rank {rank}: {code:?} {text}"
    );
    if !is_well {
        assert!(
            text.contains("no path"),
            "{situation:?} {how:?} rank {rank}: {text}"
        );
    }
    let did_end = work.map(Work::came_to_its_end);
    host().stream_destroy(comm.stream).unwrap();
    let records = watch.end();
    if situation == Replaying {
        let replayed = records
            .iter()
            .any(|record| record.state == State::PATH_SWITCHED && record.bytes > 0);
        assert!(replayed || rank == 1, "nothing was sent again");
    }
    // Of an abort it is not known.
    if let (Some(did_end), false) = (did_end, how == How::Abort && !situation.loses_steps()) {
        assert_eq!(
            did_end,
            how != How::Abort && !situation.is_lost(),
            "{situation:?} {how:?} rank {rank}"
        );
    }
    control.meet();
    if rank == 0 {
        mend();
    }
    control.meet();
}

/// Brings the connections into a situation; the operation that is under way, and the peer if it is stopped.
fn bring_to(control: &Control, comm: &Rank, situation: Situation) -> (Option<Work>, Option<Stopped>) {
    let first = comm.rank == 0;
    let recovers = |end: &Connection| end.phase == Connection::RECOVERS;
    match situation {
        Normal => (None, None),
        Agreeing => {
            control.meet();
            if !first {
                return (None, None);
            }
            let stopped = Stopped::new(control.peer);
            let work = Work::begin(comm);
            set_link(0, false);
            until_all("its ends wait for the peer", recovers);
            (Some(work), Some(stopped))
        }
        Replaying => (Some(replay(control, comm)), None),
        Leaving => {
            control.meet();
            let work = Work::begin(comm);
            if first {
                set_link(0, false);
            }
            (Some(work), None)
        }
        Backup | Returning => {
            leave_first_path(control, comm);
            if situation == Returning && first {
                set_link(0, true);
            }
            (None, None)
        }
        Offered => {
            leave_first_path(control, comm);
            if !first {
                return (None, None);
            }
            let stopped = Stopped::new(control.peer);
            set_link(0, true);
            until_all("its receivers offer the first path", |end| {
                end.flags & Connection::SENDS != 0 || end.path[0].stage == LinkStage::Offered as u8
            });
            (None, Some(stopped))
        }
        Connecting => {
            leave_first_path(control, comm);
            if first {
                hide_addresses(true);
                set_link(0, true);
            }
            // The one that is offered the path connects first, for a second, again and again.
            eventually("a sender connects", || {
                let connects = |end: &Connection| end.path[0].stage == LinkStage::Connecting as u8;
                ends().iter().any(connects)
            });
            (None, None)
        }
        Probing => {
            leave_first_path(control, comm);
            if first {
                set_link(0, true);
            }
            until_all("the first path is being probed", |end| {
                let wanted = match end.flags & Connection::SENDS {
                    0 => LinkStage::Probation,
                    _ => LinkStage::Ready,
                };
                end.active == 1 && end.path[0].stage == wanted as u8
            });
            (None, None)
        }
        Holding => {
            leave_first_path(control, comm);
            let work = lose_steps(control, comm, 1);
            if first {
                set_link(0, true);
            }
            // The other connection has nothing under way, and goes back.
            eventually("a connection waits for its sender to stop", || {
                let holds = |end: &Connection| {
                    let is_its = (end.flags & Connection::SENDS != 0) == first;
                    is_its && recovers(end) && end.active == 1 && end.path[0].stage == LinkStage::Ready as u8
                };
                ends().iter().any(holds)
            });
            assert!(work.is_under_way());
            (Some(work), None)
        }
        NoPath | Failed => {
            if first {
                set_link(0, false);
                set_link(1, false);
            }
            let work = Work::begin(comm);
            if situation == NoPath {
                until_all("its ends have no path", |end| {
                    recovers(end) && end.paths().all(|path| path.stage == LinkStage::Fenced as u8)
                });
            } else {
                until_all("its ends have failed", |end| end.phase == Connection::FAILED);
            }
            (Some(work), None)
        }
    }
}

/// Takes the first link down, and works until the ranks' connections are on the other one.
pub(crate) fn leave_first_path(control: &Control, comm: &Rank) {
    control.meet();
    if comm.rank == 0 {
        set_link(0, false);
    }
    work_until_on(control, comm, 1);
}

/// Has rank 0 post steps that are lost, first on one path, then on the other.
fn replay(control: &Control, comm: &Rank) -> Work {
    let work = lose_steps(control, comm, 0);
    if comm.rank == 0 {
        set_link(0, false);
    }
    until_all("its ends are on the other path", |end| {
        end.active == 1 && end.phase == Connection::FLOWS
    });
    assert!(work.is_under_way());
    work
}

/// A counter of packets when none have come for a while: what is left of an operation, such as its last credits, comes after its end.
fn settled(device: &str, counter: &str) -> u64 {
    let mut last = None;
    eventually("no packets come any more", || {
        let before = last.replace(packets(device, counter));
        thread::sleep(Duration::from_millis(300));
        before.is_some() && before == last
    });
    last.unwrap()
}

/// Has rank 0 post steps that are lost, on the path in use and whatever follows it. The operation of which they are; rank 1 has none.
fn lose_steps(control: &Control, comm: &Rank, path: usize) -> Work {
    let rank = comm.rank;
    let device = &devices(rank)[path];
    let credits = settled(device, "rcvd_pkts");
    control.meet();
    let early = (rank == 1).then(|| Work::begin(comm));
    if rank == 0 {
        eventually("rank 1's credits are there", || {
            packets(device, "rcvd_pkts") > credits
        });
        (path..2).for_each(|link| lose_packets(link, true));
    }
    control.meet();
    let sent = packets(device, "sent_pkts");
    let work = early.unwrap_or_else(|| Work::begin(comm));
    if rank == 0 {
        eventually("steps are posted", || packets(device, "sent_pkts") > sent);
    }
    work
}

/// Ends a communicator; the first error, its text, and how long it took.
pub(crate) fn end(comm: &Rank, how: How) -> (ResultCode, String, Duration) {
    let start = Instant::now();
    let call = |call: unsafe extern "C" fn(Handle) -> ResultCode| {
        // SAFETY: a live communicator; who frees it comes last.
        let code = unsafe { call(comm.comm) };
        // SAFETY: a C string that is valid until the next failing call.
        let text = unsafe { CStr::from_ptr(abi::ncclGetLastError(Handle(0))) };
        let text = text.to_string_lossy().into_owned();
        (
            code,
            if code == ResultCode::Success {
                String::new()
            } else {
                text
            },
        )
    };
    let (code, text) = match how {
        How::Destroy => call(abi::ncclCommDestroy),
        How::Abort => call(abi::ncclCommAbort),
        How::Finalize => {
            let first = call(abi::ncclCommFinalize);
            let second = call(abi::ncclCommDestroy);
            if first.0 == ResultCode::Success {
                second
            } else {
                first
            }
        }
    };
    (code, text, start.elapsed())
}
