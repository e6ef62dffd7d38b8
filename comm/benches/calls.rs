//! What an eager all_reduce of 8 bytes costs the thread that calls it, on a CUDA driver that runs no kernel:
//! tests/cuda/calls.c on tests/cuda/libcuda.cpp. Some 80 ns of it are that driver's.

#[path = "../tests/native/mod.rs"]
mod native;

use std::process::Command;

/// Runs of the program. Each gives the fastest of its batches of 200 calls: where the threads that drain events have a
/// processor of their own, nothing else is in the way.
const RUNS: usize = 9;

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

fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
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
        let said = native::run(
            Command::new(folder.path().join("calls"))
                .arg(native::library())
                .env("LD_LIBRARY_PATH", folder.path())
                .env("NCCL_SOCKET_IFNAME", "lo")
                .env("RINGSIGHT_MOCK_KERNELS", "skip")
                .env_remove("NCCL_DEBUG")
                .env_remove("RINGSIGHT_DEVICE"),
        );
        times.push(number(&said, "best"));
        allocations = allocations.max(number(last_line(&said), "allocations"));
    }
    times.sort_by(f64::total_cmp);
    let (median, min) = (times[RUNS / 2], times[0]);
    if json {
        println!(r#"{{"call_ns":{{"median":{median},"min":{min}}},"allocations":{allocations}}}"#);
    } else {
        println!("a call takes {median} ns ({min} at best) and {allocations} allocations");
    }
}
