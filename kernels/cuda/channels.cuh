// Channel programs: one block runs the programs of one channel. The twin of src/host.rs.
//
// Thread 0 decides what to do next and waits for slots; all threads move the bytes. Collectives run one after another. Then the message lanes
// take turns, since the order in which their peers serve them is not known.
//
// The loop of a block: `decide` (thread 0) → barrier → move (all threads) → barrier → `hand_over` (thread 0).
#pragma once

#include "move.cuh"
#include "peer_memory.cuh"
#include "report.cuh"
#include "schedule.cuh"

namespace ringsight {

struct LaneState {
  Position position;
  // Positions of the current work's slots, read from the FIFOs when it begins. Only this lane moves them.
  u64 head;
  u64 tail;
  // Slots that the consumer at the other end had released when last seen.
  u64 released;
  // Addresses of the slots. 0 for incoming slots whose address is not known before the first one arrives.
  u64 prev_slots;
  u64 next_slots;
  u64 argument;
  // Index of the current work; `end` when all are done.
  u32 index;
  u32 end;
  bool begun;
  // It has been checked whether the work is the first of its operation.
  bool start_noted;
  // `step` holds the work's next step.
  bool has_step;
  // Finished steps of the work.
  u32 made;
  // A copy of the current work: the original may be far away.
  Work work;
  Schedule schedule;
  Step step;
};

// Works of an operation that are left on this channel, and whether one has begun.
struct OpState {
  u32 left;
  bool begun;
};

enum class Next : u32 { Move, Done, GiveUp };

// What thread 0 tells the other threads to do.
struct Turn {
  Next next;
  u32 lane;
  bool recv;
  bool send;
  u32 bytes;
  Move move;
};

// The program at an address that is fast to read. A program in the arguments is copied into shared memory, since one thread reads it word by word.
// All threads of the block call this.
DEVICE INLINE const u8* staged(const Arguments& arguments, u64* room) {
  const u8* program = arguments.program != 0 ? reinterpret_cast<const u8*>(arguments.program) : arguments.inline_program;
  if (arguments.staged == 0) return program;
  const u64* words = reinterpret_cast<const u64*>(program);
  for (u32 at = thread_index(); at < arguments.staged / 8; at += threads()) room[at] = words[at];
  block_barrier();
  return reinterpret_cast<const u8*>(room);
}

// One block of a kernel: of the one for any launch, or of the one for launches that only copy.
template <bool REDUCES>
class Block {
 public:
  // `lanes` and `ops` have room for the channel's. The threads of the block share both, and `turn`.
  DEVICE Block(const Arguments& arguments, const u8* program, u32 index, u32 blocks, Turn& turn, LaneState* lanes, OpState* ops)
      : arguments_(arguments),
        program_(program),
        channel_(table<Channel>(arguments.channels_at)[index]),
        works_(table<Work>(arguments.works_at)),
        all_lanes_(table<Lane>(arguments.lanes_at) + channel_.first_lane),
        all_ops_(table<Op>(arguments.ops_at) + channel_.first_op),
        report_(arguments.head),
        blocks_(blocks),
        turn_(turn),
        lanes_(lanes),
        ops_(ops) {}

  DEVICE void run() {
    const u32 messages = channel_.first_message_lane - channel_.first_lane;
    const u32 end = channel_.end_lane - channel_.first_lane;
    begin(end);
    // A loop, so that its code exists once.
    bool done = true;
    UNROLL_BY(1)
    for (u32 part = 0; done && part < 2; part++) {
      const u32 first = part == 0 ? 0 : messages, last = part == 0 ? messages : end;
      if (first < last) done = phase(first, last);
    }
    if (thread_index() == 0) finish(!done);
  }

 private:
  template <class T>
  DEVICE const T* table(u32 at) const { return reinterpret_cast<const T*>(program_ + at); }

  // One thread begins each lane's first work, so that their distant loads overlap. Only a lane moves its FIFOs' positions.
  DEVICE void begin(u32 lanes) {
    if (thread_index() == 0) runs_ = report_.runs();
    for (u32 lane = thread_index(); lane < lanes; lane += threads()) {
      LaneState& state = lanes_[lane];
      state.index = all_lanes_[lane].first_work;
      state.end = all_lanes_[lane].end_work;
      state.has_step = state.start_noted = false;
      state.begun = state.index < state.end;
      if (state.begun) begin_work(state, works_, program_);
    }
    for (u32 op = thread_index(); op < channel_.end_op - channel_.first_op; op += threads()) {
      ops_[op] = OpState{all_ops_[op].works, false};
    }
    block_barrier();
  }

