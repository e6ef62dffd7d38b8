//! NVIDIA's compute-sanitizer on the library's kernels.

use std::{process::Command, time::Duration};

use anyhow::{Result, anyhow};

use super::super::step::{Steps, Verdict};

/// Its last line counts what it has found.
fn clean(said: &str) -> Verdict {
    let summaries: Vec<&str> = said
        .lines()
        .filter(|line| line.contains("ERROR SUMMARY") || line.contains("RACECHECK SUMMARY"))
        .collect();
    let last = summaries.last().ok_or("it has printed no summary")?.trim();
    let found = summaries.iter().any(|line| {
        !(line.contains("ERROR SUMMARY: 0 errors") || line.contains("RACECHECK SUMMARY: 0 hazards"))
    });
    if found || said.contains("FAILED") {
        return Err(last.to_owned());
    }
    Ok(last.to_owned())
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let sanitizer = steps.host.sanitizer().map_err(|reason| anyhow!(reason))?;
    // Straight between buffers, and pushed: what only long operations are otherwise. No races are looked for: where two ranks reduce, all warps of a
    // block write the same places, each before it reads them, which would be reported.
    let straight: &[_] = &[
        ("RINGSIGHT_STRAIGHT_BYTES", "1"),
        ("RINGSIGHT_PUSH_BYTES", "65536"),
    ];
    for (tool, name, words, variables) in [
        ("memcheck", "check", "check 2 t 262144", &[][..]),
        ("memcheck", "graph", "graph 2 t", &[]),
        ("memcheck", "straight", "check 2 t 262144", straight),
        ("racecheck", "check", "check 2 t 262144", &[]),
        ("racecheck", "graph", "graph 2 t", &[]),
    ] {
        let mut command = Command::new(&sanitizer);
        command
            .args(["--tool", tool, "--error-exitcode", "7"])
            // The device is asked for attributes of addresses that it does not know: that is an answer, no error.
            .args(["--report-api-errors", "no"])
            .arg(steps.host.program("driver"))
            .arg(steps.host.library())
            .args(words.split(' '))
            .env("NCCL_SOCKET_IFNAME", "lo")
            // Kernels are many times slower here: nobody is to be taken for stuck.
            .env("NCCL_KERNEL_TIMEOUT_MS", "0")
            .envs(variables.iter().copied());
        steps.run(
            &format!("{tool}-{name}"),
            Duration::from_secs(115),
            command,
            clean,
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::clean;

    #[test]
    fn what_it_has_found_fails() {
        let well = "ok 407 cases\n========= ERROR SUMMARY: 0 errors\n";
        assert!(clean(well).unwrap().contains("0 errors"));
        assert!(clean("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n").is_ok());
        assert!(clean("========= ERROR SUMMARY: 10 errors\n").is_err());
        assert!(clean("========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n").is_err());
        assert!(clean("FAILED element\n========= ERROR SUMMARY: 0 errors\n").is_err());
        assert!(clean("").unwrap_err().contains("no summary"));
    }
}
