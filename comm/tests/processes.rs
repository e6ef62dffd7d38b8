//! Ranks as processes: on one node over shared memory, on two over sockets.

mod common;

use std::env;

use common::{
    processes::{run_processes, run_processes_with},
    variables::FOLDER,
};

#[test]
fn one_node() {
    run_processes("processes::collectives", 2, 1);
    run_processes("processes::collectives", 4, 1);
}

#[test]
fn two_nodes() {
    run_processes("processes::collectives", 2, 2);
    run_processes("processes::collectives", 4, 2);
}

/// Each rank checks that the previous one calls the same operation, also where it receives nothing from it. So a rank
/// that has all it asked for still owes that to the next one, and must not leave before.
#[test]
fn a_rank_that_is_done_first_does_not_leave_the_next_one_in_doubt() {
    let folder = env::temp_dir().join(format!("ringsight-first-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    run_processes_with(
        "processes::first_to_leave",
        3,
        3,
        &[(FOLDER, folder.to_str().unwrap())],
    );
    std::fs::remove_dir_all(folder).unwrap();
}
