//! Asking the ranks of an operation where they are with it, and what follows from that.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ringsight_records::{Cause, Kind, Record, State};

use super::{
    Action, Watch,
    flights::InProgress,
    message::Message,
    position::{Answer, HeldUp, Position, Run},
    report::{self, Report},
    settings::{SHORTEST, Settings},
    verdict::{self, Heard, Verdict, judge},
};
use crate::{
    communicator::lock,
    error::{Error, ResultCode},
    observe,
};

/// How long a rank may take to answer: its service thread does nothing else, but its host may be busy.
const ANSWERS: Duration = Duration::from_millis(200);
/// How long the neighbours of those who did not may take.
const LOOKS: Duration = Duration::from_millis(150);

/// How long nothing more may come of a rank that has left, or that cannot find out where it is, or move on ranks that have all come, before
/// that is why an operation does not end: between two kernels of different nodes four threads have to run, which a busy machine keeps waiting.
const LASTS: Duration = Duration::from_millis(600);

/// How often a rank is asked before it counts as one that does not answer; and one whose process is known to live, which a busy
/// machine may keep from answering for long.
const ASKED: u32 = 2;
const ASKED_ALIVE: u32 = 10;

/// Up to so many ranks are asked one by one; more by a message that goes from rank to rank, which takes fewer connections but
/// may be held up by the very rank that is looked for.
const DIRECTLY: usize = 64;

/// The question that is being asked, and what has been said before.
#[derive(Default)]
pub(super) struct Inquiry {
    /// Number of the present or last question.
    query: u32,
    open: Option<Open>,
    /// Ranks that have given up their operations.
    ended: BTreeSet<u32>,
    /// Ranks whose processes died.
    lost: BTreeSet<u32>,
    /// Ranks whose processes a debugger has taken, and may hold at any time.
    traced: BTreeSet<u32>,
    /// The run that a rank has not answered to, and how often in a row.
    unanswered: Option<(Run, u32)>,
    /// Ranks whose answers came when the next question had been asked: they are behind, and live.
    behind: BTreeSet<u32>,
    /// The run of which the verdict is one that must last, and since when it has.
    lasting: Option<(Run, u64)>,
    /// What was said of which run.
    said: Option<(Run, Verdict)>,
    /// Runs that were found to be only slow, since all that are overdue were asked about.
    slow: Vec<Run>,
}

struct Open {
    run: Run,
    asked_ns: u64,
    heard: BTreeMap<u32, Heard>,
    /// Those who did not answer are being looked at, since then.
    looking_ns: Option<u64>,
}

impl Inquiry {
    /// An answer has come.
    pub(super) fn heard(&mut self, query: u32, rank: u32, heard: Heard) {
        let Some(open) = self.open.as_mut().filter(|_| query == self.query) else {
            if matches!(heard, Heard::Answer(_)) {
                self.behind.insert(rank);
            }
            return;
        };
        // What a rank says of itself beats what others say of it, and anything beats nothing.
        let replaces = match open.heard.get(&rank) {
            None | Some(Heard::Silent | Heard::Busy) => true,
            Some(_) => matches!(heard, Heard::Answer(_)),
        };
        if replaces {
            open.heard.insert(rank, heard);
        }
    }

    /// A rank has given up its operations.
    pub(super) fn ended(&mut self, rank: u32) {
        self.ended.insert(rank);
    }

    /// For so long nothing could move: what must last has not lasted meanwhile.
    pub(super) fn lose(&mut self, now: u64, ns: u64) {
        if let Some((_, since)) = &mut self.lasting {
            *since = (*since + ns).min(now);
        }
    }

    /// A debugger has taken a rank's process, or has left it.
    pub(super) fn traced(&mut self, rank: u32, is: bool) {
        if is {
            self.traced.insert(rank);
        } else {
            self.traced.remove(&rank);
        }
    }

    /// Nothing is in progress any more.
    pub(super) fn close(&mut self) {
        self.open = None;
        self.said = None;
        self.behind.clear();
        self.slow.clear();
    }

    /// Which of the runs that are overdue to ask about: what has been begun, or found, is gone on with; else one after the other. Of
    /// several that wait, those before may only be slow: events tell of all messages of a group that they are in progress
    /// as long as one is.
    pub(super) fn choose(&mut self, overdue: &[Run]) -> usize {
        let begun = [
            self.open.as_ref().map(|open| open.run),
            self.unanswered.map(|(run, _)| run),
            self.lasting.map(|(run, _)| run),
            self.said.as_ref().map(|(run, _)| *run),
        ];
        let place = |run: Run| overdue.iter().position(|other| *other == run);
        if let Some(place) = begun.into_iter().flatten().find_map(place) {
            return place;
        }
        let fresh = overdue.iter().position(|run| !self.slow.contains(run));
        fresh.unwrap_or_else(|| {
            self.slow.clear();
            0
        })
    }
}

