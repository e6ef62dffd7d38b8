//! A receiver and its times: its driver and its sender answer at once, over paths that are up or not.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::Receiver;
use crate::{Action, Address, Event, Link, Message, PathSet, Reason, Settings, Status, Work};

fn credited(link: Link, steps: u64) -> Event {
    Event::Completed {
        link,
        work: Work::Credit(steps),
        status: Status::Success,
    }
}

struct Bench {
    receiver: Receiver,
    now: Duration,
    /// By path: whether anything gets over it.
    alive: Vec<bool>,
    /// Credits end only when they are told to.
    holds_credits: bool,
    /// The sender does not answer.
    silent: bool,
    over: Option<Reason>,
}

impl Bench {
    fn new(settings: Settings, paths: usize) -> Self {
        let receiver = Receiver::new(Arc::new(settings), paths, PathSet::first_of(paths));
        let mut bench = Self {
            receiver: receiver.expect("paths that are ready"),
            now: Duration::ZERO,
            alive: vec![true; paths],
            holds_credits: false,
            silent: false,
            over: None,
        };
        bench.receiver.set_busy(bench.now, true);
        bench
    }

    /// What comes of an action where all goes well, or as well as the path lets it.
    fn answer(&self, action: &Action) -> Option<Event> {
        let is_alive = |path: u8| self.alive[usize::from(path)];
        Some(match *action {
            Action::Fence { link } => Event::Fenced { link, sure: true },
            Action::Rebuild { link } => Event::Rebuilt {
                link,
                address: Address::default(),
            },
            Action::Connect { link, .. } if is_alive(link.path) => Event::Connected { link },
            Action::Connect { link, .. } => Event::Failed { link },
            Action::Probe { link } if is_alive(link.path) => Event::Completed {
                link,
                work: Work::Probe,
                status: Status::Success,
            },
            Action::Credit { link, steps } if is_alive(link.path) && !self.holds_credits => {
                credited(link, steps)
            }
            Action::Tell { message, .. } if !self.silent => Event::Heard(match message {
                Message::Offer { link, address } if is_alive(link.path) => Message::Accept { link, address },
                Message::Switch { epoch, link, .. } if is_alive(link.path) => Message::Switched { epoch },
                Message::Hold { epoch, .. } => Message::Drained { epoch, posted: 0 },
                _ => return None,
            }),
            _ => return None,
        })
    }

    fn perform(&mut self, mut actions: Vec<Action>) {
        let mut events = VecDeque::new();
        loop {
            for action in actions.drain(..) {
                if let Action::GiveUp(reason) = action {
                    self.over = Some(reason);
                }
                events.extend(self.answer(&action));
            }
            let Some(event) = events.pop_front() else {
                return;
            };
            self.receiver.handle(self.now, event, &mut actions);
        }
    }

    fn tell(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.receiver.handle(self.now, event, &mut actions);
        self.perform(actions);
    }

    fn grant(&mut self, steps: u64) {
        let mut actions = Vec::new();
        self.receiver.grant(self.now, steps, &mut actions);
        self.perform(actions);
    }

    /// Takes the receiver's port of a path down, or up again.
    fn port(&mut self, path: u8, up: bool) {
        self.alive[usize::from(path)] = up;
        self.tell(match up {
            true => Event::PortUp { path },
            false => Event::PortDown { path },
        });
    }

    fn pass(&mut self, milliseconds: u64) {
        let end = self.now + Duration::from_millis(milliseconds);
        while let Some(at) = self.receiver.deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            let mut actions = Vec::new();
            self.receiver.expire(self.now, &mut actions);
            self.perform(actions);
        }
        self.now = end;
    }

    /// Whether steps go over this path.
    fn flows_over(&self, path: u8) -> bool {
        let view = self.receiver.paths().nth(usize::from(path));
        view.is_some_and(|view| view.active && view.state.is_live()) && !self.receiver.is_recovering()
    }
}

/// Its only path is down for a tenth of a second, however often: it is made anew as soon as its port is up.
#[test]
fn one_path_that_flaps_is_there_whenever_its_port_is_up() {
    for up_for in [50, 100, 1000] {
        let mut bench = Bench::new(Settings::default(), 1);
        for flap in 0..300 {
            bench.port(0, false);
            bench.pass(100);
            bench.port(0, true);
            bench.pass(up_for);
            assert_eq!(bench.over, None, "flap {flap}, up for {up_for} ms");
            assert!(bench.flows_over(0) || up_for < 1000, "flap {flap}");
        }
        bench.pass(1000);
        assert!(bench.flows_over(0));
    }
}

fn soon() -> Settings {
    Settings {
        timeout: Duration::from_millis(300),
        ..Settings::default()
    }
}

/// It does not wait for the next probe, nor for an operation, and what is granted meanwhile changes nothing.
#[test]
fn a_credit_that_is_lost_is_found_by_the_time_out() {
    for busy in [true, false] {
        let mut bench = Bench::new(soon(), 2);
        bench.receiver.set_busy(bench.now, busy);
        bench.grant(2);
        bench.pass(200);
        bench.alive[0] = false;
        bench.grant(3);
        bench.pass(200);
        bench.grant(4);
        bench.pass(99);
        assert!(bench.flows_over(0), "busy: {busy}");
        bench.pass(1);
        assert!(bench.flows_over(1), "busy: {busy}");
    }
}

