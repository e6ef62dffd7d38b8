//! nccl-tests: right results, and times against NCCL's.

use std::{path::Path, process::Command};

use anyhow::{Result, anyhow};

use super::super::{
    goals::{self, Measured},
    nccl_tests_output,
    step::{StepResult, Steps},
};
use crate::gpu::nccl_tests::{OPERATIONS, program};

/// Operations with a reduction: the others need not be run with each.
const REDUCTIONS: [&str; 3] = ["all_reduce", "reduce_scatter", "reduce"];

/// A program of nccl-tests on the library of a folder.
pub(super) fn command(steps: &Steps<'_>, operation: &str, library: &Path, words: &str) -> Result<Command> {
    let folder = steps.host.nccl_tests().map_err(|reason| anyhow!(reason))?;
    let mut command = Command::new(folder.join(program(operation)));
    command
        .args(words.split_whitespace())
        .env("LD_LIBRARY_PATH", library)
        .env("NCCL_NVLS_ENABLE", "0");
    Ok(command)
}

pub(super) fn right(said: &str) -> StepResult {
    nccl_tests_output::parse(said).check()
}

/// Few repetitions: what counts is that every size is right.
const FEW: &str = "-c 1 -w 1 -n 2";
/// The same of lengths to the largest, where the send buffer, the receive buffer and what is expected of it are 4 GiB each.
const TO_LONGEST: &str = "-e 4G -f 2 -c 1 -w 0 -n 1";

/// Ends the names of runs in which copy engines do all that they can.
const BY_ENGINES: &str = "R2-engines";

/// What is checked of an operation on so many GPUs: a name of each run and its words.
fn checks(operation: &str, gpus: usize) -> Vec<(String, String)> {
    let all = if REDUCTIONS.contains(&operation) {
        "-d all -o all"
    } else {
        "-d all"
    };
    let mut runs = vec![
        (format!("g{gpus}"), format!("-g {gpus} -b 8 -e 256M -f 2 {FEW}")),
        // From where the run before ends.
        ("4G".into(), format!("-g {gpus} -b 512M {TO_LONGEST}")),
        (
            format!("t{gpus}"),
            format!("-g 1 -t {gpus} -b 8 -e 64M -f 4 {FEW}"),
        ),
        ("all".into(), format!("-g {gpus} {all} -b 1K -e 64K -f 64 {FEW}")),
        (
            "all-R2-G10".into(),
            format!("-g 1 -t {gpus} -R 2 -G 10 {all} -b 1K -e 64K -f 64 {FEW}"),
        ),
        // Long enough to go straight between buffers, of every operation.
        (
            "all-long".into(),
            format!("-g {gpus} {all} -b 8M -e 16M -f 2 {FEW}"),
        ),
    ];
    // Into windows by copy engines, and so long that they do it by default.
    if engines(operation).is_some() {
        for (name, words) in [
            ("R2-long", "-R 2 -b 512M -e 1G -f 2 -c 1 -w 0 -n 1".to_owned()),
            (BY_ENGINES, format!("-R 2 -b 1M -e 1G -f 4 {FEW}")),
        ] {
            runs.push((name.into(), format!("-g {gpus} {words}")));
        }
        runs.push((
            format!("t{gpus}-{BY_ENGINES}"),
            format!("-g 1 -t {gpus} -R 2 -G 10 -b 1M -e 64M -f 4 {FEW}"),
        ));
    }
    // Registered, as windows, and captured: ranks of one thread, and each of its own.
    for (name, words) in [
        ("R1", "-R 1 -b 8 -e 64M -f 8"),
        ("R2", "-R 2 -b 8 -e 64M -f 8"),
        ("G10", "-G 10 -b 8 -e 16M -f 8"),
        ("R2-G10", "-R 2 -G 10 -b 8 -e 16M -f 8"),
    ] {
        runs.push((name.into(), format!("-g {gpus} {words} {FEW}")));
        runs.push((format!("t{gpus}-{name}"), format!("-g 1 -t {gpus} {words} {FEW}")));
    }
    runs
}

/// From where `checks` ends to the longest, by threads: ordinary, registered, and captured, as windows too. Ranks of one thread are among `checks`.
pub(super) fn check_long(steps: &mut Steps<'_>) -> Result<()> {
    for gpus in [4, 2] {
        if !steps.skips_without(&format!("{gpus} GPUs"), gpus) {
            run_all(steps, |_| long_checks(gpus))?;
        }
    }
    Ok(())
}

