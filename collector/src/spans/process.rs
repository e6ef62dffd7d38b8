//! Spans in traces of one process: groups, host-timed calls, unfinished operations.

use std::sync::Arc;

use ringsight_exporters::model::{Resource, Span, Value};
use ringsight_probes::sample::{Call, HostCall};
use ringsight_records::Function;

use super::{Range, SpanMaker, group_key, int, link, names, resource_of, seconds, verdict};
use crate::{
    clock::Clock,
    correlate::{
        Group, HostGroup, RankOperation,
        communicators::{Communicators, Watched},
    },
    identity::{InstanceKey, Role, SpanKey, TraceKind},
};

/// `ncclInProgress`: what a call on a non-blocking communicator returns when nothing is wrong.
const IN_PROGRESS: i32 = 7;

impl SpanMaker {
    /// An operation that may go on where nobody sees it: a trace of its own, linked to where the operation's rank span will be if
    /// a later collector sees it end.
    pub fn unfinished(
        &mut self,
        part: &RankOperation,
        now_ns: u64,
        communicators: &Communicators,
        clock: &Clock,
        spans: &mut Vec<Span>,
    ) {
        let Some(watched) = communicators.process(part.pid) else {
            return;
        };
        let communicator = communicators.get(part.comm);
        let key = InstanceKey {
            comm: watched.identity,
            seq: u64::from(part.op),
            ranks: 0,
            replay: part.replay,
            kind: TraceKind::Unfinished,
            pair: None,
        };
        let trace_id = key.trace_id(&self.scope);
        let mut range = Range::EMPTY;
        for ns in [part.api_times().0, part.launched_ns, part.device.0, part.last_ns] {
            range.hold(ns);
        }
        if range == Range::EMPTY {
            return;
        }
        let mut attributes = vec![
            (
                "ccl.operation.name",
                Value::Static(names::function(part.function())),
            ),
            ("ccl.rank", Value::Int(i64::from(part.rank))),
            ("ccl.operation.sequence", int(part.seq)),
            ("ccl.complete", Value::Bool(false)),
        ];
        attributes.extend(
            communicator.map(|communicator| ("ccl.communicator.id", Value::Text(communicator.id.clone()))),
        );
        let links = part.instance().map(|instance| {
            let trace_id = instance.trace_id(&self.scope);
            let span_id = SpanKey::rank(Role::Rank, part.rank, part.direction()).span_id(&trace_id);
            link(trace_id, span_id, "operation")
        });
        self.counts.count(Role::Unfinished);
        spans.push(Span {
            resource: resource_of(part, communicator, communicators, &self.fallback),
            trace_id,
            span_id: SpanKey::rank(Role::Unfinished, part.rank, part.direction()).span_id(&trace_id),
            parent_span_id: None,
            name: "ccl.operation.unfinished",
            start_unix_ns: clock.unix_ns(range.start),
            end_unix_ns: clock.unix_ns(range.end.max(now_ns)),
            attributes,
            events: verdict::events(part, clock),
            links: links.into_iter().collect(),
            error: verdict::error(part).or_else(|| Some(verdict::UNFINISHED.into())),
        });
    }

    /// A group that the caller opened, linked to its operations.
    pub fn group(
        &mut self,
        group: &Group,
        communicators: &Communicators,
        clock: &Clock,
        spans: &mut Vec<Span>,
    ) {
        let Some(watched) = communicators.process(group.pid) else {
            return;
        };
        let trace_id = group_key(watched.identity, group.number).trace_id(&self.scope);
        let range = Range::of(
            (group.api.0, group.end_ns()),
            Range {
                start: group.api.0,
                end: group.api.0,
            },
        );
        let mut attributes = vec![
            ("ccl.group.number", Value::Int(i64::from(group.number))),
            ("ccl.group.operations", Value::Int(i64::from(group.operations))),
            ("ccl.timing.source", Value::Static("host")),
        ];
        if group.plan.0 != 0 && group.plan.1 >= group.plan.0 {
            attributes.push(("ccl.group.planning", seconds(group.plan.1 - group.plan.0)));
        }
        let links = group.members.iter().map(|(key, rank, direction)| {
            let trace_id = key.trace_id(&self.scope);
            link(
                trace_id,
                SpanKey::rank(Role::Rank, *rank, *direction).span_id(&trace_id),
                "group",
            )
        });
        let links = links.collect();
        self.counts.count(Role::Group);
        spans.push(Span {
            resource: group_resource(group, watched, communicators),
            trace_id,
            span_id: SpanKey::of(Role::Group).span_id(&trace_id),
            parent_span_id: None,
            name: "group",
            start_unix_ns: clock.unix_ns(range.start),
            end_unix_ns: clock.unix_ns(range.end),
            attributes,
            events: Vec::new(),
            links,
            error: None,
        });
    }

