//! Benchmarks with a main function of their own, which print JSON.

use std::process::Stdio;

use anyhow::{Context, Result, anyhow, bail};
use serde::Deserialize;
use serde_json::Value;

use super::{Goal, Row, probe};
use crate::{
    process,
    workspace::{self, cargo},
};

/// Package and target of the collector's throughput.
pub const THROUGHPUT: (&str, &str) = ("ringsight-collector", "throughput");
/// Of what probes cost where they are.
pub const PROBE: (&str, &str) = ("ringsight-probes", "probe");
/// Of what all-reduce takes against what the machine gives.
pub const LIMITS: (&str, &str) = ("ringsight-comm", "limits");
/// Of what the watchdog costs.
pub const WATCHDOG: (&str, &str) = ("ringsight-comm", "watchdog");
/// Of what an eager call costs the host.
pub const CALLS: (&str, &str) = ("ringsight-comm", "calls");

/// Records a second that one core has to take.
const RECORDS_PER_S: Goal = Goal::AtLeast(1e6);
/// Resident memory at the end over what a tenth of the time took: flat.
const RESIDENT_GROWTH: Goal = Goal::AtMost(1.1);
/// The most that a call may cost with its record, nanoseconds: with a probe on a 5-byte nop, which kernels from 6.18 on turn
/// into a call; with one on a 1-byte nop, which traps into the kernel once.
const PROBE_NS: [(&str, f64); 2] = [("probe_attached_nop5", 350.0), ("probe_attached_nop1", 700.0)];
/// The most that a large all-reduce over 4 processes may take, in times of what 2 of them take to copy as many bytes.
const LARGE_RATIO: Goal = Goal::AtMost(3.0);
/// The most that a small all-reduce over 2 processes may take on its stream, in times of a flag's way there and back.
const SMALL_RATIO: Goal = Goal::AtMost(2.0);
/// The most that the watchdog may add to a call, nanoseconds, and take of a core when nothing happens, per cent.
const WATCHDOG_CALL_NS: Goal = Goal::AtMost(50.0);
const WATCHDOG_IDLE: Goal = Goal::AtMost(0.1);
/// The most that an eager call may take of its thread, with what the driver's stand-in takes, and that records may take of it, nanoseconds.
const CALL_NS: Goal = Goal::AtMost(1100.0);
const RECORDS_NS: Goal = Goal::AtMost(50.0);
/// Of what must not be.
const NONE: Goal = Goal::AtMost(0.0);

/// A case of the throughput benchmark, as it prints it.
#[derive(Deserialize)]
struct Case {
    case: String,
    records_per_s: f64,
    spans_per_s: f64,
    operations: u64,
    given_up: u64,
    /// After a tenth of the time and at the end.
    resident_kib: [f64; 2],
}

/// Measures each case of the collector's throughput for `seconds`.
///
/// # Errors
/// If it cannot be built or run.
pub fn throughput(seconds: u32) -> Result<Vec<Row>> {
    throughput_rows(&objects(THROUGHPUT, &[&seconds.to_string()])?)
}

fn throughput_rows(cases: &[Value]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for case in cases {
        let case = Case::deserialize(case).with_context(|| format!("{case} is no case of the throughput"))?;
        let name = |what: &str| format!("collector throughput, {}: {what}", case.case);
        let [start, end] = case.resident_kib;
        // Where the start was not read there is no ratio, and no goal is met.
        let growth = if start > 0.0 { end / start } else { f64::NAN };
        rows.extend([
            Row::new(name("records"), case.records_per_s, "/s")
                .goal(RECORDS_PER_S)
                .note(format!("{:.0} spans/s", case.spans_per_s)),
            Row::new(name("given up"), case.given_up as f64, "")
                .goal(NONE)
                .note(format!("of {} operations", case.operations)),
            Row::new(name("resident, end / start"), growth, "")
                .goal(RESIDENT_GROWTH)
                .note(format!("{start:.0} -> {end:.0} KiB")),
        ]);
    }
    Ok(rows)
}

/// What a benchmark printed.
struct Figures<'a>(&'a Value);

