//! The target's shared pages, made as the library makes them.

use std::{
    ffi::CString,
    fs::{self, File},
    io,
    os::fd::{AsRawFd as _, FromRawFd as _},
};

use anyhow::{Context as _, Result, ensure};
use ringsight_records::pages::{Communicator, Geometry, Header, MEMFD_NAME, Pages, put_text};

/// Pages that stay mapped, and their file open, until the process ends.
pub(crate) struct Own {
    /// The mapping.
    base: *mut u8,
    /// The file: by this descriptor the collector finds it.
    pub(crate) _file: File,
}

impl Own {
    /// Pages as the library makes them: sealed against shrinking and growing.
    pub(crate) fn make() -> Result<Self> {
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        let geometry = Geometry::standard();
        let name = CString::new(MEMFD_NAME)?;
        // SAFETY: a string that lives across the call.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("memfd_create");
        }
        // SAFETY: the kernel just returned this descriptor, and nobody else has it.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(geometry.file_bytes as u64)?;
        // SAFETY: a system call on integers.
        let sealed = unsafe { libc::fcntl(fd, libc::F_ADD_SEALS, seals) } == 0;
        ensure!(sealed, "F_ADD_SEALS: {}", io::Error::last_os_error());
        // SAFETY: a fresh shared mapping of a file that is that long.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                geometry.file_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error()).context("mapping the pages");
        }
        // SAFETY: zeroed, page-aligned and long enough, and nobody else looks at it before the magic is there.
        let header = unsafe { &mut *base.cast::<Header>() };
        header.initialise(
            &geometry,
            std::process::id(),
            start_time()?,
            22809,
            "hostile-host",
        );
        Ok(Self {
            base: base.cast(),
            _file: file,
        })
    }

    /// The pages as the library sees them.
    pub(crate) fn view(&self) -> Pages<'static> {
        // SAFETY: mapped for the life of the process, page-aligned, and changed through atomics where the collector is not to be attacked.
        unsafe { Pages::new(self.base, Geometry::standard().file_bytes) }.expect("made just now")
    }

    /// Adds a communicator of two ranks with this name.
    pub(crate) fn communicator(&self, name: &str) {
        // SAFETY: plain integers; zero is a value of each.
        let mut communicator: Communicator = unsafe { std::mem::zeroed() };
        (communicator.id, communicator.ranks, communicator.init_start_ns) = (7, 2, 1);
        put_text(&mut communicator.name, name);
        let claimed = self
            .view()
            .communicators()
            .iter()
            .any(|slot| slot.claim(&communicator));
        assert!(claimed, "the table is full");
    }
}

/// When this process started, clock ticks since boot: field 22 of `stat`.
fn start_time() -> Result<u64> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let field = fields.split_ascii_whitespace().nth(19).context("field 22")?;
    Ok(field.parse()?)
}
