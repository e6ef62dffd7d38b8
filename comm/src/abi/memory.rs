//! Entry points about the memory that a communicator holds.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::ffi::c_int;

use ringsight_comm_base::error::{Error, ResultCode};

use super::{arguments::out, entry};
use crate::communicator::{self, Handle};

/// `ncclStatGpuMemSuspend`: bytes that a suspension would free.
const SUSPENDABLE: c_int = 0;
/// `ncclStatGpuMemSuspended`: whether it is suspended.
const SUSPENDED: c_int = 1;
/// `ncclStatGpuMemPersist`: bytes that stay.
const PERSISTENT: c_int = 2;
/// `ncclStatGpuMemTotal`: both.
const TOTAL: c_int = 3;

entry! {
    /// Fails with `ncclInvalidUsage`: a communicator keeps its memory until it is destroyed.
    ncclCommSuspend, pncclCommSuspend(comm: Handle, flags: c_int) {
        communicator::lookup(comm)?.check_usable()?;
        if flags != 1 {
            return Err(Error::argument(format!("flags ({flags}) is not NCCL_SUSPEND_MEM (1)")));
        }
        Err(Error::usage("comm keeps its memory: destroy it, and make another one when it is needed again"))
    }
}

entry! {
    /// Fails with `ncclInvalidUsage`: no communicator is suspended.
    ncclCommResume, pncclCommResume(comm: Handle) {
        communicator::lookup(comm)?.check_usable()?;
        Err(Error::usage("comm is not suspended"))
    }
}

entry! {
    /// Bytes of the device's memory that a communicator holds for itself: its FIFOs there. None of it can be suspended.
    ncclCommMemStats, pncclCommMemStats(comm: Handle, stat: c_int, value: *mut u64) {
        let comm = communicator::lookup(comm)?;
        // SAFETY: null or valid, says the entry point's contract.
        let value = unsafe { out("value", value) }?;
        *value = match stat {
            SUSPENDABLE | SUSPENDED => 0,
            PERSISTENT | TOTAL => comm.device_bytes() as u64,
            _ => return Err(Error::argument(format!("stat ({stat}) is none of the statistics 0 to 3"))),
        };
        Ok(())
    }
}
