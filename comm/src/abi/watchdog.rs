//! Entry points for trying out the watchdog.

use crate::{
    communicator::{self, Handle},
    device::Stream,
    error::ResultCode,
    group,
};

/// Launches a kernel that never ends on `stream`, as an operation of `comm` on this rank alone, and returns at once: what the
/// watchdog says and does of a stuck kernel can be seen. The communicator's later operations wait behind it; it ends when
/// the communicator is aborted or revoked. The prototype is in `ringsight.h`.
#[unsafe(no_mangle)]
pub extern "C" fn ncclSimulateKernelTimeout(comm: Handle, stream: Stream) -> ResultCode {
    super::call("ncclSimulateKernelTimeout", || {
        group::launch_stuck(&communicator::lookup(comm)?, stream)
    })
}
