//! Ports that fail: all connections that leave one, through the whole collector.

mod common;

use ringsight_collector::synthetic::{EPOCH_NS, Job, Operation};
use ringsight_exporters::model::{Span, Value};
use ringsight_probes::{network::VerbsEvent, sample::Sample};
use ringsight_records::{Kind, PathCause, State};

use common::{
    attribute, check_trees, collector,
    failover::{
        SECOND, back, broken, change, check, connection_and_port, events, kernel, later, left, links, moment,
        of, one, spans, two_processes,
    },
    named,
};

/// Two processes of a host use a device: what it fails with is one trace of both, whichever of them is over first.
#[test]
fn a_port_that_fails_is_one_trace_of_all_that_used_it() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = vec![kernel(5, 1, VerbsEvent::PORT_ERR)];
    samples.extend(of(&job, 0, 3, left(comm, 10)));
    samples.extend(of(&job, 1, 3, left(comm, 12)));
    samples.push(kernel(500, 1, VerbsEvent::PORT_ACTIVE));
    samples.extend(of(&job, 0, 3, back(comm, 600)));
    let mut sent = spans(&mut collector, samples);
    assert_eq!(named(&sent, "port failover").count(), 0, "rank 1 is not back");
    sent.extend(spans(&mut collector, of(&job, 1, 3, back(comm, 700))));
    check_trees(&sent);
    let (down, root) = (one(&sent, "rdma port down"), one(&sent, "port failover"));
    let connections: Vec<&Span> = named(&sent, "failover").collect();
    assert_eq!(connections.len(), 2);
    for connection in &connections {
        assert_eq!(
            (connection.trace_id, connection.parent_span_id),
            (root.trace_id, Some(root.span_id))
        );
    }
    assert_ne!(connections[0].resource, connections[1].resource);
    // It begins with the port, and ends with the last one that is back.
    assert_eq!(root.start_unix_ns, down.start_unix_ns);
    assert_eq!(root.end_unix_ns - root.start_unix_ns, 700_000);
    check(
        root,
        &[
            ("ccl.failover.connections", Value::Int(2)),
            ("ccl.failover.switches", Value::Int(4)),
            ("ccl.failover.replayed.size", Value::Int(200)),
            ("ccl.failover.recovery.duration", Value::Double(9e-6)),
            ("ccl.failover.failed_back", Value::Bool(true)),
            ("rdma.device.name", Value::Text("mlx5_0".into())),
            ("rdma.port.number", Value::Int(1)),
        ],
    );
    let expected = [
        "port_down",
        "path_broken",
        "path_broken",
        "path_switched",
        "path_switched",
        "path_recovered",
        "path_recovered",
        "port_up",
        "path_switched",
        "failed_back",
        "path_switched",
        "failed_back",
    ];
    assert_eq!(events(root), expected);
    assert_eq!(links(root, "port_down"), [(down.trace_id, down.span_id)]);
    assert_eq!(links(down, "failover"), [(root.trace_id, root.span_id)]);
    assert_eq!(
        links(root, "delayed").len(),
        2,
        "the parts of two ranks of one operation"
    );
}

/// Where a process does not say what its ports are, and the kernel's probes do not either, they are its own.
#[test]
fn ports_that_nothing_is_known_of_are_told_by_process_and_number() {
    let (mut collector, job, comm) = two_processes(&[]);
    let mut samples = of(&job, 0, 0, left(comm, 10));
    samples.extend(of(&job, 0, 1, left(comm, 11)));
    samples.extend(of(&job, 1, 0, left(comm, 12)));
    for (rank, channel) in [(0, 0), (0, 1), (1, 0)] {
        samples.extend(of(&job, rank, channel, back(comm, 900)));
    }
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    let roots: Vec<_> = named(&sent, "port failover").collect();
    assert_eq!(roots.len(), 2);
    for (root, connections) in roots.iter().zip([2, 1]) {
        check(
            root,
            &[
                ("ccl.failover.connections", Value::Int(connections)),
                ("ccl.network.port", Value::Int(0)),
            ],
        );
        assert_eq!(attribute(root, "rdma.device.name"), None);
        let children = named(&sent, "failover").filter(|span| span.trace_id == root.trace_id);
        assert_eq!(children.count() as i64, connections);
    }
}

/// What is heard of first is a switch: it names the path that is used now, and that one did not fail.
#[test]
fn the_port_that_is_gone_over_to_is_not_the_one_that_failed() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = left(comm, 10);
    samples.remove(0);
    samples.extend(back(comm, 900));
    let sent = spans(&mut collector, of(&job, 0, 3, samples));
    let (_, port) = connection_and_port(&sent);
    for name in ["rdma.device.name", "ccl.network.port"] {
        assert_eq!(attribute(port, name), None);
    }
}

