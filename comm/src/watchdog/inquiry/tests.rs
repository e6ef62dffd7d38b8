use super::*;
use crate::{checks::Identity, watchdog::position::HeldUp};

const MS: u64 = 1_000_000;
const THRESHOLD: Duration = Duration::from_secs(2);
const REST: Duration = Duration::from_secs(1);
/// The rank that asks.
const OWN: u32 = 0;

fn run(seq: u64) -> Run {
    Run {
        identity: Identity::Collective { seq },
        replay: 0,
    }
}

fn verdict(cause: Cause, culprit: u32, hang: bool) -> Option<Verdict> {
    Some(Verdict {
        hang,
        ..Verdict::hang(cause, culprit)
    })
}

fn step(inquiry: &mut Inquiry, seq: u64, now: u64) -> Step {
    inquiry.step(run(seq), &[OWN, 1], (OWN, Position::Done.into()), now)
}

fn conclude(inquiry: &mut Inquiry, seq: u64, verdict: Option<Verdict>, now: u64) -> Conclusion {
    conclude_of(inquiry, (seq, 0), verdict, now)
}

/// Of one that began then.
fn conclude_of(
    inquiry: &mut Inquiry,
    (seq, began): (u64, u64),
    verdict: Option<Verdict>,
    now: u64,
) -> Conclusion {
    let mut heard = BTreeMap::from([(OWN, Heard::Silent), (1, Heard::Silent)]);
    if let Some(verdict) = verdict
        .as_ref()
        .filter(|verdict| verdict.cause == Cause::RankStopped)
    {
        heard.insert(verdict.culprit, Heard::Stopped);
    }
    inquiry.conclude((run(seq), began), verdict, (OWN, &heard), REST, now)
}

#[test]
fn all_that_is_overdue_is_asked_about_at_once() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    for seq in 1..=20 {
        let query = seq as u32;
        assert_eq!(step(&mut inquiry, seq, MS), Step::Ask { query });
        assert_eq!(step(&mut inquiry, seq, 2 * MS), Step::Wait);
    }
    inquiry.heard(7, 1, Heard::Stopped, 3 * MS);
    let expected = BTreeMap::from([(OWN, Heard::Answer(Position::Done.into())), (1, Heard::Stopped)]);
    assert_eq!(step(&mut inquiry, 7, 3 * MS), Step::Heard(expected));
    assert_eq!(conclude(&mut inquiry, 7, None, 3 * MS), Conclusion::Nothing);
    // Each rests by itself.
    assert_eq!(
        step(&mut inquiry, 7, 4 * MS),
        Step::Rest(REST - Duration::from_millis(1))
    );
    let look = Step::Look {
        query: 8,
        ranks: vec![1],
    };
    assert_eq!(step(&mut inquiry, 8, 250 * MS), look);
    assert_eq!(step(&mut inquiry, 7, 1003 * MS), Step::Ask { query: 21 });
}

#[test]
fn what_is_late_hides_no_hang_and_who_holds_up_several_is_named_once() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    let late = verdict(Cause::NotLaunched, 1, false);
    let stopped = verdict(Cause::RankStopped, 2, true);
    let say = |verdict: &Option<Verdict>| Conclusion::Say(verdict.clone().unwrap());
    assert_eq!(conclude(&mut inquiry, 1, late.clone(), MS), say(&late));
    assert_eq!(conclude(&mut inquiry, 2, stopped.clone(), MS), say(&stopped));
    assert_eq!(conclude(&mut inquiry, 3, late.clone(), MS), Conclusion::Nothing);
    assert_eq!(
        conclude(&mut inquiry, 1, late.clone(), 2 * MS),
        Conclusion::Nothing
    );
    // The third one is not late because of the first one any more.
    inquiry.keep(|kept| kept != run(1));
    assert_eq!(conclude(&mut inquiry, 3, late.clone(), 3 * MS), say(&late));
    let hang = verdict(Cause::NotLaunched, 1, true);
    assert_eq!(
        conclude(&mut inquiry, 3, hang.clone(), 4 * MS),
        say(&hang),
        "it has become one"
    );
}

#[test]
fn what_may_be_otherwise_is_asked_again() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    let silent = verdict(Cause::NoAnswer, 1, true);
    assert_eq!(step(&mut inquiry, 1, MS), Step::Ask { query: 1 });
    assert_eq!(
        conclude(&mut inquiry, 1, silent.clone(), 400 * MS),
        Conclusion::Doubt
    );
    // An answer to a question that is closed: it is behind, and that is no second time.
    inquiry.heard(0, 1, Heard::Answer(Position::Done.into()), 500 * MS);
    assert_eq!(
        conclude(&mut inquiry, 1, silent.clone(), 800 * MS),
        Conclusion::Doubt
    );
    let said = conclude(&mut inquiry, 1, silent.clone(), 1200 * MS);
    assert_eq!(said, Conclusion::Say(silent.unwrap()));
    let stuck = verdict(Cause::StuckKernel, 1, true);
    for (at, lost) in [(4000, 0), (4500, 300), (4800, 0)] {
        inquiry.lose(at * MS, lost * MS);
        assert_eq!(
            conclude(&mut inquiry, 2, stuck.clone(), at * MS),
            Conclusion::Doubt,
            "{at}"
        );
    }
    let said = conclude(&mut inquiry, 2, stuck.clone(), 4900 * MS);
    assert_eq!(said, Conclusion::Say(stuck.unwrap()), "0.6 s, and what was lost");
}

