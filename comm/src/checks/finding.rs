//! The rule that decides, from what the ranks called, which ranks are wrong.

use std::collections::{BTreeMap, BTreeSet};

use super::message::{CallsAnswer, Finding};
use crate::op::{Call, Identity};

/// A mismatch as the rank that noticed it knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoticedMismatch {
    /// The rank that noticed it.
    pub(super) by: u32,
    /// Its operation,
    pub(super) identity: Identity,
    /// which came from this call.
    pub(super) call: Call,
    /// The tag that it met instead of its own.
    pub(super) theirs: u32,
}

/// Ranks that made the same call.
struct CallGroup {
    call: Call,
    ranks: Vec<u32>,
}

/// Compares what `ranks` ranks answered after one of them noticed a mismatch.
pub(super) fn compare(
    noticed: &NoticedMismatch,
    answers: &BTreeMap<u32, CallsAnswer>,
    ranks: u32,
) -> Finding {
    let NoticedMismatch {
        by,
        identity,
        call: mine,
        theirs,
    } = *noticed;
    // A mismatch may be noticed at a later operation than the first that differs, on another channel.
    let numbers: BTreeSet<u64> = answers
        .values()
        .flat_map(|answer| answer.calls.iter().map(|(seq, _)| *seq))
        .collect();
    for seq in numbers {
        let groups = groups(answers, seq);
        if groups.len() < 2 {
            continue;
        }
        let sides: Vec<String> = groups
            .iter()
            .map(|group| format!("{} called {}", ranges(&group.ranks), group.call))
            .collect();
        let silent: Vec<u32> = (0..ranks)
            .filter(|rank| !groups.iter().any(|group| group.ranks.contains(rank)))
            .collect();
        let silent = match (identity, silent.is_empty()) {
            (Identity::Collective { .. }, false) => format!(" ({} did not yet call it)", ranges(&silent)),
            _ => String::new(),
        };
        return Finding {
            text: format!("{}: {}{silent}", sides.join(" while "), name(identity.at(seq))),
            wrong: wrong_ranks(&groups),
        };
    }
    // All ranks called the same in the same order, as far as they remember, but another operation met this one.
    let (mut wrong, others): (Vec<u32>, Vec<String>) = answers
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
    wrong.push(by);
    wrong.sort_unstable();
    Finding {
        text: format!("rank {by} called {mine} ({}) while {others}", name(identity)),
        wrong,
    }
}

/// See [`Finding::wrong`].
fn wrong_ranks(groups: &[CallGroup]) -> Vec<u32> {
    let most = groups.iter().map(|group| group.ranks.len()).max().unwrap_or(0);
    let is_largest = |group: &&CallGroup| group.ranks.len() == most;
    let one_is_right = groups.iter().filter(is_largest).count() == 1;
    let wrong = groups.iter().filter(|group| !one_is_right || !is_largest(group));
    let mut ranks: Vec<u32> = wrong.flat_map(|group| group.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    ranks
}

/// Sorted ranks as text: `rank 1`, `ranks 0, 2-3`.
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

/// Ranks by what they called as number `seq`, the lowest rank's group first.
fn groups(answers: &BTreeMap<u32, CallsAnswer>, seq: u64) -> Vec<CallGroup> {
    let mut groups: Vec<CallGroup> = Vec::new();
    for (rank, answer) in answers {
        let Some((_, call)) = answer.calls.iter().find(|(at, _)| *at == seq) else {
            continue;
        };
        match groups.iter_mut().find(|group| group.call.tag() == call.tag()) {
            Some(group) => group.ranks.push(*rank),
            None => groups.push(CallGroup {
                call: *call,
                ranks: vec![*rank],
            }),
        }
    }
    groups
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

    fn answers(counts: &[&[usize]]) -> BTreeMap<u32, CallsAnswer> {
        let calls = |counts: &[usize]| {
            (15..)
                .zip(counts.iter().map(|count| all_reduce(*count)))
                .collect()
        };
        (0..)
            .zip(counts)
            .map(|(rank, counts)| {
                let answer = CallsAnswer {
                    calls: calls(counts),
                    tagged: None,
                };
                (rank, answer)
            })
            .collect()
    }

    fn noticed(by: u32, identity: Identity, call: Call) -> NoticedMismatch {
        NoticedMismatch {
            by,
            identity,
            call,
            theirs: 9,
        }
    }

    #[test]
    fn the_first_operation_that_differs_is_named() {
        let noticed = noticed(3, Identity::Collective { seq: 18 }, all_reduce(4));
        let same = &[1, 2, 1024, 4][..];
        let found = compare(&noticed, &answers(&[same, &[1, 2, 2048, 4], same, same]), 4);
        assert_eq!(found.wrong, [1]);
        assert_eq!(
            found.text,
            "ranks 0, 2-3 called AllReduce(count 1024, float32, sum) while rank 1 called AllReduce(count 2048, float32, \
             sum): collective #17"
        );
        let found = compare(&noticed, &answers(&[same, &[1, 2, 2048, 4], &[1, 2], same]), 4);
        assert_eq!(found.wrong, [1]);
        assert!(
            found
                .text
                .ends_with(": collective #17 (rank 2 did not yet call it)"),
            "{found:?}"
        );
    }

    #[test]
    fn ranks_outside_the_largest_group_are_wrong_and_of_equal_groups_all() {
        let wrong = |counts: &[&[usize]]| {
            let noticed = noticed(0, Identity::Collective { seq: 15 }, all_reduce(1));
            compare(&noticed, &answers(counts), counts.len() as u32).wrong
        };
        assert_eq!(wrong(&[&[2], &[1], &[1]]), [0]);
        assert_eq!(wrong(&[&[1], &[2], &[1], &[3], &[1]]), [1, 3]);
        assert_eq!(wrong(&[&[1], &[2]]), [0, 1]);
        assert_eq!(wrong(&[&[1], &[2], &[2], &[1], &[3]]), [0, 1, 2, 3, 4]);
        // A rank that has not called it yet is not wrong.
        assert_eq!(wrong(&[&[1], &[2], &[]]), [0, 1]);
    }

    #[test]
    fn graphs_that_run_in_another_order_are_named() {
        let (one, other) = (
            Identity::Collective { seq: 1 << 32 | 3 },
            Identity::Collective { seq: 2 << 32 },
        );
        let mut answers = answers(&[&[1], &[1]]);
        answers.get_mut(&1).unwrap().tagged = Some((other, all_reduce(7)));
        let found = compare(&noticed(0, one, all_reduce(4)), &answers, 2);
        assert_eq!(found.wrong, [0, 1]);
        assert_eq!(
            found.text,
            "rank 0 called AllReduce(count 4, float32, sum) (collective #3 of graph 1) while rank 1 called \
             AllReduce(count 7, float32, sum) (collective #0 of graph 2)"
        );
        answers.get_mut(&1).unwrap().tagged = None;
        let found = compare(&noticed(0, one, all_reduce(4)), &answers, 2);
        assert!(found.text.contains("nobody remembers"), "{found:?}");
        assert_eq!(found.wrong, [0]);
    }
}
