//! From the states of an operation's ranks to one verdict.
//!
//! [`judge`] is a function of its arguments alone, so every rank that knows the same facts names the same culprit.
//! The [watchdog's table](crate::watchdog) lists the verdicts in the order in which `judge` prefers them.

use std::{cmp::Reverse, collections::BTreeMap, time::Duration};

use ringsight_records::Cause;

use super::evidence::{BlockingOperation, Position, RankAnswer, RankState};
use crate::{
    error::ResultCode,
    proxy::stalls::Stall,
    watchdog::settings::{Action, Settings},
};

/// A launch that is younger than this may have begun: events are queried less often, and an answer takes a while.
const JUST_LAUNCHED: Duration = Duration::from_millis(50);

/// Why an operation does not end, and because of which rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) cause: Cause,
    /// The rank that the others wait for.
    pub(crate) culprit: u32,
    /// Other ranks of which the cause is true as well, in rank order.
    pub(crate) others: Vec<u32>,
    /// For how long the cause has been true of the culprit, if that is known.
    pub(crate) since_ns: Option<u64>,
    /// The other operation that the culprit is in.
    pub(crate) blocked_by: Option<BlockingOperation>,
    /// By rank, where the culprit and the others wait for the network.
    pub(crate) stalls: BTreeMap<u32, Stall>,
    /// Who called what, if the checks found that out.
    pub(crate) called: Option<String>,
    /// A debugger stopped the culprit.
    pub(crate) by_debugger: bool,
    /// The operation will not end by itself, as far as can be known. Otherwise the culprit is late.
    pub(crate) is_hang: bool,
    /// Another rank says that it waits for the culprit, which waits for nobody.
    pub(crate) is_awaited: bool,
}

/// What a verdict does to the communicator besides being reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Consequence {
    Nothing,
    /// The communicator's asynchronous error is set; no wait is released.
    SetError(ResultCode),
    /// The communicator fails, which releases every wait.
    Fail(ResultCode),
    /// All ranks are told that they do not call alike, so that all of them fail with one text.
    AnnounceMismatch(BlockingOperation),
}

impl Verdict {
    /// A hang of which only the cause and the culprit are known.
    pub(crate) fn hang(cause: Cause, culprit: u32) -> Self {
        Self {
            cause,
            culprit,
            others: Vec::new(),
            since_ns: None,
            blocked_by: None,
            stalls: BTreeMap::new(),
            called: None,
            by_debugger: false,
            is_hang: true,
            is_awaited: false,
        }
    }

    /// What follows from the verdict for the communicator of the rank that reports it.
    pub(crate) fn consequence(&self, action: Action) -> Consequence {
        match (self.cause, self.blocked_by, action) {
            // These can never end, so they fail the communicator whatever the action is.
            (Cause::MetadataMismatch, Some(blocked_by), _) => Consequence::AnnounceMismatch(blocked_by),
            (Cause::DeviceFault, ..) => Consequence::Fail(ResultCode::RemoteError),
            (.., Action::Error) if self.is_hang => Consequence::SetError(ResultCode::SystemError),
            (.., Action::Abort) if self.is_hang => Consequence::Fail(ResultCode::SystemError),
            _ => Consequence::Nothing,
        }
    }

    /// The same with `rank` as the culprit, if the cause is true of it.
    fn with_culprit(mut self, rank: u32) -> Self {
        if let Some(place) = self.others.iter_mut().find(|other| **other == rank) {
            std::mem::swap(place, &mut self.culprit);
            self.others.sort_unstable();
            self.since_ns = self.stall().map(|stall| stall.for_ns);
            self.blocked_by = None;
        }
        self
    }

    /// Where the culprit waits for the network.
    pub(crate) fn stall(&self) -> Option<&Stall> {
        self.stalls.get(&self.culprit)
    }

    /// How little `rank` knows of a failure in the network; 0 is the most.
    fn ignorance(&self, rank: u32) -> Option<u8> {
        self.stalls.get(&rank).map(|stall| stall.why.level())
    }

    /// For how long the culprit has been late, in an operation that has been in progress for `overdue`.
    pub(super) fn lateness(&self, overdue: Duration) -> Duration {
        self.stall()
            .map_or(overdue, |stall| Duration::from_nanos(stall.for_ns))
    }

    /// Whether this verdict, once reported, makes `other` of the same operation redundant.
    fn supersedes(&self, other: &Self) -> bool {
        // Of ranks that all stand still, which one was first is a guess. Only an awaited rank is better than a guess.
        let is_guess = self.cause == Cause::StuckKernel && (self.is_awaited || !other.is_awaited);
        // A rank that knows what failed in the network is better than one that does not.
        let other_knows_more = other.ignorance(other.culprit) < self.ignorance(self.culprit);
        (self.cause, self.is_hang) == (other.cause, other.is_hang)
            && (self.culprit == other.culprit || is_guess)
            && !other_knows_more
    }

