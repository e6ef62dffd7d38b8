//! Finished operations to spans: the tree of `docs/src/data-model.md`.
//!
//! A span's children lie inside it: where records of different origin disagree by a little, the parent is stretched.

mod links;
mod names;
mod process;
mod rank;
mod verdict;

pub(crate) use names::operation as operation_name;
pub(crate) use rank::timing_source_of;

use std::{collections::VecDeque, sync::Arc};

use ringsight_exporters::model::{
    Attribute, Culprit, Operation, OperationRank, Resource, Span, SpanId, SpanLink, TraceId, Unnamed, Value,
};
use ringsight_records::{Algorithm, DataType, Description, Function, Protocol, ReduceOp};

use crate::{
    arrivals::{self, Finding, Source},
    clock::Clock,
    correlate::{
        RankOperation,
        communicators::{Communicator, Communicators, Watched},
        instance::Instance,
    },
    identity::{Direction, InstanceKey, Role, Scope, SpanKey, TraceKind},
    lag::{self, WaitedFor},
};

/// Spans made, by what they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanCounts {
    /// By [`Role`], as a number.
    pub by_role: [u64; Role::COUNT],
}

impl SpanCounts {
    pub(crate) fn count(&mut self, role: Role) {
        self.by_role[role as usize] += 1;
    }

    /// How many of a role.
    #[must_use]
    pub fn of(&self, role: Role) -> u64 {
        self.by_role[role as usize]
    }

    /// All of them.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.by_role.iter().sum()
    }
}

/// What the parts of an instance, one for each rank, say together.
#[derive(Clone, Debug)]
pub struct InstanceSummary {
    /// Its function, if any part knows.
    pub function: Option<Function>,
    /// The late rank.
    pub culprit: Option<Culprit>,
    /// How it is known who is late.
    pub source: Source,
    /// A rank may have been late, and nobody can say which.
    pub unnamed: Option<Unnamed>,
    /// Bus bandwidth in bytes per second, by nccl-tests' factors; `None` if the time or size is not known.
    pub bus_bandwidth: Option<f64>,
    /// Everything was seen of every watched rank.
    pub complete: bool,
    /// Until when ranks waited for a rank that watchdogs named, monotonic nanoseconds; 0: they named none.
    pub waited_until_ns: u64,
}

/// Makes spans.
#[derive(Debug)]
pub struct SpanMaker {
    scope: Scope,
    lag_threshold_ns: u64,
    fallback: Arc<Resource>,
    counts: SpanCounts,
    in_order: lag::Arrivals,
    arrivals: Vec<(u32, u64)>,
    /// Instances whose roots were sent though the parts that stand for the whole had not come.
    stood_in: VecDeque<InstanceKey>,
}

/// How many of those are remembered.
const STOOD_IN: usize = 256;

/// A time range in monotonic nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
}

impl Range {
    const EMPTY: Self = Self {
        start: u64::MAX,
        end: 0,
    };

    /// Grows to hold a moment, unless that is unknown (0).
    fn hold(&mut self, ns: u64) {
        if ns != 0 {
            self.start = self.start.min(ns);
            self.end = self.end.max(ns);
        }
    }

    fn hold_range(&mut self, other: Self) {
        self.hold(other.start);
        self.hold(other.end);
    }

    /// Start and end with unknown ones taken from `outer`, in order.
    fn of((start, end): (u64, u64), outer: Self) -> Self {
        let start = if start == 0 { outer.start } else { start };
        let end = if end == 0 { outer.end } else { end };
        Self {
            start,
            end: end.max(start),
        }
    }
}

impl SpanMaker {
    /// A maker; `lag_threshold_ns` is from which lag on a rank is named as culprit.
    #[must_use]
    pub fn new(scope: Scope, lag_threshold_ns: u64) -> Self {
        Self {
            scope,
            lag_threshold_ns,
            fallback: Arc::new(crate::resource::of_collector()),
            counts: SpanCounts::default(),
            in_order: lag::Arrivals::default(),
            arrivals: Vec::new(),
            stood_in: VecDeque::new(),
        }
    }

    /// Spans made so far.
    #[must_use]
    pub fn counts(&self) -> &SpanCounts {
        &self.counts
    }

    /// The text in ids.
    pub(crate) fn scope(&self) -> &Scope {
        &self.scope
    }

    /// The text in ids, and the counters, for spans that are made elsewhere.
    pub(crate) fn parts(&mut self) -> (&Scope, &mut SpanCounts) {
        (&self.scope, &mut self.counts)
    }

