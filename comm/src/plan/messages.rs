//! The order of a group's messages: its sends and receives, and what AlltoAll, Gather and Scatter are made of.
//!
//! In pass `p` and round `d` a rank sends its `p`-th message to `rank + d` and receives its `p`-th from `rank - d`: both
//! ends of a message have the same (pass, round). Plans are cut between rounds, so wherever each rank cuts, the ranks
//! work through messages in one common order, and the oldest unfinished message always has both its ends running.

use std::collections::BTreeMap;

use ringsight_comm_base::error::{Error, Result};
use ringsight_records::Function;

use crate::op::Task;

/// One end of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// Index of the task that it is of, or part of.
    pub(crate) task: usize,
    /// The other rank.
    pub(crate) peer: u32,
    /// Where it is taken from or put.
    pub(crate) address: usize,
}

/// The messages of a group on one communicator.
#[derive(Debug, Default)]
pub(crate) struct GroupMessages {
    /// In call order.
    tasks: Vec<Task>,
    /// By peer, in call order.
    sends: BTreeMap<u32, Vec<Message>>,
    recvs: BTreeMap<u32, Vec<Message>>,
    /// What a rank's AlltoAll, Gather or Scatter has for itself: both ends of each.
    copies: Vec<(Message, Message)>,
}

/// At most one message out and one in, and what goes from this rank to itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Round {
    pub(crate) to_self: Vec<(Message, Message)>,
    pub(crate) send: Option<Message>,
    pub(crate) recv: Option<Message>,
}

impl Round {
    /// Its messages, each of those from this rank to itself once.
    pub(crate) fn messages(&self) -> impl Iterator<Item = &Message> {
        self.send
            .iter()
            .chain(&self.recv)
            .chain(self.to_self.iter().map(|(send, _)| send))
    }

    fn is_empty(&self) -> bool {
        self.messages().next().is_none()
    }
}

impl GroupMessages {
    /// Nothing.
    pub(crate) fn none() -> &'static Self {
        static NONE: GroupMessages = GroupMessages {
            tasks: Vec::new(),
            sends: BTreeMap::new(),
            recvs: BTreeMap::new(),
            copies: Vec::new(),
        };
        &NONE
    }

    /// Adds a task of rank `rank` of `ranks`.
    pub(crate) fn push(&mut self, task: Task, rank: u32, ranks: u32) {
        let index = self.tasks.len();
        let request = &task.request;
        let peer = request.peer.unwrap_or_default();
        let block =
            |buffer: usize, block: u32| buffer + block as usize * request.count * request.data_type.size();
        let at = |peer, address| Message {
            task: index,
            peer,
            address,
        };
        let (sends, recvs) = (&mut self.sends, &mut self.recvs);
        let mut send = |message: Message| sends.entry(message.peer).or_default().push(message);
        let mut recv = |message: Message| recvs.entry(message.peer).or_default().push(message);
        let others = (0..ranks).filter(|other| *other != rank);
        match request.function {
            Function::Send => send(at(peer, request.send)),
            Function::Recv => recv(at(peer, request.recv)),
            function => {
                let is_root = peer == rank;
                // Where this rank's own block is taken from and put.
                let (mut from, mut to) = (request.send, request.recv);
                if function == Function::AlltoAll || function == Function::Scatter && is_root {
                    others
                        .clone()
                        .for_each(|other| send(at(other, block(request.send, other))));
                    from = block(request.send, rank);
                }
                if function == Function::AlltoAll || function == Function::Gather && is_root {
                    others.for_each(|other| recv(at(other, block(request.recv, other))));
                    to = block(request.recv, rank);
                }
                match function {
                    Function::Gather if !is_root => send(at(peer, request.send)),
                    Function::Scatter if !is_root => recv(at(peer, request.recv)),
                    _ => self.copies.push((at(rank, from), at(rank, to))),
                }
            }
        }
        self.tasks.push(task);
    }

    /// The task pushed last.
    pub(crate) fn last(&mut self) -> Option<&mut Task> {
        self.tasks.last_mut()
    }

    /// Its tasks, in call order.
    pub(crate) fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// Everything, in the common order.
    ///
    /// # Errors
    /// When the rank's sends to itself and its receives from itself do not pair.
    pub(crate) fn rounds(&self, rank: u32, ranks: u32) -> Result<Vec<Round>> {
        if self.tasks.is_empty() {
            return Ok(Vec::new());
        }
        let none = Vec::new();
        let of = |queues: &'_ BTreeMap<u32, Vec<Message>>, peer| queues.get(&peer).map_or(0, Vec::len);
        let (to, from) = (of(&self.sends, rank), of(&self.recvs, rank));
        if to != from {
            return Err(Error::usage(format!(
                "rank {rank} sends {to} and receives {from} messages to and from itself in one group: they must pair"
            )));
        }
        let queues: Vec<(&Vec<Message>, &Vec<Message>)> = (0..ranks)
            .map(|delta| {
                let (to, from) = ((rank + delta) % ranks, (rank + ranks - delta) % ranks);
                (
                    self.sends.get(&to).unwrap_or(&none),
                    self.recvs.get(&from).unwrap_or(&none),
                )
            })
            .collect();
        let passes = queues
            .iter()
            .map(|(sends, recvs)| sends.len().max(recvs.len()))
            .max()
            .unwrap_or(0)
            .max(self.copies.len());
        let mut rounds = Vec::new();
        for pass in 0..passes {
            for (delta, (sends, recvs)) in queues.iter().enumerate() {
                let (send, recv) = (sends.get(pass).copied(), recvs.get(pass).copied());
                let round = if delta == 0 {
                    Round {
                        to_self: send
                            .zip(recv)
                            .into_iter()
                            .chain(self.copies.get(pass).copied())
                            .collect(),
                        ..Round::default()
                    }
                } else {
                    Round {
                        to_self: Vec::new(),
                        send,
                        recv,
                    }
                };
                if !round.is_empty() {
                    rounds.push(round);
                }
            }
        }
        Ok(rounds)
    }
}
