//! Texts of `/proc/PID`: `stat` and `status`.

/// Field 22 of a `stat` line, the start time in clock ticks since boot; `None` for a zombie. The name in field 2 may hold anything, so
/// fields are counted from its closing parenthesis.
pub(crate) fn parse_stat(stat: &str) -> Option<u64> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// Field 52 of the `stat` line of a zombie: how it ended, as `waitpid` has it. The kernel shows 0 to those who may not look into the process.
pub(crate) fn parse_end(stat: &str) -> Option<i32> {
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_ascii_whitespace();
    if fields.next()? != "Z" {
        return None;
    }
    fields.nth(48)?.parse().ok()
}

/// The rest of the line of a `status` text that begins with `name`.
pub(crate) fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_a_zombies() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = |state: &str| format!("77 (a) b) (c) {state} {}", fields.join(" "));
        assert_eq!((parse_end(&stat("Z")), parse_end(&stat("S"))), (Some(52), None));
        assert_eq!(parse_end("77 (a) Z 1"), None);
    }

    #[test]
    fn start_time_is_counted_from_the_last_parenthesis() {
        let fields: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = |state: &str| format!("77 (a) b) (c) {state} {}", fields.join(" "));
        assert_eq!(parse_stat(&stat("S")), Some(22));
        assert_eq!(
            parse_stat(&stat("Z")),
            None,
            "a zombie reads and writes nothing any more"
        );
        assert_eq!(parse_stat("77 (short) S 1 2"), None);
        assert_eq!(parse_stat(""), None);
    }
}
