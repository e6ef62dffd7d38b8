//! The faults, the cells of the matrix, and what is drawn for a round.

use std::{fmt, time::Duration};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::{
    nccl::DeviceKind,
    random::{Random, fnv1a},
};

/// `NCCL_KERNEL_TIMEOUT_MS` of every round.
pub(super) const THRESHOLD: Duration = Duration::from_millis(300);
/// `RINGSIGHT_ARRIVAL_TIMEOUT_MS` where a rank is withheld for longer.
pub(super) const ARRIVAL: Duration = Duration::from_millis(1300);
/// From a time-out to the verdict.
pub(super) const PROMISED: Duration = Duration::from_secs(1);
/// A process that is kept from running for so long, at once or in pieces within [`PROMISED`], has a machine that does something else.
pub(super) const STALLED: Duration = Duration::from_millis(150);

/// `ncclSuccess`, `ncclSystemError`, `ncclInvalidUsage`, `ncclRemoteError`.
pub(super) const SUCCESS: i32 = 0;
pub(super) const SYSTEM_ERROR: i32 = 2;
pub(super) const INVALID_USAGE: i32 = 5;
pub(super) const REMOTE_ERROR: i32 = 6;

/// What goes wrong with the victim, if anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Fault {
    /// It does not call the operation until the arrival time-out has passed, and never will.
    Withheld,
    /// Its process is killed.
    Killed,
    /// Its process is stopped, and goes on later.
    Stopped,
    /// A debugger holds its process, and lets go later.
    Traced,
    /// It calls the operation with another count.
    Count,
    /// It calls two operations in the other order.
    Order,
    /// It receives from the other rank before it sends, and so does that; or that is in a collective first.
    Crossed,
    /// It is late by less than the threshold.
    SlowBelow,
    /// It is late by more than the threshold.
    SlowAbove,
    /// The same after operations that were fast, with a threshold that adapts.
    Unusual,
    /// Its stream is busy with something else.
    Computing,
    /// It pauses for long, as for a checkpoint, in a job whose hangs abort it.
    Checkpoint,
    /// It does not launch the replay of a graph that the others have launched.
    Replay,
    /// The same, and the others have launched the next one, too.
    ReplayQueued,
    /// Of two graphs that are replayed on two streams it launches the first only.
    TwoGraphs,
    /// As [`Fault::SlowAbove`], in a broadcast whose root is done and has left, in good order or not.
    Left,
    /// It aborts the communicator.
    Aborted,
    /// Its kernel never ends.
    Stuck,
    /// Its kernel stops where it waits for another rank, which comes after that.
    Frozen,
}

/// How operations are launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Mode {
    Eager,
    Graph,
}

/// What ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum RankKind {
    /// A process each, on one node or two.
    Process,
    /// Threads of one process.
    Thread,
}

/// What tells the watchdog how far operations are: `RINGSIGHT_WATCHDOG_SOURCE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Source {
    /// The kernels, in memory.
    Pages,
    /// Events before and behind them.
    Events,
}

display_by_name!(Fault, Mode, RankKind, Source, Action);

/// A cell of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Case {
    pub(super) fault: Fault,
    pub(super) ranks: RankKind,
    pub(super) mode: Mode,
    pub(super) source: Source,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            fault,
            ranks,
            mode,
            source,
        } = self;
        write!(f, "{fault}/{ranks}/{mode}/{source}")
    }
}

impl Case {
    /// Every cell, those that cannot be included.
    pub(super) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for &source in Source::value_variants() {
            for &fault in Fault::value_variants() {
                for &ranks in RankKind::value_variants() {
                    let of_mode = |&mode: &Mode| Self {
                        fault,
                        ranks,
                        mode,
                        source,
                    };
                    all.extend(Mode::value_variants().iter().map(of_mode));
                }
            }
        }
        all
    }

    /// Why there is no such cell.
    pub(super) fn impossible(&self, device: DeviceKind) -> Option<&'static str> {
        use Fault::{Crossed, Frozen, Killed, Left, Replay, ReplayQueued, Stopped, Stuck, Traced, TwoGraphs};
        match (self.fault, self.ranks, self.mode) {
            (Killed | Stopped | Traced, RankKind::Thread, _) => {
                Some("ranks that are threads of one process die and stop together")
            }
            (Replay | ReplayQueued | TwoGraphs, _, Mode::Eager) => Some("only graphs are replayed"),
            (Stuck, _, Mode::Graph) => Some("the simulated kernel is launched, not captured"),
            (Frozen, _, _) if device == DeviceKind::Cuda => Some("nothing stops a kernel of a GPU half-way"),
            (Frozen, RankKind::Thread, _) => {
                Some("kernels of ranks that are threads of one process are stopped together")
            }
            (Frozen, _, _) if self.source == Source::Events => Some("events do not tell what moves"),
            (Crossed, _, Mode::Graph) => Some("whoever launches graphs orders them"),
            (Left, RankKind::Thread, _) if device == DeviceKind::Cuda => {
                Some("GPUs that reach each other end an operation together")
            }
            _ => None,
        }
    }
}

