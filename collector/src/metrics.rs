//! Metrics: cumulative since the collector began, per rank.

mod histogram;

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{Attribute, ExportStats, Metric, MetricData, Resource, Value};
use ringsight_records::{Cause, Function, Kind};
use rustc_hash::FxHashMap;

pub use histogram::Histogram;

use crate::{
    correlate::{
        Counts, Given, RankOperation, Verdict,
        communicators::Communicators,
        instance::GivenUp,
        proxy::{STEP_STATES, Way, path_name},
    },
    limits::{LeftOut, Limit},
    spans::{SpanCounts, port_attributes},
};

/// What one function did on one rank.
#[derive(Clone, Debug, Default)]
struct OfFunction {
    duration: Histogram,
    bandwidth: Histogram,
    size: Histogram,
    lag: Histogram,
}

/// What one rank did.
#[derive(Clone, Debug)]
struct OfRank {
    resource: Arc<Resource>,
    /// Its process; 0 until it has done something.
    pid: u32,
    functions: Vec<(Option<Function>, OfFunction)>,
    /// Verdicts that it gave, by cause and whether they were hangs.
    verdicts: BTreeMap<(Cause, bool), u64>,
    states: [Histogram; STEP_STATES.len()],
    /// Bytes between nodes, by the port's number (`None`: sockets) and whether they were sent.
    network: BTreeMap<(Way, bool), u64>,
}

/// Readings that are not accumulated here.
#[derive(Clone, Debug, Default)]
pub struct Readings {
    /// Events in and lost.
    pub counts: Counts,
    /// Given up on one rank.
    pub given: Given,
    /// Given up across ranks.
    pub given_up: GivenUp,
    /// Left out at limits.
    pub left_out: LeftOut,
    /// Communicators' ranks that a process said were its own though another one had said so before, and operations on them.
    pub claimed_twice: u64,
    /// Communicators that a process said were its own though another owner's had said so before.
    pub foreign: u64,
    /// Spans made.
    pub spans: SpanCounts,
    /// Operations in flight.
    pub in_flight: usize,
    /// CPU time of the collector, seconds.
    pub cpu_seconds: f64,
    /// Exporters by target.
    pub exporters: Vec<(String, ExportStats)>,
}

impl Readings {
    /// What could not be used or waited for, by reason.
    #[must_use]
    pub fn given_up_by_reason(&self) -> [(&'static str, u64); 12] {
        [
            ("unknown_record", self.counts.unknown),
            ("lost_description", self.counts.lost_other),
            ("late_record", self.given.late_records),
            ("evicted_operation", self.left_out.of(Limit::Operations)),
            ("evicted_group", self.left_out.of(Limit::Groups)),
            ("begun_before_attach", self.given.begun_before_attach),
            ("unidentified_operation", self.given_up.unidentified),
            ("duplicate_operation", self.given_up.duplicates),
            ("timed_out_instance", self.given_up.timed_out),
            ("evicted_instance", self.left_out.of(Limit::Instances)),
            ("rank_claimed_twice", self.claimed_twice),
            (
                "foreign_communicator",
                self.foreign.saturating_add(self.given_up.foreign),
            ),
        ]
    }
}

/// Accumulates.
#[derive(Debug)]
pub struct Metrics {
    start_unix_ns: u64,
    resource: Arc<Resource>,
    /// By the address of the resource, which `OfRank` keeps alive.
    ranks: FxHashMap<usize, OfRank>,
    /// How many there are before those of processes long gone are looked for.
    next_look: usize,
    left_out: LeftOut,
}

/// Ranks that metrics are kept of; those of processes long gone make room.
const RANKS: usize = 4096;

impl Metrics {
    /// Nothing yet; `resource` is the collector's own.
    #[must_use]
    pub fn new(start_unix_ns: u64, resource: Arc<Resource>) -> Self {
        Self {
            start_unix_ns,
            resource,
            ranks: FxHashMap::default(),
            next_look: RANKS / 4,
            left_out: LeftOut::default(),
        }
    }

    /// What was left out so far.
    pub(crate) fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// What is known of a rank; `None` if there are too many.
    fn rank(&mut self, resource: &Arc<Resource>) -> Option<&mut OfRank> {
        let key = Arc::as_ptr(resource).addr();
        if self.ranks.len() >= self.next_look && !self.ranks.contains_key(&key) {
            // Nobody else holds the resource of a process that was forgotten.
            self.ranks.retain(|_, rank| Arc::strong_count(&rank.resource) > 1);
            // Each look is followed by as many new ranks as it looked at.
            self.next_look = (2 * self.ranks.len()).max(RANKS / 4);
        }
        if self.ranks.len() >= RANKS && !self.ranks.contains_key(&key) {
            self.left_out.count(Limit::Resources);
            return None;
        }
        Some(self.ranks.entry(key).or_insert_with(|| OfRank {
            resource: resource.clone(),
            pid: 0,
            functions: Vec::new(),
            verdicts: BTreeMap::new(),
            states: Default::default(),
            network: BTreeMap::new(),
        }))
    }

