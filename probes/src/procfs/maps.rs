//! `/proc/PID/maps`: what a process has mapped.

use std::{collections::BTreeMap, io};

use super::{FileKey, ProcessDirectory};
use crate::limits::{CpuBudget, Limit, MAPPED_FILES, MAPS_BYTES};

/// Bytes of the list that one `read` asks for.
const LINES: usize = 16 << 10;

/// One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping<'a> {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) is_executable: bool,
    /// Major and minor number of the file's device.
    pub(crate) device: (u32, u32),
    pub(crate) inode: u64,
    /// As the kernel writes it; empty for memory without a file.
    pub(crate) path: &'a str,
}

/// A file that is mapped as code, with one of its mappings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MappedFile {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) inode: u64,
    /// In the process's own mount namespace.
    pub(crate) path: String,
}

/// Why a list of mappings ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MapsEnd {
    /// It was read to its end.
    Whole,
    /// The reader had enough.
    Enough,
    /// The rest was left out.
    Cut(Limit),
}

/// Reads a line; `None` if it is none.
pub(crate) fn parse_line(line: &str) -> Option<Mapping<'_>> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?;
    let (_offset, device, inode) = (fields.next()?, fields.next()?, fields.next()?);
    let (major, minor) = device.split_once(':')?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        is_executable: permissions.contains('x'),
        device: (
            u32::from_str_radix(major, 16).ok()?,
            u32::from_str_radix(minor, 16).ok()?,
        ),
        inode: inode.parse().ok()?,
        path: fields.next().unwrap_or_default().trim_start(),
    })
}

impl Mapping<'_> {
    /// The file, if it is one that may be a library.
    pub(crate) fn code(&self) -> Option<MappedFile> {
        let is_code = self.is_executable && self.path.starts_with('/') && !self.path.starts_with("/memfd:");
        is_code.then(|| MappedFile {
            start: self.start,
            end: self.end,
            inode: self.inode,
            path: unescape(self.path),
        })
    }
}

/// A path of `maps`: newlines are written `\012`, and ` (deleted)` follows the name of an unlinked file.
fn unescape(path: &str) -> String {
    path.strip_suffix(" (deleted)")
        .unwrap_or(path)
        .replace("\\012", "\n")
}

