// Collectives among peers: in steps, in which every rank writes a chunk into the memory of each other one and takes those that
// these have written into its own.
//
// A warp does all that its lane of each connection has to do, so lanes do not wait for each other. Lines end with the number
// of the step.
//
// There are two slots for chunks, by the parity of the step: a rank that has seen a line of a step knows that whoever wrote it
// has taken all of the step before, whose slots are free again. (Of a reduction that is passed on a rank writes the first rows of the second step while it
// has not read all of the first; but who waits for the second waits for all rows of it, or for what is written behind them.) For this to hold each rank
// writes at least one line to each other one in every step. (Writing some steps ahead of what is waited for was measured: no faster where all lanes are in
// use.)
//
// Where all ranks need the result of a reduction, each rank may reduce a part of it and pass that on to all others in a second
// step, or every rank gets everything and reduces it all. Long broadcasts and reductions with a root have parts of all ranks but that, likewise.
//
// Long ones go straight between callers' buffers where all ranks reach all of them: straight.cuh, push.cuh, relay.cuh.
#pragma once

#include "push.cuh"
#include "relay.cuh"
#include "rows.cuh"

namespace ringsight {

// Threads of a block at most, of which some serve.
constexpr u32 EXCHANGE_THREADS = 256;

// Whether each warp looks for itself where buffers are, and so has places of its own, for where two ranks reduce straight: for all to wait for one was
// slower. Of more ranks, and where chunks are pushed, one looks for all: they would stand in each other's way.
template <bool MAY_BE_STRAIGHT, bool REDUCES, u32 RANKS>
constexpr bool ALL_WARPS_LOOK = MAY_BE_STRAIGHT && REDUCES && RANKS == 2;
// Places of a block.
template <bool MAY_BE_STRAIGHT, bool REDUCES, u32 RANKS>
struct PlacesOf {
  Places of_warp[ALL_WARPS_LOOK<MAY_BE_STRAIGHT, REDUCES, RANKS> ? EXCHANGE_THREADS / 32 : 1];
};

// One block of a kernel: of one for what may go straight, or for what goes in lines in any case, whose code is short: 0.3 us less on four GPUs, and a
// twentieth of the time that 4 MiB take. Of one that copies, where `REDUCES` is not set; of any that reduces, where `E` and `Op` are void, or of the
// one that sums elements `E`; of any number of ranks, or of `RANKS`. `WHOLE`: all buffers begin and end where words do.
template <bool MAY_BE_STRAIGHT, bool REDUCES, bool WHOLE, class E, class Op, u32 RANKS>
class ExchangeBlock {
 public:
  // `place` and `places` are shared by the threads of the block.
  DEVICE ExchangeBlock(const Exchange& arguments, u32 block, u32 blocks, volatile u64& place, PlacesOf<MAY_BE_STRAIGHT, REDUCES, RANKS>& places)
      : arguments_(arguments),
        places_(places.of_warp[ALL_LOOK && arguments.push == 0 ? thread_index() / warp_threads() : 0]),
        meeting_(arguments.call, block, blocks, place),
        folding_(arguments.call.data_type, arguments.call.combine, arguments.call.argument, arguments.call.ranks),
        block_(block),
        blocks_(blocks),
        lanes_(blocks * (meeting_.movers() / warp_threads())),
        lane_(block * (meeting_.movers() / warp_threads()) + thread_index() / warp_threads()) {}

  DEVICE INLINE void run() {
    const u32 runs = thread_index() == 0 ? meeting_.runs() : 0;
    u64* steps = steps_of(base(me())) + lane_;
    if (meeting_.moves()) step_ = load_relaxed(steps) + 1;
    meeting_.begin(is_short(), [this] {
      if (may_be_straight()) finding().tell();
    });
    bool done = true;
    Way way = Way::Steps;
    if (has_chunks()) way = agree_together();
    else if (may_be_straight() && meeting_.moves()) way = agree_movers();
    if (has_chunks() && way == Way::Straight) {
      done = move_chunks();
    } else if (meeting_.moves()) {
      if (way == Way::Straight) move_straight();
      else done = way == Way::Steps && move();
    }
    if (meeting_.moves() && warp_thread() == 0) store_relaxed(steps, step_ - 1);
    meeting_.end(runs, done, way == Way::Straight, may_be_straight());
  }

