//! The watchdog's settings, from the environment.

use std::time::Duration;

use ringsight_comm_base::{
    env,
    error::{Error, Result},
};

/// What a hang does to the communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Action {
    /// Nothing: it is only reported.
    #[default]
    Report,
    /// It sets the asynchronous error.
    Error,
    /// The communicator fails, which sets the error and releases every wait.
    Abort,
}

/// What tells how far an operation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ProgressSource {
    /// Its kernel, which writes to memory when it starts, moves data and stops.
    #[default]
    Pages,
    /// CUDA events before and behind its kernel.
    Events,
}

impl ProgressSource {
    fn parse(value: Option<&str>) -> Result<Self> {
        match value {
            None | Some("pages") => Ok(Self::Pages),
            Some("events") => Ok(Self::Events),
            Some(other) => Err(Error::argument(format!(
                "RINGSIGHT_WATCHDOG_SOURCE={other} is unknown; accepted are pages and events"
            ))),
        }
    }
}

/// Thresholds that follow from how long operations usually take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdaptiveThreshold {
    /// The threshold in medians of the operation's kind.
    pub(crate) factor: u32,
    /// The shortest threshold.
    pub(crate) floor: Duration,
}

impl AdaptiveThreshold {
    fn parse(factor: Option<&str>, floor: Duration) -> Result<Option<Self>> {
        let Some(text) = factor else { return Ok(None) };
        let factor = text.parse().map_err(|_| {
            Error::argument(format!(
                "RINGSIGHT_ADAPTIVE_TIMEOUT={text} is not a whole number: how many times as long as usual is too long; 0: off"
            ))
        })?;
        Ok((factor > 0).then_some(Self { factor, floor }))
    }
}

/// When the watchdog reports, and what a report does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// How long an operation may be in progress before its other ranks are asked.
    pub(crate) threshold: Duration,
    /// How long a rank may be late before that is a hang.
    pub(crate) arrival: Duration,
    /// How long an operation that all ranks have come to may take where nothing tells what moves. Each of its bytes adds a
    /// nanosecond.
    pub(crate) stuck: Duration,
    /// The longest time from one look to the next.
    pub(crate) interval: Duration,
    pub(crate) action: Action,
    pub(crate) source: ProgressSource,
    /// `None` if all operations have the same threshold.
    pub(crate) adaptive: Option<AdaptiveThreshold>,
}

/// The longest rest with adaptive thresholds: a verdict is promised one second after the threshold, and more looks would cost
/// processor time while nothing happens.
const ADAPTIVE_REST: Duration = Duration::from_millis(250);

/// The shortest time from one look to the next.
pub(crate) const SHORTEST_INTERVAL: Duration = Duration::from_millis(50);

impl Settings {
    /// Reads the settings of a communicator with this name; `None` if its watchdog is off.
    ///
    /// # Errors
    /// A variable has a value without a meaning.
    pub(crate) fn read(communicator: &str) -> Result<Option<Self>> {
        let threshold = milliseconds("NCCL_KERNEL_TIMEOUT_MS", 2000)?;
        let named = env::text(NAMED).map_or(Ok(None), |text| threshold_by_name(&text, communicator))?;
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
            interval: milliseconds("RINGSIGHT_WATCHDOG_INTERVAL_MS", 1000)?.max(SHORTEST_INTERVAL),
            action,
            adaptive: AdaptiveThreshold::parse(
                env::text("RINGSIGHT_ADAPTIVE_TIMEOUT").as_deref(),
                milliseconds("RINGSIGHT_ADAPTIVE_FLOOR_MS", 100)?,
            )?,
            source: ProgressSource::parse(env::text("RINGSIGHT_WATCHDOG_SOURCE").as_deref())?,
        };
        Ok((!threshold.is_zero()).then_some(settings))
    }

    /// The longest time from one query of events to the next. An operation counts as begun when a query sees it.
    pub(crate) fn query_interval(&self) -> Duration {
        (self.interval / 4)
            .min(self.shortest_threshold() / 8)
            .clamp(Duration::from_millis(20), Duration::from_millis(250))
    }

    /// How long the watchdog rests while no operation is near its threshold: short enough to see an operation well before
    /// its threshold, or with adaptive thresholds soon after the shortest one.
    pub(crate) fn rest(&self) -> Duration {
        let longest = self.adaptive.map_or(Duration::MAX, |_| ADAPTIVE_REST);
        self.interval
            .min(self.threshold / 2)
            .min(longest)
            .max(SHORTEST_INTERVAL)
    }

    /// The shortest threshold that an operation may have.
    fn shortest_threshold(&self) -> Duration {
        self.adaptive
            .map_or(self.threshold, |adaptive| adaptive.floor.min(self.threshold))
    }
}

