//! Spans as exporters and backends give them back, and what has to hold for every trace.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// A span read back.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Trace, lower-case hexadecimal.
    pub trace_id: String,
    /// Span.
    pub span_id: String,
    /// Parent, `None` for a root.
    pub parent: Option<String>,
    /// Name.
    pub name: String,
    /// Start and end, nanoseconds, as exact as the reader has them.
    pub time: (u64, u64),
    /// How much the times may be off by rounding, nanoseconds.
    pub rounding: u64,
    /// `ccl.rank`, if the span has one.
    pub rank: Option<i64>,
    /// Warnings that a backend put on it.
    pub warnings: Vec<String>,
}

/// Reads the spans of a file of OTLP JSON lines.
///
/// # Errors
/// The line that is not OTLP JSON.
pub fn read_lines(file: &Path) -> Result<Vec<Span>> {
    let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
    let mut spans = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line: Value =
            serde_json::from_str(line).with_context(|| format!("{}, line {}", file.display(), number + 1))?;
        for resource in array(&line["resourceSpans"]) {
            for scope in array(&resource["scopeSpans"]) {
                for span in array(&scope["spans"]) {
                    spans.push(otlp_span(span).with_context(|| format!("line {}: {span}", number + 1))?);
                }
            }
        }
    }
    Ok(spans)
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// OTLP JSON writes 64-bit numbers as text.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

fn otlp_span(span: &Value) -> Result<Span> {
    let rank = array(&span["attributes"])
        .find(|attribute| attribute["key"] == "ccl.rank")
        .and_then(|attribute| number(&attribute["value"]["intValue"]));
    Ok(Span {
        trace_id: text(&span["traceId"]).context("no traceId")?,
        span_id: text(&span["spanId"]).context("no spanId")?,
        parent: text(&span["parentSpanId"]).filter(|id| !id.is_empty()),
        name: text(&span["name"]).context("no name")?,
        time: (
            number(&span["startTimeUnixNano"]).context("no start")?,
            number(&span["endTimeUnixNano"]).context("no end")?,
        ),
        rounding: 0,
        rank: rank.and_then(|rank| i64::try_from(rank).ok()),
        warnings: Vec::new(),
    })
}

/// Reads a trace in the JSON of Jaeger's `/api/traces/{id}`, whose times are microseconds.
///
/// # Errors
/// If it is something else, or not exactly one trace.
pub fn read_jaeger(body: &str) -> Result<Vec<Span>> {
    let body: Value = serde_json::from_str(body).context("Jaeger's answer")?;
    let traces: Vec<_> = array(&body["data"]).collect();
    let [trace] = traces.as_slice() else {
        bail!("Jaeger gives {} traces for one id", traces.len())
    };
    array(&trace["spans"])
        .map(|span| {
            let parent = array(&span["references"])
                .find(|reference| {
                    reference["refType"] == "CHILD_OF" && reference["traceID"] == span["traceID"]
                })
                .and_then(|reference| text(&reference["spanID"]));
            let start = 1000 * number(&span["startTime"]).context("no startTime")?;
            Ok(Span {
                trace_id: text(&span["traceID"]).context("no traceID")?,
                span_id: text(&span["spanID"]).context("no spanID")?,
                parent,
                name: text(&span["operationName"]).context("no operationName")?,
                time: (
                    start,
                    start + 1000 * number(&span["duration"]).context("no duration")?,
                ),
                // Start and duration are each cut to microseconds.
                rounding: 2000,
                rank: array(&span["tags"])
                    .find(|tag| tag["key"] == "ccl.rank")
                    .and_then(|tag| tag["value"].as_i64()),
                warnings: array(&span["warnings"]).filter_map(text).collect(),
            })
        })
        .collect()
}

/// Reads a trace in the JSON of Tempo's `/api/traces/{id}`, whose ids are base64.
///
/// # Errors
/// If it is something else.
pub fn read_tempo(body: &str) -> Result<Vec<Span>> {
    let body: Value = serde_json::from_str(body).context("Tempo's answer")?;
    let mut spans = Vec::new();
    for resource in array(&body["batches"]) {
        for scope in array(&resource["scopeSpans"]) {
            for span in array(&scope["spans"]) {
                let mut span = otlp_span(span)?;
                for id in [
                    Some(&mut span.trace_id),
                    Some(&mut span.span_id),
                    span.parent.as_mut(),
                ]
                .into_iter()
                .flatten()
                {
                    if !matches!(id.len(), 16 | 32) || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                        *id = hex::encode(&base64(id).with_context(|| format!("{id} is no id"))?);
                    }
                }
                spans.push(span);
            }
        }
    }
    Ok(spans)
}