/// An operation that every rank waits for every other rank in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Operation {
    AllReduce,
    AllGather,
    ReduceScatter,
    /// Messages from each to each, themselves included, in one group.
    AllToAll,
}

/// One round of a case: everything in it that is drawn.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Round {
    pub(super) fault: Fault,
    pub(super) mode: Mode,
    pub(super) source: Source,
    pub(super) ranks: u32,
    pub(super) nodes: u32,
    pub(super) victim: u32,
    pub(super) operation: Operation,
    /// Elements that a rank contributes.
    pub(super) elements: usize,
    /// Operations before the fault.
    pub(super) before: u32,
    /// From the victim's last operation to the fault: the others come to wait for it meanwhile.
    pub(super) pause_ms: u64,
    /// How late a slow rank is, if it is not late until it is told to go on.
    pub(super) late_ms: u64,
    /// `RINGSIGHT_WATCHDOG_ACTION`.
    pub(super) action: Action,
}

/// See [`Round::action`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Action {
    Report,
    Error,
    Abort,
}

impl Round {
    /// The round `number` of a case with a seed, on ranks that run on such devices.
    pub(super) fn draw(case: &Case, device: DeviceKind, seed: u64, number: u32) -> Self {
        // By its name: a case is drawn alike whichever others are run.
        let name = fnv1a(case.to_string().bytes());
        let mut random = Random::new(seed ^ name ^ u64::from(number) << 40);
        let mut between = |least: u64, most: u64| least + random.below(most - least + 1);
        let ranks = match case.fault {
            // Of two ranks that differ nobody can say which is wrong.
            Fault::Count | Fault::Order => between(3, 4) as u32,
            // One that is late, one that has left, and others that wait.
            Fault::Left => between(3, 4) as u32,
            _ => between(2, 4) as u32,
        };
        let nodes = match case.ranks {
            // Between nodes the root of a broadcast can be done before the others.
            RankKind::Process if case.fault == Fault::Left && device == DeviceKind::Cuda => 2,
            RankKind::Process => between(1, 2) as u32,
            RankKind::Thread => 1,
        };
        let threshold = THRESHOLD.as_millis() as u64;
        let action = match case.fault {
            // Who is late must be left alone whatever is done to hangs.
            Fault::SlowBelow
            | Fault::SlowAbove
            | Fault::Unusual
            | Fault::Checkpoint
            | Fault::Computing
            | Fault::Left => Action::Abort,
            Fault::Stopped | Fault::Traced | Fault::Stuck => {
                [Action::Report, Action::Error][between(0, 1) as usize]
            }
            _ => Action::Report,
        };
        Self {
            fault: case.fault,
            mode: case.mode,
            source: case.source,
            ranks,
            nodes,
            victim: between(0, u64::from(ranks) - 1) as u32,
            operation: match case.fault {
                // No rank has all that it needs before the last one comes.
                Fault::Frozen => Operation::AllReduce,
                fault => {
                    let all = [
                        Operation::AllReduce,
                        Operation::AllGather,
                        Operation::ReduceScatter,
                        Operation::AllToAll,
                    ];
                    // Of messages each rank knows only its own.
                    let differs = matches!(fault, Fault::Count | Fault::Order | Fault::Crossed);
                    all[between(0, if differs { 2 } else { 3 }) as usize]
                }
            },
            elements: match case.fault {
                // Goes from rank to rank.
                Fault::Frozen => between(4096, 20_000) as usize,
                _ => between(1, 20_000) as usize,
            },
            before: match case.fault {
                Fault::Unusual => between(20, 30) as u32,
                _ => between(1, 5) as u32,
            },
            // The others' waiting begins with it.
            pause_ms: match case.fault {
                Fault::SlowBelow => between(0, threshold / 20),
                // Until the other rank comes, for which nobody is to be named.
                Fault::Frozen => between(threshold / 3, threshold * 2 / 3),
                _ => between(20, 120),
            },
            late_ms: match case.fault {
                Fault::SlowBelow => between(threshold / 5, threshold * 7 / 10),
                // Long enough that the promise of a verdict ends before the rank comes.
                _ => threshold + PROMISED.as_millis() as u64 + between(50, 700),
            },
            action,
        }
    }

