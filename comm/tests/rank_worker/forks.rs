//! What forked children do: run alone, since no other thread may hold a lock at the fork.

use std::ptr::null_mut;

use ringsight_comm::{abi, communicator::Handle, error::ResultCode};
use ringsight_records::Function;

use crate::common::{Call, Rank, in_child, last_error, ok, unique_id};

fn all_reduce(rank: &Rank) {
    Call::new(Function::AllReduce, 10).check(rank, false);
}

const REFUSED: &str = "comm belongs to the parent of this forked process: make a communicator after the fork";

/// Children that call with their parent's communicator, or make their own.
pub(crate) fn refused() {
    let rank = Rank::join(unique_id(), 0, 1);
    all_reduce(&rank);
    let comm = rank.comm;
    let mut number = 0;
    let mut child = Handle(0);
    let (number, child) = (&raw mut number, &raw mut child);
    // SAFETY: valid places, and a communicator that stays.
    let calls: [(&str, &dyn Fn() -> ResultCode); 7] = unsafe {
        [
            ("ncclCommDestroy", &|| abi::ncclCommDestroy(comm)),
            ("ncclCommAbort", &|| abi::ncclCommAbort(comm)),
            ("ncclCommRevoke", &|| abi::ncclCommRevoke(comm, 0)),
            ("ncclCommFinalize", &|| abi::ncclCommFinalize(comm)),
            ("ncclCommGetAsyncError", &|| {
                abi::ncclCommGetAsyncError(comm, number)
            }),
            ("ncclCommCount", &|| abi::ncclCommCount(comm, number)),
            ("ncclCommSplit", &|| {
                abi::ncclCommSplit(comm, 0, 0, child, null_mut())
            }),
        ]
    };
    for (name, call) in calls {
        let status = in_child(|| {
            let code = call();
            let expected = format!("{name}: {REFUSED}");
            if code == ResultCode::InvalidUsage && last_error() == expected {
                return 0;
            }
            eprintln!("{name}: {code:?} {}", last_error());
            1
        });
        assert_eq!(status, 0, "{name}");
    }
    // Its own communicator, with the device that the parent has made.
    let status = in_child(|| {
        let own = Rank::join(unique_id(), 0, 1);
        all_reduce(&own);
        own.leave();
        0
    });
    assert_eq!(status, 0, "a child's own communicator");
    // A child that ends as programs do, with the handle still there.
    // SAFETY: runs the exit handlers, of which this program has none.
    assert_eq!(in_child(|| unsafe { libc::exit(0) }), 0);
    all_reduce(&rank);
    rank.leave();
}

/// A child that ends its parent's group.
pub(crate) fn group() {
    let rank = Rank::join(unique_id(), 0, 1);
    let mut data = [1f32; 10];
    let at = data.as_mut_ptr().cast();
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    ok(rank.call(&Call::new(Function::AllReduce, 10), at, at));
    let status = in_child(|| {
        // SAFETY: no arguments.
        let code = unsafe { abi::ncclGroupEnd() };
        let told = last_error().contains("opened by the parent of this forked process");
        // SAFETY: no arguments.
        let next = unsafe { (abi::ncclGroupStart(), abi::ncclGroupEnd()) };
        let well = code == ResultCode::InvalidUsage && next == (ResultCode::Success, ResultCode::Success);
        i32::from(!well || !told)
    });
    assert_eq!(status, 0);
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupEnd() });
    rank.synchronize();
    rank.leave();
}

/// A child whose error is logged.
pub(crate) fn logged() {
    // SAFETY: null is refused.
    let says = || i32::from(unsafe { abi::ncclGetUniqueId(null_mut()) } != ResultCode::InvalidArgument);
    assert_eq!((says(), in_child(says)), (0, 0));
}
