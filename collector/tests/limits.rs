//! A process that writes without end, beside an honest job: what it makes the collector keep and do is bounded, what is left out is
//! counted, and the job's operations are complete.

mod common;

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use ringsight_collector::{
    Collector, Options,
    clock::{Clock, monotonic_ns},
    collector::SPANS_AT_ONCE,
    identity::Role,
    limits::{Limit, Limits, Shared},
    synthetic::{EPOCH_NS, Job, Operation},
};
use ringsight_exporters::model::{Batch, MetricData, Value};
use ringsight_probes::sample::{Carrier, Owner, Process, Sample};
use ringsight_records::{
    Cause, Description, Flags, Kind, PathCause, PathChange, Record, State,
    pages::{CAPTURED, Communicator},
};

use common::{attribute, check_trees, collector, collector_with, named};

/// Process id of the hostile process, and its user.
const PID: u32 = 66;
const NOBODY: u32 = 65534;

/// The job beside it.
fn job() -> Job {
    Job::default()
}

fn process(pid: u32, user: u32) -> Sample {
    let owner = Owner {
        user,
        cgroup: "0::/job".into(),
    };
    Sample::Process(Arc::new(Process {
        pid,
        owner,
        ..job().process(0)
    }))
}

fn communicator(pid: u32, id: u64, rank: u32, ranks: u32) -> Sample {
    let communicator = Box::new(Communicator {
        id,
        rank,
        ranks,
        ..job().communicator(0)
    });
    Sample::Communicator { pid, communicator }
}

fn sample(record: Record) -> Sample {
    Sample::Record {
        pid: PID,
        tid: 0,
        carrier: Carrier::Ring,
        record,
    }
}

fn record(kind: Kind, state: State, op: u32) -> Record {
    Record {
        op,
        comm: 0xbad,
        peer: 1,
        ..Record::new(kind, state, EPOCH_NS)
    }
}

fn described(op: u32) -> Description {
    Description {
        op,
        comm: 0xbad,
        ranks: 2,
        peer: -1,
        root: -1,
        ..Description::default()
    }
}

/// What the hostile process has of samples in one look, and how many looks there are.
const LOOK: usize = 2000;
const LOOKS: u32 = 20;

/// Runs an honest job, an operation each millisecond, beside a process that each time brings samples that `hostile` makes of their
/// numbers, [`LOOK`] of them. All of the job's operations must be complete in the end. Returns the collector and what it made.
fn beside(options: Options, mut hostile: impl FnMut(u32) -> Sample) -> (Collector, Batch) {
    let job = job();
    let operations: Vec<Operation> = (1..=LOOKS).map(Operation::all_reduce).collect();
    let mut collector = collector_with(options);
    let begins = Sample::Watermark {
        pid: PID,
        time_ns: EPOCH_NS,
    };
    let mut samples = vec![process(PID, NOBODY), begins];
    for rank in 0..job.ranks {
        samples.extend(job.streams(rank, &[]).head);
    }
    let mut batch = Batch::default();
    let mut take = |collector: &mut Collector, samples: &mut Vec<Sample>| {
        collector.ingest(samples);
        let new = collector.take_batch();
        batch.spans.extend(new.spans);
        batch.logs.extend(new.logs);
        batch.operations.extend(new.operations);
    };
    let mut number = 0;
    for operation in &operations {
        for _ in 0..LOOK {
            samples.push(hostile(number));
            number += 1;
        }
        for rank in 0..job.ranks {
            let streams = job.streams(rank, std::slice::from_ref(operation));
            samples.extend(streams.ring.into_iter().chain(streams.probe));
        }
        let pids = (0..job.ranks).map(|rank| job.pid(rank)).chain([PID]);
        samples.extend(pids.map(|pid| Sample::Watermark {
            pid,
            time_ns: operation.end_ns() + 500_000,
        }));
        take(&mut collector, &mut samples);
    }
    let end_ns = EPOCH_NS + 1_000_000_000;
    samples.extend((0..job.ranks).map(|rank| Sample::Watermark {
        pid: job.pid(rank),
        time_ns: end_ns,
    }));
    take(&mut collector, &mut samples);
    let honest = batch
        .operations
        .iter()
        .filter(|operation| operation.communicator == job.comm);
    let complete = honest.filter(|operation| operation.complete && operation.by_rank.len() == 4);
    assert_eq!(complete.count(), operations.len());
    (collector, batch)
}

fn left_out(collector: &Collector, limit: Limit) -> u64 {
    collector.readings().left_out.of(limit)
}

