//! What a whole snapshot comes to: operations that only queue behind others, and the one rank that all of them wait for.
//!
//! A rank is *held* in an operation that it has not begun if it is in another one meanwhile: it is not to blame for the first. An operation
//! is *behind* others if only held ranks are missing in it. What is left is what ranks wait in, and the root cause is of one of these:
//! - what watchdogs have said of it, unless the rank that they name was itself held: the gravest verdict whose operation goes on;
//! - without a verdict the rank that is missing in the oldest one, if others have waited in it for [`STALL_NS`].
//!
//! A kernel waits for the neighbour that its data come from, who may wait itself. So where ranks were not looked at, kernels' words name
//! nobody: the snapshot then says who waits for whom, and that this is not all.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use ringsight_exporters::model::{Finding, Place as Where};
use ringsight_records::{Cause, verdicts::Nic};

use super::{Group, HeldUp, Operation, Part, Place, Process, VerdictView};
use crate::{
    clock::Clock,
    findings::{next_step, sentence},
    identity::{InstanceKey, Scope, TraceKind},
    spans::operation_name,
};

/// From when on a wait is one that somebody should look at, nanoseconds.
pub const STALL_NS: u64 = 1_000_000_000;

/// What a snapshot comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// No rank has waited for [`STALL_NS`].
    Moving,
    /// The rank that all others wait for, as far as they were looked at.
    RootCause(Box<Finding>),
    /// Ranks wait, and for whom cannot be seen from those that were looked at.
    Unclear {
        /// Ranks that wait.
        waiting: Vec<u32>,
        /// The operation that they wait in.
        name: String,
        /// For how long.
        waited_ns: u64,
        /// Ranks that were not looked at and that a kernel or a watchdog names. They may wait themselves.
        named: Vec<u32>,
        /// Somebody who takes part was not looked at.
        is_part: bool,
    },
}

/// Where an operation is among those of a snapshot.
type At = (usize, usize);

/// In which operations a rank is, by process and device; of many the first two do.
#[derive(Default)]
struct Running(HashMap<(u32, i32), Vec<(At, u64)>>);

impl Running {
    fn of(groups: &[Group]) -> Self {
        let mut running = Self::default();
        for (at, operation) in all(groups) {
            for part in &operation.parts {
                if let Place::Running { since_ns, .. } = part.place {
                    let mine = running.0.entry((part.pid, part.device)).or_default();
                    mine.push((at, since_ns));
                    mine.sort_by_key(|(_, since_ns)| Reverse(*since_ns));
                    mine.truncate(2);
                }
            }
        }
        running
    }

    /// Whether a rank that has not begun an operation is in another one. A rank that has launched it waits for its stream. One that has not
    /// may do anything else between short operations, so only a long one holds it.
    fn holds(&self, part: &Part, here: At) -> bool {
        let least_ns = match part.place {
            Place::Queued { .. } => 0,
            Place::NotLaunched { .. } => STALL_NS,
            Place::Running { .. } | Place::Done => return false,
        };
        let mine = self.0.get(&(part.pid, part.device));
        let mut others = mine
            .into_iter()
            .flatten()
            .filter(|(at, since_ns)| *at != here && *since_ns >= least_ns);
        others.next().is_some()
    }
}

fn all(groups: &[Group]) -> impl Iterator<Item = (At, &Operation)> {
    let groups = groups.iter().enumerate();
    groups.flat_map(|(at, group)| {
        let operations = group.operations.iter().enumerate();
        operations.map(move |(place, operation)| ((at, place), operation))
    })
}

