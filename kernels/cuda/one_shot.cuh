// An all_reduce in one shot: every rank writes its elements into the memory of all others and reduces what has come from
// them, in the order of ranks.
//
// Data travels as lines of 8 bytes with the epoch of the operation beside each half, so that no flag has to follow the data
// and no rank waits for anything but the data itself. Lines have two places, by the parity of the epoch: a rank that
// is at an epoch has got every line of the one before from all others, so these have ended the one before that.
#pragma once

#include <type_traits>

#include "elements.cuh"
#include "move.cuh"
#include "peers.cuh"
#include "report.cuh"

namespace ringsight {

struct OneShot {
  Head head;
  // By rank: its memory.
  u64 bases[MAX_PEERS];
  u64 send;
  u64 recv;
  u64 elems;
  u64 argument;
  u32 op;
  u32 tag;
  u32 rank;
  u32 ranks;
  // Lines of each rank and parity.
  u32 lines;
  DataType data_type;
  Combine combine;
  u8 channel;
  u8 reserved;
};
static_assert(offsetof(OneShot, bases) == 48, "as in src/cuda/layout.rs");
static_assert(offsetof(OneShot, op) == 144, "as in src/cuda/layout.rs");
static_assert(offsetof(OneShot, data_type) == 164, "as in src/cuda/layout.rs");
static_assert(sizeof(OneShot) == 168, "as in src/cuda/layout.rs");

template <u32 BYTES> struct BitsOf;
template <> struct BitsOf<1> { using Type = u8; };
template <> struct BitsOf<2> { using Type = u16; };
template <> struct BitsOf<4> { using Type = u32; };
template <> struct BitsOf<8> { using Type = u64; };
template <u32 BYTES> using Bits = typename BitsOf<BYTES>::Type;

// An element in the low bits of a word.
template <class E>
DEVICE E element_of(u64 word) {
  union {
    Bits<sizeof(E)> bits;
    E element;
  } both{static_cast<Bits<sizeof(E)>>(word)};
  return both.element;
}
template <class E>
DEVICE u64 bits_of(const E& element) {
  union {
    E element;
    Bits<sizeof(E)> bits;
  } both{element};
  return both.bits;
}

// How contributions are combined when all are at hand: narrow ones are rounded once, at the end.
template <class Op>
struct Fold {
  template <class W> DEVICE static W first(W one, u64) { return one; }
  template <class W> DEVICE static W next(W sum, W one, u64 argument) { return Op::template apply<W>(sum, one, argument); }
  template <class W> DEVICE static W last(W sum, u64) { return sum; }
};
template <>
struct Fold<MulSum> {
  template <class W> DEVICE static W first(W one, u64 argument) { return Scale::apply<W>(one, one, argument); }
  template <class W> DEVICE static W next(W sum, W one, u64 argument) { return MulSum::apply<W>(sum, one, argument); }
  template <class W> DEVICE static W last(W sum, u64) { return sum; }
};
template <>
struct Fold<SumDiv> {
  template <class W> DEVICE static W first(W one, u64) { return one; }
  template <class W> DEVICE static W next(W sum, W one, u64) { return Sum::apply<W>(sum, one, 0); }
  template <class W> DEVICE static W last(W sum, u64 ranks) { return Numbers<W>::div(sum, ranks); }
};

// One block of a kernel: of any, where `E` and `Op` are void, or of the one that sums elements `E`; of any number of ranks, or
// of `RANKS`. All threads but the last `SERVICE` move data; those of the first block tell what the operation
// does and look whether the others do the same.
template <class E, class Op, u32 RANKS>
class OneShotBlock {
 public:
#ifdef __CUDACC__
  static constexpr u32 SERVICE = 32;
#else
  static constexpr u32 SERVICE = 0;
#endif

  // `ticket` is shared by the threads of the block.
  DEVICE OneShotBlock(const OneShot& arguments, u32 block, u32 blocks, volatile u64& ticket)
      : arguments_(arguments),
        report_(arguments.head),
        block_(block),
        blocks_(blocks),
        ticket_(ticket),
        own_(area_of(arguments.bases[arguments.rank])),
        epoch_(next_epoch(load_relaxed(&own_->epoch))) {}

  DEVICE INLINE void run() {
    // On a GPU each thread is one of the two; on the host the only one is both.
    const u32 movers = threads() - SERVICE;
    const bool moves = thread_index() < movers;
    const bool serves = block_ == 0 && (SERVICE == 0 || !moves);
    const u32 lane = thread_index() - (SERVICE != 0 ? movers : 0);
    const u64 first = static_cast<u64>(block_) * movers + thread_index();
    // All that is read is asked for before anything is waited for: each answer takes as long as a good part of the rest.
    const u32 runs = thread_index() == 0 ? report_.runs() : 0;
    const u64 mine = moves ? load(first) : 0;
    if (epoch_ >= LAST_EPOCH - 1) clear();
    bool done = true;
    if (serves) announce(lane);
    if (moves) done = move(first, static_cast<u64>(blocks_) * movers, mine);
    if (serves) done = compare(lane) && done;
    const bool aborted = block_any(!done);
    if (thread_index() == 0) finish(runs, aborted);
  }

