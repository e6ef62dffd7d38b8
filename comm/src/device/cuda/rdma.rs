//! GPUDirect RDMA: device memory that network devices read and write by its dma-buf.

use std::{
    ffi::c_int,
    os::fd::{FromRawFd, OwnedFd},
};

use cudarc::driver::sys::{
    CUGPUDirectRDMAWritesOrdering, CUdevice_attribute, CUflushGPUDirectRDMAWritesOptions,
    CUflushGPUDirectRDMAWritesScope, CUflushGPUDirectRDMAWritesTarget, CUmemRangeHandleType,
};

use super::{
    driver::{OutsideCapture, attribute, call},
    gpu::Gpu,
};
use crate::device::{DeviceError, RdmaMemory, Result};

/// Granularity in which GPUs map their memory to the bus. A dma-buf must begin and end at pages of the host, whatever their size.
const GRAIN: usize = 2 << 20;

/// Whether kernels of a GPU see network devices' writes only after [`flush`].
fn needs_flush(device: c_int) -> Result<bool> {
    use CUdevice_attribute as Of;
    let ordering = attribute(device, Of::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
    if ordering >= CUGPUDirectRDMAWritesOrdering::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER as c_int {
        return Ok(false);
    }
    let options = attribute(
        device,
        Of::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS,
    )?;
    let host = CUflushGPUDirectRDMAWritesOptions::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST as c_int;
    if options & host == 0 {
        return Err(DeviceError::Unavailable(format!(
            "GPU {device} needs writes of network devices to be flushed, and its driver offers no cuFlushGPUDirectRDMAWrites"
        )));
    }
    Ok(true)
}

/// Zeroed memory of a GPU, whose context is current.
pub(super) fn allocate(gpu: &Gpu, bytes: usize) -> Result<RdmaMemory> {
    let device = gpu.device;
    if attribute(device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)? == 0 {
        return Err(DeviceError::Unavailable(format!(
            "GPU {device} exports no dma-buf (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED): the kernel or its driver cannot"
        )));
    }
    let needs_flush = needs_flush(device)?;
    let bytes = bytes.next_multiple_of(GRAIN);
    let memory = gpu.allocate(bytes)?;
    let base = memory.base();
    let mut fd = -1;
    let _outside = OutsideCapture::enter()?;
    // SAFETY: an `int` to write to, as this type of handle needs; a range that is no device memory is refused.
    unsafe {
        call!(cuMemGetHandleForAddressRange(
            (&raw mut fd).cast(),
            base,
            bytes,
            CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
            0
        ))
    }?;
    Ok(RdmaMemory {
        base,
        // SAFETY: a new descriptor, which nobody else owns.
        dma_buf: unsafe { OwnedFd::from_raw_fd(fd) },
        needs_flush,
        memory: Box::new(memory),
    })
}

/// Returns when kernels of a GPU see what network devices wrote to its memory before.
pub(super) fn flush(gpu: &Gpu) -> Result<()> {
    gpu.make_current()?;
    let _outside = OutsideCapture::enter()?;
    // SAFETY: only numbers as arguments; the context is current.
    unsafe {
        call!(cuFlushGPUDirectRDMAWrites(
            CUflushGPUDirectRDMAWritesTarget::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
            CUflushGPUDirectRDMAWritesScope::CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        ))
    }
}
