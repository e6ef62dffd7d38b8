// Elementwise reductions: the twin of src/reduce.rs and src/minifloat.rs. Narrow floats are widened to float and rounded once a call, products and
// sums are never fused (compiled with -fmad=false), integers wrap. Results have the twin's bits, except for the payload of a NaN: a GPU computes the
// canonical NaN.
#pragma once

#include "layout.cuh"

namespace ringsight {

// A float of EXPONENT + MANTISSA + 1 bits, with IEEE 754's subnormals: `Format` in src/minifloat.rs.
template <u32 EXPONENT, u32 MANTISSA>
struct Format {
  static constexpr u32 SIGN = 1u << (EXPONENT + MANTISSA);
  static constexpr u32 BIAS = (1u << (EXPONENT - 1)) - 1;
  static constexpr u32 SHIFT = 23 - MANTISSA;
  static constexpr u32 REBIAS = (127 - BIAS) << 23;
  static constexpr u32 MIN_NORMAL = REBIAS + (1u << 23);
  static constexpr u32 SUBNORMAL_MAGIC = (127 - BIAS + 1 + SHIFT) << 23;
  static constexpr u32 ALL_ONES = ((1u << EXPONENT) - 1) << MANTISSA;

  DEVICE static u32 magnitude_to_float(u32 magnitude) {
    const u32 shifted = magnitude << SHIFT;
    if (magnitude >> MANTISSA == 0) {
      return float_to_bits(bits_to_float(shifted + MIN_NORMAL) - bits_to_float(MIN_NORMAL));
    }
    return shifted + REBIAS;
  }
  DEVICE static u32 magnitude_from_float(u32 magnitude) {
    if (magnitude < MIN_NORMAL) {
      return float_to_bits(bits_to_float(magnitude) + bits_to_float(SUBNORMAL_MAGIC)) - SUBNORMAL_MAGIC;
    }
    const u32 odd = magnitude >> SHIFT & 1;
    return ((magnitude + ((1u << (SHIFT - 1)) - 1) + odd) >> SHIFT) - (REBIAS >> SHIFT);
  }
  DEVICE static u32 sign_to_float(u32 bits) { return (bits & SIGN) << (31 - EXPONENT - MANTISSA); }
  DEVICE static u32 sign_from_float(u32 bits) { return bits >> 31 << (EXPONENT + MANTISSA); }
};

constexpr u32 FLOAT_MAGNITUDE = 0x7fffffff;
constexpr u32 FLOAT_INFINITY = 0x7f800000;
constexpr u32 FLOAT_QUIET = 0x00400000;

struct Half {
  using Wide = float;
  using F = Format<5, 10>;
  u16 bits;
#ifdef __CUDACC__
  DEVICE float widen() const {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
  }
  DEVICE static Half narrow(float value) {
    Half half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
    return half;
  }
#else
  DEVICE float widen() const {
    const u32 magnitude = bits & (F::SIGN - 1);
    const u32 value = magnitude >= F::ALL_ONES ? FLOAT_INFINITY | (magnitude & 0x3ff) << F::SHIFT
                                               : F::magnitude_to_float(magnitude);
    return bits_to_float(F::sign_to_float(bits) | value);
  }
  DEVICE static Half narrow(float value) {
    const u32 from = float_to_bits(value), magnitude = from & FLOAT_MAGNITUDE;
    u32 to;
    if (magnitude > FLOAT_INFINITY) {
      to = F::ALL_ONES | 0x200 | (magnitude >> F::SHIFT & 0x1ff);
    } else if (magnitude >= 0x47800000) {
      to = F::ALL_ONES;
    } else {
      to = F::magnitude_from_float(magnitude);
      to = to < F::ALL_ONES ? to : F::ALL_ONES;
    }
    return Half{static_cast<u16>(F::sign_from_float(from) | to)};
  }
#endif
};

struct Bfloat16 {
  using Wide = float;
  u16 bits;
  DEVICE float widen() const { return bits_to_float(static_cast<u32>(bits) << 16); }
#ifdef __CUDACC__
  DEVICE static Bfloat16 narrow(float value) {
    Bfloat16 half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half.bits) : "f"(value));
    return half;
  }
#else
  DEVICE static Bfloat16 narrow(float value) {
    const u32 from = float_to_bits(value);
    const bool nan = (from & FLOAT_MAGNITUDE) > FLOAT_INFINITY;
    const u32 to = nan ? (from | FLOAT_QUIET) >> 16 : (from + 0x7fff + (from >> 16 & 1)) >> 16;
    return Bfloat16{static_cast<u16>(to)};
  }
#endif
};

