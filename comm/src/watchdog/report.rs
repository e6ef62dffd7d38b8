//! What a verdict looks like in the log.

use std::{fmt::Write as _, time::Duration};

use ringsight_records::{Algorithm, Cause, Description, Protocol, verdicts::GivenVerdict};

use super::{
    Watch, events,
    flights::InProgress,
    message::Health,
    position::{Answer, HeldUp, Position},
    verdict::{Heard, Verdict},
};
use crate::{
    checks::{Call, Identity},
    device, log, observe, op,
};

fn seconds(ns: u64) -> String {
    format!("{:.1} s", ns as f64 / 1e9)
}

/// As in `rank 2 has not launched it`.
pub(super) fn sentence(verdict: &Verdict) -> String {
    let since = verdict.since_ns.map(seconds);
    let mut text = match &verdict.called {
        Some(called) => format!("rank {} has called something else: {called}", verdict.culprit),
        None => verdict.cause.of_rank(verdict.culprit).to_string(),
    };
    if verdict.traced {
        text += " by a debugger";
    }
    if let Some(stall) = verdict.stall() {
        let _ = write!(text, ": it {stall}");
    }
    match (verdict.cause, since) {
        (Cause::NotLaunched, Some(since)) => {
            let _ = write!(text, "; its last launch on this communicator was {since} ago");
        }
        (_, Some(since)) => {
            let _ = write!(text, ", for {since}");
        }
        _ => {}
    }
    if let Some(held) = verdict.held_up {
        let _ = write!(
            text,
            "; it is in {} of communicator {:#x} since {}",
            name(held.run.identity, held.run.replay),
            held.comm,
            seconds(held.since_ns)
        );
    }
    if !verdict.others.is_empty() {
        let ranks: Vec<String> = verdict.others.iter().map(u32::to_string).collect();
        let _ = write!(text, " (so it is with rank {})", ranks.join(", "));
    }
    text
}

/// What all ranks are told of two that wait for each other.
pub(super) fn crossing(rank: u32, op: &InProgress, call: Option<Call>, other: u32, held: HeldUp) -> String {
    let call = call.map_or_else(String::new, |call| format!("{call}, "));
    format!(
        "rank {rank} is in {call}{}, and rank {other} in {}: each waits for the other, since the ranks do not call the same \
         operations in the same order",
        name(op.run.identity, op.run.replay),
        name(held.run.identity, held.run.replay)
    )
}

fn name(identity: Identity, replay: u32) -> String {
    let graph = |seq: u64| match (seq >> 32, seq as u32) {
        (0, seq) => format!("{seq}"),
        (graph, node) => format!("{node} of graph {graph}, replay {replay}"),
    };
    match identity {
        Identity::Message { seq, .. } if op::is_simulated(seq) => {
            "a kernel of ncclSimulateKernelTimeout".to_owned()
        }
        Identity::Collective { seq } => format!("collective {}", graph(seq)),
        Identity::Message { from, to, seq } => {
            format!("message {} from rank {from} to rank {to}", graph(seq))
        }
    }
}

/// One line for each rank that is not simply running it.
fn line(rank: u32, heard: &Heard) -> String {
    let what = match heard {
        Heard::Gone => "gone".to_owned(),
        Heard::Left => "has left the communicator".to_owned(),
        Heard::Stopped => "stopped".to_owned(),
        Heard::Traced => "held by a debugger".to_owned(),
        Heard::Silent => "no answer".to_owned(),
        Heard::Busy => "no answer, but its process lives".to_owned(),
        Heard::Crossed(held) => format!(
            "in {} instead, for {}",
            name(held.run.identity, held.run.replay),
            seconds(held.since_ns)
        ),
        Heard::Answer(Answer {
            position,
            is_old: true,
            ..
        }) => format!("{}, when it was last known", at(position)),
        Heard::Answer(Answer { position, .. }) => at(position),
    };
    let stall = heard.stall().map_or_else(String::new, |stall| {
        format!(", waits for the network for {}: {stall}", seconds(stall.for_ns))
    });
    format!("Rank {rank}: {what}{stall}")
}

