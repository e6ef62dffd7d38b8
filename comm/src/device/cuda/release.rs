//! Where things end that may not end where they are let go of.
//!
//! What calls the driver when it is dropped ends on one thread ([`later`]): not on threads that the driver calls, and not on
//! the thread that releases waiting kernels. Memory is kept ([`keep`]): to take it back the driver waits for all that the GPU has to
//! do, also for a stuck kernel of another communicator or a function of the caller's that holds a stream, and meanwhile may let no
//! other thread in, not even to launch or abort what that waits for. Only what is more than [`most_kept`] is given back, by the
//! same thread, when no kernel of the library runs. What is to be done when a graph is gone is done on another thread
//! ([`when_gone`]), so that the driver's callback takes no lock, and a driver that blocks the first thread does not keep it.

use std::{
    any::Any,
    ffi::c_void,
    sync::{
        Arc, Mutex, OnceLock,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, Thread},
    time::Duration,
};

use cudarc::driver::sys::{self, CUgraph};

use super::{
    driver::{OutsideCapture, call},
    launches::Launches,
    share,
};
use crate::{
    device::{
        DeviceError, Result,
        deferred::{Deferred, Node},
    },
    env,
};
use ringsight_comm_base::sync::lock;

/// How often it is looked whether kernels run that something waits for.
const LOOKS: Duration = Duration::from_millis(10);
/// Bytes that are kept unless `RINGSIGHT_KEPT_MB` says so: what some communicators of eight ranks have of a GPU.
const MOST_KEPT: usize = 512 << 20;

/// What the thread is handed.
enum Waste {
    /// To be dropped.
    Now(Box<dyn Any + Send>),
    /// So many bytes, to be dropped when they are too many.
    Kept(usize, Box<dyn Any + Send>),
    /// The same of memory that [`share`] keeps for others.
    Shared,
}

static RELEASE: OnceLock<Sender<Waste>> = OnceLock::new();

/// What is launched on each GPU that has been opened.
static GPUS: Mutex<Vec<Arc<Launches>>> = Mutex::new(Vec::new());

/// What is to be done when a graph is gone.
type Destructor = Box<dyn FnOnce() + Send>;

/// Those of graphs that are gone, and the thread that calls them.
struct Gone {
    destructors: Deferred<Destructor>,
    thread: OnceLock<Thread>,
}

static GONE: Gone = Gone {
    destructors: Deferred::new(),
    thread: OnceLock::new(),
};

/// Starts both threads.
pub(super) fn start() -> Result<()> {
    let failed = |what: &str, error| DeviceError::Resource(format!("no thread to {what}: {error}"));
    let (sender, receiver) = channel::<Waste>();
    if RELEASE.set(sender).is_ok() {
        thread::Builder::new()
            .name("rs-release".into())
            .spawn(move || release(&receiver))
            .map_err(|error| failed("release memory", error))?;
        let thread = thread::Builder::new()
            .name("rs-graphs".into())
            .stack_size(256 << 10)
            .spawn(|| GONE.run())
            .map_err(|error| failed("let go of graphs", error))?;
        // Set here alone, once.
        let _ = GONE.thread.set(thread.thread().clone());
    }
    Ok(())
}

impl Gone {
    /// Whoever adds unparks afterwards: what is added while this looks is found at the next look.
    fn run(&self) {
        loop {
            // The latest comes first.
            for destructor in self.destructors.take().into_iter().rev() {
                // A panic is printed; the others' turn comes all the same.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(destructor));
            }
            thread::park();
        }
    }

    /// Neither waits nor allocates nor frees: an exchange, and a system call where the thread is parked.
    fn add(&self, node: Box<Node<Destructor>>) {
        self.destructors.add(node);
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// How many bytes of ended communicators are kept at most, of all GPUs and the host together.
fn most_kept() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        let megabytes = env::text("RINGSIGHT_KEPT_MB").and_then(|text| text.parse::<usize>().ok());
        megabytes.map_or(MOST_KEPT, |megabytes| megabytes << 20)
    })
}

/// Takes what it is handed until the process ends.
fn release(waste: &Receiver<Waste>) {
    // What it does would end captures that no thread may wait beside. Without a driver that knows of modes nothing is captured.
    let _ = OutsideCapture::enter_for_good();
    let mut kept: Vec<(usize, Box<dyn Any + Send>)> = Vec::new();
    loop {
        let bytes = kept
            .iter()
            .fold(share::kept_bytes(), |all, (bytes, _)| all.saturating_add(*bytes));
        let next = if bytes <= most_kept() {
            waste.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            waste.recv_timeout(LOOKS)
        };
        match next {
            Ok(Waste::Now(waste)) => drop(waste),
            Ok(Waste::Kept(bytes, waste)) => kept.push((bytes, waste)),
            Ok(Waste::Shared) => {}
            Err(RecvTimeoutError::Timeout) => {
                if is_idle() {
                    kept.clear();
                    share::free_kept();
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Whether no kernel of the library runs on any GPU, or waits to; of replays, which are launched without the library, it knows
/// those that have begun.
fn is_idle() -> bool {
    let gpus = lock(&GPUS);
    // None is held while memory is given back: a function of the caller's may hold a stream until a launch has returned.
    gpus.iter().all(|launches| lock(&launches.exchange).running == 0)
}

/// A GPU is there, on which nothing has been launched.
pub(super) fn enter(launches: Arc<Launches>) {
    lock(&GPUS).push(launches);
}

/// Drops it on a thread of its own.
pub(super) fn later(waste: impl Any + Send) {
    hand(Waste::Now(Box::new(waste)));
}

/// Keeps so many bytes, which are dropped on a thread of their own when too many are kept.
pub(super) fn keep(bytes: usize, waste: Box<dyn Any + Send>) {
    hand(Waste::Kept(bytes, waste));
}

/// [`share`] keeps more.
pub(super) fn kept() {
    hand(Waste::Shared);
}

fn hand(waste: Waste) {
    if let Some(release) = RELEASE.get() {
        // Without its thread nothing may be dropped here; what is left is left to the end of the process.
        if let Err(unsent) = release.send(waste) {
            std::mem::forget(unsent);
        }
    }
}

/// The callback of user objects, on a thread of the driver, in which it may hold its locks.
///
/// # Safety
/// `data` is a node of [`when_gone`], given once.
unsafe extern "C" fn hand_over(data: *mut c_void) {
    // SAFETY: the caller's.
    GONE.add(unsafe { Box::from_raw(data.cast()) });
}

/// Calls `destructor`, on a thread for such, when the graph under capture is gone with all its instances.
///
/// # Errors
/// The driver refuses. The destructor may be called all the same.
pub(super) fn when_gone(graph: CUgraph, destructor: Destructor) -> Result<()> {
    let data: *mut Node<Destructor> = Box::into_raw(Node::new(destructor));
    let mut object = std::ptr::null_mut();
    let (no_sync, moved) = (
        sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32,
        sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32,
    );
    // SAFETY: `hand_over` takes what `data` is, once. Where the object could not be made, the box is still ours.
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
            // Our reference was not moved: giving it up calls the destructor.
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
    fn graphs_that_are_gone_are_let_go_of_by_a_thread_of_our_own() {
        start().unwrap();
        let (tell, told) = channel();
        let shared = Arc::new(Mutex::new(()));
        // Whoever calls back holds what destructors wait for, as the driver may.
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
}
