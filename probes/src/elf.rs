//! Reading symbols out of a library file: where a function lies in the file, and how it begins.
//!
//! The file belongs to a target, which may have made anything of it and may change it meanwhile. So it is never mapped (a file that is
//! cut while it is mapped ends the process that reads it): small pieces are copied out by `pread` and then looked at. What is read
//! in all, and what is gone through one by one, has limits ([`limits`](crate::limits)).

use std::{fs::File, io};

use object::{
    LittleEndian as LE, U16, U32,
    elf::{self, FileHeader64, NoteHeader64, ProgramHeader64, SectionHeader64, Sym64},
    pod::{Pod, from_bytes},
};

use crate::limits::{
    BUILD_ID_BYTES, CpuBudget, ELF_BYTES, ELF_CHAIN, ELF_SECTIONS, ELF_SEGMENTS, ELF_SYMBOLS, Limit,
};

/// Bytes of a function's beginning that are kept: what is needed to tell what kind of site it is.
pub const HEAD_BYTES: usize = 16;

/// Bytes that are read at once. A lookup touches a handful of places, each of them a few words.
const BLOCK: usize = 4096;
/// Blocks that are kept, those that were used last: a walk over symbols reads two places by turns.
const KEPT: usize = 16;
/// Symbols between two looks at the clock.
const STRIDE: usize = 1024;

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

/// Why something of a file is not known.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ElfError {
    /// A limit was reached.
    #[error(transparent)]
    Limit(#[from] Limit),
    /// The file is no 64-bit little-endian ELF file, or it leads outside itself.
    #[error("it is no ELF file, or a damaged one")]
    Damaged,
    /// The system refused a read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

type Result<T> = std::result::Result<T, ElfError>;

/// What bytes are read of.
pub(crate) trait Source {
    /// Fills `buffer` as far as there are bytes from `offset` on; how many there were.
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl Source for File {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            match std::os::unix::fs::FileExt::read_at(self, &mut buffer[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }
}

impl Source for [u8] {
    fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let start = usize::try_from(offset).map_or(self.len(), |start| start.min(self.len()));
        let count = buffer.len().min(self.len() - start);
        buffer[..count].copy_from_slice(&self[start..start + count]);
        Ok(count)
    }
}

/// Blocks of a file that were read lately. Kept across files for their memory.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    blocks: Vec<Block>,
    /// Uses so far.
    uses: u64,
}

#[derive(Debug)]
struct Block {
    number: u64,
    /// When it was used last.
    used: u64,
    length: usize,
    bytes: Box<[u8; BLOCK]>,
}

impl Blocks {
    /// Forgets what is in the blocks: they are another file's.
    fn clear(&mut self) {
        for block in &mut self.blocks {
            block.number = u64::MAX;
        }
    }

    /// The block of this number, or else the one to read it into, which has another number.
    fn block(&mut self, number: u64) -> &mut Block {
        self.uses += 1;
        let index = match self.blocks.iter().position(|block| block.number == number) {
            Some(index) => index,
            None if self.blocks.len() < KEPT => {
                self.blocks.push(Block {
                    number: u64::MAX,
                    used: 0,
                    length: 0,
                    bytes: Box::new([0; BLOCK]),
                });
                self.blocks.len() - 1
            }
            None => (1..KEPT).fold(0, |oldest, index| {
                if self.blocks[index].used < self.blocks[oldest].used {
                    index
                } else {
                    oldest
                }
            }),
        };
        let block = &mut self.blocks[index];
        block.used = self.uses;
        block
    }
}

/// A table in a file: entries of `T`.
#[derive(Clone, Copy, Debug)]
struct Table {
    offset: u64,
    entries: u64,
}

/// A library file.
pub(crate) struct Image<'a, S: ?Sized> {
    source: &'a S,
    blocks: &'a mut Blocks,
    budget: CpuBudget,
    /// Bytes read so far.
    read: usize,
    sections: Vec<SectionHeader64<LE>>,
    segments: Vec<ProgramHeader64<LE>>,
    /// Index of the section with the sections' names.
    names: usize,
}

