//! Two ranks as threads that reduce, send, make a mistake and end, and what is logged meanwhile.

use std::{env, ptr::null};

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::Function;

use crate::common::{self, Call, Rank, on_ranks, processes::variable, unique_id, variables::WHAT};

fn work() {
    on_ranks(2, |rank| {
        for count in [1000, 100_000] {
            Call::new(Function::AllReduce, count).check(&rank, false);
        }
        let (data, mut into) = ([1f32; 8], [0f32; 8]);
        // SAFETY: no arguments.
        assert_eq!(unsafe { abi::ncclGroupStart() }, ResultCode::Success);
        let peer = 1 - rank.rank;
        let (send, recv) = (
            Call::peer(Function::Send, 8, peer),
            Call::peer(Function::Recv, 8, peer),
        );
        common::ok(rank.call(&send, data.as_ptr().cast(), std::ptr::null_mut()));
        common::ok(rank.call(&recv, null(), into.as_mut_ptr().cast()));
        // SAFETY: no arguments.
        common::ok(unsafe { abi::ncclGroupEnd() });
        rank.synchronize();
        // SAFETY: the mistake: a rank that there is none of.
        let code =
            unsafe { abi::ncclBroadcast(null(), std::ptr::null_mut(), 8, 7, 9, rank.comm, rank.stream) };
        assert_eq!(code, ResultCode::InvalidArgument);
    });
}

/// What the test asks for.
pub(crate) fn ranks() {
    match variable(WHAT).as_str() {
        "work" => work(),
        "reset" => {
            work();
            println!("now");
            // SAFETY: no other thread reads the environment now.
            unsafe { env::set_var("NCCL_DEBUG", "INFO") };
            abi::ncclResetDebugInit();
            Rank::join(unique_id(), 0, 1).leave();
            // SAFETY: as above.
            unsafe { env::remove_var("NCCL_DEBUG") };
            abi::pncclResetDebugInit();
            println!("then");
            Rank::join(unique_id(), 0, 1).leave();
        }
        "theirs" => {
            // A Rust program's own subscriber, which came first.
            tracing::subscriber::set_global_default(Theirs { panics: false }).unwrap();
            work();
        }
        "panics" => panics(),
        what => panic!("{what}"),
    }
}

/// Calls of a program whose subscriber panics: they return.
fn panics() {
    tracing::subscriber::set_global_default(Theirs { panics: true }).unwrap();
    let mut version = 0;
    // The first call complains of a variable.
    // SAFETY: a valid place, and a null pointer that is refused.
    unsafe {
        common::ok(abi::ncclGetVersion(&raw mut version));
        assert_eq!(
            abi::ncclGetVersion(std::ptr::null_mut()),
            ResultCode::InvalidArgument
        );
    }
    assert_eq!(common::last_error(), "ncclGetVersion: version is NULL");
    // It complains again.
    abi::ncclResetDebugInit();
    println!("returned");
}

/// Prints targets, and nothing as NCCL would.
struct Theirs {
    panics: bool,
}

impl tracing::Subscriber for Theirs {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        println!("theirs {}", event.metadata().target());
        assert!(!self.panics, "as is wanted");
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
