//! Entry points of logging.

use std::panic::catch_unwind;

fn reset() {
    // A panic would be a defect; it must not unwind into the caller, who is not told either way.
    let _ = catch_unwind(ringsight_comm_base::log::reset);
}

/// Reads `NCCL_DEBUG` and the like again.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInit() {
    reset();
}

/// [`ncclResetDebugInit`] under its profiling name.
#[unsafe(no_mangle)]
pub extern "C" fn pncclResetDebugInit() {
    reset();
}

/// [`ncclResetDebugInit`] under the name by which NCCL's own plugins know it; it has no twin.
#[unsafe(no_mangle)]
pub extern "C" fn ncclResetDebugInitInternal() {
    reset();
}
