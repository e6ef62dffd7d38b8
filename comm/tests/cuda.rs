//! The CUDA device without a GPU: cuda/driver.c, which runs on GPUs too, on cuda/libcuda.cpp, a driver whose kernels are those
//! of `ringsight-kernels` compiled for this processor.

#[path = "cuda/called.rs"]
mod called;
#[path = "cuda/gpu_direct.rs"]
mod gpu_direct;
mod native;
#[path = "cuda/refused.rs"]
mod refused;
#[path = "../../tests/src/skip.rs"]
mod skip;
#[path = "cuda/watchdog.rs"]
mod watchdog;
#[path = "cuda/windows.rs"]
mod windows;

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use native::{library, run};
use ringsight_kernels::cuda;

/// The folder of the driver without a GPU and of the programs.
fn built() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        // One for all runs: nothing removes what a static holds.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
        std::fs::create_dir_all(&folder).unwrap();
        native::build_cuda(&folder);
        folder
    })
}

/// Runs the program; its last line says that all is well, after "ok ".
#[track_caller]
fn drive(test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    start("driver", test, arguments, variables)
}

#[track_caller]
fn start(program: &str, test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let said = output(program, test, arguments, variables)?;
    let last = said.lines().last().unwrap_or_default().strip_prefix("ok ");
    Some(last.unwrap_or_else(|| panic!("{said}")).to_owned())
}

/// All that it says, with the library's log.
#[track_caller]
fn output(program: &str, test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let said = run(&mut command(program, test, arguments, variables)?);
    assert!(!said.contains("FAILED"), "{said}");
    Some(said)
}

/// All that it says where it must fail.
#[track_caller]
fn failing(program: &str, test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<String> {
    let output = command(program, test, arguments, variables)?.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!output.status.success() && said.contains("FAILED"), "{said}");
    Some(said)
}

