//! Another `libnccl.so.2` in this process.
//!
//! With `LD_PRELOAD` the library that a framework was linked with is mapped, too. A function that this library lacks then
//! comes from the other one, which is given a handle that it does not know. So the user is told of the other library, and of
//! the functions that would come from it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{self, Read as _},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use object::{Object as _, ObjectSymbol as _};
use ringsight_comm_base::{log, sync::AtLeastOnce, sys};

/// The names that this library exports.
const EXPORTS: &str = include_str!("../../abi/exports.txt");

/// Files with a name that programs load NCCL by.
const NAME: &str = "libnccl.so";

/// Warns, once, of each other library of NCCL's name that is mapped.
pub(super) fn warn_once() {
    static WARNED: AtLeastOnce = AtLeastOnce::new();
    WARNED.call(|| {
        let maps = sys::read_text("/proc/self/maps").unwrap_or_default();
        let own = (warn_once as fn()) as usize;
        for path in others(&maps, own) {
            let missing = read(&path).map(|file| missing(&file)).unwrap_or_default();
            let path = path.display();
            if missing.is_empty() {
                tracing::warn!(
                    target: log::INIT,
                    "Another NCCL is mapped, {path}: this library has all of its functions, so programs that name none of the \
                     two files call this one"
                );
            } else {
                tracing::warn!(
                    target: log::INIT,
                    "Another NCCL is mapped, {path}, with functions that this library lacks. Calls of these go to the other \
                     library, which does not know this one's handles: {}",
                    missing.join(", ")
                );
            }
        }
    });
}

/// The bytes of a file. No descriptor of a program's standard streams is used, also where the program has closed these.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = sys::above_standard(|| fs::File::open(path))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The files of NCCL's name in `maps`, a text as `/proc/PID/maps` has it, other than the one at address `own`.
fn others(maps: &str, own: usize) -> Vec<PathBuf> {
    let mut files = BTreeMap::new();
    let mut this = None;
    for line in maps.lines() {
        let mut fields = line.splitn(6, ' ').map(str::trim);
        let (Some(range), Some(device), Some(inode), Some(path)) =
            (fields.next(), fields.nth(2), fields.next(), fields.next())
        else {
            continue;
        };
        let bounds = range.split_once('-');
        let bound = |text| usize::from_str_radix(text, 16).ok();
        let Some((start, end)) = bounds.and_then(|(start, end)| Some((bound(start)?, bound(end)?))) else {
            continue;
        };
        let file = (device, inode);
        if (start..end).contains(&own) {
            this = Some(file);
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        if name.starts_with(NAME) && !path.ends_with(" (deleted)") {
            files.entry(file).or_insert_with(|| PathBuf::from(path));
        }
    }
    files.retain(|file, _| Some(*file) != this);
    // One file by two paths, on an overlay.
    let mut seen = BTreeSet::new();
    files
        .into_values()
        .filter(|path| {
            path.metadata()
                .map_or(true, |data| seen.insert((data.dev(), data.ino())))
        })
        .collect()
}

/// The functions of NCCL's names that a library file exports and this library does not.
fn missing(file: &[u8]) -> Vec<String> {
    let ours: BTreeSet<&str> = EXPORTS
        .lines()
        .map(|line| line.split('#').next().unwrap_or_default().trim())
        .collect();
    let Ok(file) = object::File::parse(file) else {
        return Vec::new();
    };
    let theirs: BTreeSet<&str> = file
        .dynamic_symbols()
        .filter(object::ObjectSymbol::is_definition)
        .filter_map(|symbol| symbol.name().ok())
        // A twin is missing where its function is.
        .filter(|name| name.starts_with("nccl") && !ours.contains(name))
        .collect();
    theirs.into_iter().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_of_the_name_are_found_once() {
        let maps = "7f00-7f10 r--p 00000000 08:01 11 /ours/libnccl.so.2\n\
                    7f10-7f20 r-xp 00000000 08:01 11 /ours/libnccl.so.2\n\
                    7f20-7f30 r--p 00000000 08:01 12                 /a folder/libnccl.so.2.30.7\n\
                    7f30-7f40 r-xp 00001000 08:01 12                 /a folder/libnccl.so.2.30.7\n\
                    7f40-7f50 r-xp 00001000 08:01 13 /usr/lib/libnccl-net.so\n\
                    7f50-7f60 r-xp 00001000 08:01 14 /gone/libnccl.so.2 (deleted)\n\
                    7f60-7f70 rw-p 00000000 00:00 0\n\
                    rubbish\n";
        assert_eq!(
            others(maps, 0x7f15),
            [PathBuf::from("/a folder/libnccl.so.2.30.7")]
        );
        assert_eq!(others(maps, 0x7f25), [PathBuf::from("/ours/libnccl.so.2")]);
        assert!(others("", 0).is_empty());
    }

    #[test]
    fn what_is_no_library_has_no_functions() {
        assert!(missing(b"").is_empty());
        assert!(missing(b"\x7fELF\x02\x01\x01").is_empty());
    }
}
