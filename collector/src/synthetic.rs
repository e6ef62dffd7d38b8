//! Samples of jobs that never ran, for tests and benchmarks: what the probes room would deliver for a job of a given
//! shape, carrier by carrier, with exact times.

mod made;

use std::sync::Arc;

use made::Made;
use ringsight_probes::sample::{Carrier, Owner, Process, Sample};
use ringsight_records::{
    Function,
    pages::{APART_BYTES, CAPTURED, Communicator, put_text},
};

/// Process id of rank 0; rank r has this plus r.
pub const FIRST_PID: u32 = 1000;
/// When the first operation of a job begins, monotonic nanoseconds.
pub const EPOCH_NS: u64 = 1_000_000_000;
/// Time that an operation takes from the last arrival to its end.
pub const DURATION_NS: u64 = 100_000;
/// Time from an operation's API call to its arrival on a rank that is not late.
pub const ARRIVAL_NS: u64 = 20_000;

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
            owner: Owner::default(),
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
            slot_bytes: 0,
            abilities: 0,
            apart: [0; APART_BYTES],
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
