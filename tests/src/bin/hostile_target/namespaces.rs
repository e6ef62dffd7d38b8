//! A target that is root in namespaces of its own, as in a container that any user may make.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{FromRawFd as _, OwnedFd},
        unix::fs::symlink,
    },
    path::Path,
    ptr,
};

use anyhow::{Context as _, Result};

use crate::{Act, NotHere, check, map_library};

/// Makes namespaces of these kinds, and a user namespace whose root this process is.
pub(crate) fn unshare(kinds: libc::c_int) -> Result<()> {
    // SAFETY: a system call on integers; there is one thread.
    let done = unsafe { libc::unshare(libc::CLONE_NEWUSER | kinds) };
    if done == -1 {
        let error = io::Error::last_os_error();
        return Err(NotHere(format!(
            "an unprivileged process may make no user namespace: {error}"
        ))
        .into());
    }
    fs::write("/proc/self/setgroups", "deny").context("setgroups")?;
    fs::write("/proc/self/uid_map", "0 65534 1").context("uid_map")?;
    fs::write("/proc/self/gid_map", "0 65534 1").context("gid_map")
}

/// H2: another UTS namespace, and a root whose `/etc/hostname` leads to a file that only root may read.
pub(crate) fn hostname_link(library: &Path) -> Result<Act> {
    let secret = library.with_file_name("secret");
    other_root(library, |hostname| symlink(secret, hostname))
}

/// H2: the same with a FIFO, which nobody writes.
pub(crate) fn hostname_pipe(library: &Path) -> Result<Act> {
    other_root(library, |hostname| {
        let path = CString::new(hostname.as_os_str().as_encoded_bytes())?;
        // SAFETY: a string that lives across the call.
        match unsafe { libc::mkfifo(path.as_ptr(), 0o644) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
}

fn other_root(library: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<Act> {
    map_library(library)?;
    fs::create_dir_all("root/etc")?;
    make(Path::new("root/etc/hostname")).context("making /etc/hostname")?;
    unshare(libc::CLONE_NEWUTS)?;
    // SAFETY: a string that lives across the call.
    check(unsafe { libc::chroot(c"root".as_ptr()) }, "chroot")?;
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// H4: a descriptor on a file of root's, under the name of shared pages.
pub(crate) fn pages_bind_mount(library: &Path) -> Result<Act> {
    const NAME: &str = "memfd:ringsight-pages (deleted)";
    map_library(library)?;
    let secret = library.with_file_name("secret");
    unshare(libc::CLONE_NEWNS)?;
    fs::create_dir("root")?;
    mount(None, Path::new("/"), None, libc::MS_REC | libc::MS_PRIVATE)?;
    mount(Some(Path::new("none")), Path::new("root"), Some("tmpfs"), 0)?;
    let place = Path::new("root").join(NAME);
    fs::write(&place, "")?;
    mount(Some(&secret), &place, None, libc::MS_BIND)?;
    std::env::set_current_dir("root")?;
    // The root of this namespace, and the old one beneath it, which goes.
    // SAFETY: strings that live across the call.
    let done = unsafe { libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) };
    check(done as libc::c_int, "pivot_root")?;
    // SAFETY: the same.
    let done = unsafe { libc::umount2(c".".as_ptr(), libc::MNT_DETACH) };
    check(done, "umount2")?;
    let path = CString::new(format!("/{NAME}"))?;
    // SAFETY: the same.
    let fd = unsafe { libc::open(path.as_ptr(), libc::O_PATH) };
    check(fd, "opening it by path")?;
    // SAFETY: the kernel just returned this descriptor, and nobody else has it.
    let descriptor = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(Box::new(move |_| Ok(format!("{descriptor:?}"))))
}

fn mount(source: Option<&Path>, place: &Path, kind: Option<&str>, flags: libc::c_ulong) -> Result<()> {
    let text = |path: &Path| CString::new(path.as_os_str().as_encoded_bytes());
    let (source, place) = (source.map(text).transpose()?, text(place)?);
    let kind = kind.map(CString::new).transpose()?;
    let pointer = |text: &Option<CString>| text.as_ref().map_or(ptr::null(), |text| text.as_ptr());
    // SAFETY: strings that live across the call, or null where there are none.
    let done = unsafe {
        libc::mount(
            pointer(&source),
            place.as_ptr(),
            pointer(&kind),
            flags,
            ptr::null(),
        )
    };
    check(done, &format!("mounting {place:?}"))
}
