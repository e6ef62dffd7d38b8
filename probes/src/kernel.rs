//! The running kernel.

use crate::host;

/// Major and minor version of the running kernel, (0, 0) if `/proc` does not say.
#[must_use]
pub fn version() -> (u32, u32) {
    host::text("/proc/sys/kernel/osrelease").map_or((0, 0), |text| parse_version(&text))
}

fn parse_version(text: &str) -> (u32, u32) {
    let mut numbers = text
        .split(|c: char| !c.is_ascii_digit())
        .map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(parse_version("6.18.44-fc-v669\n"), (6, 18));
        assert_eq!(parse_version("5.15"), (5, 15));
        assert_eq!(parse_version("rubbish"), (0, 0));
    }
}
