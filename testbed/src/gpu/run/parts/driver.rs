//! Parts that drive the library through its C interface (`comm/tests/cuda/driver.c`).

use std::{path::Path, process::Command};

use anyhow::Result;

use super::super::step::{Steps, says_ok};

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

fn drive(steps: &mut Steps<'_>, name: &str, seconds: u64, words: &str, variables: &[(&str, &str)]) {
    let mut command = driver(steps, words);
    // Streams of ranks that share a GPU wait for each other where they share one of its queues.
    command.env("CUDA_DEVICE_MAX_CONNECTIONS", "32");
    command.envs(variables.iter().copied());
    steps.run(name, seconds, command, says_ok);
}

/// What has contributions pushed, however short they are.
const PUSHED: &[(&str, &str)] = &[("RINGSIGHT_STRAIGHT_BYTES", "1"), ("RINGSIGHT_PUSH_BYTES", "1")];

/// What has copy engines bring what is reduced in windows to who reduces it, in many pieces, however short it is.
pub(super) const REDUCED_BY_ENGINES: &[(&str, &str)] = &[
    ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
    ("RINGSIGHT_ENGINE_PIECE_BYTES", "8192"),
    ("RINGSIGHT_ALGO", "AllReduce:^one_shot"),
];

/// Ranks beyond the GPUs share them.
pub(super) fn check(steps: &mut Steps<'_>) -> Result<()> {
    let small: &[(&str, &str)] = &[("NCCL_BUFFSIZE", "65536"), ("NCCL_MIN_CTAS", "8")];
    drive(steps, "1t", 40, "check 1 t 16777216", &[]);
    drive(steps, "2t", 40, "check 2 t 33554432", &[]);
    drive(
        steps,
        "2t-host-memory",
        40,
        "check 2 t 8388608",
        &[("NCCL_P2P_DISABLE", "1")],
    );
    drive(steps, "2t-small-slots", 40, "check 2 t 8388608", small);
    drive(steps, "3t", 40, "check 3 t 16777216", &[]);
    drive(steps, "4t", 40, "check 4 t 33554432", &[]);
    drive(
        steps,
        "4t-one-gpu",
        40,
        "check 4 t 8388608",
        &[("CUDA_VISIBLE_DEVICES", "0")],
    );
    drive(steps, "bits-4t", 60, "bits 4 t 67108864", &[]);
    drive(steps, "bits-4t-push", 60, "bits 4 t 67108864", PUSHED);
    let ring = &[("RINGSIGHT_ALGO", "ring")];
    drive(steps, "bits-4t-ring", 60, "bits 4 t 67108864", ring);
    drive(steps, "random-2t", 60, "random 2 t 100", &[]);
    drive(steps, "random-2p", 60, "random 2 p 100", &[]);
    drive(steps, "random-4t", 60, "random 4 t 60", &[]);
    for (ranks, kind) in [(2, "t"), (2, "p"), (4, "t")] {
        drive(
            steps,
            &format!("streams-{ranks}{kind}"),
            30,
            &format!("streams {ranks} {kind}"),
            &[],
        );
    }
    for kind in ["t", "p"] {
        for (graphs, ending) in [("1", ""), ("0", "-kernels")] {
            let variables = [("GPUS", "00"), ("RINGSIGHT_GRAPH_LAUNCH", graphs)];
            // The first tells which call it is, should the second hang.
            for (mode, limit) in [("held", 60), ("streams", 30)] {
                let name = format!("{mode}-2{kind}-one-gpu{ending}");
                drive(steps, &name, limit, &format!("{mode} 2 {kind}"), &variables);
            }
        }
    }
    drive(steps, "2p", 60, "check 2 p 8388608", &[]);
    if !steps.skips_without("4p", 2) {
        drive(steps, "4p", 60, "check 4 p 8388608", &[]);
    }
    // In another order, and by processes that do not see each other's GPU.
    for (name, words, variable) in [
        ("2t-reversed", "check 2 t 8388608", ("GPUS", "10")),
        ("2p-reversed", "check 2 p 8388608", ("GPUS", "10")),
        ("2p-one-each", "check 2 p 8388608", ("ONE_EACH", "1")),
    ] {
        if !steps.skips_without(name, 2) {
            drive(steps, name, 60, words, &[variable]);
        }
    }
    // Windows, whose operations copy engines do, eager and replayed.
    let engines: &[(&str, &str)] = &[("NCCL_CTA_POLICY", "2")];
    for (ranks, kind) in [(2, "t"), (2, "p"), (4, "t"), (4, "p"), (8, "t")] {
        for (way, variables) in [("", engines), ("-reduces", REDUCED_BY_ENGINES)] {
            let name = format!("windows-{ranks}{kind}{way}");
            if !steps.skips_without(&name, ranks) {
                drive(steps, &name, 60, &format!("windows {ranks} {kind}"), variables);
            }
        }
    }
    for kind in ["t", "p"] {
        for (mode, way, variables) in [
            ("promise", "", engines),
            ("promise", "-reduces", REDUCED_BY_ENGINES),
            ("alone", "", engines),
            ("alone", "-reduces", REDUCED_BY_ENGINES),
        ] {
            let words = format!("{mode} 2 {kind}");
            drive(steps, &format!("{mode}-2{kind}{way}"), 30, &words, variables);
        }
    }
    if !steps.skips_without("8t", 4) {
        drive(steps, "8t", 80, "check 8 t 8388608", &[]);
        drive(steps, "random-8t", 80, "random 8 t 30", &[]);
    }
    Ok(())
}

