mod file;

use std::{cell::RefCell, collections::HashMap, io, rc::Rc, sync::Arc};

use serde_json::Value as Json;

use super::*;
use crate::model::{Culprit, OperationRank, Resource, SpanEvent, SpanLink};

/// A file in memory, on a disk of `capacity` bytes.
#[derive(Clone, Default)]
struct Disk {
    bytes: Rc<RefCell<Vec<u8>>>,
    capacity: Rc<RefCell<usize>>,
}

impl Disk {
    fn of(capacity: usize) -> Self {
        Self {
            bytes: Rc::default(),
            capacity: Rc::new(RefCell::new(capacity)),
        }
    }

    fn parse(&self) -> Vec<Json> {
        events_of(&self.bytes.borrow())
    }
}

/// The events of a file, which is JSON at every moment.
fn events_of(file: &[u8]) -> Vec<Json> {
    let mut file: Json = serde_json::from_slice(file).expect("the file is JSON at every moment");
    serde_json::from_value(file["traceEvents"].take()).expect("an array of events")
}

impl Medium for Disk {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.bytes.borrow_mut();
        let (start, room) = (offset as usize, *self.capacity.borrow());
        // As a real disk does: what fits is written before the error.
        let fits = bytes.len().min(room.saturating_sub(start));
        let end = start + fits;
        if file.len() < end {
            file.resize(end, 0);
        }
        file[start..end].copy_from_slice(&bytes[..fits]);
        if fits < bytes.len() {
            Err(io::Error::from(io::ErrorKind::StorageFull))
        } else {
            Ok(())
        }
    }

    fn set_len(&mut self, length: u64) -> io::Result<()> {
        self.bytes.borrow_mut().resize(length as usize, 0);
        Ok(())
    }
}

const T0: u64 = 1_700_000_000_123_456_789;

fn resource(rank: i64) -> Arc<Resource> {
    Arc::new(Resource {
        attributes: vec![
            ("service.name", Value::Static("train")),
            (
                "service.instance.id",
                Value::Text(format!("00c0ffee/{rank}").into()),
            ),
            ("ccl.job.rank", Value::Int(rank)),
            ("host.name", Value::Text(format!("node-{}", rank / 2).into())),
            ("process.pid", Value::Int(4000 + rank)),
        ],
    })
}

fn span(resource: &Arc<Resource>, name: &'static str, id: u64, start: u64, end: u64) -> Span {
    Span {
        resource: Arc::clone(resource),
        trace_id: [7; 16],
        span_id: id.to_be_bytes(),
        parent_span_id: Some([1; 8]),
        name,
        start_unix_ns: start,
        end_unix_ns: end,
        attributes: vec![
            ("ccl.operation.name", Value::Static("all_gather")),
            ("ccl.data_type", Value::Static("float32")),
            ("ccl.message.size", Value::Int(4096)),
            ("ccl.communicator.size", Value::Int(4)),
            ("ccl.communicator.id", Value::Static("00000000000000ab")),
            ("ccl.rank", Value::Int(2)),
            ("ccl.operation.sequence", Value::Int(17)),
        ],
        events: Vec::new(),
        links: Vec::new(),
        error: None,
    }
}

fn written(batches: &[Batch]) -> Vec<Json> {
    let disk = Disk::of(usize::MAX);
    let mut writer = Writer::new(disk.clone()).unwrap();
    for batch in batches {
        writer.batch(batch);
        disk.parse();
    }
    writer.close();
    disk.parse()
}

fn by_name<'a>(events: &'a [Json], phase: &str, name: &str) -> Vec<&'a Json> {
    events
        .iter()
        .filter(|e| e["ph"] == phase && e["name"] == name)
        .collect()
}

