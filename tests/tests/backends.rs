//! Real backends take the traces of a job and give them back whole. Ones that refuse are left in peace.

#[path = "../../exporters/tests/otlp_server/mod.rs"]
mod otlp_server;

use std::{
    collections::BTreeSet,
    net::{SocketAddr, ToSocketAddrs},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use otlp_server::{Answer, HttpServer, Limit, eventually};
use ringsight_testbed::{
    backend::{self, Jaeger},
    demo::{collector::Collector, summary::Summary},
};
use ringsight_tests::{
    LIMIT, alone, artifacts, folder, jaeger_binary, job, skip, start,
    traces::{self, Makers},
    under_way,
};

/// Runs a job whose traces go to `otlp`; returns the collector's account, and what it wrote.
fn send(folder: &Path, otlp: &str, protocol: &str, steps: u32) -> Result<(Summary, String)> {
    let configuration = job(4, steps, 0);
    let mut job = start(&configuration, folder)?;
    let options = [format!("--otlp={otlp}"), format!("--otlp-protocol={protocol}")];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder)?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    let summary = collector.finish(LIMIT)?;
    Ok((summary, collector.log()))
}

/// Reads every operation's trace with `read` and checks it. A backend may index with a delay: a trace that is not whole
/// is read again until `patience` has passed.
fn check_all(
    summary: &Summary,
    ranks: u32,
    patience: Duration,
    read: impl Fn(&str) -> Result<Vec<traces::Span>>,
) -> Result<()> {
    ensure!(!summary.operations.is_empty(), "the collector saw no operation");
    ensure!(summary.lost == 0, "{} events were lost", summary.lost);
    let end = Instant::now() + patience;
    for operation in &summary.operations {
        loop {
            let checked = read(&operation.trace_id).and_then(|trace| {
                let faults = if operation.name == "send_recv" {
                    traces::faults(&trace, Makers::One)
                } else {
                    traces::collective_faults(&trace, ranks, true, Makers::One)
                };
                ensure!(
                    faults.is_empty(),
                    "{} {}: {faults:#?}",
                    operation.name,
                    operation.sequence
                );
                Ok(())
            });
            match checked {
                Ok(()) => break,
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
    }
    Ok(())
}

fn check_in_jaeger(summary: &Summary, ranks: u32, jaeger: &Jaeger) -> Result<()> {
    check_all(summary, ranks, Duration::from_secs(10), |id| {
        traces::read_jaeger(&backend::get(jaeger.query, &format!("/api/traces/{id}"))?)
    })
}

fn through_jaeger(test: &str, protocol: &str) -> Result<()> {
    let Some(binary) = jaeger_binary() else {
        skip(test, "no Jaeger: `cargo xtask setup --all` builds it where Go is");
        return Ok(());
    };
    let _alone = alone();
    let folder = folder()?;
    let jaeger = Jaeger::start(&binary, backend::free_ports()?, None, true)?;
    let otlp = if protocol == "grpc" {
        jaeger.otlp_grpc
    } else {
        jaeger.otlp_http
    };
    let (summary, log) = send(folder.path(), &format!("http://{otlp}"), protocol, 60)?;
    // Jaeger takes traces alone: that is told, and no failure.
    ensure!(log.matches("takes no metrics").count() == 1, "{log}");
    check_in_jaeger(&summary, 4, &jaeger)
}

#[test]
fn jaeger_gives_back_what_it_got_over_grpc() -> Result<()> {
    through_jaeger("jaeger_gives_back_what_it_got_over_grpc", "grpc")
}

#[test]
fn jaeger_gives_back_what_it_got_over_http() -> Result<()> {
    through_jaeger("jaeger_gives_back_what_it_got_over_http", "http/protobuf")
}

#[test]
fn a_backend_that_comes_up_during_the_run_gets_everything() -> Result<()> {
    let Some(binary) = jaeger_binary() else {
        skip(
            "a_backend_that_comes_up_during_the_run_gets_everything",
            "no Jaeger: `cargo xtask setup --all` builds it",
        );
        return Ok(());
    };
    let _alone = alone();
    let folder = folder()?;
    let ports = backend::free_ports()?;
    let configuration = job(2, 60, 20);
    let mut job = start(&configuration, folder.path())?;
    let options = [
        format!("--otlp=http://127.0.0.1:{}", ports[0]),
        "--otlp-protocol=grpc".to_owned(),
    ];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    // By then the first spans have been refused.
    job.wait_step(40, LIMIT)?;
    let jaeger = Jaeger::start(&binary, ports, None, true)?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let summary = collector.finish(LIMIT)?;
    let messages: usize = truths.iter().map(|truth| truth.sent.len()).sum();
    ensure!(
        summary.operations.len() == truths[0].collectives.len() + messages,
        "operations are missing"
    );
    check_in_jaeger(&summary, 2, &jaeger)
}

/// `http://host:port`, as an address.
fn address(url: &str) -> Result<SocketAddr> {
    let rest = url
        .strip_prefix("http://")
        .with_context(|| format!("{url} does not begin with http://"))?;
    rest.trim_end_matches('/')
        .to_socket_addrs()?
        .next()
        .with_context(|| format!("{url} has no address"))
}

#[test]
fn tempo_gives_back_what_it_got() -> Result<()> {
    let (Ok(otlp), Ok(query)) = (
        std::env::var("RINGSIGHT_TEMPO_OTLP"),
        std::env::var("RINGSIGHT_TEMPO_QUERY"),
    ) else {
        skip(
            "tempo_gives_back_what_it_got",
            "no Tempo: set RINGSIGHT_TEMPO_OTLP (OTLP gRPC) and RINGSIGHT_TEMPO_QUERY to the URLs of one",
        );
        return Ok(());
    };
    let _alone = alone();
    let folder = folder()?;
    let (summary, _) = send(folder.path(), &otlp, "grpc", 40)?;
    let query = address(&query)?;
    check_all(&summary, 4, Duration::from_secs(60), |id| {
        traces::read_tempo(&backend::get(query, &format!("/api/traces/{id}"))?)
    })?;
    println!("Tempo gave back {} traces", summary.operations.len());
    Ok(())
}

/// Runs a job whose telemetry goes to `server`; returns the collector's exit code, what it wrote, and how long it took after the job.
fn send_to(server: &HttpServer, folder: &Path) -> Result<(Option<i32>, String, Duration)> {
    // Longer than the time between two exports: what is said while it runs is looked for.
    let mut job = start(&job(2, 60, 20), folder)?;
    let options = [
        format!("--otlp={}", server.url),
        "--otlp-protocol=http/protobuf".to_owned(),
        "--flush-timeout=60".to_owned(),
    ];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder)?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    let ended = Instant::now();
    let (code, log) = collector.outcome(LIMIT)?;
    Ok((code, log, ended.elapsed()))
}

#[test]
fn a_backend_that_asks_to_wait_gets_no_second_request() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let server = HttpServer::always(Answer::status(429).header("retry-after", "600"));
    let (code, log, flushing) = send_to(&server, folder.path())?;
    ensure!(code == Some(4), "{code:?}: {log}");
    // One of each signal.
    ensure!(
        server.requests(None) <= 3,
        "{} requests: {log}",
        server.requests(None)
    );
    ensure!(server.requests(Some("/v1/traces")) == 1, "{log}");
    ensure!(log.contains("spans are kept and tried again in 600 s"), "{log}");
    ensure!(log.contains("spans were dropped (shutdown)"), "{log}");
    ensure!(
        flushing < Duration::from_secs(30),
        "nothing could be sent, but it took {flushing:?}: {log}"
    );
    Ok(())
}