impl Figures<'_> {
    fn get(&self, pointer: &str) -> Result<f64> {
        let number = self.0.pointer(pointer).and_then(Value::as_f64);
        number.with_context(|| format!("no number {pointer} in {}", self.0))
    }

    /// A row of a figure. Nanoseconds are told as milliseconds where that is the unit.
    fn row(&self, pointer: &str, name: &str, unit: &'static str) -> Result<Row> {
        let value = self.get(pointer)? / if unit == "ms" { 1e6 } else { 1.0 };
        Ok(Row::new(name, value, unit))
    }
}

/// The one object of a benchmark that prints one.
fn single(benchmark: (&str, &str)) -> Result<Value> {
    let [figures] = <[Value; 1]>::try_from(objects(benchmark, &[])?)
        .map_err(|all| anyhow!("{} printed {} objects instead of one", benchmark.1, all.len()))?;
    Ok(figures)
}

/// Measures what the watchdog adds to a call, and what its thread takes when nothing happens.
///
/// # Errors
/// If it cannot be built or run.
pub fn watchdog() -> Result<Vec<Row>> {
    watchdog_rows(&Figures(&single(WATCHDOG)?))
}

fn watchdog_rows(figures: &Figures<'_>) -> Result<Vec<Row>> {
    let (pairs, without) = (figures.get("/pairs")?, figures.get("/without_ns")?);
    let communicators = format!("{} communicators", figures.get("/idle_communicators")?);
    let call = figures.row("/call_ns", "watchdog, a call with it minus one without", "ns")?;
    let rest = "watchdog, its thread when nothing happens";
    let rest = figures.row("/idle_percent", rest, "% of a core")?;
    let adaptive = "watchdog, the same with thresholds that adapt";
    let adaptive = figures.row("/idle_adaptive_percent", adaptive, "% of a core")?;
    Ok(vec![
        call.goal(WATCHDOG_CALL_NS)
            .note(format!("{pairs} pairs of batches; without it {without} ns")),
        rest.goal(WATCHDOG_IDLE).note(&communicators),
        adaptive.goal(WATCHDOG_IDLE).note(&communicators),
    ])
}

/// Measures probes in a process that does nothing else. Without the right to attach there are fewer rows.
///
/// # Errors
/// If it cannot be built or run.
pub fn probe() -> Result<Vec<Row>> {
    // The process that is measured; `cargo bench --bench` does not build it.
    process::run(cargo().args(["build", "--release", "--locked", "-p", PROBE.0, "--examples"]))?;
    probe_rows(&single(PROBE)?)
}

fn probe_rows(figures: &Value) -> Result<Vec<Row>> {
    let figures = figures
        .as_object()
        .context("the probe benchmark printed no object")?;
    let row = |(name, value): (&String, &Value)| {
        let (name, unit) = match name.rsplit_once('_') {
            Some((name, "ns")) => (name, "ns"),
            Some((name, "ms")) => (name, "ms"),
            _ => bail!("the probe benchmark's figure {name} has no unit that is known"),
        };
        let value = Figures(value);
        let goal = PROBE_NS.iter().find(|(probe, _)| *probe == name);
        Ok(Row {
            name: format!("probe fixture, {}", name.replace('_', " ")),
            median: value.get("/median")?,
            min: (unit == "ns").then(|| value.get("/min")).transpose()?,
            unit,
            // Where the kernel has no such site, the row is of another one.
            goal: goal
                .filter(|(probe, _)| *probe != "probe_attached_nop5" || probe::kernel() >= (6, 18))
                .map(|(_, most)| Goal::AtMost(*most)),
            note: if unit == "ns" { "15 runs" } else { "one run" }.to_owned(),
        })
    };
    figures.iter().map(row).collect()
}

/// Measures all-reduce over processes, against copies and flags in the same run.
///
/// # Errors
/// If it cannot be built or run.
pub fn limits() -> Result<Vec<Row>> {
    limits_rows(&Figures(&single(LIMITS)?))
}

