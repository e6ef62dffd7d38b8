//! Lines of OTLP JSON, as the collector writes them into files.

use serde_json::Value;

/// The elements of the array `holder[key]`; none if there is no such array.
pub(crate) fn list<'a>(holder: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    holder[key].as_array().into_iter().flatten()
}

/// The spans of a line, each behind its resource. Lines of other signals have none.
pub(crate) fn spans(line: &Value) -> impl Iterator<Item = (&Value, &Value)> {
    list(line, "resourceSpans").flat_map(|of| {
        let spans = list(of, "scopeSpans").flat_map(|scope| list(scope, "spans"));
        spans.map(|span| (&of["resource"], span))
    })
}

/// An attribute of a resource, a span or an event, whatever its type is.
pub(crate) fn attribute<'a>(holder: &'a Value, key: &str) -> Option<&'a Value> {
    let found = list(holder, "attributes").find(|attribute| attribute["key"] == key)?;
    found["value"].as_object()?.values().next()
}
