//! A state of the whole system, and the moves that are possible in it.

use std::{sync::Arc, time::Duration};

use super::network::{Flaw, Port, Qp, QpState, address, gid_of};
use crate::{
    links::{Link, LinkState, PathSet, PathView},
    message::Message,
    protocol::{Action, Event, Protocol, Timed},
    receiver::Receiver,
    rules::Rules,
    sender::Sender,
    settings::Settings,
    timers::Timer,
};

/// The bounds and assumptions of an exploration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Scenario {
    /// Steps that the connection moves.
    pub(super) steps: u64,
    /// Slots of each FIFO.
    pub(super) slots: usize,
    /// Paths.
    pub(super) paths: usize,
    /// How often a port goes down: any port, at any time.
    pub(super) failures: u8,
    /// How often one comes up again, at any later time, with another GID.
    pub(super) repairs: u8,
    /// How often a queue pair fails although its path works (acknowledgements lost in all tries).
    pub(super) glitches: u8,
    /// Ports report no changes.
    pub(super) silent: bool,
    /// There is a connection outside RDMA.
    pub(super) outside: bool,
    /// Failed paths are rebuilt while others work, and the receiver returns to them. Otherwise only when no other path is left.
    pub(super) failback: bool,
    /// Only ports of the first path fail.
    pub(super) only_first: bool,
    /// How many messages may be lost.
    pub(super) losses: u8,
    /// How often a timer fires early: a time-out although the path works, a resend although the first copy is on its way, a probe although
    /// nothing is wrong.
    pub(super) haste: u8,
    /// Operations begin at any time at each end. Otherwise they have begun in the first state.
    pub(super) idle: bool,
    /// Acknowledgements of credits may be lost, not only those of steps.
    pub(super) credits_in_doubt: bool,
    /// The receiver's communicator ends at any time after its last step.
    pub(super) leaves: bool,
    /// The defect of the drivers or NICs.
    pub(super) flaw: Flaw,
}

/// Back-off of a path that failed once, and of one that failed again before the first failure was forgotten. Only the second may exceed
/// the time after which an end gives up.
const SHORT: Duration = Duration::from_nanos(1);
const LONG: Duration = Duration::from_nanos(2);

/// Index of the sender, and of the receiver.
pub(super) const SENDER: usize = 0;
pub(super) const RECEIVER: usize = 1;

/// Something that can happen. Ends and paths are given by index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// The operation of an end begins.
    Begin(usize),
    /// The sender's driver posts the next step.
    Post,
    /// The receiver's device has consumed a slot.
    Consume,
    /// The receiver's communicator ends.
    Leave,
    /// The first work request that has not arrived reaches the peer.
    Deliver(usize, usize),
    /// A work request of a queue pair that was given up reaches the peer after all.
    DeliverLate(usize, usize),
    /// The acknowledgement of the first work request comes back.
    Acknowledge(usize, usize),
    /// The NIC gives up the first work request after its retries.
    Exhaust(usize, usize),
    /// As `Exhaust`, although the path works.
    Glitch(usize, usize),
    /// The receiver's driver polls an immediate.
    PollImmediate(usize),
    /// A fence is done.
    Drain(usize, usize),
    /// A message arrives: at which end, and which one.
    Receive(usize, usize),
    /// A message is lost.
    Lose(usize, usize),
    /// A timer fires.
    Expire(usize, Timer),
    /// A timer fires early.
    Hasten(usize, Timer),
    /// An end learns the state of its port.
    Notice(usize, usize),
    /// A port goes down.
    PortDown(usize, usize),
    /// A port comes up.
    PortUp(usize, usize),
}

impl Move {
    /// Whether the move comes from outside. No progress may depend on such a move.
    pub(super) fn is_outside(self) -> bool {
        matches!(
            self,
            Self::PortDown(..) | Self::PortUp(..) | Self::Glitch(..) | Self::Lose(..) | Self::Hasten(..)
        )
    }
}

