//! Operations that never end, as their spans tell it: one error span a rank in the operation's trace, linked to what it waits for.

mod common;

use ringsight_collector::{
    Collector,
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::{Span, Value};
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Cause, Kind, Record, State};

use common::{attribute, check_trees, collector, named};

const WORLD: Job = Job {
    comm: 0x1122_3344_5566_7788,
    ranks: 4,
    nodes: 2,
    channels: 2,
    steps: 4,
};
/// Another communicator of the same processes.
const OTHER: Job = Job { comm: 0x99, ..WORLD };

fn is_end(sample: &Sample) -> bool {
    matches!(sample, Sample::Record { record, .. } if record.kind() == Some(Kind::OpCompleted))
}

/// What a rank delivers of operations of which the last does not end. Its process is that of `WORLD`.
fn stuck(job: &Job, rank: u32, operations: &[Operation]) -> Vec<Sample> {
    let mut samples = job.streams(rank, operations).concat();
    samples.retain(|sample| *job == WORLD || !matches!(sample, Sample::Process(_)));
    let last = samples.iter().rposition(is_end).unwrap();
    samples.remove(last);
    samples
}

/// The end of what `stuck` has left open.
fn end(job: &Job, rank: u32, operation: &Operation, state: State) -> Sample {
    let mut samples = job.streams(rank, std::slice::from_ref(operation)).concat();
    let mut sample = samples.remove(samples.iter().position(is_end).unwrap());
    if let Sample::Record { record, .. } = &mut sample {
        record.state = state;
        record.time_ns += 3_000_000_000;
    }
    sample
}

/// Rank `rank` says of an operation that it waits for `culprit`.
fn verdict(job: &Job, rank: u32, operation: &Operation, cause: Cause, culprit: u32) -> Sample {
    let Sample::Record { record, .. } = end(job, rank, operation, State::STOP) else {
        unreachable!("a record")
    };
    Sample::Record {
        pid: FIRST_PID + rank,
        tid: 1,
        carrier: Carrier::Probe,
        record: Record {
            value: u64::from(cause.code()) << 32 | u64::from(culprit),
            kind: Kind::Verdict as u8,
            time_ns: record.time_ns - 500_000_000,
            ..record
        },
    }
}

fn watermarks(second: u64) -> impl Iterator<Item = Sample> {
    (0..4).map(move |rank| Sample::Watermark {
        pid: FIRST_PID + rank,
        time_ns: EPOCH_NS + second * 1_000_000_000,
    })
}

fn exited(rank: u32) -> Sample {
    Sample::Exited {
        pid: FIRST_PID + rank,
        ended: true,
    }
}

fn take(collector: &mut Collector, samples: impl IntoIterator<Item = Sample>) -> Vec<Span> {
    let mut samples: Vec<Sample> = samples.into_iter().collect();
    collector.ingest(&mut samples);
    collector.take_batch().spans
}

fn rank_of(span: &Span) -> i64 {
    match attribute(span, "ccl.rank") {
        Some(Value::Int(rank)) => *rank,
        other => panic!("{other:?}: {span:?}"),
    }
}

/// Type and target of each link of a span that leads to a hang; every target is there.
fn led<'a>(spans: &'a [Span], span: &Span) -> Vec<(&'static str, &'a Span)> {
    let target = |link: &ringsight_exporters::model::SpanLink| {
        let Some((_, Value::Static(kind))) = link.attributes.first() else {
            panic!("{link:?}")
        };
        let found = spans
            .iter()
            .find(|span| (span.trace_id, span.span_id) == (link.trace_id, link.span_id));
        (
            *kind,
            found.unwrap_or_else(|| panic!("{kind} leads nowhere: {span:?}")),
        )
    };
    span.links.iter().map(target).collect()
}

