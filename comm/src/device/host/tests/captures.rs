//! Captures, graphs and their replays.

use std::thread;

use super::*;

/// s: A ─┬──────── C (sends) ── join
/// t:    └─ B (receives what C sends) ┘
#[test]
fn a_captured_fork_runs_side_by_side_at_every_replay() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let (fork, join) = (d.event_create().unwrap(), d.event_create().unwrap());
    let log = Log::default();
    let (from, mut to) = (9_u8, 0_u8);
    let told = Arc::new(Told(AtomicU32::new(0)));
    let wire = wire();
    d.capture_begin(s).unwrap();
    let capture = d.capture_of(s).unwrap().unwrap();
    assert_ne!(capture.id, 0);
    note(&d, s, &log, "A");
    d.event_record(fork, s).unwrap();
    assert_eq!(d.capture_of(t).unwrap(), None);
    d.stream_wait_event(t, fork).unwrap();
    assert_eq!(d.capture_of(t).unwrap(), Some(capture));
    d.launch_kernel(
        t,
        message(Function::Recv, &wire, (&raw mut to) as usize, told.clone()),
        &mut None,
    )
    .unwrap();
    d.launch_kernel(
        s,
        message(Function::Send, &wire, (&raw const from) as usize, told.clone()),
        &mut None,
    )
    .unwrap();
    d.event_record(join, t).unwrap();
    d.stream_wait_event(s, join).unwrap();
    note(&d, s, &log, "joined");
    let graph = d.capture_end(s).unwrap();
    assert_eq!((d.capture_of(s).unwrap(), d.capture_of(t).unwrap()), (None, None));
    d.stream_synchronize(s).unwrap();
    assert!(lock(&log).is_empty(), "captured, not run");

    let exec = d.graph_instantiate(graph).unwrap();
    d.graph_destroy(graph).unwrap();
    // Alternating streams: replays of one instance still run one after another.
    for n in 0..20 {
        d.graph_launch(exec, if n % 2 == 0 { s } else { t }).unwrap();
    }
    d.graph_exec_destroy(exec).unwrap();
    d.stream_synchronize(s).unwrap();
    d.stream_synchronize(t).unwrap();
    let expected: Vec<_> = (1..=20)
        .flat_map(|replay| [("A", replay), ("joined", replay)])
        .collect();
    assert_eq!(*lock(&log), expected);
    // SAFETY: the kernels that wrote it are done.
    assert_eq!(unsafe { (&raw const to).read_volatile() }, 9);
    assert_eq!(told.0.load(Ordering::Relaxed), 21);
    assert!(matches!(
        d.graph_launch(exec, s),
        Err(DeviceError::InvalidHandle(_))
    ));
}

#[test]
fn branches_of_one_graph_wait_for_each_other_without_deadlock() {
    // Eight branches meet at a barrier: only if all run at once does any finish.
    let d = device();
    let streams: Vec<_> = (0..8).map(|_| d.stream_create().unwrap()).collect();
    let event = d.event_create().unwrap();
    let barrier = Arc::new(std::sync::Barrier::new(8));
    d.capture_begin(streams[0]).unwrap();
    d.event_record(event, streams[0]).unwrap();
    streams[1..]
        .iter()
        .for_each(|&stream| d.stream_wait_event(stream, event).unwrap());
    for &stream in &streams {
        let barrier = barrier.clone();
        d.launch_host(
            stream,
            Arc::new(move |_| {
                barrier.wait();
            }),
        )
        .unwrap();
    }
    for &stream in &streams[1..] {
        d.event_record(event, stream).unwrap();
        d.stream_wait_event(streams[0], event).unwrap();
    }
    let exec = d.graph_instantiate(d.capture_end(streams[0]).unwrap()).unwrap();
    for _ in 0..3 {
        d.graph_launch(exec, streams[0]).unwrap();
    }
    d.stream_synchronize(streams[0]).unwrap();
}

#[test]
fn an_unjoined_fork_is_refused() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let event = d.event_create().unwrap();
    let log = Log::default();
    d.capture_begin(s).unwrap();
    d.event_record(event, s).unwrap();
    d.stream_wait_event(t, event).unwrap();
    note(&d, t, &log, "lost");
    assert!(is_usage(d.capture_end(s)).contains("not joined"));
    // Both streams are free again; a fork that captured nothing needs no join.
    note(&d, t, &log, "eager");
    d.stream_synchronize(t).unwrap();
    assert_eq!(*lock(&log), [("eager", 0)]);
    d.capture_begin(s).unwrap();
    d.event_record(event, s).unwrap();
    d.stream_wait_event(t, event).unwrap();
    d.capture_end(s).unwrap();
}

