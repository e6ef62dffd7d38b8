//! Bodies for what users have reported of libraries of this kind.

use std::{
    env,
    ffi::c_int,
    fs,
    process::Command,
    ptr::null_mut,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    error::ResultCode,
};
use ringsight_records::Function;

use crate::common::{
    Call, Rank, host, last_error, ok, on_ranks,
    processes::{rank_of_process, variable},
    unique_id,
    variables::{FOLDER, PLACE},
};

/// Makes a unique id and prints how that ends. The environment stays as the test has set it.
pub(crate) fn unique_id_alone() {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclGetUniqueId(&raw mut id) };
    println!("END={code:?} {}", last_error());
}

/// Two ranks at the address of `NCCL_COMM_ID`, in processes of different nodes.
pub(crate) fn two_nodes() {
    let program = env::current_exe().unwrap();
    let ranks: Vec<_> = (0..2)
        .map(|rank| {
            Command::new(&program)
                .arg("reports::one_of_two")
                .env(PLACE, rank.to_string())
                .env("NCCL_HOSTID", format!("node{rank}"))
                .spawn()
                .unwrap()
        })
        .collect();
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
}

/// A rank of [`two_nodes`].
pub(crate) fn one_of_two() {
    host();
    let rank = Rank::join(unique_id(), variable(PLACE).parse().unwrap(), 2);
    Call::new(Function::AllReduce, 1000).check(&rank, false);
    let mut child = Handle(0);
    // SAFETY: a live communicator and a valid place; without a config the default one is used.
    ok(unsafe { abi::ncclCommSplit(rank.comm, 0, rank.rank as c_int, &raw mut child, null_mut()) });
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommDestroy(child) });
    rank.leave();
}

/// Splits its communicator until that fails, and prints how.
pub(crate) fn splits_without_end() {
    let rank = rank_of_process();
    for number in 0..1000 {
        let mut child = Handle(0);
        // SAFETY: as above; the children stay.
        let code =
            unsafe { abi::ncclCommSplit(rank.comm, 0, rank.rank as c_int, &raw mut child, null_mut()) };
        if code != ResultCode::Success {
            println!("END={code:?} after {number}: {}", last_error());
            return;
        }
    }
    panic!("no limit");
}

/// What the standard descriptors are, of those that are open.
fn standard() -> Vec<String> {
    let path = |number: c_int| format!("/proc/self/fd/{number}");
    (0..3)
        .filter_map(|number| fs::read_link(path(number)).ok())
        .map(|link| link.display().to_string())
        .collect()
}

/// Works with its standard descriptors closed, and finds that none of them is ever one of the library's. The folder gets a file.
pub(crate) fn without_standard_descriptors() {
    host();
    for number in 0..3 {
        // SAFETY: nothing here uses them any more.
        unsafe { libc::close(number) };
    }
    let over = AtomicBool::new(false);
    let found = thread::scope(|scope| {
        let watch = scope.spawn(|| {
            let mut found = Vec::new();
            // Relaxed: nothing else is read by it.
            while !over.load(Ordering::Relaxed) && found.is_empty() {
                found = standard();
                // While the library makes a descriptor, it keeps the numbers taken.
                found.retain(|link| link != "/dev/null");
            }
            found
        });
        for _ in 0..3 {
            work();
        }
        over.store(true, Ordering::Relaxed);
        watch.join().unwrap()
    });
    let rest = standard();
    fs::write(
        std::path::Path::new(&variable(FOLDER)).join("found"),
        format!("{found:?} {rest:?}"),
    )
    .unwrap();
}

/// Works as a program that does not ignore `SIGPIPE`, which is any but Rust's.
pub(crate) fn without_readers() {
    // SAFETY: no handler runs.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    work();
}

/// Two ranks that reduce.
fn work() {
    on_ranks(2, |rank| {
        Call::new(Function::AllReduce, 100_000).check(&rank, false);
    });
}
