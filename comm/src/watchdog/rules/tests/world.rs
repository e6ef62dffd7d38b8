//! A job of ranks by a virtual clock.
//!
//! Each rank has rules of its own. The world plays everything that the rules do not see: when operations are called, begin,
//! move and complete on each rank, which processes run, and the way of control messages. Times are milliseconds.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use ringsight_records::{Cause, DataType, Function, ReduceOp, Waits};

use super::super::{
    completed::CompletedRuns,
    deadlock::LaunchOrder,
    evidence::{OperationRun, Position, ProcessHealth, RankAnswer, RankState},
    verdict::{Consequence, Verdict},
    *,
};
use crate::{
    op::{Call, Identity},
    watchdog::settings::{Action, ProgressSource, Settings},
};

pub(super) const MS: u64 = 1_000_000;
/// A time that does not come.
pub(super) const NEVER: u64 = u64::MAX / MS;
/// How long a control message takes.
const LATENCY: u64 = 1;

/// The settings of a process without variables.
pub(super) const DEFAULT: Settings = Settings {
    threshold: Duration::from_secs(2),
    arrival: Duration::from_secs(600),
    stuck: Duration::from_secs(60),
    interval: Duration::from_secs(1),
    action: Action::Report,
    source: ProgressSource::Pages,
    adaptive: None,
};

/// What one rank does with one operation, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    /// The rank calls and launches it.
    pub(super) called: u64,
    /// Its device begins it.
    pub(super) begins: u64,
    /// It moves data until then.
    pub(super) moves_until: u64,
    /// Its device completes it.
    pub(super) completes: u64,
    /// The number of its launch on the rank. Launches run one after another.
    pub(super) launch: u32,
    /// The rank that its kernel says it waits for.
    pub(super) waits_for: Option<u16>,
}

impl Part {
    /// Called and begun at `at`; from then on it stands still and does not end.
    pub(super) fn waits_since(at: u64) -> Self {
        Self {
            called: at,
            begins: at,
            moves_until: at,
            completes: NEVER,
            launch: 0,
            waits_for: None,
        }
    }

    /// Never called.
    pub(super) fn not_called() -> Self {
        Self::waits_since(NEVER)
    }

    /// In a launch of this number.
    pub(super) fn in_launch(self, launch: u32) -> Self {
        Self { launch, ..self }
    }
}

/// One operation of the job.
struct Operation {
    run: OperationRun,
    call: Call,
    bytes: u64,
    /// It is a kernel of `ncclSimulateKernelTimeout`.
    is_simulated: bool,
    parts: BTreeMap<u32, Part>,
}

/// One rank of the job.
struct Rank {
    rules: Rules,
    next_look: u64,
    /// From when on its process is in which state.
    process: Vec<(u64, ProcessHealth)>,
    /// Its service thread hears nothing until then, though its process lives.
    deaf_until: u64,
    /// Its own operations are not known from then on: a query of events does not come back.
    blind_from: u64,
    /// It gave up its operations.
    has_given_up: bool,
    assumed_completed: BTreeSet<usize>,
}

/// A verdict that a rank reported.
#[derive(Clone, Debug)]
pub(super) struct Reported {
    pub(super) at: u64,
    pub(super) by: u32,
    /// Number of the operation in the world.
    pub(super) operation: usize,
    pub(super) verdict: Verdict,
}

impl Reported {
    /// Cause, culprit, and whether it is a hang.
    pub(super) fn what(&self) -> (Cause, u32, bool) {
        (self.verdict.cause, self.verdict.culprit, self.verdict.is_hang)
    }
}

/// A control message.
enum Message {
    Query { query: u32, run: OperationRun },
    State { query: u32, rank: u32, state: RankState },
    HealthQuery { query: u32, rank: u32 },
    GaveUp(CompletedRuns),
    Mismatch,
}

pub(super) struct World {
    settings: Settings,
    now: u64,
    /// Ranks of a node: rank / ranks_of_a_node.
    ranks_of_a_node: u32,
    ranks: Vec<Rank>,
    operations: Vec<Operation>,
    /// By arrival and number: sender, receiver, message.
    mail: BTreeMap<(u64, u64), (u32, u32, Message)>,
    sent: u64,
    pub(super) reports: Vec<Reported>,
    /// How many questions were sent.
    pub(super) questions: u64,
}

