//! Calls of the CUDA driver, with errors that name the call.

use std::{
    ffi::{CStr, c_int, c_void},
    fmt::Display,
    sync::OnceLock,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUevent, CUevent_flags, CUresult, CUstream, CUstream_flags,
    CUstreamCaptureMode,
};

use crate::device::{DeviceError, Result, Stream};

/// The oldest driver whose every function used here is there: CUDA 12.2.
const OLDEST: c_int = 12020;

/// Loads the driver.
///
/// # Errors
/// It is not there, or older than [`OLDEST`], or has no device.
pub(super) fn open() -> Result<usize> {
    let unavailable = |text: String| {
        DeviceError::Unavailable(format!(
            "RINGSIGHT_DEVICE=cuda (the default), but {text}; set RINGSIGHT_DEVICE=host to run on CPU memory"
        ))
    };
    // SAFETY: loading the driver runs its initialisers, as any CUDA program does.
    if !unsafe { sys::is_culib_present() } {
        return Err(unavailable(
            "libcuda.so.1 was not found: install the NVIDIA driver".into(),
        ));
    }
    let (mut version, mut devices) = (0, 0);
    // SAFETY: the library is there, these functions are as old as it is, and the results are written to locals.
    unsafe {
        let result = sys::cuDriverGetVersion(&raw mut version);
        if result != CUresult::CUDA_SUCCESS || version < OLDEST {
            let (major, minor) = (version / 1000, version % 1000 / 10);
            return Err(unavailable(format!(
                "the NVIDIA driver is of CUDA {major}.{minor}: 12.2 is the oldest"
            )));
        }
        for (call, result) in [
            ("cuInit", sys::cuInit(0)),
            ("cuDeviceGetCount", sys::cuDeviceGetCount(&raw mut devices)),
        ] {
            check(call, result).map_err(|error| unavailable(error.to_string()))?;
        }
    }
    usize::try_from(devices)
        .ok()
        .filter(|devices| *devices > 0)
        .ok_or_else(|| unavailable("no GPU is visible (CUDA_VISIBLE_DEVICES?)".into()))
}

/// What a call returned, in words.
#[inline]
pub(super) fn check(call: &str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(error(call, result))
}

#[cold]
fn error(call: &str, result: CUresult) -> DeviceError {
    use CUresult::{
        CUDA_ERROR_CAPTURED_EVENT, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_DEVICE,
        CUDA_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        CUDA_ERROR_STREAM_CAPTURE_ISOLATION, CUDA_ERROR_STREAM_CAPTURE_MERGE,
        CUDA_ERROR_STREAM_CAPTURE_UNJOINED, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    };
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: both write a pointer to a string of the driver's, or null.
    let words = unsafe {
        let _ = sys::cuGetErrorName(result, &raw mut name);
        let _ = sys::cuGetErrorString(result, &raw mut text);
        [name, text]
            .into_iter()
            .filter(|text| !text.is_null())
            .map(|text| CStr::from_ptr(text).to_string_lossy())
            .collect::<Vec<_>>()
            .join(": ")
    };
    let text = format!("{call}: {words}");
    match result {
        CUDA_ERROR_OUT_OF_MEMORY => DeviceError::Resource(format!("{}: {text}", current())),
        CUDA_ERROR_INVALID_VALUE
        | CUDA_ERROR_INVALID_HANDLE
        | CUDA_ERROR_INVALID_CONTEXT
        | CUDA_ERROR_INVALID_DEVICE => DeviceError::InvalidHandle(text),
        CUDA_ERROR_CAPTURED_EVENT
        | CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
        | CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
        | CUDA_ERROR_STREAM_CAPTURE_ISOLATION
        | CUDA_ERROR_STREAM_CAPTURE_MERGE
        | CUDA_ERROR_STREAM_CAPTURE_UNJOINED
        | CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        | CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
        | CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD => DeviceError::InvalidUsage(text),
        _ => DeviceError::Fault(text),
    }
}

/// The current device, in words.
fn current() -> String {
    let mut device = 0;
    // SAFETY: writes to the local.
    match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
        CUresult::CUDA_SUCCESS => format!("GPU {device}"),
        _ => "a GPU".into(),
    }
}

/// How much could not be had, where an error says of which GPU.
pub(super) fn lacking(what: impl Display, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Resource(text) => DeviceError::Resource(format!("{what} {text}")),
        error => error,
    }
}

