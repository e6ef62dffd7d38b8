//! Random content without end: records and pages of a library that has lost its mind, and files that have the name of its pages.
//!
//! What comes follows from a seed, but for times and for what the collector writes into the same pages.

use std::{
    collections::VecDeque,
    ffi::CString,
    fmt,
    fs::File,
    os::{
        fd::{AsRawFd as _, FromRawFd as _},
        unix::{ffi::OsStrExt as _, fs::FileExt as _},
    },
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use ringsight_records::{
    Algorithm, Carrier, Cause, DataType, Description, Flags, Function, Kind, PROBE_SYMBOLS, PathChange,
    Protocol, Record, ReduceOp, State, VERSION,
    pages::{CAPTURED, Header, MEMFD_NAME, put_text},
    ring,
};
use ringsight_testbed::random::Random;

use crate::{
    Act, map_library,
    pages::{Own, now_ns},
};

/// A probe function of the library.
type Probe = unsafe extern "C" fn(*const Record) -> libc::c_int;

/// The states that some kind of record has.
const STATES: [State; 24] = [
    State::START,
    State::STOP,
    State::ABORTED,
    State::STEP_SEND_GPU_WAIT,
    State::STEP_SEND_WAIT,
    State::STEP_RECV_WAIT,
    State::STEP_RECV_FLUSH_WAIT,
    State::STEP_RECV_GPU_WAIT,
    State::STEP_SEND_PEER_WAIT,
    State::CTRL_IDLE,
    State::CTRL_ACTIVE,
    State::CTRL_SLEEP,
    State::CTRL_WAKEUP,
    State::CTRL_APPEND,
    State::CTRL_APPEND_END,
    State::OP_IN_PROGRESS,
    State::NET_PLUGIN_UPDATE,
    State::KERNEL_CH_STOP,
    State::GROUP_START_API_STOP,
    State::GROUP_END_API_START,
    State::PATH_SWITCHED,
    State::PATH_RECOVERED,
    State::PATH_RESTORED,
    State(0),
];

/// How much was written.
#[derive(Debug, Default)]
struct Written {
    records: AtomicU64,
    /// Entries of tables, and single words.
    entries: AtomicU64,
    /// Calls of probe functions.
    calls: AtomicU64,
    files: AtomicU64,
}

impl fmt::Display for Written {
    /// `records entries calls files`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts = [&self.records, &self.entries, &self.calls, &self.files];
        let counts = counts.map(|count| count.load(Ordering::Relaxed).to_string());
        f.write_str(&counts.join(" "))
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Begins to write when a line gives a seed and the id of another job's communicator. An empty line asks how much was written.
pub(crate) fn records(library: &Path) -> Result<Act> {
    let probes = load(library)?;
    let written = Arc::new(Written::default());
    let mut threads = Vec::new();
    Ok(Box::new(move |line| {
        if let Some((seed, other)) = line.split_once(' ') {
            let writer = Writer {
                pages: Own::make()?,
                random: Random::new(seed.parse()?),
                other: u64::from_str_radix(other, 16)?,
                op: 0,
                probes: probes.clone(),
                written: Arc::clone(&written),
            };
            let sound = writer.pages.header_words();
            threads.push(thread::spawn(move || writer.run(&sound)));
        }
        ensure!(!threads.iter().any(JoinHandle::is_finished), "a writer has ended");
        Ok(written.to_string())
    }))
}

/// Loads the library as a program does, and looks its probe functions up.
fn load(library: &Path) -> Result<Vec<Probe>> {
    let path = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: a string that lives across the call; our own library, which does nothing when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    ensure!(!handle.is_null(), "dlopen {}", library.display());
    let probe = |name: &&str| {
        let name = CString::new(*name)?;
        // SAFETY: a handle of `dlopen` that is never closed.
        let place = unsafe { libc::dlsym(handle, name.as_ptr()) };
        ensure!(!place.is_null(), "dlsym {name:?}");
        // SAFETY: library.c declares each of them so.
        Ok(unsafe { std::mem::transmute::<*mut libc::c_void, Probe>(place) })
    };
    PROBE_SYMBOLS.iter().map(probe).collect()
}

/// Plain data of random bytes.
///
/// # Safety
/// Every bit pattern is a value of `T`.
unsafe fn noise<T: Copy>(random: &mut Random) -> T {
    let bytes: Vec<u8> = (0..size_of::<T>().div_ceil(8))
        .flat_map(|_| random.bits().to_ne_bytes())
        .collect();
    // SAFETY: that many bytes, and the caller's promise.
    unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }
}

/// A number that code may have a boundary at, or any.
fn number(random: &mut Random) -> u64 {
    match random.below(8) {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << random.below(64),
        3 => random.below(16),
        4 => now_ns(),
        5 => now_ns().wrapping_sub(random.below(1_000_000_000)),
        6 => now_ns().wrapping_add(random.below(1_000_000_000)),
        _ => random.bits(),
    }
}

/// One of `choices`.
fn one<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[random.below(choices.len() as u64) as usize]
}