impl<'a, S: Source + ?Sized> Image<'a, S> {
    /// Reads the file's headers.
    pub(crate) fn open(source: &'a S, blocks: &'a mut Blocks, budget: CpuBudget) -> Result<Self> {
        blocks.clear();
        let mut image = Self {
            source,
            blocks,
            budget,
            read: 0,
            sections: Vec::new(),
            segments: Vec::new(),
            names: 0,
        };
        let header: FileHeader64<LE> = image.get(0)?;
        let ident = &header.e_ident;
        if (ident.magic, ident.class, ident.data) != (elf::ELFMAG, elf::ELFCLASS64, elf::ELFDATA2LSB) {
            return Err(ElfError::Damaged);
        }
        image.segments = image.headers(
            header.e_phoff.get(LE),
            header.e_phnum.get(LE).into(),
            header.e_phentsize.get(LE).into(),
            (ELF_SEGMENTS, Limit::ElfSegments),
        )?;
        image.sections = image.headers(
            header.e_shoff.get(LE),
            header.e_shnum.get(LE).into(),
            header.e_shentsize.get(LE).into(),
            (ELF_SECTIONS, Limit::ElfSections),
        )?;
        image.names = header.e_shstrndx.get(LE).into();
        Ok(image)
    }

    /// A table of headers; empty where the file has none.
    fn headers<T: Pod>(
        &mut self,
        offset: u64,
        entries: usize,
        entry_bytes: usize,
        (most, limit): (usize, Limit),
    ) -> Result<Vec<T>> {
        if offset == 0 || entries == 0 {
            return Ok(Vec::new());
        }
        if entries > most {
            return Err(limit.into());
        }
        if entry_bytes != size_of::<T>() {
            return Err(ElfError::Damaged);
        }
        let table = Table {
            offset,
            entries: entries as u64,
        };
        (0..table.entries).map(|index| self.entry(table, index)).collect()
    }

    /// The block that holds the byte at `offset`, and what of it there is from there on.
    fn block(&mut self, offset: u64) -> Result<&[u8]> {
        let number = offset / BLOCK as u64;
        let block = self.blocks.block(number);
        if block.number != number {
            self.budget.check(Limit::SearchTime)?;
            if self.read > ELF_BYTES {
                return Err(Limit::ElfBytes.into());
            }
            block.number = u64::MAX;
            block.length = self.source.read_at(&mut block.bytes[..], number * BLOCK as u64)?;
            block.number = number;
            self.read += BLOCK;
        }
        let within = (offset % BLOCK as u64) as usize;
        Ok(block.bytes[..block.length].get(within..).unwrap_or_default())
    }

    /// Copies bytes of the file from `offset` on, as many as there are; how many.
    fn copy(&mut self, offset: u64, buffer: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < buffer.len() {
            let at = offset.checked_add(filled as u64).ok_or(ElfError::Damaged)?;
            // Offsets of files are signed.
            if at > i64::MAX as u64 - BLOCK as u64 {
                return Err(ElfError::Damaged);
            }
            let bytes = self.block(at)?;
            if bytes.is_empty() {
                break;
            }
            let count = bytes.len().min(buffer.len() - filled);
            buffer[filled..filled + count].copy_from_slice(&bytes[..count]);
            filled += count;
        }
        Ok(filled)
    }

    /// Whether these bytes stand at `offset`.
    fn is_at(&mut self, offset: u64, wanted: &[u8]) -> Result<bool> {
        let mut done = 0;
        while done < wanted.len() {
            let at = offset.checked_add(done as u64).ok_or(ElfError::Damaged)?;
            if at > i64::MAX as u64 - BLOCK as u64 {
                return Err(ElfError::Damaged);
            }
            let bytes = self.block(at)?;
            let count = bytes.len().min(wanted.len() - done);
            if count == 0 || bytes[..count] != wanted[done..done + count] {
                return Ok(false);
            }
            done += count;
        }
        Ok(true)
    }