/// A message on its way, over a queue pair of the end that sent it or outside RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sent {
    pub(super) message: Message,
    pub(super) link: Option<Link>,
}

/// Whether it is the receiver's last message. The connection outside RDMA delivers it before its own end, so it is never lost.
fn is_goodbye(sent: &Sent) -> bool {
    matches!(sent.message, Message::Left { .. })
}

/// A state of the system.
#[derive(Clone, Debug, Hash)]
pub(super) struct World<R> {
    pub(super) scenario: Scenario,
    pub(super) sender: Sender<R>,
    pub(super) receiver: Receiver<R>,
    /// By end: whether its operation has begun.
    pub(super) begun: [bool; 2],
    pub(super) consumed: u64,
    /// The receiver's communicator has ended.
    pub(super) left: bool,
    /// By slot of the receiver: the position whose data it holds.
    pub(super) slots: Vec<Option<u64>>,
    /// By path: the sender's credit words.
    pub(super) words: Vec<u64>,
    /// Credits that the receiver knows to have arrived, for [`Flaw::FetchAdd`].
    pub(super) credited: u64,
    pub(super) ports: [Vec<Port>; 2],
    pub(super) qps: [Vec<Qp>; 2],
    /// Messages on their way to each end.
    pub(super) messages: [Vec<Sent>; 2],
    pub(super) failures: u8,
    pub(super) repairs: u8,
    pub(super) glitches: u8,
    pub(super) losses: u8,
    pub(super) haste: u8,
}

/// Events of a move that the exploration counts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Effects {
    pub(super) switches: u64,
    pub(super) replays: u64,
}

impl<R: Rules> World<R> {
    pub(super) fn new(scenario: Scenario) -> Self {
        // Times are all zero, so that states do not differ by them.
        let settings = Arc::new(Settings {
            timeout: Duration::ZERO,
            timeout_alone: Duration::ZERO,
            probe: Duration::ZERO,
            give_up: Duration::ZERO,
            resend: Duration::ZERO,
            backoff: SHORT,
            backoff_max: LONG,
            probation_probes: 1,
            probation: Duration::ZERO,
            recovery_window: Duration::ZERO,
            ..Settings::default()
        });
        let ready = PathSet::first_of(scenario.paths);
        let qps = |end: usize| {
            let qp = |path| Qp {
                state: QpState::ReadyToSend,
                remote: address(1 - end, path, 1, 0),
                ..Qp::new(1, address(end, path, 1, 0))
            };
            (0..scenario.paths).map(qp).collect()
        };
        let port = Port {
            up: true,
            known_up: true,
            gid: 0,
        };
        let slots = scenario.slots as u64;
        let mut world = Self {
            scenario,
            sender: Sender::new(Arc::clone(&settings), slots, scenario.paths, ready).unwrap(),
            receiver: Receiver::new(settings, scenario.paths, ready).unwrap(),
            begun: [!scenario.idle; 2],
            consumed: 0,
            left: false,
            slots: vec![None; scenario.slots],
            words: vec![0; scenario.paths],
            credited: 0,
            ports: [vec![port; scenario.paths], vec![port; scenario.paths]],
            qps: [qps(SENDER), qps(RECEIVER)],
            messages: [Vec::new(), Vec::new()],
            failures: scenario.failures,
            repairs: scenario.repairs,
            glitches: scenario.glitches,
            losses: scenario.losses,
            haste: scenario.haste,
        };
        world.set_busy();
        let mut effects = Effects::default();
        world.grant(&mut effects).unwrap();
        world
    }

    /// Whether each end is done or has given up.
    pub(super) fn is_finished(&self) -> bool {
        (self.is_sender_done() || self.sender.has_given_up())
            && (self.is_receiver_done() || self.receiver.has_given_up())
    }

