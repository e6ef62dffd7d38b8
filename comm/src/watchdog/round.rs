//! One round of the watchdog on one communicator: read, let the rules decide, carry it out.

use std::{collections::BTreeMap, sync::atomic::Ordering, time::Duration};

use ringsight_comm_base::{error::Error, sync::lock};
use ringsight_records::{Cause, Kind, Record, State};

use super::{
    Watch,
    in_flight::RunningOperation,
    message::WatchdogMessage,
    report::{self, Report},
    rules::{
        OperationTimer, Reading, Step,
        evidence::{OperationRun, Position, RankState},
        verdict::{Consequence, Verdict},
    },
};
use crate::{device, observe};

/// The most ranks that are asked one by one. A question to more goes from rank to rank, which takes fewer connections but
/// may be held up by the very rank that is looked for.
const MAX_DIRECT: usize = 64;

impl Watch {
    /// Does one round; called by the watchdog's thread. `is_debugged`: a debugger is attached to this process. Returns how
    /// long the thread may rest.
    pub(super) fn round(&self, is_debugged: bool) -> Duration {
        let now = observe::now_ns();
        self.look(now);
        // Relaxed: a watch that ends just now is looked at once more.
        if self.has_ended.load(Ordering::Relaxed) {
            return self.settings.rest();
        }
        self.investigate(is_debugged, now).min(self.inquire())
    }

    /// Looks for operations that do not end. Returns how long the thread may rest.
    fn investigate(&self, is_debugged: bool, now: u64) -> Duration {
        // Relaxed: only this thread uses it.
        if self.is_debugged.swap(is_debugged, Ordering::Relaxed) != is_debugged {
            // Before the debugger stops the process, which says nothing from then on.
            let message = WatchdogMessage::Debugger {
                is_attached: is_debugged,
            };
            (self.post)(None, &message.encode());
        }
        self.sample_replays();
        let in_progress = self.in_progress(now);
        let timers: Vec<OperationTimer> = in_progress
            .iter()
            .map(|op| OperationTimer {
                run: op.run,
                start_ns: op.start_ns,
                kind: self.kind_of(op.info.op),
            })
            .collect();
        let schedule = lock(&self.rules).schedule(now, &timers);
        if !in_progress.is_empty()
            && let Some(report) = self.fail_with_device()
        {
            report.log();
        }
        if schedule.overdue.is_empty() {
            return schedule.rest;
        }
        let overdue: Vec<&RunningOperation> = schedule.overdue.iter().map(|at| &in_progress[*at]).collect();
        let operations: Vec<_> = overdue.iter().map(|op| self.read(op, now)).collect();
        let reading = Reading {
            operations: &operations,
            order: self,
            is_blind: self.blind_since(now).is_some(),
            is_given_up: self.is_given_up(),
        };
        let decision = lock(&self.rules).decide(now, &reading);
        for step in decision.steps {
            self.carry_out(step, &overdue, now);
        }
        schedule.rest.min(decision.rest)
    }

    /// Notes what has moved since the last round, and which time was lost.
    fn look(&self, now: u64) {
        let mut in_flight = lock(&self.in_flight);
        // While nothing is in progress no time is lost.
        let waits = in_flight.in_progress().next().is_some();
        let device = device::opened().filter(|_| waits);
        let kept = device.map_or(Duration::ZERO, |device| device.longest_scheduling_delay());
        let lost_ns = in_flight.look(now, self.settings.rest(), kept);
        drop(in_flight);
        lock(&self.rules).lose_time(now, lost_ns);
    }

    fn carry_out(&self, step: Step, overdue: &[&RunningOperation], now: u64) {
        match step {
            Step::Ask { run, query } => self.ask(run, query),
            Step::CheckHealth { run, query, ranks } => self.check_health(run, query, &ranks),
            Step::AssumeCompleted { run } => lock(&self.in_flight).assume_completed(run),
            Step::Report { run, verdict, states } => {
                let op = overdue.iter().find(|op| op.run == run);
                // The positions of this rank's operations may have been old, and the answers may be consequences of what
                // was found meanwhile.
                if let Some(op) = op
                    && self.is_in_progress(run)
                    && !self.is_given_up()
                {
                    self.enforce(op, &verdict);
                    self.publish(op, &verdict, &states, now).log();
                }
            }
        }
    }

    /// Whether it is known why operations do not end: the ranks do not call alike, or this rank gave up its operations.
    /// What the ranks do not do from then on is a consequence.
    fn is_given_up(&self) -> bool {
        self.checks.found_difference() || self.completed_when_given_up.get().is_some()
    }

    fn is_in_progress(&self, run: OperationRun) -> bool {
        self.refresh(Duration::ZERO);
        self.in_progress(observe::now_ns()).iter().any(|op| op.run == run)
    }

    fn ask(&self, run: OperationRun, query: u32) {
        let question = WatchdogMessage::Query { query, run }.encode();
        let ranks = self.participants(run.identity);
        if ranks.len() > MAX_DIRECT {
            (self.post)(None, &question);
            return;
        }
        for rank in ranks.into_iter().filter(|rank| *rank != self.rank) {
            self.ask_one(rank, query, &question);
        }
    }

    /// Asks one rank. A rank that cannot be reached any more has left, unless it is known to have died.
    fn ask_one(&self, rank: u32, query: u32, question: &[u8]) {
        if !(self.post)(Some(rank), question) {
            lock(&self.rules).hear(query, rank, RankState::Left, observe::now_ns());
        }
    }

