//! Samples of jobs that never ran, for tests and benchmarks: what the probes room would deliver for a job of a given
//! shape, carrier by carrier, with exact times.

use std::sync::Arc;

use ringsight_probes::sample::{Carrier, Process, Sample};
use ringsight_records::{
    DataType, Description, Flags, Function, Kind, Record, ReduceOp, State,
    pages::{CAPTURED, Communicator, put_text},
};

/// Process id of rank 0; rank r has this plus r.
pub const FIRST_PID: u32 = 1000;
/// When the first operation of a job begins, monotonic nanoseconds.
pub const EPOCH_NS: u64 = 1_000_000_000;
/// Time that an operation takes from the last arrival to its end.
pub const DURATION_NS: u64 = 100_000;
/// Time from an operation's API call to its arrival on a rank that is not late.
pub const ARRIVAL_NS: u64 = 20_000;

/// What the recv of a rank's message to itself adds to the send's operation number.
const SELF_RECV: u32 = 1 << 20;

/// Shape of a job: each rank is a process, ranks are dealt to nodes in blocks, neighbours in a ring talk to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Job {
    /// Communicator id.
    pub comm: u64,
    /// Ranks.
    pub ranks: u32,
    /// Nodes.
    pub nodes: u32,
    /// Channels of each operation.
    pub channels: u8,
    /// Network steps of each proxy operation.
    pub steps: u32,
}

impl Default for Job {
    fn default() -> Self {
        Self {
            comm: 0x1122_3344_5566_7788,
            ranks: 4,
            nodes: 2,
            channels: 2,
            steps: 4,
        }
    }
}

/// One operation of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Function; of a message, [`Function::Send`].
    pub function: Function,
    /// Operation number on every rank.
    pub op: u32,
    /// Sequence.
    pub seq: u64,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Message bytes.
    pub bytes: u64,
    /// API call on rank 0, nanoseconds after [`EPOCH_NS`]; each further rank calls a microsecond later.
    pub at_ns: u64,
    /// (rank, how much later than the others it arrives).
    pub late: Option<(u32, u64)>,
    /// Source and destination of a message.
    pub pair: Option<(u32, u32)>,
    /// Group number and whether the caller opened it.
    pub group: (u32, bool),
}

impl Operation {
    /// The n-th collective of a job (n from 1), one each millisecond.
    #[must_use]
    pub fn all_reduce(n: u32) -> Self {
        Self {
            function: Function::AllReduce,
            op: n,
            seq: u64::from(n) - 1,
            replay: 0,
            bytes: 1 << 20,
            at_ns: u64::from(n) * 1_000_000,
            late: None,
            pair: None,
            group: (n, false),
        }
    }

    /// The n-th operation as a message.
    #[must_use]
    pub fn message(n: u32, source: u32, destination: u32) -> Self {
        Self {
            function: Function::Send,
            pair: Some((source, destination)),
            ..Self::all_reduce(n)
        }
    }

    /// Replay `replay` of the captured operation in slot `slot`, at the place of the n-th operation.
    #[must_use]
    pub fn replayed(n: u32, slot: u32, replay: u32) -> Self {
        Self {
            op: CAPTURED | 1 << 12 | slot,
            seq: 1 << 32 | u64::from(slot),
            replay,
            ..Self::all_reduce(n)
        }
    }

    /// The same, with `rank` arriving `ns` late.
    #[must_use]
    pub fn with_late(self, rank: u32, ns: u64) -> Self {
        Self {
            late: Some((rank, ns)),
            ..self
        }
    }

    /// The same, in a group that the caller opened.
    #[must_use]
    pub fn in_group(self, number: u32) -> Self {
        Self {
            group: (number, true),
            ..self
        }
    }

    /// When the last rank is done, monotonic nanoseconds.
    #[must_use]
    pub fn end_ns(&self) -> u64 {
        EPOCH_NS + self.at_ns + ARRIVAL_NS + self.late.map_or(0, |(_, ns)| ns) + DURATION_NS
    }
}

