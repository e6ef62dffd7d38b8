//! VMM chunks: memory that callers have mapped with `cuMemMap`. Other processes get a descriptor of each chunk and map them anew, one behind the
//! other.
//!
//! None of these driver calls waits for kernels. Measured with driver 580 while a kernel runs: 0.4 ms to export a chunk, 0.06 ms to import it,
//! 2.2 ms to set access to a mapping, 0.25 ms to unmap it. A mapping that is not needed any more is kept until none of the library's kernels runs.
//! Chunks of host memory, or of another GPU than the communicator's, are not exported.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUmemAccess_flags_enum, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmemorytype, CUpointer_attribute,
};

use super::{
    driver::{call, pointer_attributes},
    gpu::Gpu,
    reclaim,
};
use crate::device::{DeviceError, Result, VmmChunk};

/// How chunks are exported.
const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// The access that kernels have.
const ALL: CUmemAccess_flags_enum = CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
/// The most chunks of a buffer: a terabyte of the smallest chunks.
const MAX_CHUNKS: usize = 1 << 19;

const fn of_device(device: c_int) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// What the driver says of the chunk around an address.
#[derive(Clone, Copy, Debug, Default)]
struct About {
    kind: c_uint,
    device: c_int,
    start: CUdeviceptr,
    bytes: usize,
    /// Bit mask of the handle types by which it may be exported.
    handle_types: u64,
    id: u64,
}

impl About {
    /// The chunk, if it may be exported.
    fn chunk(self, address: usize, device: c_int) -> Option<VmmChunk> {
        const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let start = self.start as usize;
        let holds =
            address >= start && address - start < self.bytes && start.checked_add(self.bytes).is_some();
        let may = self.handle_types & u64::from(DESCRIPTOR.0) != 0;
        (self.kind == DEVICE && self.device == device && may && holds).then_some(VmmChunk {
            id: self.id,
            device,
            start,
            bytes: self.bytes,
        })
    }
}

/// The chunk around an address.
fn chunk_at(address: usize, device: c_int) -> Option<VmmChunk> {
    use CUpointer_attribute as Of;
    let mut about = About::default();
    // SAFETY: an unsigned int, an int, an address, a size, and two 64-bit numbers. Some drivers write only the lower 32 bits of the handle types.
    let known = unsafe {
        pointer_attributes(
            address,
            [
                (Of::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut about.kind).cast()),
                (
                    Of::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                    (&raw mut about.device).cast(),
                ),
                (
                    Of::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                    (&raw mut about.start).cast(),
                ),
                (
                    Of::CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
                    (&raw mut about.bytes).cast(),
                ),
                (
                    Of::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
                    (&raw mut about.handle_types).cast(),
                ),
                (Of::CU_POINTER_ATTRIBUTE_BUFFER_ID, (&raw mut about.id).cast()),
            ],
        )
    };
    known.ok()?;
    about.chunk(address, device)
}

/// Whether kernels of another GPU of this process may read and write a chunk.
fn is_accessible_to(chunk: &VmmChunk, device: c_int) -> bool {
    let (mut flags, place) = (0, of_device(device));
    // SAFETY: reads the one local and writes the other.
    let known = unsafe {
        call!(cuMemGetAccess(
            &raw mut flags,
            &raw const place,
            chunk.start as CUdeviceptr
        ))
    };
    known.is_ok() && flags == ALL as u64
}

/// The chunks of a buffer, if all are memory of `device` that may be exported and that kernels of `others` reach.
pub(super) fn chunks(address: usize, bytes: usize, device: c_int, others: &[c_int]) -> Option<Vec<VmmChunk>> {
    let end = address.checked_add(bytes.max(1))?;
    let (mut chunks, mut next) = (Vec::new(), address);
    while next < end && chunks.len() < MAX_CHUNKS {
        let chunk = chunk_at(next, device)
            .filter(|chunk| others.iter().all(|other| is_accessible_to(chunk, *other)))?;
        next = chunk.start + chunk.bytes;
        chunks.push(chunk);
    }
    (next >= end).then_some(chunks)
}

/// A reference to a chunk's memory, mapped or not.
struct Physical(CUmemGenericAllocationHandle);

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: a reference that is released once. Mapped memory stays until it is unmapped.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// A descriptor of a chunk, for another process.
pub(super) fn export(chunk: &VmmChunk) -> Result<OwnedFd> {
    let (mut handle, mut fd) = (0, -1);
    // SAFETY: written to the locals: a handle, and the `int` that this type of handle needs. An address where nothing is mapped is refused.
    let fd = unsafe {
        call!(cuMemRetainAllocationHandle(
            &raw mut handle,
            chunk.start as *mut c_void
        ))?;
        let handle = Physical(handle);
        call!(cuMemExportToShareableHandle(
            (&raw mut fd).cast::<c_void>(),
            handle.0,
            DESCRIPTOR,
            0
        ))?;
        OwnedFd::from_raw_fd(fd)
    };
    // Chunk numbers are unique, so what is mapped there now is what was exported.
    let same = chunk_at(chunk.start, chunk.device) == Some(*chunk);
    same.then_some(fd)
        .ok_or_else(|| DeviceError::InvalidHandle(format!("the memory at {:#x} is gone", chunk.start)))
}

/// Chunks of another process, mapped one behind the other.
pub(super) struct Mapping(Option<Mapped>);

