//! What a call costs the host: an eager all_reduce of 8 bytes, ours and NCCL's in turn.

use std::{path::Path, process::Command, time::Duration};

use anyhow::Result;
use serde_json::json;

use super::super::step::{Steps, Verdict};
use crate::bench::median;

/// Pairs of runs: what the machine does meanwhile meets both libraries.
const PAIRS: usize = 9;
/// The most that a call may take, of NCCL's.
const GOAL: f64 = 0.5;

/// Time until a call returns, microseconds, in a row that the driver prints.
fn host_micros(said: &str) -> Option<f64> {
    let row = said.lines().find(|line| line.starts_with("row all_reduce "))?;
    let mut words = row.split_whitespace();
    words.find(|word| *word == "host_us")?;
    words
        .next()?
        .parse()
        .ok()
        .filter(|micros: &f64| micros.is_finite())
}

fn judge(said: &str) -> Verdict {
    host_micros(said)
        .map(|micros| format!("{micros} us until a call returns"))
        .ok_or_else(|| "it has printed no time".to_owned())
}

pub(super) fn run(steps: &mut Steps<'_>, ours: &Path, stock: &Path) -> Result<()> {
    let (mut of_ours, mut of_nccl) = (Vec::new(), Vec::new());
    for pair in 1..=PAIRS {
        for (name, library, times) in [("ours", ours, &mut of_ours), ("nccl", stock, &mut of_nccl)] {
            let mut command = Command::new(steps.host.program("driver"));
            command
                .arg(library)
                .args(["bench", "2", "p", "8", "2", "8"])
                .env("NCCL_NVLS_ENABLE", "0")
                .env("NCCL_SOCKET_IFNAME", "lo");
            let name = format!("call-{name}-{pair}");
            let said = steps.run(&name, Duration::from_secs(30), command, judge);
            times.extend(said.as_deref().and_then(host_micros));
        }
    }
    if let (Some(ours), Some(nccl)) = (median(of_ours), median(of_nccl)) {
        let ratio = ours / nccl;
        let met = ratio <= GOAL;
        steps.note(&format!(
            "an eager all_reduce of 8 B on the host, us a call, median of {PAIRS}: ours {ours:.2}, NCCL {nccl:.2}, \
             ratio {ratio:.2}, goal {GOAL}  {}\n\n",
            if met { "met" } else { "missed" }
        ));
        steps.figures(json!({
            "call_ours_us": ours, "call_nccl_us": nccl, "ratio": ratio, "goal": GOAL, "met": met,
        }));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_call_is_read() {
        let said =
            "init 300 ms\nrow all_reduce 2p 8 eager_us 7.10 host_us 5.25 graph_us 2.80 bus_GBps 0.00\nok\n";
        assert_eq!(host_micros(said), Some(5.25));
        assert!(judge(said).unwrap().starts_with("5.25 us"));
        for wrong in [
            "",
            "row all_gather 2p 8 host_us 1",
            "row all_reduce 2p 8 host_us",
            "row all_reduce host_us nan",
        ] {
            assert_eq!(host_micros(wrong), None, "{wrong}");
        }
    }
}
