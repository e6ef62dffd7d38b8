//! States of ranks, and the verdicts that follow from them.

use ringsight_records::{PathCause, Phase, Waits};

use super::*;
use crate::{
    op::Identity,
    proxy::stalls::Why,
    watchdog::{rules::evidence::OperationRun, settings::ProgressSource},
};

const MS: u64 = 1_000_000;
const SETTINGS: Settings = Settings {
    threshold: Duration::from_millis(2000),
    arrival: Duration::from_secs(600),
    stuck: Duration::from_secs(60),
    interval: Duration::from_secs(1),
    action: Action::Report,
    source: ProgressSource::Pages,
    adaptive: None,
};

fn at(position: Position) -> RankState {
    RankState::Answered(position.into())
}

fn running(still_ms: u64) -> RankState {
    at(Position::Running {
        since_ns: 3000 * MS,
        still_ns: still_ms * MS,
        waits: None,
    })
}

fn waiting(still_ms: u64, peer: Option<u16>) -> RankState {
    at(Position::Running {
        since_ns: 3000 * MS,
        still_ns: still_ms * MS,
        waits: Some(Waits {
            op: 1,
            channel: 0,
            phase: Phase::Data,
            peer,
            step: 5,
        }),
    })
}

fn late(idle_ms: u64) -> RankState {
    at(Position::NotLaunched {
        idle_ns: idle_ms * MS,
    })
}

fn deadlocked() -> RankState {
    RankState::Deadlocked(BlockingOperation {
        comm: 1,
        run: OperationRun {
            identity: Identity::Collective { seq: 9 },
            replay: 0,
        },
        since_ns: 2500 * MS,
        awaits_asker_ns: Some(2500 * MS),
    })
}

fn verdict(states: &[RankState], overdue_s: u64) -> Option<(Cause, u32, bool)> {
    let states = (0..).zip(states.iter().copied()).collect();
    judge(&states, Duration::from_secs(overdue_s), &SETTINGS)
        .map(|verdict| (verdict.cause, verdict.culprit, verdict.is_hang))
}

#[test]
fn the_first_cause_in_the_table_counts() {
    let stuck = running(2500);
    let queued = at(Position::Queued { since_ns: 500 * MS });
    let ended = at(Position::CommunicatorEnded);
    let cases = [
        (
            vec![stuck, late(9), queued, RankState::Dead, ended],
            Cause::RankDead,
            3,
            true,
        ),
        (
            vec![
                stuck,
                late(9),
                RankState::Stopped,
                at(Position::DeviceFailed),
                ended,
            ],
            Cause::DeviceFault,
            3,
            true,
        ),
        (
            vec![stuck, late(9), ended, RankState::Stopped],
            Cause::PeerAborted,
            2,
            true,
        ),
        (
            vec![stuck, late(9), RankState::Silent, RankState::Stopped],
            Cause::RankStopped,
            3,
            true,
        ),
        (vec![stuck, late(9), RankState::Silent], Cause::NoAnswer, 2, true),
        (
            vec![stuck, queued, deadlocked(), late(9)],
            Cause::MetadataMismatch,
            2,
            true,
        ),
        (vec![stuck, queued, late(9)], Cause::NotLaunched, 2, false),
        (
            vec![stuck, queued, at(Position::Completed)],
            Cause::QueuedBehindCompute,
            1,
            false,
        ),
        (
            vec![stuck, running(2600), running(2500)],
            Cause::StuckKernel,
            1,
            true,
        ),
    ];
    for (states, cause, culprit, is_hang) in cases {
        assert_eq!(verdict(&states, 3), Some((cause, culprit, is_hang)), "{states:?}");
    }
}

