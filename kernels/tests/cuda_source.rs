//! The kernel's source, compiled for the host's processor: the same cases as for the host device, each block on a thread.
//! What this does not show is what a GPU's memory model and its many threads a block add.

#[path = "common/programs/mod.rs"]
mod cases;
#[path = "../../tests/src/compile.rs"]
mod compile;

use std::{
    mem,
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    thread,
    time::Duration,
};

use ringsight_kernels::{
    ChannelWork, Connections, Fifo, Launch, Observer, When, Work,
    cuda::{
        Arguments, CAPTURED, EventKind, Head, LaunchControl, LaunchState, Program, RING_ENTRIES, Ring,
        program::runs, ring::Entry,
    },
};
use ringsight_records::{Algorithm, Function, Phase, Waits};

type RunBlock =
    unsafe extern "C" fn(arguments: *const Arguments, index: u32, blocks: u32, ops: u32, reduces: bool);

/// The entry of `cuda/on_host.cpp`.
fn run_block() -> RunBlock {
    static ENTRY: OnceLock<(libloading::Library, RunBlock)> = OnceLock::new();
    let (_, entry) = ENTRY.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("on_host.so");
        compile::compile(
            Command::new("g++")
                .args([
                    "-std=c++17",
                    "-O2",
                    "-Wall",
                    "-Wextra",
                    "-Werror",
                    "-ffp-contract=off",
                    "-fPIC",
                    "-shared",
                ])
                .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/on_host.cpp")),
            &library,
        );
        // SAFETY: just built from our source; it has no initialisers. The symbol has this signature.
        unsafe {
            let library = libloading::Library::new(&library).unwrap();
            let entry = *library.get::<RunBlock>(b"ringsight_run_block\0").unwrap();
            let entries = library
                .get::<extern "C" fn() -> u32>(b"ringsight_ring_entries\0")
                .unwrap();
            assert_eq!(entries() as usize, RING_ENTRIES);
            (library, entry)
        }
    });
    *entry
}

/// An address that another thread may use.
struct Shared<T>(*const T);
// SAFETY: what is shared this way outlives the threads, and the kernel accesses it with atomics or not at all.
unsafe impl<T> Send for Shared<T> {}

/// Runs a launch as [`ringsight_kernels::host::run`] does.
fn run(launch: &Launch, replay: u32) {
    let program = Program::new(launch).unwrap();
    let outside: Option<Vec<u64>> = program.outside().map(|bytes| {
        bytes
            .chunks(8)
            .map(|chunk| {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                u64::from_le_bytes(word)
            })
            .collect()
    });
    // As if the launch had been replayed before.
    let runs_before = 7_u32;
    let runs = runs_before.wrapping_add(replay.saturating_sub(1));
    let mut state = LaunchState {
        runs,
        ..LaunchState::default()
    };
    let number = if replay == 0 { 5 } else { CAPTURED | 5 };
    let (control, mut ticket) = (LaunchControl::default(), 0_u64);
    let entries: Vec<Entry> = (0..RING_ENTRIES).map(|_| Entry::default()).collect();
    let arguments = Arguments {
        head: Head {
            states: &raw mut state as u64,
            controls: &raw const control as u64,
            ring: entries.as_ptr() as u64,
            ring_ticket: &raw mut ticket as u64,
            slot: 0,
            launch: number,
            runs_before,
            op: 0,
        },
        ..program.arguments(outside.as_ref().map_or(0, |words| words.as_ptr() as u64))
    };
    let (entry, blocks, ops) = (run_block(), program.blocks(), program.ops());
    let reduces = program.reduces();
    let mut ring = Ring::new(&entries);
    let mut moved = 0;
    let mut drain = || {
        while let Some(event) = ring.next_event() {
            assert_eq!((event.launch, event.replay), (number, replay));
            let (op, channel, observer) = (event.op, event.channel, &launch.observer);
            // The timer is the host's clock here.
            let when = When::At {
                timer_ns: event.value,
                host_ns: event.value,
            };
            match event.kind {
                EventKind::Started => observer.channel_started(op, replay, channel, when),
                EventKind::Stopped => observer.channel_stopped(op, replay, channel, false, when),
                EventKind::Aborted => observer.channel_stopped(op, replay, channel, true, when),
                EventKind::Mismatch => observer.mismatch(op, replay, channel, event.value as u32),
            }
        }
        assert_eq!(ring.lost(), 0);
        let now = control.moved.load(Ordering::Relaxed);
        if mem::replace(&mut moved, now) != now {
            launch.observer.moved();
        }
        if let Some(waits) = Waits::of(control.waits.load(Ordering::Relaxed)) {
            launch.observer.waits(waits);
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..blocks)
            .map(|index| {
                let arguments = Shared(&raw const arguments);
                scope.spawn(move || {
                    let arguments = arguments;
                    // SAFETY: the arguments and all that they refer to live until this scope ends.
                    unsafe { entry(arguments.0, index, blocks, ops, reduces) };
                })
            })
            .collect();
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            if launch.abort.is_set() {
                control.abort.store(1, Ordering::Release);
            }
            drain();
            thread::sleep(Duration::from_micros(20));
        }
    });
    drain();
    if blocks > 0 {
        assert_eq!(control.runs.load(Ordering::Acquire), runs + 1);
    }
    launch
        .observer
        .launch_finished(replay, control.aborted.load(Ordering::Relaxed) != 0);
}