/// What `limits` counts at the end of a run, as metrics say it too.
fn only(collector: &mut Collector, limits: &[Limit]) {
    let counted: Vec<_> = collector
        .readings()
        .left_out
        .iter()
        .map(|(limit, _)| limit)
        .collect();
    assert_eq!(counted, limits);
    collector.add_metrics(EPOCH_NS, 0.0, Vec::new());
    let metrics = collector.take_batch().metrics;
    for limit in limits {
        let told = metrics.iter().find(|metric| {
            let of = ("limit", Value::Static(limit.name()));
            metric.name == "ccl.collector.left_out" && metric.attributes == [of]
        });
        let count = left_out(collector, *limit);
        assert_eq!(told.map(|told| &told.data), Some(&MetricData::Counter(count)));
    }
}

/// Time that `work` takes for four times as much, in units of what it takes for one: about 4 if each item takes as long however many
/// came before.
fn growth(work: impl Fn(u32) -> Duration) -> f64 {
    // The best of some: others use this machine.
    let best = |items| {
        (0..3)
            .map(|_| work(items))
            .min()
            .unwrap_or_default()
            .as_secs_f64()
    };
    best(80_000) / best(20_000).max(1e-6)
}

/// Four times the items take four times as long, or sixteen times where each looks at all before it.
const GROWS: f64 = 9.0;

/// How long a collector takes for so many samples of a process.
fn took(items: u32, of: impl Fn(u32) -> Sample) -> Duration {
    let mut collector = collector();
    let mut samples = vec![process(PID, NOBODY)];
    samples.extend((0..items).map(of));
    let begun = Instant::now();
    collector.ingest(&mut samples);
    begun.elapsed()
}

#[test]
fn one_operation_with_proxy_operations_without_end() {
    let begins = |n: u32| {
        let record = record(Kind::ProxyOp, State::START, 1);
        sample(Record {
            // Now equal ones, now ever new ones.
            peer: if n.is_multiple_of(2) { 1 } else { n.cast_signed() },
            ..record
        })
    };
    let (mut collector, _) = beside(Options::default(), begins);
    let most = Limits::default().proxies_per_operation as u64;
    assert_eq!(
        left_out(&collector, Limit::ProxiesPerOperation),
        u64::from(LOOKS) * LOOK as u64 - most
    );
    only(&mut collector, &[Limit::ProxiesPerOperation]);
    let growth = growth(|items| took(items, begins));
    assert!(growth < GROWS, "{growth}");
}

#[test]
fn operations_that_hold_ever_more() {
    // Each operation has few proxy operations, but there are many operations, and what carries the steps of each.
    let holds = |n: u32| {
        let carrier = ringsight_records::Carrier {
            port: Some(0),
            number: 1,
            step: n,
        };
        let record = record(Kind::NetPlugin, State::START, n % 16_000);
        sample(Record {
            peer: (n / 16_000).cast_signed(),
            value: carrier.to_value(),
            ..record
        })
    };
    let options = Options {
        limits: Limits {
            operation_parts: Shared {
                process: 10_000,
                all: 1_000_000,
            },
            ..Limits::default()
        },
        ..Options::default()
    };
    let (mut collector, _) = beside(options, holds);
    // Each sample asks for a proxy operation and for what carries its step.
    assert!(left_out(&collector, Limit::OperationParts) >= u64::from(LOOKS) * LOOK as u64 - 10_000);
    only(&mut collector, &[Limit::OperationParts]);
}

#[test]
fn operations_whose_arrivals_are_announced_and_never_come() {
    // Each one's end says that a record of the kind `Arrival` follows, and later another end.
    let ends = |n: u32| {
        let time_ns = EPOCH_NS + u64::from(n % 1000);
        sample(Record {
            time_ns,
            value: time_ns,
            channel: 1,
            ..record(Kind::OpCompleted, State::STOP, n % 3000)
        })
    };
    let most = 1000;
    let options = Options {
        limits: Limits {
            operations: Shared {
                process: most,
                all: 1_000_000,
            },
            ..Limits::default()
        },
        ..Options::default()
    };
    let (mut collector, _) = beside(options, ends);
    // None is given up: the oldest is handed out without its arrivals.
    only(&mut collector, &[]);
    let records = LOOK as u64 * u64::from(LOOKS);
    let readings = collector.readings();
    assert!(readings.in_flight <= most, "{}", readings.in_flight);
    assert_eq!(
        readings.counts.received[Kind::OpCompleted as usize],
        records + 4 * u64::from(LOOKS)
    );
}

