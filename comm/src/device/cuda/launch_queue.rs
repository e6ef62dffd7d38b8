//! The hand-off between the threads that launch and the drain thread of one GPU, and the memory that a launch shares with the host.
//!
//! States of a launch: *submitted* (by the launching thread, before its kernel may begin) → *in flight* (taken by the drain thread) → *retired*
//! (it will not run any more). The drain thread then returns its slot. An eager launch is retired by the drain thread after its one run, or
//! by the launching thread if the driver refuses it; a captured launch when its graph is gone.
//!
//! Invariants:
//! - A launch is submitted before its kernel may begin, since its events may come before the launching call returns.
//! - A slot belongs to one launch at a time.
//! - No observer is called under the queue's lock.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, atomic::Ordering};

use cudarc::driver::sys::{CUdeviceptr, CUstream};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::{
    Launch,
    cuda::{CAPTURED, LaunchControl, LaunchState},
};

use super::driver::{PinnedSlice, free, zeroed};
use crate::device::{DeviceError, Result};

/// Slots that are allocated at once: as many as the driver lets wait. Launches with slots of different chunks differ in more of their arguments.
const CHUNK: usize = 1024;

/// The launches of one GPU.
#[derive(Default)]
pub(super) struct LaunchQueue {
    state: Mutex<QueueState>,
    /// Wakes the drain thread.
    pub(super) wake: Condvar,
}

/// See [`LaunchQueue`].
#[derive(Default)]
pub(super) struct QueueState {
    /// Launches that may begin, in order.
    pub(super) submitted: Vec<Submitted>,
    /// Numbers of launches that will not run any more.
    pub(super) retired: Vec<u32>,
    pub(super) free: FreeSlots<Slot>,
    /// The drain thread waits for [`LaunchQueue::wake`].
    pub(super) asleep: bool,
    /// Launches that run or may begin: eager ones that are not over, and replays that have begun.
    pub(super) running: usize,
    /// The last numbers of eager and of captured launches.
    numbers: [u32; 2],
}

/// A launch that is about to begin.
pub(super) struct Submitted {
    pub(super) number: u32,
    pub(super) launch: Arc<Launch>,
    pub(super) slot: Slot,
    pub(super) captured: bool,
    /// Called when nothing runs it any more.
    pub(super) on_end: Option<Box<dyn FnOnce() + Send>>,
}

/// The words that one launch shares with the host.
pub(super) struct Slot {
    chunk: Arc<SlotChunk>,
    /// Index in the chunk's arrays.
    pub(super) index: u32,
    /// Runs of all earlier launches with this slot.
    pub(super) runs_before: u32,
}

struct SlotChunk {
    /// Its number in [`FreeSlots`].
    number: usize,
    controls: PinnedSlice<LaunchControl>,
    states: CUdeviceptr,
}

impl Drop for SlotChunk {
    fn drop(&mut self) {
        // Only if the GPU could not be opened: slots live as long as the process.
        let _ = free(self.states);
    }
}

impl Slot {
    /// Returns it when no launch uses it.
    pub(super) fn give_back(self, free: &mut FreeSlots<Self>) {
        free.give(self.chunk.number, self);
    }

    pub(super) fn control(&self) -> &LaunchControl {
        &self.chunk.controls[self.index as usize]
    }

    /// Device address of the array that [`Slot::control`] lies in.
    pub(super) fn controls(&self) -> u64 {
        self.chunk.controls.as_ptr() as u64
    }

    /// Device address of the array of [`LaunchState`].
    pub(super) fn states(&self) -> CUdeviceptr {
        self.chunk.states
    }

    /// Prepares it for the next launch when the present one is over.
    pub(super) fn renew(&mut self) {
        let control = self.control();
        // Relaxed: the next launch orders these before its kernel.
        control.abort.store(0, Ordering::Relaxed);
        control.aborted.store(0, Ordering::Relaxed);
        // So that whatever the next kernel writes first differs from this.
        control.waits.store(0, Ordering::Relaxed);
        self.runs_before = control.runs.load(Ordering::Relaxed);
    }
}

/// Free slots, by chunk. If two launches have slots of one chunk, fewer of their arguments differ, and the driver rewrites less
/// ([`super::kernel_graphs`]). So slots are taken from one chunk while it has some, then from the fullest chunk.
pub(super) struct FreeSlots<T> {
    chunks: Vec<Vec<T>>,
    /// The chunk that the last slot came from.
    current: usize,
}

impl<T> Default for FreeSlots<T> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            current: 0,
        }
    }
}