#[test]
fn slow_is_not_stuck_and_late_becomes_a_hang() {
    assert_eq!(verdict(&[running(2500), running(10)], 60), None);
    let just_launched = at(Position::Queued { since_ns: 5 * MS });
    assert_eq!(verdict(&[running(2500), just_launched], 60), None);
    assert_eq!(
        verdict(&[running(2500), at(Position::Completed)], 3),
        Some((Cause::StuckKernel, 0, true))
    );
    assert_eq!(
        verdict(&[running(2500), late(1)], 599),
        Some((Cause::NotLaunched, 1, false))
    );
    assert_eq!(
        verdict(&[running(2500), late(1)], 600),
        Some((Cause::NotLaunched, 1, true))
    );
}

#[test]
fn a_rank_whose_watchdog_is_off_is_named_only_for_what_it_has_not_called() {
    let unwatched = |called| at(Position::WatchdogOff { called });
    assert_eq!(
        verdict(&[running(2500), unwatched(true)], 60),
        None,
        "it may move"
    );
    assert_eq!(
        verdict(&[running(2500), unwatched(false)], 60),
        Some((Cause::NotLaunched, 1, false))
    );
    assert_eq!(
        verdict(&[running(2500), unwatched(true), late(5)], 60),
        Some((Cause::NotLaunched, 2, false))
    );
}

#[test]
fn a_rank_that_others_wait_for_and_that_does_not_wait_is_the_culprit() {
    let stuck = |rank| Some((Cause::StuckKernel, rank, true));
    let states = [waiting(2600, Some(2)), waiting(2700, Some(0)), running(2500)];
    assert_eq!(verdict(&states, 3), stuck(2), "though it was last to stop");
    // All wait, or nobody knows for whom: as without.
    let states = [
        waiting(2600, Some(1)),
        waiting(2700, Some(0)),
        waiting(2500, Some(1)),
    ];
    assert_eq!(verdict(&states, 3), stuck(1));
    let states = [waiting(2600, None), running(2500)];
    assert_eq!(verdict(&states, 3), stuck(0));
}

#[test]
fn a_better_known_culprit_is_reported_and_stays() {
    let found = |states: &[RankState]| {
        let states = (0..).zip(states.iter().copied()).collect();
        judge(&states, Duration::from_secs(3), &SETTINGS)
    };
    let guess = [waiting(2600, None), waiting(2700, None), running(2500)];
    let known = [waiting(2600, Some(2)), waiting(2700, Some(0)), running(2500)];
    let culprit = |verdict: &Option<Verdict>| verdict.as_ref().map(|verdict| verdict.culprit);
    let Revision { news, standing } = revise(None, found(&guess));
    assert_eq!((culprit(&news), culprit(&standing)), (Some(1), Some(1)));
    // Another guess is no news.
    let other = [waiting(2800, None), waiting(2700, None), running(2500)];
    let Revision { news, standing } = revise(standing, found(&other));
    assert_eq!((culprit(&news), culprit(&standing)), (None, Some(1)));
    let Revision { news, standing } = revise(standing, found(&known));
    assert_eq!((culprit(&news), culprit(&standing)), (Some(2), Some(2)));
    let Revision { news, standing } = revise(standing, found(&guess));
    assert_eq!((culprit(&news), culprit(&standing)), (None, Some(2)));
    let Revision { news, standing } = revise(standing, found(&known));
    assert_eq!((culprit(&news), culprit(&standing)), (None, Some(2)));
    // An operation that moves again is reported again when it stops.
    assert_eq!(
        revise(standing, None),
        Revision {
            news: None,
            standing: None
        }
    );
}

#[test]
fn a_debugger_s_stop_is_no_hang_before_the_arrival_time_out() {
    let stopped_by = |states: &[RankState], overdue_s| {
        let states = (0..).zip(states.iter().copied()).collect();
        let verdict = judge(&states, Duration::from_secs(overdue_s), &SETTINGS).unwrap();
        (
            verdict.cause,
            verdict.culprit,
            verdict.by_debugger,
            verdict.is_hang,
        )
    };
    let (stuck, traced) = (running(2500), RankState::Traced);
    // Ranks that have not come may wait for it elsewhere.
    let states = [stuck, late(9), traced];
    assert_eq!(stopped_by(&states, 599), (Cause::RankStopped, 2, true, false));
    assert_eq!(stopped_by(&states, 600), (Cause::RankStopped, 2, true, true));
    // A hang is reported first.
    for (state, cause) in [
        (RankState::Stopped, Cause::RankStopped),
        (RankState::Silent, Cause::NoAnswer),
        (deadlocked(), Cause::MetadataMismatch),
    ] {
        assert_eq!(stopped_by(&[stuck, traced, state], 3), (cause, 2, false, true));
    }
}

