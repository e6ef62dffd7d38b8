//! Entry points that simulate: how long a group would take, and a kernel that never ends.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::mem::offset_of;

use ringsight_comm_base::error::{Error, Result, ResultCode};

use super::{
    call, entry,
    types::{NcclSimInfo, SIM_INFO_MAGIC},
};
use crate::{
    communicator::{self, Handle},
    group,
};

/// The size of the caller's struct, once it is known to be one.
///
/// # Safety
/// `info` is null or points to a struct that begins with its size and has as many bytes.
unsafe fn size_of_info(info: *const NcclSimInfo) -> Result<usize> {
    if info.is_null() {
        return Err(Error::argument("simInfo is NULL"));
    }
    // SAFETY: every version begins with its size.
    let size = unsafe { (&raw const (*info).size).read_unaligned() };
    if size < offset_of!(NcclSimInfo, version) {
        return Err(Error::argument(format!(
            "simInfo.size ({size}) is not the size of any version's ncclSimInfo_t"
        )));
    }
    // SAFETY: within the caller's struct.
    let magic = unsafe { (&raw const (*info).magic).read_unaligned() };
    if magic != SIM_INFO_MAGIC {
        return Err(Error::argument(format!(
            "simInfo.magic is {magic:#x}: initialise the struct with NCCL_SIM_INFO_INITIALIZER"
        )));
    }
    Ok(size)
}

entry! {
    /// Closes a group; the outermost one sets `simInfo->estimatedTime` to how long its operations would take and forgets
    /// them. Communicators that the group makes are made. Unlike NCCL, which then launches, `simInfo` must not be NULL.
    ncclGroupSimulateEnd, pncclGroupSimulateEnd(simInfo: *mut NcclSimInfo) {
        // SAFETY: the caller's promise.
        let Some((size, time, made)) = group::simulate_end(|| unsafe { size_of_info(simInfo) })? else {
            return Ok(());
        };
        // A caller's struct of another version may end before the field.
        if size >= offset_of!(NcclSimInfo, estimated_time) + size_of::<f32>() {
            // SAFETY: within the caller's struct.
            unsafe { (&raw mut (*simInfo).estimated_time).write_unaligned(time.as_secs_f32() * 1e6) };
        }
        made
    }
}

/// Launches a kernel that never ends, as an operation of `comm` on this rank alone on a stream of its own, and returns at once: it shows what the
/// watchdog reports and does about a stuck kernel. The communicator's later operations wait behind it; it ends when
/// the communicator is aborted or revoked. The prototype is in `ringsight.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSimulateKernelTimeout(comm: Handle) -> ResultCode {
    call("ncclSimulateKernelTimeout", || {
        group::launch_stuck(&communicator::lookup(comm)?)
    })
}
