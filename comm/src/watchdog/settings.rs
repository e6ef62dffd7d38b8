//! What the environment says of the watchdog.

use std::time::Duration;

use crate::{
    env,
    error::{Error, Result},
};

/// What a hang does besides being reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing.
    #[default]
    Report,
    /// It becomes the asynchronous error of the communicator.
    Error,
    /// The communicator fails: every wait is released, too.
    Abort,
}

/// What tells how far operations are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    /// The device's kernels, in memory.
    #[default]
    Pages,
    /// Events before and behind them.
    Events,
}

impl Source {
    fn of(value: Option<&str>) -> Result<Self> {
        match value {
            None | Some("pages") => Ok(Self::Pages),
            Some("events") => Ok(Self::Events),
            Some(other) => Err(Error::argument(format!(
                "RINGSIGHT_WATCHDOG_SOURCE={other} is unknown; accepted are pages and events"
            ))),
        }
    }
}

/// Earlier thresholds for what is usually fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Adaptive {
    /// So many times as long as usual is too long.
    pub(crate) factor: u32,
    /// But nothing that is shorter than this.
    pub(crate) floor: Duration,
}

impl Adaptive {
    fn of(factor: Option<&str>, floor: Duration) -> Result<Option<Self>> {
        let Some(text) = factor else { return Ok(None) };
        let factor = text.parse().map_err(|_| {
            Error::argument(format!(
                "RINGSIGHT_ADAPTIVE_TIMEOUT={text} is not a whole number: how many times as long as usual is too long; 0: off"
            ))
        })?;
        Ok((factor > 0).then_some(Self { factor, floor }))
    }
}

/// When the watchdog speaks, and what it does then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// How long an operation may be in progress before the other ranks are asked.
    pub(crate) threshold: Duration,
    /// How long a rank may be late before that is a hang.
    pub(crate) arrival: Duration,
    /// How long an operation that all ranks have come to may take, and a nanosecond for each of its bytes, where nothing tells what moves.
    pub(crate) stuck: Duration,
    /// How often it looks.
    pub(crate) interval: Duration,
    pub(crate) action: Action,
    pub(crate) source: Source,
    /// `None`: the threshold is the same for all.
    pub(crate) adaptive: Option<Adaptive>,
}

/// By so much an operation may be past a threshold that has adapted until it is seen at all: a fraction of the second in which it is to be
/// spoken of, and not so often that it costs anything when nothing happens.
const SHORTLY_AFTER: Duration = Duration::from_millis(250);

/// Shortest interval.
pub(crate) const SHORTEST: Duration = Duration::from_millis(50);

impl Settings {
    /// What the environment says for a communicator of this name; `None` if the watchdog is off.
    ///
    /// # Errors
    /// A value that means nothing: better to say so than to watch with another one.
    pub(crate) fn read(communicator: &str) -> Result<Option<Self>> {
        let threshold = milliseconds("NCCL_KERNEL_TIMEOUT_MS", 2000)?;
        let named = env::text(NAMED).map_or(Ok(None), |text| of_name(&text, communicator))?;
        let threshold = named.unwrap_or(threshold);
        let action = match env::text("RINGSIGHT_WATCHDOG_ACTION").as_deref() {
            None | Some("report") => Action::Report,
            Some("error") => Action::Error,
            Some("abort") => Action::Abort,
            Some(other) => {
                return Err(Error::argument(format!(
                    "RINGSIGHT_WATCHDOG_ACTION={other} is unknown; accepted are report, error and abort"
                )));
            }
        };
        let settings = Self {
            threshold,
            arrival: milliseconds("RINGSIGHT_ARRIVAL_TIMEOUT_MS", 600_000)?,
            stuck: milliseconds("RINGSIGHT_STUCK_TIMEOUT_MS", 60_000)?,
            interval: milliseconds("RINGSIGHT_WATCHDOG_INTERVAL_MS", 1000)?.max(SHORTEST),
            action,
            adaptive: Adaptive::of(
                env::text("RINGSIGHT_ADAPTIVE_TIMEOUT").as_deref(),
                milliseconds("RINGSIGHT_ADAPTIVE_FLOOR_MS", 100)?,
            )?,
            source: Source::of(env::text("RINGSIGHT_WATCHDOG_SOURCE").as_deref())?,
        };
        Ok((!threshold.is_zero()).then_some(settings))
    }

    /// How long it takes at most until events are queried again: an operation counts as begun from when that is seen.
    pub(crate) fn query_interval(&self) -> Duration {
        (self.interval / 4)
            .min(self.least() / 8)
            .clamp(Duration::from_millis(20), Duration::from_millis(250))
    }

