// Rows of four lines of 128 bytes, of which 8 say what the line belongs to: who waits for data waits for nothing else (as NCCL's
// LL128). That holds where a line that a warp writes by one instruction is seen whole by one that reads it so, as it is
// over NVLink and within a GPU.
#pragma once

#include "peers.cuh"
#include "words.cuh"

namespace ringsight {

// Some bytes of a caller's buffer; `WHOLE`: words, at addresses of words.
template <bool WHOLE>
class Stretch {
 public:
  // `bytes` bytes from `at` on of a buffer of `all` bytes at `base`, or what there is of them.
  DEVICE Stretch(u64 base, u64 all, u64 at, u32 bytes, u32 element_bytes)
      : base_(reinterpret_cast<u8*>(base + at)),
        bytes_(at >= all ? 0 : all - at < bytes ? static_cast<u32>(all - at) : bytes),
        element_bytes_(element_bytes) {}

  // Rows that hold it: one, if it is empty.
  DEVICE INLINE u32 rows() const { return bytes_ == 0 ? 1 : (bytes_ + ROW_BYTES - 1) / ROW_BYTES; }
  // Whether a line of a row holds some of it; the first one does in any case.
  DEVICE INLINE bool has_line(u32 row, u32 line) const {
    return row * ROW_BYTES + line * LINE_DATA_BYTES < bytes_ || row + line == 0;
  }

  // The 8 bytes at `at`, or what there is of them.
  DEVICE INLINE u64 load(u32 at) const {
    if (at >= bytes_) return 0;
    return WHOLE ? *reinterpret_cast<const u64*>(base_ + at) : load_elements(base_ + at, bytes_ - at, element_bytes_);
  }
  DEVICE INLINE void store(u32 at, u64 word) const {
    if (at >= bytes_) return;
    if (WHOLE) {
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

// What a warp writes and reads at once: four lines, 16 bytes by each of 32 threads. On the host one thread does it all.
constexpr u32 ROW_PARTS = 32, LINE_PARTS = 8;
constexpr u32 PARTS = ROW_PARTS / warp_threads();
// Of a row: this thread's parts.
struct Row { Pack parts[PARTS]; };
// The number of one of them in the row.
DEVICE INLINE u32 part_of(u32 i) { return i * warp_threads() + warp_thread(); }
// Whether it ends its line; then its second word is the step.
DEVICE INLINE bool ends_line(u32 part) { return part % LINE_PARTS == LINE_PARTS - 1; }
// Where its first word comes from, in the row.
DEVICE INLINE u32 offset_of(u32 part) { return part / LINE_PARTS * LINE_DATA_BYTES + part % LINE_PARTS * 16; }

template <class Slot>
DEVICE INLINE Slot* at_part(Slot* slot, u32 row, u32 part) { return slot + row * ROW_PARTS + part; }

// A row of a stretch.
template <bool WHOLE>
DEVICE INLINE Row load_row(const Stretch<WHOLE>& from, u32 row) {
  Row some;
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i), at = row * ROW_BYTES + offset_of(part);
    some.parts[i].words[0] = from.load(at);
    some.parts[i].words[1] = ends_line(part) ? 0 : from.load(at + 8);
  }
  return some;
}
template <bool WHOLE>
DEVICE INLINE void store_row(const Stretch<WHOLE>& to, u32 row, const Row& some) {
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i), at = row * ROW_BYTES + offset_of(part);
    to.store(at, some.parts[i].words[0]);
    if (!ends_line(part)) to.store(at + 8, some.parts[i].words[1]);
  }
}

// Writes a row of a stretch into a slot, as far as there is some; `end`: what its lines end with.
template <bool WHOLE>
DEVICE INLINE void put_row(const Stretch<WHOLE>& stretch, u32 row, Pack* slot, const Row& some, u64 end) {
  UNROLL
  for (u32 i = 0; i < PARTS; i++) {
    const u32 part = part_of(i);
    if (!stretch.has_line(row, part / LINE_PARTS)) continue;
    Pack pack = some.parts[i];
    if (ends_line(part)) pack.words[1] = end;
    store_pack(at_part(slot, row, part), pack, ends_line(part));
  }
}
// Reads it; whether it is there, by what its lines end with.
template <bool WHOLE, class IsMine>
DEVICE INLINE bool get_row(const Stretch<WHOLE>& stretch, u32 row, const Pack* slot, Row& some, IsMine is_mine) {
  bool here = true;
  UNROLL
  for (u32 back = 0; back < PARTS; back++) {
    // On the host the end of a line is read before the rest of it.
    const u32 i = PARTS - 1 - back, part = part_of(i);
    if (!stretch.has_line(row, part / LINE_PARTS)) continue;
    some.parts[i] = load_pack(at_part(slot, row, part));
    if (ends_line(part) && !is_mine(some.parts[i].words[1])) here = false;
  }
  return here;
}

// By a warp: writes a chunk into a slot, so many rows at a time.
template <u32 COPIED, bool WHOLE>
DEVICE INLINE void put_chunk(const Stretch<WHOLE>& from, Pack* slot, u64 end) {
  const u32 rows = from.rows();
  for (u32 first = 0; first < rows; first += COPIED) {
    Row some[COPIED];
    UNROLL
    for (u32 i = 0; i < COPIED; i++) some[i] = load_row(from, first + i);
    UNROLL
    for (u32 i = 0; i < COPIED; i++) put_row(from, first + i, slot, some[i], end);
  }
}
// Takes one out of it, once it is there; false if `go_on`, which is told how often it was looked, says to give up.
template <u32 COPIED, bool WHOLE, class IsMine, class GoOn>
DEVICE INLINE bool take_chunk(const Stretch<WHOLE>& to, const Pack* slot, IsMine is_mine, GoOn go_on) {
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
