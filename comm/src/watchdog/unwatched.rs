//! What a rank whose watchdog is off says when others ask: that it is, and what it has called. Were it silent, they would take it for one
//! that hangs.

use std::sync::Arc;

use super::{
    message::{Health, Message},
    position::{Answer, Position},
};
use crate::{
    checks::{Checks, Post},
    observe,
    proxy::stalls::Stalls,
    topology::Topology,
};

/// A communicator's rank that watches nothing.
pub(crate) struct Unwatched {
    pub(crate) comm: u64,
    pub(crate) stalls: Arc<Stalls>,
    pub(crate) topology: Arc<Topology>,
    pub(crate) checks: Arc<Checks>,
    pub(crate) post: Post,
}

impl Unwatched {
    /// A control message has come; called on the bootstrap's service thread.
    pub(crate) fn control(&self, from: u32, bytes: &[u8]) {
        let ranks = self.topology.ranks();
        if from >= ranks {
            return;
        }
        let answer = match Message::parse(bytes) {
            Some(Message::Where { query, run }) => {
                // Whether a graph has been launched the library does not learn.
                let called = run.replay > 0 || self.checks.has_called(run.identity);
                let now = observe::now_ns();
                let answer = Answer {
                    stall: self.stalls.of(self.comm, run.identity, run.replay, now),
                    ..Position::Unwatched { called }.into()
                };
                Message::Here { query, answer }
            }
            Some(Message::Look { query, rank }) if rank < ranks => Message::Looked {
                query,
                rank,
                health: Health::of(&self.topology, rank),
            },
            _ => return,
        };
        (self.post)(Some(from), &answer.encode());
    }
}
