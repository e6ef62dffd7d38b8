//! From what the ranks say to one verdict. `docs/src/watchdog.md` has the table.

use std::{collections::BTreeMap, time::Duration};

use ringsight_records::Cause;

use super::{
    position::{Answer, HeldUp, Position},
    settings::Settings,
};

/// What was launched so long ago may have begun: events are not asked that often, and the answer is on its way for a while.
const JUST_NOW: Duration = Duration::from_millis(50);

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It answered.
    Answer(Answer),
    /// It is in an operation of this communicator that the rank that asks comes to only after the one that it asks about, if
    /// ever: each waits for the other.
    Crossed(HeldUp),
    /// Its process died.
    Gone,
    /// It has ended the communicator in good order, and with it all that it called; its process may be gone.
    Left,
    /// Its process is stopped.
    Stopped,
    /// A debugger holds its process.
    Traced,
    /// It does not answer, and nobody knows why.
    Silent,
    /// It does not answer, and its process lives.
    Busy,
}

impl Heard {
    /// Whether more may come of the rank, though it can be in no other state as far as anybody knows.
    pub(crate) fn may_change(&self) -> bool {
        match self {
            // What it had sent before may still be on its way through a busy machine.
            Self::Left => true,
            // It may have come meanwhile.
            Self::Answer(answer) => answer.is_old,
            _ => false,
        }
    }

    /// Takes what was launched to have begun, where the rank cannot know.
    pub(crate) fn presume(&mut self) {
        if let Self::Answer(Answer {
            position,
            is_old: true,
            ..
        }) = self
        {
            *position = position.presumed();
        }
    }

    /// For how long nothing has moved there, of an operation that is in progress.
    pub(crate) fn still(&self) -> Option<Duration> {
        match self {
            Self::Answer(Answer {
                position: Position::Running { still_ns, .. },
                ..
            }) => Some(Duration::from_nanos(*still_ns)),
            _ => None,
        }
    }

    /// Whether nobody can tell that nothing moves there.
    fn may_move(&self) -> bool {
        matches!(
            self,
            Self::Answer(Answer {
                position: Position::Unwatched { called: true },
                ..
            })
        )
    }

    /// Whether the rank is done with the operation.
    pub(crate) fn is_over(&self) -> bool {
        matches!(
            self,
            Self::Left
                | Self::Answer(Answer {
                    position: Position::Done,
                    ..
                })
        )
    }
}

/// Why an operation does not end, and because of whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) cause: Cause,
    /// The rank that the others wait for.
    pub(crate) culprit: u32,
    /// Other ranks of which the same is true, in rank order.
    pub(crate) others: Vec<u32>,
    /// For how long, where that is known.
    pub(crate) since_ns: Option<u64>,
    /// What keeps the culprit, if it is in another operation.
    pub(crate) held_up: Option<HeldUp>,
    /// Who called what, if that is known.
    pub(crate) called: Option<String>,
    /// What stopped the culprit is a debugger.
    pub(crate) traced: bool,
    /// It will not end by itself, as far as can be known; otherwise somebody is late.
    pub(crate) hang: bool,
    /// Others have said that they wait for the culprit, which waits for nobody.
    pub(crate) is_awaited: bool,
}

impl Verdict {
    /// The same with another rank of those that it is true of as the culprit.
    pub(crate) fn with_culprit(mut self, rank: u32) -> Self {
        if let Some(place) = self.others.iter_mut().find(|other| **other == rank) {
            std::mem::swap(place, &mut self.culprit);
            self.others.sort_unstable();
            (self.since_ns, self.held_up) = (None, None);
        }
        self
    }

    /// Whether the other need not be said once this one has been.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        // Of ranks that all do not move one or the other is first, by a moment; once one is known to be what the others wait for, it is that.
        let is_guess = self.cause == Cause::StuckKernel && (self.is_awaited || !other.is_awaited);
        (self.cause, self.hang) == (other.cause, other.hang) && (self.culprit == other.culprit || is_guess)
    }
}

