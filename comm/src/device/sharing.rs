//! Memory that other ranks' devices, other processes and network devices reach.
//!
//! A rank *exports* memory as bytes (a handle) or file descriptors, and another rank *imports* it. What an import returns keeps the memory
//! mapped.

use std::{any::Any, os::fd::OwnedFd, sync::Arc};

use super::{DeviceError, Result};

/// One VMM chunk: memory that a caller has mapped with `cuMemMap`, as part of a larger range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmChunk {
    /// Unique: what is mapped there later has another number.
    pub id: u64,
    /// The device whose memory it is.
    pub device: i32,
    /// Its start address.
    pub start: usize,
    /// Its length.
    pub bytes: usize,
}

/// Device memory that others reach.
pub struct SharedMemory {
    /// Its address for kernels of its own device.
    pub base: u64,
    /// The handle by which others import it.
    pub handle: Vec<u8>,
    /// The most blocks that a peer kernel may have on this device.
    pub blocks: u32,
    /// Frees it, or keeps it for reuse. Dropping this waits for nothing.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Memory of another rank, imported for the current device.
pub struct ImportedMemory {
    /// Its address for kernels of the current device.
    pub base: u64,
    /// How many bytes of it are mapped, as this process's driver says.
    pub bytes: u64,
    /// The other rank belongs to another process.
    pub is_foreign: bool,
    /// It is memory of the current device, too.
    pub is_on_same_device: bool,
    /// Keeps it mapped. Dropping this waits for nothing.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Device memory that network devices read and write (GPUDirect RDMA).
pub struct RdmaMemory {
    /// Its address for kernels of its own device.
    pub base: u64,
    /// The dma-buf by which network devices reach it, from `base` on.
    pub dma_buf: OwnedFd,
    /// Kernels see what network devices have written only after [`Sharing::flush_rdma_writes`].
    pub needs_flush: bool,
    /// Frees it when dropped, on any thread. No driver call waits for that.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Exports, imports, and memory for them. A device that shares nothing keeps the default methods.
pub trait Sharing {
    /// The handle by which another process imports the allocation that starts at `start` ([`Sharing::import_shared`]).
    ///
    /// # Errors
    /// The driver does not export it.
    fn export_allocation(&self, start: usize) -> Result<Vec<u8>> {
        Err(DeviceError::InvalidHandle(format!(
            "{start:#x} is nothing that other processes reach"
        )))
    }

    /// The VMM chunks of a buffer, in order of addresses. `None` unless all are memory of device `device` that can be exported
    /// ([`Sharing::export_vmm_chunk`]) and that kernels of the devices `others` of this process reach.
    fn vmm_chunks(
        &self,
        _address: usize,
        _bytes: usize,
        _device: i32,
        _others: &[i32],
    ) -> Option<Vec<VmmChunk>> {
        None
    }

    /// What a process needs for [`Sharing::import_vmm_chunks`] beside the chunks from `start` on.
    ///
    /// # Errors
    /// The device maps no VMM chunks.
    fn export_vmm_range(&self, start: usize) -> Result<Vec<u8>> {
        Err(no_vmm(start))
    }

    /// A descriptor of a chunk for another process. It keeps the memory.
    ///
    /// # Errors
    /// The driver does not export it, or it is gone.
    fn export_vmm_chunk(&self, chunk: &VmmChunk) -> Result<OwnedFd> {
        Err(no_vmm(chunk.start))
    }

    /// Maps another process's chunks for kernels of the current device, one behind the other. `range` is from [`Sharing::export_vmm_range`],
    /// `sizes` are the chunks' lengths, and `next` returns one descriptor after another. The result keeps the memory.
    ///
    /// # Errors
    /// Of `next`, and the driver's.
    fn import_vmm_chunks(
        &self,
        _range: &[u8],
        _sizes: &[u64],
        _next: &mut dyn FnMut() -> Result<OwnedFd>,
    ) -> Result<ImportedMemory> {
        Err(no_vmm(0))
    }

    /// Zeroed memory of the current device that kernels of other devices and processes may reach; `None` if the device has none.
    fn allocate_shared(&self, _bytes: usize) -> Result<Option<SharedMemory>> {
        Ok(None)
    }

    /// Makes what another rank of this machine has exported reachable for kernels of the current device. That rank must keep it while the result
    /// lives.
    fn import_shared(&self, handle: &[u8]) -> Result<ImportedMemory> {
        Err(DeviceError::InvalidHandle(format!(
            "{} bytes are no memory of this device's",
            handle.len()
        )))
    }

    /// Copies to shared memory. Returns when the copy is done, and waits for no kernel.
    fn write_shared(&self, _base: u64, _bytes: &[u8]) -> Result<()> {
        Err(DeviceError::InvalidUsage("this device shares no memory".into()))
    }

    /// Copies from shared memory. Returns when the copy is done, and waits for no kernel.
    fn read_shared(&self, _base: u64, _bytes: &mut [u8]) -> Result<()> {
        Err(DeviceError::InvalidUsage("this device shares no memory".into()))
    }

    /// The streams and events with which one communicator's copy-engine operations queue copies beside the caller's stream
    /// ([`Window::copy_engine`](ringsight_kernels::launch::Window::copy_engine)).
    fn copy_engine(&self) -> Result<Arc<dyn Any + Send + Sync>> {
        Err(DeviceError::InvalidUsage(
            "this device has no copy engines".into(),
        ))
    }

    /// Zeroed memory of the current device that network devices reach; `None` if the device uses host memory.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`]: its driver exports no dma-buf for it, or kernels would not see network devices' writes in order.
    fn allocate_rdma(&self, _bytes: usize) -> Result<Option<RdmaMemory>> {
        Ok(None)
    }

    /// Returns when kernels of device number `device` see what network devices wrote to its memory before this call. The device's context may
    /// be left current.
    fn flush_rdma_writes(&self, _device: i32) -> Result<()> {
        Ok(())
    }
}

fn no_vmm(start: usize) -> DeviceError {
    DeviceError::InvalidUsage(format!("this device maps no VMM chunks, so none at {start:#x}"))
}
