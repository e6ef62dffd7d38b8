//! Environment variables: read here and nowhere else (but for logging's own), named in errors, told in the log.
//! docs/src/environment.md lists them all.

use crate::error::{Error, Result};

/// The value of a variable; `None` if it is unset or blank.
pub(crate) fn text(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    if value.is_empty() {
        return None;
    }
    crate::log::set_by_environment(name, &value);
    Some(value)
}

/// The same as a switch: anything but 0 is on. What it is where it is unset, is `otherwise`.
pub(crate) fn switch(name: &str, otherwise: bool) -> bool {
    text(name).map_or(otherwise, |value| value != "0")
}

/// The same as a number.
///
/// # Errors
/// It is none, or none in range.
pub(crate) fn number<T: std::str::FromStr>(name: &str) -> Result<Option<T>> {
    number_in(&text, &[name])
}

/// The first of `names` that an environment has, as a number.
///
/// # Errors
/// As of [`number`].
pub(crate) fn number_in<T: std::str::FromStr>(
    environment: &dyn Fn(&str) -> Option<String>,
    names: &[&str],
) -> Result<Option<T>> {
    let of = |name| environment(name).filter(|text| !text.trim().is_empty());
    let Some((name, text)) = names.iter().find_map(|name| Some((name, of(name)?))) else {
        return Ok(None);
    };
    text.trim().parse().map(Some).map_err(|_| {
        Error::argument(format!(
            "environment variable {name}={text} is not a number in range"
        ))
    })
}
