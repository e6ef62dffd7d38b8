//! Handing plans to the device: connections and buffers, streams, order, capture, network work.
//!
//! One group's launches on one communicator are a [`GroupLaunch`]. Its steps, each on the thread that ends the group:
//!
//! 1. [`GroupLaunch::plan`] lays the group's tasks out into plans ([`crate::plan`]) and binds them: connections are made, buffers exported,
//!    operations described. A call that was made before takes its plan from the cache ([`pool`]).
//! 2. [`GroupLaunch::prepare`] makes the stream of the kernels wait for the caller's other streams and for the communicator's earlier work
//!    ([`order`]).
//! 3. [`GroupLaunch::launch_next`] launches one plan. It is a transaction ([`transaction`]): a plan that the device refuses leaves nothing behind.
//! 4. [`GroupLaunch::finish_after`] makes the caller's other streams and the communicator's next operation wait for the kernels.
//!
//! What is launched is submitted until the device reports its end, and is then retired ([`submitted`]).
//!
//! A communicator's launches share a [`LaunchContext`], which never changes, and a [`LaunchQueue`], which one thread at a time holds.

mod announce;
mod bind;
mod context;
mod order;
mod pool;
mod posting;
mod ready;
mod stuck;
mod submitted;
mod transaction;

use std::time::Duration;

use ringsight_comm_base::{
    error::{Error, Result},
    log,
};
use ringsight_records::{Flags, Kind, Record, State, description::Time};
use smallvec::SmallVec;

pub(crate) use context::{LaunchContext, LaunchQueue};
pub(crate) use order::Order;
pub(crate) use pool::PooledPlan;
pub(crate) use posting::{OutstandingProxyOps, Posting};
pub(crate) use submitted::SubmittedPlans;

use self::{
    announce::{Described, announce},
    bind::{Binding, BoundPlan, BoundPlans},
    transaction::LaunchTransaction,
};
use crate::{
    device::{Capture, Device, LaunchEnd, Stream},
    observe,
    op::{OpInfo, Task},
    plan::{self, GroupMessages},
};

/// How long what a group asks of one communicator would take, by the model of [`plan::estimate`]. Nothing is connected, described or launched.
///
/// # Errors
/// As [`GroupLaunch::plan`].
pub(crate) fn estimate(
    context: &LaunchContext,
    collectives: &[Task],
    messages: &GroupMessages,
    persistent: bool,
) -> Result<Duration> {
    let layout = plan::lay_out(&context.capabilities, collectives, messages, persistent)?;
    let loads = layout.plans.iter().map(|plan| bind::estimate(context, plan));
    loads.map(|load| Ok(load?.time())).sum()
}

/// Everything that one group launches on one communicator.
pub(crate) struct GroupLaunch<'a> {
    context: &'a LaunchContext,
    /// The streams that the caller named, in the order of their first use; the first one carries the kernels.
    streams: &'a [Stream],
    capture: Option<Capture>,
    /// `capture` was queried earlier in this call, so the device does not query it again.
    at_once: bool,
    plans: BoundPlans,
    /// The plan to be launched next.
    next: usize,
    /// How other streams are to wait for the plan before it.
    end: LaunchEnd,
}

/// Makes later work of `waiting` wait for the present work of `stream`.
fn join(device: &dyn Device, waiting: Stream, stream: Stream) -> Result<()> {
    let event = device.event_create()?;
    let joined = device
        .event_record(event, stream)
        .and_then(|()| device.stream_wait_event(waiting, event));
    device.event_destroy(event)?;
    Ok(joined?)
}

impl<'a> GroupLaunch<'a> {
    /// Nothing to launch yet, in these streams, of which there is at least one. `at_once`: `capture` was queried earlier in this call.
    pub(crate) fn new(
        context: &'a LaunchContext,
        streams: &'a [Stream],
        capture: Option<Capture>,
        at_once: bool,
    ) -> Self {
        Self {
            context,
            streams,
            capture,
            at_once,
            plans: BoundPlans::new(),
            next: 0,
            end: LaunchEnd::ByEvent,
        }
    }

