//! The host's cost of a call: an eager all_reduce of 8 bytes by two libraries, by turns, in the same processes.

use std::path::Path;

use anyhow::Result;
use serde_json::json;

use super::{
    super::step::{StepResult, Steps},
    driver::{driver_on, figure},
};
use crate::stats::median;

/// Processes, each with [`TURNS`]: another place in memory, another processor.
const RUNS: usize = 5;
/// Batches of calls of each library.
const TURNS: usize = 400;
/// The most that a call may take, of NCCL's.
const GOAL: f64 = 0.5;

/// Two libraries by turns: medians, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Turns {
    /// Of an eager call on the host.
    pub(super) host: Pair,
    /// Of an operation of a graph on the GPU.
    pub(super) device: Pair,
}

/// One median of both libraries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pair {
    pub(super) one: f64,
    pub(super) other: f64,
    /// What the first takes more in the same turn, median of turns.
    pub(super) more: f64,
}

impl Turns {
    /// Of what the driver's `turns` prints.
    pub(super) fn read(said: &str) -> Option<Self> {
        let line = said.lines().find(|line| line.starts_with("ok "))?;
        let pair = |kind: &str| {
            Some(Pair {
                one: figure(line, &format!("{kind}_ns"))?,
                other: figure(line, &format!("other_{kind}_ns"))?,
                more: figure(line, &format!("{kind}_more_ns"))?,
            })
        };
        Some(Self {
            host: pair("host")?,
            device: pair("device")?,
        })
    }
}

/// Takes two libraries by turns, on two ranks, in [`RUNS`] processes; gives what those say that come to their end.
pub(super) fn by_turns(
    steps: &mut Steps<'_>,
    name: &str,
    (one, other): (&Path, &Path),
    variables: &[(&str, &str)],
) -> Vec<Turns> {
    let mut all = Vec::new();
    for run in 1..=RUNS {
        let mut command = driver_on(steps, one, "turns 2 p");
        command
            .arg(other)
            .arg(TURNS.to_string())
            .env("NCCL_NVLS_ENABLE", "0")
            .envs(variables.iter().copied());
        let said = steps.run(&format!("{name}-{run}"), 30, command, judge);
        all.extend(said.as_deref().and_then(Turns::read));
    }
    all
}

fn judge(said: &str) -> StepResult {
    let turns = Turns::read(said).ok_or("it has printed no times")?;
    Ok(format!(
        "a call {:.2} and {:.2} us, an operation of a graph {:.2} and {:.2} us",
        turns.host.one / 1e3,
        turns.host.other / 1e3,
        turns.device.one / 1e3,
        turns.device.other / 1e3
    ))
}

pub(super) fn run(steps: &mut Steps<'_>, ours: &Path, stock: &Path) -> Result<()> {
    let all = by_turns(steps, "call", (ours, stock), &[]);
    let of = |time: &dyn Fn(&Pair) -> f64| median(all.iter().map(|turns| time(&turns.host)).collect());
    if let (Some(ours), Some(nccl), Some(ratio)) = (
        of(&|host| host.one),
        of(&|host| host.other),
        of(&|host| host.one / host.other),
    ) {
        let met = ratio <= GOAL;
        steps.note(&format!(
            "an eager all_reduce of 8 B on the host, us a call, ours and NCCL's by turns in {} processes, medians of these: ours {:.2}, NCCL {:.2}, \
             ratio of each {ratio:.3}, goal {GOAL}  {}\n\n",
            all.len(),
            ours / 1e3,
            nccl / 1e3,
            if met { "met" } else { "missed" }
        ));
        steps.figures(json!({
            "call_ours_us": ours / 1e3, "call_nccl_us": nccl / 1e3, "ratio": ratio, "goal": GOAL, "met": met,
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_turns_take_is_read() {
        let said = "NCCL INFO host_ns 7\nok 400 turns, host_ns 2850.5, other_host_ns 6050.0, host_more_ns -3190.0, \
                    device_ns 2240.0, other_device_ns 5560.0, device_more_ns -3300.5\n";
        let turns = Turns::read(said).unwrap();
        assert_eq!(
            (turns.host.one, turns.host.other, turns.host.more),
            (2850.5, 6050.0, -3190.0)
        );
        assert_eq!(turns.device.more, -3300.5);
        assert!(judge(said).unwrap().starts_with("a call 2.85 and 6.05 us"));
        for wrong in [
            "",
            "ok 400 turns",
            &said.replace("6050.0", "nan"),
            &said.replace("ok ", ""),
        ] {
            assert_eq!(Turns::read(wrong), None, "{wrong}");
        }
    }
}
