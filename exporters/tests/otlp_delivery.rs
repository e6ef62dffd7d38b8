//! Delivery over gRPC and HTTP to servers of the test's own, good and bad.

mod otlp_common;
mod otlp_server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use otlp_common::{gauge, log, messages, plain_span, resource};
use otlp_server::{Answer, GrpcServer, HttpServer, eventually, ok};
use ringsight_exporters::model::{Batch, Exporter, Resource, Signal};
use ringsight_exporters::otlp::{Config, OtlpExporter, Protocol, Retry};
use tonic::{Code, Status};

const PATIENCE: Duration = Duration::from_secs(20);

fn config(url: &str, protocol: Protocol, variables: &[(&str, &str)]) -> Config {
    let get = |name: &str| {
        variables
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    };
    let mut config = Config::from_variables(Some(url), Some(protocol), &get).unwrap();
    config.retry = Retry {
        initial: Duration::from_millis(10),
        max: Duration::from_millis(50),
        give_up_after: Duration::from_secs(60),
    };
    config
}

fn http(server: &HttpServer) -> OtlpExporter {
    OtlpExporter::new(&config(&server.url, Protocol::HttpProtobuf, &[])).unwrap()
}

fn grpc(server: &GrpcServer) -> OtlpExporter {
    OtlpExporter::new(&config(&server.url, Protocol::Grpc, &[])).unwrap()
}

fn batch(resource: &Arc<Resource>, spans: std::ops::Range<u32>) -> Batch {
    Batch {
        spans: spans.map(|n| plain_span(resource, n)).collect(),
        ..Batch::default()
    }
}

fn spans(count: u32) -> Batch {
    batch(&resource("rank 0"), 1..count + 1)
}

fn closed(mut exporter: OtlpExporter) -> ringsight_exporters::ExportStats {
    exporter.shutdown(PATIENCE).unwrap();
    exporter.stats()
}

#[test]
fn both_protocols_deliver_every_signal_plain_and_compressed() {
    for compression in ["none", "gzip"] {
        let variables = [
            ("OTEL_EXPORTER_OTLP_COMPRESSION", compression),
            (
                "OTEL_EXPORTER_OTLP_HEADERS",
                "x-tenant=blue%20whale,authorization=Bearer%20s3cret-token",
            ),
        ];
        let (http_server, grpc_server) = (HttpServer::start(vec![]), GrpcServer::start(vec![]));
        for (url, protocol) in [
            (&http_server.url, Protocol::HttpProtobuf),
            (&grpc_server.url, Protocol::Grpc),
        ] {
            let mut exporter = OtlpExporter::new(&config(url, protocol, &variables)).unwrap();
            let mut batch = spans(5);
            batch.metrics = vec![gauge(&batch.spans[0].resource, 1.5)];
            batch.logs = vec![log(&batch.spans[0].resource, 1), log(&batch.spans[0].resource, 2)];
            exporter.export(&batch);
            let stats = closed(exporter);
            assert_eq!(
                Signal::ALL.map(|signal| stats[signal].delivered),
                [5, 1, 2],
                "{stats:?}"
            );
            assert_eq!(stats.last_error, None);
            let received = if protocol == Protocol::Grpc {
                grpc_server.received()
            } else {
                http_server.received()
            };
            assert_eq!(received.traces, messages::traces_request(&batch.spans));
            assert_eq!(received.metrics, messages::metrics_request(&batch.metrics));
            assert_eq!(received.logs, messages::logs_request(&batch.logs));
            assert_eq!(received.headers.len(), 3);
            for headers in &received.headers {
                assert_eq!(headers["x-tenant"], "blue whale");
                assert_eq!(headers["authorization"], "Bearer s3cret-token");
                assert!(headers["user-agent"].to_str().unwrap().starts_with("ringsight/"));
                let name = if protocol == Protocol::Grpc {
                    "grpc-encoding"
                } else {
                    "content-encoding"
                };
                let expected = (compression == "gzip").then_some("gzip");
                assert_eq!(headers.get(name).map(|value| value.to_str().unwrap()), expected);
            }
        }
    }
}

#[test]
fn oversize_batches_travel_as_several_requests() {
    let server = GrpcServer::start(vec![]);
    let mut config = config(&server.url, Protocol::Grpc, &[]);
    config.request_bytes = 8 << 10;
    let mut exporter = OtlpExporter::new(&config).unwrap();
    let mut batch = spans(1_000);
    batch.spans[10].error = Some("x".repeat(9_000).into());
    exporter.export(&batch);
    let stats = closed(exporter);
    assert_eq!(stats[Signal::Traces].delivered, 999);
    assert_eq!(stats[Signal::Traces].dropped, [("too_large", 1)]);
    assert!(server.received().headers.len() > 5);
    batch.spans.remove(10);
    assert_eq!(server.received().trace_ids(), otlp_common::ids(&batch.spans));
}

