//! An all_reduce in one shot among peers: what `cuda/one_shot.cuh` is given.

use super::{
    layout::{Head, OneShot},
    peers::{MAX_PEERS, lines},
    program::{address_error, argument, combination},
};
use crate::{
    launch::{Connections, Launch, Scalar},
    schedule::WorkError,
};

/// Threads of a block that move no data: `OneShotBlock::SERVICE`.
const SERVICE: u32 = 32;

/// A launch of the kernel.
#[derive(Clone, Copy, Debug)]
pub struct OneShotLaunch {
    /// Its argument, but for [`OneShot::head`].
    pub arguments: OneShot,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
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
        if launch.channels.iter().map(|channel| channel.work.len()).sum::<usize>() != 1 {
            return Err(WorkError(format!(
                "op {} ({}): work among peers shares its launch",
                work.op, work.function
            )));
        }
        address_error(work)?;
        let mut bases = [0; MAX_PEERS];
        bases[..peers.bases.len()].copy_from_slice(&peers.bases);
        let words = (work.count * work.data_type.size()).div_ceil(8);
        // Each thread has one line, as far as that goes.
        let movers = if words <= 4096 { words.next_multiple_of(32).min(256) } else { 512 };
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
            blocks: blocks as u32,
            threads: movers as u32 + SERVICE,
        }))
    }
}
