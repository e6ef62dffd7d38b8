//! Elementwise reductions: two inputs, one output, any of the three may be the same memory.
//!
//! Each call works on blocks of `LANES` elements held in local arrays, the last one padded: every element takes the
//! same instructions wherever it stands, results do not depend on alignment or length, and LLVM needs no alias checks
//! to use vectors. Narrow floats are widened to `f32` and rounded once per call.
//!
//! What a rank adds to a partial result, by reduction (`a` the partial result, `b` the rank's own element, all in the
//! wide type: `f32` for the floats of at most 32 bits, the element's own type otherwise):
//!
//! | reduction | first rank | others | last rank |
//! |---|---|---|---|
//! | sum, prod, max, min | `b` | `a op b` | `a op b` |
//! | premulsum with the rank's scalar `s` | `s * b` | `a + s * b` | `a + s * b` |
//! | avg of floats over `n` ranks | `b * (1/n)` | `a + b * (1/n)` | `a + b * (1/n)` |
//! | avg of integers over `n` ranks | `b` | `a + b` | `(a + b) / n`, towards zero |
//!
//! Products and sums are rounded to the wide type one after the other, never fused; the result is rounded to the
//! element's type once. Integers wrap. An average of floats is scaled before it is summed, as in NCCL, so that no
//! partial result overflows where the average does not; `1/n` is rounded to the wide type only.

use ringsight_records::{DataType, ReduceOp};

use crate::minifloat::{Bfloat16, Float8E4M3, Float8E5M2, Half};

/// Elements of a block.
const LANES: usize = 32;

/// Writes the combination of `a[i]`, a partial result, and `b[i]`, a contribution, to `out[i]` for `elems` elements; the
/// last argument is [`Reduction::argument`]'s.
///
/// # Safety
/// `out` must be writable, `a` and `b` readable for `elems` elements. Each of `a` and `b` is either the same address as
/// `out` or does not overlap it.
pub type Kernel = unsafe fn(out: *mut u8, a: *const u8, b: *const u8, elems: usize, argument: u64);

/// Writes the contribution of `b[i]`, to which nothing has been added yet, to `out[i]` for `elems` elements.
///
/// # Safety
/// As [`Kernel`], without `a`.
pub type First = unsafe fn(out: *mut u8, b: *const u8, elems: usize, argument: u64);

/// How an operation combines contributions: pairwise on the way, and with the last one.
#[derive(Clone, Copy, Debug)]
pub struct Reduction {
    /// Turns the first rank's elements into a partial result; `None` if they are one as they are.
    pub first: Option<First>,
    /// Combines contributions of some ranks.
    pub partial: Kernel,
    /// Combines with the last contribution: for an average of integers also divides by the number of ranks.
    pub complete: Kernel,
}

impl Reduction {
    /// The reduction of `op` on `data_type`; `None` for [`ReduceOp::None`].
    #[must_use]
    pub fn new(op: ReduceOp, data_type: DataType) -> Option<Self> {
        let alike = |kernel: Kernel| Self {
            first: None,
            partial: kernel,
            complete: kernel,
        };
        let scaled = || Self {
            first: Some(select_first(data_type)),
            ..alike(select::<MulSum>(data_type))
        };
        Some(match op {
            ReduceOp::Sum => alike(select::<Sum>(data_type)),
            ReduceOp::Prod => alike(select::<Prod>(data_type)),
            ReduceOp::Max => alike(select::<Max>(data_type)),
            ReduceOp::Min => alike(select::<Min>(data_type)),
            ReduceOp::PreMulSum => scaled(),
            ReduceOp::Avg => match division(data_type) {
                Some(complete) => Self {
                    complete,
                    ..alike(select::<Sum>(data_type))
                },
                None => scaled(),
            },
            ReduceOp::None => return None,
        })
    }

