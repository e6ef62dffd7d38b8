//! The record: one event in 64 bytes.

use crate::{Carrier, VERSION};

/// What an event is about. Values below 32; those up to 11 are the bit positions of NCCL's profiler event types
/// (`ncclProfileGroup = 1 << 0` … `ncclProfileKernelLaunch = 1 << 11`), so a mask of kinds is also an
/// activation mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Kind {
    /// The tasks of one group being planned: start at group end, stop when all plans are launched. `op` is the group number.
    Group = 0,
    /// A collective: start when its task becomes part of a plan, stop when it is enqueued on the device.
    Coll = 1,
    /// A send or recv: as [`Kind::Coll`].
    P2p = 2,
    /// A proxy operation (one channel, one peer, one direction of one operation).
    ProxyOp = 3,
    /// One network transfer of a proxy operation; `value` is the step.
    ProxyStep = 4,
    /// What the proxy progress thread does besides transfers.
    ProxyCtrl = 5,
    /// One channel of the operation's kernel on the device; `value` is the device's timer in nanoseconds, 0 if what the device
    /// told was lost. The time is when the timer was there (see [`crate::clock`]), without one when the library noticed.
    KernelCh = 6,
    /// What carries the bytes of a step that this rank sends, or receives from a socket: start when it is handed to the network, stop
    /// when the peer's device has it (RDMA) or the last call has returned (socket). `value` is a [`Carrier`], `bytes` the
    /// step's. Before an operation's first one over RDMA, [`State::NET_PLUGIN_UPDATE`]: `value` is a [`crate::Numbering`].
    NetPlugin = 7,
    /// `ncclGroupStart` … `ncclGroupEnd`, implicit (depth 1, for who asks for calls as well) around a lone operation. `op` is the group number, `value` the depth.
    GroupApi = 8,
    /// A collective's API call: start at entry, stop at return.
    CollApi = 9,
    /// A send's or recv's API call.
    P2pApi = 10,
    /// A plan's kernel launch: start before, stop after the device call. `op` is the plan number, `value` the stream.
    KernelLaunch = 11,
    /// *Sparse*: an operation has been handed to the device; its description is complete but for the device times.
    OpLaunched = 16,
    /// *Sparse*: every channel of an operation has finished on this rank; `value` is the device start time,
    /// `time_ns` the device end time. `channel` is a [`crate::ArrivalNotice`].
    OpCompleted = 17,
    /// *Sparse*: every proxy operation of an operation has finished on this rank; `value` is how many there were.
    ProxyCompleted = 18,
    /// *Sparse*: a communicator came into being; `value` is its slot in the communicator table.
    CommInit = 20,
    /// *Sparse*: a communicator was destroyed or aborted ([`State::ABORTED`]).
    CommDestroy = 21,
    /// *Sparse*: a graph that holds operations was instantiated (start) or destroyed (stop); `op` is the graph number.
    Graph = 22,
    /// *Sparse*: the watchdog's verdict on an operation that does not end: a hang (stop) or a rank that is late (start).
    /// `value` is [`crate::vocabulary::Cause`] `<< 32 |` the rank that the others wait for. What else is known of it is a
    /// [`crate::verdicts::GivenVerdict`] of the same time in the pages.
    Verdict = 23,
    /// *Sparse*: a connection between nodes leaves a path ([`State::START`]), goes on over another one ([`State::PATH_SWITCHED`],
    /// [`State::PATH_RECOVERED`]), has one that is ready ([`State::PATH_RESTORED`]: each with its first operation, and one that is back),
    /// is on its first path again (stop) or gives up ([`State::ABORTED`]). The record is of the proxy operation that the connection is at; between operations `op`, `seq` and `replay`
    /// are 0. `value` is a [`crate::PathChange`], `bytes` what is sent again.
    Failover = 24,
    /// *Sparse*: which rank arrived last at an operation that this rank waited in, soon after its end. Only of communicators
    /// over several nodes, and only while a reader wants it. The fields are those of [`crate::Arrival`].
    Arrival = 25,
}

