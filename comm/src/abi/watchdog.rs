//! Entry points for trying out the watchdog.

use crate::{
    communicator::{self, Handle},
    error::ResultCode,
    group,
};

/// Launches a kernel that never ends, as an operation of `comm` on this rank alone on a stream of its own, and returns at once: what the
/// watchdog says and does of a stuck kernel can be seen. The communicator's later operations wait behind it; it ends when
/// the communicator is aborted or revoked. The prototype is in `ringsight.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSimulateKernelTimeout(comm: Handle) -> ResultCode {
    super::call("ncclSimulateKernelTimeout", || {
        group::launch_stuck(&communicator::lookup(comm)?)
    })
}