    /// The last argument of this reduction's kernels among `ranks` ranks; `scalar` is an element of `data_type`, in the
    /// low bytes, and used by [`ReduceOp::PreMulSum`] alone.
    #[must_use]
    pub fn argument(op: ReduceOp, data_type: DataType, ranks: u32, scalar: u64) -> u64 {
        let wide = |value: f32| u64::from(value.to_bits());
        match (op, data_type) {
            (ReduceOp::PreMulSum, DataType::Float16) => wide(Half(scalar as u16).to_f32()),
            (ReduceOp::PreMulSum, DataType::Bfloat16) => wide(Bfloat16(scalar as u16).to_f32()),
            (ReduceOp::PreMulSum, DataType::Float8e4m3) => wide(Float8E4M3(scalar as u8).to_f32()),
            (ReduceOp::PreMulSum, DataType::Float8e5m2) => wide(Float8E5M2(scalar as u8).to_f32()),
            (ReduceOp::PreMulSum, _) => scalar,
            (ReduceOp::Avg, _) if division(data_type).is_some() => u64::from(ranks),
            (ReduceOp::Avg, DataType::Float64) => (1.0 / f64::from(ranks)).to_bits(),
            (ReduceOp::Avg, _) => wide((1.0 / f64::from(ranks)) as f32),
            _ => 0,
        }
    }
}

/// The kernel that adds and divides; `None` for floats.
fn division(data_type: DataType) -> Option<Kernel> {
    Some(match data_type {
        DataType::Int8 => version::<i8, SumDiv>(),
        DataType::Uint8 => version::<u8, SumDiv>(),
        DataType::Int32 => version::<i32, SumDiv>(),
        DataType::Uint32 => version::<u32, SumDiv>(),
        DataType::Int64 => version::<i64, SumDiv>(),
        DataType::Uint64 => version::<u64, SumDiv>(),
        _ => return None,
    })
}

macro_rules! for_type {
    ($data_type:expr, $element:ident => $body:expr) => {
        for_type!($data_type, $element => $body;
            Int8 i8, Uint8 u8, Int32 i32, Uint32 u32, Int64 i64, Uint64 u64, Float16 Half, Float32 f32, Float64 f64,
            Bfloat16 Bfloat16, Float8e4m3 Float8E4M3, Float8e5m2 Float8E5M2)
    };
    ($data_type:expr, $element:ident => $body:expr; $($name:ident $type:ty),+) => {
        match $data_type {
            $(DataType::$name => {
                type $element = $type;
                $body
            })+
        }
    };
}

/// The kernel of an operation that every type has.
fn select<O: Universal>(data_type: DataType) -> Kernel {
    for_type!(data_type, Type => version::<Type, O>())
}

/// The kernel that multiplies.
fn select_first(data_type: DataType) -> First {
    for_type!(data_type, Type => version_first::<Type>())
}

/// The widest version that the processor runs. All give the same bits: none contracts or reorders operations.
fn version<E: Element, O: Operation<E>>() -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return combine_avx2::<E, O>;
    }
    combine::<E, O>
}

/// As [`version`].
fn version_first<E: Element>() -> First {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return scale_avx2::<E>;
    }
    scale::<E>
}

/// [`combine`] compiled for 256-bit vectors.
///
/// # Safety
/// That of [`Kernel`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
unsafe fn combine_avx2<E: Element, O: Operation<E>>(
    out: *mut u8,
    a: *const u8,
    b: *const u8,
    elems: usize,
    argument: u64,
) {
    #[target_feature(enable = "avx2")]
    unsafe fn inner<E: Element, O: Operation<E>>(
        out: *mut u8,
        a: *const u8,
        b: *const u8,
        elems: usize,
        argument: u64,
    ) {
        // SAFETY: the caller's.
        unsafe { combine::<E, O>(out, a, b, elems, argument) }
    }
    // SAFETY: `version` chose this one after detecting AVX2; the rest is the caller's.
    unsafe { inner::<E, O>(out, a, b, elems, argument) }
}

/// [`scale`] compiled for 256-bit vectors.
///
/// # Safety
/// That of [`First`], on a processor with AVX2.
#[cfg(target_arch = "x86_64")]
unsafe fn scale_avx2<E: Element>(out: *mut u8, b: *const u8, elems: usize, argument: u64) {
    #[target_feature(enable = "avx2")]
    unsafe fn inner<E: Element>(out: *mut u8, b: *const u8, elems: usize, argument: u64) {
        // SAFETY: the caller's.
        unsafe { scale::<E>(out, b, elems, argument) }
    }
    // SAFETY: `version_first` chose this one after detecting AVX2; the rest is the caller's.
    unsafe { inner::<E>(out, b, elems, argument) }
}