/// Buffers that other processes map while they come and go.
pub(super) fn buffers(steps: &mut Steps<'_>) -> Result<()> {
    let straight: &[(&str, &str)] = &[("RINGSIGHT_STRAIGHT_BYTES", "1")];
    for ranks in [2, 4] {
        if steps.skips_without(&format!("{ranks}p"), ranks) {
            continue;
        }
        for (name, variables) in [("", straight), ("-push", PUSHED)] {
            for mode in ["remap", "pieces"] {
                drive(
                    steps,
                    &format!("{mode}-{ranks}p{name}"),
                    60,
                    &format!("{mode} {ranks} p 33554432"),
                    variables,
                );
            }
        }
        drive(
            steps,
            &format!("check-{ranks}p"),
            60,
            &format!("check {ranks} p 8388608"),
            straight,
        );
    }
    Ok(())
}

pub(super) fn graph(steps: &mut Steps<'_>) -> Result<()> {
    drive(steps, "2t", 30, "graph 2 t", &[]);
    drive(steps, "4t", 30, "graph 4 t", &[]);
    drive(steps, "2p", 40, "graph 2 p", &[]);
    drive(steps, "beside-2t", 20, "beside 2 t", &[]);
    drive(steps, "beside-2p", 20, "beside 2 p", &[]);
    if !steps.skips_without("4p", 4) {
        drive(steps, "4p", 40, "graph 4 p", &[]);
    }
    Ok(())
}

pub(super) fn abort(steps: &mut Steps<'_>) -> Result<()> {
    drive(steps, "2t", 20, "abort 2 t", &[]);
    drive(steps, "2p", 30, "abort 2 p", &[]);
    for kind in ["t", "p", "n"] {
        drive(
            steps,
            &format!("released-2{kind}"),
            40,
            &format!("released 2 {kind}"),
            &[],
        );
    }
    // In steps, so that no other device reads what there is not.
    let lines = [("RINGSIGHT_STRAIGHT_BYTES", "18446744073709551615")];
    for kind in ["t", "p"] {
        drive(
            steps,
            &format!("fault-3{kind}"),
            30,
            &format!("fault 3 {kind}"),
            &lines,
        );
    }
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
            let name = format!("differ-{what}-2{kind}");
            drive(steps, &name, 30, &format!("differ 2 {kind} {number}"), &[]);
        }
    }
    drive(steps, "death-2p", 30, "death 2 p", &[]);
    drive(steps, "refuse-2t", 30, "refuse 2 t", &[]);
    drive(steps, "refuse-2p", 30, "refuse 2 p", &[]);
    Ok(())
}

/// Ranks on nodes of their own: between them data is staged in host memory and goes over sockets.
pub(super) fn nodes(steps: &mut Steps<'_>) -> Result<()> {
    drive(steps, "check-2n", 80, "check 2 n 8388608", &[]);
    drive(steps, "random-2n", 60, "random 2 n 60", &[]);
    drive(steps, "graph-2n", 40, "graph 2 n", &[]);
    drive(steps, "abort-2n", 30, "abort 2 n", &[]);
    drive(steps, "death-2n", 30, "death 2 n", &[]);
    Ok(())
}
