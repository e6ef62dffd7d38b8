//! The NCCL release that the library says it is.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::{env, log, sync::AtLeastOnce};

/// The NCCL release whose ABI the library has, 2.30.7, as `NCCL_VERSION_CODE`.
pub const LIBRARY_VERSION: u32 = 23007;

/// What `RINGSIGHT_NCCL_VERSION` may say, each with its number.
const RELEASES: [(&str, u32); 2] = [("2.30.7", LIBRARY_VERSION), ("2.28.9", 22809)];

/// The number that `ncclGetVersion` gives: of NCCL 2.30.7, or of the release that `RINGSIGHT_NCCL_VERSION` names. Read once.
#[must_use]
pub fn claimed_version() -> u32 {
    static READ: AtLeastOnce = AtLeastOnce::new();
    static CLAIMED: AtomicU32 = AtomicU32::new(LIBRARY_VERSION);
    READ.call(|| {
        if let Some(text) = env::text("RINGSIGHT_NCCL_VERSION") {
            let known = RELEASES.iter().find(|(name, _)| *name == text);
            if known.is_none() {
                tracing::warn!(
                    target: log::ENV,
                    "RINGSIGHT_NCCL_VERSION={text} is neither 2.30.7 nor 2.28.9: 2.30.7 is taken"
                );
            }
            // Relaxed: `READ` publishes it.
            CLAIMED.store(
                known.map_or(LIBRARY_VERSION, |(_, number)| *number),
                Ordering::Relaxed,
            );
        }
    });
    CLAIMED.load(Ordering::Relaxed)
}
