//! Finding a target's library, planning probe sites, attaching, and reading raw records.

pub mod sample;

pub use sample::{Carrier, Sample, Source};
