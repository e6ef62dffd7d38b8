//! Seeded random numbers, fresh seeds, and a hash: the same on every machine.

use std::time::{SystemTime, UNIX_EPOCH};

/// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence of `seed`.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in [0, 1).
    pub(crate) fn unit(&mut self) -> f32 {
        // 24 bits: every f32 of the result is exact.
        (self.bits() >> 40) as f32 / 16_777_216.0
    }

    /// A number below `bound`, which must not be 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The bias is below bound / 2^64.
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }
}

/// A seed that differs from run to run, of at most five digits.
#[must_use]
pub fn fresh_seed() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(1, |since| since.as_nanos() as u64 % 100_000)
}

/// The FNV-1a hash of bytes.
pub(crate) fn fnv1a(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_splitmix() {
        // First outputs for seed 1234567, from the reference implementation (Vigna, prng.di.unimi.it/splitmix64.c).
        let mut random = Random::new(1_234_567);
        assert_eq!(
            [random.bits(), random.bits(), random.bits()],
            [
                6_457_827_717_110_365_317,
                3_203_168_211_198_807_973,
                9_817_491_932_198_370_423
            ]
        );
    }

    #[test]
    fn numbers_stay_in_range() {
        let mut random = Random::new(1);
        for _ in 0..10_000 {
            assert!((0.0..1.0).contains(&random.unit()));
            assert!(random.below(7) < 7);
        }
    }
}
