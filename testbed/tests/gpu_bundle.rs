//! `run.sh` of a GPU bundle on a machine without a GPU: what cannot run is skipped by name, and what can is run.

use std::{
    path::Path,
    process::{Command, Output},
};

use fs_err as fs;

use ringsight_testbed::{gpu::bundle, workspace};
use serde_json::Value;

/// A bundle whose library is a few lines of C, in a folder of its own.
struct Bundle(tempfile::TempDir);

impl Bundle {
    fn new(name: &str, library: &str) -> Self {
        // A blank in its name, which is no matter.
        let bundle = tempfile::Builder::new()
            .prefix(&format!("gpu bundle {name} "))
            .tempdir()
            .unwrap();
        let folder = bundle.path();
        for part in ["bin", "lib", "path"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        bundle::copy_scripts(&workspace::root().join("tests/gpu"), folder).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_gpu-run"), folder.join("bin/gpu-run")).unwrap();
        let source = folder.join("library.c");
        fs::write(&source, library).unwrap();
        let compiled = Command::new("gcc")
            .args(["-shared", "-fPIC", "-o"])
            .arg(folder.join("lib/libnccl.so.2"))
            .arg(&source)
            .status()
            .unwrap();
        assert!(compiled.success());
        Self(bundle)
    }

    /// Runs it where no other program is to be found: no nvidia-smi, no Python, no nm.
    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(self.0.path().join("run.sh"))
            .args(arguments)
            .env("PATH", self.0.path().join("path"))
            .current_dir("/")
            .output()
            .unwrap()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8_lossy(&output.stderr)
}

/// The line of JSON at the end.
fn summary(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    serde_json::from_str(text.lines().last().unwrap_or_default()).unwrap_or_else(|_| panic!("{text}"))
}

fn names(value: &Value) -> Vec<&str> {
    value
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect()
}

const WORKS: &str = "int ncclGetVersion(int* version) { *version = 22809; return 0; }";

#[test]
fn what_needs_a_gpu_is_skipped_by_name() {
    let bundle = Bundle::new("skips", WORKS);
    let output = bundle.run(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let summary = summary(&output);
    assert_eq!(summary["ok"], true);
    assert_eq!(summary["failed"], 0);
    let skipped = names(&summary["skipped_steps"]);
    for part in [
        "check",
        "graph",
        "abort",
        "watch",
        "torch",
        "training",
        "nccl-tests",
        "perf",
        "symm",
        "sanitizer",
        "sanitizer-4",
        "pause",
    ] {
        assert!(skipped.contains(&part), "{part}: {skipped:?}");
        let line = said(&output);
        let line = line
            .lines()
            .find(|line| line.starts_with(&format!("{part} ")))
            .unwrap();
        assert!(line.contains("skipped") && line.contains("no GPU"), "{line}");
    }
    // What needs none is run.
    let report = fs::read_to_string(bundle.0.path().join("out/report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    let library = report["rows"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["part"] == "env" && row["step"] == "library")
        .unwrap();
    assert_eq!(library["result"], "passed");
    assert!(library["detail"].as_str().unwrap().contains("22809"), "{library}");
}

#[test]
fn a_library_that_does_not_load_fails() {
    let bundle = Bundle::new("fails", "int something_else;");
    let out = bundle.0.path().join("elsewhere");
    let output = bundle.run(&["--out", out.to_str().unwrap(), "env"]);
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    let summary = summary(&output);
    assert_eq!(summary["ok"], false);
    assert_eq!(names(&summary["failed_steps"]), ["env/library"]);
    assert!(said(&output).contains("ncclGetVersion"), "{}", said(&output));
    assert!(out.join("report.json").is_file());
    assert!(!Path::new(&bundle.0.path().join("out")).exists());
}

#[test]
fn parts_are_listed_and_an_unknown_one_is_refused() {
    let bundle = Bundle::new("lists", WORKS);
    let output = bundle.run(&["--list"]);
    assert_eq!(output.status.code(), Some(0));
    let listed = said(&output);
    assert!(
        listed.lines().any(|line| line.starts_with("nccl-tests ")),
        "{listed}"
    );
    let output = bundle.run(&["env", "benhc"]);
    assert_eq!(output.status.code(), Some(2));
    let refused = said(&output);
    assert!(
        refused.contains("benhc") && refused.contains("nccl-tests"),
        "{refused}"
    );
    assert!(!bundle.0.path().join("out").exists(), "nothing was run");
}
