//! One rank's part in finding out what went wrong: a state machine that takes the time as an argument.
//!
//! | state | entered when | left when |
//! |---|---|---|
//! | waiting for a reason | a connection failed | [`REASON_TIME`] is up: the connection is the reason |
//! | waiting for the finding | the calls differ, and another rank asks | the finding comes, or [`FINDING_TIME`] is up |
//! | asking | the calls differ, and this rank asks | every rank has answered or died, or [`ANSWER_TIME`] is up |
//! | failed | the death of a rank, unless the calls differ; the end of any other state | – |
//!
//! The rank that asks is rank 0, or the first one that can still be reached. A connection that breaks once the calls differ
//! was broken by a rank that heard of it earlier, so it does not count.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use ringsight_comm_base::error::{Error, ResultCode};

use super::{
    CheckEvent, Entry,
    finding::{self, NoticedMismatch},
    message::{CallsAnswer, CheckMessage, Finding},
};
use crate::op::{Call, Identity};

/// How long the rank that asks waits for the others' answers. The answering threads block on nothing, but a process may be
/// stopped.
const ANSWER_TIME: Duration = Duration::from_secs(1);
/// How long the other ranks wait for the finding.
const FINDING_TIME: Duration = Duration::from_secs(2);
/// How long a failed connection may turn out to be the consequence of a death, or of a rank that left for its own reason.
const REASON_TIME: Duration = Duration::from_millis(500);

/// What a diagnosis needs of its rank.
pub(super) trait Peers {
    /// Sends a message to one rank, or to all others. Returns whether it can be sent.
    fn send(&self, to: Option<u32>, message: &CheckMessage) -> bool;
    /// What this rank called around `identity`, and with tag `theirs`.
    fn own_calls(&self, identity: Identity, theirs: u32) -> CallsAnswer;
}

/// What the communicator fails with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) error: Error,
    /// The ranks that are wrong, if the ranks do not call alike.
    pub(super) wrong: Vec<u32>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self {
            error,
            wrong: Vec::new(),
        }
    }
}

/// See the module's documentation.
pub(super) struct Diagnosis {
    rank: u32,
    ranks: u32,
    /// Set on the rank that asks.
    noticed: Option<NoticedMismatch>,
    answers: BTreeMap<u32, CallsAnswer>,
    dead: BTreeSet<u32>,
    /// The error that the communicator fails with at this time, if no better one is known by then.
    fallback: Option<(Instant, Error)>,
    /// The calls differ.
    is_mismatch: bool,
}

impl Diagnosis {
    /// Of rank `rank` among `ranks`.
    pub(super) fn new(rank: u32, ranks: u32) -> Self {
        Self {
            rank,
            ranks,
            noticed: None,
            answers: BTreeMap::new(),
            dead: BTreeSet::new(),
            fallback: None,
            is_mismatch: false,
        }
    }

    /// Takes an event. Returns the failure if it is certain now.
    pub(super) fn hear(&mut self, event: CheckEvent, peers: &dyn Peers, now: Instant) -> Option<Failure> {
        let alone = event.alone();
        match event {
            CheckEvent::Mismatch { mine, theirs } => {
                self.expect_mismatch(now + FINDING_TIME, alone);
                // Without the call nobody can look for the operation.
                let mine: (Identity, Call) = mine?.into();
                let message = CheckMessage::Noticed { mine, theirs };
                if (0..self.rank).any(|rank| peers.send(Some(rank), &message)) {
                    return None;
                }
                self.ask(noticed(self.rank, mine, theirs), peers, now)
            }
            CheckEvent::Message { from, message } => self.read(from, message, peers, now),
            CheckEvent::RankDied { rank, .. } => {
                self.dead.insert(rank);
                if self.is_mismatch {
                    self.find_if_all_answered(peers)
                } else {
                    Some(alone.into())
                }
            }
            CheckEvent::ConnectionFailed { .. } => {
                self.fallback.get_or_insert((now + REASON_TIME, alone));
                None
            }
        }
    }

