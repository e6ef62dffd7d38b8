//! Targets and surroundings that misbehave: each gives a clear error, and nothing else is lost.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::{
    demo::{collector::Collector, job::Job, summary::Summary},
    process::Guarded,
    workspace::Artifacts,
};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, may_attach, skip, start, traces};

/// Runs `ringsight attach` with these arguments to its end; exit code and everything that it wrote.
fn attach(arguments: &[String]) -> Result<(Option<i32>, String)> {
    let output = Command::new(&artifacts().ringsight)
        .arg("attach")
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .context("starting ringsight")?;
    let text = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
}

fn sleeper() -> Result<Guarded> {
    Guarded::start("sleep", Command::new("sleep").arg("600"), libc::SIGKILL)
}

/// Sequences of collectives that a collector saw, in order.
fn sequences(summary: &Summary) -> Vec<u64> {
    let mut sequences: Vec<u64> = summary
        .operations
        .iter()
        .filter(|op| op.name != "send_recv")
        .map(|op| op.sequence)
        .collect();
    sequences.sort_unstable();
    sequences
}

/// `sequences` has no gap, and ends where a run from `first` with `count` collectives ends.
fn ensure_tail(sequences: &[u64], last: u64) -> Result<()> {
    for pair in sequences.windows(2) {
        ensure!(
            pair[1] == pair[0] + 1,
            "collective {} is followed by {}",
            pair[0],
            pair[1]
        );
    }
    ensure!(
        sequences.last() == Some(&last),
        "the last collective is {last}, {:?} was seen last",
        sequences.last()
    );
    Ok(())
}

#[test]
fn a_process_that_is_gone_is_named() -> Result<()> {
    let mut process = sleeper()?;
    let pid = process.pid();
    process.end(Duration::from_secs(5))?;
    let (code, text) = attach(&[pid.to_string()])?;
    ensure!(code.is_some_and(|code| code != 0), "exit code {code:?}:\n{text}");
    ensure!(
        text.contains(&pid.to_string()),
        "the process is not named:\n{text}"
    );
    Ok(())
}

#[test]
fn a_process_without_the_library_is_named() -> Result<()> {
    let process = sleeper()?;
    let (code, text) = attach(&[process.pid().to_string()])?;
    ensure!(code.is_some_and(|code| code != 0), "exit code {code:?}:\n{text}");
    ensure!(
        text.contains(&process.pid().to_string()),
        "the process is not named:\n{text}"
    );
    ensure!(
        text.contains("libnccl") || text.contains("librar"),
        "what is missing is not named:\n{text}"
    );
    Ok(())
}

#[test]
fn a_process_of_somebody_else_is_refused_with_the_right_that_is_missing() -> Result<()> {
    const NAME: &str = "a_process_of_somebody_else_is_refused_with_the_right_that_is_missing";
    if !may_attach() {
        skip(NAME, "needs root, to become somebody else");
        return Ok(());
    }
    let _alone = alone();
    let folder = folder()?;
    let job = start(&job(2, 1, 0), folder.path())?;
    // Where anybody may run it from.
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
    let program = folder.path().join("ringsight");
    fs::copy(&artifacts().ringsight, &program)?;
    let output = Command::new("setpriv")
        .args([
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
            "--inh-caps=-all",
        ])
        .arg(&program)
        .args(["attach", &job.pids()[0].to_string()])
        .current_dir("/")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    ensure!(
        !output.status.success(),
        "a foreign process was attached to:\n{text}"
    );
    ensure!(
        text.contains(&job.pids()[0].to_string()),
        "the process is not named:\n{text}"
    );
    ensure!(
        ["CAP_", "capabilit", "permission", "Permission", "owner", "root"]
            .iter()
            .any(|word| text.contains(word)),
        "the missing right is not named:\n{text}"
    );
    Ok(())
}

#[test]
fn a_stripped_library_is_seen_like_any_other() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let library_folder = folder.path().join("stripped");
    fs::create_dir(&library_folder)?;
    let stripped = library_folder.join("libnccl.so.2");
    let status = Command::new("strip")
        .args(["--strip-all", "-o"])
        .arg(&stripped)
        .arg(artifacts().library_folder.join("libnccl.so.2"))
        .status()?;
    ensure!(status.success(), "strip failed");
    let stripped = Artifacts {
        library_folder,
        ..artifacts().clone()
    };
    let mut job = Job::start(&job(2, 20, 0), &stripped, &folder.path().join("job"))?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let summary = collector.finish(LIMIT)?;
    ensure!(
        sequences(&summary).len() == truths[0].collectives.len(),
        "{:?}",
        summary.operations.len()
    );
    ensure!(summary.lost == 0, "{} events were lost", summary.lost);
    Ok(())
}

