// Long reductions by stores alone. Over NVLink, loads are slower than stores. So contributions are pushed into slots, and only results go
// straight into callers' buffers.
//
// Each block writes a chunk of its contribution for each other rank into slots there and signals the same block of that rank (chunk_flags.cuh).
// That block reduces the chunk from its own memory when all contributions have arrived, and forwards the result. A block pushes `PUSH_AHEAD`
// chunks ahead of what it reduces, so that it waits neither for the fence nor for the link while there is more to move.
//
// Four slots are enough without any word about free slots. Before a block pushes chunk c, it has seen the other blocks' signal for chunk c - 2.
// They signalled after a barrier behind which none of their threads was still reducing chunk c - 4, since before chunk c - 2 each of them
// pushed c - 3 and reduced c - 4. Chunk c reuses the slot of c - 4. The others read that slot before their signal, and this block writes after
// it has acquired the signal.
//
// In an earlier operation chunks may have had another length, and slots other places. A rank that begins this operation has reduced all of
// those, and no rank writes before all have begun (`CollectiveBlock::agree`).
//
// It works in place: the rank that reduces a part of a buffer writes it only where it has been read.
#pragma once

#include "chunk_flags.cuh"
#include "zero_copy.cuh"

namespace ringsight {

// One block of a kernel that sums elements `E` of `RANKS` ranks.
template <class E, class Op, u32 RANKS>
class PushBlock {
 public:
  DEVICE PushBlock(const Collective& arguments, const BufferAddresses& places, u32 block, u32 blocks)
      : arguments_(arguments),
        addresses_(places),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        flags_(arguments, block),
        block_(block),
        blocks_(blocks),
        push_chunk_(arguments.push_chunk) {}

  // All threads call this. False: give up.
  DEVICE INLINE bool run() {
    const bool moves = Barrier<RANKS>::moves_data(), signals = flags_.is_signaller();
    u32 chunk = 0;
    for (; chunk < PUSH_AHEAD || is_any(chunk) || is_any(chunk - PUSH_AHEAD); chunk++) {
      const bool pushes = is_any(chunk), reduces = chunk >= PUSH_AHEAD && is_any(chunk - PUSH_AHEAD);
      if (moves && pushes) push(chunk);
      const bool here = !signals || !reduces || flags_.wait(chunk + 1 - PUSH_AHEAD);
      if (block_any(!here)) return false;
      if (moves && reduces) reduce(chunk - PUSH_AHEAD);
      if (signals && pushes) flags_.signal(chunk + 1);
      if (signals) flags_.moved(chunk + 1);
    }
    flags_.end(chunk - PUSH_AHEAD);
    return true;
  }

 private:
  using Words = Folding<E, Op, RANKS, RANKS>;
  // Packs that a thread has in flight at once.
  static constexpr u32 PACKS = of_all_ranks<8, RANKS>();
  static constexpr u32 BYTES = PACKS * warp_threads() * sizeof(Pack);

  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u64 base(u32 rank) const { return arguments_.call.bases[rank] + arguments_.push_counters_offset; }
  // Address in `rank`'s memory of a chunk that `source` pushes to it.
  DEVICE INLINE u64 slot(u32 rank, u32 source, u32 chunk) const {
    const u32 other = source < rank ? source : source - 1;
    return base(rank) + sizeof(PushCounters) + ((static_cast<u64>(other) * blocks_ + block_) * PUSH_SLOTS + chunk % PUSH_SLOTS) * push_chunk_;
  }
  // Where a chunk of this block begins in each part.
  DEVICE INLINE u64 start(u32 chunk) const { return (static_cast<u64>(chunk) * blocks_ + block_) * push_chunk_; }
  // Whether any block of any rank pushes this chunk. All blocks run the same number of rounds.
  DEVICE INLINE bool is_any(u32 chunk) const { return static_cast<u64>(chunk) * blocks_ * push_chunk_ < arguments_.longest_part; }

  // Calls `todo` with this warp's offsets in a chunk.
  template <class Do>
  DEVICE INLINE void for_mine(Do todo) const {
    const u32 warps = Barrier<RANKS>::data_threads() / warp_threads();
    for (u32 at = thread_index() / warp_threads() * BYTES; at < push_chunk_; at += warps * BYTES) todo(at);
  }
  DEVICE INLINE void push(u32 chunk) const {
    const u64 start = this->start(chunk);
    // Ranks begin with different peers.
    for (u32 hop = 1; hop < RANKS; hop++) {
      const u32 rank = me() + hop < RANKS ? me() + hop : me() + hop - RANKS;
      for_mine([&](u32 at) {
        copy_slice<PACKS>(slot(rank, me(), chunk) - start, arguments_.from[rank], arguments_.sends[rank], start + at, folding_.element_bytes());
      });
    }
  }
  DEVICE INLINE void reduce(u32 chunk) const {
    const u64 start = this->start(chunk);
    const auto from = [&](u32 rank) { return slot(me(), rank, chunk) - start; };
    for_mine([&](u32 at) { Reduction<PACKS, Words, decltype(from)>(arguments_, folding_, addresses_, from).run(start + at); });
  }

  const Collective& arguments_;
  const BufferAddresses& addresses_;
  const Words folding_;
  const ChunkFlags<RANKS> flags_;
  const u32 block_, blocks_;
  // Bytes of a chunk.
  const u32 push_chunk_;
};

// Not inlined: inlined code would share registers with everything else.
template <class E, class Op, u32 RANKS>
DEVICE NOINLINE bool push_all(const Collective& arguments, const BufferAddresses& places, u32 block, u32 blocks) {
  return PushBlock<E, Op, RANKS>(arguments, places, block, blocks).run();
}

}  // namespace ringsight
