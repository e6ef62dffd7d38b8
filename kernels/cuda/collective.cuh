// Collectives by peer kernels, over LL128 rows in steps. In a step each rank writes a chunk into the peer memory of each other rank, and takes
// the chunks that these have written into its own.
//
// One warp does everything for its lane of each connection, so lanes do not wait for each other. Every line ends with the number of its step.
//
// A lane has two slots for chunks, by the parity of the step. A rank that sees a line of a step knows that its writer has taken all of the step
// before, whose slots are free again. (In a forwarded reduction a rank writes the first rows of the second step before it has read all of the
// first. But a rank that waits for the second step waits for all its rows, or for what is written behind them.) Therefore each rank writes at
// least one line to each other rank in every step. Writing several steps ahead was measured: no faster where all lanes are in use.
//
// Two-shot: each rank reduces a part and forwards it to all others in a second step. Otherwise every rank gets everything and reduces it all.
// Long broadcasts and reductions with a root have parts, too, of all ranks but the root.
//
// Long collectives are zero-copy where all ranks reach all buffers: zero_copy.cuh, push.cuh, relay.cuh.
#pragma once

#include "push.cuh"
#include "relay.cuh"
#include "ll128.cuh"

namespace ringsight {

// The most threads of a block, service threads included.
constexpr u32 COLLECTIVE_THREADS = 256;

// Whether each warp reads the buffer addresses for itself. Faster for a zero-copy reduction of two ranks, where otherwise all warps would wait for
// one. With more ranks or pushed chunks one warp reads for all, since many readers would slow each other.
template <bool ZERO_COPY, bool REDUCES, u32 RANKS>
constexpr bool EACH_WARP_READS = ZERO_COPY && REDUCES && RANKS == 2;
// The buffer addresses of a block.
template <bool ZERO_COPY, bool REDUCES, u32 RANKS>
struct BlockAddresses {
  BufferAddresses of_warp[EACH_WARP_READS<ZERO_COPY, REDUCES, RANKS> ? COLLECTIVE_THREADS / 32 : 1];
};

// One block of a kernel. Template parameters:
// - `ZERO_COPY`: it has the zero-copy path. LL128-only code is shorter: 0.3 us less on four GPUs, a twentieth of the time of 4 MiB.
// - `REDUCES`: it reduces; otherwise it copies.
// - `ALIGNED`: all buffers begin and end at words.
// - `E`, `Op`: it sums elements `E`; void for any reduction.
// - `RANKS`: the number of ranks; 0 for any.
template <bool ZERO_COPY, bool REDUCES, bool ALIGNED, class E, class Op, u32 RANKS>
class CollectiveBlock {
 public:
  // `end_slot` and `addresses` are shared by the threads of the block.
  DEVICE CollectiveBlock(const Collective& arguments, u32 block, u32 blocks, volatile u64& end_slot, BlockAddresses<ZERO_COPY, REDUCES, RANKS>& addresses)
      : arguments_(arguments),
        addresses_(addresses.of_warp[EACH_READS && arguments.push_chunk == 0 ? thread_index() / warp_threads() : 0]),
        barrier_(arguments.call, block, blocks, end_slot),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        block_(block),
        blocks_(blocks),
        lanes_(blocks * (barrier_.data_threads() / warp_threads())),
        lane_(block * (barrier_.data_threads() / warp_threads()) + thread_index() / warp_threads()) {}

  DEVICE INLINE void run() {
    const u32 runs = thread_index() == 0 ? barrier_.runs() : 0;
    u64* steps = steps_of(base(me())) + lane_;
    if (barrier_.moves_data()) step_ = load_relaxed(steps) + 1;
    barrier_.begin(is_short(), [this] {
      if (may_zero_copy()) agreement().announce();
    });
    bool done = true;
    Path path = Path::Ll128;
    if (has_chunks()) path = agree_together();
    else if (may_zero_copy() && barrier_.moves_data()) path = agree_data_threads();
    if (has_chunks() && path == Path::ZeroCopy) {
      done = move_chunks();
    } else if (barrier_.moves_data()) {
      if (path == Path::ZeroCopy) move_zero_copy();
      else done = path == Path::Ll128 && move();
    }
    if (barrier_.moves_data() && warp_thread() == 0) store_relaxed(steps, step_ - 1);
    barrier_.end(runs, done, path == Path::ZeroCopy, may_zero_copy());
  }

