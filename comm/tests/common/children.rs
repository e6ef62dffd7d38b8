//! Children of communicators: the calls that make them, and what they make.

use std::ffi::c_int;

use ringsight_comm::{
    abi::{self, NcclConfig},
    communicator::{Handle, lookup},
    error::ResultCode,
};
use ringsight_records::Function;

use super::{Call, Rank, host, ok};

pub const ARGUMENT: ResultCode = ResultCode::InvalidArgument;
pub const USAGE: ResultCode = ResultCode::InvalidUsage;
pub const NO_COLOR: c_int = -1;

pub fn split(rank: &Rank, color: c_int, key: c_int, settings: *mut NcclConfig) -> (ResultCode, Handle) {
    let mut child = Handle(1);
    // SAFETY: valid places.
    let code = unsafe { abi::ncclCommSplit(rank.comm, color, key, &raw mut child, settings) };
    (code, child)
}

pub fn shrink(
    rank: &Rank,
    excluded: &[c_int],
    settings: *mut NcclConfig,
    flags: c_int,
) -> (ResultCode, Handle) {
    let mut child = Handle(1);
    let mut excluded = excluded.to_vec();
    // SAFETY: valid places.
    let code = unsafe {
        abi::ncclCommShrink(
            rank.comm,
            excluded.as_mut_ptr(),
            excluded.len() as c_int,
            &raw mut child,
            settings,
            flags,
        )
    };
    (code, child)
}

/// A rank of a child, with its own view of rank and size.
#[track_caller]
pub fn member((code, comm): (ResultCode, Handle)) -> Rank {
    ok(code);
    let (mut rank, mut ranks) = (-1, -1);
    // SAFETY: valid places.
    unsafe {
        ok(abi::ncclCommUserRank(comm, &raw mut rank));
        ok(abi::ncclCommCount(comm, &raw mut ranks));
    }
    Rank {
        comm,
        rank: rank as usize,
        ranks: ranks as usize,
        stream: host().stream_create().unwrap(),
    }
}

/// Data goes all the way round the communicator.
#[track_caller]
pub fn works(rank: &Rank) {
    Call::new(Function::AllReduce, 5000).check(rank, false);
    Call::new(Function::AllGather, 7).check(rank, false);
}

pub fn id(rank: &Rank) -> u64 {
    lookup(rank.comm).unwrap().id
}

/// All ranks but the last are stuck in a collective that it never calls.
pub fn stuck<'a>(rank: &Rank, data: &'a mut Vec<f32>) -> &'a mut Vec<f32> {
    data.resize(1 << 20, 1.0);
    let at = data.as_mut_ptr().cast();
    ok(rank.call(&Call::new(Function::AllReduce, data.len()), at, at));
    data
}
