//! Entry points that register memory with a communicator.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use ringsight_comm_base::error::{Error, Result, ResultCode};

use super::{
    arguments::{out, rank},
    communicators::in_group,
    device_api::lsa,
    entry,
};
use crate::{
    communicator::{self, Communicator, Handle, PAGE, Part, WindowPointers},
    group::{self, Job},
};

/// `NCCL_WIN_COLL_SYMMETRIC`.
const COLL_SYMMETRIC: c_int = 1;
/// `NCCL_WIN_STRICT_ORDERING`: one-sided operations on the window keep their order.
const STRICT_ORDERING: c_int = 2;

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

/// A window that the other ranks have not joined in. Dropped as such, also with a group that fails, its registration is taken
/// back: whoever uses the handle all the same is told that there is no such window.
struct Joining {
    comm: Arc<Communicator>,
    registration: Option<usize>,
}

impl Joining {
    /// All ranks have joined.
    fn keep(mut self) {
        self.registration = None;
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        if let Some(registration) = self.registration {
            // It is registered for this window until here.
            let _ = self.comm.deregister("win", registration);
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
    if flags & !(COLL_SYMMETRIC | STRICT_ORDERING) != 0 {
        return Err(Error::argument(format!(
            "winFlags ({flags}) is no sum of NCCL_WIN_COLL_SYMMETRIC (1) and NCCL_WIN_STRICT_ORDERING (2)"
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
    let part = comm.register(address, size).map(|registration| Part {
        handle: Communicator::new_window_handle(),
        registration,
        address,
        bytes: size,
        is_symmetric: flags & COLL_SYMMETRIC != 0,
    });
    *place = part.as_ref().map_or(0, |part| part.handle);
    let registration = part.as_ref().ok().map(|part| part.registration);
    let joining = Joining { comm, registration };
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

/// The window of a handle, of whichever communicator.
fn window(handle: usize) -> Result<(Arc<Communicator>, WindowPointers)> {
    if handle == 0 {
        return Err(Error::argument("window is NULL"));
    }
    communicator::all()
        .into_iter()
        .find_map(|comm| {
            let pointers = comm.window_pointers(handle)?;
            Some((comm, pointers))
        })
        .ok_or_else(|| {
            Error::argument(format!(
                "window ({handle:#x}) is no window of a communicator, or no longer"
            ))
        })
}

/// The address of `rank`'s part for this rank, `offset` bytes into it.
fn pointer_to(pointers: &WindowPointers, rank: c_int, offset: usize) -> Result<*mut c_void> {
    if offset >= pointers.bytes {
        return Err(Error::argument(format!(
            "offset ({offset}) is not within the window's {} bytes",
            pointers.bytes
        )));
    }
    let addresses = pointers.addresses.as_ref().map_err(|why| {
        Error::usage(format!(
            "the ranks do not reach each other's part of the window: {why}"
        ))
    })?;
    let address = usize::try_from(rank).ok().and_then(|rank| addresses.get(rank));
    let address =
        address.ok_or_else(|| Error::argument(format!("rank ({rank}) has no part of the window")))?;
    Ok((*address as usize + offset) as *mut c_void)
}

entry! {
    /// The address that this rank registered as its part of a window.
    ncclWinGetUserPtr, pncclWinGetUserPtr(comm: Handle, win: usize, outUserPtr: *mut *mut c_void) {
        let comm = made(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("outUserPtr", outUserPtr) }?;
        *place = std::ptr::null_mut();
        if win == 0 {
            return Err(Error::argument("win is NULL"));
        }
        if let Some(pointers) = comm.window_pointers(win) {
            *place = pointers.own as *mut c_void;
            return Ok(());
        }
        let (owner, _) = window(win)?;
        Err(Error::argument(format!(
            "win ({win:#x}) is a window of communicator {:016x}, and not of comm ({:016x})",
            owner.id, comm.id
        )))
    }
}

entry! {
    /// The address of a part for this rank, `offset` bytes into it. `lsaRank` counts as [`ncclTeamLsa`](super::ncclTeamLsa).
    ncclGetLsaDevicePointer, pncclGetLsaDevicePointer(
        win: usize, offset: usize, lsaRank: c_int, outPtr: *mut *mut c_void,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("outPtr", outPtr) }?;
        *place = std::ptr::null_mut();
        let (comm, pointers) = window(win)?;
        let team = lsa(&comm);
        if !(0..team.ranks).contains(&lsaRank) {
            return Err(Error::argument(format!("lsaRank ({lsaRank}) is not between 0 and {}", team.ranks - 1)));
        }
        *place = pointer_to(&pointers, comm.rank as c_int - team.rank + lsaRank, offset)?;
        Ok(())
    }
}

entry! {
    /// As [`ncclGetLsaDevicePointer`], of a rank of the communicator. NULL for a rank that is not in this rank's
    /// [`ncclTeamLsa`](super::ncclTeamLsa), as in NCCL.
    ncclGetPeerDevicePointer, pncclGetPeerDevicePointer(
        win: usize, offset: usize, peer: c_int, outPtr: *mut *mut c_void,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("outPtr", outPtr) }?;
        *place = std::ptr::null_mut();
        let (comm, pointers) = window(win)?;
        let peer = rank("peer", peer, &comm)? as c_int;
        let team = lsa(&comm);
        let first = comm.rank as c_int - team.rank;
        if (first..first + team.ranks).contains(&peer) {
            *place = pointer_to(&pointers, peer, offset)?;
        }
        Ok(())
    }
}

/// The answer for multicast addresses: there are none, and NCCL says NULL where the hardware has none.
///
/// # Safety
/// `place` is null or valid for writes.
unsafe fn no_multicast(win: usize, place: *mut *mut c_void) -> Result<()> {
    // SAFETY: the caller's promise.
    *unsafe { out("outPtr", place) }? = std::ptr::null_mut();
    window(win).map(drop)
}

entry! {
    /// Gives NULL: nothing goes by multicast here.
    ncclGetLsaMultimemDevicePointer, pncclGetLsaMultimemDevicePointer(
        win: usize, _offset: usize, outPtr: *mut *mut c_void,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        unsafe { no_multicast(win, outPtr) }
    }
}

entry! {
    /// Gives NULL: nothing goes by multicast here. `multimem` is an `ncclMultimemHandle_t`, which is one pointer.
    ncclGetMultimemDevicePointer, pncclGetMultimemDevicePointer(
        win: usize, _offset: usize, _multimem: *const c_void, outPtr: *mut *mut c_void,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        unsafe { no_multicast(win, outPtr) }
    }
}