  // Runs the lanes first..end to their ends. False: give up.
  DEVICE bool phase(u32 first, u32 end) {
    u32 last = end - 1;
    for (;;) {
      if (thread_index() == 0) {
        decide(first, end, last);
        last = turn_.lane;
      }
      block_barrier();
      const Next next = turn_.next;
      if (next == Next::Move) run_move<REDUCES>(turn_.move);
      // All threads have read the turn and are done with the slots: thread 0 may hand them over and write the next turn.
      block_barrier();
      if (next != Next::Move) return next == Next::Done;
      if (thread_index() == 0) hand_over();
    }
  }

  // Waits until one of the lanes can move, all are done, or the launch is to be given up.
  DEVICE void decide(u32 first, u32 end, u32 last) {
    const u32 count = end - first;
    for (u32 polls = 1;; polls++) {
      bool left = false;
      for (u32 turn = 0; turn < count; turn++) {
        const u32 lane = first + (last - first + 1 + turn) % count;
        switch (advance(lane)) {
          case Advance::Done: break;
          case Advance::Waiting: left = true; break;
          case Advance::Ready: return;
          case Advance::Mismatch: return give_up();
        }
      }
      if (!left) {
        turn_.next = Next::Done;
        turn_.lane = last;
        return;
      }
      // A waiting block has time to report, but not at first.
      if (polls % 8 == 0) report_start();
      // Not at every poll: both words are far away.
      if (polls % 32 == 0 && (load_relaxed(&report_.control().abort) != 0 || load_relaxed(&report_.state().differs) != 0)) {
        return give_up();
      }
      // Seldom: this is only for ranks that run different operations.
      if (polls % 256 == 0) {
        for (u32 lane = first; lane < end; lane++) {
          if (check_one_shot(lane)) return give_up();
        }
      }
      if (report_.is_long(polls)) report_wait(polls, first, end);
      // Not at first: what comes over a link between GPUs comes within a few polls.
      if (PAUSES_AT_ONCE || polls >= 64) pause_polling();
    }
  }

  // Shows what the first unfinished lane waits for. The host knows the peers of messages.
  DEVICE void report_wait(u32 polls, u32 first, u32 end) {
    u32 lane = first;
    while (lane + 1 < end && !lanes_[lane].has_step) lane++;
    const LaneState& state = lanes_[lane];
    const Work& work = state.work;
    const bool data = state.step.recv && !is_posted(load_relaxed(&line_of(work.prev, state.head)->flag), state.head);
    const u32* order = reinterpret_cast<const u32*>(program_ + work.order_at);
    const u32 peer = work.connections != Connections::Ring ? NONE : data ? order[work.ranks - 1] : order[1];
    report_.waits(polls, data ? Phase::Data : Phase::Room, peer, channel_.channel, work.op, state.made + 1);
  }

  // Nothing moves any more. Waits for the abort word, so that after a mismatch the host can store the reason before this kernel ends.
  DEVICE void give_up() {
    while (load_relaxed(&report_.control().abort) == 0) pause_polling();
    turn_.next = Next::GiveUp;
    turn_.lane = 0;
  }

  enum class Advance { Waiting, Ready, Done, Mismatch };

  // Finds what a lane does next. `Ready`: it is in `turn_`.
  DEVICE Advance advance(u32 lane) {
    LaneState& state = lanes_[lane];
    for (;;) {
      if (state.has_step) return prepare(lane, state);
      if (state.index >= state.end) return Advance::Done;
      if (!state.begun) begin_work(state, works_, program_);
      if (!state.start_noted) note_start(state);
      state.has_step = state.schedule.seek(state.position, state.step);
      if (!state.has_step) end_work(state);
    }
  }

  // Not inlined, here and below: code that exists once has to be fetched once.
  DEVICE static NOINLINE void begin_work(LaneState& state, const Work* works, const u8* program) {
    state.begun = true;
    state.made = 0;
    state.position = Position{};
    state.work = works[state.index];
    const Work& work = state.work;
    u64 head = 0, tail = 0, released = 0;
    state.prev_slots = work.indirect & PREV_INDIRECT ? 0 : work.prev + SLOTS_OFFSET;
    state.next_slots = work.indirect & NEXT_INDIRECT ? slots_address(work.next) : work.next + SLOTS_OFFSET;
    if (work.prev != 0) head = load_relaxed(&consumer(work.prev)->head);
    if (work.next != 0) {
      tail = load_relaxed(&producer(work.next_producer)->tail);
      // Acquire: the consumer is done with the slots before they are overwritten.
      released = load_acquire(&producer(work.next_producer)->head);
    }
    state.head = head;
    state.tail = tail;
    state.released = released;
    state.schedule = Schedule(work, program);
    state.argument = work.scalar_kind == ScalarKind::Device
                         ? scalar_argument(reinterpret_cast<const void*>(work.scalar), work.data_type)
                         : work.scalar;
  }

