//! What is wrong with the job, across ranks: one finding for each operation that somebody waits in.
//!
//! Each waiting rank's library gives a verdict of its own ([`RankOperation::verdicts`]). A finding joins those of one operation: who is waited
//! for and why, who waits, since when, and whether it has ended. Terminal, summary, page and trace files show the same findings.
//!
//! # States of a row
//! | state | who moves a row there |
//! |---|---|
//! | open | a verdict (`Findings::judged`) |
//! | open, reported | `Findings::take_news`, some time after the last verdict that changed it: the verdicts of the other ranks come within milliseconds |
//! | ended | the end of the operation on any rank (`Findings::ended`): the others follow, or had a culprit of their own. An abort is no end |
//!
//! # Invariants
//! - A row's verdict is the gravest of its ranks' last ones: a hang before a late rank, then the cause that counts first, then the newest.
//! - At most 1,024 rows are kept. The oldest ended row makes room, else the new one is counted and left out.

use std::{collections::BTreeMap, fmt::Write as _, sync::Arc};

use ringsight_exporters::{
    model::{self, TraceId},
    ranks::Ranks,
};
use ringsight_records::Cause;
use rustc_hash::FxHashMap;

use crate::{
    clock::Clock,
    correlate::{RankOperation, Verdict, communicators::Communicators},
    identity::{InstanceKey, Scope},
    lag::WaitedFor,
    spans::operation_name,
};

/// Rows that are kept.
const LIMIT: usize = 1024;
/// How long a row waits for the verdicts of other ranks before it is news, nanoseconds.
const SETTLE_NS: u64 = 150_000_000;

/// What the ranks of one operation said.
#[derive(Debug)]
struct Row {
    trace_id: TraceId,
    name: &'static str,
    /// By waiting rank: its last verdict, and since when its part has been in progress.
    said: BTreeMap<u32, (Verdict, u64)>,
    /// When the first verdict was given.
    first_ns: u64,
    ended_ns: Option<u64>,
    /// When something changed that has not been reported.
    changed_ns: Option<u64>,
    /// What was reported last.
    reported: Option<(Cause, u32, bool)>,
}

impl Row {
    /// The verdict that stands for the row; there is always one.
    fn gravest(&self) -> Option<&Verdict> {
        let verdicts = self.said.values().map(|(verdict, _)| verdict);
        verdicts.max_by_key(|verdict| {
            let precedence = std::cmp::Reverse(verdict.cause);
            (verdict.hang, precedence, verdict.time_ns)
        })
    }

    /// What a report of the row would say.
    fn outcome(&self) -> Option<(Cause, u32, bool)> {
        self.gravest()
            .map(|verdict| (verdict.cause, verdict.culprit, verdict.hang))
    }
}

/// All rows.
#[derive(Debug, Default)]
pub struct Findings {
    rows: FxHashMap<InstanceKey, Row>,
    /// In the order of their first verdict.
    order: Vec<InstanceKey>,
    hangs: u64,
    left_out: u64,
}

impl Findings {
    /// A rank's watchdog has given a verdict, the last one of `part`.
    pub(crate) fn judged(&mut self, part: &RankOperation, scope: &Scope) {
        let (Some(verdict), Some(key)) = (part.verdicts.last(), part.instance()) else {
            return;
        };
        if !self.rows.contains_key(&key) && self.order.len() >= LIMIT && !self.make_room() {
            self.left_out += 1;
            return;
        }
        let row = self.rows.entry(key).or_insert_with(|| {
            self.order.push(key);
            Row {
                trace_id: key.trace_id(scope),
                name: operation_name(part.function(), key.kind),
                said: BTreeMap::new(),
                first_ns: verdict.time_ns,
                ended_ns: None,
                changed_ns: None,
                reported: None,
            }
        });
        if let Some(function) = part.function() {
            row.name = operation_name(Some(function), key.kind);
        }
        let was_hang = row.gravest().is_some_and(|verdict| verdict.hang);
        let begun_ns = match verdict.begun_ns {
            0 => part.begun_ns().unwrap_or(verdict.time_ns),
            begun_ns => begun_ns,
        };
        let begun_ns = begun_ns.min(verdict.time_ns);
        row.said.insert(part.rank, (*verdict, begun_ns));
        row.ended_ns = None;
        let now = row.outcome();
        if now != row.reported {
            row.changed_ns.get_or_insert(verdict.time_ns);
        }
        if !was_hang && now.is_some_and(|(_, _, hang)| hang) {
            self.hangs += 1;
        }
    }

    /// A rank's part has ended. One that was aborted is no end: the ranks waited in vain.
    pub(crate) fn ended(&mut self, part: &RankOperation) {
        if self.rows.is_empty() || part.aborted {
            return;
        }
        if let Some(row) = part.instance().and_then(|key| self.rows.get_mut(&key))
            && row.ended_ns.is_none()
        {
            let end_ns = part.latest_ns();
            row.ended_ns = Some(end_ns);
            row.changed_ns.get_or_insert(end_ns);
        }
    }