    /// A group of calls into a library without probe functions, linked to them.
    pub fn host_group(
        &mut self,
        group: &HostGroup,
        communicators: &Communicators,
        clock: &Clock,
        spans: &mut Vec<Span>,
    ) {
        let Some(watched) = communicators.process(group.pid) else {
            return;
        };
        let trace_id =
            host_key(TraceKind::Group, watched.identity, group.api.0, group.tid).trace_id(&self.scope);
        let mut attributes = vec![
            ("ccl.system.name", Value::Static("nccl")),
            ("ccl.group.operations", Value::Int(i64::from(group.operations))),
            ("ccl.timing.source", Value::Static("host")),
            ("thread.id", Value::Int(i64::from(group.tid))),
        ];
        if !watched.version.is_empty() {
            attributes.push(("ccl.system.version", Value::Text(watched.version.clone())));
        }
        let links = group.members.iter().map(|start_ns| {
            let key = host_key(TraceKind::HostCall, watched.identity, *start_ns, group.tid);
            let trace_id = key.trace_id(&self.scope);
            link(trace_id, SpanKey::of(Role::HostCall).span_id(&trace_id), "group")
        });
        let links = links.collect();
        self.counts.count(Role::Group);
        spans.push(Span {
            resource: watched.resource.clone(),
            trace_id,
            span_id: SpanKey::of(Role::Group).span_id(&trace_id),
            parent_span_id: None,
            name: "group",
            start_unix_ns: clock.unix_ns(group.api.0),
            end_unix_ns: clock.unix_ns(group.api.1.max(group.api.0)),
            attributes,
            events: Vec::new(),
            links,
            error: error_of(group.result),
        });
    }

    /// A call into a library without probe functions: what is known is when the caller was inside it. `group` is when the
    /// group that it was made in began. Group calls make no span by themselves.
    pub fn call(
        &mut self,
        call: &HostCall,
        group: Option<u64>,
        communicators: &Communicators,
        clock: &Clock,
        spans: &mut Vec<Span>,
    ) {
        let Call::Operation {
            function,
            count,
            data_type,
            reduce_op,
            peer,
            comm,
            ..
        } = &call.call
        else {
            return;
        };
        let Some(watched) = communicators.process(call.pid) else {
            return;
        };
        let key = |kind, start_ns| host_key(kind, watched.identity, start_ns, call.tid);
        let trace_id = key(TraceKind::HostCall, call.start_ns).trace_id(&self.scope);
        let links = group.map(|start_ns| {
            let trace_id = key(TraceKind::Group, start_ns).trace_id(&self.scope);
            link(trace_id, SpanKey::of(Role::Group).span_id(&trace_id), "group")
        });
        let mut attributes = vec![
            ("ccl.system.name", Value::Static("nccl")),
            ("ccl.operation.name", Value::Static(function.name())),
            ("ccl.timing.source", Value::Static("host")),
            ("ccl.message.count", int(*count)),
            // The handle means something within its process only: it is no communicator id.
            (
                "ccl.communicator.handle",
                Value::Text(format!("{comm:#x}").into()),
            ),
            ("thread.id", Value::Int(i64::from(call.tid))),
        ];
        if !watched.version.is_empty() {
            attributes.push(("ccl.system.version", Value::Text(watched.version.clone())));
        }
        if let Some(data_type) = data_type {
            attributes.push(("ccl.data_type", Value::Static(data_type.name())));
            attributes.push((
                size_name(*function),
                int(count.saturating_mul(data_type.size() as u64)),
            ));
        }
        attributes.extend(reduce_op.map(|op| ("ccl.reduction", Value::Static(op.name()))));
        if *peer >= 0 {
            let name = if function.is_p2p() {
                "ccl.peer.rank"
            } else {
                "ccl.root_rank"
            };
            attributes.push((name, Value::Int(i64::from(*peer))));
        }
        self.counts.count(Role::HostCall);
        spans.push(Span {
            resource: watched.resource.clone(),
            trace_id,
            span_id: SpanKey::of(Role::HostCall).span_id(&trace_id),
            parent_span_id: None,
            name: function.name(),
            start_unix_ns: clock.unix_ns(call.start_ns),
            end_unix_ns: clock.unix_ns(call.end_ns.unwrap_or(call.start_ns).max(call.start_ns)),
            attributes,
            events: Vec::new(),
            links: links.into_iter().collect(),
            error: error_of(call.result),
        });
    }
}

/// What the bytes of a call's `count` are: nccl-tests' size, or, where that is `count` times the ranks of a communicator of
/// which only the handle is known, one rank's part.
const fn size_name(function: Function) -> &'static str {
    match function {
        Function::AllGather
        | Function::ReduceScatter
        | Function::AlltoAll
        | Function::Gather
        | Function::Scatter => "ccl.message.size_per_rank",
        Function::AllReduce | Function::Broadcast | Function::Reduce | Function::Send | Function::Recv => {
            "ccl.message.size"
        }
    }
}

/// What a thread of a process called at a time. A group goes by its first `ncclGroupStart`.
fn host_key(kind: TraceKind, process: u64, start_ns: u64, tid: u32) -> InstanceKey {
    InstanceKey {
        comm: process,
        seq: start_ns,
        ranks: 0,
        replay: tid,
        kind,
        pair: None,
    }
}

/// What a result code other than success is called in a span.
fn error_of(result: Option<i32>) -> Option<Arc<str>> {
    let failed = result.filter(|result| *result != 0 && *result != IN_PROGRESS)?;
    Some(format!("the call returned ncclResult_t {failed}").into())
}

/// The resource of the rank that all of a group's operations are of; the process's if they are several ranks'.
fn group_resource(group: &Group, watched: &Watched, communicators: &Communicators) -> Arc<Resource> {
    let mut of_members = group.members.iter().map(|(key, rank, _)| {
        let member = communicators.get(key.comm)?.member(group.pid, *rank)?;
        Some(&member.resource)
    });
    match of_members.next() {
        Some(Some(first)) if of_members.all(|other| other.is_some_and(|other| Arc::ptr_eq(first, other))) => {
            first.clone()
        }
        _ => watched.resource.clone(),
    }
}