#[test]
fn a_full_queue_drops_and_counts() {
    // Nobody accepts at this address: the listener is bound and never served, so attempts wait.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let mut config = config(&url, Protocol::HttpProtobuf, &[]);
    config.queue_bytes = 4_000;
    let mut exporter = OtlpExporter::new(&config).unwrap();
    for _ in 0..10 {
        exporter.export(&spans(10));
    }
    let dropped = exporter.stats()[Signal::Traces].dropped.clone();
    assert_eq!(dropped.len(), 1, "{dropped:?}");
    assert_eq!(dropped[0].0, "queue_full");
    let error = exporter.shutdown(Duration::from_millis(50)).unwrap_err();
    assert!(error.contains(&url) && error.contains("not delivered"), "{error}");
    let stats = exporter.stats();
    let total = stats[Signal::Traces].dropped_total();
    assert_eq!(total, 100, "every span is accounted for: {stats:?}");
    assert!(
        stats[Signal::Traces]
            .dropped
            .iter()
            .any(|(reason, _)| *reason == "shutdown")
    );
}

#[test]
fn a_server_that_goes_down_and_comes_back_gets_everything() {
    let resource = resource("rank 0");
    let mut server = HttpServer::start(vec![]);
    let mut exporter = http(&server);
    exporter.export(&batch(&resource, 1..4));
    eventually("first delivery", || {
        exporter.stats()[Signal::Traces].delivered == 3
    });

    let address = server.stop();
    for n in 4..50 {
        exporter.export(&batch(&resource, n..n + 1));
    }
    eventually("retries", || exporter.stats().retries >= 3);
    assert_eq!(exporter.stats()[Signal::Traces].delivered, 3);
    assert!(exporter.stats().last_error.unwrap().contains("cannot connect"));

    let server = HttpServer::start_at(address, vec![]);
    let stats = closed(exporter);
    assert_eq!(stats[Signal::Traces].delivered, 49);
    assert_eq!(stats[Signal::Traces].dropped, []);
    let received = server.received();
    assert_eq!(
        received.trace_ids(),
        otlp_common::ids(&batch(&resource, 4..50).spans)
    );
    assert!(
        received.headers.len() <= 3,
        "waiting requests travel merged, not as {}",
        received.headers.len()
    );
}

#[test]
fn retry_after_is_honoured() {
    let server = HttpServer::start(vec![Answer::status(429).header("retry-after", "1")]);
    let mut exporter = http(&server);
    let started = Instant::now();
    exporter.export(&spans(2));
    let stats = closed(exporter);
    assert!(
        started.elapsed() >= Duration::from_secs(1),
        "not earlier than the server said"
    );
    assert_eq!((stats[Signal::Traces].delivered, stats.retries), (2, 1));
    assert!(stats.last_error.unwrap().contains("HTTP 429"));
}

#[test]
fn http_statuses_are_retried_or_not_as_otlp_says() {
    for (status, retried) in [(429, true), (502, true), (503, true), (504, true)]
        .into_iter()
        .chain([301, 400, 401, 404, 408, 413, 500, 501].map(|status| (status, false)))
    {
        let server = HttpServer::start(vec![Answer::status(status)]);
        let mut exporter = http(&server);
        exporter.export(&spans(1));
        eventually("an end", || {
            let stats = exporter.stats();
            stats[Signal::Traces].delivered + stats[Signal::Traces].dropped.len() as u64 == 1
        });
        let stats = exporter.stats();
        let account = &stats[Signal::Traces];
        assert_eq!(stats.retries, u64::from(retried), "{status}");
        assert_eq!(account.delivered, u64::from(retried), "{status}");
        // There is nothing at that path, or it is not implemented.
        let unsupported = matches!(status, 404 | 501);
        let reason = match status {
            404 | 501 => "unsupported",
            413 => "too_large_for_server",
            _ => "rejected",
        };
        let expected = if retried { vec![] } else { vec![(reason, 1)] };
        assert_eq!(account.dropped, expected, "{status}");
        let error = if unsupported {
            &account.unsupported
        } else {
            &stats.last_error
        };
        assert!(error.as_ref().unwrap().contains(&status.to_string()));
    }
}

