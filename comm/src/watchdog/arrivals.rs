//! Which rank a completed operation waited for: asking the other ranks, and answering them.
//!
//! While a collector reads this process's ring, this rank asks about the operations of a communicator over several nodes in
//! which it may have waited ([`crate::progress::ArrivalLog`]). `docs/src/late-ranks.md` has how it works, and what it costs.
//!
//! | state of an operation | who moves it there |
//! |---|---|
//! | waited in | the thread that hears of the device; or the service thread, which another rank asked about it |
//! | asked about | the watchdog's thread, every [`INTERVAL`], the longest first |
//! | recorded | the service thread, with the last answer; or the watchdog's thread, if answers are missing |

use std::{cmp::Reverse, time::Duration};

use ringsight_comm_base::sync::lock;
use ringsight_records::{ArrivalGap, Kind, State};

use super::{
    Watch,
    message::WatchdogMessage,
    rules::{
        arrivals::{Finding, Question},
        evidence::OperationRun,
    },
};
use crate::{
    observe,
    progress::{ArrivalLog, ArrivedOperation, Dependencies},
    topology::Topology,
};

/// How often ranks ask while a collector reads.
const INTERVAL: Duration = Duration::from_millis(100);

/// The most ranks that one rank asks.
const MOST_RANKS: usize = 64;

/// The ranks that this rank asks about an operation that depends on all. Of more than [`MOST_RANKS`] others it asks a part. The
/// ranks of a node ask different parts.
pub(super) fn asked_ranks(topology: &Topology) -> Vec<u32> {
    let own = topology.rank();
    let others = (0..topology.ranks()).filter(|rank| *rank != own);
    if topology.ranks() as usize <= MOST_RANKS + 1 {
        return others.collect();
    }
    let (part, parts) = (topology.local_rank(), topology.local_ranks().len() as u32);
    others
        .filter(|rank| rank % parts == part)
        .take(MOST_RANKS)
        .collect()
}

/// How long ago this rank arrived at each of these runs, nanoseconds; `None` where it does not know.
pub(super) fn ages(arrivals: &ArrivalLog, runs: &[OperationRun], is_read: bool) -> Vec<Option<u64>> {
    let arrived = |run: &OperationRun| arrivals.answer(run.identity, run.replay, is_read);
    let arrived: Vec<_> = runs.iter().map(arrived).collect();
    // As late as possible: what passes before the answer is on its way makes the lag less certain.
    let now = observe::now_ns();
    arrived
        .into_iter()
        .map(|arrived_ns| Some(now.saturating_sub(arrived_ns?)))
        .collect()
}

impl Watch {
    /// Asks about the operations that this rank has waited in since the last call; called by the watchdog's thread. Returns how
    /// long the thread may rest.
    pub(super) fn inquire(&self) -> Duration {
        let Some(arrivals) = &self.arrivals else {
            return Duration::MAX;
        };
        let now = observe::now_ns();
        let overdue = lock(&self.inquiries).expire(now);
        self.record_arrivals(overdue);
        let mut waited = arrivals.take_waited();
        if !observe::is_read(Kind::Arrival, now) {
            return Duration::MAX;
        }
        // What held the job up for longest is known for certain.
        waited.sort_by_key(|operation| Reverse(operation.took_ns()));
        let room = lock(&self.inquiries).room();
        let left = waited.split_off(waited.len().min(room));
        self.record_gaps(&left, ArrivalGap::TooMany);
        self.ask_about(&waited, now);
        INTERVAL
    }

    fn ask_about(&self, waited: &[ArrivedOperation], now: u64) {
        let ranks_of = |operation: &ArrivedOperation| match operation.depends_on {
            Dependencies::All => (self.asked_ranks.clone(), self.ranks as usize - 1),
            Dependencies::One(rank) => (vec![rank], 1),
        };
        let begun = lock(&self.inquiries).begin(waited, ranks_of, now);
        if let Some((query, questions)) = begun {
            self.ask_ages(query, questions);
        }
    }

    fn ask_ages(&self, query: u32, questions: Vec<Question>) {
        for Question { rank, runs } in questions {
            let message = WatchdogMessage::ArrivalQuery { query, runs }.encode();
            lock(&self.inquiries).sending(query, rank, observe::now_ns());
            if !(self.post)(Some(rank), &message) {
                self.hear_ages(query, rank, None);
            }
        }
    }

    /// Another rank answered when it arrived, or cannot be asked.
    pub(super) fn hear_ages(&self, query: u32, from: u32, ages: Option<&[Option<u64>]>) {
        let now = observe::now_ns();
        let heard = lock(&self.inquiries).hear(query, from, ages, now);
        self.record_arrivals(heard.findings);
        if let Some((query, questions)) = heard.again {
            self.ask_ages(query, questions);
        }
    }

    /// The communicator ends on this rank: nothing more is asked.
    pub(super) fn end_inquiries(&self) {
        let Some(arrivals) = &self.arrivals else { return };
        let findings = lock(&self.inquiries).end();
        self.record_arrivals(findings);
        self.record_gaps(&arrivals.take_waited(), ArrivalGap::Unknown);
    }

    fn record_arrivals(&self, findings: Vec<Finding>) {
        let now = observe::now_ns();
        for Finding { operation, arrival } in findings {
            let record = operation
                .info
                .record(Kind::Arrival, State::STOP, now, operation.replay);
            observe::emit(&match arrival {
                Ok(arrival) => arrival.in_record(record),
                Err(gap) => gap.in_record(record),
            });
        }
    }

    fn record_gaps(&self, operations: &[ArrivedOperation], gap: ArrivalGap) {
        let findings = operations.iter().map(|operation| Finding {
            operation: *operation,
            arrival: Err(gap),
        });
        self.record_arrivals(findings.collect());
    }
}
