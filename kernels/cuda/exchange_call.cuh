// What the kernels of exchange.cuh are told: the twin of `Exchange` in src/cuda/layout.rs, which says what every field means.
#pragma once

#include "meeting.cuh"

namespace ringsight {

struct Exchange {
  PeerCall call;
  u64 from[MAX_PEERS];
  u64 sends[MAX_PEERS];
  u64 to[MAX_PEERS];
  u64 takes[MAX_PEERS];
  u64 own;
  u64 result;
  u64 result_bytes;
  u64 piece;
  u32 chunk;
  bool reduces;
  bool passes;
  // It may go straight, and this rank's buffers are open to all others.
  bool straight;
  bool open;
  // By rank: where its kernels find `to` and `from`, if they are open; and the generations of what has been shown that these are in.
  u64 place_to[MAX_PEERS];
  u64 place_from[MAX_PEERS];
  u32 received, sent;
  u64 mappings_at;
  u64 pushed_at;
  u32 push;
  u32 root;
};
static_assert(offsetof(Exchange, from) == 136, "as in src/cuda/layout.rs");
static_assert(offsetof(Exchange, own) == 392, "as in src/cuda/layout.rs");
static_assert(offsetof(Exchange, chunk) == 424, "as in src/cuda/layout.rs");
static_assert(offsetof(Exchange, place_to) == 432, "as in src/cuda/layout.rs");
static_assert(offsetof(Exchange, mappings_at) == 568, "as in src/cuda/layout.rs");
static_assert(offsetof(Exchange, pushed_at) == 576, "as in src/cuda/layout.rs");
static_assert(sizeof(Exchange) == 592, "as in src/cuda/layout.rs");

}  // namespace ringsight
