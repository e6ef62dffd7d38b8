//! Which rank arrived last, as ranks on other nodes find out without a common clock.

mod common;

use std::collections::BTreeMap;

use common::{
    processes::{outputs, run_processes, start_processes},
    variables::LATE_RANK,
};

/// What one rank wrote.
#[derive(Default)]
struct Told {
    /// By operation, when the rank arrived.
    arrived_ns: BTreeMap<u64, u64>,
    /// By operation: rank, lag, wait, uncertainty, unknown ranks.
    arrivals: BTreeMap<u64, [u64; 5]>,
}

impl Told {
    fn parse(text: &str) -> Self {
        let mut told = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let numbers = || words[1..].iter().map(|word| word.parse::<u64>().unwrap());
            match words[0] {
                "operation" => {
                    let numbers: Vec<u64> = numbers().collect();
                    told.arrived_ns.insert(numbers[0], numbers[1]);
                }
                "arrival" => {
                    let numbers: Vec<u64> = numbers().collect();
                    told.arrivals.insert(numbers[0], numbers[1..].try_into().unwrap());
                }
                _ => {}
            }
        }
        told
    }
}

/// The rank that arrived last and its lag against the others' median.
fn truth(arrived_ns: &[u64]) -> (usize, u64) {
    let last = (0..arrived_ns.len()).max_by_key(|at| arrived_ns[*at]).unwrap();
    let mut others = arrived_ns.to_vec();
    let late = others.swap_remove(last);
    others.sort_unstable();
    let middle = others.len() / 2;
    let median = if others.len() % 2 == 1 {
        others[middle]
    } else {
        others[middle - 1].midpoint(others[middle])
    };
    (last, late - median)
}

/// Runs ranks that each are on a node of their own, and holds what each of them says against all ranks' own times: the processes
/// of this host share a clock, which the library does not know.
fn all_ranks_name_the_late_one(ranks: usize, late: usize) {
    let started = start_processes("arrivals::late", ranks, ranks, &[(LATE_RANK, &late.to_string())]);
    let told: Vec<Told> = outputs(started)
        .iter()
        .map(|output| {
            let text = common::processes::text(output);
            assert!(output.status.success(), "{text}");
            Told::parse(&text)
        })
        .collect();
    let mut named = 0;
    for (rank, of_rank) in told.iter().enumerate() {
        for (seq, [last, lag_ns, wait_ns, uncertainty_ns, unknown]) in &of_rank.arrivals {
            let arrived_ns: Vec<u64> = told.iter().map(|told| told.arrived_ns[seq]).collect();
            let (true_last, true_lag_ns) = truth(&arrived_ns);
            let what = format!(
                "rank {rank}, operation {seq}: rank {last} by {lag_ns} ± {uncertainty_ns} ns, waited {wait_ns} ns; {arrived_ns:?}"
            );
            // On a busy machine a rank's thread may hear of its device too late for every question.
            if *unknown > 0 {
                continue;
            }
            let off_ns = lag_ns.abs_diff(true_lag_ns);
            assert!(off_ns <= *uncertainty_ns, "{what}, and it was {true_lag_ns} ns");
            // What a busy machine adds to a round trip makes a lag uncertain, which is said, and not wrong.
            if *uncertainty_ns > 1_000_000 {
                continue;
            }
            assert!(off_ns <= 1_000_000.max(true_lag_ns / 10), "{what}, {true_lag_ns}");
            if true_lag_ns > 2 * uncertainty_ns {
                // Of two ranks that are nearly as late either may be named.
                let second_by_ns = arrived_ns[true_last] - arrived_ns[*last as usize];
                assert!(second_by_ns <= 2 * uncertainty_ns, "{what}");
                named += usize::from(*last as usize == late);
            }
        }
    }
    // Of twelve operations on each rank: a busy machine may make others late, and some answers slow.
    assert!(
        named >= 6 * ranks,
        "{named} times rank {late} was named by {ranks} ranks"
    );
}

#[test]
fn each_of_two_ranks_knows_which_was_late() {
    all_ranks_name_the_late_one(2, 1);
}

#[test]
fn each_of_four_ranks_knows_which_was_late() {
    all_ranks_name_the_late_one(4, 2);
}

#[test]
fn nobody_asks_while_nobody_reads() {
    run_processes("arrivals::unread", 2, 2);
}
