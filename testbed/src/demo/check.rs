//! Comparison of the collector's summary with the ranks' truth.

use std::collections::{BTreeMap, BTreeSet};

use ringsight_records::Kind;

use super::{
    lateness,
    report::Problems,
    summary::{Operation, Summary},
    truth::{Configuration, Truth},
};

pub(crate) use super::report::Expectation;
pub use super::report::Report;

/// Compares. Every difference becomes a line in [`Report::problems`].
pub(crate) fn check(truths: &[Truth], summary: &Summary, expectation: &Expectation<'_>) -> Report {
    let first = truths.first().cloned().unwrap_or_default();
    let mut report = Report {
        ranks: truths.len() as u32,
        collectives: first.collectives.len(),
        messages: truths.iter().map(|truth| truth.sent.len()).sum(),
        spans: summary.spans.clone(),
        events: summary
            .records
            .iter()
            .map(|(kind, events)| (kind.clone(), events.received))
            .collect(),
        lost: summary.lost,
        delays: expectation.configuration.delays.len(),
        attach_ms: summary.attach_ms,
        loss: first
            .loss
            .first()
            .into_iter()
            .chain(first.loss.last())
            .copied()
            .collect(),
        accuracy: first.accuracy.last().copied().unwrap_or_default(),
        loop_ms: truths.iter().map(|truth| truth.loop_ns).max().unwrap_or(0) as f64 / 1e6,
        ..Report::default()
    };
    let mut problems = Problems::default();
    check_training(truths, expectation.configuration, &mut problems);
    check_collectives(truths, summary, &mut report, &mut problems);
    lateness::check_verdicts(truths, summary, expectation, &mut report, &mut problems);
    check_messages(truths, summary, &mut problems);
    check_events(truths, summary, &mut problems);
    check_spans(truths, summary, expectation, &mut report, &mut problems);
    check_outputs(summary, expectation, &mut report, &mut problems);
    report.problems = problems.lines;
    if problems.more > 0 {
        report.problems.push(format!("and {} more", problems.more));
    }
    report.ok = report.problems.is_empty();
    report
}

/// What is wrong with the training alone.
pub(crate) fn training_problems(truths: &[Truth], configuration: &Configuration) -> Vec<String> {
    let mut problems = Problems::default();
    check_training(truths, configuration, &mut problems);
    problems.lines
}

/// The library did its work: every rank computed the same.
fn check_training(truths: &[Truth], configuration: &Configuration, problems: &mut Problems) {
    problems.expect(truths.len() == configuration.ranks as usize, || {
        format!(
            "{} ranks gave account, {} were started",
            truths.len(),
            configuration.ranks
        )
    });
    let Some(first) = truths.first() else { return };
    problems.expect(first.loss.len() == configuration.steps as usize, || {
        format!("{} losses after {} steps", first.loss.len(), configuration.steps)
    });
    for truth in truths {
        let same = truth
            .loss
            .iter()
            .map(|x| x.to_bits())
            .eq(first.loss.iter().map(|x| x.to_bits()));
        problems.expect(same, || {
            format!("rank {} saw other losses than rank {}", truth.rank, first.rank)
        });
        problems.expect(truth.weights == first.weights, || {
            format!(
                "rank {} ended with other weights than rank {}",
                truth.rank, first.rank
            )
        });
        let kinds = |truth: &Truth| {
            truth
                .collectives
                .iter()
                .map(|c| (c.name.clone(), c.bytes))
                .collect::<Vec<_>>()
        };
        problems.expect(kinds(truth) == kinds(first), || {
            format!(
                "rank {} called other collectives than rank {}",
                truth.rank, first.rank
            )
        });
        problems.expect(
            truth.collectives.iter().all(|c| c.arrived_ns >= c.queued_ns),
            || format!("rank {}: a collective's arrival was not noted", truth.rank),
        );
        problems.expect(
            truth.collectives.iter().all(|c| c.left_ns >= c.arrived_ns),
            || format!("rank {}: a collective's end was not noted", truth.rank),
        );
    }
    // Enough steps to have learnt something: the data went round, or it could not have.
    if let (Some(start), Some(end)) = (first.loss.first(), first.loss.last())
        && configuration.steps >= 50
    {
        problems.expect(end < start, || format!("the loss went from {start} to {end}"));
    }
}

