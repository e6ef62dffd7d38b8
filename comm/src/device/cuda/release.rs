//! Where things end whose end may call the driver: not on threads that the driver calls, and not on the thread that
//! releases waiting kernels.
//!
//! To free memory the driver waits for all kernels of the GPU, and whoever calls it meanwhile waits, too. Where a kernel waits
//! for a rank that is to be aborted by such a caller, nobody would go on: so memory is freed when what ran as it became waste
//! has ended.

use std::{
    any::Any,
    collections::VecDeque,
    ffi::c_void,
    sync::{
        Arc, OnceLock,
        atomic::Ordering,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use cudarc::driver::sys::{self, CUgraph};

use super::{
    driver::call,
    gpu::{IDLE, Launches},
};
use crate::{
    device::{DeviceError, Result},
    observe::now_ns,
};

/// Anything that is to be dropped.
type Waste = Box<dyn Any + Send>;

/// What the thread is told.
enum Message {
    /// To be dropped.
    Now(Waste),
    /// To be dropped when what runs at this time has ended, [`now_ns`].
    WhenQuiet(u64, Waste),
    /// A GPU that things run on.
    Gpu(Arc<Launches>),
}

/// Between two looks at what runs, while there is something to free.
const LOOK: Duration = Duration::from_millis(1);
/// How long after its launch a kernel may become known as one that runs, nanoseconds.
const UNKNOWN: u64 = 2_000_000;

static RELEASE: OnceLock<Sender<Message>> = OnceLock::new();

/// Starts the thread that [`later`] hands things to.
pub(super) fn start() -> Result<()> {
    let (sender, receiver) = channel();
    if RELEASE.set(sender).is_ok() {
        thread::Builder::new()
            .name("rs-release".into())
            .spawn(move || run(&receiver))
            .map_err(|error| DeviceError::Resource(format!("no thread to release memory: {error}")))?;
    }
    Ok(())
}

fn run(told: &Receiver<Message>) {
    let mut gpus: Vec<Arc<Launches>> = Vec::new();
    let mut waiting: VecDeque<(u64, Waste)> = VecDeque::new();
    let mut look = Instant::now();
    loop {
        let message = if waiting.is_empty() {
            told.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            told.recv_timeout(look.saturating_duration_since(Instant::now()))
        };
        match message {
            Ok(Message::Now(waste)) => drop(waste),
            Ok(Message::WhenQuiet(since_ns, waste)) => waiting.push_back((since_ns, waste)),
            Ok(Message::Gpu(launches)) => gpus.push(launches),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Also where there is always a message.
        if waiting.is_empty() || Instant::now() < look {
            continue;
        }
        look = Instant::now() + LOOK;
        // Relaxed: a time that says all of itself.
        let oldest = gpus.iter().map(|gpu| gpu.oldest_ns.load(Ordering::Relaxed)).min();
        let (oldest, now) = (oldest.unwrap_or(IDLE), now_ns());
        let ended = |since_ns: u64| since_ns + UNKNOWN < oldest.min(now);
        while waiting.front().is_some_and(|(since_ns, _)| ended(*since_ns)) {
            waiting.pop_front();
        }
    }
}

fn tell(message: Message) {
    if let Some(release) = RELEASE.get() {
        // Without its thread nothing may be dropped here; what is left is left to the end of the process.
        if let Err(unsent) = release.send(message) {
            std::mem::forget(unsent);
        }
    }
}

/// Drops it on a thread of its own.
pub(super) fn later(waste: impl Any + Send) {
    tell(Message::Now(Box::new(waste)));
}

/// The same when the kernels that run now have ended.
pub(super) fn when_quiet(waste: Waste) {
    tell(Message::WhenQuiet(now_ns(), waste));
}

/// Kernels of a GPU are to be minded.
pub(super) fn mind(launches: Arc<Launches>) {
    tell(Message::Gpu(launches));
}

/// Calls `destructor` when the graph under capture is gone with all its instances.
///
/// # Errors
/// The driver refuses; the destructor is then dropped without a call.
pub(super) fn when_gone(graph: CUgraph, destructor: Box<dyn FnOnce() + Send>) -> Result<()> {
    /// Called on a thread of the driver.
    unsafe extern "C" fn call_it(data: *mut c_void) {
        // SAFETY: the box below, once.
        let destructor = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
        // Nothing may unwind into the driver.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(*destructor));
    }
    let data = Box::into_raw(Box::new(destructor));
    let mut object = std::ptr::null_mut();
    let (no_sync, moved) = (
        sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32,
        sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32,
    );
    // SAFETY: `call_it` takes what `data` is, once. Where the object could not be made, the box is still ours.
    unsafe {
        if let Err(error) = call!(cuUserObjectCreate(
            &raw mut object,
            data.cast(),
            Some(call_it),
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