/// The variable with thresholds by communicator name: `name=milliseconds`, separated by commas.
const NAMED: &str = "RINGSIGHT_KERNEL_TIMEOUTS_MS";

/// The threshold that a list gives a communicator; the last entry of its name counts. Every entry must be readable.
fn threshold_by_name(list: &str, communicator: &str) -> Result<Option<Duration>> {
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
    Ok(Duration::from_millis(env::number(name)?.unwrap_or(default)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_turns_adaptive_thresholds_on() {
        let floor = Duration::from_millis(7);
        let parse = |text| AdaptiveThreshold::parse(text, floor).map_err(|error| error.text);
        assert_eq!(parse(None), Ok(None));
        assert_eq!(parse(Some("0")), Ok(None));
        assert_eq!(
            parse(Some("20")),
            Ok(Some(AdaptiveThreshold { factor: 20, floor }))
        );
        for rubbish in ["yes", "-1", "1.5"] {
            assert!(parse(Some(rubbish)).unwrap_err().contains(rubbish));
        }
    }

    #[test]
    fn the_rest_is_short_enough_for_the_threshold() {
        let floor = Duration::from_millis(100);
        let settings = |threshold_ms, adaptive| Settings {
            threshold: Duration::from_millis(threshold_ms),
            arrival: Duration::from_secs(600),
            stuck: Duration::from_secs(60),
            interval: Duration::from_secs(1),
            action: Action::Report,
            source: ProgressSource::Pages,
            adaptive,
        };
        let adaptive = Some(AdaptiveThreshold { factor: 20, floor });
        let rest_ms = |threshold_ms, adaptive| settings(threshold_ms, adaptive).rest().as_millis();
        assert_eq!((rest_ms(2000, None), rest_ms(300, None)), (1000, 150));
        assert_eq!((rest_ms(2000, adaptive), rest_ms(300, adaptive)), (250, 150));
    }

    #[test]
    fn an_unknown_source_is_refused() {
        let parse = |value| ProgressSource::parse(value).map_err(|error| error.text);
        assert_eq!(parse(None), Ok(ProgressSource::Pages));
        assert_eq!(parse(Some("pages")), Ok(ProgressSource::Pages));
        assert_eq!(parse(Some("events")), Ok(ProgressSource::Events));
        for rubbish in ["Events", "pages,events", "1"] {
            let text = parse(Some(rubbish)).unwrap_err();
            assert!(
                text.contains(rubbish) && text.contains("pages and events"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_communicator_s_name_may_give_it_a_threshold() {
        let of = |list, name| {
            let threshold = threshold_by_name(list, name).unwrap();
            threshold.map(|threshold| threshold.as_millis())
        };
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "tp"), Some(5000));
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "dp"), Some(0));
        assert_eq!(of("tp=5000, dp = 0,a=b=7,", "a=b"), Some(7));
        assert_eq!(of("tp=5000,tp=1", "tp"), Some(1));
        assert_eq!(of("tp=5000", ""), None);
        for rubbish in ["tp", "tp=", "tp=5s", "tp=-1", "x=1,tp"] {
            let text = threshold_by_name(rubbish, "other").unwrap_err().text;
            assert!(text.contains("tp") && text.contains(NAMED), "{text}");
        }
    }
}
