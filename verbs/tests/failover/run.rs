//! One case, as one of the ranks goes through it.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringsight_failover::Report;
use ringsight_verbs::endpoint::{Path, Receiver, SLOTS, Sender};

use super::{
    PATIENCE,
    case::{Case, Failure, Work, mix},
    links::Plan,
    outside::{COSTS, DONE, MESSAGE, parse_done},
    rank::{Rank, SLOT, SLOTS_AT},
    seen::{CALLS, LONGEST, OWN_CALLS, Seen, TORN, WATCHED},
};

/// Words of a rank's part of the input.
fn input(rank: u64, case: u64, chunk: u64) -> impl Iterator<Item = u64> {
    (0..SLOT as u64 / 8).map(move |word| mix(rank << 60 ^ case << 32 ^ chunk << 16 ^ word))
}

fn sum(one: &[u64], other: &[u64]) -> Vec<u64> {
    one.iter().zip(other).map(|(a, b)| a.wrapping_add(*b)).collect()
}

/// Threads that are in the way.
struct Load(Arc<AtomicBool>, Vec<JoinHandle<()>>);

impl Load {
    fn new(threads: usize) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let spin = |_| {
            let ends = Arc::clone(&ends);
            // Relaxed: says nothing but itself.
            thread::spawn(move || while !ends.load(Ordering::Relaxed) {})
        };
        let threads = (0..threads).map(spin).collect();
        Self(ends, threads)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        for thread in self.1.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Moves all steps of a case, as one of the ranks.
pub(super) struct Run<'a> {
    pub(super) rank: &'a mut Rank,
    pub(super) case: Case,
    number: u64,
    pub(super) sender: Option<Sender>,
    receiver: Option<Receiver>,
    /// All-reduce: sums of what was received in the first half, by step.
    sums: VecDeque<Vec<u64>>,
    pub(super) seen: Seen,
    pub(super) plan: Plan,
    pub(super) second: bool,
    /// Of the sender and the receiver, by path: requests posted over it when it was given up, if it is not in use again.
    left: [[Option<u64>; 2]; 2],
    /// How often the boundary's step was found torn.
    torn: u64,
    /// When the last step was posted.
    posted_at: Option<Duration>,
}

