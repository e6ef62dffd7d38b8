//! From tasks to plans: what one kernel launch will do.
//!
//! Collectives drain before point-to-point: plans are cut where the work budget ends, and the number of sends and
//! receives differs between ranks. If these came first, ranks would cut their collectives at different places, and the
//! least-loaded channel picker, whose loads begin anew with each plan, would give different answers. AlltoAll, Gather and
//! Scatter are made of messages and drain with them; one of them may have messages in several plans.

pub(crate) mod again;
pub mod algorithm;
pub mod allowed;
mod announce;
mod builder;
mod channel_works;
pub mod channels;
pub mod estimate;
mod exchange;
mod layout;
pub mod limits;
mod reduce_ops;
mod sequence;
mod stuck;
pub mod table;
#[cfg(test)]
mod tuned;

use std::time::Duration;

use smallvec::SmallVec;

use crate::{
    checks,
    communicator::Communicator,
    error::Result,
    launch::reclaim::Ready,
    op::{ProxyOp, Task},
};

pub(crate) use crate::op::{OpInfo, is_simulated};
pub(crate) use exchange::Exchange;
pub(crate) use layout::{Plans, choose, drains_with_messages};
pub(crate) use reduce_ops::ReduceOps;
pub(crate) use sequence::Sequences;
pub(crate) use stuck::stuck;

/// One kernel launch and what goes with it.
pub(crate) struct Plan {
    /// Plan number.
    pub(crate) number: u32,
    /// What the device is given; `None` once it is launched.
    pub(crate) ready: Option<Ready>,
    /// Network work; the replay is filled in when it is posted.
    pub(crate) proxy_ops: Vec<ProxyOp>,
    /// Its operations.
    pub(crate) ops: SmallVec<[OpInfo; 1]>,
    /// What was called for them.
    pub(crate) calls: SmallVec<[checks::Entry; 1]>,
}

impl Plan {
    /// Of nothing yet.
    fn new(number: u32) -> Self {
        Self {
            number,
            ready: None,
            proxy_ops: Vec::new(),
            ops: SmallVec::new(),
            calls: SmallVec::new(),
        }
    }
}

/// How long what a group asks of one communicator would take, by the model of [`estimate`]. Nothing is connected,
/// described or launched.
///
/// # Errors
/// As [`Plans::build`].
pub(crate) fn estimate(
    comm: &Communicator,
    collectives: &[Task],
    exchange: &Exchange,
    persistent: bool,
) -> Result<Duration> {
    let mut plans = Plans::new(comm, (collectives, exchange), persistent, None, None);
    plans.lay_out()?;
    Ok(plans.loads().map(estimate::Load::time).sum())
}