    /// Whether both ends are done.
    pub(super) fn is_done(&self) -> bool {
        self.is_sender_done() && self.is_receiver_done()
    }

    fn is_sender_done(&self) -> bool {
        self.sender.acked() == self.scenario.steps
    }

    fn is_receiver_done(&self) -> bool {
        self.consumed == self.scenario.steps
    }

    /// Whether an end has an operation under way.
    pub(super) fn is_busy(&self, end: usize) -> bool {
        let is_done = [self.is_sender_done(), self.is_receiver_done()];
        self.begun[end] && !is_done[end]
    }

    /// Tells each end whether it has an operation.
    pub(super) fn set_busy(&mut self) {
        let [sends, receives] = [SENDER, RECEIVER].map(|end| self.is_busy(end));
        self.sender.set_busy(Duration::ZERO, sends);
        self.receiver.set_busy(Duration::ZERO, receives);
    }

    /// Whether both ports of a path are up.
    fn is_alive(&self, path: usize) -> bool {
        self.ports[SENDER][path].up && self.ports[RECEIVER][path].up
    }

    pub(super) fn is_any_alive(&self) -> bool {
        (0..self.scenario.paths).any(|path| self.is_alive(path))
    }

    /// Whether only time passes until this path is rebuilt: every path is given up, and this one has failed repeatedly.
    fn is_left_alone(&self, path: usize) -> bool {
        let is_long = |at| at > SHORT;
        self.receiver.paths().all(|view| view.state == LinkState::Fenced)
            && self.receiver.next_attempt(path as u8).is_some_and(is_long)
    }

    /// Whether the ends can still exchange messages.
    pub(super) fn can_communicate(&self) -> bool {
        self.scenario.outside || (0..self.scenario.paths).any(|path| self.works(path))
    }

    /// Whether a packet of `end` on `path` reaches the peer's queue pair.
    fn is_accepted(&self, end: usize, path: usize) -> bool {
        let (from, to) = (&self.qps[end][path], &self.qps[1 - end][path]);
        // A packet carries the GID of its destination address; a port accepts only its own.
        let is_ours = gid_of(&from.remote) == self.ports[1 - end][path].gid;
        to.state == QpState::ReadyToSend && from.remote == to.own && is_ours
    }

    /// Whether a path works both ways.
    pub(super) fn works(&self, path: usize) -> bool {
        let sends =
            |end: usize| self.qps[end][path].state == QpState::ReadyToSend && self.is_accepted(end, path);
        self.is_alive(path) && sends(SENDER) && sends(RECEIVER)
    }

    /// All moves that are possible now.
    pub(super) fn moves(&self) -> Vec<Move> {
        let mut moves = self.all_moves();
        if self.sender.has_given_up() || self.receiver.has_given_up() {
            // It remains to show that the other end finishes, too, without help from outside.
            moves.retain(|step| !step.is_outside());
        }
        moves
    }

    fn all_moves(&self) -> Vec<Move> {
        let mut moves = Vec::new();
        let posted = self.sender.posted();
        let has_source = posted < self.sender.acked() + self.scenario.slots as u64;
        let may_post = self.begun[SENDER] && posted < self.scenario.steps && has_source;
        if self.sender.link().is_some() && may_post {
            moves.push(Move::Post);
        }
        let begins = [SENDER, RECEIVER].into_iter().filter(|end| !self.begun[*end]);
        moves.extend(begins.map(Move::Begin));
        if self.consumed < self.receiver.committed() {
            moves.push(Move::Consume);
        }
        if self.scenario.leaves && self.is_receiver_done() && !self.left {
            moves.push(Move::Leave);
        }
        for end in [SENDER, RECEIVER] {
            for path in 0..self.scenario.paths {
                self.network_moves(end, path, &mut moves);
            }
            for index in 0..self.messages[end].len() {
                if self.can_receive(end, index) {
                    moves.push(Move::Receive(end, index));
                }
                if self.losses > 0 && !is_goodbye(&self.messages[end][index]) {
                    moves.push(Move::Lose(end, index));
                }
            }
            let timers: Vec<Timer> = match end {
                SENDER => self.sender.timers().armed().collect(),
                _ if self.left => Vec::new(),
                _ => self.receiver.timers().armed().collect(),
            };
            for timer in timers {
                if self.is_due(end, timer) {
                    moves.push(Move::Expire(end, timer));
                } else if self.haste > 0 && timer != Timer::GiveUp {
                    moves.push(Move::Hasten(end, timer));
                }
            }
        }
        moves
    }

