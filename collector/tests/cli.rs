//! The command as its users meet it, where no process can be attached to.

use std::process::{Command, Output};

fn ringsight(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringsight"))
        .args(arguments)
        .env_remove("OTEL_EXPORTER_OTLP_ENDPOINT")
        .env_remove("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        .env_remove("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT")
        .env_remove("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT")
        .output()
        .expect("the command runs")
}

/// Exit code and what it said to standard error.
fn failure(arguments: &[&str]) -> (i32, String) {
    let output = ringsight(arguments);
    (
        output.status.code().unwrap_or(-1),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    )
}

/// A process that ended, and was waited for: nobody has its number for a while.
fn gone() -> String {
    let mut child = Command::new("true").spawn().expect("`true` runs");
    child.wait().expect("it ends");
    child.id().to_string()
}

#[test]
fn a_process_that_is_gone() {
    let pid = gone();
    let (code, text) = failure(&["attach", &pid]);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains(&format!("process {pid} does not exist")), "{text}");
    let (code, text) = failure(&["list", &pid]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains(&pid), "{text}");
}

#[test]
fn a_process_without_a_library() {
    let own = std::process::id().to_string();
    let (code, text) = failure(&["attach", &own]);
    assert_eq!(code, 3, "{text}");
    assert!(text.contains("has no communication library"), "{text}");
}

#[test]
fn nothing_attached_makes_no_ready_file() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready.json");
    let (code, _) = failure(&["attach", &gone(), "--ready-file", ready.to_str().unwrap()]);
    assert_eq!(code, 3);
    assert!(!ready.exists());
}

#[test]
fn usage_errors_name_what_is_wrong() {
    for (arguments, words) in [
        (&["attach"][..], "<PID>"),
        (&["attach", "x"], "invalid value 'x'"),
        (&["attach", "1", "--out", "trace.txt"], ".jsonl"),
        (&["attach", "1", "--duration", "-1"], "'-1'"),
        (&["attach", "1", "--lag-threshold", "soon"], "--lag-threshold"),
        (&["attach", "1", "--otlp-protocol", "smoke"], "http/protobuf"),
        (
            &["attach", "1", "--scope", "a", "--scope-env", "B"],
            "cannot be used with",
        ),
        (&["completions", "tcl"], "bash"),
    ] {
        let (code, text) = failure(arguments);
        assert_eq!(code, 2, "{arguments:?}: {text}");
        assert!(text.contains(words), "{arguments:?}: {text}");
    }
}

#[test]
fn an_output_that_cannot_be_opened_is_told_before_anything_is_attached() {
    for arguments in [
        &["attach", "1", "--out", "/no/such/folder/trace.json"][..],
        &["attach", "1", "--otlp", "ftp://localhost"],
        &["attach", "1", "--otlp-protocol", "grpc"],
    ] {
        let (code, text) = failure(arguments);
        assert_eq!(code, 1, "{arguments:?}: {text}");
        assert!(!text.contains("process 1"), "{arguments:?}: {text}");
    }
}

#[test]
fn version_and_completions() {
    let version = ringsight(&["--version"]);
    assert!(version.status.success());
    assert_eq!(
        String::from_utf8_lossy(&version.stdout),
        format!("ringsight {}\n", env!("CARGO_PKG_VERSION"))
    );
    for (shell, word) in [
        ("bash", "complete -F _ringsight"),
        ("zsh", "#compdef ringsight"),
        ("fish", "complete -c ringsight"),
    ] {
        let script = ringsight(&["completions", shell]);
        assert!(script.status.success());
        assert!(String::from_utf8_lossy(&script.stdout).contains(word), "{shell}");
    }
}

/// What `ringsight list` of a process that is gone says to standard error with these variables, and its exit code.
fn diagnostics(variables: &[(&str, &str)]) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_ringsight"))
        .args(["list", &gone()])
        .env_remove("RINGSIGHT_LOG")
        .env_remove("RINGSIGHT_LOG_FORMAT")
        .envs(variables.iter().copied())
        .output()
        .expect("the command runs");
    assert_eq!(output.stdout, b"", "diagnostics are no results");
    (
        output.status.code().unwrap_or(-1),
        String::from_utf8(output.stderr).expect("UTF-8"),
    )
}

#[test]
fn diagnostics_are_lines_for_people_or_json() {
    let (code, text) = diagnostics(&[]);
    assert_eq!(code, 1);
    assert!(
        text.starts_with("ringsight: process ") && text.lines().count() == 1,
        "{text}"
    );

    let (code, json) = diagnostics(&[("RINGSIGHT_LOG_FORMAT", "json")]);
    assert_eq!(code, 1);
    let event: serde_json::Value = serde_json::from_str(&json).expect("one line of JSON");
    assert_eq!(event["level"], "ERROR", "{json}");
    let message = event["message"].as_str().unwrap();
    assert_eq!(
        message.split(' ').nth(1).unwrap(),
        event["pid"].to_string(),
        "{json}"
    );
    assert!(message.contains("does not exist"), "{json}");
}

#[test]
fn diagnostics_are_of_the_levels_that_are_asked_for() {
    assert_eq!(diagnostics(&[("RINGSIGHT_LOG", "off")]), (1, String::new()));
    assert_eq!(diagnostics(&[("RINGSIGHT_LOG", "ringsight=off,warn")]).1, "");
    for variable in ["RINGSIGHT_LOG", "RINGSIGHT_LOG_FORMAT"] {
        let (code, text) = diagnostics(&[(variable, "x=loud")]);
        assert_eq!(code, 2, "{text}");
        assert!(
            text.starts_with(&format!("ringsight: {variable} (x=loud)")),
            "{text}"
        );
    }
}