  // Keeps the start of an operation for `report_start`, if this is its first work.
  DEVICE void note_start(LaneState& state) {
    const Work& work = state.work;
    state.start_noted = true;
    if (work.state == NONE || ops_[work.state].begun) return;
    ops_[work.state].begun = true;
    report_start();
    started_ = true;
    started_op_ = work.op;
    started_at_ = device_time();
  }

  DEVICE void end_work(LaneState& state) {
    if (state.work.state != NONE) {
      OpState& op = ops_[state.work.state];
      if (--op.left == 0) report(EventKind::Stopped, state.work.op, device_time());
    }
    state.begun = state.start_noted = false;
    state.index++;
  }

  DEVICE Advance prepare(u32 lane, LaneState& state) {
    const Work& work = state.work;
    const Step& step = state.step;
    bool room = true;
    if (step.send && state.tail - state.released >= SLOTS) {
      // Acquire: the consumer is done with the slot before it is overwritten.
      state.released = load_acquire(&producer(work.next_producer)->head);
      room = state.tail - state.released < SLOTS;
    }
    // Also checked while it waits for room, since the rank that it waits for may run another operation. Acquire: the slot is there.
    if (work.prev != 0 && (step.recv || !room)) {
      const u64 flag = load_acquire(&line_of(work.prev, state.head)->flag);
      if (!is_posted(flag, state.head)) return Advance::Waiting;
      if (tag_of(flag) != work.tag) return report_mismatch(work, tag_of(flag));
      if (state.prev_slots == 0) state.prev_slots = slots_address(work.prev);
    }
    if (!room) return Advance::Waiting;

    const u32 size = size_of(work.data_type);
    turn_.next = Next::Move;
    turn_.lane = lane;
    turn_.recv = step.recv;
    turn_.send = step.send;
    turn_.bytes = static_cast<u32>(step.elems) * size;
    auto address = [size](u64 buffer, u64 at) -> void* {
      return buffer != 0 && at != NOWHERE ? reinterpret_cast<void*>(buffer + at * size) : nullptr;
    };
    void* source = address(work.send, step.source);
    void* store = address(work.recv, step.store);
    void* slot = step.recv ? slot_of(work.prev, state.prev_slots, state.head, turn_.bytes, work.slot_bytes) : nullptr;
    void* leaving = step.send ? slot_of(work.next, state.next_slots, state.tail, turn_.bytes, work.slot_bytes) : nullptr;
    Move& move = turn_.move;
    move = Move{nullptr, slot != nullptr ? slot : source, store, leaving, step.elems, state.argument, work.data_type,
                Kernel::Copy};
    if (source != nullptr && work.combine != Combine::Copy) {
      if (slot != nullptr) {
        move.partial = slot;
        move.from = source;
        move.kernel = kernel_of(work.combine, step.complete);
      } else if (work.combine == Combine::MulSum) {
        move.kernel = Kernel::Scale;
      }
    }
    if (move.out == nullptr || (move.out == move.from && move.kernel == Kernel::Copy)) {
      move.out = move.also;
      move.also = nullptr;
    }
    if (move.from == nullptr || move.out == nullptr) move.elems = 0;
    return Advance::Ready;
  }

  DEVICE Advance report_mismatch(const Work& work, u32 theirs) {
    if (exchange_relaxed(&report_.state().differs, 1) == 0) report(EventKind::Mismatch, work.op, theirs);
    return Advance::Mismatch;
  }

  // Whether the previous rank has begun a one-shot operation over peer memory while this lane waits for its slot. What that rank posted before is
  // visible once its operation is seen to have begun, so a slot that is still missing will not come.
  DEVICE bool check_one_shot(u32 lane) {
    LaneState& state = lanes_[lane];
    if (arguments_.peers == 0 || !state.begun) return false;
    const Work& work = state.work;
    if (work.connections != Connections::Ring) return false;
    const u32 prev = reinterpret_cast<const u32*>(program_ + work.order_at)[work.ranks - 1];
    u32 theirs;
    if (!peeked_tag(arguments_.peers, prev, theirs)) return false;
    if (is_posted(load_acquire(&line_of(work.prev, state.head)->flag), state.head)) return false;
    report_mismatch(work, theirs);
    return true;
  }

  DEVICE static Kernel kernel_of(Combine combine, bool complete) {
    switch (combine) {
      case Combine::Sum: return Kernel::Sum;
      case Combine::Prod: return Kernel::Prod;
      case Combine::Max: return Kernel::Max;
      case Combine::Min: return Kernel::Min;
      case Combine::MulSum: return Kernel::MulSum;
      case Combine::SumDiv: return complete ? Kernel::SumDiv : Kernel::Sum;
      default: return Kernel::Copy;
    }
  }

