// What a kernel reports to the host: events in the ring, progress and waits, and the end of a run.
#pragma once

#include "layout.cuh"

namespace ringsight {

// With RINGSIGHT_NO_EVENTS kernels report only the end of a run: a build for measuring what the rest costs.
#ifdef RINGSIGHT_NO_EVENTS
constexpr bool HAS_EVENTS = false;
#else
constexpr bool HAS_EVENTS = true;
#endif

class Report {
 public:
  // `head` must outlive this object. It is part of the kernel's argument.
  DEVICE explicit Report(const Head& head)
      : head_(head),
        state_(reinterpret_cast<LaunchState*>(head.states) + head.slot),
        control_(reinterpret_cast<LaunchControl*>(head.controls) + head.slot) {}

  DEVICE INLINE LaunchState& state() const { return *state_; }
  DEVICE INLINE LaunchControl& control() const { return *control_; }

  // Whether to give up a wait after `polls` polls. The abort word is in host memory. A GPU's loads of it take a microsecond each, one after the other,
  // and a thread in that queue does not see what it waits for. (When all warps loaded it every 256 polls, each wait of more than 130 us became up to
  // 270 us longer.) So loads are some 8 ms apart, and those of a launch's warps are spread as evenly as possible: by multiples of `STAGGER`, the
  // golden section of `LOOK`.
  DEVICE INLINE bool must_give_up(u32 polls) const { return is_long(polls) && must_give_up(); }
  // The same in two parts, for callers that report something in between.
  DEVICE INLINE bool is_long(u32 polls) const { return (polls + warp_in_launch() * STAGGER) % LOOK == 0; }
  DEVICE INLINE bool must_give_up() const { return load_once_a_warp(&control().abort) != 0; }

  // Shows what this thread waits for, when `is_long`. The watchdog reads it. The last thread of a launch to write wins. Each write stores another
  // word, so that a waiting thread is not taken for a stopped one. Nothing waits for the store.
  DEVICE INLINE void waits(u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) const {
    if (HAS_EVENTS) store_relaxed(&control().waits, waits_word(polls, phase, peer, channel, op, step));
  }
  // The same, not inlined, for callers without free registers.
  DEVICE INLINE void put_waits(u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) const {
    if (HAS_EVENTS) put_waits(control_, polls, phase, peer, channel, op, step);
  }
  // Shows that copy engines work for this rank in run number `runs`. The word differs from that of the run before. Once a run, and at each barrier.
  DEVICE INLINE void report_copying(u32 runs, u32 channel, u32 op) const { put_waits(runs % 128 * LOOK, Phase::Copies, UNKNOWN, channel, op, 0); }
  // Shows progress: `count` must differ from the last one. One thread of a block calls it every few hundred microseconds if nothing waits, so hardly
  // ever in short operations.
  DEVICE INLINE void moved(u32 count) const {
    if (HAS_EVENTS) store_relaxed(&control().moved, count);
  }

  // Runs before this one. The last block of the previous run wrote it before this run began.
  DEVICE INLINE u32 runs() const { return load_relaxed(&state_->runs); }
  // The replay number for events; 0 for an eager launch.
  DEVICE INLINE u32 replay(u32 runs) const { return (head_.launch & CAPTURED) != 0 ? runs - head_.runs_before + 1 : 0; }

  // Takes the next ticket of the ring, or the first of `count`. The event must follow soon, since the host reads in the order of tickets.
  DEVICE INLINE u64 ticket(u64 count = 1) const {
    if (!HAS_EVENTS) return 0;
    return add_relaxed(reinterpret_cast<u64*>(head_.ring_ticket), count);
  }

  // The ring slot of a ticket: the lap in the upper 16 bits, the entry's number below. It takes some dozens of instructions, so a kernel with an early
  // ticket computes it early.
  DEVICE INLINE u64 slot(u64 ticket) const {
    const u64 lap = ticket / RING_ENTRIES % 0xffff + 1;
    return lap << 48 | ticket % RING_ENTRIES;
  }

  DEVICE INLINE void event(EventKind kind, u32 replay, u32 channel, u32 op, u64 value) const {
    event_at(slot(ticket()), kind, replay, channel, op, value);
  }
  // Writes an event over the oldest one: two stores of 16 bytes and no fence. Every word carries the lap. So the host sees whether all four belong to
  // one event, in whatever order they become visible, even if a store is seen in halves.
  DEVICE INLINE void event_at(u64 slot, EventKind kind, u32 replay, u32 channel, u32 op, u64 value) const {
    if (!HAS_EVENTS) return;
    const u64 lap = slot >> 48;
    Event& event = reinterpret_cast<Event*>(head_.ring)[static_cast<u32>(slot)];
    const u64 what = static_cast<u64>(kind) << 8 | channel;
    store_pack(&event.halves[0], Pack{{value << 16 | lap, static_cast<u64>(op) << 32 | what << 16 | lap}}, false);
    store_pack(&event.halves[1],
               Pack{{static_cast<u64>(head_.launch) << 32 | value >> 48 << 16 | lap, static_cast<u64>(replay) << 32 | lap}},
               false);
  }