/// What [`LIMITS`] prints: figure, name, unit, note; nanoseconds are told as milliseconds where that is the unit.
const LIMITS_ROWS: [(&str, &str, &str, &str); 9] = [
    (
        "/copy_256MiB_by_2_processes_ns",
        "2 processes copying 4 x 64 MiB",
        "ms",
        "private memory",
    ),
    (
        "/all_reduce_64MiB_4_processes_ns",
        "all_reduce 64 MiB, 4 processes",
        "ms",
        "float32 sum, out of place",
    ),
    (
        "/all_reduce_64MiB_ratio",
        "all_reduce 64 MiB / copies",
        "",
        "in turns in one run",
    ),
    (
        "/all_reduce_64MiB_cpu_ratio",
        "processor time of all_reduce / of copies",
        "",
        "what other load on the machine changes least",
    ),
    (
        "/flag_round_trip_ns",
        "flag there and back, 2 processes",
        "ns",
        "shared memory, spinning",
    ),
    (
        "/all_reduce_8B_on_the_stream_ns",
        "all_reduce 8 B on the stream, 2 processes",
        "ns",
        "part of a graph of 200",
    ),
    (
        "/all_reduce_8B_ratio",
        "all_reduce 8 B / flag",
        "",
        "in turns in one run",
    ),
    (
        "/all_reduce_8B_of_one_rank_ns",
        "all_reduce 8 B on the stream, 1 rank",
        "ns",
        "nobody to wait for",
    ),
    (
        "/all_reduce_8B_call_and_synchronize_ns",
        "all_reduce 8 B, call and synchronize",
        "ns",
        "latency that a caller sees",
    ),
];

fn limits_rows(figures: &Figures<'_>) -> Result<Vec<Row>> {
    let row = |(pointer, name, unit, note)| {
        let row = figures.row(pointer, &format!("limits, {name}"), unit)?.note(note);
        Ok(match pointer {
            "/all_reduce_64MiB_ratio" => row.goal(LARGE_RATIO),
            "/all_reduce_8B_ratio" => row.goal(SMALL_RATIO),
            _ => row,
        })
    };
    LIMITS_ROWS.into_iter().map(row).collect()
}

/// Measures what an eager call costs the host; nothing where there are no kernels.
///
/// # Errors
/// If it cannot be built or run.
pub fn calls() -> Result<Vec<Row>> {
    let without = workspace::without_records()?;
    let mut rows = Vec::new();
    for figures in objects(CALLS, &["--without", &without.display().to_string()])? {
        if figures["skipped"] != true {
            rows.extend(calls_rows(&Figures(&figures))?);
        }
    }
    Ok(rows)
}

fn calls_rows(figures: &Figures<'_>) -> Result<Vec<Row>> {
    let [low, high, pairs] = ["/records_ns/0", "/records_ns/2", "/pairs"].map(|pointer| figures.get(pointer));
    let spread = format!("{} pairs; quartiles {:.0} to {:.0}", pairs?, low?, high?);
    let call = figures.row("/call_ns/median", "eager all_reduce 8 B on the host", "ns")?;
    let allocations = figures.row("/allocations", "allocations and frees of such a call", "")?;
    let records = figures.row("/records_ns/1", "records of such a call", "ns")?;
    Ok(vec![
        Row {
            min: Some(figures.get("/call_ns/min")?),
            ..call.goal(CALL_NS).note("a driver that runs no kernel")
        },
        allocations.goal(NONE).note("of the calling thread"),
        records
            .goal(RECORDS_NS)
            .note(format!("with minus without, {spread}")),
    ])
}

/// Runs a benchmark; the JSON objects that it printed, in order. Its other lines go where progress goes.
fn objects((package, target): (&str, &str), arguments: &[&str]) -> Result<Vec<Value>> {
    let mut command = cargo();
    command
        .args(["bench", "--locked", "-p", package, "--bench", target, "--"])
        .args(arguments)
        .arg("--json")
        .stderr(Stdio::inherit());
    let output = command.output().with_context(|| process::line(&command))?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        eprint!("{text}");
        bail!(
            "{} failed: {}",
            process::line(&command),
            process::reason(output.status)
        );
    }
    let found = parse(&text)?;
    if found.is_empty() {
        bail!("{} printed no figures", process::line(&command));
    }
    Ok(found)
}

