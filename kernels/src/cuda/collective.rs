//! Collectives by peer kernels: which kernel of `cuda/collective.cuh` runs, with which arguments.
//!
//! A rank sends something to each other rank and receives something from it. Short operations go through peer memory in LL128 rows: lines of
//! 120 bytes of data with a flag behind them. Long ones are zero-copy where all ranks reach each other's buffers.
//!
//! All ranks must come to the same chunks, blocks and kernel kind, since their blocks wait for each other. So these follow from the function,
//! the counts and the communicator alone, except that each rank may choose a kernel for unaligned buffers.

use std::ffi::CStr;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::{
    layout::{Collective, NO_ROOT, PeerCall, buffer_address},
    peer_launch::{MAX_BLOCKS, PeerArguments, PeerLaunch, SERVICE_THREADS, sum_kernel},
    peer_memory::{
        MAX_PEERS, MAX_ZERO_COPY_BLOCKS, ROW_BYTES, chunk_rows, imports_offset, lanes, max_push_chunk,
        push_counters_offset,
    },
};
use crate::launch::{PeerMemory, Work, ZeroCopy};

/// The most rows of a chunk that a kernel of two ranks loads as a whole: `EXACT` in `cuda/collective.cuh`.
const EXACT_ROWS: usize = 5;

/// Names of the kernels by number: `RINGSIGHT_COLLECTIVES` in `cuda/collective.cuh`.
pub const KERNELS: [&CStr; 26] = [
    c"ringsight_zero_copy_elements",
    c"ringsight_zero_copy_words",
    c"ringsight_zero_copy_any",
    c"ringsight_zero_copy_sum_f32_2",
    c"ringsight_zero_copy_sum_f32_4",
    c"ringsight_zero_copy_sum_f32_8",
    c"ringsight_zero_copy_sum_f16_2",
    c"ringsight_zero_copy_sum_f16_4",
    c"ringsight_zero_copy_sum_f16_8",
    c"ringsight_zero_copy_sum_bf16_2",
    c"ringsight_zero_copy_sum_bf16_4",
    c"ringsight_zero_copy_sum_bf16_8",
    c"ringsight_ll128_elements",
    c"ringsight_ll128_words",
    c"ringsight_ll128_any",
    c"ringsight_ll128_sum_f32_2",
    c"ringsight_ll128_sum_f32_4",
    c"ringsight_ll128_sum_f32_8",
    c"ringsight_ll128_sum_f16_2",
    c"ringsight_ll128_sum_f16_4",
    c"ringsight_ll128_sum_f16_8",
    c"ringsight_ll128_sum_bf16_2",
    c"ringsight_ll128_sum_bf16_4",
    c"ringsight_ll128_sum_bf16_8",
    c"ringsight_ll128_words_4",
    c"ringsight_ll128_words_8",
];

/// Kinds of kernels: one of each that may be zero-copy, then one of each for LL128 only.
const KINDS: usize = 12;
/// The kind that copies aligned words. For LL128 two more follow all kinds: among 4 and among 8 ranks.
const WORDS: usize = 1;
/// The kind that does any reduction. The kinds of [`sum_kernel`] follow it.
const ANY: usize = 2;

/// Data warps of a block. Two such blocks fit on a multiprocessor: see [`MAX_BLOCKS`].
const WARPS: usize = 7;
/// Data warps of a block that stores into other ranks' buffers (zero-copy), or into peer memory of more than one other rank (LL128). There are
/// twice as many such blocks of half the threads: more multiprocessors store faster, and the blocks take no more room. Kernels that only
/// load gain nothing. Nor does LL128 between two ranks, which would have 384 warps instead of 448.
const HALF_WARPS: usize = 3;
/// The fewest chunks that a block pushes, where they are long enough.
const CHUNKS: usize = 4;
/// Threads of a block with `warps` data warps.
const fn threads(warps: usize) -> u32 {
    warps as u32 * 32 + SERVICE_THREADS
}

/// Data warps of a block.
const fn warps(ranks: usize, zero_copy: bool, only_loads: bool) -> usize {
    match zero_copy {
        true if only_loads => WARPS,
        false if ranks <= 2 => WARPS,
        _ => HALF_WARPS,
    }
}

