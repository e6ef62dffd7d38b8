//! Finding a target's library, planning probe sites, attaching, and reading raw records.
//!
//! [`Session`] is the way in: it watches running processes and is a [`Source`] of [`Sample`]s. [`target`] and [`site`] answer
//! "which sites would be probed, and at which cost" and touch nothing. [`look`](fn@look) reads a process's pages once.
//!
//! A target goes through these states, all moved by the thread that calls [`Session::poll`]:
//!
//! | state | entered by |
//! |---|---|
//! | attached | [`Session::attach`]: the ring is leased, then probes are placed, then what exists already becomes samples |
//! | without a lease | another reader took the ring over; the session takes it back when it is free |
//! | let go | [`Session::detach`], the end of the process, or `execve`; its last sample is [`Sample::Exited`] |
//!
//! Invariants:
//! - A poll never waits.
//! - A target's events are delivered, or counted as lost or missed; `account` holds the sums that prove it.
//! - Nothing read from a target is trusted: sizes are bounded, offsets are checked, numbers may be anything.
//! - Files of a target are opened by `procfs` alone and mapped by `pages` alone; a lint (`clippy.toml`) refuses other ways.
//!
//! Modules, lowest first; imports go down only:
//!
//! | layer | modules |
//! |---|---|
//! | the kernel and files | `limits`, `ask` (a thread that waits for what a target can keep back), `host`, `procfs` (`/proc/PID` and what it leads to), `kernel`, `elf`, `version`, `multi` (the `uprobe_multi` link), `network` (sites in the kernel's RDMA stack) |
//! | what a target is | `sample`, `error`, `signature`, `target`, `site`, `process` |
//! | what carries events | `attach` (eBPF), `account`, `pages` (shared memory), `stats` |
//! | one process | `survey`, `watch`, `look` |
//! | all processes | `session` |
//! | fuzzers' ways in | `fuzzing` |

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests make and read files of their own")
)]

mod account;
mod ask;
mod attach;
pub mod elf;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
mod host;
pub mod kernel;
pub mod limits;
mod look;
mod multi;
pub mod network;
mod pages;
pub mod process;
mod procfs;
pub mod sample;
pub mod session;
pub mod signature;
pub mod site;
mod stats;
mod survey;
pub mod target;
mod version;
mod watch;

pub use account::ByKind;
pub use error::{AttachError, LeaseHolder, Unavailable};
pub use limits::{LeftOut, Limit};
pub use look::{Look, look, ranks_below};
pub use network::NetworkSample;
pub use sample::{Carrier, Sample, Source};
pub use session::{Attached, NetworkScope, Options, Session, UseEbpf};
pub use stats::{Counters, ProbeStats};