/// Whether the sender has heard of the switch or not, and whatever ends of the path before.
#[test]
fn a_credit_that_is_lost_after_a_switch_is_found_by_the_time_out() {
    for silent in [true, false] {
        let mut bench = Bench::new(soon(), 2);
        let first = bench.receiver.active();
        bench.grant(2);
        (bench.holds_credits, bench.silent) = (true, silent);
        bench.port(0, false);
        assert_eq!(bench.receiver.active().path, 1);
        bench.tell(credited(first, 2));
        let is_live = |bench: &Bench| {
            bench
                .receiver
                .paths()
                .nth(1)
                .is_some_and(|view| view.state.is_live())
        };
        bench.pass(299);
        assert!(is_live(&bench), "silent: {silent}");
        bench.pass(1);
        assert!(!is_live(&bench), "silent: {silent}");
    }
}

/// One is always under way, and none for long.
#[test]
fn credits_that_follow_each_other_are_not_late() {
    let mut bench = Bench::new(soon(), 2);
    bench.holds_credits = true;
    bench.grant(1);
    for steps in 2..20 {
        bench.pass(200);
        bench.grant(steps);
        bench.tell(credited(bench.receiver.active(), steps - 1));
    }
    assert!(bench.flows_over(0));
}

/// It is known to have come without a word of its end, which may be lost with the sender's queue pair.
#[test]
fn a_credit_that_was_used_is_not_waited_for() {
    let mut bench = Bench::new(soon(), 2);
    bench.holds_credits = true;
    bench.grant(2);
    for immediate in 0..2 {
        let link = bench.receiver.active();
        bench.tell(Event::Arrived { link, immediate });
    }
    bench.receiver.set_busy(bench.now, false);
    bench.pass(60_000);
    assert_eq!(bench.receiver.epoch(), 0);
}

/// Credits that get over owe nothing.
#[test]
fn an_idle_end_whose_credits_are_known_waits_for_nothing() {
    let mut bench = Bench::new(Settings::default(), 2);
    bench.grant(8);
    bench.receiver.set_busy(bench.now, false);
    bench.alive = vec![false; 2];
    bench.pass(60_000);
    assert_eq!(bench.receiver.epoch(), 0);
}

/// Paths that failed often are left alone for long, but not while there is no other one.
#[test]
fn a_path_that_is_left_alone_is_tried_when_the_last_other_one_fails() {
    let mut bench = Bench::new(Settings::default(), 2);
    let long = Duration::from_secs(20);
    let is_left_alone = |bench: &Bench| {
        let next = bench.receiver.next_attempt(0);
        next.is_some_and(|at| at > bench.now + long)
    };
    for _ in 0..5000 {
        bench.port(0, false);
        bench.pass(20);
        bench.port(0, true);
        bench.pass(180);
        if is_left_alone(&bench) {
            break;
        }
    }
    assert!(is_left_alone(&bench) && bench.flows_over(1));
    bench.port(1, false);
    bench.pass(1000);
    assert!(bench.flows_over(0), "its port is up");
    // What fails while there is none is tried again soon, too.
    bench.alive[0] = false;
    for _ in 0..10 {
        bench.tell(Event::Failed {
            link: bench.receiver.active(),
        });
        bench.pass(300);
    }
    bench.alive[0] = true;
    bench.pass(2000);
    assert_eq!(bench.over, None);
    assert!(bench.flows_over(0));
}

/// Both ports are down for longer than an operation may wait. Without one that is no error, and with one only after that time.
#[test]
fn an_end_without_an_operation_waits_for_as_long_as_it_takes() {
    let settings = Settings::default();
    let give_up = settings.give_up.as_millis() as u64;
    let mut bench = Bench::new(settings, 2);
    bench.receiver.set_busy(bench.now, false);
    [0, 1].into_iter().for_each(|path| bench.port(path, false));
    bench.pass(3 * give_up);
    bench.receiver.set_busy(bench.now, true);
    bench.pass(give_up / 2);
    assert_eq!(bench.over, None);
    bench.port(0, true);
    bench.pass(1000);
    assert!(bench.flows_over(0));
    bench.port(0, false);
    bench.pass(give_up);
    assert_eq!(bench.over, None);
    bench.pass(1);
    assert_eq!(bench.over, Some(Reason::NoPath));
}

/// A path is left while a probe of it is out: the other one does not have to answer it.
#[test]
fn a_probe_of_the_path_before_is_not_waited_for() {
    let mut bench = Bench::new(Settings::default(), 2);
    bench.port(0, false);
    bench.alive[1] = false;
    bench.pass(1100);
    bench.port(0, true);
    bench.pass(500);
    assert!(bench.flows_over(0));
    let before = (bench.receiver.epoch(), bench.receiver.active());
    bench.pass(10_000);
    assert_eq!((bench.receiver.epoch(), bench.receiver.active()), before);
}
