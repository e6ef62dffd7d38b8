// The steps of a channel program: the twin of src/schedule.rs, which explains it. tests/cuda_source.rs compares the two.
#pragma once

#include "layout.cuh"

namespace ringsight {

// The twin of `Step`. `NOWHERE` stands for `None`.
constexpr u64 NOWHERE = ~0ull;
struct Step {
  u64 elems;
  u64 source;
  u64 store;
  bool mark;
  bool recv;
  bool send;
  bool complete;
};

// The twin of `Position`.
struct Position {
  u64 stage;
  u32 index;
};

constexpr u64 LOCAL_BYTES = 1 << 20;
constexpr u32 OWNED_ALIGN_BYTES = 64;

class Schedule {
 public:
  Schedule() = default;
  // `work` must outlive it.
  DEVICE Schedule(const Work& work, const u8* program)
      : work_(&work), order_(reinterpret_cast<const u32*>(program + work.order_at)) {
    const u32 size = size_of(work.data_type);
    const bool ring = work.connections == Connections::Ring;
    round_elems_ = (work.connections == Connections::Local ? LOCAL_BYTES : work.slot_bytes) / size;
    per_round_ = 1;
    each_ = work.count;
    if (ring) {
      switch (work.function) {
        case Function::AllReduce: {
          const u32 align = OWNED_ALIGN_BYTES / size;
          each_ = (divided(work.count + work.ranks - 1, work.ranks) + align - 1) / align * align;
          per_round_ = 2 * work.ranks - 1;
          break;
        }
        case Function::AllGather:
        case Function::ReduceScatter: per_round_ = work.ranks; break;
        case Function::Broadcast:
        case Function::Reduce: break;
        default: per_round_ = 0;
      }
    }
    if (round_elems_ == 0) round_elems_ = 1;
    rounds_ = divided(work.part_end - work.part_start + round_elems_ - 1, round_elems_);
    post_ = take_first_ = take_last_ = false;
    if (ring) {
      const bool data_arrives = (work.function == Function::Broadcast && order_[0] != work.root) ||
                                (work.function == Function::Reduce && order_[work.ranks - 1] != work.root);
      post_ = waits(0);
      take_first_ = waits(1) && data_arrives;
      take_last_ = waits(1) && !data_arrives;
    }
  }

  // The step at `position`, or the first one after it that is not skipped. False at the end of the program.
  DEVICE bool seek(Position& position, Step& step) const {
    for (;;) {
      u32 steps;
      if (position.stage == 0) steps = 2;
      else if (position.stage <= rounds_) steps = per_round_;
      else if (position.stage == rounds_ + 1) steps = 1;
      else return false;
      if (position.index >= steps) {
        position = Position{position.stage + 1, 0};
        continue;
      }
      if (position.stage == 0) {
        step = position.index == 0 ? marked(post_, false) : marked(false, take_first_);
      } else if (position.stage <= rounds_) {
        step = this->step(position.stage - 1, position.index);
      } else {
        step = marked(false, take_last_);
      }
      if (step.elems > 0 || step.mark) return true;
      position.index++;
    }
  }

 private:
  // Whether the rank `back` hops before this one begins by waiting for its previous rank.
  DEVICE bool waits(u32 back) const {
    switch (work_->function) {
      case Function::Broadcast: return order_at(back) != work_->root;
      case Function::Reduce: return order_at(back + 1) != work_->root;
      case Function::AlltoAll:
      case Function::Gather:
      case Function::Scatter: return true;
      default: return false;
    }
  }

  DEVICE u32 order_at(u32 hops_back) const { return order_[(2 * work_->ranks - hops_back) % work_->ranks]; }

  DEVICE static Step marked(bool send, bool recv) {
    return Step{0, NOWHERE, NOWHERE, send || recv, recv, send, false};
  }

  DEVICE Step step(u64 round, u32 index) const {
    const u32 ranks = work_->ranks;
    const u64 base = work_->part_start + round * round_elems_;
    const u64 left = work_->part_end - base;
    const u64 len = left < round_elems_ ? left : round_elems_;
    Step step{len, NOWHERE, NOWHERE, false, false, false, false};
    switch (work_->connections) {
      case Connections::Local:
        step.source = step.store = base;
        step.complete = true;
        return step;
      case Connections::Send:
        step.send = true;
        step.source = base;
        return step;
      case Connections::Recv:
        step.recv = true;
        step.store = base;
        return step;
      case Connections::Ring: break;
    }
    switch (work_->function) {
      case Function::AllReduce: {
        const u64 at = place(2 * ranks - 1 - index, base);
        const u64 there = at < work_->count ? work_->count - at : 0;
        if (there < len) step.elems = there;
        step.recv = index > 0;
        step.send = index < 2 * ranks - 2;
        if (index < ranks) step.source = at;
        if (index >= ranks - 1) step.store = at;
        step.complete = index == ranks - 1;
        return step;
      }
      case Function::AllGather:
        step.recv = index > 0;
        step.send = index < ranks - 1;
        if (index == 0) step.source = base;
        step.store = place(ranks - index, base);
        return step;
      case Function::ReduceScatter: {
        const bool last = index == ranks - 1;
        step.recv = index > 0;
        step.send = !last;
        step.source = place(ranks - 1 - index, base);
        if (last) step.store = base;
        step.complete = last;
        return step;
      }
      case Function::Broadcast: {
        const bool first = order_[0] == work_->root;
        step.recv = !first;
        step.send = order_[1 % ranks] != work_->root;
        if (first) step.source = base;
        step.store = base;
        return step;
      }
      case Function::Reduce: {
        const bool last = order_[0] == work_->root;
        step.recv = order_[ranks - 1] != work_->root;
        step.send = !last;
        step.source = base;
        if (last) step.store = base;
        step.complete = last;
        return step;
      }
      default:
        step.elems = 0;
        return step;
    }
  }

  // A 64-bit division takes some hundred instructions, and values are rarely that large.
  DEVICE static u64 divided(u64 value, u64 by) {
    if ((value | by) >> 32 == 0) return static_cast<u32>(value) / static_cast<u32>(by);
    return value / by;
  }
  DEVICE u64 place(u32 hop, u64 base) const { return order_[hop % work_->ranks] * each_ + base; }

  const Work* work_;
  const u32* order_;
  u64 round_elems_;
  u64 each_;
  u64 rounds_;
  u32 per_round_;
  bool post_;
  bool take_first_;
  bool take_last_;
};

}  // namespace ringsight
