// How the peer kernels of all ranks begin and end an operation together.
//
// Each rank announces the tag of the operation that it begins and compares it with the tags of the other ranks. It counts the communicator's
// operations (epochs), and reports start and end to the host.
//
// States of an operation on a rank: announced → all ranks have begun it → moved → (zero-copy and copy engines: all ranks are done with its
// buffers) → reported. A kernel gives up from any state when the host sets the abort word.
//
// Invariants:
// - No rank is a whole epoch ahead: an operation needs something from every other rank that that rank writes only after it has begun it.
// - Only the first block announces and compares tags. Its service warp does so while the data warps move.
#pragma once

#include "report.cuh"

namespace ringsight {

// Threads of a block that move no data. In the first block they announce the operation and compare tags.
#ifdef __CUDACC__
constexpr u32 SERVICE_THREADS = 32;
#else
constexpr u32 SERVICE_THREADS = 0;
#endif

// One block's part. `RANKS` is the number of ranks, or 0 for any.
template <u32 RANKS>
class Barrier {
 public:
  // `end_slot` is shared by the threads of the block.
  DEVICE Barrier(const PeerCall& call, u32 block, u32 blocks, volatile u64& end_slot)
      : call_(call),
        report_(call.head),
        block_(block),
        blocks_(blocks),
        end_slot_(end_slot),
        own_(header_of(call.bases[call.rank])),
        epoch_(next_epoch(load_relaxed(&own_->epoch))) {}

  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : call_.ranks; }
  DEVICE INLINE u32 epoch() const { return epoch_; }
  DEVICE INLINE PeerHeader& own() const { return *own_; }

  // Threads of the block that move data. On a GPU a thread either moves data or serves; on the host the only thread does both.
  DEVICE INLINE static u32 data_threads() { return threads() - SERVICE_THREADS; }
  DEVICE INLINE static bool moves_data() { return thread_index() < data_threads(); }
  DEVICE INLINE bool is_service() const { return block_ == 0 && (SERVICE_THREADS == 0 || !moves_data()); }

  // Runs before this one. Loaded early, since the load takes long.
  DEVICE INLINE u32 runs() const { return report_.runs(); }

  // All threads call this before they move anything. `is_short`: the end is near. The service threads call `announce_more` to tell the other
  // ranks what else they wait for. It runs before the start is reported to the host, which takes as long as a trip over NVLink.
  template <class Announce>
  DEVICE INLINE void begin(bool is_short, Announce announce_more) {
    if (epoch_ >= LAST_EPOCH - 1) clear();
    if (is_service()) announce(lane(), is_short, announce_more);
  }
  DEVICE INLINE void begin(bool is_short) {
    begin(is_short, [] {});
  }

  // Service threads: waits until all other ranks have begun this operation, and reports a mismatch if one has begun another. False: give up.
  DEVICE INLINE bool wait_for_begin() { return warp_all(wait_for_tags(lane())); }

  // All threads call this at the end, after they have moved their data (`done`: none gave up). `zero_copy`: it used callers' buffers, so no rank
  // may go on before all ranks are done with them. `may_zero_copy`: equal for all threads of the block.
  DEVICE INLINE void end(u32 runs, bool done, bool zero_copy = false, bool may_zero_copy = false) {
    if (is_service()) done = wait_for_tags(lane()) && done;
    bool aborted = block_any(!done);
    // No thread of the block waits for a rank any more, unless it is zero-copy. One thread that lets the next kernel come does so for all.
    if (!may_zero_copy) let_next_kernel_come();
    if (thread_index() >= warp_threads()) return;
    if (zero_copy && !aborted) aborted = !wait_for_exit();
    if (thread_index() == 0) finish(runs, aborted);
  }

  // Copy engines (copy_engine.cuh), entry kernel: all threads call this instead of `end`. Returns when all other ranks have begun, or on give-up.
  DEVICE INLINE void end_entry() {
    const bool here = !is_service() || wait_for_begin();
    if (block_any(!here)) {
      if (thread_index() == 0) report_.give_up();
    } else if (thread_index() == 0) {
      report_.report_copying(report_.runs(), call_.channel, call_.head.op);
    }
  }
  // Exit kernel: returns when all ranks' copies are done. `copies_failed`: the host could not queue this rank's copies.
  DEVICE INLINE void end_exit(bool copies_failed) {
    if (thread_index() >= warp_threads()) return;
    // This kernel has not announced anything.
    if (thread_index() == 0) end_slot_ = Report::no_slot();
    warp_barrier();
    bool aborted = !warp_all(!copies_failed && !report_.has_given_up());
    if (!aborted) aborted = !wait_for_exit();
    if (thread_index() == 0) finish(report_.runs(), aborted);
  }
  // Barrier kernel: returns when all ranks have come to it, or on give-up, or if the entry kernel gave up. `word`: the barrier's number, not 0.
  DEVICE INLINE void run_barrier(u32 word) {
    if (thread_index() >= warp_threads()) return;
    // This kernel has not announced anything.
    if (thread_index() == 0) end_slot_ = Report::no_slot();
    warp_barrier();
    bool here = warp_all(!report_.has_given_up());
    if (here) signal(word);
    if (here) here = wait_for_signals(word, Phase::Data, word);
    if (thread_index() != 0) return;
    if (!here) return report_.give_up();
    // The wait is over, so what it waited for must no longer be shown.
    report_.report_copying(report_.runs(), call_.channel, call_.head.op);
  }