/// Where a rank is.
fn at(position: &Position) -> String {
    match position {
        Position::NotLaunched { idle_ns } => format!("not launched, idle {}", seconds(*idle_ns)),
        Position::Queued { since_ns } => format!("queued {}", seconds(*since_ns)),
        Position::Running {
            since_ns,
            still_ns,
            waits,
        } => {
            let waits = waits.map_or_else(String::new, |waits| format!(", {waits}"));
            format!(
                "running {}, moved {} ago{waits}",
                seconds(*since_ns),
                seconds(*still_ns)
            )
        }
        Position::Done => "done".to_owned(),
        Position::Ended => "communicator ended".to_owned(),
        Position::Faulted => "its device has failed".to_owned(),
        Position::Unwatched { called: true } => "launched, its watchdog is off".to_owned(),
        Position::Unwatched { called: false } => "not launched, its watchdog is off".to_owned(),
    }
}

/// As readers of the shared pages find it.
pub(super) fn given(op: &InProgress, verdict: &Verdict, now: u64) -> GivenVerdict {
    let held = verdict.held_up;
    let (held_seq, (held_from, held_to)) = match held.map(|held| held.run.identity) {
        None => (0, (GivenVerdict::NOBODY, GivenVerdict::NOBODY)),
        Some(Identity::Collective { seq }) => (seq, (GivenVerdict::NOBODY, GivenVerdict::NOBODY)),
        Some(Identity::Message { from, to, seq }) => (seq, (from, to)),
    };
    GivenVerdict {
        number: 0,
        time_ns: now,
        comm: op.info.comm,
        seq: op.info.seq,
        begun_ns: op.start_ns,
        held_comm: held.map_or(0, |held| held.comm),
        held_seq,
        held_for_ns: held.map_or(0, |held| held.since_ns),
        op: op.info.op,
        replay: op.run.replay,
        rank: op.info.rank,
        culprit: verdict.culprit,
        others: u32::try_from(verdict.others.len()).unwrap_or(u32::MAX),
        peer: op.info.peer,
        held_replay: held.map_or(0, |held| held.run.replay),
        held_from,
        held_to,
        cause: verdict.cause.code(),
        is_hang: verdict.hang.into(),
        flags: op.info.flags.0,
        is_held_up: held.is_some().into(),
        queue_pair: verdict.stall().map_or(0, |stall| stall.queue_pair),
        port: verdict.stall().map_or(0, |stall| stall.port),
        reserved: [0; 3],
        device: verdict
            .stall()
            .map_or_else(Default::default, |stall| stall.device),
    }
}

/// How it is done, as in `ring, simple, 2 channels`.
fn way(description: &Description) -> String {
    let algorithm = Algorithm::from_code(description.algorithm).map_or("unknown", Algorithm::name);
    let protocol = Protocol::from_code(description.protocol).map_or("unknown", Protocol::name);
    format!("{algorithm}, {protocol}, {} channels", description.channels)
}

/// What this rank knows of its own operations by.
fn told_by(watch: &Watch) -> String {
    match &watch.events {
        None => "Told by: kernels".to_owned(),
        Some(events) => match events.query_so_far() {
            Some(time) if time >= events::PATIENCE => format!(
                "Told by: events, a query of which has not come back for {} ms",
                time.as_millis()
            ),
            _ => "Told by: events".to_owned(),
        },
    }
}

/// Ranks whose state is told one by one.
const MOST: usize = 32;

/// What the ranks said, in rank order: of more than can be told the culprit, those with which it is the same, and the first.
fn of_ranks(verdict: &Verdict, heard: impl Iterator<Item = (u32, Heard)>) -> Vec<String> {
    let mut heard: Vec<(u32, Heard)> = heard.collect();
    heard.sort_by_key(|(rank, _)| (*rank != verdict.culprit, !verdict.others.contains(rank), *rank));
    let more = heard.len().saturating_sub(MOST);
    heard.truncate(MOST);
    heard.sort_by_key(|(rank, _)| *rank);
    let mut lines: Vec<String> = heard.iter().map(|(rank, heard)| line(*rank, heard)).collect();
    if more > 0 {
        lines.push(format!("and {more} more ranks"));
    }
    lines
}

/// A report that is to be said.
pub(crate) struct Report {
    pub(super) device: i32,
    pub(super) lines: Vec<String>,
}

