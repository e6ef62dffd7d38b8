//! Memory that callers ask for, and what can be told of memory that they bring.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUmemorytype, CUpointer_attribute};

use super::driver::{OutsideCapture, attribute, call, lacking};
use crate::device::{Allocation, DeviceError, Result};

/// The driver's memory goes by these. Who asks for less gets a piece of one that others have pieces of, too: it begins
/// anywhere, and what shares it with other processes shares theirs.
const GRANULARITY: usize = 2 << 20;

/// Memory of the current device, whose context is current. It is the caller's alone to its last page, and begins at one.
pub(super) fn allocate(bytes: usize) -> Result<*mut u8> {
    let whole = bytes.checked_next_multiple_of(GRANULARITY);
    let whole =
        whole.ok_or_else(|| DeviceError::Resource(format!("{bytes} bytes are more than there can be")))?;
    let _outside = OutsideCapture::enter()?;
    let mut pointer: CUdeviceptr = 0;
    // SAFETY: writes to the local.
    unsafe { call!(cuMemAlloc_v2(&raw mut pointer, whole)) }
        .map_err(|error| lacking(format_args!("{whole} bytes of"), error))?;
    Ok(pointer as *mut u8)
}

/// Gives it back, once the device has done what uses it.
pub(super) fn free(pointer: *mut u8) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: an address that is no allocation is refused.
    unsafe { call!(cuMemFree_v2(pointer as CUdeviceptr)) }
}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct About {
    /// `CUmemorytype`; 0 if it knows nothing.
    kind: c_uint,
    device: c_int,
    /// Where kernels find it.
    reached_at: CUdeviceptr,
    /// It moves to where it is used.
    managed: bool,
}

impl About {
    /// Why kernels of a GPU cannot use it. `unknown`: they may reach what nothing is known of.
    fn refuse(self, address: usize, device: c_int, unknown: bool) -> Option<String> {
        const HOST: c_uint = CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
        const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        match self.kind {
            _ if self.managed => None,
            DEVICE if self.device == device => None,
            DEVICE => Some(format!(
                "{address:#x} is memory of GPU {}, the communicator's is GPU {device}",
                self.device
            )),
            HOST if self.reached_at != 0 => None,
            _ if unknown => None,
            _ => Some(format!(
                "{address:#x} is no memory that GPU {device} reaches: neither a GPU's nor pinned, or freed"
            )),
        }
    }
}

/// What the driver says of an address: attributes, and where their values go.
///
/// # Safety
/// Each place is of its attribute's type.
pub(super) unsafe fn ask<const N: usize>(
    address: usize,
    asked: [(CUpointer_attribute, *mut c_void); N],
) -> Result<()> {
    let (mut attributes, mut places) = (
        asked.map(|(attribute, _)| attribute),
        asked.map(|(_, place)| place),
    );
    // SAFETY: as many places as attributes, each of its attribute's type, says the caller; what the driver does not know it leaves or
    // zeroes, and the address itself is not looked at.
    unsafe {
        call!(cuPointerGetAttributes(
            N as c_uint,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            address as CUdeviceptr
        ))
    }
}

/// Whether kernels of a GPU can use what is at `address`. Memory of another GPU is refused, as NCCL does: whether its
/// peer access is on is known to the caller alone. `unknown`: so may they be what the driver knows nothing of.
pub(super) fn check(address: usize, device: c_int, unknown: bool) -> Result<()> {
    use CUpointer_attribute as Of;
    let mut about = About::default();
    let mut managed: c_uint = 0;
    // SAFETY: an unsigned int, an int, an address and a boolean.
    unsafe {
        ask(
            address,
            [
                (Of::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut about.kind).cast()),
                (
                    Of::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                    (&raw mut about.device).cast(),
                ),
                (
                    Of::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
                    (&raw mut about.reached_at).cast(),
                ),
                (Of::CU_POINTER_ATTRIBUTE_IS_MANAGED, (&raw mut managed).cast()),
            ],
        )
    }?;
    // A boolean: the driver writes its first byte.
    about.managed = managed != 0;
    if about.refuse(address, device, unknown).is_none() {
        return Ok(());
    }
    let pageable = attribute(
        device,
        CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS,
    )? != 0;
    about
        .refuse(address, device, pageable)
        .map_or(Ok(()), |text| Err(DeviceError::InvalidHandle(text)))
}

