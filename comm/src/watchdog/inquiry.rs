//! What has been asked about operations that are overdue, and heard, and said.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ringsight_records::Cause;

use super::{
    done::Done,
    position::{Answer, Position, Run},
    verdict::{self, Heard, Verdict},
};

/// How long a rank may take to answer: its service thread does nothing else, but its host may be busy.
const ANSWERS: Duration = Duration::from_millis(200);
/// How long the neighbours of those who did not may take.
const LOOKS: Duration = Duration::from_millis(150);

/// How long nothing more may come of a rank that has left, or that cannot find out where it is, or move on ranks that have all come, before
/// that is why an operation does not end, and that two wait for each other in different ones: between two kernels of different nodes four threads have to run, which a busy machine keeps waiting.
pub(super) const LASTS: Duration = Duration::from_millis(600);

/// How often a rank is asked before it counts as one that does not answer; and one whose process is known to live, which a busy
/// machine may keep from answering for long.
const ASKED: u32 = 2;
const ASKED_ALIVE: u32 = 10;

/// The operations of a communicator that are asked about, each by itself, and what is known of the ranks for all of them.
pub(super) struct Inquiry {
    /// How long an operation may be in progress before it is asked about.
    threshold: Duration,
    /// Number of the last question.
    query: u32,
    /// In the order in which they were first asked about.
    cases: Vec<Case>,
    /// Ranks that have given up their operations, and what they were done with.
    ended: BTreeMap<u32, Done>,
    /// Ranks whose processes died.
    lost: BTreeSet<u32>,
    /// Ranks whose processes a debugger has taken, and may hold at any time.
    traced: BTreeSet<u32>,
    /// Ranks whose answers came when a question was closed, and when the last one did: they are behind, and live.
    behind: BTreeMap<u32, u64>,
    /// Ranks that did not run, when that was found last, or were not heard of, when that was said: what others did not do meanwhile they need not have
    /// been late with.
    held: BTreeMap<u32, u64>,
}

/// One operation that is overdue.
struct Case {
    run: Run,
    open: Option<Open>,
    /// When the last question was closed, or the first one asked.
    closed_ns: u64,
    /// How often in a row a rank has not answered.
    unanswered: u32,
    /// Since when the verdict is one that must last.
    lasting: Option<u64>,
    said: Option<Verdict>,
    /// All its ranks had come to it when that was asked last.
    have_come: bool,
    /// Not to be asked about before.
    again_ns: u64,
}

impl Case {
    /// That of a run, which may be new.
    fn of(cases: &mut Vec<Self>, run: Run, now: u64) -> &mut Self {
        let known = cases.iter().position(|case| case.run == run);
        let place = known.unwrap_or_else(|| {
            cases.push(Self {
                run,
                open: None,
                closed_ns: now,
                unanswered: 0,
                lasting: None,
                said: None,
                have_come: false,
                again_ns: 0,
            });
            cases.len() - 1
        });
        &mut cases[place]
    }
}

/// A question.
struct Open {
    query: u32,
    asked_ns: u64,
    heard: BTreeMap<u32, Heard>,
    /// Those who did not answer are being looked at, since then.
    looking_ns: Option<u64>,
}

/// How far an operation's question is.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// It is not time for the next one.
    Rest(Duration),
    /// It is to be put to the ranks.
    Ask { query: u32 },
    /// Answers may still come.
    Wait,
    /// It is to be found out about these, which do not answer.
    Look { query: u32, ranks: Vec<u32> },
    /// This is known.
    Heard(BTreeMap<u32, Heard>),
}

/// What is done about what was found.
#[derive(Debug, PartialEq)]
pub(super) enum Conclusion {
    /// It is asked again at once: it may not be so.
    Doubt,
    /// It is said.
    Say(Verdict),
    /// There is nothing to be said, or it has been.
    Nothing,
}

impl Inquiry {
    /// Nothing has been asked, of a communicator whose operations have so long.
    pub(super) fn of(threshold: Duration) -> Self {
        Self {
            threshold,
            query: 0,
            cases: Vec::new(),
            ended: BTreeMap::new(),
            lost: BTreeSet::new(),
            traced: BTreeSet::new(),
            behind: BTreeMap::new(),
            held: BTreeMap::new(),
        }
    }

