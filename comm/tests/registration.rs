//! Memory that callers register with communicators.

mod common;

use std::{
    ffi::{c_int, c_void},
    ptr::{null_mut, without_provenance_mut},
};

use common::{Call, Rank, config, fails, host, ok, on_ranks, settled, state, unique_id};
use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};
use ringsight_records::{Flags, Function};

const ARGUMENT: ResultCode = ResultCode::InvalidArgument;
const USAGE: ResultCode = ResultCode::InvalidUsage;
const PAGE: usize = 4096;

/// Memory of the library.
struct Memory(*mut c_void);

impl Memory {
    fn new(bytes: usize) -> Self {
        let mut at = null_mut();
        // SAFETY: a valid place.
        ok(unsafe { abi::ncclMemAlloc(&raw mut at, bytes) });
        assert!(at.addr().is_multiple_of(PAGE));
        Self(at)
    }

    fn floats(&mut self, count: usize) -> &mut [f32] {
        // SAFETY: large enough and aligned; borrowed for as long as the floats are.
        unsafe { std::slice::from_raw_parts_mut(self.0.cast(), count) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: memory of the library.
        ok(unsafe { abi::ncclMemFree(self.0) });
    }
}

fn register(rank: &Rank, at: *mut c_void, bytes: usize) -> (ResultCode, usize) {
    let mut handle = 1;
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclCommRegister(rank.comm, at, bytes, &raw mut handle) };
    (code, handle)
}

fn deregister(rank: &Rank, handle: usize) -> ResultCode {
    // SAFETY: handles are checked.
    unsafe { abi::ncclCommDeregister(rank.comm, handle) }
}

fn window(rank: &Rank, at: *mut c_void, bytes: usize, flags: c_int) -> (ResultCode, usize) {
    let mut win = 1;
    // SAFETY: a valid place until the group has ended.
    let code = unsafe { abi::ncclCommWindowRegister(rank.comm, at, bytes, &raw mut win, flags) };
    (code, win)
}

/// Whether this rank's last description of a collective on `rank` has the flag.
fn marked(rank: &Rank, send: *const f32) -> bool {
    let pages = observe::pages().unwrap();
    let last = observe::next_op();
    (1..last)
        .rev()
        .filter_map(|op| pages.description(op))
        .find(|about| about.rank == rank.rank as u32 && about.send_buffer == send.addr() as u64)
        .map(|about| Flags(about.flags).contains(Flags::REGISTERED))
        .unwrap()
}

#[test]
fn operations_on_registered_buffers_are_marked() {
    on_ranks(2, |rank| {
        let mut memory = Memory::new(2 * PAGE);
        let at = memory.0;
        let call = Call::new(Function::AllReduce, PAGE / 4);
        let mut run = || {
            let floats = memory.floats(PAGE / 2);
            floats.fill(1.0);
            let at = floats.as_mut_ptr();
            ok(rank.call(&call, at.cast(), at.wrapping_add(PAGE / 4).cast()));
            rank.synchronize();
            assert_eq!(floats[PAGE / 4..], [2.0; PAGE / 4]);
            marked(&rank, at)
        };
        assert!(!run());
        let (code, half) = register(&rank, at, PAGE);
        ok(code);
        assert!(!run(), "the receive buffer is not registered");
        let (code, other) = register(&rank, at.wrapping_byte_add(PAGE), PAGE);
        ok(code);
        assert!(run());
        ok(deregister(&rank, half));
        assert!(!run());
        ok(deregister(&rank, other));
    });
}

#[test]
fn handles_are_checked() {
    on_ranks(1, |rank| {
        let memory = Memory::new(4 * PAGE);
        let (code, whole) = register(&rank, memory.0, 4 * PAGE);
        ok(code);
        // What is registered already is the same handle again, to be given back twice.
        assert_eq!(register(&rank, memory.0, PAGE), (ResultCode::Success, whole));
        ok(deregister(&rank, whole));
        ok(deregister(&rank, whole));
        fails(deregister(&rank, whole), USAGE, "not registered");
        fails(deregister(&rank, 0xbad), USAGE, "handle (0xbad)");
        ok(deregister(&rank, 0));
        let (code, none) = register(&rank, null_mut(), 8);
        fails(code, ARGUMENT, "buff");
        assert_eq!(none, 0);
        // SAFETY: null is refused.
        unsafe {
            fails(
                abi::ncclCommRegister(rank.comm, memory.0, 8, null_mut()),
                ARGUMENT,
                "handle is NULL",
            );
            fails(
                abi::ncclCommRegister(Handle(0), memory.0, 8, &mut 0),
                ARGUMENT,
                "comm is NULL",
            );
        }
        // A handle is one communicator's, and ends with it.
        let (code, handle) = register(&rank, memory.0, PAGE);
        ok(code);
        let other = Rank::join(unique_id(), 0, 1);
        fails(deregister(&other, handle), USAGE, "not registered");
        other.leave();
    });
}

