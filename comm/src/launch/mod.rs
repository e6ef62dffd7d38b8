//! Handing plans to the device: streams, order, capture, network work.

pub mod observer;
mod order;
mod progress;
pub mod reclaim;
mod times;

use std::sync::Arc;

use ringsight_records::{Flags, Kind, Record, State, description::Time};
use smallvec::SmallVec;

pub(crate) use order::Order;
use reclaim::Ready;
pub(crate) use times::KEPT;

use crate::{
    communicator::{Communicator, Planner},
    device::{Capture, Device, End, Stream},
    error::{Error, Result},
    observe,
    op::OpInfo,
    plan::Plans,
    watchdog::Watch,
};

/// Everything that one group launches on one communicator.
pub(crate) struct Launching<'a> {
    pub(crate) comm: &'a Arc<Communicator>,
    /// The streams that the caller named, in the order of their first use; the first one carries the kernels.
    pub(crate) streams: &'a [Stream],
    pub(crate) capture: Option<Capture>,
    /// That was asked by the call that launches: it cannot have changed.
    pub(crate) at_once: bool,
    pub(crate) plans: Plans<'a>,
    /// The plan to be launched next.
    pub(crate) next: usize,
    /// How other streams are to wait for the one before it.
    pub(crate) end: End,
}

/// Makes later work of `waiting` wait for the present work of `stream`.
fn join(device: &dyn Device, waiting: Stream, stream: Stream) -> Result<()> {
    let event = device.order_event_create()?;
    let joined = device
        .event_record(event, stream)
        .and_then(|()| device.stream_wait_event(waiting, event));
    device.event_destroy(event)?;
    Ok(joined?)
}

impl Launching<'_> {
    fn stream(&self) -> Stream {
        self.streams[0]
    }

    /// Joins the caller's other streams and the communicator's earlier work into the stream of the kernels. Waits while
    /// the work FIFO has no room for the first plan: the others may wait for their peers' plans of the same group, so
    /// these are not kept from each other.
    pub(crate) fn prepare(&self, device: &dyn Device, planner: &mut Planner) -> Result<()> {
        if let (None, Some(first)) = (self.capture, self.plans.first()) {
            let works = first.ready.as_ref().map_or(0, Ready::works);
            let depth = self.comm.work_fifo_depth;
            let over = || self.comm.check_usable().is_err();
            if !planner.plans.wait_for_room(works, depth, over) {
                self.comm.check_usable()?;
            }
        }
        for other in &self.streams[1..] {
            join(device, self.stream(), *other)?;
        }
        let Planner {
            plans,
            order,
            launcher,
            ..
        } = planner;
        order.retain(device, |graph| plans.holds(graph));
        order.enter(device, self.stream(), self.capture, launcher, plans.has_graphs())
    }

    /// Launches the next plan, if there is one, and lists its operations; says whether there are more plans.
    pub(crate) fn launch(
        &mut self,
        device: &dyn Device,
        planner: &mut Planner,
        launched: &mut SmallVec<[OpInfo; 1]>,
    ) -> Result<bool> {
        let Some(plan) = self.plans.get_mut(self.next) else {
            return Ok(false);
        };
        let Some(Ready { flight, observer }) = plan.ready.take() else {
            return Err(Error::internal("a plan is launched once"));
        };
        let stream = self.streams[0];
        let graph = self.capture.map_or(0, |capture| capture.id);
        // Network work of captured plans is asked for by each replay. While graphs live, eager plans go the same way:
        // posted at once, theirs would overtake that of a replay which is still queued. So do those that follow until
        // the last of these is taken up.
        let asked_for = !plan.proxy_ops.is_empty()
            && (graph != 0 || planner.plans.has_graphs() || self.comm.posting.is_behind());
        if let Some(capture) = self.capture {
            self.comm.retain_graph(device, capture, planner)?;
        }
        if asked_for {
            self.comm
                .posting
                .ask(device, stream, graph, &plan.proxy_ops, &observer)?;
        }
        let events = self.comm.watch().and_then(Watch::events);
        let track = events
            .map(|events| events.begin(device, stream, self.capture))
            .transpose()?;
        if graph == 0 {
            // While the driver launches this one, what the next call begins with comes from the cores that had it.
            planner.plans.ask_for_next();
            observe::ask_for_next();
        }
        let launch = planner.plans.enter(graph, flight).launch.clone();
        // Network work that is posted at once comes behind the launch.
        let networked = (!asked_for && !plan.proxy_ops.is_empty()).then(|| observer.clone());
        let start = observe::now_ns();
        if let Some(watch) = self.comm.watch() {
            // Before it is noted as called: what was called and is not on its way counts as done.
            watch.enter(observer, track.clone(), graph, start);
        }
        self.comm.checks.note(graph, &plan.calls);
        let result = match self.capture {
            None if self.at_once => {
                device.launch_kernel_at_once(self.comm.device, stream, launch, &mut planner.launcher)
            }
            _ => device.launch_kernel(stream, launch, &mut planner.launcher),
        };
        let end = observe::now_ns();
        self.end = match result {
            Ok(end) => end,
            Err(error) => {
                // First: what was called and is not on its way counts as done.
                self.comm.checks.withdraw(graph, &plan.calls);
                if let Some(watch) = self.comm.watch() {
                    watch.withdraw(plan.number);
                }
                if let Some((events, track)) = events.zip(track.as_ref()) {
                    events.withdraw(track);
                }
                planner.plans.withdraw(plan.number);
                return Err(error.into());
            }
        };
        if let Some(observer) = networked {
            self.comm.posting.post(&plan.proxy_ops, &observer);
        }
        // After the network work is posted, which the kernel has to have whatever comes of this.
        let ended = events
            .zip(track.as_ref())
            .map_or(Ok(()), |(events, track)| events.end(device, stream, track));
        if ended.is_err()
            && let Some(watch) = self.comm.watch()
        {
            watch.lose_track(plan.number);
        }
        for info in &plan.ops {
            observe::set_times(info.op, [(Time::LaunchStart, start), (Time::LaunchEnd, end)]);
            info.emit(info.kind(), State::STOP, end);
            launched.push(*info);
        }
        if observe::wants(Kind::KernelLaunch) {
            let record = Record {
                comm: self.comm.id,
                rank: self.comm.rank,
                op: plan.number,
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
        self.next += 1;
        ended?;
        Ok(self.next < self.plans.len())
    }

    /// Launches all plans that are left.
    pub(crate) fn launch_all(
        &mut self,
        device: &dyn Device,
        planner: &mut Planner,
        launched: &mut SmallVec<[OpInfo; 1]>,
    ) -> Result<()> {
        while self.launch(device, planner, launched)? {}
        Ok(())
    }

    /// After a failure: ends what the plans that were not launched will never do.
    pub(crate) fn abandon(&self) {
        for plan in self.plans.from(self.next) {
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
    pub(crate) fn finish_after(
        &self,
        result: Result<()>,
        device: &dyn Device,
        planner: &mut Planner,
    ) -> Result<()> {
        if result.is_err() && self.next == 0 {
            return result;
        }
        let finished = self.finish(device, planner);
        result.and(finished)
    }

    /// Lets the caller's other streams and the communicator's next operation wait for the kernels.
    pub(crate) fn finish(&self, device: &dyn Device, planner: &mut Planner) -> Result<()> {
        let others = &self.streams[1..];
        let end = if others.is_empty() { self.end } else { End::Marked };
        let end = planner.order.leave(device, self.stream(), self.capture, end)?;
        for other in others {
            device.stream_wait_event(*other, end)?;
        }
        Ok(())
    }
}