/// Says of each operation which ranks are held, what watchdogs have said, and whether it is behind others; puts what is waited in first.
pub(super) fn mark(groups: &mut [Group], said: &[VerdictView], processes: &[Process]) {
    let users: HashMap<u32, u32> = processes
        .iter()
        .map(|process| (process.pid, process.user))
        .collect();
    let mut judged: HashMap<_, Vec<&VerdictView>> = HashMap::new();
    for verdict in said.iter().filter(|verdict| verdict.ended == Some(false)) {
        if let Some(user) = users.get(&verdict.pid) {
            let key = (verdict.communicator, *user, verdict.pair, verdict.seq);
            judged.entry(key).or_default().push(verdict);
        }
    }
    let running = Running::of(groups);
    let mut is_everything_behind = true;
    for (at, group) in groups.iter_mut().enumerate() {
        for (place, operation) in group.operations.iter_mut().enumerate() {
            for part in &mut operation.parts {
                part.held = !part.stopped && running.holds(part, (at, place));
            }
            let key = (group.id, group.user, operation.pair, operation.seq);
            operation.judged = judged.get(&key).and_then(|said| Judged::of(said));
            operation.behind = operation.is_behind();
            is_everything_behind &= operation.behind || operation.running().next().is_none();
        }
    }
    // Ranks that wait for each other in a circle: it began in the oldest.
    if is_everything_behind {
        let operations = groups.iter_mut().flat_map(|group| &mut group.operations);
        let running = operations.filter(|operation| operation.running().next().is_some());
        if let Some(oldest) = running.max_by_key(|operation| operation.oldest_ns) {
            oldest.behind = false;
        }
    }
    for group in groups {
        group
            .operations
            .sort_by_key(|operation| (operation.behind, Reverse(operation.oldest_ns)));
    }
}

/// What watchdogs have said of an operation that goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judged {
    /// Why the rank is waited for.
    pub cause: Cause,
    /// The rank.
    pub culprit: u32,
    /// It will not end by itself.
    pub hang: bool,
    /// What that rank was in instead: then it is not to blame.
    pub held_up: Option<HeldUp>,
    nic: Option<Nic>,
    replay: u32,
    /// Since the first of them spoke.
    first_ago_ns: u64,
    /// Ranks that said so, and since when each waits.
    by: BTreeMap<u32, u64>,
}

impl Judged {
    /// The one that counts of those that stand. Each rank's last one stands.
    fn of(said: &[&VerdictView]) -> Option<Self> {
        let last: BTreeMap<u32, &&VerdictView> = said.iter().map(|verdict| (verdict.rank, verdict)).collect();
        let gravity = |verdict: &VerdictView| {
            let cause = verdict.cause?;
            Some((
                verdict.held_up.is_none(),
                verdict.hang,
                Reverse(cause),
                Reverse(verdict.ago_ns),
            ))
        };
        let first_ago_ns = said.iter().map(|verdict| verdict.ago_ns).max()?;
        let counts = last
            .values()
            .filter_map(|verdict| Some((gravity(verdict)?, verdict)));
        let (_, verdict) = counts.max_by_key(|(gravity, _)| *gravity)?;
        let same = |other: &&&VerdictView| other.culprit == verdict.culprit;
        Some(Self {
            cause: verdict.cause?,
            culprit: verdict.culprit,
            hang: verdict.hang,
            held_up: verdict.held_up,
            nic: verdict.nic,
            replay: verdict.replay,
            first_ago_ns,
            by: last
                .values()
                .copied()
                .filter(same)
                .map(|verdict| (verdict.rank, verdict.waited_ns.saturating_add(verdict.ago_ns)))
                .collect(),
        })
    }

    /// The rank that is to blame, if it was not held itself.
    fn blamed(&self) -> Option<u32> {
        self.held_up.is_none().then_some(self.culprit)
    }
}

impl Operation {
    fn running(&self) -> impl Iterator<Item = &Part> {
        let is_running = |part: &&Part| matches!(part.place, Place::Running { .. });
        self.parts.iter().filter(is_running)
    }

    /// Parts that have not begun.
    fn missing(&self) -> impl Iterator<Item = &Part> {
        let is_missing =
            |part: &&Part| matches!(part.place, Place::NotLaunched { .. } | Place::Queued { .. });
        self.parts.iter().filter(is_missing)
    }

    fn is_behind(&self) -> bool {
        if let Some(judged) = &self.judged {
            return judged.held_up.is_some();
        }
        let mut queued = self
            .parts
            .iter()
            .filter(|part| matches!(part.place, Place::Queued { .. }));
        let nobody_began = self.running().next().is_none() && queued.all(|part| part.held);
        nobody_began || (self.missing().next().is_some() && self.missing().all(|part| part.held))
    }

