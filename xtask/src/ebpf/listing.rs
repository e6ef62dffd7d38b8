//! Listings of eBPF objects: what of an object decides how it behaves, as text that can be compared.
//!
//! A listing has one part for each function, map and constant section. Functions are listed instruction by instruction, each with
//! the symbol that its relocation names. The order of functions in a section, debug information and paths are left out.

use std::{collections::BTreeMap, fmt::Write as _};

use anyhow::{Context, Result, bail, ensure};
use object::{
    Object as _, ObjectSection as _, ObjectSymbol as _, RelocationTarget, SectionKind, SymbolKind,
    read::elf::{ElfFile64, ElfSection64},
};
use similar::TextDiff;

/// Bytes of `struct bpf_insn`.
const INSTRUCTION: usize = 8;
/// Differing lines of one function that are shown: a compiler's other choice of registers touches all of them.
const SHOWN: usize = 60;

type Elf<'data> = ElfFile64<'data>;
type Section<'data, 'file> = ElfSection64<'data, 'file>;
/// What a part is called, and its lines.
type Listing = BTreeMap<String, Vec<String>>;

/// How `built` differs from `committed`, as unified diffs by function, map and section; `None` if it does not.
pub(super) fn difference(committed: &[u8], built: &[u8]) -> Result<Option<String>> {
    let committed = listing(committed).context("the committed object")?;
    let built = listing(built).context("the built object")?;
    let mut report = String::new();
    let empty = Vec::new();
    for name in committed
        .keys()
        .chain(built.keys().filter(|name| !committed.contains_key(*name)))
    {
        let old = committed.get(name).unwrap_or(&empty);
        let new = built.get(name).unwrap_or(&empty);
        if old == new {
            continue;
        }
        let (old, new) = (old.join("\n") + "\n", new.join("\n") + "\n");
        let diff = TextDiff::from_lines(&old, &new);
        let text = diff
            .unified_diff()
            .header(&format!("committed {name}"), &format!("built {name}"))
            .to_string();
        let lines: Vec<_> = text.lines().collect();
        for line in lines.iter().take(SHOWN) {
            writeln!(report, "{line}")?;
        }
        if let Some(more) = lines.len().checked_sub(SHOWN).filter(|more| *more > 0) {
            writeln!(report, "({more} more lines)")?;
        }
    }
    Ok((!report.is_empty()).then_some(report))
}

fn listing(object: &[u8]) -> Result<Listing> {
    let elf = Elf::parse(object)?;
    let mut listing = Listing::new();
    for section in elf.sections() {
        let name = section.name()?;
        match section.kind() {
            SectionKind::Text => functions(&elf, &section, &mut listing)?,
            _ if name == "maps" => maps(&elf, &section, &mut listing)?,
            SectionKind::Data | SectionKind::ReadOnlyData | SectionKind::ReadOnlyString => {
                let lines = section.data()?.chunks(16).map(|bytes| format!("{bytes:02x?}"));
                listing.insert(format!("section {name}"), lines.collect());
            }
            SectionKind::UninitializedData => {
                listing.insert(
                    format!("section {name}"),
                    vec![format!("{} bytes", section.size())],
                );
            }
            _ => {}
        }
    }
    ensure!(!listing.is_empty(), "no eBPF programs in it");
    Ok(listing)
}

/// Lists each function of a section of code: a line an instruction.
fn functions(elf: &Elf<'_>, section: &Section<'_, '_>, listing: &mut Listing) -> Result<()> {
    let relocations = relocations(elf, section)?;
    let code = section.data()?;
    for symbol in elf
        .symbols()
        .filter(|symbol| symbol.section_index() == Some(section.index()) && symbol.kind() == SymbolKind::Text)
    {
        let start = usize::try_from(symbol.address())?;
        let bytes = code
            .get(start..start + usize::try_from(symbol.size())?)
            .with_context(|| {
                format!(
                    "{} is outside of its section",
                    symbol.name().unwrap_or("a function")
                )
            })?;
        ensure!(
            bytes.len().is_multiple_of(INSTRUCTION),
            "{} ends within an instruction",
            symbol.name()?
        );
        let mut lines = Vec::new();
        for (index, bytes) in bytes.chunks_exact(INSTRUCTION).enumerate() {
            let at = (start + index * INSTRUCTION) as u64;
            let mut line = instruction(bytes.try_into()?);
            for target in relocations.get(&at).into_iter().flatten() {
                write!(line, " -> {target}")?;
            }
            lines.push(line);
        }
        // The section says what kind of program it is.
        listing.insert(
            format!("{}: {}", section.name()?, without_hash(symbol.name()?)),
            lines,
        );
    }
    Ok(())
}

