//! One opened GPU: its kernels, the ring of their events, and the queue of its launches.
//!
//! A GPU is opened once and never closed. Opening it allocates what launches need later: with kernels on the GPU that wait for other ranks, the
//! driver might not give memory without waiting for those kernels.

use std::{
    collections::HashMap,
    ffi::c_int,
    sync::{Arc, Mutex, OnceLock},
    thread,
};

use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUstream,
};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::{
    Launch,
    cuda::{
        self, APPEND_KERNEL, CHANNEL_KERNELS, CLOCK_KERNEL, COUNT_KERNEL, Head, NOTHING_KERNEL, PeerLaunch,
        PeerOperation, RING_ENTRIES, ring::Entry,
    },
};

use super::{
    clock::{Clock, Sampler},
    counters::Counters,
    drain::Drain,
    driver::{self, Kernel, OutsideCapture, Pinned, PinnedSlice, attribute, call, new_stream, zero, zeroed},
    health::Health,
    kernel_graphs::GraphStock,
    launch_queue::{LaunchQueue, Submitted},
    reclaim::{self, Block},
};
use crate::device::{DeviceError, Result};

/// Pinned memory for one program that does not fit into the arguments: enough for a program of all channels.
const PROGRAM_BYTES: usize = 16 << 10;
/// Such blocks of memory that are allocated when the GPU is opened.
const PROGRAMS: usize = 64;

/// One opened GPU.
pub(super) struct Gpu {
    pub(super) device: c_int,
    /// The kernels of channel programs: for launches that only copy, and for any launch.
    pub(super) channels: [CUfunction; CHANNEL_KERNELS.len()],
    /// The kernels of [`PeerOperation::kernels`], by number.
    pub(super) peer_kernels: Vec<CUfunction>,
    /// See [`driver::may_overlap`].
    pub(super) may_overlap: bool,
    /// Graphs for eager kernels; `None` if they are off or could not be made.
    pub(super) graphs: Option<Arc<GraphStock>>,
    /// Address of the ring's ticket, in device memory.
    ticket: CUdeviceptr,
    entries: Arc<PinnedSlice<Entry>>,
    /// The most blocks of a peer kernel: part of the GPU stays free for others.
    pub(super) blocks: u32,
    /// The most dynamic shared memory of a block.
    pub(super) shared_bytes: usize,
    pub(super) queue: Arc<LaunchQueue>,
    pub(super) counters: Counters,
    /// The kernel that appends to a journal.
    pub(super) append: CUfunction,
    /// The primary context, which CUDA's runtime uses, too.
    pub(super) context: CUcontext,
    /// For the module's own work: it waits for no other stream, and none waits for it.
    pub(super) stream: CUstream,
    pub(super) health: Health,
    /// Free memory for programs that do not fit into the arguments, by size class.
    pinned: Mutex<HashMap<usize, Vec<Pinned>>>,
}

// SAFETY: the handles may be used by any thread, the rest is locked.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Device memory that the library has allocated. When it is dropped, [`reclaim`] keeps it for reuse.
pub(super) struct DeviceMemory(Block);

impl DeviceMemory {
    pub(super) fn base(&self) -> CUdeviceptr {
        self.0.base
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        reclaim::keep_block(self.0);
    }
}

/// The GPU of a device number, opened at its first use.
pub(super) struct LazyGpu {
    gpu: OnceLock<Arc<Gpu>>,
    /// Why it can never be opened.
    failed: Mutex<Option<DeviceError>>,
}

impl LazyGpu {
    pub(super) fn new() -> Self {
        Self {
            gpu: OnceLock::new(),
            failed: Mutex::new(None),
        }
    }

    pub(super) fn get(&self, device: c_int) -> Result<&Arc<Gpu>> {
        self.gpu.get().map_or_else(|| self.open(device), Ok)
    }

    #[cold]
    fn open(&self, device: c_int) -> Result<&Arc<Gpu>> {
        // One thread opens it, and the others wait.
        let mut failed = lock(&self.failed);
        if let Some(gpu) = self.gpu.get() {
            return Ok(gpu);
        }
        if let Some(error) = &*failed {
            return Err(error.clone());
        }
        let gpu = Gpu::open(device).inspect_err(|error| {
            // Out of memory now: there may be memory another time.
            if !matches!(error, DeviceError::Resource(_)) {
                *failed = Some(error.clone());
            }
        })?;
        Ok(self.gpu.get_or_init(|| Arc::new(gpu)))
    }

