//! Reductions against a plain reference: every type, every reduction, odd lengths, unaligned and in place. The rules are
//! those of the table in `ringsight_kernels::reduce`.

use ringsight_kernels::{
    minifloat::{Bfloat16, Float8E4M3, Float8E5M2, Half},
    reduce::Reduction,
};
use ringsight_records::{DataType, ReduceOp};

/// Pseudo-random bytes (splitmix64), the same on every run.
fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        out.extend_from_slice(&(z ^ z >> 31).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Ranks of an average.
const RANKS: u32 = 7;

/// An element whose bytes are all this one is an unremarkable number of every type; used as the scalar.
const SCALAR: u64 = 0x3333_3333_3333_3333;

macro_rules! int_reference {
    ($type:ty, $op:expr, $a:expr, $b:expr) => {{
        let a = $a.map(|a| <$type>::from_le_bytes(a.try_into().unwrap()));
        let b = <$type>::from_le_bytes($b.try_into().unwrap());
        let b = if $op == ReduceOp::PreMulSum {
            b.wrapping_mul(SCALAR as $type)
        } else {
            b
        };
        let value = match (a, $op) {
            (None, _) => b,
            (Some(a), ReduceOp::Sum | ReduceOp::PreMulSum) => a.wrapping_add(b),
            (Some(a), ReduceOp::Prod) => a.wrapping_mul(b),
            (Some(a), ReduceOp::Max) => a.max(b),
            (Some(a), ReduceOp::Min) => a.min(b),
            (Some(a), ReduceOp::Avg) => (i128::from(a.wrapping_add(b)) / i128::from(RANKS)) as $type,
            _ => unreachable!(),
        };
        value.to_le_bytes().to_vec()
    }};
}

fn float<F>(op: ReduceOp, a: Option<F>, b: F, factor: F) -> F
where
    F: Copy + PartialOrd + std::ops::Add<Output = F> + std::ops::Mul<Output = F>,
{
    let nan = |x: F| x.partial_cmp(&x).is_none();
    let scales = matches!(op, ReduceOp::Avg | ReduceOp::PreMulSum);
    let b = if scales { b * factor } else { b };
    let Some(a) = a else { return b };
    match op {
        ReduceOp::Prod => a * b,
        ReduceOp::Max if nan(b) || a > b => a,
        ReduceOp::Min if nan(b) || a < b => a,
        ReduceOp::Max | ReduceOp::Min => b,
        _ => a + b,
    }
}

/// One element, the slow way; without `a`, what the first rank makes of `b`.
fn reference(data_type: DataType, op: ReduceOp, a: Option<&[u8]>, b: &[u8]) -> Vec<u8> {
    if a.is_none() && !matches!(op, ReduceOp::Avg | ReduceOp::PreMulSum) {
        return b.to_vec();
    }
    let scalar = &SCALAR.to_le_bytes()[..data_type.size()];
    macro_rules! narrow {
        ($of:expr, $into:expr) => {{
            let factor = if op == ReduceOp::Avg {
                1.0 / RANKS as f32
            } else {
                $of(scalar)
            };
            $into(float(op, a.map($of), $of(b), factor))
        }};
    }
    let u16s = |x: &[u8]| u16::from_le_bytes(x.try_into().unwrap());
    match data_type {
        DataType::Int8 => int_reference!(i8, op, a, b),
        DataType::Uint8 => int_reference!(u8, op, a, b),
        DataType::Int32 => int_reference!(i32, op, a, b),
        DataType::Uint32 => int_reference!(u32, op, a, b),
        DataType::Int64 => int_reference!(i64, op, a, b),
        DataType::Uint64 => int_reference!(u64, op, a, b),
        DataType::Float32 => {
            let of = |x: &[u8]| f32::from_le_bytes(x.try_into().unwrap());
            narrow!(of, |x: f32| x.to_le_bytes().to_vec())
        }
        DataType::Float64 => {
            let of = |x: &[u8]| f64::from_le_bytes(x.try_into().unwrap());
            let factor = if op == ReduceOp::Avg {
                1.0 / f64::from(RANKS)
            } else {
                of(scalar)
            };
            float(op, a.map(of), of(b), factor).to_le_bytes().to_vec()
        }
        DataType::Float16 => narrow!(|x: &[u8]| Half(u16s(x)).to_f32(), |x| Half::from_f32(x)
            .0
            .to_le_bytes()
            .to_vec()),
        DataType::Bfloat16 => narrow!(|x: &[u8]| Bfloat16(u16s(x)).to_f32(), |x| Bfloat16::from_f32(x)
            .0
            .to_le_bytes()
            .to_vec()),
        DataType::Float8e4m3 => {
            narrow!(|x: &[u8]| Float8E4M3(x[0]).to_f32(), |x| vec![
                Float8E4M3::from_f32(x).0
            ])
        }
        DataType::Float8e5m2 => {
            narrow!(|x: &[u8]| Float8E5M2(x[0]).to_f32(), |x| vec![
                Float8E5M2::from_f32(x).0
            ])
        }
    }
}

fn is_nan(data_type: DataType, bytes: &[u8]) -> bool {
    match data_type {
        DataType::Float16 => Half(u16::from_le_bytes(bytes.try_into().unwrap()))
            .to_f32()
            .is_nan(),
        DataType::Bfloat16 => Bfloat16(u16::from_le_bytes(bytes.try_into().unwrap()))
            .to_f32()
            .is_nan(),
        DataType::Float32 => f32::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float64 => f64::from_le_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Float8e4m3 => Float8E4M3(bytes[0]).to_f32().is_nan(),
        DataType::Float8e5m2 => Float8E5M2(bytes[0]).to_f32().is_nan(),
        _ => false,
    }
}

const OPS: [ReduceOp; 6] = [
    ReduceOp::PreMulSum,
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

#[track_caller]
fn assert_same(data_type: DataType, op: ReduceOp, got: &[u8], want: &[u8], place: &str) {
    let both_nan = is_nan(data_type, want) && is_nan(data_type, got);
    assert!(
        got == want || both_nan,
        "{data_type} {op} {place}: {got:?} {want:?}"
    );
}

#[test]
fn every_type_and_reduction() {
    for &data_type in DataType::ALL {
        let size = data_type.size();
        for op in OPS {
            let reduction = Reduction::new(op, data_type).unwrap();
            let argument = Reduction::argument(op, data_type, RANKS, SCALAR);
            for elems in [0, 1, 31, 32, 33, 1000] {
                // An odd offset: user buffers need no alignment.
                let a = noise(1 + elems as u64, elems * size + 1);
                let b = noise(99 + elems as u64, elems * size + 1);
                let mut out = vec![0xaa; elems * size + 2];
                let mut first = out.clone();
                // SAFETY: separate buffers of `elems` elements after one byte.
                unsafe {
                    let (to, x, y) = (out.as_mut_ptr().add(1), a.as_ptr().add(1), b.as_ptr().add(1));
                    (reduction.complete)(to, x, y, elems, argument);
                    let to = first.as_mut_ptr().add(1);
                    match reduction.first {
                        Some(kernel) => kernel(to, y, elems, argument),
                        None => to.copy_from_nonoverlapping(y, elems * size),
                    }
                }
                for out in [&out, &first] {
                    let ends = (out[0], out[elems * size + 1]);
                    assert_eq!(ends, (0xaa, 0xaa), "{data_type} {op} wrote outside");
                }
                for i in 0..elems {
                    let at = 1 + i * size..1 + (i + 1) * size;
                    let place = format!("element {i} of {elems}");
                    let want = reference(data_type, op, Some(&a[at.clone()]), &b[at.clone()]);
                    assert_same(data_type, op, &out[at.clone()], &want, &place);
                    let want = reference(data_type, op, None, &b[at.clone()]);
                    assert_same(data_type, op, &first[at], &want, &place);
                }
            }
        }
    }
}

/// The largest finite numbers: their average is in range, their sum is not.
#[test]
fn averages_of_narrow_floats_do_not_overflow() {
    for (data_type, largest) in [
        (DataType::Float16, vec![0xff, 0x7b]),
        (DataType::Float8e4m3, vec![0x7e]),
        (DataType::Float8e5m2, vec![0x7b]),
        (DataType::Float32, f32::MAX.to_le_bytes().to_vec()),
        (DataType::Float64, f64::MAX.to_le_bytes().to_vec()),
    ] {
        let reduction = Reduction::new(ReduceOp::Avg, data_type).unwrap();
        let argument = Reduction::argument(ReduceOp::Avg, data_type, 4, 0);
        let mut sum = largest.clone();
        let at = sum.as_mut_ptr();
        // SAFETY: one element each.
        unsafe {
            reduction.first.unwrap()(at, at, 1, argument);
            for kernel in [reduction.partial, reduction.partial, reduction.complete] {
                kernel(at, at, largest.as_ptr(), 1, argument);
            }
        }
        assert_eq!(sum, largest, "{data_type}");
    }
}

#[test]
fn in_place_gives_the_same_bits() {
    for &data_type in DataType::ALL {
        let (size, elems) = (data_type.size(), 777);
        let (a, b) = (noise(5, elems * size), noise(6, elems * size));
        for op in OPS {
            let kernel = Reduction::new(op, data_type).unwrap().partial;
            let (mut apart, mut on_a, mut on_b) = (vec![0; elems * size], a.clone(), b.clone());
            // SAFETY: buffers of `elems` elements; the output is one of the inputs or apart from them.
            unsafe {
                kernel(apart.as_mut_ptr(), a.as_ptr(), b.as_ptr(), elems, SCALAR >> 32);
                let alias = on_a.as_mut_ptr();
                kernel(alias, alias, b.as_ptr(), elems, SCALAR >> 32);
                let alias = on_b.as_mut_ptr();
                kernel(alias, a.as_ptr(), alias, elems, SCALAR >> 32);
            }
            assert!(apart == on_a && apart == on_b, "{data_type} {op}");
        }
    }
}

#[test]
fn signed_zeros_do_not_depend_on_position() {
    let kernel = Reduction::new(ReduceOp::Max, DataType::Float32).unwrap().partial;
    let (a, b) = (vec![0.0_f32; 45], vec![-0.0_f32; 45]);
    let mut out = vec![1.0_f32; 45];
    // SAFETY: 45 elements each.
    unsafe {
        kernel(
            out.as_mut_ptr().cast(),
            a.as_ptr().cast(),
            b.as_ptr().cast(),
            45,
            1,
        );
    };
    assert!(out.iter().all(|x| x.to_bits() == (-0.0_f32).to_bits()));
}

#[test]
fn what_is_no_reduction_has_no_kernel() {
    assert!(Reduction::new(ReduceOp::None, DataType::Float32).is_none());
}
