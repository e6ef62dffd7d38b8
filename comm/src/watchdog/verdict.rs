//! From what the ranks say to one verdict. `docs/src/watchdog.md` has the table.

use std::{collections::BTreeMap, time::Duration};

use ringsight_records::Cause;

use super::{
    position::{Answer, HeldUp, Position},
    settings::Settings,
};
use crate::proxy::stalls::Stall;

#[cfg(test)]
mod tests;

/// What was launched so long ago may have begun: events are not asked that often, and the answer is on its way for a while.
const JUST_NOW: Duration = Duration::from_millis(50);

/// What is known of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// It answered.
    Answer(Answer),
    /// It is in an operation of this communicator that the rank that asks comes to only after the one that it asks about, and so it is
    /// there: each waits for the other, if that lasts.
    Crossed(HeldUp),
    /// Its process died.
    Gone,
    /// It has ended the communicator, and was done with the operation, or it did so in good order, and is done with all that it called; its
    /// process may be gone.
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
            // It may be at what ends by itself.
            Self::Crossed(_) => true,
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

    /// Where it waits for the network in the operation.
    pub(crate) fn stall(&self) -> Option<&Stall> {
        match self {
            Self::Answer(answer) => answer.stall.as_ref(),
            _ => None,
        }
    }

    /// Whether the rank is in the operation, or done with it.
    pub(crate) fn has_come(&self) -> bool {
        self.is_over() || self.still().is_some()
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

    /// Whether the rank is done with the operation, its network included.
    pub(crate) fn is_over(&self) -> bool {
        matches!(
            self,
            Self::Left
                | Self::Answer(Answer {
                    position: Position::Done,
                    stall: None,
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
    /// Where the culprit and the others wait for the network, if it is that.
    pub(crate) stalls: BTreeMap<u32, Stall>,
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
    /// A hang of which nothing more is known.
    pub(crate) fn hang(cause: Cause, culprit: u32) -> Self {
        Self {
            cause,
            culprit,
            others: Vec::new(),
            since_ns: None,
            held_up: None,
            stalls: BTreeMap::new(),
            called: None,
            traced: false,
            hang: true,
            is_awaited: false,
        }
    }

    /// The same with another rank of those that it is true of as the culprit.
    fn with_culprit(mut self, rank: u32) -> Self {
        if let Some(place) = self.others.iter_mut().find(|other| **other == rank) {
            std::mem::swap(place, &mut self.culprit);
            self.others.sort_unstable();
            self.since_ns = self.stall().map(|stall| stall.for_ns);
            self.held_up = None;
        }
        self
    }

    /// Where the culprit waits for the network.
    pub(crate) fn stall(&self) -> Option<&Stall> {
        self.stalls.get(&self.culprit)
    }

    /// How little a rank knows of what has failed in the network, if it is that.
    fn level(&self, rank: u32) -> Option<u8> {
        self.stalls.get(&rank).map(|stall| stall.why.level())
    }

    /// How old what it tells of is, in an operation that has been in progress for `overdue`: by that late becomes a hang.
    pub(crate) fn age(&self, overdue: Duration) -> Duration {
        self.stall()
            .map_or(overdue, |stall| Duration::from_nanos(stall.for_ns))
    }

    /// Whether the other need not be said once this one has been, of the same operation.
    fn covers(&self, other: &Self) -> bool {
        // Of ranks that all do not move one or the other is first, by a moment; once one is known to be what the others wait for, it is that.
        let is_guess = self.cause == Cause::StuckKernel && (self.is_awaited || !other.is_awaited);
        // Once it is known what has failed in the network, it is that.
        let is_known = other.level(other.culprit) < self.level(self.culprit);
        (self.cause, self.hang) == (other.cause, other.hang)
            && (self.culprit == other.culprit || is_guess)
            && !is_known
    }

    /// Whether the other says nothing that this one has not, of another operation.
    pub(crate) fn tells(&self, other: &Self) -> bool {
        let is_named = |rank| self.culprit == rank || self.others.contains(&rank);
        // Who was first of those that do not move is a guess; it may be so because of what has been said.
        let is_guess = other.cause == Cause::StuckKernel && !other.is_awaited;
        let names_all = || is_named(other.culprit) && other.others.iter().all(|rank| is_named(*rank));
        (self.cause, self.hang) == (other.cause, other.hang) && (is_guess || names_all())
    }
}

/// What has been said of an operation, and a verdict now: what is to be said, and what has been said after that.
pub(crate) fn next(said: Option<Verdict>, now: Option<Verdict>) -> (Option<Verdict>, Option<Verdict>) {
    let Some(now) = now else { return (None, None) };
    let Some(said) = said else {
        return (Some(now.clone()), Some(now));
    };
    // Others have followed the first culprit, which stays what it is, unless another one is known to be it.
    let now = match now.level(now.culprit) == now.level(said.culprit) {
        true => now.with_culprit(said.culprit),
        false => now,
    };
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
    stall: Option<Stall>,
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
    let threshold = settings.threshold.as_nanos() as u64;
    // Who cannot be reached by either way need not be at fault.
    let is_away = heard
        .values()
        .filter_map(Heard::stall)
        .any(|stall| stall.for_ns >= threshold && heard.get(&stall.peer) == Some(&Heard::Silent));
    let mut suspects: Vec<Suspect> = heard
        .iter()
        .filter(|(_, heard)| !(is_away && **heard == Heard::Silent))
        .filter_map(|(rank, heard)| suspect(*rank, heard))
        .collect();
    let first = suspects.iter().map(Suspect::place).min()?;
    suspects.retain(|suspect| suspect.place() == first);
    if suspects[0].cause == Cause::StuckKernel {
        suspects = stuck(suspects, heard, threshold)?;
    }
    let cause = suspects[0].cause;
    // Whoever is in another operation will come once that ends; whoever is not is what they all wait for. Who may have come meanwhile is
    // named after those who are known not to have.
    let is_old = |rank: u32| matches!(heard[&rank], Heard::Answer(Answer { is_old: true, .. }));
    suspects.sort_by_key(|suspect| (suspect.held_up.is_some(), is_old(suspect.rank)));
    let traced = suspects.iter().any(|suspect| suspect.traced);
    let late = traced
        || matches!(
            cause,
            Cause::NotLaunched | Cause::QueuedBehindCompute | Cause::StuckNic
        );
    let stalls = suspects
        .iter()
        .filter_map(|suspect| Some((suspect.rank, suspect.stall?)));
    let stalls = stalls.collect();
    let mut ranks = suspects.iter().map(|suspect| suspect.rank);
    let culprit = ranks.next()?;
    let mut others: Vec<u32> = ranks.collect();
    others.sort_unstable();
    if cause == Cause::StuckKernel {
        // They all do not move: that says nothing of them.
        others.clear();
    }
    let mut verdict = Verdict {
        others,
        since_ns: suspects[0].since_ns,
        held_up: suspects[0].held_up,
        stalls,
        traced,
        is_awaited: suspects[0].is_awaited,
        ..Verdict::hang(cause, culprit)
    };
    verdict.hang = !late || verdict.age(overdue) >= settings.arrival;
    Some(verdict)
}

/// Of ranks that have all come, those because of which nothing moves, that first by which it began; `None` if something moves.
fn stuck(mut suspects: Vec<Suspect>, heard: &BTreeMap<u32, Heard>, threshold: u64) -> Option<Vec<Suspect>> {
    let stalled = stalled(heard);
    if stalled.iter().any(|suspect| suspect.since_ns >= Some(threshold)) {
        // Whatever the kernels do: it does not end before that does.
        return Some(stalled);
    }
    let is_unknown = heard.values().any(Heard::may_move);
    if is_unknown || suspects.iter().any(|suspect| suspect.since_ns < Some(threshold)) {
        return None;
    }
    // Who has left has done what it called. If all others have come, it is this that it never called.
    let left: Vec<Suspect> = heard
        .iter()
        .filter(|(_, heard)| **heard == Heard::Left)
        .map(|(rank, _)| Suspect::new(Cause::PeerAborted, *rank, None))
        .collect();
    if !left.is_empty() {
        return Some(left);
    }
    if !stalled.is_empty() {
        return Some(stalled);
    }
    // The others stopped moving because it did. Who is waited for and does not wait itself is what it began with, even if another one was
    // first to be seen not to move.
    let awaited: Vec<u32> = suspects.iter().filter_map(|suspect| suspect.waits_for).collect();
    for suspect in &mut suspects {
        suspect.is_awaited = !suspect.waits && awaited.contains(&suspect.rank);
    }
    suspects.sort_by_key(|suspect| (!suspect.is_awaited, std::cmp::Reverse(suspect.since_ns)));
    Some(suspects)
}

/// The ranks that wait for the network, the first that knows best what has failed.
fn stalled(heard: &BTreeMap<u32, Heard>) -> Vec<Suspect> {
    let stalls = heard
        .iter()
        .filter_map(|(rank, heard)| Some((*rank, *heard.stall()?)));
    let mut stalls: Vec<(u32, Stall)> = stalls.collect();
    stalls.sort_by_key(|(_, stall)| stall.order());
    let suspects = stalls.into_iter().map(|(rank, stall)| Suspect {
        stall: Some(stall),
        ..Suspect::new(Cause::StuckNic, rank, Some(stall.for_ns))
    });
    suspects.collect()
}

impl Suspect {
    fn new(cause: Cause, rank: u32, since_ns: Option<u64>) -> Self {
        Self {
            cause,
            rank,
            since_ns,
            held_up: None,
            stall: None,
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
                // Whoever copies waits for no rank.
                waits: waits.is_some_and(|waits| !waits.is_for_copies()),
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