    /// The GPU, if it is open.
    pub(super) fn opened(&self) -> Option<&Arc<Gpu>> {
        self.gpu.get()
    }
}

/// Undoes the steps of opening a GPU if a later one fails, the latest first.
#[derive(Default)]
struct Rollback(Vec<Box<dyn FnOnce()>>);

impl Rollback {
    fn add(&mut self, rollback: impl FnOnce() + 'static) {
        self.0.push(Box::new(rollback));
    }
}

impl Drop for Rollback {
    fn drop(&mut self) {
        while let Some(rollback) = self.0.pop() {
            rollback();
        }
    }
}

impl Gpu {
    /// Opens it. Its primary context becomes current.
    fn open(device: c_int) -> Result<Self> {
        let unavailable = |text: &str| Err(DeviceError::Unavailable(format!("GPU {device}: {text}")));
        let has = |what| Ok::<_, DeviceError>(attribute(device, what)? != 0);
        use CUdevice_attribute as Of;
        let major = attribute(device, Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        if major < 8 {
            return unavailable(
                "its architecture is older than Ampere (sm_80), the oldest that the kernels are built for",
            );
        }
        if !has(Of::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)? {
            return unavailable("it does not reach host memory at the host's addresses");
        }
        let shared = attribute(device, Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let processors = attribute(device, Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // A multiprocessor holds two blocks; the other half is for kernels of other communicators.
        let blocks = u32::try_from(processors).unwrap_or(0);
        // The kernel itself uses some of it.
        let shared_bytes = usize::try_from(shared).unwrap_or(0).saturating_sub(4096);
        let fatbin = match cuda::fatbin() {
            Ok(fatbin) => fatbin,
            Err(missing) => return unavailable(&format!("this build has no kernels: {missing}")),
        };
        let _outside = OutsideCapture::enter()?;
        let mut rollback = Rollback::default();
        let (mut context, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut channels = [std::ptr::null_mut(); CHANNEL_KERNELS.len()];
        let mut peer_kernels = Vec::new();
        let [mut clock_kernel, mut count_kernel, mut append, mut nothing] = [std::ptr::null_mut(); 4];
        // SAFETY: handles are written to the locals; the image is a fat binary of nvcc's. Setting an attribute loads the kernel now. Loaded at its
        // first launch, it would wait for kernels that wait for it.
        unsafe {
            let mut before = std::ptr::null_mut();
            call!(cuCtxGetCurrent(&raw mut before))?;
            call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            rollback.add(move || {
                // The context may end with the release, so it must not stay current.
                let _ = call!(cuCtxSetCurrent(before));
                let _ = call!(cuDevicePrimaryCtxRelease_v2(device));
            });
            call!(cuCtxSetCurrent(context))?;
            call!(cuModuleLoadData(&raw mut module, fatbin.as_ptr().cast()))?;
            rollback.add(move || drop(call!(cuModuleUnload(module))));
            for (kernel, name) in channels.iter_mut().zip(CHANNEL_KERNELS) {
                call!(cuModuleGetFunction(kernel, module, name.as_ptr()))?;
                call!(cuFuncSetAttribute(
                    *kernel,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    shared_bytes as c_int
                ))?;
            }
            for name in PeerOperation::kernels() {
                let mut kernel = std::ptr::null_mut();
                call!(cuModuleGetFunction(&raw mut kernel, module, name.as_ptr()))?;
                call!(cuFuncSetAttribute(
                    kernel,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    0
                ))?;
                peer_kernels.push(kernel);
            }
            for (kernel, name) in [
                (&mut clock_kernel, CLOCK_KERNEL),
                (&mut count_kernel, COUNT_KERNEL),
                (&mut append, APPEND_KERNEL),
                (&mut nothing, NOTHING_KERNEL),
            ] {
                call!(cuModuleGetFunction(kernel, module, name.as_ptr()))?;
                call!(cuFuncSetAttribute(
                    *kernel,
                    CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    0
                ))?;
            }
        }
        let mut lasting_stream = || {
            let stream = new_stream()?;
            // SAFETY: nobody uses it any more.
            rollback.add(move || drop(unsafe { call!(cuStreamDestroy_v2(stream)) }));
            Ok::<_, DeviceError>(stream)
        };
        let (stream, clock_stream) = (lasting_stream()?, lasting_stream()?);
        let ticket = zeroed(size_of::<u64>(), stream)?;
        rollback.add(move || drop(driver::free(ticket)));
        // SAFETY: entries are atomics.
        let entries = Arc::new(unsafe { PinnedSlice::<Entry>::new(RING_ENTRIES) }?);
        let queue = Arc::new(LaunchQueue::default());
        // Slots for launches.
        drop(queue.add_slots(stream)?);
        let graphs = GraphStock::open(device, &queue, nothing, stream);
        let programs = (0..PROGRAMS).map(|_| Pinned::new(PROGRAM_BYTES));
        let programs = programs.collect::<Result<Vec<_>>>()?;
        let clock = Clock::new(Sampler {
            device,
            context,
            kernel: clock_kernel,
            stream: clock_stream,
            // SAFETY: atomics and integers.
            page: unsafe { PinnedSlice::new(1) }?,
        });
        let counters = Counters::new(count_kernel)?;
        let may_overlap = driver::may_overlap(peer_kernels[0])?;
        let drain = Drain::new(device, entries.clone(), queue.clone(), clock);
        thread::Builder::new()
            .name(format!("rs-gpu-{device}"))
            .spawn(move || drain.run())
            .map_err(|error| {
                DeviceError::Resource(format!("no thread for the events of GPU {device}: {error}"))
            })?;
        rollback.0.clear();
        reclaim::watch(queue.clone());
        Ok(Self {
            device,
            channels,
            peer_kernels,
            may_overlap,
            graphs,
            ticket,
            entries,
            blocks,
            shared_bytes,
            queue,
            counters,
            append,
            context,
            stream,
            health: Health::new(device, stream),
            pinned: Mutex::new(HashMap::from([(PROGRAM_BYTES, programs)])),
        })
    }

    /// Makes its primary context the thread's current one.
    pub(super) fn make_current(&self) -> Result<()> {
        // SAFETY: retained for the life of the process.
        unsafe { call!(cuCtxSetCurrent(self.context)) }
    }

    /// Zeroed memory of at least `bytes` bytes. The GPU's context is current.
    pub(super) fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        if let Some(block) = reclaim::take_block(self.device, bytes) {
            let memory = DeviceMemory(block);
            zero(block.base, bytes, self.stream)?;
            return Ok(memory);
        }
        Ok(DeviceMemory(Block {
            base: zeroed(bytes, self.stream)?,
            bytes,
            device: self.device,
            context: self.context,
        }))
    }

    /// Pinned memory that holds a copy of `bytes`.
    pub(super) fn outside(&self, bytes: &[u8]) -> Result<Pinned> {
        let class = bytes.len().next_power_of_two().max(PROGRAM_BYTES);
        let kept = lock(&self.pinned).get_mut(&class).and_then(Vec::pop);
        let pinned = match kept {
            Some(pinned) => pinned,
            None => Pinned::new(class)?,
        };
        // SAFETY: it is large enough, and nobody else uses it.
        unsafe {
            pinned
                .base()
                .cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        };
        Ok(pinned)
    }

    /// Takes back the memory of a finished program.
    pub(super) fn keep(&self, pinned: Pinned) {
        lock(&self.pinned).entry(pinned.bytes()).or_default().push(pinned);
    }

    /// Submits a launch. The caller does so before its kernel may begin: the kernel's events may come before the launching call returns.
    pub(super) fn submit(
        &self,
        launch: Arc<Launch>,
        captured: bool,
        on_end: Option<Box<dyn FnOnce() + Send>>,
    ) -> Result<Head> {
        let (mut queue, slot) = self.queue.slot(self.stream)?;
        let head = Head {
            states: slot.states(),
            controls: slot.controls(),
            ring: self.entries.as_ptr() as u64,
            ring_ticket: self.ticket,
            slot: slot.index,
            launch: queue.number(captured),
            runs_before: if captured { slot.runs_before } else { 0 },
            op: 0,
        };
        queue.running += usize::from(!captured);
        queue.submitted.push(Submitted {
            number: head.launch,
            launch,
            slot,
            captured,
            on_end,
        });
        let asleep = queue.asleep;
        drop(queue);
        if asleep {
            self.queue.wake.notify_all();
        }
        Ok(head)
    }

    /// The kernel of a peer launch. It waits for what is before it in its stream.
    pub(super) fn peer_kernel(&self, launch: &PeerLaunch) -> Kernel {
        Kernel {
            function: self.peer_kernels[launch.kernel],
            blocks: launch.blocks,
            threads: launch.threads,
            shared_bytes: 0,
            overlaps: false,
        }
    }
}
