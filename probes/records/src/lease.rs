//! Who may read the ring: a lease in the pages' first page.
//!
//! Readers come and go, are killed, and are stopped between any two of their steps, so no word may be written by one that
//! is not the holder any more. Every word therefore carries the *term*'s number, which each new holder raises, and is
//! written by exchange:
//!
//! - `term` holds number and heartbeat together. Taking a term and renewing it are one exchange, so of two readers that
//!   see the same lapsed lease one gets it, and whoever looks at a new term finds its heartbeat in it.
//! - `armed` holds number and mask: only the holder of that term changes the mask.
//! - `pid`, `start` and `namespace` say who it is. They come after the term: until all three carry its number, nobody knows
//!   who the holder is, and it counts as alive while its heartbeat is fresh.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

#[cfg(not(loom))]
use core::sync::atomic::{AtomicU64, Ordering};

use crate::Kind;

#[cfg(all(test, loom))]
mod model;
#[cfg(all(test, not(loom)))]
mod tests;

/// A lease whose heartbeat is older than this has lapsed.
pub const LEASE_NS: u64 = 5_000_000_000;

/// Bits of a word below the term's number.
const VALUE_BITS: u32 = 40;
const VALUE: u64 = (1 << VALUE_BITS) - 1;
/// Heartbeats count in units of 2^20 ns, about a millisecond: 40 bits of them are 36 years.
const HEARTBEAT_SHIFT: u32 = 20;

const fn tagged(term: u64, value: u64) -> u64 {
    term << VALUE_BITS | value & VALUE
}

const fn term_of(word: u64) -> u64 {
    word >> VALUE_BITS
}

/// Heartbeat in a `term` word, nanoseconds; 0 = nobody holds the lease.
const fn heartbeat_of(word: u64) -> u64 {
    (word & VALUE) << HEARTBEAT_SHIFT
}

/// A heartbeat of now is told from none at all.
const fn heartbeat(now_ns: u64) -> u64 {
    let units = now_ns >> HEARTBEAT_SHIFT;
    if units == 0 { 1 } else { units }
}

/// Whether term `a` comes after `b`: their numbers go round.
const fn is_later(a: u64, b: u64) -> bool {
    let ahead = a.wrapping_sub(b) << VALUE_BITS >> VALUE_BITS;
    ahead != 0 && ahead < 1 << (63 - VALUE_BITS)
}

/// The right to read (and thereby consume) the ring: held by one process at a time, lapsing without a heartbeat.
#[derive(Debug)]
#[repr(C)]
pub struct Lease {
    /// Kinds that the reader wants in the ring, a [`Kind`] bit each; none = unarmed. The one word a writer looks at first.
    armed: AtomicU64,
    /// Number of the term and `CLOCK_MONOTONIC` of the holder's last heartbeat.
    term: AtomicU64,
    /// The holder's process, by its number in its own pid namespace.
    pid: AtomicU64,
    /// Start time of that process, clock ticks since boot, to tell it from a later one of the same number.
    start: AtomicU64,
    /// Inode of its pid namespace.
    namespace: AtomicU64,
}

/// A process that reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reader {
    /// Its number in its own pid namespace.
    pid: u32,
    /// When it started, clock ticks since boot.
    start_time: u64,
    /// Inode of its pid namespace.
    namespace: u64,
}

impl Reader {
    /// The process that started at `start_time` (clock ticks since boot) and has this number in the pid namespace of this
    /// inode.
    #[must_use]
    pub const fn new(pid: u32, start_time: u64, namespace: u64) -> Self {
        Self {
            pid,
            start_time: start_time & VALUE,
            namespace: namespace & VALUE,
        }
    }

    /// Its number in its own pid namespace.
    #[must_use]
    pub const fn pid(&self) -> u32 {
        self.pid
    }

    /// When it started, clock ticks since boot.
    #[must_use]
    pub const fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Inode of its pid namespace.
    #[must_use]
    pub const fn namespace(&self) -> u64 {
        self.namespace
    }
}

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The process; `None` if it has taken the lease just now and not yet said who it is.
    pub reader: Option<Reader>,
    /// Nanoseconds since its last heartbeat, to a millisecond.
    pub silent_ns: u64,
}

impl Lease {
    /// Kinds that are wanted in the ring. A writer that learns of an arming or disarming a moment late loses or adds a record
    /// at the edge of the observation, no more; but a reader's count of what it lost begins where it armed.
    #[inline]
    #[must_use]
    pub fn mask(&self) -> u64 {
        // SeqCst for that one purpose: see `exchange_mask`. It is a plain load on x86-64, and `ldar` on AArch64.
        self.armed.load(Ordering::SeqCst) & VALUE
    }

    /// Whether events of `kind` are wanted at all: one load; see [`Lease::mask`].
    #[inline]
    #[must_use]
    pub fn wants(&self, kind: Kind) -> bool {
        self.mask() & kind.bit() != 0
    }

    /// Whether the reader gave a sign of life within [`LEASE_NS`] of `now_ns`.
    #[inline]
    #[must_use]
    pub fn alive(&self, now_ns: u64) -> bool {
        is_fresh(self.term.load(Ordering::Relaxed), now_ns)
    }

