//! Breadth-first search over all reachable states, each once.

use std::{
    collections::{HashMap, VecDeque},
    fmt,
    hash::{Hash, Hasher},
};

use super::world::{Move, World};
use crate::rules::Rules;

/// An error that the exploration found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A state violates an invariant.
    Wrong(String),
    /// A state from which no final state can be reached.
    Hang,
    /// Extra states than are explored.
    TooMany,
}

/// Maximum number of states, so that memory and time stay bounded whatever a change of the protocol causes.
const MAX_STATES: usize = 5_000_000;

/// The result of an exploration.
pub(super) struct Outcome {
    pub(super) states: usize,
    pub(super) moves: usize,
    pub(super) switches: u64,
    pub(super) replays: u64,
    /// States in which both ends are done, and in which an end gave up.
    pub(super) done: usize,
    pub(super) given_up: usize,
    pub(super) found: Option<Found>,
    /// The moves that lead to the error.
    trace: Vec<String>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, moves, .. } = self;
        let (done, given_up) = (self.done, self.given_up);
        write!(
            f,
            "{states} states, {moves} moves, {done} ends done, {given_up} given up"
        )
    }
}

impl Outcome {
    /// The error, and the shortest sequence of moves that leads to it.
    pub(super) fn explain(&self) -> String {
        format!("{self}\n{:?}\n{}", self.found, self.trace.join("\n"))
    }
}

/// A 128-bit hash by two independent multiplications, so that no two of some millions of states collide.
#[derive(Default)]
struct Fingerprint(u64, u64);

impl Hasher for Fingerprint {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.1 = (self.1.rotate_left(41) ^ word).wrapping_mul(0xd6e8_feb8_6659_fd93);
    }

    fn write_u8(&mut self, byte: u8) {
        self.write_u64(u64::from(byte));
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(u64::from(word));
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

fn fingerprint(value: &impl Hash) -> (u64, u64) {
    let mut hasher = Fingerprint::default();
    value.hash(&mut hasher);
    (hasher.0, hasher.1)
}

/// The predecessor of a state, and the index of the move that led here.
#[derive(Clone, Copy)]
struct Origin {
    before: u32,
    choice: u16,
}

/// Explores all states from `start`, up to the first error. With `wanted`, up to the first error whose text contains that; the search
/// does not continue beyond other errors.
pub(super) fn explore<R: Rules>(start: &World<R>, wanted: Option<&str>) -> Outcome {
    let mut known = HashMap::from([(fingerprint(start), 0_u32)]);
    let mut origins = vec![Origin { before: 0, choice: 0 }];
    // Edges from a state to its predecessor, without moves from outside.
    let mut edges: Vec<(u32, u32)> = Vec::new();
    let mut ends: Vec<u32> = Vec::new();
    let mut waiting = VecDeque::from([(0_u32, start.clone())]);
    let mut outcome = Outcome {
        states: 1,
        moves: 0,
        switches: 0,
        replays: 0,
        done: 0,
        given_up: 0,
        found: None,
        trace: Vec::new(),
    };
    while let Some((index, world)) = waiting.pop_front() {
        if origins.len() > MAX_STATES {
            outcome.trace = retrace(start, &origins, index);
            outcome.moves = edges.len();
            outcome.found = Some(Found::TooMany);
            return outcome;
        }
        if world.is_finished() {
            ends.push(index);
            match world.is_done() {
                true => outcome.done += 1,
                false => outcome.given_up += 1,
            }
            continue;
        }
        for (choice, step) in world.moves().into_iter().enumerate() {
            let mut next = world.clone();
            outcome.moves += 1;
            match next.apply(step) {
                Ok(effects) => {
                    outcome.switches += effects.switches;
                    outcome.replays += effects.replays;
                }
                Err(wrong) if wanted.is_some_and(|wanted| !wrong.contains(wanted)) => continue,
                Err(wrong) => {
                    let mut trace = retrace(start, &origins, index);
                    trace.push(format!("{step:?}: {wrong}"));
                    (outcome.found, outcome.trace) = (Some(Found::Wrong(wrong)), trace);
                    return outcome;
                }
            }
            let to = *known.entry(fingerprint(&next)).or_insert_with(|| {
                let to = origins.len() as u32;
                origins.push(Origin {
                    before: index,
                    choice: choice as u16,
                });
                waiting.push_back((to, next));
                to
            });
            if !step.is_outside() && to != index {
                edges.push((to, index));
            }
        }
        outcome.states = origins.len();
    }
    if let Some(stuck) = first_without_end(origins.len(), edges, &ends) {
        outcome.found = Some(Found::Hang);
        outcome.trace = retrace(start, &origins, stuck);
    }
    outcome
}

/// The first state from which none of `ends` can be reached. `edges` lead from a state to its predecessor.
fn first_without_end(states: usize, mut edges: Vec<(u32, u32)>, ends: &[u32]) -> Option<u32> {
    edges.sort_unstable();
    let mut reaches = vec![false; states];
    let mut waiting = ends.to_vec();
    while let Some(state) = waiting.pop() {
        if std::mem::replace(&mut reaches[state as usize], true) {
            continue;
        }
        let first = edges.partition_point(|(to, _)| *to < state);
        waiting.extend(
            edges[first..]
                .iter()
                .take_while(|(to, _)| *to == state)
                .map(|(_, from)| *from),
        );
    }
    reaches
        .iter()
        .position(|reaches| !reaches)
        .map(|state| state as u32)
}

/// The moves that lead to a state.
fn retrace<R: Rules>(start: &World<R>, origins: &[Origin], state: u32) -> Vec<String> {
    let mut choices = Vec::new();
    let mut at = state;
    while at != 0 {
        let Origin { before, choice } = origins[at as usize];
        choices.push(choice);
        at = before;
    }
    let mut world = start.clone();
    let mut trace = Vec::new();
    for choice in choices.into_iter().rev() {
        let step: Move = world.moves()[usize::from(choice)];
        trace.push(world.describe(step));
        if world.apply(step).is_err() {
            break;
        }
    }
    trace.push(format!("{world:#?}"));
    trace
}