/// A call of a function by every rank.
fn call(function: Function, peer: Option<u32>) -> Call {
    Call {
        function,
        count: 1,
        data_type: DataType::Int8,
        reduce_op: ReduceOp::None,
        peer,
        place: None,
    }
}

impl World {
    /// A job of `ranks` ranks, all on one node.
    pub(super) fn new(ranks: u32, settings: Settings) -> Self {
        let rank = |rank| Rank {
            rules: Rules::new(7, rank, settings),
            next_look: 0,
            process: vec![(0, ProcessHealth::Alive)],
            deaf_until: 0,
            blind_from: NEVER,
            has_given_up: false,
            assumed_completed: BTreeSet::new(),
        };
        Self {
            settings,
            now: 0,
            ranks_of_a_node: ranks,
            ranks: (0..ranks).map(rank).collect(),
            operations: Vec::new(),
            mail: BTreeMap::new(),
            sent: 0,
            reports: Vec::new(),
            questions: 0,
        }
    }

    /// The same with `ranks` ranks on each node.
    pub(super) fn on_nodes_of(mut self, ranks: u32) -> Self {
        self.ranks_of_a_node = ranks;
        self
    }

    fn add(&mut self, identity: Identity, call: Call, parts: BTreeMap<u32, Part>) -> usize {
        self.operations.push(Operation {
            run: OperationRun { identity, replay: 0 },
            call,
            bytes: 1,
            is_simulated: false,
            parts,
        });
        self.operations.len() - 1
    }

    /// A collective; `part` is given the rank. Returns its number.
    pub(super) fn collective(&mut self, function: Function, part: impl Fn(u32) -> Part) -> usize {
        let parts = (0..self.ranks.len() as u32)
            .map(|rank| (rank, part(rank)))
            .collect();
        let seq = self.operations.len() as u64;
        self.add(Identity::Collective { seq }, call(function, None), parts)
    }

    /// An all-reduce. Returns its number.
    pub(super) fn all_reduce(&mut self, part: impl Fn(u32) -> Part) -> usize {
        self.collective(Function::AllReduce, part)
    }

    /// A collective from or to rank `root`. Returns its number.
    pub(super) fn rooted(&mut self, function: Function, root: u32, part: impl Fn(u32) -> Part) -> usize {
        let number = self.collective(function, part);
        self.operations[number].call.peer = Some(root);
        number
    }

    /// A message; `parts` are the sender's and the receiver's. Returns its number.
    pub(super) fn message(&mut self, from: u32, to: u32, parts: [Part; 2]) -> usize {
        let seq = self.operations.len() as u64;
        let parts = BTreeMap::from([(from, parts[0]), (to, parts[1])]);
        self.add(
            Identity::Message { from, to, seq },
            call(Function::Send, Some(to)),
            parts,
        )
    }

    /// A kernel of `ncclSimulateKernelTimeout` on one rank. Returns its number.
    pub(super) fn simulated_kernel(&mut self, rank: u32, part: Part) -> usize {
        let number = self.message(rank, rank, [part, part]);
        self.operations[number].is_simulated = true;
        number
    }

    /// Sets the bytes of an operation.
    pub(super) fn set_bytes(&mut self, operation: usize, bytes: u64) {
        self.operations[operation].bytes = bytes;
    }

    /// Makes the operation the n-th replay of a captured one.
    pub(super) fn set_replay(&mut self, operation: usize, replay: u32) {
        self.operations[operation].run.replay = replay;
    }

    /// Changes what a rank does with an operation from now on.
    pub(super) fn part(&mut self, operation: usize, rank: u32) -> &mut Part {
        self.operations[operation].parts.get_mut(&rank).unwrap()
    }

    /// From `at` on the process of a rank is in this state. A stopped process catches up when it goes on.
    pub(super) fn process(&mut self, rank: u32, at: u64, health: ProcessHealth) {
        self.ranks[rank as usize].process.push((at, health));
    }

