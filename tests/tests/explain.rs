//! `ringsight explain` on a running job: the library's table says what the library did.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use ringsight_tests::{LIMIT, alone, artifacts, folder, under_way};
use serde_json::{Value, json};

fn explain(arguments: &[&str]) -> Result<String> {
    explain_with(arguments, &[])
}

fn explain_with(arguments: &[&str], variables: &[(&str, &str)]) -> Result<String> {
    let output = Command::new(&artifacts().ringsight)
        .arg("explain")
        .args(arguments)
        .envs(variables.iter().copied())
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
    let mut job = under_way(folder.path())?;
    let pids = job.pids();
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
        ensure!(
            explained["apart"]
                .as_str()
                .is_some_and(|apart| apart.starts_with("they are on ")),
            "{explained:#}"
        );
        ensure!(explained["done"]["times"].as_u64() >= Some(1), "{explained:#}");
    }
    ensure!(text.contains("all_reduce of") && text.contains("  * "), "{text}");
    ensure!(
        text.contains("ranks do not reach each other's memory: they are on "),
        "{text}"
    );
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

#[test]
fn the_environment_leaves_ways_out() -> Result<()> {
    let library = artifacts().library_folder.join("libnccl.so.2");
    let library = library.to_str().context("a path that is no text")?;
    let told = |function: &str, variables: &[(&str, &str)]| {
        let on = ["--on", "peers", "--ranks", "2", "--bytes", "4K"];
        explain_with(
            &[&["--library", library, "--op", function], &on[..]].concat(),
            variables,
        )
    };
    let taken = |told: &str| {
        let row = told.lines().find(|line| line.starts_with("  * "));
        row.and_then(|row| row.split_whitespace().nth(1))
            .map(str::to_owned)
    };
    let way = |function: &str, variables: &[(&str, &str)]| anyhow::Ok(taken(&told(function, variables)?));
    let is = |way: Option<String>, expected: &str| way.as_deref() == Some(expected);
    ensure!(is(way("all_reduce", &[])?, "one_shot/ll"));
    let only = [("RINGSIGHT_ALGO", "^one_shot;allgather:ring")];
    ensure!(is(way("all_reduce", &only)?, "two_shot/ll128"));
    ensure!(is(way("all_gather", &only)?, "ring/simple"));
    ensure!(
        told("all_reduce", &only)?.contains("not taken: RINGSIGHT_ALGO or RINGSIGHT_PROTO leaves it out")
    );
    ensure!(way("all_gather", &[("RINGSIGHT_PROTO", "ll")])?.is_none());
    let wrong = told("all_reduce", &[("RINGSIGHT_PROTO", "^ll,tree")]);
    let wrong = wrong.err().context("a name that nothing has")?.to_string();
    ensure!(
        wrong.contains("RINGSIGHT_PROTO=^ll,tree: tree is none of ll, ll128, simple, push, ce"),
        "{wrong}"
    );
    Ok(())
}

/// Spans do not say by which policy: copy engines that did something short were to do all.
#[test]
fn what_copy_engines_did_is_what_the_table_says() -> Result<()> {
    let library = artifacts().library_folder.join("libnccl.so.2");
    let library = library.to_str().context("a path that is no text")?;
    let attribute = |key: &str, value: Value| json!({"key": key, "value": value});
    let text = |key: &str, value: &str| attribute(key, json!({"stringValue": value}));
    let number = |key: &str, value: u64| attribute(key, json!({"intValue": value}));
    let of = |bytes: u64| {
        json!({"attributes": [
            text("ccl.operation.name", "all_gather"),
            number("ccl.message.size", bytes),
            number("ccl.communicator.size", 2),
            text("ccl.data_type", "float32"),
            text("ccl.algorithm", "direct"),
            text("ccl.protocol", "ce"),
            number("ccl.channel.count", 1),
        ]})
    };
    let line = json!({"resourceSpans": [{"scopeSpans": [{"spans": [of(1 << 16), of(1 << 30)]}]}]});
    let folder = folder()?;
    let file = folder.path().join("spans.jsonl");
    std::fs::write(&file, line.to_string())?;
    let file = file.to_str().context("a path that is no text")?;
    let told = explain(&["--json", "--library", library, "--spans", file])?;
    let told: Value = serde_json::from_str(&told)?;
    let all = told.as_array().context("operations")?;
    ensure!(
        all.len() == 2 && all.iter().all(|one| one["agrees"] == true),
        "{told:#}"
    );
    Ok(())
}
