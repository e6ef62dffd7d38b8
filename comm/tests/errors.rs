//! Wrong calls return NCCL's code and say which argument and why; nothing hangs or crashes.

mod common;

use std::{
    ffi::CStr,
    ptr::{null, null_mut},
};

use common::{
    Call, Rank, config, fails, host, ok, on_ranks,
    processes::{alone, alone_on_host},
    unique_id,
};

use ringsight_comm::{
    abi::{self, NcclConfig, UniqueIdBytes},
    communicator::Handle,
    device::Stream,
    error::ResultCode,
};

use ringsight_records::Function;

const ARGUMENT: ResultCode = ResultCode::InvalidArgument;

const USAGE: ResultCode = ResultCode::InvalidUsage;

#[test]
fn operations_name_the_bad_argument() {
    on_ranks(2, |rank| {
        let data = [0f32; 8];
        let at = data.as_ptr();
        let Rank { comm, stream, .. } = rank;
        let mut into = [0f32; 16];
        let out = into.as_mut_ptr().cast();
        // SAFETY: refused calls touch no buffer.
        unsafe {
            let all_reduce = |send: *const f32, recv, kind, op, comm, stream| {
                abi::ncclAllReduce(send.cast(), recv, 8, kind, op, comm, stream)
            };
            fails(
                all_reduce(at, out, 7, 0, Handle(0), stream),
                ARGUMENT,
                "comm is NULL",
            );
            fails(
                all_reduce(at, out, 7, 0, Handle(0xdead), stream),
                ARGUMENT,
                "comm (0xdead)",
            );
            fails(
                all_reduce(at, out, 12, 0, comm, stream),
                ARGUMENT,
                "datatype (12)",
            );
            fails(
                all_reduce(at, out, -1, 0, comm, stream),
                ARGUMENT,
                "datatype (-1)",
            );
            fails(all_reduce(at, out, 7, 5, comm, stream), ARGUMENT, "op (5)");
            fails(all_reduce(at, out, 7, -1, comm, stream), ARGUMENT, "op (-1)");
            fails(
                all_reduce(null(), out, 7, 0, comm, stream),
                ARGUMENT,
                "sendbuff is NULL",
            );
            fails(
                all_reduce(at, null_mut(), 7, 0, comm, stream),
                ARGUMENT,
                "recvbuff is NULL",
            );
            fails(all_reduce(at, out, 7, 0, comm, Stream(0xbad)), ARGUMENT, "stream");
            let broadcast = |root| abi::ncclBroadcast(at.cast(), out, 8, 7, root, comm, stream);
            fails(broadcast(2), ARGUMENT, "root (2)");
            fails(broadcast(-1), ARGUMENT, "root (-1)");
            fails(
                abi::ncclSend(at.cast(), 8, 7, 2, comm, stream),
                ARGUMENT,
                "peer (2)",
            );
            fails(
                abi::ncclRecv(out, usize::MAX, 7, 0, comm, stream),
                ARGUMENT,
                "count",
            );
            fails(abi::ncclCommCount(comm, null_mut()), ARGUMENT, "count is NULL");
            fails(abi::ncclGetVersion(null_mut()), ARGUMENT, "version is NULL");
            fails(abi::ncclGroupEnd(), USAGE, "without ncclGroupStart");
            fails(abi::pncclGroupEnd(), USAGE, "without ncclGroupStart");
        }
        // The communicator is as good as before.
        Call::new(Function::AllReduce, 100).check(&rank, false);
    });
}

#[test]
fn a_group_with_a_bad_call_launches_nothing() {
    on_ranks(2, |rank| {
        let (data, mut out) = ([1f32; 8], [0f32; 8]);
        let call = Call::new(Function::AllReduce, 8);
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupStart() });
        ok(rank.call(&call, data.as_ptr().cast(), out.as_mut_ptr().cast()));
        fails(
            rank.call(&call, null(), out.as_mut_ptr().cast()),
            ARGUMENT,
            "sendbuff",
        );
        // SAFETY: no arguments.
        fails(unsafe { abi::ncclGroupEnd() }, ARGUMENT, "sendbuff");
        rank.synchronize();
        assert_eq!(out, [0.0; 8]);
        // An unpaired message to oneself can never be received.
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupStart() });
        ok(rank.call(
            &Call::peer(Function::Send, 8, rank.rank),
            data.as_ptr().cast(),
            null_mut(),
        ));
        // SAFETY: no arguments.
        fails(unsafe { abi::ncclGroupEnd() }, USAGE, "must pair");
    });
}

