// An all_reduce in one shot: every rank writes its elements into the memory of all others and reduces what has come from
// them, in the order of ranks.
//
// Data travels as lines of 8 bytes with the epoch of the operation beside each half, so that no flag has to follow the data
// and no rank waits for anything but the data itself. Lines have two places, by the parity of the epoch: a rank that
// is at an epoch has got every line of the one before from all others, so these have ended the one before that.
#pragma once

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

// One block of the kernel. All threads but the last `SERVICE` move data; those of the first block tell what the operation
// does and look whether the others do the same.
class OneShotBlock {
 public:
#ifdef __CUDACC__
  static constexpr u32 SERVICE = 32;
#else
  static constexpr u32 SERVICE = 0;
#endif

  // `aborted` is shared by the threads of the block.
  DEVICE OneShotBlock(const OneShot& arguments, u32 block, u32 blocks, volatile u32& aborted)
      : arguments_(arguments),
        report_(arguments.head),
        block_(block),
        blocks_(blocks),
        aborted_(aborted),
        own_(area_of(arguments.bases[arguments.rank])),
        epoch_(next_epoch(load_relaxed(&own_->epoch))) {}

  DEVICE INLINE void run() {
    const u32 movers = threads() - SERVICE;
    u32 runs = 0;
    if (thread_index() == 0) {
      aborted_ = 0;
      // Read now, for the end.
      runs = report_.runs();
    }
    if (epoch_ >= LAST_EPOCH - 1) clear();
    block_barrier();
    // On a GPU each thread is one of the two; on the host the only one is both.
    if (SERVICE == 0 || thread_index() >= movers) {
      if (block_ == 0) announce(thread_index() - (SERVICE != 0 ? movers : 0));
    }
    if (thread_index() < movers) {
      move(static_cast<u64>(block_) * movers + thread_index(), static_cast<u64>(blocks_) * movers);
    }
    if (SERVICE == 0 || thread_index() >= movers) {
      if (block_ == 0) compare(thread_index() - (SERVICE != 0 ? movers : 0));
    }
    block_barrier();
    if (thread_index() == 0) finish(runs);
  }

 private:
  static constexpr u32 STRIDE = SERVICE != 0 ? SERVICE : 1;

  // Where the lines of one rank and parity begin in the memory of `rank`.
  DEVICE INLINE Line* lines_in(u32 rank, u32 parity, u32 source) const {
    return reinterpret_cast<Line*>(arguments_.bases[rank] + LINES_OFFSET) +
           (parity * arguments_.ranks + source) * arguments_.lines;
  }

  // Before epochs begin anew, what is left of old ones goes, so that none is taken for a new one. No rank writes into the
  // other parity now: all have ended the epoch before, and none begins the next before it has all of this one's lines.
  DEVICE INLINE void clear() {
    const u32 parity = ~epoch_ & 1;
    Line* lines = lines_in(arguments_.rank, parity, 0);
    const u32 all = arguments_.lines * arguments_.ranks;
    for (u32 at = block_ * threads() + thread_index(); at < all; at += blocks_ * threads()) store_line(&lines[at], 0, 0, 0);
    if (block_ == 0) {
      for (u32 at = thread_index(); at < MAX_PEERS; at += threads()) store_line(&own_->tags[parity][at], 0, 0, 0);
    }
    block_barrier();
    fence_system();
  }

  // `lane` among the threads of the service.
  DEVICE INLINE void announce(u32 lane) {
    for (u32 rank = lane; rank < arguments_.ranks; rank += STRIDE) {
      if (rank == arguments_.rank) continue;
      store_line(&area_of(arguments_.bases[rank])->tags[epoch_ & 1][arguments_.rank], arguments_.tag, 0, epoch_);
    }
    if (lane == STRIDE - 1) {
      report_.event(EventKind::Started, report_.replay(report_.runs()), arguments_.channel, arguments_.op, device_time());
    }
  }

