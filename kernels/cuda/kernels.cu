#include "journal.cuh"
#include "channels.cuh"
#include "clock.cuh"
#include "collective.cuh"
#include "copy_engine.cuh"
#include "messages.cuh"
#include "one_shot.cuh"
#include "tiles.cuh"

// Channel programs, one block per channel: for any launch, and for launches that only copy, whose short code keeps more loads in flight.
#define RINGSIGHT_CHANNELS(NAME, REDUCES)                                             \
  extern "C" __global__ void __launch_bounds__(ringsight::CHANNEL_THREADS, 1)         \
  NAME(const __grid_constant__ ringsight::Arguments arguments) {                      \
    using namespace ringsight;                                                        \
    __shared__ Turn turn;                                                             \
    /* Room for the program, the states of the channel with most lanes, and those of that with most operations. */ \
    extern __shared__ u64 room[];                                                     \
    LaneState* lanes = reinterpret_cast<LaneState*>(room + arguments.staged / 8);     \
    OpState* ops = reinterpret_cast<OpState*>(lanes + arguments.lanes);               \
    Block<REDUCES>(arguments, staged(arguments, room), blockIdx.x, gridDim.x, turn, lanes, ops).run(); \
  }
RINGSIGHT_CHANNELS(ringsight_channels, true)
RINGSIGHT_CHANNELS(ringsight_channels_copy, false)

// Peer kernels may be placed before the kernel before them in their stream has ended: see `await_kernels_before`.

// One-shot AllReduce.
#define RINGSIGHT_KERNEL(NAME, E, OP, RANKS)                                                                          \
  extern "C" __global__ void __launch_bounds__(512 + ringsight::SERVICE_THREADS)                 \
  NAME(const __grid_constant__ ringsight::OneShot arguments) {                                                        \
    using namespace ringsight;                                                                                        \
    __shared__ volatile u64 end_slot;                                                                                   \
    await_kernels_before();                                                                                          \
    OneShotBlock<E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, end_slot).run();                                       \
  }
RINGSIGHT_ONE_SHOTS(RINGSIGHT_KERNEL)
#undef RINGSIGHT_KERNEL

// Collectives of any length: two blocks on a multiprocessor, or four of half the threads.
#define RINGSIGHT_KERNEL(NAME, ZERO_COPY, REDUCES, ALIGNED, E, OP, RANKS)                                  \
  extern "C" __global__ void __launch_bounds__(ringsight::COLLECTIVE_THREADS, 2)                    \
  NAME(const __grid_constant__ ringsight::Collective arguments) {                                  \
    using namespace ringsight;                                                                   \
    __shared__ volatile u64 end_slot;                                                              \
    __shared__ BlockAddresses<ZERO_COPY, REDUCES, RANKS> addresses;                                        \
    await_kernels_before();                                                                      \
    CollectiveBlock<ZERO_COPY, REDUCES, ALIGNED, E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, end_slot, addresses).run(); \
  }
RINGSIGHT_COLLECTIVES(RINGSIGHT_KERNEL)

// Messages.
#define RINGSIGHT_MESSAGES(NAME, ALIGNED)                              \
  extern "C" __global__ void __launch_bounds__(256, 2)               \
  NAME(const __grid_constant__ ringsight::Messages arguments) {      \
    ringsight::await_kernels_before();                                 \
    ringsight::MessagesBlock<ALIGNED>(arguments, blockIdx.x, gridDim.x).run(); \
  }
RINGSIGHT_MESSAGES(ringsight_messages_elements, false)
RINGSIGHT_MESSAGES(ringsight_messages_words, true)

// Entry, exit and barrier kernels of copy-engine collectives; one warp.
#define RINGSIGHT_COPY_ENGINE(NAME, KERNEL)                                    \
  extern "C" __global__ void __launch_bounds__(ringsight::SERVICE_THREADS, 1)  \
  NAME(const __grid_constant__ ringsight::CopyEngineCall arguments) {            \
    __shared__ volatile ringsight::u64 end_slot;                          \
    ringsight::run_copy_engine_kernel<ringsight::KERNEL>(arguments, end_slot);                      \
  }
RINGSIGHT_COPY_ENGINE_KERNELS(RINGSIGHT_COPY_ENGINE)

// Reduces a tile of a copy-engine reduction.
#define RINGSIGHT_TILE(NAME, E, OP, RANKS)                                                 \
  extern "C" __global__ void __launch_bounds__(512, 1)                                      \
  NAME(const __grid_constant__ ringsight::Collective arguments) {                             \
    using namespace ringsight;                                                              \
    reduce_tile<E, OP, RANKS>(arguments, blockIdx.x, gridDim.x);                           \
  }
RINGSIGHT_TILES(RINGSIGHT_TILE)

// Answers with the timer; one thread.
extern "C" __global__ void ringsight_clock(const __grid_constant__ ringsight::ClockArguments arguments) {
  ringsight::answer_clock(arguments);
}

// Does nothing; one thread. In a graph it still runs after the graph's earlier launches: kernel_graphs.rs.
extern "C" __global__ void ringsight_nothing() {}

// Appends to a journal; one thread.
extern "C" __global__ void ringsight_append(ringsight::u64* journal, ringsight::u64 word) { ringsight::append(journal, word); }

// Increments a counter; one thread.
extern "C" __global__ void ringsight_count(ringsight::u64* word) { ringsight::count_up(word); }

static_assert(sizeof(ringsight::LaneState) == 280, "LANE_STATE_BYTES in src/cuda/layout.rs");
static_assert(sizeof(ringsight::OpState) == 8, "OP_STATE_BYTES in src/cuda/layout.rs");
