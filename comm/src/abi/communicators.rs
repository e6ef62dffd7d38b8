//! Entry points about the library, communicators, memory and groups.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::{
    ffi::{c_int, c_void},
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    release,
};

use super::{
    arguments::out,
    config, entry, second_library,
    types::{NcclConfig, UniqueIdBytes},
};
use crate::{
    bootstrap,
    communicator::{self, Config, Handle, InitJob, Lifecycle},
    device::device,
    group::{self, Job, Made},
    observe,
};

/// Notes a failed call with the group that it was made in.
pub(super) fn in_group(result: Result<()>) -> Result<()> {
    if let Err(error) = &result {
        group::note_error(error);
    }
    result
}

/// How long a call waits for another thread to notice an abort: it looks ten times a second.
pub(super) const SETTLE: Duration = Duration::from_millis(500);

/// What the caller chose and what the environment makes of it.
///
/// # Safety
/// `settings` is null or as [`config::read`] wants it.
pub(super) unsafe fn choices(settings: *const NcclConfig, default: Config) -> Result<Config> {
    if settings.is_null() {
        return default.overridden();
    }
    // SAFETY: not null; the caller's promise.
    unsafe { config::read(settings) }?.overridden()
}

/// The rank and number of ranks, if they go together.
fn place_of(rank: c_int, ranks: c_int) -> Result<(u32, u32)> {
    let ranks = u32::try_from(ranks)
        .ok()
        .filter(|ranks| *ranks > 0)
        .ok_or_else(|| Error::argument(format!("nranks ({ranks}) is not a positive number")))?;
    let rank = u32::try_from(rank)
        .ok()
        .filter(|rank| *rank < ranks)
        .ok_or_else(|| {
            Error::argument(format!(
                "rank ({rank}) is not between 0 and nranks - 1 ({})",
                ranks - 1
            ))
        })?;
    Ok((rank, ranks))
}

/// Makes one rank, at the end of the group if there is one; `comm` receives its handle at once.
///
/// # Safety
/// `comm` is null or valid for writes until then.
unsafe fn init_rank(
    comm: *mut Handle,
    ranks: c_int,
    ids: Vec<[u8; 128]>,
    rank: c_int,
    device_number: Option<c_int>,
    config: Result<Config>,
) -> Result<()> {
    // SAFETY: the caller's promise.
    *unsafe { out("comm", comm) }? = Handle(0);
    second_library::warn_once();
    let (rank, ranks) = place_of(rank, ranks)?;
    let config = config?;
    let device_number = match device_number {
        Some(number) => number,
        None => device()?.current()?,
    };
    let life = Lifecycle::new(config.blocking);
    let handle = communicator::reserve(life.clone());
    let job = InitJob {
        life: life.clone(),
        ids,
        ranks,
        rank,
        device: device_number,
        config,
    };
    group::submit(Job {
        child: None,
        release: Some(life.abort_word().clone()),
        life,
        // SAFETY: checked above; the caller keeps it valid until the group ends.
        made: Some(unsafe { Made::announce(handle, comm) }),
        work: Box::new(move || communicator::fulfil(handle, &job.run()?)),
    })
}

/// Waits for the work of a communicator, at the end of the group if there is one.
fn finalize(comm: Handle) -> Result<()> {
    let comm = communicator::lookup(comm)?;
    comm.close()?;
    group::submit(Job {
        life: comm.life().clone(),
        child: None,
        release: None,
        made: None,
        work: Box::new(move || comm.flush()),
    })
}

entry! {
    /// The NCCL release that the library says it is, as a number.
    ncclGetVersion, pncclGetVersion(version: *mut c_int) {
        // SAFETY: null or valid, says the entry point's contract.
        *unsafe { out("version", version) }? = release::claimed_version() as c_int;
        // Nothing else refers to the text, and what nothing refers to does not stay in the library.
        std::hint::black_box(observe::VERSION_BANNER);
        Ok(())
    }
}

entry! {
    /// Makes an id for a new communicator and begins to listen for its ranks.
    ncclGetUniqueId, pncclGetUniqueId(uniqueId: *mut UniqueIdBytes) {
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("uniqueId", uniqueId) }?;
        *place = UniqueIdBytes(bootstrap::create_root()?.to_bytes());
        Ok(())
    }
}

entry! {
    /// Makes one rank of a communicator on the current device.
    ncclCommInitRank, pncclCommInitRank(comm: *mut Handle, nranks: c_int, commId: UniqueIdBytes, rank: c_int) {
        // SAFETY: null or valid, says the entry point's contract.
        in_group(unsafe { init_rank(comm, nranks, vec![commId.0], rank, None, Config::default().overridden()) })
    }
}

entry! {
    /// As [`ncclCommInitRank`], with choices.
    ncclCommInitRankConfig, pncclCommInitRankConfig(
        comm: *mut Handle, nranks: c_int, commId: UniqueIdBytes, rank: c_int, settings: *mut NcclConfig,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        in_group(unsafe {
            init_rank(comm, nranks, vec![commId.0], rank, None, choices(settings, Config::default()))
        })
    }
}

