//! Where things end whose end may call the driver: not on threads that the driver calls, and not on the thread that
//! releases waiting kernels.

use std::{
    any::Any,
    ffi::c_void,
    sync::{
        OnceLock,
        mpsc::{Sender, channel},
    },
    thread,
};

use cudarc::driver::sys::{self, CUgraph};

use super::driver::call;
use crate::device::{DeviceError, Result};

/// Anything that is to be dropped.
type Waste = Box<dyn Any + Send>;

static RELEASE: OnceLock<Sender<Waste>> = OnceLock::new();

/// Starts the thread that [`later`] hands things to.
pub(super) fn start() -> Result<()> {
    let (sender, receiver) = channel::<Waste>();
    if RELEASE.set(sender).is_ok() {
        thread::Builder::new()
            .name("rs-release".into())
            .spawn(move || receiver.into_iter().for_each(drop))
            .map_err(|error| DeviceError::Resource(format!("no thread to release memory: {error}")))?;
    }
    Ok(())
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