    /// The service thread of a rank hears nothing until `at`.
    pub(super) fn deaf(&mut self, rank: u32, until: u64) {
        self.ranks[rank as usize].deaf_until = until;
    }

    /// From `at` on a rank does not know where its own operations are.
    pub(super) fn blind(&mut self, rank: u32, at: u64) {
        self.ranks[rank as usize].blind_from = at;
    }

    /// The rules of a rank.
    pub(super) fn rules(&mut self, rank: u32) -> &mut Rules {
        &mut self.ranks[rank as usize].rules
    }

    /// A rank gives up its operations now, and tells all others.
    pub(super) fn give_up(&mut self, rank: u32) {
        if std::mem::replace(&mut self.ranks[rank as usize].has_given_up, true) {
            return;
        }
        let lasts = self
            .operations
            .iter()
            .filter(|op| op.parts.get(&rank).is_some_and(|part| part.completes <= self.now))
            .map(|op| op.run)
            .collect();
        self.broadcast(rank, || {
            Message::GaveUp(CompletedRuns {
                lasts: Vec::clone(&lasts),
            })
        });
    }

    fn health(&self, rank: u32) -> ProcessHealth {
        let states = self.ranks[rank as usize].process.iter();
        let (_, health) = states.rev().find(|(from, _)| *from <= self.now).unwrap();
        *health
    }

    /// When a rank runs next, from now on.
    fn runs_at(&self, rank: u32) -> u64 {
        let process = &self.ranks[rank as usize].process;
        let now = process.iter().rposition(|(from, _)| *from <= self.now).unwrap();
        process[now..]
            .iter()
            .find(|(_, health)| *health == ProcessHealth::Alive)
            .map_or(NEVER, |(from, _)| self.now.max(*from))
    }

    fn send(&mut self, from: u32, to: u32, message: Message) {
        self.sent += 1;
        self.mail
            .insert((self.now + LATENCY, self.sent), (from, to, message));
    }

    fn broadcast(&mut self, from: u32, message: impl Fn() -> Message) {
        for to in (0..self.ranks.len() as u32).filter(|to| *to != from) {
            self.send(from, to, message());
        }
    }

    /// Runs the job until `end`. Returns the verdicts that were reported since the last call.
    pub(super) fn run_until(&mut self, end: u64) -> Vec<Reported> {
        let before = self.reports.len();
        loop {
            let looks = (0..self.ranks.len() as u32).map(|rank| {
                let due = self.ranks[rank as usize].next_look.max(self.now);
                (due, rank)
            });
            let (look_at, looker) = looks.min().unwrap();
            let mail_at = self.mail.keys().next().map_or(NEVER, |(due, _)| *due);
            if look_at.min(mail_at) > end {
                self.now = end;
                return self.reports[before..].to_vec();
            }
            if mail_at <= look_at {
                self.now = mail_at.max(self.now);
                let (_, (from, to, message)) = self.mail.pop_first().unwrap();
                self.deliver(from, to, message);
            } else {
                self.now = look_at;
                self.look(looker);
            }
        }
    }

    fn deliver(&mut self, from: u32, to: u32, message: Message) {
        let heard_at = self.runs_at(to).max(self.ranks[to as usize].deaf_until);
        if heard_at > self.now {
            if heard_at < NEVER {
                self.sent += 1;
                self.mail.insert((heard_at, self.sent), (from, to, message));
            }
            return;
        }
        let now = self.now * MS;
        match message {
            Message::Query { query, run } => {
                let answer = self.answer(to, run, from);
                let state = RankState::Answered(answer);
                self.send(
                    to,
                    from,
                    Message::State {
                        query,
                        rank: to,
                        state,
                    },
                );
            }
            Message::HealthQuery { query, rank } => {
                let state = self.health(rank).into();
                self.send(to, from, Message::State { query, rank, state });
            }
            Message::State { query, rank, state } => self.rules(to).hear(query, rank, state, now),
            Message::GaveUp(completed) => self.rules(to).rank_gave_up(from, completed),
            Message::Mismatch => self.ranks[to as usize].has_given_up = true,
        }
    }

