//! Processes and the host, as `/proc` shows them.

use crate::sys::read_text;

/// Whether a process goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// It runs or sleeps.
    Alive,
    /// It is stopped by a signal.
    Stopped,
    /// A debugger holds it.
    Traced,
    /// It has ended, and nobody has waited for it yet.
    Ended,
}

/// What `/proc/<pid>/stat` shows of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Whether it goes on.
    pub state: State,
    /// When it started, in clock ticks since boot. Process number and start time together name a process for good.
    pub start_time: u64,
}

impl Stat {
    /// Of a process of this pid namespace; `None` if there is none with that number.
    #[must_use]
    pub fn of(pid: u32) -> Option<Self> {
        Self::parse(&read_text(format!("/proc/{pid}/stat")).ok()?)
    }

    /// Of this process; `None` where there is no `/proc`.
    #[must_use]
    pub fn own() -> Option<Self> {
        Self::parse(&read_text("/proc/self/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name (field 2) may hold spaces and parentheses; after its last ')' comes field 3.
        let (_, after_name) = text.rsplit_once(')')?;
        let mut fields = after_name.split_ascii_whitespace();
        let state = match fields.next()? {
            "T" => State::Stopped,
            "t" => State::Traced,
            "Z" | "X" | "x" => State::Ended,
            _ => State::Alive,
        };
        let start_time = fields.nth(22 - 4)?.parse().ok()?;
        Some(Self { state, start_time })
    }
}

/// Whether a debugger has taken this process, and may hold it at any time.
#[must_use]
pub fn is_traced() -> bool {
    read_text("/proc/self/status").is_ok_and(|status| tracer(&status) > 0)
}

/// The process that traces the one of that status; 0 for none.
fn tracer(status: &str) -> u32 {
    let mut lines = status.lines();
    let number = lines.find_map(|line| line.strip_prefix("TracerPid:"));
    number.and_then(|number| number.trim().parse().ok()).unwrap_or(0)
}

/// This machine's host name; "unknown" if it has none.
#[must_use]
pub fn host_name() -> String {
    let name = read_text("/proc/sys/kernel/hostname").unwrap_or_default();
    match name.trim() {
        "" => "unknown".to_owned(),
        name => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracer_is_read() {
        assert_eq!(tracer("Name:\tx\nTracerPid:\t4711\nUid:\t0\n"), 4711);
        for none in [
            "Name:\tx\nTracerPid:\t0\n",
            "Name:\tTracerPid\n",
            "TracerPid:\n",
            "",
        ] {
            assert_eq!(tracer(none), 0, "{none}");
        }
        assert!(!is_traced());
    }

    #[test]
    fn states_and_start_times_are_read_whatever_the_name() {
        let text = |name: &str, state: &str| {
            format!("12 ({name}) {state} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21\n")
        };
        for (name, state, expected) in [
            ("rank", "R", State::Alive),
            ("a b) S (", "T", State::Stopped),
            (")", "t", State::Traced),
            ("", "Z", State::Ended),
        ] {
            let stat = Stat {
                state: expected,
                start_time: 4711,
            };
            assert_eq!(Stat::parse(&text(name, state)), Some(stat));
        }
        for rubbish in ["", "12 (x", "12 (x) S 1 2 3", "12 (x)"] {
            assert_eq!(Stat::parse(rubbish), None);
        }
        let own = Stat::own().unwrap();
        assert_eq!(Stat::of(std::process::id()), Some(own));
        assert!(own.state == State::Alive && own.start_time > 0);
    }
}