/// What writes records and pages.
struct Writer {
    pages: Own,
    random: Random,
    /// The other job's communicator.
    other: u64,
    /// The last operation that was described.
    op: u32,
    probes: Vec<Probe>,
    written: Arc<Written>,
}

impl Writer {
    /// Writes in bursts: some fill the ring, some are a few records. `sound` is the header that the library would have made.
    fn run(mut self, sound: &[u64]) {
        loop {
            if self.random.below(4) > 0 {
                self.pages.mend_header(sound);
            }
            for _ in 0..1 << self.random.below(17) {
                self.act();
            }
            thread::sleep(Duration::from_millis(self.random.below(20)));
        }
    }

    fn act(&mut self) {
        let counter = match self.random.below(1000) {
            0..600 => {
                let record = self.record();
                self.push(&record)
            }
            600..700 => {
                // SAFETY: every bit pattern is an array of bytes.
                let bytes: [u8; 64] = unsafe { noise(&mut self.random) };
                self.push(&Record::from_bytes(&bytes))
            }
            700..800 => self.describe(),
            800..850 => {
                self.op = self.op.wrapping_add(1);
                self.pages.operation(self.op);
                &self.written.records
            }
            850..950 => self.enter(),
            950..995 => self.call(),
            _ => self.stray(),
        };
        count(counter);
    }

    /// A record into the ring: of a kind that the collector wants, or all the same.
    fn push(&mut self, record: &Record) -> &AtomicU64 {
        let pages = self.pages.view();
        let header = pages.header();
        let is_wanted = record.kind().is_some_and(|kind| header.lease.wants(kind));
        if is_wanted || self.random.below(16) == 0 {
            // A ring that is full loses it.
            let _ = ring::push(&header.cursor, pages.ring(), record);
        }
        &self.written.records
    }

    /// A communicator: its own, the other job's, one of some thousands, or any.
    fn comm(&mut self) -> u64 {
        match self.random.below(8) {
            0..4 => 7,
            4 => self.other,
            5 | 6 => self.random.below(5000),
            _ => number(&mut self.random),
        }
    }

    /// An operation: one of few, so that records meet, one that was described just now, or any.
    fn op(&mut self) -> u32 {
        match self.random.below(8) {
            0..3 => self.random.below(64) as u32,
            3..5 => CAPTURED | self.random.below(64) as u32,
            5 | 6 => self.op.wrapping_sub(self.random.below(16) as u32),
            _ => self.random.bits() as u32,
        }
    }

    fn rank(&mut self) -> u32 {
        match self.random.below(4) {
            0..2 => self.random.below(4) as u32,
            2 => self.random.below(2000) as u32,
            _ => number(&mut self.random) as u32,
        }
    }

    /// A record that a library could have written, in an order in which none would.
    fn record(&mut self) -> Record {
        let kind = one(&mut self.random, Kind::ALL);
        let state = match self.random.below(2) {
            0 => one(&mut self.random, &STATES[..2]),
            _ => one(&mut self.random, &STATES),
        };
        let value = match (kind, self.random.below(4)) {
            (_, 0) => number(&mut self.random),
            (Kind::Verdict, _) => {
                let cause = one(&mut self.random, Cause::ALL);
                u64::from(cause.code()) << 32 | u64::from(self.rank())
            }
            (Kind::NetPlugin, _) => Carrier {
                port: Some(self.random.below(4) as u8),
                number: self.random.below(64) as u32,
                step: self.random.below(64) as u32,
            }
            .to_value(),
            (Kind::Failover, _) => PathChange::from_value(self.random.bits()).to_value(),
            (Kind::ProxyOp, _) => Record::pack_proxy_op_shape(self.random.below(100) as u32, 4096),
            (Kind::ProxyStep | Kind::GroupApi, _) => self.random.below(16),
            _ => now_ns(),
        };
        let time_ns = match self.random.below(8) {
            0 => number(&mut self.random),
            _ => now_ns(),
        };
        Record {
            time_ns,
            comm: self.comm(),
            seq: self.random.below(5000),
            bytes: number(&mut self.random),
            value,
            op: self.op(),
            replay: self.random.below(3) as u32,
            rank: self.rank(),
            peer: self.rank().cast_signed(),
            pid: std::process::id(),
            kind: kind as u8,
            state,
            channel: self.random.below(80) as u8,
            version_flags: VERSION << 4 | self.random.below(16) as u8,
        }
    }

