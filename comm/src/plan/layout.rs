//! Which task goes into which plan, on which channels.

use std::{collections::BTreeMap, ops::Range};

use ringsight_comm_base::error::{Error, Result};
use ringsight_kernels::{cuda::messages::MAX as MAX_PEER_MESSAGES, schedule::divisible};
use smallvec::SmallVec;

use super::{
    capabilities::Capabilities,
    channels::{self, Picker},
    messages::{GroupMessages, Message},
};
use crate::op::Task;

/// What one group asks of one communicator, laid out into plans.
pub(crate) struct Layout<'a> {
    /// In the order of their launch.
    pub(crate) plans: SmallVec<[Plan<'a>; 1]>,
    /// Operations made of messages, in call order; each is an operation of the first of its plans.
    pub(crate) spreads: Vec<Spread<'a>>,
}

/// What one kernel launch will do.
pub(crate) struct Plan<'a> {
    /// In the order in which each channel does it.
    pub(crate) works: SmallVec<[PlannedWork<'a>; 1]>,
    /// Operations that are in no other plan.
    pub(crate) ops: SmallVec<[PlannedOp<'a>; 1]>,
    /// Operations made of messages whose tag is shown round a ring.
    pub(crate) tagged: Vec<&'a Task>,
    kind: Kind,
    picker: Picker,
}

/// What a plan may hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Work of channels: rings and messages through FIFOs.
    Channels,
    /// One collective in peer memory, and nothing else: so it is the same plan on all ranks.
    PeerCollective,
    /// Messages in peer memory, and nothing else.
    PeerMessages,
}

/// One channel's part of one operation.
pub(crate) struct PlannedWork<'a> {
    pub(crate) task: &'a Task,
    pub(crate) channel: u8,
    /// As [`ringsight_kernels::Work::part`].
    pub(crate) part: Range<usize>,
    pub(crate) route: Route,
}

/// Where a work's data goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Round the channel's ring.
    Ring,
    /// Round the channel's ring, with nothing but the operation's tag: where ranks call different operations, their messages need not meet, but
    /// rings do.
    Tag,
    /// Through peer memory.
    Peers,
    /// From one address of this rank to another.
    Local { from: usize, to: usize },
    /// To a peer, from this address.
    Send { peer: u32, from: usize },
    /// From a peer, to this address.
    Recv { peer: u32, to: usize },
}

/// An operation of a plan.
pub(crate) struct PlannedOp<'a> {
    pub(crate) task: &'a Task,
    /// The receive that a send to oneself is done with.
    pub(crate) twin: Option<&'a Task>,
    /// Its channels.
    pub(crate) channel_mask: u64,
}

/// An operation made of messages: they may be in several plans.
pub(crate) struct Spread<'a> {
    pub(crate) task: &'a Task,
    /// Its channels, by index of the plan. Never empty.
    pub(crate) masks: BTreeMap<usize, u64>,
}

impl Plan<'_> {
    fn new(kind: Kind, channels: usize) -> Self {
        Self {
            works: SmallVec::new(),
            ops: SmallVec::new(),
            tagged: Vec::new(),
            kind,
            picker: Picker::new(channels),
        }
    }
}

/// Lays out what a group asks of a communicator: a pure function, the same on all ranks as far as their calls are.
///
/// Collectives drain before messages ([module documentation](super)). A plan that is not `persistent` (captured) fills at most half of the work FIFO.
///
/// # Errors
/// Messages of this rank to itself that do not pair.
pub(crate) fn lay_out<'a>(
    capabilities: &Capabilities,
    collectives: &'a [Task],
    messages: &'a GroupMessages,
    persistent: bool,
) -> Result<Layout<'a>> {
    let mut planner = Planner {
        capabilities,
        budget: if persistent {
            usize::MAX
        } else {
            capabilities.work_fifo_depth / 2
        },
        plans: SmallVec::new(),
    };
    planner.lay_out_collectives(collectives, messages.tasks());
    let spreads = planner.lay_out_messages(messages)?;
    Ok(Layout {
        plans: planner.plans,
        spreads,
    })
}

