//! The whole line from samples to a [`Batch`].

use std::sync::Arc;

use ringsight_exporters::model::{Batch, ExportStats};
use ringsight_probes::{network::NetworkEvent, sample::Sample};
use ringsight_records::{Flags, Function, Kind, PathChange, State, VERSION};

use crate::{
    awaited::Awaited,
    clock::Clock,
    correlate::{
        Correlator, Finished, Limits, RankOperation,
        communicators::{Communicators, Port},
        instance::{Instance, Instances},
    },
    identity::{InstanceKey, Scope},
    lag,
    metrics::{Metrics, Readings},
    network::{Network, Output},
    resource,
    spans::SpanMaker,
    summary::OperationLog,
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
    /// Operation rows kept for a summary.
    pub keep_operations: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            scope: Scope::default(),
            service: None,
            default_service: None,
            lag_threshold_ns: lag::DEFAULT_THRESHOLD_NS,
            limits: Limits::default(),
            keep_operations: 0,
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
    start_unix_ns: u64,
    clock: Clock,
    log: OperationLog,
    batch: Batch,
    unfinished: u64,
    /// Processes that ended, with the time from which on nothing refers to them any more.
    gone: Vec<(u64, u32)>,
    now_ns: u64,
    finished: Vec<Finished>,
    ready: Vec<Instance>,
    scratch: Vec<u64>,
}

impl Collector {
    /// A collector that watches nothing yet; `now_ns` is the monotonic time from which metrics accumulate.
    #[must_use]
    pub fn new(options: Options, clock: Clock, now_ns: u64) -> Self {
        let own = Arc::new(resource::of_collector());
        Self {
            limits: options.limits,
            correlator: Correlator::new(options.limits),
            communicators: Communicators::new(options.service.as_deref(), options.default_service.as_deref()),
            instances: Instances::default(),
            maker: SpanMaker::new(options.scope, options.lag_threshold_ns),
            network: Network::new(Arc::clone(&own)),
            awaited: Awaited::default(),
            start_unix_ns: clock.unix_ns(now_ns),
            metrics: Metrics::new(clock.unix_ns(now_ns), own),
            clock,
            log: OperationLog::new(options.keep_operations),
            batch: Batch::default(),
            unfinished: 0,
            gone: Vec::new(),
            now_ns,
            finished: Vec::new(),
            ready: Vec::new(),
            scratch: Vec::new(),
        }
    }

    /// The clock, to be refreshed by whoever drives the collector.
    pub fn clock_mut(&mut self) -> &mut Clock {
        &mut self.clock
    }

    /// Takes in samples, leaving the vector empty, and hands on what is over because of them.
    pub fn ingest(&mut self, samples: &mut Vec<Sample>) {
        for sample in samples.drain(..) {
            self.take(sample);
        }
        self.settle();
    }