impl Kind {
    /// Every kind, in numeric order.
    pub const ALL: &'static [Self] = &[
        Self::Group,
        Self::Coll,
        Self::P2p,
        Self::ProxyOp,
        Self::ProxyStep,
        Self::ProxyCtrl,
        Self::KernelCh,
        Self::NetPlugin,
        Self::GroupApi,
        Self::CollApi,
        Self::P2pApi,
        Self::KernelLaunch,
        Self::OpLaunched,
        Self::OpCompleted,
        Self::ProxyCompleted,
        Self::CommInit,
        Self::CommDestroy,
        Self::Graph,
        Self::Verdict,
        Self::Failover,
        Self::Arrival,
    ];

    /// How many numbers kinds may take; per-kind counters are arrays of this length.
    pub const LIMIT: usize = 32;

    /// Kinds that go through a probe function where no ring takes them: at most three for an operation, and one more
    /// for an operation that waited while a reader was there.
    pub const SPARSE: u64 = Self::OpLaunched.bit()
        | Self::OpCompleted.bit()
        | Self::ProxyCompleted.bit()
        | Self::CommInit.bit()
        | Self::CommDestroy.bit()
        | Self::Graph.bit()
        | Self::Verdict.bit()
        | Self::Failover.bit()
        | Self::Arrival.bit();

    /// Kinds that go to the shared ring alone.
    pub const DENSE: u64 = {
        let mut mask = 0;
        let mut i = 0;
        while i < Self::ALL.len() {
            mask |= Self::ALL[i].bit();
            i += 1;
        }
        mask & !Self::SPARSE
    };

    /// Dense kinds that tell nothing of an operation which its [`crate::Description`] does not: who reads that can do without. With them
    /// goes what is told of the group that the library opens around a lone call.
    pub const DESCRIBED: u64 = Self::Coll.bit()
        | Self::P2p.bit()
        | Self::CollApi.bit()
        | Self::P2pApi.bit()
        | Self::KernelLaunch.bit();

    /// Every kind.
    pub const EVERY: u64 = Self::DENSE | Self::SPARSE;

    /// This kind's bit in a mask of kinds.
    #[must_use]
    pub const fn bit(self) -> u64 {
        1 << self as u8
    }

    /// The kind with this number, if there is one.
    #[must_use]
    pub const fn from_code(code: u8) -> Option<Self> {
        let mut i = 0;
        while i < Self::ALL.len() {
            if Self::ALL[i] as u8 == code {
                return Some(Self::ALL[i]);
            }
            i += 1;
        }
        None
    }

    /// Name in counters, metrics and messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Coll => "coll",
            Self::P2p => "p2p",
            Self::ProxyOp => "proxy_op",
            Self::ProxyStep => "proxy_step",
            Self::ProxyCtrl => "proxy_ctrl",
            Self::KernelCh => "kernel_ch",
            Self::NetPlugin => "net_plugin",
            Self::GroupApi => "group_api",
            Self::CollApi => "coll_api",
            Self::P2pApi => "p2p_api",
            Self::KernelLaunch => "kernel_launch",
            Self::OpLaunched => "op_launched",
            Self::OpCompleted => "op_completed",
            Self::ProxyCompleted => "proxy_completed",
            Self::CommInit => "comm_init",
            Self::CommDestroy => "comm_destroy",
            Self::Graph => "graph",
            Self::Verdict => "verdict",
            Self::Failover => "failover",
            Self::Arrival => "arrival",
        }
    }

    /// Index in [`crate::PROBE_SYMBOLS`] of the probe function that carries this kind; `None` for dense kinds.
    #[must_use]
    pub const fn probe(self) -> Option<usize> {
        match self {
            Self::OpLaunched => Some(0),
            Self::ProxyCompleted => Some(1),
            Self::OpCompleted => Some(2),
            Self::CommInit
            | Self::CommDestroy
            | Self::Graph
            | Self::Verdict
            | Self::Failover
            | Self::Arrival => Some(3),
            _ => None,
        }
    }
}

impl core::fmt::Display for Kind {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(self.name())
    }
}

/// Where an event is in its life: its start, its stop, or one of NCCL's profiler states
/// (`ncclProfilerEventState_v5_t`; the numbers are NCCL's).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct State(pub u8);

