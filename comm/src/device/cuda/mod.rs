//! GPUs, through the CUDA driver. Contexts are the primary ones, as the runtime uses them, so that streams, events and
//! memory of a program that uses the runtime are the ones meant here.
//!
//! A launch is one kernel ([`ringsight_kernels::cuda`]) with its program in the arguments, or two with copies between them (`engines.rs`). What it tells goes through a
//! ring in host memory that a thread of this module drains; it learns of an abort through a word there. Neither needs a
//! call of the driver.

mod append;
mod captures;
mod clock;
mod count;
mod direct;
mod drain;
mod driver;
mod engines;
mod gpu;
mod health;
mod host_call;
mod kernel_graphs;
mod launch;
mod launches;
mod memory;
mod nvlink;
mod pieces;
mod release;
mod share;
mod telling;

use std::{
    any::Any,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use cudarc::driver::sys::{self, CUcontext, CUevent, CUgraph, CUgraphExec, CUresult, CUstreamCaptureMode};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::{
    Launch,
    cuda::{CHANNEL_THREADS, COPY_ENGINE_THREADS, MESSAGES_THREADS, collective_threads, one_shot_threads},
};
use ringsight_records::{Algorithm, Function};

use self::{
    captures::Captures,
    driver::{Registered, call, check, stream as handle},
    gpu::{Gpu, Slotted},
    launch::How,
};
use super::{
    Allocation, Capture, Counter, Device, DeviceError, Direct, End, Event, Graph, GraphExec, HostFunction,
    Journal, Launcher, Mark, Piece, Progress, Reachable, Reached, Result, Share, Stream,
};
use crate::op::{DataPath, Method, Task};

/// The last handle of a default stream (`CU_STREAM_PER_THREAD`).
const PER_THREAD: usize = 2;
/// Threads of a warp.
const WARP: u32 = 32;

/// The device; see the module's documentation.
pub struct CudaDevice {
    /// By device number.
    gpus: Vec<Slotted>,
    captures: Arc<Mutex<Captures>>,
}

impl CudaDevice {
    /// The GPUs of this machine; none is used yet.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] without driver, GPU or kernels.
    pub fn new() -> Result<Self> {
        let devices = driver::open()?;
        release::start()?;
        Ok(Self {
            gpus: (0..devices).map(|_| Slotted::new()).collect(),
            captures: Arc::default(),
        })
    }

    fn gpu(&self, device: i32) -> Result<&Arc<Gpu>> {
        usize::try_from(device)
            .ok()
            .and_then(|index| self.gpus.get(index))
            .ok_or_else(|| {
                DeviceError::InvalidHandle(format!("device {device} is none of the {} GPUs", self.gpus.len()))
            })?
            .get(device)
    }

    /// Calls what asks for some context, whichever, with one that is current afterwards if it was before: one that is there already if any is.
    fn somewhere<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = self.mark()?;
        if before != Mark(0) {
            return what();
        }
        let opened = self.gpus.iter().find_map(Slotted::opened);
        opened.map_or_else(|| self.set_current(0), |gpu| gpu.make_current())?;
        let result = what();
        self.restore(before)?;
        result
    }

    /// The current device's GPU, its context current.
    fn entered(&self) -> Result<&Arc<Gpu>> {
        let gpu = self.gpu(self.current()?)?;
        gpu.make_current()?;
        Ok(gpu)
    }
}

fn query(call: &str, result: CUresult) -> Result<Progress> {
    match result {
        CUresult::CUDA_ERROR_NOT_READY => Ok(Progress::Pending),
        result => check(call, result).map(|()| Progress::Done),
    }
}

