//! What an eager all_reduce of 8 bytes costs the thread that calls it, on a CUDA driver that runs no kernel:
//! tests/cuda/calls.c on tests/cuda/libcuda.cpp. Some 80 ns of it are that driver's. `--without LIBRARY` names one that writes no records
//! (`RINGSIGHT_NO_RECORDS` when it is built), to be compared with.

#[path = "../tests/native/mod.rs"]
mod native;

use std::{path::Path, process::Command};

/// Runs of the program. Each gives the fastest of its batches of 200 calls: where the threads that drain events have a
/// processor of their own, nothing else is in the way.
const RUNS: usize = 9;
/// Pairs of runs with and without records, by turns.
const PAIRS: usize = 16;

/// The number behind a word.
fn number(said: &str, word: &str) -> f64 {
    let mut words = said.split_ascii_whitespace();
    words.find(|found| *found == word);
    words
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no {word}: {said}"))
}

/// What the program says of all its batches.
fn last_line(said: &str) -> &str {
    said.lines().last().unwrap_or_default()
}

/// What the program says of a library.
fn said_of(library: &Path, folder: &Path) -> String {
    native::run(
        Command::new(folder.join("calls"))
            .arg(library)
            .env("LD_LIBRARY_PATH", folder)
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("RINGSIGHT_MOCK_KERNELS", "skip")
            .env_remove("NCCL_DEBUG")
            .env_remove("RINGSIGHT_DEVICE"),
    )
}

/// Quartiles of what a library takes more than one without records.
fn records(without: &Path, folder: &Path) -> [f64; 3] {
    let with = native::library();
    let best = |library: &Path| number(&said_of(library, folder), "best");
    let mut more: Vec<f64> = (0..PAIRS)
        .map(|pair| {
            // Not always the same one first.
            if pair % 2 == 0 {
                best(&with) - best(without)
            } else {
                let other = best(without);
                best(&with) - other
            }
        })
        .collect();
    more.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| more[quarter * (PAIRS - 1) / 4])
}

fn main() {
    let mut arguments = std::env::args();
    let json = std::env::args().any(|argument| argument == "--json");
    let without = arguments.find(|argument| argument == "--without").map(|_| {
        let library = arguments.next().expect("--without names a library");
        assert!(Path::new(&library).is_file(), "there is no {library}");
        library
    });
    if let Err(missing) = ringsight_kernels::cuda::fatbin() {
        eprintln!("SKIPPED calls: {missing}");
        println!(r#"{{"skipped":true}}"#);
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    native::build_cuda(folder.path());
    let mut times = Vec::new();
    let mut allocations: f64 = 0.0;
    for _ in 0..RUNS {
        let said = said_of(&native::library(), folder.path());
        times.push(number(&said, "best"));
        allocations = allocations.max(number(last_line(&said), "allocations"));
    }
    times.sort_by(f64::total_cmp);
    let (median, min) = (times[RUNS / 2], times[0]);
    let records = without.map(|library| records(Path::new(&library), folder.path()));
    if json {
        let records = records.map_or("null".to_owned(), |more| format!("{more:?}"));
        println!(
            r#"{{"call_ns":{{"median":{median},"min":{min}}},"allocations":{allocations},"records_ns":{records},"pairs":{PAIRS}}}"#
        );
    } else {
        println!("a call takes {median} ns ({min} at best) and {allocations} allocations");
        if let Some([low, middle, high]) = records {
            println!("of it records take {middle:.0} ns ({low:.0} to {high:.0}), {PAIRS} pairs");
        }
    }
}
