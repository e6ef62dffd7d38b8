//! The whole line from samples to a [`Batch`].

use std::{collections::VecDeque, sync::Arc};

use ringsight_exporters::model::{Batch, ExportStats, Finding, Metric, MetricData, Place, Straggler, Value};
use ringsight_probes::{network::NetworkEvent, sample::Sample};
use ringsight_records::{Flags, Function, Kind, PathChange, Record, State, VERSION};

use crate::{
    awaited::Awaited,
    chronic::{self, Chronic},
    clock::Clock,
    correlate::{
        Correlator, Finished, RankOperation,
        communicators::{Communicators, Port},
        instance::{Context, Instance, Instances},
    },
    deaths::Deaths,
    findings::Findings,
    identity::{InstanceKey, Scope},
    lag,
    limits::{LeftOut, Limit, Limits},
    metrics::{Metrics, Readings},
    network::{Network, Output},
    resource,
    spans::SpanMaker,
    summary::{OperationLog, OperationRow},
};

/// How a collector works.
#[derive(Clone, Debug)]
pub struct Options {
    /// Goes into every trace id.
    pub scope: Scope,
    /// Replaces the service name that targets say themselves.
    pub service: Option<String>,
    /// Service name of targets that say none.
    pub default_service: Option<String>,
    /// From which lag on a rank is named.
    pub lag_threshold_ns: u64,
    /// Bounds.
    pub limits: Limits,
    /// Operation rows kept for a summary: [`Limit::ListedOperations`].
    pub keep_operations: usize,
    /// Processes of one user in different control groups have nothing to do with each other, as those of different users.
    pub by_cgroup: bool,
}

/// Spans made at once, beyond those of one instance: a process that has many operations over at one moment takes no more memory
/// for their spans than others do.
pub const SPANS_AT_ONCE: usize = 32_768;

impl Default for Options {
    fn default() -> Self {
        Self {
            scope: Scope::default(),
            service: None,
            default_service: None,
            lag_threshold_ns: lag::DEFAULT_THRESHOLD_NS,
            limits: Limits::default(),
            keep_operations: 0,
            by_cgroup: false,
        }
    }
}

/// Samples in, batches out. Drives nothing by itself and reads no clock but the one that it is given.
#[derive(Debug)]
pub struct Collector {
    limits: Limits,
    correlator: Correlator,
    communicators: Communicators,
    instances: Instances,
    maker: SpanMaker,
    metrics: Metrics,
    network: Network,
    awaited: Awaited,
    findings: Findings,
    deaths: Deaths,
    chronic: Chronic,
    /// [`Collector::finish`] was called.
    is_over: bool,
    start_unix_ns: u64,
    clock: Clock,
    log: OperationLog,
    batch: Batch,
    unfinished: u64,
    claimed_twice: u64,
    left_out: LeftOut,
    /// As the session counts it.
    unseen: ringsight_probes::LeftOut,
    /// Processes that ended, with the time from which on nothing refers to them any more.
    gone: Vec<(u64, u32)>,
    now_ns: u64,
    finished: Vec<Finished>,
    ready: Vec<Instance>,
    arrivals: lag::Arrivals,
    lags: Vec<(u32, i64)>,
}

impl Collector {
    /// A collector that watches nothing yet; `now_ns` is the monotonic time from which metrics accumulate.
    #[must_use]
    pub fn new(options: Options, clock: Clock, now_ns: u64) -> Self {
        let own = Arc::new(resource::of_collector());
        Self {
            limits: options.limits,
            correlator: Correlator::new(options.limits),
            communicators: Communicators::new(
                options.service.as_deref(),
                options.default_service.as_deref(),
                options.by_cgroup,
                &options.limits,
            ),
            instances: Instances::default(),
            maker: SpanMaker::new(options.scope, options.lag_threshold_ns),
            network: Network::new(Arc::clone(&own)),
            awaited: Awaited::default(),
            findings: Findings::default(),
            deaths: Deaths::default(),
            chronic: Chronic::default(),
            is_over: false,
            start_unix_ns: clock.unix_ns(now_ns),
            metrics: Metrics::new(clock.unix_ns(now_ns), own),
            clock,
            log: OperationLog::new(options.keep_operations),
            batch: Batch::default(),
            unfinished: 0,
            claimed_twice: 0,
            left_out: LeftOut::default(),
            unseen: ringsight_probes::LeftOut::default(),
            gone: Vec::new(),
            now_ns,
            finished: Vec::new(),
            ready: Vec::new(),
            arrivals: lag::Arrivals::default(),
            lags: Vec::new(),
        }
    }