/// How often ranks are asked before it counts that one does not answer. Where one does not that is known to live, or nobody does of
/// several, it may be the machine that is busy, or this rank that does not come to hear.
fn asked_before_it_counts(heard: &BTreeMap<u32, Heard>, own: u32) -> u32 {
    let mut others = heard
        .iter()
        .filter(|(rank, _)| **rank != own)
        .map(|(_, heard)| heard);
    let is_busy = others.clone().any(|heard| *heard == Heard::Busy);
    let is_deaf =
        others.clone().count() > 1 && others.all(|heard| matches!(heard, Heard::Silent | Heard::Busy));
    if is_busy || is_deaf { ASKED_ALIVE } else { ASKED }
}

impl Watch {
    /// Goes on asking about an operation that has been in progress for `age`; says when to look again.
    pub(super) fn inquire(&self, op: &InProgress, threshold: Duration, age: Duration, now: u64) -> Duration {
        let participants = self.participants(op.run.identity);
        let mut inquiry = lock(&self.inquiry);
        let is_final = |(run, said): &(Run, Verdict)| *run == op.run && said.cause == Cause::MetadataMismatch;
        if inquiry.said.as_ref().is_some_and(is_final) {
            // It can never end: what is found while one rank after the other gives up is a consequence.
            return self.settings.rest();
        }
        let Some(open) = inquiry.open.as_mut().filter(|open| open.run == op.run) else {
            inquiry.query = inquiry.query.wrapping_add(1);
            let query = inquiry.query;
            if inquiry.unanswered.is_none_or(|(run, _)| run != op.run) {
                inquiry.behind.clear();
            }
            let answer = |position: Position| Heard::Answer(position.into());
            let mut heard: BTreeMap<u32, Heard> = inquiry
                .ended
                .iter()
                .filter(|rank| participants.contains(rank))
                .map(|rank| (*rank, answer(Position::Ended)))
                .collect();
            let lost = inquiry.lost.iter().filter(|rank| participants.contains(rank));
            heard.extend(lost.map(|rank| (*rank, Heard::Gone)));
            heard.insert(self.rank, answer(self.position(op.run, now)));
            inquiry.open = Some(Open {
                run: op.run,
                asked_ns: now,
                heard,
                looking_ns: None,
            });
            drop(inquiry);
            self.ask(&participants, query, op.run);
            return SHORTEST;
        };
        let waited = |since: u64| Duration::from_nanos(now.saturating_sub(since));
        let missing: Vec<u32> = participants
            .iter()
            .copied()
            .filter(|rank| !open.heard.contains_key(rank))
            .collect();
        if !missing.is_empty() {
            match open.looking_ns {
                None if waited(open.asked_ns) < ANSWERS => return SHORTEST,
                None => {
                    open.looking_ns = Some(now);
                    let query = inquiry.query;
                    drop(inquiry);
                    self.look_at(&missing, query, op.run);
                    return SHORTEST;
                }
                Some(since) if waited(since) < LOOKS => return SHORTEST,
                Some(_) => {}
            }
        }
        let mut heard = std::mem::take(&mut open.heard);
        for rank in missing {
            heard.insert(rank, Heard::Silent);
        }
        inquiry.open = None;
        for (rank, heard) in &mut heard {
            if *heard == Heard::Silent && inquiry.traced.contains(rank) {
                *heard = Heard::Traced;
            }
            if let Some(held) = self.crossing(heard, now) {
                *heard = Heard::Crossed(held);
            }
        }
        let settings = Settings {
            threshold,
            ..self.settings
        };
        let verdict = judge(&heard, age, &settings);
        // A rank that is only busy may answer the next time.
        let silent = verdict
            .as_ref()
            .filter(|verdict| verdict.cause == Cause::NoAnswer);
        let before = inquiry.unanswered.take().filter(|(run, _)| *run == op.run);
        if let Some(silent) = silent {
            if inquiry.behind.remove(&silent.culprit) {
                return SHORTEST;
            }
            let times = before.map_or(1, |(_, times)| times.saturating_add(1));
            inquiry.unanswered = Some((op.run, times));
            if times < asked_before_it_counts(&heard, self.rank) {
                return SHORTEST;
            }
        }
        // What moves slowly may be on its way through a busy machine. A kernel of one rank waits for nobody.
        let must_last = |verdict: &Verdict| {
            let culprit = heard.get(&verdict.culprit);
            culprit.is_some_and(Heard::may_change) || verdict.cause == Cause::StuckKernel && heard.len() > 1
        };
        let lasting = inquiry.lasting.take().filter(|(run, _)| *run == op.run);
        if verdict.as_ref().is_some_and(must_last) {
            let (_, since) = *inquiry.lasting.insert(lasting.unwrap_or((op.run, now)));
            if Duration::from_nanos(now.saturating_sub(since)) < LASTS {
                return SHORTEST;
            }
        }
        if verdict.is_none() {
            inquiry.slow.push(op.run);
        }
        let said = inquiry.said.take().filter(|(run, _)| *run == op.run);
        let (fresh, said) = verdict::next(said.map(|(_, said)| said), verdict);
        inquiry.said = said.map(|said| (op.run, said));
        drop(inquiry);
        // What is known of this rank's own operations may be old.
        if let Some(verdict) = fresh.filter(|_| self.is_in_progress(op.run)) {
            self.say(op, &verdict, &heard, now);
        }
        // Asked again for as long as it lasts: the verdict may change.
        self.settings.rest()
    }

