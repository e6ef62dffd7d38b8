//! Communicators by handle, from the call that asks for one to its destruction. Handles are numbers that are never used
//! twice, so that a handle of a communicator that is gone is an error and not a crash.
//!
//! A forked child begins with an empty registry: what its parent's holds is never touched there. To drop a communicator
//! is to join threads, and the child has none of them.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    fork::PerProcess,
};

use super::{Communicator, lifecycle::Lifecycle};

/// The value of an `ncclComm_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Handle(pub usize);

/// The first handle: no address of a program, so that a stray pointer is told from an old handle.
const FIRST: usize = 0x5253_0000_0000;
const STEP: usize = 0x10;

static NEXT: AtomicUsize = AtomicUsize::new(FIRST);

type Live = HashMap<usize, Slot, BuildHasherDefault<Spread>>;

/// Hashes handles. They are ours, so nobody can choose ones that collide.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, value: usize) {
        // Odd, and without a pattern: the table takes the upper and the lower bits.
        self.0 = (self.0 ^ (value / STEP) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// The handles of one process.
struct Registry {
    /// Its first handle: those before it are of processes that it descends from.
    first: usize,
    live: RwLock<Live>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            // Relaxed: in a child, all that its parent has given out by the fork is there.
            first: NEXT.load(Ordering::Relaxed),
            live: RwLock::default(),
        }
    }
}

static REGISTRY: PerProcess<Registry> = PerProcess::new();

fn read() -> RwLockReadGuard<'static, Live> {
    REGISTRY.get().live.read().unwrap_or_else(PoisonError::into_inner)
}

fn write() -> RwLockWriteGuard<'static, Live> {
    REGISTRY
        .get()
        .live
        .write()
        .unwrap_or_else(PoisonError::into_inner)
}

/// What a handle stands for.
#[derive(Clone)]
struct Slot {
    life: Arc<Lifecycle>,
    /// `None` while it is being made, and if that failed.
    communicator: Option<Arc<Communicator>>,
}

/// A handle for a communicator that is to be made.
#[must_use]
pub fn reserve(life: Arc<Lifecycle>) -> Handle {
    let slot = Slot {
        life,
        communicator: None,
    };
    let mut live = write();
    // Relaxed: handles need to differ, they order nothing.
    let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
    live.insert(handle, slot);
    Handle(handle)
}

/// Puts a communicator behind its handle.
///
/// # Errors
/// The handle was aborted meanwhile: then the communicator is aborted too.
pub fn fulfil(handle: Handle, communicator: &Arc<Communicator>) -> Result<()> {
    let mut live = write();
    if let Some(slot) = live.get_mut(&handle.0) {
        slot.communicator = Some(communicator.clone());
        return Ok(());
    }
    drop(live);
    communicator.abort();
    Err(Error::usage("comm was aborted while it was being made"))
}

/// What is behind a handle, whatever it is doing.
///
/// # Errors
/// The handle is none.
pub fn find(handle: Handle) -> Result<(Arc<Lifecycle>, Option<Arc<Communicator>>)> {
    slot(handle).map(|slot| (slot.life, slot.communicator))
}

/// The communicators that are made.
#[must_use]
pub fn all() -> Vec<Arc<Communicator>> {
    read()
        .values()
        .filter_map(|slot| slot.communicator.clone())
        .collect()
}

/// Whether there is a communicator behind the handle.
#[must_use]
pub fn is_made(handle: Handle) -> bool {
    slot(handle).is_ok_and(|slot| slot.communicator.is_some())
}

/// Takes back a handle whose communicator could not be made.
pub fn withdraw(handle: Handle) {
    write().remove(&handle.0);
}

fn slot(handle: Handle) -> Result<Slot> {
    read().get(&handle.0).cloned().ok_or_else(|| unknown(handle))
}

/// The communicator of a handle, ready for calls.
///
/// # Errors
/// Says whether the handle is null, was destroyed, or never was one; whether its communicator is still being made, could
/// not be made, or is busy with an earlier non-blocking call.
pub fn lookup(handle: Handle) -> Result<Arc<Communicator>> {
    // With a look at what is there, as long as no group has worked on it behind the caller's back.
    if let Some(Slot {
        life,
        communicator: Some(communicator),
    }) = read().get(&handle.0)
        && life.rests()
    {
        return Ok(communicator.clone());
    }
    let Slot { life, .. } = slot(handle)?;
    life.check_idle()?;
    // Asked again: it may have come while the group was at work.
    slot(handle)?.communicator.ok_or_else(|| {
        let unfinished = || Error::argument("comm is not made yet: its group has not ended");
        life.faults().get().unwrap_or_else(unfinished)
    })
}

/// What `ncclCommGetAsyncError` says: the state of the communicator and why it failed, if it did.
///
/// # Errors
/// The handle is none.
pub fn state(handle: Handle) -> Result<(ResultCode, Option<Error>)> {
    let Slot { life, .. } = slot(handle)?;
    if life.is_busy() {
        return Ok((ResultCode::InProgress, None));
    }
    let fault = life.faults().get();
    let made = slot(handle)?.communicator.is_some();
    Ok(match fault {
        Some(error) => (error.code, Some(error)),
        None if made => (ResultCode::Success, None),
        None => (ResultCode::InProgress, None),
    })
}

/// Takes a communicator out.
///
/// # Errors
/// As [`lookup`], but for a communicator that could not be made: then there is nothing but its handle, which is gone now.
pub fn remove(handle: Handle) -> Result<Option<Arc<Communicator>>> {
    let Slot { life, communicator } = slot(handle)?;
    life.check_idle()?;
    if communicator.is_none() && life.faults().get().is_none() {
        return Err(Error::argument(
            "comm is still being made: wait for it, or use ncclCommAbort",
        ));
    }
    write()
        .remove(&handle.0)
        .map(|slot| slot.communicator)
        .ok_or_else(|| unknown(handle))
}

/// Takes a communicator out whatever it is doing.
///
/// # Errors
/// The handle is none.
pub fn tear_out(handle: Handle) -> Result<(Arc<Lifecycle>, Option<Arc<Communicator>>)> {
    write()
        .remove(&handle.0)
        .map(|slot| (slot.life, slot.communicator))
        .ok_or_else(|| unknown(handle))
}

fn unknown(handle: Handle) -> Error {
    let given =
        (FIRST..NEXT.load(Ordering::Relaxed)).contains(&handle.0) && (handle.0 - FIRST).is_multiple_of(STEP);
    if given && handle.0 < REGISTRY.get().first {
        return of_parent();
    }
    Error::argument(match handle.0 {
        0 => "comm is NULL".to_owned(),
        _ if given => "comm has been destroyed or aborted".to_owned(),
        value => format!("comm ({value:#x}) is not a communicator of this library"),
    })
}

/// What calls of a forked child on its parent's communicators fail with.
pub(super) fn of_parent() -> Error {
    Error::usage("comm belongs to the parent of this forked process: make a communicator after the fork")
}
