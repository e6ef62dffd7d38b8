//! Connections that survive a path: when queue pairs are given up, what is replayed where, and when a path is used again.
//!
//! A connection moves numbered steps (*positions*, from 0) from a [`Sender`] into the slots of a [`Receiver`]'s FIFO. It has up to
//! [`MAX_PATHS`] paths. A path is a pair of ports, one at each end, and has one queue pair at each end; rebuilt, these are the path's
//! next [generation](Link::generation). One path is *active*: data and credits go over it and no other. The first path is the
//! primary one.
//!
//! Both ends are state machines without input, output or clock. Whoever owns the queue pairs (the *driver*) tells them what
//! happened ([`Event`]), does what they ask ([`Action`]) and calls them when their [`deadline`](Sender::deadline) is over. The model
//! in this crate's tests explores these machines on a network that fails in every order; what it proves holds under the driver's
//! part of the contract:
//!
//! - **Steps.** The sender posts a position only over [`Sender::link`], in order: its data as RDMA WRITE into slot `position` modulo
//!   the number of slots, then a WRITE with immediate whose immediate is the position's low 32 bits. It keeps the step's source
//!   until [`Sender::acked`] has passed it.
//! - **Credits.** [`Action::Credit`] is an RDMA WRITE of the number of steps granted since the connection began. Each path has a
//!   credit word of its own at the sender, so that a late write of one path cannot hide a newer credit of another one; the sender
//!   is told each word's value. Never fetch-and-add: applied but not acknowledged, it would be applied again.
//! - **Fence.** [`Action::Fence`] moves the end's queue pair to the error state and polls until every work request posted to it is
//!   accounted for. What arrived or completed before is told first; then [`Event::Fenced`]. From there on nothing of that
//!   generation can touch memory at that end, and nothing of it is told any more.
//! - **Completions.** The status is looked at before anything else. A work request is known by its own number ([`Work`]), never by a
//!   counter that an error completion advances, too.
//! - **Addresses.** [`Action::Rebuild`] makes a queue pair (reset, init) and reads the port's GID *then*: after a port was down, its
//!   index may mean another one. [`Action::Connect`] takes it to RTR and RTS with the address it was given.
//! - **Messages.** [`Action::Tell`] goes over the named paths and over the connection outside RDMA, if there is one. It may be lost,
//!   doubled and reordered: what matters is said again until it is answered.
//!
//! # Agreement
//! A switch is an *epoch*; the greater one counts. The receiver makes epochs, because what it has committed decides what is
//! replayed; either end may ask for one. An end that suspects the active path fences its queue pair. The sender says so
//! ([`Message::Broken`]). The receiver, once its end is fenced, has counted all that arrived: it says [`Message::Switch`] with the
//! epoch, the path and the committed position. The sender replays from that position, never from what it has posted, and
//! answers [`Message::Switched`]. If the new path fails meanwhile, the same happens with the next epoch. With no path left the
//! ends rebuild what they can; one with an operation gives up when [`Settings::give_up`] is over.
//!
//! A path that failed is rebuilt by an offer of the receiver and the sender's acceptance, proves itself by probes, and is then
//! ready. If it comes before the active path in order, the receiver goes back to it. The active path works, and is not fenced: the
//! receiver asks the sender to stop ([`Message::Hold`]); when all that was posted is acknowledged the sender says so
//! ([`Message::Drained`]), and with all of it committed nothing can be late. Then the next epoch begins on the other path, and the one
//! that was left is ready at once, for what the ends agree by and for the next failure. If the other path fails before that, the next
//! epoch is on the path that is active.
//!
//! A receiver whose communicator ends says last of all what it has ([`Receiver::last_word`]), outside RDMA, where nothing of it is
//! overtaken by the end of the connection: a sender whose acknowledgements were lost takes that for them.

pub mod fuzzing;
mod health;
mod links;
mod message;
mod paths;
mod receiver;
mod rules;
mod sender;
mod settings;
mod timers;

#[cfg(test)]
mod model;

pub use health::{Health, NicVerdict, PathHealth, PathId, PathState, PortId, Scope};
pub use links::{Cause, End, Link, LinkState, MAX_PATHS, PathSet, PathView, Status, Work};
pub use message::{ADDRESS_BYTES, Address, MESSAGE_BYTES, Message};
pub use receiver::Receiver;
pub use rules::{Rules, Sound};
pub use sender::Sender;
pub use settings::{Settings, SettingsError, parse_number, transport_timeout};
pub use timers::Timer;

