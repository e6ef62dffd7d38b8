//! The effect of a move: the network's part, and both drivers'.

use std::time::Duration;

use super::{
    network::{Flaw, Qp, QpState, Request, address},
    world::{Effects, Move, RECEIVER, SENDER, Sent, World},
};
use crate::{
    links::{Link, PathSet, Status, Work},
    message::Message,
    protocol::{Action, Event, Protocol, Reason, Report},
    rules::Rules,
    timers::Timer,
};

impl<R: Rules> World<R> {
    /// Makes the move.
    ///
    /// # Errors
    /// The invariant that it violates.
    pub(super) fn apply(&mut self, step: Move) -> Result<Effects, String> {
        let mut effects = Effects::default();
        match step {
            Move::Begin(end) => {
                self.begun[end] = true;
                if end == RECEIVER {
                    self.grant(&mut effects)?;
                }
            }
            Move::Post => {
                let link = self.sender.link().ok_or("posted without a path")?;
                let position = self.sender.posted();
                self.post(SENDER, link, Work::Step(position), 0);
                self.sender.post(Duration::ZERO);
            }
            Move::Consume => {
                let found = self.slots[self.slot(self.consumed)];
                if found != Some(self.consumed) {
                    return Err(format!(
                        "step {} is read, and {found:?} is in its slot",
                        self.consumed
                    ));
                }
                self.consumed += 1;
                self.grant(&mut effects)?;
            }
            Move::Leave => self.leave()?,
            Move::Deliver(end, path) => {
                let request = self.qps[end][path].queue[self.qps[end][path].delivered];
                self.qps[end][path].delivered += 1;
                self.land(end, path, request, &mut effects)?;
                let is_certain = !self.scenario.credits_in_doubt && !matches!(request.work, Work::Step(_));
                if is_certain && self.works(path) && self.qps[end][path].delivered == 1 {
                    self.acknowledge(end, path, &mut effects)?;
                }
            }
            Move::DeliverLate(end, path) => {
                let request = self.qps[end][path].late.remove(0);
                self.land(end, path, request, &mut effects)?;
            }
            Move::Acknowledge(end, path) => self.acknowledge(end, path, &mut effects)?,
            Move::Glitch(end, path) => {
                self.glitches -= 1;
                self.exhaust(end, path, &mut effects)?;
            }
            Move::Exhaust(end, path) => self.exhaust(end, path, &mut effects)?,
            Move::PollImmediate(path) => self.poll_immediate(path, &mut effects)?,
            Move::Drain(end, path) => self.drain(end, path, &mut effects)?,
            Move::Receive(end, index) => {
                let message = self.messages[end].remove(index).message;
                let read = Message::parse(&message.encode()).ok_or("a message cannot be read")?;
                self.event(end, Event::Received(read), &mut effects)?;
            }
            Move::Lose(end, index) => {
                self.losses -= 1;
                self.messages[end].remove(index);
            }
            Move::Expire(end, timer) => self.expire(end, timer, &mut effects)?,
            Move::Hasten(end, timer) => {
                self.haste -= 1;
                self.expire(end, timer, &mut effects)?;
            }
            Move::Notice(end, path) => {
                let port = &mut self.ports[end][path];
                port.known_up = port.up;
                let (up, path) = (port.up, path as u8);
                let event = if up {
                    Event::PortUp { path }
                } else {
                    Event::PortDown { path }
                };
                self.event(end, event, &mut effects)?;
            }
            Move::PortDown(end, path) => {
                self.failures -= 1;
                self.ports[end][path].up = false;
            }
            Move::PortUp(end, path) => {
                self.repairs -= 1;
                let port = &mut self.ports[end][path];
                port.up = true;
                port.gid += 1;
            }
        }
        self.set_busy();
        self.tidy();
        self.check()?;
        Ok(effects)
    }

    /// The receiver's communicator ends, and its queue pairs with it.
    fn leave(&mut self) -> Result<(), String> {
        self.left = true;
        self.qps[RECEIVER].iter_mut().for_each(Qp::abandon);
        if self.scenario.flaw != Flaw::NoGoodbye {
            let message = self
                .receiver
                .goodbye()
                .ok_or("a receiver that is done has no goodbye")?;
            self.messages[SENDER].push(Sent { message, link: None });
        }
        Ok(())
    }

    fn acknowledge(&mut self, end: usize, path: usize, effects: &mut Effects) -> Result<(), String> {
        let qp = &mut self.qps[end][path];
        let count = qp.acknowledged().ok_or("nothing can be acknowledged")?;
        qp.delivered -= count;
        qp.launched = qp.launched.saturating_sub(count);
        let request = qp.queue[count - 1];
        qp.queue.drain(..count);
        if end == RECEIVER && matches!(request.work, Work::Credit(_)) {
            self.credited = self.credited.max(request.value);
        }
        self.complete(end, path, request.work, Status::Success, effects)
    }

