//! What the watchdog says of GPUs, by pages and by events.

use super::{
    drive,
    windows::{POLICY, REDUCES, SCATTERS},
};

/// Kernels tell what they move, and whom they wait for: one that stops is named at the threshold. Events tell neither, and it takes longer.
#[test]
fn a_kernel_that_stops_moving_is_stuck() {
    let straight = ("RINGSIGHT_STRAIGHT_BYTES", "1");
    let events = [
        ("RINGSIGHT_WATCHDOG_SOURCE", "events"),
        ("RINGSIGHT_STUCK_TIMEOUT_MS", "1000"),
    ];
    let first = "waits for data from rank 1 (channel 0, step 2)";
    let ways: [(&[(&str, &str)], &str); 5] = [
        (&[straight], "waits for rank 1 to be done with its buffers"),
        (
            &[straight, ("RINGSIGHT_PUSH_BYTES", "1")],
            "from rank 1 (channel 0",
        ),
        (&[("RINGSIGHT_STRAIGHT_BYTES", "18446744073709551615")], first),
        (&[("RINGSIGHT_MOCK_NO_PEERS", "1")], "rank 1 (channel "),
        (&events, ""),
    ];
    for (way, waits) in ways {
        let log = tempfile::NamedTempFile::new().unwrap();
        let told = [
            ("NCCL_KERNEL_TIMEOUT_MS", "500"),
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_DEBUG_FILE", log.path().to_str().unwrap()),
        ];
        let test = "a_kernel_that_stops_moving_is_stuck";
        if drive(test, &["frozen", "2", "t"], &[way, &told].concat()).is_none() {
            return;
        }
        let said = std::fs::read_to_string(log.path()).unwrap();
        let told = |line: &str| line.contains("Rank 0: running") && line.contains(waits);
        assert!(said.lines().any(told), "{way:?}: {said}");
        if !waits.is_empty() {
            assert!(
                said.contains("nothing moves, and rank 1 stopped first"),
                "{way:?}: {said}"
            );
        }
    }
}

/// The rank whose copies do not end is named: the others wait for it, and its kernels for nobody.
#[test]
fn copies_that_do_not_end_are_told() {
    // All_reduces, too, if they move those.
    let of_others = [
        "waits for rank 1 to be done with its buffers",
        "waits for data from rank 1",
    ];
    for (ranks, kind, way, waits) in [
        ("2", "t", &POLICY[..], of_others[0]),
        ("2", "p", &POLICY, of_others[0]),
        ("2", "t", &REDUCES, of_others[1]),
        ("2", "p", &REDUCES, of_others[1]),
        ("4", "t", &SCATTERS, of_others[1]),
    ] {
        let log = tempfile::NamedTempFile::new().unwrap();
        let told = [
            ("NCCL_KERNEL_TIMEOUT_MS", "500"),
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_DEBUG_FILE", log.path().to_str().unwrap()),
        ];
        let told = [way, &told].concat();
        if drive(
            "copies_that_do_not_end_are_told",
            &["stalled", ranks, kind],
            &told,
        )
        .is_none()
        {
            return;
        }
        let said = std::fs::read_to_string(log.path()).unwrap();
        assert!(said.contains("nothing moves, and rank 1 stopped first"), "{said}");
        for (rank, what) in [
            ("Rank 0: running", waits),
            ("Rank 1: running", "copy engines copy its data"),
        ] {
            let told = |line: &str| line.contains(rank) && line.contains(what);
            assert!(said.lines().any(told), "{rank} {what}: {said}");
        }
    }
}

/// A fault of a device is an error on its rank, and a verdict on those that wait.
#[test]
fn a_device_that_fails_is_named() {
    let lines = ("RINGSIGHT_STRAIGHT_BYTES", "18446744073709551615");
    for (kind, source) in [("t", "pages"), ("p", "pages"), ("n", "pages"), ("p", "events")] {
        let source = ("RINGSIGHT_WATCHDOG_SOURCE", source);
        let threshold = ("NCCL_KERNEL_TIMEOUT_MS", "500");
        drive(
            "a_device_that_fails_is_named",
            &["fault", "3", kind],
            &[lines, source, threshold],
        );
    }
}

/// Events around kernels tell the watchdog what it has to know, of replays one by one; and they break nothing.
#[test]
fn the_watchdog_knows_by_events() {
    let test = "the_watchdog_knows_by_events";
    let by_events = ("RINGSIGHT_WATCHDOG_SOURCE", "events");
    for arguments in [
        &["check", "2", "t", "65536"][..],
        &["graph", "2", "t"],
        &["abort", "2", "t"],
    ] {
        drive(test, arguments, &[by_events]);
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let variables = [
        by_events,
        // Longer than a busy machine holds up a rank that is not late.
        ("NCCL_KERNEL_TIMEOUT_MS", "1000"),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_DEBUG_FILE", log.to_str().unwrap()),
    ];
    let Some(said) = drive(test, &["awaited", "2", "t"], &variables) else {
        return;
    };
    assert_eq!(said, "three times late");
    let log = std::fs::read_to_string(log).unwrap();
    let verdicts: Vec<&str> = log.lines().filter(|line| line.contains("Verdict: ")).collect();
    let of = |line: &&str| line.contains(" (late): rank 1 has ");
    assert!(verdicts.len() == 3 && verdicts.iter().all(of), "{log}");
    assert!(log.contains("Told by: events"), "{log}");
}

/// A kernel tells of the messages of its launch as a whole: none that is done, or to oneself, is stuck while another one waits for who is late.
#[test]
fn one_rank_is_late_and_no_message_of_the_same_launch_is_stuck() {
    let test = "one_rank_is_late_and_no_message_of_the_same_launch_is_stuck";
    for source in ["pages", "events"] {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let variables = [
            ("RINGSIGHT_WATCHDOG_SOURCE", source),
            ("RINGSIGHT_STUCK_TIMEOUT_MS", "500"),
            // As above.
            ("NCCL_KERNEL_TIMEOUT_MS", "1000"),
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_DEBUG_FILE", log.to_str().unwrap()),
        ];
        if drive(test, &["latecomer", "3", "t"], &variables).is_none() {
            return;
        }
        // Nobody but the last rank is named by then; what the driver looked at.
        let log = std::fs::read_to_string(log).unwrap();
        assert!(
            log.contains("Verdict: NOT_LAUNCHED (late): rank 2 has "),
            "{source}: {log}"
        );
    }
}

/// A driver that does not answer silences nobody, whether that of the rank that has not come or of the rank that waits; and what is said of
/// the one that has not come says how it is known.
#[test]
fn a_query_that_does_not_come_back_silences_no_verdict() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let variables = [
        ("RINGSIGHT_WATCHDOG_SOURCE", "events"),
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_DEBUG_FILE", log.to_str().unwrap()),
    ];
    let test = "a_query_that_does_not_come_back_silences_no_verdict";
    if drive(test, &["unanswered", "2", "p"], &variables).is_none() {
        return;
    }
    let log = std::fs::read_to_string(log).unwrap();
    let known = |line: &str| line.contains("Rank 1: queued ") && line.ends_with(", when it was last known");
    assert!(log.lines().any(known), "{log}");
}
