//! Entry points that register memory with a communicator.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use ringsight_comm_base::error::{Error, Result, ResultCode};

use super::{arguments::out, communicators::in_group, entry};
use crate::{
    communicator::{self, Communicator, Handle, PAGE, Part},
    group::{self, Job},
};

/// `NCCL_WIN_COLL_SYMMETRIC`, the only flag.
const COLL_SYMMETRIC: c_int = 1;

/// The communicator, also while a group works on it: registration does not need it at rest.
fn made(comm: Handle) -> Result<Arc<Communicator>> {
    match communicator::find(comm)? {
        (_, Some(comm)) => Ok(comm),
        // Says why.
        _ => communicator::lookup(comm),
    }
}

/// Whether `NCCL_LOCAL_REGISTER` leaves registration on.
fn enabled() -> bool {
    ringsight_comm_base::env::switch("NCCL_LOCAL_REGISTER", true)
}

entry! {
    /// Registers a buffer for operations of a communicator; `handle` is for [`ncclCommDeregister`].
    ncclCommRegister, pncclCommRegister(comm: Handle, buff: *mut c_void, size: usize, handle: *mut usize) {
        let comm = made(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("handle", handle) }?;
        *place = 0;
        if enabled() {
            *place = comm.register(buff as usize, size)?;
        }
        Ok(())
    }
}

entry! {
    /// Gives a registration back; NULL is fine.
    ncclCommDeregister, pncclCommDeregister(comm: Handle, handle: usize) {
        let comm = made(comm)?;
        if handle == 0 {
            return Ok(());
        }
        comm.deregister("handle", handle)
    }
}

/// A window that the other ranks have not joined in. Dropped as such, also with a group that fails, it is taken back: whoever
/// uses the handle all the same is told that there is no such window.
struct Joining {
    comm: Arc<Communicator>,
    window: Option<usize>,
}

impl Joining {
    /// All ranks have joined.
    fn keep(mut self) {
        self.window = None;
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        if let Some(window) = self.window {
            // Fails if the caller has been quicker.
            let _ = self.comm.deregister("win", window);
        }
    }
}

/// Registers this rank's part of a window and waits for the others, at the end of the group if there is one.
///
/// # Safety
/// `win` is null or valid for writes.
unsafe fn register_window(
    comm: Handle,
    pointer: *const c_void,
    size: usize,
    win: *mut usize,
    flags: c_int,
) -> Result<()> {
    let comm = communicator::lookup(comm)?;
    // SAFETY: the caller's promise.
    let place = unsafe { out("win", win) }?;
    *place = 0;
    if flags & !COLL_SYMMETRIC != 0 {
        return Err(Error::argument(format!(
            "winFlags ({flags}) is neither NCCL_WIN_DEFAULT (0) nor NCCL_WIN_COLL_SYMMETRIC (1)"
        )));
    }
    // As in NCCL, there is no window of nothing.
    if pointer.is_null() || size == 0 || !enabled() {
        return Ok(());
    }
    let address = pointer as usize;
    if !address.is_multiple_of(PAGE) {
        return Err(Error::argument(format!(
            "buff ({address:#x}) is not aligned to {PAGE} bytes, as windows must be: memory of ncclMemAlloc is"
        )));
    }
    comm.check_usable()?;
    let part = comm.register(address, size).map(|handle| Part {
        handle,
        address,
        bytes: size,
        is_symmetric: flags & COLL_SYMMETRIC != 0,
    });
    let window = part.as_ref().ok().map(|part| part.handle);
    *place = window.unwrap_or(0);
    let joining = Joining { comm, window };
    group::submit(Job {
        life: joining.comm.life().clone(),
        child: None,
        release: None,
        made: None,
        work: Box::new(move || {
            // Numbered here, since a group that fails does not come to it, and the other ranks do not count what it asked for.
            let told = part.as_ref().copied().map_err(|error| &*error.text);
            let joined = joining.comm.join_window(told);
            // Why it was refused, whatever came of the others.
            part.and(joined)?;
            joining.keep();
            Ok(())
        }),
    })
    .inspect_err(|error| {
        if error.code != ResultCode::InProgress {
            *place = 0;
        }
    })
}

entry! {
    /// Registers a buffer as this rank's part of a window; all ranks of the communicator call it.
    ncclCommWindowRegister, pncclCommWindowRegister(
        comm: Handle, buff: *mut c_void, size: usize, win: *mut usize, winFlags: c_int,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        in_group(unsafe { register_window(comm, buff, size, win, winFlags) })
    }
}

entry! {
    /// Gives a window back; NULL is fine.
    ncclCommWindowDeregister, pncclCommWindowDeregister(comm: Handle, win: usize) {
        if win == 0 {
            return Ok(());
        }
        made(comm)?.deregister_window(win)
    }
}