impl Run<'_> {
    /// What goes out in a step.
    fn outgoing(&self, step: u64) -> Option<Vec<u64>> {
        let rank = self.rank.number as u64;
        if self.case.lean {
            return Some(Vec::new());
        }
        match self.case.work {
            Work::SendRecv => Some(input(rank, self.number, step).collect()),
            // The other's half as it is here, then one's own half as it has become.
            Work::AllReduce if step < self.case.steps / 2 => {
                Some(input(rank, self.number, step + (1 - rank) * self.case.steps / 2).collect())
            }
            Work::AllReduce => self.sums.get((step - self.case.steps / 2) as usize).cloned(),
        }
    }

    /// Of a step: this rank's part of what is summed there, and the other's.
    fn parts(&self, step: u64) -> [Vec<u64>; 2] {
        let (rank, half) = (self.rank.number as u64, self.case.steps / 2);
        let chunk = match self.case.work {
            Work::SendRecv => step,
            // This rank's half in the first steps, the other's in the last.
            Work::AllReduce => step % half + if step < half { rank } else { 1 - rank } * half,
        };
        [rank, 1 - rank].map(|rank| input(rank, self.number, chunk).collect())
    }

    /// What must come in, in a step.
    fn expected(&self, step: u64) -> Vec<u64> {
        let [own, other] = self.parts(step);
        match self.case.work {
            Work::AllReduce if step >= self.case.steps / 2 => sum(&own, &other),
            _ => other,
        }
    }

    /// Looks at what came in, in a step, and keeps what is needed of it.
    fn incoming(&mut self, step: u64, got: &[u64]) {
        if self.case.lean {
            return;
        }
        if self.case.work == Work::AllReduce && step < self.case.steps / 2 {
            let [own, _] = self.parts(step);
            self.sums.push_back(sum(&own, got));
        }
        if got != self.expected(step) && self.seen.wrong.is_none() {
            self.seen.wrong = Some(format!("step {step} is not what was sent"));
        }
    }

    /// What lies in the slot of a step.
    fn in_slot(&self, step: u64) -> Vec<u64> {
        let mut got = vec![0_u64; SLOT / 8];
        // SAFETY: within the slots, which live as long as the process. What a device still writes is another's bytes, and not equal.
        unsafe {
            got.as_mut_ptr()
                .copy_from(self.rank.receives.1.byte_add(SLOTS_AT.at(step)), got.len());
        };
        got
    }

    /// The path was given up just now, and no other one can have brought anything yet: whether the bytes of the boundary's step are
    /// here, and nothing told of them.
    fn is_torn(&self) -> bool {
        let boundary = self.case.boundary;
        let is_next = self
            .receiver
            .as_ref()
            .is_some_and(|receiver| receiver.taken() == boundary);
        self.case.is_torn && is_next && self.in_slot(boundary) == self.expected(boundary)
    }

    fn run(mut self) -> Seen {
        let start = Instant::now();
        let (before, wire) = (self.costs(), self.rank.fabric.sent_bytes());
        if let Some(receiver) = &mut self.receiver {
            receiver.set_busy(true);
            receiver.grant((SLOTS as u64).min(self.case.steps)).unwrap();
        }
        if let Some(sender) = &mut self.sender {
            sender.set_busy(true);
        }
        let mut is_done = false;
        let mut peer_is_done = false;
        let mut longest = Duration::ZERO;
        for turns in 0_u64.. {
            if is_done && peer_is_done {
                break;
            }
            let now = start.elapsed();
            if now > PATIENCE + self.case.pace * self.case.steps as u32 {
                self.seen.error = Some(self.hanging(is_done, self.seen.error.as_deref()));
                return self.seen;
            }
            let result = self.turn();
            longest = longest.max(start.elapsed() - now);
            if !self.case.lean || turns.is_multiple_of(SELDOM) {
                peer_is_done |= self.listen();
            }
            self.pass_on();
            let moved = match result {
                Ok(moved) => moved,
                Err(text) => {
                    self.seen.error.get_or_insert(text);
                    false
                }
            };
            if let Some(sender) = &self.sender {
                self.seen.acked(now, sender.acked());
            }
            let sent = self
                .sender
                .as_ref()
                .is_none_or(|sender| sender.acked() == self.case.steps);
            let got = self
                .receiver
                .as_ref()
                .is_none_or(|receiver| receiver.taken() == self.case.steps);
            if !is_done && (sent && got && self.has_left() || self.seen.error.is_some()) {
                is_done = true;
                let watched = self.case.stays_down().map_or(0, |path| self.look_at_left(path));
                let costs = self.costs();
                self.seen.costs[0] = std::array::from_fn(|i| costs[i].saturating_sub(before[i]));
                self.seen.costs[0][LONGEST] = longest.as_micros() as u64;
                self.seen.costs[0][WATCHED] = watched;
                self.seen.costs[0][TORN] = self.torn;
                self.seen.ran = now;
                self.seen.over = Some(self.rank.port_health.now());
                let sent = self.rank.fabric.sent_bytes();
                self.seen.wire = sent.zip(wire).map(|(sent, before)| sent - before);
                let wrong = self.seen.wrong.as_ref().or(self.seen.error.as_ref());
                let wrong = wrong.map_or("", String::as_str);
                self.rank.outside.put_done(wrong, self.seen.costs[0]);
            }
            if !moved && !self.case.lean {
                self.rank.outside.calls += 1;
                thread::sleep(Duration::from_micros(100));
            }
        }
        self.seen
    }

    /// What an end that does not come to its end is in.
    fn hanging(&self, is_done: bool, error: Option<&str>) -> String {
        if is_done {
            return format!(
                "nothing is heard of the other rank; here {}",
                error.unwrap_or("all is well")
            );
        }
        let sender = self.sender.as_ref().map(|sender| {
            let paths: Vec<_> = sender.path_views().collect();
            let counts = (sender.posted(), sender.acked(), sender.granted());
            format!("sender {counts:?} {} {paths:?}", sender.is_recovering())
        });
        let receiver = self.receiver.as_ref().map(|receiver| {
            let paths: Vec<_> = receiver.path_views().collect();
            format!(
                "receiver {} {} {paths:?}",
                receiver.taken(),
                receiver.is_recovering()
            )
        });
        println!("rank {} hangs: {sender:?} {receiver:?}", self.rank.number);
        "it hangs".into()
    }

    /// Whether the path that must be left was given up here. Who has all steps may not have noticed yet: the first to know is the other
    /// rank, whose acknowledgements are lost.
    fn has_left(&self) -> bool {
        match self.case.failure {
            Failure::Primary | Failure::Device => self.left.iter().any(|paths| paths[0].is_some()),
            _ => true,
        }
    }

    /// A path that was given up and is still down: nothing may have been posted over it since, at either end here. How many ends
    /// had given it up.
    pub(super) fn look_at_left(&mut self, path: usize) -> u64 {
        let ends = [
            self.sender.as_ref().map(Sender::paths),
            self.receiver.as_ref().map(Receiver::paths),
        ];
        let mut watched = 0;
        for (left, paths) in self.left.iter().zip(ends) {
            let (Some(then), Some(path)) = (left[path], paths.and_then(|paths| paths.get(path))) else {
                continue;
            };
            watched += 1;
            let more = requests(path) - then;
            if more > 0 {
                let wrong = format!(
                    "{more} requests were posted over {} while it was down",
                    path.port().device()
                );
                self.seen.wrong.get_or_insert(wrong);
            }
        }
        watched
    }

    /// What this rank has cost so far.
    fn costs(&self) -> [u64; COSTS] {
        let of_sender = self.sender.iter().flat_map(Sender::paths);
        let of_receiver = self.receiver.iter().flat_map(Receiver::paths);
        let mut costs = [0; COSTS];
        for path in of_sender.chain(of_receiver) {
            let counts = path.counts();
            let all = [counts.steps, counts.credits, counts.others, counts.completions];
            costs.iter_mut().zip(all).for_each(|(sum, count)| *sum += count);
        }
        let [all, own] = &self.rank.calls;
        for (place, calls) in [(CALLS, all), (OWN_CALLS, own)] {
            costs[place] = calls.count().saturating_sub(self.rank.outside.calls);
        }
        costs
    }

    /// Takes what the other rank says; whether it is done.
    fn listen(&mut self) -> bool {
        while let Some((tag, bytes)) = self.rank.outside.take() {
            match MESSAGE.iter().position(|message| *message == tag) {
                // A connection is known by the rank that sends.
                Some(of) if of == self.rank.number => {
                    if let Some(sender) = &mut self.sender {
                        sender.receive_message(&bytes);
                    }
                }
                Some(_) => {
                    if let Some(receiver) = &mut self.receiver {
                        receiver.receive_message(&bytes);
                    }
                }
                None => {
                    assert_eq!(tag, DONE);
                    (self.seen.peer, self.seen.costs[1]) = parse_done(&bytes);
                    // What follows is of the next case.
                    return true;
                }
            }
        }
        false
    }

    /// Has the peer hear what is to be said, and keeps what is for the record.
    fn pass_on(&mut self) {
        let number = self.rank.number;
        while let Some(message) = self.sender.as_mut().and_then(Sender::take_outgoing) {
            self.rank.outside.put(MESSAGE[number], &message);
        }
        while let Some(message) = self.receiver.as_mut().and_then(Receiver::take_outgoing) {
            self.rank.outside.put(MESSAGE[1 - number], &message);
        }
        while let Some(timed) = self.sender.as_mut().and_then(Sender::take_report) {
            if let Some(sender) = &self.sender {
                note_left(&mut self.left[0], sender.paths(), timed.report);
            }
            self.seen.note(timed);
        }
        while let Some(timed) = self.receiver.as_mut().and_then(Receiver::take_report) {
            if let Some(receiver) = &self.receiver {
                note_left(&mut self.left[1], receiver.paths(), timed.report);
            }
            if matches!(timed.report, Report::Broken { active: true, .. }) {
                self.torn += u64::from(self.is_torn());
            }
        }
    }

    fn turn(&mut self) -> Result<bool, String> {
        self.bring_up();
        let mut moved = self.post()?;
        if let Some(sender) = &mut self.sender {
            moved |= sender.poll().map_err(|failure| failure.text)?;
        }
        self.fail()?;
        let Some(mut receiver) = self.receiver.take() else {
            return Ok(moved);
        };
        let polled = receiver.poll().map_err(|failure| failure.text);
        let mut result = polled.map(|polled| polled | moved);
        while let Ok(moved) = &mut result {
            match receiver.take() {
                Ok(Some(arrived)) => {
                    *moved = true;
                    let step = arrived.position;
                    if arrived.notice() != step.to_le_bytes() || step + 1 != receiver.taken() {
                        self.seen.wrong = Some(format!("step {step} is not the one that was sent"));
                    }
                    // The slot is granted again only below.
                    let got = match self.case.lean {
                        true => Vec::new(),
                        false => self.in_slot(step),
                    };
                    self.incoming(step, &got);
                    let room = (receiver.taken() + SLOTS as u64).min(self.case.steps);
                    if let Err(failure) = receiver.grant(room) {
                        result = Err(failure.text);
                    }
                }
                Ok(None) => break,
                Err(failure) => result = Err(failure.text),
            }
        }
        self.receiver = Some(receiver);
        result
    }

    /// Posts the next step, if it may; and with it, where links are to fail after a later one that is near, all up to that one.
    fn post(&mut self) -> Result<bool, String> {
        let Some(sender) = self.sender.as_ref().filter(|sender| sender.may_post()) else {
            return Ok(false);
        };
        let next = sender.posted();
        let boundary = self.case.boundary;
        let is_near = next <= boundary && boundary < next + self.case.ahead && self.is_to_fail();
        // Up to the last one that must be there, and that may.
        let (last, most) = match self.case.failure {
            Failure::Chaos => (next, next),
            _ if self.case.is_torn && next == boundary && self.is_to_fail() => {
                (next, next + self.case.ahead - 1)
            }
            _ if is_near && !self.case.is_torn => (boundary, boundary),
            _ => (next, next),
        };
        let room = (sender.acked() + SLOTS as u64)
            .min(sender.granted())
            .min(self.case.steps);
        let is_time = self
            .posted_at
            .is_none_or(|at| self.case.pace.is_zero() || self.rank.port_health.now() >= at + self.case.pace);
        if last >= room || !is_time {
            return Ok(false);
        }
        let steps: Vec<_> = (next..=most.min(room - 1))
            .map_while(|position| self.outgoing(position))
            .collect();
        if next + steps.len() as u64 <= last {
            return Ok(false);
        }
        let is_boundary = self.is_to_fail() && (next..=last).contains(&boundary);
        if is_boundary || self.is_to_fail_again() {
            self.lose(true);
        }
        let Some(sender) = &mut self.sender else {
            return Ok(false);
        };
        self.posted_at = Some(self.rank.port_health.now());
        for (position, words) in (next..).zip(steps) {
            // SAFETY: a slot that was acknowledged: nobody else uses it.
            unsafe {
                self.rank
                    .sends
                    .1
                    .byte_add(SLOTS_AT.at(position))
                    .copy_from(words.as_ptr(), words.len());
            };
            if !sender.may_post() {
                // The path was lost in between: the rest comes with the next turn.
                break;
            }
            sender
                .post(&position.to_le_bytes(), SLOT)
                .map_err(|failure| failure.text)?;
            if position == self.case.boundary && self.rank.number == 0 {
                // The device goes on.
                thread::sleep(self.case.away);
            }
        }
        Ok(true)
    }
}

