// Collectives by copy engines (CE): an entry kernel before the copies and an exit kernel behind them, of one block each. In between, the host has
// queued copies from this rank's buffers into the other ranks' receive buffers, whose addresses all hosts know from their window. Where some copies
// must be done on all ranks before others begin (tiles.cuh), a barrier kernel runs in between.
//
// - No copy begins before all ranks have begun this operation: the entry kernel waits for the tags of all other ranks. Then nobody needs the
//   earlier contents of the receive buffers, since the work before the other ranks' entry kernels in their streams has ended.
// - No stream goes on before all ranks' copies are done: the exit kernel signals all other ranks and waits for their signals
//   (`Barrier::wait_for_exit`). Copies before a kernel in its stream are done for all processors when it begins. So the kernel's fence and signal
//   come after them, whichever memory they went to, and a rank that sees the signal also sees the copies.
// - Both kernels belong to one epoch, which the exit kernel ends. Until then the word in this rank's memory is that of the operation before.
// - An abort ends the entry kernel, but the copies still run, since no operation of a stream can be withdrawn. The exit kernel reports that the
//   operation was given up.
// - A barrier kernel signals by a word of its own. What comes before it in its stream is done for all processors, and what comes behind it begins
//   when that is so on all ranks.
#pragma once

#include "barrier.cuh"

namespace ringsight {

enum class CopyEngineKernel { Entry, Exit, Barrier };

// `end_slot` is shared by the threads of the block.
template <CopyEngineKernel KERNEL>
DEVICE INLINE void run_copy_engine_kernel(const CopyEngineCall& call, volatile u64& end_slot) {
  Barrier<0> barrier(call.call, 0, 1, end_slot);
  if (KERNEL == CopyEngineKernel::Entry) {
    barrier.begin(false);
    barrier.end_entry();
  } else if (KERNEL == CopyEngineKernel::Exit) {
    barrier.end_exit(call.copies_failed != 0);
  } else {
    barrier.run_barrier(call.barrier);
  }
}

// The kernels: {name, kind}, in the order of src/cuda/copy_engine.rs.
#define RINGSIGHT_COPY_ENGINE_KERNELS(X)                 \
  X(ringsight_ce_entry, CopyEngineKernel::Entry)  \
  X(ringsight_ce_exit, CopyEngineKernel::Exit)    \
  X(ringsight_ce_barrier, CopyEngineKernel::Barrier)

}  // namespace ringsight
