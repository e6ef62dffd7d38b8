//! Where each field of the profiler interface's version 5 descriptors (`ncclProfilerEventDescr_v5_t`) is found in the
//! records and descriptions of a running operation.
//!
//! Each row of [`FIELDS`] reads its field from what one real run left behind, and says what the run makes it. The
//! descriptors' own text ([`DESCRIPTORS`]) is the list of what must be there: a field without a row fails.

use std::collections::BTreeSet;

use ringsight_comm::{abi, observe};
use ringsight_records::{
    Algorithm, DataType, Description, Flags, Function, Kind, Protocol, Record, State, pages::Reader, ring,
};

use crate::common::{Call, Rank, host, ok, processes::rank_of_process};

/// The events and fields of `ncclProfilerEventDescr_v5_t` and `ncclProfilerEventStateArgs_v5_t`, in their order.
const DESCRIPTORS: &str = "
    all: type parentObj rank
    groupApi: graphCaptured groupDepth
    collApi: func count datatype root stream graphCaptured
    p2pApi: func count datatype stream graphCaptured
    kernelLaunch: stream
    coll: seqNumber func sendBuff recvBuff count root datatype nChannels nWarps algo proto parentGroup
    p2p: func buff datatype count peer nChannels parentGroup
    proxyOp: pid channelId peer nSteps chunkSize isSend
    proxyStep: step transSize
    proxyCtrl: appendedProxyOps
    kernelCh: channelId pTimer
";

/// One run: a reduction, a broadcast from rank 1, a captured all-reduce, a grouped send and receive, the same captured. In this
/// order: what is found by its place in it is not found by the number that is looked for.
struct Run {
    records: Vec<Record>,
    rank: Rank,
    send: u64,
    recv: u64,
}

const COUNT: usize = 100_000;

impl Run {
    fn of(&self, kind: Kind, state: State) -> impl Iterator<Item = &Record> {
        self.records
            .iter()
            .filter(move |record| record.kind() == Some(kind) && record.state == state)
    }

    fn find(&self, kind: Kind, state: State, op: u32) -> &Record {
        self.of(kind, state)
            .find(|record| record.op == op)
            .unwrap_or_else(|| panic!("no {kind} of {op:#x}"))
    }

    /// The `n`-th record of this kind, in the order of their times.
    fn nth(&self, kind: Kind, state: State, n: usize) -> &Record {
        let mut records: Vec<_> = self.of(kind, state).collect();
        records.sort_by_key(|record| record.time_ns);
        records
            .get(n)
            .unwrap_or_else(|| panic!("{} records of {kind}, not {n}", records.len()))
    }

    /// The descriptions of the operations of `function`, in the order of their launches.
    fn descriptions(&self, function: Function) -> impl Iterator<Item = Description> {
        self.of(Kind::OpLaunched, State::START)
            .filter_map(|record| observe::pages().unwrap().description(record.op))
            .filter(move |about| about.function == function.code())
    }

    /// The description of the first operation of `function`.
    fn described(&self, function: Function) -> Description {
        self.descriptions(function)
            .next()
            .unwrap_or_else(|| panic!("{function} is not described"))
    }

    fn coll(&self) -> Description {
        self.described(Function::Broadcast)
    }

    fn captured(&self) -> Description {
        self.described(Function::AllReduce)
    }

    fn sent(&self) -> Description {
        self.described(Function::Send)
    }

    fn captured_send(&self) -> Description {
        let described = self.descriptions(Function::Send).last();
        described.expect("a captured send")
    }

    fn received(&self) -> Description {
        self.described(Function::Recv)
    }

    fn proxy_op(&self) -> &Record {
        self.find(Kind::ProxyOp, State::START, self.sent().op)
    }

    fn graph(&self, kind: Kind, op: u32) -> u64 {
        u64::from(self.find(kind, State::STOP, op).flags().contains(Flags::GRAPH))
    }
}

type Read = fn(&Run) -> u64;

