// Combines one word of each rank's elements into one, in the order of ranks.
#pragma once

#include <type_traits>

#include "elements.cuh"

namespace ringsight {

template <u32 BYTES> struct BitsOf;
template <> struct BitsOf<1> { using Type = u8; };
template <> struct BitsOf<2> { using Type = u16; };
template <> struct BitsOf<4> { using Type = u32; };
template <> struct BitsOf<8> { using Type = u64; };
template <u32 BYTES> using Bits = typename BitsOf<BYTES>::Type;

// An element in the low bits of a word.
template <class E>
DEVICE E element_of(u64 word) {
  union {
    Bits<sizeof(E)> bits;
    E element;
  } both{static_cast<Bits<sizeof(E)>>(word)};
  return both.element;
}
template <class E>
DEVICE u64 bits_of(const E& element) {
  union {
    E element;
    Bits<sizeof(E)> bits;
  } both{element};
  return both.bits;
}

// How contributions are combined when all are at hand. Narrow floats are rounded once, at the end.
template <class Op>
struct Fold {
  template <class W> DEVICE static W first(W one, u64) { return one; }
  template <class W> DEVICE static W next(W sum, W one, u64 argument) { return Op::template apply<W>(sum, one, argument); }
  template <class W> DEVICE static W last(W sum, u64) { return sum; }
};
template <>
struct Fold<MulSum> {
  template <class W> DEVICE static W first(W one, u64 argument) { return Scale::apply<W>(one, one, argument); }
  template <class W> DEVICE static W next(W sum, W one, u64 argument) { return MulSum::apply<W>(sum, one, argument); }
  template <class W> DEVICE static W last(W sum, u64) { return sum; }
};
template <>
struct Fold<SumDiv> {
  template <class W> DEVICE static W first(W one, u64) { return one; }
  template <class W> DEVICE static W next(W sum, W one, u64) { return Sum::apply<W>(sum, one, 0); }
  template <class W> DEVICE static W last(W sum, u64 ranks) { return Numbers<W>::div(sum, ranks); }
};

// `E`, `Op`: elements `E` are combined by `Op`; void for the type and combination of the operation. `RANKS`: the number of ranks; 0 for any number up to
// `MOST`.
template <class E, class Op, u32 RANKS, u32 MOST>
class Folding {
 public:
  static constexpr bool IS_ANY = std::is_void_v<E>;
  static constexpr u32 MAX_RANKS = RANKS != 0 ? RANKS : MOST;

  DEVICE Folding(DataType type, Combine combine, u64 argument, u32 ranks)
      : type_(type), combine_(combine), argument_(argument), ranks_(ranks) {}

  DEVICE INLINE u32 ranks() const { return RANKS != 0 ? RANKS : ranks_; }
  DEVICE INLINE u32 element_bytes() const {
    if constexpr (IS_ANY) {
      return size_of(type_);
    } else {
      return sizeof(E);
    }
  }

  // Combines the words `all`, by rank.
  DEVICE INLINE u64 reduce(const u64 (&all)[MAX_RANKS]) const {
    if constexpr (IS_ANY) {
      return reduce_typed(all);
    } else {
      return reduce_as<E, Op>(all);
    }
  }

 private:
  DEVICE INLINE u64 reduce_typed(const u64 (&all)[MAX_RANKS]) const {
    switch (type_) {
      case DataType::Int8: return reduce_integers<Plain<int8_t>>(all);
      case DataType::Uint8: return reduce_integers<Plain<u8>>(all);
      case DataType::Int32: return reduce_integers<Plain<int32_t>>(all);
      case DataType::Uint32: return reduce_integers<Plain<u32>>(all);
      case DataType::Int64: return reduce_integers<Plain<int64_t>>(all);
      case DataType::Uint64: return reduce_integers<Plain<u64>>(all);
      case DataType::Float16: return reduce_any<Half>(all);
      case DataType::Float32: return reduce_any<Plain<float>>(all);
      case DataType::Float64: return reduce_any<Plain<double>>(all);
      case DataType::Bfloat16: return reduce_any<Bfloat16>(all);
      case DataType::Float8e4m3: return reduce_any<Float8e4m3>(all);
      default: return reduce_any<Float8e5m2>(all);
    }
  }
  template <class T>
  DEVICE INLINE u64 reduce_integers(const u64 (&all)[MAX_RANKS]) const {
    return combine_ == Combine::SumDiv ? reduce_as<T, SumDiv>(all) : reduce_any<T>(all);
  }
  template <class T>
  DEVICE INLINE u64 reduce_any(const u64 (&all)[MAX_RANKS]) const {
    switch (combine_) {
      case Combine::Prod: return reduce_as<T, Prod>(all);
      case Combine::Max: return reduce_as<T, Max>(all);
      case Combine::Min: return reduce_as<T, Min>(all);
      case Combine::MulSum: return reduce_as<T, MulSum>(all);
      default: return reduce_as<T, Sum>(all);
    }
  }
  template <class T, class How>
  DEVICE INLINE u64 reduce_as(const u64 (&all)[MAX_RANKS]) const {
    using W = typename T::Wide;
    constexpr u32 BITS = 8 * sizeof(T);
    u64 result = 0;
    // Conversions of 8-bit floats take long code.
    UNROLL_BY((sizeof(T) == 1 ? 1 : 8 / sizeof(T)))
    for (u32 bit = 0; bit < 64; bit += BITS) {
      W sum{};
      UNROLL
      for (u32 rank = 0; rank < MAX_RANKS; rank++) {
        if (rank < ranks()) {
          const W one = element_of<T>(all[rank] >> bit).widen();
          sum = rank == 0 ? Fold<How>::first(one, argument_) : Fold<How>::next(sum, one, argument_);
        }
      }
      result |= bits_of<T>(T::narrow(Fold<How>::last(sum, argument_))) << bit;
    }
    return result;
  }

  const DataType type_;
  const Combine combine_;
  const u64 argument_;
  const u32 ranks_;
};

// Specialised kernels for sums: {name, element, combination, ranks}. `sum_kernel` in src/cuda/peer_launch.rs numbers them.
#define RINGSIGHT_SUMS(X, PREFIX)                     \
  X(PREFIX##_sum_f32_2, Plain<float>, MulSum, 2)      \
  X(PREFIX##_sum_f32_4, Plain<float>, MulSum, 4)      \
  X(PREFIX##_sum_f32_8, Plain<float>, MulSum, 8)      \
  X(PREFIX##_sum_f16_2, Half, MulSum, 2)              \
  X(PREFIX##_sum_f16_4, Half, MulSum, 4)              \
  X(PREFIX##_sum_f16_8, Half, MulSum, 8)              \
  X(PREFIX##_sum_bf16_2, Bfloat16, MulSum, 2)         \
  X(PREFIX##_sum_bf16_4, Bfloat16, MulSum, 4)         \
  X(PREFIX##_sum_bf16_8, Bfloat16, MulSum, 8)

}  // namespace ringsight
