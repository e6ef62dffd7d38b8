//! Buffers and windows that the caller has registered with a communicator.
//!
//! On host memory there is nothing to map or to pin: every rank of a node copies through FIFOs. Memory of GPUs is shown to ranks of other
//! processes ([`crate::buffer_exchange`]). What is registered is
//! known, so that handles are checked and operations on registered buffers are marked ([`Flags::REGISTERED`]).
//!
//! [`Flags::REGISTERED`]: ringsight_records::Flags::REGISTERED

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use ringsight_comm_base::{
    error::{Error, Result},
    log,
    sync::lock,
};

use super::Communicator;

/// Registration goes by pages; windows begin at one (`NCCL_WIN_REQUIRED_ALIGNMENT`).
pub const PAGE: usize = 4096;
/// The first handle of a registration: no address of a program and no handle of a communicator.
const FIRST: usize = 0x5254_0000_0000;
const STEP: usize = 0x10;
/// Handles that this process has given out; none is used twice.
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// What a communicator's caller has registered. Dropped with the communicator.
#[derive(Debug, Default)]
pub(crate) struct Registrations {
    regions: Mutex<HashMap<usize, Region>>,
    /// How many there are, for those who only ask whether there are any.
    count: AtomicUsize,
}

#[derive(Debug)]
struct Region {
    /// From a page's first byte to a page's last.
    pages: Range<usize>,
    /// Calls that got this handle and have not given it back.
    references: usize,
}

impl Registrations {
    /// Registers `bytes` bytes at `address`. A buffer whose pages are registered already gets the same handle, to be given
    /// back as often as it was got.
    fn add(&self, address: usize, bytes: usize) -> Result<usize> {
        let end = address
            .checked_add(bytes)
            .and_then(|end| end.checked_next_multiple_of(PAGE));
        let Some(end) = end.filter(|_| address != 0) else {
            return Err(Error::argument(format!(
                "buff ({address:#x}) is no address of {bytes} bytes"
            )));
        };
        let pages = address / PAGE * PAGE..end;
        let mut regions = lock(&self.regions);
        let covering = regions
            .iter_mut()
            .find(|(_, region)| region.pages.start <= pages.start && pages.end <= region.pages.end);
        if let Some((handle, region)) = covering {
            region.references += 1;
            return Ok(*handle);
        }
        // Relaxed: handles need to differ, they order nothing.
        let handle = FIRST + STEP * GIVEN.fetch_add(1, Ordering::Relaxed);
        let references = 1;
        regions.insert(handle, Region { pages, references });
        // Relaxed: under the lock; who reads it without is on a thread without order to this one.
        self.count.store(regions.len(), Ordering::Relaxed);
        Ok(handle)
    }

    /// Gives a handle back.
    fn remove(&self, name: &str, handle: usize) -> Result<()> {
        let mut regions = lock(&self.regions);
        let region = regions.get_mut(&handle).ok_or_else(|| {
            Error::usage(format!(
                "{name} ({handle:#x}) is not registered with this communicator, or no longer"
            ))
        })?;
        region.references -= 1;
        if region.references == 0 {
            regions.remove(&handle);
            self.count.store(regions.len(), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether anything that is registered is in a range of addresses.
    fn overlaps(&self, addresses: &Range<usize>) -> bool {
        let regions = lock(&self.regions);
        regions
            .values()
            .any(|region| region.pages.start < addresses.end && addresses.start < region.pages.end)
    }

    /// Whether each of these buffers (address, bytes), as far as it is there, lies in a registered one.
    pub(crate) fn cover(&self, buffers: impl IntoIterator<Item = (usize, usize)>) -> bool {
        // Relaxed: see `add`.
        if self.count.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let regions = lock(&self.regions);
        buffers
            .into_iter()
            .filter(|(address, bytes)| *address != 0 && *bytes != 0)
            .all(|(address, bytes)| {
                regions.values().any(|region| {
                    region.pages.start <= address && address.saturating_add(bytes) <= region.pages.end
                })
            })
    }
}

impl Communicator {
    /// Registers a buffer, and lets other processes map it if they can.
    ///
    /// # Errors
    /// It is none, or another device's memory.
    pub(crate) fn register(&self, address: usize, bytes: usize) -> Result<usize> {
        // An address that is none is refused as such.
        if address != 0 {
            self.on_device(|device| self.buffers.check_registered(device, self.device, address))?;
        }
        let handle = self.registrations.add(address, bytes)?;
        self.show(address, bytes);
        Ok(handle)
    }

    /// Gives the handle `handle` of a registration back, which the caller knows as `name`.
    ///
    /// # Errors
    /// It is none of this communicator's.
    pub(crate) fn deregister(&self, name: &str, handle: usize) -> Result<()> {
        self.registrations.remove(name, handle)?;
        if let Some(exchange) = &self.launch.buffer_exchange {
            exchange.deregister(|addresses| self.registrations.overlaps(&addresses));
        }
        Ok(())
    }

    /// What the caller has registered.
    pub(crate) fn registrations(&self) -> &Registrations {
        &self.registrations
    }

    /// Lets other processes map a buffer before the first operation that uses it, if they can.
    fn show(&self, address: usize, bytes: usize) {
        let Some(exchange) = &self.launch.buffer_exchange else {
            return;
        };
        let shown = self.on_device(|device| {
            exchange.register(device, address, bytes);
            Ok(())
        });
        if let Err(error) = shown {
            tracing::info!(target: log::INIT, "Memory at {address:#x} is not shown to other processes: {}", error.text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringsight_comm_base::error::ResultCode;

    #[test]
    fn overlaps_are_allowed_and_contained_buffers_share_a_handle() {
        let registered = Registrations::default();
        assert!(!registered.cover([(0x10_0000, 1)]));
        let whole = registered.add(0x10_0010, 3 * PAGE).unwrap();
        let part = registered.add(0x10_1000, PAGE).unwrap();
        let over = registered.add(0x10_3000, 2 * PAGE).unwrap();
        assert_eq!(whole, part);
        assert_ne!(whole, over);
        // The pages that the buffer touches count.
        assert!(registered.cover([(0x10_0000, 4 * PAGE), (0x10_4000, PAGE), (0, 8)]));
        assert!(!registered.cover([(0x10_0000, 4 * PAGE + 1)]));
        registered.remove("handle", whole).unwrap();
        assert!(registered.cover([(0x10_0010, 3 * PAGE)]), "one of two");
        registered.remove("handle", part).unwrap();
        assert!(!registered.cover([(0x10_0010, 8)]));
        let gone = registered.remove("handle", whole).unwrap_err();
        assert_eq!(gone.code, ResultCode::InvalidUsage);
        assert!(
            registered.overlaps(&(0x10_4fff..0x10_5000)) && !registered.overlaps(&(0x10_5000..0x10_6000))
        );
        assert!(!registered.overlaps(&(0x10_2000..0x10_3000)), "given back");
        registered.remove("handle", over).unwrap();
    }

    #[test]
    fn impossible_buffers_are_refused() {
        let registered = Registrations::default();
        for (address, bytes) in [(0, 8), (usize::MAX, 8), (PAGE, usize::MAX)] {
            let error = registered.add(address, bytes).unwrap_err();
            assert_eq!(error.code, ResultCode::InvalidArgument);
        }
        assert_eq!(
            registered.remove("win", 7).unwrap_err().code,
            ResultCode::InvalidUsage
        );
    }
}
