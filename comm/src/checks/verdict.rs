//! Who called what: the text that names the ranks, and those that are wrong.

use std::collections::{BTreeMap, BTreeSet};

use super::message::Answer;
use crate::op::{Call, Identity};

/// One kind of call, and the ranks that made it.
struct Camp {
    call: Call,
    ranks: Vec<u32>,
}

/// What has been found out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Finding {
    /// Who called what.
    pub(super) text: String,
    /// The ranks that called something else than the most did, in rank order. Of as many against as many nobody can say which is
    /// wrong: then all of these.
    pub(super) odd: Vec<u32>,
}

/// What `ranks` ranks did, by their answers: `seen` is where rank `by` noticed, and the tag that it did not expect.
pub(super) fn find(
    (by, seen, theirs): (u32, (Identity, Call), u32),
    answers: &BTreeMap<u32, Answer>,
    ranks: u32,
) -> Finding {
    let (identity, mine) = seen;
    // Operations after the first that differs may be noticed before it, on another channel: look for the first.
    let numbers: BTreeSet<u64> = answers
        .values()
        .flat_map(|answer| answer.calls.iter().map(|(seq, _)| *seq))
        .collect();
    for seq in numbers {
        let camps = camps(answers, seq);
        if camps.len() < 2 {
            continue;
        }
        let sides: Vec<String> = camps
            .iter()
            .map(|camp| format!("{} called {}", ranges(&camp.ranks), camp.call))
            .collect();
        let silent: Vec<u32> = (0..ranks)
            .filter(|rank| !camps.iter().any(|camp| camp.ranks.contains(rank)))
            .collect();
        let silent = match (identity, silent.is_empty()) {
            (Identity::Collective { .. }, false) => format!(" ({} did not yet call it)", ranges(&silent)),
            _ => String::new(),
        };
        return Finding {
            text: format!("{}: {}{silent}", sides.join(" while "), name(identity.at(seq))),
            odd: odd(&camps),
        };
    }
    // All called the same in the same order, as far as they remember, but another operation met this one.
    let (mut odd, others): (Vec<u32>, Vec<String>) = answers
        .iter()
        .filter(|(rank, _)| **rank != by)
        .filter_map(|(rank, answer)| {
            let (identity, call) = answer.tagged?;
            Some((*rank, format!("rank {rank} called {call} ({})", name(identity))))
        })
        .unzip();
    let others = match others.is_empty() {
        true => format!("another rank does something that nobody remembers (tag {theirs:#010x})"),
        false => others.join(" and "),
    };
    odd.push(by);
    odd.sort_unstable();
    Finding {
        text: format!("rank {by} called {mine} ({}) while {others}", name(identity)),
        odd,
    }
}

