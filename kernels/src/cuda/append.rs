//! Appending a word to a list in host memory, in stream order: the kernel of `cuda/append.cuh`.

/// The kernel's name: one block of one thread. Its arguments are the address of the list, [`JOURNAL_WORDS`] of `u64`, and the
/// word.
pub const APPEND_KERNEL: &std::ffi::CStr = c"ringsight_append";

/// Words that a list keeps: `JOURNAL_SLOTS` of the kernel.
pub const JOURNAL_SLOTS: usize = 8192;

/// Words of a list's memory: how many have been appended since it was made, then the ring of them.
pub const JOURNAL_WORDS: usize = 1 + JOURNAL_SLOTS;