    /// Forgets the oldest row that has ended and was reported.
    fn make_room(&mut self) -> bool {
        let is_over = |key: &InstanceKey| {
            let row = self.rows.get(key);
            row.is_none_or(|row| row.ended_ns.is_some() && row.changed_ns.is_none())
        };
        let Some(at) = self.order.iter().position(is_over) else {
            return false;
        };
        self.rows.remove(&self.order.remove(at));
        true
    }

    /// Operations that a watchdog has called a hang, ended or not.
    #[must_use]
    pub fn hangs(&self) -> u64 {
        self.hangs
    }

    /// Whether ranks wait in an operation now.
    #[must_use]
    pub fn any_open(&self) -> bool {
        self.rows.values().any(|row| row.ended_ns.is_none())
    }

    /// Operations that were left out for want of room.
    #[must_use]
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Rows that changed at least [`SETTLE_NS`] before `now_ns` since the last call, the oldest first; all that changed if no more verdicts
    /// will come.
    pub(crate) fn take_news(
        &mut self,
        now_ns: u64,
        is_last: bool,
        communicators: &Communicators,
        clock: &Clock,
    ) -> Vec<model::Finding> {
        let mut news = Vec::new();
        if self.rows.is_empty() {
            return news;
        }
        for key in &self.order {
            let Some(row) = self.rows.get_mut(key) else {
                continue;
            };
            let is_settled = |since| is_last || now_ns.saturating_sub(since) >= SETTLE_NS;
            if !row.changed_ns.is_some_and(is_settled) {
                continue;
            }
            row.changed_ns = None;
            row.reported = row.outcome();
            news.extend(to_model(key, row, communicators, clock));
        }
        news
    }

    /// Every row, the oldest first.
    #[must_use]
    pub(crate) fn rows(&self, communicators: &Communicators, clock: &Clock) -> Vec<model::Finding> {
        let rows = self
            .order
            .iter()
            .filter_map(|key| Some((key, self.rows.get(key)?)));
        rows.filter_map(|(key, row)| to_model(key, row, communicators, clock))
            .collect()
    }

    /// Whom the ranks of an operation waited for, if watchdogs gave a verdict on it.
    pub(crate) fn waited_for(&self, key: &InstanceKey) -> Option<WaitedFor> {
        if self.rows.is_empty() {
            return None;
        }
        let row = self.rows.get(key)?;
        let verdict = row.gravest()?;
        let until_ns = row.ended_ns.unwrap_or(verdict.time_ns);
        let begun_ns = row.said.values().map(|(_, begun_ns)| *begun_ns).min()?;
        Some(WaitedFor {
            culprit: verdict.culprit,
            waited_ns: until_ns.saturating_sub(begun_ns),
            until_ns,
        })
    }
}

fn to_model(
    key: &InstanceKey,
    row: &Row,
    communicators: &Communicators,
    clock: &Clock,
) -> Option<model::Finding> {
    let verdict = row.gravest()?;
    let communicator = communicators.get(key.comm);
    let culprit = communicator
        .and_then(|known| known.of_rank(verdict.culprit))
        .map(|member| model::Place {
            pid: member.pid,
            host: Arc::clone(&member.watched.host),
        });
    let last_ns = row.said.values().map(|(verdict, _)| verdict.time_ns).max()?;
    let waited_ns = row
        .said
        .values()
        .map(|(verdict, begun_ns)| row.ended_ns.unwrap_or(verdict.time_ns).saturating_sub(*begun_ns))
        .max()?;
    let mut model = model::Finding {
        trace_id: row.trace_id,
        operation: row.name,
        communicator: key.comm,
        communicator_name: communicator.map_or_else(|| "".into(), |known| Arc::clone(&known.name)),
        ranks: key.ranks,
        sequence: key.seq,
        replay: key.replay,
        pair: key.pair,
        cause: verdict.cause.name(),
        hang: verdict.hang,
        culprit: verdict.culprit,
        culprit_place: culprit,
        waiting: row
            .said
            .keys()
            .copied()
            .filter(|rank| *rank != verdict.culprit)
            .collect(),
        waited_ns,
        first_unix_ns: clock.unix_ns(row.first_ns),
        unix_ns: clock.unix_ns(row.ended_ns.unwrap_or(last_ns)),
        ended: row.ended_ns.is_some(),
        text: String::new(),
        next_step: String::new(),
    };
    model.text = sentence(verdict, &model);
    model.next_step = next_step(verdict.cause, verdict.culprit, model.culprit_place.as_ref());
    Some(model)
}

