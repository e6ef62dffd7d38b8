//! Device memory that kernels of other GPUs and other processes reach: by peer access within a process, by CUDA IPC between processes, and by
//! VMM chunks ([`vmm`]).
//!
//! Memory that an ended communicator has shared is kept for the next one ([`reclaim`]).

use std::{
    any::Any,
    collections::HashMap,
    ffi::c_int,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, OnceLock, Weak},
};

use cudarc::driver::sys::{
    self, CUdeviceptr, CUipcMem_flags_enum, CUipcMemHandle, CUpointer_attribute, CUresult,
};
use ringsight_comm_base::{sync::lock, sys::random_u64};

use super::{
    CudaDevice,
    copy_engine::CopyEngine,
    driver::{OutsideCapture, call, check, pointer_attributes},
    gpu::{DeviceMemory, Gpu},
    nvlink::{self, BusId},
    rdma,
    reclaim::{self, Block},
    vmm,
};
use crate::{
    device::{DeviceError, ImportedMemory, RdmaMemory, Result, SharedMemory, Sharing, VmmChunk},
    log,
};

/// Shared memory of this process, by address. Ranks of one process that import it keep it allocated.
static SHARED: Mutex<Option<HashMap<CUdeviceptr, Weak<DeviceMemory>>>> = Mutex::new(None);

/// Another process's allocation, as this process has opened it.
struct IpcImport(Block);

impl Drop for IpcImport {
    fn drop(&mut self) {
        reclaim::keep(self.0.bytes, Box::new(CloseIpc(self.0)));
    }
}

/// Closes an import when the reclaim thread drops it.
struct CloseIpc(Block);

impl Drop for CloseIpc {
    fn drop(&mut self) {
        // The reclaim thread needs no particular context.
        // SAFETY: a context that lives as long as the process; the import is closed once.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.0.context);
            let _ = sys::cuIpcCloseMemHandle(self.0.base);
        }
    }
}

/// The contents of an exported handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Handle {
    /// Number of the exporting process ([`process`]).
    process: u64,
    device: c_int,
    /// The device's PCI address: processes may number devices differently.
    bus: BusId,
    base: CUdeviceptr,
    /// Bytes that stay allocated while another process keeps its import; [`CALLERS`] for a caller's allocation.
    bytes: u64,
    /// `None` if other processes cannot import it by CUDA IPC.
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

/// A number that no other process has. A forked child has its parent's, but no CUDA.
fn process() -> Result<u64> {
    static PROCESS: OnceLock<std::result::Result<u64, String>> = OnceLock::new();
    PROCESS
        .get_or_init(|| random_u64().map_err(|error| error.to_string()))
        .clone()
        .map_err(|error| DeviceError::Resource(format!("no random number: {error}")))
}

/// The CUDA IPC handle of an allocation.
fn ipc_of(base: CUdeviceptr) -> Result<[u8; IPC_BYTES]> {
    let mut ipc = CUipcMemHandle {
        reserved: [0; IPC_BYTES],
    };
    let _outside = OutsideCapture::enter()?;
    // SAFETY: written to the local; an address that is no allocation's base is refused.
    unsafe { call!(cuIpcGetMemHandle(&raw mut ipc, base)) }?;
    Ok(ipc.reserved.map(|byte| byte as u8))
}

/// The handle of memory of a GPU.
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

/// The number of bytes in the handle of a caller's allocation, whose import is not kept.
const CALLERS: u64 = reclaim::AS_SOON_AS_IDLE as u64;

fn invalid(text: &str) -> DeviceError {
    DeviceError::InvalidHandle(text.into())
}

