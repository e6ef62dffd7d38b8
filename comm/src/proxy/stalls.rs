//! The table of a proxy's stalled connections, for the watchdog.
//!
//! The progress thread writes it when a stall begins or ends; the watchdog reads it on demand. One lock guards it.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard},
};

use ringsight_comm_base::sync::lock;

use crate::op::{ConnectionId, Identity, ProxyOp};
pub(crate) use crate::transport::stall::{Stall, StallCause as Why};

struct Entry {
    /// The operations that wait: communicator, operation and replay. The first one is under way, the others follow it.
    runs: Vec<(u64, Identity, u32)>,
    since_ns: u64,
    stall: Stall,
}

/// The stalled connections of one proxy.
#[derive(Default)]
pub(crate) struct Stalls(Mutex<BTreeMap<ConnectionId, Entry>>);

impl Stalls {
    fn entries(&self) -> MutexGuard<'_, BTreeMap<ConnectionId, Entry>> {
        lock(&self.0)
    }

    /// Adds the connection of these operations, which has been stalled since `since_ns` (`CLOCK_MONOTONIC`, nanoseconds).
    pub(super) fn insert<'a>(&self, ops: impl IntoIterator<Item = &'a ProxyOp>, since_ns: u64, stall: Stall) {
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

    /// Removes a connection whose stall is over.
    pub(super) fn remove(&self, connection: ConnectionId) {
        self.entries().remove(&connection);
    }

    /// The gravest stall that an operation of `comm` waits for, in replay `replay` if it is captured.
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
    use ringsight_records::connection::DEVICE_NAME_BYTES;

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
    fn the_gravest_stall_of_an_operation_is_found_with_its_duration() {
        let stalls = Stalls::default();
        let other = ProxyOp {
            connection: ConnectionId(2),
            ..OP
        };
        assert_eq!(stalls.of(5, MESSAGE, 2, 100), None);
        stalls.insert([&OP], 40, stall(Why::Unanswered, 0));
        stalls.insert([&other], 30, stall(Why::Unanswered, 1));
        let found = |now| {
            let stall = stalls.of(5, MESSAGE, 2, now);
            stall.map(|stall| (stall.channel, stall.for_ns))
        };
        assert_eq!(found(100), Some((1, 70)), "the longer one");
        stalls.insert([&OP], 90, stall(Why::PortDown, 0));
        assert_eq!(found(100), Some((0, 10)), "the one that knows why");
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
        stalls.remove(OP.connection);
        assert_eq!(found(100), Some((1, 70)));
        stalls.remove(other.connection);
        assert_eq!(found(100), None);
    }

    /// An operation may wait for a connection that is still at the operation before it: both wait.
    #[test]
    fn operations_behind_the_first_wait_too() {
        let stalls = Stalls::default();
        let next = ProxyOp { seq: 10, ..OP };
        stalls.insert([&OP, &next], 40, stall(Why::Unanswered, 0));
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
