//! One rank's spans: its part of the operation and the parts of that.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{Attribute, Resource, Span, SpanEvent, SpanId, SpanLink, TraceId, Value};
use ringsight_records::{Function, Numbering};

use super::{
    Range, SpanCounts, bytes_of, group_key, int, link,
    links::{awaited_link, elsewhere, instead_link},
    names, port_attributes, resource_of, seconds, send_of, verdict,
};
use crate::{
    clock::Clock,
    correlate::{
        KernelChannel, RankOperation, Whereabouts,
        communicators::{Communicator, Communicators},
        proxy::{Carried, ProxyOperation, STEP_STATES, path_name},
    },
    identity::{Direction, Role, Scope, SpanKey},
};

/// Identity of the trace that the spans go to.
pub(super) struct Ids<'a> {
    pub(super) trace_id: TraceId,
    pub(super) root_id: SpanId,
    pub(super) scope: &'a Scope,
}

/// A part and what is known around it.
pub(super) struct Part<'a> {
    pub(super) part: &'a RankOperation,
    /// All parts that go out together.
    pub(super) parts: &'a [Box<RankOperation>],
    pub(super) communicator: Option<&'a Communicator>,
    pub(super) communicators: &'a Communicators,
    pub(super) clock: &'a Clock,
    /// Arrival against the other parts' median, where that means something.
    pub(super) lag_ns: Option<i64>,
    pub(super) fallback: &'a Arc<Resource>,
}