impl Device for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn bus_id(&self, device: i32) -> Option<String> {
        let bus = nvlink::bus_id(device).ok()?;
        // The kernel writes small letters.
        Some(nvlink::name(&bus).to_ascii_lowercase())
    }

    fn runs(&self, algorithm: Algorithm) -> bool {
        ringsight_kernels::cuda::program::runs(algorithm)
    }

    fn warps(&self, task: &Task, ranks: u32) -> u8 {
        let Method { algorithm, path, .. } = task.method;
        let threads = match (task.request.function, algorithm) {
            _ if path == DataPath::Fifo => CHANNEL_THREADS,
            _ if path == DataPath::CopyEngine => COPY_ENGINE_THREADS,
            (Function::Send | Function::Recv, _) => MESSAGES_THREADS,
            (_, Algorithm::OneShot) => one_shot_threads(task.info.bytes as usize),
            (function, algorithm) => {
                let pushes = path == DataPath::Push;
                collective_threads(function, algorithm, ranks as usize, path.is_zero_copy(), pushes)
            }
        };
        // 1024 threads are the most that a block has.
        (threads / WARP) as u8
    }

    fn warp_threads(&self) -> u32 {
        WARP
    }

    fn channels(&self) -> u32 {
        // A block has as many bytes under way as its threads load at once: it takes several to fill a PCIe link.
        8
    }

    fn near_channels(&self) -> Option<u32> {
        // A block passes on a dozen GB/s: its steps are as long as it takes to hand a slot over.
        Some(32)
    }

    fn current(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: writes to the local.
        match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
            // As the runtime has it before its first call.
            CUresult::CUDA_ERROR_INVALID_CONTEXT => Ok(0),
            result => check("cuCtxGetDevice", result).map(|()| device),
        }
    }

    fn set_current(&self, device: i32) -> Result<()> {
        self.gpu(device)?.make_current()
    }

    fn mark(&self) -> Result<Mark> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes to the local.
        unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
        Ok(Mark(context as usize))
    }

    fn enter(&self, device: i32) -> Result<Option<Mark>> {
        let gpu = self.gpu(device)?;
        let before = self.mark()?;
        if before.0 == gpu.context as usize {
            return Ok(None);
        }
        gpu.make_current()?;
        Ok(Some(before))
    }

    fn restore(&self, mark: Mark) -> Result<()> {
        // SAFETY: a context that was this thread's current one, or none.
        unsafe { call!(cuCtxSetCurrent(mark.0 as CUcontext)) }
    }

    fn check_health(&self, device: i32) -> Result<()> {
        self.gpu(device)?.health.check()
    }

    fn fault(&self, device: i32) -> Option<DeviceError> {
        self.gpu(device).ok()?.health.fault()
    }

    fn allocate(&self, bytes: usize) -> Result<*mut u8> {
        if bytes == 0 {
            return Ok(std::ptr::null_mut());
        }
        self.entered()?;
        memory::allocate(bytes)
    }

    fn free(&self, pointer: *mut u8) -> Result<()> {
        if pointer.is_null() {
            return Ok(());
        }
        // Of any GPU, on a thread that need not have used one, as `cudaFree` allows.
        self.somewhere(|| memory::free(pointer))
    }

    fn check_buffer(&self, address: usize, device: i32, unknown: bool) -> Result<()> {
        memory::check(address, device, unknown)
    }

    fn check_stream(&self, stream: Stream, device: i32) -> Result<()> {
        // Default streams are those of whatever is current.
        if stream.0 <= PER_THREAD {
            return Ok(());
        }
        let own = self.gpu(device)?;
        let (known, context) = driver::context_of(stream);
        match known {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_INVALID_HANDLE | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                return check("cuStreamGetCtx", known);
            }
            // It says nothing against the stream, as older drivers do of those of green contexts.
            _ => return Ok(()),
        }
        if context == own.context || context.is_null() {
            return Ok(());
        }
        let whose = match driver::device_of(context) {
            Ok(other) if other != device => format!("GPU {other}'s, the communicator's is GPU {device}"),
            Ok(_) => format!("of a context of GPU {device} that is not its primary one"),
            Err(error) => {
                format!(
                    "of a context that says nothing of its GPU, the communicator's is GPU {device}: {error}"
                )
            }
        };
        Err(DeviceError::InvalidHandle(format!("{:#x} is {whose}", stream.0)))
    }

    fn allocation(&self, address: usize, bytes: usize, device: i32) -> Option<Allocation> {
        memory::allocation(address, bytes, device)
    }

    fn export(&self, start: usize) -> Result<Vec<u8>> {
        share::export(self.entered()?, start as u64)
    }

    fn reach(&self, base: usize, bytes: usize) -> Result<Reachable> {
        // A thread that connects ranks need not have used the device.
        // SAFETY: the caller of `reach` keeps the memory mapped.
        let registered = self.somewhere(|| unsafe { Registered::new(base as *mut u8, bytes) })?;
        Ok(Some(Box::new(registered)))
    }

    fn share(&self, bytes: usize) -> Result<Option<Share>> {
        share::share(self.entered()?, bytes).map(Some)
    }

    fn pieces(&self, address: usize, bytes: usize, device: i32, others: &[i32]) -> Option<Vec<Piece>> {
        pieces::of(address, bytes, device, others)
    }

    fn export_pieces(&self, start: usize) -> Result<Vec<u8>> {
        share::export_pieces(self.entered()?, start as u64)
    }

    fn export_piece(&self, piece: &Piece) -> Result<OwnedFd> {
        pieces::export(piece)
    }

    fn reach_pieces(
        &self,
        handle: &[u8],
        sizes: &[u64],
        next: &mut dyn FnMut() -> Result<OwnedFd>,
    ) -> Result<Reached> {
        share::reach_pieces(self.entered()?, handle, sizes, next)
    }

    fn reach_share(&self, handle: &[u8]) -> Result<Reached> {
        share::reach(self.entered()?, handle, |device| self.gpu(device))
    }

    fn write_share(&self, base: u64, bytes: &[u8]) -> Result<()> {
        share::write(base, bytes, self.entered()?.stream)
    }

    fn read_share(&self, base: u64, bytes: &mut [u8]) -> Result<()> {
        share::read(base, bytes, self.entered()?.stream)
    }

    fn engines(&self) -> Result<Arc<dyn Any + Send + Sync>> {
        self.entered()?;
        Ok(Arc::new(engines::Engines::new()?))
    }

    fn direct(&self, bytes: usize) -> Result<Option<Direct>> {
        direct::direct(self.entered()?, bytes).map(Some)
    }

    fn flush_direct(&self, device: i32) -> Result<()> {
        direct::flush(self.gpu(device)?)
    }

    fn retire(&self, bytes: usize, waste: Box<dyn Any + Send>) {
        release::keep(bytes, waste);
    }

    fn discard(&self, waste: Box<dyn Any + Send>) {
        release::later(waste);
    }

    fn stream_create(&self) -> Result<Stream> {
        self.set_current(self.current()?)?;
        Ok(Stream(driver::new_stream()? as usize))
    }

    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's handle, as with every CUDA call.
        unsafe { call!(cuStreamDestroy_v2(handle(stream))) }
    }

    fn stream_id(&self, stream: Stream) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the caller's handle; writes to the local. Also of default streams, of which each thread and context may have its
        // own.
        unsafe { call!(cuStreamGetId(handle(stream), &raw mut id)) }.map(|()| id)
    }

    fn stream_query(&self, stream: Stream) -> Result<Progress> {
        // SAFETY: as above.
        query("cuStreamQuery", unsafe { sys::cuStreamQuery(handle(stream)) })
    }

    fn stream_synchronize(&self, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuStreamSynchronize(handle(stream))) }
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuStreamWaitEvent(handle(stream), event.0 as CUevent, 0)) }
    }

    fn event_create(&self) -> Result<Event> {
        let mut event = std::ptr::null_mut();
        // SAFETY: writes to the local.
        unsafe { call!(cuEventCreate(&raw mut event, 0)) }?;
        Ok(Event(event as usize))
    }

    fn order_event_create(&self) -> Result<Event> {
        Ok(Event(driver::new_order_event()? as usize))
    }

    fn event_destroy(&self, event: Event) -> Result<()> {
        lock(&self.captures).forget_event(event);
        // SAFETY: the caller's handle.
        unsafe { call!(cuEventDestroy_v2(event.0 as CUevent)) }
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuEventRecord(event.0 as CUevent, handle(stream))) }
    }

    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()> {
        let (_, before) = captures::dependencies(stream)?;
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: the caller's handles; refused outside captures.
        unsafe {
            call!(cuEventRecordWithFlags(
                event.0 as CUevent,
                handle(stream),
                external
            ))
        }?;
        // What follows in the stream does not wait for the record: it is a leaf of the graph.
        captures::set_dependencies(stream, &before)
    }

    fn event_record_external_last(&self, event: Event, stream: Stream) -> Result<()> {
        lock(&self.captures).record_last(event, stream)
    }

    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()> {
        let external = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
        // SAFETY: the caller's handles; refused outside captures.
        unsafe { call!(cuStreamWaitEvent(handle(stream), event.0 as CUevent, external)) }
    }

    fn counter(&self) -> Result<Counter> {
        self.entered()?.counters.counter()
    }

    fn count(&self, stream: Stream, counter: &Counter) -> Result<()> {
        self.gpu(self.current()?)?.counters.count(handle(stream), counter)
    }

    fn journal(&self) -> Result<Journal> {
        self.entered()?;
        append::journal()
    }

    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()> {
        let gpu = self.gpu(self.current()?)?;
        append::append(gpu.append, handle(stream), journal, word)
    }

    fn leave_captures(&self) -> Result<()> {
        driver::OutsideCapture::enter_for_good()
    }

    fn event_query(&self, event: Event) -> Result<Progress> {
        // SAFETY: as above.
        query("cuEventQuery", unsafe { sys::cuEventQuery(event.0 as CUevent) })
    }

    fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuEventSynchronize(event.0 as CUevent)) }
    }

    fn event_elapsed(&self, start: Event, end: Event) -> Result<Duration> {
        let mut milliseconds = 0.0;
        // SAFETY: as above; writes to the local.
        unsafe {
            call!(cuEventElapsedTime(
                &raw mut milliseconds,
                start.0 as CUevent,
                end.0 as CUevent
            ))
        }?;
        Ok(Duration::from_secs_f32((milliseconds / 1e3).max(0.0)))
    }

    fn memcpy(&self, destination: usize, source: usize, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's buffers; the driver refuses addresses that it does not know.
        unsafe {
            call!(cuMemcpyAsync(
                destination as u64,
                source as u64,
                bytes,
                handle(stream)
            ))
        }
    }

    fn memset(&self, destination: usize, value: u8, bytes: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuMemsetD8Async(destination as u64, value, bytes, handle(stream))) }
    }

    fn launch_host(&self, stream: Stream, function: HostFunction) -> Result<()> {
        host_call::launch(stream, function)
    }

    fn launcher(&self) -> Result<Launcher> {
        Ok(self.entered()?.launcher())
    }

    fn launch_kernel(&self, stream: Stream, launch: Arc<Launch>, launcher: &mut Launcher) -> Result<End> {
        for work in launch.channels.iter().flat_map(|channel| &channel.work) {
            work.check()
                .map_err(|error| DeviceError::InvalidUsage(error.to_string()))?;
        }
        if launch.channels.is_empty() {
            // No block would be there to say that it is over.
            let finished: HostFunction =
                Arc::new(move |replay| launch.observer.launch_finished(replay, launch.abort.is_set()));
            return self.launch_host(stream, finished).map(|()| End::Marked);
        }
        let gpu = self.gpu(self.current()?)?;
        let capturing = captures::capturing(stream)?;
        let Some((_, graph)) = capturing else {
            let how = How::Eager(kernel_graphs::of(launcher));
            return gpu.launch(handle(stream), launch, how);
        };
        // First: what has been captured is in the graph, whatever fails then, and is the launch's as long as that is there.
        let number = Arc::new(OnceLock::new());
        let (launches, captured) = (gpu.launches.clone(), number.clone());
        let forget = move || {
            if let Some(number) = captured.get() {
                launches.forget(*number);
            }
        };
        release::when_gone(graph, Box::new(forget))?;
        gpu.launch(handle(stream), launch, How::Captured(&number))
    }

    fn launch_kernel_at_once(
        &self,
        device: i32,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<End> {
        if launch.channels.is_empty() {
            return self.launch_kernel(stream, launch, launcher);
        }
        let how = How::Eager(kernel_graphs::of(launcher));
        self.gpu(device)?.launch(handle(stream), launch, how)
    }

    fn follow(&self, stream: Stream, launcher: &mut Launcher) -> Result<()> {
        let graphs = kernel_graphs::of(launcher);
        let graphs = graphs.ok_or_else(|| {
            DeviceError::InvalidUsage("a communicator without graphs has launched nothing with them".into())
        })?;
        graphs.follow(handle(stream))
    }

    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>> {
        captures::capturing(stream)?
            .map(|(id, graph)| lock(&self.captures).number(id, graph).map(|id| Capture { id }))
            .transpose()
    }

    fn capture_begin(&self, stream: Stream) -> Result<()> {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the caller's handle.
        unsafe { call!(cuStreamBeginCapture_v2(handle(stream), mode)) }
    }

    fn capture_end(&self, stream: Stream) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the caller's handle; writes to the local.
        unsafe { call!(cuStreamEndCapture(handle(stream), &raw mut graph)) }?;
        Ok(Graph(graph as usize))
    }

    fn capture_retain(&self, capture: Capture, destructor: Box<dyn FnOnce() + Send>) -> Result<()> {
        // The capture is still under way: operations are captured into it by the call that this is part of.
        let graph = lock(&self.captures).graph(capture.id)?;
        let captures = self.captures.clone();
        release::when_gone(
            graph,
            Box::new(move || {
                lock(&captures).forget(capture.id);
                destructor();
            }),
        )
    }

    fn graph_instantiate(&self, graph: Graph) -> Result<GraphExec> {
        let mut exec = std::ptr::null_mut();
        // SAFETY: the caller's handle; writes to the local.
        unsafe { call!(cuGraphInstantiateWithFlags(&raw mut exec, graph.0 as CUgraph, 0)) }?;
        Ok(GraphExec(exec as usize))
    }

    fn graph_launch(&self, exec: GraphExec, stream: Stream) -> Result<()> {
        // SAFETY: the caller's handles.
        unsafe { call!(cuGraphLaunch(exec.0 as CUgraphExec, handle(stream))) }
    }

    fn graph_exec_destroy(&self, exec: GraphExec) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuGraphExecDestroy(exec.0 as CUgraphExec)) }
    }

    fn graph_destroy(&self, graph: Graph) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuGraphDestroy(graph.0 as CUgraph)) }
    }
}
