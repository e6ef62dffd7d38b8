//! One case on one rank: called, and compared with the reference.

use std::{
    ffi::c_int,
    hash::{DefaultHasher, Hasher},
};

use ringsight_comm::{abi, error::ResultCode};
use ringsight_records::{Function, ReduceOp};

use super::{
    cases::{Case, Residence, noise},
    numbers::{check_reduced, input_bits, scalar_bits},
};
use crate::common::{Rank, last_error, ok, state};

/// Bytes before and after a buffer that nobody may write to.
const GUARD: usize = 64;
const UNTOUCHED: u8 = 0xa5;

/// A buffer between guards.
struct Buffer {
    bytes: Vec<u8>,
}

impl Buffer {
    fn new(bytes: usize) -> Self {
        Self {
            bytes: vec![UNTOUCHED; bytes + 2 * GUARD],
        }
    }

    fn of(contents: &[u8]) -> Self {
        let mut buffer = Self::new(contents.len());
        buffer.contents_mut().copy_from_slice(contents);
        buffer
    }

    fn contents(&self) -> &[u8] {
        &self.bytes[GUARD..self.bytes.len() - GUARD]
    }

    fn contents_mut(&mut self) -> &mut [u8] {
        let end = self.bytes.len() - GUARD;
        &mut self.bytes[GUARD..end]
    }

    fn assert_guards(&self, case: &Case) {
        let guards = self.bytes[..GUARD]
            .iter()
            .chain(&self.bytes[self.bytes.len() - GUARD..]);
        assert!(
            guards.into_iter().all(|byte| *byte == UNTOUCHED),
            "{case:?} wrote beside a buffer"
        );
    }
}

/// Blocks of `count` elements in the (send, receive) buffers.
fn blocks(function: Function, ranks: usize) -> (usize, usize) {
    match function {
        Function::AllGather | Function::Gather => (1, ranks),
        Function::ReduceScatter | Function::Scatter => (ranks, 1),
        Function::AlltoAll => (ranks, ranks),
        _ => (1, 1),
    }
}

/// The bits of element `index` of rank `rank`'s send buffer.
fn input(case: &Case, (rank, ranks): (usize, usize), index: usize) -> u64 {
    if case.op == ReduceOp::None {
        noise(case.seed, (rank as u64) << 48 | index as u64)
    } else {
        input_bits((case.op, case.data_type), (rank, ranks), case.seed, index)
    }
}

/// Whose element `index` of rank `rank`'s receive buffer is of a function that moves: (rank, index in its send buffer);
/// `None` if there is no result.
fn source(case: &Case, rank: usize, index: usize) -> Option<(usize, usize)> {
    let (block, at) = (index / case.count, index % case.count);
    let is_root = rank == case.root;
    match case.function {
        Function::AllGather => Some((block, at)),
        Function::Gather => is_root.then_some((block, at)),
        Function::AlltoAll => Some((block, rank * case.count + at)),
        Function::Broadcast => Some((case.root, at)),
        Function::Scatter => Some((case.root, rank * case.count + at)),
        other => panic!("{other} does not only move"),
    }
}

impl Case {
    fn has_result(&self, rank: usize) -> bool {
        rank == self.root || !matches!(self.function, Function::Reduce | Function::Gather)
    }

    fn sends(&self, rank: usize) -> bool {
        rank == self.root || !matches!(self.function, Function::Broadcast | Function::Scatter)
    }

    /// Runs the case on this rank twice, checks the result, its surroundings and that both runs give the same bits; returns
    /// a hash of the result.
    pub fn run(&self, rank: &Rank) -> u64 {
        let result = self.once(rank);
        self.compare(rank, &result);
        assert!(
            self.once(rank) == result,
            "{self:?} gives other bits the second time"
        );
        let mut hasher = DefaultHasher::new();
        hasher.write(&result);
        hasher.finish()
    }