    /// One round of the watchdog of a rank.
    fn look(&mut self, rank: u32) {
        let runs_at = self.runs_at(rank);
        if runs_at > self.now {
            self.ranks[rank as usize].next_look = runs_at;
            return;
        }
        let now = self.now * MS;
        let in_progress = self.in_progress(rank);
        let timers: Vec<OperationTimer> = in_progress
            .iter()
            .map(|number| {
                let op = &self.operations[*number];
                OperationTimer {
                    run: op.run,
                    start_ns: op.parts[&rank].begins.min(self.now) * MS,
                    kind: Some((op.call.function.code(), op.bytes)),
                }
            })
            .collect();
        let schedule = self.rules(rank).schedule(now, &timers);
        let overdue: Vec<usize> = schedule.overdue.iter().map(|at| in_progress[*at]).collect();
        let operations: Vec<OperationReading> =
            overdue.iter().map(|number| self.read(rank, *number)).collect();
        let order = Order::of(self, rank);
        let reading = Reading {
            operations: &operations,
            order: &order,
            is_blind: self.ranks[rank as usize].blind_from <= self.now,
            is_given_up: self.ranks[rank as usize].has_given_up,
        };
        let decision = self.rules(rank).decide(now, &reading);
        let rest = schedule.rest.min(decision.rest).as_nanos() as u64 / MS;
        self.ranks[rank as usize].next_look = self.now + rest.max(1);
        for step in decision.steps {
            self.carry_out(rank, step);
        }
    }

    fn carry_out(&mut self, rank: u32, step: Step) {
        match step {
            Step::Ask { run, query } => {
                self.questions += 1;
                for to in self.participants(run).into_iter().filter(|to| *to != rank) {
                    self.send(rank, to, Message::Query { query, run });
                }
            }
            Step::CheckHealth { run, query, ranks } => {
                for silent in ranks {
                    self.send(rank, silent, Message::Query { query, run });
                    let node = silent / self.ranks_of_a_node;
                    if node == rank / self.ranks_of_a_node {
                        let (state, now) = (self.health(silent).into(), self.now * MS);
                        self.rules(rank).hear(query, silent, state, now);
                        continue;
                    }
                    let first = node * self.ranks_of_a_node;
                    for neighbour in (first..first + self.ranks_of_a_node).filter(|other| *other != silent) {
                        self.send(rank, neighbour, Message::HealthQuery { query, rank: silent });
                    }
                }
            }
            Step::AssumeCompleted { run } => {
                let number = self.number(run);
                self.ranks[rank as usize].assumed_completed.insert(number);
            }
            Step::Report { run, verdict, .. } => {
                if self.ranks[rank as usize].has_given_up {
                    return;
                }
                let consequence = verdict.consequence(self.settings.action);
                self.reports.push(Reported {
                    at: self.now,
                    by: rank,
                    operation: self.number(run),
                    verdict,
                });
                match consequence {
                    Consequence::AnnounceMismatch(_) => {
                        self.ranks[rank as usize].has_given_up = true;
                        self.broadcast(rank, || Message::Mismatch);
                    }
                    Consequence::Fail(_) => self.give_up(rank),
                    Consequence::Nothing | Consequence::SetError(_) => {}
                }
            }
        }
    }

    fn number(&self, run: OperationRun) -> usize {
        self.operations.iter().position(|op| op.run == run).unwrap()
    }

    fn participants(&self, run: OperationRun) -> Vec<u32> {
        self.operations[self.number(run)].parts.keys().copied().collect()
    }