#[test]
fn a_span_is_a_complete_event_with_the_profilers_keys() {
    let events = written(&[Batch {
        spans: vec![span(&resource(2), "all_gather rank", 5, T0, T0 + 2_500)],
        ..Batch::default()
    }]);
    let [event] = by_name(&events, "X", "all_gather rank")[..] else {
        panic!("{events:?}")
    };
    let origin = T0 - T0 % DAY_NS;
    assert_eq!(
        event["ts"].to_string(),
        format!("{}.{:03}", (T0 - origin) / 1000, (T0 - origin) % 1000)
    );
    assert_eq!(event["dur"].to_string(), "2.5");
    let args = &event["args"];
    for (key, value) in [
        ("Collective name", Json::from("_allgather_base")),
        ("dtype", "Float".into()),
        ("In msg nelems", 256.into()),
        ("Out msg nelems", 1024.into()),
        ("Group size", 4.into()),
        ("Rank", 2.into()),
        ("Seq", 17.into()),
        ("Process Group Name", "00000000000000ab".into()),
        ("Comms Id", "00000000000000ab".into()),
        ("ccl.operation.name", "all_gather".into()),
        ("trace_id", "07070707070707070707070707070707".into()),
        ("span_id", "0000000000000005".into()),
    ] {
        assert_eq!(args[key], value, "{key}");
    }
    let process = by_name(&events, "M", "process_name")[0];
    assert_eq!(process["args"]["name"], "rank 2 · node-1 · pid 4002");
    assert_eq!(process["pid"], event["pid"]);
    assert_eq!(
        by_name(&events, "M", "trace_origin")[0]["args"]["unix_ns"],
        origin.to_string()
    );
}

#[test]
fn every_event_is_named_and_placed_as_the_format_asks() {
    let resources = [resource(0), resource(1)];
    let mut spans = Vec::new();
    for (r, resource) in resources.iter().enumerate() {
        for (i, name) in [
            "all_gather rank",
            "enqueue",
            "launch",
            "kernel channel",
            "proxy send",
            "proxy recv",
            "group",
        ]
        .into_iter()
        .enumerate()
        {
            let mut one = span(
                resource,
                name,
                (r * 100 + i + 1) as u64,
                T0 + 10 * i as u64,
                T0 + 100 + i as u64,
            );
            one.attributes.push(("ccl.channel.id", Value::Int(3)));
            one.attributes.push(("ccl.peer.rank", Value::Int(1 - r as i64)));
            one.events.push(SpanEvent {
                unix_ns: T0 + 20,
                name: "peer_wait",
                attributes: vec![("n", Value::Double(f64::NAN))],
            });
            spans.push(one);
        }
    }
    let events = written(&[Batch {
        spans,
        ..Batch::default()
    }]);
    let mut threads = HashMap::new();
    for e in &events {
        assert!(
            e["pid"].is_u64() && e["tid"].is_u64() && e["name"].is_string(),
            "{e}"
        );
        let phase = e["ph"].as_str().unwrap();
        match phase {
            "M" => {
                if e["name"] == "thread_name" {
                    assert!(
                        threads
                            .insert((e["pid"].clone(), e["tid"].clone()), e["args"]["name"].clone())
                            .is_none()
                    );
                }
                continue;
            }
            "X" => assert!(e["dur"].is_f64(), "{e}"),
            "i" => assert!(["t", "p", "g"].contains(&e["s"].as_str().unwrap()), "{e}"),
            "s" | "f" => assert!(e["id"].as_str().unwrap().starts_with("0x")),
            other => panic!("unexpected phase {other}"),
        }
        assert!(e["ts"].is_f64() && e["cat"].is_string(), "{e}");
        assert_ne!(
            e["pid"], e["tid"],
            "a thread with its process's number is taken for the main thread"
        );
        assert!(
            threads.contains_key(&(e["pid"].clone(), e["tid"].clone())),
            "thread of {e} has no name yet"
        );
    }
    let names: Vec<_> = threads.values().filter_map(Json::as_str).collect();
    for name in [
        "operations",
        "api",
        "launch",
        "kernel channel 3",
        "proxy send ch 3 → rank 1",
        "proxy recv ch 3 ← rank 0",
    ] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
}

