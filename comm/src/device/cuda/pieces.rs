//! Memory that callers have mapped by pieces (`cuMemMap`): other processes get a descriptor of each piece and map them anew, one behind
//! the other.
//!
//! None of these calls waits for kernels (measured with driver 580, while a kernel runs: 0.4 ms to
//! export a piece, 0.06 ms to import it, 2.2 ms to open what was mapped, 0.25 ms to unmap it): what is not needed any more is kept until none of the library's runs. Pieces of host memory, or of another
//! GPU than the communicator's, are none here.

use std::{
    ffi::{c_int, c_uint, c_void},
    os::fd::{AsRawFd, FromRawFd, OwnedFd},
};

use cudarc::driver::sys::{
    self, CUcontext, CUdeviceptr, CUmemAccess_flags_enum, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUmemorytype, CUpointer_attribute,
};

use super::{driver::call, gpu::Gpu, memory::ask, release, share::CALLERS};
use crate::device::{DeviceError, Piece, Result};

/// How pieces are given to other processes.
const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
/// What a mapping is opened for.
const ALL: CUmemAccess_flags_enum = CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
/// Most pieces of a buffer: a terabyte of the smallest there are.
const MOST: usize = 1 << 19;

const fn of_device(device: c_int) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device,
    }
}

/// What the driver says of the piece that an address is in.
#[derive(Clone, Copy, Debug, Default)]
struct About {
    kind: c_uint,
    device: c_int,
    start: CUdeviceptr,
    bytes: usize,
    /// A bit for each way in which other processes may be given it.
    ways: u64,
    id: u64,
}

impl About {
    /// The piece, if other processes may have it.
    fn piece(self, address: usize, device: c_int) -> Option<Piece> {
        const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let start = self.start as usize;
        let holds =
            address >= start && address - start < self.bytes && start.checked_add(self.bytes).is_some();
        let may = self.ways & u64::from(DESCRIPTOR.0) != 0;
        (self.kind == DEVICE && self.device == device && may && holds).then_some(Piece {
            id: self.id,
            device,
            start,
            bytes: self.bytes,
        })
    }
}

/// The piece that an address is in.
fn at(address: usize, device: c_int) -> Option<Piece> {
    use CUpointer_attribute as Of;
    let mut about = About::default();
    // SAFETY: an unsigned int, an int, an address, a size, and two numbers of 64 bits; the bits of ways are of 32 for some drivers, the lower
    // ones.
    let known = unsafe {
        ask(
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
                    (&raw mut about.ways).cast(),
                ),
                (Of::CU_POINTER_ATTRIBUTE_BUFFER_ID, (&raw mut about.id).cast()),
            ],
        )
    };
    known.ok()?;
    about.piece(address, device)
}

/// Whether kernels of another GPU of this process may read and write a piece.
fn is_open_to(piece: &Piece, device: c_int) -> bool {
    let (mut flags, place) = (0, of_device(device));
    // SAFETY: reads the one local and writes the other.
    let known = unsafe {
        call!(cuMemGetAccess(
            &raw mut flags,
            &raw const place,
            piece.start as CUdeviceptr
        ))
    };
    known.is_ok() && flags == ALL as u64
}

/// The pieces that these bytes are in, if all are memory of `device` that other processes may be given and that is open to `others`.
pub(super) fn of(address: usize, bytes: usize, device: c_int, others: &[c_int]) -> Option<Vec<Piece>> {
    let end = address.checked_add(bytes.max(1))?;
    let (mut pieces, mut next) = (Vec::new(), address);
    while next < end && pieces.len() < MOST {
        let piece = at(next, device).filter(|piece| others.iter().all(|other| is_open_to(piece, *other)))?;
        next = piece.start + piece.bytes;
        pieces.push(piece);
    }
    (next >= end).then_some(pieces)
}