/// Threads of a block of a collective. A zero-copy reduction only loads if its contributions are not pushed and its result is not forwarded.
#[must_use]
pub fn collective_threads(
    function: Function,
    algorithm: Algorithm,
    ranks: usize,
    zero_copy: bool,
    pushes: bool,
) -> u32 {
    let only_loads = !pushes && algorithm == Algorithm::Direct && function.reduces();
    threads(warps(ranks, zero_copy, only_loads))
}

/// The launch of a collective. The caller sets where it reports to. All its blocks must run side by side, since they wait for those of the
/// other ranks.
pub(super) fn launch(work: &Work, call: PeerCall, peers: &PeerMemory) -> PeerLaunch {
    let mut arguments = parts(work, call);
    let rows = (arguments.longest_part as usize).div_ceil(ROW_BYTES);
    let ranks = work.ranks as usize;
    let lanes = lanes(ranks);
    // Zero-copy needs no memory for lanes. If the ranks fall back to LL128, the warps beyond the lanes do nothing.
    let zero_copy = work.zero_copy != ZeroCopy::Off;
    let only_loads = arguments.reduces == 1 && arguments.forwards == 0 && !work.pushes;
    let warps = warps(ranks, zero_copy, only_loads);
    let most = if warps == HALF_WARPS {
        MAX_ZERO_COPY_BLOCKS
    } else {
        MAX_BLOCKS as usize
    };
    let most = if zero_copy { most } else { most.min(lanes / warps) };
    let most = (peers.max_blocks as usize).clamp(1, most);
    // One lane per row, as far as lanes go; then more rows per lane.
    let blocks = rows.div_ceil(warps).clamp(1, most);
    // As few steps as possible, all of about the same length.
    let each = rows.div_ceil(lanes.min(blocks * warps)).max(1);
    // Reductions have shorter chunks: while a rank reduces some, others travel. A short reduction has chunks that a kernel of two ranks
    // loads at once. A longer one has the number of rows that fills the link best: `docs/decisions/0002-one-shot-and-ll128.md`.
    let most_rows = match (arguments.reduces, arguments.forwards) {
        (1, _) if each <= 2 * EXACT_ROWS => EXACT_ROWS,
        (1, 1) => 4,
        (1, _) if each <= 24 => 8,
        _ => chunk_rows(ranks),
    };
    let chunk_rows = each.div_ceil(each.div_ceil(most_rows));
    arguments.chunk = (chunk_rows * ROW_BYTES) as u32;
    arguments.push_chunk = match (work.pushes, is_relayed(&arguments)) {
        (true, _) => push_chunk(ranks, arguments.longest_part as usize, blocks),
        (false, true) => RELAY_CHUNK,
        (false, false) => 0,
    };
    let kind = kind(work, &arguments);
    if let ZeroCopy::Reachable { send, recv } = work.zero_copy
        && is_zero_copy(kind, &arguments)
    {
        arguments.reachable = 1;
        (arguments.recv_generation, arguments.send_generation) = (recv.generation, send.generation);
        for rank in 0..peers.bases.len() {
            let is_foreign = peers.is_foreign(rank as u32);
            arguments.address_to[rank] = buffer_address(recv, arguments.to[rank], is_foreign);
            arguments.address_from[rank] = buffer_address(send, arguments.from[rank], is_foreign);
        }
    }
    PeerLaunch {
        kernel: kernel(kind, ranks, zero_copy, is_relayed(&arguments)),
        arguments: PeerArguments::Collective(arguments),
        blocks: blocks as u32,
        threads: threads(warps),
    }
}

/// Bytes of a chunk that each of `blocks` blocks pushes of a part; 0 if no kernel pushes among `ranks` ranks.
fn push_chunk(ranks: usize, part: usize, blocks: usize) -> u32 {
    let most = max_push_chunk(ranks);
    if most == 0 {
        return 0;
    }
    // What all warps of a block have in flight at once. A block has several chunks: while one is reduced, the next ones travel.
    let round = HALF_WARPS * 16 / ranks * 512;
    let each = part.div_ceil(blocks * CHUNKS).next_multiple_of(round);
    each.min(most / round * round) as u32
}

/// Whether it is a broadcast in which each rank but the root forwards a part.
fn is_relayed(arguments: &Collective) -> bool {
    arguments.forwards == 1 && arguments.reduces == 0
}

/// Bytes of a chunk that a block of a relayed broadcast forwards: what its warps have in flight at once. Longer chunks were slower, since a
/// forwarding rank lags behind the root by one chunk.
const RELAY_CHUNK: u32 = HALF_WARPS as u32 * 8 * 512;

