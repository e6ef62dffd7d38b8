//! Finding the communication library of a running process.
//!
//! The library is the file *mapped by that process*: found in `/proc/<pid>/maps`, opened through
//! `/proc/<pid>/map_files/<range>`, so that it is the right one in another mount namespace, in an overlay, in a copied virtual
//! environment, and after it was deleted or replaced on disk.

use std::{fmt::Write as _, fs::File, io, path::PathBuf};

use ringsight_records::PROBE_SYMBOLS;

pub use crate::procfs::FileKey;
use crate::{
    ask,
    elf::{Blocks, ElfError, Image, Symbol},
    error::AttachError,
    limits::{ANSWER_TIME, CpuBudget, LeftOut, Limit, SEARCH_TIME},
    procfs::{self, MappedFile, MapsEnd, ProcessDirectory},
    signature, version,
};

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

/// Finds the library of `pid`: one with probe functions if there is any, else one that exports `ncclAllReduce`.
///
/// # Errors
/// Nothing found, or no right to look; see [`AttachError`].
pub fn find(pid: u32) -> Result<Library, AttachError> {
    find_counting(pid, &mut LeftOut::default())
}

/// The same; counts what was left out of the search.
///
/// # Errors
/// As for [`find`].
pub fn find_counting(pid: u32, left_out: &mut LeftOut) -> Result<Library, AttachError> {
    let find = move || {
        let mut left_out = LeftOut::default();
        let found = ProcessDirectory::open(pid)
            .map_err(|error| process_error(pid, "maps", &error))
            .and_then(|directory| find_within(&directory, CpuBudget::of(SEARCH_TIME), &mut left_out));
        (found, left_out)
    };
    let Some((found, counted)) = ask::about(pid, ANSWER_TIME, find) else {
        let limit = Limit::AnswerTime;
        left_out.count(limit);
        return Err(AttachError::Limit { pid, limit });
    };
    left_out.add(&counted);
    found
}

/// The same, as far as time allows; counts what was left out.
pub(crate) fn find_within(
    directory: &ProcessDirectory,
    budget: CpuBudget,
    left_out: &mut LeftOut,
) -> Result<Library, AttachError> {
    let pid = directory.pid();
    let (mut files, end) = directory
        .mapped_files(budget)
        .map_err(|error| process_error(pid, "maps", &error))?;
    if files.is_empty() && end == MapsEnd::Whole {
        return Err(AttachError::Gone { pid });
    }
    // A library called *nccl* is most likely the one, and most processes map hundreds of files.
    files.sort_by_key(|file| !is_likely(&file.path));

    let mut search = Search {
        blocks: Blocks::default(),
        budget,
        limit: None,
        left_out,
    };
    if let MapsEnd::Cut(limit) = end {
        search.reached(limit);
    }
    let mut stock = None;
    let mut looked_at = Vec::new();
    let mut stripped = None;
    let mut denied = None;
    for mapped in &files {
        if budget.is_spent() {
            search.reached(Limit::SearchTime);
            break;
        }
        let file = match directory.open_mapped(mapped) {
            Ok(file) => file,
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied {
                    denied = Some(error);
                }
                continue;
            }
        };
        match search.examine(&file, stock.is_some(), is_likely(&mapped.path)) {
            Found::Nothing => {}
            Found::NoSymbols => stripped = Some(PathBuf::from(&mapped.path)),
            Found::Library(about) => {
                let library = about.of_file(mapped, file)?;
                if library.flavour == Flavour::Instrumented {
                    return Ok(library);
                }
                stock = Some(library);
            }
            Found::NoLibraryFile => continue,
        }
        looked_at.push(mapped.path.clone());
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
    match search.limit {
        Some(limit) => Err(AttachError::Limit { pid, limit }),
        None => Err(AttachError::NoLibrary { pid, looked_at }),
    }
}

/// A search through the files of one process.
struct Search<'a> {
    blocks: Blocks,
    budget: CpuBudget,
    /// The first limit that was reached.
    limit: Option<Limit>,
    left_out: &'a mut LeftOut,
}

/// What a file is.
enum Found {
    /// No ELF file.
    NoLibraryFile,
    /// None of ours.
    Nothing,
    /// It is called as a library, and has no symbols.
    NoSymbols,
    Library(About),
}

/// What a library's file says.
struct About {
    flavour: Flavour,
    build_id: String,
    version: u32,
    symbols: Vec<Symbol>,
}

