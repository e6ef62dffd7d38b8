//! The protocol, explored: both ends as they are, on a network that may do anything that a network does.
//!
//! A [`World`] is both machines, what their drivers hold (queue pairs, slots, credit words) and all that is on its way. Every
//! thing that can happen next is a [`Move`]; [`explore`](explore::explore) tries all of them from every state that can be reached,
//! each state once; a step is two work requests, and anything may happen between them. What is shown of all states:
//!
//! - every step is committed once, in order, and the receiver's device finds in its slot what was sent;
//! - the sender never frees a source that the receiver has not got, nor has more credit than there are free slots;
//! - an end gives up only when no path has both its ports up and it has an operation, or because the other end did;
//! - no hang: from every state, both ends can come to be done or given up without a failure being mended from outside.
//!
//! Time is not modelled but by order: a timer that is set may be over at any moment, with two exceptions, which are what the
//! settings promise. The end's last deadline is over only when no path is alive, or when those that are have failed more than once and
//! are left alone (its time is long against a recovery, but not against that), and the others only when what they wait for cannot
//! come (theirs are long against a round trip); so often as [`Scenario::haste`] says, they are over early, too.

mod explore;
mod moves;
mod network;
mod world;

use explore::{Found, Outcome, explore};
use network::Flaw;
use world::{Scenario, World};

use crate::{Rules, Sound, Status};

fn run<R: Rules>(scenario: Scenario, wanted: Option<&str>) -> Outcome {
    let started = std::time::Instant::now();
    let outcome = explore(&World::<R>::new(scenario), wanted);
    println!(
        "{scenario:?}: {outcome}, {:.1} s",
        started.elapsed().as_secs_f64()
    );
    outcome
}

/// All is well, and the exploration met what it is for.
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

/// The mutant comes to what it must come to.
fn catches<R: Rules>(scenario: Scenario, wanted: &str) {
    let outcome = run::<R>(scenario, Some(wanted));
    println!("{}", outcome.explain());
    assert!(
        matches!(&outcome.found, Some(Found::Wrong(what)) if what.contains(wanted)),
        "the mutant lives"
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

/// Also the second time, when it would be left alone for longer than the ends wait for a path.
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

/// What fails before there is an operation is no error until there is one.
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
fn failures_that_no_port_tells_of() {
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

/// Whatever is lost, and whatever fails, before and after.
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
fn a_path_that_is_good_again_is_used_again() {
    proves(Scenario {
        failback: true,
        steps: 2,
        ..SMALL
    });
}

/// A path is gone back to without the other one being given up: whenever the first path fails, and however soon again, the ends can
/// agree over the second one alone.
#[test]
fn a_path_that_was_left_for_a_better_one_is_there_at_once() {
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
fn timers_are_over_early() {
    proves(Scenario {
        haste: 1,
        repairs: 0,
        steps: 2,
        ..SMALL
    });
}

/// What takes minutes: `cargo test -p ringsight-failover -- --ignored`.
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

/// A completion is a completion.
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

/// The receiver says what it has while the path may still write.
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

/// The receiver goes back while steps are under way.
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

/// What was posted is taken to be there.
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
fn mutant_no_last_word() {
    let scenario = Scenario {
        flaw: Flaw::NoLastWord,
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
