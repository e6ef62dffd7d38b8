//! What the library's table of algorithms rests on: each operation in each way that there is, over sizes, and what the table takes.

use std::{collections::BTreeMap, fmt::Write as _, fs, time::Duration};

use anyhow::{Context as _, Result};
use serde::Serialize;

use super::{
    super::{
        goals,
        step::{Steps, Verdict},
    },
    driver::driver,
};

/// Operations as the driver calls them, with the algorithm by which one kernel among peers does what is long.
const OPERATIONS: [(&str, &str); 7] = [
    ("all_reduce", "two_shot"),
    ("all_gather", "direct"),
    ("reduce_scatter", "direct"),
    ("alltoall", "direct"),
    ("broadcast", "direct"),
    ("reduce", "direct"),
    ("sendrecv", "direct"),
];
/// Sizes of a run: the greatest, the factor between two, the least; bytes.
const MOST: u64 = 128 << 20;
const FACTOR: u64 = 2;
const LEAST: u64 = 8;
/// The most that one shot has memory for, of all ranks together.
const ONE_SHOT: u64 = 512 << 10;
/// Among more than two ranks these go in two shots, or round a ring, once they are longer than that, all ranks together.
const ROOTED: [&str; 2] = ["broadcast", "reduce"];
const ROOTED_DIRECT: u64 = 1 << 20;
/// What the table takes may be so much slower than the best way before it is marked: as much as two runs differ.
const TOLERANCE: f64 = 1.05;

/// One time.
#[derive(Clone, Debug, Serialize)]
struct Timed {
    ranks: usize,
    operation: String,
    bytes: u64,
    /// `algorithm/protocol`, or `table`.
    way: String,
    /// Of an operation in a graph of 20 up to 4 MiB; of longer ones, eager and back to back.
    micros: f64,
}

