// What stands before and behind the copies of a collective by copy engines: two kernels of one block each. Between them the host has queued
// copies of what this rank has, straight into the others' receive buffers, whose places all hosts know from the window that these are in. Where some of
// these copies must be done on all ranks before others begin (pieces.cuh), a third such kernel stands between.
//
// - No copy begins before all ranks have begun the operation, and no other one: the first kernel waits for the tags of all others. What was in
//   the receive buffers before is there no longer needed then: what was before the others' kernels in their streams has ended.
// - Nobody's stream goes on before all ranks' copies are done: the second kernel tells all others that this rank's are, and waits for them
//   (`Meeting::leave`). Copies that come before a kernel in its stream are done when it begins, for all processors: its fence and its flag come
//   after them, whichever memory they went to; and what another rank has copied to this one is there once its flag is seen, as that comes after it.
// - Both are of one epoch, which the second one ends: until then the word in this rank's memory is that of the operation before.
// - An abort ends the first kernel, too, and then the copies run all the same, as the stream has them: no operation of a stream can be called
//   back. The second one reports that the operation was given up.
// - Between copies each rank tells the others, as in the end, by a word that is not the end's: what was before it in its stream is done for all processors,
//   and what comes behind it begins when that is so on all ranks.
#pragma once

#include "meeting.cuh"

namespace ringsight {

// What each is told: the twin of `Gate` in src/cuda/layout.rs.
struct Gate {
  PeerCall call;
  // To the one behind all copies: the host could not queue them.
  u32 gives_up;
  // To one between copies: which, from 1 on; each of an operation is another.
  u32 meeting;
};
static_assert(offsetof(Gate, gives_up) == 136, "as in src/cuda/layout.rs");
static_assert(sizeof(Gate) == 144, "as in src/cuda/layout.rs");

enum class Stands { Before, Behind, Between };

// `place` is shared by the threads of the block.
template <Stands WHERE>
DEVICE INLINE void run_gate(const Gate& gate, volatile u64& place) {
  Meeting<0> meeting(gate.call, 0, 1, place);
  if (WHERE == Stands::Before) {
    meeting.begin(false);
    meeting.end_first();
  } else if (WHERE == Stands::Behind) {
    meeting.end_second(gate.gives_up != 0);
  } else {
    meeting.meet_between(gate.meeting);
  }
}

// The kernels: {name, where it stands}; src/cuda/gates.rs has them in this order.
#define RINGSIGHT_GATES(X)                 \
  X(ringsight_gate_begin, Stands::Before)  \
  X(ringsight_gate_end, Stands::Behind)    \
  X(ringsight_gate_meet, Stands::Between)

}  // namespace ringsight