    /// The receive buffer, empty if this rank has no result.
    fn once(&self, rank: &Rank) -> Vec<u8> {
        let size = self.data_type.size();
        let (out_blocks, in_blocks) = blocks(self.function, rank.ranks);
        let block = self.count * size;
        let sent: Vec<u8> = (0..out_blocks * self.count)
            .flat_map(|index| input(self, (rank.rank, rank.ranks), index).to_le_bytes()[..size].to_vec())
            .collect();
        let (mut send, mut recv);
        let received = if self.in_place {
            // One buffer: the larger of the two, the smaller at its place in it.
            let mut both = Buffer::new(out_blocks.max(in_blocks) * block);
            let mine = if out_blocks == in_blocks {
                0
            } else {
                rank.rank * block
            };
            // Where a rank has no buffer of several blocks, its one block is all there is.
            let (mut from, mut to) = match out_blocks.cmp(&in_blocks) {
                std::cmp::Ordering::Less => (mine, 0),
                std::cmp::Ordering::Greater => (0, mine),
                std::cmp::Ordering::Equal => (0, 0),
            };
            if self.function == Function::Gather && rank.rank != self.root {
                to = from;
            }
            if self.function == Function::Scatter && rank.rank != self.root {
                from = to;
            }
            if self.sends(rank.rank) {
                both.contents_mut()[from..from + sent.len()].copy_from_slice(&sent);
            }
            let base = both.contents_mut().as_mut_ptr();
            self.call(rank, base.wrapping_add(from), base.wrapping_add(to));
            both.assert_guards(self);
            both.contents()[to..].get(..in_blocks * block).map(<[u8]>::to_vec)
        } else {
            send = Buffer::of(&sent);
            recv = Buffer::new(in_blocks * block);
            let (from, to) = (send.contents_mut().as_mut_ptr(), recv.contents_mut().as_mut_ptr());
            self.call(rank, from, to);
            assert!(send.contents() == sent, "{self:?} wrote to its send buffer");
            send.assert_guards(self);
            recv.assert_guards(self);
            if !self.has_result(rank.rank) {
                let untouched = recv.contents().iter().all(|byte| *byte == UNTOUCHED);
                assert!(untouched, "{self:?} wrote to a buffer that is not used");
            }
            Some(recv.contents().to_vec())
        };
        if self.has_result(rank.rank) {
            received.expect("a result has its place")
        } else {
            Vec::new()
        }
    }

    fn compare(&self, rank: &Rank, result: &[u8]) {
        let size = self.data_type.size();
        for (index, got) in result.chunks(size).enumerate() {
            let checked = if self.op == ReduceOp::None {
                let (from, at) = source(self, rank.rank, index).expect("there is a result");
                let expected = &input(self, (from, rank.ranks), at).to_le_bytes()[..size];
                (got == expected)
                    .then_some(())
                    .ok_or_else(|| format!("{got:x?} instead of {expected:x?}"))
            } else {
                let at = if self.function == Function::ReduceScatter {
                    rank.rank * self.count + index
                } else {
                    index
                };
                check_reduced((self.op, self.data_type), rank.ranks, self.seed, at, got)
            };
            if let Err(why) = checked {
                panic!(
                    "{self:?} on rank {} of {}, element {index}: {why}",
                    rank.rank, rank.ranks
                );
            }
        }
    }

    /// Calls it and waits for it.
    fn call(&self, rank: &Rank, send: *mut u8, recv: *mut u8) {
        let kind = c_int::from(self.data_type.code());
        let (root, count, comm, stream) = (self.root as c_int, self.count, rank.comm, rank.stream);
        let mut scalar = scalar_bits(self.data_type, self.seed, rank.rank);
        let (from, to) = (send.cast_const().cast(), recv.cast());
        // SAFETY: the buffers and the scalar have the sizes that the calls say, and live until the stream is
        // synchronized.
        unsafe {
            let mut op = c_int::from(self.op.code());
            if self.op == ReduceOp::PreMulSum {
                let place = (&raw mut scalar).cast();
                let residence = c_int::from(self.residence == Residence::Host);
                ok(abi::ncclRedOpCreatePreMulSum(
                    &raw mut op,
                    place,
                    kind,
                    residence,
                    comm,
                ));
            }
            ok(match self.function {
                Function::AllReduce => abi::ncclAllReduce(from, to, count, kind, op, comm, stream),
                Function::AllGather => abi::ncclAllGather(from, to, count, kind, comm, stream),
                Function::ReduceScatter => abi::ncclReduceScatter(from, to, count, kind, op, comm, stream),
                Function::Broadcast => abi::ncclBroadcast(from, to, count, kind, root, comm, stream),
                Function::Reduce => abi::ncclReduce(from, to, count, kind, op, root, comm, stream),
                Function::AlltoAll => abi::ncclAlltoAll(from, to, count, kind, comm, stream),
                Function::Gather => abi::ncclGather(from, to, count, kind, root, comm, stream),
                Function::Scatter => abi::ncclScatter(from, to, count, kind, root, comm, stream),
                other => panic!("{other} is no collective"),
            });
            if self.op == ReduceOp::PreMulSum {
                // The operation keeps what it needs.
                ok(abi::ncclRedOpDestroy(op, comm));
            }
        }
        rank.synchronize();
        // What has failed leaves the stream like what is done.
        assert_eq!(
            state(rank.comm),
            ResultCode::Success,
            "{self:?}: {}",
            last_error()
        );
    }
}
