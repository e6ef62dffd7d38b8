//! The calls that this rank made lately.

use std::collections::{HashMap, VecDeque};

use super::message::CallsAnswer;
use crate::op::{Call, Identity, OpInfo, WORK_FIFO_DEPTH};

/// A call, and the operation that it became.
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

/// The most eager calls that are remembered: as many as can be in flight, and as many before.
const REMEMBERED: usize = 2 * WORK_FIFO_DEPTH;

/// The calls before and after a given one that a rank tells the others.
const BEFORE: u64 = 256;
const AFTER: u64 = 64;

/// The calls of one rank on one communicator.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// Eager calls, and calls of destroyed graphs; the latest last.
    recent: VecDeque<Entry>,
    /// By graph: each may run again for as long as the graph lives.
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

    /// Calls that were noted could not be launched, so they have not happened.
    pub(super) fn withdraw(&mut self, graph: u32, entries: &[Entry]) {
        let stays = |entry: &Entry| !entries.iter().any(|withdrawn| withdrawn.op == entry.op);
        if graph == 0 {
            self.recent.retain(stays);
        } else if let Some(captured) = self.captured.get_mut(&graph) {
            captured.retain(stays);
        }
    }

    /// The graph is destroyed. What it sent last may still be on its way, so its calls stay for a while.
    pub(super) fn retire(&mut self, graph: u32) {
        if let Some(entries) = self.captured.remove(&graph) {
            self.note(0, &entries);
        }
    }

    fn all(&self) -> impl Iterator<Item = &Entry> {
        self.recent.iter().rev().chain(self.captured.values().flatten())
    }

    /// The eager calls, as far as they are remembered.
    pub(super) fn eager(&self) -> impl Iterator<Item = Identity> {
        let recent = self.recent.iter().map(|entry| entry.identity);
        recent.filter(|identity| identity.graph() == 0)
    }

    /// The call that became operation `op`.
    pub(super) fn find(&self, op: u32) -> Option<Entry> {
        self.all().find(|entry| entry.op == op).copied()
    }

    /// Whether `identity` or a later operation of its sequence has been called.
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
    fn tagged(&self, tag: u32) -> Option<Entry> {
        self.all().find(|entry| entry.call.tag() == tag).copied()
    }

    /// What this rank answers when it is asked for its calls around `identity`, and for the one with tag `theirs`.
    pub(super) fn answer(&self, identity: Identity, theirs: u32) -> CallsAnswer {
        CallsAnswer {
            calls: self.around(identity),
            tagged: self.tagged(theirs).map(Into::into),
        }
    }

    /// The calls around `identity` in its sequence, by number.
    fn around(&self, identity: Identity) -> Vec<(u64, Call)> {
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
