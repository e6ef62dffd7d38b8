//! Investigations: one per overdue operation, from the question to its ranks to the verdict that is reported.
//!
//! An investigation goes around this circle until its operation completes:
//!
//! ```text
//!            rest is over                 every rank is known, or time is up
//!   Resting ───────────────▶ Asking ─────────────────────────────────────────▶ judged
//!      ▲                       │ ANSWER_TIME is up: someone looks at             │
//!      │                       └──▶ the processes of silent ranks                │
//!      │      nothing to report, or it is reported                               │
//!      └─────────────────────────────────────────────────────────────────────────┤
//!   Asking ◀── the verdict is in doubt: ask again at once ───────────────────────┘
//! ```
//!
//! The watchdog's thread moves it on ([`Investigations::next_step`], [`Investigations::conclude`]). The service threads only
//! add what they hear ([`Investigations::hear`] and the news of ranks).

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ringsight_records::Cause;

use super::{
    completed::CompletedRuns,
    evidence::{OperationRun, Position, RankAnswer, RankState},
    verdict::{Revision, Verdict, revise},
};

/// How long a rank may take to answer. Its service thread does nothing else, but its host may be busy.
pub(super) const ANSWER_TIME: Duration = Duration::from_millis(200);
/// How long the neighbours of silent ranks may take to answer.
pub(super) const HEALTH_TIME: Duration = Duration::from_millis(150);

/// How long a verdict must last that a busy machine can cause for a moment. These verdicts must last: ranks that have all come
/// stand still; a rank has left; a rank with a stale answer has not come; two ranks wait for each other. Between two kernels
/// on different nodes four threads have to run.
pub(crate) const MUST_LAST: Duration = Duration::from_millis(600);

/// How often a rank is asked before its silence counts.
pub(super) const ASKED: u32 = 2;
/// The same for a rank whose process is known to live: a busy machine may keep it from answering for long.
pub(super) const ASKED_ALIVE: u32 = 10;

/// The investigations of one communicator, and what is known of its ranks for all of them.
pub(super) struct Investigations {
    /// The communicator's threshold.
    threshold: Duration,
    /// Number of the last question.
    query: u32,
    /// In the order in which they were opened.
    open: Vec<Investigation>,
    /// Ranks that gave up their operations, and what they had completed.
    gave_up: BTreeMap<u32, CompletedRuns>,
    /// Ranks whose processes died.
    dead: BTreeSet<u32>,
    /// Ranks whose processes a debugger has attached to, and may stop at any time.
    debugged: BTreeSet<u32>,
    /// Ranks that answered a question after it was closed, and when they last did: they live, and are behind.
    behind: BTreeMap<u32, u64>,
    /// Ranks that were stopped, or reported as silent, and when that was last found: other ranks need not be late with
    /// what they could not do meanwhile.
    excused_by: BTreeMap<u32, u64>,
}

/// The investigation of one overdue operation.
struct Investigation {
    run: OperationRun,
    question: Option<Question>,
    /// When the last question was closed, or when the investigation was opened.
    closed_ns: u64,
    /// How often in a row the verdict was that a rank does not answer.
    unanswered: u32,
    /// Since when the verdict is one that must last ([`MUST_LAST`]).
    lasting_since_ns: Option<u64>,
    /// The verdict that has been reported.
    reported: Option<Verdict>,
    /// At the last question all its ranks had come to the operation.
    all_had_come: bool,
    /// No question before this time.
    rests_until_ns: u64,
}

/// A question to the ranks of an operation that is not closed yet.
struct Question {
    query: u32,
    asked_ns: u64,
    /// Ranks of the operation. Of others nothing is kept, whatever somebody says of them.
    participants: Vec<u32>,
    states: BTreeMap<u32, RankState>,
    /// When the health of silent ranks was asked for.
    health_asked_ns: Option<u64>,
}

/// What an investigation needs next.
#[derive(Debug, PartialEq)]
pub(super) enum NextStep {
    /// Nothing for this long.
    Rest(Duration),
    /// The question with this number is to be sent to the ranks.
    Ask { query: u32 },
    /// Answers may still come.
    Wait,
    /// The processes of these ranks are to be looked at: the ranks do not answer.
    CheckHealth { query: u32, ranks: Vec<u32> },
    /// The question is closed with this knowledge.
    Judge(BTreeMap<u32, RankState>),
}

