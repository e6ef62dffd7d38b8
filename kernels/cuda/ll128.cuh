// LL128 rows, as in NCCL's LL128 protocol: four lines of 128 bytes, the last 8 bytes of each of which say what the line belongs to. So a reader
// that waits for the data waits for no separate flag. This needs a line that one instruction of a warp writes to be seen whole by one
// instruction that reads it, as it is over NVLink and within a GPU.
#pragma once

#include "peer_memory.cuh"
#include "words.cuh"

namespace ringsight {

// Some bytes of a caller's buffer. `ALIGNED`: the slice begins and ends at words.
template <bool ALIGNED>
class Slice {
 public:
  // `bytes` bytes from offset `at` on of a buffer of `all` bytes at `base`, or what exists of them.
  DEVICE Slice(u64 base, u64 all, u64 at, u32 bytes, u32 element_bytes)
      : base_(reinterpret_cast<u8*>(base + at)),
        bytes_(at >= all ? 0 : all - at < bytes ? static_cast<u32>(all - at) : bytes),
        element_bytes_(element_bytes) {}

  // Rows that hold the slice; one, if it is empty.
  DEVICE INLINE u32 rows() const { return bytes_ == 0 ? 1 : (bytes_ + ROW_BYTES - 1) / ROW_BYTES; }
  // Whether a line of a row holds some of the slice. The first line exists in any case.
  DEVICE INLINE bool has_line(u32 row, u32 line) const {
    return row * ROW_BYTES + line * LINE_DATA_BYTES < bytes_ || row + line == 0;
  }

  // The 8 bytes at offset `at`, or what exists of them.
  DEVICE INLINE u64 load(u32 at) const {
    if (at >= bytes_) return 0;
    return ALIGNED ? *reinterpret_cast<const u64*>(base_ + at) : load_elements(base_ + at, bytes_ - at, element_bytes_);
  }
  DEVICE INLINE void store(u32 at, u64 word) const {
    if (at >= bytes_) return;
    if (ALIGNED) {
      *reinterpret_cast<u64*>(base_ + at) = word;
    } else {
      store_elements(base_ + at, bytes_ - at, element_bytes_, word);
    }
  }

 private:
  u8* base_;
  u32 bytes_;
  u32 element_bytes_;
};

// A warp writes and reads a row at once: four lines, 16 bytes by each of 32 threads. On the host one thread does it all.
constexpr u32 ROW_PARTS = 32, LINE_PARTS = 8;
constexpr u32 PARTS = ROW_PARTS / warp_threads();
// This thread's parts of a row.
struct Row { Pack parts[PARTS]; };
// The index in the row of this thread's part `i`.
DEVICE INLINE u32 part_of(u32 i) { return i * warp_threads() + warp_thread(); }
// Whether a part ends its line. Then its second word is the line's end word.
DEVICE INLINE bool ends_line(u32 part) { return part % LINE_PARTS == LINE_PARTS - 1; }
// Offset in the row of the data of a part's first word.
DEVICE INLINE u32 offset_of(u32 part) { return part / LINE_PARTS * LINE_DATA_BYTES + part % LINE_PARTS * 16; }

template <class Slot>
DEVICE INLINE Slot* at_part(Slot* slot, u32 row, u32 part) { return slot + row * ROW_PARTS + part; }

// Loads and stores a row of a slice.
template <bool ALIGNED>
DEVICE INLINE Row load_row(const Slice<ALIGNED>& from, u32 row) {
  Row some;
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i), at = row * ROW_BYTES + offset_of(part);
    some.parts[i].words[0] = from.load(at);
    some.parts[i].words[1] = ends_line(part) ? 0 : from.load(at + 8);
  }
  return some;
}
template <bool ALIGNED>
DEVICE INLINE void store_row(const Slice<ALIGNED>& to, u32 row, const Row& some) {
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i), at = row * ROW_BYTES + offset_of(part);
    to.store(at, some.parts[i].words[0]);
    if (!ends_line(part)) to.store(at + 8, some.parts[i].words[1]);
  }
}

// Writes the existing lines of a row into a slot. `end`: their end word.
template <bool ALIGNED>
DEVICE INLINE void put_row(const Slice<ALIGNED>& slice, u32 row, Pack* slot, const Row& some, u64 end) {
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i);
    if (!slice.has_line(row, part / LINE_PARTS)) continue;
    Pack pack = some.parts[i];
    if (ends_line(part)) pack.words[1] = end;
    store_pack(at_part(slot, row, part), pack, ends_line(part));
  }
}
// Reads a row from a slot. Returns whether all its lines are there, by their end words.
template <bool ALIGNED, class IsMine>
DEVICE INLINE bool get_row(const Slice<ALIGNED>& slice, u32 row, const Pack* slot, Row& some, IsMine is_mine) {
  bool here = true;
  UNROLL
  for (u32 back = 0; back < PARTS; back++) {
    // On the host the end of a line is read before the rest of it.
    const u32 i = PARTS - 1 - back, part = part_of(i);
    if (!slice.has_line(row, part / LINE_PARTS)) continue;
    some.parts[i] = load_pack(at_part(slot, row, part));
    if (ends_line(part) && !is_mine(some.parts[i].words[1])) here = false;
  }
  return here;
}

// One warp: writes a chunk into a slot, `COPIED` rows at a time.
template <u32 COPIED, bool ALIGNED>
DEVICE INLINE void put_chunk(const Slice<ALIGNED>& from, Pack* slot, u64 end) {
  const u32 rows = from.rows();
  for (u32 first = 0; first < rows; first += COPIED) {
    Row some[COPIED];
    UNROLL
    for (u32 i = 0; i < COPIED; i++) some[i] = load_row(from, first + i);
    UNROLL
    for (u32 i = 0; i < COPIED; i++) put_row(from, first + i, slot, some[i], end);
  }
}
// One warp: takes a chunk out of a slot once it is there. `go_on(polls)` returns false to give up.
template <u32 COPIED, bool ALIGNED, class IsMine, class GoOn>
DEVICE INLINE bool take_chunk(const Slice<ALIGNED>& to, const Pack* slot, IsMine is_mine, GoOn go_on) {
  const u32 rows = to.rows();
  for (u32 first = 0; first < rows; first += COPIED) {
    Row some[COPIED];
    for (u32 polls = 1;; polls++) {
      bool here = true;
      UNROLL
      for (u32 i = 0; i < COPIED; i++) here = get_row(to, first + i, slot, some[i], is_mine) && here;
      if (warp_all(here)) break;
      if (!go_on(polls)) return false;
    }
    UNROLL
    for (u32 i = 0; i < COPIED; i++) store_row(to, first + i, some[i]);
  }
  return true;
}

}  // namespace ringsight
