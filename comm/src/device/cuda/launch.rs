//! Launches: peer operations, by the graphs of their communicator where that is faster, and channel programs.

use std::{
    ffi::c_void,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use cudarc::driver::sys::CUstream;
use ringsight_kernels::{
    Launch, WorkError,
    cuda::{self, PeerOperation, Program},
};

use super::{
    CudaDevice, captures, copy_engine,
    driver::{Kernel, call, stream as handle},
    gpu::Gpu,
    kernel_graphs::{self, KernelGraphs},
    reclaim,
};
use crate::{
    device::{Contexts, DeviceError, HostFunction, LaunchEnd, Launcher, Launches, Result, Stream},
    log,
};

/// How a launch is put into its stream.
pub(super) enum How<'a> {
    /// In no capture, with the graphs of its communicator.
    Eager(Option<&'a mut KernelGraphs>),
    /// As a node of a capture. The launch stores its number here, so that it is retired when the graph is gone, even if a later step fails.
    Captured(&'a OnceLock<u32>),
}

impl How<'_> {
    fn is_captured(&self) -> bool {
        matches!(self, Self::Captured(_))
    }

    /// Called when its first kernel is in the stream.
    fn set_launched(&self, launch: u32) {
        if let Self::Captured(number) = self {
            // Called once per launch.
            let _ = number.set(launch);
        }
    }
}

impl Gpu {
    /// The graphs for a new communicator; `None` if there are none left, since it can do without.
    pub(super) fn launcher(&self) -> Launcher {
        let graphs = self.graphs.as_ref()?.take();
        if graphs.is_none() {
            tracing::debug!(
                target: log::INIT,
                "GPU {}: other communicators have all graphs; this one's kernels are launched without, which takes the host longer",
                self.device
            );
        }
        Some(Box::new(graphs?))
    }

    /// Puts a launch into the stream.
    pub(super) fn launch(
        self: &Arc<Self>,
        stream: CUstream,
        launch: Arc<Launch>,
        how: How,
    ) -> Result<LaunchEnd> {
        // Used in place: it has several hundred bytes.
        match &mut PeerOperation::new(&launch) {
            Ok(Some(operation)) => self.launch_peer_operation(stream, launch, operation, how),
            Ok(None) => self
                .launch_program(stream, launch, &how)
                .map(|()| LaunchEnd::ByEvent),
            Err(error) => Err(invalid(error)),
        }
    }

    fn launch_peer_operation(
        &self,
        stream: CUstream,
        launch: Arc<Launch>,
        operation: &mut PeerOperation,
        mut how: How,
    ) -> Result<LaunchEnd> {
        let captured = how.is_captured();
        let PeerOperation {
            launch: kernel_launch,
            copy_phase,
        } = operation;
        let copy_engine = copy_phase
            .as_ref()
            .map(|_| copy_engine::of_launch(&launch))
            .transpose()?;
        let head = self.submit(launch, captured, None)?;
        kernel_launch.arguments.report_to(head);
        let kernel = Kernel {
            overlaps: self.may_overlap && kernel_launch.arguments.may_overlap(),
            ..self.peer_kernel(kernel_launch)
        };
        let gains = kernel_launch.gains_by_graph(kernel.overlaps);
        // SAFETY: the kernel's argument, which the call copies. What it refers to lives until the launch is over: the drain thread holds it.
        let end = unsafe {
            let arguments = &mut [kernel_launch.arguments.as_mut_ptr()];
            match &mut how {
                How::Eager(Some(graphs)) if gains => graphs.launch(&kernel, stream, arguments),
                _ => kernel.launch(stream, arguments).map(|()| LaunchEnd::ByEvent),
            }
        }
        .inspect_err(|_| self.queue.retire(head.launch))?;
        how.set_launched(head.launch);
        let Some((copy_phase, copy_engine)) = copy_phase.as_ref().zip(copy_engine) else {
            return Ok(end);
        };
        self.launch_copies(stream, kernel_launch, head, copy_phase, &copy_engine, captured)?;
        Ok(LaunchEnd::ByEvent)
    }

    fn launch_program(self: &Arc<Self>, stream: CUstream, launch: Arc<Launch>, how: &How) -> Result<()> {
        let program = Program::new(&launch).map_err(|error| invalid(&error))?;
        if program.shared_bytes() > self.shared_bytes {
            return Err(DeviceError::InvalidUsage(format!(
                "the messages of one channel need {} bytes of state, a block has {}: make groups of fewer messages",
                program.shared_bytes(),
                self.shared_bytes
            )));
        }
        let outside = program.outside().map(|bytes| self.outside(bytes)).transpose()?;
        let mut arguments = program.arguments(outside.as_ref().map_or(0, |pinned| pinned.base() as u64));
        let keeper = Arc::downgrade(self);
        let on_end = outside.map(|pinned| -> Box<dyn FnOnce() + Send> {
            Box::new(move || {
                if let Some(gpu) = keeper.upgrade() {
                    gpu.keep(pinned);
                }
            })
        });
        arguments.head = self.submit(launch, how.is_captured(), on_end)?;
        let number = arguments.head.launch;
        let shared_bytes = program.shared_bytes() as u32;
        let kernel = Kernel {
            function: self.channels[usize::from(program.reduces())],
            blocks: program.blocks(),
            threads: cuda::CHANNEL_THREADS,
            shared_bytes,
            overlaps: false,
        };
        // SAFETY: as above.
        unsafe { kernel.launch(stream, &mut [std::ptr::from_mut(&mut arguments).cast()]) }
            .inspect_err(|_| self.queue.retire(number))?;
        how.set_launched(number);
        Ok(())
    }
}

fn invalid(error: &WorkError) -> DeviceError {
    DeviceError::InvalidUsage(error.to_string())
}

impl Launches for CudaDevice {
    fn new_launcher(&self) -> Result<Launcher> {
        Ok(self.entered()?.launcher())
    }

    fn launch_kernel(
        &self,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<LaunchEnd> {
        for work in launch.channels.iter().flat_map(|channel| &channel.work) {
            work.check()
                .map_err(|error| DeviceError::InvalidUsage(error.to_string()))?;
        }
        if launch.channels.is_empty() {
            // No block would report the end.
            let finished: HostFunction =
                Arc::new(move |replay| launch.observer.launch_finished(replay, launch.abort.is_set()));
            return launch_host(stream, finished).map(|()| LaunchEnd::ByEvent);
        }
        let gpu = self.gpu(self.current()?)?;
        let capturing = captures::capturing(stream)?;
        let Some((_, graph)) = capturing else {
            let how = How::Eager(kernel_graphs::of(launcher));
            return gpu.launch(handle(stream), launch, how);
        };
        // First: a captured kernel stays in the graph whatever fails later, and uses the launch's memory as long as the graph exists.
        let number = Arc::new(OnceLock::new());
        let (queue, captured) = (gpu.queue.clone(), number.clone());
        let retire = move || {
            if let Some(number) = captured.get() {
                queue.retire(*number);
            }
        };
        reclaim::when_gone(graph, Box::new(retire))?;
        gpu.launch(handle(stream), launch, How::Captured(&number))
    }

    fn launch_prepared(
        &self,
        device: i32,
        stream: Stream,
        launch: Arc<Launch>,
        launcher: &mut Launcher,
    ) -> Result<LaunchEnd> {
        if launch.channels.is_empty() {
            return self.launch_kernel(stream, launch, launcher);
        }
        let how = How::Eager(kernel_graphs::of(launcher));
        self.gpu(device)?.launch(handle(stream), launch, how)
    }

    fn wait_for_launch(&self, stream: Stream, launcher: &mut Launcher) -> Result<()> {
        let graphs = kernel_graphs::of(launcher);
        let graphs = graphs.ok_or_else(|| {
            DeviceError::InvalidUsage("a communicator without graphs has launched nothing with them".into())
        })?;
        graphs.wait_for_last(handle(stream))
    }
}

/// A host function in a stream.
struct HostNode {
    function: HostFunction,
    /// Calls so far; only for a function in a graph.
    calls: Option<AtomicU32>,
}

/// The driver's callback, in stream order.
unsafe extern "C" fn call_host(data: *mut c_void) {
    // SAFETY: the box of `launch_host`. In a graph it lives as long as the graph, else until here.
    let node = unsafe { &*data.cast::<HostNode>() };
    // Relaxed: replays of one graph run one after another.
    let replay = node
        .calls
        .as_ref()
        .map_or(0, |calls| calls.fetch_add(1, Ordering::Relaxed) + 1);
    // Nothing may unwind into the driver.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (node.function)(replay)));
    if node.calls.is_none() {
        // SAFETY: made by `launch_host` for this one call. Dropped on another thread, since dropping it may call the driver.
        reclaim::drop_later(unsafe { Box::from_raw(data.cast::<HostNode>()) });
    }
}

/// Calls a function in stream order; in a capture, at each replay.
fn launch_host(stream: Stream, function: HostFunction) -> Result<()> {
    let capturing = captures::capturing(stream)?;
    let node = Box::into_raw(Box::new(HostNode {
        function,
        calls: capturing.is_some().then(AtomicU32::default),
    }));
    // SAFETY: `call_host` takes such a box.
    let launched = unsafe { call!(cuLaunchHostFunc(handle(stream), Some(call_host), node.cast())) };
    // SAFETY: made above. The call of an eager node drops it; a node in a graph, or in no stream, is still ours.
    let ours = |node| unsafe { Box::from_raw(node) };
    match (launched, capturing) {
        (Err(error), _) => {
            drop(ours(node));
            Err(error)
        }
        (Ok(()), None) => Ok(()),
        (Ok(()), Some((_, graph))) => {
            let node = ours(node);
            reclaim::when_gone(graph, Box::new(move || reclaim::drop_later(node)))
        }
    }
}