/// Reads a handle of memory that a GPU may reach. Returns it, and whether the memory is that GPU's own.
fn read_handle(gpu: &Gpu, bytes: &[u8]) -> Result<(Handle, bool)> {
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

/// How many bytes are mapped from an address on, in the range that it is in.
fn mapped_bytes(base: CUdeviceptr) -> Result<u64> {
    use CUpointer_attribute as Of;
    let (mut start, mut bytes): (CUdeviceptr, usize) = (0, 0);
    // SAFETY: an address and a size.
    unsafe {
        pointer_attributes(
            base as usize,
            [
                (Of::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (&raw mut start).cast()),
                (Of::CU_POINTER_ATTRIBUTE_RANGE_SIZE, (&raw mut bytes).cast()),
            ],
        )
    }?;
    Ok((bytes as u64).saturating_sub(base.saturating_sub(start)))
}

/// Imports memory for a GPU, whose context is current. `peer` finds another GPU of this process.
fn import<'a>(
    gpu: &Gpu,
    bytes: &[u8],
    peer: impl FnOnce(c_int) -> Result<&'a Arc<Gpu>>,
) -> Result<ImportedMemory> {
    let (handle, is_on_same_device) = read_handle(gpu, bytes)?;
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
        // SAFETY: written to the local; an invalid handle is refused.
        unsafe { call!(cuIpcOpenMemHandle_v2(&raw mut base, ipc, lazy)) }?;
        let opened = IpcImport(Block {
            base,
            bytes: handle.bytes.min(CALLERS) as usize,
            device: handle.device,
            context: gpu.context,
        });
        return Ok(ImportedMemory {
            base,
            bytes: mapped_bytes(base)?,
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
    Ok(ImportedMemory {
        base: handle.base,
        bytes: memory.bytes() as u64,
        is_foreign: false,
        is_on_same_device,
        memory: Box::new(memory),
    })
}

impl Sharing for CudaDevice {
    fn export_allocation(&self, start: usize) -> Result<Vec<u8>> {
        let (gpu, base) = (self.entered()?, start as CUdeviceptr);
        Ok(handle(gpu, (base, CALLERS), Some(ipc_of(base)?))?.to_bytes())
    }

    fn vmm_chunks(&self, address: usize, bytes: usize, device: i32, others: &[i32]) -> Option<Vec<VmmChunk>> {
        vmm::chunks(address, bytes, device, others)
    }

    fn export_vmm_range(&self, start: usize) -> Result<Vec<u8>> {
        Ok(handle(self.entered()?, (start as CUdeviceptr, CALLERS), None)?.to_bytes())
    }

    fn export_vmm_chunk(&self, chunk: &VmmChunk) -> Result<OwnedFd> {
        vmm::export(chunk)
    }

    fn import_vmm_chunks(
        &self,
        range: &[u8],
        sizes: &[u64],
        next: &mut dyn FnMut() -> Result<OwnedFd>,
    ) -> Result<ImportedMemory> {
        let gpu = self.entered()?;
        let (_, is_on_same_device) = read_handle(gpu, range)?;
        let mapping = vmm::Mapping::new(gpu, sizes, next)?;
        Ok(ImportedMemory {
            base: mapping.base(),
            bytes: mapping.bytes() as u64,
            is_foreign: true,
            is_on_same_device,
            memory: Box::new(mapping),
        })
    }

    fn allocate_shared(&self, bytes: usize) -> Result<Option<SharedMemory>> {
        let gpu = self.entered()?;
        let memory = Arc::new(gpu.allocate(bytes)?);
        let base = memory.base();
        // Refused where processes are isolated from each other. Then ranks of other processes report that, and this one why.
        let ipc = ipc_of(base).inspect_err(|error| {
            tracing::info!(target: log::INIT, "Memory of GPU {} stays closed to other processes: {error}", gpu.device);
        });
        let handle = handle(gpu, (base, bytes as u64), ipc.ok())?;
        let mut shared = lock(&SHARED);
        let shared = shared.get_or_insert_default();
        shared.retain(|_, memory| memory.strong_count() > 0);
        shared.insert(base, Arc::downgrade(&memory));
        Ok(Some(SharedMemory {
            base,
            handle: handle.to_bytes(),
            blocks: gpu.blocks,
            memory: Box::new(memory),
        }))
    }

    fn import_shared(&self, handle: &[u8]) -> Result<ImportedMemory> {
        import(self.entered()?, handle, |device| self.gpu(device))
    }

    fn write_shared(&self, base: u64, bytes: &[u8]) -> Result<()> {
        let stream = self.entered()?.stream;
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

    fn read_shared(&self, base: u64, bytes: &mut [u8]) -> Result<()> {
        let stream = self.entered()?.stream;
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

    fn copy_engine(&self) -> Result<Arc<dyn Any + Send + Sync>> {
        self.entered()?;
        Ok(Arc::new(CopyEngine::new()?))
    }

    fn allocate_rdma(&self, bytes: usize) -> Result<Option<RdmaMemory>> {
        rdma::allocate(self.entered()?, bytes).map(Some)
    }

    fn flush_rdma_writes(&self, device: i32) -> Result<()> {
        rdma::flush(self.gpu(device)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_survives_a_round_trip_and_rubbish_is_refused() {
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