fn long_checks(gpus: usize) -> Vec<(String, String)> {
    let run = |(name, words)| {
        (
            format!("t{gpus}-{name}"),
            format!("-g 1 -t {gpus} {words} -b 32M {TO_LONGEST}"),
        )
    };
    [
        ("4G-R0", "-R 0"),
        ("4G-R1", "-R 1"),
        ("4G-G10", "-G 10"),
        ("4G-R2-G10", "-R 2 -G 10"),
    ]
    .map(run)
    .into()
}

/// Every operation on so many GPUs.
pub(super) fn check(steps: &mut Steps<'_>, gpus: usize) -> Result<()> {
    run_all(steps, |operation| checks(operation, gpus))
}

fn run_all(steps: &mut Steps<'_>, checks: impl Fn(&str) -> Vec<(String, String)>) -> Result<()> {
    let library = steps.host.bundle.join("lib");
    for operation in OPERATIONS {
        for (name, words) in checks(operation) {
            let mut command = command(steps, operation, &library, &words)?;
            command.env("NCCL_DEBUG", "WARN");
            if name.ends_with(BY_ENGINES) {
                command.envs(engines(operation));
            }
            steps.run(&format!("{operation}-{name}"), 60, command, right);
        }
    }
    Ok(())
}

/// Sizes of a run: first, last, factor, warm-ups, repetitions, and how often all of that is gone through, of which the median counts.
const SHORT: &str = "-b 8 -e 16M -f 8 -w 5 -n 20 -N 5";
const LONG: &str = "-b 64M -e 4G -f 4 -w 1 -n 2 -N 3";

/// What is measured: operation and its sizes.
const MEASURED: [(&str, &str); 6] = [
    ("all_reduce", SHORT),
    ("all_reduce", LONG),
    ("all_gather", "-b 64M -e 512M -f 8 -w 2 -n 5 -N 5"),
    ("reduce_scatter", "-b 64M -e 512M -f 8 -w 2 -n 5 -N 5"),
    ("alltoall", "-b 64M -e 512M -f 8 -w 2 -n 5 -N 5"),
    ("sendrecv", "-b 16M -e 64M -f 4 -w 2 -n 10 -N 5"),
];

/// What has copy engines do an operation in windows however short it is; `None` if they do not.
fn engines(operation: &str) -> Option<(&'static str, &'static str)> {
    match operation {
        "all_gather" | "alltoall" => Some(("NCCL_CTA_POLICY", "2")),
        "all_reduce" | "reduce_scatter" => Some(("RINGSIGHT_ENGINE_REDUCE_BYTES", "0")),
        _ => None,
    }
}

/// Whether a run goes another way than those that are measured before it.
fn differs(operation: &str, registered: u32, by_engines: bool, is_ours: bool) -> bool {
    match (is_ours, by_engines) {
        // Ranks of one process reach each other's buffers without it; copy engines want windows.
        (true, false) => registered == 0 || registered == 2 && engines(operation).is_some(),
        _ => true,
    }
}

/// What a call costs.
pub(super) fn call(steps: &mut Steps<'_>) -> Result<()> {
    let stock = steps.host.stock().map_err(|reason| anyhow!(reason))?;
    super::calls::run(steps, &steps.host.library(), stock)
}

