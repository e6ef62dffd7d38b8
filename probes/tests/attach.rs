//! Attaching to running processes by eBPF: whichever file they run, however many they are, whenever they end.
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

mod common;

use std::{fs, process::Command, time::Duration};

use common::{
    Reader, Target, by_probe, fixture_library, lost, poll, poll_until, records, session, session_with,
};
use ringsight_probes::{
    AttachError, Carrier, Options, Sample, Session, Source as _, UseEbpf, kernel, site::plan, target::find,
};
use ringsight_records::{Kind, pages::RING_SLOTS};

#[test]
fn attaching_takes_a_moment() {
    let Some(mut session) = session("attaching_takes_a_moment") else {
        return;
    };
    let targets = [(); 3].map(|()| Target::instrumented());
    let took = targets
        .each_ref()
        .map(|target| session.attach(target.pid()).unwrap().elapsed);
    // The machine may do something else meanwhile: once in three it does not.
    assert!(
        took.iter().any(|took| *took < Duration::from_millis(100)),
        "{took:?}"
    );
}

#[test]
fn a_running_process_gives_its_records() {
    let Some(mut session) = session("a_running_process_gives_its_records") else {
        return;
    };
    let mut target = Target::instrumented();
    target.call("fixture_operations 7 5 0");
    let attached = session.attach(target.pid()).unwrap();
    assert_eq!(attached.carrier, Carrier::Probe);
    assert_eq!(attached.sites.len(), 4);

    target.call("fixture_operations 7 100 3");
    let samples = poll(&mut session);
    let Sample::Process(process) = &samples[0] else {
        panic!("{:?}", samples[0])
    };
    assert_eq!((process.pid, process.instrumented), (target.pid(), true));
    assert_eq!(
        (process.host_name.as_str(), process.library_version),
        ("fixture-host", 22809)
    );
    assert!(matches!(&samples[1], Sample::Communicator { communicator, .. } if communicator.id == 7));
    assert_eq!(records(&samples, Kind::OpLaunched), 100);
    assert_eq!(records(&samples, Kind::OpCompleted), 100);
    assert_eq!(records(&samples, Kind::ProxyStep), 300);
    assert_eq!(lost(&samples), 0);
    // Each launch and each completion comes right after its operation's description.
    for pair in samples.windows(2) {
        if let Sample::Record { record, .. } = &pair[1]
            && matches!(record.kind(), Some(Kind::OpLaunched | Kind::OpCompleted))
        {
            let Sample::Description { description, .. } = &pair[0] else {
                panic!("{:?}", pair[0])
            };
            assert_eq!((description.op, description.comm), (record.op, 7));
        }
    }
    let Some(Sample::Watermark { time_ns, .. }) = samples.last() else {
        panic!("no watermark")
    };
    let latest = samples.iter().filter_map(|sample| match sample {
        Sample::Record { record, .. } => Some(record.time_ns),
        _ => None,
    });
    assert!(latest.max().unwrap() < *time_ns);

    // A communicator that comes later is announced before its record.
    target.call("fixture_communicator 8");
    let samples = poll(&mut session);
    let at = |wanted: &dyn Fn(&Sample) -> bool| samples.iter().position(wanted).expect("there");
    let announced =
        at(&|sample| matches!(sample, Sample::Communicator { communicator, .. } if communicator.id == 8));
    let record = at(
        &|sample| matches!(sample, Sample::Record { record, .. } if record.kind() == Some(Kind::CommInit)),
    );
    assert!(announced < record);

    let counters = session.counters(target.pid()).unwrap();
    let stats = session.probe_stats();
    assert_eq!(counters.emitted[Kind::OpLaunched as usize], 100);
    assert_eq!(counters.emitted_before[Kind::OpLaunched as usize], 5);
    assert_eq!(counters.emitted[Kind::ProxyStep as usize], 300);
    assert_eq!(stats.hits, [0; Kind::LIMIT], "the ring had room for all");
}

