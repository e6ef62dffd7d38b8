//! Planning: from what a communicator can do ([`Capabilities`]) and from tasks to plans. Pure functions: no device calls, no connections, no log lines,
//! no records.
//!
//! | question | answered in |
//! |---|---|
//! | Which algorithm, and how does data move? | [`table`], query by [`Capabilities::choose`] when an operation is called |
//! | Which channels, and which part of the data is whose? | [`channels`] |
//! | In which order are messages sent and received? | [`messages`] |
//! | Which task goes into which launch? | [`lay_out`] |
//! | How long would it take? | [`estimate`] |
//!
//! Every rank plans alone, and all ranks must come to plans that fit together. So what all ranks have to agree on depends on the sequence of
//! collectives and on values that are the same on all of them, and on nothing else.
//!
//! Collectives drain before point-to-point: plans are cut where the work budget ends, and the number of sends and
//! receives differs between ranks. If these came first, ranks would cut their collectives at different places, and the
//! least-loaded channel picker, whose loads begin anew with each plan, would give different answers. AlltoAll, Gather and
//! Scatter are made of messages and drain with them; one of them may have messages in several plans.

mod allowed;
mod capabilities;
pub(crate) mod channels;
pub(crate) mod environment;
pub(crate) mod estimate;
mod layout;
pub(crate) mod limits;
pub(crate) mod messages;
pub(crate) mod table;

pub(crate) use capabilities::{Capabilities, drains_with_messages};
pub(crate) use layout::{Layout, Plan, PlannedWork, Route, lay_out};
pub(crate) use messages::GroupMessages;
