//! NCCL-style log lines, by what `NCCL_DEBUG` and its companions ask for. Each case is a process of its own: two ranks
//! as threads that reduce, send, make a mistake and end.

mod common;

use std::ffi::c_int;

use common::{host, processes::worker, variables::WHAT};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode};

/// Standard output of a worker with these variables.
#[track_caller]
fn run(what: &str, variables: &[(&str, &str)]) -> String {
    let mut command = worker("logging::ranks");
    command
        .env(WHAT, what)
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_HOSTID", "somewhere");
    for name in [
        "NCCL_DEBUG",
        "NCCL_DEBUG_SUBSYS",
        "NCCL_DEBUG_FILE",
        "NCCL_DEBUG_TIMESTAMP_LEVELS",
        "NCCL_DEBUG_TIMESTAMP_FORMAT",
    ] {
        command.env_remove(name);
    }
    let output = command.envs(variables.iter().copied()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// The lines that are NCCL's.
fn lines(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("NCCL ")).collect()
}

/// `host:pid:tid [device] NCCL LEVEL text`, after a time perhaps: (device, level, text).
#[track_caller]
fn parts(line: &str) -> (c_int, &str, &str) {
    let (place, said) = line.split_once(" NCCL ").unwrap_or_else(|| panic!("{line}"));
    let (level, text) = said.split_once(' ').unwrap_or_else(|| panic!("{line}"));
    let (ids, device) = place.rsplit_once(" [").unwrap_or_else(|| panic!("{line}"));
    let mut ids = ids.rsplit(':');
    for what in ["tid", "pid"] {
        let id = ids.next().and_then(|id| id.parse::<u32>().ok());
        assert!(id.is_some_and(|id| id > 1), "no {what}: {line}");
    }
    assert!(!ids.next().unwrap().is_empty(), "no host: {line}");
    (device.trim_end_matches(']').parse().unwrap(), level, text)
}

#[track_caller]
fn has(lines: &[&str], what: &str) {
    assert!(
        lines.iter().any(|line| line.contains(what)),
        "no {what:?} in\n{}",
        lines.join("\n")
    );
}

#[track_caller]
fn lacks(lines: &[&str], what: &str) {
    assert!(
        !lines.iter().any(|line| line.contains(what)),
        "{what:?} in\n{}",
        lines.join("\n")
    );
}

#[test]
fn nothing_is_said_unless_it_is_asked_for() {
    for variables in [&[][..], &[("NCCL_DEBUG", "NONE")], &[("NCCL_DEBUG", "loud")]] {
        assert_eq!(lines(&run("work", variables)), [""; 0]);
    }
}

#[test]
fn the_version_alone() {
    let text = run("work", &[("NCCL_DEBUG", "version")]);
    let expected = format!("NCCL version 2.30.7+ringsight{}", env!("CARGO_PKG_VERSION"));
    assert_eq!(lines(&text), [expected]);
}

#[test]
fn warnings_say_what_a_call_returned_an_error_for() {
    let text = run("work", &[("NCCL_DEBUG", "WARN")]);
    let lines = lines(&text);
    assert_eq!(lines.len(), 3, "the version and each rank's mistake: {text}");
    for line in &lines[1..] {
        // The time first: "[2026-01-31 12:00:00] ".
        assert!(line.starts_with("[20") && line.find("] ") == Some(20), "{line}");
        let (device, level, said) = parts(line);
        assert!((0..2).contains(&device));
        assert_eq!(
            (level, said.starts_with("ncclBroadcast: root (9)")),
            ("WARN", true),
            "{line}"
        );
    }
}

#[test]
fn subsystems_and_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let pattern = folder.path().join("log.%h.%p").display().to_string();
    let asked = [
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "ALL"),
        ("NCCL_DEBUG_FILE", &*pattern),
    ];
    assert_eq!(
        lines(&run("work", &asked)),
        [""; 0],
        "a file is instead of standard output"
    );
    let files: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    let [file] = &files[..] else { panic!("{files:?}") };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    let name = file.file_name().unwrap().to_str().unwrap();
    let process = name.strip_prefix(&format!("log.{}.", host.trim().split('.').next().unwrap()));
    assert!(process.is_some_and(|pid| pid.parse::<u32>().is_ok()), "{name}");

    let text = std::fs::read_to_string(file).unwrap();
    let lines = lines(&text);
    for line in &lines {
        let (_, level, _) = parts(line);
        assert!(["INFO", "WARN"].contains(&level), "{line}");
    }
    for what in [
        "NCCL version 2.30.7",
        "NCCL_SOCKET_IFNAME set by environment to lo.",
        "NCCL_HOSTID set by environment to somewhere.",
        "Bootstrap : Using lo:127.0.0.1",
        "rank 0 nranks 2 cudaDev 0",
        "rank 1 nranks 2 cudaDev 1",
        "Init START",
        "Init COMPLETE",
        "Channel 00/02 : 0 1",
        "Channel 01/02 : 0 1",
        "Ring 00 : 1 -> 0 -> 1",
        "Channel 00/0 : 0[0] -> 1[1] [send] via SHM",
        "Channel 00/0 : 0[0] -> 1[1] [receive] via SHM",
        "/1 : 0[0] -> 1[1] [send] via SHM",
        "Proxy of rank 1 listens on ",
        "New proxy recv connection 1 of rank 1 with rank 0, channel 0, transport Shm",
        "Proxy of rank 1 : operation=SharedInit done",
        "Proxy of rank 1 : operation=GetFd done",
        "Connected all rings",
        "AllReduce: opCount 0 sendbuff 0x",
        "count 1000 datatype 7 op 0 root 0 comm 0x",
        "Send: opCount 0 ",
        "AllReduce: 4000 Bytes -> Algo ONE_SHOT proto SIMPLE channel{Lo..Hi}={0..0}",
        "AllReduce: 400000 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..1}",
        "WARN ncclBroadcast: root (9)",
        "- Destroy COMPLETE",
    ] {
        has(&lines, what);
    }
    let said = lines
        .iter()
        .filter(|line| line.contains("NCCL_SOCKET_IFNAME set"))
        .count();
    assert_eq!(said, 1, "once a process");
}