    /// Lag and bandwidth of an instance. `waited_for` is whom the watchdogs named, and until when the others waited: they saw more than
    /// arrivals.
    pub fn summarize(&mut self, instance: &Instance, waited_for: Option<WaitedFor>) -> InstanceSummary {
        let function = instance.parts.iter().find_map(|part| part.function());
        self.arrivals.clear();
        let started = instance.parts.iter().filter(|part| part.device.0 != 0);
        self.arrivals
            .extend(started.map(|part| (part.rank, part.device.0)));
        let by_arrival = arrivals::find(instance, function, &self.arrivals, self.lag_threshold_ns);
        let Finding {
            culprit,
            source,
            unnamed,
        } = match waited_for {
            Some(named)
                if by_arrival
                    .culprit
                    .as_ref()
                    .is_none_or(|late| late.rank != named.culprit) =>
            {
                Finding {
                    culprit: Some(Culprit {
                        rank: named.culprit,
                        lag_ns: named.waited_ns,
                    }),
                    source: Source::Watchdog,
                    unnamed: None,
                }
            }
            _ => by_arrival,
        };
        let waits = instance.parts.iter().filter_map(|part| {
            let arrival = part.arrived_last()?;
            Some(part.device.0.saturating_add(arrival.wait_ns))
        });
        let seen = self.arrivals.iter().map(|(_, arrival)| *arrival);
        let last = seen.chain(waits).max();
        let first = self.arrivals.iter().map(|(_, arrival)| *arrival).min();
        // What the slowest rank made the others wait is not the network's doing.
        let begin = if function.is_some_and(Function::synchronises) {
            last
        } else {
            first
        };
        let end = instance.parts.iter().map(|part| part.device.1).max().unwrap_or(0);
        let bytes = instance
            .parts
            .iter()
            .map(|part| bytes_of(part))
            .max()
            .unwrap_or(0);
        let bus_bandwidth = match (function, begin) {
            (Some(function), Some(begin)) if end > begin && bytes > 0 => {
                Some(bytes as f64 * function.bus_factor(instance.key.ranks) * 1e9 / (end - begin) as f64)
            }
            _ => None,
        };
        let complete = instance.whole && !instance.late && instance.parts.iter().all(|part| part.complete);
        InstanceSummary {
            function,
            culprit,
            source,
            unnamed,
            bus_bandwidth,
            complete,
            waited_until_ns: waited_for.map_or(0, |named| named.until_ns),
        }
    }

    /// Spans of an instance: each part with its children, and the root if the part that stands for the whole is there.
    ///
    /// That part completes once, and one collector takes in that it did: so one root is sent, however many collectors
    /// share the ranks, and whether or not one of them is let go of and begins again between two ranks' parts. Of an operation
    /// that failed that part may never come: whoever watches its process sends the root with the parts that there are.
    pub fn instance(
        &mut self,
        instance: &Instance,
        summary: &InstanceSummary,
        communicators: &Communicators,
        clock: &Clock,
        spans: &mut Vec<Span>,
    ) -> TraceId {
        let trace_id = instance.key.trace_id(&self.scope);
        let root_id = SpanKey::of(Role::Root).span_id(&trace_id);
        let communicator = communicators.get(instance.key.comm);
        // The lag of a part is against the other parts' arrivals; `summarize` left those in `self.arrivals`.
        let synchronises = self.arrivals.len() > 1 && summary.function.is_some_and(Function::synchronises);
        if synchronises {
            self.in_order
                .set(self.arrivals.iter().map(|(_, arrival)| *arrival));
        }
        let mut union = Range::EMPTY;
        for part in &instance.parts {
            let has_lag = synchronises && part.device.0 != 0;
            let lag_ns = has_lag.then(|| self.in_order.lag_of(part.device.0));
            let ids = rank::Ids {
                trace_id,
                root_id,
                scope: &self.scope,
            };
            let made = rank::Part {
                part,
                parts: &instance.parts,
                communicator,
                communicators,
                clock,
                lag_ns,
                fallback: &self.fallback,
            };
            union.hold_range(made.spans(&ids, summary.function, spans, &mut self.counts));
        }
        let root = match instance.root_part() {
            Some(part) => Some((
                part.pid,
                resource_of(part, communicator, communicators, &self.fallback),
            )),
            None => communicator.and_then(|communicator| stand_in(instance, communicator)),
        };
        if let Some((pid, resource)) = root
            && let Some(watched) = communicators.process(pid)
            && self.is_first_root(instance)
        {
            self.counts.count(Role::Root);
            spans.push(Span {
                resource,
                trace_id,
                span_id: root_id,
                parent_span_id: None,
                name: names::operation(summary.function, instance.key.kind),
                start_unix_ns: clock.unix_ns(union.start),
                end_unix_ns: clock.unix_ns(union.end),
                attributes: root_attributes(instance, summary, communicator, watched, clock),
                events: Vec::new(),
                links: Vec::new(),
                error: None,
            });
        }
        trace_id
    }