#[test]
fn roots_stand_apart_and_host_calls_in_their_process() {
    let resource = Arc::new(Resource {
        attributes: vec![
            ("service.instance.id", Value::Static("00c0ffee")),
            ("host.name", Value::Static("node-1")),
            ("process.pid", Value::Int(42)),
        ],
    });
    let mut root = span(&resource, "send_recv", 1, T0, T0 + 10);
    root.parent_span_id = None;
    root.attributes = vec![
        ("ccl.operation.name", Value::Static("send_recv")),
        ("ccl.communicator.name", Value::Static("pipeline")),
        ("ccl.communicator.size", Value::Int(4)),
        ("ccl.source.rank", Value::Int(3)),
        ("ccl.destination.rank", Value::Int(1)),
    ];
    let mut call = span(&resource, "all_reduce", 2, T0, T0 + 10);
    call.parent_span_id = None;
    call.attributes = vec![("ccl.operation.name", Value::Static("all_reduce"))];
    let events = written(&[Batch {
        spans: vec![root, call],
        ..Batch::default()
    }]);
    let named = |kind: &str, event: &Json| {
        let found = events.iter().find(|e| {
            e["name"] == kind
                && e["pid"] == event["pid"]
                && (kind == "process_name" || e["tid"] == event["tid"])
        });
        found.unwrap()["args"]["name"].as_str().unwrap().to_owned()
    };
    let (root, call) = (
        by_name(&events, "X", "send_recv")[0],
        by_name(&events, "X", "all_reduce")[0],
    );
    assert_eq!(
        (&*named("process_name", root), &*named("thread_name", root)),
        ("collectives", "communicator pipeline")
    );
    assert_eq!(
        (&*named("process_name", call), &*named("thread_name", call)),
        ("node-1 · pid 42", "api")
    );
    assert_eq!(
        (&root["args"]["Src Rank"], &root["args"]["Dst Rank"]),
        (&3.into(), &1.into())
    );
}

#[test]
fn slices_of_one_thread_never_overlap() {
    let resource = resource(0);
    // Five in flight at once, out of order, with some that touch.
    let spans: Vec<_> = (0..400u64)
        .map(|i| (i * 37) % 400)
        .map(|i| {
            span(
                &resource,
                "all_gather rank",
                i + 1,
                T0 + i * 100,
                T0 + i * 100 + 500,
            )
        })
        .collect();
    let events = written(
        &spans
            .chunks(13)
            .map(|c| Batch {
                spans: c.to_vec(),
                ..Batch::default()
            })
            .collect::<Vec<_>>(),
    );
    let mut threads: HashMap<u64, Vec<(u64, u64)>> = HashMap::new();
    for e in by_name(&events, "X", "all_gather rank") {
        let ns = |key: &str| (e[key].as_f64().unwrap() * 1000.0).round() as u64;
        threads
            .entry(e["tid"].as_u64().unwrap())
            .or_default()
            .push((ns("ts"), ns("ts") + ns("dur")));
    }
    assert_eq!(threads.values().map(Vec::len).sum::<usize>(), 400);
    assert!(
        (5..=8).contains(&threads.len()),
        "{} lanes for five in flight",
        threads.len()
    );
    for intervals in threads.values_mut() {
        intervals.sort_unstable();
        assert!(intervals.windows(2).all(|w| w[0].1 <= w[1].0));
    }
}

#[test]
fn a_recv_is_tied_to_its_send() {
    let (sender, receiver) = (resource(0), resource(1));
    let send = span(&sender, "send rank", 0xabcd, T0, T0 + 100);
    let mut recv = span(&receiver, "recv rank", 0xef, T0 - 50, T0 + 200);
    recv.links.push(SpanLink {
        trace_id: [7; 16],
        span_id: 0xabcd_u64.to_be_bytes(),
        attributes: vec![("ccl.link.type", Value::Static("send"))],
    });
    recv.links.push(SpanLink {
        trace_id: [7; 16],
        span_id: [9; 8],
        attributes: vec![("ccl.link.type", Value::Static("group"))],
    });
    let events = written(&[Batch {
        spans: vec![recv, send],
        ..Batch::default()
    }]);
    let (starts, ends) = (
        by_name(&events, "s", "send to recv"),
        by_name(&events, "f", "send to recv"),
    );
    assert_eq!((starts.len(), ends.len()), (1, 1));
    assert_eq!(
        (&starts[0]["id"], &starts[0]["cat"]),
        (&ends[0]["id"], &ends[0]["cat"])
    );
    assert_eq!(ends[0]["bp"], "e");
    for (flow, name) in [(starts[0], "send rank"), (ends[0], "recv rank")] {
        let slice = by_name(&events, "X", name)[0];
        let number = |e: &Json, key: &str| e[key].as_f64().unwrap();
        assert_eq!((&flow["pid"], &flow["tid"]), (&slice["pid"], &slice["tid"]));
        let (ts, start) = (number(flow, "ts"), number(slice, "ts"));
        assert!(
            start <= ts && ts < start + number(slice, "dur"),
            "the flow lies inside its slice"
        );
    }
}