/// The number of a kernel in [`KERNELS`]. A relayed broadcast has no kernel for a fixed number of ranks.
fn kernel(kind: usize, ranks: usize, zero_copy: bool, relayed: bool) -> usize {
    match (zero_copy, kind, ranks) {
        (true, ..) => kind,
        _ if relayed => KINDS + kind,
        (false, WORDS, 4) => 2 * KINDS,
        (false, WORDS, 8) => 2 * KINDS + 1,
        (false, ..) => KINDS + kind,
    }
}

/// The most specialised kind of kernel that does the work.
fn kind(work: &Work, arguments: &Collective) -> usize {
    let ranks = work.ranks as usize;
    let words = |addresses: &[u64], lengths: &[u64]| {
        addresses
            .iter()
            .zip(lengths)
            .all(|(address, length)| *length == 0 || address.is_multiple_of(8) && length.is_multiple_of(8))
    };
    let own = [arguments.result_bytes; 2];
    // The root of a relayed broadcast has no part, and copies all that it sends to its own receive buffer.
    let kept = if is_relayed(arguments) {
        arguments.longest_part
    } else {
        0
    };
    let aligned = words(&arguments.from[..ranks], &arguments.sends[..ranks])
        && words(&arguments.to[..ranks], &arguments.takes[..ranks])
        && words(&[arguments.own, arguments.result], &own)
        && words(&[arguments.own, arguments.result], &[kept; 2]);
    if arguments.reduces == 0 {
        return usize::from(aligned);
    }
    let sum = sum_kernel(work.reduce_op, work.data_type, work.ranks);
    sum.filter(|_| aligned).map_or(ANY, |sum| ANY + 1 + sum)
}

/// Whether there is an [`Algorithm::TwoShot`] program of it. A rooted function has one if ranks have others to forward to.
#[must_use]
pub fn has_two_shot(function: Function, ranks: usize) -> bool {
    match function {
        Function::AllReduce => true,
        Function::Broadcast | Function::Reduce => ranks > 2,
        _ => false,
    }
}

/// Whether a specialised kernel does this reduction among `ranks` ranks. Zero-copy, pushed and copy-engine reductions need one.
#[must_use]
pub fn has_sum_kernel(reduce_op: ReduceOp, data_type: DataType, ranks: u32) -> bool {
    sum_kernel(reduce_op, data_type, ranks).is_some()
}

/// Whether a collective on these buffers can be zero-copy if all ranks reach them. A rank with unaligned buffers says no, and then all ranks
/// use LL128.
#[must_use]
pub fn can_zero_copy(work: &Work) -> bool {
    let arguments = parts(work, PeerCall::default());
    is_zero_copy(kind(work, &arguments), &arguments)
}

/// Zero-copy reductions need a specialised kernel, and zero-copy buffers are read and written 16 bytes at a time.
fn is_zero_copy(kind: usize, arguments: &Collective) -> bool {
    let addresses = arguments.from.iter().chain(&arguments.to);
    kind != ANY
        && addresses
            .chain([&arguments.own, &arguments.result])
            .all(|address| address.is_multiple_of(16))
}