/// Reads a list of mappings piece by piece; see [`ProcessDirectory::mappings`].
pub(crate) fn read_mappings(
    mut list: impl io::Read,
    budget: CpuBudget,
    mut each: impl FnMut(Mapping<'_>) -> bool,
) -> io::Result<MapsEnd> {
    let mut buffer = vec![0; LINES];
    let (mut filled, mut before) = (0, 0);
    loop {
        let count = match list.read(&mut buffer[filled..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        filled += count;
        before += count;
        // Whole lines; at the end, what is left.
        let end = match memchr::memrchr(b'\n', &buffer[..filled]) {
            Some(at) if count > 0 => at + 1,
            None if count > 0 => 0,
            _ => filled,
        };
        for line in buffer[..end].split(|byte| *byte == b'\n') {
            // A path may be no text; all before it is.
            let line = String::from_utf8_lossy(line);
            if !parse_line(&line).is_none_or(&mut each) {
                return Ok(MapsEnd::Enough);
            }
        }
        buffer.copy_within(end..filled, 0);
        filled -= end;
        if count == 0 {
            return Ok(MapsEnd::Whole);
        }
        if before > MAPS_BYTES {
            return Ok(MapsEnd::Cut(Limit::Maps));
        }
        if budget.is_spent() {
            return Ok(MapsEnd::Cut(Limit::SearchTime));
        }
        if filled == buffer.len() {
            // A path may be longer than what is read at once.
            buffer.resize(2 * filled, 0);
        }
    }
}

impl ProcessDirectory {
    /// Calls `each` on the mappings of the process until it returns `false`, time is over or the list is too long.
    pub(crate) fn mappings(
        &self,
        budget: CpuBudget,
        each: impl FnMut(Mapping<'_>) -> bool,
    ) -> io::Result<MapsEnd> {
        read_mappings(self.open_text("maps")?, budget, each)
    }

    /// Whether the process has a file mapped, as far as time allows to tell.
    pub(crate) fn maps_file(&self, file: FileKey, budget: CpuBudget) -> bool {
        let device = (rustix::fs::major(file.device), rustix::fs::minor(file.device));
        let end = self.mappings(budget, |mapping| {
            (mapping.device, mapping.inode) != (device, file.inode)
        });
        matches!(end, Ok(MapsEnd::Enough))
    }

    /// The distinct files that the process maps as code, each with one of those mappings, and why there are no more.
    pub(crate) fn mapped_files(&self, budget: CpuBudget) -> io::Result<(Vec<MappedFile>, MapsEnd)> {
        let mut files = BTreeMap::new();
        let end = self.mappings(budget, |mapping| {
            if let Some(file) = mapping.code() {
                files.entry((mapping.device, mapping.inode)).or_insert(file);
            }
            files.len() <= MAPPED_FILES
        })?;
        let end = match end {
            MapsEnd::Enough => MapsEnd::Cut(Limit::MappedFiles),
            end => end,
        };
        Ok((files.into_values().take(MAPPED_FILES).collect(), end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
55d0c8a00000-55d0c8a02000 r--p 00000000 fe:00 1234 /usr/bin/python3
55d0c8a02000-55d0c8a03000 r-xp 00002000 fe:00 1234 /usr/bin/python3
00400000-00401000 r-xp 00000000 00:2f 99999999999 /srv/a dir/lib nccl.so.2 (deleted)
7f0000000000-7f0000001000 r-xp 00000000 00:01 77 /memfd:jit (deleted)
7ffd1c5f2000-7ffd1c5f4000 r-xp 00000000 00:00 0 [vdso]
7ffd1c5f6000-7ffd1c5f7000 rw-p 00000000 00:00 0 
rubbish
7f-zz r-xp 0 0 1 /x
";

    #[test]
    fn code_of_files_is_told_from_the_rest() {
        let mappings: Vec<_> = MAPS.lines().filter_map(parse_line).collect();
        assert_eq!(mappings.len(), 6);
        assert_eq!((mappings[3].device, mappings[3].inode), ((0, 1), 77));
        assert_eq!(mappings[5].path, "");
        let files: Vec<_> = mappings.iter().filter_map(Mapping::code).collect();
        assert_eq!(
            files,
            [
                MappedFile {
                    start: 0x55d0_c8a0_2000,
                    end: 0x55d0_c8a0_3000,
                    inode: 1234,
                    path: "/usr/bin/python3".into()
                },
                MappedFile {
                    start: 0x40_0000,
                    end: 0x40_1000,
                    inode: 99_999_999_999,
                    path: "/srv/a dir/lib nccl.so.2".into()
                },
            ]
        );
    }

    #[test]
    fn a_list_that_is_too_long_is_cut() {
        let budget = CpuBudget::of(std::time::Duration::from_secs(60));
        let mut lines = 0;
        let end = read_mappings(io::repeat(b'\n'), budget, |_| true).unwrap();
        assert_eq!(end, MapsEnd::Cut(Limit::Maps));
        // A line that never ends takes no more.
        let end = read_mappings(io::repeat(b'x'), budget, |_| true).unwrap();
        assert_eq!(end, MapsEnd::Cut(Limit::Maps));
        let count = |_: Mapping<'_>| {
            lines += 1;
            true
        };
        assert_eq!(
            read_mappings(MAPS.as_bytes(), budget, count).unwrap(),
            MapsEnd::Whole
        );
        assert_eq!(lines, 6);
        let over = CpuBudget::of(std::time::Duration::ZERO);
        let end = read_mappings(MAPS.as_bytes(), over, |_| true).unwrap();
        assert_eq!(end, MapsEnd::Cut(Limit::SearchTime));
    }

    proptest::proptest! {
        #[test]
        fn any_line_is_survived(text in "\\PC*", tail in "[0-9a-f-]{0,20} r-xp 0 0:0 1 /[ -~]{0,30}") {
            let _ = parse_line(&text).and_then(|mapping| mapping.code());
            let _ = parse_line(&tail).and_then(|mapping| mapping.code());
        }
    }
}
