//! A sequence lock: words that one writer replaces while readers in other processes copy them, and know whether the copy is
//! whole.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering, fence};

#[cfg(all(test, loom))]
mod model;

/// How often a reader tries again before it gives up: a writer may have been killed half-way.
const TRIES: usize = if cfg!(loom) { 2 } else { 64 };

/// `WORDS` words and their version, which is odd while they are being replaced and 0 before anything was written. Whoever
/// replaces them sees to it that nobody else does.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SequenceLock<const WORDS: usize> {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The orders of the four places where order counts. Others than [`Orders::RIGHT`] are for the model, which must catch them.
#[derive(Clone, Copy, Debug)]
struct Orders {
    /// Fence of the writer between the odd version and the words: a reader that sees one of the words and then issues its
    /// fence sees the odd version, too.
    begun: Option<Ordering>,
    /// Store of the even version: whoever reads it also reads the words before it.
    done: Ordering,
    /// Load of the version before the words: they are at least as new as that version.
    first: Ordering,
    /// Fence of the reader between the words and the second look at the version, for the writer's.
    read: Option<Ordering>,
}

impl Orders {
    const RIGHT: Self = Self {
        begun: Some(Ordering::Release),
        done: Ordering::Release,
        first: Ordering::Acquire,
        read: Some(Ordering::Acquire),
    };
}

impl<const WORDS: usize> SequenceLock<WORDS> {
    /// Replaces the words; `beside` writes what belongs to them and stands elsewhere.
    #[inline]
    pub(crate) fn write(&self, words: &[u64; WORDS], beside: impl FnOnce()) {
        self.write_with(Orders::RIGHT, words, beside);
    }

    #[inline]
    fn write_with(&self, orders: Orders, words: &[u64; WORDS], beside: impl FnOnce()) {
        // Odd whatever a writer that was killed has left. Relaxed: there is no other writer.
        let version = self.version.load(Ordering::Relaxed) | 1;
        self.version.store(version, Ordering::Relaxed);
        orders.begun.into_iter().for_each(fence);
        // Relaxed: ordered by the fence before and the store behind.
        for (place, word) in self.words.iter().zip(words) {
            place.store(*word, Ordering::Relaxed);
        }
        beside();
        self.version.store(version.wrapping_add(1), orders.done);
    }

    /// A whole copy of the words, after `beside` has looked at what belongs to them; `None` if nothing was written yet, or
    /// they are being replaced without end.
    #[inline]
    pub(crate) fn read(&self, beside: impl FnMut(&mut [u64; WORDS])) -> Option<[u64; WORDS]> {
        self.read_with(Orders::RIGHT, beside)
    }

    #[inline]
    fn read_with(&self, orders: Orders, mut beside: impl FnMut(&mut [u64; WORDS])) -> Option<[u64; WORDS]> {
        for _ in 0..TRIES {
            let before = self.version.load(orders.first);
            if before & 1 == 1 {
                core::hint::spin_loop();
                continue;
            }
            let mut words = [0; WORDS];
            for (word, place) in words.iter_mut().zip(&self.words) {
                // Relaxed: the second look at the version tells whether they belong together.
                *word = place.load(Ordering::Relaxed);
            }
            beside(&mut words);
            orders.read.into_iter().for_each(fence);
            // Relaxed: had a word above come from a later write, the fences make that write's odd version visible here.
            if self.version.load(Ordering::Relaxed) == before {
                return (before != 0).then_some(words);
            }
        }
        None
    }

    /// One word, by itself: another's may be of another write.
    #[inline]
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        &self.words[index]
    }
}
