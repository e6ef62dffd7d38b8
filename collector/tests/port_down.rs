//! Ports of the kernel's that are down, and what connections leave because of that, through the whole collector.

mod common;

use ringsight_collector::synthetic::EPOCH_NS;
use ringsight_exporters::model::{Span, Value};
use ringsight_probes::{
    network::{NetworkEvent, NetworkSample, VerbsEvent},
    sample::Sample,
};
use ringsight_records::{PathCause, State};

use common::{
    attribute, check_trees,
    failover::{
        PORT, SECOND, back, change, check, events, kernel, later, left, links, moment, of, one, spans,
        two_processes,
    },
    named,
};

/// The other end's port failed: this host's is up all the while.
#[test]
fn a_port_that_is_left_for_the_peers_sake_is_linked_to_no_port_that_was_down() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = vec![
        // It had been down long before.
        kernel(0, 1, VerbsEvent::PORT_ERR),
        kernel(10, 1, VerbsEvent::PORT_ACTIVE),
    ];
    let peer = Some(PathCause::Peer);
    let mut told = left(comm, 5 * SECOND);
    told[0] = moment(comm, 7, 5 * SECOND, State::START, change(peer, 0, 0, 0x11), 0);
    told.extend(back(comm, 6 * SECOND));
    samples.extend(of(&job, 0, 3, told));
    let sent = spans(&mut collector, samples);
    check_trees(&sent);
    let root = one(&sent, "port failover");
    check(
        root,
        &[
            ("ccl.failover.cause", Value::Static("peer")),
            ("rdma.device.name", Value::Text("mlx5_0".into())),
        ],
    );
    assert_eq!(attribute(root, "rdma.port.number"), Some(&Value::Int(1)));
    assert_eq!(links(root, "port_down"), []);
    assert!(!events(root).contains(&"port_down"));
    assert!(one(&sent, "rdma port down").links.is_empty());
}

/// What the kernel says and what a process says come by different ways.
#[test]
fn a_port_that_was_down_is_linked_in_whatever_order_it_is_told() {
    let link = |samples: Vec<Sample>| {
        let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
        let mut sent = spans(&mut collector, samples);
        sent.extend(spans(&mut collector, of(&job, 0, 3, left(comm, 10))));
        (collector, job, comm, sent)
    };
    let downs = |root: &Span, down: &Span| {
        assert_eq!(links(root, "port_down"), [(down.trace_id, down.span_id)]);
        let kernels = events(root).into_iter().filter(|name| name.starts_with("port_"));
        assert_eq!(kernels.collect::<Vec<_>>(), ["port_down", "port_up"]);
        assert_eq!(attribute(root, "rdma.port.number"), Some(&Value::Int(1)));
    };
    // The port was up again before the process's record came.
    let whole = vec![
        kernel(5, 1, VerbsEvent::PORT_ERR),
        kernel(300, 1, VerbsEvent::PORT_ACTIVE),
    ];
    let (mut collector, job, comm, mut sent) = link(whole.clone());
    sent.extend(spans(&mut collector, of(&job, 0, 3, back(comm, 900))));
    check_trees(&sent);
    downs(one(&sent, "port failover"), one(&sent, "rdma port down"));
    // The kernel's word came last.
    let (mut collector, job, comm, mut sent) = link(Vec::new());
    sent.extend(spans(&mut collector, whole));
    sent.extend(spans(&mut collector, of(&job, 0, 3, back(comm, 900))));
    check_trees(&sent);
    let (root, down) = (one(&sent, "port failover"), one(&sent, "rdma port down"));
    downs(root, down);
    assert_eq!(links(down, "failover"), [(root.trace_id, root.span_id)]);
    // It is up only when what failed with it was told of: after the last that was heard of the connection.
    let (mut collector, _, _, mut sent) = link(vec![kernel(5, 1, VerbsEvent::PORT_ERR)]);
    sent.extend(spans(
        &mut collector,
        vec![kernel(20 * SECOND, 1, VerbsEvent::PORT_ACTIVE), later(31)],
    ));
    check_trees(&sent);
    let (root, down) = (one(&sent, "port failover"), one(&sent, "rdma port down"));
    downs(root, down);
    assert_eq!(root.end_unix_ns, down.end_unix_ns);
}

/// It is linked, but what failed then did not begin with it.
#[test]
fn a_port_that_has_long_been_down_begins_no_failure() {
    let (mut collector, job, comm) = two_processes(&[(0, "mlx5_0"), (1, "mlx5_1")]);
    let mut samples = vec![kernel(0, 1, VerbsEvent::PORT_ERR)];
    samples.extend(of(&job, 0, 3, left(comm, 60 * SECOND)));
    let mut sent = spans(&mut collector, samples);
    collector.finish(EPOCH_NS + 61_000_000_000);
    sent.extend(collector.take_batch().spans);
    let (root, down) = (one(&sent, "port failover"), one(&sent, "rdma port down"));
    assert_eq!(links(root, "port_down"), [(down.trace_id, down.span_id)]);
    assert_eq!(links(down, "failover"), [(root.trace_id, root.span_id)]);
    assert_eq!(root.start_unix_ns - down.start_unix_ns, 60_000_000_000);
    assert_eq!(events(root)[0], "path_broken");
}

/// Two ports of one device are two ports.
#[test]
fn a_devices_ports_fail_apart() {
    let (mut collector, job, comm) = two_processes(&[(4, "mlx5_0"), (5, "mlx5_0")]);
    let queue_pair = |qpn, port| {
        let event = NetworkEvent::QpModified {
            qpn,
            state: None,
            port: Some(port),
            peer: None,
        };
        Sample::Network(Box::new(NetworkSample {
            pid: Some(job.pid(0)),
            time_ns: EPOCH_NS,
            duration_ns: 1,
            result: 0,
            device: "mlx5_0".to_owned(),
            event,
        }))
    };
    let of_port = |at: u64, port: u8, number: u32| {
        let mut path = change(PORT, 0, 0, number);
        path.port = Some(port);
        moment(comm, 7, at, State::START, path, 0)
    };
    let mut samples = vec![queue_pair(0x11, 1), queue_pair(0x22, 2)];
    // The first port has been down for a while when the second one goes down.
    samples.push(kernel(5, 1, VerbsEvent::PORT_ERR));
    samples.extend(of(&job, 0, 0, vec![of_port(10, 4, 0x11)]));
    samples.push(kernel(100, 2, VerbsEvent::PORT_ERR));
    samples.extend(of(&job, 0, 1, vec![of_port(110, 5, 0x22)]));
    // Another process's queue pairs were not seen to be set up.
    samples.extend(of(&job, 1, 0, vec![of_port(120, 5, 0x33)]));
    let mut sent = spans(&mut collector, samples);
    collector.finish(EPOCH_NS + 10_000_000);
    sent.extend(collector.take_batch().spans);
    check_trees(&sent);
    for (port, connections) in [(1, 1), (2, 2)] {
        let number = Value::Int(port);
        let of_port = |name| {
            let mut all = named(&sent, name);
            all.find(|span| attribute(span, "rdma.port.number") == Some(&number))
                .unwrap()
        };
        let (root, down) = (of_port("port failover"), of_port("rdma port down"));
        assert_eq!(links(root, "port_down"), [(down.trace_id, down.span_id)]);
        assert_eq!(links(down, "failover"), [(root.trace_id, root.span_id)]);
        let known = attribute(root, "ccl.failover.connections");
        assert_eq!(known, Some(&Value::Int(connections)));
    }
}