 private:
  using Words = Folding<E, Op, RANKS, MAX_PEERS>;
  using Part = Slice<ALIGNED>;
  static constexpr bool EACH_READS = EACH_WARP_READS<ZERO_COPY, REDUCES, RANKS>;
  static constexpr u32 MAX_RANKS = Words::MAX_RANKS;
  // Rows that a thread loads before it waits for the first, among two ranks or any number. Chunks of at least `MANY` rows overlap their loads. Chunks of
  // up to `EXACT` rows are loaded as a whole by code of their own: testing rows that do not exist takes a tenth of the operation.
  static constexpr u32 MANY = 8, FEW = 4, EXACT = 5;
  // Among a known number of more than two ranks, the rows of all ranks are loaded together: as many of each as the registers allow.
  static constexpr bool TOGETHER = RANKS > 2;
  static constexpr u32 OTHERS = TOGETHER ? RANKS - 1 : 1, ROWS_OF_ALL = REDUCES ? 6 : 12;
  static constexpr u32 OF_EACH = ROWS_OF_ALL > OTHERS ? ROWS_OF_ALL / OTHERS : 1;
  // Zero-copy bytes per rank that are moved so fast that the host may wait for the end.
  static constexpr u64 NEAR = 8 << 20;
  // Rows loaded at once where the rows of all ranks are reduced: limited by the registers.
  template <u32 COPIED>
  DEVICE static constexpr u32 reduced() {
    constexpr u32 MOST = MAX_RANKS <= 2 ? EXACT : of_all_ranks<FEW, MAX_RANKS>();
    return COPIED < MOST ? COPIED : MOST;
  }

  DEVICE INLINE u32 ranks() const { return barrier_.ranks(); }
  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u64 base(u32 rank) const { return arguments_.call.bases[rank]; }
  // The rank `hop` after this one, so that ranks begin with different peers.
  DEVICE INLINE u32 after(u32 hop) const { return me() + hop < ranks() ? me() + hop : me() + hop - ranks(); }

  // LL128: at most two chunks per lane. Zero-copy: about ten microseconds. The signalling threads of pushed chunks never return the ring slot.
  DEVICE INLINE bool is_short() const {
    if (may_zero_copy()) return arguments_.push_chunk == 0 && arguments_.longest_part <= NEAR;
    return arguments_.longest_part <= static_cast<u64>(2 * arguments_.chunk) * lanes_;
  }

  // All steps of the lane. False: give up.
  DEVICE INLINE bool move() {
    if constexpr (TOGETHER) {
      if (OF_EACH > 2 && arguments_.chunk == 2 * ROW_BYTES) return move_by<2>();
      return arguments_.chunk == ROW_BYTES ? move_by<1>() : move_by<OF_EACH>();
    }
    // Reductions have no registers for so many rows.
    if constexpr (!REDUCES) {
      if (arguments_.chunk >= MANY * ROW_BYTES) return move_by<MANY>();
    }
    // The code for any type is long, so there is one copy of it. Operations that could have been zero-copy are long as well.
    if constexpr (!ZERO_COPY && (!REDUCES || !Words::IS_ANY)) {
      switch (arguments_.chunk / ROW_BYTES) {
        case 1: return move_by<1>();
        case 2: return move_by<2>();
        case 3: return move_by<3>();
        case EXACT: return move_by<EXACT>();
        default: break;
      }
    }
    return move_by<FEW>();
  }
  template <u32 COPIED>
  DEVICE INLINE bool move_by() {
    // A zero-copy launch may have more warps than there are lanes.
    const u32 most = lanes_among(ranks()), lanes = lanes_ < most ? lanes_ : most;
    const u64 stride = static_cast<u64>(lanes) * arguments_.chunk;
    for (u64 at = static_cast<u64>(lane_) * arguments_.chunk; lane_ < lanes && at < arguments_.longest_part; at += stride) {
      write_to_all<COPIED>(at);
      if (REDUCES) {
        if (!reduce<reduced<COPIED>()>(at)) return false;
        next_step();
        if (!arguments_.forwards) continue;
      } else if (relays()) {
        if (!relay<COPIED>(at)) return false;
        next_step();
      } else {
        copy_own<COPIED>(at);
      }
      if (!take_from_all<COPIED>(at)) return false;
      next_step();
    }
    return true;
  }
  // Ends a step and shows the host progress, now and then.
  DEVICE INLINE void next_step() {
    if (step_ % 16 == 0 && thread_index() == 0) barrier_.report().moved(static_cast<u32>(step_));
    step_++;
  }

