//! Environment variables: read here and nowhere else (but for logging's own), named in errors, told in the log.
//! docs/src/environment.md lists them all.

use std::str::FromStr;

/// The value of a variable; `None` if it is unset or blank.
pub(crate) fn text(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    if value.is_empty() {
        return None;
    }
    crate::log::set_by_environment(name, &value);
    Some(value)
}

/// What `convert` makes of the number in a variable, or of `default`; what is no number is warned of and passed over.
pub(crate) fn number_or<N: FromStr, T>(name: &str, default: N, convert: impl FnOnce(N) -> T) -> T {
    convert(
        text(name)
            .and_then(|value| {
                value
                    .parse()
                    .inspect_err(|_| {
                        tracing::warn!(target: crate::log::ENV, "{name}={value} is not a number in range and is ignored");
                    })
                    .ok()
            })
            .unwrap_or(default),
    )
}
