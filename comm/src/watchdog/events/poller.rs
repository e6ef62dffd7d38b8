//! The event poller: the one thread of a process (`rs-events`) that queries CUDA events.
//!
//! It starts with the first communicator whose watchdog reads events, and ends with the last. A query is a call of the
//! device, and may block for as long as the device is stuck. So no thread waits for the poller for long: the poller keeps
//! what it found in memory, and a thread that wants it fresh waits for [`PATIENCE`] at most.
//!
//! [`Rounds`] decides who waits; it takes the time as an argument.

use std::{
    sync::{Condvar, Mutex, PoisonError, Weak},
    time::{Duration, Instant},
};

use ringsight_comm_base::{
    fork::PerProcess,
    log,
    sync::lock,
    threads::{self, Tended},
};

/// How long a thread waits for a fresh query: less than ranks may take to answer each other.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);

/// How old a query may be that a rank answers others by: as old as its answer is after its way through a busy machine.
/// Questions that come together share one round. With a round for each, a rank that many others ask would never catch up.
pub(crate) const RECENT: Duration = Duration::from_millis(20);

/// For how long no thread waits after one waited in vain: these threads also have to hear others' answers.
const AFTER_VAIN: Duration = Duration::from_secs(1);

/// What the poller polls.
pub(super) trait Polled: Send + Sync {
    /// Queries the device; may block.
    fn query(&self);
    /// The longest time from one query to the next.
    fn interval(&self) -> Duration;
}

/// See the module's documentation.
#[derive(Default)]
pub(super) struct EventPoller {
    state: Mutex<PollerState>,
    /// Notified when the thread is to begin a round at once, or to end.
    wake: Condvar,
    /// Notified when a round is over.
    round_over: Condvar,
}

#[derive(Default)]
struct PollerState {
    polled: Tended<dyn Polled>,
    rounds: Rounds,
}

/// The rounds of queries, by number.
#[derive(Debug, Default)]
struct Rounds {
    /// Rounds that have begun.
    begun: u64,
    /// Rounds that are over.
    over: u64,
    /// The round that some thread wants.
    wanted: u64,
    /// When the round began that is not over.
    since: Option<Instant>,
    /// When the last round began that is over.
    known: Option<Instant>,
    /// When a thread last waited in vain.
    vain: Option<Instant>,
}

/// What a thread gets that wants a fresh query.
#[derive(Debug, PartialEq, Eq)]
enum Freshness {
    /// What is known is fresh.
    Fresh,
    /// It is not, and to wait is in vain.
    Stale,
    /// It is once this round is over.
    After(u64),
}

impl Rounds {
    /// A round begins; returns its number.
    fn begin(&mut self, now: Instant) -> u64 {
        self.begun += 1;
        self.since = Some(now);
        self.begun
    }

    /// The round is over that began at `began`.
    fn end(&mut self, round: u64, began: Instant) {
        self.over = round;
        self.since = None;
        self.known = Some(began);
    }

    /// Some thread wants a round that begins from now on.
    fn want(&mut self) -> u64 {
        let next = self.begun + 1;
        self.wanted = self.wanted.max(next);
        next
    }

    /// Whether some thread wants another round.
    fn is_wanted(&self) -> bool {
        self.wanted > self.over
    }

    /// A thread wants a query that is at most `old`.
    fn ask(&mut self, old: Duration, now: Instant) -> Freshness {
        let within = |since: Option<Instant>, limit| since.is_some_and(|since| now - since < limit);
        if within(self.known, old) {
            return Freshness::Fresh;
        }
        if self.so_far(now).is_some_and(|so_far| so_far >= PATIENCE) {
            return Freshness::Stale;
        }
        let round = self.want();
        match within(self.vain, AFTER_VAIN) {
            true => Freshness::Stale,
            false => Freshness::After(round),
        }
    }

    /// A thread waited for a round; returns whether the round is over.
    fn waited(&mut self, round: u64, now: Instant) -> bool {
        let is_over = self.over >= round;
        self.vain = (!is_over).then_some(now);
        is_over
    }

    /// For how long the present round has lasted.
    fn so_far(&self, now: Instant) -> Option<Duration> {
        self.since.map(|since| now - since)
    }
}

/// The poller of this process.
pub(super) static POLLER: PerProcess<EventPoller> = PerProcess::new();

impl EventPoller {
    /// Polls `polled` until it is dropped or [`EventPoller::leave`] is called. If no thread can be started, a warning is
    /// logged and nothing is polled.
    pub(super) fn enter(&'static self, polled: Weak<dyn Polled>) {
        let mut state = lock(&self.state);
        state.rounds.want();
        let entered = state.polled.enter(polled, "rs-events", || self.run());
        drop(state);
        if let Err(error) = entered {
            tracing::warn!(target: log::INIT, "no thread to query events: {error}");
        }
        self.wake.notify_all();
    }

    /// Polls it no more. Does not wait for a query that has not come back.
    pub(super) fn leave(&self, polled: &Weak<dyn Polled>) {
        let mut state = lock(&self.state);
        let Some(thread) = state.polled.leave(polled.as_ptr()) else {
            return;
        };
        let is_idle = state.rounds.since.take().is_none();
        drop(state);
        self.wake.notify_all();
        // A thread in a round ends by itself after it.
        if is_idle {
            threads::join(thread);
        }
    }