/// The arguments but for chunks and buffer addresses.
pub(super) fn parts(work: &Work, call: PeerCall) -> Collective {
    let (ranks, me, root) = (work.ranks as usize, work.rank as usize, work.root as usize);
    let (send, recv) = (work.send as u64, work.recv as u64);
    let bytes = (work.count * work.data_type.size()) as u64;
    let is_root = me == root;
    let mut all = Collective {
        call,
        from: [0; MAX_PEERS],
        sends: [0; MAX_PEERS],
        to: [0; MAX_PEERS],
        takes: [0; MAX_PEERS],
        own: send,
        result: recv,
        result_bytes: bytes,
        longest_part: bytes,
        chunk: 0,
        reduces: work.function.reduces().into(),
        forwards: 0,
        zero_copy: (work.zero_copy != ZeroCopy::Off).into(),
        reachable: 0,
        address_to: [0; MAX_PEERS],
        address_from: [0; MAX_PEERS],
        recv_generation: 0,
        send_generation: 0,
        imports_offset: imports_offset(ranks) as u64,
        push_counters_offset: push_counters_offset(ranks) as u64,
        push_chunk: 0,
        root: NO_ROOT,
    };
    if work.algorithm == Algorithm::TwoShot {
        set_parts(work, &mut all);
        return all;
    }
    // A buffer has one block per rank.
    let block = |base: u64, rank: usize| base + bytes * rank as u64;
    for rank in (0..ranks).filter(|rank| *rank != me) {
        let (from, to) = match work.function {
            Function::AllReduce => (Some((send, bytes)), None),
            Function::ReduceScatter => (Some((block(send, rank), bytes)), None),
            Function::AllGather => (Some((send, bytes)), Some((block(recv, rank), bytes))),
            Function::AlltoAll => (Some((block(send, rank), bytes)), Some((block(recv, rank), bytes))),
            Function::Broadcast => (
                is_root.then_some((send, bytes)),
                (rank == root).then_some((recv, bytes)),
            ),
            Function::Reduce => ((rank == root).then_some((send, bytes)), None),
            Function::Gather => (
                (rank == root).then_some((send, bytes)),
                is_root.then(|| (block(recv, rank), bytes)),
            ),
            Function::Scatter => (
                is_root.then(|| (block(send, rank), bytes)),
                (rank == root).then_some((recv, bytes)),
            ),
            Function::Send | Function::Recv => (None, None),
        };
        (all.from[rank], all.sends[rank]) = from.unwrap_or_default();
        (all.to[rank], all.takes[rank]) = to.unwrap_or_default();
    }
    match work.function {
        Function::ReduceScatter => all.own = block(send, me),
        Function::AllGather => all.result = block(recv, me),
        Function::AlltoAll => (all.own, all.result) = (block(send, me), block(recv, me)),
        Function::Gather if is_root => all.result = block(recv, me),
        Function::Scatter if is_root => all.own = block(send, me),
        Function::Broadcast | Function::Reduce | Function::Gather | Function::Scatter if !is_root => {
            all.result_bytes = 0;
        }
        _ => {}
    }
    all
}

/// Sets what goes where in a two-shot operation: each rank (in a rooted function, each rank but the root) owns a part and forwards it to
/// the ranks that need it. Those are all other ranks, or the root of a Reduce. In a Broadcast the parts come from the root.
fn set_parts(work: &Work, all: &mut Collective) {
    let (me, root) = (work.rank as usize, work.root as usize);
    let (send, recv) = (work.send as u64, work.recv as u64);
    let is_root = me == root;
    let parts = Parts::of(work);
    // Whether this rank sends the other ranks their parts, and whether it receives their results.
    let (sends, takes) = match work.function {
        Function::Broadcast => (is_root, !is_root),
        Function::Reduce => (true, is_root),
        _ => (true, true),
    };
    for rank in (0..work.ranks as usize).filter(|rank| *rank != me) {
        let (start, length) = parts.of_rank(rank);
        if sends {
            (all.from[rank], all.sends[rank]) = (send + start, length);
        }
        if takes {
            (all.to[rank], all.takes[rank]) = (recv + start, length);
        }
    }
    let (start, length) = parts.of_rank(me);
    (all.own, all.result, all.result_bytes) = (send + start, recv + start, length);
    match work.function {
        Function::Broadcast if !is_root => {
            all.own = all.result;
            // The root writes this rank's part there.
            all.to[root] = all.result;
        }
        // Only the root has a receive buffer.
        Function::Reduce if !is_root => all.result = all.own,
        _ => {}
    }
    (all.longest_part, all.forwards) = (parts.longest, 1);
    all.root = parts.root.map_or(NO_ROOT, |_| work.root);
}

/// The parts of a two-shot operation, in bytes. Every part starts at a multiple of 16 bytes from the start of the buffer.
struct Parts {
    all: u64,
    /// Length of every part but the last ones.
    longest: u64,
    /// The rank that has no part.
    root: Option<usize>,
}

impl Parts {
    fn of(work: &Work) -> Self {
        let root = (work.function != Function::AllReduce).then_some(work.root as usize);
        let all = (work.count * work.data_type.size()) as u64;
        let number = work.ranks - u32::from(root.is_some());
        Self {
            all,
            longest: all.div_ceil(u64::from(number)).next_multiple_of(16),
            root,
        }
    }

    /// Offset and length of a rank's part.
    fn of_rank(&self, rank: usize) -> (u64, u64) {
        let at = match self.root {
            Some(root) if rank == root => return (0, 0),
            Some(root) if rank > root => rank - 1,
            _ => rank,
        };
        let start = (self.longest * at as u64).min(self.all);
        (start, self.longest.min(self.all - start))
    }
}

#[cfg(test)]
mod tests;