 private:
  static constexpr bool IS_ANY = std::is_void_v<E>;
  static constexpr u32 MOST_RANKS = RANKS != 0 ? RANKS : MAX_PEERS;
  static constexpr u32 STRIDE = SERVICE != 0 ? SERVICE : 1;
  DEVICE static constexpr u64 no_ticket() { return ~static_cast<u64>(0); }

  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : arguments_.ranks; }
  DEVICE INLINE u32 element_bytes() const {
    if constexpr (IS_ANY) {
      return size_of(arguments_.data_type);
    } else {
      return sizeof(E);
    }
  }

  // Where the lines of one rank and parity begin in the memory of `rank`.
  DEVICE INLINE Line* lines_in(u32 rank, u32 parity, u32 source) const {
    return reinterpret_cast<Line*>(arguments_.bases[rank] + LINES_OFFSET) +
           (parity * ranks() + source) * arguments_.lines;
  }

  // Before epochs begin anew, what is left of old ones goes, so that none is taken for a new one. No rank writes into the
  // other parity now: all have ended the epoch before, and none begins the next before it has all of this one's lines.
  DEVICE INLINE void clear() {
    const u32 parity = ~epoch_ & 1;
    Line* lines = lines_in(arguments_.rank, parity, 0);
    const u32 all = arguments_.lines * ranks();
    for (u32 at = block_ * threads() + thread_index(); at < all; at += blocks_ * threads()) store_line(&lines[at], 0, 0, 0);
    if (block_ == 0) {
      for (u32 at = thread_index(); at < MAX_PEERS; at += threads()) store_line(&own_->tags[parity][at], 0, 0, 0);
    }
    block_barrier();
    fence_system();
  }

  // `lane` among the threads of the service.
  DEVICE INLINE void announce(u32 lane) {
    for (u32 rank = lane; rank < ranks(); rank += STRIDE) {
      if (rank == arguments_.rank) continue;
      store_line(&area_of(arguments_.bases[rank])->tags[epoch_ & 1][arguments_.rank], arguments_.tag, 0, epoch_);
    }
    if (lane == STRIDE - 1) {
      report_.event(EventKind::Started, report_.replay(report_.runs()), arguments_.channel, arguments_.op, device_time());
    }
  }

  // Waits for the tags of all others; false if it is to give up.
  DEVICE INLINE bool compare(u32 lane) {
    bool same = true;
    for (u32 rank = lane; same && rank < ranks(); rank += STRIDE) {
      for (u32 polls = 1; rank != arguments_.rank && !is_same(rank); polls++) {
        if (polls % 256 != 0) continue;
        if (must_give_up()) {
          same = false;
          break;
        }
        if (SERVICE != 0) met_ring(rank);
      }
    }
    // The end is near: what reports it is had now. The host reads events in the order of tickets, so it may wait for this
    // one until the data is here, too.
    if (blocks_ == 1 && lane == (arguments_.rank == 0 ? 1 : 0) % STRIDE) ticket_ = same ? report_.ticket() : no_ticket();
    return same;
  }

  // Whether another rank is seen to have begun this operation. If it has begun another one, the host is told.
  DEVICE INLINE bool is_same(u32 rank) {
    const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
    if (line.low_flag != epoch_ || line.high_flag != epoch_) return false;
    if (line.low == arguments_.tag) return true;
    differs(line.low);
    return false;
  }

