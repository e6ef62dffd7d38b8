//! GPU device code: the kernels of `cuda/*.cuh`, their arguments, and what they report.
//!
//! A launch is one of two kinds:
//! - **Channel programs** ([`program`]): one block per channel moves slots of FIFOs. They run over any connection.
//! - **Peer operations** ([`peer_operation`]): ranks that reach each other's memory (NVLink P2P) do one collective, or any number of messages,
//!   with one kernel each. [`one_shot`], [`collective`], [`messages`] and [`copy_engine`] choose kernel and arguments.
//!
//! Kernels report in three ways, none of which needs a driver call: events in a [`ring`], words of [`LaunchControl`], and words that
//! follow stream order ([`journal`]). [`layout`] and [`peer_memory`] are the byte layouts that both sides share; sizes and offsets are
//! asserted here and in the `.cuh` files.

pub mod clock;
pub mod collective;
pub mod copy_engine;
pub mod journal;
pub mod layout;
pub mod messages;
pub mod one_shot;
pub mod peer_launch;
pub mod peer_memory;
pub mod peer_operation;
pub mod program;
pub mod ring;
#[cfg(test)]
mod testing;
pub mod tiles;

pub use clock::{CLOCK_KERNEL, ClockArguments, ClockPage};
pub use collective::collective_threads;
pub use copy_engine::COPY_ENGINE_THREADS;
pub use journal::{APPEND_KERNEL, COUNT_KERNEL};
pub use layout::{Arguments, CAPTURED, Head, LaunchControl, LaunchState, RING_ENTRIES};
pub use messages::MESSAGES_THREADS;
pub use one_shot::one_shot_threads;
pub use peer_launch::PeerLaunch;
pub use peer_operation::PeerOperation;
pub use program::Program;
pub use ring::{Event, EventKind, Ring};

/// The machine code for every supported architecture, for `cuModuleLoadData`.
///
/// # Errors
/// Says what was missing when this crate was built.
pub fn fatbin() -> Result<&'static [u8], &'static str> {
    // The driver reads 64-bit words.
    #[repr(align(64))]
    struct Aligned<T: ?Sized>(T);
    static FATBIN: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin")));
    if FATBIN.0.is_empty() {
        return Err(env!("RINGSIGHT_NO_KERNELS"));
    }
    Ok(&FATBIN.0)
}

/// Names of the kernels that run channel programs: for launches that only copy, and for any launch ([`Program::reduces`]).
pub const CHANNEL_KERNELS: [&std::ffi::CStr; 2] = [c"ringsight_channels_copy", c"ringsight_channels"];

/// Threads of a block of a channel program: `CHANNEL_THREADS` in `cuda/platform.cuh`.
pub const CHANNEL_THREADS: u32 = 512;

/// Whether kernels write events. A build with `RINGSIGHT_NO_EVENTS`, which measures what events cost, has none.
pub const HAS_EVENTS: bool = !cfg!(ringsight_no_events);

/// Name of the kernel that does nothing. It has no arguments and is launched with one block of one thread.
pub const NOTHING_KERNEL: &std::ffi::CStr = c"ringsight_nothing";
