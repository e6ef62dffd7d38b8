//! One bound plan, from ready to retired.

use std::{any::Any, sync::Arc};

use ringsight_comm_base::error::{Error, Result};
use ringsight_kernels::{Connections, Launch};

use crate::{
    op::Method,
    progress::{PlanObserver, Stage},
};

/// A plan that is ready to be launched.
pub(super) struct ReadyPlan {
    pub(super) plan: SubmittedPlan,
    /// The launch's. The launch hands it on: counting another owner of what the device's threads have touched costs more than moving it.
    pub(super) observer: Arc<PlanObserver>,
}

impl ReadyPlan {
    /// Of a launch whose observer is made for this plan.
    pub(super) fn new(launch: Arc<Launch>, number: u32, cached: Option<Method>) -> Result<Self> {
        let observer: Arc<dyn Any + Send + Sync> = launch.observer.clone();
        let observer = observer
            .downcast()
            .map_err(|_| Error::internal("a plan is observed by what is made for it"))?;
        let plan = SubmittedPlan {
            number,
            launch,
            cached,
        };
        Ok(Self { plan, observer })
    }
}

/// A plan that is to be launched, or that the device may still run.
pub(super) struct SubmittedPlan {
    pub(super) number: u32,
    /// Kept for the communicator's life with the plan; the device holds its own reference. Its observer is a [`PlanObserver`].
    pub(super) launch: Arc<Launch>,
    /// How its operation is done, if the plan can serve the same call again ([`super::pool`]).
    pub(super) cached: Option<Method>,
}

impl SubmittedPlan {
    /// Work elements, all channels together.
    pub(super) fn works(&self) -> usize {
        let channels = self.launch.channels.iter();
        channels.map(|channel| channel.work.len()).sum()
    }

    /// How far it is; `None` if something else observes it.
    pub(super) fn stage(&self) -> Option<Stage> {
        let observer: &dyn Any = &*self.launch.observer;
        observer.downcast_ref().map(PlanObserver::stage)
    }

    /// Whether copy engines work for it in a window.
    pub(super) fn has_window(&self) -> bool {
        let mut works = self.launch.channels.iter().flat_map(|channel| &channel.work);
        works.any(|work| matches!(work.connections, Connections::CopyEngine { .. }))
    }
}