/// So many operations that the ring has no room for a part of their records, while nobody reads.
fn more_than_the_ring_holds(session: &mut Session) {
    const OPERATIONS: usize = RING_SLOTS / 2 + 5000;
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    target.call(&format!("fixture_operations 7 {OPERATIONS} 0"));
    // A poll takes its time, and no more.
    let mut samples = Vec::new();
    poll_until(session, &mut samples, |samples| {
        records(samples, Kind::OpCompleted) >= OPERATIONS
    });
    let hits = session.probe_stats().hits;
    for kind in [Kind::OpLaunched, Kind::OpCompleted] {
        let of_kind = samples.iter().filter_map(|sample| match sample {
            Sample::Record { record, .. } if record.kind() == Some(kind) => Some(record.op),
            _ => None,
        });
        assert!(
            of_kind.is_sorted(),
            "{kind}: what overflows comes after what had room"
        );
        assert_eq!(records(&samples, kind), OPERATIONS, "{kind}");
        assert_eq!(hits[kind as usize], 5000, "{kind}");
    }
    let by_probe = samples.iter().filter_map(|sample| match sample {
        Sample::Record { tid, carrier, .. } if *carrier == Carrier::Probe => Some(*tid),
        _ => None,
    });
    let by_probe: Vec<u32> = by_probe.collect();
    assert_eq!(by_probe, vec![target.pid(); 10_000], "the only thread there is");
    assert_eq!(session.probe_stats().bytes, 10_000 * 96);
    // Ring and probes tell of no loss but of descriptions, which later operations have overwritten.
    assert!(
        !samples
            .iter()
            .any(|sample| matches!(sample, Sample::Lost { kind: Some(_), .. }))
    );
}

#[test]
fn what_the_ring_has_no_room_for_comes_through_the_probes() {
    if let Some(mut session) = session("what_the_ring_has_no_room_for_comes_through_the_probes") {
        more_than_the_ring_holds(&mut session);
    }
}

#[test]
fn several_processes_of_one_file_are_told_apart() {
    let Some(mut session) = session("several_processes_of_one_file_are_told_apart") else {
        return;
    };
    let mut targets = [(); 3].map(|()| Target::instrumented());
    for target in &targets[..2] {
        session.attach(target.pid()).unwrap();
    }
    for (target, count) in targets.iter_mut().zip([10, 20, 40]) {
        target.call(&format!("fixture_operations 7 {count} 0"));
        target.call(&format!("fixture_probe {}", count / 10));
    }
    let samples = poll(&mut session);
    let probed = |samples: &[Sample], pids: [u32; 3]| pids.map(|pid| by_probe(samples, pid));
    let pids = targets.each_ref().map(Target::pid);
    assert_eq!(probed(&samples, pids), [1, 2, 0]);
    let of = |samples: &[Sample], wanted: u32| {
        let launched = |sample: &&Sample| matches!(sample, Sample::Record { pid, record, .. } if *pid == wanted && record.kind() == Some(Kind::OpLaunched));
        samples.iter().filter(launched).count()
    };
    assert_eq!(
        targets.each_ref().map(|target| of(&samples, target.pid())),
        [10, 20, 0]
    );

    // Letting one go leaves the other attached.
    session.detach(targets[0].pid()).unwrap();
    for target in &mut targets {
        target.call("fixture_operations 7 5 0");
        target.call("fixture_probe 3");
    }
    let samples = poll(&mut session);
    assert_eq!(
        targets.each_ref().map(|target| of(&samples, target.pid())),
        [0, 5, 0]
    );
    assert_eq!(probed(&samples, pids), [0, 3, 0]);
    assert!(
        samples
            .iter()
            .any(|sample| matches!(sample, Sample::Exited { pid, ended: false } if *pid == targets[0].pid()))
    );
    // And it can come back.
    session.attach(targets[0].pid()).unwrap();
    targets[0].call("fixture_operations 7 3 0");
    assert_eq!(of(&poll(&mut session), targets[0].pid()), 3);
}

#[test]
fn a_patched_library_is_planned_as_the_file_says() {
    let name = "a_patched_library_is_planned_as_the_file_says";
    let Some(mut first) = session(name) else { return };
    let Some(mut second) = session(name) else { return };
    let mut targets = [(); 3].map(|()| Target::instrumented());
    let sites = first.attach(targets[0].pid()).unwrap().sites;
    assert_eq!(sites.len(), 4);
    // The probes are in: each later look at the file must see what the first one saw.
    assert_eq!(first.attach(targets[1].pid()).unwrap().sites, sites);
    assert_eq!(second.attach(targets[2].pid()).unwrap().sites, sites);
    assert_eq!(
        plan(&find(targets[0].pid()).unwrap(), kernel::version()),
        sites,
        "a look without attaching"
    );
    for target in &mut targets {
        target.call("fixture_operations 7 5 0");
        target.call("fixture_probe 2");
    }
    let pids = targets.each_ref().map(Target::pid);
    let seen = |session| {
        let samples = poll(session);
        (
            records(&samples, Kind::OpLaunched),
            pids.map(|pid| by_probe(&samples, pid)),
        )
    };
    assert_eq!(seen(&mut first), (10, [2, 2, 0]));
    assert_eq!(seen(&mut second), (5, [0, 0, 2]));
}

