//! What a GPU cannot use and a driver does not give: each is said, with what it is.

use super::{drive, failing, output};

/// GPUs whose memory others are not let to, and one with too little of it: each is said, with its GPU.
#[test]
fn what_keeps_ranks_from_each_others_memory_is_named() {
    let test = "what_keeps_ranks_from_each_others_memory_is_named";
    for (kind, why) in [
        ("t", "GPU 0 has no peer access to GPU 1, though NVLink joins them"),
        ("p", "its driver gives no CUDA IPC handle for the memory"),
    ] {
        let told = [("NCCL_DEBUG", "WARN"), ("RINGSIGHT_MOCK_NO_PEERS", "1")];
        if let Some(said) = output("driver", test, &["graph", "2", kind], &told) {
            assert!(said.contains(why), "{said}");
            assert!(said.contains("30 replays checked"), "{said}");
        }
    }
    // A handle that the other process' driver does not open.
    let told = [("NCCL_DEBUG", "WARN"), ("RINGSIGHT_MOCK_IPC_OPEN", "0")];
    if let Some(said) = output("driver", test, &["graph", "2", "p"], &told) {
        assert!(said.contains("that of rank 1: cuIpcOpenMemHandle_v2: "), "{said}");
        assert!(said.contains("30 replays checked"), "{said}");
    }
    for kind in ["t", "p"] {
        let told = [("RINGSIGHT_MOCK_MEMORY_MB", "16")];
        if let Some(said) = failing("driver", test, &["graph", "2", kind], &told) {
            assert!(said.contains(" bytes of GPU "), "{said}");
            assert!(said.contains("CUDA_ERROR_OUT_OF_MEMORY"), "{said}");
            assert!(
                said.contains("cannot have the memory that the other ranks' kernels reach"),
                "{said}"
            );
        }
    }
}

#[test]
fn buffers_that_a_gpu_cannot_use_are_refused() {
    for (kind, check) in [("t", None), ("p", None), ("t", Some("1"))] {
        let variables: Vec<_> = check
            .map(|value| ("NCCL_CHECK_POINTERS", value))
            .into_iter()
            .collect();
        let said = drive(
            "buffers_that_a_gpu_cannot_use_are_refused",
            &["refuse", "2", kind],
            &variables,
        );
        if let Some(said) = said {
            assert_eq!(said, "17 refused, pinned memory reduced");
        }
    }
}

/// What callers have mapped by pieces goes in lines where one driver does not give a piece away, or the other does not take it.
#[test]
fn pieces_that_no_driver_hands_over_are_named() {
    let test = "pieces_that_no_driver_hands_over_are_named";
    for (refusal, closed, no_window) in [
        (
            "RINGSIGHT_MOCK_PIECES_EXPORT",
            "stays closed to other processes: cuMemExportToShareableHandle: CUDA_ERROR_NOT_SUPPORTED",
            "is closed to other ranks",
        ),
        (
            "RINGSIGHT_MOCK_PIECES_IMPORT",
            "Memory of rank 1 cannot be mapped: cuMemImportFromShareableHandle: CUDA_ERROR_NOT_SUPPORTED",
            "the part of rank 1: cuMemImportFromShareableHandle: CUDA_ERROR_NOT_SUPPORTED",
        ),
    ] {
        let told = [
            (refusal, "0"),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", "INIT"),
        ];
        let straight = [&told[..], &[("RINGSIGHT_STRAIGHT_BYTES", "1")]].concat();
        if let Some(said) = output("driver", test, &["pieces", "2", "p", "1048576"], &straight) {
            assert!(said.contains(" cases a rank, "), "{said}");
            assert!(said.contains(closed), "{refusal}: {said}");
            assert!(!said.contains("Mapped memory"), "{refusal}: {said}");
        }
        let by_engines = [&told[..], &[("NCCL_CTA_POLICY", "2")]].concat();
        if let Some(said) = output("driver", test, &["windows", "2", "p", "1"], &by_engines) {
            assert!(said.contains("ok 396 cases a rank"), "{said}");
            let closed = |line: &&str| line.contains("is not for copy engines: ") && line.contains(no_window);
            // Three of pieces on each rank.
            assert_eq!(said.lines().filter(closed).count(), 6, "{refusal}: {said}");
        }
    }
}

/// Each allocation in turn cannot be had: of a GPU that is opened, and of a communicator's life. The error names it, all ranks go on, nothing
/// stays, and the next communicator works.
#[test]
fn whatever_cannot_be_had_is_named_and_nothing_stays() {
    let test = "whatever_cannot_be_had_is_named_and_nothing_stays";
    for (arguments, variable, opening, living, named) in [
        (&["1", "t"][..], ("RINGSIGHT_GRAPH_LAUNCH", "0"), 70, 5, None),
        (
            &["1", "t"],
            ("", ""),
            5,
            5,
            Some("GPU 0: kernels are launched without graphs, "),
        ),
        (
            &["2", "t"],
            ("", ""),
            0,
            10,
            Some("This rank's FIFOs are in host memory, "),
        ),
        (
            &["2", "p"],
            ("", ""),
            0,
            10,
            Some("This rank's FIFOs are in host memory, "),
        ),
        (&["2", "p", "1"], ("", ""), 0, 10, None),
        (
            &["2", "t"],
            ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
            0,
            10,
            Some("Copy engines move nothing that is reduced: "),
        ),
        (
            &["2", "p"],
            ("RINGSIGHT_ENGINE_REDUCE_BYTES", "0"),
            0,
            10,
            Some("Copy engines move nothing that is reduced: "),
        ),
        (&["2", "t"], ("NCCL_P2P_DISABLE", "1"), 0, 20, None),
        (&["2", "n"], ("", ""), 0, 20, None),
    ] {
        // What ended communicators have is given back at once. Copy engines have streams and events of their own.
        let mut told = vec![
            ("RINGSIGHT_KEPT_MB", "0"),
            ("NCCL_CTA_POLICY", "2"),
            ("NCCL_DEBUG", "WARN"),
        ];
        told.extend(Some(variable).filter(|(name, _)| !name.is_empty()));
        let Some(said) = output("driver", test, &[&["lacking"], arguments].concat(), &told) else {
            return;
        };
        // Among the library's lines.
        let last = said.lines().find_map(|line| line.strip_prefix("ok "));
        let last = last.unwrap_or_else(|| panic!("{said}"));
        let numbers: Vec<u32> = last.split(' ').filter_map(|word| word.parse().ok()).collect();
        assert!(
            numbers[0] >= opening && numbers[1] >= living,
            "{arguments:?}: {last}"
        );
        if let Some(named) = named {
            let lacks = |line: &&str| line.contains(named) && line.contains("CUDA_ERROR_OUT_OF_MEMORY");
            assert!(said.lines().any(|line| lacks(&line)), "{arguments:?}: {said}");
        }
    }
}
