//! NVTX ranges: what Nsight Systems and other tools show of the calls into this library, one range a call, named as the function.
//!
//! A tool announces itself by `NVTX_INJECTION64_PATH`, the library that NVTX has to load. Where there is none, a call costs a look at a
//! flag: the `nvtx` crate would allocate the name before it finds that nobody listens.

use std::sync::LazyLock;

use ringsight_comm_base::env;

/// A range of this thread, until it is dropped.
pub(super) struct Range(());

impl Range {
    /// Begins a range, if a tool listens.
    pub(super) fn enter(name: &str) -> Option<Self> {
        static LISTENS: LazyLock<bool> = LazyLock::new(|| env::text("NVTX_INJECTION64_PATH").is_some());
        LISTENS.then(|| {
            nvtx::range_push!("{name}");
            Self(())
        })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        nvtx::range_pop!();
    }
}