/// What has been said of an operation, and a verdict now: what is to be said, and what has been said after that.
pub(crate) fn next(said: Option<Verdict>, now: Option<Verdict>) -> (Option<Verdict>, Option<Verdict>) {
    let Some(now) = now else { return (None, None) };
    let Some(said) = said else {
        return (Some(now.clone()), Some(now));
    };
    // Others have followed the first culprit, which stays what it is.
    let now = now.with_culprit(said.culprit);
    if said.covers(&now) {
        (None, Some(said))
    } else {
        (Some(now.clone()), Some(now))
    }
}

/// A rank that an operation may be waiting for.
struct Suspect {
    cause: Cause,
    rank: u32,
    since_ns: Option<u64>,
    held_up: Option<HeldUp>,
    /// A debugger holds it.
    traced: bool,
    /// Its kernel waits, and for whom if it knows.
    waits: bool,
    waits_for: Option<u32>,
    /// It does not wait, and others do for it.
    is_awaited: bool,
}

/// Judges an operation that has been in progress on one of the ranks for `overdue`; `heard` has all ranks that take
/// part, itself among them. `None` if it is only slow.
pub(crate) fn judge(heard: &BTreeMap<u32, Heard>, overdue: Duration, settings: &Settings) -> Option<Verdict> {
    let mut suspects: Vec<Suspect> = heard
        .iter()
        .filter_map(|(rank, heard)| suspect(*rank, heard))
        .collect();
    let first = suspects.iter().map(Suspect::place).min()?;
    suspects.retain(|suspect| suspect.place() == first);
    let mut cause = suspects[0].cause;
    if cause == Cause::StuckKernel {
        let threshold = settings.threshold.as_nanos() as u64;
        let is_unknown = heard.values().any(Heard::may_move);
        if is_unknown || suspects.iter().any(|suspect| suspect.since_ns < Some(threshold)) {
            return None;
        }
        // The others stopped moving because it did. Who is waited for and does not wait itself is what it began with, even if another one was
        // first to be seen not to move.
        let awaited: Vec<u32> = suspects.iter().filter_map(|suspect| suspect.waits_for).collect();
        for suspect in &mut suspects {
            suspect.is_awaited = !suspect.waits && awaited.contains(&suspect.rank);
        }
        suspects.sort_by_key(|suspect| (!suspect.is_awaited, std::cmp::Reverse(suspect.since_ns)));
        // Who has left has done what it called. If all others have come, it is this that it never called.
        let left: Vec<Suspect> = heard
            .iter()
            .filter(|(_, heard)| **heard == Heard::Left)
            .map(|(rank, _)| Suspect::new(Cause::PeerAborted, *rank, None))
            .collect();
        if !left.is_empty() {
            (cause, suspects) = (Cause::PeerAborted, left);
        }
    }
    // Whoever is in another operation will come once that ends; whoever is not is what they all wait for. Who may have come meanwhile is
    // named after those who are known not to have.
    let is_old = |rank: u32| matches!(heard[&rank], Heard::Answer(Answer { is_old: true, .. }));
    suspects.sort_by_key(|suspect| (suspect.held_up.is_some(), is_old(suspect.rank)));
    let traced = suspects.iter().any(|suspect| suspect.traced);
    let late = traced || matches!(cause, Cause::NotLaunched | Cause::QueuedBehindCompute);
    let mut ranks = suspects.iter().map(|suspect| suspect.rank);
    let culprit = ranks.next()?;
    let mut others: Vec<u32> = ranks.collect();
    others.sort_unstable();
    if cause == Cause::StuckKernel {
        // They all do not move: that says nothing of them.
        others.clear();
    }
    Some(Verdict {
        cause,
        culprit,
        others,
        since_ns: suspects[0].since_ns,
        held_up: suspects[0].held_up,
        called: None,
        traced,
        hang: !late || overdue >= settings.arrival,
        is_awaited: suspects[0].is_awaited,
    })
}

