//! Validation of works: which ones a device has a program for.

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use crate::{
    cuda::{
        collective::{has_sum_kernel, has_two_shot},
        peer_memory::{MAX_PEERS, one_shot_bytes},
        tiles::max_bytes,
    },
    launch::{Connections, PeerMemory, Scalar, Work, WorkError},
    reduce::Reduction,
    schedule::divisible,
};

impl Work {
    /// Whether a device program exists for this work and its parts fit together.
    ///
    /// # Errors
    /// Says what does not fit.
    pub fn check(&self) -> Result<(), WorkError> {
        let fail = |why: String| Err(WorkError(format!("op {} ({}): {why}", self.op, self.function)));
        let elements = match &self.connections {
            Connections::Ring { .. } => divisible(
                self.function,
                self.algorithm,
                self.data_type,
                self.count,
                self.ranks,
            ),
            _ => self.count,
        };
        if self.part.start > self.part.end || self.part.end > elements {
            return fail(format!(
                "part {:?} is not within its {elements} elements",
                self.part
            ));
        }
        let reduces = self.function.reduces();
        if reduces && Reduction::new(self.reduce_op, self.data_type).is_none() {
            return fail(format!("no {} reduction for {}", self.reduce_op, self.data_type));
        }
        let has_scalar = !matches!(self.scalar, Scalar::None | Scalar::Device(0));
        if has_scalar != (self.reduce_op == ReduceOp::PreMulSum) {
            return fail(format!("scalar {:?} for {}", self.scalar, self.reduce_op));
        }
        match &self.connections {
            Connections::Local => {}
            Connections::Peers(peers) => self.check_peers(peers)?,
            Connections::CopyEngine { window, .. } => {
                self.check_peers(&window.peers)?;
                let all = window.addresses.len() == self.ranks as usize;
                let bytes = self.count * self.data_type.size();
                // The scratch memory limits the number of tiles, and a tile is made of whole words.
                let fits_tiles = |bytes: usize| {
                    has_sum_kernel(self.reduce_op, self.data_type, self.ranks)
                        && window.scratch.as_ref().is_some_and(|scratch| {
                            bytes as u64 <= max_bytes(self.ranks as usize, scratch.tile_bytes)
                        })
                };
                let can = match (self.function, self.algorithm) {
                    (Function::AllGather | Function::AlltoAll, _) => true,
                    (Function::AllReduce, Algorithm::TwoShot) => {
                        fits_tiles(bytes) && self.recv.is_multiple_of(16)
                    }
                    (Function::ReduceScatter, Algorithm::Direct) => {
                        let all = bytes.saturating_mul(self.ranks as usize);
                        fits_tiles(all) && self.send.is_multiple_of(16) && bytes.is_multiple_of(16)
                    }
                    _ => false,
                };
                if !all || !can {
                    return fail("copy engines cannot do it in this window".into());
                }
            }
            Connections::Send(fifo) | Connections::Recv(fifo) => {
                if fifo.slot_bytes() < DataType::Float64.size() {
                    return fail(format!(
                        "slots of {} bytes cannot hold an element",
                        fifo.slot_bytes()
                    ));
                }
                let expected = if matches!(self.connections, Connections::Send(_)) {
                    Function::Send
                } else {
                    Function::Recv
                };
                if self.function != expected {
                    return fail(format!("needs a ring, was given a connection for {expected}"));
                }
                if self.algorithm != Algorithm::Direct {
                    return fail(format!("no {} program between two ranks", self.algorithm));
                }
            }
            Connections::Ring { order, prev, next } => {
                use Function::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
                let moves_data = matches!(
                    self.function,
                    AllReduce | AllGather | ReduceScatter | Broadcast | Reduce
                );
                if !moves_data && !self.is_tag_only() {
                    return fail("no ring program; it is made of sends and receives".into());
                }
                if prev.slot_bytes() != next.slot_bytes() {
                    return fail(format!(
                        "slots of a ring differ: {} bytes from prev, {} to next",
                        prev.slot_bytes(),
                        next.slot_bytes()
                    ));
                }
                if next.slot_bytes() < DataType::Float64.size() {
                    return fail(format!(
                        "slots of {} bytes cannot hold an element",
                        next.slot_bytes()
                    ));
                }
                match self.algorithm {
                    Algorithm::Ring => {}
                    Algorithm::OneShot => self.check_one_shot(next.slot_bytes())?,
                    other => return fail(format!("no {other} program round a ring")),
                }
                if order.len() < 2 || order.len() != self.ranks as usize || order[0] != self.rank {
                    return fail(format!(
                        "ring order {order:?} must hold all {} ranks (2 or more), rank {} first",
                        self.ranks, self.rank
                    ));
                }
                let mut seen = order.to_vec();
                seen.sort_unstable();
                if !seen.iter().copied().eq(0..self.ranks) || self.root >= self.ranks {
                    return fail(format!(
                        "ring order {order:?} or root {} is no set of ranks",
                        self.root
                    ));
                }
            }
        }
        Ok(())
    }

    /// The part of [`Work::check`] for peer memory, where one kernel does all of an operation.
    fn check_peers(&self, peers: &PeerMemory) -> Result<(), WorkError> {
        let fail = |why: String| Err(WorkError(format!("op {} ({}): {why}", self.op, self.function)));
        let ranks = self.ranks as usize;
        if !(2..=MAX_PEERS).contains(&ranks) || peers.bases.len() != ranks || self.rank >= self.ranks {
            return fail(format!(
                "rank {} of {ranks}, which reaches the memory of {}: there must be 2 to {MAX_PEERS}",
                self.rank,
                peers.bases.len()
            ));
        }
        if self.part != (0..self.count) {
            return fail(format!(
                "part {:?} of {} elements: one kernel does it all",
                self.part, self.count
            ));
        }
        match self.algorithm {
            Algorithm::OneShot => self.check_one_shot(one_shot_bytes(ranks)),
            Algorithm::TwoShot if !has_two_shot(self.function, ranks) => {
                fail(format!("no two_shot program among {ranks} ranks"))
            }
            Algorithm::Direct if self.function.is_p2p() && self.root == self.rank => {
                fail("no message among peers goes to its own rank".into())
            }
            Algorithm::TwoShot | Algorithm::Direct if self.reduce_op == ReduceOp::PreMulSum => fail(
                "no program among peers for premulsum: each rank's factor is known to that rank alone".into(),
            ),
            Algorithm::TwoShot | Algorithm::Direct if self.root >= self.ranks => {
                fail(format!("root {} of {ranks} ranks", self.root))
            }
            Algorithm::TwoShot | Algorithm::Direct => Ok(()),
            other => fail(format!("no {other} program among peers")),
        }
    }

    fn check_one_shot(&self, slot_bytes: usize) -> Result<(), WorkError> {
        let fail = |why: String| Err(WorkError(format!("op {} ({}): {why}", self.op, self.function)));
        if self.function != Function::AllReduce {
            return fail("no one_shot program; it reduces on all ranks".into());
        }
        if self.reduce_op == ReduceOp::PreMulSum {
            return fail(
                "no one_shot program for premulsum: each rank's factor is known to that rank alone".into(),
            );
        }
        let bytes = self.part.len().saturating_mul(self.data_type.size());
        if bytes > slot_bytes {
            return fail(format!(
                "{bytes} bytes for a one_shot program that holds {slot_bytes}"
            ));
        }
        Ok(())
    }
}