/// Samples of one process, each carrier's in its own order; between the two there is none.
#[derive(Clone, Debug, Default)]
pub struct Streams {
    /// Process.
    pub pid: u32,
    /// What comes first: the process and its communicators.
    pub head: Vec<Sample>,
    /// Through the probe functions.
    pub probe: Vec<Sample>,
    /// Through the shared ring.
    pub ring: Vec<Sample>,
}

impl Streams {
    /// Everything in one order: the head, the ring, the probes.
    #[must_use]
    pub fn concat(self) -> Vec<Sample> {
        [self.head, self.ring, self.probe].concat()
    }
}

impl Job {
    /// Process id of a rank.
    #[must_use]
    pub fn pid(&self, rank: u32) -> u32 {
        FIRST_PID + rank
    }

    /// Node of a rank.
    #[must_use]
    pub fn node(&self, rank: u32) -> u32 {
        rank / self.ranks.div_ceil(self.nodes)
    }

    /// A rank's process.
    #[must_use]
    pub fn process(&self, rank: u32) -> Process {
        Process {
            pid: self.pid(rank),
            start_time: 5,
            name: "train".into(),
            library: "/usr/lib/libnccl.so.2".into(),
            library_version: 22_809,
            host_id: format!("host-{}", self.node(rank)),
            host_name: format!("node-{}", self.node(rank)),
            instrumented: true,
            environment: Vec::new(),
        }
    }

    /// A rank's entry of the communicator table.
    #[must_use]
    pub fn communicator(&self, rank: u32) -> Communicator {
        let mut name = [0; ringsight_records::vocabulary::NAME_BYTES];
        put_text(&mut name, "world");
        let on_node = self.ranks.div_ceil(self.nodes);
        Communicator {
            id: self.comm,
            parent: 0,
            init_start_ns: 1,
            init_end_ns: 2,
            rank,
            ranks: self.ranks,
            local_rank: rank % on_node,
            local_ranks: on_node,
            node: self.node(rank),
            nodes: self.nodes,
            device: 0,
            channels: u32::from(self.channels),
            name,
            reserved: [0; 7],
        }
    }

    /// What a rank's process delivers for `operations`, without watermarks.
    #[must_use]
    pub fn streams(&self, rank: u32, operations: &[Operation]) -> Streams {
        let pid = self.pid(rank);
        let head = vec![
            Sample::Process(Arc::new(self.process(rank))),
            Sample::Communicator {
                pid,
                communicator: Box::new(self.communicator(rank)),
            },
        ];
        let mut made = Made {
            job: self,
            rank,
            pid,
            timed: Vec::new(),
        };
        for operation in operations {
            made.operation(operation);
        }
        made.timed.sort_by_key(|(ns, _, _)| *ns);
        let mut streams = Streams {
            pid,
            head,
            ..Streams::default()
        };
        for (_, carrier, sample) in made.timed {
            match carrier {
                Carrier::Probe => streams.probe.push(sample),
                Carrier::Ring => streams.ring.push(sample),
            }
        }
        streams
    }

    /// Everything that `ranks` deliver for `operations`, then watermarks that pass all of it.
    #[must_use]
    pub fn samples(&self, ranks: std::ops::Range<u32>, operations: &[Operation]) -> Vec<Sample> {
        let mut samples = Vec::new();
        for rank in ranks.clone() {
            samples.extend(self.streams(rank, operations).concat());
        }
        let end = operations.iter().map(Operation::end_ns).max().unwrap_or(EPOCH_NS);
        // The second one is past the time for which groups wait for their operations' descriptions.
        for time_ns in [end + 1_000_000, end + 1_000_000_000] {
            samples.extend(ranks.clone().map(|rank| Sample::Watermark {
                pid: self.pid(rank),
                time_ns,
            }));
        }
        samples
    }
}

struct Made<'a> {
    job: &'a Job,
    rank: u32,
    pid: u32,
    /// (time of delivery, carrier, sample)
    timed: Vec<(u64, Carrier, Sample)>,
}