    /// The ranks that the others wait for, and who are to blame for it: the one that watchdogs name; else those that have not come and are in
    /// nothing else, stopped ones first. Where all have come and were looked at, those that kernels wait for and that do not wait.
    #[must_use]
    pub fn awaited(&self) -> Vec<u32> {
        if let Some(judged) = &self.judged {
            return judged.blamed().into_iter().collect();
        }
        let stopped = self.parts.iter().filter(|part| part.stopped);
        let mut awaited: Vec<u32> = stopped.map(|part| part.rank).collect();
        let missing = self.missing().filter(|part| !part.stopped);
        if awaited.is_empty() && self.missing().next().is_none() && self.unseen.is_empty() {
            let peers = self.peers();
            let is_awaited = |part: &&Part| part.waits().is_none() && peers.contains(&part.rank);
            return self
                .parts
                .iter()
                .filter(is_awaited)
                .map(|part| part.rank)
                .collect();
        }
        awaited.extend(missing.filter(|part| !part.held).map(|part| part.rank));
        awaited
    }

    /// Ranks that kernels have just said they wait for.
    fn peers(&self) -> BTreeSet<u32> {
        let peers = self.parts.iter().filter_map(|part| part.waits()?.peer);
        peers.map(u32::from).collect()
    }
}

/// What a snapshot comes to; `now` is its time, `CLOCK_MONOTONIC` nanoseconds. The root cause's operation is moved to the front, with its
/// communicator.
pub fn outcome(groups: &mut [Group], processes: &[Process], now: u64, clock: &Clock) -> Outcome {
    let blamed = all(groups).filter_map(|(at, operation)| {
        let judged = operation.judged.as_ref()?;
        judged.blamed()?;
        Some(((judged.hang, Reverse(judged.cause), operation.oldest_ns), at))
    });
    let judged = blamed.max().map(|(_, at)| at);
    let missing = all(groups).filter_map(|(at, operation)| {
        let is_stalled = !operation.behind && operation.judged.is_none() && operation.oldest_ns >= STALL_NS;
        let mut running = operation.running().filter(|part| !part.stopped);
        let culprit = part_of(operation, *operation.awaited().first()?)?;
        let is_cause = is_stalled && running.next().is_some() && cause_of(culprit).is_some();
        is_cause.then_some(((culprit.stopped, operation.oldest_ns), at))
    });
    let at = judged.or_else(|| missing.max().map(|(_, at)| at));
    let Some((at, place)) = at else {
        return unclear(groups);
    };
    groups[..=at].rotate_right(1);
    groups[0].operations[..=place].rotate_right(1);
    let finding = finding(&groups[0], processes, now, clock);
    finding.map_or(Outcome::Moving, |finding| Outcome::RootCause(Box::new(finding)))
}

fn part_of(operation: &Operation, rank: u32) -> Option<&Part> {
    operation.parts.iter().find(|part| part.rank == rank)
}

/// Why a part is waited for that no watchdog has judged.
fn cause_of(part: &Part) -> Option<Cause> {
    match part.place {
        _ if part.stopped => Some(Cause::RankStopped),
        Place::NotLaunched { .. } => Some(Cause::NotLaunched),
        Place::Queued { .. } => Some(Cause::QueuedBehindCompute),
        Place::Running { .. } | Place::Done => None,
    }
}

