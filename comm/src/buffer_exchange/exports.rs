//! The buffers that a rank has exported.

use std::{collections::HashMap, ops::Range, sync::Arc};

use ringsight_kernels::{ExportedBuffer, cuda::peer_memory::MAX_EXPORTS};

use super::log_not_exported;
use crate::device::{Device, VmmChunk};

/// An exported buffer.
#[derive(Clone, Debug)]
pub(super) enum Export {
    /// An allocation, as the driver numbers it.
    Whole { id: u64, start: usize },
    /// Chunks that are mapped one behind the other, at least one.
    Chunks(Arc<[VmmChunk]>),
}

impl Export {
    pub(super) fn start(&self) -> usize {
        match self {
            Self::Whole { start, .. } => *start,
            Self::Chunks(chunks) => chunks[0].start,
        }
    }

    /// Whether any of it still exists: an operation may be using it.
    pub(super) fn is_here(&self, device: &dyn Device, number: i32) -> bool {
        match self {
            Self::Whole { id, start } => device
                .allocation(*start, 1, number)
                .is_some_and(|here| here.id == *id),
            Self::Chunks(chunks) => {
                let is_here = |chunk: &VmmChunk| {
                    let here = device.vmm_chunks(chunk.start, 1, number, &[]);
                    here.is_some_and(|here| here == [*chunk])
                };
                chunks.iter().any(is_here)
            }
        }
    }

    /// The addresses of chunks; `None` of an allocation.
    pub(super) fn range(&self) -> Option<Range<usize>> {
        let Self::Chunks(chunks) = self else { return None };
        let last = chunks.last()?;
        Some(chunks[0].start..last.start + last.bytes)
    }

    /// Whether a buffer is in exported chunks that still exist. Other chunks of the export do not matter.
    pub(super) fn holds(&self, device: &dyn Device, number: i32, address: usize, bytes: usize) -> bool {
        let (Self::Chunks(chunks), Some(range)) = (self, self.range()) else {
            return false;
        };
        let is_within = range.start <= address && address.saturating_add(bytes) <= range.end;
        let here = || device.vmm_chunks(address, bytes, number, &[]);
        is_within && here().is_some_and(|here| chunks.windows(here.len()).any(|some| some == here))
    }
}

/// The buffers that this rank has exported.
pub(super) struct Exports {
    /// By number; `None` where a number is free.
    pub(super) entries: Vec<Option<Export>>,
    /// Of the present export of each number, or the last one.
    pub(super) generations: Vec<u32>,
    pub(super) by_id: HashMap<u64, u32>,
    /// No number was free, which has been logged.
    pub(super) was_full: bool,
}

impl Exports {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.iter().all(Option::is_none)
    }

    /// A free number for what begins at `start`.
    pub(super) fn place(&mut self, start: usize) -> Option<usize> {
        let place = self.entries.iter().position(Option::is_none);
        // Said of the first: there may be one with each operation.
        if place.is_none() && !std::mem::replace(&mut self.was_full, true) {
            log_not_exported(
                start,
                &format_args!("{MAX_EXPORTS} others are open already (which is said once)"),
            );
        }
        place
    }

    pub(super) fn exported(&self, number: usize) -> Option<ExportedBuffer> {
        Some(ExportedBuffer {
            start: self.entries[number].as_ref()?.start() as u64,
            generation: self.generations[number],
            number: number as u32,
        })
    }
}
