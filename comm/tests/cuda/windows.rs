//! What copy engines do in windows of all ranks.

use super::{drive, output};

/// Into windows of all ranks, by copy engines, if the policy is to use none but these.
#[test]
fn copy_engines_do_what_goes_into_windows() {
    let test = "copy_engines_do_what_goes_into_windows";
    let told = |gpus| {
        [
            ("RINGSIGHT_MOCK_GPUS", gpus),
            ("NCCL_CTA_POLICY", "2"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"),
        ]
    };
    for (ranks, kind, gpus) in [("2", "t", "2"), ("4", "t", "2"), ("2", "p", "2"), ("3", "p", "3")] {
        let Some(said) = output("driver", test, &["windows", ranks, kind], &told(gpus)) else {
            return;
        };
        assert!(said.contains("ok 396 cases a rank"), "{ranks} {kind}: {said}");
        let reached = said
            .lines()
            .filter(|line| line.contains(": copy engines reach all ranks' parts"));
        // And one more whose mapping is seen to go.
        let windows = if kind == "p" { 4 } else { 3 };
        assert_eq!(
            reached.count(),
            windows * ranks.parse::<usize>().unwrap(),
            "{said}"
        );
        for name in ["AllGather: ", "AlltoAll: "] {
            let by_engines = |line: &&str| line.contains(name) && line.contains(" Algo DIRECT proto CE ");
            assert!(said.lines().any(|line| by_engines(&line)), "{name}{said}");
        }
        let others = ["ReduceScatter: ", "AllReduce: ", "Send: "];
        let wrong =
            |line: &&str| line.contains(" proto CE ") && others.iter().any(|name| line.contains(name));
        assert_eq!(said.lines().find(wrong), None);
    }
    // Mapped in pieces: other processes are given these, and the other ranks of this one may not reach them.
    for (kind, reached) in [("p", true), ("t", false)] {
        if let Some(said) = output("driver", test, &["windows", "2", kind, "1"], &told("2")) {
            assert!(said.contains("ok 396 cases a rank"), "{said}");
            assert_eq!(said.contains(" proto CE "), reached, "{kind}: {said}");
            let why = "is not for copy engines: rank 0: memory at ";
            assert_eq!(said.contains(why), !reached, "{kind}: {said}");
        }
    }
    // Without the protocol, or where they are not to write into callers' buffers, all goes as it went.
    for variables in [
        [("NCCL_CTA_POLICY", "2"), ("NCCL_P2P_DIRECT_DISABLE", "1")],
        [("NCCL_CTA_POLICY", "2"), ("RINGSIGHT_PROTO", "^ce")],
    ] {
        let told = [&told("2")[..], &variables].concat();
        if let Some(said) = output("driver", test, &["windows", "2", "t"], &told) {
            assert!(said.contains("ok 396 cases a rank"), "{said}");
            assert!(
                !said.contains(" proto CE ") && !said.contains("copy engines reach"),
                "{said}"
            );
        }
    }
}

/// All_reduces and reduce_scatters in windows, in two pieces and in many; the same bits as by kernels, which the driver compares with what it computes. What no kernel
/// reduces goes as it went.
#[test]
fn copy_engines_move_what_is_reduced_if_they_are_to() {
    let test = "copy_engines_move_what_is_reduced_if_they_are_to";
    let told = |gpus, piece| {
        [
            ("RINGSIGHT_MOCK_GPUS", gpus),
            ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
            ("RINGSIGHT_ENGINE_PIECE_BYTES", piece),
            ("RINGSIGHT_ALGO", "AllReduce:^one_shot"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"),
        ]
    };
    for (ranks, kind, gpus, piece) in [
        // Captured ones of 5 pieces and of 2, eager ones of up to 49.
        ("2", "t", "2", "8192"),
        ("2", "p", "2", "8192"),
        ("4", "t", "2", "8192"),
        ("4", "p", "4", "10000000"),
        ("8", "t", "4", "8192"),
        // No kernel for so many.
        ("3", "t", "3", "4096"),
    ] {
        let Some(said) = output("driver", test, &["windows", ranks, kind], &told(gpus, piece)) else {
            return;
        };
        assert!(said.contains("ok 396 cases a rank"), "{ranks} {kind}: {said}");
        let count = |name: &str, way: &str| {
            let is_so = |line: &&str| line.contains(name) && line.contains(way);
            said.lines().filter(is_so).count()
        };
        // Of each rank: the 15 that are there in the first window, the 10 in the second one, where those in place begin before it; and in groups and
        // captured.
        let by_engines = count("AllReduce: ", " Algo TWO_SHOT proto CE ");
        let number: usize = ranks.parse().unwrap();
        if ranks == "3" {
            assert_eq!(by_engines, 0, "{said}");
        } else {
            assert!(by_engines >= 29 * number, "{ranks} {kind}: {by_engines} {said}");
        }
        // Not among two. In the first window 15, in the second one those that are in it, but for what would take too many pieces.
        let scattered = count("ReduceScatter: ", " Algo DIRECT proto CE ");
        assert!(
            if number < 4 {
                scattered == 0
            } else {
                scattered >= 20 * number
            },
            "{ranks} {kind}: {scattered} {said}"
        );
        assert_eq!(count("AllGather: ", " proto CE "), 0, "{said}");
    }
}

/// Where kernels may do what is short, they do it.
#[test]
fn copy_engines_do_what_is_long_whatever_the_policy() {
    const LEAST: u64 = 100_000;
    let least = LEAST.to_string();
    for kind in ["t", "p"] {
        let told = [
            ("RINGSIGHT_MOCK_GPUS", "2"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT,TUNING"),
        ];
        let with = |bytes| [&told[..], &[("RINGSIGHT_ENGINE_BYTES", bytes)]].concat();
        let test = "copy_engines_do_what_is_long_whatever_the_policy";
        let Some(said) = output("driver", test, &["windows", "2", kind], &with(&least)) else {
            return;
        };
        assert!(said.contains("ok 396 cases a rank"), "{kind}: {said}");
        let mut seen = [0; 2];
        for line in said.lines().filter(|line| line.contains("AllGather: ")) {
            let (_, bytes) = line.split_once("AllGather: ").unwrap();
            let bytes: u64 = bytes.split_once(' ').unwrap().0.parse().unwrap();
            let is_by_engines = line.contains(" proto CE ");
            assert!(!is_by_engines || bytes >= LEAST, "{line}");
            seen[usize::from(is_by_engines)] += 1;
        }
        assert!(seen[0] > 0 && seen[1] > 0, "{seen:?} {said}");
        // No window is as long as that is by default, and none is looked at any further.
        let said = output("driver", test, &["windows", "2", kind], &told).unwrap();
        let why = "is not for copy engines: it has 8388608 bytes, they are for at least 268435456";
        assert!(said.contains(why), "{said}");
        assert!(
            !said.contains(" proto CE ") && !said.contains("copy engines reach"),
            "{said}"
        );
    }
}

/// Also where nothing but the kernel before the copies waits.
#[test]
fn an_abort_ends_what_copy_engines_were_to_do() {
    for kind in ["t", "p"] {
        for (events, ranks, way) in [
            ("pages", "2", &POLICY[..]),
            ("events", "2", &POLICY),
            ("pages", "2", &REDUCES),
            ("pages", "4", &SCATTERS),
        ] {
            let variables = [way, &[("RINGSIGHT_WATCHDOG_SOURCE", events)]].concat();
            drive(
                "an_abort_ends_what_copy_engines_were_to_do",
                &["alone", ranks, kind],
                &variables,
            );
        }
    }
}

/// Copy engines do what they can.
pub(super) const POLICY: [(&str, &str); 1] = [("NCCL_CTA_POLICY", "2")];

/// What of all_reduces in windows copy engines move, in pieces of so many bytes.
pub(super) const REDUCES: [(&str, &str); 3] = [
    ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
    ("RINGSIGHT_ENGINE_PIECE_BYTES", "20000"),
    ("RINGSIGHT_ALGO", "AllReduce:^one_shot"),
];

/// The same of reduce_scatters, which are for more than two ranks.
pub(super) const SCATTERS: [(&str, &str); 4] =
    [REDUCES[0], REDUCES[1], REDUCES[2], ("OPS", "reduce_scatter")];

/// Also while copies are on their way, and a kernel between them waits for those of another rank.
#[test]
fn an_abort_ends_what_waits_between_copies() {
    let test = "an_abort_ends_what_waits_between_copies";
    for kind in ["t", "p"] {
        drive(test, &["between", "2", kind], &REDUCES);
        drive(test, &["between", "2", kind], &POLICY);
        drive(test, &["between", "4", kind], &SCATTERS);
    }
}

/// Each copy in turn that the driver does not take, and each launch: the call says so, and an abort frees the others.
#[test]
fn a_copy_that_is_refused_fails_the_call() {
    let test = "a_copy_that_is_refused_fails_the_call";
    for kind in ["t", "p"] {
        // Six pieces, pushed to the other rank and passed on to it.
        if let Some(said) = drive(test, &["uncopied", "2", kind], &REDUCES) {
            assert_eq!(said, "12 refused, 12 captured");
        }
        // One begins and one ends it, six reduce, all meet before each of these, and before four of the pieces that are pushed.
        let launched = [&REDUCES[..], &[("RINGSIGHT_GRAPH_LAUNCH", "0")]].concat();
        if let Some(said) = drive(test, &["uncopied", "2", kind, "1"], &launched) {
            assert_eq!(said, "18 refused, 18 captured");
        }
    }
}

/// Who has its receive buffer elsewhere in the window is told, and waited for no longer.
#[test]
fn a_broken_promise_of_symmetry_is_told() {
    for kind in ["t", "p"] {
        for (ranks, variables) in [("2", &POLICY[..]), ("2", &REDUCES), ("4", &SCATTERS)] {
            drive(
                "a_broken_promise_of_symmetry_is_told",
                &["promise", ranks, kind],
                variables,
            );
        }
    }
}
