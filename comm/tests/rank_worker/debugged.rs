//! A rank that a debugger holds, and its peer.

use std::{fs::File, path::PathBuf};

use ringsight_comm::{abi, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

use crate::common::{
    Call, ok,
    processes::{rank_of_process, variable},
    state,
    variables::FOLDER,
    waiting::eventually,
};

/// Rank 1 is held by a debugger while rank 0 waits for it.
pub(crate) fn held() {
    let rank = rank_of_process();
    let folder = PathBuf::from(variable(FOLDER));
    let mark = |name: &str| drop(File::create(folder.join(name)).unwrap());
    let await_mark = |name: &str| eventually(name, || folder.join(name).exists());
    let call = Call::new(Function::AllReduce, 1000);
    call.check(&rank, false);
    if rank.rank == 1 {
        mark("ready");
        await_mark("judged");
    } else {
        await_mark("held");
    }
    let (mut data, verdicts) = (vec![1f32; 1000], observe::emitted(Kind::Verdict));
    let at: *mut u8 = data.as_mut_ptr().cast();
    ok(rank.call(&call, at, at));
    if rank.rank == 0 {
        eventually("a verdict", || observe::emitted(Kind::Verdict) > verdicts);
        mark("judged");
    }
    rank.synchronize();
    assert_eq!(state(rank.comm), ResultCode::Success);
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommFinalize(rank.comm) });
    rank.leave();
}