    /// The description of an operation.
    fn describe(&mut self) -> &AtomicU64 {
        // SAFETY: plain integers.
        let noise: Description = unsafe { noise(&mut self.random) };
        let op = self.op();
        let slot = self.pages.view().slot(op);
        if self.random.below(8) == 0 {
            slot.write(&Description { op, ..noise });
            return &self.written.entries;
        }
        let random = &mut self.random;
        let description = Description {
            function: one(random, Function::ALL).code(),
            data_type: one(random, DataType::ALL).code(),
            reduce_op: one(random, ReduceOp::ALL).code(),
            algorithm: one(random, Algorithm::ALL).code(),
            protocol: one(random, Protocol::ALL).code(),
            ranks: one(random, &[1, 2, 4, 1000, u32::MAX]),
            group: random.below(5000) as u32,
            group_depth: random.below(4) as u32,
            graph: random.below(2000) as u32,
            node: random.below(64) as u32,
            seq: random.below(5000),
            flags: random.below(16) as u8 & !Flags::REGISTERED.0,
            api_start_ns: number(random),
            api_end_ns: number(random),
            launch_start_ns: number(random),
            launch_end_ns: number(random),
            device_start_ns: number(random),
            device_end_ns: number(random),
            op,
            ..noise
        };
        slot.write(&Description {
            comm: self.comm(),
            rank: self.rank(),
            peer: self.rank().cast_signed(),
            root: self.rank().cast_signed(),
            ..description
        });
        &self.written.entries
    }

    /// An entry of one of the other tables: taken, changed or given back.
    fn enter(&mut self) -> &AtomicU64 {
        let pages = self.pages.view();
        let random = &mut self.random;
        match random.below(5) {
            0 => {
                let slot = &pages.communicators()[random.below(1024) as usize];
                if random.below(2) == 0 {
                    slot.free();
                } else {
                    // SAFETY: plain integers.
                    let mut communicator: ringsight_records::pages::Communicator = unsafe { noise(random) };
                    if random.below(2) == 0 {
                        put_text(&mut communicator.name, "random");
                        put_text(&mut communicator.apart, "all");
                    }
                    (communicator.ranks, communicator.init_start_ns) =
                        (one(random, &[1, 2, 4, u32::MAX]), now_ns());
                    (communicator.id, communicator.rank) = (self.comm(), self.rank());
                    // A slot that is taken stays as it is.
                    let _ = slot.claim(&communicator);
                }
            }
            1 => {
                // SAFETY: plain integers.
                pages.keep_verdict(&unsafe { noise(random) });
            }
            2 => {
                let slot = &pages.connections()[random.below(1024) as usize];
                match random.below(3) {
                    0 => slot.free(),
                    // SAFETY: plain integers.
                    _ => slot.write(&unsafe { noise(random) }),
                }
            }
            3 => {
                let slot = &pages.proxies()[random.below(1024) as usize];
                match random.below(4) {
                    0 => slot.free(),
                    1 => slot.rest(),
                    2 => slot.move_to(random.below(64) as u32, random.below(64) as u32),
                    // SAFETY: plain integers.
                    _ => slot.begin(&unsafe { noise(random) }),
                }
            }
            _ => {
                let slot = &pages.header().devices[random.below(16) as usize];
                slot.overwritten.store(number(random), Ordering::Relaxed);
                // SAFETY: plain integers.
                slot.write(&unsafe { noise(random) });
            }
        }
        &self.written.entries
    }

