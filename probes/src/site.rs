//! Planning probe sites: where in a function to put the probe, and what a hit will cost there.

use crate::{
    elf::Symbol,
    signature,
    target::{Flavour, Library},
};
use ringsight_records::{PROBE_NOP5_OFFSET, PROBE_SYMBOLS};

/// The 5-byte nop that kernels from 6.18 on turn into a call of the uprobe trampoline.
const NOP5: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];

/// How the kernel gets past the probed instruction: the largest factor in what a hit costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SiteKind {
    /// 5-byte nop on a kernel that replaces it by a call: no trap.
    Nop5,
    /// 1-byte nop or `push`: a trap, the instruction emulated.
    Emulated,
    /// Anything else: a trap, the instruction executed out of line with a second trap.
    SingleStepped,
}

/// Nanoseconds of CPU time that one call of a probed function took: the fastest of 45 runs of `cargo xtask bench probe` on a two-core
/// virtual machine with Linux 6.18 (measurements/probe-costs.md, "Hits of probes"). Where a trap does not leave the virtual machine,
/// all but the first are several times less.
mod measured {
    /// 5-byte nop, entry alone.
    pub(super) const NOP5: u32 = 340;
    /// 1-byte nop, entry alone.
    pub(super) const NOP1: u32 = 670;
    /// `push`, entry and return.
    pub(super) const PUSH_AND_RETURN: u32 = 1340;
    /// `lea`, entry and return.
    pub(super) const LEA_AND_RETURN: u32 = 20_970;
}

impl SiteKind {
    /// Nanoseconds of CPU time that a hit takes with its record.
    #[must_use]
    pub const fn predicted_ns(self) -> u32 {
        match self {
            Self::Nop5 => measured::NOP5,
            Self::Emulated => measured::NOP1,
            // Measured with a return probe only.
            Self::SingleStepped => measured::LEA_AND_RETURN - self.predicted_return_ns(),
        }
    }

    /// Nanoseconds of CPU time that a return probe adds to a hit: a trap of its own, whatever the site.
    #[must_use]
    pub const fn predicted_return_ns(self) -> u32 {
        match self {
            Self::Nop5 | Self::Emulated | Self::SingleStepped => measured::PUSH_AND_RETURN - measured::NOP1,
        }
    }

    /// Name in listings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nop5 => "nop5",
            Self::Emulated => "emulated",
            Self::SingleStepped => "single-stepped",
        }
    }
}

/// One place to attach to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Function.
    pub symbol: String,
    /// Offset in the file where the probe goes.
    pub offset: u64,
    /// Bytes past the function's first instruction.
    pub within: u64,
    /// What is there.
    pub kind: SiteKind,
    /// Whether the return is probed too.
    pub returns: bool,
    /// Number of the site in attach cookies.
    pub(crate) cookie: u64,
}

impl Site {
    /// Nanoseconds that a hit is expected to take; see [`SiteKind::predicted_ns`].
    #[must_use]
    pub const fn predicted_ns(&self) -> u32 {
        self.kind.predicted_ns()
            + if self.returns {
                self.kind.predicted_return_ns()
            } else {
                0
            }
    }
}

/// Where to attach in a library, on a kernel of this version.
#[must_use]
pub fn plan(library: &Library, kernel: (u32, u32)) -> Vec<Site> {
    library
        .symbols
        .iter()
        .filter_map(|symbol| site(symbol, library.flavour, kernel))
        .collect()
}

fn site(symbol: &Symbol, flavour: Flavour, kernel: (u32, u32)) -> Option<Site> {
    let cookie = match flavour {
        Flavour::Instrumented => PROBE_SYMBOLS.iter().position(|name| *name == symbol.name)? as u64,
        Flavour::Stock => signature::cookie(&symbol.name)?,
    };
    let optimised = kernel >= (6, 18) && cfg!(target_arch = "x86_64");
    let nop5_at = PROBE_NOP5_OFFSET as usize;
    let within = if flavour == Flavour::Instrumented && optimised && symbol.head[nop5_at..].starts_with(&NOP5)
    {
        PROBE_NOP5_OFFSET
    } else {
        0
    };
    Some(Site {
        symbol: symbol.name.clone(),
        offset: symbol.offset + within,
        within,
        kind: classify(&symbol.head[within as usize..], optimised),
        returns: flavour == Flavour::Stock,
        cookie,
    })
}

/// What kind of site the instruction at the beginning of `code` makes.
#[must_use]
pub fn classify(code: &[u8], optimised: bool) -> SiteKind {
    if optimised && code.starts_with(&NOP5) {
        return SiteKind::Nop5;
    }
    match code {
        // `nop`; `push` of rax … rdi, and with REX.B of r8 … r15.
        [0x90 | 0x50..=0x57, ..] | [0x41, 0x50..=0x57, ..] => SiteKind::Emulated,
        _ => SiteKind::SingleStepped,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(name: &str, code: &[u8]) -> Symbol {
        let mut head = [0; crate::elf::HEAD_BYTES];
        head[..code.len()].copy_from_slice(code);
        Symbol {
            name: name.into(),
            offset: 0x1000,
            head,
        }
    }

    const PROBE: [u8; 7] = [0x90, 0x0f, 0x1f, 0x44, 0x00, 0x00, 0xc3];

    #[test]
    fn a_probe_function_is_probed_at_its_5_byte_nop_where_that_pays() {
        let symbol = symbol("ringsight_probe_event", &PROBE);
        let new = site(&symbol, Flavour::Instrumented, (6, 18)).unwrap();
        assert_eq!(
            (new.offset, new.kind, new.cookie, new.returns),
            (0x1001, SiteKind::Nop5, 2, false)
        );
        // Before 6.18 a 5-byte nop is single-stepped: the 1-byte nop in front of it is ten times cheaper.
        let old = site(&symbol, Flavour::Instrumented, (6, 12)).unwrap();
        assert_eq!((old.offset, old.kind), (0x1000, SiteKind::Emulated));
        assert!(new.predicted_ns() < old.predicted_ns());
        assert_eq!(
            (new.predicted_ns(), old.predicted_ns()),
            (340, 670),
            "without a return"
        );
    }

    #[test]
    fn instructions_are_classified() {
        for (code, expected) in [
            (&[0x90][..], SiteKind::Emulated),
            (&[0x55], SiteKind::Emulated),
            (&[0x41, 0x57], SiteKind::Emulated),
            (&[0x41, 0x89], SiteKind::SingleStepped),
            (&[0xf3, 0x0f, 0x1e, 0xfa], SiteKind::SingleStepped), // endbr64
            (&[0x48, 0x8d, 0x04, 0x37], SiteKind::SingleStepped), // lea
            (&[], SiteKind::SingleStepped),
        ] {
            assert_eq!(classify(code, true), expected, "{code:x?}");
        }
        assert_eq!(classify(&NOP5, true), SiteKind::Nop5);
        assert_eq!(classify(&NOP5, false), SiteKind::SingleStepped);
    }
}
