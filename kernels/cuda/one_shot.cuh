// An all_reduce in one shot: every rank writes its elements into the memory of all others and reduces what has come from
// them, in the order of ranks.
//
// Data travels as lines of 8 bytes with the epoch of the operation beside each half, so that no flag has to follow the data
// and no rank waits for anything but the data itself. Lines have two places, by the parity of the epoch: a rank that
// is at an epoch has got every line of the one before from all others, so these have ended the one before that.
#pragma once

#include "fold.cuh"
#include "meeting.cuh"
#include "words.cuh"

namespace ringsight {

struct OneShot {
  PeerCall call;
  u64 send;
  u64 recv;
  u64 elems;
  // Lines of each rank and parity.
  u32 lines;
  u32 reserved;
};
static_assert(offsetof(OneShot, send) == 136, "as in src/cuda/layout.rs");
static_assert(sizeof(OneShot) == 168, "as in src/cuda/layout.rs");

// One block of a kernel: of any, where `E` and `Op` are void, or of the one that sums elements `E`; of any number of ranks, or
// of `RANKS`.
template <class E, class Op, u32 RANKS>
class OneShotBlock {
 public:
  // `place` is shared by the threads of the block.
  DEVICE OneShotBlock(const OneShot& arguments, u32 block, u32 blocks, volatile u64& place)
      : arguments_(arguments),
        meeting_(arguments.call, block, blocks, place),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        block_(block),
        blocks_(blocks) {}

  DEVICE INLINE void run() {
    const u32 movers = meeting_.movers();
    const bool moves = meeting_.moves();
    const u64 first = static_cast<u64>(block_) * movers + thread_index();
    // All that is read is asked for before anything is waited for: each answer takes as long as a good part of the rest.
    const u32 runs = thread_index() == 0 ? meeting_.runs() : 0;
    const u64 mine = moves ? load(first) : 0;
    meeting_.begin(true);
    if constexpr (GIVES_ALL_FIRST) move<true, false>(first, static_cast<u64>(blocks_) * movers, mine);
    const bool done = !moves || move<!GIVES_ALL_FIRST, true>(first, static_cast<u64>(blocks_) * movers, mine);
    meeting_.end(runs, done);
  }

 private:
  using Words = Folding<E, Op, RANKS, MAX_PEERS>;
  static constexpr u32 MOST_RANKS = Words::MOST_RANKS;
  // On the host one thread does what hundreds do on a GPU: were each line waited for before the next is given, each would be a switch
  // between threads.
  static constexpr bool GIVES_ALL_FIRST = warp_threads() == 1;

  DEVICE INLINE u32 ranks() const { return meeting_.ranks(); }
  DEVICE INLINE u32 element_bytes() const { return folding_.element_bytes(); }

  // Where the lines of one rank and parity begin in the memory of `rank`.
  DEVICE INLINE Line* lines_in(u32 rank, u32 parity, u32 source) const {
    return reinterpret_cast<Line*>(arguments_.call.bases[rank] + LINES_OFFSET) + parity * (LINES / 2) +
           source * arguments_.lines;
  }

  // From `first` on, where `mine` is: gives it to all others, and takes what they give; false if it is to give up.
  template <bool GIVES, bool TAKES>
  DEVICE INLINE bool move(u64 first, u64 stride, u64 mine) {
    const u32 ranks = this->ranks(), me = arguments_.call.rank, epoch = meeting_.epoch(), parity = epoch & 1;
    const u64 bytes = this->bytes();
    for (u64 at = first; at * 8 < bytes; mine = load(at += stride)) {
      UNROLL
      for (u32 hop = 1; hop < MOST_RANKS; hop++) {
        if (GIVES && hop < ranks) {
          // Not all to the same one at first.
          const u32 rank = me + hop < ranks ? me + hop : me + hop - ranks;
          store_line(lines_in(rank, parity, me) + at, static_cast<u32>(mine), static_cast<u32>(mine >> 32), epoch);
        }
      }
      if (!TAKES) continue;
      u64 all[MOST_RANKS];
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
  // Whether there are 8 bytes, and they can be accessed at once.
  DEVICE INLINE bool is_full(u64 at, u64 bytes) const {
    return is_aligned(send(0), 8) && is_aligned(recv(0), 8) && at * 8 + 8 <= bytes;
  }
  // The 8 bytes of a line, or what there is of them.
  DEVICE INLINE u64 load(u64 at) const {
    const u64 bytes = this->bytes();
    if (is_full(at, bytes)) return *reinterpret_cast<const u64*>(send(at * 8));
    return at * 8 < bytes ? load_elements(send(at * 8), bytes - at * 8, element_bytes()) : 0;
  }

  DEVICE INLINE const u8* send(u64 at) const { return reinterpret_cast<const u8*>(arguments_.send) + at; }
  DEVICE INLINE u8* recv(u64 at) const { return reinterpret_cast<u8*>(arguments_.recv) + at; }

  // Waits for one line of each rank; `lines` is where that of rank 0 comes.
  DEVICE INLINE bool gather(u64 (&all)[MOST_RANKS], u64 mine, const Line* lines) {
    const u32 ranks = this->ranks(), me = arguments_.call.rank, epoch = meeting_.epoch();
    for (u32 polls = 1;; polls++) {
      bool here = true;
      UNROLL
      for (u32 rank = 0; rank < MOST_RANKS; rank++) {
        all[rank] = mine;
        if (rank < ranks && rank != me) {
          const Line line = load_line(lines + rank * arguments_.lines);
          here = here && line.low_flag == epoch && line.high_flag == epoch;
          all[rank] = static_cast<u64>(line.high) << 32 | line.low;
        }
      }
      if (here) return true;
      if (SERVICE == 0 && pauses_after(polls)) meeting_.look_aside();
      if (meeting_.must_give_up(polls)) return false;
    }
  }

  const OneShot& arguments_;
  Meeting<RANKS> meeting_;
  const Words folding_;
  const u32 block_, blocks_;
};

// The kernels: one for whatever there is, and those for what is called most, whose code is short: fetching code takes a good
// part of so short an operation. {name, element, combination, ranks}; src/cuda/one_shot.rs chooses. Sums have a factor, see exchange.cuh.
#define RINGSIGHT_ONE_SHOTS(X)         \
  X(ringsight_one_shot, void, void, 0) \
  RINGSIGHT_SUMS(X, ringsight_one_shot)

}  // namespace ringsight