  // Service threads: calls `action` for each other rank, one thread per rank.
  template <class Action>
  DEVICE INLINE void for_others(Action action) const {
    for (u32 rank = lane(); rank < ranks(); rank += STRIDE) {
      if (rank != call_.rank) action(rank);
    }
  }

  DEVICE INLINE PeerHeader& header(u32 rank) const { return *header_of(call_.bases[rank]); }

  // Whether to give up. Called after `polls` polls of a wait.
  DEVICE INLINE bool must_give_up(u32 polls) const {
    if (!report_.is_long(polls)) return false;
    return_end_slot();
    return report_.must_give_up();
  }
  DEVICE INLINE const Report& report() const { return report_; }
  // The same, and shows the host what the thread waits for.
  DEVICE INLINE bool must_give_up(u32 polls, Phase phase, u32 rank, u32 step) const {
    if (!report_.is_long(polls)) return false;
    report_.put_waits(polls, phase, rank, call_.channel, call_.head.op, step);
    return_end_slot();
    return report_.must_give_up();
  }

  // Host only: the thread that waits for data also compares tags.
  DEVICE INLINE void check_others() {
    return_end_slot();
    for (u32 rank = 0; rank < ranks(); rank++) {
      if (rank != call_.rank && !has_same_tag(rank)) check_ring(rank);
    }
    pause_polling();
  }

 private:
  static constexpr u32 STRIDE = SERVICE_THREADS != 0 ? SERVICE_THREADS : 1;
  // This thread's number among the service threads.
  DEVICE INLINE static u32 lane() { return thread_index() - (SERVICE_THREADS != 0 ? data_threads() : 0); }

  // Before epochs start again at 1, clears lines of old epochs, so that none is taken for a new one. No rank writes into the other parity now:
  // all have finished the epoch before, and none begins the next one before this rank has announced this one. The first block announces, so
  // it alone clears; another block might come later.
  DEVICE INLINE void clear() {
    if (block_ != 0) return;
    const u32 parity = ~epoch_ & 1, all = LINES / 2;
    Line* lines = reinterpret_cast<Line*>(call_.bases[call_.rank] + LINES_OFFSET) + parity * all;
    for (u32 at = thread_index(); at < all; at += threads()) store_line(&lines[at], 0, 0, 0);
    for (u32 at = thread_index(); at < MAX_PEERS; at += threads()) {
      store_line(&own_->tags[parity][at], 0, 0, 0);
      store_line(&own_->addresses[parity][at].to, 0, 0, 0);
      store_line(&own_->addresses[parity][at].from, 0, 0, 0);
      for (u32 block = 0; block < MAX_BLOCKS; block++) store_relaxed(&own_->done[at][block], 0u);
    }
    block_barrier();
    fence_system();
  }

  // `lane`: this thread's number among the service threads.
  template <class Announce>
  DEVICE INLINE void announce(u32 lane, bool is_short, Announce announce_more) {
    for_others([this](u32 rank) { store_line(&header(rank).tags[epoch_ & 1][call_.rank], call_.tag, 0, epoch_); });
    announce_more();
    if (lane == STRIDE - 1) {
      // If the end is near, its ring slot is taken together with that of the start. Asking for it when the data has arrived would take a good part
      // of so short an operation.
      const u64 ticket = report_.ticket(is_short ? 2 : 1);
      report_.event_at(report_.slot(ticket), EventKind::Started, report_.replay(report_.runs()), call_.channel, call_.head.op,
                       device_time());
      const u64 end = is_short ? report_.slot(ticket + 1) : Report::no_slot();
      end_slot_ = blocks_ == 1 ? end : Report::no_slot();
      if (blocks_ != 1 && is_short) report_.keep_end(end);
    }
    // A thread that waits long may return the slot.
    warp_barrier();
  }

  // Waits for the tags of all other ranks. False: give up.
  DEVICE INLINE bool wait_for_tags(u32 lane) {
    bool same = true;
    for (u32 rank = lane; same && rank < ranks(); rank += STRIDE) {
      for (u32 polls = 1; rank != call_.rank && !has_same_tag(rank); polls++) {
        if (must_give_up(polls, Phase::Begin, rank, 0)) {
          same = false;
          break;
        }
        if (polls % 256 != 0) continue;
        return_end_slot();
        check_ring(rank);
        if (PAUSES_AT_ONCE) pause_polling();
      }
    }
    return same;
  }

