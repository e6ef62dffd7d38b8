//! What this rank called lately.

use std::collections::{HashMap, VecDeque};

use ringsight_records::Flags;

use super::Call;
use crate::{
    plan::{OpInfo, WORK_FIFO_DEPTH},
    proxy::ProxyOp,
};

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
    pub(super) fn at(self, seq: u64) -> Self {
        match self {
            Self::Collective { .. } => Self::Collective { seq },
            Self::Message { from, to, .. } => Self::Message { from, to, seq },
        }
    }
}

/// One call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    op: u32,
    pub(super) identity: Identity,
    pub(super) call: Call,
}

impl Entry {
    /// The call that became operation `info`.
    pub(crate) fn new(info: &OpInfo, call: Call) -> Self {
        Self {
            op: info.op,
            identity: Identity::of(info),
            call,
        }
    }
}

/// Calls that are remembered: as many as can be in flight, and as many before.
const REMEMBERED: usize = 2 * WORK_FIFO_DEPTH;

/// Calls around a given one that a rank tells the others.
const BEFORE: u64 = 256;
const AFTER: u64 = 64;

/// The calls of one rank on one communicator.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Those that run no more, or ran once; the latest last.
    recent: VecDeque<Entry>,
    /// By graph: they may run again as long as it lives.
    captured: HashMap<u32, Vec<Entry>>,
}

impl Calls {
    pub(super) fn note(&mut self, graph: u32, entries: &[Entry]) {
        if graph != 0 {
            self.captured.entry(graph).or_default().extend(entries);
            return;
        }
        let excess = (self.recent.len() + entries.len()).saturating_sub(REMEMBERED);
        self.recent.drain(..excess.min(self.recent.len()));
        self.recent
            .extend(&entries[entries.len().saturating_sub(REMEMBERED)..]);
    }

    /// These have not happened: they could not be launched.
    pub(super) fn withdraw(&mut self, graph: u32, entries: &[Entry]) {
        let stays = |entry: &Entry| !entries.iter().any(|withdrawn| withdrawn.op == entry.op);
        if graph == 0 {
            self.recent.retain(stays);
        } else if let Some(captured) = self.captured.get_mut(&graph) {
            captured.retain(stays);
        }
    }

    /// The graph is gone; what it sent last may still be on its way.
    pub(super) fn retire(&mut self, graph: u32) {
        if let Some(entries) = self.captured.remove(&graph) {
            self.note(0, &entries);
        }
    }

    fn all(&self) -> impl Iterator<Item = &Entry> {
        self.recent.iter().rev().chain(self.captured.values().flatten())
    }

    /// What was called and not captured, as far as it is remembered.
    pub(super) fn eager(&self) -> impl Iterator<Item = Identity> {
        let recent = self.recent.iter().map(|entry| entry.identity);
        recent.filter(|identity| identity.graph() == 0)
    }

    /// The call that became operation `op`.
    pub(super) fn find(&self, op: u32) -> Option<Entry> {
        self.all().find(|entry| entry.op == op).copied()
    }

    /// Whether `identity` or a later one of its sequence has been called.
    pub(super) fn has(&self, identity: Identity) -> bool {
        let seq = identity.seq();
        // Numbers of one graph, or of no graph, are a sequence.
        let same_graph = |other: u64| other >> 32 == seq >> 32;
        self.all().any(|entry| {
            entry.identity.at(seq) == identity
                && entry.identity.seq() >= seq
                && same_graph(entry.identity.seq())
        })
    }

    /// The latest call with this tag.
    pub(super) fn tagged(&self, tag: u32) -> Option<Entry> {
        self.all().find(|entry| entry.call.tag() == tag).copied()
    }

    /// The calls around `identity` in its sequence, by number.
    pub(super) fn around(&self, identity: Identity) -> Vec<(u64, Call)> {
        let seq = identity.seq();
        // Numbers of another graph are far away, since graphs stand in the upper half.
        let range = seq.saturating_sub(BEFORE)..=seq.saturating_add(AFTER);
        let mut found: Vec<_> = self
            .all()
            .filter(|entry| entry.identity.at(seq) == identity && range.contains(&entry.identity.seq()))
            .map(|entry| (entry.identity.seq(), entry.call))
            .collect();
        found.sort_by_key(|(seq, _)| *seq);
        found.dedup_by_key(|(seq, _)| *seq);
        found
    }
}
