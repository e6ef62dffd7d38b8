//! What a trace has to say about a link that failed under a job.

use std::{
    collections::{HashMap, HashSet},
    path::Path,
};

use anyhow::{Context, Result};
use fs_err as fs;
use serde_json::Value;

use crate::otlp::{self, list};

/// A span of an OTLP JSON file.
#[derive(Clone, Debug)]
pub struct Span(Value);

impl Span {
    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().unwrap_or_default()
    }

    fn name(&self) -> &str {
        self.text("name")
    }

    /// Unix nanoseconds.
    fn time(&self, key: &str) -> u64 {
        self.text(key).parse().unwrap_or_default()
    }

    fn events(&self) -> impl Iterator<Item = &Value> {
        list(&self.0, "events")
    }

    fn links(&self) -> impl Iterator<Item = &str> {
        list(&self.0, "links").filter_map(|link| link["spanId"].as_str())
    }

    fn attribute(&self, key: &str) -> Option<String> {
        text(&self.0, key)
    }
}

/// An attribute of a span or an event, as text.
fn text(holder: &Value, key: &str) -> Option<String> {
    let value = otlp::attribute(holder, key)?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

/// The spans of a file of OTLP JSON lines.
///
/// # Errors
/// If it cannot be read.
pub fn read(file: &Path) -> Result<Vec<Span>> {
    let text = fs::read_to_string(file)?;
    let mut spans = Vec::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).with_context(|| file.display().to_string())?;
        spans.extend(otlp::spans(&line).map(|(_, span)| Span(span.clone())));
    }
    Ok(spans)
}

