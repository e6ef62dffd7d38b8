//! `ringsight.h`: streams, events and graphs of the host device for C programs.
//!
//! Every function returns a result code, keeps the reason of a failure for `ncclGetLastError`, and never unwinds.
//! Handles are numbers that the device checks; a stale or foreign one is `ncclInvalidArgument`, not a crash.

use std::{
    ffi::{c_int, c_void},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use ringsight_comm_base::error::{Error, ResultCode};

use super::set_last_error;
use crate::device::{DeviceError, Event, Graph, GraphExec, Progress, Result, Runtime, Stream, runtime};

/// A function of [`ringsightLaunchHostFunc`].
type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;

/// Runs a call on the host device. Anything but success leaves its text for `ncclGetLastError`.
fn call(name: &str, body: impl FnOnce(&dyn Runtime) -> Result<ResultCode>) -> ResultCode {
    let outcome = catch_unwind(AssertUnwindSafe(|| body(&**runtime()?)));
    let failure = match outcome {
        Ok(Ok(code)) => return code,
        // With the CUDA device named but not usable these functions have nothing to work on.
        Ok(Err(DeviceError::Unavailable(text))) => Error::usage(text),
        Ok(Err(error)) => Error::from(error),
        Err(_) => Error::internal("panicked, a defect of the library"),
    };
    set_last_error(&format!("{name}: {}", failure.text));
    failure.code
}

/// A null pointer where one is needed.
fn null(argument: &str) -> DeviceError {
    DeviceError::InvalidHandle(format!("{argument} is NULL"))
}

/// Stores a result behind a C out-pointer.
///
/// # Safety
/// `out` is null or valid for writing a `T`.
unsafe fn store<T>(out: *mut T, argument: &str, value: impl FnOnce() -> Result<T>) -> Result<ResultCode> {
    if out.is_null() {
        return Err(null(argument));
    }
    let value = value()?;
    // SAFETY: not null, so valid by the caller's contract.
    unsafe { out.write(value) };
    Ok(ResultCode::Success)
}

fn done((): ()) -> ResultCode {
    ResultCode::Success
}

fn progress(progress: Progress) -> ResultCode {
    match progress {
        Progress::Done => ResultCode::Success,
        Progress::Pending => ResultCode::InProgress,
    }
}

macro_rules! entry_points {
    ($($(#[$meta:meta])* fn $name:ident($($argument:ident: $type:ty),*) |$device:ident| $body:expr;)+) => {$(
        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers are null or valid for what the header says is read or written through them, memory given to
        /// asynchronous work until that work is done.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> ResultCode {
            call(stringify!($name), |$device| $body)
        }
    )+};
}

entry_points! {
    /// Sets the thread's current device number.
    fn ringsightSetDevice(number: c_int) |device| device.set_current(number).map(done);
    /// The thread's current device number.
    fn ringsightGetDevice(number: *mut c_int) |device| {
        // SAFETY: the caller's.
        unsafe { store(number, "device", || device.current()) }
    };

    /// Memory that the device can reach, 4096-byte aligned; NULL for 0 bytes.
    fn ringsightMalloc(pointer: *mut *mut c_void, bytes: usize) |device| {
        // SAFETY: the caller's.
        unsafe { store(pointer, "pointer", || device.allocate(bytes).map(<*mut u8>::cast)) }
    };
    /// Gives memory of `ringsightMalloc` back.
    fn ringsightFree(pointer: *mut c_void) |device| device.free(pointer.cast()).map(done);

    /// A new stream.
    fn ringsightStreamCreate(stream: *mut Stream) |device| {
        // SAFETY: the caller's.
        unsafe { store(stream, "stream", || device.stream_create()) }
    };
    /// Ends a stream once its work is done.
    fn ringsightStreamDestroy(stream: Stream) |device| device.stream_destroy(stream).map(done);
    /// Waits for all work of the stream.
    fn ringsightStreamSynchronize(stream: Stream) |device| device.stream_synchronize(stream).map(done);
    /// `ncclSuccess` if all work of the stream is done, else `ncclInProgress`.
    fn ringsightStreamQuery(stream: Stream) |device| device.stream_query(stream).map(progress);
    /// Makes later work of the stream wait for the event.
    fn ringsightStreamWaitEvent(stream: Stream, event: Event) |device| {
        device.stream_wait_event(stream, event).map(done)
    };
    /// Copies in stream order.
    fn ringsightMemcpyAsync(destination: *mut c_void, source: *const c_void, bytes: usize, stream: Stream) |device| {
        device.memcpy(destination as usize, source as usize, bytes, stream).map(done)
    };
    /// Fills in stream order with the low byte of `value`.
    fn ringsightMemsetAsync(destination: *mut c_void, value: c_int, bytes: usize, stream: Stream) |device| {
        device.memset(destination as usize, value as u8, bytes, stream).map(done)
    };
    /// Runs a function in stream order.
    fn ringsightLaunchHostFunc(stream: Stream, function: HostFn, argument: *mut c_void) |device| {
        let function = function.ok_or_else(|| null("function"))?;
        let argument = argument as usize;
        device
            .launch_host(
                stream,
                Arc::new(move |_| {
                    // SAFETY: function and argument are valid until the work is done, the caller's contract.
                    unsafe { function(argument as *mut c_void) };
                }),
            )
            .map(done)
    };

    /// A new event.
    fn ringsightEventCreate(event: *mut Event) |device| {
        // SAFETY: the caller's.
        unsafe { store(event, "event", || device.event_create()) }
    };
    /// Destroys an event.
    fn ringsightEventDestroy(event: Event) |device| device.event_destroy(event).map(done);
    /// Records an event after the present work of the stream.
    fn ringsightEventRecord(event: Event, stream: Stream) |device| device.event_record(event, stream).map(done);
    /// `ncclSuccess` if the event is complete or was never recorded, else `ncclInProgress`.
    fn ringsightEventQuery(event: Event) |device| device.event_query(event).map(progress);
    /// Waits for an event.
    fn ringsightEventSynchronize(event: Event) |device| device.event_synchronize(event).map(done);
    /// Milliseconds between two completed events.
    fn ringsightEventElapsedTime(milliseconds: *mut f32, start: Event, end: Event) |device| {
        // SAFETY: the caller's.
        unsafe {
            store(milliseconds, "milliseconds", || {
                device.event_elapsed(start, end).map(|time| (time.as_secs_f64() * 1e3) as f32)
            })
        }
    };

    /// Begins to capture a stream.
    fn ringsightStreamBeginCapture(stream: Stream) |device| device.capture_begin(stream).map(done);
    /// Ends a capture; `*graph` is NULL if it failed.
    fn ringsightStreamEndCapture(stream: Stream, graph: *mut Graph) |device| {
        if graph.is_null() {
            return Err(null("graph"));
        }
        // SAFETY: not null, so valid for writing by the caller's contract; on failure the caller finds no stale handle.
        unsafe { graph.write(Graph(0)) };
        // SAFETY: as above.
        unsafe { store(graph, "graph", || device.capture_end(stream)) }
    };
    /// An executable instance of a graph.
    fn ringsightGraphInstantiate(exec: *mut GraphExec, graph: Graph) |device| {
        // SAFETY: the caller's.
        unsafe { store(exec, "exec", || device.graph_instantiate(graph)) }
    };
    /// Replays an instance after the present work of the stream.
    fn ringsightGraphLaunch(exec: GraphExec, stream: Stream) |device| device.graph_launch(exec, stream).map(done);
    /// Destroys an instance; a running replay finishes first.
    fn ringsightGraphExecDestroy(exec: GraphExec) |device| device.graph_exec_destroy(exec).map(done);
    /// Destroys a graph; its instances live on.
    fn ringsightGraphDestroy(graph: Graph) |device| device.graph_destroy(graph).map(done);
}
