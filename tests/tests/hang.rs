//! A job that hangs, as an OTLP backend learns of it.

#[path = "../../exporters/tests/otlp_server/mod.rs"]
mod otlp_server;

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use opentelemetry_proto::tonic::{
    common::v1::{AnyValue, KeyValue, any_value},
    logs::v1::{LogRecord, SeverityNumber},
    resource::v1::Resource,
    trace::v1::{Span, span::Event, status::StatusCode},
};
use otlp_server::{GrpcServer, HttpServer, Received, eventually};
use ringsight_testbed::demo::{collector::Collector, summary::Summary};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, start};

const VERDICT: &str = "ccl.watchdog.verdict";
/// How far the time of a verdict's event may be from that of its log record, nanoseconds. The event's span comes when the operation is over, and
/// until then the offset by which times are converted may have been measured anew (`collector/src/clock.rs`). Two verdicts are further apart.
const SLEWED_NS: u64 = 1_000_000;
/// The rank that is stopped.
const STOPPED: usize = 3;

fn attribute<'a>(attributes: &'a [KeyValue], name: &str) -> Option<&'a any_value::Value> {
    let found = attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.as_ref()?.value.as_ref()
}

fn number(attributes: &[KeyValue], name: &str) -> Option<i64> {
    match attribute(attributes, name)? {
        any_value::Value::IntValue(number) => Some(*number),
        _ => None,
    }
}

fn is_hang(attributes: &[KeyValue]) -> bool {
    attribute(attributes, "ccl.watchdog.hang") == Some(&any_value::Value::BoolValue(true))
}

/// Log records of verdicts, each with its resource.
fn logs(received: &Received) -> Vec<(Option<&Resource>, &LogRecord)> {
    let groups = received.logs.resource_logs.iter();
    groups
        .flat_map(|group| {
            let records = group.scope_logs.iter().flat_map(|scope| &scope.log_records);
            records.map(|record| (group.resource.as_ref(), record))
        })
        .filter(|(_, record)| record.event_name == VERDICT)
        .collect()
}

fn spans(received: &Received) -> impl Iterator<Item = (Option<&Resource>, &Span)> {
    received.traces.resource_spans.iter().flat_map(|group| {
        let spans = group.scope_spans.iter().flat_map(|scope| &scope.spans);
        spans.map(|span| (group.resource.as_ref(), span))
    })
}

/// Ranks that have told of a verdict.
fn told(received: &Received) -> BTreeSet<Option<i64>> {
    let logs = logs(received).into_iter();
    logs.map(|(_, record)| number(&record.attributes, "ccl.rank"))
        .collect()
}

/// Runs a job of which one rank is stopped until the others have told of it.
fn run(url: &str, protocol: &str, received: &dyn Fn() -> Received) -> Result<Summary> {
    let folder = folder()?;
    let mut job = start(&job(4, 60, 10), folder.path())?;
    let options = [format!("--otlp={url}"), format!("--otlp-protocol={protocol}")];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    job.wait_step(10, LIMIT)?;
    job.signal(STOPPED, libc::SIGSTOP);
    eventually("verdicts of all the others", || told(&received()).len() == 3);
    let hung = received();
    for (_, record) in logs(&hung) {
        ensure!(
            !spans(&hung).any(|(_, span)| span.span_id == record.span_id),
            "the span of {record:?} is there, and its operation hangs"
        );
    }
    job.signal(STOPPED, libc::SIGCONT);
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    collector.finish(LIMIT)
}