    /// The operation of this communicator in which a rank waits for this one, if neither will ever come to the other's: operations
    /// of a communicator run one after another, this rank is in another one, and has not launched that.
    fn crossing(&self, heard: &Heard, now: u64) -> Option<HeldUp> {
        let Heard::Answer(Answer {
            position: Position::NotLaunched { .. },
            held_up: Some(held),
            ..
        }) = heard
        else {
            return None;
        };
        // What graphs run is ordered by whoever launches them.
        let ordered = held.comm == self.comm && held.run.replay == 0;
        let awaited = self.participants(held.run.identity).contains(&self.rank);
        let launched = || !matches!(self.position(held.run, now), Position::NotLaunched { .. });
        (ordered && awaited && !launched()).then_some(*held)
    }

    fn is_in_progress(&self, run: Run) -> bool {
        self.refresh(Duration::ZERO);
        lock(&self.flights).in_progress().any(|op| op.run == run)
    }

    fn ask(&self, ranks: &[u32], query: u32, run: Run) {
        let bytes = Message::Where { query, run }.encode();
        if ranks.len() > DIRECTLY {
            (self.post)(None, &bytes);
            return;
        }
        for rank in ranks.iter().filter(|rank| **rank != self.rank) {
            self.ask_one(*rank, query, &bytes);
        }
    }

    /// Asks a rank. One that is not there any more has left, unless it is known to have died.
    fn ask_one(&self, rank: u32, query: u32, question: &[u8]) {
        if !(self.post)(Some(rank), question) {
            lock(&self.inquiry).heard(query, rank, Heard::Left);
        }
    }

    /// Finds out about ranks that do not answer: here if they are of this node, else by another rank of theirs. They are
    /// asked again, too, without a detour.
    fn look_at(&self, silent: &[u32], query: u32, run: Run) {
        let question = Message::Where { query, run }.encode();
        for rank in silent {
            self.ask_one(*rank, query, &question);
            let node = self.topology.node_of(*rank);
            if node == self.topology.node_of(self.rank) {
                let heard = self.health(*rank).into();
                lock(&self.inquiry).heard(query, *rank, heard);
                continue;
            }
            let neighbours =
                || (0..self.ranks).filter(|other| self.topology.node_of(*other) == node && other != rank);
            let look = Message::Look { query, rank: *rank }.encode();
            match neighbours().find(|other| !silent.contains(other)) {
                Some(neighbour) => {
                    (self.post)(Some(neighbour), &look);
                }
                // They may be silent because of this one.
                None => neighbours().for_each(|other| {
                    (self.post)(Some(other), &look);
                }),
            }
        }
    }

    /// What is known at once of the operation that began first, without asking. What is then to be said.
    pub(super) fn judge_alone(&self, cause: Cause, culprit: u32) -> Option<Report> {
        if cause == Cause::RankDead {
            lock(&self.inquiry).lost.insert(culprit);
        }
        let op = self.oldest(None)?;
        let verdict = Verdict {
            cause,
            culprit,
            others: Vec::new(),
            since_ns: None,
            held_up: None,
            called: None,
            traced: false,
            hang: true,
            is_awaited: false,
        };
        let heard = match cause {
            Cause::DeviceFault => Heard::Answer(Position::Faulted.into()),
            _ => Heard::Gone,
        };
        self.conclude(&op, &verdict, &BTreeMap::from([(culprit, heard)]))
    }