  DEVICE INLINE Part part(u64 base, u64 all, u64 at) const {
    return Part(base, all, at, arguments_.chunk, folding_.element_bytes());
  }
  // Slot in `rank`'s memory of what `source` sends it in a step.
  DEVICE INLINE Pack* slot(u32 rank, u32 source, u64 step) const {
    return slot_of(base(rank), ranks(), source < rank ? source : source - 1, lane_, step);
  }

  DEVICE INLINE Part sent(u32 rank, u64 at) const { return part(arguments_.from[rank], arguments_.sends[rank], at); }
  DEVICE INLINE Part taken(u32 rank, u64 at) const { return part(arguments_.to[rank], arguments_.takes[rank], at); }
  // Rows of the longest chunk of a step.
  DEVICE INLINE u32 rows(u64 at) const { return part(0, arguments_.longest_part, at).rows(); }

  // Writes this step's chunks to all other ranks. The rows for all ranks are loaded before the first is stored, since each load takes a good part of a
  // short operation.
  template <u32 COPIED>
  DEVICE INLINE void write_to_all(u64 at) {
    if constexpr (!TOGETHER) {
      for (u32 hop = 1; hop < ranks(); hop++) {
        const u32 rank = after(hop);
        put_chunk<COPIED>(sent(rank, at), slot(rank, me(), step_), step_);
      }
      return;
    }
    const u32 all = rows(at);
    for (u32 first = 0; first < all; first += COPIED) {
      Row some[OTHERS][COPIED];
      UNROLL
      for (u32 other = 0; other < OTHERS; other++) {
        UNROLL
        for (u32 i = 0; i < COPIED; i++) some[other][i] = load_row(sent(after(other + 1), at), first + i);
      }
      UNROLL
      for (u32 other = 0; other < OTHERS; other++) {
        const u32 rank = after(other + 1);
        UNROLL
        for (u32 i = 0; i < COPIED; i++) put_row(sent(rank, at), first + i, slot(rank, me(), step_), some[other][i], step_);
      }
    }
  }

  // Stores what arrives from all other ranks in this step, likewise. False: give up.
  template <u32 COPIED>
  DEVICE INLINE bool take_from_all(u64 at) {
    const auto is_mine = [this](u64 word) { return word == step_; };
    if constexpr (!TOGETHER) {
      for (u32 hop = 1; hop < ranks(); hop++) {
        const u32 rank = after(hop);
        const auto may_go_on = [this, rank](u32 polls) { return go_on(polls, Phase::Data, rank); };
        if (!take_chunk<COPIED>(taken(rank, at), slot(me(), rank, step_), is_mine, may_go_on)) return false;
      }
      return true;
    }
    const u32 all = rows(at);
    for (u32 first = 0; first < all; first += COPIED) {
      Row some[OTHERS][COPIED];
      for (u32 polls = 1;; polls++) {
        bool here = true;
        UNROLL
        for (u32 other = 0; other < OTHERS; other++) {
          const u32 rank = after(other + 1);
          UNROLL
          for (u32 i = 0; i < COPIED; i++) here = get_row(taken(rank, at), first + i, slot(me(), rank, step_), some[other][i], is_mine) && here;
        }
        if (warp_all(here)) break;
        if (!go_on(polls, Phase::Data, NONE)) return false;
      }
      UNROLL
      for (u32 other = 0; other < OTHERS; other++) {
        UNROLL
        for (u32 i = 0; i < COPIED; i++) store_row(taken(after(other + 1), at), first + i, some[other][i]);
      }
    }
    return true;
  }

