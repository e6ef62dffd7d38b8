//! A model checker for the protocol: both real state machines on a network that may do anything that a network does.
//!
//! A [`World`] is both machines, what their drivers hold (queue pairs, slots, credit words) and everything on its way between them.
//! Whatever can happen next is a [`Move`](world::Move). [`explore`](explore::explore) tries every move from every reachable state, each
//! state once. A step is two work requests, and anything may happen between them. The exploration shows for all states:
//!
//! - the receiver commits every step once, in order, and its device finds in the slot what was sent;
//! - the sender never frees a source that the receiver has not got, and never has more credit than there are free slots;
//! - an end gives up only if it has an operation and no path has both ports up, or because the other end gave up;
//! - no state hangs: from every state both ends can finish or give up without a repair from outside.
//!
//! Time is modelled by order only: a timer that is set may fire at any moment, with two exceptions, which the settings guarantee.
//! The give-up timer fires only if no path is alive, or if those that are have failed repeatedly and wait for a long back-off. The other
//! timers fire only if what they wait for cannot come. [`Scenario::haste`] says how often a timer fires early all the same.

mod apply;
mod explore;
mod network;
mod world;

use explore::{Found, Outcome, explore};
use network::Flaw;
use world::{Scenario, World};

use crate::{
    links::Status,
    rules::{Rules, Sound},
};

fn run<R: Rules>(scenario: Scenario, wanted: Option<&str>) -> Outcome {
    let started = std::time::Instant::now();
    let outcome = explore(&World::<R>::new(scenario), wanted);
    println!(
        "{scenario:?}: {outcome}, {:.1} s",
        started.elapsed().as_secs_f64()
    );
    outcome
}

/// The exploration finds nothing wrong, and covers failover.
fn proves(scenario: Scenario) -> Outcome {
    let outcome = run::<Sound>(scenario, None);
    assert!(outcome.found.is_none(), "{}", outcome.explain());
    assert!(
        outcome.switches > 0 && outcome.replays > 0,
        "{outcome}: nothing failed over"
    );
    assert!(outcome.done > 0, "{outcome}: nothing was ever done");
    outcome
}

/// The exploration finds the expected error of a mutant.
fn catches<R: Rules>(scenario: Scenario, wanted: &str) {
    let outcome = run::<R>(scenario, Some(wanted));
    println!("{}", outcome.explain());
    assert!(
        matches!(&outcome.found, Some(Found::Wrong(what)) if what.contains(wanted)),
        "the mutant survives"
    );
}

const SMALL: Scenario = Scenario {
    steps: 3,
    slots: 2,
    paths: 2,
    failures: 1,
    repairs: 1,
    glitches: 0,
    silent: false,
    outside: true,
    failback: false,
    only_first: false,
    losses: 0,
    haste: 0,
    idle: false,
    credits_in_doubt: false,
    leaves: false,
    flaw: Flaw::None,
};

#[test]
fn one_failure_anywhere() {
    proves(SMALL);
}

#[test]
fn a_fifo_of_one_slot() {
    proves(Scenario {
        steps: 4,
        slots: 1,
        credits_in_doubt: true,
        ..SMALL
    });
}

#[test]
fn both_paths_fail_in_either_order_and_during_recovery() {
    let outcome = proves(Scenario {
        failures: 2,
        repairs: 0,
        steps: 1,
        ..SMALL
    });
    assert!(outcome.given_up > 0, "with no path left, the ends give up");
}

/// Also the second time, when its back-off would be longer than the ends wait for a path.
#[test]
fn one_path_that_comes_back() {
    proves(Scenario {
        paths: 1,
        failures: 2,
        repairs: 2,
        steps: 1,
        ..SMALL
    });
}

/// A failure without an operation is no error until an operation begins.
#[test]
fn paths_fail_before_operations_begin() {
    proves(Scenario {
        idle: true,
        paths: 1,
        failures: 2,
        repairs: 1,
        steps: 1,
        ..SMALL
    });
    let outcome = proves(Scenario {
        idle: true,
        failures: 2,
        repairs: 0,
        steps: 1,
        slots: 1,
        ..SMALL
    });
    assert!(
        outcome.given_up > 0,
        "with an operation and no path left, the ends give up"
    );
}

#[test]
fn failures_that_no_port_reports() {
    proves(Scenario {
        silent: true,
        failures: 2,
        repairs: 1,
        steps: 1,
        ..SMALL
    });
}

#[test]
fn acknowledgements_are_lost() {
    proves(Scenario {
        failures: 0,
        glitches: 1,
        credits_in_doubt: true,
        ..SMALL
    });
}

/// Whatever is lost or fails, before and after.
#[test]
fn the_receiver_leaves_when_it_has_all() {
    let leaves = Scenario {
        leaves: true,
        ..SMALL
    };
    let outcome = proves(Scenario {
        steps: 2,
        repairs: 0,
        glitches: 1,
        ..leaves
    });
    assert_eq!(outcome.given_up, 0, "one path was there all the time");
    proves(Scenario {
        steps: 2,
        failback: true,
        ..leaves
    });
}

