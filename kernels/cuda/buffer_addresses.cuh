// Addresses of callers' buffers for zero-copy, and whether all ranks reach all buffers.
//
// The kernels find out, so that no host waits for another. Each rank tells all other ranks where its buffers are, or that some rank cannot reach
// them. If all buffers are reachable, all ranks take the zero-copy path; otherwise all use LL128. The addresses come with the tag, so they
// belong to the same operation and have the same sizes.
//
// Ranks of one process use the same addresses. An allocation of another process has an export number. The hosts keep two tables in peer
// memory: where each rank has mapped another rank's export, and which ranks have mapped this rank's exports. The host writes the mapping
// before the word that says it is there. A mapping stays until the exporting rank withdraws it after the caller has freed the buffer, when no
// operation uses it any more. So a rank that says its buffers are reachable is right until the operation ends.
#pragma once

#include "barrier.cuh"

namespace ringsight {

// A buffer address word (`buffer_address` in src/cuda/layout.rs). `ADDRESS_VALID`: it holds an address. `ADDRESS_EXPORTED`: it holds an offset
// in the export whose number begins at bit `EXPORT_SHIFT`. `MAY_ZERO_COPY`: of a message that is zero-copy if there is an address.
constexpr u64 ADDRESS_VALID = 1ull << 63, ADDRESS_EXPORTED = 1ull << 62, MAY_ZERO_COPY = 1ull << 61;
constexpr u32 EXPORT_SHIFT = 48;

DEVICE INLINE u32 export_of(u64 word) { return static_cast<u32>(word >> EXPORT_SHIFT) % MAX_EXPORTS; }
// Whether `rank` has imported this generation of the export that a word of this rank names. Relaxed: the answer holds until this rank
// withdraws the export.
DEVICE INLINE bool is_imported(const Imports& imports, u32 rank, u64 word, u32 generation) {
  return (word & ADDRESS_EXPORTED) == 0 || load_relaxed(&imports.by[rank][export_of(word)]) == generation;
}
// The address, for this rank's kernels, of another rank's word. Relaxed: the mapping was written before the word that made the other rank
// announce it.
DEVICE INLINE u64 resolve(const Imports& imports, u32 rank, u64 word) {
  if ((word & ADDRESS_EXPORTED) == 0) return word & (MAY_ZERO_COPY - 1);
  return load_relaxed(&imports.of[rank][export_of(word)].address) + (word & ((1ull << EXPORT_SHIFT) - 1));
}

// One block's result: by rank, where to write that rank's bytes and where to read its bytes for this rank; and the agreed path.
struct BufferAddresses {
  u64 to[MAX_PEERS];
  u64 from[MAX_PEERS];
  u32 path;
};

enum class Path { ZeroCopy, Ll128, GiveUp };

// The agreement of all ranks on one path, as one thread sees it. `RANKS` is the number of ranks, or 0 for any.
template <u32 RANKS>
class Agreement {
 public:
  // `addresses` is shared by the threads of a warp, or of the block if one warp reads for all.
  DEVICE Agreement(const Collective& arguments, const Barrier<RANKS>& barrier, BufferAddresses& addresses)
      : arguments_(arguments), barrier_(barrier), addresses_(addresses) {}

  // Service threads: tells each other rank where it writes to and reads from this rank, or that there is no address because some rank does not
  // reach the buffers. This rank's own blocks are told, too: the import tables may change while they look.
  DEVICE INLINE void announce() const {
    bool open = arguments_.reachable;
    barrier_.for_others([&](u32 rank) {
      open = open && is_imported(imports(), rank, arguments_.address_to[rank], arguments_.recv_generation) &&
             is_imported(imports(), rank, arguments_.address_from[rank], arguments_.send_generation);
    });
    open = warp_all(open);
    barrier_.for_others([&](u32 rank) {
      announce(barrier_.header(rank), open ? arguments_.address_to[rank] : 0, open ? arguments_.address_from[rank] : 0);
    });
    if (warp_thread() == 0) announce(barrier_.own(), open ? ADDRESS_VALID : 0, 0);
  }

  // One warp: waits until all other ranks have begun this operation, and reads their buffer addresses. All ranks and blocks look at the same words,
  // so all take the same path. `go_on(polls, rank)` returns false to give up.
  template <class GoOn>
  DEVICE INLINE Path agree(GoOn go_on) const {
    bool here = true, open = true;
    for (u32 rank = warp_thread(); here && rank < barrier_.ranks(); rank += warp_threads()) {
      for (u32 polls = 1; !read(rank, open); polls++) {
        if (go_on(polls, rank)) continue;
        here = false;
        break;
      }
    }
    if (!warp_all(here)) return Path::GiveUp;
    // Each thread of the warp has read some of the addresses, and every thread uses all of them.
    warp_barrier();
    return warp_all(open) ? Path::ZeroCopy : Path::Ll128;
  }

 private:
  DEVICE INLINE u32 me() const { return arguments_.call.rank; }
  DEVICE INLINE const Imports& imports() const { return *reinterpret_cast<const Imports*>(arguments_.call.bases[me()] + arguments_.imports_offset); }

  DEVICE INLINE void announce(PeerHeader& header, u64 to, u64 from) const {
    BufferAddress& own = header.addresses[barrier_.epoch() & 1][me()];
    store_line(&own.to, static_cast<u32>(to), static_cast<u32>(to >> 32), barrier_.epoch());
    store_line(&own.from, static_cast<u32>(from), static_cast<u32>(from >> 32), barrier_.epoch());
  }
  // Whether a rank has begun this operation, and no other one, whose buffers would have other sizes.
  DEVICE INLINE bool read(u32 rank, bool& open) const {
    const PeerHeader& own = barrier_.own();
    const u32 epoch = barrier_.epoch();
    const Line tag = load_line(&own.tags[epoch & 1][rank]);
    const Line to = load_line(&own.addresses[epoch & 1][rank].to), from = load_line(&own.addresses[epoch & 1][rank].from);
    const auto is_mine = [=](const Line& line) { return line.low_flag == epoch && line.high_flag == epoch; };
    if (rank != me() && (!is_mine(tag) || tag.low != arguments_.call.tag)) return false;
    if (!is_mine(to) || !is_mine(from)) return false;
    const u64 word = static_cast<u64>(to.high) << 32 | to.low;
    open = open && (word & ADDRESS_VALID) != 0;
    addresses_.to[rank] = resolve(imports(), rank, word);
    addresses_.from[rank] = resolve(imports(), rank, static_cast<u64>(from.high) << 32 | from.low);
    return true;
  }

  const Collective& arguments_;
  const Barrier<RANKS>& barrier_;
  BufferAddresses& addresses_;
};

}  // namespace ringsight