/// What is done with a verdict.
#[derive(Debug, PartialEq)]
pub(super) enum Conclusion {
    /// It is in doubt: the ranks are asked again at once.
    Doubt,
    /// It is reported.
    Report(Verdict),
    /// There is no verdict, or it has been reported.
    Nothing,
}

/// A closed question and the verdict on it.
pub(super) struct Judged<'a> {
    pub(super) run: OperationRun,
    /// When the operation began on this rank.
    pub(super) began_ns: u64,
    pub(super) verdict: Option<Verdict>,
    /// By rank, what was known.
    pub(super) states: &'a BTreeMap<u32, RankState>,
    /// The rank that asked.
    pub(super) asker: u32,
    /// How long the investigation rests now, at most.
    pub(super) rest: Duration,
}

impl Investigation {
    fn new(run: OperationRun, now: u64) -> Self {
        Self {
            run,
            question: None,
            closed_ns: now,
            unanswered: 0,
            lasting_since_ns: None,
            reported: None,
            all_had_come: false,
            rests_until_ns: 0,
        }
    }
}

/// The investigation of a run, which is opened if there is none.
fn of(open: &mut Vec<Investigation>, run: OperationRun, now: u64) -> &mut Investigation {
    let known = open.iter().position(|investigation| investigation.run == run);
    let place = known.unwrap_or_else(|| {
        open.push(Investigation::new(run, now));
        open.len() - 1
    });
    &mut open[place]
}

impl Investigations {
    /// None, of a communicator with this threshold.
    pub(super) fn new(threshold: Duration) -> Self {
        Self {
            threshold,
            query: 0,
            open: Vec::new(),
            gave_up: BTreeMap::new(),
            dead: BTreeSet::new(),
            debugged: BTreeSet::new(),
            behind: BTreeMap::new(),
            excused_by: BTreeMap::new(),
        }
    }

    /// Something became known of a rank, in answer to a question.
    pub(super) fn hear(&mut self, query: u32, rank: u32, state: RankState, now: u64) {
        let mut questions = self
            .open
            .iter_mut()
            .filter_map(|investigation| investigation.question.as_mut());
        let Some(question) = questions.find(|question| question.query == query) else {
            if matches!(state, RankState::Answered(_)) {
                self.behind.insert(rank, now);
            }
            return;
        };
        if !question.participants.contains(&rank) {
            return;
        }
        // A rank's own word replaces what others say of it, and anything replaces silence.
        let replaces = match question.states.get(&rank) {
            None | Some(RankState::Silent | RankState::SilentAlive) => true,
            Some(_) => matches!(state, RankState::Answered(_)),
        };
        if replaces {
            question.states.insert(rank, state);
        }
    }

    /// A rank gave up its operations.
    pub(super) fn rank_gave_up(&mut self, rank: u32, completed: CompletedRuns) {
        self.gave_up.insert(rank, completed);
    }

    /// A rank's process died.
    pub(super) fn rank_died(&mut self, rank: u32) {
        self.dead.insert(rank);
    }

    /// A debugger attached to a rank's process, or detached from it.
    pub(super) fn debugger(&mut self, rank: u32, is_attached: bool) {
        if is_attached {
            self.debugged.insert(rank);
        } else {
            self.debugged.remove(&rank);
        }
    }

    /// Nothing could move for `lost_ns`: a verdict that must last did not last meanwhile.
    pub(super) fn lose_time(&mut self, now: u64, lost_ns: u64) {
        for since in self
            .open
            .iter_mut()
            .filter_map(|investigation| investigation.lasting_since_ns.as_mut())
        {
            *since = (*since + lost_ns).min(now);
        }
    }

    /// Whether a verdict may say no more than that one of its ranks did not run: the operation began before that was
    /// found, and the ranks have not had a whole threshold since.
    fn is_excused(&self, judged: &Judged<'_>, verdict: &Verdict, now: u64) -> bool {
        let is_by_time = matches!(
            verdict.cause,
            Cause::NotLaunched | Cause::QueuedBehindCompute | Cause::StuckNic | Cause::StuckKernel
        );
        let threshold_ns = u64::try_from(self.threshold.as_nanos()).unwrap_or(u64::MAX);
        let is_recent = |found: &u64| judged.began_ns < *found && now < found.saturating_add(threshold_ns);
        let mut ranks = judged.states.keys();
        is_by_time && ranks.any(|rank| self.excused_by.get(rank).is_some_and(is_recent))
    }