struct Planner<'a, 'c> {
    capabilities: &'c Capabilities,
    /// Work elements of a plan.
    budget: usize,
    plans: SmallVec<[Plan<'a>; 1]>,
}

impl<'a> Planner<'a, '_> {
    /// Puts every collective into a plan, with the tags of what is made of messages between them.
    fn lay_out_collectives(&mut self, collectives: &'a [Task], of_messages: &'a [Task]) {
        // In call order, so that ranks that call in another order differ.
        let mut of_messages = of_messages
            .iter()
            .filter(|task| !task.request.function.is_p2p())
            .peekable();
        for task in collectives {
            while let Some(earlier) = of_messages.next_if(|other| other.info.seq < task.info.seq) {
                self.show_tag(earlier);
            }
            if task.method.path.is_peer_access() {
                add_in_peer_memory(self.begin(Kind::PeerCollective), task);
            } else {
                self.add_to_rings(task);
            }
        }
        for task in of_messages {
            self.show_tag(task);
        }
    }

    /// Adds a collective that goes round rings.
    fn add_to_rings(&mut self, task: &'a Task) {
        let capabilities = self.capabilities;
        // Not by its own channels: where ranks call something different, it shall be in the same plan all the same.
        let (plan, _) = self.with_room(capabilities.channels);
        let request = &task.request;
        let elements = divisible(
            request.function,
            task.method.algorithm,
            request.data_type,
            request.count,
            capabilities.ranks,
        );
        let mut parts = channels::split(elements, request.data_type.size(), task.method.channels);
        parts.retain(|part| !part.is_empty());
        // Ranks that call different operations find out where these meet, so they must meet. Let the n-th collective of
        // a group be the first that differs. Where plans are cut depends on the operations before it alone, so all ranks have it
        // in the same plan, and the channels' loads are the same, since all before it was. What is picked for it are
        // the least loaded channels, more or fewer: the least loaded one is always among them, and has work. There
        // everybody comes to it after the same operations, and `ringsight_kernels::schedule` says why somebody sees it.
        let picked = plan.picker.pick(parts.len(), task.info.bytes);
        let mut channel_mask = 0;
        for (channel, part) in picked.into_iter().zip(parts) {
            plan.works.push(PlannedWork {
                task,
                channel,
                part,
                route: Route::Ring,
            });
            channel_mask |= 1 << channel;
        }
        plan.ops.push(PlannedOp {
            task,
            twin: None,
            channel_mask,
        });
    }

    /// Shows the tag of an operation that is made of messages to the next rank of a ring, and looks at the previous one's.
    fn show_tag(&mut self, task: &'a Task) {
        let Capabilities { channels, ranks, .. } = *self.capabilities;
        let (plan, _) = self.with_room(channels);
        if ranks > 1 {
            for channel in plan.picker.pick(1, 0) {
                plan.works.push(PlannedWork {
                    task,
                    channel,
                    part: 0..0,
                    route: Route::Tag,
                });
            }
            plan.tagged.push(task);
        }
    }

    /// Puts every message into a plan; gives the operations that are made of several.
    fn lay_out_messages(&mut self, messages: &'a GroupMessages) -> Result<Vec<Spread<'a>>> {
        let tasks = messages.tasks();
        // By their task.
        let mut spreads: BTreeMap<usize, Spread<'a>> = BTreeMap::new();
        let mut spread = |message: &Message, plan: usize, mask: u64| {
            let spread = spreads.entry(message.task).or_insert_with(|| Spread {
                task: &tasks[message.task],
                masks: BTreeMap::new(),
            });
            *spread.masks.entry(plan).or_default() |= mask;
        };
        let Capabilities { rank, ranks, .. } = *self.capabilities;
        for round in messages.rounds(rank, ranks)? {
            let needed = round
                .messages()
                .map(|message| tasks[message.task].method.channels)
                .sum();
            for (send, recv) in &round.to_self {
                let (plan, index) = self.with_room(needed);
                let (task, twin) = (&tasks[send.task], &tasks[recv.task]);
                let channel_mask = add_to_self(plan, task, twin, send.address, recv.address)?;
                if task.request.function.is_p2p() {
                    plan.ops.push(PlannedOp {
                        task,
                        twin: Some(twin),
                        channel_mask,
                    });
                } else {
                    spread(send, index, channel_mask);
                }
            }
            for (message, is_send) in [(round.send, true), (round.recv, false)] {
                let Some(message) = message else { continue };
                let task = &tasks[message.task];
                if task.method.path.is_peer_access() {
                    // Cut between rounds, as all plans of messages.
                    let needed = 1 + usize::from(is_send && round.recv.is_some());
                    add_in_peer_memory(self.with_room_in_peer_memory(needed), task);
                    continue;
                }
                let capabilities = self.capabilities;
                let (plan, index) = self.with_room(needed);
                let channel_mask = add_message(plan, capabilities, task, &message, is_send);
                if task.request.function.is_p2p() {
                    plan.ops.push(PlannedOp {
                        task,
                        twin: None,
                        channel_mask,
                    });
                } else {
                    spread(&message, index, channel_mask);
                }
            }
        }
        Ok(spreads.into_values().collect())
    }

    fn begin(&mut self, kind: Kind) -> &mut Plan<'a> {
        let index = self.plans.len();
        self.plans.push(Plan::new(kind, self.capabilities.channels));
        &mut self.plans[index]
    }

