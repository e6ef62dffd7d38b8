//! Calls of the CUDA driver, with errors that name the call.

use std::{
    ffi::{CStr, c_int, c_uint, c_void},
    fmt::Display,
    marker::PhantomData,
    ops::Deref,
    sync::OnceLock,
};

use cudarc::driver::sys::{
    self, CUcontext, CUdevice_attribute, CUdeviceptr, CUevent, CUevent_flags, CUpointer_attribute, CUresult,
    CUstream, CUstream_flags, CUstreamCaptureMode,
};

use crate::device::{DeviceError, Result, Stream};

/// The oldest driver whose every function used here is there: CUDA 12.2.
const OLDEST: c_int = 12020;

/// Loads the driver and counts the devices.
///
/// # Errors
/// There is no driver, it is older than [`OLDEST`], or it has no device.
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

/// Turns the result of a call into an error that names the call.
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

/// The current device, for error texts.
fn current() -> String {
    let mut device = 0;
    // SAFETY: writes to the local.
    match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
        CUresult::CUDA_SUCCESS => format!("GPU {device}"),
        _ => "a GPU".into(),
    }
}

/// Adds to an out-of-memory error what could not be allocated.
pub(super) fn lacking(what: impl Display, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Resource(text) => DeviceError::Resource(format!("{what} {text}")),
        error => error,
    }
}

/// Calls a driver function and checks its result: `call!(cuInit(0))`. For use in `unsafe` blocks.
macro_rules! call {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::device::cuda::driver::check(
            stringify!($function),
            cudarc::driver::sys::$function($($argument),*),
        )
    };
}
pub(super) use call;

/// A kernel and its launch shape.
#[derive(Clone, Copy)]
pub(super) struct Kernel {
    pub(super) function: sys::CUfunction,
    pub(super) blocks: u32,
    /// Threads of a block.
    pub(super) threads: u32,
    /// Dynamic shared memory of a block.
    pub(super) shared_bytes: u32,
    /// Programmatic dependent launch: the GPU may place the kernel before the one before it in its stream has ended, and the kernel waits for that end
    /// itself (`await_kernels_before` in platform.cuh).
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

