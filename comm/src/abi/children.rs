//! Entry points that make communicators from communicators, and that revoke them.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::{ffi::c_int, sync::Arc};

use ringsight_comm_base::error::{Error, Result, ResultCode};

use super::{
    arguments::out,
    communicators::{SETTLE, choices, in_group},
    entry,
    types::{NcclConfig, UniqueIdBytes},
};
use crate::{
    communicator::{self, ChildJob, Communicator, Config, GrowJob, Handle, Lifecycle, Selection},
    device::device,
    group::{self, Job, Made},
};

/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;

/// Makes a child, at the end of the group if there is one; `newcomm` receives its handle at once, NULL if there will be
/// none.
///
/// # Safety
/// `newcomm` is valid for writes until the group ends; `settings` as [`choices`] wants it.
unsafe fn make_child(
    parent: Arc<Communicator>,
    selection: Selection,
    newcomm: *mut Handle,
    settings: *const NcclConfig,
) -> Result<()> {
    parent.check_parent()?;
    // SAFETY: the caller's promise.
    let config = unsafe { choices(settings, parent.config.clone()) }?;
    let child = Lifecycle::new(config.blocking);
    let handle = match selection {
        Selection::Split { color: None, .. } => None,
        _ => Some(communicator::reserve(child.clone())),
    };
    let life = parent.life().clone();
    let job = ChildJob::new(parent, selection, child.clone(), config);
    group::submit(Job {
        life,
        release: Some(child.abort_word().clone()),
        child: handle.map(|_| child),
        // SAFETY: the caller's promise.
        made: handle.map(|handle| unsafe { Made::announce(handle, newcomm) }),
        work: Box::new(move || match (job.run()?, handle) {
            (Some(made), Some(handle)) => communicator::fulfil(handle, &made),
            _ => Ok(()),
        }),
    })
}

entry! {
    /// Makes a communicator of the ranks that give the same `color`, ordered by `key`; all ranks of `comm` call it.
    ncclCommSplit, pncclCommSplit(
        comm: Handle, color: c_int, key: c_int, newcomm: *mut Handle, settings: *mut NcclConfig,
    ) {
        in_group(communicator::lookup(comm).and_then(|comm| {
            // SAFETY: null or valid, says the entry point's contract.
            *unsafe { out("newcomm", newcomm) }? = Handle(0);
            let color = match color {
                NO_COLOR => None,
                _ => Some(u32::try_from(color).map_err(|_| {
                    Error::argument(format!(
                        "color ({color}) is negative: NCCL_SPLIT_NOCOLOR (-1) is for ranks that get no communicator"
                    ))
                })?),
            };
            // SAFETY: as above.
            unsafe { make_child(comm, Selection::Split { color, key }, newcomm, settings) }
        }))
    }
}

/// What `ncclCommShrink` does before it makes the child.
///
/// # Safety
/// `excluded` is null or has `count` entries.
unsafe fn prepare_shrink(
    comm: Handle,
    excluded: *const c_int,
    count: c_int,
    flags: c_int,
) -> Result<(Arc<Communicator>, Selection)> {
    if flags & !SHRINK_ABORT != 0 {
        return Err(Error::argument(format!(
            "shrinkFlags ({flags}) is neither NCCL_SHRINK_DEFAULT (0) nor NCCL_SHRINK_ABORT (1)"
        )));
    }
    if excluded.is_null() {
        return Err(Error::argument("excludeRanksList is NULL"));
    }
    let abort = flags & SHRINK_ABORT != 0;
    let comm = if abort {
        // Whatever it is doing: that is what the flag is for.
        let (_, made) = communicator::find(comm)?;
        made.ok_or_else(|| Error::argument("comm is not made: use ncclCommAbort"))?
    } else {
        communicator::lookup(comm)?
    };
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: not null, so `count` entries, says the caller.
    let excluded = unsafe { std::slice::from_raw_parts(excluded, count) };
    let selection = Selection::without(excluded, comm.rank, comm.ranks)?;
    if abort && !comm.is_given_up() {
        comm.give_up("ncclCommShrink with NCCL_SHRINK_ABORT")?;
        comm.life().settle(SETTLE);
        comm.quiesce();
    }
    Ok((comm, selection))
}

entry! {
    /// Makes a communicator of all ranks of `comm` but some, which do not call and may be dead.
    ncclCommShrink, pncclCommShrink(
        comm: Handle, excludeRanksList: *mut c_int, excludeRanksCount: c_int, newcomm: *mut Handle,
        settings: *mut NcclConfig, shrinkFlags: c_int,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        in_group(unsafe { out("newcomm", newcomm) }.and_then(|place| {
            *place = Handle(0);
            // SAFETY: as above.
            unsafe {
                let (comm, selection) = prepare_shrink(comm, excludeRanksList, excludeRanksCount, shrinkFlags)?;
                make_child(comm, selection, newcomm, settings)
            }
        }))
    }
}

