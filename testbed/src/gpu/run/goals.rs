//! Goals for times against NCCL's, and the table that says which are met.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

use super::nccl_tests_output::Run;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Goals of one operation at some sizes.
pub(super) struct Goal {
    pub(super) operation: &'static str,
    /// Bytes.
    pub(super) sizes: &'static [u64],
    /// How NCCL's buffers are registered (`-R`): its best counts. Where they are ordinary ones, so are ours.
    pub(super) registered: &'static [u32],
    /// Only graphs on our side.
    pub(super) graph: bool,
    /// Most that our time may be of NCCL's, with 2 GPUs and with more.
    pub(super) ratio: (f64, f64),
}

/// All of `-R`.
const ANY: &[u32] = &[0, 1, 2];

/// The goals, in the order of the table.
pub(super) const GOALS: &[Goal] = &[
    goal("all_reduce", &[8, 512, 4 * KIB], &[0], true, (0.45, 0.45)),
    goal(
        "all_reduce",
        &[8, 512, 4 * KIB, 32 * KIB],
        &[2],
        true,
        (0.75, 0.75),
    ),
    goal("all_reduce", &[256 * KIB], ANY, true, (0.55, 0.6)),
    goal("all_reduce", &[2 * MIB], ANY, true, (0.6, 0.7)),
    goal("all_reduce", &[16 * MIB], ANY, true, (0.8, 0.8)),
    goal("all_reduce", &[64 * MIB, 256 * MIB], ANY, false, (0.85, 0.92)),
    goal("all_reduce", &[GIB, 4 * GIB], ANY, false, (0.9, 0.95)),
    goal("all_gather", &[64 * MIB, 512 * MIB], ANY, false, (0.92, 0.92)),
    goal("reduce_scatter", &[64 * MIB, 512 * MIB], ANY, false, (0.95, 0.95)),
    goal("alltoall", &[64 * MIB, 512 * MIB], ANY, false, (0.89, 0.89)),
    goal("sendrecv", &[16 * MIB, 64 * MIB], ANY, false, (0.5, 0.5)),
];

const fn goal(
    operation: &'static str,
    sizes: &'static [u64],
    registered: &'static [u32],
    graph: bool,
    ratio: (f64, f64),
) -> Goal {
    Goal {
        operation,
        sizes,
        registered,
        graph,
        ratio,
    }
}

/// One run of a program of nccl-tests.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    /// Ours, not NCCL's.
    pub(super) ours: bool,
    pub(super) operation: &'static str,
    /// `-R`: 0 not, 1 with `ncclCommRegister`, 2 as windows.
    pub(super) registered: u32,
    /// Replays of a graph (`-G`); 0 eager.
    pub(super) graph: u32,
    /// With windows by copy engines, however short it is.
    pub(super) engines: bool,
    pub(super) run: Run,
}

/// One line of the table, as the report has it.
#[derive(Clone, Debug, Serialize)]
struct Line {
    gpus: usize,
    operation: &'static str,
    bytes: u64,
    /// Microseconds, and how: `graph`, `eager`, with `-R`.
    ours_us: Option<f64>,
    ours_how: Option<String>,
    nccl_us: Option<f64>,
    nccl_how: Option<String>,
    ratio: Option<f64>,
    goal: f64,
    met: Option<bool>,
}

/// The shortest time at this size among runs that fit, with how it was had.
fn best<'a>(runs: impl Iterator<Item = &'a Measured>, bytes: u64) -> Option<(f64, String)> {
    runs.filter_map(|measured| {
        let micros = measured.run.micros(bytes)?;
        let way = if measured.graph > 0 { "graph" } else { "eager" };
        Some((micros, format!("{way} -R {}", measured.registered)))
    })
    .min_by(|a, b| a.0.total_cmp(&b.0))
}

/// Those of a goal and a size; `None` if nothing was measured.
fn line(goal: &Goal, bytes: u64, measured: &[Measured], gpus: usize) -> Option<Line> {
    let of = |ours: bool| {
        let is_of =
            move |run: &&Measured| run.ours == ours && !run.engines && run.operation == goal.operation;
        measured.iter().filter(is_of)
    };
    let fits =
        |run: &&Measured| (run.graph > 0 || !goal.graph) && (run.registered == 0 || goal.registered != [0]);
    let (ours_us, ours_how) = best(of(true).filter(fits), bytes).unzip();
    let compared = of(false).filter(|run| goal.registered.contains(&run.registered));
    let (nccl_us, nccl_how) = best(compared, bytes).unzip();
    let ratio = ours_us.zip(nccl_us).map(|(ours, nccl)| ours / nccl);
    let most = if gpus <= 2 { goal.ratio.0 } else { goal.ratio.1 };
    (ours_us.is_some() || nccl_us.is_some()).then(|| Line {
        gpus,
        operation: goal.operation,
        bytes,
        ours_us,
        ours_how,
        nccl_us,
        nccl_how,
        ratio,
        goal: most,
        met: ratio.map(|ratio| ratio <= most),
    })
}

