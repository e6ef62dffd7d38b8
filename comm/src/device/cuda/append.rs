//! Journals: lists in pinned host memory, appended to by a kernel of one thread.

use std::{
    ffi::c_void,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::{CUfunction, CUstream};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::cuda::journal::JOURNAL_WORDS;

use super::{driver::Kernel, gpu::Memory};
use crate::device::{Journal, Result};

type List = Memory<AtomicU64>;

/// Lists of graphs that are gone, for those that come: to free one the driver waits for kernels. There are never more than were
/// used at the same time.
static KEPT: Mutex<Vec<List>> = Mutex::new(Vec::new());

/// A list's memory, which is kept when it is dropped.
struct Words(Option<List>);

impl AsRef<[AtomicU64]> for Words {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        lock(&KEPT).extend(self.0.take());
    }
}

/// An empty list; a context must be current.
pub(super) fn journal() -> Result<Journal> {
    let kept = lock(&KEPT).pop();
    let list = match kept {
        Some(list) => list,
        // SAFETY: atomics.
        None => unsafe { Memory::new(JOURNAL_WORDS) }?,
    };
    for word in list.iter() {
        // Relaxed: the launch of the graph orders it before the kernel.
        word.store(0, Ordering::Relaxed);
    }
    Ok(Journal::new(Words(Some(list))))
}

/// Appends a word in stream order, by [`ringsight_kernels::cuda::journal::APPEND_KERNEL`].
pub(super) fn append(kernel: CUfunction, stream: CUstream, journal: &Journal, word: u64) -> Result<()> {
    // The GPU reaches it at the host's address.
    let mut list = journal.words().as_ptr() as u64;
    let mut word = word;
    let mut arguments: [*mut c_void; 2] = [(&raw mut list).cast(), (&raw mut word).cast()];
    // SAFETY: the kernel's arguments; the caller keeps the list until the kernel cannot run any more.
    unsafe { Kernel::single(kernel).launch(stream, &mut arguments) }
}
