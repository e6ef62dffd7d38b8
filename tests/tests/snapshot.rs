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
    let prefix = folder.path().join("dumps/rank_");
    let prefix = prefix.to_str().context("path")?;
    snapshot(&pids, &["--dump-json", prefix])?;
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
    // The last collective that all others are in is not among those of the rank that is stopped, or it has not begun.
    let dumps = (0..4)
        .map(|rank| -> Result<Value> {
            Ok(serde_json::from_str(&std::fs::read_to_string(format!(
                "{prefix}{rank}"
            ))?)?)
        })
        .collect::<Result<Vec<_>>>()?;
    let state = |rank: usize, operation: &Value| -> Option<Value> {
        let entries = dumps[rank]["entries"].as_array()?;
        let same = |key: &str, entry: &&Value| entry[key] == operation[key];
        let entry = entries
            .iter()
            .find(|entry| same("collective_seq_id", entry) && same("process_group", entry))?;
        Some(entry["state"].clone())
    };
    let entries = dumps[0]["entries"].as_array().context("entries")?;
    let hung: Vec<&Value> = entries
        .iter()
        .filter(|entry| entry["state"] == "started")
        .collect();
    ensure!(!hung.is_empty(), "{:#}", dumps[0]);
    for operation in hung {
        ensure!(
            state(2, operation).is_none_or(|state| state != "completed"),
            "{operation:#}"
        );
    }
    ensure!(dumps.iter().all(|dump| dump["version"] == "2.10"));

    // With one process looked at the others are not known.
    let alone = snapshot(&pids[..1], &[]).unwrap_or_default();
    ensure!(alone.contains("4 ranks, 1 looked at"), "{alone}");
    Ok(())
}
