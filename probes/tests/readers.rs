//! Readers that are killed, stopped, or in other pid namespaces: of every ring there is one at a time, and what none of them
//! saw is counted.
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

mod common;

use std::{
    process::Command,
    time::{Duration, Instant},
};

use common::{
    Reader, Target, by_probe, child_of, fixture_library, numbers_of, poll_until, records, session,
    session_with,
};
use ringsight_probes::{AttachError, Options, Sample, Session, Source as _, UseEbpf};
use ringsight_records::{
    Kind, Record, State,
    ring::{self, RingCursor, Slot},
};

fn ring_only() -> Session {
    let options = Options {
        use_ebpf: UseEbpf::Never,
        ..Options::default()
    };
    session_with("", options).unwrap()
}

/// Whether pid namespaces can be made; says why not.
fn may_unshare(test: &str) -> bool {
    let made = Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--mount-proc", "true"])
        .status()
        .is_ok_and(|status| status.success());
    if !made {
        common::skip(test, "no right to make namespaces");
    }
    made
}

/// Memory that a forked child shares.
struct Shared {
    base: *mut u8,
    bytes: usize,
}

const SLOTS: usize = 1 << 12;

impl Shared {
    fn new() -> Self {
        let bytes = 4096 + SLOTS * size_of::<Slot>();
        // SAFETY: a fresh mapping.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(base, libc::MAP_FAILED);
        Self {
            base: base.cast(),
            bytes,
        }
    }