#[test]
fn an_algorithm_without_a_program_is_refused() {
    let launch = |algorithm| Launch {
        peers: None,
        channels: vec![ChannelWork {
            channel: 0,
            work: vec![Work {
                algorithm,
                ..cases::p2p(7, Function::AllReduce, 0, 10, Connections::Local)
            }],
        }],
        abort: Arc::default(),
        observer: Arc::new(cases::Log::default()),
    };
    for algorithm in Algorithm::ALL {
        match Program::new(&launch(*algorithm)) {
            Ok(_) => assert!(runs(*algorithm)),
            Err(error) => {
                let name = algorithm.name();
                assert!(!runs(*algorithm));
                assert_eq!(
                    error.to_string(),
                    format!("op 7 (all_reduce): kernels of GPUs have no {name} program")
                );
            }
        }
    }
}

#[test]
fn long_messages_arrive_in_a_block_of_their_own() {
    let (there, back) = (cases::fifo(4096), cases::fifo(4096));
    let launch = |bytes: usize, send: usize, recv: usize, ops: [u32; 2], wires: [&Arc<Fifo>; 2]| Launch {
        peers: None,
        channels: vec![ChannelWork {
            channel: 3,
            work: vec![
                cases::p2p(
                    ops[0],
                    Function::Recv,
                    recv,
                    bytes,
                    Connections::Recv(wires[1].clone()),
                ),
                cases::p2p(
                    ops[1],
                    Function::Send,
                    send,
                    bytes,
                    Connections::Send(wires[0].clone()),
                ),
            ],
        }],
        abort: Arc::default(),
        observer: Arc::new(cases::Log::default()),
    };
    let blocks = |bytes, ops| {
        let launch = launch(bytes, 0, 0, ops, [&there, &back]);
        Program::new(&launch).unwrap().blocks()
    };
    assert_eq!(blocks(10_000, [1, 2]), 1, "short ones");
    assert_eq!(blocks(100_000, [1, 1]), 1, "of one operation");
    assert_eq!(blocks(100_000, [1, 2]), 2);
    let ranks: Vec<_> = [[&there, &back], [&back, &there]]
        .into_iter()
        .zip([3_u8, 5])
        .map(|(wires, seed)| {
            let wires = wires.map(Arc::clone);
            thread::spawn(move || {
                let send: Vec<u8> = (0..100_000_usize).map(|at| (at / 7) as u8 ^ seed).collect();
                let mut recv = vec![0_u8; send.len()];
                let at = (send.as_ptr() as usize, recv.as_mut_ptr() as usize);
                run(&launch(send.len(), at.0, at.1, [1, 2], [&wires[0], &wires[1]]), 0);
                (send, recv)
            })
        })
        .collect();
    let [one, other] = ranks
        .into_iter()
        .map(|rank| rank.join().unwrap())
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    assert!(one.0 == other.1 && other.0 == one.1);
}

/// What the watchdog is told of a launch while it runs.
#[derive(Default)]
struct Told {
    moves: AtomicU32,
    waits: Mutex<Vec<Waits>>,
}

impl Observer for Told {
    fn channel_started(&self, _op: u32, _replay: u32, _channel: u8, _when: When) {}
    fn channel_stopped(&self, _op: u32, _replay: u32, _channel: u8, _aborted: bool, _when: When) {}
    fn moved(&self) {
        self.moves.fetch_add(1, Ordering::Relaxed);
    }
    fn waits(&self, waits: Waits) {
        let mut all = self.waits.lock().unwrap();
        if all.last() != Some(&waits) {
            all.push(waits);
        }
    }
    fn mismatch(&self, op: u32, _replay: u32, _channel: u8, _theirs: u32) {
        panic!("op {op} differs");
    }
    fn launch_finished(&self, _replay: u32, _aborted: bool) {}
}

#[test]
fn who_waits_long_says_what_for_and_who_moves_much_says_so() {
    let wire = cases::fifo(4096);
    let start = |observer: &Arc<Told>, function, connections: Connections| {
        let observer = observer.clone();
        thread::spawn(move || {
            // 25 slots.
            let mut bytes = vec![0_u8; 100_000];
            let work = cases::p2p(
                0x1_0007,
                function,
                bytes.as_mut_ptr() as usize,
                bytes.len(),
                connections,
            );
            let launch = Launch {
                peers: None,
                channels: vec![ChannelWork {
                    channel: 3,
                    work: vec![work],
                }],
                abort: Arc::default(),
                observer,
            };
            run(&launch, 0);
        })
    };
    let await_one = |told: &Told, wanted: Waits| {
        while !told.waits.lock().unwrap().contains(&wanted) {
            thread::yield_now();
        }
    };
    let (sends, receives) = (Arc::new(Told::default()), Arc::new(Told::default()));
    let room = Waits {
        op: 7,
        channel: 3,
        phase: Phase::Room,
        peer: None,
        step: 9,
    };
    let sender = start(&sends, Function::Send, Connections::Send(wire.clone()));
    await_one(&sends, room);
    let more = start(&receives, Function::Recv, Connections::Recv(wire.clone()));
    sender.join().unwrap();
    more.join().unwrap();
    // The other way round.
    let late = start(&receives, Function::Recv, Connections::Recv(wire.clone()));
    let data = Waits {
        phase: Phase::Data,
        step: 1,
        ..room
    };
    await_one(&receives, data);
    start(&sends, Function::Send, Connections::Send(wire))
        .join()
        .unwrap();
    late.join().unwrap();
    for told in [sends, receives] {
        assert!(told.moves.load(Ordering::Relaxed) > 0);
    }
}
