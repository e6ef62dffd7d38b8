// What the kernels among peers have in common: each tells all others which operation it begins and looks which they begin,
// counts the communicator's operations, and reports its own.
#pragma once

#include "peers.cuh"
#include "report.cuh"

namespace ringsight {

// What all of them are told of their operation.
struct PeerCall {
  Head head;
  // By rank: its memory.
  u64 bases[MAX_PEERS];
  u64 argument;
  u32 tag;
  u32 rank;
  u32 ranks;
  DataType data_type;
  Combine combine;
  u8 channel;
  u8 reserved;
};
static_assert(offsetof(PeerCall, bases) == 48, "as in src/cuda/layout.rs");
static_assert(offsetof(PeerCall, tag) == 120, "as in src/cuda/layout.rs");
static_assert(offsetof(PeerCall, data_type) == 132, "as in src/cuda/layout.rs");
static_assert(sizeof(PeerCall) == 136, "as in src/cuda/layout.rs");

// Threads of a block that move no data: those of the first block tell what the operation does and look whether the others do
// the same.
#ifdef __CUDACC__
constexpr u32 SERVICE = 32;
#else
constexpr u32 SERVICE = 0;
#endif

// The part of one block; of any number of ranks, or of `RANKS`.
template <u32 RANKS>
class Meeting {
 public:
  // `place` is shared by the threads of the block.
  DEVICE Meeting(const PeerCall& call, u32 block, u32 blocks, volatile u64& place)
      : call_(call),
        report_(call.head),
        block_(block),
        blocks_(blocks),
        place_(place),
        own_(area_of(call.bases[call.rank])),
        epoch_(next_epoch(load_relaxed(&own_->epoch))) {}

  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : call_.ranks; }
  DEVICE INLINE u32 epoch() const { return epoch_; }
  DEVICE INLINE Area& own() const { return *own_; }

  // Threads of the block that move data. On a GPU each thread moves or serves; on the host the only one does both.
  DEVICE INLINE static u32 movers() { return threads() - SERVICE; }
  DEVICE INLINE static bool moves() { return thread_index() < movers(); }
  DEVICE INLINE bool serves() const { return block_ == 0 && (SERVICE == 0 || !moves()); }

  // Runs before this one: to be asked for early.
  DEVICE INLINE u32 runs() const { return report_.runs(); }

  // To be called by all threads before they move anything. `is_short`: the end is near. `tell`: by the threads that serve, tells the others what
  // they wait for besides; before the host is told of the start, which takes as long as a way over NVLink.
  template <class Tell>
  DEVICE INLINE void begin(bool is_short, Tell tell) {
    if (epoch_ >= LAST_EPOCH - 1) clear();
    if (serves()) announce(lane(), is_short, tell);
  }
  DEVICE INLINE void begin(bool is_short) {
    begin(is_short, [] {});
  }

  // By the threads that serve: waits until all others have begun this operation, and has the host told if they have begun another one;
  // false if it is to give up.
  DEVICE INLINE bool meets() { return warp_all(compare(lane())); }

  // To be called by all threads in the end, and not before they have moved what is theirs to move (`done`: none gave up).
  // `straight`: between callers' buffers, of which no rank may do anything else before all are done with them. `may_be_straight`: for any thread of the
  // block.
  DEVICE INLINE void end(u32 runs, bool done, bool straight = false, bool may_be_straight = false) {
    if (serves()) done = compare(lane()) && done;
    bool aborted = block_any(!done);
    // No thread of the block waits for anybody now, but those that are about to leave, and one that lets the next kernel come does so for all.
    if (!may_be_straight) let_next_kernel_come();
    if (thread_index() >= warp_threads()) return;
    if (straight && !aborted) aborted = !leave();
    if (thread_index() == 0) finish(runs, aborted);
  }

