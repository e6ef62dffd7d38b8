//! Spans a second encoded and delivered over gRPC to a server on this machine, and the CPU time that a span costs.
//!
//! `cargo bench -p ringsight-exporters --bench otlp_grpc`. The server is a process of its own that reads requests and answers: its
//! CPU time is not counted.

#[path = "../tests/otlp_common/mod.rs"]
mod otlp_common;

use std::convert::Infallible;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use ringsight_exporters::model::{Batch, Exporter as _, Signal};
use ringsight_exporters::otlp::{Config, OtlpExporter, Protocol};

const BATCHES: u64 = 256;
const SPANS: u32 = 4_096;
/// Batches that may wait: encoding and delivering overlap, and nothing is dropped.
const AHEAD: u64 = 16;

/// Takes every request and says so.
async fn answer(
    request: Request<Incoming>,
) -> Result<Response<http_body_util::combinators::BoxBody<Bytes, Infallible>>, hyper::Error> {
    let mut body = request.into_body();
    while let Some(frame) = body.frame().await {
        frame?;
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let empty_message = Full::new(Bytes::from_static(&[0; 5]));
    let body = empty_message
        .with_trailers(std::future::ready(Some(Ok(trailers))))
        .boxed();
    let mut response = Response::new(body);
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

/// Serves until its standard input closes.
fn serve() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        let parent_ended = tokio::task::spawn_blocking(|| std::io::stdin().lines().count());
        let serving = async {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                server
                    .initial_stream_window_size(4 << 20)
                    .initial_connection_window_size(16 << 20);
                tokio::spawn(
                    server.serve_connection(TokioIo::new(stream), hyper::service::service_fn(answer)),
                );
            }
        };
        tokio::select! {
            () = serving => {}
            _ = parent_ended => {}
        }
    });
}

/// CPU time of this process.
fn cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

fn measure(url: &str, compression: &'static str, batch: &Batch) {
    let variable = |name: &str| (name == "OTEL_EXPORTER_OTLP_COMPRESSION").then(|| compression.to_owned());
    let config = Config::from_variables(Some(url), Some(Protocol::Grpc), &variable).unwrap();
    let mut exporter = OtlpExporter::new(&config).unwrap();
    let delivered = |exporter: &OtlpExporter| exporter.stats()[Signal::Traces].delivered / u64::from(SPANS);
    let (start, cpu_before) = (Instant::now(), cpu());
    for sent in 0..BATCHES {
        while sent > delivered(&exporter) + AHEAD {
            std::thread::sleep(Duration::from_micros(200));
        }
        exporter.export(batch);
    }
    exporter.shutdown(Duration::from_secs(60)).unwrap();
    let (wall, cpu) = (start.elapsed(), cpu() - cpu_before);
    let stats = exporter.stats();
    let spans = BATCHES * u64::from(SPANS);
    assert_eq!(
        (stats[Signal::Traces].delivered, stats.retries),
        (spans, 0),
        "{stats:?}"
    );
    println!(
        "compression {compression}: {:.0} spans/s, {:.0} ns of CPU time a span",
        spans as f64 / wall.as_secs_f64(),
        cpu.as_nanos() as f64 / spans as f64,
    );
}

fn main() {
    if std::env::args()
        .nth(1)
        .is_some_and(|argument| argument == "serve")
    {
        return serve();
    }
    let mut server = Command::new(std::env::current_exe().unwrap())
        .arg("serve")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut address = String::new();
    BufReader::new(server.stdout.take().unwrap())
        .read_line(&mut address)
        .unwrap();
    let url = format!("http://{}", address.trim());

    let resources: Vec<_> = (0..8)
        .map(|rank| otlp_common::resource(&rank.to_string()))
        .collect();
    let communicator: Arc<str> = "8d1f0c2b9a3e4756".into();
    let spans = (1..=SPANS).map(|n| otlp_common::rank_span(&resources[n as usize % 8], &communicator, n));
    let batch = Batch {
        spans: spans.collect(),
        ..Batch::default()
    };
    for compression in ["none", "gzip"] {
        for _ in 0..3 {
            measure(&url, compression, &batch);
        }
    }
    drop(server.stdin.take());
    server.wait().unwrap();
}