/// What the relocations of a section name, by the offset that they apply to.
fn relocations(elf: &Elf<'_>, section: &Section<'_, '_>) -> Result<BTreeMap<u64, Vec<String>>> {
    let mut by_offset = BTreeMap::<u64, Vec<String>>::new();
    for (offset, relocation) in section.relocations() {
        let RelocationTarget::Symbol(index) = relocation.target() else {
            bail!("a relocation of {} that names no symbol", section.name()?);
        };
        let symbol = elf.symbol_by_index(index)?;
        let name = match (symbol.kind(), symbol.section_index()) {
            (SymbolKind::Section, Some(target)) => elf.section_by_index(target)?.name()?.to_owned(),
            _ => without_hash(symbol.name()?),
        };
        by_offset
            .entry(offset)
            .or_default()
            .push(format!("{name} ({:?})", relocation.flags()));
    }
    Ok(by_offset)
}

/// Lists the maps: a line for each field of `struct bpf_map_def`, whose fields are 32-bit integers.
fn maps(elf: &Elf<'_>, section: &Section<'_, '_>, listing: &mut Listing) -> Result<()> {
    const FIELDS: [&str; 7] = [
        "type",
        "key_size",
        "value_size",
        "max_entries",
        "map_flags",
        "id",
        "pinning",
    ];
    let definitions = section.data()?;
    for symbol in elf
        .symbols()
        .filter(|symbol| symbol.section_index() == Some(section.index()) && symbol.kind() == SymbolKind::Data)
    {
        let start = usize::try_from(symbol.address())?;
        let end = start + usize::try_from(symbol.size())?;
        let definition = definitions
            .get(start..end)
            .filter(|definition| definition.len() == 4 * FIELDS.len())
            .with_context(|| format!("map {} has another layout", symbol.name().unwrap_or("?")))?;
        let values = definition.chunks_exact(4).map(|bytes| {
            bytes
                .iter()
                .rev()
                .fold(0_u32, |value, byte| value << 8 | u32::from(*byte))
        });
        let lines = FIELDS
            .iter()
            .zip(values)
            .map(|(field, value)| format!("{field} {value}"));
        listing.insert(format!("map {}", symbol.name()?), lines.collect());
    }
    Ok(())
}

/// An instruction by its mnemonic and the fields of `struct bpf_insn`.
fn instruction(bytes: [u8; INSTRUCTION]) -> String {
    let [code, registers, low, high, immediate @ ..] = bytes;
    format!(
        "{:<10} dst=r{} src=r{} off={} imm={}",
        mnemonic(code),
        registers & 0xf,
        registers >> 4,
        i16::from_le_bytes([low, high]),
        i32::from_le_bytes(immediate),
    )
}

/// The instruction set's name of an operation (RFC 9669).
fn mnemonic(code: u8) -> String {
    const ARITHMETIC: [&str; 16] = [
        "add", "sub", "mul", "div", "or", "and", "lsh", "rsh", "neg", "mod", "xor", "mov", "arsh", "end",
        "?", "?",
    ];
    const JUMPS: [&str; 16] = [
        "ja", "jeq", "jgt", "jge", "jset", "jne", "jsgt", "jsge", "call", "exit", "jlt", "jle", "jslt",
        "jsle", "?", "?",
    ];
    const SIZES: [&str; 4] = ["32", "16", "8", "64"];
    let operation = usize::from(code >> 4);
    let operand = if code & 8 == 0 { "imm" } else { "reg" };
    let size = SIZES[usize::from(code >> 3 & 3)];
    match code & 7 {
        0 => format!("ld{size}"),
        1 => format!("ldx{size}"),
        2 => format!("st{size}"),
        3 if code >> 5 == 6 => format!("atomic{size}"),
        3 => format!("stx{size}"),
        4 => format!("{}32.{operand}", ARITHMETIC[operation]),
        5 => format!("{}.{operand}", JUMPS[operation]),
        6 => format!("{}32.{operand}", JUMPS[operation]),
        _ => format!("{}64.{operand}", ARITHMETIC[operation]),
    }
}

