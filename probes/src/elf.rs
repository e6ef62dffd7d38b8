//! Reading symbols out of a library file: where a function lies in the file, and how it begins.

use std::{fs::File, io, os::fd::AsRawFd as _, slice};

use object::{
    LittleEndian, Object as _, ObjectSection as _, ObjectSymbol as _,
    elf::FileHeader64,
    read::elf::{ElfFile64, FileHeader as _, ProgramHeader as _, SectionHeader as _, Sym as _},
};

/// Bytes of a function's beginning that are kept: what is needed to tell what kind of site it is.
pub const HEAD_BYTES: usize = 16;

/// A function in a library file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// Name.
    pub name: String,
    /// Offset of its first instruction in the file: what a uprobe is attached to.
    pub offset: u64,
    /// Its first bytes, zeros beyond the end of the file.
    pub head: [u8; HEAD_BYTES],
}

/// A library file, mapped for reading.
pub(crate) struct Image {
    base: *mut libc::c_void,
    bytes: usize,
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `map`; no slice of it outlives `self`.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

impl Image {
    /// Maps the file; `None` if it is not a 64-bit little-endian ELF file.
    pub(crate) fn map(file: &File) -> io::Result<Option<Self>> {
        let Ok(bytes) = usize::try_from(file.metadata()?.len()) else {
            return Ok(None);
        };
        if bytes < 64 {
            return Ok(None);
        }
        // Shared, so that it shows the file: a uprobe's patch is a private copy of a page in every private mapping of the
        // file, this one included, and code that another reader has patched would be taken for another kind of site.
        // SAFETY: a fresh read-only mapping of a file that we hold open.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let image = Self { base, bytes };
        Ok(image.data().starts_with(b"\x7fELF\x02\x01").then_some(image))
    }

    pub(crate) fn data(&self) -> &[u8] {
        // SAFETY: `bytes` bytes of the file itself, mapped until `self` is dropped. Only a write to the file changes them (no
        // uprobe does, the mapping being shared), and who writes to a library in use breaks the very process that we
        // look at; libraries are replaced by new files.
        unsafe { slice::from_raw_parts(self.base.cast(), self.bytes) }
    }

    fn elf(&self) -> Option<ElfFile64<'_, LittleEndian>> {
        ElfFile64::parse(self.data()).ok()
    }

    /// Those of `names` that the file defines as functions, in the order of `names`.
    pub(crate) fn find(&self, names: &[&str]) -> Vec<Symbol> {
        let Some(elf) = self.elf() else { return Vec::new() };
        let mut found: Vec<Option<u64>> = exported(self.data(), names).unwrap_or_default();
        found.resize(names.len(), None);
        if found.iter().all(Option::is_none) && is_program(&elf) {
            // A program that has the library linked in exports nothing, but its full symbol table names it.
            for symbol in elf.symbols() {
                if let Ok(name) = symbol.name()
                    && symbol.is_definition()
                    && let Some(index) = names.iter().position(|wanted| *wanted == name)
                {
                    found[index] = Some(symbol.address());
                }
            }
        }
        let symbol = |(name, address): (&&str, &Option<u64>)| {
            let offset = self.file_offset((*address)?)?;
            let rest = self.data().get(usize::try_from(offset).ok()?..)?;
            let mut head = [0; HEAD_BYTES];
            let kept = rest.len().min(HEAD_BYTES);
            head[..kept].copy_from_slice(&rest[..kept]);
            Some(Symbol {
                name: (*name).to_owned(),
                offset,
                head,
            })
        };
        names.iter().zip(&found).filter_map(symbol).collect()
    }

    /// Whether there is a symbol table at all.
    pub(crate) fn has_symbols(&self) -> bool {
        self.elf().is_some_and(|elf| {
            elf.dynamic_symbols()
                .chain(elf.symbols())
                .any(|symbol| symbol.is_definition() && symbol.address() != 0)
        })
    }

    /// Offset in the file of a virtual address, by the loadable segments (sections may be stripped).
    fn file_offset(&self, address: u64) -> Option<u64> {
        let data = self.data();
        let header = FileHeader64::<LittleEndian>::parse(data).ok()?;
        header
            .program_headers(LittleEndian, data)
            .ok()?
            .iter()
            .find_map(|segment| {
                let (start, bytes) = (segment.p_vaddr(LittleEndian), segment.p_filesz(LittleEndian));
                let inside = address.checked_sub(start).filter(|inside| *inside < bytes)?;
                (segment.p_type(LittleEndian) == object::elf::PT_LOAD)
                    .then(|| segment.p_offset(LittleEndian).checked_add(inside))?
            })
    }

    /// Contents of a section; `None` without it, or without section headers.
    pub(crate) fn section(&self, name: &str) -> Option<&[u8]> {
        let elf = self.elf()?;
        let (offset, bytes) = elf.section_by_name(name)?.file_range()?;
        let (start, bytes) = (usize::try_from(offset).ok()?, usize::try_from(bytes).ok()?);
        self.data().get(start..start.checked_add(bytes)?)
    }

    /// The linker's build id; empty if there is none.
    pub(crate) fn build_id(&self) -> &[u8] {
        self.elf()
            .and_then(|elf| elf.build_id().ok().flatten())
            .unwrap_or_default()
    }
}

fn is_program(elf: &ElfFile64<'_, LittleEndian>) -> bool {
    elf.section_by_name(".interp")
        .is_some_and(|section| section.size() > 0)
}