impl Search<'_> {
    fn reached(&mut self, limit: Limit) {
        self.left_out.count(limit);
        self.limit.get_or_insert(limit);
    }

    /// Looks into a file, for probe functions alone if `has_stock`.
    fn examine(&mut self, file: &File, has_stock: bool, is_likely: bool) -> Found {
        let mut blocks = std::mem::take(&mut self.blocks);
        let found = Image::open(file, &mut blocks, self.budget)
            .map(|mut image| self.examine_image(&mut image, has_stock, is_likely));
        self.blocks = blocks;
        match found {
            Ok(Ok(found)) => found,
            Ok(Err(ElfError::Limit(limit))) | Err(ElfError::Limit(limit)) => {
                self.reached(limit);
                Found::Nothing
            }
            // Headers that make sense, and tables that lead outside the file.
            Ok(Err(_)) => Found::Nothing,
            Err(_) => Found::NoLibraryFile,
        }
    }

    fn examine_image(
        &mut self,
        image: &mut Image<'_, File>,
        has_stock: bool,
        is_likely: bool,
    ) -> Result<Found, ElfError> {
        let is_whole = |found: &[Symbol]| found.len() == PROBE_SYMBOLS.len();
        let is_stock = |calls: &[Symbol]| calls.iter().any(|symbol| symbol.name == "ncclAllReduce");
        let mut probes = image.exports(&PROBE_SYMBOLS)?;
        if is_whole(&probes) {
            return Ok(Found::Library(self.about(image, Flavour::Instrumented, probes)));
        }
        let mut calls = if has_stock {
            Vec::new()
        } else {
            image.exports(&signature::NAMES)?
        };
        if probes.is_empty() && calls.is_empty() {
            let all = [&PROBE_SYMBOLS[..], &signature::NAMES].concat();
            let of_ours = |symbol: &Symbol| PROBE_SYMBOLS.contains(&&*symbol.name);
            (probes, calls) = image.linked_in(&all)?.into_iter().partition(of_ours);
            if is_whole(&probes) {
                return Ok(Found::Library(self.about(image, Flavour::Instrumented, probes)));
            }
        }
        if !has_stock && is_stock(&calls) {
            return Ok(Found::Library(self.about(image, Flavour::Stock, calls)));
        }
        Ok(if !has_stock && is_likely && !image.has_symbols()? {
            Found::NoSymbols
        } else {
            Found::Nothing
        })
    }

    fn about(&mut self, image: &mut Image<'_, File>, flavour: Flavour, symbols: Vec<Symbol>) -> About {
        // A library without build id or version is one all the same.
        let id = image.build_id();
        let id = self.known(id);
        let version = version::of(image);
        About {
            flavour,
            build_id: id.iter().fold(String::new(), |mut text, byte| {
                // Writing to a string does not fail.
                let _ = write!(text, "{byte:02x}");
                text
            }),
            version: self.known(version),
            symbols,
        }
    }

    /// What is known of a file; nothing past a limit or if it is damaged.
    fn known<T: Default>(&mut self, result: Result<T, ElfError>) -> T {
        result.unwrap_or_else(|error| {
            if let ElfError::Limit(limit) = error {
                self.left_out.count(limit);
            }
            T::default()
        })
    }
}

impl About {
    fn of_file(self, mapped: &MappedFile, file: File) -> Result<Library, AttachError> {
        let path = PathBuf::from(&mapped.path);
        let about = rustix::fs::fstat(&file).map_err(|error| AttachError::Library {
            path: path.clone(),
            problem: error.to_string(),
        })?;
        Ok(Library {
            path,
            key: FileKey::of(&about),
            file,
            flavour: self.flavour,
            build_id: self.build_id,
            version: self.version,
            symbols: self.symbols,
        })
    }
}

/// What a failure to read `/proc/<pid>/<what>` means.
pub(crate) fn process_error(pid: u32, what: &'static str, error: &io::Error) -> AttachError {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) if !procfs::is_shown(pid) => {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_name_tells_which_file_is_looked_at_first() {
        assert!(is_likely("/srv/a dir/lib nccl.so.2") && is_likely("libringsight_comm.so"));
        assert!(!is_likely("/opt/nccl/bin/python3"));
    }

    #[test]
    fn a_process_without_the_library_is_told_what_was_looked_at() {
        let own = ProcessDirectory::own().unwrap();
        let budget = CpuBudget::of(Duration::from_secs(60));
        let found = find_within(&own, budget, &mut LeftOut::default());
        let Err(AttachError::NoLibrary { looked_at, .. }) = found else {
            panic!("this test links no communication library")
        };
        assert!(
            looked_at.iter().any(|path| path.contains("libc.so")),
            "{looked_at:?}"
        );
    }
}