#[test]
fn stale_handles_are_errors() {
    host();
    let rank = Rank::join(unique_id(), 0, 1);
    rank.leave();
    // SAFETY: stale handles are what is tested.
    unsafe {
        let data = [0f32; 1];
        let code = rank.call(
            &Call::new(Function::AllReduce, 1),
            data.as_ptr().cast(),
            data.as_ptr().cast_mut().cast(),
        );
        fails(code, ARGUMENT, "destroyed or aborted");
        fails(abi::ncclCommDestroy(rank.comm), ARGUMENT, "destroyed or aborted");
        fails(abi::ncclCommAbort(rank.comm), ARGUMENT, "destroyed or aborted");
        ok(abi::ncclCommDestroy(Handle(0)));
    }
}

#[test]
fn a_finalized_communicator_only_answers_questions() {
    on_ranks(1, |rank| {
        // SAFETY: a live communicator and a valid place.
        unsafe {
            ok(abi::ncclCommFinalize(rank.comm));
            let mut count = 0;
            ok(abi::ncclCommCount(rank.comm, &raw mut count));
            assert_eq!(count, 1);
        }
        let data = [0f32; 1];
        let at = data.as_ptr().cast_mut().cast();
        fails(
            rank.call(&Call::new(Function::AllReduce, 1), at, at),
            USAGE,
            "finalized",
        );
    });
}

#[test]
fn configs_are_checked() {
    host();
    let init = |change: fn(&mut NcclConfig)| {
        let (mut comm, mut settings) = (Handle(1), config());
        change(&mut settings);
        // SAFETY: valid places.
        let code =
            unsafe { abi::ncclCommInitRankConfig(&raw mut comm, 1, unique_id(), 0, &raw mut settings) };
        if code == ResultCode::Success {
            // SAFETY: the communicator just made.
            ok(unsafe { abi::ncclCommDestroy(comm) });
        }
        code
    };
    ok(init(|_| {}));
    ok(init(|config| {
        (config.min_ctas, config.max_ctas, config.comm_name) = (1, 4, c"name".as_ptr());
    }));
    // Built against 2.17: what came later is not looked at, whatever is there.
    ok(init(|config| {
        (config.size, config.version, config.comm_name) = (48, 21700, null::<u8>().wrapping_add(1).cast());
    }));
    fails(init(|config| config.magic = 1), ARGUMENT, "config.magic");
    fails(init(|config| config.size = 8), ARGUMENT, "config.size");
    fails(init(|config| config.blocking = 2), ARGUMENT, "config.blocking");
    fails(init(|config| config.min_ctas = 0), ARGUMENT, "config.minCTAs");
    fails(
        init(|config| (config.min_ctas, config.max_ctas) = (8, 4)),
        ARGUMENT,
        "config.maxCTAs",
    );
}

#[test]
fn init_checks_its_arguments() {
    host();
    let id = unique_id();
    let mut comm = Handle(1);
    let mut init = |ranks, rank, id| {
        // SAFETY: a valid place.
        unsafe { abi::ncclCommInitRank(&raw mut comm, ranks, id, rank) }
    };
    fails(init(0, 0, id), ARGUMENT, "nranks (0)");
    fails(init(2, 2, id), ARGUMENT, "rank (2)");
    fails(init(2, -1, id), ARGUMENT, "rank (-1)");
    fails(init(1, 0, UniqueIdBytes([7; 128])), ARGUMENT, "unique id");
    assert_eq!(comm, Handle(0));
    // SAFETY: null is refused.
    unsafe {
        fails(
            abi::ncclCommInitRank(null_mut(), 1, id, 0),
            ARGUMENT,
            "comm is NULL",
        );
        fails(
            abi::ncclCommInitAll(null_mut(), 1, null()),
            ARGUMENT,
            "comms is NULL",
        );
        fails(abi::ncclGetUniqueId(null_mut()), ARGUMENT, "uniqueId is NULL");
    }
}

#[test]
fn result_codes_have_words() {
    let text = |code| {
        // SAFETY: a static C string.
        unsafe { CStr::from_ptr(abi::ncclGetErrorString(code)) }
            .to_str()
            .unwrap()
    };
    assert_eq!(text(0), "no error");
    let all: std::collections::HashSet<&str> = (0..8).map(text).collect();
    assert_eq!(all.len(), 8);
    assert_eq!(text(99), "unknown result code");
    assert_eq!(text(-1), "unknown result code");
}

#[test]
fn abort_returns_and_leaves_nothing() {
    alone_on_host("errors::abort", &[]);
}

#[test]
fn without_a_device_init_says_so() {
    let text = alone("errors::no_device", |command| {
        command
            .env_remove("RINGSIGHT_DEVICE")
            .env("NCCL_SOCKET_IFNAME", "lo");
    });
    assert!(
        text.contains("libcuda.so.1") && text.contains("RINGSIGHT_DEVICE=host"),
        "{text}"
    );
}

#[test]
fn a_forked_child_is_refused() {
    alone_on_host("errors::forked", &[]);
}