/// Event, field, what is found, what it must be.
const FIELDS: &[(&str, &str, Read, Read)] = &[
    (
        "all",
        "type",
        |run| 1 << run.find(Kind::Coll, State::START, run.coll().op).kind,
        |_| 1 << 1,
    ),
    // The API event and the collective have the same operation number.
    (
        "all",
        "parentObj",
        |run| u64::from(run.nth(Kind::CollApi, State::START, 1).op),
        |run| u64::from(run.coll().op),
    ),
    (
        "all",
        "rank",
        |run| u64::from(run.find(Kind::Coll, State::START, run.coll().op).rank),
        |run| run.rank.rank as u64,
    ),
    (
        "groupApi",
        "graphCaptured",
        |run| run.graph(Kind::GroupApi, run.captured().group),
        |_| 1,
    ),
    (
        "groupApi",
        "groupDepth",
        |run| run.find(Kind::GroupApi, State::START, run.sent().group).value,
        |_| 2,
    ),
    (
        "collApi",
        "func",
        |run| run.coll().function.into(),
        |_| Function::Broadcast.code().into(),
    ),
    ("collApi", "count", |run| run.coll().count, |_| COUNT as u64),
    (
        "collApi",
        "datatype",
        |run| run.coll().data_type.into(),
        |_| DataType::Float32.code().into(),
    ),
    ("collApi", "root", |run| run.coll().root as u64, |_| 1),
    (
        "collApi",
        "stream",
        |run| run.coll().stream,
        |run| run.rank.stream.0 as u64,
    ),
    (
        "collApi",
        "graphCaptured",
        |run| run.graph(Kind::CollApi, run.captured().op),
        |_| 1,
    ),
    (
        "p2pApi",
        "func",
        |run| run.sent().function.into(),
        |_| Function::Send.code().into(),
    ),
    ("p2pApi", "count", |run| run.sent().count, |_| COUNT as u64),
    (
        "p2pApi",
        "datatype",
        |run| run.sent().data_type.into(),
        |_| DataType::Float32.code().into(),
    ),
    (
        "p2pApi",
        "stream",
        |run| run.sent().stream,
        |run| run.rank.stream.0 as u64,
    ),
    (
        "p2pApi",
        "graphCaptured",
        |run| run.graph(Kind::P2pApi, run.captured_send().op) << 1 | run.graph(Kind::P2pApi, run.sent().op),
        |_| 0b10,
    ),
    (
        "kernelLaunch",
        "stream",
        |run| run.find(Kind::KernelLaunch, State::START, run.coll().plan).value,
        |run| run.rank.stream.0 as u64,
    ),
    (
        "coll",
        "seqNumber",
        |run| run.find(Kind::Coll, State::START, run.coll().op).seq,
        |_| 1,
    ),
    (
        "coll",
        "func",
        |run| run.coll().function.into(),
        |_| Function::Broadcast.code().into(),
    ),
    // Only the root of a broadcast has a send buffer that is used.
    (
        "coll",
        "sendBuff",
        |run| run.captured().send_buffer,
        |run| run.send,
    ),
    ("coll", "recvBuff", |run| run.coll().recv_buffer, |run| run.recv),
    ("coll", "count", |run| run.coll().count, |_| COUNT as u64),
    ("coll", "root", |run| run.coll().root as u64, |_| 1),
    (
        "coll",
        "datatype",
        |run| run.coll().data_type.into(),
        |_| DataType::Float32.code().into(),
    ),
    ("coll", "nChannels", |run| run.coll().channels.into(), |_| 2),
    ("coll", "nWarps", |run| run.coll().warps.into(), |_| 1),
    (
        "coll",
        "algo",
        |run| run.coll().algorithm.into(),
        |_| Algorithm::Ring.code().into(),
    ),
    (
        "coll",
        "proto",
        |run| run.coll().protocol.into(),
        |_| Protocol::Simple.code().into(),
    ),
    (
        "coll",
        "parentGroup",
        |run| run.coll().group.into(),
        |run| run.nth(Kind::Group, State::START, 1).op.into(),
    ),
    (
        "p2p",
        "func",
        |run| run.received().function.into(),
        |_| Function::Recv.code().into(),
    ),
    (
        "p2p",
        "buff",
        |run| run.sent().send_buffer ^ run.received().recv_buffer,
        |run| run.send ^ run.recv,
    ),
    (
        "p2p",
        "datatype",
        |run| run.sent().data_type.into(),
        |_| DataType::Float32.code().into(),
    ),
    ("p2p", "count", |run| run.received().count, |_| COUNT as u64),
    (
        "p2p",
        "peer",
        |run| run.sent().peer as u64,
        |run| 1 - run.rank.rank as u64,
    ),
    ("p2p", "nChannels", |run| run.sent().channels.into(), |_| 2),
    (
        "p2p",
        "parentGroup",
        |run| u64::from(run.sent().group) << 32 | u64::from(run.received().group),
        |run| {
            let group = u64::from(run.nth(Kind::Group, State::START, 3).op);
            group << 32 | group
        },
    ),
    (
        "proxyOp",
        "pid",
        |run| run.proxy_op().pid.into(),
        |_| std::process::id().into(),
    ),
    (
        "proxyOp",
        "channelId",
        |run| 1 << run.proxy_op().channel & run.sent().channel_mask,
        |run| 1 << run.proxy_op().channel,
    ),
    (
        "proxyOp",
        "peer",
        |run| run.proxy_op().peer as u64,
        |run| 1 - run.rank.rank as u64,
    ),
    // Half of 400 kB on each of two channels, in slots of 128 KiB.
    (
        "proxyOp",
        "nSteps",
        |run| run.proxy_op().proxy_op_shape().0.into(),
        |_| 2,
    ),
    (
        "proxyOp",
        "chunkSize",
        |run| run.proxy_op().proxy_op_shape().1.into(),
        |_| 128 << 10,
    ),
    (
        "proxyOp",
        "isSend",
        |run| run.proxy_op().flags().contains(Flags::SEND).into(),
        |_| 1,
    ),
    // The steps of one channel's operation are numbered through.
    (
        "proxyStep",
        "step",
        |run| steps(run).map(|step| step.value).collect::<BTreeSet<_>>().len() as u64,
        |_| 2,
    ),
    (
        "proxyStep",
        "transSize",
        |run| steps(run).map(|step| step.bytes).sum(),
        |run| {
            let part = |channel| {
                if channel == FIRST_CHANNEL {
                    COUNT.div_ceil(2).next_multiple_of(16)
                } else {
                    0
                }
            };
            let first = part(run.proxy_op().channel);
            4 * if first > 0 {
                first
            } else {
                COUNT - COUNT.div_ceil(2).next_multiple_of(16)
            } as u64
        },
    ),
    (
        "proxyCtrl",
        "appendedProxyOps",
        |run| {
            u64::from(
                run.of(Kind::ProxyCtrl, State::CTRL_APPEND_END)
                    .any(|record| record.bytes > 0),
            )
        },
        |_| 1,
    ),
    (
        "kernelCh",
        "channelId",
        |run| {
            run.of(Kind::KernelCh, State::START)
                .filter(|record| record.op == run.coll().op)
                .fold(0, |mask, record| mask | 1 << record.channel)
        },
        |run| run.coll().channel_mask,
    ),
    (
        "kernelCh",
        "pTimer",
        |run| {
            run.of(Kind::KernelCh, State::STOP)
                .filter(|record| record.op == run.coll().op)
                .map(|record| record.value)
                .max()
                .unwrap()
        },
        |run| run.coll().device_end_ns,
    ),
];