/// The rank spans of the operation with sequence `seq`.
fn ranks(spans: &[Span], seq: i64) -> Vec<&Span> {
    named(spans, "all_reduce rank")
        .filter(|span| attribute(span, "ccl.operation.sequence") == Some(&Value::Int(seq)))
        .collect()
}

#[test]
fn a_collective_that_hangs_is_one_trace_that_leads_to_the_last_operation_of_the_rank_that_never_came() {
    let [first, second] = [1, 2].map(Operation::all_reduce);
    let mut samples: Vec<Sample> = Vec::new();
    for rank in 0..3 {
        samples.extend(stuck(&WORLD, rank, &[first.clone(), second.clone()]));
    }
    samples.extend(WORLD.streams(3, std::slice::from_ref(&first)).concat());
    samples.extend(watermarks(1));
    // Not all of them speak.
    samples.extend([0, 2].map(|rank| verdict(&WORLD, rank, &second, Cause::RankStopped, 3)));
    let mut collector = collector();
    let mut spans = take(&mut collector, samples);
    assert_eq!(ranks(&spans, 0).len(), 4, "the first has ended");
    assert_eq!(ranks(&spans, 1).len(), 0, "the second goes on");

    collector.finish(EPOCH_NS + 9_000_000_000);
    let batch = collector.take_batch();
    assert_eq!((collector.unfinished(), batch.operations.len()), (3, 0));
    spans.extend(batch.spans);
    check_trees(&spans);
    assert_eq!(named(&spans, "ccl.operation.unfinished").count(), 0);
    let hung = ranks(&spans, 1);
    assert_eq!(
        hung.iter().map(|span| rank_of(span)).collect::<Vec<_>>(),
        [0, 1, 2]
    );
    let last = ranks(&spans, 0)[3];
    for span in hung {
        assert_eq!(attribute(span, "ccl.complete"), Some(&Value::Bool(false)));
        assert!(
            span.end_unix_ns - span.start_unix_ns > 7_000_000_000,
            "until the end"
        );
        let speaks = rank_of(span) != 1;
        let said = if speaks {
            "RANK_STOPPED: rank 3"
        } else {
            "the operation had not finished when its observation ended"
        };
        assert_eq!(span.error.as_deref(), Some(said));
        assert_eq!(span.events.len(), usize::from(speaks));
        let led = led(&spans, span);
        assert_eq!(led, &[("last", last)][..usize::from(speaks)]);
    }
}

#[test]
fn a_hang_leads_to_what_holds_the_rank_up_and_that_back() {
    let [waits, elsewhere] = [1, 2].map(Operation::all_reduce);
    let mut samples = Vec::new();
    for rank in 0..3 {
        samples.extend(stuck(&WORLD, rank, std::slice::from_ref(&waits)));
    }
    samples.extend(WORLD.streams(3, &[]).concat());
    samples.extend(stuck(&OTHER, 3, std::slice::from_ref(&elsewhere)));
    samples.extend(watermarks(1));
    samples.push(verdict(&WORLD, 1, &waits, Cause::NotLaunched, 3));
    let mut collector = collector();
    // While it hangs there is a span that says so, and where the rank is.
    let mut spans = take(&mut collector, samples);
    assert_eq!(spans.iter().map(|span| span.name).collect::<Vec<_>>(), ["hang"]);
    // All are killed, the rank that is waited for last.
    spans.extend(take(&mut collector, [0, 1, 2].map(exited)));
    spans.extend(take(&mut collector, [exited(3)]));
    collector.finish(EPOCH_NS + 9_000_000_000);
    spans.extend(collector.take_batch().spans);
    let waiting = ranks(&spans, 0);
    let hung = ranks(&spans, 1);
    let [hung] = hung[..] else { panic!("{hung:?}") };
    assert_eq!((rank_of(hung), waiting.len()), (3, 3));
    assert_eq!(led(&spans, hung), [("awaited_in", waiting[1])]);
    assert_eq!(led(&spans, waiting[1]), [("held_up", hung)]);
    assert_eq!(led(&spans, &spans[0]), [("held_up", hung)]);
    assert_eq!(spans[0].parent_span_id, Some(waiting[1].span_id));
    for span in waiting.into_iter().chain([hung]) {
        assert!(span.error.is_some());
    }
}