/// Times on so many GPUs, ours and NCCL's.
pub(super) fn times(steps: &mut Steps<'_>, gpus: usize) -> Result<()> {
    let ours = steps.host.bundle.join("lib");
    let stock = steps.host.stock().map_err(|reason| anyhow!(reason))?;
    let stock = stock
        .parent()
        .ok_or_else(|| anyhow!("{} is in no folder", stock.display()))?;
    let mut measured = Vec::new();
    for (operation, sizes) in MEASURED {
        // Ours and NCCL's one after the other, so that what the machine does meanwhile meets both.
        for (registered, by_engines) in [(0, false), (1, false), (2, false), (2, true)] {
            // What reduces goes so where it is the faster way, and NCCL's copy engines reduce nothing.
            let variable = engines(operation).filter(|(name, _)| by_engines && *name == "NCCL_CTA_POLICY");
            if by_engines && variable.is_none() {
                continue;
            }
            for graph in [20, 0] {
                for (library, is_ours) in [(ours.as_path(), true), (stock, false)] {
                    if !differs(operation, registered, by_engines, is_ours) {
                        continue;
                    }
                    let name = format!(
                        "{operation}-{}-R{registered}-G{graph}{}{}",
                        if is_ours { "ours" } else { "nccl" },
                        if by_engines { "-engines" } else { "" },
                        if sizes == LONG { "-long" } else { "" }
                    );
                    let words = format!("-g {gpus} -c 0 -R {registered} -G {graph} {sizes}");
                    let mut command = command(steps, operation, library, &words)?;
                    command.envs(variable);
                    let said = steps.run(&name, 40, command, timed);
                    if let Some(said) = said {
                        measured.push(Measured {
                            ours: is_ours,
                            operation,
                            registered,
                            graph,
                            engines: by_engines,
                            run: nccl_tests_output::parse(&said),
                        });
                    }
                }
            }
        }
    }
    let (text, values) = goals::table(&measured, gpus);
    steps.note(&text);
    steps.figures(values);
    let (text, values) = goals::engines(&measured);
    steps.note(&text);
    steps.figures(values);
    Ok(())
}

/// Whether a run without checks has come to its end.
fn timed(said: &str) -> StepResult {
    let run = nccl_tests_output::parse(said);
    let last = run.rows.last().ok_or("it has printed no result")?;
    if run.out_of_bounds.is_none() {
        return Err("it has not come to its end".to_owned());
    }
    let cycles = run.rows.iter().filter(|row| row.bytes == last.bytes).count();
    Ok(format!(
        "{}: {} us, median of {cycles}",
        goals::size(last.bytes),
        run.micros(last.bytes).unwrap_or_default(),
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The sizes that nccl-tests goes through: from `-b` to `-e`, each `-f` times the one before.
    fn sizes(words: &str) -> Vec<u64> {
        let words: Vec<_> = words.split_whitespace().collect();
        let of = |flag: &str| {
            let at = words.iter().position(|word| *word == flag).unwrap();
            let word = words[at + 1];
            let digits = word.trim_end_matches(['K', 'M', 'G']);
            let unit = match &word[digits.len()..] {
                "K" => 10,
                "M" => 20,
                "G" => 30,
                _ => 0,
            };
            digits.parse::<u64>().unwrap() << unit
        };
        let (last, factor) = (of("-e"), of("-f"));
        std::iter::successors(Some(of("-b")), |size| Some(size * factor))
            .take_while(|size| *size <= last)
            .collect()
    }

    #[test]
    fn every_power_of_two_from_8_bytes_to_4_gib_is_checked() {
        for gpus in [2, 4] {
            let runs = checks("all_reduce", gpus);
            let names: HashSet<_> = runs.iter().map(|(name, _)| name).collect();
            assert_eq!(names.len(), runs.len());
            let of = |name: &str| sizes(&runs.iter().find(|(run, _)| run == name).unwrap().1);
            let all = [of(&format!("g{gpus}")), of("4G")].concat();
            assert_eq!(all, (3..=32).map(|bit| 1 << bit).collect::<Vec<u64>>());
            assert_eq!(of("all-long"), [8 << 20, 16 << 20]);
        }
        let words = |operation| checks(operation, 2).into_iter().map(|(_, words)| words);
        assert!(words("reduce").any(|words| words.starts_with("-g 2 -d all -o all")));
        assert!(!words("alltoall").any(|words| words.contains("-o all")));
        // By threads from where those runs end to the longest, too.
        let of = |name: &str, runs: &[(String, String)]| {
            sizes(&runs.iter().find(|(run, _)| run == name).unwrap().1)
        };
        for (long, before) in [
            ("t2-4G-R0", "t2"),
            ("t2-4G-R1", "t2-R1"),
            ("t2-4G-G10", "t2-G10"),
            ("t2-4G-R2-G10", "t2-R2-G10"),
        ] {
            let (long, before) = (of(long, &long_checks(2)), of(before, &checks("reduce", 2)));
            assert!(long[0] <= 2 * before[before.len() - 1] && long[long.len() - 1] == 4 << 30);
        }
        for each in ["-R 1", "-R 2", "-G 10", "-R 2 -G 10"] {
            assert!(words("reduce").any(|words| words.starts_with(&format!("-g 1 -t 2 {each} "))));
        }
    }
}