impl State {
    /// Network step, sender: waits for the device to write the data.
    pub const STEP_SEND_GPU_WAIT: Self = Self(8);
    /// Network step, sender: waits for the network to take the data.
    pub const STEP_SEND_WAIT: Self = Self(9);
    /// Network step, receiver: waits for data from the network.
    pub const STEP_RECV_WAIT: Self = Self(10);
    /// Network step, receiver: waits for received data to be flushed to the device.
    pub const STEP_RECV_FLUSH_WAIT: Self = Self(11);
    /// Network step, receiver: waits for the device to consume the data.
    pub const STEP_RECV_GPU_WAIT: Self = Self(12);
    /// Proxy progress thread: nothing to do.
    pub const CTRL_IDLE: Self = Self(13);
    /// Proxy progress thread: has work again.
    pub const CTRL_ACTIVE: Self = Self(14);
    /// Proxy progress thread: goes to sleep.
    pub const CTRL_SLEEP: Self = Self(15);
    /// Proxy progress thread: woke up.
    pub const CTRL_WAKEUP: Self = Self(16);
    /// Proxy progress thread: begins to take over posted operations.
    pub const CTRL_APPEND: Self = Self(17);
    /// Proxy progress thread: took them over; `bytes` is how many so far.
    pub const CTRL_APPEND_END: Self = Self(18);
    /// Proxy operation: first progress made.
    pub const OP_IN_PROGRESS: Self = Self(19);
    /// Network step, sender: waits for the peer's clear-to-send credit.
    pub const STEP_SEND_PEER_WAIT: Self = Self(20);
    /// Network plugin: attributes changed.
    pub const NET_PLUGIN_UPDATE: Self = Self(21);
    /// Kernel channel: the device's stop time became known.
    pub const KERNEL_CH_STOP: Self = Self(22);
    /// Group: `ncclGroupStart` returned.
    pub const GROUP_START_API_STOP: Self = Self(23);
    /// Group: `ncclGroupEnd` was entered.
    pub const GROUP_END_API_START: Self = Self(24);
    /// Failover: the connection goes on over another path.
    pub const PATH_SWITCHED: Self = Self(0xe0);
    /// Failover: the first step got over the new path.
    pub const PATH_RECOVERED: Self = Self(0xe1);
    /// Failover: a path that had failed is proven good again.
    pub const PATH_RESTORED: Self = Self(0xe2);
    /// The event was aborted (stop of an operation or communicator that did not finish).
    pub const ABORTED: Self = Self(0xef);
    /// The event begins.
    pub const START: Self = Self(0xf0);
    /// The event ends.
    pub const STOP: Self = Self(0xf1);

    /// Name in spans and messages; `None` for numbers that mean nothing.
    #[must_use]
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::STEP_SEND_GPU_WAIT => "send_gpu_wait",
            Self::STEP_SEND_WAIT => "send_wait",
            Self::STEP_RECV_WAIT => "recv_wait",
            Self::STEP_RECV_FLUSH_WAIT => "recv_flush_wait",
            Self::STEP_RECV_GPU_WAIT => "recv_gpu_wait",
            Self::CTRL_IDLE => "idle",
            Self::CTRL_ACTIVE => "active",
            Self::CTRL_SLEEP => "sleep",
            Self::CTRL_WAKEUP => "wakeup",
            Self::CTRL_APPEND => "append",
            Self::CTRL_APPEND_END => "append_end",
            Self::OP_IN_PROGRESS => "in_progress",
            Self::STEP_SEND_PEER_WAIT => "send_peer_wait",
            Self::NET_PLUGIN_UPDATE => "update",
            Self::KERNEL_CH_STOP => "kernel_ch_stop",
            Self::GROUP_START_API_STOP => "group_start_api_stop",
            Self::GROUP_END_API_START => "group_end_api_start",
            Self::PATH_SWITCHED => "path_switched",
            Self::PATH_RECOVERED => "path_recovered",
            Self::PATH_RESTORED => "path_restored",
            Self::ABORTED => "aborted",
            Self::START => "start",
            Self::STOP => "stop",
            _ => return None,
        })
    }
}

/// Four flag bits of a record; the upper four bits of the same byte are the layout version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Flags(pub u8);

impl Flags {
    /// No flag.
    pub const NONE: Self = Self(0);
    /// Proxy operation or step: this rank sends (v5 `isSend`).
    pub const SEND: Self = Self(1);
    /// The call was captured into a graph, or the event comes from a replay (v5 `graphCaptured`).
    pub const GRAPH: Self = Self(1 << 1);
    /// The operation is a send or recv: `seq` counts the ordered pair, not the communicator.
    pub const P2P: Self = Self(1 << 2);
    /// The operation's buffers lie in memory that the caller registered with the communicator.
    pub const REGISTERED: Self = Self(1 << 3);
    /// [`Kind::NetPlugin`]: the step went over a path that is not the connection's primary one. The bit that other kinds have
    /// [`Flags::REGISTERED`] in.
    pub const BACKUP: Self = Self(1 << 3);

    /// Both sets of flags.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// `self` if `condition`, else no flag.
    #[must_use]
    pub const fn when(self, condition: bool) -> Self {
        if condition { self } else { Self::NONE }
    }

