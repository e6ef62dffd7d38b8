//! Archives that the kernel unpacks as its first file system: `cpio`, format "newc" (Documentation/driver-api/early-userspace/
//! buffer-format.rst). Archives that follow one another make one file system; later entries replace earlier ones.

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use fs_err as fs;

/// A header, then the name, then the content start at multiples of this.
const ALIGNMENT: usize = 4;
/// Length of a header: a magic number and 13 fields of eight hexadecimal digits.
const HEADER: usize = 6 + 13 * 8;
/// Whole archives are padded to this, so that they can be put one after another.
const BLOCK: usize = 512;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;

#[derive(Debug)]
enum Content {
    Directory,
    Bytes(Vec<u8>),
    Copy(PathBuf),
    Link(String),
}

#[derive(Debug)]
struct Entry {
    mode: u32,
    content: Content,
}

/// A file system to be.
#[derive(Debug, Default)]
pub(super) struct Archive {
    entries: BTreeMap<String, Entry>,
}

/// The name that a path of a system has where `/bin`, `/sbin` and `/lib*` are links into `/usr`, as they are in the guest: an
/// entry below a link's own name would replace the link. Relative to the root.
pub(super) fn merged(path: &str) -> String {
    let path = path.trim_matches('/');
    let first = path.split('/').next().unwrap_or_default();
    if MERGED.contains(&first) {
        format!("usr/{path}")
    } else {
        path.to_owned()
    }
}

/// Folders of the root that are links into `/usr`.
pub(super) const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

impl Archive {
    fn put(&mut self, path: &str, mode: u32, content: Content) {
        let path = merged(path);
        let mut parent = path.as_str();
        while let Some((above, _)) = parent.rsplit_once('/') {
            self.entries.entry(above.to_owned()).or_insert(Entry {
                mode: DIRECTORY | 0o755,
                content: Content::Directory,
            });
            parent = above;
        }
        self.entries.insert(path, Entry { mode, content });
    }

    /// An empty folder.
    pub(super) fn directory(&mut self, path: &str) {
        self.put(path, DIRECTORY | 0o755, Content::Directory);
    }

    /// A file with `bytes` in it that may be executed.
    pub(super) fn bytes(&mut self, path: &str, bytes: impl Into<Vec<u8>>) {
        self.put(path, REGULAR | 0o755, Content::Bytes(bytes.into()));
    }

    /// A copy of the host's `file` that may be executed. It is read when the archive is written.
    pub(super) fn copy(&mut self, path: &str, file: &Path) {
        self.put(path, REGULAR | 0o755, Content::Copy(file.to_owned()));
    }

    /// A symbolic link whose name is exactly `path`, even if that is one of [`MERGED`].
    pub(super) fn link(&mut self, path: &str, target: &str) {
        let entry = Entry {
            mode: SYMLINK | 0o777,
            content: Content::Link(target.to_owned()),
        };
        if MERGED.contains(&path) {
            self.entries.insert(path.to_owned(), entry);
        } else {
            self.put(path, entry.mode, entry.content);
        }
    }

    /// Whether there is an entry of this name.
    pub(super) fn contains(&self, path: &str) -> bool {
        self.entries.contains_key(&merged(path))
    }

    /// Everything below the host's `folder`, at `path`.
    pub(super) fn tree(&mut self, path: &str, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = format!("{path}/{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.tree(&name, &entry.path())?;
            } else {
                self.copy(&name, &entry.path());
            }
        }
        Ok(())
    }

    /// Writes the archive. Entries are in the order of their names, so folders stand before what is in them, and the same
    /// entries give the same bytes.
    pub(super) fn write(&self, out: &mut impl Write) -> Result<()> {
        let mut written = 0;
        for (index, (name, entry)) in self.entries.iter().enumerate() {
            let copied;
            let content: &[u8] = match &entry.content {
                Content::Directory => &[],
                Content::Bytes(bytes) => bytes,
                Content::Copy(file) => {
                    copied = fs::read(file)?;
                    &copied
                }
                Content::Link(target) => target.as_bytes(),
            };
            written += member(out, index + 1, entry.mode, name, content)?;
        }
        written += member(out, 0, 0, "TRAILER!!!", &[])?;
        out.write_all(&vec![0; written.next_multiple_of(BLOCK) - written])?;
        Ok(())
    }
}

/// Writes one entry; returns its length.
fn member(out: &mut impl Write, inode: usize, mode: u32, name: &str, content: &[u8]) -> Result<usize> {
    let number =
        |what: usize| u32::try_from(what).with_context(|| format!("{name} is too large for an archive"));
    let fields = [
        number(inode)?,
        mode,
        0, // user
        0, // group
        1, // links to it
        0, // time of change: the same for all, so that archives can be compared
        number(content.len())?,
        0, // device that holds it, major and minor
        0,
        0, // device that it is, major and minor
        0,
        number(name.len() + 1)?,
        0, // check sum, in another format only
    ];
    let mut header = b"070701".to_vec();
    for field in fields {
        header.extend(format!("{field:08X}").bytes());
    }
    debug_assert_eq!(header.len(), HEADER);
    header.extend(name.bytes());
    header.push(0);
    header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
    out.write_all(&header)?;
    out.write_all(content)?;
    let padding = content.len().next_multiple_of(ALIGNMENT) - content.len();
    out.write_all(&[0; ALIGNMENT][..padding])?;
    Ok(header.len() + content.len() + padding)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, modes and contents of an archive.
    fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let digits = std::str::from_utf8(&bytes[6 + index * 8..14 + index * 8]).unwrap();
                u32::from_str_radix(digits, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[HEADER..HEADER + name_size - 1].to_vec()).unwrap();
            if name == "TRAILER!!!" {
                return entries;
            }
            let start = (HEADER + name_size).next_multiple_of(ALIGNMENT);
            entries.push((name, mode, bytes[start..start + size].to_vec()));
            bytes = &bytes[(start + size).next_multiple_of(ALIGNMENT)..];
        }
    }

    #[test]
    fn what_is_put_in_is_read_back_below_merged_folders() {
        let mut archive = Archive::default();
        archive.link("bin", "usr/bin");
        archive.bytes("/bin/tool", *b"12345");
        archive.directory("/proc");
        archive.link("/bin/other", "tool");
        assert!(archive.contains("/usr/bin/tool") && !archive.contains("/usr/bin/none"));
        let mut bytes = Vec::new();
        archive.write(&mut bytes).unwrap();
        assert_eq!(bytes.len() % BLOCK, 0);
        let expected = [
            ("bin", 0o120_777, "usr/bin"),
            ("proc", 0o040_755, ""),
            ("usr", 0o040_755, ""),
            ("usr/bin", 0o040_755, ""),
            ("usr/bin/other", 0o120_777, "tool"),
            ("usr/bin/tool", 0o100_755, "12345"),
        ];
        let expected = expected.map(|(name, mode, text)| (name.to_owned(), mode, text.as_bytes().to_vec()));
        assert_eq!(read(&bytes), expected);
    }

    #[test]
    fn only_whole_names_are_merged() {
        assert_eq!(merged("/lib/x"), "usr/lib/x");
        assert_eq!(merged("/libexec/x"), "libexec/x");
        assert_eq!(merged("/usr/lib/x"), "usr/lib/x");
        assert_eq!(merged("/test/lib"), "test/lib");
    }
}