    /// Whether this verdict, once reported of one operation, says all that `other` says of another operation.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let names = |rank| self.culprit == rank || self.others.contains(&rank);
        // A rank that is only guessed to have stopped first may have stopped because of the reported culprit.
        let is_guess = other.cause == Cause::StuckKernel && !other.is_awaited;
        let names_all = || names(other.culprit) && other.others.iter().all(|rank| names(*rank));
        (self.cause, self.is_hang) == (other.cause, other.is_hang) && (is_guess || names_all())
    }
}

/// What a verdict changes in what has been reported of an operation.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Revision {
    /// To be reported now.
    pub(super) news: Option<Verdict>,
    /// The verdict that stands from now on.
    pub(super) standing: Option<Verdict>,
}

/// Compares a verdict with the one that stands for the operation.
pub(super) fn revise(standing: Option<Verdict>, found: Option<Verdict>) -> Revision {
    let Some(found) = found else {
        // What moves again is reported again when it stops.
        return Revision {
            news: None,
            standing: None,
        };
    };
    let Some(standing) = standing else {
        return Revision {
            news: Some(found.clone()),
            standing: Some(found),
        };
    };
    // The first culprit stays, though others have followed it, until a rank is known to be the culprit.
    let found = match found.ignorance(found.culprit) == found.ignorance(standing.culprit) {
        true => found.with_culprit(standing.culprit),
        false => found,
    };
    if standing.supersedes(&found) {
        Revision {
            news: None,
            standing: Some(standing),
        }
    } else {
        Revision {
            news: Some(found.clone()),
            standing: Some(found),
        }
    }
}

/// A rank that an operation may be waiting for.
struct Suspect {
    cause: Cause,
    rank: u32,
    since_ns: Option<u64>,
    blocked_by: Option<BlockingOperation>,
    stall: Option<Stall>,
    by_debugger: bool,
    /// Its kernel waits for a rank.
    waits: bool,
    /// The rank that its kernel waits for, if the kernel knows.
    waits_for: Option<u32>,
    /// It does not wait, and another rank waits for it.
    is_awaited: bool,
}

/// Judges an operation that has been in progress on one of its ranks for `overdue`. `states` has every rank that takes
/// part. Returns `None` if the operation is only slow.
pub(crate) fn judge(
    states: &BTreeMap<u32, RankState>,
    overdue: Duration,
    settings: &Settings,
) -> Option<Verdict> {
    let threshold_ns = settings.threshold.as_nanos() as u64;
    // A rank that neither RDMA nor TCP reaches need not be at fault: the network is away.
    let network_is_away = states
        .values()
        .filter_map(RankState::stall)
        .any(|stall| stall.for_ns >= threshold_ns && states.get(&stall.peer) == Some(&RankState::Silent));
    let mut suspects: Vec<Suspect> = states
        .iter()
        .filter(|(_, state)| !(network_is_away && **state == RankState::Silent))
        .filter_map(|(rank, state)| Suspect::of(*rank, state))
        .collect();
    let first = suspects.iter().map(Suspect::precedence).min()?;
    suspects.retain(|suspect| suspect.precedence() == first);
    if suspects[0].cause == Cause::StuckKernel {
        suspects = all_have_come(suspects, states, threshold_ns)?;
    }
    let cause = suspects[0].cause;
    // A rank that another operation keeps comes when that ends, so it is named after the others. A rank that may have come
    // meanwhile is named after those that have not.
    let is_stale = |rank: u32| {
        matches!(
            states[&rank],
            RankState::Answered(RankAnswer { is_stale: true, .. })
        )
    };
    suspects.sort_by_key(|suspect| (suspect.blocked_by.is_some(), is_stale(suspect.rank)));
    let by_debugger = suspects.iter().any(|suspect| suspect.by_debugger);
    let is_late = by_debugger
        || matches!(
            cause,
            Cause::NotLaunched | Cause::QueuedBehindCompute | Cause::StuckNic
        );
    let stalls = suspects
        .iter()
        .filter_map(|suspect| Some((suspect.rank, suspect.stall?)))
        .collect();
    let mut ranks = suspects.iter().map(|suspect| suspect.rank);
    let culprit = ranks.next()?;
    let mut others: Vec<u32> = ranks.collect();
    others.sort_unstable();
    if cause == Cause::StuckKernel {
        // That they all stand still says nothing of the others.
        others.clear();
    }
    let mut verdict = Verdict {
        others,
        since_ns: suspects[0].since_ns,
        blocked_by: suspects[0].blocked_by,
        stalls,
        by_debugger,
        is_awaited: suspects[0].is_awaited,
        ..Verdict::hang(cause, culprit)
    };
    verdict.is_hang = !is_late || verdict.lateness(overdue) >= settings.arrival;
    Some(verdict)
}