    /// When [`Diagnosis::give_up_waiting`] is to be called; `None` if nothing is waited for.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.fallback.as_ref().map(|(deadline, _)| *deadline)
    }

    /// The deadline has passed: fails with what is known.
    pub(super) fn give_up_waiting(&mut self, peers: &dyn Peers) -> Option<Failure> {
        let (_, error) = self.fallback.take()?;
        Some(self.find(peers).unwrap_or(error.into()))
    }

    fn read(&mut self, from: u32, message: CheckMessage, peers: &dyn Peers, now: Instant) -> Option<Failure> {
        if from >= self.ranks {
            return None;
        }
        match message {
            CheckMessage::Noticed { mine, theirs } => self.ask(noticed(from, mine, theirs), peers, now),
            CheckMessage::Ask { identity, theirs } => {
                let error = Error::usage("the ranks do not call the same operations");
                self.expect_mismatch(now + FINDING_TIME, error);
                let answer = CheckMessage::Calls(peers.own_calls(identity, theirs));
                peers.send(Some(from), &answer);
                None
            }
            CheckMessage::Calls(answer) => {
                self.answers.insert(from, answer);
                self.find_if_all_answered(peers)
            }
            CheckMessage::Finding(Finding { text, mut wrong }) => {
                wrong.retain(|rank| *rank < self.ranks);
                Some(Failure {
                    error: Error::usage(text),
                    wrong,
                })
            }
        }
    }

    /// Asks all ranks what they called, unless that is being done.
    fn ask(&mut self, noticed: NoticedMismatch, peers: &dyn Peers, now: Instant) -> Option<Failure> {
        if self.noticed.is_some() {
            return None;
        }
        let NoticedMismatch { identity, theirs, .. } = noticed;
        self.noticed = Some(noticed);
        let error = Error::usage("the ranks do not call the same operations");
        self.expect_mismatch(now + ANSWER_TIME, error);
        peers.send(None, &CheckMessage::Ask { identity, theirs });
        self.answers.insert(self.rank, peers.own_calls(identity, theirs));
        self.find_if_all_answered(peers)
    }

    /// The calls differ: fails with `error` at `deadline`. What was waited for before does not count any more.
    fn expect_mismatch(&mut self, deadline: Instant, error: Error) {
        let is_news = !std::mem::replace(&mut self.is_mismatch, true);
        if is_news || self.noticed.is_some() {
            self.fallback = Some((deadline, error));
        }
    }

    /// On the rank that asks: the finding, if every rank has answered or died.
    fn find_if_all_answered(&mut self, peers: &dyn Peers) -> Option<Failure> {
        let is_missing =
            (0..self.ranks).any(|rank| !self.answers.contains_key(&rank) && !self.dead.contains(&rank));
        if is_missing { None } else { self.find(peers) }
    }

    /// On the rank that asks: finds out who called what, and tells all.
    fn find(&mut self, peers: &dyn Peers) -> Option<Failure> {
        let finding = finding::compare(&self.noticed?, &self.answers, self.ranks);
        peers.send(None, &CheckMessage::Finding(finding.clone()));
        Some(Failure {
            error: Error::usage(finding.text),
            wrong: finding.wrong,
        })
    }
}

fn noticed(by: u32, (identity, call): (Identity, Call), theirs: u32) -> NoticedMismatch {
    NoticedMismatch {
        by,
        identity,
        call,
        theirs,
    }
}

impl CheckEvent {
    /// The failure that follows from the event alone.
    pub(super) fn alone(&self) -> Error {
        match self {
            Self::Mismatch { mine: Some(mine), .. } => Error::usage(format!(
                "{} of this rank met another operation: the ranks do not call the same",
                mine.call
            )),
            Self::Mismatch { mine: None, .. } | Self::Message { .. } => {
                Error::usage("the ranks do not call the same operations in the same order")
            }
            Self::RankDied { rank, text } => {
                Error::new(ResultCode::RemoteError, format!("rank {rank} is gone: {text}"))
            }
            Self::ConnectionFailed { text } => Error::new(ResultCode::RemoteError, text.clone()),
        }
    }
}

