//! Memory of a GPU that kernels of other GPUs and other processes reach: by peer access within a process, by CUDA IPC between
//! processes, and where callers have mapped it by pieces ([`pieces`]) by these.
//!
//! That of a communicator that has ended is kept for the next one ([`release`]).

use std::{
    collections::HashMap,
    ffi::c_int,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUipcMem_flags_enum, CUipcMemHandle, CUresult, CUstream,
};

use super::{
    driver::{OutsideCapture, call, check},
    gpu::{Gpu, zero, zeroed},
    nvlink::{self, BusId},
    pieces, release,
};
use crate::{
    device::{DeviceError, Reached, Result, Share},
    log,
};
use ringsight_comm_base::{sync::lock, sys::random_u64};

/// Memory that was shared in this process, by address: ranks of one process keep it while any of them uses it.
static SHARED: Mutex<Option<HashMap<CUdeviceptr, Weak<Memory>>>> = Mutex::new(None);

/// What ended communicators have left.
static KEPT: Mutex<Vec<Block>> = Mutex::new(Vec::new());

/// An allocation.
#[derive(Clone, Copy)]
struct Block {
    base: CUdeviceptr,
    bytes: usize,
    device: c_int,
    context: CUcontext,
}

// SAFETY: an address and a context, which belong to no thread.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// An allocation that is in use; what is dropped is kept.
pub(super) struct Memory(Block);

impl Drop for Memory {
    fn drop(&mut self) {
        lock(&KEPT).push(self.0);
        release::kept();
    }
}

/// What another process has allocated, as this one has opened it.
struct Opened(Block);

impl Drop for Opened {
    fn drop(&mut self) {
        release::keep(self.0.bytes, Box::new(Closing(self.0)));
    }
}

/// What is closed when it is dropped.
struct Closing(Block);

impl Drop for Closing {
    fn drop(&mut self) {
        // Dropped by the thread that releases things: what is current there matters to nobody.
        // SAFETY: a context that lives as long as the process; the address is given back once.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.0.context);
            let _ = sys::cuIpcCloseMemHandle(self.0.base);
        }
    }
}

/// Bytes that are kept.
pub(super) fn kept_bytes() -> usize {
    lock(&KEPT).iter().map(|block| block.bytes).sum()
}

/// Frees what is kept; for the thread that releases things.
pub(super) fn free_kept() {
    // Not under the lock: communicators that begin do not wait for it.
    let kept = std::mem::take(&mut *lock(&KEPT));
    for block in kept {
        // SAFETY: as in `Closing`.
        unsafe {
            let _ = sys::cuCtxSetCurrent(block.context);
            let _ = sys::cuMemFree_v2(block.base);
        }
    }
}

/// The smallest that is kept on a device of those that are at least so large, and no more than a quarter larger.
fn fitting(kept: &[Block], device: c_int, bytes: usize) -> Option<usize> {
    let fits = |block: &Block| block.device == device && (bytes..=bytes + bytes / 4).contains(&block.bytes);
    let fitting = kept.iter().enumerate().filter(|(_, block)| fits(block));
    fitting
        .min_by_key(|(_, block)| block.bytes)
        .map(|(index, _)| index)
}

impl Memory {
    /// Zeroed memory of a GPU, whose context is current.
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let kept = {
            let mut kept = lock(&KEPT);
            fitting(&kept, gpu.device, bytes).map(|index| kept.swap_remove(index))
        };
        if let Some(block) = kept {
            let memory = Self(block);
            zero(block.base, bytes, gpu.stream)?;
            return Ok(memory);
        }
        Ok(Self(Block {
            base: zeroed(bytes, gpu.stream)?,
            bytes,
            device: gpu.device,
            context: gpu.context,
        }))
    }

    pub(super) fn base(&self) -> CUdeviceptr {
        self.0.base
    }
}

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Handle {
    /// Of its process.
    process: u64,
    device: c_int,
    /// Where the device is, whatever number it has in a process.
    bus: BusId,
    base: CUdeviceptr,
    /// What it keeps where it is opened; of a caller's allocation nothing may be kept.
    bytes: u64,
    /// `None` if other processes cannot reach it.
    ipc: Option<[u8; IPC_BYTES]>,
}

const IPC_BYTES: usize = size_of::<CUipcMemHandle>();

impl Handle {
    const BYTES: usize = 8 + 4 + size_of::<BusId>() + 8 + 8 + 1 + IPC_BYTES;

    fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(Self::BYTES);
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.device.to_le_bytes());
        bytes.extend(self.bus);
        bytes.extend(self.base.to_le_bytes());
        bytes.extend(self.bytes.to_le_bytes());
        bytes.push(self.ipc.is_some().into());
        bytes.extend(self.ipc.unwrap_or([0; IPC_BYTES]));
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (process, rest) = bytes.split_first_chunk()?;
        let (device, rest) = rest.split_first_chunk()?;
        let (bus, rest) = rest.split_first_chunk()?;
        let (base, rest) = rest.split_first_chunk()?;
        let (of_bytes, rest) = rest.split_first_chunk()?;
        let (has_ipc, ipc) = rest.split_first()?;
        let ipc: [u8; IPC_BYTES] = ipc.try_into().ok()?;
        (*has_ipc <= 1).then_some(Self {
            process: u64::from_le_bytes(*process),
            device: c_int::from_le_bytes(*device),
            bus: *bus,
            base: CUdeviceptr::from_le_bytes(*base),
            bytes: u64::from_le_bytes(*of_bytes),
            ipc: (*has_ipc == 1).then_some(ipc),
        })
    }
}

/// A number that no other process has. A forked child has its parent's, and no CUDA.
fn process() -> Result<u64> {
    static PROCESS: OnceLock<std::result::Result<u64, String>> = OnceLock::new();
    PROCESS
        .get_or_init(|| random_u64().map_err(|error| error.to_string()))
        .clone()
        .map_err(|error| DeviceError::Resource(format!("no random number: {error}")))
}

/// What opens an allocation in other processes.
fn ipc_of(base: CUdeviceptr) -> Result<[u8; IPC_BYTES]> {
    let mut ipc = CUipcMemHandle {
        reserved: [0; IPC_BYTES],
    };
    let _outside = OutsideCapture::enter()?;
    // SAFETY: written to the local; what is no allocation's base is refused.
    unsafe { call!(cuIpcGetMemHandle(&raw mut ipc, base)) }?;
    Ok(ipc.reserved.map(|byte| byte as u8))
}

fn handle(gpu: &Gpu, (base, bytes): (CUdeviceptr, u64), ipc: Option<[u8; IPC_BYTES]>) -> Result<Handle> {
    Ok(Handle {
        process: process()?,
        device: gpu.device,
        bus: nvlink::bus_id(gpu.device)?,
        base,
        bytes,
        ipc,
    })
}

/// The size of a caller's allocation: more than may be kept.
pub(super) const CALLERS: u64 = u64::MAX >> 8;

/// What other processes reach a caller's allocation by.
pub(super) fn export(gpu: &Gpu, base: CUdeviceptr) -> Result<Vec<u8>> {
    Ok(handle(gpu, (base, CALLERS), Some(ipc_of(base)?))?.to_bytes())
}

/// What other processes need beside the pieces of a caller's memory.
pub(super) fn export_pieces(gpu: &Gpu, start: CUdeviceptr) -> Result<Vec<u8>> {
    Ok(handle(gpu, (start, CALLERS), None)?.to_bytes())
}

/// Zeroed memory of a GPU, whose context is current.
pub(super) fn share(gpu: &Gpu, bytes: usize) -> Result<Share> {
    let memory = Arc::new(Memory::new(gpu, bytes)?);
    let base = memory.base();
    // Refused where processes are kept apart: then ranks of other processes will say so, and this one why.
    let ipc = ipc_of(base).inspect_err(|error| {
        tracing::info!(target: log::INIT, "Memory of GPU {} stays closed to other processes: {error}", gpu.device);
    });
    let handle = handle(gpu, (base, bytes as u64), ipc.ok())?;
    let mut shared = lock(&SHARED);
    let shared = shared.get_or_insert_default();
    shared.retain(|_, memory| memory.strong_count() > 0);
    shared.insert(base, Arc::downgrade(&memory));
    Ok(Share {
        base,
        handle: handle.to_bytes(),
        blocks: gpu.blocks,
        memory: Box::new(memory),
    })
}

fn invalid(text: &str) -> DeviceError {
    DeviceError::InvalidHandle(text.into())
}

/// What a handle says of memory that a GPU may reach, and whether it is that GPU's own.
fn place(gpu: &Gpu, bytes: &[u8]) -> Result<(Handle, bool)> {
    let handle = Handle::from_bytes(bytes).ok_or_else(|| invalid("a handle that cannot be read"))?;
    let own = nvlink::bus_id(gpu.device)?;
    let is_on_same_device = handle.bus == own;
    if !is_on_same_device && !nvlink::joins(gpu.device, &own, &handle.bus)? {
        return Err(DeviceError::InvalidUsage(format!(
            "NVLink does not join GPU {} and GPU {}",
            nvlink::name(&own),
            nvlink::name(&handle.bus)
        )));
    }
    Ok((handle, is_on_same_device))
}

/// Makes pieces of another process's memory reachable for a GPU, whose context is current.
pub(super) fn reach_pieces(
    gpu: &Gpu,
    bytes: &[u8],
    sizes: &[u64],
    next: &mut dyn FnMut() -> Result<OwnedFd>,
) -> Result<Reached> {
    let (_, is_on_same_device) = place(gpu, bytes)?;
    let mapping = pieces::Mapping::new(gpu, sizes, next)?;
    Ok(Reached {
        base: mapping.base(),
        is_foreign: true,
        is_on_same_device,
        memory: Box::new(mapping),
    })
}

