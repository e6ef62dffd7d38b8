// Words of a caller's buffers, which need not begin or end at words.
#pragma once

#include "platform.cuh"

namespace ringsight {

DEVICE inline bool is_aligned(const void* address, u32 to) { return reinterpret_cast<u64>(address) % to == 0; }

template <class T>
DEVICE INLINE u64 load_as(const u8* from, u64 bytes) {
  u64 word = 0;
  for (u32 at = 0; at < 8 && at < bytes; at += sizeof(T)) {
    word |= static_cast<u64>(*reinterpret_cast<const T*>(from + at)) << 8 * at;
  }
  return word;
}
// The first `bytes` bytes of a word, element by element.
DEVICE INLINE u64 load_elements(const u8* from, u64 bytes, u32 element_bytes) {
  switch (element_bytes) {
    case 1: return load_as<u8>(from, bytes);
    case 2: return load_as<u16>(from, bytes);
    case 4: return load_as<u32>(from, bytes);
    default: return load_as<u64>(from, bytes);
  }
}

template <class T>
DEVICE INLINE void store_as(u8* to, u64 bytes, u64 word) {
  for (u32 at = 0; at < 8 && at < bytes; at += sizeof(T)) *reinterpret_cast<T*>(to + at) = static_cast<T>(word >> 8 * at);
}
DEVICE INLINE void store_elements(u8* to, u64 bytes, u32 element_bytes, u64 word) {
  switch (element_bytes) {
    case 1: return store_as<u8>(to, bytes, word);
    case 2: return store_as<u16>(to, bytes, word);
    case 4: return store_as<u32>(to, bytes, word);
    default: return store_as<u64>(to, bytes, word);
  }
}

}  // namespace ringsight
