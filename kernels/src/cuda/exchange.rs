//! Collectives among peers: what `cuda/exchange.cuh` is given.

use std::ffi::CStr;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::{
    layout::{Exchange, NO_ROOT, PeerCall},
    peer_launch::{MOST_BLOCKS, PeerArguments, PeerLaunch, SERVICE, kernel_of_sum},
    peers::{
        MAX_PEERS, ROW_BYTES, STRAIGHT_BLOCKS, chunk_rows, lanes, mappings_offset, push_chunk, pushed_offset,
    },
};
use crate::launch::{Peers, Straight, Work};

/// The longest chunk that a kernel of two ranks asks for as a whole, in rows: `EXACT` in `cuda/exchange.cuh`.
const EXACT_ROWS: usize = 5;

/// Names of the kernels, by their numbers: `RINGSIGHT_EXCHANGES` in `cuda/exchange.cuh`.
pub const KERNELS: [&CStr; 26] = [
    c"ringsight_straight_elements",
    c"ringsight_straight_words",
    c"ringsight_straight_any",
    c"ringsight_straight_sum_f32_2",
    c"ringsight_straight_sum_f32_4",
    c"ringsight_straight_sum_f32_8",
    c"ringsight_straight_sum_f16_2",
    c"ringsight_straight_sum_f16_4",
    c"ringsight_straight_sum_f16_8",
    c"ringsight_straight_sum_bf16_2",
    c"ringsight_straight_sum_bf16_4",
    c"ringsight_straight_sum_bf16_8",
    c"ringsight_lines_elements",
    c"ringsight_lines_words",
    c"ringsight_lines_any",
    c"ringsight_lines_sum_f32_2",
    c"ringsight_lines_sum_f32_4",
    c"ringsight_lines_sum_f32_8",
    c"ringsight_lines_sum_f16_2",
    c"ringsight_lines_sum_f16_4",
    c"ringsight_lines_sum_f16_8",
    c"ringsight_lines_sum_bf16_2",
    c"ringsight_lines_sum_bf16_4",
    c"ringsight_lines_sum_bf16_8",
    c"ringsight_lines_words_4",
    c"ringsight_lines_words_8",
];

/// Kinds of kernels: first one of each for what may go straight, then for what goes in lines.
const KINDS: usize = 12;
/// The kind that copies words. In lines there are two more of it behind all kinds: among 4 and among 8 ranks.
const WORDS: usize = 1;
/// The kind that reduces anything; those of [`kernel_of_sum`] are behind it.
const ANY: usize = 2;

/// Warps of a block that move data. Two such blocks fit on a multiprocessor: see [`MOST_BLOCKS`].
const WARPS: usize = 7;
/// The same of what stores straight into others' buffers, or in lines to more than one other rank: twice as many blocks, since more multiprocessors store
/// more, of half the threads, so that they take no more room. What only loads is no faster so, nor are lines between two ranks, of which there would be 384
/// instead of 448.
const HALF_WARPS: usize = 3;
/// Chunks that a block pushes at least, where they are long enough.
const CHUNKS: usize = 4;
/// Threads of a block of which so many warps move data.
const fn threads(warps: usize) -> u32 {
    warps as u32 * 32 + SERVICE
}

/// Warps of a block that move data.
const fn warps(ranks: usize, straight: bool, only_loads: bool) -> usize {
    match straight {
        true if only_loads => WARPS,
        false if ranks <= 2 => WARPS,
        _ => HALF_WARPS,
    }
}

/// Threads of a block of a collective in lines, or straight, by loads alone if contributions are neither pushed nor passed on when they are reduced.
#[must_use]
pub fn exchange_threads(
    function: Function,
    algorithm: Algorithm,
    ranks: usize,
    straight: bool,
    pushes: bool,
) -> u32 {
    let only_loads = !pushes && algorithm == Algorithm::Direct && function.reduces();
    threads(warps(ranks, straight, only_loads))
}