#[test]
fn grpc_codes_are_retried_or_not_as_otlp_says() {
    for code in 1..=16 {
        let retried = [1, 4, 10, 11, 14, 15].contains(&code);
        let server = GrpcServer::start(vec![Status::new(Code::from(code), "not now, please")]);
        let mut exporter = grpc(&server);
        exporter.export(&spans(1));
        eventually("an end", || {
            let stats = exporter.stats();
            stats[Signal::Traces].delivered + stats[Signal::Traces].dropped.len() as u64 == 1
        });
        let stats = exporter.stats();
        let account = &stats[Signal::Traces];
        assert_eq!(
            (account.delivered, stats.retries),
            (u64::from(retried), u64::from(retried)),
            "code {code}"
        );
        // UNIMPLEMENTED
        let error = if code == 12 {
            &account.unsupported
        } else {
            &stats.last_error
        };
        assert!(
            error.as_ref().unwrap().ends_with("not now, please"),
            "code {code}"
        );
    }
}

#[test]
fn resource_exhausted_is_retried_when_the_server_says_when() {
    use prost::Message as _;
    // google.rpc.Status { code: 8, details: [Any { RetryInfo { retry_delay: 300 ms } }] }, by hand.
    let delay = [&[0x0a, 0x06, 0x10][..], &prost_varint(300_000_000)].concat();
    let mut any = Vec::new();
    prost::encoding::string::encode(
        1,
        &"type.googleapis.com/google.rpc.RetryInfo".to_owned(),
        &mut any,
    );
    prost::encoding::bytes::encode(2, &delay, &mut any);
    let mut details = 8i32.encode_to_vec();
    prost::encoding::bytes::encode(3, &any, &mut details);

    let server = GrpcServer::start(vec![Status::with_details(
        Code::ResourceExhausted,
        "full",
        details.into(),
    )]);
    let mut exporter = grpc(&server);
    let started = Instant::now();
    exporter.export(&spans(1));
    let stats = closed(exporter);
    assert_eq!(
        (stats[Signal::Traces].delivered, stats.retries),
        (1, 1),
        "{stats:?}"
    );
    assert!(started.elapsed() >= Duration::from_millis(300));
}

fn prost_varint(value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    prost::encoding::encode_varint(value, &mut out);
    out
}

/// Jaeger and the like take traces alone.
#[test]
fn a_server_without_logs_gets_everything_else() {
    let http_server = HttpServer::start(vec![]);
    http_server.lack("/v1/logs");
    let grpc_server = GrpcServer::without_logs();
    for (mut exporter, said) in [
        (http(&http_server), "HTTP 404"),
        (grpc(&grpc_server), "gRPC UNIMPLEMENTED"),
    ] {
        let mut batch = spans(3);
        batch.logs = vec![log(&batch.spans[0].resource, 1)];
        for dropped in 1..3 {
            exporter.export(&batch);
            // The next one is tried as well: a server may learn to take them.
            eventually("an answer", || {
                exporter.stats()[Signal::Logs].dropped == [("unsupported", dropped)]
            });
        }
        let stats = closed(exporter);
        assert_eq!(stats[Signal::Traces].delivered, 6);
        assert_eq!((stats.retries, &stats.last_error), (0, &None));
        let told = stats[Signal::Logs].unsupported.as_ref().unwrap();
        assert!(told.contains(said), "{told}");
    }
}

#[test]
fn partial_success_counts_what_was_rejected() {
    let http_server = HttpServer::start(vec![ok(&otlp_server::partial(2, "two are too old"))]);
    let grpc_server = GrpcServer::start(vec![]);
    grpc_server.reject(2, "two are too old");
    for mut exporter in [http(&http_server), grpc(&grpc_server)] {
        exporter.export(&spans(5));
        let stats = closed(exporter);
        assert_eq!(stats[Signal::Traces].delivered, 3);
        assert_eq!(stats[Signal::Traces].dropped, [("rejected", 2)]);
        assert!(stats.last_error.unwrap().ends_with("2 rejected: two are too old"));
    }
    let json = br#"{"partialSuccess":{"rejectedLogRecords":"2","errorMessage":"two are too old"}}"#;
    let answer = Answer {
        body: json.to_vec(),
        ..Answer::status(200)
    };
    let http_server = HttpServer::start(vec![answer.header("content-type", "application/json")]);
    for mut exporter in [http(&http_server), grpc(&grpc_server)] {
        let resource = resource("rank 0");
        exporter.export(&Batch {
            logs: (1..=3).map(|n| log(&resource, n)).collect(),
            ..Batch::default()
        });
        let stats = closed(exporter);
        assert_eq!(stats[Signal::Logs].delivered, 1);
        assert_eq!(stats[Signal::Logs].dropped, [("rejected", 2)]);
    }
}

