//! Children of ranks that are processes, one of which may be dead.

use crate::common::processes::{run_processes, run_processes_with};

#[test]
fn children_in_processes_of_two_nodes() {
    for share in ["0", "1"] {
        run_processes_with(
            "children::splits",
            4,
            2,
            &[("NCCL_COMM_SPLIT_SHARE_RESOURCES", share)],
        );
    }
}

#[test]
fn a_dead_rank_is_excluded() {
    for nodes in [1, 2] {
        run_processes("children::survivor", 4, nodes);
    }
}
