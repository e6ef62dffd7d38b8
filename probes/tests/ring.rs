//! The shared ring: its lease, its counts, and a session that has nothing else.

mod common;

use std::{
    io::{Read as _, Write as _},
    process::Command,
    time::{Duration, Instant},
};

use common::{Reader, Target, examples, fixture_library, lost, poll, records, session, session_with};
use ringsight_probes::{AttachError, Carrier, NetworkScope, Options, Sample, Source as _, UseEbpf};
use ringsight_records::{Kind, pages::PagesError};

const RING_ONLY: Options = Options {
    network: NetworkScope::Never,
    use_ebpf: UseEbpf::Never,
    dense: Kind::DENSE,
    variable: None,
    force_perf_event: false,
    force_nop1: false,
};

#[test]
fn without_probes_the_ring_carries_everything() {
    let mut session = session_with("", RING_ONLY).unwrap();
    let mut target = Target::instrumented();
    let attached = session.attach(target.pid()).unwrap();
    assert_eq!((attached.carrier, attached.sites.len()), (Carrier::Ring, 0));
    target.call("fixture_operations 7 100 5");
    target.call("fixture_communicator 8");
    let samples = poll(&mut session);
    assert_eq!(records(&samples, Kind::OpLaunched), 100);
    assert_eq!(records(&samples, Kind::OpCompleted), 100);
    assert_eq!(records(&samples, Kind::ProxyStep), 500);
    assert_eq!(records(&samples, Kind::CommInit), 1);
    let descriptions = samples
        .iter()
        .filter(|sample| matches!(sample, Sample::Description { .. }))
        .count();
    assert_eq!((descriptions, lost(&samples)), (200, 0));
}

#[test]
fn an_operation_that_the_ring_tells_of_is_seen_to_end() {
    let Some(mut session) = session("an_operation_that_the_ring_tells_of_is_seen_to_end") else {
        return;
    };
    let mut target = Target::instrumented();
    // Within an operation it pauses and between two it does not, so that one is under way at each moment of attaching; and no
    // more than 20 000 records a second, so that nothing is lost (which would be another reason not to see an end) though the
    // machine keep the reader from reading for seconds. Killed at the end.
    target.send("fixture_slow_operations 7 1000000000 1 10");
    let mut under_way = 0;
    // How long attaching takes, and so whether an operation ends meanwhile, differs from time to time.
    while under_way < 4 {
        session.attach(target.pid()).unwrap();
        let mut samples = Vec::new();
        // Too early if it has not begun yet.
        if session.counters(target.pid()).unwrap().emitted_before[Kind::OpLaunched as usize] > 0 {
            under_way += 1;
            common::poll_until(&mut session, &mut samples, |samples| {
                records(samples, Kind::ProxyStep) > 0 && records(samples, Kind::OpCompleted) > 0
            });
            let (step, completed) = (
                first(&samples, Kind::ProxyStep),
                first(&samples, Kind::OpCompleted),
            );
            assert!(
                completed <= step,
                "steps from operation {step} on, ends only from {completed} on, {} lost",
                lost(&samples)
            );
        }
        session.detach(target.pid()).unwrap();
        poll(&mut session);
    }
}

/// The first operation of which there is a record of this kind.
fn first(samples: &[Sample], kind: Kind) -> u32 {
    let operation = |sample: &Sample| match sample {
        Sample::Record { record, .. } if record.kind() == Some(kind) => Some(record.op),
        _ => None,
    };
    samples.iter().filter_map(operation).min().expect("some")
}

const ROUNDS: u64 = 40;

#[test]
fn a_million_records_and_none_lost() {
    let Some(mut session) = session("a_million_records_and_none_lost") else {
        return;
    };
    let mut target = Target::instrumented();
    let pid = target.pid();
    session.attach(pid).unwrap();
    // The ring holds 65 536 records. The target runs free within two rounds of 25 000, which is what makes "none lost" a
    // property of the ring and its reader and not of the machine's load; the ring goes round fifteen times.
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    let worker = std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            target.call("fixture_operations 7 25 1000");
            receiver.recv().expect("the reader");
        }
        target
    });
    let (mut seen, mut lost_so_far) = ([0u64; Kind::LIMIT], 0);
    let mut samples = Vec::new();
    let mut allowed = 0;
    while allowed < ROUNDS {
        session.poll(&mut samples).unwrap();
        lost_so_far += lost(&samples);
        for sample in samples.drain(..) {
            if let Sample::Record { record, .. } = sample {
                seen[record.kind as usize] += 1;
            }
        }
        while allowed < ROUNDS && seen[Kind::ProxyStep as usize] + lost_so_far >= allowed * 25_000 {
            match sender.try_send(()) {
                Ok(()) => allowed += 1,
                Err(_) => break,
            }
        }
        // The collector's tick.
        if !session.is_behind() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let target = worker.join().unwrap();
    samples.extend(poll(&mut session));
    lost_so_far += lost(&samples);
    for sample in &samples {
        if let Sample::Record { record, .. } = sample {
            seen[record.kind as usize] += 1;
        }
    }
    let counters = session.counters(target.pid()).unwrap();
    assert_eq!(counters.emitted[Kind::ProxyStep as usize], 1_000_000);
    assert_eq!((seen, lost_so_far), (counters.emitted, 0));
}