    /// The value at `offset`.
    fn get<T: Pod>(&mut self, offset: u64) -> Result<T> {
        /// Large enough for every header, and aligned as their words are.
        #[repr(align(8))]
        struct Buffer([u8; 64]);

        let mut buffer = Buffer([0; 64]);
        let buffer = &mut buffer.0[..size_of::<T>()];
        if self.copy(offset, buffer)? < size_of::<T>() {
            return Err(ElfError::Damaged);
        }
        let (value, _) = from_bytes(buffer).map_err(|()| ElfError::Damaged)?;
        Ok(*value)
    }

    /// An entry of a table.
    fn entry<T: Pod>(&mut self, table: Table, index: u64) -> Result<T> {
        if index >= table.entries {
            return Err(ElfError::Damaged);
        }
        let offset = index
            .checked_mul(size_of::<T>() as u64)
            .and_then(|within| table.offset.checked_add(within))
            .ok_or(ElfError::Damaged)?;
        self.get(offset)
    }

    /// The first section of a type that the file has the bytes of.
    fn section_of(&self, kind: u32) -> Option<SectionHeader64<LE>> {
        self.sections
            .iter()
            .find(|section| section.sh_type.get(LE) == kind)
            .copied()
    }

    /// The symbols of a section, and the section with their names.
    fn symbols(&self, kind: u32) -> Option<(Table, SectionHeader64<LE>)> {
        let section = self.section_of(kind)?;
        let names = self.sections.get(section.sh_link.get(LE) as usize)?;
        Some((table::<Sym64<LE>>(&section), *names))
    }

    /// Those of `names` that the file exports as functions, in the order of `names`.
    pub(crate) fn exports(&mut self, names: &[&str]) -> Result<Vec<Symbol>> {
        let mut found = vec![None; names.len()];
        if let Some((symbols, texts)) = self.symbols(elf::SHT_DYNSYM) {
            match self.section_of(elf::SHT_GNU_HASH) {
                Some(hash) => {
                    let versions = self.section_of(elf::SHT_GNU_VERSYM);
                    for (name, found) in names.iter().zip(&mut found) {
                        *found = self.exported(name, &hash, versions.as_ref(), symbols, &texts)?;
                    }
                }
                None => self.walk(names, symbols, &texts, &mut found)?,
            }
        }
        self.placed(names, &found)
    }

    /// Those of `names` that a program defines as functions, in the order of `names`; none of a library. A program that has the library
    /// linked in exports nothing, but its full symbol table names it.
    pub(crate) fn linked_in(&mut self, names: &[&str]) -> Result<Vec<Symbol>> {
        let mut found = vec![None; names.len()];
        if self.is_program()
            && let Some((symbols, texts)) = self.symbols(elf::SHT_SYMTAB)
        {
            self.walk(names, symbols, &texts, &mut found)?;
        }
        self.placed(names, &found)
    }

    /// Places and beginnings of functions by their addresses.
    fn placed(&mut self, names: &[&str], addresses: &[Option<u64>]) -> Result<Vec<Symbol>> {
        let mut symbols = Vec::new();
        for (name, address) in names.iter().zip(addresses) {
            let Some(offset) = address.and_then(|address| self.file_offset(address)) else {
                continue;
            };
            let mut head = [0; HEAD_BYTES];
            if self.copy(offset, &mut head)? > 0 {
                symbols.push(Symbol {
                    name: (*name).to_owned(),
                    offset,
                    head,
                });
            }
        }
        Ok(symbols)
    }