#[test]
fn a_rank_that_dies_in_an_operation_is_where_its_peers_lead() {
    let operation = Operation::all_reduce(1);
    let mut samples = Vec::new();
    for rank in 0..4 {
        samples.extend(stuck(&WORLD, rank, std::slice::from_ref(&operation)));
    }
    samples.extend(watermarks(1));
    let others = [0, 1, 3];
    samples.push(exited(2));
    samples.extend(others.map(|rank| verdict(&WORLD, rank, &operation, Cause::RankDead, 2)));
    samples.extend(others.map(|rank| end(&WORLD, rank, &operation, State::ABORTED)));
    samples.extend(watermarks(9));
    let mut collector = collector();
    let spans = take(&mut collector, samples);
    check_trees(&spans);
    let all = ranks(&spans, 0);
    assert_eq!(all.len(), 4);
    for span in &all {
        let dead = rank_of(span) == 2;
        assert_eq!(led(&spans, span), &[("awaited", all[2])][usize::from(dead)..]);
        assert!(span.error.is_some());
    }
}

#[test]
fn the_root_of_a_hang_is_sent_without_rank_0_and_not_again_when_that_comes() {
    let operation = Operation::all_reduce(1);
    let mut samples = Vec::new();
    for rank in 1..4 {
        samples.extend(stuck(&WORLD, rank, std::slice::from_ref(&operation)));
    }
    samples.extend(WORLD.streams(0, &[]).concat());
    samples.extend(watermarks(1));
    for rank in 1..4 {
        samples.push(verdict(&WORLD, rank, &operation, Cause::NotLaunched, 0));
        samples.push(end(&WORLD, rank, &operation, State::ABORTED));
    }
    samples.extend(watermarks(9));
    samples.extend(watermarks(12));
    let mut collector = collector();
    let mut spans = take(&mut collector, samples);
    check_trees(&spans);
    let root = named(&spans, "all_reduce").next().unwrap();
    let rank_0 = ("ccl.job.rank", Value::Int(0));
    assert!(root.resource.attributes.contains(&rank_0), "{:?}", root.resource);

    let late = WORLD.streams(0, std::slice::from_ref(&operation)).concat();
    spans.extend(take(&mut collector, late.into_iter().chain(watermarks(15))));
    assert_eq!(named(&spans, "all_reduce").count(), 1);
    assert_eq!(ranks(&spans, 0).len(), 4);
    for span in ranks(&spans, 0) {
        led(&spans, span);
    }
}

#[test]
fn what_may_go_on_is_left_to_whoever_sees_it_end() {
    let [judged, other] = [1, 2].map(Operation::all_reduce);
    let mut samples = Vec::new();
    for rank in 0..4 {
        samples.extend(stuck(&WORLD, rank, std::slice::from_ref(&judged)));
        samples.extend(stuck(&OTHER, rank, std::slice::from_ref(&other)));
    }
    samples.extend(watermarks(1));
    samples.push(verdict(&WORLD, 1, &judged, Cause::StuckKernel, 0));
    let mut collector = collector();
    take(&mut collector, samples);
    let gone = (0..4).map(|rank| Sample::Exited {
        pid: FIRST_PID + rank,
        ended: false,
    });
    let mut spans = take(&mut collector, gone);
    collector.finish(EPOCH_NS + 9_000_000_000);
    spans.extend(collector.take_batch().spans);
    check_trees(&spans);
    assert_eq!((ranks(&spans, 0).len(), ranks(&spans, 1).len()), (4, 0));
    assert_eq!(named(&spans, "ccl.operation.unfinished").count(), 4);
}
