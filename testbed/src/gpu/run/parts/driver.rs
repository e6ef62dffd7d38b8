//! Parts that drive the library through its C interface (`comm/tests/cuda/driver.c`).

use std::{path::Path, process::Command};

use anyhow::Result;

use super::super::step::{Steps, says_ok};

/// Variables of a run.
type Variables<'a> = &'a [(&'a str, &'a str)];

/// `driver LIBRARY` with these words behind.
pub(super) fn driver(steps: &Steps<'_>, words: &str) -> Command {
    driver_on(steps, &steps.host.library(), words)
}

/// The same on another library of ours.
pub(super) fn driver_on(steps: &Steps<'_>, library: &Path, words: &str) -> Command {
    let mut command = Command::new(steps.host.program("driver"));
    command.arg(library).args(words.split_whitespace());
    // What goes wrong is said by the library, and nothing else is.
    command.env("NCCL_DEBUG", "WARN").env("NCCL_SOCKET_IFNAME", "lo");
    command
}

/// The number behind a name in the words that the driver says.
pub(super) fn figure(said: &str, name: &str) -> Option<f64> {
    let mut words = said.split([' ', ',', '\n']).skip_while(|word| *word != name);
    let number: f64 = words.nth(1)?.parse().ok()?;
    Some(number).filter(|number| number.is_finite())
}

impl Steps<'_> {
    /// Runs the driver with the words `MODE RANKS KIND …`. The step is called after the mode, unless that is the part's, the ranks and their
    /// kind; `ending` says what is special.
    fn drive(&mut self, limits: (usize, u64), words: &str, ending: &str, variables: Variables<'_>) {
        let mut parts = words.split(' ');
        let [mode, ranks, kind] = [(); 3].map(|()| parts.next().unwrap_or_default());
        let mode = Some(mode).filter(|mode| *mode != self.part).unwrap_or_default();
        let name = format!("{mode}-{ranks}{kind}{ending}");
        self.drive_as(name.trim_start_matches('-'), limits, words, variables);
    }

    /// Runs the driver for so many seconds at most. It is skipped where there are fewer GPUs than it needs.
    fn drive_as(&mut self, name: &str, limits: (usize, u64), words: &str, variables: Variables<'_>) {
        let (gpus, seconds) = limits;
        if self.skips_without(name, gpus) {
            return;
        }
        let mut command = driver(self, words);
        // Streams of ranks that share a GPU wait for each other where they share one of its queues.
        command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
        command.envs(variables.iter().copied());
        self.run(name, seconds, command, says_ok);
    }
}

/// What has buffers reached straight, however short operations are; and contributions pushed.
const STRAIGHT: Variables<'_> = &[("RINGSIGHT_STRAIGHT_BYTES", "1")];
const PUSHED: Variables<'_> = &[("RINGSIGHT_STRAIGHT_BYTES", "1"), ("RINGSIGHT_PUSH_BYTES", "1")];

