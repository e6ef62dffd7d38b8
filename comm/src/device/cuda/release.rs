//! Where things end that may not end where they are let go of.
//!
//! What calls the driver when it is dropped ends on one thread ([`later`]): not on threads that the driver calls, and not on
//! the thread that releases waiting kernels. What is to be done when a graph is gone is done on another ([`when_gone`]), so
//! that the driver's callback takes no lock, and a driver that blocks the first thread does not keep it.

use std::{
    any::Any,
    ffi::c_void,
    sync::{
        OnceLock,
        mpsc::{Sender, channel},
    },
    thread::{self, Thread},
};

use cudarc::driver::sys::{self, CUgraph};

use super::driver::call;
use crate::device::{
    DeviceError, Result,
    deferred::{Deferred, Node},
};

/// Anything that is to be dropped.
type Waste = Box<dyn Any + Send>;

static RELEASE: OnceLock<Sender<Waste>> = OnceLock::new();

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
            .spawn(move || receiver.into_iter().for_each(drop))
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

/// Drops it on a thread of its own.
pub(super) fn later(waste: impl Any + Send) {
    if let Some(release) = RELEASE.get() {
        // Without its thread nothing may be dropped here; what is left is left to the end of the process.
        if let Err(unsent) = release.send(Box::new(waste)) {
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
