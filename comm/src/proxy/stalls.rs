//! Connections over RDMA that wait for the network, for the watchdog: while a NIC still tries, or a connection is on its way to another
//! path, the kernel that waits for it is not stuck.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use ringsight_records::{PathCause, connection::DEVICE_NAME_BYTES, pages::text};

use super::{ConnectionId, ProxyOp};
use crate::checks::Identity;

/// Why nothing goes over a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// This end's port is down.
    PortDown,
    /// Its path was left because of this end: why, and `enum ibv_wc_status` of the completion that told of it (0: none did).
    Left(PathCause, u8),
    /// What was posted has neither ended nor failed.
    Unanswered,
    /// Its path was left by the peer's word, or because of what another connection found.
    Told,
}

impl Why {
    /// 0 for the gravest: who knows most of what has failed.
    pub(crate) fn level(self) -> u8 {
        match self {
            Self::PortDown => 0,
            Self::Left(..) => 1,
            Self::Unanswered => 2,
            Self::Told => 3,
        }
    }
}

/// One end of a connection that waits for the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) why: Why,
    /// Since something came of it last, nanoseconds.
    pub(crate) for_ns: u64,
    /// The rank at the other end.
    pub(crate) peer: u32,
    /// This end sends.
    pub(crate) is_send: bool,
    pub(crate) channel: u8,
    /// Name of this end's device, zero-padded.
    pub(crate) device: [u8; DEVICE_NAME_BYTES],
    /// Port of the device, from 1.
    pub(crate) port: u8,
    /// Number of this end's first queue pair.
    pub(crate) queue_pair: u32,
}

impl Stall {
    /// Of several, the one to be told is the least: who knows what has failed, or has known for longest.
    pub(crate) fn order(&self) -> impl Ord + use<> {
        let for_ns = std::cmp::Reverse(self.for_ns);
        (self.why.level(), for_ns, self.channel, self.peer)
    }
}

impl fmt::Display for Stall {
    /// As in `sends to rank 1 over mlx5_0:1, queue pair 18, channel 0, whose port is down`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            peer,
            channel,
            port,
            queue_pair,
            ..
        } = self;
        let way = if self.is_send { "sends to" } else { "receives from" };
        let device = text(&self.device);
        write!(
            f,
            "{way} rank {peer} over {device}:{port}, queue pair {queue_pair}, channel {channel}, "
        )?;
        match self.why {
            Why::PortDown => f.write_str("whose port is down"),
            Why::Left(cause, 0) => write!(f, "which has failed ({})", cause.name()),
            Why::Left(cause, status) => write!(f, "which has failed ({}, status {status})", cause.name()),
            Why::Unanswered => f.write_str("of which nothing is acknowledged"),
            Why::Told => f.write_str("which the peer has given up"),
        }
    }
}

struct Entry {
    /// What waits: communicator, operation and replay. The first is under way, and the others behind it.
    runs: Vec<(u64, Identity, u32)>,
    since_ns: u64,
    stall: Stall,
}

/// The connections of one proxy that wait for the network: written when that begins and ends, read when somebody asks.
#[derive(Default)]
pub(crate) struct Stalls(Mutex<BTreeMap<ConnectionId, Entry>>);

impl Stalls {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<ConnectionId, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection of these operations has waited since then, `CLOCK_MONOTONIC` nanoseconds.
    pub(super) fn enter<'a>(&self, ops: impl IntoIterator<Item = &'a ProxyOp>, since_ns: u64, stall: Stall) {
        let mut ops = ops.into_iter().peekable();
        let Some(connection) = ops.peek().map(|op| op.connection) else {
            return;
        };
        let runs = ops.map(|op| (op.comm, Identity::of_proxied(op), op.replay));
        let entry = Entry {
            runs: runs.collect(),
            since_ns,
            stall,
        };
        self.entries().insert(connection, entry);
    }

    /// A connection waits no more.
    pub(super) fn leave(&self, connection: ConnectionId) {
        self.entries().remove(&connection);
    }

    /// The gravest of what an operation of `comm` waits for now, of replay `replay` if it is captured.
    pub(crate) fn of(&self, comm: u64, identity: Identity, replay: u32, now: u64) -> Option<Stall> {
        let entries = self.entries();
        let entries = entries
            .values()
            .filter(|entry| entry.runs.contains(&(comm, identity, replay)));
        let stalls = entries.map(|entry| Stall {
            for_ns: now.saturating_sub(entry.since_ns),
            ..entry.stall
        });
        stalls.min_by_key(Stall::order)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OP: ProxyOp = ProxyOp {
        connection: ConnectionId(1),
        op: 7,
        replay: 2,
        comm: 5,
        seq: 9,
        rank: 3,
        peer: 4,
        channel: 0,
        is_send: true,
        p2p: true,
        graph: true,
        steps: 1,
        tag: 0,
        counted: true,
        chunk_bytes: 1,
        pid: 1,
    };

    fn stall(why: Why, channel: u8) -> Stall {
        Stall {
            why,
            for_ns: 0,
            peer: 4,
            is_send: true,
            channel,
            device: [0; DEVICE_NAME_BYTES],
            port: 1,
            queue_pair: 18,
        }
    }

    const MESSAGE: Identity = Identity::Message {
        from: 3,
        to: 4,
        seq: 9,
    };

    #[test]
    fn the_gravest_of_an_operation_is_told_with_its_time() {
        let stalls = Stalls::default();
        let other = ProxyOp {
            connection: ConnectionId(2),
            ..OP
        };
        assert_eq!(stalls.of(5, MESSAGE, 2, 100), None);
        stalls.enter([&OP], 40, stall(Why::Unanswered, 0));
        stalls.enter([&other], 30, stall(Why::Unanswered, 1));
        let told = |now| {
            let stall = stalls.of(5, MESSAGE, 2, now);
            stall.map(|stall| (stall.channel, stall.for_ns))
        };
        assert_eq!(told(100), Some((1, 70)), "the longer one");
        stalls.enter([&OP], 90, stall(Why::PortDown, 0));
        assert_eq!(told(100), Some((0, 10)), "the one that knows why");
        let back = Identity::Message {
            from: 4,
            to: 3,
            seq: 9,
        };
        for (comm, identity, replay) in [
            (6, MESSAGE, 2),
            (5, MESSAGE, 1),
            (5, back, 2),
            (5, Identity::Collective { seq: 9 }, 2),
        ] {
            assert_eq!(stalls.of(comm, identity, replay, 100), None);
        }
        stalls.leave(OP.connection);
        assert_eq!(told(100), Some((1, 70)));
        stalls.leave(other.connection);
        assert_eq!(told(100), None);
    }

    /// Another channel may have brought an operation on while this one still is at the one before: both wait.
    #[test]
    fn what_is_behind_waits_too() {
        let stalls = Stalls::default();
        let next = ProxyOp { seq: 10, ..OP };
        stalls.enter([&OP, &next], 40, stall(Why::Unanswered, 0));
        let behind = Identity::Message {
            from: 3,
            to: 4,
            seq: 10,
        };
        for identity in [MESSAGE, behind] {
            assert!(stalls.of(5, identity, 2, 100).is_some(), "{identity:?}");
        }
    }
}
