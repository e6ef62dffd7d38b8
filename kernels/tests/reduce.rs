//! Reductions against a plain reference: every type, every reduction, odd lengths, unaligned and in place.

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

macro_rules! int_reference {
    ($type:ty, $op:expr, $a:expr, $b:expr, $ranks:expr) => {{
        let a = <$type>::from_le_bytes($a.try_into().unwrap());
        let b = <$type>::from_le_bytes($b.try_into().unwrap());
        let value = match $op {
            ReduceOp::Sum => a.wrapping_add(b),
            ReduceOp::Prod => a.wrapping_mul(b),
            ReduceOp::Max => a.max(b),
            ReduceOp::Min => a.min(b),
            ReduceOp::Avg => (i128::from(a.wrapping_add(b)) / i128::from($ranks)) as $type,
            _ => unreachable!(),
        };
        value.to_le_bytes().to_vec()
    }};
}

fn float<F>(op: ReduceOp, a: F, b: F, ranks: F) -> F
where
    F: Copy + PartialOrd + std::ops::Add<Output = F> + std::ops::Mul<Output = F> + std::ops::Div<Output = F>,
{
    let nan = |x: F| x.partial_cmp(&x).is_none();
    match op {
        ReduceOp::Sum => a + b,
        ReduceOp::Prod => a * b,
        ReduceOp::Max if nan(b) || a > b => a,
        ReduceOp::Min if nan(b) || a < b => a,
        ReduceOp::Max | ReduceOp::Min => b,
        ReduceOp::Avg => (a + b) / ranks,
        _ => unreachable!(),
    }
}

/// One element, the slow way.
fn reference(data_type: DataType, op: ReduceOp, a: &[u8], b: &[u8], ranks: u32) -> Vec<u8> {
    let u16s = |x: &[u8]| u16::from_le_bytes(x.try_into().unwrap());
    let narrow = |a: f32, b: f32| float(op, a, b, ranks as f32);
    match data_type {
        DataType::Int8 => int_reference!(i8, op, a, b, ranks),
        DataType::Uint8 => int_reference!(u8, op, a, b, ranks),
        DataType::Int32 => int_reference!(i32, op, a, b, ranks),
        DataType::Uint32 => int_reference!(u32, op, a, b, ranks),
        DataType::Int64 => int_reference!(i64, op, a, b, ranks),
        DataType::Uint64 => int_reference!(u64, op, a, b, ranks),
        DataType::Float32 => {
            let f = |x: &[u8]| f32::from_le_bytes(x.try_into().unwrap());
            narrow(f(a), f(b)).to_le_bytes().to_vec()
        }
        DataType::Float64 => {
            let f = |x: &[u8]| f64::from_le_bytes(x.try_into().unwrap());
            float(op, f(a), f(b), f64::from(ranks)).to_le_bytes().to_vec()
        }
        DataType::Float16 => Half::from_f32(narrow(Half(u16s(a)).to_f32(), Half(u16s(b)).to_f32()))
            .0
            .to_le_bytes()
            .to_vec(),
        DataType::Bfloat16 => {
            Bfloat16::from_f32(narrow(Bfloat16(u16s(a)).to_f32(), Bfloat16(u16s(b)).to_f32()))
                .0
                .to_le_bytes()
                .to_vec()
        }
        DataType::Float8e4m3 => {
            vec![Float8E4M3::from_f32(narrow(Float8E4M3(a[0]).to_f32(), Float8E4M3(b[0]).to_f32())).0]
        }
        DataType::Float8e5m2 => {
            vec![Float8E5M2::from_f32(narrow(Float8E5M2(a[0]).to_f32(), Float8E5M2(b[0]).to_f32())).0]
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

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Prod,
    ReduceOp::Max,
    ReduceOp::Min,
    ReduceOp::Avg,
];

#[test]
fn every_type_and_reduction() {
    for &data_type in DataType::ALL {
        let size = data_type.size();
        for op in OPS {
            let reduction = Reduction::new(op, data_type).unwrap();
            for elems in [0, 1, 31, 32, 33, 1000] {
                // An odd offset: user buffers need no alignment.
                let a = noise(1 + elems as u64, elems * size + 1);
                let b = noise(99 + elems as u64, elems * size + 1);
                let mut out = vec![0xaa; elems * size + 2];
                // SAFETY: three separate buffers of `elems` elements after one byte.
                unsafe {
                    (reduction.complete)(
                        out.as_mut_ptr().add(1),
                        a.as_ptr().add(1),
                        b.as_ptr().add(1),
                        elems,
                        7,
                    );
                }
                assert_eq!(
                    (out[0], out[elems * size + 1]),
                    (0xaa, 0xaa),
                    "{data_type} {op} wrote outside"
                );
                for i in 0..elems {
                    let at = 1 + i * size..1 + (i + 1) * size;
                    let want = reference(data_type, op, &a[at.clone()], &b[at.clone()], 7);
                    let got = &out[at];
                    let both_nan = is_nan(data_type, &want) && is_nan(data_type, got);
                    assert!(
                        got == want || both_nan,
                        "{data_type} {op} element {i} of {elems}: {got:?} {want:?}"
                    );
                }
            }
        }
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
                kernel(apart.as_mut_ptr(), a.as_ptr(), b.as_ptr(), elems, 1);
                let alias = on_a.as_mut_ptr();
                kernel(alias, alias, b.as_ptr(), elems, 1);
                let alias = on_b.as_mut_ptr();
                kernel(alias, a.as_ptr(), alias, elems, 1);
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
    assert!(Reduction::new(ReduceOp::PreMulSum, DataType::Float32).is_none());
}