#[test]
fn more_channels_than_there_are() {
    let channels = |n: u32| {
        let record = record(Kind::KernelCh, State::START, 1);
        sample(Record {
            channel: n as u8,
            ..record
        })
    };
    let (mut collector, _) = beside(Options::default(), channels);
    only(&mut collector, &[Limit::ChannelsPerOperation]);
}

#[test]
fn verdicts_without_end() {
    let judges = |spread: u32| {
        move |n: u32| {
            let record = record(Kind::Verdict, State::STOP, 1 + n % spread);
            let cause = Cause::RankStopped;
            sample(Record {
                value: u64::from(cause.code()) << 32 | 1,
                time_ns: EPOCH_NS + u64::from(n),
                ..record
            })
        }
    };
    let (collector, batch) = beside(Options::default(), judges(2));
    let limits = Limits::default();
    let most = 2 * limits.verdicts_per_operation;
    assert_eq!(batch.logs.len(), most);
    let rest = u64::from(LOOKS) * LOOK as u64 - most as u64;
    assert_eq!(
        left_out(&collector, Limit::VerdictsPerOperation) + left_out(&collector, Limit::Verdicts),
        rest
    );
    // Of many operations, in the second that all of it takes.
    let (mut collector, batch) = beside(Options::default(), judges(10_000));
    assert_eq!(batch.logs.len(), limits.verdicts);
    only(&mut collector, &[Limit::Verdicts]);
}

#[test]
fn a_list_of_what_is_wrong_that_one_process_fills() {
    let judges = |n: u32| match n % 2 {
        0 => Sample::Description {
            pid: PID,
            description: Box::new(Description {
                seq: u64::from(n),
                ..described(n)
            }),
        },
        _ => sample(Record {
            seq: u64::from(n - 1),
            value: u64::from(Cause::RankStopped.code()) << 32 | 1,
            time_ns: EPOCH_NS + u64::from(n),
            ..record(Kind::Verdict, State::STOP, n - 1)
        }),
    };
    let limits = Limits {
        verdicts: usize::MAX,
        // Nothing else is at its limit.
        operations: Shared {
            process: 100_000,
            all: 1_000_000,
        },
        ..Limits::default()
    };
    let options = Options {
        limits,
        ..Options::default()
    };
    let (mut collector, _) = beside(options, judges);
    let most = limits.findings.process;
    assert_eq!(collector.findings().len(), most);
    assert_eq!(
        left_out(&collector, Limit::Findings),
        u64::from(LOOKS) * LOOK as u64 / 2 - most as u64
    );
    only(&mut collector, &[Limit::Findings]);
    // The job beside it has its own place in the list.
    let job = job();
    let operation = Operation::all_reduce(LOOKS + 1);
    let of_job = job.streams(0, std::slice::from_ref(&operation));
    let described = of_job
        .ring
        .into_iter()
        .find(|sample| matches!(sample, Sample::Description { .. }));
    let judged = Sample::Record {
        pid: job.pid(0),
        tid: 0,
        carrier: Carrier::Ring,
        record: Record {
            comm: job.comm,
            seq: operation.seq,
            value: u64::from(Cause::RankStopped.code()) << 32 | 1,
            ..record(Kind::Verdict, State::STOP, operation.op)
        },
    };
    collector.ingest_each(described.into_iter().chain([judged]));
    let findings = collector.findings();
    let of_job = findings.iter().filter(|finding| finding.communicator == job.comm);
    assert_eq!(of_job.count(), 1);
}

#[test]
fn a_verdict_takes_no_longer_of_an_operation_that_holds_much() {
    let limits = Limits {
        verdicts: usize::MAX,
        verdicts_per_operation: usize::MAX,
        operation_parts: Shared {
            process: usize::MAX,
            all: usize::MAX,
        },
        ..Limits::default()
    };
    let time = |proxies: u32| {
        let mut collector = collector_with(Options {
            limits,
            ..Options::default()
        });
        let mut samples = vec![process(PID, NOBODY)];
        samples.extend((0..proxies).map(|n| {
            let record = record(Kind::ProxyOp, State::START, 1);
            sample(Record {
                peer: n.cast_signed(),
                ..record
            })
        }));
        collector.ingest(&mut samples);
        samples.extend((0..1000).map(|_| {
            let record = record(Kind::Verdict, State::STOP, 1);
            sample(Record {
                value: u64::from(Cause::RankStopped.code()) << 32,
                ..record
            })
        }));
        let begun = Instant::now();
        collector.ingest(&mut samples);
        begun.elapsed().as_secs_f64()
    };
    let best = |proxies| (0..3).map(|_| time(proxies)).fold(f64::INFINITY, f64::min);
    let (few, many) = (best(1), best(4000));
    assert!(
        many < 4.0 * few,
        "{few} s with one proxy operation, {many} s with 4000"
    );
}