/// The channel that carries the first part of what a rank of two sends: a message to the next rank begins on channel 1.
const FIRST_CHANNEL: u8 = 1;

/// The finished steps of [`Run::proxy_op`].
fn steps(run: &Run) -> impl Iterator<Item = &Record> {
    let (op, channel) = (run.sent().op, run.proxy_op().channel);
    run.of(Kind::ProxyStep, State::STOP)
        .filter(move |record| record.op == op && record.channel == channel)
}

fn every_field_has_a_row() {
    let listed: Vec<(String, String)> = DESCRIPTORS
        .lines()
        .filter_map(|line| line.trim().split_once(": "))
        .flat_map(|(event, fields)| {
            fields
                .split(' ')
                .map(|field| (event.to_owned(), field.to_owned()))
        })
        .collect();
    let rows: Vec<(String, String)> = FIELDS
        .iter()
        .map(|(event, field, ..)| ((*event).to_owned(), (*field).to_owned()))
        .collect();
    assert_eq!(listed, rows);
}

/// One of two ranks: does the calls of [`Run`] and looks up every field.
pub(crate) fn found() {
    every_field_has_a_row();
    let rank = rank_of_process();
    let device = host();
    let header = observe::pages().unwrap().header();
    let lease = header
        .lease
        .acquire(
            &Reader::new(std::process::id(), 1, 0),
            observe::now_ns(),
            Kind::EVERY,
            |_| false,
        )
        .expect("nobody else watches this process");
    let (send, mut recv) = (vec![1f32; COUNT], vec![0f32; COUNT]);
    let (out, into) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    for function in [Function::Reduce, Function::Broadcast] {
        ok(rank.call(
            &Call {
                root: 1,
                ..Call::new(function, COUNT)
            },
            out,
            into,
        ));
    }
    rank.synchronize();
    let captured = |calls: &dyn Fn()| {
        device.capture_begin(rank.stream).unwrap();
        calls();
        let graph = device.capture_end(rank.stream).unwrap();
        let exec = device.graph_instantiate(graph).unwrap();
        device.graph_destroy(graph).unwrap();
        device.graph_launch(exec, rank.stream).unwrap();
        rank.synchronize();
        exec
    };
    let exchange = || {
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupStart() });
        ok(rank.call(
            &Call::peer(Function::Send, COUNT, 1 - rank.rank),
            out,
            std::ptr::null_mut(),
        ));
        ok(rank.call(
            &Call::peer(Function::Recv, COUNT, 1 - rank.rank),
            std::ptr::null(),
            into,
        ));
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupEnd() });
    };
    let reduced = captured(&|| ok(rank.call(&Call::new(Function::AllReduce, COUNT), out, into)));
    exchange();
    rank.synchronize();
    let exchanged = captured(&exchange);
    // The proxy's last records follow the kernel's.
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommFinalize(rank.comm) });
    let pages = observe::pages().unwrap();
    let records = std::iter::from_fn(|| ring::pop(&header.cursor, pages.ring())).collect();
    header.lease.release(lease);
    let run = Run {
        records,
        rank,
        send: send.as_ptr() as u64,
        recv: recv.as_ptr() as u64,
    };
    for (event, field, found, expected) in FIELDS {
        assert_eq!(found(&run), expected(&run), "{event}.{field}");
    }
    for exec in [reduced, exchanged] {
        device.graph_exec_destroy(exec).unwrap();
    }
    rank.leave();
}
