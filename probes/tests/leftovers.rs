//! After detaching nothing of ours is left: not in the target, not in this process, not in the kernel. A file of its own,
//! since it looks at everything that its process holds.
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

mod common;

use std::{
    fs,
    time::{Duration, Instant},
};

use common::{Target, by_probe, poll, session};
use ringsight_records::PROBE_SYMBOLS;

/// Descriptors of this process: links of `/proc/self/fd`, and ids of eBPF objects behind them.
fn descriptors() -> (Vec<String>, Vec<(String, u32)>) {
    let (mut links, mut objects) = (Vec::new(), Vec::new());
    for entry in fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(link) = fs::read_link(entry.path()) else {
            continue;
        };
        links.push(link.display().to_string());
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", entry.file_name().display()))
            .unwrap_or_default();
        for kind in ["prog_id", "map_id", "link_id"] {
            let id = info
                .lines()
                .find_map(|line| line.strip_prefix(kind)?.strip_prefix(":")?.trim().parse().ok());
            objects.extend(id.map(|id| (kind.to_owned(), id)));
        }
    }
    links.sort();
    (links, objects)
}

/// Whether the kernel still has an eBPF object of this id.
fn exists((kind, id): &(String, u32)) -> bool {
    match kind.as_str() {
        "prog_id" => aya::programs::loaded_programs()
            .flatten()
            .any(|program| program.id() == *id),
        "map_id" => aya::maps::loaded_maps().flatten().any(|map| map.id() == *id),
        _ => aya::programs::loaded_links()
            .flatten()
            .any(|link| link.id() == *id),
    }
}

#[test]
fn nothing_is_left_after_detaching() {
    let name = "nothing_is_left_after_detaching";
    let mut target = Target::instrumented();
    let addresses = PROBE_SYMBOLS.map(|symbol| target.call(&format!("mark {symbol}")));
    let code = |target: &Target| addresses.map(|address| target.memory(address, 16));
    let (original, before) = (code(&target), descriptors());

    let Some(mut session) = session(name) else { return };
    session.attach(target.pid()).unwrap();
    target.call("fixture_operations 7 10 10");
    target.call("fixture_communicator 9");
    // A probe that has been hit is other code than one that has not: a call, on kernels that make it one.
    target.call("fixture_probe 3");
    assert_eq!(by_probe(&poll(&mut session), target.pid()), 3);
    assert_ne!(
        code(&target),
        original,
        "a probe changes the code that it sits on"
    );
    let (_, objects) = descriptors();
    assert!(objects.iter().any(|(kind, _)| kind == "link_id"));

    let elapsed = session.detach(target.pid()).unwrap();
    assert!(elapsed < Duration::from_millis(600), "detaching took {elapsed:?}");
    println!("detached in {elapsed:?} ({})", session.link_kind().unwrap());
    assert_eq!(code(&target), original);
    let (links, _) = descriptors();
    assert!(!links.iter().any(|link| link.contains("bpf_link")), "{links:?}");
    drop(session);
    assert_eq!(descriptors(), before);
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(
        !maps.contains("ringsight-pages") && !maps.contains("bpf-map"),
        "{maps}"
    );

    // The kernel frees its objects after a grace period.
    let begun = Instant::now();
    while objects.iter().any(exists) {
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{:?}",
            objects.iter().filter(|o| exists(o)).collect::<Vec<_>>()
        );
        std::thread::yield_now();
    }
    // And the target goes on: it answers.
    target.call("fixture_operations 7 10 10");
}
