//! What came of a case.

use std::time::Duration;

use ringsight_failover::Report;
use ringsight_verbs::endpoint::TimedReport;

use super::{outside::COSTS, rank::SLOT};

/// Place of the system calls in a rank's costs.
pub(crate) const CALLS: usize = 4;
/// Place of those of them that the thread made which moves the steps.
pub(crate) const OWN_CALLS: usize = 7;
/// Place of the longest that one look at the ends took, in microseconds.
pub(crate) const LONGEST: usize = 5;
/// Place of the number of ends that had given up the path which stayed down, and were seen to post nothing more over it.
pub(crate) const WATCHED: usize = 6;

/// Place of the number of times that the boundary's step was found to be torn when its path was given up: its bytes were there, and
/// nothing told of them.
pub(crate) const TORN: usize = 8;

/// What came of a case, seen by one rank.
#[derive(Default)]
pub(crate) struct Seen {
    pub(crate) error: Option<String>,
    /// Work requests posted and not known to be through right before the link was taken down.
    pub(crate) outstanding: u64,
    /// How many of them were not through when it was down; the same of a second failure.
    pub(crate) cut_off: Vec<u64>,
    pub(crate) switches: Vec<(u8, u8)>,
    pub(crate) replayed: u64,
    pub(crate) broken: Vec<String>,
    /// When the link went down; to the first post on the other path, and to the first one that got over.
    pub(crate) down: Option<Duration>,
    pub(crate) switch: Option<Duration>,
    pub(crate) recovered: Option<Duration>,
    pub(crate) wrong: Option<String>,
    /// What the other rank found wrong, its error included.
    pub(crate) peer: Option<String>,
    /// When a link was up again for the last time; from then to the last switch back to the primary path.
    pub(crate) up: Option<Duration>,
    pub(crate) back: Option<Duration>,
    /// Steps and time from the first acknowledged step of a window to the last one: since the first step over the other path, or, if
    /// there is no switch, since the beginning.
    pub(crate) window: Option<(Duration, u64)>,
    pub(crate) last: (Duration, u64),
    /// When all was over here.
    pub(crate) over: Option<Duration>,
    /// How long the case itself took, without its connections.
    pub(crate) ran: Duration,
    /// Bytes that went over the links in that time, where they are counted.
    pub(crate) wire: Option<u64>,
    /// What this rank and the other cost: requests of steps, credits, other requests, completions; then [`CALLS`], [`LONGEST`],
    /// [`WATCHED`], [`OWN_CALLS`] and [`TORN`].
    pub(crate) costs: [[u64; COSTS]; 2],
}

impl Seen {
    pub(crate) fn note(&mut self, timed: TimedReport) {
        let since = self.down.map(|down| timed.at.saturating_sub(down));
        match timed.report {
            Report::Switched {
                from, to, replayed, ..
            } => {
                if to == 0 {
                    self.back = self.up.map(|up| timed.at.saturating_sub(up));
                }
                self.switches.push((from, to));
                self.replayed += replayed;
                self.switch = self.switch.or(since);
            }
            Report::Recovered { .. } if self.recovered.is_none() => {
                self.recovered = since;
                self.window = None;
            }
            Report::Recovered { .. } => {}
            Report::Broken { link, cause, .. } => self.broken.push(format!("{}:{cause}", link.path)),
            Report::Restored { .. } => {}
        }
    }

    /// So many steps are over.
    pub(crate) fn acked(&mut self, now: Duration, acked: u64) {
        if acked > self.last.1 {
            self.last = (now, acked);
            self.window.get_or_insert(self.last);
        }
    }

    /// All was over before anybody need have heard of a link that went down and came up: on a busy machine devices' words take that long.
    pub(crate) fn was_over_soon(&self) -> bool {
        const HEARD: Duration = Duration::from_millis(100);
        let (Some(over), Some(up)) = (self.over, self.up) else {
            return false;
        };
        over < up + HEARD
    }

    /// MiB/s in the window.
    pub(crate) fn rate(&self) -> Option<f64> {
        let (start, first) = self.window?;
        let (steps, time) = (self.last.1 - first, self.last.0.saturating_sub(start));
        (steps > 0).then(|| steps as f64 * SLOT as f64 / f64::from(1 << 20) / time.as_secs_f64())
    }
}