fn check_collectives(truths: &[Truth], summary: &Summary, report: &mut Report, problems: &mut Problems) {
    let found = summary.collectives();
    let Some(first) = truths.first() else { return };
    problems.expect(found.len() == first.collectives.len(), || {
        format!(
            "the collector has {} collectives, each rank called {}",
            found.len(),
            first.collectives.len()
        )
    });
    let communicators: BTreeSet<String> = found.iter().map(|op| op.communicator.to_string()).collect();
    problems.expect(communicators.len() <= 1, || {
        format!("one communicator became {}", communicators.len())
    });
    let traces: BTreeSet<&str> = summary.operations.iter().map(|op| op.trace_id.as_str()).collect();
    problems.expect(traces.len() == summary.operations.len(), || {
        format!(
            "{} operations share {} trace ids",
            summary.operations.len(),
            traces.len()
        )
    });
    for pair in found.windows(2) {
        problems.expect(pair[1].sequence == pair[0].sequence + 1, || {
            format!(
                "collective {} is followed by {}",
                pair[0].sequence, pair[1].sequence
            )
        });
    }
    for (index, operation) in found.iter().enumerate().take(first.collectives.len()) {
        check_collective(index, operation, truths, report, problems);
    }
}

/// A collective has all ranks, with their processes, times in order, and calls when the ranks say they made them.
fn check_collective(
    index: usize,
    found: &Operation,
    truths: &[Truth],
    report: &mut Report,
    problems: &mut Problems,
) {
    let what = || format!("collective {index} ({} {})", found.name, found.sequence);
    let expected = &truths[0].collectives[index];
    problems.expect(found.name == expected.name, || {
        format!("{} was called as {}", what(), expected.name)
    });
    problems.expect(found.bytes == expected.bytes, || {
        format!(
            "{} has {} bytes instead of {}",
            what(),
            found.bytes,
            expected.bytes
        )
    });
    problems.expect(found.complete, || format!("{} is marked incomplete", what()));
    problems.expect(found.by_rank.len() == truths.len(), || {
        format!(
            "{} shows {} of {} ranks",
            what(),
            found.by_rank.len(),
            truths.len()
        )
    });
    for (part, truth) in found.by_rank.iter().zip(truths) {
        problems.expect(part.rank == truth.rank && part.pid == truth.pid, || {
            format!(
                "{}: rank {} is in process {}, not {}",
                what(),
                truth.rank,
                truth.pid,
                part.pid
            )
        });
        problems.expect(
            part.device_start_ns <= part.device_end_ns && part.api_start_ns <= part.device_end_ns,
            || format!("{}: rank {} ends before it starts", what(), part.rank),
        );
        let Some(call) = truth.collectives.get(index) else {
            continue;
        };
        let outside = call
            .called_ns
            .saturating_sub(part.api_start_ns)
            .max(part.api_start_ns.saturating_sub(call.returned_ns));
        report.worst_clock_error_us = report.worst_clock_error_us.max(outside as f64 / 1e3);
        problems.expect(outside < 1_000_000, || {
            format!(
                "{}: rank {}'s call is {:.3} ms outside of when it was made",
                what(),
                part.rank,
                outside as f64 / 1e6
            )
        });
    }
}

/// Each message is an operation of its sender and its receiver.
fn check_messages(truths: &[Truth], summary: &Summary, problems: &mut Problems) {
    let mut expected: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    for truth in truths {
        for message in &truth.sent {
            *expected.entry((truth.rank, message.peer)).or_default() += 1;
        }
    }
    let sent: usize = truths.iter().map(|truth| truth.sent.len()).sum();
    let found: Vec<_> = summary
        .operations
        .iter()
        .filter(|op| op.name == "send_recv")
        .collect();
    problems.expect(found.len() == sent, || {
        format!("the collector has {} messages, {sent} were sent", found.len())
    });
    // A pair of ranks that sends both ways (two ranks in a ring) counts as one set here.
    let mut by_pair: BTreeMap<BTreeSet<u32>, (u64, u64)> = BTreeMap::new();
    for ((from, to), count) in expected {
        by_pair.entry(BTreeSet::from([from, to])).or_default().0 += count;
    }
    for message in found {
        by_pair
            .entry(message.by_rank.iter().map(|part| part.rank).collect())
            .or_default()
            .1 += 1;
    }
    for (pair, (sent, found)) in by_pair {
        problems.expect(sent == found, || {
            format!("ranks {pair:?} exchanged {sent} messages, the collector has {found}")
        });
    }
}

