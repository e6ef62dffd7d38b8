//! What the watchdog promises, by a virtual clock: a whole job runs, and its ranks report.

mod world;

use std::time::Duration;

use ringsight_records::{Cause, Function};

use self::world::{DEFAULT, MS, NEVER, Part, Reported, World};
use super::{
    evidence::{OperationRun, ProcessHealth},
    *,
};
use crate::watchdog::settings::{Action, AdaptiveThreshold, ProgressSource};

/// A short threshold, as `cargo xtask faults` has it.
const SHORT: Settings = Settings {
    threshold: Duration::from_millis(300),
    ..DEFAULT
};

/// What a report is promised after the threshold, milliseconds.
const PROMISED: u64 = 1000;
/// The same for a verdict that must last.
const PROMISED_LASTING: u64 = 1600;

const SOURCES: [ProgressSource; 2] = [ProgressSource::Pages, ProgressSource::Events];

/// Asserts that each of `ranks` reported this once, within `promised` after `due`, and that nobody reported anything else.
#[track_caller]
fn reported_once(reports: &[Reported], ranks: &[u32], what: (Cause, u32, bool), (due, promised): (u64, u64)) {
    let mut by: Vec<u32> = reports.iter().map(|report| report.by).collect();
    by.sort_unstable();
    assert_eq!(by, ranks, "{reports:#?}");
    for report in reports {
        assert_eq!(report.what(), what, "{report:#?}");
        assert!(
            (due..=due + promised).contains(&report.at),
            "due at {due}: {report:#?}"
        );
    }
}

/// An all-reduce that rank 1 of three has not called.
fn late_job(settings: Settings, start: u64) -> World {
    let mut world = World::new(3, settings);
    world.all_reduce(|rank| match rank {
        1 => Part::not_called(),
        _ => Part::waits_since(start),
    });
    world
}

#[test]
fn a_late_rank_is_named_within_a_second_of_the_threshold() {
    for settings in [DEFAULT, SHORT] {
        let threshold = settings.threshold.as_millis() as u64;
        // Wherever between two looks the operation begins.
        for start in (0..1000).step_by(37) {
            let mut world = late_job(settings, start);
            let reports = world.run_until(start + 30_000);
            let what = (Cause::NotLaunched, 1, false);
            reported_once(&reports, &[0, 2], what, (start + threshold, PROMISED));
        }
    }
}

#[test]
fn a_late_rank_becomes_a_hang_at_the_arrival_timeout() {
    let settings = Settings {
        arrival: Duration::from_secs(10),
        ..DEFAULT
    };
    let mut world = late_job(settings, 0);
    let late = world.run_until(9_999);
    reported_once(&late, &[0, 2], (Cause::NotLaunched, 1, false), (2000, PROMISED));
    let hang = world.run_until(60_000);
    reported_once(&hang, &[0, 2], (Cause::NotLaunched, 1, true), (10_000, PROMISED));
}

#[test]
fn a_rank_that_comes_before_the_threshold_is_not_named() {
    let mut world = late_job(DEFAULT, 0);
    let rank_1 = Part {
        completes: 2000,
        ..Part::waits_since(1990)
    };
    *world.part(0, 1) = rank_1;
    for rank in [0, 2] {
        world.part(0, rank).completes = 2000;
    }
    assert!(world.run_until(60_000).is_empty());
    assert_eq!(world.questions, 0);
}

#[test]
fn an_operation_that_moves_is_slow_and_not_stuck() {
    let mut world = World::new(3, DEFAULT);
    world.all_reduce(|rank| Part {
        // Rank 2 moves for half a minute; the others wait for it now and then.
        moves_until: if rank == 2 { 30_000 } else { 1000 },
        completes: 30_000,
        ..Part::waits_since(0)
    });
    assert!(world.run_until(60_000).is_empty());
    assert!(world.questions > 0, "it was asked about");
}

#[test]
fn a_rank_queued_behind_compute_is_late_and_no_hang() {
    for source in SOURCES {
        let mut world = World::new(2, Settings { source, ..SHORT });
        world.all_reduce(|rank| match rank {
            0 => Part::waits_since(0),
            _ => Part {
                begins: 5000,
                ..Part::waits_since(10)
            },
        });
        let reports = world.run_until(4_999);
        let what = (Cause::QueuedBehindCompute, 1, false);
        reported_once(&reports, &[0], what, (300, PROMISED));
        // It was asked at 300 ms, and answered a millisecond later.
        assert_eq!(reports[0].verdict.since_ns, Some((301 - 10) * MS));
    }
}