 private:
  using Words = Folding<E, Op, RANKS, MAX_PEERS>;
  using Part = Stretch<WHOLE>;
  static constexpr bool ALL_LOOK = ALL_WARPS_LOOK<MAY_BE_STRAIGHT, REDUCES, RANKS>;
  static constexpr u32 MOST_RANKS = Words::MOST_RANKS;
  // Rows that a thread asks for before it waits for the first, among two ranks or any number. Of a chunk of at least `MANY` answers are to overlap; one of
  // up to `EXACT` is asked for as a whole, and by code of its own: to look at rows that are not there takes as long as a tenth of the operation.
  static constexpr u32 MANY = 8, FEW = 4, EXACT = 5;
  // Of more than two ranks, if it is known how many these are, rows of all are asked for together: of each as many as registers allow.
  static constexpr bool TOGETHER = RANKS > 2;
  static constexpr u32 OTHERS = TOGETHER ? RANKS - 1 : 1, ROWS_OF_ALL = REDUCES ? 6 : 12;
  static constexpr u32 OF_EACH = ROWS_OF_ALL > OTHERS ? ROWS_OF_ALL / OTHERS : 1;
  // Bytes for each rank that go straight in so little time that the host may wait for the end.
  static constexpr u64 NEAR = 8 << 20;
  // Rows that are asked for at once where those of all ranks are reduced: no more than there are registers for.
  template <u32 COPIED>
  DEVICE static constexpr u32 reduced() {
    constexpr u32 MOST = MOST_RANKS <= 2 ? EXACT : of_all_ranks<FEW, MOST_RANKS>();
    return COPIED < MOST ? COPIED : MOST;
  }

  DEVICE INLINE u32 ranks() const { return meeting_.ranks(); }
  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE u64 base(u32 rank) const { return arguments_.call.bases[rank]; }
  // The rank that comes `hop` after this one: not all begin with the same.
  DEVICE INLINE u32 after(u32 hop) const { return me() + hop < ranks() ? me() + hop : me() + hop - ranks(); }

  // In lines, if each lane has two chunks at most; or straight, some ten microseconds. Who waits for what is pushed gives no place back.
  DEVICE INLINE bool is_short() const {
    if (may_be_straight()) return arguments_.push == 0 && arguments_.piece <= NEAR;
    return arguments_.piece <= static_cast<u64>(2 * arguments_.chunk) * lanes_;
  }