/// Makes it reachable for a GPU, whose context is current. `peer` gives a GPU of this process.
pub(super) fn reach<'a>(
    gpu: &Gpu,
    bytes: &[u8],
    peer: impl FnOnce(c_int) -> Result<&'a Arc<Gpu>>,
) -> Result<Reached> {
    let (handle, is_on_same_device) = place(gpu, bytes)?;
    let _outside = OutsideCapture::enter()?;
    if handle.process != process()? {
        let ipc = handle
            .ipc
            .ok_or_else(|| invalid("its driver gives no CUDA IPC handle for the memory"))?;
        let ipc = CUipcMemHandle {
            reserved: ipc.map(|byte| byte as std::ffi::c_char),
        };
        let lazy = CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: written to the local; a handle that is none is refused.
        unsafe { call!(cuIpcOpenMemHandle_v2(&raw mut base, ipc, lazy)) }?;
        let opened = Opened(Block {
            base,
            bytes: handle.bytes.min(CALLERS) as usize,
            device: handle.device,
            context: gpu.context,
        });
        return Ok(Reached {
            base,
            is_foreign: true,
            is_on_same_device,
            memory: Box::new(opened),
        });
    }
    if handle.device != gpu.device {
        let other = peer(handle.device)?;
        let mut can = 0;
        // SAFETY: written to the local.
        unsafe { call!(cuDeviceCanAccessPeer(&raw mut can, gpu.device, handle.device)) }?;
        if can == 0 {
            return Err(DeviceError::Unavailable(format!(
                "GPU {} has no peer access to GPU {}, though NVLink joins them",
                gpu.device, handle.device
            )));
        }
        // SAFETY: a primary context that lives as long as the process.
        match unsafe { sys::cuCtxEnablePeerAccess(other.context, 0) } {
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            result => check("cuCtxEnablePeerAccess", result)?,
        }
    }
    let shared = lock(&SHARED);
    let memory = shared
        .as_ref()
        .and_then(|shared| shared.get(&handle.base)?.upgrade())
        .ok_or_else(|| invalid("memory that is gone"))?;
    Ok(Reached {
        base: handle.base,
        is_foreign: false,
        is_on_same_device,
        memory: Box::new(memory),
    })
}

/// Copies to shared memory; waits for that alone.
pub(super) fn write(base: CUdeviceptr, bytes: &[u8], stream: CUstream) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: the caller's memory, as long as the bytes; they stay until the copy is done.
    unsafe {
        call!(cuMemcpyHtoDAsync_v2(
            base,
            bytes.as_ptr().cast(),
            bytes.len(),
            stream
        ))?;
        call!(cuStreamSynchronize(stream))
    }
}

/// Copies from shared memory; waits for that alone.
pub(super) fn read(base: CUdeviceptr, bytes: &mut [u8], stream: CUstream) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: as above, and nobody else has the bytes meanwhile.
    unsafe {
        call!(cuMemcpyDtoHAsync_v2(
            bytes.as_mut_ptr().cast(),
            base,
            bytes.len(),
            stream
        ))?;
        call!(cuStreamSynchronize(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_serves_who_needs_about_as_much_on_that_gpu() {
        let block = |bytes, device| Block {
            base: 0x7f00_0000_0000,
            bytes,
            device,
            context: std::ptr::null_mut(),
        };
        let kept = [block(1000, 0), block(1200, 1), block(1100, 1), block(4000, 1)];
        assert_eq!(fitting(&kept, 1, 1000), Some(2));
        assert_eq!(fitting(&kept, 1, 1101), Some(1));
        assert_eq!(fitting(&kept, 0, 1000), Some(0));
        assert_eq!(fitting(&kept, 0, 1001), None);
        assert_eq!(fitting(&kept, 1, 3000), None);
    }

    #[test]
    fn a_handle_survives_the_way_and_rubbish_is_none() {
        let handle = Handle {
            process: 7,
            device: 3,
            bus: *b"0000:1B:00.0\0\0\0\0",
            base: 0x7f00_0000_0000,
            bytes: 0x1_0000_0001,
            ipc: Some([9; IPC_BYTES]),
        };
        for handle in [handle, Handle { ipc: None, ..handle }] {
            assert_eq!(Handle::from_bytes(&handle.to_bytes()), Some(handle));
        }
        let bytes = handle.to_bytes();
        assert_eq!(bytes.len(), Handle::BYTES);
        assert_eq!(Handle::from_bytes(&bytes[1..]), None);
        assert_eq!(Handle::from_bytes(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(Handle::from_bytes(&[2; Handle::BYTES]), None);
    }
}