fn operation(culprit: Option<u32>) -> Operation {
    let part = |rank: u32| OperationRank {
        rank,
        host: format!("node-{}", rank / 2).into(),
        pid: 4000 + rank,
        api_start_ns: T0,
        device_start_ns: T0 + if culprit == Some(rank) { 40_000_000 } else { 0 },
        device_end_ns: T0 + 41_000_000,
        by_device: true,
    };
    Operation {
        trace_id: [3; 16],
        name: "all_reduce",
        communicator: 0xab,
        communicator_name: "".into(),
        ranks: 4,
        sequence: 9,
        replay: 0,
        bytes: 4096,
        data_type: "float32",
        algorithm: "ring",
        by_rank: (0..4).map(part).collect(),
        culprit: culprit.map(|rank| Culprit {
            rank,
            lag_ns: 40_000_000,
        }),
        unnamed: None,
        waited_until_ns: 0,
        complete: true,
    }
}

#[test]
fn a_late_rank_is_an_instant_in_its_process() {
    let spans = vec![span(&resource(3), "launch", 8, T0, T0 + 5)];
    let events = written(&[Batch {
        spans,
        operations: vec![operation(None), operation(Some(3))],
        ..Batch::default()
    }]);
    let instants: Vec<_> = events.iter().filter(|e| e["cat"] == "late").collect();
    let [late] = instants[..] else {
        panic!("{instants:?}")
    };
    assert_eq!(late["name"], "late: rank 3 by 40.000 ms");
    assert_eq!(
        late["pid"],
        by_name(&events, "X", "launch")[0]["pid"],
        "same process as the rank's spans"
    );
    assert_eq!(late["args"]["Seq"], 9);
}

#[test]
fn a_late_rank_that_is_not_watched_is_an_instant_of_one_that_waited() {
    let mut late = operation(Some(3));
    late.by_rank.truncate(2);
    let events = written(&[Batch {
        operations: vec![late],
        ..Batch::default()
    }]);
    let instants: Vec<_> = events.iter().filter(|e| e["cat"] == "late").collect();
    let [late] = instants[..] else {
        panic!("{instants:?}")
    };
    assert_eq!(late["name"], "late: rank 3, not watched here, by 40.000 ms");
    assert_eq!(late["args"]["Rank"], 3);
}

#[test]
fn hostile_text_stays_text() {
    let mut one = span(&resource(0), "group", 1, T0, T0);
    let text = "\"}],\u{0}\u{1f}\\ \u{2028}</script>😀";
    one.attributes
        .push(("ccl.communicator.name", Value::Text(text.into())));
    one.error = Some(text.into());
    let events = written(&[Batch {
        spans: vec![one],
        ..Batch::default()
    }]);
    let event = by_name(&events, "X", "group")[0];
    assert_eq!(event["args"]["ccl.communicator.name"], text);
    assert_eq!(event["args"]["error"], text);
}

#[test]
fn gauges_are_counter_tracks() {
    let metric = |data| Metric {
        resource: resource(0),
        name: "ccl.operation.active",
        description: "",
        unit: "{operation}",
        attributes: vec![("ccl.operation.name", Value::Static("all_reduce"))],
        start_unix_ns: T0,
        unix_ns: T0,
        data,
    };
    let metrics = vec![
        metric(MetricData::UpDown(-2)),
        metric(MetricData::Gauge(f64::INFINITY)),
        metric(MetricData::Counter(3)),
    ];
    let events = written(&[Batch {
        metrics,
        ..Batch::default()
    }]);
    let counters: Vec<_> = events.iter().filter(|e| e["ph"] == "C").collect();
    assert_eq!(counters.len(), 1);
    assert_eq!(counters[0]["args"]["{operation}"], -2);
}