  // Posts and releases the slots of the turn, whose bytes have been moved.
  DEVICE void hand_over() {
    LaneState& state = lanes_[turn_.lane];
    const Work& work = state.work;
    FifoLine* line = turn_.send ? line_of(work.next, state.tail) : nullptr;
    // If the halves are apart, both ends are kernels, which know the size.
    const bool writes_size = turn_.send && work.next == work.next_producer;
    if (writes_size) store_relaxed(&line->size, turn_.bytes);
    // One fence for both slots. It orders what the block's threads have written to the outgoing slot, and its size, and what they have read from the
    // incoming slot, before the flag and the new head. Without bytes or size the flag alone says everything.
    if (writes_size || turn_.bytes > 0) fence_system();
    if (turn_.send) {
      store_relaxed(&line->flag, flag_of(state.tail, work.tag));
      state.tail++;
      // For the next producer, whether this block, another one or the host: whatever lets it begin comes after this.
      store_relaxed(&producer(work.next_producer)->tail, state.tail);
    }
    if (turn_.recv) {
      state.head++;
      // For the next consumer, likewise.
      if (work.prev != work.prev_producer) store_relaxed(&consumer(work.prev)->head, state.head);
      store_relaxed(&producer(work.prev_producer)->head, state.head);
    }
    state.position.index++;
    state.has_step = false;
    // Shows the host progress, now and then.
    if (++state.made % 8 == 0) report_.moved(state.made);
  }

  // Reports operations that have begun and will not finish, and that this block is done.
  DEVICE void finish(bool aborted) {
    if (aborted) {
      for (u32 op = 0; op < channel_.end_op - channel_.first_op; op++) {
        if (ops_[op].begun && ops_[op].left > 0) report(EventKind::Aborted, all_ops_[op].number, device_time());
      }
    }
    if (report_.block_done(blocks_, aborted)) report_.end(runs_, aborted);
  }

  // Reports an event, behind the start of its operation if that was not reported yet.
  DEVICE void report(EventKind kind, u32 op, u64 value) {
    const u64 ticket = report_.ticket(started_ ? 2 : 1);
    report_at(started_ ? ticket + 1 : ticket, kind, op, value);
    if (started_) report_at(ticket, EventKind::Started, started_op_, started_at_);
    started_ = false;
  }

  // Reports a start that `note_start` has kept. Peers wait for slots, nobody waits for the report, so it comes when there is time.
  DEVICE void report_start() {
    if (started_) report_at(report_.ticket(), EventKind::Started, started_op_, started_at_);
    started_ = false;
  }

  DEVICE void report_at(u64 ticket, EventKind kind, u32 op, u64 value) {
    put_event(arguments_.head, ticket, kind, report_.replay(runs_), channel_.channel, op, value);
  }
  DEVICE static NOINLINE void put_event(const Head& head, u64 ticket, EventKind kind, u32 replay, u32 channel, u32 op, u64 value) {
    const Report report(head);
    report.event_at(report.slot(ticket), kind, replay, channel, op, value);
  }

  // The halves of a FIFO at the addresses of `Work`.
  DEVICE static FifoHeader* consumer(u64 address) { return reinterpret_cast<FifoHeader*>(address); }
  DEVICE static FifoCounts* producer(u64 address) { return reinterpret_cast<FifoCounts*>(address); }
  DEVICE static FifoLine* line_of(u64 address, u64 position) { return &consumer(address)->lines[position % SLOTS]; }
  // Address of the slots of a FIFO with indirect slots. It is set before the first incoming slot is posted, and before a launch with outgoing slots.
  DEVICE static u64 slots_address(u64 address) {
    const u64 slots = load_relaxed(&consumer(address)->slots);
    return slots != 0 ? slots : address + SLOTS_OFFSET;
  }
  // Address of the bytes of the slot at a position.
  DEVICE static void* slot_of(u64 address, u64 slots, u64 position, u32 bytes, u32 slot_bytes) {
    if (bytes <= LINE_BYTES) return line_of(address, position)->data;
    return reinterpret_cast<void*>(slots + position % SLOTS * slot_bytes);
  }

  const Arguments& arguments_;
  const u8* program_;
  const Channel& channel_;
  const Work* works_;
  const Lane* all_lanes_;
  const Op* all_ops_;
  const Report report_;
  u32 blocks_;
  // Runs before this one; only thread 0 knows it.
  u32 runs_ = 0;
  // An operation that has begun and was not reported yet.
  bool started_ = false;
  u32 started_op_ = 0;
  u64 started_at_ = 0;
  Turn& turn_;
  LaneState* lanes_;
  OpState* ops_;
};

}  // namespace ringsight
