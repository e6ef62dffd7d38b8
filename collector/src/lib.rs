//! Turning raw records into operations, spans, metrics and verdict views.
//!
//! ```text
//! Sample ── correlate ──> RankOperation ── instances ──> Instance ── spans ──> Batch
//!           one rank                       across ranks    lag, metrics
//! ```
//! [`Collector`] is the whole line. Samples and clock readings are its arguments: it reads no clock and starts no thread, so a
//! recorded run gives the same spans as a live one. The command `ringsight` (`src/cli`) drives it from one thread.
//!
//! Invariants:
//! - Every id is a hash of what all ranks know ([`identity`]), so collectors on several hosts make parts of one trace.
//! - An operation that lacks a lost record is marked: its span says `ccl.complete = false`.
//! - Memory, and work for each record, are bounded by [`limits`], whatever a target writes. What exceeds them is counted and left
//!   out, or sent incomplete.
//!
//! Modules, lowest first; imports go down only:
//!
//! | layer | modules |
//! |---|---|
//! | identity, time and limits | `identity`, `clock`, `lag`, `limits`, `resource`, `chronic` (ranks that are late in every step) |
//! | records to operations | `correlate`, `awaited` (who waits for whom), `deaths` (ranks whose process ended) |
//! | operations to telemetry | `arrivals` (who was late), `spans`, `findings` (what watchdogs found wrong, across ranks), `metrics`, `network` (the kernel's RDMA stack, failovers), `summary` |
//! | the line | `collector` |
//! | beside it, for commands and tests | `explain`, `snapshot`, `synthetic` |

pub mod arrivals;
mod awaited;
pub mod chronic;
pub mod clock;
pub mod collector;
pub mod correlate;
mod deaths;
pub mod explain;
pub mod findings;
pub mod identity;
pub mod lag;
pub mod limits;
pub mod metrics;
mod network;
pub mod resource;
pub mod snapshot;
pub mod spans;
pub mod summary;
pub mod synthetic;

pub use collector::{Collector, Options};