#[test]
fn a_kernel_that_stops_is_named_by_every_rank() {
    let mut world = World::new(3, SHORT);
    world.all_reduce(|rank| Part {
        // The others wait for rank 1, which was not the first to stand still.
        waits_for: (rank != 1).then_some(1),
        moves_until: if rank == 1 { 700 } else { 500 },
        ..Part::waits_since(0)
    });
    let reports = world.run_until(60_000);
    let what = (Cause::StuckKernel, 1, true);
    reported_once(&reports, &[0, 1, 2], what, (700 + 300, PROMISED_LASTING));
}

#[test]
fn a_kernel_of_one_rank_alone_is_stuck_without_a_doubt() {
    for source in SOURCES {
        let mut world = World::new(2, Settings { source, ..SHORT });
        world.simulated_kernel(1, Part::waits_since(100));
        let reports = world.run_until(60_000);
        reported_once(&reports, &[1], (Cause::StuckKernel, 1, true), (400, PROMISED));
    }
}

#[test]
fn by_events_an_operation_is_stuck_after_the_stuck_timeout_and_a_nanosecond_a_byte() {
    let settings = Settings {
        source: ProgressSource::Events,
        ..SHORT
    };
    let mut world = World::new(2, settings);
    // Rank 1 was first to stand still.
    world.all_reduce(|rank| Part::waits_since(100 - 100 * u64::from(rank)));
    // Five seconds more.
    world.set_bytes(0, 5_000_000_000);
    assert!(world.run_until(65_000).is_empty());
    let reports = world.run_until(120_000);
    let what = (Cause::StuckKernel, 1, true);
    reported_once(&reports, &[0, 1], what, (65_300, PROMISED_LASTING));
}

#[test]
fn a_late_rank_hides_no_hang_of_another_message() {
    for source in SOURCES {
        let mut world = World::new(3, Settings { source, ..SHORT });
        // Rank 0 receives in one launch from rank 1, which is late, and from rank 2, which is stopped.
        for from in [1, 2] {
            world.message(from, 0, [Part::not_called(), Part::waits_since(0)]);
        }
        world.process(2, 0, ProcessHealth::Stopped);
        let mut reports = world.run_until(60_000);
        reports.sort_by_key(|report| report.operation);
        let what: Vec<_> = reports.iter().map(Reported::what).collect();
        assert_eq!(
            what,
            [(Cause::NotLaunched, 1, false), (Cause::RankStopped, 2, true)]
        );
        assert!(
            reports.iter().all(|report| report.at <= 300 + PROMISED),
            "{reports:#?}"
        );
    }
}

#[test]
fn one_rank_is_late_and_no_message_of_the_same_launch_is_stuck() {
    for source in SOURCES {
        let settings = Settings {
            source,
            stuck: Duration::from_millis(500),
            ..SHORT
        };
        let mut world = World::new(4, settings);
        // Each rank sends to each in one launch, itself included. Events and kernels tell the end of the whole launch.
        let part = |rank| match rank {
            2 => Part::not_called(),
            _ => Part::waits_since(0),
        };
        for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
            world.message(from, to, [part(from), part(to)]);
        }
        let reports = world.run_until(60_000);
        reported_once(
            &reports,
            &[0, 1, 3],
            (Cause::NotLaunched, 2, false),
            (300, PROMISED),
        );
    }
}

#[test]
fn of_many_overdue_operations_those_that_were_due_first_are_asked_about() {
    let mut world = World::new(2, SHORT);
    for number in 0..20 {
        // The last one began first.
        world.message(1, 0, [Part::not_called(), Part::waits_since(20 - number)]);
    }
    let reports = world.run_until(2000);
    reported_once(&reports, &[0], (Cause::NotLaunched, 1, false), (301, PROMISED));
    assert_eq!(
        reports[0].operation, 19,
        "a rank is named for the first one that it holds up"
    );
    let timers: Vec<OperationTimer> = (0..300)
        .map(|number| OperationTimer {
            run: OperationRun {
                identity: Identity::Collective { seq: number },
                replay: 0,
            },
            start_ns: 1000 - number,
            kind: None,
        })
        .collect();
    let schedule = world.rules(0).schedule(10_000 * MS, &timers);
    assert_eq!(
        schedule.overdue,
        Vec::from_iter((44..300).rev()),
        "no more than 256"
    );
}