#[test]
fn a_deleted_library_is_found() {
    let Some(mut session) = session("a_deleted_library_is_found") else {
        return;
    };
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("lib with space.so");
    fs::copy(fixture_library(), &copy).unwrap();
    let mut target = Target::start(&copy);
    target.open();
    fs::remove_file(&copy).unwrap();
    // What has the name now is another file, and must not be what is probed.
    fs::copy(fixture_library(), &copy).unwrap();
    let attached = session.attach(target.pid()).unwrap();
    assert_eq!(attached.process.library, copy);
    target.call("fixture_operations 7 9 0");
    target.call("fixture_probe 2");
    let samples = poll(&mut session);
    assert_eq!(
        (
            records(&samples, Kind::OpLaunched),
            by_probe(&samples, target.pid())
        ),
        (9, 2)
    );
}

#[test]
fn a_process_in_its_own_mount_and_pid_namespace_is_found() {
    let name = "a_process_in_its_own_mount_and_pid_namespace_is_found";
    let Some(mut session) = session(name) else { return };
    let directory = tempfile::tempdir().unwrap();
    let hidden = directory.path().join("hidden");
    fs::create_dir(&hidden).unwrap();
    let library = hidden.join("libfixture.so");
    // The copy lies in a file system that only the target's namespace has.
    let script = format!(
        "mount -t tmpfs none '{0}' && cp '{1}' '{0}/libfixture.so' && exec \"$0\" \"$@\"",
        hidden.display(),
        fixture_library().display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-c", &script]);
    command.arg(common::examples().join("fixture_target"));
    if !Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "true"])
        .status()
        .is_ok_and(|s| s.success())
    {
        common::skip(name, "no right to make namespaces");
        return;
    }
    let mut target = Target::run(&mut command, &library);
    target.open();
    assert!(!library.exists(), "the test's own namespace does not have it");
    let children = format!("/proc/{0}/task/{0}/children", target.pid());
    let pid: u32 = fs::read_to_string(children).unwrap().trim().parse().unwrap();
    let attached = session.attach(pid).unwrap();
    assert_eq!(attached.process.library, library);
    target.call("fixture_operations 7 9 2");
    target.call("fixture_probe 2");
    let samples = poll(&mut session);
    assert_eq!(
        (
            records(&samples, Kind::OpLaunched),
            records(&samples, Kind::ProxyStep),
            by_probe(&samples, pid)
        ),
        (9, 18, 2)
    );
}

#[test]
fn a_collector_in_a_pid_namespace_of_its_own_sees_its_processes() {
    let name = "a_collector_in_a_pid_namespace_of_its_own_sees_its_processes";
    let Some(mut session) = session(name) else { return };
    let namespaces = ["--mount", "--pid", "--fork", "--mount-proc"];
    if !Command::new("unshare")
        .args(namespaces)
        .arg("true")
        .status()
        .is_ok_and(|status| status.success())
    {
        common::skip(name, "no right to make namespaces");
        return;
    }
    let mut command = Command::new("unshare");
    command
        .args(namespaces)
        .arg("--kill-child")
        .arg(common::examples().join("fixture_target"));
    let mut target = Target::run(&mut command, &fixture_library());
    target.open();
    let children = format!("/proc/{0}/task/{0}/children", target.pid());
    let outside = fs::read_to_string(children).unwrap().trim().to_owned();
    // In there the target is process 1, and its number in the initial namespace cannot be known.
    let mut command = Command::new("nsenter");
    command
        .args(["--target", &outside, "--mount", "--pid"])
        .arg(common::examples().join("fixture_reader"));
    let (reader, line) = Reader::start(command, 1);
    assert!(line.starts_with("attached Probe"), "{line}");
    // A reader out here knows that one by another number, and leaves it its ring all the same.
    let refused = session.attach(outside.parse().unwrap());
    assert!(matches!(refused, Err(AttachError::Leased { .. })), "{refused:?}");
    target.call("fixture_operations 7 10 10");
    target.call("fixture_probe 3");
    assert_eq!(reader.end(), 123);
}

#[test]
fn pages_that_come_after_attaching_are_found() {
    let Some(mut session) = session("pages_that_come_after_attaching_are_found") else {
        return;
    };
    let mut target = Target::start(&fixture_library());
    session.attach(target.pid()).unwrap();
    assert_eq!(session.counters(target.pid()), None);
    target.open();
    let mut samples = Vec::new();
    poll_until(&mut session, &mut samples, |samples| {
        samples
            .iter()
            .any(|sample| matches!(sample, Sample::Communicator { .. }))
    });
    target.call("fixture_operations 7 10 2");
    samples = poll(&mut session);
    assert_eq!(
        (
            records(&samples, Kind::OpCompleted),
            records(&samples, Kind::ProxyStep)
        ),
        (10, 20)
    );
    assert_eq!(
        session.counters(target.pid()).unwrap().emitted[Kind::CommInit as usize],
        1
    );
}

