// Signals between blocks of the same number on different ranks: how many chunks are written (`PushCounters` in peer_memory.cuh).
//
// A block signals a chunk after a barrier behind its last store and a fence. So a thread that has acquired the signal sees the chunk, and so do
// the threads behind its block's next barrier.
//
// The counters run through all operations, replays included. They are equal on all ranks, since all ranks go through the same number of chunks,
// even if not every block signals. A waiting block compares with the count before the operation plus the chunk's number.
#pragma once

#include "barrier.cuh"

namespace ringsight {

// The flags of one block. `RANKS` is the number of ranks, or 0 for any.
template <u32 RANKS>
class ChunkFlags {
 public:
  DEVICE ChunkFlags(const Collective& arguments, u32 block)
      : call_(arguments.call), at_(arguments.push_counters_offset), block_(block), before_(load_relaxed(&of(call_.rank).chunks[block])) {}

  // The threads that signal and wait: those that move no data, while the others move the next chunk. On the host one thread does both.
  DEVICE INLINE static bool is_signaller() { return SERVICE_THREADS == 0 || !Barrier<RANKS>::moves_data(); }

  // Signals that the first `chunks` chunks of this operation are there: all that the block wrote before the barrier.
  DEVICE INLINE void signal(u32 chunks) const {
    for (u32 rank = warp_thread(); rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank) continue;
      fence_system();
      store_relaxed(&of(rank).from[call_.rank][block_], before_ + chunks);
    }
  }
  // Waits until the same block of all other ranks, or of rank `by` alone, has signalled `chunks` chunks. False: give up. All ranks have begun this
  // operation, so there are no tags to compare meanwhile.
  DEVICE INLINE bool wait(u32 chunks, u32 by = NONE) const {
    const Report report(call_.head);
    bool here = true;
    for (u32 rank = warp_thread(); here && rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank || (by != NONE && rank != by)) continue;
      // Acquire: the chunk is there, and what that block read before its signal has been read.
      for (u32 polls = 1; here && load_acquire(&of(call_.rank).from[rank][block_]) < before_ + chunks; polls++) {
        if (pauses_after(polls)) pause_polling();
        if (!report.is_long(polls)) continue;
        report.waits(polls, Phase::Data, rank, call_.channel, call_.head.op, chunks);
        here = !report.must_give_up();
      }
    }
    return here;
  }
  // Signalling threads: shows the host progress, now and then.
  DEVICE INLINE void moved(u32 chunks) const {
    if (chunks % 8 == 0 && warp_thread() == 0) Report(call_.head).moved(static_cast<u32>(before_) + chunks);
  }
  // All threads call this at the end.
  DEVICE INLINE void end(u32 chunks) const {
    if (thread_index() == 0) store_relaxed(&of(call_.rank).chunks[block_], before_ + chunks);
  }

 private:
  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : call_.ranks; }
  DEVICE INLINE PushCounters& of(u32 rank) const { return *reinterpret_cast<PushCounters*>(call_.bases[rank] + at_); }

  const PeerCall& call_;
  // Offset of `PushCounters` in each rank's memory.
  const u64 at_;
  const u32 block_;
  // Chunks of earlier operations.
  const u64 before_;
};

}  // namespace ringsight
