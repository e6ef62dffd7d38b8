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

namespace {
template <class E, class Op, u32 RANKS>
void run_one_shot(const OneShot* arguments, u32 index, u32 blocks) {
  volatile u64 ticket;
  OneShotBlock<E, Op, RANKS>(*arguments, index, blocks, ticket).run();
}
}  // namespace

struct OneShotKernel {
  const char* name;
  void (*run_block)(const OneShot* arguments, u32 index, u32 blocks);
};
#define RINGSIGHT_KERNEL(NAME, E, OP, RANKS) {#NAME, run_one_shot<E, OP, RANKS>},
extern "C" const OneShotKernel ringsight_one_shots[] = {RINGSIGHT_ONE_SHOTS(RINGSIGHT_KERNEL){nullptr, nullptr}};
