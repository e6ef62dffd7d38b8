//! The cost of records, watchdog and collector, for an all_reduce of 8 bytes.
//!
//! Records: a library with records minus one without, by turns, in the same processes. Watchdog (by pages and by CUDA events) and attached
//! collector: a process with minus a process without.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use serde_json::{Value, json};

use super::{
    super::step::Steps,
    calls::{self, Turns},
    collector::{Attach, attached, prepared},
    driver::{driver_on, figure},
};
use crate::{
    process::{Guarded, log_to, reason},
    stats::quantile,
};

/// The most rounds; fewer where the part's time is over before.
const ROUNDS: usize = 16;

/// The most that records, or the watchdog, may take more, of a call on the host and of an operation of a graph on the GPU, nanoseconds.
const GOALS: [f64; 2] = [50.0, 100.0];

/// A way to run the library with records.
struct Way {
    name: &'static str,
    variables: &'static [(&'static str, &'static str)],
    /// The collector is attached meanwhile, with these options.
    collector: Option<&'static [&'static str]>,
    /// The most that it may take more than the first, nanoseconds, as [`GOALS`].
    goals: [f64; 2],
}

const OFF: (&str, &str) = ("NCCL_KERNEL_TIMEOUT_MS", "0");

/// Nobody looks, as all others are compared with; and who looks.
const WAYS: [Way; 5] = [
    Way {
        name: "off",
        variables: &[OFF],
        collector: None,
        goals: [0.0, 0.0],
    },
    Way {
        name: "pages",
        variables: &[("RINGSIGHT_WATCHDOG_SOURCE", "pages")],
        collector: None,
        goals: GOALS,
    },
    Way {
        name: "events",
        variables: &[("RINGSIGHT_WATCHDOG_SOURCE", "events")],
        collector: None,
        goals: GOALS,
    },
    Way {
        name: "collector",
        variables: &[OFF],
        collector: Some(&[]),
        goals: [1000.0, 1000.0],
    },
    // The same without probes, which nothing hits while the ring has room.
    Way {
        name: "ring",
        variables: &[OFF],
        collector: Some(&["--no-ebpf"]),
        goals: [1000.0, 1000.0],
    },
];

/// Nanoseconds of an eager call on the host, and of an operation on the GPU in the best of some graphs.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    host: f64,
    device: f64,
}

/// What the driver's `replays` says.
fn times(said: &str) -> Option<Times> {
    Some(Times {
        host: figure(said, "host_ns")?,
        device: figure(said, "best_device_ns")?,
    })
}

fn once(steps: &Steps<'_>, way: &Way, folder: &Path) -> Result<Times> {
    // A process for each rank, as jobs have them: ranks of one process share its ring.
    let mut command = driver_on(steps, &steps.host.library(), "replays 2 p");
    command.arg(match way.collector {
        Some(_) => folder,
        None => Path::new("-"),
    });
    command.args(["300", "20"]).envs(way.variables.iter().copied());
    let log = folder.join("job-0.log");
    if let Some(options) = way.collector {
        attached(steps, folder, vec![command], Attach::Children, options)?;
    } else {
        log_to(&mut command, &log)?;
        let mut job = Guarded::start("the driver", &mut command, libc::SIGKILL)?;
        let status = job.wait(Duration::from_secs(30))?;
        if !status.success() {
            bail!("the driver: {}", reason(status));
        }
    }
    let said = fs::read_to_string(&log)?;
    times(&said).context("it has printed no times")
}

/// Quartiles and the median.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|part| quantile(&values, part).unwrap_or(f64::NAN))
}