/// `rank 3 (pid 7553, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s`.
fn sentence(verdict: &Verdict, row: &model::Finding) -> String {
    let operation = row.operation_words();
    let mut text = format!("rank {}", row.culprit);
    // Writing to a string does not fail.
    let _ = match &row.culprit_place {
        Some(model::Place { pid, host }) if host.is_empty() => write!(text, " (pid {pid})"),
        Some(model::Place { pid, host }) => write!(text, " (pid {pid}, host {host})"),
        None => write!(text, " (not watched here)"),
    };
    text += &match verdict.cause {
        Cause::RankDead => format!(" is dead: its process is gone in {operation}"),
        Cause::DeviceFault => format!(": its device has failed in {operation}"),
        Cause::PeerAborted => {
            format!(" has aborted or destroyed the communicator before {operation} was done")
        }
        Cause::RankStopped => format!(" is stopped; the others wait for it in {operation}"),
        Cause::NoAnswer => format!(" does not answer; the others wait for it in {operation}"),
        Cause::MetadataMismatch => format!(" has called something else than the others in {operation}"),
        Cause::NotLaunched => format!(" has not launched {operation}"),
        Cause::QueuedBehindCompute => format!(" has launched {operation}, but its stream has not come to it"),
        Cause::StuckKernel => format!(" stopped moving first in {operation}"),
        Cause::StuckNic => match verdict.nic.as_ref().filter(|nic| !nic.device().is_empty()) {
            Some(nic) => format!(
                " carries nothing over {}:{} in {operation}",
                nic.device(),
                nic.port
            ),
            None => format!(" carries nothing over its network in {operation}"),
        },
    };
    let waited = row.waited_ns as f64 / 1e9;
    match (&row.waiting[..], row.ended) {
        ([], _) => {}
        (one, false) if one.len() == 1 => {
            let _ = write!(text, "; rank {} has waited {waited:.1} s", one[0]);
        }
        (more, false) => {
            let ranks: Ranks = more.iter().copied().collect();
            let _ = write!(text, "; ranks {ranks} have waited {waited:.1} s");
        }
        (_, true) => {
            let _ = write!(text, "; it ended after {waited:.1} s");
        }
    }
    text
}

