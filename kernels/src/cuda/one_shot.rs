//! One-shot AllReduce by peer kernels: the arguments of `cuda/one_shot.cuh`.
//!
//! Every rank writes all its elements into the peer memory of every other rank, in LL lines, and reduces what it receives.

use std::ffi::CStr;

use ringsight_records::DataType;

use super::{
    layout::{OneShot, PeerCall},
    peer_launch::{MAX_BLOCKS, PeerArguments, PeerLaunch, SERVICE_THREADS, sum_kernel},
    peer_memory::lines,
};
#[cfg(doc)]
use crate::launch::PeerMemory;
use crate::launch::Work;

/// Names of the kernels by number: `RINGSIGHT_ONE_SHOTS` in `cuda/one_shot.cuh`.
pub const KERNELS: [&CStr; 10] = [
    c"ringsight_one_shot",
    c"ringsight_one_shot_sum_f32_2",
    c"ringsight_one_shot_sum_f32_4",
    c"ringsight_one_shot_sum_f32_8",
    c"ringsight_one_shot_sum_f16_2",
    c"ringsight_one_shot_sum_f16_4",
    c"ringsight_one_shot_sum_f16_8",
    c"ringsight_one_shot_sum_bf16_2",
    c"ringsight_one_shot_sum_bf16_4",
    c"ringsight_one_shot_sum_bf16_8",
];

/// The number of the specialised kernel for a work, or of the one that does any work.
fn kernel(work: &Work) -> usize {
    sum_kernel(work.reduce_op, work.data_type, work.ranks).map_or(0, |sum| 1 + sum)
}

impl OneShot {
    /// Bytes of the operation.
    pub(super) fn bytes(&self) -> u64 {
        let data_type = DataType::from_code(self.call.data_type);
        self.elems * data_type.map_or(0, DataType::size) as u64
    }
}

/// Data threads of a block for an operation of `words` words: one line per thread where possible, and a single block if one is enough, since it
/// need not wait for other blocks.
fn data_threads(words: usize) -> usize {
    match words {
        0..=512 => words.next_multiple_of(32).max(32),
        513..=4096 => 256,
        _ => 512,
    }
}

/// Threads of a block that reduces `bytes` bytes.
#[must_use]
pub fn one_shot_threads(bytes: usize) -> u32 {
    data_threads(bytes.div_ceil(8)) as u32 + SERVICE_THREADS
}

/// The launch of an AllReduce. The caller sets where it reports to. `max_blocks`: [`PeerMemory::max_blocks`].
pub(super) fn launch(work: &Work, call: PeerCall, max_blocks: u32) -> PeerLaunch {
    let words = (work.count * work.data_type.size()).div_ceil(8);
    let threads = data_threads(words);
    PeerLaunch {
        arguments: PeerArguments::OneShot(OneShot {
            call,
            send: work.send as u64,
            recv: work.recv as u64,
            elems: work.count as u64,
            lines: lines(work.ranks as usize) as u32,
            reserved: 0,
        }),
        kernel: kernel(work),
        blocks: words
            .div_ceil(threads)
            .clamp(1, max_blocks.clamp(1, MAX_BLOCKS) as usize) as u32,
        threads: threads as u32 + SERVICE_THREADS,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringsight_records::{Algorithm, Function, ReduceOp};

    use super::*;
    use crate::{
        cuda::peer_memory::MAX_PEERS,
        launch::{Connections, Scalar},
    };

    fn name(data_type: DataType, reduce_op: ReduceOp, ranks: u32) -> &'static str {
        let work = Work {
            op: 1,
            tag: 1,
            function: Function::AllReduce,
            algorithm: Algorithm::OneShot,
            data_type,
            reduce_op,
            scalar: Scalar::None,
            send: 0,
            recv: 0,
            count: 1,
            part: 0..1,
            rank: 0,
            ranks,
            root: 0,
            zero_copy: crate::ZeroCopy::Off,
            pushes: false,
            connections: Connections::Peers(Arc::new(crate::launch::PeerMemory {
                rank: 0,
                bases: vec![0; ranks as usize],
                max_blocks: 64,
                foreign: 0,
                memory: Box::new(()),
            })),
        };
        KERNELS[kernel(&work)].to_str().unwrap()
    }

    #[test]
    fn frequent_operations_have_specialised_kernels() {
        for (data_type, short) in [
            (DataType::Float32, "f32"),
            (DataType::Float16, "f16"),
            (DataType::Bfloat16, "bf16"),
        ] {
            for ranks in 2..=MAX_PEERS as u32 {
                let any = "ringsight_one_shot".to_owned();
                let own = format!("{any}_sum_{short}_{ranks}");
                let expected = if ranks.is_power_of_two() { own } else { any };
                assert_eq!(name(data_type, ReduceOp::Sum, ranks), expected);
                assert_eq!(name(data_type, ReduceOp::Avg, ranks), expected);
            }
            assert_eq!(name(data_type, ReduceOp::Max, 2), "ringsight_one_shot");
        }
        assert_eq!(name(DataType::Int32, ReduceOp::Sum, 2), "ringsight_one_shot");
    }
}
