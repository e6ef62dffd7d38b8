// Chunks that blocks write into other ranks' memory, and tell the block of the same number there of: see `Pushed` in peers.cuh.
//
// What tells of a chunk comes after a fence behind the barrier after its last store, so who has acquired it finds the chunk, and so do the threads behind
// the next barrier.
//
// What is counted goes on through all operations, replays included, and is the same on all ranks, which go through as many chunks, also if not all of them
// tell of any: who is awaited is awaited by what it has told before and these.
#pragma once

#include "exchange_call.cuh"

namespace ringsight {

// Those of one block; of any number of ranks, or of `RANKS`.
template <u32 RANKS>
class Chunks {
 public:
  DEVICE Chunks(const Exchange& arguments, u32 block)
      : call_(arguments.call), at_(arguments.pushed_at), block_(block), before_(load_relaxed(&of(call_.rank).chunks[block])) {}

  // By whom others are told, and waited for: by threads that move nothing, while the others move what is next. On the host one does both.
  DEVICE INLINE static bool tells() { return SERVICE == 0 || !Meeting<RANKS>::moves(); }

  // That so many chunks of this operation are there: all that the block wrote before the barrier.
  DEVICE INLINE void tell(u32 chunks) const {
    for (u32 rank = warp_thread(); rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank) continue;
      fence_system();
      store_relaxed(&of(rank).from[call_.rank][block_], before_ + chunks);
    }
  }
  // Waits until the same block of all others, or of rank `by` alone, has told of so many; false if it is to give up. All have begun this operation:
  // there is nothing else to look at meanwhile.
  DEVICE INLINE bool have_told(u32 chunks, u32 by = NONE) const {
    const Report report(call_.head);
    bool here = true;
    for (u32 rank = warp_thread(); here && rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank || (by != NONE && rank != by)) continue;
      // Acquire: what it tells of is there, and what it read before it told has been read.
      for (u32 polls = 1; here && load_acquire(&of(call_.rank).from[rank][block_]) < before_ + chunks; polls++) {
        if (pauses_after(polls)) pause_polling();
        if (!report.is_long(polls)) continue;
        report.waits(polls, Phase::Data, rank, call_.channel, call_.head.op, chunks);
        here = !report.must_give_up();
      }
    }
    return here;
  }
  // By the threads that tell: the host is told of some.
  DEVICE INLINE void moved(u32 chunks) const {
    if (chunks % 8 == 0 && warp_thread() == 0) Report(call_.head).moved(static_cast<u32>(before_) + chunks);
  }
  // In the end, by all threads.
  DEVICE INLINE void end(u32 chunks) const {
    if (thread_index() == 0) store_relaxed(&of(call_.rank).chunks[block_], before_ + chunks);
  }

 private:
  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : call_.ranks; }
  DEVICE INLINE Pushed& of(u32 rank) const { return *reinterpret_cast<Pushed*>(call_.bases[rank] + at_); }

  const PeerCall& call_;
  // Where `Pushed` is in each rank's memory.
  const u64 at_;
  const u32 block_;
  // Chunks of operations before.
  const u64 before_;
};

}  // namespace ringsight