/// # Safety
/// That of [`Kernel`].
#[inline(always)]
unsafe fn combine<E: Element, O: Operation<E>>(
    out: *mut u8,
    a: *const u8,
    b: *const u8,
    elems: usize,
    argument: u64,
) {
    // A plain loop: closures of library functions would not inherit `combine_avx2`'s vectors.
    #[inline(always)]
    fn block<E: Element, O: Operation<E>>(x: &[E; LANES], y: &[E; LANES], argument: u64) -> [E; LANES] {
        let mut z = [E::default(); LANES];
        for lane in 0..LANES {
            z[lane] = E::narrow(O::apply(x[lane].widen(), y[lane].widen(), argument));
        }
        z
    }
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
                .write_unaligned(block::<E, O>(&x, &y, argument));
        }
        at += LANES;
    }
    let rest = elems - whole;
    if rest > 0 {
        // SAFETY: `rest` elements remain, fewer than a block has.
        unsafe {
            let (x, y) = (load(a.add(whole), rest), load(b.add(whole), rest));
            store(out.add(whole), &block::<E, O>(&x, &y, argument), rest);
        }
    }
}

/// # Safety
/// That of [`First`].
#[inline(always)]
unsafe fn scale<E: Element>(out: *mut u8, b: *const u8, elems: usize, argument: u64) {
    #[inline(always)]
    fn block<E: Element>(y: &[E; LANES], argument: u64) -> [E; LANES] {
        let mut z = [E::default(); LANES];
        for lane in 0..LANES {
            z[lane] = E::narrow(E::mul(E::from_bits(argument), y[lane].widen()));
        }
        z
    }
    let (out, b) = (out.cast::<E>(), b.cast::<E>());
    let whole = elems / LANES * LANES;
    let mut at = 0;
    while at < whole {
        // SAFETY: as in `combine`.
        unsafe {
            let y = b.add(at).cast::<[E; LANES]>().read_unaligned();
            out.add(at)
                .cast::<[E; LANES]>()
                .write_unaligned(block::<E>(&y, argument));
        }
        at += LANES;
    }
    let rest = elems - whole;
    if rest > 0 {
        // SAFETY: as in `combine`.
        unsafe {
            let y = load(b.add(whole), rest);
            store(out.add(whole), &block::<E>(&y, argument), rest);
        }
    }
}

/// Fewer elements than a block has, padded. Copied as bytes, so alignment does not matter.
///
/// # Safety
/// `rest` elements can be read, at most `LANES`.
#[inline(always)]
unsafe fn load<E: Element>(from: *const E, rest: usize) -> [E; LANES] {
    let mut block = [E::default(); LANES];
    // SAFETY: the caller's.
    unsafe {
        from.cast::<u8>()
            .copy_to_nonoverlapping(block.as_mut_ptr().cast(), rest * size_of::<E>());
    }
    block
}

/// The other way.
///
/// # Safety
/// `rest` elements can be written, at most `LANES`.
#[inline(always)]
unsafe fn store<E: Element>(to: *mut E, block: &[E; LANES], rest: usize) {
    // SAFETY: the caller's.
    unsafe {
        block
            .as_ptr()
            .cast::<u8>()
            .copy_to_nonoverlapping(to.cast(), rest * size_of::<E>());
    }
}

