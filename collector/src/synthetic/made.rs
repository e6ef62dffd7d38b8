//! The records of one rank.

use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{
    DataType, Description, Flags, Function, Kind, Record, ReduceOp, State, pages::CAPTURED,
};

use super::{ARRIVAL_NS, EPOCH_NS, Job, Operation};

/// What the recv of a rank's message to itself adds to the send's operation number.
const SELF_RECV: u32 = 1 << 20;

pub(super) struct Made<'a> {
    pub(super) job: &'a Job,
    pub(super) rank: u32,
    pub(super) pid: u32,
    /// (time of delivery, carrier, sample)
    pub(super) timed: Vec<(u64, Carrier, Sample)>,
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

    pub(super) fn operation(&mut self, of: &Operation) {
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
