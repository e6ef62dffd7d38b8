//! How launches come into streams: kernels among peers, by the graphs of their communicator where that is better, and channel programs.

use std::{
    ffi::c_int,
    sync::{Arc, OnceLock},
};

use cudarc::driver::sys::{CUfunction, CUstream};
use ringsight_kernels::{
    Launch, WorkError,
    cuda::{self, PeerLaunch, PeerOperation, Program},
};

use super::{
    driver::Kernel,
    engines,
    gpu::Gpu,
    kernel_graphs::{KernelGraphs, Stock},
    launches::Launches,
};
use crate::{
    device::{DeviceError, End, Launcher, Result},
    env, log,
};

/// The graphs of a GPU's eager kernels, whose launches these are, unless that is not wanted or cannot be had. `nothing`: see [`Stock::new`].
pub(super) fn graphs(
    device: c_int,
    launches: &Arc<Launches>,
    nothing: CUfunction,
    stream: CUstream,
) -> Option<Arc<Stock>> {
    if !env::switch("RINGSIGHT_GRAPH_LAUNCH", true) {
        return None;
    }
    let made = Stock::new(launches.clone(), Kernel::single(nothing), stream);
    made.inspect_err(|error| {
        tracing::warn!(
            target: log::INIT,
            "GPU {device}: kernels are launched without graphs, which takes the host longer: {error}"
        );
    })
    .ok()
}

/// How a launch comes into its stream.
pub(super) enum How<'a> {
    /// In no capture, with what its communicator has for that.
    Eager(Option<&'a mut KernelGraphs>),
    /// As a node of a capture. Its number is for who sees the graph go, also where what follows the kernel fails.
    Captured(&'a OnceLock<u32>),
}

impl How<'_> {
    fn is_captured(&self) -> bool {
        matches!(self, Self::Captured(_))
    }

    /// Its kernel, or the first of them, is in the stream.
    fn has_launched(&self, launch: u32) {
        if let Self::Captured(number) = self {
            // Once for each launch.
            let _ = number.set(launch);
        }
    }
}

impl Gpu {
    /// What a new communicator's kernels are launched with; none where that cannot be had, since nobody needs it.
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
    pub(super) fn launch(self: &Arc<Self>, stream: CUstream, launch: Arc<Launch>, how: How) -> Result<End> {
        // Looked at where it is: it has several hundred bytes.
        match &mut PeerOperation::new(&launch) {
            Ok(Some(operation)) => self.launch_peer_operation(stream, launch, operation, how),
            Ok(None) => self.launch_program(stream, launch, &how).map(|()| End::Marked),
            Err(error) => Err(invalid(error)),
        }
    }

    /// The kernel of a launch among peers, which waits for what is before it in its stream.
    pub(super) fn peer_kernel(&self, launch: &PeerLaunch) -> Kernel {
        Kernel {
            function: self.peer_kernels[launch.kernel],
            blocks: launch.blocks,
            threads: launch.threads,
            shared_bytes: 0,
            overlaps: false,
        }
    }

    fn launch_peer_operation(
        &self,
        stream: CUstream,
        launch: Arc<Launch>,
        operation: &mut PeerOperation,
        mut how: How,
    ) -> Result<End> {
        let captured = how.is_captured();
        let PeerOperation {
            launch: kernel_launch,
            copy_phase,
        } = operation;
        let engines = copy_phase.as_ref().map(|_| engines::of(&launch)).transpose()?;
        let head = self.enter(launch, captured, None)?;
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
                _ => kernel.launch(stream, arguments).map(|()| End::Marked),
            }
        }
        .inspect_err(|_| self.launches.forget(head.launch))?;
        how.has_launched(head.launch);
        let Some((copy_phase, engines)) = copy_phase.as_ref().zip(engines) else {
            return Ok(end);
        };
        self.launch_copies(stream, kernel_launch, head, copy_phase, &engines, captured)?;
        Ok(End::Marked)
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
        arguments.head = self.enter(launch, how.is_captured(), on_end)?;
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
            .inspect_err(|_| self.launches.forget(number))?;
        how.has_launched(number);
        Ok(())
    }
}

fn invalid(error: &WorkError) -> DeviceError {
    DeviceError::InvalidUsage(error.to_string())
}