/// Calls a function of the driver and checks its result: `call!(cuInit(0))`. To be used in an `unsafe` block.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::device::cuda::driver::check(
            stringify!($function),
            cudarc::driver::sys::$function($($argument),*),
        )
    };
}
pub(super) use call;

/// A kernel, and how it is launched.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) function: sys::CUfunction,
    pub(super) blocks: u32,
    /// Of a block.
    pub(super) threads: u32,
    /// Dynamic memory of a block.
    pub(super) shared_bytes: u32,
    /// By programmatic dependent launch: it may be brought to the multiprocessors before the kernel before it in its stream has ended, and waits
    /// for that end by itself (`await_kernels_before` in platform.cuh).
    pub(super) overlaps: bool,
}

// SAFETY: a handle, which belongs to no thread, and numbers.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// One block of one thread.
    pub(super) fn single(function: sys::CUfunction) -> Self {
        Self {
            function,
            blocks: 1,
            threads: 1,
            shared_bytes: 0,
            overlaps: false,
        }
    }

    /// Launches it with the arguments that these point to.
    ///
    /// # Safety
    /// They are the kernel's arguments, which the call copies; what these refer to stays as long as the kernel may run. One that overlaps waits
    /// as it must.
    #[inline]
    pub(super) unsafe fn launch(&self, stream: CUstream, arguments: &mut [*mut c_void]) -> Result<()> {
        let (arguments, none) = (arguments.as_mut_ptr(), std::ptr::null_mut());
        let Self {
            function,
            blocks,
            threads,
            shared_bytes,
            overlaps,
        } = *self;
        if !overlaps {
            // SAFETY: the caller's.
            return unsafe {
                call!(cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    threads,
                    1,
                    1,
                    shared_bytes,
                    stream,
                    arguments,
                    none
                ))
            };
        }
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared_bytes,
            hStream: stream,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: the caller's; the attribute is read by the call.
        unsafe { call!(cuLaunchKernelEx(&raw const config, function, arguments, none)) }
    }
}

/// Whether kernels compiled as `kernel` is may overlap with those before them ([`Kernel::overlaps`]), eager and in graphs: with drivers of CUDA 12.3, where
/// captures know of it, on devices from Hopper on, if they were compiled for those. One compiled for an earlier device, as where there is only its PTX for this one, does not wait for the kernel
/// before (`await_kernels_before`). `RINGSIGHT_PROGRAMMATIC_LAUNCH=0` says no.
pub(super) fn may_overlap(kernel: sys::CUfunction) -> Result<bool> {
    const SINCE: c_int = 12030;
    const HOPPER: c_int = 90;
    let (mut driver, mut compiled_for) = (0, 0);
    // SAFETY: write to the locals; a kernel of the current context.
    unsafe {
        call!(cuDriverGetVersion(&raw mut driver))?;
        let version = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION;
        call!(cuFuncGetAttribute(&raw mut compiled_for, version, kernel))?;
    }
    Ok(
        driver >= SINCE
            && compiled_for >= HOPPER
            && crate::env::switch("RINGSIGHT_PROGRAMMATIC_LAUNCH", true),
    )
}

