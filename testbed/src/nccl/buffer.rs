//! Memory that operations work on.

use std::{ffi::c_void, ops::Range, sync::Arc};

use anyhow::Result;

use super::device::Device;

/// Memory that operations work on while the host goes on: reached through raw pointers only while they are in flight.
pub(crate) struct Buffer {
    memory: *mut f32,
    elements: usize,
    device: Arc<dyn Device>,
}

impl Buffer {
    pub(super) fn new(device: &Arc<dyn Device>, elements: usize) -> Result<Self> {
        let memory = device.allocate(elements * size_of::<f32>())?;
        Ok(Self {
            memory: memory.cast(),
            elements,
            device: Arc::clone(device),
        })
    }

    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.elements
    }

    /// Its content. No operation on it may be in flight: call [`super::Communicator::synchronise`] first.
    pub(crate) fn get(&mut self) -> &mut [f32] {
        // SAFETY: so many elements, zeroed at first, and ours; the exclusive borrow keeps other safe code away.
        unsafe { std::slice::from_raw_parts_mut(self.memory, self.elements) }
    }

    pub(super) fn pointer(&self) -> *mut c_void {
        self.memory.cast()
    }

    /// Where some of its elements begin.
    ///
    /// # Panics
    /// Where it has no such elements.
    pub(super) fn part(&self, part: &Range<usize>) -> *mut c_void {
        assert!(part.start <= part.end && part.end <= self.elements);
        self.memory.wrapping_add(part.start).cast()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by it with so many bytes; whoever drops a buffer has synchronised, or ends.
        unsafe {
            self.device
                .free(self.memory.cast(), self.elements * size_of::<f32>());
        };
    }
}