#[test]
fn graphs_that_were_destroyed_in_the_far_future() {
    let destroyed = |n: u32| match n % 2 {
        0 => Sample::Description {
            pid: PID,
            description: Box::new(Description {
                graph: n,
                ..described(CAPTURED | n)
            }),
        },
        _ => sample(Record {
            time_ns: u64::MAX,
            ..record(Kind::Graph, State::STOP, n)
        }),
    };
    let limits = Limits {
        captured_operations: 1000,
        ..Limits::default()
    };
    let options = Options {
        limits,
        ..Options::default()
    };
    let (mut collector, _) = beside(options, destroyed);
    let half = u64::from(LOOKS) * LOOK as u64 / 2;
    assert_eq!(left_out(&collector, Limit::Graphs), half - limits.graphs as u64);
    assert_eq!(left_out(&collector, Limit::CapturedOperations), half - 1000);
    only(&mut collector, &[Limit::CapturedOperations, Limit::Graphs]);
    // What is kept of them goes when they are due, all in one pass.
    let time = |graphs: u32| {
        let mut collector = common::collector();
        let mut samples = vec![process(PID, NOBODY)];
        samples.extend((0..60_000).map(|n| destroyed(2 * n)));
        samples.extend((0..graphs).map(|n| sample(record(Kind::Graph, State::STOP, n))));
        collector.ingest(&mut samples);
        samples.push(Sample::Watermark {
            pid: PID,
            time_ns: u64::MAX / 2,
        });
        let begun = Instant::now();
        collector.ingest(&mut samples);
        begun.elapsed()
    };
    assert!(time(1000) < Duration::from_millis(500), "a pass for each graph");
}

#[test]
fn groups_that_never_end_or_end_without_end() {
    let begins = |n: u32| {
        let description = Box::new(Description {
            group: n,
            group_depth: 2,
            ..described(n)
        });
        match n % 2 {
            0 => Sample::Description {
                pid: PID,
                description,
            },
            // A time that looks like none.
            _ => sample(Record {
                time_ns: 0,
                value: 2,
                ..record(Kind::GroupApi, State::STOP, n % 8)
            }),
        }
    };
    let (mut collector, _) = beside(Options::default(), begins);
    only(&mut collector, &[Limit::Operations, Limit::Groups]);
    let growth = growth(|items| took(items, begins));
    assert!(growth < GROWS, "{growth}");
}

#[test]
fn ever_new_communicators() {
    let enters = |n: u32| communicator(PID, 1 + u64::from(n), n % 7, 8);
    let (mut collector, _) = beside(Options::default(), enters);
    let most = Limits::default().communicators as u64;
    assert_eq!(
        left_out(&collector, Limit::Communicators),
        u64::from(LOOKS) * LOOK as u64 - most
    );
    only(&mut collector, &[Limit::Communicators]);
    let growth = growth(|items| took(items, enters));
    assert!(growth < GROWS, "{growth}");
}

#[test]
fn communicators_that_are_destroyed_make_room() {
    let one = |n: u32| match n % 2 {
        0 => communicator(PID, u64::from(n), 0, 8),
        _ => sample(Record {
            comm: u64::from(n - 1),
            rank: 0,
            ..record(Kind::CommDestroy, State::STOP, 0)
        }),
    };
    let (mut collector, _) = beside(Options::default(), one);
    only(&mut collector, &[]);
}

#[test]
fn a_communicator_with_ever_more_ranks() {
    let enters = |n: u32| communicator(PID, 7, n, u32::MAX);
    let (mut collector, _) = beside(Options::default(), enters);
    only(&mut collector, &[Limit::RanksPerCommunicator, Limit::Resources]);
    let growth = growth(|items| took(items, enters));
    assert!(growth < GROWS, "{growth}");
}