#[test]
fn what_is_listed_or_excluded() {
    let said = |subsystems: &str| {
        run(
            "work",
            &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", subsystems)],
        )
    };
    let text = run("work", &[("NCCL_DEBUG", "INFO")]);
    let default = lines(&text);
    for what in [
        "Init COMPLETE",
        "Bootstrap :",
        "set by environment",
        "WARN ncclBroadcast",
    ] {
        has(&default, what);
    }
    for what in ["opCount", "Algo", "via", "Ring 00"] {
        lacks(&default, what);
    }
    let text = said("coll,TUNING");
    let listed = lines(&text);
    has(&listed, "opCount");
    has(&listed, "Algo RING");
    // Whatever is listed, what goes wrong is said.
    has(&listed, "WARN ncclBroadcast");
    lacks(&listed, "Init");
    let text = said("^INIT,COLL");
    let excluded = lines(&text);
    has(&excluded, "Ring 00");
    lacks(&excluded, "Init COMPLETE");
    lacks(&excluded, "opCount");
}

#[test]
fn what_cannot_be_written_or_understood_fails_no_call() {
    run(
        "work",
        &[
            ("NCCL_DEBUG", "TRACE"),
            ("NCCL_DEBUG_SUBSYS", "ALL"),
            ("NCCL_DEBUG_FILE", "/dev/full"),
        ],
    );
    let text = run(
        "work",
        &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/nonexistent/file")],
    );
    has(
        &lines(&text),
        "NCCL WARN NCCL_DEBUG_FILE: /nonexistent/file cannot be opened",
    );
    has(&lines(&text), "Init COMPLETE");
    let text = run(
        "work",
        &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,NOISE")],
    );
    has(&lines(&text), "NCCL_DEBUG_SUBSYS names no subsystem by NOISE");
    let text = run(
        "work",
        &[
            ("NCCL_DEBUG", "WARN"),
            ("NCCL_MIN_CTAS", "9999"),
            ("NCCL_MAX_CTAS", "0"),
        ],
    );
    has(
        &lines(&text),
        "NCCL_MIN_CTAS or NCCL_MIN_NCHANNELS=9999 is out of range: 32 is taken",
    );
    has(
        &lines(&text),
        "NCCL_MAX_CTAS or NCCL_MAX_NCHANNELS=0 is out of range: it is ignored",
    );
}

#[test]
fn variables_of_nccl_that_do_nothing_are_named() {
    let said = run("work", &[("NCCL_DEBUG", "INFO"), ("NCCL_ALGO", "Ring")]);
    has(&lines(&said), "NCCL_ALGO has no effect: RINGSIGHT_ALGO chooses");
    lacks(&lines(&said), "NCCL_PROTO has no effect");
}

#[test]
fn times_where_they_are_wanted() {
    let text = run(
        "work",
        &[
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_TIMESTAMP_LEVELS", "INFO"),
            ("NCCL_DEBUG_TIMESTAMP_FORMAT", "at %s.%6f "),
        ],
    );
    for line in lines(&text) {
        assert_eq!(
            line.starts_with("at 1") || line.starts_with("at 2"),
            line.contains("NCCL INFO"),
            "{line}"
        );
    }
}

#[test]
fn a_reset_reads_the_environment_again() {
    let text = run("reset", &[]);
    let (before, after) = text.split_once("now\n").unwrap();
    let (between, last) = after.split_once("then\n").unwrap();
    assert_eq!(lines(before), [""; 0]);
    has(&lines(between), "Init COMPLETE");
    has(&lines(between), "Destroy COMPLETE");
    assert_eq!(lines(last), [""; 0]);
}

#[test]
fn an_applications_own_subscriber_stays_and_sees_the_events() {
    let text = run("theirs", &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "ALL")]);
    assert_eq!(lines(&text), [""; 0]);
    assert!(
        text.contains("theirs nccl::INIT") && text.contains("theirs nccl::COLL"),
        "{text}"
    );
}

#[test]
fn a_subscriber_that_panics_costs_its_lines() {
    let text = run(
        "panics",
        &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "NOISE")],
    );
    assert!(
        text.contains("theirs nccl::ENV") && text.contains("returned"),
        "{text}"
    );
}

#[test]
fn errors_of_other_threads_can_be_asked_for() {
    host();
    let text = std::thread::spawn(|| {
        // SAFETY: a null pointer is what is tested.
        let code = unsafe { abi::ncclGetVersion(std::ptr::null_mut()) };
        assert_eq!(code, ResultCode::InvalidArgument);
        abi::ncclGetLastError(Handle(0)) as usize
    })
    .join()
    .unwrap();
    // SAFETY: a text that was returned is never freed.
    let text = unsafe { std::ffi::CStr::from_ptr(text as *const _) };
    assert_eq!(text, c"ncclGetVersion: version is NULL");
}
