//! The library's host device, through `ringsight.h`.
#![expect(non_snake_case, reason = "fields are named as in the C ABI")]

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    ffi::{c_char, c_int, c_void},
    ptr,
    sync::Arc,
};

use anyhow::{Context as _, Result, bail};
use libloading::Library;

use super::{
    Comm,
    device::{Device, GraphInstance, HostFunction, Stream},
    last_error,
};

functions! {
    ncclGetLastError: fn(Comm) -> *const c_char;
    ringsightSetDevice: fn(c_int) -> c_int;
    ringsightStreamCreate: fn(*mut Stream) -> c_int;
    ringsightStreamDestroy: fn(Stream) -> c_int;
    ringsightStreamSynchronize: fn(Stream) -> c_int;
    ringsightStreamBeginCapture: fn(Stream) -> c_int;
    ringsightStreamEndCapture: fn(Stream, *mut *mut c_void) -> c_int;
    ringsightGraphInstantiate: fn(*mut GraphInstance, *mut c_void) -> c_int;
    ringsightGraphLaunch: fn(GraphInstance, Stream) -> c_int;
    ringsightGraphDestroy: fn(*mut c_void) -> c_int;
    ringsightGraphExecDestroy: fn(GraphInstance) -> c_int;
    ringsightLaunchHostFunc: fn(Stream, HostFunction, *mut c_void) -> c_int;
}

pub(super) struct HostDevice {
    functions: Functions,
    // Dropped after the functions that point into it.
    _library: Arc<Library>,
}

/// What memory has to be aligned to: a cache line.
const ALIGNMENT: usize = 64;

impl HostDevice {
    /// # Safety
    /// `library` is our implementation of NCCL's ABI.
    pub(super) unsafe fn resolve(library: &Arc<Library>) -> Result<Self> {
        Ok(Self {
            // SAFETY: as the caller says, and the library is kept beside them.
            functions: unsafe { Functions::resolve(library) }?,
            _library: Arc::clone(library),
        })
    }

    fn check(&self, name: &str, result: c_int) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let text = last_error(self.functions.ncclGetLastError, ptr::null_mut());
        bail!("{name} returned {result}: {text}")
    }

    fn layout(bytes: usize) -> Result<Layout> {
        // Of nothing there is an address, too.
        Layout::from_size_align(bytes.max(1), ALIGNMENT).context("so much memory there is not")
    }
}

impl Device for HostDevice {
    fn choose(&self, number: u32) -> Result<()> {
        // SAFETY: no pointers.
        unsafe { call!(self.ringsightSetDevice(number as c_int)) }
    }

    fn stream(&self) -> Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: a valid place.
        unsafe { call!(self.ringsightStreamCreate(&raw mut stream)) }?;
        Ok(stream)
    }

    fn end(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream, used no more.
        unsafe { call!(self.ringsightStreamDestroy(stream)) }
    }

    fn synchronise(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { call!(self.ringsightStreamSynchronize(stream)) }
    }

    unsafe fn call(&self, stream: Stream, function: HostFunction, argument: *mut c_void) -> Result<()> {
        // SAFETY: a live stream; of the argument the caller says so.
        unsafe { call!(self.ringsightLaunchHostFunc(stream, function, argument)) }
    }

    fn begin_capture(&self, stream: Stream) -> Result<()> {
        // SAFETY: a live stream.
        unsafe { call!(self.ringsightStreamBeginCapture(stream)) }
    }

    fn end_capture(&self, stream: Stream) -> Result<GraphInstance> {
        let (mut graph, mut instance) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream; valid places; the graph is used no more when it is destroyed, its instance lives on.
        unsafe {
            call!(self.ringsightStreamEndCapture(stream, &raw mut graph))?;
            call!(self.ringsightGraphInstantiate(&raw mut instance, graph))?;
            call!(self.ringsightGraphDestroy(graph))?;
        }
        Ok(instance)
    }

    fn replay(&self, graph: GraphInstance, stream: Stream) -> Result<()> {
        // SAFETY: a live instance and stream.
        unsafe { call!(self.ringsightGraphLaunch(graph, stream)) }
    }

    fn forget(&self, graph: GraphInstance) -> Result<()> {
        // SAFETY: a live instance, used no more.
        unsafe { call!(self.ringsightGraphExecDestroy(graph)) }
    }

    fn allocate(&self, bytes: usize) -> Result<*mut c_void> {
        let layout = Self::layout(bytes)?;
        // SAFETY: of at least one byte.
        let memory = unsafe { alloc_zeroed(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        Ok(memory.cast())
    }

    unsafe fn free(&self, memory: *mut c_void, bytes: usize) {
        if let Ok(layout) = Self::layout(bytes) {
            // SAFETY: allocated with this layout, as the caller says.
            unsafe { dealloc(memory.cast(), layout) };
        }
    }
}
