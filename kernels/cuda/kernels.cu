#include "append.cuh"
#include "channels.cuh"
#include "clock.cuh"
#include "count.cuh"
#include "exchange.cuh"
#include "gates.cuh"
#include "messages.cuh"
#include "one_shot.cuh"
#include "pieces.cuh"

// Runs launches of channel programs, a block for each channel: any, or those that reduce nothing, whose code is short and keeps
// more loads under way.
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

// Kernels that move data among peers may be brought before those before them in their stream have ended: see platform.cuh.

// An all_reduce among peers.
#define RINGSIGHT_KERNEL(NAME, E, OP, RANKS)                                                                          \
  extern "C" __global__ void __launch_bounds__(512 + ringsight::SERVICE)                 \
  NAME(const __grid_constant__ ringsight::OneShot arguments) {                                                        \
    using namespace ringsight;                                                                                        \
    __shared__ volatile u64 place;                                                                                   \
    await_kernels_before();                                                                                          \
    OneShotBlock<E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, place).run();                                       \
  }
RINGSIGHT_ONE_SHOTS(RINGSIGHT_KERNEL)
#undef RINGSIGHT_KERNEL

// A collective of any length among peers: two blocks on a multiprocessor, or four of half the threads.
#define RINGSIGHT_KERNEL(NAME, STRAIGHT, REDUCES, WHOLE, E, OP, RANKS)                                  \
  extern "C" __global__ void __launch_bounds__(ringsight::EXCHANGE_THREADS, 2)                    \
  NAME(const __grid_constant__ ringsight::Exchange arguments) {                                  \
    using namespace ringsight;                                                                   \
    __shared__ volatile u64 place;                                                              \
    __shared__ PlacesOf<STRAIGHT, REDUCES, RANKS> places;                                        \
    await_kernels_before();                                                                      \
    ExchangeBlock<STRAIGHT, REDUCES, WHOLE, E, OP, RANKS>(arguments, blockIdx.x, gridDim.x, place, places).run(); \
  }
RINGSIGHT_EXCHANGES(RINGSIGHT_KERNEL)

// Messages among peers.
#define RINGSIGHT_MESSAGES(NAME, WHOLE)                              \
  extern "C" __global__ void __launch_bounds__(256, 2)               \
  NAME(const __grid_constant__ ringsight::Messages arguments) {      \
    ringsight::await_kernels_before();                                 \
    ringsight::MessagesBlock<WHOLE>(arguments, blockIdx.x, gridDim.x).run(); \
  }
RINGSIGHT_MESSAGES(ringsight_messages_elements, false)
RINGSIGHT_MESSAGES(ringsight_messages_words, true)

// Before, behind and between copies by copy engines; one warp.
#define RINGSIGHT_GATE(NAME, WHERE)                                    \
  extern "C" __global__ void __launch_bounds__(ringsight::SERVICE, 1)  \
  NAME(const __grid_constant__ ringsight::Gate arguments) {            \
    __shared__ volatile ringsight::u64 place;                          \
    ringsight::run_gate<ringsight::WHERE>(arguments, place);                      \
  }
RINGSIGHT_GATES(RINGSIGHT_GATE)

// A piece of a reduction between copies.
#define RINGSIGHT_PIECE(NAME, E, OP, RANKS)                                                 \
  extern "C" __global__ void __launch_bounds__(512, 1)                                      \
  NAME(const __grid_constant__ ringsight::Exchange arguments) {                             \
    using namespace ringsight;                                                              \
    reduce_piece<E, OP, RANKS>(arguments, blockIdx.x, gridDim.x);                           \
  }
RINGSIGHT_PIECES(RINGSIGHT_PIECE)

// What the timer shows; one thread.
extern "C" __global__ void ringsight_clock(const __grid_constant__ ringsight::ClockArguments arguments) {
  ringsight::answer_clock(arguments);
}

// Nothing; one thread. A graph whose kernel it is still comes after its launches before: kernel_graphs.rs.
extern "C" __global__ void ringsight_nothing() {}

// That a stream has come here; one thread.
extern "C" __global__ void ringsight_append(ringsight::u64* journal, ringsight::u64 word) { ringsight::append(journal, word); }

// How often a graph has come here; one thread.
extern "C" __global__ void ringsight_count(ringsight::u64* word) { ringsight::count_up(word); }

static_assert(sizeof(ringsight::LaneState) == 280, "LANE_STATE_BYTES in src/cuda/layout.rs");
static_assert(sizeof(ringsight::OpState) == 8, "OP_STATE_BYTES in src/cuda/layout.rs");
