//! Sending or storing what the collector produced.
//!
//! The collector hands a [`Batch`] to each [`Exporter`]. `export` never waits for a disk or a server that is slow: files buffer,
//! and the OTLP exporter queues for a thread of its own. Each exporter counts what it delivered and dropped ([`ExportStats`]).
//!
//! Modules, lowest first; imports go down only:
//!
//! | layer | modules |
//! |---|---|
//! | the model | `model`: spans, metrics, log records, operations; it knows no format |
//! | formats | `chrome` (trace events), `html` (one page), `otlp` (gRPC and HTTP) |
//! | on OTLP | `jsonl` (OTLP's JSON in files) |

pub mod chrome;
pub mod html;
pub mod jsonl;
pub mod model;
pub mod otlp;

pub use model::{Batch, ExportStats, Exporter};
