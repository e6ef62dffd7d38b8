//! Elements as numbers, and what reductions of them may come to.
//!
//! Integers wrap, so their results are exact in any order. Floats are rounded at each hop: even elements hold numbers
//! whose every partial result is a number of the type, so that the result is exact in any order; odd ones hold any
//! numbers, and the result must lie within the bound that as many roundings allow.

use ringsight_kernels::minifloat::{Bfloat16, Float8E4M3, Float8E5M2, Half};
use ringsight_records::{DataType, ReduceOp};

use super::cases::noise;

pub fn is_float(data_type: DataType) -> bool {
    !matches!(
        data_type,
        DataType::Int8
            | DataType::Uint8
            | DataType::Int32
            | DataType::Uint32
            | DataType::Int64
            | DataType::Uint64
    )
}

/// Half the distance between neighbouring numbers of magnitude 1, and the smallest number.
fn precision(data_type: DataType) -> (f64, f64) {
    let (bits, smallest) = match data_type {
        DataType::Float16 => (11, -24),
        DataType::Bfloat16 => (8, -133),
        DataType::Float32 => (24, -149),
        DataType::Float64 => (53, -1074),
        DataType::Float8e4m3 => (4, -9),
        DataType::Float8e5m2 => (3, -16),
        other => panic!("{other} is no float"),
    };
    (2f64.powi(-bits), 2f64.powi(smallest))
}

/// The number of a float's bytes.
pub fn float_of(data_type: DataType, bytes: &[u8]) -> f64 {
    let u16s = || u16::from_le_bytes(bytes.try_into().unwrap());
    match data_type {
        DataType::Float16 => Half(u16s()).to_f32().into(),
        DataType::Bfloat16 => Bfloat16(u16s()).to_f32().into(),
        DataType::Float32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        DataType::Float64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        DataType::Float8e4m3 => Float8E4M3(bytes[0]).to_f32().into(),
        DataType::Float8e5m2 => Float8E5M2(bytes[0]).to_f32().into(),
        other => panic!("{other} is no float"),
    }
}

/// The nearest float's bytes, in the low ones.
pub fn float_bits(data_type: DataType, value: f64) -> u64 {
    let single = value as f32;
    match data_type {
        DataType::Float16 => Half::from_f32(single).0.into(),
        DataType::Bfloat16 => Bfloat16::from_f32(single).0.into(),
        DataType::Float32 => single.to_bits().into(),
        DataType::Float64 => value.to_bits(),
        DataType::Float8e4m3 => Float8E4M3::from_f32(single).0.into(),
        DataType::Float8e5m2 => Float8E5M2::from_f32(single).0.into(),
        other => panic!("{other} is no float"),
    }
}

/// The number of an integer's bytes.
fn integer_of(data_type: DataType, bytes: &[u8]) -> i128 {
    let mut wide = [0; 16];
    wide[..bytes.len()].copy_from_slice(bytes);
    let value = i128::from_le_bytes(wide);
    let bits = 8 * bytes.len();
    let signed = matches!(data_type, DataType::Int8 | DataType::Int32 | DataType::Int64);
    if signed && value >> (bits - 1) & 1 == 1 {
        value - (1 << bits)
    } else {
        value
    }
}

/// What a rank multiplies with in a PreMulSum, as an element's bits.
pub fn scalar_bits(data_type: DataType, seed: u64, rank: usize) -> u64 {
    let random = noise(seed, 0x5ca1_a200 + rank as u64);
    if is_float(data_type) {
        float_bits(data_type, [1.0, -1.0, 2.0, 0.5][random as usize % 4])
    } else {
        random
    }
}

