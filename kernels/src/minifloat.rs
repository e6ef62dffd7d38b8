//! Half, bfloat16 and the two 8-bit float formats as storage types; arithmetic is done in `f32`.
//!
//! Conversions are branch-free on purpose: both sides of every selection are computed, so that LLVM turns a loop of
//! them into vector code. Rounding is to nearest, ties to even. 8-bit formats saturate to their largest finite value
//! as CUDA's `__NV_SATFINITE` conversions (which NCCL uses) do; NaN stays NaN.

/// A float of `EXPONENT` + `MANTISSA` + 1 bits in the low bits of a `u32`, with IEEE 754's subnormals.
struct Format<const EXPONENT: u32, const MANTISSA: u32>;

impl<const EXPONENT: u32, const MANTISSA: u32> Format<EXPONENT, MANTISSA> {
    const SIGN: u32 = 1 << (EXPONENT + MANTISSA);
    const BIAS: u32 = (1 << (EXPONENT - 1)) - 1;
    /// Mantissa bits that `f32` has in excess.
    const SHIFT: u32 = 23 - MANTISSA;
    /// What is added to an exponent to make it an `f32`'s, in place.
    const REBIAS: u32 = (127 - Self::BIAS) << 23;
    /// Bits of the smallest normal number, as an `f32`.
    const MIN_NORMAL: u32 = Self::REBIAS + (1 << 23);
    /// An `f32` whose unit in the last place is this format's smallest subnormal: adding it rounds there.
    const SUBNORMAL_MAGIC: u32 = (127 - Self::BIAS + 1 + Self::SHIFT) << 23;
    /// Exponent bits all one: infinity, where the format has one.
    const INFINITY: u32 = ((1 << EXPONENT) - 1) << MANTISSA;

    /// Magnitude bits to `f32`; the largest exponent is a number like others.
    #[inline(always)]
    fn magnitude_to_f32(magnitude: u32) -> u32 {
        let shifted = magnitude << Self::SHIFT;
        let normal = shifted + Self::REBIAS;
        let subnormal =
            (f32::from_bits(shifted + Self::MIN_NORMAL) - f32::from_bits(Self::MIN_NORMAL)).to_bits();
        if magnitude >> MANTISSA == 0 {
            subnormal
        } else {
            normal
        }
    }

    /// Bits of a finite `f32` magnitude to magnitude bits, rounded, not limited above.
    #[inline(always)]
    fn magnitude_from_f32(magnitude: u32) -> u32 {
        let half_less_one = (1 << (Self::SHIFT - 1)) - 1;
        let odd = magnitude >> Self::SHIFT & 1;
        let normal =
            ((magnitude + half_less_one + odd) >> Self::SHIFT).wrapping_sub(Self::REBIAS >> Self::SHIFT);
        let subnormal = (f32::from_bits(magnitude) + f32::from_bits(Self::SUBNORMAL_MAGIC))
            .to_bits()
            .wrapping_sub(Self::SUBNORMAL_MAGIC);
        if magnitude < Self::MIN_NORMAL {
            subnormal
        } else {
            normal
        }
    }

    /// Moves the sign bit up to an `f32`'s.
    #[inline(always)]
    fn sign_to_f32(bits: u32) -> u32 {
        (bits & Self::SIGN) << (31 - EXPONENT - MANTISSA)
    }

    /// Moves an `f32`'s sign bit down.
    #[inline(always)]
    fn sign_from_f32(bits: u32) -> u32 {
        bits >> 31 << (EXPONENT + MANTISSA)
    }
}

const F32_MAGNITUDE: u32 = 0x7fff_ffff;
const F32_INFINITY: u32 = 0x7f80_0000;
const F32_QUIET: u32 = 0x0040_0000;

/// IEEE 754 binary16.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Half(pub u16);

impl Half {
    /// Its exact value.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        type F = Format<5, 10>;
        let bits = u32::from(self.0);
        let magnitude = bits & (F::SIGN - 1);
        let special = F32_INFINITY | (magnitude & 0x3ff) << F::SHIFT;
        let finite = F::magnitude_to_f32(magnitude);
        f32::from_bits(F::sign_to_f32(bits) | if magnitude >= F::INFINITY { special } else { finite })
    }

    /// The nearest half; overflow gives infinity.
    #[inline(always)]
    #[must_use]
    pub fn from_f32(value: f32) -> Self {
        type F = Format<5, 10>;
        let bits = value.to_bits();
        let magnitude = bits & F32_MAGNITUDE;
        let finite = F::magnitude_from_f32(magnitude).min(F::INFINITY);
        // Rounding works on the bits of infinity too; it ends above this format's and is limited to it.
        let nan = F::INFINITY | 0x200 | (magnitude >> F::SHIFT & 0x1ff);
        let limited = if magnitude >= 0x4780_0000 {
            F::INFINITY
        } else {
            finite
        };
        Self((F::sign_from_f32(bits) | if magnitude > F32_INFINITY { nan } else { limited }) as u16)
    }
}

