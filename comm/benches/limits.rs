//! What all-reduce takes over processes of one node, against what the machine gives: copies for a large one, a flag's way
//! there and back for a small one.
//!
//! `cargo bench -p ringsight-comm --bench limits -- [ROUNDS] [large|small] [--json]`. Ranks are processes: this program
//! again, which takes commands from its parent. What is compared is measured in turns in the same run, on the same processes; every
//! figure is the median of its rounds. On a machine that does something else too, compare the ratios alone.
//!
//! - *Large*: float32 sum of 64 MiB over 4 processes, out of place in private memory, from the first rank's call to the
//!   last rank's synchronized stream; against two of these processes that copy 2 x 64 MiB each at the same time, from and
//!   to private memory of their own, which are as many bytes read and written as the ranks' buffers have. On a machine that
//!   is busy with something else, four processes are given more of it than two: there the processes' own times (user and
//!   system, all threads) compare better.
//! - *Small*: float32 sum of 8 B over 2 processes, each on a core of its own where there are two; against a flag that
//!   goes to the other process and back, each flag in a cache line of its own in shared memory. *On the stream* is an
//!   operation's part of a captured graph of 200, replayed; *of one rank* is the same where there is nobody to wait for: what
//!   it takes to run and record an operation at all; *call and synchronize* is one operation's latency as its caller sees it,
//!   with the caller's and the stream's thread handing over to each other twice.

use std::{
    env,
    ffi::{CStr, c_int},
    fmt::Write as _,
    fs::File,
    io::{self, BufRead, BufReader, Write},
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    device::{GraphExec, Runtime, Stream, runtime},
    error::ResultCode,
    observe::now_ns,
};

/// Bytes of the large all-reduce and of each copy.
const LARGE: usize = 64 << 20;
/// Bytes of the small all-reduce.
const SMALL: usize = 8;
/// Ranks of the large one.
const LARGE_RANKS: usize = 4;
/// Operations of the graph, and round trips that are measured together.
const BATCH: u64 = 200;
/// `ncclFloat32`.
const FLOAT: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;

/// What a worker is told by its environment: rank, ranks, descriptor of the flags' memory, unique id.
const WORKER: &str = "RINGSIGHT_BENCH_LIMITS";

fn ok(code: ResultCode) {
    // SAFETY: a C string that is valid until the next failing call.
    let text = || unsafe { CStr::from_ptr(abi::ncclGetLastError(Handle(0))) }.to_owned();
    assert_eq!(code, ResultCode::Success, "{:?}", text());
}

fn main() {
    // SAFETY: no other thread runs yet.
    unsafe {
        env::set_var("RINGSIGHT_DEVICE", "host");
        if env::var_os("NCCL_SOCKET_IFNAME").is_none() {
            env::set_var("NCCL_SOCKET_IFNAME", "lo");
        }
    }
    if let Ok(place) = env::var(WORKER) {
        return Worker::new(&place).serve();
    }
    let arguments: Vec<String> = env::args().skip(1).collect();
    let rounds = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(40);
    let json = arguments.iter().any(|argument| argument == "--json");
    let wanted = |name: &str, other: &str| {
        arguments.iter().any(|argument| argument == name)
            || arguments.iter().all(|argument| argument != other)
    };
    let mut figures = Vec::new();
    if wanted("large", "small") {
        figures.extend(large(rounds));
    }
    if wanted("small", "large") {
        figures.extend(small(rounds));
    }
    if json {
        let mut line = String::from("{");
        for (i, (name, value)) in figures.iter().enumerate() {
            let comma = if i > 0 { "," } else { "" };
            write!(line, "{comma}\"{name}\":{value}").expect("a string takes all");
        }
        println!("{line}}}");
    } else {
        for (name, value) in figures {
            println!("{name:<40} {value:>14.3}");
        }
    }
}