/// A rank that goes on after a stop is asked before the others have come out of what they waited for it in.
#[test]
fn nobody_is_late_because_another_rank_did_not_run() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    let stopped = verdict(Cause::RankStopped, 1, true);
    let late = verdict(Cause::NotLaunched, 0, false);
    let dead = verdict(Cause::RankDead, 2, true);
    let say = |verdict: &Option<Verdict>| Conclusion::Say(verdict.clone().unwrap());
    assert_eq!(
        conclude(&mut inquiry, 1, stopped.clone(), 5000 * MS),
        say(&stopped)
    );
    // It is stopped for longer.
    assert_eq!(
        conclude(&mut inquiry, 1, stopped.clone(), 6000 * MS),
        Conclusion::Nothing
    );
    for seq in [1, 2] {
        let after = conclude(&mut inquiry, seq, late.clone(), 7999 * MS);
        assert_eq!(after, Conclusion::Nothing, "{seq}");
    }
    assert_eq!(
        step(&mut inquiry, 1, 8998 * MS),
        Step::Rest(Duration::from_millis(1))
    );
    // What has been said stands.
    assert_eq!(
        conclude(&mut inquiry, 1, stopped.clone(), 7999 * MS),
        Conclusion::Nothing
    );
    assert_eq!(
        conclude(&mut inquiry, 2, dead.clone(), 8000 * MS),
        say(&dead),
        "that is so whoever ran"
    );
    assert_eq!(
        conclude(&mut inquiry, 1, late.clone(), 9998 * MS),
        Conclusion::Nothing
    );
    assert_eq!(
        conclude_of(&mut inquiry, (3, 7999 * MS), late.clone(), 9998 * MS),
        say(&late),
        "it began when the rank ran again"
    );
    assert_eq!(
        conclude(&mut inquiry, 2, late.clone(), 9999 * MS),
        Conclusion::Nothing,
        "of another operation it has been said"
    );
    inquiry.keep(|kept| kept != run(3));
    assert_eq!(conclude(&mut inquiry, 1, late.clone(), 9999 * MS), say(&late));
}

/// One that is busy misses a question now and then.
#[test]
fn a_rank_that_does_not_answer_excuses_others_once() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    let silent = verdict(Cause::NoAnswer, 1, true);
    let late = verdict(Cause::NotLaunched, 0, false);
    assert_eq!(
        conclude(&mut inquiry, 1, silent.clone(), 4000 * MS),
        Conclusion::Doubt
    );
    let said = conclude(&mut inquiry, 1, silent.clone(), 4500 * MS);
    assert_eq!(said, Conclusion::Say(silent.clone().unwrap()));
    for (at, verdict) in [(5000, &late), (6000, &silent), (6499, &late)] {
        let after = conclude(&mut inquiry, 1, verdict.clone(), at * MS);
        assert_eq!(after, Conclusion::Nothing, "{at}");
    }
    let said = conclude(&mut inquiry, 1, late.clone(), 6500 * MS);
    assert_eq!(said, Conclusion::Say(late.unwrap()));
}

/// A rank that is late may be caught in a message to this one, which is on its way and ends by itself.
#[test]
fn ranks_wait_for_each_other_if_that_lasts_and_nothing_moves() {
    let mut inquiry = Inquiry::of(THRESHOLD);
    let mismatch = verdict(Cause::MetadataMismatch, 1, true);
    let mut conclude = |at_ms: u64, stood_ms: u64| {
        let held = HeldUp {
            comm: 1,
            run: run(9),
            since_ns: 5000 * MS,
            bars_ns: Some(stood_ms * MS),
        };
        let heard = BTreeMap::from([(1, Heard::Crossed(held))]);
        inquiry.conclude((run(1), 0), mismatch.clone(), (OWN, &heard), REST, at_ms * MS)
    };
    assert_eq!(
        conclude(1000, 5000),
        Conclusion::Doubt,
        "one answer tells nothing"
    );
    assert_eq!(conclude(1599, 5000), Conclusion::Doubt);
    assert_eq!(conclude(1700, 599), Conclusion::Doubt, "it has moved");
    assert_eq!(conclude(1800, 699), Conclusion::Say(mismatch.clone().unwrap()));
}

#[test]
fn who_hears_nobody_may_be_deaf() {
    let asked = |heard: &[Heard]| asked_before_it_counts(&(0..).zip(heard.iter().copied()).collect(), 1);
    let here = Heard::Answer(Position::Done.into());
    assert_eq!(asked(&[here, here, Heard::Silent]), ASKED);
    assert_eq!(asked(&[Heard::Silent, here]), ASKED, "of one it cannot be told");
    assert_eq!(asked(&[Heard::Silent, here, Heard::Stopped]), ASKED);
    assert_eq!(asked(&[Heard::Silent, here, Heard::Silent]), ASKED_ALIVE);
    assert_eq!(asked(&[here, here, Heard::Busy]), ASKED_ALIVE);
    assert_eq!(asked(&[Heard::Silent, here, Heard::Busy, here]), ASKED_ALIVE);
}