    /// Finds out about the processes of silent ranks: on this node by a look, on another node by a rank there. The silent
    /// ranks are asked again as well.
    fn check_health(&self, run: OperationRun, query: u32, silent: &[u32]) {
        let question = WatchdogMessage::Query { query, run }.encode();
        for rank in silent {
            self.ask_one(*rank, query, &question);
            let node = self.topology.node_of(*rank);
            if node == self.topology.node_of(self.rank) {
                let state = super::health_of(&self.topology, *rank).into();
                lock(&self.rules).hear(query, *rank, state, observe::now_ns());
                continue;
            }
            let neighbours =
                || (0..self.ranks).filter(|other| self.topology.node_of(*other) == node && other != rank);
            let health_query = WatchdogMessage::HealthQuery { query, rank: *rank }.encode();
            match neighbours().find(|other| !silent.contains(other)) {
                Some(neighbour) => {
                    (self.post)(Some(neighbour), &health_query);
                }
                // The neighbours may be silent because of this rank.
                None => neighbours().for_each(|other| {
                    (self.post)(Some(other), &health_query);
                }),
            }
        }
    }

    /// The process of a rank is gone: operations in progress will not end. Returns the report, which is to be logged after
    /// all that follows from it.
    pub(crate) fn rank_died(&self, rank: u32) -> Option<Report> {
        self.refresh(Duration::ZERO);
        lock(&self.rules).rank_died(rank);
        let op = self.first_presumed(observe::now_ns())?;
        let states = BTreeMap::from([(rank, RankState::Dead)]);
        self.report_known(&op, &Verdict::hang(Cause::RankDead, rank), &states)
    }

    /// The ranks do not call alike, as `text` says, and `odd` are the ranks that are wrong: operations in progress will not
    /// end. Returns the report, which is to be logged after all that follows from it.
    pub(crate) fn calls_differ(&self, text: &str, odd: &[u32]) -> Option<Report> {
        self.refresh(Duration::ZERO);
        let (culprit, others) = odd.split_first()?;
        let now = observe::now_ns();
        // Another rank may find the difference before this rank's kernel begins.
        let op = self.first_presumed(now).or_else(|| {
            let in_flight = lock(&self.in_flight);
            in_flight.first_queued(now).or_else(|| in_flight.next_replay(now))
        })?;
        let verdict = Verdict {
            others: others.to_vec(),
            called: Some(text.to_owned()),
            ..Verdict::hang(Cause::MetadataMismatch, *culprit)
        };
        self.report_known(&op, &verdict, &BTreeMap::new())
    }

    /// If this rank's device failed, operations in progress will not end, and the communicator fails whatever the action is.
    /// Returns the report, which is to be logged after all that follows from it.
    pub(super) fn fail_with_device(&self) -> Option<Report> {
        let fault = self.fault()?;
        // The error first: a reader of the report finds it.
        self.failure.fail(fault);
        let op = self.first_presumed(observe::now_ns())?;
        let states = BTreeMap::from([(self.rank, RankState::Answered(Position::DeviceFailed.into()))]);
        self.report_known(&op, &Verdict::hang(Cause::DeviceFault, self.rank), &states)
    }

    /// Publishes a verdict that no rank need be asked about; `None` if it has been reported of the operation.
    fn report_known(
        &self,
        op: &RunningOperation,
        verdict: &Verdict,
        states: &BTreeMap<u32, RankState>,
    ) -> Option<Report> {
        let now = observe::now_ns();
        let is_news = lock(&self.rules).note(op.run, verdict, now);
        is_news.then(|| self.publish(op, verdict, states, now))
    }

    /// Does to the communicator what follows from a verdict. Before the report is logged: its reader finds the error.
    fn enforce(&self, op: &RunningOperation, verdict: &Verdict) {
        let error = |code| {
            let text = format!("{}: {}", verdict.cause, report::sentence(verdict));
            Error::new(code, text)
        };
        match verdict.consequence(self.settings.action) {
            Consequence::Nothing => {}
            Consequence::SetError(code) => self.failure.set_error(error(code)),
            Consequence::Fail(code) => self.failure.fail(error(code)),
            Consequence::AnnounceMismatch(blocking) => {
                let call = self.checks.call_of(op.info.op);
                let text = report::deadlock_text(self.rank, op, call, verdict.culprit, blocking);
                self.checks.announce(text);
            }
        }
    }

    /// Writes a verdict to the shared pages and to the records, and has dumps written if it is a hang. Returns the report.
    fn publish(
        &self,
        op: &RunningOperation,
        verdict: &Verdict,
        states: &BTreeMap<u32, RankState>,
        now: u64,
    ) -> Report {
        if verdict.is_hang {
            self.dump_on_all_ranks();
        }
        let state = if verdict.is_hang {
            State::STOP
        } else {
            State::START
        };
        // Before the record, whose reader looks it up.
        if let Some(pages) = observe::pages() {
            pages.keep_verdict(&report::record(op, verdict, now));
        }
        observe::emit(&Record {
            value: u64::from(verdict.cause as u8) << 32 | u64::from(verdict.culprit),
            ..op.info.record(Kind::Verdict, state, now, op.run.replay)
        });
        let threshold = lock(&self.rules).threshold(self.kind_of(op.info.op));
        Report {
            device: self.device,
            lines: report::lines(self, op, verdict, states, threshold, now),
        }
    }
}
