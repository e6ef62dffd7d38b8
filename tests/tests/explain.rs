//! `ringsight explain` on a running job: the library's table says what the library did.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, start};
use serde_json::Value;

fn explain(arguments: &[&str]) -> Result<String> {
    let output = Command::new(&artifacts().ringsight)
        .arg("explain")
        .args(arguments)
        .output()?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {error}", output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// Whether one row is taken, and every other says why it is not.
fn check(explained: &Value) -> Result<()> {
    let rows = explained["rows"].as_array().context("rows")?;
    let taken = rows.iter().filter(|row| row["chosen"] == true).count();
    ensure!(taken == 1, "{explained:#}");
    for row in rows {
        let says_why = row["reason"].as_str().is_some_and(|reason| !reason.is_empty());
        ensure!(says_why == (row["chosen"] == false), "{row:#}");
    }
    Ok(())
}

#[test]
fn the_table_says_what_a_running_job_does() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let mut job = start(&job(4, 100_000, 0), folder.path())?;
    let pids = job.pids();
    job.go()?;
    job.wait_step(20, LIMIT)?;
    // The library that the job runs, unless others could have changed the file.
    let library = artifacts().library_folder.join("libnccl.so.2");
    let library = library.to_str().context("a path that is no text")?;
    let pid = pids[0].to_string();
    let told: Value = serde_json::from_str(&explain(&[&pid, "--json", "--library", library])?)?;
    let text = explain(&[&pid, "--library", library])?;
    let all = told.as_array().context("an array")?;
    ensure!(!all.is_empty(), "nothing is described");
    for explained in all {
        check(explained)?;
        ensure!(explained["agrees"] == true, "{explained:#}");
        ensure!(explained["ranks"].as_u64() >= Some(2), "{explained:#}");
        ensure!(explained["done"]["times"].as_u64() >= Some(1), "{explained:#}");
    }
    ensure!(text.contains("all_reduce of") && text.contains("  * "), "{text}");
    job.wait_step(30, LIMIT)
}

#[test]
fn an_operation_need_not_exist() -> Result<()> {
    let library = artifacts().library_folder.join("libnccl.so.2");
    let library = library.to_str().context("a path that is no text")?;
    for operation in ["all_reduce", "all_gather", "alltoall", "send"] {
        for on in ["peers", "gpus", "host"] {
            let told = explain(&[
                "--json",
                "--library",
                library,
                "--op",
                operation,
                "--on",
                on,
                "--bytes",
                "64K",
            ])?;
            let told: Value = serde_json::from_str(&told)?;
            check(&told[0])?;
        }
    }
    Ok(())
}
