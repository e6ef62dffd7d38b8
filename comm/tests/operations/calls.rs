//! What the tests share: the calls.

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use ringsight_comm::{
    abi,
    communicator::{Communicator, Handle, lookup},
    error::ResultCode,
};

use crate::common::{self, Rank, ok};

pub(super) const FLOAT: c_int = 7;
pub(super) const DEVICE: c_int = 0;
pub(super) const HOST: c_int = 1;
pub(super) const ARGUMENT: ResultCode = ResultCode::InvalidArgument;

pub(super) fn group_start() {
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
}

pub(super) fn group_end() -> ResultCode {
    // SAFETY: no arguments.
    unsafe { abi::ncclGroupEnd() }
}

/// A PreMulSum of floats.
pub(super) fn pre_mul_sum(comm: Handle, scalar: *mut f32, residence: c_int) -> c_int {
    let mut op = -1;
    // SAFETY: valid places.
    ok(unsafe {
        abi::ncclRedOpCreatePreMulSum(&raw mut op, scalar.cast::<c_void>(), FLOAT, residence, comm)
    });
    assert!(op >= 5, "no built-in reduction's number");
    op
}

pub(super) fn all_reduce(rank: &Rank, send: &[f32], recv: &mut [f32], op: c_int) -> ResultCode {
    let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    // SAFETY: buffers of as many elements, which live until the stream is synchronized.
    unsafe { abi::ncclAllReduce(from, to, send.len(), FLOAT, op, rank.comm, rank.stream) }
}

pub(super) fn destroy(rank: &Rank, op: c_int) -> ResultCode {
    // SAFETY: numbers and handles, right or wrong.
    unsafe { abi::ncclRedOpDestroy(op, rank.comm) }
}

/// A communicator of one rank.
pub(super) fn on_one_rank() -> Rank {
    Rank::join(common::unique_id(), 0, 1)
}

pub(super) fn of_comm(rank: &Rank) -> Arc<Communicator> {
    lookup(rank.comm).expect("a live communicator")
}