#[test]
fn an_operation_of_many_ranks_takes_time_for_each_and_not_for_each_two() {
    let time = |ranks: u32| {
        let mut collector = collector_with(Options {
            limits: Limits {
                ranks_per_communicator: usize::MAX,
                communicators: usize::MAX,
                ..Limits::default()
            },
            ..Options::default()
        });
        let mut samples = vec![process(PID, NOBODY)];
        samples.extend((0..ranks).map(|rank| communicator(PID, 0xbad, rank, ranks)));
        collector.ingest(&mut samples);
        for rank in 0..ranks {
            let description = Box::new(Description {
                rank,
                ranks,
                function: ringsight_records::Function::AllReduce.code(),
                ..described(1 + rank)
            });
            samples.push(Sample::Description {
                pid: PID,
                description,
            });
            samples.push(sample(Record {
                rank,
                value: EPOCH_NS + u64::from(rank * 7919 % ranks),
                time_ns: EPOCH_NS + 1_000_000,
                ..record(Kind::OpCompleted, State::STOP, 1 + rank)
            }));
        }
        let begun = Instant::now();
        collector.ingest(&mut samples);
        for time_ns in [2, 3, 4].map(|second| second * EPOCH_NS) {
            samples.push(Sample::Watermark { pid: PID, time_ns });
            collector.ingest(&mut samples);
        }
        let took = begun.elapsed();
        let operations = collector.take_batch().operations;
        assert_eq!(operations[0].by_rank.len(), ranks as usize);
        took.as_secs_f64()
    };
    let best = |ranks| (0..3).map(|_| time(ranks)).fold(f64::INFINITY, f64::min);
    let growth = best(4000) / best(1000);
    assert!(growth < GROWS, "{growth}");
}

#[test]
fn operations_that_others_are_to_take_part_in_and_never_do() {
    let job = job();
    let one = move |n: u32| match n % 2 {
        0 => Sample::Description {
            pid: PID,
            description: Box::new(Description {
                comm: 0xbad,
                seq: u64::from(n),
                ..described(n)
            }),
        },
        _ => sample(Record {
            seq: u64::from(n - 1),
            time_ns: EPOCH_NS + 10,
            ..record(Kind::OpCompleted, State::STOP, n - 1)
        }),
    };
    // Its other rank is a process that does nothing.
    let options = Options {
        limits: Limits {
            instances: Shared {
                process: 100,
                all: 100_000,
            },
            linger_ns: 0,
            ..Limits::default()
        },
        ..Options::default()
    };
    let mut first = vec![
        process(PID + 1, NOBODY),
        communicator(PID, 0xbad, 0, 2),
        communicator(PID + 1, 0xbad, 1, 2),
    ]
    .into_iter();
    let (collector, _) = beside(options, |n| first.next().unwrap_or_else(|| one(n)));
    assert!(
        collector.waiting() <= 100 + job.ranks as usize,
        "{}",
        collector.waiting()
    );
    assert!(left_out(&collector, Limit::Instances) > 10_000);
}

#[test]
fn a_process_that_is_never_read_to_its_end_holds_nobody_up() {
    let job = job();
    let mut collector = collector();
    let mut samples = vec![process(PID, NOBODY)];
    samples.push(Sample::Watermark {
        pid: PID,
        time_ns: EPOCH_NS,
    });
    let operation = Operation::all_reduce(1);
    for rank in 0..job.ranks {
        samples.extend(job.streams(rank, std::slice::from_ref(&operation)).concat());
    }
    let end_ns = operation.end_ns();
    let watermark = |after_ns: u64| {
        (0..job.ranks).map(move |rank| Sample::Watermark {
            pid: job.pid(rank),
            time_ns: end_ns + after_ns,
        })
    };
    samples.extend(watermark(50_000_000));
    collector.ingest(&mut samples);
    assert_eq!(collector.take_batch().operations.len(), 0, "it may take part");
    samples.extend(watermark(Limits::default().delay_ns + 1));
    collector.ingest(&mut samples);
    let operations = collector.take_batch().operations;
    assert!(operations.len() == 1 && operations[0].complete, "{operations:?}");
}