    /// How long it sleeps when nothing is late: short enough to see an operation well before its time is up; with thresholds that adapt,
    /// not long after the shortest. Of what is seen to be in progress the time is known.
    pub(crate) fn rest(&self) -> Duration {
        let most = self.adaptive.map_or(Duration::MAX, |_| SHORTLY_AFTER);
        self.interval.min(self.threshold / 2).min(most).max(SHORTEST)
    }

    /// The shortest threshold that an operation may have.
    fn least(&self) -> Duration {
        self.adaptive
            .map_or(self.threshold, |adaptive| adaptive.floor.min(self.threshold))
    }
}

/// Thresholds of communicators by name: `name=milliseconds`, separated by commas.
const NAMED: &str = "RINGSIGHT_KERNEL_TIMEOUTS_MS";

/// What a list says of a communicator; the last entry of its name counts. All of the list must be readable.
fn of_name(list: &str, communicator: &str) -> Result<Option<Duration>> {
    let mut found = None;
    for entry in list.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        // Names may hold the sign, numbers do not.
        let parsed = entry
            .rsplit_once('=')
            .and_then(|(name, value)| Some((name.trim(), value.trim().parse().ok()?)));
        let Some((name, value)) = parsed else {
            return Err(Error::argument(format!(
                "{NAMED}: {entry} is not a name and a number of milliseconds, as in tp=5000"
            )));
        };
        if name == communicator {
            found = Some(Duration::from_millis(value));
        }
    }
    Ok(found)
}

fn milliseconds(name: &str, default: u64) -> Result<Duration> {
    let Some(value) = env::text(name) else {
        return Ok(Duration::from_millis(default));
    };
    value
        .parse()
        .map(Duration::from_millis)
        .map_err(|_| Error::argument(format!("{name}={value} is not a number of milliseconds")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adaptive_thresholds_are_asked_for_by_a_number() {
        let floor = Duration::from_millis(7);
        let of = |text| Adaptive::of(text, floor).map_err(|error| error.text);
        assert_eq!(of(None), Ok(None));
        assert_eq!(of(Some("0")), Ok(None));
        assert_eq!(of(Some("20")), Ok(Some(Adaptive { factor: 20, floor })));
        for rubbish in ["yes", "-1", "1.5"] {
            assert!(of(Some(rubbish)).unwrap_err().contains(rubbish));
        }
    }

    #[test]
    fn whoever_watches_closely_rests_all_the_same() {
        let floor = Duration::from_millis(100);
        let settings = |threshold_ms, adaptive| Settings {
            threshold: Duration::from_millis(threshold_ms),
            arrival: Duration::from_secs(600),
            stuck: Duration::from_secs(60),
            interval: Duration::from_secs(1),
            action: Action::Report,
            source: Source::Pages,
            adaptive,
        };
        let adaptive = Some(Adaptive { factor: 20, floor });
        let rest_ms = |threshold_ms, adaptive| settings(threshold_ms, adaptive).rest().as_millis();
        assert_eq!((rest_ms(2000, None), rest_ms(300, None)), (1000, 150));
        assert_eq!((rest_ms(2000, adaptive), rest_ms(300, adaptive)), (250, 150));
    }

    #[test]
    fn a_source_that_is_none_is_refused() {
        let of = |value| Source::of(value).map_err(|error| error.text);
        assert_eq!(of(None), Ok(Source::Pages));
        assert_eq!(of(Some("pages")), Ok(Source::Pages));
        assert_eq!(of(Some("events")), Ok(Source::Events));
        for rubbish in ["Events", "pages,events", "1"] {
            let text = of(Some(rubbish)).unwrap_err();
            assert!(
                text.contains(rubbish) && text.contains("pages and events"),
                "{text}"
            );
        }
    }

    #[test]
    fn thresholds_go_by_name_and_lists_must_be_readable() {
        let of = |list, name| of_name(list, name).unwrap().map(|time| time.as_millis());
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "tp"), Some(5000));
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "dp"), Some(0));
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "a=b"), Some(7));
        assert_eq!(of("tp=5000,tp=1", "tp"), Some(1));
        assert_eq!(of("tp=5000", ""), None);
        for rubbish in ["tp", "tp=", "tp=5s", "tp=-1", "x=1,tp"] {
            let text = of_name(rubbish, "other").unwrap_err().text;
            assert!(text.contains("tp") && text.contains(NAMED), "{text}");
        }
    }
}