fn lines(goals: &[Goal], measured: &[Measured], gpus: usize) -> Vec<Line> {
    let sizes = goals
        .iter()
        .flat_map(|goal| goal.sizes.iter().map(move |bytes| (goal, *bytes)));
    sizes
        .filter_map(|(goal, bytes)| line(goal, bytes, measured, gpus))
        .collect()
}

/// Bytes as people write them.
pub(super) fn size(bytes: u64) -> String {
    match bytes {
        GIB.. if bytes.is_multiple_of(GIB) => format!("{} GiB", bytes / GIB),
        MIB.. if bytes.is_multiple_of(MIB) => format!("{} MiB", bytes / MIB),
        KIB.. if bytes.is_multiple_of(KIB) => format!("{} KiB", bytes / KIB),
        _ => format!("{bytes} B"),
    }
}

/// The table for people and for machines, of what was measured with so many GPUs.
pub(super) fn table(measured: &[Measured], gpus: usize) -> (String, Value) {
    let lines = lines(GOALS, measured, gpus);
    let mut text = format!(
        "{gpus} GPUs, nccl-tests, float sum, out of place, us; best of eager and graph, how in parentheses\n\
         {:<15} {:>8}  {:>22}  {:>22}  {:>6}  {:>6}\n",
        "operation", "size", "ours", "NCCL", "ratio", "goal"
    );
    let cell = |micros: Option<f64>, how: &Option<String>| {
        let both = micros.zip(how.as_ref());
        both.map_or_else(|| "-".to_owned(), |(micros, how)| format!("{micros:.2} ({how})"))
    };
    for line in &lines {
        let _ = writeln!(
            text,
            "{:<15} {:>8}  {:>22}  {:>22}  {:>6}  {:>6}  {}",
            line.operation,
            size(line.bytes),
            cell(line.ours_us, &line.ours_how),
            cell(line.nccl_us, &line.nccl_how),
            line.ratio
                .map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}")),
            line.goal,
            line.met.map_or("", |met| if met { "met" } else { "missed" })
        );
    }
    (text, json!(lines))
}

/// Operations that copy engines do in windows, against the fastest way of kernels, ours and NCCL's; empty if none was measured.
pub(super) fn engines(measured: &[Measured]) -> (String, Value) {
    let mut text = String::new();
    let mut values = Vec::new();
    for operation in ["all_gather", "alltoall"] {
        let of = |ours: bool, engines: bool| {
            measured
                .iter()
                .filter(move |run| (run.ours, run.engines, run.operation) == (ours, engines, operation))
        };
        let mut sizes: Vec<u64> = of(true, true)
            .flat_map(|measured| measured.run.rows.iter().map(|row| row.bytes))
            .collect();
        sizes.sort_unstable();
        sizes.dedup();
        for bytes in sizes {
            let micros = |ours, engines| best(of(ours, engines), bytes).map(|(micros, _)| micros);
            let (ours, nccl) = (micros(true, true), micros(false, true));
            // What is long goes into windows by copy engines in any case.
            let kernels = of(true, false).filter(|run| run.registered == 0);
            let by_kernels = best(kernels, bytes).map(|(micros, _)| micros);
            let nccl_by_kernels = micros(false, false);
            let [ours_cell, nccl_cell, kernels_cell, nccl_kernels_cell] =
                [ours, nccl, by_kernels, nccl_by_kernels]
                    .map(|time| time.map_or_else(|| "-".to_owned(), |micros| format!("{micros:.1}")));
            let _ = writeln!(
                text,
                "{operation:<15} {:>8}  by copy engines: ours {ours_cell}, NCCL {nccl_cell}; \
                 by kernels: ours {kernels_cell}, NCCL {nccl_kernels_cell}",
                size(bytes)
            );
            values.push(json!({
                "operation": operation,
                "bytes": bytes,
                "ours_by_engines_us": ours,
                "nccl_by_engines_us": nccl,
                "ours_us": by_kernels,
                "nccl_us": nccl_by_kernels,
            }));
        }
    }
    if !text.is_empty() {
        let head = "Windows (-R 2) with NCCL_CTA_POLICY=2, us; best of eager and graph\n";
        text.insert_str(0, head);
    }
    (text, Value::Array(values))
}

#[cfg(test)]
mod tests {
    use super::{super::nccl_tests_output::parse, *};

    fn measured(ours: bool, registered: u32, graph: u32, times: &[(u64, f64)]) -> Measured {
        let text: String = times
            .iter()
            .map(|(bytes, micros)| format!("{bytes} 2 float sum -1 {micros} 1 1 0 {micros} 1 1 0\n"))
            .collect();
        Measured {
            ours,
            operation: "all_reduce",
            registered,
            graph,
            engines: false,
            run: parse(&text),
        }
    }

