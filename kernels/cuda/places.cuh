// Where callers' buffers are, and whether all ranks reach those of all others.
//
// It is found out by the kernels themselves, so that no host waits for another: each rank tells all others where its
// buffers are, and whether all others reach them. If all do, all go straight; else all go in steps, through memory that is
// there for it. What a rank is told here comes with its tag, so it is of the same operation, and of the same sizes.
//
// Ranks of one process use the same addresses. Of an allocation of another process a rank's kernels know where it is mapped here, and
// whoever has shown it knows who has mapped it: both are in memory of GPUs, put there by the hosts in their own time, the mapping
// before the word that says so. So who says that all others reach its buffers is right in that, and they stay mapped until that rank
// has taken them back, which it does when they have been freed: then no operation uses them.
#pragma once

#include "exchange_call.cuh"

namespace ringsight {

// A place in a word, as `Shown::place` in src/cuda/layout.rs makes it. There is one; it is an offset in what has been shown under the
// number from bit `NUMBER_AT` on, else an address; it is of a message that goes straight if there is one.
constexpr u64 OPEN = 1ull << 63, IS_SHOWN = 1ull << 62, IS_LONG = 1ull << 61;
constexpr u32 NUMBER_AT = 48;

DEVICE INLINE u32 number_of(u64 place) { return static_cast<u32>(place >> NUMBER_AT) % SHOWN; }
// Whether a rank has mapped this generation of what a place of this one is in, if that has been shown to it. Relaxed: what it says holds
// until it is taken back.
DEVICE INLINE bool is_mapped(const Mappings& mappings, u32 rank, u64 place, u32 generation) {
  return (place & IS_SHOWN) == 0 || load_relaxed(&mappings.by[rank][number_of(place)]) == generation;
}
// Where this rank's kernels find a place of another one. Relaxed: the mapping was written before the word that made the other say so.
DEVICE INLINE u64 found(const Mappings& mappings, u32 rank, u64 place) {
  if ((place & IS_SHOWN) == 0) return place & (IS_LONG - 1);
  return load_relaxed(&mappings.of[rank][number_of(place)].address) + (place & ((1ull << NUMBER_AT) - 1));
}

// By rank, for one block: where to write what is for it, and where to read what it has for this rank; and what has been agreed on.
struct Places {
  u64 to[MAX_PEERS];
  u64 from[MAX_PEERS];
  u32 way;
};

enum class Way { Straight, Steps, GiveUp };

// One rank's part in finding it out, of any number of ranks or of `RANKS`, as one thread sees it.
template <u32 RANKS>
class Finding {
 public:
  // `places`: shared by the threads of a warp, or of all of the block, of which one warp looks.
  DEVICE Finding(const Exchange& arguments, const Meeting<RANKS>& meeting, Places& places)
      : arguments_(arguments), meeting_(meeting), places_(places) {}

  // By the threads that serve: tells each other rank where what it has for this one goes and where it finds what is for it: places that it reaches, or
  // none where any rank does not. Its own blocks are told so, too: what others have mapped may change while they look.
  DEVICE INLINE void tell() const {
    bool open = arguments_.open;
    meeting_.for_others([&](u32 rank) {
      open = open && is_mapped(mappings(), rank, arguments_.place_to[rank], arguments_.received) &&
             is_mapped(mappings(), rank, arguments_.place_from[rank], arguments_.sent);
    });
    open = warp_all(open);
    meeting_.for_others([&](u32 rank) {
      tell(meeting_.area(rank), open ? arguments_.place_to[rank] : 0, open ? arguments_.place_from[rank] : 0);
    });
    if (warp_thread() == 0) tell(meeting_.own(), open ? OPEN : 0, 0);
  }

  // By a warp: waits until all others have begun this operation, and learns where their buffers are. All of them look at the same
  // words, so all ranks, and all blocks of each, go the same way. `go_on(polls, rank)` is false if it is to give up.
  template <class GoOn>
  DEVICE INLINE Way agree(GoOn go_on) const {
    bool here = true, open = true;
    for (u32 rank = warp_thread(); here && rank < meeting_.ranks(); rank += warp_threads()) {
      for (u32 polls = 1; !learn(rank, open); polls++) {
        if (go_on(polls, rank)) continue;
        here = false;
        break;
      }
    }
    if (!warp_all(here)) return Way::GiveUp;
    // Each thread of the warp has read some of the places, and all use all of them.
    warp_barrier();
    return warp_all(open) ? Way::Straight : Way::Steps;
  }

 private:
  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE const Mappings& mappings() const { return *reinterpret_cast<const Mappings*>(arguments_.call.bases[me()] + arguments_.mappings_at); }

  DEVICE INLINE void tell(Area& area, u64 to, u64 from) const {
    Place& place = area.places[meeting_.epoch() & 1][me()];
    store_line(&place.to, static_cast<u32>(to), static_cast<u32>(to >> 32), meeting_.epoch());
    store_line(&place.from, static_cast<u32>(from), static_cast<u32>(from >> 32), meeting_.epoch());
  }
  // Whether a rank has begun this operation and no other, whose buffers would be of other sizes.
  DEVICE INLINE bool learn(u32 rank, bool& open) const {
    const Area& own = meeting_.own();
    const u32 epoch = meeting_.epoch();
    const Line tag = load_line(&own.tags[epoch & 1][rank]);
    const Line to = load_line(&own.places[epoch & 1][rank].to), from = load_line(&own.places[epoch & 1][rank].from);
    const auto is_mine = [=](const Line& line) { return line.low_flag == epoch && line.high_flag == epoch; };
    if (rank != me() && (!is_mine(tag) || tag.low != arguments_.call.tag)) return false;
    if (!is_mine(to) || !is_mine(from)) return false;
    const u64 place = static_cast<u64>(to.high) << 32 | to.low;
    open = open && (place & OPEN) != 0;
    places_.to[rank] = found(mappings(), rank, place);
    places_.from[rank] = found(mappings(), rank, static_cast<u64>(from.high) << 32 | from.low);
    return true;
  }

  const Exchange& arguments_;
  const Meeting<RANKS>& meeting_;
  Places& places_;
};

}  // namespace ringsight