/// The driver's handle of a stream. Null, 1 and 2 are the default streams in the driver's interface as in the runtime's.
pub(super) fn stream(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

/// `cuStreamGetCtx_v2`, of drivers of CUDA 12.5 and newer.
type GetContexts = unsafe extern "C" fn(CUstream, *mut CUcontext, *mut *mut c_void) -> CUresult;

/// The context that a stream is of; of one of a green context, where the driver tells, the primary one of its device.
pub(super) fn context_of(of: Stream) -> (CUresult, CUcontext) {
    static NEWER: OnceLock<Option<GetContexts>> = OnceLock::new();
    let newer = NEWER.get_or_init(|| {
        // SAFETY: the driver is there, and its function of this name has this type.
        unsafe { sys::culib().get(b"cuStreamGetCtx_v2").ok().map(|found| *found) }
    });
    let (mut context, mut green) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the caller's handle, as with every CUDA call; writes to the locals.
    let known = unsafe {
        match newer {
            Some(ask) => ask(stream(of), &raw mut context, &raw mut green),
            None => sys::cuStreamGetCtx(stream(of), &raw mut context),
        }
    };
    (known, context)
}

/// The device that a context is of.
pub(super) fn device_of(context: CUcontext) -> Result<c_int> {
    let (mut before, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: writes to the locals. A stream of the caller's is of the context; what was current before is so again.
    unsafe {
        call!(cuCtxGetCurrent(&raw mut before))?;
        call!(cuCtxSetCurrent(context))?;
        let asked = call!(cuCtxGetDevice(&raw mut device));
        call!(cuCtxSetCurrent(before))?;
        asked?;
    }
    Ok(device)
}

/// A stream of the current context that waits for no default stream.
pub(super) fn new_stream() -> Result<CUstream> {
    let mut stream = std::ptr::null_mut();
    let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
    // SAFETY: writes to the local.
    unsafe { call!(cuStreamCreate(&raw mut stream, flags)) }?;
    Ok(stream)
}

/// An event of the current context that orders streams, and has no time.
pub(super) fn new_order_event() -> Result<CUevent> {
    let mut event = std::ptr::null_mut();
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes to the local.
    unsafe { call!(cuEventCreate(&raw mut event, flags)) }?;
    Ok(event)
}

/// An attribute of a device.
pub(super) fn attribute(device: c_int, attribute: CUdevice_attribute) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: writes to the local; a device number that is none is refused.
    unsafe { call!(cuDeviceGetAttribute(&raw mut value, attribute, device)) }?;
    Ok(value)
}

/// While it lives, this thread may do what might wait although some stream is being captured: none of that becomes part of a graph. Otherwise such a
/// call ends captures of this thread, and those of others that are in the mode for it, PyTorch's among them. Such are (driver 580.159): to ask for an
/// event or a stream or to wait for one, to make or destroy an executable graph, and memory, but for what is mapped by pieces. Launches, copies,
/// records and waits of streams, and what is set of an executable graph, are not.
pub(super) struct OutsideCapture(CUstreamCaptureMode);

impl OutsideCapture {
    pub(super) fn enter() -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the local with the thread's mode.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(Self(mode))
    }

    /// For the rest of a thread that is this library's own: what is captured is none of its business.
    pub(super) fn enter_for_good() -> Result<()> {
        Self::enter().map(std::mem::forget)
    }
}

impl Drop for OutsideCapture {
    fn drop(&mut self) {
        // SAFETY: gives the mode back that `enter` was given. It cannot fail where that did not.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Host memory that every GPU reaches at the address that the host knows it by.
pub(super) struct Pinned {
    base: *mut c_void,
    bytes: usize,
}

// SAFETY: an allocation that belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; what is in it is accessed by atomics, or by its one owner.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Zeroed memory; a context must be current.
    pub(super) fn new(bytes: usize) -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let mut base = std::ptr::null_mut();
        // SAFETY: writes the address to the local; what is then zeroed has just been allocated with this size.
        unsafe {
            call!(cuMemHostAlloc(&raw mut base, bytes, flags))
                .map_err(|error| lacking(format_args!("{bytes} bytes of pinned memory for"), error))?;
            base.cast::<u8>().write_bytes(0, bytes);
        }
        Ok(Self { base, bytes })
    }

    pub(super) fn base(&self) -> *mut c_void {
        self.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _outside = OutsideCapture::enter();
        // SAFETY: allocated in `new` and freed once. At the end of the process the driver may be gone, and the memory with
        // it.
        let _ = unsafe { sys::cuMemFreeHost(self.base) };
    }
}

/// Memory of this process that was made reachable for GPUs, at the address that the host knows it by.
pub(super) struct Registered(*mut c_void);

// SAFETY: an address that is given back once.
unsafe impl Send for Registered {}
// SAFETY: as above.
unsafe impl Sync for Registered {}

impl Registered {
    /// # Safety
    /// The memory stays mapped while this lives.
    pub(super) unsafe fn new(base: *mut u8, bytes: usize) -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's memory.
        unsafe { call!(cuMemHostRegister_v2(base.cast(), bytes, flags)) }
            .map_err(|error| lacking(format_args!("{bytes} bytes of host memory for"), error))?;
        Ok(Self(base.cast()))
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let _outside = OutsideCapture::enter();
        // SAFETY: registered in `new`, and still mapped. As for `Pinned`, the driver may be gone.
        let _ = unsafe { sys::cuMemHostUnregister(self.0) };
    }
}
