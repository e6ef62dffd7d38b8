//! Operations have the times of a timer that is not the host's: a job on a CUDA driver without a GPU, each of whose GPUs has one
//! that began at another time and gains on the host's clock, watched through the shared ring.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::{demo::collector::Collector, process::Guarded};
use ringsight_tests::{LIMIT, alone, artifacts, compile::cuda_without_a_gpu, folder, skip};
use serde_json::Value;

/// The folder of the driver without a GPU and of the program that runs on it: comm's tests use it, too.
fn driver() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cuda");
    cuda_without_a_gpu(&folder);
    folder
}

fn attribute<'a>(span: &'a Value, key: &str) -> Option<&'a Value> {
    let attributes = span["attributes"].as_array()?;
    let value = &attributes.iter().find(|attribute| attribute["key"] == key)?["value"];
    value.as_object()?.values().next()
}

fn number(span: &Value, key: &str) -> Option<f64> {
    let value = attribute(span, key)?;
    // OTLP's JSON has 64-bit integers as text.
    value.as_f64().or_else(|| value.as_str()?.parse().ok())
}

fn nanoseconds(span: &Value, key: &str) -> Result<u64> {
    Ok(span[key].as_str().context("a time")?.parse()?)
}

fn channels(file: &Path) -> Result<Vec<Value>> {
    let mut spans = Vec::new();
    for line in fs::read_to_string(file)?.lines() {
        let line: Value = serde_json::from_str(line)?;
        for resource in line["resourceSpans"].as_array().into_iter().flatten() {
            for scope in resource["scopeSpans"].as_array().into_iter().flatten() {
                spans.extend(scope["spans"].as_array().into_iter().flatten().cloned());
            }
        }
    }
    spans.retain(|span| span["name"] == "kernel channel");
    Ok(spans)
}

fn unix_ns() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// A job of the driver's that waits to be watched.
struct Job {
    /// Mode, ranks, and that they are threads.
    words: [&'static str; 3],
    /// Replays, and in mode `replays` operations of a graph.
    numbers: &'static [u32],
    gpus: &'static str,
    variables: &'static [(&'static str, &'static str)],
    /// Operations of each rank, at least.
    operations: usize,
}

#[test]
fn every_replayed_operation_has_the_times_of_the_gpus_timer() -> Result<()> {
    let test = "every_replayed_operation_has_the_times_of_the_gpus_timer";
    let job = Job {
        words: ["replays", "2", "t"],
        numbers: &[200, 5],
        gpus: "2",
        variables: &[],
        operations: 1000,
    };
    all_have_gpus_times(test, &job)
}

/// Starts and ends of all are in one ring, and those of one rank's operation behind those of another's that go on: no rank's are told with the host's times as soon as they
/// are over.
#[test]
fn operations_of_ranks_on_one_gpu_have_the_times_of_its_timer() -> Result<()> {
    let test = "operations_of_ranks_on_one_gpu_have_the_times_of_its_timer";
    let job = Job {
        words: ["watch", "4", "t"],
        numbers: &[200],
        gpus: "1",
        // Straight, so that some take long and have their start told before their end.
        variables: &[("RINGSIGHT_STRAIGHT_BYTES", "1")],
        operations: 800,
    };
    all_have_gpus_times(test, &job)
}

fn all_have_gpus_times(test: &str, watched: &Job) -> Result<()> {
    let _alone = alone();
    let (folder, driver) = (folder()?, driver());
    let begun = unix_ns();
    let log = folder.path().join("said");
    let mut command = Command::new(driver.join("driver"));
    command
        .arg(artifacts().library_folder.join("libnccl.so.2"))
        .args(watched.words)
        .arg(folder.path())
        .args(watched.numbers.iter().map(u32::to_string))
        .env("LD_LIBRARY_PATH", driver)
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("RINGSIGHT_MOCK_GPUS", watched.gpus)
        .envs(watched.variables.iter().copied())
        // Twenty days ahead, and 40 ppm fast.
        .env("RINGSIGHT_MOCK_TIMER", "1728000000000000,40")
        .env_remove("RINGSIGHT_DEVICE")
        .stdin(Stdio::null())
        .stdout(fs::File::create(&log)?);
    let mut job = Guarded::start("job", &mut command, libc::SIGKILL)?;
    let end = Instant::now() + LIMIT;
    while !folder.path().join("ready").exists() {
        let said = fs::read_to_string(&log)?;
        if said.contains("this build has no kernels") {
            skip(test, "needs kernels, which nvcc compiles (`cargo xtask setup`)");
            return Ok(());
        }
        ensure!(!said.contains("FAILED") && Instant::now() < end, "{said}");
        thread::sleep(Duration::from_millis(5));
    }
    let spans = folder.path().join("spans.jsonl");
    let options = ["--no-ebpf", "--out"].map(str::to_owned);
    let options = [&options[..], &[spans.display().to_string()]].concat();
    let mut collector = Collector::attach(artifacts(), &[job.pid()], &options, folder.path())?;
    fs::write(folder.path().join("go"), "")?;
    ensure!(job.wait(LIMIT)?.success(), "{}", fs::read_to_string(&log)?);
    let summary = collector.finish(LIMIT)?;
    let ended = unix_ns();
    ensure!(summary.lost == 0, "{} records were lost", summary.lost);

    // Operations by rank, each of one channel or more.
    let mut seen: BTreeMap<i64, HashSet<&str>> = BTreeMap::new();
    let (mut placed, mut known) = (0, 0);
    let channels = channels(&spans)?;
    for span in &channels {
        let rank = number(span, "ccl.rank").context("a rank")? as i64;
        let operation = span["parentSpanId"].as_str().context("a parent")?;
        seen.entry(rank).or_default().insert(operation);
        let source = attribute(span, "ccl.timing.source").context("a source")?;
        ensure!(source == "device", "{span}");
        let (start, end) = (
            nanoseconds(span, "startTimeUnixNano")?,
            nanoseconds(span, "endTimeUnixNano")?,
        );
        let took = number(span, "ccl.device.duration").context("a duration")? * 1e9;
        // As long as by the GPU's timer, whatever is known of that; seconds in binary are nanoseconds but for the last digits.
        ensure!((end - start).abs_diff(took.round() as u64) <= 1, "{span}");
        ensure!(
            begun < start && end < ended + 1_000_000,
            "{begun} {ended}: {span}"
        );
        placed += 1;
        known += u32::from(number(span, "ccl.clock.device.uncertainty").is_some_and(|off| off < 1e-3));
    }
    ensure!(watched.words[1] == seen.len().to_string(), "{seen:?}");
    for (rank, operations) in &seen {
        let count = operations.len();
        ensure!(
            count >= watched.operations,
            "rank {rank} has {count} operations with channels"
        );
    }
    // The first sample is taken as soon as the machine has time for it.
    ensure!(known > 0, "none of {placed} has a bound");
    Ok(())
}
