//! From a path to a destination, component by component: the kernel follows no link unseen.

use std::{
    ffi::OsString,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStringExt as _,
    },
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat},
    io::Errno,
};

use super::{Destination, Error, Kind, Name, Result, is_trusted, open_stream};

/// As many links as the kernel follows in one path.
const MOST_LINKS: usize = 40;
/// A handle that reads and writes nothing, and for which no rights to the file are needed.
const HANDLE: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);
/// Bits of a folder's mode that let others put names into it. An access list shows as the group's bit.
const OTHERS_MAY_WRITE: u32 = 0o022;

/// The destination that `path` names to user `own`.
pub(super) fn destination(path: &Path, own: u32, make_folders: bool) -> Result<Destination> {
    let mut walk = Walk {
        folder: rustix::fs::openat(CWD, ".", HANDLE | OFlags::DIRECTORY, Mode::empty())?,
        at: PathBuf::new(),
        pending: Vec::new(),
        links: 0,
        own,
        make_folders,
    };
    walk.push(path)?;
    let kind = walk.finish()?;
    Ok(Destination {
        path: path.to_owned(),
        kind,
    })
}

/// The way from a folder to a destination.
struct Walk {
    /// The folder come to.
    folder: OwnedFd,
    /// Its path, for messages.
    at: PathBuf,
    /// What is still to go, the next one last.
    pending: Vec<OsString>,
    links: usize,
    own: u32,
    make_folders: bool,
}

impl Walk {
    /// Puts a path before what is still to go.
    fn push(&mut self, path: &Path) -> Result<()> {
        let mut names: Vec<OsString> = Vec::new();
        for component in path.components() {
            match component {
                Component::RootDir => {
                    self.folder = rustix::fs::openat(CWD, "/", HANDLE | OFlags::DIRECTORY, Mode::empty())?;
                    self.at = PathBuf::from("/");
                }
                Component::ParentDir => names.push("..".into()),
                Component::Normal(name) => names.push(name.into()),
                Component::CurDir | Component::Prefix(_) => {}
            }
        }
        self.pending.extend(names.into_iter().rev());
        Ok(())
    }

    fn finish(mut self) -> Result<Kind> {
        while let Some(name) = self.pending.pop() {
            let is_last = self.pending.is_empty();
            let found =
                match rustix::fs::openat(&self.folder, &name, HANDLE | OFlags::NOFOLLOW, Mode::empty()) {
                    Err(Errno::NOENT) if is_last => return self.name(name),
                    Err(Errno::NOENT) if self.make_folders => {
                        match rustix::fs::mkdirat(&self.folder, &name, Mode::from_raw_mode(0o777)) {
                            Ok(()) | Err(Errno::EXIST) => {}
                            Err(error) => return Err(error.into()),
                        }
                        let folder = HANDLE | OFlags::NOFOLLOW | OFlags::DIRECTORY;
                        rustix::fs::openat(&self.folder, &name, folder, Mode::empty())?
                    }
                    found => found?,
                };
            let about = rustix::fs::fstat(&found)?;
            match FileType::from_raw_mode(about.st_mode) {
                FileType::Directory => {
                    self.at.push(name);
                    self.folder = found;
                }
                FileType::Symlink => {
                    if let Some(end) = self.follow(&found, &about, name)? {
                        return Ok(end);
                    }
                }
                _ if !is_last => return Err(Errno::NOTDIR.into()),
                FileType::RegularFile => return self.name(name),
                FileType::Fifo | FileType::CharacterDevice => return self.stream(name, &about),
                _ => return Err(Error::NotRegular),
            }
        }
        Err(Error::NotRegular)
    }

    /// Goes where a link leads. It is the end if the link is one of `/proc` to an open file.
    fn follow(&mut self, link: &OwnedFd, about: &Stat, name: OsString) -> Result<Option<Kind>> {
        if !is_trusted(about.st_uid, self.own) {
            return Err(Error::ForeignLink {
                link: self.at.join(name),
                owner: about.st_uid,
            });
        }
        self.links += 1;
        if self.links > MOST_LINKS {
            return Err(Errno::LOOP.into());
        }
        // What such a link leads to has no path. The link is of this user's own process, or of root's.
        if rustix::fs::fstatfs(link)?.f_type == PROC_SUPER_MAGIC {
            let there = rustix::fs::openat(&self.folder, &name, HANDLE, Mode::empty())?;
            return match FileType::from_raw_mode(rustix::fs::fstat(&there)?.st_mode) {
                FileType::Directory => {
                    self.at.push(name);
                    self.folder = there;
                    Ok(None)
                }
                _ if !self.pending.is_empty() => Err(Errno::NOTDIR.into()),
                FileType::RegularFile | FileType::Fifo | FileType::CharacterDevice => {
                    Ok(Some(Kind::Stream(open_stream(&self.folder, &name, true)?)))
                }
                _ => Err(Error::NotRegular),
            };
        }
        let target = rustix::fs::readlinkat(link, "", Vec::new())?;
        self.push(Path::new(&OsString::from_vec(target.into_bytes())))?;
        Ok(None)
    }

    fn name(self, name: OsString) -> Result<Kind> {
        Ok(Kind::Name(self.named(name)?))
    }

    fn named(self, name: OsString) -> Result<Name> {
        let folder = rustix::fs::fstat(self.folder.as_fd())?;
        let is_own = is_trusted(folder.st_uid, self.own) && folder.st_mode & OTHERS_MAY_WRITE == 0;
        Ok(Name {
            folder: self.folder,
            name,
            shared: (!is_own).then_some(folder.st_uid),
            own: self.own,
        })
    }

    fn stream(self, name: OsString, about: &Stat) -> Result<Kind> {
        let name = self.named(name)?;
        name.check_owner(about)?;
        let file = open_stream(&name.folder, &name.name, false)?;
        let opened = rustix::fs::fstat(&file)?;
        // A regular file that was put there since would be written over.
        if (opened.st_dev, opened.st_ino) != (about.st_dev, about.st_ino) {
            return Err(Errno::AGAIN.into());
        }
        Ok(Kind::Stream(file))
    }
}
