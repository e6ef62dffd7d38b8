//! What the tests share: ranks as threads, streams, typed buffers and a plain reference.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(unreachable_pub, reason = "a module of each test binary")]

pub mod children;
pub mod cpus;
pub mod graphs;
pub mod holdings;
pub mod processes;
pub mod variables;
pub mod waiting;
pub mod watch;

use std::{
    env,
    ffi::{CStr, c_int, c_void},
    process::{Child, Command, Output, Stdio},
    ptr,
    sync::{Arc, Once},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    abi::{self, NcclConfig, UniqueIdBytes},
    communicator::Handle,
    device::{Runtime, Stream, runtime},
    error::ResultCode,
};
use ringsight_records::{DataType, Function, ReduceOp};

/// Chooses the host device for this process; to be called first by every test.
pub fn host() -> &'static Arc<dyn Runtime> {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        // SAFETY: every test calls this first, and the others wait for it here.
        unsafe {
            env::set_var("RINGSIGHT_DEVICE", "host");
            if env::var_os("NCCL_SOCKET_IFNAME").is_none() {
                env::set_var("NCCL_SOCKET_IFNAME", "lo");
            }
        }
    });
    runtime().expect("host device")
}

/// The text of this thread's last error.
pub fn last_error() -> String {
    // SAFETY: a C string that is valid until the next failing call.
    unsafe { CStr::from_ptr(abi::ncclGetLastError(Handle(0))) }
        .to_string_lossy()
        .into_owned()
}

/// Panics with the library's reason unless `code` is success.
#[track_caller]
pub fn ok(code: ResultCode) {
    assert_eq!(code, ResultCode::Success, "{}", last_error());
}

/// A new unique id.
pub fn unique_id() -> UniqueIdBytes {
    let mut id = UniqueIdBytes([0; 128]);
    // SAFETY: a valid place.
    ok(unsafe { abi::ncclGetUniqueId(&raw mut id) });
    id
}

/// Calls `ncclCommInitRank`.
pub fn init(id: UniqueIdBytes, rank: usize, ranks: usize) -> (ResultCode, Handle) {
    let mut comm = Handle(0);
    // SAFETY: a valid place.
    let code = unsafe { abi::ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int) };
    (code, comm)
}

/// Makes calls as one group.
pub fn group(body: impl FnOnce()) {
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    body();
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupEnd() });
}

/// One rank.
#[derive(Clone, Copy)]
pub struct Rank {
    pub comm: Handle,
    pub rank: usize,
    pub ranks: usize,
    pub stream: Stream,
}

impl Rank {
    /// Joins the communicator `id`.
    pub fn join(id: UniqueIdBytes, rank: usize, ranks: usize) -> Self {
        Self::join_on(rank as i32, id, rank, ranks)
    }

    /// Joins the communicator `id` with a device that may be another rank's, too.
    pub fn join_on(number: i32, id: UniqueIdBytes, rank: usize, ranks: usize) -> Self {
        let device = host();
        device.set_current(number).unwrap();
        let mut comm = Handle(0);
        // SAFETY: a valid place.
        ok(unsafe { abi::ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int) });
        Self {
            comm,
            rank,
            ranks,
            stream: device.stream_create().unwrap(),
        }
    }

    /// Joins the communicator `id` with choices, and waits until it has.
    pub fn join_with(id: UniqueIdBytes, rank: usize, ranks: usize, settings: &mut NcclConfig) -> Self {
        let device = host();
        device.set_current(rank as i32).unwrap();
        let mut comm = Handle(0);
        // SAFETY: valid places.
        let code = unsafe {
            abi::ncclCommInitRankConfig(&raw mut comm, ranks as c_int, id, rank as c_int, settings)
        };
        if code == ResultCode::InProgress {
            assert_eq!(settled(comm), ResultCode::Success);
        } else {
            ok(code);
        }
        Self {
            comm,
            rank,
            ranks,
            stream: device.stream_create().unwrap(),
        }
    }

    pub fn synchronize(&self) {
        host().stream_synchronize(self.stream).unwrap();
    }

    pub fn leave(self) {
        host().stream_destroy(self.stream).unwrap();
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommDestroy(self.comm) });
    }

    /// Calls a communication function; buffers as it takes them.
    pub fn call(&self, call: &Call, send: *const u8, recv: *mut u8) -> ResultCode {
        let (send, recv): (*const c_void, *mut c_void) = (send.cast(), recv.cast());
        let (count, kind, comm, stream) = (
            call.count,
            c_int::from(call.data_type.code()),
            self.comm,
            self.stream,
        );
        let (op, root) = (c_int::from(call.op.code()), call.root as c_int);
        // SAFETY: the buffers have the sizes that `Call` says, and live until the stream is synchronized.
        unsafe {
            match call.function {
                Function::AllReduce => abi::ncclAllReduce(send, recv, count, kind, op, comm, stream),
                Function::AllGather => abi::ncclAllGather(send, recv, count, kind, comm, stream),
                Function::ReduceScatter => abi::ncclReduceScatter(send, recv, count, kind, op, comm, stream),
                Function::Broadcast => abi::ncclBroadcast(send, recv, count, kind, root, comm, stream),
                Function::Reduce => abi::ncclReduce(send, recv, count, kind, op, root, comm, stream),
                Function::AlltoAll => abi::ncclAlltoAll(send, recv, count, kind, comm, stream),
                Function::Gather => abi::ncclGather(send, recv, count, kind, root, comm, stream),
                Function::Scatter => abi::ncclScatter(send, recv, count, kind, root, comm, stream),
                Function::Send => abi::ncclSend(send, count, kind, root, comm, stream),
                Function::Recv => abi::ncclRecv(recv, count, kind, root, comm, stream),
            }
        }
    }
}