impl Part<'_> {
    /// Appends the part's spans; returns the time that they cover.
    pub(super) fn spans(
        &self,
        ids: &Ids<'_>,
        function: Option<Function>,
        spans: &mut Vec<Span>,
        counts: &mut SpanCounts,
    ) -> Range {
        let part = self.part;
        // The two ends of a message are of different functions; `function` is of one of them.
        let function = match part.direction() {
            Direction::None => function,
            Direction::Send => Some(Function::Send),
            Direction::Recv => Some(Function::Recv),
        };
        let resource = resource_of(part, self.communicator, self.communicators, self.fallback);
        let key = SpanKey::rank(Role::Rank, part.rank, part.direction());
        let rank_id = key.span_id(&ids.trace_id);

        let (api, launch) = (part.api_times(), part.launch_times());
        // What must be inside, known or not; the children's own unknown ends are taken from here.
        let mut range = Range::EMPTY;
        for ns in [api.0, api.1, launch.0, launch.1, part.device.0, part.device.1] {
            range.hold(ns);
        }
        if range == Range::EMPTY {
            range.hold(part.launched_ns);
            range.hold(part.last_ns);
        }
        range.hold(part.cut_ns);
        let device = Range::of(part.device, range);
        for channel in &part.channels {
            let (start, stop) = channel.times();
            range.hold(start);
            range.hold(stop);
        }
        for verdict in &part.verdicts {
            range.hold(verdict.time_ns);
        }
        for proxy in &part.proxies {
            range.hold(proxy.start_ns);
            range.hold(proxy.stop_ns);
        }

        let child = |key: SpanKey, name, range: Range, attributes, events| Span {
            resource: resource.clone(),
            trace_id: ids.trace_id,
            span_id: key.span_id(&ids.trace_id),
            parent_span_id: Some(rank_id),
            name,
            start_unix_ns: self.clock.unix_ns(range.start),
            end_unix_ns: self.clock.unix_ns(range.end),
            attributes,
            events,
            links: Vec::new(),
            error: None,
        };
        let rank_attribute = || ("ccl.rank", Value::Int(i64::from(part.rank)));

        counts.count(Role::Rank);
        spans.push(Span {
            parent_span_id: Some(ids.root_id),
            attributes: self.attributes(function),
            links: self.links(ids),
            error: verdict::error(part),
            ..child(
                key,
                names::rank(function, part.direction()),
                range,
                Vec::new(),
                verdict::events(part, self.clock),
            )
        });
        if api.0 != 0 {
            counts.count(Role::Enqueue);
            let inner = Range::of(
                api,
                Range {
                    start: api.0,
                    end: api.0,
                },
            );
            let key = SpanKey {
                role: Role::Enqueue,
                ..key
            };
            spans.push(child(key, "enqueue", inner, vec![rank_attribute()], Vec::new()));
        }
        if launch.0 != 0 {
            counts.count(Role::Launch);
            let inner = Range::of(
                launch,
                Range {
                    start: launch.0,
                    end: launch.0,
                },
            );
            let key = SpanKey {
                role: Role::Launch,
                ..key
            };
            spans.push(child(key, "launch", inner, vec![rank_attribute()], Vec::new()));
        }
        for channel in &part.channels {
            counts.count(Role::KernelChannel);
            let inner = Range::of(channel.times(), device);
            let key = SpanKey {
                role: Role::KernelChannel,
                channel: u32::from(channel.channel),
                ..key
            };
            let mut attributes = vec![
                rank_attribute(),
                ("ccl.channel.id", Value::Int(i64::from(channel.channel))),
                timing_source(channel.device_ns().is_some()),
            ];
            attributes.extend(channel.device_ns().map(|ns| ("ccl.device.duration", seconds(ns))));
            attributes.extend(self.device_uncertainty(channel));
            spans.push(child(key, "kernel channel", inner, attributes, Vec::new()));
        }
        for proxy in &part.proxies {
            counts.count(Role::Proxy);
            let inner = Range::of((proxy.start_ns, proxy.stop_ns), range);
            let direction = if proxy.send {
                Direction::Send
            } else {
                Direction::Recv
            };
            let key = SpanKey {
                role: Role::Proxy,
                rank: part.rank,
                channel: u32::from(proxy.channel),
                peer: proxy.peer,
                direction,
                index: proxy.index,
            };
            let name = if proxy.send { "proxy send" } else { "proxy recv" };
            let mut attributes = vec![rank_attribute()];
            proxy_attributes(proxy, &mut attributes);
            spans.push(child(
                key,
                name,
                inner,
                attributes,
                self.state_events(proxy, inner),
            ));
            let proxy_id = key.span_id(&ids.trace_id);
            for carried in &proxy.carried {
                counts.count(Role::Carrier);
                let within = |ns: u64| ns.clamp(inner.start, inner.end);
                let (start, stop) = (carried.start_ns, carried.stop_ns);
                let times = Range {
                    start: within(start),
                    end: if stop == 0 {
                        inner.end
                    } else {
                        within(stop.max(start))
                    },
                };
                let key = SpanKey {
                    role: Role::Carrier,
                    index: key.index << 23
                        | u32::from(carried.resends & 7) << 20
                        | carried.carrier.step & 0xf_ffff,
                    ..key
                };
                let name = match (carried.carrier.port, proxy.send) {
                    (Some(_), _) => "rdma write",
                    (None, true) => "socket send",
                    (None, false) => "socket recv",
                };
                spans.push(Span {
                    parent_span_id: Some(proxy_id),
                    error: carried.failed.then(|| "its path failed".into()),
                    ..child(
                        key,
                        name,
                        times,
                        self.carrier_attributes(carried, proxy.numbering),
                        Vec::new(),
                    )
                });
            }
        }
        range
    }

    /// What carried a step: port, queue pair and, where the kernel's probes saw that, its device; or the socket.
    fn carrier_attributes(&self, carried: &Carried, numbering: Option<Numbering>) -> Vec<Attribute> {
        let carrier = &carried.carrier;
        let mut attributes = vec![
            ("ccl.rank", Value::Int(i64::from(self.part.rank))),
            ("ccl.proxy.step", Value::Int(i64::from(carrier.step))),
            ("ccl.message.size", int(carried.bytes)),
        ];
        match carrier.port {
            Some(port) => {
                attributes.push(("ccl.network.port", Value::Int(i64::from(port))));
                attributes.push(("ccl.network.path", Value::Static(path_name(carried.backup))));
                attributes.push(("rdma.qp.number", Value::Int(i64::from(carrier.number))));
                // Of its requests the last one, which tells the receiver of it.
                let id = numbering.map(|numbering| int(numbering.wr_id(carrier.step)));
                attributes.extend(id.map(|id| ("rdma.wr.id", id)));
                attributes.push(("rdma.wr.opcode", Value::Static("RDMA_WRITE_WITH_IMM")));
                let said = self.communicators.said_port(self.part.pid, carrier.port);
                let gid = said.and_then(|said| said.gid.as_ref());
                attributes.extend(gid.map(|gid| ("rdma.port.gid", Value::Text(Arc::clone(gid)))));
                attributes.extend(port_attributes(
                    self.communicators,
                    self.part.pid,
                    carrier.port,
                    carrier.number,
                ));
            }
            None => attributes.push(("ccl.network.descriptor", Value::Int(i64::from(carrier.number)))),
        }
        if carried.resends > 0 {
            attributes.push(("ccl.network.resend.count", Value::Int(i64::from(carried.resends))));
        }
        if carried.stop_ns == 0 || carried.failed {
            attributes.push(("ccl.complete", Value::Bool(false)));
        }
        attributes
    }

    fn attributes(&self, function: Option<Function>) -> Vec<Attribute> {
        let part = self.part;
        let mut attributes = Vec::with_capacity(14);
        attributes.push(("ccl.operation.name", Value::Static(names::function(function))));
        attributes.push(("ccl.operation.sequence", int(part.seq)));
        if let Some(communicator) = self.communicator {
            attributes.push(("ccl.communicator.id", Value::Text(communicator.id.clone())));
        }
        attributes.push(("ccl.rank", Value::Int(i64::from(part.rank))));
        if let Some(member) = self
            .communicator
            .and_then(|communicator| communicator.member(part.pid, part.rank))
        {
            attributes.push(("ccl.rank.local", Value::Int(i64::from(member.local_rank))));
        }
        if part.direction() != Direction::None {
            attributes.push(("ccl.peer.rank", Value::Int(i64::from(part.peer))));
        }
        attributes.push(("ccl.message.size", int(bytes_of(part))));
        if let Some(description) = &part.description {
            attributes.push(("ccl.channel.count", Value::Int(i64::from(description.channels))));
            if description.tid != 0 {
                attributes.push(("thread.id", Value::Int(i64::from(description.tid))));
            }
        }
        if part.replay != 0 {
            attributes.push(("ccl.graph.replay", Value::Int(i64::from(part.replay))));
        }
        attributes.push(timing_source(part.is_by_device()));
        if part.device.0 != 0 && part.device.1 >= part.device.0 {
            attributes.push(("ccl.device.duration", seconds(part.device.1 - part.device.0)));
        }
        if let Some(lag_ns) = self.lag_ns {
            attributes.push(("ccl.straggler.lag", Value::Double(lag_ns as f64 / 1e9)));
        }
        if let Some(arrival) = part.arrived_last() {
            attributes.push(("ccl.wait.rank", Value::Int(i64::from(arrival.rank))));
            attributes.push(("ccl.wait.duration", seconds(arrival.wait_ns)));
        }
        attributes.push(("ccl.complete", Value::Bool(part.complete)));
        attributes
    }

    /// How far off the host's times of a channel can be, by what is known of the device's clock.
    fn device_uncertainty(&self, channel: &KernelChannel) -> Option<Attribute> {
        let part = self.part;
        let member = self.communicator?.member(part.pid, part.rank)?;
        let clock = self.communicators.device_clock(part.pid, member.device)?;
        let off = clock.uncertainty_at(channel.device_ns().map(|_| channel.start_timer_ns)?);
        Some(("ccl.clock.device.uncertainty", seconds(off)))
    }

    fn links(&self, ids: &Ids<'_>) -> Vec<SpanLink> {
        let part = self.part;
        let mut links = Vec::new();
        if part.direction() == Direction::Recv
            && let Some(send) = part.instance().and_then(|key| send_of(&key, &ids.trace_id))
        {
            links.push(link(ids.trace_id, send, "send"));
        }
        let awaited: BTreeMap<u32, Option<Whereabouts>> = part
            .verdicts
            .iter()
            .filter(|verdict| verdict.culprit != part.rank)
            .map(|verdict| (verdict.culprit, verdict.instead))
            .collect();
        links.extend(
            awaited
                .into_iter()
                .map(|(rank, instead)| self.awaited_link(ids, rank, instead)),
        );
        links.extend(
            part.awaited_in
                .map(|waits| elsewhere(&waits, ids.scope, "awaited_in")),
        );
        let delays = part.delayed_by.iter();
        links.extend(delays.map(|(trace_id, span_id)| link(*trace_id, *span_id, "delayed_by")));
        if let Some(description) = &part.description
            && description.group_depth > 1
            && description.group != 0
            && !part.captured()
            && let Some(watched) = self.communicators.process(part.pid)
        {
            let trace_id = group_key(watched.identity, description.group).trace_id(ids.scope);
            links.push(link(
                trace_id,
                SpanKey::of(Role::Group).span_id(&trace_id),
                "group",
            ));
        }
        links
    }

    /// To what a rank was in that this one waited for. That is the same operation, whoever watches that rank, unless it is seen
    /// that it never came to it.
    fn awaited_link(&self, ids: &Ids<'_>, rank: u32, instead: Option<Whereabouts>) -> SpanLink {
        let part = self.part;
        let failed = part.aborted || part.cut_ns != 0;
        // Parts are in the order of their ranks.
        let came = self.parts.binary_search_by_key(&rank, |other| other.rank).is_ok();
        match instead {
            Some(instead) if failed && !came => instead_link(&instead, ids.scope),
            _ => awaited_link(ids.trace_id, rank, part.direction()),
        }
    }

    /// One event for each state that the steps were in, at its first occurrence.
    fn state_events(&self, proxy: &ProxyOperation, range: Range) -> Vec<SpanEvent> {
        let entered = STEP_STATES
            .iter()
            .zip(&proxy.sums)
            .filter(|(_, sum)| sum.count > 0);
        let mut events: Vec<SpanEvent> = entered
            .map(|(state, sum)| SpanEvent {
                unix_ns: self.clock.unix_ns(sum.first_ns.clamp(range.start, range.end)),
                name: state.name().unwrap_or("unknown"),
                attributes: vec![
                    ("ccl.proxy.state.duration", seconds(sum.total_ns)),
                    ("ccl.proxy.state.max", seconds(sum.max_ns)),
                    ("ccl.proxy.state.count", Value::Int(i64::from(sum.count))),
                ],
            })
            .collect();
        if proxy.progress_ns != 0 {
            events.push(SpanEvent {
                unix_ns: self
                    .clock
                    .unix_ns(proxy.progress_ns.clamp(range.start, range.end)),
                name: "in_progress",
                attributes: Vec::new(),
            });
        }
        events.sort_by_key(|event| event.unix_ns);
        events
    }
}

fn timing_source(by_device: bool) -> Attribute {
    ("ccl.timing.source", Value::Static(timing_source_of(by_device)))
}

/// Whose times an operation's or channel's are.
pub(crate) fn timing_source_of(by_device: bool) -> &'static str {
    if by_device { "device" } else { "host" }
}

fn proxy_attributes(proxy: &ProxyOperation, attributes: &mut Vec<Attribute>) {
    attributes.push(("ccl.channel.id", Value::Int(i64::from(proxy.channel))));
    attributes.push(("ccl.peer.rank", Value::Int(i64::from(proxy.peer))));
    attributes.push(("ccl.proxy.steps", Value::Int(i64::from(proxy.steps))));
    if proxy.steps_done > 0 {
        attributes.push(("ccl.proxy.steps.done", Value::Int(i64::from(proxy.steps_done))));
        attributes.push(("ccl.proxy.step.max", seconds(proxy.max_step_ns)));
        attributes.push(("ccl.message.size", int(proxy.bytes)));
    }
    attributes.push(("ccl.timing.source", Value::Static("proxy")));
}
