//! A connection's entry in the proxy table of the shared pages.

use ringsight_records::{Flags, proxies::ProxyState};

use crate::{
    observe::{self, ProxyEntry},
    op::ProxyOp,
};

/// A connection's entry, claimed with its first operation.
#[derive(Default)]
pub(super) struct TableEntry {
    entry: Option<ProxyEntry>,
    /// The entry has been claimed, or the table was full.
    is_claimed: bool,
}

impl TableEntry {
    /// `op` becomes the first operation; `queued` operations wait behind it.
    pub(super) fn begin(&mut self, op: &ProxyOp, queued: usize) {
        if !std::mem::replace(&mut self.is_claimed, true) {
            self.entry = ProxyEntry::claim();
        }
        let Some(entry) = &self.entry else { return };
        let flags = Flags::P2P
            .when(op.p2p)
            .with(Flags::SEND.when(op.is_send))
            .with(Flags::GRAPH.when(op.graph));
        entry.begin(&ProxyState {
            comm: op.comm,
            seq: op.seq,
            begun_ns: observe::now_ns(),
            op: op.op,
            replay: op.replay,
            rank: op.rank,
            peer: op.peer,
            steps: op.steps,
            chunk_bytes: op.chunk_bytes,
            queued: u32::try_from(queued).unwrap_or(u32::MAX),
            channel: op.channel,
            flags: flags.0,
            ..ProxyState::default()
        });
    }

    /// `op` has reached this step.
    pub(super) fn move_to(&self, op: &ProxyOp, step: u32) {
        if let Some(entry) = &self.entry {
            entry.move_to(op.op, step);
        }
    }

    /// The operation is done or given up.
    pub(super) fn finish(&self) {
        if let Some(entry) = &self.entry {
            entry.rest();
        }
    }
}
