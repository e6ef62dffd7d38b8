//! What a connection is at, for readers of the shared pages.

use ringsight_records::{Flags, proxies::ProxyState};

use super::ProxyOp;
use crate::observe::{self, ProxyEntry};

/// A connection's place in the proxy table, taken with its first operation.
#[derive(Default)]
pub(super) struct Told {
    entry: Option<ProxyEntry>,
    /// A table that was full is not asked again.
    is_asked: bool,
}

impl Told {
    /// The turn of `op` has come; so many wait behind it.
    pub(super) fn begin(&mut self, op: &ProxyOp, queued: usize) {
        if !std::mem::replace(&mut self.is_asked, true) {
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

    /// It has come to this step.
    pub(super) fn move_to(&self, op: &ProxyOp, step: u32) {
        if let Some(entry) = &self.entry {
            entry.move_to(op.op, step);
        }
    }

    /// It is done, or given up.
    pub(super) fn rest(&self) {
        if let Some(entry) = &self.entry {
            entry.rest();
        }
    }
}
