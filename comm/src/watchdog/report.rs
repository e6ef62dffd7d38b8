//! A verdict in the log and in the shared pages.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use ringsight_comm_base::log;
use ringsight_records::{Algorithm, Cause, Description, Protocol, verdicts::GivenVerdict};

use super::{
    Watch, events,
    in_flight::RunningOperation,
    rules::{
        evidence::{BlockingOperation, OperationRun, Position, RankAnswer, RankState},
        verdict::Verdict,
    },
};
use crate::{
    device, observe,
    op::{self, Call, Identity},
};

/// The most ranks whose states a report lists one by one.
const MAX_RANKS: usize = 32;

/// A report that is not logged yet.
pub(crate) struct Report {
    pub(super) device: i32,
    /// Without line ends.
    pub(super) lines: Vec<String>,
}

impl Report {
    /// Logs the report. That may wait a moment for the reader of the log, so it comes after everything that follows from the
    /// verdict.
    pub(crate) fn log(self) {
        log::alarm(self.device, &self.lines);
    }
}

/// The lines of a report about `op`, which has been in progress for longer than `threshold`.
pub(super) fn lines(
    watch: &Watch,
    op: &RunningOperation,
    verdict: &Verdict,
    states: &BTreeMap<u32, RankState>,
    threshold: Duration,
    now: u64,
) -> Vec<String> {
    let ms = |ns: u64| Duration::from_nanos(ns).as_millis();
    let description = observe::pages().and_then(|pages| pages.description(op.info.op));
    let ago = |ns: u64| format!("{} ms ago", ms(now.saturating_sub(ns)));
    // Later operations may have replaced the description.
    let described = |value: &dyn Fn(&Description) -> String| {
        description.as_ref().map_or_else(|| "unknown".to_owned(), value)
    };
    let launched_ns = description.as_ref().map_or(0, |of| of.launch_start_ns);
    let call = watch.checks.call_of(op.info.op);
    let mut lines = vec![
        if verdict.is_hang {
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
            described(&algorithm),
            run_name(op.run)
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
        // A constant of the device: no call.
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
        progress_source(watch),
        format!(
            "Verdict: {} ({}): {}",
            verdict.cause,
            if verdict.is_hang { "hang" } else { "late" },
            sentence(verdict)
        ),
    ];
    lines.extend(rank_lines(verdict, states));
    lines.push("==================================".to_owned());
    lines
}

/// The verdict as a sentence, such as `rank 2 has not launched it`.
pub(super) fn sentence(verdict: &Verdict) -> String {
    let since = verdict.since_ns.map(seconds);
    let mut text = match &verdict.called {
        Some(called) => format!("rank {} has called something else: {called}", verdict.culprit),
        None => verdict.cause.of_rank(verdict.culprit).to_string(),
    };
    if verdict.by_debugger {
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
    if let Some(blocking) = verdict.blocked_by {
        let _ = write!(
            text,
            "; it is in {} of communicator {:#x} since {}",
            run_name(blocking.run),
            blocking.comm,
            seconds(blocking.since_ns)
        );
    }
    if !verdict.others.is_empty() {
        let ranks: Vec<String> = verdict.others.iter().map(u32::to_string).collect();
        let _ = write!(text, " (so it is with rank {})", ranks.join(", "));
    }
    text
}

/// The text that all ranks fail with when `rank` in `op` and `peer` in `blocking` wait for each other.
pub(super) fn deadlock_text(
    rank: u32,
    op: &RunningOperation,
    call: Option<Call>,
    peer: u32,
    blocking: BlockingOperation,
) -> String {
    let call = call.map_or_else(String::new, |call| format!("{call}, "));
    format!(
        "rank {rank} is in {call}{}, and rank {peer} in {}: each waits for the other, since the ranks do not call the same \
         operations in the same order",
        run_name(op.run),
        run_name(blocking.run)
    )
}

fn run_name(run: OperationRun) -> String {
    let number = |seq: u64| match (seq >> 32, seq as u32) {
        (0, seq) => format!("{seq}"),
        (graph, node) => format!("{node} of graph {graph}, replay {}", run.replay),
    };
    match run.identity {
        Identity::Message { seq, .. } if op::is_simulated(seq) => {
            "a kernel of ncclSimulateKernelTimeout".to_owned()
        }
        Identity::Collective { seq } => format!("collective {}", number(seq)),
        Identity::Message { from, to, seq } => {
            format!("message {} from rank {from} to rank {to}", number(seq))
        }
    }
}

/// The states of the ranks, one line each, in rank order. Of too many ranks the culprit, the verdict's other ranks and the
/// first ones are listed.
fn rank_lines(verdict: &Verdict, states: &BTreeMap<u32, RankState>) -> Vec<String> {
    let mut listed: Vec<(u32, RankState)> = states.iter().map(|(rank, state)| (*rank, *state)).collect();
    listed.sort_by_key(|(rank, _)| (*rank != verdict.culprit, !verdict.others.contains(rank), *rank));
    let more = listed.len().saturating_sub(MAX_RANKS);
    listed.truncate(MAX_RANKS);
    listed.sort_by_key(|(rank, _)| *rank);
    let mut lines: Vec<String> = listed
        .iter()
        .map(|(rank, state)| rank_line(*rank, state))
        .collect();
    if more > 0 {
        lines.push(format!("and {more} more ranks"));
    }
    lines
}

fn rank_line(rank: u32, state: &RankState) -> String {
    let what = match state {
        RankState::Dead => "gone".to_owned(),
        RankState::Left => "has left the communicator".to_owned(),
        RankState::Stopped => "stopped".to_owned(),
        RankState::Traced => "held by a debugger".to_owned(),
        RankState::Silent => "no answer".to_owned(),
        RankState::SilentAlive => "no answer, but its process lives".to_owned(),
        RankState::Deadlocked(blocking) => format!(
            "in {} instead, for {}",
            run_name(blocking.run),
            seconds(blocking.since_ns)
        ),
        RankState::Answered(RankAnswer {
            position,
            is_stale: true,
            ..
        }) => format!("{}, when it was last known", position_text(position)),
        RankState::Answered(RankAnswer { position, .. }) => position_text(position),
    };
    let stall = state.stall().map_or_else(String::new, |stall| {
        format!(", waits for the network for {}: {stall}", seconds(stall.for_ns))
    });
    format!("Rank {rank}: {what}{stall}")
}

fn position_text(position: &Position) -> String {
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
        Position::Completed => "done".to_owned(),
        Position::CommunicatorEnded => "communicator ended".to_owned(),
        Position::DeviceFailed => "its device has failed".to_owned(),
        Position::WatchdogOff { called: true } => "launched, its watchdog is off".to_owned(),
        Position::WatchdogOff { called: false } => "not launched, its watchdog is off".to_owned(),
    }
}

fn seconds(ns: u64) -> String {
    format!("{:.1} s", ns as f64 / 1e9)
}

/// The plan's choices, such as `ring, simple, 2 channels`.
fn algorithm(description: &Description) -> String {
    let algorithm = Algorithm::from_code(description.algorithm).map_or("unknown", Algorithm::name);
    let protocol = Protocol::from_code(description.protocol).map_or("unknown", Protocol::name);
    format!("{algorithm}, {protocol}, {} channels", description.channels)
}

/// By what this rank knows where its own operations are.
fn progress_source(watch: &Watch) -> String {
    match &watch.tracker {
        None => "Told by: kernels".to_owned(),
        Some(tracker) => match tracker.query_so_far() {
            Some(time) if time >= events::PATIENCE => format!(
                "Told by: events, a query of which has not come back for {} ms",
                time.as_millis()
            ),
            _ => "Told by: events".to_owned(),
        },
    }
}

/// The verdict as readers of the shared pages find it.
pub(super) fn record(op: &RunningOperation, verdict: &Verdict, now: u64) -> GivenVerdict {
    let blocking = verdict.blocked_by;
    let (held_seq, (held_from, held_to)) = match blocking.map(|blocking| blocking.run.identity) {
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
        held_comm: blocking.map_or(0, |blocking| blocking.comm),
        held_seq,
        held_for_ns: blocking.map_or(0, |blocking| blocking.since_ns),
        op: op.info.op,
        replay: op.run.replay,
        rank: op.info.rank,
        culprit: verdict.culprit,
        others: u32::try_from(verdict.others.len()).unwrap_or(u32::MAX),
        peer: op.info.peer,
        held_replay: blocking.map_or(0, |blocking| blocking.run.replay),
        held_from,
        held_to,
        cause: verdict.cause.code(),
        is_hang: verdict.is_hang.into(),
        flags: op.info.flags.0,
        is_held_up: blocking.is_some().into(),
        queue_pair: verdict.stall().map_or(0, |stall| stall.queue_pair),
        port: verdict.stall().map_or(0, |stall| stall.port),
        reserved: [0; 3],
        device: verdict
            .stall()
            .map_or_else(Default::default, |stall| stall.device),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_ranks_the_culprit_is_listed() {
        let verdict = Verdict {
            others: vec![77, 91],
            ..Verdict::hang(Cause::NotLaunched, 90)
        };
        let states = |ranks| (0..ranks).map(|rank| (rank, RankState::Silent)).collect();
        let lines = rank_lines(&verdict, &states(96));
        let ranks: Vec<u32> = (0..29).chain([77, 90, 91]).collect();
        let expected: Vec<String> = ranks
            .iter()
            .map(|rank| format!("Rank {rank}: no answer"))
            .collect();
        assert_eq!(lines[..MAX_RANKS], expected);
        assert_eq!(lines[MAX_RANKS..], ["and 64 more ranks"]);
        assert_eq!(rank_lines(&verdict, &states(32)).len(), 32);
    }
}