/// RFC 4648 with padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let mut bytes = Vec::new();
    let (mut bits, mut held) = (0u32, 0);
    for character in text.bytes() {
        let value = match character {
            b'A'..=b'Z' => character - b'A',
            b'a'..=b'z' => character - b'a' + 26,
            b'0'..=b'9' => character - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        held += 6;
        if held >= 8 {
            held -= 8;
            bytes.push((bits >> held) as u8);
            bits &= (1 << held) - 1;
        }
    }
    Some(bytes)
}

/// Spans by trace.
#[must_use]
pub fn by_trace(spans: Vec<Span>) -> BTreeMap<String, Vec<Span>> {
    let mut traces: BTreeMap<String, Vec<Span>> = BTreeMap::new();
    for span in spans {
        traces.entry(span.trace_id.clone()).or_default().push(span);
    }
    traces
}

/// Who made a trace's spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Makers {
    /// One collector: the root encloses everything.
    One,
    /// Several that do not talk to one another: the root's maker saw some of the ranks only, and the root may end before
    /// the others do.
    Several,
}

/// What has to hold for any trace: one root, every parent in the trace, no span id twice, nobody before its start, and
/// each child within its parent. Returns what does not.
#[must_use]
pub fn faults(trace: &[Span], makers: Makers) -> Vec<String> {
    let mut faults = Vec::new();
    let id = trace.first().map_or("", |span| span.trace_id.as_str());
    let roots = trace.iter().filter(|span| span.parent.is_none()).count();
    if roots != 1 {
        faults.push(format!("trace {id}: {roots} roots"));
    }
    let mut by_id = BTreeMap::new();
    for span in trace {
        if by_id.insert(span.span_id.as_str(), span).is_some() {
            faults.push(format!(
                "trace {id}: span {} ({}) is there twice",
                span.span_id, span.name
            ));
        }
    }
    for span in trace {
        if span.time.1 < span.time.0 {
            faults.push(format!("trace {id}: {} ends before it starts", span.name));
        }
        if let Some(parent) = &span.parent {
            match by_id.get(parent.as_str()) {
                None => faults.push(format!("trace {id}: {} is an orphan of {parent}", span.name)),
                Some(parent)
                    if (makers == Makers::One || parent.parent.is_some())
                        && (span.time.0 + span.rounding < parent.time.0
                            || span.time.1 > parent.time.1 + parent.rounding) =>
                {
                    faults.push(format!(
                        "trace {id}: {} is not within its parent {}",
                        span.name, parent.name
                    ));
                }
                Some(_) => (),
            }
        }
        for warning in &span.warnings {
            faults.push(format!("trace {id}: {}: warning: {warning}", span.name));
        }
    }
    faults
}

/// Traces of collectives of `ranks` ranks, among those of one collector, that are whole.
#[must_use]
pub fn whole_collectives(traces: &BTreeMap<String, Vec<Span>>, ranks: u32) -> usize {
    let of_collective = |trace: &&Vec<Span>| {
        trace
            .iter()
            .any(|span| span.parent.is_none() && span.name != "send_recv")
    };
    traces
        .values()
        .filter(of_collective)
        .filter(|trace| collective_faults(trace, ranks, true, Makers::One).is_empty())
        .count()
}

