//! Byte layouts of everything that crosses a process boundary or enters eBPF: the 64-byte [`Record`], the
//! per-operation [`Description`], the shared [`pages`] of an observed process and the dense-event [`ring`] in them.
//!
//! The communication library writes these; the collector reads them out of a *running* process, possibly of another
//! version. So every struct is `#[repr(C)]`, its size is asserted, and a change of meaning raises [`VERSION`].
//!
//! Modules, lowest first; imports go down only:
//!
//! | layer | modules |
//! |---|---|
//! | words | `vocabulary`, `text`, `sequence` (the lock of a slot), `carrier`, `failover`, `prefetch` |
//! | events | `record`, `arrival`, `network`, `probed` (what eBPF programs share with their loader), `ring` |
//! | entries of the pages | `clock`, `communicator`, `connection`, `description`, `lease`, `proxies`, `verdicts`, `waits` |
//! | the pages | `pages` |
//!
//! `explain` stands alone: arguments of a call into the library.
#![no_std]

mod arrival;
mod carrier;
// eBPF has no compare-and-exchange of the width that the pages and the ring need; its programs touch neither.
#[cfg(not(target_arch = "bpf"))]
pub mod clock;
#[cfg(not(target_arch = "bpf"))]
mod communicator;
#[cfg(not(target_arch = "bpf"))]
pub mod connection;
#[cfg(not(target_arch = "bpf"))]
pub mod description;
#[cfg(not(target_arch = "bpf"))]
pub mod explain;
mod failover;
#[cfg(not(target_arch = "bpf"))]
mod lease;
pub mod network;
#[cfg(not(target_arch = "bpf"))]
pub mod pages;
#[cfg(not(target_arch = "bpf"))]
pub mod prefetch;
pub mod probed;
#[cfg(not(target_arch = "bpf"))]
pub mod proxies;
pub mod record;
#[cfg(not(target_arch = "bpf"))]
pub mod ring;
#[cfg(not(target_arch = "bpf"))]
mod sequence;
#[cfg(not(target_arch = "bpf"))]
mod text;
#[cfg(not(target_arch = "bpf"))]
pub mod verdicts;
pub mod vocabulary;
#[cfg(not(target_arch = "bpf"))]
mod waits;

// No layouts, but a list of the library's devices, and how far an operation is: modelled here, since the library as a whole cannot be built
// for models.
#[cfg(all(test, loom))]
extern crate std;
#[cfg(all(test, loom))]
#[expect(dead_code, reason = "the model chooses the orders")]
#[path = "../../../comm/src/device/deferred.rs"]
mod deferred;
#[cfg(all(test, loom))]
#[expect(dead_code, reason = "the model chooses the orders")]
#[path = "../../../comm/src/progress/op_progress.rs"]
mod op_progress;

pub use arrival::{Arrival, ArrivalGap, ArrivalNotice};
pub use carrier::{Carrier, Numbering};
#[cfg(not(target_arch = "bpf"))]
pub use clock::DeviceClock;
#[cfg(not(target_arch = "bpf"))]
pub use description::{Description, DescriptionSlot};
pub use failover::{PathCause, PathChange};
pub use record::{Flags, Kind, ProbedRecord, Record, State};
pub use vocabulary::{Algorithm, Cause, DataType, Function, Protocol, ReduceOp};
#[cfg(not(target_arch = "bpf"))]
pub use waits::{Phase, Waits};

/// Version of every layout in this crate; four bits of each record and a word of the page header carry it.
pub const VERSION: u8 = 6;

/// The four exported, never-merged probe functions of the library, in cookie order.
///
/// Each takes `*const Record` as its only argument. Body: 1-byte `nop`, 5-byte `nop`, a distinct tail, `ret`; a probe
/// goes to offset [`PROBE_NOP5_OFFSET`] on kernels that optimise 5-byte nops (>= 6.18), to offset 0 elsewhere.
pub const PROBE_SYMBOLS: [&str; 4] = [
    "ringsight_probe_launch",
    "ringsight_probe_proxy",
    "ringsight_probe_event",
    "ringsight_probe_lifecycle",
];

/// Offset of the 5-byte nop inside a probe function.
pub const PROBE_NOP5_OFFSET: u64 = 1;
