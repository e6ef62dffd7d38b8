//! Elementwise reductions: two inputs, one output, any of the three may be the same memory.
//!
//! Each call works on blocks of `LANES` elements held in local arrays, the last one padded: every element takes the
//! same instructions wherever it stands, results do not depend on alignment or length, and LLVM needs no alias checks
//! to use vectors. Narrow floats are widened to `f32` and rounded once per call.

use ringsight_records::{DataType, ReduceOp};

use crate::minifloat::{Bfloat16, Float8E4M3, Float8E5M2, Half};

/// Elements of a block.
const LANES: usize = 32;

/// Writes `op(a[i], b[i])` to `out[i]` for `elems` elements; an average then divides by the last argument.
///
/// # Safety
/// `out` must be writable, `a` and `b` readable for `elems` elements. Each of `a` and `b` is either the same address as
/// `out` or does not overlap it.
pub type Kernel = unsafe fn(out: *mut u8, a: *const u8, b: *const u8, elems: usize, divisor: u32);

/// How an operation combines contributions: pairwise on the way, and with the last one.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    /// Combines contributions of some ranks.
    pub partial: Kernel,
    /// Combines with the last contribution: for an average also divides by the number of ranks.
    pub complete: Kernel,
}

impl Reduction {
    /// The reduction of `op` on `data_type`; `None` for [`ReduceOp::None`] and for reductions that this device lacks.
    #[must_use]
    pub fn new(op: ReduceOp, data_type: DataType) -> Option<Self> {
        let partial = match op {
            ReduceOp::Sum | ReduceOp::Avg => select::<Sum>(data_type),
            ReduceOp::Prod => select::<Prod>(data_type),
            ReduceOp::Max => select::<Max>(data_type),
            ReduceOp::Min => select::<Min>(data_type),
            ReduceOp::PreMulSum | ReduceOp::None => return None,
        };
        let complete = if op == ReduceOp::Avg {
            select::<Avg>(data_type)
        } else {
            partial
        };
        Some(Self { partial, complete })
    }
}

fn select<O: Operation>(data_type: DataType) -> Kernel {
    match data_type {
        DataType::Int8 => version::<i8, O>(),
        DataType::Uint8 => version::<u8, O>(),
        DataType::Int32 => version::<i32, O>(),
        DataType::Uint32 => version::<u32, O>(),
        DataType::Int64 => version::<i64, O>(),
        DataType::Uint64 => version::<u64, O>(),
        DataType::Float16 => version::<Half, O>(),
        DataType::Float32 => version::<f32, O>(),
        DataType::Float64 => version::<f64, O>(),
        DataType::Bfloat16 => version::<Bfloat16, O>(),
        DataType::Float8e4m3 => version::<Float8E4M3, O>(),
        DataType::Float8e5m2 => version::<Float8E5M2, O>(),
    }
}

/// The widest version that the processor runs. All give the same bits: none contracts or reorders operations.
fn version<E: Element, O: Operation>() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return combine_avx2::<E, O>;
    }
    combine::<E, O>
}

/// [`combine`] compiled for 256-bit vectors.
///
/// # Safety
/// That of [`Kernel`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
unsafe fn combine_avx2<E: Element, O: Operation>(
    out: *mut u8,
    a: *const u8,
    b: *const u8,
    elems: usize,
    divisor: u32,
) {
    #[target_feature(enable = "avx2")]
    unsafe fn inner<E: Element, O: Operation>(
        out: *mut u8,
        a: *const u8,
        b: *const u8,
        elems: usize,
        divisor: u32,
    ) {
        // SAFETY: the caller's.
        unsafe { combine::<E, O>(out, a, b, elems, divisor) }
    }
    // SAFETY: `version` chose this one after detecting AVX2; the rest is the caller's.
    unsafe { inner::<E, O>(out, a, b, elems, divisor) }
}

