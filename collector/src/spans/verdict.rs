//! What the library's watchdog says of an operation: events and the error of its span, and, at once, log records.

use std::{fmt::Write as _, sync::Arc};

use ringsight_exporters::model::{Attribute, LogRecord, Severity, Span, SpanEvent, Value};
use ringsight_records::{Algorithm, DataType, Description, Protocol, ReduceOp};

use super::{
    SpanMaker, bytes_of, int,
    links::{awaited_link, instead_link},
    names, resource_of, seconds, shape_attributes,
};
use crate::{
    clock::Clock,
    correlate::{
        RankOperation, Verdict, Whereabouts,
        communicators::{Communicator, Communicators},
    },
    identity::{Direction, Role, SpanKey},
};

/// Name of the event and of the log record.
const NAME: &str = "ccl.watchdog.verdict";

/// What is wrong with an operation that was let go of.
pub(super) const UNFINISHED: &str = "the operation had not finished when its observation ended";

fn attributes(verdict: &Verdict) -> Vec<Attribute> {
    let mut attributes = vec![
        ("ccl.watchdog.cause", Value::Static(verdict.cause.name())),
        ("ccl.watchdog.culprit", Value::Int(i64::from(verdict.culprit))),
        ("ccl.watchdog.hang", Value::Bool(verdict.hang)),
    ];
    if let Some(nic) = &verdict.nic {
        if !nic.device().is_empty() {
            attributes.push(("rdma.device.name", Value::Text(nic.device().into())));
        }
        attributes.push(("rdma.port.number", Value::Int(i64::from(nic.port))));
        attributes.push(("rdma.qp.number", Value::Int(i64::from(nic.queue_pair))));
    }
    attributes
}

/// What the watchdog said of an operation, as events of its span.
pub(super) fn events(part: &RankOperation, clock: &Clock) -> Vec<SpanEvent> {
    let event = |verdict: &Verdict| SpanEvent {
        unix_ns: clock.unix_ns(verdict.time_ns),
        name: NAME,
        attributes: attributes(verdict),
    };
    part.verdicts.iter().map(event).collect()
}

fn said(Verdict { cause, culprit, .. }: &Verdict) -> Arc<str> {
    format!("{cause}: rank {culprit}").into()
}

/// Why an operation failed, if it did: the last hang, or that it was aborted, or did not end.
pub(super) fn error(part: &RankOperation) -> Option<Arc<str>> {
    let hang = part.verdicts.iter().rev().find(|verdict| verdict.hang);
    match (hang, part.aborted) {
        (Some(hang), _) => Some(said(hang)),
        (None, true) => Some("the operation was aborted".into()),
        (None, false) => (part.cut_ns != 0).then(|| UNFINISHED.into()),
    }
}

/// How long before the verdict the operation came somewhere, nanoseconds; `None` where that is not known, or came later.
fn age(verdict: &Verdict, ns: u64) -> Option<u64> {
    (ns != 0).then(|| verdict.time_ns.checked_sub(ns)).flatten()
}

/// When the operation was called, and handed to the device: as records say, else the description.
fn called_and_launched(part: &RankOperation) -> (u64, u64) {
    let known = |times: &[u64]| times.iter().copied().find(|ns| *ns != 0).unwrap_or(0);
    let described = part.description.as_deref();
    let (api_ns, launch_ns) = described.map_or((0, 0), |of| (of.api_start_ns, of.launch_start_ns));
    (
        known(&[part.api.0, api_ns]),
        known(&[part.launched_ns, part.launch.0, launch_ns]),
    )
}

/// What the library's report has of the operation itself, as attributes: there is no span yet that says so.
fn block_attributes(part: &RankOperation, verdict: &Verdict, device: Option<i32>, to: &mut Vec<Attribute>) {
    to.push(("ccl.operation.number", Value::Int(i64::from(part.op))));
    to.extend(device.map(|device| ("ccl.device.number", Value::Int(i64::from(device)))));
    let (called, launched) = called_and_launched(part);
    to.extend(age(verdict, called).map(|ns| ("ccl.watchdog.called.age", seconds(ns))));
    to.extend(age(verdict, launched).map(|ns| ("ccl.watchdog.launched.age", seconds(ns))));
    let Some(description) = part.description.as_deref() else {
        return;
    };
    to.push(("ccl.message.count", int(description.count)));
    shape_attributes(description, to);
    let hex = |value: u64| Value::Text(format!("{value:#x}").into());
    to.push(("ccl.channel.mask", hex(description.channel_mask)));
    to.push(("ccl.kernel.warps", Value::Int(i64::from(description.warps))));
    to.push(("ccl.stream.handle", hex(description.stream)));
}

