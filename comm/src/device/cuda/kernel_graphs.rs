//! Eager launches by executable graphs of one kernel. They take half of the host's time: 1.4 µs for a small argument and the launch instead of 2.7
//! (docs/decisions/0006-eager-launch-by-graph.md). On the GPU they behave like launches that wait for the end of what is before them in their
//! stream, and have that stream's priority.
//!
//! The driver runs the launches of one executable graph one after another, whatever their streams (`cuGraphLaunch`). So each communicator, whose
//! operations run one after another anyway, has graphs of its own. Another stream waits for the last launch when its graph is launched there
//! again, with a kernel that does nothing.
//!
//! All graphs are made when the GPU is opened, and never destroyed. To make one, the driver may have to allocate memory (seen with 43 graphs of a
//! process). For that it waits for everything that the GPU has to do, also for a kernel that waits for the thread that makes the communicator.

use std::{
    ffi::{c_int, c_void},
    sync::{Arc, Mutex},
};

use cudarc::driver::sys::{self, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUstream};

use ringsight_comm_base::sync::lock;

use super::{
    driver::{Kernel, OutsideCapture, call},
    launch_queue::LaunchQueue,
};
use crate::{
    device::{LaunchEnd, Launcher, Result},
    env, log,
};

/// Graphs of a communicator, one per kernel. Putting another kernel into a graph takes 1.5 µs, which is what a graph saves.
const PER_COMMUNICATOR: usize = 4;
/// Graphs of a GPU: enough for sixteen communicators. A graph takes 25 µs to make and 96 KiB of the GPU.
const PER_GPU: usize = 16 * PER_COMMUNICATOR;

/// The graphs of one GPU that no communicator uses.
pub(super) struct GraphStock {
    queue: Arc<LaunchQueue>,
    /// The kernel that does nothing.
    nothing: Kernel,
    instances: Mutex<Instances>,
}

#[derive(Default)]
struct Instances {
    free: Vec<Instance>,
    /// Graphs whose last launches may still run.
    returned: Vec<Instance>,
}

/// The graphs of one communicator: at least one.
pub(super) struct KernelGraphs {
    /// The last launched one comes first.
    instances: Vec<Instance>,
    stock: Arc<GraphStock>,
}

struct Instance {
    /// The kernel in it.
    function: CUfunction,
    graph: CUgraph,
    node: CUgraphNode,
    exec: CUgraphExec,
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for Instance {}

impl Drop for Instance {
    fn drop(&mut self) {
        let _outside = OutsideCapture::enter();
        // SAFETY: made in `Instance::new` and destroyed once. Launches that are not over go on.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

/// The parameters of a kernel node.
fn parameters(kernel: &Kernel, arguments: &mut [*mut c_void]) -> sys::CUDA_KERNEL_NODE_PARAMS_v2 {
    sys::CUDA_KERNEL_NODE_PARAMS_v2 {
        func: kernel.function,
        gridDimX: kernel.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: kernel.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: kernel.shared_bytes,
        kernelParams: arguments.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: std::ptr::null_mut(),
    }
}

impl Instance {
    /// A graph of a kernel that has no arguments.
    fn new(kernel: &Kernel, stream: CUstream) -> Result<Self> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes to the local.
        unsafe { call!(cuGraphCreate(&raw mut graph, 0)) }?;
        let mut made = Self {
            function: kernel.function,
            graph,
            node: std::ptr::null_mut(),
            exec: std::ptr::null_mut(),
        };
        let parameters = parameters(kernel, &mut []);
        // SAFETY: handles of this graph; results are written to the locals.
        unsafe {
            call!(cuGraphAddKernelNode_v2(
                &raw mut made.node,
                graph,
                std::ptr::null(),
                0,
                &raw const parameters
            ))?;
            call!(cuGraphInstantiateWithFlags(&raw mut made.exec, graph, 0))?;
            // Upload now. Otherwise the first launch would, with kernels on the GPU that other ranks wait for.
            call!(cuGraphUpload(made.exec, stream))?;
        }
        Ok(made)
    }

    /// Sets its kernel, with a copy of the arguments. Launches in flight keep theirs.
    ///
    /// # Safety
    /// `arguments` point to the kernel's arguments.
    #[inline]
    unsafe fn set(&mut self, kernel: &Kernel, arguments: &mut [*mut c_void]) -> Result<()> {
        let parameters = parameters(kernel, arguments);
        // SAFETY: a graph of one node; the arguments are the caller's.
        unsafe {
            call!(cuGraphExecKernelNodeSetParams_v2(
                self.exec,
                self.node,
                &raw const parameters
            ))
        }?;
        self.function = kernel.function;
        Ok(())
    }

    /// # Safety
    /// The conditions of [`Kernel::launch`], for its kernel and arguments.
    #[inline]
    unsafe fn launch(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { call!(cuGraphLaunch(self.exec, stream)) }
    }
}

impl GraphStock {
    /// The graphs of a GPU; `None` if they are off (`RINGSIGHT_GRAPH_LAUNCH`) or cannot be made. `nothing`: the kernel that does nothing and has no
    /// arguments. `stream` is the module's own.
    pub(super) fn open(
        device: c_int,
        queue: &Arc<LaunchQueue>,
        nothing: CUfunction,
        stream: CUstream,
    ) -> Option<Arc<Self>> {
        if !env::switch("RINGSIGHT_GRAPH_LAUNCH", true) {
            return None;
        }
        let made = Self::new(queue.clone(), Kernel::single(nothing), stream);
        made.inspect_err(|error| {
            tracing::warn!(
                target: log::INIT,
                "GPU {device}: kernels are launched without graphs, which takes the host longer: {error}"
            );
        })
        .ok()
    }