impl Report {
    /// Says it, which may wait a moment for whoever reads the log: after everything that follows from the verdict.
    pub(crate) fn say(self) {
        log::alarm(self.device, &self.lines);
    }
}

/// The lines of a report, without line ends.
pub(super) fn lines(
    watch: &Watch,
    op: &InProgress,
    verdict: &Verdict,
    heard: impl Iterator<Item = (u32, Heard)>,
    threshold: Duration,
    now: u64,
) -> Vec<String> {
    let ms = |ns: u64| Duration::from_nanos(ns).as_millis();
    let description = observe::pages().and_then(|pages| pages.description(op.info.op));
    let ago = |ns: u64| format!("{} ms ago", ms(now.saturating_sub(ns)));
    // One that is not described any more is unknown.
    let described = |value: &dyn Fn(&Description) -> String| {
        description.as_ref().map_or_else(|| "unknown".to_owned(), value)
    };
    let launched_ns = description.as_ref().map_or(0, |of| of.launch_start_ns);
    let call = watch.checks.call_of(op.info.op);
    let mut lines = vec![
        if verdict.hang {
            "NCCL KERNEL TIMEOUT DETECTED"
        } else {
            "NCCL KERNEL WAITS"
        }
        .to_owned(),
        "=== NCCL Kernel Timeout Report ===".to_owned(),
        format!(
            "Comm: {:#x}{}, Rank: {}/{}",
            watch.comm,
            if watch.name.is_empty() {
                String::new()
            } else {
                format!(" ({})", watch.name)
            },
            watch.rank,
            watch.ranks
        ),
        format!(
            "Kernel: {}, {}, {}",
            call.map_or_else(|| "unknown".to_owned(), |call| call.to_string()),
            described(&way),
            name(op.run.identity, op.run.replay)
        ),
        format!(
            "Timeout: {} ms (threshold: {} ms)",
            ms(now.saturating_sub(op.start_ns)),
            threshold.as_millis()
        ),
        format!(
            "Channel Mask: {}",
            described(&|of| format!("{:#x}", of.channel_mask))
        ),
        // A constant of the device: asking for it calls nothing.
        format!(
            "Threads per Block: {}",
            described(&|of| {
                let threads = device::opened().map_or(1, |device| device.warp_threads());
                (u32::from(of.warps) * threads).to_string()
            })
        ),
        format!("CUDA Device: {}", watch.device),
        format!("Bytes: {}", op.info.bytes),
        format!("Stream: {}", described(&|of| format!("{:#x}", of.stream))),
        format!("Operation: {}", op.info.op),
        format!("Enqueued: {}", described(&|of| ago(of.api_start_ns))),
        format!("Launched: {}", ago(launched_ns.max(op.launched_ns))),
        format!("Started: {}", ago(op.start_ns)),
        told_by(watch),
        format!(
            "Verdict: {} ({}): {}",
            verdict.cause,
            if verdict.hang { "hang" } else { "late" },
            sentence(verdict)
        ),
    ];
    lines.extend(of_ranks(verdict, heard));
    lines.push("==================================".to_owned());
    lines
}

impl From<Health> for Heard {
    fn from(health: Health) -> Self {
        match health {
            // Of one that died everybody hears at once: this one had said goodbye.
            Health::Gone => Self::Left,
            Health::Stopped => Self::Stopped,
            Health::Traced => Self::Traced,
            Health::Alive => Self::Busy,
            Health::Unknown => Self::Silent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_ranks_those_that_matter_are_told() {
        let verdict = Verdict {
            others: vec![77, 91],
            ..Verdict::hang(Cause::NotLaunched, 90)
        };
        let heard = |ranks| (0..ranks).map(|rank| (rank, Heard::Silent));
        let lines = of_ranks(&verdict, heard(96));
        let ranks: Vec<u32> = (0..29).chain([77, 90, 91]).collect();
        let expected: Vec<String> = ranks
            .iter()
            .map(|rank| format!("Rank {rank}: no answer"))
            .collect();
        assert_eq!(lines[..MOST], expected);
        assert_eq!(lines[MOST..], ["and 64 more ranks"]);
        assert_eq!(of_ranks(&verdict, heard(32)).len(), 32);
    }
}
