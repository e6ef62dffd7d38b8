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
    limits::{LeftOut, Limit, Limits},
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
    /// Its process.
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
    /// Left out of what processes showed before their records came.
    pub unseen: ringsight_probes::LeftOut,
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

impl OfRank {
    /// How many rows of [`Limit::MetricRows`] it takes: itself, and each function and way of its.
    fn rows(&self) -> usize {
        1 + self.functions.len() + self.network.len()
    }
}

/// The rows that the ranks of one process take.
#[derive(Debug, Default)]
struct OfProcess {
    rows: usize,
    /// How many more there would be.
    refused: usize,
}

impl Readings {
    /// Everything that was left out at limits, by their names.
    #[must_use]
    pub fn left_out_by_name(&self) -> BTreeMap<&'static str, u64> {
        let mut by_name = self.left_out.by_name();
        by_name.extend(self.unseen.by_name());
        by_name
    }

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
    by_process: FxHashMap<u32, OfProcess>,
    /// How many there are before those of processes long gone are looked for.
    next_look: usize,
    left_out: LeftOut,
}

/// Ranks that metrics are kept of; those of processes long gone make room.
const RANKS: usize = 4096;
/// Ways between nodes that metrics are kept of for one rank: its ports, and paths of them.
const WAYS: usize = 64;
/// A process that has all its rows looks for those of ranks that are gone, once in so many that it lacks.
const REFUSALS: usize = 1024;

impl Metrics {
    /// Nothing yet; `resource` is the collector's own.
    #[must_use]
    pub fn new(start_unix_ns: u64, resource: Arc<Resource>) -> Self {
        Self {
            start_unix_ns,
            resource,
            ranks: FxHashMap::default(),
            by_process: FxHashMap::default(),
            next_look: RANKS / 4,
            left_out: LeftOut::default(),
        }
    }

    /// What was left out so far.
    pub(crate) fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// What is known of a rank of a process; `None` if there are too many. A process may have `most` rows.
    fn rank(&mut self, resource: &Arc<Resource>, pid: u32, most: usize) -> Option<&mut OfRank> {
        let key = Arc::as_ptr(resource).addr();
        if !self.ranks.contains_key(&key) {
            if self.ranks.len() >= self.next_look {
                self.forget_gone(None);
                // Each look is followed by as many new ranks as it looked at.
                self.next_look = (2 * self.ranks.len()).max(RANKS / 4);
            }
            if self.ranks.len() >= RANKS {
                self.left_out.count(Limit::Resources);
                return None;
            }
            if !self.takes_row(pid, most) {
                return None;
            }
            self.ranks.insert(
                key,
                OfRank {
                    resource: resource.clone(),
                    pid,
                    functions: Vec::new(),
                    verdicts: BTreeMap::new(),
                    states: Default::default(),
                    network: BTreeMap::new(),
                },
            );
        }
        self.ranks.get_mut(&key)
    }

    /// Counts one row more for a process; `false` if it may have no more.
    fn takes_row(&mut self, pid: u32, most: usize) -> bool {
        let own = self.by_process.entry(pid).or_default();
        if own.rows >= most {
            own.refused += 1;
            if own.refused % REFUSALS == 1 {
                self.forget_gone(Some(pid));
            }
        }
        let own = self.by_process.entry(pid).or_default();
        let has_room = own.rows < most;
        own.rows += usize::from(has_room);
        if !has_room {
            self.left_out.count(Limit::MetricRows);
        }
        has_room
    }

    /// Forgets ranks that are gone, of one process or of all: nobody else holds their resources.
    fn forget_gone(&mut self, of: Option<u32>) {
        let by_process = &mut self.by_process;
        self.ranks.retain(|_, rank| {
            let is_kept = of.is_some_and(|pid| pid != rank.pid) || Arc::strong_count(&rank.resource) > 1;
            if !is_kept && let Some(own) = by_process.get_mut(&rank.pid) {
                own.rows = own.rows.saturating_sub(rank.rows());
                if own.rows == 0 {
                    by_process.remove(&rank.pid);
                }
            }
            is_kept
        });
    }

    /// A rank has given a verdict.
    pub fn judged(&mut self, verdict: &Verdict, (pid, resource): (u32, &Arc<Resource>), limits: &Limits) {
        if let Some(rank) = self.rank(resource, pid, limits.metric_rows.process) {
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
        limits: &Limits,
    ) {
        let (pid, most) = (part.pid, limits.metric_rows.process);
        let function = part.function();
        let Some(rank) = self.rank(resource, pid, most) else {
            return;
        };
        let is_known = rank.functions.iter().any(|(known, _)| *known == function);
        if !is_known && !self.takes_row(pid, most) {
            return;
        }
        let Some(rank) = self.rank(resource, pid, most) else {
            return;
        };
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
        let (mut new_ways, mut refused) = (0, 0);
        for proxy in &part.proxies {
            for (way, bytes) in &proxy.by_way {
                let key = (*way, proxy.send);
                if !rank.network.contains_key(&key) {
                    if rank.network.len() >= WAYS {
                        refused += 1;
                        continue;
                    }
                    new_ways += 1;
                }
                let sum = rank.network.entry(key).or_default();
                *sum = sum.saturating_add(*bytes);
            }
            for (histogram, sum) in rank.states.iter_mut().zip(&proxy.sums) {
                if sum.count > 0 {
                    histogram.add(sum.total_ns as f64 / 1e9);
                }
            }
        }
        if let Some(own) = self.by_process.get_mut(&pid) {
            own.rows += new_ways;
        }
        self.left_out.add(Limit::MetricRows, refused);
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
        for (limit, count) in readings.left_out_by_name() {
            let text = (
                "ccl.collector.left_out",
                "What was left out because a process had, or wrote, more than a limit allows",
                "{item}",
            );
            own(
                text,
                vec![("limit", Value::Static(limit))],
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource;

    fn part(pid: u32) -> RankOperation {
        let mut part = RankOperation::default();
        part.reset(pid, 1, 0);
        part
    }

    fn observe(metrics: &mut Metrics, pid: u32, resource: &Arc<Resource>) {
        metrics.observe(&part(pid), resource, Some(1.0), Some(1), &Limits::default());
    }

    #[test]
    fn a_process_whose_ranks_come_and_go_has_its_rows_and_no_more() {
        let mut metrics = Metrics::new(0, Arc::new(resource::of_collector()));
        let most = Limits::default().metric_rows.process;
        for _ in 0..20_000 {
            observe(&mut metrics, 66, &Arc::new(resource::of_collector()));
            let rows: usize = metrics.ranks.values().map(OfRank::rows).sum();
            assert!(rows <= most && metrics.by_process[&66].rows == rows, "{rows}");
        }
        // Another process has its own.
        let honest = Arc::new(resource::of_collector());
        observe(&mut metrics, 7, &honest);
        assert_eq!(metrics.by_process[&7].rows, 2);
        // Ranks that are there make no room.
        let before = metrics.left_out().of(Limit::MetricRows);
        let kept: Vec<_> = (0..most).map(|_| Arc::new(resource::of_collector())).collect();
        for _ in 0..10 {
            kept.iter()
                .for_each(|resource| observe(&mut metrics, 66, resource));
        }
        let ranks: usize = metrics.ranks.values().filter(|rank| rank.pid == 66).count();
        assert!(
            ranks >= most / 2 && metrics.by_process[&66].rows <= most,
            "{ranks}"
        );
        assert!(metrics.left_out().of(Limit::MetricRows) > before);
        assert_eq!(metrics.by_process[&7].rows, 2);
    }
}
