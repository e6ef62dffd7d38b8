// The kernels for the host's processor, one thread per block: what tests/cuda_source.rs runs.
#include <vector>

#include "journal.cuh"
#include "channels.cuh"
#include "clock.cuh"
#include "collective.cuh"
#include "copy_engine.cuh"
#include "messages.cuh"
#include "one_shot.cuh"
#include "tiles.cuh"

using namespace ringsight;

// A block of `ringsight_channels`, or of `ringsight_channels_copy` if not `reduces`.
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

// For comparison with src/cuda/layout.rs.
extern "C" u32 ringsight_ring_entries() { return RING_ENTRIES; }

// `ringsight_append`.
extern "C" void ringsight_run_append(u64* journal, u64 word) { append(journal, word); }

// `ringsight_count`.
extern "C" void ringsight_run_count(u64* word) { count_up(word); }

namespace {
template <class E, class Op, u32 RANKS>
void run_one_shot(const void* arguments, u32 index, u32 blocks) {
  volatile u64 end_slot;
  OneShotBlock<E, Op, RANKS>(*static_cast<const OneShot*>(arguments), index, blocks, end_slot).run();
}
template <bool ZERO_COPY, bool REDUCES, bool ALIGNED, class E, class Op, u32 RANKS>
void run_collective(const void* arguments, u32 index, u32 blocks) {
  volatile u64 end_slot;
  BlockAddresses<ZERO_COPY, REDUCES, RANKS> addresses;
  CollectiveBlock<ZERO_COPY, REDUCES, ALIGNED, E, Op, RANKS>(*static_cast<const Collective*>(arguments), index, blocks, end_slot, addresses).run();
}
template <bool ALIGNED>
void run_messages(const void* arguments, u32 index, u32 blocks) {
  MessagesBlock<ALIGNED>(*static_cast<const Messages*>(arguments), index, blocks).run();
}
template <CopyEngineKernel KERNEL>
void run_copy_engine(const void* arguments, u32, u32) {
  volatile u64 end_slot;
  run_copy_engine_kernel<KERNEL>(*static_cast<const CopyEngineCall*>(arguments), end_slot);
}
template <class E, class Op, u32 RANKS>
void run_tile(const void* arguments, u32 index, u32 blocks) {
  reduce_tile<E, Op, RANKS>(*static_cast<const Collective*>(arguments), index, blocks);
}
}  // namespace

// The peer kernels, in the order of `PeerLaunch::kernels` in src/cuda/peer_launch.rs.
struct PeerKernel {
  const char* name;
  size_t argument_bytes;
  void (*run_block)(const void* arguments, u32 index, u32 blocks);
};
#define RINGSIGHT_ONE_SHOT(NAME, E, OP, RANKS) {#NAME, sizeof(OneShot), run_one_shot<E, OP, RANKS>},
#define RINGSIGHT_COLLECTIVE(NAME, ZERO_COPY, REDUCES, ALIGNED, E, OP, RANKS) \
  {#NAME, sizeof(Collective), run_collective<ZERO_COPY, REDUCES, ALIGNED, E, OP, RANKS>},
#define RINGSIGHT_COPY_ENGINE(NAME, KERNEL) {#NAME, sizeof(CopyEngineCall), run_copy_engine<KERNEL>},
#define RINGSIGHT_TILE(NAME, E, OP, RANKS) {#NAME, sizeof(Collective), run_tile<E, OP, RANKS>},
extern "C" const PeerKernel ringsight_peer_kernels[] = {
    RINGSIGHT_ONE_SHOTS(RINGSIGHT_ONE_SHOT) RINGSIGHT_COLLECTIVES(RINGSIGHT_COLLECTIVE)
    {"ringsight_messages_elements", sizeof(Messages), run_messages<false>},
    {"ringsight_messages_words", sizeof(Messages), run_messages<true>},
    RINGSIGHT_COPY_ENGINE_KERNELS(RINGSIGHT_COPY_ENGINE)
    RINGSIGHT_TILES(RINGSIGHT_TILE)
    {nullptr, 0, nullptr}};