    /// The clock, to be refreshed by whoever drives the collector.
    pub fn clock_mut(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Takes in samples, leaving the vector empty, and hands on what is over because of them.
    pub fn ingest(&mut self, samples: &mut Vec<Sample>) {
        self.ingest_each(samples.drain(..));
    }

    /// The same of any source.
    pub fn ingest_each(&mut self, samples: impl IntoIterator<Item = Sample>) {
        for sample in samples {
            self.take(sample);
        }
        self.settle();
    }

    /// Times that a process tells, none later than now: something in the far future would never be over.
    #[inline]
    fn hold_to_now(&self, sample: &mut Sample) {
        let latest_ns = self.clock.latest_ns();
        let hold = |ns: &mut u64| *ns = (*ns).min(latest_ns);
        match sample {
            Sample::Record { record, .. } => {
                hold(&mut record.time_ns);
                if record.kind == Kind::OpCompleted as u8 {
                    hold(&mut record.value);
                }
            }
            Sample::Description { description, .. } => {
                let times = [
                    &mut description.api_start_ns,
                    &mut description.api_end_ns,
                    &mut description.launch_start_ns,
                    &mut description.launch_end_ns,
                    &mut description.device_start_ns,
                    &mut description.device_end_ns,
                ];
                times.into_iter().for_each(hold);
            }
            Sample::Verdict { given, .. } => hold(&mut given.time_ns),
            _ => {}
        }
    }

    fn take(&mut self, mut sample: Sample) {
        self.hold_to_now(&mut sample);
        match &mut sample {
            Sample::Process(process) => {
                // A process id that is used again: what its former owner did is past.
                if self
                    .communicators
                    .process(process.pid)
                    .is_some_and(|w| w.process.start_time != process.start_time)
                {
                    self.correlator.ingest(
                        Sample::Exited {
                            pid: process.pid,
                            ended: true,
                        },
                        &mut self.finished,
                    );
                    self.hand_on();
                    self.network_of_exited(process.pid);
                    self.communicators.exited(process.pid);
                    self.findings.exited(process.pid);
                }
                self.gone.retain(|(_, pid)| *pid != process.pid);
                self.communicators.watch(process);
            }
            Sample::Communicator { pid, communicator } => {
                let limits = self.correlator.limits();
                self.communicators.enter(*pid, communicator, limits);
            }
            Sample::Device {
                pid,
                device,
                clock: Some(clock),
                ..
            } => self.communicators.tick(*pid, *device, *clock),
            Sample::Port {
                pid,
                index,
                device,
                number,
                gid,
            } => {
                let port = Port {
                    device: self.network.name(device),
                    number: u32::from(*number),
                    gid: gid.map(|gid| gid.to_string().into()),
                };
                self.communicators.port(*pid, *index, port);
            }
            Sample::Record { pid, record, .. } if record.kind == Kind::CommDestroy as u8 => {
                record.comm = self.communicators.named(*pid, record.comm);
                let (network, mut output) = self.network();
                network.end_failovers_of((*pid, record.comm, record.rank), &mut output);
                self.communicators.destroyed(record.comm, *pid, record.rank);
            }
            Sample::Record { pid, record, .. }
                if record.kind == Kind::Failover as u8 && record.version() == VERSION =>
            {
                record.comm = self.communicators.named(*pid, record.comm);
                let PathChange { port, number, .. } = PathChange::from_value(record.value);
                self.network
                    .carries((*pid, port, number), record, &self.communicators);
                let (network, mut output) = self.network();
                let delayed_by = network.path_changed(*pid, record, &mut output);
                if let Some(failure) = delayed_by
                    && let Some(operation) = self.correlator.known_mut(*pid, record.op, record.replay)
                {
                    operation.delay(failure);
                }
            }
            Sample::Record { pid, record, .. }
                if record.kind == Kind::NetPlugin as u8
                    && record.version() == VERSION
                    // Once a step: a receiver tells of arrivals alone.
                    && record.state
                        == if record.flags().contains(Flags::SEND) { State::START } else { State::STOP } =>
            {
                let carrier = record.carrier();
                if carrier.port.is_some() {
                    let queue_pair = (*pid, carrier.port, carrier.number);
                    let record = Record {
                        comm: self.communicators.named(*pid, record.comm),
                        ..*record
                    };
                    self.network.carries(queue_pair, &record, &self.communicators);
                }
            }
            Sample::Watermark { time_ns, .. } => self.now_ns = self.now_ns.max(*time_ns),
            Sample::Network(event) => {
                if let (
                    NetworkEvent::QpCreated { qpn, .. } | NetworkEvent::QpModified { qpn, .. },
                    Some(pid),
                ) = (event.event, event.pid)
                {
                    let device = self.network.name(&event.device);
                    let limits = self.correlator.limits();
                    self.communicators.queue_pair(pid, qpn, &device, limits);
                }
                let (network, mut output) = self.network();
                network.take(event, &mut output);
                return;
            }
            Sample::NetworkLost { count } => {
                self.network.lose(*count);
                return;
            }
            Sample::Failed { pid, status } => {
                self.died(*pid, Some(*status));
                return;
            }
            Sample::Exited { pid, ended } => {
                let (pid, ended) = (*pid, *ended);
                self.network_of_exited(pid);
                if ended {
                    self.died(pid, None);
                }
                let until = self.now_ns.saturating_add(2 * self.limits.instance_linger_ns);
                self.gone.push((until, pid));
            }
            _ => {}
        }
        self.correlator.ingest(sample, &mut self.finished);
        if !self.finished.is_empty() {
            self.hand_on();
        }
    }

    /// A process has ended, if that is known with a `status` that is no success: whoever waits for one of its ranks waits for ever.
    fn died(&mut self, pid: u32, status: Option<i32>) {
        let now_ns = self.now_ns;
        for (comm, rank) in self.communicators.live_ranks(pid) {
            let report = self.deaths.died(comm, (pid, rank), status, now_ns);
            self.finished.extend(report.map(Finished::Judged));
        }
        if !self.finished.is_empty() {
            self.hand_on();
        }
    }

    /// Looks for operations that wait for ranks which are dead.
    fn look_for_bereaved(&mut self) {
        for comm in self.deaths.due(self.now_ns) {
            let Some(communicator) = self.communicators.get(comm) else {
                continue;
            };
            let processes = communicator.processes();
            let running = processes.flat_map(|pid| self.correlator.running(pid));
            let mut waiting: Vec<Box<RankOperation>> = running
                .filter(|part| self.communicators.named(part.pid, part.comm) == comm)
                .filter(|part| !part.completed && part.begun_ns().is_some())
                .map(|part| {
                    let mut part = part.judged();
                    (part.comm, part.ranks) = (comm, communicator.ranks);
                    part
                })
                .collect();
            waiting.sort_by_key(|part| part.begun_ns());
            for part in waiting {
                let report = self.deaths.report(&part);
                self.finished.extend(report.map(Finished::Judged));
            }
        }
        if !self.finished.is_empty() {
            self.hand_on();
        }
        self.report_failures(false);
    }

    /// Reports ranks whose process failed with no operation of others to show for it. `is_last`: nothing more is to be seen.
    fn report_failures(&mut self, is_last: bool) {
        let limit = self.correlator.limits().findings;
        for (comm, mut part) in self.deaths.failures(self.now_ns, is_last) {
            part.ranks = self.communicators.get(comm).map_or(0, |known| known.ranks);
            self.findings
                .judged(&part, self.maker.scope(), &self.communicators, limit);
        }
    }

    /// Ends what a process that is gone had of the network.
    fn network_of_exited(&mut self, pid: u32) {
        let now_ns = self.now_ns;
        let (network, mut output) = self.network();
        network.exited(pid, now_ns, &mut output);
    }

    /// What is known of the network, and where its spans go.
    fn network(&mut self) -> (&mut Network, Output<'_>) {
        let (scope, counts) = self.maker.parts();
        let output = Output {
            scope,
            counts,
            communicators: &self.communicators,
            clock: &self.clock,
            limits: self.correlator.limits(),
            now_ns: self.now_ns,
            spans: &mut self.batch.spans,
            logs: &mut self.batch.logs,
        };
        (&mut self.network, output)
    }

    /// What the correlator finished goes to the instances, or becomes spans at once.
    fn hand_on(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        for finished in finished.drain(..) {
            let finished = match self.identified(finished) {
                Ok(finished) => finished,
                Err(part) => {
                    self.claimed_twice += 1;
                    self.correlator.recycle(part);
                    continue;
                }
            };
            match finished {
                Finished::Operation(part) => self.add(part),
                Finished::Unfinished(mut part, ended) => {
                    self.unfinished += 1;
                    if self.awaited.is_told(&part, ended) {
                        part.cut_ns = self.now_ns.max(part.last_ns);
                        self.add(part);
                    } else {
                        let spans = &mut self.batch.spans;
                        self.maker
                            .unfinished(&part, self.now_ns, &self.communicators, &self.clock, spans);
                        self.correlator.recycle(part);
                    }
                }
                Finished::Judged(part) => self.judged(&part),
                Finished::Group(group) => {
                    self.maker
                        .group(&group, &self.communicators, &self.clock, &mut self.batch.spans);
                }
                Finished::HostGroup(group) => {
                    self.maker
                        .host_group(&group, &self.communicators, &self.clock, &mut self.batch.spans);
                }
                Finished::Call(call, group) => {
                    self.maker.call(
                        &call,
                        group,
                        &self.communicators,
                        &self.clock,
                        &mut self.batch.spans,
                    );
                }
            }
        }
        self.finished = finished;
        if !self.ready.is_empty() {
            self.emit(SPANS_AT_ONCE);
        }
    }

    /// A watchdog has given a verdict, the last one of `part`, or the collector has for it.
    fn judged(&mut self, part: &RankOperation) {
        let limit = self.correlator.limits().findings;
        self.findings
            .judged(part, self.maker.scope(), &self.communicators, limit);
        let instead = self
            .awaited
            .judged(part, &mut self.correlator, &self.communicators);
        let (log, hang) = self
            .maker
            .verdict(part, instead, &self.communicators, &self.clock);
        self.batch.logs.extend(log);
        self.batch.spans.extend(hang);
        let communicator = self.communicators.get(part.comm);
        let member = communicator.and_then(|known| known.member(part.pid, part.rank));
        if let (Some(member), Some(verdict)) = (member, part.verdicts.last()) {
            let limits = self.correlator.limits();
            self.metrics.judged(verdict, (part.pid, &member.resource), limits);
        }
    }

    /// Something with the communicator that it is of, which may be called otherwise than its process says. An operation on a
    /// rank that is another process's comes back.
    fn identified(&self, mut finished: Finished) -> Result<Finished, Box<RankOperation>> {
        let communicators = &self.communicators;
        match &mut finished {
            Finished::Operation(part) | Finished::Unfinished(part, _) | Finished::Judged(part) => {
                part.comm = communicators.named(part.pid, part.comm);
                if part.ranks == 0 {
                    let known = communicators.get(part.comm);
                    part.ranks = known.map_or(0, |communicator| communicator.ranks);
                }
                if communicators.is_claimed_twice(part.pid, part.comm, part.rank) {
                    return Err(match finished {
                        Finished::Operation(part)
                        | Finished::Unfinished(part, _)
                        | Finished::Judged(part) => part,
                        other => return Ok(other),
                    });
                }
            }
            Finished::Group(group) => {
                for (key, ..) in &mut group.members {
                    key.comm = communicators.named(group.pid, key.comm);
                }
            }
            Finished::Call(..) | Finished::HostGroup(_) => {}
        }
        Ok(finished)
    }

    /// A rank's part of an operation goes to the others'.
    fn add(&mut self, part: Box<RankOperation>) {
        if part.cut_ns == 0 {
            self.findings.ended(&part);
        }
        if part.aborted
            && let Some(report) = self.deaths.failed(&part, self.now_ns)
        {
            self.judged(&report);
        }
        self.awaited.over(&part, &self.communicators);
        let Some(owner) = self.communicators.process(part.pid).map(|watched| watched.owner) else {
            self.correlator.recycle(part);
            return;
        };
        let context = Context {
            owner,
            is_known: self.communicators.is_known(part.pid, part.comm),
            expected: part.instance().map_or(0, |key| self.communicators.expected(&key)),
            now_ns: self.now_ns,
            most: self.correlator.limits().instances.process,
        };
        self.instances.add(part, &context, &mut self.ready);
        for part in self.instances.refused() {
            self.correlator.recycle(part);
        }
    }

    /// Hands on instances that are whole or have waited long enough.
    fn settle(&mut self) {
        let (least, most) = self.correlator.watermarks().unwrap_or((u64::MAX, self.now_ns));
        // A process that writes more than can be read holds others up for so long, and no longer.
        let least = least.max(most.saturating_sub(self.limits.delay_ns));
        let expected = |key: &InstanceKey| self.communicators.expected(key);
        self.instances
            .settle(least, most, &self.limits, expected, &mut self.ready);
        self.emit(SPANS_AT_ONCE);
        let now_ns = self.now_ns;
        let (network, mut output) = self.network();
        network.settle_failovers(now_ns, &mut output);
        self.look_for_bereaved();
        if !self.gone.is_empty() {
            let now = self.now_ns;
            let (communicators, awaited) = (&mut self.communicators, &mut self.awaited);
            let (instances, findings) = (&mut self.instances, &mut self.findings);
            self.gone.retain(|(until, pid)| {
                if *until <= now {
                    communicators.exited(*pid);
                    awaited.exited(*pid);
                    instances.exited(*pid);
                    findings.exited(*pid);
                }
                *until > now
            });
            self.deaths.settle(&self.communicators);
        }
    }

    /// Makes spans of the instances that are ready, until there are `most`.
    fn emit(&mut self, most: usize) {
        let mut ready = VecDeque::from(std::mem::take(&mut self.ready));
        while self.batch.spans.len() < most
            && let Some(mut instance) = ready.pop_front()
        {
            let summary = self
                .maker
                .summarize(&instance, self.findings.waited_for(&instance.key));
            let spans = &mut self.batch.spans;
            let trace_id = self
                .maker
                .instance(&instance, &summary, &self.communicators, &self.clock, spans);
            let synchronises = summary.function.is_some_and(Function::synchronises);
            let begun = instance.parts.iter().filter(|part| part.device.0 != 0).count();
            let has_lags = synchronises && begun > 1 && begun == instance.parts.len();
            if has_lags {
                self.arrivals.set(instance.parts.iter().map(|part| part.device.0));
                if !instance.late && instance.parts.iter().all(|part| part.cut_ns == 0) {
                    self.observe_lags(&instance);
                }
            }
            let ended = |part: &RankOperation| part.cut_ns == 0;
            for part in instance.parts.iter().filter(|part| ended(part)) {
                let communicator = self.communicators.get(part.comm);
                let member = communicator.and_then(|communicator| communicator.member(part.pid, part.rank));
                if let Some(member) = member {
                    let lag = has_lags.then(|| self.arrivals.lag_of(part.device.0));
                    let limits = self.correlator.limits();
                    self.metrics
                        .observe(part, &member.resource, summary.bus_bandwidth, lag, limits);
                }
            }
            if !instance.late && instance.parts.iter().any(|part| ended(part)) {
                let operation =
                    self.maker
                        .operation(&instance, &summary, trace_id, &self.communicators, &self.clock);
                self.log
                    .add(&operation, instance.owner(), self.communicators.owners());
                self.batch.operations.push(operation);
            }
            for part in instance.parts.drain(..) {
                self.correlator.recycle(part);
            }
            self.instances.recycle(instance.parts);
        }
        self.ready = Vec::from(ready);
    }

    /// An operation whose ranks have all begun and ended goes to what is known of each rank.
    fn observe_lags(&mut self, instance: &Instance) {
        let parts = || instance.parts.iter();
        let (Some((begun_ns, last_ns, loss_ns)), Some(first)) = (self.arrivals.ends(), parts().next()) else {
            return;
        };
        self.lags.clear();
        self.lags
            .extend(parts().map(|part| (part.rank, self.arrivals.lag_of(part.device.0))));
        let operation = chronic::Operation {
            comm: instance.key.comm,
            pid: first.pid,
            begun_ns,
            end_ns: parts().map(|part| part.device.1).max().unwrap_or(last_ns),
            lags: &self.lags,
            last: parts()
                .find(|part| part.device.0 == last_ns)
                .map(|part| part.rank),
            loss_ns,
        };
        self.chronic.observe(&operation, self.limits.stragglers);
    }

    /// Each rank's lags over the window, by communicator and rank.
    #[must_use]
    pub fn stragglers(&self) -> Vec<Straggler> {
        let mut rows = self.chronic.rows();
        for row in &mut rows {
            let Some(communicator) = self.communicators.get(row.communicator) else {
                continue;
            };
            row.communicator_name = Arc::clone(&communicator.name);
            row.place = communicator.of_rank(row.rank).map(|member| Place {
                pid: member.pid,
                host: Arc::clone(&member.watched.host),
            });
        }
        rows
    }

    /// Adds what is known of each rank's lags to the batch, of stragglers as metrics, too.
    fn add_stragglers(&mut self, now_ns: u64) {
        let stragglers = self.stragglers();
        for straggler in stragglers.iter().filter(|straggler| straggler.chronic) {
            let communicator = self.communicators.get(straggler.communicator);
            let Some((known, member)) =
                communicator.and_then(|known| Some((known, known.of_rank(straggler.rank)?)))
            else {
                continue;
            };
            self.batch.metrics.push(Metric {
                resource: Arc::clone(&member.resource),
                name: "ccl.straggler.share",
                description: "Share of the time by which a straggler's operations began later",
                unit: "1",
                attributes: vec![("ccl.communicator.id", Value::Text(Arc::clone(&known.id)))],
                start_unix_ns: self.start_unix_ns,
                unix_ns: self.clock.unix_ns(now_ns),
                data: MetricData::Gauge(straggler.share),
            });
        }
        self.batch.stragglers = stragglers;
    }

    /// Lets go of everything: operations in flight are reported as unfinished.
    pub fn finish(&mut self, now_ns: u64) {
        while self.finish_some(now_ns, usize::MAX) {}
    }

    /// The same in steps, each of which makes about `most` spans: `true` if there is more. The caller takes the batch in between.
    pub fn finish_some(&mut self, now_ns: u64, most: usize) -> bool {
        self.is_over = true;
        self.now_ns = self.now_ns.max(now_ns);
        let now_ns = self.now_ns;
        let (network, mut output) = self.network();
        network.finish(now_ns, &mut output);
        if self.ready.is_empty() {
            if self.correlator.finish_one(&mut self.finished) {
                self.hand_on();
                return true;
            }
            self.instances.finish(&mut self.ready);
            self.report_failures(true);
        }
        self.emit(most);
        !self.ready.is_empty()
    }

    /// Counts what is still here, and `samples` that were not taken in, as left out: there is no time for more.
    pub fn leave_out_the_rest(&mut self, samples: usize) {
        let rest = self.ready.len() + self.instances.waiting() + self.correlator.held() + samples;
        self.left_out.add(Limit::End, rest as u64);
    }

    /// What has been made since the last call.
    pub fn take_batch(&mut self) -> Batch {
        self.batch.findings =
            self.findings
                .take_news(self.now_ns, self.is_over, &self.communicators, &self.clock);
        std::mem::take(&mut self.batch)
    }

    /// What watchdogs have found wrong so far, the oldest first.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.findings.rows(&self.communicators, &self.clock)
    }

