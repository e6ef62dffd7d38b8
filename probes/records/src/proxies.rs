//! What the proxies of a process are moving, for readers of its pages.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::sequence::SequenceLock;

/// A proxy operation that is under way on a connection between nodes; 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ProxyState {
    /// Communicator id.
    pub comm: u64,
    /// The operation, as in [`crate::Record::seq`].
    pub seq: u64,
    /// When its turn came, `CLOCK_MONOTONIC` nanoseconds.
    pub begun_ns: u64,
    /// Number of the operation in the process.
    pub op: u32,
    /// 0 for an eager operation, n for the n-th replay.
    pub replay: u32,
    /// This rank in the communicator.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Steps that it has.
    pub steps: u32,
    /// Bytes of a full step.
    pub chunk_bytes: u32,
    /// Operations that wait behind it, when its turn came.
    pub queued: u32,
    /// Channel.
    pub channel: u8,
    /// [`crate::Flags`].
    pub flags: u8,
    /// Zero.
    pub reserved: [u8; 2],
    /// The step that it is at.
    pub step: u32,
    /// Zero.
    pub reserved_end: u32,
}

const WORDS: usize = size_of::<ProxyState>() / 8;
/// The word of [`ProxyState::step`].
const STEP: usize = WORDS - 1;
const _: () = assert!(size_of::<ProxyState>() == 64 && core::mem::offset_of!(ProxyState, step) == STEP * 8);

/// A slot of the table of proxies, of one connection: whether it is taken, and a sequence lock over the words of one
/// [`ProxyState`]. There is one writer, the thread that moves the connection. The step is written without the lock, since it changes
/// all the time.
#[derive(Debug)]
#[repr(C)]
pub struct ProxySlot {
    /// 0 free, 1 taken and nothing under way, 2 an operation is under way.
    state: AtomicU64,
    words: SequenceLock<WORDS>,
    /// `op << 32 | step`: a step of another operation is none.
    step: AtomicU64,
    reserved: [u64; 5],
}

// What loom has instead of atomics is larger.
#[cfg(not(loom))]
const _: () = assert!(size_of::<ProxySlot>() == 128);

impl ProxySlot {
    /// Takes a free slot; `false` if it is another's.
    #[must_use]
    pub fn claim(&self) -> bool {
        // Acquire: what its owner before wrote happened before.
        self.state
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// An operation's turn has come.
    pub fn begin(&self, proxy: &ProxyState) {
        // SAFETY: `ProxyState` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(proxy).cast::<[u64; WORDS]>() };
        self.words.write(words, || {
            self.step.store(u64::from(proxy.op) << 32, Ordering::Relaxed);
        });
        // Release: who sees it under way sees these words or later ones.
        self.state.store(2, Ordering::Release);
    }

    /// It has come to this step.
    pub fn move_to(&self, op: u32, step: u32) {
        // Relaxed: it stands for itself.
        self.step
            .store(u64::from(op) << 32 | u64::from(step), Ordering::Relaxed);
    }

    /// Nothing is under way any more.
    pub fn rest(&self) {
        self.state.store(1, Ordering::Release);
    }

    /// Gives the slot back.
    pub fn free(&self) {
        self.state.store(0, Ordering::Release);
    }

    /// What is under way; `None` if nothing is, or it changes without end.
    #[must_use]
    pub fn read(&self) -> Option<ProxyState> {
        // Acquire: pairs with `begin`.
        if self.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let mut step = 0;
        let words = self.words.read(|_| step = self.step.load(Ordering::Relaxed))?;
        // SAFETY: `ProxyState` is plain data of exactly `WORDS` words; every bit pattern is valid.
        let mut proxy = unsafe { core::mem::transmute::<[u64; WORDS], ProxyState>(words) };
        proxy.step = if (step >> 32) as u32 == proxy.op {
            step as u32
        } else {
            0
        };
        Some(proxy)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_what_is_under_way_and_how_far_that_is() {
        // SAFETY: atomics; zero is a value of each.
        let slot: ProxySlot = unsafe { core::mem::zeroed() };
        assert!(slot.claim() && !slot.claim());
        assert_eq!(slot.read(), None);
        for op in [7, 8] {
            let proxy = ProxyState {
                comm: 3,
                op,
                steps: 9,
                peer: 2,
                ..ProxyState::default()
            };
            slot.begin(&proxy);
            assert_eq!(slot.read(), Some(proxy), "at its first step");
            slot.move_to(op, 4);
            assert_eq!(slot.read(), Some(ProxyState { step: 4, ..proxy }));
            slot.move_to(op + 1, 5);
            assert_eq!(slot.read(), Some(proxy), "another's step");
            slot.rest();
            assert_eq!(slot.read(), None);
            assert!(!slot.claim(), "it is its owner's");
        }
        slot.free();
        assert!(slot.claim());
    }
}