#[test]
fn waiting_for_a_capture_invalidates_it() {
    type Call = fn(&HostDevice, Stream, Event) -> Result<()>;
    let calls: [(&str, Call); 5] = [
        ("query", |d, s, _| d.stream_query(s).map(drop)),
        ("synchronize", |d, s, _| d.stream_synchronize(s)),
        ("event query", |d, _, e| d.event_query(e).map(drop)),
        ("event synchronize", |d, _, e| d.event_synchronize(e)),
        ("uncaptured stream", |d, _, _| d.stream_query(Stream(0)).map(drop)),
    ];
    for (name, call) in calls {
        let d = device();
        let (s, e) = (d.stream_create().unwrap(), d.event_create().unwrap());
        d.capture_begin(s).unwrap();
        d.event_record(e, s).unwrap();
        is_usage(call(&d, s, e));
        assert!(
            is_usage(d.memset(0, 0, 0, s)).contains("was invalidated"),
            "{name}"
        );
        assert!(is_usage(d.capture_end(s)).contains("was invalidated"), "{name}");
        d.stream_synchronize(s).unwrap();
    }
}

#[test]
fn other_threads_may_wait_for_other_streams_during_a_capture() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let (captured, plain) = (d.event_create().unwrap(), d.event_create().unwrap());
    d.event_record(plain, t).unwrap();
    d.capture_begin(s).unwrap();
    d.event_record(captured, s).unwrap();
    let other = d.clone();
    thread::spawn(move || {
        other.stream_synchronize(t).unwrap();
        other.event_synchronize(plain).unwrap();
        is_usage(other.event_query(captured));
        is_usage(other.capture_end(s));
    })
    .join()
    .unwrap();
    d.capture_end(s).unwrap();
    is_usage(d.event_query(captured));
    is_usage(d.stream_wait_event(t, captured));
    d.event_record(captured, t).unwrap();
    d.event_synchronize(captured).unwrap();
}

#[test]
fn captures_do_not_mix_with_others_or_with_running_work() {
    let d = device();
    let streams: Vec<_> = (0..2).map(|_| d.stream_create().unwrap()).collect();
    let (outside, inside) = (d.event_create().unwrap(), d.event_create().unwrap());
    d.event_record(outside, streams[1]).unwrap();
    d.capture_begin(streams[0]).unwrap();
    is_usage(d.capture_begin(streams[0]));
    is_usage(d.stream_destroy(streams[0]));
    assert!(is_usage(d.stream_wait_event(streams[0], outside)).contains("recorded outside"));
    is_usage(d.capture_end(streams[0]));

    d.capture_begin(streams[0]).unwrap();
    d.capture_begin(streams[1]).unwrap();
    d.event_record(inside, streams[0]).unwrap();
    assert!(is_usage(d.stream_wait_event(streams[1], inside)).contains("merge"));
    is_usage(d.capture_end(streams[0]));
    is_usage(d.capture_end(streams[1]));
    is_usage(d.capture_end(streams[1]));

    d.capture_begin(streams[0]).unwrap();
    d.event_record(inside, streams[0]).unwrap();
    is_usage(d.stream_wait_event(Stream(0), inside));
    is_usage(d.capture_end(streams[0]));
    assert_eq!(d.capture_of(streams[0]).unwrap(), None);
}

