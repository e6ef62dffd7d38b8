//! The text that names the ranks and what they called.

use std::collections::{BTreeMap, BTreeSet};

use super::{Call, calls::Identity, message::Answer};

/// One kind of call, and the ranks that made it.
struct Camp {
    call: Call,
    ranks: Vec<u32>,
}

/// What `ranks` ranks did, by their answers: `seen` is where rank `by` noticed, and the tag that it did not expect.
pub(super) fn text(
    (by, seen, theirs): (u32, (Identity, Call), u32),
    answers: &BTreeMap<u32, Answer>,
    ranks: u32,
) -> String {
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
        return format!("{}: {}{silent}", sides.join(" while "), name(identity.at(seq)));
    }
    // All called the same in the same order, as far as they remember, but another operation met this one.
    let others: Vec<String> = answers
        .iter()
        .filter(|(rank, _)| **rank != by)
        .filter_map(|(rank, answer)| {
            let (identity, call) = answer.tagged?;
            Some(format!("rank {rank} called {call} ({})", name(identity)))
        })
        .collect();
    let others = match others.is_empty() {
        true => format!("another rank does something that nobody remembers (tag {theirs:#010x})"),
        false => others.join(" and "),
    };
    format!("rank {by} called {mine} ({}) while {others}", name(identity))
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
        let found = text((3, seen, 9), &answers(&[same, &[1, 2, 2048, 4], same, same]), 4);
        assert_eq!(
            found,
            "ranks 0, 2-3 called AllReduce(count 1024, float32, sum) while rank 1 called AllReduce(count 2048, float32, \
             sum): collective #17"
        );
        let found = text(
            (3, seen, 9),
            &answers(&[same, &[1, 2, 2048, 4], &[1, 2], same]),
            4,
        );
        assert!(
            found.ends_with(": collective #17 (rank 2 did not yet call it)"),
            "{found}"
        );
    }

    #[test]
    fn graphs_that_run_in_different_order() {
        let (one, other) = (
            Identity::Collective { seq: 1 << 32 | 3 },
            Identity::Collective { seq: 2 << 32 },
        );
        let mut answers = answers(&[&[1], &[1]]);
        answers.get_mut(&1).unwrap().tagged = Some((other, all_reduce(7)));
        assert_eq!(
            text((0, (one, all_reduce(4)), 9), &answers, 2),
            "rank 0 called AllReduce(count 4, float32, sum) (collective #3 of graph 1) while rank 1 called \
             AllReduce(count 7, float32, sum) (collective #0 of graph 2)"
        );
        answers.get_mut(&1).unwrap().tagged = None;
        let found = text((0, (one, all_reduce(4)), 9), &answers, 2);
        assert!(found.contains("nobody remembers"), "{found}");
    }
}
