//! The control page of an end, which its peer writes: credits, notices of steps, and messages.

use std::{
    io, ptr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use ringsight_failover::MESSAGE_BYTES;

use super::SLOTS;
use crate::{memory::Memory, wire::MAX_PATHS};

/// Bytes of the page.
pub const CONTROL_BYTES: usize = 8192;
/// Bytes of a notice that belong to the connection's owner.
pub const NOTICE_BYTES: usize = 80;
/// Bytes of a notice before the owner's: position u64 | parts u8 | zero u8 | length u16 | zero u32.
pub(super) const HEAD: usize = 16;
/// Bytes from one notice to the next.
const NOTICE_STRIDE: usize = 128;
/// Bytes from one path's credit to the next.
const PATH_STRIDE: usize = 64;
/// Offset of the notices. Before them each path has a cache line with its credit.
const NOTICES: usize = 1024;

const _: () = assert!(MAX_PATHS * PATH_STRIDE <= NOTICES);
const _: () = assert!(HEAD + NOTICE_BYTES <= NOTICE_STRIDE);
/// Receive requests that a queue pair always has: one for every position that may be granted, and as many for steps that arrive twice.
pub(super) const RECEIVES: u32 = 2 * SLOTS as u32;
/// Offset of the inboxes: for each path one place per receive request, for messages of the failover protocol.
const INBOXES: usize = 2048;

const _: () = assert!(NOTICES + SLOTS * NOTICE_STRIDE <= INBOXES);
const _: () = assert!(inbox_at(MAX_PATHS, 0) <= CONTROL_BYTES && MESSAGE_BYTES.is_multiple_of(8));

/// A page that the peer's device writes. This process refers to it only through atomics.
pub struct Control {
    memory: Memory,
    base: *mut u8,
}

// SAFETY: the page belongs to no thread, and is read as atomics.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

struct Page(*mut libc::c_void);

// SAFETY: an address to unmap.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `Control::new`; every user held this page.
        unsafe { libc::munmap(self.0, CONTROL_BYTES) };
    }
}

impl Control {
    /// A zeroed page.
    ///
    /// # Errors
    /// No memory is left.
    pub fn new() -> io::Result<Self> {
        // Shared, so that after a fork the device still writes to the page that this process reads.
        // SAFETY: fresh memory at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                CONTROL_BYTES,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let page = Arc::new(Page(base));
        Ok(Self {
            // SAFETY: mapped while `page` lives, and only atomics of it are referred to.
            memory: unsafe { Memory::new(base.cast(), CONTROL_BYTES, page) },
            base: base.cast(),
        })
    }

    /// The page's memory, to be registered.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= CONTROL_BYTES);
        // SAFETY: within the page, which is aligned and mapped while `memory` lives. A device may write it at any time, in units of at
        // least a word: for the processor that is the store of another thread.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// The last credit that the peer wrote over a path: steps granted since the connection began.
    #[must_use]
    pub fn credit(&self, path: usize) -> u64 {
        // Acquire: everything that the receiver's device did before this write is done. The completion that caused this read was
        // written after the word.
        u64::from_le(self.word(credit_at(path)).load(Ordering::Acquire))
    }

    /// The message that a receive request of a path received.
    pub(super) fn message(&self, path: usize, index: usize) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        for (word, chunk) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // Relaxed: as in `notice`. The request is not posted again before the message has been read.
            *chunk = self
                .word(inbox_at(path, index) + word * 8)
                .load(Ordering::Relaxed)
                .to_ne_bytes();
        }
        bytes
    }

    /// The notice of a position: (parts, the owner's bytes, their number). `None` if its place holds another notice, or none.
    #[must_use]
    pub fn notice(&self, position: u64) -> Option<(u8, [u8; NOTICE_BYTES], usize)> {
        let at = notice_at(position);
        let mut bytes = [0; HEAD + NOTICE_BYTES];
        for (index, word) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            // Relaxed: the completion of the write has been read, and was written after these bytes.
            *word = self.word(at + index * 8).load(Ordering::Relaxed).to_ne_bytes();
        }
        parse_notice(&bytes, position)
    }
}