#[test]
fn without_its_endpoint_a_collector_still_writes_its_files() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let [port] = ringsight_testbed::backend::free_ports()?;
    let file = folder.path().join("trace.jsonl");
    let options = [
        format!("--otlp=http://127.0.0.1:{port}"),
        format!("--out={}", file.display()),
    ];
    let mut job = start(&job(2, 20, 0), folder.path())?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let (_, text) = collector.outcome(LIMIT)?;
    ensure!(
        text.contains(&port.to_string()),
        "the endpoint is not named:\n{text}"
    );
    let traces = traces::by_trace(traces::read_lines(&file)?);
    let wanted = truths[0].collectives.len();
    let found = traces::whole_collectives(&traces, 2);
    ensure!(found == wanted, "{found} whole traces of {wanted} collectives");
    Ok(())
}

#[test]
fn a_full_disk_is_reported_and_other_outputs_go_on() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let (full, file) = (
        folder.path().join("full.jsonl"),
        folder.path().join("trace.jsonl"),
    );
    symlink("/dev/full", &full)?;
    let options = [&full, &file].map(|file| format!("--out={}", file.display()));
    let mut job = start(&job(2, 20, 0), folder.path())?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let (_, text) = collector.outcome(LIMIT)?;
    ensure!(text.contains("full.jsonl"), "the file is not named:\n{text}");
    ensure!(text.contains("No space left"), "the reason is not named:\n{text}");
    let traces = traces::by_trace(traces::read_lines(&file)?);
    let found = traces::whole_collectives(&traces, 2);
    ensure!(
        found == truths[0].collectives.len(),
        "{found} whole traces of {} collectives",
        truths[0].collectives.len()
    );
    Ok(())
}

#[test]
fn a_summary_that_finds_the_disk_full_goes_to_standard_output_and_drops_are_told() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let full = ["full.jsonl", "full.json"].map(|name| folder.path().join(name));
    for link in &full {
        symlink("/dev/full", link)?;
    }
    // Paced, so that it lasts longer than it is watched.
    let mut job = start(&job(2, 2_000, 5), folder.path())?;
    job.go()?;
    job.wait_step(10, LIMIT)?;
    let mut arguments: Vec<String> = job.pids().iter().map(u32::to_string).collect();
    arguments.extend([
        "--duration=1".to_owned(),
        format!("--out={}", full[0].display()),
        format!("--summary={}", full[1].display()),
    ]);
    let (code, text) = attach(&arguments)?;
    ensure!(code == Some(4), "exit code {code:?}:\n{text}");
    let json = text
        .lines()
        .find(|line| line.starts_with('{'))
        .with_context(|| format!("no summary on standard output:\n{text}"))?;
    let summary: Summary = serde_json::from_str(json)?;
    ensure!(!summary.operations.is_empty(), "nothing was watched");
    for words in ["full.json: No space left", "spans were dropped"] {
        ensure!(text.contains(words), "{words:?} is not said:\n{text}");
    }
    Ok(())
}

#[test]
fn a_scope_that_is_not_there_costs_no_file_its_content() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let job = start(&job(2, 20, 0), folder.path())?;
    let pid = job.pids()[0].to_string();
    let file = folder.path().join("trace.jsonl");
    fs::write(&file, "precious\n")?;
    let with = |options: &[&str]| {
        let mut arguments = vec![
            pid.clone(),
            "--force".to_owned(),
            format!("--out={}", file.display()),
        ];
        arguments.extend(options.iter().map(|option| (*option).to_owned()));
        attach(&arguments)
    };
    let (code, text) = with(&["--scope-env=NO_SUCH_VARIABLE"])?;
    ensure!(
        code == Some(2) && text.contains("NO_SUCH_VARIABLE"),
        "{code:?}:\n{text}"
    );
    let (code, text) = with(&["--summary=/no/such/folder/summary.json"])?;
    ensure!(
        code == Some(1) && text.contains("/no/such/folder"),
        "{code:?}:\n{text}"
    );
    ensure!(fs::read_to_string(&file)? == "precious\n", "the file was touched");
    // One that no list of known variables has: the job was started with it.
    let (code, text) = with(&["--scope-env=NCCL_SOCKET_IFNAME", "--duration=0.1"])?;
    ensure!(code == Some(0), "{code:?}:\n{text}");
    Ok(())
}

#[test]
fn a_killed_collectors_successor_goes_on_where_it_ended() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(&job(4, 80, 10), folder.path())?;
    let mut first = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    job.go()?;
    job.wait_step(20, LIMIT)?;
    first.signal(libc::SIGKILL);
    first.outcome(Duration::from_secs(10))?;
    // The job goes on alone for a while.
    job.wait_step(50, LIMIT)?;
    let mut second = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let summary = second.finish(LIMIT)?;
    let seen = sequences(&summary);
    let called = truths[0].collectives.len() as u64;
    let first_sequence = sequence_base(folder.path())?;
    ensure_tail(&seen, first_sequence + called - 1)?;
    // The first collector was killed within step 20 or soon after; what came then waited in the ring.
    ensure!(
        seen.len() as u64 > called / 2,
        "only {} of {called} collectives after the restart: nothing of the time between",
        seen.len()
    );
    // What the first one had taken in the turn in which it was killed is nowhere, and is told: a moment's events of the 30 steps.
    let received: u64 = summary.records.values().map(|events| events.received).sum();
    ensure!(
        summary.missed <= received / 50 && summary.lost == 0,
        "{} events missed, {} lost, of {received}: {:?}",
        summary.missed,
        summary.lost,
        summary.records
    );
    // Of the first few the killed one has read something; from then on every rank is there.
    for operation in summary
        .operations
        .iter()
        .filter(|op| op.name != "send_recv" && op.sequence > seen[0] + 8)
    {
        ensure!(
            operation.by_rank.len() == 4,
            "{} {}: ranks are missing",
            operation.name,
            operation.sequence
        );
        ensure!(
            operation.complete,
            "{} {} is incomplete",
            operation.name,
            operation.sequence
        );
    }
    Ok(())
}

