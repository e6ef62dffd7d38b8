//! The basis of the library's table of algorithms: times of each operation by each algorithm over sizes, beside what the table takes.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::Result;
use fs_err as fs;
use serde::Serialize;

use super::{
    super::{
        goals,
        step::{StepResult, Steps},
    },
    driver::driver,
};

/// Operations as the driver calls them, with the algorithm by which one kernel among peers does what is long.
const OPERATIONS: [(&str, &str); 9] = [
    ("all_reduce", "two_shot"),
    ("all_gather", "direct"),
    ("reduce_scatter", "direct"),
    ("alltoall", "direct"),
    ("broadcast", "direct"),
    ("reduce", "direct"),
    ("gather", "direct"),
    ("scatter", "direct"),
    ("sendrecv", "direct"),
];
/// Types, as the driver and as the library call them; those behind the first are only reduced, which their kernels do otherwise.
const TYPES: [(&str, &str); 2] = [("f32", "float32"), ("bf16", "bfloat16")];
const REDUCED: [&str; 3] = ["all_reduce", "reduce_scatter", "reduce"];
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

/// Where it was measured, and what.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Setting {
    gpu: String,
    driver: String,
    ranks: usize,
    #[serde(rename = "type")]
    data_type: &'static str,
    /// `algorithm/protocol`, or `table`.
    way: String,
}

/// One time.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Timed {
    #[serde(flatten)]
    setting: Setting,
    operation: String,
    bytes: u64,
    /// Of an operation in a graph of 20, up to 4 MiB; else eager and back to back.
    graph: bool,
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

/// The rows that the driver prints: a time eager and, where it has one, one captured.
fn parse(said: &str, setting: &Setting) -> Vec<Timed> {
    let row = |line: &str| {
        let words: Vec<_> = line.strip_prefix("row ")?.split_whitespace().collect();
        let [operation, _, bytes, ..] = words[..] else {
            return None;
        };
        let after = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            let micros = words.get(at + 1)?.parse::<f64>().ok();
            micros.filter(|micros| *micros > 0.0)
        };
        let bytes: u64 = bytes.parse().ok()?;
        let timed = |graph, micros| Timed {
            setting: setting.clone(),
            operation: operation.to_owned(),
            bytes,
            graph,
            micros,
        };
        let eager = after("eager_us").map(|micros| timed(false, micros));
        let captured = after("graph_us").map(|micros| timed(true, micros));
        Some(eager.into_iter().chain(captured))
    };
    said.lines().filter_map(row).flatten().collect()
}