/// What rank `rank` of `ranks` puts at `index` to be reduced, as an element's bits.
pub fn input_bits(
    (op, data_type): (ReduceOp, DataType),
    (rank, ranks): (usize, usize),
    seed: u64,
    index: usize,
) -> u64 {
    let random = noise(seed, (rank as u64) << 48 | index as u64);
    if !is_float(data_type) {
        return random;
    }
    // Of a rank's contribution: -1, 0 or 1, so that sums over eight ranks are numbers of every type.
    let unit = [-1.0, 0.0, 1.0][(random >> 40) as usize % 3];
    let any = (random >> 11) as f64 / (1u64 << 53) as f64;
    let exact = index.is_multiple_of(2);
    let value = match op {
        ReduceOp::Prod if exact => [1.0, 2.0, 0.5, -1.0][random as usize % 4],
        // Near enough to 1 for no product of eight to leave the normal numbers of a type.
        ReduceOp::Prod => 0.75 + 0.55 * any,
        // Zero has two signs, of which either is the larger.
        ReduceOp::Max | ReduceOp::Min => (any - 0.5) * 200.0 + 0.015_625,
        ReduceOp::Sum if exact => unit,
        ReduceOp::Avg if exact => unit * ranks as f64,
        ReduceOp::PreMulSum if exact => {
            let bytes = scalar_bits(data_type, seed, rank).to_le_bytes();
            unit / float_of(data_type, &bytes[..data_type.size()])
        }
        _ => (any - 0.5) * 4.0,
    };
    float_bits(data_type, value)
}

/// Whether `got` is the reduction of what [`input_bits`] gives for all ranks; says what it should be if not.
pub fn check_reduced(
    (op, data_type): (ReduceOp, DataType),
    ranks: usize,
    seed: u64,
    index: usize,
    got: &[u8],
) -> Result<(), String> {
    let size = data_type.size();
    let input = |rank| input_bits((op, data_type), (rank, ranks), seed, index).to_le_bytes();
    let scalar = |rank| scalar_bits(data_type, seed, rank).to_le_bytes();
    if !is_float(data_type) {
        let of = |bytes: [u8; 8]| integer_of(data_type, &bytes[..size]);
        // Products of 64-bit numbers are too much even for 128 bits: wrap at each step.
        let wrap = |value: i128| of((value as u64).to_le_bytes());
        let values = (0..ranks).map(|rank| of(input(rank)));
        let expected = match op {
            ReduceOp::Sum => wrap(values.sum()),
            ReduceOp::Prod => values.fold(1i128, |product, value| wrap(product.wrapping_mul(value))),
            ReduceOp::Max => values.max().unwrap(),
            ReduceOp::Min => values.min().unwrap(),
            ReduceOp::Avg if ranks == 1 => wrap(values.sum()),
            ReduceOp::Avg => wrap(values.sum()) / ranks as i128,
            ReduceOp::PreMulSum => values.enumerate().fold(0, |sum, (rank, value)| {
                wrap(sum + wrap(value.wrapping_mul(of(scalar(rank)))))
            }),
            ReduceOp::None => unreachable!("no reduction"),
        };
        let got = integer_of(data_type, got);
        return (got == expected)
            .then_some(())
            .ok_or_else(|| format!("{got} instead of {expected}"));
    }
    let of = |bytes: [u8; 8]| float_of(data_type, &bytes[..size]);
    let contributions: Vec<f64> = (0..ranks)
        .map(|rank| {
            of(input(rank))
                * match op {
                    ReduceOp::Avg => 1.0 / ranks as f64,
                    ReduceOp::PreMulSum => of(scalar(rank)),
                    _ => 1.0,
                }
        })
        .collect();
    let expected: f64 = match op {
        ReduceOp::Prod => contributions.iter().product(),
        ReduceOp::Max => contributions.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Min => contributions.iter().copied().fold(f64::INFINITY, f64::min),
        _ => contributions.iter().sum(),
    };
    let (half, smallest) = precision(data_type);
    let exact = index.is_multiple_of(2) || matches!(op, ReduceOp::Max | ReduceOp::Min) || ranks == 1;
    // Each hop rounds to the type once, and before that to the wide type a few times, as this reference does.
    let roundings = 2.0 * ranks as f64;
    let magnitude = match op {
        ReduceOp::Prod => 2.0 * expected.abs(),
        _ => contributions.iter().map(|value| value.abs()).sum(),
    };
    let allowed = if exact && !(ranks == 1 && op == ReduceOp::PreMulSum) {
        0.0
    } else {
        roundings * (half * magnitude + smallest)
    };
    let got = float_of(data_type, got);
    ((got - expected).abs() <= allowed)
        .then_some(())
        .ok_or_else(|| format!("{got} instead of {expected} ± {allowed}"))
}
