//! The device code of GPUs: kernels of `cuda/`, what they are given ([`layout`], [`program`]) and what they tell ([`ring`]).

pub mod append;
pub mod clock;
pub mod count;
pub mod exchange;
pub mod gates;
pub mod layout;
pub mod messages;
pub mod one_shot;
pub mod peer_launch;
pub mod peers;
pub mod pieces;
pub mod program;
pub mod ring;
#[cfg(test)]
mod testing;

pub use append::APPEND_KERNEL;
pub use clock::{CLOCK_KERNEL, ClockArguments, ClockPage};
pub use count::COUNT_KERNEL;
pub use exchange::exchange_threads;
pub use gates::GATE_THREADS;
pub use layout::{Arguments, CAPTURED, Head, LaunchControl, LaunchState, RING_ENTRIES};
pub use messages::MESSAGES_THREADS;
pub use one_shot::one_shot_threads;
pub use peer_launch::PeerLaunch;
pub use program::Program;
pub use ring::{Event, EventKind, Ring};

/// Machine code for every supported architecture, to be loaded with `cuModuleLoadData`.
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

/// Names of the kernels that run channel programs, a block for each channel: launches that reduce nothing, and any
/// ([`Program::reduces`]).
pub const CHANNEL_KERNELS: [&std::ffi::CStr; 2] = [c"ringsight_channels_copy", c"ringsight_channels"];

/// Whether kernels tell of starts and ends: not if they were built to measure what that costs (`RINGSIGHT_NO_EVENTS`).
pub const TELLS: bool = !cfg!(ringsight_no_events);

/// Name of the kernel that does nothing, has no arguments and is launched with one block of one thread.
pub const NOTHING_KERNEL: &std::ffi::CStr = c"ringsight_nothing";

/// Threads of each of their blocks: `CHANNEL_THREADS` in `cuda/platform.cuh`.
pub const THREADS: u32 = 512;