    fn new(queue: Arc<LaunchQueue>, nothing: Kernel, stream: CUstream) -> Result<Arc<Self>> {
        let _outside = OutsideCapture::enter()?;
        let free = (0..PER_GPU)
            .map(|_| Instance::new(&nothing, stream))
            .collect::<Result<_>>()?;
        let instances = Instances {
            free,
            returned: Vec::new(),
        };
        Ok(Arc::new(Self {
            queue,
            nothing,
            instances: Mutex::new(instances),
        }))
    }

    /// Graphs for a new communicator, if there are any left.
    pub(super) fn take(self: &Arc<Self>) -> Option<KernelGraphs> {
        let mut instances = lock(&self.instances);
        // Under the lock nothing is returned, and returned graphs are not launched any more.
        let is_idle = self.queue.idle_after().is_some();
        let Instances { free, returned } = &mut *instances;
        if is_idle {
            free.append(returned);
        }
        let left = free.len().saturating_sub(PER_COMMUNICATOR);
        let taken = free.split_off(left);
        drop(instances);
        (!taken.is_empty()).then(|| KernelGraphs {
            instances: taken,
            stock: self.clone(),
        })
    }
}

impl Drop for KernelGraphs {
    fn drop(&mut self) {
        lock(&self.stock.instances).returned.append(&mut self.instances);
    }
}

impl KernelGraphs {
    /// Launches a kernel in a stream of their GPU, whose context is current. The stream is in no capture. Captures of other threads are not
    /// disturbed.
    ///
    /// # Safety
    /// The conditions of [`Kernel::launch`].
    #[inline]
    pub(super) unsafe fn launch(
        &mut self,
        kernel: &Kernel,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<LaunchEnd> {
        let has = |instance: &Instance| instance.function == kernel.function;
        // If no graph has this kernel, the one that was launched the longest ago.
        let oldest = self.instances.len() - 1;
        let at = self.instances.iter().position(has).unwrap_or(oldest);
        let instance = &mut self.instances[at];
        // SAFETY: the caller's, also for a launch without the graph if that does not take the kernel.
        unsafe {
            if instance.set(kernel, arguments).is_err() {
                return kernel.launch(stream, arguments).map(|()| LaunchEnd::ByEvent);
            }
            instance.launch(stream)?;
        }
        if at != 0 {
            self.instances[..=at].rotate_right(1);
        }
        Ok(LaunchEnd::ByLauncher)
    }

    /// Makes later work in a stream, which is in no capture, wait for the last launch.
    pub(super) fn wait_for_last(&mut self, stream: CUstream) -> Result<()> {
        let instance = &mut self.instances[0];
        // SAFETY: a kernel without arguments. It runs behind the last launch of this graph.
        unsafe {
            instance.set(&self.stock.nothing, &mut [])?;
            instance.launch(stream)
        }
    }
}

/// The graphs in a communicator's launcher, if it has some.
pub(super) fn of(launcher: &mut Launcher) -> Option<&mut KernelGraphs> {
    launcher.as_mut().and_then(|launcher| launcher.downcast_mut())
}