/// Offset of the place where a path's receive request of this index receives a message.
pub(super) const fn inbox_at(path: usize, index: usize) -> usize {
    INBOXES + (path * RECEIVES as usize + index) * MESSAGE_BYTES
}

/// Offset of a path's credit.
pub(super) fn credit_at(path: usize) -> usize {
    path * PATH_STRIDE
}

/// Offset of the notice of a position.
pub(super) fn notice_at(position: u64) -> usize {
    NOTICES + position as usize % SLOTS * NOTICE_STRIDE
}

/// Encodes a notice. Returns its bytes and their number.
pub(super) fn encode_notice(position: u64, parts: u8, own: &[u8]) -> ([u8; HEAD + NOTICE_BYTES], usize) {
    let mut bytes = [0; HEAD + NOTICE_BYTES];
    bytes[..8].copy_from_slice(&position.to_le_bytes());
    bytes[8] = parts;
    bytes[10..12].copy_from_slice(&(own.len() as u16).to_le_bytes());
    bytes[HEAD..HEAD + own.len()].copy_from_slice(own);
    (bytes, HEAD + own.len())
}

fn parse_notice(bytes: &[u8; HEAD + NOTICE_BYTES], position: u64) -> Option<(u8, [u8; NOTICE_BYTES], usize)> {
    let (head, own) = bytes.split_first_chunk::<HEAD>()?;
    let length = usize::from(u16::from_le_bytes([head[10], head[11]]));
    let is_it = head[..8] == position.to_le_bytes() && head[8] > 0 && head[9] == 0 && head[12..] == [0; 4];
    (is_it && length <= NOTICE_BYTES).then_some((head[8], own.try_into().ok()?, length))
}

/// The fuzz target of the parser of notices.
pub fn fuzz(bytes: &[u8]) {
    if let Some(notice) = bytes.first_chunk()
        && let Some((position, _)) = bytes.split_first_chunk()
        && let Some((parts, own, length)) = parse_notice(notice, u64::from_le_bytes(*position))
    {
        let (again, _) = encode_notice(u64::from_le_bytes(*position), parts, &own[..length]);
        // The bytes after the notice are left from an earlier one.
        assert_eq!(again[..HEAD + length], notice[..HEAD + length]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn notices_round_trip_and_others_are_refused(
            position: u64, parts in 1_u8.., own in proptest::collection::vec(any::<u8>(), 0..=NOTICE_BYTES), at in 0..HEAD, bit in 0_u8..8,
            rubbish in proptest::collection::vec(any::<u8>(), HEAD + NOTICE_BYTES),
        ) {
            let (mut bytes, length) = encode_notice(position, parts, &own);
            prop_assert_eq!(length, HEAD + own.len());
            let (parts_read, own_read, length_read) = parse_notice(&bytes, position).unwrap();
            prop_assert_eq!((parts_read, &own_read[..length_read]), (parts, &own[..]));
            prop_assert_eq!(parse_notice(&bytes, position.wrapping_add(SLOTS as u64)), None);
            bytes[at] ^= 1 << bit;
            if let Some(read) = parse_notice(&bytes, position) {
                prop_assert!(at == 8 || at == 10, "{:?}", read);
            }
            fuzz(&rubbish);
            fuzz(&bytes);
        }
    }

    #[test]
    fn a_new_page_is_zero_and_its_parts_do_not_share_cache_lines() {
        let control = Control::new().unwrap();
        assert_eq!((control.credit(0), control.credit(1)), (0, 0));
        assert_eq!(control.notice(0), None, "parts are never 0");
        let mut places: Vec<usize> = (0..SLOTS as u64).map(notice_at).collect();
        places.extend((0..MAX_PATHS).map(credit_at));
        places.sort_unstable();
        assert!(places.windows(2).all(|two| two[1] - two[0] >= 64));
    }
}
