//! Servers that refuse: how often they are asked, what is kept, what is dropped and what the account says of it.

mod otlp_common;
mod otlp_server;

use std::thread;
use std::time::{Duration, Instant};

use otlp_common::{gauge, ids, log, plain_span, resource};
use otlp_server::{Answer, GrpcServer, HttpServer, Limit, Received, eventually, ok, partial};
use ringsight_exporters::ExportStats;
use ringsight_exporters::model::{Batch, Consequence, Exporter as _, Signal};
use ringsight_exporters::otlp::{Config, OtlpExporter, Protocol};
use tonic::{Code, Status};

const TRACES: Option<&str> = Some("/v1/traces");

fn config(url: &str, protocol: Protocol) -> Config {
    Config::from_variables(Some(url), Some(protocol), &|_| None).unwrap()
}

fn http(server: &HttpServer) -> OtlpExporter {
    OtlpExporter::new(&config(&server.url, Protocol::HttpProtobuf)).unwrap()
}

fn grpc(server: &GrpcServer) -> OtlpExporter {
    OtlpExporter::new(&config(&server.url, Protocol::Grpc)).unwrap()
}

fn spans(numbers: std::ops::Range<u32>) -> Batch {
    let resources = ["rank 0", "rank 1"].map(resource);
    let span = |n| plain_span(&resources[n as usize / 7 % 2], n);
    Batch {
        spans: numbers.map(span).collect(),
        ..Batch::default()
    }
}

/// Items of every signal.
fn everything(items: u32) -> Batch {
    let mut batch = spans(1..items + 1);
    let resource = &batch.spans[0].resource;
    batch.metrics = (0..items).map(|n| gauge(resource, n.into())).collect();
    batch.logs = (1..=items).map(|n| log(resource, n)).collect();
    batch
}

/// Every item is delivered or dropped, and none twice.
fn assert_accounted(stats: &ExportStats, exported: u64, what: &str) {
    for (signal, tally) in stats.by_signal() {
        assert_eq!(
            tally.delivered + tally.dropped_total(),
            exported,
            "{what}: {} of {stats:?}",
            signal.name()
        );
    }
}

/// Exports batches for 3.5 s, many more than `requests` may be sent.
fn besiege(what: &str, mut exporter: OtlpExporter, requests: impl Fn() -> u64) {
    let batch = everything(1);
    let (started, mut batches) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(3_500) {
        exporter.export(&batch);
        batches += 1;
        thread::sleep(Duration::from_millis(20));
    }
    let requests = requests();
    assert!(
        (1..=20).contains(&requests),
        "{what}: {requests} requests in 3.5 s"
    );
    assert!(batches > requests, "{what}: only {batches} batches");
    let _ = exporter.shutdown(Duration::ZERO);
    assert_accounted(&exporter.stats(), batches, what);
}

