//! Times and thresholds, and the environment variables that set them.

use std::{fmt, time::Duration};

/// Times and thresholds of all connections of a process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Whether a connection survives a failed path. If not, it fails when its device reports that it cannot go on, when the device's
    /// retries are over, or after [`Settings::timeout_alone`] plus [`Settings::give_up`], whichever is first. `RINGSIGHT_NET_FAILOVER`, by
    /// default 1; where that is not set, `NCCL_ENABLE_FAULT_TOLERANCE`.
    pub enabled: bool,
    /// Whether a connection returns to a better path once that is proven good, although another one works. `RINGSIGHT_NET_FAILBACK`, by
    /// default 1.
    pub failback: bool,
    /// How long work requests may neither complete nor fail. `RINGSIGHT_NET_TIMEOUT_MS`, by default 1000. The NIC's own limit
    /// ([`transport_timeout`]) is usually far longer, and soft-RoCE with seven retries has none.
    pub timeout: Duration,
    /// As [`Settings::timeout`], for a connection with one path, which has no other to switch to. As long as its device retries
    /// ([`transport_timeout`]), if that is longer; where `RINGSIGHT_NET_TIMEOUT_MS` is set, that.
    pub timeout_alone: Duration,
    /// How long an end waits for the peer with nothing outstanding before it probes the path. `RINGSIGHT_NET_PROBE_MS`, by
    /// default 1000.
    pub probe: Duration,
    /// How long an operation may wait for a recovery before the communicator fails: 10 s, or as long as a device retries, if that is
    /// longer; where `RINGSIGHT_NET_GIVE_UP_MS` is set, that.
    pub give_up: Duration,
    /// First interval after which an unanswered message is repeated. It doubles each time, up to [`Settings::RESEND_MAX`].
    /// `RINGSIGHT_NET_RESEND_MS`, by default 20.
    pub resend: Duration,
    /// First back-off: how long a failed path is left alone. It doubles with each failure. `RINGSIGHT_NET_BACKOFF_MS`, by default 100.
    pub backoff: Duration,
    /// Longest back-off. The number of attempts is not limited. `RINGSIGHT_NET_BACKOFF_MAX_MS`, by default (and at most)
    /// 30000.
    pub backoff_max: Duration,
    /// Successive probes that prove a rebuilt path. `RINGSIGHT_NET_PROBATION_PROBES`, by default 3.
    pub probation_probes: u8,
    /// Time between these probes. `RINGSIGHT_NET_PROBATION_MS`, by default 50.
    pub probation: Duration,
    /// How long a path must work before its failures are forgotten. `RINGSIGHT_NET_RECOVERY_WINDOW_MS`, by default 5000.
    pub recovery_window: Duration,
    /// How many connections must fail over the same two ports before all others leave them without probing.
    /// `RINGSIGHT_NET_CONDEMN_AFTER`, by default 2.
    pub condemn_after: u32,
    /// Whether a connection leaves a path when the device reports that one of its queues, or the device itself, cannot go on.
    /// `NCCL_IB_RETURN_ASYNC_EVENTS`, by default 1.
    pub async_events: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            failback: true,
            timeout: Duration::from_millis(1000),
            timeout_alone: Self::RETRY_TIME,
            probe: Duration::from_millis(1000),
            give_up: Self::RETRY_TIME,
            resend: Duration::from_millis(20),
            backoff: Duration::from_millis(100),
            backoff_max: Self::BACKOFF_LIMIT,
            probation_probes: 3,
            probation: Duration::from_millis(50),
            recovery_window: Duration::from_millis(5000),
            condemn_after: 2,
            async_events: true,
        }
    }
}

/// An environment variable with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    name: &'static str,
    value: String,
    accepted: &'static str,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={} is not {}", self.name, self.value, self.accepted)
    }
}

impl std::error::Error for SettingsError {}

/// Reads variables by a function that returns `None` for one that is not set, and one that parses the number of a variable.
struct Variables<F, P>(F, P);

impl<F: Fn(&str) -> Option<String>, P: Fn(&str, &str) -> Option<u64>> Variables<F, P> {
    fn switch(&self, name: &'static str) -> Result<Option<bool>, SettingsError> {
        let Some(value) = (self.0)(name) else {
            return Ok(None);
        };
        match value.as_str() {
            "0" => Ok(Some(false)),
            "1" => Ok(Some(true)),
            _ => Err(SettingsError {
                name,
                value,
                accepted: "0 or 1",
            }),
        }
    }

