// How a block moves the bytes of one step: copies and reductions by all its threads.
#pragma once

#include "elements.cuh"
#include "words.cuh"

namespace ringsight {

// What is computed from the inputs of a step.
enum class Kernel : u8 { Copy, Sum, Prod, Max, Min, MulSum, SumDiv, Scale };

struct Move {
  // A partial result; null for a copy and for `Scale`.
  const void* partial;
  // This rank's contribution, or the source of a copy.
  const void* from;
  // Destination of the result, or null.
  void* out;
  // Second destination, or null.
  void* also;
  // A slot has fewer than 2^30 bytes.
  u64 elems;
  u64 argument;
  DataType data_type;
  Kernel kernel;
};

// Bytes that a thread loads at once: 16; 4 of the 8-bit floats, whose conversions take long code.
template <class E>
constexpr u32 pack_bytes() { return 16; }
template <>
constexpr u32 pack_bytes<Float8e4m3>() { return 4; }
template <>
constexpr u32 pack_bytes<Float8e5m2>() { return 4; }

template <class E>
struct alignas(pack_bytes<E>()) Packed {
  static constexpr u32 ELEMS = pack_bytes<E>() / sizeof(E);
  E elements[ELEMS];
};

// Loads of an input that a thread has in flight at once. All threads together fill the link: a block of 512 has 64 KiB of a copy in flight in the
// copy-only kernel, and 32 KiB of the most frequent sums. All other reductions have one load each, since their code for more would be long and take
// registers from everything else.
constexpr u32 COPIES_AT_ONCE = 8;
constexpr u32 SUMS_AT_ONCE = 4;

// Loads and stores items 0..count, one thread per item, `AT_ONCE` items per thread at a time. Both callbacks get the thread's first item and a constant
// distance from it, so that each address needs one register for all items.
template <class T, u32 AT_ONCE, class Load, class Store>
DEVICE INLINE void each(u32 count, Load load, Store store) {
  UNROLL_BY(1)
  for (u32 first = thread_index(); first < count; first += AT_ONCE * CHANNEL_THREADS) {
    T items[AT_ONCE];
    UNROLL
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (i == 0 || first + i * CHANNEL_THREADS < count) items[i] = load(first, i * CHANNEL_THREADS);
    }
    UNROLL
    for (u32 i = 0; i < AT_ONCE; i++) {
      if (i == 0 || first + i * CHANNEL_THREADS < count) store(first, i * CHANNEL_THREADS, items[i]);
    }
  }
}

template <class T>
struct Pair { T x, y; };

// Threads take packs if all addresses are aligned, else elements. The thread that stores an element has loaded it before, so outputs may be the
// inputs themselves.
template <class E, class Op, u32 AT_ONCE>
DEVICE INLINE void combine(const Move& move) {
  const E* a = static_cast<const E*>(move.partial);
  const E* b = static_cast<const E*>(move.from);
  E* out = static_cast<E*>(move.out);
  E* also = static_cast<E*>(move.also);
  using W = typename E::Wide;
  const u64 argument = move.argument;
  auto one = [argument](const E& x, const E& y) {
    return E::narrow(Op::template apply<W>(x.widen(), y.widen(), argument));
  };
  u32 done = 0;
  if (is_aligned(a, 16) && is_aligned(b, 16) && is_aligned(out, 16) && is_aligned(also, 16)) {
    using Pack = Packed<E>;
    const u32 packs = static_cast<u32>(move.elems / Pack::ELEMS);
    done = packs * Pack::ELEMS;
    each<Pair<Pack>, AT_ONCE>(
        packs,
        [a, b](u32 first, u32 behind) {
          const Pack y = (reinterpret_cast<const Pack*>(b) + first)[behind];
          return Pair<Pack>{a != nullptr ? (reinterpret_cast<const Pack*>(a) + first)[behind] : y, y};
        },
        [out, also, one](u32 first, u32 behind, const Pair<Pack>& in) {
          Pack z;
          UNROLL
          for (u32 i = 0; i < Pack::ELEMS; i++) z.elements[i] = one(in.x.elements[i], in.y.elements[i]);
          (reinterpret_cast<Pack*>(out) + first)[behind] = z;
          if (also != nullptr) (reinterpret_cast<Pack*>(also) + first)[behind] = z;
        });
  }
  UNROLL_BY(1)
  for (u32 at = done + thread_index(); at < move.elems; at += threads()) {
    const E y = b[at];
    const E z = one(a != nullptr ? a[at] : y, y);
    out[at] = z;
    if (also != nullptr) also[at] = z;
  }
}

template <class T, u32 AT_ONCE>
DEVICE INLINE void copy_as(const Move& move, u64 count) {
  const T* from = static_cast<const T*>(move.from);
  T* out = static_cast<T*>(move.out);
  T* also = static_cast<T*>(move.also);
  each<T, AT_ONCE>(
      static_cast<u32>(count), [from](u32 first, u32 behind) { return (from + first)[behind]; },
      [out, also](u32 first, u32 behind, const T& value) {
        (out + first)[behind] = value;
        if (also != nullptr) (also + first)[behind] = value;
      });
}