  // Copies this rank's own contribution to its receive buffer.
  template <u32 COPIED>
  DEVICE INLINE void copy_own(u64 at) {
    if (arguments_.own != arguments_.result) copy_own<COPIED>(arguments_.own, arguments_.result, arguments_.result_bytes, at);
  }
  template <u32 COPIED>
  DEVICE INLINE void copy_own(u64 own, u64 result, u64 bytes, u64 at) {
    const Part from = part(own, bytes, at);
    const Part to = part(result, bytes, at);
    const u32 rows = to.rows();
    for (u32 first = 0; first < rows; first += COPIED) {
      Row some[COPIED];
      UNROLL
      for (u32 i = 0; i < COPIED; i++) some[i] = load_row(from, first + i);
      UNROLL
      for (u32 i = 0; i < COPIED; i++) store_row(to, first + i, some[i]);
    }
  }

  // Whether each rank but the root receives a part from the root and forwards it.
  DEVICE INLINE bool relays() const { return !REDUCES && RANKS == 0 && arguments_.forwards; }
  // Takes this step's chunk from the root, and forwards it in the next step. False: give up. The root copies what it sends to its own buffer.
  template <u32 COPIED>
  DEVICE INLINE bool relay(u64 at) {
    const Part mine = part(arguments_.result, arguments_.result_bytes, at), nothing = part(arguments_.result, 0, at);
    const auto is_mine = [this](u64 word) { return word == step_; };
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      const auto may_go_on = [this, rank](u32 polls) { return go_on(polls, Phase::Data, rank); };
      if (!take_chunk<COPIED>(rank == arguments_.root ? mine : nothing, slot(me(), rank, step_), is_mine, may_go_on)) return false;
      if (arguments_.own == arguments_.result) continue;
      copy_own<COPIED>(arguments_.from[rank], arguments_.from[rank] - arguments_.own + arguments_.result, arguments_.sends[rank], at);
    }
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      put_chunk<COPIED>(rank == arguments_.root ? nothing : mine, slot(rank, me(), step_ + 1), step_ + 1);
    }
    return true;
  }

  // Whether the reduced parts are for the root alone.
  DEVICE INLINE bool is_for_root() const { return REDUCES && arguments_.root != NONE; }
  DEVICE INLINE bool gets_parts(u32 rank) const { return !is_for_root() || rank == arguments_.root; }
  // Reduces this step's chunks with this rank's own, and forwards the result in the next step. False: give up.
  template <u32 REDUCED>
  DEVICE INLINE bool reduce(u64 at) {
    const Part own = part(arguments_.own, arguments_.result_bytes, at);
    const Part result = part(arguments_.result, arguments_.result_bytes, at);
    const auto is_mine = [this](u64 word) { return word == step_; };
    const u32 rows = result.rows();
    for (u32 first = 0; first < rows; first += REDUCED) {
      Row mine[REDUCED], all[REDUCED][MAX_RANKS];
      UNROLL
      for (u32 i = 0; i < REDUCED; i++) mine[i] = load_row(own, first + i);
      for (u32 polls = 1;; polls++) {
        bool here = true;
        UNROLL
        for (u32 i = 0; i < REDUCED; i++) {
          UNROLL
          for (u32 rank = 0; rank < MAX_RANKS; rank++) {
            if (rank >= ranks() || rank == me()) continue;
            here = get_row(result, first + i, slot(me(), rank, step_), all[i][rank], is_mine) && here;
          }
        }
        if (warp_all(here)) break;
        if (!go_on(polls, Phase::Data, NONE)) return false;
      }
      UNROLL
      for (u32 i = 0; i < REDUCED; i++) {
        Row sum;
        UNROLL
        for (u32 part = 0; part < PARTS; part++) {
          UNROLL
          for (u32 word = 0; word < 2; word++) {
            u64 words[MAX_RANKS];
            UNROLL
            for (u32 rank = 0; rank < MAX_RANKS; rank++) {
              words[rank] = rank == me() ? mine[i].parts[part].words[word] : all[i][rank].parts[part].words[word];
            }
            sum.parts[part].words[word] = folding_.reduce(words);
          }
        }
        if (!is_for_root()) store_row(result, first + i, sum);
        if (!arguments_.forwards) continue;
        for (u32 hop = 1; hop < ranks(); hop++) {
          if (gets_parts(after(hop))) put_row(result, first + i, slot(after(hop), me(), step_ + 1), sum, step_ + 1);
        }
      }
    }
    if (!is_for_root()) return true;
    // The other ranks get the line that they wait for when all rows of this step have been read: they wait for nothing else before they go on.
    for (u32 hop = 1; hop < ranks(); hop++) {
      if (!gets_parts(after(hop))) put_chunk<1>(part(0, 0, at), slot(after(hop), me(), step_ + 1), step_ + 1);
    }
    return true;
  }

  // ---- zero-copy ----

  DEVICE INLINE bool may_zero_copy() const { return ZERO_COPY && arguments_.zero_copy; }
  DEVICE INLINE Agreement<RANKS> agreement() const { return Agreement<RANKS>(arguments_, barrier_, addresses_); }
  // One warp calls this.
  DEVICE INLINE Path agree() {
    return agreement().agree([this](u32 polls, u32 rank) { return go_on(polls, Phase::Begin, rank); });
  }
  // All threads call this; one warp agrees. After a barrier all threads know the path.
  DEVICE INLINE void agree_for_all() {
    if (thread_index() >= warp_threads()) return;
    const Path path = agree();
    if (warp_thread() == 0) addresses_.path = static_cast<u32>(path);
  }

  // All data threads call this. If each warp reads for itself, all find the same.
  DEVICE INLINE Path agree_data_threads() {
    if constexpr (EACH_READS) return agree();
    agree_for_all();
    part_barrier(barrier_.data_threads());
    return static_cast<Path>(addresses_.path);
  }

  // All of the lane's part. It waits for nobody, so it ends when its bytes are moved and does not check the abort word. That word is in host memory:
  // when all warps checked it now and then, the operation took four times as long.
  DEVICE INLINE void move_zero_copy() {
    if constexpr (!REDUCES) {
      copy_to_peers();
    } else if constexpr (!Words::IS_ANY) {
      reduce_from_peers();
    }
  }
  DEVICE INLINE void copy_to_peers() {
    constexpr u32 PACKS = 8, BYTES = PACKS * warp_threads() * sizeof(Pack);
    u32 turns = 0;
    for (u64 at = static_cast<u64>(lane_) * BYTES; at < arguments_.longest_part; at += static_cast<u64>(lanes_) * BYTES) {
      for (u32 hop = 1; hop < ranks(); hop++) {
        const u32 rank = after(hop);
        copy_slice<PACKS>(addresses_.to[rank], arguments_.from[rank], arguments_.sends[rank], at, folding_.element_bytes());
      }
      if (arguments_.own != arguments_.result) {
        copy_slice<PACKS>(arguments_.result, arguments_.own, arguments_.result_bytes, at, folding_.element_bytes());
      }
      moved(++turns);
    }
  }
  // The next slice is loaded before this one is reduced and stored, so that loads, which wait for an answer, are always in flight.
  DEVICE INLINE void reduce_from_peers() {
    const auto from = [this](u32 rank) { return addresses_.from[rank]; };
    using Own = Reduction<of_all_ranks<4, MAX_RANKS>(), Words, decltype(from)>;
    const Own own(arguments_, folding_, addresses_, from);
    const u64 stride = static_cast<u64>(lanes_) * Own::BYTES;
    u64 at = static_cast<u64>(lane_) * Own::BYTES;
    u32 turns = 0;
    const auto turn = [&](const typename Own::Held& now, typename Own::Held& next) {
      if (own.is_whole(at + stride)) own.load(next, at + stride);
      own.give(now, at);
      at += stride;
      moved(++turns);
      return own.is_whole(at);
    };
    typename Own::Held one, other;
    if (own.is_whole(at)) {
      own.load(one, at);
      while (turn(one, other) && turn(other, one)) {
      }
    }
    own.end(at);
  }
  DEVICE INLINE void moved(u32 turns) const {
    if (turns % 64 == 0 && thread_index() == 0) barrier_.report().moved(turns);
  }

  // Whether it is zero-copy in signalled chunks. A reduction needs a specialised kernel for that.
  DEVICE INLINE bool has_chunks() const { return ZERO_COPY && !(REDUCES && Words::IS_ANY) && arguments_.push_chunk != 0; }
  // All threads of the block call this and take the same path.
  DEVICE INLINE Path agree_together() {
    // The service threads make sure that the host hears of a mismatch, for which the others would wait in vain. On the host device the waiting thread does.
    const bool here = SERVICE_THREADS == 0 || !barrier_.is_service() || barrier_.wait_for_begin();
    agree_for_all();
    if (block_any(!here)) return Path::GiveUp;
    return static_cast<Path>(addresses_.path);
  }
  DEVICE INLINE bool move_chunks() const {
    if constexpr (!REDUCES) {
      return relay_all<RANKS>(arguments_, addresses_, block_, blocks_);
    } else if constexpr (!Words::IS_ANY) {
      return push_all<E, Op, RANKS>(arguments_, addresses_, block_, blocks_);
    }
    return false;
  }

  // Called after `polls` polls of a wait for `rank`, or for any rank if that is `NONE`. False: give up.
  DEVICE INLINE bool go_on(u32 polls, Phase phase, u32 rank) {
    if (SERVICE_THREADS == 0 && pauses_after(polls)) barrier_.check_others();
    if (!barrier_.report().is_long(polls)) return true;
    if (rank == NONE) rank = missing();
    // The stored step is that of the operation before.
    const u64 before = load_relaxed(steps_of(base(me())) + lane_);
    return !barrier_.must_give_up(polls, phase, rank, static_cast<u32>(step_ - before));
  }
  // A rank from which something is missing in this step, where every rank sends something; `NONE` if all have begun.
  DEVICE INLINE u32 missing() const {
    for (u32 rank = 0; rank < ranks(); rank++) {
      if (rank != me() && load_pack(slot(me(), rank, step_) + LINE_PARTS - 1).words[1] != step_) return rank;
    }
    return NONE;
  }

  const Collective& arguments_;
  BufferAddresses& addresses_;
  Barrier<RANKS> barrier_;
  const Words folding_;
  const u32 block_, blocks_;
  // Lanes of the launch, of which there may be more than peer memory has; and this warp's lane.
  const u32 lanes_, lane_;
  // The current step, counted from 1 through all operations.
  u64 step_ = 0;
};

