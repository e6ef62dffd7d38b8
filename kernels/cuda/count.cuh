// Counts up a word in host memory: how often a graph has come to this place.
#pragma once

#include "platform.cuh"

namespace ringsight {

// Replays of one graph run one after another, and each place has a word of its own: nobody else writes it. Release, at the
// system's scope: what the kernels before have written is there for whoever sees the count.
DEVICE inline void count_up(u64* word) { store_release(word, load_relaxed(word) + 1); }

}  // namespace ringsight