    fn expire(&mut self, end: usize, timer: Timer, effects: &mut Effects) -> Result<(), String> {
        let mut actions = Vec::new();
        match end {
            SENDER => self.sender.fire_now(timer, &mut actions),
            _ => self.receiver.fire_now(timer, &mut actions),
        }
        self.perform(end, actions, effects)
    }

    fn slot(&self, position: u64) -> usize {
        position as usize % self.scenario.slots
    }

    pub(super) fn grant(&mut self, effects: &mut Effects) -> Result<(), String> {
        if !self.begun[RECEIVER] {
            return Ok(());
        }
        let mut actions = Vec::new();
        let steps = (self.consumed + self.scenario.slots as u64).min(self.scenario.steps);
        self.receiver.grant(Duration::ZERO, steps, &mut actions);
        self.perform(RECEIVER, actions, effects)
    }

    /// Posts a work request. A queue pair accepts it in the error state, too.
    fn post(&mut self, end: usize, link: Link, work: Work, value: u64) {
        let path = usize::from(link.path);
        assert_eq!(
            self.qps[end][path].generation, link.generation,
            "posted to a queue pair that is gone"
        );
        // With fetch-and-add, an addition that may be lost is posted again.
        let value = match self.scenario.flaw {
            Flaw::FetchAdd if matches!(work, Work::Credit(_)) => {
                let under_way: u64 = self.qps[end][path]
                    .queue
                    .iter()
                    .map(|request| request.value)
                    .sum();
                value.saturating_sub(self.credited_in_adds() + under_way)
            }
            _ => value,
        };
        let queue = &mut self.qps[end][path].queue;
        let mut push = |is_data| {
            queue.push(Request { work, value, is_data });
        };
        match (work, self.scenario.flaw) {
            (Work::Step(_), Flaw::NoticeFirst) => [false, true].into_iter().for_each(push),
            (Work::Step(_), _) => [true, false].into_iter().for_each(push),
            _ => push(false),
        }
    }

    fn credited_in_adds(&self) -> u64 {
        self.credited
    }

    /// The effect of a work request at the peer of `end`.
    fn land(
        &mut self,
        end: usize,
        path: usize,
        request: Request,
        effects: &mut Effects,
    ) -> Result<(), String> {
        match request.work {
            Work::Step(position) if request.is_data => {
                let slot = self.slot(position);
                self.slots[slot] = Some(position);
                Ok(())
            }
            Work::Step(position) => {
                self.qps[RECEIVER][path].arrived.push(position);
                Ok(())
            }
            Work::Credit(_) => {
                match self.scenario.flaw {
                    Flaw::FetchAdd => self.words[0] += request.value,
                    _ => self.words[path] = request.value,
                }
                let steps = self.words.iter().copied().max().unwrap_or(0);
                self.event(1 - end, Event::Granted { steps }, effects)
            }
            Work::Probe | Work::Message => Ok(()),
        }
    }

    fn poll_immediate(&mut self, path: usize, effects: &mut Effects) -> Result<(), String> {
        let qp = &mut self.qps[RECEIVER][path];
        let immediate = qp.arrived.remove(0) as u32;
        let link = qp.link(path as u8);
        self.event(RECEIVER, Event::Arrived { link, immediate }, effects)
    }

    fn exhaust(&mut self, end: usize, path: usize, effects: &mut Effects) -> Result<(), String> {
        let qp = &mut self.qps[end][path];
        qp.fail();
        let first = qp.queue.remove(0);
        qp.delivered = qp.delivered.saturating_sub(1);
        self.complete(end, path, first.work, Status::RetryExceeded, effects)
    }

    fn complete(
        &mut self,
        end: usize,
        path: usize,
        work: Work,
        status: Status,
        effects: &mut Effects,
    ) -> Result<(), String> {
        let link = self.qps[end][path].link(path as u8);
        self.event(end, Event::Completed { link, work, status }, effects)
    }

    /// Completes everything that a queue pair in the error state still has, and its fence.
    fn drain(&mut self, end: usize, path: usize, effects: &mut Effects) -> Result<(), String> {
        self.qps[end][path].draining = false;
        if end == RECEIVER && self.scenario.flaw == Flaw::CutDrain {
            self.qps[end][path].arrived.clear();
        }
        while !self.qps[end][path].arrived.is_empty() {
            self.poll_immediate(path, effects)?;
        }
        for request in std::mem::take(&mut self.qps[end][path].queue) {
            self.complete(end, path, request.work, Status::Flushed, effects)?;
        }
        (self.qps[end][path].delivered, self.qps[end][path].launched) = (0, 0);
        let link = self.qps[end][path].link(path as u8);
        self.event(end, Event::Fenced { link, sure: true }, effects)
    }

