//! A library that is not ours: its callers' calls become spans that say that they were timed on the host.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use ringsight_testbed::{demo::collector::Collector, process, process::Guarded};
use ringsight_tests::{LIMIT, alone, artifacts, folder, may_attach, skip};
use serde_json::Value;

/// Compiles a C source of this repository.
fn compile(source: &str, output: &Path, options: &[&str]) -> Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    process::run(
        Command::new("gcc")
            .arg("-O1")
            .arg(root.join(source))
            .arg("-o")
            .arg(output)
            .args(options),
    )
}

/// The spans of a file of OTLP JSON lines, as they stand there.
fn spans(file: &Path) -> Result<Vec<Value>> {
    let mut spans = Vec::new();
    for line in fs::read_to_string(file)?.lines() {
        let line: Value = serde_json::from_str(line)?;
        for resource in line["resourceSpans"].as_array().into_iter().flatten() {
            for scope in resource["scopeSpans"].as_array().into_iter().flatten() {
                spans.extend(scope["spans"].as_array().into_iter().flatten().cloned());
            }
        }
    }
    Ok(spans)
}

/// An attribute as text, whatever its type.
fn attribute(span: &Value, key: &str) -> Option<String> {
    let attributes = span["attributes"].as_array()?;
    let value = &attributes.iter().find(|attribute| attribute["key"] == key)?["value"];
    let value = value.as_object()?.values().next()?;
    Some(value.as_str().map_or_else(|| value.to_string(), str::to_owned))
}

fn trace_of(span: &Value) -> &str {
    span["traceId"].as_str().unwrap_or_default()
}

#[test]
fn calls_of_a_stock_library_become_host_timed_spans() -> Result<()> {
    if !may_attach() {
        skip(
            "calls_of_a_stock_library_become_host_timed_spans",
            "needs root, to attach",
        );
        return Ok(());
    }
    let _alone = alone();
    let folder = folder()?;
    let (library, program) = (folder.path().join("libnccl.so.2"), folder.path().join("job"));
    let own_folder = folder.path().to_str().context("a folder with a name in UTF-8")?;
    compile(
        "probes/tests/common/libnccl.c",
        &library,
        &["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2"],
    )?;
    compile(
        "tests/tests/stock.c",
        &program,
        &["-L", own_folder, "-l:libnccl.so.2", "-Wl,-rpath", own_folder],
    )?;
    let mut command = Command::new(&program);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut job = Guarded::start("job", &mut command, libc::SIGKILL)?;
    let mut said = BufReader::new(
        job.child()
            .stdout
            .take()
            .context("standard output is not piped")?,
    )
    .lines();
    let mut input = job.child().stdin.take().context("standard input is not piped")?;
    ensure!(said.next().transpose()?.as_deref() == Some("ready"));

    let output = folder.path().join("trace.jsonl");
    let options = ["--out".to_owned(), output.display().to_string()];
    let mut collector = Collector::attach(artifacts(), &[job.pid()], &options, folder.path())?;
    ensure!(
        collector.log().contains("host-timed"),
        "the log does not say what can be seen:\n{}",
        collector.log()
    );
    input.write_all(b"g")?;
    ensure!(said.next().transpose()?.as_deref() == Some("done"));
    let summary = collector.stop(LIMIT)?;
    drop(input);
    job.wait(Duration::from_secs(10))?;

    ensure!(summary.lost == 0, "{} events were lost", summary.lost);
    let spans = spans(&output)?;
    let named = |name: &str| {
        spans
            .iter()
            .filter(|span| span["name"] == name)
            .collect::<Vec<_>>()
    };
    let reduces = named("all_reduce");
    let counts: Vec<_> = reduces
        .iter()
        .filter_map(|span| attribute(span, "ccl.message.count"))
        .collect();
    let expected: Vec<_> = (1..=20).map(|i| (1000 * i).to_string()).collect();
    ensure!(counts == expected, "all_reduce of {counts:?}");
    for span in &spans {
        ensure!(
            attribute(span, "ccl.timing.source").as_deref() == Some("host"),
            "{span}"
        );
        ensure!(
            attribute(span, "ccl.system.version").as_deref() == Some("2.27.3"),
            "{span}"
        );
    }
    let first = reduces[0];
    for (key, value) in [
        ("ccl.data_type", "float32"),
        ("ccl.message.size", "4000"),
        ("ccl.reduction", "max"),
        ("ccl.communicator.handle", "0x4d"),
    ] {
        ensure!(attribute(first, key).as_deref() == Some(value), "{key}: {first}");
    }
    let broadcast = named("broadcast");
    ensure!(
        broadcast.len() == 1 && attribute(broadcast[0], "ccl.root_rank").as_deref() == Some("5"),
        "{broadcast:?}"
    );
    ensure!(
        broadcast[0]["status"]["message"]
            .as_str()
            .is_some_and(|text| text.contains("ncclResult_t 4")),
        "a call that failed does not say so: {}",
        broadcast[0]
    );
    let (sends, groups) = (named("send"), named("group"));
    let group = groups
        .iter()
        .find(|group| attribute(group, "ccl.group.operations").as_deref() == Some("2"))
        .context("no group of two operations")?;
    let links: Vec<_> = group["links"]
        .as_array()
        .into_iter()
        .flatten()
        .map(trace_of)
        .collect();
    let members: Vec<_> = sends.iter().map(|span| trace_of(span)).collect();
    ensure!(
        links == members && members.len() == 2,
        "{links:?} are not {members:?}"
    );
    for send in sends {
        let back = send["links"]
            .as_array()
            .into_iter()
            .flatten()
            .map(trace_of)
            .next();
        ensure!(back == Some(trace_of(group)), "{send}");
    }
    Ok(())
}