impl From<Entry> for (Identity, Call) {
    fn from(entry: Entry) -> Self {
        (entry.identity, entry.call)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use ringsight_records::{DataType, Flags, Function, ReduceOp};

    use super::*;
    use crate::{checks::calls::Calls, op::OpInfo};

    /// One rank of a job by a virtual clock: its diagnosis, its calls, and what it sent.
    struct TestRank {
        diagnosis: RefCell<Diagnosis>,
        calls: Calls,
        sent: RefCell<Vec<(Option<u32>, CheckMessage)>>,
        /// Lower ranks cannot be reached.
        is_alone: bool,
        failure: RefCell<Option<Failure>>,
    }

    impl Peers for TestRank {
        fn send(&self, to: Option<u32>, message: &CheckMessage) -> bool {
            let is_sent = !(self.is_alone && to.is_some());
            if is_sent {
                self.sent.borrow_mut().push((to, message.clone()));
            }
            is_sent
        }

        fn own_calls(&self, identity: Identity, theirs: u32) -> CallsAnswer {
            self.calls.answer(identity, theirs)
        }
    }

    struct Job {
        ranks: Vec<TestRank>,
        now: Instant,
        /// Ranks that hear nothing.
        deaf: Vec<u32>,
    }

    impl Job {
        /// Ranks that have all made the same calls, but for one call of the odd rank.
        fn new(ranks: u32, deaf: &[u32]) -> Self {
            let rank = |rank| TestRank {
                diagnosis: RefCell::new(Diagnosis::new(rank, ranks)),
                calls: Calls::default(),
                sent: RefCell::default(),
                is_alone: false,
                failure: RefCell::default(),
            };
            Self {
                ranks: (0..ranks).map(rank).collect(),
                now: Instant::now(),
                deaf: deaf.to_vec(),
            }
        }

        fn note(&mut self, rank: usize, seq: u64, count: usize) -> Entry {
            let call = Call {
                function: Function::AllReduce,
                count,
                data_type: DataType::Float32,
                reduce_op: ReduceOp::Sum,
                peer: None,
                place: None,
            };
            let info = OpInfo {
                op: 1 + seq as u32,
                comm: 1,
                seq,
                bytes: 0,
                rank: rank as u32,
                peer: -1,
                flags: Flags(0),
            };
            let entry = Entry::new(&info, call);
            self.ranks[rank].calls.note(0, &[entry]);
            entry
        }

        fn hear(&self, rank: u32, event: CheckEvent) {
            let of = &self.ranks[rank as usize];
            let failure = of.diagnosis.borrow_mut().hear(event, of, self.now);
            if let Some(failure) = failure {
                of.failure.borrow_mut().get_or_insert(failure);
            }
            self.deliver(rank);
        }

        /// Brings what a rank sent.
        fn deliver(&self, from: u32) {
            let sent = self.ranks[from as usize].sent.take();
            for (to, message) in sent {
                let receivers = (0..self.ranks.len() as u32)
                    .filter(|rank| to.map_or(*rank != from, |to| to == *rank))
                    .filter(|rank| !self.deaf.contains(rank));
                for receiver in receivers {
                    let message = message.clone();
                    self.hear(receiver, CheckEvent::Message { from, message });
                }
            }
        }

        /// Turns the clock, and gives up waiting where the deadline passes.
        fn pass(&mut self, time: Duration) {
            self.now += time;
            for rank in 0..self.ranks.len() as u32 {
                let of = &self.ranks[rank as usize];
                let deadline = of.diagnosis.borrow().deadline();
                if of.failure.borrow().is_none() && deadline.is_some_and(|deadline| deadline <= self.now) {
                    let failure = of.diagnosis.borrow_mut().give_up_waiting(of);
                    *of.failure.borrow_mut() = failure;
                    self.deliver(rank);
                }
            }
        }

        fn text(&self, rank: usize) -> Option<String> {
            let failure = self.ranks[rank].failure.borrow();
            failure.as_ref().map(|failure| failure.error.text.clone())
        }
    }

    const MS: Duration = Duration::from_millis(1);

    fn mismatch(mine: Entry) -> CheckEvent {
        CheckEvent::Mismatch {
            mine: Some(mine),
            theirs: 7,
        }
    }

    #[test]
    fn every_rank_fails_at_once_with_the_same_whoever_notices() {
        for by in 0..4 {
            let mut job = Job::new(4, &[]);
            let mut last = None;
            for rank in 0..4 {
                for seq in 0..8 {
                    let count = if rank == 2 && seq >= 5 { 9 } else { 3 };
                    let entry = job.note(rank, seq, count);
                    // Noticed at a later operation than the first that differs.
                    last = last.or((rank == by && seq == 6).then_some(entry));
                }
            }
            job.hear(by as u32, mismatch(last.unwrap()));
            for rank in &job.ranks {
                let failure = rank.failure.borrow().clone().unwrap();
                assert_eq!(failure.wrong, [2]);
                assert_eq!(
                    failure.error,
                    Error::usage(
                        "ranks 0-1, 3 called AllReduce(count 3, float32, sum) while rank 2 called \
                         AllReduce(count 9, float32, sum): collective #5"
                    )
                );
            }
        }
    }

    #[test]
    fn a_rank_that_does_not_answer_is_waited_for_until_the_deadline() {
        let mut job = Job::new(3, &[1]);
        job.note(0, 0, 3);
        let mine = job.note(2, 0, 4);
        job.hear(2, mismatch(mine));
        job.pass(ANSWER_TIME - MS);
        assert_eq!((job.text(0), job.text(2)), (None, None));
        job.pass(MS);
        for rank in [0, 2] {
            let text = job.text(rank).unwrap();
            assert!(
                text.ends_with("collective #0 (rank 1 did not yet call it)"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_rank_that_died_is_not_waited_for() {
        let mut job = Job::new(3, &[1]);
        job.note(0, 0, 3);
        let mine = job.note(2, 0, 4);
        job.hear(2, mismatch(mine));
        let died = CheckEvent::RankDied {
            rank: 1,
            text: "killed".into(),
        };
        job.hear(0, died);
        assert!(job.text(0).unwrap().contains("rank 2 called AllReduce(count 4"));
        assert_eq!(job.text(0), job.text(2));
    }

    #[test]
    fn without_a_finding_each_rank_fails_by_itself() {
        let mut job = Job::new(2, &[0]);
        let mine = job.note(1, 0, 4);
        job.hear(1, mismatch(mine));
        job.pass(FINDING_TIME - MS);
        assert_eq!(job.text(1), None);
        job.pass(MS);
        let text = job.text(1).unwrap();
        assert!(
            text.contains("AllReduce(count 4, float32, sum) of this rank met"),
            "{text}"
        );
    }

    #[test]
    fn the_first_rank_that_can_be_reached_asks() {
        let mut job = Job::new(3, &[0]);
        job.note(1, 0, 3);
        let mine = job.note(2, 0, 4);
        job.ranks[2].is_alone = true;
        job.hear(2, mismatch(mine));
        job.pass(ANSWER_TIME);
        let text = job.text(2).unwrap();
        assert!(
            text.ends_with("collective #0 (rank 0 did not yet call it)"),
            "{text}"
        );
    }

    #[test]
    fn a_failed_connection_is_the_last_reason() {
        let failed = |text: &str| CheckEvent::ConnectionFailed { text: text.into() };
        let mut job = Job::new(2, &[]);
        for rank in 0..2 {
            job.hear(rank, failed("rank 0 to rank 1 broke"));
        }
        job.pass(REASON_TIME - MS);
        let died = CheckEvent::RankDied {
            rank: 1,
            text: "killed".into(),
        };
        job.hear(0, died);
        assert_eq!(job.text(0).unwrap(), "rank 1 is gone: killed");
        assert_eq!(job.text(1), None, "the reason may come yet");
        job.pass(MS);
        assert_eq!(job.text(1).unwrap(), "rank 0 to rank 1 broke");

        let mut job = Job::new(2, &[]);
        job.note(0, 0, 3);
        let mine = job.note(1, 0, 4);
        job.hear(1, failed("rank 1 to rank 0 broke"));
        job.hear(1, mismatch(mine));
        for rank in 0..2 {
            assert!(job.text(rank).unwrap().ends_with("collective #0"));
        }
    }

    #[test]
    fn a_rank_that_is_not_of_the_communicator_is_not_heard() {
        let job = Job::new(2, &[]);
        let message = CheckMessage::Finding(Finding {
            text: "x".into(),
            wrong: vec![0, 5],
        });
        job.hear(
            0,
            CheckEvent::Message {
                from: 2,
                message: message.clone(),
            },
        );
        assert_eq!(job.text(0), None);
        job.hear(0, CheckEvent::Message { from: 1, message });
        assert_eq!(job.ranks[0].failure.borrow().as_ref().unwrap().wrong, [0]);
    }
}