    /// A plan with room for `elements` more work elements, and its index: the last one, or a new one. Something always
    /// fits into an empty plan.
    fn with_room(&mut self, elements: usize) -> (&mut Plan<'a>, usize) {
        let fits = |plan: &Plan<'_>| {
            let used = plan.works.len();
            plan.kind == Kind::Channels && (used == 0 || used + elements <= self.budget)
        };
        if !self.plans.last().is_some_and(fits) {
            self.begin(Kind::Channels);
        }
        let index = self.plans.len() - 1;
        (&mut self.plans[index], index)
    }

    /// A plan with room for so many more messages in peer memory.
    fn with_room_in_peer_memory(&mut self, needed: usize) -> &mut Plan<'a> {
        let fits = |plan: &Plan<'_>| {
            plan.kind == Kind::PeerMessages && plan.works.len() + needed <= MAX_PEER_MESSAGES
        };
        if !self.plans.last().is_some_and(fits) {
            self.begin(Kind::PeerMessages);
        }
        let index = self.plans.len() - 1;
        &mut self.plans[index]
    }
}

/// Adds an operation that a kernel does in peer memory.
fn add_in_peer_memory<'a>(plan: &mut Plan<'a>, task: &'a Task) {
    plan.works.push(PlannedWork {
        task,
        channel: 0,
        part: 0..task.request.count,
        route: Route::Peers,
    });
    plan.ops.push(PlannedOp {
        task,
        twin: None,
        channel_mask: 1,
    });
}

/// Adds a message from this rank to itself: a send and its receive, or a part of an operation made of messages.
/// Returns its channels.
fn add_to_self<'a>(plan: &mut Plan<'a>, send: &'a Task, recv: &Task, from: usize, to: usize) -> Result<u64> {
    let (sent, received) = (send.request.bytes_of_one(), recv.request.bytes_of_one());
    if sent != received {
        return Err(Error::usage(format!(
            "ncclSend to oneself of {sent} bytes is paired with ncclRecv from oneself of {received} bytes"
        )));
    }
    let parts = channels::split(
        send.request.count,
        send.request.data_type.size(),
        send.method.channels,
    );
    let mut channel_mask = 0;
    for (channel, part) in (0u8..).zip(parts) {
        if part.is_empty() && channel > 0 {
            break;
        }
        plan.works.push(PlannedWork {
            task: send,
            channel,
            part,
            route: Route::Local { from, to },
        });
        channel_mask |= 1 << channel;
    }
    Ok(channel_mask)
}

/// Adds one end of a message through FIFOs; returns its channels.
fn add_message<'a>(
    plan: &mut Plan<'a>,
    capabilities: &Capabilities,
    task: &'a Task,
    message: &Message,
    is_send: bool,
) -> u64 {
    let Capabilities {
        rank,
        ranks,
        channels: available,
        ..
    } = *capabilities;
    let Message { peer, address, .. } = *message;
    let (source, destination, route) = if is_send {
        (rank, peer, Route::Send { peer, from: address })
    } else {
        (peer, rank, Route::Recv { peer, to: address })
    };
    let parts = channels::split(
        task.request.count,
        task.request.data_type.size(),
        task.method.channels,
    );
    let mut channel_mask = 0;
    for (index, part) in parts.into_iter().enumerate().filter(|(_, part)| !part.is_empty()) {
        let channel = channels::p2p_channel(source, destination, ranks, index, available);
        plan.works.push(PlannedWork {
            task,
            channel,
            part,
            route,
        });
        channel_mask |= 1 << channel;
    }
    channel_mask
}
