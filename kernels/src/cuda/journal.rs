//! Words in host memory that a stream writes in order: the kernels of `cuda/journal.cuh`.
//!
//! A *counter* is one `u64` that the stream increments. A *journal* is a ring of words to which the stream appends. Nobody but the stream
//! writes either.

use std::ffi::CStr;

/// Name of the kernel that increments a counter: one block of one thread. Its argument is the address of the `u64`.
pub const COUNT_KERNEL: &CStr = c"ringsight_count";

/// Name of the kernel that appends to a journal: one block of one thread. Its arguments are the address of the journal
/// ([`JOURNAL_WORDS`] of `u64`) and the word.
pub const APPEND_KERNEL: &CStr = c"ringsight_append";

/// Words that a journal keeps: `JOURNAL_SLOTS` in `cuda/journal.cuh`.
pub const JOURNAL_SLOTS: usize = 8192;

/// Words of a journal's memory: how many were ever appended, then the ring.
pub const JOURNAL_WORDS: usize = 1 + JOURNAL_SLOTS;
