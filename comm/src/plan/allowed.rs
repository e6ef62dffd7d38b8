//! The algorithms and protocols that the ranks' environments allow for each function.

use ringsight_records::{Algorithm, Function, Protocol};

use crate::op::DataPath;

/// Number of functions.
pub(super) const FUNCTIONS: usize = Function::ALL.len();

/// The algorithms and protocols that may be chosen, by function: one bit each, by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowed {
    pub(super) algorithms: [u8; FUNCTIONS],
    pub(super) protocols: [u8; FUNCTIONS],
}

/// All of them.
impl Default for Allowed {
    fn default() -> Self {
        Self {
            algorithms: [u8::MAX; FUNCTIONS],
            protocols: [u8::MAX; FUNCTIONS],
        }
    }
}

impl Allowed {
    /// Bytes of [`Allowed::to_bytes`].
    pub(crate) const BYTES: usize = 2 * FUNCTIONS;

    /// Whether a function may be done so.
    #[must_use]
    pub(crate) fn has(&self, function: Function, algorithm: Algorithm, path: DataPath) -> bool {
        let at = usize::from(function.code());
        self.algorithms[at] & 1 << algorithm.code() != 0
            && self.protocols[at] & 1 << path.protocol().code() != 0
    }

    /// What both allow.
    #[must_use]
    pub(crate) fn and(&self, other: &Self) -> Self {
        let both = |a: &[u8; FUNCTIONS], b: &[u8; FUNCTIONS]| std::array::from_fn(|at| a[at] & b[at]);
        Self {
            algorithms: both(&self.algorithms, &other.algorithms),
            protocols: both(&self.protocols, &other.protocols),
        }
    }

    /// As sent to the other ranks.
    #[must_use]
    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..FUNCTIONS].copy_from_slice(&self.algorithms);
        bytes[FUNCTIONS..].copy_from_slice(&self.protocols);
        bytes
    }

    /// What [`Allowed::to_bytes`] gave.
    #[must_use]
    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            algorithms: std::array::from_fn(|at| bytes[at]),
            protocols: std::array::from_fn(|at| bytes[FUNCTIONS + at]),
        }
    }
}

// The numbers have bits.
const _: () = {
    let mut at = 0;
    while at < Algorithm::ALL.len() {
        assert!((Algorithm::ALL[at] as u8) < 8);
        at += 1;
    }
    let mut at = 0;
    while at < Protocol::ALL.len() {
        assert!((Protocol::ALL[at] as u8) < 8);
        at += 1;
    }
    let mut at = 0;
    while at < FUNCTIONS {
        assert!(Function::ALL[at] as usize == at);
        at += 1;
    }
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_leave_what_all_of_them_leave() {
        let of = |algorithms, protocols| Allowed {
            algorithms: [algorithms; FUNCTIONS],
            protocols: [protocols; FUNCTIONS],
        };
        let both = of(0b0110, u8::MAX).and(&of(0b0011, 0b100));
        assert_eq!(both, of(0b0010, 0b100));
        assert_eq!(Allowed::from_bytes(&both.to_bytes()), both);
        assert_eq!(Allowed::default().and(&both), both);
    }
}
