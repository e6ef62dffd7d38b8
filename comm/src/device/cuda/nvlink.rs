//! Which GPUs NVLink joins. Peer kernels need it: a line of 128 bytes that a warp writes at once arrives whole, which PCIe does not guarantee. (NCCL uses
//! LL128 only over NVLink for the same reason.)

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    sync::OnceLock,
};

use cudarc::driver::sys::{self, CUdevice_P2PAttribute_enum, CUresult};

use super::driver::call;
use crate::device::{DeviceError, Result};

/// `domain:bus:device.function`, padded with zeros.
pub(super) type BusId = [u8; 16];

/// The PCI address of a device.
pub(super) fn bus_id(device: c_int) -> Result<BusId> {
    let mut bus = BusId::default();
    // SAFETY: writes at most as many bytes as it is told, a zero behind the last.
    unsafe {
        call!(cuDeviceGetPCIBusId(
            bus.as_mut_ptr().cast::<c_char>(),
            bus.len() as c_int,
            device
        ))
    }?;
    Ok(bus)
}

/// The address as text.
pub(super) fn name(bus: &BusId) -> String {
    bus.iter()
        .take_while(|byte| byte.is_ascii_graphic())
        .map(|byte| char::from(*byte))
        .collect()
}

/// Whether NVLink joins device `device`, which is at `own`, to the one at `other`.
///
/// # Errors
/// The other device is not this process's, and the driver's management library does not know it either.
pub(super) fn joins(device: c_int, own: &BusId, other: &BusId) -> Result<bool> {
    let text = CStr::from_bytes_until_nul(other)
        .map_err(|_| DeviceError::InvalidHandle("the place of a GPU that cannot be read".into()))?;
    let mut peer = 0;
    // SAFETY: written to the local; a text with its zero.
    if unsafe { sys::cuDeviceGetByPCIBusId(&raw mut peer, text.as_ptr()) } != CUresult::CUDA_SUCCESS {
        return managed(own, other).ok_or_else(|| {
            DeviceError::InvalidUsage(format!(
                "whether NVLink joins GPU {}, which this process does not see (CUDA_VISIBLE_DEVICES), is not known: libnvidia-ml.so.1 is not there, or does not say",
                name(other)
            ))
        });
    }
    let mut atomics = 0;
    // GPUs support atomics in each other's memory over NVLink only.
    // SAFETY: written to the local.
    unsafe {
        call!(cuDeviceGetP2PAttribute(
            &raw mut atomics,
            CUdevice_P2PAttribute_enum::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            device,
            peer
        ))
    }?;
    Ok(atomics != 0)
}

/// The same from NVML, which also sees devices that are hidden from CUDA; `None` if NVML is not available.
fn managed(own: &BusId, other: &BusId) -> Option<bool> {
    /// `NVML_P2P_CAPS_INDEX_NVLINK` of `nvmlGpuP2PCapsIndex_t`.
    const NVLINK: c_uint = 2;
    type Device = *mut c_void;
    struct Nvml {
        handle_by_bus_id: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
        p2p_status: unsafe extern "C" fn(Device, Device, c_uint, *mut c_int) -> c_int,
    }
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    let open = || {
        // SAFETY: NVIDIA's library, whose functions have these signatures (nvml.h); it stays loaded and initialised.
        unsafe {
            let library = libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
            let symbol = |name: &CStr| {
                let address = libc::dlsym(library, name.as_ptr());
                (!library.is_null() && !address.is_null()).then_some(address)
            };
            let init: unsafe extern "C" fn() -> c_int = std::mem::transmute(symbol(c"nvmlInit_v2")?);
            let nvml = Nvml {
                handle_by_bus_id: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
                >(symbol(c"nvmlDeviceGetHandleByPciBusId_v2")?),
                p2p_status: std::mem::transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(Device, Device, c_uint, *mut c_int) -> c_int,
                >(symbol(c"nvmlDeviceGetP2PStatus")?),
            };
            (init() == 0).then_some(nvml)
        }
    };
    let nvml = NVML.get_or_init(open).as_ref()?;
    let handle = |bus: &BusId| {
        let text = CStr::from_bytes_until_nul(bus).ok()?;
        let mut device = std::ptr::null_mut();
        // SAFETY: a text with its zero; written to the local.
        (unsafe { (nvml.handle_by_bus_id)(text.as_ptr(), &raw mut device) } == 0).then_some(device)
    };
    let (own, other) = (handle(own)?, handle(other)?);
    let mut status = 0;
    // SAFETY: two handles of its own; written to the local. 0 is `NVML_P2P_STATUS_OK`.
    (unsafe { (nvml.p2p_status)(own, other, NVLINK, &raw mut status) } == 0).then_some(status == 0)
}
