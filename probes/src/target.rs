//! Finding the communication library of a running process.
//!
//! The library is the file *mapped by that process*: found in `/proc/<pid>/maps`, opened through
//! `/proc/<pid>/map_files/<range>`, so that it is the right one in another mount namespace, in an overlay, in a copied virtual
//! environment, and after it was deleted or replaced on disk.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::{
    elf::{Image, Symbol},
    error::AttachError,
    signature, version,
};

/// Identity of a file, whatever its names: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
}

/// What kind of library was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// It has our probe functions.
    Instrumented,
    /// It exports `nccl*` functions alone.
    Stock,
}

/// The communication library of a process.
#[derive(Debug)]
pub struct Library {
    /// As the process's own mount namespace names it.
    pub path: PathBuf,
    /// The mapped file.
    pub file: File,
    /// Which file it is.
    pub key: FileKey,
    /// With or without probe functions.
    pub flavour: Flavour,
    /// Build id of the linker, in hex; empty if it has none.
    pub build_id: String,
    /// `ncclGetVersion` number, 0 if unknown.
    pub version: u32,
    /// Functions that can be probed: the probe functions, or the `nccl*` functions whose signature is known.
    pub symbols: Vec<Symbol>,
}

/// One mapped file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    path: String,
}

/// Finds the library of `pid`: one with probe functions if there is any, else one that exports `ncclAllReduce`.
///
/// # Errors
/// Nothing found, or no right to look; see [`AttachError`].
pub fn find(pid: u32) -> Result<Library, AttachError> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))
        .map_err(|error| process_error(pid, "maps", &error))?;
    let mut files = mapped_files(&maps);
    if files.is_empty() {
        return Err(AttachError::Gone { pid });
    }
    // A library called *nccl* is most likely the one, and most processes map hundreds of files.
    files.sort_by_key(|mapping| !is_likely(&mapping.path));

    let mut stock = None;
    let mut looked_at = Vec::new();
    let mut stripped = None;
    let mut denied = None;
    for mapping in &files {
        let file = match open(pid, mapping) {
            Ok(file) => file,
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    denied = Some(error);
                }
                continue;
            }
        };
        let Ok(Some(image)) = Image::map(&file) else {
            continue;
        };
        looked_at.push(mapping.path.clone());
        let found = image.find(&ringsight_records::PROBE_SYMBOLS);
        if found.len() == ringsight_records::PROBE_SYMBOLS.len() {
            return library(mapping, file, &image, Flavour::Instrumented, found);
        }
        if stock.is_some() {
            continue;
        }
        let calls = image.find(&signature::NAMES);
        if calls.iter().any(|symbol| symbol.name == "ncclAllReduce") {
            stock = Some(library(mapping, file, &image, Flavour::Stock, calls)?);
        } else if is_likely(&mapping.path) && !image.has_symbols() {
            stripped = Some(PathBuf::from(&mapping.path));
        }
    }
    if let Some(library) = stock {
        return Ok(library);
    }
    if let Some(path) = stripped {
        return Err(AttachError::Stripped { pid, path });
    }
    if looked_at.is_empty()
        && let Some(error) = denied
    {
        return Err(process_error(pid, "map_files", &error));
    }
    Err(AttachError::NoLibrary { pid, looked_at })
}

/// What a failure to read `/proc/<pid>/<what>` means.
pub(crate) fn process_error(pid: u32, what: &'static str, error: &io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) if !Path::new(&format!("/proc/{pid}")).exists() => {
            // SAFETY: signal 0 asks, and does nothing.
            let asked = unsafe { libc::kill(pid.cast_signed(), 0) };
            // A `/proc` mounted with `hidepid` has no entry for what it hides.
            if asked < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::EPERM) {
                AttachError::denied(pid, what)
            } else {
                AttachError::Gone { pid }
            }
        }
        Some(libc::ESRCH) => AttachError::Gone { pid },
        Some(libc::EPERM | libc::EACCES) => AttachError::denied(pid, what),
        _ => AttachError::Io {
            pid,
            what,
            error: error.to_string(),
        },
    }
}

