//! The collector attached to a training: DDP and FSDP on all GPUs, started by torchrun, on this library and on NCCL.
//!
//! Each rank counts the calls of its process groups, and says between which two times it made them. As many spans of its process must
//! begin between these times.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    path::Path,
    time::Instant,
};

use anyhow::{Context, Result};
use fs_err::{self as fs, File};
use serde::Deserialize;
use serde_json::Value;

use super::{
    super::step::{StepResult, Steps, says_ok, verdict_of, with_last_words},
    collector::{self, Attach, SPANS, prepared, seen},
    torch::{self, Library},
};
use crate::{
    demo::summary::Summary,
    otlp::{self, attribute},
};

/// What FSDP and DDP need: who calls for less has not done what is to be observed.
const NEEDED: [&str; 3] = ["all_reduce", "all_gather", "reduce_scatter"];

/// What a rank says of itself.
#[derive(Debug, Deserialize)]
struct Rank {
    rank: u32,
    pid: u32,
    begin_ns: u64,
    end_ns: u64,
    /// By operation.
    calls: BTreeMap<String, u64>,
}

/// Collectives of one operation and one process that the collector has seen in that time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    spans: u64,
    /// Of these, whole ones with the device's times.
    by_device: u64,
    /// And those with the host's.
    by_host: u64,
}

/// By process and operation.
type All = BTreeMap<(u32, String), Seen>;