/// Of ranks that have all come, those that keep the others from moving, the first one first. `None` if something moves.
fn all_have_come(
    mut suspects: Vec<Suspect>,
    states: &BTreeMap<u32, RankState>,
    threshold_ns: u64,
) -> Option<Vec<Suspect>> {
    let stalled = stalled(states);
    if stalled
        .iter()
        .any(|suspect| suspect.since_ns >= Some(threshold_ns))
    {
        // Whatever the kernels do, the operation does not end before the network carries its data.
        return Some(stalled);
    }
    let may_move = states.values().any(RankState::may_move_unseen)
        || suspects
            .iter()
            .any(|suspect| suspect.since_ns < Some(threshold_ns));
    if may_move {
        return None;
    }
    // A rank that left completed what it had called. If all others have come, it never called this operation.
    let left: Vec<Suspect> = states
        .iter()
        .filter(|(_, state)| **state == RankState::Left)
        .map(|(rank, _)| Suspect::new(Cause::PeerAborted, *rank, None))
        .collect();
    if !left.is_empty() {
        return Some(left);
    }
    if !stalled.is_empty() {
        return Some(stalled);
    }
    // The others stopped because the culprit stopped. A rank that others wait for and that waits for nobody is the
    // culprit, even if another rank was seen to stop before.
    let awaited: Vec<u32> = suspects.iter().filter_map(|suspect| suspect.waits_for).collect();
    for suspect in &mut suspects {
        suspect.is_awaited = !suspect.waits && awaited.contains(&suspect.rank);
    }
    suspects.sort_by_key(|suspect| (!suspect.is_awaited, Reverse(suspect.since_ns)));
    Some(suspects)
}

/// The ranks that wait for the network, the one that knows best what failed first.
fn stalled(states: &BTreeMap<u32, RankState>) -> Vec<Suspect> {
    let mut stalls: Vec<(u32, Stall)> = states
        .iter()
        .filter_map(|(rank, state)| Some((*rank, *state.stall()?)))
        .collect();
    stalls.sort_by_key(|(_, stall)| stall.order());
    stalls
        .into_iter()
        .map(|(rank, stall)| Suspect {
            stall: Some(stall),
            ..Suspect::new(Cause::StuckNic, rank, Some(stall.for_ns))
        })
        .collect()
}

impl Suspect {
    fn new(cause: Cause, rank: u32, since_ns: Option<u64>) -> Self {
        Self {
            cause,
            rank,
            since_ns,
            blocked_by: None,
            stall: None,
            by_debugger: false,
            waits: false,
            waits_for: None,
            is_awaited: false,
        }
    }

    /// Its place among the causes; the least one counts. A rank that a debugger holds goes on later, so each hang comes
    /// before it. But it explains why other ranks have not come, so it comes before these.
    fn precedence(&self) -> (Cause, bool) {
        if self.by_debugger {
            (Cause::MetadataMismatch, true)
        } else {
            (self.cause, false)
        }
    }

    /// What a rank's state makes it suspect of; `None` if the operation cannot be waiting for the rank.
    fn of(rank: u32, state: &RankState) -> Option<Self> {
        let suspect = |cause, since_ns| Self::new(cause, rank, since_ns);
        Some(match *state {
            RankState::Left => return None,
            RankState::Dead => suspect(Cause::RankDead, None),
            RankState::Stopped => suspect(Cause::RankStopped, None),
            RankState::Traced => Self {
                by_debugger: true,
                ..suspect(Cause::RankStopped, None)
            },
            RankState::Silent | RankState::SilentAlive => suspect(Cause::NoAnswer, None),
            RankState::Deadlocked(blocking) => Self {
                blocked_by: Some(blocking),
                ..suspect(Cause::MetadataMismatch, Some(blocking.since_ns))
            },
            RankState::Answered(RankAnswer {
                position, blocked_by, ..
            }) => match position {
                Position::CommunicatorEnded => suspect(Cause::PeerAborted, None),
                Position::DeviceFailed => suspect(Cause::DeviceFault, None),
                Position::NotLaunched { idle_ns } => Self {
                    blocked_by,
                    ..suspect(Cause::NotLaunched, Some(idle_ns))
                },
                Position::Queued { since_ns } if Duration::from_nanos(since_ns) < JUST_LAUNCHED => {
                    suspect(Cause::StuckKernel, Some(since_ns))
                }
                Position::Queued { since_ns } => Self {
                    blocked_by,
                    ..suspect(Cause::QueuedBehindCompute, Some(since_ns))
                },
                Position::Running { still_ns, waits, .. } => Self {
                    // A rank whose data copy engines move waits for no rank.
                    waits: waits.is_some_and(|waits| !waits.is_for_copies()),
                    waits_for: waits.and_then(|waits| waits.peer).map(u32::from),
                    ..suspect(Cause::StuckKernel, Some(still_ns))
                },
                Position::WatchdogOff { called: false } => Self {
                    blocked_by,
                    ..suspect(Cause::NotLaunched, None)
                },
                Position::WatchdogOff { called: true } | Position::Completed => return None,
            },
        })
    }
}

#[cfg(test)]
mod tests;