/// Processes' records come one process after the other.
#[test]
fn a_break_that_is_heard_of_later_may_have_been_earlier() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = of(&job, 0, 3, left(comm, 50));
    samples.extend(of(&job, 1, 3, left(comm, 10)));
    for rank in 0..2 {
        samples.extend(of(&job, rank, 3, back(comm, 900)));
    }
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    let root = one(&sent, "port failover");
    assert_eq!(root.end_unix_ns - root.start_unix_ns, 895_000);
    assert!(root.events.is_sorted_by_key(|event| event.unix_ns));
}

#[test]
fn one_connection_without_a_path_left_is_the_ports_error() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let timeout = Some(PathCause::Timeout);
    let gave_up = moment(comm, 7, 90, State::ABORTED, change(timeout, 1, 1, 0x22), 0);
    let mut samples = of(&job, 0, 0, vec![broken(comm, 10), gave_up]);
    samples.splice(0..0, of(&job, 0, 1, left(comm, 10)));
    samples.extend(of(&job, 0, 1, back(comm, 900)));
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    let root = one(&sent, "port failover");
    assert_eq!(
        root.error.as_deref(),
        Some("1 of 2 connections have no path left")
    );
    check(
        root,
        &[
            ("ccl.failover.gave_up", Value::Int(1)),
            ("ccl.failover.connections", Value::Int(2)),
            ("ccl.failover.failed_back", Value::Bool(false)),
        ],
    );
    let failed = named(&sent, "failover").filter(|span| span.error.is_some());
    assert_eq!(failed.count(), 1);
}

/// What it was in is told with it; the failure goes on for the others.
#[test]
fn a_process_that_ends_takes_its_connections_out_of_the_failure() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = of(&job, 0, 3, left(comm, 10));
    samples.extend(of(&job, 1, 3, left(comm, 12)));
    samples.push(Sample::Exited {
        pid: job.pid(0),
        ended: true,
    });
    let mut sent = spans(&mut collector, samples);
    assert_eq!((sent.len(), sent[0].name), (1, "failover"));
    // Long after nothing is known of it any more.
    sent.extend(spans(&mut collector, vec![later(20)]));
    sent.extend(spans(&mut collector, of(&job, 1, 3, back(comm, 21 * SECOND))));
    check_trees(&sent);
    check(
        one(&sent, "port failover"),
        &[
            ("ccl.failover.connections", Value::Int(2)),
            ("ccl.failover.failed_back", Value::Bool(false)),
        ],
    );
}

/// One connection was told of before its way back, since that was far; the other one is under way for longer.
#[test]
fn a_way_back_counts_while_the_failure_goes_on() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = of(&job, 0, 0, left(comm, 10));
    samples.push(later(20));
    samples.extend(of(&job, 0, 1, left(comm, 20 * SECOND)));
    samples.push(later(35));
    let mut sent = spans(&mut collector, samples);
    assert_eq!((sent.len(), sent[0].name), (1, "failover"));
    let mut samples = of(&job, 0, 0, back(comm, 36 * SECOND));
    samples.extend(of(&job, 0, 1, back(comm, 37 * SECOND)));
    sent.extend(spans(&mut collector, samples));
    let (root, failback) = (one(&sent, "port failover"), one(&sent, "failback"));
    assert_eq!(
        (failback.trace_id, failback.parent_span_id),
        (root.trace_id, Some(sent[0].span_id))
    );
    assert!(failback.end_unix_ns <= root.end_unix_ns);
    check(
        root,
        &[
            ("ccl.failover.failed_back", Value::Bool(true)),
            ("ccl.failover.connections", Value::Int(2)),
            ("ccl.failover.switches", Value::Int(4)),
        ],
    );
    let names = events(root);
    assert_eq!(names.iter().filter(|name| **name == "failed_back").count(), 2);
}