/// Addresses of exported functions by the GNU hash table: a lookup touches a few pages, where a walk over the symbols of
/// a framework's libraries would take longer than attaching may.
fn exported(data: &[u8], names: &[&str]) -> Option<Vec<Option<u64>>> {
    let endian = LittleEndian;
    let header = FileHeader64::<LittleEndian>::parse(data).ok()?;
    let sections = header.sections(endian, data).ok()?;
    let symbols = sections.symbols(endian, data, object::elf::SHT_DYNSYM).ok()?;
    let defined = |symbol: &object::elf::Sym64<LittleEndian>| {
        (!symbol.is_undefined(endian) && symbol.st_type() == object::elf::STT_FUNC)
            .then(|| symbol.st_value(endian))
    };
    if let Ok(Some((hash, _))) = sections.gnu_hash(endian, data)
        && has_sane_gnu_hash(&sections, data)
    {
        let versions = sections.versions(endian, data).ok().flatten().unwrap_or_default();
        let address = |name: &&str| {
            let name = name.as_bytes();
            let found = hash.find(
                endian,
                name,
                object::elf::gnu_hash(name),
                None,
                &symbols,
                &versions,
            )?;
            defined(found.1)
        };
        return Some(names.iter().map(address).collect());
    }
    let mut found = vec![None; names.len()];
    for symbol in symbols.iter() {
        if let Ok(name) = symbol.name(endian, symbols.strings())
            && let Some(index) = names.iter().position(|wanted| wanted.as_bytes() == name)
        {
            found[index] = defined(symbol);
        }
    }
    Some(found)
}

/// Whether the table's counts are such that a lookup does not divide by zero or shift too far: `object` trusts them, and the
/// file is whatever a process chose to map.
fn has_sane_gnu_hash(
    sections: &object::read::elf::SectionTable<'_, FileHeader64<LittleEndian>>,
    data: &[u8],
) -> bool {
    let mut tables = sections
        .iter()
        .filter(|section| section.sh_type(LittleEndian) == object::elf::SHT_GNU_HASH);
    let Some(Ok(table)) = tables.next().map(|section| section.data(LittleEndian, data)) else {
        return false;
    };
    let word = |index: usize| {
        Some(u32::from_le_bytes(
            table.get(index * 4..index * 4 + 4)?.try_into().ok()?,
        ))
    };
    // Buckets, first symbol, bloom words, bloom shift.
    matches!((word(0), word(2), word(3)), (Some(1..), Some(bloom), Some(..32)) if bloom.is_power_of_two())
}

#[cfg(test)]
mod tests {
    use std::io::{Seek as _, Write as _};

    use proptest::prelude::*;

    use super::*;
    use crate::version;

    /// The C library of this very process: a real file with all tables.
    fn library() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps
            .split_whitespace()
            .find(|word| word.contains("/libc.so"))
            .expect("this test is dynamically linked");
        std::fs::read(path).unwrap()
    }

    fn image(bytes: &[u8]) -> Option<Image> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file.rewind().unwrap();
        Image::map(&file).unwrap()
    }

    #[test]
    fn functions_are_found_where_they_are() {
        let bytes = library();
        let image = image(&bytes).unwrap();
        let found = image.find(&["getpid", "no_such_function", "write"]);
        assert_eq!(
            found
                .iter()
                .map(|symbol| symbol.name.as_str())
                .collect::<Vec<_>>(),
            ["getpid", "write"]
        );
        for symbol in &found {
            let at = usize::try_from(symbol.offset).unwrap();
            assert_eq!(bytes[at..at + HEAD_BYTES], symbol.head);
        }
        assert!(image.has_symbols() && !image.build_id().is_empty());
        assert_eq!(version::of(&image), 0);
    }

    #[test]
    fn what_is_no_library_is_none() {
        for bytes in [&b""[..], b"#!/bin/sh\n", &[0x7f; 4096], b"\x7fELF\x02\x01"] {
            assert!(image(bytes).is_none(), "{bytes:x?}");
        }
    }

    /// Where the tables that are followed lie: headers, hash table, symbols, names.
    fn tables(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
        let elf = ElfFile64::<LittleEndian>::parse(bytes).unwrap();
        let headers = elf.elf_header();
        let start = headers.e_shoff.get(LittleEndian) as usize;
        let named = [
            ".gnu.hash",
            ".dynsym",
            ".dynstr",
            ".gnu.version",
            ".gnu.version_d",
            ".note.gnu.build-id",
        ];
        let mut ranges = vec![0..64, 64..64 + 56 * 14, start..bytes.len()];
        ranges.extend(named.iter().filter_map(|name| {
            let (offset, size) = elf.section_by_name(name)?.file_range()?;
            // The beginning, where counts and shifts are, as often as the rest.
            Some(offset as usize..(offset + size) as usize)
        }));
        let hash = ranges[3].start;
        ranges.push(hash..hash + 16);
        ranges
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn a_damaged_library_is_survived(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()), 1..24),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = library();
            let tables = tables(&bytes);
            for (table, at, value) in damage {
                let range = table.get(&tables).clone();
                bytes[range.start + at.index(range.len())] = value;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Some(image) = image(&bytes) {
                let _ = (image.find(&["getpid", "ncclAllReduce", "write"]), image.has_symbols(), image.build_id().len());
                let _ = version::of(&image);
            }
        }
    }
}