    /// The operations in progress on a rank, as far as it knows.
    fn in_progress(&self, rank: u32) -> Vec<usize> {
        let of = &self.ranks[rank as usize];
        let seen_until = self.now.min(of.blind_from);
        let is_seen = |part: &Part| part.begins <= seen_until && part.completes > seen_until;
        let part = |number: &usize| self.operations[*number].parts.get(&rank);
        let numbers = 0..self.operations.len();
        let mut seen: Vec<usize> = numbers
            .clone()
            .filter(|number| part(number).is_some_and(is_seen))
            .filter(|number| !of.assumed_completed.contains(number))
            .collect();
        if of.blind_from <= self.now && seen.is_empty() {
            // The first launched operation counts as begun.
            let queued = |part: &Part| part.called <= self.now && part.completes > seen_until;
            seen.extend(
                numbers
                    .filter(|number| part(number).is_some_and(queued))
                    .find(|number| !of.assumed_completed.contains(number)),
            );
        }
        seen
    }

    fn read(&self, rank: u32, number: usize) -> OperationReading {
        let op = &self.operations[number];
        let in_launch = |other: &usize| {
            let same = |part: &Part| part.launch == op.parts[&rank].launch;
            self.operations[*other].parts.get(&rank).is_some_and(same)
        };
        OperationReading {
            run: op.run,
            start_ns: op.parts[&rank].begins.min(self.now) * MS,
            participants: op.parts.keys().copied().collect(),
            call: Some(op.call),
            position: self.position(rank, op),
            stall: None,
            is_simulated: op.is_simulated,
            bytes: op.bytes,
            beside: self
                .in_progress(rank)
                .into_iter()
                .filter(|other| *other != number && in_launch(other))
                .map(|other| self.operations[other].run)
                .collect(),
        }
    }

    fn position(&self, rank: u32, op: &Operation) -> Position {
        let of = &self.ranks[rank as usize];
        let part = op.parts[&rank];
        let seen_until = self.now.min(of.blind_from);
        let ago = |at: u64| (self.now - at) * MS;
        if part.completes <= seen_until {
            Position::Completed
        } else if of.has_given_up {
            Position::CommunicatorEnded
        } else if part.begins <= seen_until {
            Position::Running {
                since_ns: ago(part.begins),
                still_ns: ago(part.moves_until.clamp(part.begins, self.now)),
                waits: part.waits_for.map(|peer| Waits {
                    op: 1,
                    channel: 0,
                    phase: ringsight_records::Phase::Data,
                    peer: Some(peer),
                    step: 1,
                }),
            }
        } else if part.called <= self.now {
            Position::Queued {
                since_ns: ago(part.called),
            }
        } else {
            let launches = self.operations.iter().filter_map(|op| op.parts.get(&rank));
            let last = launches
                .map(|part| part.called)
                .filter(|called| *called <= self.now)
                .max();
            Position::NotLaunched {
                idle_ns: ago(last.unwrap_or(0)),
            }
        }
    }

    fn answer(&self, rank: u32, run: OperationRun, asker: u32) -> RankAnswer {
        let rules = &self.ranks[rank as usize].rules;
        let own = self.read(rank, self.number(run));
        let running: Vec<OperationReading> = self
            .in_progress(rank)
            .into_iter()
            .map(|number| self.read(rank, number))
            .collect();
        let order = Order::of(self, rank);
        RankAnswer {
            position: rules.trusted_position(&own),
            blocked_by: rules.blocking_operation(&running, run, asker, &order, self.now * MS),
            stall: None,
            is_stale: self.ranks[rank as usize].blind_from <= self.now,
        }
    }
}

/// The launches of a rank: of each operation the launch, and whether it is called and whether it is in flight.
struct Order(BTreeMap<Identity, (u32, bool, bool)>);

impl Order {
    fn of(world: &World, rank: u32) -> Self {
        let parts = world
            .operations
            .iter()
            .filter_map(|op| Some((op.run.identity, op.parts.get(&rank)?)));
        let launched = parts.map(|(identity, part)| {
            let called = part.called <= world.now;
            (
                identity,
                (part.launch, called, called && part.completes > world.now),
            )
        });
        Self(launched.collect())
    }
}

impl LaunchOrder for Order {
    fn begins_after(&self, later: Identity, earlier: Identity) -> bool {
        match (self.0.get(&later), self.0.get(&earlier)) {
            (Some((launch, _, true)), Some((other, _, true))) => launch > other,
            (Some((_, called, false)), _) => !called,
            _ => false,
        }
    }
}
