//! Which version of NCCL's interface a library file is of, without running anything of it.

use memchr::memmem;

use crate::{
    elf::{ElfError, Image, Source},
    limits::{CONSTANTS_BYTES, Limit},
};

/// What every release of NCCL has among its constants, followed by the version: it prints this line on `NCCL_DEBUG=VERSION`.
const BANNER: &[u8] = b"NCCL version ";
/// Bytes of the longest version, two digits in each of three parts, and of what ends it.
const VERSION_BYTES: usize = 9;

/// `ncclGetVersion`'s number, 0 if the file does not tell.
pub(crate) fn of<S: Source + ?Sized>(image: &mut Image<'_, S>) -> Result<u32, ElfError> {
    if let Some(version) = image.code("ncclGetVersion", 256)?.as_deref().and_then(stored) {
        return Ok(version);
    }
    // NCCL has some megabytes of constants, a framework that it is linked into many more.
    let limit = (CONSTANTS_BYTES, Limit::Constants);
    let named = image.search_section(".rodata", limit, BANNER.len() + VERSION_BYTES, named)?;
    Ok(named.unwrap_or(0))
}

/// The constant that `ncclGetVersion` stores (`mov dword ptr [rdi], imm32`, or through `rbx`).
fn stored(code: &[u8]) -> Option<u32> {
    code.windows(6)
        .filter(|window| window.starts_with(&[0xc7, 0x07]) || window.starts_with(&[0xc7, 0x03]))
        .map(|window| u32::from_le_bytes([window[2], window[3], window[4], window[5]]))
        // 2.0.0 … 9.99.99, in either of the two schemes of `number`.
        .find(|version| (2000..100_000).contains(version))
}

/// The version that stands in a piece of the constants. A banner at its end that is cut stands whole in the next piece.
fn named(constants: &[u8]) -> Option<u32> {
    memmem::find_iter(constants, BANNER).find_map(|at| {
        let text = &constants[at + BANNER.len()..];
        let is_end = |byte: &u8| !byte.is_ascii_digit() && *byte != b'.';
        number(text).filter(|_| text.iter().take(VERSION_BYTES).any(is_end))
    })
}

/// The number of a version that `text` begins with, e.g. `2.28.9+cuda13.0`; `None` if it does not begin with one.
fn number(text: &[u8]) -> Option<u32> {
    let mut rest = text;
    let mut parts = [0; 3];
    for (index, part) in parts.iter_mut().enumerate() {
        if index > 0 {
            rest = rest.strip_prefix(b".")?;
        }
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        // Two digits have room in the number.
        *part = match digits {
            1 | 2 => rest[..digits]
                .iter()
                .fold(0, |n, digit| n * 10 + u32::from(digit - b'0')),
            _ => return None,
        };
        rest = &rest[digits..];
    }
    let [major, minor, patch] = parts;
    // NCCL's own change of scheme came with 2.9.
    Some(if (major, minor) < (2, 9) {
        major * 1000 + minor * 100 + patch
    } else {
        major * 10_000 + minor * 100 + patch
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_banner_with_a_version_counts() {
        let constants =
            b"\0NCCL version \0NCCL version %d.%d\0NCCL version 2.28.9+cuda13.0\0NCCL version 2.27.3\0";
        assert_eq!(named(constants), Some(22_809));
        assert_eq!(named(b"NCCL version 2.28"), None);
        assert_eq!(
            named(b"NCCL version 2.28.1"),
            None,
            "it may go on in the next piece"
        );
        assert_eq!(named(b""), None);
    }

    #[test]
    fn versions_are_numbered_as_nccl_does() {
        for (text, expected) in [
            ("2.28.9", Some(22_809)),
            ("2.9.6+cuda11.0", Some(20_906)),
            ("2.7.8", Some(2_708)),
            ("2..8", None),
            ("2.128.9", None),
            ("v2.28.9", None),
            ("2.28.", None),
        ] {
            assert_eq!(number(text.as_bytes()), expected, "{text}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_constants_are_survived(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..64)) {
            let mut constants = BANNER.to_vec();
            constants.extend(bytes);
            let _ = named(&constants);
        }
    }
}
