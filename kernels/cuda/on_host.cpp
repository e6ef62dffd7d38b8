// The kernels for the host's processor, a block on one thread: what tests/cuda_source.rs runs.
#include <vector>

#include "channels.cuh"
#include "one_shot.cuh"

using namespace ringsight;

extern "C" void ringsight_run_block(const Arguments* arguments, u32 index, u32 blocks, u32 ops) {
  Turn turn;
  std::vector<LaneState> lane_states(arguments->lanes);
  std::vector<OpState> op_states(ops);
  Block(*arguments, index, blocks, turn, lane_states.data(), op_states.data()).run();
}

extern "C" void ringsight_one_shot_block(const OneShot* arguments, u32 index, u32 blocks) {
  volatile u32 aborted;
  OneShotBlock(*arguments, index, blocks, aborted).run();
}