  // Stands for no slot of the ring.
  DEVICE INLINE static constexpr u64 no_slot() { return ~static_cast<u64>(0); }

  // Keeps the ring slot of the end event of a run with several blocks, if the end is near: its ticket was taken with that of the start. The slot is
  // kept in the word that counts blocks, so the last block gets it with the count. Asking for it at the end takes a quarter of a microsecond.
  DEVICE INLINE void keep_end(u64 slot) const {
    if (HAS_EVENTS) add_relaxed(&state_->done, (slot >> 48 << ENTRY_BITS | (slot & ENTRY)) << END_AT);
  }
  // Takes the kept slot back, if the end is not near after all. `no_slot()` if there is none any more.
  DEVICE INLINE u64 take_end() const {
    u64 word = load_relaxed(&state_->done);
    while (word >> END_AT != 0) {
      const u64 seen = compare_exchange_relaxed(&state_->done, word, word % (static_cast<u64>(1) << END_AT));
      if (seen == word) return end_in(word);
      word = seen;
    }
    return no_slot();
  }

  // One block is done. Returns whether it is the run's last block, whether any block was aborted, and the kept slot of the end event.
  //
  // Relaxed: flags of their own, or the end of the kernel, order what blocks have written for others, and the last block reads nothing of theirs but
  // this word. A release would wait for all stores of the block, also into other GPUs: a third of a microsecond. What aborted blocks have reported
  // comes before what the last block reports, by a fence on either side of the word.
  DEVICE INLINE bool block_done(u32 blocks, bool& aborted, u64& end) const {
    end = no_slot();
    if (blocks == 1) return true;
    if (aborted) fence_system();
    const u64 mine = aborted ? ABORTED + 1 : 1;
    const u64 done = add_relaxed(&state_->done, mine) + mine;
    aborted = done / ABORTED % ABORTED != 0;
    if (aborted) fence_system();
    if (done % ABORTED != blocks) return false;
    end = end_in(done);
    return true;
  }
  // The same for a run without a kept slot.
  DEVICE INLINE bool block_done(u32 blocks, bool& aborted) const {
    u64 end;
    return block_done(blocks, aborted, end);
  }

  // For a run of several kernels, of which the first and the last have one block: one kernel gives up, and those behind it learn of it. Relaxed: the
  // stream orders the kernels, and the last one resets the word for the next run.
  DEVICE INLINE void give_up() const { store_relaxed(&state_->done, ABORTED); }
  DEVICE INLINE bool has_given_up() const { return load_relaxed(&state_->done) != 0; }

  // The last block resets the state for the next run and tells the host that this run is over.
  //
  // Relaxed, like the words of an event: a release would wait for all writes to other GPUs and to the host, which takes longer than a short operation.
  // The end of the kernel orders the data. The host learns here only that the run is over. If it has not seen all events by then, it waits for them.
  // After a give-up the host must see all events and the mark: a fence, which pairs with the host's acquire. The next launch may use this state in
  // another stream. The host launches it microseconds after it has seen the count, when these stores have long left the multiprocessor. Nothing
  // formal guarantees that, and a fence would cost every run.
  DEVICE INLINE void end(u32 runs, bool aborted) const {
    store_relaxed(&state_->done, static_cast<u64>(0));
    store_relaxed(&state_->differs, 0u);
    store_relaxed(&state_->runs, runs + 1);
    store_relaxed(&control_->aborted, aborted ? 1u : 0u);
    if (aborted) fence_system();
    store_relaxed(&control_->runs, runs + 1);
  }

 private:
  static constexpr u32 LOOK = warp_threads() == 1 ? 256 : 1 << 14, STAGGER = 10125;
  // Layout of `LaunchState::done`: blocks done, blocks that gave up, and the kept slot: its lap, which is never 0, and its entry.
  static constexpr u64 ABORTED = 1 << 10, ENTRY_BITS = 28, ENTRY = (1 << ENTRY_BITS) - 1, END_AT = 20;
  DEVICE INLINE static u64 end_in(u64 word) {
    const u64 end = word >> END_AT;
    return end == 0 ? no_slot() : end >> ENTRY_BITS << 48 | (end & ENTRY);
  }
  // A peer that is not known.
  static constexpr u32 UNKNOWN = 0xffff;
  DEVICE INLINE static u64 waits_word(u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) {
    const u32 low = (peer < UNKNOWN ? peer : UNKNOWN) << 16 | (step & 0xffff);
    const u32 high = polls / LOOK << 25 | static_cast<u32>(phase) << 22 | (channel & 63) << 16 | (op & 0xffff);
    return static_cast<u64>(high) << 32 | low;
  }
  DEVICE static NOINLINE void put_waits(LaunchControl* control, u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) {
    store_relaxed(&control->waits, waits_word(polls, phase, peer, channel, op, step));
  }

  const Head& head_;
  LaunchState* state_;
  LaunchControl* control_;
};

}  // namespace ringsight