    fn ring(&self) -> (&RingCursor, &[Slot]) {
        // SAFETY: zeroed memory is an empty ring; it is large and aligned enough, and changed through atomics alone.
        unsafe {
            let slots = std::slice::from_raw_parts(self.base.add(4096).cast(), SLOTS);
            (&*self.base.cast::<RingCursor>(), slots)
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`.
        unsafe { libc::munmap(self.base.cast(), self.bytes) };
    }
}

#[test]
fn a_reader_that_is_killed_while_it_reads_does_not_jam_the_ring() {
    let mut seed = 1u64;
    for round in 0..400 {
        let shared = Shared::new();
        let (cursor, slots) = shared.ring();
        for i in 0..SLOTS as u64 {
            assert!(ring::push(
                cursor,
                slots,
                &Record::new(Kind::ProxyStep, State::START, i)
            ));
        }
        // SAFETY: the child touches the shared memory and nothing else, until it is killed.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // It reads and never ends, whatever it finds.
            loop {
                let _ = std::hint::black_box(ring::pop(cursor, slots));
            }
        }
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let enough = 1 + (seed >> 33) % (SLOTS as u64 / 2);
        while cursor.tail.load(std::sync::atomic::Ordering::Relaxed) < enough {
            std::hint::spin_loop();
        }
        // SAFETY: the child made above.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        // The successor reads what is left, in order and to the end, and the ring goes on.
        let rest: Vec<u64> = std::iter::from_fn(|| ring::pop(cursor, slots))
            .map(|record| record.time_ns)
            .collect();
        assert!(
            rest.last().is_none_or(|last| *last == SLOTS as u64 - 1) && rest.is_sorted(),
            "round {round}: {} records are left, the last is {:?}",
            rest.len(),
            rest.last()
        );
        assert!(!ring::is_held_up(cursor, slots), "round {round}");
        for i in 0..SLOTS as u64 {
            assert!(ring::push(
                cursor,
                slots,
                &Record::new(Kind::ProxyStep, State::START, i)
            ));
        }
        assert_eq!(
            std::iter::from_fn(|| ring::pop(cursor, slots)).count(),
            SLOTS,
            "round {round}"
        );
    }
}

/// The samples that tell how many events of a kind were missed.
fn missed(samples: &[Sample], wanted: Kind) -> u64 {
    let of = |sample: &Sample| match sample {
        Sample::Missed { kind, count, .. } if *kind == wanted => *count,
        _ => 0,
    };
    samples.iter().map(of).sum()
}

/// Kills a reader in the middle of a job and reads on with `session`: what happens until it comes is in the ring.
fn a_successor_goes_on(mut session: Session, first: Command) {
    let mut target = Target::instrumented();
    let (first, line) = Reader::start(first, target.pid());
    assert!(line.starts_with("attached"), "{line}");
    target.call("fixture_operations 7 10 10");
    first.kill();
    target.call("fixture_operations 7 100 10");
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 1000 10");
    let mut samples = Vec::new();
    poll_until(&mut session, &mut samples, |samples| {
        records(samples, Kind::OpCompleted) >= 1100
    });
    session.detach(target.pid()).unwrap();
    session.poll(&mut samples).unwrap();
    // Those of the first ten that the first reader had not read are there too; what it had taken in the turn in which it was killed is
    // nowhere, and is told.
    for (kind, each) in [
        (Kind::OpLaunched, 1),
        (Kind::OpCompleted, 1),
        (Kind::ProxyStep, 10),
    ] {
        let (count, missed) = (records(&samples, kind) as u64, missed(&samples, kind));
        assert!(
            1100 * each <= count && count + missed <= 1110 * each,
            "{count} records of {kind}, {missed} missed"
        );
    }
    let mut launched: Vec<u32> = samples
        .iter()
        .filter_map(|sample| match sample {
            Sample::Record { record, .. } if record.kind() == Some(Kind::OpLaunched) => Some(record.op),
            _ => None,
        })
        .collect();
    let all = launched.len();
    launched.sort_unstable();
    launched.dedup();
    assert_eq!(launched.len(), all, "an operation came twice");
    assert_eq!(common::lost(&samples), 0);
}

#[test]
fn a_successor_goes_on_with_probes() {
    let Some(session) = session("a_successor_goes_on_with_probes") else {
        return;
    };
    a_successor_goes_on(session, Reader::command());
}

#[test]
fn a_successor_goes_on_without_probes() {
    let mut first = Reader::command();
    first.arg("--no-ebpf");
    a_successor_goes_on(ring_only(), first);
}

#[test]
fn what_happens_without_a_reader_is_missed_and_not_lost() {
    let mut target = Target::instrumented();
    let mut first = Reader::command();
    first.arg("--no-ebpf");
    // What happened before anybody looked is nobody's loss.
    target.call("fixture_operations 7 50 1");
    let (first, line) = Reader::start(first, target.pid());
    assert!(line.starts_with("attached"), "{line}");
    target.call("fixture_operations 7 10 10");
    assert_eq!(first.end(), 120);
    target.call("fixture_operations 7 100 10");
    let mut session = ring_only();
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 5 10");
    let mut samples = Vec::new();
    session.poll(&mut samples).unwrap();
    session.detach(target.pid()).unwrap();
    session.poll(&mut samples).unwrap();
    assert_eq!(records(&samples, Kind::OpLaunched), 5);
    for kind in [Kind::OpLaunched, Kind::OpCompleted] {
        assert_eq!(missed(&samples, kind), 100, "{kind}");
    }
    assert_eq!(common::lost(&samples), 0);
}

#[test]
fn what_another_reader_had_is_no_loss_of_who_came_before_the_pages() {
    let name = "what_another_reader_had_is_no_loss_of_who_came_before_the_pages";
    let Some(mut first) = session(name) else { return };
    let Some(mut second) = session(name) else { return };
    let Some(mut third) = session(name) else { return };
    let mut target = Target::start(&fixture_library());
    second.attach(target.pid()).unwrap();
    // Before there is a ring to take it.
    target.call("fixture_probe 3");
    assert_eq!(by_probe(&common::poll(&mut second), target.pid()), 3);
    first.attach(target.pid()).unwrap();
    target.open();
    let mut samples = Vec::new();
    let communicator = |samples: &[Sample]| {
        let is = |sample: &Sample| matches!(sample, Sample::Communicator { .. });
        samples.iter().any(is)
    };
    poll_until(&mut first, &mut samples, communicator);
    let begun = Instant::now();
    let refused = loop {
        if let Err(problem) = second.poll(&mut Vec::new()) {
            break problem;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "it was not refused");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(refused.contains("is being watched by process"), "{refused}");
    target.call("fixture_operations 7 10 0");
    assert_eq!(records(&common::poll(&mut first), Kind::OpCompleted), 10);
    first.detach(target.pid()).unwrap();
    let mut samples = Vec::new();
    poll_until(&mut second, &mut samples, communicator);
    target.call("fixture_operations 7 5 0");
    second.poll(&mut samples).unwrap();
    second.detach(target.pid()).unwrap();
    second.poll(&mut samples).unwrap();
    assert_eq!(
        (records(&samples, Kind::OpCompleted), common::lost(&samples)),
        (5, 0)
    );
    // Nor has it told the pages of more than has come to it since.
    target.call("fixture_operations 7 4 0");
    third.attach(target.pid()).unwrap();
    third.detach(target.pid()).unwrap();
    assert_eq!(missed(&common::poll(&mut third), Kind::OpCompleted), 4);
}

#[test]
fn a_stopped_reader_says_who_took_its_ring_and_takes_it_back() {
    let mut target = Target::instrumented();
    let mut first = Reader::command();
    first.arg("--no-ebpf");
    let (mut first, line) = Reader::start(first, target.pid());
    assert!(line.starts_with("attached"), "{line}");
    first.signal(libc::SIGSTOP);
    let begun = Instant::now();
    let mut session = ring_only();
    // While its heartbeat is fresh, the second one is refused.
    while let Err(error) = session.attach(target.pid()) {
        let refused = format!("is being watched by process {}", first.pid());
        assert!(error.to_string().contains(&refused), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Its last sign of life was up to a second old when it was stopped.
    assert!(begun.elapsed() > Duration::from_secs(3), "{:?}", begun.elapsed());
    first.signal(libc::SIGCONT);
    let problem = first.line();
    let taken = format!("process {} has taken its ring over", std::process::id());
    assert!(problem.contains(&taken), "{problem}");
    target.call("fixture_operations 7 10 10");
    let samples = common::poll(&mut session);
    assert_eq!(
        records(&samples, Kind::ProxyStep),
        100,
        "the ring is the second one's"
    );
    session.detach(target.pid()).unwrap();
    drop(session);
    let problem = first.line();
    assert!(problem.contains("its ring is this reader's again"), "{problem}");
    target.call("fixture_operations 7 20 10");
    let (_, by_process) = first.end_by_process();
    let [records, _, lost] = by_process[&target.pid()];
    // What went to the second one, this one did not see, and says so.
    assert_eq!((records, lost), (240, 120));
}

#[test]
fn a_reader_that_cannot_be_seen_keeps_its_ring() {
    let name = "a_reader_that_cannot_be_seen_keeps_its_ring";
    if !may_unshare(name) {
        return;
    }
    let namespaces = ["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"];
    let mut command = Command::new("unshare");
    command
        .args(namespaces)
        .arg(common::examples().join("fixture_target"));
    let mut target = Target::run(&mut command, &fixture_library());
    target.open();
    let outside = child_of(target.pid());
    let inside = || {
        let mut command = Command::new("nsenter");
        command
            .args(["--target", &outside.to_string(), "--mount", "--pid"])
            .arg(common::examples().join("fixture_reader"))
            .arg("--no-ebpf");
        command
    };
    // A reader out here watches; one inside sees no process of this namespace.
    let mut session = ring_only();
    session.attach(outside).unwrap();
    let (_, line) = Reader::start(inside(), 1);
    assert!(
        line.starts_with("refused") && line.contains("of another pid namespace"),
        "{line}"
    );
    let samples = common::poll(&mut session);
    assert_eq!(common::lost(&samples), 0);
    drop(session);
    // And the other way round, where it is seen by another number.
    let (reader, line) = Reader::start(inside(), 1);
    assert!(line.starts_with("attached"), "{line}");
    let mut session = ring_only();
    let refused = session.attach(outside);
    let Err(AttachError::Leased { holder, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(
        holder.to_string().contains("of another pid namespace"),
        "{holder}"
    );
    target.call("fixture_operations 7 10 10");
    assert_eq!(reader.end(), 120);
    // Given back, it is free at once.
    session.attach(outside).unwrap();
}

#[test]
fn processes_with_one_number_in_several_namespaces_are_told_apart() {
    let name = "processes_with_one_number_in_several_namespaces_are_told_apart";
    if session(name).is_none() || !may_unshare(name) {
        return;
    }
    // A pid namespace for the reader, and two within it, whose targets are process 1 of each.
    let outer = Target::run(
        Command::new("unshare")
            .args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child"])
            .arg(common::examples().join("fixture_target")),
        &fixture_library(),
    );
    let outer_pid = child_of(outer.pid()).to_string();
    let enter = ["--target", &outer_pid, "--mount", "--pid"];
    let mut targets = [(); 2].map(|()| {
        let mut command = Command::new("nsenter");
        command
            .args(enter)
            .args(["unshare", "--pid", "--fork", "--kill-child"])
            .arg(common::examples().join("fixture_target"));
        let mut target = Target::run(&mut command, &fixture_library());
        target.open();
        target
    });
    // From out here nsenter forks an unshare, which forks the target.
    let pids = [0, 1].map(|at: usize| {
        let numbers = numbers_of(child_of(child_of(targets[at].pid())));
        let [_, in_outer, in_own] = numbers[..] else {
            panic!("{numbers:?}")
        };
        assert_eq!(in_own, 1);
        in_outer
    });
    let mut command = Command::new("nsenter");
    command.args(enter).arg(common::examples().join("fixture_reader"));
    let (reader, line) = Reader::start_on(command, &pids);
    assert!(line.starts_with("attached Probe"), "{line}");
    targets[0].call("fixture_operations 7 30 0");
    targets[1].call("fixture_operations 7 50 0");
    // And through the probes, of no operation that is described.
    targets[0].call("fixture_probe 3");
    targets[1].call("fixture_probe 5");
    let (_, by_process) = reader.end_by_process();
    assert_eq!(by_process[&pids[0]], [63, 0, 3]);
    assert_eq!(by_process[&pids[1]], [105, 0, 5]);
}
