//! An all_reduce in one shot among peers: what `cuda/one_shot.cuh` is given.

use ringsight_records::DataType;

use super::{
    layout::{Combination, Head, OneShot},
    peers::{MAX_PEERS, lines},
    program::{address_error, argument, combination},
};
use crate::{
    launch::{Connections, Launch, Scalar, Work},
    schedule::WorkError,
};

/// Threads of a block that move no data: `OneShotBlock::SERVICE`.
const SERVICE: u32 = 32;

/// A launch of one of the kernels.
#[derive(Clone, Copy, Debug)]
pub struct OneShotLaunch {
    /// Its argument, but for [`OneShot::head`].
    pub arguments: OneShot,
    /// The kernel's number in [`ONE_SHOT_KERNELS`](super::ONE_SHOT_KERNELS).
    pub kernel: usize,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
}

/// The number of the kernel that is made for a work, or of the one that does anything.
fn kernel(work: &Work) -> usize {
    let first = match (combination(work), work.data_type) {
        (Combination::Sum, DataType::Float32) => 1,
        (Combination::Sum, DataType::Float16) => 4,
        (Combination::Sum, DataType::Bfloat16) => 7,
        _ => return 0,
    };
    match work.ranks {
        2 => first,
        4 => first + 1,
        8 => first + 2,
        _ => 0,
    }
}

/// Threads of a block that move so many words: each has one line, as far as that goes.
fn movers(words: usize) -> usize {
    if words <= 4096 {
        words.next_multiple_of(32).min(256)
    } else {
        512
    }
}

/// Threads of a block that reduces `bytes` bytes among peers.
#[must_use]
pub fn one_shot_threads(bytes: usize) -> u32 {
    movers(bytes.div_ceil(8)) as u32 + SERVICE
}

impl OneShotLaunch {
    /// The kernel for `launch`; `None` if that is to run channel programs.
    ///
    /// # Errors
    /// Work among peers that is not alone, or whose buffer does not stand at a multiple of its elements' size.
    pub fn new(launch: &Launch) -> Result<Option<Self>, WorkError> {
        let among_peers = launch.channels.iter().find_map(|channel| {
            channel.work.iter().find_map(|work| match &work.connections {
                Connections::Peers(peers) => Some((channel.channel, work, peers)),
                _ => None,
            })
        });
        let Some((channel, work, peers)) = among_peers else {
            return Ok(None);
        };
        if launch
            .channels
            .iter()
            .map(|channel| channel.work.len())
            .sum::<usize>()
            != 1
        {
            return Err(WorkError(format!(
                "op {} ({}): work among peers shares its launch",
                work.op, work.function
            )));
        }
        address_error(work)?;
        let mut bases = [0; MAX_PEERS];
        bases[..peers.bases.len()].copy_from_slice(&peers.bases);
        let words = (work.count * work.data_type.size()).div_ceil(8);
        let movers = movers(words);
        let blocks = words.div_ceil(movers).clamp(1, 64);
        Ok(Some(Self {
            arguments: OneShot {
                head: Head::default(),
                bases,
                send: work.send as u64,
                recv: work.recv as u64,
                elems: work.count as u64,
                argument: match work.scalar {
                    Scalar::Immediate(bits) => argument(work, bits),
                    _ => argument(work, 0),
                },
                op: work.op,
                tag: work.tag,
                rank: work.rank,
                ranks: work.ranks,
                lines: lines(work.ranks as usize) as u32,
                data_type: work.data_type.code(),
                combine: combination(work) as u8,
                channel,
                reserved: 0,
            },
            kernel: kernel(work),
            blocks: blocks as u32,
            threads: movers as u32 + SERVICE,
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ringsight_records::{Algorithm, Function, ReduceOp};

    use super::*;
    use crate::cuda::ONE_SHOT_KERNELS;

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
            connections: Connections::Peers(Arc::new(crate::launch::Peers {
                rank: 0,
                bases: vec![0; ranks as usize],
                memory: Box::new(()),
            })),
        };
        ONE_SHOT_KERNELS[kernel(&work)].to_str().unwrap()
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
            }
            assert_eq!(name(data_type, ReduceOp::Avg, 2), "ringsight_one_shot");
        }
        assert_eq!(name(DataType::Int32, ReduceOp::Sum, 2), "ringsight_one_shot");
    }
}