// The kernels: {name, ZERO_COPY, REDUCES, ALIGNED, element, combination, ranks}; src/cuda/collective.rs chooses. Sum kernels multiply each
// contribution by a factor, so that they do averages as well. A factor of 1 keeps every bit, and the link is slower than the multiplication.
#define RINGSIGHT_COLLECTIVES_OF(X, PREFIX, ZERO_COPY)                    \
  X(PREFIX##_elements, ZERO_COPY, false, false, void, void, 0)          \
  X(PREFIX##_words, ZERO_COPY, false, true, void, void, 0)              \
  X(PREFIX##_any, ZERO_COPY, true, false, void, void, 0)                \
  X(PREFIX##_sum_f32_2, ZERO_COPY, true, true, Plain<float>, MulSum, 2) \
  X(PREFIX##_sum_f32_4, ZERO_COPY, true, true, Plain<float>, MulSum, 4) \
  X(PREFIX##_sum_f32_8, ZERO_COPY, true, true, Plain<float>, MulSum, 8) \
  X(PREFIX##_sum_f16_2, ZERO_COPY, true, true, Half, MulSum, 2)         \
  X(PREFIX##_sum_f16_4, ZERO_COPY, true, true, Half, MulSum, 4)         \
  X(PREFIX##_sum_f16_8, ZERO_COPY, true, true, Half, MulSum, 8)         \
  X(PREFIX##_sum_bf16_2, ZERO_COPY, true, true, Bfloat16, MulSum, 2)    \
  X(PREFIX##_sum_bf16_4, ZERO_COPY, true, true, Bfloat16, MulSum, 4)    \
  X(PREFIX##_sum_bf16_8, ZERO_COPY, true, true, Bfloat16, MulSum, 8)
#define RINGSIGHT_COLLECTIVES(X)                                  \
  RINGSIGHT_COLLECTIVES_OF(X, ringsight_zero_copy, true)           \
  RINGSIGHT_COLLECTIVES_OF(X, ringsight_ll128, false)             \
  X(ringsight_ll128_words_4, false, false, true, void, void, 4) \
  X(ringsight_ll128_words_8, false, false, true, void, void, 8)

}  // namespace ringsight