#[test]
fn an_operation_near_its_threshold_is_looked_at_closely() {
    let mut rules = Rules::new(7, 0, DEFAULT);
    let mut rest_at = |now_ms: u64| {
        let timer = OperationTimer {
            run: OperationRun {
                identity: Identity::Collective { seq: 0 },
                replay: 0,
            },
            start_ns: 0,
            kind: None,
        };
        let schedule = rules.schedule(now_ms * MS, &[timer]);
        (schedule.overdue.len(), schedule.rest.as_millis())
    };
    assert_eq!(rest_at(500), (0, 1000), "as often as the interval says");
    assert_eq!(rest_at(999), (0, 1000));
    assert_eq!(rest_at(1000), (0, 100), "half the threshold is over");
    assert_eq!(rest_at(1950), (0, 50));
    assert_eq!(rest_at(2000), (1, 100));
    let idle = rules.schedule(2000 * MS, &[]);
    assert_eq!(idle.rest, DEFAULT.interval);
}

#[test]
fn a_usually_fast_operation_is_overdue_early() {
    let settings = Settings {
        threshold: Duration::from_secs(20),
        adaptive: Some(AdaptiveThreshold {
            factor: 20,
            floor: Duration::from_millis(300),
        }),
        ..DEFAULT
    };
    let mut world = late_job(settings, 0);
    for rank in 0..3 {
        let kind = (Function::AllReduce.code(), 1);
        for _ in 0..8 {
            world.rules(rank).durations().add(kind, 2 * MS);
        }
    }
    let reports = world.run_until(19_000);
    reported_once(&reports, &[0, 2], (Cause::NotLaunched, 1, false), (300, PROMISED));
}

/// Jobs of two ranks whose operations never meet.
fn deadlock_jobs(settings: Settings) -> Vec<(&'static str, World)> {
    let job = |name, build: fn(&mut World)| {
        let mut world = World::new(2, settings);
        build(&mut world);
        (name, world)
    };
    /// Called behind the first launch, and never begun.
    fn behind() -> Part {
        Part {
            called: 10,
            begins: NEVER,
            ..Part::waits_since(NEVER)
        }
        .in_launch(1)
    }
    vec![
        job("each receives first", |world| {
            world.message(1, 0, [Part::not_called(), Part::waits_since(0)]);
            world.message(0, 1, [Part::not_called(), Part::waits_since(0)]);
        }),
        job("a receive against a collective", |world| {
            world.message(1, 0, [Part::not_called(), Part::waits_since(0)]);
            world.all_reduce(|rank| match rank {
                0 => Part::not_called(),
                _ => Part::waits_since(0),
            });
        }),
        job("a broadcast from the rank that receives", |world| {
            world.rooted(Function::Broadcast, 1, |rank| match rank {
                0 => Part::waits_since(0),
                _ => Part::not_called(),
            });
            world.message(0, 1, [Part::not_called(), Part::waits_since(0)]);
        }),
        job("each has called what the other waits for", |world| {
            world.message(1, 0, [behind(), Part::waits_since(0)]);
            world.message(0, 1, [behind(), Part::waits_since(0)]);
        }),
        job("one has called what the other waits for", |world| {
            world.message(1, 0, [behind(), Part::waits_since(0)]);
            world.message(0, 1, [Part::not_called(), Part::waits_since(0)]);
        }),
        job("a collective that both have called", |world| {
            world.message(1, 0, [behind(), Part::waits_since(0)]);
            world.all_reduce(|rank| match rank {
                0 => behind(),
                _ => Part::waits_since(0),
            });
        }),
    ]
}

#[test]
fn ranks_that_wait_for_each_other_are_a_hang_and_nobody_is_late() {
    for source in SOURCES {
        for (name, mut world) in deadlock_jobs(Settings { source, ..SHORT }) {
            let reports = world.run_until(60_000);
            assert!(!reports.is_empty(), "{name}");
            for report in &reports {
                let what = (Cause::MetadataMismatch, 1 - report.by, true);
                assert_eq!(report.what(), what, "{name}, {source:?}: {report:#?}");
                let due = 300 + 600;
                assert!((due..=due + PROMISED).contains(&report.at), "{name}: {report:#?}");
            }
        }
    }
}