/// # Safety
/// That of [`Kernel`].
#[inline(always)]
unsafe fn combine<E: Element, O: Operation>(
    out: *mut u8,
    a: *const u8,
    b: *const u8,
    elems: usize,
    divisor: u32,
) {
    let (out, a, b) = (out.cast::<E>(), a.cast::<E>(), b.cast::<E>());
    let whole = elems / LANES * LANES;
    let mut at = 0;
    while at < whole {
        // SAFETY: `at + LANES <= elems`; reads and writes are unaligned, and a block is read before it is written.
        unsafe {
            let x = a.add(at).cast::<[E; LANES]>().read_unaligned();
            let y = b.add(at).cast::<[E; LANES]>().read_unaligned();
            out.add(at)
                .cast::<[E; LANES]>()
                .write_unaligned(block::<E, O>(&x, &y, divisor));
        }
        at += LANES;
    }
    let rest = elems - whole;
    if rest > 0 {
        let (mut x, mut y) = ([E::default(); LANES], [E::default(); LANES]);
        // SAFETY: `rest` elements remain, fewer than the arrays hold; copied as bytes, so alignment does not matter.
        unsafe {
            let bytes = rest * size_of::<E>();
            a.add(whole)
                .cast::<u8>()
                .copy_to_nonoverlapping(x.as_mut_ptr().cast(), bytes);
            b.add(whole)
                .cast::<u8>()
                .copy_to_nonoverlapping(y.as_mut_ptr().cast(), bytes);
            let z = block::<E, O>(&x, &y, divisor);
            z.as_ptr()
                .cast::<u8>()
                .copy_to_nonoverlapping(out.add(whole).cast(), bytes);
        }
    }
}

#[inline(always)]
fn block<E: Element, O: Operation>(x: &[E; LANES], y: &[E; LANES], divisor: u32) -> [E; LANES] {
    // A plain loop: closures of library functions would not inherit `combine_avx2`'s vectors.
    let mut z = [E::default(); LANES];
    for lane in 0..LANES {
        z[lane] = E::narrow(O::apply::<E>(x[lane].widen(), y[lane].widen(), divisor));
    }
    z
}

/// A storage type and the type it is computed in. Any bits are a value of it.
trait Element: Copy + Default + 'static {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn mul(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The larger; a number if one of them is NaN; `b` if they are equal (0.0 and -0.0).
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The smaller, likewise.
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn div(a: Self::Wide, divisor: u32) -> Self::Wide;
}

macro_rules! integers {
    ($($type:ty => $division:ty),+) => {$(
        impl Element for $type {
            type Wide = Self;
            #[inline(always)]
            fn widen(self) -> Self { self }
            #[inline(always)]
            fn narrow(wide: Self) -> Self { wide }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self { a.wrapping_add(b) }
            #[inline(always)]
            fn mul(a: Self, b: Self) -> Self { a.wrapping_mul(b) }
            #[inline(always)]
            fn max(a: Self, b: Self) -> Self { if a > b { a } else { b } }
            #[inline(always)]
            fn min(a: Self, b: Self) -> Self { if a < b { a } else { b } }
            // In 64 bits: 200 ranks are no int8.
            #[inline(always)]
            fn div(a: Self, divisor: u32) -> Self { (<$division>::from(a) / <$division>::from(divisor)) as Self }
        }
    )+};
}
integers!(i8 => i64, u8 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);

macro_rules! floats {
    ($($type:ty as $wide:ty: $widen:expr, $narrow:expr, $divisor:expr;)+) => {$(
        impl Element for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide { $widen(self) }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self { $narrow(wide) }
            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide { a + b }
            #[inline(always)]
            fn mul(a: $wide, b: $wide) -> $wide { a * b }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide { if (a > b) | b.is_nan() { a } else { b } }
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide { if (a < b) | b.is_nan() { a } else { b } }
            #[inline(always)]
            fn div(a: $wide, divisor: u32) -> $wide { a / $divisor(divisor) }
        }
    )+};
}
floats! {
    f32 as f32: |x| x, |x| x, |n| n as f32;
    f64 as f64: |x| x, |x| x, f64::from;
    Half as f32: Half::to_f32, Half::from_f32, |n| n as f32;
    Bfloat16 as f32: Bfloat16::to_f32, Bfloat16::from_f32, |n| n as f32;
    Float8E4M3 as f32: Float8E4M3::to_f32, Float8E4M3::from_f32, |n| n as f32;
    Float8E5M2 as f32: Float8E5M2::to_f32, Float8E5M2::from_f32, |n| n as f32;
}

trait Operation: 'static {
    fn apply<E: Element>(a: E::Wide, b: E::Wide, divisor: u32) -> E::Wide;
}

macro_rules! operations {
    ($($name:ident: |$element:ident, $a:ident, $b:ident, $divisor:ident| $body:expr;)+) => {$(
        struct $name;
        impl Operation for $name {
            #[inline(always)]
            fn apply<$element: Element>($a: $element::Wide, $b: $element::Wide, $divisor: u32) -> $element::Wide {
                $body
            }
        }
    )+};
}
operations! {
    Sum: |E, a, b, _divisor| E::add(a, b);
    Prod: |E, a, b, _divisor| E::mul(a, b);
    Max: |E, a, b, _divisor| E::max(a, b);
    Min: |E, a, b, _divisor| E::min(a, b);
    Avg: |E, a, b, divisor| E::div(E::add(a, b), divisor);
}