#[test]
fn retained_objects_go_with_the_last_user() {
    let d = device();
    let s = d.stream_create().unwrap();
    let destroyed = Arc::new(AtomicUsize::new(0));
    let retain = |d: &HostDevice| {
        let (count, inner) = (destroyed.clone(), lock(&d.state).streams[&s.0].worker.clone());
        d.capture_retain(
            d.capture_of(s).unwrap().unwrap(),
            Box::new(move || {
                assert!(in_callback());
                drop(inner);
                count.fetch_add(1, Ordering::Relaxed);
            }),
        )
        .unwrap();
    };
    d.capture_begin(s).unwrap();
    retain(&d);
    let gate = hold(&d, s);
    let graph = d.capture_end(s).unwrap();
    let exec = d.graph_instantiate(graph).unwrap();
    d.graph_destroy(graph).unwrap();
    d.graph_launch(exec, s).unwrap();
    d.graph_exec_destroy(exec).unwrap();
    d.reclaim.synchronize().unwrap();
    assert_eq!(destroyed.load(Ordering::Relaxed), 0, "a replay still runs");
    gate.open();
    d.stream_synchronize(s).unwrap();
    d.reclaim.synchronize().unwrap();
    assert_eq!(destroyed.load(Ordering::Relaxed), 1);

    // A capture that fails gives its objects back too.
    d.capture_begin(s).unwrap();
    retain(&d);
    let _ = d.stream_query(s);
    is_usage(d.capture_end(s));
    d.reclaim.synchronize().unwrap();
    assert_eq!(destroyed.load(Ordering::Relaxed), 2);
}

#[test]
fn replays_wait_for_and_record_events_outside_where_they_are_launched() {
    let d = device();
    let [s, t, u] = [(); 3].map(|()| d.stream_create().unwrap());
    let event = d.event_create().unwrap();
    let log = Log::default();
    let graph = |what: &'static str| {
        d.capture_begin(s).unwrap();
        d.stream_wait_event_external(s, event).unwrap();
        note(&d, s, &log, what);
        d.event_record_external(event, s).unwrap();
        d.graph_instantiate(d.capture_end(s).unwrap()).unwrap()
    };
    let (a, b) = (graph("a"), graph("b"));
    // Never recorded: nobody waits for it.
    d.graph_launch(a, t).unwrap();
    d.stream_synchronize(t).unwrap();
    let gate = hold(&d, t);
    // Held back by the stream; b on its own one waits for it, and so do an eager wait and the next replay.
    d.graph_launch(a, t).unwrap();
    d.graph_launch(b, s).unwrap();
    d.stream_wait_event(u, event).unwrap();
    note(&d, u, &log, "eager");
    assert_eq!(d.event_query(event).unwrap(), Progress::Pending);
    assert_eq!(d.stream_query(s).unwrap(), Progress::Pending);
    assert_eq!(*lock(&log), [("a", 1)]);
    gate.open();
    for stream in [s, t, u] {
        d.stream_synchronize(stream).unwrap();
    }
    assert_eq!(*lock(&log), [("a", 1), ("a", 2), ("b", 1), ("eager", 0)]);
    // An event that is gone is nobody's to wait for.
    d.event_destroy(event).unwrap();
    d.graph_launch(a, s).unwrap();
    d.stream_synchronize(s).unwrap();
    assert_eq!(lock(&log).last(), Some(&("a", 3)));
}

#[test]
fn of_a_graphs_records_of_an_event_the_last_is_seen_from_outside() {
    let d = device();
    let [s, t] = [(); 2].map(|()| d.stream_create().unwrap());
    let [event, fork, join] = [(); 3].map(|()| d.event_create().unwrap());
    let log = Log::default();
    let gate = Arc::new(Gate::default());
    d.capture_begin(s).unwrap();
    d.event_record(fork, s).unwrap();
    d.stream_wait_event(t, fork).unwrap();
    for what in ["a", "b"] {
        note(&d, s, &log, what);
        d.event_record_external(event, s).unwrap();
    }
    // A branch that waits for what was recorded before it: not for what comes then.
    d.stream_wait_event_external(t, event).unwrap();
    d.launch_host(t, {
        let gate = gate.clone();
        Arc::new(move |_| gate.open())
    })
    .unwrap();
    d.event_record(join, t).unwrap();
    d.launch_host(s, {
        let gate = gate.clone();
        Arc::new(move |_| gate.wait())
    })
    .unwrap();
    d.event_record_external(event, s).unwrap();
    let held = Arc::new(Gate::default());
    d.launch_host(s, {
        let held = held.clone();
        Arc::new(move |_| held.wait())
    })
    .unwrap();
    d.event_record_external(event, s).unwrap();
    d.stream_wait_event(s, join).unwrap();
    let exec = d.graph_instantiate(d.capture_end(s).unwrap()).unwrap();
    d.graph_launch(exec, s).unwrap();
    // The first gate was opened by the branch; the last record is behind the second one.
    d.stream_wait_event(t, event).unwrap();
    note(&d, t, &log, "outside");
    gate.wait();
    assert_eq!(d.event_query(event).unwrap(), Progress::Pending);
    assert_eq!(*lock(&log), [("a", 1), ("b", 1)]);
    held.open();
    d.stream_synchronize(t).unwrap();
    assert_eq!(*lock(&log), [("a", 1), ("b", 1), ("outside", 0)]);
    d.stream_synchronize(s).unwrap();
}

