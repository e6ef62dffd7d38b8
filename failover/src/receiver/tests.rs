//! A receiver and its timers. Its driver and its sender answer at once, over paths that are up or down.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::Receiver;
use crate::{
    links::{Link, PathSet, Status, Work},
    message::{Address, Message},
    protocol::{Action, Event, Protocol, Reason},
    settings::Settings,
};

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
    /// By path: whether it carries anything.
    alive: Vec<bool>,
    /// Credits complete only when a test says so.
    holds_credits: bool,
    /// The sender does not answer.
    silent: bool,
    gave_up: Option<Reason>,
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
            gave_up: None,
        };
        bench.receiver.set_busy(bench.now, true);
        bench
    }

    /// The event that follows from an action, as the state of the path allows.
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
            Action::Send { message, .. } if !self.silent => Event::Received(match message {
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
                    self.gave_up = Some(reason);
                }
                events.extend(self.answer(&action));
            }
            let Some(event) = events.pop_front() else {
                return;
            };
            self.receiver.handle(self.now, event, &mut actions);
        }
    }

    fn handle(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.receiver.handle(self.now, event, &mut actions);
        self.perform(actions);
    }

    fn grant(&mut self, steps: u64) {
        let mut actions = Vec::new();
        self.receiver.grant(self.now, steps, &mut actions);
        self.perform(actions);
    }

    /// Takes the receiver's port of a path up or down.
    fn set_port(&mut self, path: u8, up: bool) {
        self.alive[usize::from(path)] = up;
        self.handle(match up {
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
    fn uses_path(&self, path: u8) -> bool {
        let view = self.receiver.paths().nth(usize::from(path));
        view.is_some_and(|view| view.active && view.state.is_live()) && !self.receiver.is_recovering()
    }
}

/// The only path goes down for 100 ms again and again. It is rebuilt as soon as its port is up.
#[test]
fn a_single_path_that_flaps_works_whenever_its_port_is_up() {
    for up_for in [50, 100, 1000] {
        let mut bench = Bench::new(Settings::default(), 1);
        for flap in 0..300 {
            bench.set_port(0, false);
            bench.pass(100);
            bench.set_port(0, true);
            bench.pass(up_for);
            assert_eq!(bench.gave_up, None, "flap {flap}, up for {up_for} ms");
            assert!(bench.uses_path(0) || up_for < 1000, "flap {flap}");
        }
        bench.pass(1000);
        assert!(bench.uses_path(0));
    }
}

fn soon() -> Settings {
    Settings {
        timeout: Duration::from_millis(300),
        ..Settings::default()
    }
}

/// The end does not wait for the next probe or operation, and later grants do not extend the time-out.
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
        assert!(bench.uses_path(0), "busy: {busy}");
        bench.pass(1);
        assert!(bench.uses_path(1), "busy: {busy}");
    }
}

/// Whether the sender knows of the switch or not, and whatever completes on the previous path.
#[test]
fn a_credit_that_is_lost_after_a_switch_is_found_by_the_time_out() {
    for silent in [true, false] {
        let mut bench = Bench::new(soon(), 2);
        let first = bench.receiver.active();
        bench.grant(2);
        (bench.holds_credits, bench.silent) = (true, silent);
        bench.set_port(0, false);
        assert_eq!(bench.receiver.active().path, 1);
        bench.handle(credited(first, 2));
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

/// One credit is always outstanding, and none for long.
#[test]
fn credits_that_follow_each_other_are_not_late() {
    let mut bench = Bench::new(soon(), 2);
    bench.holds_credits = true;
    bench.grant(1);
    for steps in 2..20 {
        bench.pass(200);
        bench.grant(steps);
        bench.handle(credited(bench.receiver.active(), steps - 1));
    }
    assert!(bench.uses_path(0));
}

/// A step that uses a credit proves that the credit arrived. The credit's own acknowledgement may be lost.
#[test]
fn a_used_credit_needs_no_acknowledgement() {
    let mut bench = Bench::new(soon(), 2);
    bench.holds_credits = true;
    bench.grant(2);
    for immediate in 0..2 {
        let link = bench.receiver.active();
        bench.handle(Event::Arrived { link, immediate });
    }
    bench.receiver.set_busy(bench.now, false);
    bench.pass(60_000);
    assert_eq!(bench.receiver.epoch(), 0);
}

/// Acknowledged credits leave nothing outstanding.
#[test]
fn an_idle_end_with_acknowledged_credits_sets_no_time_out() {
    let mut bench = Bench::new(Settings::default(), 2);
    bench.grant(8);
    bench.receiver.set_busy(bench.now, false);
    bench.alive = vec![false; 2];
    bench.pass(60_000);
    assert_eq!(bench.receiver.epoch(), 0);
}

/// A path that failed often has a long back-off, but not while no other path works.
#[test]
fn a_long_back_off_ends_when_the_last_other_path_fails() {
    let mut bench = Bench::new(Settings::default(), 2);
    let long = Duration::from_secs(20);
    let is_left_alone = |bench: &Bench| {
        let next = bench.receiver.next_attempt(0);
        next.is_some_and(|at| at > bench.now + long)
    };
    for _ in 0..5000 {
        bench.set_port(0, false);
        bench.pass(20);
        bench.set_port(0, true);
        bench.pass(180);
        if is_left_alone(&bench) {
            break;
        }
    }
    assert!(is_left_alone(&bench) && bench.uses_path(1));
    bench.set_port(1, false);
    bench.pass(1000);
    assert!(bench.uses_path(0), "its port is up");
    // A path that fails while no other works is retried soon, too.
    bench.alive[0] = false;
    for _ in 0..10 {
        bench.handle(Event::Failed {
            link: bench.receiver.active(),
        });
        bench.pass(300);
    }
    bench.alive[0] = true;
    bench.pass(2000);
    assert_eq!(bench.gave_up, None);
    assert!(bench.uses_path(0));
}

/// Both ports are down for longer than an operation may wait. Without an operation that is no error; with one it is after that time.
#[test]
fn an_end_without_an_operation_never_gives_up() {
    let settings = Settings::default();
    let give_up = settings.give_up.as_millis() as u64;
    let mut bench = Bench::new(settings, 2);
    bench.receiver.set_busy(bench.now, false);
    [0, 1].into_iter().for_each(|path| bench.set_port(path, false));
    bench.pass(3 * give_up);
    bench.receiver.set_busy(bench.now, true);
    bench.pass(give_up / 2);
    assert_eq!(bench.gave_up, None);
    bench.set_port(0, true);
    bench.pass(1000);
    assert!(bench.uses_path(0));
    bench.set_port(0, false);
    bench.pass(give_up);
    assert_eq!(bench.gave_up, None);
    bench.pass(1);
    assert_eq!(bench.gave_up, Some(Reason::NoPath));
}

/// The end leaves a path while a probe of it is outstanding. It does not expect the answer on the other path.
#[test]
fn a_probe_of_the_previous_path_is_forgotten() {
    let mut bench = Bench::new(Settings::default(), 2);
    bench.set_port(0, false);
    bench.alive[1] = false;
    bench.pass(1100);
    bench.set_port(0, true);
    bench.pass(500);
    assert!(bench.uses_path(0));
    let before = (bench.receiver.epoch(), bench.receiver.active());
    bench.pass(10_000);
    assert_eq!((bench.receiver.epoch(), bench.receiver.active()), before);
}
