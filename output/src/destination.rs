//! A name in a folder that is held open.

mod resolve;

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, BufWriter, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{Access, AtFlags, FileType, Mode, OFlags, Stat},
    io::Errno,
    rand::GetRandomFlags,
};

/// How a file's name is opened: never through a link, and never waiting for the other end of a pipe.
const OPEN: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);
/// How a file is made: the name must be nobody's.
const MAKE: OFlags = OPEN.union(OFlags::CREATE).union(OFlags::EXCL);
/// Mode of a new file, less the process's umask.
const MODE: Mode = Mode::from_raw_mode(0o666);
/// Buffered bytes of a file that is written as a whole.
const BUFFER: usize = 1 << 18;

/// Why an output cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system's error.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// A symbolic link of another user leads to the file.
    #[error(
        "{} is a symbolic link that user {owner} made, and it could lead anywhere: name the file itself, or remove the link",
        link.display()
    )]
    ForeignLink {
        /// The link.
        link: PathBuf,
        /// The user who owns it.
        owner: u32,
    },
    /// Another user put the file into a folder that several users may write to.
    #[error(
        "user {owner} put it into a folder of several users: name a file in a folder of your own, or remove it"
    )]
    ForeignFile {
        /// The user who owns the file.
        owner: u32,
    },
    /// The file has another name, which may be a file that nobody meant.
    #[error(
        "it has other names (hard links), and its folder is not yours alone: name another file, or remove this name of it"
    )]
    OtherNames,
    /// A pipe that no process reads.
    #[error("it is a pipe that no process reads: start the reader first")]
    NoReader,
    /// A folder, a socket or a block device; or a pipe or device where only a file will do.
    #[error("it is not a regular file")]
    NotRegular,
}

impl From<Errno> for Error {
    fn from(error: Errno) -> Self {
        Self::Io(error.into())
    }
}

type Result<T, E = Error> = std::result::Result<T, E>;

/// The destination of an output: a name in a folder that is held open, or an open pipe or device.
#[derive(Debug)]
pub struct Destination {
    /// The path as the user wrote it.
    path: PathBuf,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Name(Name),
    /// A pipe, a device, or what the process has open already (`/dev/stdout`). Opened once: the reader of a pipe that is closed has
    /// seen its end.
    Stream(File),
}

/// A name at which a regular file is, or nothing.
#[derive(Debug)]
struct Name {
    folder: OwnedFd,
    name: OsString,
    /// The owner of the folder, if others than this user and root may put names into it.
    shared: Option<u32>,
    /// This process's user.
    own: u32,
}

impl Destination {
    /// Finds the destination that a path names, and opens it if it is a pipe or a device. Makes no file.
    ///
    /// # Errors
    /// The folder is not there, a link of another user leads there, it is a folder or a socket, or nobody reads the pipe.
    pub fn resolve(path: impl AsRef<Path>) -> Result<Self> {
        resolve::destination(path.as_ref(), own(), false)
    }

    /// Like [`resolve`](Self::resolve), but makes the folders that are missing.
    ///
    /// # Errors
    /// Those of [`resolve`](Self::resolve); a folder cannot be made.
    pub fn resolve_and_make_folders(path: impl AsRef<Path>) -> Result<Self> {
        resolve::destination(path.as_ref(), own(), true)
    }

    /// The path as the user wrote it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a pipe or a device, which is written to and neither replaced nor continued.
    #[must_use]
    pub fn is_stream(&self) -> bool {
        matches!(self.kind, Kind::Stream(_))
    }

    /// Whether a regular file is there now.
    #[must_use]
    pub fn holds_file(&self) -> bool {
        matches!(&self.kind, Kind::Name(name) if name.stat().is_ok())
    }

