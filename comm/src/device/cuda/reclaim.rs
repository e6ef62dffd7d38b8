//! Garbage that cannot be dropped where it is let go of.
//!
//! Two threads own it:
//! - The *reclaim* thread drops what calls the driver when it is dropped ([`drop_later`]): neither a thread that the driver calls nor the drain
//!   thread may do that. It also keeps memory ([`keep`], [`keep_block`]). To free memory, the driver waits for everything that the GPU has to do,
//!   even a stuck kernel of another communicator or a caller's function that holds a stream. Meanwhile it may let no other thread in, not even
//!   to launch or abort what that work waits for. So memory is kept for reuse, and freed only beyond [`max_kept`] bytes, when the library has
//!   launched nothing for [`REST`]. If some ranks of a process launched while memory is freed, the driver could keep the last of them
//!   out for as long as the others' kernels wait for it. Only memory beyond [`PATIENT`] times as much is freed at the first look at idle GPUs.
//! - The *graphs* thread calls the destructors of graphs that are gone ([`when_gone`]). So the driver's callback takes no lock, and a driver that
//!   blocks the reclaim thread does not delay destructors.

use std::{
    any::Any,
    ffi::{c_int, c_void},
    sync::{
        Arc, Mutex, OnceLock,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use cudarc::driver::sys::{self, CUcontext, CUdeviceptr, CUgraph};
use ringsight_comm_base::sync::lock;

use super::{
    driver::{OutsideCapture, call},
    launch_queue::LaunchQueue,
};
use crate::{
    device::{
        DeviceError, Result,
        deferred::{Deferred, Node},
    },
    env,
};

/// Time between two looks whether the GPUs are idle.
const LOOKS: Duration = Duration::from_millis(10);
/// How long GPUs rest before memory is freed: a job that launches at all launches more often.
const REST: Duration = Duration::from_secs(1);
/// Times [`max_kept`]: beyond it memory is freed without waiting for [`REST`].
const PATIENT: usize = 4;
/// Bytes that are kept unless `RINGSIGHT_KEPT_MB` says otherwise: the GPU memory of some communicators of eight ranks.
const DEFAULT_KEPT: usize = 512 << 20;

/// What the reclaim thread is handed.
enum Garbage {
    /// Drop it.
    Now(Box<dyn Any + Send>),
    /// So many bytes: drop it when too many are kept.
    Kept(usize, Box<dyn Any + Send>),
    /// A block was added to [`BLOCKS`].
    Block,
}

static RECLAIM: OnceLock<Sender<Garbage>> = OnceLock::new();

/// The launch queues of all open GPUs.
static GPUS: Mutex<Vec<Arc<LaunchQueue>>> = Mutex::new(Vec::new());

/// Called when a graph is gone.
type Destructor = Box<dyn FnOnce() + Send>;

/// Destructors of graphs that are gone, and the thread that calls them.
struct Gone {
    destructors: Deferred<Destructor>,
    thread: OnceLock<Thread>,
}

static GONE: Gone = Gone {
    destructors: Deferred::new(),
    thread: OnceLock::new(),
};

/// Starts both threads, once.
pub(super) fn start() -> Result<()> {
    let failed = |what: &str, error| DeviceError::Resource(format!("no thread to {what}: {error}"));
    let (sender, receiver) = channel::<Garbage>();
    if RECLAIM.set(sender).is_ok() {
        thread::Builder::new()
            .name("rs-release".into())
            .spawn(move || reclaim(&receiver))
            .map_err(|error| failed("release memory", error))?;
        let thread = thread::Builder::new()
            .name("rs-graphs".into())
            .stack_size(256 << 10)
            .spawn(|| GONE.run())
            .map_err(|error| failed("let go of graphs", error))?;
        // Set only here, once.
        let _ = GONE.thread.set(thread.thread().clone());
    }
    Ok(())
}

impl Gone {
    /// The thread's loop. A thread that adds a destructor unparks this one afterwards, so nothing is missed.
    fn run(&self) {
        loop {
            // The list has the latest first.
            for destructor in self.destructors.take().into_iter().rev() {
                // A panic is printed. The other destructors still run.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(destructor));
            }
            thread::park();
        }
    }

    /// Neither waits nor allocates nor frees: an atomic exchange, and a system call if the thread is parked.
    fn add(&self, node: Box<Node<Destructor>>) {
        self.destructors.add(node);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// A block of device memory.
#[derive(Clone, Copy)]
pub(super) struct Block {
    pub(super) base: CUdeviceptr,
    pub(super) bytes: usize,
    pub(super) device: c_int,
    pub(super) context: CUcontext,
}

// SAFETY: an address and a context, which belong to no thread.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

/// Blocks of communicators that have ended.
static BLOCKS: Mutex<Vec<Block>> = Mutex::new(Vec::new());

/// Keeps a block, of which no kernel uses anything, for reuse.
pub(super) fn keep_block(block: Block) {
    lock(&BLOCKS).push(block);
    hand(Garbage::Block);
}

/// A kept block of a device, of at least `bytes` bytes, if there is one that fits. Its contents are anything.
pub(super) fn take_block(device: c_int, bytes: usize) -> Option<Block> {
    let mut blocks = lock(&BLOCKS);
    fitting(&blocks, device, bytes).map(|index| blocks.swap_remove(index))
}

/// The smallest kept block of a device that has `bytes` bytes and is at most a quarter larger.
fn fitting(blocks: &[Block], device: c_int, bytes: usize) -> Option<usize> {
    let fits = |block: &Block| block.device == device && (bytes..=bytes + bytes / 4).contains(&block.bytes);
    let fitting = blocks.iter().enumerate().filter(|(_, block)| fits(block));
    fitting
        .min_by_key(|(_, block)| block.bytes)
        .map(|(index, _)| index)
}

/// Bytes of all kept blocks.
fn block_bytes() -> usize {
    lock(&BLOCKS).iter().map(|block| block.bytes).sum()
}

/// Frees all kept blocks.
fn free_blocks() {
    // Not under the lock: communicators that begin must not wait for the driver.
    let blocks = std::mem::take(&mut *lock(&BLOCKS));
    for block in blocks {
        // SAFETY: a context that lives as long as the process; the block is freed once.
        unsafe {
            let _ = sys::cuCtxSetCurrent(block.context);
            let _ = sys::cuMemFree_v2(block.base);
        }
    }
}

/// The most bytes of ended communicators that are kept, of all GPUs and the host together.
fn max_kept() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| {
        let megabytes = env::text("RINGSIGHT_KEPT_MB").and_then(|text| text.parse::<usize>().ok());
        megabytes.map_or(DEFAULT_KEPT, |megabytes| megabytes << 20)
    })
}

/// The reclaim thread's loop.
fn reclaim(garbage: &Receiver<Garbage>) {
    // Its driver calls would end captures. A driver without capture modes has no captures.
    let _ = OutsideCapture::enter_for_good();
    let mut kept: Vec<(usize, Box<dyn Any + Send>)> = Vec::new();
    let mut rest = Rest::default();
    loop {
        let bytes = kept
            .iter()
            .fold(block_bytes(), |all, (bytes, _)| all.saturating_add(*bytes));
        let next = if bytes <= max_kept() {
            garbage.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            garbage.recv_timeout(LOOKS)
        };
        match next {
            Ok(Garbage::Now(garbage)) => drop(garbage),
            Ok(Garbage::Kept(bytes, garbage)) => kept.push((bytes, garbage)),
            Ok(Garbage::Block) => {}
            Err(RecvTimeoutError::Timeout) => {
                let rested = rest.look(idle_after(), Instant::now());
                if rested.is_some_and(|rested| may_free(bytes, max_kept(), rested)) {
                    kept.clear();
                    free_blocks();
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// The last launches of all GPUs, if no kernel of the library runs or waits on any.
fn idle_after() -> Option<Vec<[u32; 2]>> {
    let gpus = lock(&GPUS);
    // The locks are not held while memory is freed: a caller's function may hold a stream until a launch has returned.
    gpus.iter().map(|queue| queue.idle_after()).collect()
}

/// Since when no GPU has had a kernel of the library.
#[derive(Default)]
struct Rest {
    /// The last launches then, and the first look that found no later ones.
    since: Option<(Vec<[u32; 2]>, Instant)>,
}

impl Rest {
    /// What a look at `now` found: the last launches if all GPUs were idle. Returns for how long they have been.
    fn look(&mut self, idle_after: Option<Vec<[u32; 2]>>, now: Instant) -> Option<Duration> {
        let Some(launches) = idle_after else {
            self.since = None;
            return None;
        };
        match &self.since {
            Some((before, since)) if *before == launches => Some(now - *since),
            _ => {
                self.since = Some((launches, now));
                Some(Duration::ZERO)
            }
        }
    }
}

/// Whether `kept` bytes are freed on GPUs that have been idle for `rested`.
fn may_free(kept: usize, max: usize, rested: Duration) -> bool {
    kept > max && (rested >= REST || kept > max.saturating_mul(PATIENT))
}

/// Adds an open GPU.
pub(super) fn watch(queue: Arc<LaunchQueue>) {
    lock(&GPUS).push(queue);
}

/// More bytes than are ever kept: what is kept with this size is dropped as soon as the GPUs are idle.
pub(super) const AS_SOON_AS_IDLE: usize = usize::MAX >> 8;

/// Drops something on the reclaim thread.
pub(super) fn drop_later(garbage: impl Any + Send) {
    hand(Garbage::Now(Box::new(garbage)));
}

/// Keeps `bytes` bytes, which the reclaim thread drops when too many are kept.
pub(super) fn keep(bytes: usize, garbage: Box<dyn Any + Send>) {
    hand(Garbage::Kept(bytes, garbage));
}

fn hand(garbage: Garbage) {
    if let Some(reclaim) = RECLAIM.get() {
        // Without the thread nothing may be dropped here. It is left to the end of the process.
        if let Err(unsent) = reclaim.send(garbage) {
            std::mem::forget(unsent);
        }
    }
}

/// The driver's callback for user objects. The driver may hold its locks.
///
/// # Safety
/// `data` is a node of [`when_gone`], given once.
unsafe extern "C" fn hand_over(data: *mut c_void) {
    // SAFETY: the caller's.
    GONE.add(unsafe { Box::from_raw(data.cast()) });
}

/// Calls `destructor` on the graphs thread when the graph that is being captured is gone with all its instances.
///
/// # Errors
/// The driver's. The destructor may be called nevertheless.
pub(super) fn when_gone(graph: CUgraph, destructor: Destructor) -> Result<()> {
    let data: *mut Node<Destructor> = Box::into_raw(Node::new(destructor));
    let mut object = std::ptr::null_mut();
    let (no_sync, moved) = (
        sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32,
        sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32,
    );
    // SAFETY: `hand_over` takes `data` once. If the object could not be made, the box is still ours.
    unsafe {
        if let Err(error) = call!(cuUserObjectCreate(
            &raw mut object,
            data.cast(),
            Some(hand_over),
            1,
            no_sync
        )) {
            drop(Box::from_raw(data));
            return Err(error);
        }
        if let Err(error) = call!(cuGraphRetainUserObject(graph, object, 1, moved)) {
            // Our reference was not moved: releasing it calls the destructor.
            let _ = sys::cuUserObjectRelease(object, 1);
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn destructors_of_graphs_run_on_the_graphs_thread() {
        start().unwrap();
        let (tell, told) = channel();
        let shared = Arc::new(Mutex::new(()));
        // The caller holds what destructors wait for, as the driver may.
        let held = shared.lock().unwrap();
        for number in 0..3 {
            let (tell, shared) = (tell.clone(), shared.clone());
            let destructor: Destructor = Box::new(move || {
                drop(shared.lock());
                tell.send((number, thread::current().name().map(str::to_owned)))
                    .unwrap();
                assert_ne!(number, 1, "the others are called all the same");
            });
            // SAFETY: a node, given once.
            unsafe { hand_over(Box::into_raw(Node::new(destructor)).cast()) };
        }
        drop(held);
        for number in 0..3 {
            assert_eq!(told.recv().unwrap(), (number, Some("rs-graphs".into())));
        }
    }

    #[test]
    fn memory_is_freed_when_nothing_was_launched_for_a_while() {
        let (start, ms) = (Instant::now(), Duration::from_millis);
        let mut rest = Rest::default();
        let mut look = |launches: Option<u32>, at| {
            let launches = launches.map(|number| vec![[number, 0], [7, 7]]);
            rest.look(launches, start + ms(at))
        };
        assert_eq!(look(Some(1), 0), Some(ms(0)));
        assert_eq!(look(Some(1), 900), Some(ms(900)));
        // A short kernel ran between two looks.
        assert_eq!(look(Some(2), 910), Some(ms(0)));
        assert_eq!(look(None, 920), None);
        assert_eq!(look(Some(2), 930), Some(ms(0)));
        assert_eq!(look(Some(2), 1930), Some(REST));

        assert!(!may_free(100, 100, 2 * REST) && !may_free(101, 100, ms(999)));
        assert!(may_free(101, 100, REST) && !may_free(400, 100, ms(0)));
        assert!(may_free(401, 100, ms(0)) && may_free(AS_SOON_AS_IDLE, DEFAULT_KEPT, ms(0)));
        assert!(may_free(1, 0, ms(0)), "nothing is to be kept");
    }

    #[test]
    fn a_kept_block_serves_about_its_own_size_on_its_gpu() {
        let block = |bytes, device| Block {
            base: 0x7f00_0000_0000,
            bytes,
            device,
            context: std::ptr::null_mut(),
        };
        let kept = [block(1000, 0), block(1200, 1), block(1100, 1), block(4000, 1)];
        assert_eq!(fitting(&kept, 1, 1000), Some(2));
        assert_eq!(fitting(&kept, 1, 1101), Some(1));
        assert_eq!(fitting(&kept, 0, 1000), Some(0));
        assert_eq!(fitting(&kept, 0, 1001), None);
        assert_eq!(fitting(&kept, 1, 3000), None);
    }
}
