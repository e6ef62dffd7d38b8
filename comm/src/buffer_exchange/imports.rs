//! The buffers of other ranks that this rank has imported.

use std::{
    any::Any,
    collections::HashMap,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm_base::sync::lock;

use super::BufferExchange;

/// Imported buffers, by rank and number.
pub(crate) type ImportedBuffers = Mutex<HashMap<(u32, u32), Arc<ImportedBuffer>>>;

/// An allocation of another process, as it is mapped here.
pub(crate) struct ImportedBuffer {
    generation: u32,
    /// Where it begins for this rank's device.
    pub(crate) base: u64,
    /// How many bytes are mapped from there on.
    pub(crate) bytes: u64,
    /// Closes it when dropped.
    _memory: Box<dyn Any + Send + Sync>,
}

impl ImportedBuffer {
    pub(super) fn new(
        generation: u32,
        (base, bytes): (u64, u64),
        memory: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self {
            generation,
            base,
            bytes,
            _memory: memory,
        }
    }
}

impl BufferExchange {
    /// Waits until this rank has imported a number and generation of rank `from`, at most `limit`, and not where `is_over` says that it never will.
    ///
    /// # Errors
    /// Why it is not imported, in words.
    pub(crate) fn wait_for_import(
        &self,
        from: u32,
        (number, generation): (u32, u32),
        limit: Duration,
        is_over: impl Fn() -> bool,
    ) -> Result<Arc<ImportedBuffer>, String> {
        let deadline = Instant::now() + limit;
        loop {
            let imported = self.shared.imported.upgrade();
            let found = imported.and_then(|imported| lock(&imported).get(&(from, number)).cloned());
            if let Some(memory) = found.filter(|memory| memory.generation == generation) {
                return Ok(memory);
            }
            if is_over() || Instant::now() >= deadline {
                let failure = lock(&self.shared.failures).get(&(from, number)).cloned();
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