/// The launch of a collective, but for where it reports to. All blocks must run side by side, since they wait for those of the others.
pub(super) fn launch(work: &Work, call: PeerCall, peers: &Peers) -> PeerLaunch {
    let mut arguments = parts(work, call);
    let rows = (arguments.piece as usize).div_ceil(ROW_BYTES);
    let ranks = work.ranks as usize;
    let lanes = lanes(ranks);
    // What goes straight takes no memory for lanes: if it does not, in the end, some warps have nothing to do.
    let straight = work.straight != Straight::No;
    let only_loads = arguments.reduces == 1 && arguments.passes == 0 && !work.pushes;
    let warps = warps(ranks, straight, only_loads);
    let most = if warps == HALF_WARPS {
        STRAIGHT_BLOCKS
    } else {
        MOST_BLOCKS as usize
    };
    let most = if straight { most } else { most.min(lanes / warps) };
    let most = (peers.most_blocks as usize).clamp(1, most);
    // A lane for each row, as far as that goes; then more rows for each.
    let blocks = rows.div_ceil(warps).clamp(1, most);
    // As few steps as that takes, all of about the same length.
    let each = rows.div_ceil(lanes.min(blocks * warps)).max(1);
    // Chunks that are reduced are shorter: while a rank reduces some, others travel. Where there are few, they are as long as a kernel of
    // two ranks asks for at once, and else of as many rows as take the link best: `docs/decisions/0002-one-shot-and-ll128.md`.
    let most_rows = match (arguments.reduces, arguments.passes) {
        (1, _) if each <= 2 * EXACT_ROWS => EXACT_ROWS,
        (1, 1) => 4,
        (1, _) if each <= 24 => 8,
        _ => chunk_rows(ranks),
    };
    let chunk_rows = each.div_ceil(each.div_ceil(most_rows));
    arguments.chunk = (chunk_rows * ROW_BYTES) as u32;
    arguments.push = match (work.pushes, is_relayed(&arguments)) {
        (true, _) => pushed(ranks, arguments.piece as usize, blocks),
        (false, true) => RELAYED,
        (false, false) => 0,
    };
    let kind = kind(work, &arguments);
    if let Straight::Open { sent, received } = work.straight
        && goes_straight(kind, &arguments)
    {
        arguments.open = 1;
        (arguments.received, arguments.sent) = (received.generation, sent.generation);
        for rank in 0..peers.bases.len() {
            let is_foreign = peers.is_foreign(rank as u32);
            arguments.place_to[rank] = received.place(arguments.to[rank], is_foreign);
            arguments.place_from[rank] = sent.place(arguments.from[rank], is_foreign);
        }
    }
    PeerLaunch {
        kernel: kernel(kind, ranks, straight, is_relayed(&arguments)),
        arguments: PeerArguments::Exchange(arguments),
        blocks: blocks as u32,
        threads: threads(warps),
        between: None,
    }
}

/// Bytes of a chunk that each of so many blocks pushes of a piece; 0 where no kernel does.
fn pushed(ranks: usize, piece: usize, blocks: usize) -> u32 {
    let most = push_chunk(ranks);
    if most == 0 {
        return 0;
    }
    // What all warps of a block have under way at once. Some chunks a block: while one is reduced, the next ones travel.
    let round = HALF_WARPS * 16 / ranks * 512;
    let each = piece.div_ceil(blocks * CHUNKS).next_multiple_of(round);
    each.min(most / round * round) as u32
}

/// Whether it is a broadcast of which each rank but the root passes on a part.
fn is_relayed(arguments: &Exchange) -> bool {
    arguments.passes == 1 && arguments.reduces == 0
}

/// Bytes of a chunk that a block passes on: what all of its warps have under way at once. Longer ones, of which there are fewer, were measured: what is
/// passed on lags behind by a chunk.
const RELAYED: u32 = HALF_WARPS as u32 * 8 * 512;

/// The number of a kernel of [`KERNELS`]. (What is relayed has none for a number of ranks.)
fn kernel(kind: usize, ranks: usize, straight: bool, relayed: bool) -> usize {
    match (straight, kind, ranks) {
        (true, ..) => kind,
        _ if relayed => KINDS + kind,
        (false, WORDS, 4) => 2 * KINDS,
        (false, WORDS, 8) => 2 * KINDS + 1,
        (false, ..) => KINDS + kind,
    }
}