/// What has copy engines bring what is reduced in windows to who reduces it, in many pieces, however short it is.
pub(super) const REDUCED_BY_ENGINES: &[(&str, &str)] = &[
    ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
    ("RINGSIGHT_ENGINE_PIECE_BYTES", "8192"),
    ("RINGSIGHT_ALGO", "AllReduce:^one_shot"),
];
/// Windows, whose operations copy engines do: what has them so, by the ending of the step's name.
const BY_ENGINES: [(&str, Variables<'_>); 2] = [
    ("", &[("NCCL_CTA_POLICY", "2")]),
    ("-reduces", REDUCED_BY_ENGINES),
];

/// Ranks beyond the GPUs share them.
pub(super) fn check(steps: &mut Steps<'_>) -> Result<()> {
    let one = &[("CUDA_VISIBLE_DEVICES", "0")];
    let small: Variables<'_> = &[("NCCL_BUFFSIZE", "65536"), ("NCCL_MIN_CTAS", "8")];
    let host_memory = &[("NCCL_P2P_DISABLE", "1")];
    steps.drive((1, 40), "check 1 t 16777216", "", &[]);
    steps.drive((1, 40), "check 2 t 33554432", "", &[]);
    steps.drive((1, 40), "check 2 t 8388608", "-host-memory", host_memory);
    steps.drive((1, 40), "check 2 t 8388608", "-small-slots", small);
    steps.drive((1, 40), "check 3 t 16777216", "", &[]);
    steps.drive((1, 40), "check 4 t 33554432", "", &[]);
    steps.drive((1, 40), "check 4 t 8388608", "-one-gpu", one);
    let ring = &[("RINGSIGHT_ALGO", "ring")];
    for (ending, variables) in [("", &[][..]), ("-push", PUSHED), ("-ring", ring)] {
        steps.drive((1, 60), "bits 4 t 67108864", ending, variables);
    }
    for words in ["random 2 t 100", "random 2 p 100", "random 4 t 60"] {
        steps.drive((1, 60), words, "", &[]);
    }
    for words in ["streams 2 t", "streams 2 p", "streams 4 t"] {
        steps.drive((1, 30), words, "", &[]);
    }
    for kind in ["t", "p"] {
        for (graphs, ending) in [("1", "-one-gpu"), ("0", "-one-gpu-kernels")] {
            let variables = [("GPUS", "00"), ("RINGSIGHT_GRAPH_LAUNCH", graphs)];
            // The first tells which call it is, should the second hang.
            steps.drive((1, 60), &format!("held 2 {kind}"), ending, &variables);
            steps.drive((1, 30), &format!("streams 2 {kind}"), ending, &variables);
        }
    }
    steps.drive((1, 60), "check 2 p 8388608", "", &[]);
    steps.drive((2, 60), "check 4 p 8388608", "", &[]);
    // In another order, and by processes that do not see each other's GPU.
    let reversed = &[("GPUS", "10")];
    steps.drive((2, 60), "check 2 t 8388608", "-reversed", reversed);
    steps.drive((2, 60), "check 2 p 8388608", "-reversed", reversed);
    steps.drive((2, 60), "check 2 p 8388608", "-one-each", &[("ONE_EACH", "1")]);
    // Eager and replayed.
    for (ranks, kind) in [(2, "t"), (2, "p"), (4, "t"), (4, "p"), (8, "t")] {
        for (ending, variables) in BY_ENGINES {
            let words = format!("windows {ranks} {kind}");
            steps.drive((ranks, 60), &words, ending, variables);
        }
    }
    for words in ["promise 2 t", "alone 2 t", "promise 2 p", "alone 2 p"] {
        for (ending, variables) in BY_ENGINES {
            steps.drive((1, 30), words, ending, variables);
        }
    }
    steps.drive((4, 80), "check 8 t 8388608", "", &[]);
    steps.drive((4, 80), "random 8 t 30", "", &[]);
    Ok(())
}

/// Buffers that other processes map while they come and go.
pub(super) fn buffers(steps: &mut Steps<'_>) -> Result<()> {
    for ranks in [2, 4] {
        for (ending, variables) in [("", STRAIGHT), ("-push", PUSHED)] {
            for mode in ["remap", "pieces"] {
                let words = format!("{mode} {ranks} p 33554432");
                steps.drive((ranks, 60), &words, ending, variables);
            }
        }
        let words = format!("check {ranks} p 8388608");
        steps.drive((ranks, 60), &words, "", STRAIGHT);
    }
    Ok(())
}

pub(super) fn graph(steps: &mut Steps<'_>) -> Result<()> {
    steps.drive((1, 30), "graph 2 t", "", &[]);
    steps.drive((1, 30), "graph 4 t", "", &[]);
    steps.drive((1, 40), "graph 2 p", "", &[]);
    steps.drive((1, 20), "beside 2 t", "", &[]);
    steps.drive((1, 20), "beside 2 p", "", &[]);
    steps.drive((4, 40), "graph 4 p", "", &[]);
    Ok(())
}

pub(super) fn abort(steps: &mut Steps<'_>) -> Result<()> {
    steps.drive((1, 20), "abort 2 t", "", &[]);
    steps.drive((1, 30), "abort 2 p", "", &[]);
    for words in ["released 2 t", "released 2 p", "released 2 n"] {
        steps.drive((1, 40), words, "", &[]);
    }
    // In steps, so that no other device reads what there is not.
    let lines = &[("RINGSIGHT_STRAIGHT_BYTES", "18446744073709551615")];
    steps.drive((1, 30), "fault 3 t", "", lines);
    steps.drive((1, 30), "fault 3 p", "", lines);
    // What the ranks differ in.
    let different = [
        "type",
        "count",
        "length",
        "function",
        "messages",
        "sent-count",
        "sent-length",
        "taken-length",
        "reduction",
        "root",
    ];
    for (number, what) in different.iter().enumerate() {
        for kind in ["t", "p"] {
            let (name, words) = (
                format!("differ-{what}-2{kind}"),
                format!("differ 2 {kind} {number}"),
            );
            steps.drive_as(&name, (1, 30), &words, &[]);
        }
    }
    for words in ["death 2 p", "refuse 2 t", "refuse 2 p"] {
        steps.drive((1, 30), words, "", &[]);
    }
    Ok(())
}

/// Ranks on nodes of their own: between them data is staged in host memory and goes over sockets.
pub(super) fn nodes(steps: &mut Steps<'_>) -> Result<()> {
    steps.drive((1, 80), "check 2 n 8388608", "", &[]);
    steps.drive((1, 60), "random 2 n 60", "", &[]);
    steps.drive((1, 40), "graph 2 n", "", &[]);
    steps.drive((1, 30), "abort 2 n", "", &[]);
    steps.drive((1, 30), "death 2 n", "", &[]);
    Ok(())
}
