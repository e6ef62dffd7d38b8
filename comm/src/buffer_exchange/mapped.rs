//! What this rank has mapped of the others' memory.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm_base::sync::lock;

use super::Maps;

/// What has been mapped, by rank and number.
pub(crate) type Mapped = Mutex<HashMap<(u32, u32), Arc<MappedMemory>>>;

/// An allocation of another process, as it is mapped here.
pub(crate) struct MappedMemory {
    generation: u32,
    /// Where it begins for this rank's device.
    pub(crate) base: u64,
    /// Lets go of it.
    _memory: Box<dyn Any + Send + Sync>,
}

impl MappedMemory {
    pub(super) fn new(generation: u32, base: u64, memory: Box<dyn Any + Send + Sync>) -> Self {
        Self {
            generation,
            base,
            _memory: memory,
        }
    }
}

impl Maps {
    /// What rank `from` has shown under a number and a generation, once this one has mapped it: waits for that, at most so long and not
    /// where `is_over` says that it is in vain.
    ///
    /// # Errors
    /// Why it is not there: in words.
    pub(crate) fn reached(
        &self,
        from: u32,
        (number, generation): (u32, u32),
        limit: Duration,
        is_over: impl Fn() -> bool,
    ) -> Result<Arc<MappedMemory>, String> {
        let deadline = Instant::now() + limit;
        loop {
            let mapped = self.table.mapped.upgrade();
            let found = mapped.and_then(|mapped| lock(&mapped).get(&(from, number)).cloned());
            if let Some(memory) = found.filter(|memory| memory.generation == generation) {
                return Ok(memory);
            }
            if is_over() || Instant::now() >= deadline {
                let failure = lock(&self.table.failures).get(&(from, number)).cloned();
                let failure = failure.filter(|(of, _)| *of == generation);
                return Err(failure.map_or_else(
                    || format!("it was not mapped within {} s", limit.as_secs()),
                    |(_, text)| text,
                ));
            }
            thread::sleep(Duration::from_micros(200));
        }
    }
}