/// Sends to the other one of two ranks and receives from it, as one group.
pub fn send_around(rank: &Rank) {
    let (data, mut into) = (vec![1f32; 1000], vec![0f32; 1000]);
    let other = 1 - rank.rank;
    group(|| {
        ok(rank.call(
            &Call::peer(Function::Send, 1000, other),
            data.as_ptr().cast(),
            ptr::null_mut(),
        ));
        ok(rank.call(
            &Call::peer(Function::Recv, 1000, other),
            ptr::null(),
            into.as_mut_ptr().cast(),
        ));
    });
    rank.synchronize();
    assert_eq!(into, data);
}

/// Runs `body` on `ranks` threads, each with its rank of one communicator.
pub fn on_ranks<T: Send>(ranks: usize, body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    host();
    let id = unique_id();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let body = &body;
                scope.spawn(move || {
                    let rank = Rank::join(id, rank, ranks);
                    let result = body(rank);
                    rank.leave();
                    result
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("rank panicked"))
            .collect()
    })
}

/// One operation with its arguments; `root` is the peer of a send or receive.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub function: Function,
    pub data_type: DataType,
    pub op: ReduceOp,
    pub count: usize,
    pub root: usize,
}

impl Call {
    pub fn new(function: Function, count: usize) -> Self {
        Self {
            function,
            data_type: DataType::Float32,
            op: ReduceOp::Sum,
            count,
            root: 0,
        }
    }

    pub fn peer(function: Function, count: usize, peer: usize) -> Self {
        Self {
            root: peer,
            ..Self::new(function, count)
        }
    }

    /// Elements of (send, receive) buffers.
    pub fn elements(&self, ranks: usize) -> (usize, usize) {
        match self.function {
            Function::AllGather | Function::Gather => (self.count, self.count * ranks),
            Function::ReduceScatter | Function::Scatter => (self.count * ranks, self.count),
            Function::AlltoAll => (self.count * ranks, self.count * ranks),
            _ => (self.count, self.count),
        }
    }

    /// What rank `rank` puts at element `index` of its send buffer: small, so that every type holds every result.
    pub fn input(&self, rank: usize, index: usize) -> i64 {
        match self.op {
            ReduceOp::Prod => 1 + i64::from((rank + index).is_multiple_of(4)),
            // The same on all ranks and a multiple of 2 and 3, so that the average over so many is exact in every type.
            ReduceOp::Avg => (index % 5 * 6) as i64,
            _ => ((rank * 5 + index * 3) % 11 + 1) as i64,
        }
    }

    fn reduced(&self, ranks: usize, index: usize) -> i64 {
        let values = (0..ranks).map(|rank| self.input(rank, index));
        match self.op {
            ReduceOp::Sum => values.sum(),
            ReduceOp::Prod => values.product(),
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            ReduceOp::Avg => values.sum::<i64>() / ranks as i64,
            other => panic!("no reference for {other}"),
        }
    }

    /// What rank `rank` must find at element `index` of its receive buffer; `None` if the function leaves it alone.
    pub fn expected(&self, rank: usize, ranks: usize, index: usize) -> Option<i64> {
        match self.function {
            Function::AllReduce => Some(self.reduced(ranks, index)),
            Function::Reduce => (rank == self.root).then(|| self.reduced(ranks, index)),
            Function::ReduceScatter => Some(self.reduced(ranks, rank * self.count + index)),
            Function::AllGather => Some(self.input(index / self.count, index % self.count)),
            Function::Broadcast => Some(self.input(self.root, index)),
            Function::AlltoAll => {
                Some(self.input(index / self.count, rank * self.count + index % self.count))
            }
            Function::Gather if rank == self.root => Some(self.input(index / self.count, index % self.count)),
            Function::Scatter => Some(self.input(self.root, rank * self.count + index)),
            _ => None,
        }
    }

