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
//! - A process keeps as many verdicts in rows as [`Limit::Findings`] lets it. Past that its oldest row that is over makes room, else the
//!   new verdict is counted and left out.
//! - A row is over when it has been reported, and has ended or every process that spoke in it is gone.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    sync::Arc,
};

use ringsight_exporters::{
    model::{self, TraceId},
    ranks::Ranks,
};
use ringsight_records::{Cause, verdicts::Nic};
use rustc_hash::FxHashMap;

use crate::{
    clock::Clock,
    correlate::{RankOperation, Verdict, communicators::Communicators},
    deaths::NO_OPERATION,
    identity::{InstanceKey, Scope},
    lag::WaitedFor,
    limits::{LeftOut, Limit, Shared},
    spans::operation_name,
};

/// How long a row waits for the verdicts of other ranks before it is news, nanoseconds.
const SETTLE_NS: u64 = 150_000_000;

/// What one rank said last.
#[derive(Clone, Debug)]
struct Said {
    verdict: Verdict,
    /// Since when the rank's part has been in progress.
    begun_ns: u64,
    /// The rank's process.
    pid: u32,
    /// The culprit's process, which may be gone when this is shown.
    culprit: Option<model::Place>,
}

/// What the ranks of one operation said.
#[derive(Debug)]
struct Row {
    /// In the order of the rows' first verdicts.
    number: u64,
    trace_id: TraceId,
    name: &'static str,
    /// By waiting rank.
    said: BTreeMap<u32, Said>,
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
        self.said_last().map(|said| &said.verdict)
    }

    /// What was said with that verdict.
    fn said_last(&self) -> Option<&Said> {
        self.said.values().max_by_key(|said| {
            let verdict = &said.verdict;
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

/// What one process has said.
#[derive(Debug, Default)]
struct OfProcess {
    /// Verdicts that rows keep.
    verdicts: usize,
    /// Numbers of these rows.
    rows: BTreeSet<u64>,
    /// The process is gone.
    is_gone: bool,
}

/// All rows.
#[derive(Debug, Default)]
pub struct Findings {
    rows: FxHashMap<InstanceKey, Row>,
    /// By number.
    order: BTreeMap<u64, InstanceKey>,
    /// Rows that changed and have not been reported.
    changed: BTreeSet<u64>,
    /// Rows that are over.
    over: BTreeSet<u64>,
    by_process: FxHashMap<u32, OfProcess>,
    /// Verdicts that rows keep.
    verdicts: usize,
    numbers: u64,
    hangs: u64,
    left_out: LeftOut,
}

impl Findings {
    /// A rank's watchdog has given a verdict, the last one of `part`. `limit` is for the rank's process, and for all.
    pub(crate) fn judged(
        &mut self,
        part: &RankOperation,
        scope: &Scope,
        communicators: &Communicators,
        limit: Shared,
    ) {
        let (Some(verdict), Some(key)) = (part.verdicts.last(), part.instance()) else {
            return;
        };
        let spoke = self.rows.get(&key).and_then(|row| row.said.get(&part.rank));
        if spoke.is_none_or(|said| said.pid != part.pid) && !self.has_room(part.pid, limit) {
            self.left_out.count(Limit::Findings);
            return;
        }
        let numbers = &mut self.numbers;
        let row = self.rows.entry(key).or_insert_with(|| {
            *numbers += 1;
            Row {
                number: *numbers,
                trace_id: key.trace_id(scope),
                name: match key.seq {
                    NO_OPERATION => "",
                    _ => operation_name(part.function(), key.kind),
                },
                said: BTreeMap::new(),
                first_ns: verdict.time_ns,
                ended_ns: None,
                changed_ns: None,
                reported: None,
            }
        });
        let number = row.number;
        self.order.insert(number, key);
        if let Some(function) = part.function() {
            row.name = operation_name(Some(function), key.kind);
        }
        let was_hang = row.gravest().is_some_and(|verdict| verdict.hang);
        let begun_ns = match verdict.begun_ns {
            0 => part.begun_ns().unwrap_or(verdict.time_ns),
            begun_ns => begun_ns,
        };
        let said = Said {
            verdict: *verdict,
            begun_ns: begun_ns.min(verdict.time_ns),
            pid: part.pid,
            culprit: place_of(communicators, key.comm, verdict.culprit),
        };
        let before = row.said.insert(part.rank, said);
        row.ended_ns = None;
        let now = row.outcome();
        if now != row.reported {
            row.changed_ns.get_or_insert(verdict.time_ns);
        }
        if !was_hang && now.is_some_and(|(_, _, hang)| hang) {
            self.hangs += 1;
        }
        if let Some(before) = before {
            self.forget(before.pid, number);
        }
        self.verdicts += 1;
        let own = self.by_process.entry(part.pid).or_default();
        own.verdicts += 1;
        own.rows.insert(number);
        own.is_gone = false;
        self.note(&key);
    }

    /// A rank's part has ended. One that was aborted is no end: the ranks waited in vain.
    pub(crate) fn ended(&mut self, part: &RankOperation) {
        if self.rows.is_empty() || part.aborted {
            return;
        }
        let Some(key) = part.instance() else {
            return;
        };
        if let Some(row) = self.rows.get_mut(&key)
            && row.ended_ns.is_none()
        {
            let end_ns = part.latest_ns();
            row.ended_ns = Some(end_ns);
            row.changed_ns.get_or_insert(end_ns);
            self.note(&key);
        }
    }

    /// A process is gone: its rows are kept as long as there is room for them.
    pub(crate) fn exited(&mut self, pid: u32) {
        let Some(own) = self.by_process.get_mut(&pid) else {
            return;
        };
        own.is_gone = true;
        let keys: Vec<_> = own
            .rows
            .iter()
            .filter_map(|number| self.order.get(number).copied())
            .collect();
        keys.iter().for_each(|key| self.note(key));
    }

    /// Enters a row among those that changed and those that are over, as it now is.
    fn note(&mut self, key: &InstanceKey) {
        let Some(row) = self.rows.get(key) else {
            return;
        };
        let is_gone = |pid: &u32| self.by_process.get(pid).is_none_or(|own| own.is_gone);
        let is_last = row.ended_ns.is_some() || row.said.values().all(|said| is_gone(&said.pid));
        let set = |numbers: &mut BTreeSet<u64>, is_in: bool| {
            if is_in {
                numbers.insert(row.number);
            } else {
                numbers.remove(&row.number);
            }
        };
        set(&mut self.changed, row.changed_ns.is_some());
        set(&mut self.over, row.changed_ns.is_none() && is_last);
    }

    /// Whether one more verdict of a process may be kept. Forgets a row that is over if that takes one.
    ///
    /// A process has its part of the whole whatever others have. So the whole is held by what processes that are gone leave behind.
    fn has_room(&mut self, pid: u32, limit: Shared) -> bool {
        if self.verdicts >= limit.all
            && let Some(oldest) = self.over.first().copied()
        {
            self.remove(oldest);
        }
        let Some(own) = self.by_process.get(&pid) else {
            return true;
        };
        if own.verdicts < limit.process {
            return true;
        }
        let oldest = own.rows.iter().copied().find(|row| self.over.contains(row));
        oldest.is_some_and(|row| {
            self.remove(row);
            true
        })
    }

    /// Forgets a row.
    fn remove(&mut self, number: u64) {
        self.changed.remove(&number);
        self.over.remove(&number);
        let row = self.order.remove(&number).and_then(|key| self.rows.remove(&key));
        for said in row.into_iter().flat_map(|row| row.said.into_values()) {
            self.forget(said.pid, number);
        }
    }

    /// A row no longer keeps a verdict of a process.
    fn forget(&mut self, pid: u32, number: u64) {
        self.verdicts -= 1;
        let Some(own) = self.by_process.get_mut(&pid) else {
            return;
        };
        own.verdicts -= 1;
        let key = self.order.get(&number);
        let row = key.and_then(|key| self.rows.get(key));
        if row.is_none_or(|row| row.said.values().all(|said| said.pid != pid)) {
            own.rows.remove(&number);
        }
        if own.verdicts == 0 {
            self.by_process.remove(&pid);
        }
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

    /// What was left out so far.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
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
        let is_settled = |since| is_last || now_ns.saturating_sub(since) >= SETTLE_NS;
        let mut news = Vec::new();
        for number in std::mem::take(&mut self.changed) {
            let Some(key) = self.order.get(&number).copied() else {
                continue;
            };
            let Some(row) = self.rows.get_mut(&key) else {
                continue;
            };
            if row.changed_ns.is_some_and(is_settled) {
                row.changed_ns = None;
                row.reported = row.outcome();
                news.extend(to_model(&key, row, communicators, clock));
            }
            self.note(&key);
        }
        news
    }

    /// Every row, the oldest first.
    #[must_use]
    pub(crate) fn rows(&self, communicators: &Communicators, clock: &Clock) -> Vec<model::Finding> {
        let rows = self
            .order
            .values()
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
        let begun_ns = row.said.values().map(|said| said.begun_ns).min()?;
        Some(WaitedFor {
            culprit: verdict.culprit,
            waited_ns: until_ns.saturating_sub(begun_ns),
            until_ns,
        })
    }
}

/// The process of a rank, if it is watched.
fn place_of(communicators: &Communicators, comm: u64, rank: u32) -> Option<model::Place> {
    let member = communicators.get(comm)?.of_rank(rank)?;
    Some(model::Place {
        pid: member.pid,
        host: Arc::clone(&member.watched.host),
    })
}

fn to_model(
    key: &InstanceKey,
    row: &Row,
    communicators: &Communicators,
    clock: &Clock,
) -> Option<model::Finding> {
    let said = row.said_last()?;
    let verdict = &said.verdict;
    let communicator = communicators.get(key.comm);
    let culprit = place_of(communicators, key.comm, verdict.culprit).or_else(|| said.culprit.clone());
    let last_ns = row.said.values().map(|said| said.verdict.time_ns).max()?;
    let waited_ns = row
        .said
        .values()
        .map(|said| {
            let until_ns = row.ended_ns.unwrap_or(said.verdict.time_ns);
            until_ns.saturating_sub(said.begun_ns)
        })
        .max()?;
    let mut model = model::Finding {
        trace_id: row.trace_id,
        operation: row.name,
        communicator: key.comm,
        communicator_name: communicator.map_or_else(|| "".into(), |known| Arc::clone(&known.name)),
        ranks: key.ranks,
        sequence: if key.seq == NO_OPERATION { 0 } else { key.seq },
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
    model.text = sentence(verdict.cause, verdict.nic.as_ref(), &model);
    model.next_step = next_step(verdict.cause, verdict.culprit, model.culprit_place.as_ref());
    Some(model)
}

/// `rank 3 (pid 7553, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s`.
pub(crate) fn sentence(cause: Cause, nic: Option<&Nic>, row: &model::Finding) -> String {
    let operation = row.operation_words();
    let mut text = format!("rank {}", row.culprit);
    // Writing to a string does not fail.
    let _ = match &row.culprit_place {
        Some(model::Place { pid, host }) if host.is_empty() => write!(text, " (pid {pid})"),
        Some(model::Place { pid, host }) => write!(text, " (pid {pid}, host {host})"),
        None => write!(text, " (not watched here)"),
    };
    text += &match cause {
        Cause::RankDead if row.operation.is_empty() => {
            " is dead: its process failed between two operations".to_owned()
        }
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
        Cause::StuckNic => match nic.filter(|nic| !nic.device().is_empty()) {
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
    const LIMIT: Shared = Shared {
        process: 100,
        all: 1000,
    };

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
            findings.judged(
                &part(rank, 750, &[verdict]),
                &scope,
                &Communicators::default(),
                LIMIT,
            );
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
            &Communicators::default(),
            LIMIT,
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
        findings.judged(
            &part(0, 1, &[said(3_000, Cause::NotLaunched, 2, false)]),
            &scope,
            &Communicators::default(),
            LIMIT,
        );
        findings.judged(
            &part(1, 1, &[said(2_900, Cause::RankDead, 3, true)]),
            &scope,
            &Communicators::default(),
            LIMIT,
        );
        findings.judged(
            &part(2, 1, &[said(3_100, Cause::StuckKernel, 0, true)]),
            &scope,
            &Communicators::default(),
            LIMIT,
        );
        let rows = findings.rows(&communicators, &clock);
        assert_eq!((rows[0].cause, rows[0].culprit), ("RANK_DEAD", 3));
    }

    #[test]
    fn a_process_makes_room_of_its_own_rows_that_are_over() {
        let (communicators, clock) = job();
        let mut findings = Findings::default();
        let verdict = [said(3_000, Cause::NotLaunched, 3, true)];
        let limit = Shared { process: 3, all: 100 };
        let judged = |findings: &mut Findings, rank, seq| {
            findings.judged(
                &part(rank, seq, &verdict),
                &Scope::default(),
                &Communicators::default(),
                limit,
            );
            (findings.order.len(), findings.left_out.of(Limit::Findings))
        };
        for seq in 0..3 {
            judged(&mut findings, 0, seq);
        }
        assert_eq!(judged(&mut findings, 0, 0), (3, 0), "the same rank again");
        assert_eq!(judged(&mut findings, 0, 3), (3, 1), "all its rows are open");
        assert_eq!(judged(&mut findings, 1, 3), (4, 1), "another process has its own");
        findings.ended(&part(1, 3, &[]));
        findings.ended(&part(0, 2, &[]));
        assert_eq!(judged(&mut findings, 0, 3), (4, 2), "the end is not reported yet");
        let _ = findings.take_news(0, true, &communicators, &clock);
        assert_eq!(judged(&mut findings, 0, 3), (3, 2));
        let _ = findings.take_news(0, true, &communicators, &clock);
        assert_eq!(judged(&mut findings, 0, 4), (3, 3));
        // What was counted is what is there.
        let kept: usize = findings.rows.values().map(|row| row.said.len()).sum();
        let of_processes: usize = findings.by_process.values().map(|own| own.verdicts).sum();
        assert_eq!((findings.verdicts, of_processes), (kept, kept));
    }

    #[test]
    fn processes_that_are_gone_make_room_for_all() {
        let (communicators, clock) = job();
        let mut findings = Findings::default();
        let limit = Shared { process: 3, all: 30 };
        for pid in 1..1000 {
            for seq in 0..3 {
                let mut part = part(
                    0,
                    u64::from(3 * pid + seq),
                    &[said(3_000, Cause::NoAnswer, 3, true)],
                );
                part.pid = pid;
                findings.judged(&part, &Scope::default(), &Communicators::default(), limit);
            }
            findings.exited(pid);
            let _ = findings.take_news(0, true, &communicators, &clock);
        }
        assert_eq!((findings.order.len(), findings.by_process.len()), (30, 10));
        assert_eq!(findings.left_out.of(Limit::Findings), 0);
        assert!(findings.any_open(), "they never ended");
    }

    #[test]
    fn every_cause_has_a_next_step() {
        for cause in Cause::ALL {
            assert!(!next_step(*cause, 1, None).is_empty(), "{cause}");
        }
    }
}
