//! Every collective, type, reduction, number of ranks and way to run them, in place and not, against a plain reference.
//!
//! A run checks a sample of the matrix that its seed chooses; `RINGSIGHT_TEST_FULL=1` (`cargo xtask test --full`) checks
//! all of it. `MATRIX_SEED` gives another seed. Each case is run twice and must give the same bits both times and, where
//! all ranks get the same, on all ranks.

mod common;
#[expect(unreachable_pub, reason = "modules of this test binary")]
mod matrix {
    #[allow(dead_code, reason = "shared with `rank-worker`")]
    pub mod cases;
    pub mod run;
}

use std::{env, io::Write, time::Instant};

use matrix::{
    cases::{World, of_world},
    run,
};

/// Cases of a sample.
const SAMPLE: usize = 640;

/// Prints where the test runner does not catch it.
fn tell(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn every_collective_type_and_reduction_on_all_kinds_of_ranks() {
    let seed = env::var("MATRIX_SEED").map_or(7, |seed| seed.parse().expect("MATRIX_SEED is a number"));
    let full = env::var_os("RINGSIGHT_TEST_FULL").is_some();
    let worlds = World::all();
    let sizes: Vec<usize> = worlds
        .iter()
        .enumerate()
        .map(|(number, world)| of_world(*world, number, seed).len())
        .collect();
    let all: usize = sizes.iter().sum();
    let start = Instant::now();
    let (mut done, mut failures) = (0, Vec::new());
    for (number, size) in sizes.iter().enumerate() {
        // Together as many as the sample has.
        let share = |upto: usize| upto * SAMPLE / worlds.len();
        let wanted = if full {
            *size
        } else {
            share(number + 1) - share(number)
        };
        match run::world(number, wanted, seed) {
            Ok(cases) => done += cases.len(),
            Err(why) => failures.push(why),
        }
        if full {
            let seconds = start.elapsed().as_secs();
            tell(&format!(
                "matrix: {done} of {all} cases after {seconds} s, done with {:?}",
                worlds[number]
            ));
        }
    }
    tell(&format!(
        "matrix: {done} of {all} cases, seed {seed}, {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert_eq!(done, if full { all } else { SAMPLE });
}

#[test]
fn the_same_world_gives_the_same_bits_each_time() {
    let number = World::all()
        .iter()
        .position(|world| world.ranks == 3 && world.nodes == 2 && !world.threads)
        .unwrap();
    let run = || run::world(number, 40, 99).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(run(), run());
}