#[test]
fn a_process_that_ends_is_drained_first() {
    let Some(mut session) = session("a_process_that_ends_is_drained_first") else {
        return;
    };
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 50 10");
    // A writer that died between claim and store leaves holes; what follows them must come through.
    target.call("fixture_holes 3");
    target.call("fixture_operations 7 50 10");
    let pid = target.pid();
    target.end();
    let mut samples = Vec::new();
    assert!(!session.poll(&mut samples).unwrap(), "nobody is left");
    assert_eq!(records(&samples, Kind::OpCompleted), 100);
    assert_eq!(records(&samples, Kind::ProxyStep), 1000);
    assert!(matches!(samples.last(), Some(Sample::Exited { pid: exited, ended: true }) if *exited == pid));
    assert_eq!(
        session.counters(pid).unwrap().emitted[Kind::ProxyStep as usize],
        1000
    );
    assert_eq!(session.pids().count(), 0);
}

#[test]
fn a_process_that_begins_another_program_is_let_go() {
    let Some(mut session) = session("a_process_that_begins_another_program_is_let_go") else {
        return;
    };
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 50 10");
    target.call("fixture_holes 3");
    // The same executable, and by it the same library file: only the memory is another one.
    target.exec();
    target.open();
    target.call("fixture_operations 7 4 0");
    let begun = std::time::Instant::now();
    let mut samples = Vec::new();
    let problem = loop {
        if let Err(problem) = session.poll(&mut samples) {
            break problem;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "nothing was noticed");
        std::thread::yield_now();
    };
    let name = fs::read_to_string(format!("/proc/{}/comm", target.pid())).unwrap();
    let told = format!(
        "process {} has begun another program ({})",
        target.pid(),
        name.trim_end()
    );
    assert!(problem.contains(&told), "{problem}");
    assert!(matches!(samples.last(), Some(Sample::Exited { pid, ended: true }) if *pid == target.pid()));
    assert_eq!(records(&samples, Kind::ProxyStep), 500);
    assert_eq!(session.pids().count(), 0);
    // It can be attached to as it is now.
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 9 0");
    assert_eq!(records(&poll(&mut session), Kind::OpLaunched), 9);
}

#[test]
fn a_full_ring_buffer_and_unreadable_records_are_counted() {
    let Some(mut session) = session("a_full_ring_buffer_and_unreadable_records_are_counted") else {
        return;
    };
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    // Of 300 000 sparse records the shared ring takes 65 536; the others, 88 bytes each, do not fit into 16 MiB, and nobody reads meanwhile.
    target.call("fixture_operations 7 150000 0");
    target.call("fixture_fault");
    let mut samples = poll(&mut session);
    session.detach(target.pid());
    samples.extend(poll(&mut session));
    let count = |wanted: Option<Kind>| -> u64 {
        samples
            .iter()
            .map(|sample| match sample {
                Sample::Lost {
                    carrier: Carrier::Probe,
                    kind,
                    count,
                    ..
                } if *kind == wanted => *count,
                _ => 0,
            })
            .sum()
    };
    for kind in [Kind::OpLaunched, Kind::OpCompleted] {
        assert!(count(Some(kind)) > 0);
        assert_eq!(
            count(Some(kind)) + records(&samples, kind) as u64,
            150_000,
            "{kind}"
        );
    }
    assert_eq!(count(None), 1, "the record at address 8");
}

#[test]
fn perf_event_links_do_the_same() {
    let options = Options {
        use_ebpf: UseEbpf::Require,
        force_perf_event: true,
        ..Options::default()
    };
    let Some(mut session) = session_with("perf_event_links_do_the_same", options) else {
        return;
    };
    assert_eq!(session.link_kind(), Some("perf_event"));
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 100 1");
    let elapsed = session.detach(target.pid()).unwrap();
    // 105 ms a link when nothing else goes on; other tests' links wait for the same grace periods.
    assert!(elapsed < Duration::from_secs(3), "detaching took {elapsed:?}");
    let samples = poll(&mut session);
    assert_eq!((records(&samples, Kind::OpCompleted), lost(&samples)), (100, 0));
    more_than_the_ring_holds(&mut session);
}
