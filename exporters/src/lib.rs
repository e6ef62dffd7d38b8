//! Sending or storing what the collector produced.

pub mod chrome;
pub mod html;
pub mod jsonl;
pub mod model;
pub mod otlp;

pub use model::{Batch, ExportStats, Exporter};
