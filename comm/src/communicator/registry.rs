//! Live communicators by handle. Handles are numbers that are never used twice, so that a handle of a communicator that
//! is gone is an error and not a crash.

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::Communicator;
use crate::error::{Error, Result};

/// The value of an `ncclComm_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Handle(pub usize);

/// The first handle: no address of a program, so that a stray pointer is told from an old handle.
const FIRST: usize = 0x5253_0000_0000;
const STEP: usize = 0x10;

static NEXT: AtomicUsize = AtomicUsize::new(FIRST);
static LIVE: RwLock<Option<HashMap<usize, Arc<Communicator>>>> = RwLock::new(None);

/// Enters a communicator.
#[must_use]
pub fn register(communicator: Arc<Communicator>) -> Handle {
    let handle = NEXT.fetch_add(STEP, Ordering::Relaxed);
    LIVE.write()
        .unwrap_or_else(PoisonError::into_inner)
        .get_or_insert_default()
        .insert(handle, communicator);
    Handle(handle)
}

/// The communicator of a handle.
///
/// # Errors
/// Says whether the handle is null, was destroyed, or never was one.
pub fn lookup(handle: Handle) -> Result<Arc<Communicator>> {
    let live = LIVE.read().unwrap_or_else(PoisonError::into_inner);
    live.as_ref()
        .and_then(|live| live.get(&handle.0))
        .cloned()
        .ok_or_else(|| unknown(handle))
}

/// Takes a communicator out.
///
/// # Errors
/// As [`lookup`].
pub fn remove(handle: Handle) -> Result<Arc<Communicator>> {
    let mut live = LIVE.write().unwrap_or_else(PoisonError::into_inner);
    live.as_mut()
        .and_then(|live| live.remove(&handle.0))
        .ok_or_else(|| unknown(handle))
}

fn unknown(handle: Handle) -> Error {
    let given =
        (FIRST..NEXT.load(Ordering::Relaxed)).contains(&handle.0) && (handle.0 - FIRST).is_multiple_of(STEP);
    Error::argument(match handle.0 {
        0 => "comm is NULL".to_owned(),
        _ if given => "comm has been destroyed or aborted".to_owned(),
        value => format!("comm ({value:#x}) is not a communicator of this library"),
    })
}
