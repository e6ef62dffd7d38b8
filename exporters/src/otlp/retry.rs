//! The back-off of one signal: what becomes of a request after the server's answer, and when the next request may be sent.
//!
//! One policy serves both protocols and all signals. [`Backoff`] has no clock: the caller gives the time, the answer and a random number.
//!
//! | answer | the request | our pause |
//! |---|---|---|
//! | accepted, at most half of the items rejected | settled | none; the next refusal is the first |
//! | accepted, more than half of the items rejected | settled | grows |
//! | transient error | kept, until [`Retry::give_up_after`] | grows |
//! | too large, several items | halved | grows to twice [`Retry::initial`] at most: the size that fits is found in seconds |
//! | too large, one item | dropped | grows |
//! | any other refusal | dropped | grows |
//!
//! Invariants:
//! - The pause belongs to the signal, not to the request: a request that is dropped makes the next one wait, too.
//! - The next request waits for our pause and for the time that the server named, whichever is longer, and never longer than
//!   [`MAX_WAIT`].
//! - A pause that grows begins at [`Retry::initial`], doubles up to [`Retry::max`], and is cut at random by up to a half.
//! - Whatever the server answers, it refuses at most 15 requests of a signal in any 3.5 s (with the default [`Retry::initial`], 0.5 s).

use std::time::{Duration, Instant};

use super::config::Retry;
use super::response::{Kind, MAX_WAIT, Refusal};

/// How long a size that the server refused is remembered. A server may be given a higher limit.
const CEILING_AGE: Duration = Duration::from_secs(3600);

/// Why items are dropped that a living server kept answering with transient errors.
pub(super) const RETRIES_EXHAUSTED: &str = "retries_exhausted";
/// Why an item is dropped that the server finds too large on its own.
pub(super) const TOO_LARGE_FOR_SERVER: &str = "too_large_for_server";

/// A request that was refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    /// Uncompressed size.
    pub(super) bytes: usize,
    pub(super) items: usize,
    /// When this attempt began.
    pub(super) started: Instant,
}

/// What becomes of a request that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It is sent again.
    Kept,
    /// Its halves are sent.
    Halved,
    /// It is dropped for this reason.
    Dropped(&'static str),
}

/// When requests of one signal may be sent.
#[derive(Debug)]
pub(super) struct Backoff {
    settings: Retry,
    /// Refusals since a request was last accepted.
    refusals: u32,
    /// End of our own pause.
    own_pause: Option<Instant>,
    /// End of the wait that the server asked for.
    server_wait: Option<Instant>,
    /// Since when a server answers the current request with transient errors, moved on by the waits that it asked for.
    answered_since: Option<Instant>,
    /// Sizes above this one were refused as too large, and when that is forgotten.
    ceiling: Option<(usize, Instant)>,
}

impl Backoff {
    pub(super) fn new(settings: Retry) -> Self {
        Self {
            settings,
            refusals: 0,
            own_pause: None,
            server_wait: None,
            answered_since: None,
            ceiling: None,
        }
    }

    /// No request may be sent before; `None` if one may be sent at once.
    pub(super) fn ready_at(&self) -> Option<Instant> {
        self.own_pause.max(self.server_wait)
    }

    /// Largest request that is worth sending, unless a single item is larger.
    pub(super) fn ceiling(&self, now: Instant) -> usize {
        let known = self.ceiling.filter(|(_, forgotten)| now < *forgotten);
        known.map_or(usize::MAX, |(bytes, _)| bytes)
    }

    /// The exporter shuts down: our own pause ends, so that there is a last attempt before the deadline. The server's wait stays.
    pub(super) fn hasten(&mut self) {
        self.own_pause = None;
        self.refusals = 0;
    }

    /// A request of `items` was accepted at `now`, but for `rejected` of them. `random` is in `0.0..1.0`.
    pub(super) fn accepted(&mut self, items: usize, rejected: u64, now: Instant, random: f64) {
        self.answered_since = None;
        if rejected > items as u64 / 2 {
            self.grow(now, None, random, self.settings.max);
        } else {
            self.refusals = 0;
            (self.own_pause, self.server_wait) = (None, None);
        }
    }

    /// Decides about a request that was refused at `now`. `random` is in `0.0..1.0`.
    pub(super) fn refused(&mut self, refusal: &Refusal, sent: Sent, now: Instant, random: f64) -> Fate {
        let fate = match refusal.kind {
            Kind::TooLarge if sent.items > 1 => {
                let Retry { initial, max, .. } = self.settings;
                self.grow(now, refusal.wait, random, max.min(initial * 2));
                let half = sent.bytes / 2;
                // What both halves repeat, and uneven items, make a half a bit larger.
                let ceiling = (half + half / 8).min(self.ceiling(now));
                self.ceiling = Some((ceiling, now + CEILING_AGE));
                Fate::Halved
            }
            Kind::TooLarge => {
                self.grow(now, refusal.wait, random, self.settings.max);
                Fate::Dropped(TOO_LARGE_FOR_SERVER)
            }
            Kind::Transient { answered } => {
                let pause = self.grow(now, refusal.wait, random, self.settings.max);
                self.patience(answered, sent.started, now, pause)
            }
            Kind::Permanent(reason) => {
                self.grow(now, refusal.wait, random, self.settings.max);
                Fate::Dropped(reason)
            }
        };
        if fate != Fate::Kept {
            self.answered_since = None;
        }
        fate
    }

