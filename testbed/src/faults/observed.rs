//! What came of a round: the verdicts of the ranks, read from their logs, and the journal.

use std::time::Duration;

use serde::Serialize;

use super::journal::{Event, What};

/// A verdict that a rank gave.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Verdict {
    /// Ranks are those of the communicator, which has so many.
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// `CLOCK_MONOTONIC` of its arrival.
    pub(super) ns: u64,
    /// The line that names the operation.
    pub(super) operation: String,
    /// From the cause on.
    #[serde(rename = "verdict")]
    pub(super) text: String,
}

/// The number that `text` begins with.
fn leading_number(text: &str) -> Option<u32> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    text[..end].parse().ok()
}

impl Verdict {
    /// The first rank that it names.
    pub(super) fn first_rank(&self) -> Option<u32> {
        let mark = "rank ";
        let mut places = self.text.match_indices(mark);
        places.find_map(|(at, _)| leading_number(&self.text[at + mark.len()..]))
    }

    /// The number of its operation among those of its rank.
    pub(super) fn operation_number(&self) -> Option<u32> {
        let after = |mark: &str| leading_number(self.operation.rsplit_once(mark)?.1);
        if self.operation.contains(" of graph ") {
            after(", replay ").and_then(|replay| replay.checked_sub(1))
        } else {
            after(", collective ")
        }
    }
}

/// What came of a round.
#[derive(Clone, Debug)]
pub(super) struct Observed {
    pub(super) verdicts: Vec<Verdict>,
    pub(super) truth: Vec<Event>,
    /// When the fault was told to end.
    pub(super) ended_ns: u64,
    /// What the processes wrote.
    pub(super) text: String,
    /// For how long this program did not run when it was to: the machine did something else.
    pub(super) stalled: Duration,
    /// Why the round says nothing of the watchdog: a rank failed where nothing was to fail.
    pub(super) broken: Option<String>,
}

impl Observed {
    /// When something happened on a rank.
    pub(super) fn at(&self, rank: u32, what: &What) -> Option<u64> {
        let kind = std::mem::discriminant(what);
        self.truth
            .iter()
            .find(|event| event.rank == rank && std::mem::discriminant(&event.what) == kind)
            .map(|event| event.ns)
    }
}

/// Puts verdicts together from the lines of a process' log.
#[derive(Default)]
pub(super) struct LogParser {
    place: Option<(u32, u32)>,
    operation: String,
}

impl LogParser {
    /// Takes a line; returns the verdict that the line completes.
    pub(super) fn line(&mut self, line: &str, ns: u64) -> Option<Verdict> {
        let after = |mark: &str| line.find(mark).map(|at| &line[at + mark.len()..]);
        if let Some(place) = line
            .find("Comm: ")
            .and_then(|_| after(", Rank: "))
            .and_then(|rest| rest.split_once('/'))
        {
            self.place = place.0.parse().ok().zip(place.1.parse().ok());
        }
        if let Some(kernel) = after(" Kernel: ") {
            kernel.clone_into(&mut self.operation);
        }
        let text = after(" Verdict: ")?.to_owned();
        let (rank, ranks) = self.place.take()?;
        Some(Verdict {
            rank,
            ranks,
            ns,
            operation: std::mem::take(&mut self.operation),
            text,
        })
    }
}

#[cfg(test)]
pub(super) mod sample {
    //! Verdicts and events of rounds that never were.

    use super::*;

    pub(in crate::faults) const MS: u64 = 1_000_000;

    pub(in crate::faults) fn verdict(rank: u32, ranks: u32, ms: u64, operation: &str, text: &str) -> Verdict {
        Verdict {
            rank,
            ranks,
            ns: ms * MS,
            operation: operation.to_owned(),
            text: text.to_owned(),
        }
    }

    /// A round without a stall that was told to end after `ended_ms`.
    pub(in crate::faults) fn observed(verdicts: Vec<Verdict>, truth: Vec<Event>, ended_ms: u64) -> Observed {
        Observed {
            verdicts,
            truth,
            ended_ns: ended_ms * MS,
            text: String::new(),
            stalled: Duration::ZERO,
            broken: None,
        }
    }

    pub(in crate::faults) fn event(rank: u32, ms: u64, what: What) -> Event {
        let ns = ms * MS;
        Event { rank, ns, what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_is_of_the_rank_that_the_report_names() {
        let mut log = LogParser::default();
        let lines = [
            "h:1:2 [3] NCCL WARN Comm: 0x12 (x), Rank: 3/4",
            "h:1:2 [3] NCCL WARN Kernel: AllReduce(count 1), collective 3",
            "h:1:2 [3] NCCL WARN Verdict: RANK_DEAD (hang): the process of rank 1 is gone",
            "h:1:2 [3] NCCL WARN Verdict: of nobody",
        ];
        let verdicts: Vec<Verdict> = lines.iter().filter_map(|line| log.line(line, 5)).collect();
        let [verdict] = &verdicts[..] else {
            panic!("{verdicts:?}")
        };
        assert_eq!((verdict.rank, verdict.ranks, verdict.ns), (3, 4, 5));
        assert_eq!(verdict.operation, "AllReduce(count 1), collective 3");
        assert!(verdict.text.starts_with("RANK_DEAD (hang): "));
        assert_eq!(
            (verdict.first_rank(), verdict.operation_number()),
            (Some(1), Some(3))
        );
    }
}
