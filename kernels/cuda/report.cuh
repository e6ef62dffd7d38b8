// What kernels tell the host: events in the ring, and the end of a run.
#pragma once

#include "launch.cuh"

namespace ringsight {

// Without RINGSIGHT_NO_EVENTS, with which kernels tell the host only that a run is over: to measure what the rest costs.
#ifdef RINGSIGHT_NO_EVENTS
constexpr bool TELLS = false;
#else
constexpr bool TELLS = true;
#endif

class Report {
 public:
  // `head` must outlive it: the kernel's argument.
  DEVICE explicit Report(const Head& head)
      : head_(head),
        state_(reinterpret_cast<LaunchState*>(head.states) + head.slot),
        control_(reinterpret_cast<LaunchControl*>(head.controls) + head.slot) {}

  DEVICE INLINE LaunchState& state() const { return *state_; }
  DEVICE INLINE LaunchControl& control() const { return *control_; }

  // For who has looked so often for what it waits for: whether to give up. The abort word is in the host's memory, where a GPU's looks take a
  // microsecond each, one after the other, and who stands in that queue does not see what it waits for. (Looks of all warps after every 256
  // polls made each wait of more than 130 us up to 270 us longer.) So looks are some 8 ms apart, and those of a launch's warps as far from each
  // other as they can be: multiples of an odd number that is the golden section of `LOOK` are.
  DEVICE INLINE bool must_give_up(u32 polls) const { return is_long(polls) && must_give_up(); }
  // The same in two, for who has something to tell between them.
  DEVICE INLINE bool is_long(u32 polls) const { return (polls + warp_in_launch() * STAGGER) % LOOK == 0; }
  DEVICE INLINE bool must_give_up() const { return load_once_a_warp(&control().abort) != 0; }

  // What this thread waits for, told when the wait `is_long`: the watchdog's evidence. Of a launch's threads the last one counts. The word is
  // another one each time, so that who waits is not taken for who has stopped. A store that nothing waits for.
  DEVICE INLINE void waits(u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) const {
    if (TELLS) store_relaxed(&control().waits, waits_word(polls, phase, peer, channel, op, step));
  }
  // The same for those in whose registers there is no room for it: a function of its own.
  DEVICE INLINE void put_waits(u32 polls, Phase phase, u32 peer, u32 channel, u32 op, u32 step) const {
    if (TELLS) put_waits(control_, polls, phase, peer, channel, op, step);
  }
  // That copy engines are at work for this rank, in run number `runs`: told by another word than in the run before; once a run, or
  // where ranks meet between copies, at each meeting.
  DEVICE INLINE void copies(u32 runs, u32 channel, u32 op) const { put_waits(runs % 128 * LOOK, Phase::Copies, UNKNOWN, channel, op, 0); }
  // That something has moved, by any number that is another one than before: by one thread of a block, every some hundred microseconds if
  // nobody waits, and so hardly ever in short operations.
  DEVICE INLINE void moved(u32 count) const {
    if (TELLS) store_relaxed(&control().moved, count);
  }

  // Runs before this one: written by the last block of the launch's last run, before this one began.
  DEVICE INLINE u32 runs() const { return load_relaxed(&state_->runs); }
  // What events say of the run: the replay, or 0.
  DEVICE INLINE u32 replay(u32 runs) const { return (head_.launch & CAPTURED) != 0 ? runs - head_.runs_before + 1 : 0; }

  // The next ticket of the ring, or the first of several. What is put there must follow soon: the host reads in this order.
  DEVICE INLINE u64 ticket(u64 places = 1) const {
    if (!TELLS) return 0;
    return add_relaxed(reinterpret_cast<u64*>(head_.ring_ticket), places);
  }

  // Where a ticket's event goes: the lap in the upper 16 bits, the number of the entry below. Some dozens of instructions: who has
  // a ticket early has this early, too.
  DEVICE INLINE u64 place(u64 ticket) const {
    const u64 lap = ticket / RING_ENTRIES % 0xffff + 1;
    return lap << 48 | ticket % RING_ENTRIES;
  }