    /// Whether a request that met a transient error is kept. One that a living server never takes must not hold up those behind it
    /// for ever; a server that cannot be reached gets everything when it comes back.
    fn patience(&mut self, answered: bool, started: Instant, now: Instant, pause: Duration) -> Fate {
        if !answered {
            self.answered_since = None;
            return Fate::Kept;
        }
        let since = self.answered_since.unwrap_or(started);
        if now.saturating_duration_since(since) + pause > self.settings.give_up_after {
            return Fate::Dropped(RETRIES_EXHAUSTED);
        }
        // Waiting as long as the server says costs no patience.
        let beyond = self.server_wait.map_or(Duration::ZERO, |until| {
            until.saturating_duration_since(now + pause)
        });
        self.answered_since = Some(since + beyond);
        Fate::Kept
    }

    /// Begins a pause that is twice as long as the last one, but not longer than `max`, and the wait that the server asked for.
    /// Returns the pause.
    fn grow(&mut self, now: Instant, asked: Option<Duration>, random: f64, max: Duration) -> Duration {
        let full = self.settings.initial.saturating_mul(1 << self.refusals.min(20));
        self.refusals = self.refusals.saturating_add(1);
        // Cut at random, so that collectors do not retry in step.
        let pause = full.min(max).min(MAX_WAIT).mul_f64(1.0 - random / 2.0);
        self.own_pause = Some(now + pause);
        self.server_wait = asked.map(|asked| now + asked.min(MAX_WAIT));
        pause
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const RETRY: Retry = Retry {
        initial: Duration::from_millis(500),
        max: Duration::from_secs(10),
        give_up_after: Duration::from_secs(300),
    };
    const HOUR: Duration = Duration::from_secs(3600);

    /// A signal whose requests are sent as early as they may be, on a virtual clock.
    struct Signal {
        backoff: Backoff,
        start: Instant,
        now: Instant,
        random: f64,
    }

    impl Signal {
        fn new(random: f64) -> Self {
            let start = Instant::now();
            Self {
                backoff: Backoff::new(RETRY),
                start,
                now: start,
                random,
            }
        }

        /// Lets time pass until a request may be sent. Returns the time since the start.
        fn until_ready(&mut self) -> Duration {
            self.now = self
                .backoff
                .ready_at()
                .map_or(self.now, |ready| ready.max(self.now));
            self.now - self.start
        }

        /// A request of `items`, each of 100 bytes, is accepted but for `rejected`.
        fn accepted(&mut self, items: usize, rejected: u64) {
            self.until_ready();
            self.backoff.accepted(items, rejected, self.now, self.random);
        }

        /// A request of `items`, each of 100 bytes, is refused by a server that asks to wait for `wait` seconds.
        fn refused(&mut self, items: usize, kind: Kind, wait: Option<u64>) -> Fate {
            self.until_ready();
            let sent = Sent {
                bytes: 100 * items,
                items,
                started: self.now,
            };
            let refusal = Refusal {
                kind,
                wait: wait.map(Duration::from_secs),
                error: String::new(),
            };
            self.backoff.refused(&refusal, sent, self.now, self.random)
        }

        fn wait(&self) -> Duration {
            let ready = self.backoff.ready_at();
            ready.map_or(Duration::ZERO, |ready| ready.saturating_duration_since(self.now))
        }
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_an_accepted_request_ends_them() {
        for (random, cut) in [(0.0, 1.0), (0.5, 0.75)] {
            let mut signal = Signal::new(random);
            for seconds in [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0] {
                assert_eq!(signal.refused(1, Kind::BUSY, None), Fate::Kept);
                assert_eq!(signal.wait(), Duration::from_secs_f64(seconds * cut));
            }
            signal.accepted(4, 2);
            assert_eq!(signal.wait(), Duration::ZERO);
            signal.refused(1, Kind::BUSY, None);
            assert_eq!(signal.wait(), Duration::from_secs_f64(0.5 * cut));
        }
    }

    #[test]
    fn the_longer_wait_counts_and_none_is_longer_than_an_hour() {
        let mut signal = Signal::new(0.0);
        for (asked, expected) in [
            (0, 0.5),
            (600, 600.0),
            (1, 2.0),
            (7_200, 3_600.0),
            (u64::MAX, 3_600.0),
        ] {
            signal.refused(1, Kind::BUSY, Some(asked));
            assert_eq!(signal.wait(), Duration::from_secs_f64(expected), "{asked}");
        }
    }

    #[test]
    fn a_request_that_is_dropped_makes_the_next_one_wait() {
        for kind in [Kind::Permanent("rejected"), Kind::TooLarge] {
            let mut signal = Signal::new(0.0);
            for seconds in [0.5, 1.0, 2.0] {
                assert!(matches!(signal.refused(1, kind, None), Fate::Dropped(_)));
                assert_eq!(signal.wait(), Duration::from_secs_f64(seconds));
            }
            signal.refused(1, kind, Some(900));
            assert_eq!(signal.wait(), Duration::from_secs(900));
        }
        let mut signal = Signal::new(0.0);
        signal.accepted(5, 3);
        assert_eq!(
            signal.wait(),
            Duration::from_millis(500),
            "most of it was rejected"
        );
    }

    #[test]
    fn a_living_servers_refusals_exhaust_patience_and_an_absent_server_does_not() {
        let mut signal = Signal::new(0.0);
        let end = loop {
            let at = signal.until_ready();
            let fate = signal.refused(1, Kind::BUSY, None);
            if fate != Fate::Kept {
                assert_eq!(fate, Fate::Dropped(RETRIES_EXHAUSTED));
                break at;
            }
        };
        assert!((280..=300).contains(&end.as_secs()), "{end:?}");
        assert!(signal.wait() > Duration::ZERO, "the next request waits, too");
        // The next request has patience of its own.
        assert_eq!(signal.refused(1, Kind::BUSY, None), Fate::Kept);

        let mut signal = Signal::new(0.0);
        while signal.until_ready() < HOUR {
            assert_eq!(signal.refused(1, Kind::UNREACHABLE, None), Fate::Kept);
        }
    }

    #[test]
    fn a_wait_that_the_server_asks_for_costs_no_patience() {
        let mut signal = Signal::new(0.0);
        while signal.refused(1, Kind::BUSY, Some(600)) == Fate::Kept {}
        let end = signal.until_ready();
        assert!(end > 5 * HOUR && end < 7 * HOUR, "{end:?}");
    }

    #[test]
    fn a_size_that_fits_is_found_within_seconds_and_remembered_for_an_hour() {
        let mut signal = Signal::new(0.0);
        let (mut items, mut requests) = (1 << 15, 0);
        let end = loop {
            let at = signal.until_ready();
            let fate = signal.refused(items, Kind::TooLarge, None);
            requests += 1;
            match fate {
                Fate::Halved => items /= 2,
                fate => {
                    assert_eq!(fate, Fate::Dropped(TOO_LARGE_FOR_SERVER));
                    break at;
                }
            }
        };
        assert_eq!((items, requests), (1, 16));
        assert!(end < Duration::from_secs(15), "{end:?}");
        assert_eq!(
            signal.backoff.ceiling(signal.now),
            112,
            "half of 200 and an eighth"
        );
        assert_eq!(signal.backoff.ceiling(signal.now + HOUR), usize::MAX);
    }

    #[test]
    fn a_shutdown_cuts_our_pause_and_not_the_servers() {
        let mut signal = Signal::new(0.0);
        signal.refused(1, Kind::UNREACHABLE, None);
        signal.backoff.hasten();
        assert_eq!(signal.wait(), Duration::ZERO);
        signal.refused(1, Kind::BUSY, Some(30));
        signal.backoff.hasten();
        assert_eq!(signal.wait(), Duration::from_secs(30));
    }

    /// What a request of some items meets: so many are rejected, or it is refused.
    #[derive(Clone, Debug)]
    enum Answer {
        Accepted(u64),
        Refused(Kind, Option<u64>),
    }

    fn answer() -> impl Strategy<Value = (usize, Answer)> {
        let kind = prop::sample::select(&[Kind::BUSY, Kind::UNREACHABLE, Kind::TooLarge, Kind::REJECTED][..]);
        let wait = prop_oneof![
            Just(None),
            (0..8_000u64).prop_map(Some),
            any::<u64>().prop_map(Some)
        ];
        let answer = prop_oneof![
            4 => (kind, wait).prop_map(|(kind, wait)| Answer::Refused(kind, wait)),
            1 => (0..9u64).prop_map(Answer::Accepted),
        ];
        (1..9usize, answer)
    }

    proptest! {
        #[test]
        fn no_answers_make_it_hammer(answers in prop::collection::vec(answer(), 1..200), random in 0.0..1.0) {
            let mut signal = Signal::new(random);
            let mut refusals: Vec<Duration> = Vec::new();
            for (items, answer) in answers {
                let at = signal.until_ready();
                match answer {
                    Answer::Accepted(rejected) => {
                        signal.accepted(items, rejected);
                        prop_assert_eq!(signal.wait() > Duration::ZERO, rejected > items as u64 / 2);
                    }
                    Answer::Refused(kind, wait) => {
                        let fate = signal.refused(items, kind, wait);
                        prop_assert_eq!(fate == Fate::Halved, kind == Kind::TooLarge && items > 1);
                        let asked = Duration::from_secs(wait.unwrap_or(0)).min(MAX_WAIT);
                        prop_assert!(signal.wait() >= asked.max(RETRY.initial / 2));
                        refusals.push(at);
                    }
                }
                prop_assert!(signal.wait() <= MAX_WAIT);
            }
            for (index, first) in refusals.iter().enumerate() {
                let within = refusals[index..].iter().filter(|at| **at - *first <= Duration::from_millis(3_500));
                prop_assert!(within.count() <= 15);
            }
        }
    }
}