#[test]
fn no_http_answer_makes_it_hammer() {
    let raw = |bytes: &[u8]| Answer {
        raw: Some(bytes.to_vec()),
        ..Answer::status(0)
    };
    let mut answers: Vec<(String, Answer)> =
        [400, 401, 403, 404, 408, 413, 418, 429, 500, 501, 502, 503, 504]
            .map(|status| {
                (
                    status.to_string(),
                    Answer::status(status).header("retry-after", "0"),
                )
            })
            .into();
    answers.extend([301, 302, 307, 308].map(|status| {
        let redirect = Answer::status(status).header("location", "/v1/traces");
        (status.to_string(), redirect)
    }));
    answers.extend([
        (
            "503, then a close".into(),
            Answer::status(503).header("x-then", "close"),
        ),
        ("all rejected".into(), ok(&partial(i64::MAX, "too old"))),
        ("no export response".into(), ok(b"\xff\xff")),
        ("no HTTP".into(), raw(b"SSH-2.0-OpenSSH_9.2\r\n")),
        ("a close".into(), raw(b"")),
        (
            "half a response".into(),
            raw(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"),
        ),
    ]);
    thread::scope(|scope| {
        for (what, answer) in answers {
            scope.spawn(move || {
                let server = HttpServer::always(answer);
                besiege(&what, http(&server), || server.requests(None));
            });
        }
    });
}

#[test]
fn no_grpc_answer_makes_it_hammer() {
    let mut statuses: Vec<(String, GrpcServer)> = (1..=16)
        .map(|code| {
            let status = Status::new(Code::from(code), "no");
            (format!("{:?}", status.code()), GrpcServer::always(status))
        })
        .collect();
    let too_large = Status::resource_exhausted("grpc: received message larger than max (9 vs. 1)");
    statuses.push(("too large".into(), GrpcServer::always(too_large)));
    let rejecting = GrpcServer::start(vec![]);
    rejecting.reject(i64::MAX, "too old");
    thread::scope(|scope| {
        for (what, server) in statuses {
            scope.spawn(move || besiege(&what, grpc(&server), || server.requests()));
        }
        // This one takes metrics.
        scope.spawn(move || {
            let mut exporter = grpc(&rejecting);
            let started = Instant::now();
            while started.elapsed() < Duration::from_millis(3_500) {
                exporter.export(&spans(1..2));
                thread::sleep(Duration::from_millis(20));
            }
            assert!(rejecting.requests() <= 20, "{}", rejecting.requests());
        });
    });
}

#[test]
fn a_long_wait_holds_for_the_next_batch_and_the_signal_alone() {
    let server = HttpServer::start(vec![Answer::status(429).header("retry-after", "600")]);
    let mut config = config(&server.url, Protocol::HttpProtobuf);
    config.queue_bytes = 64 << 10;
    let mut exporter = OtlpExporter::new(&config).unwrap();
    exporter.export(&spans(1..11));
    eventually("a refusal", || exporter.stats().retries == 1);
    let failure = exporter.stats()[Signal::Traces].last_failure.clone().unwrap();
    let Consequence::Kept(wait) = failure.consequence else {
        panic!("{failure:?}")
    };
    assert_eq!((wait.as_secs_f64().round(), failure.items), (600.0, 10));

    let mut exported = 10;
    while exporter.stats()[Signal::Traces].dropped_as("queue_full") == 0 {
        exporter.export(&spans(1..11));
        exported += 10;
    }
    // The other signals have room and a server that takes them.
    let mut others = everything(3);
    others.spans.clear();
    exporter.export(&others);
    eventually("metrics and logs", || {
        let stats = exporter.stats();
        stats[Signal::Metrics].delivered == 3 && stats[Signal::Logs].delivered == 3
    });
    assert_eq!(server.requests(TRACES), 1);

    // What waits cannot be sent before the deadline, so the deadline is not waited for either.
    let started = Instant::now();
    let error = exporter.shutdown(Duration::from_secs(60)).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(30));
    assert!(
        error.contains("spans were not delivered") && error.contains("429"),
        "{error}"
    );
    let stats = exporter.stats();
    let traces = &stats[Signal::Traces];
    assert_eq!(
        traces.dropped_as("queue_full") + traces.dropped_as("shutdown"),
        exported
    );
    assert_eq!(server.requests(TRACES), 1);
}

#[test]
fn a_shutdown_that_is_cut_counts_what_is_left() {
    let server = HttpServer::always(Answer::status(503));
    let mut exporter = http(&server);
    exporter.export(&spans(1..4));
    let cut = || server.requests(TRACES) >= 2;
    let error = exporter
        .shutdown_until(Duration::from_secs(600), &cut)
        .unwrap_err();
    assert!(error.contains("3 spans were not delivered"), "{error}");
    assert_eq!(exporter.stats()[Signal::Traces].dropped, [("shutdown", 3)]);
    // At once: five attempts would take 3.5 s.
    assert!(server.requests(TRACES) <= 5, "{}", server.requests(TRACES));
}

#[test]
fn a_wait_beyond_our_own_patience_is_waited_for() {
    let server = HttpServer::start(vec![Answer::status(503).header("retry-after", "2")]);
    let mut config = config(&server.url, Protocol::HttpProtobuf);
    config.retry.give_up_after = Duration::from_secs(1);
    let mut exporter = OtlpExporter::new(&config).unwrap();
    let started = Instant::now();
    exporter.export(&spans(1..4));
    exporter.shutdown(Duration::from_secs(20)).unwrap();
    assert!(started.elapsed() >= Duration::from_secs(2));
    assert_eq!(exporter.stats()[Signal::Traces].delivered, 3);
}

/// A server that takes requests of at most 20,000 bytes gets everything, in order, and nothing twice.
fn assert_all_fits(what: &str, mut exporter: OtlpExporter, received: impl Fn() -> Received) {
    let batch = everything(1_000);
    exporter.export(&batch);
    exporter.shutdown(Duration::from_secs(60)).unwrap();
    let stats = exporter.stats();
    assert_eq!(
        Signal::ALL.map(|signal| stats[signal].delivered),
        [1_000; 3],
        "{what}: {stats:?}"
    );
    assert_accounted(&stats, 1_000, what);

    let received = received();
    // In the encoder's order: by resource.
    let mut expected = batch.spans.clone();
    let resource_of = |n: u32| n / 7 % 2;
    expected.sort_by_key(|span| resource_of(u32::from_be_bytes(span.trace_id[12..].try_into().unwrap())));
    let expected = ids(&expected);
    let mut sorted = received.trace_ids();
    sorted.sort();
    let mut wanted = expected.clone();
    wanted.sort();
    assert_eq!(sorted, wanted, "{what}");
    let resources = received
        .traces
        .resource_spans
        .iter()
        .map(|group| group.resource.clone());
    assert!(
        resources.flatten().all(|resource| resource.attributes.len() == 4),
        "{what}"
    );
    let points = received
        .metrics
        .resource_metrics
        .iter()
        .flat_map(|group| &group.scope_metrics);
    let points = points.flat_map(|scope| &scope.metrics).map(|metric| {
        assert_eq!(
            (metric.name.as_str(), metric.unit.as_str()),
            ("ccl.operation.active", "{operation}")
        );
        match &metric.data {
            Some(opentelemetry_proto::tonic::metrics::v1::metric::Data::Gauge(gauge)) => {
                gauge.data_points.len()
            }
            other => panic!("{what}: {other:?}"),
        }
    });
    assert_eq!(points.sum::<usize>(), 1_000, "{what}");
    let records = received
        .logs
        .resource_logs
        .iter()
        .flat_map(|group| &group.scope_logs);
    assert_eq!(
        records.map(|scope| scope.log_records.len()).sum::<usize>(),
        1_000,
        "{what}"
    );
}

