//! Counting up a word in host memory, in stream order: the kernel of `cuda/count.cuh`.

/// The kernel's name: one block of one thread. Its one argument is the address of a `u64`, which nobody else writes.
pub const COUNT_KERNEL: &std::ffi::CStr = c"ringsight_count";
