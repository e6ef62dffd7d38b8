//! One GPU: its kernel, the ring of its events, and what its launches share with the host.

use std::{
    collections::HashMap,
    ffi::c_int,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard, OnceLock, atomic::Ordering},
    thread,
};

use cudarc::driver::sys::{
    CUcontext, CUdevice_attribute, CUdeviceptr, CUfunction, CUfunction_attribute, CUstream,
};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::{
    Launch,
    cuda::{
        self, APPEND_KERNEL, CHANNEL_KERNELS, CLOCK_KERNEL, COUNT_KERNEL, Head, LaunchControl, LaunchState,
        NOTHING_KERNEL, PeerOperation, RING_ENTRIES, ring::Entry,
    },
};

use super::{
    clock::{Clock, Sampler},
    count::Counters,
    drain::{Drain, Entered},
    driver::{OutsideCapture, Pinned, attribute, call, lacking, may_overlap, new_stream},
    health::Health,
    kernel_graphs::Stock,
    launch,
    launches::{Exchange, Free, Launches},
    memory, release,
};
use crate::device::{DeviceError, Result};

/// Pinned memory for one program that does not travel with the arguments: that of all channels fits.
const PROGRAM_BYTES: usize = 16 << 10;
/// Such programs for which memory is had at once: with kernels on a GPU that wait for others, more might not be had without
/// waiting for them.
const PROGRAMS: usize = 64;
/// Launches for which memory is had at once: as many as the driver lets wait. What lies in several such pieces differs in more of its arguments.
const CHUNK: usize = 1024;

/// One GPU, opened.
pub(super) struct Gpu {
    pub(super) device: c_int,
    /// Run channel programs: those that reduce nothing, and any.
    pub(super) channels: [CUfunction; CHANNEL_KERNELS.len()],
    /// Do an operation among peers: by number.
    pub(super) peer_kernels: Vec<CUfunction>,
    /// As [`driver::may_overlap`](super::driver::may_overlap).
    pub(super) may_overlap: bool,
    /// What eager kernels are launched by, if that can be had.
    pub(super) graphs: Option<Arc<Stock>>,
    /// The ring's ticket, in device memory.
    ticket: CUdeviceptr,
    entries: Arc<Memory<Entry>>,
    /// Blocks of kernels among peers that run side by side, with some of the GPU left for others.
    pub(super) blocks: u32,
    /// Most dynamic shared memory of a block.
    pub(super) shared_bytes: usize,
    pub(super) launches: Arc<Launches>,
    pub(super) counters: Counters,
    /// The kernel that appends to a list.
    pub(super) append: CUfunction,
    /// The primary context: as the runtime uses it.
    pub(super) context: CUcontext,
    /// For work of this module's own: waits for no other stream, and none waits for it.
    pub(super) stream: CUstream,
    pub(super) health: Health,
    /// Programs that are too long for the arguments are put here; by size class.
    pinned: Mutex<HashMap<usize, Vec<Pinned>>>,
}

// SAFETY: the handles may be used by any thread, the rest is locked.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// Pinned memory as a slice of values for which zeros are one.
pub(super) struct Memory<T> {
    pinned: Pinned,
    _of: std::marker::PhantomData<T>,
}

impl<T> Memory<T> {
    /// Zeroed.
    ///
    /// # Safety
    /// Zeros must be a `T`, and a `T` needs no drop.
    pub(super) unsafe fn new(count: usize) -> Result<Self> {
        Ok(Self {
            pinned: Pinned::new(count * size_of::<T>())?,
            _of: std::marker::PhantomData,
        })
    }
}

impl<T> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is page-aligned, of this size and was zeroed, which is a value; only atomics are written.
        unsafe { std::slice::from_raw_parts(self.pinned.base().cast(), self.pinned.bytes() / size_of::<T>()) }
    }
}

/// What a launch and the host share; belongs to one launch at a time.
pub(super) struct Slot {
    chunk: Arc<Chunk>,
    /// In the chunk's arrays.
    index: u32,
    /// Runs of all launches that have used it, before the present one.
    pub(super) runs_before: u32,
}

struct Chunk {
    /// Among the GPU's: see [`Free`].
    number: usize,
    controls: Memory<LaunchControl>,
    states: CUdeviceptr,
}

impl Drop for Chunk {
    fn drop(&mut self) {
        // Where the GPU cannot be opened: else slots stay.
        let _ = memory::free(self.states as *mut u8);
    }
}

impl Slot {
    /// No launch has it.
    pub(super) fn give_back(self, free: &mut Free<Self>) {
        free.give(self.chunk.number, self);
    }

    pub(super) fn control(&self) -> &LaunchControl {
        &self.chunk.controls[self.index as usize]
    }