/// Every verdict is there once as a log record and once as an event of the span that the record is of, and a hang is that span's error.
fn check(received: &Received, summary: &Summary) -> Result<()> {
    let logs = logs(received);
    let is_verdict = |event: &&Event| event.name == VERDICT;
    let events = spans(received).flat_map(|(resource, span)| {
        let verdicts = span.events.iter().filter(is_verdict);
        verdicts.map(move |event| (resource, span, event))
    });
    let events: Vec<_> = events.collect();
    ensure!(
        events.len() == logs.len(),
        "{} events, {} log records",
        events.len(),
        logs.len()
    );
    for (resource, record) in &logs {
        let same = events.iter().filter(|(_, span, event)| {
            (&span.trace_id, &span.span_id) == (&record.trace_id, &record.span_id)
                && event.time_unix_nano.abs_diff(record.time_unix_nano) <= SLEWED_NS
        });
        let same: Vec<_> = same.collect();
        let [(of_span, span, event)] = same[..] else {
            anyhow::bail!("{} events for {record:?}", same.len());
        };
        ensure!(
            of_span == resource,
            "{record:?} is of {resource:?}, its span of {of_span:?}"
        );
        ensure!(
            event
                .attributes
                .iter()
                .all(|attribute| record.attributes.contains(attribute)),
            "{event:?} and {record:?}"
        );
        ensure!(
            record.observed_time_unix_nano >= record.time_unix_nano,
            "{record:?}"
        );
        let severity = if is_hang(&record.attributes) {
            SeverityNumber::Error
        } else {
            SeverityNumber::Warn
        };
        ensure!(record.severity_number() == severity, "{record:?}");
        let failed = span
            .status
            .as_ref()
            .is_some_and(|status| status.code() == StatusCode::Error);
        ensure!(failed || !is_hang(&record.attributes), "{span:?} is no error");
        let Some(AnyValue {
            value: Some(any_value::Value::StringValue(body)),
        }) = &record.body
        else {
            anyhow::bail!("{record:?} says nothing");
        };
        println!("{} {}: {body}", record.severity_text, hex(&record.trace_id));
        block(record, body)?;
    }
    let named = logs.iter().any(|(_, record)| {
        is_hang(&record.attributes)
            && number(&record.attributes, "ccl.watchdog.culprit") == i64::try_from(STOPPED).ok()
    });
    ensure!(named, "nobody names the rank that was stopped");
    let delivered = summary.exporters.first().map(|row| &row["logs"]["delivered"]);
    ensure!(
        delivered.and_then(serde_json::Value::as_u64) == u64::try_from(logs.len()).ok(),
        "the collector has delivered {delivered:?}"
    );
    Ok(())
}

/// What the library's report has of the operation came along, for machines and for people.
fn block(record: &LogRecord, body: &str) -> Result<()> {
    for name in [
        "ccl.rank",
        "ccl.communicator.id",
        "ccl.operation.name",
        "ccl.operation.number",
        "ccl.algorithm",
        "ccl.protocol",
        "ccl.channel.mask",
        "ccl.kernel.warps",
        "ccl.device.number",
        "ccl.message.size",
        "ccl.stream.handle",
        "ccl.watchdog.called.age",
        "ccl.watchdog.launched.age",
        "ccl.watchdog.wait.duration",
        "ccl.watchdog.cause",
    ] {
        ensure!(
            attribute(&record.attributes, name).is_some(),
            "no {name}: {record:?}"
        );
    }
    for line in [
        "Comm: 0x",
        "Kernel: ",
        "Timeout: ",
        "Channel Mask: 0x",
        "Warps per Block: ",
        "CUDA Device: ",
        "Bytes: ",
        "Stream: 0x",
        "Operation: ",
        "Enqueued: ",
        "Launched: ",
        "Started: ",
    ] {
        ensure!(
            body.lines().any(|text| text.starts_with(line)),
            "no {line}: {body}"
        );
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    hex::encode(bytes)
}

#[test]
fn a_hang_is_told_once_over_grpc_as_a_log_record_of_its_error_span() -> Result<()> {
    let _alone = alone();
    let server = GrpcServer::start(vec![]);
    let summary = run(&server.url, "grpc", &|| server.received())?;
    check(&server.received(), &summary).context("over gRPC")
}

#[test]
fn a_hang_is_told_once_over_http_as_a_log_record_of_its_error_span() -> Result<()> {
    let _alone = alone();
    let server = HttpServer::start(vec![]);
    let summary = run(&server.url, "http/protobuf", &|| server.received())?;
    check(&server.received(), &summary).context("over HTTP")
}