    fn ours(line: &Line) -> (f64, &str) {
        (line.ours_us.unwrap(), line.ours_how.as_deref().unwrap())
    }

    fn nccl(line: &Line) -> (f64, &str) {
        (line.nccl_us.unwrap(), line.nccl_how.as_deref().unwrap())
    }

    #[test]
    fn the_best_that_a_goal_admits_counts() {
        let all = [
            measured(true, 0, 0, &[(8, 1.0), (64 * MIB, 60.0)]),
            measured(true, 0, 20, &[(8, 2.0), (64 * MIB, 64.0)]),
            measured(false, 0, 0, &[(8, 5.0), (64 * MIB, 100.0)]),
            measured(false, 0, 20, &[(8, 6.0), (64 * MIB, 90.0)]),
            measured(false, 2, 20, &[(8, 4.0), (64 * MIB, 80.0)]),
        ];
        let lines = lines(GOALS, &all, 2);
        let of = |bytes, goal| {
            lines
                .iter()
                .find(|line| line.bytes == bytes && line.goal == goal)
                .unwrap()
        };
        // Ours in graphs; NCCL's best without registration is eager.
        let short = of(8, 0.45);
        assert_eq!(ours(short), (2.0, "graph -R 0"));
        assert_eq!(nccl(short), (5.0, "eager -R 0"));
        assert_eq!(short.ratio, Some(0.4));
        assert_eq!(nccl(of(8, 0.75)), (4.0, "graph -R 2"));
        let long = of(64 * MIB, 0.85);
        assert_eq!(ours(long), (60.0, "eager -R 0"));
        assert_eq!(nccl(long), (80.0, "graph -R 2"));
        // What was not measured has no line.
        assert!(lines.iter().all(|line| line.bytes != GIB));
    }

    #[test]
    fn the_table_says_which_goals_are_met() {
        let all = [
            measured(true, 0, 20, &[(8, 2.0), (512, 4.0)]),
            measured(false, 0, 20, &[(8, 5.0), (512, 5.0)]),
            measured(true, 0, 0, &[(GIB, 7.0)]),
        ];
        let (text, values) = table(&all, 4);
        let line = |size: &str| text.lines().find(|line| line.contains(size)).unwrap();
        assert!(
            line(" 8 B").contains("0.40") && line(" 8 B").ends_with("met"),
            "{text}"
        );
        assert!(line("512 B").ends_with("missed"), "{text}");
        assert!(line("1 GiB").contains('-'), "{text}");
        assert_eq!(values[0]["met"], true);
        assert_eq!(values[1]["met"], false);
        assert_eq!(values.as_array().unwrap().last().unwrap()["ratio"], Value::Null);
    }

    #[test]
    fn against_ordinary_buffers_ours_are_ordinary() {
        let all = [
            measured(true, 0, 20, &[(8, 2.5)]),
            measured(true, 2, 20, &[(8, 2.0)]),
            measured(false, 0, 20, &[(8, 5.0)]),
            measured(false, 2, 20, &[(8, 4.0)]),
        ];
        let lines = lines(GOALS, &all, 2);
        let ratios: Vec<_> = lines.iter().map(|line| line.ratio).collect();
        assert_eq!(ratios, [Some(0.5), Some(0.5)]);
        assert_eq!(ours(&lines[0]), (2.5, "graph -R 0"));
    }

    #[test]
    fn copy_engines_have_a_table_of_their_own() {
        let gather = |measured: Measured, engines| Measured {
            operation: "all_gather",
            engines,
            ..measured
        };
        let all = [
            gather(measured(true, 0, 0, &[(64 * MIB, 100.0)]), false),
            gather(measured(true, 2, 0, &[(64 * MIB, 92.0)]), true),
            gather(measured(true, 2, 20, &[(64 * MIB, 90.0)]), true),
            gather(measured(false, 2, 20, &[(64 * MIB, 95.0)]), true),
        ];
        let (text, values) = engines(&all);
        assert!(
            text.contains("by copy engines: ours 90.0, NCCL 95.0; by kernels: ours 100.0, NCCL -"),
            "{text}"
        );
        assert_eq!(values[0]["nccl_by_engines_us"], 95.0);
        // They do not count where goals are for kernels.
        let is_by_kernels = |line: &Line| ours(line) == (100.0, "eager -R 0") && line.nccl_us.is_none();
        assert!(lines(GOALS, &all, 2).iter().all(is_by_kernels));
        assert!(engines(&all[..1]).0.is_empty());
    }

    #[test]
    fn sizes_are_written_as_people_do() {
        let written = [8, 4096, 5000, 2 * MIB, 3 * GIB].map(size);
        assert_eq!(written, ["8 B", "4 KiB", "5000 B", "2 MiB", "3 GiB"]);
    }
}