/// About the first operation of a group.
fn finding(group: &Group, processes: &[Process], now: u64, clock: &Clock) -> Option<Finding> {
    let operation = group.operations.first()?;
    let judged = operation.judged.as_ref();
    let culprit = judged
        .map(|judged| judged.culprit)
        .or_else(|| operation.awaited().first().copied())?;
    let cause = judged
        .map(|judged| judged.cause)
        .or_else(|| cause_of(part_of(operation, culprit)?))?;
    let mut waiting: BTreeMap<u32, u64> = operation
        .running()
        .filter_map(|part| Some((part.rank, part.since_ns()?)))
        .collect();
    waiting.extend(judged.into_iter().flat_map(|judged| &judged.by));
    waiting.remove(&culprit);
    let kind = operation
        .pair
        .map_or(TraceKind::Collective, |_| TraceKind::PointToPoint);
    let key = InstanceKey {
        comm: group.id,
        seq: operation.seq,
        ranks: group.ranks,
        replay: judged.map_or(0, |judged| judged.replay),
        kind,
        pair: operation.pair,
    };
    let waited_ns = waiting.values().copied().max().unwrap_or(operation.oldest_ns);
    let first_ago_ns = judged.map_or(0, |judged| judged.first_ago_ns);
    let mut finding = Finding {
        trace_id: key.trace_id(&Scope::default()),
        operation: operation_name(operation.function, kind),
        communicator: group.id,
        communicator_name: group.name.as_str().into(),
        ranks: group.ranks,
        sequence: operation.seq,
        replay: key.replay,
        pair: operation.pair,
        cause: cause.name(),
        hang: judged.map_or(cause == Cause::RankStopped, |judged| judged.hang),
        culprit,
        culprit_place: place_of(group, culprit, processes),
        waiting: waiting.into_keys().collect(),
        waited_ns,
        first_unix_ns: clock.unix_ns(now.saturating_sub(first_ago_ns)),
        unix_ns: clock.unix_ns(now),
        ended: false,
        text: String::new(),
        next_step: String::new(),
    };
    finding.text = sentence(cause, judged.and_then(|judged| judged.nic.as_ref()), &finding);
    finding.next_step = next_step(cause, culprit, finding.culprit_place.as_ref());
    Some(finding)
}

/// The process of a rank, if it was looked at.
fn place_of(group: &Group, rank: u32, processes: &[Process]) -> Option<Where> {
    let is_rank = |process: &&Process| {
        let mut own = process.communicators.iter();
        process.user == group.user && own.any(|own| own.id == group.id && own.rank == rank)
    };
    let process = processes.iter().find(is_rank)?;
    Some(Where {
        pid: process.pid,
        host: Arc::from(process.host.as_str()),
    })
}

