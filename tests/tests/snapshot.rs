//! `ringsight snapshot` names the rank that the others wait for, and touches nobody.

use std::{process::Command, thread, time::Duration};

use anyhow::{Context, Result, ensure};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, start};
use serde_json::Value;

fn signal(pid: u32, name: &str) -> Result<()> {
    let status = Command::new("kill").args([name, &pid.to_string()]).status()?;
    ensure!(status.success(), "kill {name} {pid}: {status}");
    Ok(())
}

fn snapshot(pids: &[u32], options: &[&str]) -> Result<String> {
    let output = Command::new(&artifacts().ringsight)
        .arg("snapshot")
        .args(pids.iter().map(u32::to_string))
        .args(options)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn a_stopped_rank_is_who_the_others_wait_for() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(&job(4, 100_000, 0), folder.path())?;
    let pids = job.pids();
    job.go()?;
    job.wait_step(20, LIMIT)?;
    signal(pids[2], "-STOP")?;
    thread::sleep(Duration::from_secs(1));
    let taken: Value = serde_json::from_str(&snapshot(&pids, &["--json"])?)?;
    let text = snapshot(&pids, &[])?;
    signal(pids[2], "-CONT")?;
    // It goes on as if nothing had been.
    job.wait_step(40, LIMIT)?;

    let groups = taken["communicators"].as_array().context("communicators")?;
    let operations: Vec<&Value> = groups
        .iter()
        .flat_map(|group| group["operations"].as_array().into_iter().flatten())
        .collect();
    ensure!(!operations.is_empty(), "nothing on its way: {taken:#}");
    for operation in &operations {
        let awaited = operation["awaited"].as_array().context("awaited")?;
        ensure!(awaited.first() == Some(&Value::from(2)), "{operation:#}");
        ensure!(
            operation["oldest_ns"].as_u64() > Some(900_000_000),
            "{operation:#}"
        );
    }
    ensure!(
        text.contains("waits for rank 2") && text.contains(&format!("process {}, process stopped", pids[2])),
        "{text}"
    );
    // With one process looked at the others are not known.
    let alone = snapshot(&pids[..1], &[]).unwrap_or_default();
    ensure!(alone.contains("4 ranks, 1 looked at"), "{alone}");
    Ok(())
}
