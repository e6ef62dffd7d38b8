//! Turning raw records into operations, spans, metrics and verdicts.
//!
//! ```text
//! Sample ── correlate ──> RankOperation ── instances ──> Instance ── spans ──> Batch
//!           one rank                       across ranks    lag, metrics
//! ```
//! [`Collector`] is the whole line; everything under it is driven by samples and a clock reading that is passed in, so
//! that a recorded run gives the same spans as a live one.

mod awaited;
pub mod clock;
pub mod collector;
pub mod correlate;
pub mod explain;
pub mod identity;
pub mod lag;
pub mod metrics;
mod network;
pub mod resource;
pub mod snapshot;
pub mod spans;
pub mod summary;
pub mod synthetic;

pub use collector::{Collector, Options};