    /// Whether writing both would write one file, whatever their paths. Two outputs may go to one terminal or `/dev/null`.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let file = |destination: &Self| match &destination.kind {
            Kind::Name(name) => name.stat().ok(),
            Kind::Stream(file) => {
                let about = rustix::fs::fstat(file).ok();
                about.filter(|about| FileType::from_raw_mode(about.st_mode) != FileType::CharacterDevice)
            }
        };
        let id = |about: Stat| (about.st_dev, about.st_ino);
        if let (Kind::Name(one), Kind::Name(two)) = (&self.kind, &other.kind)
            && one.name == two.name
            && let (Ok(one), Ok(two)) = (rustix::fs::fstat(&one.folder), rustix::fs::fstat(&two.folder))
            && id(one) == id(two)
        {
            return true;
        }
        matches!((file(self), file(other)), (Some(one), Some(two)) if id(one) == id(two))
    }

    /// Finds what would keep [`replace`](Self::replace) from working, and changes nothing.
    ///
    /// # Errors
    /// The folder does not let this process make files.
    pub fn check_replace(&self) -> Result<()> {
        match &self.kind {
            Kind::Name(name) => Ok(rustix::fs::accessat(
                &name.folder,
                ".",
                Access::WRITE_OK | Access::EXEC_OK,
                AtFlags::EACCESS,
            )?),
            Kind::Stream(_) => Ok(()),
        }
    }

    /// Finds what would keep [`open`](Self::open) from working, and changes nothing.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn check_open(&self) -> Result<()> {
        match &self.kind {
            Kind::Name(name) if name.stat().is_ok() => name.open_there().map(drop),
            _ => self.check_replace(),
        }
    }

    /// Has `write` write the whole file: readers see the former file or all of the new one. On failure the former file stays. A
    /// pipe or a device is written to.
    ///
    /// # Errors
    /// The system's, and those of `write`.
    pub fn replace(&self, write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) -> Result<()> {
        let whole = |file: File| {
            let mut buffered = BufWriter::with_capacity(BUFFER, file);
            write(&mut buffered)?;
            buffered.flush()
        };
        match &self.kind {
            Kind::Stream(file) => Ok(whole(file.try_clone()?)?),
            Kind::Name(name) => {
                let (file, temporary) = name.make_temporary()?;
                let done = whole(file).and_then(|()| {
                    rustix::fs::renameat(&name.folder, &temporary, &name.folder, &name.name)
                        .map_err(io::Error::from)
                });
                if done.is_err() {
                    // The room it took is wanted back. That it cannot be removed adds nothing to the error.
                    let _ = rustix::fs::unlinkat(&name.folder, &temporary, AtFlags::empty());
                }
                Ok(done?)
            }
        }
    }

    /// Opens what grows, to read and write: the file that is there, a new one, or the pipe or device.
    ///
    /// # Errors
    /// The system's; [`Error::ForeignFile`], [`Error::OtherNames`] or [`Error::NotRegular`] of a file that is there.
    pub fn open(&self) -> Result<File> {
        let name = match &self.kind {
            Kind::Name(name) => name,
            Kind::Stream(file) => return Ok(file.try_clone()?),
        };
        // A file may come and go between the two calls. Whoever makes that happen again and again gets an error.
        for _ in 0..8 {
            match name.open_there() {
                Err(Error::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                there => return there,
            }
            match rustix::fs::openat(&name.folder, &name.name, OFlags::RDWR | MAKE, MODE) {
                Err(Errno::EXIST) => {}
                made => return Ok(made?.into()),
            }
        }
        Err(Errno::AGAIN.into())
    }
}

impl Name {
    fn stat(&self) -> Result<Stat> {
        Ok(rustix::fs::statat(
            &self.folder,
            &self.name,
            AtFlags::SYMLINK_NOFOLLOW,
        )?)
    }

    /// Opens the file that is there.
    fn open_there(&self) -> Result<File> {
        let file = rustix::fs::openat(&self.folder, &self.name, OFlags::RDWR | OPEN, Mode::empty())?;
        let about = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(about.st_mode) != FileType::RegularFile {
            return Err(Error::NotRegular);
        }
        self.check_owner(&about)?;
        if self.shared.is_some() && about.st_nlink > 1 {
            return Err(Error::OtherNames);
        }
        Ok(file.into())
    }

    /// Refuses what a third user put into a folder of several users, as the kernel's `fs.protected_regular` does.
    fn check_owner(&self, about: &Stat) -> Result<()> {
        match self.shared {
            Some(folder) if about.st_uid != self.own && about.st_uid != folder => {
                Err(Error::ForeignFile { owner: about.st_uid })
            }
            _ => Ok(()),
        }
    }

    /// A new file with a name that nobody can guess, for its owner to rename.
    fn make_temporary(&self) -> Result<(File, OsString)> {
        loop {
            let mut random = [0; 8];
            rustix::rand::getrandom(&mut random, GetRandomFlags::empty())?;
            // A dump's analyzer reads every file whose name has the prefix of dumps in it: this one does not.
            let name = OsString::from(format!(".ringsight-{:016x}", u64::from_ne_bytes(random)));
            match rustix::fs::openat(&self.folder, &name, OFlags::WRONLY | MAKE, MODE) {
                Err(Errno::EXIST) => {}
                made => return Ok((made?.into(), name)),
            }
        }
    }
}

/// The user whose rights this process has.
fn own() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Whether a link or a folder of this user is as good as the own.
fn is_trusted(owner: u32, own: u32) -> bool {
    owner == own || owner == 0
}

/// Opens a pipe or a device without waiting for its other end. Writing to it waits as usual.
fn open_stream(folder: &OwnedFd, name: &OsStr, follow: bool) -> Result<File> {
    let mut flags = OFlags::WRONLY | OFlags::APPEND | OPEN;
    flags.set(OFlags::NOFOLLOW, !follow);
    let file = rustix::fs::openat(folder, name, flags, Mode::empty()).map_err(|error| match error {
        Errno::NXIO => Error::NoReader,
        error => error.into(),
    })?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file.into())
}

#[cfg(test)]
mod tests;
