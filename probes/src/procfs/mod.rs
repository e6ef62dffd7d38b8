//! `/proc/PID` of a target, and the files that it leads to: the one place that opens anything of a target.
//!
//! [`ProcessDirectory`] holds a descriptor of the directory. What is opened through it is of that one process, or the process is gone:
//! another one that gets its number later has another directory.
//!
//! Invariants:
//! - No open waits: a file is opened for reading only once an `O_PATH` descriptor of it has shown a regular file.
//! - No read is without a limit: [`limits`](crate::limits) holds them all.
//! - No text is trusted: names may hold anything, numbers may be missing.
#![expect(
    clippy::disallowed_methods,
    reason = "the one module that opens files of a target"
)]

use std::{
    ffi::{CStr, CString},
    fs::File,
    io,
    mem::MaybeUninit,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::OnceLock,
};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, StatxFlags};

use crate::limits::{ENVIRONMENT_BYTES, Limit, TEXT_BYTES};

mod environment;
mod maps;
mod text;

pub(crate) use environment::Environment;
pub(crate) use maps::{MappedFile, MapsEnd, read_mappings};
use text::parse_end;
pub(crate) use text::{parse_stat, status_field};

/// Flags of every open: nothing waits, becomes a terminal, or is inherited.
const OPEN: OFlags = OFlags::CLOEXEC
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::RDONLY);
/// Only looks at what a name leads to: the file's own `open` is not called.
const LOOK: OFlags = OFlags::CLOEXEC.union(OFlags::PATH);
/// Bytes of a text that one `read` asks for: the kernel writes such texts by the memory page.
const PIECE: usize = 4096;

/// `/proc/PID` of one process, held open.
#[derive(Debug)]
pub(crate) struct ProcessDirectory {
    pid: u32,
    directory: OwnedFd,
    started: OnceLock<u64>,
    pid_namespace: OnceLock<(u64, u64)>,
}

/// What the kernel says of a file, whatever its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileKey {
    /// Device.
    pub device: u64,
    /// Inode.
    pub inode: u64,
}

impl FileKey {
    pub(crate) fn of(about: &Stat) -> Self {
        Self {
            device: about.st_dev,
            inode: about.st_ino,
        }
    }
}

/// A text that may have been longer than its limit.
#[derive(Debug, Default)]
pub(crate) struct Read {
    pub(crate) bytes: Vec<u8>,
    pub(crate) is_cut: bool,
}