fn rounds(steps: &Steps<'_>) -> Result<Vec<[Times; WAYS.len()]>> {
    let mut all = Vec::new();
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS {
        if steps.left() < longest {
            break;
        }
        let begun = Instant::now();
        let mut found = [Times {
            host: 0.0,
            device: 0.0,
        }; WAYS.len()];
        // Not always the same one first.
        for place in 0..WAYS.len() {
            let at = (place + round) % WAYS.len();
            let way = &WAYS[at];
            let folder = prepared(steps, way.name)?;
            found[at] = once(steps, way, &folder).with_context(|| format!("round {round}, {}", way.name))?;
        }
        all.push(found);
        longest = longest.max(begun.elapsed());
    }
    Ok(all)
}

/// What is more, median and quartiles in ns of so many, of a call and of an operation of a graph.
fn enter(steps: &mut Steps<'_>, name: &str, (more, of): ([[f64; 3]; 2], usize), goals: [f64; 2]) -> Value {
    let text = more.map(|[low, middle, high]| format!("{middle:+.0} ns ({low:+.0} to {high:+.0})"));
    let met = more
        .iter()
        .zip(goals)
        .all(|([_, middle, _], goal)| *middle <= goal);
    let words = format!(
        "a call {} goal {:.0}, an operation of a graph {} goal {:.0}: {}",
        text[0],
        goals[0],
        text[1],
        goals[1],
        if met { "met" } else { "missed" }
    );
    steps.enter(name, Ok(words));
    json!({ "way": name, "of": of, "host_ns": more[0], "device_ns": more[1], "met": met })
}

/// With records and without, by turns in the same processes.
fn records(steps: &mut Steps<'_>) -> Option<Value> {
    let (with, without) = (steps.host.library(), steps.host.library_without_records());
    let all = calls::by_turns(steps, "records", (&with, &without), &[OFF]);
    if all.is_empty() {
        return None;
    }
    let more = |of: fn(&Turns) -> f64| quartiles(all.iter().map(of).collect());
    let more = [more(|turns| turns.host.more), more(|turns| turns.device.more)];
    Some(enter(steps, "records", (more, all.len()), GOALS))
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let mut figures: Vec<Value> = records(steps).into_iter().collect();
    let all = match rounds(steps) {
        Ok(all) => all,
        Err(error) => {
            steps.enter("rounds", Err(format!("{error:#}")));
            return Ok(());
        }
    };
    let middle = |of: &dyn Fn(&[Times; WAYS.len()]) -> f64| quartiles(all.iter().map(of).collect());
    let [_, host, _] = middle(&|round| round[0].host);
    let [_, device, _] = middle(&|round| round[0].device);
    steps.enter(
        WAYS[0].name,
        Ok(format!(
            "a call {host:.0} ns, an operation of a graph {device:.0} ns, medians of {}",
            all.len()
        )),
    );
    for (at, way) in WAYS.iter().enumerate().skip(1) {
        let more = [
            middle(&|round| round[at].host - round[0].host),
            middle(&|round| round[at].device - round[0].device),
        ];
        figures.push(enter(steps, way.name, (more, all.len()), way.goals));
    }
    steps.figures(figures.into());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read() {
        let said = "init\nok 300 replays of 20, device_ns 3010.5, best_device_ns 2800.0, host_ns 6100.5\n";
        let expected = Times {
            host: 6100.5,
            device: 2800.0,
        };
        assert_eq!(times(said), Some(expected));
        assert_eq!(times(&said.replace("6100.5", "nan")), None);
        assert_eq!(times("ok"), None);
    }

    #[test]
    fn what_is_compared_differs_in_one_thing() {
        for way in &WAYS[1..] {
            let differs = [
                way.collector != WAYS[0].collector,
                way.variables != WAYS[0].variables,
            ];
            assert_eq!(
                differs.iter().filter(|differs| **differs).count(),
                1,
                "{}",
                way.name
            );
        }
    }

    #[test]
    fn quartiles_are_of_what_is_there() {
        assert_eq!(quartiles(vec![5.0, 1.0, 3.0, 2.0, 4.0]), [2.0, 3.0, 4.0]);
        assert!(quartiles(vec![])[1].is_nan());
    }
}