/// Where no rank can be blamed: the oldest operation that ranks have waited in for long.
fn unclear(groups: &[Group]) -> Outcome {
    let stalled = all(groups)
        .filter(|(_, operation)| operation.oldest_ns >= STALL_NS && operation.running().next().is_some());
    let Some((_, operation)) = stalled.max_by_key(|(_, operation)| operation.oldest_ns) else {
        return Outcome::Moving;
    };
    let seen: BTreeSet<u32> = operation.parts.iter().map(|part| part.rank).collect();
    let by_watchdog = operation.judged.iter().map(|judged| judged.culprit);
    let named: BTreeSet<u32> = operation.peers().into_iter().chain(by_watchdog).collect();
    Outcome::Unclear {
        waiting: operation.running().map(|part| part.rank).collect(),
        name: operation.name(),
        waited_ns: operation.oldest_ns,
        named: named.difference(&seen).copied().collect(),
        is_part: !operation.unseen.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Description, Flags, Function, Phase, Waits, pages::Communicator};

    use super::*;
    use crate::snapshot::{take, verdicts};

    const NOW: u64 = 100_000_000_000;
    const S: u64 = 1_000_000_000;

    fn zeroed() -> Communicator {
        // SAFETY: plain data; zero is a value of each field.
        unsafe { std::mem::zeroed() }
    }

    fn process(rank: u32, operations: Vec<Description>) -> Process {
        Process {
            pid: 100 + rank,
            host: "b".into(),
            communicators: vec![Communicator {
                id: 7,
                rank,
                ranks: 4,
                device: rank as i32,
                ..zeroed()
            }],
            operations,
            ..Process::default()
        }
    }

    /// Launched so long ago and begun so long ago; `None`: not begun.
    fn operation(rank: u32, seq: u64, launched_ns: u64, begun_ns: Option<u64>) -> Description {
        Description {
            comm: 7,
            seq,
            rank,
            op: seq as u32,
            peer: -1,
            function: Function::AllReduce.code(),
            launch_start_ns: NOW - launched_ns,
            device_start_ns: begun_ns.map_or(0, |ago| NOW - ago),
            ..Description::default()
        }
    }

    fn message(rank: u32, peer: u32, is_send: bool) -> Description {
        let mut message = operation(rank, 1, 2 * S, None);
        message.peer = peer as i32;
        message.flags = if is_send {
            Flags::P2P.with(Flags::SEND).0
        } else {
            Flags::P2P.0
        };
        message.op += 100 + u32::from(is_send);
        message
    }

    /// Ranks 0 to 2 wait in operation 750 for rank 3, with operations and messages behind it.
    fn hung() -> Vec<Process> {
        let waiting = |rank: u32| {
            let mut first = operation(rank, 750, 2 * S + 1, Some(2 * S));
            first.waits = Waits {
                op: 750,
                channel: 0,
                phase: Phase::Data,
                peer: Some((rank as u16 + 3) % 4),
                step: 1,
            }
            .word();
            first.waits_ns = NOW - 1;
            let mut all = vec![first];
            all.extend((751..755).map(|seq| operation(rank, seq, 2 * S, None)));
            all.push(message(rank, (rank + 1) % 4, true));
            all.push(message(rank, (rank + 3) % 4, false));
            process(rank, all)
        };
        let mut last = operation(3, 749, 3 * S, Some(3 * S));
        last.device_end_ns = NOW - 2 * S;
        vec![waiting(0), waiting(1), waiting(2), process(3, vec![last])]
    }

    fn come_to(processes: &[Process]) -> (Vec<Group>, Outcome) {
        let said = verdicts(processes, NOW);
        let mut groups = take(processes, &said, NOW);
        let outcome = outcome(&mut groups, processes, NOW, &Clock::fixed(0));
        (groups, outcome)
    }

    fn cause(processes: &[Process]) -> Finding {
        match come_to(processes).1 {
            Outcome::RootCause(finding) => *finding,
            other => panic!("{other:?}"),
        }
    }

    fn say(process: &mut Process, cause: Cause, culprit: u32, hang: bool) {
        // SAFETY: plain data; zero is a value of each field.
        let zero: ringsight_records::verdicts::GivenVerdict = unsafe { std::mem::zeroed() };
        process.verdicts.push(ringsight_records::verdicts::GivenVerdict {
            number: 1,
            time_ns: NOW - S / 2,
            begun_ns: NOW - 2 * S,
            comm: 7,
            seq: 750,
            op: 750,
            rank: process.communicators[0].rank,
            culprit,
            peer: -1,
            cause: cause.code(),
            is_hang: u8::from(hang),
            ..zero
        });
    }

    #[test]
    fn the_rank_that_has_not_come_is_the_root_cause_and_what_queues_is_behind_it() {
        let processes = hung();
        let (groups, _) = come_to(&processes);
        let finding = cause(&processes);
        assert_eq!(
            (finding.culprit, finding.cause, finding.hang),
            (3, "NOT_LAUNCHED", false)
        );
        assert_eq!(
            finding.text,
            "rank 3 (pid 103, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.0 s"
        );
        let [first, behind @ ..] = &groups[0].operations[..] else {
            panic!("no operation")
        };
        assert_eq!((first.seq, first.behind, first.awaited()), (750, false, vec![3]));
        // Four collectives, and the messages around the ring.
        assert_eq!(behind.len(), 8);
        assert!(behind.iter().all(|operation| operation.behind), "{behind:#?}");
        assert!(
            behind
                .iter()
                .all(|operation| operation.awaited().iter().all(|rank| *rank == 3)),
            "{behind:#?}"
        );
    }

    #[test]
    fn from_some_of_the_ranks_nobody_innocent_is_named() {
        let processes = hung();
        // Without a verdict the kernel's neighbour may be innocent: rank 1's is.
        for some in [&processes[..1], &processes[1..2], &processes[..3]] {
            let (groups, outcome) = come_to(some);
            let Outcome::Unclear { named, is_part, .. } = outcome else {
                panic!("{outcome:?}")
            };
            assert!(is_part && !named.is_empty());
            let awaited: Vec<u32> = groups[0].operations.iter().flat_map(Operation::awaited).collect();
            assert!(awaited.is_empty(), "{awaited:?}");
        }
        for some in [0..1, 1..2, 0..3] {
            let mut judged = processes[some].to_vec();
            say(&mut judged[0], Cause::NotLaunched, 3, false);
            let finding = cause(&judged);
            assert_eq!((finding.culprit, finding.culprit_place), (3, None));
            assert!(
                finding
                    .text
                    .contains("rank 3 (not watched here) has not launched all_reduce 750")
            );
        }
    }

    #[test]
    fn a_rank_that_is_held_in_another_communicator_is_not_to_blame() {
        let mut processes = hung();
        // Rank 3 waits in another communicator for a rank that has not come there.
        let other = Communicator {
            id: 8,
            rank: 0,
            ranks: 2,
            device: 3,
            ..zeroed()
        };
        let late = Communicator {
            rank: 1,
            device: 9,
            ..other
        };
        processes[3].communicators.push(other);
        processes[3].operations.push(Description {
            comm: 8,
            ..operation(0, 5, 3 * S, Some(3 * S))
        });
        processes.push(Process {
            pid: 109,
            communicators: vec![late],
            ..Process::default()
        });
        let (groups, _) = come_to(&processes);
        let finding = cause(&processes);
        assert_eq!((finding.communicator, finding.culprit), (8, 1));
        // Its communicator stands first, and all of the other one queues.
        assert_eq!(groups[0].id, 8);
        assert!(groups[1].operations.iter().all(|operation| operation.behind));
        // A watchdog that says so of rank 3 says that it is held.
        say(&mut processes[0], Cause::NotLaunched, 3, false);
        let said = processes[0].verdicts.last_mut().unwrap();
        (said.is_held_up, said.held_comm, said.held_seq) = (1, 8, 5);
        assert_eq!(cause(&processes).culprit, 1);
    }

    #[test]
    fn the_gravest_verdict_counts_and_one_that_is_over_does_not() {
        let mut processes = hung();
        say(&mut processes[0], Cause::NotLaunched, 1, false);
        say(&mut processes[1], Cause::RankDead, 3, true);
        let finding = cause(&processes[..3]);
        assert_eq!(
            (finding.cause, finding.culprit, finding.hang),
            ("RANK_DEAD", 3, true)
        );
        for process in &mut processes {
            process.operations.retain(|operation| operation.seq < 750);
            for verdict in &process.verdicts.clone() {
                let mut over = operation(verdict.rank, 750, 2 * S, Some(2 * S));
                over.device_end_ns = NOW - 1;
                process.operations.push(over);
            }
        }
        assert_eq!(come_to(&processes).1, Outcome::Moving);
    }

    #[test]
    fn ranks_that_wait_for_each_other_in_a_circle_do_not_vanish() {
        let mut processes = vec![process(0, Vec::new()), process(1, Vec::new())];
        processes[0].operations = vec![operation(0, 1, 3 * S, Some(3 * S))];
        processes[1].operations = vec![operation(1, 2, 2 * S, Some(2 * S))];
        for process in &mut processes {
            process.communicators[0].ranks = 2;
        }
        let (groups, outcome) = come_to(&processes);
        assert!(!groups[0].operations[0].behind && groups[0].operations[1].behind);
        assert!(
            matches!(outcome, Outcome::Unclear { is_part: false, .. }),
            "{outcome:?}"
        );
    }

    #[test]
    fn what_moves_is_no_cause() {
        let mut processes = hung();
        for process in &mut processes {
            for operation in &mut process.operations {
                let begun = operation.device_start_ns;
                operation.device_start_ns = if begun == 0 { 0 } else { NOW - S / 2 };
                operation.launch_start_ns = NOW - S / 2;
            }
        }
        assert_eq!(come_to(&processes).1, Outcome::Moving);
    }
}