#[test]
fn malformed_responses_are_errors_and_no_more() {
    let protobuf = |body: &[u8]| ok(body);
    let typed = |kind: &'static str, body: &[u8]| {
        Answer {
            body: body.to_vec(),
            ..Answer::status(200)
        }
        .header("content-type", kind)
    };
    let answers = vec![
        protobuf(b"\xff\xff\xff\xff"),
        protobuf(&[0x0a, 0x7f, 1]),
        typed("text/html", b"<html>Hello</html>"),
        typed("application/json", b"{\"partialSuccess\":"),
        typed("application/json", b"[]"),
        ok(&vec![0x12; 2 << 20]),
    ];
    let count = answers.len() as u64;
    let server = HttpServer::start(answers);
    let mut exporter = http(&server);
    for n in 0..count {
        exporter.export(&spans(1));
        eventually("an answer", || {
            exporter.stats()[Signal::Traces].dropped_total() == n + 1
        });
    }
    exporter.export(&spans(1));
    let stats = closed(exporter);
    assert_eq!(stats[Signal::Traces].dropped, [("malformed_response", count)]);
    assert_eq!(stats[Signal::Traces].delivered, 1, "the exporter goes on");
}

#[test]
fn an_http_server_is_not_taken_for_a_grpc_one_nor_rubbish_for_http() {
    let rubbish = Answer {
        raw: Some(b"SSH-2.0-OpenSSH_9.2\r\n".to_vec()),
        ..Answer::status(200)
    };
    let server = HttpServer::start(vec![rubbish; 10_000]);
    for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
        let mut exporter = OtlpExporter::new(&config(&server.url, protocol, &[])).unwrap();
        exporter.export(&spans(1));
        eventually("an error", || exporter.stats().last_error.is_some());
        let _ = exporter.shutdown(Duration::from_millis(20));
    }
}

#[test]
fn a_silent_server_is_timed_out() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
        let config = config(&url, protocol, &[("OTEL_EXPORTER_OTLP_TIMEOUT", "30")]);
        let mut exporter = OtlpExporter::new(&config).unwrap();
        exporter.export(&spans(1));
        eventually("a second attempt", || exporter.stats().retries >= 2);
        assert!(
            exporter
                .stats()
                .last_error
                .unwrap()
                .contains("no response within 0.03 s")
        );
        assert!(exporter.shutdown(Duration::from_millis(50)).is_err());
        exporter.export(&spans(1));
        assert_eq!(
            exporter.stats()[Signal::Traces].dropped,
            [("shutdown", 1)],
            "later calls do nothing"
        );
        assert_eq!(exporter.shutdown(PATIENCE), Ok(()));
    }
}

#[test]
fn a_server_that_always_answers_busy_is_given_up() {
    let server = HttpServer::start(vec![Answer::status(503); 10_000]);
    let mut config = config(&server.url, Protocol::HttpProtobuf, &[]);
    config.retry.give_up_after = Duration::from_secs(1);
    let mut exporter = OtlpExporter::new(&config).unwrap();
    exporter.export(&spans(3));
    eventually("giving up", || {
        exporter.stats()[Signal::Traces].dropped == [("retries_exhausted", 3)]
    });
    assert!(exporter.stats().retries >= 2);
}

#[test]
fn secrets_do_not_leak() {
    let secret = "s3cret-token";
    let variables = [(
        "OTEL_EXPORTER_OTLP_HEADERS",
        "authorization=Bearer%20s3cret-token,x-key=s3cret-token",
    )];
    let body = format!("token {secret} is not valid");
    let server = HttpServer::start(vec![Answer {
        body: body.into_bytes(),
        ..Answer::status(401)
    }]);
    let config = config(&server.url, Protocol::HttpProtobuf, &variables);
    let shown = format!("{config:?}");
    assert!(
        shown.contains("authorization") && !shown.contains(secret),
        "{shown}"
    );
    let mut exporter = OtlpExporter::new(&config).unwrap();
    exporter.export(&spans(1));
    let error = closed(exporter).last_error.unwrap();
    assert!(error.contains("token [redacted] is not valid"), "{error}");
}

#[test]
fn an_idle_connection_that_the_server_closed_costs_nothing() {
    let server = HttpServer::start(vec![ok(b"").header("x-then", "close"), ok(b"")]);
    let mut exporter = http(&server);
    exporter.export(&spans(1));
    eventually("first delivery", || {
        exporter.stats()[Signal::Traces].delivered == 1
    });
    exporter.export(&spans(1));
    let stats = closed(exporter);
    assert_eq!((stats[Signal::Traces].delivered, stats.last_error), (2, None));
}
