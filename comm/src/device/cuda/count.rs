//! Counters: words in pinned host memory, counted up by a kernel of one thread.
//!
//! `cuStreamWriteValue64` writes what is known at capture, which is the same at each replay; `cuStreamBatchMemOp` adds only
//! with drivers that came long after the oldest supported one.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU64, Ordering},
};

use cudarc::driver::sys::{CUfunction, CUstream};

use super::{driver::Kernel, gpu::Memory};
use crate::device::{Counter, Result};
use ringsight_comm_base::sync::lock;

/// Words that are had at once: a page of them.
const CHUNK: usize = 512;

type Chunk = Arc<Memory<AtomicU64>>;

/// The counters of a GPU. Their memory stays for the life of the process: a graph that outlives its counter counts nobody's
/// word, or another's, but never writes to what is not mapped.
pub(super) struct Counters {
    kernel: CUfunction,
    free: Arc<Mutex<Vec<(Chunk, usize)>>>,
}

/// A word that is in use.
struct Word {
    chunk: Chunk,
    index: usize,
    free: Arc<Mutex<Vec<(Chunk, usize)>>>,
}

impl AsRef<AtomicU64> for Word {
    fn as_ref(&self) -> &AtomicU64 {
        &self.chunk[self.index]
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        lock(&self.free).push((self.chunk.clone(), self.index));
    }
}

impl Counters {
    /// With some words at once: with kernels on a GPU that wait for others, more might not be had without waiting for them. A
    /// context must be current.
    pub(super) fn new(kernel: CUfunction) -> Result<Self> {
        Ok(Self {
            kernel,
            free: Arc::new(Mutex::new(words()?)),
        })
    }

    /// A counter at 0; a context must be current.
    pub(super) fn counter(&self) -> Result<Counter> {
        let mut free = lock(&self.free);
        if free.is_empty() {
            drop(free);
            let mut more = words()?;
            free = lock(&self.free);
            free.append(&mut more);
        }
        let (chunk, index) = free.pop().ok_or_else(|| {
            crate::device::DeviceError::Resource("no memory for a counter of a graph's replays".into())
        })?;
        drop(free);
        // Relaxed: the launch of the graph orders it before the kernel.
        chunk[index].store(0, Ordering::Relaxed);
        Ok(Counter::new(Word {
            chunk,
            index,
            free: self.free.clone(),
        }))
    }

    /// Counts up in stream order.
    pub(super) fn count(&self, stream: CUstream, counter: &Counter) -> Result<()> {
        // The GPU reaches it at the host's address.
        let mut word = std::ptr::from_ref(counter.word()) as u64;
        // SAFETY: the kernel's one argument; what it points to is never unmapped.
        unsafe { Kernel::single(self.kernel).launch(stream, &mut [(&raw mut word).cast()]) }
    }
}

fn words() -> Result<Vec<(Chunk, usize)>> {
    // SAFETY: atomics.
    let chunk = Arc::new(unsafe { Memory::<AtomicU64>::new(CHUNK) }?);
    Ok((0..CHUNK).map(|index| (chunk.clone(), index)).collect())
}
