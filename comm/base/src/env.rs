//! Environment variables: every variable but those of the log is read here, named in errors, and logged when it is set.
//! docs/src/environment.md lists them all.

use crate::error::{Error, Result};

/// The value of a variable without spaces around it; `None` if it is unset or blank.
#[must_use]
pub fn text(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    if value.is_empty() {
        return None;
    }
    crate::log::set_by_environment(name, &value);
    Some(value)
}

/// Whether a switch is on: any value but 0 turns it on. Returns `default` if the variable is unset.
#[must_use]
pub fn switch(name: &str, default: bool) -> bool {
    text(name).map_or(default, |value| value != "0")
}

/// The value of a variable as a number; `None` if it is unset or blank.
///
/// # Errors
/// [`InvalidArgument`](crate::error::ResultCode::InvalidArgument) if the value is not a number, or out of range.
pub fn number<T: std::str::FromStr>(name: &str) -> Result<Option<T>> {
    number_in(&text, &[name])
}

/// The first of the variables `names` that `environment` has, as a number.
///
/// # Errors
/// As of [`number`].
pub fn number_in<T: std::str::FromStr>(
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