    /// The address of an exported function by the GNU hash table: a lookup touches a few places, where a walk over the symbols
    /// of a framework's libraries would take longer than attaching may.
    fn exported(
        &mut self,
        name: &str,
        hash: &SectionHeader64<LE>,
        versions: Option<&SectionHeader64<LE>>,
        symbols: Table,
        texts: &SectionHeader64<LE>,
    ) -> Result<Option<u64>> {
        // Header: buckets, first symbol, words of the bloom filter, its shift. Then the filter's words, the buckets, and a word
        // for each symbol from the first one on.
        let [buckets, first, words, shift]: [u32; 4] = {
            let mut header = [0; 4];
            for (index, word) in (0..).zip(&mut header) {
                *word = self.word(hash, index)?;
            }
            header
        };
        if buckets == 0 || !words.is_power_of_two() || shift >= 32 {
            return Err(ElfError::Damaged);
        }
        let wanted = elf::gnu_hash(name.as_bytes());
        let filter = u64::from((wanted / 64) & (words - 1));
        let low = self.word(hash, 4 + 2 * filter)?;
        let high = self.word(hash, 4 + 2 * filter + 1)?;
        let filter = u64::from(high) << 32 | u64::from(low);
        if filter >> (wanted % 64) & filter >> ((wanted >> shift) % 64) & 1 == 0 {
            return Ok(None);
        }
        let bucket_at = 4 + 2 * u64::from(words);
        let begin = self.word(hash, bucket_at + u64::from(wanted % buckets))?;
        if begin < first {
            return Ok(None);
        }
        let chain_at = bucket_at + u64::from(buckets);
        for index in u64::from(begin)..u64::from(begin) + ELF_CHAIN as u64 {
            let word = self.word(hash, chain_at + index - u64::from(first))?;
            // The lowest bit marks the end of the chain.
            if word | 1 == wanted | 1 {
                let symbol: Sym64<LE> = self.entry(symbols, index)?;
                if self.is_named(&symbol, texts, name)? && !self.is_hidden(versions, index)? {
                    return Ok(defined(&symbol));
                }
            }
            if word & 1 == 1 {
                return Ok(None);
            }
        }
        Err(Limit::ElfChain.into())
    }

    /// A 32-bit word of a section.
    fn word(&mut self, section: &SectionHeader64<LE>, index: u64) -> Result<u32> {
        let table = table::<U32<LE>>(section);
        Ok(self.entry::<U32<LE>>(table, index)?.get(LE))
    }

    /// Whether a symbol is of a version that is not the default one.
    fn is_hidden(&mut self, versions: Option<&SectionHeader64<LE>>, index: u64) -> Result<bool> {
        let Some(versions) = versions else {
            return Ok(false);
        };
        let version = self.entry::<U16<LE>>(table::<U16<LE>>(versions), index)?;
        Ok(version.get(LE) & elf::VERSYM_HIDDEN != 0)
    }

    fn is_named(&mut self, symbol: &Sym64<LE>, texts: &SectionHeader64<LE>, name: &str) -> Result<bool> {
        let Some(offset) = texts.sh_offset.get(LE).checked_add(symbol.st_name.get(LE).into()) else {
            return Err(ElfError::Damaged);
        };
        // No more of it is read than the name is long, however long it is itself.
        Ok(self.is_at(offset, name.as_bytes())? && self.is_at(offset + name.len() as u64, b"\0")?)
    }

