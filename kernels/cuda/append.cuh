// Appends a word to a list in host memory: that a stream has come to this place. `JOURNAL_*` in src/cuda/append.rs.
#pragma once

#include "platform.cuh"

namespace ringsight {

constexpr u64 JOURNAL_SLOTS = 8192;

// The list: how many words there are, then a ring of them. Streams come one after another to places that append to one list:
// nobody else writes it. Both stores release, at the system's scope: what the kernels before have written is there for whoever
// sees the count, and whoever sees a slot that is used again sees a count that says so.
DEVICE inline void append(u64* journal, u64 word) {
  const u64 count = load_relaxed(journal);
  store_release(journal + 1 + count % JOURNAL_SLOTS, word);
  store_release(journal, count + 1);
}

}  // namespace ringsight
