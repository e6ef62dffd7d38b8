//! Investigations by a virtual clock.

use super::*;
use crate::{op::Identity, watchdog::rules::evidence::BlockingOperation};

const MS: u64 = 1_000_000;
const THRESHOLD: Duration = Duration::from_secs(2);
const REST: Duration = Duration::from_secs(1);
/// The rank that asks.
const OWN: u32 = 0;

fn run(seq: u64) -> OperationRun {
    OperationRun {
        identity: Identity::Collective { seq },
        replay: 0,
    }
}

fn verdict(cause: Cause, culprit: u32, hang: bool) -> Option<Verdict> {
    Some(Verdict {
        is_hang: hang,
        ..Verdict::hang(cause, culprit)
    })
}

fn step(investigations: &mut Investigations, seq: u64, now: u64) -> NextStep {
    investigations.next_step(run(seq), &[OWN, 1], (OWN, Position::Completed.into()), now)
}

fn conclude(investigations: &mut Investigations, seq: u64, verdict: Option<Verdict>, now: u64) -> Conclusion {
    conclude_of(investigations, (seq, 0), verdict, now)
}

/// Of one that began then.
fn conclude_of(
    investigations: &mut Investigations,
    (seq, began): (u64, u64),
    verdict: Option<Verdict>,
    now: u64,
) -> Conclusion {
    let mut states = BTreeMap::from([(OWN, RankState::Silent), (1, RankState::Silent)]);
    if let Some(verdict) = verdict
        .as_ref()
        .filter(|verdict| verdict.cause == Cause::RankStopped)
    {
        states.insert(verdict.culprit, RankState::Stopped);
    }
    let judged = Judged {
        run: run(seq),
        began_ns: began,
        verdict,
        states: &states,
        asker: OWN,
        rest: REST,
    };
    investigations.conclude(judged, now)
}

#[test]
fn what_is_said_of_ranks_that_were_not_asked_is_not_kept() {
    let mut investigations = Investigations::new(THRESHOLD);
    assert_eq!(step(&mut investigations, 1, MS), NextStep::Ask { query: 1 });
    for rank in 2..10_000 {
        investigations.hear(1, rank, RankState::Dead, 2 * MS);
    }
    investigations.hear(1, 1, RankState::Stopped, 3 * MS);
    let expected = BTreeMap::from([
        (OWN, RankState::Answered(Position::Completed.into())),
        (1, RankState::Stopped),
    ]);
    assert_eq!(step(&mut investigations, 1, 3 * MS), NextStep::Judge(expected));
}

#[test]
fn all_overdue_operations_are_asked_about_at_once() {
    let mut investigations = Investigations::new(THRESHOLD);
    for seq in 1..=20 {
        let query = seq as u32;
        assert_eq!(step(&mut investigations, seq, MS), NextStep::Ask { query });
        assert_eq!(step(&mut investigations, seq, 2 * MS), NextStep::Wait);
    }
    investigations.hear(7, 1, RankState::Stopped, 3 * MS);
    let expected = BTreeMap::from([
        (OWN, RankState::Answered(Position::Completed.into())),
        (1, RankState::Stopped),
    ]);
    assert_eq!(step(&mut investigations, 7, 3 * MS), NextStep::Judge(expected));
    assert_eq!(
        conclude(&mut investigations, 7, None, 3 * MS),
        Conclusion::Nothing
    );
    // Each rests by itself.
    assert_eq!(
        step(&mut investigations, 7, 4 * MS),
        NextStep::Rest(REST - Duration::from_millis(1))
    );
    let look = NextStep::CheckHealth {
        query: 8,
        ranks: vec![1],
    };
    assert_eq!(step(&mut investigations, 8, 250 * MS), look);
    assert_eq!(
        step(&mut investigations, 7, 1003 * MS),
        NextStep::Ask { query: 21 }
    );
}