/// A storage type and the type it is computed in. Any bits are a value of it.
trait Element: Copy + Default + 'static {
    type Wide: Copy;
    fn widen(self) -> Self::Wide;
    fn narrow(wide: Self::Wide) -> Self;
    /// A kernel's argument as a value.
    fn from_bits(argument: u64) -> Self::Wide;
    fn add(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    fn mul(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The larger; a number if one of them is NaN; `b` if they are equal (0.0 and -0.0).
    fn max(a: Self::Wide, b: Self::Wide) -> Self::Wide;
    /// The smaller, likewise.
    fn min(a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

/// An integer.
trait Integer: Element {
    /// Rounds towards zero.
    fn div(a: Self::Wide, divisor: u64) -> Self::Wide;
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
            fn from_bits(argument: u64) -> Self { argument as Self }
            #[inline(always)]
            fn add(a: Self, b: Self) -> Self { a.wrapping_add(b) }
            #[inline(always)]
            fn mul(a: Self, b: Self) -> Self { a.wrapping_mul(b) }
            #[inline(always)]
            fn max(a: Self, b: Self) -> Self { if a > b { a } else { b } }
            #[inline(always)]
            fn min(a: Self, b: Self) -> Self { if a < b { a } else { b } }
        }
        impl Integer for $type {
            // In 64 bits: 200 ranks are no int8.
            #[inline(always)]
            fn div(a: Self, divisor: u64) -> Self { (<$division>::from(a) / divisor as $division) as Self }
        }
    )+};
}
integers!(i8 => i64, u8 => u64, i32 => i64, u32 => u64, i64 => i64, u64 => u64);

macro_rules! floats {
    ($($type:ty as $wide:ident: $widen:expr, $narrow:expr;)+) => {$(
        impl Element for $type {
            type Wide = $wide;
            #[inline(always)]
            fn widen(self) -> $wide { $widen(self) }
            #[inline(always)]
            fn narrow(wide: $wide) -> Self { $narrow(wide) }
            #[inline(always)]
            fn from_bits(argument: u64) -> $wide { $wide::from_bits(argument as _) }
            #[inline(always)]
            fn add(a: $wide, b: $wide) -> $wide { a + b }
            #[inline(always)]
            fn mul(a: $wide, b: $wide) -> $wide { a * b }
            #[inline(always)]
            fn max(a: $wide, b: $wide) -> $wide { if (a > b) | b.is_nan() { a } else { b } }
            #[inline(always)]
            fn min(a: $wide, b: $wide) -> $wide { if (a < b) | b.is_nan() { a } else { b } }
        }
    )+};
}
floats! {
    f32 as f32: |x| x, |x| x;
    f64 as f64: |x| x, |x| x;
    Half as f32: Half::to_f32, Half::from_f32;
    Bfloat16 as f32: Bfloat16::to_f32, Bfloat16::from_f32;
    Float8E4M3 as f32: Float8E4M3::to_f32, Float8E4M3::from_f32;
    Float8E5M2 as f32: Float8E5M2::to_f32, Float8E5M2::from_f32;
}

trait Operation<E: Element>: 'static {
    fn apply(a: E::Wide, b: E::Wide, argument: u64) -> E::Wide;
}

macro_rules! operations {
    ($($name:ident on $bound:ident: |$element:ident, $a:ident, $b:ident, $argument:ident| $body:expr;)+) => {$(
        struct $name;
        impl<$element: $bound> Operation<$element> for $name {
            #[inline(always)]
            fn apply($a: $element::Wide, $b: $element::Wide, $argument: u64) -> $element::Wide {
                $body
            }
        }
    )+};
}
operations! {
    Sum on Element: |E, a, b, _argument| E::add(a, b);
    Prod on Element: |E, a, b, _argument| E::mul(a, b);
    Max on Element: |E, a, b, _argument| E::max(a, b);
    Min on Element: |E, a, b, _argument| E::min(a, b);
    MulSum on Element: |E, a, b, scalar| E::add(a, E::mul(E::from_bits(scalar), b));
    SumDiv on Integer: |E, a, b, divisor| E::div(E::add(a, b), divisor);
}

/// An operation on every type.
trait Universal:
    Operation<i8>
    + Operation<u8>
    + Operation<i32>
    + Operation<u32>
    + Operation<i64>
    + Operation<u64>
    + Operation<Half>
    + Operation<f32>
    + Operation<f64>
    + Operation<Bfloat16>
    + Operation<Float8E4M3>
    + Operation<Float8E5M2>
{
}
impl Universal for Sum {}
impl Universal for Prod {}
impl Universal for Max {}
impl Universal for Min {}
impl Universal for MulSum {}
