//! Sending or storing what the collector produced.
//!
//! The collector hands a [`Batch`] to each [`Exporter`]. Exporters to files write at once, and may block: a [`worker::Worker`] runs each on
//! a thread of its own. The OTLP exporter queues for a thread that it has. Each exporter counts what it delivered and dropped
//! ([`ExportStats`]).
//!
//! Modules, lowest first; imports go down only:
//!
//! | layer | modules |
//! |---|---|
//! | the model | `model`: spans, metrics, log records, operations; it knows no format |
//! | formats | `chrome` (trace events), `html` (one page), `otlp` (gRPC and HTTP) |
//! | on OTLP | `jsonl` (OTLP's JSON in files) |
//! | around an exporter | `worker` (its thread and queue) |

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")
)]

pub mod chrome;
pub mod html;
pub mod jsonl;
pub mod model;
pub mod otlp;
pub mod ranks;
pub mod worker;

pub use model::{Batch, ExportStats, Exporter};