    /// Whether every flag of `other` is set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One event. All times are `CLOCK_MONOTONIC` nanoseconds of the host (what `bpf_ktime_get_ns` reads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Record {
    /// When it happened.
    pub time_ns: u64,
    /// Communicator id; 0 for events of no single communicator (groups, proxy control).
    pub comm: u64,
    /// Sequence: of collectives in the communicator, of messages in the ordered pair ([`Flags::P2P`]), or
    /// `graph sequence << 32 | node` for a captured operation.
    pub seq: u64,
    /// Message bytes of an operation, transferred bytes of a step (v5 `transSize`), appended operations of
    /// [`State::CTRL_APPEND_END`] (v5 `appendedProxyOps`).
    pub bytes: u64,
    /// By kind: see [`Kind`]. For [`Kind::ProxyOp`]: `nSteps << 32 | chunkSize`; see [`Record::proxy_op_shape`].
    pub value: u64,
    /// Operation number in this process, the join key of an operation's events and of its description entry;
    /// group, plan or graph number where the kind says so.
    pub op: u32,
    /// 0 for an eager operation, n for the n-th replay of a captured one.
    pub replay: u32,
    /// Rank in the communicator.
    pub rank: u32,
    /// Peer of a send, recv, proxy operation or step; root of a rooted collective; -1 otherwise.
    pub peer: i32,
    /// Process that generated the operation (v5 `proxyOp.pid`); another one where a proxy serves a foreign rank.
    pub pid: u32,
    /// [`Kind`] as a number: a reader may meet kinds that it does not know.
    pub kind: u8,
    /// Start, stop or a state.
    pub state: State,
    /// Channel, 0 where an event has none.
    pub channel: u8,
    /// [`Flags`] in the lower, layout version in the upper four bits.
    pub version_flags: u8,
}

const _: () = assert!(size_of::<Record>() == 64 && align_of::<Record>() == 8);

impl Record {
    /// A record of this kind and state with every other field zero (peer -1).
    #[must_use]
    pub const fn new(kind: Kind, state: State, time_ns: u64) -> Self {
        Self {
            time_ns,
            comm: 0,
            seq: 0,
            bytes: 0,
            value: 0,
            op: 0,
            replay: 0,
            rank: 0,
            peer: -1,
            pid: 0,
            kind: kind as u8,
            state,
            channel: 0,
            version_flags: VERSION << 4,
        }
    }

    /// The same record with `flags` set.
    #[must_use]
    pub const fn with_flags(mut self, flags: Flags) -> Self {
        self.version_flags |= flags.0 & 0x0f;
        self
    }

    /// Its kind, if this version knows it.
    #[must_use]
    pub const fn kind(&self) -> Option<Kind> {
        Kind::from_code(self.kind)
    }

    /// Its flags.
    #[must_use]
    pub const fn flags(&self) -> Flags {
        Flags(self.version_flags & 0x0f)
    }

    /// The layout version that its writer used.
    #[must_use]
    pub const fn version(&self) -> u8 {
        self.version_flags >> 4
    }

    /// `value` of a [`Kind::ProxyOp`] record: (number of steps, chunk size in bytes).
    #[must_use]
    pub const fn proxy_op_shape(&self) -> (u32, u32) {
        ((self.value >> 32) as u32, self.value as u32)
    }

    /// Packs steps and chunk size for `value` of a [`Kind::ProxyOp`] record.
    #[must_use]
    pub const fn pack_proxy_op_shape(steps: u32, chunk_bytes: u32) -> u64 {
        (steps as u64) << 32 | chunk_bytes as u64
    }

    /// What carries the step of a [`Kind::NetPlugin`] record.
    #[must_use]
    pub const fn carrier(&self) -> Carrier {
        Carrier::from_value(self.value)
    }

    /// The record's 64 bytes in host order.
    #[must_use]
    pub const fn to_bytes(&self) -> [u8; 64] {
        // SAFETY: `Record` is `repr(C)`, 64 bytes, without padding (its fields' sizes add up to 64), and plain data.
        unsafe { core::mem::transmute::<Self, [u8; 64]>(*self) }
    }

    /// Reads 64 bytes in host order. Every bit pattern is a record; whether it makes sense is for the reader to check.
    #[must_use]
    pub const fn from_bytes(bytes: &[u8; 64]) -> Self {
        // SAFETY: as in `to_bytes`, and every field accepts every bit pattern.
        unsafe { core::mem::transmute::<[u8; 64], Self>(*bytes) }
    }
}

/// What an eBPF program puts into its ring buffer: a record with what only the kernel knows.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ProbedRecord {
    /// Which process, as [`crate::probed::process_key`] makes it: the same number may be several processes', in several pid
    /// namespaces.
    pub process: u64,
    /// Attach cookie: which site was hit.
    pub cookie: u64,
    /// The record that the probe function was given.
    pub record: Record,
    /// Thread id, in the pid namespace that the key names.
    pub tid: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<ProbedRecord>() == 88);
