//! The runner of a bundle: parts, each made of steps with a time limit, and one table of all steps.
//!
//! A part that cannot run on this machine is skipped by name, with the reason. A step that fails keeps no other step from running. An
//! interrupted run reports what it has measured. The last line of the output is JSON.
//!
//! | file | owns |
//! |---|---|
//! | `gpu_host` | what the machine has: GPUs, PyTorch, NCCL, compute-sanitizer |
//! | `step` | commands with a limit, their log, and their judgement |
//! | `report` | the table, and the report for machines |
//! | `nccl_tests_output`, `goals` | what nccl-tests print; times against NCCL's |
//! | `parts` | the parts, one file a subject |

mod goals;
mod gpu_host;
mod nccl_tests_output;
mod parts;
mod report;
mod step;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use clap::Args;
use fs_err as fs;
use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};

use self::{gpu_host::GpuHost, parts::PARTS, report::Report, step::Steps};

/// The longest that a part may take.
const PART_LIMIT: Duration = Duration::from_secs(480);

/// Which parts, and where what they say goes.
#[derive(Args, Debug)]
pub struct Options {
    /// Parts to run; all if none is named.
    #[arg(value_name = "PART")]
    parts: Vec<String>,
    /// Say which parts there are.
    #[arg(long)]
    list: bool,
    /// Folder of the bundle.
    #[arg(long, value_name = "DIR", hide = true)]
    bundle: PathBuf,
    /// Where what the steps say goes, and report.json [default: out/ in the bundle].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The longest that a part may take, seconds; what is left of it then has failed.
    #[arg(long, value_name = "N", default_value_t = PART_LIMIT.as_secs(), value_parser = clap::value_parser!(u64).range(1..=480))]
    limit: u64,
    /// NCCL to compare with [default: the one that Python's packages bring, else the system's].
    #[arg(long, value_name = "FILE")]
    stock: Option<PathBuf>,
}

/// Runs the parts; whether all that could run have passed.
///
/// # Errors
/// A part that there is not, or no place for what the steps say.
pub fn run(options: &Options) -> Result<bool> {
    if options.list {
        for part in PARTS {
            println!("{:<13} {}", part.name, part.about);
        }
        return Ok(true);
    }
    let wanted = chosen(&options.parts)?;
    // The steps run in folders of their own.
    let bundle = fs::canonicalize(&options.bundle)?;
    let out = options.out.clone().unwrap_or_else(|| bundle.join("out"));
    fs::create_dir_all(&out)?;
    let out = fs::canonicalize(&out)?;
    let host = GpuHost::look(bundle, options.stock.clone());
    // The first signal ends what runs, and the table tells of what has been done; a second one ends this program as if it were not handled.
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag down and raises it.
        flag::register_conditional_default(signal, interrupted.clone())?;
        flag::register(signal, interrupted.clone())?;
    }
    let mut report = Report::default();
    for part in wanted {
        if interrupted.load(Ordering::Relaxed) {
            report.enter(
                part.name,
                "",
                Duration::ZERO,
                Err("not run: interrupted".to_owned()),
            );
            continue;
        }
        if let Some(reason) = (part.lacks)(&host) {
            report.skip(part.name, "", &reason);
            continue;
        }
        let mut steps = Steps {
            part: part.name,
            host: &host,
            out: &out,
            deadline: Instant::now() + Duration::from_secs(options.limit),
            interrupted: &interrupted,
            report: &mut report,
        };
        if let Err(error) = (part.run)(&mut steps) {
            report.enter(part.name, "", Duration::ZERO, Err(format!("{error:#}")));
        }
    }
    print!("{}", report.table());
    fs::write(out.join("report.json"), format!("{}\n", report.json()))?;
    println!("{}", report.summary());
    Ok(report.ok())
}

/// The parts of these names, in the order of the list.
fn chosen(names: &[String]) -> Result<Vec<&'static parts::Part>> {
    if let Some(unknown) = names
        .iter()
        .find(|name| !PARTS.iter().any(|part| part.name == *name))
    {
        let all: Vec<_> = PARTS.iter().map(|part| part.name).collect();
        bail!("there is no part {unknown}; there are: {}", all.join(", "));
    }
    Ok(PARTS
        .iter()
        .filter(|part| names.is_empty() || names.iter().any(|name| name == part.name))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_part_lists_those_that_there_are() {
        let error = chosen(&["chekc".to_owned()]).unwrap_err().to_string();
        assert!(
            error.contains("chekc") && error.contains("check") && error.contains("perf"),
            "{error}"
        );
        assert_eq!(chosen(&[]).unwrap().len(), PARTS.len());
        // As often as it is named, and in the list's order: what is cheap comes first.
        let two = chosen(&["graph".to_owned(), "env".to_owned(), "graph".to_owned()]).unwrap();
        assert_eq!(
            two.iter().map(|part| part.name).collect::<Vec<_>>(),
            ["env", "graph"]
        );
    }
}
