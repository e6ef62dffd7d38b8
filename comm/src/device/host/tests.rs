//! The host device by CUDA's rules. Work is held back by gates, never by sleeping.

mod captures;

use std::sync::{
    Condvar,
    atomic::{AtomicU32, AtomicUsize, Ordering},
};

use ringsight_kernels::{AbortWord, ChannelWork, Connections, Fifo, Observer, Scalar, When, Work, ZeroCopy};
use ringsight_records::{DataType, Function, ReduceOp};

use super::*;
use crate::device::{Graphs, Progress, Runtime, Streams};

/// A gate that host functions wait at until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn open(&self) {
        *lock(&self.0) = true;
        self.1.notify_all();
    }

    fn wait(&self) {
        drop(self.1.wait_while(lock(&self.0), |open| !*open).unwrap());
    }
}

fn device() -> Arc<HostDevice> {
    Arc::new(HostDevice::new().unwrap())
}

fn hold(device: &HostDevice, stream: Stream) -> Arc<Gate> {
    let gate = Arc::new(Gate::default());
    let waits = gate.clone();
    device
        .launch_host(stream, Arc::new(move |_| waits.wait()))
        .unwrap();
    gate
}

type Log = Arc<Mutex<Vec<(&'static str, u32)>>>;

fn note(device: &HostDevice, stream: Stream, log: &Log, what: &'static str) {
    let log = log.clone();
    device
        .launch_host(stream, Arc::new(move |replay| lock(&log).push((what, replay))))
        .unwrap();
}

fn is_usage<T>(result: Result<T>) -> String {
    match result {
        Err(DeviceError::InvalidUsage(text)) => text,
        Err(other) => panic!("another error: {other}"),
        Ok(_) => panic!("was not refused"),
    }
}

#[test]
fn work_returns_before_it_is_done_and_keeps_its_order() {
    let d = device();
    let s = d.stream_create().unwrap();
    assert_eq!(d.stream_query(s).unwrap(), Progress::Done);
    let gate = hold(&d, s);
    let (a, b) = (d.allocate(1000).unwrap(), d.allocate(1000).unwrap());
    assert_eq!(a as usize % ALIGNMENT, 0);
    d.memset(a as usize, 7, 1000, s).unwrap();
    d.memcpy(b as usize, a as usize, 1000, s).unwrap();
    assert_eq!(d.stream_query(s).unwrap(), Progress::Pending);
    gate.open();
    d.stream_synchronize(s).unwrap();
    assert_eq!(d.stream_query(s).unwrap(), Progress::Done);
    // SAFETY: 1000 bytes, all written.
    let copied = unsafe { std::slice::from_raw_parts(b, 1000) };
    assert!(copied.iter().all(|&byte| byte == 7));
    d.free(a).unwrap();
    d.free(b).unwrap();
    assert!(matches!(d.free(b), Err(DeviceError::InvalidHandle(_))));
    d.free(d.allocate(0).unwrap()).unwrap();
    assert!(matches!(d.allocate(usize::MAX), Err(DeviceError::Resource(_))));
    assert!(matches!(d.memset(0, 1, 4, s), Err(DeviceError::InvalidHandle(_))));
    d.stream_destroy(s).unwrap();
    assert!(matches!(d.stream_query(s), Err(DeviceError::InvalidHandle(_))));
}

#[test]
fn events_order_streams() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let (e, f) = (d.event_create().unwrap(), d.event_create().unwrap());
    assert_eq!(d.event_query(e).unwrap(), Progress::Done, "never recorded");
    d.event_synchronize(e).unwrap();
    assert!(d.event_elapsed(e, f).is_err());
    let log = Log::default();
    let gate = hold(&d, s);
    note(&d, s, &log, "before");
    d.event_record(e, s).unwrap();
    d.stream_wait_event(t, e).unwrap();
    note(&d, t, &log, "after");
    // The wait is for the record before it, not for a later one.
    let second = hold(&d, s);
    d.event_record(e, s).unwrap();
    assert_eq!(d.event_query(e).unwrap(), Progress::Pending);
    is_usage(d.event_elapsed(e, e));
    d.event_destroy(e).unwrap();
    gate.open();
    d.stream_synchronize(t).unwrap();
    assert_eq!(*lock(&log), [("before", 0), ("after", 0)]);
    second.open();
    d.event_record(f, s).unwrap();
    d.event_synchronize(f).unwrap();
    let g = d.event_create().unwrap();
    d.event_record(g, s).unwrap();
    d.event_synchronize(g).unwrap();
    assert!(d.event_elapsed(f, g).unwrap() < Duration::from_secs(60));
    assert_eq!(d.event_elapsed(g, f).unwrap(), Duration::ZERO);
    assert!(matches!(d.event_query(e), Err(DeviceError::InvalidHandle(_))));
}

#[test]
fn a_destroyed_stream_finishes_its_work_and_its_thread_ends() {
    let d = device();
    let s = d.stream_create().unwrap();
    let gate = hold(&d, s);
    let name = Arc::new(Mutex::new(None));
    let done = Arc::new(Gate::default());
    let (seen, signal) = (name.clone(), done.clone());
    d.launch_host(
        s,
        Arc::new(move |_| {
            *lock(&seen) = std::fs::read_to_string("/proc/thread-self/comm").ok();
            signal.open();
        }),
    )
    .unwrap();
    d.stream_destroy(s).unwrap();
    gate.open();
    done.wait();
    assert!(lock(&name).as_deref().unwrap().starts_with("rs-stream-"));
    // The thread drops its queue's share when it ends.
    let s = d.stream_create().unwrap();
    let worker = Arc::downgrade(&lock(&d.state).streams[&s.0].worker);
    d.stream_destroy(s).unwrap();
    assert!(worker.upgrade().is_none());
}

