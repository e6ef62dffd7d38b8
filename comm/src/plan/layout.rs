//! Which task goes into which plan.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_kernels::cuda::messages;
use ringsight_records::Function;
use smallvec::{SmallVec, smallvec};

use super::{
    Exchange, Plan, again,
    algorithm::{self, Engines},
    builder::Builder,
    estimate, table,
};
use crate::{
    communicator::Communicator,
    error::{Error, Result},
    launch::{
        observer::{OpState, Shared},
        reclaim::Spare,
    },
    op::{Method, Request, Task, WindowBuffer, is_made_of_messages},
};

/// Chooses how an operation is done. `window` is the symmetric window that its buffer is in; it stays in the request only if copy engines do
/// the operation there.
pub(crate) fn choose(
    request: &mut Request,
    window: Option<WindowBuffer>,
    comm: &Communicator,
) -> Result<Method> {
    let function = request.function;
    let bytes = request.bytes_of_choice(comm.ranks);
    let engines = match &window {
        None => Engines::NoWindow,
        Some(buffer) if buffer.window.is_none() => Engines::NotReached,
        Some(buffer) if buffer.serves(request) => Engines::Reach,
        Some(_) => Engines::Unfit,
    };
    let asked = algorithm::Asked {
        engines,
        function,
        reduce_op: request.reduce_op,
        data_type: request.data_type,
        bytes,
        ranks: comm.ranks,
        slot_bytes: comm.slot_bytes,
        one_shot: comm.one_shot,
        peers: comm.peers.is_some(),
        limits: comm.limits,
    };
    let row = table::choose(&asked).ok_or_else(|| table::none_left(&asked))?;
    request.window = window.filter(|_| row.path.is_copy_engine());
    let parts = comm.near_parts();
    // Of a message that there is room for, the same on all ranks; an operation round rings has all channels.
    let available = match parts {
        Some(parts) if is_made_of_messages(function) => parts,
        _ => comm.channels(),
    };
    Ok(Method {
        algorithm: row.algorithm,
        path: row.path,
        channels: row.path.channels(bytes, available, parts.is_some()),
    })
}

/// Whether a task drains with the messages: its function is made of messages, and no kernel does all of it in peer memory.
pub(crate) fn drains_with_messages(function: Function, method: &Method) -> bool {
    function.is_p2p() || is_made_of_messages(function) && !method.path.is_peer_access()
}

/// The plans of a group on one communicator. They stay where they are made: each has several hundred bytes.
pub(crate) struct Plans<'a> {
    comm: &'a Communicator,
    collectives: &'a [Task],
    exchange: &'a Exchange,
    /// They are captured.
    persistent: bool,
    /// `None`: only to know what they would take.
    group: Option<u32>,
    /// For the next plan.
    spare: Option<Spare>,
    made: SmallVec<[Builder<'a>; 1]>,
    /// The only one, where that needs no making.
    again: Option<Plan>,
}

impl<'a> Plans<'a> {
    /// None yet, of a group; without one they only say what they would take. The first plan has the memory of one that is over, if
    /// there is one.
    pub(crate) fn new(
        comm: &'a Communicator,
        (collectives, exchange): (&'a [Task], &'a Exchange),
        persistent: bool,
        group: Option<u32>,
        spare: Option<Spare>,
    ) -> Self {
        Self {
            comm,
            collectives,
            exchange,
            persistent,
            group,
            spare,
            made: SmallVec::new(),
            again: None,
        }
    }

    /// One that is in the making.
    pub(super) fn of(comm: &'a Communicator, builder: Builder<'a>) -> Self {
        Self {
            made: smallvec![builder],
            ..Self::new(comm, (&[], Exchange::none()), false, None, None)
        }
    }

    /// Plans everything that a group asks of the communicator.
    pub(crate) fn build(&mut self) -> Result<()> {
        if let ([task], [], Some(group), false) = (
            self.collectives,
            self.exchange.tasks(),
            self.group,
            self.persistent,
        ) {
            again::plan(self.comm, &mut self.spare, task, group, &mut self.again)?;
            if self.again.is_some() {
                return Ok(());
            }
        }
        self.lay_out()?;
        self.made
            .iter_mut()
            .try_for_each(|plan| plan.finish(self.persistent))
    }

    pub(crate) fn len(&self) -> usize {
        self.made.len() + usize::from(self.again.is_some())
    }

