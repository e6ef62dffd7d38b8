//! Counters and journals: words in pinned memory that a kernel of one thread writes in stream order.
//!
//! Driver calls do not serve. `cuStreamWriteValue64` writes a value that is fixed at capture, the same at each replay; `cuStreamBatchMemOp` adds only
//! with drivers much newer than the oldest supported one.
//!
//! Memory is kept for reuse and never freed: the driver would wait for kernels. So a graph that outlives its counter may count another's word, but
//! never writes to unmapped memory.

use std::{
    ffi::c_void,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use cudarc::driver::sys::{CUfunction, CUstream};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::cuda::journal::JOURNAL_WORDS;

use super::driver::{Kernel, PinnedSlice};
use crate::device::{Counter, DeviceError, Journal, Result};

/// Counters that are allocated at once: a page of them.
const CHUNK: usize = 512;

type Chunk = Arc<PinnedSlice<AtomicU64>>;

/// The counters of a GPU.
pub(super) struct Counters {
    kernel: CUfunction,
    free: Arc<Mutex<Vec<(Chunk, usize)>>>,
}

/// The word of a counter in use.
struct CounterWord {
    chunk: Chunk,
    index: usize,
    free: Arc<Mutex<Vec<(Chunk, usize)>>>,
}

impl AsRef<AtomicU64> for CounterWord {
    fn as_ref(&self) -> &AtomicU64 {
        &self.chunk[self.index]
    }
}

impl Drop for CounterWord {
    fn drop(&mut self) {
        lock(&self.free).push((self.chunk.clone(), self.index));
    }
}

impl Counters {
    /// Allocates the first chunk; a context must be current.
    pub(super) fn new(kernel: CUfunction) -> Result<Self> {
        Ok(Self {
            kernel,
            free: Arc::new(Mutex::new(new_words()?)),
        })
    }

    /// A counter at 0; a context must be current.
    pub(super) fn counter(&self) -> Result<Counter> {
        let mut free = lock(&self.free);
        if free.is_empty() {
            drop(free);
            let mut more = new_words()?;
            free = lock(&self.free);
            free.append(&mut more);
        }
        let (chunk, index) = free
            .pop()
            .ok_or_else(|| DeviceError::Resource("no memory for a counter of a graph's replays".into()))?;
        drop(free);
        // Relaxed: the launch of the graph orders it before the kernel.
        chunk[index].store(0, Ordering::Relaxed);
        Ok(Counter::new(CounterWord {
            chunk,
            index,
            free: self.free.clone(),
        }))
    }

    /// Increments a counter in stream order.
    pub(super) fn increment(&self, stream: CUstream, counter: &Counter) -> Result<()> {
        // The GPU reaches it at the host's address.
        let mut word = std::ptr::from_ref(counter.word()) as u64;
        // SAFETY: the kernel's argument; the word is never unmapped.
        unsafe { Kernel::single(self.kernel).launch(stream, &mut [(&raw mut word).cast()]) }
    }
}

fn new_words() -> Result<Vec<(Chunk, usize)>> {
    // SAFETY: atomics.
    let chunk = Arc::new(unsafe { PinnedSlice::<AtomicU64>::new(CHUNK) }?);
    Ok((0..CHUNK).map(|index| (chunk.clone(), index)).collect())
}

type JournalMemory = PinnedSlice<AtomicU64>;

/// Free journals. There are never more than were in use at one time.
static FREE_JOURNALS: Mutex<Vec<JournalMemory>> = Mutex::new(Vec::new());

/// The memory of a journal in use.
struct JournalWords(Option<JournalMemory>);

impl AsRef<[AtomicU64]> for JournalWords {
    fn as_ref(&self) -> &[AtomicU64] {
        self.0.as_deref().unwrap_or_default()
    }
}

impl Drop for JournalWords {
    fn drop(&mut self) {
        lock(&FREE_JOURNALS).extend(self.0.take());
    }
}

/// An empty journal; a context must be current.
pub(super) fn journal() -> Result<Journal> {
    let kept = lock(&FREE_JOURNALS).pop();
    let words = match kept {
        Some(words) => words,
        // SAFETY: atomics.
        None => unsafe { PinnedSlice::new(JOURNAL_WORDS) }?,
    };
    for word in words.iter() {
        // Relaxed: the launch of the graph orders it before the kernel.
        word.store(0, Ordering::Relaxed);
    }
    Ok(Journal::new(JournalWords(Some(words))))
}

/// Appends a word in stream order. `kernel` is [`ringsight_kernels::cuda::APPEND_KERNEL`].
pub(super) fn append(kernel: CUfunction, stream: CUstream, journal: &Journal, word: u64) -> Result<()> {
    // The GPU reaches it at the host's address.
    let mut address = journal.words().as_ptr() as u64;
    let mut word = word;
    let mut arguments: [*mut c_void; 2] = [(&raw mut address).cast(), (&raw mut word).cast()];
    // SAFETY: the kernel's arguments; the caller keeps the journal until the kernel cannot run any more.
    unsafe { Kernel::single(kernel).launch(stream, &mut arguments) }
}