/// The kind of kernel that is made for it, or of one that does anything.
fn kind(work: &Work, arguments: &Exchange) -> usize {
    let ranks = work.ranks as usize;
    let words = |addresses: &[u64], lengths: &[u64]| {
        addresses
            .iter()
            .zip(lengths)
            .all(|(address, length)| *length == 0 || address.is_multiple_of(8) && length.is_multiple_of(8))
    };
    let own = [arguments.result_bytes; 2];
    // The root of what is relayed has no part, and keeps all that it sends.
    let kept = if is_relayed(arguments) { arguments.piece } else { 0 };
    let whole = words(&arguments.from[..ranks], &arguments.sends[..ranks])
        && words(&arguments.to[..ranks], &arguments.takes[..ranks])
        && words(&[arguments.own, arguments.result], &own)
        && words(&[arguments.own, arguments.result], &[kept; 2]);
    if arguments.reduces == 0 {
        return usize::from(whole);
    }
    let sum = kernel_of_sum(work.reduce_op, work.data_type, work.ranks);
    sum.filter(|_| whole).map_or(ANY, |sum| ANY + 1 + sum)
}

/// Whether there is a program of [`Algorithm::TwoShot`] of it. With a root there is if any rank has others to pass something on to.
#[must_use]
pub fn has_two_shots(function: Function, ranks: usize) -> bool {
    match function {
        Function::AllReduce => true,
        Function::Broadcast | Function::Reduce => ranks > 2,
        _ => false,
    }
}

/// Whether there is a kernel that reduces so, among so many ranks, straight between callers' buffers.
#[must_use]
pub fn reduces_straight(reduce_op: ReduceOp, data_type: DataType, ranks: u32) -> bool {
    kernel_of_sum(reduce_op, data_type, ranks).is_some()
}

/// Whether a collective goes straight between callers' buffers if all ranks reach them: else in lines, on all ranks alike, for it is of one type
/// and reduction and among as many ranks, and who has buffers that begin elsewhere says so.
#[must_use]
pub fn can_go_straight(work: &Work) -> bool {
    let arguments = parts(work, PeerCall::default());
    goes_straight(kind(work, &arguments), &arguments)
}

/// Whether a kernel does it straight if it is to: of what reduces those that are made for it do, and buffers are gone through by 16 bytes.
fn goes_straight(kind: usize, arguments: &Exchange) -> bool {
    let places = arguments.from.iter().chain(&arguments.to);
    kind != ANY
        && places
            .chain([&arguments.own, &arguments.result])
            .all(|address| address.is_multiple_of(16))
}

/// What goes where: everything but the length of a chunk.
pub(super) fn parts(work: &Work, call: PeerCall) -> Exchange {
    let (ranks, me, root) = (work.ranks as usize, work.rank as usize, work.root as usize);
    let (send, recv) = (work.send as u64, work.recv as u64);
    let bytes = (work.count * work.data_type.size()) as u64;
    let is_root = me == root;
    let mut all = Exchange {
        call,
        from: [0; MAX_PEERS],
        sends: [0; MAX_PEERS],
        to: [0; MAX_PEERS],
        takes: [0; MAX_PEERS],
        own: send,
        result: recv,
        result_bytes: bytes,
        piece: bytes,
        chunk: 0,
        reduces: work.function.reduces().into(),
        passes: 0,
        straight: (work.straight != Straight::No).into(),
        open: 0,
        place_to: [0; MAX_PEERS],
        place_from: [0; MAX_PEERS],
        received: 0,
        sent: 0,
        mappings_at: mappings_offset(ranks) as u64,
        pushed_at: pushed_offset(ranks) as u64,
        push: 0,
        root: NO_ROOT,
    };
    if work.algorithm == Algorithm::TwoShot {
        give_parts(work, &mut all);
        return all;
    }
    // Blocks of a buffer, one of each rank.
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

/// What goes where if each rank, or each but the root, has a part, which it passes on to who needs it: all others', or of a reduction with a root that
/// one's. Of a broadcast it gets it from the root.
fn give_parts(work: &Work, all: &mut Exchange) {
    let (me, root) = (work.rank as usize, work.root as usize);
    let (send, recv) = (work.send as u64, work.recv as u64);
    let is_root = me == root;
    let parts = Parts::of(work);
    // Of the others' parts.
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
            // Where the root writes.
            all.to[root] = all.result;
        }
        // The receive buffer is the root's.
        Function::Reduce if !is_root => all.result = all.own,
        _ => {}
    }
    (all.piece, all.passes) = (parts.longest, 1);
    all.root = parts.root.map_or(NO_ROOT, |_| work.root);
}

/// The parts of an operation, in bytes: whole words as far as there are some, so that all begin where words do if the buffer does.
struct Parts {
    all: u64,
    /// Of each but the last ones.
    longest: u64,
    /// Who has none.
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

    /// Where a rank's begins, and its length.
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
