//! The matrix: which worlds there are, and which cases each has.

use ringsight_records::{DataType, Function, ReduceOp};

/// Pseudo-random numbers (splitmix64) of a place.
pub fn noise(seed: u64, place: u64) -> u64 {
    let mut z = seed.wrapping_add(place.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    pub ranks: usize,
    /// Nodes, by what the library is told.
    pub nodes: usize,
    /// Ranks are threads of one process a node; otherwise a process each.
    pub threads: bool,
}

impl World {
    /// All worlds. One rank is on one node.
    pub fn all() -> Vec<Self> {
        let mut worlds = Vec::new();
        for ranks in [1, 2, 3, 4, 5, 8] {
            for nodes in 1..=ranks.min(2) {
                for threads in [false, true] {
                    worlds.push(Self {
                        ranks,
                        nodes,
                        threads,
                    });
                }
            }
        }
        worlds
    }

    /// The node of a rank.
    pub fn node(&self, rank: usize) -> usize {
        rank * self.nodes / self.ranks
    }

    /// Ranks of each process.
    pub fn processes(&self) -> Vec<Vec<usize>> {
        if !self.threads {
            return (0..self.ranks).map(|rank| vec![rank]).collect();
        }
        (0..self.nodes)
            .map(|node| (0..self.ranks).filter(|rank| self.node(*rank) == node).collect())
            .collect()
    }

    /// Settings that make small operations take many slots, or as they are by default: each world has one of them, the
    /// same in every run.
    pub fn buffer_bytes(&self) -> Option<&'static str> {
        [None, Some("16384"), Some("4096")][(self.ranks + self.nodes + usize::from(self.threads)) % 3]
    }
}

/// Where a scalar is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Residence {
    Host,
    Device,
}

/// One operation to be checked.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub function: Function,
    pub data_type: DataType,
    pub op: ReduceOp,
    pub residence: Residence,
    pub in_place: bool,
    /// Drawn, like the rest: the matrix is made of what is above.
    pub count: usize,
    pub root: usize,
    pub seed: u64,
}

const REDUCING: [Function; 3] = [Function::AllReduce, Function::ReduceScatter, Function::Reduce];
const MOVING: [Function; 5] = [
    Function::AllGather,
    Function::Broadcast,
    Function::AlltoAll,
    Function::Gather,
    Function::Scatter,
];
const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
    ReduceOp::PreMulSum,
];
/// Around what changes the program: nothing, one element, fewer than ranks, vectors and slots full and not, several
/// rounds; the last two are rare and take several channels.
const COUNTS: [usize; 18] = [
    0, 1, 2, 3, 5, 7, 17, 31, 32, 33, 63, 65, 127, 512, 1000, 2049, 40_000, 70_003,
];

/// The cases of a world; which element counts and roots they have depends on the seed alone.
pub fn of_world(world: World, number: usize, seed: u64) -> Vec<Case> {
    let mut kinds = Vec::new();
    for data_type in DataType::ALL {
        for function in REDUCING {
            for op in OPS {
                for residence in [Residence::Host, Residence::Device] {
                    if op == ReduceOp::PreMulSum || residence == Residence::Host {
                        kinds.push((function, *data_type, op, residence));
                    }
                }
            }
        }
        for function in MOVING {
            kinds.push((function, *data_type, ReduceOp::None, Residence::Host));
        }
    }
    let mut cases = Vec::new();
    for (function, data_type, op, residence) in kinds {
        for in_place in [false, true] {
            // NCCL has no all-to-all in place.
            if in_place && function == Function::AlltoAll && world.ranks > 1 {
                continue;
            }
            let random = noise(seed, (number as u64) << 32 | cases.len() as u64);
            let common = COUNTS.len() - if random.is_multiple_of(16) { 0 } else { 2 };
            cases.push(Case {
                function,
                data_type,
                op,
                residence,
                in_place,
                count: COUNTS[(random >> 8) as usize % common],
                root: (random >> 16) as usize % world.ranks,
                seed: noise(random, 1),
            });
        }
    }
    cases
}

/// Indices of `wanted` of `all` cases, in order, by the seed; all of them if `wanted` is as many.
pub fn sample(all: usize, wanted: usize, seed: u64) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..all).collect();
    indices.sort_by_key(|index| noise(seed, *index as u64));
    indices.truncate(wanted);
    indices.sort_unstable();
    indices
}