    /// A plan that never ends on this rank, and that no other rank takes part in.
    ///
    /// # Errors
    /// The system has no memory for a FIFO.
    pub(crate) fn stuck(context: &'a LaunchContext, streams: &'a [Stream], group: u32) -> Result<Self> {
        Ok(Self {
            plans: stuck::stuck(context, streams[0], group)?,
            ..Self::new(context, streams, None, false)
        })
    }

    /// Plans everything that a group asks of the communicator. The first plan takes `pooled`, if there is one.
    ///
    /// # Errors
    /// Messages of this rank to itself that do not pair; a connection that cannot be made; the device's.
    pub(crate) fn plan(
        &mut self,
        (collectives, messages): (&[Task], &GroupMessages),
        group: u32,
        mut pooled: Option<PooledPlan>,
    ) -> Result<()> {
        if let ([task], [], None) = (collectives, messages.tasks(), self.capture)
            && self.plan_from_cache(task, group, &mut pooled)?
        {
            return Ok(());
        }
        let persistent = self.capture.is_some();
        let layout = plan::lay_out(&self.context.capabilities, collectives, messages, persistent)?;
        self.plans = bind::bind(self.context, &layout, Binding { group, persistent }, pooled)?;
        Ok(())
    }

    /// Takes the plan of a call that is alone in its group, if `pooled` is the plan of an earlier call with the same arguments. Returns whether it is.
    fn plan_from_cache(&mut self, task: &Task, group: u32, pooled: &mut Option<PooledPlan>) -> Result<bool> {
        let Some(pooled) = pooled.take_if(|pooled| pooled.is_reserved_for(task.info.op)) else {
            return Ok(false);
        };
        let number = observe::next_plan();
        let Some(ready) = pooled.renew(number, task.info)? else {
            return Ok(false);
        };
        tracing::trace!(target: log::TUNING, "plan {number} is that of an earlier such call");
        let mut plan = BoundPlan::new(number);
        plan.ready = Some(ready);
        let described = Described {
            method: task.method,
            channel_mask: 1,
            proxy_ops: 0,
        };
        announce(task, described, (self.context.capabilities.ranks, group, number));
        plan.enter(task);
        self.plans.push(plan);
        Ok(true)
    }

    fn stream(&self) -> Stream {
        self.streams[0]
    }

    /// Joins the caller's other streams and the communicator's earlier work into the stream of the kernels. Waits while
    /// the work FIFO has no room for the first plan: the others may wait for their peers' plans of the same group, so
    /// these are not kept from each other.
    ///
    /// # Errors
    /// Of `check_usable`, which says whether the communicator still works; the device's.
    pub(crate) fn prepare(
        &self,
        device: &dyn Device,
        queue: &mut LaunchQueue,
        check_usable: impl Fn() -> Result<()>,
    ) -> Result<()> {
        if let (None, Some(first)) = (self.capture, self.plans.first()) {
            let works = first.ready.as_ref().map_or(0, |ready| ready.plan.works());
            let depth = self.context.capabilities.work_fifo_depth;
            if !queue
                .submitted
                .wait_for_room(works, depth, || check_usable().is_err())
            {
                check_usable()?;
            }
        }
        for other in &self.streams[1..] {
            join(device, self.stream(), *other)?;
        }
        let LaunchQueue {
            submitted,
            order,
            launcher,
        } = queue;
        order.retain(device, |graph| submitted.holds(graph));
        order.enter(
            device,
            self.stream(),
            self.capture,
            launcher,
            submitted.has_graphs(),
        )
    }