/// The library's own counters against what arrived.
fn check_events(truths: &[Truth], summary: &Summary, problems: &mut Problems) {
    problems.expect(summary.lost == 0, || format!("{} events were lost", summary.lost));
    problems.expect(summary.unfinished == 0, || {
        format!("{} operations did not end", summary.unfinished)
    });
    problems.expect(truths.iter().all(|truth| !truth.events.is_empty()), || {
        "the library's own counters could not be read".to_owned()
    });
    for kind in Kind::ALL {
        let count = |events: &BTreeMap<String, u64>| events.get(kind.name()).copied().unwrap_or(0);
        // Dense kinds count while a reader has armed the ring, which is from attaching on; sparse kinds count always,
        // and what came before the collector stood was not its to see.
        let sparse = Kind::SPARSE & kind.bit() != 0;
        let emitted: u64 = truths
            .iter()
            .map(|truth| count(&truth.events) - if sparse { count(&truth.events_at_gate) } else { 0 })
            .sum();
        let events = summary.records.get(kind.name()).copied().unwrap_or_default();
        problems.expect(events.received == emitted, || {
            format!(
                "{kind}: the library counted {emitted} events, the collector received {}",
                events.received
            )
        });
        problems.expect(events.lost == 0, || {
            format!("{kind}: {} events were lost", events.lost)
        });
    }
    let ring_lost: u64 = truths.iter().map(|truth| truth.ring_lost).sum();
    problems.expect(ring_lost == 0, || {
        format!("{ring_lost} events found the ring full")
    });
}

fn check_spans(
    truths: &[Truth],
    summary: &Summary,
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    let collectives: u64 = truths.iter().map(|truth| truth.collectives.len() as u64).sum();
    let messages: u64 = truths
        .iter()
        .map(|truth| (truth.sent.len() + truth.received.len()) as u64)
        .sum();
    let operations = collectives + messages;
    let spans = |kind: &str| summary.spans_of(kind);
    let roots = truths.first().map_or(0, |truth| truth.collectives.len()) as u64 + messages / 2;
    problems.expect(spans("root") == roots, || {
        format!("{} root spans for {roots} operations", spans("root"))
    });
    for kind in ["rank", "enqueue", "launch"] {
        problems.expect(spans(kind) == operations, || {
            format!(
                "{} {kind} spans for {operations} operations of ranks",
                spans(kind)
            )
        });
    }
    problems.expect(spans("kernel_channel") >= operations, || {
        format!(
            "{} kernel channel spans for {operations} operations of ranks",
            spans("kernel_channel")
        )
    });
    // Each message goes out in a group with the one that comes in.
    let groups: u64 = truths.iter().map(|truth| truth.sent.len() as u64).sum();
    problems.expect(spans("group") == groups, || {
        format!("{} group spans for {groups} groups", spans("group"))
    });
    if expectation.configuration.nodes > 1 {
        problems.expect(spans("proxy") > 0, || "no proxy spans between nodes".to_owned());
    }
    report.probe_hits_per_op = summary.probe_hits as f64 / operations.max(1) as f64;
    // What a job does before its pages are found.
    problems.expect(report.probe_hits_per_op <= 0.1, || {
        format!(
            "{:.2} probe hits for an operation, though the ring has room",
            report.probe_hits_per_op
        )
    });
}

fn check_outputs(
    summary: &Summary,
    expectation: &Expectation<'_>,
    report: &mut Report,
    problems: &mut Problems,
) {
    for file in expectation.outputs {
        match file.metadata() {
            Ok(data) if data.len() > 0 => report.outputs.push(file.display().to_string()),
            Ok(_) => problems.add(format!("{} is empty", file.display())),
            Err(error) => problems.add(format!("{}: {error}", file.display())),
        }
    }
    let exporters = expectation.outputs.len() + usize::from(expectation.otlp);
    problems.expect(summary.exporters.len() == exporters, || {
        format!("{} exporters for {exporters} outputs", summary.exporters.len())
    });
}

#[cfg(test)]
#[path = "check_tests.rs"]
mod tests;