struct alignas(16) Sixteen { u64 halves[2]; };

template <u32 AT_ONCE>
DEVICE INLINE void copy(const Move& move) {
  // Without a destination nothing is moved.
  if (move.elems == 0) return;
  const u32 size = size_of(move.data_type);
  const u64 bytes = move.elems * size;
  if (is_aligned(move.from, 16) && is_aligned(move.out, 16) && is_aligned(move.also, 16)) {
    const u64 whole = bytes / 16;
    copy_as<Sixteen, AT_ONCE>(move, whole);
    Move rest = move;
    rest.from = static_cast<const u8*>(move.from) + whole * 16;
    rest.out = static_cast<u8*>(move.out) + whole * 16;
    rest.also = move.also == nullptr ? nullptr : static_cast<u8*>(move.also) + whole * 16;
    copy_as<u8, 1>(rest, bytes % 16);
    return;
  }
  // Addresses are multiples of the element's size: the launch has been checked.
  switch (size) {
    case 1: return copy_as<u8, AT_ONCE>(move, move.elems);
    case 2: return copy_as<u16, AT_ONCE>(move, move.elems);
    case 4: return copy_as<u32, AT_ONCE>(move, move.elems);
    default: return copy_as<u64, AT_ONCE>(move, move.elems);
  }
}

// Not inlined: inlined code would share registers with everything else, while a called function saves those that it uses.
template <class E, class Op>
DEVICE NOINLINE void combine_one(const Move& move) {
  combine<E, Op, 1>(move);
}

template <class E>
DEVICE void combine_any(const Move& move) {
  switch (move.kernel) {
    case Kernel::Sum: return combine_one<E, Sum>(move);
    case Kernel::Prod: return combine_one<E, Prod>(move);
    case Kernel::Max: return combine_one<E, Max>(move);
    case Kernel::Min: return combine_one<E, Min>(move);
    case Kernel::MulSum: return combine_one<E, MulSum>(move);
    case Kernel::Scale: return combine_one<E, Scale>(move);
    default: return;
  }
}

template <class E>
DEVICE void combine_integers(const Move& move) {
  if (move.kernel == Kernel::SumDiv) return combine_one<E, SumDiv>(move);
  combine_any<E>(move);
}

template <class E>
DEVICE INLINE void combine_often(const Move& move) {
  if (move.kernel == Kernel::Sum) return combine<E, Sum, sizeof(E) == 2 ? SUMS_AT_ONCE / 2 : SUMS_AT_ONCE>(move);
  combine_any<E>(move);
}

// All threads of the block call this. Without `REDUCES` there are only copies.
template <bool REDUCES>
DEVICE INLINE void run_move(const Move& move) {
  if constexpr (!REDUCES) return copy<COPIES_AT_ONCE>(move);
  if (move.kernel == Kernel::Copy) return copy<SUMS_AT_ONCE>(move);
  switch (move.data_type) {
    case DataType::Int8: return combine_integers<Plain<int8_t>>(move);
    case DataType::Uint8: return combine_integers<Plain<u8>>(move);
    case DataType::Int32: return combine_integers<Plain<int32_t>>(move);
    case DataType::Uint32: return combine_integers<Plain<u32>>(move);
    case DataType::Int64: return combine_integers<Plain<int64_t>>(move);
    case DataType::Uint64: return combine_integers<Plain<u64>>(move);
    case DataType::Float16: return combine_often<Half>(move);
    case DataType::Float32: return combine_often<Plain<float>>(move);
    case DataType::Float64: return combine_any<Plain<double>>(move);
    case DataType::Bfloat16: return combine_often<Bfloat16>(move);
    case DataType::Float8e4m3: return combine_any<Float8e4m3>(move);
    case DataType::Float8e5m2: return combine_any<Float8e5m2>(move);
  }
}

// Makes the argument of a reduction from a scalar in device memory: `Reduction::argument` in src/reduce.rs.
DEVICE inline u64 scalar_argument(const void* address, DataType type) {
  switch (type) {
    case DataType::Float16: return float_to_bits(static_cast<const Half*>(address)->widen());
    case DataType::Bfloat16: return float_to_bits(static_cast<const Bfloat16*>(address)->widen());
    case DataType::Float8e4m3: return float_to_bits(static_cast<const Float8e4m3*>(address)->widen());
    case DataType::Float8e5m2: return float_to_bits(static_cast<const Float8e5m2*>(address)->widen());
    default: break;
  }
  switch (size_of(type)) {
    case 1: return *static_cast<const u8*>(address);
    case 4: return *static_cast<const u32*>(address);
    default: return *static_cast<const u64*>(address);
  }
}

}  // namespace ringsight