    /// Launches the next plan, if there is one, and lists its operations; says whether there are more plans.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn launch_next(
        &mut self,
        device: &dyn Device,
        queue: &mut LaunchQueue,
        launched: &mut SmallVec<[OpInfo; 1]>,
    ) -> Result<bool> {
        let (stream, context) = (self.stream(), self.context);
        let Some(plan) = self.plans.get_mut(self.next) else {
            return Ok(false);
        };
        let ready = plan.ready.take();
        let ready = ready.ok_or_else(|| Error::internal("a plan is launched once"))?;
        let plan = &*plan;
        let graph = self.capture.map_or(0, |capture| capture.id);
        // Each replay requests the network work of a captured plan. While graphs live, eager plans have theirs requested too: posted at
        // once, it would overtake that of a replay that is still queued. The same holds for the plans that follow, until the last of these
        // requests is served.
        let is_networked = !plan.proxy_ops.is_empty();
        let is_requested = is_networked
            && (graph != 0 || queue.submitted.has_graphs() || context.posting.has_pending_requests());
        if let Some(capture) = self.capture {
            context.retain_graph(device, capture, queue)?;
        }
        if is_requested {
            context
                .posting
                .expect_request(device, stream, graph, &plan.proxy_ops, &ready.observer)?;
        }
        // Network work that is posted at once comes behind the launch.
        let posted = (is_networked && !is_requested).then(|| ready.observer.clone());
        let LaunchQueue {
            submitted, launcher, ..
        } = queue;
        let place = (device, stream, self.capture);
        let (transaction, launch) = LaunchTransaction::begin(context, submitted, plan, ready, place)?;
        let start = transaction.start_ns();
        self.end = if self.capture.is_none() && self.at_once {
            device.launch_prepared(context.device, stream, launch, launcher)
        } else {
            device.launch_kernel(stream, launch, launcher)
        }?;
        let end = observe::now_ns();
        if let Some(observer) = posted {
            context.posting.post(&plan.proxy_ops, &observer);
        }
        // After the network work is posted, which the kernel has to have whatever comes of this.
        let committed = transaction.commit(device, stream);
        for info in &plan.ops {
            observe::set_times(info.op, [(Time::LaunchStart, start), (Time::LaunchEnd, end)]);
            info.emit(info.kind(), State::STOP, end);
            launched.push(*info);
        }
        emit_launch(context, plan.number, (stream, graph), start, end);
        self.next += 1;
        committed?;
        Ok(self.next < self.plans.len())
    }

    /// Launches all plans that are left.
    ///
    /// # Errors
    /// As [`Self::launch_next`].
    pub(crate) fn launch_all(
        &mut self,
        device: &dyn Device,
        queue: &mut LaunchQueue,
        launched: &mut SmallVec<[OpInfo; 1]>,
    ) -> Result<()> {
        while self.launch_next(device, queue, launched)? {}
        Ok(())
    }

    /// After a failure: ends what the plans that were not launched will never do.
    pub(crate) fn abandon(&self) {
        for plan in self.plans.iter().skip(self.next) {
            let now = observe::now_ns();
            for info in &plan.ops {
                info.emit(info.kind(), State::ABORTED, now);
            }
            if let Some(ready) = &plan.ready {
                ready.observer.abandon(now);
            }
        }
    }

    /// [`Self::finish`], also where something could not be launched: what was launched before is in order all the same.
    ///
    /// # Errors
    /// That of `result`, and the device's.
    pub(crate) fn finish_after(
        &self,
        result: Result<()>,
        device: &dyn Device,
        queue: &mut LaunchQueue,
    ) -> Result<()> {
        if result.is_err() && self.next == 0 {
            return result;
        }
        let finished = self.finish(device, queue);
        result.and(finished)
    }

    /// Lets the caller's other streams and the communicator's next operation wait for the kernels.
    fn finish(&self, device: &dyn Device, queue: &mut LaunchQueue) -> Result<()> {
        let others = &self.streams[1..];
        let end = if others.is_empty() {
            self.end
        } else {
            LaunchEnd::ByEvent
        };
        let end = queue.order.leave(device, self.stream(), self.capture, end)?;
        for other in others {
            device.stream_wait_event(*other, end)?;
        }
        Ok(())
    }
}

/// Writes the records of a kernel launch.
fn emit_launch(context: &LaunchContext, plan: u32, (stream, graph): (Stream, u32), start: u64, end: u64) {
    if !observe::wants(Kind::KernelLaunch) {
        return;
    }
    let record = Record {
        comm: context.comm,
        rank: context.capabilities.rank,
        op: plan,
        value: stream.0 as u64,
        pid: observe::pid(),
        ..Record::new(Kind::KernelLaunch, State::START, start)
    }
    .with_flags(Flags::GRAPH.when(graph != 0));
    observe::emit(&record);
    observe::emit(&Record {
        state: State::STOP,
        time_ns: end,
        ..record
    });
}