/// The same as lines for people, in the order and with the names of the library's own report, as far as records say it.
fn block(
    part: &RankOperation,
    verdict: &Verdict,
    communicator: Option<&Communicator>,
    device: Option<i32>,
) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = write!(text, "\n{name}: {value}");
    };
    let (name, ranks) = communicator.map_or((String::new(), String::new()), |of| {
        let name = if of.name.is_empty() {
            String::new()
        } else {
            format!(" ({})", of.name)
        };
        (name, format!("/{}", of.ranks))
    });
    line(
        "Comm",
        format!("{:#x}{name}, Rank: {}{ranks}", part.comm, part.rank),
    );
    if let Some(description) = part.description.as_deref() {
        line("Kernel", kernel(part, description));
    }
    if let Some(ns) = age(verdict, part.begun_ns().unwrap_or(0)) {
        line("Timeout", format!("{} ms", ns / 1_000_000));
    }
    if let Some(description) = part.description.as_deref() {
        line("Channel Mask", format!("{:#x}", description.channel_mask));
        line("Warps per Block", description.warps.to_string());
    }
    if let Some(device) = device {
        line("CUDA Device", device.to_string());
    }
    line("Bytes", bytes_of(part).to_string());
    if let Some(description) = part.description.as_deref() {
        line("Stream", format!("{:#x}", description.stream));
    }
    line("Operation", part.op.to_string());
    let (called, launched) = called_and_launched(part);
    let times = [
        ("Enqueued", called),
        ("Launched", launched),
        ("Started", part.begun_ns().unwrap_or(0)),
    ];
    for (name, ns) in times {
        if let Some(ns) = age(verdict, ns) {
            line(name, format!("{} ms ago", ns / 1_000_000));
        }
    }
    text
}

/// As in `all_reduce(count 1000, float32, sum), ring, simple, 2 channels`.
fn kernel(part: &RankOperation, description: &Description) -> String {
    let mut text = format!("{}(count {}", names::function(part.function()), description.count);
    if let Some(data_type) = DataType::from_code(description.data_type) {
        text += &format!(", {}", data_type.name());
    }
    if let Some(reduction) =
        ReduceOp::from_code(description.reduce_op).filter(|reduction| *reduction != ReduceOp::None)
    {
        text += &format!(", {}", reduction.name());
    }
    if description.root >= 0 {
        text += &format!(", root {}", description.root);
    }
    text += ")";
    if let Some(algorithm) = Algorithm::from_code(description.algorithm) {
        text += &format!(", {}", algorithm.name());
    }
    if let Some(protocol) = Protocol::from_code(description.protocol) {
        text += &format!(", {}", protocol.name());
    }
    text + &format!(", {} channels", description.channels)
}