#[test]
fn operations_that_are_all_over_at_once_become_spans_step_by_step() {
    let mut collector = collector();
    let mut samples = vec![process(PID, NOBODY), communicator(PID, 0xbad, 0, 1)];
    for op in 1..=12_000 {
        let description = Box::new(Description {
            ranks: 1,
            seq: u64::from(op),
            channels: 4,
            api_end_ns: EPOCH_NS,
            launch_end_ns: EPOCH_NS,
            ..described(op)
        });
        samples.push(Sample::Description {
            pid: PID,
            description,
        });
        for (channel, state) in (0..4).flat_map(|channel| [(channel, State::START), (channel, State::STOP)]) {
            samples.push(sample(Record {
                channel,
                ..record(Kind::KernelCh, state, op)
            }));
        }
        samples.push(sample(Record {
            seq: u64::from(op),
            value: EPOCH_NS,
            ..record(Kind::OpCompleted, State::STOP, op)
        }));
    }
    samples.push(Sample::Watermark {
        pid: PID,
        time_ns: 2 * EPOCH_NS,
    });
    let (mut largest, mut operations, mut spans) = (0, 0, 0);
    let mut looks = 0;
    while operations < 12_000 {
        collector.ingest(&mut samples);
        samples.push(Sample::Watermark {
            pid: PID,
            time_ns: 2 * EPOCH_NS + looks,
        });
        let batch = collector.take_batch();
        check_trees(&batch.spans);
        largest = largest.max(batch.spans.len());
        operations += batch.operations.len();
        spans += batch.spans.len();
        looks += 1;
        assert!(looks < 100, "{operations} operations");
    }
    assert!(spans > 2 * SPANS_AT_ONCE, "{spans}");
    assert!(largest < SPANS_AT_ONCE + 100, "{largest}");
    // The same at the end.
    let (mut collector, mut largest) = (common::collector(), 0);
    samples = vec![process(PID, NOBODY)];
    samples.extend((1..=10_000).map(|op| sample(record(Kind::OpLaunched, State::START, op))));
    collector.ingest(&mut samples);
    let mut unfinished = 0;
    loop {
        let more = collector.finish_some(2 * EPOCH_NS, 1000);
        let batch = collector.take_batch();
        unfinished += batch.spans.len();
        largest = largest.max(batch.spans.len());
        if !more {
            break;
        }
    }
    assert_eq!(unfinished, 10_000);
}

#[test]
fn what_there_is_no_time_for_at_the_end_is_counted() {
    let mut collector = collector();
    let mut samples = vec![process(PID, NOBODY)];
    samples.extend((1..=100).map(|op| sample(record(Kind::OpLaunched, State::START, op))));
    collector.ingest(&mut samples);
    collector.leave_out_the_rest(17);
    assert_eq!(left_out(&collector, Limit::End), 117);
}

#[test]
fn the_future_is_now() {
    let now = monotonic_ns();
    let mut collector = Collector::new(Options::default(), Clock::system(), now);
    collector.clock_mut().refresh(now);
    let mut samples = vec![process(PID, NOBODY), communicator(PID, 0xbad, 0, 1)];
    let description = Box::new(Description {
        ranks: 1,
        device_end_ns: u64::MAX,
        api_end_ns: u64::MAX,
        ..described(1)
    });
    samples.push(Sample::Description {
        pid: PID,
        description,
    });
    samples.push(sample(Record {
        time_ns: u64::MAX,
        value: u64::MAX - 1,
        ..record(Kind::OpCompleted, State::STOP, 1)
    }));
    let later = now + 5_000_000_000;
    collector.clock_mut().refresh(later);
    samples.push(Sample::Watermark {
        pid: PID,
        time_ns: later,
    });
    collector.ingest(&mut samples);
    // Were it in the future, it would never be over.
    let batch = collector.take_batch();
    assert_eq!(batch.operations.len(), 0);
    samples.push(Sample::Watermark {
        pid: PID,
        time_ns: later + 10_000_000_000,
    });
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    assert_eq!(batch.operations.len(), 1);
    let latest = collector.clock_mut().unix_ns(later + 1_000_000_000);
    assert!(
        batch.spans.iter().all(|span| span.end_unix_ns <= latest),
        "{:?}",
        batch.spans
    );
}

/// What `pid`, of `user`, does as rank 0 of a communicator of two ranks.
fn pretends(pid: u32, user: u32, id: u64, announced: bool) -> Vec<Sample> {
    let mut samples = vec![process(pid, user)];
    samples.extend(announced.then(|| communicator(pid, id, 0, 4)));
    let of_job = job().streams(
        0,
        &[Operation::all_reduce(1), Operation::all_reduce(2).in_group(2)],
    );
    let moved = of_job
        .ring
        .into_iter()
        .chain(of_job.probe)
        .map(|sample| match sample {
            Sample::Record {
                tid, carrier, record, ..
            } => Sample::Record {
                pid,
                tid,
                carrier,
                record,
            },
            Sample::Description { description, .. } => Sample::Description { pid, description },
            other => other,
        });
    samples.extend(moved);
    samples
}