/// What to do next about a verdict. `place` is the culprit's process, if it is known.
#[must_use]
pub fn next_step(cause: Cause, culprit: u32, place: Option<&model::Place>) -> String {
    let (pid, on) = match place {
        Some(model::Place { pid, host }) if host.is_empty() => (pid.to_string(), String::new()),
        Some(model::Place { pid, host }) => (pid.to_string(), format!(" on host {host}")),
        None => ("PID".to_owned(), format!(" on the node of rank {culprit}")),
    };
    match cause {
        Cause::NotLaunched | Cause::QueuedBehindCompute => {
            format!("see where it is: py-spy dump --pid {pid}{on}")
        }
        Cause::RankStopped => format!("look who stopped it, then: kill -CONT {pid}{on}"),
        Cause::RankDead => format!("read its log, and `dmesg` for the OOM killer or an Xid{on}"),
        Cause::DeviceFault => format!("read `dmesg` for an Xid, and nvidia-smi -q{on}"),
        Cause::PeerAborted => format!("read the log of rank {culprit}: it left for a reason of its own"),
        Cause::NoAnswer => {
            format!("see whether it runs, and the network to it: ps -o stat,wchan -p {pid}{on}")
        }
        Cause::MetadataMismatch => "compare the calls in the verdict's report with the program".to_owned(),
        Cause::StuckKernel => format!("take its stack and its device's state: gdb -p {pid}, nvidia-smi{on}"),
        Cause::StuckNic => format!("look at the port: rdma link, ibstat, ethtool -S{on}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringsight_probes::sample::{Owner, Process};
    use ringsight_records::Description;

    use super::*;
    use crate::limits::Limits;

    const MS: u64 = 1_000_000;

    fn part(rank: u32, seq: u64, verdicts: &[Verdict]) -> RankOperation {
        let mut part = RankOperation::default();
        part.reset(100 + rank, 1, 0);
        (part.comm, part.seq, part.rank, part.ranks) = (7, seq, rank, 4);
        part.launched_ns = 1_000 * MS;
        part.description = Some(Box::new(Description {
            function: ringsight_records::Function::AllReduce.code(),
            ..Description::default()
        }));
        part.verdicts = verdicts.to_vec();
        part
    }

    fn said(time_ms: u64, cause: Cause, culprit: u32, hang: bool) -> Verdict {
        Verdict {
            time_ns: time_ms * MS,
            begun_ns: 0,
            cause,
            culprit,
            hang,
            nic: None,
            instead: None,
        }
    }

    fn job() -> (Communicators, Clock) {
        let mut communicators = Communicators::new(None, None, false, &Limits::default());
        let process = Process {
            pid: 103,
            start_time: 1,
            name: String::new(),
            library: "libnccl.so.2".into(),
            library_version: 0,
            host_id: "b".into(),
            host_name: "b".into(),
            owner: Owner::default(),
            instrumented: true,
            environment: Vec::new(),
        };
        communicators.watch(&Arc::new(process));
        communicators.enter(103, &entry(3), &Limits::default());
        (communicators, Clock::fixed(0))
    }

    fn entry(rank: u32) -> ringsight_records::pages::Communicator {
        ringsight_records::pages::Communicator {
            id: 7,
            parent: 0,
            init_start_ns: 1,
            init_end_ns: 2,
            rank,
            ranks: 4,
            local_rank: rank,
            local_ranks: 4,
            node: 0,
            nodes: 1,
            device: 0,
            channels: 1,
            name: [0; ringsight_records::vocabulary::NAME_BYTES],
            slot_bytes: 0,
            abilities: 0,
            apart: [0; ringsight_records::pages::APART_BYTES],
        }
    }

    #[test]
    fn verdicts_of_several_ranks_are_one_finding_that_is_news_once() {
        let (communicators, clock) = job();
        let mut findings = Findings::default();
        let scope = Scope::default();
        for rank in 0..3 {
            let verdict = said(3_100 + u64::from(rank), Cause::NotLaunched, 3, false);
            findings.judged(&part(rank, 750, &[verdict]), &scope);
        }
        let news =
            |findings: &mut Findings, ms: u64| findings.take_news(ms * MS, false, &communicators, &clock);
        assert!(
            news(&mut findings, 3_120).is_empty(),
            "the others' verdicts may follow"
        );
        let [found] = &news(&mut findings, 3_300)[..] else {
            panic!("one finding")
        };
        assert_eq!(
            found.text,
            "rank 3 (pid 103, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s"
        );
        assert_eq!(
            (found.state(), found.hang, &found.waiting[..]),
            ("HANG", false, &[0, 1, 2][..])
        );
        assert_eq!(
            found.next_step,
            "see where it is: py-spy dump --pid 103 on host b"
        );
        assert!(news(&mut findings, 9_000).is_empty(), "nothing has changed");

        // The late rank becomes a hang: news, with the same culprit.
        findings.judged(
            &part(1, 750, &[said(62_000, Cause::NotLaunched, 3, true)]),
            &scope,
        );
        let changed = news(&mut findings, 63_000);
        assert_eq!((changed.len(), changed[0].hang, findings.hangs()), (1, true, 1));
        assert_eq!(
            findings.waited_for(&part(0, 750, &[]).instance().unwrap()),
            Some(WaitedFor {
                culprit: 3,
                waited_ns: 61_000 * MS,
                until_ns: 62_000 * MS
            })
        );

        // And it ends.
        let mut over = part(2, 750, &[]);
        over.device = (1_000 * MS, 70_000 * MS);
        findings.ended(&over);
        let ended = news(&mut findings, 71_000);
        assert_eq!((ended.len(), ended[0].state()), (1, "ENDED"));
        assert!(
            ended[0].text.ends_with("; it ended after 69.0 s"),
            "{}",
            ended[0].text
        );
        assert_eq!(findings.rows(&communicators, &clock).len(), 1);
    }

    #[test]
    fn the_gravest_verdict_stands_for_the_operation() {
        let (communicators, clock) = job();
        let mut findings = Findings::default();
        let scope = Scope::default();
        findings.judged(&part(0, 1, &[said(3_000, Cause::NotLaunched, 2, false)]), &scope);
        findings.judged(&part(1, 1, &[said(2_900, Cause::RankDead, 3, true)]), &scope);
        findings.judged(&part(2, 1, &[said(3_100, Cause::StuckKernel, 0, true)]), &scope);
        let rows = findings.rows(&communicators, &clock);
        assert_eq!((rows[0].cause, rows[0].culprit), ("RANK_DEAD", 3));
    }

    #[test]
    fn room_is_made_of_what_has_ended_and_the_rest_is_counted() {
        let (communicators, clock) = job();
        let mut findings = Findings::default();
        let scope = Scope::default();
        let verdict = [said(3_000, Cause::NotLaunched, 3, true)];
        for seq in 0..LIMIT as u64 + 1 {
            findings.judged(&part(0, seq, &verdict), &scope);
        }
        assert_eq!((findings.order.len(), findings.left_out()), (LIMIT, 1));
        findings.ended(&part(0, 5, &[]));
        let _ = findings.take_news(0, true, &communicators, &clock);
        findings.judged(&part(0, 5_000, &verdict), &scope);
        assert_eq!((findings.order.len(), findings.left_out()), (LIMIT, 1));
    }

    #[test]
    fn every_cause_has_a_next_step() {
        for cause in Cause::ALL {
            assert!(!next_step(*cause, 1, None).is_empty(), "{cause}");
        }
    }
}