entry! {
    /// As [`ncclCommInitRankConfig`], with the ranks spread over the roots of `nId` unique ids.
    ncclCommInitRankScalable, pncclCommInitRankScalable(
        comm: *mut Handle, nranks: c_int, rank: c_int, nId: c_int, commIds: *const UniqueIdBytes,
        settings: *mut NcclConfig,
    ) {
        let ids = || {
            let count = usize::try_from(nId).ok().filter(|count| *count > 0 && nId <= nranks);
            let count = count.ok_or_else(|| {
                Error::argument(format!("nId ({nId}) is not between 1 and nranks ({nranks})"))
            })?;
            if commIds.is_null() {
                return Err(Error::argument("commIds is NULL"));
            }
            // Bytes, which need no alignment.
            // SAFETY: `nId` ids of 128 bytes, says the entry point's contract.
            Ok(unsafe { std::slice::from_raw_parts(commIds.cast::<[u8; 128]>(), count) }.to_vec())
        };
        // SAFETY: null or valid, says the entry point's contract.
        in_group(ids().and_then(|ids| unsafe {
            init_rank(comm, nranks, ids, rank, None, choices(settings, Config::default()))
        }))
    }
}

entry! {
    /// Makes all ranks of a communicator in this process, on the devices of `devlist` (0, 1, … if null).
    ncclCommInitAll, pncclCommInitAll(comms: *mut Handle, ndev: c_int, devlist: *const c_int) {
        if comms.is_null() {
            return Err(Error::argument("comms is NULL"));
        }
        let ranks = usize::try_from(ndev)
            .ok()
            .filter(|ndev| *ndev > 0)
            .ok_or_else(|| Error::argument(format!("ndev ({ndev}) is not a positive number")))?;
        // SAFETY: null or `ndev` entries, says the entry point's contract.
        let devices = (!devlist.is_null()).then(|| unsafe { std::slice::from_raw_parts(devlist, ranks) });
        for (index, number) in devices.unwrap_or_default().iter().enumerate() {
            if *number < 0 {
                return Err(Error::argument(format!("devlist[{index}] ({number}) is not a device")));
            }
            if devices.unwrap_or_default()[..index].contains(number) {
                return Err(Error::usage(format!(
                    "devlist[{index}] ({number}) is there twice: each rank needs a device of its own"
                )));
            }
        }
        device()?;
        let id = UniqueIdBytes(bootstrap::create_root()?.to_bytes());
        let config = Config::default().overridden();
        group::start()?;
        let made = (0..ranks).try_for_each(|rank| {
            let number = devices.map_or(rank as c_int, |devices| devices[rank]);
            // SAFETY: `comms` has `ndev` entries, says the entry point's contract.
            unsafe {
                init_rank(comms.add(rank), ndev, vec![id.0], rank as c_int, Some(number), config.clone())
            }
        });
        // Also when a call failed: the group has to end.
        let ended = group::end();
        made.and(ended)
    }
}

entry! {
    /// Waits for all enqueued work; afterwards the communicator can only be destroyed.
    ncclCommFinalize, pncclCommFinalize(comm: Handle) {
        // As in NCCL, finalizing no communicator is fine.
        if comm == Handle(0) {
            return Ok(());
        }
        in_group(finalize(comm))
    }
}

entry! {
    /// Finalizes if need be, and frees the communicator.
    ncclCommDestroy, pncclCommDestroy(comm: Handle) {
        // As in NCCL, destroying no communicator is fine.
        if comm == Handle(0) {
            return Ok(());
        }
        communicator::remove(comm)?.map_or(Ok(()), |comm| comm.destroy())
    }
}

entry! {
    /// Releases every wait and frees the communicator, whatever its peers do.
    ncclCommAbort, pncclCommAbort(comm: Handle) {
        if comm == Handle(0) {
            return Ok(());
        }
        let (life, comm) = communicator::tear_out(comm)?;
        life.abort();
        // A group that works on it gives up first, so that nothing is launched behind what follows.
        life.settle(SETTLE);
        if let Some(comm) = comm {
            comm.abort();
        }
        Ok(())
    }
}

entry! {
    /// What went wrong behind the caller's back; `ncclSuccess` if nothing did.
    ncclCommGetAsyncError, pncclCommGetAsyncError(comm: Handle, asyncError: *mut c_int) {
        let (code, _) = communicator::state(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        *unsafe { out("asyncError", asyncError) }? = code as c_int;
        Ok(())
    }
}

entry! {
    /// Number of ranks.
    ncclCommCount, pncclCommCount(comm: Handle, count: *mut c_int) {
        let comm = communicator::lookup(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        *unsafe { out("count", count) }? = comm.ranks as c_int;
        Ok(())
    }
}

entry! {
    /// Device number.
    ncclCommCuDevice, pncclCommCuDevice(comm: Handle, device: *mut c_int) {
        let comm = communicator::lookup(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        *unsafe { out("device", device) }? = comm.device;
        Ok(())
    }
}

entry! {
    /// This rank.
    ncclCommUserRank, pncclCommUserRank(comm: Handle, rank: *mut c_int) {
        let comm = communicator::lookup(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        *unsafe { out("rank", rank) }? = comm.rank as c_int;
        Ok(())
    }
}

entry! {
    /// Memory that the library can use best.
    ncclMemAlloc, pncclMemAlloc(ptr: *mut *mut c_void, size: usize) {
        // The device refuses a null pointer, and NCCL returns its refusal.
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("ptr", ptr) }.map_err(|error| Error::new(ResultCode::UnhandledCudaError, error.text))?;
        *place = device()?.allocate(size)?.cast();
        Ok(())
    }
}

entry! {
    /// Gives memory of [`ncclMemAlloc`] back.
    ncclMemFree, pncclMemFree(ptr: *mut c_void) {
        Ok(device()?.free(ptr.cast())?)
    }
}

entry! {
    /// Opens a group: calls until [`ncclGroupEnd`] are done together.
    ncclGroupStart, pncclGroupStart() {
        group::start()
    }
}

entry! {
    /// Closes a group; the outermost one does what was collected.
    ncclGroupEnd, pncclGroupEnd() {
        group::end()
    }
}
