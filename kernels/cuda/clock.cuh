// Tells the host the GPU's timer, so that the host can relate the two clocks.
//
// The host asks in rounds. It reads its own clock before it asks and after it has the answer, so the timer was read between the two. One thread of
// one block, for some microseconds.
#pragma once

#include "platform.cuh"

namespace ringsight {

// In host memory: the twin of `ClockPage` in src/cuda/clock.rs.
struct ClockPage {
  // The host writes: the round that it asks for.
  u32 ask;
  u32 apart0[31];
  // The GPU writes. Each word has the round in its low 16 bits; above it the timer's lower 48 bits, then its upper 16 bits.
  u64 answer[2];
  // The timer's step.
  u64 step;
  // Number of the last finished launch.
  u32 done;
  u32 apart1[25];
};
static_assert(offsetof(ClockPage, answer) == 128, "as in src/cuda/clock.rs");
static_assert(offsetof(ClockPage, step) == 144, "as in src/cuda/clock.rs");
static_assert(offsetof(ClockPage, done) == 152, "as in src/cuda/clock.rs");
static_assert(sizeof(ClockPage) == 256, "as in src/cuda/clock.rs");

// The kernel's argument.
struct ClockArguments {
  u64 page;
  // Never 0.
  u32 launch;
  u32 rounds;
  // How long the host may take to ask, nanoseconds. Then the kernel ends: it must not take room from others for longer.
  u64 patience;
};
static_assert(sizeof(ClockArguments) == 24, "as in src/cuda/clock.rs");

// The timer's step: the smallest of several.
DEVICE inline u64 timer_step() {
  u64 step = ~static_cast<u64>(0), last = device_time();
  for (u32 steps = 0, looks = 0; steps < 8 && looks < 4096; looks++) {
    const u64 time = device_time();
    if (time == last) continue;
    if (time - last < step) step = time - last;
    last = time;
    steps++;
  }
  return step;
}

DEVICE inline void answer_clock(const ClockArguments& arguments) {
  ClockPage& page = *reinterpret_cast<ClockPage*>(arguments.page);
  store_relaxed(&page.step, timer_step());
  // The host does not ask for round 0. Its answer says that the kernel runs.
  for (u32 round = 0; round <= arguments.rounds; round++) {
    const u64 since = device_time();
    u64 time = since;
    while (round != 0 && load_relaxed(&page.ask) != round && time - since < arguments.patience) time = device_time();
    if (time - since >= arguments.patience) break;
    // The timer is read after the load that saw the request: the asm of both is volatile, and the loop's condition depends on the loaded value.
    time = device_time();
    // Two words, which may become visible one by one, so each carries the round. Relaxed: the step is written long before the second answer, and the
    // host reads it when the kernel is done.
    store_relaxed(&page.answer[0], time << 16 | round);
    store_relaxed(&page.answer[1], time >> 48 << 16 | round);
  }
  // Release: the step is visible, and the kernel no longer writes to the page.
  store_release(&page.done, arguments.launch);
}

}  // namespace ringsight
