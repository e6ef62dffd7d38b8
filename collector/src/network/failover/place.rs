//! Where a connection's failover stands in the trace of a port's failure.

use ringsight_exporters::model::{SpanId, TraceId};

use crate::identity::{Role, SpanKey};

/// Span id of a port failure's root.
pub(super) fn root(trace_id: &TraceId) -> SpanId {
    SpanKey::of(Role::PortFailover).span_id(trace_id)
}

/// Where a connection's failover stands in the trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Trace of the port's failure.
    pub(super) trace_id: TraceId,
    /// Number of the connection among those that left the port.
    pub(super) index: u32,
}

impl Place {
    /// The port's span.
    pub(super) fn root(&self) -> SpanId {
        root(&self.trace_id)
    }

    /// One of the connection's.
    pub(super) fn span_id(&self, role: Role) -> SpanId {
        let key = SpanKey {
            index: self.index,
            ..SpanKey::of(role)
        };
        key.span_id(&self.trace_id)
    }
}
