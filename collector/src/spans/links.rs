//! Links between spans of operations that wait for each other.

use ringsight_exporters::model::{SpanLink, TraceId};

use super::link;
use crate::{
    correlate::Whereabouts,
    identity::{Direction, Role, Scope, SpanKey},
};

/// Link `awaited`, to the awaited rank's part of the same operation. `direction` is that of the waiting rank's data.
pub(super) fn awaited_link(trace_id: TraceId, rank: u32, direction: Direction) -> SpanLink {
    let awaited = SpanKey::rank(Role::Rank, rank, direction.opposite());
    link(trace_id, awaited.span_id(&trace_id), "awaited")
}

/// Link to the operation that an awaited rank is in (`held_up`), or was in last (`last`).
pub(super) fn instead_link(instead: &Whereabouts, scope: &Scope) -> SpanLink {
    elsewhere(instead, scope, if instead.over { "last" } else { "held_up" })
}

/// Link to a rank's part of any operation.
pub(super) fn elsewhere(place: &Whereabouts, scope: &Scope, kind: &'static str) -> SpanLink {
    let trace_id = place.key.trace_id(scope);
    let span = SpanKey::rank(Role::Rank, place.rank, place.direction);
    link(trace_id, span.span_id(&trace_id), kind)
}