impl Suspect {
    fn new(cause: Cause, rank: u32, since_ns: Option<u64>) -> Self {
        Self {
            cause,
            rank,
            since_ns,
            held_up: None,
            traced: false,
            waits: false,
            waits_for: None,
            is_awaited: false,
        }
    }

    /// Where it stands among the reasons: of several the first counts. Whom a debugger holds will go on, as who is late otherwise; but
    /// it explains more than that a rank has not come.
    fn place(&self) -> (Cause, bool) {
        if self.traced {
            (Cause::MetadataMismatch, true)
        } else {
            (self.cause, false)
        }
    }
}

fn suspect(rank: u32, heard: &Heard) -> Option<Suspect> {
    let of = |cause, since_ns| Suspect::new(cause, rank, since_ns);
    Some(match *heard {
        Heard::Left => return None,
        Heard::Gone => of(Cause::RankDead, None),
        Heard::Stopped => of(Cause::RankStopped, None),
        Heard::Traced => Suspect {
            traced: true,
            ..of(Cause::RankStopped, None)
        },
        Heard::Silent | Heard::Busy => of(Cause::NoAnswer, None),
        Heard::Crossed(held) => Suspect {
            held_up: Some(held),
            ..of(Cause::MetadataMismatch, Some(held.since_ns))
        },
        Heard::Answer(Answer {
            position, held_up, ..
        }) => match position {
            Position::Ended => of(Cause::PeerAborted, None),
            Position::Faulted => of(Cause::DeviceFault, None),
            Position::NotLaunched { idle_ns } => Suspect {
                held_up,
                ..of(Cause::NotLaunched, Some(idle_ns))
            },
            Position::Queued { since_ns } if Duration::from_nanos(since_ns) < JUST_NOW => {
                of(Cause::StuckKernel, Some(since_ns))
            }
            Position::Queued { since_ns } => Suspect {
                held_up,
                ..of(Cause::QueuedBehindCompute, Some(since_ns))
            },
            Position::Running { still_ns, waits, .. } => Suspect {
                waits: waits.is_some(),
                waits_for: waits.and_then(|waits| waits.peer).map(u32::from),
                ..of(Cause::StuckKernel, Some(still_ns))
            },
            Position::Unwatched { called: false } => Suspect {
                held_up,
                ..of(Cause::NotLaunched, None)
            },
            Position::Unwatched { called: true } | Position::Done => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Phase, Waits};

    use super::*;
    use crate::{
        checks::Identity,
        watchdog::{
            position::Run,
            settings::{Action, Source},
        },
    };

    const MS: u64 = 1_000_000;
    const SETTINGS: Settings = Settings {
        threshold: Duration::from_millis(2000),
        arrival: Duration::from_secs(600),
        stuck: Duration::from_secs(60),
        interval: Duration::from_secs(1),
        action: Action::Report,
        source: Source::Pages,
        adaptive: None,
    };

    fn at(position: Position) -> Heard {
        Heard::Answer(position.into())
    }

    fn running(still_ms: u64) -> Heard {
        at(Position::Running {
            since_ns: 3000 * MS,
            still_ns: still_ms * MS,
            waits: None,
        })
    }

    fn waiting(still_ms: u64, peer: Option<u16>) -> Heard {
        at(Position::Running {
            since_ns: 3000 * MS,
            still_ns: still_ms * MS,
            waits: Some(Waits {
                op: 1,
                channel: 0,
                phase: Phase::Data,
                peer,
                step: 5,
            }),
        })
    }

    fn late(idle_ms: u64) -> Heard {
        at(Position::NotLaunched {
            idle_ns: idle_ms * MS,
        })
    }

    fn crossed() -> Heard {
        Heard::Crossed(HeldUp {
            comm: 1,
            run: Run {
                identity: Identity::Collective { seq: 9 },
                replay: 0,
            },
            since_ns: 2500 * MS,
        })
    }

    fn verdict(heard: &[Heard], overdue_s: u64) -> Option<(Cause, u32, bool)> {
        let heard = (0..).zip(heard.iter().copied()).collect();
        judge(&heard, Duration::from_secs(overdue_s), &SETTINGS)
            .map(|verdict| (verdict.cause, verdict.culprit, verdict.hang))
    }

    #[test]
    fn the_first_cause_counts() {
        let stuck = running(2500);
        let queued = at(Position::Queued { since_ns: 500 * MS });
        let ended = at(Position::Ended);
        let cases = [
            (
                vec![stuck, late(9), queued, Heard::Gone, ended],
                Cause::RankDead,
                3,
                true,
            ),
            (
                vec![stuck, late(9), Heard::Stopped, at(Position::Faulted), ended],
                Cause::DeviceFault,
                3,
                true,
            ),
            (
                vec![stuck, late(9), ended, Heard::Stopped],
                Cause::PeerAborted,
                2,
                true,
            ),
            (
                vec![stuck, late(9), Heard::Silent, Heard::Stopped],
                Cause::RankStopped,
                3,
                true,
            ),
            (vec![stuck, late(9), Heard::Silent], Cause::NoAnswer, 2, true),
            (
                vec![stuck, queued, crossed(), late(9)],
                Cause::MetadataMismatch,
                2,
                true,
            ),
            (vec![stuck, queued, late(9)], Cause::NotLaunched, 2, false),
            (
                vec![stuck, queued, at(Position::Done)],
                Cause::QueuedBehindCompute,
                1,
                false,
            ),
            (
                vec![stuck, running(2600), running(2500)],
                Cause::StuckKernel,
                1,
                true,
            ),
        ];
        for (heard, cause, culprit, hang) in cases {
            assert_eq!(verdict(&heard, 3), Some((cause, culprit, hang)), "{heard:?}");
        }
    }

    #[test]
    fn slow_is_not_stuck_and_late_becomes_a_hang() {
        assert_eq!(verdict(&[running(2500), running(10)], 60), None);
        let just_launched = at(Position::Queued { since_ns: 5 * MS });
        assert_eq!(verdict(&[running(2500), just_launched], 60), None);
        assert_eq!(
            verdict(&[running(2500), at(Position::Done)], 3),
            Some((Cause::StuckKernel, 0, true))
        );
        assert_eq!(
            verdict(&[running(2500), late(1)], 599),
            Some((Cause::NotLaunched, 1, false))
        );
        assert_eq!(
            verdict(&[running(2500), late(1)], 600),
            Some((Cause::NotLaunched, 1, true))
        );
    }

    #[test]
    fn a_rank_whose_watchdog_is_off_is_named_only_for_what_it_has_not_called() {
        let unwatched = |called| at(Position::Unwatched { called });
        assert_eq!(
            verdict(&[running(2500), unwatched(true)], 60),
            None,
            "it may move"
        );
        assert_eq!(
            verdict(&[running(2500), unwatched(false)], 60),
            Some((Cause::NotLaunched, 1, false))
        );
        assert_eq!(
            verdict(&[running(2500), unwatched(true), late(5)], 60),
            Some((Cause::NotLaunched, 2, false))
        );
    }

    #[test]
    fn who_is_waited_for_and_does_not_wait_is_the_culprit() {
        let stuck = |rank| Some((Cause::StuckKernel, rank, true));
        let heard = [waiting(2600, Some(2)), waiting(2700, Some(0)), running(2500)];
        assert_eq!(verdict(&heard, 3), stuck(2), "though it was last to stop");
        // All wait, or nobody knows for whom: as without.
        let heard = [
            waiting(2600, Some(1)),
            waiting(2700, Some(0)),
            waiting(2500, Some(1)),
        ];
        assert_eq!(verdict(&heard, 3), stuck(1));
        let heard = [waiting(2600, None), running(2500)];
        assert_eq!(verdict(&heard, 3), stuck(0));
    }

    #[test]
    fn a_better_known_culprit_is_said_and_stays() {
        let found = |heard: &[Heard]| {
            let heard = (0..).zip(heard.iter().copied()).collect();
            judge(&heard, Duration::from_secs(3), &SETTINGS)
        };
        let guess = [waiting(2600, None), waiting(2700, None), running(2500)];
        let known = [waiting(2600, Some(2)), waiting(2700, Some(0)), running(2500)];
        let culprit = |verdict: &Option<Verdict>| verdict.as_ref().map(|verdict| verdict.culprit);
        let (say, said) = next(None, found(&guess));
        assert_eq!((culprit(&say), culprit(&said)), (Some(1), Some(1)));
        // Another guess is no news.
        let other = [waiting(2800, None), waiting(2700, None), running(2500)];
        let (say, said) = next(said, found(&other));
        assert_eq!((culprit(&say), culprit(&said)), (None, Some(1)));
        let (say, said) = next(said, found(&known));
        assert_eq!((culprit(&say), culprit(&said)), (Some(2), Some(2)));
        let (say, said) = next(said, found(&guess));
        assert_eq!((culprit(&say), culprit(&said)), (None, Some(2)));
        let (say, said) = next(said, found(&known));
        assert_eq!((culprit(&say), culprit(&said)), (None, Some(2)));
        // What moves again is said again when it stops.
        assert_eq!(next(said, None), (None, None));
    }

    #[test]
    fn a_debugger_s_stop_is_no_hang_before_the_arrival_time_out() {
        let stopped_by = |heard: &[Heard], overdue_s| {
            let heard = (0..).zip(heard.iter().copied()).collect();
            let verdict = judge(&heard, Duration::from_secs(overdue_s), &SETTINGS).unwrap();
            (verdict.cause, verdict.culprit, verdict.traced, verdict.hang)
        };
        let (stuck, traced) = (running(2500), Heard::Traced);
        // Ranks that have not come may wait for it elsewhere.
        let heard = [stuck, late(9), traced];
        assert_eq!(stopped_by(&heard, 599), (Cause::RankStopped, 2, true, false));
        assert_eq!(stopped_by(&heard, 600), (Cause::RankStopped, 2, true, true));
        // What can never end is said first.
        for (heard, cause) in [
            (Heard::Stopped, Cause::RankStopped),
            (Heard::Silent, Cause::NoAnswer),
            (crossed(), Cause::MetadataMismatch),
        ] {
            assert_eq!(stopped_by(&[stuck, traced, heard], 3), (cause, 2, false, true));
        }
    }

    #[test]
    fn a_rank_that_has_left_is_the_culprit_only_if_all_others_have_come() {
        assert_eq!(
            verdict(&[running(2500), Heard::Left, late(5)], 3),
            Some((Cause::NotLaunched, 2, false))
        );
        assert_eq!(
            verdict(&[running(2500), Heard::Left, Heard::Stopped], 3),
            Some((Cause::RankStopped, 2, true))
        );
        assert_eq!(
            verdict(&[running(2500), Heard::Left, running(2500)], 3),
            Some((Cause::PeerAborted, 1, true))
        );
        assert_eq!(verdict(&[running(2500), Heard::Left, running(10)], 3), None);
    }

    #[test]
    fn a_rank_that_waits_elsewhere_is_not_the_culprit() {
        let elsewhere = Heard::Answer(Answer {
            position: Position::NotLaunched { idle_ns: 9000 * MS },
            held_up: Some(HeldUp {
                comm: 7,
                run: Run {
                    identity: Identity::Collective { seq: 3 },
                    replay: 0,
                },
                since_ns: 4000 * MS,
            }),
            is_old: false,
        });
        let heard = (0..).zip([running(2500), elsewhere, late(5), late(6)]).collect();
        let verdict = judge(&heard, Duration::from_secs(3), &SETTINGS).unwrap();
        assert_eq!((verdict.culprit, verdict.others), (2, vec![1, 3]));
        let heard = (0..).zip([running(2500), elsewhere]).collect();
        let verdict = judge(&heard, Duration::from_secs(3), &SETTINGS).unwrap();
        assert_eq!(
            (verdict.culprit, verdict.held_up.map(|held| held.comm)),
            (1, Some(7))
        );
    }
}
