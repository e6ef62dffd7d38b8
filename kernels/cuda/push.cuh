// Long reductions by stores alone. Loads are a worse way to move bytes over NVLink: so contributions are pushed, and only results go straight.
//
// Each block writes a chunk of what it has for each other rank into slots there, and tells the same block of that rank (chunks.cuh), which reduces it
// from its own memory when all have come, and passes the result on straight. Each block pushes `PUSH_AHEAD` chunks ahead of what it reduces:
// neither the fence nor the way is waited for where there is more to move.
//
// Four slots are enough, without a word about those that are free. Before a block pushes chunk c it has seen that the others have pushed
// chunk c - 2. They have told so after a barrier behind which no thread of theirs was still reducing chunk c - 4: before chunk c - 2 each of
// them pushed c - 3 and reduced c - 4. The slot of c - 4 is the one that is written again: the others have read it before what they told,
// and this block writes after it has acquired that.
//
// Of an operation before, chunks may have been of another length, and slots elsewhere: who begins this one has reduced all of those, and
// nobody writes before all have begun (`ExchangeBlock::agree`).
//
// In place as well: a part of a buffer is written, by the rank that reduces it, only where it has come out of it.
#pragma once

#include "chunks.cuh"
#include "straight.cuh"

namespace ringsight {

// One block, of `RANKS` ranks that sum elements `E`.
template <class E, class Op, u32 RANKS>
class PushBlock {
 public:
  DEVICE PushBlock(const Exchange& arguments, const Places& places, u32 block, u32 blocks)
      : arguments_(arguments),
        places_(places),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        chunks_(arguments, block),
        block_(block),
        blocks_(blocks),
        push_(arguments.push) {}

  // By all threads; false if it is to give up.
  DEVICE INLINE bool run() {
    const bool moves = Meeting<RANKS>::moves(), tells = chunks_.tells();
    u32 chunk = 0;
    for (; chunk < PUSH_AHEAD || is_any(chunk) || is_any(chunk - PUSH_AHEAD); chunk++) {
      const bool pushes = is_any(chunk), reduces = chunk >= PUSH_AHEAD && is_any(chunk - PUSH_AHEAD);
      if (moves && pushes) push(chunk);
      const bool here = !tells || !reduces || chunks_.have_told(chunk + 1 - PUSH_AHEAD);
      if (block_any(!here)) return false;
      if (moves && reduces) reduce(chunk - PUSH_AHEAD);
      if (tells && pushes) chunks_.tell(chunk + 1);
      if (tells) chunks_.moved(chunk + 1);
    }
    chunks_.end(chunk - PUSH_AHEAD);
    return true;
  }

 private:
  using Words = Folding<E, Op, RANKS, RANKS>;
  // Of a thread, under way at once.
  static constexpr u32 PACKS = of_all_ranks<8, RANKS>();
  static constexpr u32 BYTES = PACKS * warp_threads() * sizeof(Pack);

  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u64 base(u32 rank) const { return arguments_.call.bases[rank] + arguments_.pushed_at; }
  // Where a chunk that `source` pushes to `rank` lies there.
  DEVICE INLINE u64 slot(u32 rank, u32 source, u32 chunk) const {
    const u32 other = source < rank ? source : source - 1;
    return base(rank) + sizeof(Pushed) + ((static_cast<u64>(other) * blocks_ + block_) * PUSH_SLOTS + chunk % PUSH_SLOTS) * push_;
  }
  // Where a chunk of this block begins in each part.
  DEVICE INLINE u64 start(u32 chunk) const { return (static_cast<u64>(chunk) * blocks_ + block_) * push_; }
  // Whether any block of any rank has something to push then: all do as many.
  DEVICE INLINE bool is_any(u32 chunk) const { return static_cast<u64>(chunk) * blocks_ * push_ < arguments_.piece; }

  // What this warp has to do of a chunk, by where it begins in that.
  template <class Do>
  DEVICE INLINE void for_mine(Do todo) const {
    const u32 warps = Meeting<RANKS>::movers() / warp_threads();
    for (u32 at = thread_index() / warp_threads() * BYTES; at < push_; at += warps * BYTES) todo(at);
  }
  DEVICE INLINE void push(u32 chunk) const {
    const u64 start = this->start(chunk);
    // Not all to the same one at first.
    for (u32 hop = 1; hop < RANKS; hop++) {
      const u32 rank = me() + hop < RANKS ? me() + hop : me() + hop - RANKS;
      for_mine([&](u32 at) {
        copy_stretch<PACKS>(slot(rank, me(), chunk) - start, arguments_.from[rank], arguments_.sends[rank], start + at, folding_.element_bytes());
      });
    }
  }
  DEVICE INLINE void reduce(u32 chunk) const {
    const u64 start = this->start(chunk);
    const auto from = [&](u32 rank) { return slot(me(), rank, chunk) - start; };
    for_mine([&](u32 at) { Reduction<PACKS, Words, decltype(from)>(arguments_, folding_, places_, from).run(start + at); });
  }

  const Exchange& arguments_;
  const Places& places_;
  const Words folding_;
  const Chunks<RANKS> chunks_;
  const u32 block_, blocks_;
  // Bytes of a chunk.
  const u32 push_;
};

// A function of its own: what is inlined shares registers with all else.
template <class E, class Op, u32 RANKS>
DEVICE NOINLINE bool push_all(const Exchange& arguments, const Places& places, u32 block, u32 blocks) {
  return PushBlock<E, Op, RANKS>(arguments, places, block, blocks).run();
}

}  // namespace ringsight