    /// Whether watchdogs have seen a hang: they called an operation so, or ranks wait in one still.
    #[must_use]
    pub fn has_seen_hang(&self) -> bool {
        self.findings.hangs() > 0 || self.findings.any_open()
    }

    /// Spans and log records made since the last [`Collector::take_batch`].
    #[must_use]
    pub fn batched(&self) -> usize {
        self.batch.spans.len() + self.batch.logs.len()
    }

    /// Adds all metrics, as of `now_ns`, to the batch.
    pub fn add_metrics(&mut self, now_ns: u64, cpu_seconds: f64, exporters: Vec<(String, ExportStats)>) {
        let readings = Readings {
            cpu_seconds,
            exporters,
            ..self.readings()
        };
        let metrics = self
            .metrics
            .read(self.clock.unix_ns(now_ns), &readings, &self.communicators);
        self.batch.metrics.extend(metrics);
        self.batch.metrics.extend(self.network.read(
            self.start_unix_ns,
            self.clock.unix_ns(now_ns),
            &self.communicators,
        ));
        self.add_stragglers(now_ns);
    }

    /// Takes over what a session has left out of what processes showed, for the readings.
    pub fn set_unseen(&mut self, unseen: ringsight_probes::LeftOut) {
        self.unseen = unseen;
    }