  // All steps of the lane; false if it is to give up.
  DEVICE INLINE bool move() {
    if constexpr (TOGETHER) {
      if (OF_EACH > 2 && arguments_.chunk == 2 * ROW_BYTES) return move_by<2>();
      return arguments_.chunk == ROW_BYTES ? move_by<1>() : move_by<OF_EACH>();
    }
    // What reduces has no registers for so many.
    if constexpr (!REDUCES) {
      if (arguments_.chunk >= MANY * ROW_BYTES) return move_by<MANY>();
    }
    // The code for any type is so long that once is enough; and what was to go straight is long.
    if constexpr (!MAY_BE_STRAIGHT && (!REDUCES || !Words::IS_ANY)) {
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
    // Of blocks that were to go straight there may be more warps than lanes.
    const u32 most = lanes_among(ranks()), lanes = lanes_ < most ? lanes_ : most;
    const u64 stride = static_cast<u64>(lanes) * arguments_.chunk;
    for (u64 at = static_cast<u64>(lane_) * arguments_.chunk; lane_ < lanes && at < arguments_.piece; at += stride) {
      write_to_all<COPIED>(at);
      if (REDUCES) {
        if (!reduce<reduced<COPIED>()>(at)) return false;
        next_step();
        if (!arguments_.passes) continue;
      } else if (relays()) {
        if (!relay<COPIED>(at)) return false;
        next_step();
      } else {
        keep<COPIED>(at);
      }
      if (!take_from_all<COPIED>(at)) return false;
      next_step();
    }
    return true;
  }
  // One is done. The host is told of some.
  DEVICE INLINE void next_step() {
    if (step_ % 16 == 0 && thread_index() == 0) meeting_.report().moved(static_cast<u32>(step_));
    step_++;
  }

  DEVICE INLINE Part part(u64 base, u64 all, u64 at) const {
    return Part(base, all, at, arguments_.chunk, folding_.element_bytes());
  }
  // Where what `source` sends to `rank` in a step lies there.
  DEVICE INLINE Pack* slot(u32 rank, u32 source, u64 step) const {
    return slot_of(base(rank), ranks(), source < rank ? source : source - 1, lane_, step);
  }

  DEVICE INLINE Part sent(u32 rank, u64 at) const { return part(arguments_.from[rank], arguments_.sends[rank], at); }
  DEVICE INLINE Part taken(u32 rank, u64 at) const { return part(arguments_.to[rank], arguments_.takes[rank], at); }
  // Rows of the longest chunk of a step.
  DEVICE INLINE u32 rows(u64 at) const { return part(0, arguments_.piece, at).rows(); }

  // Writes what goes to all others in this step. Rows of all are asked for before the first is written: each answer takes as long as a good part of a
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

  // Copies what comes from all others in this step, the same way; false if it is to give up.
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

  // Copies what this rank has of its own.
  template <u32 COPIED>
  DEVICE INLINE void keep(u64 at) {
    if (arguments_.own != arguments_.result) keep<COPIED>(arguments_.own, arguments_.result, arguments_.result_bytes, at);
  }
  template <u32 COPIED>
  DEVICE INLINE void keep(u64 own, u64 result, u64 bytes, u64 at) {
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

  // Whether each rank but the root takes a part from that one and passes it on.
  DEVICE INLINE bool relays() const { return !REDUCES && RANKS == 0 && arguments_.passes; }
  // Takes what comes from the root in this step, and passes it on in the next one; false if it is to give up. The root keeps what it has sent.
  template <u32 COPIED>
  DEVICE INLINE bool relay(u64 at) {
    const Part mine = part(arguments_.result, arguments_.result_bytes, at), nothing = part(arguments_.result, 0, at);
    const auto is_mine = [this](u64 word) { return word == step_; };
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      const auto may_go_on = [this, rank](u32 polls) { return go_on(polls, Phase::Data, rank); };
      if (!take_chunk<COPIED>(rank == arguments_.root ? mine : nothing, slot(me(), rank, step_), is_mine, may_go_on)) return false;
      if (arguments_.own == arguments_.result) continue;
      keep<COPIED>(arguments_.from[rank], arguments_.from[rank] - arguments_.own + arguments_.result, arguments_.sends[rank], at);
    }
    for (u32 hop = 1; hop < ranks(); hop++) {
      const u32 rank = after(hop);
      put_chunk<COPIED>(rank == arguments_.root ? nothing : mine, slot(rank, me(), step_ + 1), step_ + 1);
    }
    return true;
  }

  // Whether parts of a reduction are for the root alone.
  DEVICE INLINE bool is_for_root() const { return REDUCES && arguments_.root != NONE; }
  DEVICE INLINE bool gets_parts(u32 rank) const { return !is_for_root() || rank == arguments_.root; }
  // Reduces what comes in this step with what this rank has of its own, and passes it on in the next one; false if it is to
  // give up.
  template <u32 REDUCED>
  DEVICE INLINE bool reduce(u64 at) {
    const Part own = part(arguments_.own, arguments_.result_bytes, at);
    const Part result = part(arguments_.result, arguments_.result_bytes, at);
    const auto is_mine = [this](u64 word) { return word == step_; };
    const u32 rows = result.rows();
    for (u32 first = 0; first < rows; first += REDUCED) {
      Row mine[REDUCED], all[REDUCED][MOST_RANKS];
      UNROLL
      for (u32 i = 0; i < REDUCED; i++) mine[i] = load_row(own, first + i);
      for (u32 polls = 1;; polls++) {
        bool here = true;
        UNROLL
        for (u32 i = 0; i < REDUCED; i++) {
          UNROLL
          for (u32 rank = 0; rank < MOST_RANKS; rank++) {
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
            u64 words[MOST_RANKS];
            UNROLL
            for (u32 rank = 0; rank < MOST_RANKS; rank++) {
              words[rank] = rank == me() ? mine[i].parts[part].words[word] : all[i][rank].parts[part].words[word];
            }
            sum.parts[part].words[word] = folding_.reduce(words);
          }
        }
        if (!is_for_root()) store_row(result, first + i, sum);
        if (!arguments_.passes) continue;
        for (u32 hop = 1; hop < ranks(); hop++) {
          if (gets_parts(after(hop))) put_row(result, first + i, slot(after(hop), me(), step_ + 1), sum, step_ + 1);
        }
      }
    }
    if (!is_for_root()) return true;
    // The others get the line that they wait for when all rows of this step have been read: they will not wait for more before they go on.
    for (u32 hop = 1; hop < ranks(); hop++) {
      if (!gets_parts(after(hop))) put_chunk<1>(part(0, 0, at), slot(after(hop), me(), step_ + 1), step_ + 1);
    }
    return true;
  }

  // ---- straight between callers' buffers ----

  DEVICE INLINE bool may_be_straight() const { return MAY_BE_STRAIGHT && arguments_.straight; }
  DEVICE INLINE Finding<RANKS> finding() const { return Finding<RANKS>(arguments_, meeting_, places_); }
  // By a warp.
  DEVICE INLINE Way agree() {
    return finding().agree([this](u32 polls, u32 rank) { return go_on(polls, Phase::Begin, rank); });
  }
  // By all threads, of which a warp finds it out; after a barrier all know it.
  DEVICE INLINE void agree_for_all() {
    if (thread_index() >= warp_threads()) return;
    const Way way = agree();
    if (warp_thread() == 0) places_.way = static_cast<u32>(way);
  }

  // By all threads that move data. Where all warps look they find the same.
  DEVICE INLINE Way agree_movers() {
    if constexpr (ALL_LOOK) return agree();
    agree_for_all();
    part_barrier(meeting_.movers());
    return static_cast<Way>(places_.way);
  }

  // All of the lane's part. It waits for nobody, so it takes no longer than the bytes do and need not look whether it is to give up: that
  // word is in the host's memory, and asked for by all warps every now and then it took four times as long as the bytes.
  DEVICE INLINE void move_straight() {
    if constexpr (!REDUCES) {
      copy_straight();
    } else if constexpr (!Words::IS_ANY) {
      reduce_straight();
    }
  }
  DEVICE INLINE void copy_straight() {
    constexpr u32 PACKS = 8, BYTES = PACKS * warp_threads() * sizeof(Pack);
    u32 turns = 0;
    for (u64 at = static_cast<u64>(lane_) * BYTES; at < arguments_.piece; at += static_cast<u64>(lanes_) * BYTES) {
      for (u32 hop = 1; hop < ranks(); hop++) {
        const u32 rank = after(hop);
        copy_stretch<PACKS>(places_.to[rank], arguments_.from[rank], arguments_.sends[rank], at, folding_.element_bytes());
      }
      if (arguments_.own != arguments_.result) {
        copy_stretch<PACKS>(arguments_.result, arguments_.own, arguments_.result_bytes, at, folding_.element_bytes());
      }
      moved(++turns);
    }
  }
  // What is next is asked for before what has come is reduced and given away: so loads, which wait for an answer, are always under way.
  DEVICE INLINE void reduce_straight() {
    const auto from = [this](u32 rank) { return places_.from[rank]; };
    using Own = Reduction<of_all_ranks<4, MOST_RANKS>(), Words, decltype(from)>;
    const Own own(arguments_, folding_, places_, from);
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
    if (turns % 64 == 0 && thread_index() == 0) meeting_.report().moved(turns);
  }

  // Whether it goes straight in chunks that are told of. Of reductions only those that have a kernel of their own.
  DEVICE INLINE bool has_chunks() const { return MAY_BE_STRAIGHT && !(REDUCES && Words::IS_ANY) && arguments_.push != 0; }
  // By all threads of the block, which go the same way.
  DEVICE INLINE Way agree_together() {
    // Whoever serves sees to it that the host learns of ranks that differ, for which the others wait in vain. On the host who waits does.
    const bool here = SERVICE == 0 || !meeting_.serves() || meeting_.meets();
    agree_for_all();
    if (block_any(!here)) return Way::GiveUp;
    return static_cast<Way>(places_.way);
  }
  DEVICE INLINE bool move_chunks() const {
    if constexpr (!REDUCES) {
      return relay_all<RANKS>(arguments_, places_, block_, blocks_);
    } else if constexpr (!Words::IS_ANY) {
      return push_all<E, Op, RANKS>(arguments_, places_, block_, blocks_);
    }
    return false;
  }

  // For who has waited long, for a rank or, if that is `NONE`, for any of them; false if it is to give up.
  DEVICE INLINE bool go_on(u32 polls, Phase phase, u32 rank) {
    if (SERVICE == 0 && pauses_after(polls)) meeting_.look_aside();
    if (!meeting_.report().is_long(polls)) return true;
    if (rank == NONE) rank = missing();
    // What is in memory is of the operation before.
    const u64 before = load_relaxed(steps_of(base(me())) + lane_);
    return !meeting_.must_give_up(polls, phase, rank, static_cast<u32>(step_ - before));
  }
  // Of the ranks of which all something has to come in this step one that has not come; `NONE` if all have begun.
  DEVICE INLINE u32 missing() const {
    for (u32 rank = 0; rank < ranks(); rank++) {
      if (rank != me() && load_pack(slot(me(), rank, step_) + LINE_PARTS - 1).words[1] != step_) return rank;
    }
    return NONE;
  }

  const Exchange& arguments_;
  Places& places_;
  Meeting<RANKS> meeting_;
  const Words folding_;
  const u32 block_, blocks_;
  // Lanes of the launch, of which there may be more than there is memory for; and this warp's.
  const u32 lanes_, lane_;
  // The present step, counted from 1 through all operations.
  u64 step_ = 0;
};

// The kernels: {name, whether what they do may go straight, whether it reduces, whether buffers are whole words, element, combination, ranks};
// src/cuda/exchange.rs chooses. Those that sum multiply each contribution with a factor, so that they do averages as well: 1 leaves each bit as it is,
// and the link is slower than the multiplication.
#define RINGSIGHT_EXCHANGES_OF(X, PREFIX, STRAIGHT)                    \
  X(PREFIX##_elements, STRAIGHT, false, false, void, void, 0)          \
  X(PREFIX##_words, STRAIGHT, false, true, void, void, 0)              \
  X(PREFIX##_any, STRAIGHT, true, false, void, void, 0)                \
  X(PREFIX##_sum_f32_2, STRAIGHT, true, true, Plain<float>, MulSum, 2) \
  X(PREFIX##_sum_f32_4, STRAIGHT, true, true, Plain<float>, MulSum, 4) \
  X(PREFIX##_sum_f32_8, STRAIGHT, true, true, Plain<float>, MulSum, 8) \
  X(PREFIX##_sum_f16_2, STRAIGHT, true, true, Half, MulSum, 2)         \
  X(PREFIX##_sum_f16_4, STRAIGHT, true, true, Half, MulSum, 4)         \
  X(PREFIX##_sum_f16_8, STRAIGHT, true, true, Half, MulSum, 8)         \
  X(PREFIX##_sum_bf16_2, STRAIGHT, true, true, Bfloat16, MulSum, 2)    \
  X(PREFIX##_sum_bf16_4, STRAIGHT, true, true, Bfloat16, MulSum, 4)    \
  X(PREFIX##_sum_bf16_8, STRAIGHT, true, true, Bfloat16, MulSum, 8)
#define RINGSIGHT_EXCHANGES(X)                                  \
  RINGSIGHT_EXCHANGES_OF(X, ringsight_straight, true)           \
  RINGSIGHT_EXCHANGES_OF(X, ringsight_lines, false)             \
  X(ringsight_lines_words_4, false, false, true, void, void, 4) \
  X(ringsight_lines_words_8, false, false, true, void, void, 8)

}  // namespace ringsight
