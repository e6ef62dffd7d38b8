//! Eager launches by executable graphs of one kernel, which take half of the host's time of a launch: 1.4 µs for a small argument and the launch
//! instead of 2.7 (docs/src/performance/library-gpu.md). On the GPU they are as launches that wait for the end of what is before them in
//! their stream, and have that stream's priority.
//!
//! The driver runs one launch of such a graph after another, whatever their streams are, so each communicator has its own, whose operations run one
//! after another anyhow. They are made with the communicator: nothing has to be had while kernels run that others wait for.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUfunction, CUgraph, CUgraphExec, CUgraphNode, CUstream};

use super::{
    driver::{Kernel, OutsideCapture, call},
    release,
};
use crate::device::{Launcher, Result};

/// Kernels that a communicator has graphs of. To put another one into a graph takes 1.5 µs, and a graph 25 µs to be made and 96 KiB of the GPU.
const INSTANCES: usize = 8;

/// The graphs of one communicator.
pub(super) struct KernelGraphs {
    /// The one that was launched last comes first.
    instances: Vec<Instance>,
}

struct Instance {
    /// Its kernel; null before the first.
    function: CUfunction,
    graph: CUgraph,
    node: CUgraphNode,
    exec: CUgraphExec,
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for Instance {}

impl Drop for Instance {
    fn drop(&mut self) {
        // SAFETY: made in `Instance::new` and given back once. Launches that are not over go on.
        unsafe {
            if !self.exec.is_null() {
                let _ = sys::cuGraphExecDestroy(self.exec);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

impl Drop for KernelGraphs {
    fn drop(&mut self) {
        // Not on whatever thread lets go of a communicator.
        release::later(std::mem::take(&mut self.instances));
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
    /// A graph of any kernel.
    ///
    /// # Safety
    /// `arguments` are the kernel's.
    unsafe fn new(kernel: &Kernel, arguments: &mut [*mut c_void], stream: CUstream) -> Result<Self> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes to the local.
        unsafe { call!(cuGraphCreate(&raw mut graph, 0)) }?;
        let mut made = Self {
            function: std::ptr::null_mut(),
            graph,
            node: std::ptr::null_mut(),
            exec: std::ptr::null_mut(),
        };
        let parameters = parameters(kernel, arguments);
        // SAFETY: handles of this graph's; results are written to the locals. The arguments are the caller's, and copied.
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
}

impl KernelGraphs {
    /// For the GPU whose context is current, with any of its kernels at first. Nothing in `stream` waits for others.
    ///
    /// # Safety
    /// `arguments` are the kernel's.
    pub(super) unsafe fn new(
        kernel: &Kernel,
        arguments: &mut [*mut c_void],
        stream: CUstream,
    ) -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let instances = (0..INSTANCES)
            // SAFETY: the caller's.
            .map(|_| unsafe { Instance::new(kernel, arguments, stream) })
            .collect::<Result<_>>()?;
        Ok(Self { instances })
    }

    /// Launches a kernel into a stream that is in no capture, of the GPU that it was made for, whose context is current.
    ///
    /// # Safety
    /// As for [`Kernel::launch`].
    #[inline]
    pub(super) unsafe fn launch(
        &mut self,
        kernel: &Kernel,
        stream: CUstream,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let has = |instance: &Instance| instance.function == kernel.function;
        if !has(&self.instances[0]) {
            // The one that was not launched for the longest time, if none has this kernel.
            let at = self.instances.iter().position(has).unwrap_or(INSTANCES - 1);
            self.instances[..=at].rotate_right(1);
        }
        let instance = &mut self.instances[0];
        let parameters = parameters(kernel, arguments);
        // Whatever is being captured elsewhere: a launch would not disturb it.
        let _outside = OutsideCapture::enter()?;
        // SAFETY: a graph of one node, to which the driver copies the arguments before it returns: launches that are under way keep theirs. What
        // these refer to is the caller's, as is all of a launch without the graph, should that not take them.
        unsafe {
            let set = call!(cuGraphExecKernelNodeSetParams_v2(
                instance.exec,
                instance.node,
                &raw const parameters
            ));
            if set.is_err() {
                return kernel.launch(stream, arguments);
            }
            instance.function = kernel.function;
            call!(cuGraphLaunch(instance.exec, stream))
        }
    }
}

/// The one that a communicator has been given, if it has one.
pub(super) fn of(launcher: &mut Launcher) -> Option<&mut KernelGraphs> {
    launcher.as_mut().and_then(|launcher| launcher.downcast_mut())
}