    /// Whether the lease is still in this term, lapsed or not: nobody else has taken it.
    #[must_use]
    pub fn is_in(&self, term: u64) -> bool {
        // Relaxed: what the next holder does to the ring is told by the ring's own words.
        term_of(self.term.load(Ordering::Relaxed)) == term
    }

    /// The holder as of `now_ns`; `None` if the lease was given back or has lapsed.
    #[must_use]
    pub fn holder(&self, now_ns: u64) -> Option<Holder> {
        let word = self.term.load(Ordering::Relaxed);
        is_fresh(word, now_ns).then(|| Holder {
            reader: self.reader(term_of(word)),
            silent_ns: now_ns.saturating_sub(heartbeat_of(word)),
        })
    }

    /// Who took this term, once it has said so. Relaxed: each word says by itself whose it is.
    fn reader(&self, term: u64) -> Option<Reader> {
        let of = |word: &AtomicU64| {
            let word = word.load(Ordering::Relaxed);
            (term_of(word) == term).then_some(word & VALUE)
        };
        Some(Reader::new(
            of(&self.pid)? as u32,
            of(&self.start)?,
            of(&self.namespace)?,
        ))
    }

    /// Takes the lease for `reader` and arms the ring with `mask`. Returns the term's number.
    ///
    /// A lease with a fresh heartbeat is taken from nobody, unless `is_gone` can say for certain that its holder does not
    /// exist any more; a process that merely cannot be seen from here is not gone.
    ///
    /// # Errors
    /// The present holder.
    pub fn acquire(
        &self,
        reader: &Reader,
        now_ns: u64,
        mask: u64,
        is_gone: impl Fn(&Reader) -> bool,
    ) -> Result<u64, Holder> {
        let mut current = self.term.load(Ordering::Acquire);
        let term = loop {
            if is_fresh(current, now_ns) {
                let holder = self.reader(term_of(current));
                if !holder.is_some_and(|holder| is_gone(&holder)) {
                    return Err(Holder {
                        reader: holder,
                        silent_ns: now_ns.saturating_sub(heartbeat_of(current)),
                    });
                }
            }
            let term = term_of(current.wrapping_add(1 << VALUE_BITS));
            // AcqRel: the winner sees what the previous holder did. Who loses sees the winner's heartbeat, in this word.
            match self.term.compare_exchange(
                current,
                tagged(term, heartbeat(now_ns)),
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => break term,
                Err(seen) => current = seen,
            }
        };
        // A reader that was stopped here until its term lapsed writes over its successor's words. Then they carry the old
        // number, and the successor stays unnamed, no more.
        self.pid.store(tagged(term, reader.pid.into()), Ordering::Relaxed);
        self.start
            .store(tagged(term, reader.start_time), Ordering::Relaxed);
        self.namespace
            .store(tagged(term, reader.namespace), Ordering::Relaxed);
        // Of two that were stopped here, the later term's mask stays.
        self.exchange_mask(mask, term, |armed| !is_later(armed, term));
        Ok(term)
    }

    /// Arms the ring with another mask; `false`, and nothing changes, if another reader has taken the lease over.
    #[must_use]
    pub fn arm(&self, term: u64, mask: u64) -> bool {
        self.exchange_mask(mask, term, |armed| armed == term)
    }

    fn exchange_mask(&self, mask: u64, term: u64, may: impl Fn(u64) -> bool) -> bool {
        let mut armed = self.armed.load(Ordering::Relaxed);
        while may(term_of(armed)) {
            // SeqCst: the reader looks at the counters after this, as a writer looks at this after it has counted a sparse
            // event. What the reader does not find counted, its writer puts into the ring if there is room.
            match self
                .armed
                .compare_exchange(armed, tagged(term, mask), Ordering::SeqCst, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(seen) => armed = seen,
            }
        }
        false
    }

    /// Renews the term that [`Lease::acquire`] returned; `false` if another reader has taken the lease over.
    #[must_use]
    pub fn renew(&self, term: u64, now_ns: u64) -> bool {
        self.exchange_term(term, tagged(term, heartbeat(now_ns)))
    }

    fn exchange_term(&self, term: u64, new: u64) -> bool {
        let mut current = self.term.load(Ordering::Relaxed);
        while term_of(current) == term {
            // Release: whoever takes the next term sees what this one's holder did until now.
            match self
                .term
                .compare_exchange(current, new, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return true,
                Err(seen) => current = seen,
            }
        }
        false
    }

    /// Disarms the ring and gives the lease back. Does nothing if it is another reader's by now.
    pub fn release(&self, term: u64) {
        let _ = self.arm(term, 0);
        // The number stays, so that the next holder's differs from this one.
        let _ = self.exchange_term(term, tagged(term, 0));
    }
}

/// Whether a `term` word is of a lease that somebody holds as of `now_ns`.
const fn is_fresh(word: u64, now_ns: u64) -> bool {
    let heartbeat = heartbeat_of(word);
    heartbeat != 0 && now_ns.saturating_sub(heartbeat) < LEASE_NS
}