    /// A rank has given a verdict.
    pub fn judged(&mut self, verdict: &Verdict, resource: &Arc<Resource>) {
        if let Some(rank) = self.rank(resource) {
            *rank.verdicts.entry((verdict.cause, verdict.hang)).or_default() += 1;
        }
    }

    /// One rank's part of an operation is over.
    pub fn observe(
        &mut self,
        part: &RankOperation,
        resource: &Arc<Resource>,
        bus_bandwidth: Option<f64>,
        lag_ns: Option<i64>,
    ) {
        let Some(rank) = self.rank(resource) else {
            return;
        };
        rank.pid = part.pid;
        let function = part.function();
        let at = rank
            .functions
            .iter()
            .position(|(known, _)| *known == function)
            .unwrap_or_else(|| {
                rank.functions.push((function, OfFunction::default()));
                rank.functions.len() - 1
            });
        let of = &mut rank.functions[at].1;
        if part.device.0 != 0 && part.device.1 >= part.device.0 {
            of.duration.add((part.device.1 - part.device.0) as f64 / 1e9);
        }
        of.size.add(
            part.description
                .as_ref()
                .map_or(part.bytes, |description| description.bytes) as f64,
        );
        if let Some(bandwidth) = bus_bandwidth {
            of.bandwidth.add(bandwidth);
        }
        if let Some(lag_ns) = lag_ns {
            // A histogram counts what is positive; who was early is not late.
            of.lag.add(lag_ns.max(0) as f64 / 1e9);
        }
        for proxy in &part.proxies {
            for (way, bytes) in &proxy.by_way {
                let sum = rank.network.entry((*way, proxy.send)).or_default();
                *sum = sum.saturating_add(*bytes);
            }
            for (histogram, sum) in rank.states.iter_mut().zip(&proxy.sums) {
                if sum.count > 0 {
                    histogram.add(sum.total_ns as f64 / 1e9);
                }
            }
        }
    }

    /// Everything as of `unix_ns`.
    #[must_use]
    pub fn read(&self, unix_ns: u64, readings: &Readings, communicators: &Communicators) -> Vec<Metric> {
        let mut made = Made {
            start_unix_ns: self.start_unix_ns,
            unix_ns,
            metrics: Vec::new(),
        };
        for rank in self.ranks.values() {
            for (function, of) in &rank.functions {
                let attributes = vec![(
                    "ccl.operation.name",
                    Value::Static(function.map_or("unknown", Function::name)),
                )];
                let mut histogram = |name, description, unit, histogram: &Histogram| {
                    if histogram.count() > 0 {
                        made.push(
                            &rank.resource,
                            (name, description, unit),
                            attributes.clone(),
                            histogram.data(),
                        );
                    }
                };
                histogram(
                    "ccl.operation.duration",
                    "Time on the device, first channel to last",
                    "s",
                    &of.duration,
                );
                histogram(
                    "ccl.operation.bus_bandwidth",
                    "Bus bandwidth by the factors of nccl-tests, from the last rank's arrival on",
                    "By/s",
                    &of.bandwidth,
                );
                histogram("ccl.operation.size", "Message size", "By", &of.size);
                histogram(
                    "ccl.operation.straggler.lag",
                    "Arrival of the rank after the median of the others, 0 if before",
                    "s",
                    &of.lag,
                );
            }
            for (&(cause, hang), &count) in &rank.verdicts {
                made.push(
                    &rank.resource,
                    (
                        "ccl.watchdog.verdicts",
                        "Verdicts that the library's watchdog gave",
                        "{verdict}",
                    ),
                    vec![
                        ("ccl.watchdog.cause", Value::Static(cause.name())),
                        ("ccl.watchdog.hang", Value::Bool(hang)),
                    ],
                    MetricData::Counter(count),
                );
            }
            for (((port, backup), sent), bytes) in &rank.network {
                let (transport, direction) = (
                    if port.is_some() { "rdma" } else { "socket" },
                    if *sent { "transmit" } else { "receive" },
                );
                let mut attributes = vec![
                    ("ccl.network.transport", Value::Static(transport)),
                    ("network.io.direction", Value::Static(direction)),
                ];
                if let Some(port) = port {
                    attributes.push(("ccl.network.port", Value::Int(i64::from(*port))));
                    attributes.push(("ccl.network.path", Value::Static(path_name(*backup))));
                    attributes.extend(port_attributes(communicators, rank.pid, Some(*port), 0));
                }
                made.push(
                    &rank.resource,
                    ("ccl.network.io", "Bytes of steps between nodes", "By"),
                    attributes,
                    MetricData::Counter(*bytes),
                );
            }
            for (state, histogram) in STEP_STATES.iter().zip(&rank.states) {
                if histogram.count() > 0 {
                    made.push(
                        &rank.resource,
                        (
                            "ccl.proxy.state.duration",
                            "Time of a proxy operation's steps in a state",
                            "s",
                        ),
                        vec![(
                            "ccl.proxy.state",
                            Value::Static(state.name().unwrap_or("unknown")),
                        )],
                        histogram.data(),
                    );
                }
            }
        }
        for (watched, count) in communicators.count_by_process() {
            let text = ("ccl.communicator.count", "Live communicators", "{communicator}");
            made.push(
                &watched.resource,
                text,
                Vec::new(),
                MetricData::UpDown(i64::try_from(count).unwrap_or(i64::MAX)),
            );
        }
        self.read_own(readings, &mut made);
        made.metrics
    }