/// What the spans say of failovers, for people; and what they should say and do not.
#[must_use]
pub fn look(spans: &[Span]) -> (Vec<String>, Vec<String>) {
    let by_id: HashMap<&str, &Span> = spans.iter().map(|span| (span.text("spanId"), span)).collect();
    let named = |name: &'static str| spans.iter().filter(move |span| span.name() == name);
    let (mut lines, mut problems) = (Vec::new(), Vec::new());
    let mut miss = |what: &str, is_missing: bool| {
        if is_missing {
            problems.push(what.to_owned());
        }
    };
    let (mut delayed, mut replayed) = (HashSet::new(), 0_u64);
    for span in named("failover") {
        let attribute = |key| span.attribute(key).unwrap_or_else(|| "?".to_owned());
        let number = |key| {
            span.attribute(key)
                .and_then(|text| text.parse::<u64>().ok())
                .unwrap_or_default()
        };
        lines.push(format!(
            "failover  rank {} and rank {}, channel {}: {}, {} bytes sent again, {:.1} ms in all",
            attribute("ccl.rank"),
            attribute("ccl.peer.rank"),
            attribute("ccl.channel.id"),
            attribute("ccl.failover.cause"),
            attribute("ccl.failover.replayed.size"),
            (span.time("endTimeUnixNano") as f64 - span.time("startTimeUnixNano") as f64) / 1e6,
        ));
        replayed += number("ccl.failover.replayed.size");
        for event in span.events() {
            let say = |key: &str, before: &str| text(event, key).map(|text| format!("{before}{text}"));
            let told = [
                say("rdma.device.name", " "),
                say("ccl.network.port", ", port number "),
                say("rdma.qp.number", ", queue pair "),
            ];
            lines.push(format!(
                "          {}{}",
                event["name"].as_str().unwrap_or("?"),
                told.into_iter().flatten().collect::<String>()
            ));
        }
        let names = span.events().filter_map(|event| event["name"].as_str());
        let names: Vec<&str> = names.collect();
        let place = |name| names.iter().position(|known| *known == name);
        let order = ["path_broken", "path_switched", "path_recovered", "failed_back"].map(place);
        miss(
            &format!("a failover is not break, switch, recovery and failback: {names:?}"),
            order.contains(&None) || !order.is_sorted(),
        );
        // How many is chance: what was on its way when the link went may have arrived.
        miss(
            "a failover does not say what was sent again",
            span.attribute("ccl.failover.replayed.size").is_none(),
        );
        miss(
            "a failover names no device",
            !span.events().any(|event| {
                text(event, "rdma.device.name")
                    .is_some_and(|name| name.starts_with("hca") || name.starts_with("peer"))
            }),
        );
        miss(
            "an event of a failover has no queue pair or port",
            span.events().any(|event| {
                text(event, "rdma.qp.number").is_none() || text(event, "ccl.network.port").is_none()
            }),
        );
        let waited: Vec<_> = span.links().filter_map(|id| by_id.get(id)).collect();
        miss(
            "a failover is linked to an operation that was over before",
            waited
                .iter()
                .any(|waited| waited.time("endTimeUnixNano") <= span.time("startTimeUnixNano")),
        );
        let port = by_id.get(span.text("parentSpanId"));
        miss(
            "a failover is not a part of its port's",
            port.is_none_or(|port| port.name() != "port failover"),
        );
        let of_all_reduces = waited.iter().filter(|waited| waited.name() == "all_reduce rank");
        delayed.extend(of_all_reduces.map(|waited| waited.text("spanId")));
    }
    miss("there is no failover", lines.is_empty());
    for port in named("port failover") {
        let attribute = |key| port.attribute(key).unwrap_or_else(|| "?".to_owned());
        lines.push(format!(
            "port failover  {}, port {}: {} connections, {} s until the last one went on",
            attribute("rdma.device.name"),
            attribute("rdma.port.number"),
            attribute("ccl.failover.connections"),
            attribute("ccl.failover.recovery.duration"),
        ));
    }
    let is_named = |span: &Span| {
        let has = |key| span.attribute(key).is_some();
        has("rdma.device.name") && has("rdma.port.number")
    };
    miss(
        "a port's failover does not say which port of which device",
        !named("port failover").all(is_named),
    );
    let is_linked = |from: &'static str, to: &'static str| {
        let to = |id: &str| by_id.get(id).is_some_and(|span| span.name() == to);
        named(from).any(|span| span.links().any(to))
    };
    miss(
        "no port's failover is linked to the kernel's port that was down",
        !is_linked("port failover", "rdma port down"),
    );
    miss(
        "no all_reduce is linked to what delayed it",
        !is_linked("all_reduce rank", "port failover"),
    );
    miss(
        "no failover is linked to an all_reduce that it delayed",
        delayed.is_empty(),
    );
    lines.push(format!(
        "{} parts of all_reduces waited, {replayed} bytes were sent again",
        delayed.len()
    ));

    let mut ways: HashMap<String, usize> = HashMap::new();
    let mut numbers = HashSet::new();
    // Of a rank's channel the devices of each way.
    let mut devices: HashMap<[Option<String>; 2], [HashSet<String>; 2]> = HashMap::new();
    let (mut unnumbered, mut failed, mut resent) = (0, 0, 0);
    for step in named("rdma write") {
        failed += usize::from(step.attribute("ccl.complete").as_deref() == Some("false"));
        resent += usize::from(step.attribute("ccl.network.resend.count").is_some());
        unnumbered += usize::from(step.attribute("rdma.wr.id").is_none());
        let way = step.attribute("ccl.network.path").unwrap_or_default();
        numbers.extend(step.attribute("rdma.qp.number"));
        let parent = by_id.get(step.text("parentSpanId"));
        miss(
            "an RDMA write is not below its proxy operation",
            parent.is_none_or(|parent| parent.name() != "proxy send"),
        );
        let of_rank = parent.map(|parent| ["ccl.rank", "ccl.channel.id"].map(|key| parent.attribute(key)));
        let both = devices.entry(of_rank.unwrap_or_default()).or_default();
        both[usize::from(way == "backup")].extend(step.attribute("rdma.device.name"));
        *ways.entry(way).or_default() += 1;
    }
    miss("an RDMA write has no number of its work request", unnumbered > 0);
    // A queue pair is of one device: a step that names another path than its queue pair's shows here.
    miss(
        "a device is that of a channel's primary path and of its backup",
        devices
            .values()
            .any(|[primary, backup]| !primary.is_disjoint(backup)),
    );
    miss(
        "no RDMA write names its device",
        devices.values().all(|both| both.iter().all(HashSet::is_empty)),
    );
    let of = |way: &str| ways.get(way).copied().unwrap_or(0);
    lines.push(format!(
        "{} steps over the primary path, {} over the backup",
        of("primary"),
        of("backup")
    ));
    lines.push(format!(
        "{failed} steps failed with their path, {resent} were sent again"
    ));
    miss(
        "what was sent again has no span over either path",
        replayed > 0 && (failed == 0 || resent == 0),
    );
    miss("no step went over the primary path", of("primary") == 0);
    miss("no step went over the backup", of("backup") == 0);
    miss(
        "no port of the kernel's was down",
        named("rdma port down").next().is_none(),
    );
    let joined = named("rdma queue pair")
        .filter(|span| {
            span.attribute("rdma.qp.number")
                .is_some_and(|number| numbers.contains(&number))
        })
        .filter(|span| span.attribute("ccl.channel.id").is_some())
        .count();
    lines.push(format!("{joined} of the kernel's queue pairs carried steps"));
    miss(
        "no queue pair of the kernel's is known by what it carried",
        joined == 0,
    );
    problems.sort();
    problems.dedup();
    (lines, problems)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn with(attributes: &[(&str, &str)]) -> Value {
        let pair = |(key, text): &(&str, &str)| json!({"key": key, "value": {"stringValue": text}});
        attributes.iter().map(pair).collect()
    }

    fn span(name: &str, id: &str, parent: &str, attributes: &[(&str, &str)]) -> Value {
        json!({
            "name": name, "spanId": id, "parentSpanId": parent, "attributes": with(attributes),
            "startTimeUnixNano": "10", "endTimeUnixNano": "20",
        })
    }

    fn trace() -> Vec<Value> {
        let names = [
            "path_broken",
            "path_switched",
            "path_recovered",
            "path_switched",
            "failed_back",
        ];
        let event = |name: &&str| {
            let told = [
                ("rdma.device.name", "hca0"),
                ("rdma.qp.number", "17"),
                ("ccl.network.port", "0"),
            ];
            json!({"name": name, "attributes": with(&told)})
        };
        let mut failover = span("failover", "f", "o", &[("ccl.failover.replayed.size", "64")]);
        failover["events"] = names.iter().map(event).collect();
        failover["links"] = json!([{"spanId": "a"}]);
        let named = [("rdma.device.name", "hca0"), ("rdma.port.number", "1")];
        let mut port = span("port failover", "o", "", &named);
        port["links"] = json!([{"spanId": "d"}]);
        let mut part = span("all_reduce rank", "a", "", &[]);
        part["links"] = json!([{"spanId": "o"}]);
        let write = |id, way, device, besides| {
            let told = [
                ("ccl.network.path", way),
                ("rdma.qp.number", "17"),
                ("rdma.device.name", device),
                ("rdma.wr.id", "72057594037927936"),
                besides,
            ];
            span("rdma write", id, "p", &told)
        };
        vec![
            failover,
            port,
            part,
            span("proxy send", "p", "a", &[]),
            write("w", "primary", "hca0", ("ccl.complete", "false")),
            write("x", "backup", "hca1", ("ccl.network.resend.count", "1")),
            span("rdma port down", "d", "", &[]),
            span(
                "rdma queue pair",
                "q",
                "",
                &[("rdma.qp.number", "17"), ("ccl.channel.id", "0")],
            ),
        ]
    }

    fn problems(trace: Vec<Value>) -> Vec<String> {
        look(&trace.into_iter().map(Span).collect::<Vec<_>>()).1
    }

    #[test]
    fn each_thing_that_a_trace_lacks_is_named() {
        assert_eq!(problems(trace()), Vec::<String>::new());
        for at in 0..trace().len() {
            let mut less = trace();
            less.remove(at);
            assert!(!problems(less).is_empty(), "without span {at}");
        }
        // By their first places: without the first switch the other one comes too late.
        for at in [0, 1, 2, 4] {
            let mut less = trace();
            less[0]["events"].as_array_mut().unwrap().remove(at);
            assert_eq!(problems(less).len(), 1, "without event {at}");
        }
        let mut unlinked = trace();
        unlinked[0]["links"] = json!([]);
        assert_eq!(
            problems(unlinked),
            ["no failover is linked to an all_reduce that it delayed"]
        );
        let mut over = trace();
        over[2]["endTimeUnixNano"] = json!("10");
        let linked = "a failover is linked to an operation that was over before";
        assert_eq!(problems(over), [linked]);
        // What carried a step again was told by the path that it had been sent over before.
        let mut mistold = trace();
        mistold[5]["attributes"][2] = mistold[4]["attributes"][2].clone();
        let device = "a device is that of a channel's primary path and of its backup";
        assert_eq!(problems(mistold), [device]);
        let mut unknown = trace();
        unknown[1]["attributes"].as_array_mut().unwrap().pop();
        let port = "a port's failover does not say which port of which device";
        assert_eq!(problems(unknown), [port]);
        let mut nameless = trace();
        nameless[0]["events"][1]["attributes"] = json!([]);
        assert_eq!(
            problems(nameless),
            ["an event of a failover has no queue pair or port"]
        );
    }
}
