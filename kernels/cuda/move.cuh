// What a block does with the bytes of one step: copies and reductions by all its threads.
#pragma once

#include "elements.cuh"
#include "words.cuh"

namespace ringsight {

// What is computed from the inputs of a step.
enum class Kernel : u8 { Copy, Sum, Prod, Max, Min, MulSum, SumDiv, Scale };

struct Move {
  // A partial result; null for a copy and for `Scale`.
  const void* partial;
  // This rank's contribution, or what is copied.
  const void* from;
  // Where the result goes; null if nowhere.
  void* out;
  // Where it goes as well; null if nowhere.
  void* also;
  u64 elems;
  u64 argument;
  DataType data_type;
  Kernel kernel;
};

// What a thread loads at once: 16 bytes; of the 8-bit floats four, whose conversions are long.
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

// Every thread takes packs where all addresses allow it, else elements. An element is read before its place is
// written, by the same thread: outputs may be the inputs themselves.
template <class E, class Op>
DEVICE NOINLINE void combine(const Move& move) {
  const E* a = static_cast<const E*>(move.partial);
  const E* b = static_cast<const E*>(move.from);
  E* out = static_cast<E*>(move.out);
  E* also = static_cast<E*>(move.also);
  using W = typename E::Wide;
  const u64 argument = move.argument;
  auto one = [argument](const E& x, const E& y) {
    return E::narrow(Op::template apply<W>(x.widen(), y.widen(), argument));
  };
  u64 done = 0;
  if (is_aligned(a, 16) && is_aligned(b, 16) && is_aligned(out, 16) && is_aligned(also, 16)) {
    using Pack = Packed<E>;
    const u64 packs = move.elems / Pack::ELEMS;
    done = packs * Pack::ELEMS;
    for (u64 at = thread_index(); at < packs; at += threads()) {
      const Pack y = reinterpret_cast<const Pack*>(b)[at];
      const Pack x = a != nullptr ? reinterpret_cast<const Pack*>(a)[at] : y;
      Pack z;
      UNROLL
      for (u32 i = 0; i < Pack::ELEMS; i++) z.elements[i] = one(x.elements[i], y.elements[i]);
      reinterpret_cast<Pack*>(out)[at] = z;
      if (also != nullptr) reinterpret_cast<Pack*>(also)[at] = z;
    }
  }
  for (u64 at = done + thread_index(); at < move.elems; at += threads()) {
    const E y = b[at];
    const E z = one(a != nullptr ? a[at] : y, y);
    out[at] = z;
    if (also != nullptr) also[at] = z;
  }
}

template <class T>
DEVICE void copy_as(const Move& move, u64 count) {
  const T* from = static_cast<const T*>(move.from);
  T* out = static_cast<T*>(move.out);
  T* also = static_cast<T*>(move.also);
  for (u64 at = thread_index(); at < count; at += threads()) {
    const T value = from[at];
    if (out != nullptr) out[at] = value;
    if (also != nullptr) also[at] = value;
  }
}

struct alignas(16) Sixteen { u64 halves[2]; };

DEVICE NOINLINE inline void copy(const Move& move) {
  const u32 size = size_of(move.data_type);
  const u64 bytes = move.elems * size;
  if (is_aligned(move.from, 16) && is_aligned(move.out, 16) && is_aligned(move.also, 16)) {
    const u64 whole = bytes / 16;
    copy_as<Sixteen>(move, whole);
    Move rest = move;
    rest.from = static_cast<const u8*>(move.from) + whole * 16;
    rest.out = move.out == nullptr ? nullptr : static_cast<u8*>(move.out) + whole * 16;
    rest.also = move.also == nullptr ? nullptr : static_cast<u8*>(move.also) + whole * 16;
    copy_as<u8>(rest, bytes % 16);
    return;
  }
  // Addresses are multiples of the element's size: the launch has been checked.
  switch (size) {
    case 1: return copy_as<u8>(move, move.elems);
    case 2: return copy_as<u16>(move, move.elems);
    case 4: return copy_as<u32>(move, move.elems);
    default: return copy_as<u64>(move, move.elems);
  }
}

template <class E>
DEVICE void combine_any(const Move& move) {
  switch (move.kernel) {
    case Kernel::Sum: return combine<E, Sum>(move);
    case Kernel::Prod: return combine<E, Prod>(move);
    case Kernel::Max: return combine<E, Max>(move);
    case Kernel::Min: return combine<E, Min>(move);
    case Kernel::MulSum: return combine<E, MulSum>(move);
    case Kernel::Scale: return combine<E, Scale>(move);
    default: return;
  }
}

template <class E>
DEVICE void combine_integers(const Move& move) {
  if (move.kernel == Kernel::SumDiv) return combine<E, SumDiv>(move);
  combine_any<E>(move);
}

// Done by all threads of the block.
DEVICE inline void run_move(const Move& move) {
  if (move.kernel == Kernel::Copy) return copy(move);
  switch (move.data_type) {
    case DataType::Int8: return combine_integers<Plain<int8_t>>(move);
    case DataType::Uint8: return combine_integers<Plain<u8>>(move);
    case DataType::Int32: return combine_integers<Plain<int32_t>>(move);
    case DataType::Uint32: return combine_integers<Plain<u32>>(move);
    case DataType::Int64: return combine_integers<Plain<int64_t>>(move);
    case DataType::Uint64: return combine_integers<Plain<u64>>(move);
    case DataType::Float16: return combine_any<Half>(move);
    case DataType::Float32: return combine_any<Plain<float>>(move);
    case DataType::Float64: return combine_any<Plain<double>>(move);
    case DataType::Bfloat16: return combine_any<Bfloat16>(move);
    case DataType::Float8e4m3: return combine_any<Float8e4m3>(move);
    case DataType::Float8e5m2: return combine_any<Float8e5m2>(move);
  }
}

// A scalar in device memory as the argument of a kernel: `Reduction::argument` in src/reduce.rs.
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