    fn network_moves(&self, end: usize, path: usize, moves: &mut Vec<Move>) {
        let (qp, port) = (&self.qps[end][path], self.ports[end][path]);
        let works = self.works(path);
        if qp.state == QpState::ReadyToSend {
            let waiting = qp.delivered < qp.queue.len();
            let can_arrive = works || qp.delivered < qp.launched && self.is_accepted(end, path);
            if waiting && can_arrive {
                moves.push(Move::Deliver(end, path));
            }
            if works && qp.acknowledged().is_some() {
                moves.push(Move::Acknowledge(end, path));
            }
            if !qp.queue.is_empty() && !works {
                moves.push(Move::Exhaust(end, path));
            }
            if !qp.queue.is_empty() && works && self.glitches > 0 {
                moves.push(Move::Glitch(end, path));
            }
        }
        if !qp.late.is_empty() && self.is_accepted(end, path) {
            moves.push(Move::DeliverLate(end, path));
        }
        if end == RECEIVER && !qp.arrived.is_empty() {
            moves.push(Move::PollImmediate(path));
        }
        if qp.draining {
            moves.push(Move::Drain(end, path));
        }
        let is_there = end == SENDER || !self.left;
        if port.known_up != port.up && !self.scenario.silent && is_there {
            moves.push(Move::Notice(end, path));
        }
        match port.up {
            true if self.failures > 0 && !(self.scenario.only_first && path > 0) => {
                moves.push(Move::PortDown(end, path));
            }
            false if self.repairs > 0 => moves.push(Move::PortUp(end, path)),
            _ => {}
        }
    }

    fn can_receive(&self, end: usize, index: usize) -> bool {
        let Some(link) = self.messages[end][index].link else {
            return true;
        };
        let path = usize::from(link.path);
        self.qps[1 - end][path].generation == link.generation && self.works(path)
    }

    /// Whether a timer may fire because what it waits for cannot come.
    fn is_due(&self, end: usize, timer: Timer) -> bool {
        let views: Vec<PathView> = match end {
            SENDER => self.sender.paths().collect(),
            _ => self.receiver.paths().collect(),
        };
        match timer {
            // None of its messages is on its way.
            Timer::Resend => self.messages[1 - end].is_empty(),
            // The time is long against a recovery over a living path, but not against a long back-off, and the ends must be able to
            // communicate. Once the receiver has left, only its last message still arrives.
            Timer::GiveUp if self.left => !self.messages[SENDER].iter().any(is_goodbye),
            Timer::GiveUp => {
                let mut paths = 0..self.scenario.paths;
                !self.can_communicate() || !paths.any(|path| self.is_alive(path) && !self.is_left_alone(path))
            }
            // The time is long against a round trip.
            Timer::Progress => views
                .iter()
                .any(|view| view.active && !self.works(usize::from(view.link.path))),
            Timer::Path(path) => match views[usize::from(path)].state {
                // Attempts on a dead path would fail for ever.
                LinkState::Fencing | LinkState::Fenced => {
                    let is_needed = self.scenario.failback
                        || !self.receiver.paths().any(|view| view.state == LinkState::Ready);
                    is_needed && self.is_alive(usize::from(path))
                }
                LinkState::Probation if !self.qps[end][usize::from(path)].queue.is_empty() => {
                    !self.works(usize::from(path))
                }
                _ => true,
            },
        }
    }

