//! Memory of a FIFO: a sealed memfd, mapped by every process that has the descriptor.

use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    ptr,
    sync::Arc,
};

use ringsight_kernels::Fifo;

use ringsight_comm_base::sys::{self, check};

use super::gpu_direct::Slots;
use crate::device;

/// A shared mapping, unmapped when dropped.
struct Mapping {
    base: *mut libc::c_void,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; the FIFO's head and tail order the accesses to it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `mmap` with this length; every user held the `Arc` that is now gone.
        unsafe { libc::munmap(self.base, self.bytes) };
    }
}

/// A mapping that kernels access.
struct DeviceMapping(Option<(Box<dyn Send + Sync>, Mapping)>);

impl Drop for DeviceMapping {
    fn drop(&mut self) {
        // The fields drop in order: the device's access first, then the mapping.
        if let (Some(mapped), Some(device)) = (self.0.take(), device::opened()) {
            device.release_when_idle(mapped.1.bytes, Box::new(mapped));
        }
    }
}

/// A zeroed memfd of `bytes` bytes that no process can resize, so that none can take another's pages away.
pub(crate) fn create(bytes: usize) -> io::Result<OwnedFd> {
    sys::sealed_memfd(c"ringsight-fifo", bytes)
}

/// Maps a memfd of [`create`] as a FIFO with slots of `slot_bytes`.
///
/// # Errors
/// The file has another size, may shrink, or cannot be mapped.
pub(crate) fn map(fd: &OwnedFd, slot_bytes: usize) -> io::Result<Arc<Fifo>> {
    let mapping = mapping(fd, slot_bytes)?;
    Ok(Arc::new(fifo(mapping.base, slot_bytes, Arc::new(mapping))))
}

/// As [`map`], for a FIFO that kernels fill or drain. `direct`: its slots are in the memory of the GPU.
///
/// # Errors
/// As [`map`], or the device cannot access it.
pub(crate) fn map_for_kernels(
    fd: &OwnedFd,
    slot_bytes: usize,
    direct: Option<Arc<Slots>>,
) -> io::Result<Arc<Fifo>> {
    let mapping = mapping(fd, slot_bytes)?;
    let base = mapping.base;
    // Tests connect without a device.
    let reachable = match device::opened() {
        None => None,
        Some(device) => device
            .register_host(base as usize, mapping.bytes)
            .map_err(io::Error::other)?,
    };
    let memory: Arc<dyn Send + Sync> = match reachable {
        None => Arc::new(mapping),
        Some(reachable) => Arc::new(DeviceMapping(Some((reachable, mapping)))),
    };
    let fifo = fifo(base, slot_bytes, memory);
    Ok(Arc::new(match direct {
        None => fifo,
        Some(slots) => fifo.with_indirect_slots(slots),
    }))
}

/// A FIFO at the base of the mapping in `memory`.
fn fifo(base: *mut libc::c_void, slot_bytes: usize, memory: Arc<dyn Send + Sync>) -> Fifo {
    // SAFETY: page-aligned, `memory_bytes` long, not shrinkable, and mapped while the mapping lives.
    unsafe { Fifo::new(base.cast(), slot_bytes, memory) }
}

fn mapping(fd: &OwnedFd, slot_bytes: usize) -> io::Result<Mapping> {
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
    Ok(Mapping { base, bytes })
}

/// A FIFO of this process that nothing fills, for a kernel to wait at.
pub(crate) fn private(slot_bytes: usize) -> io::Result<Arc<Fifo>> {
    map_for_kernels(&create(Fifo::memory_bytes(slot_bytes))?, slot_bytes, None)
}

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;

    use super::*;

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let bytes = Fifo::memory_bytes(512);
        assert!(mapping(&create(bytes).unwrap(), 512).is_ok());
        let refused = |fd: &OwnedFd| mapping(fd, 512).map(drop).unwrap_err();
        // Another size.
        let text = refused(&create(bytes + 4096).unwrap()).to_string();
        assert!(text.contains(&format!("where {bytes} were expected")), "{text}");
        // A file that a peer could shrink.
        // SAFETY: a C string, and a new descriptor that nobody else owns.
        let unsealed = unsafe {
            let fd = libc::memfd_create(c"unsealed".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            OwnedFd::from_raw_fd(check(fd).unwrap())
        };
        let file = std::fs::File::from(unsealed);
        file.set_len(bytes as u64).unwrap();
        assert_eq!(refused(&file.into()).kind(), io::ErrorKind::InvalidData);
        // No memory.
        let file = std::fs::File::open("/dev/null").unwrap();
        refused(&file.into());
    }
}
