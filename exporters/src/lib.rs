//! Sending or storing what the collector produced.

pub mod model;

pub use model::{Batch, ExportStats, Exporter};