/// A way, and what makes the library take it.
struct Way {
    name: String,
    most: u64,
    variables: Vec<(&'static str, String)>,
}

/// The ways of an operation among so many ranks, and at first that of the table.
fn ways(operation: &str, algorithm: &str, ranks: usize) -> Vec<Way> {
    let way = |algorithm: &str, protocol: &str, most| Way {
        name: format!("{algorithm}/{protocol}"),
        most,
        variables: vec![
            ("RINGSIGHT_ALGO", algorithm.to_owned()),
            ("RINGSIGHT_PROTO", protocol.to_owned()),
            // As soon as it can.
            ("RINGSIGHT_STRAIGHT_BYTES", "1".to_owned()),
            ("RINGSIGHT_PUSH_BYTES", "1".to_owned()),
        ],
    };
    let mut all = vec![Way {
        name: "table".to_owned(),
        most: MOST,
        variables: Vec::new(),
    }];
    if operation == "all_reduce" {
        all.push(way("one_shot", "ll", ONE_SHOT / ranks as u64));
        all.push(way(algorithm, "push", MOST));
    }
    if ROOTED.contains(&operation) && ranks > 2 {
        all.push(way(algorithm, "ll128", ROOTED_DIRECT / ranks as u64));
        all.extend([way("two_shot", "ll128", MOST), way("two_shot", "simple", MOST)]);
        all.push(way("ring", "simple", MOST));
    } else {
        all.extend([way(algorithm, "ll128", MOST), way(algorithm, "simple", MOST)]);
    }
    all
}

/// The rows that the driver prints.
fn parse(said: &str, ranks: usize, way: &str) -> Vec<Timed> {
    said.lines()
        .filter_map(|line| {
            let words: Vec<_> = line.strip_prefix("row ")?.split_whitespace().collect();
            let [operation, _, bytes, ..] = words[..] else {
                return None;
            };
            let after = |name: &str| {
                let at = words.iter().position(|word| *word == name)?;
                words
                    .get(at + 1)?
                    .parse::<f64>()
                    .ok()
                    .filter(|micros| *micros > 0.0)
            };
            Some(Timed {
                ranks,
                operation: operation.to_owned(),
                bytes: bytes.parse().ok()?,
                way: way.to_owned(),
                micros: after("graph_us").or_else(|| after("eager_us"))?,
            })
        })
        .collect()
}

/// For each operation and size the best way, and the table's against it.
fn table(all: &[Timed], ranks: usize) -> String {
    let mut sizes: BTreeMap<(&str, u64), Vec<&Timed>> = BTreeMap::new();
    for timed in all.iter().filter(|timed| timed.ranks == ranks) {
        sizes
            .entry((&timed.operation, timed.bytes))
            .or_default()
            .push(timed);
    }
    let mut text = format!(
        "{ranks} GPUs, float sum, out of place, us: the best way, what the table takes, and the others\n{:<15} {:>8}  {:<16} {:>10}  {:>10}\n",
        "operation", "size", "best", "us", "table"
    );
    for ((operation, bytes), times) in sizes {
        let (chosen, ways): (Vec<&Timed>, Vec<&Timed>) =
            times.into_iter().partition(|timed| timed.way == "table");
        let Some(best) = ways.iter().min_by(|a, b| a.micros.total_cmp(&b.micros)) else {
            continue;
        };
        let chosen = chosen.first().map(|timed| timed.micros);
        let others: String = ways
            .iter()
            .filter(|way| way.way != best.way)
            .map(|way| format!("  {} {:.2}", way.way, way.micros))
            .collect();
        let _ = writeln!(
            text,
            "{operation:<15} {:>8}  {:<16} {:>10.2}  {:>10}{}{others}",
            goals::size(bytes),
            best.way,
            best.micros,
            chosen.map_or_else(|| "-".to_owned(), |micros| format!("{micros:.2}")),
            if chosen.is_some_and(|micros| micros > best.micros * TOLERANCE) {
                "  SLOWER"
            } else {
                ""
            },
        );
    }
    text
}

fn judge(said: &str) -> Verdict {
    if said.lines().any(|line| line.contains("FAILED")) {
        return Err("it says FAILED".to_owned());
    }
    match parse(said, 0, "").len() {
        0 => Err("it has printed no time".to_owned()),
        count => Ok(format!("{count} sizes")),
    }
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let mut all = Vec::new();
    for ranks in [2, 4].into_iter().filter(|ranks| *ranks <= steps.host.gpus.len()) {
        for (operation, algorithm) in OPERATIONS {
            for way in ways(operation, algorithm, ranks) {
                let mut command = driver(steps, &format!("bench {ranks} t {} {FACTOR} {LEAST}", way.most));
                command.env("OPS", operation).envs(way.variables);
                let name = format!("{operation}-{ranks}-{}", way.name.replace('/', "-"));
                let said = steps.run(&name, Duration::from_secs(30), command, judge);
                all.extend(said.iter().flat_map(|said| parse(said, ranks, &way.name)));
            }
        }
        steps.note(&format!("{}\n", table(&all, ranks)));
    }
    let file = steps.file("times.jsonl");
    let lines: Result<Vec<_>, _> = all.iter().map(serde_json::to_string).collect();
    let text: String = lines?.into_iter().map(|line| line + "\n").collect();
    fs::write(&file, text).with_context(|| format!("writing {}", file.display()))?;
    steps.figures(serde_json::to_value(&all)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_and_a_table_that_is_slower_is_marked() {
        let said = "init 300 ms\nrow all_reduce 2t 8 eager_us 7.1 host_us 5.2 graph_us 2.8 bus_GBps 0.0\n\
                    row all_reduce 2t 8388608 eager_us 40.5 host_us 5.2 graph_us 0.00 bus_GBps 200\nok\n";
        let ours = parse(said, 2, "table");
        let times: Vec<_> = ours.iter().map(|timed| (timed.bytes, timed.micros)).collect();
        assert_eq!(times, [(8, 2.8), (8 << 20, 40.5)]);
        let mut all = ours;
        all.extend(parse(&said.replace("2.8", "2.7"), 2, "one_shot/ll"));
        all.extend(parse(&said.replace("40.5", "30"), 2, "two_shot/simple"));
        let text = table(&all, 2);
        let row = |size: &str| text.lines().find(|line| line.contains(size)).unwrap();
        assert!(
            row(" 8 B ").contains("one_shot/ll") && !row(" 8 B ").contains("SLOWER"),
            "{text}"
        );
        assert!(
            row(" 8 MiB ").contains("two_shot/simple") && row(" 8 MiB ").contains("SLOWER"),
            "{text}"
        );
        assert!(judge("FAILED bench\nrow").is_err() && judge("ok").is_err());
        assert_eq!(judge(said).unwrap(), "2 sizes");
    }
}