#[test]
fn a_late_rank_hides_no_hang_and_is_named_once() {
    let mut investigations = Investigations::new(THRESHOLD);
    let late = verdict(Cause::NotLaunched, 1, false);
    let stopped = verdict(Cause::RankStopped, 2, true);
    let report = |verdict: &Option<Verdict>| Conclusion::Report(verdict.clone().unwrap());
    assert_eq!(conclude(&mut investigations, 1, late.clone(), MS), report(&late));
    assert_eq!(
        conclude(&mut investigations, 2, stopped.clone(), MS),
        report(&stopped)
    );
    assert_eq!(
        conclude(&mut investigations, 3, late.clone(), MS),
        Conclusion::Nothing
    );
    assert_eq!(
        conclude(&mut investigations, 1, late.clone(), 2 * MS),
        Conclusion::Nothing
    );
    // The third one is not late because of the first one any more.
    investigations.retain(|kept| kept != run(1));
    assert_eq!(
        conclude(&mut investigations, 3, late.clone(), 3 * MS),
        report(&late)
    );
    let hang = verdict(Cause::NotLaunched, 1, true);
    assert_eq!(
        conclude(&mut investigations, 3, hang.clone(), 4 * MS),
        report(&hang),
        "it has become one"
    );
}

#[test]
fn a_verdict_in_doubt_is_asked_about_again() {
    let mut investigations = Investigations::new(THRESHOLD);
    let silent = verdict(Cause::NoAnswer, 1, true);
    assert_eq!(step(&mut investigations, 1, MS), NextStep::Ask { query: 1 });
    assert_eq!(
        conclude(&mut investigations, 1, silent.clone(), 400 * MS),
        Conclusion::Doubt
    );
    // An answer to a question that is closed: it is behind, and that is no second time.
    investigations.hear(0, 1, RankState::Answered(Position::Completed.into()), 500 * MS);
    assert_eq!(
        conclude(&mut investigations, 1, silent.clone(), 800 * MS),
        Conclusion::Doubt
    );
    let reported = conclude(&mut investigations, 1, silent.clone(), 1200 * MS);
    assert_eq!(reported, Conclusion::Report(silent.unwrap()));
    let stuck = verdict(Cause::StuckKernel, 1, true);
    for (at, lost) in [(4000, 0), (4500, 300), (4800, 0)] {
        investigations.lose_time(at * MS, lost * MS);
        assert_eq!(
            conclude(&mut investigations, 2, stuck.clone(), at * MS),
            Conclusion::Doubt,
            "{at}"
        );
    }
    let reported = conclude(&mut investigations, 2, stuck.clone(), 4900 * MS);
    assert_eq!(
        reported,
        Conclusion::Report(stuck.unwrap()),
        "0.6 s, and what was lost"
    );
}

/// A rank that goes on after a stop is asked before the others have come out of what they waited for it in.
#[test]
fn no_rank_is_late_because_another_one_did_not_run() {
    let mut investigations = Investigations::new(THRESHOLD);
    let stopped = verdict(Cause::RankStopped, 1, true);
    let late = verdict(Cause::NotLaunched, 0, false);
    let dead = verdict(Cause::RankDead, 2, true);
    let report = |verdict: &Option<Verdict>| Conclusion::Report(verdict.clone().unwrap());
    assert_eq!(
        conclude(&mut investigations, 1, stopped.clone(), 5000 * MS),
        report(&stopped)
    );
    // It is stopped for longer.
    assert_eq!(
        conclude(&mut investigations, 1, stopped.clone(), 6000 * MS),
        Conclusion::Nothing
    );
    for seq in [1, 2] {
        let after = conclude(&mut investigations, seq, late.clone(), 7999 * MS);
        assert_eq!(after, Conclusion::Nothing, "{seq}");
    }
    assert_eq!(
        step(&mut investigations, 1, 8998 * MS),
        NextStep::Rest(Duration::from_millis(1))
    );
    // The reported verdict stands.
    assert_eq!(
        conclude(&mut investigations, 1, stopped.clone(), 7999 * MS),
        Conclusion::Nothing
    );
    assert_eq!(
        conclude(&mut investigations, 2, dead.clone(), 8000 * MS),
        report(&dead),
        "that is so whoever ran"
    );
    assert_eq!(
        conclude(&mut investigations, 1, late.clone(), 9998 * MS),
        Conclusion::Nothing
    );
    assert_eq!(
        conclude_of(&mut investigations, (3, 7999 * MS), late.clone(), 9998 * MS),
        report(&late),
        "it began when the rank ran again"
    );
    assert_eq!(
        conclude(&mut investigations, 2, late.clone(), 9999 * MS),
        Conclusion::Nothing,
        "of another operation it has been reported"
    );
    investigations.retain(|kept| kept != run(3));
    assert_eq!(
        conclude(&mut investigations, 1, late.clone(), 9999 * MS),
        report(&late)
    );
}