    /// Whether the root of an instance was not sent before its part had come.
    fn is_first_root(&mut self, instance: &Instance) -> bool {
        if self.stood_in.contains(&instance.key) {
            return false;
        }
        if instance.root_part().is_none() {
            if self.stood_in.len() >= STOOD_IN {
                self.stood_in.pop_front();
            }
            self.stood_in.push_back(instance.key);
        }
        true
    }

    /// The row that an instance is in tables and pages.
    #[must_use]
    pub fn operation(
        &self,
        instance: &Instance,
        summary: &InstanceSummary,
        trace_id: TraceId,
        communicators: &Communicators,
        clock: &Clock,
    ) -> Operation {
        let communicator = communicators.get(instance.key.comm);
        let description = instance.parts.iter().find_map(|part| part.description.as_deref());
        let unix = |ns: u64| if ns == 0 { 0 } else { clock.unix_ns(ns) };
        let by_rank = instance.parts.iter().map(|part| OperationRank {
            rank: part.rank,
            host: communicators
                .process(part.pid)
                .map_or_else(|| "".into(), |watched| watched.host.clone()),
            pid: part.pid,
            api_start_ns: unix(part.api_times().0),
            device_start_ns: unix(part.device.0),
            device_end_ns: unix(part.device.1),
            by_device: part.is_by_device(),
        });
        Operation {
            trace_id,
            name: names::operation(summary.function, instance.key.kind),
            communicator: instance.key.comm,
            communicator_name: communicator
                .map_or_else(|| "".into(), |communicator| communicator.name.clone()),
            ranks: instance.key.ranks,
            sequence: instance.key.seq,
            replay: instance.key.replay,
            bytes: instance
                .parts
                .iter()
                .map(|part| bytes_of(part))
                .max()
                .unwrap_or(0),
            data_type: description
                .and_then(|d| DataType::from_code(d.data_type))
                .map_or("", DataType::name),
            algorithm: description
                .and_then(|d| Algorithm::from_code(d.algorithm))
                .map_or("", Algorithm::name),
            by_rank: by_rank.collect(),
            culprit: summary.culprit.clone(),
            unnamed: summary.unnamed,
            waited_until_ns: unix(summary.waited_until_ns),
            complete: summary.complete,
        }
    }
}

/// Identity of a group's trace.
fn group_key(process: u64, number: u32) -> InstanceKey {
    InstanceKey {
        comm: process,
        seq: u64::from(number),
        ranks: 0,
        replay: 0,
        kind: TraceKind::Group,
        pair: None,
    }
}

pub(crate) fn link(trace_id: TraceId, span_id: SpanId, kind: &'static str) -> SpanLink {
    SpanLink {
        trace_id,
        span_id,
        attributes: vec![("ccl.link.type", Value::Static(kind))],
    }
}

/// Device and number of the port that a process's queue pair goes over, as far as they are known.
pub(crate) fn port_attributes(
    communicators: &Communicators,
    pid: u32,
    port: Option<u8>,
    queue_pair: u32,
) -> impl Iterator<Item = Attribute> {
    let device = communicators.network_device(pid, port, queue_pair);
    let said = communicators.said_port(pid, port);
    let device = device.map(|name| ("rdma.device.name", Value::Text(Arc::clone(name))));
    let number = said.map(|said| ("rdma.port.number", Value::Int(said.number.into())));
    device.into_iter().chain(number)
}

/// A number that OTLP can carry; what does not fit is at its limit.
fn int(value: u64) -> Value {
    Value::Int(i64::try_from(value).unwrap_or(i64::MAX))
}

/// A duration as OpenTelemetry gives it.
fn seconds(ns: u64) -> Value {
    Value::Double(ns as f64 / 1e9)
}

fn bytes_of(part: &RankOperation) -> u64 {
    part.description
        .as_ref()
        .map_or(part.bytes, |description| description.bytes)
}

fn resource_of(
    part: &RankOperation,
    communicator: Option<&Communicator>,
    communicators: &Communicators,
    fallback: &Arc<Resource>,
) -> Arc<Resource> {
    communicator
        .and_then(|communicator| communicator.member(part.pid, part.rank))
        .map(|member| &member.resource)
        .or_else(|| communicators.process(part.pid).map(|watched| &watched.resource))
        .unwrap_or(fallback)
        .clone()
}

