//! What the probes room hands to the collector: raw, in no order across carriers.

use std::{net::Ipv6Addr, path::PathBuf, sync::Arc};

use ringsight_records::{
    DataType, Description, DeviceClock, Function, Kind, Record, ReduceOp, pages, verdicts::GivenVerdict,
};

use crate::network::NetworkSample;

/// How a record came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Carrier {
    /// A probe function's uprobe and the eBPF ring buffer.
    Probe,
    /// The shared ring in the target's pages.
    Ring,
}

/// One thing learned about a target.
#[derive(Clone, Debug)]
pub enum Sample {
    /// A process is being watched; first sample of its pid.
    Process(Arc<Process>),
    /// A communicator of it; at attach for those that exist, later as they come.
    Communicator {
        /// Process.
        pid: u32,
        /// Its entry.
        communicator: Box<pages::Communicator>,
    },
    /// How a device's timer stands to the host's clock, or that events were lost there; whenever one has changed.
    Device {
        /// Process.
        pid: u32,
        /// Device number, as its communicators' entries have it.
        device: i32,
        /// Its clock, as last found; `None` if the process has not said.
        clock: Option<DeviceClock>,
        /// Starts and ends of operations that the device overwrote before they were read, since the last such sample.
        overwritten: u64,
    },
    /// A network port that connections of it go over; once for each.
    Port {
        /// Process.
        pid: u32,
        /// Its number among those that the process may use, as records have it.
        index: u8,
        /// RDMA device.
        device: String,
        /// Its number among the device's, from 1.
        number: u8,
        /// GID of the port; `None` where it needs none.
        gid: Option<Ipv6Addr>,
    },
    /// An event.
    Record {
        /// Process.
        pid: u32,
        /// Thread, 0 if unknown (shared ring).
        tid: u32,
        /// How it came.
        carrier: Carrier,
        /// The event.
        record: Record,
    },
    /// The description entry of an operation, read right after its `OpLaunched` and again after its `OpCompleted` record
    /// (then with device times), each delivered *before* that record. Absent if the slot had been reused: see [`Sample::Lost`].
    Description {
        /// Process.
        pid: u32,
        /// Its entry.
        description: Box<Description>,
    },
    /// Events lost since the last such sample.
    Lost {
        /// Process, if it is known whose they were.
        pid: Option<u32>,
        /// Where they were lost; descriptions count as [`Carrier::Ring`].
        carrier: Carrier,
        /// Kind, if it is known; `None` for descriptions that were overwritten before they could be read.
        kind: Option<Kind>,
        /// How many.
        count: u64,
    },
    /// Events that happened before this reader came and after an earlier one had ended, and that were not in the ring any
    /// more, if they ever were. No event of the time before the first reader is missed.
    Missed {
        /// Process.
        pid: u32,
        /// Kind.
        kind: Kind,
        /// How many.
        count: u64,
    },
    /// An event of the kernel's RDMA stack.
    Network(Box<NetworkSample>),
    /// Events of the kernel's RDMA stack that were lost since the last such sample.
    NetworkLost {
        /// How many.
        count: u64,
    },
    /// A host-timed call into a library without our probe functions.
    Call(Box<HostCall>),
    /// Everything that happened in this process before `time_ns` (`CLOCK_MONOTONIC`) has been delivered.
    Watermark {
        /// Process.
        pid: u32,
        /// Up to when.
        time_ns: u64,
    },
    /// What the watchdog of a process keeps of a verdict; its record comes next.
    Verdict {
        /// Process.
        pid: u32,
        /// The verdict.
        given: Box<GivenVerdict>,
    },
    /// A process ended, and not well; its [`Sample::Exited`] follows. Only where its parent had not asked for it yet.
    Failed {
        /// Process.
        pid: u32,
        /// How, as `waitpid` has it; not 0.
        status: i32,
    },
    /// The process has ended, or was let go of; last sample of its pid.
    Exited {
        /// Process.
        pid: u32,
        /// What it was in when it was let go of does not go on: it ended, or began another program.
        ended: bool,
    },
}

/// Whose a process is, as the kernel says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Effective user id, as this process's user namespace numbers it.
    pub user: u32,
    /// Control group: the last line of `/proc/<pid>/cgroup`, which is version 2's where there is one; empty if it is not known.
    pub cgroup: String,
}

/// A watched process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id as the collector sees it.
    pub pid: u32,
    /// Start time, clock ticks since boot.
    pub start_time: u64,
    /// `comm` of the process.
    pub name: String,
    /// The library file that is watched, as its own mount namespace names it.
    pub library: PathBuf,
    /// `ncclGetVersion` number, 0 if unknown.
    pub library_version: u32,
    /// Host identity (`NCCL_HOSTID` of the target, else the machine's id).
    pub host_id: String,
    /// Host name (`NCCL_HOSTID` of the target, else its UTS host name).
    pub host_name: String,
    /// Whose it is.
    pub owner: Owner,
    /// Whether the library has our probe functions and pages; `false` means host-timed calls only.
    pub instrumented: bool,
    /// Environment of interest for resource attributes: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `SLURM_JOB_ID`,
    /// `RANK`, `TORCHELASTIC_RUN_ID`, ... as (name, value), only names from a fixed list.
    pub environment: Vec<(String, String)>,
}

/// A call of an exported `nccl*` function, decoded by its signature.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCall {
    /// Process.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// Function called.
    pub call: Call,
    /// Entry, `CLOCK_MONOTONIC` nanoseconds.
    pub start_ns: u64,
    /// Return; `None` if only the entry is probed.
    pub end_ns: Option<u64>,
    /// Result code at return.
    pub result: Option<i32>,
}

/// What was called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A communication function.
    Operation {
        /// Which.
        function: Function,
        /// Send buffer.
        send: u64,
        /// Receive buffer.
        recv: u64,
        /// Elements.
        count: u64,
        /// Element type, if the number is one of `ncclDataType_t`.
        data_type: Option<DataType>,
        /// Reduction, if the function has one and the number is a built-in one.
        reduce_op: Option<ReduceOp>,
        /// Root or peer, -1 if the function has none.
        peer: i32,
        /// `ncclComm_t`: identifies the communicator within the process only.
        comm: u64,
        /// Stream.
        stream: u64,
    },
    /// `ncclGroupStart`.
    GroupStart,
    /// `ncclGroupEnd`.
    GroupEnd,
}

/// Something that yields samples: live targets, or a recorded file.
pub trait Source {
    /// Appends what has come since the last call. Returns `false` once nothing will ever come again.
    ///
    /// # Errors
    /// What broke, in words; the source stays usable for its other targets.
    fn poll(&mut self, samples: &mut Vec<Sample>) -> Result<bool, String>;
}
