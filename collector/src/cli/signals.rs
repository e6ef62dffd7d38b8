//! Ending on a signal: the first one asks the loop to end, a second one ends the process as if it were not handled.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    flag,
};

/// Whether a signal asked this process to end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Handles SIGINT, SIGTERM and SIGHUP from now on.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn install() -> std::io::Result<Self> {
        let ending = Self::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            // In this order: the first signal finds the flag down and raises it.
            flag::register_conditional_default(signal, ending.0.clone())?;
            flag::register(signal, ending.0.clone())?;
        }
        Ok(ending)
    }

    /// Whether to end. Relaxed: the flag guards no other memory.
    pub(crate) fn asked(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