    fn event(&mut self, end: usize, event: Event, effects: &mut Effects) -> Result<(), String> {
        if end == RECEIVER && self.left {
            return Ok(());
        }
        let mut actions = Vec::new();
        match end {
            SENDER => self.sender.handle(Duration::ZERO, event, &mut actions),
            _ => self.receiver.handle(Duration::ZERO, event, &mut actions),
        }
        self.perform(end, actions, effects)
    }

    fn perform(&mut self, end: usize, actions: Vec<Action>, effects: &mut Effects) -> Result<(), String> {
        for action in actions {
            self.perform_one(end, action, effects)?;
        }
        Ok(())
    }

    fn perform_one(&mut self, end: usize, action: Action, effects: &mut Effects) -> Result<(), String> {
        match action {
            Action::Fence { link } => {
                let qp = &mut self.qps[end][usize::from(link.path)];
                assert_eq!(
                    qp.generation, link.generation,
                    "a queue pair that is gone is fenced"
                );
                qp.fail();
                match end {
                    // The sender does not wait for a drain.
                    SENDER => self.drain(end, usize::from(link.path), effects),
                    _ => {
                        qp.draining = true;
                        Ok(())
                    }
                }
            }
            Action::Rebuild { link } => {
                let path = usize::from(link.path);
                let gid = match self.scenario.flaw {
                    Flaw::StaleGid => 0,
                    _ => self.ports[end][path].gid,
                };
                let address = address(end, path, link.generation, gid);
                self.qps[end][path] = Qp::new(link.generation, address);
                self.event(end, Event::Rebuilt { link, address }, effects)
            }
            Action::Connect { link, peer } => {
                let path = usize::from(link.path);
                let up = self.ports[end][path].up;
                let qp = &mut self.qps[end][path];
                qp.remote = peer;
                if up {
                    qp.state = QpState::ReadyToSend;
                }
                let event = if up {
                    Event::Connected { link }
                } else {
                    Event::Failed { link }
                };
                self.event(end, event, effects)
            }
            // The sender ignores the success of a probe of an inactive path. Its failure is one that the receiver's probes find as well.
            Action::Probe { link } if end == SENDER && link != self.sender.active() => Ok(()),
            Action::Probe { link } => {
                self.post(end, link, Work::Probe, 0);
                Ok(())
            }
            Action::Credit { link, steps } => {
                self.post(end, link, Work::Credit(steps), steps);
                Ok(())
            }
            Action::Replay { link, from, to } => {
                effects.replays += to - from;
                (from..to).for_each(|position| self.post(end, link, Work::Step(position), 0));
                Ok(())
            }
            Action::Commit { position } => {
                let found = self.slots[self.slot(position)];
                match found == Some(position) {
                    true => Ok(()),
                    false => Err(format!(
                        "step {position} is committed, and {found:?} is in its slot"
                    )),
                }
            }
            // This message only stops the sender from repeating itself, so it need not be delayed.
            Action::Send { message, .. }
                if matches!(message, Message::BrokenAck { .. }) && self.scenario.outside =>
            {
                self.event(1 - end, Event::Received(message), effects)
            }
            Action::Send { message, over } => {
                self.send(end, message, over);
                Ok(())
            }
            Action::Report(report) => {
                effects.switches += u64::from(matches!(report, Report::Switched { .. }));
                Ok(())
            }
            Action::GiveUp(reason) => {
                // This end processes nothing any more.
                self.qps[end].iter_mut().for_each(Qp::abandon);
                match reason {
                    _ if self.left => {
                        Err("the sender gives up although the receiver left with all of it".into())
                    }
                    Reason::NoPath if self.is_any_alive() && self.can_communicate() => {
                        Err("an end gives up although a path is alive".into())
                    }
                    Reason::NoPath if !self.is_busy(end) => {
                        Err("an end gives up although nothing waits for it".into())
                    }
                    Reason::NoPath | Reason::Peer => Ok(()),
                    // Steps that the NIC had acknowledged are lost: giving up is the only correct outcome.
                    Reason::Protocol(what)
                        if self.scenario.flaw == Flaw::CutDrain && what.contains("acknowledged") =>
                    {
                        Ok(())
                    }
                    other => Err(format!("the {} gives up: {other:?}", ["sender", "receiver"][end])),
                }
            }
        }
    }

    fn send(&mut self, end: usize, message: Message, over: PathSet) {
        let links: Vec<Option<Link>> = match self.scenario.outside {
            true => vec![None],
            false => {
                let link = |path| Some(self.qps[end][usize::from(path)].link(path));
                over.iter().map(link).collect()
            }
        };
        for link in links {
            let sent = Sent { message, link };
            // A second copy adds nothing: a message on its way may arrive at any time, or never.
            if !self.messages[1 - end].contains(&sent) {
                self.messages[1 - end].push(sent);
            }
        }
    }
}
