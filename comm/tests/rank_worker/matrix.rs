//! A process's share of one world's ranks: each runs the cases that the seed chooses and prints the hash of its results.

#[allow(dead_code, reason = "shared with the tests")]
#[expect(unreachable_pub, reason = "shared with the tests")]
#[path = "../matrix/cases.rs"]
mod cases;

#[expect(unreachable_pub, reason = "modules of this program")]
mod check;

#[expect(unreachable_pub, reason = "modules of this program")]
mod numbers;

use std::thread;

use cases::{World, of_world, sample};

use crate::common::{
    Rank, host,
    processes::{from_hex, variable},
    variables::{ID, PLACE, WHAT},
};

/// The ranks of one process: the variables say which world, sample and seed, and which ranks.
pub(crate) fn ranks() {
    let (run, ranks) = (variable(WHAT), variable(PLACE));
    host();
    let numbers: Vec<u64> = run.split(' ').map(|word| word.parse().unwrap()).collect();
    let (number, wanted, seed) = (numbers[0] as usize, numbers[1] as usize, numbers[2]);
    let world = World::all()[number];
    let id = from_hex(&variable(ID));
    let cases = of_world(world, number, seed);
    let chosen = sample(cases.len(), wanted, seed);
    let rank = |rank: usize| {
        let rank = Rank::join(id, rank, world.ranks);
        for index in &chosen {
            println!("case {index} {}", cases[*index].run(&rank));
        }
        rank.leave();
    };
    thread::scope(|scope| {
        for number in ranks.split(' ') {
            let number = number.parse().unwrap();
            // A rank that fails ends the process, so that its peers are not waited for.
            let rank = &rank;
            scope.spawn(move || {
                if std::panic::catch_unwind(|| rank(number)).is_err() {
                    std::process::exit(101);
                }
            });
        }
    });
}