/// What is said of the allocation that an address is in.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    kind: c_uint,
    device: c_int,
    start: CUdeviceptr,
    bytes: usize,
    /// Allocated as one by `cuMemAlloc`: other GPUs reach it once peer access is on, and its address is not given other memory
    /// while it is there. What is mapped piece by piece, or comes from a pool, has rights of its own.
    whole: bool,
    id: u64,
}

impl Range {
    fn is_open(self, address: usize, bytes: usize, device: c_int) -> bool {
        const DEVICE: c_uint = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let within = || {
            let before = address.checked_sub(self.start as usize)?;
            Some(before.checked_add(bytes)? <= self.bytes)
        };
        self.kind == DEVICE && self.device == device && self.whole && within() == Some(true)
    }
}

/// The allocation that these bytes are in, if the GPUs that have peer access to `device` reach them.
pub(super) fn allocation(address: usize, bytes: usize, device: c_int) -> Option<Allocation> {
    use CUpointer_attribute as Of;
    let mut range = Range::default();
    let mut whole: c_uint = 0;
    // SAFETY: an unsigned int, an int, an address, a size, a boolean and a number of 64 bits.
    let known = unsafe {
        ask(
            address,
            [
                (Of::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut range.kind).cast()),
                (
                    Of::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
                    (&raw mut range.device).cast(),
                ),
                (
                    Of::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                    (&raw mut range.start).cast(),
                ),
                (Of::CU_POINTER_ATTRIBUTE_RANGE_SIZE, (&raw mut range.bytes).cast()),
                (
                    Of::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                    (&raw mut whole).cast(),
                ),
                (Of::CU_POINTER_ATTRIBUTE_BUFFER_ID, (&raw mut range.id).cast()),
            ],
        )
    };
    range.whole = whole != 0;
    (known.is_ok() && range.is_open(address, bytes, device)).then_some(Allocation {
        id: range.id,
        start: range.start as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_allocations_are_open_from_end_to_end() {
        let range = Range {
            kind: CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint,
            device: 1,
            start: 0x10_0000,
            bytes: 0x1000,
            whole: true,
            id: 1,
        };
        assert!(range.is_open(0x10_0000, 0x1000, 1) && range.is_open(0x10_0ff0, 0x10, 1));
        assert!(!range.is_open(0x10_0000, 0x1001, 1), "behind its end");
        assert!(!range.is_open(0xf_fff0, 0x20, 1), "before its beginning");
        assert!(!range.is_open(0x10_0000, usize::MAX, 1));
        assert!(!range.is_open(0x10_0000, 0x10, 0), "another GPU's");
        assert!(
            !Range {
                whole: false,
                ..range
            }
            .is_open(0x10_0000, 0x10, 1),
            "in pieces"
        );
        assert!(!Range { kind: 0, ..range }.is_open(0x10_0000, 0x10, 1));
    }

    #[test]
    fn what_kernels_cannot_use_is_refused_with_its_place() {
        let host = CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
        let device = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let about = |kind, device, reached_at, managed| About {
            kind,
            device,
            reached_at,
            managed,
        };
        let refused = |about: About, unknown| about.refuse(0x7000, 1, unknown);
        assert_eq!(refused(about(device, 1, 0x7000, false), false), None);
        assert_eq!(refused(about(device, 0, 0x7000, true), false), None, "managed");
        assert_eq!(refused(about(host, 0, 0x7000, false), false), None, "pinned");
        let other = refused(about(device, 0, 0x7000, false), true).unwrap();
        assert!(
            other.contains("0x7000 is memory of GPU 0") && other.contains("GPU 1"),
            "{other}"
        );
        let unknown = refused(About::default(), false).unwrap();
        assert!(unknown.contains("no memory that GPU 1 reaches"), "{unknown}");
        assert!(refused(about(host, 0, 0, false), false).is_some(), "not mapped");
        assert_eq!(refused(About::default(), true), None);
    }
}