    /// Goes through symbols one by one, for the functions of these names.
    fn walk(
        &mut self,
        names: &[&str],
        symbols: Table,
        texts: &SectionHeader64<LE>,
        found: &mut [Option<u64>],
    ) -> Result<()> {
        for index in 0..symbols.entries {
            if index >= ELF_SYMBOLS as u64 {
                return Err(Limit::ElfSymbols.into());
            }
            if index % STRIDE as u64 == 0 {
                self.budget.check(Limit::SearchTime)?;
            }
            let symbol: Sym64<LE> = self.entry(symbols, index)?;
            let Some(address) = defined(&symbol) else { continue };
            // Most names differ from all that are wanted in their first bytes.
            let mut begin = [0; 4];
            let at = texts.sh_offset.get(LE).checked_add(symbol.st_name.get(LE).into());
            self.copy(at.ok_or(ElfError::Damaged)?, &mut begin)?;
            for (name, found) in names.iter().zip(&mut *found) {
                let is_likely = found.is_none() && name.as_bytes().starts_with(&begin);
                if is_likely && self.is_named(&symbol, texts, name)? {
                    *found = Some(address);
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether there is a symbol table at all.
    pub(crate) fn has_symbols(&mut self) -> Result<bool> {
        for kind in [elf::SHT_DYNSYM, elf::SHT_SYMTAB] {
            let Some((symbols, _)) = self.symbols(kind) else {
                continue;
            };
            for index in 0..symbols.entries.min(ELF_SYMBOLS as u64) {
                let symbol: Sym64<LE> = self.entry(symbols, index)?;
                if symbol.st_shndx.get(LE) != elf::SHN_UNDEF && symbol.st_value.get(LE) != 0 {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether it is started by the kernel, not loaded by another file.
    fn is_program(&self) -> bool {
        let is_interpreter = |segment: &ProgramHeader64<LE>| segment.p_type.get(LE) == elf::PT_INTERP;
        self.segments.iter().any(is_interpreter)
    }

    /// Offset in the file of a virtual address, by the loadable segments (sections may be stripped).
    fn file_offset(&self, address: u64) -> Option<u64> {
        self.segments.iter().find_map(|segment| {
            let (start, bytes) = (segment.p_vaddr.get(LE), segment.p_filesz.get(LE));
            let inside = address.checked_sub(start).filter(|inside| *inside < bytes)?;
            (segment.p_type.get(LE) == elf::PT_LOAD).then(|| segment.p_offset.get(LE).checked_add(inside))?
        })
    }

    /// Copies at most `bytes` bytes of the function `name`, from its first one on; `None` if there is no such function.
    pub(crate) fn code(&mut self, name: &str, bytes: usize) -> Result<Option<Vec<u8>>> {
        let mut found = self.exports(&[name])?;
        if found.is_empty() {
            found = self.linked_in(&[name])?;
        }
        let Some(symbol) = found.pop() else {
            return Ok(None);
        };
        let mut code = vec![0; bytes];
        let count = self.copy(symbol.offset, &mut code)?;
        code.truncate(count);
        Ok(Some(code))
    }

    /// Place of a section's content, bytes; `None` without it, or without section headers.
    fn section(&mut self, name: &str) -> Result<Option<(u64, u64)>> {
        let Some(names) = self.sections.get(self.names).copied() else {
            return Ok(None);
        };
        let wanted = [name.as_bytes(), b"\0"].concat();
        for index in 0..self.sections.len() {
            let section = self.sections[index];
            let at = names
                .sh_offset
                .get(LE)
                .checked_add(section.sh_name.get(LE).into());
            if section.sh_type.get(LE) != elf::SHT_NOBITS
                && let Some(at) = at
                && self.is_at(at, &wanted)?
            {
                return Ok(Some((section.sh_offset.get(LE), section.sh_size.get(LE))));
            }
        }
        Ok(None)
    }

    /// Hands `each` the content of a section piece by piece until it has an answer, at most `limit` bytes. Each piece begins with the
    /// last `overlap` bytes of the one before.
    pub(crate) fn search_section<T>(
        &mut self,
        name: &str,
        (limit, reached): (usize, Limit),
        overlap: usize,
        mut each: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Option<T>> {
        const PIECE: usize = 256 << 10;
        let Some((offset, bytes)) = self.section(name)? else {
            return Ok(None);
        };
        let mut buffer = vec![0; overlap + PIECE];
        let (mut kept, mut done) = (0, 0);
        while done < bytes {
            if done >= limit as u64 {
                return Err(reached.into());
            }
            self.budget.check(Limit::SearchTime)?;
            let at = offset
                .checked_add(done)
                .filter(|at| *at < i64::MAX as u64 - PIECE as u64)
                .ok_or(ElfError::Damaged)?;
            let wanted = usize::try_from(bytes - done).unwrap_or(PIECE).min(PIECE);
            let count = self.source.read_at(&mut buffer[kept..kept + wanted], at)?;
            let filled = kept + count;
            if let Some(answer) = each(&buffer[..filled]) {
                return Ok(Some(answer));
            }
            if count < wanted {
                break;
            }
            done += count as u64;
            kept = overlap.min(filled);
            buffer.copy_within(filled - kept..filled, 0);
        }
        Ok(None)
    }

    /// The linker's build id; empty if there is none.
    pub(crate) fn build_id(&mut self) -> Result<Vec<u8>> {
        for index in 0..self.segments.len() {
            let segment = self.segments[index];
            if segment.p_type.get(LE) != elf::PT_NOTE {
                continue;
            }
            let (mut at, end) = (
                segment.p_offset.get(LE),
                segment.p_offset.get(LE).saturating_add(segment.p_filesz.get(LE)),
            );
            let align = if segment.p_align.get(LE) == 8 { 8 } else { 4 };
            while at < end {
                let note: NoteHeader64<LE> = self.get(at)?;
                let [name, bytes] = [note.n_namesz, note.n_descsz].map(|size| u64::from(size.get(LE)));
                let content = at
                    .checked_add(size_of::<NoteHeader64<LE>>() as u64 + name)
                    .and_then(|at| at.checked_next_multiple_of(align))
                    .ok_or(ElfError::Damaged)?;
                let is_it = note.n_type.get(LE) == elf::NT_GNU_BUILD_ID && name == 4;
                if is_it && self.is_at(at + size_of::<NoteHeader64<LE>>() as u64, b"GNU\0")? {
                    if bytes > BUILD_ID_BYTES as u64 {
                        return Err(Limit::BuildId.into());
                    }
                    let mut id = vec![0; bytes as usize];
                    let count = self.copy(content, &mut id)?;
                    id.truncate(count);
                    return Ok(id);
                }
                at = content
                    .checked_add(bytes)
                    .and_then(|at| at.checked_next_multiple_of(align))
                    .ok_or(ElfError::Damaged)?;
            }
        }
        Ok(Vec::new())
    }
}

/// The entries of a section.
fn table<T>(section: &SectionHeader64<LE>) -> Table {
    Table {
        offset: section.sh_offset.get(LE),
        entries: if section.sh_type.get(LE) == elf::SHT_NOBITS {
            0
        } else {
            section.sh_size.get(LE) / size_of::<T>() as u64
        },
    }
}

/// The address of a symbol, if it is a function that the file defines.
fn defined(symbol: &Sym64<LE>) -> Option<u64> {
    (symbol.st_shndx.get(LE) != elf::SHN_UNDEF && symbol.st_info & 0xf == elf::STT_FUNC)
        .then(|| symbol.st_value.get(LE))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use object::{Object as _, ObjectSection as _, read::elf::ElfFile64};
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

    fn soon() -> CpuBudget {
        CpuBudget::of(Duration::from_secs(60))
    }

    #[test]
    fn functions_are_found_where_they_are() {
        let (bytes, mut blocks) = (library(), Blocks::default());
        let mut image = Image::open(&bytes[..], &mut blocks, soon()).unwrap();
        let found = image.exports(&["getpid", "no_such_function", "write"]).unwrap();
        let names: Vec<_> = found.iter().map(|symbol| symbol.name.as_str()).collect();
        assert_eq!(names, ["getpid", "write"]);
        let elf = ElfFile64::<LE>::parse(&bytes[..]).unwrap();
        for symbol in &found {
            let at = usize::try_from(symbol.offset).unwrap();
            assert_eq!(bytes[at..at + HEAD_BYTES], symbol.head);
            let exports = elf.exports().unwrap();
            let export = exports
                .iter()
                .find(|export| export.name() == symbol.name.as_bytes());
            assert_eq!(image.file_offset(export.unwrap().address()), Some(symbol.offset));
        }
        assert!(image.has_symbols().unwrap());
        assert_eq!(Some(&image.build_id().unwrap()[..]), elf.build_id().unwrap());
        let section = elf.section_by_name(".rodata").unwrap().file_range();
        assert_eq!(image.section(".rodata").unwrap(), section);
        assert_eq!(image.section(".no_such_section").unwrap(), None);
        assert_eq!(version::of(&mut image).unwrap(), 0);
    }

    #[test]
    fn without_a_hash_table_symbols_are_gone_through() {
        let (mut bytes, mut blocks) = (library(), Blocks::default());
        let start = u64::from_le_bytes(bytes[40..48].try_into().unwrap()) as usize;
        for header in bytes[start..].chunks_exact_mut(64) {
            if header[4..8] == elf::SHT_GNU_HASH.to_le_bytes() {
                header[4..8].fill(0);
            }
        }
        let mut image = Image::open(&bytes[..], &mut blocks, soon()).unwrap();
        let found = image.exports(&["getpid", "write"]).unwrap();
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn what_is_no_library_is_refused() {
        let mut blocks = Blocks::default();
        for bytes in [&b""[..], b"#!/bin/sh\n", &[0x7f; 4096], b"\x7fELF\x02\x01"] {
            let opened = Image::open(bytes, &mut blocks, soon());
            assert!(matches!(opened, Err(ElfError::Damaged)), "{bytes:x?}");
        }
    }

    #[test]
    fn a_section_is_searched_across_its_pieces() {
        let (bytes, mut blocks) = (library(), Blocks::default());
        let mut image = Image::open(&bytes[..], &mut blocks, soon()).unwrap();
        let (offset, length) = image.section(".text").unwrap().unwrap();
        // The end of the first piece lies within it.
        let at = offset as usize + (256 << 10) - 3;
        let wanted = bytes[at..at + 24].to_vec();
        let mut search = |limit| {
            let find = |piece: &[u8]| memchr::memmem::find(piece, &wanted).map(drop);
            image.search_section(".text", (limit, Limit::Constants), 24, find)
        };
        assert!(matches!(search(usize::MAX), Ok(Some(()))), "{length}");
        assert!(matches!(search(1), Err(ElfError::Limit(Limit::Constants))));
    }

    /// A library with `symbols` symbols whose names all lie at `name`, with a table of hashes of one chain or none at all.
    fn bomb(symbols: u32, name: &[u8], is_hashed: bool) -> Vec<u8> {
        let text = symbols as usize * 24;
        let hash = (text + name.len() + 1).next_multiple_of(8);
        let sections = hash
            + if is_hashed {
                16 + 8 + 4 + symbols as usize * 4
            } else {
                0
            };
        let mut bytes = vec![0; sections.next_multiple_of(8)];
        bytes[..64].fill(0);
        let symbol = [&0u32.to_le_bytes()[..], &[elf::STT_FUNC, 0, 1, 0], &[0x40; 16]].concat();
        let mut file = vec![0; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        for entry in bytes[..text].chunks_exact_mut(24) {
            entry.copy_from_slice(&symbol);
        }
        bytes[text..text + name.len()].copy_from_slice(name);
        if is_hashed {
            // One bucket, symbols from 1 on, one word of the filter, which lets everything pass.
            let words = [1, 1, 1, 0, u32::MAX, u32::MAX, 1];
            let chain = std::iter::repeat_n(2, symbols as usize);
            for (place, word) in bytes[hash..]
                .chunks_exact_mut(4)
                .zip(words.into_iter().chain(chain))
            {
                place.copy_from_slice(&word.to_le_bytes());
            }
        }
        let section = |kind: u32, offset: usize, size: usize, link: u32| {
            let mut header = [0; 64];
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[24..32].copy_from_slice(&(64 + offset as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(size as u64).to_le_bytes());
            header[40..44].copy_from_slice(&link.to_le_bytes());
            header
        };
        let mut headers = vec![
            section(elf::SHT_DYNSYM, 0, text, 1),
            section(elf::SHT_STRTAB, text, name.len() + 1, 0),
        ];
        if is_hashed {
            headers.push(section(elf::SHT_GNU_HASH, hash, sections - hash, 0));
        }
        file[40..48].copy_from_slice(&(64 + bytes.len() as u64).to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&(headers.len() as u16).to_le_bytes());
        [file, bytes, headers.concat()].concat()
    }

    #[test]
    fn bombs_end_at_a_limit() {
        let mut blocks = Blocks::default();
        let name = vec![b'n'; 2 << 20];
        let most = ELF_SYMBOLS as u32 + 1;
        for (file, names, expected) in [
            // One name of 2 MB for each of 20,000 symbols: of a name no more is read than those that are wanted are long.
            (bomb(20_000, &name, false), ["ncclAllReduce"], None),
            (
                bomb(most, b"n", false),
                ["ncclAllReduce"],
                Some(Limit::ElfSymbols),
            ),
            (bomb(20_000, b"n", true), ["ncclAllReduce"], Some(Limit::ElfChain)),
        ] {
            let begun = Instant::now();
            let mut image = Image::open(&file[..], &mut blocks, soon()).unwrap();
            match (image.exports(&names), expected) {
                (Ok(found), None) => assert!(found.is_empty()),
                (Err(ElfError::Limit(limit)), Some(expected)) => assert_eq!(limit, expected),
                (result, _) => panic!("{expected:?}: {result:?}"),
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "{expected:?}");
        }
    }

    #[test]
    fn names_all_over_a_sparse_file_end_at_a_limit() {
        struct Sparse(Vec<u8>);

        impl Source for Sparse {
            fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
                buffer.fill(0);
                let there = self.0[..].read_at(buffer, offset)?;
                Ok(if offset < 4 << 30 { buffer.len() } else { there })
            }
        }

        let mut file = bomb(100_000, b"n", false);
        for (index, symbol) in (0u32..).zip(file[64..64 + 2_400_000].chunks_exact_mut(24)) {
            symbol[..4].copy_from_slice(&(index * 40_000).to_le_bytes());
        }
        let (file, mut blocks) = (Sparse(file), Blocks::default());
        let mut image = Image::open(&file, &mut blocks, soon()).unwrap();
        assert!(matches!(
            image.exports(&["ncclAllReduce"]),
            Err(ElfError::Limit(Limit::ElfBytes))
        ));
    }

    #[test]
    fn nothing_is_read_once_time_is_over() {
        let (bytes, mut blocks) = (library(), Blocks::default());
        let opened = Image::open(&bytes[..], &mut blocks, CpuBudget::of(Duration::ZERO));
        assert!(matches!(opened, Err(ElfError::Limit(Limit::SearchTime))));
    }

    #[test]
    fn a_file_that_is_cut_meanwhile_is_damaged() {
        use std::io::Write as _;

        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&library()).unwrap();
        let mut blocks = Blocks::default();
        let mut image = Image::open(&file, &mut blocks, soon()).unwrap();
        file.set_len(4096).unwrap();
        assert!(matches!(image.exports(&["getpid"]), Err(ElfError::Damaged)));
    }

    /// Where the tables that are followed lie: headers, hash table, symbols, names.
    fn tables(bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
        let elf = ElfFile64::<LE>::parse(bytes).unwrap();
        let headers = elf.elf_header();
        let start = headers.e_shoff.get(LE) as usize;
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
            let mut blocks = Blocks::default();
            if let Ok(mut image) = Image::open(&bytes[..], &mut blocks, soon()) {
                let found = image.exports(&["getpid", "ncclAllReduce", "write"]);
                let _ = (found, image.has_symbols(), image.build_id());
                let _ = version::of(&mut image);
            }
        }
    }
}