/// For each operation and size the best way, and the table's against it: by operations in graphs, as far as there are such, for the host's part
/// of an eager one is the same in all ways.
fn table(all: &[Timed], ranks: usize, data_type: &str) -> String {
    let is_asked = |timed: &&Timed| timed.setting.ranks == ranks && timed.setting.data_type == data_type;
    let mut sizes: BTreeMap<(&str, u64), Vec<&Timed>> = BTreeMap::new();
    for timed in all.iter().filter(is_asked) {
        let ways = sizes.entry((&timed.operation, timed.bytes)).or_default();
        match ways.iter().position(|way| way.setting.way == timed.setting.way) {
            Some(at) if timed.graph => ways[at] = timed,
            Some(_) => {}
            None => ways.push(timed),
        }
    }
    let mut text = format!(
        "{ranks} GPUs, {data_type}, sum, out of place, us: the best way, what the table takes, and the others\n{:<15} {:>8}  {:<16} {:>10}  {:>10}\n",
        "operation", "size", "best", "us", "table"
    );
    for ((operation, bytes), times) in sizes {
        let (chosen, ways): (Vec<&Timed>, Vec<&Timed>) =
            times.into_iter().partition(|timed| timed.setting.way == "table");
        let Some(best) = ways.iter().min_by(|a, b| a.micros.total_cmp(&b.micros)) else {
            continue;
        };
        let chosen = chosen.first().map(|timed| timed.micros);
        let others: String = ways
            .iter()
            .filter(|way| way.setting.way != best.setting.way)
            .map(|way| format!("  {} {:.2}", way.setting.way, way.micros))
            .collect();
        let _ = writeln!(
            text,
            "{operation:<15} {:>8}  {:<16} {:>10.2}  {:>10}{}{others}",
            goals::size(bytes),
            best.setting.way,
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

fn judge(said: &str) -> StepResult {
    if said.lines().any(|line| line.contains("FAILED")) {
        return Err("it says FAILED".to_owned());
    }
    match said.lines().filter(|line| line.starts_with("row ")).count() {
        0 => Err("it has printed no time".to_owned()),
        count => Ok(format!("{count} sizes")),
    }
}

/// Name of a GPU and its driver's version, of a line about it.
fn gpu(line: &str) -> (String, String) {
    let (name, driver) = line.rsplit_once(", ").unwrap_or((line, ""));
    (name.to_owned(), driver.to_owned())
}

/// What is measured of one type on so many ranks.
struct Series {
    ranks: usize,
    /// As the driver and as the library call it.
    data_type: (&'static str, &'static str),
    /// Operations, each in the ways that there are.
    operations: Vec<(&'static str, Vec<Way>)>,
    least: u64,
    /// For all runs of the driver.
    variables: &'static [(&'static str, &'static str)],
}

/// Runs of the driver, a line for each size and way, and a table for each series.
fn measure(steps: &mut Steps<'_>, series: Vec<Series>) -> Result<()> {
    let mut all = Vec::new();
    let (gpu, version) = gpu(steps.host.gpus.first().map_or("", String::as_str));
    for Series {
        ranks,
        data_type: (code, data_type),
        operations,
        least,
        variables,
    } in series
    {
        for (operation, ways) in operations {
            for way in ways {
                let mut command = driver(steps, &format!("bench {ranks} t {} {FACTOR} {least}", way.most));
                command
                    .env("OPS", operation)
                    .env("TYPE", code)
                    .envs(variables.iter().copied())
                    .envs(way.variables);
                let mut name = format!("{operation}-{ranks}-{}", way.name.replace(['/', ' '], "-"));
                if code != TYPES[0].0 {
                    name = format!("{name}-{code}");
                }
                let setting = Setting {
                    gpu: gpu.clone(),
                    driver: version.clone(),
                    ranks,
                    data_type,
                    way: way.name,
                };
                let said = steps.run(&name, 30, command, judge);
                all.extend(said.iter().flat_map(|said| parse(said, &setting)));
            }
        }
        steps.note(&format!("{}\n", table(&all, ranks, data_type)));
    }
    let file = steps.file("times.jsonl");
    let lines: Result<Vec<_>, _> = all.iter().map(serde_json::to_string).collect();
    let text: String = lines?.into_iter().map(|line| line + "\n").collect();
    fs::write(&file, text)?;
    steps.figures(serde_json::to_value(&all)?);
    Ok(())
}

/// 2 and 4, as far as there are so many GPUs.
fn numbers_of_ranks(steps: &Steps<'_>) -> impl Iterator<Item = usize> + use<> {
    let gpus = steps.host.gpus.len();
    [2, 4].into_iter().filter(move |ranks| *ranks <= gpus)
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let of_type = |ranks, number: usize| Series {
        ranks,
        data_type: TYPES[number],
        operations: OPERATIONS
            .into_iter()
            .filter(|(operation, _)| number == 0 || REDUCED.contains(operation))
            .map(|(operation, algorithm)| (operation, ways(operation, algorithm, ranks)))
            .collect(),
        least: LEAST,
        variables: &[],
    };
    let series =
        numbers_of_ranks(steps).flat_map(|ranks| (0..TYPES.len()).map(move |number| of_type(ranks, number)));
    measure(steps, series.collect())
}

/// The ways of an operation in windows: what the table takes, kernels alone, and copy engines with pieces of several lengths, where there are pieces.
fn ways_in_windows(operation: &str) -> Vec<Way> {
    const MOST: u64 = 1 << 30;
    let way = |name: &str, variables: &[(&'static str, &str)]| Way {
        name: name.to_owned(),
        most: MOST,
        variables: variables
            .iter()
            .map(|(name, value)| (*name, (*value).to_owned()))
            .collect(),
    };
    let mut all = vec![way("table", &[]), way("kernels", &[("RINGSIGHT_PROTO", "^ce")])];
    if REDUCED.contains(&operation) {
        for mebibytes in [32_u64, 64, 128] {
            let piece = (mebibytes << 20).to_string();
            let variables = [
                ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
                ("RINGSIGHT_ENGINE_PIECE_BYTES", piece.as_str()),
            ];
            all.push(way(&format!("ce {mebibytes} MiB"), &variables));
        }
    } else {
        all.push(way("ce", &[("NCCL_CTA_POLICY", "2")]));
    }
    all
}

pub(super) fn engines(steps: &mut Steps<'_>) -> Result<()> {
    let operations = || {
        ["all_reduce", "reduce_scatter", "all_gather", "alltoall"]
            .map(|operation| (operation, ways_in_windows(operation)))
    };
    let series = numbers_of_ranks(steps).map(|ranks| Series {
        ranks,
        data_type: TYPES[0],
        operations: operations().into(),
        least: 16 << 20,
        variables: &[("WINDOWS", "1")],
    });
    measure(steps, series.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_a_name_of_its_own() {
        let in_windows = ["reduce_scatter", "all_gather"].map(ways_in_windows);
        let all = OPERATIONS
            .iter()
            .flat_map(|(operation, algorithm)| [2, 4].map(|ranks| ways(operation, algorithm, ranks)));
        for ways in all.chain(in_windows) {
            let names: std::collections::HashSet<_> = ways.iter().map(|way| &way.name).collect();
            assert_eq!(names.len(), ways.len());
            // What the others are compared with.
            assert!(ways[0].name == "table" && ways[0].variables.is_empty());
        }
    }

    #[test]
    fn times_are_read_and_a_table_that_is_slower_is_marked() {
        let said = "init 300 ms\nrow all_reduce 2t 8 eager_us 7.1 host_us 5.2 graph_us 2.8 bus_GBps 0.0\n\
                    row all_reduce 2t 8388608 eager_us 40.5 host_us 5.2 graph_us 0.00 bus_GBps 200\nok\n";
        let setting = |way: &str| Setting {
            gpu: "A GPU".to_owned(),
            driver: "1.2".to_owned(),
            ranks: 2,
            data_type: "float32",
            way: way.to_owned(),
        };
        let ours = parse(said, &setting("table"));
        let times: Vec<_> = ours
            .iter()
            .map(|timed| (timed.bytes, timed.graph, timed.micros))
            .collect();
        assert_eq!(times, [(8, false, 7.1), (8, true, 2.8), (8 << 20, false, 40.5)]);
        let line = serde_json::to_value(&ours[1]).unwrap();
        assert_eq!(
            line,
            serde_json::json!({
                "gpu": "A GPU", "driver": "1.2", "ranks": 2, "type": "float32", "way": "table",
                "operation": "all_reduce", "bytes": 8, "graph": true, "micros": 2.8,
            })
        );
        let mut all = ours;
        all.extend(parse(&said.replace("2.8", "2.7"), &setting("one_shot/ll")));
        all.extend(parse(&said.replace("40.5", "30"), &setting("two_shot/simple")));
        assert!(!table(&all, 2, "bfloat16").contains("MiB") && !table(&all, 4, "float32").contains("MiB"));
        let text = table(&all, 2, "float32");
        let row = |size: &str| text.lines().find(|line| line.contains(size)).unwrap();
        assert!(
            row(" 8 B ").contains("one_shot/ll") && !row(" 8 B ").contains("SLOWER"),
            "{text}"
        );
        assert!(
            row(" 8 MiB ").contains("two_shot/simple") && row(" 8 MiB ").contains("SLOWER"),
            "{text}"
        );
        assert!(judge("FAILED bench\nrow ").is_err() && judge("ok").is_err());
        assert_eq!(judge(said).unwrap(), "2 sizes");
        assert_eq!(
            gpu("NVIDIA H200, 580.1"),
            ("NVIDIA H200".to_owned(), "580.1".to_owned())
        );
    }
}
