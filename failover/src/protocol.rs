//! The interface between an end's state machine and its driver: events in, actions out.

use std::{mem, time::Duration};

use crate::{
    links::{Cause, Link, PathSet, PathView, Status, Work},
    message::{Address, Message},
    timers::{Timer, Timers},
};

/// What the provided methods of [`Protocol`] need of an end. Other crates cannot name it, so only this one has ends.
pub trait Timed {
    /// Its timers.
    fn timers(&self) -> &Timers;

    /// Its timers.
    fn timers_mut(&mut self) -> &mut Timers;

    /// Whether the driver has an operation for this end.
    fn busy_mut(&mut self) -> &mut bool;

    /// Sets or clears the timers that depend on whether the end is busy.
    fn arm_busy_timers(&mut self, now: Duration);

    /// A timer has fired.
    fn on_timer(&mut self, now: Duration, timer: Timer, out: &mut Vec<Action>);
}

/// One end of a connection, as its driver sees it. [`Sender`](crate::Sender) and [`Receiver`](crate::Receiver) implement it.
///
/// An end reads no clock: `now` is the time since a moment of the driver's choice. It appends its actions to `out`, in the order
/// in which the driver must carry them out.
pub trait Protocol: Timed {
    /// The queue pair that steps use in this epoch, or used last.
    fn active(&self) -> Link;

    /// The current epoch: the number of switches so far.
    fn epoch(&self) -> u32;

    /// Whether the end is between two paths.
    fn is_recovering(&self) -> bool;

    /// Whether the end has given up. It ignores every further event.
    fn has_given_up(&self) -> bool;

    /// The end's paths, in order.
    fn paths(&self) -> impl Iterator<Item = PathView>;

    /// When this end next rebuilds a failed path. `None` if no rebuild is scheduled here: only the receiver schedules rebuilds.
    fn next_attempt(&self, path: u8) -> Option<Duration> {
        let _ = path;
        None
    }

    /// Sets whether the driver has an operation for this end. An idle end sends no probes, and does not give up for want of a path.
    fn set_busy(&mut self, now: Duration, busy: bool) {
        if mem::replace(self.busy_mut(), busy) != busy {
            self.arm_busy_timers(now);
        }
    }

    /// When the driver must call [`Protocol::expire`], if no event comes first.
    fn deadline(&self) -> Option<Duration> {
        self.timers().next()
    }

    /// Fires every timer whose deadline has passed. Firing one may set or clear others.
    ///
    /// A timer that firing sets is later than `now`, unless a setting is 0. The number of rounds is therefore bounded: such a timer waits for the
    /// next call.
    fn expire(&mut self, now: Duration, out: &mut Vec<Action>) {
        for _ in 0..Timers::COUNT {
            let Some(timer) = self.timers_mut().take_expired(now) else {
                return;
            };
            self.on_timer(now, timer, out);
        }
    }

    /// Fires a timer, whatever the time.
    #[cfg(test)]
    fn fire_now(&mut self, timer: Timer, out: &mut Vec<Action>) {
        self.timers_mut().clear(timer);
        self.on_timer(Duration::ZERO, timer, out);
    }

    /// Processes one event.
    fn handle(&mut self, now: Duration, event: Event, out: &mut Vec<Action>);
}

