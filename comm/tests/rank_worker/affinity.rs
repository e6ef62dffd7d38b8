//! Ranks that look at the CPUs of their proxies' threads.

use std::{ffi::c_int, fs};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode};
use ringsight_records::Function;

use crate::common::{
    Call,
    cpus::{cpus_of, keep_to},
    fails, host,
    processes::{rank_of_process, variable},
    unique_id,
    variables::{EXPECTED, WHAT},
};

/// Keeps to one CPU while the communicator is made; the proxy's threads run on the expected ones.
pub(crate) fn pinned() {
    // While the communicator is made.
    keep_to([variable(WHAT).parse().unwrap()]);
    let rank = rank_of_process();
    // Later threads, and the caller's later choices, are another matter.
    keep_to(0..1024);
    Call::new(Function::AllReduce, 1000).check(&rank, false);
    let expected = variable(EXPECTED);
    let mut found = Vec::new();
    for task in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let name = fs::read_to_string(task.path().join("comm")).unwrap();
        let id = task.file_name().into_string().unwrap();
        if let "rs-proxy" | "rs-progress" = name.trim() {
            assert_eq!(cpus_of(&format!("self/task/{id}")), expected, "{name}");
            found.push(name.trim().to_owned());
        }
    }
    found.sort();
    assert_eq!(found, ["rs-progress", "rs-proxy"]);
    rank.leave();
}

/// Fails with a code and a text.
pub(crate) fn refused() {
    let code: usize = variable(WHAT).parse().unwrap();
    host();
    let mut comm = Handle(0);
    // SAFETY: a valid place.
    let got = unsafe { abi::ncclCommInitRank(&raw mut comm, 1, unique_id(), 0 as c_int) };
    fails(got, ResultCode::ALL[code], &variable(EXPECTED));
    assert_eq!(comm, Handle(0));
}