/// The job's samples, then those of `other`, and what comes of them.
fn with(other: Vec<Sample>, first: bool) -> (Collector, Batch) {
    let job = job();
    let mut own = Vec::new();
    for rank in 0..job.ranks {
        let operations = [Operation::all_reduce(1), Operation::all_reduce(2)];
        own.extend(job.streams(rank, &operations).concat());
    }
    let mut samples = if first { [other, own] } else { [own, other] }.concat();
    for time_ns in [2, 3, 6].map(|second| second * EPOCH_NS) {
        let pids = (0..job.ranks).map(|rank| job.pid(rank)).chain([PID]);
        samples.extend(pids.map(|pid| Sample::Watermark { pid, time_ns }));
    }
    let mut collector = collector();
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    (collector, batch)
}

#[test]
fn two_users_are_never_in_one_trace() {
    for announced in [true, false] {
        let (collector, batch) = with(pretends(PID, NOBODY, job().comm, announced), false);
        check_trees(&batch.spans);
        let traces = |pid: u32| -> BTreeSet<_> {
            let of = |span: &&ringsight_exporters::model::Span| {
                let value = Value::Int(i64::from(pid));
                span.resource.attributes.contains(&("process.pid", value))
            };
            batch.spans.iter().filter(of).map(|span| span.trace_id).collect()
        };
        let (honest, other) = (traces(job().pid(0)), traces(PID));
        assert!(!honest.is_empty() && !other.is_empty());
        assert!(honest.is_disjoint(&other), "{announced}");
        let complete = batch.operations.iter().filter(|operation| {
            (operation.communicator, operation.by_rank.len()) == (job().comm, 4) && operation.complete
        });
        assert_eq!(complete.count(), 2);
        let honest_id = Value::Text(format!("{:016x}", job().comm).into());
        let mut of_other =
            named(&batch.spans, "all_reduce rank").filter(|span| other.contains(&span.trace_id));
        assert!(of_other.all(|span| attribute(span, "ccl.communicator.id") != Some(&honest_id)));
        // Links of its groups lead to its own.
        let groups: Vec<_> = named(&batch.spans, "group").collect();
        assert_eq!(groups.len(), 1);
        assert!(
            groups[0]
                .links
                .iter()
                .all(|link| !honest.contains(&link.trace_id))
        );
        let foreign = collector.readings().foreign;
        assert_eq!(foreign, u64::from(announced));
    }
}

#[test]
fn who_says_so_before_the_communicator_is_known_does_not_keep_its_ranks_out() {
    let (collector, batch) = with(pretends(PID, NOBODY, job().comm, false), true);
    let complete = batch.operations.iter().filter(|operation| operation.complete);
    assert_eq!(
        complete.filter(|operation| operation.by_rank.len() == 4).count(),
        2
    );
    for operation in &batch.operations {
        let pids: BTreeSet<_> = operation.by_rank.iter().map(|rank| rank.pid).collect();
        assert!(pids.len() == 1 || !pids.contains(&PID), "{operation:?}");
    }
    assert_eq!(collector.readings().in_flight, 0);
}

#[test]
fn a_rank_is_whose_it_was_first() {
    let (collector, batch) = with(pretends(PID, 0, job().comm, true), false);
    check_trees(&batch.spans);
    let whose: BTreeSet<_> = batch
        .operations
        .iter()
        .flat_map(|operation| &operation.by_rank)
        .filter(|rank| rank.rank == 0)
        .map(|rank| rank.pid)
        .collect();
    assert_eq!(whose, [job().pid(0)].into());
    assert!(batch.operations.iter().all(|operation| operation.complete));
    // The claim, and the two operations.
    assert_eq!(collector.readings().claimed_twice, 3);
}

#[test]
fn control_groups_set_apart_where_that_is_wanted() {
    for by_cgroup in [false, true] {
        let mut collector = collector_with(Options {
            by_cgroup,
            ..Options::default()
        });
        let mut samples = Vec::new();
        for rank in 0..2 {
            let pid = 10 + rank;
            let owner = Owner {
                user: 1,
                cgroup: format!("0::/pod{rank}"),
            };
            samples.push(Sample::Process(Arc::new(Process {
                pid,
                owner,
                ..job().process(0)
            })));
            samples.push(communicator(pid, 7, rank, 2));
        }
        collector.ingest(&mut samples);
        assert_eq!(collector.readings().foreign, u64::from(by_cgroup));
    }
}