    /// Ready for the next launch, once the present one is over.
    pub(super) fn renew(&mut self) {
        let control = self.control();
        // Relaxed: the next launch orders these before its kernel.
        control.abort.store(0, Ordering::Relaxed);
        control.aborted.store(0, Ordering::Relaxed);
        // So that what the next kernel says at once is news, whenever it is looked at first.
        control.waits.store(0, Ordering::Relaxed);
        self.runs_before = control.runs.load(Ordering::Relaxed);
    }
}

/// A device number's GPU, opened at its first use.
pub(super) struct Slotted {
    gpu: OnceLock<Arc<Gpu>>,
    /// Why it cannot be opened, now or later.
    failed: Mutex<Option<DeviceError>>,
}

impl Slotted {
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
            // There may be memory another time.
            if !matches!(error, DeviceError::Resource(_)) {
                *failed = Some(error.clone());
            }
        })?;
        Ok(self.gpu.get_or_init(|| Arc::new(gpu)))
    }

    /// If it has been opened.
    pub(super) fn opened(&self) -> Option<&Arc<Gpu>> {
        self.gpu.get()
    }
}

/// What is given back if a GPU cannot be opened after all, the latest first.
#[derive(Default)]
struct Undo(Vec<Box<dyn FnOnce()>>);

impl Undo {
    fn add(&mut self, undo: impl FnOnce() + 'static) {
        self.0.push(Box::new(undo));
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        while let Some(undo) = self.0.pop() {
            undo();
        }
    }
}

impl Gpu {
    /// Opens it; its primary context becomes current.
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
        // A multiprocessor has room for two; the other half is for kernels of other communicators.
        let blocks = u32::try_from(processors).unwrap_or(0);
        // Some of it is the kernel's own.
        let shared_bytes = usize::try_from(shared).unwrap_or(0).saturating_sub(4096);
        let fatbin = match cuda::fatbin() {
            Ok(fatbin) => fatbin,
            Err(missing) => return unavailable(&format!("this build has no kernels: {missing}")),
        };
        let _outside = OutsideCapture::enter()?;
        let mut undo = Undo::default();
        let (mut context, mut module) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut channels = [std::ptr::null_mut(); CHANNEL_KERNELS.len()];
        let mut peer_kernels = Vec::new();
        let [mut clock_kernel, mut count_kernel, mut append, mut nothing] = [std::ptr::null_mut(); 4];
        // SAFETY: handles are written to the locals; the image is a fat binary of nvcc's. Setting an attribute loads the
        // kernel now: loaded at its first launch, it would wait for kernels that wait for it.
        unsafe {
            let mut before = std::ptr::null_mut();
            call!(cuCtxGetCurrent(&raw mut before))?;
            call!(cuDevicePrimaryCtxRetain(&raw mut context, device))?;
            undo.add(move || {
                // Not what may end with it.
                let _ = call!(cuCtxSetCurrent(before));
                let _ = call!(cuDevicePrimaryCtxRelease_v2(device));
            });
            call!(cuCtxSetCurrent(context))?;
            call!(cuModuleLoadData(&raw mut module, fatbin.as_ptr().cast()))?;
            undo.add(move || drop(call!(cuModuleUnload(module))));
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
            // SAFETY: nobody has it any more.
            undo.add(move || drop(unsafe { call!(cuStreamDestroy_v2(stream)) }));
            Ok::<_, DeviceError>(stream)
        };
        let (stream, clock_stream) = (lasting_stream()?, lasting_stream()?);
        let ticket = zeroed(size_of::<u64>(), stream)?;
        undo.add(move || drop(memory::free(ticket as *mut u8)));
        // SAFETY: entries are atomics.
        let entries = Arc::new(unsafe { Memory::<Entry>::new(RING_ENTRIES) }?);
        let launches = Arc::new(Launches::default());
        // Now: with kernels on the GPU that wait for others, memory might not be had without waiting for them.
        drop(more_slots(&launches, stream)?);
        let graphs = launch::graphs(device, &launches, nothing, stream);
        let programs = (0..PROGRAMS).map(|_| Pinned::new(PROGRAM_BYTES));
        let programs = programs.collect::<Result<Vec<_>>>()?;
        let clock = Clock::new(Sampler {
            device,
            context,
            kernel: clock_kernel,
            stream: clock_stream,
            // SAFETY: atomics and integers.
            page: unsafe { Memory::new(1) }?,
        });
        let counters = Counters::new(count_kernel)?;
        let may_overlap = may_overlap(peer_kernels[0])?;
        let drain = Drain::new(device, entries.clone(), launches.clone(), clock);
        thread::Builder::new()
            .name(format!("rs-gpu-{device}"))
            .spawn(move || drain.run())
            .map_err(|error| {
                DeviceError::Resource(format!("no thread for the events of GPU {device}: {error}"))
            })?;
        undo.0.clear();
        release::enter(launches.clone());
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
            launches,
            counters,
            append,
            context,
            stream,
            health: Health::new(device, stream),
            pinned: Mutex::new(HashMap::from([(PROGRAM_BYTES, programs)])),
        })
    }

    /// Its primary context becomes the thread's current one.
    pub(super) fn make_current(&self) -> Result<()> {
        // SAFETY: retained for the life of the process.
        unsafe { call!(cuCtxSetCurrent(self.context)) }
    }

    /// What launches are entered into, with a free slot, and that slot.
    fn slot(&self) -> Result<(MutexGuard<'_, Exchange>, Slot)> {
        let mut exchange = lock(&self.launches.exchange);
        let mut slot = exchange.free.take();
        if slot.is_none() {
            drop(exchange);
            exchange = more_slots(&self.launches, self.stream)?;
            slot = exchange.free.take();
        }
        slot.map(|slot| (exchange, slot))
            .ok_or_else(|| DeviceError::Resource("no memory for launches".into()))
    }

    /// Pinned memory that holds `bytes`.
    pub(super) fn outside(&self, bytes: &[u8]) -> Result<Pinned> {
        let class = bytes.len().next_power_of_two().max(PROGRAM_BYTES);
        let kept = lock(&self.pinned).get_mut(&class).and_then(Vec::pop);
        let pinned = match kept {
            Some(pinned) => pinned,
            None => Pinned::new(class)?,
        };
        // SAFETY: it is large enough, and nobody else's.
        unsafe {
            pinned
                .base()
                .cast::<u8>()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        };
        Ok(pinned)
    }

    /// Keeps the memory of a program that is over.
    pub(super) fn keep(&self, pinned: Pinned) {
        lock(&self.pinned).entry(pinned.bytes()).or_default().push(pinned);
    }

    /// Enters a launch before it begins: its events may come before the call that launches it returns.
    pub(super) fn enter(
        &self,
        launch: Arc<Launch>,
        captured: bool,
        on_end: Option<Box<dyn FnOnce() + Send>>,
    ) -> Result<Head> {
        let (mut exchange, slot) = self.slot()?;
        let head = Head {
            states: slot.chunk.states,
            controls: slot.chunk.controls.as_ptr() as u64,
            ring: self.entries.as_ptr() as u64,
            ring_ticket: self.ticket,
            slot: slot.index,
            launch: exchange.number(captured),
            runs_before: if captured { slot.runs_before } else { 0 },
            op: 0,
        };
        exchange.running += usize::from(!captured);
        exchange.entered.push(Entered {
            number: head.launch,
            launch,
            slot,
            captured,
            on_end,
        });
        let asleep = exchange.asleep;
        drop(exchange);
        if asleep {
            self.launches.wake.notify_all();
        }
        Ok(head)
    }
}

