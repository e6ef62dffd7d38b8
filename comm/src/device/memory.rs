//! Memory of callers and for callers.

use std::any::Any;

use super::Result;

/// An allocation that a caller's buffer lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Unique: no other allocation ever has this number.
    pub id: u64,
    /// Its start address.
    pub start: usize,
}

/// Keeps host memory registered with the device; `None` if the device reaches all memory anyway.
pub type HostRegistration = Option<Box<dyn Send + Sync>>;

/// Buffers that operations use, and memory that must not be freed at once.
pub trait Memory {
    /// Device memory of `bytes` bytes, aligned to 4096; null for 0 bytes.
    fn allocate(&self, bytes: usize) -> Result<*mut u8>;

    /// Frees memory of [`Memory::allocate`]. Null is accepted.
    fn free(&self, pointer: *mut u8) -> Result<()>;

    /// Fails if kernels of device number `device` cannot use what is at `address`, as far as that can be told without a fault.
    /// `accept_unknown`: accept addresses of which the driver knows nothing, since they may be mapped by the time that kernels run.
    fn check_buffer(&self, _address: usize, _device: i32, _accept_unknown: bool) -> Result<()> {
        Ok(())
    }

    /// The allocation of a buffer, if it is memory of device `device` that reaches as far as [`Sharing::import_shared`](super::Sharing) does:
    /// other devices of this process use it at the same address, and other processes import it
    /// ([`Sharing::export_allocation`](super::Sharing::export_allocation)).
    fn allocation(&self, _address: usize, _bytes: usize, _device: i32) -> Option<Allocation> {
        None
    }

    /// Makes page-aligned host memory reachable for kernels of all devices, at the host's address, while the result lives. The memory must stay
    /// mapped for longer.
    fn register_host(&self, _base: usize, _bytes: usize) -> Result<HostRegistration> {
        Ok(None)
    }

    /// Drops a registration of `bytes` bytes and its memory, which only the caller holds. Unregistering may take as long as the device is busy,
    /// so the device may keep them until it is idle.
    fn release_when_idle(&self, _bytes: usize, garbage: Box<dyn Any + Send>) {
        drop(garbage);
    }

    /// Drops something that calls the device when it is dropped and waits for no kernel, on a thread of the device.
    fn drop_deferred(&self, garbage: Box<dyn Any + Send>) {
        drop(garbage);
    }
}
