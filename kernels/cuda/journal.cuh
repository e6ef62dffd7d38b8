// Words in host memory that a stream writes in order: src/cuda/journal.rs.
#pragma once

#include "platform.cuh"

namespace ringsight {

// Increments a counter: how often a graph has come to this place. The replays of one graph run one after another and each place has a
// counter of its own, so nobody else writes it. Release at system scope: whoever sees the count also sees what earlier kernels wrote.
DEVICE inline void count_up(u64* counter) { store_release(counter, load_relaxed(counter) + 1); }

constexpr u64 JOURNAL_SLOTS = 8192;

// Appends a word to a journal: the number of words so far, then a ring of them. Streams come one after another to places that append to one
// journal, so nobody else writes it. Both stores release at system scope: whoever sees the count also sees what earlier kernels wrote, and
// whoever sees a reused slot also sees a count that says so.
DEVICE inline void append(u64* journal, u64 word) {
  const u64 count = load_relaxed(journal);
  store_release(journal + 1 + count % JOURNAL_SLOTS, word);
  store_release(journal, count + 1);
}

}  // namespace ringsight