impl ProcessDirectory {
    /// That of the process, or of the thread, with this number.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        Self::named(&format!("/proc/{pid}"), pid)
    }

    /// That of this process. By `/proc/self`: the number that it has in its own pid namespace may be another process's in the
    /// namespace that `/proc` was mounted for.
    pub(crate) fn own() -> io::Result<Self> {
        Self::named("/proc/self", std::process::id())
    }

    fn named(path: &str, pid: u32) -> io::Result<Self> {
        let flags = OFlags::CLOEXEC | OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self {
            pid,
            directory,
            started: OnceLock::new(),
            pid_namespace: OnceLock::new(),
        })
    }

    /// The number that it was opened by.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Opens a text of the kernel.
    pub(crate) fn open_text(&self, name: &str) -> io::Result<File> {
        let file = rustix::fs::openat(&self.directory, name, OPEN, Mode::empty())?;
        Ok(file.into())
    }

    fn read(&self, name: &str, limit: usize) -> io::Result<Read> {
        read(&self.open_text(name)?, limit)
    }

    /// A short text of the kernel.
    pub(crate) fn text(&self, name: &str) -> io::Result<String> {
        let read = self.read(name, TEXT_BYTES)?;
        if read.is_cut {
            return Err(io::Error::other(Limit::Text));
        }
        // The name of a process is any bytes.
        Ok(String::from_utf8_lossy(&read.bytes).into_owned())
    }

    /// When it started, clock ticks since boot; `None` if it did not exist any more, or was a zombie, when this was asked first. That asks
    /// what a process can keep back: see [`ask`](crate::ask).
    pub(crate) fn start_time(&self) -> Option<u64> {
        if let Some(started) = self.started.get() {
            return Some(*started);
        }
        let started = parse_stat(&self.text("stat").ok()?)?;
        Some(*self.started.get_or_init(|| started))
    }

    /// Whether its main thread has memory. A thread that is ending has none any more, a zombie neither.
    pub(crate) fn has_memory(&self) -> bool {
        // Pages of all mappings come first.
        self.text("statm")
            .is_ok_and(|sizes| sizes.split(' ').next().is_some_and(|pages| pages != "0"))
    }

    /// How it ended, as `waitpid` has it, if it ended badly and its parent has not asked yet.
    pub(crate) fn failure(&self) -> Option<i32> {
        parse_end(&self.text("stat").ok()?).filter(|status| *status != 0)
    }

    /// The environment that it was started with.
    pub(crate) fn environment(&self) -> io::Result<Environment> {
        self.read("environ", ENVIRONMENT_BYTES).map(Environment::new)
    }

    /// The user that it runs as.
    pub(crate) fn effective_user(&self) -> Option<u32> {
        status_field(&self.text("status").ok()?, "Uid:")?
            .split_whitespace()
            .nth(1)?
            .parse()
            .ok()
    }

    /// Device and inode of its pid namespace, which never changes.
    pub(crate) fn pid_namespace(&self) -> io::Result<(u64, u64)> {
        if let Some(namespace) = self.pid_namespace.get() {
            return Ok(*namespace);
        }
        let about = rustix::fs::statat(&self.directory, "ns/pid", AtFlags::empty())?;
        Ok(*self.pid_namespace.get_or_init(|| (about.st_dev, about.st_ino)))
    }

    /// What a link leads to, as the kernel writes it.
    pub(crate) fn link(&self, name: &CStr) -> io::Result<CString> {
        Ok(rustix::fs::readlinkat(&self.directory, name, Vec::new())?)
    }

    /// Opens what a link of the kernel leads to for reading, if that is a regular file.
    fn open_linked(&self, name: &CStr) -> io::Result<Linked> {
        let path = rustix::fs::openat(&self.directory, name, LOOK, Mode::empty())?;
        Linked::new(path)
    }

    /// Looks at what descriptor `name` of the process is open on.
    pub(crate) fn descriptor(&self, name: &CStr) -> io::Result<Linked> {
        self.open_linked(&below(c"fd/", name))
    }

    /// What its descriptor `name` is open on, as the kernel writes it.
    pub(crate) fn descriptor_link(&self, name: &CStr) -> io::Result<CString> {
        self.link(&below(c"fd/", name))
    }

    /// Its descriptors.
    pub(crate) fn descriptors(&self) -> io::Result<Descriptors> {
        let flags = OFlags::CLOEXEC | OFlags::RDONLY | OFlags::DIRECTORY;
        let directory = rustix::fs::openat(&self.directory, "fd", flags, Mode::empty())?;
        Ok(Descriptors(directory))
    }

    /// Opens a file that the process maps.
    pub(crate) fn open_mapped(&self, file: &MappedFile) -> io::Result<File> {
        let range = CString::new(format!("map_files/{:x}-{:x}", file.start, file.end))?;
        match self.open_linked(&range) {
            Ok(linked) => linked.open(),
            // `map_files` wants CAP_CHECKPOINT_RESTORE. The path as the process sees it names the same file unless it was
            // deleted or replaced since.
            Err(error) => self.open_in_root(file).map_err(|_| error),
        }
    }

    /// Opens a mapped file by its path below the process's root, if that is the file that is mapped.
    fn open_in_root(&self, file: &MappedFile) -> io::Result<File> {
        let flags = OFlags::CLOEXEC | OFlags::PATH | OFlags::DIRECTORY;
        let root = rustix::fs::openat(&self.directory, "root", flags, Mode::empty())?;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let path = rustix::fs::openat2(&root, &file.path, LOOK, Mode::empty(), resolve)?;
        let linked = Linked::new(path)?;
        // The inode alone: file systems with volumes or layers show one device in `maps` and another one here.
        if linked.key.inode != file.inode {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        linked.open()
    }
}

/// Name `name` in the folder `folder`.
fn below(folder: &CStr, name: &CStr) -> CString {
    let path = [folder.to_bytes(), name.to_bytes()].concat();
    // Neither part has a zero byte.
    CString::new(path).unwrap_or_default()
}

/// What a link leads to, looked at and not opened.
#[derive(Debug)]
pub(crate) struct Linked {
    path: OwnedFd,
    /// Which file it is.
    pub(crate) key: FileKey,
    /// Whether it is a regular file.
    pub(crate) is_regular: bool,
    /// Names that it has.
    pub(crate) links: u32,
}

impl Linked {
    fn new(path: OwnedFd) -> io::Result<Self> {
        // What the kernel knows: a file system of somebody's is not asked.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = rustix::fs::statx(&path, c"", flags, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            path,
            key: FileKey {
                device: rustix::fs::makedev(about.stx_dev_major, about.stx_dev_minor),
                inode: about.stx_ino,
            },
            is_regular: FileType::from_raw_mode(about.stx_mode.into()) == FileType::RegularFile,
            links: about.stx_nlink,
        })
    }

    /// Opens it for reading, if it is a regular file.
    pub(crate) fn open(&self) -> io::Result<File> {
        self.open_with(OPEN)
    }

    /// Opens it for reading and writing, if it is a regular file.
    pub(crate) fn open_writable(&self) -> io::Result<File> {
        self.open_with((OPEN - OFlags::RDONLY) | OFlags::RDWR)
    }

    fn open_with(&self, flags: OFlags) -> io::Result<File> {
        if !self.is_regular {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "no regular file"));
        }
        // The very inode that was looked at.
        let path = format!("/proc/self/fd/{}", self.path.as_raw_fd());
        let file = rustix::fs::openat(CWD, &path, flags, Mode::empty())?;
        Ok(file.into())
    }
}

