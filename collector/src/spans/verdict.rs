//! What the library's watchdog says of an operation: events and the error of its span, and, at once, log records.

use std::sync::Arc;

use ringsight_exporters::model::{Attribute, LogRecord, Severity, SpanEvent, Value};

use super::{SpanMaker, bytes_of, int, names, resource_of, seconds};
use crate::{
    clock::Clock,
    correlate::{RankOperation, Verdict, communicators::Communicators},
    identity::{Direction, Role, SpanKey},
};

/// Name of the event and of the log record.
const NAME: &str = "ccl.watchdog.verdict";

fn attributes(verdict: &Verdict) -> Vec<Attribute> {
    vec![
        ("ccl.watchdog.cause", Value::Static(verdict.cause.name())),
        ("ccl.watchdog.culprit", Value::Int(i64::from(verdict.culprit))),
        ("ccl.watchdog.hang", Value::Bool(verdict.hang)),
    ]
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

/// Why an operation failed, if it did: the last hang, or that it was aborted.
pub(super) fn error(part: &RankOperation) -> Option<Arc<str>> {
    let hang = part.verdicts.iter().rev().find(|verdict| verdict.hang);
    match (hang, part.aborted) {
        (Some(Verdict { cause, culprit, .. }), _) => Some(format!("{cause}: rank {culprit}").into()),
        (None, true) => Some("the operation was aborted".into()),
        (None, false) => None,
    }
}

impl SpanMaker {
    /// The watchdog's last verdict on an operation, as it is given: the operation's span comes when it is over, which may be
    /// never. The record is of that span.
    ///
    /// `None` if there is no verdict.
    #[must_use]
    pub fn verdict(
        &self,
        part: &RankOperation,
        communicators: &Communicators,
        clock: &Clock,
    ) -> Option<LogRecord> {
        let verdict = part.verdicts.last()?;
        let communicator = communicators.get(part.comm);
        let name = names::function(part.function());
        let waited_ns = part.begun_ns().map(|begun| verdict.time_ns.saturating_sub(begun));

        let mut body = format!(
            "{} ({}): {}; rank {} is in {name} ",
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
        Some(LogRecord {
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
        })
    }
}