    /// Begins a round soon, without waiting for it.
    pub(super) fn nudge(&self) {
        lock(&self.state).rounds.want();
        self.wake.notify_all();
    }

    /// Waits for a round that begins from now on, for [`PATIENCE`] at most; not at all if the last query is younger than
    /// `old`, or if to wait is in vain. Returns whether what is known is fresh.
    pub(super) fn refresh(&self, old: Duration) -> bool {
        let mut state = lock(&self.state);
        let freshness = state.rounds.ask(old, Instant::now());
        if freshness == Freshness::Fresh {
            return true;
        }
        self.wake.notify_all();
        let Freshness::After(round) = freshness else {
            return false;
        };
        if !state.polled.has_thread() {
            return false;
        }
        let (mut state, _) = self
            .round_over
            .wait_timeout_while(state, PATIENCE, |state| state.rounds.over < round)
            .unwrap_or_else(PoisonError::into_inner);
        state.rounds.waited(round, Instant::now())
    }

    /// For how long the thread has been in its present round: a query that has not come back.
    pub(super) fn round_so_far(&self) -> Option<Duration> {
        lock(&self.state).rounds.so_far(Instant::now())
    }

    fn run(&self) {
        let is_mine = |state: &PollerState| state.polled.is_tended_by_this_thread();
        let mut state = lock(&self.state);
        while is_mine(&state) {
            let began = Instant::now();
            let round = state.rounds.begin(began);
            let polled = state.polled.members();
            // Not under the lock: a thread that launches or asks must not wait for a query.
            drop(state);
            polled.iter().for_each(|polled| polled.query());
            let rest = polled.iter().map(|polled| polled.interval()).min();
            // This thread may be the last owner of one, whose end calls the device.
            drop(polled);
            state = lock(&self.state);
            if !is_mine(&state) {
                return;
            }
            state.rounds.end(round, began);
            self.round_over.notify_all();
            state = self
                .wake
                .wait_timeout_while(state, rest.unwrap_or(Duration::from_secs(1)), |state| {
                    is_mine(state) && !state.rounds.is_wanted() && !state.polled.is_empty()
                })
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Rounds, and a clock that the test turns.
    fn rounds() -> (Rounds, Instant) {
        (Rounds::default(), Instant::now())
    }

    #[test]
    fn questions_that_come_together_share_a_round() {
        let (mut rounds, t0) = rounds();
        assert_eq!(rounds.ask(RECENT, t0), Freshness::After(1));
        assert_eq!(rounds.ask(RECENT, t0), Freshness::After(1));
        let round = rounds.begin(t0);
        // What this round found out may be older than the question.
        assert_eq!(rounds.ask(RECENT, t0 + MS), Freshness::After(2));
        rounds.end(round, t0);
        assert!(rounds.is_wanted());
        assert_eq!(rounds.ask(RECENT, t0 + 19 * MS), Freshness::Fresh);
        assert_eq!(rounds.ask(RECENT, t0 + 20 * MS), Freshness::After(2));
        assert_eq!(rounds.ask(Duration::ZERO, t0 + MS), Freshness::After(2));
        let round = rounds.begin(t0 + 21 * MS);
        rounds.end(round, t0 + 21 * MS);
        assert!(!rounds.is_wanted());
    }

    #[test]
    fn nobody_waits_for_a_query_that_does_not_come_back() {
        let (mut rounds, t0) = rounds();
        rounds.begin(t0);
        assert_eq!(rounds.ask(Duration::ZERO, t0 + 99 * MS), Freshness::After(2));
        assert_eq!(rounds.ask(Duration::ZERO, t0 + PATIENCE), Freshness::Stale);
        assert_eq!(rounds.so_far(t0 + PATIENCE), Some(PATIENCE));
        rounds.end(1, t0);
        assert_eq!(
            rounds.ask(Duration::ZERO, t0 + PATIENCE),
            Freshness::After(2),
            "it came back"
        );
    }

    #[test]
    fn after_one_waited_in_vain_nobody_waits_for_a_second() {
        let (mut rounds, t0) = rounds();
        assert_eq!(rounds.ask(Duration::ZERO, t0), Freshness::After(1));
        assert!(!rounds.waited(1, t0));
        assert_eq!(rounds.ask(Duration::ZERO, t0 + 999 * MS), Freshness::Stale);
        assert!(rounds.is_wanted(), "the round is wanted all the same");
        assert_eq!(rounds.ask(Duration::ZERO, t0 + AFTER_VAIN), Freshness::After(1));
        let round = rounds.begin(t0 + AFTER_VAIN);
        rounds.end(round, t0 + AFTER_VAIN);
        assert!(rounds.waited(1, t0 + AFTER_VAIN));
        assert_eq!(
            rounds.ask(Duration::ZERO, t0 + AFTER_VAIN + MS),
            Freshness::After(2),
            "the last one did not wait in vain"
        );
    }
}