#[test]
fn default_streams_are_per_device_number() {
    let d = device();
    let gate = hold(&d, Stream(0));
    assert_eq!(d.stream_query(Stream(0)).unwrap(), Progress::Pending);
    d.set_current(3).unwrap();
    assert_eq!(d.current().unwrap(), 3);
    assert_eq!(d.stream_query(Stream(0)).unwrap(), Progress::Done);
    assert!(matches!(d.set_current(-1), Err(DeviceError::InvalidHandle(_))));
    is_usage(d.capture_begin(Stream(0)));
    assert!(d.stream_destroy(Stream(0)).is_err());
    d.set_current(0).unwrap();
    gate.open();
    d.stream_synchronize(Stream(0)).unwrap();
}

#[test]
fn functions_on_the_device_must_not_call_it() {
    let d = device();
    let s = d.stream_create().unwrap();
    let refused = Arc::new(AtomicUsize::new(0));
    let (inner, count) = (d.clone(), refused.clone());
    d.launch_host(
        s,
        Arc::new(move |_| {
            for result in [
                inner.stream_synchronize(s),
                inner.memset(0, 0, 0, s),
                inner.stream_create().map(drop),
            ] {
                count.fetch_add(usize::from(result.is_err()), Ordering::Relaxed);
            }
        }),
    )
    .unwrap();
    d.stream_synchronize(s).unwrap();
    assert_eq!(refused.load(Ordering::Relaxed), 3);
}

#[test]
fn a_panic_on_the_device_is_a_fault_of_its_stream() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    d.launch_host(s, Arc::new(|_| panic!("on purpose"))).unwrap();
    let Err(DeviceError::Fault(text)) = d.stream_synchronize(s) else {
        panic!("no fault")
    };
    assert!(text.contains("on purpose"));
    assert!(matches!(d.stream_query(s), Err(DeviceError::Fault(_))));
    d.stream_synchronize(t).unwrap();
}

struct Told(AtomicU32);
impl Observer for Told {
    fn channel_started(&self, _: u32, _: u32, _: u8, _: When) {}
    fn channel_stopped(&self, _: u32, _: u32, _: u8, _: bool, _: When) {}
    fn mismatch(&self, _: u32, _: u32, _: u8, _: u32) {}
    fn launch_finished(&self, replay: u32, _: bool) {
        self.0.store(replay + 1, Ordering::Relaxed);
    }
}

struct Page([u64; 8 * 1024 / 8]);

/// A launch with one send of one byte over `wire`, or its receive.
fn message(function: Function, wire: &Arc<Fifo>, buffer: usize, observer: Arc<Told>) -> Arc<Launch> {
    let connections = match function {
        Function::Send => Connections::Send(wire.clone()),
        _ => Connections::Recv(wire.clone()),
    };
    let work = Work {
        op: 0,
        tag: 3,
        function,
        algorithm: Algorithm::Direct,
        data_type: DataType::Uint8,
        reduce_op: ReduceOp::None,
        scalar: Scalar::None,
        send: buffer,
        recv: buffer,
        count: 1,
        part: 0..1,
        rank: 0,
        ranks: 2,
        root: 0,
        connections,
        zero_copy: ZeroCopy::Off,
        pushes: false,
    };
    let channels = vec![ChannelWork {
        channel: 0,
        work: vec![work],
    }];
    Arc::new(Launch {
        peers: None,
        channels,
        abort: Arc::new(AbortWord::default()),
        observer,
    })
}

fn wire() -> Arc<Fifo> {
    let mut memory = Box::new(Page([0; 1024]));
    let base = memory.0.as_mut_ptr().cast::<u8>();
    let aligned = base.align_offset(128);
    let memory: Arc<dyn Send + Sync> = Arc::new(Mutex::new(memory));
    // SAFETY: 64 slots' bytes fit behind the header within 8 KiB, aligned, zeroed, kept by `memory`.
    Arc::new(unsafe { Fifo::new(base.add(aligned), 64, memory) })
}

#[test]
fn kernels_run_and_are_checked_first() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let (from, mut to) = (42_u8, 0_u8);
    let told = Arc::new(Told(AtomicU32::new(0)));
    let wire = wire();
    d.launch_kernel(
        t,
        message(Function::Recv, &wire, (&raw mut to) as usize, told.clone()),
        &mut None,
    )
    .unwrap();
    d.launch_kernel(
        s,
        message(Function::Send, &wire, (&raw const from) as usize, told.clone()),
        &mut None,
    )
    .unwrap();
    d.stream_synchronize(t).unwrap();
    d.stream_synchronize(s).unwrap();
    // SAFETY: the kernel that wrote it is done.
    assert_eq!(unsafe { (&raw const to).read_volatile() }, 42);
    assert_eq!(told.0.load(Ordering::Relaxed), 1);
    let bad = message(Function::AllGather, &wire, 0, told);
    assert!(is_usage(d.launch_kernel(s, bad, &mut None)).contains("needs a ring"));
}