/// The upper half of an `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bfloat16(pub u16);

impl Bfloat16 {
    /// Its exact value.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// The nearest bfloat16; overflow gives infinity.
    #[inline(always)]
    #[must_use]
    pub fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let nan = (bits | F32_QUIET) >> 16;
        Self(if bits & F32_MAGNITUDE > F32_INFINITY {
            nan
        } else {
            rounded
        } as u16)
    }
}

/// OCP FP8 E4M3: no infinity, one NaN magnitude, largest value 448.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Float8E4M3(pub u8);

impl Float8E4M3 {
    const NAN: u32 = 0x7f;
    const MAX: u32 = 0x7e;

    /// Its exact value.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        type F = Format<4, 3>;
        let bits = u32::from(self.0);
        let magnitude = bits & (F::SIGN - 1);
        let finite = F::magnitude_to_f32(magnitude);
        let nan = F32_INFINITY | F32_QUIET;
        f32::from_bits(F::sign_to_f32(bits) | if magnitude == Self::NAN { nan } else { finite })
    }

    /// The nearest value; overflow and infinity give ±448.
    #[inline(always)]
    #[must_use]
    pub fn from_f32(value: f32) -> Self {
        type F = Format<4, 3>;
        let bits = value.to_bits();
        let magnitude = bits & F32_MAGNITUDE;
        let limited = F::magnitude_from_f32(magnitude).min(Self::MAX);
        Self(
            (F::sign_from_f32(bits)
                | if magnitude > F32_INFINITY {
                    Self::NAN
                } else {
                    limited
                }) as u8,
        )
    }
}

/// OCP FP8 E5M2: infinities and NaNs as IEEE 754 has them, largest finite value 57344.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Float8E5M2(pub u8);

impl Float8E5M2 {
    const NAN: u32 = 0x7f;
    const MAX: u32 = 0x7b;

    /// Its exact value.
    #[inline(always)]
    #[must_use]
    pub fn to_f32(self) -> f32 {
        type F = Format<5, 2>;
        let bits = u32::from(self.0);
        let magnitude = bits & (F::SIGN - 1);
        let special = F32_INFINITY | (magnitude & 3) << F::SHIFT;
        let finite = F::magnitude_to_f32(magnitude);
        f32::from_bits(F::sign_to_f32(bits) | if magnitude >= F::INFINITY { special } else { finite })
    }

