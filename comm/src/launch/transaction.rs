//! What takes part in the launch of one plan, so that a launch that fails leaves nothing behind.

use std::sync::Arc;

use ringsight_comm_base::error::Result;
use ringsight_kernels::Launch;

use super::{
    LaunchContext, SubmittedPlans,
    bind::BoundPlan,
    ready::{ReadyPlan, SubmittedPlan},
};
use crate::{
    checks,
    device::{Capture, Device, Stream},
    observe,
    watchdog::{PlanTracker, TrackedPlan, Watch},
};

/// One plan on its way to the device. It enters, in this order, the event tracker, the submitted plans, the watchdog and the checks. Dropped without
/// [`LaunchTransaction::commit`] it takes the plan back from all of them, in the opposite order.
///
/// The order matters: for the watchdog, an operation that was called and is not on its way counts as done. So the watchdog learns of a plan
/// before the checks do, and forgets it after them.
pub(super) struct LaunchTransaction<'a> {
    context: &'a LaunchContext,
    submitted: &'a mut SubmittedPlans,
    number: u32,
    /// Graph number, 0 for a plan that runs once.
    graph: u32,
    calls: &'a [checks::Entry],
    track: Option<(&'a PlanTracker, Arc<TrackedPlan>)>,
    /// When the plan entered.
    start_ns: u64,
    is_committed: bool,
}

impl<'a> LaunchTransaction<'a> {
    /// Enters a plan that is about to be launched in `stream`; gives what the device is to launch.
    ///
    /// # Errors
    /// The device's, of marking where the plan begins.
    pub(super) fn begin(
        context: &'a LaunchContext,
        submitted: &'a mut SubmittedPlans,
        plan: &'a BoundPlan,
        ReadyPlan {
            plan: ready,
            observer,
        }: ReadyPlan,
        (device, stream, capture): (&dyn Device, Stream, Option<Capture>),
    ) -> Result<(Self, Arc<Launch>)> {
        let events = context.watch().and_then(Watch::tracker);
        let track = match events {
            Some(events) => Some((&**events, events.begin(device, stream, capture)?)),
            None => None,
        };
        let graph = capture.map_or(0, |capture| capture.id);
        if graph == 0 {
            // While the driver launches this plan, the cores that have what the next call begins with hand it over.
            submitted.prefetch_pooled();
            observe::ask_for_next();
        }
        let SubmittedPlan { launch, .. } = submitted.submit(graph, ready);
        let launch = launch.clone();
        let start_ns = observe::now_ns();
        if let Some(watch) = context.watch() {
            let track = track.as_ref().map(|(_, track)| track.clone());
            watch.enter(observer, track, graph, start_ns);
        }
        context.checks.note(graph, &plan.calls);
        let transaction = Self {
            context,
            submitted,
            number: plan.number,
            graph,
            calls: &plan.calls,
            track,
            start_ns,
            is_committed: false,
        };
        Ok((transaction, launch))
    }

    /// When the plan entered.
    pub(super) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// The device has the plan: from here on it stays where it entered. Marks where it ends in `stream`.
    ///
    /// # Errors
    /// The device's, of marking the end. The plan is launched all the same; the watchdog knows that its end is not marked.
    pub(super) fn commit(mut self, device: &dyn Device, stream: Stream) -> Result<()> {
        self.is_committed = true;
        let Some((events, track)) = &self.track else {
            return Ok(());
        };
        let marked = events.end(device, stream, track);
        if marked.is_err()
            && let Some(watch) = self.context.watch()
        {
            watch.stop_tracking(self.number);
        }
        marked
    }
}

impl Drop for LaunchTransaction<'_> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        self.context.checks.withdraw(self.graph, self.calls);
        if let Some(watch) = self.context.watch() {
            watch.withdraw(self.number);
        }
        self.submitted.retire(self.number);
        if let Some((events, track)) = &self.track {
            events.withdraw(track);
        }
    }
}
