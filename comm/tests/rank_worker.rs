//! The program whose bodies the other tests run.

mod common;

use std::process::Command;

use common::processes::{text, worker};

fn run(arguments: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_rank-worker"))
        .args(arguments)
        .output()
        .unwrap();
    (output.status.code(), text(&output))
}

#[test]
fn an_unknown_body_is_refused_with_the_nearest_name() {
    let (code, text) = run(&["forks::refuse"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("no body forks::refuse; the nearest name is forks::refused;"),
        "{text}"
    );
    assert_eq!(run(&[]).0, Some(2));
}

#[test]
#[should_panic(expected = "the nearest name is forks::refused;")]
fn a_test_that_misspells_a_body_fails_before_anything_starts() {
    worker("forks::refusd");
}

#[test]
fn names_are_listed_once() {
    let (code, text) = run(&["--list"]);
    let mut names: Vec<&str> = text.lines().collect();
    assert!(code == Some(0) && names.contains(&"forks::refused"), "{text}");
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "{text}");
}