#[test]
fn windows_are_registered_together() {
    on_ranks(3, |rank| {
        let memory = Memory::new(4 * PAGE);
        let (code, first) = window(&rank, memory.0, PAGE, 0);
        ok(code);
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupStart() });
        let mut wins = [1; 2];
        for (index, win) in wins.iter_mut().enumerate() {
            let at = memory.0.wrapping_byte_add((index + 1) * PAGE);
            // SAFETY: a valid place until the group has ended.
            ok(unsafe { abi::ncclCommWindowRegister(rank.comm, at, PAGE, win, 1) });
        }
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupEnd() });
        assert!(first != wins[0] && wins[0] != wins[1] && wins[1] != 0);
        // SAFETY: handles are checked.
        unsafe {
            for win in [first, wins[0], wins[1], 0] {
                ok(abi::ncclCommWindowDeregister(rank.comm, win));
            }
            fails(
                abi::ncclCommWindowDeregister(rank.comm, first),
                USAGE,
                "not registered",
            );
        }
    });
}

#[test]
fn a_group_that_fails_leaves_no_window_out() {
    on_ranks(2, |rank| {
        let memory = Memory::new(PAGE);
        if rank.rank == 0 {
            let mut win = 0;
            // SAFETY: a valid place until the group has ended.
            unsafe {
                ok(abi::ncclGroupStart());
                ok(abi::ncclCommWindowRegister(
                    rank.comm,
                    memory.0,
                    PAGE,
                    &raw mut win,
                    0,
                ));
                let code = abi::ncclBroadcast(memory.0, memory.0, 1, 7, 99, rank.comm, rank.stream);
                assert_eq!(code, ARGUMENT);
                assert_eq!(abi::ncclGroupEnd(), ARGUMENT);
                // There is no such window.
                fails(
                    abi::ncclCommWindowDeregister(rank.comm, win),
                    USAGE,
                    "not registered",
                );
            }
        }
        // The first one of both ranks.
        let (code, win) = window(&rank, memory.0, PAGE, 0);
        ok(code);
        // SAFETY: a window that there is.
        ok(unsafe { abi::ncclCommWindowDeregister(rank.comm, win) });
    });
}

#[test]
fn windows_are_checked() {
    on_ranks(1, |rank| {
        let memory = Memory::new(2 * PAGE);
        let refused = |(code, win): (ResultCode, usize), text: &str| {
            fails(code, ARGUMENT, text);
            assert_eq!(win, 0);
        };
        refused(window(&rank, memory.0.wrapping_byte_add(64), 8, 0), "4096");
        refused(window(&rank, memory.0, PAGE, 4), "winFlags (4)");
        refused(
            window(&rank, without_provenance_mut(usize::MAX - 4095), PAGE, 0),
            "no address",
        );
        // No window of nothing.
        assert_eq!(window(&rank, null_mut(), PAGE, 0), (ResultCode::Success, 0));
        assert_eq!(window(&rank, memory.0, 0, 0), (ResultCode::Success, 0));
        // SAFETY: null is refused.
        let nowhere = unsafe { abi::ncclCommWindowRegister(rank.comm, memory.0, PAGE, null_mut(), 0) };
        fails(nowhere, ARGUMENT, "win is NULL");
    });
}

#[test]
fn a_window_without_waiting() {
    host();
    let id = unique_id();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                let mut settings = config();
                settings.blocking = 0;
                let rank = Rank::join_with(id, rank, 2, &mut settings);
                let memory = Memory::new(PAGE);
                let (code, win) = window(&rank, memory.0, PAGE, 0);
                assert_eq!(code, ResultCode::InProgress);
                assert_eq!(settled(rank.comm), ResultCode::Success);
                // SAFETY: a window that there is.
                ok(unsafe { abi::ncclCommWindowDeregister(rank.comm, win) });
                assert_eq!(state(rank.comm), ResultCode::Success);
                rank.leave();
            });
        }
    });
}