    /// What the checks have found out, of the operation that began first, or is about to.
    pub(super) fn judge_calls(&self, text: &str, odd: &[u32]) -> Option<Report> {
        let (culprit, others) = odd.split_first()?;
        let op = self.oldest(None);
        let op = op.or_else(|| lock(&self.flights).queued(observe::now_ns()))?;
        let verdict = Verdict {
            cause: Cause::MetadataMismatch,
            culprit: *culprit,
            others: others.to_vec(),
            since_ns: None,
            held_up: None,
            called: Some(text.to_owned()),
            traced: false,
            hang: true,
            is_awaited: false,
        };
        self.conclude(&op, &verdict, &BTreeMap::new())
    }

    /// Notes what nobody need be asked about; what is to be said if it has not been.
    fn conclude(&self, op: &InProgress, verdict: &Verdict, heard: &BTreeMap<u32, Heard>) -> Option<Report> {
        let mut inquiry = lock(&self.inquiry);
        // Of several that die the first is the cause.
        if matches!(&inquiry.said, Some((run, said)) if *run == op.run && said.cause == verdict.cause) {
            return None;
        }
        inquiry.said = Some((op.run, verdict.clone()));
        drop(inquiry);
        Some(self.note(op, verdict, heard, observe::now_ns()))
    }

    fn say(&self, op: &InProgress, verdict: &Verdict, heard: &BTreeMap<u32, Heard>, now: u64) {
        // The error first: who reads the report finds it.
        if let (Cause::MetadataMismatch, Some(held)) = (verdict.cause, verdict.held_up) {
            // It can never end, and no other rank may find out: whatever the action.
            let call = self.checks.call_of(op.info.op);
            self.checks
                .announce(report::crossing(self.rank, op, call, verdict.culprit, held));
            return self.report(op, verdict, heard, now);
        }
        let error = |code| {
            let text = format!("{}: {}", verdict.cause, report::sentence(verdict));
            Error::new(code, text)
        };
        match self.settings.action {
            // It can never end, whatever the action. The rank itself has failed with what its driver says.
            _ if verdict.cause == Cause::DeviceFault => self.life.fail(error(ResultCode::RemoteError)),
            Action::Error if verdict.hang => self.life.faults().set(error(ResultCode::SystemError)),
            Action::Abort if verdict.hang => self.life.fail(error(ResultCode::SystemError)),
            Action::Report | Action::Error | Action::Abort => {}
        }
        self.report(op, verdict, heard, now);
    }

    fn report(&self, op: &InProgress, verdict: &Verdict, heard: &BTreeMap<u32, Heard>, now: u64) {
        self.note(op, verdict, heard, now).say();
    }

    /// Has it recorded and dumped.
    fn note(&self, op: &InProgress, verdict: &Verdict, heard: &BTreeMap<u32, Heard>, now: u64) -> Report {
        if verdict.hang {
            self.dump_all();
        }
        let state = if verdict.hang { State::STOP } else { State::START };
        observe::emit(&Record {
            value: u64::from(verdict.cause as u8) << 32 | u64::from(verdict.culprit),
            ..op.info.record(Kind::Verdict, state, now, op.run.replay)
        });
        if let Some(pages) = observe::pages() {
            pages.keep_verdict(&report::given(op, verdict, now));
        }
        let heard = heard.iter().map(|(rank, heard)| (*rank, *heard));
        Report {
            device: self.device,
            lines: report::lines(self, op, verdict, heard, self.threshold(op), now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_hears_nobody_may_be_deaf() {
        let asked = |heard: &[Heard]| asked_before_it_counts(&(0..).zip(heard.iter().copied()).collect(), 1);
        let here = Heard::Answer(Position::Done.into());
        assert_eq!(asked(&[here, here, Heard::Silent]), ASKED);
        assert_eq!(asked(&[Heard::Silent, here]), ASKED, "of one it cannot be told");
        assert_eq!(asked(&[Heard::Silent, here, Heard::Stopped]), ASKED);
        assert_eq!(asked(&[Heard::Silent, here, Heard::Silent]), ASKED_ALIVE);
        assert_eq!(asked(&[here, here, Heard::Busy]), ASKED_ALIVE);
        assert_eq!(asked(&[Heard::Silent, here, Heard::Busy, here]), ASKED_ALIVE);
    }
}
