//! NVIDIA's compute-sanitizer on the library's kernels.

use std::{path::Path, process::Command};

use anyhow::{Result, anyhow};

use super::{
    super::{
        gpu_host::GpuHost,
        step::{StepResult, Steps},
    },
    driver::REDUCED_BY_ENGINES,
};

/// One run of the driver under a tool, which name it.
struct Check {
    tool: &'static str,
    name: &'static str,
    mode: &'static str,
    variables: &'static [(&'static str, &'static str)],
}

const fn check(
    tool: &'static str,
    name: &'static str,
    mode: &'static str,
    variables: &'static [(&'static str, &'static str)],
) -> Check {
    Check {
        tool,
        name,
        mode,
        variables,
    }
}

/// What only long operations are otherwise: straight between buffers. An all_reduce as small as these is done in one shot unless that is left out.
const STRAIGHT: (&str, &str) = ("RINGSIGHT_STRAIGHT_BYTES", "1");
const NOT_IN_ONE_SHOT: (&str, &str) = ("RINGSIGHT_ALGO", "^one_shot");
/// Contributions of all_reduces pushed: all of them, and those from the middle of the sizes on.
const PUSHED: (&str, &str) = ("RINGSIGHT_PUSH_BYTES", "1");
const LONG_PUSHED: (&str, &str) = ("RINGSIGHT_PUSH_BYTES", "65536");
/// Broadcasts and reductions to one rank in parts, which are in lines what is longer than these.
const IN_PARTS: (&str, &str) = ("RINGSIGHT_ALGO", "broadcast:two_shot;reduce:two_shot");

/// Round rings and by messages, through memory of the host.
const APART: &[(&str, &str)] = &[("NCCL_P2P_DISABLE", "1")];

/// However many ranks there are.
const ALL: &[Check] = &[
    check("memcheck", "windows", "windows", REDUCED_BY_ENGINES),
    check("racecheck", "windows", "windows", REDUCED_BY_ENGINES),
    check("memcheck", "check", "check", &[]),
    check("memcheck", "graph", "graph", &[]),
    check(
        "memcheck",
        "straight",
        "check",
        &[STRAIGHT, NOT_IN_ONE_SHOT, LONG_PUSHED],
    ),
    check("memcheck", "apart", "check", APART),
    check("racecheck", "check", "check", &[]),
    check("racecheck", "graph", "graph", &[]),
    check("racecheck", "apart", "check", APART),
    check("racecheck", "straight", "check", &[STRAIGHT, NOT_IN_ONE_SHOT]),
    check(
        "racecheck",
        "push",
        "check",
        &[STRAIGHT, NOT_IN_ONE_SHOT, PUSHED, ("OPS", "all_reduce")],
    ),
];

/// Among four besides, which pass on what one rank has or gets.
const FOUR: &[Check] = &[
    check(
        "memcheck",
        "parts",
        "check",
        &[IN_PARTS, ("OPS", "broadcast reduce")],
    ),
    check(
        "racecheck",
        "parts",
        "check",
        &[IN_PARTS, ("OPS", "broadcast reduce")],
    ),
];

/// Its last line counts what it has found.
fn clean(said: &str) -> StepResult {
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
    // Where the driver has done nothing there is nothing to be found.
    let done = said.lines().find(|line| line.starts_with("ok "));
    let done = done.ok_or("the driver has not said ok")?;
    Ok(format!("{}; {}", done.trim_start_matches("ok "), last))
}

fn command(host: &GpuHost, sanitizer: &Path, check: &Check, ranks: usize) -> Command {
    let mut command = Command::new(sanitizer);
    command
        .args(["--tool", check.tool, "--error-exitcode", "7"])
        // The device is asked for attributes of addresses that it does not know: that is an answer, no error.
        .args(["--report-api-errors", "no"])
        .arg(host.program("driver"))
        .arg(host.library())
        .args([check.mode, &ranks.to_string(), "t"])
        // The greatest size, of modes that have sizes.
        .args((check.mode == "check").then_some("262144"))
        .env("NCCL_SOCKET_IFNAME", "lo")
        // Kernels are many times slower here: nobody is to be taken for stuck.
        .env("NCCL_KERNEL_TIMEOUT_MS", "0")
        .envs(check.variables.iter().copied());
    command
}

/// Its checks of so many ranks.
pub(super) fn run(steps: &mut Steps<'_>, ranks: usize) -> Result<()> {
    let sanitizer = steps.host.sanitizer().map_err(|reason| anyhow!(reason))?;
    let besides = if ranks == 4 { FOUR } else { &[] };
    for check in ALL.iter().chain(besides) {
        let command = command(steps.host, &sanitizer, check, ranks);
        let name = format!("{}-{}", check.tool, check.name);
        steps.run(&name, 115, command, clean);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn what_it_has_found_fails() {
        let well = "ok 407 cases\n========= ERROR SUMMARY: 0 errors\n";
        assert_eq!(
            clean(well).unwrap(),
            "407 cases; ========= ERROR SUMMARY: 0 errors"
        );
        let hazards = |count| {
            format!(
                "ok 1\n========= RACECHECK SUMMARY: {count} hazards displayed (0 errors, {count} warnings)\n"
            )
        };
        assert!(clean(&hazards(0)).is_ok());
        assert!(clean(&hazards(2)).is_err());
        assert!(clean("ok 1\n========= ERROR SUMMARY: 10 errors\n").is_err());
        assert!(clean("FAILED element\nok 1\n========= ERROR SUMMARY: 0 errors\n").is_err());
        assert!(clean("ok 1\n").unwrap_err().contains("no summary"));
        assert!(
            clean("========= ERROR SUMMARY: 0 errors\n")
                .unwrap_err()
                .contains("not said ok")
        );
    }

    #[test]
    fn steps_have_names_of_their_own_and_each_its_variables() {
        let checks = || ALL.iter().chain(FOUR);
        let names: HashSet<_> = checks().map(|check| (check.tool, check.name)).collect();
        assert_eq!(names.len(), checks().count());
        let host = GpuHost::look("/bundle".into(), None);
        let command = command(&host, Path::new("/sanitizer"), ALL.last().unwrap(), 2);
        let words: Vec<_> = command.get_args().filter_map(|word| word.to_str()).collect();
        assert_eq!(words[..2], ["--tool", "racecheck"]);
        assert_eq!(
            words[6..],
            [
                "/bundle/bin/driver",
                "/bundle/lib/libnccl.so.2",
                "check",
                "2",
                "t",
                "262144"
            ]
        );
        let variable = |name: &str| {
            let mut all = command.get_envs();
            all.find(|(key, _)| *key == name)
                .and_then(|(_, value)| value?.to_str())
        };
        assert_eq!(variable("OPS"), Some("all_reduce"));
        assert_eq!(variable("RINGSIGHT_PUSH_BYTES"), Some("1"));
    }
}