    /// Calls a probe function, mostly with a record; else with some address.
    fn call(&mut self) -> &AtomicU64 {
        let probe = one(&mut self.random, &self.probes);
        let record = self.record();
        let place = match self.random.below(16) {
            0 => number(&mut self.random) as *const Record,
            _ => &raw const record,
        };
        // SAFETY: the functions of library.c do not look at what they are given.
        unsafe { probe(place) };
        &self.written.calls
    }

    /// Any word of the pages, one of the header each second time.
    fn stray(&mut self) -> &AtomicU64 {
        let bytes = match self.random.below(2) {
            0 => size_of::<Header>(),
            _ => self.pages.view().geometry().file_bytes,
        };
        let at = self.random.below(bytes as u64 / 8) as usize;
        let value = number(&mut self.random);
        self.pages.word(at).store(value, Ordering::Relaxed);
        &self.written.entries
    }
}

/// Begins to make files when a line gives a seed. An empty line asks how many were made.
pub(crate) fn files(library: &Path) -> Result<Act> {
    map_library(library)?;
    let written = Arc::new(Written::default());
    let mut threads = Vec::new();
    Ok(Box::new(move |line| {
        if !line.is_empty() {
            let random = Random::new(line.parse()?);
            let sound: Vec<u8> = Own::make()?
                .header_words()
                .into_iter()
                .flat_map(u64::to_ne_bytes)
                .collect();
            let written = Arc::clone(&written);
            threads.push(thread::spawn(move || make_files(random, &sound, &written)));
        }
        ensure!(!threads.iter().any(JoinHandle::is_finished), "a writer has ended");
        Ok(written.to_string())
    }))
}

/// Makes memory files of any size, sealed against anything, that begin with `sound` pages, changed in some places, or with noise.
fn make_files(mut random: Random, sound: &[u8], written: &Written) {
    let random = &mut random;
    let mut kept = VecDeque::new();
    loop {
        // Out of memory or descriptors, the next one may be made.
        if let Ok(file) = make_file(random, sound) {
            kept.push_back(file);
            count(&written.files);
        }
        while kept.len() as u64 > random.below(9) {
            kept.pop_front();
        }
        if let Some(file) = kept.front() {
            // Sealed ones refuse.
            let _ = file.write_at(&random.bits().to_ne_bytes(), random.below(16_384));
        }
        thread::sleep(Duration::from_millis(random.below(5)));
    }
}

fn make_file(random: &mut Random, sound: &[u8]) -> Result<File> {
    let whole = ringsight_records::pages::Geometry::standard().file_bytes as u64;
    let name = one(
        random,
        &[MEMFD_NAME, MEMFD_NAME, MEMFD_NAME, "ringsight-page", ""],
    );
    let name = CString::new(name).context("a name")?;
    let flags = one(
        random,
        &[
            0,
            libc::MFD_ALLOW_SEALING,
            libc::MFD_ALLOW_SEALING,
            libc::MFD_HUGETLB,
        ],
    );
    // SAFETY: a string that lives across the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags) };
    ensure!(fd >= 0, "memfd_create");
    // SAFETY: the kernel just returned this descriptor, and nobody else has it.
    let file = unsafe { File::from_raw_fd(fd) };
    let sizes = [
        0,
        1,
        4095,
        8192,
        whole - 4096,
        whole,
        whole,
        whole,
        2 * whole,
        1 << 40,
    ];
    file.set_len(one(random, &sizes))?;
    let mut header = sound.to_vec();
    match random.below(4) {
        0 => {}
        1 => header.fill_with(|| random.bits() as u8),
        _ => {
            for _ in 0..=random.below(3) {
                let at = random.below(header.len() as u64 / 8) as usize * 8;
                header[at..at + 8].copy_from_slice(&number(random).to_ne_bytes());
            }
        }
    }
    // Not if that makes it larger than it was to be, when nothing of it is written.
    if file.metadata()?.len() >= header.len() as u64 {
        file.write_all_at(&header, 0)?;
    }
    let seals = match random.below(2) {
        0 => libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
        _ => random.below(64) as libc::c_int,
    };
    // SAFETY: a system call on integers. Seals that a file cannot have are refused.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) };
    if random.below(8) == 0 {
        // Sealed ones refuse.
        let _ = file.set_len(one(random, &sizes));
    }
    Ok(file)
}