  // Of an operation that no kernel does, but copies between two kernels of one block of threads that serve (gates.cuh): to be called by all of
  // them instead of `end`. The first one ends when all others have begun, or when it is to give up.
  DEVICE INLINE void end_first() {
    const bool here = !serves() || meets();
    if (block_any(!here)) {
      if (thread_index() == 0) report_.give_up();
    } else if (thread_index() == 0) {
      report_.copies(report_.runs(), call_.channel, call_.head.op);
    }
  }
  // The second one ends when all ranks' copies are done. `gives_up`: this rank's have not been made.
  DEVICE INLINE void end_second(bool gives_up) {
    if (thread_index() >= warp_threads()) return;
    // Nobody has announced anything in this kernel.
    if (thread_index() == 0) place_ = Report::no_place();
    warp_barrier();
    bool aborted = !warp_all(!gives_up && !report_.has_given_up());
    if (!aborted) aborted = !leave();
    if (thread_index() == 0) finish(report_.runs(), aborted);
  }
  // One between them: ends when all ranks have come as far, or when it is to give up, or the first one has. `word`: which, other than the end's.
  DEVICE INLINE void meet_between(u32 word) {
    if (thread_index() >= warp_threads()) return;
    // Nobody has announced anything in this kernel either.
    if (thread_index() == 0) place_ = Report::no_place();
    warp_barrier();
    bool here = warp_all(!report_.has_given_up());
    if (here) tell(word);
    if (here) here = have_told(word, Phase::Data, word);
    if (thread_index() != 0) return;
    if (!here) return report_.give_up();
    // What it has waited for is no longer so.
    report_.copies(report_.runs(), call_.channel, call_.head.op);
  }

  // For each other rank, by one of the threads that serve, which call it.
  template <class Tell>
  DEVICE INLINE void for_others(Tell tell) const {
    for (u32 rank = lane(); rank < ranks(); rank += STRIDE) {
      if (rank != call_.rank) tell(rank);
    }
  }

  DEVICE INLINE Area& area(u32 rank) const { return *area_of(call_.bases[rank]); }

  // For who has waited long.
  DEVICE INLINE bool must_give_up(u32 polls) const {
    if (!report_.is_long(polls)) return false;
    give_back();
    return report_.must_give_up();
  }
  DEVICE INLINE const Report& report() const { return report_; }
  // The same, telling what for.
  DEVICE INLINE bool must_give_up(u32 polls, Phase phase, u32 rank, u32 step) const {
    if (!report_.is_long(polls)) return false;
    report_.put_waits(polls, phase, rank, call_.channel, call_.head.op, step);
    give_back();
    return report_.must_give_up();
  }

  // The same on the host, where who waits for data is who compares tags.
  DEVICE INLINE void look_aside() {
    give_back();
    for (u32 rank = 0; rank < ranks(); rank++) {
      if (rank != call_.rank && !is_same(rank)) met_ring(rank);
    }
    pause_polling();
  }

 private:
  static constexpr u32 STRIDE = SERVICE != 0 ? SERVICE : 1;
  // Of this thread, among those of the service.
  DEVICE INLINE static u32 lane() { return thread_index() - (SERVICE != 0 ? movers() : 0); }

  // Before epochs begin anew, what is left of old ones goes, so that none is taken for a new one. No rank writes into the
  // other parity now: all have ended the epoch before, and none begins the next before it has met all others in this one, which is told when this
  // is done: so the block that tells it does it, and no other, which may come later.
  DEVICE INLINE void clear() {
    if (block_ != 0) return;
    const u32 parity = ~epoch_ & 1, all = LINES / 2;
    Line* lines = reinterpret_cast<Line*>(call_.bases[call_.rank] + LINES_OFFSET) + parity * all;
    for (u32 at = thread_index(); at < all; at += threads()) store_line(&lines[at], 0, 0, 0);
    for (u32 at = thread_index(); at < MAX_PEERS; at += threads()) {
      store_line(&own_->tags[parity][at], 0, 0, 0);
      store_line(&own_->places[parity][at].to, 0, 0, 0);
      store_line(&own_->places[parity][at].from, 0, 0, 0);
      for (u32 block = 0; block < MOST_BLOCKS; block++) store_relaxed(&own_->left[at][block], 0u);
    }
    block_barrier();
    fence_system();
  }

  // `lane` among the threads of the service.
  template <class Tell>
  DEVICE INLINE void announce(u32 lane, bool is_short, Tell tell) {
    for_others([this](u32 rank) { store_line(&area(rank).tags[epoch_ & 1][call_.rank], call_.tag, 0, epoch_); });
    tell();
    if (lane == STRIDE - 1) {
      // The place of an end that is near is had together with that of the start: to ask for it when the data is here takes a good part of so
      // short an operation.
      const u64 ticket = report_.ticket(is_short ? 2 : 1);
      report_.event_at(report_.place(ticket), EventKind::Started, report_.replay(report_.runs()), call_.channel, call_.head.op,
                       device_time());
      const u64 end = is_short ? report_.place(ticket + 1) : Report::no_place();
      place_ = blocks_ == 1 ? end : Report::no_place();
      if (blocks_ != 1 && is_short) report_.keep_end(end);
    }
    // Whoever waits for long may give the place back.
    warp_barrier();
  }