fn command(program: &str, test: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Option<Command> {
    if let Err(missing) = cuda::fatbin() {
        skip::skip(test, missing);
        return None;
    }
    let mut command = Command::new(built().join(program));
    command
        .arg(library())
        .args(arguments)
        .env("LD_LIBRARY_PATH", built())
        .env("NCCL_SOCKET_IFNAME", "lo")
        // A block is a thread here: what 32 channels of each rank poll in vain would take longest.
        .env("NCCL_MAX_CTAS", "8")
        .env_remove("NCCL_DEBUG")
        .env_remove("RINGSIGHT_DEVICE")
        .envs(variables.iter().copied());
    Some(command)
}

#[test]
fn results_are_right() {
    for (ranks, kind, gpus) in [
        ("1", "t", "2"),
        ("2", "t", "2"),
        ("3", "t", "2"),
        ("2", "p", "2"),
        ("4", "p", "4"),
    ] {
        let arguments = ["check", ranks, kind, "4194304"];
        if let Some(said) = drive("results_are_right", &arguments, &[("RINGSIGHT_MOCK_GPUS", gpus)]) {
            assert_eq!(said, "547 cases a rank", "{ranks} {kind}");
        }
    }
    // Some of four, in another order.
    for (ranks, kind, gpus) in [("3", "t", "302"), ("2", "p", "31")] {
        let variables = [("RINGSIGHT_MOCK_GPUS", "4"), ("GPUS", gpus)];
        if let Some(said) = drive(
            "results_are_right",
            &["check", ranks, kind, "4194304"],
            &variables,
        ) {
            assert_eq!(said, "547 cases a rank", "{ranks} {kind} {gpus}");
        }
    }
}

/// In one shot and in lines; straight, read and pushed; round rings.
#[test]
fn results_have_the_same_bits_however_many_blocks_there_are() {
    let test = "results_have_the_same_bits_however_many_blocks_there_are";
    let straight = ("RINGSIGHT_STRAIGHT_BYTES", "1");
    for (ranks, kind, settings) in [
        ("3", "t", &[][..]),
        ("4", "t", &[]),
        ("4", "p", &[straight]),
        ("4", "t", &[straight, ("RINGSIGHT_PUSH_BYTES", "1")]),
        ("3", "t", &[("RINGSIGHT_ALGO", "ring")]),
        ("4", "p", &[("RINGSIGHT_ALGO", "ring")]),
    ] {
        let settings = [&[("RINGSIGHT_MOCK_GPUS", "4")], settings].concat();
        if let Some(said) = drive(test, &["bits", ranks, kind, "1048576"], &settings) {
            assert_eq!(said, "216 results a rank, their bits the same", "{ranks} {kind}");
        }
    }
    // A ring adds in another order: there it shows.
    let last = [("LAST_ALGO", "ring")];
    if let Some(said) = failing("driver", test, &["bits", "3", "t", "1048576"], &last) {
        assert!(
            said.contains("NCCL_MAX_CTAS=3, time 0: others than at first"),
            "{said}"
        );
    }
}

/// What is left of the epochs before is taken for nothing of those that begin anew.
#[test]
fn epochs_begin_anew() {
    let straight = ("RINGSIGHT_STRAIGHT_BYTES", "1");
    let pushed = ("RINGSIGHT_PUSH_BYTES", "1");
    for (words, settings) in [
        (["check", "3", "t", "1048576"], &[][..]),
        (["check", "4", "t", "1048576"], &[straight, pushed]),
        (["check", "2", "p", "1048576"], &[straight]),
        (["random", "4", "t", "30"], &[]),
        (["bits", "4", "t", "1048576"], &[]),
        (["windows", "2", "t", "0"], &[("NCCL_CTA_POLICY", "2")]),
    ] {
        let settings = [
            &[("RINGSIGHT_MOCK_GPUS", "4"), ("RINGSIGHT_MOCK_EPOCHS", "last")],
            settings,
        ]
        .concat();
        drive("epochs_begin_anew", &words, &settings);
    }
}

/// ZeroCopy between the callers' buffers, where all ranks reach them, and where some begin elsewhere than at 16 bytes.
#[test]
fn what_is_long_goes_straight() {
    let straight = |gpus| [("RINGSIGHT_MOCK_GPUS", gpus), ("RINGSIGHT_STRAIGHT_BYTES", "1")];
    for (mode, ranks, kind, gpus) in [
        ("check", "2", "t", "2"),
        ("check", "3", "t", "2"),
        ("check", "4", "t", "4"),
        ("graph", "2", "t", "2"),
        ("abort", "2", "t", "2"),
        ("random", "3", "t", "2"),
    ] {
        let arguments: &[&str] = match mode {
            "check" => &[mode, ranks, kind, "4194304"],
            "random" => &[mode, ranks, kind, "7"],
            _ => &[mode, ranks, kind],
        };
        drive("what_is_long_goes_straight", arguments, &straight(gpus));
    }
    // Between processes, with buffers that come and go.
    let test = "what_is_long_goes_straight";
    let told = [
        ("RINGSIGHT_STRAIGHT_BYTES", "1"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT"),
    ];
    if let Some(said) = output("driver", test, &["remap", "2", "p", "1048576"], &told) {
        assert!(said.contains(" cases a rank, "), "{said}");
        let mapped = said.lines().filter(|line| line.contains("Mapped memory"));
        // Each of some 10 buffers by the other rank; which of the last ones are mapped in time, nobody knows.
        assert!(mapped.count() >= 10, "{said}");
    }
    // Buffers that are mapped in pieces, which are shown by them.
    for pushed in ["1", "18446744073709551615"] {
        let told = [&told[..], &[("RINGSIGHT_PUSH_BYTES", pushed)]].concat();
        if let Some(said) = output("driver", test, &["pieces", "2", "p", "8388608"], &told) {
            assert!(said.contains(" cases a rank, "), "{said}");
            let mapped = said.lines().filter(|line| line.contains("Mapped memory"));
            assert!(mapped.count() >= 10, "{said}");
            assert!(!said.contains("cannot be mapped"), "{said}");
        }
    }
    // Of buffers that nobody has registered those of captured operations are mapped.
    for (asked, mapped) in [("1", true), ("0", false)] {
        let told = [&told[..], &[("NCCL_GRAPH_REGISTER", asked)]].concat();
        if let Some(said) = output("driver", test, &["graph", "2", "p"], &told) {
            assert!(said.contains("30 replays checked"), "{said}");
            assert_eq!(said.contains("Mapped memory"), mapped, "{asked}: {said}");
        }
    }
    // And all, if so asked.
    let all = [("RINGSIGHT_STRAIGHT_BYTES", "1"), ("RINGSIGHT_MAP_BUFFERS", "1")];
    drive(test, &["check", "2", "p", "1048576"], &all);
    drive(test, &["graph", "2", "p"], &all);
    drive(test, &["abort", "2", "p"], &all);
    drive(
        test,
        &["random", "4", "p", "7"],
        &[all[0], all[1], ("RINGSIGHT_MOCK_GPUS", "4")],
    );
    // Of other sizes, whose buffers would be written behind their end.
    for variant in ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] {
        drive(
            "what_is_long_goes_straight",
            &["differ", "2", "t", variant],
            &straight("2"),
        );
    }
}

/// Contributions are pushed to who reduces them: in one chunk, or in more than there are slots.
#[test]
fn an_all_reduce_pushes() {
    let test = "an_all_reduce_pushes";
    let pushed = |gpus| {
        [
            ("RINGSIGHT_MOCK_GPUS", gpus),
            ("RINGSIGHT_STRAIGHT_BYTES", "1"),
            ("RINGSIGHT_PUSH_BYTES", "1"),
        ]
    };
    for (mode, ranks, gpus) in [
        ("check", "2", "2"),
        // Of fewer blocks, which have more chunks each.
        ("check", "4", "1"),
        ("check", "8", "1"),
        ("graph", "2", "2"),
        ("abort", "2", "2"),
        ("random", "2", "2"),
    ] {
        let arguments: &[&str] = match mode {
            "check" if ranks == "8" => &[mode, ranks, "t", "4194304"],
            "check" => &[mode, ranks, "t", "16777216"],
            "random" => &[mode, ranks, "t", "7"],
            _ => &[mode, ranks, "t"],
        };
        drive(test, arguments, &pushed(gpus));
    }
    let all = [&pushed("2")[..], &[("RINGSIGHT_MAP_BUFFERS", "1")]].concat();
    drive(test, &["check", "2", "p", "1048576"], &all);
    for variant in ["0", "1", "2", "3", "4"] {
        drive(test, &["differ", "2", "t", variant], &pushed("2"));
    }
}

/// Kernels among peers rely on NVLink.
#[test]
fn without_nvlink_data_goes_through_host_memory() {
    let test = "without_nvlink_data_goes_through_host_memory";
    let told = [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT"),
        ("RINGSIGHT_MOCK_NO_NVLINK", "1"),
    ];
    let Some(said) = output("driver", test, &["check", "2", "t", "1048576"], &told) else {
        return;
    };
    assert!(
        said.contains("NVLink does not join GPU 0000:10:00.0 and GPU 0000:11:00.0"),
        "{said}"
    );
    assert!(said.contains(" cases a rank\n"), "{said}");
}

/// A sender whose message nobody has taken yet ends its communicator.
#[test]
fn memory_that_others_still_write_to_is_nobody_elses() {
    let test = "memory_that_others_still_write_to_is_nobody_elses";
    drive(test, &["untaken", "2", "p"], &[]);
}

/// What the kernels among peers do, the table says.
#[test]
fn all_collectives_are_done_among_peers() {
    let test = "all_collectives_are_done_among_peers";
    let told = [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "TUNING")];
    let Some(said) = output("driver", test, &["check", "2", "t", "1048576"], &told) else {
        return;
    };
    for (name, how) in [
        ("AllReduce", "ONE_SHOT proto LL "),
        ("AllReduce", "TWO_SHOT proto LL128 "),
        ("AllGather", "DIRECT proto LL128 "),
        ("ReduceScatter", "DIRECT proto LL128 "),
        ("Broadcast", "DIRECT proto LL128 "),
        ("Reduce", "DIRECT proto LL128 "),
        ("AlltoAll", "DIRECT proto LL128 "),
        ("Gather", "DIRECT proto LL128 "),
        ("Scatter", "DIRECT proto LL128 "),
        ("Send", "DIRECT proto LL128 "),
        ("Recv", "DIRECT proto LL128 "),
        // Each rank has a factor of its own.
        ("AllReduce", "RING proto SIMPLE "),
    ] {
        let (name, how) = (format!("{name}: "), format!("Algo {how}"));
        let told = |line: &str| line.contains(&name) && line.contains(&how);
        assert!(said.lines().any(told), "{name}{how}: {said}");
    }
}

