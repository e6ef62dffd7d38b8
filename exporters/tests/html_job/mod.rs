//! A made-up training job: operations whose late ranks are known.

use std::sync::Arc;

use ringsight_exporters::model::{Culprit, Operation, OperationRank};

/// When the job begins, Unix nanoseconds: 2026-11-21 10:41:03.120 UTC.
pub(crate) const BEGIN: u64 = 1_795_257_663_120_000_000;

/// What the job is like.
pub(crate) struct Job {
    pub(crate) ranks: u32,
    pub(crate) ranks_per_host: u32,
    pub(crate) operations: usize,
    /// `(rank, first operation, step, lag in nanoseconds)`: late in every `step`-th operation from the first.
    pub(crate) late: Vec<(u32, usize, usize, u64)>,
}

/// SplitMix64: the job is the same each time.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// `(name, communicator name, megabytes, microseconds of moving, microseconds of computing before)`
const STEP: [(&str, &str, u64, u64, u64); 8] = [
    ("all_gather", "tensor parallel", 16, 700, 900),
    ("reduce_scatter", "tensor parallel", 16, 800, 1100),
    ("all_gather", "tensor parallel", 16, 700, 1000),
    ("all_reduce", "data parallel", 25, 2300, 2600),
    ("all_reduce", "data parallel", 25, 2250, 300),
    ("all_reduce", "data parallel", 9, 900, 250),
    ("broadcast", "data parallel", 1, 220, 1900),
    ("all_reduce", "data parallel", 0, 90, 150),
];

impl Job {
    pub(crate) fn run(&self) -> Vec<Operation> {
        let mut random = Random(7);
        let hosts: Vec<Arc<str>> = (0..self.ranks.div_ceil(self.ranks_per_host))
            .map(|host| format!("node-{host:02}").into())
            .collect();
        let names: Vec<Arc<str>> = STEP.iter().map(|step| step.1.into()).collect();
        let mut free = BEGIN;
        let mut sequences = [0u64; 2];
        (0..self.operations)
            .map(|number| {
                let (name, communicator, megabytes, moving, computing) = STEP[number % STEP.len()];
                let late = self
                    .late
                    .iter()
                    .find(|(_, first, step, _)| number >= *first && (number - first) % step == 0);
                let ready = free + computing * 1000;
                let mut by_rank: Vec<_> = (0..self.ranks)
                    .map(|rank| {
                        let lag = late.filter(|late| late.0 == rank).map_or(0, |late| late.3);
                        let api = ready + random.below(90_000) + lag;
                        OperationRank {
                            rank,
                            host: Arc::clone(&hosts[(rank / self.ranks_per_host) as usize]),
                            pid: 41_200 + rank,
                            api_start_ns: api,
                            device_start_ns: api + 8_000 + random.below(30_000),
                            device_end_ns: 0,
                            by_device: true,
                        }
                    })
                    .collect();
                let last = by_rank
                    .iter()
                    .map(|part| part.device_start_ns)
                    .max()
                    .unwrap_or(ready);
                for part in &mut by_rank {
                    part.device_end_ns = last + moving * 1000 + random.below(moving * 60);
                }
                free = by_rank
                    .iter()
                    .map(|part| part.device_end_ns)
                    .max()
                    .unwrap_or(ready);
                let which = usize::from(communicator == "data parallel");
                sequences[which] += 1;
                let culprit = late.map(|late| {
                    let mut others: Vec<_> = by_rank
                        .iter()
                        .filter(|part| part.rank != late.0)
                        .map(|part| part.device_start_ns)
                        .collect();
                    others.sort_unstable();
                    let own = by_rank[late.0 as usize].device_start_ns;
                    Culprit {
                        rank: late.0,
                        lag_ns: own - others[others.len() / 2],
                    }
                });
                let mut trace_id = [0u8; 16];
                trace_id[..8].copy_from_slice(&random.below(u64::MAX).to_be_bytes());
                trace_id[8..].copy_from_slice(&(number as u64 + 1).to_be_bytes());
                Operation {
                    trace_id,
                    name,
                    communicator: 0x5eed_0000_0000_0000 + which as u64,
                    communicator_name: Arc::clone(&names[number % STEP.len()]),
                    ranks: self.ranks,
                    sequence: sequences[which],
                    replay: 0,
                    bytes: (megabytes << 20).max(8),
                    data_type: if name == "all_reduce" {
                        "float32"
                    } else {
                        "bfloat16"
                    },
                    algorithm: "ring",
                    by_rank,
                    culprit,
                    unnamed: None,
                    waited_until_ns: 0,
                    complete: number % 4001 != 4000,
                }
            })
            .collect()
    }
}

/// Nanoseconds that others waited for `rank`, over the operations where it was late: the page's figure, made anew.
pub(crate) fn waited_for(operations: &[Operation], rank: u32) -> u64 {
    let late = operations
        .iter()
        .filter(|operation| operation.culprit.as_ref().is_some_and(|c| c.rank == rank));
    late.map(|operation| {
        let last = operation
            .by_rank
            .iter()
            .map(|part| part.device_start_ns)
            .max()
            .unwrap_or(0);
        operation
            .by_rank
            .iter()
            .map(|part| last - part.device_start_ns)
            .sum::<u64>()
    })
    .sum()
}