/// 64 bits are written as text.
fn integer(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// Adds what a line has of collectives that a rank called in its time. They are those spans with the operation's name that are one rank's part, or, on
/// a library without probes, one call.
fn add(line: &Value, ranks: &[Rank], library: Library, all: &mut All) -> Option<()> {
    for (resource, span) in otlp::spans(line) {
        let pid = attribute(resource, "process.pid").and_then(integer)?;
        let Some(rank) = ranks.iter().find(|rank| u64::from(rank.pid) == pid) else {
            continue;
        };
        let of = |name| attribute(span, name);
        let is_one = match library {
            Library::Ours => of("ccl.rank").is_some(),
            Library::Nccl => of("ccl.communicator.handle").is_some(),
        };
        let begun = integer(&span["startTimeUnixNano"])?;
        let is_meant = is_one && (rank.begin_ns..rank.end_ns).contains(&begun);
        let Some(name) = of("ccl.operation.name").filter(|_| is_meant) else {
            continue;
        };
        let seen = all.entry((rank.pid, name.as_str()?.to_owned())).or_default();
        seen.spans += 1;
        let source = of("ccl.timing.source").and_then(Value::as_str);
        let lasts = of("ccl.device.duration").and_then(Value::as_f64);
        let is_whole = of("ccl.complete") == Some(&Value::Bool(true));
        seen.by_device +=
            u64::from(source == Some("device") && lasts.is_some_and(|seconds| seconds > 0.0) && is_whole);
        seen.by_host += u64::from(source == Some("host"));
    }
    Some(())
}

/// All that the collector has written.
fn read(file: &Path, ranks: &[Rank], library: Library) -> Result<All> {
    let opened = File::open(file)?;
    let mut all = All::new();
    for (number, line) in BufReader::new(opened).lines().enumerate() {
        let line: Value =
            serde_json::from_str(&line?).with_context(|| format!("line {} of the spans", number + 1))?;
        add(&line, ranks, library, &mut all)
            .with_context(|| format!("line {} of the spans cannot be read", number + 1))?;
    }
    Ok(all)
}

/// Whether each rank's collectives are all there, timed as they can be on this library, and nothing else.
fn compare(ranks: &[Rank], all: &All, library: Library) -> StepResult {
    let mut wrong = Vec::new();
    let mut calls = 0;
    for rank in ranks {
        for needed in NEEDED {
            if rank.calls.get(needed).is_none_or(|count| *count == 0) {
                wrong.push(format!("rank {} says that it called no {needed}", rank.rank));
            }
        }
        for (operation, called) in &rank.calls {
            calls += called;
            let seen = all
                .get(&(rank.pid, operation.clone()))
                .copied()
                .unwrap_or_default();
            let timed = match library {
                Library::Ours => seen.by_device,
                Library::Nccl => seen.by_host,
            };
            if seen.spans != *called || timed != *called {
                wrong.push(format!(
                    "rank {}: {} of {called} {operation}, {timed} of them timed",
                    rank.rank, seen.spans
                ));
            }
        }
        let others = all
            .iter()
            .filter(|((pid, operation), _)| *pid == rank.pid && !rank.calls.contains_key(operation));
        wrong.extend(others.map(|((_, operation), seen)| {
            format!(
                "rank {}: {} {operation} that it did not call",
                rank.rank, seen.spans
            )
        }));
    }
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    let by = match library {
        Library::Ours => "devices",
        Library::Nccl => "the host",
    };
    Ok(format!(
        "all {calls} collectives of {} ranks, timed by {by}",
        ranks.len()
    ))
}

/// What is lost need not be of these ranks' time; it is told of all the same.
fn nothing_lost(summary: &Summary) -> StepResult {
    let (lost, overwritten) = (summary.lost, summary.device_events_overwritten);
    let text = format!("{lost} events lost, {overwritten} overwritten on devices");
    verdict_of(lost == 0 && overwritten == 0, text)
}

fn ranks(folder: &Path, count: usize) -> Result<Vec<Rank>> {
    let of_rank = |number: usize| {
        let file = folder.join(format!("rank-{number}.json"));
        let text = fs::read_to_string(&file)?;
        serde_json::from_str(&text).with_context(|| format!("what rank {number} says"))
    };
    (0..count).map(of_rank).collect()
}

/// Trains with the collector attached, and compares what both say.
fn observe(steps: &Steps<'_>, folder: &Path, count: usize, library: Library, losses: &[&str]) -> StepResult {
    let mut arguments = vec!["--observed"];
    let text = |error: anyhow::Error| format!("{error:#}");
    arguments.push(torch::text(folder).map_err(text)?);
    arguments.extend(losses);
    let command = torch::torchrun(steps, count, library, "train.py", &arguments).map_err(text)?;
    let ended = seen(steps, folder, vec![command], Attach::Named, &[]);
    let said = fs::read_to_string(folder.join("job-0.log")).unwrap_or_default();
    let lost = collector::judged(ended, nothing_lost).map_err(|reason| with_last_words(&reason, &said))?;
    says_ok(&said).map_err(|reason| with_last_words(&reason, &said))?;
    let ranks = ranks(folder, count).map_err(text)?;
    let all = read(&folder.join(SPANS), &ranks, library).map_err(text)?;
    let found = compare(&ranks, &all, library)?;
    Ok(format!("{found}; {lost}"))
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let count = steps.host.gpus.len();
    let losses = steps.file("losses.json");
    // Of an earlier run.
    let _ = fs::remove_file(&losses);
    let file = torch::text(&losses)?.to_owned();
    let mut against = Vec::new();
    for (name, library) in [("nccl", Library::Nccl), ("ours", Library::Ours)] {
        let folder = prepared(steps, name)?;
        let arguments = match library {
            Library::Nccl => vec!["--write", &file],
            Library::Ours => against.clone(),
        };
        let begun = Instant::now();
        let verdict = observe(steps, &folder, count, library, &arguments);
        // Megabytes that nobody reads.
        let _ = fs::remove_file(folder.join(SPANS));
        if library == Library::Nccl && losses.is_file() {
            against = vec!["--against", &file];
        }
        steps.enter_after(&format!("{name}-{count}"), begun.elapsed(), verdict);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rank(calls: u64) -> Rank {
        let all = NEEDED.map(|operation| (operation.to_owned(), calls));
        Rank {
            rank: 3,
            pid: 77,
            begin_ns: 1000,
            end_ns: 2000,
            calls: all.into(),
        }
    }

    fn text(key: &str, value: &str) -> Value {
        json!({"key": key, "value": {"stringValue": value}})
    }

    /// A line as the collector writes them, of spans with these attributes.
    fn line(pid: &str, spans: &[(&str, u64, Vec<Value>)]) -> Value {
        let spans: Vec<Value> = spans
            .iter()
            .map(|(name, begun, more)| {
                let mut attributes = vec![text("ccl.operation.name", name)];
                attributes.extend(more.clone());
                json!({"startTimeUnixNano": begun.to_string(), "attributes": attributes})
            })
            .collect();
        let resource = json!({"attributes": [{"key": "process.pid", "value": {"intValue": pid}}]});
        json!({"resourceSpans": [{"resource": resource, "scopeSpans": [{"spans": spans}]}]})
    }

    fn by_device(seconds: f64) -> Vec<Value> {
        vec![
            json!({"key": "ccl.rank", "value": {"intValue": "3"}}),
            text("ccl.timing.source", "device"),
            json!({"key": "ccl.device.duration", "value": {"doubleValue": seconds}}),
            json!({"key": "ccl.complete", "value": {"boolValue": true}}),
        ]
    }

    fn verdict(lines: &[Value], library: Library) -> StepResult {
        let ranks = [rank(1)];
        let mut all = All::new();
        for line in lines {
            add(line, &ranks, library, &mut all).unwrap();
        }
        compare(&ranks, &all, library)
    }

    #[test]
    fn what_a_rank_called_must_be_there_and_timed_by_its_device() {
        let whole = |begun| NEEDED.map(|name| (name, begun, by_device(1e-5)));
        let ours = |lines: &[Value]| verdict(lines, Library::Ours);
        assert!(
            ours(&[line("77", &whole(1500))])
                .unwrap()
                .starts_with("all 3 collectives")
        );
        // Of another time, of another process, none, and of all ranks together.
        let elsewhere = [
            line("77", &whole(999)),
            line("77", &whole(2000)),
            line("78", &whole(1500)),
        ];
        assert!(ours(&[&[line("77", &whole(1500))], &elsewhere[..]].concat()).is_ok());
        assert!(
            ours(&elsewhere)
                .unwrap_err()
                .contains("rank 3: 0 of 1 all_gather")
        );
        let together = line("77", &[("all_reduce", 1500, vec![])]);
        assert!(ours(&[line("77", &whole(1500)), together]).is_ok());
        // One too many, one without times, one that nobody called.
        let error = ours(&[line("77", &whole(1500)), line("77", &whole(1600))]).unwrap_err();
        assert!(error.contains("rank 3: 2 of 1 all_reduce"), "{error}");
        let mut untimed = whole(1500);
        untimed[2].2 = by_device(0.0);
        let error = ours(&[line("77", &untimed)]).unwrap_err();
        assert_eq!(error, "rank 3: 1 of 1 reduce_scatter, 0 of them timed");
        let other = line("77", &[("broadcast", 1500, by_device(1e-5))]);
        let error = ours(&[line("77", &whole(1500)), other]).unwrap_err();
        assert_eq!(error, "rank 3: 1 broadcast that it did not call");
        // Metrics are in the file as well.
        assert!(ours(&[line("77", &whole(1500)), json!({"resourceMetrics": []})]).is_ok());
    }

    #[test]
    fn calls_of_a_library_without_probes_are_timed_by_the_host() {
        let call = |source| {
            vec![
                text("ccl.communicator.handle", "0x5"),
                text("ccl.timing.source", source),
            ]
        };
        let nccl = |source| {
            let spans = NEEDED.map(|name| (name, 1500, call(source)));
            verdict(&[line("77", &spans)], Library::Nccl)
        };
        assert!(nccl("host").unwrap().ends_with("timed by the host"));
        assert!(nccl("device").unwrap_err().contains("0 of them timed"));
    }

    #[test]
    fn a_training_that_called_nothing_has_shown_nothing() {
        let error = compare(&[rank(0)], &All::new(), Library::Ours).unwrap_err();
        assert!(error.contains("called no all_gather"), "{error}");
        let lost = |lost, device_events_overwritten| {
            nothing_lost(&Summary {
                lost,
                device_events_overwritten,
                ..Summary::default()
            })
        };
        assert!(lost(0, 0).is_ok());
        assert!(lost(1, 0).is_err() && lost(0, 1).is_err());
    }
}
