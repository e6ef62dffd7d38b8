//! The cases, in the words that the guest's program takes.

use crate::random::Random;

/// Work requests of a transfer of 64 steps: each is one with its bytes, and one that tells of them.
const BOUNDARIES: u64 = 128;
const WORK: [&str; 2] = ["sendrecv", "allreduce"];
const FAILURES: [&str; 4] = ["primary", "backup", "primary-backup", "flap"];
const SIDES: [&str; 3] = ["sender", "receiver", "both"];

/// Every case, in the words that the guest's program takes.
pub(super) fn all() -> Vec<String> {
    let mut cases = Vec::new();
    for work in WORK {
        for failure in FAILURES {
            for side in SIDES {
                cases.extend((0..BOUNDARIES).map(|boundary| format!("{work} {failure} {side} {boundary}")));
            }
        }
    }
    cases
}

/// Some of the cases, each equally likely, in an order of the seed (Fisher and Yates).
fn sample(mut cases: Vec<String>, count: usize, seed: u64) -> Vec<String> {
    let mut random = Random::new(seed);
    for last in (1..cases.len()).rev() {
        cases.swap(last, (random.bits() % (last as u64 + 1)) as usize);
    }
    cases.truncate(count);
    cases
}

/// A sample of them, and one with nothing left: there the ranks must fail, and in time.
pub(super) fn some(count: usize, seed: u64) -> Vec<String> {
    let mut cases = sample(all(), count, seed);
    let work = WORK[seed as usize % 2];
    cases.push(format!("{work} all both {}", seed % BOUNDARIES));
    cases
}

/// Transfers over failing links, by a seed: it is in the case, and so are all that it says.
pub(super) fn stress(count: usize, seed: u64) -> Vec<String> {
    let mut random = Random::new(seed);
    let mut draw = |of: &[u64]| of[(random.bits() >> 32) as usize % of.len()];
    let case = |number: u64| {
        let work = WORK[draw(&[0, 0, 1]) as usize];
        // Those of a machine that is busy are right at the edge of what is too short.
        let settings = format!(
            "TIMEOUT_MS={} PROBE_MS={} RESEND_MS={} BACKOFF_MS={} PROBATION_MS={} GIVE_UP_MS={}",
            draw(&[10, 30, 60, 100, 200, 400]),
            draw(&[3, 20, 100]),
            draw(&[1, 20]),
            draw(&[5, 50]),
            draw(&[1, 20]),
            draw(&[1500, 4000]),
        );
        let (steps, flaps, load) = (draw(&[60, 200]), draw(&[0, 1, 2, 4, 8]), draw(&[0, 1, 3, 8]));
        let chaos = seed.wrapping_add(number) % 1_000_000_007;
        format!("{work} chaos both {chaos} loose=1 steps={steps} flaps={flaps} load={load} {settings}")
    };
    (0..count as u64).map(case).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn samples_are_of_all_cases_and_follow_from_the_seed() {
        let all = all();
        let different: BTreeSet<&String> = all.iter().collect();
        assert_eq!((all.len(), different.len()), (3072, 3072));
        let drawn = sample(all.clone(), 24, 7);
        assert_eq!(drawn, sample(all.clone(), 24, 7));
        assert_ne!(drawn, sample(all.clone(), 24, 8));
        assert!(drawn.iter().all(|case| different.contains(case)) && drawn.len() == 24);
    }
}