entry! {
    /// An id for the new ranks of the next [`ncclCommGrow`] of `comm`. There is one at a time: it is used up by that call.
    ncclCommGetUniqueId, pncclCommGetUniqueId(comm: Handle, uniqueId: *mut UniqueIdBytes) {
        let comm = communicator::lookup(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        let place = unsafe { out("uniqueId", uniqueId) }?;
        place.0 = comm.make_grow_id()?;
        Ok(())
    }
}

/// Who calls `ncclCommGrow`: a rank of the communicator, or a new one.
fn grower(comm: Handle, ranks: u32, rank: c_int) -> Result<(Option<Arc<Communicator>>, u32, c_int)> {
    if comm == Handle(0) {
        let rank = u32::try_from(rank)
            .ok()
            .filter(|rank| *rank < ranks)
            .ok_or_else(|| {
                Error::argument(format!(
                    "rank ({rank}) of a new rank is not between 0 and nRanks - 1 ({})",
                    ranks - 1
                ))
            })?;
        return Ok((None, rank, device()?.current()?));
    }
    let parent = communicator::lookup(comm)?;
    if rank != -1 {
        return Err(Error::argument(format!(
            "rank ({rank}) is not -1: a rank of comm keeps its number ({})",
            parent.rank
        )));
    }
    if ranks <= parent.ranks {
        return Err(Error::argument(format!(
            "nRanks ({ranks}) is not more than the {} ranks of comm",
            parent.ranks
        )));
    }
    parent.check_parent()?;
    let (rank, device) = (parent.rank, parent.device);
    Ok((Some(parent), rank, device))
}

entry! {
    /// Makes a communicator of the ranks of `comm`, which keep their numbers, and new ranks, for which `comm` is NULL. The rank
    /// that called [`ncclCommGetUniqueId`] and the new ranks pass the id; the other ranks of `comm` may pass NULL.
    ncclCommGrow, pncclCommGrow(
        comm: Handle, nRanks: c_int, uniqueId: *const UniqueIdBytes, rank: c_int, newcomm: *mut Handle,
        settings: *mut NcclConfig,
    ) {
        // SAFETY: null or valid, says the entry point's contract.
        in_group(unsafe { out("newcomm", newcomm) }.and_then(|place| {
            *place = Handle(0);
            let ranks = u32::try_from(nRanks).ok().filter(|ranks| *ranks > 0);
            let ranks = ranks.ok_or_else(|| Error::argument(format!("nRanks ({nRanks}) is not a positive number")))?;
            let (parent, rank, device) = grower(comm, ranks, rank)?;
            // SAFETY: null or valid, says the entry point's contract.
            let id = unsafe { uniqueId.as_ref() }.map(|id| id.0);
            if parent.is_none() && id.is_none() {
                return Err(Error::argument("uniqueId is NULL: a new rank needs the id of ncclCommGetUniqueId"));
            }
            let default = parent.as_ref().map_or_else(Config::default, |parent| parent.config.clone());
            // SAFETY: as above.
            let config = unsafe { choices(settings, default) }?;
            let life = Lifecycle::new(config.blocking);
            let handle = communicator::reserve(life.clone());
            let job = GrowJob { parent: parent.clone(), id, life: life.clone(), ranks, rank, device, config };
            let release = Some(life.abort_word().clone());
            let (life, child) = match parent {
                Some(parent) => (parent.life().clone(), Some(life)),
                None => (life, None),
            };
            group::submit(Job {
                life,
                release,
                child,
                // SAFETY: checked above; the caller keeps it valid until the group ends.
                made: Some(unsafe { Made::announce(handle, newcomm) }),
                work: Box::new(move || communicator::fulfil(handle, &job.run()?)),
            })
        }))
    }
}

entry! {
    /// Terminates the operations of a communicator without freeing it: it can be split, shrunk and destroyed.
    ncclCommRevoke, pncclCommRevoke(comm: Handle, revokeFlags: c_int) {
        if comm == Handle(0) {
            return Ok(());
        }
        in_group(revoke(comm, revokeFlags))
    }
}

fn revoke(comm: Handle, flags: c_int) -> Result<()> {
    if flags != 0 {
        return Err(Error::argument(format!(
            "revokeFlags ({flags}) is not NCCL_REVOKE_DEFAULT (0)"
        )));
    }
    let (life, comm) = communicator::find(comm)?;
    let comm = comm.ok_or_else(|| Error::argument("comm is not made: use ncclCommAbort"))?;
    comm.give_up("ncclCommRevoke")?;
    // A group that works on it gives up first.
    life.settle(SETTLE);
    group::submit(Job {
        life,
        child: None,
        release: None,
        made: None,
        work: Box::new(move || {
            comm.quiesce();
            Ok(())
        }),
    })
}
