//! Memory that callers allocate, and what the driver knows of the buffers that they bring.

use std::{
    any::Any,
    ffi::{c_int, c_uint},
    ptr,
};

use cudarc::driver::sys::{CUdevice_attribute, CUdeviceptr, CUmemorytype, CUpointer_attribute};

use super::{
    CudaDevice,
    driver::{self, OutsideCapture, Registered, attribute, call, lacking, pointer_attributes},
    reclaim,
};
use crate::device::{Allocation, DeviceError, HostRegistration, Memory, Result};

/// Granularity of the driver's memory. A smaller allocation would be part of a block that other allocations share: it would begin anywhere, and an
/// export to other processes would include its neighbours.
const GRANULARITY: usize = 2 << 20;

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct About {
    /// `CUmemorytype`; 0 if it knows nothing.
    kind: c_uint,
    device: c_int,
    /// Its address for kernels; 0 if they cannot reach it.
    reached_at: CUdeviceptr,
    /// Managed memory, which moves to where it is used.
    managed: bool,
}

impl About {
    /// Why kernels of a GPU cannot use it. `accept_unknown`: accept memory that the driver does not know.
    fn refuse(self, address: usize, device: c_int, accept_unknown: bool) -> Option<String> {
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
            _ if accept_unknown => None,
            _ => Some(format!(
                "{address:#x} is no memory that GPU {device} reaches: neither a GPU's nor pinned, or freed"
            )),
        }
    }
}

/// What the driver says of the allocation around an address.
#[derive(Clone, Copy, Debug, Default)]
struct Range {
    kind: c_uint,
    device: c_int,
    start: CUdeviceptr,
    bytes: usize,
    /// It was allocated as a whole by `cuMemAlloc`: other GPUs reach it once peer access is on, and its addresses hold no other memory while it exists.
    /// VMM chunks and memory from pools have access rights of their own.
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

impl Memory for CudaDevice {
    /// The memory is the caller's alone to its last page, and begins at a page.
    fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        if bytes == 0 {
            return Ok(ptr::null_mut());
        }
        self.entered()?;
        let whole = bytes
            .checked_next_multiple_of(GRANULARITY)
            .ok_or_else(|| DeviceError::Resource(format!("{bytes} bytes are more than there can be")))?;
        let _outside = OutsideCapture::enter()?;
        let mut pointer: CUdeviceptr = 0;
        // SAFETY: writes to the local.
        unsafe { call!(cuMemAlloc_v2(&raw mut pointer, whole)) }
            .map_err(|error| lacking(format_args!("{whole} bytes of"), error))?;
        Ok(pointer as *mut u8)
    }

    fn free(&self, pointer: *mut u8) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        // Memory of any GPU, on a thread that need not have used one, as `cudaFree` allows.
        self.in_some_context(|| driver::free(pointer as CUdeviceptr))
    }

    /// Refuses memory of another GPU, as NCCL does: only the caller knows whether peer access to it is on.
    fn check_buffer(&self, address: usize, device: i32, accept_unknown: bool) -> Result<()> {
        use CUpointer_attribute as Of;
        let mut about = About::default();
        let mut managed: c_uint = 0;
        // SAFETY: an unsigned int, an int, an address and a boolean.
        unsafe {
            pointer_attributes(
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
        // The driver writes the first byte of a boolean.
        about.managed = managed != 0;
        if about.refuse(address, device, accept_unknown).is_none() {
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

    fn allocation(&self, address: usize, bytes: usize, device: i32) -> Option<Allocation> {
        use CUpointer_attribute as Of;
        let mut range = Range::default();
        let mut whole: c_uint = 0;
        // SAFETY: an unsigned int, an int, an address, a size, a boolean and a 64-bit number.
        let known = unsafe {
            pointer_attributes(
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

    fn register_host(&self, base: usize, bytes: usize) -> Result<HostRegistration> {
        // A thread that connects ranks need not have used the device.
        // SAFETY: the caller keeps the memory mapped.
        let registered = self.in_some_context(|| unsafe { Registered::new(base as *mut u8, bytes) })?;
        Ok(Some(Box::new(registered)))
    }

    fn release_when_idle(&self, bytes: usize, garbage: Box<dyn Any + Send>) {
        reclaim::keep(bytes, garbage);
    }

    fn drop_deferred(&self, garbage: Box<dyn Any + Send>) {
        reclaim::drop_later(garbage);
    }
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
            "in VMM chunks"
        );
        assert!(!Range { kind: 0, ..range }.is_open(0x10_0000, 0x10, 1));
    }

    #[test]
    fn unusable_memory_is_refused_with_its_address() {
        let host = CUmemorytype::CU_MEMORYTYPE_HOST as c_uint;
        let device = CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint;
        let about = |kind, device, reached_at, managed| About {
            kind,
            device,
            reached_at,
            managed,
        };
        let refused = |about: About, accept_unknown| about.refuse(0x7000, 1, accept_unknown);
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
