//! Answers that no gRPC server should give, and those that proxies give in its place.

mod otlp_common;
mod otlp_server;

use std::convert::Infallible;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use otlp_common::{plain_span, resource};
use otlp_server::{eventually, partial};
use ringsight_exporters::ExportStats;
use ringsight_exporters::model::{Batch, Exporter as _, Signal};
use ringsight_exporters::otlp::{Config, OtlpExporter, Protocol, Retry};

/// An answer, byte by byte.
#[derive(Clone)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: Vec<u8>,
    trailers: HeaderMap,
}

fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
    let header = |(name, value): &(&'static str, &str)| (name.parse().unwrap(), value.parse().unwrap());
    pairs.iter().map(header).collect()
}

/// A gRPC server's answer: `trailers` after the body.
fn grpc(body: &[u8], trailers: &[(&'static str, &str)]) -> Answer {
    Answer {
        status: 200,
        headers: headers(&[("content-type", "application/grpc"), ("grpc-encoding", "gzip")]),
        body: body.to_vec(),
        trailers: headers(trailers),
    }
}

/// A proxy's answer.
fn proxy(status: u16, body: &[u8]) -> Answer {
    Answer {
        status,
        headers: headers(&[("content-type", "text/html"), ("retry-after", "0")]),
        body: body.to_vec(),
        trailers: HeaderMap::new(),
    }
}

fn frame(flag: u8, message: &[u8]) -> Vec<u8> {
    let len = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag], &len[..], message].concat()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// Gives `answer` to the first request, and takes all others.
struct Server {
    url: String,
    /// Stops when dropped.
    _runtime: tokio::runtime::Runtime,
}

async fn respond(
    script: Arc<Mutex<Vec<Answer>>>,
    request: Request<Incoming>,
) -> Result<Response<UnsyncBoxBody<Bytes, Infallible>>, hyper::Error> {
    request.into_body().collect().await?;
    let next = script.lock().unwrap().pop();
    let answer = next.unwrap_or_else(|| grpc(&frame(0, b""), &[("grpc-status", "0")]));
    let trailers = (!answer.trailers.is_empty()).then_some(Ok(answer.trailers));
    let body = Full::new(Bytes::from(answer.body)).with_trailers(std::future::ready(trailers));
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = answer.status.try_into().unwrap();
    *response.headers_mut() = answer.headers;
    Ok(response)
}

impl Server {
    fn start(answer: Answer) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let script = Arc::new(Mutex::new(vec![answer]));
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let script = Arc::clone(&script);
                let service =
                    hyper::service::service_fn(move |request| respond(Arc::clone(&script), request));
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
            }
        });
        Self {
            url,
            _runtime: runtime,
        }
    }
}

/// What becomes of a span that `answer` is given to, and of the next one, which the server takes.
fn stats(answer: Answer) -> ExportStats {
    let server = Server::start(answer);
    let mut config = Config::from_variables(Some(&server.url), Some(Protocol::Grpc), &|_| None).unwrap();
    config.retry = Retry {
        initial: Duration::from_millis(1),
        max: Duration::from_millis(1),
        give_up_after: Duration::from_secs(60),
    };
    let mut exporter = OtlpExporter::new(&config).unwrap();
    let spans = Batch {
        spans: vec![plain_span(&resource("rank 0"), 1)],
        ..Batch::default()
    };
    for settled in 1..=2 {
        exporter.export(&spans);
        eventually("an end", || {
            let traces = &exporter.stats()[Signal::Traces];
            traces.delivered + traces.dropped_total() == settled
        });
    }
    exporter.shutdown(Duration::from_secs(20)).unwrap();
    exporter.stats()
}

#[test]
fn a_response_that_cannot_be_read_is_malformed() {
    let ok = [("grpc-status", "0")];
    let message = partial(3, "old");
    for (what, answer) in [
        ("a bomb", grpc(&frame(1, &gzip(&vec![0xff; 8 << 20])), &ok)),
        ("a piece", grpc(&frame(1, &gzip(&message)[..12]), &ok)),
        ("a frame cut short", grpc(&frame(0, &message)[..7], &ok)),
        ("an unknown flag", grpc(&frame(2, &message), &ok)),
        ("no message", grpc(b"", &ok)),
        ("too long a message", grpc(&frame(0, &vec![0; 2 << 20]), &ok)),
        ("no export response", grpc(&frame(0, b"\xff\xff\xff\xff"), &ok)),
        ("no status", grpc(&frame(0, &message), &[])),
        ("a page", proxy(200, b"<html>Hello</html>")),
    ] {
        let stats = stats(answer);
        let traces = &stats[Signal::Traces];
        assert_eq!(traces.dropped, [("malformed_response", 1)], "{what}: {stats:?}");
        assert_eq!(
            (traces.delivered, stats.retries),
            (1, 0),
            "{what}: the exporter goes on"
        );
    }
}

#[test]
fn a_compressed_response_is_read() {
    for body in [frame(0, &partial(1, "old")), frame(1, &gzip(&partial(1, "old")))] {
        let stats = stats(grpc(&body, &[("grpc-status", "0")]));
        assert_eq!(stats[Signal::Traces].dropped, [("rejected", 1)], "{stats:?}");
        assert!(stats.last_error.unwrap().ends_with("1 rejected: old"));
    }
}

#[test]
fn a_proxys_answer_is_told_from_a_grpc_servers() {
    for status in [429, 502, 503, 504] {
        let stats = stats(proxy(status, b"busy"));
        assert_eq!(
            (stats[Signal::Traces].delivered, stats.retries),
            (2, 1),
            "{status}"
        );
        let error = stats.last_error.unwrap();
        assert!(error.contains(&format!("HTTP {status}")), "{error}");
    }
    let absent = stats(proxy(404, b""));
    assert_eq!(absent[Signal::Traces].dropped, [("unsupported", 1)], "{absent:?}");
    let forbidden = stats(proxy(403, b"<html>"));
    assert_eq!(
        forbidden[Signal::Traces].dropped,
        [("rejected", 1)],
        "{forbidden:?}"
    );
}

#[test]
fn details_that_cannot_be_read_leave_the_status() {
    let broken = [
        ("grpc-status", "14"),
        ("grpc-message", "later"),
        ("grpc-status-details-bin", "!no base64!"),
    ];
    let in_headers = Answer {
        headers: headers(&broken),
        trailers: HeaderMap::new(),
        ..grpc(b"", &[])
    };
    for answer in [grpc(b"", &broken), in_headers] {
        let stats = stats(answer);
        assert_eq!(
            (stats[Signal::Traces].delivered, stats.retries),
            (2, 1),
            "{stats:?}"
        );
        assert!(stats.last_error.unwrap().ends_with("gRPC UNAVAILABLE: later"));
    }
}