    fn take(&mut self, sample: Sample) {
        match &sample {
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
                }
                self.gone.retain(|(_, pid)| *pid != process.pid);
                self.communicators.watch(process);
            }
            Sample::Communicator { pid, communicator } => self.communicators.enter(*pid, communicator),
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
                let (network, mut output) = self.network();
                network.end_failovers_of((*pid, record.comm, record.rank), &mut output);
                self.communicators.destroyed(record.comm, *pid, record.rank);
            }
            Sample::Record { pid, record, .. }
                if record.kind == Kind::Failover as u8 && record.version() == VERSION =>
            {
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
                    self.network.carries(queue_pair, record, &self.communicators);
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
                    self.communicators.queue_pair(pid, qpn, &device);
                }
                let (network, mut output) = self.network();
                network.take(event, &mut output);
                return;
            }
            Sample::NetworkLost { count } => {
                self.network.lose(*count);
                return;
            }
            Sample::Exited { pid, .. } => {
                let pid = *pid;
                self.network_of_exited(pid);
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
            spans: &mut self.batch.spans,
            logs: &mut self.batch.logs,
        };
        (&mut self.network, output)
    }

    /// What the correlator finished goes to the instances, or becomes spans at once.
    fn hand_on(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        for mut finished in finished.drain(..) {
            if let Finished::Operation(part) | Finished::Unfinished(part, _) | Finished::Judged(part) =
                &mut finished
                && part.ranks == 0
            {
                part.ranks = self
                    .communicators
                    .get(part.comm)
                    .map_or(0, |communicator| communicator.ranks);
            }
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
                    }
                }
                Finished::Judged(part) => {
                    let instead = self
                        .awaited
                        .judged(&part, &mut self.correlator, &self.communicators);
                    let (log, hang) = self
                        .maker
                        .verdict(&part, instead, &self.communicators, &self.clock);
                    self.batch.logs.extend(log);
                    self.batch.spans.extend(hang);
                    let communicator = self.communicators.get(part.comm);
                    let member = communicator.and_then(|known| known.member(part.pid, part.rank));
                    if let (Some(member), Some(verdict)) = (member, part.verdicts.last()) {
                        self.metrics.judged(verdict, &member.resource);
                    }
                }
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
            self.emit();
        }
    }

    /// A rank's part of an operation goes to the others'.
    fn add(&mut self, part: Box<RankOperation>) {
        self.awaited.over(&part, &self.communicators);
        let expected = part.instance().map_or(0, |key| self.communicators.expected(&key));
        let left = self
            .instances
            .add(part, expected, self.now_ns, &self.limits, &mut self.ready);
        if let Some(part) = left {
            self.correlator.recycle(part);
        }
    }

    /// Hands on instances that are whole or have waited long enough.
    fn settle(&mut self) {
        let (least, most) = self.correlator.watermarks().unwrap_or((u64::MAX, self.now_ns));
        let expected = |key: &InstanceKey| self.communicators.expected(key);
        self.instances
            .settle(least, most, &self.limits, expected, &mut self.ready);
        self.emit();
        let now_ns = self.now_ns;
        let (network, mut output) = self.network();
        network.settle_failovers(now_ns, &mut output);
        if !self.gone.is_empty() {
            let now = self.now_ns;
            let (communicators, awaited) = (&mut self.communicators, &mut self.awaited);
            self.gone.retain(|(until, pid)| {
                if *until <= now {
                    communicators.exited(*pid);
                    awaited.exited(*pid);
                }
                *until > now
            });
        }
    }

    fn emit(&mut self) {
        let mut ready = std::mem::take(&mut self.ready);
        for mut instance in ready.drain(..) {
            let summary = self.maker.summarize(&instance);
            let spans = &mut self.batch.spans;
            let trace_id = self
                .maker
                .instance(&instance, &summary, &self.communicators, &self.clock, spans);
            let synchronises = summary.function.is_some_and(Function::synchronises);
            let arrivals: Vec<u64> = instance.parts.iter().map(|part| part.device.0).collect();
            let ended = |part: &RankOperation| part.cut_ns == 0;
            for (at, part) in instance.parts.iter().enumerate().filter(|(_, part)| ended(part)) {
                let communicator = self.communicators.get(part.comm);
                let member = communicator.and_then(|communicator| communicator.member(part.pid, part.rank));
                if let Some(member) = member {
                    let lag = (synchronises && arrivals.len() > 1 && !arrivals.contains(&0))
                        .then(|| lag::lag_of(&arrivals, at, &mut self.scratch));
                    self.metrics
                        .observe(part, &member.resource, summary.bus_bandwidth, lag);
                }
            }
            if !instance.late && instance.parts.iter().any(|part| ended(part)) {
                let operation =
                    self.maker
                        .operation(&instance, &summary, trace_id, &self.communicators, &self.clock);
                self.log.add(&operation);
                self.batch.operations.push(operation);
            }
            for part in instance.parts.drain(..) {
                self.correlator.recycle(part);
            }
            self.instances.recycle(instance.parts);
        }
        self.ready = ready;
    }

    /// Lets go of everything: operations in flight are reported as unfinished.
    pub fn finish(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
        let now_ns = self.now_ns;
        let (network, mut output) = self.network();
        network.finish(now_ns, &mut output);
        self.correlator.finish(&mut self.finished);
        self.hand_on();
        self.instances.finish(&mut self.ready);
        self.emit();
    }

    /// What has been made since the last call.
    pub fn take_batch(&mut self) -> Batch {
        std::mem::take(&mut self.batch)
    }

    /// Spans made since the last [`Collector::take_batch`].
    #[must_use]
    pub fn batched_spans(&self) -> usize {
        self.batch.spans.len()
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
    }

    /// What has come in, been made and been given up so far.
    #[must_use]
    pub fn readings(&self) -> Readings {
        Readings {
            counts: *self.correlator.counts(),
            given: self.correlator.given(),
            given_up: *self.instances.given_up(),
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
