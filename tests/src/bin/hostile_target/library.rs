//! Library files that are made, or changed, to harm their reader.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt as _,
    path::Path,
    thread,
};

use anyhow::Result;

use crate::{Act, map_library};

/// H8: the library's file is cut to nothing and made whole again all the time.
pub(crate) fn cut(library: &Path) -> Result<Act> {
    let own = Path::new("libnccl.so.2");
    let content = fs::read(library)?;
    fs::write(own, &content)?;
    map_library(own)?;
    let file = File::options().write(true).open(own)?;
    thread::spawn(move || {
        loop {
            let cut = file.set_len(0).and_then(|()| file.write_all_at(&content, 0));
            assert!(cut.is_ok(), "{cut:?}");
        }
    });
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// H11: files that take long to examine.
pub(crate) fn bombs(_library: &Path) -> Result<Act> {
    const MANY: u32 = 20_000;
    let long = vec![b'n'; 2 << 20];
    for (name, symbols, text, chain, sparse) in [
        // One name of 2 MB for all of them.
        ("libnccl-names.so", MANY, &long[..], false, false),
        // One chain of the hash table through all of them.
        ("libnccl-chain.so", 4_000_000, &b"n"[..], true, false),
        // A symbol's name in each place of a file of 4 GB.
        ("libnccl-sparse.so", 1_000_000, &b"n"[..], false, true),
    ] {
        let path = Path::new(name);
        fs::write(path, file(symbols, text, chain, sparse))?;
        if sparse {
            File::options().write(true).open(path)?.set_len(4 << 30)?;
        }
        map_library(path)?;
    }
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// An ELF file whose `symbols` functions have the name `text` each, or, if `sparse`, names all over the file. With one chain of a hash
/// table through all of them, or without a hash table.
fn file(symbols: u32, text: &[u8], chain: bool, sparse: bool) -> Vec<u8> {
    const HEADER: usize = 64;
    const FUNCTION: u8 = 2;
    let mut bytes = vec![0; HEADER];
    let mut sections: Vec<[u8; 64]> = Vec::new();
    let mut section = |bytes: &[u8], kind: u32, start: usize, link: u32| {
        let mut header = [0; 64];
        header[4..8].copy_from_slice(&kind.to_le_bytes());
        header[24..32].copy_from_slice(&(start as u64).to_le_bytes());
        header[32..40].copy_from_slice(&((bytes.len() - start) as u64).to_le_bytes());
        header[40..44].copy_from_slice(&link.to_le_bytes());
        header[56..64].copy_from_slice(&24u64.to_le_bytes());
        sections.push(header);
    };
    for index in 0..symbols {
        let name = if sparse { index.wrapping_mul(4096) } else { 0 };
        bytes.extend(name.to_le_bytes());
        bytes.extend([FUNCTION, 0, 1, 0]);
        bytes.extend([0x40; 16]);
    }
    section(&bytes, 11, HEADER, 1);
    let start = bytes.len();
    bytes.extend(text);
    bytes.push(0);
    section(&bytes, 3, start, 0);
    if sparse {
        // The names' section is as long as the file.
        sections[1][32..40].copy_from_slice(&(4u64 << 30).to_le_bytes());
        sections[1][24..32].fill(0);
    }
    if chain {
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        let start = bytes.len();
        // One bucket, symbols from 1 on, one word of the filter, which lets everything pass; then the chain without an end.
        for word in [1, 1, 1, 0, u32::MAX, u32::MAX, 1] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(2u32.to_le_bytes().repeat(symbols as usize));
        let mut header = [0; 64];
        header[4..8].copy_from_slice(&0x6fff_fff6u32.to_le_bytes());
        header[24..32].copy_from_slice(&(start as u64).to_le_bytes());
        header[32..40].copy_from_slice(&((bytes.len() - start) as u64).to_le_bytes());
        sections.push(header);
    }
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    let place = bytes.len() as u64;
    bytes.extend(sections.concat());
    // 64 bits, little-endian, version 1; a library for x86-64.
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    bytes[16..24].copy_from_slice(&[3, 0, 62, 0, 1, 0, 0, 0]);
    bytes[40..48].copy_from_slice(&place.to_le_bytes());
    bytes[52..54].copy_from_slice(&64u16.to_le_bytes());
    bytes[58..60].copy_from_slice(&64u16.to_le_bytes());
    bytes[60..62].copy_from_slice(&(sections.len() as u16).to_le_bytes());
    bytes
}
