//! An end as it is at one moment.

use std::time::Duration;

use ringsight_failover::{PathHealth, PathView};

use super::{driver::Driver, end::Agreement};

/// What an end is in. Times are by [`Hub::now`](crate::hub::Hub::now).
#[derive(Clone, Debug)]
pub struct Condition {
    /// When that was.
    pub now: Duration,
    /// Number of the last switch.
    pub epoch: u32,
    /// It is between two paths.
    pub recovers: bool,
    /// It has failed.
    pub failed: bool,
    /// In their order.
    pub paths: Vec<PathCondition>,
}

/// One of its paths.
#[derive(Clone, Debug)]
pub struct PathCondition {
    /// What this end has of it.
    pub view: PathView,
    /// What all connections of the process know of it.
    pub health: PathHealth,
    /// When its failures will be forgotten, if it goes on working.
    pub recovered: Option<Duration>,
    /// When it is made anew, where this end has set a time. The sender sets none: the receiver decides.
    pub next_attempt: Option<Duration>,
}

impl Condition {
    pub(super) fn new(driver: &Driver, agreement: &impl Agreement) -> Self {
        let window = driver.recovery_window();
        let paths = driver
            .health()
            .into_iter()
            .zip(agreement.views())
            .map(|(health, view)| PathCondition {
                view,
                recovered: health.recovering_since.map(|since| since + window),
                health,
                next_attempt: agreement.next_attempt(view.link.path),
            });
        Self {
            now: driver.now(),
            epoch: agreement.epoch(),
            recovers: agreement.is_recovering(),
            failed: agreement.is_over(),
            paths: paths.collect(),
        }
    }
}
