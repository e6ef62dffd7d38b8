//! Eager launches by executable graphs of one kernel, which take half of the host's time of a launch: 1.4 µs for a small argument and the launch
//! instead of 2.7 (docs/decisions/0006-eager-launch-by-graph.md). On the GPU they are as launches that wait for the end of what is before them in
//! their stream, and have that stream's priority.
//!
//! The driver runs one launch of such a graph after another, whatever their streams are (`cuGraphLaunch`), so each communicator has some of its own, whose
//! operations run one after another anyhow; and to make another stream wait for the last of them, it is enough to launch that one's graph there.
//!
//! They are all made when the GPU is opened, and never given back to the driver: to make one it may wait for all that the GPU
//! has to do (seen with 43 of a process, when it had to have more memory), also for a kernel that waits for whoever makes the communicator.

use std::{
    ffi::c_void,
    sync::{Arc, Mutex},
};

use cudarc::driver::sys::{self, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUstream};

use super::{
    driver::{Kernel, OutsideCapture, call},
    launches::Launches,
};
use crate::device::{End, Launcher, Result};
use ringsight_comm_base::sync::lock;

/// Kernels that a communicator has graphs of. To put another one into a graph takes 1.5 µs, what it saves.
const OF_ONE: usize = 4;
/// Graphs of a GPU: those of sixteen communicators. One takes 25 µs to be made and 96 KiB of the GPU.
const OF_ALL: usize = 16 * OF_ONE;

/// The graphs of one GPU that no communicator has.
pub(super) struct Stock {
    launches: Arc<Launches>,
    /// The kernel that does nothing.
    nothing: Kernel,
    instances: Mutex<Instances>,
}

#[derive(Default)]
struct Instances {
    free: Vec<Instance>,
    /// What was launched with them last need not be over.
    given_back: Vec<Instance>,
}

/// The graphs of one communicator, at least one.
pub(super) struct KernelGraphs {
    /// The one that was launched last comes first.
    instances: Vec<Instance>,
    stock: Arc<Stock>,
}

struct Instance {
    /// Its kernel.
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
        // SAFETY: made in `Instance::new` and given back once. Launches that are not over go on.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

/// What a node is told of its kernel.
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
        // SAFETY: handles of this graph's; results are written to the locals.
        unsafe {
            call!(cuGraphAddKernelNode_v2(
                &raw mut made.node,
                graph,
                std::ptr::null(),
                0,
                &raw const parameters
            ))?;
            call!(cuGraphInstantiateWithFlags(&raw mut made.exec, graph, 0))?;
            // Now: the first launch would, with kernels on the GPU that others wait for.
            call!(cuGraphUpload(made.exec, stream))?;
        }
        Ok(made)
    }

    /// Its kernel is this one from now on, with copies of these arguments; launches that are under way keep theirs.
    ///
    /// # Safety
    /// `arguments` are the kernel's.
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
    /// As for [`Kernel::launch`] of its kernel and arguments.
    #[inline]
    unsafe fn launch(&self, stream: CUstream) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { call!(cuGraphLaunch(self.exec, stream)) }
    }
}

impl Stock {
    /// For the GPU whose context is current and whose launches these are. `nothing`: a kernel that does nothing and has no arguments. Nothing in
    /// `stream` waits for others.
    pub(super) fn new(launches: Arc<Launches>, nothing: Kernel, stream: CUstream) -> Result<Arc<Self>> {
        let _outside = OutsideCapture::enter()?;
        let free = (0..OF_ALL)
            .map(|_| Instance::new(&nothing, stream))
            .collect::<Result<_>>()?;
        let instances = Instances {
            free,
            given_back: Vec::new(),
        };
        Ok(Arc::new(Self {
            launches,
            nothing,
            instances: Mutex::new(instances),
        }))
    }

    /// What a new communicator gets, if there is something.
    pub(super) fn take(self: &Arc<Self>) -> Option<KernelGraphs> {
        let mut instances = lock(&self.instances);
        // Under that lock: nothing is given back meanwhile, and what has been is not launched any more.
        let is_idle = lock(&self.launches.exchange).running == 0;
        let Instances { free, given_back } = &mut *instances;
        if is_idle {
            free.append(given_back);
        }
        let left = free.len().saturating_sub(OF_ONE);
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
        lock(&self.stock.instances).given_back.append(&mut self.instances);
    }
}

impl KernelGraphs {
    /// Launches a kernel into a stream that is in no capture, of the GPU that they are of, whose context is current. Captures of other threads it
    /// does not disturb.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    #[inline]
    pub(super) unsafe fn launch(
        &mut self,
        kernel: &Kernel,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<End> {
        let has = |instance: &Instance| instance.function == kernel.function;
        // The one that was not launched for the longest time, if none has this kernel.
        let oldest = self.instances.len() - 1;
        let at = self.instances.iter().position(has).unwrap_or(oldest);
        let instance = &mut self.instances[at];
        // SAFETY: the caller's, also of a launch without the graph, should that not take them.
        unsafe {
            if instance.set(kernel, arguments).is_err() {
                return kernel.launch(stream, arguments).map(|()| End::Marked);
            }
            instance.launch(stream)?;
        }
        if at != 0 {
            self.instances[..=at].rotate_right(1);
        }
        Ok(End::Known)
    }

    /// Lets what follows in a stream, which is in no capture, wait for the last launch.
    pub(super) fn follow(&mut self, stream: CUstream) -> Result<()> {
        let instance = &mut self.instances[0];
        // SAFETY: a kernel without arguments, behind what was launched last.
        unsafe {
            instance.set(&self.stock.nothing, &mut [])?;
            instance.launch(stream)
        }
    }
}

/// The one that a communicator has been given, if it has one.
pub(super) fn of(launcher: &mut Launcher) -> Option<&mut KernelGraphs> {
    launcher.as_mut().and_then(|launcher| launcher.downcast_mut())
}