impl SpanMaker {
    /// The watchdog's last verdict on an operation, as it is given: the operation's span comes when it is over, which may be
    /// never. The record is of that span; of a hang there is a span at once, too, below that one. `instead` is what the culprit is in.
    ///
    /// Nothing if there is no verdict.
    #[must_use]
    pub fn verdict(
        &mut self,
        part: &RankOperation,
        instead: Option<Whereabouts>,
        communicators: &Communicators,
        clock: &Clock,
    ) -> (Option<LogRecord>, Option<Span>) {
        let Some(verdict) = part.verdicts.last() else {
            return (None, None);
        };
        let log = self.log(part, verdict, communicators, clock);
        let hang = log.span.filter(|_| verdict.hang).map(|(trace_id, rank_id)| {
            self.counts.count(Role::Hang);
            let key = SpanKey {
                // Each verdict on the part has its own time.
                index: verdict.time_ns as u32,
                ..SpanKey::rank(Role::Hang, part.rank, part.direction())
            };
            let link = (verdict.culprit != part.rank).then(|| match instead {
                Some(instead) => instead_link(&instead, &self.scope),
                None => awaited_link(trace_id, verdict.culprit, part.direction()),
            });
            Span {
                resource: Arc::clone(&log.resource),
                trace_id,
                span_id: key.span_id(&trace_id),
                parent_span_id: Some(rank_id),
                name: "hang",
                start_unix_ns: clock.unix_ns(part.begun_ns().unwrap_or(verdict.time_ns).min(verdict.time_ns)),
                end_unix_ns: log.unix_ns,
                attributes: log.attributes.clone(),
                events: Vec::new(),
                links: link.into_iter().collect(),
                error: Some(said(verdict)),
            }
        });
        (Some(log), hang)
    }

    fn log(
        &self,
        part: &RankOperation,
        verdict: &Verdict,
        communicators: &Communicators,
        clock: &Clock,
    ) -> LogRecord {
        let communicator = communicators.get(part.comm);
        let name = names::function(part.function());
        let waited_ns = part.begun_ns().map(|begun| verdict.time_ns.saturating_sub(begun));

        let over = verdict.nic.map_or_else(String::new, |nic| {
            let (device, port) = (nic.device(), nic.port);
            format!(" (over {device}:{port}, queue pair {})", nic.queue_pair)
        });
        let mut body = format!(
            "{} ({}): {}{over}; rank {} is in {name} ",
            verdict.cause,
            if verdict.hang { "hang" } else { "late" },
            verdict.cause.of_rank(verdict.culprit),
            part.rank
        );
        body += &match part.replay {
            0 => part.seq.to_string(),
            replay => format!(
                "{} of graph {}, replay {replay},",
                part.seq as u32,
                part.seq >> 32
            ),
        };

        let mut attributes = attributes(verdict);
        attributes.extend(waited_ns.map(|ns| ("ccl.watchdog.wait.duration", seconds(ns))));
        attributes.push(("ccl.operation.name", Value::Static(name)));
        attributes.push(("ccl.operation.sequence", int(part.seq)));
        attributes.push(("ccl.message.size", int(bytes_of(part))));
        if part.replay != 0 {
            attributes.push(("ccl.graph.replay", Value::Int(i64::from(part.replay))));
        }
        attributes.push(("ccl.rank", Value::Int(i64::from(part.rank))));
        if part.direction() != Direction::None {
            attributes.push(("ccl.peer.rank", Value::Int(i64::from(part.peer))));
        }
        if let Some(communicator) = communicator {
            attributes.push(("ccl.communicator.id", Value::Text(Arc::clone(&communicator.id))));
            attributes.push(("ccl.communicator.size", Value::Int(i64::from(communicator.ranks))));
            body += &format!(" of communicator {}", communicator.id);
            if !communicator.name.is_empty() {
                let name = Arc::clone(&communicator.name);
                attributes.push(("ccl.communicator.name", Value::Text(name)));
                body += &format!(" ({})", communicator.name);
            }
        }
        if let Some(ns) = waited_ns {
            body += &format!(" for {:.1} s", ns as f64 / 1e9);
        }
        let member = communicator.and_then(|communicator| communicator.member(part.pid, part.rank));
        let device = member.map(|member| member.device);
        block_attributes(part, verdict, device, &mut attributes);
        body += &block(part, verdict, communicator, device);
        LogRecord {
            resource: resource_of(part, communicator, communicators, &self.fallback),
            unix_ns: clock.unix_ns(verdict.time_ns),
            observed_unix_ns: clock.observed_unix_ns(verdict.time_ns),
            severity: if verdict.hang {
                Severity::Error
            } else {
                Severity::Warn
            },
            event_name: NAME,
            body: body.into(),
            attributes,
            span: part.instance().map(|key| {
                let trace_id = key.trace_id(&self.scope);
                let span = SpanKey::rank(Role::Rank, part.rank, part.direction());
                (trace_id, span.span_id(&trace_id))
            }),
        }
    }
}