/// What happened to an end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// This end's port of the path, or its device, is down.
    PortDown {
        /// The path.
        path: u8,
    },
    /// This end's port of the path is up.
    PortUp {
        /// The path.
        path: u8,
    },
    /// Another connection over the same two ports failed ([`Scope::Suspect`](crate::Scope::Suspect)). The end probes the path now.
    Suspected {
        /// The path.
        path: u8,
    },
    /// Other connections agree that these two ports carry nothing ([`Scope::Down`](crate::Scope::Down)). The end leaves the path.
    Condemned {
        /// The path.
        path: u8,
    },
    /// A work request of this end has completed.
    Completed {
        /// The queue pair that it was posted to.
        link: Link,
        /// The work request.
        work: Work,
        /// Its status.
        status: Status,
    },
    /// Receiver: the immediate of a step arrived, in the order of the path.
    Arrived {
        /// The queue pair that it arrived on.
        link: Link,
        /// Low 32 bits of the position.
        immediate: u32,
    },
    /// Sender: the value of a credit word. It may be any path's, at any time; the greatest value counts.
    Granted {
        /// Steps granted since the connection began.
        steps: u64,
    },
    /// A message of the peer arrived.
    Received(Message),
    /// [`Action::Fence`] is done.
    Fenced {
        /// The queue pair.
        link: Link,
        /// Whether the device is known to have stopped: nothing of this queue pair touches memory any more.
        sure: bool,
    },
    /// [`Action::Rebuild`] made a queue pair.
    Rebuilt {
        /// The queue pair.
        link: Link,
        /// Its address, with the port's present GID.
        address: Address,
    },
    /// [`Action::Connect`] brought the queue pair to RTS.
    Connected {
        /// The queue pair.
        link: Link,
    },
    /// [`Action::Rebuild`], [`Action::Connect`] or a post failed, or the device reports that the queue pair cannot go on.
    Failed {
        /// The queue pair.
        link: Link,
    },
}

/// What the driver of an end must do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Fence the queue pair, which may still be under construction. Then deliver [`Event::Fenced`].
    Fence {
        /// The queue pair.
        link: Link,
    },
    /// Make the path's next queue pair; the previous one is fenced. Then deliver [`Event::Rebuilt`] or [`Event::Failed`].
    Rebuild {
        /// The new queue pair.
        link: Link,
    },
    /// Connect the queue pair to the peer's. Then deliver [`Event::Connected`] or [`Event::Failed`].
    Connect {
        /// The queue pair.
        link: Link,
        /// The peer's queue pair.
        peer: Address,
    },
    /// Post an RDMA WRITE of no bytes on each queue pair that carries steps. It changes nothing and completes only if the path works.
    Probe {
        /// The queue pair.
        link: Link,
    },
    /// Post this credit.
    Credit {
        /// The queue pair.
        link: Link,
        /// Steps granted since the connection began.
        steps: u64,
    },
    /// Post these positions (again), from their kept sources.
    Replay {
        /// The queue pair.
        link: Link,
        /// The first position.
        from: u64,
        /// The position after the last one; may equal `from`.
        to: u64,
    },
    /// Receiver: the next step has arrived. Its slot now belongs to the device.
    Commit {
        /// Position of the step.
        position: u64,
    },
    /// Send the message over all of these paths, and outside RDMA.
    Send {
        /// The message.
        message: Message,
        /// Paths whose queue pairs can carry it.
        over: PathSet,
    },
    /// Record what happened, and pass it to [`Health`](crate::Health). The driver does nothing else.
    Report(Report),
    /// The end gives up: its communicator fails. Fence all of its queue pairs.
    GiveUp(Reason),
}

/// What an end has observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Report {
    /// A path failed at this end.
    Broken {
        /// Its queue pair.
        link: Link,
        /// How the end learned of it.
        cause: Cause,
        /// Whether it was the active path.
        active: bool,
    },
    /// An epoch has begun at this end.
    Switched {
        /// The epoch.
        epoch: u32,
        /// The previous path.
        from: u8,
        /// The new path.
        to: u8,
        /// Steps that the receiver had committed.
        committed: u64,
        /// Steps that the sender posts again. 0 at the receiver, which does not know.
        replayed: u64,
    },
    /// The first step crossed the new path, or no step was outstanding.
    Recovered {
        /// The epoch.
        epoch: u32,
    },
    /// A path has been rebuilt and proven. At the receiver all probes succeeded; at the sender a first work request completed, or the
    /// receiver switched to the path.
    Restored {
        /// Its queue pair.
        link: Link,
    },
}

/// Why an end gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No path worked, or the peer did not answer, for [`Settings::give_up`](crate::Settings::give_up).
    NoPath,
    /// The peer gave up.
    Peer,
    /// A queue pair that might still write could not be fenced.
    NotFenced(Link),
    /// A work request failed with a status that another NIC would not cure.
    Work(Status),
    /// The peer broke the protocol; the text says how.
    Protocol(&'static str),
    /// The path failed, and failover is off.
    FailoverOff(Cause),
}