#[test]
fn a_rank_that_has_left_is_the_culprit_only_if_all_others_have_come() {
    assert_eq!(
        verdict(&[running(2500), RankState::Left, late(5)], 3),
        Some((Cause::NotLaunched, 2, false))
    );
    assert_eq!(
        verdict(&[running(2500), RankState::Left, RankState::Stopped], 3),
        Some((Cause::RankStopped, 2, true))
    );
    assert_eq!(
        verdict(&[running(2500), RankState::Left, running(2500)], 3),
        Some((Cause::PeerAborted, 1, true))
    );
    assert_eq!(verdict(&[running(2500), RankState::Left, running(10)], 3), None);
}

/// A rank at some position that waits for the network.
fn stalled(position: RankState, why: Why, for_ms: u64) -> RankState {
    let RankState::Answered(answer) = position else {
        return position;
    };
    let stall = Stall {
        why,
        for_ns: for_ms * MS,
        peer: 0,
        is_send: true,
        channel: 0,
        device: [0; 24],
        port: 1,
        queue_pair: 18,
    };
    RankState::Answered(RankAnswer {
        stall: Some(stall),
        ..answer
    })
}

#[test]
fn a_wait_for_the_network_is_late_and_no_stuck_kernel() {
    let nic = |rank, hang| Some((Cause::StuckNic, rank, hang));
    let (stuck, done) = (running(2500), at(Position::Completed));
    // A sender's kernel may be done with what its NIC does not get rid of.
    let states = [stuck, stalled(done, Why::Unanswered, 2400)];
    assert_eq!(verdict(&states, 3), nic(1, false));
    // It is late for as long as the network is away, not the operation.
    assert_eq!(verdict(&states, 700), nic(1, false));
    let long = [stuck, stalled(done, Why::Unanswered, 600_000)];
    assert_eq!(verdict(&long, 700), nic(1, true));
    // It has for as long as they have not moved, however well kernels are known.
    for other in [running(10), at(Position::WatchdogOff { called: true })] {
        let states = |for_ms| [stuck, other, stalled(done, Why::Unanswered, for_ms)];
        assert_eq!(verdict(&states(2000), 3), nic(2, false));
        assert_eq!(verdict(&states(1999), 3), None);
    }
    // A rank that has not come is the culprit whatever the network does.
    assert_eq!(
        verdict(&[stuck, late(9), stalled(stuck, Why::PortDown, 2500)], 3),
        Some((Cause::NotLaunched, 1, false))
    );
    assert_eq!(
        verdict(
            &[stuck, RankState::Silent, stalled(stuck, Why::PortDown, 2500)],
            3
        ),
        Some((Cause::NoAnswer, 1, true))
    );
    // Rank 0 cannot be reached by its sockets either, nor those of its node.
    let away = stalled(stuck, Why::Unanswered, 2500);
    assert_eq!(
        verdict(&[RankState::Silent, away, RankState::Silent], 3),
        nic(1, false)
    );
    assert_eq!(
        verdict(&[RankState::Stopped, away, RankState::Silent], 3),
        Some((Cause::RankStopped, 0, true))
    );
    // Of several it is who knows what has failed; else who has waited for longest.
    let left = Why::Left(PathCause::Completion, 12);
    for (whys, culprit) in [
        ([Why::Unanswered, Why::PortDown, left], 1),
        ([Why::Unanswered, Why::Told, left], 2),
        ([Why::Told, Why::Unanswered, Why::Unanswered], 2),
    ] {
        let states = [0, 1, 2].map(|rank| stalled(stuck, whys[rank], 2500 + rank as u64));
        assert_eq!(verdict(&states, 3), nic(culprit, false), "{whys:?}");
    }
}

