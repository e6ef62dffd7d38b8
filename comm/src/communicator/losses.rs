//! Why a communicator could not be made, when ranks die meanwhile.

use std::{
    sync::{Arc, Condvar, Mutex, PoisonError, Weak},
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, ResultCode},
    sync::lock,
};

use crate::{
    bootstrap::{self, Bootstrap, sys},
    checks::Checks,
    watchdog::Watch,
};

/// How long the news of a death may take to a rank that has failed over its consequences.
const NEWS: Duration = Duration::from_millis(300);

/// Deaths of ranks while a communicator is being made, and from then on for its checks.
#[derive(Default)]
pub(super) struct Losses {
    state: Mutex<State>,
    told: Condvar,
}

#[derive(Default)]
struct State {
    first: Option<(u32, String)>,
    checks: Option<Arc<Checks>>,
    watch: Option<Weak<Watch>>,
}

impl Losses {
    pub(super) fn of(bootstrap: &Bootstrap) -> Arc<Self> {
        let losses = Arc::new(Self::default());
        let told = losses.clone();
        bootstrap.on_lost(Arc::new(move |rank, text| told.tell(rank, text)));
        losses
    }

    fn tell(&self, rank: u32, text: &str) {
        let mut state = lock(&self.state);
        if let Some(checks) = state.checks.clone() {
            let watch = state.watch.as_ref().and_then(Weak::upgrade);
            drop(state);
            // First: what is in progress ends with the communicator's failure.
            let report = watch.and_then(|watch| watch.rank_died(rank));
            checks.rank_died(rank, text);
            if let Some(report) = report {
                report.log();
            }
            return;
        }
        state.first.get_or_insert_with(|| (rank, text.to_owned()));
        self.told.notify_all();
    }

    /// The communicator is made: deaths are its checks' business.
    pub(super) fn hand_over(&self, checks: &Arc<Checks>, watch: Option<&Arc<Watch>>) {
        let mut state = lock(&self.state);
        state.checks = Some(checks.clone());
        state.watch = watch.map(Arc::downgrade);
        let first = state.first.take();
        drop(state);
        if let Some((rank, text)) = first {
            checks.rank_died(rank, &text);
        }
    }

    /// What making it failed with, in truth: a rank that has left may have done so because another died.
    pub(super) fn reason(&self, error: Error) -> Error {
        match error.code {
            ResultCode::RemoteError => {
                let state = lock(&self.state);
                let (state, _) = self
                    .told
                    .wait_timeout_while(state, NEWS, |state| state.first.is_none())
                    .unwrap_or_else(PoisonError::into_inner);
                match &state.first {
                    Some((rank, text)) => {
                        Error::new(ResultCode::RemoteError, format!("rank {rank} is gone: {text}"))
                    }
                    None => error,
                }
            }
            _ => with_want(error),
        }
    }
}

/// The same error, with what the process lacked meanwhile: ranks of one process may wait in vain for each other because one
/// of them had no socket left.
pub(super) fn with_want(error: Error) -> Error {
    // What the variable says has been read before anybody waited.
    let waited = bootstrap::default_timeout().unwrap_or_default() + Duration::from_secs(2);
    if error.code != ResultCode::SystemError || !sys::was_starved(waited) {
        return error;
    }
    let text = format!(
        "{} (this process ran out of file descriptors or memory: Too many open files?)",
        error.text
    );
    Error::new(error.code, text)
}