  // Waits for the tags of all others; false if it is to give up.
  DEVICE INLINE bool compare(u32 lane) {
    bool same = true;
    for (u32 rank = lane; same && rank < ranks(); rank += STRIDE) {
      for (u32 polls = 1; rank != call_.rank && !is_same(rank); polls++) {
        if (must_give_up(polls, Phase::Begin, rank, 0)) {
          same = false;
          break;
        }
        if (polls % 256 != 0) continue;
        give_back();
        met_ring(rank);
        if (PAUSES_AT_ONCE) pause_polling();
      }
    }
    return same;
  }

  // The end is not near: the host reads events in the order of tickets, and shall not wait here for those of others. By any thread that has
  // waited long. (A block other than the first has put nothing into its own `place_`.)
  DEVICE INLINE void give_back() const { give_back(call_, blocks_, &place_); }
  // A function of its own: in the registers of those who call it there is no room for it.
  DEVICE static NOINLINE void give_back(const PeerCall& call, u32 blocks, volatile u64* place) {
    const Report report(call.head);
    const u64 end = blocks == 1 ? exchange_relaxed(place, Report::no_place()) : report.take_end();
    if (end != Report::no_place()) report.event_at(end, EventKind::Nothing, 0, call.channel, call.head.op, 0);
  }

  // Whether another rank is seen to have begun this operation. If it has begun another one, the host is told.
  DEVICE INLINE bool is_same(u32 rank) {
    const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
    if (line.low_flag != epoch_ || line.high_flag != epoch_) return false;
    if (line.low == call_.tag) return true;
    differs(line.low);
    return false;
  }

  DEVICE INLINE void differs(u32 theirs) {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), call_.channel, call_.head.op, theirs);
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
      const u64 flag = load_acquire(&slot.flag);
      if (!is_posted(flag, head)) continue;
      const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
      if (line.low_flag != epoch_) differs(tag_of(flag));
    }
  }

  // Called by a warp when its block is done: waits until the same block of each other rank is; false if it is to give up. Each thread has a rank: one
  // that went through all of them would wait for one look after the other.
  DEVICE INLINE bool leave() {
    tell(block_);
    // All ranks have as many blocks.
    return have_told(block_, Phase::End, 0);
  }
  DEVICE INLINE void tell(u32 word) const {
    for (u32 rank = warp_thread(); rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank) continue;
      // All that this block has written into others' buffers, and read from them, is before what is said of it.
      fence_system();
      store_relaxed(&area(rank).left[call_.rank][word], epoch_);
    }
  }
  DEVICE INLINE bool have_told(u32 word, Phase phase, u32 step) const {
    bool told = true;
    for (u32 rank = warp_thread(); told && rank < ranks(); rank += warp_threads()) {
      // Acquire: what is written when the kernel has ended is after what the other has read here, and what is read then is what it
      // has written. Nobody is an epoch ahead: each begins with what it hears from this rank.
      for (u32 polls = 1; rank != call_.rank && load_acquire(&own_->left[rank][word]) != epoch_; polls++) {
        if (must_give_up(polls, phase, rank, step)) {
          told = false;
          break;
        }
        if (pauses_after(polls)) pause_polling();
      }
    }
    return warp_all(told);
  }

  DEVICE INLINE void finish(u32 runs, bool aborted) {
    u64 place;
    if (!report_.block_done(blocks_, aborted, place)) return;
    if (blocks_ == 1) place = place_;
    store_relaxed(&own_->epoch, epoch_);
    const EventKind kind = aborted ? EventKind::Aborted : EventKind::Stopped;
    if (place == Report::no_place()) place = report_.place(report_.ticket());
    report_.event_at(place, kind, report_.replay(runs), call_.channel, call_.head.op, device_time());
    report_.end(runs, aborted);
  }

  const PeerCall& call_;
  const Report report_;
  const u32 block_, blocks_;
  // Where the end of an operation of one block will be told, if it is known.
  volatile u64& place_;
  Area* own_;
  const u32 epoch_;
};

}  // namespace ringsight
