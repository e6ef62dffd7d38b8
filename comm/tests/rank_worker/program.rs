//! `rank-worker`: the processes that the package's integration tests start.
//!
//! `rank-worker BODY` runs one body: what a rank does that is a process, or what may share its process with nothing else,
//! such as a fork or a count of threads. `rank-worker --list` lists the bodies. A body that returns has passed: the program
//! ends with 0; one that panics ends it with 101. Tests start it by `common::processes`, which also tells a rank its part.
//!
//! A subject's bodies are in the module of its name here, its tests in the file of its name in `tests/`. What bodies and tests
//! share is in `tests/common/`; files that only one subject shares stay with its tests (`links.rs` and `shared.rs` of `rdma`,
//! `ranks.rs` of `transport`, `cases.rs` of `matrix`).

mod affinity;
mod arrivals;
mod bootstrap;
mod children;
#[path = "../common/mod.rs"]
mod common;
mod debugged;
mod errors;
#[path = "../../../tests/src/fabric.rs"]
#[allow(dead_code, reason = "each program uses a part of it")]
mod fabric;
mod faults;
mod fields;
mod forks;
mod graphs;
mod leaks;
mod logging;
mod matrix;
mod plans;
mod processes;
mod rdma;
mod records;
mod reports;
mod transport;

use std::{env, process::ExitCode};

/// The bodies as pairs of a name and a function: the name is the function's path.
macro_rules! bodies {
    ($($body:path),* $(,)?) => {
        &[$((stringify!($body), $body as fn())),*]
    };
}

const BODIES: &[(&str, fn())] = bodies![
    affinity::pinned,
    affinity::refused,
    arrivals::late,
    arrivals::unread,
    bootstrap::many_ranks,
    bootstrap::missing_ranks,
    bootstrap::no_number,
    bootstrap::fixed_address,
    bootstrap::impossible_environment,
    bootstrap::rank_that_ends_at_once,
    bootstrap::without_descriptors,
    bootstrap::forks_beside_others,
    bootstrap::killed_in_init,
    children::splits,
    children::survivor,
    debugged::held,
    errors::abort,
    errors::no_device,
    errors::forked,
    errors::cuda_device,
    faults::survivor,
    faults::patient,
    faults::few_descriptors,
    faults::no_memory,
    faults::full_dev_shm,
    fields::found,
    forks::refused,
    forks::group,
    forks::logged,
    graphs::replays,
    leaks::communicators,
    leaks::graphs,
    leaks::leaky,
    leaks::shared,
    logging::ranks,
    matrix::ranks,
    plans::split,
    processes::first_to_leave,
    processes::collectives,
    rdma::begin::on_the_backup,
    rdma::begin::without_a_port,
    rdma::begin::join_later,
    rdma::begin::late,
    rdma::data::ring,
    rdma::data::transfers,
    rdma::ends::sharer,
    rdma::ends::situations,
    rdma::failover::lose_and_find,
    rdma::failover::move_it,
    rdma::failover::go_on,
    rdma::failover::survive,
    rdma::fallback::late,
    rdma::fallback::early,
    rdma::held::unanswered,
    rdma::interface::survive,
    rdma::interface::miss,
    rdma::parting::receiver_leaves,
    rdma::queues::go_on,
    rdma::replays::thousand,
    rdma::setup::ports_fall,
    rdma::setup::refused,
    rdma::single::connection_fails,
    rdma::stalls::network_away,
    rdma::verdicts::path_found_dead,
    records::network,
    reports::unique_id_alone,
    reports::two_nodes,
    reports::one_of_two,
    reports::splits_without_end,
    reports::without_standard_descriptors,
    reports::without_readers,
    transport::ring,
    transport::asks_when_told,
    transport::stranger,
];

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [argument] = &arguments[..] else {
        eprintln!("rank-worker: one argument is needed: the name of a body, or --list");
        return ExitCode::from(2);
    };
    if argument == "--list" {
        for (name, _) in BODIES {
            println!("{name}");
        }
        return ExitCode::SUCCESS;
    }
    if let Some((_, body)) = BODIES.iter().find(|(name, _)| name == argument) {
        body();
        return ExitCode::SUCCESS;
    }
    let nearest = BODIES.iter().min_by_key(|(name, _)| distance(name, argument));
    let nearest = nearest.map_or("", |(name, _)| name);
    eprintln!("rank-worker: there is no body {argument}; the nearest name is {nearest}; --list lists all");
    ExitCode::from(2)
}

/// Letters to insert, delete or replace to make one name the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
