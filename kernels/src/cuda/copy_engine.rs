//! Collectives by copy engines (CE): what is copied where, between the kernels of `cuda/copy_engine.cuh`.
//!
//! An *entry* kernel of one block returns when all ranks have begun the operation. Copies into the other ranks' windows follow. An *exit*
//! kernel returns when all ranks' copies are done. A reduction ([`super::tiles`]) has *barrier* kernels and reducing kernels in between.

use std::ffi::CStr;

use super::{
    collective::parts,
    layout::{CopyEngineCall, PeerCall},
    peer_launch::{PeerArguments, PeerLaunch, SERVICE_THREADS},
    peer_memory::MAX_PEERS,
};
use crate::launch::Work;

/// Names of the kernels by number (`RINGSIGHT_COPY_ENGINE_KERNELS` in `cuda/copy_engine.cuh`): entry, exit, barrier.
pub const KERNELS: [&CStr; 3] = [
    c"ringsight_ce_entry",
    c"ringsight_ce_exit",
    c"ringsight_ce_barrier",
];

/// Number of the entry kernel.
pub(super) const ENTRY: usize = 0;
/// Number of the barrier kernel.
pub(super) const BARRIER: usize = 2;

/// Threads of these kernels' one block: the service warp.
pub const COPY_ENGINE_THREADS: u32 = SERVICE_THREADS;

/// One copy by a copy engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Transfer {
    /// Destination, as this rank's device addresses it.
    pub to: u64,
    /// Source on this rank.
    pub from: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The copies of one collective, or of one tile.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copies {
    others: [Transfer; MAX_PEERS],
    count: usize,
    /// The copy of this rank's own contribution to its receive buffer; `None` if it is in place.
    pub own: Option<Transfer>,
}

impl Copies {
    /// One copy to each other rank, beginning with the next rank, so that not all ranks write to one rank at a time.
    #[must_use]
    pub fn others(&self) -> &[Transfer] {
        &self.others[..self.count]
    }

    pub(super) fn push(&mut self, copy: Transfer) {
        self.others[self.count] = copy;
        self.count += 1;
    }
}

/// The launch of kernel number `kernel` of [`KERNELS`]. `barrier`: which barrier of the operation, for a barrier kernel.
pub(super) fn kernel_launch(call: PeerCall, kernel: usize, barrier: u32) -> PeerLaunch {
    PeerLaunch {
        arguments: PeerArguments::CopyEngine(CopyEngineCall {
            call,
            copies_failed: 0,
            barrier,
        }),
        kernel,
        blocks: 1,
        threads: COPY_ENGINE_THREADS,
    }
}

/// The copies of a collective that reduces nothing.
pub(super) fn copies(work: &Work, call: PeerCall, addresses: &[u64], offset: u64) -> Copies {
    let arguments = parts(work, call);
    let (ranks, me) = (work.ranks as usize, work.rank as usize);
    let mut copies = Copies::default();
    for rank in (1..ranks).map(|hop| (me + hop) % ranks) {
        // A receive buffer has one block per rank.
        let bytes = arguments.sends[rank];
        copies.push(Transfer {
            to: addresses[rank] + offset + bytes * me as u64,
            from: arguments.from[rank],
            bytes,
        });
    }
    copies.own = (arguments.own != arguments.result).then_some(Transfer {
        to: arguments.result,
        from: arguments.own,
        bytes: arguments.result_bytes,
    });
    copies
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Function, ReduceOp};

    use super::*;
    use crate::cuda::{
        PeerOperation,
        peer_operation::CopyPhase,
        testing::{APART, OFFSET, in_window, launched},
    };

    fn work(function: Function, rank: u32, ranks: u32, count: usize, in_place: bool) -> Work {
        let work = in_window(rank, ranks, count, None);
        let in_recv = work.recv + rank as usize * count * 4;
        Work {
            function,
            send: if in_place { in_recv } else { work.send },
            ..work
        }
    }

    #[test]
    fn every_byte_of_every_receive_buffer_is_copied_once() {
        for (function, ranks, in_place) in [
            (Function::AllGather, 2, false),
            (Function::AllGather, 3, true),
            (Function::AllGather, 8, false),
            (Function::AlltoAll, 2, false),
            (Function::AlltoAll, 8, false),
        ] {
            let (count, bytes) = (1001, 4004);
            let mut written: Vec<Vec<(u64, u64)>> = vec![Vec::new(); ranks as usize];
            for rank in 0..ranks {
                let PeerOperation { launch, copy_phase } =
                    launched(vec![work(function, rank, ranks, count, in_place)])
                        .unwrap()
                        .unwrap();
                let name = PeerOperation::kernels().nth(launch.kernel).unwrap();
                assert_eq!((name, launch.blocks, launch.threads), (KERNELS[0], 1, 32));
                assert_eq!(
                    PeerOperation::kernels().nth(launch.kernel + 1).unwrap(),
                    KERNELS[1]
                );
                let Some(CopyPhase::Copies(copies)) = copy_phase else {
                    panic!("{copy_phase:?}")
                };
                assert_eq!(copies.others().len() as u32, ranks - 1);
                assert_eq!(copies.own.is_none(), in_place);
                for (at, copy) in copies.others().iter().chain(&copies.own).enumerate() {
                    let to = copy.to as usize / APART - 1;
                    // Each begins with another rank, and ends with itself.
                    assert_eq!(to as u32, (rank + 1 + at as u32) % ranks);
                    let send = work(function, rank, ranks, count, in_place).send as u64;
                    let block = if function == Function::AlltoAll {
                        to as u64 * bytes
                    } else {
                        0
                    };
                    assert_eq!(copy.from, send + block);
                    written[to].push((copy.to % APART as u64, copy.bytes));
                }
                if in_place {
                    written[rank as usize].push((OFFSET + u64::from(rank) * bytes, bytes));
                }
            }
            for mut blocks in written {
                blocks.sort_unstable();
                let expected = (0..u64::from(ranks)).map(|block| (OFFSET + block * bytes, bytes));
                assert!(blocks.into_iter().eq(expected), "{function}");
            }
        }
    }

    #[test]
    fn unsupported_operations_are_refused() {
        let gather = || work(Function::AllGather, 0, 2, 8, false);
        assert!(launched(vec![gather(), gather()]).is_err(), "two in a launch");
        let reduce = Work {
            reduce_op: ReduceOp::Sum,
            ..work(Function::ReduceScatter, 0, 2, 8, false)
        };
        assert!(launched(vec![reduce]).is_err());
        let fewer = Work { ranks: 3, ..gather() };
        assert!(launched(vec![fewer]).is_err(), "a window of other ranks");
    }
}