/// A name whose end is its unit, and a median.
type Figure = (&'static str, f64);

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The large all-reduce and the copies, each `rounds` times.
fn large(rounds: usize) -> Vec<Figure> {
    let mut job = Job::start(LARGE_RANKS);
    let (mut copies, mut reduces) = (Spans::default(), Spans::default());
    for _ in 0..rounds {
        job.span("copy", 2, &mut copies);
        job.span("reduce", LARGE_RANKS, &mut reduces);
    }
    let (copy, reduce) = (median(&copies.wall), median(&reduces.wall));
    vec![
        ("copy_256MiB_by_2_processes_ns", copy),
        ("all_reduce_64MiB_4_processes_ns", reduce),
        ("all_reduce_64MiB_ratio", reduce / copy),
        (
            "all_reduce_64MiB_cpu_ratio",
            median(&reduces.processor) / median(&copies.processor),
        ),
    ]
}

/// The small all-reduce and the flags; ten batches of each in a round.
fn small(rounds: usize) -> Vec<Figure> {
    let (mut job, mut alone) = (Job::start(2), Job::start(1));
    let (mut flags, mut replays, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    let mut replays_alone = Vec::new();
    for _ in 0..rounds {
        flags.extend(job.samples("flags"));
        replays.extend(job.samples("replay"));
        replays_alone.extend(alone.samples("replay"));
        calls.extend(job.samples("call"));
    }
    let (flag, replay, call) = (median(&flags), median(&replays), median(&calls));
    vec![
        ("flag_round_trip_ns", flag),
        ("all_reduce_8B_on_the_stream_ns", replay),
        ("all_reduce_8B_ratio", replay / flag),
        ("all_reduce_8B_of_one_rank_ns", median(&replays_alone)),
        ("all_reduce_8B_call_and_synchronize_ns", call),
    ]
}

/// Nanoseconds of rounds.
#[derive(Default)]
struct Spans {
    /// From the first worker's beginning to the last one's end.
    wall: Vec<f64>,
    /// Of all processes together.
    processor: Vec<f64>,
}

/// Processes that are the ranks of a communicator, and wait for commands.
struct Job {
    workers: Vec<(Child, ChildStdin, BufReader<ChildStdout>)>,
}

impl Job {
    fn start(ranks: usize) -> Self {
        let mut id = UniqueIdBytes([0; 128]);
        // SAFETY: a valid place.
        ok(unsafe { abi::ncclGetUniqueId(&raw mut id) });
        let id: String = id.0.iter().map(|byte| format!("{byte:02x}")).collect();
        let flags = Flags::create();
        let workers = (0..ranks)
            .map(|rank| {
                let mut child = Command::new(env::current_exe().expect("this program"))
                    .env(WORKER, format!("{rank} {ranks} {} {id}", flags.as_raw_fd()))
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .spawn()
                    .expect("a worker");
                let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
                let stdout = BufReader::new(stdout.expect("a pipe"));
                (child, stdin.expect("a pipe"), stdout)
            })
            .collect();
        let mut job = Self { workers };
        // Memory touched, connections made, results checked.
        job.ask("ready", ranks);
        job
    }

    /// Gives the first `ranks` workers a command; what each answers.
    fn ask(&mut self, command: &str, ranks: usize) -> Vec<Vec<f64>> {
        for (_, stdin, _) in &mut self.workers[..ranks] {
            writeln!(stdin, "{command}").expect("a worker that lives");
        }
        let answer = |stdout: &mut BufReader<ChildStdout>| {
            let mut line = String::new();
            let read = stdout.read_line(&mut line).expect("a worker's answer");
            assert!(read > 0, "a worker died");
            line.split_whitespace()
                .map(|word| word.parse().expect("a number"))
                .collect()
        };
        self.workers[..ranks]
            .iter_mut()
            .map(|(_, _, stdout)| answer(stdout))
            .collect()
    }

    /// Lets the first `ranks` workers do something once.
    fn span(&mut self, command: &str, ranks: usize, spans: &mut Spans) {
        let answers = self.ask(command, ranks);
        let begin = answers
            .iter()
            .map(|answer| answer[0])
            .fold(f64::INFINITY, f64::min);
        let end = answers.iter().map(|answer| answer[1]).fold(0.0, f64::max);
        spans.wall.push(end - begin);
        spans.processor.push(answers.iter().map(|answer| answer[2]).sum());
    }

    /// What the first worker measured while all do the same.
    fn samples(&mut self, command: &str) -> Vec<f64> {
        self.ask(command, self.workers.len()).swap_remove(0)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for (mut child, stdin, _) in self.workers.drain(..) {
            // The end of its commands.
            drop(stdin);
            let status = child.wait();
            if !std::thread::panicking() {
                assert!(status.expect("a child").success(), "a worker failed");
            }
        }
    }
}

/// Two flags in shared memory, in cache lines of their own that are no neighbours: processors fetch lines in pairs.
struct Flags(*mut AtomicU64);

impl Flags {
    const BYTES: usize = 4096;

    /// Memory that children inherit.
    fn create() -> OwnedFd {
        // SAFETY: a C string; the result is checked.
        let fd = unsafe { libc::memfd_create(c"flags".as_ptr(), 0) };
        assert!(fd >= 0, "memfd: {}", io::Error::last_os_error());
        // SAFETY: a new descriptor that nobody else owns.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let file = File::from(fd);
        file.set_len(Self::BYTES as u64).expect("a page");
        file.into()
    }

    fn map(fd: RawFd) -> Self {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping of the inherited memory, at an address of the kernel's choice.
        let base = unsafe { libc::mmap(ptr::null_mut(), Self::BYTES, protection, libc::MAP_SHARED, fd, 0) };
        assert_ne!(base, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self(base.cast())
    }

    fn flag(&self, which: usize) -> &AtomicU64 {
        // SAFETY: two of the page's lines; the mapping is never removed.
        unsafe { &*self.0.add(which * 64) }
    }
}

/// One rank.
struct Worker {
    rank: usize,
    comm: Handle,
    stream: Stream,
    device: &'static Arc<dyn Runtime>,
    flags: Flags,
    /// The last value of the flags.
    turn: u64,
    /// From where and to where ranks reduce, and from where and to where the copying ones copy after that.
    buffers: Vec<Vec<f32>>,
    graph: GraphExec,
}

impl Worker {
    fn new(place: &str) -> Self {
        let words: Vec<&str> = place.split(' ').collect();
        let number = |word: usize| words[word].parse::<usize>().expect("a number");
        let (rank, ranks) = (number(0), number(1));
        let mut id = UniqueIdBytes([0; 128]);
        for (byte, digits) in id.0.iter_mut().zip(words[3].as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).expect("digits");
            *byte = u8::from_str_radix(digits, 16).expect("digits");
        }
        if ranks <= 2 {
            // Before there are other threads, which inherit it.
            pin(rank);
        }
        let device = runtime().expect("host device");
        let mut comm = Handle(0);
        // SAFETY: a valid place.
        ok(unsafe { abi::ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int) });
        let (bytes, buffers) = match (ranks, rank) {
            (1 | 2, _) => (SMALL, 2),
            (_, 0 | 1) => (LARGE, 4),
            _ => (LARGE, 2),
        };
        let mut worker = Self {
            rank,
            comm,
            stream: device.stream_create().expect("a stream"),
            device,
            flags: Flags::map(number(2) as RawFd),
            turn: 0,
            // Every page is written to.
            buffers: (0..buffers).map(|_| vec![1.5; bytes / 4]).collect(),
            graph: GraphExec(0),
        };
        worker.reduce();
        worker.synchronize();
        assert!(worker.buffers[1].iter().all(|sum| *sum == 1.5 * ranks as f32));
        if ranks <= 2 {
            worker.capture();
        }
        worker
    }

    /// Until the parent ends.
    fn serve(mut self) {
        for line in io::stdin().lines() {
            let answer = match line.expect("a command").as_str() {
                "ready" => Vec::new(),
                "copy" => self.between(|worker| {
                    let (one, two) = worker.buffers.split_at_mut(2);
                    for pair in [one, two] {
                        let (from, to) = pair.split_at_mut(1);
                        to[0].copy_from_slice(&from[0]);
                    }
                }),
                "reduce" => self.between(|worker| {
                    worker.reduce();
                    worker.synchronize();
                }),
                "flags" => (0..10).map(|_| self.flags()).collect(),
                "replay" => (0..10).map(|_| self.replay()).collect(),
                "call" => (0..10).map(|_| self.call()).collect(),
                other => panic!("unknown command {other}"),
            };
            let answer: Vec<String> = answer.iter().map(f64::to_string).collect();
            println!("{}", answer.join(" "));
        }
        if self.graph.0 != 0 {
            self.device.graph_exec_destroy(self.graph).expect("a graph");
        }
        self.device.stream_destroy(self.stream).expect("a stream");
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommDestroy(self.comm) });
    }

    /// When something began and ended, on the clock that all processes share, and how long this process ran for it.
    fn between(&mut self, what: impl FnOnce(&mut Self)) -> Vec<f64> {
        let (begin, ran) = (now_ns(), processor_ns());
        what(self);
        vec![begin as f64, now_ns() as f64, processor_ns() - ran]
    }

    fn reduce(&mut self) {
        let (from, to) = (self.buffers[0].as_ptr(), self.buffers[1].as_mut_ptr());
        let (count, comm, stream) = (self.buffers[0].len(), self.comm, self.stream);
        // SAFETY: the buffers live until the stream is synchronized.
        ok(unsafe { abi::ncclAllReduce(from.cast(), to.cast(), count, FLOAT, SUM, comm, stream) });
    }

    fn synchronize(&self) {
        self.device.stream_synchronize(self.stream).expect("a stream");
    }

    fn capture(&mut self) {
        self.device.capture_begin(self.stream).expect("a capture");
        (0..BATCH).for_each(|_| self.reduce());
        let graph = self.device.capture_end(self.stream).expect("a graph");
        self.graph = self.device.graph_instantiate(graph).expect("an instance");
        self.device.graph_destroy(graph).expect("a graph");
    }

    /// Nanoseconds of a flag's way there and back, over a batch of them.
    fn flags(&mut self) -> f64 {
        // Nobody is late any more once the first one is back.
        let wait = |flag: usize, turn: u64| while self.flags.flag(flag).load(Ordering::Acquire) != turn {};
        let set = |flag: usize, turn: u64| self.flags.flag(flag).store(turn, Ordering::Release);
        let turns = self.turn + 1..=self.turn + 1 + BATCH;
        let mut begin = Instant::now();
        for turn in turns.clone() {
            if self.rank == 0 {
                set(0, turn);
                wait(1, turn);
            } else {
                wait(0, turn);
                set(1, turn);
            }
            if turn == *turns.start() {
                begin = Instant::now();
            }
        }
        let taken = begin.elapsed();
        self.turn = *turns.end();
        taken.as_nanos() as f64 / BATCH as f64
    }

    /// Nanoseconds of an operation on the stream, over the graph's.
    fn replay(&mut self) -> f64 {
        let device = self.device;
        let (start, end) = (device.event_create(), device.event_create());
        let (start, end) = (start.expect("an event"), end.expect("an event"));
        let launch = || device.graph_launch(self.graph, self.stream).expect("a replay");
        // While the first replay runs, the rest is put behind it.
        launch();
        device.event_record(start, self.stream).expect("an event");
        launch();
        device.event_record(end, self.stream).expect("an event");
        self.synchronize();
        let taken = device.event_elapsed(start, end).expect("two events");
        for event in [start, end] {
            device.event_destroy(event).expect("an event");
        }
        taken.as_nanos() as f64 / BATCH as f64
    }

    /// Nanoseconds of one operation from its call to its synchronized stream.
    fn call(&mut self) -> f64 {
        let begin = Instant::now();
        self.reduce();
        self.synchronize();
        begin.elapsed().as_nanos() as f64
    }
}

/// Nanoseconds that this process has run, all its threads together.
fn processor_ns() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Keeps this process on its own core of those that it may use, as far as there are enough.
fn pin(rank: usize) {
    // SAFETY: all-zero bytes are an empty set, and the calls write and read no more than it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(libc::sched_getaffinity(0, size_of_val(&set), &raw mut set), 0);
        let allowed: Vec<usize> = (0..libc::CPU_SETSIZE as usize)
            .filter(|core| libc::CPU_ISSET(*core, &set))
            .collect();
        let mut own: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(allowed[rank % allowed.len()], &mut own);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&own), &raw const own), 0);
    }
}