/// What has to hold for the trace of a collective of `ranks` ranks: a rank span for each rank under the root, and under
/// each of them its API call, its launch and at least one kernel channel; where `proxies`, a proxy operation under some.
#[must_use]
pub fn collective_faults(trace: &[Span], ranks: u32, proxies: bool, makers: Makers) -> Vec<String> {
    let mut found = faults(trace, makers);
    let id = trace.first().map_or("", |span| span.trace_id.as_str());
    let Some(root) = trace.iter().find(|span| span.parent.is_none()) else {
        return found;
    };
    let parts: Vec<_> = trace
        .iter()
        .filter(|span| span.parent.as_ref() == Some(&root.span_id))
        .collect();
    let seen: BTreeSet<_> = parts.iter().filter_map(|span| span.rank).collect();
    if parts.len() != ranks as usize || seen != (0..i64::from(ranks)).collect() {
        found.push(format!(
            "trace {id} ({}): {} rank spans, of ranks {seen:?}",
            root.name,
            parts.len()
        ));
    }
    let mut any_proxy = false;
    for part in parts {
        let below: Vec<_> = trace
            .iter()
            .filter(|span| span.parent.as_ref() == Some(&part.span_id))
            .map(|span| span.name.as_str())
            .collect();
        for (name, once) in [("enqueue", true), ("launch", true), ("kernel channel", false)] {
            let count = below.iter().filter(|below| **below == name).count();
            if count == 0 || (once && count > 1) {
                found.push(format!(
                    "trace {id}: {} of rank {:?} has {count} {name}",
                    part.name, part.rank
                ));
            }
        }
        any_proxy |= below.iter().any(|name| name.starts_with("proxy "));
    }
    if proxies && !any_proxy {
        found.push(format!(
            "trace {id} ({}): no proxy operation between nodes",
            root.name
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(id: &str, parent: Option<&str>, name: &str, rank: Option<i64>, time: (u64, u64)) -> Span {
        Span {
            trace_id: "t".to_owned(),
            span_id: id.to_owned(),
            parent: parent.map(str::to_owned),
            name: name.to_owned(),
            time,
            rounding: 0,
            rank,
            warnings: Vec::new(),
        }
    }

    fn good() -> Vec<Span> {
        let mut trace = vec![span("r", None, "all_reduce", None, (0, 100))];
        for rank in 0..2 {
            let part = format!("p{rank}");
            trace.push(span(&part, Some("r"), "all_reduce rank", Some(rank), (1, 99)));
            for name in ["enqueue", "launch", "kernel channel", "proxy send"] {
                trace.push(span(
                    &format!("{name}{rank}"),
                    Some(&part),
                    name,
                    Some(rank),
                    (2, 98),
                ));
            }
        }
        trace
    }

    #[test]
    fn faults_are_found_and_only_they() {
        type Change = fn(&mut Vec<Span>);
        assert_eq!(
            collective_faults(&good(), 2, true, Makers::One),
            Vec::<String>::new()
        );
        let cases: [(&str, Change); 10] = [
            ("0 roots", |t| drop(t.remove(0))),
            ("2 roots", |t| t[1].parent = None),
            ("orphan", |t| t[2].parent = Some("nobody".to_owned())),
            ("there twice", |t| t.push(t[3].clone())),
            ("ends before", |t| t[2].time = (9, 8)),
            ("not within", |t| t[1].time = (1, 101)),
            ("warning", |t| t[1].warnings.push("clock skew".to_owned())),
            ("1 rank spans", |t| t.retain(|s| s.rank != Some(1))),
            ("0 launch", |t| t.retain(|s| s.name != "launch")),
            ("no proxy", |t| t.retain(|s| !s.name.starts_with("proxy"))),
        ];
        for (words, change) in cases {
            let mut trace = good();
            change(&mut trace);
            let found = collective_faults(&trace, 2, true, Makers::One);
            assert!(
                found.iter().any(|line| line.contains(words)),
                "{words}: {found:?}"
            );
        }
    }

    #[test]
    fn a_root_of_several_makers_need_not_enclose_ranks_that_it_did_not_see() {
        let mut trace = good();
        trace[1].time = (0, 101);
        assert_eq!(
            collective_faults(&trace, 2, true, Makers::Several),
            Vec::<String>::new()
        );
        trace[2].time = (0, 102);
        assert_eq!(collective_faults(&trace, 2, true, Makers::Several).len(), 1);
    }

    #[test]
    fn readers_take_their_formats_and_refuse_others() {
        let lines = r#"{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"aa","spanId":"bb","name":"n",
            "startTimeUnixNano":"5","endTimeUnixNano":"7","attributes":[{"key":"ccl.rank","value":{"intValue":"3"}}]}]}]}]}"#
            .replace('\n', "");
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), &lines).unwrap();
        let spans = read_lines(file.path()).unwrap();
        assert_eq!(
            (spans.len(), spans[0].rank, spans[0].time, spans[0].parent.clone()),
            (1, Some(3), (5, 7), None)
        );
        fs::write(file.path(), "{").unwrap();
        assert!(read_lines(file.path()).is_err());

        let jaeger = r#"{"data":[{"spans":[{"traceID":"t","spanID":"s","operationName":"n","startTime":5,"duration":2,
            "references":[{"refType":"CHILD_OF","traceID":"t","spanID":"p"}],"tags":[{"key":"ccl.rank","value":1}],
            "warnings":["w"]}]}]}"#;
        let spans = read_jaeger(jaeger).unwrap();
        assert_eq!(
            (spans[0].parent.as_deref(), spans[0].rank, spans[0].time),
            (Some("p"), Some(1), (5000, 7000))
        );
        assert_eq!(spans[0].warnings, ["w"]);
        assert!(read_jaeger(r#"{"data":[]}"#).is_err());

        let tempo = r#"{"batches":[{"scopeSpans":[{"spans":[{"traceId":"AAECAwQFBgcICQoLDA0ODw==","spanId":"AAECAwQFBgc=",
            "name":"n","startTimeUnixNano":"5","endTimeUnixNano":"7"}]}]}]}"#;
        let spans = read_tempo(tempo).unwrap();
        assert_eq!(spans[0].trace_id, "000102030405060708090a0b0c0d0e0f");
        assert_eq!(spans[0].span_id, "0001020304050607");
        assert!(read_tempo("[").is_err());
    }
}