    /// For how long the verdict on a run has been one that must last.
    pub(super) fn doubted_for(&self, run: OperationRun, now: u64) -> Duration {
        let investigation = self.open.iter().find(|investigation| investigation.run == run);
        let since = investigation.and_then(|investigation| investigation.lasting_since_ns);
        Duration::from_nanos(now.saturating_sub(since.unwrap_or(now)))
    }

    /// Closes the investigations of runs that are not in progress any more.
    pub(super) fn retain(&mut self, is_in_progress: impl Fn(OperationRun) -> bool) {
        self.open
            .retain(|investigation| is_in_progress(investigation.run));
        if self.open.is_empty() {
            self.behind.clear();
        }
    }

    /// Whether it is reported that the ranks do not call alike. Then no operation can end, and what is found while one rank
    /// after the other gives up is a consequence.
    pub(super) fn is_final(&self) -> bool {
        self.open
            .iter()
            .filter_map(|investigation| investigation.reported.as_ref())
            .any(|reported| reported.cause == Cause::MetadataMismatch)
    }

    /// Whether all ranks of each of these runs had come to it at the last question.
    pub(super) fn all_had_come(&self, runs: &[OperationRun]) -> bool {
        runs.iter().all(|run| {
            self.open
                .iter()
                .any(|investigation| investigation.run == *run && investigation.all_had_come)
        })
    }

    /// Moves the investigation of a run on. `own` is what rank `asker`, which asks, knows of itself.
    pub(super) fn next_step(
        &mut self,
        run: OperationRun,
        participants: &[u32],
        (asker, own): (u32, RankAnswer),
        now: u64,
    ) -> NextStep {
        let passed = |since: u64| Duration::from_nanos(now.saturating_sub(since));
        let investigation = of(&mut self.open, run, now);
        let Some(question) = &mut investigation.question else {
            let left_ns = investigation.rests_until_ns.saturating_sub(now);
            if left_ns > 0 {
                return NextStep::Rest(Duration::from_nanos(left_ns));
            }
            let gave_up = self.gave_up.iter().map(|(rank, completed)| {
                let state = match completed.contains(run) {
                    true => RankState::Left,
                    false => RankState::Answered(Position::CommunicatorEnded.into()),
                };
                (*rank, state)
            });
            let dead = self.dead.iter().map(|rank| (*rank, RankState::Dead));
            let known = gave_up
                .chain(dead)
                .filter(|(rank, _)| participants.contains(rank));
            self.query = self.query.wrapping_add(1);
            investigation.question = Some(Question {
                query: self.query,
                asked_ns: now,
                participants: participants.to_vec(),
                states: known.chain([(asker, RankState::Answered(own))]).collect(),
                health_asked_ns: None,
            });
            return NextStep::Ask { query: self.query };
        };
        let silent: Vec<u32> = participants
            .iter()
            .copied()
            .filter(|rank| !question.states.contains_key(rank))
            .collect();
        if !silent.is_empty() {
            match question.health_asked_ns {
                None if passed(question.asked_ns) < ANSWER_TIME => return NextStep::Wait,
                None => {
                    question.health_asked_ns = Some(now);
                    return NextStep::CheckHealth {
                        query: question.query,
                        ranks: silent,
                    };
                }
                Some(since) if passed(since) < HEALTH_TIME => return NextStep::Wait,
                Some(_) => {}
            }
        }
        let mut states = std::mem::take(&mut question.states);
        investigation.question = None;
        states.extend(silent.into_iter().map(|rank| (rank, RankState::Silent)));
        for (rank, state) in &mut states {
            if *state == RankState::Silent && self.debugged.contains(rank) {
                *state = RankState::Traced;
            }
            // What the rank completed may need its network yet, which does nothing any more.
            if self.gave_up.contains_key(rank) && state.is_over() {
                *state = RankState::Left;
            }
        }
        NextStep::Judge(states)
    }