/// What happened to an end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// This end's port of the path is down, or its device is.
    PortDown {
        /// The path.
        path: u8,
    },
    /// This end's port of the path is up.
    PortUp {
        /// The path.
        path: u8,
    },
    /// Another connection over the same two ports failed ([`Scope::Suspect`]): to be probed now.
    Suspected {
        /// The path.
        path: u8,
    },
    /// Others agree that nothing gets over these two ports ([`Scope::Down`]).
    Condemned {
        /// The path.
        path: u8,
    },
    /// A work request of this end is over.
    Completed {
        /// Where it was posted.
        link: Link,
        /// Which one.
        work: Work,
        /// How it ended.
        status: Status,
    },
    /// Receiver: a step's immediate arrived, in the order of the path.
    Arrived {
        /// Over which queue pair.
        link: Link,
        /// Low 32 bits of the position.
        immediate: u32,
    },
    /// Sender: what a credit word says. Any path's, at any time; the greatest counts.
    Granted {
        /// Steps granted since the connection began.
        steps: u64,
    },
    /// The peer said something.
    Heard(Message),
    /// [`Action::Fence`] is done.
    Fenced {
        /// The queue pair.
        link: Link,
        /// Whether it is sure that nothing of it touches memory any more.
        sure: bool,
    },
    /// [`Action::Rebuild`] made a queue pair.
    Rebuilt {
        /// The queue pair.
        link: Link,
        /// Its address, with the GID as it is now.
        address: Address,
    },
    /// [`Action::Connect`] took the queue pair to RTS.
    Connected {
        /// The queue pair.
        link: Link,
    },
    /// [`Action::Rebuild`], [`Action::Connect`] or a post did not succeed, or the device says that the queue pair cannot go on.
    Failed {
        /// The queue pair.
        link: Link,
    },
}

/// What the driver of an end is to do, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Fence the queue pair, then tell [`Event::Fenced`]. It may be one that is still being built.
    Fence {
        /// The queue pair.
        link: Link,
    },
    /// Make the path's next queue pair, then tell [`Event::Rebuilt`] or [`Event::Failed`]. The one before is fenced.
    Rebuild {
        /// The queue pair to be.
        link: Link,
    },
    /// Connect the queue pair to the peer's, then tell [`Event::Connected`] or [`Event::Failed`].
    Connect {
        /// The queue pair.
        link: Link,
        /// The peer's.
        peer: Address,
    },
    /// Post something that changes nothing and completes only if the path works: an RDMA WRITE of no bytes, over all that it has for
    /// steps.
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
        /// The first.
        from: u64,
        /// After the last; may be `from`.
        to: u64,
    },
    /// Receiver: the step is here, and it is the next one. Its slot is the device's.
    Commit {
        /// Position of the step.
        position: u64,
    },
    /// Send the message over all of these paths, and outside RDMA.
    Tell {
        /// The message.
        message: Message,
        /// Paths whose queue pairs can carry it.
        over: PathSet,
    },
    /// For the record and for [`Health`]; nothing is to be done.
    Report(Report),
    /// Nothing more comes of this end: its communicator fails. Fence all that it has.
    GiveUp(Reason),
}

/// What an end has noticed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Report {
    /// A path failed here.
    Broken {
        /// Its queue pair.
        link: Link,
        /// What said so.
        cause: Cause,
        /// Whether it was the active one.
        active: bool,
    },
    /// An epoch has begun at this end.
    Switched {
        /// The epoch.
        epoch: u32,
        /// The path before.
        from: u8,
        /// The path now.
        to: u8,
        /// What the receiver had committed.
        committed: u64,
        /// How many steps the sender posts again; 0 at the receiver, which does not know.
        replayed: u64,
    },
    /// The first step got over the new path, or there was none to get over.
    Recovered {
        /// The epoch.
        epoch: u32,
    },
    /// A path has been rebuilt and proven: at the receiver by all its probes, at the sender by the first thing that got over it, or by the
    /// receiver's going by it.
    Restored {
        /// Its queue pair.
        link: Link,
    },
}

/// Why an end gives up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// No path worked, or the peer did not answer, until [`Settings::give_up`] was over.
    NoPath,
    /// The peer gave up.
    Peer,
    /// A queue pair that might still write could not be fenced.
    NotFenced(Link),
    /// A work request ended in a way that another NIC would not mend.
    Work(Status),
    /// The peer broke the protocol: what it did.
    Protocol(&'static str),
    /// Failover is off, and the path failed.
    Off(Cause),
}
