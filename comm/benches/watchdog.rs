//! The cost of the watchdog: of a call, and of its threads while nothing happens.
//!
//! `cargo bench -p ringsight-comm --bench watchdog` prints one line of JSON. `RINGSIGHT_WATCHDOG_SOURCE` chooses the source of
//! progress.
//!
//! | field | measured |
//! |---|---|
//! | `call_ns` | processor time of a call with the watchdog minus one without; median of `pairs` |
//! | `without_ns` | processor time of a call without the watchdog; median |
//! | `idle_percent` | processor time of the watchdog's threads while nothing happens, per cent of a core |
//! | `idle_adaptive_percent` | the same with adaptive thresholds |
//!
//! Two communicators of one rank, one watched and one not, are called in turns, a batch each, in an order that changes. The
//! stream is held meanwhile, so that the time is the calls' alone. The difference of a pair is free of what both have in
//! common.

use std::{
    env,
    ffi::c_int,
    fs,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    device::{Stream, runtime},
    error::ResultCode,
};

/// Calls of a batch: fewer than the work FIFO takes.
const BATCH: u32 = 200;
/// Pairs of batches, and pairs before them that do not count.
const PAIRS: usize = 500;
const WARM: usize = 50;
/// Communicators of one rank that do nothing, and for how long the threads are measured meanwhile.
const IDLE: usize = 8;
const IDLE_TIME: Duration = Duration::from_secs(10);
/// From the last call until nothing happens any more.
const SETTLES: Duration = Duration::from_secs(1);
/// `ncclFloat32`.
const FLOAT: c_int = 7;

fn ok(code: ResultCode) {
    assert_eq!(code, ResultCode::Success);
}

/// A communicator of one rank, with the watchdog or without.
fn communicator(watched: bool) -> Handle {
    // SAFETY: only this thread of the program uses the environment, and the library's threads read it only while a
    // communicator is being made.
    unsafe { env::set_var("NCCL_KERNEL_TIMEOUT_MS", if watched { "2000" } else { "0" }) };
    let (mut id, mut comm) = (UniqueIdBytes([0; 128]), Handle(0));
    // SAFETY: valid places.
    unsafe {
        ok(abi::ncclGetUniqueId(&raw mut id));
        ok(abi::ncclCommInitRank(&raw mut comm, 1, id, 0));
    }
    comm
}

/// Processor time of the calling thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Nanoseconds of a call: the mean of a batch, on a stream that is held meanwhile.
fn batch(comm: Handle, stream: Stream, data: &mut [f32]) -> f64 {
    let device = runtime().expect("host device");
    let (open, gate) = mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    device
        .launch_host(
            stream,
            Arc::new(move |_| {
                let _ = gate.lock().expect("nobody panics").recv();
            }),
        )
        .expect("stream");
    let at = data.as_mut_ptr().cast();
    let begin = thread_time();
    for _ in 0..BATCH {
        // SAFETY: the buffer lives until the stream is synchronized.
        ok(unsafe { abi::ncclAllReduce(at, at, data.len(), FLOAT, 0, comm, stream) });
    }
    let taken = thread_time() - begin;
    drop(open);
    device.stream_synchronize(stream).expect("stream");
    taken.as_nanos() as f64 / f64::from(BATCH)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Processor time of the watchdog's threads, and `None` if there are none.
fn watchdog_time() -> Option<Duration> {
    let times = fs::read_dir("/proc/self/task").ok()?.filter_map(|task| {
        let task = task.ok()?.path();
        let name = fs::read_to_string(task.join("comm")).ok()?;
        let times = fs::read_to_string(task.join("schedstat")).ok()?;
        let running = times.split_whitespace().next()?.parse().ok()?;
        matches!(name.trim(), "rs-watchdog" | "rs-events").then(|| Duration::from_nanos(running))
    });
    times.reduce(|sum, time| sum + time)
}

/// Processor time of the watchdog's threads while nothing happens, per cent of a core.
fn idle_percent() -> f64 {
    let (begin, before) = (Instant::now(), watchdog_time().expect("the watchdog's thread"));
    thread::sleep(IDLE_TIME);
    let running = watchdog_time().expect("the watchdog's thread") - before;
    100.0 * running.as_secs_f64() / begin.elapsed().as_secs_f64()
}

fn destroy(comms: impl IntoIterator<Item = Handle>) {
    for comm in comms {
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommDestroy(comm) });
    }
}

fn main() {
    // SAFETY: no other thread runs yet.
    unsafe { env::set_var("RINGSIGHT_DEVICE", "host") };
    let device = runtime().expect("host device");
    let stream = device.stream_create().expect("stream");
    let [on, off] = [true, false].map(communicator);
    let mut data = [1f32; 2];
    let (mut differences, mut without) = (Vec::new(), Vec::new());
    for pair in 0..WARM + PAIRS {
        // The first one of a pair may be at a disadvantage.
        let (first, second) = if pair % 2 == 0 { (on, off) } else { (off, on) };
        let times = [first, second].map(|comm| batch(comm, stream, &mut data));
        let (with, bare) = if pair % 2 == 0 {
            (times[0], times[1])
        } else {
            (times[1], times[0])
        };
        if pair >= WARM {
            differences.push(with - bare);
            without.push(bare);
        }
    }
    let idle: Vec<Handle> = (0..IDLE).map(|_| communicator(true)).collect();
    let percent = idle_percent();
    destroy(idle.into_iter().chain([on, off]));
    // SAFETY: as in `communicator`.
    unsafe { env::set_var("RINGSIGHT_ADAPTIVE_TIMEOUT", "20") };
    let adaptive: Vec<Handle> = (0..=IDLE).map(|_| communicator(true)).collect();
    for comm in &adaptive {
        batch(*comm, stream, &mut data);
    }
    // The watchdog has sampled the durations by then.
    thread::sleep(SETTLES);
    let adaptive_percent = idle_percent();
    destroy(adaptive);
    println!(
        "{{\"call_ns\":{:.1},\"without_ns\":{:.1},\"pairs\":{PAIRS},\"idle_percent\":{percent:.4},\
         \"idle_adaptive_percent\":{adaptive_percent:.4},\"idle_communicators\":{}}}",
        median(&mut differences),
        median(&mut without),
        IDLE + 1
    );
}
