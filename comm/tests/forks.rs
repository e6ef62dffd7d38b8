//! A forked child has none of its parent's threads: what it does with its parent's communicators is refused and harms
//! neither of them, and communicators that it makes itself work.

mod common;

use common::processes::{alone, alone_on_host};

#[test]
fn calls_of_a_forked_child_are_refused() {
    alone_on_host("forks::refused", &[]);
}

#[test]
fn a_forked_child_does_not_end_its_parents_group() {
    alone_on_host("forks::group", &[]);
}

/// Nobody had looked for forks yet: there was no communicator, and no root.
#[test]
fn a_child_that_was_forked_below_the_log_says_what_it_has_to_say() {
    let text = alone("forks::logged", |command| {
        command.env("RINGSIGHT_DEVICE", "host").env("NCCL_DEBUG", "WARN");
    });
    let said = text.lines().filter(|line| line.contains("ncclGetUniqueId"));
    assert_eq!(said.count(), 2, "{text}");
}