    fn read_own(&self, readings: &Readings, made: &mut Made) {
        let mut own = |text, attributes, data| made.push(&self.resource, text, attributes, data);
        own(
            (
                "ccl.operation.active",
                "Operations in flight on the watched ranks",
                "{operation}",
            ),
            Vec::new(),
            MetricData::UpDown(i64::try_from(readings.in_flight).unwrap_or(i64::MAX)),
        );
        let hits = (
            "ccl.probe.hits",
            "Probe function calls that were recorded",
            "{hit}",
        );
        own(hits, Vec::new(), MetricData::Counter(readings.counts.probe_hits));
        for &kind in Kind::ALL {
            let attribute = || vec![("ccl.record.kind", Value::Static(kind.name()))];
            let received = readings.counts.received[kind as usize];
            let lost = readings.counts.lost[kind as usize];
            if received > 0 {
                let text = ("ccl.probe.records", "Records that came in", "{record}");
                own(text, attribute(), MetricData::Counter(received));
            }
            if received > 0 || lost > 0 {
                let text = ("ccl.probe.lost", "Records that a carrier lost", "{record}");
                own(text, attribute(), MetricData::Counter(lost));
            }
            let missed = readings.counts.missed[kind as usize];
            if missed > 0 {
                let text = (
                    "ccl.probe.missed",
                    "Events that happened while no collector was attached, after an earlier one",
                    "{event}",
                );
                own(text, attribute(), MetricData::Counter(missed));
            }
        }
        if readings.counts.overwritten > 0 {
            let text = (
                "ccl.device.events.overwritten",
                "Starts and ends that devices overwrote before they were read",
                "{event}",
            );
            own(text, Vec::new(), MetricData::Counter(readings.counts.overwritten));
        }
        let dropped = readings.given_up_by_reason();
        for (reason, count) in dropped.into_iter().filter(|(_, count)| *count > 0) {
            let text = (
                "ccl.probe.given_up",
                "What the collector could not use or wait for, by reason",
                "{item}",
            );
            own(
                text,
                vec![("reason", Value::Static(reason))],
                MetricData::Counter(count),
            );
        }
        for (limit, count) in readings.left_out.iter() {
            let text = (
                "ccl.collector.left_out",
                "What was left out because a process had, or wrote, more than a limit allows",
                "{item}",
            );
            own(
                text,
                vec![("limit", Value::Static(limit.name()))],
                MetricData::Counter(count),
            );
        }
        let text = ("ccl.probe.spans", "Spans made", "{span}");
        own(text, Vec::new(), MetricData::Counter(readings.spans.total()));
        own(
            ("ccl.probe.cpu.time", "CPU time of the collector", "s"),
            Vec::new(),
            MetricData::Total(readings.cpu_seconds),
        );
        for (target, stats) in &readings.exporters {
            let target: Arc<str> = target.as_str().into();
            for (signal, tally) in stats.by_signal() {
                let attributes = || {
                    vec![
                        ("ccl.export.target", Value::Text(target.clone())),
                        ("ccl.export.signal", Value::Static(signal.name())),
                    ]
                };
                let text = (
                    "ccl.probe.export.delivered",
                    "Spans, metric points and log records delivered",
                    "{item}",
                );
                own(text, attributes(), MetricData::Counter(tally.delivered));
                for (reason, count) in &tally.dropped {
                    let text = (
                        "ccl.probe.export.dropped",
                        "Spans, metric points and log records dropped, by reason",
                        "{item}",
                    );
                    let mut attributes = attributes();
                    attributes.push(("reason", Value::Static(reason)));
                    own(text, attributes, MetricData::Counter(*count));
                }
            }
            let text = (
                "ccl.probe.export.retries",
                "Delivery attempts that were repeated",
                "{attempt}",
            );
            let attributes = vec![("ccl.export.target", Value::Text(target))];
            own(text, attributes, MetricData::Counter(stats.retries));
        }
    }
}

struct Made {
    start_unix_ns: u64,
    unix_ns: u64,
    metrics: Vec<Metric>,
}

impl Made {
    fn push(
        &mut self,
        resource: &Arc<Resource>,
        (name, description, unit): (&'static str, &'static str, &'static str),
        attributes: Vec<Attribute>,
        data: MetricData,
    ) {
        self.metrics.push(Metric {
            resource: resource.clone(),
            name,
            description,
            unit,
            attributes,
            start_unix_ns: self.start_unix_ns,
            unix_ns: self.unix_ns,
            data,
        });
    }
}
