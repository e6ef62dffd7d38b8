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

/// Appends a JSON string. Files of JSON are looked at in terminals: what one would obey is escaped, and the value stays the same.
fn json_string(out: &mut Vec<u8>, text: &str) {
    if text.is_ascii() && !text.contains('\u{7f}') {
        serde_json::to_writer(out, text).expect("writing to memory does not fail");
    } else {
        let string = serde_json::to_string(text).expect("writing to memory does not fail");
        out.extend_from_slice(ringsight_output::json(&string).as_bytes());
    }
}
