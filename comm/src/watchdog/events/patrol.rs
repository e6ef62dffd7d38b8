//! The thread that queries events, one in a process: it begins with the first communicator whose operations are watched by
//! events and ends with the last.
//!
//! A query is a call of the device and may block behind it for as long as that is stuck. So nobody waits for this thread for
//! long: it keeps what it has found out in memory, where all others read it, and who wants that to be fresh waits for it for
//! [`PATIENCE`] at most.

use std::{
    sync::{Condvar, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use ringsight_comm_base::fork::PerProcess;

use crate::{
    communicator::lock,
    log,
    threads::{self, Tended},
};

/// How long somebody waits for a fresh answer: less than ranks may take to answer each other.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);

/// How old may be what a rank answers others: as old as the answer is when it has gone through a busy machine. Questions that come together
/// are answered from one round; were there one for each, a rank that many ask would be behind for good.
pub(crate) const RECENT: Duration = Duration::from_millis(20);

/// For how long nobody waits once somebody has in vain: the threads that wait have others' answers to hear, too, and would be
/// behind with those as long as the thread that queries is.
pub(super) const AFTER_VAIN: Duration = Duration::from_secs(1);

/// What the thread looks after.
pub(super) trait Source: Send + Sync {
    /// Finds out how far things are; may block.
    fn query(&self);
    /// How long it takes at most from one time to the next.
    fn interval(&self) -> Duration;
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct Patrol {
    state: Mutex<State>,
    /// Told when the thread is to go round at once, or to end.
    wake: Condvar,
    /// Told when it has gone round.
    round: Condvar,
}

#[derive(Default)]
struct State {
    sources: Tended<dyn Source>,
    /// Rounds that have been begun, that are over, and that somebody waits for.
    begun: u64,
    over: u64,
    wanted: u64,
    /// Since when it has been going round.
    since: Option<Instant>,
    /// When the last round that is over began.
    known: Option<Instant>,
    /// When somebody last waited in vain.
    vain: Option<Instant>,
}

/// That of this process.
pub(super) static PATROL: PerProcess<Patrol> = PerProcess::new();

impl Patrol {
    /// Looks after a source until it is dropped or [`Patrol::leave`] is called. Without a thread, which is warned of, nothing is
    /// found out.
    pub(super) fn enter(&'static self, source: Weak<dyn Source>) {
        let mut state = lock(&self.state);
        state.wanted = state.wanted.max(state.begun + 1);
        let entered = state.sources.enter(source, "rs-events", || self.run());
        drop(state);
        if let Err(error) = entered {
            tracing::warn!(target: log::INIT, "no thread to query events: {error}");
        }
        self.wake.notify_all();
    }

    /// Looks after it no more. Does not wait for a query that has not come back.
    pub(super) fn leave(&self, source: &Weak<dyn Source>) {
        let mut state = lock(&self.state);
        let Some(thread) = state.sources.leave(source.as_ptr()) else {
            return;
        };
        let idle = state.since.take().is_none();
        drop(state);
        self.wake.notify_all();
        // A thread that is going round ends by itself when it comes back.
        if idle {
            threads::join(thread);
        }
    }

    /// Has it go round, without waiting.
    pub(super) fn nudge(&self) {
        let mut state = lock(&self.state);
        state.wanted = state.wanted.max(state.begun + 1);
        drop(state);
        self.wake.notify_all();
    }

    /// Waits until a round that begins from now on is over, for [`PATIENCE`] at most, and not at all where the present round has
    /// taken that long already, somebody has just waited in vain, or the last one began less than `old` ago. Whether what is known
    /// is fresh.
    pub(super) fn refresh(&self, old: Duration) -> bool {
        let mut state = lock(&self.state);
        if state.known.is_some_and(|began| began.elapsed() < old) {
            return true;
        }
        let stuck = |state: &State| state.since.is_some_and(|since| since.elapsed() >= PATIENCE);
        if !state.sources.has_thread() || stuck(&state) {
            return false;
        }
        let fresh = state.begun + 1;
        state.wanted = state.wanted.max(fresh);
        self.wake.notify_all();
        if state.vain.is_some_and(|vain| vain.elapsed() < AFTER_VAIN) {
            return false;
        }
        let (mut state, _) = self
            .round
            .wait_timeout_while(state, PATIENCE, |state| state.over < fresh)
            .unwrap_or_else(PoisonError::into_inner);
        let is_fresh = state.over >= fresh;
        state.vain = (!is_fresh).then(Instant::now);
        is_fresh
    }

    /// For how long the thread has been in its present round: a query that has not come back.
    pub(super) fn round_so_far(&self) -> Option<Duration> {
        lock(&self.state).since.map(|since| since.elapsed())
    }

    fn run(&self) {
        let is_mine = |state: &State| state.sources.is_tended_by_this_thread();
        let mut state = lock(&self.state);
        while is_mine(&state) {
            state.begun += 1;
            let number = state.begun;
            let began = Instant::now();
            state.since = Some(began);
            let sources = state.sources.members();
            // Not under the lock: whoever launches or asks must not wait for a query.
            drop(state);
            sources.iter().for_each(|source| source.query());
            let rest = sources.iter().map(|source| source.interval()).min();
            // The last owner of one may be this thread: its end calls the device.
            drop(sources);
            state = lock(&self.state);
            if !is_mine(&state) {
                return;
            }
            state.over = number;
            state.since = None;
            state.known = Some(began);
            self.round.notify_all();
            let rest = rest.unwrap_or(Duration::from_secs(1));
            state = self
                .wake
                .wait_timeout_while(state, rest, |state| {
                    is_mine(state) && state.wanted <= state.over && !state.sources.is_empty()
                })
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}