struct Float8e4m3 {
  using Wide = float;
  using F = Format<4, 3>;
  static constexpr u32 NAN_CODE = 0x7f, MAX_CODE = 0x7e;
  u8 bits;
  DEVICE float widen() const {
    const u32 magnitude = bits & (F::SIGN - 1);
    const u32 value = magnitude == NAN_CODE ? FLOAT_INFINITY | FLOAT_QUIET : F::magnitude_to_float(magnitude);
    return bits_to_float(F::sign_to_float(bits) | value);
  }
  DEVICE static Float8e4m3 narrow(float value) {
    const u32 from = float_to_bits(value), magnitude = from & FLOAT_MAGNITUDE;
    u32 to = NAN_CODE;
    if (magnitude <= FLOAT_INFINITY) {
      to = F::magnitude_from_float(magnitude);
      to = to < MAX_CODE ? to : MAX_CODE;
    }
    return Float8e4m3{static_cast<u8>(F::sign_from_float(from) | to)};
  }
};

struct Float8e5m2 {
  using Wide = float;
  using F = Format<5, 2>;
  static constexpr u32 NAN_CODE = 0x7f, MAX_CODE = 0x7b;
  u8 bits;
  DEVICE float widen() const {
    const u32 magnitude = bits & (F::SIGN - 1);
    const u32 value = magnitude >= F::ALL_ONES ? FLOAT_INFINITY | (magnitude & 3) << F::SHIFT
                                               : F::magnitude_to_float(magnitude);
    return bits_to_float(F::sign_to_float(bits) | value);
  }
  DEVICE static Float8e5m2 narrow(float value) {
    const u32 from = float_to_bits(value), magnitude = from & FLOAT_MAGNITUDE;
    u32 to = NAN_CODE;
    if (magnitude <= FLOAT_INFINITY) {
      to = F::magnitude_from_float(magnitude);
      to = to < MAX_CODE ? to : MAX_CODE;
    }
    return Float8e5m2{static_cast<u8>(F::sign_from_float(from) | to)};
  }
};

// A type whose arithmetic is done in the type itself.
template <class T>
struct Plain {
  using Wide = T;
  T value;
  DEVICE T widen() const { return value; }
  DEVICE static Plain narrow(T wide) { return Plain{wide}; }
};

template <class T>
struct Numbers;  // arithmetic of a wide type

template <class T>
struct Floats {
  DEVICE static T add(T a, T b) { return a + b; }
  DEVICE static T mul(T a, T b) { return a * b; }
  DEVICE static T max(T a, T b) { return a > b || b != b ? a : b; }
  DEVICE static T min(T a, T b) { return a < b || b != b ? a : b; }
};
template <>
struct Numbers<float> : Floats<float> {
  DEVICE static float argument(u64 bits) { return bits_to_float(static_cast<u32>(bits)); }
};
template <>
struct Numbers<double> : Floats<double> {
  DEVICE static double argument(u64 bits) { return bits_to_double(bits); }
};

template <class T, class Division>
struct Integers {
  DEVICE static T argument(u64 bits) { return static_cast<T>(bits); }
  // Unsigned 64 bits: products of narrower types do not overflow there, and wider ones wrap.
  DEVICE static T add(T a, T b) { return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b)); }
  DEVICE static T mul(T a, T b) { return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b)); }
  DEVICE static T max(T a, T b) { return a > b ? a : b; }
  DEVICE static T min(T a, T b) { return a < b ? a : b; }
  DEVICE static T div(T a, u64 divisor) {
    return static_cast<T>(static_cast<Division>(a) / static_cast<Division>(divisor));
  }
};
template <> struct Numbers<int8_t> : Integers<int8_t, int64_t> {};
template <> struct Numbers<u8> : Integers<u8, u64> {};
template <> struct Numbers<int32_t> : Integers<int32_t, int64_t> {};
template <> struct Numbers<u32> : Integers<u32, u64> {};
template <> struct Numbers<int64_t> : Integers<int64_t, int64_t> {};
template <> struct Numbers<u64> : Integers<u64, u64> {};

// How a partial result `a` and a contribution `b` are combined. `Scale` makes a partial result of the first contribution.
struct Sum {
  template <class W> DEVICE static W apply(W a, W b, u64) { return Numbers<W>::add(a, b); }
};
struct Prod {
  template <class W> DEVICE static W apply(W a, W b, u64) { return Numbers<W>::mul(a, b); }
};
struct Max {
  template <class W> DEVICE static W apply(W a, W b, u64) { return Numbers<W>::max(a, b); }
};
struct Min {
  template <class W> DEVICE static W apply(W a, W b, u64) { return Numbers<W>::min(a, b); }
};
struct MulSum {
  template <class W> DEVICE static W apply(W a, W b, u64 scalar) {
    return Numbers<W>::add(a, Numbers<W>::mul(Numbers<W>::argument(scalar), b));
  }
};
struct Scale {
  template <class W> DEVICE static W apply(W, W b, u64 scalar) {
    return Numbers<W>::mul(Numbers<W>::argument(scalar), b);
  }
};
struct SumDiv {
  template <class W> DEVICE static W apply(W a, W b, u64 ranks) {
    return Numbers<W>::div(Numbers<W>::add(a, b), ranks);
  }
};

}  // namespace ringsight