#[test]
fn events_are_external_to_captures_only() {
    let d = device();
    let s = d.stream_create().unwrap();
    let event = d.event_create().unwrap();
    assert!(is_usage(d.stream_wait_event_external(s, event)).contains("is in none"));
    assert!(is_usage(d.event_record_external(event, s)).contains("is in none"));
    d.capture_begin(s).unwrap();
    d.event_record(event, s).unwrap();
    assert!(is_usage(d.stream_wait_event_external(s, event)).contains("not external"));
    assert!(is_usage(d.event_record_external(event, s)).contains("not external"));
    d.graph_destroy(d.capture_end(s).unwrap()).unwrap();
}

#[test]
fn an_event_recorded_as_external_joins_nothing_but_can_be_queried() {
    let d = device();
    let (s, t) = (d.stream_create().unwrap(), d.stream_create().unwrap());
    let [fork, external, regular] = [0; 3].map(|_| d.event_create().unwrap());
    let log = Log::default();
    let fork_off = || {
        d.capture_begin(s).unwrap();
        d.event_record(fork, s).unwrap();
        d.stream_wait_event(t, fork).unwrap();
        note(&d, t, &log, "t");
        d.event_record_external(external, t).unwrap();
    };
    fork_off();
    d.stream_wait_event(s, external).unwrap();
    assert!(is_usage(d.capture_end(s)).contains("not joined"));
    // A third event joins.
    fork_off();
    d.event_record(regular, t).unwrap();
    d.stream_wait_event(s, regular).unwrap();
    let exec = d.graph_instantiate(d.capture_end(s).unwrap()).unwrap();
    assert!(is_usage(d.event_query(regular)).contains("recorded in a capture"));
    assert_eq!(d.event_query(external).unwrap(), Progress::Done, "never recorded");
    // Each launch resets it.
    let gate = hold(&d, s);
    for _ in 0..2 {
        d.graph_launch(exec, s).unwrap();
        assert_eq!(d.event_query(external).unwrap(), Progress::Pending);
    }
    gate.open();
    d.event_synchronize(external).unwrap();
    assert_eq!(*lock(&log), [("t", 1), ("t", 2)]);
}

#[test]
fn counters_count_in_stream_order_and_in_each_replay() {
    let d = device();
    let s = d.stream_create().unwrap();
    let counter = d.new_counter().unwrap();
    let gate = hold(&d, s);
    d.increment(s, &counter).unwrap();
    assert_eq!(counter.value(), 0, "what comes before is not done");
    gate.open();
    d.stream_synchronize(s).unwrap();
    assert_eq!(counter.value(), 1);
    d.capture_begin(s).unwrap();
    d.increment(s, &counter).unwrap();
    let exec = d.graph_instantiate(d.capture_end(s).unwrap()).unwrap();
    assert_eq!(counter.value(), 1, "captured, not run");
    (0..3).for_each(|_| d.graph_launch(exec, s).unwrap());
    d.stream_synchronize(s).unwrap();
    assert_eq!(counter.value(), 4);
}

#[test]
fn destructors_of_graphs_must_not_call_the_device() {
    let d = device();
    let s = d.stream_create().unwrap();
    let event = d.event_create().unwrap();
    let refused = Arc::new(AtomicUsize::new(0));
    d.capture_begin(s).unwrap();
    let (inner, count) = (d.clone(), refused.clone());
    let calls = move || {
        for result in [inner.event_query(event).map(drop), inner.event_destroy(event)] {
            count.fetch_add(usize::from(result.is_err()), Ordering::Relaxed);
        }
    };
    let capture = d.capture_of(s).unwrap().unwrap();
    d.capture_retain(capture, Box::new(calls)).unwrap();
    d.graph_destroy(d.capture_end(s).unwrap()).unwrap();
    d.reclaim.synchronize().unwrap();
    assert_eq!(refused.load(Ordering::Relaxed), 2);
    d.event_destroy(event).unwrap();
}