fn is_likely(path: &str) -> bool {
    path.rsplit('/')
        .next()
        .is_some_and(|name| name.contains("nccl") || name.contains("ringsight"))
}

/// The distinct files of a `maps` text that have an executable mapping, each with one of those mappings.
fn mapped_files(maps: &str) -> Vec<Mapping> {
    let mut files = BTreeMap::new();
    for line in maps.lines() {
        let mut fields = line.splitn(6, ' ');
        let (Some(range), Some(permissions), Some(_offset), Some(device), Some(inode), Some(path)) = (
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
            fields.next(),
        ) else {
            continue;
        };
        let path = path.trim_start();
        if !permissions.contains('x') || !path.starts_with('/') || path.starts_with("/memfd:") {
            continue;
        }
        let Some((start, end)) = range.split_once('-') else {
            continue;
        };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else {
            continue;
        };
        files
            .entry((device.to_owned(), inode.to_owned()))
            .or_insert_with(|| Mapping {
                start,
                end,
                path: unescape(path),
            });
    }
    files.into_values().collect()
}

/// A path of `maps`: newlines are written `\012`, and ` (deleted)` follows the name of an unlinked file.
fn unescape(path: &str) -> String {
    path.strip_suffix(" (deleted)")
        .unwrap_or(path)
        .replace("\\012", "\n")
}

fn open(pid: u32, mapping: &Mapping) -> io::Result<File> {
    let through_map = format!("/proc/{pid}/map_files/{:x}-{:x}", mapping.start, mapping.end);
    File::open(through_map).or_else(|error| {
        // `map_files` wants CAP_CHECKPOINT_RESTORE. The path as the process sees it names the same file unless it was
        // deleted or replaced since, which the check below finds out.
        let named = File::open(format!("/proc/{pid}/root{}", mapping.path)).map_err(|_| error)?;
        let metadata = named.metadata()?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let same = maps.lines().any(|line| {
            line.split_whitespace().nth(4) == Some(metadata.ino().to_string().as_str())
                && line.contains(&mapping.path)
        });
        if same {
            Ok(named)
        } else {
            Err(io::ErrorKind::PermissionDenied.into())
        }
    })
}

fn library(
    mapping: &Mapping,
    file: File,
    image: &Image,
    flavour: Flavour,
    symbols: Vec<Symbol>,
) -> Result<Library, AttachError> {
    let metadata = file.metadata().map_err(|error| AttachError::Library {
        path: PathBuf::from(&mapping.path),
        problem: error.to_string(),
    })?;
    let mut build_id = String::new();
    for byte in image.build_id() {
        let _ = write!(build_id, "{byte:02x}");
    }
    Ok(Library {
        path: PathBuf::from(&mapping.path),
        key: FileKey {
            device: metadata.dev(),
            inode: metadata.ino(),
        },
        file,
        flavour,
        build_id,
        version: version::of(image),
        symbols,
    })
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
rubbish
7f-zz r-xp 0 0 1 /x
";

    #[test]
    fn maps_give_one_executable_mapping_per_file() {
        let files = mapped_files(MAPS);
        assert_eq!(
            files,
            [
                Mapping {
                    start: 0x40_0000,
                    end: 0x40_1000,
                    path: "/srv/a dir/lib nccl.so.2".into()
                },
                Mapping {
                    start: 0x55d0_c8a0_2000,
                    end: 0x55d0_c8a0_3000,
                    path: "/usr/bin/python3".into()
                },
            ]
        );
        assert!(is_likely(&files[0].path) && !is_likely(&files[1].path));
    }

    #[test]
    fn a_process_without_the_library_is_told_what_was_looked_at() {
        let Err(AttachError::NoLibrary { looked_at, .. }) = find(std::process::id()) else {
            panic!("this test links no communication library")
        };
        assert!(
            looked_at.iter().any(|path| path.contains("libc.so")),
            "{looked_at:?}"
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_survived(text in "\\PC*", tail in "[0-9a-f-]{0,20} r-xp 0 0:0 1 /[ -~]{0,30}") {
            let _ = mapped_files(&format!("{text}\n{tail}"));
        }
    }
}
