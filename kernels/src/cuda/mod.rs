//! The device code of GPUs: kernels of `cuda/`, what they are given ([`layout`], [`program`]) and what they tell ([`ring`]).

pub mod layout;
pub mod one_shot;
pub mod peers;
pub mod program;
pub mod ring;

pub use layout::{Arguments, Head, LaunchControl, LaunchState, OneShot};
pub use one_shot::{OneShotLaunch, one_shot_threads};
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

/// Name of the kernel that runs any launch, a block for each channel.
pub const KERNEL: &std::ffi::CStr = c"ringsight_channels";

/// Threads of each of its blocks.
pub const THREADS: u32 = 512;

/// Names of the kernels that a [`OneShotLaunch`] is for, by its number: `RINGSIGHT_ONE_SHOTS` in `cuda/one_shot.cuh`.
pub const ONE_SHOT_KERNELS: [&std::ffi::CStr; 10] = [
    c"ringsight_one_shot",
    c"ringsight_one_shot_sum_f32_2",
    c"ringsight_one_shot_sum_f32_4",
    c"ringsight_one_shot_sum_f32_8",
    c"ringsight_one_shot_sum_f16_2",
    c"ringsight_one_shot_sum_f16_4",
    c"ringsight_one_shot_sum_f16_8",
    c"ringsight_one_shot_sum_bf16_2",
    c"ringsight_one_shot_sum_bf16_4",
    c"ringsight_one_shot_sum_bf16_8",
];