#[test]
fn slots_may_be_small_and_channels_many() {
    let small = [("NCCL_BUFFSIZE", "65536"), ("NCCL_MAX_CTAS", "32")];
    drive(
        "slots_may_be_small_and_channels_many",
        &["check", "2", "t", "4194304"],
        &small,
    );
}

/// Each way that there is gives the same results, alone.
#[test]
fn the_environment_chooses_the_way() {
    let test = "the_environment_chooses_the_way";
    for (algorithms, protocols) in [("ring,direct", "simple"), ("^one_shot", "^ll")] {
        let variables = [("RINGSIGHT_ALGO", algorithms), ("RINGSIGHT_PROTO", protocols)];
        drive(test, &["check", "2", "t", "1048576"], &variables);
    }
}

/// Ranks on nodes of their own: what they send is staged in host memory and goes over sockets.
#[test]
fn nodes_are_joined_by_the_network() {
    let test = "nodes_are_joined_by_the_network";
    let told = [("NCCL_DEBUG", "INFO")];
    if let Some(said) = output("driver", test, &["check", "2", "n", "1048576"], &told) {
        assert!(said.contains(" nNodes 2 "), "{said}");
        assert!(said.contains(" cases a rank\n"), "{said}");
    }
    drive(test, &["abort", "2", "n"], &[]);
}