/// Requests that were posted over a path.
fn requests(path: &Path) -> u64 {
    let counts = path.counts();
    counts.steps + counts.credits + counts.others
}

/// From the moment an end gives a path up until it has it again, it posts nothing over it.
fn note_left(left: &mut [Option<u64>; 2], paths: &[Path], report: Report) {
    match report {
        Report::Broken { link, .. } => {
            let path = usize::from(link.path);
            left[path] = paths.get(path).map(requests);
        }
        Report::Restored { link } => left[usize::from(link.path)] = None,
        _ => {}
    }
}

/// Turns from one look at what comes outside to the next one, where nothing is to come.
const SELDOM: u64 = 4096;

/// Goes through a case.
pub(crate) fn run(rank: &mut Rank, case: Case, number: u64) -> Seen {
    rank.prepare(&case);
    let (sender, receiver) = match (case.work, rank.number) {
        (Work::SendRecv, 0) => (Some(rank.sender(&case)), None),
        (Work::SendRecv, _) => (None, Some(rank.receiver(&case))),
        (Work::AllReduce, 0) => {
            let sender = rank.sender(&case);
            (Some(sender), Some(rank.receiver(&case)))
        }
        (Work::AllReduce, _) => {
            let receiver = rank.receiver(&case);
            (Some(rank.sender(&case)), Some(receiver))
        }
    };
    let _load = Load::new(case.load);
    let run = Run {
        rank,
        case,
        number,
        sender,
        receiver,
        sums: VecDeque::new(),
        seen: Seen::default(),
        plan: Plan::new(),
        second: false,
        left: Default::default(),
        torn: 0,
        posted_at: None,
    };
    run.run()
}