    /// Launches it.
    ///
    /// # Safety
    /// `arguments` point to the kernel's arguments, which the call copies. What these refer to stays as long as the kernel may run. A kernel that
    /// overlaps waits as it must.
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

/// Whether kernels compiled like `kernel` may overlap with those before them ([`Kernel::overlaps`]), eager and in graphs.
///
/// That needs a driver of CUDA 12.3, where captures support it, and kernels compiled for Hopper or later. A kernel compiled for an earlier device does
/// not wait for the one before (`await_kernels_before`). Nor does a kernel of which only PTX exists for this device. `RINGSIGHT_PROGRAMMATIC_LAUNCH=0`
/// turns it off.
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

/// The driver's handle of a stream. Null, 1 and 2 are the default streams for the driver as for the runtime.
pub(super) fn stream(stream: Stream) -> CUstream {
    stream.0 as CUstream
}

/// `cuStreamGetCtx_v2`, of drivers of CUDA 12.5 and newer.
type GetContexts = unsafe extern "C" fn(CUstream, *mut CUcontext, *mut *mut c_void) -> CUresult;

/// The context of a stream. For a stream of a green context it is the primary one of its device, if the driver can say.
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

/// The device of a context.
pub(super) fn device_of(context: CUcontext) -> Result<c_int> {
    let (mut before, mut device) = (std::ptr::null_mut(), 0);
    // SAFETY: writes to the locals. The stream belongs to the context. What was current before is current again afterwards.
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

/// While it lives, this thread may make driver calls that might wait, although some stream is being captured (capture mode "relaxed"). None of them
/// becomes part of a graph.
///
/// Otherwise such a call ends captures of this thread, and those of other threads in global mode, PyTorch's among them. The calls are (driver
/// 580.159): querying or waiting for an event or a stream, making or destroying an executable graph, and memory management other than VMM.
/// Launches, copies, records and waits of streams, and updates of executable graphs are harmless.
pub(super) struct OutsideCapture(CUstreamCaptureMode);

impl OutsideCapture {
    pub(super) fn enter() -> Result<Self> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: exchanges the local with the thread's mode.
        unsafe { call!(cuThreadExchangeStreamCaptureMode(&raw mut mode)) }?;
        Ok(Self(mode))
    }

    /// For the rest of the life of one of the library's own threads, which have nothing to do with captures.
    pub(super) fn enter_for_good() -> Result<()> {
        Self::enter().map(std::mem::forget)
    }
}

impl Drop for OutsideCapture {
    fn drop(&mut self) {
        // SAFETY: restores the mode that `enter` returned. It cannot fail where that call did not.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// Host memory that every GPU reaches at the host's address.
pub(super) struct Pinned {
    base: *mut c_void,
    bytes: usize,
}

// SAFETY: an allocation that belongs to no thread.
unsafe impl Send for Pinned {}
// SAFETY: as above; the memory is accessed by atomics, or by its one owner.
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
        // SAFETY: allocated in `new` and freed once. At the end of the process the driver may be gone, and the memory with it.
        let _ = unsafe { sys::cuMemFreeHost(self.base) };
    }
}

/// Pinned memory as a slice of `T`.
pub(super) struct PinnedSlice<T> {
    pinned: Pinned,
    _of: PhantomData<T>,
}

impl<T> PinnedSlice<T> {
    /// `count` zeroed values; a context must be current.
    ///
    /// # Safety
    /// All-zero bytes are a valid `T`, and a `T` needs no drop.
    pub(super) unsafe fn new(count: usize) -> Result<Self> {
        Ok(Self {
            pinned: Pinned::new(count * size_of::<T>())?,
            _of: PhantomData,
        })
    }
}

impl<T> Deref for PinnedSlice<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is page-aligned, of this size and was zeroed, which is a value; only atomics are written.
        unsafe { std::slice::from_raw_parts(self.pinned.base().cast(), self.pinned.bytes() / size_of::<T>()) }
    }
}

/// Memory of this process that is registered with every GPU, at the host's address.
pub(super) struct Registered(*mut c_void);

// SAFETY: an address that is unregistered once.
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

/// Zeroed device memory of the current context. `stream` is the module's own.
pub(super) fn zeroed(bytes: usize, stream: CUstream) -> Result<CUdeviceptr> {
    let _outside = OutsideCapture::enter()?;
    let mut memory = 0;
    // SAFETY: written to the local.
    unsafe { call!(cuMemAlloc_v2(&raw mut memory, bytes)) }
        .map_err(|error| lacking(format_args!("{bytes} bytes of"), error))?;
    zero(memory, bytes, stream)?;
    Ok(memory)
}

/// Zeroes device memory that nobody uses, of at least `bytes` bytes.
pub(super) fn zero(memory: CUdeviceptr, bytes: usize, stream: CUstream) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: the caller's memory. The default stream would wait for kernels of the caller's streams.
    unsafe {
        call!(cuMemsetD8Async(memory, 0, bytes, stream))?;
        call!(cuStreamSynchronize(stream))
    }
}

/// Frees device memory, once the device has done what uses it.
pub(super) fn free(memory: CUdeviceptr) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: an address that is no allocation is refused.
    unsafe { call!(cuMemFree_v2(memory)) }
}

/// Asks the driver for attributes of an address, each with the place for its value. It leaves or zeroes the places of unknown attributes, and does
/// not access the address.
///
/// # Safety
/// Each place is of its attribute's type.
pub(super) unsafe fn pointer_attributes<const N: usize>(
    address: usize,
    asked: [(CUpointer_attribute, *mut c_void); N],
) -> Result<()> {
    let (mut attributes, mut places) = (
        asked.map(|(attribute, _)| attribute),
        asked.map(|(_, place)| place),
    );
    // SAFETY: as many places as attributes, each of its attribute's type by the caller's contract.
    unsafe {
        call!(cuPointerGetAttributes(
            N as c_uint,
            attributes.as_mut_ptr(),
            places.as_mut_ptr(),
            address as CUdeviceptr
        ))
    }
}
