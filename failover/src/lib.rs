//! Failover of RDMA connections: when an end gives up a queue pair, what the sender replays on which path, and when a path returns.
//!
//! A connection moves numbered steps (*positions*, from 0) from a [`Sender`] into the slots of a [`Receiver`]'s FIFO. It has up to
//! [`MAX_PATHS`] paths. A path is a pair of ports, one at each end, with one queue pair at each end. Rebuilt queue pairs are the
//! path's next [generation](Link::generation). One path is *active*: only the active path carries data and credits. Path 0 is the
//! primary path.
//!
//! Both ends are state machines without I/O or clock ([`Protocol`]). The *driver*, who owns the queue pairs, delivers what happened
//! ([`Event`]), carries out what an end requests ([`Action`]) and calls it at its [deadline](Protocol::deadline). The crate has no
//! threads and no locks.
//!
//! # Modules, from the bottom
//! | module | owns |
//! |---|---|
//! | `settings` | times and thresholds, and their environment variables |
//! | `links` | names and states of paths and queue pairs |
//! | `message` | the messages between the ends, and their bytes |
//! | `protocol` | the interface of an end: events, actions, reports |
//! | `rules` | the decisions that exactly-once delivery depends on |
//! | `timers` | the deadlines of an end |
//! | `paths` | the paths of an end, by index |
//! | `sender`, `receiver` | the two state machines |
//! | `health` | what all connections of a process know of ports and paths |
//! | `fuzzing` | both machines under arbitrary input |
//!
//! The model in this crate's tests (`model`) explores both machines on a network that fails in every order.
//!
//! # The driver's contract
//! What the model proves holds if the driver keeps these rules:
//!
//! - **Steps.** The sender's driver posts positions in order, and only over [`Sender::link`]. It posts the data as RDMA WRITE into slot
//!   `position` modulo the number of slots, then a WRITE with immediate whose immediate is the position's low 32 bits. It keeps the
//!   step's source until [`Sender::acked`] has passed the position.
//! - **Credits.** [`Action::Credit`] is an RDMA WRITE of the number of steps granted since the connection began. Each path has its own
//!   credit word at the sender, so that a late write of one path cannot hide a newer credit of another. The driver delivers the value
//!   of each word. It never uses fetch-and-add: an addition that was applied but not acknowledged would be applied again.
//! - **Fence.** [`Action::Fence`] moves the end's queue pair to the error state and polls until every posted work request is accounted
//!   for. The driver first delivers what arrived or completed before, then [`Event::Fenced`]. After that nothing of that generation
//!   touches memory at this end, and the driver delivers nothing more of it.
//! - **Completions.** The driver reads the status before anything else. It identifies a work request by the request's own number
//!   ([`Work`]), never by a counter that an error completion also advances.
//! - **Addresses.** [`Action::Rebuild`] makes a queue pair (reset, init) and reads the port's GID *then*: after a port was down, its
//!   index may name another GID. [`Action::Connect`] takes the queue pair to RTR and RTS with the given address.
//! - **Messages.** [`Action::Send`] goes over the named paths and over the connection outside RDMA, if there is one. A message may be
//!   lost, duplicated and reordered: an end repeats every message that needs an answer until the answer comes.
//!
//! # Agreement
//! A switch of the active path is an *epoch*; the greater epoch wins. Only the receiver begins epochs, because its committed position
//! decides what the sender replays. Either end may start a switch:
//!
//! 1. An end that finds the active path broken fences its queue pair. The sender sends [`Message::Broken`].
//! 2. The receiver fences its end and counts everything that arrived. It sends [`Message::Switch`] with the epoch, the new path and
//!    the committed position.
//! 3. The sender replays from the committed position, never from its posted position, and answers [`Message::Switched`].
//!
//! If the new path fails meanwhile, the receiver begins the next epoch in the same way. With no path left the ends rebuild what they
//! can. An end with an operation gives up after [`Settings::give_up`].
//!
//! The receiver rebuilds a failed path: it sends [`Message::Offer`], the sender answers [`Message::Accept`], and probes prove the path.
//! If the proven path comes before the active one in order, the receiver switches back:
//!
//! 1. The active path works and is not fenced. The receiver asks the sender to stop ([`Message::Hold`]).
//! 2. The sender answers [`Message::Drained`] once every posted step is acknowledged. When the receiver has committed all of them,
//!    nothing can arrive late.
//! 3. The next epoch begins on the better path. The path that was left stays ready: for messages, and for the next failure.
//!
//! If the better path fails before step 3, the next epoch begins on the path that is already active.
//!
//! A receiver whose communicator ends sends [`Message::Left`] last of all, outside RDMA ([`Receiver::goodbye`]). A sender whose
//! acknowledgements were lost takes that message as acknowledgement.
//!
//! # Invariants
//! - The receiver commits every position once, in order.
//! - The sender frees no source that the receiver has not committed.
//! - The sender never has more credit than the receiver has free slots.
//! - An end gives up only without a working path, after a defect of the peer or program, or after its peer.

pub mod fuzzing;
mod health;
mod links;
mod message;
mod paths;
mod protocol;
mod receiver;
mod rules;
mod sender;
mod settings;
mod timers;

#[cfg(test)]
mod model;

pub use health::{Health, NicVerdict, PathHealth, PathId, PathState, PortId, Scope};
pub use links::{Cause, Link, LinkState, MAX_PATHS, PathSet, PathView, Status, Work};
pub use message::{ADDRESS_BYTES, Address, MESSAGE_BYTES, Message};
pub use protocol::{Action, Event, Protocol, Reason, Report};
pub use receiver::Receiver;
pub use rules::{Rules, Sound};
pub use sender::Sender;
pub use settings::{Settings, SettingsError, transport_timeout};
pub use timers::Timer;