fn parse(text: &str) -> Result<Vec<Value>> {
    let mut found = Vec::new();
    for line in text.lines() {
        if line.starts_with('{') {
            found.push(serde_json::from_str(line).with_context(|| format!("{line:?} is no JSON"))?);
        } else {
            eprintln!("{line}");
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CASE: &str = r#"{"case":"node","records_per_s":999999.0,"spans_per_s":5.0,"operations":9,"given_up":1,"resident_kib":[1000,1200]}"#;

    #[test]
    fn a_slow_lossy_growing_case_misses_each_goal() {
        let verdicts = |text: &str| -> Vec<_> {
            throughput_rows(&parse(text).unwrap())
                .unwrap()
                .iter()
                .map(Row::meets)
                .collect()
        };
        assert_eq!(verdicts(CASE), [Some(false); 3]);
        let good = CASE
            .replace("999999.0", "1000000.0")
            .replace("\"given_up\":1", "\"given_up\":0")
            .replace("1200", "1100");
        assert_eq!(verdicts(&good), [Some(true); 3]);
        // Memory that was not read proves nothing.
        assert_eq!(verdicts(&good.replace("[1000", "[0"))[2], Some(false));
    }

    #[test]
    fn limits_have_goals_on_ratios() {
        let text = r#"{"copy_256MiB_by_2_processes_ns":1e7,"all_reduce_64MiB_4_processes_ns":3e7,"all_reduce_64MiB_ratio":3.0,"all_reduce_64MiB_cpu_ratio":3.1,"flag_round_trip_ns":200,"all_reduce_8B_on_the_stream_ns":402,"all_reduce_8B_ratio":2.01,"all_reduce_8B_of_one_rank_ns":150,"all_reduce_8B_call_and_synchronize_ns":9000}"#;
        let rows = limits_rows(&Figures(&parse(text).unwrap()[0])).unwrap();
        let verdicts: Vec<_> = rows.iter().filter_map(Row::meets).collect();
        assert_eq!(verdicts, [true, false]);
    }

    #[test]
    fn the_watchdog_has_goals_on_calls_and_rest() {
        let text = r#"{"call_ns":50.0,"without_ns":900.0,"pairs":500,"idle_percent":0.11,"idle_adaptive_percent":0.1,"idle_communicators":9}"#;
        let rows = watchdog_rows(&Figures(&parse(text).unwrap()[0])).unwrap();
        let verdicts: Vec<_> = rows.iter().map(Row::meets).collect();
        assert_eq!(verdicts, [Some(true), Some(false), Some(true)]);
    }

    #[test]
    fn a_call_has_goals_on_time_and_allocations() {
        let text = r#"{"call_ns":{"median":1101,"min":1000},"allocations":0,"records_ns":[40.0,51.0,60.5],"pairs":16}"#;
        let rows = calls_rows(&Figures(&parse(text).unwrap()[0])).unwrap();
        let verdicts: Vec<_> = rows.iter().filter_map(Row::meets).collect();
        assert_eq!(verdicts, [false, true, false]);
    }

    #[test]
    fn rubbish_is_refused() {
        assert!(parse("{rubbish").is_err());
        assert!(throughput_rows(&parse("{}").unwrap()).is_err());
        for rows in [watchdog_rows, limits_rows, calls_rows] {
            assert!(rows(&Figures(&serde_json::json!({}))).is_err());
        }
        for wrong in [
            r#"{"a":1}"#,
            r#"{"a_ns":"x"}"#,
            r#"{"a_ns":{"min":1}}"#,
            r#"{"a_kg":1}"#,
        ] {
            assert!(probe_rows(&parse(wrong).unwrap()[0]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_median_of_either_nop_has_a_goal() {
        let text = concat!(
            "SKIPPED something: no right\n",
            r#"{"probe_attached_nop5_ns":{"median":351.0,"min":90.0},"#,
            r#""probe_attached_nop1_ns":{"median":700.0,"min":600.0},"attach_ms":{"median":3.0,"min":3.0}}"#
        );
        let rows = probe_rows(&parse(text).unwrap()[0]).unwrap();
        let verdict = |name: &str| {
            rows.iter()
                .find(|row| row.name.ends_with(name))
                .map(|row| (row.unit, row.min, row.meets()))
        };
        let nop5 = (probe::kernel() >= (6, 18)).then_some(false);
        assert_eq!(verdict("attached nop5"), Some(("ns", Some(90.0), nop5)));
        assert_eq!(verdict("attached nop1"), Some(("ns", Some(600.0), Some(true))));
        assert_eq!(verdict("attach"), Some(("ms", None, None)));
    }
}