/// The descriptors of a process, gone through in pieces: a process may have a million of them.
#[derive(Debug)]
pub(crate) struct Descriptors(OwnedFd);

impl Descriptors {
    /// Calls `look` on the names of at least `count` more descriptors, or of all that are left; `true` if these were all.
    pub(crate) fn next(&mut self, count: usize, mut look: impl FnMut(&CStr)) -> io::Result<bool> {
        // The directory's position is the kernel's: who reads on gets the names behind those of the last read. A name and its
        // entry's other fields take 24 bytes.
        let mut buffer = [MaybeUninit::uninit(); 8192];
        let mut entries = RawDir::new(self.0.as_fd(), &mut buffer);
        let mut seen = 0;
        loop {
            // What a read has brought is gone through to its end, or it would be lost.
            if seen >= count && entries.is_buffer_empty() {
                return Ok(false);
            }
            let Some(entry) = entries.next() else {
                return Ok(true);
            };
            let entry = entry?;
            if !entry.file_name().to_bytes().starts_with(b".") {
                seen += 1;
                look(entry.file_name());
            }
        }
    }
}

/// At most `limit` bytes of a text.
fn read(mut file: &File, limit: usize) -> io::Result<Read> {
    use std::io::Read as _;

    let mut bytes = Vec::new();
    let mut piece = [0; PIECE];
    loop {
        let count = match file.read(&mut piece) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        let kept = count.min(limit - bytes.len());
        bytes.extend_from_slice(&piece[..kept]);
        if count == 0 || kept < count {
            return Ok(Read {
                bytes,
                is_cut: kept < count,
            });
        }
    }
}

/// Whether a process runs as the user that this one runs as, by what everybody may read.
pub(crate) fn is_of_this_user(pid: u32) -> bool {
    let user = |directory: io::Result<ProcessDirectory>| directory.ok()?.effective_user();
    let own = user(ProcessDirectory::own());
    own.is_some() && own == user(ProcessDirectory::open(pid))
}

/// Whether `/proc` shows a process with this number.
pub(crate) fn is_shown(pid: u32) -> bool {
    rustix::fs::stat(format!("/proc/{pid}")).is_ok()
}

/// Whether the numbers in `/proc` are those of this process's own pid namespace: then it has one number only.
pub(crate) fn shows_own_namespace() -> bool {
    let numbers = || {
        let status = ProcessDirectory::own()?.text("status")?;
        io::Result::Ok(status_field(&status, "NSpid:").map(|numbers| numbers.split_whitespace().count()))
    };
    matches!(numbers(), Ok(Some(1)))
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Seek as _, Write as _},
        os::unix::fs::symlink,
        time::Duration,
    };

    use super::*;
    use crate::limits::CpuBudget;

    #[test]
    fn a_text_is_cut_at_its_limit() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[b'x'; 100]).unwrap();
        for (limit, length, is_cut) in [(99, 99, true), (100, 100, false), (1000, 100, false)] {
            file.rewind().unwrap();
            let read = read(&file, limit).unwrap();
            assert_eq!((read.bytes.len(), read.is_cut), (length, is_cut), "{limit}");
        }
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
        symlink("/dev/zero", folder.path().join("device")).unwrap();
        for name in ["pipe", "device", "."] {
            let path = rustix::fs::openat(CWD, folder.path().join(name), LOOK, Mode::empty()).unwrap();
            // An open of the pipe for reading would wait for a writer.
            assert!(Linked::new(path).unwrap().open().is_err(), "{name}");
        }
    }

    #[test]
    fn descriptors_come_in_pieces_and_none_is_left_out() {
        let own = ProcessDirectory::own().unwrap();
        let files: Vec<File> = (0..1000).map(|_| tempfile::tempfile().unwrap()).collect();
        let mut descriptors = own.descriptors().unwrap();
        let mut seen = std::collections::BTreeSet::new();
        let mut pieces = 0;
        loop {
            pieces += 1;
            let note = |name: &CStr| {
                seen.insert(name.to_str().unwrap().parse::<i32>().unwrap());
            };
            if descriptors.next(100, note).unwrap() {
                break;
            }
        }
        assert!(pieces > 2, "{pieces}");
        assert!(files.iter().all(|file| seen.contains(&file.as_raw_fd())));
    }

    #[test]
    fn a_mapped_file_is_found_by_its_path_too() {
        let own = ProcessDirectory::own().unwrap();
        let budget = CpuBudget::of(Duration::from_secs(10));
        let (files, _) = own.mapped_files(budget).unwrap();
        let library = files.iter().find(|file| file.path.contains("libc.so")).unwrap();
        let found = own.open_in_root(library).unwrap();
        assert_eq!(rustix::fs::fstat(&found).unwrap().st_ino, library.inode);
        let other = MappedFile {
            inode: library.inode + 1,
            ..library.clone()
        };
        assert!(own.open_in_root(&other).is_err(), "a file that took its place");
    }
}