    /// What has come in, been made and been given up so far.
    #[must_use]
    pub fn readings(&self) -> Readings {
        let (claimed_twice, foreign) = self.communicators.claims();
        let mut left_out = self.left_out;
        let parts = [
            self.correlator.left_out(),
            self.communicators.left_out(),
            *self.instances.left_out(),
            *self.findings.left_out(),
            *self.metrics.left_out(),
            *self.network.left_out(),
            self.log.left_out(),
            *self.chronic.left_out(),
        ];
        parts.iter().for_each(|part| left_out.add_all(part));
        Readings {
            counts: *self.correlator.counts(),
            given: self.correlator.given(),
            given_up: *self.instances.given_up(),
            left_out,
            unseen: self.unseen,
            claimed_twice: self.claimed_twice + claimed_twice,
            foreign,
            spans: *self.maker.counts(),
            in_flight: self.correlator.in_flight(),
            cpu_seconds: 0.0,
            exporters: Vec::new(),
        }
    }

    /// Operations so far.
    #[must_use]
    pub fn log(&self) -> &OperationLog {
        &self.log
    }

    /// Hands out the operations that were listed for a summary, and how many more there were.
    pub fn take_rows(&mut self) -> (Vec<OperationRow>, u64) {
        self.log.take_rows()
    }

    /// Operations that were still running when they were let go of.
    #[must_use]
    pub fn unfinished(&self) -> u64 {
        self.unfinished
    }

    /// Instances that wait for ranks.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.instances.waiting()
    }
}