/// However many connections a port has: what happened can be read off its span.
#[test]
fn all_that_happened_is_told_of_many_connections() {
    let (mut collector, _, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let all = |what: fn(u64, u64) -> Vec<Sample>, at: u64| {
        (0..200).flat_map(move |channel| of(&Job::default(), 0, channel, what(comm, at + u64::from(channel))))
    };
    let mut samples: Vec<Sample> = all(left, 10).collect();
    samples.extend(all(back, 1000));
    samples.insert(0, kernel(5, 1, VerbsEvent::PORT_ERR));
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    assert_eq!(named(&sent, "failover").count(), 200);
    let root = one(&sent, "port failover");
    check(
        root,
        &[
            ("ccl.failover.connections", Value::Int(200)),
            ("ccl.failover.switches", Value::Int(400)),
            ("ccl.failover.replayed.size", Value::Int(20_000)),
            ("ccl.failover.failed_back", Value::Bool(true)),
        ],
    );
    let mut names = events(root);
    assert!(names.len() < 128);
    names.dedup();
    assert_eq!(names[..2], ["port_down", "path_broken"]);
    assert_eq!(names.last(), Some(&"failed_back"));
    let last = root.events.last().unwrap();
    assert_eq!(last.unix_ns, root.end_unix_ns);
    let left_out = ("ccl.failover.events_left_out", Value::Int(200 - 17));
    assert!(last.attributes.contains(&left_out), "{last:?}");
    // The operation was one.
    assert_eq!(links(root, "delayed").len(), 1);
}

/// It breaks again while others are away: it is one connection of one failure, and at last it has a path or has none.
#[test]
fn a_connection_that_breaks_over_and_over_is_one() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = of(&job, 0, 0, left(comm, 10));
    for round in 0..3 {
        samples.extend(of(&job, 0, 1, left(comm, 20 + 100 * round)));
        samples.extend(of(&job, 0, 1, back(comm, 50 + 100 * round)));
    }
    // Its backup breaks as well: more than is kept of that.
    for round in 0..100 {
        samples.extend(of(&job, 0, 0, left(comm, 1000 + 10 * round)));
    }
    samples.extend(of(&job, 0, 0, back(comm, 9000)));
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    assert_eq!(named(&sent, "failover").count(), 4);
    for span in &sent {
        check(span, &[("ccl.failover.failed_back", Value::Bool(true))]);
    }
    let root = one(&sent, "port failover");
    check(root, &[("ccl.failover.connections", Value::Int(2))]);
    assert_eq!(events(root).last(), Some(&"failed_back"));
}

/// A port that flaps always has a connection that is under way.
#[test]
fn a_failure_that_never_ends_is_told_after_an_hour() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut sent = Vec::new();
    for round in 0..=180 {
        let channel = (round % 2) as u8;
        let mut samples = of(&job, 0, channel, left(comm, 20 * round * SECOND + 1));
        if round > 0 {
            let other = 1 - channel;
            samples.extend(of(&job, 0, other, back(comm, 20 * round * SECOND + 20)));
        }
        samples.push(later(20 * round));
        sent.extend(spans(&mut collector, samples));
        assert_eq!(named(&sent, "port failover").count(), 0);
    }
    sent.extend(spans(&mut collector, vec![later(3601)]));
    check_trees(&sent);
    let root = one(&sent, "port failover");
    check(
        root,
        &[
            ("ccl.failover.connections", Value::Int(2)),
            ("ccl.failover.failed_back", Value::Bool(false)),
        ],
    );
    // Its way back is a part of it still, and what breaks then is another failure.
    let way_back = spans(&mut collector, of(&job, 0, 0, back(comm, 3602 * SECOND)));
    assert_eq!(one(&way_back, "failback").trace_id, root.trace_id);
    let mut samples = of(&job, 0, 0, left(comm, 3603 * SECOND));
    samples.extend(of(&job, 0, 0, back(comm, 3604 * SECOND)));
    let other = spans(&mut collector, samples);
    let (_, port) = connection_and_port(&other);
    assert_ne!(port.trace_id, root.trace_id);
}

/// Whoever looks at an operation that took long finds why.
#[test]
fn an_operation_that_a_port_delayed_is_linked_to_its_failure() {
    let (job, operations) = (Job::default(), [Operation::all_reduce(1)]);
    let mut collector = collector();
    let samples = job.samples(0..1, &operations);
    let ended = |sample: &Sample| match sample {
        Sample::Record { record, .. } => record.kind == Kind::OpCompleted as u8,
        _ => false,
    };
    let op = samples.iter().find_map(|sample| match sample {
        Sample::Record { record, .. } if record.kind == Kind::OpLaunched as u8 => Some(*record),
        _ => None,
    });
    let op = op.unwrap();
    let at = samples.iter().position(ended).unwrap();
    let mut before = samples;
    let after = before.split_off(at);
    collector.ingest(&mut before);
    let mut broken = moment(
        op.comm,
        op.seq,
        10,
        State::START,
        change(Some(PathCause::Port), 0, 0, 0x11),
        0,
    );
    if let Sample::Record { record, .. } = &mut broken {
        record.op = op.op;
    }
    collector.ingest(&mut vec![broken]);
    let mut after = after;
    collector.ingest(&mut after);
    collector.finish(EPOCH_NS + 10_000_000_000);
    let spans = collector.take_batch().spans;
    let root = named(&spans, "port failover").next().unwrap();
    let part = named(&spans, "all_reduce rank").next().unwrap();
    let by: Vec<_> = part
        .links
        .iter()
        .filter(|link| link.attributes == [("ccl.link.type", Value::Static("delayed_by"))])
        .map(|link| (link.trace_id, link.span_id))
        .collect();
    assert_eq!(by, [(root.trace_id, root.span_id)]);
    let delayed: Vec<_> = root
        .links
        .iter()
        .map(|link| (link.trace_id, link.span_id))
        .collect();
    assert_eq!(delayed, [(part.trace_id, part.span_id)]);
}