/// One that is busy misses a question now and then.
#[test]
fn a_silent_rank_excuses_others_once() {
    let mut investigations = Investigations::new(THRESHOLD);
    let silent = verdict(Cause::NoAnswer, 1, true);
    let late = verdict(Cause::NotLaunched, 0, false);
    assert_eq!(
        conclude(&mut investigations, 1, silent.clone(), 4000 * MS),
        Conclusion::Doubt
    );
    let reported = conclude(&mut investigations, 1, silent.clone(), 4500 * MS);
    assert_eq!(reported, Conclusion::Report(silent.clone().unwrap()));
    for (at, verdict) in [(5000, &late), (6000, &silent), (6499, &late)] {
        let after = conclude(&mut investigations, 1, verdict.clone(), at * MS);
        assert_eq!(after, Conclusion::Nothing, "{at}");
    }
    let reported = conclude(&mut investigations, 1, late.clone(), 6500 * MS);
    assert_eq!(reported, Conclusion::Report(late.unwrap()));
}

/// A rank that is late may be caught in a message to this one, which is on its way and ends by itself.
#[test]
fn a_deadlock_must_last_and_nothing_may_move() {
    let mut investigations = Investigations::new(THRESHOLD);
    let mismatch = verdict(Cause::MetadataMismatch, 1, true);
    let mut conclude = |at_ms: u64, stood_ms: u64| {
        let blocking = BlockingOperation {
            comm: 1,
            run: run(9),
            since_ns: 5000 * MS,
            awaits_asker_ns: Some(stood_ms * MS),
        };
        let states = BTreeMap::from([(1, RankState::Deadlocked(blocking))]);
        let judged = Judged {
            run: run(1),
            began_ns: 0,
            verdict: mismatch.clone(),
            states: &states,
            asker: OWN,
            rest: REST,
        };
        investigations.conclude(judged, at_ms * MS)
    };
    assert_eq!(
        conclude(1000, 5000),
        Conclusion::Doubt,
        "one answer tells nothing"
    );
    assert_eq!(conclude(1599, 5000), Conclusion::Doubt);
    assert_eq!(conclude(1700, 599), Conclusion::Doubt, "it has moved");
    assert_eq!(conclude(1800, 699), Conclusion::Report(mismatch.clone().unwrap()));
}

#[test]
fn a_rank_that_hears_nobody_asks_more_often() {
    let asked =
        |states: &[RankState]| asked_before_silence_counts(&(0..).zip(states.iter().copied()).collect(), 1);
    let here = RankState::Answered(Position::Completed.into());
    assert_eq!(asked(&[here, here, RankState::Silent]), ASKED);
    assert_eq!(
        asked(&[RankState::Silent, here]),
        ASKED,
        "of one it cannot be told"
    );
    assert_eq!(asked(&[RankState::Silent, here, RankState::Stopped]), ASKED);
    assert_eq!(asked(&[RankState::Silent, here, RankState::Silent]), ASKED_ALIVE);
    assert_eq!(asked(&[here, here, RankState::SilentAlive]), ASKED_ALIVE);
    assert_eq!(
        asked(&[RankState::Silent, here, RankState::SilentAlive, here]),
        ASKED_ALIVE
    );
}