/// Zeroed device memory of the current context; its own stream makes it so.
pub(super) fn zeroed(bytes: usize, stream: CUstream) -> Result<CUdeviceptr> {
    let _outside = OutsideCapture::enter()?;
    let mut memory = 0;
    // SAFETY: written to the local.
    unsafe { call!(cuMemAlloc_v2(&raw mut memory, bytes)) }
        .map_err(|error| lacking(format_args!("{bytes} bytes of"), error))?;
    zero(memory, bytes, stream)?;
    Ok(memory)
}

/// Zeroes memory that nobody uses, of at least so many bytes.
pub(super) fn zero(memory: CUdeviceptr, bytes: usize, stream: CUstream) -> Result<()> {
    let _outside = OutsideCapture::enter()?;
    // SAFETY: the caller's memory. The default stream would wait for kernels of the caller's streams.
    unsafe {
        call!(cuMemsetD8Async(memory, 0, bytes, stream))?;
        call!(cuStreamSynchronize(stream))
    }
}

/// What [`CHUNK`] more launches need, in the current context; with what launches are entered into.
fn more_slots(launches: &Launches, stream: CUstream) -> Result<MutexGuard<'_, Exchange>> {
    // SAFETY: atomics and integers.
    let controls = unsafe { Memory::new(CHUNK) }?;
    let states = zeroed(CHUNK * size_of::<LaunchState>(), stream)?;
    let mut exchange = lock(&launches.exchange);
    exchange.free.add(|number| {
        let chunk = Arc::new(Chunk {
            number,
            controls,
            states,
        });
        let slot = |index| Slot {
            chunk: chunk.clone(),
            index,
            runs_before: 0,
        };
        (0..CHUNK as u32).map(slot).collect()
    });
    Ok(exchange)
}