    /// Runs it on one rank, in place or not (an all-to-all never is), and compares every element with the reference.
    #[track_caller]
    pub fn check(&self, rank: &Rank, in_place: bool) {
        let (sent, received) = self.elements(rank.ranks);
        let input: Vec<u8> = (0..sent)
            .flat_map(|index| encode(self.data_type, self.input(rank.rank, index)))
            .collect();
        let size = self.data_type.size();
        let mut output = vec![0xa5; received * size];
        let mut send = input.clone();
        if in_place {
            // NCCL's rule: gathers send their own block of the receive buffer, scatters receive into their own block of
            // the send buffer.
            let (send, recv) = match self.function {
                Function::AlltoAll => (send.as_ptr(), output.as_mut_ptr()),
                Function::AllGather | Function::Gather => {
                    let at = rank.rank * sent * size;
                    output[at..at + input.len()].copy_from_slice(&input);
                    (output[at..].as_ptr(), output.as_mut_ptr())
                }
                Function::ReduceScatter | Function::Scatter => {
                    (send.as_ptr(), send[rank.rank * received * size..].as_mut_ptr())
                }
                _ => {
                    output.copy_from_slice(&input);
                    (output.as_ptr(), output.as_mut_ptr())
                }
            };
            ok(rank.call(self, send, recv));
        } else {
            ok(rank.call(self, send.as_ptr(), output.as_mut_ptr()));
        }
        rank.synchronize();
        if in_place && matches!(self.function, Function::ReduceScatter | Function::Scatter) {
            let at = rank.rank * received * size;
            output.copy_from_slice(&send[at..at + received * size]);
        }
        for index in 0..received {
            let Some(expected) = self.expected(rank.rank, rank.ranks, index) else {
                continue;
            };
            assert_eq!(
                output[index * size..][..size],
                encode(self.data_type, expected),
                "{self:?} rank {} of {} in_place {in_place} element {index}: expected {expected}",
                rank.rank,
                rank.ranks
            );
        }
        if !in_place {
            assert_eq!(send, input, "{self:?} wrote into its send buffer");
        }
    }
}

/// A small whole number (at most 256) as an element of `data_type`.
pub fn encode(data_type: DataType, value: i64) -> Vec<u8> {
    let float = value as f32;
    match data_type {
        DataType::Int8 | DataType::Uint8 => vec![value as u8],
        DataType::Int32 | DataType::Uint32 => (value as u32).to_ne_bytes().to_vec(),
        DataType::Int64 | DataType::Uint64 => value.to_ne_bytes().to_vec(),
        DataType::Float32 => float.to_ne_bytes().to_vec(),
        DataType::Float64 => (value as f64).to_ne_bytes().to_vec(),
        DataType::Bfloat16 => ((float.to_bits() >> 16) as u16).to_ne_bytes().to_vec(),
        DataType::Float16 => {
            let bits = float.to_bits();
            let half = if value == 0 {
                0
            } else {
                ((bits >> 23) - 127 + 15) << 10 | (bits >> 13 & 0x3ff)
            };
            (half as u16).to_ne_bytes().to_vec()
        }
        other => panic!("no exact small numbers in {other}"),
    }
}

/// Types that hold the test's numbers exactly.
pub const EXACT_TYPES: [DataType; 10] = [
    DataType::Int8,
    DataType::Uint8,
    DataType::Int32,
    DataType::Uint32,
    DataType::Int64,
    DataType::Uint64,
    DataType::Float16,
    DataType::Float32,
    DataType::Float64,
    DataType::Bfloat16,
];

/// Functions that all ranks call together.
pub const COLLECTIVES: [Function; 8] = [
    Function::AlltoAll,
    Function::Gather,
    Function::Scatter,
    Function::AllReduce,
    Function::AllGather,
    Function::ReduceScatter,
    Function::Broadcast,
    Function::Reduce,
];

const ID: &str = "RINGSIGHT_TEST_ID";
const PLACE: &str = "RINGSIGHT_TEST_PLACE";

/// Starts `ranks` processes on `nodes` nodes, each this test binary running the ignored test `worker` alone, and waits
/// until all have succeeded. A worker takes its part by [`rank_of_process`] and prints "rank done" at its end.
#[track_caller]
pub fn run_processes(worker: &str, ranks: usize, nodes: usize) {
    run_processes_with(worker, ranks, nodes, &[]);
}

/// The same with environment variables.
#[track_caller]
pub fn run_processes_with(worker: &str, ranks: usize, nodes: usize, variables: &[(&str, &str)]) {
    let outputs = outputs(start_processes(worker, ranks, nodes, variables));
    for (rank, output) in outputs.into_iter().enumerate() {
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        assert!(output.status.success(), "rank {rank}:\n{out}\n{err}");
        assert!(out.contains("rank done"), "rank {rank} did not run:\n{out}");
    }
}