  // Returns the ring slot of the end early. Any thread that has waited long calls this: the host reads events in the order of their tickets and
  // would wait here for events of other kernels. Blocks other than the first have nothing in their own `end_slot_`.
  DEVICE INLINE void return_end_slot() const { return_end_slot(call_, blocks_, &end_slot_); }
  // Not inlined: the callers have no registers left for it.
  DEVICE static NOINLINE void return_end_slot(const PeerCall& call, u32 blocks, volatile u64* end_slot) {
    const Report report(call.head);
    const u64 end = blocks == 1 ? exchange_relaxed(end_slot, Report::no_slot()) : report.take_end();
    if (end != Report::no_slot()) report.event_at(end, EventKind::Nothing, 0, call.channel, call.head.op, 0);
  }

  // Whether another rank has begun this operation. Reports a mismatch if it has begun another one.
  DEVICE INLINE bool has_same_tag(u32 rank) {
    const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
    if (line.low_flag != epoch_ || line.high_flag != epoch_) return false;
    if (line.low == call_.tag) return true;
    report_mismatch(line.low);
    return false;
  }

  DEVICE INLINE void report_mismatch(u32 theirs) {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) {
      report_.event(EventKind::Mismatch, report_.replay(report_.runs()), call_.channel, call_.head.op, theirs);
    }
  }

  // Whether `rank`, the previous rank of a ring, has begun an operation over that ring. If its slot is visible but its tag is not, it has not
  // begun this operation: the slot was written later.
  DEVICE INLINE void check_ring(u32 rank) {
    for (u32 ring = 0; ring < MAX_RINGS && own_->rings[ring].fifo != 0; ring++) {
      if (own_->rings[ring].prev != rank) continue;
      FifoHeader* fifo = reinterpret_cast<FifoHeader*>(own_->rings[ring].fifo);
      const u64 head = load_relaxed(&fifo->head);
      const FifoLine& slot = fifo->lines[head % SLOTS];
      const u64 flag = load_acquire(&slot.flag);
      if (!is_posted(flag, head)) continue;
      const Line line = load_line(&own_->tags[epoch_ & 1][rank]);
      if (line.low_flag != epoch_) report_mismatch(tag_of(flag));
    }
  }

  // One warp calls this when its block is done. Waits until the same block of each other rank is. False: give up. There is one thread per rank,
  // since one thread for all ranks would wait for one load after the other.
  DEVICE INLINE bool wait_for_exit() {
    signal(block_);
    // All ranks have the same number of blocks.
    return wait_for_signals(block_, Phase::End, 0);
  }
  DEVICE INLINE void signal(u32 word) const {
    for (u32 rank = warp_thread(); rank < ranks(); rank += warp_threads()) {
      if (rank == call_.rank) continue;
      // The fence orders everything that this block has written to, or read from, other ranks' buffers before the signal.
      fence_system();
      store_relaxed(&header(rank).done[call_.rank][word], epoch_);
    }
  }
  DEVICE INLINE bool wait_for_signals(u32 word, Phase phase, u32 step) const {
    bool signalled = true;
    for (u32 rank = warp_thread(); signalled && rank < ranks(); rank += warp_threads()) {
      // Acquire: what is written after this kernel comes after what the other rank has read here, and what is read then is what it has written.
      // No rank is an epoch ahead, so the comparison is for equality.
      for (u32 polls = 1; rank != call_.rank && load_acquire(&own_->done[rank][word]) != epoch_; polls++) {
        if (must_give_up(polls, phase, rank, step)) {
          signalled = false;
          break;
        }
        if (pauses_after(polls)) pause_polling();
      }
    }
    return warp_all(signalled);
  }

  DEVICE INLINE void finish(u32 runs, bool aborted) {
    u64 slot;
    if (!report_.block_done(blocks_, aborted, slot)) return;
    if (blocks_ == 1) slot = end_slot_;
    store_relaxed(&own_->epoch, epoch_);
    const EventKind kind = aborted ? EventKind::Aborted : EventKind::Stopped;
    if (slot == Report::no_slot()) slot = report_.slot(report_.ticket());
    report_.event_at(slot, kind, report_.replay(runs), call_.channel, call_.head.op, device_time());
    report_.end(runs, aborted);
  }

  const PeerCall& call_;
  const Report report_;
  const u32 block_, blocks_;
  // Ring slot of the end event, if it was taken early and the operation has one block.
  volatile u64& end_slot_;
  PeerHeader* own_;
  const u32 epoch_;
};

}  // namespace ringsight