#[test]
fn graphs_replay() {
    for kind in ["t", "p", "n"] {
        drive("graphs_replay", &["graph", "2", kind], &[]);
    }
}

#[test]
fn an_abort_frees_the_stream() {
    for kind in ["t", "p"] {
        drive("an_abort_frees_the_stream", &["abort", "2", kind], &[]);
    }
}

#[test]
fn captures_of_other_threads_are_not_disturbed() {
    for kind in ["t", "p"] {
        drive(
            "captures_of_other_threads_are_not_disturbed",
            &["beside", "2", kind],
            &[],
        );
    }
}

/// Two ranks, with graphs and without, on a driver that waits where one may.
#[track_caller]
fn drive_on_one_gpu(test: &str, mode: &str) {
    for kind in ["t", "p"] {
        for graphs in ["1", "0"] {
            let settings = [
                ("GPUS", "00"),
                ("RINGSIGHT_GRAPH_LAUNCH", graphs),
                ("RINGSIGHT_MOCK_FREE", "waits"),
            ];
            drive(test, &[mode, "2", kind], &settings);
        }
    }
}

/// Also where the stream of the one before is gone, and where no event is behind it.
#[test]
fn operations_follow_each_other_over_streams() {
    let test = "operations_follow_each_other_over_streams";
    drive_on_one_gpu(test, "streams");
    for (ranks, kind) in [("2", "t"), ("2", "p"), ("4", "t"), ("2", "n")] {
        for graphs in ["1", "0"] {
            let settings = [("RINGSIGHT_GRAPH_LAUNCH", graphs)];
            drive(test, &["streams", ranks, kind], &settings);
        }
    }
}

#[test]
fn calls_return_while_a_kernel_waits_on_their_gpu() {
    drive_on_one_gpu("calls_return_while_a_kernel_waits_on_their_gpu", "held");
}

#[test]
fn whatever_waits_is_released() {
    for kind in ["t", "p", "n"] {
        drive("whatever_waits_is_released", &["released", "2", kind], &[]);
    }
}

/// The driver waits for all that a GPU has to do to take memory back, and lets nobody launch meanwhile: no communicator's end may
/// depend on another's kernel, nor a launch on a function of the caller's. What is kept is given to the next ones; all that is
/// more than may be kept is given back.
#[test]
fn communicators_end_beside_what_waits() {
    let test = "communicators_end_beside_what_waits";
    let waits = ("RINGSIGHT_MOCK_FREE", "waits");
    for kind in ["t", "p"] {
        drive(test, &["ended", "2", kind], &[waits, ("RINGSIGHT_KEPT_MB", "0")]);
        drive(test, &["ended", "2", kind, "kept"], &[waits]);
    }
    for kind in ["t", "p", "n"] {
        drive(test, &["abort", "2", kind], &[waits]);
    }
}

#[test]
fn a_death_frees_the_others() {
    drive("a_death_frees_the_others", &["death", "2", "p"], &[]);
}

#[test]
fn random_groups_are_right() {
    for (ranks, kind, gpus) in [("2", "t", "2"), ("3", "t", "1"), ("4", "p", "4")] {
        let arguments = ["random", ranks, kind, "7"];
        let said = drive(
            "random_groups_are_right",
            &arguments,
            &[("RINGSIGHT_MOCK_GPUS", gpus)],
        );
        if let Some(said) = said {
            assert!(said.starts_with("7 rounds, "), "{said}");
        }
    }
}

#[test]
fn ranks_that_differ_are_told() {
    for kind in ["t", "p"] {
        drive("ranks_that_differ_are_told", &["differ", "2", kind], &[]);
        // Messages of which one end goes straight, and the other in lines; of other processes' buffers nothing is known here. And where bytes are as
        // many: another reduction, another root.
        for variant in ["5", "6", "7", "8", "9"] {
            drive("ranks_that_differ_are_told", &["differ", "2", kind, variant], &[]);
        }
    }
}
