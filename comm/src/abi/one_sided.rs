//! Entry points of one-sided operations.
//!
//! They are exported so that no call of a program falls through to another library, and refused.

#![expect(non_snake_case, reason = "NCCL's names")]
#![expect(clippy::too_many_arguments, reason = "NCCL's signatures")]

use std::ffi::{c_int, c_uint, c_void};

use ringsight_comm_base::error::{Error, Result, ResultCode};

use super::{communicators::in_group, entry};
use crate::{
    communicator::{self, Handle},
    device::Stream,
};

/// Refuses a call on `comm`, or says what is wrong with `comm`.
fn refuse(function: &str, comm: Handle) -> Result<()> {
    let refused = communicator::lookup(comm).and_then(|comm| {
        comm.check_usable()?;
        Err(Error::usage(format!(
            "{function}: one-sided operations are not served: use ncclSend and ncclRecv"
        )))
    });
    in_group(refused)
}

entry! {
    /// Fails with `ncclInvalidUsage`.
    ncclPutSignal, pncclPutSignal(
        _localbuff: *const c_void, _count: usize, _datatype: c_int, _peer: c_int, _peerWin: usize,
        _peerWinOffset: usize, _sigIdx: c_int, _ctx: c_int, _flags: c_uint, comm: Handle, _stream: Stream,
    ) {
        refuse("ncclPutSignal", comm)
    }
}

entry! {
    /// Fails with `ncclInvalidUsage`.
    ncclSignal, pncclSignal(
        _peer: c_int, _sigIdx: c_int, _ctx: c_int, _flags: c_uint, comm: Handle, _stream: Stream,
    ) {
        refuse("ncclSignal", comm)
    }
}

entry! {
    /// Fails with `ncclInvalidUsage`.
    ncclWaitSignal, pncclWaitSignal(_nDesc: c_int, _signalDescs: *const c_void, comm: Handle, _stream: Stream) {
        refuse("ncclWaitSignal", comm)
    }
}