#[test]
fn a_request_that_is_too_large_is_halved_until_it_fits() {
    let words = [
        Status::resource_exhausted("grpc: received message larger than max (151484 vs. 20000)"),
        Status::resource_exhausted("gRPC message exceeds maximum size 20000: 151484"),
    ];
    let answers = [
        ("413", Answer::status(413), false),
        ("413 before the body", Answer::status(413), true),
        (
            "400 of an OpenTelemetry Collector",
            Answer {
                body: b"http: request body too large".into(),
                ..Answer::status(400)
            },
            false,
        ),
    ];
    thread::scope(|scope| {
        for (what, answer, early) in answers {
            scope.spawn(move || {
                let bytes = 20_000;
                let server = HttpServer::limited(Limit { bytes, answer, early });
                assert_all_fits(what, http(&server), || server.received());
            });
        }
        for status in words {
            scope.spawn(move || {
                let server = GrpcServer::limited(20_000, Some(status.clone()));
                assert_all_fits(status.message(), grpc(&server), || server.received());
            });
        }
        scope.spawn(move || {
            let server = GrpcServer::limited(20_000, None);
            assert_all_fits("OUT_OF_RANGE of tonic", grpc(&server), || server.received());
        });
    });
}

#[test]
fn an_item_that_is_too_large_alone_is_dropped_alone() {
    let limit = Limit {
        bytes: 20_000,
        answer: Answer::status(413),
        early: false,
    };
    let server = HttpServer::limited(limit);
    let mut exporter = http(&server);
    let mut batch = spans(1..201);
    batch.spans[40].error = Some("x".repeat(30_000).into());
    exporter.export(&batch);
    exporter.shutdown(Duration::from_secs(60)).unwrap();
    let stats = exporter.stats();
    assert_eq!(stats[Signal::Traces].delivered, 199, "{stats:?}");
    assert_eq!(stats[Signal::Traces].dropped, [("too_large_for_server", 1)]);

    // The size is remembered: the next batch is cut before it is sent.
    let refused = stats.retries;
    exporter = http(&server);
    exporter.export(&spans(1..401));
    eventually("a delivery", || exporter.stats()[Signal::Traces].delivered == 400);
    let first = exporter.stats().retries;
    assert!(first > 0 && refused > 0);
    exporter.export(&spans(1..401));
    eventually("a delivery", || exporter.stats()[Signal::Traces].delivered == 800);
    assert_eq!(exporter.stats().retries, first);
}

#[test]
fn the_account_says_what_is_done() {
    let failure = |answer: Answer| {
        let server = HttpServer::start(vec![answer]);
        let mut exporter = http(&server);
        exporter.export(&spans(1..6));
        eventually("a failure", || exporter.stats()[Signal::Traces].failures == 1);
        let failure = exporter.stats()[Signal::Traces].last_failure.clone().unwrap();
        drop(exporter);
        failure
    };
    for status in [301, 400, 401, 403, 500] {
        let failure = failure(Answer::status(status));
        assert_eq!(
            (failure.items, &failure.consequence),
            (5, &Consequence::Dropped("rejected")),
            "{status}"
        );
        assert!(failure.error.contains(&status.to_string()), "{}", failure.error);
    }
    let redirect = failure(Answer::status(308).header("location", "https://elsewhere/v1/traces"));
    assert!(
        redirect.error.contains("redirects are not followed") && redirect.error.contains("https://elsewhere"),
        "{}",
        redirect.error
    );
    let rejected = failure(ok(&partial(2, "too old")));
    assert_eq!(
        (rejected.items, rejected.consequence),
        (2, Consequence::Dropped("rejected"))
    );
    assert!(
        rejected.error.ends_with("2 rejected: too old"),
        "{}",
        rejected.error
    );
    let halved = failure(Answer::status(413));
    assert_eq!((halved.items, halved.consequence), (5, Consequence::Halved));
    let busy = failure(Answer::status(503));
    assert!(matches!(busy.consequence, Consequence::Kept(wait) if wait <= Duration::from_millis(500)));
}
