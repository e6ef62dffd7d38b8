//! Ranks as processes.

use super::ranks::turn;
use crate::common::processes::{outputs, start_processes, text};

#[test]
fn ranks_may_be_processes_and_a_killed_one_is_named() {
    let _turn = turn();
    let processes = start_processes("transport::ring", 4, 2, &[]);
    for (rank, output) in outputs(processes).iter().enumerate() {
        let is_killed = rank == 3;
        assert_eq!(
            output.status.success(),
            !is_killed,
            "rank {rank}:\n{}",
            text(output)
        );
    }
}