impl<T> FreeSlots<T> {
    /// Adds a chunk. `slots` gets its number.
    fn add(&mut self, slots: impl FnOnce(usize) -> Vec<T>) {
        self.chunks.push(slots(self.chunks.len()));
    }

    /// Returns a slot of a chunk.
    fn give(&mut self, chunk: usize, slot: T) {
        self.chunks[chunk].push(slot);
    }

    fn take(&mut self) -> Option<T> {
        if let Some(slot) = self.chunks.get_mut(self.current).and_then(Vec::pop) {
            return Some(slot);
        }
        self.current = (0..self.chunks.len()).max_by_key(|chunk| self.chunks[*chunk].len())?;
        self.chunks[self.current].pop()
    }
}

impl QueueState {
    /// The number of the next launch. Captured launches live as long as their graphs, so they have numbers of their own: no eager launch ever has the
    /// number of a captured one.
    pub(super) fn number(&mut self, captured: bool) -> u32 {
        let last = &mut self.numbers[usize::from(captured)];
        *last = (*last + 1) % CAPTURED;
        *last | if captured { CAPTURED } else { 0 }
    }
}

impl LaunchQueue {
    pub(super) fn lock(&self) -> MutexGuard<'_, QueueState> {
        lock(&self.state)
    }

    /// Retires a launch.
    pub(super) fn retire(&self, number: u32) {
        self.lock().retired.push(number);
    }

    /// The numbers of the last launches, if no kernel of the library runs or waits on the GPU. Of replays, which are launched without the library,
    /// it knows those that have begun.
    pub(super) fn idle_after(&self) -> Option<[u32; 2]> {
        let state = self.lock();
        (state.running == 0).then_some(state.numbers)
    }

    /// A free slot, and the locked queue for submitting its launch. The GPU's context is current; `stream` is the module's own.
    pub(super) fn slot(&self, stream: CUstream) -> Result<(MutexGuard<'_, QueueState>, Slot)> {
        let mut state = self.lock();
        let mut slot = state.free.take();
        if slot.is_none() {
            drop(state);
            state = self.add_slots(stream)?;
            slot = state.free.take();
        }
        slot.map(|slot| (state, slot))
            .ok_or_else(|| DeviceError::Resource("no memory for launches".into()))
    }

    /// Adds a chunk of slots, and locks the queue. The GPU's context is current; `stream` is the module's own.
    pub(super) fn add_slots(&self, stream: CUstream) -> Result<MutexGuard<'_, QueueState>> {
        // SAFETY: atomics and integers.
        let controls = unsafe { PinnedSlice::new(CHUNK) }?;
        let states = zeroed(CHUNK * size_of::<LaunchState>(), stream)?;
        let mut state = self.lock();
        state.free.add(|number| {
            let chunk = Arc::new(SlotChunk {
                number,
                controls,
                states,
            });
            let slot = |index| Slot {
                chunk: chunk.clone(),
                index,
                runs_before: 0,
            };
            (0..CHUNK as u32).map(slot).collect()
        });
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_from_one_chunk_while_it_has_some() {
        let mut free = FreeSlots::default();
        assert_eq!(free.take(), None);
        let mut chunks = Vec::new();
        let mut add = |free: &mut FreeSlots<u32>, slots: &[u32]| {
            free.add(|chunk| {
                chunks.push(chunk);
                slots.to_vec()
            });
        };
        add(&mut free, &[1, 2]);
        assert_eq!([free.take(), free.take(), free.take()], [Some(2), Some(1), None]);
        add(&mut free, &[11, 12]);
        add(&mut free, &[21, 22, 23]);
        assert_eq!(chunks, [0, 1, 2]);
        assert_eq!(free.take(), Some(23));
        // Slots of any chunk come back.
        free.give(chunks[0], 1);
        free.give(chunks[2], 23);
        assert_eq!([(); 3].map(|()| free.take()), [Some(23), Some(22), Some(21)]);
        free.give(chunks[0], 2);
        free.give(chunks[1], 13);
        assert_eq!(free.take(), Some(13), "the fullest chunk");
        let rest = [Some(12), Some(11), Some(2), Some(1), None];
        assert_eq!([(); 5].map(|()| free.take()), rest);
    }

    #[test]
    fn no_eager_launch_has_the_number_of_a_captured_one() {
        let mut state = QueueState::default();
        let captured = [state.number(true), state.number(true)];
        assert_ne!(captured[0], captured[1]);
        state.numbers[0] = CAPTURED - 3;
        let eager = [(); 5].map(|()| state.number(false));
        assert_eq!(eager, [CAPTURED - 2, CAPTURED - 1, 0, 1, 2]);
        assert!(eager.iter().all(|number| !captured.contains(number)));
    }
}