  DEVICE INLINE void event(EventKind kind, u32 replay, u32 channel, u32 op, u64 value) const {
    event_at(place(ticket()), kind, replay, channel, op, value);
  }
  // Puts an event into the ring, over the oldest one: two stores of 16 bytes, and no fence. Every word carries the lap: the host
  // sees whether all four are of one event without an order between them, whichever is seen first, and if a store is seen in
  // halves.
  DEVICE INLINE void event_at(u64 place, EventKind kind, u32 replay, u32 channel, u32 op, u64 value) const {
    if (!TELLS) return;
    const u64 lap = place >> 48;
    Event& event = reinterpret_cast<Event*>(head_.ring)[static_cast<u32>(place)];
    const u64 what = static_cast<u64>(kind) << 8 | channel;
    store_pack(&event.halves[0], Pack{{value << 16 | lap, static_cast<u64>(op) << 32 | what << 16 | lap}}, false);
    store_pack(&event.halves[1],
               Pack{{static_cast<u64>(head_.launch) << 32 | value >> 48 << 16 | lap, static_cast<u64>(replay) << 32 | lap}},
               false);
  }

  // No entry of the ring.
  DEVICE INLINE static constexpr u64 no_place() { return ~static_cast<u64>(0); }

  // Where the end of a run of several blocks will be told, if that is near: then its ticket is had with that of the start. It is kept in the
  // word that counts blocks, so that the last one has it with the count; to ask for it then takes a quarter of a microsecond.
  DEVICE INLINE void keep_end(u64 place) const {
    if (TELLS) add_relaxed(&state_->done, (place >> 48 << ENTRY_BITS | (place & ENTRY)) << END_AT);
  }
  // The same again, for who finds that the end is not near; `no_place()` if somebody has it already, or nobody has kept it.
  DEVICE INLINE u64 take_end() const {
    u64 word = load_relaxed(&state_->done);
    while (word >> END_AT != 0) {
      const u64 seen = compare_exchange_relaxed(&state_->done, word, word % (static_cast<u64>(1) << END_AT));
      if (seen == word) return end_in(word);
      word = seen;
    }
    return no_place();
  }

  // One block is done; whether it is the run's last one, which learns whether any was aborted, and where the end is to be told, if it was kept.
  //
  // Relaxed: what blocks have written for others is ordered by flags of its own or by the end of the kernel, and the last one reads nothing
  // of theirs but this word. A release would wait for all that the block has stored, also into other GPUs: a third of a microsecond. What
  // blocks that were aborted have reported is before what the last one reports behind it: a fence on either side of the word.
  DEVICE INLINE bool block_done(u32 blocks, bool& aborted, u64& end) const {
    end = no_place();
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
  // Of a run whose end nobody keeps.
  DEVICE INLINE bool block_done(u32 blocks, bool& aborted) const {
    u64 end;
    return block_done(blocks, aborted, end);
  }

  // A run of several kernels, the first and the last of one block: one gives up, and those behind it learn of it. Relaxed: the stream orders the kernels, and
  // the last one makes the word ready for the next run.
  DEVICE INLINE void give_up() const { store_relaxed(&state_->done, ABORTED); }
  DEVICE INLINE bool has_given_up() const { return load_relaxed(&state_->done) != 0; }

  // The last block makes the state ready for the next run, and tells the host that this one is over.
  //
  // Relaxed, as an event's words are: a release would have to wait for all that was written to other GPUs and to the host, which takes longer
  // than a short operation. The host's streams order the data by the kernel's end; what the host learns here is that the run is over, and if it
  // learns so before it sees an event, it waits for that. Of a run that was given up it is to see all, and that it was: a fence between, which
  // pairs with the host's acquire. The state, in this GPU's memory, may be the next launch's in another stream: the host launches that when it has
  // seen the count, microseconds after these stores have left this multiprocessor, which nothing formal says, and a fence would cost all runs.
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
  // In `LaunchState::done`: blocks, those that gave up, and the place of the end: its lap, which is never 0, and its entry.
  static constexpr u64 ABORTED = 1 << 10, ENTRY_BITS = 28, ENTRY = (1 << ENTRY_BITS) - 1, END_AT = 20;
  DEVICE INLINE static u64 end_in(u64 word) {
    const u64 end = word >> END_AT;
    return end == 0 ? no_place() : end >> ENTRY_BITS << 48 | (end & ENTRY);
  }
  // As a peer: nobody knows which.
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