    /// Describes a move.
    pub(super) fn describe(&self, step: Move) -> String {
        match step {
            Move::Receive(end, index) => format!("{step:?}: {:?}", self.messages[end][index].message),
            _ => format!("{step:?}"),
        }
    }

    /// Removes what can have no effect any more, so that states which differ only by that are one.
    pub(super) fn tidy(&mut self) {
        for path in 0..self.scenario.paths {
            if self.works(path) {
                for end in [SENDER, RECEIVER] {
                    let qp = &mut self.qps[end][path];
                    qp.launched = qp.queue.len();
                }
            }
            for end in [SENDER, RECEIVER] {
                let gone = self.qps[1 - end][path].state == QpState::Error;
                let qp = &mut self.qps[end][path];
                if gone {
                    qp.late.clear();
                    qp.launched = 0;
                }
            }
        }
        for end in [SENDER, RECEIVER] {
            let gone = |sent: &Sent| {
                let link = sent.link?;
                let qp = &self.qps[1 - end][usize::from(link.path)];
                Some(qp.generation != link.generation || qp.state != QpState::ReadyToSend)
            };
            let kept: Vec<Sent> = self.messages[end]
                .iter()
                .filter(|sent| gone(sent) != Some(true) && !self.is_ignored(end, sent.message))
                .copied()
                .collect();
            self.messages[end] = kept;
            // Their order has no effect.
            self.messages[end].sort_by_key(|sent| (sent.message.encode(), sent.link.map(|link| link.path)));
            let over = if end == SENDER {
                self.sender.has_given_up()
            } else {
                self.receiver.has_given_up() || self.left
            };
            if over {
                self.messages[end].clear();
            }
        }
    }

    /// Whether an end would ignore a message, or only answer with messages that the other end ignores. Most late messages are ignored for
    /// ever; the others are sent again.
    fn is_ignored(&self, end: usize, message: Message) -> bool {
        let mut actions = Vec::new();
        let event = Event::Received(message);
        let same = match end {
            SENDER => {
                let mut sender = self.sender.clone();
                sender.handle(Duration::ZERO, event, &mut actions);
                sender == self.sender
            }
            _ => {
                let mut receiver = self.receiver.clone();
                receiver.handle(Duration::ZERO, event, &mut actions);
                receiver == self.receiver
            }
        };
        let empty = |action: &Action| match action {
            Action::Send { message, .. } => self.is_ignored(1 - end, *message),
            _ => false,
        };
        same && actions.iter().all(empty)
    }

    /// Checks the invariants of every state.
    pub(super) fn check(&self) -> Result<(), String> {
        let here: usize = self.qps[RECEIVER].iter().map(|qp| qp.arrived.len()).sum();
        let got = self.receiver.committed() + here as u64;
        // A cut drain may have lost steps of which the sender does not know yet.
        let may_lose = self.scenario.flaw == Flaw::CutDrain;
        if self.sender.acked() > got && !self.receiver.has_given_up() && !may_lose {
            return Err(format!(
                "the sender frees {} steps, the receiver has {got}",
                self.sender.acked()
            ));
        }
        // Everything that can go wrong costs a path at most a few generations.
        let Scenario {
            failures,
            repairs,
            glitches,
            haste,
            losses,
            ..
        } = self.scenario;
        let lives = 3 + 2 * (failures + repairs + glitches + haste + losses);
        if self.qps[RECEIVER]
            .iter()
            .any(|qp| qp.generation > u32::from(lives))
        {
            return Err("a path is rebuilt without end".into());
        }
        let room = self.consumed + self.scenario.slots as u64;
        if self.sender.granted() > room {
            return Err(format!(
                "the sender may post {} steps, there is room for {room}",
                self.sender.granted()
            ));
        }
        Ok(())
    }
}
