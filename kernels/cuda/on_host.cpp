// The kernels for the host's processor, a block on one thread: what tests/cuda_source.rs runs.
#include <vector>

#include "append.cuh"
#include "channels.cuh"
#include "clock.cuh"
#include "count.cuh"
#include "exchange.cuh"
#include "gates.cuh"
#include "messages.cuh"
#include "one_shot.cuh"
#include "pieces.cuh"

using namespace ringsight;

// A block of `ringsight_channels_copy`, or, where it `reduces`, of `ringsight_channels`.
extern "C" void ringsight_run_block(const Arguments* arguments, u32 index, u32 blocks, u32 ops, bool reduces) {
  Turn turn;
  std::vector<LaneState> lane_states(arguments->lanes);
  std::vector<OpState> op_states(ops);
  std::vector<u64> room(arguments->staged / 8);
  const u8* program = staged(*arguments, room.data());
  if (reduces) return Block<true>(*arguments, program, index, blocks, turn, lane_states.data(), op_states.data()).run();
  Block<false>(*arguments, program, index, blocks, turn, lane_states.data(), op_states.data()).run();
}

// `ringsight_clock`.
extern "C" void ringsight_run_clock(const ClockArguments* arguments) { answer_clock(*arguments); }

// What src/cuda/layout.rs has, too.
extern "C" u32 ringsight_ring_entries() { return RING_ENTRIES; }

// `ringsight_append`.
extern "C" void ringsight_run_append(u64* journal, u64 word) { append(journal, word); }

// `ringsight_count`.
extern "C" void ringsight_run_count(u64* word) { count_up(word); }

namespace {
template <class E, class Op, u32 RANKS>
void run_one_shot(const void* arguments, u32 index, u32 blocks) {
  volatile u64 place;
  OneShotBlock<E, Op, RANKS>(*static_cast<const OneShot*>(arguments), index, blocks, place).run();
}
template <bool STRAIGHT, bool REDUCES, bool WHOLE, class E, class Op, u32 RANKS>
void run_exchange(const void* arguments, u32 index, u32 blocks) {
  volatile u64 place;
  PlacesOf<STRAIGHT, REDUCES, RANKS> places;
  ExchangeBlock<STRAIGHT, REDUCES, WHOLE, E, Op, RANKS>(*static_cast<const Exchange*>(arguments), index, blocks, place, places).run();
}
template <bool WHOLE>
void run_messages(const void* arguments, u32 index, u32 blocks) {
  MessagesBlock<WHOLE>(*static_cast<const Messages*>(arguments), index, blocks).run();
}
template <Stands WHERE>
void run_one_gate(const void* arguments, u32, u32) {
  volatile u64 place;
  run_gate<WHERE>(*static_cast<const Gate*>(arguments), place);
}
template <class E, class Op, u32 RANKS>
void run_piece(const void* arguments, u32 index, u32 blocks) {
  reduce_piece<E, Op, RANKS>(*static_cast<const Exchange*>(arguments), index, blocks);
}
}  // namespace

// The kernels among peers, in the order of `PeerLaunch::kernels` in src/cuda/peer_launch.rs.
struct PeerKernel {
  const char* name;
  size_t argument_bytes;
  void (*run_block)(const void* arguments, u32 index, u32 blocks);
};
#define RINGSIGHT_ONE_SHOT(NAME, E, OP, RANKS) {#NAME, sizeof(OneShot), run_one_shot<E, OP, RANKS>},
#define RINGSIGHT_EXCHANGE(NAME, STRAIGHT, REDUCES, WHOLE, E, OP, RANKS) \
  {#NAME, sizeof(Exchange), run_exchange<STRAIGHT, REDUCES, WHOLE, E, OP, RANKS>},
#define RINGSIGHT_GATE(NAME, WHERE) {#NAME, sizeof(Gate), run_one_gate<WHERE>},
#define RINGSIGHT_PIECE(NAME, E, OP, RANKS) {#NAME, sizeof(Exchange), run_piece<E, OP, RANKS>},
extern "C" const PeerKernel ringsight_peer_kernels[] = {
    RINGSIGHT_ONE_SHOTS(RINGSIGHT_ONE_SHOT) RINGSIGHT_EXCHANGES(RINGSIGHT_EXCHANGE)
    {"ringsight_messages_elements", sizeof(Messages), run_messages<false>},
    {"ringsight_messages_words", sizeof(Messages), run_messages<true>},
    RINGSIGHT_GATES(RINGSIGHT_GATE)
    RINGSIGHT_PIECES(RINGSIGHT_PIECE)
    {nullptr, 0, nullptr}};
