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
#[derive(Default)]
pub(super) struct Inquiry {
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

    /// What follows from what was found about a run by rank `rank`, which looks into it again after `rest` at the latest.
    pub(super) fn conclude(
        &mut self,
        run: Run,
        verdict: Option<Verdict>,
        (rank, heard): (u32, &BTreeMap<u32, Heard>),
        rest: Duration,
        now: u64,
    ) -> Conclusion {
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
mod tests {
    use super::*;
    use crate::{checks::Identity, watchdog::position::HeldUp};

    const MS: u64 = 1_000_000;
    const REST: Duration = Duration::from_secs(1);
    /// The rank that asks.
    const OWN: u32 = 0;

    fn run(seq: u64) -> Run {
        Run {
            identity: Identity::Collective { seq },
            replay: 0,
        }
    }

    fn verdict(cause: Cause, culprit: u32, hang: bool) -> Option<Verdict> {
        Some(Verdict {
            hang,
            ..Verdict::hang(cause, culprit)
        })
    }

    fn step(inquiry: &mut Inquiry, seq: u64, now: u64) -> Step {
        inquiry.step(run(seq), &[OWN, 1], (OWN, Position::Done.into()), now)
    }

    fn conclude(inquiry: &mut Inquiry, seq: u64, verdict: Option<Verdict>, now: u64) -> Conclusion {
        let heard = BTreeMap::from([(OWN, Heard::Silent), (1, Heard::Silent)]);
        inquiry.conclude(run(seq), verdict, (OWN, &heard), REST, now)
    }

    #[test]
    fn all_that_is_overdue_is_asked_about_at_once() {
        let mut inquiry = Inquiry::default();
        for seq in 1..=20 {
            let query = seq as u32;
            assert_eq!(step(&mut inquiry, seq, MS), Step::Ask { query });
            assert_eq!(step(&mut inquiry, seq, 2 * MS), Step::Wait);
        }
        inquiry.heard(7, 1, Heard::Stopped, 3 * MS);
        let expected = BTreeMap::from([(OWN, Heard::Answer(Position::Done.into())), (1, Heard::Stopped)]);
        assert_eq!(step(&mut inquiry, 7, 3 * MS), Step::Heard(expected));
        assert_eq!(conclude(&mut inquiry, 7, None, 3 * MS), Conclusion::Nothing);
        // Each rests by itself.
        assert_eq!(
            step(&mut inquiry, 7, 4 * MS),
            Step::Rest(REST - Duration::from_millis(1))
        );
        let look = Step::Look {
            query: 8,
            ranks: vec![1],
        };
        assert_eq!(step(&mut inquiry, 8, 250 * MS), look);
        assert_eq!(step(&mut inquiry, 7, 1003 * MS), Step::Ask { query: 21 });
    }

    #[test]
    fn what_is_late_hides_no_hang_and_who_holds_up_several_is_named_once() {
        let mut inquiry = Inquiry::default();
        let late = verdict(Cause::NotLaunched, 1, false);
        let stopped = verdict(Cause::RankStopped, 2, true);
        let say = |verdict: &Option<Verdict>| Conclusion::Say(verdict.clone().unwrap());
        assert_eq!(conclude(&mut inquiry, 1, late.clone(), MS), say(&late));
        assert_eq!(conclude(&mut inquiry, 2, stopped.clone(), MS), say(&stopped));
        assert_eq!(conclude(&mut inquiry, 3, late.clone(), MS), Conclusion::Nothing);
        assert_eq!(
            conclude(&mut inquiry, 1, late.clone(), 2 * MS),
            Conclusion::Nothing
        );
        // The third one is not late because of the first one any more.
        inquiry.keep(|kept| kept != run(1));
        assert_eq!(conclude(&mut inquiry, 3, late.clone(), 3 * MS), say(&late));
        let hang = verdict(Cause::NotLaunched, 1, true);
        assert_eq!(
            conclude(&mut inquiry, 3, hang.clone(), 4 * MS),
            say(&hang),
            "it has become one"
        );
    }

    #[test]
    fn what_may_be_otherwise_is_asked_again() {
        let mut inquiry = Inquiry::default();
        let silent = verdict(Cause::NoAnswer, 1, true);
        assert_eq!(step(&mut inquiry, 1, MS), Step::Ask { query: 1 });
        assert_eq!(
            conclude(&mut inquiry, 1, silent.clone(), 400 * MS),
            Conclusion::Doubt
        );
        // An answer to a question that is closed: it is behind, and that is no second time.
        inquiry.heard(0, 1, Heard::Answer(Position::Done.into()), 500 * MS);
        assert_eq!(
            conclude(&mut inquiry, 1, silent.clone(), 800 * MS),
            Conclusion::Doubt
        );
        let said = conclude(&mut inquiry, 1, silent.clone(), 1200 * MS);
        assert_eq!(said, Conclusion::Say(silent.unwrap()));
        let stuck = verdict(Cause::StuckKernel, 1, true);
        for (at, lost) in [(2000, 0), (2500, 300), (2800, 0)] {
            inquiry.lose(at * MS, lost * MS);
            assert_eq!(
                conclude(&mut inquiry, 2, stuck.clone(), at * MS),
                Conclusion::Doubt,
                "{at}"
            );
        }
        let said = conclude(&mut inquiry, 2, stuck.clone(), 2900 * MS);
        assert_eq!(said, Conclusion::Say(stuck.unwrap()), "0.6 s, and what was lost");
    }

    /// A rank that is late may be caught in a message to this one, which is on its way and ends by itself.
    #[test]
    fn ranks_wait_for_each_other_if_that_lasts_and_nothing_moves() {
        let mut inquiry = Inquiry::default();
        let mismatch = verdict(Cause::MetadataMismatch, 1, true);
        let mut conclude = |at_ms: u64, stood_ms: u64| {
            let held = HeldUp {
                comm: 1,
                run: run(9),
                since_ns: 5000 * MS,
                bars_ns: Some(stood_ms * MS),
            };
            let heard = BTreeMap::from([(1, Heard::Crossed(held))]);
            inquiry.conclude(run(1), mismatch.clone(), (OWN, &heard), REST, at_ms * MS)
        };
        assert_eq!(
            conclude(1000, 5000),
            Conclusion::Doubt,
            "one answer tells nothing"
        );
        assert_eq!(conclude(1599, 5000), Conclusion::Doubt);
        assert_eq!(conclude(1700, 599), Conclusion::Doubt, "it has moved");
        assert_eq!(conclude(1800, 699), Conclusion::Say(mismatch.clone().unwrap()));
    }

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
