// One-shot AllReduce: every rank writes its elements into the peer memory of all other ranks and reduces what it receives, in the order of ranks.
//
// Data travels in LL lines: 8 bytes with the epoch of the operation beside each half. So no flag follows the data, and a rank waits for nothing but
// the data itself. There are two sets of lines, by the parity of the epoch. A rank in one epoch has received every line of the epoch before from
// all ranks, so these have finished the epoch before that, whose lines are reused.
#pragma once

#include "fold.cuh"
#include "barrier.cuh"
#include "words.cuh"

namespace ringsight {

// One block of a kernel. `E`, `Op`: it sums elements `E`; void for any reduction. `RANKS`: the number of ranks; 0 for any.
template <class E, class Op, u32 RANKS>
class OneShotBlock {
 public:
  // `end_slot` is shared by the threads of the block.
  DEVICE OneShotBlock(const OneShot& arguments, u32 block, u32 blocks, volatile u64& end_slot)
      : arguments_(arguments),
        barrier_(arguments.call, block, blocks, end_slot),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        block_(block),
        blocks_(blocks) {}

  DEVICE INLINE void run() {
    const u32 data_threads = barrier_.data_threads();
    const bool moves = barrier_.moves_data();
    const u64 first = static_cast<u64>(block_) * data_threads + thread_index();
    // All loads are started before anything is waited for: each takes as long as a good part of the rest.
    const u32 runs = thread_index() == 0 ? barrier_.runs() : 0;
    const u64 mine = moves ? load(first) : 0;
    barrier_.begin(true);
    if constexpr (SENDS_ALL_FIRST) move<true, false>(first, static_cast<u64>(blocks_) * data_threads, mine);
    const bool done = !moves || move<!SENDS_ALL_FIRST, true>(first, static_cast<u64>(blocks_) * data_threads, mine);
    barrier_.end(runs, done);
  }

 private:
  using Words = Folding<E, Op, RANKS, MAX_PEERS>;
  static constexpr u32 MAX_RANKS = Words::MAX_RANKS;
  // On the host one thread does what hundreds do on a GPU. If it waited for each line before it sent the next, each line would cost a switch
  // between threads.
  static constexpr bool SENDS_ALL_FIRST = warp_threads() == 1;

  DEVICE INLINE u32 ranks() const { return barrier_.ranks(); }
  DEVICE INLINE u32 element_bytes() const { return folding_.element_bytes(); }

  // Where the lines of one source rank and parity begin in `rank`'s memory.
  DEVICE INLINE Line* lines_in(u32 rank, u32 parity, u32 source) const {
    return reinterpret_cast<Line*>(arguments_.call.bases[rank] + LINES_OFFSET) + parity * (LINES / 2) +
           source * arguments_.lines;
  }

  // From word `first` on, whose value is `mine`: sends words to all other ranks, and receives and reduces theirs. False: give up.
  template <bool SENDS, bool RECEIVES>
  DEVICE INLINE bool move(u64 first, u64 stride, u64 mine) {
    const u32 ranks = this->ranks(), me = arguments_.call.rank, epoch = barrier_.epoch(), parity = epoch & 1;
    const u64 bytes = this->bytes();
    for (u64 at = first; at * 8 < bytes; mine = load(at += stride)) {
      UNROLL
      for (u32 hop = 1; hop < MAX_RANKS; hop++) {
        if (SENDS && hop < ranks) {
          // Ranks begin with different peers.
          const u32 rank = me + hop < ranks ? me + hop : me + hop - ranks;
          store_line(lines_in(rank, parity, me) + at, static_cast<u32>(mine), static_cast<u32>(mine >> 32), epoch);
        }
      }
      if (!RECEIVES) continue;
      u64 all[MAX_RANKS];
      if (!gather(all, mine, lines_in(me, parity, 0) + at)) return false;
      const u64 result = folding_.reduce(all);
      if (is_full(at, bytes)) {
        *reinterpret_cast<u64*>(recv(at * 8)) = result;
      } else {
        store_elements(recv(at * 8), bytes - at * 8, element_bytes(), result);
      }
    }
    return true;
  }

  DEVICE INLINE u64 bytes() const { return arguments_.elems * element_bytes(); }
  // Whether all 8 bytes exist and can be accessed at once.
  DEVICE INLINE bool is_full(u64 at, u64 bytes) const {
    return is_aligned(send(0), 8) && is_aligned(recv(0), 8) && at * 8 + 8 <= bytes;
  }
  // The 8 bytes of a line, or what exists of them.
  DEVICE INLINE u64 load(u64 at) const {
    const u64 bytes = this->bytes();
    if (is_full(at, bytes)) return *reinterpret_cast<const u64*>(send(at * 8));
    return at * 8 < bytes ? load_elements(send(at * 8), bytes - at * 8, element_bytes()) : 0;
  }

  DEVICE INLINE const u8* send(u64 at) const { return reinterpret_cast<const u8*>(arguments_.send) + at; }
  DEVICE INLINE u8* recv(u64 at) const { return reinterpret_cast<u8*>(arguments_.recv) + at; }

  // Waits for one line of each rank. `lines` is where rank 0's line arrives.
  DEVICE INLINE bool gather(u64 (&all)[MAX_RANKS], u64 mine, const Line* lines) {
    const u32 ranks = this->ranks(), me = arguments_.call.rank, epoch = barrier_.epoch();
    for (u32 polls = 1;; polls++) {
      bool here = true;
      UNROLL
      for (u32 rank = 0; rank < MAX_RANKS; rank++) {
        all[rank] = mine;
        if (rank < ranks && rank != me) {
          const Line line = load_line(lines + rank * arguments_.lines);
          here = here && line.low_flag == epoch && line.high_flag == epoch;
          all[rank] = static_cast<u64>(line.high) << 32 | line.low;
        }
      }
      if (here) return true;
      if (SERVICE_THREADS == 0 && pauses_after(polls)) barrier_.check_others();
      if (barrier_.must_give_up(polls)) return false;
    }
  }

  const OneShot& arguments_;
  Barrier<RANKS> barrier_;
  const Words folding_;
  const u32 block_, blocks_;
};

// The kernels: one for any reduction, and specialised ones for frequent reductions, whose code is short. Fetching code takes a good part of so short
// an operation. {name, element, combination, ranks}; src/cuda/one_shot.rs chooses. Sum kernels have a factor, see collective.cuh.
#define RINGSIGHT_ONE_SHOTS(X)         \
  X(ringsight_one_shot, void, void, 0) \
  RINGSIGHT_SUMS(X, ringsight_one_shot)

}  // namespace ringsight
