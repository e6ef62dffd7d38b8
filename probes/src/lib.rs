//! Finding a target's library, planning probe sites, attaching, and reading raw records.
//!
//! [`Session`] is the way in: it watches running processes and is a [`Source`] of [`Sample`]s. [`target`] and [`site`] answer
//! "what would be probed, and what would it cost" without touching anything.

mod account;
mod attach;
pub mod elf;
pub mod error;
mod look;
mod multi;
pub mod network;
mod pages;
pub mod process;
pub mod sample;
pub mod session;
pub mod signature;
pub mod site;
mod stats;
pub mod target;
mod version;
mod watch;

pub use error::{AttachError, Unavailable};
pub use look::{Look, look};
pub use network::NetworkSample;
pub use pages::ByKind;
pub use sample::{Carrier, Sample, Source};
pub use session::{Attached, NetworkScope, Options, Session, UseEbpf};
pub use stats::{Counters, ProbeStats};
