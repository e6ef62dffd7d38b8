//! CUDA as a device: NVIDIA's driver, loaded at run time.
#![expect(non_snake_case, reason = "fields are named as in the C ABI")]

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    ptr,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail};
use libloading::Library;

use super::device::{Device, GraphInstance, HostFunction, Stream};

type CuContext = *mut c_void;

functions! {
    cuInit: fn(c_uint) -> c_int;
    cuDeviceGetCount: fn(*mut c_int) -> c_int;
    cuDeviceGet: fn(*mut c_int, c_int) -> c_int;
    cuDevicePrimaryCtxRetain: fn(*mut CuContext, c_int) -> c_int;
    cuCtxSetCurrent: fn(CuContext) -> c_int;
    cuStreamCreate: fn(*mut Stream, c_uint) -> c_int;
    cuStreamDestroy_v2: fn(Stream) -> c_int;
    cuStreamSynchronize: fn(Stream) -> c_int;
    cuStreamBeginCapture_v2: fn(Stream, c_int) -> c_int;
    cuStreamEndCapture: fn(Stream, *mut *mut c_void) -> c_int;
    cuGraphInstantiateWithFlags: fn(*mut GraphInstance, *mut c_void, c_ulonglong) -> c_int;
    cuGraphUpload: fn(GraphInstance, Stream) -> c_int;
    cuGraphLaunch: fn(GraphInstance, Stream) -> c_int;
    cuGraphDestroy: fn(*mut c_void) -> c_int;
    cuGraphExecDestroy: fn(GraphInstance) -> c_int;
    cuLaunchHostFunc: fn(Stream, HostFunction, *mut c_void) -> c_int;
    cuMemHostAlloc: fn(*mut *mut c_void, usize, c_uint) -> c_int;
    cuGetErrorName: fn(c_int, *mut *const c_char) -> c_int;
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
const THREAD_LOCAL: c_int = 1;
/// `CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP`: for kernels of all GPUs.
const PORTABLE_AND_MAPPED: c_uint = 1 | 2;

pub(super) struct CudaDevice {
    functions: Functions,
    /// Primary contexts, by device. Kept until the process ends: others use them, too.
    contexts: Mutex<Vec<Option<Context>>>,
    // Dropped after the functions that point into it.
    _library: Library,
}

#[derive(Clone, Copy)]
struct Context(CuContext);

// SAFETY: the driver's contexts may be used by any thread.
unsafe impl Send for Context {}

impl CudaDevice {
    pub(super) fn load() -> Result<Self> {
        // SAFETY: NVIDIA's driver; its initialisers touch no device.
        let library = unsafe { Library::new("libcuda.so.1") }.context("there is no driver for GPUs")?;
        // SAFETY: the signatures are those of cuda.h, for the names with versions where there are such; it is kept beside them.
        let functions = unsafe { Functions::resolve(&library) }?;
        let mut driver = Self {
            functions,
            contexts: Mutex::default(),
            _library: library,
        };
        let mut count = 0;
        // SAFETY: a valid place.
        unsafe {
            call!(driver.cuInit(0))?;
            call!(driver.cuDeviceGetCount(&raw mut count))?;
        }
        if count < 1 {
            bail!("the driver shows no GPU");
        }
        driver.contexts = Mutex::new(vec![None; count as usize]);
        Ok(driver)
    }

    fn check(&self, name: &str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: a valid place, which gets a name that is there for good, or null.
        unsafe { (self.functions.cuGetErrorName)(result, &raw mut text) };
        if text.is_null() {
            bail!("{name} returned {result}");
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        bail!("{name} returned {text}")
    }

    fn context(&self, number: u32) -> Result<CuContext> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        let device = number as usize % contexts.len();
        if let Some(context) = contexts[device] {
            return Ok(context.0);
        }
        let (mut handle, mut context) = (0, ptr::null_mut());
        // SAFETY: valid places.
        unsafe {
            call!(self.cuDeviceGet(&raw mut handle, device as c_int))?;
            call!(self.cuDevicePrimaryCtxRetain(&raw mut context, handle))?;
        }
        contexts[device] = Some(Context(context));
        Ok(context)
    }
}

impl Device for CudaDevice {
    fn choose(&self, number: u32) -> Result<()> {
        let context = self.context(number)?;
        // SAFETY: a live context.
        unsafe { call!(self.cuCtxSetCurrent(context)) }
    }

    fn stream(&self) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: a valid place.
        unsafe { call!(self.cuStreamCreate(&raw mut stream, NON_BLOCKING)) }?;
        Ok(stream)
    }

    fn end(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream, used no more.
        unsafe { call!(self.cuStreamDestroy_v2(stream)) }
    }

    fn synchronise(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { call!(self.cuStreamSynchronize(stream)) }
    }

    unsafe fn call(&self, stream: Stream, function: HostFunction, argument: *mut c_void) -> Result<()> {
        // SAFETY: a live stream; of the argument the caller says so.
        unsafe { call!(self.cuLaunchHostFunc(stream, function, argument)) }
    }

    fn begin_capture(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { call!(self.cuStreamBeginCapture_v2(stream, THREAD_LOCAL)) }
    }

    fn end_capture(&self, stream: Stream) -> Result<GraphInstance> {
        let (mut graph, mut instance) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream; valid places; the graph is used no more when it is destroyed, its instance lives on.
        unsafe {
            call!(self.cuStreamEndCapture(stream, &raw mut graph))?;
            call!(self.cuGraphInstantiateWithFlags(&raw mut instance, graph, 0))?;
            call!(self.cuGraphDestroy(graph))?;
            // The first replay would do it, and would wait for the kernels of ranks that share the GPU, which wait for this one.
            call!(self.cuGraphUpload(instance, stream))?;
        }
        Ok(instance)
    }

    fn replay(&self, graph: GraphInstance, stream: Stream) -> Result<()> {
        // SAFETY: a live instance and stream.
        unsafe { call!(self.cuGraphLaunch(graph, stream)) }
    }

    fn forget(&self, graph: GraphInstance) -> Result<()> {
        // SAFETY: a live instance, used no more.
        unsafe { call!(self.cuGraphExecDestroy(graph)) }
    }

    /// Pinned memory of the host: what a program looks at between operations.
    fn allocate(&self, bytes: usize) -> Result<*mut c_void> {
        let mut memory = ptr::null_mut();
        // SAFETY: a valid place.
        unsafe { call!(self.cuMemHostAlloc(&raw mut memory, bytes.max(1), PORTABLE_AND_MAPPED)) }?;
        // SAFETY: so many bytes, just allocated.
        unsafe { ptr::write_bytes(memory.cast::<u8>(), 0, bytes) };
        Ok(memory)
    }

    /// Kept until the process ends: the driver would wait for all kernels of the GPU, so for those of other ranks, too, that
    /// are stuck on purpose.
    unsafe fn free(&self, _: *mut c_void, _: usize) {}
}