#[test]
fn operations_of_one_launch_or_of_graphs_are_no_deadlock() {
    let both = |replay| {
        let mut world = World::new(2, SHORT);
        for (from, to) in [(1, 0), (0, 1)] {
            let number = world.message(from, to, [Part::waits_since(NEVER), Part::waits_since(0)]);
            let sender = world.part(number, from);
            // Called in the launch of the receive.
            (sender.called, sender.launch) = (0, 0);
            world.set_replay(number, replay);
        }
        world
    };
    for replay in [0, 3] {
        for report in both(replay).run_until(5_000) {
            assert_eq!(report.verdict.cause, Cause::QueuedBehindCompute, "{report:#?}");
        }
    }
}

#[test]
fn a_message_that_ends_by_itself_is_no_deadlock() {
    let mut world = World::new(2, SHORT);
    // Rank 0 waits for rank 1, whose short message to rank 0 is on its way and ends by itself, again and again.
    world.message(1, 0, [Part::not_called(), Part::waits_since(0)]);
    for number in 0..20 {
        let sends = Part {
            completes: 500 * (number + 1),
            ..Part::waits_since(500 * number)
        };
        world.message(1, 0, [sends.in_launch(number as u32), Part::not_called()]);
    }
    for report in world.run_until(10_000) {
        assert_eq!(report.what(), (Cause::NotLaunched, 1, false), "{report:#?}");
    }
}

#[test]
fn nobody_is_late_because_a_rank_was_stopped() {
    let mut world = late_job(SHORT, 0);
    world.process(1, 0, ProcessHealth::Stopped);
    let stopped = world.run_until(5000);
    reported_once(&stopped, &[0, 2], (Cause::RankStopped, 1, true), (300, PROMISED));
    // It goes on, and has not come: no rank is late before another threshold.
    world.process(1, 5000, ProcessHealth::Alive);
    assert!(world.run_until(5300).is_empty());
    let late = world.run_until(30_000);
    reported_once(
        &late,
        &[0, 2],
        (Cause::NotLaunched, 1, false),
        (5300, PROMISED + 1000),
    );
}

#[test]
fn a_debugger_s_stop_is_late() {
    let mut world = late_job(SHORT, 0);
    world.process(1, 0, ProcessHealth::Traced);
    let reports = world.run_until(60_000);
    reported_once(&reports, &[0, 2], (Cause::RankStopped, 1, false), (300, PROMISED));
    assert!(reports.iter().all(|report| report.verdict.by_debugger));
}

#[test]
fn a_debugger_that_a_rank_has_announced_explains_its_silence() {
    // Rank 1 is alone on its node: nobody can look at its process.
    let mut world = late_job(SHORT, 0).on_nodes_of(1);
    world.process(1, 0, ProcessHealth::Traced);
    for rank in [0, 2] {
        world.rules(rank).debugger(1, true);
    }
    let reports = world.run_until(60_000);
    reported_once(
        &reports,
        &[0, 2],
        (Cause::RankStopped, 1, false),
        (300, PROMISED + 200),
    );
}

#[test]
fn a_silent_rank_alone_on_its_node_does_not_answer() {
    let mut world = late_job(SHORT, 0).on_nodes_of(1);
    world.process(1, 0, ProcessHealth::Stopped);
    let reports = world.run_until(60_000);
    // It is asked twice.
    reported_once(
        &reports,
        &[0, 2],
        (Cause::NoAnswer, 1, true),
        (300 + 2 * 350, PROMISED),
    );
}

#[test]
fn a_rank_whose_process_lives_has_long_to_answer() {
    let mut world = late_job(SHORT, 0);
    world.deaf(1, 3_000);
    // By then it answers: it is late, and does not count as silent.
    let reports = world.run_until(60_000);
    reported_once(
        &reports,
        &[0, 2],
        (Cause::NotLaunched, 1, false),
        (3_000, PROMISED),
    );
    let mut world = late_job(SHORT, 0);
    world.deaf(1, NEVER);
    let reports = world.run_until(60_000);
    // It is asked ten times.
    reported_once(
        &reports,
        &[0, 2],
        (Cause::NoAnswer, 1, true),
        (300 + 10 * 250, PROMISED),
    );
}

