//! Hashes that are the same on every rank.

/// FNV-1a, 64 bits: shows damage and tells values apart. It is no defence against intent.
#[must_use]
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