impl Made<'_> {
    fn emit(&mut self, record: Record) {
        let kind = record
            .kind()
            .expect("a record made here has a kind of this version");
        let carrier = if kind.probe().is_some() {
            Carrier::Probe
        } else {
            Carrier::Ring
        };
        // The thread is known where the kernel saw it.
        let tid = if carrier == Carrier::Probe { self.pid } else { 0 };
        self.timed.push((
            record.time_ns,
            carrier,
            Sample::Record {
                pid: self.pid,
                tid,
                carrier,
                record,
            },
        ));
    }

    fn span(&mut self, record: Record, kind: Kind, start_ns: u64, stop_ns: u64) {
        for (state, time_ns) in [(State::START, start_ns), (State::STOP, stop_ns)] {
            self.emit(Record {
                kind: kind as u8,
                state,
                time_ns,
                ..record
            });
        }
    }

    fn operation(&mut self, of: &Operation) {
        match of.pair {
            None => self.part(of, None),
            Some((source, destination)) => {
                if source == self.rank {
                    self.part(of, Some(true));
                }
                if destination == self.rank {
                    // To itself a rank sends and receives: two operations.
                    let op = if source == destination {
                        of.op + SELF_RECV
                    } else {
                        of.op
                    };
                    self.part(&Operation { op, ..of.clone() }, Some(false));
                }
            }
        }
    }

    /// One rank's part of an operation; `send` is `None` for a collective.
    fn part(&mut self, of: &Operation, send: Option<bool>) {
        let (job, rank) = (self.job, self.rank);
        let eager = of.replay == 0;
        let api = EPOCH_NS + of.at_ns + u64::from(rank) * 1000;
        let late = of.late.filter(|(late, _)| *late == rank).map_or(0, |(_, ns)| ns);
        let start = EPOCH_NS + of.at_ns + ARRIVAL_NS + late;
        let end = of.end_ns();
        let peer = match of.pair {
            None => -1,
            Some((source, destination)) => {
                (if send == Some(true) { destination } else { source }).cast_signed()
            }
        };
        let flags = Flags::P2P
            .when(send.is_some())
            .with(Flags::SEND.when(send == Some(true)))
            .with(Flags::GRAPH.when(!eager));
        let base = Record {
            comm: job.comm,
            seq: of.seq,
            bytes: of.bytes,
            op: of.op,
            replay: of.replay,
            rank,
            peer,
            pid: self.pid,
            ..Record::new(Kind::Coll, State::START, 0)
        }
        .with_flags(flags);
        let none = Record {
            comm: 0,
            seq: 0,
            op: of.group.0,
            peer: -1,
            ..base
        };
        let proxies = self.proxies(peer, send);
        let mut description = Description {
            comm: job.comm,
            seq: of.seq,
            count: of.bytes / 4,
            bytes: of.bytes,
            channel_mask: (1 << job.channels) - 1,
            api_start_ns: api,
            api_end_ns: api + 5_000,
            launch_start_ns: if eager { api + 8_000 } else { 0 },
            launch_end_ns: if eager { api + 9_000 } else { 0 },
            op: of.op,
            group: of.group.0,
            plan: of.op & !CAPTURED,
            rank,
            ranks: job.ranks,
            root: -1,
            peer,
            proxy_ops: proxies.len() as u32 * u32::from(job.channels),
            graph: u32::from(!eager),
            group_depth: 1 + u32::from(of.group.1),
            tid: self.pid,
            function: if send == Some(false) {
                Function::Recv
            } else {
                of.function
            }
            .code(),
            data_type: DataType::Float32.code(),
            reduce_op: if send.is_some() {
                ReduceOp::None
            } else {
                ReduceOp::Sum
            }
            .code(),
            algorithm: ringsight_records::Algorithm::Ring.code(),
            protocol: ringsight_records::Protocol::Simple.code(),
            channels: job.channels,
            warps: 1,
            ..Description::default()
        };
        if eager {
            let api_kind = if send.is_some() {
                Kind::P2pApi
            } else {
                Kind::CollApi
            };
            let kind = if send.is_some() { Kind::P2p } else { Kind::Coll };
            let group = Record {
                value: 1 + u64::from(of.group.1),
                ..none
            };
            // A group that the caller opened is told once, by its first member.
            if !of.group.1 || of.group.0 == of.op {
                self.span(group, Kind::GroupApi, api - 100, api + 15_000);
                self.span(none, Kind::Group, api + 6_000, api + 14_000);
            }
            self.span(base, api_kind, api, api + 5_000);
            self.span(base, kind, api + 7_000, api + 9_500);
            self.span(
                Record {
                    op: description.plan,
                    ..none
                },
                Kind::KernelLaunch,
                api + 8_000,
                api + 9_000,
            );
        }
        let launched = api + 9_500;
        let pid = self.pid;
        let mut describe = |ns, description: &Description| {
            let sample = Sample::Description {
                pid,
                description: Box::new(*description),
            };
            self.timed.push((ns, Carrier::Probe, sample));
        };
        // Just before the records that they go with: the sort by time is stable.
        describe(launched, &description);
        description.device_start_ns = start;
        description.device_end_ns = end;
        describe(end, &description);
        self.emit(Record {
            kind: Kind::OpLaunched as u8,
            time_ns: launched,
            ..base
        });
        for channel in 0..job.channels {
            let record = Record { channel, ..base };
            let (start, stop) = (start + u64::from(channel) * 10, end - u64::from(channel) * 10);
            self.span(record, Kind::KernelCh, start, stop);
            for &(peer, send) in &proxies {
                self.proxy(&record, peer, send, start, stop);
            }
        }
        if description.proxy_ops > 0 {
            let value = u64::from(description.proxy_ops);
            self.emit(Record {
                kind: Kind::ProxyCompleted as u8,
                state: State::STOP,
                time_ns: end,
                value,
                ..base
            });
        }
        let state = State::STOP;
        self.emit(Record {
            kind: Kind::OpCompleted as u8,
            state,
            time_ns: end,
            value: start,
            ..base
        });
    }

    /// (peer, whether it sends) of the proxy operations of each channel: to and from the ring's neighbours on other nodes.
    fn proxies(&self, peer: i32, send: Option<bool>) -> Vec<(u32, bool)> {
        let (job, rank) = (self.job, self.rank);
        let away = |peer: u32| job.node(peer) != job.node(rank);
        let all = match send {
            Some(send) => vec![(peer.cast_unsigned(), send)],
            None => vec![
                ((rank + 1) % job.ranks, true),
                ((rank + job.ranks - 1) % job.ranks, false),
            ],
        };
        all.into_iter().filter(|(peer, _)| away(*peer)).collect()
    }

    fn proxy(&mut self, base: &Record, peer: u32, send: bool, start: u64, stop: u64) {
        let steps = self.job.steps;
        let record = Record {
            peer: peer.cast_signed(),
            version_flags: base.version_flags & !Flags::SEND.0,
            value: Record::pack_proxy_op_shape(steps, 4096),
            ..*base
        }
        .with_flags(Flags::SEND.when(send));
        self.span(record, Kind::ProxyOp, start + 100, stop - 100);
        self.emit(Record {
            kind: Kind::ProxyOp as u8,
            state: State::OP_IN_PROGRESS,
            time_ns: start + 200,
            ..record
        });
        let states = if send {
            [
                State::START,
                State::STEP_SEND_GPU_WAIT,
                State::STEP_SEND_WAIT,
                State::STOP,
            ]
        } else {
            [
                State::START,
                State::STEP_RECV_WAIT,
                State::STEP_RECV_GPU_WAIT,
                State::STOP,
            ]
        };
        let each = (stop - start - 1000) / u64::from(steps.max(1));
        for step in 0..u64::from(steps) {
            for (quarter, state) in (0..).zip(states) {
                let time_ns = start + 300 + step * each + quarter * each / 4;
                let bytes = 4096;
                self.emit(Record {
                    kind: Kind::ProxyStep as u8,
                    state,
                    time_ns,
                    value: step,
                    bytes,
                    ..record
                });
            }
        }
    }
}
