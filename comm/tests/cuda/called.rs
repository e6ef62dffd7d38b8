//! What an eager call takes of the calling thread.

use super::{drive, library, output, start};

/// By count and not by time, so that no busy machine can make it fail.
#[test]
fn an_eager_call_takes_no_more_than_it_took() {
    takes_no_more("an_eager_call_takes_no_more_than_it_took", &[], true, false);
}

#[test]
fn without_graphs_an_eager_call_takes_no_more_than_it_took() {
    let test = "without_graphs_an_eager_call_takes_no_more_than_it_took";
    let no_graphs = ("RINGSIGHT_GRAPH_LAUNCH", "0");
    takes_no_more(test, &[no_graphs], false, true);
    // Kernels of an earlier device do not wait for the one before, and so must begin behind it.
    let compiled_for_ampere = ("RINGSIGHT_MOCK_COMPILED_FOR", "80");
    takes_no_more(test, &[no_graphs, compiled_for_ampere], false, false);
    // There is no memory for them.
    takes_no_more(test, &[("RINGSIGHT_MOCK_NO_KERNEL_NODES", "1")], false, true);
}

/// Nothing else shows it but the time that calls take.
#[test]
fn a_plan_that_is_over_is_that_of_the_next_such_call() {
    let test = "a_plan_that_is_over_is_that_of_the_next_such_call";
    let settings = [
        ("RINGSIGHT_MOCK_KERNELS", "skip"),
        ("NCCL_DEBUG", "TRACE"),
        ("NCCL_DEBUG_SUBSYS", "TUNING"),
    ];
    let Some(said) = output("calls", test, &["2"], &settings) else {
        return;
    };
    let number = |words: &str| said.lines().filter(|line| line.contains(words)).count();
    let (calls, again) = (number(" AllReduce: "), number(" is that of an earlier such call"));
    // Not of the first batch, whose calls are under way together, nor of those that the machine has let run into one another.
    assert!(calls > 4000 && again > calls / 2, "{again} of {calls}");
}

/// The number behind a word.
fn taken(said: &str, what: &str) -> f64 {
    let words: Vec<&str> = said.split([' ', ',']).collect();
    let at = words.iter().position(|word| *word == what).expect(what);
    words[at + 1].parse().unwrap()
}

fn takes_no_more(test: &str, settings: &[(&str, &str)], by_graphs: bool, overlapping: bool) {
    let settings = [&[("RINGSIGHT_MOCK_KERNELS", "skip")], settings].concat();
    let Some(said) = start("calls", test, &[], &settings) else {
        return;
    };
    // A call, on average over 200 or, of the driver's calls, 40 thousand: what is had once for several counts for its part.
    let taken = |what: &str| taken(&said, what);
    for (what, most) in MOST {
        let count = taken(what);
        assert!(count <= *most, "{what}: {count} a call, {most} at most: {said}");
    }
    let is = |what: &str, wanted: f64| assert!((taken(what) - wanted).abs() <= 0.01, "{what}: {said}");
    is("launches", 1.0);
    // One launched by a graph does not come before the one before it has ended.
    is("graphs", f64::from(by_graphs));
    is("overlapping", f64::from(overlapping));
    // Of a graph's arguments nothing changes outside of one 16 bytes, which the driver writes in half the time that it takes for all. This is of
    // the median batch: while more launches are under way than ever before, some have their memory elsewhere.
    is("changed", f64::from(by_graphs));
    // The end of one launched by a graph is known.
    is("records", f64::from(!by_graphs));
    // Where streams change, an operation waits for the one before.
    is("changing", 1.0);
    is("twice", 0.5);
}

/// What an eager all_reduce of one communicator on one stream takes at most: allocations and frees of the calling thread, and
/// calls of the driver.
const MOST: &[(&str, f64)] = &[
    ("allocations", 0.1),
    ("waits", 0.1),
    ("captures", 1.0),
    ("current", 2.0),
    ("ids", 1.0),
];

/// As measured on GPUs, of a library and another or the same with other settings.
#[test]
fn two_libraries_are_timed_by_turns() {
    let test = "two_libraries_are_timed_by_turns";
    // A library of the same file would be the same library.
    let folder = tempfile::tempdir().unwrap();
    let other = folder.path().join("libnccl.so.2");
    std::fs::copy(library(), &other).unwrap();
    let arguments = ["turns", "2", "p", other.to_str().unwrap(), "4"];
    let Some(said) = drive(test, &arguments, &[]) else {
        return;
    };
    let taken = |what: &str| taken(&said, what);
    assert!(said.starts_with("4 turns, "), "{said}");
    for what in ["host_ns", "other_host_ns", "device_ns", "other_device_ns"] {
        assert!(taken(what) > 0.0, "{what}: {said}");
    }
    for what in ["host_more_ns", "device_more_ns"] {
        assert!(taken(what).is_finite(), "{what}: {said}");
    }
}
