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
mod task;
#[cfg(test)]
mod tuned;

use std::time::Duration;

use smallvec::SmallVec;

use crate::{checks, communicator::Communicator, error::Result, launch::reclaim::Ready, proxy::ProxyOp};

pub(crate) use exchange::Exchange;
pub(crate) use layout::{Plans, goes_by_engines, goes_by_messages};
pub(crate) use reduce_ops::ReduceOps;
pub(crate) use sequence::Sequences;
pub(crate) use stuck::{is_simulated, stuck};
pub use task::{OpInfo, Request, Task};

/// Work elements (one channel's part of one operation) that fit into a communicator's work FIFO. A plan that runs once
/// fills at most half of it, so that the next can be prepared meanwhile; a captured plan brings memory of its own.
pub const WORK_FIFO_DEPTH: usize = 4096;

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