/// A record of a path: the port that a process says is port 1 of the device mlx5_0 breaks, or is left.
fn path(pid: u32, comm: u64, state: State, peer: i32) -> Sample {
    let change = PathChange {
        cause: Some(PathCause::Port),
        from: 0,
        to: u8::from(state == State::PATH_SWITCHED),
        status: 0,
        port: Some(0),
        number: 5,
    };
    let record = Record {
        comm,
        peer,
        value: change.to_value(),
        ..Record::new(Kind::Failover, state, EPOCH_NS)
    };
    Sample::Record {
        pid,
        tid: 0,
        carrier: Carrier::Probe,
        record: record.with_flags(Flags::SEND),
    }
}

fn port(pid: u32) -> Sample {
    Sample::Port {
        pid,
        index: 0,
        device: "mlx5_0".into(),
        number: 1,
        gid: None,
    }
}

#[test]
fn failovers_of_two_users_are_two_failures() {
    let mut collector = collector();
    let honest = job().pid(0);
    let mut samples = job().streams(0, &[]).head;
    samples.extend([process(PID, NOBODY), port(honest), port(PID)]);
    samples.push(path(honest, job().comm, State::START, 1));
    let Sample::Record { record, .. } = path(PID, 0xbad, State::START, 1) else {
        unreachable!("a record")
    };
    // A moment later: else both had one trace all the same.
    let record = Record {
        time_ns: EPOCH_NS + 1,
        ..record
    };
    samples.push(sample(record));
    for (pid, comm) in [(honest, job().comm), (PID, 0xbad)] {
        samples.push(path(pid, comm, State::STOP, 1));
    }
    collector.ingest(&mut samples);
    let batch = collector.take_batch();
    let traces: BTreeSet<_> = named(&batch.spans, "port failover")
        .map(|span| span.trace_id)
        .collect();
    assert_eq!(traces.len(), 2);
    assert_eq!(collector.readings().spans.of(Role::Failover), 2);
}

#[test]
fn failovers_without_end() {
    let mut first = vec![port(PID)].into_iter();
    let switches = |n: u32| path(PID, 0xbad, State::PATH_SWITCHED, n.cast_signed());
    let (mut collector, batch) = beside(Options::default(), |n| {
        first.next().unwrap_or_else(|| switches(n))
    });
    let limits = Limits::default();
    assert_eq!(batch.logs.len(), limits.log_records);
    only(&mut collector, &[Limit::LogRecords, Limit::Failovers]);
    // The end of a communicator takes no look at the connections of others.
    let time = |connections: u32| {
        let mut collector = common::collector();
        let mut samples = vec![process(PID, NOBODY), port(PID)];
        samples.extend((0..connections).map(switches));
        collector.ingest(&mut samples);
        samples.extend((0..20_000).map(|n| {
            let record = record(Kind::CommDestroy, State::STOP, 0);
            sample(Record { comm: n, ..record })
        }));
        let begun = Instant::now();
        collector.ingest(&mut samples);
        begun.elapsed().as_secs_f64()
    };
    let best = |connections| (0..3).map(|_| time(connections)).fold(f64::INFINITY, f64::min);
    let (few, many) = (best(50), best(4000));
    // A look at each connection would take 80 times as long.
    assert!(
        many < 16.0 * few,
        "{few} s beside 50 connections, {many} s beside 4000"
    );
}

#[test]
fn the_largest_numbers_of_everything() {
    let all = Kind::ALL;
    let largest = |n: u32| {
        let kind = all[n as usize % all.len()];
        let states = [
            State::START,
            State::STOP,
            State::STEP_SEND_WAIT,
            State::PATH_SWITCHED,
        ];
        sample(Record {
            time_ns: if n.is_multiple_of(3) { 1 } else { u64::MAX },
            seq: u64::MAX,
            bytes: u64::MAX,
            value: u64::MAX,
            rank: u32::MAX,
            peer: i32::MAX,
            replay: n % 2,
            channel: u8::MAX,
            ..record(kind, states[n as usize / all.len() % states.len()], n % 3)
        })
    };
    let mut lost = (0..4).map(|_| Sample::Lost {
        pid: Some(PID),
        carrier: Carrier::Ring,
        kind: Some(Kind::ProxyStep),
        count: u64::MAX,
    });
    let (mut collector, _) = beside(Options::default(), |n| lost.next().unwrap_or_else(|| largest(n)));
    collector.finish(u64::MAX);
    collector.add_metrics(u64::MAX, 0.0, Vec::new());
    assert_eq!(collector.readings().counts.lost_total(), u64::MAX);
}