    /// An answer has come.
    pub(super) fn heard(&mut self, query: u32, rank: u32, heard: Heard, now: u64) {
        let mut open = self.cases.iter_mut().filter_map(|case| case.open.as_mut());
        let Some(open) = open.find(|open| open.query == query) else {
            if matches!(heard, Heard::Answer(_)) {
                self.behind.insert(rank, now);
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
    pub(super) fn ended(&mut self, rank: u32, done: Done) {
        self.ended.insert(rank, done);
    }

    /// A rank's process died.
    pub(super) fn lost(&mut self, rank: u32) {
        self.lost.insert(rank);
    }

    /// A debugger has taken a rank's process, or has left it.
    pub(super) fn traced(&mut self, rank: u32, is: bool) {
        if is {
            self.traced.insert(rank);
        } else {
            self.traced.remove(&rank);
        }
    }

    /// For so long nothing could move: what must last has not lasted meanwhile.
    pub(super) fn lose(&mut self, now: u64, ns: u64) {
        for since in self.cases.iter_mut().filter_map(|case| case.lasting.as_mut()) {
            *since = (*since + ns).min(now);
        }
    }

    /// Whether a verdict may say no more than that one of these ranks did not run: it is of an operation that began before that, and the others have not
    /// had a threshold since then.
    fn may_be_because_held(
        &self,
        verdict: &Verdict,
        mut ranks: impl Iterator<Item = u32>,
        (began, now): (u64, u64),
    ) -> bool {
        let is_by_time = matches!(
            verdict.cause,
            Cause::NotLaunched | Cause::QueuedBehindCompute | Cause::StuckNic | Cause::StuckKernel
        );
        let threshold = u64::try_from(self.threshold.as_nanos()).unwrap_or(u64::MAX);
        let is_fresh = |held: &u64| began < *held && now < held.saturating_add(threshold);
        is_by_time && ranks.any(|rank| self.held.get(&rank).is_some_and(is_fresh))
    }

    /// For how long a run's verdict has been one that must last.
    pub(super) fn doubted(&self, run: Run, now: u64) -> Duration {
        let case = self.cases.iter().find(|case| case.run == run);
        let since = case.and_then(|case| case.lasting).unwrap_or(now);
        Duration::from_nanos(now.saturating_sub(since))
    }

    /// Forgets what is not in progress any more.
    pub(super) fn keep(&mut self, in_progress: impl Fn(Run) -> bool) {
        self.cases.retain(|case| in_progress(case.run));
        if self.cases.is_empty() {
            self.behind.clear();
        }
    }

    /// Whether the ranks do not call alike: then nothing can end any more, and what is found while one rank after the other gives up is a
    /// consequence.
    pub(super) fn is_final(&self) -> bool {
        let mut said = self.cases.iter().filter_map(|case| case.said.as_ref());
        said.any(|said| said.cause == Cause::MetadataMismatch)
    }

    /// Whether all ranks of each of these have come to it, as far as has been found out.
    pub(super) fn have_come(&self, runs: &[Run]) -> bool {
        let has_come = |run: &Run| self.cases.iter().any(|case| case.run == *run && case.have_come);
        runs.iter().all(has_come)
    }

    /// Goes on with a run's question: what is to be done next. `own` is what rank `rank` that asks knows of itself.
    pub(super) fn step(
        &mut self,
        run: Run,
        participants: &[u32],
        (rank, own): (u32, Answer),
        now: u64,
    ) -> Step {
        let waited = |since: u64| Duration::from_nanos(now.saturating_sub(since));
        let case = Case::of(&mut self.cases, run, now);
        let Some(open) = &mut case.open else {
            let left = case.again_ns.saturating_sub(now);
            if left > 0 {
                return Step::Rest(Duration::from_nanos(left));
            }
            let given_up = self.ended.iter().map(|(rank, done)| match done.has(run) {
                true => (*rank, Heard::Left),
                false => (*rank, Heard::Answer(Position::Ended.into())),
            });
            let lost = self.lost.iter().map(|rank| (*rank, Heard::Gone));
            let known = given_up
                .chain(lost)
                .filter(|(rank, _)| participants.contains(rank));
            self.query = self.query.wrapping_add(1);
            case.open = Some(Open {
                query: self.query,
                asked_ns: now,
                heard: known.chain([(rank, Heard::Answer(own))]).collect(),
                looking_ns: None,
            });
            return Step::Ask { query: self.query };
        };
        let missing: Vec<u32> = participants
            .iter()
            .copied()
            .filter(|rank| !open.heard.contains_key(rank))
            .collect();
        if !missing.is_empty() {
            match open.looking_ns {
                None if waited(open.asked_ns) < ANSWERS => return Step::Wait,
                None => {
                    open.looking_ns = Some(now);
                    return Step::Look {
                        query: open.query,
                        ranks: missing,
                    };
                }
                Some(since) if waited(since) < LOOKS => return Step::Wait,
                Some(_) => {}
            }
        }
        let mut heard = std::mem::take(&mut open.heard);
        case.open = None;
        for rank in missing {
            heard.insert(rank, Heard::Silent);
        }
        for (rank, heard) in &mut heard {
            if *heard == Heard::Silent && self.traced.contains(rank) {
                *heard = Heard::Traced;
            }
            // What it was done with may yet need its network, which does nothing any more.
            if self.ended.contains_key(rank) && heard.is_over() {
                *heard = Heard::Left;
            }
        }
        Step::Heard(heard)
    }

    /// What follows from what was found about a run, which began then, by rank `rank`, which looks into it again after `rest` at the latest.
    pub(super) fn conclude(
        &mut self,
        (run, began): (Run, u64),
        verdict: Option<Verdict>,
        (rank, heard): (u32, &BTreeMap<u32, Heard>),
        rest: Duration,
        now: u64,
    ) -> Conclusion {
        let ranks = heard.keys().copied();
        let is_held = verdict
            .as_ref()
            .is_some_and(|verdict| self.may_be_because_held(verdict, ranks, (began, now)));
        let stopped = heard.iter().filter(|(_, heard)| **heard == Heard::Stopped);
        self.held.extend(stopped.map(|(rank, _)| (*rank, now)));
        // One that holds up several operations is named once.
        let others = self.cases.iter().filter(|case| case.run != run);
        let is_said = verdict.as_ref().is_some_and(|verdict| {
            let mut said = others.filter_map(|case| case.said.as_ref());
            said.any(|said| said.tells(verdict))
        });
        let culprit = verdict.as_ref().map(|verdict| verdict.culprit);
        let behind = culprit.and_then(|rank| self.behind.get(&rank).copied());
        let case = Case::of(&mut self.cases, run, now);
        case.have_come = heard.values().all(Heard::has_come);
        if is_held {
            // What has been said stands until then.
            (case.unanswered, case.lasting) = (0, None);
            (case.closed_ns, case.again_ns) = (now, now + rest.as_nanos() as u64);
            return Conclusion::Nothing;
        }
        let (fresh, said) = match is_said {
            true => (None, None),
            false => verdict::next(case.said.clone(), verdict),
        };
        let closed_ns = std::mem::replace(&mut case.closed_ns, now);
        if let Some(fresh) = &fresh {
            // A rank that is only busy may answer the next time.
            if fresh.cause == Cause::NoAnswer {
                if behind.is_some_and(|came| came > closed_ns) {
                    return Conclusion::Doubt;
                }
                case.unanswered = case.unanswered.saturating_add(1);
                if case.unanswered < asked_before_it_counts(heard, rank) {
                    return Conclusion::Doubt;
                }
            } else {
                case.unanswered = 0;
            }
            // What moves slowly may be on its way through a busy machine. A kernel of one rank waits for nobody.
            let culprit = heard.get(&fresh.culprit);
            let may_change = culprit.is_some_and(Heard::may_change);
            if may_change || fresh.cause == Cause::StuckKernel && heard.len() > 1 {
                let since = *case.lasting.get_or_insert(now);
                let has_lasted = Duration::from_nanos(now.saturating_sub(since)) >= LASTS;
                // A message that is sent before the rank comes may yet end.
                let moves = matches!(culprit, Some(Heard::Crossed(held)) if !held.has_stood());
                if moves || !has_lasted {
                    return Conclusion::Doubt;
                }
            }
        }
        (case.unanswered, case.lasting, case.said) = (0, None, said);
        // Asked again for as long as it lasts: the verdict may change.
        case.again_ns = now + rest.as_nanos() as u64;
        // Where one is not heard of, or a debugger has it, that is held against nobody again until it is said anew.
        if let Some(fresh) = &fresh
            && matches!(fresh.cause, Cause::RankStopped | Cause::NoAnswer)
        {
            let ranks = fresh.others.iter().chain([&fresh.culprit]);
            self.held.extend(ranks.map(|rank| (*rank, now)));
        }
        fresh.map_or(Conclusion::Nothing, Conclusion::Say)
    }

    /// Notes what nobody need be asked about; whether it is to be said.
    pub(super) fn note(&mut self, run: Run, verdict: &Verdict, now: u64) -> bool {
        let case = Case::of(&mut self.cases, run, now);
        // Of several that die the first is the cause.
        let is_said = case.said.as_ref().is_some_and(|said| said.cause == verdict.cause);
        if !is_said {
            case.said = Some(verdict.clone());
        }
        !is_said
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

#[cfg(test)]
mod tests;
