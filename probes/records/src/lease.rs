//! Who may read the ring: a lease in the pages' first page.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::Kind;

/// A lease whose heartbeat is older than this has lapsed.
pub const LEASE_NS: u64 = 5_000_000_000;

/// The right to read (and thereby consume) the ring: held by one process at a time, lapsing without a heartbeat.
#[derive(Debug)]
#[repr(C)]
pub struct Lease {
    /// Mask of [`Kind`] bits that the reader wants in the ring; 0 = unarmed. The one word a writer looks at first.
    pub mask: AtomicU64,
    /// `CLOCK_MONOTONIC` of the reader's last heartbeat.
    pub heartbeat_ns: AtomicU64,
    /// `generation << 32 | pid` of the holder; pid 0 = nobody. The generation tells a holder that was stopped for long
    /// whether the lease is still its own.
    pub holder: AtomicU64,
    /// Start time of the holder's process, clock ticks since boot, to tell it from a later process of the same pid.
    pub holder_start_time: AtomicU64,
}

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process.
    pub pid: u32,
    /// When that process started, clock ticks since boot.
    pub start_time: u64,
    /// Nanoseconds since its last heartbeat.
    pub silent_ns: u64,
}

impl Lease {
    /// Whether events of `kind` are wanted at all: one relaxed load. Order does not matter here: a writer that learns of
    /// an arming or disarming a moment late loses or adds a record at the edge of the observation, no more.
    #[must_use]
    pub fn wants(&self, kind: Kind) -> bool {
        self.mask.load(Ordering::Relaxed) & kind.bit() != 0
    }

    /// Whether the reader gave a sign of life within [`LEASE_NS`] of `now_ns`.
    #[must_use]
    pub fn alive(&self, now_ns: u64) -> bool {
        now_ns.saturating_sub(self.heartbeat_ns.load(Ordering::Relaxed)) < LEASE_NS
    }

    /// Takes the lease for process (`pid`, `start_time`) and arms the ring with `mask`.
    ///
    /// `is_running(pid, start_time)` says whether such a process exists: a dead holder's lease is taken at once, a
    /// living but silent one's after [`LEASE_NS`].
    ///
    /// # Errors
    /// The present holder, when it is alive.
    pub fn acquire(
        &self,
        (pid, start_time): (u32, u64),
        now_ns: u64,
        mask: u64,
        is_running: impl Fn(u32, u64) -> bool,
    ) -> Result<u64, Holder> {
        let mut current = self.holder.load(Ordering::Acquire);
        loop {
            let holder = Holder {
                pid: current as u32,
                start_time: self.holder_start_time.load(Ordering::Relaxed),
                silent_ns: now_ns.saturating_sub(self.heartbeat_ns.load(Ordering::Relaxed)),
            };
            if holder.pid != 0 && holder.silent_ns < LEASE_NS && is_running(holder.pid, holder.start_time) {
                return Err(holder);
            }
            let mine = ((current >> 32).wrapping_add(1) << 32) | u64::from(pid);
            // AcqRel: of two readers that saw the same lapsed lease one wins; the winner sees all that the previous
            // holder did to the ring's read position.
            match self
                .holder
                .compare_exchange(current, mine, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => {
                    self.holder_start_time.store(start_time, Ordering::Relaxed);
                    self.heartbeat_ns.store(now_ns, Ordering::Relaxed);
                    // Release: a writer that sees the mask finds the fresh heartbeat.
                    self.mask.store(mask, Ordering::Release);
                    return Ok(mine);
                }
                Err(seen) => current = seen,
            }
        }
    }

    /// Renews the lease `mine` (as [`Lease::acquire`] returned it); `false` if another reader has taken it over.
    #[must_use]
    pub fn renew(&self, mine: u64, now_ns: u64) -> bool {
        if self.holder.load(Ordering::Acquire) != mine {
            return false;
        }
        self.heartbeat_ns.store(now_ns, Ordering::Relaxed);
        true
    }

    /// Gives the lease `mine` back and disarms the ring. Does nothing if it is another reader's by now.
    pub fn release(&self, mine: u64) {
        if self.holder.load(Ordering::Acquire) == mine {
            self.mask.store(0, Ordering::Relaxed);
            // The generation stays, so that the next holder's word differs from this one. A failed exchange means that
            // somebody took over between the two lines, which takes a heartbeat of more than LEASE_NS ago.
            let _ = self.holder.compare_exchange(
                mine,
                mine & !u64::from(u32::MAX),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }
}