    /// Decides whether the verdict on a closed question is reported.
    pub(super) fn conclude(&mut self, judged: Judged<'_>, now: u64) -> Conclusion {
        let is_excused = judged
            .verdict
            .as_ref()
            .is_some_and(|verdict| self.is_excused(&judged, verdict, now));
        let stopped = judged
            .states
            .iter()
            .filter(|(_, state)| **state == RankState::Stopped);
        self.excused_by.extend(stopped.map(|(rank, _)| (*rank, now)));
        // A rank that holds up several operations is named once.
        let is_covered = judged.verdict.as_ref().is_some_and(|verdict| {
            self.open
                .iter()
                .filter(|investigation| investigation.run != judged.run)
                .filter_map(|investigation| investigation.reported.as_ref())
                .any(|reported| reported.covers(verdict))
        });
        let culprit = judged.verdict.as_ref().map(|verdict| verdict.culprit);
        let late_answer_ns = culprit.and_then(|rank| self.behind.get(&rank).copied());
        let Judged {
            run,
            verdict,
            states,
            asker,
            rest,
            ..
        } = judged;
        let rests_until_ns = now.saturating_add(u64::try_from(rest.as_nanos()).unwrap_or(u64::MAX));
        let investigation = of(&mut self.open, run, now);
        investigation.all_had_come = states.values().all(RankState::has_come);
        if is_excused {
            // The reported verdict stands until then.
            investigation.unanswered = 0;
            investigation.lasting_since_ns = None;
            investigation.closed_ns = now;
            investigation.rests_until_ns = rests_until_ns;
            return Conclusion::Nothing;
        }
        let Revision { news, standing } = match is_covered {
            true => Revision {
                news: None,
                standing: None,
            },
            false => revise(investigation.reported.clone(), verdict),
        };
        let closed_before_ns = std::mem::replace(&mut investigation.closed_ns, now);
        if let Some(news) = &news {
            // A rank that is only busy may answer the next time.
            if news.cause == Cause::NoAnswer {
                if late_answer_ns.is_some_and(|came| came > closed_before_ns) {
                    return Conclusion::Doubt;
                }
                investigation.unanswered = investigation.unanswered.saturating_add(1);
                if investigation.unanswered < asked_before_silence_counts(states, asker) {
                    return Conclusion::Doubt;
                }
            } else {
                investigation.unanswered = 0;
            }
            // On a busy machine data may be on its way for long. A kernel of one rank alone waits for nobody.
            let culprit = states.get(&news.culprit);
            let must_last = culprit.is_some_and(RankState::may_change)
                || news.cause == Cause::StuckKernel && states.len() > 1;
            if must_last {
                let since = *investigation.lasting_since_ns.get_or_insert(now);
                let has_lasted = Duration::from_nanos(now.saturating_sub(since)) >= MUST_LAST;
                // A message that is sent before its receiver comes may yet end.
                let moves =
                    matches!(culprit, Some(RankState::Deadlocked(blocking)) if !blocking.has_stood_still());
                if moves || !has_lasted {
                    return Conclusion::Doubt;
                }
            }
        }
        investigation.unanswered = 0;
        investigation.lasting_since_ns = None;
        investigation.reported = standing;
        investigation.rests_until_ns = rests_until_ns;
        // Once a rank is reported as stopped or silent, nobody else is blamed for that time, until it is reported again.
        if let Some(news) = &news
            && matches!(news.cause, Cause::RankStopped | Cause::NoAnswer)
        {
            let ranks = news.others.iter().chain([&news.culprit]);
            self.excused_by.extend(ranks.map(|rank| (*rank, now)));
        }
        news.map_or(Conclusion::Nothing, Conclusion::Report)
    }

    /// Notes a verdict that needs no question. Returns whether it is to be reported.
    pub(super) fn note(&mut self, run: OperationRun, verdict: &Verdict, now: u64) -> bool {
        let investigation = of(&mut self.open, run, now);
        // Of several ranks that die the first is the cause.
        let is_reported = investigation
            .reported
            .as_ref()
            .is_some_and(|reported| reported.cause == verdict.cause);
        if !is_reported {
            investigation.reported = Some(verdict.clone());
        }
        !is_reported
    }
}

/// How often the ranks are asked before silence counts. It is more often if a silent rank is known to live, because the
/// machine may be busy, and if all of several ranks are silent, because the asker may be the one that does not hear.
fn asked_before_silence_counts(states: &BTreeMap<u32, RankState>, asker: u32) -> u32 {
    let mut others = states
        .iter()
        .filter(|(rank, _)| **rank != asker)
        .map(|(_, state)| state);
    let one_lives = others.clone().any(|state| *state == RankState::SilentAlive);
    let hears_nobody = others.clone().count() > 1
        && others.all(|state| matches!(state, RankState::Silent | RankState::SilentAlive));
    if one_lives || hears_nobody {
        ASKED_ALIVE
    } else {
        ASKED
    }
}

#[cfg(test)]
mod tests;
