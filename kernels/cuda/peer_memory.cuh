// Layout of peer memory: the twin of src/cuda/peer_memory.rs, which documents areas and fields.
#pragma once

#include "platform.cuh"

namespace ringsight {

static_assert(sizeof(Line) == 16, "as in src/cuda/peer_memory.rs");

constexpr u32 MAX_PEERS = 8;
constexpr u32 MAX_RINGS = 64;
// Of a launch that may be zero-copy (`MAX_ZERO_COPY_BLOCKS` there).
constexpr u32 MAX_BLOCKS = 128;
constexpr u64 LINES_OFFSET = 8192;
constexpr u32 LINES = 1 << 17;

struct PreviousRing {
  u64 fifo;
  u32 prev;
  u32 reserved;
};

// Where a zero-copy operation finds another rank's buffers: {low, epoch, high, epoch} each.
struct BufferAddress {
  Line to, from;
};

struct PeerHeader {
  u32 epoch;
  u32 reserved[63];
  PreviousRing rings[MAX_RINGS];
  // {tag, epoch, 0, epoch}
  Line tags[2][MAX_PEERS];
  BufferAddress addresses[2][MAX_PEERS];
  u32 done[MAX_PEERS][MAX_BLOCKS];
};
static_assert(offsetof(PeerHeader, rings) == 256, "as in src/cuda/peer_memory.rs");
static_assert(offsetof(PeerHeader, tags) == 1280, "as in src/cuda/peer_memory.rs");
static_assert(offsetof(PeerHeader, addresses) == 1536, "as in src/cuda/peer_memory.rs");
static_assert(offsetof(PeerHeader, done) == 2048, "as in src/cuda/peer_memory.rs");
static_assert(sizeof(PeerHeader) <= LINES_OFFSET, "as in src/cuda/peer_memory.rs");

// An epoch is never 0, the value of fresh memory, and each epoch has the other parity than the one before.
constexpr u32 LAST_EPOCH = 0xfffffffe;
DEVICE inline u32 next_epoch(u32 epoch) { return epoch >= LAST_EPOCH ? 1 : epoch + 1; }

constexpr u32 LANES = 512;
constexpr u64 STEPS_OFFSET = LINES_OFFSET + LINES * sizeof(Line);
constexpr u64 CHUNKS_OFFSET = STEPS_OFFSET + LANES * sizeof(u64);
static_assert(CHUNKS_OFFSET == 2109440 && CHUNKS_OFFSET % 4096 == 0, "as in src/cuda/peer_memory.rs");
// Bytes of data in a line of 128 bytes, and in a row of four lines.
constexpr u32 LINE_DATA_BYTES = 120, ROW_BYTES = 480;
constexpr u32 CHUNK_ROWS = 16, CHUNK_SLOT_BYTES = CHUNK_ROWS * 512;

DEVICE inline u64* steps_of(u64 base) { return reinterpret_cast<u64*>(base + STEPS_OFFSET); }
// Lanes of a connection among so many ranks, and bytes of a slot.
DEVICE inline constexpr u32 lanes_among(u32 ranks) { return ranks <= 4 ? LANES : LANES / 2; }
DEVICE inline constexpr u32 slot_bytes_among(u32 ranks) { return ranks <= 2 ? CHUNK_SLOT_BYTES : CHUNK_SLOT_BYTES / 2; }
static_assert(2 * lanes_among(2) * slot_bytes_among(2) == 8 << 20, "as in src/cuda/peer_memory.rs");
static_assert(2 * lanes_among(4) * slot_bytes_among(4) == 4 << 20, "as in src/cuda/peer_memory.rs");
static_assert(2 * lanes_among(8) * slot_bytes_among(8) == 2 << 20, "as in src/cuda/peer_memory.rs");
// `other`: index of the writing rank among the other ranks.
DEVICE inline Pack* slot_of(u64 base, u32 ranks, u32 other, u32 lane, u64 step) {
  const u64 slot = (static_cast<u64>(other) * lanes_among(ranks) + lane) * 2 + step % 2;
  return reinterpret_cast<Pack*>(base + CHUNKS_OFFSET + slot * slot_bytes_among(ranks));
}

// Lanes of a connection for messages in one direction.
constexpr u32 MESSAGE_LANES = 256;
// Lane state of messages, by peer and lane: chunks that this rank has sent, chunks of these that the peer has received, chunks that this rank
// has received; and where the next chunk that this rank sends goes, as the peer has announced: {address word, end of the chunk's lines}.
struct MessageLanes {
  u32 sent[MAX_PEERS][MESSAGE_LANES];
  u32 credit[MAX_PEERS][MESSAGE_LANES];
  u32 received[MAX_PEERS][MESSAGE_LANES];
  Pack addresses[MAX_PEERS][MESSAGE_LANES];
};
static_assert(offsetof(MessageLanes, addresses) == 24576, "as in src/cuda/peer_memory.rs");
static_assert(sizeof(MessageLanes) == 57344, "as in src/cuda/peer_memory.rs");

// Exports of callers' allocations and their imports. The host writes these words.
constexpr u32 MAX_EXPORTS = 256;
struct Import {
  u64 address;
  u32 generation;
  u32 reserved;
};
struct Imports {
  // By exporting rank and number: what this rank has imported.
  Import of[MAX_PEERS][MAX_EXPORTS];
  // By rank and number of this rank's export: the generation that that rank has imported; 0 for none.
  u32 by[MAX_PEERS][MAX_EXPORTS];
};
static_assert(sizeof(Import) == 16, "as in src/cuda/peer_memory.rs");
static_assert(offsetof(Imports, by) == 32768, "as in src/cuda/peer_memory.rs");
static_assert(sizeof(Imports) == 40960, "as in src/cuda/peer_memory.rs");

// Pushed reductions: see push.cuh. A block uses `PUSH_SLOTS` slots of each other rank in turn and pushes `PUSH_AHEAD` chunks ahead of what it
// reduces.
constexpr u32 PUSH_AHEAD = 1, PUSH_SLOTS = 2 * PUSH_AHEAD + 2;
struct PushCounters {
  // By block: chunks pushed in all finished operations, equal on all ranks.
  u64 chunks[MAX_BLOCKS];
  // By rank and block: chunks that the same block of that rank has pushed, updated chunk by chunk.
  u64 from[MAX_PEERS][MAX_BLOCKS];
};
static_assert(sizeof(PushCounters) == 9216, "as in src/cuda/peer_memory.rs");

DEVICE inline PeerHeader* header_of(u64 base) { return reinterpret_cast<PeerHeader*>(base); }

// The tag of an operation that a rank has begun and this rank has not, if there is one.
DEVICE inline bool peeked_tag(u64 base, u32 rank, u32& tag) {
  const u32 epoch = next_epoch(load_relaxed(&header_of(base)->epoch));
  const Line line = load_line(&header_of(base)->tags[epoch & 1][rank]);
  // From here on, what that rank did before it began is visible.
  fence_system();
  tag = line.low;
  return line.low_flag == epoch && line.high_flag == epoch;
}

}  // namespace ringsight
