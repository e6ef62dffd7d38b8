//! How a rank answers the control messages of other watchdogs. The bootstrap's service thread calls this.

use std::sync::Arc;

use ringsight_comm_base::{process::Stat, process::State, sync::lock};
use ringsight_records::Kind;

use super::{
    Watch, arrivals,
    message::WatchdogMessage,
    rules::evidence::{OperationRun, Position, ProcessHealth, RankAnswer, RankState},
};
use crate::{
    checks::{Checks, Post},
    observe,
    progress::ArrivalLog,
    proxy::stalls::Stalls,
    topology::Topology,
};

impl Watch {
    /// A control message has come. Other parts of the library use control messages, too: those are left alone.
    pub(crate) fn on_control_message(&self, from: u32, bytes: &[u8]) {
        let Some(message) = WatchdogMessage::parse(bytes) else {
            return;
        };
        if from >= self.ranks {
            return;
        }
        match message {
            WatchdogMessage::Query { query, run } => {
                let report = self.fail_with_device();
                let answer = self.answer(run, from);
                (self.post)(Some(from), &WatchdogMessage::Answer { query, answer }.encode());
                if let Some(report) = report {
                    report.log();
                }
            }
            WatchdogMessage::HealthQuery { query, rank } => {
                answer_health(&self.topology, &self.post, from, (query, rank));
            }
            WatchdogMessage::Answer { query, answer } => {
                let state = RankState::Answered(answer);
                lock(&self.rules).hear(query, from, state, observe::now_ns());
            }
            WatchdogMessage::HealthAnswer { query, rank, health } => {
                lock(&self.rules).hear(query, rank, health.into(), observe::now_ns());
            }
            WatchdogMessage::ArrivalQuery { query, runs } => {
                let is_read = observe::is_read(Kind::Arrival, observe::now_ns());
                answer_ages(
                    self.arrivals.as_deref(),
                    &self.post,
                    from,
                    (query, &runs),
                    is_read,
                );
            }
            WatchdogMessage::ArrivalAnswer { query, ages } => self.hear_ages(query, from, Some(&ages)),
            WatchdogMessage::GaveUp { completed } => lock(&self.rules).rank_gave_up(from, completed),
            WatchdogMessage::WriteDump => self.dump(),
            WatchdogMessage::Debugger { is_attached } => lock(&self.rules).debugger(from, is_attached),
        }
    }
}

/// Answers for a rank whose watchdog is off. Without it the other ranks would take this one for one that hangs.
pub(crate) struct PassiveResponder {
    pub(crate) comm: u64,
    pub(crate) stalls: Arc<Stalls>,
    pub(crate) topology: Arc<Topology>,
    pub(crate) checks: Arc<Checks>,
    /// Of a communicator over several nodes.
    pub(crate) arrivals: Option<Arc<ArrivalLog>>,
    pub(crate) post: Post,
}

impl PassiveResponder {
    /// A control message has come.
    pub(crate) fn on_control_message(&self, from: u32, bytes: &[u8]) {
        if from >= self.topology.ranks() {
            return;
        }
        match WatchdogMessage::parse(bytes) {
            Some(WatchdogMessage::Query { query, run }) => {
                // The library does not learn whether a program has launched a graph.
                let called = run.replay > 0 || self.checks.has_called(run.identity);
                let now = observe::now_ns();
                let answer = RankAnswer {
                    stall: self.stalls.of(self.comm, run.identity, run.replay, now),
                    ..Position::WatchdogOff { called }.into()
                };
                (self.post)(Some(from), &WatchdogMessage::Answer { query, answer }.encode());
            }
            Some(WatchdogMessage::HealthQuery { query, rank }) => {
                answer_health(&self.topology, &self.post, from, (query, rank));
            }
            Some(WatchdogMessage::ArrivalQuery { query, runs }) => {
                // This rank itself asks nobody.
                answer_ages(self.arrivals.as_deref(), &self.post, from, (query, &runs), false);
            }
            _ => {}
        }
    }
}

/// Answers when this rank arrived. `is_read`: a collector wants to know of arrivals here.
fn answer_ages(
    arrivals: Option<&ArrivalLog>,
    post: &Post,
    from: u32,
    (query, runs): (u32, &[OperationRun]),
    is_read: bool,
) {
    // All ranks agree on whether there is a log.
    if let Some(arrivals) = arrivals {
        let ages = arrivals::ages(arrivals, runs, is_read);
        (post)(
            Some(from),
            &WatchdogMessage::ArrivalAnswer { query, ages }.encode(),
        );
    }
}

fn answer_health(topology: &Topology, post: &Post, from: u32, (query, rank): (u32, u32)) {
    if rank < topology.ranks() {
        let health = health_of(topology, rank);
        (post)(
            Some(from),
            &WatchdogMessage::HealthAnswer { query, rank, health }.encode(),
        );
    }
}

/// What the system says of the process of a rank, if that is of this node.
pub(super) fn health_of(topology: &Topology, rank: u32) -> ProcessHealth {
    if topology.node_of(rank) != topology.node_of(topology.rank()) {
        return ProcessHealth::Unknown;
    }
    let info = topology.info(rank);
    // In a pid namespace of its own the process has another number here, and this number may be another process's.
    let found = Stat::of(info.pid).filter(|stat| stat.start_time == info.process_start_time);
    found.map_or(ProcessHealth::Unknown, |stat| match stat.state {
        State::Stopped => ProcessHealth::Stopped,
        State::Traced => ProcessHealth::Traced,
        State::Ended => ProcessHealth::Gone,
        State::Alive => ProcessHealth::Alive,
    })
}