/// Whose root that of a failed operation is, of which the part that stands for the whole has not come: its process, if that is
/// watched here, and its resource.
fn stand_in(instance: &Instance, communicator: &Communicator) -> Option<(u32, Arc<Resource>)> {
    let failed = |part: &RankOperation| verdict::error(part).is_some();
    let (rank, _) = instance.key.root();
    let member = communicator.of_rank(rank)?;
    instance
        .parts
        .iter()
        .any(|part| failed(part))
        .then(|| (member.pid, Arc::clone(&member.resource)))
}

fn root_attributes(
    instance: &Instance,
    summary: &InstanceSummary,
    communicator: Option<&Communicator>,
    watched: &Watched,
    clock: &Clock,
) -> Vec<Attribute> {
    let key = &instance.key;
    let description = instance.parts.iter().find_map(|part| part.description.as_deref());
    let mut attributes = Vec::with_capacity(24);
    attributes.push(("ccl.system.name", Value::Static("ringsight")));
    attributes.push(("ccl.system.version", Value::Text(watched.version.clone())));
    attributes.push((
        "ccl.operation.name",
        Value::Static(names::operation(summary.function, key.kind)),
    ));
    attributes.push(("ccl.operation.sequence", int(key.seq)));
    attributes.push((
        "ccl.sequence.source",
        Value::Static(if key.replay == 0 { "library" } else { "replay" }),
    ));
    if let Some(communicator) = communicator {
        attributes.push(("ccl.communicator.id", Value::Text(communicator.id.clone())));
        if !communicator.name.is_empty() {
            attributes.push(("ccl.communicator.name", Value::Text(communicator.name.clone())));
        }
    }
    attributes.push(("ccl.communicator.size", Value::Int(i64::from(key.ranks))));
    attributes.push(("ccl.ranks.observed", int(instance.parts.len() as u64)));
    attributes.push((
        "ccl.message.size",
        int(instance
            .parts
            .iter()
            .map(|part| bytes_of(part))
            .max()
            .unwrap_or(0)),
    ));
    if let Some(description) = description {
        shape_attributes(description, &mut attributes);
    }
    if let Some((source, destination)) = key.pair {
        attributes.push(("ccl.source.rank", Value::Int(i64::from(source))));
        attributes.push(("ccl.destination.rank", Value::Int(i64::from(destination))));
    }
    attributes.push(("ccl.graph.captured", Value::Bool(key.replay != 0)));
    if key.replay != 0 {
        attributes.push(("ccl.graph.replay", Value::Int(i64::from(key.replay))));
    }
    attributes.push(("ccl.timing.source", Value::Static("device")));
    attributes.push(("ccl.clock.uncertainty", seconds(clock.uncertainty_ns())));
    if let Some(culprit) = &summary.culprit {
        attributes.push(("ccl.straggler.rank", Value::Int(i64::from(culprit.rank))));
        attributes.push(("ccl.straggler.lag", seconds(culprit.lag_ns)));
        attributes.push(("ccl.straggler.source", Value::Static(summary.source.name())));
        let uncertainty = summary.source.uncertainty_ns().map(seconds);
        attributes.extend(uncertainty.map(|value| ("ccl.straggler.uncertainty", value)));
    }
    if let Some(bandwidth) = summary.bus_bandwidth {
        attributes.push(("ccl.operation.bus_bandwidth", Value::Double(bandwidth)));
    }
    attributes.push(("ccl.complete", Value::Bool(summary.complete)));
    attributes
}

fn shape_attributes(description: &Description, attributes: &mut Vec<Attribute>) {
    let data_type = DataType::from_code(description.data_type);
    attributes.extend(data_type.map(|data_type| ("ccl.data_type", Value::Static(data_type.name()))));
    let reduction = ReduceOp::from_code(description.reduce_op).filter(|op| *op != ReduceOp::None);
    attributes.extend(reduction.map(|op| ("ccl.reduction", Value::Static(op.name()))));
    if description.root >= 0 {
        attributes.push(("ccl.root_rank", Value::Int(i64::from(description.root))));
    }
    let algorithm = Algorithm::from_code(description.algorithm);
    attributes.extend(algorithm.map(|algorithm| ("ccl.algorithm", Value::Static(algorithm.name()))));
    let protocol = Protocol::from_code(description.protocol);
    attributes.extend(protocol.map(|protocol| ("ccl.protocol", Value::Static(protocol.name()))));
    attributes.push(("ccl.channel.count", Value::Int(i64::from(description.channels))));
}

/// The send that a recv's data come from.
fn send_of(key: &InstanceKey, trace_id: &TraceId) -> Option<SpanId> {
    key.pair
        .map(|(source, _)| SpanKey::rank(Role::Rank, source, Direction::Send).span_id(trace_id))
}