/// See [`Finding::odd`].
fn odd(camps: &[Camp]) -> Vec<u32> {
    let most = camps.iter().map(|camp| camp.ranks.len()).max().unwrap_or(0);
    let is_large = |camp: &&Camp| camp.ranks.len() == most;
    let one_is_right = camps.iter().filter(is_large).count() == 1;
    let wrong = camps.iter().filter(|camp| !one_is_right || !is_large(camp));
    let mut ranks: Vec<u32> = wrong.flat_map(|camp| camp.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    ranks
}

/// "rank 1", "ranks 0, 2-3" for sorted ranks.
fn ranges(ranks: &[u32]) -> String {
    let runs = ranks.chunk_by(|a, b| a + 1 == *b);
    let texts: Vec<String> = runs
        .map(|run| match run {
            [first, .., last] => format!("{first}-{last}"),
            _ => run.iter().map(u32::to_string).collect(),
        })
        .collect();
    let plural = if ranks.len() > 1 { "s" } else { "" };
    format!("rank{plural} {}", texts.join(", "))
}

/// Ranks by what they called as number `seq`, the lowest rank's first.
fn camps(answers: &BTreeMap<u32, Answer>, seq: u64) -> Vec<Camp> {
    let mut camps: Vec<Camp> = Vec::new();
    for (rank, answer) in answers {
        let Some((_, call)) = answer.calls.iter().find(|(at, _)| *at == seq) else {
            continue;
        };
        match camps.iter_mut().find(|camp| camp.call.tag() == call.tag()) {
            Some(camp) => camp.ranks.push(*rank),
            None => camps.push(Camp {
                call: *call,
                ranks: vec![*rank],
            }),
        }
    }
    camps
}

fn name(identity: Identity) -> String {
    let seq = identity.seq();
    let number = match (seq >> 32, seq & u64::from(u32::MAX)) {
        (0, number) => format!("#{number}"),
        (graph, number) => format!("#{number} of graph {graph}"),
    };
    match identity {
        Identity::Collective { .. } => format!("collective {number}"),
        Identity::Message { from, to, .. } => format!("message {number} from rank {from} to rank {to}"),
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::{DataType, Function, ReduceOp};

    use super::*;

    fn all_reduce(count: usize) -> Call {
        Call {
            function: Function::AllReduce,
            count,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            peer: None,
            place: None,
        }
    }

    fn answers(counts: &[&[usize]]) -> BTreeMap<u32, Answer> {
        let calls = |counts: &[usize]| {
            (15..)
                .zip(counts.iter().map(|count| all_reduce(*count)))
                .collect()
        };
        (0..)
            .zip(counts)
            .map(|(rank, counts)| {
                let answer = Answer {
                    calls: calls(counts),
                    tagged: None,
                };
                (rank, answer)
            })
            .collect()
    }

    #[test]
    fn the_first_operation_that_differs_is_named() {
        let seen = (Identity::Collective { seq: 18 }, all_reduce(4));
        let same = &[1, 2, 1024, 4][..];
        let found = find((3, seen, 9), &answers(&[same, &[1, 2, 2048, 4], same, same]), 4);
        assert_eq!(found.odd, [1]);
        assert_eq!(
            found.text,
            "ranks 0, 2-3 called AllReduce(count 1024, float32, sum) while rank 1 called AllReduce(count 2048, float32, \
             sum): collective #17"
        );
        let found = find(
            (3, seen, 9),
            &answers(&[same, &[1, 2, 2048, 4], &[1, 2], same]),
            4,
        );
        assert_eq!(found.odd, [1]);
        assert!(
            found
                .text
                .ends_with(": collective #17 (rank 2 did not yet call it)"),
            "{found:?}"
        );
    }

    #[test]
    fn whoever_is_not_of_the_most_is_wrong_and_of_equals_nobody_knows() {
        let odd = |counts: &[&[usize]]| {
            let seen = (Identity::Collective { seq: 15 }, all_reduce(1));
            find((0, seen, 9), &answers(counts), counts.len() as u32).odd
        };
        assert_eq!(odd(&[&[2], &[1], &[1]]), [0]);
        assert_eq!(odd(&[&[1], &[2], &[1], &[3], &[1]]), [1, 3]);
        assert_eq!(odd(&[&[1], &[2]]), [0, 1]);
        assert_eq!(odd(&[&[1], &[2], &[2], &[1], &[3]]), [0, 1, 2, 3, 4]);
        // A rank that has not called it yet is not wrong.
        assert_eq!(odd(&[&[1], &[2], &[]]), [0, 1]);
    }

    #[test]
    fn graphs_that_run_in_different_order() {
        let (one, other) = (
            Identity::Collective { seq: 1 << 32 | 3 },
            Identity::Collective { seq: 2 << 32 },
        );
        let mut answers = answers(&[&[1], &[1]]);
        answers.get_mut(&1).unwrap().tagged = Some((other, all_reduce(7)));
        let found = find((0, (one, all_reduce(4)), 9), &answers, 2);
        assert_eq!(found.odd, [0, 1]);
        assert_eq!(
            found.text,
            "rank 0 called AllReduce(count 4, float32, sum) (collective #3 of graph 1) while rank 1 called \
             AllReduce(count 7, float32, sum) (collective #0 of graph 2)"
        );
        answers.get_mut(&1).unwrap().tagged = None;
        let found = find((0, (one, all_reduce(4)), 9), &answers, 2);
        assert!(found.text.contains("nobody remembers"), "{found:?}");
        assert_eq!(found.odd, [0]);
    }
}