    /// The nearest value; overflow and infinity give ±57344.
    #[inline(always)]
    #[must_use]
    pub fn from_f32(value: f32) -> Self {
        type F = Format<5, 2>;
        let bits = value.to_bits();
        let magnitude = bits & F32_MAGNITUDE;
        let limited = F::magnitude_from_f32(magnitude).min(Self::MAX);
        Self(
            (F::sign_from_f32(bits)
                | if magnitude > F32_INFINITY {
                    Self::NAN
                } else {
                    limited
                }) as u8,
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Value of a float's bits by the definition, in `f64`; `None` for infinities and NaN.
    fn value(bits: u32, exponent_bits: u32, mantissa_bits: u32, ieee: bool) -> Option<f64> {
        let bias = (1_i32 << (exponent_bits - 1)) - 1;
        let mantissa = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1_u32 << mantissa_bits);
        let exponent = (bits >> mantissa_bits & ((1 << exponent_bits) - 1)) as i32;
        let sign = if bits >> (exponent_bits + mantissa_bits) & 1 == 1 {
            -1.0
        } else {
            1.0
        };
        let all_ones = exponent == (1 << exponent_bits) - 1;
        if all_ones && (ieee || bits & ((1 << mantissa_bits) - 1) == (1 << mantissa_bits) - 1) {
            return None;
        }
        Some(
            sign * if exponent == 0 {
                mantissa * 2f64.powi(1 - bias)
            } else {
                (1.0 + mantissa) * 2f64.powi(exponent - bias)
            },
        )
    }

    /// The finite code nearest to `x`, ties to the even code, by search over all codes of one sign.
    fn nearest(x: f64, exponent_bits: u32, mantissa_bits: u32, ieee: bool) -> u32 {
        let sign = u32::from(x.is_sign_negative()) << (exponent_bits + mantissa_bits);
        let x = x.abs();
        let mut best = (f64::INFINITY, 0);
        for code in 0..1 << (exponent_bits + mantissa_bits) {
            let Some(v) = value(code, exponent_bits, mantissa_bits, ieee) else {
                continue;
            };
            let distance = (v - x).abs();
            if distance < best.0 || (distance == best.0 && code % 2 == 0) {
                best = (distance, code);
            }
        }
        sign | best.1
    }

    #[test]
    fn every_code_has_its_value() {
        for code in 0..=u16::MAX {
            match value(code.into(), 5, 10, true) {
                Some(v) => assert_eq!(f64::from(Half(code).to_f32()), v, "half {code:#x}"),
                None => assert!(!Half(code).to_f32().is_finite(), "half {code:#x}"),
            }
        }
        for code in 0..=u8::MAX {
            match value(code.into(), 4, 3, false) {
                Some(v) => assert_eq!(f64::from(Float8E4M3(code).to_f32()), v, "e4m3 {code:#x}"),
                None => assert!(Float8E4M3(code).to_f32().is_nan(), "e4m3 {code:#x}"),
            }
            match value(code.into(), 5, 2, true) {
                Some(v) => assert_eq!(f64::from(Float8E5M2(code).to_f32()), v, "e5m2 {code:#x}"),
                None => assert!(!Float8E5M2(code).to_f32().is_finite(), "e5m2 {code:#x}"),
            }
        }
        assert_eq!(Float8E5M2(0xfc).to_f32(), f32::NEG_INFINITY);
        assert_eq!(Half(0x7c00).to_f32(), f32::INFINITY);
    }

    #[test]
    fn codes_survive_a_round_trip() {
        for code in 0..=u16::MAX {
            let (half, bf) = (Half(code), Bfloat16(code));
            let back = Half::from_f32(half.to_f32());
            assert!(
                back == half || (half.to_f32().is_nan() && back.to_f32().is_nan()),
                "{code:#x}"
            );
            let back = Bfloat16::from_f32(bf.to_f32());
            assert!(
                back == bf || (bf.to_f32().is_nan() && back.to_f32().is_nan()),
                "{code:#x}"
            );
        }
        for code in 0..=u8::MAX {
            let (a, b) = (Float8E4M3(code), Float8E5M2(code));
            let back = Float8E4M3::from_f32(a.to_f32());
            assert!(
                back == a || (a.to_f32().is_nan() && back.to_f32().is_nan()),
                "{code:#x}"
            );
            let back = Float8E5M2::from_f32(b.to_f32());
            assert!(back == b || !b.to_f32().is_finite(), "{code:#x}");
        }
    }

    #[test]
    fn overflow_saturates_or_is_infinite() {
        assert_eq!(Half::from_f32(65519.99).0, 0x7bff);
        assert_eq!(Half::from_f32(65520.0).0, 0x7c00);
        assert_eq!(Half::from_f32(f32::NEG_INFINITY).0, 0xfc00);
        assert_eq!(Bfloat16::from_f32(f32::MAX).0, 0x7f80);
        for huge in [465.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!(Float8E4M3::from_f32(huge).0, 0x7e);
            assert_eq!(Float8E4M3::from_f32(-huge).0, 0xfe);
        }
        for huge in [61440.0, 1e9, f32::MAX, f32::INFINITY] {
            assert_eq!(Float8E5M2::from_f32(huge).0, 0x7b);
            assert_eq!(Float8E5M2::from_f32(-huge).0, 0xfb);
        }
        assert!(Half::from_f32(f32::NAN).to_f32().is_nan());
        assert!(Bfloat16::from_f32(f32::from_bits(0x7f80_0001)).to_f32().is_nan());
        assert!(Float8E4M3::from_f32(-f32::NAN).to_f32().is_nan());
        assert!(Float8E5M2::from_f32(f32::NAN).to_f32().is_nan());
    }

    proptest! {
        #[test]
        fn fp8_is_the_nearest_code(bits in any::<u32>(), scale in -12_i32..18) {
            let raw = f32::from_bits(bits);
            // Half the cases in the formats' own range, the others anywhere.
            let near = (f64::from(bits) / f64::from(u32::MAX) - 0.5) as f32 * 2f32.powi(scale);
            for x in [raw, near] {
                if x.is_nan() { continue; }
                let limit = |max: f64| f64::from(x).clamp(-max, max);
                prop_assert_eq!(u32::from(Float8E4M3::from_f32(x).0), nearest(limit(448.0), 4, 3, false), "{}", x);
                prop_assert_eq!(u32::from(Float8E5M2::from_f32(x).0), nearest(limit(57344.0), 5, 2, true), "{}", x);
            }
        }

        #[test]
        fn half_and_bfloat16_are_the_nearest_code(bits in any::<u32>(), scale in -26_i32..17) {
            let near = (f64::from(bits) / f64::from(u32::MAX) - 0.5) as f32 * 2f32.powi(scale);
            if near.abs() < 65504.0 {
                prop_assert_eq!(u32::from(Half::from_f32(near).0), nearest(near.into(), 5, 10, true), "{}", near);
            }
            let x = f32::from_bits(bits);
            if x.is_finite() && x.abs() < 3e38 {
                let down = f64::from(f32::from_bits(bits & 0xffff_0000));
                let up = f64::from(f32::from_bits((bits & 0xffff_0000).wrapping_add(0x1_0000)));
                let (x, got) = (f64::from(x), f64::from(Bfloat16::from_f32(x).to_f32()));
                let even = if (bits >> 16) % 2 == 0 { down } else { up };
                let expected = match (x - down).abs().total_cmp(&(up - x).abs()) {
                    std::cmp::Ordering::Less => down,
                    std::cmp::Ordering::Greater => up,
                    std::cmp::Ordering::Equal => even,
                };
                prop_assert_eq!(got, expected);
            }
        }
    }
}
