//! An operation and the table, told.

use std::fmt::Write as _;

use ringsight_output::Printable;
use ringsight_records::Protocol;
use serde_json::{Value, json};

use super::{Done, Operation, Row, Terms};

/// One operation explained: how it was done, if it was, and the rows of the table.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The operation.
    pub operation: Operation,
    /// What was asked of its communicator.
    pub terms: Terms,
    /// How it was done, and how often.
    pub done: Option<(Done, u64)>,
    /// The table.
    pub rows: Vec<Row>,
}

impl Explained {
    /// Whether the table says what was done. It does not for a library of another version, or for other terms.
    #[must_use]
    pub fn agrees(&self) -> bool {
        let Some((done, _)) = self.done else { return true };
        let chosen = self.rows.iter().find(|row| row.chosen.is_some());
        let has_algorithm = |row: &Row| row.algorithm == done.algorithm.name();
        let has_protocol = |row: &Row| row.protocol == done.protocol.name() || self.went_in_lines();
        chosen.is_some_and(|row| has_algorithm(row) && has_protocol(row))
    }

    /// Whether it went in lines of 128 bytes though the table would have it go straight between buffers.
    #[must_use]
    pub fn went_in_lines(&self) -> bool {
        let straight = [Protocol::Simple, Protocol::Push].map(Protocol::name);
        let is_straight = |row: &Row| row.chosen.is_some() && straight.contains(&&*row.protocol);
        let in_lines = self
            .done
            .is_some_and(|(done, _)| done.protocol == Protocol::Ll128);
        in_lines && self.terms.peers && self.rows.iter().any(is_straight)
    }

    /// For people. Rows for other operations are left out.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.operation);
        if let Some((done, times)) = self.done {
            let _ = writeln!(text, "    done {times} times: {done}");
        }
        if self.went_in_lines() {
            text.push_str(
                "    in lines, not straight between buffers: these are not reached by all ranks or do not begin at 16 bytes, or no kernel reduces \
                 such elements among so many ranks there\n",
            );
        }
        let apart = self.terms.apart();
        if !apart.is_empty() {
            let _ = writeln!(
                text,
                "    ranks do not reach each other's memory: {}",
                Printable::from(apart)
            );
        }
        for row in &self.rows {
            let name = format!("{}/{}", row.algorithm, row.protocol);
            let name = Printable::from(&*name);
            match row.chosen {
                Some(channels) => {
                    let s = if channels == 1 { "" } else { "s" };
                    let _ = writeln!(text, "  * {name:<20} taken, {channels} channel{s}");
                }
                None if row.reason.contains("other operations") => {}
                None => {
                    let _ = writeln!(
                        text,
                        "    {name:<20} not taken: {}",
                        Printable::from(&*row.reason)
                    );
                }
            }
        }
        if !self.agrees() {
            text.push_str(
                "    The table does not say what was done: is the library another one, or are its terms?\n",
            );
        }
        text
    }

    /// For machines.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "operation": self.operation.function.name(),
            "bytes": self.operation.bytes,
            "data_type": self.operation.data_type.name(),
            "reduction": self.operation.reduce_op.name(),
            "ranks": self.operation.ranks,
            "registered": self.operation.registered,
            "captured": self.operation.captured,
            "channels": self.terms.channels,
            "slot_bytes": self.terms.slot_bytes,
            "one_shot": self.terms.one_shot,
            "peers": self.terms.peers,
            "apart": Some(self.terms.apart()).filter(|apart| !apart.is_empty()),
            "zero_cta": self.terms.zero_cta,
            "done": self.done.map(|(done, times)| json!({
                "algorithm": done.algorithm.name(),
                "protocol": done.protocol.name(),
                "channels": done.channels,
                "times": times,
            })),
            "agrees": self.agrees(),
            "went_in_lines": self.went_in_lines(),
            "rows": self.rows.iter().map(|row| json!({
                "algorithm": row.algorithm,
                "protocol": row.protocol,
                "chosen": row.chosen.is_some(),
                "channels": row.chosen,
                "reason": row.reason,
            })).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::{
        Algorithm, DataType, Function, Protocol, ReduceOp,
        pages::{APART_BYTES, put_text},
    };

    use super::*;

    #[test]
    fn the_row_that_is_taken_is_marked_and_others_say_why_not() {
        let operation = Operation {
            function: Function::AllReduce,
            bytes: 8,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            ranks: 4,
            registered: Some(false),
            captured: Some(false),
        };
        let done = Done {
            algorithm: Algorithm::Ring,
            protocol: Protocol::Simple,
            channels: 2,
        };
        let row = |algorithm: &str, chosen, reason: &str| Row {
            algorithm: algorithm.to_owned(),
            protocol: "simple".to_owned(),
            chosen,
            reason: reason.to_owned(),
        };
        let mut apart = [0; APART_BYTES];
        put_text(&mut apart, "rank 1: NCCL_P2P_DISABLE is set");
        let explained = Explained {
            operation,
            terms: Terms {
                channels: 2,
                slot_bytes: 1 << 17,
                one_shot: true,
                peers: false,
                apart,
                zero_cta: false,
            },
            done: Some((done, 3)),
            rows: vec![
                row("one_shot", None, "some rank's device has no program of it"),
                row("ring", Some(2), ""),
                row("direct", None, "it is for other operations"),
            ],
        };
        assert!(explained.agrees());
        assert_eq!(
            explained.text(),
            "all_reduce of 8 bytes, float32 sum, 4 ranks, ordinary buffers, eager\n\
             \x20   done 3 times: ring/simple, 2 channels\n\
             \x20   ranks do not reach each other's memory: rank 1: NCCL_P2P_DISABLE is set\n\
             \x20   one_shot/simple      not taken: some rank's device has no program of it\n\
             \x20 * ring/simple          taken, 2 channels\n"
        );
        assert_eq!(explained.json()["rows"][1]["chosen"], true);
        assert_eq!(explained.json()["apart"], "rank 1: NCCL_P2P_DISABLE is set");
        // What may go straight, and did not.
        let mut in_lines = explained.clone();
        in_lines.terms.peers = true;
        in_lines.rows[1].algorithm = "two_shot".to_owned();
        in_lines.rows[1].protocol = "push".to_owned();
        let lines = |algorithm| Done {
            algorithm,
            protocol: Protocol::Ll128,
            channels: 1,
        };
        in_lines.done = Some((lines(Algorithm::TwoShot), 1));
        assert!(in_lines.agrees() && in_lines.text().contains("in lines, not straight"));
        in_lines.done = Some((lines(Algorithm::Ring), 1));
        assert!(!in_lines.agrees());
        let mut other = explained;
        other.rows[1].chosen = None;
        assert!(!other.agrees() && other.text().contains("another one"));
    }
}