/// A symbol's name without the hash that the compiler makes of where the crate lies.
fn without_hash(symbol: &str) -> String {
    format!("{:#}", rustc_demangle::demangle(symbol))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn committed() -> Vec<u8> {
        let path = ringsight_testbed::workspace::root().join("probes/ebpf/object/x86_64.bpf.o");
        std::fs::read(path).unwrap()
    }

    /// Offset in the file of a symbol's first byte.
    fn offset(object: &[u8], name: &str) -> usize {
        let elf: Elf<'_> = Elf::parse(object).unwrap();
        let symbol = elf.symbols().find(|symbol| symbol.name() == Ok(name)).unwrap();
        let section = elf.section_by_index(symbol.section_index().unwrap()).unwrap();
        usize::try_from(section.file_range().unwrap().0 + symbol.address()).unwrap()
    }

    fn planted(change: impl FnOnce(&mut Vec<u8>)) -> Option<String> {
        let committed = committed();
        let mut built = committed.clone();
        change(&mut built);
        difference(&committed, &built).unwrap()
    }

    #[test]
    fn an_object_equals_itself() {
        assert_eq!(planted(|_| {}), None);
    }

    #[test]
    fn the_listing_names_programs_maps_and_licence() {
        let listing = listing(&committed()).unwrap();
        for part in [
            "uprobe: on_record",
            "uretprobe: on_return",
            "map EVENTS",
            "section license",
        ] {
            assert!(
                listing.contains_key(part),
                "{part} is not among {:?}",
                listing.keys()
            );
        }
    }

    #[test]
    fn another_immediate_is_a_difference_of_that_function_alone() {
        let report = planted(|object| {
            let at = offset(object, "on_record");
            object[at + 4] ^= 1;
        })
        .unwrap();
        assert!(report.contains("--- committed uprobe: on_record"), "{report}");
        assert_eq!(report.matches("--- ").count(), 1, "{report}");
        let changed = |sign| {
            report
                .lines()
                .filter(|line| line.starts_with(sign) && line.contains("dst="))
                .count()
        };
        assert_eq!((changed('-'), changed('+')), (1, 1), "{report}");
    }

    #[test]
    fn another_size_of_a_map_is_a_difference() {
        let report = planted(|object| {
            let at = offset(object, "PROCESSES");
            object[at + 8] ^= 8;
        })
        .unwrap();
        assert!(report.contains("+++ built map PROCESSES"), "{report}");
        assert!(report.contains("+value_size "), "{report}");
    }

    #[test]
    fn another_target_of_a_relocation_is_a_difference() {
        let report = planted(|object| {
            let elf: Elf<'_> = Elf::parse(&**object).unwrap();
            let symbol = |name| {
                elf.symbols()
                    .find(|symbol| symbol.name() == Ok(name))
                    .unwrap()
                    .index()
                    .0
            };
            let (from, to) = (symbol("PENDING"), symbol("EVENTS"));
            let section = elf.section_by_name(".reluretprobe").unwrap();
            let (start, size) = section.file_range().unwrap();
            let range = usize::try_from(start).unwrap()..usize::try_from(start + size).unwrap();
            // `Elf64_Rel`: offset, then type and symbol.
            let entry = object[range.clone()]
                .chunks_exact(16)
                .position(|entry| usize::from(entry[12]) == from)
                .unwrap();
            object[range.start + entry * 16 + 12] = to.try_into().unwrap();
        })
        .unwrap();
        assert!(report.contains("-> PENDING"), "{report}");
        assert!(report.contains("-> EVENTS"), "{report}");
    }

    #[test]
    fn a_missing_program_is_a_difference() {
        let report = planted(|object| {
            // The last one is the symbol's name; BTF has that text, too.
            let start = object
                .windows(10)
                .rposition(|name| name == b"on_record\0")
                .unwrap();
            object[start..start + 9].copy_from_slice(b"on_rec0rd");
        })
        .unwrap();
        assert!(report.contains("+++ built uprobe: on_rec0rd"), "{report}");
    }

    #[test]
    fn what_is_no_object_is_an_error() {
        let committed = committed();
        assert!(difference(&committed, &committed[..100]).is_err());
        assert!(difference(&committed, b"").is_err());
    }

    #[test]
    fn instructions_read_as_the_instruction_set_names_them() {
        let line = instruction([0x79, 0x61, 0xf8, 0xff, 0, 0, 0, 0]);
        assert_eq!(line, "ldx64      dst=r1 src=r6 off=-8 imm=0");
        assert_eq!(mnemonic(0x85), "call.imm");
        assert_eq!(mnemonic(0xdb), "atomic64");
        assert_eq!(mnemonic(0x18), "ld64");
        assert_eq!(mnemonic(0xbf), "mov64.reg");
    }
}