#[test]
fn a_rank_that_gave_up_is_what_the_others_wait_for() {
    let settings = Settings {
        action: Action::Abort,
        arrival: Duration::from_secs(2),
        ..SHORT
    };
    // Rank 1 comes late, and rank 2 later still. When rank 1 becomes a hang, rank 0 fails.
    let mut world = World::new(3, settings);
    world.all_reduce(|rank| Part::waits_since(3000 * u64::from(rank)));
    let by_rank_0: Vec<_> = world.run_until(2900).iter().map(Reported::what).collect();
    assert_eq!(
        by_rank_0,
        [(Cause::NotLaunched, 1, false), (Cause::NotLaunched, 1, true)]
    );
    let after = world.run_until(30_000);
    let what: Vec<_> = after.iter().map(|report| (report.by, report.what())).collect();
    assert_eq!(
        what,
        [
            (1, (Cause::PeerAborted, 0, true)),
            (2, (Cause::PeerAborted, 0, true))
        ]
    );
}

#[test]
fn a_rank_that_left_after_it_completed_is_not_the_culprit() {
    for source in SOURCES {
        let mut world = World::new(3, Settings { source, ..SHORT });
        // The root of a broadcast completes it and aborts; rank 1 is late, and rank 2 waits.
        world.rooted(Function::Broadcast, 0, |rank| match rank {
            0 => Part {
                completes: 50,
                ..Part::waits_since(0)
            },
            1 => Part::not_called(),
            _ => Part::waits_since(0),
        });
        assert!(world.run_until(100).is_empty());
        world.give_up(0);
        let reports = world.run_until(60_000);
        reported_once(&reports, &[2], (Cause::NotLaunched, 1, false), (300, PROMISED));
    }
}

#[test]
fn a_rank_that_does_not_know_its_own_position_may_be_the_late_one() {
    let settings = Settings {
        source: ProgressSource::Events,
        ..SHORT
    };
    let mut world = World::new(2, settings);
    // Rank 0 launched the operation and cannot see that it began. Rank 1 has not called it.
    world.all_reduce(|rank| match rank {
        0 => Part::waits_since(100),
        _ => Part::not_called(),
    });
    world.blind(0, 50);
    let reports = world.run_until(10_000);
    let what: Vec<_> = reports.iter().map(|report| (report.by, report.what())).collect();
    assert_eq!(what, [(0, (Cause::NotLaunched, 1, false))]);
}

#[test]
fn a_blind_rank_takes_over_what_all_others_have_completed() {
    let settings = Settings {
        source: ProgressSource::Events,
        ..SHORT
    };
    let mut world = World::new(2, settings);
    let completed = Part {
        completes: 200,
        ..Part::waits_since(100)
    };
    world.all_reduce(|_| completed);
    world.all_reduce(|rank| match rank {
        0 => Part::waits_since(200).in_launch(1),
        _ => Part::not_called(),
    });
    world.blind(0, 50);
    let reports = world.run_until(10_000);
    let what: Vec<_> = reports
        .iter()
        .map(|report| (report.operation, report.what()))
        .collect();
    assert_eq!(what, [(1, (Cause::NotLaunched, 1, false))]);
}

#[test]
fn after_a_deadlock_is_reported_nothing_else_is() {
    let mut world = World::new(3, SHORT);
    world.message(1, 0, [Part::not_called(), Part::waits_since(0)]);
    world.message(0, 1, [Part::not_called(), Part::waits_since(0)]);
    // Rank 2 waits for both elsewhere, for longer.
    world.message(0, 2, [Part::not_called(), Part::waits_since(700)]);
    let reports = world.run_until(60_000);
    let causes: Vec<Cause> = reports.iter().map(|report| report.verdict.cause).collect();
    assert!(causes.contains(&Cause::MetadataMismatch), "{reports:#?}");
    let first = reports
        .iter()
        .position(|report| report.verdict.cause == Cause::MetadataMismatch);
    let at = reports[first.unwrap()].at;
    assert!(
        reports
            .iter()
            .all(|report| report.verdict.cause == Cause::MetadataMismatch || report.at <= at + 2),
        "{reports:#?}"
    );
}

#[test]
fn a_verdict_that_needs_no_question_is_reported_once() {
    let mut rules = Rules::new(7, 0, SHORT);
    let run = OperationRun {
        identity: Identity::Collective { seq: 0 },
        replay: 0,
    };
    let fault = Verdict::hang(Cause::DeviceFault, 0);
    assert!(rules.note(run, &fault, 0));
    assert!(!rules.note(run, &fault, MS), "it is reported once");
}
