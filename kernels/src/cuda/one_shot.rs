//! An all_reduce in one shot among peers: what `cuda/one_shot.cuh` is given.

use std::ffi::CStr;

use ringsight_records::DataType;

use super::{
    layout::{OneShot, PeerCall},
    peer_launch::{MOST_BLOCKS, PeerArguments, PeerLaunch, SERVICE, kernel_of_sum},
    peers::lines,
};
#[cfg(doc)]
use crate::launch::Peers;
use crate::launch::Work;

/// Names of the kernels, by their numbers: `RINGSIGHT_ONE_SHOTS` in `cuda/one_shot.cuh`.
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

/// The number of the kernel that is made for a work, or of the one that does anything.
fn kernel(work: &Work) -> usize {
    kernel_of_sum(work.reduce_op, work.data_type, work.ranks).map_or(0, |sum| 1 + sum)
}

impl OneShot {
    /// What is reduced.
    pub(super) fn bytes(&self) -> u64 {
        let data_type = DataType::from_code(self.call.data_type);
        self.elems * data_type.map_or(0, DataType::size) as u64
    }
}

/// Threads of a block that move so many words: each has one line, as far as that goes. One block, which waits for no other,
/// if that is enough.
fn movers(words: usize) -> usize {
    match words {
        0..=512 => words.next_multiple_of(32).max(32),
        513..=4096 => 256,
        _ => 512,
    }
}

/// Threads of a block that reduces `bytes` bytes among peers.
#[must_use]
pub fn one_shot_threads(bytes: usize) -> u32 {
    movers(bytes.div_ceil(8)) as u32 + SERVICE
}

/// The launch of an all_reduce, but for where it reports to; `most_blocks`: [`Peers::most_blocks`].
pub(super) fn launch(work: &Work, call: PeerCall, most_blocks: u32) -> PeerLaunch {
    let words = (work.count * work.data_type.size()).div_ceil(8);
    let movers = movers(words);
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
            .div_ceil(movers)
            .clamp(1, most_blocks.clamp(1, MOST_BLOCKS) as usize) as u32,
        threads: movers as u32 + SERVICE,
        between: None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringsight_records::{Algorithm, Function, ReduceOp};

    use super::*;
    use crate::{
        cuda::peers::MAX_PEERS,
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
            straight: crate::Straight::No,
            pushes: false,
            connections: Connections::Peers(Arc::new(crate::launch::Peers {
                rank: 0,
                bases: vec![0; ranks as usize],
                most_blocks: 64,
                foreign: 0,
                memory: Box::new(()),
            })),
        };
        KERNELS[kernel(&work)].to_str().unwrap()
    }

    #[test]
    fn what_is_called_most_has_kernels_of_its_own() {
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
