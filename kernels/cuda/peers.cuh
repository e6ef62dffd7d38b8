// Memory of a rank that all ranks of the communicator reach: the twin of src/cuda/peers.rs, which says what is where.
#pragma once

#include "launch.cuh"

namespace ringsight {

static_assert(sizeof(Line) == 16, "as in src/cuda/peers.rs");

constexpr u32 MAX_PEERS = 8;
constexpr u32 MAX_RINGS = 64;
// Of a launch that may go straight.
constexpr u32 MOST_BLOCKS = 128;
constexpr u64 LINES_OFFSET = 8192;
constexpr u32 LINES = 1 << 17;

struct RingBefore {
  // From the previous rank, or 0.
  u64 fifo;
  u32 prev;
  u32 reserved;
};

// Where an operation that goes straight between callers' buffers finds those of another rank: see straight.cuh.
struct Place {
  // Where what this rank has for that one goes, and where what that one has for this rank begins: {low, epoch, high, epoch}.
  Line to, from;
};

struct Area {
  // Epoch of this rank's last operation.
  u32 epoch;
  u32 reserved[63];
  // By channel; behind the last one there is none.
  RingBefore rings[MAX_RINGS];
  // By the parity of the epoch and the rank that wrote it: {tag, epoch, 0, epoch}.
  Line tags[2][MAX_PEERS];
  // By the same.
  Place places[2][MAX_PEERS];
  // By rank and block: the epoch of the last operation in which it was done with this rank's buffers.
  u32 left[MAX_PEERS][MOST_BLOCKS];
};
static_assert(offsetof(Area, rings) == 256, "as in src/cuda/peers.rs");
static_assert(offsetof(Area, tags) == 1280, "as in src/cuda/peers.rs");
static_assert(offsetof(Area, places) == 1536, "as in src/cuda/peers.rs");
static_assert(offsetof(Area, left) == 2048, "as in src/cuda/peers.rs");
static_assert(sizeof(Area) <= LINES_OFFSET, "as in src/cuda/peers.rs");

// Epochs are never 0, which is what memory begins with, and their parity changes with each.
constexpr u32 LAST_EPOCH = 0xfffffffe;
DEVICE inline u32 next_epoch(u32 epoch) { return epoch >= LAST_EPOCH ? 1 : epoch + 1; }

// Behind the lines: by lane, the steps that this rank has done; then the slots, of so many rows of lines.
constexpr u32 LANES = 512;
constexpr u64 STEPS_OFFSET = LINES_OFFSET + LINES * sizeof(Line);
constexpr u64 CHUNKS_OFFSET = STEPS_OFFSET + LANES * sizeof(u64);
static_assert(CHUNKS_OFFSET == 2109440 && CHUNKS_OFFSET % 4096 == 0, "as in src/cuda/peers.rs");
// Bytes of data in a line of 128 bytes, and in a row of four.
constexpr u32 LINE_DATA_BYTES = 120, ROW_BYTES = 480;
constexpr u32 CHUNK_ROWS = 16, CHUNK_SLOT_BYTES = CHUNK_ROWS * 512;

DEVICE inline u64* steps_of(u64 base) { return reinterpret_cast<u64*>(base + STEPS_OFFSET); }
// Lanes of each connection among so many ranks, and bytes of a slot.
DEVICE inline constexpr u32 lanes_among(u32 ranks) { return ranks <= 4 ? LANES : LANES / 2; }
DEVICE inline constexpr u32 slot_bytes_among(u32 ranks) { return ranks <= 2 ? CHUNK_SLOT_BYTES : CHUNK_SLOT_BYTES / 2; }
static_assert(2 * lanes_among(2) * slot_bytes_among(2) == 8 << 20, "as in src/cuda/peers.rs");
static_assert(2 * lanes_among(4) * slot_bytes_among(4) == 4 << 20, "as in src/cuda/peers.rs");
static_assert(2 * lanes_among(8) * slot_bytes_among(8) == 2 << 20, "as in src/cuda/peers.rs");
// `other`: which of the other ranks writes there.
DEVICE inline Pack* slot_of(u64 base, u32 ranks, u32 other, u32 lane, u64 step) {
  const u64 slot = (static_cast<u64>(other) * lanes_among(ranks) + lane) * 2 + step % 2;
  return reinterpret_cast<Pack*>(base + CHUNKS_OFFSET + slot * slot_bytes_among(ranks));
}

// Behind the slots, at an offset that the host says: what other processes have mapped of callers' memory. An allocation that a rank
// has shown to the others has a number, and a generation, since numbers are used again.
constexpr u32 SHOWN = 256;
struct Mapping {
  // Where this rank's kernels find it.
  u64 address;
  u32 generation;
  u32 reserved;
};
struct Mappings {
  // By rank that has shown it, and number.
  Mapping of[MAX_PEERS][SHOWN];
  // By rank, and number of what this one has shown: the generation that that rank has mapped; 0 for none.
  u32 by[MAX_PEERS][SHOWN];
};
static_assert(sizeof(Mapping) == 16, "as in src/cuda/peers.rs");
static_assert(offsetof(Mappings, by) == 32768, "as in src/cuda/peers.rs");
static_assert(sizeof(Mappings) == 40960, "as in src/cuda/peers.rs");

// Behind them: what reductions that push need, see push.cuh. A block goes through `PUSH_SLOTS` slots in turn of each other rank's, with which
// it is `PUSH_AHEAD` chunks ahead of what it reduces.
constexpr u32 PUSH_AHEAD = 1, PUSH_SLOTS = 2 * PUSH_AHEAD + 2;
struct Pushed {
  // By block: chunks that it has pushed in all operations so far, the same on all ranks.
  u64 chunks[MOST_BLOCKS];
  // By rank and block: the same of that rank's block, chunk by chunk.
  u64 from[MAX_PEERS][MOST_BLOCKS];
};
static_assert(sizeof(Pushed) == 9216, "as in src/cuda/peers.rs");

DEVICE inline Area* area_of(u64 base) { return reinterpret_cast<Area*>(base); }

// The tag of the operation that a rank has begun and this one has not, if there is one.
DEVICE inline bool peeked_tag(u64 base, u32 rank, u32& tag) {
  const u32 epoch = next_epoch(load_relaxed(&area_of(base)->epoch));
  const Line line = load_line(&area_of(base)->tags[epoch & 1][rank]);
  // What that rank did before it began is seen from here on.
  fence_system();
  tag = line.low;
  return line.low_flag == epoch && line.high_flag == epoch;
}

}  // namespace ringsight