/// The sequence of a communicator's first collective, from a job that is watched from its first on.
fn sequence_base(folder: &Path) -> Result<u64> {
    let mut job = start(&job(2, 1, 0), &folder.join("base"))?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &[], folder)?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    sequences(&collector.finish(LIMIT)?)
        .first()
        .copied()
        .context("no collective was seen")
}

#[test]
fn a_second_collector_is_refused_and_told_of_the_first() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(&job(2, 10, 0), folder.path())?;
    let mut first = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    let (code, text) = attach(&[job.pids()[0].to_string()])?;
    ensure!(code.is_some_and(|code| code != 0), "exit code {code:?}:\n{text}");
    ensure!(
        text.contains(&first.pid().to_string()),
        "the first collector ({}) is not named:\n{text}",
        first.pid()
    );
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let summary = first.finish(LIMIT)?;
    ensure!(
        sequences(&summary).len() == truths[0].collectives.len(),
        "the first one lost collectives"
    );
    ensure!(summary.lost == 0, "{} events were lost", summary.lost);
    Ok(())
}

#[test]
fn a_late_collector_sees_everything_from_then_on() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    // Long beside what attaching takes.
    let mut job = start(&job(4, 150, 10), folder.path())?;
    job.go()?;
    job.wait_step(20, LIMIT)?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let summary = collector.finish(LIMIT)?;
    let seen = sequences(&summary);
    let called = truths[0].collectives.len() as u64;
    ensure!(
        seen.len() as u64 > called / 4 && (seen.len() as u64) < called,
        "{} of {called}",
        seen.len()
    );
    ensure_tail(&seen, sequence_base(folder.path())? + called - 1)?;
    ensure!(
        summary
            .operations
            .iter()
            .all(|op| op.ranks == 4 || op.name == "send_recv"),
        "the communicator is unknown"
    );
    Ok(())
}

#[test]
fn a_killed_rank_does_not_take_the_collector_along() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let file = folder.path().join("trace.jsonl");
    let mut job = start(&job(4, 200, 10), folder.path())?;
    let options = [format!("--out={}", file.display())];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    job.wait_step(20, LIMIT)?;
    job.kill(3);
    // The others wait for it, or notice: either way they end with the job.
    let death = job.wait_done(Duration::from_secs(20), |_, _| ());
    ensure!(death.is_err(), "the job did not notice that a rank was killed");
    drop(job);
    let summary = collector.finish(LIMIT)?;
    ensure!(
        sequences(&summary).len() > 60,
        "only {} collectives were seen",
        sequences(&summary).len()
    );
    ensure!(!traces::read_lines(&file)?.is_empty(), "nothing was written");
    Ok(())
}

#[test]
fn a_collector_that_lets_go_leaves_the_code_as_it_was() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(&job(2, 40, 0), folder.path())?;
    let before = code_of(job.pids()[0])?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), &[], folder.path())?;
    // Or the comparison below would not show a thing.
    ensure!(
        !may_attach() || code_of(job.pids()[0])? != before,
        "attaching changed nothing in the library's code"
    );
    job.go()?;
    job.wait_step(10, LIMIT)?;
    let summary = collector.stop(LIMIT)?;
    ensure!(!summary.operations.is_empty(), "nothing was seen");
    ensure!(
        code_of(job.pids()[0])? == before,
        "the library's code differs after the collector let go"
    );
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    ensure!(
        summary.detach_ms <= 600.0,
        "letting go took {} ms",
        summary.detach_ms
    );
    Ok(())
}

/// The library's code in the memory of a process.
fn code_of(pid: u32) -> Result<Vec<u8>> {
    use std::io::{Read, Seek, SeekFrom};
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let line = maps
        .lines()
        .find(|line| line.contains(" r-xp ") && line.ends_with("libnccl.so.2"))
        .context("the process has no code of libnccl.so.2")?;
    let (start, end) = line
        .split(' ')
        .next()
        .and_then(|range| range.split_once('-'))
        .context("maps")?;
    let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
    let mut memory = fs::File::open(format!("/proc/{pid}/mem"))?;
    memory.seek(SeekFrom::Start(start))?;
    let mut code = vec![0; usize::try_from(end - start)?];
    memory.read_exact(&mut code)?;
    Ok(code)
}