    /// Whether all ranks abort at the end, since the operation can never end.
    pub(super) fn ends_in_aborts(&self) -> bool {
        use Fault::{Aborted, Count, Crossed, Killed, Order, Stuck, Withheld};
        matches!(
            self.fault,
            Withheld | Killed | Count | Order | Crossed | Aborted | Stuck
        )
    }

    /// The node of a rank: ranks are dealt in blocks.
    pub(super) fn node(&self, rank: u32) -> u32 {
        rank * self.nodes / self.ranks
    }

    pub(super) fn is_alone(&self, rank: u32) -> bool {
        let on_node = (0..self.ranks).filter(|other| self.node(*other) == self.node(rank));
        on_node.count() == 1
    }

    /// The rank that leaves before the others are done: the root of a broadcast, which goes from rank to rank.
    pub(super) fn leaver(&self) -> Option<u32> {
        (self.fault == Fault::Left).then_some((self.victim + self.ranks - 1) % self.ranks)
    }

    /// Whether that rank aborts the communicator: where no network has to bring what it has sent.
    pub(super) fn leaver_aborts(&self) -> bool {
        self.fault == Fault::Left && self.nodes == 1 && self.elements.is_multiple_of(2)
    }

    /// The two that wait for each other: the victim and the rank behind it.
    pub(super) fn crossing(&self) -> Option<[u32; 2]> {
        (self.fault == Fault::Crossed).then_some([self.victim, (self.victim + 1) % self.ranks])
    }

    /// The one of the two that a rank waits for, if it is the other.
    pub(super) fn crossed_with(&self, rank: u32) -> Option<u32> {
        match self.crossing()? {
            [first, second] if rank == first => Some(second),
            [first, second] if rank == second => Some(first),
            _ => None,
        }
    }

    /// Whether both have also called what the other one waits for, behind what they wait in.
    pub(super) fn enqueues_both(&self) -> bool {
        self.fault == Fault::Crossed && self.elements.is_multiple_of(2)
    }

    /// Whether the victim calls when all others have: who is wrong can be said only once most have called.
    pub(super) fn victim_calls_last(&self) -> bool {
        matches!(self.fault, Fault::Count | Fault::Order)
    }

    /// The rank that the victim's kernel waits for when it is stopped.
    pub(super) fn comes_last(&self) -> Option<u32> {
        (self.fault == Fault::Frozen).then_some((self.victim + self.ranks - 1) % self.ranks)
    }

    /// From which rank it receives when the ranks wait for each other; whoever receives nothing is in a collective of all.
    pub(super) fn receives_from(&self, rank: u32) -> Option<u32> {
        let [first, second] = self.crossing()?;
        // A message against a message, or against the collective.
        let both = self.before.is_multiple_of(2);
        match rank {
            _ if rank == first => Some(second),
            _ if rank == second && both => Some(first),
            _ => None,
        }
    }
}

#[cfg(test)]
impl Round {
    /// A round of three ranks that are processes, with one operation before the fault; rank 1 is the victim.
    pub(super) fn sample(fault: Fault, mode: Mode, source: Source) -> Self {
        let case = Case {
            fault,
            ranks: RankKind::Process,
            mode,
            source,
        };
        Self {
            ranks: 3,
            victim: 1,
            before: 1,
            ..Self::draw(&case, DeviceKind::Host, 1, 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_have_names_of_their_own_and_are_drawn_alike() {
        let names: std::collections::BTreeSet<_> = Case::all().iter().map(Case::to_string).collect();
        assert_eq!(names.len(), Case::all().len());
        assert!(names.contains("slow-below/thread/graph/pages"));
        assert!(names.contains("stuck/process/eager/events"));
        for case in Case::all() {
            let text = |seed| serde_json::to_string(&Round::draw(&case, DeviceKind::Host, seed, 3)).unwrap();
            assert_eq!(text(7), text(7));
            assert_ne!(text(7), text(8));
            for number in 0..50 {
                let round = Round::draw(&case, DeviceKind::Host, 1, number);
                assert!(round.victim < round.ranks && round.nodes <= round.ranks);
                let late = Duration::from_millis(round.late_ms);
                assert_eq!(late < THRESHOLD, case.fault == Fault::SlowBelow, "{round:?}");
            }
        }
    }

    #[test]
    fn every_fault_has_a_cell() {
        for fault in Fault::value_variants() {
            let is_possible =
                |case: &Case| case.fault == *fault && case.impossible(DeviceKind::Host).is_none();
            assert!(Case::all().iter().any(is_possible), "{fault}");
        }
    }
}