/// What processes write, until all have ended: of all at a time, since who writes much waits for who reads it.
pub fn outputs(processes: Vec<Child>) -> Vec<Output> {
    let readers: Vec<_> = processes
        .into_iter()
        .map(|child| thread::spawn(|| child.wait_with_output().unwrap()))
        .collect();
    readers.into_iter().map(|reader| reader.join().unwrap()).collect()
}

/// Only starts them.
pub fn start_processes(worker: &str, ranks: usize, nodes: usize, variables: &[(&str, &str)]) -> Vec<Child> {
    start_each(worker, ranks, nodes, |_, command| {
        command.envs(variables.iter().copied());
    })
}

/// The same, where each rank's process may differ: `change` is given the rank.
pub fn start_each(
    worker: &str,
    ranks: usize,
    nodes: usize,
    change: impl Fn(usize, &mut Command),
) -> Vec<Child> {
    host();
    let id: String = unique_id().0.iter().map(|byte| format!("{byte:02x}")).collect();
    (0..ranks)
        .map(|rank| {
            let mut command = Command::new(env::current_exe().unwrap());
            command
                .args(["--exact", worker, "--ignored", "--nocapture"])
                .env(ID, &id)
                .env(PLACE, format!("{rank} {ranks}"))
                .env("RINGSIGHT_DEVICE", "host")
                .env("NCCL_SOCKET_IFNAME", "lo")
                .env("NCCL_HOSTID", format!("node{}", rank * nodes / ranks))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped());
            change(rank, &mut command);
            command.spawn().unwrap()
        })
        .collect()
}

/// The rank that this process was started as; `None` in a run of the whole test binary.
pub fn rank_of_process() -> Option<Rank> {
    let (id, rank, ranks) = place_of_process()?;
    Some(Rank::join(id, rank, ranks))
}

/// The unique id, rank and number of ranks that this process was started with.
pub fn place_of_process() -> Option<(UniqueIdBytes, usize, usize)> {
    let (id, place) = (env::var(ID).ok()?, env::var(PLACE).ok()?);
    let (rank, ranks) = place.split_once(' ')?;
    let mut bytes = [0; 128];
    for (byte, digits) in bytes.iter_mut().zip(id.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some((UniqueIdBytes(bytes), rank.parse().ok()?, ranks.parse().ok()?))
}

/// What `NCCL_CONFIG_INITIALIZER` of 2.30.7 sets.
pub fn config() -> NcclConfig {
    const UNDEF: c_int = c_int::MIN;
    NcclConfig {
        size: size_of::<NcclConfig>(),
        magic: 0xcafe_beef,
        version: 23007,
        blocking: UNDEF,
        cga_cluster_size: UNDEF,
        min_ctas: UNDEF,
        max_ctas: UNDEF,
        net_name: ptr::null(),
        split_share: UNDEF,
        traffic_class: UNDEF,
        comm_name: ptr::null(),
        collnet_enable: UNDEF,
        cta_policy: UNDEF,
        shrink_share: UNDEF,
        nvls_ctas: UNDEF,
        n_channels_per_net_peer: UNDEF,
        nvlink_centric_sched: UNDEF,
        graph_usage_mode: UNDEF,
        num_rma_ctx: UNDEF,
        max_p2p_peers: UNDEF,
        graph_stream_ordering: UNDEF,
    }
}

/// Asserts the code and that the text says `what`.
#[track_caller]
pub fn fails(code: ResultCode, expected: ResultCode, what: &str) {
    let text = last_error();
    assert_eq!(code, expected, "{text}");
    assert!(text.contains(what), "{text:?} does not say {what:?}");
}

/// The state of a communicator, as a number.
pub fn state(comm: Handle) -> ResultCode {
    let mut code = -1;
    // SAFETY: a valid place.
    ok(unsafe { abi::ncclCommGetAsyncError(comm, &raw mut code) });
    ResultCode::ALL[code as usize]
}

/// Polls until a communicator is no longer busy, as a program does that was told `ncclInProgress`.
pub fn settled(comm: Handle) -> ResultCode {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match state(comm) {
            ResultCode::InProgress => assert!(Instant::now() < end, "still in progress"),
            code => return code,
        }
        thread::yield_now();
    }
}

/// Runs an ignored test of this binary in a process of its own.
#[track_caller]
pub fn alone(test: &str, change: impl FnOnce(&mut Command)) -> String {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    change(&mut command);
    let output = command.output().unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{text}");
    text
}

/// Forks; the child's exit code is what `body` returns.
pub fn in_child(body: impl FnOnce() -> i32) -> c_int {
    // SAFETY: the tests that call this run alone and have no other thread that calls; the child ends here.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // A child that went on with what the parent was in would never end.
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(101);
        // SAFETY: ends the child without running the test harness any further.
        unsafe { libc::_exit(code) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just made.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status
}
