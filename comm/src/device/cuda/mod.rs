//! GPUs, through the CUDA driver.
//!
//! Contexts are the primary ones, as the runtime uses them, so streams, events and memory of a program that uses the runtime work here.
//!
//! A launch is one kernel ([`ringsight_kernels::cuda`]) with its program in the arguments, or an entry and an exit kernel with copies between them
//! (`copy_engine`). Its events go through a ring in host memory that a drain thread per GPU reads (`drain`). It learns of an abort through a word
//! in host memory. Neither needs a driver call.
//!
//! Layers, lowest first; a module imports only modules of earlier lines:
//!
//! | modules | own |
//! |---|---|
//! | `driver`, `nvlink` | driver calls and their errors, pinned memory; topology |
//! | `launch_queue`, `health`, `counters` | launches on their way to the drain thread; faults; words that streams write |
//! | `clock`, `event_tracker`, `kernel_graphs`, `reclaim` | timer samples; a launch's reports; eager graphs; deferred drops and kept memory |
//! | `drain` | the drain thread |
//! | `gpu` | one opened GPU |
//! | `captures`, `vmm`, `rdma`, `copy_engine` | captures; VMM chunks; GPUDirect RDMA; copies between entry and exit kernel |
//! | `memory`, `sharing`, `streams`, `launch` | the device's traits |

mod captures;
mod clock;
mod copy_engine;
mod counters;
mod drain;
mod driver;
mod event_tracker;
mod gpu;
mod health;
mod kernel_graphs;
mod launch;
mod launch_queue;
mod memory;
mod nvlink;
mod rdma;
mod reclaim;
mod sharing;
mod streams;
mod vmm;

use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUcontext, CUresult};
use ringsight_kernels::cuda::{
    CHANNEL_THREADS, COPY_ENGINE_THREADS, MESSAGES_THREADS, collective_threads, one_shot_threads, program,
};
use ringsight_records::{Algorithm, Function};

use self::{
    captures::Captures,
    driver::{call, check},
    gpu::{Gpu, LazyGpu},
};
use super::{Contexts, DeviceError, Properties, Result, SavedContext};
use crate::op::{DataPath, Method, Task};

/// Threads of a warp.
const WARP: u32 = 32;

/// The device; see the module's documentation.
pub struct CudaDevice {
    /// By device number.
    gpus: Vec<LazyGpu>,
    captures: Arc<Mutex<Captures>>,
}

impl CudaDevice {
    /// The GPUs of this machine; none is opened yet.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] without driver, GPU or kernels.
    pub fn new() -> Result<Self> {
        let devices = driver::open()?;
        reclaim::start()?;
        Ok(Self {
            gpus: (0..devices).map(|_| LazyGpu::new()).collect(),
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

    /// Calls `what` with some context current. It is current afterwards only if it was before. Prefers a context that exists already.
    fn in_some_context<T>(&self, what: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = self.save_context()?;
        if before != SavedContext(0) {
            return what();
        }
        let opened = self.gpus.iter().find_map(LazyGpu::opened);
        opened.map_or_else(|| self.set_current(0), |gpu| gpu.make_current())?;
        let result = what();
        self.restore(before)?;
        result
    }

    /// The current device's GPU. Its context becomes current.
    fn entered(&self) -> Result<&Arc<Gpu>> {
        let gpu = self.gpu(self.current()?)?;
        gpu.make_current()?;
        Ok(gpu)
    }
}

impl Properties for CudaDevice {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn bus_id(&self, device: i32) -> Option<String> {
        let bus = nvlink::bus_id(device).ok()?;
        // The kernel writes lower-case letters.
        Some(nvlink::name(&bus).to_ascii_lowercase())
    }

    fn supports(&self, algorithm: Algorithm) -> bool {
        program::runs(algorithm)
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
        // A block has at most 1024 threads.
        (threads / WARP) as u8
    }

    fn warp_threads(&self) -> u32 {
        WARP
    }

    fn min_channels(&self) -> u32 {
        // A block has in flight what its threads load at once. It takes several blocks to fill a PCIe link.
        8
    }

    fn min_p2p_channels(&self) -> Option<u32> {
        // A block moves a dozen GB/s, since each of its steps waits for a slot to be handed over.
        Some(32)
    }
}

impl Contexts for CudaDevice {
    fn current(&self) -> Result<i32> {
        let mut device = 0;
        // SAFETY: writes to the local.
        match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
            // As with the runtime before its first call.
            CUresult::CUDA_ERROR_INVALID_CONTEXT => Ok(0),
            result => check("cuCtxGetDevice", result).map(|()| device),
        }
    }

    fn set_current(&self, device: i32) -> Result<()> {
        self.gpu(device)?.make_current()
    }

    fn save_context(&self) -> Result<SavedContext> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes to the local.
        unsafe { call!(cuCtxGetCurrent(&raw mut context)) }?;
        Ok(SavedContext(context as usize))
    }

    fn enter(&self, device: i32) -> Result<Option<SavedContext>> {
        let gpu = self.gpu(device)?;
        let before = self.save_context()?;
        if before.0 == gpu.context as usize {
            return Ok(None);
        }
        gpu.make_current()?;
        Ok(Some(before))
    }

    fn restore(&self, saved: SavedContext) -> Result<()> {
        // SAFETY: a context that was this thread's current one, or none.
        unsafe { call!(cuCtxSetCurrent(saved.0 as CUcontext)) }
    }

    fn check_health(&self, device: i32) -> Result<()> {
        self.gpu(device)?.health.check()
    }

    fn fault(&self, device: i32) -> Option<DeviceError> {
        self.gpu(device).ok()?.health.fault()
    }
}
