// Reductions whose bytes are moved by copy engines: each rank has a part, as in a reduction straight between buffers, and goes through it piece by
// piece. What the others have for a piece is copied into memory beside it, this kernel reduces it from there, and the result is copied into the others'
// receive buffers. The host queues copies and kernels; the kernels of gates.cuh stand before and behind all of them.
//
// - A piece has come when all others say that their copies of it are done. The kernel says so of this rank's: they come before it in its
//   stream, so they are done for all processors, and its fence and its flag come after them. What tells is the word that `Meeting::leave` uses for
//   a block, of a number that no block of an operation by copy engines has: word 0 is that of the gates.
// - Two slots are enough, taken in turn. Who copies piece p + 2 into the slots of piece p has reduced piece p + 1, so it has heard from all others
//   that their copies of p + 1 are done, which these tell in a kernel behind the one that has reduced p: all others have read what was in those slots.
// - Results are those of the kernels, bit by bit: contributions are combined in the order of ranks.
#pragma once

#include "meeting.cuh"
#include "straight.cuh"

namespace ringsight {

// One block. Of the arguments, `from` says where the others' contributions to the piece have come, `own` and `result` are this rank's, of
// `result_bytes` bytes, and `chunk` is the number of the piece.
template <class E, class Op, u32 RANKS>
DEVICE INLINE void reduce_piece(const Exchange& arguments, u32 block, u32 blocks, volatile u64& place) {
  const Meeting<RANKS> meeting(arguments.call, block, blocks, place);
  if (!meeting.have_come(1 + arguments.chunk)) return;
  using Words = Folding<E, Op, RANKS, RANKS>;
  constexpr u32 PACKS = of_all_ranks<8, RANKS>();
  const Words folding(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks);
  // Nothing is passed on.
  const Places nowhere{};
  const auto from = [&](u32 rank) { return arguments.from[rank]; };
  const Reduction<PACKS, Words, decltype(from)> reduction(arguments, folding, nowhere, from);
  const u32 warps = threads() / warp_threads(), warp = block * warps + thread_index() / warp_threads();
  const u64 stride = static_cast<u64>(blocks) * warps * reduction.BYTES;
  for (u64 at = static_cast<u64>(warp) * reduction.BYTES; at < arguments.result_bytes; at += stride) reduction.run(at);
}

// The kernels: {name, element, combination, ranks}; src/cuda/pieces.rs chooses. Sums have a factor, see exchange.cuh.
#define RINGSIGHT_PIECES(X) RINGSIGHT_SUMS(X, ringsight_piece)

}  // namespace ringsight