#[test]
fn a_failure_in_the_network_is_reported_when_it_is_known() {
    let stuck = running(2500);
    let found = |whys: [Why; 2]| {
        let states = [0, 1].map(|rank| (rank, stalled(stuck, whys[rank as usize], 2500 - u64::from(rank))));
        judge(&states.into(), Duration::from_secs(3), &SETTINGS)
    };
    let named = |verdict: &Option<Verdict>| {
        let verdict = verdict.as_ref()?;
        Some((verdict.culprit, verdict.stall()?.why))
    };
    let unknown = [Why::Unanswered; 2];
    let Revision { news, standing } = revise(None, found(unknown));
    assert_eq!(named(&news), Some((0, Why::Unanswered)));
    let left = Why::Left(PathCause::Timeout, 0);
    let mut standing = standing;
    for (whys, expected) in [
        (unknown, None),
        ([Why::Told, left], Some((1, left))),
        ([Why::Told, left], None),
        ([Why::PortDown, left], Some((0, Why::PortDown))),
        ([Why::PortDown; 2], None),
    ] {
        let Revision { news, standing: now } = revise(standing, found(whys));
        assert_eq!(named(&news), expected, "{whys:?}");
        standing = now;
    }
}

#[test]
fn a_rank_that_holds_up_several_operations_is_named_once() {
    let of = |cause, culprit, others: &[u32]| Verdict {
        others: others.to_vec(),
        is_awaited: true,
        ..Verdict::hang(cause, culprit)
    };
    let reported = of(Cause::NotLaunched, 1, &[2]);
    assert!(reported.covers(&of(Cause::NotLaunched, 2, &[])));
    assert!(!reported.covers(&of(Cause::NotLaunched, 1, &[3])));
    let stuck = |culprit| of(Cause::StuckKernel, culprit, &[]);
    assert!(!stuck(1).covers(&stuck(2)), "others wait for it, too");
    let guess = Verdict::hang(Cause::StuckKernel, 2);
    assert!(stuck(1).covers(&guess), "it may have stopped because of that");
}

#[test]
fn a_rank_that_another_operation_keeps_is_not_the_culprit() {
    let elsewhere = RankState::Answered(RankAnswer {
        position: Position::NotLaunched { idle_ns: 9000 * MS },
        blocked_by: Some(BlockingOperation {
            comm: 7,
            run: OperationRun {
                identity: Identity::Collective { seq: 3 },
                replay: 0,
            },
            since_ns: 4000 * MS,
            awaits_asker_ns: None,
        }),
        stall: None,
        is_stale: false,
    });
    let states = (0..).zip([running(2500), elsewhere, late(5), late(6)]).collect();
    let verdict = judge(&states, Duration::from_secs(3), &SETTINGS).unwrap();
    assert_eq!((verdict.culprit, verdict.others), (2, vec![1, 3]));
    let states = (0..).zip([running(2500), elsewhere]).collect();
    let verdict = judge(&states, Duration::from_secs(3), &SETTINGS).unwrap();
    assert_eq!(
        (verdict.culprit, verdict.blocked_by.map(|blocking| blocking.comm)),
        (1, Some(7))
    );
}

#[test]
fn a_rank_whose_data_is_being_copied_waits_for_nobody() {
    let copying = at(Position::Running {
        since_ns: 3000 * MS,
        still_ns: 2000 * MS,
        waits: Some(Waits {
            op: 1,
            channel: 0,
            phase: Phase::Copies,
            peer: None,
            step: 0,
        }),
    });
    let states = (0..)
        .zip([waiting(2500, Some(1)), copying, waiting(2400, Some(1))])
        .collect();
    let verdict = judge(&states, Duration::from_secs(3), &SETTINGS).unwrap();
    assert_eq!((verdict.cause, verdict.culprit), (Cause::StuckKernel, 1));
}