#[test]
fn a_signal_ends_the_delivery_to_a_backend_that_refuses() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let server = HttpServer::always(Answer::status(503));
    let job = under_way(folder.path())?;
    let options = [
        format!("--otlp={}", server.url),
        "--otlp-protocol=http/protobuf".to_owned(),
        "--duration=0.5".to_owned(),
        "--flush-timeout=3600".to_owned(),
    ];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    eventually("the delivery", || collector.log().contains("detached in"));
    collector.signal(libc::SIGTERM);
    // With its account: the signal ends the delivery and not the process.
    let (code, log) = collector.outcome(LIMIT)?;
    ensure!(code == Some(4), "{code:?}: {log}");
    ensure!(log.contains("spans were dropped (shutdown)"), "{log}");
    Ok(())
}

#[test]
fn a_backend_that_refuses_for_good_is_said_to_get_nothing() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let server = HttpServer::always(Answer::status(401));
    let (code, log, _) = send_to(&server, folder.path())?;
    ensure!(code == Some(4), "{code:?}: {log}");
    ensure!(
        log.contains("HTTP 401") && log.contains("spans were dropped (rejected)"),
        "{log}"
    );
    ensure!(!log.contains("kept"), "{log}");
    Ok(())
}

#[test]
fn a_backend_that_takes_small_requests_alone_gets_everything_once() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let server = HttpServer::limited(Limit {
        bytes: 20_000,
        answer: Answer::status(413),
        early: false,
    });
    let (code, log, _) = send_to(&server, folder.path())?;
    ensure!(code == Some(0), "{code:?}: {log}");
    ensure!(log.contains("sent again in two requests"), "{log}");
    let received = server.received().traces;
    let scopes = received
        .resource_spans
        .iter()
        .flat_map(|group| &group.scope_spans);
    let ids: Vec<&[u8]> = scopes
        .flat_map(|scope| &scope.spans)
        .map(|span| &span.span_id[..])
        .collect();
    ensure!(
        log.contains(&format!("{} spans delivered", ids.len())),
        "{} came: {log}",
        ids.len()
    );
    ensure!(
        ids.iter().collect::<BTreeSet<_>>().len() == ids.len(),
        "a span came twice"
    );
    Ok(())
}

#[test]
fn addresses_are_read() {
    assert_eq!(
        address("http://127.0.0.1:4317/").ok(),
        Some(SocketAddr::from(([127, 0, 0, 1], 4317)))
    );
    for wrong in ["127.0.0.1:1", "https://127.0.0.1:1", "http://"] {
        let refused: Result<SocketAddr> = address(wrong);
        if refused.is_ok() {
            panic!("{wrong} was taken");
        }
    }
}
