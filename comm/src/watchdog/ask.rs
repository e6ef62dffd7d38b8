//! Asking the ranks of an operation where they are with it, and saying what follows from that.

use std::{collections::BTreeMap, time::Duration};

use ringsight_records::{Cause, Kind, Record, State};

use super::{
    Action, Watch,
    flights::InProgress,
    inquiry::{Conclusion, Step},
    message::{Health, Message},
    position::{Answer, Position, Run},
    report::{self, Report},
    settings::{SHORTEST, Settings},
    verdict::{Heard, Verdict, judge},
};
use crate::{
    communicator::lock,
    error::{Error, ResultCode},
    observe,
};

/// Up to so many ranks are asked one by one; more by a message that goes from rank to rank, which takes fewer connections but
/// may be held up by the very rank that is looked for.
const DIRECTLY: usize = 64;

impl Watch {
    /// Goes on asking about an operation that has been in progress for `age`; says when to look again.
    pub(super) fn inquire(&self, op: &InProgress, age: Duration, now: u64) -> Duration {
        let participants = self.participants(op.run.identity);
        let is_dark = self.dark(now).is_some();
        let own = Answer {
            is_old: is_dark,
            stall: self.stall(op.run, now),
            // It waits in it, as far as is known.
            ..self.position(op.run, now).presumed().into()
        };
        let mut inquiry = lock(&self.inquiry);
        if inquiry.is_final() || self.is_given_up() {
            return self.settings.rest();
        }
        let step = inquiry.step(op.run, &participants, (self.rank, own), now);
        drop(inquiry);
        let mut heard = match step {
            Step::Rest(left) => return left,
            Step::Wait => return SHORTEST,
            Step::Ask { query } => {
                self.ask(&participants, query, op.run);
                return SHORTEST;
            }
            Step::Look { query, ranks } => {
                self.look_at(&ranks, query, op.run);
                return SHORTEST;
            }
            Step::Heard(heard) => heard,
        };
        let doubted = lock(&self.inquiry).doubted(op.run, now);
        for (rank, heard) in &mut heard {
            let is_known = !is_dark && *rank != self.rank;
            let crossed = is_known.then(|| self.crossing(op, (*rank, heard), doubted, now));
            if let Some(held) = crossed.flatten() {
                *heard = Heard::Crossed(held);
            } else if is_dark {
                // Who knows nothing of itself may be the one that they wait for.
                heard.presume();
            }
        }
        let mut verdict = judge(&heard, age, &self.settings);
        let mut others = heard.iter().filter(|(rank, _)| **rank != self.rank);
        if is_dark && heard.len() > 1 && others.all(|(_, heard)| heard.is_over()) {
            // It is done here, too, as far as can be known: the next one is what this rank waits in. A kernel of this rank alone nobody else
            // knows of.
            lock(&self.flights).pass(op.run);
            verdict = None;
        }
        let rest = again(verdict.as_ref(), &heard, &self.settings, age);
        let run = (op.run, op.start_ns);
        let conclusion = lock(&self.inquiry).conclude(run, verdict, (self.rank, &heard), rest, now);
        match conclusion {
            Conclusion::Doubt => SHORTEST,
            Conclusion::Nothing => rest,
            Conclusion::Say(verdict) => {
                // What is known of this rank's own operations may be old, and what was heard may be a consequence of what has been found
                // meanwhile.
                if self.is_in_progress(op.run) && !self.is_given_up() {
                    self.say(op, &verdict, &heard, now);
                }
                rest
            }
        }
    }

    /// The ranks do not call alike, or this one has given up its operations: why they do not end is known, and what the ranks do not do
    /// from now on is a consequence.
    fn is_given_up(&self) -> bool {
        self.checks.found_difference() || self.done.get().is_some()
    }

    fn is_in_progress(&self, run: Run) -> bool {
        self.refresh(Duration::ZERO);
        self.waiting(observe::now_ns()).iter().any(|op| op.run == run)
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
            lock(&self.inquiry).heard(query, rank, Heard::Left, observe::now_ns());
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
                let heard = Health::of(&self.topology, *rank).into();
                lock(&self.inquiry).heard(query, *rank, heard, observe::now_ns());
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
            lock(&self.inquiry).lost(culprit);
        }
        let op = self
            .waiting(observe::now_ns())
            .into_iter()
            .min_by_key(|op| op.start_ns)?;
        let verdict = Verdict::hang(cause, culprit);
        let heard = match cause {
            Cause::DeviceFault => Heard::Answer(Position::Faulted.into()),
            _ => Heard::Gone,
        };
        self.conclude(&op, &verdict, &BTreeMap::from([(culprit, heard)]))
    }

    /// What the checks have found out, of the operation that began first, or is about to.
    pub(super) fn judge_calls(&self, text: &str, odd: &[u32]) -> Option<Report> {
        let (culprit, others) = odd.split_first()?;
        let now = observe::now_ns();
        let op = self.waiting(now).into_iter().min_by_key(|op| op.start_ns);
        let op = op.or_else(|| lock(&self.flights).queued(now))?;
        let verdict = Verdict {
            others: others.to_vec(),
            called: Some(text.to_owned()),
            ..Verdict::hang(Cause::MetadataMismatch, *culprit)
        };
        self.conclude(&op, &verdict, &BTreeMap::new())
    }

    /// Notes what nobody need be asked about; what is to be said if it has not been.
    fn conclude(&self, op: &InProgress, verdict: &Verdict, heard: &BTreeMap<u32, Heard>) -> Option<Report> {
        let now = observe::now_ns();
        let is_to_be_said = lock(&self.inquiry).note(op.run, verdict, now);
        is_to_be_said.then(|| self.note(op, verdict, heard, now))
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
        // Before the record, whose reader looks it up.
        if let Some(pages) = observe::pages() {
            pages.keep_verdict(&report::given(op, verdict, now));
        }
        observe::emit(&Record {
            value: u64::from(verdict.cause as u8) << 32 | u64::from(verdict.culprit),
            ..op.info.record(Kind::Verdict, state, now, op.run.replay)
        });
        let heard = heard.iter().map(|(rank, heard)| (*rank, *heard));
        Report {
            device: self.device,
            lines: report::lines(self, op, verdict, heard, self.threshold(op), now),
        }
    }
}

/// When an operation of which this was found is to be looked into again: when more may be found, at the latest.
fn again(
    verdict: Option<&Verdict>,
    heard: &BTreeMap<u32, Heard>,
    settings: &Settings,
    age: Duration,
) -> Duration {
    let due = match verdict {
        // Late becomes a hang.
        Some(verdict) if !verdict.hang => settings.arrival.saturating_sub(verdict.age(age)),
        Some(_) => Duration::MAX,
        // What moved last has stood still for long enough, or the network has.
        None => {
            let moved = heard.values().filter_map(Heard::still).min();
            let stalled = heard.values().filter_map(Heard::stall);
            let stalled = stalled.map(|stall| Duration::from_nanos(stall.for_ns)).max();
            let lasts = moved.into_iter().chain(stalled);
            lasts
                .map(|lasts| settings.threshold.saturating_sub(lasts))
                .min()
                .unwrap_or(Duration::MAX)
        }
    };
    due.min(settings.rest()).max(SHORTEST)
}