  DEVICE INLINE void differs(u32 theirs) {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), arguments_.channel, arguments_.op, theirs);
    }
  }

  // Whether `rank`, which comes before this one in a ring, has begun another operation, over that ring. What it has
  // written before is there once its slot is seen: if its tag is not, it has not begun this operation.
  DEVICE INLINE void met_ring(u32 rank) {
    for (u32 ring = 0; ring < MAX_RINGS && own_->rings[ring].fifo != 0; ring++) {
      if (own_->rings[ring].prev != rank) continue;
      FifoHeader* fifo = reinterpret_cast<FifoHeader*>(own_->rings[ring].fifo);
      const u64 head = load_relaxed(&fifo->head);
      const FifoLine& slot = fifo->lines[head % SLOTS];
      if (load_acquire(&slot.flag) != head + 1) continue;
      const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
      if (line.low_flag != epoch_) differs(load_relaxed(&slot.tag));
    }
  }

  // For who has waited long.
  DEVICE INLINE bool must_give_up() const { return load_once_a_warp(&report_.control().abort) != 0; }

  // From `first` on, where `mine` is; false if it is to give up.
  DEVICE INLINE bool move(u64 first, u64 stride, u64 mine) {
    const u32 ranks = this->ranks(), me = arguments_.rank, parity = epoch_ & 1;
    const u64 bytes = this->bytes();
    for (u64 at = first; at * 8 < bytes; mine = load(at += stride)) {
      UNROLL
      for (u32 hop = 1; hop < MOST_RANKS; hop++) {
        if (hop < ranks) {
          // Not all to the same one at first.
          const u32 rank = me + hop < ranks ? me + hop : me + hop - ranks;
          store_line(lines_in(rank, parity, me) + at, static_cast<u32>(mine), static_cast<u32>(mine >> 32), epoch_);
        }
      }
      u64 all[MOST_RANKS];
      if (!gather(all, mine, lines_in(me, parity, 0) + at)) return false;
      const u64 result = reduce(all);
      if (is_full(at, bytes)) {
        *reinterpret_cast<u64*>(recv(at * 8)) = result;
      } else {
        store_some(at * 8, bytes, result);
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
    return at * 8 < bytes ? load_some(at * 8, bytes) : 0;
  }

  DEVICE INLINE const u8* send(u64 at) const { return reinterpret_cast<const u8*>(arguments_.send) + at; }
  DEVICE INLINE u8* recv(u64 at) const { return reinterpret_cast<u8*>(arguments_.recv) + at; }

  // What there is of 8 bytes, element by element.
  DEVICE INLINE u64 load_some(u64 at, u64 bytes) const {
    switch (element_bytes()) {
      case 1: return load_as<u8>(at, bytes);
      case 2: return load_as<u16>(at, bytes);
      case 4: return load_as<u32>(at, bytes);
      default: return *reinterpret_cast<const u64*>(send(at));
    }
  }
  template <class T>
  DEVICE INLINE u64 load_as(u64 at, u64 bytes) const {
    u64 word = 0;
    for (u32 i = 0; i < 8 && at + i < bytes; i += sizeof(T)) {
      word |= static_cast<u64>(*reinterpret_cast<const T*>(send(at + i))) << 8 * i;
    }
    return word;
  }
  DEVICE INLINE void store_some(u64 at, u64 bytes, u64 word) const {
    switch (element_bytes()) {
      case 1: return store_as<u8>(at, bytes, word);
      case 2: return store_as<u16>(at, bytes, word);
      case 4: return store_as<u32>(at, bytes, word);
      default: *reinterpret_cast<u64*>(recv(at)) = word;
    }
  }
  template <class T>
  DEVICE INLINE void store_as(u64 at, u64 bytes, u64 word) const {
    for (u32 i = 0; i < 8 && at + i < bytes; i += sizeof(T)) *reinterpret_cast<T*>(recv(at + i)) = static_cast<T>(word >> 8 * i);
  }

  // Waits for one line of each rank; `lines` is where that of rank 0 comes.
  DEVICE INLINE bool gather(u64 (&all)[MOST_RANKS], u64 mine, const Line* lines) {
    const u32 ranks = this->ranks(), me = arguments_.rank;
    for (u32 polls = 1;; polls++) {
      bool here = true;
      UNROLL
      for (u32 rank = 0; rank < MOST_RANKS; rank++) {
        all[rank] = mine;
        if (rank < ranks && rank != me) {
          const Line line = load_line(lines + rank * arguments_.lines);
          here = here && line.low_flag == epoch_ && line.high_flag == epoch_;
          all[rank] = static_cast<u64>(line.high) << 32 | line.low;
        }
      }
      if (here) return true;
      if (polls % 256 != 0) continue;
      if (SERVICE == 0) look_aside();
      if (must_give_up()) return false;
    }
  }

  // On the host, where who waits for data is who compares tags.
  DEVICE INLINE void look_aside() {
    for (u32 rank = 0; rank < ranks(); rank++) {
      if (rank != arguments_.rank && !is_same(rank)) met_ring(rank);
    }
    pause_polling();
  }

  DEVICE INLINE u64 reduce(const u64 (&all)[MOST_RANKS]) const {
    if constexpr (IS_ANY) {
      return reduce_typed(all);
    } else {
      return reduce_as<E, Op>(all);
    }
  }
  DEVICE INLINE u64 reduce_typed(const u64 (&all)[MOST_RANKS]) const {
    switch (arguments_.data_type) {
      case DataType::Int8: return reduce_integers<Plain<int8_t>>(all);
      case DataType::Uint8: return reduce_integers<Plain<u8>>(all);
      case DataType::Int32: return reduce_integers<Plain<int32_t>>(all);
      case DataType::Uint32: return reduce_integers<Plain<u32>>(all);
      case DataType::Int64: return reduce_integers<Plain<int64_t>>(all);
      case DataType::Uint64: return reduce_integers<Plain<u64>>(all);
      case DataType::Float16: return reduce_any<Half>(all);
      case DataType::Float32: return reduce_any<Plain<float>>(all);
      case DataType::Float64: return reduce_any<Plain<double>>(all);
      case DataType::Bfloat16: return reduce_any<Bfloat16>(all);
      case DataType::Float8e4m3: return reduce_any<Float8e4m3>(all);
      default: return reduce_any<Float8e5m2>(all);
    }
  }
  template <class T>
  DEVICE INLINE u64 reduce_integers(const u64 (&all)[MOST_RANKS]) const {
    return arguments_.combine == Combine::SumDiv ? reduce_as<T, SumDiv>(all) : reduce_any<T>(all);
  }
  template <class T>
  DEVICE INLINE u64 reduce_any(const u64 (&all)[MOST_RANKS]) const {
    switch (arguments_.combine) {
      case Combine::Prod: return reduce_as<T, Prod>(all);
      case Combine::Max: return reduce_as<T, Max>(all);
      case Combine::Min: return reduce_as<T, Min>(all);
      case Combine::MulSum: return reduce_as<T, MulSum>(all);
      default: return reduce_as<T, Sum>(all);
    }
  }
  template <class T, class How>
  DEVICE INLINE u64 reduce_as(const u64 (&all)[MOST_RANKS]) const {
    using W = typename T::Wide;
    constexpr u32 BITS = 8 * sizeof(T);
    const u64 argument = arguments_.argument;
    u64 result = 0;
    // Conversions of 8-bit floats are long.
    UNROLL_BY((sizeof(T) == 1 ? 1 : 8 / sizeof(T)))
    for (u32 bit = 0; bit < 64; bit += BITS) {
      W sum{};
      UNROLL
      for (u32 rank = 0; rank < MOST_RANKS; rank++) {
        if (rank < ranks()) {
          const W one = element_of<T>(all[rank] >> bit).widen();
          sum = rank == 0 ? Fold<How>::first(one, argument) : Fold<How>::next(sum, one, argument);
        }
      }
      result |= bits_of<T>(T::narrow(Fold<How>::last(sum, argument))) << bit;
    }
    return result;
  }

  DEVICE INLINE void finish(u32 runs, bool aborted) {
    if (!report_.block_done(blocks_, aborted)) return;
    store_relaxed(&own_->epoch, epoch_);
    const EventKind kind = aborted ? EventKind::Aborted : EventKind::Stopped;
    u64 ticket = blocks_ == 1 ? ticket_ : no_ticket();
    if (ticket == no_ticket()) ticket = report_.ticket();
    report_.event_at(ticket, kind, report_.replay(runs), arguments_.channel, arguments_.op, device_time());
    // Relaxed, as an event's words are: a release would have to wait for all that was written to other GPUs and to the host,
    // which takes longer than the operation. The host's streams order the data by the kernel's end; what the host learns here is
    // that the run is over, and if it learns so before it sees the event, it makes up for that.
    store_relaxed(&report_.control().runs, report_.renew(runs, aborted));
  }

  const OneShot& arguments_;
  const Report report_;
  const u32 block_, blocks_;
  volatile u64& ticket_;
  Area* own_;
  const u32 epoch_;
};

// The kernels: one for whatever there is, and those for what is called most, whose code is short: fetching code takes a good
// part of so short an operation. {name, element, combination, ranks}; src/cuda/one_shot.rs chooses.
#define RINGSIGHT_ONE_SHOTS(X)                               \
  X(ringsight_one_shot, void, void, 0)                       \
  X(ringsight_one_shot_sum_f32_2, Plain<float>, Sum, 2)      \
  X(ringsight_one_shot_sum_f32_4, Plain<float>, Sum, 4)      \
  X(ringsight_one_shot_sum_f32_8, Plain<float>, Sum, 8)      \
  X(ringsight_one_shot_sum_f16_2, Half, Sum, 2)              \
  X(ringsight_one_shot_sum_f16_4, Half, Sum, 4)              \
  X(ringsight_one_shot_sum_f16_8, Half, Sum, 8)              \
  X(ringsight_one_shot_sum_bf16_2, Bfloat16, Sum, 2)         \
  X(ringsight_one_shot_sum_bf16_4, Bfloat16, Sum, 4)         \
  X(ringsight_one_shot_sum_bf16_8, Bfloat16, Sum, 8)

}  // namespace ringsight
