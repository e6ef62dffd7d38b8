//! What is promised of each fault. `docs/src/watchdog.md` has the table for people.

use std::time::Duration;

use super::cases::{ARRIVAL, Fault, INVALID_USAGE, Mode, PROMISED, REMOTE_ERROR, Round, Source, THRESHOLD};

/// Nobody is named before that is up, from when a rank waits: the threshold, less what clocks and lines may differ by.
pub(super) const NOT_BEFORE: Duration = Duration::from_millis(THRESHOLD.as_millis() as u64 * 9 / 10);

/// From a lost process to the communicator's failure.
const AT_ONCE: Duration = Duration::from_secs(1);

/// For so long nothing must move besides before that is a hang.
pub(super) const LASTS: Duration = Duration::from_millis(600);

impl Round {
    /// Whether something is expected of a rank.
    pub(super) fn expects_of(&self, by: By, rank: u32) -> bool {
        let is = match by {
            By::All => true,
            By::Others => rank != self.victim,
            By::Victim => rank == self.victim,
        };
        is && self.leaver() != Some(rank)
    }

    /// What each rank must say of the victim and become.
    pub(super) fn expectation(&self) -> Expectation {
        let verdict = |cause, class| {
            vec![Promise {
                cause,
                class,
                within: THRESHOLD + PROMISED,
                not_before: NOT_BEFORE,
                operation: String::new(),
                words: "",
            }]
        };
        let at_once = |mut said: Vec<Promise>| {
            said[0].not_before = Duration::ZERO;
            said
        };
        let late = || verdict("NOT_LAUNCHED", "late");
        let of_replay = |replay: u32, graph: u32| {
            let mut said = late();
            said[0].operation = format!(" of graph {graph}, replay {replay}");
            said
        };
        let says = |verdicts| Expectation {
            promises: verdicts,
            by: By::Others,
            failure: None,
        };
        let fails = |by, code, texts, within| {
            Some(Failure {
                by,
                code,
                texts,
                within,
            })
        };
        let victim = self.victim;
        match self.fault {
            Fault::SlowBelow => says(Vec::new()),
            Fault::SlowAbove | Fault::Unusual | Fault::Checkpoint | Fault::Left => says(late()),
            Fault::Withheld => {
                let mut both = late();
                both.push(Promise {
                    class: "hang",
                    within: ARRIVAL + PROMISED,
                    not_before: ARRIVAL * 9 / 10,
                    ..both[0].clone()
                });
                says(both)
            }
            // Kernels tell nothing of a graph that is launched, an event that the graph records does.
            Fault::Computing if (self.mode, self.source) == (Mode::Graph, Source::Pages) => says(late()),
            Fault::Computing => says(verdict("QUEUED_BEHIND_COMPUTE", "late")),
            Fault::Replay | Fault::ReplayQueued => says(of_replay(self.before + 1, 1)),
            Fault::TwoGraphs => says(of_replay(self.before + 1, 2)),
            // Nobody can say why a rank that is alone on its node does not answer.
            Fault::Stopped | Fault::Traced if self.is_alone(self.victim) => {
                says(verdict("NO_ANSWER", "hang"))
            }
            Fault::Stopped => says(verdict("RANK_STOPPED", "hang")),
            Fault::Traced => {
                let mut held = verdict("RANK_STOPPED", "late");
                held[0].words = " is stopped by a debugger";
                says(held)
            }
            Fault::Aborted => says(verdict("PEER_ABORTED", "hang")),
            Fault::Stuck => Expectation {
                by: By::Victim,
                ..says(verdict("STUCK_KERNEL", "hang"))
            },
            Fault::Frozen => {
                let mut stuck = verdict("STUCK_KERNEL", "hang");
                stuck[0].within += LASTS;
                Expectation {
                    by: By::All,
                    ..says(stuck)
                }
            }
            // Known at once.
            Fault::Killed => {
                let texts = vec![format!("rank {victim} is gone")];
                Expectation {
                    failure: fails(By::Others, REMOTE_ERROR, texts, AT_ONCE),
                    ..says(at_once(verdict("RANK_DEAD", "hang")))
                }
            }
            Fault::Count | Fault::Order => {
                let texts = vec![format!("rank {victim} called ")];
                let mut differs = at_once(verdict("METADATA_MISMATCH", "hang"));
                differs[0].words = " has called something else: ";
                Expectation {
                    failure: fails(By::All, INVALID_USAGE, texts, THRESHOLD + PROMISED),
                    by: By::All,
                    ..says(differs)
                }
            }
            Fault::Crossed => {
                let mut texts = vec!["each waits for the other".to_owned()];
                let two = self.crossing().into_iter().flatten();
                texts.extend(two.map(|rank| format!("rank {rank} ")));
                // Which of the two finds out, or both, does not matter: the judge knows of that.
                Expectation {
                    failure: fails(By::All, INVALID_USAGE, texts, THRESHOLD + PROMISED + LASTS),
                    ..says(Vec::new())
                }
            }
        }
    }
}

/// Which ranks something is expected of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    All,
    Others,
    Victim,
}

/// A verdict on the victim.
#[derive(Clone, Debug)]
pub(super) struct Promise {
    pub(super) cause: &'static str,
    /// `late` or `hang`.
    pub(super) class: &'static str,
    /// From when the rank waits and the fault is there, whichever is later.
    pub(super) within: Duration,
    /// From when the rank waits; zero if no time-out has to pass: then from the fault on.
    pub(super) not_before: Duration,
    /// What the operation's name must contain.
    pub(super) operation: String,
    /// What it must contain itself.
    pub(super) words: &'static str,
}

impl Promise {
    /// What it begins with.
    pub(super) fn begins(&self) -> String {
        format!("{} ({}): ", self.cause, self.class)
    }
}

/// A failure of the communicator.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) by: By,
    pub(super) code: i32,
    /// What its text must contain: it names the culprits.
    pub(super) texts: Vec<String>,
    pub(super) within: Duration,
}

/// What is promised of a fault.
#[derive(Clone, Debug)]
pub(super) struct Expectation {
    /// One after the other, and no others.
    pub(super) promises: Vec<Promise>,
    /// Who says them.
    pub(super) by: By,
    pub(super) failure: Option<Failure>,
}

impl Expectation {
    /// The time by which everything has been said.
    pub(super) fn within(&self) -> Duration {
        let verdicts = self.promises.iter().map(|verdict| verdict.within);
        let failure = self.failure.iter().map(|failure| failure.within);
        verdicts.chain(failure).max().unwrap_or_default()
    }
}
