//! `ringsight.h` as a C program uses it. A process has one device, so this is a test program of its own, and the call
//! that names the CUDA device runs in a process of its own.

mod common;

use std::{
    ffi::{CStr, c_void},
    ptr,
    sync::{
        Once,
        atomic::{AtomicU32, Ordering},
    },
};

use common::processes::alone;
use ringsight_comm::{
    abi::*,
    communicator::Handle,
    device::{Event, Graph, GraphExec, Stream},
    error::ResultCode,
};

const SUCCESS: ResultCode = ResultCode::Success;
const ARGUMENT: ResultCode = ResultCode::InvalidArgument;
const USAGE: ResultCode = ResultCode::InvalidUsage;

/// Makes the host device the process's.
fn choose_host() {
    static CHOOSE: Once = Once::new();
    CHOOSE.call_once(|| {
        // SAFETY: every thread of this program reads the environment through Rust's functions, which lock it.
        unsafe { std::env::set_var("RINGSIGHT_DEVICE", "host") };
    });
}

/// What the thread's last failed call left.
fn last_error() -> String {
    // SAFETY: a text of this thread, read before its next call.
    unsafe { CStr::from_ptr(ncclGetLastError(Handle(0))) }
        .to_string_lossy()
        .into_owned()
}

unsafe extern "C" fn count(argument: *mut c_void) {
    // SAFETY: the test passes an `AtomicU32` that outlives the work.
    unsafe { &*argument.cast::<AtomicU32>() }.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_program_in_c() {
    choose_host();
    let counter = AtomicU32::new(0);
    let argument = (&raw const counter).cast_mut().cast::<c_void>();
    let (mut stream, mut start, mut end) = (Stream(0), Event(0), Event(0));
    let (mut graph, mut exec) = (Graph(0), GraphExec(0));
    let mut memory = ptr::null_mut();
    let mut milliseconds = -1.0_f32;
    // SAFETY: every pointer is to a live local or to memory of the device, until the last synchronize.
    unsafe {
        assert_eq!(ringsightMalloc(&raw mut memory, 64), SUCCESS);
        assert_eq!(ringsightStreamCreate(&raw mut stream), SUCCESS);
        assert_eq!(ringsightEventCreate(&raw mut start), SUCCESS);
        assert_eq!(ringsightEventCreate(&raw mut end), SUCCESS);
        assert_eq!(ringsightEventRecord(start, stream), SUCCESS);
        assert_eq!(ringsightMemsetAsync(memory, 0x1_05, 64, stream), SUCCESS);
        assert_eq!(ringsightEventRecord(end, stream), SUCCESS);
        assert_eq!(ringsightEventSynchronize(end), SUCCESS);
        assert_eq!(
            ringsightEventElapsedTime(&raw mut milliseconds, start, end),
            SUCCESS
        );
        assert_eq!(memory.cast::<u8>().add(63).read(), 5);

        assert_eq!(ringsightStreamBeginCapture(stream), SUCCESS);
        assert_eq!(ringsightLaunchHostFunc(stream, Some(count), argument), SUCCESS);
        assert_eq!(ringsightStreamEndCapture(stream, &raw mut graph), SUCCESS);
        assert_eq!(ringsightGraphInstantiate(&raw mut exec, graph), SUCCESS);
        assert_eq!(ringsightGraphDestroy(graph), SUCCESS);
        for _ in 0..3 {
            assert_eq!(ringsightGraphLaunch(exec, stream), SUCCESS);
        }
        assert_eq!(ringsightGraphExecDestroy(exec), SUCCESS);
        assert_eq!(ringsightStreamSynchronize(stream), SUCCESS);
        assert_eq!(ringsightStreamQuery(stream), SUCCESS);
        assert_eq!(ringsightFree(memory), SUCCESS);
        assert_eq!(ringsightEventDestroy(start), SUCCESS);
        assert_eq!(ringsightEventDestroy(end), SUCCESS);
        assert_eq!(ringsightStreamDestroy(stream), SUCCESS);
    }
    assert!(milliseconds >= 0.0);
    assert_eq!(counter.load(Ordering::Relaxed), 3);
}

#[test]
fn bad_arguments_are_named() {
    choose_host();
    let mut graph = Graph(1);
    // SAFETY: null pointers and stale handles are what is tested; the others are live locals.
    unsafe {
        assert_eq!(ringsightStreamCreate(ptr::null_mut()), ARGUMENT);
        assert_eq!(
            ringsightLaunchHostFunc(Stream(0), None, ptr::null_mut()),
            ARGUMENT
        );
        assert_eq!(ringsightStreamDestroy(Stream(0xdead)), ARGUMENT);
        assert_eq!(ringsightStreamDestroy(Stream(0)), ARGUMENT);
        assert_eq!(ringsightGraphLaunch(GraphExec(0), Stream(0)), ARGUMENT);
        assert_eq!(ringsightMemsetAsync(ptr::null_mut(), 0, 8, Stream(0)), ARGUMENT);
        assert_eq!(ringsightStreamEndCapture(Stream(0), &raw mut graph), USAGE);
        assert_eq!(ringsightSetDevice(-1), ARGUMENT);
    }
    assert_eq!(graph, Graph(0));
    assert_eq!(last_error(), "ringsightSetDevice: device -1 is negative");
}

#[test]
fn without_the_host_device_every_call_is_refused() {
    alone("errors::cuda_device", |command| {
        command.env("RINGSIGHT_DEVICE", "cuda");
    });
}