impl Mapping {
    /// Maps chunks of these lengths for a GPU whose context is current.
    pub(super) fn new(gpu: &Gpu, sizes: &[u64], next: &mut dyn FnMut() -> Result<OwnedFd>) -> Result<Self> {
        let mut mapped = Mapped::reserve(gpu, sizes)?;
        for bytes in sizes {
            mapped.add(*bytes as usize, &next()?)?;
        }
        mapped.allow(gpu.device)?;
        Ok(Self(Some(mapped)))
    }

    /// Address of the first chunk.
    pub(super) fn base(&self) -> CUdeviceptr {
        self.0.as_ref().map_or(0, |mapped| mapped.base)
    }

    /// Length of all chunks.
    pub(super) fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |mapped| mapped.bytes)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Kernels that were launched before may still use it, so it goes when none runs.
        reclaim::keep(reclaim::AS_SOON_AS_IDLE, Box::new(self.0.take()));
    }
}

/// A reserved range of addresses, and what is mapped there.
struct Mapped {
    base: CUdeviceptr,
    bytes: usize,
    /// Lengths of the mapped chunks, from the base on.
    sizes: Vec<usize>,
    context: CUcontext,
}

// SAFETY: addresses and a context, which belong to no thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn reserve(gpu: &Gpu, sizes: &[u64]) -> Result<Self> {
        let bytes = (sizes.len() <= MAX_CHUNKS).then(|| total(sizes)).flatten();
        let bytes = bytes
            .ok_or_else(|| DeviceError::InvalidHandle(format!("{} chunks that cannot be", sizes.len())))?;
        let mut base = 0;
        // SAFETY: written to the local; any address and alignment.
        unsafe { call!(cuMemAddressReserve(&raw mut base, bytes, 0, 0, 0)) }?;
        Ok(Self {
            base,
            bytes,
            sizes: Vec::new(),
            context: gpu.context,
        })
    }

    fn end(&self) -> CUdeviceptr {
        self.base + self.sizes.iter().sum::<usize>() as CUdeviceptr
    }

    /// Maps a chunk behind the others. The caller keeps the descriptor.
    fn add(&mut self, bytes: usize, fd: &OwnedFd) -> Result<()> {
        let mut handle = 0;
        // The driver takes the descriptor's number as a pointer.
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: written to the local; a descriptor of something else is refused. The addresses are reserved and nothing is mapped there yet; a
        // length other than the chunk's is refused.
        unsafe {
            call!(cuMemImportFromShareableHandle(
                &raw mut handle,
                number,
                DESCRIPTOR
            ))?;
            let handle = Physical(handle);
            call!(cuMemMap(self.end(), bytes, 0, handle.0, 0))?;
        }
        self.sizes.push(bytes);
        Ok(())
    }

    /// Lets kernels of a GPU read and write all of it.
    fn allow(&self, device: c_int) -> Result<()> {
        let access = CUmemAccessDesc {
            location: of_device(device),
            flags: ALL,
        };
        // SAFETY: reads the local; the whole range is mapped.
        unsafe { call!(cuMemSetAccess(self.base, self.bytes, &raw const access, 1)) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: a context that lives as long as the process. Each chunk is unmapped once, and the range is freed once.
        unsafe {
            let _ = sys::cuCtxSetCurrent(self.context);
            let mut start = self.base;
            for bytes in &self.sizes {
                let _ = sys::cuMemUnmap(start, *bytes);
                start += *bytes as CUdeviceptr;
            }
            let _ = sys::cuMemAddressFree(self.base, self.bytes);
        }
    }
}

/// The sum of the sizes; `None` if no process can map them.
fn total(sizes: &[u64]) -> Option<usize> {
    let add = |sum: usize, bytes: &u64| {
        let bytes = usize::try_from(*bytes).ok().filter(|bytes| *bytes > 0)?;
        sum.checked_add(bytes).filter(|sum| *sum <= 1 << 47)
    };
    sizes.iter().try_fold(0, add).filter(|sum| *sum > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_exportable_memory_of_that_gpu() {
        let about = About {
            kind: CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
            device: 1,
            start: 0x20_0000,
            bytes: 0x20_0000,
            handle_types: 1,
            id: 9,
        };
        let chunk = VmmChunk {
            id: 9,
            device: 1,
            start: 0x20_0000,
            bytes: 0x20_0000,
        };
        assert_eq!(about.chunk(0x20_0000, 1), Some(chunk));
        assert_eq!(about.chunk(0x3f_ffff, 1), Some(chunk));
        assert_eq!(about.chunk(0x40_0000, 1), None, "behind its end");
        assert_eq!(about.chunk(0x1f_ffff, 1), None, "before its beginning");
        assert_eq!(about.chunk(0x20_0000, 0), None, "another GPU's");
        assert_eq!(
            About {
                handle_types: 8,
                ..about
            }
            .chunk(0x20_0000, 1),
            None,
            "by fabric alone"
        );
        assert_eq!(About { kind: 1, ..about }.chunk(0x20_0000, 1), None, "the host's");
        assert_eq!(About::default().chunk(0, 0), None);
    }

    #[test]
    fn impossible_lengths_are_refused() {
        assert_eq!(total(&[2 << 20, 4 << 20]), Some(6 << 20));
        for sizes in [&[][..], &[0], &[2, 0], &[u64::MAX], &[u64::MAX, 2], &[1 << 47, 1]] {
            assert_eq!(total(sizes), None, "{sizes:?}");
        }
    }
}