/// A piece's memory, whether it is mapped or not.
struct Physical(CUmemGenericAllocationHandle);

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: a reference that was given once. What is mapped stays until it is unmapped.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// A descriptor of a piece, for another process.
pub(super) fn export(piece: &Piece) -> Result<OwnedFd> {
    let (mut handle, mut fd) = (0, -1);
    // SAFETY: written to the locals: a handle, and the `int` that this type of descriptor asks for. An address where nothing is mapped is
    // refused.
    let fd = unsafe {
        call!(cuMemRetainAllocationHandle(
            &raw mut handle,
            piece.start as *mut c_void
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
    // What is there now was there before: no piece has the number of another.
    let same = at(piece.start, piece.device) == Some(*piece);
    same.then_some(fd)
        .ok_or_else(|| DeviceError::InvalidHandle(format!("the memory at {:#x} is gone", piece.start)))
}

/// Pieces of another process, mapped one behind the other.
pub(super) struct Mapping(Option<Mapped>);

impl Mapping {
    /// Of pieces of these lengths, for a GPU whose context is current.
    pub(super) fn new(gpu: &Gpu, sizes: &[u64], next: &mut dyn FnMut() -> Result<OwnedFd>) -> Result<Self> {
        let mut mapped = Mapped::reserve(gpu, sizes)?;
        for bytes in sizes {
            mapped.add(*bytes as usize, &next()?)?;
        }
        mapped.open(gpu.device)?;
        Ok(Self(Some(mapped)))
    }

    /// Where the first is.
    pub(super) fn base(&self) -> CUdeviceptr {
        self.0.as_ref().map_or(0, |mapped| mapped.base)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Kernels may use it that were told so before it was taken back: it goes when none runs.
        release::keep(CALLERS as usize, Box::new(self.0.take()));
    }
}

/// Addresses, and what is mapped there.
struct Mapped {
    base: CUdeviceptr,
    bytes: usize,
    /// Of what is mapped, from the base on.
    sizes: Vec<usize>,
    context: CUcontext,
}

// SAFETY: addresses and a context, which belong to no thread.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn reserve(gpu: &Gpu, sizes: &[u64]) -> Result<Self> {
        let bytes = (sizes.len() <= MOST).then(|| total(sizes)).flatten();
        let bytes = bytes
            .ok_or_else(|| DeviceError::InvalidHandle(format!("{} pieces that cannot be", sizes.len())))?;
        let mut base = 0;
        // SAFETY: written to the local; anywhere, aligned as the driver likes it.
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

    /// Maps a piece behind the others. The descriptor is the caller's.
    fn add(&mut self, bytes: usize, fd: &OwnedFd) -> Result<()> {
        let mut handle = 0;
        // The driver takes the descriptor's number in the place of a pointer.
        let number = std::ptr::without_provenance_mut(fd.as_raw_fd() as usize);
        // SAFETY: written to the local; a descriptor that is none of the driver's is refused. Addresses that were reserved, where nothing is
        // mapped yet; a length that is not the piece's is refused.
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

    /// Lets kernels of a GPU read and write all.
    fn open(&self, device: c_int) -> Result<()> {
        let access = CUmemAccessDesc {
            location: of_device(device),
            flags: ALL,
        };
        // SAFETY: reads the local; all of it is mapped.
        unsafe { call!(cuMemSetAccess(self.base, self.bytes, &raw const access, 1)) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: a context that lives as long as the process; what was mapped and reserved here, once each.
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

/// `None` for what no process can have mapped.
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
    fn a_piece_is_what_others_may_be_given_of_that_gpu() {
        let about = About {
            kind: CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
            device: 1,
            start: 0x20_0000,
            bytes: 0x20_0000,
            ways: 1,
            id: 9,
        };
        let piece = Piece {
            id: 9,
            device: 1,
            start: 0x20_0000,
            bytes: 0x20_0000,
        };
        assert_eq!(about.piece(0x20_0000, 1), Some(piece));
        assert_eq!(about.piece(0x3f_ffff, 1), Some(piece));
        assert_eq!(about.piece(0x40_0000, 1), None, "behind its end");
        assert_eq!(about.piece(0x1f_ffff, 1), None, "before its beginning");
        assert_eq!(about.piece(0x20_0000, 0), None, "another GPU's");
        assert_eq!(
            About { ways: 8, ..about }.piece(0x20_0000, 1),
            None,
            "by fabric alone"
        );
        assert_eq!(About { kind: 1, ..about }.piece(0x20_0000, 1), None, "the host's");
        assert_eq!(About::default().piece(0, 0), None);
    }

    #[test]
    fn lengths_that_cannot_be_are_none() {
        assert_eq!(total(&[2 << 20, 4 << 20]), Some(6 << 20));
        for sizes in [&[][..], &[0], &[2, 0], &[u64::MAX], &[u64::MAX, 2], &[1 << 47, 1]] {
            assert_eq!(total(sizes), None, "{sizes:?}");
        }
    }
}
