//! The demo in a guest, from outside (`cargo xtask demo --vm`): a port goes down in the middle of an all_reduce.

use std::{
    io::Write as _,
    net::ToSocketAddrs as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use fs_err as fs;
use serde_json::{Value, json};

use super::{
    Arguments, OUTPUTS, failover_trace,
    guest::{FILE, FILE_END},
};
use crate::{
    backend, process,
    vm::{Guest, Series},
    workspace::Artifacts,
};

/// How long it may take: ten times and more of what it takes on an idle machine.
const LIMIT: Duration = Duration::from_secs(400);
/// Training steps: as many as take some seconds there.
const STEPS: &str = "12";

/// Runs the demo in a guest. With `--check` the last line is a report in JSON.
///
/// # Errors
/// If the guest cannot be made, or the job fails in it.
pub fn run(arguments: &Arguments, artifacts: &Artifacts) -> Result<bool> {
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| artifacts.target.join("demo-vm"));
    traces(artifacts, Series::V6_1, &out, &mut |line| println!("{line}"))?;
    let spans = failover_trace::read(&out.join("trace.jsonl"))?;
    let (lines, problems) = failover_trace::look(&spans);
    println!();
    lines.iter().for_each(|line| println!("{line}"));
    for name in OUTPUTS {
        println!("open      {}", out.join(name).display());
    }
    if let Some(url) = &arguments.otlp {
        send(url, &out.join("trace.jsonl"))?;
        println!("sent to   {url}");
    }
    if !arguments.check {
        return Ok(true);
    }
    for problem in &problems {
        println!("problem   {problem}");
    }
    println!(
        "{}",
        json!({"ok": problems.is_empty(), "problems": problems, "spans": spans.len()})
    );
    Ok(problems.is_empty())
}

/// Runs the job in a guest, gives what it prints to `say` and puts the collector's files into `out`.
///
/// # Errors
/// As the guest's.
pub fn traces(artifacts: &Artifacts, series: Series, out: &Path, say: &mut dyn FnMut(&str)) -> Result<()> {
    fs::create_dir_all(out)?;
    let mut guest = Guest::new(series, Vec::new());
    guest.rdma = 2;
    guest.memory = 1024;
    guest.limit = LIMIT;
    guest.add(&artifacts.ringsight)?;
    let library = artifacts.library_folder.join("libnccl.so.2");
    guest.files.push((library, "/test/lib/libnccl.so.2".to_owned()));
    let program = guest.add(&artifacts.xtask)?;
    guest.program = [&program, "demo-guest", "--steps", STEPS, "--seed", "7"]
        .map(str::to_owned)
        .to_vec();
    let (output, ended) = guest.output();
    let ended = ended?;
    let files = unpack(&output, say);
    ensure!(
        ended.code == 0,
        "the demo in the guest ended with {}:\n{output}",
        ended.code
    );
    if let Some(text) = ended.warning_text() {
        bail!("the guest's kernel warned {} times:\n{text}", ended.warnings);
    }
    for name in OUTPUTS {
        let (_, packed) = files
            .iter()
            .find(|(known, _)| known == name)
            .with_context(|| format!("the guest gave no {name}"))?;
        write(&out.join(name), packed)?;
    }
    Ok(())
}

/// The files in what a guest printed, by name, in base64; the other lines are said.
fn unpack(output: &str, say: &mut dyn FnMut(&str)) -> Vec<(String, String)> {
    let mut files: Vec<(String, String)> = Vec::new();
    let mut is_file = false;
    for line in output.lines().map(str::trim_end) {
        match (line.strip_prefix(FILE), files.last_mut()) {
            (Some(name), _) => {
                files.push((name.to_owned(), String::new()));
                is_file = true;
            }
            (None, Some(_)) if line == FILE_END => is_file = false,
            (None, Some((_, packed))) if is_file => {
                packed.push_str(line);
                packed.push('\n');
            }
            _ => say(line),
        }
    }
    files
}

/// Unpacks base64 of gzip into a file.
fn write(file: &Path, packed: &str) -> Result<()> {
    let target = fs::File::create(file)?.into_file();
    let mut child = Command::new("sh")
        .args(["-c", "base64 -d | gzip -d"])
        .stdin(Stdio::piped())
        .stdout(target)
        .spawn()
        .context("starting base64 and gzip")?;
    let mut input = child.stdin.take().context("no standard input")?;
    input.write_all(packed.as_bytes())?;
    drop(input);
    let status = child.wait()?;
    ensure!(
        status.success(),
        "{} arrived damaged: {}",
        file.display(),
        process::reason(status)
    );
    Ok(())
}

/// Sends a file of OTLP JSON lines to a backend's HTTP port.
fn send(url: &str, file: &PathBuf) -> Result<()> {
    let place = url
        .strip_prefix("http://")
        .with_context(|| format!("{url} is no http:// address"))?;
    let address = place
        .trim_end_matches('/')
        .to_socket_addrs()
        .with_context(|| format!("{url}: HOST:PORT is wanted"))?
        .next()
        .with_context(|| format!("{url} has no address"))?;
    for line in fs::read_to_string(file)?.lines() {
        let what = serde_json::from_str::<Value>(line)?;
        let path = match what.get("resourceSpans") {
            Some(_) => "/v1/traces",
            None => continue,
        };
        backend::post(address, path, line).with_context(|| {
            format!("{url} (with --vm it is the backend's port for OTLP over HTTP, 4318)")
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_told_from_lines() {
        let mut said = Vec::new();
        let files = unpack(
            "a\n@@file x\nAAA\r\nBBB\n@@end\nb\n@@file y\n@@end\n@@end\n",
            &mut |line| {
                said.push(line.to_owned());
            },
        );
        assert_eq!(
            files,
            [
                ("x".to_owned(), "AAA\nBBB\n".to_owned()),
                ("y".to_owned(), String::new())
            ]
        );
        assert_eq!(said, ["a", "b"]);
    }
}