#[test]
fn what_the_ring_loses_is_counted() {
    let mut session = session_with("", RING_ONLY).unwrap();
    let mut target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    // More than the ring holds, and nobody reads.
    target.call("fixture_operations 7 10 10000");
    let samples = poll(&mut session);
    let counters = session.counters(target.pid()).unwrap();
    let of_kind = |wanted: Kind| -> u64 {
        samples
            .iter()
            .map(|sample| match sample {
                Sample::Lost {
                    kind: Some(kind),
                    count,
                    ..
                } if *kind == wanted => *count,
                _ => 0,
            })
            .sum()
    };
    assert!(of_kind(Kind::ProxyStep) > 0);
    assert_eq!(counters.lost[Kind::ProxyStep as usize], of_kind(Kind::ProxyStep));
    assert_eq!(
        of_kind(Kind::ProxyStep) + records(&samples, Kind::ProxyStep) as u64,
        100_000
    );
    assert_eq!(
        of_kind(Kind::OpLaunched) + records(&samples, Kind::OpLaunched) as u64,
        10
    );
}

#[test]
fn a_second_reader_is_refused_and_a_dead_ones_lease_is_taken() {
    let mut target = Target::instrumented();
    let (first, line) = Reader::start(Reader::command(), target.pid());
    assert!(line.starts_with("attached"), "{line}");
    let mut session = session_with("", RING_ONLY).unwrap();
    let Err(AttachError::Leased { holder, .. }) = session.attach(target.pid()) else {
        panic!("two readers of one ring")
    };
    assert_eq!(holder.to_string(), format!("process {}", first.pid()));
    // The refusal left the first reader alone.
    target.call("fixture_operations 7 10 10");

    let begun = Instant::now();
    first.kill();
    session.attach(target.pid()).unwrap();
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "a dead reader's lease need not lapse"
    );
    target.call("fixture_operations 7 20 10");
    let samples = poll(&mut session);
    // And what the first one had not read by then.
    assert!((200..=300).contains(&records(&samples, Kind::ProxyStep)));
    assert!((20..=30).contains(&records(&samples, Kind::OpLaunched)));
    assert_eq!(lost(&samples), 0);
}

#[test]
fn a_reader_that_lets_go_leaves_the_ring_to_the_next() {
    let mut target = Target::instrumented();
    let (first, line) = Reader::start(Reader::command(), target.pid());
    assert!(line.starts_with("attached"), "{line}");
    target.call("fixture_operations 7 10 10");
    assert_eq!(first.end(), 120);
    // Unarmed: nothing is written.
    target.call("fixture_operations 7 10 10");
    let mut session = session_with("", RING_ONLY).unwrap();
    session.attach(target.pid()).unwrap();
    let samples = poll(&mut session);
    assert_eq!(records(&samples, Kind::ProxyStep), 0);
}

#[test]
fn without_rights_there_is_one_message_and_the_ring() {
    let name = "without_rights_there_is_one_message_and_the_ring";
    let as_nobody = |program: &str| {
        let mut command = Command::new("setpriv");
        command.args([
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "--inh-caps=-all",
        ]);
        command.arg(examples().join(program));
        command
    };
    let allowed = Command::new("setpriv")
        .args([
            "--reuid",
            "65534",
            "--regid",
            "65534",
            "--clear-groups",
            "test",
            "-x",
        ])
        .arg(examples().join("fixture_target"))
        .status();
    if !allowed.is_ok_and(|status| status.success()) {
        let reason = format!(
            "no right to become another user, or that user cannot run {}",
            examples().display()
        );
        common::skip(name, &reason);
        return;
    }
    let mut target = Target::run(&mut as_nobody("fixture_target"), &fixture_library());
    target.open();
    let (reader, line) = Reader::start(as_nobody("fixture_reader"), target.pid());
    assert!(line.starts_with("attached Ring"), "{line}");
    assert!(line.contains("CAP_BPF") && line.contains("CAP_PERFMON"), "{line}");
    target.call("fixture_operations 7 10 10");
    assert_eq!(reader.end(), 120);

    // Another user's process is not even looked into.
    let mine = Target::instrumented();
    let (_, line) = Reader::start(as_nobody("fixture_reader"), mine.pid());
    assert!(
        line.starts_with("refused no right to look into process"),
        "{line}"
    );
    assert!(line.contains("CAP_SYS_PTRACE"), "{line}");
}

#[test]
fn bad_targets_are_refused_with_a_reason() {
    let mut session = session_with("", RING_ONLY).unwrap();
    let mut child = Command::new("cat")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Once it has echoed a byte it is `cat` for certain, and not this test's image before `exec`.
    child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let pid = child.id();
    assert!(matches!(session.attach(pid), Err(AttachError::NoLibrary { .. })));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(matches!(session.attach(pid), Err(AttachError::Gone { .. })));

    let mut target = Target::start(&fixture_library());
    target.call("fixture_open 9");
    let Err(AttachError::Pages {
        source: PagesError::Version(9),
        ..
    }) = session.attach(target.pid())
    else {
        panic!("a layout of the future was accepted")
    };
    let target = Target::instrumented();
    session.attach(target.pid()).unwrap();
    assert!(matches!(
        session.attach(target.pid()),
        Err(AttachError::Twice { .. })
    ));

    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libnccl.so.2");
    if common::compile(
        "bad_targets_are_refused_with_a_reason",
        "libnccl.c",
        &library,
        &["-fvisibility=hidden", "-s", "-nostdlib"],
    )
    .is_some()
    {
        let target = Target::start(&library);
        let error = session.attach(target.pid()).unwrap_err();
        assert!(matches!(error, AttachError::Stripped { .. }), "{error}");
        common::compile("", "libnccl.c", &library.with_extension("1"), &[]);
        let target = Target::start(&library.with_extension("1"));
        let error = session.attach(target.pid()).unwrap_err();
        assert!(matches!(error, AttachError::Ebpf { .. }), "{error}");
    }
}
