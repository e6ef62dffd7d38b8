//! The order of a group's sends and receives.
//!
//! In pass `p` and round `d` a rank sends its `p`-th message to `rank + d` and receives its `p`-th from `rank - d`: both
//! ends of a message have the same (pass, round). Plans are cut between rounds, so wherever each rank cuts, the ranks
//! work through messages in one common order, and the oldest unfinished message always has both its ends running.

use std::collections::{BTreeMap, VecDeque};

use ringsight_records::{Flags, Function};

use super::{OpInfo, Task};
use crate::error::{Error, Result};

/// Sends and receives of a group on one communicator, by peer, in call order.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    sends: BTreeMap<u32, VecDeque<Task>>,
    recvs: BTreeMap<u32, VecDeque<Task>>,
}

/// At most one message out and one in.
#[derive(Debug, Default)]
pub(crate) struct Round {
    pub(crate) to_self: Option<(Task, Task)>,
    pub(crate) send: Option<Task>,
    pub(crate) recv: Option<Task>,
}

impl Round {
    /// Its tasks.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = &Task> {
        self.send
            .iter()
            .chain(&self.recv)
            .chain(self.to_self.iter().map(|(send, _)| send))
    }

    fn is_empty(&self) -> bool {
        self.to_self.is_none() && self.send.is_none() && self.recv.is_none()
    }
}

impl Exchange {
    pub(crate) fn push(&mut self, task: Task) {
        let peer = task.request.peer.unwrap_or_default();
        let queues = if task.request.function == Function::Send {
            &mut self.sends
        } else {
            &mut self.recvs
        };
        queues.entry(peer).or_default().push_back(task);
    }

    /// The task of `info`, if it is the last one pushed for its peer.
    pub(crate) fn last(&mut self, info: &OpInfo) -> Option<&mut Task> {
        let queues = if info.flags.contains(Flags::SEND) {
            &mut self.sends
        } else {
            &mut self.recvs
        };
        queues.get_mut(&(info.peer as u32))?.back_mut()
    }

    pub(crate) fn rounds(mut self, rank: u32, ranks: u32) -> Result<Vec<Round>> {
        let queued = |queues: &BTreeMap<u32, VecDeque<Task>>| queues.get(&rank).map_or(0, VecDeque::len);
        let (to, from) = (queued(&self.sends), queued(&self.recvs));
        if to != from {
            return Err(Error::usage(format!(
                "rank {rank} sends {to} and receives {from} messages to and from itself in one group: they must pair"
            )));
        }
        let mut take = |queues: fn(&mut Self) -> &mut BTreeMap<u32, VecDeque<Task>>, peer| {
            let queues = queues(&mut self);
            let queue = queues.get_mut(&peer)?;
            let task = queue.pop_front();
            if queue.is_empty() {
                queues.remove(&peer);
            }
            task
        };
        let mut rounds = Vec::new();
        loop {
            let before = rounds.len();
            for delta in 0..ranks {
                let send = take(|exchange| &mut exchange.sends, (rank + delta) % ranks);
                let recv = take(|exchange| &mut exchange.recvs, (rank + ranks - delta) % ranks);
                let round = match (send, recv) {
                    (Some(send), Some(recv)) if delta == 0 => Round {
                        to_self: Some((send, recv)),
                        ..Default::default()
                    },
                    (send, recv) => Round {
                        to_self: None,
                        send,
                        recv,
                    },
                };
                if !round.is_empty() {
                    rounds.push(round);
                }
            }
            if rounds.len() == before {
                return Ok(rounds);
            }
        }
    }
}