  // Waits for the tags of all others.
  DEVICE INLINE void compare(u32 lane) {
    for (u32 rank = lane; rank < arguments_.ranks; rank += STRIDE) {
      for (u32 polls = 1; rank != arguments_.rank && !is_same(rank); polls++) {
        if (polls % 256 != 0) continue;
        if (must_give_up()) return;
        if (SERVICE != 0) met_ring(rank);
      }
    }
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
  DEVICE INLINE bool must_give_up() {
    if (load_once_a_warp(&report_.control().abort) == 0) return false;
    aborted_ = 1;
    return true;
  }

  DEVICE INLINE void move(u64 first, u64 stride) {
    const u32 ranks = arguments_.ranks, me = arguments_.rank, parity = epoch_ & 1;
    const u64 bytes = arguments_.elems * size_of(arguments_.data_type);
    const bool aligned = is_aligned(send(0), 8) && is_aligned(recv(0), 8);
    for (u64 at = first; at * 8 < bytes; at += stride) {
      const bool full = aligned && at * 8 + 8 <= bytes;
      const u64 mine = full ? *reinterpret_cast<const u64*>(send(at * 8)) : load_some(at * 8, bytes);
      UNROLL
      for (u32 hop = 1; hop < MAX_PEERS; hop++) {
        if (hop < ranks) {
          // Not all to the same one at first.
          const u32 rank = me + hop < ranks ? me + hop : me + hop - ranks;
          store_line(lines_in(rank, parity, me) + at, static_cast<u32>(mine), static_cast<u32>(mine >> 32), epoch_);
        }
      }
      u64 all[MAX_PEERS];
      if (!gather(all, mine, lines_in(me, parity, 0) + at)) return;
      const u64 result = reduce(all);
      if (full) {
        *reinterpret_cast<u64*>(recv(at * 8)) = result;
      } else {
        store_some(at * 8, bytes, result);
      }
    }
  }

  DEVICE INLINE const u8* send(u64 at) const { return reinterpret_cast<const u8*>(arguments_.send) + at; }
  DEVICE INLINE u8* recv(u64 at) const { return reinterpret_cast<u8*>(arguments_.recv) + at; }

  // What there is of 8 bytes, element by element.
  DEVICE INLINE u64 load_some(u64 at, u64 bytes) const {
    switch (size_of(arguments_.data_type)) {
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
    switch (size_of(arguments_.data_type)) {
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
  DEVICE INLINE bool gather(u64 (&all)[MAX_PEERS], u64 mine, const Line* lines) {
    const u32 ranks = arguments_.ranks, me = arguments_.rank;
    for (u32 polls = 1;; polls++) {
      bool here = true;
      UNROLL
      for (u32 rank = 0; rank < MAX_PEERS; rank++) {
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
    for (u32 rank = 0; rank < arguments_.ranks; rank++) {
      if (rank != arguments_.rank && !is_same(rank)) met_ring(rank);
    }
    pause_polling();
  }

  DEVICE INLINE u64 reduce(const u64 (&all)[MAX_PEERS]) const {
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
  template <class E>
  DEVICE INLINE u64 reduce_integers(const u64 (&all)[MAX_PEERS]) const {
    return arguments_.combine == Combine::SumDiv ? reduce_as<E, SumDiv>(all) : reduce_any<E>(all);
  }
  template <class E>
  DEVICE INLINE u64 reduce_any(const u64 (&all)[MAX_PEERS]) const {
    switch (arguments_.combine) {
      case Combine::Prod: return reduce_as<E, Prod>(all);
      case Combine::Max: return reduce_as<E, Max>(all);
      case Combine::Min: return reduce_as<E, Min>(all);
      case Combine::MulSum: return reduce_as<E, MulSum>(all);
      default: return reduce_as<E, Sum>(all);
    }
  }
  template <class E, class Op>
  DEVICE INLINE u64 reduce_as(const u64 (&all)[MAX_PEERS]) const {
    using W = typename E::Wide;
    constexpr u32 BITS = 8 * sizeof(E);
    const u64 argument = arguments_.argument;
    u64 result = 0;
    // Conversions of 8-bit floats are long.
    UNROLL_BY((sizeof(E) == 1 ? 1 : 8 / sizeof(E)))
    for (u32 bit = 0; bit < 64; bit += BITS) {
      W sum{};
      UNROLL
      for (u32 rank = 0; rank < MAX_PEERS; rank++) {
        if (rank < arguments_.ranks) {
          const W one = element_of<E>(all[rank] >> bit).widen();
          sum = rank == 0 ? Fold<Op>::first(one, argument) : Fold<Op>::next(sum, one, argument);
        }
      }
      result |= bits_of<E>(E::narrow(Fold<Op>::last(sum, argument))) << bit;
    }
    return result;
  }

  DEVICE INLINE void finish(u32 runs) {
    bool aborted = aborted_ != 0;
    if (!report_.block_done(blocks_, aborted)) return;
    store_relaxed(&own_->epoch, epoch_);
    const EventKind kind = aborted ? EventKind::Aborted : EventKind::Stopped;
    report_.event(kind, report_.replay(runs), arguments_.channel, arguments_.op, device_time());
    // Relaxed: an event that the host sees after this loses but its time.
    store_relaxed(&report_.control().runs, report_.renew(runs, aborted));
  }

  const OneShot& arguments_;
  const Report report_;
  const u32 block_, blocks_;
  volatile u32& aborted_;
  Area* own_;
  const u32 epoch_;
};

}  // namespace ringsight