    pub(crate) fn first(&self) -> Option<&Plan> {
        self.from(0).next()
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Plan> {
        let made = self.made.iter_mut().map(|builder| &mut builder.plan);
        self.again.iter_mut().chain(made).nth(index)
    }

    /// All from that one on.
    pub(crate) fn from(&self, index: usize) -> impl Iterator<Item = &Plan> {
        let made = self.made.iter().map(|builder| &builder.plan);
        self.again.iter().chain(made).skip(index)
    }

    /// What they would take.
    pub(super) fn loads(&self) -> impl Iterator<Item = estimate::Load> {
        self.made.iter().filter_map(|plan| plan.simulated)
    }

    /// Work elements of a plan.
    fn budget(&self) -> usize {
        if self.persistent {
            usize::MAX
        } else {
            self.comm.work_fifo_depth / 2
        }
    }

    /// Puts every task into a plan.
    pub(super) fn lay_out(&mut self) -> Result<()> {
        let tasks = self.exchange.tasks();
        // In call order, so that ranks that call in another order differ.
        let mut of_messages = tasks
            .iter()
            .filter(|task| !task.request.function.is_p2p())
            .peekable();
        for task in self.collectives {
            while let Some(earlier) = of_messages.next_if(|other| other.info.seq < task.info.seq) {
                self.with_room(self.comm.channels()).0.show_tag(earlier)?;
            }
            if task.method.path.is_peer_access() {
                self.alone().add_among_peers(task)?;
                continue;
            }
            // Not by its own channels: where ranks call something different, it shall be in the same plan all the same.
            let (plan, _) = self.with_room(self.comm.channels());
            plan.add_collective(task)?;
        }
        for task in of_messages {
            self.with_room(self.comm.channels()).0.show_tag(task)?;
        }
        if !tasks.is_empty() {
            self.lay_out_messages()?;
        }
        Ok(())
    }

    /// Puts every message into a plan.
    fn lay_out_messages(&mut self) -> Result<()> {
        let exchange = self.exchange;
        let tasks = exchange.tasks();
        // Operations made of several messages, by their task.
        let mut spreads: BTreeMap<usize, Spread> = BTreeMap::new();
        for round in exchange.rounds(self.comm.rank, self.comm.ranks)? {
            let needed = round
                .messages()
                .map(|message| tasks[message.task].method.channels)
                .sum();
            for (send, recv) in &round.to_self {
                let (plan, index) = self.with_room(needed);
                let (task, twin) = (&tasks[send.task], &tasks[recv.task]);
                let mask = plan.add_to_self(task, twin, send.address, recv.address)?;
                if !task.request.function.is_p2p() {
                    spreads.entry(send.task).or_default().add(index, mask, 0);
                }
            }
            for (message, is_send) in [(round.send, true), (round.recv, false)] {
                let Some(message) = message else { continue };
                let task = &tasks[message.task];
                if task.method.path.is_peer_access() {
                    // Cut between rounds, as all plans of messages.
                    let needed = 1 + usize::from(is_send && round.recv.is_some());
                    self.with_room_among_peers(needed).add_among_peers(task)?;
                    continue;
                }
                let (plan, index) = self.with_room(needed);
                let (mask, proxies) = plan.add_message(task, message, is_send)?;
                if task.request.function.is_p2p() {
                    plan.add_op(task, None, mask, proxies, task.method);
                } else {
                    spreads.entry(message.task).or_default().add(index, mask, proxies);
                }
            }
        }
        for (task, spread) in spreads {
            self.add_spread(&tasks[task], &spread)?;
        }
        Ok(())
    }

    /// A plan with room for `elements` more work elements, and its index: the last one, or a new one. Something always
    /// fits into an empty plan.
    fn with_room(&mut self, elements: usize) -> (&mut Builder<'a>, usize) {
        if self.made.last().is_none_or(|plan| {
            plan.alone || plan.is_among_peers || plan.used > 0 && plan.used + elements > self.budget()
        }) {
            self.made
                .push(Builder::new(self.comm, self.group, self.spare.take()));
        }
        let index = self.made.len() - 1;
        (&mut self.made[index], index)
    }

    /// A plan with room for so many more messages among peers.
    fn with_room_among_peers(&mut self, needed: usize) -> &mut Builder<'a> {
        if self
            .made
            .last()
            .is_none_or(|plan| !plan.is_among_peers || plan.used + needed > messages::MAX)
        {
            self.alone().is_among_peers = true;
        }
        let index = self.made.len() - 1;
        &mut self.made[index]
    }

    /// A plan for one operation that has a launch of its own.
    fn alone(&mut self) -> &mut Builder<'a> {
        let builder = Builder::new(self.comm, self.group, self.spare.take());
        let place = self.made.len();
        self.made.push(builder);
        let builder = &mut self.made[place];
        builder.alone = true;
        builder
    }

    /// Enters an operation whose messages have been added: with the plan that it begins in, and as seen by all.
    fn add_spread(&mut self, task: &Task, spread: &Spread) -> Result<()> {
        let mask = spread.masks.values().fold(0, |all, mask| all | mask);
        let (Some(begins), Some(ends)) = (spread.masks.keys().next(), spread.masks.keys().last()) else {
            return Err(Error::internal("an operation without messages"));
        };
        if begins == ends || self.group.is_none() {
            self.made[*begins].add_op(task, None, mask, spread.proxies, task.method);
            return Ok(());
        }
        let masks: Vec<u64> = spread.masks.values().copied().collect();
        let state = OpState::new(task.info, None, mask.count_ones(), spread.proxies);
        let state = Arc::new(state.split(&masks));
        self.made[*begins].announce(task, mask, spread.proxies, task.method);
        for index in spread.masks.keys() {
            self.made[*index].contents.shared.push(Shared {
                state: state.clone(),
                begins: index == begins,
                ends: index == ends,
            });
        }
        Ok(())
    }
}

/// Where the messages of one operation went.
#[derive(Debug, Default)]
struct Spread {
    /// Channels taken, by index of the plan.
    masks: BTreeMap<usize, u64>,
    /// Proxy operations.
    proxies: u32,
}

impl Spread {
    fn add(&mut self, plan: usize, mask: u64, proxies: u32) {
        *self.masks.entry(plan).or_default() |= mask;
        self.proxies += proxies;
    }
}
