#include "channels.cuh"
#include "exchange.cuh"
#include "one_shot.cuh"

// Runs any launch of channel programs: a block for each channel.
extern "C" __global__ void __launch_bounds__(512)
ringsight_channels(const __grid_constant__ ringsight::Arguments arguments) {
  using namespace ringsight;
  __shared__ Turn turn;
  // Room for the states of the channel with most lanes, then of that with most operations.
  extern __shared__ u64 states[];
  LaneState* lanes = reinterpret_cast<LaneState*>(states);
  OpState* ops = reinterpret_cast<OpState*>(lanes + arguments.lanes);
  Block(arguments, blockIdx.x, gridDim.x, turn, lanes, ops).run();
}

// An all_reduce among peers.
#define RINGSIGHT_KERNEL(NAME, E, OP, RANKS)                                                                          \
  extern "C" __global__ void __launch_bounds__(512 + ringsight::SERVICE)                 \
  NAME(const __grid_constant__ ringsight::OneShot arguments) {                                                        \
    using namespace ringsight;                                                                                        \
    __shared__ volatile u64 ticket;                                                                                   \
    OneShotBlock<E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, ticket).run();                                       \
  }
RINGSIGHT_ONE_SHOTS(RINGSIGHT_KERNEL)
#undef RINGSIGHT_KERNEL

// A collective of any length among peers.
#define RINGSIGHT_KERNEL(NAME, REDUCES, WHOLE, E, OP, RANKS)                                            \
  extern "C" __global__ void __launch_bounds__(512)                                              \
  NAME(const __grid_constant__ ringsight::Exchange arguments) {                                  \
    using namespace ringsight;                                                                   \
    __shared__ volatile u64 ticket;                                                              \
    ExchangeBlock<REDUCES, WHOLE, E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, ticket).run();        \
  }
RINGSIGHT_EXCHANGES(RINGSIGHT_KERNEL)

static_assert(sizeof(ringsight::LaneState) == 48, "LANE_STATE_BYTES in src/cuda/layout.rs");
static_assert(sizeof(ringsight::OpState) == 8, "OP_STATE_BYTES in src/cuda/layout.rs");