#[test]
fn a_path_that_works_again_is_used_again() {
    proves(Scenario {
        failback: true,
        steps: 2,
        ..SMALL
    });
}

/// The receiver returns to a path without giving up the other. Whenever the first path fails again, the ends can agree over the second
/// path alone.
#[test]
fn a_path_that_was_left_for_a_better_one_stays_ready() {
    let outcome = proves(Scenario {
        failback: true,
        outside: false,
        only_first: true,
        failures: 2,
        steps: 2,
        ..SMALL
    });
    assert_eq!(outcome.given_up, 0, "the second path was there all the time");
}

#[test]
fn messages_are_lost_and_nothing_is_outside_rdma() {
    proves(Scenario {
        losses: 1,
        repairs: 0,
        ..SMALL
    });
    proves(Scenario {
        outside: false,
        ..SMALL
    });
}

#[test]
fn a_drain_that_is_cut_short_ends_in_an_error_and_never_in_wrong_data() {
    for slots in [1, 2] {
        let scenario = Scenario {
            flaw: Flaw::CutDrain,
            slots,
            ..SMALL
        };
        let outcome = proves(scenario);
        assert!(outcome.given_up > 0, "{outcome}: nothing was lost");
    }
}

#[test]
fn timers_fire_early() {
    proves(Scenario {
        haste: 1,
        repairs: 0,
        steps: 2,
        ..SMALL
    });
}

/// Larger explorations, which take minutes: `cargo test -p ringsight-failover -- --ignored`.
#[test]
#[ignore = "takes minutes and some GiB"]
fn larger() {
    let two = Scenario { failures: 2, ..SMALL };
    proves(Scenario {
        repairs: 0,
        steps: 2,
        ..two
    });
    proves(Scenario { steps: 1, ..two });
    proves(Scenario {
        glitches: 1,
        repairs: 0,
        steps: 2,
        ..SMALL
    });
    proves(Scenario {
        failback: true,
        losses: 1,
        steps: 1,
        ..SMALL
    });
    proves(Scenario {
        failures: 0,
        glitches: 2,
        steps: 2,
        ..SMALL
    });
    proves(Scenario {
        haste: 1,
        outside: false,
        repairs: 0,
        ..SMALL
    });
}

/// Treats every completion as success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct ErrorsSucceed;

impl Rules for ErrorsSucceed {
    fn succeeded(_: Status) -> bool {
        true
    }
}

#[test]
fn mutant_error_completion_taken_as_success() {
    catches::<ErrorsSucceed>(SMALL, "the sender frees");
}

/// The receiver reports its position while the path may still write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Unfenced;

impl Rules for Unfenced {
    fn fences() -> bool {
        false
    }
}

#[test]
fn mutant_no_fence() {
    let scenario = Scenario {
        slots: 1,
        repairs: 0,
        ..SMALL
    };
    catches::<Unfenced>(scenario, "is read, and");
    catches::<Unfenced>(scenario, "its NIC had acknowledged");
}

/// The receiver returns to a better path while steps are outstanding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Unstopped;

impl Rules for Unstopped {
    fn waits_for_stop() -> bool {
        false
    }
}

#[test]
fn mutant_no_stop_before_going_back() {
    let scenario = Scenario {
        failback: true,
        slots: 1,
        ..SMALL
    };
    catches::<Unstopped>(scenario, "its NIC had acknowledged");
}

/// The sender assumes that every posted step has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FromPosted;

impl Rules for FromPosted {
    fn replay_from(_: u64, posted: u64) -> u64 {
        posted
    }
}

#[test]
fn mutant_replay_from_the_posted_position() {
    catches::<FromPosted>(SMALL, "a step is missing");
}

#[test]
fn mutant_fetch_add_signal() {
    let scenario = Scenario {
        flaw: Flaw::FetchAdd,
        credits_in_doubt: true,
        slots: 1,
        ..SMALL
    };
    catches::<Sound>(scenario, "than it has slots");
    catches::<Sound>(scenario, "there is room for");
}

#[test]
fn mutant_stale_gid() {
    let scenario = Scenario {
        flaw: Flaw::StaleGid,
        paths: 1,
        steps: 1,
        ..SMALL
    };
    catches::<Sound>(scenario, "rebuilt without end");
}

#[test]
fn mutant_no_goodbye() {
    let scenario = Scenario {
        flaw: Flaw::NoGoodbye,
        leaves: true,
        steps: 1,
        repairs: 0,
        ..SMALL
    };
    catches::<Sound>(scenario, "although the receiver left");
}

#[test]
fn mutant_notice_before_its_bytes() {
    let scenario = Scenario {
        flaw: Flaw::NoticeFirst,
        ..SMALL
    };
    catches::<Sound>(scenario, "is committed, and");
}