    fn number(&self, name: &'static str, default: u64, least: u64, most: u64) -> Result<u64, SettingsError> {
        let Some(value) = (self.0)(name) else {
            return Ok(default);
        };
        match (self.1)(name, &value) {
            Some(number) if (least..=most).contains(&number) => Ok(number),
            _ => Err(SettingsError {
                name,
                value,
                accepted: match (least, most) {
                    (_, u64::MAX) if least > 0 => "a number of at least 1",
                    (0, u64::MAX) => "a number",
                    _ => "a number in range",
                },
            }),
        }
    }

    fn time(&self, name: &'static str, default: Duration, least: u64) -> Result<Duration, SettingsError> {
        self.number(name, default.as_millis() as u64, least, u64::from(u32::MAX))
            .map(Duration::from_millis)
    }
}

impl Settings {
    /// How long a device retries with NCCL's defaults.
    const RETRY_TIME: Duration = Duration::from_nanos((4096 << 20) * 8);
    /// Lower bound of [`Settings::give_up`] unless the variable sets it.
    const GIVE_UP_LEAST: Duration = Duration::from_secs(10);
    /// Upper bound of [`Settings::backoff_max`].
    pub const BACKOFF_LIMIT: Duration = Duration::from_secs(30);
    /// Upper bound of the interval between two copies of a message.
    pub const RESEND_MAX: Duration = Duration::from_secs(1);

    /// Reads the settings from the environment: `get` reads one variable, `parse` gives the number that the value of a name is.
    ///
    /// # Errors
    /// The first variable with an invalid value.
    pub fn read(
        get: impl Fn(&str) -> Option<String>,
        parse: impl Fn(&str, &str) -> Option<u64>,
    ) -> Result<Self, SettingsError> {
        let defaults = Self::default();
        let from = Variables(get, parse);
        let enabled = match from.switch("RINGSIGHT_NET_FAILOVER")? {
            Some(enabled) => enabled,
            None => from
                .switch("NCCL_ENABLE_FAULT_TOLERANCE")?
                .unwrap_or(defaults.enabled),
        };
        // Device set-up reports an invalid value of these two.
        let exponent = from.number("NCCL_IB_TIMEOUT", 20, 0, 31).unwrap_or(20);
        let retries = from.number("NCCL_IB_RETRY_CNT", 7, 0, 7).unwrap_or(7);
        // A device that retries for ever is treated like the default.
        let retry_time = transport_timeout(exponent as u8, retries as u8).unwrap_or(Self::RETRY_TIME);
        let at_least_retry_time = |name, usual: Duration| match (from.0)(name) {
            Some(_) => usual,
            None => usual.max(retry_time),
        };
        let timeout = from.time("RINGSIGHT_NET_TIMEOUT_MS", defaults.timeout, 1)?;
        let give_up = from.time("RINGSIGHT_NET_GIVE_UP_MS", Self::GIVE_UP_LEAST, 1)?;
        let backoff_max = from.time("RINGSIGHT_NET_BACKOFF_MAX_MS", defaults.backoff_max, 1)?;
        let backoff_max = backoff_max.min(Self::BACKOFF_LIMIT);
        Ok(Self {
            enabled,
            failback: from
                .switch("RINGSIGHT_NET_FAILBACK")?
                .unwrap_or(defaults.failback),
            timeout,
            timeout_alone: at_least_retry_time("RINGSIGHT_NET_TIMEOUT_MS", timeout),
            probe: from.time("RINGSIGHT_NET_PROBE_MS", defaults.probe, 1)?,
            give_up: at_least_retry_time("RINGSIGHT_NET_GIVE_UP_MS", give_up),
            resend: from
                .time("RINGSIGHT_NET_RESEND_MS", defaults.resend, 1)?
                .min(Self::RESEND_MAX),
            backoff: from
                .time("RINGSIGHT_NET_BACKOFF_MS", defaults.backoff, 1)?
                .min(backoff_max),
            backoff_max,
            probation_probes: from.number("RINGSIGHT_NET_PROBATION_PROBES", 3, 1, 255)? as u8,
            probation: from.time("RINGSIGHT_NET_PROBATION_MS", defaults.probation, 0)?,
            recovery_window: from.time("RINGSIGHT_NET_RECOVERY_WINDOW_MS", defaults.recovery_window, 0)?,
            condemn_after: from.number("RINGSIGHT_NET_CONDEMN_AFTER", 2, 1, u64::from(u32::MAX))? as u32,
            async_events: from
                .switch("NCCL_IB_RETURN_ASYNC_EVENTS")?
                .unwrap_or(defaults.async_events),
        })
    }
}

