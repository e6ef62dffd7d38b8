//! What names an operation: in this process's records ([`OpInfo`]), and between ranks ([`Identity`]).

use ringsight_records::{Flags, Kind, Record, State};

use super::ProxyOp;
use crate::observe;

/// What all records of an operation say.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// Operation number.
    pub op: u32,
    /// Communicator id.
    pub comm: u64,
    /// Sequence.
    pub seq: u64,
    /// Message bytes.
    pub bytes: u64,
    /// This rank.
    pub rank: u32,
    /// Peer or root, -1 if neither.
    pub peer: i32,
    /// Flags.
    pub flags: Flags,
}

impl OpInfo {
    /// A record about this operation.
    #[must_use]
    pub fn record(&self, kind: Kind, state: State, time_ns: u64, replay: u32) -> Record {
        Record {
            comm: self.comm,
            seq: self.seq,
            bytes: self.bytes,
            op: self.op,
            replay,
            rank: self.rank,
            peer: self.peer,
            pid: observe::pid(),
            ..Record::new(kind, state, time_ns)
        }
        .with_flags(self.flags)
    }

    /// Emits a dense record about this operation if somebody wants it.
    pub fn emit(&self, kind: Kind, state: State, time_ns: u64) {
        if observe::wants(kind) {
            observe::emit(&self.record(kind, state, time_ns, 0));
        }
    }

    /// The same of what happens now.
    pub(crate) fn emit_now(&self, kind: Kind, state: State) {
        if observe::wants(kind) {
            observe::emit(&self.record(kind, state, observe::now_ns(), 0));
        }
    }

    /// [`Kind::P2p`] or [`Kind::Coll`].
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2p
        } else {
            Kind::Coll
        }
    }

    /// [`Kind::P2pApi`] or [`Kind::CollApi`].
    #[must_use]
    pub fn api_kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2pApi
        } else {
            Kind::CollApi
        }
    }
}

/// Which operation of a communicator: the same on all ranks that take part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Identity {
    /// A collective, by its sequence number.
    Collective {
        /// As in [`ringsight_records::Record::seq`]: `graph << 32 | node` if captured.
        seq: u64,
    },
    /// A message, by the pair of ranks and its number among their messages.
    Message {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// As in [`ringsight_records::Record::seq`].
        seq: u64,
    },
}

impl Identity {
    /// Of the operation that these records are about.
    pub(crate) fn of(info: &OpInfo) -> Self {
        let peer = info.peer.cast_unsigned();
        if info.flags.contains(Flags::P2P) {
            Self::message(info.flags.contains(Flags::SEND), (info.rank, peer), info.seq)
        } else {
            Self::Collective { seq: info.seq }
        }
    }

    /// Of the operation whose network work this is.
    pub(crate) fn of_proxied(op: &ProxyOp) -> Self {
        if op.p2p {
            Self::message(op.is_send, (op.rank, op.peer), op.seq)
        } else {
            Self::Collective { seq: op.seq }
        }
    }

    /// What `rank` sends to `peer`, or receives from it.
    fn message(is_send: bool, (rank, peer): (u32, u32), seq: u64) -> Self {
        let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
        Self::Message { from, to, seq }
    }

    /// As in [`ringsight_records::Record::seq`].
    pub(crate) fn seq(&self) -> u64 {
        match self {
            Self::Collective { seq } | Self::Message { seq, .. } => *seq,
        }
    }

    /// The graph that it was captured in, as the ranks number them; 0 for none.
    pub(crate) fn graph(&self) -> u32 {
        (self.seq() >> 32) as u32
    }

    /// The first of its sequence: numbers of one graph, or of no graph, are one.
    pub(crate) fn sequence(self) -> Self {
        self.at(self.seq() & !u64::from(u32::MAX))
    }

    /// Stands for all operations of a graph, behind which it comes.
    pub(crate) fn whole_graph(graph: u32) -> Self {
        Self::Collective {
            seq: u64::from(graph) << 32 | u64::from(u32::MAX),
        }
    }

    /// The same sequence at another number.
    pub(crate) fn at(self, seq: u64) -> Self {
        match self {
            Self::Collective { .. } => Self::Collective { seq },
            Self::Message { from, to, .. } => Self::Message { from, to, seq },
        }
    }
}

/// In the sequence numbers of operations that only one rank knows: those that [`crate::launch`] makes to be found by a watchdog.
pub(crate) const SIMULATED: u64 = 1 << 63;

/// Whether a sequence number is of an operation that only one rank knows.
pub(crate) fn is_simulated(seq: u64) -> bool {
    seq & SIMULATED != 0
}
