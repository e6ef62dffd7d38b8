//! Memory of a FIFO: a sealed memfd, mapped by whoever holds the descriptor.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use ringsight_kernels::Fifo;

use crate::bootstrap::sys::{self, check};

/// A shared mapping, unmapped when dropped.
struct Mapping {
    base: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; what is in it is ordered by whoever uses it (the FIFO's head and tail).
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `mmap` with this length, and whoever used it held the `Arc` that is now gone.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

/// A zeroed memfd of `bytes` bytes that nobody can resize, so that no process can take another's pages away.
pub(crate) fn create(bytes: usize) -> io::Result<OwnedFd> {
    sys::sealed_memfd(c"ringsight-fifo", bytes)
}

/// Maps a memfd of [`create`] as a FIFO with slots of `slot_bytes`.
///
/// # Errors
/// When the file is not of that size, may shrink, or cannot be mapped.
pub(crate) fn map(fd: &OwnedFd, slot_bytes: usize) -> io::Result<Arc<Fifo>> {
    let bytes = Fifo::memory_bytes(slot_bytes);
    // SAFETY: all-zero bytes are a valid `stat` to write to.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `stat` is writable.
    check(unsafe { libc::fstat(fd.as_raw_fd(), &raw mut stat) })?;
    // SAFETY: no pointers.
    let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) })?;
    if stat.st_size != bytes as libc::off_t || seals & libc::F_SEAL_SHRINK == 0 {
        let text = format!(
            "a FIFO of {} bytes where {bytes} were expected (seals {seals:#x})",
            stat.st_size
        );
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fresh shared mapping at an address of the kernel's choice.
    let base = unsafe {
        libc::mmap(
            ptr::null_mut(),
            bytes,
            protection,
            libc::MAP_SHARED,
            fd.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let mapping = Arc::new(Mapping { base, bytes });
    // SAFETY: page-aligned, `memory_bytes` long, cannot shrink, and mapped while `mapping` lives.
    Ok(Arc::new(unsafe { Fifo::new(base.cast(), slot_bytes, mapping) }))
}

/// A FIFO of this process alone, that nobody sends to.
pub(crate) fn private(slot_bytes: usize) -> io::Result<Arc<Fifo>> {
    map(&create(Fifo::memory_bytes(slot_bytes))?, slot_bytes)
}