/// How long a NIC retries before a work request fails with "transport retries exceeded": `retries + 1` tries of
/// 4.096 µs × 2^`timeout` each. `None` if it never gives up (exponent 0 disables the timer).
///
/// NCCL's defaults, 20 and 7 (`NCCL_IB_TIMEOUT`, `NCCL_IB_RETRY_CNT`), are 8 × 4.295 s = 34.4 s; 18 and 7 are 8.6 s, 14 and 7 are
/// 537 ms. InfiniBand (volume 1, 9.7.6.1.3) lets a NIC wait up to four times as long per try, and soft-RoCE takes a retry count of
/// 7 to be infinite.
#[must_use]
pub fn transport_timeout(timeout: u8, retries: u8) -> Option<Duration> {
    // Five bits and three bits in the queue pair's attributes.
    let (timeout, retries) = (timeout.min(31), retries.min(7));
    (timeout > 0).then(|| Duration::from_nanos(4096 << timeout) * (u32::from(retries) + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let get = |name: &str| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        Settings::read(get, |_, text| text.parse().ok())
    }

    #[test]
    fn variables_set_their_field_and_invalid_values_are_named() {
        assert_eq!(with(&[]), Ok(Settings::default()));
        assert!(!with(&[("NCCL_ENABLE_FAULT_TOLERANCE", "0")]).unwrap().enabled);
        let both = [
            ("NCCL_ENABLE_FAULT_TOLERANCE", "0"),
            ("RINGSIGHT_NET_FAILOVER", "1"),
        ];
        assert!(with(&both).unwrap().enabled);
        assert_eq!(
            with(&[("RINGSIGHT_NET_TIMEOUT_MS", "250")])
                .unwrap()
                .timeout
                .as_millis(),
            250
        );
        let silent = with(&[("NCCL_IB_RETURN_ASYNC_EVENTS", "0")]).unwrap();
        assert!(!silent.async_events && silent.enabled);
        let long = with(&[("RINGSIGHT_NET_BACKOFF_MAX_MS", "3000000")]).unwrap();
        assert_eq!(long.backoff_max, Settings::BACKOFF_LIMIT);
        for (name, value) in [
            ("RINGSIGHT_NET_FAILOVER", "yes"),
            ("NCCL_ENABLE_FAULT_TOLERANCE", "2"),
            ("RINGSIGHT_NET_TIMEOUT_MS", "0"),
            ("RINGSIGHT_NET_TIMEOUT_MS", "1s"),
            ("RINGSIGHT_NET_PROBATION_PROBES", "256"),
            ("RINGSIGHT_NET_CONDEMN_AFTER", "-1"),
            ("NCCL_IB_RETURN_ASYNC_EVENTS", "2"),
        ] {
            let error = with(&[(name, value)]).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{name}={value} is not")), "{error}");
        }
    }

    #[test]
    fn timeouts_cover_the_devices_retries() {
        let times = |variables: &[(&str, &str)]| {
            let settings = with(variables).unwrap();
            (settings.timeout_alone.as_millis(), settings.give_up.as_millis())
        };
        assert_eq!(times(&[]), (34_359, 34_359));
        assert_eq!(times(&[("NCCL_IB_TIMEOUT", "18")]), (8_589, 10_000));
        assert_eq!(
            times(&[("NCCL_IB_TIMEOUT", "14"), ("NCCL_IB_RETRY_CNT", "0")]),
            (1000, 10_000)
        );
        // No timer, and an invalid value.
        assert_eq!(times(&[("NCCL_IB_TIMEOUT", "0")]), (34_359, 34_359));
        assert_eq!(times(&[("NCCL_IB_RETRY_CNT", "x")]), (34_359, 34_359));
        let own = [
            ("RINGSIGHT_NET_TIMEOUT_MS", "250"),
            ("RINGSIGHT_NET_GIVE_UP_MS", "500"),
        ];
        assert_eq!(times(&own), (250, 500));
    }

    #[test]
    fn transport_timeout_covers_all_tries() {
        let milliseconds =
            |timeout, retries| transport_timeout(timeout, retries).map(|time| time.as_millis());
        assert_eq!(milliseconds(20, 7), Some(34_359));
        assert_eq!(milliseconds(18, 7), Some(8_589));
        assert_eq!(milliseconds(14, 7), Some(536));
        assert_eq!(milliseconds(14, 6), Some(469));
        assert_eq!(milliseconds(0, 7), None);
    }
}
