//! Journals: lists in pinned host memory, appended to by a kernel of one thread.

use std::{ffi::c_void, sync::atomic::AtomicU64};

use cudarc::driver::sys::{CUfunction, CUstream};
use ringsight_kernels::cuda::append::JOURNAL_WORDS;

use super::{driver::launch_one, gpu::Memory, release};
use crate::device::{Journal, Result};

/// A list's memory. To free it calls the driver, which whoever lets go of it last may not.
struct Words(Option<Memory<AtomicU64>>);

impl AsRef<[AtomicU64]> for Words {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        if let Some(memory) = self.0.take() {
            release::later(memory);
        }
    }
}

/// An empty list; a context must be current.
pub(super) fn journal() -> Result<Journal> {
    // SAFETY: atomics.
    let memory = unsafe { Memory::new(JOURNAL_WORDS) }?;
    Ok(Journal::new(Words(Some(memory))))
}

/// Appends a word in stream order, by [`ringsight_kernels::cuda::append::APPEND_KERNEL`].
pub(super) fn append(kernel: CUfunction, stream: CUstream, journal: &Journal, word: u64) -> Result<()> {
    // The GPU reaches it at the host's address.
    let mut list = journal.words().as_ptr() as u64;
    let mut word = word;
    let mut arguments: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut word).cast()];
    // SAFETY: the kernel's arguments; the caller keeps the list until the kernel cannot run any more.
    unsafe { launch_one(kernel, stream, &mut arguments) }
}
