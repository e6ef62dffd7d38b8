//! Waiting for what must come.

use std::{
    thread,
    time::{Duration, Instant},
};

/// Nothing that is waited for takes so long on a machine that runs at all.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// `NCCL_KERNEL_TIMEOUT_MS` where nobody but who is at fault may be named: a busy machine holds up others for 300 ms, too.
pub const PATIENT_MS: &str = "1000";

/// Waits until `is_so`.
#[track_caller]
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}
